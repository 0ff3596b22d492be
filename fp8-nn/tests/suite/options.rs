//! Each option of each layer changes the result to what the oracle computes in f64, and the gradients to its slopes.

use crate::every_device::support::{
    delayed, device, first_step, grads, ids, noise, off, relative_rms, rng, values, with_noise,
};
use crate::oracle::{self, Model, Weights};
use fp8_nn::prelude::*;

pub(crate) fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| f64::from(v)).collect()
}

pub(crate) fn weights(model: &impl Layer) -> Weights {
    parameters(model).iter().map(|p| (p.name().to_string(), wide(&values(p.tensor())))).collect()
}

pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

pub(crate) fn norm(a: &[f64]) -> f64 {
    dot(a, a).sqrt()
}

/// `gradient` against slopes of `loss` along random directions. `largest` is the norm of the model's largest gradient:
/// attention ignores a bias that all keys share, so that its gradient is mere rounding.
pub(crate) fn check_gradient(
    what: &str,
    at: &[f64],
    gradient: &[f32],
    largest: f64,
    loss: impl Fn(&[f64]) -> f64,
) {
    let gradient = wide(gradient);
    for seed in 0..2 {
        let direction = wide(&values(&noise([at.len()], 70 + seed)));
        let (slope, expected) = (oracle::slope(&loss, at, &direction), dot(&gradient, &direction));
        let size = norm(&direction) / (at.len() as f64).sqrt();
        let tolerance = (1e-4 * norm(&gradient) + 1e-6 * largest) * size;
        assert!((slope - expected).abs() <= tolerance, "{what}: slope {slope}, gradient {expected}");
    }
}

pub(crate) fn check_parameters(what: &str, model: &impl Layer, loss: impl Fn(&Weights) -> f64) {
    let (p, grads) = (weights(model), grads(model));
    let largest = grads.iter().map(|(_, gradient)| norm(&wide(gradient))).fold(0.0, f64::max);
    for (name, gradient) in &grads {
        let with = |value: &[f64]| {
            loss(&{
                let mut p = p.clone();
                p.insert(name.clone(), value.to_vec());
                p
            })
        };
        check_gradient(&format!("{what}, {name}"), &p[name], gradient, largest, with);
    }
}

/// Output, input gradient and parameter gradients of one step in high precision against the oracle's. Returns the output.
pub(crate) fn check<M: Module>(
    what: &str,
    mut model: M,
    shape: &[usize],
    forward: impl Fn(&Weights, &[f64]) -> Vec<f64>,
) -> Vec<f32> {
    let x = noise(Shape::from_slice(shape).unwrap(), 2);
    let (p, wide_x) = (weights(&model), wide(&values(&x)));
    let expected = forward(&p, &wide_x);
    let last = expected.len() / (wide_x.len() / shape[shape.len() - 1]);
    let dy = noise(x.shape().with_last(last), 3);
    let (y, dx) = first_step(&delayed(), &off(), &mut model, &x, &dy).unwrap();
    let as_f32: Vec<f32> = expected.iter().map(|&v| v as f32).collect();
    let error = relative_rms(&as_f32, &values(&y));
    assert!(error < 3e-6, "{what}: y is off by {error}");

    let wide_dy = wide(&values(&dy));
    let (dx, largest) = (values(&dx), norm(&wide(&values(&dx))));
    check_gradient(&format!("{what}, dx"), &wide_x, &dx, largest, |x| dot(&forward(&p, x), &wide_dy));
    check_parameters(what, &model, |p| dot(&forward(p, &wide_x), &wide_dy));

    values(&y)
}

/// The name of a change to the options, and the function that makes it.
type Change<O> = (&'static str, fn(&mut O));

/// Runs `check` under the options as they are and under each change alone, which must move the output.
fn each<O: Clone>(options: &O, changes: &[Change<O>], check: impl Fn(&str, O) -> Vec<f32>) {
    let plain = check("no change", options.clone());
    for (name, change) in changes {
        let mut options = options.clone();
        change(&mut options);
        let y = check(name, options);
        assert!(y.len() != plain.len() || relative_rms(&plain, &y) > 1e-3, "{name} changes nothing");
    }
}

fn assert_biases(model: &impl Layer, bias: bool) {
    let all = parameters(model);
    let names = all.iter().map(|p| &**p.name()).filter(|name| !name.ends_with("norm.bias"));
    assert_eq!(names.filter(|name| name.ends_with(".bias")).count() > 0, bias);
}

pub(crate) fn plain_model() -> Model {
    Model {
        heads: 0,
        groups: 0,
        head_dim: 0,
        causal: false,
        window: (None, None),
        softmax_scale: None,
        rope_base: None,
        activation: "gelu",
        rms_norm: false,
        eps: 1e-5,
        zero_centered_gamma: false,
        is_parallel: false,
        adds_normed: false,
        bottom_right: false,
    }
}

/// One step of a layer without biases in FP8 against high precision.
///
/// An MLP or attention may be off by 0.08 instead of the 0.06 with biases, which are added exactly: two products in a row
/// have √2 times the 0.036 of one, and swiglu multiplies two noisy halves.
fn check_fp8<M: Module>(make: impl Fn() -> M, most_y: f64, most_gradient: f64) {
    let (x, dy) = (noise([2, 16, 64], 2), noise([2, 16, 64], 3));
    let run = |options: &AutocastOptions| {
        let mut model = with_noise(make(), 1);
        assert_biases(&model, false);
        let (y, dx) = first_step(&delayed(), options, &mut model, &x, &dy).unwrap();
        let mut all = grads(&model);
        all.push(("dx".to_owned(), values(&dx)));
        (values(&y), all)
    };
    let (high, fp8) = (run(&off()), run(&AutocastOptions::default()));
    let error = relative_rms(&high.0, &fp8.0);
    assert!((1e-4..most_y).contains(&error), "y is off by {error}");
    for ((name, high), (_, fp8)) in high.1.iter().zip(&fp8.1) {
        let error = relative_rms(high, fp8);
        assert!((1e-4..most_gradient).contains(&error), "{name} is off by {error}");
    }
}

#[test]
fn layers_without_biases_stay_near_high_precision_in_fp8() {
    let (device, init_std) = (device(), 0.05);
    let options =
        LinearOptions { in_features: 64, out_features: 64, bias: false, init_std, ..Default::default() };
    check_fp8(|| Linear::new("a", options.clone(), &device, &mut rng(1)).unwrap(), 0.06, 0.08);

    let options = LayerNormLinearOptions {
        in_features: 64,
        out_features: 64,
        bias: false,
        init_std,
        ..Default::default()
    };
    check_fp8(|| LayerNormLinear::new("a", options.clone(), &device, &mut rng(1)).unwrap(), 0.06, 0.20);

    for activation in [Activation::Gelu, Activation::Swiglu] {
        let options = LayerNormMlpOptions {
            hidden_size: 64,
            ffn_hidden_size: 96,
            bias: false,
            activation,
            init: InitOptions { init_std, output_layer_init_std: init_std },
            ..Default::default()
        };
        let make = || LayerNormMlp::new("a", options.clone(), &device, &mut rng(1)).unwrap();
        check_fp8(make, 0.08, 0.20);
    }

    let options = MultiheadAttentionOptions {
        hidden_size: 64,
        attention: AttentionOptions { num_attention_heads: 4, num_gqa_groups: Some(2), ..Default::default() },
        bias: false,
        init: InitOptions { init_std, output_layer_init_std: init_std },
        ..Default::default()
    };
    check_fp8(|| MultiheadAttention::new("a", options.clone(), &device, &mut rng(1)).unwrap(), 0.08, 0.20);

    let options = TransformerLayerOptions {
        hidden_size: 64,
        ffn_hidden_size: 96,
        attention: AttentionOptions {
            num_attention_heads: 4,
            num_gqa_groups: Some(2),
            rope: true,
            ..Default::default()
        },
        bias: false,
        norm: NormOptions { normalization: Norm::RmsNorm, ..Default::default() },
        activation: Activation::Swiglu,
        init: InitOptions { init_std, output_layer_init_std: init_std },
        ..Default::default()
    };
    check_fp8(|| TransformerLayer::new("a", options.clone(), &device, &mut rng(1)).unwrap(), 0.03, 0.20);
}

#[test]
fn of_linear() {
    let options = LinearOptions { in_features: 24, out_features: 10, init_std: 0.2, ..Default::default() };
    each(&options, &[("no bias", |o| o.bias = false)], |what, options| {
        let bias = options.bias;
        let model = with_noise(Linear::new("a", options, &device(), &mut rng(1)).unwrap(), 1);
        assert_biases(&model, bias);
        check(what, model, &[6, 24], |p, x| oracle::linear(p, "a", x, 24))
    });
}

#[test]
fn of_norm_and_linear() {
    let options =
        LayerNormLinearOptions { in_features: 24, out_features: 10, init_std: 0.2, ..Default::default() };
    let changes: [Change<LayerNormLinearOptions>; 5] = [
        ("no bias", |o| o.bias = false),
        ("RMSNorm", |o| o.norm.normalization = Norm::RmsNorm),
        ("eps", |o| o.norm.eps = 0.3),
        ("zero-centered gamma", |o| o.norm.zero_centered_gamma = true),
        ("all", |o| {
            (o.bias, o.norm.normalization, o.norm.eps, o.norm.zero_centered_gamma) =
                (false, Norm::RmsNorm, 0.3, true);
        }),
    ];
    each(&options, &changes, |what, o| {
        let oracle = Model {
            rms_norm: o.norm.normalization == Norm::RmsNorm,
            eps: o.norm.eps.into(),
            zero_centered_gamma: o.norm.zero_centered_gamma,
            ..plain_model()
        };
        let bias = o.bias;
        let mut model = with_noise(LayerNormLinear::new("a", o, &device(), &mut rng(1)).unwrap(), 1);
        if what == "zero-centered gamma" {
            shift_gamma(&mut model, 0.5);
        }
        assert_biases(&model, bias);
        check(what, model, &[2, 3, 24], |p, x| oracle::linear(p, "a", &oracle.norm(p, "a.norm", x), 24))
    });
}

/// γ of 1 and a stored γ − 1 of 0 are the same norm: moves it away.
fn shift_gamma(model: &mut impl Layer, by: f32) {
    for p in parameters_mut(model) {
        if p.name().ends_with("norm.weight") {
            let moved = values(p.tensor()).iter().map(|v| v + by).collect();
            p.set(Tensor::from_vec(moved, *p.tensor().shape(), &device()).unwrap()).unwrap();
        }
    }
}

#[test]
fn of_mlp() {
    let options = LayerNormMlpOptions {
        hidden_size: 16,
        ffn_hidden_size: 24,
        init: InitOptions { init_std: 0.3, output_layer_init_std: 0.3 },
        ..Default::default()
    };
    let changes: [Change<LayerNormMlpOptions>; 10] = [
        ("no bias", |o| o.bias = false),
        ("ffn_hidden_size", |o| o.ffn_hidden_size = 40),
        ("RMSNorm", |o| o.norm.normalization = Norm::RmsNorm),
        ("eps", |o| o.norm.eps = 0.3),
        ("silu", |o| o.activation = Activation::Silu),
        ("srelu", |o| o.activation = Activation::Srelu),
        ("swiglu", |o| o.activation = Activation::Swiglu),
        ("geglu", |o| o.activation = Activation::Geglu),
        ("glu without bias", |o| (o.activation, o.bias) = (Activation::Glu, false)),
        ("qgeglu without bias", |o| (o.activation, o.bias) = (Activation::Qgeglu, false)),
    ];
    each(&options, &changes, |what, o| {
        let oracle = Model {
            activation: o.activation.name(),
            rms_norm: o.norm.normalization == Norm::RmsNorm,
            eps: o.norm.eps.into(),
            ..plain_model()
        };
        let bias = o.bias;
        let model = with_noise(LayerNormMlp::new("a", o, &device(), &mut rng(1)).unwrap(), 1);
        assert_biases(&model, bias);
        check(what, model, &[2, 3, 16], |p, x| oracle.mlp(p, "a", x, 16))
    });
}

#[test]
fn of_attention() {
    let options = MultiheadAttentionOptions {
        hidden_size: 24,
        attention: AttentionOptions { num_attention_heads: 4, max_seq_length: 8, ..Default::default() },
        init: InitOptions { init_std: 0.4, output_layer_init_std: 0.4 },
        ..Default::default()
    };
    let changes: [Change<MultiheadAttentionOptions>; 13] = [
        ("no bias", |o| o.bias = false),
        ("two groups", |o| o.attention.num_gqa_groups = Some(2)),
        ("one group", |o| o.attention.num_gqa_groups = Some(1)),
        ("kv_channels", |o| o.attention.kv_channels = Some(10)),
        ("not causal", |o| o.attention.causal = false),
        ("window", |o| o.attention.window = (Some(1), None)),
        ("window to both sides", |o| (o.attention.causal, o.attention.window) = (false, (Some(2), Some(1)))),
        ("window to the right", |o| (o.attention.causal, o.attention.window) = (false, (None, Some(1)))),
        ("softmax_scale", |o| o.attention.softmax_scale = Some(1.5)),
        ("RoPE", |o| o.attention.rope = true),
        ("norm", |o| o.input_layernorm = Some(NormOptions::default())),
        ("RMSNorm", |o| {
            o.input_layernorm = Some(NormOptions { normalization: Norm::RmsNorm, ..Default::default() });
        }),
        ("all", |o| {
            (o.bias, o.attention.num_gqa_groups, o.attention.kv_channels) = (false, Some(2), Some(8));
            (o.attention.rope, o.attention.rope_base) = (true, 50.0);
            o.input_layernorm = Some(NormOptions { eps: 0.3, ..Default::default() });
        }),
    ];
    each(&options, &changes, check_attention);

    // Against another base, not against no RoPE.
    let options = MultiheadAttentionOptions {
        attention: AttentionOptions { rope: true, ..options.attention },
        ..options
    };
    each(&options, &[("rope_base", |o| o.attention.rope_base = 50.0)], check_attention);
}

fn check_attention(what: &str, o: MultiheadAttentionOptions) -> Vec<f32> {
    let norm = o.input_layernorm.unwrap_or_default();
    let oracle = Model {
        heads: o.attention.num_attention_heads,
        groups: o.attention.num_gqa_groups.unwrap_or(o.attention.num_attention_heads),
        head_dim: o.attention.kv_channels.unwrap_or(o.hidden_size / o.attention.num_attention_heads),
        causal: o.attention.causal,
        window: o.attention.window,
        softmax_scale: o.attention.softmax_scale.map(f64::from),
        rope_base: o.attention.rope.then_some(o.attention.rope_base),
        rms_norm: norm.normalization == Norm::RmsNorm,
        eps: norm.eps.into(),
        ..plain_model()
    };
    let bias = o.bias;
    let model = with_noise(MultiheadAttention::new("a", o, &device(), &mut rng(1)).unwrap(), 1);
    assert_biases(&model, bias);
    check(what, model, &[2, 5, 24], |p, x| oracle.attention(p, "a", x, [5, 24]))
}

#[test]
fn of_transformer_layer() {
    let options = TransformerLayerOptions {
        hidden_size: 24,
        ffn_hidden_size: 32,
        attention: AttentionOptions {
            num_attention_heads: 4,
            rope: true,
            max_seq_length: 8,
            ..Default::default()
        },
        init: InitOptions { init_std: 0.4, output_layer_init_std: 0.4 },
        ..Default::default()
    };
    let changes: [Change<TransformerLayerOptions>; 16] = [
        ("no bias", |o| o.bias = false),
        ("ffn_hidden_size", |o| o.ffn_hidden_size = 48),
        ("two groups", |o| o.attention.num_gqa_groups = Some(2)),
        ("kv_channels", |o| o.attention.kv_channels = Some(10)),
        ("not causal", |o| o.attention.causal = false),
        ("no RoPE", |o| o.attention.rope = false),
        ("rope_base", |o| o.attention.rope_base = 50.0),
        ("silu", |o| o.activation = Activation::Silu),
        ("RMSNorm", |o| o.norm.normalization = Norm::RmsNorm),
        ("eps", |o| o.norm.eps = 0.3),
        ("zero-centered gamma", |o| o.norm.zero_centered_gamma = true),
        ("parallel attention and MLP", |o| o.parallel_attention_mlp = true),
        ("norm at the end", |o| o.output_layernorm = true),
        ("window", |o| o.attention.window = (Some(1), None)),
        ("residual after the norm", |o| o.apply_residual_connection_post_layernorm = true),
        ("Llama", |o| {
            (o.bias, o.norm.normalization, o.activation) = (false, Norm::RmsNorm, Activation::Swiglu);
            (o.attention.num_gqa_groups, o.attention.rope_base) = (Some(2), 500_000.0);
        }),
    ];
    each(&options, &changes, |what, o| {
        let oracle = Model {
            heads: o.attention.num_attention_heads,
            groups: o.attention.num_gqa_groups.unwrap_or(o.attention.num_attention_heads),
            head_dim: o.attention.kv_channels.unwrap_or(o.hidden_size / o.attention.num_attention_heads),
            causal: o.attention.causal,
            window: o.attention.window,
            rope_base: o.attention.rope.then_some(o.attention.rope_base),
            activation: o.activation.name(),
            rms_norm: o.norm.normalization == Norm::RmsNorm,
            eps: o.norm.eps.into(),
            zero_centered_gamma: o.norm.zero_centered_gamma,
            is_parallel: o.parallel_attention_mlp,
            adds_normed: o.apply_residual_connection_post_layernorm,
            ..plain_model()
        };
        let bias = o.bias;
        let mut model = with_noise(TransformerLayer::new("a", o, &device(), &mut rng(1)).unwrap(), 1);
        if what == "zero-centered gamma" {
            shift_gamma(&mut model, 0.5);
        }
        assert_biases(&model, bias);
        check(what, model, &[2, 5, 24], |p, x| oracle.block(p, "a", x, [5, 24]))
    });
}

#[test]
fn of_a_language_model() {
    let options = GptOptions {
        vocab_size: 11,
        num_layers: 2,
        layer: TransformerLayerOptions {
            hidden_size: 16,
            ffn_hidden_size: 64,
            attention: AttentionOptions { num_attention_heads: 4, max_seq_length: 8, ..Default::default() },
            init: InitOptions { init_std: 0.4, output_layer_init_std: 0.4 },
            ..Default::default()
        },
        ..Default::default()
    };
    let changes: [Change<GptOptions>; 8] = [
        ("no bias", |o| o.layer.bias = false),
        ("ffn_hidden_size", |o| o.layer.ffn_hidden_size = 24),
        ("two groups", |o| o.layer.attention.num_gqa_groups = Some(2)),
        ("silu", |o| o.layer.activation = Activation::Silu),
        ("RMSNorm", |o| o.layer.norm.normalization = Norm::RmsNorm),
        ("eps", |o| o.layer.norm.eps = 0.3),
        ("rope_base", |o| o.layer.attention.rope_base = 20.0),
        ("Llama", |o| {
            (o.layer.bias, o.layer.norm.normalization, o.layer.activation) =
                (false, Norm::RmsNorm, Activation::Swiglu);
            (o.layer.attention.num_gqa_groups, o.layer.ffn_hidden_size) = (Some(2), 40);
        }),
    ];
    each(&options, &changes, |what, o| {
        let oracle = Model {
            heads: o.layer.attention.num_attention_heads,
            groups: o.layer.attention.num_gqa_groups.unwrap_or(o.layer.attention.num_attention_heads),
            head_dim: o.layer.hidden_size / o.layer.attention.num_attention_heads,
            causal: true,
            rope_base: Some(o.layer.attention.rope_base),
            activation: o.layer.activation.name(),
            rms_norm: o.layer.norm.normalization == Norm::RmsNorm,
            eps: o.layer.norm.eps.into(),
            zero_centered_gamma: false,
            ..plain_model()
        };
        let bias = o.layer.bias;
        let mut model = with_noise(Gpt::new("a", &o, &device(), &mut rng(1)).unwrap(), 1);
        assert_biases(&model, bias);
        let (tokens, targets) = (ids([2, 6], 11, 2), ids([2, 6], 11, 3));
        let [token_ids, target_ids] = [&tokens, &targets].map(|t| t.to_vec::<i32>().unwrap());

        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let mut cx = scaling.scope(&delayed(), &off()).unwrap();
        let (logits, _) = model.forward(&mut cx, &tokens).unwrap();
        let (loss, saved) = model.loss(&mut cx, &tokens, &targets).unwrap();
        cx.commit().unwrap();
        scaling.in_backward(|cx| model.loss_backward(cx, saved)).unwrap();

        let p = weights(&model);
        let expected = oracle.gpt(&p, "a", &token_ids, [6, 16]);
        let as_f32: Vec<f32> = expected.iter().map(|&v| v as f32).collect();
        let error = relative_rms(&as_f32, &values(&logits));
        assert!(error < 3e-6, "{what}: logits are off by {error}");
        let expected = oracle::cross_entropy(&expected, &target_ids);
        let found = f64::from(loss.item().unwrap());
        assert!((found - expected).abs() < 1e-5, "{what}: loss {found}, expected {expected}");
        check_parameters(what, &model, |p| {
            oracle::cross_entropy(&oracle.gpt(p, "a", &token_ids, [6, 16]), &target_ids)
        });
        values(&logits)
    });
}
