//! Philox4x32-10: random numbers as a pure function of (counter, key).
//!
//! Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011): ten rounds of two 32 × 32 →
//! 64 bit multiplications on a 128-bit counter, with a 64-bit key that grows by a Weyl constant each round. The generator has
//! no state, so element `i` of a tensor gets the same number on every backend and in any order of evaluation.

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

/// Four random words for a 128-bit counter and a 64-bit key. Word 0 is the least significant in both.
///
/// ```
/// use fp8_format::philox::{block, philox4x32_10};
///
/// assert_eq!(block([5, 0, 0, 0], [42, 0]), philox4x32_10(5, 42));
/// assert_eq!(block([0, 0, 0, 1], [42, 0])[0], 0x2043_9B04); // counter 2⁹⁶
/// ```
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

/// A stream of random words. Element `i` is word `i % 4` of [`philox4x32_10`]`(offset + i / 4, seed)`.
///
/// ```
/// use fp8_format::philox::{Philox, philox4x32_10};
///
/// let stream = Philox::new(42, 7);
/// assert_eq!(stream.word(6), philox4x32_10(7 + 1, 42)[2]);
/// assert_eq!(stream.at(5).word(1), stream.word(6)); // for a part of a tensor that begins at element 5
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Philox {
    seed: u64,
    offset: u64,
    /// Words of the first counter that are passed over, less than 4.
    skipped: u8,
}

impl Philox {
    /// The words of one block.
    pub(crate) const BLOCK: usize = 64;

    /// Creates the stream of key `seed` that begins at counter `offset`.
    #[must_use]
    #[inline]
    pub const fn new(seed: u64, offset: u64) -> Self {
        Self { seed, offset, skipped: 0 }
    }

    /// Returns the rest of the stream, from element `element`. Counters wrap around.
    #[must_use]
    #[inline]
    pub const fn at(self, element: u64) -> Self {
        // Whole counters first: the sum of both numbers of elements may be too large.
        let words = self.skipped as u64 + element % 4;
        let offset = self.offset.wrapping_add(element / 4).wrapping_add(words / 4);
        Self { offset, skipped: words.to_le_bytes()[0] % 4, ..self }
    }

    /// Returns the word of element `element`.
    #[must_use]
    #[inline]
    pub const fn word(self, element: u64) -> u32 {
        let Self { seed, offset, skipped } = self.at(element);
        philox4x32_10(offset, seed)[skipped as usize]
    }

    /// Returns the number of elements in front of the first whole counter: 0 if the stream begins with one.
    pub(crate) const fn left(self) -> usize {
        (4 - self.skipped as usize) % 4
    }

    /// The words of 64 elements, of a stream that begins with a whole counter.
    #[inline(always)]
    pub(crate) fn block(self) -> [u32; Self::BLOCK] {
        let words = side_by_side(self.seed, self.offset, 1);
        core::array::from_fn(|i| words[i / 4][i % 4])
    }
}

/// Counters that are computed side by side, as vectors.
const LANES: usize = Philox::BLOCK / 4;

/// The words of counters `step` apart.
#[inline(always)]
fn side_by_side(seed: u64, first: u64, step: u64) -> [[u32; 4]; LANES] {
    let counter = |lane: usize| halves(first.wrapping_add(step.wrapping_mul(lane as u64)));
    let mut c0: [u32; LANES] = core::array::from_fn(|lane| counter(lane)[0]);
    let mut c1: [u32; LANES] = core::array::from_fn(|lane| counter(lane)[1]);
    let (mut c2, mut c3) = ([0; LANES], [0; LANES]);
    let [mut k0, mut k1] = halves(seed);
    for _ in 0..ROUNDS {
        for lane in 0..LANES {
            let [low0, high0] = halves(u64::from(MULTIPLIERS[0]) * u64::from(c0[lane]));
            let [low1, high1] = halves(u64::from(MULTIPLIERS[1]) * u64::from(c2[lane]));
            (c0[lane], c1[lane]) = (high1 ^ c1[lane] ^ k0, low1);
            (c2[lane], c3[lane]) = (high0 ^ c3[lane] ^ k1, low0);
        }
        k0 = k0.wrapping_add(WEYL[0]);
        k1 = k1.wrapping_add(WEYL[1]);
    }
    core::array::from_fn(|lane| [c0[lane], c1[lane], c2[lane], c3[lane]])
}

/// The random bytes of matrices whose blocks of 16 elements are rounded stochastically: a counter for each block.
///
/// Element `j` of block `n` takes byte `j`, little endian, of [`philox4x32_10`]`(offset + n, seed)`. Blocks are numbered along the
/// rows of the whole matrix, `n = row · ⌈columns / 16⌉ + block`; [`part`](Self::part) says where in it a part is, so that parts have
/// the bits of the whole.
///
/// ```
/// use fp8_format::philox::{BlockRandom, philox4x32_10};
///
/// let random = BlockRandom::new(42, 7);
/// assert_eq!(random.bytes(3)[4..8], philox4x32_10(7 + 3, 42)[1].to_le_bytes());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockRandom {
    seed: u64,
    /// The counter of the first block.
    first: u64,
    /// Blocks from a row to the next; `None`: those of a row.
    step: Option<u64>,
}

impl BlockRandom {
    /// Creates the bytes of key `seed` for a whole matrix, whose first block has counter `offset`.
    #[must_use]
    #[inline]
    pub const fn new(seed: u64, offset: u64) -> Self {
        Self { seed, first: offset, step: None }
    }

    /// Returns those of a part that begins with block `first`, of a matrix with `step` blocks in a row. Counters wrap around.
    ///
    /// ```
    /// use fp8_format::philox::BlockRandom;
    ///
    /// // The right half of a matrix of 64 columns, from its third row on.
    /// let whole = BlockRandom::new(42, 0);
    /// assert_eq!(whole.part(2 * 4 + 2, 4).bytes(0), whole.bytes(10));
    /// ```
    #[must_use]
    #[inline]
    pub const fn part(self, first: u64, step: u64) -> Self {
        Self { first: self.first.wrapping_add(first), step: Some(step), ..self }
    }

    /// Returns the bytes of the block that comes `n` after the first one in its row.
    #[must_use]
    #[inline]
    pub const fn bytes(self, n: u64) -> [u8; 16] {
        let words = philox4x32_10(self.first.wrapping_add(n), self.seed);
        let mut bytes = [0; 16];
        let mut j = 0;
        while j < 16 {
            bytes[j] = words[j / 4].to_le_bytes()[j % 4];
            j += 1;
        }
        bytes
    }

    /// The number of counters from a row to the next, of a matrix of which a row has `blocks` blocks.
    pub(crate) const fn step(self, blocks: u64) -> u64 {
        match self.step {
            Some(step) => step,
            None => blocks,
        }
    }

    /// Those of a row, of a matrix of which a row has `blocks` blocks.
    pub(crate) const fn row(self, row: u64, blocks: u64) -> Self {
        let step = self.step(blocks);
        Self { first: self.first.wrapping_add(row.wrapping_mul(step)), step: Some(step), ..self }
    }

    /// Those from the `n`-th block of a row on.
    pub(crate) const fn skip(self, n: u64) -> Self {
        Self { first: self.first.wrapping_add(n), ..self }
    }

    /// The bytes of blocks `step` apart, four in a word.
    #[inline(always)]
    pub(crate) fn words(self, step: u64, words: &mut [[u32; 4]]) {
        for (n, words) in (0..).zip(words.chunks_mut(LANES)) {
            let first = self.first.wrapping_add(step.wrapping_mul(n * LANES as u64));
            let lanes = side_by_side(self.seed, first, step);
            words.copy_from_slice(&lanes[..words.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{BlockRandom, Philox, block};

    #[test]
    fn the_bytes_of_blocks_are_the_same_one_by_one_and_together() {
        for first in [0, u64::MAX - 3] {
            let random = BlockRandom::new(0x0123_4567_89AB_CDEF, first);
            for step in [1, 5] {
                let mut words = [[0; 4]; 21];
                random.row(3, 5).skip(2).words(step, &mut words);
                for (i, words) in (0..).zip(words) {
                    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
                    assert_eq!(random.bytes(17 + step * i), *bytes);
                }
            }
            assert_eq!(random.part(7, 9).row(2, 1).bytes(0), random.bytes(25));
        }
    }

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

    #[test]
    fn a_stream_is_the_same_from_wherever_it_is_read() {
        for offset in [0, 5, u64::MAX - 3, (1 << 32) - 2] {
            let stream = Philox::new(0x0123_4567_89AB_CDEF, offset);
            let words = stream.block();
            for (i, word) in (0..).zip(words) {
                assert_eq!(stream.word(i), word);
                assert_eq!(stream.at(i).word(0), word);
                assert_eq!(stream.at(i / 2).at(i - i / 2).word(0), word);
            }
            assert_eq!(stream.at(8).block()[..56], words[8..]);
        }
    }
}
