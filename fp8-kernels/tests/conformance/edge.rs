//! Exactly known sums beside the middle of two neighbours in f32: whoever loses a last bit on the way rounds to the other.

use super::case::Outcome;
use super::compare::{close, same};
use fp8_kernels::Device;

/// Equal bits where sums are compensated: on a GPU. The CPU adds pieces plainly.
pub(crate) fn same_sums(what: &str, device: &Device, got: &[f32], want: &[f32]) -> Outcome {
    if device.to_string() != "cpu" {
        return same(what, got, want, want.len());
    }
    let want: Vec<f64> = want.iter().map(|&v| f64::from(v)).collect();
    close(what, got, &want, want.len(), [1e-5, 0.0])
}

/// What has to be added to a sum of integers, at least 2²⁶, to bring it to the next middle and one above or below it.
pub(crate) fn to_the_edge(sum: i64, above: bool) -> i64 {
    let ulp = 1i64 << (63 - 23 - sum.leading_zeros());
    (sum / ulp + 1) * ulp + ulp / 2 + if above { 1 } else { -1 } - sum
}

/// Four integers whose squares have this sum.
pub(crate) fn four_squares(sum: i64) -> [i64; 4] {
    let root = |n: i64| n.isqrt();
    for a in (0..=root(sum)).rev() {
        for b in (0..=root(sum - a * a).min(a)).rev() {
            for c in (0..=root(sum - a * a - b * b).min(b)).rev() {
                let left = sum - a * a - b * b - c * c;
                if root(left) * root(left) == left {
                    return [a, b, c, root(left)];
                }
            }
        }
    }
    [0; 4]
}
