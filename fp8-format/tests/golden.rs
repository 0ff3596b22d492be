//! Every recorded conversion of `golden/codec` (see its README for how the data was made).

#![expect(clippy::panic, reason = "a test fails by panicking, in its helpers too")]

use fp8_format::{E4M3, E5M2};
use half::{bf16, f16};
use std::path::Path;

/// Recorded values between two that are tried; Miri is slow.
const STRIDE: usize = if cfg!(miri) { 257 } else { 1 };

fn read(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/codec").join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn words(name: &str) -> Vec<u16> {
    read(name).chunks_exact(2).map(|w| u16::from_le_bytes([w[0], w[1]])).collect()
}

/// Compares all, then reports how many differ and the first of them.
#[track_caller]
fn expect_equal<T: PartialEq + std::fmt::LowerHex>(what: &str, cases: impl Iterator<Item = (u64, T, T)>) {
    let mut wrong = cases.filter(|(_, got, expected)| got != expected);
    if let Some((input, got, expected)) = wrong.next() {
        let count = 1 + wrong.count();
        panic!("{what}: {count} mismatches; first: {input:#x} gives {got:#x}, expected {expected:#x}");
    }
}

#[test]
fn decode() {
    macro_rules! check {
        ($fp8:ident, $name:literal) => {
            let f32s = read(concat!($name, "_decode_f32.bin"));
            let f32s = f32s.chunks_exact(4).map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]]));
            let codes = || 0..=255_u8;
            expect_equal(
                concat!($name, " to f32"),
                codes().zip(f32s).map(|(c, e)| (c.into(), $fp8::from_bits(c).to_f32().to_bits(), e)),
            );
            expect_equal(
                concat!($name, " to f16"),
                codes()
                    .zip(words(concat!($name, "_decode_f16.bin")))
                    .map(|(c, e)| (c.into(), $fp8::from_bits(c).to_f16().to_bits(), e)),
            );
            expect_equal(
                concat!($name, " to bf16"),
                codes()
                    .zip(words(concat!($name, "_decode_bf16.bin")))
                    .map(|(c, e)| (c.into(), $fp8::from_bits(c).to_bf16().to_bits(), e)),
            );
        };
    }
    check!(E4M3, "e4m3");
    check!(E5M2, "e5m2");
}

#[test]
fn all_f16_and_bf16_patterns() {
    macro_rules! check {
        ($($file:literal: $source:ident, $fp8:ident::$convert:ident;)*) => {$(
            let expected = read($file);
            assert_eq!(expected.len(), 65_536);
            expect_equal(
                $file,
                (0..=u16::MAX)
                    .zip(expected)
                    .step_by(STRIDE)
                    .map(|(bits, e)| (bits.into(), $fp8::$convert($source::from_bits(bits)).to_bits(), e)),
            );
        )*};
    }
    check! {
        "f16_e4m3_sat.u8": f16, E4M3::from_f16_saturating;
        "f16_e4m3_nosat.u8": f16, E4M3::from_f16;
        "f16_e5m2_sat.u8": f16, E5M2::from_f16_saturating;
        "f16_e5m2_nosat.u8": f16, E5M2::from_f16;
        "bf16_e4m3_sat.u8": bf16, E4M3::from_bf16_saturating;
        "bf16_e4m3_nosat.u8": bf16, E4M3::from_bf16;
        "bf16_e5m2_sat.u8": bf16, E5M2::from_bf16_saturating;
        "bf16_e5m2_nosat.u8": bf16, E5M2::from_bf16;
    }
}

#[test]
fn f32_edges() {
    let file = read("f32_edges.bin");
    assert_eq!(file.len(), 22_030 * 8);
    expect_equal(
        "f32 edges (byte order: E4M3 saturating, E4M3, E5M2 saturating, E5M2)",
        file.chunks_exact(8).step_by(STRIDE).map(|r| {
            let bits = u32::from_le_bytes([r[0], r[1], r[2], r[3]]);
            let x = f32::from_bits(bits);
            let got = [
                E4M3::from_f32_saturating(x).to_bits(),
                E4M3::from_f32(x).to_bits(),
                E5M2::from_f32_saturating(x).to_bits(),
                E5M2::from_f32(x).to_bits(),
            ];
            (bits.into(), u32::from_be_bytes(got), u32::from_be_bytes([r[4], r[5], r[6], r[7]]))
        }),
    );
}

#[test]
fn f64_edges() {
    let file = read("f64_edges.bin");
    assert_eq!(file.len(), 12_000 * 12);
    expect_equal(
        "f64 edges (byte order: E4M3 saturating, E4M3, E5M2 saturating, E5M2)",
        file.chunks_exact(12).step_by(STRIDE).map(|r| {
            let bits = u64::from_le_bytes([r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7]]);
            let x = f64::from_bits(bits);
            let got = [
                E4M3::from_f64_saturating(x).to_bits(),
                E4M3::from_f64(x).to_bits(),
                E5M2::from_f64_saturating(x).to_bits(),
                E5M2::from_f64(x).to_bits(),
            ];
            (bits, u32::from_be_bytes(got), u32::from_be_bytes([r[8], r[9], r[10], r[11]]))
        }),
    );
}
