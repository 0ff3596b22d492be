//! FP8 copies of weights and the scales they are made with, from step to step and from file to file.

use crate::every_device::support::{bits, device, linear, noise, off, relative_rms, rng, short, step, values};
use fp8_nn::prelude::*;
use std::collections::BTreeMap;

#[test]
fn a_frozen_weight_is_not_quantized_with_scale_1_for_ever() {
    let te = DelayedScaling::default().with_te_rules();
    let calibrates_late = DelayedScaling { calibrate_first_step: false, ..Default::default() };
    for recipe in [te, DelayedScaling::te_v0(), calibrates_late] {
        let options =
            LinearOptions { in_features: 128, out_features: 96, init_std: 0.002, ..Default::default() };
        let mut fc = Linear::new("fc", options, &device(), &mut rng(1)).unwrap();
        let weight = parameters_mut(&mut fc).into_iter().find(|of| &**of.name() == "fc.weight");
        weight.unwrap().set_trainable(false).unwrap();
        let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
        let mut scaling = Scaling::new(&fc, &device()).unwrap();
        let (x, dy, recipe) = (noise([32, 128], 2), noise([32, 96], 3), recipe.into());
        let mut errors = Vec::new();
        for _ in 0..3 {
            let high = step(&mut scaling, &recipe, &off(), &mut fc, &x, &dy).unwrap().0;
            let fp8 = step(&mut scaling, &recipe, &Default::default(), &mut fc, &x, &dy).unwrap().0;
            errors.push(relative_rms(&values(&high), &values(&fp8)));
            optimizer.step(&mut fc, 0.0).unwrap();
            zero_grad(&mut fc).unwrap();
        }
        assert!(errors[0] > 0.2 && errors[1..].iter().all(|&error| error < 0.05), "{recipe}: {errors:?}");
    }
}

#[test]
fn a_weight_that_did_not_change_before_a_save_keeps_its_codes_after_the_load() {
    let (x, dy, recipe) = (noise([8, 16], 4), noise([8, 16], 5), Recipe::from(short()));
    let run = |is_interrupted: bool| {
        let new = |seed| {
            let fc = linear("fc", 16, 16, seed);
            let scaling = Scaling::new(&fc, &device()).unwrap();
            (fc, AdamW::new(AdamWOptions::default()).unwrap(), scaling)
        };
        let (mut fc, mut optimizer, mut scaling) = new(1);
        let mut train = |fc: &mut Linear, scaling: &mut Scaling| {
            let out = step(scaling, &recipe, &Default::default(), fc, &x, &dy).unwrap();
            [bits(&out.0), bits(&out.1)]
        };
        for _ in 0..3 {
            train(&mut fc, &mut scaling);
            optimizer.step(&mut fc, 0.5).unwrap();
            zero_grad(&mut fc).unwrap();
        }
        // The slot gets another scale than the weight was quantized with, and no step follows.
        train(&mut fc, &mut scaling);
        zero_grad(&mut fc).unwrap();
        if is_interrupted {
            let dir = tempfile::tempdir().unwrap();
            checkpoint::save(dir.path(), &fc, &optimizer, &scaling, &BTreeMap::new()).unwrap();
            (fc, optimizer, scaling) = new(2);
            checkpoint::load(dir.path(), &mut fc, &mut optimizer, &mut scaling).unwrap();
        }
        (train(&mut fc, &mut scaling), scaling.state().unwrap())
    };
    let (undisturbed, resumed) = (run(false), run(true));
    assert_eq!(undisturbed, resumed);
    assert_eq!(undisturbed.1.arenas[0].weights.len(), 1);
}
