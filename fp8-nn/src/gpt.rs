//! A decoder-only language model: embedding → blocks → norm → head.
//!
//! The blocks' GEMMs run in FP8; embedding, norms, attention, head and loss in high precision.

use crate::arguments::{Argument, Output};
use crate::layer_norm::NormCore;
use crate::{
    AttentionOptions, Embedding, EmbeddingOptions, EmbeddingSaved, Error, InitOptions, Linear, LinearOptions,
    LinearSaved, Module, NormOptions, Result, TransformerLayer, TransformerLayerOptions,
    TransformerLayerSaved, composite, init,
};
use fp8_kernels::ops::{self, Activation, CrossEntropyOptions, CrossEntropySaved, NormStats};
use fp8_kernels::{DType, Device, Tensor};
use fp8_recipe::{Backward, Forward};
use rand::Rng;
use std::sync::Arc;

/// How a [`Gpt`] is made. Sizes have no default.
#[derive(Debug, Clone)]
pub struct GptOptions {
    /// Token ids run from 0 to this.
    pub vocab_size: usize,
    /// Blocks.
    pub num_layers: usize,
    /// Width of the model.
    pub hidden_size: usize,
    /// Inner width of the MLPs; `None`: four times `hidden_size`.
    pub ffn_hidden_size: Option<usize>,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; `None`: as many as query heads.
    pub num_gqa_groups: Option<usize>,
    /// The longest sequence.
    pub max_seq_length: usize,
    /// The MLPs' function.
    pub activation: Activation,
    /// The normalization in the blocks and before the head.
    pub norm: NormOptions,
    /// RoPE's base.
    pub rope_base: f64,
    /// Whether the Linears have biases.
    pub bias: bool,
    /// f32 or bf16.
    pub params_dtype: DType,
    /// Standard deviation of initial weights; those that end a residual branch are divided by `√(2 · num_layers)`.
    pub init_std: f32,
}

impl Default for GptOptions {
    fn default() -> Self {
        Self {
            vocab_size: 0,
            num_layers: 0,
            hidden_size: 0,
            ffn_hidden_size: None,
            num_attention_heads: 0,
            num_gqa_groups: None,
            max_seq_length: 0,
            activation: Activation::Gelu,
            norm: NormOptions::default(),
            rope_base: 10_000.0,
            bias: true,
            params_dtype: DType::F32,
            init_std: 0.023,
        }
    }
}

/// See the module's text. Parameters below `<path>`: `embedding.*`, `blocks.N.*`, `norm.*`, `head.weight`.
#[derive(Debug)]
pub struct Gpt {
    path: Arc<str>,
    max_seq_length: usize,
    embedding: Embedding,
    blocks: Vec<TransformerLayer>,
    norm: NormCore,
    head: Linear,
}

composite!(Gpt { embedding, blocks, norm, head });

/// What backward from the logits needs.
#[derive(Debug)]
pub struct GptSaved {
    embedding: EmbeddingSaved,
    blocks: Vec<TransformerLayerSaved>,
    normed: Tensor,
    stats: NormStats,
    head: LinearSaved,
    output: Output,
}

/// What backward from the loss needs.
#[derive(Debug)]
pub struct GptLossSaved {
    model: GptSaved,
    logits: Tensor,
    targets: Tensor,
    cross_entropy: CrossEntropySaved,
    options: CrossEntropyOptions,
}

impl Gpt {
    /// A model at `path` (often "gpt").
    ///
    /// # Errors
    /// A size of 0, more layers than memory holds, and all errors of its layers.
    pub fn new(path: &str, options: &GptOptions, device: &Device, rng: &mut impl Rng) -> Result<Self> {
        let GptOptions { vocab_size, num_layers, hidden_size, params_dtype, init_std, .. } = *options;
        init::check_positive(
            path,
            &[
                ("vocab_size", vocab_size),
                ("num_layers", num_layers),
                ("max_seq_length", options.max_seq_length),
            ],
        )?;
        let mut blocks = Vec::new();
        blocks.try_reserve_exact(num_layers).map_err(|_| Error::Option {
            layer: path.to_owned(),
            option: "num_layers",
            value: num_layers.to_string(),
            remedy: "so many blocks do not fit into memory: use fewer".to_owned(),
        })?;
        let table = EmbeddingOptions { num_embeddings: vocab_size, hidden_size, params_dtype, init_std };
        let embedding = Embedding::new(&format!("{path}.embedding"), &table, device, rng)?;
        let block = TransformerLayerOptions {
            hidden_size,
            ffn_hidden_size: options.ffn_hidden_size.unwrap_or(hidden_size.saturating_mul(4)),
            attention: AttentionOptions {
                num_attention_heads: options.num_attention_heads,
                num_gqa_groups: options.num_gqa_groups,
                kv_channels: None,
                causal: true,
                rope: true,
                rope_base: options.rope_base,
                max_seq_length: options.max_seq_length,
            },
            activation: options.activation,
            norm: options.norm,
            bias: options.bias,
            params_dtype,
            init: InitOptions {
                init_std,
                output_layer_init_std: init_std / (2.0 * num_layers as f32).sqrt(),
            },
        };
        for i in 0..num_layers {
            blocks.push(TransformerLayer::new(&format!("{path}.blocks.{i}"), block.clone(), device, rng)?);
        }
        let head = LinearOptions {
            in_features: hidden_size,
            out_features: vocab_size,
            bias: false,
            params_dtype,
            init_std,
        };
        Ok(Self {
            path: path.into(),
            max_seq_length: options.max_seq_length,
            embedding,
            blocks,
            norm: NormCore::new(&format!("{path}.norm"), hidden_size, options.norm, params_dtype, device)?,
            head: Linear::new(&format!("{path}.head"), head, device, rng)?,
        })
    }

    /// How many GEMMs of a training step, forward and backward, run in FP8 under a recipe that overrides none.
    pub fn fp8_gemms_per_step(&self) -> usize {
        self.blocks.len() * 4 * 3
    }

    /// `ids` `[batch, seq]` (i32) → logits `[batch, seq, vocab_size]`.
    ///
    /// # Errors
    /// Ids that are not `[batch, seq]`, not i32, on another device or out of range; a sequence longer than
    /// `max_seq_length`.
    pub fn forward(&self, cx: &mut Forward<'_>, ids: &Tensor) -> Result<(Tensor, GptSaved)> {
        cx.attempt(|cx| {
            self.check_ids(ids)?;
            let (mut x, embedding) = self.embedding.forward(cx, ids)?;
            let mut blocks = Vec::with_capacity(self.blocks.len());
            for block in &self.blocks {
                let (y, saved) = block.forward(cx, &x)?;
                blocks.push(saved);
                x = y;
            }
            let (y, stats) = self.norm.forward(&x)?;
            // The head decides between many close logits: it stays in high precision.
            let (logits, head) = self.head.forward(&mut cx.disabled(), &y)?;
            let output = Output::of(&self.path, &logits);
            Ok((logits, GptSaved { embedding, blocks, normed: x, stats, head, output }))
        })
    }

    fn check_ids(&self, ids: &Tensor) -> Result<()> {
        let longest = self.max_seq_length;
        let fits = matches!(**ids.shape(), [_, seq] if seq <= longest);
        let expected = || format!("[batch, seq] with seq at most {longest}, the max_seq_length");
        self.integers("ids", ids)?.shape(fits, expected).map(drop)
    }

    fn integers<'a>(&'a self, name: &'static str, tensor: &'a Tensor) -> Result<Argument<'a>> {
        Argument::new(&self.path, name, tensor).integer()?.on(self.head.weight().tensor().device())
    }

    /// From the gradient of the logits to those of all parameters.
    ///
    /// # Errors
    /// A `Saved` of another model or an evaluation; a gradient of the wrong shape.
    pub fn backward(&mut self, cx: &mut Backward<'_>, saved: GptSaved, dlogits: &Tensor) -> Result<()> {
        cx.attempt(|cx| {
            saved.output.check(dlogits)?;
            let dy = self.head.backward(cx, saved.head, dlogits)?;
            let mut dx = self.norm.backward(&saved.normed, &saved.stats, &dy)?;
            for (block, saved) in self.blocks.iter_mut().zip(saved.blocks).rev() {
                dx = block.backward(cx, saved, &dx)?;
            }
            self.embedding.backward(&saved.embedding, &dx)
        })
    }

    /// The mean cross entropy of `targets` `[batch, seq]` (i32), in nats: one f32.
    ///
    /// # Errors
    /// As [`forward`](Self::forward); targets of another shape or out of range.
    pub fn loss(
        &self,
        cx: &mut Forward<'_>,
        ids: &Tensor,
        targets: &Tensor,
    ) -> Result<(Tensor, GptLossSaved)> {
        self.loss_with(cx, ids, targets, CrossEntropyOptions::default())
    }

    /// [`loss`](Self::loss) with an id to ignore, or another divisor (the global batch's, in data-parallel training).
    ///
    /// # Errors
    /// As [`loss`](Self::loss).
    pub fn loss_with(
        &self,
        cx: &mut Forward<'_>,
        ids: &Tensor,
        targets: &Tensor,
        options: CrossEntropyOptions,
    ) -> Result<(Tensor, GptLossSaved)> {
        cx.attempt(|cx| {
            self.check_ids(ids)?;
            let expected = || format!("{}, the shape of ids", ids.shape());
            self.integers("targets", targets)?.shape(targets.shape() == ids.shape(), expected)?;
            let (logits, model) = self.forward(cx, ids)?;
            let (loss, cross_entropy) = ops::cross_entropy(&logits, targets, &options)?;
            Ok((loss, GptLossSaved { model, logits, targets: targets.clone(), cross_entropy, options }))
        })
    }

    /// From the loss to the gradients of all parameters.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn loss_backward(&mut self, cx: &mut Backward<'_>, saved: GptLossSaved) -> Result<()> {
        cx.attempt(|cx| {
            let GptLossSaved { model, logits, targets, cross_entropy, options } = saved;
            let dlogits = ops::cross_entropy_backward(&logits, &targets, &cross_entropy, &options, 1.0)?;
            drop(logits);
            self.backward(cx, model, &dlogits)
        })
    }
}
