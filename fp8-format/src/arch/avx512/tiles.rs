//! Tiles of 128 × 128 elements.
//!
//! A row of tiles is read for the amaxes of all its tiles and then for their codes, both times row by row: reading one tile after
//! the other, pieces of 128 elements each, takes the memory more than twice as long. The second read finds the row of tiles in the
//! last-level cache.

use super::blocks::times;
use super::rows::{Multiplier, Ordinary, amax_of, emit, negated};
use super::*;
use crate::arch::avx2::is_aligned;
use crate::arch::blocks::{self, F32Rule, Rule, SIDE, TILES};

/// Codes of a row of tiles with the factors that `rule` makes of their amaxes, which are stored.
///
/// `src` and `dst` hold `rows` rows of `width` elements each, `TILES` tiles at most. They begin `stride` elements apart.
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
    let (tiles, others) = amaxes.split_at_mut(whole);
    let mut lanes = [no_lanes::<S>(); TILES];
    for row in src.chunks(stride).take(rows) {
        for (lanes, piece) in lanes.iter_mut().zip(row[..width].as_chunks::<SIDE>().0) {
            *lanes = raised::<S, SIDE>(*lanes, piece);
        }
    }
    let is_ordinary = Ordinary::new(rule);
    let mut factors = [None; TILES];
    for (t, ((amax, factor), lanes)) in tiles.iter_mut().zip(&mut factors).zip(lanes).enumerate() {
        let bits = _mm_cvtsi128_si32(amax_of::<S>(lanes)).cast_unsigned();
        if is_ordinary.contains(bits) {
            *amax = f32::from_bits(bits);
        } else {
            let pieces = src.chunks(stride).take(rows).map(|row| &row[t * SIDE..][..SIDE]);
            *amax = pieces.map(|piece| super::amax::<S>(piece)).fold(0.0, f32::max);
            *factor = Some(rule.factor(*amax));
        }
    }
    // Sources of 16 bits gain from prefetching the next row of tiles; f32 do not.
    let below = if streams && size_of::<S>() == 2 { rows * stride * size_of::<S>() } else { 0 };
    for (row, place) in src.chunks(stride).zip(dst.chunks_mut(stride)).take(rows) {
        let (row, place) = (&row[..width], &mut place[..width]);
        if let Rule::F32(F32Rule { mask: u32::MAX, .. }) = rule {
            encode_row::<S, T, false>(row, tiles, &factors, place, streams, below);
        } else {
            encode_row::<S, T, true>(row, tiles, &factors, place, streams, below);
        }
    }
    if let [amax] = others {
        let find = |src: &[S], amaxes: &mut [f32]| super::amaxes::<S>(src, SIDE, amaxes);
        let encode = |src: &[S], factors: &[f32], dst: &mut [u8]| {
            super::quantize_blocks::<S, T>(src, SIDE, factors, dst, false);
        };
        let (left, shape) = (whole * SIDE, [rows, width - whole * SIDE, stride]);
        blocks::in_tiles(
            &src[left..],
            shape,
            rule,
            core::slice::from_mut(amax),
            &mut dst[left..],
            find,
            encode,
        );
    }
}

/// Codes of the whole pieces of a row. Tiles without a factor are ordinary. What is `ahead` bytes farther on is prefetched, unless
/// `ahead` is 0.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
fn encode_row<S: Source, T: Target, const POWERS: bool>(
    row: &[S],
    amaxes: &[f32],
    factors: &[Option<f32>; TILES],
    dst: &mut [u8],
    streams: bool,
    ahead: usize,
) {
    let pieces = row.as_chunks::<SIDE>().0.iter().zip(dst.as_chunks_mut::<SIDE>().0);
    for ((piece, place), (amax, factor)) in pieces.zip(amaxes.iter().zip(factors)) {
        if ahead > 0 {
            fetch_second(piece, ahead);
        }
        let blocks = piece.as_chunks::<BLOCK>().0.iter().zip(place.as_chunks_mut::<BLOCK>().0);
        if let Some(factor) = factor {
            blocks.for_each(|(block, line)| emit(line, times::<S, T>(block, [*factor; 2]), streams));
        } else {
            let by = Multiplier::of_block::<T, POWERS>(_mm_castps_si128(_mm_set_ss(*amax)));
            blocks.for_each(|(block, line)| emit(line, by.codes::<S, T, POWERS, false>(block), streams));
        }
    }
}

/// Returns the initial lanes for [`raised`]: magnitudes of 0.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn no_lanes<S: Source>() -> __m512i {
    if let Kind::F32 = S::KIND { _mm512_setzero_si512() } else { splat(ABS) }
}

/// The largest magnitudes of lanes, of 32 bits for f32, else words of 0x7FFF less these, raised to those of more elements.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn raised<S: Source, const N: usize>(mut lanes: __m512i, piece: &[S; N]) -> __m512i {
    let first = piece.as_ptr().cast::<__m512i>();
    for at in 0..size_of::<[S; N]>() / 64 {
        // SAFETY: within the piece; `at` is below the number of its vectors.
        let x = unsafe { _mm512_loadu_si512(first.wrapping_add(at)) };
        lanes = if let Kind::F32 = S::KIND {
            _mm512_max_epu32(lanes, _mm512_and_si512(x, _mm512_set1_epi32(codec::F32_ABS.cast_signed())))
        } else {
            _mm512_min_epu16(lanes, negated(x))
        };
    }
    lanes
}
