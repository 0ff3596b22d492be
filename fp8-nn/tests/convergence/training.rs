//! Trains a small GPT on the frozen text and collects what the tests judge it by.

use fp8_nn::fp8_recipe::SlotReport;
use fp8_nn::prelude::*;
use fp8_nn::rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

static TEXT: &[u8] = include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../fp8-cli/data/shakespeare.txt"));

const STEPS: usize = 300;
/// Windows in a training batch, and bytes in a window.
const BATCH: usize = 8;
const SEQ: usize = 64;
/// Low enough that rounding errors grow little from step to step: with 3e-3, FP8's losses scatter twice as much.
const PEAK_LR: f32 = 2e-3;
/// The training loss is averaged over this many last steps.
const LAST_STEPS: usize = 50;
/// Evaluated windows of the held-out text.
const HELD_OUT_WINDOWS: usize = 192;
/// Values lost to the format are counted in one of this many steps.
const COUNTED: usize = 4;

/// The results of a training.
#[derive(Debug, Clone)]
pub(crate) struct Outcome {
    /// Mean loss over the held-out windows, in nats per byte.
    pub(crate) held_out: f64,
    /// Mean loss of the last training batches, in nats per byte.
    pub(crate) training: f64,
    /// Every slot that quantized values, with its counts. Empty in high precision.
    pub(crate) slots: Vec<SlotReport>,
    /// ‖g₈ − g‖ / ‖g‖ for the gradient of each matrix of the trained model, g₈ in FP8 and g in high precision. Empty in high
    /// precision.
    pub(crate) gradients: Vec<(String, f64)>,
}

/// The text, split as `fp8 train` splits it: the last tenth is held out.
fn text() -> (&'static [u8], &'static [u8]) {
    TEXT.split_at(TEXT.len() * 9 / 10)
}

/// Mean loss of add-one bigrams on the held-out text, in nats per byte.
pub(crate) fn bigram_loss() -> f64 {
    let (train, held_out) = text();
    let mut counts = vec![[0_u32; 256]; 256];
    train.windows(2).for_each(|pair| counts[usize::from(pair[0])][usize::from(pair[1])] += 1);
    let loss = |pair: &[u8]| {
        let after = &counts[usize::from(pair[0])];
        let (all, this) = (after.iter().sum::<u32>() + 256, after[usize::from(pair[1])] + 1);
        (f64::from(all) / f64::from(this)).ln()
    };
    held_out.windows(2).map(loss).sum::<f64>() / (held_out.len() - 1) as f64
}

/// Windows of the text as ids and targets.
fn batch(text: &[u8], starts: &[usize]) -> (Tensor, Tensor) {
    let ids = |shift: usize| {
        let windows = starts.iter().flat_map(|&start| &text[start + shift..][..SEQ]);
        let ids = windows.map(|&byte| i32::from(byte)).collect();
        Tensor::from_vec::<i32>(ids, [starts.len(), SEQ], &Device::cpu()).unwrap()
    };
    (ids(0), ids(1))
}

/// The `stream`th batch of `seed`, at random places of the text that is not held out.
fn training_batch(seed: u64, stream: u64) -> (Tensor, Tensor) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(stream);
    let text = text().0;
    let starts: Vec<usize> = (0..BATCH).map(|_| rng.random_range(0..text.len() - SEQ)).collect();
    batch(text, &starts)
}

struct Training<'a> {
    model: Gpt,
    scaling: Scaling,
    optimizer: AdamW,
    recipe: &'a Recipe,
    autocast: AutocastOptions,
}

impl Training<'_> {
    /// The loss of one batch; its gradients are added to those of the parameters.
    fn gradients(&mut self, (ids, targets): &(Tensor, Tensor), autocast: &AutocastOptions) -> f64 {
        let mut cx = self.scaling.scope(self.recipe, autocast).unwrap();
        let (loss, saved) = self.model.loss(&mut cx, ids, targets).unwrap();
        cx.commit().unwrap();
        let mut cx = self.scaling.backward().unwrap();
        self.model.loss_backward(&mut cx, saved).unwrap();
        cx.commit().unwrap();
        loss.item().unwrap().into()
    }

    fn step(&mut self, batch: &(Tensor, Tensor), lr: f32) -> f64 {
        let loss = self.gradients(batch, &self.autocast.clone());
        clip_grad_norm(&mut self.model, 1.0).unwrap();
        self.optimizer.step(&mut self.model, lr).unwrap();
        zero_grad(&mut self.model).unwrap();
        loss
    }

    fn held_out_loss(&mut self) -> f64 {
        let text = text().1;
        let apart = (text.len() - 1 - SEQ) / HELD_OUT_WINDOWS;
        let starts: Vec<usize> = (0..HELD_OUT_WINDOWS).map(|window| window * apart).collect();
        let chunks = starts.chunks(16);
        let count = chunks.len();
        let losses = chunks.map(|starts| {
            let (ids, targets) = batch(text, starts);
            let mut cx = self.scaling.eval_with_options(self.recipe, &self.autocast).unwrap();
            let (loss, _) = self.model.loss(&mut cx, &ids, &targets).unwrap();
            f64::from(loss.item().unwrap())
        });
        losses.sum::<f64>() / count as f64
    }

    /// The gradient of every matrix for one batch.
    fn weight_gradients(
        &mut self,
        batch: &(Tensor, Tensor),
        autocast: &AutocastOptions,
    ) -> Vec<(String, Vec<f32>)> {
        self.gradients(batch, autocast);
        let mut all = Vec::new();
        for parameter in parameters(&self.model) {
            if parameter.tensor().shape().len() == 2 {
                all.push((parameter.name().to_string(), parameter.main_grad().to_f32_vec().unwrap()));
            }
        }
        zero_grad(&mut self.model).unwrap();
        all
    }

    /// Returns the relative errors of FP8 gradients, compared with those in high precision, for the weights as they are.
    fn gradient_errors(&mut self, seed: u64) -> Vec<(String, f64)> {
        let batch = training_batch(seed, u64::MAX);
        let high = AutocastOptions { enabled: false, ..self.autocast.clone() };
        let fp8 = self.weight_gradients(&batch, &self.autocast.clone());
        let high = self.weight_gradients(&batch, &high);
        let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>();
        let error = |((name, high), (_, fp8)): ((String, Vec<f32>), (String, Vec<f32>))| {
            let difference = squares(&mut fp8.iter().zip(&high).map(|(&a, &b)| f64::from(a) - f64::from(b)));
            (name, (difference / squares(&mut high.iter().map(|&value| value.into()))).sqrt())
        };
        high.into_iter().zip(fp8).map(error).collect()
    }
}

/// Trains in FP8 with `recipe`, or in high precision. A seed has the same initial weights and batches either way.
///
/// A training has one thread: the tests run beside each other, and products this small gain little from a second.
pub(crate) fn train(options: &GptOptions, seed: u64, recipe: Option<&Recipe>) -> Outcome {
    train_with(options, seed, recipe, &AdamWOptions::default())
}

/// Trains with an optimizer that has these options.
pub(crate) fn train_with(
    options: &GptOptions,
    seed: u64,
    recipe: Option<&Recipe>,
    optimizer: &AdamWOptions,
) -> Outcome {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    pool.install(|| train_here(options, seed, recipe, optimizer))
}

fn train_here(options: &GptOptions, seed: u64, recipe: Option<&Recipe>, optimizer: &AdamWOptions) -> Outcome {
    let device = Device::cpu();
    let mut rng = ChaCha8Rng::seed_from_u64(seed); // its stream 0; that of step n is n
    let options = GptOptions {
        vocab_size: 128,
        layer: TransformerLayerOptions {
            attention: AttentionOptions { max_seq_length: SEQ, ..options.layer.attention },
            ..options.layer.clone()
        },
        ..options.clone()
    };
    let model = Gpt::new("gpt", &options, &device, &mut rng).unwrap();
    let (unused, fp8) = (Recipe::from(DelayedScaling::default()), recipe.is_some());
    let mut training = Training {
        scaling: Scaling::new(&model, &device).unwrap(),
        optimizer: AdamW::new(optimizer.clone()).unwrap(),
        recipe: recipe.unwrap_or(&unused),
        autocast: AutocastOptions { enabled: fp8, ..Default::default() },
        model,
    };
    let schedule = Schedule::cosine(PEAK_LR, STEPS as u64 / 10, STEPS as u64, 0.01).unwrap();
    let mut last = 0.0;
    for step in 0..STEPS {
        training.scaling.set_counting(step % COUNTED == 0);
        let loss = training.step(&training_batch(seed, step as u64 + 1), schedule.lr(step as u64));
        if step >= STEPS - LAST_STEPS {
            last += loss / LAST_STEPS as f64;
        }
    }
    let mut slots = training.scaling.slot_reports().unwrap();
    slots.retain(|slot| slot.elements > 0);
    training.scaling.set_counting(false);
    let held_out = training.held_out_loss();
    let gradients = if fp8 { training.gradient_errors(seed) } else { Vec::new() };
    Outcome { held_out, training: last, slots, gradients }
}
