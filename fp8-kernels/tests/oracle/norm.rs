//! Norms of one row, and their gradients through the whole Jacobian.

/// Means of 0 for RMSNorm. Squares are summed in the range of f32: beyond it, the deviation is infinite and its inverse 0.
pub(crate) fn statistics(x: &[f64], eps: f64, centered: bool) -> (f64, f64) {
    let count = x.len() as f64;
    let mean = if centered { x.iter().sum::<f64>() / count } else { 0.0 };
    let squares = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>();
    let squares = if squares > f32::MAX.into() { f64::INFINITY } else { squares };
    (mean, 1.0 / (squares / count + eps).sqrt())
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

/// As [`backward`], of long rows: the Jacobian's product is the means of s and of s · n, with s = dy · γ and n the normed x.
pub(crate) fn backward_of_row(
    dy: &[f64],
    x: &[f64],
    gamma: &[f64],
    eps: f64,
    centered: bool,
) -> [Vec<f64>; 3] {
    let (mean, rsigma) = statistics(x, eps, centered);
    let count = x.len() as f64;
    let normed: Vec<f64> = x.iter().map(|x| (x - mean) * rsigma).collect();
    let scaled: Vec<f64> = dy.iter().zip(gamma).map(|(dy, gamma)| dy * gamma).collect();
    let level = if centered { scaled.iter().sum::<f64>() / count } else { 0.0 };
    let along = scaled.iter().zip(&normed).map(|(s, n)| s * n).sum::<f64>() / count;
    let dx = scaled.iter().zip(&normed).map(|(s, n)| rsigma * (s - level - n * along)).collect();
    let dgamma = dy.iter().zip(&normed).map(|(dy, n)| dy * n).collect();
    [dx, dgamma, dy.to_vec()]
}
