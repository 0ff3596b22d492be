//! Tests of the calls that a commit makes to its group, with a group that plays the other ranks.

use super::support::{
    backward, forward, grad, input, message, scale_of, scaling, short, slot_state, step, updates,
};
use fp8_recipe::fp8_kernels::Arena;
use fp8_recipe::{
    AmaxGroup, AutocastOptions, CurrentScaling, DelayedScaling, Direction, Error, Recipe, Result, Scaling,
    StateDigest,
};
use std::sync::{Arc, Mutex};

/// The other ranks: their row 0, or the call that they fail.
#[derive(Debug)]
struct Others {
    id: &'static str,
    world_size: usize,
    log: Mutex<Vec<String>>,
    row: Mutex<Vec<f32>>,
    fails: Mutex<Option<&'static str>>,
}

fn group(id: &'static str, world_size: usize) -> Arc<Others> {
    let (log, row, fails) = Default::default();
    Arc::new(Others { id, world_size, log, row, fails })
}

impl Others {
    fn call(&self, name: &str, key: &str) -> Result<()> {
        let entry = format!("{} {name} {key}", self.id);
        let fails = self.fails.lock().unwrap().is_some_and(|what| entry.contains(what));
        self.log.lock().unwrap().push(entry);
        if fails { Err(Error::Group("rank 1 failed: out of memory".into())) } else { Ok(()) }
    }

    fn fail(&self, what: Option<&'static str>) {
        *self.fails.lock().unwrap() = what;
    }

    /// Returns the calls since the last time, without the recipes' options, and forgets them.
    fn log(&self) -> Vec<String> {
        let log = std::mem::take(&mut *self.log.lock().unwrap());
        log.iter().map(|entry| entry.split(" (").next().unwrap().to_owned()).collect()
    }

    fn full_log(&self) -> Vec<String> {
        std::mem::take(&mut *self.log.lock().unwrap())
    }
}

impl AmaxGroup for Others {
    fn id(&self) -> &str {
        self.id
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn agree_on_names(&self, key: &str, names: &[Arc<str>]) -> Result<()> {
        assert!(names.is_sorted());
        self.call(&format!("agree {}", names.len()), key)
    }

    /// `agreement.rs` has its cases.
    fn agree_on_state(&self, _: &str, _: &[StateDigest]) -> Result<()> {
        Ok(())
    }

    fn all_reduce_max(&self, key: &str, arena: &Arena) -> Result<()> {
        self.call("reduce", key)?;
        let row = self.row.lock().unwrap();
        if row.len() == arena.slots() { Ok(arena.merge_staged(&row)?) } else { Ok(()) }
    }

    fn poison(&self, reason: &str) {
        self.log.lock().unwrap().push(format!("{} poison {reason}", self.id));
    }
}

fn options(group: &Arc<Others>) -> AutocastOptions {
    AutocastOptions { amax_reduction_group: Some(group.clone()), ..Default::default() }
}

fn margin(margin: i32) -> Recipe {
    DelayedScaling { margin, ..short() }.into()
}

#[test]
fn amaxes_are_reduced_before_the_update() {
    let (mut scaling, group) = (scaling(&["a"]), group("dp", 2));
    scaling.set_group(group.clone());
    *group.row.lock().unwrap() = vec![7.0, 3.5]; // a.input, a.weight
    let mut cx = scaling.autocast(&margin(0)).unwrap();
    let (x8, _) = forward(&mut cx, &input("a"), &[1.0]);
    cx.commit().unwrap();
    assert_eq!(scale_of(&x8), 448.0); // the first scale is this rank's own
    assert_eq!(slot_state(&scaling, &input("a")), (64.0, vec![0.0, 0.0, 7.0]));
    // Another rank's expert had tokens: its slot is rolled here too, and needs no calibration any more.
    assert_eq!(slot_state(&scaling, &super::support::weight("a")), (128.0, vec![0.0, 0.0, 3.5]));
    let names = ["dp agree 2 forward delayed", "dp reduce forward delayed"];
    assert_eq!(group.log(), names);
    scaling.autocast(&margin(0)).unwrap().commit().unwrap();
    assert_eq!(group.log(), names[1..]); // names are compared once
}

#[test]
fn backward_reduces_its_own_arena() {
    let (mut scaling, group) = (scaling(&["a"]), group("dp", 2));
    scaling.set_group(group.clone());
    let origin = step(&mut scaling, &margin(0), &input("a"), &[1.0]).unwrap();
    group.log();
    *group.row.lock().unwrap() = vec![8.0]; // a.grad_output
    let mut cx = scaling.backward().unwrap();
    backward(&mut cx, &origin, &grad("a"), &[1.0]);
    cx.commit().unwrap();
    assert_eq!(slot_state(&scaling, &grad("a")), (7168.0, vec![0.0, 0.0, 8.0]));
    assert_eq!(group.log(), ["dp agree 1 backward delayed", "dp reduce backward delayed"]);
}

#[test]
fn an_infinity_of_another_rank_is_left_out_after_the_reduction() {
    let (mut scaling, group) = (scaling(&["a"]), group("dp", 2));
    scaling.set_group(group.clone());
    *group.row.lock().unwrap() = vec![f32::INFINITY, -1.0];
    step(&mut scaling, &margin(0), &input("a"), &[1.0]).unwrap();
    assert_eq!(slot_state(&scaling, &input("a")), (-1.0, vec![0.0; 3]));
}

#[test]
fn who_is_not_asked() {
    let run = |recipe: Recipe, group: &Arc<Others>| {
        let mut scaling = scaling(&["a"]);
        scaling.set_group(group.clone());
        step(&mut scaling, &recipe, &input("a"), &[1.0]).unwrap();
        group.log()
    };
    assert!(run(DelayedScaling { reduce_amax: false, ..short() }.into(), &group("dp", 2)).is_empty());
    assert!(run(CurrentScaling::default().into(), &group("dp", 2)).is_empty());
    assert!(run(margin(0), &group("dp", 1)).is_empty());
    assert_eq!(run(margin(0), &group("dp", 2)).len(), 2);
}

#[test]
fn a_scopes_own_group_comes_before_the_owners() {
    let (mut scaling, dp, tp) = (scaling(&["a"]), group("dp", 2), group("tp", 2));
    scaling.set_group(dp.clone());
    let mut cx = scaling.scope(&margin(0), &options(&tp)).unwrap();
    drop(cx.nested(&margin(1)).unwrap()); // stays in the group
    cx.commit().unwrap();
    assert_eq!((dp.log().len(), tp.log().len()), (0, 4));
    scaling.autocast(&margin(0)).unwrap().commit().unwrap();
    assert_eq!((dp.log().len(), tp.log().len()), (2, 0));
    let groups: Vec<_> =
        scaling.state().unwrap().arenas.into_iter().filter_map(|arena| arena.group).collect();
    assert_eq!(groups, ["tp", "tp", "tp", "tp", "dp", "dp"]);
}

#[test]
fn arenas_are_reduced_in_the_order_of_their_keys() {
    let orders = [[0, 1, 2], [2, 0, 1], [1, 2, 0]].map(|order| {
        let (mut scaling, group) = (scaling(&["a"]), group("dp", 2));
        scaling.set_group(group.clone());
        let mut cx = scaling.autocast(&margin(order[0])).unwrap();
        drop(cx.nested(&margin(order[1])).unwrap());
        drop(cx.nested(&margin(order[2])).unwrap());
        cx.commit().unwrap();
        group.full_log()
    });
    assert_eq!(orders[0].len(), 6);
    assert!(orders.iter().all(|order| order == &orders[0]), "{orders:?}");
    let reduced: Vec<_> = orders[0].iter().filter(|entry| entry.contains("reduce forward")).collect();
    assert!(reduced.is_sorted());
    assert!(reduced[0].ends_with("delayed (amax_history_len=4), group dp"), "{}", reduced[0]);
}

#[test]
fn an_error_in_a_reduction_changes_nothing() {
    let (mut scaling, group) = (scaling(&["a"]), group("dp", 2));
    scaling.set_group(group.clone());
    let run = |scaling: &mut Scaling| {
        let mut cx = scaling.autocast(&margin(0)).unwrap();
        forward(&mut cx, &input("a"), &[1.0]);
        forward(&mut cx.nested(&margin(1)).unwrap(), &input("a"), &[1.0]);
        cx.commit()
    };
    run(&mut scaling).unwrap();
    let before = scaling.state().unwrap();
    for what in ["reduce forward delayed (amax", "reduce forward delayed (margin=1"] {
        group.log();
        group.fail(Some(what));
        assert_eq!(message(run(&mut scaling)), "rank 1 failed: out of memory");
        assert_eq!(scaling.state().unwrap(), before);
        assert_eq!(group.log().last().unwrap(), "dp poison in a forward scope: rank 1 failed: out of memory");
    }
    group.fail(None);
    run(&mut scaling).unwrap();
    assert_eq!(updates(&scaling, Direction::Forward), [2, 2]);
}

#[test]
fn names_that_differ_are_compared_again() {
    let (mut scaling, group) = (scaling(&["a"]), group("dp", 2));
    scaling.set_group(group.clone());
    group.fail(Some("agree"));
    assert!(step(&mut scaling, &margin(0), &input("a"), &[1.0]).is_err());
    group.fail(None);
    group.log();
    step(&mut scaling, &margin(0), &input("a"), &[1.0]).unwrap();
    assert_eq!(group.log()[0], "dp agree 2 forward delayed");
}

#[test]
fn a_group_made_anew_compares_names_again_and_keeps_the_arenas() {
    let (mut scaling, old, new) = (scaling(&["a"]), group("dp", 2), group("dp", 4));
    for group in [&old, &new] {
        scaling.set_group(group.clone());
        step(&mut scaling, &margin(0), &input("a"), &[1.0]).unwrap();
        assert_eq!(group.log().len(), 2);
    }
    assert_eq!(updates(&scaling, Direction::Forward), [2]);
}

#[test]
fn a_drop_poisons_and_a_discard_agrees() {
    let (mut scaling, dp, tp) = (scaling(&["a"]), group("dp", 2), group("tp", 2));
    let scope =
        |scaling: &mut Scaling, group: &Arc<Others>, leave: fn(fp8_recipe::Forward<'_>) -> Result<()>| {
            let mut cx = scaling.scope(&margin(0), &options(group)).unwrap();
            forward(&mut cx, &input("a"), &[1.0]);
            leave(cx)
        };
    scope(&mut scaling, &dp, |cx| cx.commit()).unwrap();
    scope(&mut scaling, &tp, |cx| cx.commit()).unwrap();
    let before = scaling.state().unwrap();
    dp.log();
    tp.log();

    scope(&mut scaling, &dp, |cx| {
        drop(cx);
        Ok(())
    })
    .unwrap();
    let poison = "poison left a forward scope without commit";
    assert_eq!((dp.log(), tp.log()), (vec![format!("dp {poison}")], vec![format!("tp {poison}")]));

    scope(&mut scaling, &dp, |cx| cx.discard()).unwrap();
    let agree = "agree 0 discard forward";
    assert_eq!((dp.log(), tp.log()), (vec![format!("dp {agree}")], vec![format!("tp {agree}")]));

    tp.fail(Some("discard"));
    assert!(scope(&mut scaling, &dp, |cx| cx.discard()).is_err());
    assert_eq!(dp.log().last().unwrap(), "dp poison in a forward scope: rank 1 failed: out of memory");
    assert_eq!(scaling.state().unwrap(), before);

    tp.fail(None);
    dp.log();
    tp.log();
    drop(scaling.backward().unwrap());
    scaling.backward().unwrap().discard().unwrap();
    let expected = ["dp poison left a backward scope without commit", "dp agree 0 discard backward"];
    assert_eq!(dp.log(), expected);
}

#[test]
fn a_guard_that_was_forgotten_poisons_when_the_next_scope_opens() {
    let (mut scaling, group) = (scaling(&["a"]), group("dp", 2));
    scaling.set_group(group.clone());
    std::mem::forget(scaling.autocast(&margin(0)).unwrap());
    assert!(group.log().is_empty());
    drop(scaling.eval(&margin(0)).unwrap());
    assert_eq!(group.log(), ["dp poison left a forward scope without commit"]);
}

#[test]
fn nobody_waits_for_an_evaluation_or_a_scope_without_fp8() {
    let (mut scaling, group) = (scaling(&["a"]), group("dp", 2));
    scaling.set_group(group.clone());
    let off = AutocastOptions { enabled: false, ..Default::default() };
    drop(scaling.eval(&margin(0)).unwrap());
    drop(scaling.scope(&margin(0), &off).unwrap());
    scaling.scope(&margin(0), &off).unwrap().commit().unwrap();
    scaling.scope(&margin(0), &off).unwrap().discard().unwrap();
    assert!(group.log().is_empty());
}

/// An expert under its own recipe that got no token on this rank runs on another one: both reduce its arenas.
#[test]
fn backward_takes_part_in_every_reduction_of_its_forwards() {
    let (mut scaling, group) = (scaling(&["a", "expert"]), group("dp", 2));
    scaling.set_group(group.clone());
    let mut cx = scaling.autocast(&margin(0)).unwrap();
    let (_, origin) = forward(&mut cx, &input("a"), &[1.0]);
    drop(cx.nested(&margin(1)).unwrap()); // opened on all ranks; no token here
    let snapshot = cx.snapshot();
    cx.commit().unwrap();
    group.log();
    let mut cx = scaling.backward().unwrap();
    backward(&mut cx, &origin, &grad("a"), &[1.0]);
    cx.commit().unwrap();
    let reduced = |log: Vec<String>| log.iter().filter(|entry| entry.contains("reduce backward")).count();
    assert_eq!(reduced(group.log()), 2);
    assert_eq!(updates(&scaling, Direction::Backward), [1, 1]);

    let mut cx = scaling.backward().unwrap();
    let replayed = cx.replay(&snapshot).unwrap().origin(&input("a"));
    backward(&mut cx, &replayed, &grad("a"), &[1.0]);
    cx.commit().unwrap();
    assert_eq!(reduced(group.log()), 2);
}

#[test]
fn the_other_ranks_hear_the_error_for_which_a_scope_was_left() {
    let (mut scaling, group) = (scaling(&["a"]), group("dp", 2));
    scaling.set_group(group.clone());
    let mut cx = scaling.autocast(&margin(0)).unwrap();
    let full = cx.nested(&margin(1)).unwrap().attempt(|_| Err::<(), _>("the disk is full"));
    assert_eq!(full, Err("the disk is full"));
    drop(cx);
    assert_eq!(group.log(), ["dp poison in a forward scope: the disk is full"]);

    let mut cx = scaling.backward().unwrap();
    assert!(cx.attempt(|_| Err::<(), _>("handled")).is_err());
    assert!(cx.attempt(|_| Err::<(), _>("no more memory")).is_err());
    drop(cx);
    assert_eq!(group.log(), ["dp poison in a backward scope: no more memory"]);

    // An error that is handled is none for the others, and none for the next scope.
    let mut cx = scaling.autocast(&margin(0)).unwrap();
    assert!(cx.attempt(|_| Err::<(), _>("handled")).is_err());
    assert!(cx.attempt(|cx| Ok::<_, Error>(cx.fp8_gemms(&input("a")).fprop)).unwrap());
    cx.commit().unwrap();
    drop(scaling.autocast(&margin(0)).unwrap());
    assert_eq!(group.log().last().unwrap(), "dp poison left a forward scope without commit");
    // An evaluation has nobody to tell.
    assert!(scaling.eval(&margin(0)).unwrap().attempt(|_| Err::<(), _>("anything")).is_err());
    assert!(group.log().is_empty());

    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _cx = scaling.autocast(&margin(0)).unwrap();
        std::panic::resume_unwind(Box::new("a broken layer"));
    }));
    assert!(panicked.is_err());
    assert_eq!(group.log(), ["dp poison panicked in a forward scope"]);
}

#[test]
fn a_backward_scope_in_which_nothing_runs_takes_part_in_the_reductions_of_its_forwards() {
    let (mut scaling, group) = (scaling(&["a"]), group("dp", 2));
    scaling.set_group(group.clone());
    *group.row.lock().unwrap() = vec![8.0]; // a.grad_output: another rank's
    let forward = |scaling: &mut Scaling, margins: &[i32]| {
        let mut cx = scaling.autocast(&margin(margins[0])).unwrap();
        margins[1..].iter().for_each(|&inner| drop(cx.nested(&margin(inner)).unwrap()));
        cx.commit().unwrap();
    };
    let reduced = |scaling: &mut Scaling| {
        group.log();
        scaling.backward().unwrap().commit().unwrap();
        group.log().iter().filter(|entry| entry.contains("reduce backward")).count()
    };
    assert_eq!(reduced(&mut scaling), 0); // no forward scope so far
    forward(&mut scaling, &[0, 1]);
    forward(&mut scaling, &[0]);
    assert_eq!(reduced(&mut scaling), 2);
    assert_eq!(reduced(&mut scaling), 2); // that of the second forward scope
    assert_eq!(updates(&scaling, Direction::Backward), [2, 2]);
    assert_eq!(super::support::slot_states(&scaling, &grad("a"))[0], (7168.0, vec![0.0, 8.0, 8.0]));
    forward(&mut scaling, &[1]);
    assert_eq!(reduced(&mut scaling), 1);

    // A forward scope that was discarded or left has no backward.
    scaling.autocast(&margin(2)).unwrap().discard().unwrap();
    drop(scaling.autocast(&margin(3)).unwrap());
    drop(scaling.eval(&margin(4)).unwrap());
    assert_eq!(reduced(&mut scaling), 1);
    // A backward scope that was discarded leaves its forward scopes to the next.
    forward(&mut scaling, &[0]);
    scaling.backward().unwrap().discard().unwrap();
    forward(&mut scaling, &[1]);
    assert_eq!(reduced(&mut scaling), 2);
}
