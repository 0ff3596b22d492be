//! The parts of a language model, and blocks and heads of the user's own in it.

use super::Gpt;
use super::head::Head;
#[cfg(doc)]
use crate::TensorParallel;
use crate::{DynBlock, DynModule, Embedding, Error, Linear, Parameter, Result, TransformerLayer};
use fp8_recipe::{SlotRole, Slots as _};
use std::collections::BTreeSet;

impl Gpt {
    /// Replaces each block by what `make` returns for its place and the block, such as a block of your own around it.
    ///
    /// Weights stay as they are, so a pretrained model can be extended. Create [`Scaling`](crate::fp8_recipe::Scaling) and optimizer
    /// after this, since they know the parameters and slots of a model by their names. A checkpoint of the original model is loaded
    /// before, or with [`load_parameters_with_options`](crate::checkpoint::load_parameters_with_options) afterwards, as long as the wrapped blocks
    /// keep their paths. [`Block`](crate::Block) has an example.
    ///
    /// With sequence parallelism, blocks take and return this rank's tokens, `[tokens / ranks, hidden_size]`, and
    /// [`TensorParallel::place_by_tokens`] marks the layers in them that have no tensor parallelism of their own.
    ///
    /// # Errors
    /// Those of `make`; a block that is no [`TransformerLayer`] any more, because it was replaced before; parameters or slots of one
    /// name in two places; a parameter on another device than the model; with sequence parallelism, one without a placement.
    pub fn with_blocks(
        mut self,
        mut make: impl FnMut(usize, TransformerLayer) -> Result<Box<dyn DynBlock>>,
    ) -> Result<Self> {
        let blocks = std::mem::take(&mut self.blocks);
        for (index, block) in blocks.into_iter().enumerate() {
            let block = block.into_any().downcast::<TransformerLayer>().map_err(|_| Error::Option {
                part: format!("{}.blocks.{index}", self.path),
                option: "with_blocks",
                value: "a block of another type".to_owned(),
                remedy: "it was replaced before: replace all blocks at once".to_owned(),
            })?;
            self.blocks.push(make(index, *block)?);
        }
        self.checked("a parameter of a block")
    }

    /// Replaces the head by what `make` returns for it, such as one with other outputs, or an adapter around it. `make` gets `None`
    /// from a model with `tie_word_embeddings`, whose table then serves the embedding alone.
    ///
    /// A head takes `[batch, seq, hidden_size]`, the normalized output of the blocks. What it returns are the logits of
    /// [`forward`](Self::forward), for which [`backward`](Self::backward) takes the gradient; [`loss`](Self::loss) and generation
    /// need `[batch, seq, classes]`. It runs under the scope's recipe, as any layer of yours does: for high precision, as the head
    /// it replaces, it calls [`Forward::disabled`](crate::fp8_recipe::Forward::disabled). As after
    /// [`with_blocks`](Self::with_blocks), create `Scaling` and optimizer afterwards.
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
    /// // Three labels for each token, in place of the vocabulary.
    /// let labels = LinearOptions { in_features: 32, out_features: 3, ..Default::default() };
    /// let model = Gpt::new("gpt", &options, &device, &mut fp8_nn::rand::rng())?
    ///     .with_head(|_| Ok(Box::new(Linear::new("gpt.labels", labels, &device, &mut fp8_nn::rand::rng())?)))?;
    /// let mut scaling = Scaling::new(&model, &device)?;
    /// let ids = Tensor::from_vec(vec![1i32, 2, 3, 4], [1, 4], &device)?;
    /// let logits = model.logits(&mut scaling.eval(&Recipe::off())?, &ids, &SequenceInfo::default())?;
    /// assert_eq!(**logits.shape(), [1, 4, 3]);
    /// assert!(model.head().is_none() && model.own_head().is_some());
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of `make`; a head that was replaced before; parameters or slots of one name in two places; a parameter on another
    /// device than the model.
    pub fn with_head(
        mut self,
        make: impl FnOnce(Option<Linear>) -> Result<Box<dyn DynModule>>,
    ) -> Result<Self> {
        if self.ranks.is_some() {
            return Err(Error::Option {
                part: self.path.to_string(),
                option: "with_head",
                value: "a head of the user's own".to_owned(),
                remedy: "ranks have parts of the logits (tensor parallelism), which only the model's own heads compute".to_owned(),
            });
        }
        let before = match self.head {
            Head::Tied => None,
            Head::Linear(head) => Some(head),
            Head::Own(_) => {
                return Err(Error::Option {
                    part: self.path.to_string(),
                    option: "with_head",
                    value: "a head of the user's own".to_owned(),
                    remedy: "it was replaced before: replace it once".to_owned(),
                });
            }
        };
        self.head = Head::Own(make(before)?);
        self.checked("a parameter of the head")
    }

    /// Refuses parts that do not fit together.
    fn checked(self, argument: &'static str) -> Result<Self> {
        let mut twice = None;
        let mut slots = BTreeSet::new();
        self.slots(&mut |slot| {
            if !slots.insert(slot.name().clone()) {
                twice.get_or_insert_with(|| slot.name().clone());
            }
        });
        let (mut names, device) = (BTreeSet::new(), self.embedding.weight().device());
        for parameter in crate::parameters(&self) {
            if !names.insert(parameter.name()) {
                return Err(Error::DuplicateParameter(parameter.name().clone()));
            }
            if self.sequence_parallel().is_some() && parameter.tensor_parallel().is_none() {
                return Err(Error::Option {
                    part: self.path.to_string(),
                    option: "with_blocks",
                    value: format!("`{}` without a placement", parameter.name()),
                    remedy: "with sequence parallelism, each rank has a part of its gradient: call TensorParallel::place_by_tokens with \
                             the layer, or Parameter::placed"
                        .to_owned(),
                });
            }
            if !parameter.device().is_same(device) {
                return Err(Error::ArgumentDevice {
                    layer: self.path.to_string(),
                    argument,
                    found: parameter.device().to_string(),
                    expected: device.to_string(),
                });
            }
        }
        match twice {
            Some(slot) => Err(fp8_recipe::Error::DuplicateSlot(slot).into()),
            None => Ok(self),
        }
    }

    /// Returns the blocks, first to last.
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = &dyn DynBlock> {
        self.blocks.iter().map(|block| &**block)
    }

    /// Returns the block at `index` if it is of type `B`: a [`TransformerLayer`], unless [`with_blocks`](Self::with_blocks) has
    /// replaced it.
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
    /// let names: Vec<_> = model.block::<TransformerLayer>(1).into_iter().map(|block| {
    ///     (block.attention().qkv().weight().name().to_string(), **block.mlp().fc1().linear().weight().shape() == [128, 32])
    /// }).collect();
    /// assert_eq!(names, [("gpt.blocks.1.attention.qkv.weight".to_owned(), true)]);
    /// assert!(model.block::<TransformerLayer>(2).is_none());
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    pub fn block<B: 'static>(&self, index: usize) -> Option<&B> {
        self.blocks.get(index)?.as_any().downcast_ref()
    }

    /// Returns the block at `index` mutably if it is of type `B`, for settings of your own blocks. Values of parameters are set by
    /// [`Parameter::set`], on what [`parameters_mut`](crate::parameters_mut) returns.
    pub fn block_mut<B: 'static>(&mut self, index: usize) -> Option<&mut B> {
        self.blocks.get_mut(index)?.as_any_mut().downcast_mut()
    }

    /// Returns the embedding, whose table also serves as the head of a model with `tie_word_embeddings`.
    pub fn embedding(&self) -> &Embedding {
        &self.embedding
    }

    /// Returns the table of learned positions, if the model has one in place of RoPE.
    pub fn position(&self) -> Option<&Embedding> {
        self.position.as_ref()
    }

    /// Returns γ of the norm behind the blocks, `[hidden_size]`.
    pub fn norm_weight(&self) -> &Parameter {
        &self.norm.weight
    }

    /// Returns β of the norm behind the blocks, `[hidden_size]`, if it is a LayerNorm.
    pub fn norm_bias(&self) -> Option<&Parameter> {
        self.norm.bias.as_ref()
    }

    /// Returns the head; `None` with `tie_word_embeddings`, and if [`with_head`](Self::with_head) has replaced it.
    pub fn head(&self) -> Option<&Linear> {
        self.head.linear()
    }

    /// Returns the head that [`with_head`](Self::with_head) has put in, whose example reads one.
    pub fn own_head(&self) -> Option<&dyn DynModule> {
        match &self.head {
            Head::Own(head) => Some(&**head),
            Head::Tied | Head::Linear(_) => None,
        }
    }

    /// Returns how many GEMMs of a training step, forward and backward, run in FP8 under a recipe that overrides none, if no weight
    /// is frozen: three for each weight of the blocks, and of a head of your own (but not of the original head inside it).
    pub fn fp8_gemms_per_step(&self) -> usize {
        let mut weights = 0;
        self.blocks.iter().for_each(|block| {
            block.slots(&mut |slot| weights += usize::from(slot.role() == SlotRole::Weight));
        });
        if let Some(head) = self.own_head() {
            head.visit(&mut |parameter| weights += usize::from(parameter.weight_slot().is_some()));
        }
        3 * weights
    }
}
