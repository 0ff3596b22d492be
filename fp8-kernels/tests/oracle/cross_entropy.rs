//! Cross-entropy row by row in f64; `None` is a target that does not count.

pub(crate) fn loss(logits: &[f64], vocabulary: usize, targets: &[Option<usize>], divisor: f64) -> f64 {
    let rows = logits.chunks(vocabulary).zip(targets);
    let row = |(logits, target): (&[f64], &Option<usize>)| {
        let Some(target) = target else { return 0.0 };
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|v| (v - max).exp()).sum();
        sum.ln() + (max - logits[*target])
    };
    rows.map(row).sum::<f64>() / divisor
}

pub(crate) fn backward(
    logits: &[f64],
    vocabulary: usize,
    targets: &[Option<usize>],
    divisor: f64,
) -> Vec<f64> {
    let rows = logits.chunks(vocabulary).zip(targets);
    let row = |(logits, target): (&[f64], &Option<usize>)| {
        let y = super::softmax::softmax(logits, 1.0, |_| false);
        let hot = |j| f64::from(u8::from(*target == Some(j)));
        let factor = if target.is_some() { 1.0 / divisor } else { 0.0 };
        y.into_iter().enumerate().map(|(j, y)| factor * (y - hot(j))).collect::<Vec<_>>()
    };
    rows.flat_map(row).collect()
}
