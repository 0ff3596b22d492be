//! The norm of a model's gradients, and clipping by it.

use crate::module::trainable_mut;
use crate::{Error, Layer, Parameter, Placement, Result, TensorParallel, parameters};
use fp8_kernels::{DType, Device, Tensor, ops};
use std::sync::Arc;

/// Scales all gradients so that their common L2 norm is at most `max_norm`, as PyTorch's `clip_grad_norm_` does. Returns the
/// norm before clipping as a tensor of one f32.
///
/// With [tensor parallelism](crate::TensorParallel), it is the norm of the whole model, and all ranks that share the model call this, after
/// [`all_reduce_gradients`](crate::all_reduce_gradients) or [`Gradients::finish`](crate::Gradients::finish).
///
/// The norm stays on the device, so the host does not wait. If the norm is not finite, no gradient is scaled, and
/// [`AdamW::step_with_norm`](crate::AdamW::step_with_norm) skips the step. A model whose parameters are all
/// [frozen](Parameter::set_trainable) has a norm of 0.
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let options = LinearOptions { in_features: 2, out_features: 1, bias: false, ..Default::default() };
/// let mut fc = Linear::new("fc", options, &Device::cpu(), &mut fp8_nn::rand::rng())?;
/// *parameters_mut(&mut fc)[0].main_grad_mut() = Tensor::from_vec(vec![3.0f32, 4.0], [1, 2], &Device::cpu())?;
/// assert_eq!(clip_grad_norm(&mut fc, 2.5)?.item()?, 5.0);
/// assert_eq!(fc.weight().main_grad().to_f32_vec()?, [1.5, 2.0]);
/// # Ok::<(), fp8_nn::Error>(())
/// ```
///
/// # Errors
/// A `max_norm` that is not greater than 0; a gradient that shares its storage with another tensor, or is a part of a sum over ranks.
/// Nothing has changed then. A failure of the group of tensor parallelism.
pub fn clip_grad_norm(model: &mut (impl Layer + ?Sized), max_norm: f32) -> Result<Tensor> {
    clip_with(model, max_norm, |_| Ok(()))
}

/// Clips by a norm that `change` may change in place before it is used.
pub(crate) fn clip_with(
    model: &mut (impl Layer + ?Sized),
    max_norm: f32,
    change: impl FnOnce(&mut Tensor) -> Result<()>,
) -> Result<Tensor> {
    if max_norm.is_nan() || max_norm <= 0.0 {
        return Err(Error::Option {
            part: "clip_grad_norm".to_owned(),
            option: "max_norm",
            value: max_norm.to_string(),
            remedy: "expected greater than 0".to_owned(),
        });
    }
    let device = parameters(model).first().map_or_else(Device::cpu, |parameter| parameter.device().clone());
    // Gradients are scaled in place, so none may share its storage. All are checked before the first is scaled.
    let mut parameters = trainable_mut(model);
    for parameter in &parameters {
        parameter.expect_complete_gradient()?;
        let holders = parameter.main_grad().holders();
        if holders > 0 {
            return Err(fp8_kernels::Error::Shared { name: main_grad_name(parameter), holders }.into());
        }
    }
    let mut norm = match parameters.is_empty() {
        true => Tensor::zeros([], DType::F32, &device)?,
        false => grad_norm(parameters.iter().map(|parameter| &**parameter))?,
    };
    change(&mut norm)?;
    for parameter in &mut parameters {
        let name = main_grad_name(parameter);
        parameter.gradient_mut().rewrite(|grad| Ok(ops::clip_in_place(grad, &norm, max_norm, &name)?))?;
    }
    Ok(norm)
}

fn main_grad_name(parameter: &Parameter) -> String {
    format!("{}.main_grad", parameter.name())
}

/// Returns the L2 norm of all gradients together, one f32 on their device. Those that are equal on the ranks that share a layer count
/// once, and the parts of the others are all counted.
pub(crate) fn grad_norm<'a>(parameters: impl Iterator<Item = &'a Parameter>) -> Result<Tensor> {
    let (mut replicated, mut cut): (Vec<&Tensor>, Vec<(&TensorParallel, Vec<&Tensor>)>) = Default::default();
    for parameter in parameters {
        let gradient = parameter.main_grad();
        match (parameter.placement(), parameter.tensor_parallel()) {
            (Placement::Cut(_), Some(ranks)) => {
                match cut.iter_mut().find(|(of, _)| Arc::ptr_eq(of.group(), ranks.group())) {
                    Some((_, gradients)) => gradients.push(gradient),
                    None => cut.push((ranks, vec![gradient])),
                }
            }
            _ => replicated.push(gradient),
        }
    }
    let mut norms = Vec::with_capacity(cut.len());
    for (ranks, gradients) in &cut {
        let own = ops::grad_norm(gradients)?.reshape([1])?;
        norms.push(ranks.gather("norms of gradients", &own)?);
    }
    // The norm of norms is that of all.
    Ok(ops::grad_norm(&replicated.into_iter().chain(&norms).collect::<Vec<_>>())?)
}
