//! The values of parameters in files: in high precision, or as FP8 codes with their factors. Either is read into either kind of
//! model.

use super::reader::Reader;
use super::stream;
use super::writer::Writer;
use crate::parameter::{SCALE_INV, TENSOR_SCALE};
use crate::{Layer, Parameter, Result, parameters_mut};
use fp8_kernels::fp8_format::{Blocks, TensorScale};
use fp8_kernels::{DType, Encoding, Fp8Tensor, Shape, Tensor, ops};
use safetensors::tensor::Dtype;

/// The form in which a file stores the value of one parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stored {
    /// In high precision.
    Values(DType),
    /// As FP8 codes.
    Codes(Encoding, Option<Blocks>),
}

/// Adds the value of a parameter.
pub(super) fn write(writer: &mut Writer, key: &str, parameter: &Parameter) -> Result<()> {
    match parameter.fp8() {
        None => {
            let tensor = parameter.tensor();
            writer.of_parameter(
                key,
                stream::file_dtype(tensor.dtype()),
                tensor,
                parameter,
                parameter.cut().cloned(),
            )
        }
        Some(codes) => {
            writer.tensor_as(key, file_dtype(codes.encoding()), parameter.tensor())?;
            if let Some(scale) = codes.tensor_scale() {
                writer.tensor(&format!("{key}{TENSOR_SCALE}"), scale)?;
            }
            let dtype = codes.blocks().map_or(Dtype::F32, factor_dtype);
            writer.tensor_as(&format!("{key}{SCALE_INV}"), dtype, codes.scale_inv())
        }
    }
}

/// Returns how the file stores the value of a parameter. It must have the parameter's shape, and its dtype if both are in high
/// precision, or its format and granularity if both are in FP8.
pub(super) fn expect(reader: &Reader<'_>, key: &str, parameter: &Parameter) -> Result<Stored> {
    let shape = parameter.global_shape();
    let found = reader.dtype(key);
    if let Some(encoding) = found.and_then(encoding_of) {
        reader.expect_tensor_as(key, &codes_shape(shape, encoding), file_dtype(encoding))?;
        let own = parameter.fp8().and_then(Fp8Tensor::blocks);
        let blocks = expect_factors(reader, key, shape.matrix(), encoding, own)?;
        return match parameter.fp8() {
            Some(codes) if (codes.encoding(), codes.blocks()) != (encoding, blocks) => {
                let [stored, wanted] = [(encoding, blocks), (codes.encoding(), codes.blocks())].map(form);
                Err(reader.problem(format!(
                    "`{key}` is stored in {stored}: expected {wanted}, as in this model; quantize its weights with the recipe \
                     they were saved with"
                )))
            }
            _ => Ok(Stored::Codes(encoding, blocks)),
        };
    }
    let floats = [(Dtype::F32, DType::F32), (Dtype::BF16, DType::BF16), (Dtype::F16, DType::F16)];
    let float = floats.into_iter().find(|&(dtype, _)| Some(dtype) == found).map(|(_, dtype)| dtype);
    let dtype = match (parameter.fp8(), float) {
        // The codes are quantized from it, whatever its dtype.
        (Some(_), Some(dtype)) => dtype,
        _ => parameter.dtype(),
    };
    reader.expect_tensor(key, shape, dtype)?;
    Ok(Stored::Values(dtype))
}

/// Returns which elements of a `[rows, cols]` matrix share a factor. Granularities with the same grid for this matrix share
/// factors in the same way: `own` is preferred.
fn expect_factors(
    reader: &Reader<'_>,
    key: &str,
    [rows, cols]: [usize; 2],
    encoding: Encoding,
    own: Option<Blocks>,
) -> Result<Option<Blocks>> {
    if encoding == Encoding::E2M1 {
        reader.expect_tensor(&format!("{key}{TENSOR_SCALE}"), &Shape::from([2]), DType::F32)?;
    }
    let key = format!("{key}{SCALE_INV}");
    let missing = || reader.problem(format!("it has the codes of `{key}` but not the factors"));
    let (dtype, shape) = reader.dtype(&key).zip(reader.shape(&key)).ok_or_else(missing)?;
    if shape.is_empty() && dtype == Dtype::F32 && encoding != Encoding::E2M1 {
        reader.expect_tensor_as(&key, &Shape::from([]), dtype)?;
        return Ok(None);
    }
    let all = [Blocks::Row, Blocks::B1x128, Blocks::B128x128, Blocks::Mx32, Blocks::B1x16, Blocks::B16x16];
    let are_packed = |blocks: &Blocks| blocks.is_fp4() == (encoding == Encoding::E2M1);
    for blocks in own.into_iter().chain(all).filter(are_packed) {
        let (grid, expected) = (blocks.grid(rows, cols), factor_dtype(blocks));
        if dtype == expected && shape == grid {
            reader.expect_tensor_as(&key, &grid.into(), dtype)?;
            return Ok(Some(blocks));
        }
    }
    Err(reader.problem(format!(
        "`{key}` is {dtype:?} of shape {shape:?}: expected one factor, or one for each row or block of [{rows}, {cols}]"
    )))
}

fn factor_dtype(blocks: Blocks) -> Dtype {
    match blocks {
        Blocks::Mx32 => Dtype::F8_E8M0,
        Blocks::B1x16 | Blocks::B16x16 => Dtype::F8_E4M3,
        _ => Dtype::F32,
    }
}

/// Reads the value of every parameter that is selected. `main_param` returns the key of a parameter's f32 copy, if the file has one.
pub(super) fn read_all(
    reader: &Reader<'_>,
    model: &mut (impl Layer + ?Sized),
    prefix: &str,
    is_selected: impl Fn(&Parameter) -> bool,
    main_param: impl Fn(&Parameter) -> Option<String>,
) -> Result<()> {
    reader.begin_loading();
    for parameter in parameters_mut(model).into_iter().filter(|parameter| is_selected(parameter)) {
        let key = format!("{prefix}{}", parameter.name());
        let stored = expect(reader, &key, parameter)?;
        let is_fp8 = parameter.fp8().is_some();
        match (stored, main_param(parameter)) {
            // The f32 copy is exact, and its codes are the saved ones.
            (Stored::Codes(..), Some(copy)) | (Stored::Values(_), Some(copy)) if is_fp8 => {
                parameter.set(floats(reader, &copy, parameter)?)?;
            }
            (Stored::Codes(..), Some(copy)) => {
                let values = floats(reader, &copy, parameter)?;
                parameter.set(ops::cast(&values, parameter.dtype())?)?;
            }
            (Stored::Codes(encoding, blocks), None) => {
                let codes = read_codes(reader, &key, parameter, encoding, blocks)?;
                read_into(parameter, codes)?;
            }
            (Stored::Values(dtype), _) => parameter.set(part(reader, &key, parameter, dtype)?)?,
        }
    }
    Ok(())
}

/// Returns the f32 values of a parameter that the file stores in another way than this model: what its optimizer continues from
/// where the file has no f32 copy. `None` for a file of codes.
pub(super) fn main_param(reader: &Reader<'_>, key: &str, parameter: &Parameter) -> Result<Option<Tensor>> {
    match expect(reader, key, parameter)? {
        Stored::Codes(..) => Ok(None),
        Stored::Values(dtype) => Ok(Some(ops::cast(&part(reader, key, parameter, dtype)?, DType::F32)?)),
    }
}

fn floats(reader: &Reader<'_>, key: &str, parameter: &Parameter) -> Result<Tensor> {
    part(reader, key, parameter, DType::F32)
}

/// Reads the part of a parameter's values that this rank has, or all of them.
fn part(reader: &Reader<'_>, key: &str, parameter: &Parameter, dtype: DType) -> Result<Tensor> {
    let (whole, cut, stored) = (parameter.global_shape(), parameter.cut(), stream::file_dtype(dtype));
    reader.part_as(key, whole, cut, stored, dtype, parameter.device())
}

fn read_codes(
    reader: &Reader<'_>,
    key: &str,
    parameter: &Parameter,
    encoding: Encoding,
    blocks: Option<Blocks>,
) -> Result<Fp8Tensor> {
    let (shape, device) = (*parameter.global_shape(), parameter.device());
    let packed = codes_shape(&shape, encoding);
    let codes = reader.tensor_as(key, &packed, file_dtype(encoding), DType::U8, device)?;
    let tensor_scale = format!("{key}{TENSOR_SCALE}");
    let key = format!("{key}{SCALE_INV}");
    let [rows, cols] = shape.matrix();
    Ok(match blocks {
        None => {
            let scale_inv = reader.tensor(&key, &Shape::from([]), DType::F32, device)?;
            Fp8Tensor::from_codes(codes, shape, encoding, scale_inv)?
        }
        Some(blocks) => {
            let (grid, stored) = (blocks.grid(rows, cols).into(), factor_dtype(blocks));
            let dtype = if stored == Dtype::F32 { DType::F32 } else { DType::U8 };
            let factors = reader.tensor_as(&key, &grid, stored, dtype, device)?;
            if blocks.is_fp4() {
                let scale = reader.tensor(&tensor_scale, &Shape::from([2]), DType::F32, device)?;
                let unit = TensorScale::from_encode(1.0);
                return Ok(Fp8Tensor::from_nvfp4(codes, shape, blocks, factors, unit)?
                    .with_tensor_scale(scale, None)?);
            }
            Fp8Tensor::from_blocks(codes, shape, encoding, blocks, factors)?
        }
    })
}

/// Gives a parameter the value of `codes`.
fn read_into(parameter: &mut Parameter, codes: Fp8Tensor) -> Result<()> {
    match parameter.fp8() {
        Some(_) => parameter.set_codes(codes),
        None => parameter.set_part_of(&codes.dequantize(parameter.dtype())?),
    }
}

fn file_dtype(encoding: Encoding) -> Dtype {
    match encoding {
        Encoding::E4M3 => Dtype::F8_E4M3,
        Encoding::E5M2 => Dtype::F8_E5M2,
        // Packed, as checkpoints of other libraries have them.
        Encoding::E2M1 => Dtype::U8,
    }
}

fn encoding_of(dtype: Dtype) -> Option<Encoding> {
    match dtype {
        Dtype::F8_E4M3 => Some(Encoding::E4M3),
        Dtype::F8_E5M2 => Some(Encoding::E5M2),
        Dtype::U8 => Some(Encoding::E2M1),
        _ => None,
    }
}

/// The shape of the codes of a tensor of this shape: those of 4 bits are two a byte.
fn codes_shape(shape: &Shape, encoding: Encoding) -> Shape {
    match encoding {
        Encoding::E2M1 => shape.with_last(shape.last_dim().div_ceil(2)),
        Encoding::E4M3 | Encoding::E5M2 => *shape,
    }
}

fn form((encoding, blocks): (Encoding, Option<Blocks>)) -> String {
    match blocks {
        None => format!("{encoding} with one factor"),
        Some(blocks) => format!("{encoding} with a factor for each {blocks}"),
    }
}
