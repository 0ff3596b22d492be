//! Draws the patterns of a chunk that are quantized with each scale, and the kind of stores.
//!
//! The first scale quantizes all patterns. Every other scale quantizes one pattern of each row of 16 neighbours, at a
//! place that a hash chooses. So it meets every sign, exponent and leading part of a significand, and over all rows also
//! each value of the last four bits. A chunk's first and last row are quantized whole: with powers of two as scales,
//! every tie is the first pattern of a chunk, and its neighbours are in those two rows. Another hash chooses the stores.

/// Neighbours of which a scale has one.
pub(super) const ROW: usize = 16;

/// A bijection whose high bits depend on all bits of `x`.
fn mixed(x: u32) -> u32 {
    let x = (x ^ (x >> 15)).wrapping_mul(0x2C1B_3C6D);
    let x = (x ^ (x >> 12)).wrapping_mul(0x297A_2D39);
    x ^ (x >> 15)
}

/// Replaces `drawn` by the patterns of the chunk `all` that scale number `scale` quantizes, in order and without
/// repetition. `first` is the first pattern of the chunk.
pub(super) fn draw<X: Copy>(first: u32, all: &[X], scale: usize, drawn: &mut Vec<X>) {
    drawn.clear();
    let (rows, last) = all.as_chunks::<ROW>();
    let [top, middle @ .., bottom] = rows else { return drawn.extend_from_slice(all) };
    if scale == 0 {
        return drawn.extend_from_slice(all);
    }
    drawn.extend_from_slice(top);
    let seed = (scale as u32).wrapping_mul(0x9E37_79B9);
    drawn.extend(
        middle
            .iter()
            .zip((ROW as u32..).step_by(ROW))
            .map(|(row, place)| row[mixed(first.wrapping_add(place) ^ seed) as usize % ROW]),
    );
    drawn.extend_from_slice(bottom);
    drawn.extend_from_slice(last);
}

/// Whether stores go past the caches: as often as not, whatever the patterns and the scale.
pub(super) fn streams(first: u32, scale: usize) -> bool {
    mixed(!first.wrapping_add(scale as u32)) >> 31 == 1
}

#[cfg(test)]
mod tests {
    use super::super::codec::SCALES;
    use super::super::count::CHUNK;
    use super::*;
    use fp8_format::{E4M3, E5M2, Fp8};
    use std::collections::BTreeSet;

    /// Places in a chunk of `len`.
    fn places(first: u32, len: usize, scale: usize) -> Vec<usize> {
        let mut drawn = Vec::new();
        draw(first, &(0..len).collect::<Vec<_>>(), scale, &mut drawn);
        drawn
    }

    fn chunk_of(pattern: u32) -> (u32, usize) {
        let place = pattern as usize % CHUNK;
        (pattern - place as u32, place)
    }

    /// Middles of two codes, of products that are rounded to them exactly: those whose pattern exists, and those drawn.
    fn ties<T: Fp8>(scale: usize) -> (usize, usize) {
        let (mut exist, mut drawn) = (0, 0);
        let codes = (0..0x7F).map(|code| T::from_bits(code).to_f32());
        for (low, high) in codes.clone().zip(codes.skip(1)).filter(|(_, high)| high.is_finite()) {
            let tie = (low + high) / 2.0;
            let near = ((f64::from(tie) / f64::from(SCALES[scale])).abs() as f32).to_bits();
            for magnitude in near.saturating_sub(2)..=near + 2 {
                for pattern in [magnitude, magnitude | 1 << 31] {
                    if (f32::from_bits(pattern) * SCALES[scale]).abs() == tie {
                        let (first, place) = chunk_of(pattern);
                        exist += 1;
                        drawn += usize::from(places(first, CHUNK, scale).binary_search(&place).is_ok());
                    }
                }
            }
        }
        (exist, drawn)
    }

    /// Counts products that are rounded towards 0 and away from it, for plain and for streaming stores, in some chunks
    /// from all over f32.
    fn rounded<T: Fp8>(scale: usize) -> [[usize; 2]; 2] {
        let mut counts = [[0; 2]; 2];
        for first in (0..1 << 16).step_by(244).map(|chunk| chunk << 16) {
            for place in places(first, CHUNK, scale).into_iter().step_by(311) {
                let v = (f32::from_bits(first + place as u32) * SCALES[scale]).abs();
                let code = T::from_f32_saturating(v).to_f32();
                if code != v && v <= T::from_bits(T::ENCODING.max_bits()).to_f32() {
                    counts[usize::from(streams(first, scale))][usize::from(code > v)] += 1;
                }
            }
        }
        counts
    }

    #[test]
    fn every_scale_meets_ties_and_is_rounded_both_ways_by_both_stores() {
        fn check<T: Fp8>() {
            for (scale, value) in
                SCALES.into_iter().enumerate().filter(|(_, value)| *value != 0.0 && value.is_finite())
            {
                let (exist, drawn) = ties::<T>(scale);
                assert!(drawn > 0, "{} {value}: none of {exist} ties is drawn", T::ENCODING);
                if value.to_bits() & 0x007F_FFFF == 0 || scale == 0 {
                    assert_eq!(drawn, exist, "{} {value}: not all ties are drawn", T::ENCODING);
                }
                let counts = rounded::<T>(scale);
                assert!(
                    counts.as_flattened().iter().all(|count| *count > 0),
                    "{} {value}: {counts:?}",
                    T::ENCODING
                );
            }
        }
        check::<E4M3>();
        check::<E5M2>();
    }

    #[test]
    fn a_scale_has_a_sixteenth_of_a_chunk_none_twice_and_in_time_every_place_of_a_row() {
        for scale in 0..SCALES.len() {
            let drawn = places(0x4100_0000, CHUNK, scale);
            let count = if scale == 0 { CHUNK } else { CHUNK / ROW + 2 * (ROW - 1) };
            assert_eq!((drawn.len(), drawn.is_sorted_by(|a, b| a < b)), (count, true));
            let middle: BTreeSet<usize> =
                drawn[ROW..drawn.len() - ROW].iter().map(|place| place % ROW).collect();
            assert_eq!(middle.len(), ROW, "scale {scale}");
        }
        // The last chunk of a sweep with a stride may have any length.
        for len in [0, 1, 15, 16, 17, 33, 100] {
            let drawn = places(7, len, 3);
            assert!(drawn.iter().all(|place| *place < len) && drawn.len() >= len.min(17), "{len}: {drawn:?}");
        }
    }
}
