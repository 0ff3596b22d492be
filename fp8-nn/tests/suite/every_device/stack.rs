//! Layers of any kind in one stack, users' own layers, nested recipes.

use super::support::{
    bits, current, delayed, device, error, first_step, linear, mlp, noise, parameter_bits, short, values,
};
use fp8_nn::prelude::*;
use fp8_nn::{AnySaved, LinearSaved};

fn stack() -> Stack {
    let norm =
        RmsNorm::new("1", &NormLayerOptions { hidden_size: 24, ..Default::default() }, &device()).unwrap();
    Stack(vec![
        Box::new(linear("0", 24, 24, 1)),
        Box::new(norm),
        Box::new(Recompute { inner: mlp("2", Activation::Swiglu, Norm::RmsNorm, 2) }),
        Box::new(linear("3", 24, 24, 3)),
    ])
}

#[test]
fn a_stack_is_its_layers_in_order() {
    let (x, dy) = (noise([6, 24], 1), noise([6, 24], 2));
    let mut whole = stack();
    let (y, dx) = first_step(&delayed(), &AutocastOptions::default(), &mut whole, &x, &dy).unwrap();

    let mut parts = stack();
    let mut scaling = Scaling::new(&parts, &device()).unwrap();
    let mut cx = scaling.autocast(&delayed()).unwrap();
    let (mut t, mut all) = (x, Vec::new());
    for layer in &parts.0 {
        let (y, saved) = layer.forward_dyn(&mut cx, &t).unwrap();
        all.push(saved);
        t = y;
    }
    cx.commit().unwrap();
    assert_eq!(bits(&t), bits(&y));
    let mut cx = scaling.backward().unwrap();
    let mut t = dy;
    for (layer, saved) in parts.0.iter_mut().zip(all).rev() {
        t = layer.backward_dyn(0, &mut cx, saved, &t).unwrap();
    }
    cx.commit().unwrap();
    assert_eq!(bits(&t), bits(&dx));
    assert_eq!(parameter_bits(&parts), parameter_bits(&whole));
}

#[test]
fn a_saved_in_the_wrong_place_is_refused() {
    let mut model = stack();
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let (x, dy) = (noise([6, 24], 1), noise([6, 24], 2));
    let mut refused = |change: fn(&mut Vec<AnySaved>)| {
        let (_, mut saved) = scaling.in_autocast(&delayed(), |cx| model.forward(cx, &x)).unwrap();
        change(&mut saved);
        error(scaling.in_backward(|cx| model.backward(cx, saved, &dy)))
    };
    assert_eq!(
        refused(|saved| saved.swap(1, 3)),
        "backward of layer 3: its Saved is of a RmsNorm, not of a Linear"
    );
    assert_eq!(
        refused(|saved| saved.swap(0, 3)),
        "backward of `3`: its Saved comes from layer `0`: expected one from a committed training scope"
    );
    assert_eq!(
        refused(|saved| drop(saved.pop())),
        "backward of a stack of 4 layers: its Saved has 3 parts: use the one its forward returned"
    );
}

#[test]
fn two_layers_of_one_path_are_refused() {
    let model = Stack(vec![Box::new(linear("fc", 4, 4, 1)), Box::new(linear("fc", 4, 4, 2))]);
    let refused = Scaling::new(&model, &device()).map_err(Error::from);
    assert_eq!(error(refused), "slot `fc.input` occurs twice: give the two layers different paths");
}

#[test]
fn a_norm_refuses_another_norms_saved() {
    let options = NormLayerOptions { hidden_size: 8, ..Default::default() };
    let [one, mut other] = ["one", "other"].map(|path| LayerNorm::new(path, &options, &device()).unwrap());
    let mut scaling = Scaling::new(&one, &device()).unwrap();
    let x = noise([2, 8], 1);
    let (y, saved) = scaling.in_autocast(&delayed(), |cx| one.forward(cx, &x)).unwrap();
    assert_eq!(
        error(scaling.in_backward(|cx| other.backward(cx, saved, &y))),
        "backward of `other`: its Saved comes from layer `one`: expected one from a committed training scope"
    );
}

/// A user's own layer: its body under the caller's recipe, its head always under current scaling.
#[derive(Debug)]
struct Classifier {
    body: Stack,
    head: Linear,
}

composite!(Classifier { body, head });

impl Module for Classifier {
    type Saved = (Vec<AnySaved>, LinearSaved);

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, Self::Saved)> {
        let (h, body) = self.body.forward(cx, x)?;
        let (y, head) = self.head.forward(&mut cx.nested(&current())?, &h)?;
        Ok((y, (body, head)))
    }

    fn backward(&mut self, cx: &mut Backward<'_>, saved: Self::Saved, dy: &Tensor) -> Result<Tensor> {
        let dh = self.head.backward(cx, saved.1, dy)?;
        self.body.backward(cx, saved.0, &dh)
    }
}

#[test]
fn a_nested_recipe_rules_inside_and_in_backward() {
    let (x, dy) = (noise([6, 24], 1), noise([6, 10], 2));
    let mut model = Classifier { body: stack(), head: linear("head", 24, 10, 4) };
    let body: usize = parameters(&stack()).iter().map(|p| p.tensor().numel()).sum();
    assert_eq!(num_parameters(&model), body + 24 * 10 + 10);
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    // Te's rules: scale 1 on the first step, which the head must not see.
    let recipe: Recipe = short().with_te_rules().into();
    let mut outputs = Vec::new();
    for factor in [1.0, 1000.0] {
        let dy = ops::scale(&dy, factor).unwrap();
        let (_, saved) = scaling.in_autocast(&recipe, |cx| model.forward(cx, &x)).unwrap();
        scaling.in_backward(|cx| model.backward(cx, saved, &dy)).unwrap();
        let head: Vec<_> = parameters(&model.head).iter().map(|p| values(p.main_grad())).collect();
        fp8_nn::zero_grad(&mut model).unwrap();
        outputs.push(head);
    }
    let state = scaling.state().unwrap();
    assert_eq!(state.arenas.len(), 2);
    for arena in &state.arenas {
        let newest = arena.amax_history.last().unwrap();
        for (name, amax) in arena.slots.iter().zip(newest) {
            assert_eq!(*amax > 0.0, !name.starts_with("head"), "{name}: {amax}");
        }
    }
    // A thousand times the gradient overflows nothing under current scaling: db is exact, dw scales along.
    let expected: Vec<f32> = outputs[0][1].iter().map(|v| v * 1000.0).collect();
    super::support::assert_close("db", &expected, &outputs[1][1], 1e-5);
}

#[test]
fn a_high_precision_head_records_nothing() {
    let model = linear("head", 16, 16, 1);
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let x = noise([4, 16], 2);
    let mut cx = scaling.autocast(&delayed()).unwrap();
    let (y, _) = model.forward(&mut cx.disabled(), &x).unwrap();
    cx.commit().unwrap();
    let expected = ops::gemm(
        &x,
        model.weight().tensor(),
        ops::Layout::Nt,
        model.bias().map(Parameter::tensor),
        DType::F32,
    );
    assert_eq!(bits(&y), bits(&expected.unwrap()));
    assert!(
        scaling.state().unwrap().arenas.iter().all(|arena| arena.scale.iter().all(|&scale| scale == -1.0))
    );
}
