//! Every layer refuses inputs and gradients that do not fit: the error names the layer, what was passed and what it expects,
//! and nothing has changed.

use super::support::{
    block_options, delayed, device, error, gpt, ids, linear, mlp, noise, parameter_bits, rng,
};
use fp8_nn::prelude::*;

/// A layer, an input that it takes, and what its errors say.
struct Case {
    name: &'static str,
    layer: fn() -> Box<dyn DynModule>,
    /// The layer that refuses inputs and the one that refuses gradients: those of a stack are its first and last.
    paths: [&'static str; 2],
    input: &'static [usize],
    output: &'static [usize],
    /// The input shape that its errors ask for.
    expected: &'static str,
}

const FEATURES: &str = "[…, 24], in_features last";
const HIDDEN: &str = "[…, 24], hidden_size last";

const CASES: [Case; 10] = [
    Case {
        name: "Linear",
        layer: || Box::new(linear("a", 24, 10, 1)),
        paths: ["a", "a"],
        input: &[2, 4, 24],
        output: &[2, 4, 10],
        expected: FEATURES,
    },
    Case {
        name: "LayerNorm",
        layer: || Box::new(LayerNorm::new("a", &norm(), &device()).unwrap()),
        paths: ["a", "a"],
        input: &[2, 4, 24],
        output: &[2, 4, 24],
        expected: HIDDEN,
    },
    Case {
        name: "RmsNorm",
        layer: || Box::new(RmsNorm::new("a", &norm(), &device()).unwrap()),
        paths: ["a", "a"],
        input: &[2, 4, 24],
        output: &[2, 4, 24],
        expected: HIDDEN,
    },
    Case {
        name: "LayerNormLinear",
        layer: || {
            let options = LayerNormLinearOptions { in_features: 24, out_features: 10, ..Default::default() };
            Box::new(LayerNormLinear::new("a", options, &device(), &mut rng(1)).unwrap())
        },
        paths: ["a", "a"],
        input: &[2, 4, 24],
        output: &[2, 4, 10],
        expected: FEATURES,
    },
    Case {
        name: "LayerNormMlp",
        layer: || Box::new(mlp("a", Activation::Swiglu, Norm::LayerNorm, 1)),
        paths: ["a", "a"],
        input: &[2, 4, 24],
        output: &[2, 4, 24],
        expected: HIDDEN,
    },
    Case {
        name: "MultiheadAttention",
        layer: || Box::new(attention(false)),
        paths: ["a", "a"],
        input: &[2, 4, 24],
        output: &[2, 4, 24],
        expected: "[batch, seq, 24]",
    },
    Case {
        name: "MultiheadAttention with RoPE",
        layer: || Box::new(attention(true)),
        paths: ["a", "a"],
        input: &[2, 4, 24],
        output: &[2, 4, 24],
        expected: "[batch, seq, 24] with seq at most 8, RoPE's max_seq_length",
    },
    Case {
        name: "TransformerLayer",
        layer: || {
            let options = TransformerLayerOptions { hidden_size: 24, ..block_options() };
            Box::new(TransformerLayer::new("a", options, &device(), &mut rng(1)).unwrap())
        },
        paths: ["a", "a"],
        input: &[2, 4, 24],
        output: &[2, 4, 24],
        expected: "[batch, seq, 24] with seq at most 16, RoPE's max_seq_length",
    },
    Case {
        name: "Stack",
        layer: || {
            let last = Recompute { inner: linear("b", 24, 10, 2) };
            Box::new(Stack(vec![Box::new(linear("a", 24, 24, 1)), Box::new(last)]))
        },
        paths: ["a", "b"],
        input: &[2, 4, 24],
        output: &[2, 4, 10],
        expected: FEATURES,
    },
    Case {
        name: "Recompute",
        layer: || Box::new(Recompute { inner: mlp("a", Activation::Gelu, Norm::RmsNorm, 1) }),
        paths: ["a", "a"],
        input: &[2, 4, 24],
        output: &[2, 4, 24],
        expected: HIDDEN,
    },
];

fn norm() -> NormLayerOptions {
    NormLayerOptions { hidden_size: 24, ..Default::default() }
}

fn attention(rope: bool) -> MultiheadAttention {
    let options = MultiheadAttentionOptions {
        hidden_size: 24,
        attention: AttentionOptions { num_attention_heads: 2, rope, max_seq_length: 8, ..Default::default() },
        input_layernorm: rope.then(NormOptions::default),
        ..Default::default()
    };
    MultiheadAttention::new("a", options, &device(), &mut rng(1)).unwrap()
}

fn shape(dims: &[usize]) -> Shape {
    Shape::from_slice(dims).unwrap()
}

fn integers(dims: &[usize]) -> Tensor {
    Tensor::zeros(shape(dims), DType::I32, &device()).unwrap()
}

/// `t` on a device that is not the suite's, and both devices as errors name them; none where the CPU is the suite's.
fn elsewhere(t: &Tensor) -> Option<(Tensor, String)> {
    let other = (device() != Device::cpu()).then(Device::cpu)?;
    let text = format!("is on {other}, the layer on {}: move it there with Tensor::to_device", device());
    Some((t.to_device(&other).unwrap(), text))
}

/// The same number of elements in another rank, more or fewer rows, another last dimension.
fn other_shapes(dims: &[usize]) -> Vec<Shape> {
    let (last, leading) = dims.split_last().unwrap();
    let rows: usize = leading.iter().product();
    let more: Vec<_> = dims.iter().enumerate().map(|(i, &dim)| if i == 0 { dim + 1 } else { dim }).collect();
    let fewer: Vec<_> = dims.iter().enumerate().map(|(i, &dim)| if i == 0 { dim - 1 } else { dim }).collect();
    vec![
        Shape::from([rows, *last]),
        Shape::from([rows * last]),
        shape(&[&[1], dims].concat()),
        Shape::from([]),
        shape(&more),
        shape(&fewer),
        shape(dims).with_last(last - 1),
        shape(dims).with_last(last + 16),
        shape(dims).with_last(0),
    ]
}

/// Gradients that are no gradients of an output of this shape, with what the error says after the layer's path.
fn wrong_gradients(output: &[usize]) -> Vec<(Tensor, String)> {
    let mut all: Vec<_> = other_shapes(output)
        .into_iter()
        .map(|wrong| {
            let text = format!("dy of shape {wrong}: expected {}, the output's shape", shape(output));
            (noise(wrong, 3), text)
        })
        .collect();
    all.push((integers(output), "dy has dtype i32: expected f32, bf16 or f16".to_owned()));
    let right = noise(shape(output), 3);
    all.extend(elsewhere(&right).map(|(dy, text)| (dy, format!("dy {text}"))));
    all
}

#[test]
fn every_layer_refuses_a_gradient_that_is_not_its_outputs() {
    for case in &CASES {
        let path = case.paths[1];
        let mut layer = (case.layer)();
        let mut scaling = Scaling::new(&layer, &device()).unwrap();
        let x = noise(shape(case.input), 2);
        let before = parameter_bits(&*layer);
        for (dy, text) in wrong_gradients(case.output) {
            let forward = scaling.in_autocast(&delayed(), |cx| layer.forward_dyn(cx, &x));
            let (y, saved) = forward.unwrap();
            assert_eq!(**y.shape(), *case.output);
            let refused = scaling.in_backward(|cx| layer.backward_dyn(0, cx, saved, &dy));
            assert_eq!(error(refused), format!("{path}: {text}"), "{}", case.name);
            assert!(parameter_bits(&*layer) == before, "{path}: {text}: no gradient has changed");
        }
        let (_, saved) = scaling.in_autocast(&delayed(), |cx| layer.forward_dyn(cx, &x)).unwrap();
        let dy = noise(shape(case.output), 3);
        scaling.in_backward(|cx| layer.backward_dyn(0, cx, saved, &dy)).unwrap();
    }
}

#[test]
fn every_layer_refuses_an_input_that_does_not_fit() {
    for case in &CASES {
        let (path, expected) = (case.paths[0], case.expected);
        let layer = (case.layer)();
        let mut scaling = Scaling::new(&layer, &device()).unwrap();
        let mut inputs = Vec::new();
        let mut wrong =
            vec![Shape::from([]), shape(case.input).with_last(23), shape(case.input).with_last(0)];
        if expected.starts_with("[batch") {
            wrong.extend([Shape::from([4, 24]), Shape::from([1, 2, 4, 24])]);
        }
        if expected.contains("at most") {
            wrong.push(Shape::from([1, 17, 24]));
        }
        for wrong in wrong {
            inputs.push((noise(wrong, 2), format!("input of shape {wrong}: expected {expected}")));
        }
        inputs.push((integers(case.input), "input has dtype i32: expected f32, bf16 or f16".to_owned()));
        let other = elsewhere(&noise(shape(case.input), 2));
        inputs.extend(other.map(|(x, text)| (x, format!("input {text}"))));
        for (x, text) in inputs {
            let refused = scaling.in_autocast(&delayed(), |cx| layer.forward_dyn(cx, &x));
            assert_eq!(error(refused), format!("{path}: {text}"), "{}", case.name);
        }
        // Leading dimensions are free where they have no meaning.
        if !expected.starts_with("[batch") {
            for input in [&[24][..], &[3, 24], &[0, 24], &[1, 2, 3, 24]] {
                let x = noise(shape(input), 2);
                scaling.in_autocast(&delayed(), |cx| layer.forward_dyn(cx, &x)).unwrap();
            }
        }
    }
}

#[test]
fn attention_refuses_key_lengths_that_do_not_fit() {
    for rope in [false, true] {
        let layer = attention(rope);
        let mut scaling = Scaling::new(&layer, &device()).unwrap();
        let x = noise([2, 4, 24], 2);
        let mut all = vec![
            (integers(&[3]), "key_lengths of shape [3]: expected [2], one per sequence".to_owned()),
            (integers(&[2, 1]), "key_lengths of shape [2, 1]: expected [2], one per sequence".to_owned()),
            (noise([2], 1), "key_lengths has dtype f32: expected i32".to_owned()),
        ];
        all.extend(elsewhere(&integers(&[2])).map(|(t, text)| (t, format!("key_lengths {text}"))));
        for (lengths, text) in all {
            let refused = scaling.in_autocast(&delayed(), |cx| {
                layer.forward_with_info(cx, &x, &SequenceInfo::padded(&lengths))
            });
            assert_eq!(error(refused), format!("a: {text}"));
        }
    }
}

#[test]
fn an_embedding_refuses_what_does_not_fit() {
    let options = EmbeddingOptions { num_embeddings: 20, hidden_size: 8, ..Default::default() };
    let mut layer = Embedding::new("a", &options, &device(), &mut rng(1)).unwrap();
    let mut scaling = Scaling::new(&layer, &device()).unwrap();
    let mut inputs = vec![
        (noise([2, 4], 1), "ids has dtype f32: expected i32".to_owned()),
        (
            integers(&[1, 1, 1, 1, 1, 1]),
            "ids of shape [1, 1, 1, 1, 1, 1]: expected at most 5 dimensions: the output has one more"
                .to_owned(),
        ),
    ];
    inputs.extend(elsewhere(&integers(&[2, 4])).map(|(t, text)| (t, format!("ids {text}"))));
    for (wrong, text) in inputs {
        let refused = scaling.in_autocast(&delayed(), |cx| layer.forward(cx, &wrong));
        assert_eq!(error(refused), format!("a: {text}"));
    }
    let before = parameter_bits(&layer);
    let tokens = ids([2, 4], 20, 1);
    for (dy, text) in wrong_gradients(&[2, 4, 8]) {
        let (_, saved) = scaling.in_autocast(&delayed(), |cx| layer.forward(cx, &tokens)).unwrap();
        assert_eq!(error(layer.backward(&saved, &dy)), format!("a: {text}"));
        assert!(parameter_bits(&layer) == before);
    }
}

#[test]
fn a_language_model_refuses_what_does_not_fit() {
    let mut model = gpt(1);
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let (tokens, targets) = (ids([2, 6], 20, 1), ids([2, 6], 20, 2));
    let expected = "expected [batch, seq] with seq at most 8, the max_seq_length";
    let mut inputs = vec![
        (noise([2, 6], 1), "ids has dtype f32: expected i32".to_owned()),
        (integers(&[12]), format!("ids of shape [12]: {expected}")),
        (integers(&[1, 2, 6]), format!("ids of shape [1, 2, 6]: {expected}")),
        (integers(&[2, 9]), format!("ids of shape [2, 9]: {expected}")),
    ];
    inputs.extend(elsewhere(&tokens).map(|(t, text)| (t, format!("ids {text}"))));
    for (wrong, text) in inputs {
        let refused = scaling.in_autocast(&delayed(), |cx| model.forward(cx, &wrong));
        assert_eq!(error(refused), format!("gpt: {text}"));
        let refused = scaling.in_autocast(&delayed(), |cx| model.loss(cx, &wrong, &targets));
        assert_eq!(error(refused), format!("gpt: {text}"));
    }
    let expected = "expected [2, 6], the shape of ids";
    let mut wrong = vec![
        (noise([2, 6], 1), "targets has dtype f32: expected i32".to_owned()),
        (integers(&[12]), format!("targets of shape [12]: {expected}")),
        (integers(&[6, 2]), format!("targets of shape [6, 2]: {expected}")),
        (integers(&[2, 5]), format!("targets of shape [2, 5]: {expected}")),
    ];
    wrong.extend(elsewhere(&targets).map(|(t, text)| (t, format!("targets {text}"))));
    for (wrong, text) in wrong {
        let refused = scaling.in_autocast(&delayed(), |cx| model.loss(cx, &tokens, &wrong));
        assert_eq!(error(refused), format!("gpt: {text}"));
    }
    let before = parameter_bits(&model);
    for (dlogits, text) in wrong_gradients(&[2, 6, 20]) {
        let (_, saved) = scaling.in_autocast(&delayed(), |cx| model.forward(cx, &tokens)).unwrap();
        let refused = scaling.in_backward(|cx| model.backward(cx, saved, &dlogits));
        assert_eq!(error(refused), format!("gpt: {text}"));
        assert!(parameter_bits(&model) == before);
    }
}

#[test]
fn a_tensor_of_another_transpose_policy_is_on_the_same_device() {
    let mut layer = linear("a", 24, 10, 1);
    let mut scaling = Scaling::new(&layer, &device()).unwrap();
    let on = |t: Tensor, policy| t.to_device(&device().with_transpose_policy(policy)).unwrap();
    for policy in [TransposePolicy::WithCast, TransposePolicy::OnDemand, TransposePolicy::Never] {
        let (x, dy) = (on(noise([4, 24], 2), policy), on(noise([4, 10], 3), policy));
        let (_, saved) = scaling.in_autocast(&delayed(), |cx| layer.forward(cx, &x)).unwrap();
        scaling.in_backward(|cx| layer.backward(cx, saved, &dy)).unwrap();
    }
}

#[test]
fn a_language_model_that_sees_what_it_predicts_is_refused() {
    let layer = TransformerLayerOptions {
        hidden_size: 16,
        ffn_hidden_size: 32,
        attention: AttentionOptions { num_attention_heads: 2, causal: false, ..Default::default() },
        ..Default::default()
    };
    let options = GptOptions { vocab_size: 11, num_layers: 1, layer, ..Default::default() };
    let refused = Gpt::new("a", &options, &device(), &mut rng(1)).unwrap_err().to_string();
    let expected =
        "a: causal = false: a language model must not see the tokens that it predicts: expected true";
    assert_eq!(refused, expected);
}
