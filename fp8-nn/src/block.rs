//! Blocks of a language model, the user's own among them.

pub use crate::kv_cache::CachedLayer;
use crate::module::kind_of;
use crate::{DynModule, Error, Module, Result, SequenceInfo};
use fp8_kernels::Tensor;
use fp8_recipe::Forward;
use std::any::Any;

/// A [`Module`] that can be a block of a [`Gpt`](crate::Gpt): it takes and returns `[batch, seq, hidden_size]`, or with sequence
/// parallelism this rank's tokens, `[tokens / ranks, hidden_size]`.
///
/// [`Gpt::with_blocks`](crate::Gpt::with_blocks) puts blocks of your own into a model, usually around its [`TransformerLayer`]s.
/// Slots, checkpoints, optimizers, ranks and recorded steps find their parameters by [`Layer`](crate::Layer), as those of any layer.
/// The methods of this trait are for evaluation and generation. A block around another one passes them on:
///
/// ```
/// use fp8_nn::prelude::*;
///
/// /// A transformer block that adds half of what it computes.
/// #[derive(Debug)]
/// struct Half {
///     inner: TransformerLayer,
/// }
/// composite!(Half { inner });
///
/// fn mean(x: &Tensor, y: &Tensor) -> Result<Tensor> {
///     Ok(ops::scale(&ops::add(x, y)?, 0.5)?)
/// }
///
/// impl Module for Half {
///     type Saved = fp8_nn::TransformerLayerSaved;
///
///     fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, Self::Saved)> {
///         self.forward_with_info(cx, x, &SequenceInfo::default())
///     }
///     fn forward_with_info(&self, cx: &mut Forward<'_>, x: &Tensor, info: &SequenceInfo) -> Result<(Tensor, Self::Saved)> {
///         let (y, saved) = self.inner.forward_with_info(cx, x, info)?;
///         Ok((mean(x, &y)?, saved))
///     }
///     fn backward(&mut self, cx: &mut Backward<'_>, saved: Self::Saved, dy: &Tensor) -> Result<Tensor> {
///         mean(dy, &self.inner.backward(cx, saved, dy)?)
///     }
/// }
///
/// impl Block for Half {
///     fn evaluate(
///         &self,
///         cx: &mut Forward<'_>,
///         x: &Tensor,
///         info: &SequenceInfo,
///         cache: Option<CachedLayer<'_>>,
///     ) -> Result<Tensor> {
///         mean(x, &self.inner.evaluate(cx, x, info, cache)?)
///     }
///     fn kv_heads(&self) -> [usize; 2] {
///         self.inner.kv_heads()
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
/// let model = Gpt::new("gpt", &options, &device, &mut fp8_nn::rand::rng())?
///     .with_blocks(|_, inner| Ok(Box::new(Half { inner })))?;
/// assert!(model.block::<Half>(1).is_some());
/// # Ok::<(), fp8_nn::Error>(())
/// ```
///
/// [`TransformerLayer`]: crate::TransformerLayer
pub trait Block: Module + 'static {
    /// Returns the output of [`forward_with_info`](Module::forward_with_info), and keeps nothing for a backward pass. With a cache, the block
    /// continues the tokens in it: it passes the cache to the one attention that it contains.
    ///
    /// Default: the output of `forward_with_info`, for a block whose positions are independent of each other or that is given no cache.
    ///
    /// # Errors
    /// Those of `forward_with_info`; by default, a cache for a block that is not [positionwise](Module::is_positionwise).
    fn evaluate(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        info: &SequenceInfo,
        cache: Option<CachedLayer<'_>>,
    ) -> Result<Tensor> {
        if cache.is_some() && !self.is_positionwise() {
            return Err(Error::Option {
                part: kind_of::<Self>().to_owned(),
                option: "kv_cache",
                value: "a cache".to_owned(),
                remedy: "this block does not read one: implement Block::evaluate and Block::kv_heads"
                    .to_owned(),
            });
        }
        Ok(self.forward_with_info(cx, x, info)?.0)
    }

    /// Returns the number of key and value heads and the size of a head, which the cache has room for. Default: `[0, 0]`, for a block
    /// without attention.
    fn kv_heads(&self) -> [usize; 2] {
        [0, 0]
    }
}

/// An object-safe form of [`Block`], implemented for every `Block`, as [`DynModule`] is for every [`Module`]. [`Gpt`](crate::Gpt)
/// stores its blocks as `Box<dyn DynBlock>`.
///
/// ```
/// use fp8_nn::prelude::*;
///
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
/// let model = Gpt::new("gpt", &options, &Device::cpu(), &mut fp8_nn::rand::rng())?;
/// assert!(model.blocks().all(|block| block.as_any().is::<TransformerLayer>() && block.kv_heads_dyn() == [4, 8]));
/// # Ok::<(), fp8_nn::Error>(())
/// ```
pub trait DynBlock: DynModule {
    /// Calls [`Block::evaluate`].
    ///
    /// # Errors
    /// The errors of the block.
    fn evaluate_dyn(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        info: &SequenceInfo,
        cache: Option<CachedLayer<'_>>,
    ) -> Result<Tensor>;

    /// Calls [`Block::kv_heads`].
    fn kv_heads_dyn(&self) -> [usize; 2];

    /// Returns the block itself, to be downcast to its type.
    fn as_any(&self) -> &dyn Any;

    /// Returns the block itself, to be downcast to its type.
    fn as_any_mut(&mut self) -> &mut dyn Any;

    /// Returns the block itself, to be downcast to its type.
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
}

impl<B: Block> DynBlock for B {
    fn evaluate_dyn(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        info: &SequenceInfo,
        cache: Option<CachedLayer<'_>>,
    ) -> Result<Tensor> {
        self.evaluate(cx, x, info, cache)
    }

    fn kv_heads_dyn(&self) -> [usize; 2] {
        self.kv_heads()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
