//! One suite over all backends: a table of cases times a table of backends.
//!
//! A backend that is absent, and a case of an operation that a backend does not have, is ignored with its reason, and
//! counted. `cargo test --test conformance -- cpu::norm` runs the cases of one operation on one backend. A process loads
//! one CUDA library: the simulated device, or a real one where `FP8_CONFORMANCE_BACKEND` is `cuda`. Where
//! `FP8_CONFORMANCE_CASES` names a file, the cases that it lists, a name a line, are run, in its order. With
//! `FP8_CONFORMANCE_WATCH` set, a line for each case on the simulated device says how long it took and which kernels it launched.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "the suite's report")]

#[path = "conformance/mod.rs"]
mod cases;
mod oracle;

use cases::{BY_CUDNN, Case};
use fp8_cuda_sim::{Control, library_path};
use fp8_kernels::ops::{self, ScoreOptions, Sequences};
use fp8_kernels::{CudaAllocator, CudaOptions, DType, Device, Tensor};
use libtest_mimic::{Arguments, Trial};
use std::collections::HashMap;
use std::process::ExitCode;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// The variable with the file that lists cases.
const LIST: &str = "FP8_CONFORMANCE_CASES";
/// The variable that asks what each case launched, and how long it took.
const WATCH: &str = "FP8_CONFORMANCE_WATCH";
/// The variable that lets a simulated device stand for a real one.
const DRY_RUN: &str = "FP8_CONFORMANCE_DRY_RUN";

/// A line for each case that was watched.
static WATCHED: Mutex<Vec<String>> = Mutex::new(Vec::new());

#[derive(Clone, Copy, PartialEq)]
enum Backend {
    Cpu,
    CudaSim,
    /// The simulated device with cuDNN, for attention.
    CudaSimDnn,
    /// This machine's GPU.
    Cuda,
    /// The same with cuDNN, for attention.
    CudaDnn,
}

/// The version of the simulated cuDNN, whose answers are recorded.
const CUDNN: &str = "92801";

impl Backend {
    const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::CudaSim => "cuda-sim",
            Self::CudaSimDnn => "cuda-sim-dnn",
            Self::Cuda => "cuda",
            Self::CudaDnn => "cuda-dnn",
        }
    }

    const fn is_hardware(self) -> bool {
        matches!(self, Self::Cuda | Self::CudaDnn)
    }

    const fn is_simulated(self) -> bool {
        matches!(self, Self::CudaSim | Self::CudaSimDnn)
    }

    const fn has_cudnn(self) -> bool {
        matches!(self, Self::CudaSimDnn | Self::CudaDnn)
    }

    fn open(self, folder: &std::path::Path) -> Result<Device, String> {
        let options = match self {
            Self::Cpu => return Ok(Device::cpu()),
            // Each tensor is an allocation of its own: every byte beyond its end is seen.
            Self::CudaSim | Self::CudaSimDnn => CudaOptions {
                library: Some(library_path().ok_or("the simulated driver was not built beside this test")?),
                cache_dir: Some(folder.to_owned()),
                allocator: Some(CudaAllocator::Exact),
                cudnn: Some(self.has_cudnn()),
                ..CudaOptions::default()
            },
            Self::Cuda | Self::CudaDnn => {
                CudaOptions { cudnn: Some(self.has_cudnn()), ..CudaOptions::default() }
            }
        };
        if self == Self::CudaSimDnn {
            let library = options.library.as_deref().unwrap_or(folder);
            let control = Control::open(library).map_err(|error| error.to_string())?;
            control.set("cudnn", CUDNN).map_err(|error| error.to_string())?;
        }
        let device = Device::cuda_with_options(&options).map_err(|error| error.to_string())?;
        if self.is_hardware() && device.is_simulated() && std::env::var_os(DRY_RUN).is_none() {
            return Err(format!(
                "{} is simulated: {DRY_RUN}=1 runs cases of real devices on it",
                device.description()
            ));
        }
        if self == Self::CudaDnn && !is_served_by_cudnn(&device).map_err(|error| error.to_string())? {
            return Err("no cuDNN of 9.19 or newer".to_owned());
        }
        Ok(device)
    }

    /// Why it does not run a case.
    fn lacks(self, case: &Case) -> Option<&'static str> {
        if self.has_cudnn()
            && !["attention", "attention_sequences", "attention_log_sum_exp"].contains(&case.operation())
        {
            return Some("no attention");
        }
        // Packed sequences are computed by this crate's kernels, and calls of their own by cuDNN.
        if self.has_cudnn() && case.name == "packed_sequences_are_those_of_calls_of_their_own" {
            return Some("bits of other kernels");
        }
        if case.operation() == "stress" && std::env::var_os("FP8_CONFORMANCE_STRESS").is_none() {
            return Some("for real devices: set FP8_CONFORMANCE_STRESS");
        }
        None
    }
}

/// Whether attention runs by cuDNN, which keeps one number for each row of probabilities.
fn is_served_by_cudnn(device: &Device) -> fp8_kernels::Result<bool> {
    let x = Tensor::zeros([1, 64, 1, 64], DType::BF16, device)?;
    let (_, saved) = ops::attention(&x, &x, &x, &Sequences::Full, ScoreOptions::default())?;
    Ok(saved.row_sum.is_none())
}

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    let backends: &[Backend] = match std::env::var("FP8_CONFORMANCE_BACKEND").as_deref() {
        Err(_) => &[Backend::Cpu, Backend::CudaSim, Backend::CudaSimDnn],
        Ok("cpu") => &[Backend::Cpu],
        Ok("cuda-sim") => &[Backend::CudaSim],
        Ok("cuda-sim-dnn") => &[Backend::CudaSimDnn],
        Ok("cuda") => &[Backend::Cuda, Backend::CudaDnn],
        Ok(other) => {
            eprintln!("FP8_CONFORMANCE_BACKEND={other}: expected cpu, cuda-sim, cuda-sim-dnn or cuda");
            return ExitCode::from(2);
        }
    };
    let folder = match tempfile::tempdir() {
        Ok(folder) => folder,
        Err(error) => {
            eprintln!("a folder for compiled kernels: {error}");
            return ExitCode::FAILURE;
        }
    };
    // What a kernel meets is told by the next call that waits, which has to be its own case's.
    if backends != [Backend::Cpu] {
        args.test_threads = Some(1);
    }
    let mut trials: Vec<Trial> =
        backends.iter().flat_map(|&backend| trials(backend, &args, folder.path())).collect();
    if let Some(list) = std::env::var_os(LIST) {
        trials = match std::fs::read_to_string(&list) {
            Ok(list) => listed(trials, &list),
            Err(error) => {
                eprintln!("{LIST}={}: {error}", list.display());
                return ExitCode::from(2);
            }
        };
    }
    let conclusion = libtest_mimic::run(&args, trials);
    for line in WATCHED.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        println!("{line}");
    }
    let clean = args.list || !backends.iter().any(|backend| backend.is_simulated()) || simulator_is_clean();
    if conclusion.has_failed() || !clean { ExitCode::from(101) } else { ExitCode::SUCCESS }
}

fn trials(backend: Backend, args: &Arguments, folder: &std::path::Path) -> Vec<Trial> {
    // To list cases no device is needed, and none is there to say why one is absent.
    let device = if args.list { Ok(Device::cpu()) } else { backend.open(folder) };
    let trials = |case: &'static Case| {
        let reason = match &device {
            Ok(_) => backend.lacks(case).map(str::to_owned),
            Err(reason) => Some(reason.clone()),
        };
        let device = device.clone();
        case.singles().into_iter().map(move |(path, run)| {
            let name = format!("{}::{path}", backend.name());
            match (&reason, &device) {
                (None, Ok(device)) => {
                    let device = device.clone();
                    let run = move |device: &Device| {
                        BY_CUDNN.store(backend.has_cudnn(), Relaxed);
                        run(device)
                    };
                    if backend.is_simulated() && std::env::var_os(WATCH).is_some() {
                        Trial::test(name.clone(), move || watched(&name, || run(&device)))
                    } else {
                        Trial::test(name, move || run(&device))
                    }
                }
                // Only a real device may be absent.
                (Some(reason), Err(_)) if !backend.is_hardware() => {
                    let reason = reason.clone();
                    Trial::test(name, move || Err(reason.into()))
                }
                (reason, _) => {
                    let reason = reason.as_deref().unwrap_or("absent");
                    Trial::test(format!("{name} ({reason})"), || Ok(())).with_ignored_flag(true)
                }
            }
        })
    };
    // Cases without attention would be the same as without cuDNN: they are not even listed.
    let belongs = |case: &&Case| !backend.has_cudnn() || backend.lacks(case).is_none();
    cases::ALL.iter().copied().flatten().filter(belongs).flat_map(trials).collect()
}

/// Runs a case on the simulated device and notes how long it took and which kernels it launched.
fn watched(name: &str, run: impl FnOnce() -> cases::Outcome) -> cases::Outcome {
    let control = library_path().ok_or("the simulated driver was not built beside this test")?;
    let control = Control::open(&control)?;
    control.set("reset_calls", "")?;
    let start = Instant::now();
    let outcome = run();
    let line = format!("watched {name} {:.3} {}", start.elapsed().as_secs_f64(), control.kernels().join(" "));
    WATCHED.lock().unwrap_or_else(PoisonError::into_inner).push(line);
    outcome
}

/// Those whose names stand in the list, in its order.
fn listed(trials: Vec<Trial>, list: &str) -> Vec<Trial> {
    let places: HashMap<&str, usize> = list.lines().zip(0..).collect();
    let mut listed: Vec<(usize, Trial)> =
        trials.into_iter().filter_map(|trial| Some((*places.get(trial.name())?, trial))).collect();
    listed.sort_by_key(|(place, _)| *place);
    listed.into_iter().map(|(_, trial)| trial).collect()
}

/// Prints what the simulated device found, once all devices are gone.
fn simulator_is_clean() -> bool {
    let Some(control) = library_path().and_then(|path| Control::open(&path).ok()) else {
        println!("simulator: not found");
        return false;
    };
    let (reports, live) = (control.reports(), control.live());
    for text in [&reports, &live].into_iter().filter(|text| !text.is_empty()) {
        println!("{text}");
    }
    let count = |text: &str| text.lines().filter(|line| !line.trim().is_empty()).count();
    println!("simulator: {} reports, {} leaks", count(&reports), count(&live));
    reports.is_empty() && live.is_empty()
}
