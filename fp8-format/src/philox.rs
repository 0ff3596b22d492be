//! Philox4x32-10: random numbers as a pure function of (counter, key).
//!
//! Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011): ten rounds of two 32 × 32 →
//! 64 bit multiplications on a 128-bit counter, with a 64-bit key that grows by a Weyl constant each round. Having no
//! state, it gives element `i` of a tensor the same number on every backend and in any order of evaluation.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: u32 = 10;

#[expect(clippy::cast_possible_truncation, reason = "splits a 64-bit word into its halves")]
#[inline(always)]
const fn halves(x: u64) -> [u32; 2] {
    [x as u32, (x >> 32) as u32]
}

/// Four random words for a 64-bit counter and a 64-bit key.
///
/// The counter's low and high halves are words 0 and 1 of Philox's 128-bit counter, words 2 and 3 are zero; the
/// key's low and high halves are its key words 0 and 1. Element `i` of a stream takes word `i % 4` of counter
/// `offset + i / 4`.
///
/// ```
/// use fp8_format::philox::philox4x32_10;
/// assert_eq!(philox4x32_10(0, 0), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
/// ```
#[must_use]
#[inline]
pub const fn philox4x32_10(counter: u64, key: u64) -> [u32; 4] {
    let [c0, c1] = halves(counter);
    block([c0, c1, 0, 0], halves(key))
}

/// Philox4x32-10 on a whole 128-bit counter, word 0 the least significant.
#[must_use]
#[inline]
pub const fn block(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [mut c0, mut c1, mut c2, mut c3] = counter;
    let [mut k0, mut k1] = key;
    let mut round = 0;
    while round < ROUNDS {
        let [low0, high0] = halves(MULTIPLIERS[0] as u64 * c0 as u64);
        let [low1, high1] = halves(MULTIPLIERS[1] as u64 * c2 as u64);
        (c0, c1, c2, c3) = (high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0);
        k0 = k0.wrapping_add(WEYL[0]);
        k1 = k1.wrapping_add(WEYL[1]);
        round += 1;
    }
    [c0, c1, c2, c3]
}

#[cfg(test)]
mod tests {
    use super::block;

    /// The vectors published with Random123 (`kat_vectors`, philox4x32 10).
    #[test]
    fn known_answers() {
        let all = u32::MAX;
        assert_eq!(block([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(block([all; 4], [all; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            block([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }
}
