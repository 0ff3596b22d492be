//! The model in training: everything this program uses of the library, in one place.

use std::path::Path;

use fp8_hf::Config;
use fp8_nn::checkpoint::{self, load_on, save_on};
use fp8_nn::fp8_dist::{Mesh, share_tuned_products};
use fp8_nn::fp8_kernels::ops::{CrossEntropyOptions, Emulation, LossScaleState};
use fp8_nn::fp8_kernels::{Error as KernelError, MemoryUse};
use fp8_nn::fp8_recipe::{DropoutProgress, Encoding, Explanation, SlotRole, SlotTrace};
use fp8_nn::prelude::*;

use crate::failure::about_device;
use crate::gathers;
use crate::train::batches::{self, Batch};
use crate::train::options::{Dtype, FormatName, ModelName, Place, RecipeName, Settings};
use crate::train::ranks::Ranks;
use crate::train::telemetry::{SlotState, slot_states};
use crate::train::trainer::{Attention, MAX_GRAD_NORM, Metadata, Observe, Run, StepResult, Trainer};

/// Model, optimizer, scaling state and recipe of one training.
#[derive(Debug)]
pub(crate) struct Session {
    device: Device,
    ranks: Ranks,
    /// Sums gradients over the ranks while backward goes on, if there are several.
    gradients: Option<Gradients>,
    /// The divisor of the loss: the targets of a batch, if this rank may have only some of them.
    normalizer: Option<f32>,
    model: Gpt,
    optimizer: AdamW,
    scaling: Scaling,
    /// Scales the loss of a training in f16.
    scaler: LossScaler,
    /// The scaler's state before the next step.
    scale: LossScaleState,
    recipe: Recipe,
    /// The number of GEMMs in a step that run in FP8.
    fp8_gemms: usize,
    /// The emulations of FP8 GEMMs that the device does not have, each with its number of GEMMs in a step.
    emulated: Vec<(Emulation, usize)>,
    attention: Attention,
    autocast: AutocastOptions,
    graph: bool,
    /// Number of steps that were queued before one was recorded.
    eager_steps: u32,
    recorded: Option<Recorded>,
    /// A note on the parts of the scaling state that could not be restored exactly as they were saved, if any.
    resume_note: Option<String>,
    /// The slots in the observed steps.
    trace: SlotTrace,
    /// The number of observed steps.
    observed: u64,
    measures_sqnr: bool,
    /// Whether tensors are in NVFP4, whose blocks some steps measure.
    has_nvfp4: bool,
    memory: MemoryOfTraining,
    /// The entry of checkpoints from which `fp8 export` knows the model.
    hf_config: Option<(String, String)>,
}

/// Replicas draw different masks: each has rows of its own. Those of ranks that share layers are parts of one.
fn dropout_seed(settings: &Settings, ranks: &Ranks) -> u64 {
    settings.seed ^ (ranks.replica()[0] as u64) << 32
}

/// Returns the options of the model.
fn model_options(settings: &Settings, place: Place) -> GptOptions {
    let plain = TransformerLayerOptions {
        hidden_size: settings.hidden,
        ffn_hidden_size: settings.hidden.saturating_mul(4),
        attention: AttentionOptions {
            num_attention_heads: settings.heads,
            max_seq_length: settings.seq,
            // Without the options, the recipe decides.
            fp8_dpa: settings.fp8_attention.then_some(true),
            fp8_mha: settings.fp8_mha.then_some(true),
            attention_dropout: settings.dropout,
            ..Default::default()
        },
        hidden_dropout: settings.dropout,
        recompute: place.recompute,
        ..Default::default()
    };
    let layer = match settings.model {
        ModelName::Gpt => plain,
        // SwiGLU has three matrices: with two thirds of the width they have as many weights.
        ModelName::Llama => TransformerLayerOptions {
            activation: Activation::Swiglu,
            norm: NormOptions { normalization: Norm::RmsNorm, ..Default::default() },
            ffn_hidden_size: (settings.hidden * 8 / 3).next_multiple_of(16),
            bias: false,
            ..plain
        },
    };
    GptOptions {
        vocab_size: 256,
        num_layers: settings.layers,
        layer,
        embedding_dropout: settings.dropout,
        ..Default::default()
    }
}

/// Measurements that separate this training's memory from that of other trainings on the device. Theirs does not change in
/// the meantime.
#[derive(Debug)]
struct MemoryOfTraining {
    /// The memory that the session took when it was created.
    created: MemoryUse,
    /// The memory in use before the first step.
    start: Option<MemoryUse>,
}

/// `a − b`, and 0 where b is larger.
fn minus(a: MemoryUse, b: MemoryUse) -> MemoryUse {
    MemoryUse {
        parameters: a.parameters.saturating_sub(b.parameters),
        gradients: a.gradients.saturating_sub(b.gradients),
        optimizer: a.optimizer.saturating_sub(b.optimizer),
        saved: a.saved.saturating_sub(b.saved),
        temporary: a.temporary.saturating_sub(b.temporary),
    }
}

/// A step as a graph, with the tensors that it reads and writes.
#[derive(Debug)]
struct Recorded {
    graph: Graph,
    ids: Tensor,
    targets: Tensor,
    results: [Tensor; 2],
}

/// Steps before one is recorded. They compile kernels, allocate state and calibrate scales.
const EAGER_STEPS: u32 = 2;

/// Advice is about this many of the last observed steps.
const TRACED: usize = 100;

impl Session {
    fn new(settings: &Settings, place: Place, ranks: &Ranks, run: Run) -> Result<Self> {
        let device = ranks.device(place.device)?;
        let mut options = model_options(settings, place);
        options.layer.tensor_parallel = ranks.tensor_parallel()?;
        // What Hugging Face has no family for is saved without.
        let hf_config = Config::from_gpt_options(&options).ok().map(|config| config.metadata());
        let before = device.memory_report().now;
        // Batches are drawn from the other streams.
        let mut rng = batches::stream(settings.seed, 0);
        let mut model = Gpt::new("gpt", &options, &device, &mut rng)?;
        let mut scaling = Scaling::new(&model, &device)?;
        if settings.dropout > 0.0 {
            scaling.set_dropout_seed(dropout_seed(settings, ranks))?;
        }
        let (mut normalizer, mut gradients) = (None, None);
        if let Some(mesh) = ranks.mesh() {
            scaling.set_group(mesh.amax_group());
            normalizer = Some((settings.batch * settings.seq) as f32);
            gradients = Some(Gradients::new(&model, mesh.dp().clone(), GradientsOptions::default())?);
        }
        let compute_dtype = match settings.dtype {
            Dtype::F32 => None,
            Dtype::Bf16 => Some(DType::BF16),
            Dtype::F16 => Some(DType::F16),
        };
        let enabled = settings.dtype == Dtype::F16;
        let scaler = LossScaler::new(LossScalerOptions { enabled, ..Default::default() }, &device)?;
        let mut optimizer = AdamW::new(AdamWOptions::default())?;
        optimizer.set_loss_scaler(&scaler)?;
        let scale = scaler.state()?;
        let autocast = AutocastOptions { enabled: run == Run::Fp8, compute_dtype, ..Default::default() };
        let recipe = recipe(settings)?;
        let explained = scaling.explain(&recipe)?; // a pattern without slots is an error now, not in the first step
        if run == Run::Fp8 && settings.fp8_weights {
            optimizer.quantize_weights(&mut model, &recipe)?;
        }
        let blocks = || explained.layers.iter().filter(|layer| layer.path.contains(".blocks."));
        let fp8_gemms = blocks().map(|layer| layer.gemms.count()).sum();
        let emulated = counts(blocks().flat_map(|layer| &layer.emulated).map(|(_, emulation)| *emulation));
        let mut slots = explained.layers.iter().flat_map(|layer| &layer.slots);
        let has_nvfp4 = slots.any(|slot| slot.encoding == Some(Encoding::E2M1));
        let attention = attention(&explained);
        let memory = MemoryOfTraining { created: minus(device.memory_report().now, before), start: None };
        let graph = place.graph;
        let (eager_steps, recorded, resume_note) = (0, None, None);
        Ok(Self {
            device,
            ranks: ranks.clone(),
            gradients,
            normalizer,
            model,
            optimizer,
            scaling,
            scaler,
            scale,
            recipe,
            fp8_gemms,
            emulated,
            attention,
            autocast,
            graph,
            eager_steps,
            recorded,
            resume_note,
            trace: SlotTrace::new(TRACED),
            observed: 0,
            measures_sqnr: place.sqnr,
            has_nvfp4,
            memory,
            hf_config,
        })
    }

    fn loaded(settings: &Settings, place: Place, ranks: &Ranks, run: Run, dir: &Path) -> Result<Self> {
        let mut session = Self::new(settings, place, ranks, run)?;
        session.scaling.prepare(&session.recipe, &session.autocast)?;
        let Self { model, optimizer, scaling, .. } = &mut session;
        let loaded = match ranks.mesh() {
            None => checkpoint::load(dir, model, optimizer, scaling)?,
            Some(mesh) => load_on(mesh, dir, model, optimizer, scaling)?,
        };
        session.scale = session.scaler.state()?;
        if settings.dropout > 0.0 && ranks.replica()[0] > 0 {
            // The checkpoint has the first replica's.
            let mut state = session.scaling.state()?;
            let seed = dropout_seed(settings, ranks);
            state.dropout = state.dropout.map(|dropout| DropoutProgress { seed, ..dropout });
            session.scaling.load_state(&state)?;
        }
        session.resume_note = (!loaded.scaling.is_plain()).then(|| loaded.scaling.to_string());
        Ok(session)
    }

    fn tensors(&self, batch: &Batch) -> Result<(Tensor, Tensor)> {
        let shape = [batch.rows, batch.len];
        let ids = Tensor::from_vec(batch.ids.clone(), shape, &self.device)?;
        Ok((ids, Tensor::from_vec(batch.targets.clone(), shape, &self.device)?))
    }

    fn train(&mut self, batch: &Batch, lr: f32, observe: Observe) -> Result<StepResult> {
        let batch = &self.ranks.part(batch);
        if self.memory.start.is_none() {
            self.device.reset_peak_memory();
            self.memory.start = Some(self.device.memory_report().now);
        }
        if let Some(recorded) = &mut self.recorded {
            recorded.ids.write(&batch.ids, "ids")?;
            recorded.targets.write(&batch.targets, "targets")?;
            self.optimizer.set_lr(lr)?;
            recorded.graph.replay()?;
            let results = recorded.results.clone();
            return self.read(&results);
        }
        // A recorded step is replayed as it is, so it counts at every step or never.
        self.scaling.set_counting(observe != Observe::Nothing || self.graph);
        self.scaling.set_measuring_sqnr(match observe {
            Observe::Nothing => false,
            Observe::Counts => self.measures_sqnr,
            // A step that measures cannot be recorded.
            Observe::Blocks => self.measures_sqnr || self.has_nvfp4 && !self.graph,
        });
        let (ids, targets) = self.tensors(batch)?;
        if !self.graph || self.eager_steps < EAGER_STEPS {
            self.eager_steps += 1;
            let results = self.queue(&ids, &targets, lr)?;
            if let Some(mesh) = self.ranks.mesh().filter(|_| self.eager_steps == 1) {
                // The first step has tuned the products.
                share_tuned_products(&**mesh.world(), &self.device, 0)?;
            }
            return self.read(&results);
        }
        let device = self.device.clone();
        let (graph, results) = device.capture(|| self.queue(&ids, &targets, lr))?;
        self.recorded = Some(Recorded { graph, ids, targets, results: results.clone() });
        self.read(&results)
    }

    /// Waits for the step and reads its results.
    fn read(&mut self, [loss, grad_norm]: &[Tensor; 2]) -> Result<StepResult> {
        let (loss, grad_norm) = (loss.item()?, grad_norm.item()?);
        if !self.scaler.options().enabled {
            return Ok(StepResult { loss, grad_norm, loss_scale: None, skipped: !grad_norm.is_finite() });
        }
        let before = std::mem::replace(&mut self.scale, self.scaler.state()?);
        let skipped = self.scale.skipped_steps > before.skipped_steps;
        Ok(StepResult { loss, grad_norm, loss_scale: Some(before.scale), skipped })
    }

    /// Queues a step and returns its loss and the norm of its gradients, without waiting for them.
    fn queue(&mut self, ids: &Tensor, targets: &Tensor, lr: f32) -> Result<[Tensor; 2]> {
        let mut cx = self.scaling.scope(&self.recipe, &self.autocast)?;
        let mean = CrossEntropyOptions { normalizer: self.normalizer, ..Default::default() };
        let (mut loss, saved) =
            self.model.loss_with_info(&mut cx, ids, targets, mean, &SequenceInfo::default())?;
        cx.commit()?;
        let mut cx = self.scaling.backward()?;
        if let Some(gradients) = &mut self.gradients {
            gradients.watch(&mut cx, &mut self.model)?;
        }
        self.model.loss_backward_scaled(&mut cx, saved, &self.scaler)?;
        cx.commit()?;
        if let (Some(gradients), Some(mesh)) = (&mut self.gradients, self.ranks.mesh()) {
            gradients.finish(&mut self.model)?;
            loss = sum(mesh, "loss", loss)?;
        }
        let grad_norm = self.scaler.clip_grad_norm(&mut self.model, MAX_GRAD_NORM)?;
        // The optimizer skips a step whose gradients have no finite norm.
        self.scaler.step_with_norm(&mut self.optimizer, &mut self.model, lr, &grad_norm)?;
        self.scaler.update()?;
        zero_grad(&mut self.model)?;
        Ok([loss, grad_norm])
    }

    fn loss(&mut self, batch: &Batch) -> Result<f32> {
        let Some(mesh) = self.ranks.mesh().cloned() else { return self.own_loss(batch) };
        let part = self.ranks.part(batch);
        let share = part.rows as f32 / batch.rows as f32;
        let own = if part.rows == 0 { 0.0 } else { self.own_loss(&part)? * share };
        Ok(sum(&mesh, "held-out loss", Tensor::scalar(own, &self.device)?)?.item()?)
    }

    /// Returns the mean loss of the rows of this replica.
    fn own_loss(&mut self, batch: &Batch) -> Result<f32> {
        let (ids, targets) = self.tensors(batch)?;
        let mut cx = self.scaling.eval_with_options(&self.recipe, &self.autocast)?;
        let (loss, _) = self.model.loss(&mut cx, &ids, &targets)?;
        Ok(loss.item()?)
    }

    /// Returns the tokens that continue `prompt`.
    fn generate(&mut self, prompt: &[u8], options: &GenerateOptions) -> Result<Vec<i32>> {
        let prompt: Vec<i32> = prompt.iter().copied().map(i32::from).collect();
        let mut cx = self.scaling.eval_with_options(&self.recipe, &self.autocast)?;
        let mut tokens = Vec::new();
        self.model.generate(&mut cx, &[prompt], options, |_, token| tokens.push(token))?;
        Ok(tokens)
    }
}

/// Returns the sum over the replicas.
fn sum(mesh: &Mesh, what: &str, own: Tensor) -> Result<Tensor> {
    match mesh.dp().world_size() {
        1 => Ok(own),
        _ => Ok(mesh.dp().all_reduce(what, &own, ReduceOp::Sum)?),
    }
}

/// Returns how often each value occurs, in the order of their first occurrences.
fn counts<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<(T, usize)> {
    let mut counts: Vec<(T, usize)> = Vec::new();
    for value in values {
        match counts.iter_mut().find(|(known, _)| *known == value) {
            Some((_, count)) => *count += 1,
            None => counts.push((value, 1)),
        }
    }
    counts
}

/// Returns the recipe of the settings. High precision has one, too, and does not use it.
fn recipe(settings: &Settings) -> Result<Recipe> {
    let fp8_format = match settings.format {
        FormatName::Hybrid => Format::Hybrid,
        FormatName::E4m3 => Format::E4M3,
    };
    Ok(match settings.recipe {
        RecipeName::Current => CurrentScaling { fp8_format, ..Default::default() }.into(),
        RecipeName::Delayed | RecipeName::None => {
            let (margin, amax_history_len) = (settings.margin, settings.history_len);
            DelayedScaling { margin, amax_history_len, fp8_format, ..Default::default() }.into()
        }
        RecipeName::Preset(name) => Recipe::from_name(name)?,
        RecipeName::File(_) => Recipe::from_toml(&settings.recipe_toml)?,
    })
}

/// Returns what of the blocks' attention runs in FP8: options or the recipe ask for it, and a tensor has one scale.
fn attention(explained: &Explanation) -> Attention {
    let mut found = Attention::default();
    for layer in &explained.layers {
        let has_gemms = layer.slots.iter().any(|slot| slot.role == SlotRole::Weight);
        for slot in layer.slots.iter().filter(|slot| slot.recipe.is_some() && !slot.stays_in_high_precision) {
            let exchanges = matches!(slot.role, SlotRole::Output | SlotRole::GradInput);
            found.in_fp8 |= exchanges || !has_gemms;
            found.exchanges_fp8 |= exchanges;
        }
    }
    found
}

/// The message of a library error, in terms of this program's options.
fn sentence(error: impl Into<Error>) -> String {
    const LESS: &str = "a smaller --hidden, --layers, --batch or --seq needs less";
    let error = error.into();
    match &error {
        Error::Kernels(KernelError::HostAllocation { bytes, .. }) => {
            format!("{bytes} bytes of host memory cannot be allocated: {LESS}")
        }
        Error::Kernels(KernelError::OutOfMemory { device, requested, free, total }) => {
            format!(
                "--device {device}: {requested} bytes cannot be allocated, {free} of {total} are free: {LESS}"
            )
        }
        Error::Kernels(error) => about_device(error),
        _ => error.to_string(),
    }
}

impl Trainer for Session {
    fn start(settings: &Settings, place: Place, ranks: &Ranks, run: Run) -> Result<Self, String> {
        Self::new(settings, place, ranks, run).map_err(sentence)
    }

    fn resume(
        settings: &Settings,
        place: Place,
        ranks: &Ranks,
        run: Run,
        dir: &Path,
    ) -> Result<Self, String> {
        Self::loaded(settings, place, ranks, run, dir).map_err(sentence)
    }

    fn resume_note(&self) -> Option<&str> {
        self.resume_note.as_deref()
    }

    fn metadata(dir: &Path) -> Result<Metadata, String> {
        checkpoint::metadata(dir).map_err(sentence)
    }

    fn save(&self, dir: &Path, metadata: &Metadata) -> Result<(), String> {
        if let Err(error) = checkpoint::expect_finite(&self.model, &self.optimizer) {
            let old = if checkpoint::path(dir).exists() { "; the checkpoint there is untouched" } else { "" };
            return Err(format!("nothing was saved{old}: {error}"));
        }
        let mut metadata = metadata.clone();
        metadata.extend(self.hf_config.clone());
        let Self { model, optimizer, scaling, .. } = self;
        match self.ranks.mesh() {
            None => checkpoint::save(dir, model, optimizer, scaling, &metadata).map_err(sentence),
            Some(mesh) => save_on(mesh, dir, model, optimizer, scaling, &metadata).map_err(sentence),
        }
    }

    fn step(&mut self, batch: &Batch, lr: f32, observe: Observe) -> Result<StepResult, String> {
        self.train(batch, lr, observe).map_err(sentence)
    }

    fn evaluate(&mut self, batch: &Batch) -> Result<f32, String> {
        self.loss(batch).map_err(sentence)
    }

    fn continue_text(&mut self, prompt: &[u8], options: &GenerateOptions) -> Result<Vec<u8>, String> {
        let bytes = self.generate(prompt, options).map_err(sentence)?;
        // The vocabulary has 256 tokens.
        Ok(bytes.into_iter().map(|token| token as u8).collect())
    }

    fn slots(&mut self) -> Result<Vec<SlotState>, String> {
        self.observed += 1;
        self.trace.record(self.observed, &self.scaling).map_err(sentence)?;
        slot_states(&self.scaling).map_err(sentence)
    }

    fn advice(&self) -> Vec<String> {
        self.trace.advice().iter().map(ToString::to_string).collect()
    }

    fn device(&self) -> String {
        match self.device.description() {
            cpu if cpu == "CPU" => self.device.to_string(),
            name => format!("{} ({name})", self.device),
        }
    }

    fn parameters(&self) -> usize {
        parameters(&self.model).iter().map(|parameter| parameter.global_shape().numel()).sum()
    }

    fn memory(&self) -> Option<MemoryUse> {
        let MemoryOfTraining { created, start } = self.memory;
        let grown = minus(self.device.memory_report().peak, start?);
        Some(MemoryUse {
            parameters: created.parameters + grown.parameters,
            gradients: created.gradients + grown.gradients,
            optimizer: created.optimizer + grown.optimizer,
            saved: grown.saved,
            temporary: created.temporary + grown.temporary,
        })
    }

    fn fp8_gemms_per_step(&self) -> usize {
        self.fp8_gemms
    }

    fn attention(&self) -> Attention {
        self.attention
    }

    fn gathered_in_high_precision(&self) -> Vec<String> {
        gathers::in_high_precision(&self.model)
    }

    fn emulated_gemms_per_step(&self) -> Vec<(String, usize)> {
        self.emulated.iter().map(|(emulation, count)| (emulation.to_string(), *count)).collect()
    }
}

#[cfg(test)]
mod tests;
