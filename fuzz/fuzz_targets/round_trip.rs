//! Codes are kept by decoding and encoding; numbers by encoding and decoding, to the nearest value.
#![no_main]

use fp8_format::{E4M3, E5M2, Fp8};
use libfuzzer_sys::fuzz_target;

fn codes<T: Fp8>(code: u8) {
    let x = T::from_bits(code);
    let kept = if x.is_nan() { 0x7F } else { code };
    let back = [
        T::from_f32(x.to_f32()),
        T::from_f64(x.to_f64()),
        T::from_f16(x.to_f16()),
        T::from_bf16(x.to_bf16()),
    ];
    assert_eq!(back.map(T::to_bits), [kept; 4]);
    if x.is_finite() {
        assert_eq!(T::from_f32_saturating(x.to_f32()).to_bits(), code);
        assert_eq!(T::from_f32_stochastic(x.to_f32(), u32::from(code) << 24).to_bits(), code);
    }
}

fn numbers<T: Fp8>(x: f64, r: u32) {
    let y = T::from_f64_saturating(x);
    if x.is_nan() {
        assert_eq!(y.to_bits(), 0x7F);
        return;
    }
    assert_eq!(y.to_bits() & 0x80 != 0, x.is_sign_negative());
    // No neighbour is nearer, and of two that are as near the even one is taken.
    let (magnitude, clamped) = (y.to_bits() & 0x7F, x.abs().min(T::MAX.into()));
    let distance = |code: u8| (T::from_bits(code).to_f64() - clamped).abs();
    let neighbours = [magnitude.checked_sub(1), magnitude.checked_add(1)];
    for other in neighbours.into_iter().flatten().filter(|code| T::from_bits(*code).is_finite()) {
        let [here, there] = [distance(magnitude), distance(other)];
        assert!(here < there || (here == there && magnitude % 2 == 0), "{x:e}: {magnitude:#x} or {other:#x}");
    }
    assert_eq!(T::from_f64_saturating(y.to_f64()).to_bits(), y.to_bits());
    let narrow = x as f32;
    let [down, up, any] = [0, u32::MAX, r].map(|r| T::from_f32_stochastic(narrow, r).to_bits());
    assert!(any == down || any == up);
    assert!(up - down <= 1);
}

fuzz_target!(|input: (u8, u64, u32)| {
    let (code, bits, r) = input;
    codes::<E4M3>(code);
    codes::<E5M2>(code);
    // All patterns, and numbers in and around the formats' range.
    let near = f64::from_bits((bits & 0x801F_FFFF_FFFF_FFFF) | (0x3E8_u64 + u64::from(code % 40)) << 52);
    for x in [f64::from_bits(bits), f32::from_bits(r).into(), near] {
        numbers::<E4M3>(x, r);
        numbers::<E5M2>(x, r);
    }
});
