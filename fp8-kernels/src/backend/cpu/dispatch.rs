//! Code compiled for more CPU features than the target has.
#![expect(unsafe_code, reason = "run-time dispatch by the features of the CPU; see each SAFETY line")]

use super::matmul::CpuPath;

/// Work that is compiled once for each set of instructions.
///
/// Closures are kernels, but the compiler need not inline a long one where the features are, and then its `mul_add`s are
/// calls and its vectors are short: hot loops are types of their own, with `run` and all below it `#[inline(always)]`.
pub(crate) trait Kernel {
    type Output;

    fn run(self) -> Self::Output;
}

impl<R, F: FnOnce() -> R> Kernel for F {
    type Output = R;

    #[inline(always)]
    fn run(self) -> R {
        self()
    }
}

/// Runs `kernel` with the instructions of [`CpuPath::current`].
///
/// The bits are the same on every path: loops become vectors, but no sum is reordered. `mul_add` is one instruction with FMA,
/// and otherwise calls a correctly rounded function, which is slow.
#[inline]
pub(crate) fn vectorized<K: Kernel>(kernel: K) -> K::Output {
    // A path that this CPU does not have is an error of the matrix product.
    let path = CpuPath::current().unwrap_or(CpuPath::Scalar);
    // SAFETY: `current` returns a path that is available.
    unsafe { on(path, kernel) }
}

/// Runs `kernel` with the instructions of `path`.
///
/// # Safety
/// `path` must be available.
#[inline]
pub(crate) unsafe fn on<K: Kernel>(path: CpuPath, kernel: K) -> K::Output {
    match path {
        // SAFETY: the caller promises AVX2 and FMA.
        #[cfg(target_arch = "x86_64")]
        CpuPath::Avx2 => unsafe { with_avx2(kernel) },
        // SAFETY: the caller promises AVX-512 F, BW, DQ and VL, AVX2 and FMA.
        #[cfg(target_arch = "x86_64")]
        CpuPath::Avx512 | CpuPath::Avx512Bf16 => unsafe { with_avx512(kernel) },
        _ => kernel.run(),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn with_avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn with_avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}

/// Returns the output of each path of this CPU, for the kernel that `make` makes.
#[cfg(test)]
pub(crate) fn on_each_path<K: Kernel>(mut make: impl FnMut() -> K) -> Vec<(CpuPath, K::Output)> {
    let run = |path| {
        // SAFETY: the path is available.
        let output = unsafe { on(path, make()) };
        (path, output)
    };
    CpuPath::available().map(run).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::backend::cpu::lanes;
    use crate::math;

    /// Ordinary values among subnormals, zeros, infinities and NaN.
    pub(crate) fn values(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut draw = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            match state >> 26 {
                0 => f32::from_bits(state & 0x807F_FFFF),
                1 => 0.0f32.copysign(f32::from_bits(state << 7)),
                2 if state & 0x100 == 0 => f32::INFINITY.copysign(f32::from_bits(state << 7)),
                3 if state & 0x100 == 0 => f32::NAN,
                _ => ((state >> 8) as f32 / (1 << 23) as f32 - 1.0) * 20.0,
            }
        };
        (0..len).map(|_| draw()).collect()
    }

    /// The bits of all values; all NaNs are one.
    pub(crate) fn bits(values: impl IntoIterator<Item = f32>) -> Vec<u32> {
        values.into_iter().map(|v| if v.is_nan() { f32::NAN.to_bits() } else { v.to_bits() }).collect()
    }

    struct Functions<'a>(&'a [f32], &'a [f32]);

    impl Kernel for Functions<'_> {
        type Output = Vec<f32>;

        #[inline(always)]
        fn run(self) -> Vec<f32> {
            let Self(a, b) = self;
            let mut out: Vec<f32> = a.iter().map(|&v| math::exp(v)).collect();
            out.extend(a.iter().map(|&v| math::tanh(v)));
            out.extend(a.iter().map(|&v| math::sigmoid(v)));
            out.extend([lanes::sum(a), lanes::dot(a, b), lanes::max(a), lanes::sum_of_squares(a) as f32]);
            out
        }
    }

    #[test]
    fn functions_and_sums_have_the_same_bits_on_each_path() {
        for (len, seed) in (1..=70).flat_map(|len| (0..8).map(move |seed| (len, seed))) {
            let (a, b) = (values(len, seed), values(len, seed + 100));
            let want = bits(Functions(&a, &b).run());
            for (path, got) in on_each_path(|| Functions(&a, &b)) {
                assert_eq!(bits(got), want, "{path}: {len} values of seed {seed}");
            }
        }
    }
}
