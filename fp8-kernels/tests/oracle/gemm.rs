//! Three loops.

use super::fp8::transpose;
use fp8_kernels::ops::Layout;

/// `a · b` as `layout` reads them, plus `bias` on each row.
pub(crate) fn gemm(
    a: &[f64],
    b: &[f64],
    layout: Layout,
    [m, n, k]: [usize; 3],
    bias: Option<&[f64]>,
) -> Vec<f64> {
    let a = if layout == Layout::Tn { transpose(a, k, m) } else { a.to_vec() };
    let b = if layout == Layout::Nt { transpose(b, n, k) } else { b.to_vec() };
    let mut out = Vec::new();
    for row in 0..m {
        for col in 0..n {
            let mut sum = bias.map_or(0.0, |bias| bias[col]);
            for i in 0..k {
                sum += a[row * k + i] * b[i * n + col];
            }
            out.push(sum);
        }
    }
    out
}
