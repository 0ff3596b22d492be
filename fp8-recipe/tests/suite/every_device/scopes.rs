//! Guards: nesting, sequences, backward's origin, leaving without commit.

use super::support::{
    Model, backward, codes, device, forward, grad, input, message, scale_of, scaling, short, slot_state,
    slot_states, step, tensor, updates, weight,
};
use fp8_recipe::fp8_kernels::DType;
use fp8_recipe::{
    AutocastOptions, CurrentScaling, DelayedScaling, Direction, Encoding, Error, Format, GemmSlots, QParams,
    Recipe, Scaling, SlotName, SlotRole, Slots, Snapshot,
};
use std::panic::{AssertUnwindSafe, catch_unwind};

fn margin(margin: i32) -> Recipe {
    DelayedScaling { margin, ..short() }.into()
}

fn options(enabled: bool, calibrating: bool) -> AutocastOptions {
    AutocastOptions { enabled, calibrating, ..Default::default() }
}

#[test]
fn values_that_backward_keeps_travel() {
    fn travels<T: Send + Sync + Clone + 'static>() {}
    travels::<fp8_recipe::Origin>();
    travels::<Snapshot>();
    fn moves<T: Send + 'static>() {}
    moves::<Scaling>();
}

#[test]
fn the_inner_recipe_rules_inside_and_the_outer_one_again_after() {
    let mut scaling = scaling(&["a", "b", "c"]);
    let mut cx = scaling.autocast(&margin(0)).unwrap();
    let (a, _) = forward(&mut cx, &input("a"), &[1.0]);
    let (b, origin) = forward(&mut cx.nested(&margin(3)).unwrap(), &input("b"), &[1.0]);
    let (c, _) = forward(&mut cx, &input("c"), &[1.0]);
    cx.commit().unwrap();
    assert_eq!([&a, &b, &c].map(scale_of), [448.0, 56.0, 448.0]);
    assert_eq!(updates(&scaling, Direction::Forward), [1, 1]); // both arenas, at the outermost commit
    let of = |slot| slot_states(&scaling, &slot).iter().map(|state| state.0).collect::<Vec<_>>();
    assert_eq!((of(input("a")), of(input("b"))), (vec![448.0, -1.0], vec![-1.0, 56.0]));

    let mut cx = scaling.backward().unwrap();
    let db = backward(&mut cx, &origin, &grad("b"), &[1.0]);
    cx.commit().unwrap();
    assert_eq!(scale_of(&db), 7168.0); // 57344 / 2³: the inner recipe, by origin
}

#[test]
fn nesting_goes_deeper_and_mixes_kinds() {
    let mut scaling = scaling(&["a"]);
    let mut cx = scaling.autocast(&margin(0)).unwrap();
    {
        let mut off = cx.nested_scope(&margin(0), &options(false, false)).unwrap();
        assert!(!off.fp8_gemms(&input("a")).fprop);
        assert!(!forward(&mut off, &input("a"), &[4.0]).0.is_fp8());
        let current = CurrentScaling::default().into();
        let mut inner = off.nested(&current).unwrap();
        assert!(inner.fp8_gemms(&input("a")).fprop);
        assert_eq!(scale_of(&forward(&mut inner, &input("a"), &[2.0]).0), 224.0);
        inner.commit().unwrap(); // nothing to do
    }
    assert!(cx.fp8_gemms(&input("a")).fprop);
    cx.commit().unwrap();
    assert_eq!(slot_state(&scaling, &input("a")), (-1.0, vec![0.0; 3]));
}

#[test]
fn an_inner_guard_neither_commits_nor_rolls_back() {
    let mut scaling = scaling(&["a", "b"]);
    let mut cx = scaling.autocast(&margin(0)).unwrap();
    forward(&mut cx, &input("a"), &[1.0]);
    drop(cx.nested(&margin(1)).unwrap());
    cx.nested(&margin(1)).unwrap().discard().unwrap();
    cx.nested(&margin(1)).unwrap().commit().unwrap();
    forward(&mut cx, &input("b"), &[2.0]);
    cx.commit().unwrap();
    let scale = |slot| slot_states(&scaling, &slot)[0].0;
    assert_eq!((scale(input("a")), scale(input("b"))), (448.0, 224.0));
}

#[test]
fn scopes_follow_each_other_with_recipes_of_their_own() {
    let encoder: Recipe = DelayedScaling { fp8_format: Format::E4M3, ..short() }.into();
    let decoder: Recipe = short().into();
    let mut scaling = scaling(&["encoder", "decoder"]);
    let from_encoder = step(&mut scaling, &encoder, &input("encoder"), &[1.0]).unwrap();
    let from_decoder = step(&mut scaling, &decoder, &input("decoder"), &[1.0]).unwrap();
    let mut cx = scaling.backward().unwrap();
    let decoder = backward(&mut cx, &from_decoder, &grad("decoder"), &[1.0]);
    let encoder = backward(&mut cx, &from_encoder, &grad("encoder"), &[1.0]);
    cx.commit().unwrap();
    assert_eq!(decoder.as_fp8().unwrap().encoding(), Encoding::E5M2);
    assert_eq!(encoder.as_fp8().unwrap().encoding(), Encoding::E4M3);
    assert_eq!(updates(&scaling, Direction::Forward), [1, 1]);
    assert_eq!(updates(&scaling, Direction::Backward), [1, 1]);
}

#[test]
fn backward_scales_move_at_the_end_of_the_backward_scope() {
    let mut scaling = scaling(&["a", "b"]);
    let mut cx = scaling.autocast(&margin(0)).unwrap();
    let origins = ["a", "b"].map(|path| forward(&mut cx, &input(path), &[1.0]).1);
    cx.commit().unwrap();
    assert_eq!(updates(&scaling, Direction::Backward), [0]);
    let mut cx = scaling.backward().unwrap();
    backward(&mut cx, &origins[1], &grad("b"), &[1.0]);
    backward(&mut cx, &origins[0], &grad("a"), &[2.0]);
    cx.commit().unwrap();
    assert_eq!(updates(&scaling, Direction::Backward), [1]);
    assert_eq!(slot_state(&scaling, &grad("a")).0, 28672.0);
    assert_eq!(slot_state(&scaling, &grad("b")).0, 57344.0);
}

#[test]
fn origins_that_do_not_fit_are_refused_by_name() {
    let (mut scaling, mut other) = (scaling(&["a", "b"]), scaling(&["a", "b"]));
    let origin = step(&mut scaling, &margin(0), &input("a"), &[1.0]).unwrap();
    let foreign = step(&mut other, &margin(0), &input("a"), &[1.0]).unwrap();
    let evaluated = scaling.eval(&margin(0)).unwrap().origin(&input("a"));
    let mut cx = scaling.backward().unwrap();
    let text = |found: &str, layer: &str| {
        format!(
            "backward of `{layer}`: its Saved comes from {found}: expected one from a committed training scope"
        )
    };
    assert_eq!(message(cx.slot(&origin, &grad("b"))), text("layer `a`", "b"));
    assert_eq!(message(cx.slot(&foreign, &grad("a"))), text("another Scaling", "a"));
    assert_eq!(message(cx.slot(&evaluated, &grad("a"))), text("an evaluation scope", "a"));
    assert!(!cx.fp8_gemms(&foreign).dgrad);
    assert!(cx.slot(&origin, &grad("a")).is_ok());
    cx.commit().unwrap();
}

/// A function that returns what backward needs and lets its guard go would train on, with scale 1, for ever.
#[test]
fn a_dropped_scopes_saved_is_refused() {
    let mut scaling = scaling(&["a"]);
    let text = |found: &str| {
        format!("backward of `a`: its Saved comes from {found}: expected one from a committed training scope")
    };
    let open = |scaling: &mut Scaling, leave: fn(fp8_recipe::Forward<'_>)| {
        let mut cx = scaling.autocast(&margin(0)).unwrap();
        let (_, origin) = forward(&mut cx, &input("a"), &[1.0]);
        let (_, nested) = forward(&mut cx.nested(&margin(1)).unwrap(), &input("a"), &[1.0]);
        leave(cx);
        [origin, nested]
    };
    let uncommitted =
        "a forward scope that was left without commit (call `commit` on its guard before backward)";
    let discarded = "a forward scope that was discarded";
    let committed = open(&mut scaling, |cx| cx.commit().unwrap());
    type Leave = fn(fp8_recipe::Forward<'_>);
    let ways: [(Leave, &str); 3] = [
        (|cx| drop(cx), uncommitted),
        (|cx| std::mem::forget(cx), uncommitted),
        (|cx| cx.discard().unwrap(), discarded),
    ];
    for (leave, found) in ways {
        for origin in open(&mut scaling, leave) {
            let mut cx = scaling.backward().unwrap();
            assert_eq!(message(cx.slot(&origin, &grad("a"))), text(found));
            assert!(!cx.fp8_gemms(&origin).dgrad);
        }
    }
    let mut cx = scaling.backward().unwrap();
    for origin in &committed {
        backward(&mut cx, origin, &grad("a"), &[1.0]);
    }
    cx.commit().unwrap();
}

/// In high precision, too: whether a guard was committed does not depend on the recipe.
#[test]
fn a_dropped_scopes_saved_is_refused_without_fp8() {
    let mut scaling = scaling(&["a"]);
    let mut cx = scaling.scope(&margin(0), &options(false, false)).unwrap();
    let (_, origin) = forward(&mut cx, &input("a"), &[1.0]);
    drop(cx);
    assert!(message(scaling.backward().unwrap().slot(&origin, &grad("a"))).contains("left without commit"));
}

#[test]
fn slots_of_the_other_pass_are_refused() {
    let mut scaling = scaling(&["a"]);
    let mut cx = scaling.autocast(&margin(0)).unwrap();
    let text = "slot `a.grad_output` belongs to the backward pass: a forward scope does not lend it";
    assert_eq!(message(cx.slot(&grad("a"))), text);
    assert_eq!(message(cx.quantize_weight(&grad("a"), 1, &tensor(&[1.0]))), text);
    let origin = cx.origin(&input("a"));
    cx.commit().unwrap();
    let mut cx = scaling.backward().unwrap();
    let error = cx.slot(&origin, &weight("a")).unwrap_err();
    assert!(matches!(error, Error::Direction { .. }));
    assert_eq!(
        error.to_string(),
        "slot `a.weight` belongs to the forward pass: a backward scope does not lend it"
    );
    cx.commit().unwrap();
}

#[test]
fn names_that_occur_twice_or_never() {
    let twice = Model(vec![GemmSlots::new("fc"), GemmSlots::new("fc")]);
    assert_eq!(
        message(Scaling::new(&twice, &device())),
        "slot `fc.input` occurs twice: give the two layers different paths"
    );
    let mut scaling = scaling(&["fc"]);
    let mut cx = scaling.autocast(&margin(0)).unwrap();
    assert_eq!(
        message(cx.slot(&input("head"))),
        "slot `head.input` is not registered: build Scaling from the model that holds this layer"
    );
    assert!(cx.quantize_weight(&weight("head"), 1, &tensor(&[1.0])).is_err());
}

/// A failed scope and a good step = the good step alone, bit for bit.
#[test]
fn a_scope_left_without_commit_never_happened() {
    let recipe = margin(0);
    let bad = |scaling: &mut Scaling, leave: u8| {
        let run = |scaling: &mut Scaling| -> fp8_recipe::Result<()> {
            let mut cx = scaling.autocast(&recipe)?;
            forward(&mut cx, &input("a"), &[99.0, f32::INFINITY]);
            forward(&mut cx, &input("b"), &[77.0]);
            cx.quantize_weight(&weight("a"), 1, &tensor(&[55.0]))?;
            forward(&mut cx.nested(&margin(1))?, &input("b"), &[3.0]);
            match leave {
                0 => drop(cx),
                1 => cx.discard()?,
                2 => std::mem::forget(cx),
                3 => return cx.slot(&input("nowhere")).map(drop),
                _ => panic!("inside a scope"),
            }
            Ok(())
        };
        match leave {
            3 => assert!(run(scaling).is_err()),
            4 => assert!(catch_unwind(AssertUnwindSafe(|| run(scaling))).is_err()),
            _ => run(scaling).unwrap(),
        }
    };
    let good = |scaling: &mut Scaling, s: u8| {
        let mut cx = scaling.autocast(&recipe).unwrap();
        let (x8, origin) = forward(&mut cx, &input("a"), &[f32::from(s) + 0.7, 0.1]);
        let w8 = cx.quantize_weight(&weight("a"), 1, &tensor(&[0.3, 0.9])).unwrap();
        drop(cx.nested(&margin(1)).unwrap());
        cx.commit().unwrap();
        let mut cx = scaling.backward().unwrap();
        let dy8 = backward(&mut cx, &origin, &grad("a"), &[0.2]);
        cx.commit().unwrap();
        ([&x8, &w8, &dy8].map(codes), [&x8, &w8, &dy8].map(scale_of))
    };
    for leave in 0..5 {
        let (mut failing, mut alone) = (scaling(&["a", "b"]), scaling(&["a", "b"]));
        for s in 0..3 {
            bad(&mut failing, leave);
            assert_eq!(good(&mut failing, s), good(&mut alone, s), "left by way {leave}, step {s}");
            assert_eq!(failing.state().unwrap(), alone.state().unwrap(), "left by way {leave}, step {s}");
        }
    }
}

#[test]
fn a_backward_scope_left_without_commit_never_happened() {
    let mut scaling = scaling(&["a"]);
    let origin = step(&mut scaling, &margin(0), &input("a"), &[1.0]).unwrap();
    let before = scaling.state().unwrap();
    let mut cx = scaling.backward().unwrap();
    backward(&mut cx, &origin, &grad("a"), &[5.0]);
    drop(cx);
    assert_eq!(scaling.state().unwrap(), before);
    let mut cx = scaling.backward().unwrap();
    backward(&mut cx, &origin, &grad("a"), &[5.0]);
    cx.discard().unwrap();
    assert_eq!(scaling.state().unwrap(), before);
    let mut cx = scaling.backward().unwrap();
    let dy8 = backward(&mut cx, &origin, &grad("a"), &[1.0]);
    cx.commit().unwrap();
    assert_eq!((scale_of(&dy8), slot_state(&scaling, &grad("a")).1), (57344.0, vec![0.0, 0.0, 1.0]));
}

#[test]
fn a_provisional_scale_is_not_in_the_state() {
    let mut scaling = scaling(&["a"]);
    let mut cx = scaling.autocast(&margin(0)).unwrap();
    forward(&mut cx, &input("a"), &[1.0]);
    std::mem::forget(cx);
    assert_eq!(slot_state(&scaling, &input("a")), (-1.0, vec![0.0; 3]));
}

#[test]
fn disabled_records_nothing_and_makes_no_arena() {
    let mut scaling = scaling(&["a"]);
    let mut cx = scaling.scope(&margin(0), &options(false, false)).unwrap();
    let gemms = cx.fp8_gemms(&input("a"));
    assert!(!gemms.fprop && !gemms.dgrad && !gemms.wgrad);
    let (x, origin) = forward(&mut cx, &input("a"), &[1.0]);
    let w = cx.quantize_weight(&weight("a"), 1, &tensor(&[1.0])).unwrap();
    assert!(!x.is_fp8() && !w.is_fp8());
    cx.commit().unwrap();
    let mut cx = scaling.backward().unwrap();
    assert!(!cx.fp8_gemms(&origin).dgrad);
    assert!(!backward(&mut cx, &origin, &grad("a"), &[1.0]).is_fp8());
    cx.commit().unwrap();
    assert!(scaling.state().unwrap().arenas.is_empty());
    // A weight kept in high precision is not taken for a quantized one.
    let mut cx = scaling.autocast(&margin(0)).unwrap();
    assert!(cx.quantize_weight(&weight("a"), 1, &tensor(&[1.0])).unwrap().is_fp8());
    cx.commit().unwrap();
}

#[test]
fn calibrating_records_in_high_precision_the_largest_of_all_batches() {
    let mut scaling = scaling(&["a"]);
    let mut cx = scaling.scope(&margin(0), &options(false, true)).unwrap();
    let mut origin = None;
    for amax in [1.0, 7.0, 3.0] {
        let (x, from) = forward(&mut cx, &input("a"), &[amax]);
        assert!(!x.is_fp8());
        origin = Some(from);
    }
    assert!(!cx.quantize_weight(&weight("a"), 1, &tensor(&[3.5])).unwrap().is_fp8());
    cx.commit().unwrap();
    let mut cx = scaling.backward().unwrap();
    assert!(!backward(&mut cx, &origin.unwrap(), &grad("a"), &[0.5]).is_fp8());
    cx.commit().unwrap();
    assert_eq!(slot_state(&scaling, &input("a")), (64.0, vec![0.0, 0.0, 7.0]));
    assert_eq!(slot_state(&scaling, &weight("a")).0, 128.0);
    assert_eq!(slot_state(&scaling, &grad("a")).0, 114_688.0);
    let mut cx = scaling.autocast(&margin(0)).unwrap();
    assert_eq!(scale_of(&forward(&mut cx, &input("a"), &[1.0]).0), 64.0);
    cx.commit().unwrap();
}

#[test]
fn current_scaling_keeps_no_state() {
    let recipe: Recipe = CurrentScaling {
        quant: QParams { amax_epsilon: 2.0, ..Default::default() }.into(),
        ..Default::default()
    }
    .into();
    let mut scaling = scaling(&["a"]);
    let mut cx = scaling.autocast(&recipe).unwrap();
    let scales =
        [[7.0], [3.5], [1.0], [0.0], [f32::INFINITY]].map(|x| scale_of(&forward(&mut cx, &input("a"), &x).0));
    assert_eq!(scales, [64.0, 128.0, 224.0, 224.0, 1.0]);
    let origin = cx.origin(&input("a"));
    cx.commit().unwrap();
    let mut cx = scaling.backward().unwrap();
    assert_eq!(scale_of(&backward(&mut cx, &origin, &grad("a"), &[4.0])), 14336.0);
    cx.commit().unwrap();
    assert!(scaling.state().unwrap().arenas.is_empty() && scaling.slot_reports().unwrap().is_empty());
    let powers = CurrentScaling { quant: QParams::POWER_2.into(), ..Default::default() }.into();
    let mut cx = scaling.autocast(&powers).unwrap();
    assert_eq!(scale_of(&forward(&mut cx, &input("a"), &[3.0]).0), 128.0);
    cx.commit().unwrap();
}

#[test]
fn the_dtype_of_what_stays_in_high_precision() {
    let mut scaling = scaling(&["a"]);
    assert_eq!(scaling.autocast(&margin(0)).unwrap().compute_dtype(), None);
    let options = AutocastOptions { compute_dtype: Some(DType::BF16), ..Default::default() };
    let mut cx = scaling.scope(&margin(0), &options).unwrap();
    assert_eq!(cx.compute_dtype(), Some(DType::BF16));
    assert_eq!(cx.nested(&margin(1)).unwrap().compute_dtype(), Some(DType::BF16));
    let mut inner = cx.with_compute_dtype(DType::F32).unwrap();
    assert_eq!(inner.compute_dtype(), Some(DType::F32));
    assert_eq!(inner.nested(&margin(1)).unwrap().compute_dtype(), Some(DType::F32));
    drop(inner);
    assert_eq!(cx.compute_dtype(), Some(DType::BF16));
    drop(cx);
    assert_eq!(scaling.eval_with_options(&margin(0), &options).unwrap().compute_dtype(), Some(DType::BF16));
}

/// A layer that writes its output and its input's gradient in FP8.
struct WithOutputs(GemmSlots, [SlotName; 2]);

impl Slots for WithOutputs {
    fn slots(&self, f: &mut dyn FnMut(&SlotName)) {
        self.0.slots(f);
        self.1.iter().for_each(f);
    }
}

#[test]
fn transposes_are_wanted_where_backward_reads_them() {
    let slots = GemmSlots::new("a");
    let [output, grad_input] = [SlotRole::Output, SlotRole::GradInput].map(|role| SlotName::new("a", role));
    let model = WithOutputs(slots.clone(), [output.clone(), grad_input.clone()]);
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let mut cx = scaling.autocast(&margin(0)).unwrap();
    let wanted = [&slots.input, &slots.weight, &output].map(|slot| cx.slot(slot).unwrap().columnwise);
    assert_eq!(wanted, [true, true, false]);
    let origin = cx.origin(&slots.input);
    cx.commit().unwrap();
    let mut cx = scaling.backward().unwrap();
    let wanted = [&slots.grad_output, &grad_input].map(|slot| cx.slot(&origin, slot).unwrap().columnwise);
    assert_eq!(wanted, [true, false]);
    cx.commit().unwrap();
    assert!(!scaling.eval(&margin(0)).unwrap().slot(&slots.input).unwrap().columnwise);
}
