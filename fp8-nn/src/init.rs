//! Initial values of parameters.

use crate::{Error, Result};
use fp8_kernels::{DType, Device, Shape, Tensor, ops};
use rand::Rng;

/// Normally distributed with mean 0, drawn in f32 and rounded to `dtype`.
pub(crate) fn normal(
    shape: impl Into<Shape>,
    std: f32,
    dtype: DType,
    device: &Device,
    rng: &mut impl Rng,
) -> Result<Tensor> {
    let shape = shape.into();
    let mut values = Vec::with_capacity(shape.numel() + 1);
    // Box and Muller's transform: two uniform values give two normal ones.
    while values.len() < shape.numel() {
        let radius = (-2.0 * (1.0 - rng.random::<f64>()).ln()).sqrt() * f64::from(std);
        let (sin, cos) = (std::f64::consts::TAU * rng.random::<f64>()).sin_cos();
        values.extend([(radius * cos) as f32, (radius * sin) as f32]);
    }
    values.truncate(shape.numel());
    Ok(ops::cast(&Tensor::from_vec(values, shape, device)?, dtype)?)
}

/// f32 or bf16 parameters.
pub(crate) fn check_params_dtype(layer: &str, dtype: DType) -> Result<()> {
    if matches!(dtype, DType::F32 | DType::BF16) {
        return Ok(());
    }
    Err(Error::Option {
        layer: layer.to_owned(),
        option: "params_dtype",
        value: dtype.to_string(),
        remedy: "expected f32 or bf16 (f16 parameters need a loss scaler, which this version does not have)"
            .to_owned(),
    })
}

/// Sizes that must be at least 1.
pub(crate) fn check_positive(layer: &str, sizes: &[(&'static str, usize)]) -> Result<()> {
    match sizes.iter().find(|(_, size)| *size == 0) {
        None => Ok(()),
        Some((option, _)) => Err(Error::Option {
            layer: layer.to_owned(),
            option,
            value: "0".to_owned(),
            remedy: "expected at least 1".to_owned(),
        }),
    }
}
