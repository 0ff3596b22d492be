//! Products of codes of NVFP4 as integers.
//!
//! Twice a value of E2M1 is an integer of at most 12. So the values of a block of 16 values of k are multiplied as bytes, of which a vector has four times
//! as many as of f32 values. The sum is exact, becomes an f32, and is multiplied by the scales of both blocks while it is added to
//! the sums of the blocks before: this product is exact, too, so that the only rounding is that of the addition, as if scaled
//! values were multiplied and a block of them summed by itself.
//!
//! A packed block of a row is a few words: those of its codes, a byte each; its scale; and, in `b`, what its sum starts from.

use super::decoding::FP4_VALUES;
use super::lanes::Lanes;
use super::pack::{self, BLOCK, Packed, line_words};
use super::tile::{Left, Right, Sums};
use fp8_format::E4M3;
use std::hint::black_box;
use std::ops::Range;

/// Bytes of the codes of a block as they are stored.
const CODES: usize = BLOCK / 2;

/// Words of the codes of a block as they are packed.
const WORDS: usize = 4;

/// Words of a block of `a`.
const LEFT: usize = WORDS + 1;

/// Words of a block of `b`, which are rows of its panels.
const RIGHT: usize = WORDS + 2;

/// Returns the room that a block of `a` needs, in words.
pub(super) fn left_words(rows: usize, ks: usize) -> usize {
    rows * line_words(LEFT * ks.div_ceil(BLOCK))
}

/// Returns the rows of a panel of `b`.
#[inline(always)]
pub(super) fn right_steps(ks: usize) -> usize {
    RIGHT * ks.div_ceil(BLOCK)
}

/// Packs `rows` × `ks` of `a`.
#[inline(always)]
pub(super) fn left<L: Lanes>(
    lanes: L,
    a: &Packed<'_>,
    rows: Range<usize>,
    ks: &Range<usize>,
    block: &mut [u32],
) -> Left {
    let line = line_words(LEFT * ks.len().div_ceil(BLOCK));
    let bytes = const { &doubled(L::OFFSET) };
    for (row, words) in rows.zip(block.chunks_exact_mut(line)) {
        read::<L, LEFT>(lanes, a, row, ks, bytes, words);
    }
    Left { words: block.as_ptr(), row: line, step: 1 }
}

/// Packs `cols` × `ks` of `b` into panels as [`pack::right`] does, with [`right_steps`] rows.
#[inline(always)]
pub(super) fn right<L: Lanes>(
    lanes: L,
    b: &Packed<'_>,
    cols: Range<usize>,
    ks: &Range<usize>,
    block: &mut [u32],
) {
    let steps = right_steps(ks.len());
    if steps == 0 {
        return;
    }
    let padded = cols.len().next_multiple_of(L::WIDTH);
    let (panels, spare) = block.split_at_mut(padded * steps);
    let stride = line_words(steps);
    let bytes = const { &doubled(0) };
    for first in (0..padded).step_by(L::WIDTH) {
        for (j, words) in spare.chunks_exact_mut(stride).take(L::WIDTH).enumerate() {
            match first + j < cols.len() {
                true => read::<L, RIGHT>(lanes, b, cols.start + first + j, ks, bytes, words),
                false => words[..steps].fill(0),
            }
        }
        let (start, width) = pack::panel::<L>(first, padded, steps);
        let panel = &mut panels[start..][..width * steps][first % (2 * L::WIDTH)..];
        pack::transpose(lanes, pack::Lines { words: spare, stride }, panel, width, steps);
        for rows in panel.chunks_mut(RIGHT * width) {
            let mut codes = [lanes.zero(); WORDS];
            for (codes, row) in codes.iter_mut().zip(rows.chunks(width)) {
                // SAFETY: a vector of words, whose bounds are checked.
                *codes = unsafe { lanes.words(row[..L::WIDTH].as_ptr()) };
            }
            let start = &mut rows[(RIGHT - 1) * width..][..L::WIDTH];
            // SAFETY: as above.
            unsafe { lanes.store(lanes.block_start(codes), start.as_mut_ptr().cast()) };
        }
    }
}

/// Returns twice the value of each code, plus `offset`, as bytes.
const fn doubled(offset: u8) -> [u8; 16] {
    let mut bytes = [0; 16];
    let mut code = 0;
    while code < 16 {
        bytes[code] = offset.wrapping_add_signed((2.0 * f32::from_bits(FP4_VALUES[code])) as i8);
        code += 1;
    }
    bytes
}

/// Half of each scale: two of them undo that values are doubled.
static HALVES: [f32; 256] = {
    let mut halves = [0.0; 256];
    let mut bits = 0;
    while bits < 256 {
        halves[bits] = 0.5 * E4M3::from_bits(bits as u8).to_f32();
        bits += 1;
    }
    halves
};

/// Reads `ks` of a row: `N` words a block, of which those beyond the scale are left alone.
#[inline(always)]
fn read<L: Lanes, const N: usize>(
    lanes: L,
    packed: &Packed<'_>,
    row: usize,
    ks: &Range<usize>,
    bytes: &[u8; 16],
    words: &mut [u32],
) {
    let (codes, scales) = packed.line(row, ks);
    let (blocks, rest) = codes.split_at(ks.len() / BLOCK * CODES);
    let mut last = [0; CODES];
    last[..rest.len()].copy_from_slice(rest);
    if !ks.len().is_multiple_of(2) {
        // The last byte has one code.
        last[rest.len() - 1] &= 0xF;
    }
    let blocks = blocks.as_chunks().0.iter().chain((!rest.is_empty()).then_some(&last));
    for ((codes, scale), words) in blocks.zip(scales).zip(words.chunks_exact_mut(N)) {
        words[..WORDS].copy_from_slice(&lanes.look_up(*codes, bytes));
        words[WORDS] = HALVES[usize::from(scale.to_bits())].to_bits();
    }
}

/// Returns the largest height of a tile for `rows` rows, at least 1.
#[inline(always)]
pub(super) fn height(rows: usize) -> usize {
    HEIGHTS.into_iter().find(|&height| height <= rows).unwrap_or(1)
}

/// The heights of tiles: so many sums have room in 16 registers, beside the words of a block of `b` and what is computed.
const HEIGHTS: [usize; 3] = [4, 2, 1];

/// Adds the products of `ks` values of `rows` rows of `a` with a panel of `b`, which is `vectors` vectors wide.
///
/// # Safety
/// `rows` is one of [`HEIGHTS`]; `vectors` is 1 or 2, and the rows of `b` are as long. The words that this names must be readable, the rows of `sums` readable and
/// writable over the vectors' width.
#[inline(always)]
pub(super) unsafe fn tile<L: Lanes>(
    lanes: L,
    [rows, vectors]: [usize; 2],
    ks: usize,
    a: Left,
    b: Right,
    sums: Sums,
) {
    let blocks = ks.div_ceil(BLOCK);
    macro_rules! of_size {
        ($($rows:literal)*) => {
            match (rows, vectors) {
                $(
                    // SAFETY: the caller's promises are those of `sized`.
                    ($rows, 1) => unsafe { sized::<L, $rows, 1>(lanes, blocks, a, b, sums) },
                    // SAFETY: as above.
                    ($rows, 2) => unsafe { sized::<L, $rows, 2>(lanes, blocks, a, b, sums) },
                )*
                _ => unreachable!("a tile of {rows} rows and {vectors} vectors"),
            }
        };
    }
    of_size!(4 2 1)
}

/// # Safety
/// That of [`tile`].
#[inline(always)]
unsafe fn sized<L: Lanes, const ROWS: usize, const VECTORS: usize>(
    lanes: L,
    blocks: usize,
    a: Left,
    b: Right,
    sums: Sums,
) {
    // Pointers that the compiler must keep: what is read lies at constant distances from them.
    let rows: [*const u32; ROWS] = std::array::from_fn(|i| black_box(a.words.wrapping_add(i * a.row)));
    // One vector after the other: its sums and the words of `b` fit into 16 registers.
    for j in 0..VECTORS {
        let sums = sums.beyond(j * L::WIDTH);
        // SAFETY: the caller vouches for the sums.
        let mut tile = unsafe { sums.load::<L, ROWS, 1>(lanes) };
        let mut right = b.words.wrapping_add(j * L::WIDTH);
        for block in 0..blocks {
            let mut column = [lanes.zero(); RIGHT];
            for (step, words) in column.iter_mut().enumerate() {
                // SAFETY: each block has these rows of `b`.
                *words = unsafe { lanes.words(right.wrapping_add(step * VECTORS * L::WIDTH)) };
            }
            let [first, second, third, fourth, scales, start] = column;
            for ([sum], row) in tile.iter_mut().zip(rows) {
                let mut words = [lanes.zero(); LEFT];
                for (step, words) in words.iter_mut().enumerate() {
                    // SAFETY: each row has these words of each block.
                    *words = lanes.splat(unsafe { *row.wrapping_add(block * LEFT + step) });
                }
                let [codes @ .., scale] = words;
                let products = lanes.block_sum(codes, [first, second, third, fourth], start);
                *sum = lanes.add_product(*sum, products, lanes.multiply(scale, scales));
            }
            right = right.wrapping_add(RIGHT * VECTORS * L::WIDTH);
        }
        // SAFETY: as above.
        unsafe { sums.store(lanes, tile) };
    }
}
