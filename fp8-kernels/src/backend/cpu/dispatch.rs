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
