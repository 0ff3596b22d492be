//! The training of a model that people have.

mod checkpoint;
mod exchange;
mod micro_batch;
mod names;
mod options;
mod plan;
mod trained;

use crate::data::{IGNORED, Sequence};
use crate::{Adapter, Error, Folder, Fp8Weights, LoadOptions, Result, save_adapter};
use exchange::Exchange;
use fp8_kernels::ops::{CrossEntropyOptions, LossScale, LossScaleState};
use fp8_kernels::{DType, Device, Graph, MemoryUse, Tensor};
use fp8_nn::fp8_dist::share_tuned_products;
use fp8_nn::{
    AnyOptimizer, Gpt, Gradients, GradientsOptions, LossScaler, LossScalerOptions, Optimizer as _,
    TensorParallel, frozen, parameters, quantize_weights, zero_grad,
};
use fp8_recipe::{AutocastOptions, Scaling};
use micro_batch::{MicroBatch, Tokens};
use names::Names;
pub use options::{TrainRanks, TrainerOptions};
pub use plan::TrainPlan;
use std::fmt;
use std::path::Path;

/// Steps before one is recorded. They compile kernels, allocate state and calibrate scales.
const EAGER_STEPS: u32 = 2;

/// A model in training, whole or by an adapter, with its optimizer and scaling state, on one device or one of several ranks.
///
/// The loss of a step is the sum of −ln p over all learned targets of its sequences, divided by their number n, which is counted over
/// all micro-batches and all replicas before the first gradient. How a step is cut into micro-batches and ranks therefore changes it by
/// rounding alone. Gradients are clipped by their common norm, and the [optimizer](TrainerOptions::optimizer) updates the parameters. A step whose gradients have no
/// finite norm changes nothing but the counts.
///
/// With an [`Adapter`], the weights of the model are frozen. Under a recipe, those of the blocks are kept in FP8 codes alone, unless ranks
/// share them ([`TrainRanks`]): those are kept in high precision beside their codes.
///
/// ```
/// use fp8_hf::data::Sequence;
/// use fp8_hf::{self as hf, Adapter, Config, Folder, LoraTargets, Trainer, TrainerOptions};
/// use fp8_nn::prelude::*;
///
/// # let place = std::env::temp_dir().join(format!("fp8-trainer-{}", std::process::id()));
/// # std::fs::create_dir(&place)?;
/// # let config = Config::from_json(
/// #     r#"{"model_type": "llama", "vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
/// #         "num_attention_heads": 2, "max_position_embeddings": 8}"#,
/// # )?;
/// # let model = Gpt::new("model", &config.gpt_options(), &Device::cpu(), &mut fp8_nn::rand::rng())?;
/// # hf::save_model(&place.join("model"), &config, &model, None)?;
/// let folder = Folder::open(&place.join("model"))?;
/// let adapter = Adapter::new(&folder.config, &LoraTargets { rank: 4, ..Default::default() }, 1)?;
/// let options = TrainerOptions { recipe: CurrentScaling::default().into(), seq: 4, ..Default::default() };
/// let mut trainer = Trainer::new(folder, Some(adapter), &options, &Device::cpu(), None)?;
///
/// let sequence = Sequence { ids: vec![1, 2, 3, 4], targets: vec![2, 3, 4, 5], lengths: vec![4] };
/// let mut losses = Vec::new();
/// for _ in 0..8 {
///     let step = trainer.step(2, &mut |_| Ok(sequence.clone()), 1e-2)?; // two sequences, here the same
///     losses.push(step.loss);
/// }
/// assert!(losses[7] < losses[0]);
/// trainer.save_result(&place.join("adapter"), None)?; // an adapter as peft writes it
/// # std::fs::remove_dir_all(place)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Trainer {
    folder: Folder,
    device: Device,
    exchange: Exchange,
    model: Gpt,
    names: Names,
    has_adapter: bool,
    optimizer: AnyOptimizer,
    scaling: Scaling,
    /// Scales the loss of a training in f16.
    scaler: LossScaler,
    /// 1 / n, which recorded steps read.
    factor: LossScale,
    /// Sums gradients over the ranks while backward goes on, if there are several.
    gradients: Option<Gradients>,
    options: TrainerOptions,
    autocast: AutocastOptions,
    eager_steps: u32,
    recorded: Option<Recorded>,
}

/// A step as a graph, with the tensors that it reads and writes.
#[derive(Debug)]
struct Recorded {
    graph: Graph,
    inputs: Vec<MicroBatch>,
    results: Results,
}

/// The losses of the micro-batches, each a sum over its targets (in f16 the share of the mean), and the norm of all gradients.
#[derive(Debug, Clone)]
struct Results {
    losses: Vec<Tensor>,
    norm: Tensor,
}

/// The result of a step: see [`Trainer::step`].
///
/// ```
/// # use fp8_hf::data::Sequence;
/// # use fp8_hf::{self as hf, Config, Folder, Trainer, TrainerOptions};
/// # use fp8_nn::prelude::*;
/// # let place = std::env::temp_dir().join(format!("fp8-train-step-{}", std::process::id()));
/// # std::fs::create_dir(&place)?;
/// # let config = Config::from_json(
/// #     r#"{"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
/// #         "num_attention_heads": 2, "max_position_embeddings": 8}"#,
/// # )?;
/// # let model = Gpt::new("model", &config.gpt_options(), &Device::cpu(), &mut fp8_nn::rand::rng())?;
/// # hf::save_model(&place.join("model"), &config, &model, None)?;
/// # let options = TrainerOptions { seq: 4, ..Default::default() };
/// # let mut trainer = Trainer::new(Folder::open(&place.join("model"))?, None, &options, &Device::cpu(), None)?;
/// let sequence = Sequence { ids: vec![1, 2, 3, 4], targets: vec![-100, 3, 4, 5], lengths: vec![4] };
/// let step = trainer.step(2, &mut |_| Ok(sequence.clone()), 1e-4)?;
/// assert_eq!((step.learned, step.tokens, step.skipped), (6, 8, false));
/// assert!(step.loss.is_finite() && step.non_finite.is_none());
/// # std::fs::remove_dir_all(place)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct TrainStep {
    /// The mean loss of the learned targets, in nats, with the weights before the step; NaN if nothing was learned.
    pub loss: f64,
    /// The norm of all gradients, before clipping.
    pub grad_norm: f32,
    /// The learned targets of all ranks. With none, nothing is computed.
    pub learned: u64,
    /// The tokens of all ranks, without padding.
    pub tokens: u64,
    /// Whether nothing was updated: no target was learned, or the norm was not finite.
    pub skipped: bool,
    /// The first tensor with a gradient that is not finite, by Hugging Face's name, if the norm was not.
    pub non_finite: Option<String>,
}

/// The losses of an evaluation: see [`Trainer::evaluate`].
///
/// ```
/// # use fp8_hf::data::Sequence;
/// # use fp8_hf::{self as hf, Config, Folder, Trainer, TrainerOptions};
/// # use fp8_nn::prelude::*;
/// # let place = std::env::temp_dir().join(format!("fp8-train-evaluation-{}", std::process::id()));
/// # std::fs::create_dir(&place)?;
/// # let config = Config::from_json(
/// #     r#"{"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
/// #         "num_attention_heads": 2, "max_position_embeddings": 8}"#,
/// # )?;
/// # let model = Gpt::new("model", &config.gpt_options(), &Device::cpu(), &mut fp8_nn::rand::rng())?;
/// # hf::save_model(&place.join("model"), &config, &model, None)?;
/// # let options = TrainerOptions { seq: 4, ..Default::default() };
/// # let mut trainer = Trainer::new(Folder::open(&place.join("model"))?, None, &options, &Device::cpu(), None)?;
/// let held_out = [Sequence { ids: vec![1, 2, 3, 4], targets: vec![2, 3, 4, 5], lengths: vec![4] }];
/// let evaluation = trainer.evaluate(held_out.len(), &mut |index| Ok(held_out[index].clone()))?;
/// let perplexity = evaluation.loss.exp();
/// assert!(evaluation.learned == 4 && (10.0..25.0).contains(&perplexity)); // near 16, the vocabulary
/// # std::fs::remove_dir_all(place)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct TrainEvaluation {
    /// The mean loss of the learned targets, in nats; NaN if there is none.
    pub loss: f64,
    /// Their number.
    pub learned: u64,
}

impl fmt::Debug for Trainer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trainer")
            .field("folder", &self.folder.path())
            .field("device", &self.device)
            .field("has_adapter", &self.has_adapter)
            .field("steps", &self.optimizer.steps())
            .finish_non_exhaustive()
    }
}

impl Trainer {
    /// Reads the model of a folder to a device. With an `adapter`, that is trained beside it; with `ranks`, this is one of several
    /// processes, which must be given the same.
    ///
    /// # Errors
    /// An option out of its range, or a pattern that fits no tensor; a recipe with patterns that match nothing; a model without a
    /// trained parameter; a file that cannot be read; a device that is out of memory; ranks that differ.
    pub fn new(
        folder: Folder,
        adapter: Option<Adapter>,
        options: &TrainerOptions,
        device: &Device,
        ranks: Option<TrainRanks>,
    ) -> Result<Self> {
        options.check(device)?;
        TrainPlan::new(&folder, adapter.as_ref(), options)?; // refuses what cannot be trained
        let exchange = Exchange::new(ranks);
        let tensor_parallel = match exchange.ranks() {
            Some(ranks) => TensorParallel::new(ranks.mesh.tp().clone(), &ranks.tensor_parallel)?,
            None => None,
        };
        let modules: Vec<String> =
            adapter.iter().flat_map(|adapter| adapter.modules().map(str::to_owned)).collect();
        let names = Names::new(&folder.config, &LoadOptions::default().path, &modules);
        let read = || {
            let mut model = load(&folder, adapter.is_some(), options, device, tensor_parallel)?;
            if let Some(adapter) = &adapter {
                adapter.add_to(&mut model, &folder.config, options.params_dtype)?;
            }
            names.freeze(&options.frozen, &mut model)?;
            expect_finite_model(&folder, &model, &names)?;
            Ok(model)
        };
        let mut model = exchange.all_of("reading the model", read())?;
        let mut scaling = Scaling::new(&model, device)?;
        // A pattern without slots is an error now, not in the first step.
        scaling.explain(&options.recipe)?;
        let mut optimizer = AnyOptimizer::new(names.optimizer(&options.optimizer)?)?;
        let is_f16 = options.compute_dtype == DType::F16;
        let scaler = LossScaler::new(LossScalerOptions { enabled: is_f16, ..Default::default() }, device)?;
        if is_f16 {
            optimizer.set_loss_scaler(&scaler)?;
        }
        if adapter.is_some() {
            // Codes of a part have no scale of the whole weight.
            if exchange.sharing() == 1 {
                quantize_weights(&mut model, &options.recipe)?;
            }
            if options.fp8 == Fp8Weights::Keep {
                folder.load_input_scales(&model, &mut scaling)?;
            }
        } else if options.fp8_weights {
            optimizer.quantize_weights(&mut model, &options.recipe)?;
        }
        let mut gradients = None;
        if let Some(TrainRanks { mesh, .. }) = exchange.ranks() {
            scaling.set_group(mesh.amax_group());
            // Replicas round gradients stochastically with numbers of their own.
            scaling.set_replica(mesh.dp().rank());
            gradients = Some(Gradients::new(&model, mesh.dp().clone(), GradientsOptions::default())?);
        }
        let factor = LossScale::new(&LossScaleState { scale: 1.0, ..Default::default() }, device)?;
        let autocast = AutocastOptions { compute_dtype: Some(options.compute_dtype), ..Default::default() };
        Ok(Self {
            exchange,
            folder,
            device: device.clone(),
            model,
            names,
            has_adapter: adapter.is_some(),
            optimizer,
            scaling,
            scaler,
            factor,
            gradients,
            options: options.clone(),
            autocast,
            eager_steps: 0,
            recorded: None,
        })
    }

    /// Takes a step with `count` sequences, which are numbered from 0. `read` is called for those that this rank computes: each
    /// micro-batch of [`micro_batch`](TrainerOptions::micro_batch) sequences goes to the next replica, whose ranks all read it.
    ///
    /// # Errors
    /// What `read` returns; a sequence that is longer than [`seq`](TrainerOptions::seq) or has tokens outside the vocabulary; a rate that
    /// is negative or not finite; a device that failed; a rank that left or failed.
    pub fn step(
        &mut self,
        count: usize,
        read: &mut dyn FnMut(usize) -> Result<Sequence>,
        lr: f32,
    ) -> Result<TrainStep> {
        let all = self.read(count, read)?;
        let [learned, tokens] = self.exchange.counts(&all)?;
        let nothing =
            TrainStep { loss: f64::NAN, grad_norm: 0.0, learned, tokens, skipped: true, non_finite: None };
        if learned == 0 {
            return Ok(nothing);
        }
        self.factor.set_state(&LossScaleState { scale: 1.0 / learned as f32, ..Default::default() })?;
        let skipped = self.skipped()?;
        let results = self.compute(all, lr, learned)?;
        let mut loss = 0.0;
        for sum in &results.losses {
            loss += f64::from(sum.item()?);
        }
        let is_share = self.options.compute_dtype == DType::F16;
        let loss = self.exchange.sum(loss)? / if is_share { 1.0 } else { learned as f64 };
        let grad_norm = results.norm.item()?;
        if grad_norm.is_finite() && self.skipped()? == skipped {
            return Ok(TrainStep { loss, grad_norm, skipped: false, ..nothing });
        }
        Ok(TrainStep { loss, grad_norm, non_finite: self.non_finite()?, ..nothing })
    }

    /// Steps that changed nothing so far, as far as the scaler of f16 knows.
    fn skipped(&self) -> Result<u64> {
        if self.scaler.options().enabled { Ok(self.scaler.skipped_steps()?) } else { Ok(0) }
    }

    /// Reads the sequences of this replica, as micro-batches; each has as many.
    fn read(&self, count: usize, read: &mut dyn FnMut(usize) -> Result<Sequence>) -> Result<Vec<Tokens>> {
        let size = self.options.micro_batch;
        let [replica, replicas] = self.exchange.replica();
        let vocab_size = self.folder.config.vocab_size;
        let micro_batches = count.div_ceil(size.saturating_mul(replicas));
        let mut all = Vec::with_capacity(micro_batches);
        for index in 0..micro_batches {
            let start = (index * replicas + replica) * size;
            let mut tokens = Tokens::default();
            for number in start..(start + size).min(count) {
                tokens.push(&read(number)?, self.options.seq, vocab_size)?;
            }
            all.push(tokens);
        }
        Ok(all)
    }

    /// The tokens of a micro-batch, if it has a fixed number.
    fn room(&self) -> Option<usize> {
        let tokens = self.options.seq * self.options.micro_batch;
        self.options.graph.then(|| tokens.next_multiple_of(self.exchange.parts()))
    }

    fn compute(&mut self, all: Vec<Tokens>, lr: f32, learned: u64) -> Result<Results> {
        let room = self.room();
        let (parts, device) = (self.exchange.parts(), self.device.clone());
        if let Some(recorded) = &mut self.recorded
            && recorded.inputs.len() == all.len()
            && room.is_some_and(|room| all.iter().all(|tokens| tokens.fits(room)))
        {
            for (input, tokens) in recorded.inputs.iter_mut().zip(all) {
                input.set(tokens)?;
            }
            self.optimizer.set_lr(lr)?;
            recorded.graph.replay()?;
            return Ok(recorded.results.clone());
        }
        let fits = room.is_some_and(|room| all.iter().all(|tokens| tokens.fits(room)));
        let inputs = all.into_iter().map(|tokens| MicroBatch::new(tokens, room, parts, &device));
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        if !fits || self.eager_steps < EAGER_STEPS || self.recorded.is_some() {
            self.eager_steps = self.eager_steps.saturating_add(1);
            let results = self.queue(&inputs, lr, learned)?;
            if let Some(ranks) = self.exchange.ranks().filter(|_| self.eager_steps == 1) {
                // The first step has tuned the products.
                share_tuned_products(&**ranks.mesh.world(), &device, 0)?;
            }
            return Ok(results);
        }
        let (graph, results) = device.capture(|| self.queue(&inputs, lr, learned))?;
        self.recorded = Some(Recorded { graph, inputs, results: results.clone() });
        Ok(results)
    }

    /// Queues a step and returns its results, without waiting for them.
    fn queue(&mut self, inputs: &[MicroBatch], lr: f32, learned: u64) -> Result<Results> {
        let is_f16 = self.scaler.options().enabled;
        // The factor divides by the number of targets, but for f16, whose loss is scaled by another one.
        let normalizer = Some(if is_f16 { learned as f32 } else { 1.0 });
        let cross_entropy = CrossEntropyOptions { ignore_index: Some(IGNORED), normalizer };
        zero_grad(&mut self.model)?;
        let mut losses = Vec::with_capacity(inputs.len());
        for (index, input) in inputs.iter().enumerate() {
            let mut cx = self.scaling.scope(&self.options.recipe, &self.autocast)?;
            let (loss, saved) =
                self.model.loss_with_info(&mut cx, &input.ids, &input.targets, cross_entropy, &input.info)?;
            cx.commit()?;
            let mut cx = self.scaling.backward()?;
            if let Some(gradients) = self.gradients.as_mut().filter(|_| index + 1 == inputs.len()) {
                gradients.watch(&mut cx, &mut self.model)?;
            }
            match is_f16 {
                true => self.model.loss_backward_scaled(&mut cx, saved, &self.scaler)?,
                false => self.model.loss_backward_by(&mut cx, saved, &self.factor)?,
            }
            cx.commit()?;
            losses.push(loss);
        }
        if let Some(gradients) = &mut self.gradients {
            gradients.finish(&mut self.model)?;
        }
        let most = self.options.max_grad_norm.unwrap_or(f32::MAX);
        let norm = self.scaler.clip_grad_norm(&mut self.model, most)?;
        self.scaler.step_with_norm(&mut self.optimizer, &mut self.model, lr, &norm)?;
        self.scaler.update()?;
        Ok(Results { losses, norm })
    }

    /// Returns the first tensor with a gradient that is not finite.
    fn non_finite(&self) -> Result<Option<String>> {
        let parameters = parameters(&self.model);
        let mut own = None;
        for (place, parameter) in parameters.iter().enumerate().filter(|(_, other)| other.is_trainable()) {
            if parameter.main_grad().to_f32_vec()?.iter().any(|value| !value.is_finite()) {
                own = Some(place);
                break;
            }
        }
        // Another rank may have the part.
        let first = self.exchange.least("gradients that are not finite", own)?;
        Ok(first.and_then(|place| Some(self.names.of(parameters.get(place)?.name()).join(", "))))
    }

    /// Returns the mean loss of `count` sequences, and changes nothing that a later step reads. `read` is called as in
    /// [`step`](Self::step).
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn evaluate(
        &mut self,
        count: usize,
        read: &mut dyn FnMut(usize) -> Result<Sequence>,
    ) -> Result<TrainEvaluation> {
        let options = CrossEntropyOptions { ignore_index: Some(IGNORED), normalizer: Some(1.0) };
        let size = self.options.micro_batch.saturating_mul(self.exchange.replica()[1]);
        let (mut loss, mut learned) = (0.0, 0);
        for start in (0..count).step_by(size.max(1)) {
            let all = self.read(size.min(count - start), &mut |number| read(start + number))?;
            learned += self.exchange.counts(&all)?[0];
            for tokens in all {
                let input = MicroBatch::new(tokens, None, self.exchange.parts(), &self.device)?;
                let mut cx = self.scaling.eval_with_options(&self.options.recipe, &self.autocast)?;
                let (sum, _) =
                    self.model.loss_with_info(&mut cx, &input.ids, &input.targets, options, &input.info)?;
                loss += f64::from(sum.item()?);
            }
        }
        let loss = self.exchange.sum(loss)?;
        Ok(TrainEvaluation { loss: loss / learned as f64, learned })
    }

    /// Writes what was trained to the new folder `out`: the adapter as peft stores it, or a copy of the model's folder, whose tensors
    /// keep their dtypes, or get `dtype`. Tensors that were not trained keep their bytes. All ranks call it, and the first one writes.
    ///
    /// # Errors
    /// A value that is not finite; something exists at `out`; a file that cannot be written; a rank that left or failed. Nothing is left
    /// at `out` then.
    pub fn save_result(&mut self, out: &Path, dtype: Option<DType>) -> Result<()> {
        self.expect_finite()?;
        // The ranks of the first replica have all parts.
        let written = if self.exchange.replica()[0] == 0 { self.write_result(out, dtype) } else { Ok(()) };
        self.exchange.all_of("writing the result", written)
    }

    fn write_result(&self, out: &Path, dtype: Option<DType>) -> Result<()> {
        if self.has_adapter {
            let base =
                std::path::absolute(self.folder.path()).unwrap_or_else(|_| self.folder.path().to_owned());
            return save_adapter(out, &self.model, &self.folder.config, &base.display().to_string());
        }
        self.folder.save_model(out, &self.model, dtype)
    }

    /// Returns the folder of the model that is trained.
    pub fn folder(&self) -> &Folder {
        &self.folder
    }

    /// Returns the model.
    pub fn model(&self) -> &Gpt {
        &self.model
    }

    /// Returns the scales and what was counted of the values that they quantized.
    pub fn scaling(&self) -> &Scaling {
        &self.scaling
    }

    /// Sets whether the next steps count saturated and underflowed values, which takes time and changes no result. Recorded steps count
    /// if they did so when they were recorded.
    pub fn set_counting(&mut self, counting: bool) {
        self.scaling.set_counting(counting || self.options.graph);
    }

    /// Returns the numbers of parameters of the whole model that are trained, and of those that are frozen.
    pub fn num_parameters(&self) -> [usize; 2] {
        let count = |is_trained| {
            let own = parameters(&self.model).into_iter();
            let own = own.filter(|parameter| parameter.is_trainable() == is_trained);
            own.map(|parameter| parameter.global_shape().numel()).sum()
        };
        [count(true), count(false)]
    }

    /// Returns the arrangement of the ranks in words ([`TrainRanks::layout`]), or `None` for a process that trains alone.
    pub fn layout(&self) -> Option<String> {
        self.exchange.ranks().map(TrainRanks::layout)
    }

    /// Returns the bytes of the device's tensors when they were most, by what they are used for.
    pub fn peak_memory(&self) -> MemoryUse {
        self.device.memory_report().peak
    }

    /// Returns the quantized values that were beyond the largest of their format, and all, since counting began.
    pub(crate) fn saturated(&self) -> Result<[u64; 2]> {
        let mut counts = [0, 0];
        for slot in self.scaling.slot_reports()? {
            counts[0] += slot.saturated;
            counts[1] += slot.elements;
        }
        Ok(counts)
    }

    /// Checks that the folder `out` holds a result of this training.
    pub(crate) fn expect_result(&self, out: &Path) -> Result<()> {
        let opened = match self.has_adapter {
            true => Adapter::open(out, &self.folder.config).map(drop),
            false => Folder::open(out).map(drop),
        };
        opened.map_err(|error| Error::File {
            path: out.to_owned(),
            problem: format!("it is there already and is no result ({error}): remove it"),
        })
    }

    /// Returns whether this is the first of the ranks, which writes files.
    pub fn is_first(&self) -> bool {
        self.exchange.rank() == 0
    }

    /// Returns whether any rank says so, on all of them.
    pub(crate) fn any(&self, says: bool) -> Result<bool> {
        self.exchange.any(says)
    }

    /// Returns the error of this rank, or one that says that another has failed at `work`.
    pub(crate) fn all_of(&self, work: &str, done: Result<()>) -> Result<()> {
        self.exchange.all_of(work, done)
    }

    /// Returns whether an adapter is trained.
    pub fn has_adapter(&self) -> bool {
        self.has_adapter
    }
}

/// Reads a model: to be trained as a whole, or as the frozen base of an adapter, in the dtype of its files.
fn load(
    folder: &Folder,
    is_base: bool,
    options: &TrainerOptions,
    device: &Device,
    tensor_parallel: Option<TensorParallel>,
) -> Result<Gpt> {
    let load = LoadOptions {
        params_dtype: if is_base { folder.main_dtype() } else { options.params_dtype },
        trainable: !is_base,
        max_seq_length: Some(options.seq),
        fp8: if is_base { options.fp8 } else { Fp8Weights::Dequantize },
        recompute: options.recompute,
        tensor_parallel,
        ..Default::default()
    };
    let load = || folder.load(&load, device);
    if is_base { frozen(load) } else { load() }
}

/// Refuses a model whose files have values that are not finite, which no training mends.
fn expect_finite_model(folder: &Folder, model: &Gpt, names: &Names) -> Result<()> {
    for parameter in parameters(model).into_iter().filter(|parameter| !parameter.is_adapter()) {
        let values = parameter.values(DType::F32)?.to_f32_vec()?;
        if let Some(value) = values.iter().find(|value| !value.is_finite()) {
            let tensors = names.of(parameter.name()).join(", ");
            return Err(folder
                .problem(format!("a value of {tensors} is {value}: a model to train has finite values")));
        }
    }
    Ok(())
}
