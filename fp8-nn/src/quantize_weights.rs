//! Weights that are stored in FP8.

use crate::optimizer::AdamWState;
use crate::parameter::NOT_CUT;
use crate::{AdamW, Layer, Parameter, Result, parameters, parameters_mut};
use fp8_kernels::{DType, MemoryKind, ops};
use fp8_recipe::{Recipe, WeightQuantizer};

/// Stores the weights of a model's FP8 GEMMs as codes, for inference: one byte a value in place of two or four, and 4 to 4.5 bits in NVFP4.
///
/// Under `recipe`, a weight whose fprop and dgrad run in FP8 is quantized once, and its values are freed. Format and granularity
/// are the recipe's; the scale is computed from the weight ([`WeightQuantizer`]). Scopes of the same recipe then read the codes
/// as they are. Scopes in high precision dequantize them, and a scope that quantizes weights in another way is refused.
/// Embeddings, norms, biases and the head that a [`Gpt`](crate::Gpt) was made with stay in high precision. Returns the number of
/// weights that were stored.
///
/// The weights are [frozen](Parameter::set_trainable), because an optimizer needs values that are finer than the codes. To
/// train, use [`AdamW::quantize_weights`]. This corresponds to Transformer Engine's `quantized_model_init`.
///
/// Other parameters can be trained through these weights, as adapters are. Under recipes with factors for rows, 1 × 128 blocks or
/// MX blocks, dgrad needs other codes of each weight: a training scope makes them anew from the dequantized values and holds them
/// until backward has used them, so these are rounded twice ([`Forward::fp8_weight`](fp8_recipe::Forward::fp8_weight)). For codes
/// that are rounded once and made once, at two bytes a value, freeze the weights and call [`AdamW::quantize_weights`].
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let options = LinearOptions { in_features: 64, out_features: 32, ..Default::default() };
/// let mut fc = Linear::new("fc", options, &Device::cpu(), &mut fp8_nn::rand::rng())?;
/// let x = Tensor::full(1.0, [4, 64], DType::F32, &Device::cpu())?;
/// let recipe = Recipe::from(CurrentScaling::default());
/// let mut scaling = Scaling::new(&fc, &Device::cpu())?;
/// let (before, _) = fc.forward(&mut scaling.eval(&recipe)?, &x)?;
///
/// assert_eq!(quantize_weights(&mut fc, &recipe)?, 1);
/// assert_eq!(fc.weight().fp8().map(|codes| codes.encoding()), Some(Encoding::E4M3));
/// let (after, _) = fc.forward(&mut scaling.eval(&recipe)?, &x)?;
/// assert_eq!(before.to_f32_vec()?, after.to_f32_vec()?); // current scaling quantizes the weight in the same way
/// # Ok::<(), fp8_nn::Error>(())
/// ```
///
/// # Errors
/// A recipe with an option out of range or a pattern that matches nothing; a step that is being recorded; a weight that is
/// [cut over ranks](crate::Placement::Cut), whose parts would each have scales of their own. Nothing has changed then. The device is out of memory or failed.
pub fn quantize_weights(model: &mut (impl Layer + ?Sized), recipe: &Recipe) -> Result<usize> {
    each_weight(model, recipe, |weight, quantizer| {
        let stored = weight.store_in_fp8(quantizer, None, false)?.is_some();
        weight.set_trainable(false)?;
        Ok(stored)
    })
}

impl AdamW {
    /// Stores the weights of a model's FP8 GEMMs in FP8, for training: the model has their codes alone, and the optimizer the f32
    /// values that it updates.
    ///
    /// As [`quantize_weights`](crate::quantize_weights), but the weights stay trainable. Their values become the optimizer's f32
    /// copies, so nothing of the initialization is lost. Each step updates the copies and quantizes them, with a scale computed from
    /// the new values. The codes that dgrad reads are written with them, where it reads others than fprop.
    ///
    /// Weights that are [frozen](Parameter::set_trainable) stay frozen: they become codes for fprop and dgrad, without an f32 copy.
    ///
    /// Checkpoints work both ways: a checkpoint of either kind can be loaded into either kind of model.
    ///
    /// ```
    /// use fp8_nn::prelude::*;
    ///
    /// let device = Device::cpu();
    /// let options = LinearOptions { in_features: 64, out_features: 64, ..Default::default() };
    /// let mut fc = Linear::new("fc", options, &device, &mut fp8_nn::rand::rng())?;
    /// let (mut scaling, recipe) = (Scaling::new(&fc, &device)?, Recipe::from(DelayedScaling::default()));
    /// let mut optimizer = AdamW::new(AdamWOptions::default())?;
    /// assert_eq!(optimizer.quantize_weights(&mut fc, &recipe)?, 1);
    ///
    /// let x = Tensor::full(1.0, [16, 64], DType::F32, &device)?;
    /// for _ in 0..3 {
    ///     let (y, saved) = scaling.in_autocast(&recipe, |cx| fc.forward(cx, &x))?;
    ///     scaling.in_backward(|cx| fc.backward(cx, saved, &y))?; // the loss is ½ · Σ y²
    ///     optimizer.step(&mut fc, 1e-3)?;
    ///     zero_grad(&mut fc)?;
    /// }
    /// assert!(fc.weight().fp8().is_some());
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`quantize_weights`](crate::quantize_weights); a weight of another shape than in the steps before.
    pub fn quantize_weights(&mut self, model: &mut (impl Layer + ?Sized), recipe: &Recipe) -> Result<usize> {
        each_weight(model, recipe, |weight, quantizer| {
            let state = self.state.get(weight.name());
            state.map_or(Ok(()), |state| state.expect_shape_of(weight))?;
            // A frozen weight may have been set since its f32 copy was last updated.
            let main_param = self.state_of(weight).and_then(|state| state.main_param.as_ref());
            let Some(values) = weight.store_in_fp8(quantizer, main_param, true)? else { return Ok(false) };
            if !weight.is_trainable() {
                self.drop_state(weight.name());
                return Ok(true);
            }
            let values = ops::cast(&values, DType::F32)?;
            values.set_memory_kind(MemoryKind::Optimizer);
            match self.state.get_mut(weight.name()) {
                // The copy of a 16-bit parameter is finer than its value.
                Some(state) => state.main_param = state.main_param.take().or(Some(values)),
                None => {
                    let state = AdamWState::with_main_param(
                        weight,
                        self.rule(),
                        self.options().moments,
                        Some(values),
                    )?;
                    self.state.insert(weight.name().clone(), state);
                }
            }
            Ok(true)
        })
    }
}

/// Calls `store` with each weight that the recipe quantizes, and returns for how many it was true.
fn each_weight(
    model: &mut (impl Layer + ?Sized),
    recipe: &Recipe,
    mut store: impl FnMut(&mut Parameter, &WeightQuantizer) -> Result<bool>,
) -> Result<usize> {
    let quantizers = recipe.weight_quantizers(model)?;
    let quantizer = |parameter: &Parameter| quantizers.get(parameter.weight_slot()?.name());
    for parameter in parameters(model).into_iter().filter(|parameter| quantizer(parameter).is_some()) {
        parameter.expect_whole("quantize_weights", NOT_CUT)?;
    }
    let mut stored = 0;
    for parameter in parameters_mut(model) {
        if let Some(quantizer) = quantizer(parameter) {
            stored += usize::from(store(parameter, quantizer)?);
        }
    }
    Ok(stored)
}
