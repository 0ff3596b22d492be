//! The order in which sequences are read, which is a function of seed and epoch.

use rand::{RngCore as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

/// Returns the numbers 0 … `len` − 1 in the order of an epoch: a Fisher–Yates shuffle by ChaCha8. The order is the same in every
/// version and on every machine. At most 2³² − 1 numbers are returned.
///
/// ```
/// use fp8_hf::data::order;
/// let first = order(1337, 0, 5);
/// assert_eq!(first, [1, 2, 4, 3, 0]);
/// assert_ne!(order(1337, 1, 5), first);
/// ```
#[must_use]
pub fn order(seed: u64, epoch: u64, len: usize) -> Vec<u32> {
    // The seed is the start of the key: no function of another crate, which may change, expands it.
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    let mut rng = ChaCha8Rng::from_seed(key);
    rng.set_stream(epoch);
    let mut numbers: Vec<u32> = (0..u32::MAX).take(len).collect();
    for last in (1..numbers.len()).rev() {
        numbers.swap(last, below(&mut rng, last as u64 + 1) as usize);
    }
    numbers
}

/// Draws a number below `bound`, which is at most 2³²: the upper half of a product of 64 bits. It is drawn again where that would
/// favor some numbers.
fn below(rng: &mut ChaCha8Rng, bound: u64) -> u64 {
    let excess = (1 << 32) % bound;
    loop {
        let product = u64::from(rng.next_u32()) * bound;
        if product & u64::from(u32::MAX) >= excess {
            return product >> 32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_never_changes_and_has_every_number_once() {
        for len in [0, 1, 2, 17, 1000] {
            let mut numbers = order(3, 4, len);
            numbers.sort_unstable();
            assert_eq!(numbers, (0..len as u32).collect::<Vec<_>>());
        }
        assert_eq!(order(1, 2, 8), order(1, 2, 8));
        assert_ne!(order(1, 2, 8), order(2, 2, 8));
        // All six orders of three numbers occur about equally often.
        let mut counts = std::collections::BTreeMap::new();
        for epoch in 0..6000 {
            *counts.entry(order(7, epoch, 3)).or_insert(0) += 1;
        }
        assert!(counts.len() == 6 && counts.values().all(|count| (900..1100).contains(count)), "{counts:?}");
    }
}
