//! Weight gradients that backward left for later.

use crate::{Error, Layer, Result, parameters_mut};
use fp8_kernels::ops;
use fp8_recipe::DelayedWgrad;
use std::collections::BTreeMap;

/// Computes weight gradients that a backward scope delayed ([`Backward::delay_wgrad`](fp8_recipe::Backward::delay_wgrad)), and adds
/// them to the parameters' `main_grad`. The results have the bits that the scope itself would have given them, if the scopes of a
/// step are taken in the same order.
///
/// ```
/// use fp8_nn::prelude::*;
/// use fp8_nn::rand::{SeedableRng, rngs::StdRng};
///
/// let device = Device::cpu();
/// let options = LinearOptions { in_features: 32, out_features: 16, ..Default::default() };
/// let mut fc = Linear::new("fc", options, &device, &mut StdRng::seed_from_u64(1))?;
/// let mut scaling = Scaling::new(&fc, &device)?;
/// let x = Tensor::full(1.0, [4, 32], DType::F32, &device)?;
/// let recipe = Recipe::from(DelayedScaling::default());
/// let (y, saved) = scaling.in_autocast(&recipe, |cx| fc.forward(cx, &x))?;
///
/// let mut cx = scaling.backward()?;
/// cx.delay_wgrad();
/// let dx = fc.backward(&mut cx, saved, &y)?; // the previous stage of a pipeline can go on with it
/// let wgrads = cx.take_wgrads();
/// cx.commit()?;
/// assert_eq!(fc.weight().main_grad().to_f32_vec()?, [0.0; 16 * 32]);
/// backward_dw(&mut fc, wgrads)?;
/// assert_ne!(fc.weight().main_grad().to_f32_vec()?, [0.0; 16 * 32]);
/// # Ok::<(), fp8_nn::Error>(())
/// ```
///
/// # Errors
/// A weight that the model does not have, before any gradient has changed; the device failed.
pub fn backward_dw(model: &mut (impl Layer + ?Sized), wgrads: Vec<DelayedWgrad>) -> Result<()> {
    let parameters = parameters_mut(model).into_iter();
    let mut parameters: BTreeMap<_, _> = parameters.map(|p| (p.name().clone(), p)).collect();
    if let Some(other) = wgrads.iter().find(|wgrad| !parameters.contains_key(&wgrad.weight)) {
        return Err(Error::UnknownWeight(other.weight.clone()));
    }
    for DelayedWgrad { weight, dy, x, accumulation, lone_recipe } in wgrads {
        if let Some(parameter) = parameters.get_mut(&weight) {
            parameter.store(lone_recipe, |grad, update, name| {
                Ok(ops::wgrad_into(&dy, &x, grad, update, name, accumulation)?)
            })?;
        }
    }
    Ok(())
}
