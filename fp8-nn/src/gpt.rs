//! A language model.

mod blocks;
mod evaluate;
mod head;
mod high_precision;
mod loss;
mod options;

use crate::arguments::{Argument, Output};
use crate::data_parallel::Parts;
use crate::dropout::Rate;
use crate::layers::{NormCore, Part as LinearPart, vocabulary};
use crate::loss_scaler::expect_all_gradients;
use crate::{
    AnySaved, DynBlock, Embedding, EmbeddingOptions, EmbeddingSaved, Error, Linear, LinearOptions,
    LossScaler, Result, SequenceInfo, TensorParallel, TransformerLayer, TransformerLayerOptions, composite,
};
use fp8_kernels::ops::{
    self, CrossEntropyOptions, CrossEntropySaved, Dropout, LossScale, NormStats, Positions,
};
use fp8_kernels::{Device, Tensor};
use fp8_recipe::{Backward, Forward};
use head::{Head, HeadSaved};
pub use options::GptOptions;
use rand::Rng;
use std::sync::Arc;

/// A decoder-only language model: embedding, causal transformer blocks with RoPE or learned positions, norm, head.
///
/// The blocks' GEMMs run in FP8; embedding, norms, head and loss run in high precision, and so does attention, unless `layer.attention.fp8_dpa`
/// is set.
///
/// | parameters | layer |
/// |---|---|
/// | `<path>.embedding.weight` | [`Embedding`], `[vocab_size, hidden_size]` |
/// | `<path>.blocks.N.*` | [`TransformerLayer`], N from 0 on; [`with_blocks`](Self::with_blocks) replaces it |
/// | `<path>.norm.*` | [`LayerNorm`](crate::LayerNorm) or [`RmsNorm`](crate::RmsNorm) |
/// | `<path>.head.weight`, unless tied | [`Linear`] without bias, `[vocab_size, hidden_size]`; [`with_head`](Self::with_head) replaces it |
/// | `<path>.position.weight`, if learned | [`Embedding`], `[max_seq_length, hidden_size]` |
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let device = Device::cpu();
/// let options = GptOptions {
///     vocab_size: 16,
///     num_layers: 2,
///     layer: TransformerLayerOptions {
///         hidden_size: 32,
///         ffn_hidden_size: 128,
///         attention: AttentionOptions {
///             num_attention_heads: 4,
///             max_seq_length: 8,
///             ..Default::default()
///         },
///         ..Default::default()
///     },
///     ..Default::default()
/// };
/// let mut model = Gpt::new("gpt", &options, &device, &mut fp8_nn::rand::rng())?;
/// let mut scaling = Scaling::new(&model, &device)?;
/// let mut optimizer = AdamW::new(AdamWOptions::default())?;
/// let recipe = Recipe::from(DelayedScaling::default());
/// let ids = Tensor::from_vec(vec![1i32, 2, 3, 4, 5, 6, 7, 8], [1, 8], &device)?;
/// let targets = Tensor::from_vec(vec![2i32, 3, 4, 5, 6, 7, 8, 9], [1, 8], &device)?;
/// let mut losses = Vec::new();
/// for _ in 0..10 {
///     let (loss, saved) = scaling.in_autocast(&recipe, |cx| model.loss(cx, &ids, &targets))?;
///     scaling.in_backward(|cx| model.loss_backward(cx, saved))?;
///     optimizer.step(&mut model, 1e-2)?;
///     zero_grad(&mut model)?;
///     losses.push(loss.item()?);
/// }
/// assert!((losses[0] - 16f32.ln()).abs() < 0.3 && losses[9] < 1.0); // from ln(vocab_size) down
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct Gpt {
    path: Arc<str>,
    max_seq_length: usize,
    embedding: Embedding,
    embedding_dropout: Rate,
    /// In place of RoPE.
    position: Option<Embedding>,
    blocks: Vec<Box<dyn DynBlock>>,
    norm: NormCore,
    head: Head,
    has_f32_residual: bool,
    /// The ranks that share the layers.
    ranks: Option<TensorParallel>,
    vocab_size: usize,
}

composite!(Gpt { embedding, position, blocks, norm, head; skip path, max_seq_length, embedding_dropout, has_f32_residual, ranks, vocab_size });

/// The values that [`Gpt::backward`] needs.
#[derive(Debug)]
pub struct GptSaved {
    embedding: EmbeddingSaved,
    position: Option<EmbeddingSaved>,
    embedding_dropout: Option<Dropout>,
    blocks: Vec<AnySaved>,
    normed: Tensor,
    stats: NormStats,
    head: HeadSaved,
    output: Output,
}

/// The values that [`Gpt::loss_backward`] needs.
#[derive(Debug)]
pub struct GptLossSaved {
    model: GptSaved,
    logits: Tensor,
    targets: Tensor,
    cross_entropy: CrossEntropySaved,
    options: CrossEntropyOptions,
}

impl Gpt {
    /// Creates a model at `path` (often "gpt"), with weights drawn from `rng`.
    ///
    /// # Errors
    /// A size of 0, more layers than memory holds, and all errors of its layers.
    pub fn new(path: &str, options: &GptOptions, device: &Device, rng: &mut impl Rng) -> Result<Self> {
        options.check(path)?;
        let GptOptions { vocab_size, num_layers, ref layer, .. } = *options;
        let TransformerLayerOptions { hidden_size, norm, params_dtype, .. } = *layer;
        let (init_std, max_seq_length) = (layer.init.init_std, layer.attention.max_seq_length);
        let mut blocks: Vec<Box<dyn DynBlock>> = Vec::new();
        blocks.try_reserve_exact(num_layers).map_err(|_| Error::Option {
            part: path.to_owned(),
            option: "num_layers",
            value: num_layers.to_string(),
            remedy: "so many blocks do not fit into memory: use fewer".to_owned(),
        })?;
        let ranks = layer.tensor_parallel.clone();
        let table = EmbeddingOptions {
            num_embeddings: vocab_size,
            hidden_size,
            params_dtype,
            init_std,
            tensor_parallel: ranks.clone(),
        };
        let embedding = Embedding::new(&format!("{path}.embedding"), &table, device, rng)?;
        let position =
            EmbeddingOptions { num_embeddings: max_seq_length, tensor_parallel: None, ..table.clone() };
        let position = || -> Result<Embedding> {
            let table = Embedding::new(&format!("{path}.position"), &position, device, rng)?;
            Ok(table.of_tokens(ranks.as_ref()))
        };
        let position = options.learned_positions.then(position).transpose()?;
        // One for all blocks: that of a long context takes more memory than a block.
        let mut table = None;
        for i in 0..num_layers {
            let (path, options) = (format!("{path}.blocks.{i}"), options.block(i));
            blocks
                .push(Box::new(TransformerLayer::with_rope_table(&path, options, &mut table, device, rng)?));
        }
        let head = LinearOptions {
            in_features: hidden_size,
            out_features: vocab_size,
            bias: false,
            params_dtype,
            init_std,
            ..Default::default()
        };
        let head_path = format!("{path}.head");
        let norm = NormCore::new(&format!("{path}.norm"), hidden_size, norm, params_dtype, device)?;
        let dropout = Rate::new(path, "embedding_dropout", options.embedding_dropout)?;
        let head_part = match &ranks {
            Some(ranks) => {
                vocabulary(path, "vocab_size", [vocab_size, hidden_size], ranks)?;
                LinearPart::columns(ranks, [vocab_size, hidden_size], &[vocab_size])
            }
            None => LinearPart::new(&head_path, None, head.parallel_mode, [vocab_size, hidden_size], &[])?,
        };
        Ok(Self {
            path: path.into(),
            max_seq_length,
            embedding,
            embedding_dropout: match &ranks {
                Some(ranks) => dropout.of_ranks(ranks),
                None => dropout,
            },
            position,
            blocks,
            norm: norm.of_tokens(ranks.as_ref()),
            head: match options.tie_word_embeddings {
                true => Head::Tied,
                false => Head::Linear(
                    Linear::of_part(&head_path, head, head_part, device, rng)?.in_high_precision(),
                ),
            },
            has_f32_residual: layer.fp32_residual_connection,
            ranks,
            vocab_size,
        })
    }

    /// Returns the path that the names of its parameters begin with.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns the length of the longest sequence.
    pub fn max_seq_length(&self) -> usize {
        self.max_seq_length
    }

    /// Returns the logits `[batch, seq, vocab_size]` of `ids` `[batch, seq]` (i32). With tensor parallelism, they are those of this rank's
    /// rows of the vocabulary, `[batch, seq, rows]`.
    ///
    /// # Errors
    /// Ids that are not `[batch, seq]`, not i32, on another device or out of range; a sequence longer than
    /// `max_seq_length`.
    pub fn forward(&self, cx: &mut Forward<'_>, ids: &Tensor) -> Result<(Tensor, GptSaved)> {
        self.forward_with_info(cx, ids, &SequenceInfo::default())
    }

    /// [`forward`](Self::forward) for ids with padding, packed sequences, or positions of their own. Packed sequences are
    /// `[1, seq]`; each has at most `max_seq_length` ids.
    ///
    /// # Errors
    /// As [`forward`](Self::forward); an `info` that does not fit the ids.
    pub fn forward_with_info(
        &self,
        cx: &mut Forward<'_>,
        ids: &Tensor,
        info: &SequenceInfo,
    ) -> Result<(Tensor, GptSaved)> {
        cx.attempt(|cx| {
            if let Some(ranks) = &self.ranks {
                cx.add_group(&ranks.amax_group());
            }
            self.check_ids(ids, info)?;
            let (mut x, (embedding, position)) = self.embed(cx, ids, info)?;
            let info = &self.info_of_blocks(ids, info);
            let embedding_dropout = self.embedding_dropout.draw_for(cx, &x)?;
            if let Some(Dropout { p, draw }) = &embedding_dropout {
                x = ops::dropout(&x, *p, draw)?;
            }
            let mut blocks = Vec::with_capacity(self.blocks.len());
            for block in &self.blocks {
                let (y, saved) = block.forward_with_info_dyn(cx, &x, info)?;
                blocks.push(saved);
                x = y;
            }
            x = self.input_of_norm(cx, x)?;
            let (y, stats) = self.norm.forward(&x)?;
            let (logits, head) = self.head.forward(cx, &self.embedding, &y, self.ranks.as_ref())?;
            let logits = self.logits_of(ids, logits)?;
            let output = Output::of(&self.path, &logits);
            let saved =
                GptSaved { embedding, position, embedding_dropout, blocks, normed: x, stats, head, output };
            Ok((logits, saved))
        })
    }

    /// Returns the rows of the embedding, with those of the positions, and what backward needs of both.
    fn embed(
        &self,
        cx: &Forward<'_>,
        ids: &Tensor,
        info: &SequenceInfo,
    ) -> Result<(Tensor, (EmbeddingSaved, Option<EmbeddingSaved>))> {
        let (x, embedding) = self.embedding.forward(cx, ids)?;
        let Some(table) = &self.position else { return Ok((x, (embedding, None))) };
        let mut positions = self.positions(ids, info)?;
        if let Some(ranks) = self.sequence_parallel() {
            // The embedding has checked that the ranks can share them.
            let share = positions.numel() / ranks.size();
            let first = ranks.rank() * share;
            let all = positions.reshape([positions.numel(), 1])?;
            positions = ops::rows(&all, first..first + share)?.reshape([share])?;
        }
        let (positions, saved) = table.forward(cx, &positions)?;
        Ok((ops::add(&x, &positions)?, (embedding, Some(saved))))
    }

    /// The ranks that have tokens of their own.
    fn sequence_parallel(&self) -> Option<&TensorParallel> {
        self.ranks.as_ref().filter(|ranks| ranks.is_sequence_parallel())
    }

    /// Adds the sizes of the whole batch, of whose tokens blocks may have a part.
    fn info_of_blocks(&self, ids: &Tensor, info: &SequenceInfo) -> SequenceInfo {
        let batch_and_length = match (&**ids.shape(), self.sequence_parallel()) {
            (&[batch, seq], Some(_)) => Some([batch, seq]),
            _ => info.batch_and_length,
        };
        SequenceInfo { batch_and_length, ..info.clone() }
    }

    /// Returns logits in the shape of the ids, `[batch, seq, …]`.
    fn logits_of(&self, ids: &Tensor, logits: Tensor) -> Result<Tensor> {
        match (&**ids.shape(), self.sequence_parallel()) {
            (&[batch, seq], Some(_)) => Ok(logits.reshape([batch, seq, logits.shape().last_dim()])?),
            _ => Ok(logits),
        }
    }

    /// Returns the output of the blocks in the dtype that the norm computes in.
    fn input_of_norm(&self, cx: &Forward<'_>, x: Tensor) -> Result<Tensor> {
        if !self.has_f32_residual {
            return Ok(x);
        }
        Ok(ops::cast(&x, cx.compute_dtype().unwrap_or(self.embedding.weight().dtype()))?)
    }

    /// The position of each id, for a table of learned positions.
    fn positions(&self, ids: &Tensor, info: &SequenceInfo) -> Result<Tensor> {
        let &[batch, seq] = &**ids.shape() else { return Ok(ids.clone()) };
        match info.rotary() {
            Positions::Of(positions) => Ok(positions.clone()),
            Positions::From(start) => {
                let rising = (0..batch).flat_map(|_| (start..start + seq).map(|position| position as i32));
                Ok(Tensor::from_vec::<i32>(rising.collect(), [batch, seq], ids.device())?)
            }
        }
    }

    fn check_ids(&self, ids: &Tensor, info: &SequenceInfo) -> Result<()> {
        let longest = self.max_seq_length;
        let sizes = match **ids.shape() {
            [batch, seq] if info.longest(seq) <= longest => Some([batch, seq]),
            _ => None,
        };
        let expected = || format!("[batch, seq] with seq at most {longest}, the max_seq_length");
        let sizes = self.integers("ids", ids)?.sizes(sizes, expected)?;
        info.check(&self.path, sizes, self.embedding.weight().device())
    }

    fn check_targets(&self, ids: &Tensor, targets: &Tensor, info: &SequenceInfo) -> Result<()> {
        self.check_ids(ids, info)?;
        let expected = || format!("{}, the shape of ids", ids.shape());
        self.integers("targets", targets)?.shape(targets.shape() == ids.shape(), expected).map(drop)
    }

    fn integers<'a>(&'a self, name: &'static str, tensor: &'a Tensor) -> Result<Argument<'a>> {
        Argument::new(&self.path, name, tensor).integer()?.on(self.embedding.weight().device())
    }

    /// Adds the gradients of all parameters, from the gradient of the logits.
    ///
    /// # Errors
    /// A `Saved` of another model or an evaluation; a gradient of the wrong shape.
    pub fn backward(&mut self, cx: &mut Backward<'_>, saved: GptSaved, dlogits: &Tensor) -> Result<()> {
        cx.attempt(|cx| {
            saved.output.check(dlogits)?;
            let mut parts = Parts::new(cx);
            let flat;
            let dlogits = match self.sequence_parallel() {
                Some(_) => {
                    flat = dlogits.reshape(dlogits.shape().matrix())?;
                    &flat
                }
                None => dlogits,
            };
            let ranks = self.ranks.as_ref();
            let dy = self.head.backward(cx, &mut self.embedding, saved.head, dlogits, ranks)?;
            parts.finished(&mut self.head)?; // of a tied one the embedding has the gradient
            let mut dx = self.norm.backward(cx, &saved.normed, &saved.stats, &dy)?;
            parts.finished(&mut self.norm)?;
            for (index, (block, saved)) in self.blocks.iter_mut().zip(saved.blocks).enumerate().rev() {
                // A block of the user's own may use a part twice.
                let is_ours = block.as_any().is::<TransformerLayer>();
                if is_ours {
                    parts.lend(cx);
                }
                dx = block.backward_dyn(index, cx, saved, &dx)?;
                if is_ours {
                    parts.take_back(cx);
                }
                parts.finished(block)?;
            }
            if let Some(Dropout { p, draw }) = &saved.embedding_dropout {
                dx = ops::dropout_backward(&dx, *p, draw)?;
            }
            if let (Some(table), Some(saved)) = (&mut self.position, &saved.position) {
                table.backward(saved, &dx)?;
                parts.finished(table)?;
            }
            self.embedding.backward(&saved.embedding, &dx)?;
            parts.finished(&mut self.embedding)?;
            parts.end(cx);
            Ok(())
        })
    }

    /// Returns the mean cross entropy of `targets` `[batch, seq]` (i32) in nats, one f32 on the device.
    ///
    /// # Errors
    /// As [`forward`](Self::forward); targets of another shape or out of range.
    pub fn loss(
        &self,
        cx: &mut Forward<'_>,
        ids: &Tensor,
        targets: &Tensor,
    ) -> Result<(Tensor, GptLossSaved)> {
        self.loss_with_info(cx, ids, targets, CrossEntropyOptions::default(), &SequenceInfo::default())
    }

    /// [`loss`](Self::loss) with an id to ignore, or another divisor (the global batch's, in data-parallel training), and for
    /// padding, packed sequences or positions: see [`forward_with_info`](Self::forward_with_info). Padding has targets, too: give them the
    /// id to ignore.
    ///
    /// # Errors
    /// As [`loss`](Self::loss); an `info` that does not fit the ids.
    pub fn loss_with_info(
        &self,
        cx: &mut Forward<'_>,
        ids: &Tensor,
        targets: &Tensor,
        options: CrossEntropyOptions,
        info: &SequenceInfo,
    ) -> Result<(Tensor, GptLossSaved)> {
        cx.attempt(|cx| {
            if let Some(ranks) = &self.ranks {
                cx.add_group(&ranks.amax_group());
            }
            self.check_targets(ids, targets, info)?;
            let (logits, model) = self.forward_with_info(cx, ids, info)?;
            let (loss, cross_entropy) = self.cross_entropy(&logits, targets, &options)?;
            Ok((loss, GptLossSaved { model, logits, targets: targets.clone(), cross_entropy, options }))
        })
    }

    /// Adds the gradients of all parameters, from the loss.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    pub fn loss_backward(&mut self, cx: &mut Backward<'_>, saved: GptLossSaved) -> Result<()> {
        cx.attempt(|cx| self.backward_from_loss(cx, saved, None))
    }

    /// Runs [`loss_backward`](Self::loss_backward) for a loss that is multiplied by a factor in the device's memory, which a recorded
    /// step reads anew in each replay. Gradients have the factor, too: it is no [`LossScaler`], whose scale the optimizer undoes.
    ///
    /// With [`CrossEntropyOptions::normalizer`] = 1, the factor 1 / n gives the gradients of the mean over n targets, of which this
    /// call may have only some.
    ///
    /// ```
    /// use fp8_nn::prelude::*;
    /// use fp8_nn::fp8_kernels::ops::{CrossEntropyOptions, LossScale, LossScaleState};
    ///
    /// # let layer = TransformerLayerOptions {
    /// #     hidden_size: 8,
    /// #     ffn_hidden_size: 16,
    /// #     attention: AttentionOptions { num_attention_heads: 2, max_seq_length: 4, ..Default::default() },
    /// #     ..Default::default()
    /// # };
    /// # let options = GptOptions { vocab_size: 16, num_layers: 1, layer, ..Default::default() };
    /// # let device = Device::cpu();
    /// # let mut model = Gpt::new("gpt", &options, &device, &mut fp8_nn::rand::rng())?;
    /// # let mut scaling = Scaling::new(&model, &device)?;
    /// # let ids = Tensor::from_vec(vec![1i32, 2, 3, 4], [1, 4], &device)?;
    /// # let targets = Tensor::from_vec(vec![2i32, 3, 4, -100], [1, 4], &device)?;
    /// let sum = CrossEntropyOptions { ignore_index: Some(-100), normalizer: Some(1.0) };
    /// let mean = LossScale::new(&LossScaleState { scale: 1.0 / 3.0, ..Default::default() }, &device)?;
    /// let (loss, saved) = scaling.in_autocast(&Recipe::off(), |cx| {
    ///     model.loss_with_info(cx, &ids, &targets, sum, &SequenceInfo::default())
    /// })?;
    /// scaling.in_backward(|cx| model.loss_backward_by(cx, saved, &mean))?;
    /// let by_factor = clip_grad_norm(&mut model, f32::MAX)?.item()?;
    ///
    /// zero_grad(&mut model)?;
    /// let mean = CrossEntropyOptions { normalizer: None, ..sum };
    /// let (same, saved) = scaling.in_autocast(&Recipe::off(), |cx| {
    ///     model.loss_with_info(cx, &ids, &targets, mean, &SequenceInfo::default())
    /// })?;
    /// scaling.in_backward(|cx| model.loss_backward(cx, saved))?;
    /// let norm = clip_grad_norm(&mut model, f32::MAX)?.item()?;
    /// assert!((loss.item()? / 3.0 / same.item()? - 1.0).abs() < 1e-6 && (by_factor / norm - 1.0).abs() < 1e-5);
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`backward`](Self::backward); a factor on another device.
    pub fn loss_backward_by(
        &mut self,
        cx: &mut Backward<'_>,
        saved: GptLossSaved,
        factor: &LossScale,
    ) -> Result<()> {
        cx.attempt(|cx| self.backward_from_loss(cx, saved, Some(factor)))
    }

    /// Runs [`loss_backward`](Self::loss_backward) for a loss that is multiplied by the scale of `scaler`, and
    /// [checks](LossScaler::check) the gradients. [`LossScaler`] has an example.
    ///
    /// # Errors
    /// As [`backward`](Self::backward) and [`LossScaler::check`].
    pub fn loss_backward_scaled(
        &mut self,
        cx: &mut Backward<'_>,
        saved: GptLossSaved,
        scaler: &LossScaler,
    ) -> Result<()> {
        cx.attempt(|cx| {
            expect_all_gradients(cx)?;
            let scale = scaler.for_loss(cx)?;
            self.backward_from_loss(cx, saved, scale)?;
            scaler.check(cx, self)
        })
    }

    fn backward_from_loss(
        &mut self,
        cx: &mut Backward<'_>,
        saved: GptLossSaved,
        scale: Option<&LossScale>,
    ) -> Result<()> {
        let GptLossSaved { model, logits, targets, cross_entropy, options } = saved;
        let dlogits = self.cross_entropy_backward(&logits, &targets, &cross_entropy, &options, scale)?;
        drop(logits);
        self.backward(cx, model, &dlogits)
    }
}
