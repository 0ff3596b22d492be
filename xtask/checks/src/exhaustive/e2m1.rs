//! The sweep over E2M1: its codec by the oracle, and the slices of NVFP4 by the codec.

use super::count::{Path as Count, for_each_chunk, timed, total};
use super::oracle::{self, Spec};
use fp8_format::slice::{Codec, Nvfp4Options, Nvfp4Output, Path};
use fp8_format::{E2M1, E4M3, TensorScale};
use half::{bf16, f16};

const SPEC: Spec = Spec { name: "E2M1", mantissa: 1, bias: 1, max: 7, overflow: 7 };

/// Returns (conversions, mismatches).
pub(super) fn sweep(stride: u32) -> (u64, u64) {
    let reports = [f32_patterns(stride), small_patterns()];
    reports.into_iter().fold((0, 0), |total, one| (total.0 + one.0, total.1 + one.1))
}

/// The code of the oracle's byte, whose sign is bit 7.
fn four_bits(byte: u8) -> u8 {
    byte & 7 | (byte & 0x80) >> 4
}

/// All f32 patterns, by the function of one value, of a float and of a double, and by each path in blocks of 16.
fn f32_patterns(stride: u32) -> (u64, u64) {
    let one = Count::new("E2M1: f32, one by one");
    let double = Count::new("E2M1: f32 as f64, one by one");
    let paths: Vec<(Codec, Count)> = Path::available()
        .map(|path| (Codec::new().on(path), Count::new(format!("E2M1: f32, {path}, quantize_nvfp4"))))
        .collect();
    for_each_chunk(stride, |patterns| {
        let input = |i: usize| patterns.get(i).copied().unwrap_or(0).into();
        let judge = |bits: &u32| four_bits(oracle::encode(SPEC, oracle::parts_f32(*bits), true));
        let expected: Vec<u8> = patterns.iter().map(judge).collect();
        let x = || patterns.iter().map(|bits| f32::from_bits(*bits));
        let (got, took) = timed(|| x().map(|x| E2M1::from_f32(x).to_bits()).collect::<Vec<u8>>());
        one.compare(input, &got, &expected, took);
        let (got, took) = timed(|| x().map(|x| E2M1::from_f64(x.into()).to_bits()).collect::<Vec<u8>>());
        double.compare(input, &got, &expected, took);
        // Behind each 15 patterns is an infinity, which makes the factor of every block the same.
        let mut blocks = Vec::with_capacity(patterns.len() / 15 * 16 + 16);
        for some in x().collect::<Vec<_>>().chunks(15) {
            blocks.extend_from_slice(some);
            blocks.resize(blocks.len().next_multiple_of(16), f32::INFINITY);
        }
        let factor = TensorScale::from_amax(f32::INFINITY).block_factor(E4M3::MAX);
        let expected: Vec<u8> = blocks
            .as_chunks()
            .0
            .iter()
            .map(|pair: &[f32; 2]| {
                let [first, second] = pair.map(|x| E2M1::from_f32(x * factor));
                E2M1::pack(first, second)
            })
            .collect();
        let (mut codes, mut scales) = (vec![0; expected.len()], vec![E4M3::ZERO; blocks.len() / 16]);
        for (codec, count) in &paths {
            codes.fill(0);
            let (done, took) = timed(|| {
                let out = Nvfp4Output::new(&mut codes, &mut scales);
                codec.quantize_nvfp4(&blocks, 1, blocks.len(), f32::INFINITY, &Nvfp4Options::default(), out)
            });
            let got = if done.is_ok() { &codes[..] } else { &[] };
            count.compare(|i| blocks[2 * i].to_bits().into(), got, &expected, took);
        }
    });
    total([&one, &double].into_iter().chain(paths.iter().map(|(_, count)| count)))
}

/// All f16 and bf16 patterns, and with all 256 bytes of stochastic rounding every 97th.
fn small_patterns() -> (u64, u64) {
    let (half, brain) = (Count::new("E2M1: f16, one by one"), Count::new("E2M1: bf16, one by one"));
    let stochastic = Count::new("E2M1: bf16 with bytes");
    let input = |i: usize| i as u64;
    let all = || 0..=u16::MAX;
    let codes = |parts: fn(u16) -> oracle::Parts| -> Vec<u8> {
        all().map(|bits| four_bits(oracle::encode(SPEC, parts(bits), true))).collect()
    };
    let (got, took) =
        timed(|| all().map(|bits| E2M1::from_f16(f16::from_bits(bits)).to_bits()).collect::<Vec<u8>>());
    half.compare(input, &got, &codes(oracle::parts_f16), took);
    let (got, took) =
        timed(|| all().map(|bits| E2M1::from_bf16(bf16::from_bits(bits)).to_bits()).collect::<Vec<u8>>());
    brain.compare(input, &got, &codes(oracle::parts_bf16), took);
    for bits in all().step_by(97) {
        let x = bf16::from_bits(bits);
        let expected: Vec<u8> = (0..=255)
            .map(|r| four_bits(oracle::encode_stochastic(SPEC, x.to_f32(), u32::from(r as u8) << 24)))
            .collect();
        let (got, took) =
            timed(|| (0..=255).map(|r| E2M1::from_bf16_stochastic(x, r).to_bits()).collect::<Vec<u8>>());
        stochastic.compare(|_| bits.into(), &got, &expected, took);
    }
    total([&half, &brain, &stochastic])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_coarse_sweep_has_no_mismatch() {
        let (conversions, mismatches) = sweep(40_009);
        assert_eq!(mismatches, 0);
        assert!(conversions > 500_000, "{conversions}");
    }
}
