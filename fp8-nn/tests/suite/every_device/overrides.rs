//! Checks the operands of every GEMM, under every kind of recipe: every combination of `override_linear_precision` against
//! an oracle of fake-quantized operands, multiplied in f64.
//!
//! The oracle takes norms and activations from the operations, which have proofs of their own, and composes the rest.

use super::support::{
    assert_close, device, grads, linear, mlp, noise, of_fp8_sums, relative_rms, rng, short, step,
    unless_simulated, values, with_noise,
};
use fp8_nn::fp8_kernels::{Scale, ScalePolicy, ScaleRule, Slot};
use fp8_nn::fp8_recipe::{CustomRecipe, Direction, GemmSlots, Mxfp8, SlotRole, SlotUpdate};
use fp8_nn::prelude::*;
use std::collections::BTreeMap;

/// f64, row-major.
#[derive(Clone)]
struct Matrix {
    rows: usize,
    cols: usize,
    data: Vec<f64>,
}

impl Matrix {
    fn of(t: &Tensor) -> Self {
        let [rows, cols] = t.shape().matrix();
        Self { rows, cols, data: values(t).into_iter().map(f64::from).collect() }
    }

    fn transposed(&self) -> Self {
        let at = |i: usize| self.data[i % self.rows * self.cols + i / self.rows];
        Self { rows: self.cols, cols: self.rows, data: (0..self.data.len()).map(at).collect() }
    }

    fn times(&self, other: &Self) -> Self {
        assert_eq!(self.cols, other.rows);
        let mut data = vec![0.0; self.rows * other.cols];
        for i in 0..self.rows {
            for k in 0..self.cols {
                for j in 0..other.cols {
                    data[i * other.cols + j] += self.data[i * self.cols + k] * other.data[k * other.cols + j];
                }
            }
        }
        Self { rows: self.rows, cols: other.cols, data }
    }

    fn tensor(&self, shape: Shape) -> Tensor {
        Tensor::from_vec(self.data.iter().map(|&v| v as f32).collect(), shape, &device()).unwrap()
    }
}

/// Quantizes `t` with the scale of its own amax, as a first step does, and dequantizes it.
fn fake(t: &Tensor, encoding: Encoding) -> Tensor {
    let rule = ScaleRule::Delayed { fp8_max: encoding.max(), margin: 0, policy: ScalePolicy::Exact };
    let slot = Slot { scale: Scale::FromTensor(&rule), ..Slot::off(encoding) };
    ops::quantize(t, &slot).unwrap().dequantize(DType::F32).unwrap()
}

/// The GEMMs that run in high precision, of fprop, dgrad and wgrad, and the formats of both passes.
#[derive(Clone, Copy)]
struct Gemms {
    high: (bool, bool, bool),
    format: Format,
}

impl Gemms {
    fn pick(self, t: &Tensor, high: bool, direction: Direction) -> Matrix {
        Matrix::of(&if high { t.clone() } else { fake(t, self.format.encoding(direction)) })
    }

    fn fprop(self, x: &Tensor, w: &Tensor, bias: &Tensor) -> Tensor {
        let [x8, w8] = [x, w].map(|t| self.pick(t, self.high.0, Direction::Forward));
        let mut y = x8.times(&w8.transposed());
        let bias = values(bias);
        y.data.iter_mut().enumerate().for_each(|(i, y)| *y += f64::from(bias[i % bias.len()]));
        y.tensor(x.shape().with_last(bias.len()))
    }

    fn dgrad(self, dy: &Tensor, w: &Tensor) -> Tensor {
        let (dy8, w8) =
            (self.pick(dy, self.high.1, Direction::Backward), self.pick(w, self.high.1, Direction::Forward));
        dy8.times(&w8).tensor(dy.shape().with_last(w.shape().last_dim()))
    }

    fn wgrad(self, dy: &Tensor, x: &Tensor) -> Tensor {
        let (dy8, x8) =
            (self.pick(dy, self.high.2, Direction::Backward), self.pick(x, self.high.2, Direction::Forward));
        dy8.transposed().times(&x8).tensor(Shape::from([dy.shape().last_dim(), x.shape().last_dim()]))
    }
}

fn all() -> impl Iterator<Item = (bool, bool, bool)> {
    (0..8).map(|i| (i & 1 != 0, i & 2 != 0, i & 4 != 0))
}

fn recipe(gemms: Gemms) -> Recipe {
    DelayedScaling { override_linear_precision: gemms.high, fp8_format: gemms.format, ..short() }.into()
}

fn parameters(model: &impl Layer) -> BTreeMap<String, Tensor> {
    fp8_nn::parameters(model).into_iter().map(|p| (p.name().to_string(), p.tensor().clone())).collect()
}

fn run<M: Module>(gemms: Gemms, model: &mut M, x: &Tensor, dy: &Tensor) -> BTreeMap<String, Vec<f32>> {
    let mut scaling = Scaling::new(model, &device()).unwrap();
    let (y, dx) = step(&mut scaling, &recipe(gemms), &AutocastOptions::default(), model, x, dy).unwrap();
    let mut computed: BTreeMap<_, _> = grads(model).into_iter().collect();
    computed.extend([("y".to_owned(), values(&y)), ("dx".to_owned(), values(&dx))]);
    computed
}

fn linear_oracle(
    gemms: Gemms,
    p: &BTreeMap<String, Tensor>,
    x: &Tensor,
    dy: &Tensor,
) -> [(&'static str, Tensor); 4] {
    let (w, b) = (&p["fc.weight"], &p["fc.bias"]);
    [
        ("y", gemms.fprop(x, w, b)),
        ("dx", gemms.dgrad(dy, w)),
        ("fc.weight", gemms.wgrad(dy, x)),
        ("fc.bias", ops::column_sums(dy).unwrap()),
    ]
}

#[test]
fn linear_uses_what_the_recipe_says() {
    for format in [Format::Hybrid, Format::E4M3] {
        for high in all() {
            // Square: a weight or an operand taken the wrong way round has the right shape and other values.
            for [m, n, k] in [[16, 16, 16], [19, 13, 37]] {
                let gemms = Gemms { high, format };
                let (mut fc, x, dy) = (linear("fc", k, n, 1), noise([m, k], 2), noise([m, n], 3));
                let expected = linear_oracle(gemms, &parameters(&fc), &x, &dy);
                let actual = run(gemms, &mut fc, &x, &dy);
                for (name, expected) in expected {
                    assert_close(
                        &format!("{high:?} {m} {n} {k} {name}"),
                        &values(&expected),
                        &actual[name],
                        // Tensor cores add FP8 products with fewer bits than f32 has.
                        of_fp8_sums(1e-2, 2e-6),
                    );
                }
            }
        }
    }
}

#[test]
fn the_oracle_tells_orientations_and_precisions_apart() {
    let (fc, x, dy) = (linear("fc", 16, 16, 1), noise([16, 16], 2), noise([16, 16], 3));
    let w = &parameters(&fc)["fc.weight"];
    let fp8 = Gemms { high: (false, false, false), format: Format::Hybrid };
    let right = fp8.dgrad(&dy, w);
    for wrong in [
        fp8.dgrad(&dy, &ops::transpose(w).unwrap()),
        Gemms { high: (false, true, false), ..fp8 }.dgrad(&dy, w),
        Gemms { format: Format::E4M3, ..fp8 }.dgrad(&dy, w),
    ] {
        assert!(relative_rms(&values(&right), &values(&wrong)) > 0.01);
    }
    let (right, wrong) = (fp8.wgrad(&dy, &x), ops::transpose(&fp8.wgrad(&dy, &x)).unwrap());
    assert!(relative_rms(&values(&right), &values(&wrong)) > 0.5);
}

fn normed(p: &BTreeMap<String, Tensor>, x: &Tensor) -> (Tensor, fp8_nn::fp8_kernels::ops::NormStats) {
    let (w, b) = (&p["layer.norm.weight"], p.get("layer.norm.bias"));
    let (y, stats) = ops::norm(x, w, b, &norm_options(b), &Slot::off(Encoding::E4M3)).unwrap();
    (y.dequantize(DType::F32).unwrap(), stats)
}

fn norm_options(bias: Option<&Tensor>) -> ops::NormOptions {
    let norm = if bias.is_some() { Norm::LayerNorm } else { Norm::RmsNorm };
    ops::NormOptions { normalization: norm, eps: 1e-5, zero_centered_gamma: false }
}

/// dx and the norm's gradients.
fn norm_gradients(p: &BTreeMap<String, Tensor>, x: &Tensor, dn: &Tensor) -> Vec<(&'static str, Tensor)> {
    let (w, b) = (&p["layer.norm.weight"], p.get("layer.norm.bias"));
    let (dx, dgamma, dbeta) = ops::norm_backward(dn, x, w, &normed(p, x).1, &norm_options(b)).unwrap();
    let dbeta = dbeta.map(|dbeta| ("layer.norm.bias", dbeta));
    [("dx", dx), ("layer.norm.weight", dgamma)].into_iter().chain(dbeta).collect()
}

fn compare(what: &str, expected: Vec<(&'static str, Tensor)>, actual: &BTreeMap<String, Vec<f32>>) {
    assert_eq!(expected.len(), actual.len());
    for (name, expected) in expected {
        // A sum in another order may move a value over the edge between two codes, once in a million.
        let error = relative_rms(&values(&expected), &actual[name]);
        assert!(error < of_fp8_sums(2e-2, 2e-3), "{what} {name}: {error}");
    }
}

#[test]
fn norm_and_linear_use_what_the_recipe_says() {
    for high in all() {
        for normalization in [Norm::LayerNorm, Norm::RmsNorm] {
            let sizes = LayerNormLinearOptions { in_features: 32, out_features: 32, ..Default::default() };
            let options = LayerNormLinearOptions {
                norm: NormOptions { normalization, ..sizes.norm },
                init_std: 0.2,
                ..sizes
            };
            let mut layer =
                with_noise(LayerNormLinear::new("layer", options, &device(), &mut rng(1)).unwrap(), 1);
            let gemms = Gemms { high, format: Format::Hybrid };
            let (p, x, dy) = (parameters(&layer), noise([2, 8, 32], 2), noise([2, 8, 32], 3));
            let (n, w) = (normed(&p, &x).0, &p["layer.weight"]);
            let mut expected = norm_gradients(&p, &x, &gemms.dgrad(&dy, w));
            expected.extend([
                ("y", gemms.fprop(&n, w, &p["layer.bias"])),
                ("layer.weight", gemms.wgrad(&dy, &n)),
                ("layer.bias", ops::column_sums(&dy).unwrap()),
            ]);
            compare(&format!("{high:?} {normalization}"), expected, &run(gemms, &mut layer, &x, &dy));
        }
    }
}

#[test]
fn mlp_uses_what_the_recipe_says() {
    for high in all() {
        for activation in [Activation::Gelu, Activation::Swiglu] {
            let mut layer = mlp("layer", activation, Norm::LayerNorm, 1);
            let gemms = Gemms { high, format: Format::Hybrid };
            let (p, x, dy) = (parameters(&layer), noise([2, 9, 24], 2), noise([2, 9, 24], 3));
            let [w1, w2] = ["layer.fc1.weight", "layer.fc2.weight"].map(|name| &p[name]);
            let n = normed(&p, &x).0;
            let h = gemms.fprop(&n, w1, &p["layer.fc1.bias"]);
            let a = ops::activation(&h, activation, &Slot::off(Encoding::E4M3)).unwrap();
            let a = a.dequantize(DType::F32).unwrap();
            let dh = ops::activation_backward(&gemms.dgrad(&dy, w2), &h, activation).unwrap();
            let mut expected = norm_gradients(&p, &x, &gemms.dgrad(&dh, w1));
            expected.extend([
                ("y", gemms.fprop(&a, w2, &p["layer.fc2.bias"])),
                ("layer.fc1.weight", gemms.wgrad(&dh, &n)),
                ("layer.fc1.bias", ops::column_sums(&dh).unwrap()),
                ("layer.fc2.weight", gemms.wgrad(&dy, &a)),
                ("layer.fc2.bias", ops::column_sums(&dy).unwrap()),
            ]);
            compare(&format!("{high:?} {activation}"), expected, &run(gemms, &mut layer, &x, &dy));
        }
    }
}

/// The kinds of recipes that [`overridden`] makes.
pub(crate) const RECIPES: [&str; 6] = ["delayed", "current", "rowwise", "block", "mxfp8", "custom"];

/// A recipe of a kind, with these GEMMs in high precision.
pub(crate) fn overridden(kind: &str, override_linear_precision: (bool, bool, bool)) -> Recipe {
    match kind {
        "delayed" => DelayedScaling { override_linear_precision, ..short() }.into(),
        "current" => CurrentScaling { override_linear_precision, ..Default::default() }.into(),
        "rowwise" => CurrentScaling { override_linear_precision, ..CurrentScaling::rowwise() }.into(),
        "block" => BlockScaling { override_linear_precision, ..Default::default() }.into(),
        "mxfp8" => Mxfp8 { override_linear_precision, ..Default::default() }.into(),
        _ => Recipe::custom(Newest { override_linear_precision }),
    }
}

/// A recipe of the user's own: the newest amax.
#[derive(Debug)]
struct Newest {
    override_linear_precision: (bool, bool, bool),
}

impl CustomRecipe for Newest {
    fn name(&self) -> &str {
        "newest"
    }

    fn scale(&self, slot: &SlotUpdate<'_>, _: &mut [f32]) -> f32 {
        slot.fp8_max / slot.amax
    }

    fn override_linear_precision(&self) -> (bool, bool, bool) {
        self.override_linear_precision
    }
}

/// Quantizes `t` as a recipe does in the slot of a role, with scales along its rows, and dequantizes it.
fn fake_by_recipe(recipe: &Recipe, role: SlotRole, t: &Tensor) -> Tensor {
    let slots = GemmSlots::new("fc");
    let mut scaling = Scaling::new(&slots, &device()).unwrap();
    let codes = if role == SlotRole::GradOutput {
        let cx = scaling.autocast(recipe).unwrap();
        let origin = cx.origin(&slots.grad_output);
        cx.commit().unwrap();
        let mut cx = scaling.backward().unwrap();
        ops::quantize(t, &cx.slot(&origin, &slots.grad_output).unwrap().rowwise_only()).unwrap()
    } else {
        let name = if role == SlotRole::Weight { &slots.weight } else { &slots.input };
        let mut cx = scaling.autocast(recipe).unwrap();
        ops::quantize(t, &cx.slot(name).unwrap().rowwise_only()).unwrap()
    };
    codes.dequantize(DType::F32).unwrap()
}

/// An operand of a GEMM that reads `t` along its rows, or along its columns: scales run along what the GEMM sums over.
fn operand(recipe: Option<&Recipe>, role: SlotRole, t: &Tensor, along_columns: bool) -> Matrix {
    let Some(recipe) = recipe else { return Matrix::of(t) };
    if along_columns {
        let turned = ops::transpose(t).unwrap();
        Matrix::of(&fake_by_recipe(recipe, role, &turned)).transposed()
    } else {
        Matrix::of(&fake_by_recipe(recipe, role, t))
    }
}

/// y, dx and dw of a Linear without bias: each GEMM with the codes of its operands, or with the operands.
fn gemms_by_recipe(
    kind: &str,
    high: (bool, bool, bool),
    [x, w, dy]: [&Tensor; 3],
) -> [(&'static str, Matrix); 3] {
    use SlotRole::{GradOutput, Input, Weight};
    let recipe = overridden(kind, (false, false, false));
    let [fprop, dgrad, wgrad] = [high.0, high.1, high.2].map(|high| (!high).then_some(&recipe));
    let y = operand(fprop, Input, x, false).times(&operand(fprop, Weight, w, false).transposed());
    let dx = operand(dgrad, GradOutput, dy, false).times(&operand(dgrad, Weight, w, true));
    let dw = operand(wgrad, GradOutput, dy, true).transposed().times(&operand(wgrad, Input, x, true));
    [("y", y), ("dx", dx), ("fc.weight", dw)]
}

#[test]
fn linear_uses_what_every_recipe_says_in_every_dtype() {
    let kinds = unless_simulated(&RECIPES[..], &["block"]);
    for dtype in unless_simulated(&[DType::F32, DType::BF16, DType::F16][..], &[DType::BF16]) {
        // Half a unit in the last place of the largest value, and what f32 sums lose.
        let rounding = match dtype {
            DType::BF16 => 2f64.powi(-8),
            DType::F16 => 2f64.powi(-11),
            _ => 0.0,
        };
        let [m, n, k] = [32, 64, 96];
        let options = LinearOptions {
            in_features: k,
            out_features: n,
            bias: false,
            params_dtype: *dtype,
            init_std: 0.2,
            ..Default::default()
        };
        let on = |shape: [usize; 2], seed| ops::cast(&noise(shape, seed), *dtype).unwrap();
        let (x, dy) = (on([m, k], 2), on([m, n], 3));
        for kind in kinds {
            for high in all() {
                let mut fc = Linear::new("fc", options.clone(), &device(), &mut rng(1)).unwrap();
                let w = fc.weight().tensor().clone();
                let expected = gemms_by_recipe(kind, high, [&x, &w, &dy]);
                let mut scaling = Scaling::new(&fc, &device()).unwrap();
                let recipe = overridden(kind, high);
                let (y, dx) =
                    step(&mut scaling, &recipe, &AutocastOptions::default(), &mut fc, &x, &dy).unwrap();
                let mut actual: BTreeMap<_, _> = grads(&fc).into_iter().collect();
                actual.extend([("y".to_owned(), values(&y)), ("dx".to_owned(), values(&dx))]);
                for (name, expected) in expected {
                    let expected: Vec<f32> = expected.data.iter().map(|&value| value as f32).collect();
                    let rounding = if name == "fc.weight" { 0.0 } else { rounding };
                    let what = format!("{kind} in {dtype}, {high:?}: {name}");
                    assert_close(&what, &expected, &actual[name], of_fp8_sums(1e-2, 2e-6) + rounding);
                }
            }
        }
    }
}
