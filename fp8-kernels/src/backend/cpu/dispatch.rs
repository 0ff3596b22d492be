//! The two calls of this backend that the compiler cannot check: code compiled for more CPU features than the target
//! has, and the matrix product of the `gemm` crate.
#![expect(unsafe_code, reason = "run-time CPU feature dispatch and the call of gemm; see each SAFETY line")]

use std::sync::OnceLock;

/// A strided view of a matrix inside a slice.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Strided<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) row_stride: usize,
    pub(crate) col_stride: usize,
}

/// Work that is compiled once for each [`Path`].
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

/// The instructions that kernels use, from the slowest to the fastest. All give the same bits: loops become vectors, but no
/// sum is reordered, and `mul_add` is correctly rounded everywhere, though slow where it is a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Path {
    /// Those of the compilation target.
    Target,
    /// AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, CD, DQ and VL.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Path {
    #[cfg(target_arch = "x86_64")]
    const ALL: [Self; 3] = [Self::Target, Self::Avx2, Self::Avx512];
    #[cfg(not(target_arch = "x86_64"))]
    const ALL: [Self; 1] = [Self::Target];

    /// Returns the fastest path of this CPU, which is determined once.
    #[inline]
    fn current() -> Self {
        static CURRENT: OnceLock<Path> = OnceLock::new();
        *CURRENT.get_or_init(|| Self::available().next_back().unwrap_or(Self::Target))
    }

    /// Iterates over the paths of this CPU.
    pub(crate) fn available() -> impl DoubleEndedIterator<Item = Self> {
        Self::ALL.into_iter().filter(|path| path.is_available())
    }

    fn is_available(self) -> bool {
        match self {
            Self::Target => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512cd")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
        }
    }
}

/// Runs `kernel` with the fastest instructions of this CPU.
#[inline]
pub(crate) fn vectorized<K: Kernel>(kernel: K) -> K::Output {
    match Path::current() {
        Path::Target => kernel.run(),
        // SAFETY: the CPU has the features that the function is compiled for: `current` returns a path that is available.
        #[cfg(target_arch = "x86_64")]
        Path::Avx2 => unsafe { with_avx2(kernel) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Path::Avx512 => unsafe { with_avx512(kernel) },
    }
}

/// Runs `kernel` with the instructions of `path`, which must be available: for tests that compare the paths.
#[cfg(test)]
pub(crate) fn on<K: Kernel>(path: Path, kernel: K) -> K::Output {
    assert!(path.is_available(), "{path:?}");
    match path {
        Path::Target => kernel.run(),
        // SAFETY: the CPU has the features that the function is compiled for, as was just checked.
        #[cfg(target_arch = "x86_64")]
        Path::Avx2 => unsafe { with_avx2(kernel) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Path::Avx512 => unsafe { with_avx512(kernel) },
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn with_avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx2,fma")]
fn with_avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}

/// `out[m, n] = a[m, k] · b[k, n]`, plus what `out` holds if `accumulate`. Row-major `out`.
///
/// The order of each sum depends on the shape alone: `gemm` cuts the product into tiles by shape and gives whole tiles
/// to threads.
pub(crate) fn gemm_f32(dims: [usize; 3], a: Strided<'_>, b: Strided<'_>, out: &mut [f32], accumulate: bool) {
    gemm(dims, a, b, out, accumulate, gemm::Parallelism::Rayon(0));
}

/// [`gemm_f32`] on the calling thread: for small products inside a task.
pub(crate) fn gemm_f32_serial(
    dims: [usize; 3],
    a: Strided<'_>,
    b: Strided<'_>,
    out: &mut [f32],
    accumulate: bool,
) {
    gemm(dims, a, b, out, accumulate, gemm::Parallelism::None);
}

fn gemm(
    [m, n, k]: [usize; 3],
    a: Strided<'_>,
    b: Strided<'_>,
    out: &mut [f32],
    accumulate: bool,
    parallelism: gemm::Parallelism,
) {
    // Whether the last element of a matrix, at the largest offset, is in its slice.
    let fits = |x: &Strided<'_>, rows: usize, cols: usize| {
        let last_row = (rows - 1).checked_mul(x.row_stride);
        let last_col = (cols - 1).checked_mul(x.col_stride);
        let last = last_row.zip(last_col).and_then(|(row, col)| row.checked_add(col));
        last.is_some_and(|last| last < x.data.len())
    };
    if m == 0 || n == 0 {
        return;
    }
    if k == 0 {
        if !accumulate {
            out.fill(0.0);
        }
        return;
    }
    // Not reachable from the operations, which check shapes; it keeps the call below sound on its own.
    assert!(fits(&a, m, k) && fits(&b, k, n) && m.checked_mul(n).is_some_and(|len| len <= out.len()));
    let stride = |stride: usize| stride as isize;
    // SAFETY: `out` holds m·n elements and is borrowed uniquely; the largest offsets into `a` and `b` were just checked
    // against their lengths, and all offsets in between are smaller because strides are not negative.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            stride(n),
            accumulate,
            a.data.as_ptr(),
            stride(a.col_stride),
            stride(a.row_stride),
            b.data.as_ptr(),
            stride(b.col_stride),
            stride(b.row_stride),
            1.0f32,
            1.0f32,
            false,
            false,
            false,
            parallelism,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_product_whose_size_overflows_is_not_computed() {
        let (data, mut out) = ([1.0], []);
        let one = Strided { data: &data, row_stride: 0, col_stride: 0 };
        let far = Strided { row_stride: 1 << 32, col_stride: 1 << 32, ..one };
        for (dims, a) in [([1 << 32, 1 << 32, 1], one), ([1 << 32, 1, 1 << 32], far)] {
            let computed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                gemm_f32_serial(dims, a, one, &mut out, true);
            }));
            assert!(computed.is_err(), "{dims:?}");
        }
    }
}
