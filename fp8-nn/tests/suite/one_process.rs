//! Compares ranks that train on parts of a batch with one process that trains on the whole batch. The ranks are threads, or
//! processes over TCP.
//!
//! In high precision only the order of sums differs. Under delayed scaling each rank takes the first scales from its own
//! tensors (no collective), so losses differ from the first step on, unless the scales are given: by `calibrate_first_step:
//! false`, or by loaded state. From the first commit on, scales are equal on all ranks, bit for bit.

#![expect(clippy::print_stdout, reason = "how a child answers")]

use crate::every_device::support::{device, gpt, ids, off, short};
use fp8_nn::fp8_dist::{Environment, local, tcp};
use fp8_nn::fp8_recipe::ScalingState;
use fp8_nn::prelude::*;
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

type Group = Arc<dyn ProcessGroup>;

const BATCH: usize = 8;
const SEQ: usize = 8;
const STEPS: u64 = 20;
/// A difference in one FP8 code grows with the rate: at 3e-3 losses differ by up to 2e-3 after 20 steps.
const RATE: f32 = 1e-3;
const DEADLINE: Duration = Duration::from_secs(60);

/// The values that are compared, each as bits.
#[derive(Debug, Clone, PartialEq, Default)]
struct Run {
    /// The global loss of each step.
    losses: Vec<u32>,
    /// Forward scales after the first commit.
    first_scales: Vec<u32>,
    /// All scales after the first step.
    scales: Vec<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Case {
    HighPrecision,
    Calibrated,
    Uncalibrated,
    Loaded,
}

const CASES: [Case; 4] = [Case::HighPrecision, Case::Calibrated, Case::Uncalibrated, Case::Loaded];

impl Case {
    fn recipe(self) -> Recipe {
        DelayedScaling { calibrate_first_step: self != Self::Uncalibrated, ..short() }.into()
    }

    fn options(self) -> AutocastOptions {
        if self == Self::HighPrecision { off() } else { AutocastOptions::default() }
    }
}

fn scales(scaling: &Scaling) -> Vec<u32> {
    scaling
        .state()
        .unwrap()
        .arenas
        .iter()
        .flat_map(|arena| &arena.scale)
        .map(|scale| scale.to_bits())
        .collect()
}

/// The parts of a batch that belong to this rank.
fn shard(t: &Tensor, rank: usize, world_size: usize) -> Tensor {
    let rows = BATCH / world_size;
    let part = t.to_vec::<i32>().unwrap()[rank * rows * SEQ..][..rows * SEQ].to_vec();
    Tensor::from_vec(part, [rows, SEQ], &device()).unwrap()
}

fn train(
    group: Option<&Group>,
    case: Case,
    loaded: Option<&ScalingState>,
    steps: u64,
    seed: u64,
) -> (Run, Scaling) {
    let (rank, world_size) = group.map_or((0, 1), |group| (group.rank(), group.world_size()));
    let mut model = gpt(seed + rank as u64);
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    if let Some(group) = group {
        broadcast_parameters(&mut model, &**group).unwrap();
        scaling.set_group(group.clone());
    }
    loaded.map(|state| scaling.load_state(state).unwrap());
    // Of rank 0's values, which `broadcast_parameters` has sent to all.
    let options = GradientsOptions { bucket_bytes: Some(10_000), ..Default::default() };
    let mut gradients = group.map(|group| Gradients::new(&model, group.clone(), options).unwrap());
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    let mut run = Run::default();
    for step in 0..steps {
        let part =
            |part: u64| shard(&ids([BATCH, SEQ], 20, 100 * (seed - 1) + part + step), rank, world_size);
        let [x, targets] = [0, 50].map(part);
        let normalizer = Some((BATCH * SEQ) as f32);
        let cross_entropy = ops::CrossEntropyOptions { normalizer, ..Default::default() };
        let mut cx = scaling.scope(&case.recipe(), &case.options()).unwrap();
        let (mut loss, saved) =
            model.loss_with_info(&mut cx, &x, &targets, cross_entropy, &SequenceInfo::default()).unwrap();
        cx.commit().unwrap();
        if step == 0 {
            run.first_scales = scales(&scaling);
        }
        let mut cx = scaling.backward().unwrap();
        if let Some(gradients) = &mut gradients {
            gradients.watch(&mut cx, &mut model).unwrap();
        }
        model.loss_backward(&mut cx, saved).unwrap();
        cx.commit().unwrap();
        if step == 0 {
            run.scales = scales(&scaling);
        }
        if let (Some(group), Some(gradients)) = (group, &mut gradients) {
            gradients.finish(&mut model).unwrap();
            loss = group.all_reduce("loss", &loss, ReduceOp::Sum).unwrap();
        }
        run.losses.push(loss.item().unwrap().to_bits());
        let norm = clip_grad_norm(&mut model, 1.0).unwrap();
        optimizer.step_with_norm(&mut model, RATE, &norm).unwrap();
        zero_grad(&mut model).unwrap();
    }
    if let Some(group) = group {
        agree(&model, &optimizer, &scaling, &**group).unwrap();
    }
    (run, scaling)
}

/// Scales as after one step of one process.
fn state_to_load() -> ScalingState {
    train(None, Case::Calibrated, None, 1, 1).1.state().unwrap()
}

fn run(group: Option<&Group>, case: Case) -> Run {
    let state = state_to_load();
    train(group, case, (case == Case::Loaded).then_some(&state), STEPS, 1).0
}

fn relative(a: u32, b: u32) -> f32 {
    let [a, b] = [a, b].map(f32::from_bits);
    ((a - b) / b).abs()
}

/// Checks that the ranks agree with each other and, within the bounds of the case, with one process.
fn check(case: Case, alone: &Run, ranks: &[Run]) {
    assert!(ranks.iter().all(|rank| *rank == ranks[0]), "{case:?}: losses or scales differ between ranks");
    assert_eq!(ranks[0].first_scales.is_empty(), case == Case::HighPrecision);
    let differences: Vec<f32> =
        ranks[0].losses.iter().zip(&alone.losses).map(|(&rank, &alone)| relative(rank, alone)).collect();
    let (first, later) = match case {
        Case::HighPrecision => (1e-6, 1e-6),
        // Of one seed; the median of several is less.
        Case::Calibrated => (2e-2, 2e-2),
        Case::Uncalibrated | Case::Loaded => (1e-5, 1e-3),
    };
    for (step, &difference) in differences.iter().enumerate() {
        let bound = if step == 0 { first } else { later };
        assert!(difference <= bound, "{case:?}, step {step}: losses differ by {difference:e}");
    }
    if matches!(case, Case::Uncalibrated | Case::Loaded) {
        for (&rank, &alone) in ranks[0].scales.iter().zip(&alone.scales) {
            assert!(relative(rank, alone) <= 1e-5, "{case:?}: scales {rank:#x} and {alone:#x}");
        }
    }
}

#[test]
fn threads_come_as_near_to_one_process_as_is_promised() {
    for case in CASES {
        let alone = run(None, case);
        for world_size in [2, 4] {
            let groups = local("dp", world_size, DEADLINE).unwrap();
            let ranks: Vec<Run> = thread::scope(|scope| {
                let start = |group| scope.spawn(move || run(Some(&group), case));
                let threads: Vec<_> = groups.into_iter().map(start).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            check(case, &alone, &ranks);
        }
    }
}

#[test]
fn with_first_scales_of_their_own_ranks_are_within_a_percent_in_the_median_of_seeds() {
    let case = Case::Calibrated;
    let largest = |seed: u64| {
        let alone = train(None, case, None, STEPS, seed).0;
        let groups = local("dp", 2, DEADLINE).unwrap();
        let ranks: Vec<Run> = thread::scope(|scope| {
            let start = |group| scope.spawn(move || train(Some(&group), case, None, STEPS, seed).0);
            let threads: Vec<_> = groups.into_iter().map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(ranks[0] == ranks[1], "seed {seed}: ranks differ");
        let differences =
            ranks[0].losses.iter().zip(&alone.losses).map(|(&rank, &alone)| relative(rank, alone));
        differences.fold(0.0, f32::max)
    };
    let mut all: Vec<f32> = (1..6).map(largest).collect();
    all.sort_by(f32::total_cmp);
    assert!(all[2] <= 1e-2, "{all:?}");
}

/// By default the first losses are not those of one process, hence the exception.
#[test]
fn first_scales_are_each_ranks_own() {
    let scales_of = |rank| {
        let model = gpt(1);
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let mut cx = scaling.autocast(&Case::Calibrated.recipe()).unwrap();
        model.forward(&mut cx, &shard(&ids([BATCH, SEQ], 20, 0), rank, 2)).unwrap();
        cx.commit().unwrap();
        scales(&scaling)
    };
    assert_ne!(scales_of(0), scales_of(1));
}

const MARK: &str = "FP8_NN_TEST_CHILD";
const ANSWER: &str = "answer ";

#[test]
fn a_worker() {
    if std::env::var_os(MARK).is_none() {
        return;
    }
    let group = tcp("dp", &Environment::read().unwrap(), DEADLINE).unwrap();
    for case in CASES {
        let Run { losses, first_scales, scales } = run(Some(&group), case);
        println!("{ANSWER}{}", serde_json::to_string(&[losses, first_scales, scales]).unwrap());
    }
}

#[test]
fn processes_come_as_near_to_one_process_as_is_promised() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "one_process::a_worker", "--nocapture", "--test-threads=1"]).env(MARK, "1");
        let numbers = [("RANK", rank), ("WORLD_SIZE", 2), ("LOCAL_RANK", rank), ("MASTER_PORT", port.into())];
        command.envs(numbers.map(|(name, value)| (name, value.to_string()))).env("MASTER_ADDR", "127.0.0.1");
        command.env_remove("FP8_PORT").env("TORCHELASTIC_RUN_ID", format!("fp8-nn-test-{port}"));
        command.stdout(Stdio::piped()).spawn().unwrap()
    };
    let children = [start(0), start(1)];
    let ranks = children.map(|child| {
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{text}");
        // The first answer follows what the test program says of the test, on one line.
        let runs = text.lines().filter_map(|line| {
            let [losses, first_scales, scales] = serde_json::from_str(line.split_once(ANSWER)?.1).unwrap();
            Some(Run { losses, first_scales, scales })
        });
        runs.collect::<Vec<_>>()
    });
    for (index, case) in CASES.into_iter().enumerate() {
        check(case, &run(None, case), &ranks.each_ref().map(|runs| runs[index].clone()));
    }
}
