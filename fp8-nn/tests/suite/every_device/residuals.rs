//! The residual additions of blocks, which are parts of products and of norms' backward passes: against blocks of the same layers
//! that add by operations of their own.

use super::support::{
    assert_close, block_options, current, delayed, device, grads, in_dtype, noise, off, relative_rms, rng,
    step, unless_simulated, values, with_noise,
};
use fp8_nn::prelude::*;
use fp8_nn::{LayerNormMlpSaved, LoraOptions, MultiheadAttentionSaved, NormSaved, composite};

/// The order of norms and additions.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Order {
    Usual,
    Parallel,
    OutputNorm,
    AddsNormed,
}

use Order::{AddsNormed, OutputNorm, Parallel, Usual};

/// A [`TransformerLayer`] whose additions are operations of their own.
#[derive(Debug)]
struct ByHand {
    attention: MultiheadAttention,
    mlp: LayerNormMlp,
    norm: Option<LayerNorm>,
    order: Order,
}
composite!(ByHand { attention, mlp, norm; skip order });

impl Module for ByHand {
    type Saved = (MultiheadAttentionSaved, LayerNormMlpSaved, Option<NormSaved>);

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, Self::Saved)> {
        let Self { attention, mlp, norm, order } = self;
        if *order == AddsNormed {
            let (a, n1, saved) = attention.forward_with_layernorm_output(cx, x, &SequenceInfo::default())?;
            let r = ops::add(&n1, &a)?;
            let (m, n2, saved_mlp) = mlp.forward_with_layernorm_output(cx, &r)?;
            return Ok((ops::add(&n2, &m)?, (saved, saved_mlp, None)));
        }
        let (a, saved) = attention.forward(cx, x)?;
        let r = ops::add(&ops::cast(x, a.dtype())?, &a)?;
        let (m, saved_mlp) = mlp.forward(cx, if *order == Parallel { x } else { &r })?;
        let y = ops::add(&r, &m)?;
        match norm {
            None => Ok((y, (saved, saved_mlp, None))),
            Some(norm) => {
                let (y, saved_norm) = norm.forward(cx, &y)?;
                Ok((y, (saved, saved_mlp, Some(saved_norm))))
            }
        }
    }

    fn backward(&mut self, cx: &mut Backward<'_>, saved: Self::Saved, dy: &Tensor) -> Result<Tensor> {
        let Self { attention, mlp, norm, order } = self;
        let (saved, saved_mlp, saved_norm) = saved;
        if *order == AddsNormed {
            let dr = mlp.backward_with_layernorm_output(cx, saved_mlp, dy, dy)?;
            return attention.backward_with_layernorm_output(cx, saved, &dr, &dr);
        }
        let dy = match (norm, saved_norm) {
            (Some(norm), Some(saved)) => norm.backward(cx, saved, dy)?,
            _ => dy.clone(),
        };
        let dm = mlp.backward(cx, saved_mlp, &dy)?;
        let add = |dy: &Tensor, dx: &Tensor| ops::add(&ops::cast(dy, dx.dtype())?, dx);
        if *order == Parallel {
            let dx = attention.backward(cx, saved, &dy)?;
            return Ok(add(&dy, &ops::add(&dx, &dm)?)?);
        }
        let dr = add(&dy, &dm)?;
        let dx = attention.backward(cx, saved, &dr)?;
        Ok(add(&dr, &dx)?)
    }
}

fn options(order: Order, bias: bool) -> TransformerLayerOptions {
    TransformerLayerOptions {
        bias,
        parallel_attention_mlp: order == Parallel,
        output_layernorm: order == OutputNorm,
        apply_residual_connection_post_layernorm: order == AddsNormed,
        ..block_options()
    }
}

fn layer(options: TransformerLayerOptions) -> TransformerLayer {
    with_noise(TransformerLayer::new("block", options, &device(), &mut rng(1)).unwrap(), 1)
}

/// The same with additions of their own, and the same values.
fn by_hand(order: Order, bias: bool) -> ByHand {
    let TransformerLayerOptions { hidden_size, ffn_hidden_size, attention, init, norm, .. } = block_options();
    let attention = MultiheadAttentionOptions {
        hidden_size,
        attention,
        input_layernorm: (order != OutputNorm).then_some(norm),
        bias,
        init,
        ..Default::default()
    };
    let mlp = LayerNormMlpOptions { hidden_size, ffn_hidden_size, bias, init, ..Default::default() };
    let (device, mut rng) = (device(), rng(1));
    let norm = NormLayerOptions { hidden_size, ..Default::default() };
    let block = ByHand {
        attention: MultiheadAttention::new("block.attention", attention, &device, &mut rng).unwrap(),
        mlp: LayerNormMlp::new("block.mlp", mlp, &device, &mut rng).unwrap(),
        norm: (order == OutputNorm).then(|| LayerNorm::new("block.norm", &norm, &device).unwrap()),
        order,
    };
    with_noise(block, 1)
}

/// Outputs and gradients by name, of two steps.
fn run<M: Module>(model: &mut M, recipe: &Recipe, options: &AutocastOptions) -> Vec<(String, Vec<f32>)> {
    let mut scaling = Scaling::new(model, &device()).unwrap();
    let mut all = Vec::new();
    for i in 0..2 {
        let (x, dy) = (noise([2, 6, 32], i), noise([2, 6, 32], 100 + i));
        let (y, dx) = step(&mut scaling, recipe, options, model, &x, &dy).unwrap();
        all.extend([("y".to_owned(), values(&y)), ("dx".to_owned(), values(&dx))]);
        all.extend(grads(model));
    }
    all
}

/// −0 and 0 are equal.
fn assert_equal_bits(what: &str, expected: &[(String, Vec<f32>)], actual: &[(String, Vec<f32>)]) {
    assert_eq!(expected.len(), actual.len(), "{what}");
    for ((name, expected), (of, actual)) in expected.iter().zip(actual) {
        assert_eq!(name, of, "{what}");
        let differ = expected.iter().zip(actual).filter(|(e, a)| e != a).count();
        assert_eq!((differ, expected.len()), (0, actual.len()), "{what}: {name}");
    }
}

fn recipes() -> Vec<(Recipe, AutocastOptions)> {
    vec![(delayed(), AutocastOptions::default()), (delayed(), off()), (current(), AutocastOptions::default())]
}

#[test]
fn in_f32_without_biases_the_bits_are_those_of_additions_of_their_own() {
    for order in [Usual, Parallel, OutputNorm, AddsNormed] {
        for (recipe, scope) in &recipes()[..unless_simulated(3, 2)] {
            let expected = run(&mut by_hand(order, false), recipe, scope);
            let actual = run(&mut layer(options(order, false)), recipe, scope);
            assert_equal_bits(&format!("{order:?} {recipe}, {}", scope.enabled), &expected, &actual);
        }
    }
}

#[test]
fn with_biases_and_in_bf16_only_the_order_and_the_roundings_differ() {
    for order in [Usual, Parallel, OutputNorm, AddsNormed] {
        let expected = run(&mut by_hand(order, true), &delayed(), &off());
        let actual = run(&mut layer(options(order, true)), &delayed(), &off());
        for ((name, expected), (_, actual)) in expected.iter().zip(&actual) {
            assert_close(&format!("{order:?}: {name}"), expected, actual, 1e-4);
        }
        let scope = in_dtype(DType::BF16);
        let scope = AutocastOptions { enabled: false, ..scope };
        let actual_bf16 = run(&mut layer(options(order, true)), &delayed(), &scope);
        let by_hand_bf16 = run(&mut by_hand(order, true), &delayed(), &scope);
        // No farther from f32 than sums that are rounded twice.
        for (((name, expected), (_, actual)), (_, by_hand)) in
            expected.iter().zip(&actual_bf16).zip(&by_hand_bf16)
        {
            let (now, then) = (relative_rms(expected, actual), relative_rms(expected, by_hand));
            assert!(now <= 1.25 * then + 1e-3, "{order:?}, {name}: {now}, by hand {then}");
        }
    }
}

#[test]
fn adapters_are_added_before_the_residual() {
    let with_adapters = |layer: &mut dyn Layer| {
        let mut seed = 50;
        let add = &mut |loras: &mut fp8_nn::Loras| {
            seed += 1;
            if loras.path().ends_with("proj") || loras.path().ends_with("fc2") {
                let options = LoraOptions { rank: 2, ..Default::default() };
                loras.add("all", 0..32, &options, &mut rng(seed)).unwrap();
            }
        };
        layer.visit_loras_mut(add);
        for parameter in parameters_mut(layer).into_iter().filter(|p| p.is_adapter()) {
            seed += 1;
            parameter.set(ops::scale(&noise(*parameter.shape(), seed), 0.2).unwrap()).unwrap();
        }
    };
    let (mut by_hand, mut layer) = (by_hand(Usual, true), layer(options(Usual, true)));
    with_adapters(&mut by_hand);
    with_adapters(&mut layer);
    let adapters = parameters(&layer).iter().filter(|p| p.is_adapter()).count();
    assert_eq!(adapters, 4);
    for (recipe, scope) in &recipes()[..2] {
        let expected = run(&mut by_hand, recipe, scope);
        assert_equal_bits("adapters", &expected, &run(&mut layer, recipe, scope));
    }
}

#[test]
fn f32_residuals_take_products_that_are_not_rounded() {
    for order in [Usual, Parallel, OutputNorm, AddsNormed] {
        let options = || TransformerLayerOptions { fp32_residual_connection: true, ..options(order, true) };
        let exact = run(&mut layer(options()), &delayed(), &off());
        let scope = AutocastOptions { enabled: false, ..in_dtype(DType::BF16) };
        let mut scaling_model = layer(options());
        let all = run(&mut scaling_model, &delayed(), &scope);
        for ((name, expected), (_, actual)) in exact.iter().zip(&all) {
            let off = relative_rms(expected, actual);
            assert!(off > 0.0 && off < 0.03, "{order:?}, {name}: {off}");
        }
        let mut scaling = Scaling::new(&scaling_model, &device()).unwrap();
        let mut cx = scaling.scope(&delayed(), &scope).unwrap();
        let (y, _) = scaling_model.forward(&mut cx, &noise([2, 6, 32], 1)).unwrap();
        assert_eq!(y.dtype(), DType::F32);
        cx.commit().unwrap();
        if order != OutputNorm {
            // The sum has more bits than bf16 has.
            let rounded = ops::cast(&ops::cast(&y, DType::BF16).unwrap(), DType::F32).unwrap();
            assert_ne!(values(&y), values(&rounded));
        }
    }
}

#[test]
fn an_evaluation_adds_as_training_does() {
    for order in [Usual, Parallel, OutputNorm, AddsNormed] {
        let layer = layer(options(order, true));
        let x = noise([2, 6, 32], 1);
        let mut scaling = Scaling::new(&layer, &device()).unwrap();
        let mut cx = scaling.scope(&delayed(), &off()).unwrap();
        let (trained, _) = layer.forward(&mut cx, &x).unwrap();
        let evaluated = layer.evaluate(&mut cx, &x, &SequenceInfo::default(), None).unwrap();
        cx.commit().unwrap();
        assert_eq!(values(&trained), values(&evaluated), "{order:?}");
    }
}
