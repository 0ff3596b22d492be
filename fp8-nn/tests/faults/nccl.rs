//! Any call of a step of two ranks: into NCCL, from forming the group to ending it, and into the driver.
//!
//! The ranks are threads, so which of them makes the count-th call differs from run to run. Whoever makes it says what
//! failed, and the other is told of it: by the group, or by its device, which is not trusted once collectives that were
//! queued on it are aborted. `ncclCommGetAsyncError` and `cuEventQuery` are asked again and again, by the thread that waits and
//! by the one that watches, as often as there is time: of their calls some at even distances fail, over the number that one
//! undisturbed run has made, and one that is never reached must change nothing.
//!
//! What gives something back may fail unnoticed. `ncclCommAbort`, which no undisturbed step calls, fails while a group forms:
//! later, NCCL's own would still end what is queued, and one that does nothing at all would not.

use crate::fault::{self, Fault, is_dispensable, is_release, is_typed, of_group, of_kernels};
use crate::ranks::{Bits, prepare, run};
use crate::rig::Rig;
use fp8_nn::fp8_dist::Error as Groups;
use fp8_nn::fp8_kernels::Error as Kernels;
use fp8_nn::prelude::{Error, checkpoint};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

const IN_TIME: Duration = Duration::from_secs(5);

/// By which fp8-dist watches what it has queued.
const WATCHING: [&str; 4] = ["cuEventCreate", "cuEventDestroy_v2", "cuEventRecord", "cuStreamIsCapturing"];
const POLLED: [&str; 2] = ["cuEventQuery", "ncclCommGetAsyncError"];

/// Returns true if the function may fail unnoticed, besides those that may on a single rank. It releases something or ends
/// a group or context, it is called again by the thread that watches, or it loads a kernel from the cache, which is then
/// compiled instead.
fn is_quiet(function: &str) -> bool {
    let ends = ["ncclCommFinalize", "ncclCommAbort", "cuDevicePrimaryCtxRelease_v2"];
    let others = ["cuCtxSetCurrent", "cuModuleLoadData"];
    is_release(function) || [&POLLED[..], &ends, &others].concat().contains(&function)
}

/// Unhandled CUDA error, system error, internal error, remote error.
fn with_code_of_nccl(fault: Fault) -> Fault {
    Fault { code: [1, 2, 3, 6][(fault.count % 4) as usize], ..fault }
}

/// That it is one of the errors that a step may end with.
fn expect_one_of_ours(error: &Error, fault: &Fault) {
    let is_ours = match (of_kernels(error), of_group(error)) {
        (Some(Kernels::Poisoned { .. }), _) | (_, Some(Groups::Nccl { .. })) => true,
        (Some(_), _) => is_typed(error, fault),
        (_, group) => group.is_some_and(|group| group.failure().is_some()),
    };
    assert!(is_ours, "{fault} with {}: {error}: {error:?}", fault.code);
}

/// Whether the error names the function and what it answered.
fn names(error: &Error, fault @ Fault { function, code, .. }: &Fault) -> bool {
    let words = error.to_string();
    let says = |name: &str, answer: String| words.contains(name) && words.contains(&answer);
    match function.as_str() {
        // It says how the call fares whose end is waited for, or the communicator.
        "ncclCommGetAsyncError" => says(": ", format!("({code})")),
        name if name.starts_with("nccl") => says(name, format!("({code})")),
        // It is asked for on the way to other calls.
        "cuCtxGetCurrent" => says("cu", format!("failed with {code}")),
        name => is_typed(error, fault) || says(name.trim_end_matches("_v2"), format!("failed with {code}")),
    }
}

/// Two ranks and what they do undisturbed.
struct Pair {
    rig: Rig,
    calls: BTreeMap<String, u64>,
    /// Those at the end of a device.
    end: BTreeMap<String, u64>,
    bits: Vec<Bits>,
    start: Vec<u8>,
}

impl Pair {
    fn new() -> Self {
        let rig = Rig::new();
        rig.control.set("nccl_shared", "1").unwrap();
        let end = prepare(&rig);
        run(&rig, &[]); // compiles what one rank alone does not need
        let (calls, ended) = run(&rig, &[]);
        let bits: Vec<Bits> = ended.into_iter().map(|ended| ended.result.unwrap()).collect();
        assert_eq!(rig.left(), [""; 0]);
        assert_eq!(bits[0][..2], bits[1][..2]);
        let start = std::fs::read(checkpoint::path(&rig.path().join("start"))).unwrap();
        assert!(bits[0].last() == bits[1].last() && bits[0].last() != Some(&start));
        Self { rig, calls, end, bits, start }
    }

    fn matching(&self, is_meant: impl Fn(&str) -> bool) -> BTreeMap<String, u64> {
        let all = self.calls.iter().filter(|(function, _)| is_meant(function));
        all.map(|(function, count)| (function.clone(), *count)).collect()
    }

    /// A step during which all of `faults` come to pass, the first of which decides what is expected. Whether it was noticed;
    /// `None` if there was no such call.
    fn inject(&self, faults: &[Fault]) -> Option<bool> {
        let fault = faults.first()?;
        let (calls, ended) = run(&self.rig, faults);
        let is_reached = calls.get(&fault.function).is_some_and(|&count| count >= fault.count);
        if fault.function == "cuDevicePrimaryCtxRelease_v2" && is_reached {
            self.rig.release_context();
        }
        let left = self.rig.left();
        let lose = |fault: &Fault| is_release(&fault.function) || fault.function == "ncclCommAbort";
        assert!(left.len() <= usize::from(faults.iter().any(lose)), "{fault}: {left:?}");
        let start = std::fs::read(checkpoint::path(&self.rig.path().join("start"))).unwrap();
        assert!(start == self.start, "{fault}: the checkpoint");
        for (rank, ended) in ended.iter().enumerate() {
            assert!(ended.took < IN_TIME, "{fault}: rank {rank} took {:?}", ended.took);
        }
        let errors: Vec<&Error> = ended.iter().filter_map(|ended| ended.result.as_ref().err()).collect();
        if errors.is_empty() {
            // Devices end when all has been read.
            let of = |calls: &BTreeMap<String, u64>| calls.get(&fault.function).copied().unwrap_or(0);
            let waits = fault.function == "cuStreamSynchronize";
            let is_end = waits && fault.count + self.bits.len() as u64 * of(&self.end) > of(&self.calls);
            let may_pass =
                is_quiet(&fault.function) || is_dispensable(&fault.function) || is_end || !is_reached;
            assert!(may_pass, "{fault} failed unnoticed");
            let bits: Vec<Bits> = ended.into_iter().map(|ended| ended.result.unwrap()).collect();
            assert!(bits == self.bits, "{fault}: other bits");
            return is_reached.then_some(false);
        }
        assert!(is_reached && !is_release(&fault.function), "{fault}: {errors:?}");
        assert_eq!(errors.len(), ended.len(), "{fault}: a rank went on: {errors:?}");
        assert!(errors.iter().any(|error| names(error, fault)), "{fault} with {}: {errors:?}", fault.code);
        for error in errors {
            expect_one_of_ours(error, fault);
            let words = error.to_string();
            let is_told = words.contains("gave up") || words.contains("left the group");
            assert!(is_told || names(error, fault), "{fault}: {words}");
        }
        Some(true)
    }

    fn inject_each(&self, what: &str, faults: &[Fault]) {
        let (mut noticed, mut quiet) = (0, 0);
        let mut seen = BTreeSet::new();
        for fault in faults {
            match self.inject(std::slice::from_ref(fault)) {
                // Another call of the same function tells nothing new.
                Some(true) if seen.insert(&fault.function) => {
                    self.go_on(fault);
                    noticed += 1;
                }
                Some(true) => noticed += 1,
                Some(false) => quiet += 1,
                None => {}
            }
        }
        println!("{what}: {} faults, {noticed} noticed, {quiet} unnoticed", faults.len());
    }

    /// From the checkpoint, with other devices and another group.
    fn go_on(&self, fault: &Fault) {
        let (_, ended) = run(&self.rig, &[]);
        let bits: Vec<Bits> = ended.into_iter().map(|ended| ended.result.unwrap()).collect();
        assert!(bits == self.bits, "after {fault}");
        assert_eq!(self.rig.left(), [""; 0], "after {fault}");
    }
}

#[test]
fn any_call_of_nccl_may_fail() {
    let pair = Pair::new();
    let mut faults =
        fault::chosen(&pair.matching(|name| name.starts_with("nccl") && !POLLED.contains(&name)), 12);
    faults.extend(fault::spread("ncclCommGetAsyncError", pair.calls["ncclCommGetAsyncError"], 8));
    let faults: Vec<Fault> = faults.into_iter().map(with_code_of_nccl).collect();
    pair.inject_each("NCCL", &faults);
    assert!(faults.len() > 20);
}

#[test]
fn ending_a_communicator_that_failed_may_fail() {
    let pair = Pair::new();
    for count in [1, 2] {
        let [poll, abort] = [("ncclCommGetAsyncError", 1), ("ncclCommAbort", count)]
            .map(|(function, count)| with_code_of_nccl(Fault::new(function, count)));
        assert_eq!(pair.inject(&[poll.clone(), abort]), Some(true));
        pair.go_on(&poll);
    }
}

#[test]
fn any_call_that_watches_a_collective_may_fail() {
    let pair = Pair::new();
    let mut faults = fault::chosen(&pair.matching(|name| WATCHING.contains(&name)), 4);
    faults.extend(fault::spread("cuEventQuery", pair.calls["cuEventQuery"], 6));
    pair.inject_each("watching", &faults);
    assert!(faults.len() > 15);
}

#[test]
fn any_other_call_of_a_rank_may_fail() {
    let pair = Pair::new();
    let others =
        |name: &str| !name.starts_with("nccl") && !WATCHING.contains(&name) && !POLLED.contains(&name);
    let faults = fault::chosen(&pair.matching(others), 1);
    pair.inject_each("ranks", &faults);
    assert!(faults.len() > 20);
}
