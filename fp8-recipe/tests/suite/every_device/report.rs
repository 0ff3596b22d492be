//! Slot by slot: amax, scale, counts.

use super::support::{backward, forward, grad, input, scaling, short, step};
use fp8_recipe::{CurrentScaling, DelayedScaling, Direction, Scaling, SlotName, SlotReport, SlotRole};

fn report(scaling: &Scaling, slot: &SlotName) -> SlotReport {
    scaling.slot_reports().unwrap().into_iter().find(|report| report.name == *slot.name()).unwrap()
}

#[test]
fn every_slot_of_every_arena() {
    let mut scaling = scaling(&["a"]);
    assert!(scaling.slot_reports().unwrap().is_empty());
    let origin = step(&mut scaling, &short().into(), &input("a"), &[3.5, 1.0]).unwrap();
    let mut cx = scaling.backward().unwrap();
    backward(&mut cx, &origin, &grad("a"), &[2.0]);
    cx.commit().unwrap();
    let reports = scaling.slot_reports().unwrap();
    assert_eq!(reports.len(), 3);
    let x = report(&scaling, &input("a"));
    assert_eq!((x.role, x.direction, x.amax, x.scale), (SlotRole::Input, Direction::Forward, 3.5, 128.0));
    assert!(x.calibrated);
    assert_eq!(x.recipe.to_string(), "delayed (amax_history_len=4)");
    assert_eq!(report(&scaling, &grad("a")).scale, 28672.0);
    let weight = reports.iter().find(|report| report.role == SlotRole::Weight).unwrap();
    assert_eq!((weight.calibrated, weight.scale, weight.amax), (false, 1.0, 0.0));
}

#[test]
fn what_a_scale_costs_is_counted_where_asked() {
    let mut scaling = scaling(&["a"]);
    let recipe = DelayedScaling { amax_history_len: 1, ..short() }.into();
    step(&mut scaling, &recipe, &input("a"), &[448.0]).unwrap(); // scale 1
    assert_eq!(report(&scaling, &input("a")).elements, 0);
    scaling.set_counting(true);
    step(&mut scaling, &recipe, &input("a"), &[1000.0, 465.0, 464.0, 449.0, 448.0, 1e-9, 0.0]).unwrap();
    let counted = report(&scaling, &input("a"));
    assert_eq!((counted.saturated, counted.underflowed, counted.elements), (2, 1, 7));
    let mut cx = scaling.eval(&recipe).unwrap();
    forward(&mut cx, &input("a"), &[1e9]); // an evaluation counts nothing
    drop(cx);
    assert_eq!(report(&scaling, &input("a")), counted);
    scaling.reset_counters().unwrap();
    let reset = report(&scaling, &input("a"));
    assert_eq!((reset.saturated, reset.underflowed, reset.elements), (0, 0, 0));
    scaling.set_counting(false);
    step(&mut scaling, &recipe, &input("a"), &[1e9]).unwrap();
    assert_eq!(report(&scaling, &input("a")).elements, 0);
}

#[test]
fn non_finite_amaxes_are_counted() {
    let mut scaling = scaling(&["a"]);
    for amax in [1.0, f32::INFINITY, f32::INFINITY] {
        step(&mut scaling, &short().into(), &input("a"), &[amax]).unwrap();
    }
    assert_eq!(report(&scaling, &input("a")).non_finite, 2);
}

#[test]
fn nan_is_reported() {
    for counting in [false, true] {
        let mut scaling = scaling(&["a"]);
        scaling.set_counting(counting);
        step(&mut scaling, &short().into(), &input("a"), &[2.0, f32::NAN]).unwrap();
        step(&mut scaling, &short().into(), &input("a"), &[f32::NAN; 3]).unwrap();
        let x = report(&scaling, &input("a"));
        // Not by the amax, which is finite, and so is not counted either.
        assert_eq!((x.amax, x.non_finite), (0.0, 0));
        assert_eq!((x.nan, x.elements), if counting { (4, 5) } else { (0, 0) });
        scaling.reset_counters().unwrap();
        assert_eq!(report(&scaling, &input("a")).nan, 0);
    }
}

#[test]
fn a_report_is_a_line_that_names_what_went_wrong() {
    let mut scaling = scaling(&["a"]);
    let recipe = DelayedScaling { amax_history_len: 1, ..short() }.into();
    assert!(scaling.slot_reports().unwrap().is_empty());
    step(&mut scaling, &recipe, &input("a"), &[448.0]).unwrap(); // scale 1
    let line = |scaling: &Scaling| report(scaling, &input("a")).to_string();
    let calm = format!("{} (forward): amax 0, scale 1, scales not powers of two", input("a").name());
    assert_eq!(line(&scaling), calm);
    scaling.set_counting(true);
    step(&mut scaling, &recipe, &input("a"), &[448.0, 1.0]).unwrap();
    assert_eq!(line(&scaling), format!("{calm}, 2 values"));
    step(&mut scaling, &recipe, &input("a"), &[448.0, f32::NAN, 1e-9, f32::NAN]).unwrap();
    assert_eq!(line(&scaling), format!("{calm}, 6 values, 1 underflowed, 2 NaN"));
    step(&mut scaling, &recipe, &input("a"), &[f32::INFINITY, 1e6]).unwrap();
    let all = format!("{calm}, 8 values, 1 saturated, 1 underflowed, 2 NaN, 1 amaxes not finite");
    assert_eq!(line(&scaling), all);
}

#[test]
fn current_scaling_reports_while_it_counts_and_computes_the_same() {
    let recipe = CurrentScaling::default().into();
    let run = |counting| {
        let mut scaling = scaling(&["a"]);
        scaling.set_counting(counting);
        let codes = [[7.0, 1e-9], [3.5, 1.0]].map(|values| {
            let mut cx = scaling.autocast(&recipe).unwrap();
            let (x8, _) = forward(&mut cx, &input("a"), &values);
            cx.commit().unwrap();
            (super::support::codes(&x8), super::support::scale_of(&x8))
        });
        (scaling, codes)
    };
    let (scaling, counted) = run(true);
    assert_eq!(counted, run(false).1);
    let x = report(&scaling, &input("a"));
    assert_eq!((x.amax, x.scale, x.calibrated), (3.5, 128.0, true));
    assert_eq!((x.saturated, x.underflowed, x.elements), (0, 1, 4));
    assert!(scaling.state().unwrap().arenas.is_empty());
}
