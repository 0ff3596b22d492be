//! Tiles of 128 × 128 elements whose amaxes and codes come from one read.
//!
//! Rows of a matrix are often a power of two apart. Those of a tile then share a few sets of the caches, which cannot hold it
//! until its amax is known. So a tile is copied while its amax is computed, and encoded from its copy. Both happen row by row in
//! the same loop: while one tile is encoded, the next one is read from memory.

use super::blocks::times;
use super::rows::{Multiplier, Ordinary, amax_of, emit, negated};
use super::*;
use crate::arch::avx2::is_aligned;
use crate::arch::blocks::{self, F32Rule, Rule, SIDE};

/// A copy of a tile.
type Tile<S> = [[S; SIDE]; SIDE];

/// How many rows ahead the next tile is prefetched.
const ROWS_AHEAD: usize = 8;

/// Codes of a row of tiles with the factors that `rule` makes of their amaxes, which are stored. The source is read once.
///
/// `src` and `dst` hold `rows` rows, `SIDE` at most, of `width` elements each. They begin `stride` elements apart.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub(crate) fn quantize_tiles<S: Source, T: Target>(
    src: &[S],
    [rows, width, stride]: [usize; 3],
    rule: &Rule,
    amaxes: &mut [f32],
    dst: &mut [u8],
    streams: bool,
) {
    let streams = streams && is_aligned(dst) && stride.is_multiple_of(BLOCK);
    let whole = width / SIDE;
    let mut copies = [[[S::default(); SIDE]; SIDE]; 2];
    let [mut here, mut next] = copies.each_mut();
    let is_ordinary = Ordinary::new(rule);
    let shape = [rows.min(SIDE), stride];
    if whole > 0 {
        let mut amax = step(Some((src, next)), None, shape, streams, |_| _mm512_setzero_si512());
        for tile in 0..whole {
            core::mem::swap(&mut here, &mut next);
            let next = (tile + 1 < whole).then(|| (&src[(tile + 1) * SIDE..], &mut *next));
            let place = Some((&*here, &mut dst[tile * SIDE..]));
            let bits = amax_of::<S>(amax);
            let value = _mm_cvtsi128_si32(bits).cast_unsigned();
            amax = if is_ordinary.contains(value) {
                amaxes[tile] = f32::from_bits(value);
                if let Rule::F32(F32Rule { mask: u32::MAX, .. }) = rule {
                    let by = Multiplier::of_block::<T, false>(bits);
                    step(next, place, shape, streams, |block| by.codes::<S, T, false, false>(block))
                } else {
                    let by = Multiplier::of_block::<T, true>(bits);
                    step(next, place, shape, streams, |block| by.codes::<S, T, true, false>(block))
                }
            } else {
                amaxes[tile] = here[..shape[0]].iter().map(|row| super::amax::<S>(row)).fold(0.0, f32::max);
                let factor = rule.factor(amaxes[tile]);
                step(next, place, shape, streams, |block| times::<S, T>(block, [factor; 2]))
            };
        }
    }
    if width > whole * SIDE {
        let find = |src: &[S], block: usize, amaxes: &mut [f32]| super::amaxes::<S>(src, block, amaxes);
        let encode = |src: &[S], factor: f32, dst: &mut [u8]| {
            super::quantize_blocks::<S, T>(src, src.len(), &[factor], dst, false);
        };
        let (left, shape) = (whole * SIDE, [rows, width - whole * SIDE, stride]);
        blocks::in_tiles(&src[left..], shape, rule, &mut amaxes[whole..], &mut dst[left..], find, encode);
    }
}

/// Copies a tile and returns the largest magnitudes of its lanes, of 32 bits for f32, else words of 0x7FFF less these. Calls
/// `codes` for each half of another tile's rows in the meantime, and stores its results.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
fn step<S: Source>(
    next: Option<(&[S], &mut Tile<S>)>,
    here: Option<(&Tile<S>, &mut [u8])>,
    [rows, stride]: [usize; 2],
    streams: bool,
    codes: impl Fn(&[S; BLOCK]) -> Codes,
) -> __m512i {
    let (src, copy) = next.unzip();
    let (tile, dst) = here.unzip();
    let mut sources = src.map(|src| src.chunks(stride));
    let mut copies = copy.map(|copy| copy.iter_mut());
    let mut tiles = tile.map(|tile| tile.iter());
    let mut places = dst.map(|dst| dst.chunks_mut(stride));
    let mut amax = if let Kind::F32 = S::KIND { _mm512_setzero_si512() } else { splat(ABS) };
    for r in 0..rows {
        if let (Some(sources), Some(copies)) = (&mut sources, &mut copies)
            && let (Some(row), Some(copy)) = (sources.next(), copies.next())
            && let Some(row) = row.first_chunk::<SIDE>()
        {
            // Behind its last row comes the first one of the tile on the right.
            let ahead = r + ROWS_AHEAD;
            let place = if ahead < rows {
                row.as_ptr().wrapping_add(ROWS_AHEAD * stride)
            } else {
                row.as_ptr().wrapping_add(SIDE).wrapping_sub((rows - ROWS_AHEAD.min(rows)) * stride)
            };
            for line in 0..size_of::<[S; SIDE]>() / 64 {
                prefetch(place.cast::<i8>().wrapping_add(64 * line));
            }
            amax = copied(row, copy, amax);
        }
        if let (Some(tiles), Some(places)) = (&mut tiles, &mut places)
            && let (Some(row), Some(place)) = (tiles.next(), places.next())
        {
            for (block, line) in row.as_chunks::<BLOCK>().0.iter().zip(place.as_chunks_mut::<BLOCK>().0) {
                emit(line, codes(block), streams);
            }
        }
    }
    amax
}

/// Copies a row and returns `amax` with its magnitudes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn copied<S: Source>(row: &[S; SIDE], copy: &mut [S; SIDE], mut amax: __m512i) -> __m512i {
    let (from, to) = (row.as_ptr().cast::<__m512i>(), copy.as_mut_ptr().cast::<__m512i>());
    for at in 0..size_of::<[S; SIDE]>() / 64 {
        // SAFETY: a row is a multiple of 64 bytes; `at` is below their number.
        let x = unsafe { _mm512_loadu_si512(from.wrapping_add(at)) };
        // SAFETY: as above; the copy has the row's size.
        unsafe { _mm512_storeu_si512(to.wrapping_add(at), x) };
        amax = if let Kind::F32 = S::KIND {
            _mm512_max_epu32(amax, _mm512_and_si512(x, _mm512_set1_epi32(codec::F32_ABS.cast_signed())))
        } else {
            _mm512_min_epu16(amax, negated(x))
        };
    }
    amax
}
