//! Model, adapter and data of a fine-tuning, opened and checked before anything is written.

use crate::failure::{Failure, about_device};
use crate::fine_tune::check;
use crate::fine_tune::line::CONFIG;
use crate::fine_tune::options::{FineTune, Group, OptimizerName, ValidationName};
use crate::interrupt;
use crate::model::open_adapter;
use crate::progress::spin;
use crate::train::options::{Dtype, RecipeName, ScheduleName};
use crate::train::ranks::Ranks;
use fp8_hf::data::{DataOptions, Dataset, Pack, Validation};
use fp8_hf::{
    Adapter, Folder, Fp8Weights, LoraTargets, ScheduleKind, Tokenizer, TrainPlan, TrainRunOptions,
    TrainerOptions,
};
use fp8_nn::prelude::*;
use fp8_nn::{AnyOptimizerOptions, TensorParallelOptions};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// By default, the tokens that are computed at once.
const TOKENS: usize = 4096;
/// By default, the longest sequence.
const SEQ: usize = 2048;
/// The folder beside a run that keeps encoded texts.
const CACHE: &str = ".fp8-tokens";

/// Without a model, `fp8 train` is the small run.
const WITHOUT_MODEL: &str = "no model: expected a Hugging Face folder behind fp8 train, as in fp8 train MODEL --data FILE --out RUN; the \
                             small run, which needs none, has --text in place of --data, and --report-dir and --save in place of --out";

/// The options, and this process among those that train together.
#[derive(Debug)]
pub(super) struct Setup {
    pub(super) options: FineTune,
    pub(super) ranks: Ranks,
    out: PathBuf,
    base: PathBuf,
}

/// All that a training needs.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) options: FineTune,
    pub(super) ranks: Ranks,
    pub(super) out: PathBuf,
    /// The options as `config.toml` stores them.
    pub(super) config: String,
    pub(super) folder: Folder,
    pub(super) tokenizer: Tokenizer,
    pub(super) adapter: Option<Adapter>,
    pub(super) data: Dataset,
    pub(super) trainer: TrainerOptions,
    pub(super) run: TrainRunOptions,
    pub(super) plan: TrainPlan,
    pub(super) device: Device,
}

impl Setup {
    /// Checks what needs no file, and joins the processes that train together.
    pub(super) fn new(options: FineTune) -> Result<Self, Failure> {
        let Some(base) = options.base.clone() else {
            return Err(Failure::input(WITHOUT_MODEL));
        };
        if options.data.is_empty() {
            return Err(Failure::input("no data: give texts, JSON lines or tokens with --data FILE"));
        }
        let out = match (&options.out, &options.resume) {
            (Some(out), None) => out.clone(),
            (None, Some(run)) => run.clone(),
            (Some(_), Some(_)) => {
                let text = "--out and --resume exclude each other: a resumed run goes on in its own folder";
                return Err(Failure::input(text));
            }
            (None, None) if options.dry_run => PathBuf::from("."),
            (None, None) => {
                return Err(Failure::input("no place for the result: name a new folder with --out RUN"));
            }
        };
        check::options(&options)?;
        check::places(&options, &out)?;
        let ranks = Ranks::join(&options.layout, options.device)?;
        Ok(Self { options, ranks, out, base })
    }

    /// Opens the model, the adapter and the data.
    pub(super) fn open(mut self) -> Result<Opened, Failure> {
        let folder = Folder::open(&self.base)?;
        check::export(&self.options, &folder)?;
        let recipe = self.recipe(&folder)?;
        let (adapter, kept) = self.adapter(&folder)?;
        let longest = folder.config.longest_sequence();
        let seq = self.options.seq.unwrap_or(SEQ.min(longest));
        if seq > longest {
            return Err(Failure::input(format!(
                "--seq {seq}: expected at most {longest}, the longest sequence of the model"
            )));
        }
        let trainer = self.trainer_options(seq, recipe, kept)?;
        let run = self.run_options(adapter.is_some());
        let (tp, sequence_parallel) = self.ranks.sharing();
        let parallel = TensorParallelOptions { sequence_parallel, ..Default::default() };
        let plan = TrainPlan::with_tensor_parallel(&folder, adapter.as_ref(), &trainer, tp, &parallel)?;
        let device = self.ranks.device(self.options.device).map_err(|error| match error {
            fp8_nn::Error::Kernels(error) => Failure::input(about_device(&error)),
            other => Failure::input(other.to_string()),
        })?;
        trainer.check(&device)?;
        run.check()?;
        let tokenizer = Tokenizer::open(folder.path(), folder.config.vocab_size)?;
        let options = self.data_options(seq);
        let data = spin("reading the data", || {
            if let Some(cache) = &options.cache {
                interrupt::note_folder(cache);
            }
            Ok(Dataset::open(&self.options.data, &tokenizer, &folder, &options)?)
        })?;
        let config = self.config()?;
        self.agree(&data, &config)?;
        self.options.quiet |= !self.ranks.is_first();
        let Self { options, ranks, out, .. } = self;
        Ok(Opened {
            options,
            ranks,
            out,
            config,
            folder,
            tokenizer,
            adapter,
            data,
            trainer,
            run,
            plan,
            device,
        })
    }

    /// Returns the recipe, or that of an FP8 model's files if none is named.
    fn recipe(&self, folder: &Folder) -> Result<Recipe, Failure> {
        let of_name = |name: &str| Recipe::from_name(name).map_err(|error| Failure::input(error.to_string()));
        match &self.options.recipe {
            Some(RecipeName::None) => Ok(Recipe::off()),
            Some(RecipeName::File(path)) => {
                let refused =
                    |problem: String| Failure::input(format!("--recipe {}: {problem}", path.display()));
                if path.exists() && !path.is_file() {
                    return Err(refused("not a file: expected a recipe in TOML".into()));
                }
                let text = fs::read_to_string(path);
                let text = text.map_err(|error| refused(format!("{error}: expected a recipe in TOML")))?;
                Recipe::from_toml(&text).map_err(|error| refused(error.to_string()))
            }
            Some(name) => of_name(&name.to_string()),
            None if self.keeps_codes(folder) => Ok(folder.recipe()?),
            None => of_name("current"),
        }
    }

    /// Whether an adapter is trained beside the codes of an FP8 model's files. They are those of whole weights.
    fn keeps_codes(&self, folder: &Folder) -> bool {
        let has_adapter = self.options.lora.is_some() || self.options.adapter.is_some();
        let is_whole = self.ranks.sharing().0 == 1;
        has_adapter && is_whole && self.options.recipe.is_none() && folder.config.quantization.is_some()
    }

    fn adapter(&self, folder: &Folder) -> Result<(Option<Adapter>, Fp8Weights), Failure> {
        let options = &self.options;
        let kept = if self.keeps_codes(folder) { Fp8Weights::Keep } else { Fp8Weights::Dequantize };
        if let Some(path) = &options.adapter {
            return Ok((Some(open_adapter("--adapter ", path, folder)?), kept));
        }
        let Some(rank) = options.lora else { return Ok((None, Fp8Weights::Dequantize)) };
        let targets = LoraTargets {
            rank,
            alpha: options.lora_alpha,
            use_rslora: options.rslora,
            target_modules: options.lora_targets.clone(),
            exclude_modules: options.lora_exclude.clone(),
            layers_to_transform: options.lora_layers.clone(),
            rank_pattern: options.rank_pattern.iter().cloned().collect(),
            alpha_pattern: options.alpha_pattern.iter().cloned().collect(),
        };
        Ok((Some(Adapter::new(&folder.config, &targets, options.seed)?), kept))
    }

    fn trainer_options(
        &self,
        seq: usize,
        recipe: Recipe,
        fp8: Fp8Weights,
    ) -> Result<TrainerOptions, Failure> {
        let options = &self.options;
        let of_rank = options.batch.div_ceil(self.ranks.replica()[1]);
        let micro_batch = match options.accumulate {
            // A run may go on with more processes.
            Some(accumulate) if accumulate > of_rank && options.resume.is_none() => {
                return Err(Failure::input(format!(
                    "--accumulate {accumulate}: each replica has {of_rank} of the --batch {} sequences of a step: expected at most \
                     {of_rank}",
                    options.batch
                )));
            }
            Some(accumulate) => of_rank.div_ceil(accumulate.min(of_rank)),
            None => (TOKENS / seq).clamp(1, of_rank),
        };
        let has_adapter = options.lora.is_some() || options.adapter.is_some();
        Ok(TrainerOptions {
            recipe,
            fp8,
            compute_dtype: dtype(options.dtype),
            params_dtype: if has_adapter { options.lora_dtype } else { options.params },
            optimizer: optimizer(options),
            max_grad_norm: (options.clip > 0.0).then_some(options.clip),
            frozen: options.freeze.clone(),
            fp8_weights: options.fp8_weights,
            recompute: options.recompute,
            seq,
            micro_batch,
            graph: options.graph,
        })
    }

    fn run_options(&self, has_adapter: bool) -> TrainRunOptions {
        let options = &self.options;
        let lr = options.lr.unwrap_or(if has_adapter { 2e-4 } else { 1e-5 });
        TrainRunOptions {
            batch: options.batch,
            epochs: options.epochs as u64,
            steps: options.steps.map(|steps| steps as u64),
            lr,
            schedule: match options.schedule {
                ScheduleName::Constant => ScheduleKind::Constant,
                ScheduleName::Linear => ScheduleKind::Linear,
                ScheduleName::Cosine => ScheduleKind::Cosine,
                ScheduleName::Wsd => ScheduleKind::WarmupStableDecay,
            },
            warmup: options.warmup.0,
            min_ratio: options.min_lr,
            seed: options.seed,
            eval_every: options.eval_every.map(|every| every as u64),
            eval_sequences: options.eval_sequences,
            checkpoint_every: options.checkpoint_every as u64,
            checkpoint_after: Duration::try_from_secs_f64(options.checkpoint_minutes * 60.0)
                .unwrap_or(Duration::MAX),
            keep: options.keep,
            most_non_finite: options.skip_non_finite as u64,
            observe_every: None,
        }
    }

    fn data_options(&self, seq: usize) -> DataOptions {
        let options = &self.options;
        let parent = self.out.parent().filter(|parent| !parent.as_os_str().is_empty());
        DataOptions {
            seq,
            loss: options.loss,
            pack: if options.no_pack { Some(Pack::None) } else { options.pack },
            cross_documents: options.cross_documents,
            too_long: options.too_long,
            validation: match &options.validation {
                None => Validation::None,
                Some(ValidationName::Share(share)) => Validation::Fraction(*share),
                Some(ValidationName::File(file)) => Validation::Files(vec![file.clone()]),
            },
            seed: options.seed,
            cache: (!options.dry_run).then(|| parent.unwrap_or(Path::new(".")).join(CACHE)),
        }
    }

    fn config(&self) -> Result<String, Failure> {
        let values = self.options.values().into_iter().map(|(name, value)| (name.to_owned(), value));
        let table: toml::Table = values.collect();
        toml::to_string(&table).map_err(|error| Failure::input(format!("{CONFIG}: {error}")))
    }

    /// Compares what all processes must have been given alike.
    fn agree(&self, data: &Dataset, config: &str) -> Result<(), Failure> {
        let mut same: Vec<String> = config.lines().map(|line| format!("--{line}")).collect();
        same.retain(|line| !line.starts_with("--device") && !line.starts_with("--threads"));
        same.push(format!("data {}", data.train.digest()));
        self.ranks.agree(same)
    }
}

fn dtype(dtype: Dtype) -> DType {
    match dtype {
        Dtype::F32 => DType::F32,
        Dtype::Bf16 => DType::BF16,
        Dtype::F16 => DType::F16,
    }
}

/// Returns the optimizer with its options.
fn optimizer(options: &FineTune) -> AnyOptimizerOptions {
    let group = |group: &Group| ParameterGroup {
        pattern: group.pattern.clone(),
        lr_factor: group.lr,
        weight_decay: group.decay,
    };
    let groups: Vec<ParameterGroup> = options.group.iter().map(group).collect();
    let FineTune { beta1, beta2, eps, weight_decay, moments, stochastic_rounding, .. } = *options;
    let main_params = !stochastic_rounding;
    match options.optimizer {
        OptimizerName::AdamW => AnyOptimizerOptions::AdamW(AdamWOptions {
            beta1,
            beta2: beta2.unwrap_or(0.95),
            eps,
            weight_decay,
            main_params,
            groups,
            moments,
            stochastic_rounding,
        }),
        OptimizerName::Lion => AnyOptimizerOptions::Lion(LionOptions {
            beta1,
            beta2: beta2.unwrap_or(0.99),
            weight_decay,
            main_params,
            groups,
            moments,
            stochastic_rounding,
        }),
        OptimizerName::Sgd => AnyOptimizerOptions::Sgd(SgdOptions {
            momentum: beta1,
            weight_decay,
            main_params,
            groups,
            moments,
            stochastic_rounding,
            ..Default::default()
        }),
    }
}
