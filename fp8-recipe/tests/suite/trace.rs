//! Traces of real steps, with a fault that advice must find.

use crate::support::{forward, input, scaling, short, tensor, weight};
use fp8_recipe::{CurrentScaling, DelayedScaling, Recipe, Scaling, SlotTrace};

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
    assert_eq!(points, [(2, 4.0, 112.0, 2, 1), (3, 8.0, 56.0, 2, 1), (4, 2.0, 56.0, 2, 0)]);
    let csv = trace.to_csv();
    assert_eq!(csv.lines().count(), 1 + 2 * 3);
    assert!(csv.contains("\n3,a.input,forward,delayed (amax_history_len=4),8,56,2,1,0,0\n"), "{csv}");
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
