//! Gradients by central differences, to prove the oracles' own.

/// `∂f/∂xᵢ` for a smooth f and x of a size around 1: right to about 1e-8.
pub(crate) fn gradient(f: impl Fn(&[f64]) -> f64, x: &[f64]) -> Vec<f64> {
    let step = 1e-4;
    let at = |i: usize, by: f64| {
        let mut x = x.to_vec();
        x[i] += by;
        f(&x)
    };
    // Four points: the error is of fourth order.
    let slope =
        |i| (8.0 * (at(i, step) - at(i, -step)) - (at(i, 2.0 * step) - at(i, -2.0 * step))) / (12.0 * step);
    (0..x.len()).map(slope).collect()
}

/// The largest distance of two vectors of one length.
pub(crate) fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

/// `Σ aᵢ·bᵢ`.
pub(crate) fn inner(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
