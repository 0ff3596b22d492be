//! Values in the form in which an operand is stored, and how a vector of them becomes words.
//!
//! A row of codes or bf16 values is read as 32-bit words of eight, four or two values of neighboring k. So a square of words is
//! transposed before it is decoded, which moves as many words fewer than the decoded values have, and nothing decoded is stored.

use super::lanes::Lanes;

/// The form in which values are stored in 32-bit words.
pub(super) trait Form<L: Lanes> {
    /// Steps of the micro-kernel in a stored word.
    const STEPS: usize;

    /// Returns the words of the `step`-th step of a vector of stored words.
    fn words(lanes: L, stored: L::Vector, step: usize) -> L::Vector;
}

/// Words of one step.
pub(super) struct Words;

impl<L: Lanes> Form<L> for Words {
    const STEPS: usize = 1;

    #[inline(always)]
    fn words(_: L, stored: L::Vector, _: usize) -> L::Vector {
        stored
    }
}

/// Two bf16 values, for lanes without pairs.
pub(super) struct Bf16;

impl<L: Lanes> Form<L> for Bf16 {
    const STEPS: usize = 2;

    #[inline(always)]
    fn words(lanes: L, stored: L::Vector, step: usize) -> L::Vector {
        lanes.widen(stored, step)
    }
}

/// Four codes.
pub(super) struct Codes<const IS_E5M2: bool>;

impl<L: Lanes, const IS_E5M2: bool> Form<L> for Codes<IS_E5M2> {
    const STEPS: usize = if L::PAIRS { 2 } else { 4 };

    #[inline(always)]
    fn words(lanes: L, stored: L::Vector, step: usize) -> L::Vector {
        lanes.decode::<IS_E5M2>(stored, step)
    }
}

/// Eight codes of E2M1.
pub(super) struct Fp4;

impl<L: Lanes> Form<L> for Fp4 {
    const STEPS: usize = if L::PAIRS { 4 } else { 8 };

    #[inline(always)]
    fn words(lanes: L, stored: L::Vector, step: usize) -> L::Vector {
        lanes.decode_fp4(stored, step)
    }
}

/// Adds the products of the steps of a vector of stored words.
///
/// Not a closure, which would be compiled without the instructions of the lanes unless it is inlined.
///
/// # Safety
/// `a` must have a word for each step and row.
#[inline(always)]
pub(super) unsafe fn add<L: Lanes, F: Form<L>, const ROWS: usize>(
    lanes: L,
    sums: &mut [L::Vector; ROWS],
    a: *const u32,
    stored: L::Vector,
) {
    for step in 0..F::STEPS {
        let column = F::words(lanes, stored, step);
        for (row, sum) in sums.iter_mut().enumerate() {
            // SAFETY: the caller vouches for the word of this step and row.
            let word = lanes.splat(unsafe { *a.wrapping_add(step * ROWS + row) });
            *sum = lanes.multiply_add(*sum, word, column);
        }
    }
}
