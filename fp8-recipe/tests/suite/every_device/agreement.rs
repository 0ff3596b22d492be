//! Tests of the state that a commit and `state_digests` compare, with a group that notes each comparison.

use super::support::{backward, grad, input, message, scaling, short, step};
use fp8_recipe::fp8_kernels::Arena;
use fp8_recipe::{AmaxGroup, DelayedScaling, Error, Recipe, Result, Scaling, ScalingState, StateDigest};
use std::sync::{Arc, Mutex};

/// Notes what is compared; a second rank with equal state, unless told to differ.
#[derive(Debug, Default)]
struct Other {
    compared: Mutex<Vec<(String, Vec<StateDigest>)>>,
    reductions: Mutex<usize>,
    differs: Mutex<bool>,
}

impl Other {
    /// Returns the comparisons since the last call.
    fn compared(&self) -> Vec<(String, Vec<StateDigest>)> {
        std::mem::take(&mut *self.compared.lock().unwrap())
    }
}

impl AmaxGroup for Other {
    fn id(&self) -> &str {
        "dp"
    }

    fn world_size(&self) -> usize {
        2
    }

    fn agree_on_names(&self, _: &str, _: &[Arc<str>]) -> Result<()> {
        Ok(())
    }

    fn agree_on_state(&self, what: &str, state: &[StateDigest]) -> Result<()> {
        self.compared.lock().unwrap().push((what.to_owned(), state.to_vec()));
        if *self.differs.lock().unwrap() { Err(Error::Group("they differ".into())) } else { Ok(()) }
    }

    fn all_reduce_max(&self, _: &str, _: &Arena) -> Result<()> {
        *self.reductions.lock().unwrap() += 1;
        Ok(())
    }

    fn poison(&self, _: &str) {}
}

fn recipe() -> Recipe {
    short().into()
}

fn with_group() -> (Scaling, Arc<Other>) {
    let (mut scaling, group) = (scaling(&["a"]), Arc::new(Other::default()));
    scaling.set_group(group.clone());
    (scaling, group)
}

fn both_passes(scaling: &mut Scaling, value: f32) -> Result<()> {
    let origin = step(scaling, &recipe(), &input("a"), &[value])?;
    let mut cx = scaling.backward()?;
    backward(&mut cx, &origin, &grad("a"), &[value]);
    cx.commit()
}

#[test]
fn state_is_compared_before_the_first_reduction_and_again_after_a_load() {
    let (mut scaling, group) = with_group();
    let calls = |group: &Other| group.compared().into_iter().map(|(what, _)| what).collect::<Vec<_>>();
    both_passes(&mut scaling, 1.0).unwrap();
    let both = calls(&group);
    assert_eq!(both.len(), 2);
    assert!(
        both[0].starts_with("forward delayed (") && both[1].starts_with("backward delayed ("),
        "{both:?}"
    );
    for _ in 0..3 {
        both_passes(&mut scaling, 2.0).unwrap();
    }
    assert!(calls(&group).is_empty(), "later steps compare nothing");
    let state = scaling.state().unwrap();
    scaling.load_state(&state).unwrap();
    both_passes(&mut scaling, 2.0).unwrap();
    assert_eq!(calls(&group), both);
    let mut refused = state.clone();
    refused.arenas[0].scale[0] = f32::NAN;
    scaling.load_state(&refused).unwrap_err();
    both_passes(&mut scaling, 2.0).unwrap();
    assert!(calls(&group).is_empty(), "nothing was loaded");
    let anew = Arc::new(Other::default());
    scaling.set_group(anew.clone());
    both_passes(&mut scaling, 2.0).unwrap();
    assert_eq!(calls(&anew), both, "the ranks of another group");
}

#[test]
fn state_that_differs_is_an_error_before_anything_is_reduced() {
    let (mut scaling, group) = with_group();
    *group.differs.lock().unwrap() = true;
    assert_eq!(message(step(&mut scaling, &recipe(), &input("a"), &[1.0])), "they differ");
    assert_eq!(*group.reductions.lock().unwrap(), 0);
    *group.differs.lock().unwrap() = false;
    group.compared();
    step(&mut scaling, &recipe(), &input("a"), &[1.0]).unwrap();
    assert_eq!(group.compared().len(), 1, "it is compared again");
}

#[test]
fn a_first_scale_that_was_not_committed_counts_as_not_calibrated() {
    let compared = [1.0, 7.0].map(|value| {
        let (mut scaling, group) = with_group();
        step(&mut scaling, &recipe(), &input("a"), &[value]).unwrap();
        group.compared().remove(0).1
    });
    assert_eq!(compared[0], compared[1]); // each rank's own first scale is no difference
}

/// The names of the digests that differ.
fn differences(a: &Scaling, b: &Scaling) -> Vec<String> {
    let [a, b] = [a, b].map(|scaling| scaling.state_digests().unwrap());
    assert_eq!(a.len(), b.len());
    let pairs = a.iter().zip(&b).inspect(|(a, b)| assert_eq!(a.name, b.name));
    pairs.filter(|(a, b)| a.digest != b.digest).map(|(a, _)| a.name.to_string()).collect()
}

#[test]
fn each_kind_of_state_has_a_digest_of_its_own() {
    let mut trained = scaling(&["a"]);
    both_passes(&mut trained, 1.0).unwrap();
    both_passes(&mut trained, 2.0).unwrap();
    let state = trained.state().unwrap();
    type Change = fn(&mut ScalingState);
    let changes: [(Change, &str); 4] = [
        (|_| {}, ""),
        (
            |state| state.arenas[0].scale[0] *= 2.0,
            "the scale of `a.input` under delayed (amax_history_len=4)",
        ),
        (
            |state| state.arenas[1].amax_history[2][0] += 1.0,
            "the amax history of `a.grad_output` under delayed (",
        ),
        (|state| state.arenas[1].updates += 1, "the number of backward updates under delayed ("),
    ];
    for (change, name) in changes {
        let mut changed = state.clone();
        change(&mut changed);
        let mut other = scaling(&["a"]);
        other.load_state(&changed).unwrap(); // not used so far: pending state is compared as well
        for used in [false, true] {
            if used {
                other.prepare(&recipe(), &fp8_recipe::AutocastOptions::default()).unwrap();
            }
            let found = differences(&trained, &other);
            assert_eq!(found.len(), usize::from(!name.is_empty()), "{found:?}");
            assert!(found.iter().all(|found| found.starts_with(name)), "{found:?}, expected {name}");
            assert!(found.iter().all(|found| found.ends_with("delayed (amax_history_len=4)")), "{found:?}");
        }
    }
}

#[test]
fn state_that_is_each_ranks_own_has_no_digest() {
    let mut scaling = scaling(&["a"]);
    let own = Recipe::from(DelayedScaling { reduce_amax: false, ..short() });
    step(&mut scaling, &own, &input("a"), &[1.0]).unwrap();
    assert_eq!(scaling.state_digests().unwrap(), []);
    scaling.prepare(&recipe(), &fp8_recipe::AutocastOptions::default()).unwrap();
    assert_eq!(scaling.state_digests().unwrap(), [], "never updated");
    step(&mut scaling, &recipe(), &input("a"), &[1.0]).unwrap();
    assert_eq!(scaling.state_digests().unwrap().len(), 2 * 2 + 1);
}

/// A group that has no comparison of state, only of names.
#[derive(Debug, Default)]
struct OfNames(Mutex<Vec<Arc<str>>>);

impl AmaxGroup for OfNames {
    fn id(&self) -> &str {
        "dp"
    }

    fn world_size(&self) -> usize {
        2
    }

    fn agree_on_names(&self, _: &str, names: &[Arc<str>]) -> Result<()> {
        *self.0.lock().unwrap() = names.to_vec();
        Ok(())
    }

    fn all_reduce_max(&self, _: &str, _: &Arena) -> Result<()> {
        Ok(())
    }

    fn poison(&self, _: &str) {}
}

#[test]
fn a_group_without_a_comparison_of_state_compares_names_with_digests() {
    let group = OfNames::default();
    // The digest of no bytes is the beginning of SHA-256's well-known value.
    group.agree_on_state("x", &[StateDigest::new("the value of `a`", [b""])]).unwrap();
    let expected = "the value of `a` (digest e3b0c44298fc1c149afbf4c8996fb924)";
    assert_eq!(*group.0.lock().unwrap(), [expected.into()]);
}
