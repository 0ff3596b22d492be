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

/// The Jacobian `∂yⱼ/∂xᵢ = scale · yⱼ · ([i = j] − yᵢ)` times `dy`: its diagonal, and the rest, which is one sum for all `i`.
pub(crate) fn backward(dy: &[f64], y: &[f64], scale: f64) -> Vec<f64> {
    let sum: f64 = dy.iter().zip(y).map(|(dy, y)| dy * y).sum();
    dy.iter().zip(y).map(|(dy, y)| scale * y * (dy - sum)).collect()
}
