//! Parameters of inputs, weights and gradients, and the accumulation of each GEMM.

use crate::every_device::support::{device, grad, input, message, weight};
use fp8_recipe::fp8_kernels::ops::{self, Accumulation};
use fp8_recipe::fp8_kernels::{Operand, Tensor};
use fp8_recipe::{
    BlockScaling, CurrentScaling, DelayedScaling, GemmAccumulation, GemmSlots, Granularity, Mxfp8, QParams,
    QParamsByRole, Recipe, Scaling,
};

/// Two rows, whose amaxes are 3 and 0.001.
const ROWS: [f32; 4] = [1.0, -3.0, 0.001, 0.0005];

/// Different parameters for each role.
fn quant() -> QParamsByRole {
    QParamsByRole {
        input: QParams { power_2_scale: true, amax_epsilon: 0.0 },
        weight: QParams { power_2_scale: false, amax_epsilon: 0.01 },
        grad_output: QParams { power_2_scale: true, amax_epsilon: 8.0 },
    }
}

/// The factors of an input, a weight and a gradient with the same values.
fn factors(recipe: &Recipe) -> [Vec<f32>; 3] {
    let slots = GemmSlots::new("fc");
    let mut scaling = Scaling::new(&slots, &device()).unwrap();
    let x = Tensor::from_vec(ROWS.to_vec(), [2, 2], &device()).unwrap();
    let of = |operand: Operand| operand.as_fp8().unwrap().scale_inv().to_vec::<f32>().unwrap();
    let mut cx = scaling.autocast(recipe).unwrap();
    let input = of(ops::quantize(&x, &cx.slot(&slots.input).unwrap()).unwrap());
    let weight = of(ops::quantize(&x, &cx.slot(&slots.weight).unwrap()).unwrap());
    let origin = cx.origin(&slots.input);
    cx.commit().unwrap();
    let mut cx = scaling.backward().unwrap();
    let grad = of(ops::quantize(&x, &cx.slot(&origin, &slots.grad_output).unwrap()).unwrap());
    cx.commit().unwrap();
    [input, weight, grad]
}

/// The largest power of two that is at most `value`, by counting.
fn power_of_two(value: f32) -> f32 {
    let (mut power, halves) = (f32::powi(2.0, 100), std::iter::repeat(0.5));
    for half in halves {
        if power <= value {
            break;
        }
        power *= half;
    }
    power
}

fn factor(amax: f32, fp8_max: f32, params: QParams) -> f32 {
    let scale = fp8_max / amax.max(params.amax_epsilon);
    (if params.power_2_scale { power_of_two(scale) } else { scale }).recip()
}

/// The factors of amaxes under [`quant`], with E5M2 for gradients if `hybrid`.
fn expected(amaxes: &[f32], hybrid: bool) -> [Vec<f32>; 3] {
    let QParamsByRole { input, weight, grad_output } = quant();
    let dy_max = if hybrid { 57344.0 } else { 448.0 };
    [(input, 448.0), (weight, 448.0), (grad_output, dy_max)]
        .map(|(params, max)| amaxes.iter().map(|amax| factor(*amax, max, params)).collect())
}

#[test]
fn each_role_has_its_own_parameters() {
    let recipe = CurrentScaling { quant: quant(), ..Default::default() };
    assert_eq!(factors(&recipe.into()), expected(&[3.0], true));
    // The same parameters in another order are another recipe.
    let turned = QParamsByRole { input: quant().weight, weight: quant().input, ..quant() };
    let recipe = CurrentScaling { quant: turned, ..Default::default() };
    let [input, weight, grad] = expected(&[3.0], true);
    let by_weight = factor(3.0, 448.0, quant().weight);
    assert_ne!(input, [by_weight]);
    assert_eq!(factors(&recipe.into()), [vec![by_weight], input, grad]);
    assert_eq!(weight, [by_weight]);
}

#[test]
fn rows_and_blocks_have_them_too() {
    let rows = CurrentScaling { quant: quant(), ..CurrentScaling::rowwise() };
    assert_eq!(rows.granularity, Granularity::Row);
    assert_eq!(factors(&rows.into()), expected(&[3.0, 0.001], false));
    let blocks = BlockScaling { quant: quant(), ..Default::default() };
    let [input, _, grad] = expected(&[3.0, 0.001], false);
    let [_, weight, _] = expected(&[3.0], false); // one block of 128 × 128
    assert_eq!(factors(&blocks.into()), [input, weight, grad]);
}

#[test]
fn a_report_shows_the_scale_of_the_role() {
    let slots = GemmSlots::new("fc");
    let mut scaling = Scaling::new(&slots, &device()).unwrap();
    scaling.set_counting(true);
    let x = Tensor::from_vec(ROWS.to_vec(), [2, 2], &device()).unwrap();
    let recipe = CurrentScaling { quant: quant(), ..Default::default() }.into();
    let mut cx = scaling.autocast(&recipe).unwrap();
    for slot in [&slots.input, &slots.weight] {
        ops::quantize(&x, &cx.slot(slot).unwrap()).unwrap();
    }
    cx.commit().unwrap();
    let reports = scaling.slot_reports().unwrap();
    let scale = |name: &str| reports.iter().find(|report| &*report.name == name).unwrap().scale;
    assert_eq!((scale("fc.input"), scale("fc.weight")), (128.0, 448.0 / 3.0));
}

#[test]
fn names_and_keys_tell_them_apart() {
    let named =
        |quant: QParamsByRole| Recipe::from(CurrentScaling { quant, ..Default::default() }).to_string();
    assert_eq!(named(QParams::POWER_2.into()), "current (power_2_scale=true)");
    assert_eq!(named(quant()), "current (power_2_scale=(true, false, true), amax_epsilon=(0, 0.01, 8))");
    let split = CurrentScaling { use_split_accumulator: (true, true, true), ..Default::default() };
    assert_eq!(Recipe::from(split).to_string(), "current (use_split_accumulator=(true, true, true))");
    let f32_scales = BlockScaling { quant: QParams::default().into(), ..Default::default() };
    assert_eq!(Recipe::from(f32_scales).to_string(), "block (power_2_scale=false)");
    assert_eq!(Recipe::from(BlockScaling::deepseek()).to_string(), "deepseek");
}

#[test]
fn blocks_have_no_fast_accumulation() {
    for use_split_accumulator in [(false, true, true), (true, false, true), (true, true, false)] {
        let recipe = Recipe::from(BlockScaling { use_split_accumulator, ..Default::default() });
        assert_eq!(
            message(recipe.validate()),
            format!(
                "BlockScaling: use_split_accumulator = {use_split_accumulator:?}: expected (true, true, true): products of \
                 blocks have no fast accumulation"
            )
        );
    }
}

/// Returns the accumulation modes of layer `a` in a model of `a` and `b`. All passes must give the same ones.
fn accumulation(recipe: &Recipe) -> GemmAccumulation {
    let mut scaling = crate::every_device::support::scaling(&["a", "b"]);
    let cx = scaling.autocast(recipe).unwrap();
    let found = cx.accumulation(&input("a"));
    assert_eq!(cx.accumulation(&weight("a")), found);
    assert_eq!(cx.accumulation(&grad("a")), found);
    let origin = cx.origin(&input("a"));
    cx.commit().unwrap();
    let cx = scaling.backward().unwrap();
    assert_eq!(cx.accumulation(&origin), found);
    cx.commit().unwrap();
    assert_eq!(scaling.eval(recipe).unwrap().accumulation(&input("a")), found);
    found
}

fn split([fprop, dgrad, wgrad]: [bool; 3]) -> GemmAccumulation {
    let of = |split| if split { Accumulation::Split } else { Accumulation::Fast };
    GemmAccumulation { fprop: of(fprop), dgrad: of(dgrad), wgrad: of(wgrad) }
}

#[test]
fn the_recipe_chooses_how_gemms_accumulate() {
    let usual = split([false, true, true]);
    assert_eq!(GemmAccumulation::default(), usual);
    for recipe in [DelayedScaling::default().into(), CurrentScaling::rowwise().into(), Recipe::off()] {
        assert_eq!(accumulation(&recipe), usual, "{recipe}");
    }
    for recipe in [BlockScaling::default().into(), Recipe::from(Mxfp8::default())] {
        assert_eq!(accumulation(&recipe), split([true; 3]), "{recipe}");
    }
    for bits in 0..8u8 {
        let [fprop, dgrad, wgrad] = [0, 1, 2].map(|bit| bits >> bit & 1 == 1);
        let recipe = CurrentScaling { use_split_accumulator: (fprop, dgrad, wgrad), ..Default::default() };
        assert_eq!(accumulation(&recipe.into()), split([fprop, dgrad, wgrad]));
    }
}

#[test]
fn a_gemm_splits_if_either_operand_asks_for_it() {
    let recipe = |use_split_accumulator| CurrentScaling { use_split_accumulator, ..Default::default() };
    let (fast, all) = (recipe((false, false, false)), recipe((true, true, true)));
    for (pattern, expected) in [
        ("a.input", [true, false, true]),
        ("a.weight", [true, true, false]),
        ("a.grad_output", [false, true, true]),
        ("b", [false, false, false]),
        ("a", [true, true, true]),
    ] {
        let by_name = Recipe::by_name([(pattern, all.into())], fast);
        assert_eq!(accumulation(&by_name), split(expected), "{pattern}");
    }
}

/// torchao's recipe: rows everywhere, except in the weight that dgrad reads.
#[test]
fn the_weight_that_dgrad_reads_has_one_scale() {
    let recipe = Recipe::from(CurrentScaling::rowwise_gw_hp());
    let slots = GemmSlots::new("fc");
    let mut scaling = Scaling::new(&slots, &device()).unwrap();
    let x = Tensor::from_vec(ROWS.to_vec(), [2, 2], &device()).unwrap();
    let mut cx = scaling.autocast(&recipe).unwrap();
    let gemms = cx.fp8_gemms(&slots.weight);
    assert_eq!((gemms.fprop, gemms.dgrad, gemms.wgrad), (true, true, false));
    let [weight, input] =
        [&slots.weight, &slots.input].map(|slot| ops::quantize(&x, &cx.slot(slot).unwrap()).unwrap());
    cx.commit().unwrap();
    let factors = |t: &Tensor| t.to_vec::<f32>().unwrap();
    let power = |amax: f32| factor(amax, 448.0, QParams::POWER_2);
    let (weight, input) = (weight.as_fp8().unwrap(), input.as_fp8().unwrap());
    for x8 in [weight, input] {
        assert_eq!(factors(x8.scale_inv()), [power(3.0), power(0.001)]);
    }
    assert_eq!(factors(weight.columnwise_scale_inv().unwrap()), [power(3.0)]);
    assert!(input.columnwise().is_none(), "wgrad, which alone would read it, runs in high precision");
}

/// The layouts that a GEMM reads determine whether it can multiply its operands.
#[test]
fn a_gemm_is_judged_by_the_layouts_that_it_reads() {
    let explain = |patterns: [(&'static str, Recipe); 2]| {
        let default = CurrentScaling::default();
        let override_linear_precision = (true, false, true); // dgrad alone
        let default = CurrentScaling { override_linear_precision, ..default };
        crate::every_device::support::scaling(&["a"]).explain(&Recipe::by_name(patterns, default)).map(drop)
    };
    let gw_hp = Recipe::from(CurrentScaling::rowwise_gw_hp());
    let block = Recipe::from(BlockScaling::default());
    assert!(explain([("a.weight", gw_hp.clone()), ("a.input", Recipe::off())]).is_ok());
    let refused = message(explain([("a.weight", gw_hp), ("a.grad_output", block)]));
    let expected = "recipe by name: dgrad of `a`: grad_output has scales of 1x128 and weight of tensor: ";
    assert!(refused.starts_with(expected), "{refused}");
}
