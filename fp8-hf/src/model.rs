//! A folder as a model: which parameter holds which tensors.

use super::keep::{Fp8Weights, Keeper, expect_keepable};
use super::parameter_source::ParameterSource;
use super::part::Part;
use super::save_model::TABLE;
use super::{Config, Folder};
use crate::{Error, Result};
use fp8_kernels::{DType, Device, Tensor, ops};
use fp8_nn::{
    AttentionOptions, Gpt, GptOptions, InitOptions, NormOptions, Parameter, RecomputeLevel, TensorParallel,
    TransformerLayerOptions, frozen, parameters_mut,
};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;
use std::ops::Range;

/// Options of [`Folder::load`], which makes a model.
///
/// ```
/// use fp8_hf::LoadOptions;
/// use fp8_nn::prelude::DType;
/// let to_train = LoadOptions { trainable: true, params_dtype: DType::BF16, ..Default::default() };
/// assert_eq!(to_train.path, "model");
/// ```
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// The path of the model, with which the names of its parameters begin. Default: `"model"`.
    pub path: String,
    /// The dtype of the parameters, whatever that of the files: f32, bf16 or f16. Default: [`DType::F32`].
    pub params_dtype: DType,
    /// Whether the model will be trained. If not, its parameters are frozen, and no gradients are allocated. Default: false.
    pub trainable: bool,
    /// The longest sequence that the model takes. Default: `None`, the configuration's `max_position_embeddings`.
    ///
    /// It may be greater in a model with rotary positions, to which transformers sets no bound:
    /// [`Config::longest_sequence`] is the length that the model was made for. Learned positions end with the table.
    pub max_seq_length: Option<usize>,
    /// Whether FP8 weights are dequantized, or kept as codes for inference. Default: [`Fp8Weights::Dequantize`].
    pub fp8: Fp8Weights,
    /// The part of each block that backward recomputes. Default: [`RecomputeLevel::None`].
    pub recompute: RecomputeLevel,
    /// The ranks that share the layers of the model, of which each reads its part. Rows of a tensor are read alone; for columns, whole
    /// rows are read, a few at a time. FP8 weights are dequantized. Default: `None`, whole layers.
    pub tensor_parallel: Option<TensorParallel>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            path: "model".to_owned(),
            params_dtype: DType::F32,
            trainable: false,
            max_seq_length: None,
            fp8: Fp8Weights::Dequantize,
            recompute: RecomputeLevel::None,
            tensor_parallel: None,
        }
    }
}

/// Parameters of a model and their tensors. `{}` is the number of the layer.
type Sources = &'static [(&'static str, &'static [&'static str])];

const LLAMA: Sources = &[
    ("embedding.weight", &["model.embed_tokens.weight"]),
    ("blocks.{}.attention.norm.weight", &["model.layers.{}.input_layernorm.weight"]),
    (
        "blocks.{}.attention.qkv.weight",
        &[
            "model.layers.{}.self_attn.q_proj.weight",
            "model.layers.{}.self_attn.k_proj.weight",
            "model.layers.{}.self_attn.v_proj.weight",
        ],
    ),
    (
        "blocks.{}.attention.qkv.bias",
        &[
            "model.layers.{}.self_attn.q_proj.bias",
            "model.layers.{}.self_attn.k_proj.bias",
            "model.layers.{}.self_attn.v_proj.bias",
        ],
    ),
    ("blocks.{}.attention.q_norm.weight", &["model.layers.{}.self_attn.q_norm.weight"]),
    ("blocks.{}.attention.k_norm.weight", &["model.layers.{}.self_attn.k_norm.weight"]),
    ("blocks.{}.attention.proj.weight", &["model.layers.{}.self_attn.o_proj.weight"]),
    ("blocks.{}.mlp.norm.weight", &["model.layers.{}.post_attention_layernorm.weight"]),
    (
        "blocks.{}.mlp.fc1.weight",
        &["model.layers.{}.mlp.gate_proj.weight", "model.layers.{}.mlp.up_proj.weight"],
    ),
    ("blocks.{}.mlp.fc2.weight", &["model.layers.{}.mlp.down_proj.weight"]),
    ("norm.weight", &["model.norm.weight"]),
    ("head.weight", &["lm_head.weight"]),
];

const GPT2: Sources = &[
    ("embedding.weight", &["transformer.wte.weight"]),
    ("position.weight", &["transformer.wpe.weight"]),
    ("blocks.{}.attention.norm.weight", &["transformer.h.{}.ln_1.weight"]),
    ("blocks.{}.attention.norm.bias", &["transformer.h.{}.ln_1.bias"]),
    ("blocks.{}.attention.qkv.weight", &["transformer.h.{}.attn.c_attn.weight"]),
    ("blocks.{}.attention.qkv.bias", &["transformer.h.{}.attn.c_attn.bias"]),
    ("blocks.{}.attention.proj.weight", &["transformer.h.{}.attn.c_proj.weight"]),
    ("blocks.{}.attention.proj.bias", &["transformer.h.{}.attn.c_proj.bias"]),
    ("blocks.{}.mlp.norm.weight", &["transformer.h.{}.ln_2.weight"]),
    ("blocks.{}.mlp.norm.bias", &["transformer.h.{}.ln_2.bias"]),
    ("blocks.{}.mlp.fc1.weight", &["transformer.h.{}.mlp.c_fc.weight"]),
    ("blocks.{}.mlp.fc1.bias", &["transformer.h.{}.mlp.c_fc.bias"]),
    ("blocks.{}.mlp.fc2.weight", &["transformer.h.{}.mlp.c_proj.weight"]),
    ("blocks.{}.mlp.fc2.bias", &["transformer.h.{}.mlp.c_proj.bias"]),
    ("norm.weight", &["transformer.ln_f.weight"]),
    ("norm.bias", &["transformer.ln_f.bias"]),
    ("head.weight", &["lm_head.weight"]),
];

/// Deviations of weights that are all read, so that none is drawn.
pub(super) const NOT_DRAWN: InitOptions = InitOptions { init_std: 0.0, output_layer_init_std: 0.0 };

impl Config {
    /// Returns the options of a [`Gpt`] of this configuration.
    ///
    /// ```
    /// # use fp8_hf::Config;
    /// let config = Config::from_json(
    ///     r#"{"model_type": "qwen2", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
    ///         "num_attention_heads": 2, "tie_word_embeddings": true}"#,
    /// )?;
    /// let options = config.gpt_options();
    /// assert!(options.tie_word_embeddings && !options.layer.bias && options.layer.qkv_bias == Some(true));
    /// # Ok::<(), fp8_hf::Error>(())
    /// ```
    #[must_use]
    pub fn gpt_options(&self) -> GptOptions {
        let rope = self.rope.as_ref();
        let norm =
            NormOptions { normalization: self.family.norm, eps: self.norm_eps as f32, ..Default::default() };
        let of_heads = NormOptions { normalization: ops::Norm::RmsNorm, ..norm };
        GptOptions {
            vocab_size: self.vocab_size,
            num_layers: self.num_hidden_layers,
            learned_positions: self.family.has_learned_positions,
            sliding_windows: self.sliding_windows.clone(),
            tie_word_embeddings: self.tie_word_embeddings,
            layer: TransformerLayerOptions {
                hidden_size: self.hidden_size,
                ffn_hidden_size: self.intermediate_size,
                attention: AttentionOptions {
                    num_attention_heads: self.num_attention_heads,
                    num_gqa_groups: Some(self.num_key_value_heads),
                    kv_channels: Some(self.head_dim),
                    max_seq_length: self.max_position_embeddings,
                    rope_base: rope.map_or(10_000.0, |rope| rope.theta),
                    rope_scaling: rope.map_or(ops::RopeScaling::None, |rope| rope.scaling),
                    qk_norm: self.family.qk_norm.then_some(of_heads),
                    ..Default::default()
                },
                activation: self.activation,
                norm,
                bias: self.family.linear_bias,
                qkv_bias: Some(self.family.linear_bias || self.family.qkv_bias),
                ..Default::default()
            },
            ..Default::default()
        }
    }

    /// Returns the tensors of each parameter of a [`Gpt`] of this configuration.
    ///
    /// ```
    /// # use fp8_hf::Config;
    /// let config = Config::from_json(
    ///     r#"{"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
    ///         "num_attention_heads": 2}"#,
    /// )?;
    /// let fc1 = config.parameters().into_iter().find(|source| source.parameter == "blocks.0.mlp.fc1.weight");
    /// let tensors = fc1.map(|source| source.tensors).unwrap_or_default();
    /// assert_eq!(tensors, ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"]);
    /// # Ok::<(), fp8_hf::Error>(())
    /// ```
    #[must_use]
    pub fn parameters(&self) -> Vec<ParameterSource> {
        let specs = self.tensors();
        let shape = |name: &str| specs.iter().find(|spec| spec.name == name).map(|spec| spec.shape);
        let sources = if self.family.has_learned_positions { GPT2 } else { LLAMA };
        let mut all = Vec::new();
        for &(parameter, tensors) in sources {
            let layers = if parameter.contains("{}") { self.num_hidden_layers } else { 1 };
            for layer in 0..layers {
                let of = |name: &str| name.replace("{}", &layer.to_string());
                let tensors: Vec<String> = tensors.iter().map(|name| of(name)).collect();
                // A model of this configuration may lack it: the head if it is tied, biases, norms of heads.
                let Some(first) = tensors.first().and_then(|name| shape(name)) else { continue };
                let is_table = parameter.starts_with("embedding") || parameter.starts_with("position");
                let is_transposed = self.family.is_transposed
                    && first.len() == 2
                    && !(is_table || parameter.starts_with("head"));
                all.push(ParameterSource { parameter: of(parameter), tensors, is_transposed });
            }
        }
        all
    }

    /// Returns the same by the names of the parameters.
    pub(super) fn parameters_by_name(&self) -> BTreeMap<String, ParameterSource> {
        self.parameters().into_iter().map(|source| (source.parameter.clone(), source)).collect()
    }
}

impl Folder {
    /// Makes a model of the folder and reads its weights. FP8 weights are dequantized, or kept as codes
    /// ([`LoadOptions::fp8`]).
    ///
    /// ```no_run
    /// use fp8_hf::{Folder, LoadOptions};
    /// use fp8_nn::prelude::*;
    ///
    /// let folder = Folder::open("SmolLM2-135M".as_ref())?;
    /// let model = folder.load(&LoadOptions::default(), &Device::cpu())?;
    /// let mut scaling = Scaling::new(&model, &Device::cpu())?;
    /// let ids = Tensor::from_vec(vec![1i32, 2, 3], [1, 3], &Device::cpu())?;
    /// let (logits, _) = model.forward(&mut scaling.eval(&Recipe::off())?, &ids)?;
    /// assert_eq!(logits.shape().last_dim(), folder.config.vocab_size);
    /// # Ok::<(), fp8_hf::Error>(())
    /// ```
    ///
    /// # Errors
    /// A `max_seq_length` beyond learned positions; a tied model whose files have a head that is not the embedding; FP8
    /// weights that are kept in a model that will be trained, or whose layers ranks share; sizes that the ranks cannot share evenly; a
    /// file that cannot be read; a device that is out of memory.
    pub fn load(&self, options: &LoadOptions, device: &Device) -> Result<Gpt> {
        self.load_parts(options, device, &|_| true)
    }

    /// Makes a model and reads the parameters for whose names behind the model's path `reads` is true. The others have the same
    /// form.
    pub(super) fn load_parts(
        &self,
        options: &LoadOptions,
        device: &Device,
        reads: &dyn Fn(&str) -> bool,
    ) -> Result<Gpt> {
        let (longest, is_learned) =
            (self.config.max_position_embeddings, self.config.family.has_learned_positions);
        let max_seq_length = options.max_seq_length.unwrap_or(longest);
        if is_learned && max_seq_length > longest {
            let (layer, value) = (options.path.clone(), max_seq_length.to_string());
            let remedy = format!("expected at most {longest}, the number of the model's learned positions");
            return Err(Error::Option { part: layer, option: "max_seq_length", value, remedy });
        }
        // Learned positions are a table of that many rows, which has to be read whole.
        let rows = if is_learned { longest } else { max_seq_length };
        let mut gpt = self.config.gpt_options();
        gpt.layer.attention.max_seq_length = rows;
        gpt.layer.params_dtype = options.params_dtype;
        gpt.layer.init = NOT_DRAWN;
        gpt.layer.recompute = options.recompute;
        gpt.layer.tensor_parallel = options.tensor_parallel.clone();
        let keeps = options.fp8 == Fp8Weights::Keep && !self.quantized.is_empty();
        if keeps {
            expect_keepable(&options.path, options.trainable, options.tensor_parallel.is_some())?;
        }
        let new = || Gpt::new(&options.path, &gpt, device, &mut ChaCha8Rng::seed_from_u64(0));
        let mut model = if options.trainable { new()? } else { frozen(new)? };
        let keeper = if keeps { Keeper::new(self, &model)? } else { None };
        let sources = self.config.parameters_by_name();
        for parameter in parameters_mut(&mut model) {
            let name = parameter.name().clone();
            let own = name.strip_prefix(&*options.path).and_then(|name| name.strip_prefix('.'));
            let source = own.and_then(|own| sources.get(own));
            let source = source.ok_or_else(|| self.problem(format!("no tensor belongs to `{name}`")))?;
            let reads = reads(&source.parameter);
            if reads && source.parameter == TABLE {
                self.expect_tied()?;
            }
            match &keeper {
                Some(keeper) if keeper.store(parameter, source, reads)? => {}
                _ if reads => self.read_into(parameter, source)?,
                _ => {}
            }
        }
        Ok(model)
    }

    /// Replaces the value of a parameter by its tensors, or by this rank's part of them.
    pub(super) fn read_into(&self, parameter: &mut Parameter, source: &ParameterSource) -> Result<()> {
        let part = Part::new(parameter, source);
        if parameter.device().is_same(&Device::cpu())
            && parameter.dtype() == DType::F32
            && !source.is_transposed
        {
            let name = parameter.name().clone();
            let mut filled = Ok(());
            parameter.update(|tensor, _| {
                filled = self.fill(source, &part, tensor.as_mut_slice(&name)?);
                Ok(())
            })?;
            return filled;
        }
        let mut values = Vec::new();
        let count = parameter.shape().numel();
        let bytes = count.saturating_mul(size_of::<f32>());
        values.try_reserve_exact(count).map_err(|_| {
            let op = "load";
            fp8_kernels::Error::HostAllocation { op, bytes }
        })?;
        values.resize(count, 0.0);
        self.fill(source, &part, &mut values)?;
        let (shape, device) = (*parameter.shape(), parameter.device().clone());
        let value = if source.is_transposed {
            let [rows, cols] = shape.matrix();
            ops::transpose(&Tensor::from_vec(values, [cols, rows], &device)?)?
        } else {
            Tensor::from_vec(values, shape, &device)?
        };
        let value = ops::cast(&value, parameter.dtype())?;
        Ok(parameter.set(value)?)
    }

    /// Reads a part of the tensors of a parameter, one after the other.
    fn fill(&self, source: &ParameterSource, part: &Part, values: &mut [f32]) -> Result<()> {
        let (mut done, mut first) = (0, 0);
        for tensor in &source.tensors {
            let name = self.stored(tensor);
            let [height, width] = self.info(name)?.matrix();
            let rows = part.rows(first, height);
            let columns = part.columns(width);
            first += height;
            let row: usize = columns.iter().map(Range::len).sum();
            for rows in rows {
                let count = rows.len() * row;
                let own = values.get_mut(done..).and_then(|rest| rest.get_mut(..count)).ok_or_else(|| {
                    self.problem(format!("`{name}` has {count} elements, more than `{}`", source.parameter))
                })?;
                match &*columns {
                    [all] if all.len() == width => self.read_to(name, rows, own)?,
                    some => self.read_columns_to(name, rows, some, own)?,
                }
                done += count;
            }
        }
        Ok(())
    }
}
