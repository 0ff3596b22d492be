//! Codes, scales and values of matrices, by the slices of fp8-format on every path and by the operations of fp8-kernels.

use fp8_format::slice::{BlockOutput, Codec, MxOutput, Path};
use fp8_format::{Blocks, E4M3, E5M2, E8M0, Encoding, Fp8, Source};
use fp8_kernels::{BlockRule, DType, Device, Scale, Slot, ops};
use serde::Deserialize;

use super::file::{Check, Elements, File, Matrix, encoding, rule};
use crate::golden::tally::{Mismatches, Tally};

/// One format and granularity, in one direction. Names are those of tensors.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    format: String,
    mode: String,
    /// Whether everything is of the transpose.
    columnwise: bool,
    epsilon: f32,
    codes: String,
    scale: Option<String>,
    scale_inv: Option<String>,
    e8m0: Option<String>,
    dq: Option<String>,
    /// FNV-1a over the bits of the values.
    dq_fnv: String,
}

/// The results of an implementation.
struct Got {
    codes: Vec<u8>,
    /// `None` where the implementation does not return it.
    scale: Option<Vec<f32>>,
    scale_inv: Factors,
    values: Vec<f32>,
}

enum Factors {
    F32(Vec<f32>),
    E8M0(Vec<u8>),
}

pub(super) fn check(file: &File<'_>, name: &str, device: &Device, tally: &mut Tally) -> Check {
    let x = file.matrix("x")?;
    for case in file.cases::<Case>()? {
        let direction = if case.columnwise { "columnwise" } else { "rowwise" };
        // A comparison ends at the first tensor that differs.
        let optional = [&case.scale, &case.scale_inv, &case.e8m0, &case.dq].into_iter().flatten();
        optional.chain([&case.codes]).for_each(|tensor| file.name(tensor));
        let what = format!("blocks/{name} {} {} {direction}", case.format, case.mode);
        let slices = Path::available().try_for_each(|path| {
            let result = slices(&x, &case, Codec::new().on(path)).and_then(|got| case.compare(file, &got));
            result.map_err(|difference| format!("{path}: {difference}"))
        });
        tally.record(&format!("{what}: slices"), slices);
        let operations = operations(&x, &case, device).and_then(|got| case.compare(file, &got));
        tally.record(&format!("{what}: operations"), operations);
    }
    Ok(())
}

fn slices(x: &Matrix, case: &Case, codec: Codec) -> Check<Got> {
    let encoding = encoding(&case.format)?;
    match (&x.elements, encoding) {
        (Elements::F32(data), Encoding::E4M3) => slices_of::<E4M3, _>(data, x.shape, case, codec),
        (Elements::F32(data), Encoding::E5M2) => slices_of::<E5M2, _>(data, x.shape, case, codec),
        (Elements::F16(data), Encoding::E4M3) => slices_of::<E4M3, _>(data, x.shape, case, codec),
        (Elements::F16(data), Encoding::E5M2) => slices_of::<E5M2, _>(data, x.shape, case, codec),
        (Elements::BF16(data), Encoding::E4M3) => slices_of::<E4M3, _>(data, x.shape, case, codec),
        (Elements::BF16(data), Encoding::E5M2) => slices_of::<E5M2, _>(data, x.shape, case, codec),
        (_, Encoding::E2M1) => Err("E2M1 has files of kind nvfp4".to_owned()),
    }
}

fn slices_of<T: Fp8, S: Source>(x: &[S], [rows, cols]: [usize; 2], case: &Case, codec: Codec) -> Check<Got> {
    let rule = rule(&case.mode, case.epsilon)?;
    let shape = if case.columnwise { [cols, rows] } else { [rows, cols] };
    let [height, width] = rule.blocks().grid(shape[0], shape[1]);
    let mut codes = vec![T::default(); rows * cols];
    let mut values = vec![0.0_f32; rows * cols];
    let (scale, scale_inv) = match rule {
        BlockRule::F32(scaling) | BlockRule::RowsThenTensor(scaling) => {
            let (mut scale, mut scale_inv) = (vec![0.0; height * width], vec![0.0; height * width]);
            let out = BlockOutput { scale: Some(&mut scale), ..BlockOutput::new(&mut codes, &mut scale_inv) };
            if case.columnwise {
                codec.quantize_blocks_transpose(x, rows, cols, &scaling, None, out)
            } else {
                codec.quantize_blocks(x, rows, cols, &scaling, out)
            }
            .map_err(|error| error.to_string())?;
            codec
                .dequantize_blocks(&codes, shape[0], shape[1], rule.blocks(), &scale_inv, &mut values)
                .map_err(|error| error.to_string())?;
            (Some(scale), Factors::F32(scale_inv))
        }
        BlockRule::Mx(rounding) => {
            let mut scales = vec![E8M0::ONE; height * width];
            let out = MxOutput::new(&mut codes, &mut scales);
            if case.columnwise {
                codec.quantize_mx_transpose(x, rows, cols, rounding, None, out)
            } else {
                codec.quantize_mx(x, rows, cols, rounding, out)
            }
            .map_err(|error| error.to_string())?;
            codec
                .dequantize_mx(&codes, shape[0], shape[1], &scales, &mut values)
                .map_err(|error| error.to_string())?;
            (None, Factors::E8M0(scales.into_iter().map(E8M0::to_bits).collect()))
        }
    };
    Ok(Got { codes: codes.into_iter().map(T::to_bits).collect(), scale, scale_inv, values })
}

fn operations(x: &Matrix, case: &Case, device: &Device) -> Check<Got> {
    let rule = rule(&case.mode, case.epsilon)?;
    let slot = Slot {
        scale: Scale::Blocks(rule),
        columnwise: case.columnwise,
        ..Slot::off(encoding(&case.format)?)
    };
    let error = |error: fp8_kernels::Error| error.to_string();
    let quantized = ops::quantize(&x.tensor(device)?, &slot).map_err(error)?;
    let quantized = quantized.as_fp8().ok_or("the tensor was not quantized")?.clone();
    let quantized = if case.columnwise { quantized.transposed().map_err(error)? } else { quantized };
    let scale_inv = if rule.blocks() == Blocks::Mx32 {
        Factors::E8M0(quantized.scale_inv().to_vec().map_err(error)?)
    } else {
        Factors::F32(quantized.scale_inv().to_vec().map_err(error)?)
    };
    let values = quantized.dequantize(DType::F32).and_then(|values| values.to_vec()).map_err(error)?;
    Ok(Got { codes: quantized.codes().map_err(error)?, scale: None, scale_inv, values })
}

impl Case {
    fn compare(&self, file: &File<'_>, got: &Got) -> Check {
        let named =
            |tensor: &Option<String>, key| tensor.clone().ok_or_else(|| format!("the case has no {key}"));
        match &got.scale_inv {
            Factors::F32(scale_inv) => {
                let scale = file.f32_bits(&named(&self.scale, "scale")?)?;
                if let Some(got) = &got.scale {
                    equal("scale", &bits(got), &scale)?;
                }
                equal("scale_inv", &bits(scale_inv), &file.f32_bits(&named(&self.scale_inv, "scale_inv")?)?)?;
            }
            Factors::E8M0(scales) => {
                equal("scale", scales, &file.bytes(&named(&self.e8m0, "e8m0")?)?)?;
            }
        }
        equal("code", &got.codes, &file.bytes(&self.codes)?)?;
        if let Some(values) = &self.dq {
            let want: Vec<u32> = file.f32_bits(values)?.into_iter().map(canonical).collect();
            equal("value", &bits(&got.values).into_iter().map(canonical).collect::<Vec<_>>(), &want)?;
        }
        let hash = hash(&got.values);
        if hash == self.dq_fnv {
            Ok(())
        } else {
            Err(format!("the hash of the values is {hash}, expected {}", self.dq_fnv))
        }
    }
}

/// Every NaN, in hashes.
const NAN: u32 = 0x7FC0_0000;

/// The bits with every NaN the same.
pub(crate) fn canonical(bits: u32) -> u32 {
    if f32::from_bits(bits).is_nan() { NAN } else { bits }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

pub(crate) fn hash(values: &[f32]) -> String {
    let hash = values.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, value| {
        let bits = if value.is_nan() { NAN } else { value.to_bits() };
        (hash ^ u64::from(bits)).wrapping_mul(0x0000_0100_0000_01B3)
    });
    format!("{hash:016x}")
}

pub(crate) fn equal<B: PartialEq + std::fmt::LowerHex>(what: &str, got: &[B], want: &[B]) -> Check {
    if got.len() != want.len() {
        return Err(format!("{what}s: {} elements, expected {}", got.len(), want.len()));
    }
    let mut mismatches = Mismatches::default();
    for (index, (got, want)) in got.iter().zip(want).enumerate() {
        mismatches.compare(got == want, || format!("{what} {index} is {got:#x}, expected {want:#x}"));
    }
    mismatches.finish()
}
