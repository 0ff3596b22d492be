//! Exactly known sums beside the middle of two neighbours in f32: whoever loses a last bit on the way rounds to the other.

use super::case::Outcome;
use super::compare::{close, same};
use super::data::Random;
use fp8_kernels::Device;

/// Equal bits where sums are compensated: on a GPU. The CPU adds pieces plainly.
pub(crate) fn same_sums(what: &str, device: &Device, got: &[f32], want: &[f32]) -> Outcome {
    if device.to_string() != "cpu" {
        return same(what, got, want, want.len());
    }
    let want: Vec<f64> = want.iter().map(|&v| f64::from(v)).collect();
    close(what, got, &want, want.len(), [1e-5, 0.0])
}

/// Returns the number that brings a sum of integers, at least 2²⁶, to one above or below the next middle of two f32 values.
pub(crate) fn to_the_edge(sum: i64, above: bool) -> i64 {
    let ulp = 1i64 << (63 - 23 - sum.leading_zeros());
    (sum / ulp + 1) * ulp + ulp / 2 + if above { 1 } else { -1 } - sum
}

/// Integers of so many bits, raised by as many powers of two as `raised` says, and their sum; the first brings it beside the
/// middle of two numbers of f32. Where later parts outweigh earlier ones, it is the earlier that additions round off.
pub(crate) fn beside_the_middle(
    len: usize,
    bits: u32,
    seed: u64,
    raised: impl Fn(usize) -> u32,
) -> (Vec<f32>, f32) {
    let mut random = Random::new(seed);
    let mut values: Vec<i64> =
        (0..len).map(|i| ((random.bits() % (1 << bits)) as i64) << raised(i)).collect();
    let sum: i64 = values.iter().sum();
    let added = to_the_edge(sum, seed.is_multiple_of(2));
    values[0] += added;
    (values.into_iter().map(|v| v as f32).collect(), (sum + added) as f32)
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
