//! Refuses to save a model that has diverged.

use super::outcome::outcome;
use crate::data_parallel::tensor_parallel_ranks;
use crate::{AdamW, Error, Layer, Optimizer, Parameter, Result, parameters};
use fp8_kernels::{DType, Tensor, ops};

/// Returns an error that names the first infinite or NaN element, if a parameter, moment or f32 copy has one.
///
/// Call it before [`save`](super::save) if you keep one checkpoint: otherwise a diverged model replaces a good one. It reads
/// all tensors once, on their device, and waits for the result.
///
/// ```
/// use fp8_nn::prelude::*;
/// let mut rng = fp8_nn::rand::rng();
/// let options = LinearOptions { in_features: 4, out_features: 4, ..Default::default() };
/// let mut fc = Linear::new("fc", options, &Device::cpu(), &mut rng)?;
/// let optimizer = AdamW::new(AdamWOptions::default())?;
/// checkpoint::expect_finite(&fc, &optimizer)?;
/// for parameter in parameters_mut(&mut fc) {
///     parameter.set(Tensor::full(f32::NAN, *parameter.shape(), DType::F32, &Device::cpu())?)?;
/// }
/// let error = checkpoint::expect_finite(&fc, &optimizer).unwrap_err();
/// assert!(error.to_string().starts_with("`fc.weight` is NaN at element 0 of 16"));
/// # Ok::<(), fp8_nn::Error>(())
/// ```
///
/// Where ranks share layers ([`TensorParallel`](crate::TensorParallel)), all of them call it, and all get an error if one of them finds
/// such an element.
///
/// # Errors
/// [`Error::NotFinite`]; the device failed; [`Error::OtherRank`] with that of another rank.
pub fn expect_finite(model: &(impl Layer + ?Sized), optimizer: &(impl Optimizer + ?Sized)) -> Result<()> {
    let found = expect_finite_here(model, optimizer.state());
    let ranks = tensor_parallel_ranks(model);
    ranks.iter().fold(found, |found, ranks| outcome(&**ranks.group(), "expect_finite", found))
}

/// Looks at this rank's parts.
fn expect_finite_here(model: &(impl Layer + ?Sized), optimizer: &AdamW) -> Result<()> {
    let value = |parameter: &Parameter| -> Result<Tensor> {
        match parameter.fp8() {
            Some(codes) => Ok(codes.dequantize(DType::F32)?),
            None => Ok(parameter.tensor().clone()),
        }
    };
    let parameters = parameters(model).into_iter();
    let values = parameters.map(|parameter| Ok((parameter.name().to_string(), value(parameter)?)));
    let values = values.collect::<Result<Vec<_>>>()?;
    expect_codes_of_numbers(optimizer)?;
    let mut all: Vec<(String, &Tensor)> = values.iter().map(|(name, value)| (name.clone(), value)).collect();
    for (name, state) in &optimizer.state {
        let floats = state.parts().filter(|(_, tensor)| tensor.dtype() != DType::U8);
        all.extend(floats.map(|(part, tensor)| (format!("{name}.{part}"), tensor)));
    }
    if all.is_empty() {
        return Ok(());
    }
    // One norm for all tensors. It is also infinite if the values are finite but their norm overflows.
    let norm = ops::grad_norm(&all.iter().map(|&(_, tensor)| tensor).collect::<Vec<_>>())?;
    if norm.item()?.is_finite() {
        return Ok(());
    }
    for (name, tensor) in all {
        let values = tensor.to_f32_vec()?;
        if let Some(index) = values.iter().position(|value| !value.is_finite()) {
            return Err(Error::NotFinite { name, value: values[index], index, elements: values.len() });
        }
    }
    Ok(())
}

/// Refuses moments in FP8 that have codes of NaN.
fn expect_codes_of_numbers(optimizer: &AdamW) -> Result<()> {
    for (name, state) in &optimizer.state {
        for (part, codes) in state.parts().filter(|(_, tensor)| tensor.dtype() == DType::U8) {
            let codes = codes.to_vec::<u8>()?;
            if let Some(index) = codes.iter().position(|code| code & 0x7F == 0x7F) {
                let name = format!("{name}.{part}");
                return Err(Error::NotFinite { name, value: f32::NAN, index, elements: codes.len() });
            }
        }
    }
    Ok(())
}
