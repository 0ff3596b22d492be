//! Small models, noise, one training step, and what of it can be compared.

use fp8_nn::fp8_recipe::{CustomRecipe, ScalingState, SlotUpdate};
use fp8_nn::prelude::*;
use fp8_nn::rand::{Rng, RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

thread_local! {
    static DEVICE: Device = crate::open();
}

/// Returns the device of this thread. All its tensors are on one device, because those of two do not mix. Other tests do
/// not use it, because they may record a step or leave an error behind.
pub(crate) fn device() -> Device {
    DEVICE.with(Device::clone)
}

/// Returns the tolerance of sums with FP8 products: `f32` on a simulated GPU that does not add like hardware, otherwise
/// `hardware`.
pub(crate) fn of_fp8_sums<T>(hardware: T, f32: T) -> T {
    let adds_alike = std::env::var_os("FP8_SIM_FP8_SUM_BITS").is_some();
    if adds_alike && device().is_simulated() { hardware } else { unless_simulated(hardware, f32) }
}

/// As large a case, and as many repetitions, as the device has time for: less on one that is simulated.
pub(crate) fn unless_simulated<T>(hardware: T, simulated: T) -> T {
    if device().is_simulated() { simulated } else { hardware }
}

pub(crate) fn rng(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

/// Normally distributed, nearly: the sum of twelve uniform values of 24 bits less 6.
pub(crate) fn noise(shape: impl Into<Shape>, seed: u64) -> Tensor {
    let shape = shape.into();
    // All draws at once and plain additions, because this program is not optimized, and many tests spend their time here.
    let mut draws = vec![[0u32; 12]; shape.numel()];
    rng(seed).fill_bytes(bytemuck::cast_slice_mut(&mut draws));
    let mut values = Vec::with_capacity(draws.len());
    for [a, b, c, d, e, f, g, h, i, j, k, l] in draws {
        let half = (a >> 8) as f32 + (b >> 8) as f32 + (c >> 8) as f32 + (d >> 8) as f32 + (e >> 8) as f32;
        let most = half + (f >> 8) as f32 + (g >> 8) as f32 + (h >> 8) as f32 + (i >> 8) as f32;
        let all = most + (j >> 8) as f32 + (k >> 8) as f32 + (l >> 8) as f32;
        values.push(all / (1 << 24) as f32 - 6.0);
    }
    Tensor::from_vec(values, shape, &device()).unwrap()
}

/// Ids below `limit`.
pub(crate) fn ids(shape: [usize; 2], limit: i32, seed: u64) -> Tensor {
    let mut rng = rng(seed);
    let values = (0..shape[0] * shape[1]).map(|_| rng.random_range(0..limit)).collect();
    Tensor::from_vec::<i32>(values, shape, &device()).unwrap()
}

pub(crate) fn linear(path: &str, in_features: usize, out_features: usize, seed: u64) -> Linear {
    let options = LinearOptions { in_features, out_features, init_std: 0.2, ..Default::default() };
    with_noise(Linear::new(path, options, &device(), &mut rng(seed)).unwrap(), seed)
}

/// Sizes that are no multiples of 16.
pub(crate) fn mlp(path: &str, activation: Activation, normalization: Norm, seed: u64) -> LayerNormMlp {
    let options = LayerNormMlpOptions {
        hidden_size: 24,
        ffn_hidden_size: 40,
        activation,
        norm: NormOptions { normalization, ..Default::default() },
        init: InitOptions { init_std: 0.2, output_layer_init_std: 0.2 },
        ..Default::default()
    };
    with_noise(LayerNormMlp::new(path, options, &device(), &mut rng(seed)).unwrap(), seed)
}

pub(crate) fn block_options() -> TransformerLayerOptions {
    TransformerLayerOptions {
        hidden_size: 32,
        ffn_hidden_size: 48,
        attention: AttentionOptions {
            num_attention_heads: unless_simulated(4, 2),
            num_gqa_groups: Some(unless_simulated(2, 1)),
            rope: true,
            max_seq_length: 16,
            ..Default::default()
        },
        init: InitOptions { init_std: 0.1, output_layer_init_std: 0.1 },
        ..Default::default()
    }
}

pub(crate) fn block(path: &str, seed: u64) -> TransformerLayer {
    with_noise(TransformerLayer::new(path, block_options(), &device(), &mut rng(seed)).unwrap(), seed)
}

pub(crate) fn gpt(seed: u64) -> Gpt {
    Gpt::new("gpt", &gpt_options(), &device(), &mut rng(seed)).unwrap()
}

pub(crate) fn gpt_options() -> GptOptions {
    GptOptions {
        vocab_size: 20,
        num_layers: 2,
        layer: TransformerLayerOptions {
            hidden_size: 32,
            ffn_hidden_size: unless_simulated(128, 48),
            attention: AttentionOptions {
                num_attention_heads: unless_simulated(4, 2),
                max_seq_length: 8,
                ..Default::default()
            },
            init: InitOptions { init_std: 0.1, output_layer_init_std: 0.1 },
            ..Default::default()
        },
        ..Default::default()
    }
}

/// Biases and norms away from 0 and 1, where mistakes would not show.
pub(crate) fn with_noise<L: Layer>(mut layer: L, seed: u64) -> L {
    let mut count = seed;
    for parameter in parameters_mut(&mut layer) {
        count += 1;
        if parameter.tensor().shape().len() == 1 {
            let noise = ops::scale(&noise(*parameter.tensor().shape(), 1000 + count), 0.1).unwrap();
            parameter.set(ops::add(parameter.tensor(), &noise).unwrap()).unwrap();
        }
    }
    layer
}

pub(crate) fn short() -> DelayedScaling {
    DelayedScaling { amax_history_len: 4, ..Default::default() }
}

pub(crate) fn delayed() -> Recipe {
    short().into()
}

pub(crate) fn current() -> Recipe {
    CurrentScaling::default().into()
}

/// A recipe for each slot: gradients have a margin, and weights keep no history.
pub(crate) fn by_name() -> Recipe {
    let margin = DelayedScaling { margin: 1, ..short() };
    Recipe::by_name([("*.grad_output", margin.into()), ("*.weight", current())], short())
}

/// A recipe of the user's own: a moving average of the amaxes.
#[derive(Debug)]
struct MovingAverage;

impl CustomRecipe for MovingAverage {
    fn name(&self) -> &str {
        "moving average"
    }

    fn state(&self) -> &[&str] {
        &["mean"]
    }

    fn scale(&self, slot: &SlotUpdate<'_>, state: &mut [f32]) -> f32 {
        state[0] = if slot.scale.is_none() { slot.amax } else { 0.75 * state[0] + 0.25 * slot.amax };
        slot.fp8_max / 2.0 / state[0]
    }
}

pub(crate) fn custom() -> Recipe {
    Recipe::custom(MovingAverage)
}

/// A recipe for each slot: products of rows with tensors.
pub(crate) fn rows_by_name() -> Recipe {
    let margin = DelayedScaling { margin: 1, ..short() };
    let rows = CurrentScaling::rowwise();
    Recipe::by_name([("*.grad_output", margin.into()), ("*.input", rows.into())], short())
}

/// The recipes by name that the simulated GPU has the time for, beside one for rows of some slots. All other devices run every one.
const SIMULATED: [&str; 2] = ["delayed", "block"];

/// Every recipe that has a name, recipes for each slot, and one of the user's own. Histories are short.
pub(crate) fn recipes() -> Vec<Recipe> {
    let names = unless_simulated(&Recipe::NAMES[..], &SIMULATED[..]);
    let named = names.iter().map(|name| match *name {
        "delayed" => delayed(),
        name => Recipe::from_name(name).unwrap(),
    });
    let others = unless_simulated(vec![by_name(), rows_by_name(), custom()], vec![rows_by_name()]);
    named.chain(others).collect()
}

/// Returns whether a recipe has codes of 4 bits, which err more and are not stored.
pub(crate) fn is_nvfp4(recipe: &Recipe) -> bool {
    recipe.options::<Nvfp4>().is_some()
}

pub(crate) fn off() -> AutocastOptions {
    AutocastOptions { enabled: false, ..Default::default() }
}

pub(crate) fn in_dtype(dtype: DType) -> AutocastOptions {
    AutocastOptions { compute_dtype: Some(dtype), ..Default::default() }
}

/// Forward and backward in scopes of their own: y and dx.
pub(crate) fn step<M: Module>(
    scaling: &mut Scaling,
    recipe: &Recipe,
    options: &AutocastOptions,
    model: &mut M,
    x: &Tensor,
    dy: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let mut cx = scaling.scope(recipe, options)?;
    let (y, saved) = model.forward(&mut cx, x)?;
    cx.commit()?;
    let dx = scaling.in_backward(|cx| model.backward(cx, saved, dy))?;
    Ok((y, dx))
}

/// Outputs and gradients of a few steps of a block on sequences of `seq` positions, and all that lasts of it.
pub(crate) fn train_block<M: Module>(
    seq: usize,
    mut model: M,
    recipe: &Recipe,
) -> (Vec<Vec<u32>>, (ParameterBits, ScalingState)) {
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    let mut out = Vec::new();
    for i in 0..unless_simulated(3, 2) {
        let (x, dy) = (noise([2, seq, 32], i), noise([2, seq, 32], 100 + i));
        let (y, dx) = step(&mut scaling, recipe, &AutocastOptions::default(), &mut model, &x, &dy).unwrap();
        out.extend([bits(&y), bits(&dx)]);
        optimizer.step(&mut model, 0.01).unwrap();
        fp8_nn::zero_grad(&mut model).unwrap();
    }
    let all = everything(&model, &scaling);
    (out, all)
}

/// [`step`] in a `Scaling` of its own.
pub(crate) fn first_step<M: Module>(
    recipe: &Recipe,
    options: &AutocastOptions,
    model: &mut M,
    x: &Tensor,
    dy: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let mut scaling = Scaling::new(model, x.device())?;
    step(&mut scaling, recipe, options, model, x, dy)
}

pub(crate) fn values(t: &Tensor) -> Vec<f32> {
    t.to_f32_vec().unwrap()
}

pub(crate) fn bits(t: &Tensor) -> Vec<u32> {
    values(t).iter().map(|value| value.to_bits()).collect()
}

/// Name, value and gradient of every parameter.
pub(crate) type ParameterBits = Vec<(String, Vec<u32>, Vec<u32>)>;

/// All parameters, in the order of the visit.
pub(crate) fn parameter_bits(model: &(impl Layer + ?Sized)) -> ParameterBits {
    let mut all = Vec::new();
    for parameter in parameters(model) {
        let (value, grad) = (bits(parameter.tensor()), bits(parameter.main_grad()));
        all.push((parameter.name().to_string(), value, grad));
    }
    all
}

pub(crate) fn grads(model: &(impl Layer + ?Sized)) -> Vec<(String, Vec<f32>)> {
    let mut all = Vec::new();
    for parameter in parameters(model) {
        all.push((parameter.name().to_string(), values(parameter.main_grad())));
    }
    all
}

/// All that lasts.
pub(crate) fn everything(model: &impl Layer, scaling: &Scaling) -> (ParameterBits, ScalingState) {
    (parameter_bits(model), scaling.state().unwrap())
}

pub(crate) fn relative_rms(expected: &[f32], actual: &[f32]) -> f64 {
    assert_eq!(expected.len(), actual.len());
    let sum = |f: &dyn Fn(f64, f64) -> f64| -> f64 {
        expected.iter().zip(actual).map(|(&e, &a)| f(e.into(), a.into())).sum()
    };
    let (error, norm) = (sum(&|e, a| (a - e) * (a - e)), sum(&|e, _| e * e));
    if error == 0.0 { 0.0 } else { (error / norm).sqrt() }
}

/// Within `tolerance` of the largest value.
pub(crate) fn assert_close(what: &str, expected: &[f32], actual: &[f32], tolerance: f64) {
    assert_eq!(expected.len(), actual.len(), "{what}");
    let largest = expected.iter().fold(0f32, |largest, value| largest.max(value.abs()));
    for (i, (&e, &a)) in expected.iter().zip(actual).enumerate() {
        let difference = (f64::from(e) - f64::from(a)).abs();
        assert!(difference <= tolerance * f64::from(largest), "{what}[{i}] is {a}, expected {e}");
    }
}

/// The error that must have come.
pub(crate) fn error<T>(result: Result<T>) -> String {
    result.err().map_or_else(|| panic!("no error"), |error| error.to_string())
}
