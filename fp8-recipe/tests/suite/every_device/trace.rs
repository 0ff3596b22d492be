//! Traces of real steps, with a fault that advice must find.

use super::support::{forward, grad, input, scaling, short, tensor, weight};
use fp8_recipe::fp8_kernels::fp8_format::slice::MxRounding;
use fp8_recipe::fp8_kernels::ops;
use fp8_recipe::{
    BlockScaling, CurrentScaling, DelayedScaling, Format, Mxfp8, Recipe, ScaleSource, Scaling, SlotTrace,
};

/// Steps in which `a.input` has these amaxes and `a.weight` always 1, half of the values small.
fn traced(scaling: &mut Scaling, recipe: &Recipe, trace: &mut SlotTrace, amaxes: &[f32]) {
    for (step, amax) in amaxes.iter().enumerate() {
        let mut cx = scaling.autocast(recipe).unwrap();
        forward(&mut cx, &input("a"), &[*amax, 0.5]);
        cx.quantize_weight(&weight("a"), step as u64, &tensor(&[1.0, 0.5])).unwrap();
        cx.commit().unwrap();
        trace.record(step as u64, scaling).unwrap();
    }
}

#[test]
fn a_trace_keeps_the_last_steps_of_each_slot() {
    let (mut scaling, mut trace) = (scaling(&["a", "b"]), SlotTrace::new(3));
    scaling.set_counting(true);
    traced(&mut scaling, &short().into(), &mut trace, &[1.0, 2.0, 4.0, 8.0, 2.0]);
    assert_eq!(
        trace.series().iter().map(|series| &*series.name).collect::<Vec<_>>(),
        ["a.input", "a.weight"]
    );
    let points: Vec<_> = trace.series()[0]
        .points
        .iter()
        .map(|point| (point.step, point.amax, point.scale, point.elements, point.saturated))
        .collect();
    assert_eq!(points, [(2, 4.0, Some(112.0), 2, 1), (3, 8.0, Some(56.0), 2, 1), (4, 2.0, Some(56.0), 2, 0)]);
    let csv = trace.to_csv();
    assert_eq!(csv.lines().count(), 1 + 2 * 3);
    assert!(csv.contains("\n3,a.input,forward,delayed (amax_history_len=4),8,56,2,1,0,0,\n"), "{csv}");
    let json: serde_json::Value = serde_json::from_str(&trace.to_json()).unwrap();
    assert_eq!(json[0]["saturated"], serde_json::json!([1, 1, 0]));
    assert_eq!(json[1]["slot"], "a.weight");
}

#[test]
fn steps_in_which_a_slot_does_not_run_have_no_point() {
    let (mut scaling, mut trace) = (scaling(&["a"]), SlotTrace::new(9));
    scaling.set_counting(true);
    traced(&mut scaling, &short().into(), &mut trace, &[1.0]);
    scaling.autocast(&short().into()).unwrap().commit().unwrap();
    trace.record(1, &scaling).unwrap();
    scaling.reset_counters().unwrap();
    traced(&mut scaling, &short().into(), &mut trace, &[4.0]);
    let saturated: Vec<_> = trace.series()[0].points.iter().map(|point| point.saturated).collect();
    assert_eq!(saturated, [0, 1]);
    let mut none = SlotTrace::new(0);
    none.record(0, &scaling).unwrap();
    assert!(none.advice().is_empty());
}

#[test]
fn advice_finds_a_planted_fault_and_its_remedy_works() {
    // A spike in every fourth step, after which a history of two has forgotten the last.
    let amaxes: Vec<f32> = (0..40).map(|step| if step % 4 == 3 { 5.0 } else { 1.0 }).collect();
    let advice = |recipe: Recipe| {
        let (mut scaling, mut trace) = (scaling(&["a"]), SlotTrace::new(100));
        scaling.set_counting(true);
        traced(&mut scaling, &recipe, &mut trace, &amaxes);
        trace.advice().iter().map(|advice| advice.to_string()).collect::<Vec<_>>()
    };
    let forgetful = DelayedScaling { amax_history_len: 2, ..Default::default() };
    let found = advice(forgetful.clone().into());
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].starts_with(
        "a.input (under delayed (amax_history_len=2)) saturated 12.5 % of its values, in 10 of"
    ));
    assert!(found[0].ends_with("raise its margin by 3, or use current scaling for this slot"), "{found:?}");
    assert_eq!(advice(DelayedScaling { margin: 3, ..forgetful.clone() }.into()), Vec::<String>::new());
    let by_name = Recipe::by_name([("a.input", CurrentScaling::default().into())], forgetful);
    assert_eq!(advice(by_name), Vec::<String>::new());
}

/// Advice for `a.input` after ten steps in which it holds these values.
fn advice_for(recipe: Recipe, values: &[f32], sqnr: bool) -> Vec<String> {
    let (mut scaling, mut trace) = (scaling(&["a"]), SlotTrace::new(100));
    scaling.set_counting(true);
    scaling.set_measuring_sqnr(sqnr);
    for step in 0..10 {
        let mut cx = scaling.autocast(&recipe).unwrap();
        let (x8, _) = forward(&mut cx, &input("a"), values);
        cx.measure_sqnr(&input("a"), &tensor(values), &x8).unwrap();
        cx.commit().unwrap();
        trace.record(step, &scaling).unwrap();
    }
    trace.advice().iter().map(|advice| advice.to_string()).collect()
}

#[test]
fn advice_finds_underflow_nan_and_unused_bits_of_real_steps() {
    let wide: Vec<f32> = (0..64).map(|i| if i == 0 { 1e6 } else { 1.0 }).collect();
    let e4m3 = || DelayedScaling { fp8_format: Format::E4M3, ..Default::default() };
    let found = advice_for(e4m3().into(), &wide, false);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(
        found[0].contains("underflowed 98.4 % of its values in the last 10 steps: its values span"),
        "{found:?}"
    );
    assert!(found[0].contains("use scales for blocks (block or mxfp8)"), "{found:?}");

    let found = advice_for(e4m3().into(), &[1.0, f32::NAN], false);
    assert!(found[0].contains("had NaN values in 10 of the last 10 steps"), "{found:?}");

    let found = advice_for(DelayedScaling { margin: 7, ..Default::default() }.into(), &[1.0, 0.5], false);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("left at least 7 bits of its format unused"), "{found:?}");
}

/// Blocks are not available on every device yet.
fn takes_blocks(recipe: &Recipe) -> bool {
    let mut scaling = scaling(&["a"]);
    let mut cx = scaling.autocast(recipe).unwrap();
    let takes = ops::quantize(&tensor(&[1.0]), &cx.slot(&input("a")).unwrap()).is_ok();
    cx.discard().unwrap();
    takes
}

#[test]
fn the_remedies_for_blocks_and_outliers_work() {
    // The first remedy for an outlier is a scale for each block, so that the others keep theirs.
    let wide: Vec<f32> = (0..64).map(|i| if i == 0 { 1e6 } else { 1.0 }).collect();
    let mxfp8 = Recipe::from(Mxfp8::default());
    if !takes_blocks(&mxfp8) {
        return;
    }
    let found = advice_for(mxfp8.clone(), &wide, false);
    assert!(found[0].contains("underflowed 48.4 % of its values"), "{found:?}"); // 31 of 64, no longer 63
    let found =
        advice_for(Mxfp8 { rounding: MxRounding::Floor, ..Default::default() }.into(), &[500.0; 32], false);
    assert!(found[0].ends_with(
        "because its scales are rounded down: use MxRounding::Ceil, with which no value saturates"
    ));
    assert_eq!(advice_for(mxfp8, &[500.0; 32], false), Vec::<String>::new());

    // DeepSeek's smallest amax is 1e-4, so the scale is 448 / 1e-4. 1e-9 becomes 2.29 and is rounded to 2 of the smallest
    // subnormals, 2⁻⁹.
    let found = advice_for(BlockScaling::deepseek().into(), &[1e-9; 32], true);
    assert!(
        found[0].contains("had an SQNR of only 17.9 dB, below 25 dB in 10 of 10 measured steps"),
        "{found:?}"
    );
    assert!(found[0].contains("lower amax_epsilon"), "{found:?}");
    assert_eq!(advice_for(BlockScaling::default().into(), &[1e-9; 32], true), Vec::<String>::new());
    let found = advice_for(CurrentScaling::default().into(), &[f32::INFINITY, 1e30], false);
    assert!(found[0].contains("so it had infinite values"), "{found:?}");
}

#[test]
fn an_sqnr_is_measured_when_asked() {
    let values = [448.0, 33.0];
    assert_eq!(advice_for(DelayedScaling::default().into(), &values, true), Vec::<String>::new());
    // One value of the many is far above the others and off by 1/30 of itself.
    let (mut scaling, mut trace) = (scaling(&["a"]), SlotTrace::new(9));
    scaling.set_counting(true);
    let recipe = Recipe::from(short());
    for (step, measuring) in [(0, true), (1, false), (2, true)] {
        scaling.set_measuring_sqnr(measuring);
        let mut cx = scaling.autocast(&recipe).unwrap();
        assert_eq!(cx.measures_sqnr(), measuring);
        let (x8, origin) = forward(&mut cx, &input("a"), &values);
        cx.measure_sqnr(&input("a"), &tensor(&values), &x8).unwrap();
        cx.commit().unwrap();
        let mut cx = scaling.backward().unwrap();
        let dy8 = super::support::backward(&mut cx, &origin, &grad("a"), &[57344.0, 9.0]);
        cx.measure_sqnr(&origin, &grad("a"), &tensor(&[57344.0, 9.0]), &dy8).unwrap();
        cx.commit().unwrap();
        trace.record(step, &scaling).unwrap();
        // An evaluation and a scope that is left change nothing.
        let before = scaling.slot_reports().unwrap();
        let mut cx = scaling.eval(&recipe).unwrap();
        let x8 = ops::quantize(&tensor(&[33.0]), &cx.slot(&input("a")).unwrap()).unwrap();
        cx.measure_sqnr(&input("a"), &tensor(&[33.0]), &x8).unwrap();
        drop(cx);
        let mut cx = scaling.autocast(&recipe).unwrap();
        let (x8, _) = forward(&mut cx, &input("a"), &[33.0]);
        cx.measure_sqnr(&input("a"), &tensor(&[33.0]), &x8).unwrap();
        cx.discard().unwrap();
        let sqnr = |reports: &[fp8_recipe::SlotReport]| reports.iter().map(|r| r.sqnr).collect::<Vec<_>>();
        assert_eq!(sqnr(&scaling.slot_reports().unwrap()), sqnr(&before));
    }
    let of = |slot: usize| trace.series()[slot].points.iter().map(|point| point.sqnr).collect::<Vec<_>>();
    let near = |found: Option<f64>, ratio: f64| (found.unwrap() - 10.0 * ratio.log10()).abs() < 1e-9;
    // 33 becomes 32, and 9 of E5M2's 8, 10 becomes 8.
    let forward = of(0);
    assert!(near(forward[0], 448.0f64.powi(2) + 33.0 * 33.0) && forward[1].is_none(), "{forward:?}");
    assert_eq!(forward[2], forward[0]);
    assert!(near(of(1)[0], 57344.0f64.powi(2) + 81.0));
}

#[test]
fn measuring_refuses_another_tensor() {
    let mut scaling = scaling(&["a"]);
    scaling.set_measuring_sqnr(true);
    let mut cx = scaling.autocast(&short().into()).unwrap();
    let (x8, _) = forward(&mut cx, &input("a"), &[1.0, 2.0]);
    let refused = cx.measure_sqnr(&input("a"), &tensor(&[1.0]), &x8).unwrap_err().to_string();
    assert_eq!(
        refused,
        "measure_sqnr: the values and the quantized tensor: got [1, 1] and [1, 2]: pass the tensor that was quantized"
    );
    cx.discard().unwrap();
}

#[test]
fn rows_and_blocks_have_an_amax_and_no_single_scale() {
    let recipe = Recipe::from(CurrentScaling::rowwise());
    if !takes_blocks(&recipe) {
        return;
    }
    let (mut scaling, mut trace) = (scaling(&["a"]), SlotTrace::new(9));
    scaling.set_counting(true);
    traced(&mut scaling, &recipe, &mut trace, &[4.0, 7.0]);
    let series = &trace.series()[0];
    assert_eq!(series.scales, ScaleSource::RowsOrBlocks);
    let found: Vec<_> = series.points.iter().map(|point| (point.amax, point.scale)).collect();
    assert_eq!(found, [(4.0, None), (7.0, None)]);
}
