//! Scopes in random order on several ranks, against a naive model: nested, dropped, discarded, skipped and failed ones,
//! evaluations in between, layers that recompute. Every rank ends with the model's scales or with the expected error.

mod naive;
mod plan;

use crate::support::{Group, f32s, try_ranks};
use fp8_dist::{Error, Failure};
use fp8_kernels::{Operand, Slot, ops};
use fp8_recipe::{
    AutocastOptions, Backward, CurrentScaling, DelayedScaling, Forward, Origin, Recipe, Scaling, SlotName,
    SlotRole, Slots, Snapshot,
};
use naive::{Naive, Staged};
use plan::{Draw, Ending, Fault, Frame, Plan, Policy, Run, SLOTS, Step, Tree};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;
use std::time::{Duration, Instant};

const CASES: u64 = 1000;
const DEADLINE: Duration = Duration::from_secs(30);
/// The time that a case may take. It is half of the deadline, so a case in which a rank waits until the deadline fails.
const PATIENCE: Duration = Duration::from_secs(15);

struct Model([[SlotName; 2]; SLOTS]);

impl Model {
    fn new() -> Self {
        let slot = |index: usize, role| SlotName::new(&format!("layer{index}"), role);
        Self(std::array::from_fn(|index| [slot(index, SlotRole::Input), slot(index, SlotRole::GradOutput)]))
    }
}

impl Slots for Model {
    fn slots(&self, f: &mut dyn FnMut(&SlotName)) {
        self.0.iter().flatten().for_each(f);
    }
}

fn recipe(index: usize) -> Recipe {
    let Policy { margin, len, interval } = Policy::of(index);
    DelayedScaling { margin, interval, amax_history_len: len, ..Default::default() }.into()
}

fn frame_of(frame: Frame) -> (Recipe, AutocastOptions) {
    match frame {
        Frame::Delayed(index) => (recipe(index), AutocastOptions::default()),
        Frame::Current => (CurrentScaling::default().into(), AutocastOptions::default()),
        Frame::Disabled => (recipe(0), AutocastOptions { enabled: false, ..Default::default() }),
    }
}

/// The recipes whose amaxes a scope reduces, and whether it records anything.
fn touched(tree: &Tree) -> (Vec<usize>, bool) {
    let (mut recipes, mut records) = (Vec::new(), tree.frame != Frame::Disabled);
    if let Frame::Delayed(index) = tree.frame {
        recipes.push(index);
    }
    for (inner, inner_records) in tree.nested.iter().map(touched) {
        recipes.extend(inner);
        records |= inner_records;
    }
    recipes.sort_unstable();
    recipes.dedup();
    (recipes, records)
}

/// A committed forward scope as a rank keeps it, with the predictions of the model.
struct Kept {
    /// With each run that it had: which frame, slot and value, and the scale that it quantized with.
    runs: Vec<(Frame, Run, Origin, Option<f32>)>,
    /// The outermost frame and its snapshot, if the scope took one.
    snapshot: Option<(Frame, Snapshot)>,
    touched: Vec<usize>,
}

/// One rank on its way through a plan. It plays the model for all ranks by itself.
struct Rank<'a> {
    plan: &'a Plan,
    group: Group,
    model: Model,
    scaling: Scaling,
    naive: Naive,
    kept: Vec<Kept>,
    /// The recipes of the forward scopes since the last backward scope, sorted.
    awaiting: Vec<usize>,
    is_answered: bool,
    pace: Draw,
}

/// The result of one rank: `Ok` if it finished its plan, or else the failure that it was told. The failure is `None` on
/// a rank that left by itself.
type Outcome = Result<(), Option<Failure>>;

fn expect_scale(operand: &Operand, expected: Option<f32>, what: &str) {
    let found = operand.as_fp8().map(|fp8| fp8.scale_inv().item().unwrap());
    assert_eq!(found, expected.map(f32::recip), "{what}");
}

fn quantize(run: &Run, slot: &Slot<'_>) -> Operand {
    ops::quantize(&f32s(&[run.value], &[1, 1]), slot).unwrap()
}

impl Rank<'_> {
    fn go(mut self) -> Outcome {
        for (number, step) in self.plan.steps.iter().enumerate() {
            if self.pace.below(8) == 0 {
                thread::sleep(Duration::from_micros(self.pace.below(200) as u64));
            }
            match step {
                Step::Evaluate { rank, recipe, run } => self.evaluate(*rank, *recipe, run),
                Step::Forward { tree, ending, snapshot } => self.forward(tree, *ending, *snapshot)?,
                Step::Backward { of, skips, ending, recompute } => {
                    self.backward(of, skips, *ending, *recompute)?;
                }
            }
            self.compare(&format!("after step {number}: {step:?}"));
        }
        Ok(())
    }

    /// The state is the model's, bit for bit.
    fn compare(&self, when: &str) {
        let state = self.scaling.state().unwrap();
        for (index, passes) in self.naive.recipes.iter().enumerate() {
            let margin = format!("(margin={},", Policy::of(index).margin);
            let arenas: Vec<_> = state.arenas.iter().filter(|arena| arena.recipe.contains(&margin)).collect();
            let Some(passes) = passes else {
                assert!(arenas.is_empty(), "{when}: recipe {index} has arenas");
                continue;
            };
            for (arena, pass) in arenas.iter().zip(passes) {
                let what = format!("{when}: recipe {index}, {}", arena.direction);
                assert_eq!(arena.updates, pass.updates, "updates {what}");
                for (slot, expected) in pass.slots.iter().enumerate() {
                    let window: Vec<f32> = arena.amax_history.iter().map(|row| row[slot]).collect();
                    let found = (arena.scale[slot], window, arena.last_updates[slot]);
                    let expected = (expected.scale.unwrap_or(-1.0), expected.window.clone(), expected.last);
                    assert_eq!(found, expected, "slot {slot} {what}");
                }
            }
            assert_eq!(arenas.len(), 2, "{when}");
        }
    }

    fn evaluate(&mut self, rank: usize, index: usize, run: &Run) {
        if rank == self.group.rank() {
            let mut cx = self.scaling.eval(&recipe(index)).unwrap();
            let operand = quantize(run, &cx.slot(&self.model.0[run.slot][0]).unwrap());
            expect_scale(&operand, Some(self.naive.evaluate(index, run)), "evaluation");
        }
    }

    /// A scope's fault with its rank, and this rank's own. `Err` where this rank leaves instead of opening the scope.
    #[expect(clippy::type_complexity, reason = "named by the line above")]
    fn faults(
        &self,
        ending: Ending,
        known: impl Fn(Fault) -> Fault,
    ) -> Result<(Option<(Fault, usize)>, Option<Fault>), Option<Failure>> {
        let Ending::Fault(fault, rank) = ending else { return Ok((None, None)) };
        let (fault, is_own) = (known(fault), rank == self.group.rank());
        if is_own && fault == Fault::Leaves {
            return Err(None);
        }
        Ok((Some((fault, rank)), is_own.then_some(fault)))
    }

    /// Plays a scope's frames on the model, for every rank, and says which scale this rank gets at each run.
    fn predict(&mut self, tree: &Tree, staged: &mut [Staged], scales: &mut Vec<Option<f32>>) {
        if let Frame::Delayed(index) = tree.frame {
            self.naive.open(index);
        }
        for (rank, staged) in staged.iter_mut().enumerate() {
            for run in &tree.runs[rank] {
                let scale = self.naive.run(staged, &tree.frame, 0, run);
                if rank == self.group.rank() {
                    scales.push(scale);
                }
            }
        }
        tree.nested.iter().for_each(|nested| self.predict(nested, staged, scales));
    }

    fn forward(&mut self, tree: &Tree, ending: Ending, snapshot: bool) -> Outcome {
        let (recipes, records) = touched(tree);
        let (fault, own_fault) = self.faults(ending, |fault| fault)?;
        let stray;
        let tree = if own_fault == Some(Fault::Strays) {
            // Reduced before all that the others reduce, or instead of it.
            let other = if recipes.first() == Some(&0) { 1 } else { 0 };
            stray = Tree { frame: Frame::Delayed(other), runs: tree.runs.clone(), nested: Vec::new() };
            &stray
        } else {
            tree
        };
        let mut staged = vec![Staged::default(); self.plan.ranks];
        let mut scales = Vec::new();
        self.predict(tree, &mut staged, &mut scales);
        let mut scales = scales.into_iter();

        let (rank, model, mut runs) = (self.group.rank(), &self.model, Vec::new());
        let (options, mut kept) = (frame_of(tree.frame), None);
        let mut cx = self.scaling.scope(&options.0, &options.1).unwrap();
        run_frames(&mut cx, tree, rank, model, &mut scales, &mut runs);
        if snapshot {
            kept = Some((tree.frame, cx.snapshot()));
        }
        let result = leave(cx, ending, own_fault);
        match (ending, fault) {
            (Ending::Discard, _) => {
                result.unwrap();
                Ok(())
            }
            (Ending::Commit, _) => {
                result.unwrap();
                self.naive.commit(&recipes, 0, &staged);
                if std::mem::take(&mut self.is_answered) {
                    self.awaiting.clear();
                }
                self.awaiting.extend(&recipes);
                self.awaiting.sort_unstable();
                self.awaiting.dedup();
                self.kept.push(Kept { runs, snapshot: kept, touched: recipes });
                Ok(())
            }
            (_, Some((fault, by))) => self.end(result, fault, by, "forward", &recipes, records),
            (_, None) => Ok(()),
        }
    }

    fn backward(&mut self, of: &[usize], skips: &[bool], ending: Ending, recompute: bool) -> Outcome {
        let recipes = self.awaiting.clone();
        assert!(of.iter().all(|&of| self.kept[of].touched.iter().all(|recipe| recipes.contains(recipe))));
        // Backward takes no recipe.
        let discards = |fault| if fault == Fault::Strays { Fault::Discards } else { fault };
        let (fault, own_fault) = self.faults(ending, discards)?;
        // The gradients of every rank, which this one knows from the plan.
        let mut staged = vec![Staged::default(); self.plan.ranks];
        let mut own_scales = Vec::new();
        for &number in of {
            let forward = self.plan.steps.iter().filter_map(|step| match step {
                Step::Forward { tree, ending: Ending::Commit, .. } => Some(tree),
                _ => None,
            });
            let Some(tree) = forward.clone().nth(number) else { continue };
            for rank in (0..self.plan.ranks).filter(|&rank| !skips[rank]) {
                let mut runs = Vec::new();
                flatten(tree, rank, &mut runs);
                for (frame, run) in runs {
                    let scale = self.naive.run(&mut staged[rank], &frame, 1, &gradient(&run));
                    if rank == self.group.rank() {
                        own_scales.push(scale);
                    }
                }
            }
        }
        let mut own_scales = own_scales.into_iter();
        let mut cx = self.scaling.backward().unwrap();
        for &number in of.iter().filter(|_| !skips[self.group.rank()]) {
            let kept = &self.kept[number];
            if recompute {
                replay(&mut cx, kept, &self.model);
            }
            for (_, run, origin, _) in &kept.runs {
                let slot = cx.slot(origin, &self.model.0[run.slot][1]).unwrap();
                expect_scale(&quantize(&gradient(run), &slot), own_scales.next().unwrap(), "gradient");
            }
        }
        let result = leave(cx, ending, own_fault);
        match (ending, fault) {
            (Ending::Discard, _) => {
                result.unwrap();
                Ok(())
            }
            (Ending::Commit, _) => {
                result.unwrap();
                self.naive.commit(&recipes, 1, &staged);
                self.is_answered = true;
                Ok(())
            }
            (_, Some((fault, by))) => self.end(result, fault, by, "backward", &recipes, true),
            (_, None) => Ok(()),
        }
    }

    /// After a fault: the state is that before the scope, and this rank is told why. `recipes` are those that the others'
    /// commit reduces, which a scope that reduces nothing learns at the next collective.
    fn end(
        &self,
        result: fp8_recipe::Result<()>,
        fault: Fault,
        by: usize,
        pass: &str,
        recipes: &[usize],
        records: bool,
    ) -> Outcome {
        let is_own = by == self.group.rank();
        if !is_own && !recipes.is_empty() {
            assert!(result.is_err(), "{fault:?}: this rank committed alone");
        }
        if !(is_own && fault == Fault::Strays) {
            self.compare(&format!("after {fault:?} of rank {by} in {pass}"));
        }
        let told = self.group.barrier();
        // A forward scope that records nothing keeps nobody waiting.
        let is_poisoned = records || fault == Fault::Leaves || fault == Fault::Discards;
        if let Ok(()) = told {
            assert!(!is_poisoned || fault == Fault::Discards, "{fault:?} of rank {by} was not told");
            return Ok(());
        }
        let failure = match told.unwrap_err() {
            Error::Failed { failure, .. } | Error::Poisoned { failure, .. } => failure,
            other => unreachable!("{other}"),
        };
        let reason = |reason: String| Failure::GaveUp { rank: by, reason };
        match fault {
            Fault::Drops => assert_eq!(failure, reason(format!("left a {pass} scope without commit"))),
            Fault::Fails => assert_eq!(failure, reason(format!("in a {pass} scope: out of tokens"))),
            Fault::Panics => assert_eq!(failure, reason(format!("panicked in a {pass} scope"))),
            Fault::Leaves => assert_eq!(failure, Failure::Left { ranks: vec![by] }),
            Fault::Discards | Fault::Strays => {
                assert!(matches!(failure, Failure::Disagree { .. } | Failure::Names { .. }), "{failure}");
            }
        }
        Err(Some(failure))
    }
}

/// The operations that the forward and the backward guard have in common.
trait Guard {
    fn commit(self) -> fp8_recipe::Result<()>;
    fn discard(self) -> fp8_recipe::Result<()>;
    fn fail(self);
}

macro_rules! guards {
    ($($guard:ident),+) => {$(
        impl Guard for $guard<'_> {
            fn commit(self) -> fp8_recipe::Result<()> {
                self.commit()
            }

            fn discard(self) -> fp8_recipe::Result<()> {
                self.discard()
            }

            fn fail(mut self) {
                self.attempt(|_| Err::<(), _>("out of tokens")).unwrap_err();
            }
        }
    )+};
}

guards!(Forward, Backward);

/// Ends a scope as the plan says, or with this rank's fault.
fn leave(guard: impl Guard, ending: Ending, fault: Option<Fault>) -> fp8_recipe::Result<()> {
    match (ending, fault) {
        (Ending::Discard, _) | (_, Some(Fault::Discards)) => return guard.discard(),
        (_, Some(Fault::Drops)) => drop(guard),
        (_, Some(Fault::Fails)) => guard.fail(),
        (_, Some(Fault::Panics)) => {
            let panics = AssertUnwindSafe(|| {
                let _guard = guard;
                resume_unwind(Box::new("a broken layer"))
            });
            catch_unwind(panics).unwrap_err();
        }
        _ => return guard.commit(),
    }
    Ok(())
}

/// Quantizes what a rank runs in a frame and the frames nested in it.
fn run_frames(
    cx: &mut Forward<'_>,
    tree: &Tree,
    rank: usize,
    model: &Model,
    scales: &mut impl Iterator<Item = Option<f32>>,
    runs: &mut Vec<(Frame, Run, Origin, Option<f32>)>,
) {
    for run in &tree.runs[rank] {
        let name = &model.0[run.slot][0];
        let (operand, scale) = (quantize(run, &cx.slot(name).unwrap()), scales.next().unwrap());
        expect_scale(&operand, scale, "activation");
        runs.push((tree.frame, *run, cx.origin(name), scale));
    }
    for nested in &tree.nested {
        let (recipe, options) = frame_of(nested.frame);
        run_frames(&mut cx.nested_scope(&recipe, &options).unwrap(), nested, rank, model, scales, runs);
    }
}

/// Runs in the order of `run_frames`.
fn flatten(tree: &Tree, rank: usize, runs: &mut Vec<(Frame, Run)>) {
    runs.extend(tree.runs[rank].iter().map(|run| (tree.frame, *run)));
    tree.nested.iter().for_each(|nested| flatten(nested, rank, runs));
}

fn gradient(run: &Run) -> Run {
    Run { slot: run.slot, value: run.value / 8.0 }
}

/// Repeats the runs of the outermost frame with their first scales, like a layer that recomputes its activations.
fn replay(cx: &mut Backward<'_>, kept: &Kept, model: &Model) {
    let Some((outermost, snapshot)) = &kept.snapshot else { return };
    let mut again = cx.replay(snapshot).unwrap();
    let Frame::Delayed(_) = outermost else { return };
    let runs = || kept.runs.iter().filter(|(frame, ..)| frame == outermost);
    for (_, run, ..) in runs() {
        // A slot that says nothing at first and is calibrated later in the scope is replayed with the later scale.
        let scale =
            runs().filter(|(_, other, ..)| other.slot == run.slot).filter_map(|run| run.3).next_back();
        let operand = quantize(run, &again.slot(&model.0[run.slot][0]).unwrap());
        expect_scale(&operand, scale, "recomputed activation");
    }
}

#[test]
fn a_thousand_random_interleavings_end_as_a_naive_model_says() {
    let [mut finished, mut failed] = [0; 2];
    for seed in 0..CASES {
        let plan = Draw::new(seed).plan();
        let started = Instant::now();
        let outcomes = try_ranks(plan.ranks, DEADLINE, |group| {
            let model = Model::new();
            let mut scaling = Scaling::new(&model, &fp8_kernels::Device::cpu()).unwrap();
            scaling.set_group(group.clone());
            let pace = Draw::new(seed * 100 + group.rank() as u64);
            let (naive, kept, awaiting) = Default::default();
            Rank { plan: &plan, group, model, scaling, naive, kept, awaiting, is_answered: false, pace }.go()
        });
        assert!(started.elapsed() < PATIENCE, "seed {seed}: a rank waited in vain: {plan:?}");
        let outcomes: Vec<Outcome> = outcomes
            .into_iter()
            .map(|outcome| outcome.unwrap_or_else(|_| panic!("seed {seed}: {plan:?}")))
            .collect();
        let failures: Vec<_> =
            outcomes.iter().filter_map(|outcome| outcome.clone().err().flatten()).collect();
        assert!(failures.iter().all(|failure| *failure == failures[0]), "seed {seed}: {failures:?}");
        match failures.is_empty() {
            true => finished += 1,
            false => failed += 1,
        }
    }
    assert!(finished > CASES / 4 && failed > CASES / 4, "{finished} finished, {failed} failed");
}
