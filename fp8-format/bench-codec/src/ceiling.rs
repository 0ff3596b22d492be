//! The least work that moves as many bytes: loads joined by `or`, and stores of what they give.
//!
//! Four loops, of which the best is the ceiling: stores past the caches, the same with the source fetched 1 KiB or 8 KiB
//! ahead, and plain stores.

/// The kind of stores in a loop, and how far ahead it fetches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Variant {
    streams: bool,
    /// Bytes that are fetched ahead; 0 for none.
    ahead: usize,
}

pub(crate) const VARIANTS: [Variant; 4] = [
    Variant { streams: true, ahead: 0 },
    Variant { streams: true, ahead: 1 << 10 },
    Variant { streams: true, ahead: 8 << 10 },
    Variant { streams: false, ahead: 0 },
];

const LINE: usize = 64;

/// Lines that are read and written at a time, each written line in a part of `dst` of its own.
pub(crate) fn run(src: &[u8], dst: &mut [u8], [reads, writes]: [usize; 2], variant: Variant) {
    match [reads, writes] {
        [8, 1] => steps::<8, 1>(src, dst, variant),
        [4, 1] => steps::<4, 1>(src, dst, variant),
        [2, 1] => steps::<2, 1>(src, dst, variant),
        [1, 1] => steps::<1, 1>(src, dst, variant),
        [1, 2] => steps::<1, 2>(src, dst, variant),
        [1, 4] => steps::<1, 4>(src, dst, variant),
        [4, 2] => steps::<4, 2>(src, dst, variant),
        [2, 2] => steps::<2, 2>(src, dst, variant),
        _ => steps::<4, 0>(src, dst, variant),
    }
}

fn steps<const R: usize, const W: usize>(src: &[u8], dst: &mut [u8], variant: Variant) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx512f") {
        // SAFETY: the CPU has these instructions.
        return unsafe { wide::<R, W>(src, dst, variant) };
    }
    let _ = variant;
    plain::<R, W>(src, dst);
}

/// For other machines: whatever the compiler makes of it.
fn plain<const R: usize, const W: usize>(src: &[u8], dst: &mut [u8]) {
    let mut any = [0; LINE];
    let mut lines = dst.as_chunks_mut::<LINE>().0.chunks_exact_mut(W.max(1));
    for step in src.as_chunks::<LINE>().0.chunks_exact(R) {
        let mut line = [0; LINE];
        step.iter().for_each(|read| line.iter_mut().zip(read).for_each(|(all, byte)| *all |= byte));
        match lines.next() {
            Some(written) if W > 0 => written.fill(line),
            _ => any.iter_mut().zip(line).for_each(|(all, byte)| *all |= byte),
        }
    }
    std::hint::black_box(any);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn wide<const R: usize, const W: usize>(src: &[u8], dst: &mut [u8], variant: Variant) {
    match variant {
        Variant { streams: true, ahead: 0 } => wide_loop::<R, W, true, 0>(src, dst),
        Variant { streams: true, ahead: 1024 } => wide_loop::<R, W, true, 1024>(src, dst),
        Variant { streams: true, .. } => wide_loop::<R, W, true, 8192>(src, dst),
        Variant { streams: false, .. } => wide_loop::<R, W, false, 0>(src, dst),
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
fn wide_loop<const R: usize, const W: usize, const STREAMS: bool, const AHEAD: usize>(
    src: &[u8],
    dst: &mut [u8],
) {
    use std::arch::x86_64::*;
    let steps = src.len() / (LINE * R);
    let steps = dst.len().checked_div(LINE * W).map_or(steps, |most| steps.min(most));
    // Outputs of several lines a step that are results of their own lie apart; a wider element's lie together.
    let is_apart = R > 1 && W > 1;
    let part = dst.len().checked_div(W).filter(|_| is_apart).unwrap_or(LINE);
    let stride = if is_apart { LINE } else { LINE * W };
    let mut any = _mm512_setzero_si512();
    for step in 0..steps {
        let mut line = _mm512_setzero_si512();
        for read in 0..R {
            let from = src.as_ptr().wrapping_add((step * R + read) * LINE);
            if AHEAD > 0 {
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(AHEAD).cast());
            }
            // SAFETY: `steps` times `R` lines lie in `src`.
            line = _mm512_or_si512(line, unsafe { _mm512_loadu_si512(from.cast()) });
        }
        for write in 0..W {
            let to = dst.as_mut_ptr().wrapping_add(step * stride + write * part).cast();
            if STREAMS {
                // SAFETY: `steps` times `W` lines lie in `dst`, which begins at a page; parts of it are whole lines.
                unsafe { _mm512_stream_si512(to, line) };
            } else {
                // SAFETY: as above.
                unsafe { _mm512_storeu_si512(to, line) };
            }
        }
        if W == 0 {
            any = _mm512_or_si512(any, line);
        }
    }
    if STREAMS {
        _mm_sfence();
    }
    std::hint::black_box(_mm512_reduce_or_epi64(any));
}
