//! The keys and values of tokens that a model has read.

use crate::{Error, Result, SequenceInfo};
use fp8_kernels::ops::{self, Sequences};
use fp8_kernels::{DType, Device, Shape, Tensor};

/// The keys and values of the tokens that a [`Gpt`](crate::Gpt) has read, for [`Gpt::extend`](crate::Gpt::extend).
///
/// It has a row for each sequence of a batch, with room for `capacity` tokens. The memory is allocated at once, by
/// [`Gpt::kv_cache`](crate::Gpt::kv_cache): for each block and row, keys and values of `capacity` tokens. Rows have lengths
/// of their own.
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
/// let mut cache = model.kv_cache(2, 8, DType::F32)?;
/// let ids = Tensor::from_vec(vec![1i32, 2, 3, 4, 5, 0], [2, 3], &device)?; // the last one is padding
/// let mut cx = scaling.eval(&DelayedScaling::default().into())?;
/// let logits = model.extend(&mut cx, &ids, &[3, 2], &mut cache)?;
/// assert_eq!((logits.shape().to_vec(), cache.lengths()), (vec![2, 16], &[3, 2][..]));
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct KvCache {
    /// Keys and values of each block, `[batch, capacity, groups, head_dim]`.
    layers: Vec<[Tensor; 2]>,
    capacity: usize,
    lengths: Vec<usize>,
    /// The number of positions of each row that may be other than 0. Those behind the row's length belong to tokens that
    /// were removed, or to a step that failed.
    written: Vec<usize>,
    /// The version of the weights that have read the tokens.
    weights: u64,
}

impl KvCache {
    /// An empty cache of blocks with so many key and value heads of this size.
    pub(crate) fn new(
        [batch, capacity]: [usize; 2],
        heads: impl Iterator<Item = [usize; 2]>,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let layer = |[groups, head_dim]: [usize; 2]| {
            let zeros = || Tensor::zeros([batch, capacity, groups, head_dim], dtype, device);
            Ok([zeros()?, zeros()?])
        };
        let layers = heads.map(layer).collect::<Result<_>>()?;
        Ok(Self { layers, capacity, lengths: vec![0; batch], written: vec![0; batch], weights: 0 })
    }

    /// Returns how many tokens each row has room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns how many tokens each row holds.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// Removes all tokens. The memory is kept.
    pub fn clear(&mut self) {
        self.lengths.fill(0);
    }

    /// Keeps the first `length` tokens of a row, or all if it has fewer, so that another continuation can follow. A row that
    /// does not exist is ignored.
    pub fn truncate(&mut self, row: usize, length: usize) {
        if let Some(row) = self.lengths.get_mut(row) {
            *row = length.min(*row);
        }
    }

    /// Refuses a cache whose tokens were read with other weights than those of this version. Errors name the model at `path`.
    pub(crate) fn expect_weights(&mut self, path: &str, version: u64) -> Result<()> {
        if self.lengths.iter().all(|&length| length == 0) {
            self.weights = version;
        }
        if self.weights == version {
            return Ok(());
        }
        Err(Error::Option {
            part: path.to_owned(),
            option: "kv_cache",
            value: "tokens computed with other weights".to_owned(),
            remedy: "another model computed them, or this one has changed since: clear the cache".to_owned(),
        })
    }

    /// Checks that each row has room for its new tokens, of which there are at most `seq`. Errors name the model at `path`.
    pub(crate) fn step(
        &self,
        path: &str,
        [batch, seq]: [usize; 2],
        counts: &[usize],
        device: &Device,
    ) -> Result<Step> {
        let refuse = |option, value: String, remedy: String| {
            Err(Error::Option { part: path.to_owned(), option, value, remedy })
        };
        let rows = self.lengths.len();
        if batch != rows || counts.len() != rows {
            let remedy = format!("the cache has {rows} rows: give as many rows of ids, and a count for each");
            return refuse("ids and counts", format!("{batch} rows and {} counts", counts.len()), remedy);
        }
        if let Some(count) = counts.iter().find(|&&count| count > seq) {
            return refuse("counts", count.to_string(), format!("expected at most {seq}, the ids of a row"));
        }
        for (row, (length, count)) in self.lengths.iter().zip(counts).enumerate() {
            if length + count > self.capacity {
                let value = format!("{length} tokens in row {row}");
                let remedy = format!(
                    "{count} more do not fit into its capacity of {}: clear it, or create a larger one",
                    self.capacity
                );
                return refuse("cache", value, remedy);
            }
        }
        let integers = |values: Vec<usize>, shape: Shape| {
            Tensor::from_vec::<i32>(values.into_iter().map(|value| value as i32).collect(), shape, device)
        };
        let per_row = Shape::from([batch]);
        let totals = self.lengths.iter().zip(counts).map(|(length, count)| length + count).collect();
        // Padding has a position, too, which must be one of the tables'.
        let last = self.capacity.saturating_sub(1);
        let positions =
            self.lengths.iter().flat_map(|&start| (start..start + seq).map(move |at| at.min(last)));
        let counts_of_rows = integers(counts.to_vec(), per_row)?;
        let is_real = |count: usize| (0..seq).map(move |at| usize::from(at < count));
        let is_padded = counts.iter().any(|&count| count < seq);
        let real = is_padded
            .then(|| integers(counts.iter().copied().flat_map(is_real).collect(), [batch, seq].into()));
        let leftovers: Vec<usize> =
            self.written.iter().zip(&self.lengths).map(|(written, length)| written - length).collect();
        let most = leftovers.iter().copied().max().unwrap_or_default();
        Ok(Step {
            real: real.transpose()?,
            leftovers: if most == 0 { None } else { Some((most, integers(leftovers, per_row)?)) },
            starts: integers(self.lengths.clone(), per_row)?,
            info: SequenceInfo {
                sequences: Sequences::Padded {
                    queries: Some(counts_of_rows.clone()),
                    keys: Some(integers(totals, per_row)?),
                },
                positions: Some(integers(positions.collect(), Shape::from([batch, seq]))?),
                batch_and_length: None,
            },
            counts: counts_of_rows,
            last: integers(
                counts.iter().enumerate().map(|(row, count)| row * seq + count.saturating_sub(1)).collect(),
                per_row,
            )?,
        })
    }

    /// Each block's part, as it extends it by so many tokens of each row in this step.
    pub(crate) fn layers<'a>(
        &'a mut self,
        step: &'a Step,
        counts: &[usize],
    ) -> impl Iterator<Item = CachedLayer<'a>> {
        for ((written, length), count) in self.written.iter_mut().zip(&self.lengths).zip(counts) {
            *written = (*written).max(length + count);
        }
        self.layers.iter_mut().map(|[keys, values]| CachedLayer { keys, values, step })
    }

    /// Returns the shape and dtype of each block's keys.
    pub(crate) fn layouts(&self) -> impl ExactSizeIterator<Item = &Tensor> {
        self.layers.iter().map(|[keys, _]| keys)
    }

    /// Counts the tokens that every block has added.
    pub(crate) fn advance(&mut self, counts: &[usize]) {
        self.lengths.iter_mut().zip(counts).for_each(|(length, count)| *length += count);
        // Every block has removed what was behind them.
        self.written.copy_from_slice(&self.lengths);
    }
}

/// The new tokens of a step, the same for all blocks.
#[derive(Debug)]
pub(crate) struct Step {
    /// The number of tokens that each row has before the step, i32 `[batch]`.
    starts: Tensor,
    /// The number of new tokens of each row, i32 `[batch]`.
    counts: Tensor,
    pub(crate) info: SequenceInfo,
    /// The last real position of each row among `[batch · seq]`, i32 `[batch]`; the first one of a row that has none.
    pub(crate) last: Tensor,
    /// 1 for real tokens and 0 for padding, i32 `[batch, seq]`; `None` without padding.
    real: Option<Tensor>,
    /// The positions behind a row's tokens that may be other than 0: the most of any row, and their number for each row,
    /// i32 `[batch]`. `None` if all are 0.
    leftovers: Option<(usize, Tensor)>,
}

impl Step {
    /// Returns the factors of `x` `[batch, seq, hidden]` that replace the rows of padding by 0, so that scales of whole tensors do
    /// not depend on them; `None` without padding.
    pub(crate) fn mask(&self, x: &Tensor) -> Result<Option<Tensor>> {
        let Some(real) = &self.real else { return Ok(None) };
        let hidden = x.shape().last_dim();
        let rows = [0.0f32, 1.0].into_iter().flat_map(|value| std::iter::repeat_n(value, hidden)).collect();
        let rows = ops::cast(&Tensor::from_vec::<f32>(rows, [2, hidden], x.device())?, x.dtype())?;
        Ok(Some(ops::embedding(real, &rows)?))
    }
}

/// The part of a [`KvCache`] that belongs to one block, in one step. A [`Block`](crate::Block) passes it to the block or the
/// [`MultiheadAttention`](crate::MultiheadAttention) inside it, or [appends](Self::append) to it for an attention of its own:
///
/// ```
/// use fp8_nn::prelude::*;
/// use fp8_nn::fp8_kernels::ops::{AttentionSaved, Diagonal};
/// use fp8_nn::LinearSaved;
///
/// /// Attention of one head, whose queries and keys are its input.
/// #[derive(Debug)]
/// struct Attend {
///     value: Linear,
/// }
/// composite!(Attend { value });
///
/// impl Attend {
///     /// Returns the input and the values, each as one head `[batch, seq, 1, size]`.
///     fn heads(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<([Tensor; 2], LinearSaved)> {
///         let (v, saved) = self.value.forward(cx, x)?;
///         let &[batch, seq, size] = &**x.shape() else { unreachable!("Gpt passes [batch, seq, hidden_size]") };
///         Ok(([x.reshape([batch, seq, 1, size])?, v.reshape([batch, seq, 1, size])?], saved))
///     }
/// }
///
/// impl Module for Attend {
///     type Saved = (LinearSaved, [Tensor; 3], AttentionSaved);
///
///     fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, Self::Saved)> {
///         let ([q, v], value) = self.heads(cx, x)?;
///         let (o, saved) = ops::attention(&q, &q, &v, &Default::default(), ops::ScoreOptions::default())?;
///         Ok((o.reshape(*x.shape())?, (value, [q, v, o], saved)))
///     }
///     fn backward(&mut self, cx: &mut Backward<'_>, (value, [q, v, o], saved): Self::Saved, dy: &Tensor) -> Result<Tensor> {
///         let options = ops::ScoreOptions::default();
///         let d_o = dy.reshape(*o.shape())?;
///         let (dq, dk, dv) = ops::attention_backward(&d_o, &q, &q, &v, &o, &saved, &Default::default(), options)?;
///         let dx = self.value.backward(cx, value, &dv.reshape(*dy.shape())?)?;
///         Ok(ops::add(&ops::add(&dq, &dk)?.reshape(*dy.shape())?, &dx)?)
///     }
/// }
///
/// impl Block for Attend {
///     fn evaluate(
///         &self,
///         cx: &mut Forward<'_>,
///         x: &Tensor,
///         info: &SequenceInfo,
///         cache: Option<CachedLayer<'_>>,
///     ) -> Result<Tensor> {
///         let ([q, v], _) = self.heads(cx, x)?;
///         let (k, v) = match cache {
///             Some(cache) => cache.append("attend", &q, &v)?,
///             None => (q.clone(), v),
///         };
///         // The last query sees the last key: those before it are in the cache.
///         let options = ops::ScoreOptions { diagonal: Diagonal::BottomRight, ..Default::default() };
///         Ok(ops::attention(&q, &k, &v, &info.sequences, options)?.0.reshape(*x.shape())?)
///     }
///     fn kv_heads(&self) -> [usize; 2] {
///         [1, self.value.weight().shape()[0]]
///     }
/// }
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
/// let square = LinearOptions { in_features: 32, out_features: 32, ..Default::default() };
/// let model = Gpt::new("gpt", &options, &device, &mut fp8_nn::rand::rng())?.with_blocks(|index, _| {
///     let value = Linear::new(&format!("gpt.blocks.{index}.value"), square.clone(), &device, &mut fp8_nn::rand::rng())?;
///     Ok(Box::new(Attend { value }))
/// })?;
/// let mut scaling = Scaling::new(&model, &device)?;
/// let mut cx = scaling.eval(&Recipe::off())?;
/// let ids = Tensor::from_vec(vec![1i32, 2, 3, 4], [1, 4], &device)?;
/// let whole = model.logits(&mut cx, &ids, &SequenceInfo::default())?.to_f32_vec()?;
/// let mut cache = model.kv_cache(1, 8, DType::F32)?;
/// for (index, token) in [1i32, 2, 3, 4].into_iter().enumerate() {
///     let token = Tensor::from_vec(vec![token], [1, 1], &device)?;
///     let logits = model.extend(&mut cx, &token, &[1], &mut cache)?.to_f32_vec()?;
///     for (one, other) in logits.iter().zip(&whole[16 * index..]) {
///         assert!((one - other).abs() < 1e-4);
///     }
/// }
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct CachedLayer<'a> {
    keys: &'a mut Tensor,
    values: &'a mut Tensor,
    step: &'a Step,
}

impl CachedLayer<'_> {
    /// Appends new keys and values, `[batch, seq, groups, head_dim]` as [`Block::kv_heads`](crate::Block::kv_heads) says, or
    /// [`Heads`](ops::Heads) of larger tensors, and returns
    /// all, `[batch, capacity, groups, head_dim]`. The `info` that [`Block::evaluate`](crate::Block::evaluate) gets says how many
    /// of them are real. The others are 0. Errors name the path `layer`.
    ///
    /// The results share the cache's memory: drop them before the next step.
    ///
    /// # Errors
    /// Keys or values of another shape, dtype or device than the cache's.
    pub fn append<'a>(
        self,
        layer: &str,
        k: impl Into<ops::Heads<'a>>,
        v: impl Into<ops::Heads<'a>>,
    ) -> Result<(Tensor, Tensor)> {
        let Step { starts, counts, leftovers, .. } = self.step;
        let (k, v): (ops::Heads<'_>, ops::Heads<'_>) = (k.into(), v.into());
        for (cache, new, name) in [(&mut *self.keys, k, "keys"), (&mut *self.values, v, "values")] {
            let dtype = new.tensor().dtype();
            if cache.dtype() != dtype {
                return Err(Error::Option {
                    part: layer.to_owned(),
                    option: "kv_cache",
                    value: cache.dtype().to_string(),
                    remedy: format!("the layer computes in {dtype}: create the cache with that dtype"),
                });
            }
            let name = format!("{layer}.{name}");
            if let Some((most, leftovers)) = leftovers {
                let mut zeros = cache.shape().to_vec();
                zeros[1] = *most;
                let shape = Shape::from_slice(&zeros).unwrap_or(*cache.shape());
                let zeros = Tensor::zeros(shape, cache.dtype(), cache.device())?;
                ops::kv_cache_append(cache, &zeros, starts, Some(leftovers), &name)?;
            }
            ops::kv_cache_append(cache, new, starts, Some(counts), &name)?;
        }
        Ok((self.keys.clone(), self.values.clone()))
    }
}
