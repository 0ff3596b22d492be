//! The memory that a training will take, from headers alone.

use super::TrainerOptions;
use super::names::Names;
use crate::config::{Config, WeightScales};
use crate::family::TensorSpec;
use crate::{Adapter, Error, Folder, Fp8Weights, LoadOptions, Result};
use fp8_kernels::{DType, MemoryUse};
use fp8_nn::{RecomputeLevel, TensorParallelOptions, matches_name};
use fp8_recipe::Format;

/// The parameters and the memory of a training, before it begins.
///
/// ```
/// use fp8_hf::{self as hf, Adapter, Config, Folder, LoraTargets, TrainPlan, TrainerOptions};
/// use fp8_nn::prelude::*;
/// # let place = std::env::temp_dir().join(format!("fp8-train-plan-{}", std::process::id()));
/// # std::fs::create_dir(&place)?;
/// # let config = Config::from_json(
/// #     r#"{"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
/// #         "num_attention_heads": 2, "max_position_embeddings": 8}"#,
/// # )?;
/// # let model = Gpt::new("model", &config.gpt_options(), &Device::cpu(), &mut fp8_nn::rand::rng())?;
/// # hf::save_model(&place.join("model"), &config, &model, None)?;
/// let folder = Folder::open(&place.join("model"))?;
/// let adapter = Adapter::new(&folder.config, &LoraTargets { rank: 2, ..Default::default() }, 1)?;
/// let options = TrainerOptions { seq: 8, ..Default::default() };
/// let (whole, lora) = (TrainPlan::new(&folder, None, &options)?, TrainPlan::new(&folder, Some(&adapter), &options)?);
/// assert_eq!((whole.trained, whole.frozen), (824, 0));
/// assert_eq!((lora.trained, lora.frozen), (adapter.num_parameters(), 824));
/// assert_eq!(lora.memory.optimizer, 8 * lora.trained); // two moments in f32
/// # std::fs::remove_dir_all(place)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct TrainPlan {
    /// The values of the whole model that are trained.
    pub trained: usize,
    /// The values that are not.
    pub frozen: usize,
    /// The bytes of each rank's tensors when they are most. Parameters, gradients and optimizer are exact but for small tensors; what
    /// backward needs and what is temporary is estimated from the sizes of the model. With tensor parallelism, a rank has 1 / n of all
    /// matrices (as if the vocabulary could be shared evenly), all of the vectors and of adapters, and 1 / n of the activations inside
    /// attention and MLPs and of the logits; with sequence parallelism, of the others, too.
    pub memory: MemoryUse,
}

impl TrainPlan {
    /// Plans the training that [`Trainer::new`](crate::Trainer::new) would prepare.
    ///
    /// # Errors
    /// A sequence that is longer than the model takes; a pattern that fits no tensor, or some of those that the model holds as one;
    /// patterns that leave nothing to train.
    pub fn new(folder: &Folder, adapter: Option<&Adapter>, options: &TrainerOptions) -> Result<Self> {
        Self::with_tensor_parallel(folder, adapter, options, 1, &TensorParallelOptions::default())
    }

    /// Plans the training of a rank whose layers `ranks` ranks share. Whether they can share them is checked when the model is made.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    ///
    /// ```
    /// # use fp8_hf::{self as hf, Config, Folder, TrainPlan, TrainerOptions};
    /// # use fp8_nn::prelude::*;
    /// # let place = std::env::temp_dir().join(format!("fp8-train-plan-tp-{}", std::process::id()));
    /// # std::fs::create_dir(&place)?;
    /// # let config = Config::from_json(
    /// #     r#"{"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
    /// #         "num_attention_heads": 2, "max_position_embeddings": 8}"#,
    /// # )?;
    /// # let model = Gpt::new("model", &config.gpt_options(), &Device::cpu(), &mut fp8_nn::rand::rng())?;
    /// # hf::save_model(&place.join("model"), &config, &model, None)?;
    /// let folder = Folder::open(&place.join("model"))?;
    /// let options = TrainerOptions { seq: 8, ..Default::default() };
    /// let parallel = fp8_nn::TensorParallelOptions::default();
    /// let half = TrainPlan::with_tensor_parallel(&folder, None, &options, 2, &parallel)?;
    /// assert_eq!(half.trained, 824); // 800 values in matrices, and 24 in norms
    /// assert_eq!(half.memory.gradients, 4 * (400 + 24));
    /// # std::fs::remove_dir_all(place)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn with_tensor_parallel(
        folder: &Folder,
        adapter: Option<&Adapter>,
        options: &TrainerOptions,
        ranks: usize,
        parallel: &TensorParallelOptions,
    ) -> Result<Self> {
        let config = &folder.config;
        let refused =
            |option, value, remedy| Err(Error::Option { part: "Trainer".to_owned(), option, value, remedy });
        let longest = config.longest_sequence();
        if options.seq > longest {
            let remedy = format!("expected at most {longest}, the longest sequence of the model");
            return refused("seq", options.seq.to_string(), remedy);
        }
        let modules: Vec<String> =
            adapter.iter().flat_map(|adapter| adapter.modules().map(str::to_owned)).collect();
        Names::new(config, &LoadOptions::default().path, &modules).check(options)?;
        let is_frozen = |spec: &TensorSpec| {
            adapter.is_some() || options.frozen.iter().any(|pattern| matches_name(pattern, &spec.name))
        };
        let whole = |spec: &TensorSpec| spec.shape.iter().product::<usize>();
        // Those of a rank.
        let positions = config.parameters_by_name().remove("position.weight");
        let is_position =
            |spec: &TensorSpec| positions.iter().any(|positions| positions.tensors.contains(&spec.name));
        let is_cut = |spec: &TensorSpec| spec.shape.len() == 2 && !is_position(spec);
        let values = |spec: &TensorSpec| whole(spec).div_ceil(if is_cut(spec) { ranks.max(1) } else { 1 });
        let specs = config.tensors();
        let (frozen, trained): (Vec<&TensorSpec>, Vec<&TensorSpec>) =
            specs.iter().partition(|spec| is_frozen(spec));
        let count = |specs: &[&TensorSpec]| specs.iter().map(|spec| values(spec)).sum::<usize>();
        let adapted = adapter.map_or(0, Adapter::num_parameters);
        let trained_values = count(&trained) + adapted;
        let all = |specs: &[&TensorSpec]| specs.iter().map(|spec| whole(spec)).sum::<usize>();
        if trained_values == 0 {
            return refused("frozen", format!("{:?}", options.frozen), "nothing is left to train".to_owned());
        }
        let size = options.params_dtype.size();
        let is_fp8 = !options.recipe.is_off();
        let recipe_codes = Codes { has_four_bits: options.recipe.format() == Format::E2M1 };
        let is_kept = |spec: &TensorSpec| {
            options.fp8 == Fp8Weights::Keep && folder.is_quantized(folder.stored(&spec.name))
        };
        let keeps_codes =
            |spec: &TensorSpec| adapter.is_some() && spec.kind.is_linear() && (is_fp8 || is_kept(spec));
        let own = config.quantization.as_ref();
        let own_codes =
            Codes { has_four_bits: own.is_some_and(|own| own.weights == WeightScales::TensorGroup) };
        let base_codes = |spec: &TensorSpec| if is_kept(spec) { own_codes } else { recipe_codes };
        let base_size = if adapter.is_some() { folder.main_dtype().size() } else { size };
        let of_frozen: usize = frozen
            .iter()
            // Ranks have the values of frozen weights beside their codes.
            .map(|spec| match (keeps_codes(spec), ranks > 1) {
                (true, false) => base_codes(spec).bytes(values(spec)),
                (true, true) => values(spec) * base_size + base_codes(spec).bytes(values(spec)),
                (false, _) => values(spec) * base_size,
            })
            .sum();
        let stored = |spec: &&&TensorSpec| spec.kind.is_linear() && is_fp8;
        let quantized: usize = trained.iter().filter(stored).map(|spec| values(spec)).sum();
        let mut parameters = of_frozen + adapted * size;
        // An optimizer has f32 values of parameters of 16 bits or less.
        let mut copies = if size < 4 && options.optimizer.has_main_params() { 4 * trained_values } else { 0 };
        parameters += if options.fp8_weights && adapter.is_none() {
            copies += if size < 4 { 0 } else { 4 * quantized };
            count(&trained) * size - quantized * size + 2 * recipe_codes.bytes(quantized)
        } else {
            count(&trained) * size + recipe_codes.bytes(quantized)
        };
        // Scales of FP8 moments are 1 in 32 of their codes.
        let moments = options.optimizer.moment_bytes();
        let tokens = options.seq * options.micro_batch;
        let of_tokens = if parallel.sequence_parallel { ranks.max(1) } else { 1 };
        let activations = Activations {
            config,
            options,
            codes: is_fp8.then_some(recipe_codes),
            has_adapter: adapter.is_some(),
            ranks: ranks.max(1),
            of_tokens,
        };
        let memory = MemoryUse {
            parameters,
            gradients: 4 * trained_values,
            optimizer: moments * trained_values + copies,
            saved: tokens * activations.saved(),
            temporary: tokens * activations.temporary(),
        };
        Ok(Self { trained: all(&trained) + adapted, frozen: all(&frozen), memory })
    }
}

/// Codes of a byte, or of four bits with a scale for each 16.
#[derive(Clone, Copy)]
struct Codes {
    has_four_bits: bool,
}

impl Codes {
    fn bytes(self, values: usize) -> usize {
        if self.has_four_bits { values.div_ceil(2) + values.div_ceil(16) } else { values }
    }
}

/// The bytes of activations for each token.
struct Activations<'a> {
    config: &'a Config,
    options: &'a TrainerOptions,
    /// Those of the inputs of GEMMs; `None` in high precision.
    codes: Option<Codes>,
    has_adapter: bool,
    /// The ranks that share features between the two Linears of attention and MLPs, and the logits.
    ranks: usize,
    /// Those that share tokens elsewhere.
    of_tokens: usize,
}

impl Activations<'_> {
    /// The bytes that backward needs of the blocks and the head.
    fn saved(&self) -> usize {
        let config = self.config;
        let size = self.options.compute_dtype.size();
        let share = |features: usize| features.div_ceil(self.ranks);
        let (hidden, ffn) = (config.hidden_size.div_ceil(self.of_tokens), share(config.intermediate_size));
        let queries = share(config.num_attention_heads * config.head_dim);
        let keys = share(config.num_key_value_heads * config.head_dim);
        // Inputs of GEMMs: codes under a recipe, which an adapter does without.
        let input = |features: usize| match (self.codes, self.has_adapter) {
            (None, _) => features * size,
            (Some(codes), false) => codes.bytes(features),
            (Some(codes), true) => codes.bytes(features) + features * size,
        };
        let attention = (queries + 2 * keys) * size + queries * size;
        let of_fc1 = if config.family.has_learned_positions { ffn } else { 2 * ffn };
        let level = self.options.recompute;
        let block = if level == RecomputeLevel::Block {
            hidden * size
        } else {
            let norms = if level >= RecomputeLevel::Norm { 0 } else { 2 * input(hidden) };
            let activation = if level >= RecomputeLevel::Activation { 0 } else { input(ffn) };
            let of_attention =
                if level >= RecomputeLevel::Attention { input(hidden) } else { attention + input(queries) };
            let of_mlp = if level >= RecomputeLevel::Mlp { input(hidden) } else { of_fc1 * size };
            2 * hidden * size + norms + activation + of_attention + of_mlp
        };
        config.num_hidden_layers * block + 2 * hidden * size + share(config.vocab_size) * self.logit()
    }

    /// The gradient of the logits, and the largest results of a block in backward.
    fn temporary(&self) -> usize {
        let config = self.config;
        let size = self.options.compute_dtype.size();
        let share = |features: usize| features.div_ceil(self.ranks);
        (share(config.vocab_size) * self.logit()).max(4 * share(config.intermediate_size) * size)
    }

    fn logit(&self) -> usize {
        if self.options.compute_dtype == DType::F32 { 4 } else { self.options.compute_dtype.size() }
    }
}
