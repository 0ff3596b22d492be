//! Single values: conversions to E2M1, the Hadamard transform, stochastic rounding.

use fp8_format::philox::BlockRandom;
use fp8_format::slice::{Codec, HADAMARD_SIGNS};
use fp8_format::{E2M1, Source};
use half::{bf16, f16};
use safetensors::Dtype;
use serde::Deserialize;

use crate::golden::blocks::file::{Check, Elements, File};
use crate::golden::blocks::quantize::equal;
use crate::golden::tally::Tally;

pub(super) fn check(file: &File<'_>, name: &str, tally: &mut Tally) -> Check {
    let mut record = |what: &str, result| tally.record(&format!("nvfp4/{name} {what}"), result);
    let codes = |codes: Vec<E2M1>| codes.into_iter().map(E2M1::to_bits).collect::<Vec<u8>>();
    let all = || 0..=u16::MAX;
    let got = codes(all().map(|bits| E2M1::from_bf16(bf16::from_bits(bits))).collect());
    record("bf16", equal("code", &got, &file.bytes("bf16_codes")?));
    let got = codes(all().map(|bits| E2M1::from_f16(f16::from_bits(bits))).collect());
    record("f16", equal("code", &got, &file.bytes("f16_codes")?));
    let x = file.elements("f32_bits", Dtype::U32, u32::from_le_bytes)?;
    let got = codes(x.into_iter().map(|bits| E2M1::from_f32(f32::from_bits(bits))).collect());
    record("f32", equal("code", &got, &file.bytes("f32_codes")?));
    let x = file.elements("f64", Dtype::F64, f64::from_le_bytes)?;
    let got = codes(x.into_iter().map(E2M1::from_f64).collect());
    record("f64", equal("code", &got, &file.bytes("f64_codes")?));
    let got: Vec<u32> = (0..16).map(|code| E2M1::from_bits(code).to_f32().to_bits()).collect();
    record("values", equal("value", &got, &file.f32_bits("decode")?));
    let (odd, cols) = (file.bytes("odd.codes")?, columns(file, "odd.codes")?);
    let pack = |pair: &[u8]| {
        let code = |i: usize| E2M1::from_bits(pair.get(i).copied().unwrap_or_default());
        E2M1::pack(code(0), code(1))
    };
    let got: Vec<u8> = odd.chunks(cols).flat_map(|row| row.chunks(2).map(pack)).collect();
    record("packed rows", equal("byte", &got, &file.bytes("odd.packed")?));
    Ok(())
}

/// The columns of a matrix of bytes, at least 1.
fn columns(file: &File<'_>, name: &str) -> Check<usize> {
    match file.tensors.tensor(name).map_err(|error| format!("{name}: {error}"))?.shape() {
        &[_, cols] if cols > 0 => Ok(cols),
        other => Err(format!("{name}: the shape is {other:?}, expected rows and columns")),
    }
}

/// Rows of one type. Names are those of tensors.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Transform {
    dtype: String,
    x: String,
    out: String,
}

pub(super) fn check_hadamard(file: &File<'_>, name: &str, tally: &mut Tally) -> Check {
    let unit: Vec<f32> = (0..256).map(|i| if i % 17 == 0 { 1.0 } else { 0.0 }).collect();
    let matrix = transformed(&unit, [16, 16])
        .and_then(|got| equal("element", &got, &file.f32_bits("matrix")?))
        .and_then(|()| {
            let signs = (0..16).map(|i| if HADAMARD_SIGNS >> i & 1 == 1 { -1.0_f32 } else { 1.0 });
            equal("sign", &signs.map(f32::to_bits).collect::<Vec<_>>(), &file.f32_bits("signs")?)
        });
    tally.record(&format!("nvfp4/{name} matrix"), matrix);
    for case in file.cases::<Transform>()? {
        let x = file.matrix(&case.x)?;
        let got = match &x.elements {
            Elements::F32(data) => transformed(data, x.shape),
            Elements::F16(data) => transformed(data, x.shape),
            Elements::BF16(data) => transformed(data, x.shape),
        };
        let result = got.and_then(|got| equal("element", &got, &file.f32_bits(&case.out)?));
        tally.record(&format!("nvfp4/{name} {}", case.dtype), result);
    }
    Ok(())
}

fn transformed<S: Source>(x: &[S], [rows, cols]: [usize; 2]) -> Check<Vec<u32>> {
    let mut out = vec![0.0; rows * cols.next_multiple_of(16)];
    Codec::new().hadamard(x, rows, cols, &mut out).map_err(|error| error.to_string())?;
    Ok(out.into_iter().map(f32::to_bits).collect())
}

/// The bytes of a seed, in rows of blocks.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Bytes {
    bytes: String,
    seed: String,
    offset: String,
}

pub(super) fn check_stochastic(file: &File<'_>, name: &str, tally: &mut Tally) -> Check {
    let values = file.f32_bits("values")?.into_iter().map(f32::from_bits).zip(file.bytes("random")?);
    let got: Vec<u8> = values.map(|(x, r)| E2M1::from_f32_stochastic(x, r).to_bits()).collect();
    tally.record(&format!("nvfp4/{name} codes"), equal("code", &got, &file.bytes("codes")?));
    for case in file.cases::<Bytes>()? {
        let random = super::quantize::random(&case.seed, &case.offset)?;
        let (want, cols) = (file.bytes(&case.bytes)?, columns(file, &case.bytes)?);
        tally.record(
            &format!("nvfp4/{name} {}", case.bytes),
            equal("byte", &bytes(random, &want, cols), &want),
        );
    }
    Ok(())
}

/// As many bytes as `like` has, in rows of so many columns.
fn bytes(random: BlockRandom, like: &[u8], cols: usize) -> Vec<u8> {
    let blocks = like.chunks(cols).flat_map(|row| row.chunks(16).map(<[u8]>::len));
    (0..).zip(blocks).flat_map(|(n, len)| random.bytes(n).into_iter().take(len)).collect()
}
