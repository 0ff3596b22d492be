//! One `Scaling` serves the layers that it was made from.

use super::support::{Model, device, message, scale_of, short, tensor};
use fp8_recipe::fp8_kernels::ops;
use fp8_recipe::{GemmSlots, Recipe, Result, Scaling};

/// A whole step of the one layer of a model, under a `Scaling` of its choice.
fn train(scaling: &mut Scaling, recipe: &Recipe, layer: &GemmSlots) -> Result<[f32; 3]> {
    let mut cx = scaling.autocast(recipe)?;
    let x8 = ops::quantize(&tensor(&[1.0]), &cx.slot(&layer.input)?)?;
    let w8 = cx.quantize_weight(&layer.weight, 1, &tensor(&[2.0]))?;
    let origin = cx.origin(&layer.input);
    cx.commit()?;
    let mut cx = scaling.backward()?;
    let dy8 = ops::quantize(&tensor(&[4.0]), &cx.slot(&origin, &layer.grad_output)?)?;
    cx.commit()?;
    Ok([&x8, &w8, &dy8].map(scale_of))
}

#[test]
fn a_second_model_with_the_same_paths_is_refused() {
    let [first, second] = [(); 2].map(|()| GemmSlots::new("fc"));
    let (mut scaling, recipe) = (Scaling::new(&first, &device()).unwrap(), Recipe::from(short()));
    let scales = train(&mut scaling, &recipe, &first).unwrap();
    let before = scaling.state().unwrap();
    let text = "slot `fc.input` belongs to another layer at the same path: this Scaling serves the model it was \
                made from; make one for each model by Scaling::new";
    assert_eq!(message(train(&mut scaling, &recipe, &second)), text);
    let mut cx = scaling.eval(&recipe).unwrap();
    assert_eq!(message(cx.slot(&second.input)), text);
    assert!(message(cx.quantize_weight(&second.weight, 2, &tensor(&[1.0]))).starts_with("slot `fc.weight`"));
    assert_eq!(
        cx.quantize_weight(&first.weight, 1, &tensor(&[99.0])).map(|w8| scale_of(&w8)).unwrap(),
        224.0
    );
    drop(cx);
    let mut cx = scaling.autocast(&recipe).unwrap();
    let origin = cx.origin(&first.input);
    ops::quantize(&tensor(&[1.0]), &cx.slot(&first.input).unwrap()).unwrap();
    cx.discard().unwrap();
    let mut cx = scaling.backward().unwrap();
    assert!(message(cx.slot(&origin, &second.grad_output)).contains("fc"));
    drop(cx);
    assert_eq!(scaling.state().unwrap(), before);
    assert_eq!(train(&mut scaling, &recipe, &first).unwrap(), scales);
}

#[test]
fn two_scalings_serve_one_model() {
    let (layer, recipe) = (GemmSlots::new("fc"), Recipe::from(short()));
    let [mut first, mut second] = [(); 2].map(|()| Scaling::new(&layer, &device()).unwrap());
    for _ in 0..2 {
        assert_eq!(train(&mut first, &recipe, &layer).unwrap(), [448.0, 224.0, 14336.0]);
        assert_eq!(train(&mut second, &recipe, &layer).unwrap(), [448.0, 224.0, 14336.0]);
    }
    assert_eq!(first.state().unwrap(), second.state().unwrap());
}

/// Slots are values: a copy is the same slot, and one made by its name alone stands for any layer's.
#[test]
fn copies_and_bare_names_stand_for_the_layer() {
    let (layer, recipe) = (GemmSlots::new("fc"), Recipe::from(short()));
    let mut scaling = Scaling::new(&Model(vec![layer.clone()]), &device()).unwrap();
    train(&mut scaling, &recipe, &layer).unwrap();
    let mut cx = scaling.eval(&recipe).unwrap();
    assert!(cx.slot(&layer.clone().input).is_ok());
    let bare = super::support::input("fc");
    assert!(cx.slot(&bare).is_ok());
    assert_eq!(bare, layer.input);
    assert_eq!(GemmSlots::new("fc").input, layer.input);
}

/// Evaluates an average of the weights in a `Scaling` of its own, which has loaded the state of the trained one.
#[test]
fn a_copy_of_the_model_is_evaluated_with_the_trained_scales() {
    let [trained, average] = [(); 2].map(|()| GemmSlots::new("fc"));
    let (mut scaling, recipe) = (Scaling::new(&trained, &device()).unwrap(), Recipe::from(short()));
    train(&mut scaling, &recipe, &trained).unwrap();
    let mut copy = Scaling::new(&average, &device()).unwrap();
    copy.load_state(&scaling.state().unwrap()).unwrap();
    let mut cx = copy.eval(&recipe).unwrap();
    let x8 = ops::quantize(&tensor(&[0.1]), &cx.slot(&average.input).unwrap()).unwrap();
    assert_eq!(scale_of(&x8), 448.0);
}
