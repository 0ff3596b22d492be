//! Rowwise copies.

use super::{BYTES, Job, SIDE};
use crate::arch::{self, Peak};
use crate::{Blocks, E4M3, Source};

/// Blocks that stay in the nearest cache from their peaks to their codes.
const GROUP: usize = 32;

/// The number of elements between those that are computed and those that are fetched.
const AHEAD: usize = GROUP * SIDE;

/// Quantizes rows, of which the first is row `first` of the matrix; it begins a tile if blocks are tiles.
pub(super) fn quantize<S: Source>(
    job: Job,
    src: &[S],
    cols: usize,
    first: usize,
    codes: &mut [u8],
    scales: &mut [E4M3],
) {
    let (bytes, across) = (cols.div_ceil(2), cols.div_ceil(SIDE));
    let height = if job.blocks == Blocks::B16x16 { SIDE } else { 1 };
    let bands = src.chunks(height * cols).zip(codes.chunks_mut(height * bytes));
    for (at, ((src, codes), scales)) in bands.zip(scales.chunks_mut(across)).enumerate() {
        for (group, scales) in scales.chunks_mut(GROUP).enumerate() {
            let (left, count) = (group * GROUP, scales.len());
            let row = |src: &[S]| left * SIDE..src.len().min((left + count) * SIDE);
            let (mut peaks, mut factors) = ([Peak::default(); GROUP], [0.0; GROUP]);
            let (peaks, factors) = (&mut peaks[..count], &mut factors[..count]);
            for src in src.chunks(cols) {
                // What comes next is on its way while this is computed.
                let next = src.len().min(row(src).end + AHEAD);
                arch::fetch(job.path, &src[next..src.len().min(next + GROUP * SIDE)]);
                arch::fp4_peaks(job.path, &src[row(src)], peaks);
            }
            arch::fp4_scales(job.path, job.tensor, peaks, factors, scales);
            for (r, (src, codes)) in src.chunks(cols).zip(codes.chunks_mut(bytes)).enumerate() {
                let row_number = (first + at * height + r) as u64;
                let mut words = [[0; 4]; GROUP];
                let words = job.random.map(|random| {
                    let random = random.row(row_number, across as u64).skip(left as u64);
                    arch::fp4_words(job.path, random, 1, &mut words[..count]);
                    &words[..count]
                });
                let here = row(src);
                let codes = &mut codes[left * BYTES..][..here.len().div_ceil(2)];
                arch::fp4_codes(job.path, &src[here], factors, words, codes);
            }
        }
    }
}
