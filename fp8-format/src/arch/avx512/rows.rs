//! Rowwise blocks whose amaxes and codes come from one read.
//!
//! A block stays in registers from its amax to its codes. Almost all blocks are ordinary: their amax is finite, not tiny and at
//! least epsilon, and they contain no NaN. Then the scale of a power-of-two rule is a sum of bits, no code is NaN, and only
//! [`MxRule::Floor`] has codes to clamp. [`ordinary`] computes such blocks up to the first that is not, which
//! [`quantize_rows`] leaves to the functions for any block.

use super::blocks::quantize_blocks;
use super::exponents::{bases, encode_exponents, odd_words};
use super::*;
use crate::arch::avx2::is_aligned;
use crate::arch::blocks::{F32Rule, MxRule, Rule};
use crate::codec::Format;

/// Codes of blocks with the factors that `rule` makes of their amaxes, which are stored. The source is read once.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub(crate) fn quantize_rows<S: Source, T: Target>(
    src: &[S],
    block: usize,
    rule: &Rule,
    amaxes: &mut [f32],
    dst: &mut [u8],
    streams: bool,
) {
    let streams = streams && is_aligned(dst);
    let is_ordinary = Ordinary::new(rule);
    // Blocks that `ordinary` computes together.
    let together = if block == 32 { 2 } else { 1 };
    let whole = if matches!(block, 32 | 128) { src.len() / (block * together) * together } else { 0 };
    let mut done = 0;
    while done < amaxes.len() {
        let (src, dst, amaxes) = (&src[done * block..], &mut dst[done * block..], &mut amaxes[done..]);
        let steps = match (block, rule) {
            _ if done >= whole => 0,
            (32, Rule::Mx(MxRule::Floor { .. })) => {
                ordinary::<S, T, 32, 1, true, true>(src, is_ordinary, amaxes, dst, streams)
            }
            (32, _) => ordinary::<S, T, 32, 1, true, false>(src, is_ordinary, amaxes, dst, streams),
            (_, Rule::F32(F32Rule { mask: u32::MAX, .. })) => {
                ordinary::<S, T, 128, 2, false, false>(src, is_ordinary, amaxes, dst, streams)
            }
            _ => ordinary::<S, T, 128, 2, true, false>(src, is_ordinary, amaxes, dst, streams),
        };
        let here = steps * together;
        done += here;
        // A step with a block that is not ordinary, or what is behind the last step.
        let most = if done < whole { together } else { usize::MAX };
        let (src, dst) = (&src[here * block..], &mut dst[here * block..]);
        let others = src.chunks(block).zip(dst.chunks_mut(block)).zip(&mut amaxes[here..]);
        for ((src, dst), amax) in others.take(most) {
            *amax = super::amax::<S>(src);
            quantize_blocks::<S, T>(src, block, &[rule.factor(*amax)], dst, false);
            done += 1;
        }
    }
}

/// The bits of amaxes that are finite, not tiny and at least epsilon.
#[derive(Clone, Copy)]
pub(super) struct Ordinary {
    least: u32,
    span: u32,
}

impl Ordinary {
    /// 2⁻⁸⁰: larger amaxes have normal scales, and no subnormal element of bf16 becomes anything but 0.
    const LEAST: u32 = (127 - 80) << 23;

    pub(super) fn new(rule: &Rule) -> Self {
        let epsilon = match rule {
            Rule::F32(rule) if rule.epsilon > 0.0 => rule.epsilon.to_bits(),
            _ => 0,
        };
        let least = epsilon.max(Self::LEAST);
        Self { least, span: codec::F32_EXP.saturating_sub(least) }
    }

    #[inline(always)]
    pub(super) const fn contains(self, amax: u32) -> bool {
        amax.wrapping_sub(self.least) < self.span
    }
}

/// Computes blocks of `N` elements in steps of `V` vectors of codes until one of a step is not ordinary. Returns the number of
/// steps. Scales are powers of two if `POWERS`; codes are clamped if `CLAMPS`.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
fn ordinary<S: Source, T: Target, const N: usize, const V: usize, const POWERS: bool, const CLAMPS: bool>(
    src: &[S],
    is_ordinary: Ordinary,
    amaxes: &mut [f32],
    dst: &mut [u8],
    streams: bool,
) -> usize {
    const { assert!(N == 128 && V == 2 || N == 32 && V == 1) };
    let steps = src.as_chunks::<BLOCK>().0.as_chunks::<V>().0;
    let lines = dst.as_chunks_mut::<BLOCK>().0.as_chunks_mut::<V>().0;
    let amaxes = amaxes.chunks_exact_mut(const { BLOCK * V / N });
    for (i, ((step, lines), amaxes)) in steps.iter().zip(lines).zip(amaxes).enumerate() {
        // Prefetches into the nearest cache would compete with the loads for its buffers of missing lines.
        if streams {
            fetch_second(step, V * AHEAD);
        }
        let bits = amaxes_of::<S, N, V>(step);
        let [low, high] =
            [_mm_cvtsi128_si32(bits).cast_unsigned(), _mm_extract_epi32::<1>(bits).cast_unsigned()];
        if !is_ordinary.contains(low) || N < BLOCK && !is_ordinary.contains(high) {
            return i;
        }
        amaxes[0] = f32::from_bits(low);
        if N < BLOCK {
            amaxes[1] = f32::from_bits(high);
        }
        let by = Multiplier::new::<T, N, POWERS, CLAMPS>(bits);
        for (block, line) in step.iter().zip(lines) {
            emit(line, by.codes::<S, T, POWERS, CLAMPS>(block), streams);
        }
    }
    steps.len()
}

/// The factors for the two halves of a vector: as scales, and as the bases of [`encode_exponents`] where they are powers
/// of two.
#[derive(Clone, Copy)]
pub(super) struct Multiplier {
    low: __m512,
    high: __m512,
    bases: __m512i,
}

impl Multiplier {
    /// The scale of a block, from the bits of its amax in the first lane.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi")]
    pub(super) fn of_block<T: Target, const POWERS: bool>(amax: __m128i) -> Self {
        Self::new::<T, 128, POWERS, false>(amax)
    }

    /// The scales of blocks of `N` elements, from the bits of their amaxes in the first lanes.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi")]
    fn new<T: Target, const N: usize, const POWERS: bool, const CLAMPS: bool>(amaxes: __m128i) -> Self {
        let scales = if POWERS {
            _mm_castsi128_ps(powers::<T, CLAMPS>(amaxes))
        } else {
            let max = f32::from_bits(T::FORMAT.widen_f32(T::TOP.into()));
            _mm_div_ss(_mm_set_ss(max), _mm_castsi128_ps(amaxes))
        };
        let bases = bases::<T>(_mm_castps_si128(scales));
        let low = _mm512_broadcastss_ps(scales);
        if N < BLOCK {
            let high = _mm512_broadcastss_ps(_mm_movehdup_ps(scales));
            let bases = _mm512_permutexvar_epi8(table(&FIRST_TWO), _mm512_castsi128_si512(bases));
            Self { low, high, bases }
        } else {
            Self { low, high: low, bases: _mm512_broadcastb_epi8(bases) }
        }
    }

    /// The codes of a vector. `POWERS` and `CLAMPS` are as in [`ordinary`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
    pub(super) fn codes<S: Source, T: Target, const POWERS: bool, const CLAMPS: bool>(
        self,
        block: &[S; BLOCK],
    ) -> Codes {
        match S::KIND {
            Kind::F32 if POWERS => {
                let [a, b, c, d] = floats(block);
                encode_exponents::<T, CLAMPS>([odd_words(a, b), odd_words(c, d)], self.bases, true)
            }
            Kind::BF16 if POWERS => encode_exponents::<T, CLAMPS>(words(block), self.bases, false),
            _ => encode_products::<S, T, CLAMPS>(block, self.low, self.high),
        }
    }
}

/// The first byte of a vector for a half, that of the next f32 for the other.
const FIRST_TWO: [u8; BLOCK] = {
    let mut order = [0; BLOCK];
    let mut i = BLOCK / 2;
    while i < BLOCK {
        order[i] = 4;
        i += 1;
    }
    order
};

/// The bits of a step's amaxes in the first lanes: of the two halves of its vector, or of its only block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn amaxes_of<S: Source, const N: usize, const V: usize>(step: &[[S; BLOCK]; V]) -> __m128i {
    // Of a step of one vector, the second is the first.
    let (first, second) = (&step[0], &step[V - 1]);
    match (S::KIND, N) {
        (Kind::F32, 128) => amax_of::<S>(_mm512_max_epu32(larger(floats(first)), larger(floats(second)))),
        (Kind::F32, _) => {
            let [a, b, c, d] = floats(first);
            let max = |a, b| quarter(_mm512_max_epu32(absolute(a), absolute(b)));
            let (a, b) = (max(a, b), max(c, d));
            let m = _mm_max_epu32(_mm_unpacklo_epi32(a, b), _mm_unpackhi_epi32(a, b));
            _mm_max_epu32(m, _mm_shuffle_epi32::<0b01_00_11_10>(m))
        }
        (Kind::F16 | Kind::BF16, 128) => {
            let ([a, b], [c, d]) = (words(first), words(second));
            let least = |a, b| _mm512_min_epu16(negated(a), negated(b));
            amax_of::<S>(_mm512_min_epu16(least(a, b), least(c, d)))
        }
        (Kind::F16 | Kind::BF16, _) => {
            let [a, b] = words(first);
            let (a, b) = (least_word(negated(a)), least_word(negated(b)));
            // f16 have their words side by side.
            let both =
                if let Kind::F16 = S::KIND { _mm_unpacklo_epi16(a, b) } else { _mm_unpacklo_epi32(a, b) };
            amaxes_of_words::<S>(both)
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn absolute(x: __m512) -> __m512i {
    _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(codec::F32_ABS.cast_signed()))
}

/// The larger magnitudes of four vectors.
#[inline]
#[target_feature(enable = "avx512f")]
fn larger([a, b, c, d]: [__m512; 4]) -> __m512i {
    let max = |a, b| _mm512_max_epu32(a, b);
    max(max(absolute(a), absolute(b)), max(absolute(c), absolute(d)))
}

/// The largest of each four lanes that are four apart.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512vl")]
fn quarter(m: __m512i) -> __m128i {
    let m = _mm256_max_epu32(_mm512_castsi512_si256(m), _mm512_extracti64x4_epi64::<1>(m));
    _mm_max_epu32(_mm256_castsi256_si128(m), _mm256_extracti128_si256::<1>(m))
}

/// The largest lane of a vector, in all lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512vl")]
fn largest_lane(m: __m512i) -> __m128i {
    let m = quarter(m);
    let m = _mm_max_epu32(m, _mm_shuffle_epi32::<0b01_00_11_10>(m));
    _mm_max_epu32(m, _mm_shuffle_epi32::<0b10_11_00_01>(m))
}

/// The bits of a block's amax as f32, from the largest magnitudes of lanes: of 32 bits for f32, else words of 0x7FFF less these.
/// Those of NaN are beyond those of infinity.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn amax_of<S: Source>(m: __m512i) -> __m128i {
    if let Kind::F32 = S::KIND { largest_lane(m) } else { amaxes_of_words::<S>(least_word(m)) }
}

/// 0x7FFF less the magnitudes of 16-bit elements.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn negated(x: __m512i) -> __m512i {
    _mm512_andnot_si512(x, splat(ABS))
}

/// The least word of a vector, in the first lane; its place is in the next.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn least_word(m: __m512i) -> __m128i {
    let m = _mm256_min_epu16(_mm512_castsi512_si256(m), _mm512_extracti64x4_epi64::<1>(m));
    _mm_minpos_epu16(_mm_min_epu16(_mm256_castsi256_si128(m), _mm256_extracti128_si256::<1>(m)))
}

/// The bits of amaxes as f32 from 0x7FFF less their magnitudes: lower halves of bf16, or words of f16. Those of NaN are beyond those
/// of infinity.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn amaxes_of_words<S: Source>(m: __m128i) -> __m128i {
    let words = _mm_xor_si128(m, _mm_set1_epi16(ABS.cast_signed()));
    match S::KIND {
        Kind::F16 => _mm_castps_si128(_mm_cvtph_ps(words)),
        Kind::F32 | Kind::BF16 => _mm_slli_epi32::<16>(words),
    }
}

/// The bits of the powers of two that blocks are multiplied by, from those of their amaxes.
///
/// An amax whose significand is beyond 1.75, that of the largest code, counts as the next power of two; with `MxRule::Floor` it
/// does not.
#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
fn powers<T: Target, const CLAMPS: bool>(amax: __m128i) -> __m128i {
    let Format { man, bias, .. } = T::FORMAT;
    let top: u32 = T::TOP.into();
    let most = (2 * 127 + (top >> man) - bias) << 23;
    debug_assert_eq!(
        top & ((1 << man) - 1),
        (7 << man >> 2) & ((1 << man) - 1),
        "the largest code is 1.75 · 2ᵏ"
    );
    let up = if CLAMPS { 0 } else { 0x1F_FFFF };
    let set = |x: u32| _mm_set1_epi32(x.cast_signed());
    let exponent = _mm_and_si128(_mm_add_epi32(amax, set(up)), set(codec::F32_EXP));
    _mm_sub_epi32(set(most), exponent)
}

/// The codes of a vector's halves, each multiplied by a scale. No product is NaN, and only with `CLAMPS` one is beyond the largest
/// code.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
fn encode_products<S: Source, T: Target, const CLAMPS: bool>(
    block: &[S; BLOCK],
    low: __m512,
    high: __m512,
) -> Codes {
    let odd = |even, odd, scale| round_to_odd(_mm512_mul_ps(even, scale), _mm512_mul_ps(odd, scale));
    let of = &Of::<7, 127, T>::ROUNDING;
    let code = |(x, a)| {
        let c = if CLAMPS { _mm512_min_epu16(a, splat(of.clamp)) } else { a };
        signed(uneven(_mm512_max_epu16(c, splat(of.floor)), of), x, of)
    };
    if let Kind::BF16 = S::KIND {
        // Words in turns, so that the codes come in order.
        let [x, y] = words(block);
        let even = |x| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(x));
        let uneven =
            |x| _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(0xFFFF_0000_u32.cast_signed())));
        let pair = [code(odd(even(x), uneven(x), low)), code(odd(even(y), uneven(y), high))];
        pack(pair, &IN_ORDER)
    } else {
        let [a, b, c, d] = floats(block);
        pack([code(odd(a, b, low)), code(odd(c, d, high))], &INTERLEAVED)
    }
}

/// Stores a line of codes, past the caches if `streams`, for which it has to be aligned.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn emit(line: &mut [u8; BLOCK], codes: Codes, streams: bool) {
    if streams {
        debug_assert!(is_aligned(line));
        // SAFETY: a line is 64 bytes, and aligned, as the caller makes sure.
        unsafe { _mm512_stream_si512(line.as_mut_ptr().cast(), codes) };
    } else {
        store(line, codes);
    }
}
