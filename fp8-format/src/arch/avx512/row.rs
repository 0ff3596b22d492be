//! Rows with a scale of their own.
//!
//! A row is read for its amax and then for its codes. The next row is prefetched in the meantime, so that the memory is busy
//! throughout.

use super::rows::{Multiplier, Ordinary, amax_of};
use super::tiles::{no_lanes, raised};
use super::*;
use crate::arch::blocks::{F32Rule, Rule};

/// Longer rows are not prefetched: two of them exceed the second cache.
const LONGEST: usize = 256 << 10;

/// Codes of a row with the factor that `rule` makes of its amax, which is returned.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub(crate) fn quantize_row<S: Source, T: Target>(
    src: &[S],
    rule: &Rule,
    dst: &mut [u8],
    streams: bool,
) -> f32 {
    let (blocks, rest) = src.as_chunks::<BLOCK>();
    let mut last = [S::default(); BLOCK];
    last[..rest.len()].copy_from_slice(rest);
    let mut lanes = no_lanes::<S>();
    for block in blocks.iter().chain([&last]) {
        lanes = raised::<S, BLOCK>(lanes, block);
    }
    let bits = amax_of::<S>(lanes);
    let amax = _mm_cvtsi128_si32(bits).cast_unsigned();
    if !Ordinary::new(rule).contains(amax) {
        let amax = super::amax::<S>(src);
        quantize_products::<S, T>(src, rule.factor(amax), dst, streams);
        return amax;
    }
    let length = size_of_val(src);
    let prefetches = streams && length <= LONGEST;
    let fetch = |block: &[S; BLOCK]| {
        if prefetches {
            fetch_second(block, length);
        }
    };
    if let Rule::F32(F32Rule { mask: u32::MAX, .. }) = rule {
        let by = Multiplier::of_block::<T, false>(bits);
        drive(src, dst, streams, false, |block| {
            fetch(block);
            by.codes::<S, T, false, false>(block)
        });
    } else {
        let by = Multiplier::of_block::<T, true>(bits);
        drive(src, dst, streams, false, |block| {
            fetch(block);
            by.codes::<S, T, true, false>(block)
        });
    }
    f32::from_bits(amax)
}
