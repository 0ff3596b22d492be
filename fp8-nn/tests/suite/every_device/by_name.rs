//! Recipes by the name of the slot, in layers: which GEMMs run in FP8, with which numbers.

use super::support::{bits, device, linear, mlp, noise, parameter_bits, short, step};
use fp8_nn::prelude::*;

/// y, dx and gradients of two steps; the first has scales of its own, the second those of the first.
fn run<M: Module>(mut layer: M, recipe: &Recipe, hidden: usize) -> Vec<Vec<u32>> {
    let mut scaling = Scaling::new(&layer, &device()).unwrap();
    let mut out = Vec::new();
    for seed in 0..2 {
        let (x, dy) = (noise([2, 8, hidden], seed), noise([2, 8, hidden], 10 + seed));
        let (y, dx) = step(&mut scaling, recipe, &AutocastOptions::default(), &mut layer, &x, &dy).unwrap();
        out.extend([bits(&y), bits(&dx)]);
    }
    out.extend(parameter_bits(&layer).into_iter().map(|(_, _, gradient)| gradient));
    out
}

fn delayed(override_linear_precision: (bool, bool, bool)) -> Recipe {
    DelayedScaling { override_linear_precision, ..short() }.into()
}

#[test]
fn an_operand_that_is_off_turns_off_its_gemms() {
    let plain = delayed((false, false, false));
    for (pattern, overrides) in [
        ("*.input", (true, false, true)),
        ("*.weight", (true, true, false)),
        ("*.grad_output", (false, true, true)),
        ("*", (true, true, true)),
    ] {
        let by_name = Recipe::by_name([(pattern, Recipe::off())], plain.clone());
        let overridden = delayed(overrides);
        assert_eq!(
            run(linear("a", 32, 32, 1), &by_name, 32),
            run(linear("a", 32, 32, 1), &overridden, 32),
            "{pattern}"
        );
        let mlp = || mlp("a", Activation::Swiglu, Norm::RmsNorm, 1);
        assert_eq!(run(mlp(), &by_name, 24), run(mlp(), &overridden, 24), "{pattern}");
    }
}

#[test]
fn a_layer_of_a_stack_runs_as_it_does_alone() {
    let current: Recipe = CurrentScaling { quant: QParams::POWER_2.into(), ..Default::default() }.into();
    let plain = delayed((false, false, false));
    let stack = |recipes: [&Recipe; 2]| {
        let mut layers = [linear("a", 32, 32, 1), linear("b", 32, 32, 2)];
        // Each layer with a recipe, in nested scopes or by name.
        let by_name = Recipe::by_name([("a", recipes[0].clone())], recipes[1].clone());
        let mut out = Vec::new();
        for is_nested in [true, false] {
            let model = vec![layers[0].gemm_slots().clone(), layers[1].gemm_slots().clone()];
            let mut scaling = Scaling::new(&model, &device()).unwrap();
            for seed in 0..2 {
                let (x, dy) = (noise([4, 32], seed), noise([4, 32], 10 + seed));
                let outer = if is_nested { &plain } else { &by_name };
                let mut cx = scaling.autocast(outer).unwrap();
                let (h, first) = match is_nested {
                    true => layers[0].forward(&mut cx.nested(recipes[0]).unwrap(), &x),
                    false => layers[0].forward(&mut cx, &x),
                }
                .unwrap();
                let (y, second) = match is_nested {
                    true => layers[1].forward(&mut cx.nested(recipes[1]).unwrap(), &h),
                    false => layers[1].forward(&mut cx, &h),
                }
                .unwrap();
                cx.commit().unwrap();
                let mut cx = scaling.backward().unwrap();
                let dh = layers[1].backward(&mut cx, second, &dy).unwrap();
                let dx = layers[0].backward(&mut cx, first, &dh).unwrap();
                cx.commit().unwrap();
                out.push(vec![bits(&y), bits(&dx)]);
            }
            for layer in &mut layers {
                fp8_nn::zero_grad(layer).unwrap();
            }
        }
        out
    };
    for recipes in [[&current, &plain], [&plain, &current]] {
        let out = stack(recipes);
        assert_eq!(out[..2], out[2..]);
    }
    assert_ne!(stack([&current, &plain])[0], stack([&plain, &current])[0]);
}
