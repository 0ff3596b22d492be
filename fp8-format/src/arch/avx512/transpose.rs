//! A tile of codes, its columns whole lines.

use crate::arch::TILE;
use crate::arch::avx2::is_aligned;
use crate::arch::interleave::{sixteen, turn};
use core::arch::x86_64::*;

/// Writes the columns of a tile, whose rows begin `src_stride` apart, as rows of `dst`, `stride` apart: past the caches where
/// that is asked for and these are whole lines.
#[target_feature(enable = "avx512f,avx512bw")]
pub(crate) fn transpose(src: &[u8], src_stride: usize, dst: &mut [u8], stride: usize, streams: bool) {
    // Then every row of `dst` begins at a line.
    let streams = streams && is_aligned(dst) && stride.is_multiple_of(TILE);
    let group = |first: usize| {
        let row = |i: usize| {
            let row = &src[(first + i) * src_stride..][..TILE];
            // SAFETY: a row is the 64 bytes that are read.
            unsafe { _mm512_loadu_si512(row.as_ptr().cast()) }
        };
        turn!(|a, b| _mm512_unpacklo_epi8(a, b), |a, b| _mm512_unpackhi_epi8(a, b), sixteen!(row))
    };
    let groups = [group(0), group(16), group(32), group(48)];
    // Of column 16 · l + i each group has its part in lane l of vector i.
    let [a, b, c, d] = &groups;
    for i in 0..16 {
        let even = [_mm512_shuffle_i32x4::<0x88>(a[i], b[i]), _mm512_shuffle_i32x4::<0x88>(c[i], d[i])];
        let odd = [_mm512_shuffle_i32x4::<0xDD>(a[i], b[i]), _mm512_shuffle_i32x4::<0xDD>(c[i], d[i])];
        let columns = [
            _mm512_shuffle_i32x4::<0x88>(even[0], even[1]),
            _mm512_shuffle_i32x4::<0x88>(odd[0], odd[1]),
            _mm512_shuffle_i32x4::<0xDD>(even[0], even[1]),
            _mm512_shuffle_i32x4::<0xDD>(odd[0], odd[1]),
        ];
        for (lane, column) in columns.into_iter().enumerate() {
            let line = dst[(16 * lane + i) * stride..][..TILE].as_mut_ptr();
            if streams {
                // SAFETY: a line is 64 bytes, and aligned, as `dst` is and rows are whole lines.
                unsafe { _mm512_stream_si512(line.cast(), column) };
            } else {
                // SAFETY: a line is the 64 bytes that are written.
                unsafe { _mm512_storeu_si512(line.cast(), column) };
            }
        }
    }
}
