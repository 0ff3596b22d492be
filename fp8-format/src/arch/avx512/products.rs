//! Quantization of bf16 by tables of products: 64 lanes of bytes, no arithmetic but on exponents.
//!
//! A bf16 has 128 significands, so its products with one scale, rounded to f32 and then to a code, are tables of 128 bytes,
//! right whatever the scale because the path that multiplies makes them. All binades whose products are normal share one
//! table: their codes differ in the exponent alone. The few binades below, which have subnormal codes, have a table each,
//! looked up where a block has such an element. Whatever lies farther below gives 0.
//!
//! That look-up has its price: where blocks have subnormal codes, as uniform data have with a small scale, this is hardly
//! faster than multiplication, which takes the same time whatever the data; without them it is twice as fast.

use super::*;

/// Scales between these powers of two leave the subnormal numbers of bf16 far below and infinity far above.
const EXPONENTS: core::ops::Range<i32> = -100..100;
/// Elements that are worth a table.
const FROM: usize = 1 << 12;

/// The tables for this scale, where they can be made and pay.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub(crate) fn product_tables<S: Source, T: Target>(scale: f32, len: usize) -> Option<ProductTables> {
    if !matches!(S::KIND, Kind::BF16) || len < FROM {
        return None;
    }
    let exponent = (scale.to_bits() >> 23).cast_signed() - 127; // 129 and more of negative scales
    if !EXPONENTS.contains(&exponent) {
        return None;
    }
    let min_normal_exponent = 1 - T::FORMAT.bias.cast_signed();
    let normal = u8::try_from(127 + min_normal_exponent - exponent).ok()?;
    let mut codes = [[[0; BLOCK]; 2]; ProductTables::MOST];
    for (exponent, codes) in
        (0..=normal).rev().zip(&mut codes).take(1 + usize::from(ProductTables::below(T::FORMAT)))
    {
        let mut bits = u16::from(exponent) << 7..;
        let elements = [(); 2 * BLOCK].map(|()| half::bf16::from_bits(bits.next().unwrap_or_default()));
        quantize_products::<half::bf16, T>(&elements, scale, codes.as_flattened_mut(), false);
    }
    Some(ProductTables { normal, codes })
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub(super) fn quantize<S: Source, T: Target>(
    src: &[S],
    products: &ProductTables,
    dst: &mut [u8],
    streams: bool,
) -> f32 {
    const { assert!(T::TOP == T::FORMAT.max, "a code beyond the largest becomes the largest") };
    let bytes = |x: u8| _mm512_set1_epi8(x.cast_signed());
    let below = const { ProductTables::below(T::FORMAT) };
    let tables = |binade: u8| {
        let [low, high] = &products.codes[usize::from(binade)];
        [table(low), table(high)]
    };
    let [low_codes, high_codes] = tables(0);
    let normal = bytes(products.normal);
    // Below this one all codes are 0. At least 1: subnormal elements are below it.
    let lowest = bytes(products.normal.saturating_sub(below));
    let order = table(&TURNS);
    let mut amax = AmaxOfWords::new();
    // The branch on subnormal codes is mispredicted now and then: the source is prefetched on every CPU.
    drive(src, dst, streams, true, |block| {
        let [x0, x1] = words(block);
        // Bytes of both vectors in turns: exponent's last bit and significand, sign and the rest of the exponent.
        let low = _mm512_mask_blend_epi8(0xAAAA_AAAA_AAAA_AAAA, x0, _mm512_slli_epi16::<8>(x1));
        let high = _mm512_mask_blend_epi8(0xAAAA_AAAA_AAAA_AAAA, _mm512_srli_epi16::<8>(x0), x1);
        let twice = _mm512_add_epi8(high, high);
        let exponent = _mm512_mask_sub_epi8(twice, _mm512_movepi8_mask(low), twice, bytes(0xFF));

        let is_some = _mm512_cmpge_epu8_mask(exponent, lowest);
        let is_below = _mm512_mask_cmplt_epu8_mask(is_some, exponent, normal);
        let mut code = _mm512_maskz_permutex2var_epi8(is_some, low_codes, low, high_codes);
        if is_below != 0 {
            for binade in 1..=below {
                let [low_codes, high_codes] = tables(binade);
                let exponent_here = bytes(products.normal - binade);
                let is_here = _mm512_mask_cmpeq_epu8_mask(is_below, exponent, exponent_here);
                let here = _mm512_permutex2var_epi8(low_codes, low, high_codes);
                code = _mm512_mask_mov_epi8(code, is_here, here);
            }
        }
        // Binades above the normal one; so many give the largest code whatever the significand.
        let most = bytes(if T::FORMAT.man == 3 { 15 } else { 31 });
        let above = _mm512_min_epu8(_mm512_subs_epu8(exponent, normal), most);
        let above = shift_left(above, T::FORMAT.man); // less than 256: no bit gets into the next byte
        let code = _mm512_min_epu8(_mm512_add_epi8(code, above), bytes(T::TOP));
        // code | (high & sign)
        let mut code = _mm512_ternarylogic_epi32::<0xF8>(code, high, bytes(0x80));

        let infinity = splat(infinity::<S>());
        let is_nan = _mm512_cmpgt_epu16_mask(_mm512_max_epu16(abs(x0), abs(x1)), infinity) != 0;
        if is_nan {
            cold();
            let nan0 = _mm512_maskz_mov_epi16(_mm512_cmpgt_epu16_mask(abs(x0), infinity), splat(0x00FF));
            let nan1 = _mm512_maskz_mov_epi16(_mm512_cmpgt_epu16_mask(abs(x1), infinity), splat(0xFF00));
            code = _mm512_mask_mov_epi8(
                code,
                _mm512_movepi8_mask(_mm512_or_si512(nan0, nan1)),
                bytes(codec::NAN),
            );
            amax.add_any([x0, x1], self::infinity::<S>());
        } else {
            amax.add([x0, x1]);
        }
        _mm512_permutexvar_epi8(order, code)
    });
    amax.total::<S>()
}

/// Out of turns: the bytes of the first vector's words, then the second's.
const TURNS: [u8; BLOCK] = {
    let mut order = [0; BLOCK];
    let mut i = 0;
    while i < BLOCK {
        order[i] = (2 * (i % 32) + i / 32).to_le_bytes()[0];
        i += 1;
    }
    order
};
