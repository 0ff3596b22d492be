//! Layers that keep less for backward, recompute it, or delay work have results with the bits of the plain layer.

use super::support::{
    ParameterBits, bits, block_options, delayed, device, error, everything, grads, in_dtype, linear, mlp,
    noise, off, recipes, relative_rms, rng, unless_simulated, values, with_noise,
};
use fp8_nn::fp8_recipe::ScalingState;
use fp8_nn::prelude::*;

type Outcome = (Vec<Vec<u32>>, ParameterBits, ScalingState);

/// Two steps: outputs and gradients of inputs, then everything that lasts.
fn train<M: Module>(mut model: M, shape: &[usize], recipe: &Recipe, options: &AutocastOptions) -> Outcome {
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let mut out = Vec::new();
    for step in 0..2 {
        let x = noise(Shape::from_slice(shape).unwrap(), 10 + step);
        let (y, dx) = super::support::step(&mut scaling, recipe, options, &mut model, &x, &x).unwrap();
        out.extend([bits(&y), bits(&dx)]);
    }
    let (parameters, state) = everything(&model, &scaling);
    (out, parameters, state)
}

fn block(change: impl Fn(&mut TransformerLayerOptions)) -> TransformerLayer {
    let mut options = block_options();
    change(&mut options);
    with_noise(TransformerLayer::new("block", options, &device(), &mut rng(1)).unwrap(), 1)
}

const LEVELS: [RecomputeLevel; 6] = [
    RecomputeLevel::None,
    RecomputeLevel::Norm,
    RecomputeLevel::Activation,
    RecomputeLevel::Attention,
    RecomputeLevel::Mlp,
    RecomputeLevel::Block,
];

#[test]
fn each_level_of_recomputation_equals_what_is_stored() {
    let overridden =
        DelayedScaling { override_linear_precision: (false, false, true), ..super::support::short() };
    let mut recipes = recipes();
    recipes.push(overridden.into());
    for recipe in recipes {
        for options in unless_simulated(vec![AutocastOptions::default(), in_dtype(DType::BF16)], vec![off()])
        {
            let run = |recompute| train(block(|o| o.recompute = recompute), &[2, 6, 32], &recipe, &options);
            let stored = run(RecomputeLevel::None);
            for level in unless_simulated(&LEVELS[1..], &LEVELS[5..]) {
                assert!(stored == run(*level), "{recipe:?}, {level:?}");
            }
        }
    }
}

#[test]
fn levels_of_recomputation_with_other_options() {
    let changes: [fn(&mut TransformerLayerOptions); 6] = [
        |o| o.parallel_attention_mlp = true,
        |o| o.output_layernorm = true,
        |o| o.fp32_residual_connection = true,
        |o| o.apply_residual_connection_post_layernorm = true,
        |o| (o.apply_residual_connection_post_layernorm, o.fp32_residual_connection) = (true, true),
        |o| {
            (o.apply_residual_connection_post_layernorm, o.attention.attention_dropout) = (true, 0.3);
            (o.hidden_dropout, o.drop_path_rate) = (0.2, 0.1);
        },
    ];
    for (i, change) in changes.into_iter().enumerate() {
        let run = |recompute| {
            let both = |o: &mut TransformerLayerOptions| {
                change(o);
                o.recompute = recompute;
            };
            train(block(both), &[2, 6, 32], &delayed(), &in_dtype(DType::BF16))
        };
        let stored = run(RecomputeLevel::None);
        let few = if i < 4 { &LEVELS[1..] } else { &LEVELS[3..5] };
        for &level in unless_simulated(&LEVELS[1..], few) {
            assert!(stored == run(level), "change {i}, {level:?}");
        }
    }
}

#[test]
fn an_original_input_gives_the_bits_of_its_codes() {
    for recipe in recipes() {
        let run = |save_original_input| {
            let options = LinearOptions {
                in_features: 32,
                out_features: 32,
                init_std: 0.2,
                save_original_input,
                ..Default::default()
            };
            let fc = Linear::new("fc", options, &device(), &mut rng(1)).unwrap();
            train(fc, &[6, 32], &recipe, &AutocastOptions::default())
        };
        assert!(run(false) == run(true), "{recipe:?}");
    }
}

#[test]
fn norms_and_activations_that_are_computed_again_give_the_same_bits() {
    for activation in [Activation::Gelu, Activation::Swiglu] {
        let run = |recompute_norm, recompute_activation| {
            let options = LayerNormMlpOptions {
                hidden_size: 24,
                ffn_hidden_size: 40,
                activation,
                init: InitOptions { init_std: 0.2, output_layer_init_std: 0.2 },
                recompute_norm,
                recompute_activation,
                ..Default::default()
            };
            let mlp = LayerNormMlp::new("mlp", options, &device(), &mut rng(1)).unwrap();
            train(mlp, &[6, 24], &delayed(), &AutocastOptions::default())
        };
        let stored = run(false, false);
        assert!(stored == run(true, false) && stored == run(false, true) && stored == run(true, true));
    }
}

/// Three microbatches, whose weight gradients are computed at once, after each scope, or all at the end.
#[test]
fn delayed_weight_gradients_have_the_bits_of_immediate_ones() {
    #[derive(PartialEq)]
    enum When {
        AtOnce,
        AfterEach,
        AtTheEnd,
    }
    for recipe in recipes() {
        let run = |when: When| {
            let mut model = block(|_| {});
            let mut scaling = Scaling::new(&model, &device()).unwrap();
            let mut left = Vec::new();
            let mut out = Vec::new();
            for seed in 0..3 {
                let x = noise([2, 6, 32], seed);
                let (y, saved) = scaling.in_autocast(&recipe, |cx| model.forward(cx, &x)).unwrap();
                let mut cx = scaling.backward().unwrap();
                if when != When::AtOnce {
                    cx.delay_wgrad();
                }
                out.push(bits(&model.backward(&mut cx, saved, &y).unwrap()));
                let wgrads = cx.take_wgrads();
                cx.commit().unwrap();
                assert_eq!(wgrads.len(), if when == When::AtOnce { 0 } else { 4 });
                if when == When::AfterEach {
                    let before = values(model_weight(&model).main_grad());
                    fp8_nn::backward_dw(&mut model, wgrads).unwrap();
                    assert!(before != values(model_weight(&model).main_grad()));
                } else {
                    left.extend(wgrads);
                }
            }
            fp8_nn::backward_dw(&mut model, left).unwrap();
            let (parameters, state) = everything(&model, &scaling);
            (out, parameters, state)
        };
        let at_once = run(When::AtOnce);
        assert!(at_once == run(When::AfterEach), "{recipe:?}");
        assert!(at_once == run(When::AtTheEnd), "{recipe:?}");
    }
}

fn model_weight(model: &TransformerLayer) -> &Parameter {
    parameters(model).into_iter().find(|p| p.name().ends_with("qkv.weight")).unwrap()
}

#[test]
fn delayed_weight_gradients_are_not_lost() {
    let mut fc = linear("fc", 16, 16, 1);
    let mut scaling = Scaling::new(&fc, &device()).unwrap();
    let x = noise([4, 16], 1);
    let (y, saved) = scaling.in_autocast(&delayed(), |cx| fc.forward(cx, &x)).unwrap();
    let mut cx = scaling.backward().unwrap();
    cx.delay_wgrad();
    fc.backward(&mut cx, saved, &y).unwrap();
    assert_eq!(
        cx.commit().unwrap_err().to_string(),
        "1 weight gradients were delayed: take them from the backward scope by take_wgrads() before its commit"
    );
    let (y, saved) = scaling.in_autocast(&delayed(), |cx| fc.forward(cx, &x)).unwrap();
    let mut cx = scaling.backward().unwrap();
    cx.delay_wgrad();
    fc.backward(&mut cx, saved, &y).unwrap();
    let wgrads = cx.take_wgrads();
    cx.commit().unwrap();
    assert_eq!(
        error(fp8_nn::backward_dw(&mut linear("other", 16, 16, 1), wgrads)),
        "backward_dw: the model has no parameter `fc.weight`: pass the model whose backward delayed the gradient"
    );
}

/// With a loss scaler, the step itself checks gradients that come later.
#[test]
fn delayed_weight_gradients_that_overflow_skip_the_step() {
    let mut fc = linear("fc", 16, 16, 1);
    let mut scaling = Scaling::new(&fc, &device()).unwrap();
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    let scaler = LossScaler::new(LossScalerOptions::default(), &device()).unwrap();
    let x = noise([4, 16], 1);
    let mut run = |x: &Tensor| {
        let mut cx = scaling.scope(&delayed(), &off()).unwrap();
        let (y, saved) = fc.forward(&mut cx, x).unwrap();
        cx.commit().unwrap();
        let mut cx = scaling.backward().unwrap();
        cx.delay_wgrad();
        let dy = scaler.scale(&mut cx, &ops::scale(&y, 1e-3).unwrap()).unwrap();
        fc.backward(&mut cx, saved, &dy).unwrap();
        assert_eq!(
            error(scaler.check(&mut cx, &fc)),
            "LossScaler: the scope delays weight gradients, so they cannot be checked in it: multiply the gradient with \
             `scale`, and leave the check to `step`"
        );
        let wgrads = cx.take_wgrads();
        cx.commit().unwrap();
        fp8_nn::backward_dw(&mut fc, wgrads).unwrap();
        scaler.step(&mut optimizer, &mut fc, 1e-3).unwrap();
        scaler.update().unwrap();
        zero_grad(&mut fc).unwrap();
        (optimizer.updates().unwrap(), scaler.skipped_steps().unwrap(), scaler.loss_scale().unwrap())
    };
    assert_eq!(run(&x), (1, 0, 65536.0));
    // Finite in forward; the weight gradient is their product with gradients of the same size, times the scale.
    let large = ops::scale(&x, 1e18).unwrap();
    assert_eq!(run(&large), (1, 1, 32768.0));
    assert_eq!(run(&x), (2, 1, 32768.0));
}

/// y = norm output + layer(norm output), by the layer's second result and by norm and layer apart.
#[test]
fn the_norms_output_is_a_result_with_a_gradient() {
    let x = noise([2, 6, 32], 1);
    let options =
        LayerNormLinearOptions { in_features: 32, out_features: 32, init_std: 0.2, ..Default::default() };
    let make = || with_noise(LayerNormLinear::new("fc", options.clone(), &device(), &mut rng(1)).unwrap(), 1);
    let mut fused = make();
    let mut scaling = Scaling::new(&fused, &device()).unwrap();
    let mut cx = scaling.scope(&delayed(), &off()).unwrap();
    let (y, normed, saved) = fused.forward_with_layernorm_output(&mut cx, &x).unwrap();
    cx.commit().unwrap();
    let backward = |cx: &mut Backward<'_>| fused.backward_with_layernorm_output(cx, saved, &y, &normed);
    let dx = scaling.in_backward(backward).unwrap();

    let norm = NormLayerOptions { hidden_size: 32, ..Default::default() };
    let fc = LinearOptions { in_features: 32, out_features: 32, ..Default::default() };
    let mut norm = LayerNorm::new("fc.norm", &norm, &device()).unwrap();
    let mut fc = Linear::new("fc", fc, &device(), &mut rng(1)).unwrap();
    let source = make();
    for (p, from) in
        parameters_mut(&mut norm).into_iter().chain(parameters_mut(&mut fc)).zip(parameters(&source))
    {
        p.set(from.tensor().clone()).unwrap();
    }
    let mut both = Stack(vec![Box::new(norm), Box::new(fc)]);
    let mut scaling = Scaling::new(&both, &device()).unwrap();
    let mut cx = scaling.scope(&delayed(), &off()).unwrap();
    let [norm, fc] = &both.0[..] else { panic!() };
    let (n, norm_saved) = norm.forward_with_info_dyn(&mut cx, &x, &SequenceInfo::default()).unwrap();
    let (z, fc_saved) = fc.forward_with_info_dyn(&mut cx, &n, &SequenceInfo::default()).unwrap();
    cx.commit().unwrap();
    assert!(bits(&n) == bits(&normed) && bits(&z) == bits(&y));
    let expected = scaling.in_backward(|cx| {
        let dn = both.0[1].backward_dyn(1, cx, fc_saved, &z)?;
        both.0[0].backward_dyn(0, cx, norm_saved, &ops::add(&dn, &n)?)
    });
    assert!(relative_rms(&values(&expected.unwrap()), &values(&dx)) < 1e-6);
    for ((name, found), (_, expected)) in grads(&fused).iter().zip(&grads(&both)) {
        assert!(relative_rms(expected, found) < 1e-6, "{name}");
    }
}

#[test]
fn a_gradient_of_the_norms_output_must_have_its_shape() {
    let mut model = mlp("mlp", Activation::Gelu, Norm::LayerNorm, 1);
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let x = noise([6, 24], 1);
    let forward = |cx: &mut Forward<'_>| model.forward_with_layernorm_output(cx, &x);
    let (y, _, saved) = scaling.in_autocast(&delayed(), forward).unwrap();
    let wrong = noise([6, 23], 1);
    let refused = scaling.in_backward(|cx| model.backward_with_layernorm_output(cx, saved, &y, &wrong));
    assert_eq!(error(refused), "mlp: dnormed of shape [6, 23]: expected [6, 24], the output's shape");
    assert!(grads(&model).iter().all(|(_, grad)| grad.iter().all(|&v| v == 0.0)));

    let options = MultiheadAttentionOptions {
        hidden_size: 24,
        attention: AttentionOptions { num_attention_heads: 4, ..Default::default() },
        ..Default::default()
    };
    let attention = MultiheadAttention::new("a", options, &device(), &mut rng(1)).unwrap();
    let mut scaling = Scaling::new(&attention, &device()).unwrap();
    let x = noise([1, 6, 24], 1);
    let forward =
        |cx: &mut Forward<'_>| attention.forward_with_layernorm_output(cx, &x, &SequenceInfo::default());
    assert_eq!(
        error(scaling.in_autocast(&delayed(), forward)),
        "a: input_layernorm = None: expected a norm, whose output is asked for"
    );
}

#[test]
fn a_bias_that_is_left_to_the_caller_is_not_added_but_has_a_gradient() {
    let run = |return_bias| {
        let options = LinearOptions { in_features: 16, out_features: 16, return_bias, ..Default::default() };
        let mut fc = with_noise(Linear::new("fc", options, &device(), &mut rng(1)).unwrap(), 1);
        let x = noise([4, 16], 1);
        let (y, dx) = super::support::first_step(&delayed(), &off(), &mut fc, &x, &x).unwrap();
        let bias = values(fc.bias().unwrap().tensor());
        let sum =
            |y: Vec<f32>| -> Vec<f32> { y.iter().zip(bias.iter().cycle()).map(|(y, b)| y + b).collect() };
        let y = if return_bias { sum(values(&y)) } else { values(&y) };
        (y, bits(&dx), grads(&fc))
    };
    let (added, left) = (run(false), run(true));
    assert!(relative_rms(&added.0, &left.0) < 1e-6);
    assert!(added.1 == left.1 && added.2 == left.2);
    // Layers that end in a Linear pass the option on.
    let parts = |return_bias| {
        let mut options = LayerNormMlpOptions { hidden_size: 24, ffn_hidden_size: 24, ..Default::default() };
        options.return_bias = return_bias;
        let mlp = with_noise(LayerNormMlp::new("mlp", options, &device(), &mut rng(1)).unwrap(), 1);
        let options = MultiheadAttentionOptions {
            hidden_size: 24,
            attention: AttentionOptions { num_attention_heads: 4, ..Default::default() },
            return_bias,
            ..Default::default()
        };
        let attention = with_noise(MultiheadAttention::new("a", options, &device(), &mut rng(1)).unwrap(), 1);
        let options =
            LayerNormLinearOptions { in_features: 24, out_features: 24, return_bias, ..Default::default() };
        let linear = with_noise(LayerNormLinear::new("fc", options, &device(), &mut rng(1)).unwrap(), 1);
        let layers: [Box<dyn DynModule>; 3] = [Box::new(mlp), Box::new(attention), Box::new(linear)];
        layers.map(|layer| {
            let bias = parameters(&*layer).into_iter().rfind(|p| p.name().ends_with(".bias")).unwrap();
            let bias = values(bias.tensor());
            let mut scaling = Scaling::new(&*layer, &device()).unwrap();
            let mut cx = scaling.scope(&delayed(), &off()).unwrap();
            let (y, _) = layer
                .forward_with_info_dyn(&mut cx, &noise([1, 4, 24], 5), &SequenceInfo::default())
                .unwrap();
            cx.commit().unwrap();
            (values(&y), bias)
        })
    };
    for ((added, bias), (left, _)) in parts(false).iter().zip(&parts(true)) {
        let sum: Vec<f32> = left.iter().zip(bias.iter().cycle()).map(|(y, b)| y + b).collect();
        assert!(relative_rms(added, &sum) < 1e-6 && relative_rms(added, left) > 1e-3);
    }
}

/// Residual sums of many layers in bf16 lose what those in f32 keep.
#[test]
fn an_f32_residual_is_not_rounded() {
    let run = |fp32_residual_connection, dtype| {
        let layers = (0..6).map(|i| {
            let mut options = block_options();
            (options.fp32_residual_connection, options.init) =
                (fp32_residual_connection, InitOptions { init_std: 0.05, output_layer_init_std: 0.05 });
            let layer =
                TransformerLayer::new(&format!("blocks.{i}"), options, &device(), &mut rng(i)).unwrap();
            Box::new(layer) as Box<dyn DynModule>
        });
        let mut model = Stack(layers.collect());
        let x = noise([2, 6, 32], 1);
        let options = AutocastOptions { compute_dtype: Some(dtype), ..off() };
        let (y, dx) = super::support::first_step(&delayed(), &options, &mut model, &x, &x).unwrap();
        (y.dtype(), values(&y), values(&dx))
    };
    let (exact, rounded, kept) = (run(false, DType::F32), run(false, DType::BF16), run(true, DType::BF16));
    assert_eq!((rounded.0, kept.0), (DType::BF16, DType::F32));
    let errors = |y: &[f32], dx: &[f32]| [relative_rms(&exact.1, y), relative_rms(&exact.2, dx)];
    let (rounded, kept) = (errors(&rounded.1, &rounded.2), errors(&kept.1, &kept.2));
    assert!(kept[0] < 0.5 * rounded[0] && kept[1] < 0.7 * rounded[1], "{kept:?} {rounded:?}");
    // bf16 parameters without a compute dtype: the residual stays f32, the branches compute in bf16.
    let mut options = block_options();
    (options.fp32_residual_connection, options.params_dtype) = (true, DType::BF16);
    let mut model = TransformerLayer::new("block", options, &device(), &mut rng(1)).unwrap();
    let x = noise([2, 6, 32], 1);
    let (y, dx) =
        super::support::first_step(&delayed(), &AutocastOptions::default(), &mut model, &x, &x).unwrap();
    assert_eq!((y.dtype(), dx.dtype()), (DType::F32, DType::F32));
}

#[test]
fn options_that_exclude_each_other_are_refused() {
    let refused = |change: fn(&mut TransformerLayerOptions)| {
        let mut options = block_options();
        change(&mut options);
        error(TransformerLayer::new("block", options, &device(), &mut rng(1)))
    };
    let post = "block: apply_residual_connection_post_layernorm = true: not together with";
    assert_eq!(
        refused(|o| (o.apply_residual_connection_post_layernorm, o.output_layernorm) = (true, true)),
        format!("{post} output_layernorm: set one of the two")
    );
    assert_eq!(
        refused(|o| (o.apply_residual_connection_post_layernorm, o.parallel_attention_mlp) = (true, true)),
        format!("{post} parallel_attention_mlp: set one of the two")
    );
}
