//! The two calls of this backend that the compiler cannot check: code compiled for more CPU features than the target
//! has, and the matrix product of the `gemm` crate.
#![expect(unsafe_code, reason = "run-time CPU feature dispatch and the call of gemm; see each SAFETY line")]

/// A strided view of a matrix inside a slice.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Strided<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) row_stride: usize,
    pub(crate) col_stride: usize,
}

/// Work that is compiled twice, plainly and for AVX2 and FMA.
///
/// Closures are kernels, but the compiler need not inline a long one where the features are, and then its `mul_add`s are
/// calls: hot loops over `math` are types of their own, with `run` and all below it `#[inline(always)]`.
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

/// Runs `kernel`, compiled with AVX2 and FMA where the CPU has both.
///
/// `mul_add` is one instruction then, and loops become vectors. The bits are the same either way: without the feature
/// `mul_add` calls a correctly rounded function, slowly.
#[inline]
pub(crate) fn vectorized<K: Kernel>(kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
        // SAFETY: the CPU has the two features that `with_fma` is compiled for; they were just detected.
        return unsafe { with_fma(kernel) };
    }
    kernel.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn with_fma<K: Kernel>(kernel: K) -> K::Output {
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
