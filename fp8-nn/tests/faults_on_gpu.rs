//! Calls into the driver, NVRTC and cuBLASLt that a training step makes on a GPU, failing once each.
//!
//! A step of a small model under delayed scaling is surveyed undisturbed: which functions it calls and how often, what the
//! loss is, and what a checkpoint holds after each of its stages. Then calls fail in turn: the first, the middle and the
//! last of each function, all of those that are called up to six times. The error is typed and names what failed; what
//! lasts (parameters, moments, f32 copies, scales, histories, counts) is, bit for bit, what it was before the stage that
//! failed; a checkpoint is whole or the old one is; the training goes on from it with the bits of one that was never
//! disturbed; and nothing is left when all is dropped. Where the optimizer was interrupted the device says so to every
//! call.
#![expect(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "a test fails by panicking")]

use fp8_cuda_sim::{Control, library_path};
use fp8_nn::fp8_kernels::{CudaAllocator, CudaOptions, Error as Kernels, Graph};
use fp8_nn::fp8_recipe::Error as Recipes;
use fp8_nn::prelude::*;
use fp8_nn::rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tempfile::TempDir;

static TURN: Mutex<()> = Mutex::new(());

/// The right to use the simulated driver.
struct Rig {
    control: Control,
    folder: TempDir,
    _turn: MutexGuard<'static, ()>,
}

impl Rig {
    fn new() -> Self {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let control = Control::open(&library_path().unwrap()).unwrap();
        for key in ["clear_fail", "reset", "reset_calls"] {
            control.set(key, "").unwrap();
        }
        Self { control, folder: tempfile::tempdir().unwrap(), _turn: turn }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Each with a stream of its own; no kernel is cached, so that every device compiles.
    fn open(&self) -> Device {
        let options = CudaOptions {
            library: library_path(),
            cache_dir: Some("/proc/nowhere".into()),
            allocator: Some(CudaAllocator::Caching),
            ..CudaOptions::default()
        };
        Device::cuda_with(&options).unwrap()
    }

    fn fail(&self, (function, count, code): (&str, u64, i32)) {
        self.control.set("clear_fail", "").unwrap();
        self.control.fail(function, count, code).unwrap();
    }

    /// Everything was dropped: what is left, a line each.
    fn left(&self) -> Vec<String> {
        self.control.set("clear_fail", "").unwrap();
        let live = self.control.live();
        assert_eq!(self.control.reports(), "");
        self.control.reset().unwrap();
        live.lines().map(str::to_owned).collect()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Forward,
    Backward,
    Clip,
    Optimize,
    Clear,
    Read,
}

struct Training {
    device: Device,
    model: Gpt,
    optimizer: AdamW,
    scaling: Scaling,
    recipe: Recipe,
    ids: Tensor,
    stage: Stage,
}

impl Training {
    fn new(device: Device) -> Self {
        let options = GptOptions {
            vocab_size: 16,
            num_layers: 1,
            hidden_size: 16,
            ffn_hidden_size: Some(16),
            num_attention_heads: 1,
            max_seq_length: 16,
            params_dtype: DType::BF16,
            init_std: 0.1,
            ..GptOptions::default()
        };
        let model = Gpt::new("gpt", &options, &device, &mut ChaCha8Rng::seed_from_u64(7)).unwrap();
        let scaling = Scaling::new(&model, &device).unwrap();
        let optimizer = AdamW::new(AdamWOptions::default()).unwrap();
        let recipe = DelayedScaling { amax_history_len: 4, ..DelayedScaling::default() }.into();
        let ids = Tensor::from_vec::<i32>((0..16).collect(), [1, 16], &device).unwrap();
        Self { device, model, optimizer, scaling, recipe, ids, stage: Stage::Forward }
    }

    /// With plans, kernels, moments and scales made.
    fn warm(device: Device) -> Self {
        let mut training = Self::new(device);
        for _ in 0..2 {
            training.step().unwrap();
        }
        training
    }

    fn queue(&mut self) -> Result<Tensor> {
        self.queue_until(&mut |_| Ok(()))
    }

    /// `before` sees each stage but the first.
    fn queue_until(&mut self, before: &mut dyn FnMut(&mut Self) -> Result<()>) -> Result<Tensor> {
        self.stage = Stage::Forward;
        let mut cx = self.scaling.autocast(&self.recipe)?;
        let (loss, saved) = self.model.loss(&mut cx, &self.ids, &self.ids)?;
        cx.commit()?;
        self.stage = Stage::Backward;
        before(self)?;
        let mut cx = self.scaling.backward()?;
        self.model.loss_backward(&mut cx, saved)?;
        cx.commit()?;
        self.stage = Stage::Clip;
        before(self)?;
        clip_grad_norm(&mut self.model, 1.0)?;
        self.stage = Stage::Optimize;
        before(self)?;
        self.optimizer.step(&mut self.model, 1e-2)?;
        self.stage = Stage::Clear;
        before(self)?;
        zero_grad(&mut self.model)?;
        Ok(loss)
    }

    fn step(&mut self) -> Result<u32> {
        let loss = self.queue()?;
        self.stage = Stage::Read;
        Ok(loss.item()?.to_bits())
    }

    /// All that lasts, as a checkpoint's bytes.
    fn bytes(&self, folder: &Path) -> Vec<u8> {
        let folder = folder.join("state");
        checkpoint::save(&folder, &self.model, &self.optimizer, &self.scaling, &BTreeMap::new()).unwrap();
        std::fs::read(checkpoint::path(&folder)).unwrap()
    }

    fn save(&self, folder: &Path) -> Result<()> {
        checkpoint::save(folder, &self.model, &self.optimizer, &self.scaling, &BTreeMap::new())
    }

    /// As after the warm-up.
    fn restore(&mut self, folder: &Path) {
        checkpoint::load(folder, &mut self.model, &mut self.optimizer, &mut self.scaling).unwrap();
        zero_grad(&mut self.model).unwrap();
        self.device.synchronize().unwrap();
    }

    fn is_poisoned(&self) -> bool {
        matches!(self.device.synchronize(), Err(Kernels::Poisoned { .. }))
    }
}

/// What the function answers with when it fails.
fn code(function: &str) -> i32 {
    match function {
        "cuMemAllocAsync" | "cuMemHostAlloc" | "cuModuleLoadData" | "cuStreamCreate" => 2,
        "cuLaunchKernel" => 701,
        "cuStreamEndCapture" => 901,
        "nvrtcCreateProgram" => 1,
        "cublasLtCreate" => 3,
        function if function.starts_with("nvrtc") => 11,
        function if function.starts_with("cublas") => 14,
        _ => 999,
    }
}

/// That the error says what failed.
fn expect_typed(error: &Error, function: &str, code: i32) {
    let kernels = match error {
        Error::Kernels(kernels) | Error::Recipe(Recipes::Kernels(kernels)) => kernels,
        other => panic!("{function} failed with {code}: {other:?}"),
    };
    let text = error.to_string();
    let right = match kernels {
        Kernels::OutOfMemory { total, .. } => code == 2 && *total > 0,
        Kernels::Driver { code: found, call, .. } => {
            // cudarc asks for the current context on the way to other calls.
            *found == code as u32 && (function == "cuCtxGetCurrent" || function.starts_with(call))
        }
        Kernels::Compile { log, .. } => log.contains(function),
        Kernels::Gemm { code: found, call, .. } => *found == code && *call == function,
        _ => false,
    };
    assert!(right && text.len() > 20, "{function} failed with {code}: {text}: {kernels:?}");
}

/// What gives something back: its failure loses that, and is nobody's error.
fn is_release(function: &str) -> bool {
    ["Destroy", "cuMemFree", "cuModuleUnload"].iter().any(|part| function.contains(part))
}

/// What may fail unnoticed: memory is asked for twice, uploads do without pinned memory, what the host would learn of
/// scales it learns later, the compiler's version only names its cache, contexts are set without being asked for.
fn is_dispensable(function: &str) -> bool {
    let names = [
        "cuCtxGetCurrent",
        "cuEventCreate",
        "cuEventQuery",
        "cuEventRecord",
        "cuMemAllocAsync",
        "cuMemHostAlloc",
        "cuMemcpyDtoHAsync_v2",
        "nvrtcVersion",
    ];
    names.contains(&function)
}

/// Which calls fail: the first, the middle and the last of each function; each of those that are few.
fn faults(calls: &BTreeMap<String, u64>) -> Vec<(&str, u64, i32)> {
    let mut all = Vec::new();
    for (function, &count) in calls {
        let chosen = if count <= 6 { (1..=count).collect() } else { vec![1, count.div_ceil(2), count] };
        all.extend(chosen.into_iter().map(|count| (function.as_str(), count, code(function))));
    }
    all
}

/// A poisoned device says so to all, and a checkpoint of it leaves the old file.
fn expect_useless(training: &mut Training, folder: &Path, old: &[u8]) {
    let steps = training.optimizer.steps();
    let mut results = vec![training.step().map(drop), training.save(folder)];
    results.push(zero_grad(&mut training.model));
    results.push(training.device.capture(|| Ok::<_, Error>(())).map(drop));
    for result in results {
        let text = result.unwrap_err().to_string();
        assert!(text.contains("start the process again") || text.contains("poisoned"), "{text}");
    }
    assert_eq!(training.optimizer.steps(), steps);
    assert!(std::fs::read(checkpoint::path(folder)).unwrap() == old, "the old checkpoint");
}

/// An undisturbed step.
struct Survey {
    calls: BTreeMap<String, u64>,
    loss: u32,
    /// What lasts, before each stage.
    states: BTreeMap<Stage, Vec<u8>>,
}

fn survey(rig: &Rig, training: &mut Training) -> Survey {
    training.save(rig.path()).unwrap();
    training.restore(rig.path());
    rig.control.set("reset_calls", "").unwrap();
    let loss = training.step().unwrap();
    let calls = rig.control.calls();
    training.restore(rig.path());
    let mut states = BTreeMap::from([(Stage::Forward, training.bytes(rig.path()))]);
    let mut before = |training: &mut Training| {
        states.insert(training.stage, training.bytes(rig.path()));
        Ok(())
    };
    assert_eq!(training.queue_until(&mut before).unwrap().item().unwrap().to_bits(), loss);
    states.insert(Stage::Read, training.bytes(rig.path()));
    assert_ne!(states[&Stage::Forward], states[&Stage::Backward]);
    assert_ne!(states[&Stage::Backward], states[&Stage::Clip]);
    assert_eq!(states[&Stage::Clip], states[&Stage::Optimize]);
    assert_ne!(states[&Stage::Optimize], states[&Stage::Clear]);
    Survey { calls, loss, states }
}

#[test]
fn any_call_of_a_step_may_fail() {
    let rig = Rig::new();
    let mut training = Training::warm(rig.open());
    let survey = survey(&rig, &mut training);
    let old = std::fs::read(checkpoint::path(rig.path())).unwrap();
    let faults = faults(&survey.calls);
    let mut poisoned = 0;
    for fault @ (function, count, code) in &faults {
        let place = format!("call {count} of {function}");
        training.restore(rig.path());
        rig.fail(*fault);
        let result = training.step();
        rig.control.set("clear_fail", "").unwrap();
        match result {
            Ok(loss) => {
                assert!(is_dispensable(function), "{place} failed unnoticed");
                assert_eq!(loss, survey.loss, "{place}");
            }
            Err(error) => expect_typed(&error, function, *code),
        }
        if training.is_poisoned() {
            assert_eq!((*function, training.stage), ("cuLaunchKernel", Stage::Optimize), "{place}");
            expect_useless(&mut training, rig.path(), &old);
            drop(training);
            assert_eq!(rig.left(), [""; 0], "{place}");
            poisoned += 1;
            training = Training::warm(rig.open());
        } else {
            let found = training.bytes(rig.path());
            assert!(found == survey.states[&training.stage], "{place}, in {:?}: what lasts", training.stage);
        }
        // Another call of the same function tells nothing new.
        if *count == 1 {
            training.restore(rig.path());
            assert_eq!(training.step().unwrap(), survey.loss, "after {place}");
        }
    }
    println!("{} faults, {poisoned} in the optimizer's launches", faults.len());
    assert!(faults.len() > 20 && poisoned <= 2);
    drop(training);
    assert_eq!(rig.left(), [""; 0]);
}

#[test]
fn any_call_of_a_first_step_may_fail() {
    let rig = Rig::new();
    let state = |training: &Training| {
        let mut parameters = Vec::new();
        let visit = training.model.visit(&mut |parameter| {
            parameters.push(parameter.tensor().to_f32_vec()?);
            Ok(())
        });
        visit.unwrap();
        (parameters, training.scaling.state().unwrap(), training.optimizer.steps())
    };
    // Which calls a step makes later is known: those are left to the test above.
    let mut training = Training::new(rig.open());
    let before = state(&training);
    rig.control.set("reset_calls", "").unwrap();
    let loss = training.step().unwrap();
    let mut calls = rig.control.calls();
    rig.control.set("reset_calls", "").unwrap();
    training.step().unwrap();
    training.step().unwrap();
    let later = rig.control.calls();
    let only_later = |function: &String| later.contains_key(function) && *function != "cuMemAllocAsync";
    calls.retain(|function, _| !only_later(function));
    drop(training);
    assert_eq!(rig.left(), [""; 0]);

    let ends = |(function, count): (&String, &u64)| [(function.clone(), 1), (function.clone(), *count)];
    let mut all: Vec<(String, u64)> = calls.iter().flat_map(ends).collect();
    all.dedup();
    for (function, count) in &all {
        let place = format!("call {count} of {function}");
        let mut training = Training::new(rig.open());
        rig.fail((function, *count, code(function)));
        let result = training.step();
        rig.control.set("clear_fail", "").unwrap();
        match result {
            Ok(found) => {
                assert!(is_dispensable(function) || is_release(function), "{place} failed unnoticed");
                assert_eq!(found, loss, "{place}");
            }
            Err(error) => {
                expect_typed(&error, function, code(function));
                assert!(!is_release(function), "{place}: {error}");
                let after = state(&training);
                assert_eq!((after.2, training.optimizer.steps()), (0, 0), "{place}");
                assert!(after.0 == before.0, "{place}: parameters");
                training.save(rig.path()).unwrap();
                if training.stage == Stage::Forward {
                    // A first scale that was found is provisional until the scope's end.
                    let arenas = after.1.arenas.iter().flat_map(|arena| &arena.scale);
                    assert!(
                        arenas.clone().all(|scale| scale.is_nan() || *scale == 0.0 || *scale < 0.0),
                        "{place}"
                    );
                    if *count == 1 {
                        assert_eq!(training.step().unwrap(), loss, "after {place}");
                    }
                }
            }
        }
        drop(training);
        let left = rig.left();
        assert!(left.len() <= usize::from(is_release(function)), "{place}: {left:?}");
    }
    println!("{} faults", all.len());
    assert!(all.len() > 20);
}

/// What of a recorded step has been done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Done {
    Nothing,
    Recorded,
    Read,
    Replayed,
    ReadAgain,
    Dropped,
}

/// Records a step, replays it, and reads both losses.
fn record(training: &mut Training, done: &mut Done) -> Result<[u32; 2]> {
    *done = Done::Nothing;
    let device = training.device.clone();
    let (graph, loss): (Graph, Tensor) = device.capture(|| training.queue())?;
    *done = Done::Recorded;
    let first = loss.item()?.to_bits();
    *done = Done::Read;
    graph.replay()?;
    *done = Done::Replayed;
    let second = loss.item()?.to_bits();
    *done = Done::ReadAgain;
    drop(graph);
    *done = Done::Dropped;
    Ok([first, second])
}

#[test]
fn any_call_of_a_recording_and_its_replay_may_fail() {
    let rig = Rig::new();
    let mut training = Training::warm(rig.open());
    training.save(rig.path()).unwrap();
    let mut done = Done::Nothing;
    // Once before: the second stream is made, and memory that a graph holds comes back.
    training.restore(rig.path());
    record(&mut training, &mut done).unwrap();
    training.restore(rig.path());
    let before = training.bytes(rig.path());
    rig.control.set("reset_calls", "").unwrap();
    let losses = record(&mut training, &mut done).unwrap();
    let calls = rig.control.calls();
    let twice = training.bytes(rig.path());
    training.restore(rig.path());
    assert_eq!(training.step().unwrap(), losses[0], "an eager step's loss");
    let once = training.bytes(rig.path());

    let all = faults(&calls);
    for fault @ (function, count, code) in &all {
        let place = format!("call {count} of {function}");
        training.restore(rig.path());
        rig.fail(*fault);
        let result = record(&mut training, &mut done);
        rig.control.set("clear_fail", "").unwrap();
        match result {
            Ok(found) => {
                // The graph's own end waits for its last launch.
                let ends = *function == "cuStreamSynchronize" && *count == calls[*function];
                let may_pass = ends || is_dispensable(function) || is_release(function);
                assert!(may_pass, "{place} failed unnoticed");
                assert_eq!(found, losses, "{place}");
            }
            Err(error) => {
                expect_typed(&error, function, *code);
                assert!(!is_release(function), "{place}: {error}");
            }
        }
        if is_release(function) {
            drop(training);
            let left = rig.left();
            assert!(left.len() <= 1, "{place}: {left:?}");
            training = Training::warm(rig.open());
        } else {
            let expected = match done {
                Done::Nothing => &before,
                Done::Recorded | Done::Read => &once,
                Done::Replayed | Done::ReadAgain | Done::Dropped => &twice,
            };
            assert!(training.bytes(rig.path()) == *expected, "{place}, {done:?}: what lasts");
            if *count == 1 {
                training.restore(rig.path());
                assert_eq!(record(&mut training, &mut done).unwrap(), losses, "after {place}");
            }
        }
    }
    println!("{} faults", all.len());
    assert!(all.len() > 30);
    drop(training);
    assert_eq!(rig.left(), [""; 0]);
}

#[test]
fn a_device_that_died_says_so_to_all() {
    let rig = Rig::new();
    // An illegal address, a launch failure; a product that met an error of the device.
    let faults = [
        ("cuLaunchKernel", 40, 700),
        ("cuMemsetD8Async", 3, 719),
        ("cuMemcpyHtoDAsync_v2", 1, 700),
        ("cuStreamSynchronize", 1, 719),
        ("cublasLtMatmul", 7, 13),
        ("cuGraphLaunch", 1, 700),
        ("cuStreamEndCapture", 1, 719),
    ];
    for fault @ (function, ..) in faults {
        let mut training = Training::warm(rig.open());
        training.save(rig.path()).unwrap();
        let old = std::fs::read(checkpoint::path(rig.path())).unwrap();
        let steps = training.optimizer.steps();
        rig.fail(fault);
        let records = function.contains("Graph") || function.contains("Capture");
        let result = match records {
            true => record(&mut training, &mut Done::Nothing).map(drop),
            false => training.step().map(drop),
        };
        expect_typed(&result.unwrap_err(), function, fault.2);
        // What fails behind the optimizer's step does not take it back.
        let counted = u64::from(training.stage > Stage::Optimize && !records);
        assert_eq!(training.optimizer.steps(), steps + counted, "{function}");
        assert!(training.is_poisoned(), "{function}");
        expect_useless(&mut training, rig.path(), &old);
        drop(training);
        assert_eq!(rig.left(), [""; 0], "{function}");
    }
}
