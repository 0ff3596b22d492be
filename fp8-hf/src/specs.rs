//! The tensors of a model, by its configuration.

use super::config::Config;
use super::family::Condition::{Always, QkNorm, QkvBias, Untied};
use super::family::Extent::{
    HeadDim, Hidden, Intermediate, Keys, Positions, Queries, QueriesKeysValues, Vocab,
};
use super::family::{Extent, Family, Template, TensorSpec};
use fp8_kernels::Shape;

impl Config {
    /// Returns every tensor that a model of this configuration has, before quantization: in front of the layers, layer by
    /// layer, behind them. A tied model has no `lm_head.weight`.
    ///
    /// ```
    /// # use fp8_hf::{Config, TensorKind, TensorSpec};
    /// let config = Config::from_json(
    ///     r#"{"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
    ///         "num_attention_heads": 2}"#,
    /// )?;
    /// let tensors: Vec<TensorSpec> = config.tensors();
    /// assert_eq!((tensors[0].name.as_str(), &tensors[0].shape[..]), ("model.embed_tokens.weight", &[16, 8][..]));
    /// assert_eq!(tensors.iter().filter(|tensor| tensor.kind.is_linear()).count(), 2 * 7);
    /// assert_eq!(tensors.iter().filter(|tensor| tensor.kind == TensorKind::Qkv).count(), 2 * 3);
    /// # Ok::<(), fp8_hf::Error>(())
    /// ```
    #[must_use]
    pub fn tensors(&self) -> Vec<TensorSpec> {
        self.family.specs(self)
    }

    fn extent(&self, extent: Extent) -> usize {
        let queries = self.num_attention_heads * self.head_dim;
        let keys = self.num_key_value_heads * self.head_dim;
        match extent {
            Vocab => self.vocab_size,
            Positions => self.max_position_embeddings,
            Hidden => self.hidden_size,
            Intermediate => self.intermediate_size,
            Queries => queries,
            Keys => keys,
            QueriesKeysValues => queries + 2 * keys,
            HeadDim => self.head_dim,
        }
    }
}

impl Family {
    /// Returns every tensor of a model of this family, in the order of the computation.
    fn specs(&self, config: &Config) -> Vec<TensorSpec> {
        let mut specs = Vec::new();
        let is_needed = |template: &&Template| match template.condition {
            Always => true,
            Untied => !config.tie_word_embeddings,
            QkvBias => self.qkv_bias,
            QkNorm => self.qk_norm,
        };
        let of = |template: &Template, layer: Option<usize>| TensorSpec {
            name: layer
                .map_or(template.name.to_owned(), |layer| template.name.replace("{}", &layer.to_string())),
            shape: match *template.shape {
                [only] => Shape::from([config.extent(only)]),
                [rows, cols] => Shape::from([config.extent(rows), config.extent(cols)]),
                _ => Shape::from([]),
            },
            kind: template.kind,
            layer,
        };
        let is_of_layer = |template: &&Template| template.name.contains("{}");
        let in_layers: Vec<&Template> = self.tensors.iter().filter(is_of_layer).filter(is_needed).collect();
        let mut others = self.tensors.iter().filter(is_needed).peekable();
        while let Some(template) = others.next_if(|template| !is_of_layer(template)) {
            specs.push(of(template, None));
        }
        for layer in 0..config.num_hidden_layers {
            specs.extend(in_layers.iter().map(|template| of(template, Some(layer))));
        }
        specs.extend(others.filter(|template| !is_of_layer(template)).map(|template| of(template, None)));
        specs
    }
}
