//! The options of a language model.

use crate::{InitOptions, Result, TransformerLayerOptions, init};

/// Options of a [`Gpt`](crate::Gpt). `vocab_size`, `num_layers` and, in `layer`, the two sizes and `attention.num_attention_heads`
/// are required; the other fields have defaults.
///
/// See [`Gpt`](crate::Gpt) for an example.
#[derive(Debug, Clone, Default)]
pub struct GptOptions {
    /// The number of token ids, which run from 0 to `vocab_size − 1`. Required.
    pub vocab_size: usize,
    /// The number of transformer blocks. Required.
    pub num_layers: usize,
    /// The options of each block. Required, because its sizes are. The rest of the model follows them, too:
    ///
    /// | field | in a model |
    /// |---|---|
    /// | `hidden_size`, `params_dtype`, `norm` | also those of the embedding, of the norm before the head, and of the head |
    /// | `attention.max_seq_length` | the length of the longest sequence. Default: 2048 |
    /// | `attention.causal` | must be true, the default |
    /// | `attention.rope` | set by the model: true, unless it has `learned_positions` |
    /// | `attention.window` | of the blocks for which `sliding_windows` has none |
    /// | `tensor_parallel` | also cuts the embedding and the head, each rank with some rows of the vocabulary, and the logits |
    /// | `init.init_std` | also of the embedding, of learned positions and of the head |
    /// | `init.output_layer_init_std` | divided by `√(2 · num_layers)`, as the residual branches add up |
    pub layer: TransformerLayerOptions,
    /// Whether the model adds a table of learned positions, `<path>.position.weight` `[max_seq_length, hidden_size]`, to the
    /// embedding in place of RoPE, as GPT-2 does. Default: false.
    pub learned_positions: bool,
    /// The number of positions that a position sees in each block's attention, itself included: one number for each block,
    /// `None` for `layer.attention.window`, which has no limit by default. Default: empty, `None` for all blocks.
    pub sliding_windows: Vec<Option<usize>>,
    /// The probability that an element of the embedding is dropped in training, at least 0 and less than 1, as in GPT-2.
    /// Default: 0.
    pub embedding_dropout: f32,
    /// Whether the head is the table of the embedding, so that the model has no `<path>.head.weight`. The table's gradient is the
    /// sum of both uses. Default: false.
    pub tie_word_embeddings: bool,
}

impl GptOptions {
    /// Returns the options of the block at `index`, which has its own window.
    #[must_use]
    pub fn block(&self, index: usize) -> TransformerLayerOptions {
        let mut layer = self.layer.clone();
        layer.attention.rope = !self.learned_positions;
        if let Some(window) = self.sliding_windows.get(index).copied().flatten() {
            // A query sees itself, too.
            layer.attention.window = (Some(window.saturating_sub(1)), None);
        }
        let InitOptions { init_std, output_layer_init_std } = layer.init;
        let output_layer_init_std = output_layer_init_std / (2.0 * self.num_layers as f32).sqrt();
        layer.init = InitOptions { init_std, output_layer_init_std };
        layer
    }

    /// Refuses sizes of 0, windows that do not belong to the layers, and attention that sees the tokens to be predicted.
    pub(super) fn check(&self, path: &str) -> Result<()> {
        let Self { vocab_size, num_layers, sliding_windows: windows, .. } = self;
        let attention = &self.layer.attention;
        let sizes = [
            ("vocab_size", *vocab_size),
            ("num_layers", *num_layers),
            ("max_seq_length", attention.max_seq_length),
        ];
        init::check_positive(path, &sizes)?;
        let refuse = |option, value, remedy| {
            Err(crate::Error::Option { part: path.to_owned(), option, value, remedy })
        };
        if !(windows.is_empty() || windows.len() == *num_layers) || windows.contains(&Some(0)) {
            let remedy = format!("expected none, or one of at least 1 for each of the {num_layers} layers");
            return refuse("sliding_windows", format!("{windows:?}"), remedy);
        }
        if !attention.causal {
            let remedy =
                "a language model must not see the tokens that it predicts: expected true".to_owned();
            return refuse("causal", "false".to_owned(), remedy);
        }
        Ok(())
    }
}
