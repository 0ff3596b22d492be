//! Tests without a reduction of amaxes: the state that one recipe takes over from another, and a group of one rank.

use crate::every_device::support::{Alone, forward, input, of_recipe, scaling, short, step};
use fp8_recipe::fp8_kernels::Arena;
use fp8_recipe::{
    AmaxGroup, AutocastOptions, DelayedScaling, Recipe, Result, ScalingState, StartsNew, StateReport,
};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

fn margin(margin: i32) -> Recipe {
    DelayedScaling { margin, ..short() }.into()
}

#[test]
fn a_recipe_that_does_not_reduce_takes_amaxes_that_were_not_reduced() {
    let recipe = |margin| Recipe::from(DelayedScaling { margin, reduce_amax: false, ..short() });
    let mut scaling = scaling(&["a"]);
    scaling.set_group(Arc::new(Alone("dp")));
    for amax in [4.0, 2.0, 1.0] {
        step(&mut scaling, &recipe(0), &input("a"), &[amax]).unwrap();
    }
    scaling.autocast(&recipe(1)).unwrap().discard().unwrap();
    assert_eq!(of_recipe(&scaling, "margin=1", &input("a")), (56.0, vec![4.0, 2.0, 1.0]));
    // One that reduces starts without them.
    scaling.autocast(&margin(2)).unwrap().discard().unwrap();
    assert_eq!(of_recipe(&scaling, "margin=2", &input("a")).1, [0.0; 3]);
}

#[test]
fn a_state_without_last_updates_is_taken_over_by_another_recipe() {
    let mut trained = scaling(&["a"]);
    step(&mut trained, &margin(0), &input("a"), &[4.0]).unwrap();
    let mut state: ScalingState = trained.state().unwrap();
    state.arenas.iter_mut().for_each(|arena| arena.last_updates.clear());
    let mut resumed = scaling(&["a"]);
    let report = resumed.load_state(&state).unwrap();
    assert_eq!(report.unused.len(), 1, "{report}"); // gradients never ran
    resumed.prepare(&margin(1), &AutocastOptions::default()).unwrap();
    let report = resumed.state_report();
    assert_eq!(report.recomputed.len(), 1, "{report}");
    assert!(report.new.iter().all(|slot| slot.reason == StartsNew::NeverRan && &*slot.slot != "a.input"));
    assert_eq!(of_recipe(&resumed, "margin=1", &input("a")), (56.0, vec![0.0, 0.0, 4.0]));
}

#[test]
fn recipes_made_ready_before_anything_ran_have_nothing_to_report() {
    let mut scaling = scaling(&["a"]);
    for recipe in [margin(0), margin(1)] {
        scaling.prepare(&recipe, &AutocastOptions::default()).unwrap();
    }
    let report = scaling.state_report();
    assert_eq!(format!("{report:?}"), format!("{:?}", StateReport::default()));
    // What comes later is reported, with the recipe that has run since.
    step(&mut scaling, &margin(0), &input("a"), &[4.0]).unwrap();
    scaling.prepare(&margin(2), &AutocastOptions::default()).unwrap();
    assert_eq!(scaling.state_report().recomputed.len(), 1);
}

/// A group that counts how often it was poisoned.
#[derive(Debug)]
struct Counted {
    world_size: usize,
    poisoned: AtomicUsize,
    reason: Mutex<String>,
}

impl AmaxGroup for Counted {
    fn id(&self) -> &str {
        "dp"
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn agree_on_names(&self, _: &str, _: &[Arc<str>]) -> Result<()> {
        Ok(())
    }

    fn all_reduce_max(&self, _: &str, _: &Arena) -> Result<()> {
        Ok(())
    }

    fn poison(&self, reason: &str) {
        self.poisoned.fetch_add(1, Ordering::Relaxed);
        reason.clone_into(&mut self.reason.lock().unwrap());
    }
}

#[test]
fn a_group_of_one_rank_outlives_a_dropped_scope() {
    for (world_size, poisoned) in [(1, 0), (2, 1)] {
        let group = Arc::new(Counted { world_size, poisoned: 0.into(), reason: Mutex::default() });
        let mut scaling = scaling(&["a"]);
        scaling.set_group(group.clone());
        let mut cx = scaling.autocast(&margin(0)).unwrap();
        forward(&mut cx, &input("a"), &[1.0]);
        drop(cx);
        assert_eq!(group.poisoned.load(Ordering::Relaxed), poisoned, "{world_size} ranks");
        assert_eq!(group.reason.lock().unwrap().is_empty(), poisoned == 0);
    }
}
