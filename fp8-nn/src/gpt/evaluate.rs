//! Evaluation of a language model, which keeps nothing for a backward pass, and its continuation behind a cache.

use super::Gpt;
use crate::{Error, KvCache, Layer as _, Result, SequenceInfo, init};
use fp8_kernels::ops::{self, CrossEntropyOptions};
use fp8_kernels::{DType, Shape, Tensor};
use fp8_recipe::Forward;

impl Gpt {
    /// Returns the logits of [`forward`](Self::forward), `[batch, seq, vocab_size]` of `ids` `[batch, seq]` (i32), and keeps nothing for a backward pass: at any
    /// time, memory holds what one block computes. Use it in a scope of [`Scaling::eval`](crate::fp8_recipe::Scaling::eval).
    ///
    /// ```
    /// use fp8_nn::prelude::*;
    /// # let device = Device::cpu();
    /// # let options = GptOptions {
    /// #     vocab_size: 16,
    /// #     num_layers: 2,
    /// #     layer: TransformerLayerOptions {
    /// #         hidden_size: 32,
    /// #         ffn_hidden_size: 128,
    /// #         attention: AttentionOptions {
    /// #             num_attention_heads: 4,
    /// #             max_seq_length: 8,
    /// #             ..Default::default()
    /// #         },
    /// #         ..Default::default()
    /// #     },
    /// #     ..Default::default()
    /// # };
    /// # let model = Gpt::new("gpt", &options, &device, &mut fp8_nn::rand::rng())?;
    /// let mut scaling = Scaling::new(&model, &device)?;
    /// let ids = Tensor::from_vec(vec![1i32, 2, 3], [1, 3], &device)?;
    /// let mut cx = scaling.eval(&DelayedScaling::default().into())?;
    /// let logits = model.logits(&mut cx, &ids, &SequenceInfo::default())?;
    /// assert_eq!(**logits.shape(), [1, 3, 16]);
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`forward_with_info`](Self::forward_with_info).
    pub fn logits(&self, cx: &mut Forward<'_>, ids: &Tensor, info: &SequenceInfo) -> Result<Tensor> {
        cx.attempt(|cx| {
            self.check_ids(ids, info)?;
            let (mut x, _) = self.embed(cx, ids, info)?;
            let info = &self.info_of_blocks(ids, info);
            for block in &self.blocks {
                x = block.evaluate_dyn(cx, &x, info, None)?;
            }
            let logits = self.head_of(cx, x)?;
            self.logits_of(ids, logits)
        })
    }

    /// Returns the loss of [`loss_with_info`](Self::loss_with_info), and keeps nothing for a backward pass: see [`logits`](Self::logits).
    ///
    /// # Errors
    /// As [`loss_with_info`](Self::loss_with_info).
    pub fn evaluate(
        &self,
        cx: &mut Forward<'_>,
        ids: &Tensor,
        targets: &Tensor,
        options: CrossEntropyOptions,
        info: &SequenceInfo,
    ) -> Result<Tensor> {
        cx.attempt(|cx| {
            self.check_targets(ids, targets, info)?;
            let logits = self.logits(cx, ids, info)?;
            Ok(self.cross_entropy(&logits, targets, &options)?.0)
        })
    }

    /// Creates an empty cache for [`extend`](Self::extend): `batch` rows with room for `capacity` tokens each. `dtype` is that
    /// in which the blocks compute: the parameters', or the scope's `compute_dtype`.
    ///
    /// # Errors
    /// A model with tensor parallelism; a size of 0; a capacity greater than `max_seq_length`; a dtype that is not a float; the device is
    /// out of memory.
    pub fn kv_cache(&self, batch: usize, capacity: usize, dtype: DType) -> Result<KvCache> {
        if let Some(ranks) = &self.ranks {
            return Err(Error::Option {
                part: self.path.to_string(),
                option: "tensor_parallel",
                value: format!("{} ranks", ranks.group().world_size()),
                remedy: "generation needs a whole model on each rank: load its checkpoint or folder without tensor parallelism"
                    .to_owned(),
            });
        }
        init::check_positive(&self.path, &[("batch", batch), ("capacity", capacity)])?;
        init::check_params_dtype(&self.path, dtype)?;
        if capacity > self.max_seq_length {
            return Err(Error::Option {
                part: self.path.to_string(),
                option: "capacity",
                value: capacity.to_string(),
                remedy: format!("expected at most {}, the max_seq_length", self.max_seq_length),
            });
        }
        let heads = self.blocks.iter().map(|block| block.kv_heads_dyn());
        KvCache::new([batch, capacity], heads, dtype, self.embedding.weight().device())
    }

    /// Reads new tokens behind those of a cache, adds them to it, and returns the logits `[batch, vocab_size]` of each row's last
    /// new token.
    ///
    /// `ids` is i32 `[batch, seq]`. Row b has `counts[b]` new tokens, at most `seq`; the other ids of a row are padding at its end,
    /// which must be valid ids. A row with a count of 0 stays as it is, and its logits mean nothing. Positions follow from the
    /// cache's lengths. The logits are those of [`logits`](Self::logits) for the whole sequence, up to rounding, and under recipes
    /// with scales of whole tensors up to those. Padding enters each block as 0, so that its ids do not matter. With `fp8_mha`
    /// and without RoPE, attention behind a cache runs in high precision. [`KvCache`] has an example.
    ///
    /// # Errors
    /// Ids of another number of rows than the cache, not i32, on another device or out of range; a count greater than `seq`; a row
    /// whose capacity is exceeded; a cache of another dtype, or with tokens that another model or other weights have read; a block
    /// whose attention is not causal; a head of your own whose output is not `[batch, 1, vocab_size]`. The cache holds the same tokens
    /// as before then. A GPU reports ids out of range at the next synchronizing call. By then the cache counts these tokens, so
    /// [`truncate`](KvCache::truncate) it.
    pub fn extend(
        &self,
        cx: &mut Forward<'_>,
        ids: &Tensor,
        counts: &[usize],
        cache: &mut KvCache,
    ) -> Result<Tensor> {
        self.extend_by(cx, ids, counts, cache, true)
    }

    /// Does as [`extend`](Self::extend), but returns the logits of all new tokens, `[batch, seq, vocab_size]`. Those of padding mean
    /// nothing.
    ///
    /// # Errors
    /// As [`extend`](Self::extend).
    pub fn extend_all(
        &self,
        cx: &mut Forward<'_>,
        ids: &Tensor,
        counts: &[usize],
        cache: &mut KvCache,
    ) -> Result<Tensor> {
        self.extend_by(cx, ids, counts, cache, false)
    }

    fn extend_by(
        &self,
        cx: &mut Forward<'_>,
        ids: &Tensor,
        counts: &[usize],
        cache: &mut KvCache,
        only_last: bool,
    ) -> Result<Tensor> {
        cx.attempt(|cx| {
            let device = self.embedding.weight().device();
            let sizes = match **ids.shape() {
                [batch, seq] if seq > 0 => Some([batch, seq]),
                _ => None,
            };
            let sizes =
                self.integers("ids", ids)?.sizes(sizes, || "[batch, seq], seq at least 1".to_owned())?;
            self.check_cache(cache)?;
            cache.expect_weights(&self.path, self.version())?;
            let step = cache.step(&self.path, sizes, counts, device)?;
            let (x, _) = self.embed(cx, ids, &step.info)?;
            let mut mask = step.mask(&x)?;
            let mut x = masked(x, &mut mask)?;
            for (block, cached) in self.blocks.iter().zip(cache.layers(&step, counts)) {
                x = masked(block.evaluate_dyn(cx, &x, &step.info, Some(cached))?, &mut mask)?;
            }
            let [batch, seq] = sizes;
            if only_last {
                let hidden = x.shape().last_dim();
                let rows = x.reshape([batch * seq, hidden])?;
                let last = if seq == 1 { rows } else { ops::embedding(&step.last, &rows)? };
                x = last.reshape([batch, 1, hidden])?;
            }
            let mut logits = self.head_of(cx, x)?;
            if only_last {
                logits = logits.reshape(self.rows_of(batch, &logits)?)?;
            }
            cache.advance(counts);
            Ok(logits)
        })
    }

    /// Returns the shape of the logits of one position in each row. A head of the user's own may return something else.
    fn rows_of(&self, batch: usize, logits: &Tensor) -> Result<[usize; 2]> {
        match **logits.shape() {
            [rows, 1, vocabulary] if rows == batch => Ok([batch, vocabulary]),
            _ => Err(Error::Option {
                part: self.path.to_string(),
                option: "head",
                value: format!("an output of shape {}", logits.shape()),
                remedy: format!(
                    "expected [{batch}, 1, vocab_size], for an input of one position in each row"
                ),
            }),
        }
    }

    /// Computes the logits of the blocks' output.
    fn head_of(&self, cx: &mut Forward<'_>, x: Tensor) -> Result<Tensor> {
        let (y, _) = self.norm.forward(&self.input_of_norm(cx, x)?)?;
        Ok(self.head.forward(cx, &self.embedding, &y, self.ranks.as_ref())?.0)
    }

    /// The version of all weights. Those of parameters are unique in the process and rise, so any change gives another one.
    fn version(&self) -> u64 {
        let mut newest = 0;
        self.visit(&mut |parameter| newest = newest.max(parameter.version()));
        newest
    }

    /// Refuses a cache of another model.
    fn check_cache(&self, cache: &KvCache) -> Result<()> {
        let device = self.embedding.weight().device();
        let fits = |(keys, heads): (&Tensor, [usize; 2])| {
            keys.device().is_same(device) && keys.shape().get(2..) == Some(&heads[..])
        };
        let heads = self.blocks.iter().map(|block| block.kv_heads_dyn());
        if cache.layouts().len() == self.blocks.len()
            && cache.capacity() <= self.max_seq_length
            && cache.layouts().zip(heads).all(fits)
        {
            return Ok(());
        }
        let found = cache.layouts().next().map_or(Shape::from([0]), |keys| *keys.shape());
        Err(Error::Option {
            part: self.path.to_string(),
            option: "kv_cache",
            value: format!("{} blocks with keys {found}", cache.layouts().len()),
            remedy: "it belongs to another model: create it with Gpt::kv_cache of this one".to_owned(),
        })
    }
}

/// Multiplies by a mask, which takes on the dtype of `x`.
fn masked(x: Tensor, mask: &mut Option<Tensor>) -> Result<Tensor> {
    let Some(mask) = mask else { return Ok(x) };
    if mask.dtype() != x.dtype() {
        *mask = ops::cast(mask, x.dtype())?;
    }
    Ok(ops::mul(&x, mask)?)
}
