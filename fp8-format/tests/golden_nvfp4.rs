//! Every recorded quantization of `golden/nvfp4` on every path (its README says how the data was made), and of the folder that
//! `FP8_TEST_GOLDEN_NVFP4` names.

#![expect(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod safetensors;

use fp8_format::philox::BlockRandom;
use fp8_format::slice::{Codec, HADAMARD_SIGNS, Nvfp4Copy, Nvfp4Options, Nvfp4Output, Path};
use fp8_format::{Blocks, E2M1, E4M3, Source};
use half::{bf16, f16};
use safetensors::{File, hash, named};
use serde_json::Value;

/// All files of a kind.
fn files(kind: &str) -> Vec<File> {
    let mut files = File::all("nvfp4", "FP8_TEST_GOLDEN_NVFP4");
    files.retain(|file| file.kind() == kind);
    // Miri reads small files alone.
    assert!(!files.is_empty() || cfg!(miri), "{kind}");
    files
}

fn codecs() -> impl Iterator<Item = Codec> {
    Path::available().map(|path| Codec::new().on(path))
}

fn bits_of(case: &Value, key: &str) -> u32 {
    u32::try_from(case[key].as_u64().unwrap()).unwrap()
}

fn number(text: &Value) -> u64 {
    text.as_str().unwrap().parse().unwrap()
}

fn options(case: &Value) -> Nvfp4Options {
    Nvfp4Options {
        copy: match (case["columnwise"].as_bool().unwrap(), case["hadamard"].as_bool().unwrap()) {
            (false, _) => Nvfp4Copy::Rowwise,
            (true, false) => Nvfp4Copy::Columnwise,
            (true, true) => Nvfp4Copy::Hadamard,
        },
        blocks: if named(case, "block") == "1x16" { Blocks::B1x16 } else { Blocks::B16x16 },
        random: case
            .get("random")
            .map(|random| BlockRandom::new(number(&random["seed"]), number(&random["offset"]))),
    }
}

/// Runs a case on all paths.
fn check<S: Source>(file: &File, case: &Value, x: &[S]) {
    let [rows, cols] = file.shape(named(case, "x"));
    let options = options(case);
    let [height, width] = options.copy.shape(rows, cols);
    let [down, across] = options.blocks.grid(height, width);
    let amax = f32::from_bits(bits_of(case, "amax_bits"));
    for codec in codecs() {
        let what = format!("{} {case}: {codec:?}", file.name);
        if !case["amax_given"].as_bool().unwrap() {
            let own = codec.nvfp4_amax(x, rows, cols, options.copy).unwrap();
            assert_eq!(own.to_bits(), amax.to_bits(), "{what}: amax");
        }
        let (mut codes, mut scales) =
            (vec![0xA5; height * width.div_ceil(2)], vec![E4M3::ONE; down * across]);
        let out = Nvfp4Output::new(&mut codes, &mut scales);
        let tensor = codec.quantize_nvfp4(x, rows, cols, amax, &options, out).unwrap();
        let factors = [tensor.encode().to_bits(), tensor.decode().to_bits()];
        assert_eq!(factors, [bits_of(case, "encode_bits"), bits_of(case, "decode_bits")], "{what}");
        let scale_bytes: Vec<u8> = scales.iter().map(|scale| scale.to_bits()).collect();
        assert_eq!(scale_bytes, file.bytes(named(case, "scales")), "{what}: scales");
        assert_eq!(codes, file.bytes(named(case, "codes")), "{what}: codes");
        let mut values = vec![0.0_f32; height * width];
        codec.dequantize_nvfp4(&codes, height, width, options.blocks, &scales, tensor, &mut values).unwrap();
        assert_eq!(hash(&values), named(case, "dq_fnv"), "{what}: values");
    }
}

#[test]
fn every_case_on_every_path() {
    let mut count = 0;
    for file in files("quantize") {
        for case in file.cases().into_iter().step_by(if cfg!(miri) { 16 } else { 1 }) {
            let x = named(&case, "x");
            match named(&case, "dtype") {
                "f32" => check(&file, &case, &file.floats(x)),
                "f16" => check(&file, &case, &file.halves(x, f16::from_bits)),
                "bf16" => check(&file, &case, &file.halves(x, bf16::from_bits)),
                other => panic!("{other}"),
            }
            count += 1;
        }
    }
    assert!(count >= if cfg!(miri) { 1 } else { 100 }, "{count} cases");
}

#[test]
fn codes_of_all_sixteen_bit_floats_and_of_edges() {
    for file in files("codec") {
        for bits in 0..=u16::MAX {
            let at = usize::from(bits);
            assert_eq!(
                E2M1::from_bf16(bf16::from_bits(bits)).to_bits(),
                file.bytes("bf16_codes")[at],
                "{bits:#x}"
            );
            assert_eq!(
                E2M1::from_f16(f16::from_bits(bits)).to_bits(),
                file.bytes("f16_codes")[at],
                "{bits:#x}"
            );
        }
        for (bits, want) in file.words("f32_bits").into_iter().zip(file.bytes("f32_codes")) {
            assert_eq!(E2M1::from_f32(f32::from_bits(bits)).to_bits(), *want, "{bits:#x}");
        }
        for (bytes, want) in file.bytes("f64").as_chunks().0.iter().zip(file.bytes("f64_codes")) {
            let x = f64::from_le_bytes(*bytes);
            assert_eq!(E2M1::from_f64(x).to_bits(), *want, "{x:e}");
        }
        let decoded: Vec<u32> = (0..16).map(|code| E2M1::from_bits(code).to_f32().to_bits()).collect();
        assert_eq!(decoded, file.words("decode"));
        let [_, cols] = file.shape("odd.codes");
        let packed = file.bytes("odd.codes").chunks(cols).flat_map(|row| {
            row.chunks(2).map(|pair| {
                let [first, second] = [pair[0], pair.get(1).copied().unwrap_or(0)].map(E2M1::from_bits);
                E2M1::pack(first, second)
            })
        });
        assert_eq!(packed.collect::<Vec<_>>(), file.bytes("odd.packed"));
    }
}

#[test]
fn the_hadamard_transform() {
    for file in files("hadamard") {
        for (i, sign) in file.floats("signs").into_iter().enumerate() {
            assert_eq!(HADAMARD_SIGNS >> i & 1 == 1, sign < 0.0, "{i}");
        }
        let mut matrix = vec![0.0; 256];
        let unit: Vec<f32> = (0..256).map(|i| f32::from(u8::from(i % 17 == 0))).collect();
        Codec::new().hadamard(&unit, 16, 16, &mut matrix).unwrap();
        assert_eq!(matrix, file.floats("matrix"));
        for case in file.cases() {
            let (x, want) = (named(&case, "x"), file.words(named(&case, "out")));
            let [rows, cols] = file.shape(x);
            let mut got = vec![0.0; want.len()];
            let codec = Codec::new();
            match named(&case, "dtype") {
                "f32" => codec.hadamard(&file.floats(x), rows, cols, &mut got),
                "f16" => codec.hadamard(&file.halves(x, f16::from_bits), rows, cols, &mut got),
                _ => codec.hadamard(&file.halves(x, bf16::from_bits), rows, cols, &mut got),
            }
            .unwrap();
            assert_eq!(got.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), want, "{case}");
        }
    }
}

#[test]
fn stochastic_codes_and_their_bytes() {
    for file in files("stochastic") {
        let values = file.floats("values").into_iter().zip(file.bytes("random"));
        for ((x, r), want) in values.zip(file.bytes("codes")) {
            assert_eq!(E2M1::from_f32_stochastic(x, *r).to_bits(), *want, "{x:e} {r}");
        }
        for case in file.cases() {
            let random = BlockRandom::new(number(&case["seed"]), number(&case["offset"]));
            let name = named(&case, "bytes");
            let [_, cols] = file.shape(name);
            let rows = file.bytes(name).chunks(cols);
            let blocks = rows.flat_map(|row| row.chunks(16));
            for (n, bytes) in (0..).zip(blocks) {
                assert_eq!(random.bytes(n)[..bytes.len()], *bytes, "{case} {n}");
            }
        }
    }
}
