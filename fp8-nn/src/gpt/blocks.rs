//! The parts of a language model, and blocks of the user's own in it.

use super::Gpt;
use crate::{DynBlock, Embedding, Error, Linear, Parameter, Result, TransformerLayer};
use fp8_recipe::SlotRole;
use std::collections::BTreeSet;

impl Gpt {
    /// Replaces each block by what `make` returns for its place and the block, such as a block of your own around it.
    ///
    /// Weights stay as they are, so a pretrained model can be extended. Create [`Scaling`](crate::fp8_recipe::Scaling) and optimizer
    /// after this, since they know the parameters and slots of a model by their names. A checkpoint of the original model is loaded
    /// before, or with [`load_parameters_with`](crate::checkpoint::load_parameters_with) afterwards, as long as the wrapped blocks
    /// keep their paths. [`Block`](crate::Block) has an example.
    ///
    /// # Errors
    /// Those of `make`; a block that is no [`TransformerLayer`] any more, because it was replaced before; parameters or slots of one
    /// name in two places; a parameter on another device than the model.
    pub fn with_blocks(
        mut self,
        mut make: impl FnMut(usize, TransformerLayer) -> Result<Box<dyn DynBlock>>,
    ) -> Result<Self> {
        let blocks = std::mem::take(&mut self.blocks);
        for (index, block) in blocks.into_iter().enumerate() {
            let block = block.into_any().downcast::<TransformerLayer>().map_err(|_| Error::Option {
                layer: format!("{}.blocks.{index}", self.path),
                option: "with_blocks",
                value: "a block of another type".to_owned(),
                remedy: "it was replaced before: replace all blocks at once".to_owned(),
            })?;
            self.blocks.push(make(index, *block)?);
        }
        let (mut names, device) = (BTreeSet::new(), self.embedding.weight().device());
        for parameter in crate::parameters(&self) {
            if !names.insert(parameter.name()) {
                return Err(Error::DuplicateParameter(parameter.name().clone()));
            }
            if !parameter.device().is_same(device) {
                return Err(Error::ArgumentDevice {
                    layer: self.path.to_string(),
                    argument: "a parameter of a block",
                    found: parameter.device().to_string(),
                    expected: device.to_string(),
                });
            }
        }
        Ok(self)
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
    ///     vocab_size: 16, num_layers: 2, hidden_size: 32, num_attention_heads: 4, max_seq_length: 8, ..Default::default()
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

    /// Returns the head; `None` with `tie_word_embeddings`.
    pub fn head(&self) -> Option<&Linear> {
        self.head.as_ref()
    }

    /// Returns how many GEMMs of a training step, forward and backward, run in FP8 under a recipe that overrides none, if no weight
    /// is frozen: three for each weight of the blocks.
    pub fn fp8_gemms_per_step(&self) -> usize {
        let mut weights = 0;
        self.blocks.iter().for_each(|block| {
            block.slots(&mut |slot| weights += usize::from(slot.role() == SlotRole::Weight));
        });
        3 * weights
    }
}
