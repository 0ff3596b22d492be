//! Layers of sizes that no memory holds: an error at once, no panic, no abort.

use crate::every_device::support::{device, rng};
use fp8_nn::prelude::*;
use std::time::{Duration, Instant};

/// Beyond the address range even for one byte each, or beyond a number of 64 bits where two are multiplied.
const SIZES: [usize; 5] = [1 << 47, 1 << 61, (1 << 61) + 8, 1 << 63, usize::MAX];
/// Far more than a refusal takes on a loaded machine.
const LIMIT: Duration = Duration::from_secs(5);

/// Returns the error of a layer that is refused, which must not take long.
fn refusal<T>(what: &str, new: impl FnOnce() -> Result<T>) -> String {
    let start = Instant::now();
    let outcome = new();
    assert!(start.elapsed() < LIMIT, "{what} took {:?}", start.elapsed());
    match outcome {
        Ok(_) => panic!("{what} was made"),
        Err(error) => error.to_string(),
    }
}

/// A change of one size of some options.
type Change<O> = (&'static str, fn(&mut O, usize));

fn refuses<O: Clone, T>(layer: &str, options: O, changes: &[Change<O>], new: impl Fn(O) -> Result<T>) {
    for (name, change) in changes {
        for size in SIZES {
            let mut options = options.clone();
            change(&mut options, size);
            let what = format!("{layer} with {name} = {size}");
            let text = refusal(&what, || new(options));
            assert!(!text.is_empty(), "{what}");
        }
    }
}

#[test]
fn a_linear_beyond_the_address_range_is_refused() {
    let new = |options| Linear::new("fc", options, &device(), &mut rng(1));
    let options = LinearOptions { in_features: 1 << 33, out_features: 1 << 33, ..Default::default() };
    let text = refusal("a Linear", || new(options));
    assert_eq!(
        text,
        format!(
            "fc: weight = [8589934592, 8589934592]: a parameter has at most {} elements: use smaller sizes",
            Shape::MAX_NUMEL
        )
    );
    let options = LinearOptions { in_features: 8, out_features: 8, ..Default::default() };
    refuses(
        "Linear",
        options,
        &[("in_features", |o, n| o.in_features = n), ("out_features", |o, n| o.out_features = n)],
        new,
    );
}

#[test]
fn an_embedding_beyond_the_address_range_is_refused() {
    let options = EmbeddingOptions { num_embeddings: 8, hidden_size: 8, ..Default::default() };
    let changes: [Change<EmbeddingOptions>; 2] =
        [("num_embeddings", |o, n| o.num_embeddings = n), ("hidden_size", |o, n| o.hidden_size = n)];
    refuses("Embedding", options, &changes, |o| Embedding::new("table", &o, &device(), &mut rng(1)));
}

#[test]
fn norms_beyond_the_address_range_are_refused() {
    let options = NormLayerOptions { hidden_size: 8, ..Default::default() };
    let changes: [Change<NormLayerOptions>; 1] = [("hidden_size", |o, n| o.hidden_size = n)];
    refuses("LayerNorm", options.clone(), &changes, |o| LayerNorm::new("norm", &o, &device()));
    refuses("RmsNorm", options, &changes, |o| RmsNorm::new("norm", &o, &device()));
}

#[test]
fn fused_layers_beyond_the_address_range_are_refused() {
    let options = LayerNormLinearOptions { in_features: 8, out_features: 8, ..Default::default() };
    let changes: [Change<LayerNormLinearOptions>; 2] =
        [("in_features", |o, n| o.in_features = n), ("out_features", |o, n| o.out_features = n)];
    refuses("LayerNormLinear", options, &changes, |o| LayerNormLinear::new("fc", o, &device(), &mut rng(1)));
    for activation in [Activation::Gelu, Activation::Swiglu] {
        let options =
            LayerNormMlpOptions { hidden_size: 8, ffn_hidden_size: 8, activation, ..Default::default() };
        let changes: [Change<LayerNormMlpOptions>; 2] =
            [("hidden_size", |o, n| o.hidden_size = n), ("ffn_hidden_size", |o, n| o.ffn_hidden_size = n)];
        refuses("LayerNormMlp", options, &changes, |o| LayerNormMlp::new("mlp", o, &device(), &mut rng(1)));
    }
}

#[test]
fn attention_beyond_the_address_range_is_refused() {
    let options = MultiheadAttentionOptions {
        hidden_size: 8,
        attention: AttentionOptions { num_attention_heads: 2, rope: true, ..Default::default() },
        input_layernorm: Some(NormOptions::default()),
        ..Default::default()
    };
    let changes: [Change<MultiheadAttentionOptions>; 5] = [
        ("hidden_size", |o, n| o.hidden_size = n),
        ("num_attention_heads", |o, n| o.attention.num_attention_heads = n),
        ("num_gqa_groups", |o, n| o.attention.num_gqa_groups = Some(n)),
        ("kv_channels", |o, n| o.attention.kv_channels = Some(n)),
        ("max_seq_length", |o, n| o.attention.max_seq_length = n),
    ];
    refuses("MultiheadAttention", options, &changes, |o| {
        MultiheadAttention::new("attention", o, &device(), &mut rng(1))
    });
}

#[test]
fn a_model_beyond_the_address_range_is_refused() {
    let options = GptOptions {
        vocab_size: 8,
        num_layers: 1,
        layer: TransformerLayerOptions {
            hidden_size: 8,
            ffn_hidden_size: 32,
            attention: AttentionOptions { num_attention_heads: 2, max_seq_length: 8, ..Default::default() },
            ..Default::default()
        },
        ..Default::default()
    };
    let changes: [Change<GptOptions>; 6] = [
        ("vocab_size", |o, n| o.vocab_size = n),
        ("num_layers", |o, n| o.num_layers = n),
        ("hidden_size", |o, n| o.layer.hidden_size = n),
        ("ffn_hidden_size", |o, n| o.layer.ffn_hidden_size = n),
        ("num_attention_heads", |o, n| o.layer.attention.num_attention_heads = n),
        ("max_seq_length", |o, n| o.layer.attention.max_seq_length = n),
    ];
    refuses("Gpt", options, &changes, |o| Gpt::new("gpt", &o, &device(), &mut rng(1)));
}
