//! Norms of one row, and their gradients through the whole Jacobian.

/// Means of 0 for RMSNorm.
pub(crate) fn statistics(x: &[f64], eps: f64, centered: bool) -> (f64, f64) {
    let count = x.len() as f64;
    let mean = if centered { x.iter().sum::<f64>() / count } else { 0.0 };
    let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count;
    (mean, 1.0 / (variance + eps).sqrt())
}

pub(crate) fn forward(x: &[f64], gamma: &[f64], beta: Option<&[f64]>, eps: f64, centered: bool) -> Vec<f64> {
    let (mean, rsigma) = statistics(x, eps, centered);
    (0..x.len()).map(|i| (x[i] - mean) * rsigma * gamma[i] + beta.map_or(0.0, |beta| beta[i])).collect()
}

/// `dx_j = Σ_i dy_i · ∂y_i/∂x_j`, and this row's shares of dγ and dβ.
pub(crate) fn backward(dy: &[f64], x: &[f64], gamma: &[f64], eps: f64, centered: bool) -> [Vec<f64>; 3] {
    let (mean, rsigma) = statistics(x, eps, centered);
    let count = x.len() as f64;
    let normed: Vec<f64> = x.iter().map(|x| (x - mean) * rsigma).collect();
    let mut dx = vec![0.0; x.len()];
    for i in 0..x.len() {
        for j in 0..x.len() {
            let same = if i == j { 1.0 } else { 0.0 };
            let through_mean = if centered { 1.0 / count } else { 0.0 };
            let through_deviation = normed[i] * normed[j] / count;
            dx[j] += dy[i] * gamma[i] * rsigma * (same - through_mean - through_deviation);
        }
    }
    let dgamma = dy.iter().zip(&normed).map(|(dy, n)| dy * n).collect();
    [dx, dgamma, dy.to_vec()]
}
