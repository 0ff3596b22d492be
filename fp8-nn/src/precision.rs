//! The dtype that a layer computes in.
//!
//! A scope with a `compute_dtype` decides: inputs and parameters are cast to it. Without one, a layer computes in its input's
//! dtype, which every parameter must have. Gradients of inputs have the input's dtype, those of parameters are f32.

use crate::{Error, Parameter, Result};
use fp8_kernels::{DType, Tensor, ops};
use fp8_recipe::Forward;

/// The input, cast to the dtype that the layer computes in.
#[derive(Debug)]
pub(crate) struct Entered {
    pub(crate) x: Tensor,
    pub(crate) input_dtype: DType,
}

/// Casts a layer's input to the dtype that the layer computes in.
pub(crate) fn enter<'a>(
    cx: &Forward<'_>,
    layer: &str,
    x: &Tensor,
    parameters: impl IntoIterator<Item = &'a Parameter>,
) -> Result<Entered> {
    let dtype = compute_dtype(cx, layer, x.dtype(), parameters)?;
    Ok(Entered { x: ops::cast(x, dtype)?, input_dtype: x.dtype() })
}

/// Returns the dtype that a layer computes in, or an error if a parameter does not have it.
pub(crate) fn compute_dtype<'a>(
    cx: &Forward<'_>,
    layer: &str,
    input: DType,
    parameters: impl IntoIterator<Item = &'a Parameter>,
) -> Result<DType> {
    if let Some(dtype) = cx.compute_dtype() {
        return Ok(dtype);
    }
    match parameters.into_iter().find(|parameter| parameter.dtype() != input && !parameter.is_adapter()) {
        None => Ok(input),
        Some(parameter) => Err(Error::DTypes {
            layer: layer.to_owned(),
            input,
            parameter: parameter.name().clone(),
            found: parameter.dtype(),
        }),
    }
}
