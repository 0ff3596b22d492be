//! The copies of input, weight and `dy` that exist after forward and backward: none that no GEMM reads.

use super::*;
use crate::Scopes as _;
use fp8_kernels::TransposePolicy;
use fp8_recipe::{CurrentScaling, DelayedScaling, Recipe, Scaling};

/// A layer, its recipe and the device that it runs on.
struct Case {
    layer: Linear,
    scaling: Scaling,
    x: Tensor,
    /// Whether the device makes columnwise codes with the cast.
    makes_columnwise: bool,
}

/// The form of each tensor: `values`, `rowwise`, `columnwise` or `both` codes; `nothing` if it was not kept.
#[derive(Debug, PartialEq, Clone, Copy)]
struct Copies {
    /// The input as forward quantizes it.
    input: &'static str,
    /// The input that forward keeps for wgrad.
    kept_input: &'static str,
    /// The weight that later scopes find in the cache.
    weight: &'static str,
    /// The weight that forward keeps for dgrad.
    kept_weight: &'static str,
    /// `dy` as backward quantizes it.
    dy: &'static str,
}

impl Copies {
    /// Returns the copies on a device whose GEMMs read either layout.
    fn without_columnwise(self) -> Self {
        let rowwise = |form| if matches!(form, "both" | "columnwise") { "rowwise" } else { form };
        let Self { input, kept_input, weight, kept_weight, dy } = self;
        let [input, kept_input, weight, kept_weight, dy] =
            [input, kept_input, weight, kept_weight, dy].map(rowwise);
        Self { input, kept_input, weight, kept_weight, dy }
    }
}

const ALL: Copies =
    Copies { input: "both", kept_input: "columnwise", weight: "both", kept_weight: "columnwise", dy: "both" };

fn form(operand: &Operand) -> &'static str {
    let Some(codes) = operand.as_fp8() else { return "values" };
    match (codes.rowwise().is_some(), codes.columnwise().is_some()) {
        (true, true) => "both",
        (true, false) => "rowwise",
        (false, true) => "columnwise",
        (false, false) => "nothing",
    }
}

fn devices() -> Vec<Device> {
    let cpu = Device::cpu();
    let mut all = vec![cpu.clone().with_transpose_policy(TransposePolicy::WithCast), cpu];
    #[cfg(feature = "cuda")]
    all.push(
        Device::cuda_with_options(&fp8_kernels::CudaOptions {
            library: fp8_cuda_sim::library_path(),
            cache_dir: Some(std::env::temp_dir().join("fp8-nn-tests")),
            ..Default::default()
        })
        .unwrap(),
    );
    all
}

/// Recipes with one scale for a tensor and with one for each row, in which these of fprop, dgrad and wgrad are in high precision.
fn recipes(override_linear_precision: (bool, bool, bool)) -> [Recipe; 2] {
    [
        DelayedScaling { override_linear_precision, ..Default::default() }.into(),
        CurrentScaling { override_linear_precision, ..CurrentScaling::rowwise() }.into(),
    ]
}

impl Case {
    fn new(device: &Device, has_rows: bool, save_original_input: bool, is_trainable: bool) -> Self {
        let options =
            LinearOptions { in_features: 16, out_features: 32, save_original_input, ..Default::default() };
        let mut layer = Linear::new("fc", options, device, &mut rand::rng()).unwrap();
        let weight = (0..32 * 16).map(|i| (f32::from(i16::try_from(i).unwrap()) * 0.7).sin()).collect();
        layer.weight.set(Tensor::from_vec::<f32>(weight, [32, 16], device).unwrap()).unwrap();
        layer.weight.set_trainable(is_trainable).unwrap();
        let scaling = Scaling::new(&layer, device).unwrap();
        let x = Tensor::full(1.5, [48, 16], DType::F32, device).unwrap();
        let makes_columnwise = has_rows || device.transpose_policy() == TransposePolicy::WithCast;
        Self { layer, scaling, x, makes_columnwise }
    }

    /// Runs forward and backward and returns the copies that they made.
    fn copies(&mut self, recipe: &Recipe) -> Copies {
        let Self { layer, scaling, x, .. } = self;
        let forward = |cx: &mut Forward<'_>| {
            let (y, saved) = layer.forward(cx, x)?;
            let weight = form(&layer.weight.operand(cx, &layer.slots.weight, DType::F32)?);
            Ok((form(&ops::quantize(x, &layer.input_slot(cx)?)?), weight, y, saved))
        };
        let (input, weight, y, saved) = scaling.in_autocast(recipe, forward).unwrap();
        let kept_input = match &saved.x {
            SavedInput::Operand(x) => form(x),
            SavedInput::Original { .. } | SavedInput::Shard(_) => "values",
            SavedInput::Unneeded => "nothing",
        };
        let kept_weight = form(&saved.core.w);
        let mut dy = "nothing";
        let quantize = |slot: &Slot<'_>| {
            let (operand, db) = ops::quantize_dbias(&y, slot)?;
            // The second time the slot is off, where a GEMM reads values.
            if !slot.is_off() {
                dy = form(&operand);
            }
            Ok((operand, Some(db)))
        };
        scaling.in_backward(|cx| layer.backward_fused(cx, saved, quantize)).unwrap();
        Copies { input, kept_input, weight, kept_weight, dy }
    }

    /// Returns the columnwise codes of the weight in the cache.
    fn columns(&mut self, recipe: &Recipe) -> Option<Vec<u8>> {
        let weight =
            |cx: &mut Forward<'_>| self.layer.weight.operand(cx, &self.layer.slots.weight, DType::F32);
        let weight = self.scaling.in_autocast(recipe, weight).unwrap();
        weight.as_fp8().and_then(|codes| codes.columnwise()).map(|codes| codes.to_vec().unwrap())
    }
}

const NOTHING_HIGH: (bool, bool, bool) = (false, false, false);
const DGRAD_HIGH: (bool, bool, bool) = (false, true, false);
const WGRAD_HIGH: (bool, bool, bool) = (false, false, true);

#[test]
fn copies_are_made_where_a_gemm_reads_them() {
    let no_wgrad = Copies { input: "rowwise", dy: "rowwise", ..ALL };
    let no_dgrad = Copies { weight: "rowwise", kept_weight: "values", ..ALL };
    let neither = Copies { input: "rowwise", kept_input: "nothing", dy: "rowwise", ..no_dgrad };
    // Precision, whether the original input is kept, whether the weight is trainable.
    let cases = [
        (NOTHING_HIGH, false, true, ALL),
        (NOTHING_HIGH, true, true, Copies { input: "rowwise", kept_input: "values", ..ALL }),
        (WGRAD_HIGH, false, true, Copies { kept_input: "values", ..no_wgrad }),
        (DGRAD_HIGH, false, true, no_dgrad),
        (NOTHING_HIGH, false, false, Copies { kept_input: "nothing", ..no_wgrad }),
        (NOTHING_HIGH, true, false, Copies { kept_input: "nothing", ..no_wgrad }),
        (DGRAD_HIGH, false, false, neither),
    ];
    for device in devices() {
        for (high, save_original_input, is_trainable, expected) in cases {
            for (recipe, has_rows) in recipes(high).iter().zip([false, true]) {
                let mut case = Case::new(&device, has_rows, save_original_input, is_trainable);
                let expected = if case.makes_columnwise { expected } else { expected.without_columnwise() };
                let what = format!("{device:?}, {recipe}, {save_original_input}, {is_trainable}");
                // The second time the weight comes from the cache.
                assert_eq!([case.copies(recipe), case.copies(recipe)], [expected; 2], "{what}");
            }
        }
    }
}

#[test]
fn an_evaluation_makes_no_columnwise_copies() {
    for device in devices() {
        for (recipe, has_rows) in recipes(NOTHING_HIGH).iter().zip([false, true]) {
            let mut case = Case::new(&device, has_rows, false, true);
            let mut cx = case.scaling.eval(recipe).unwrap();
            let (_, saved) = case.layer.forward(&mut cx, &case.x).unwrap();
            let SavedInput::Operand(x) = &saved.x else { panic!("{:?}", saved.x) };
            assert_eq!([form(x), form(&saved.core.w)], ["rowwise"; 2], "{device:?}, {recipe}");
        }
    }
}

#[test]
fn a_weight_without_columnwise_codes_gets_them_when_dgrad_reads_them() {
    for device in devices() {
        for has_rows in [false, true] {
            let index = usize::from(has_rows);
            let [plain, overridden] = [NOTHING_HIGH, DGRAD_HIGH].map(|high| recipes(high)[index].clone());
            let [mut case, mut twin] = [(); 2].map(|()| Case::new(&device, has_rows, false, true));
            case.copies(&overridden);
            twin.copies(&plain);
            let [found, expected] = [&mut case, &mut twin].map(|case| case.columns(&plain));
            assert_eq!(expected.is_some(), case.makes_columnwise);
            assert_eq!(found, expected, "{device:?}, {plain}");
            let expected = if case.makes_columnwise { ALL } else { ALL.without_columnwise() };
            assert_eq!(case.copies(&plain), expected, "{device:?}, {plain}");
        }
    }
}
