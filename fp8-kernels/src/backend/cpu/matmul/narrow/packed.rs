//! Lines of NVFP4: codes of eight to a word, and a scale for each two words.
//!
//! The products of a block are summed by themselves and multiplied by the block's scale: both are exact, so that is the sum of the
//! products of scaled values.

use super::super::form::{Form, Fp4, add};
use super::super::lanes::Lanes;
use super::super::pack::{Lines, Packed};

/// Words of the codes of a block.
const WORDS: usize = 2;

/// Blocks whose scales are read as a word.
const SCALES: usize = 4;

/// Adds the products of `ROWS` rows of `a` with a vector's width of lines of codes from `outer` and `k` on to `tile`: whole squares of
/// words.
#[inline(always)]
pub(super) fn sized<L: Lanes, const ROWS: usize>(
    lanes: L,
    a: &[u32],
    b: Lines<'_>,
    packed: &Packed<'_>,
    [outer, k]: [usize; 2],
    tile: &mut [f32],
) {
    let steps = <Fp4 as Form<L>>::STEPS;
    // Stored words of a line.
    let (words, stride) = (a.len() / (ROWS * steps), b.stride);
    // The last words that are read: everything below is in bounds.
    assert!(b.words.len() >= (L::WIDTH - 1) * stride + words && stride >= words);
    assert!(words.is_multiple_of(L::WIDTH) && ROWS * L::WIDTH <= tile.len());
    let mut sums = [lanes.zero(); ROWS];
    for (sum, row) in sums.iter_mut().zip(tile.chunks_exact(L::WIDTH)) {
        // SAFETY: the row is a vector long.
        *sum = unsafe { lanes.sums(row.as_ptr()) };
    }
    let (mut a, mut b, mut block) = (a.as_ptr(), b.words.as_ptr(), k / (8 * WORDS));
    for _ in 0..words / L::WIDTH {
        // What follows the lines in memory are usually the next ones.
        for line in 0..L::WIDTH {
            lanes.prefetch(b.wrapping_add((L::WIDTH + line) * stride));
        }
        // SAFETY: the lines have these words, as was just checked.
        let columns = unsafe { lanes.columns(b, stride) };
        let mut scales = lanes.zero();
        for (n, pair) in columns.as_ref().chunks_exact(WORDS).enumerate() {
            if n % SCALES == 0 {
                scales = scale_words(lanes, packed, outer, block + n);
            }
            let mut products = [lanes.zero(); ROWS];
            for (i, column) in pair.iter().enumerate() {
                let a = a.wrapping_add((n * WORDS + i) * steps * ROWS);
                // SAFETY: there are words of `a` for all steps.
                unsafe { add::<L, Fp4, ROWS>(lanes, &mut products, a, *column) };
            }
            let factors = scale(lanes, scales, n % SCALES);
            for (sum, products) in sums.iter_mut().zip(products) {
                *sum = lanes.add_product(*sum, products, factors);
            }
        }
        a = a.wrapping_add(L::WIDTH * steps * ROWS);
        b = b.wrapping_add(L::WIDTH);
        block += L::WIDTH / WORDS;
    }
    for (sum, row) in sums.into_iter().zip(tile.chunks_exact_mut(L::WIDTH)) {
        // SAFETY: the row is a vector long.
        unsafe { lanes.store(sum, row.as_mut_ptr()) };
    }
}

/// Reads the scales of [`SCALES`] blocks of each line.
#[inline(always)]
fn scale_words<L: Lanes>(lanes: L, packed: &Packed<'_>, outer: usize, block: usize) -> L::Vector {
    let mut words = [0; 16];
    for (line, word) in words[..L::WIDTH].iter_mut().enumerate() {
        *word = packed.scale_word(outer + line, block);
    }
    // SAFETY: `words` has at least a vector of them.
    unsafe { lanes.words(words.as_ptr()) }
}

/// Returns the f32 values of the n-th of these scales.
#[inline(always)]
fn scale<L: Lanes>(lanes: L, words: L::Vector, n: usize) -> L::Vector {
    if L::PAIRS {
        // The first of a pair is in the high half.
        lanes.widen(lanes.decode::<false>(words, n / 2), 1 - n % 2)
    } else {
        lanes.decode::<false>(words, n)
    }
}
