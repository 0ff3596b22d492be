//! Every call into the driver and the compiler that a training step makes, failing once.
//!
//! A step on an undisturbed device counts the calls and says what is right. Then each call of each function fails in turn,
//! on a device of its own: the error is typed and comes from the stage that made the call, the state of delayed scaling is
//! as before that stage, the failed stage can be repeated and gives what it would have given, and nothing stays behind.

#![cfg(feature = "cuda")]
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]
#![expect(clippy::print_stdout, reason = "how many faults there were")]

mod cuda;

use cuda::step::{Outcome, Scaling, Step};
use cuda::{Rig, expect_poisoned};
use cudarc::driver::result;
use fp8_kernels::ops::{
    self, AdamWFactors, AdamWStep, AdamWTensor, AmaxRule, Moment, OptimizerTensor, ScaleUpdate, StepCheck,
    UpdateRule,
};
use fp8_kernels::{
    Arena, ArenaOptions, CudaAllocator, CudaOptions, DType, Device, Encoding, Error, Fp8Tensor, Operand,
    Scale, ScalePolicy, ScaleRule, Slot, Tensor, UNSET,
};
use std::collections::BTreeMap;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Open,
    Prepare,
    Quantize,
    Update,
    Optimize,
    Read,
    Drop,
}

/// Calls that give something back. Their failure is nobody's error: there is nothing left to do about it, and what was
/// to be given back is lost.
const RELEASES: [&str; 8] = [
    "cuDevicePrimaryCtxRelease_v2",
    "cuEventDestroy_v2",
    "cuMemFreeAsync",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuModuleUnload",
    "cuStreamDestroy_v2",
    "nvrtcDestroyProgram",
];

/// Calls whose failure costs time only: the cache is not used, uploads go through memory that is not pinned.
const DISPENSABLE: [&str; 2] = ["cuMemHostAlloc", "nvrtcVersion"];

/// Calls by which the host learns which scales are set, after an update: without that knowledge it takes the longer way.
const KNOWLEDGE: [&str; 5] =
    ["cuEventCreate", "cuEventQuery", "cuEventRecord", "cuMemHostAlloc", "cuMemcpyDtoHAsync_v2"];

/// Whether nobody may notice: it precedes every other call, releases too, or is asked once more for memory when all that
/// was kept has been given back.
fn may_pass(function: &str, allocator: CudaAllocator) -> bool {
    function == "cuCtxGetCurrent" || (function == "cuMemAllocAsync" && allocator == CudaAllocator::Caching)
}

/// An undisturbed step.
struct Survey {
    first_scale: f32,
    /// The number of calls of each function by the end of each stage.
    ends: Vec<(Stage, BTreeMap<String, u64>)>,
    /// Delayed scaling before each of its stages.
    prepared: Scaling,
    quantized: Scaling,
    updated: Scaling,
    parameters: Vec<u32>,
    outcome: Outcome,
}

impl Survey {
    fn new(rig: &Rig, options: &CudaOptions, first_scale: f32) -> Self {
        // What is read between the stages is read from a step of its own: reading is calls, too.
        let device = Device::cuda_with_options(options).unwrap();
        let mut step = Step::new(&device, first_scale).unwrap();
        let (prepared, parameters) = (step.scaling().unwrap(), step.parameters().unwrap());
        let x = step.quantize().unwrap();
        let quantized = step.scaling().unwrap();
        step.update().unwrap();
        let updated = step.scaling().unwrap();
        let weight = step.optimize().unwrap();
        let outcome = step.read(&x, &weight).unwrap();
        drop((x, weight, step, device));
        assert_ne!(prepared, quantized);
        assert_ne!(quantized, updated);

        rig.control.set("reset_calls", "").unwrap();
        let mut ends = Vec::new();
        let mut end = |stage| ends.push((stage, rig.control.calls()));
        let device = Device::cuda_with_options(options).unwrap();
        end(Stage::Open);
        let mut step = Step::new(&device, first_scale).unwrap();
        end(Stage::Prepare);
        let x = step.quantize().unwrap();
        end(Stage::Quantize);
        step.update().unwrap();
        end(Stage::Update);
        let weight = step.optimize().unwrap();
        end(Stage::Optimize);
        assert_eq!(step.read(&x, &weight).unwrap(), outcome);
        end(Stage::Read);
        drop((x, weight, step, device));
        end(Stage::Drop);
        Self { first_scale, ends, prepared, quantized, updated, parameters, outcome }
    }

    /// The calls of all stages.
    fn calls(&self) -> &BTreeMap<String, u64> {
        &self.ends.last().unwrap().1
    }

    /// Returns the stage that makes the `count`-th call of `function`.
    fn stage(&self, function: &str, count: u64) -> Stage {
        let reached = |calls: &BTreeMap<String, u64>| calls.get(function).is_some_and(|&all| all >= count);
        self.ends.iter().find(|(_, calls)| reached(calls)).unwrap().0
    }
}

/// The step with one call that fails, wherever that is; what failed, once all else was found to be right. `poisons`: in the
/// optimizer the device is of no use any more.
fn disturbed(options: &CudaOptions, survey: &Survey, poisons: bool) -> Option<(Stage, Error)> {
    let device = match Device::cuda_with_options(options) {
        Ok(device) => device,
        Err(error) => return Some((Stage::Open, error)),
    };
    let mut step = match Step::new(&device, survey.first_scale) {
        Ok(step) => step,
        Err(error) => {
            device.synchronize().unwrap();
            return Some((Stage::Prepare, error));
        }
    };
    let mut failed = None;
    let x: Operand = step.quantize().unwrap_or_else(|error| {
        failed = Some((Stage::Quantize, error));
        // A first scale may have been found before something failed. It is provisional until the scope's end.
        if survey.first_scale == UNSET {
            step.arena.roll_back().unwrap();
        }
        assert_eq!(step.scaling().unwrap(), survey.prepared);
        step.quantize().unwrap()
    });
    if let Err(error) = step.update() {
        failed = Some((Stage::Update, error));
        assert_eq!(step.scaling().unwrap(), survey.quantized);
        step.update().unwrap();
    }
    let weight: Fp8Tensor = match step.optimize() {
        Ok(weight) => weight,
        Err(error) if poisons => {
            expect_useless(&mut step);
            return Some((Stage::Optimize, error));
        }
        Err(error) => {
            failed = Some((Stage::Optimize, error));
            assert_eq!(step.scaling().unwrap(), survey.updated);
            assert_eq!(step.parameters().unwrap(), survey.parameters);
            step.optimize().unwrap()
        }
    };
    let outcome = step.read(&x, &weight).unwrap_or_else(|error| {
        failed = Some((Stage::Read, error));
        step.read(&x, &weight).unwrap()
    });
    assert_eq!(outcome, survey.outcome);
    failed
}

/// Every call on a device whose optimizer failed halfway says so.
fn expect_useless(step: &mut Step) {
    let reason = "adamw: parameters may be half updated";
    expect_poisoned(step.quantize(), reason);
    expect_poisoned(step.update(), reason);
    expect_poisoned(step.optimize(), reason);
    expect_poisoned(step.scaling(), reason);
    expect_poisoned(step.parameters(), reason);
    expect_poisoned(step.arena.roll_back(), reason);
    expect_poisoned(step.device.synchronize(), reason);
    expect_poisoned(Tensor::scalar(1.0, &step.device), reason);
}

/// Returns the code that the function fails with.
fn code(function: &str) -> i32 {
    match function {
        "cuMemAlloc_v2" | "cuMemAllocAsync" | "cuMemHostAlloc" | "cuModuleLoadData" => 2,
        "cuDevicePrimaryCtxRetain" | "cuStreamCreate" => 2,
        "cuLaunchKernel" => 701,
        "nvrtcCreateProgram" => 1,
        function if function.starts_with("nvrtc") => 11,
        _ => 999,
    }
}

/// That the error says what failed.
fn expect_typed(error: &Error, function: &str, code: i32) {
    let text = error.to_string();
    let right = match error {
        Error::OutOfMemory { total, .. } => function.starts_with("cuMemAlloc") && *total == 2 << 30,
        Error::Driver { code: found, text, .. } => *found == code as u32 && !text.is_empty(),
        Error::Compile { log, .. } => function.starts_with("nvrtc") && log.contains(function),
        _ => false,
    };
    assert!(right, "{function} failed with {code}: {text}: {error:?}");
}

/// Brings the driver to rest, and says what had been left.
fn settle(rig: &Rig) -> (usize, bool) {
    let live = rig.control.live();
    let left = live.lines().filter(|line| !line.starts_with("programs")).count();
    // The architecture can be set only while nobody holds the context.
    let held = rig.control.set("arch", "90").is_err();
    if held {
        // SAFETY: nobody uses the context any more.
        unsafe { result::primary_ctx::release(0) }.unwrap();
    }
    rig.control.set("clear_fail", "").unwrap();
    rig.control.reset().unwrap();
    (left, held)
}

/// Whether the context stays held when this call fails: its own release, and cudarc's question for memory pools, which it
/// asks between retaining the context and owning it.
fn keeps_context(function: &str, count: u64) -> bool {
    function == "cuDevicePrimaryCtxRelease_v2" || (function, count) == ("cuDeviceGetAttribute", 1)
}

/// Each call of each function but those in `without`; how many that were.
fn every_call_fails_once(first_scale: f32, allocator: CudaAllocator, without: &[&str]) -> usize {
    let rig = Rig::new();
    // A folder that cannot be: every device compiles its kernels.
    let options =
        CudaOptions { cache_dir: Some("/proc/nowhere".into()), allocator: Some(allocator), ..rig.options() };
    let survey = Survey::new(&rig, &options, first_scale);
    let mut calls = survey.calls().clone();
    calls.retain(|function, _| !without.contains(&function.as_str()));
    let mut faults = 0;
    for (function, &count) in &calls {
        for count in 1..=count {
            let place = format!("call {count} of {function}");
            let code = code(function);
            rig.control.fail(function, count, code).unwrap();
            let stage = survey.stage(function, count);
            let failed = disturbed(&options, &survey, function == "cuLaunchKernel");
            let release = RELEASES.contains(&function.as_str());
            let knowledge = KNOWLEDGE.contains(&function.as_str())
                && [Stage::Quantize, Stage::Update, Stage::Optimize].contains(&stage);
            let dispensable = knowledge || DISPENSABLE.contains(&function.as_str());
            let harmless = release || stage == Stage::Drop || dispensable;
            match &failed {
                None => {
                    let may_pass = harmless || may_pass(function, allocator);
                    assert!(may_pass, "{place}, in {stage:?}, failed unnoticed");
                }
                Some((found, error)) => {
                    assert!(!harmless, "{place}, in {stage:?}: {error}");
                    assert_eq!(*found, stage, "{place}: {error}");
                    expect_typed(error, function, code);
                }
            }
            let (left, held) = settle(&rig);
            assert!(left <= usize::from(release), "{place}, in {stage:?}: {left} things are left");
            assert_eq!(held, keeps_context(function, count), "{place}, in {stage:?}: the context");
            faults += 1;
        }
    }
    println!("{faults} faults in calls of {} functions", calls.len());
    faults
}

#[test]
fn every_call_of_a_step_may_fail() {
    let faults = every_call_fails_once(2.0, CudaAllocator::Exact, &[]);
    assert!(faults > 200, "{faults}");
}

#[test]
fn every_call_of_a_first_step_with_kept_memory_may_fail() {
    // What precedes and follows every other call is left to the test above.
    let without = ["cuCtxGetCurrent", "cuFuncGetParamInfo"];
    let faults = every_call_fails_once(UNSET, CudaAllocator::Caching, &without);
    assert!(faults > 100, "{faults}");
}

/// Three slots with something in their staging cells.
fn staged(device: &Device) -> Arena {
    let options = ArenaOptions { history_len: 3, ..ArenaOptions::default() };
    let arena = Arena::new(3, options, device).unwrap();
    arena.merge_staged(&[1.0, 2.0, f32::INFINITY]).unwrap();
    arena
}

fn state(arena: &Arena) -> (Vec<f32>, Vec<f32>, Vec<f32>, [Vec<u64>; 2]) {
    let counts = [arena.skipped_non_finite_all().unwrap(), arena.last_updates().unwrap()];
    (arena.scales().unwrap(), arena.history().unwrap(), arena.staged().unwrap(), counts)
}

#[test]
fn an_update_by_a_users_rule_is_done_or_not_or_the_device_is_poisoned() {
    let rig = Rig::new();
    let newest = |window: &[f32]| window.last().copied().unwrap_or(0.0);
    let rule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
    let amax = AmaxRule::Custom(&newest);
    let update = ScaleUpdate { amax, rule: &rule, interval: 1, record_non_finite: false };
    let device = rig.open();
    let mut arena = staged(&device);
    ops::update_scales(&mut arena, &update).unwrap();
    let updated = state(&arena);
    assert_eq!(updated.0, [448.0, 224.0, UNSET]);
    drop((arena, device));

    // History, scales, counts, clock and last updates are written one after the other.
    for count in 1..=5 {
        let device = rig.open();
        let mut arena = staged(&device);
        let before = state(&arena);
        rig.control.fail("cuMemcpyHtoDAsync_v2", count, 999).unwrap();
        let error = ops::update_scales(&mut arena, &update).unwrap_err();
        assert!(matches!(error, Error::Driver { code: 999, .. }), "{error:?}");
        assert_eq!(arena.updates(), 0);
        if count == 1 {
            assert_eq!(state(&arena), before);
            ops::update_scales(&mut arena, &update).unwrap();
            assert_eq!(state(&arena), updated);
        } else {
            expect_poisoned(arena.scales(), "update_scales: scales may be half updated");
        }
        drop((arena, device));
        assert_eq!(rig.control.live(), "");
    }
    rig.finish();
}

/// The codes of each weight, or the error of the step.
type Codes = Result<Vec<Option<Fp8Tensor>>, Error>;

/// Two weights whose scales are one cell that is not set yet: the second takes the first's, after the update.
fn shared_cell(device: &Device) -> (Arena, [Tensor; 8]) {
    let arena = Arena::new(1, ArenaOptions { history_len: 2, ..ArenaOptions::default() }, device).unwrap();
    let tensor = |seed: f32| Tensor::full(seed, [40], DType::F32, device).unwrap();
    (arena, [0.5, 0.25, 0.0, 0.0, 1.5, 0.75, 0.0, 0.0].map(tensor))
}

fn optimize_shared(arena: &Arena, tensors: &mut [Tensor; 8]) -> Codes {
    let rule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
    let slot = || Slot {
        scale: Scale::Cell { cell: arena.scale(0).unwrap(), first: &rule, keep: true },
        amax: arena.staging(0),
        ..Slot::off(Encoding::E4M3)
    };
    let (first, second) = tensors.split_at_mut(4);
    let mut all: Vec<AdamWTensor<'_>> = [("first", first), ("second", second)]
        .into_iter()
        .map(|(name, tensors)| {
            let [param, main_grad, exp_avg, exp_avg_sq] = tensors else { unreachable!("four tensors each") };
            let slot = Some(slot());
            AdamWTensor { name, param, main_grad, exp_avg, exp_avg_sq, main_param: None, slot }
        })
        .collect();
    ops::adamw_many(&mut all, &AdamWStep { step: 1, ..AdamWStep::default() })
}

/// The same step by the operation for moments in any format.
fn optimize_in_any_format(arena: &Arena, tensors: &mut [Tensor; 8]) -> Codes {
    let rule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
    let slot = || Slot {
        scale: Scale::Cell { cell: arena.scale(0).unwrap(), first: &rule, keep: true },
        amax: arena.staging(0),
        ..Slot::off(Encoding::E4M3)
    };
    let (first, second) = tensors.split_at_mut(4);
    let mut all: Vec<OptimizerTensor<'_>> = [("first", first), ("second", second)]
        .into_iter()
        .map(|(name, tensors)| {
            let [param, main_grad, first, second] = tensors else { unreachable!("four tensors each") };
            OptimizerTensor {
                name,
                param,
                main_grad,
                exp_avg: Moment { values: first, scale_inv: None },
                rule: UpdateRule::AdamW { exp_avg_sq: Moment { values: second, scale_inv: None } },
                main_param: None,
                slot: Some(slot()),
                is_rounded_stochastically: false,
                seed: 1,
            }
        })
        .collect();
    let factors = AdamWFactors::new(&AdamWStep { step: 1, ..AdamWStep::default() }, arena.device())?;
    let codes = ops::optimizer_step(&mut [(&mut all, &factors)], StepCheck::Never)?;
    Ok(codes.into_iter().flatten().collect())
}

#[test]
fn an_optimizer_that_fails_behind_the_update_does_not_invite_a_second_one() {
    fails_without_a_second_update(optimize_shared);
    fails_without_a_second_update(optimize_in_any_format);
}

fn fails_without_a_second_update(optimize: fn(&Arena, &mut [Tensor; 8]) -> Codes) {
    let rig = Rig::new();
    let device = rig.open();
    let read = |tensors: &[Tensor; 8]| tensors.each_ref().map(|tensor| tensor.to_f32_vec().unwrap());
    let (arena, mut tensors) = shared_cell(&device);
    let before = read(&tensors);
    let calls = rig.control.calls();
    let codes = optimize(&arena, &mut tensors).unwrap();
    let calls = rig.calls_since(&calls);
    assert_eq!(codes.iter().flatten().count(), 2);
    let updated = read(&tensors);
    assert_ne!(before, updated);
    drop((arena, tensors, codes, device));

    let (mut refused, mut poisoned) = (0, 0);
    for (function, count) in calls {
        for count in 1..=count {
            let device = rig.open();
            let (arena, mut tensors) = shared_cell(&device);
            // Kernels are loaded by the step before.
            rig.control.fail(&function, count, code(&function)).unwrap();
            let result = optimize(&arena, &mut tensors);
            rig.control.set("clear_fail", "").unwrap();
            match (&result, device.synchronize()) {
                (Ok(_), _) => assert_eq!(read(&tensors), updated, "call {count} of {function}"),
                // Nothing has happened, and the step can be done again.
                (Err(_), Ok(())) => {
                    assert_eq!(read(&tensors), before, "call {count} of {function}");
                    refused += 1;
                }
                (Err(_), Err(error)) => {
                    assert!(matches!(error, Error::Poisoned { .. }), "call {count} of {function}: {error}");
                    poisoned += 1;
                }
            }
            drop((arena, tensors, result, device));
            settle(&rig);
        }
    }
    assert!(refused > 3 && poisoned > 3, "{refused} {poisoned}");
}

#[test]
fn a_compiler_that_lacks_its_companion_is_replaced_by_what_the_crate_holds() {
    let rig = Rig::new();
    let device = rig.open();
    // NVRTC did not find libnvrtc-builtins.
    rig.control.fail("nvrtcCompileProgram", 1, 7).unwrap();
    let x = Tensor::full(1.5, [40], DType::F32, &device).unwrap();
    assert_eq!(ops::scale(&x, 2.0).unwrap().to_f32_vec().unwrap(), [3.0; 40]);
    assert!(rig.calls("nvrtcCompileProgram") > 0);
    // The driver takes that no more than the compiler did: both are told.
    rig.control.fail("nvrtcCompileProgram", 1, 7).unwrap();
    rig.control.fail("cuModuleLoadData", 1, 222).unwrap();
    let error = ops::cast(&x, DType::BF16).unwrap_err().to_string();
    assert!(error.contains("NVRTC") && error.contains("222"), "{error}");
    drop((x, device));
    rig.finish();
}
