//! A scope that fails leaves no trace: the next good step has the bits that it would have had alone.

use super::support::{
    ParameterBits, bits, current, delayed, device, error, everything, gpt, ids, linear, noise, short,
    unless_simulated,
};
use fp8_nn::fp8_recipe::ScalingState;
use fp8_nn::prelude::*;

type Outcome = (Vec<u32>, ParameterBits, ScalingState);

#[derive(Clone, Copy, PartialEq, Debug)]
enum Trouble {
    None,
    ForwardDropped,
    ForwardFailed,
    BackwardDropped,
    BackwardFailed,
    Discarded,
}

fn train(recipe: &Recipe, trouble: Trouble, at: u64) -> Outcome {
    let mut model = gpt(1);
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    let mut losses = Vec::new();
    for step in 0..4 {
        if step == at {
            disturb(&mut model, &mut scaling, recipe, trouble);
        }
        let (x, targets) = (ids([2, 8], 20, step), ids([2, 8], 20, 50 + step));
        let (loss, saved) = scaling.in_autocast(recipe, |cx| model.loss(cx, &x, &targets)).unwrap();
        scaling.in_backward(|cx| model.loss_backward(cx, saved)).unwrap();
        losses.extend(bits(&loss));
        optimizer.step(&mut model, 0.01).unwrap();
        fp8_nn::zero_grad(&mut model).unwrap();
    }
    let (parameters, state) = everything(&model, &scaling);
    (losses, parameters, state)
}

fn disturb(model: &mut Gpt, scaling: &mut Scaling, recipe: &Recipe, trouble: Trouble) {
    let (x, targets) = (ids([2, 8], 20, 777), ids([2, 8], 20, 778));
    match trouble {
        Trouble::None => {}
        Trouble::ForwardDropped => {
            let mut cx = scaling.autocast(recipe).unwrap();
            model.loss(&mut cx, &x, &targets).unwrap();
        }
        Trouble::ForwardFailed => {
            let fewer = ids([2, 7], 20, 778);
            let failed = scaling.in_autocast(recipe, |cx| model.loss(cx, &x, &fewer));
            assert!(failed.is_err());
        }
        Trouble::Discarded => {
            let mut cx = scaling.autocast(recipe).unwrap();
            model.loss(&mut cx, &x, &targets).unwrap();
            cx.discard().unwrap();
        }
        Trouble::BackwardDropped | Trouble::BackwardFailed => {
            // Its forward is taken back as well: a backward that fails belongs to a step that is done again.
            let before = scaling.state().unwrap();
            let (_, saved) = scaling.in_autocast(recipe, |cx| model.loss(cx, &x, &targets)).unwrap();
            scaling.load_state(&before).unwrap();
            let mut cx = scaling.backward().unwrap();
            let result = model.loss_backward(&mut cx, saved);
            result.unwrap();
            if trouble == Trouble::BackwardFailed {
                let mut stranger = linear("stranger", 4, 4, 1);
                let mut other = Scaling::new(&stranger, &device()).unwrap();
                let (y, saved) =
                    other.in_autocast(recipe, |cx| stranger.forward(cx, &noise([4, 4], 1))).unwrap();
                assert!(stranger.backward(&mut cx, saved, &y).is_err());
            }
            drop(cx);
            fp8_nn::zero_grad(model).unwrap();
        }
    }
}

#[test]
fn a_failed_scope_and_a_good_step_are_the_good_step_alone() {
    let recipes = vec![delayed(), current(), short().with_te_rules().into()];
    for recipe in unless_simulated(recipes, vec![delayed()]) {
        let undisturbed = train(&recipe, Trouble::None, 0);
        for trouble in [
            Trouble::ForwardDropped,
            Trouble::ForwardFailed,
            Trouble::BackwardDropped,
            Trouble::BackwardFailed,
            Trouble::Discarded,
        ] {
            for at in unless_simulated(vec![0, 2], vec![2]) {
                assert!(undisturbed == train(&recipe, trouble, at), "{recipe:?}: {trouble:?} at step {at}");
            }
        }
    }
}

#[test]
fn a_dropped_scopes_saved_is_refused_by_every_layer() {
    let returns_what_backward_needs = |scaling: &mut Scaling, model: &Gpt| {
        let mut cx = scaling.autocast(&delayed())?;
        let (_, saved) = model.loss(&mut cx, &ids([2, 8], 20, 1), &ids([2, 8], 20, 2))?;
        Ok::<_, Error>(saved) // and drops the guard
    };
    let mut model = gpt(1);
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let saved = returns_what_backward_needs(&mut scaling, &model).unwrap();
    let refused = error(scaling.in_backward(|cx| model.loss_backward(cx, saved)));
    assert!(
        refused.contains("its Saved comes from a forward scope that was left without commit"),
        "{refused}"
    );

    let x = noise([4, 16], 1);
    let mut fc = linear("fc", 16, 16, 1);
    let mut mlp = fp8_nn::Recompute { inner: linear("mlp", 16, 16, 1) };
    for discards in [false, true] {
        let mut scaling = Scaling::new(&fc, &device()).unwrap();
        let mut cx = scaling.autocast(&current()).unwrap();
        let (y, saved) = fc.forward(&mut cx, &x).unwrap();
        if discards {
            cx.discard().unwrap()
        } else {
            drop(cx)
        }
        let refused = error(scaling.in_backward(|cx| fc.backward(cx, saved, &y)));
        let how = if discards { "discarded" } else { "left without commit" };
        assert!(refused.starts_with("backward of `fc`") && refused.contains(how), "{refused}");

        let mut scaling = Scaling::new(&mlp, &device()).unwrap();
        let mut cx = scaling.autocast(&current()).unwrap();
        let (y, saved) = mlp.forward(&mut cx, &x).unwrap();
        if discards {
            cx.discard().unwrap()
        } else {
            drop(cx)
        }
        let refused = error(scaling.in_backward(|cx| mlp.backward(cx, saved, &y)));
        assert!(refused.contains("left without commit"), "{refused}");
    }
}

#[test]
fn a_second_model_under_the_firsts_scaling_is_refused() {
    let (mut first, mut second) = (gpt(1), gpt(2));
    let mut scaling = Scaling::new(&first, &device()).unwrap();
    let (x, targets) = (ids([2, 8], 20, 1), ids([2, 8], 20, 2));
    let step = |scaling: &mut Scaling, model: &mut Gpt| {
        let (loss, saved) = scaling.in_autocast(&delayed(), |cx| model.loss(cx, &x, &targets))?;
        scaling.in_backward(|cx| model.loss_backward(cx, saved))?;
        Ok::<_, Error>(bits(&loss))
    };
    step(&mut scaling, &mut first).unwrap();
    let before = scaling.state().unwrap();
    let refused = error(step(&mut scaling, &mut second));
    assert!(refused.contains("belongs to another layer at the same path"), "{refused}");
    assert_eq!(scaling.state().unwrap(), before);
    // The first model is itself whatever its parameters are.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("second.safetensors");
    checkpoint::save_parameters(&file, &second).unwrap();
    checkpoint::load_parameters(&file, &mut first).unwrap();
    step(&mut scaling, &mut first).unwrap();
    // And the second has scales of its own, or the first one's.
    let mut own = Scaling::new(&second, &device()).unwrap();
    own.load_state(&scaling.state().unwrap()).unwrap();
    step(&mut own, &mut second).unwrap();
}

#[test]
fn a_layer_that_scaling_does_not_know_is_refused() {
    let (known, stranger) = (linear("fc", 16, 16, 1), linear("head", 16, 16, 2));
    let mut scaling = Scaling::new(&known, &device()).unwrap();
    let refused = scaling.in_autocast(&delayed(), |cx| stranger.forward(cx, &noise([2, 16], 1)));
    assert_eq!(
        error(refused),
        "slot `head.input` is not registered: build Scaling from the model that holds this layer"
    );
}

#[test]
fn another_scalings_saved_is_refused() {
    let mut fc = linear("fc", 16, 16, 1);
    let [mut one, mut other] = [(); 2].map(|()| Scaling::new(&fc, &device()).unwrap());
    let (y, saved) = one.in_autocast(&delayed(), |cx| fc.forward(cx, &noise([2, 16], 1))).unwrap();
    let refused = other.in_backward(|cx| fc.backward(cx, saved, &y));
    assert_eq!(
        error(refused),
        "backward of `fc`: its Saved comes from another Scaling: expected one from a committed training scope"
    );
}

#[test]
fn training_goes_on_under_another_recipe() {
    let mut model = gpt(1);
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let (x, targets) = (ids([2, 8], 20, 1), ids([2, 8], 20, 2));
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    let mut losses = Vec::new();
    for step in 0..12 {
        let recipe = if step % 2 == 0 { delayed() } else { current() };
        let (loss, saved) = scaling.in_autocast(&recipe, |cx| model.loss(cx, &x, &targets)).unwrap();
        scaling.in_backward(|cx| model.loss_backward(cx, saved)).unwrap();
        losses.push(loss.item().unwrap());
        optimizer.step(&mut model, 0.01).unwrap();
        fp8_nn::zero_grad(&mut model).unwrap();
    }
    assert!(losses[11] < losses[0] / 2.0, "{losses:?}");
    assert_eq!(scaling.state().unwrap().arenas.len(), 2); // current scaling keeps none
}
