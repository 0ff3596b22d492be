//! Layers and models: built with any options, run forward and backward, and used wrongly.

use fp8_nn::prelude::*;
use fp8_nn::rand::SeedableRng;
use fp8_nn::rand::rngs::StdRng;

use super::super::case::Case;
use super::super::draw::{Draw, Kind};
use super::super::outcome::Tolerance;
use super::scopes::{options, recipe};

/// The path of every attacked layer. Errors from its backward pass name it.
const PATH: &str = "attacked";
/// Roundings to FP8 that fall to the other side, in a layer or two; masks of relu flip.
const FORWARD: f64 = 0.12;
const BACKWARD: f64 = 0.6;

/// Frequencies as they are, refused ones, and scaled ones.
const ROPE_SCALINGS: [ops::RopeScaling; 3] = [
    ops::RopeScaling::None,
    ops::RopeScaling::Linear { factor: 0.0 },
    ops::RopeScaling::Linear { factor: 4.0 },
];

/// A size that is mostly small and positive.
fn size(draw: &mut Draw) -> usize {
    match draw.below(40) {
        0 => 0,
        1 => draw.huge(),
        _ => draw.pick(&[1, 2, 3, 8, 15, 16, 17, 24, 32]),
    }
}

fn params_dtype(draw: &mut Draw) -> DType {
    match draw.below(20) {
        0 => draw.pick(&[DType::F16, DType::I32, DType::U8]),
        at => [DType::F32, DType::BF16][at % 2],
    }
}

fn eps(draw: &mut Draw) -> f32 {
    draw.option(1e-3)
}

/// Sizes that fit: a multiple of the heads.
fn heads(draw: &mut Draw) -> (usize, usize, Option<usize>) {
    let groups = draw.pick(&[1, 1, 2]);
    let heads = groups * draw.pick(&[1, 2]);
    let hidden = heads * 2 * draw.pick(&[1, 3, 4, 8]);
    match draw.below(12) {
        0 => (size(draw), size(draw), Some(size(draw))),
        1 => (hidden, heads, Some(groups + 1)),
        _ => (hidden, heads, (groups > 1 || draw.flip()).then_some(groups)),
    }
}

/// The options that layers share.
struct Drawn {
    input: usize,
    output: usize,
    params_dtype: DType,
    bias: bool,
    zero_centered_gamma: bool,
    eps: f32,
    normalization: Norm,
    activation: Activation,
    init_std: f32,
    output_layer_init_std: f32,
    recomputes: bool,
    hidden_size: usize,
    num_attention_heads: usize,
    num_gqa_groups: Option<usize>,
    causal: bool,
    rope: bool,
    input_layernorm: bool,
    of_heads: NormOptions,
}

pub(super) fn layers(case: &mut Case<'_>) -> Option<()> {
    let mut rng = StdRng::seed_from_u64(case.draw.bits());
    let device = super::tensors::policy(case);
    let draw = &mut case.draw;
    let (input, output, params_dtype) = (size(draw), size(draw), params_dtype(draw));
    let (bias, zero_centered_gamma, eps) = (draw.flip(), draw.flip(), eps(draw));
    let normalization = draw.pick(&[Norm::LayerNorm, Norm::RmsNorm]);
    let activation = draw.pick(&Activation::ALL);
    let (init_std, output_layer_init_std) = (0.2, 0.2);
    let (which, recomputes) = (draw.below(8), draw.once_in(4));
    let (hidden_size, num_attention_heads, num_gqa_groups) = heads(draw);
    let (causal, rope, input_layernorm) = (draw.flip(), draw.flip(), draw.flip());
    let norm = NormLayerOptions {
        hidden_size: input,
        eps,
        zero_centered_gamma,
        params_dtype,
        tensor_parallel: None,
    };
    let of_heads = NormOptions { normalization, eps, ..Default::default() };
    let drawn = Drawn {
        input,
        output,
        params_dtype,
        bias,
        zero_centered_gamma,
        eps,
        normalization,
        activation,
        init_std,
        output_layer_init_std,
        recomputes,
        hidden_size,
        num_attention_heads,
        num_gqa_groups,
        causal,
        rope,
        input_layernorm,
        of_heads,
    };
    match which {
        0 => linear(case, &drawn, &device, &mut rng),
        1 => layer_norm_linear(case, &drawn, &device, &mut rng),
        2 | 3 => layer_norm_mlp(case, &drawn, &device, &mut rng),
        4 => multihead_attention(case, &drawn, &device, &mut rng),
        5 => transformer_layer(case, &drawn, &device, &mut rng),
        6 => {
            let layer = case.call("LayerNorm::new", || LayerNorm::new(PATH, &norm, &device))?;
            drive(case, layer, &device, input, params_dtype)
        }
        _ => {
            let layer = case.call("RmsNorm::new", || RmsNorm::new(PATH, &norm, &device))?;
            drive(case, layer, &device, input, params_dtype)
        }
    }
}

/// Parts of an output, which sometimes do not add up.
fn output_parts(case: &mut Case<'_>, output: usize) -> Vec<usize> {
    match case.draw.below(6) {
        0 => vec![output],
        1 => vec![output / 2, output - output / 2],
        2 if case.draw.once_in(4) => vec![case.draw.below(200), usize::MAX],
        _ => Vec::new(),
    }
}

/// Attacks a [`Linear`].
fn linear(case: &mut Case<'_>, drawn: &Drawn, device: &Device, rng: &mut StdRng) -> Option<()> {
    let &Drawn { input, output, params_dtype, bias, init_std, recomputes, .. } = drawn;
    let options = LinearOptions {
        in_features: input,
        out_features: output,
        bias,
        params_dtype,
        init_std,
        save_original_input: case.draw.once_in(3),
        return_bias: case.draw.once_in(4),
        tensor_parallel: None,
        parallel_mode: case.draw.pick(&[ParallelMode::Column, ParallelMode::Row]),
        output_parts: output_parts(case, output),
    };
    case.say(|| format!("{options:?}"));
    let fc = case.call("Linear::new", || Linear::new(PATH, options, device, rng))?;
    if recomputes {
        return drive(case, Recompute { inner: fc }, device, input, params_dtype);
    }
    drive(case, fc, device, input, params_dtype)
}

/// Attacks a [`LayerNormLinear`].
fn layer_norm_linear(case: &mut Case<'_>, drawn: &Drawn, device: &Device, rng: &mut StdRng) -> Option<()> {
    let &Drawn {
        input,
        output,
        params_dtype,
        bias,
        zero_centered_gamma,
        eps,
        normalization,
        init_std,
        recomputes,
        ..
    } = drawn;
    let options = LayerNormLinearOptions {
        in_features: input,
        out_features: output,
        bias,
        norm: NormOptions { normalization, eps, zero_centered_gamma },
        params_dtype,
        init_std,
        return_bias: case.draw.once_in(4),
        recompute_norm: recomputes,
        tensor_parallel: None,
        output_parts: output_parts(case, output),
    };
    case.say(|| format!("{options:?}"));
    let fc = case.call("LayerNormLinear::new", || LayerNormLinear::new(PATH, options, device, rng))?;
    drive(case, fc, device, input, params_dtype)
}

/// Attacks a [`LayerNormMlp`].
fn layer_norm_mlp(case: &mut Case<'_>, drawn: &Drawn, device: &Device, rng: &mut StdRng) -> Option<()> {
    let &Drawn {
        input,
        output,
        params_dtype,
        bias,
        zero_centered_gamma,
        eps,
        normalization,
        activation,
        init_std,
        output_layer_init_std,
        recomputes,
        ..
    } = drawn;
    let options = LayerNormMlpOptions {
        hidden_size: input,
        ffn_hidden_size: output,
        bias,
        activation,
        norm: NormOptions { normalization, eps, zero_centered_gamma },
        params_dtype,
        init: InitOptions { init_std, output_layer_init_std },
        return_bias: case.draw.once_in(4),
        recompute_norm: case.draw.once_in(3),
        recompute_activation: case.draw.once_in(3),
        tensor_parallel: None,
    };
    case.say(|| format!("{options:?}"));
    let mlp = case.call("LayerNormMlp::new", || LayerNormMlp::new(PATH, options, device, rng))?;
    if recomputes {
        return drive(case, Recompute { inner: mlp }, device, input, params_dtype);
    }
    drive(case, mlp, device, input, params_dtype)
}

/// Attacks a [`MultiheadAttention`].
fn multihead_attention(case: &mut Case<'_>, drawn: &Drawn, device: &Device, rng: &mut StdRng) -> Option<()> {
    let &Drawn {
        params_dtype,
        bias,
        eps,
        normalization,
        init_std,
        output_layer_init_std,
        recomputes,
        hidden_size,
        num_attention_heads,
        num_gqa_groups,
        causal,
        rope,
        input_layernorm,
        of_heads,
        ..
    } = drawn;
    let options = MultiheadAttentionOptions {
        hidden_size,
        attention: AttentionOptions {
            num_attention_heads,
            num_gqa_groups,
            causal,
            rope,
            rope_scaling: case.draw.pick(&ROPE_SCALINGS),
            qk_norm: case.draw.once_in(4).then_some(of_heads),
            max_seq_length: 16,
            fp8_dpa: case.draw.once_in(3).then_some(true),
            ..Default::default()
        },
        input_layernorm: input_layernorm.then_some(NormOptions { normalization, eps, ..Default::default() }),
        bias,
        qkv_bias: case.draw.pick(&[None, None, Some(true), Some(false)]),
        params_dtype,
        init: InitOptions { init_std, output_layer_init_std },
        return_bias: case.draw.once_in(4),
        recompute_norm: recomputes,
        tensor_parallel: None,
    };
    case.say(|| format!("{options:?}"));
    let layer =
        case.call("MultiheadAttention::new", || MultiheadAttention::new(PATH, options, device, rng))?;
    drive(case, layer, device, hidden_size, params_dtype)
}

/// Attacks a [`TransformerLayer`].
fn transformer_layer(case: &mut Case<'_>, drawn: &Drawn, device: &Device, rng: &mut StdRng) -> Option<()> {
    let &Drawn {
        output,
        params_dtype,
        bias,
        eps,
        normalization,
        activation,
        init_std,
        output_layer_init_std,
        hidden_size,
        num_attention_heads,
        num_gqa_groups,
        causal,
        rope,

        of_heads,
        ..
    } = drawn;
    let options = TransformerLayerOptions {
        hidden_size,
        ffn_hidden_size: output,
        attention: AttentionOptions {
            num_attention_heads,
            num_gqa_groups,
            causal,
            window: (case.draw.once_in(3).then_some(2), case.draw.once_in(3).then_some(1)),
            rope,
            rope_scaling: case.draw.pick(&ROPE_SCALINGS),
            qk_norm: case.draw.once_in(4).then_some(of_heads),
            max_seq_length: 16,
            fp8_dpa: case.draw.once_in(3).then_some(true),
            ..Default::default()
        },
        activation,
        norm: NormOptions { normalization, eps, ..Default::default() },
        parallel_attention_mlp: case.draw.once_in(4),
        output_layernorm: case.draw.once_in(4),
        hidden_dropout: case.draw.pick(&[0.0, 0.0, 0.3]),
        drop_path_rate: case.draw.pick(&[0.0, 0.0, 0.3]),
        apply_residual_connection_post_layernorm: case.draw.once_in(4),
        fp32_residual_connection: case.draw.once_in(4),
        recompute: case.draw.pick(&RecomputeLevel::ALL),
        bias,
        qkv_bias: case.draw.pick(&[None, None, Some(true), Some(false)]),
        params_dtype,
        init: InitOptions { init_std, output_layer_init_std },
        tensor_parallel: None,
    };
    case.say(|| format!("{options:?}"));
    let layer = case.call("TransformerLayer::new", || TransformerLayer::new(PATH, options, device, rng))?;
    drive(case, layer, device, hidden_size, params_dtype)
}

/// Steps of training with a layer, some of them wrong.
fn drive<M: Module>(
    case: &mut Case<'_>,
    mut model: M,
    device: &Device,
    input: usize,
    dtype: DType,
) -> Option<()> {
    if input > 1 << 16 {
        return None;
    }
    let mut scaling = case.call("Scaling::new", || Scaling::new(&model, device))?;
    let mut optimizer = case.call("AdamW::new", || AdamW::new(AdamWOptions::default()))?;
    let (recipe, mut options) = (recipe(&mut case.draw), options(&mut case.draw));
    let mut of = dtype;
    if case.draw.once_in(10) {
        of = case.draw.dtype();
    } else if of == DType::BF16 && options.compute_dtype.is_some() && case.draw.flip() {
        of = DType::F32;
    }
    if case.draw.once_in(3) {
        options.compute_dtype = None;
    }
    case.say(|| format!("{recipe:?} {options:?}"));
    let kind = case.draw.pick(&[Kind::Noise, Kind::Noise, Kind::Special]);
    // Ordinary values and rates, up to the step at hand.
    let mut is_usual = kind == Kind::Noise;
    let (batch, sequence) = (case.draw.pick(&[1, 2, 3, 0]), case.draw.pick(&[1, 2, 5, 16, 17]));
    for _ in 0..1 + case.draw.below(3) {
        let x = case.tensor(&[batch, sequence, input], of, kind)?;
        let x = case.call("to_device", || x.to_device(device))?;
        let mut cx = case.call("scope", || scaling.scope(&recipe, &options))?;
        let (y, saved) = case.call("forward", || model.forward(&mut cx, &x))?;
        case.near("y", &y, FORWARD);
        case.text("y", (y.dtype(), y.shape()));
        let is_dropped = case.draw.once_in(12);
        if is_dropped {
            case.run("drop", || drop(cx));
        } else {
            case.call("commit", || cx.commit())?;
        }
        let like = case.draw.mostly(y.shape());
        let of = case.draw.dtype();
        let dy = case.tensor(&like, of, kind)?;
        // What is drawn may be bent twice, back to the output's shape.
        let is_bent = dy.shape() != y.shape();
        let mut cx = case.call("backward scope", || scaling.backward())?;
        let dx = case.call("backward", || model.backward(&mut cx, saved, &dy));
        if is_bent {
            let refusal = case.events.last().and_then(|event| event.outcome.as_ref().err().cloned());
            match refusal {
                None => case.fail(format!(
                    "backward: accepted a gradient {} of an output {}",
                    dy.shape(),
                    y.shape()
                )),
                // Whatever else is wrong with the call may be told first.
                Some(refusal) if !refusal.contains(PATH) && of.is_float() && !is_dropped => {
                    case.fail(format!("backward: the refusal does not name the layer: {refusal}"));
                }
                Some(_) => {}
            }
        }
        let dx = dx?;
        case.near("dx", &dx, BACKWARD);
        case.text("dx", (dx.dtype(), dx.shape()));
        case.call("commit", || cx.commit())?;
        let most = case.draw.option(1.0);
        if let Some(norm) = case.call("clip_grad_norm", || clip_grad_norm(&mut model, most)) {
            case.text("norm", norm.shape());
        }
        drop((x, y, dx, dy));
        let lr = case.draw.option(1e-3);
        let _ = case.call("AdamW::step", || optimizer.step(&mut model, lr));
        case.call("zero_grad", || zero_grad(&mut model))?;
        is_usual &= lr.abs() < 1.0;
        if is_usual {
            all_finite(case, &model);
        }
    }
    Some(())
}

/// Parameters that were trained on ordinary values.
fn all_finite(case: &mut Case<'_>, model: &dyn Layer) {
    for parameter in parameters(model) {
        match parameter.tensor().to_f32_vec() {
            Err(error) => case.fail(format!("reading parameters: {error}")),
            Ok(values) if values.iter().all(|value| value.is_finite()) => {}
            Ok(_) => {
                case.fail(format!("`{}` is not finite after a step on ordinary values", parameter.name()));
            }
        }
    }
}

pub(super) fn models(case: &mut Case<'_>) -> Option<()> {
    let mut rng = StdRng::seed_from_u64(case.draw.bits());
    let (draw, device) = (&mut case.draw, case.device);
    let (hidden_size, num_attention_heads, num_gqa_groups) = heads(draw);
    let vocab_size = if draw.once_in(12) { size(draw) } else { 20 };
    let options = GptOptions {
        vocab_size,
        num_layers: if draw.once_in(16) { draw.pick(&[0, 3]) } else { 1 },
        layer: TransformerLayerOptions {
            hidden_size,
            ffn_hidden_size: if draw.flip() { size(draw) } else { hidden_size.saturating_mul(4) },
            attention: AttentionOptions {
                num_attention_heads,
                num_gqa_groups,
                max_seq_length: if draw.once_in(16) { size(draw) } else { 8 },
                ..Default::default()
            },
            activation: draw.pick(&Activation::ALL),
            norm: NormOptions {
                normalization: draw.pick(&[Norm::LayerNorm, Norm::RmsNorm]),
                ..Default::default()
            },
            bias: draw.flip(),
            params_dtype: params_dtype(draw),
            init: InitOptions { init_std: 0.1, output_layer_init_std: 0.1 },
            ..Default::default()
        },
        ..Default::default()
    };
    case.say(|| format!("{options:?}"));
    let mut model = case.call("Gpt::new", || Gpt::new(PATH, &options, device, &mut rng))?;
    let mut scaling = case.call("Scaling::new", || Scaling::new(&model, device))?;
    let mut optimizer = case.call("AdamW::new", || AdamW::new(AdamWOptions::default()))?;
    let (recipe, mut autocast) = (recipe(&mut case.draw), self::options(&mut case.draw));
    if case.draw.flip() {
        autocast.compute_dtype = None;
    }
    let (batch, sequence) = (case.draw.pick(&[1, 2]), case.draw.pick(&[1, 3, 8, 9]));
    for _ in 0..1 + case.draw.below(2) {
        let ids = |draw: &mut Draw| -> Vec<i32> {
            (0..batch * sequence)
                .map(|_| {
                    if draw.once_in(300) {
                        draw.pick(&[-1, i32::MAX, 20])
                    } else {
                        draw.below(vocab_size.min(20)) as i32
                    }
                })
                .collect()
        };
        let (input, targets) = (ids(&mut case.draw), ids(&mut case.draw));
        let input = case.integers(input, &[batch, sequence])?;
        let targets = case.integers(targets, &[batch, sequence])?;
        let mut cx = case.call("scope", || scaling.scope(&recipe, &autocast))?;
        let (loss, saved) = case.call("loss", || model.loss(&mut cx, &input, &targets))?;
        case.close("loss", &loss, Tolerance { rtol: 0.1, atol: 0.1 });
        case.call("commit", || cx.commit())?;
        let mut cx = case.call("backward scope", || scaling.backward())?;
        case.call("loss_backward", || model.loss_backward(&mut cx, saved))?;
        case.call("commit", || cx.commit())?;
        case.call("clip_grad_norm", || clip_grad_norm(&mut model, 1.0))?;
        case.call("AdamW::step", || optimizer.step(&mut model, 1e-3))?;
        case.call("zero_grad", || zero_grad(&mut model))?;
        all_finite(case, &model);
    }
    Some(())
}
