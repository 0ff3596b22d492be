//! Initial values of parameters.

use crate::{Cut, Error, Result};
use fp8_kernels::{DType, Device, Shape, Tensor, ops};
use rand::Rng;

const OP: &str = "init";

/// Returns an empty vector with room for the values of a tensor, and for one more, because normal values are drawn in pairs.
fn room(shape: &Shape) -> Result<Vec<f32>> {
    shape.check_size(OP)?;
    let (mut values, len) = (Vec::new(), shape.numel() + 1);
    let bytes = len.saturating_mul(size_of::<f32>());
    values.try_reserve_exact(len).map_err(|_| fp8_kernels::Error::HostAllocation { op: OP, bytes })?;
    Ok(values)
}

/// Returns normally distributed values with mean 0, drawn in f32 and rounded to `dtype`. With a deviation of 0 nothing is drawn.
///
/// With `cut`, all are drawn, and this rank's part is returned.
pub(crate) fn normal(
    shape: impl Into<Shape>,
    cut: Option<&Cut>,
    std: f32,
    dtype: DType,
    device: &Device,
    rng: &mut impl Rng,
) -> Result<Tensor> {
    let shape = shape.into();
    if std == 0.0 {
        shape.check_size(OP)?;
        return Ok(Tensor::zeros(cut.map_or(shape, Cut::shape), dtype, device)?);
    }
    let mut values = room(&shape)?;
    // Box and Muller's transform: two uniform values give two normal ones.
    while values.len() < shape.numel() {
        let radius = (-2.0 * (1.0 - rng.random::<f64>()).ln()).sqrt() * f64::from(std);
        let (sin, cos) = (std::f64::consts::TAU * rng.random::<f64>()).sin_cos();
        values.extend([(radius * cos) as f32, (radius * sin) as f32]);
    }
    values.truncate(shape.numel());
    cut_to(values, shape, cut, dtype, device)
}

/// Returns the values, or this rank's part of them.
fn cut_to(
    values: Vec<f32>,
    shape: Shape,
    cut: Option<&Cut>,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    let (values, shape) = match cut {
        Some(cut) => (cut.part_of(&values), cut.shape()),
        None => (values, shape),
    };
    Ok(ops::cast(&Tensor::from_vec(values, shape, device)?, dtype)?)
}

/// Returns values that are uniform in ±`bound`, drawn in f32 and rounded to `dtype`. With `cut`, this rank's part of them.
pub(crate) fn uniform(
    shape: impl Into<Shape>,
    cut: Option<&Cut>,
    bound: f32,
    dtype: DType,
    device: &Device,
    rng: &mut impl Rng,
) -> Result<Tensor> {
    let shape = shape.into();
    let mut values = room(&shape)?;
    values.extend((0..shape.numel()).map(|_| (2.0 * rng.random::<f32>() - 1.0) * bound));
    cut_to(values, shape, cut, dtype, device)
}

/// Checks that a tensor can have the shape of this parameter.
pub(crate) fn check_parameter(layer: &str, option: &'static str, shape: impl Into<Shape>) -> Result<()> {
    let shape = shape.into();
    shape.check_size(option).map_err(|_| Error::Option {
        part: layer.to_owned(),
        option,
        value: shape.to_string(),
        remedy: format!("a parameter has at most {} elements: use smaller sizes", Shape::MAX_NUMEL),
    })
}

/// Checks that the parameters are f32, bf16 or f16.
pub(crate) fn check_params_dtype(layer: &str, dtype: DType) -> Result<()> {
    if dtype.is_float() {
        return Ok(());
    }
    Err(Error::Option {
        part: layer.to_owned(),
        option: "params_dtype",
        value: dtype.to_string(),
        remedy: "expected f32, bf16 or f16".to_owned(),
    })
}

/// Checks sizes that must be at least 1.
pub(crate) fn check_positive(layer: &str, sizes: &[(&'static str, usize)]) -> Result<()> {
    match sizes.iter().find(|(_, size)| *size == 0) {
        None => Ok(()),
        Some((option, _)) => Err(Error::Option {
            part: layer.to_owned(),
            option,
            value: "0".to_owned(),
            remedy: "expected at least 1".to_owned(),
        }),
    }
}
