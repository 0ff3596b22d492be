//! Softmax of one row with a list of hidden columns.

pub(crate) fn softmax(row: &[f64], scale: f64, hidden: impl Fn(usize) -> bool) -> Vec<f64> {
    let exps: Vec<f64> = {
        let seen = |j: &usize| !hidden(*j);
        let max = (0..row.len()).filter(seen).map(|j| scale * row[j]).fold(f64::NEG_INFINITY, f64::max);
        let exp = |j| if hidden(j) || max == f64::NEG_INFINITY { 0.0 } else { (scale * row[j] - max).exp() };
        (0..row.len()).map(exp).collect()
    };
    let sum: f64 = exps.iter().sum();
    exps.iter().map(|e| if sum == 0.0 { 0.0 } else { e / sum }).collect()
}

/// By the Jacobian: `∂yⱼ/∂xᵢ = scale · yⱼ · ([i = j] − yᵢ)`.
pub(crate) fn backward(dy: &[f64], y: &[f64], scale: f64) -> Vec<f64> {
    let jacobian = |i: usize, j: usize| scale * y[j] * (f64::from(u8::from(i == j)) - y[i]);
    (0..y.len()).map(|i| (0..y.len()).map(|j| dy[j] * jacobian(i, j)).sum()).collect()
}
