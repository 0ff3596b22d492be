//! Every recorded quantization of `golden/blocks` on every path (its README says how the data was made), and of the folder that
//! `FP8_TEST_GOLDEN_BLOCKS` names.

#![expect(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod safetensors;

use fp8_format::slice::{BlockOutput, BlockScaling, Codec, MxOutput, MxRounding, Path};
use fp8_format::{Blocks, E4M3, E5M2, E8M0, Fp8, Source};
use half::{bf16, f16};
use safetensors::{File, hash, named};
use serde_json::Value;
use std::path::PathBuf;

/// Results of a direction.
struct Room<T> {
    codes: Vec<T>,
    scale: Vec<f32>,
    scale_inv: Vec<f32>,
    e8m0: Vec<E8M0>,
}

impl<T: Fp8> Room<T> {
    fn new(blocks: Blocks, [rows, cols]: [usize; 2]) -> Self {
        let [height, width] = blocks.grid(rows, cols);
        let floats = || vec![0.0; height * width];
        Self {
            codes: vec![T::default(); rows * cols],
            scale: floats(),
            scale_inv: floats(),
            e8m0: vec![E8M0::ONE; height * width],
        }
    }

    fn f32(&mut self) -> BlockOutput<'_, T> {
        let out = BlockOutput::new(&mut self.codes, &mut self.scale_inv);
        BlockOutput { scale: Some(&mut self.scale), ..out }
    }

    fn mx(&mut self) -> MxOutput<'_, T> {
        MxOutput::new(&mut self.codes, &mut self.e8m0)
    }

    fn expect(&self, file: &File, case: &Value, codec: Codec, blocks: Blocks, [rows, cols]: [usize; 2]) {
        let what = format!("{} {case}: {codec:?}", file.name);
        let mut values = vec![0.0_f32; rows * cols];
        if blocks == Blocks::Mx32 {
            let bytes: Vec<u8> = self.e8m0.iter().map(|x| x.to_bits()).collect();
            assert_eq!(bytes, file.bytes(named(case, "e8m0")), "{what}");
            codec.dequantize_mx(&self.codes, rows, cols, &self.e8m0, &mut values).unwrap();
        } else {
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&self.scale), file.words(named(case, "scale")), "{what}");
            assert_eq!(bits(&self.scale_inv), file.words(named(case, "scale_inv")), "{what}");
            codec.dequantize_blocks(&self.codes, rows, cols, blocks, &self.scale_inv, &mut values).unwrap();
        }
        let codes: Vec<u8> = self.codes.iter().map(|x| x.to_bits()).collect();
        let recorded = file.bytes(named(case, "codes"));
        let wrong = codes.iter().zip(recorded).filter(|(got, want)| got != want).count();
        assert_eq!((codes.len(), wrong), (recorded.len(), 0), "{what}: codes differ");
        assert_eq!(hash(&values), named(case, "dq_fnv"), "{what}: values differ");
    }
}

/// Runs a case on all paths.
fn check<T: Fp8, S: Source>(file: &File, case: &Value, x: &[S]) {
    let [rows, cols] = file.shape("x");
    let mode = named(case, "mode");
    let blocks = match mode.trim_end_matches("_p2") {
        "row" => Blocks::Row,
        "b1x128" => Blocks::B1x128,
        "b128x128" => Blocks::B128x128,
        _ => Blocks::Mx32,
    };
    let scaling = BlockScaling {
        power_2_scales: mode.ends_with("_p2"),
        epsilon: case["epsilon"].as_f64().unwrap() as f32,
        ..BlockScaling::new(blocks)
    };
    let rounding = if mode == "mx32_floor" { MxRounding::Floor } else { MxRounding::Ceil };
    let is_columnwise = case["columnwise"].as_bool().unwrap();
    for codec in Path::available().map(|path| Codec::new().on(path)) {
        let mut rowwise = Room::<T>::new(blocks, [rows, cols]);
        let mut columnwise = Room::<T>::new(blocks, [cols, rows]);
        match (is_columnwise, blocks) {
            (false, Blocks::Mx32) => codec.quantize_mx(x, rows, cols, rounding, rowwise.mx()),
            (false, _) => codec.quantize_blocks(x, rows, cols, &scaling, rowwise.f32()),
            (true, Blocks::Mx32) => {
                let out = Some(rowwise.mx());
                codec.quantize_mx_transpose(x, rows, cols, rounding, out, columnwise.mx())
            }
            (true, _) => {
                let out = Some(rowwise.f32());
                codec.quantize_blocks_transpose(x, rows, cols, &scaling, out, columnwise.f32())
            }
        }
        .unwrap();
        if is_columnwise {
            columnwise.expect(file, case, codec, blocks, [cols, rows]);
        } else {
            rowwise.expect(file, case, codec, blocks, [rows, cols]);
        }
    }
}

#[test]
fn every_case_on_every_path() {
    let mut count = 0;
    for file in File::all("blocks", "FP8_TEST_GOLDEN_BLOCKS").iter().filter(|file| file.kind() == "quantize")
    {
        for case in file.cases() {
            match (named(&case, "format"), file.header["x"]["dtype"].as_str().unwrap()) {
                ("e4m3", "F32") => check::<E4M3, f32>(file, &case, &file.floats("x")),
                ("e4m3", "F16") => check::<E4M3, f16>(file, &case, &file.halves("x", f16::from_bits)),
                ("e4m3", _) => check::<E4M3, bf16>(file, &case, &file.halves("x", bf16::from_bits)),
                (_, "F32") => check::<E5M2, f32>(file, &case, &file.floats("x")),
                (_, "F16") => check::<E5M2, f16>(file, &case, &file.halves("x", f16::from_bits)),
                (_, _) => check::<E5M2, bf16>(file, &case, &file.halves("x", bf16::from_bits)),
            }
            count += 1;
        }
    }
    assert!(count >= 28, "{count} cases");
}

#[test]
fn e8m0_conversions() {
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/blocks/e8m0.safetensors");
    let file = File::read(file);
    let decode = file.words("decode");
    assert_eq!(decode.len(), 256);
    for (code, want) in (0..=255_u8).zip(decode) {
        let (got, want) = (E8M0::from_bits(code).to_f32(), f32::from_bits(want));
        assert!(got == want || got.is_nan() && want.is_nan(), "{code}: {got:e}, not {want:e}");
    }
    let x: Vec<f32> = file.words("f32_bits").into_iter().map(f32::from_bits).collect();
    assert_eq!(x.len(), 3960);
    type Convert = fn(f32) -> E8M0;
    let convert: [(&str, Convert); 4] = [
        ("floor_sat", E8M0::from_f32_floor_saturating),
        ("ceil_sat", E8M0::from_f32_ceil_saturating),
        ("floor_nosat", E8M0::from_f32_floor),
        ("ceil_nosat", E8M0::from_f32_ceil),
    ];
    for (name, convert) in convert {
        for (x, want) in x.iter().zip(file.bytes(name)) {
            assert_eq!(convert(*x).to_bits(), *want, "{name} of {x:e} = {:#x}", x.to_bits());
        }
    }
}
