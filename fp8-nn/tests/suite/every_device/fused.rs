//! Layers written outside the crate that quantize in their own operations, against the crate's layers.

use super::support::{
    bits, current, delayed, device, error, everything, grads, in_dtype, linear, mlp, noise, off, rng, short,
    step,
};
use fp8_nn::prelude::*;
use fp8_nn::{LinearSaved, NormSaved};

/// The same computation as `LayerNormMlp`, made of the same parts under the same names.
#[derive(Debug)]
struct FusedMlp {
    norm: LayerNorm,
    fc1: Linear,
    fc2: Linear,
    activation: Activation,
}

composite!(FusedMlp { norm, fc1, fc2; skip activation });

impl Module for FusedMlp {
    type Saved = (NormSaved, LinearSaved, Tensor, LinearSaved, DType);

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, Self::Saved)> {
        let input_dtype = x.dtype();
        let x = ops::cast(x, cx.compute_dtype().unwrap_or(input_dtype))?;
        let mut norm = None;
        let (h, fc1) = self.fc1.forward_fused(cx, x.dtype(), |slot| {
            let (normed, saved) = self.norm.forward_slot(&x, slot)?;
            norm = Some(saved);
            Ok(normed)
        })?;
        let activation = |slot: &Slot<'_>| Ok(ops::activation(&h, self.activation, slot)?);
        let (y, fc2) = self.fc2.forward_fused(cx, h.dtype(), activation)?;
        Ok((y, (norm.unwrap(), fc1, h, fc2, input_dtype)))
    }

    fn backward(&mut self, cx: &mut Backward<'_>, saved: Self::Saved, dy: &Tensor) -> Result<Tensor> {
        let (norm, fc1, h, fc2, input_dtype) = saved;
        let da = self.fc2.backward(cx, fc2, dy)?;
        let activation = self.activation;
        let dn = self.fc1.backward_fused(cx, fc1, |slot| {
            let (dh, db) = ops::activation_backward_quantize_dbias(&da, &h, activation, slot)?;
            Ok((dh, Some(db)))
        })?;
        Ok(ops::cast(&self.norm.backward(cx, norm, &dn)?, input_dtype)?)
    }
}

/// A layer with the parameters of `mlp`.
fn like(mlp: &LayerNormMlp, activation: Activation) -> FusedMlp {
    let (device, mut rng) = (device(), rng(1));
    let all = parameters(mlp);
    let &[out, inner] = &**all[4].tensor().shape() else { panic!("fc2.weight has two dimensions") };
    let linear = |path: &str, in_features, out_features, rng: &mut _| {
        let options = LinearOptions { in_features, out_features, ..Default::default() };
        Linear::new(path, options, &device, rng).unwrap()
    };
    let width = if activation.is_gated() { 2 * inner } else { inner };
    let norm = NormLayerOptions { hidden_size: out, ..Default::default() };
    let mut fused = FusedMlp {
        norm: LayerNorm::new("mlp.norm", &norm, &device).unwrap(),
        fc1: linear("mlp.fc1", out, width, &mut rng),
        fc2: linear("mlp.fc2", inner, out, &mut rng),
        activation,
    };
    for (ours, theirs) in parameters_mut(&mut fused).into_iter().zip(all) {
        assert_eq!(ours.name(), theirs.name());
        ours.set(ops::scale(theirs.tensor(), 1.0).unwrap()).unwrap();
    }
    fused
}

/// Outputs, gradients and scaling state of four steps of training.
fn train(model: &mut impl Module, recipe: &Recipe, options: &AutocastOptions) -> Vec<Vec<u32>> {
    let mut scaling = Scaling::new(model, &device()).unwrap();
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    let mut all = Vec::new();
    for seed in 0..4 {
        let (x, dy) = (noise([5, 24], 10 + seed), noise([5, 24], 20 + seed));
        let (y, dx) = step(&mut scaling, recipe, options, model, &x, &dy).unwrap();
        all.extend([bits(&y), bits(&dx)]);
        all.extend(everything(model, &scaling).0.into_iter().map(|(.., gradient)| gradient));
        let arenas = scaling.state().unwrap().arenas.into_iter();
        all.extend(arenas.map(|arena| arena.scale.iter().map(|scale| scale.to_bits()).collect()));
        optimizer.step(model, 1e-2).unwrap();
        zero_grad(model).unwrap();
    }
    all
}

#[test]
fn a_fused_mlp_of_a_user_equals_layernorm_mlp_bit_by_bit() {
    let overridden = |high| DelayedScaling { override_linear_precision: high, ..short() }.into();
    let cases: [(Recipe, AutocastOptions); 7] = [
        (delayed(), AutocastOptions::default()),
        (current(), AutocastOptions::default()),
        (delayed(), in_dtype(DType::BF16)),
        (delayed(), off()),
        (overridden((true, false, false)), AutocastOptions::default()),
        (overridden((false, true, false)), AutocastOptions::default()),
        (overridden((false, false, true)), AutocastOptions::default()),
    ];
    for activation in [Activation::Swiglu, Activation::Gelu] {
        for (recipe, options) in &cases {
            let mut theirs = mlp("mlp", activation, Norm::LayerNorm, 3);
            let mut ours = like(&theirs, activation);
            let expected = train(&mut theirs, recipe, options);
            assert!(expected == train(&mut ours, recipe, options), "{activation}, {recipe:?}, {options:?}");
        }
    }
}

/// A slot that quantizes with a scale of 1 to the other format than `slot`.
fn in_another_format(x: &Tensor, slot: &Slot<'_>) -> Operand {
    use fp8_nn::fp8_kernels::{Cell, ScalePolicy, ScaleRule};
    let other = if slot.encoding == Encoding::E4M3 { Encoding::E5M2 } else { Encoding::E4M3 };
    let first = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
    let scale = Cell::new(1.0, &device()).unwrap();
    ops::quantize(x, &Slot::fixed(other, &scale, &first)).unwrap()
}

#[test]
fn a_fused_input_that_does_not_fit_is_refused() {
    let fc = linear("fc", 32, 16, 1);
    let mut scaling = Scaling::new(&fc, &device()).unwrap();
    let x = noise([4, 32], 2);
    let refused = |scaling: &mut Scaling, enabled: bool, quantize: &dyn Fn(&Slot<'_>) -> Result<Operand>| {
        let mut cx = scaling.scope(&delayed(), &AutocastOptions { enabled, ..Default::default() }).unwrap();
        error(fc.forward_fused(&mut cx, DType::F32, quantize))
    };
    assert_eq!(
        refused(&mut scaling, true, &|_| Ok(Operand::High(x.clone()))),
        "fc: the closure returned input in high precision, its slot asks for E4M3: pass the slot to the operation that \
         quantizes"
    );
    assert_eq!(
        refused(&mut scaling, true, &|slot| Ok(in_another_format(&x, slot))),
        "fc: the closure returned input in E5M2, its slot asks for E4M3: pass the slot to the operation that quantizes"
    );
    assert_eq!(
        refused(&mut scaling, false, &|slot| Ok(in_another_format(&x, slot))),
        "fc: the closure returned input in E5M2, its slot asks for high precision: pass the slot to the operation that \
         quantizes"
    );
    let narrow = noise([4, 31], 2);
    assert_eq!(
        refused(&mut scaling, true, &|slot| Ok(ops::quantize(&narrow, slot)?)),
        "fc: input of shape [4, 31]: expected […, 32], in_features last"
    );
    let integers = Tensor::zeros([4, 32], DType::I32, &device()).unwrap();
    assert_eq!(
        refused(&mut scaling, false, &|_| Ok(Operand::High(integers.clone()))),
        "fc: input has dtype i32: expected f32, bf16 or f16"
    );
    let mut cx = scaling.autocast(&delayed()).unwrap();
    let found = error(fc.forward_fused(&mut cx, DType::BF16, |slot| Ok(ops::quantize(&x, slot)?)));
    assert!(found.starts_with("fc: the input is bf16 and `fc.weight` is f32"), "{found}");
}

#[test]
fn a_fused_gradient_that_does_not_fit_is_refused_before_any_gradient_changes() {
    let mut fc = linear("fc", 32, 16, 1);
    let mut scaling = Scaling::new(&fc, &device()).unwrap();
    let (x, dy, narrow) = (noise([4, 32], 2), noise([4, 16], 3), noise([4, 15], 3));
    let before = grads(&fc);
    type Quantize<'a> = &'a dyn Fn(&Slot<'_>) -> Result<(Operand, Option<Tensor>)>;
    let mut refused = |quantize: Quantize<'_>| {
        let (_, saved) = scaling.in_autocast(&delayed(), |cx| fc.forward(cx, &x)).unwrap();
        let refused = error(scaling.in_backward(|cx| fc.backward_fused(cx, saved, quantize)));
        assert!(before == grads(&fc), "{refused}");
        refused
    };
    let with_sums = |dy: &Tensor, slot: &Slot<'_>| -> Result<(Operand, Option<Tensor>)> {
        let (dy, db) = ops::quantize_dbias(dy, slot)?;
        Ok((dy, Some(db)))
    };
    assert_eq!(
        refused(&|slot| Ok((ops::quantize(&dy, slot)?, None))),
        "fc: the closure returned no gradient of the bias: return the column sums of dy, which ops::quantize_dbias and \
         ops::activation_backward_quantize_dbias compute"
    );
    assert_eq!(
        refused(&|slot| Ok((with_sums(&dy, slot)?.0, with_sums(&narrow, slot)?.1))),
        "fc: db of shape [15]: expected [16], the bias's shape"
    );
    assert_eq!(
        refused(&|slot| with_sums(&narrow, slot)),
        "fc: dy of shape [4, 15]: expected [4, 16], the output's shape"
    );
    assert_eq!(
        refused(&|slot| Ok((in_another_format(&dy, slot), None))),
        "fc: the closure returned dy in E4M3, its slot asks for E5M2: pass the slot to the operation that quantizes"
    );
}

#[test]
fn a_saved_of_another_layer_is_refused() {
    let (first, mut second) = (linear("first", 32, 16, 1), linear("second", 32, 16, 1));
    let before = grads(&second);
    let pair = Pair { first, second: linear("second", 32, 16, 1) };
    let mut scaling = Scaling::new(&pair, &device()).unwrap();
    let x = noise([4, 32], 2);
    let (_, saved) = scaling.in_autocast(&delayed(), |cx| pair.first.forward(cx, &x)).unwrap();
    let refused = error(scaling.in_backward(|cx| {
        second.backward_fused(cx, saved, |slot| Ok((ops::quantize(&noise([4, 16], 3), slot)?, None)))
    }));
    assert_eq!(
        refused,
        "backward of `second`: its Saved comes from layer `first`: expected one from a committed training scope"
    );
    assert!(before == grads(&second));
}

#[derive(Debug)]
struct Pair {
    first: Linear,
    second: Linear,
}

composite!(Pair { first, second });
