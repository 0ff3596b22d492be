//! Backward recomputes the same bits that would have been stored.

use super::support::{
    ParameterBits, bits, block, delayed, device, error, everything, in_dtype, linear, mlp, noise, short,
    unless_simulated,
};
use fp8_nn::fp8_recipe::ScalingState;
use fp8_nn::prelude::*;

type Outcome = (Vec<Vec<u32>>, ParameterBits, ScalingState);

/// Steps of several forwards, each its own scope, before their backwards in reverse order.
fn train<M: Module>(mut model: M, recipe: &Recipe, options: &AutocastOptions, pipeline: u64) -> Outcome {
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    let mut out = Vec::new();
    for step in 0..unless_simulated(4, 2) {
        let mut forwards = Vec::new();
        for i in 0..pipeline {
            let x = noise([2, 6, 32], 10 * step + i);
            let mut cx = scaling.scope(recipe, options).unwrap();
            forwards.push(model.forward(&mut cx, &x).unwrap());
            cx.commit().unwrap();
        }
        for (y, saved) in forwards.into_iter().rev() {
            let dx = scaling.in_backward(|cx| model.backward(cx, saved, &y)).unwrap();
            out.extend([bits(&y), bits(&dx)]);
        }
        optimizer.step(&mut model, 0.01).unwrap();
        fp8_nn::zero_grad(&mut model).unwrap();
    }
    let (parameters, state) = everything(&model, &scaling);
    (out, parameters, state)
}

fn recipes() -> Vec<Recipe> {
    let overridden = DelayedScaling { override_linear_precision: (false, false, true), ..short() };
    let mut recipes = super::support::recipes();
    recipes.extend([short().with_te_rules().into(), overridden.into()]);
    recipes
}

#[test]
fn recomputed_equals_stored() {
    for recipe in recipes() {
        for pipeline in unless_simulated(vec![1, 3], vec![3]) {
            let bf16 = in_dtype(DType::BF16);
            let both = vec![AutocastOptions::default(), bf16.clone()];
            for options in unless_simulated(both, vec![bf16]) {
                let stored = train(block("block", 1), &recipe, &options, pipeline);
                let recomputed = train(Recompute { inner: block("block", 1) }, &recipe, &options, pipeline);
                assert!(stored == recomputed, "{recipe:?}, {pipeline} forwards");
            }
        }
    }
}

#[test]
fn nested_recomputation_equals_stored() {
    let stack = |twice: bool| {
        let parts: Vec<Box<dyn DynModule>> = if twice {
            let inner = Stack(vec![
                Box::new(Recompute { inner: linear("a", 32, 32, 1) }),
                Box::new(Recompute { inner: Recompute { inner: linear("b", 32, 32, 2) } }),
            ]);
            vec![Box::new(Recompute { inner })]
        } else {
            vec![Box::new(linear("a", 32, 32, 1)), Box::new(linear("b", 32, 32, 2))]
        };
        Stack(parts)
    };
    for recipe in recipes() {
        let options = AutocastOptions::default();
        assert!(
            train(stack(false), &recipe, &options, 2) == train(stack(true), &recipe, &options, 2),
            "{recipe:?}"
        );
    }
}

#[test]
fn a_failed_scope_between_forward_and_backward_changes_nothing() {
    let run = |fail: bool| {
        let mut model = Recompute { inner: mlp("mlp", Activation::Gelu, Norm::LayerNorm, 1) };
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let x = noise([6, 24], 1);
        let (y, saved) = scaling.in_autocast(&delayed(), |cx| model.forward(cx, &x)).unwrap();
        if fail {
            let failed = scaling.in_autocast(&delayed(), |cx| {
                model.forward(cx, &noise([6, 24], 9))?;
                model.forward(cx, &noise([6, 23], 9))
            });
            assert!(failed.is_err());
        }
        let dx = scaling.in_backward(|cx| model.backward(cx, saved, &y)).unwrap();
        (bits(&dx), everything(&model, &scaling))
    };
    assert!(run(false) == run(true));
}

#[test]
fn without_a_commit_there_is_nothing_to_replay() {
    let mut model = Recompute { inner: linear("fc", 16, 16, 1) };
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let x = noise([4, 16], 1);
    let text = "replay: no scales were kept: the forward scope of this Saved was an evaluation or left without commit";
    let (y, saved) = model.forward(&mut scaling.eval(&delayed()).unwrap(), &x).unwrap();
    assert_eq!(error(scaling.in_backward(|cx| model.backward(cx, saved, &y))), text);
    let mut cx = scaling.autocast(&delayed()).unwrap();
    let (y, saved) = model.forward(&mut cx, &x).unwrap();
    drop(cx);
    assert_eq!(error(scaling.in_backward(|cx| model.backward(cx, saved, &y))), text);
}
