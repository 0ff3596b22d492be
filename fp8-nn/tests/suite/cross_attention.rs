//! Cross attention and a decoder's block against the oracle.

use crate::every_device::decoder::{
    BATCH, ENCODER_HIDDEN, HIDDEN, QUERIES, Results, cross_options, decoder, decoder_options, inputs,
    run_decoder,
};
use crate::every_device::support::{delayed, device, noise, off, relative_rms, rng, values, with_noise};
use crate::options::{check_gradient, check_parameters, dot, norm, plain_model, weights, wide};
use crate::oracle::{Model, Weights};
use fp8_nn::prelude::*;

/// One step in high precision against the oracle. Returns the output.
fn check<L: Layer>(
    what: &str,
    mut model: L,
    run: impl Fn(&mut L, &mut Scaling, [&Tensor; 3]) -> Result<Results>,
    forward: impl Fn(&Weights, [&[f64]; 2]) -> Vec<f64>,
) -> Vec<f32> {
    let (x, e) = inputs();
    let dy = noise(*x.shape(), 3);
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let (y, dx, de) = run(&mut model, &mut scaling, [&x, &e, &dy]).unwrap();
    let (p, wide_x, wide_e, wide_dy) =
        (weights(&model), wide(&values(&x)), wide(&values(&e)), wide(&values(&dy)));
    let expected: Vec<f32> = forward(&p, [&wide_x, &wide_e]).iter().map(|&v| v as f32).collect();
    let off = relative_rms(&expected, &values(&y));
    assert!(off < 3e-6, "{what}: y is off by {off}");
    let (dx, de) = (values(&dx), values(&de));
    let largest = norm(&wide(&dx));
    check_gradient(&format!("{what}, dx"), &wide_x, &dx, largest, |x| {
        dot(&forward(&p, [x, &wide_e]), &wide_dy)
    });
    check_gradient(&format!("{what}, de"), &wide_e, &de, largest, |e| {
        dot(&forward(&p, [&wide_x, e]), &wide_dy)
    });
    check_parameters(what, &model, |p| dot(&forward(p, [&wide_x, &wide_e]), &wide_dy));
    values(&y)
}

fn run_cross(
    options: &AutocastOptions,
) -> impl Fn(&mut CrossAttention, &mut Scaling, [&Tensor; 3]) -> Result<Results> {
    move |model, scaling, [x, e, dy]| {
        let mut cx = scaling.scope(&delayed(), options)?;
        let (y, saved) = model.forward(&mut cx, x, e, &Sequences::Full)?;
        cx.commit()?;
        let (dx, de) = scaling.in_backward(|cx| model.backward(cx, saved, dy))?;
        Ok((y, dx, de))
    }
}

#[test]
fn cross_attention_is_the_oracles() {
    type Change = (&'static str, fn(&mut CrossAttentionOptions));
    let changes: [Change; 9] = [
        ("no change", |_| {}),
        ("no bias", |o| o.bias = false),
        ("two groups", |o| o.attention.num_gqa_groups = Some(2)),
        ("kv_channels", |o| o.attention.kv_channels = Some(10)),
        ("causal", |o| o.attention.causal = true),
        ("causal, bottom right", |o| {
            (o.attention.causal, o.attention.diagonal) = (true, Diagonal::BottomRight);
        }),
        ("window", |o| o.attention.window = (Some(0), Some(1))),
        ("softmax_scale", |o| o.attention.softmax_scale = Some(1.5)),
        ("norm", |o| o.input_layernorm = Some(NormOptions { eps: 0.3, ..Default::default() })),
    ];
    let mut plain: Option<Vec<f32>> = None;
    for (what, change) in changes {
        let mut o = cross_options();
        change(&mut o);
        let heads = o.attention.num_attention_heads;
        let oracle = Model {
            heads,
            groups: o.attention.num_gqa_groups.unwrap_or(heads),
            head_dim: o.attention.kv_channels.unwrap_or(HIDDEN / heads),
            causal: o.attention.causal,
            bottom_right: o.attention.diagonal == Diagonal::BottomRight,
            window: o.attention.window,
            softmax_scale: o.attention.softmax_scale.map(f64::from),
            eps: o.input_layernorm.unwrap_or_default().eps.into(),
            ..plain_model()
        };
        let model = with_noise(CrossAttention::new("a", o, &device(), &mut rng(1)).unwrap(), 1);
        let forward = |p: &Weights, inputs: [&[f64]; 2]| {
            oracle.cross_attention(p, "a", inputs, [BATCH, HIDDEN, ENCODER_HIDDEN])
        };
        let y = check(what, model, run_cross(&off()), forward);
        match &plain {
            Some(plain) => assert!(relative_rms(plain, &y) > 1e-3, "{what} changes nothing"),
            None => plain = Some(y),
        }
    }
}

#[test]
fn a_decoder_block_is_the_oracles() {
    let oracle = Model {
        heads: 4,
        groups: 2,
        head_dim: HIDDEN / 4,
        causal: true,
        rope_base: Some(10_000.0),
        ..plain_model()
    };
    // The cross attention has no positions.
    let forward = |p: &Weights, inputs: [&[f64]; 2]| {
        oracle.decoder_block(p, "a", inputs, [BATCH, QUERIES, HIDDEN, ENCODER_HIDDEN])
    };
    check("decoder", decoder(decoder_options()), run_decoder(&off()), forward);
}
