//! Processes that are killed while they save, at random moments: the file is whole, a later save succeeds, nothing is left.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fp8_kernels::{CudaOptions, Device};
use fp8_nn::prelude::*;
use fp8_nn::rand::SeedableRng;
use fp8_nn::rand::rngs::StdRng;

use super::draw::Draw;
use super::options::{Attack, Part};
use super::tally::{Failure, Tally};
use super::watch::{self, Range};
use crate::result::Result as TaskResult;

/// The weight's extents: its file takes milliseconds to write.
const SIZE: usize = 384;
/// The longest that a process saves before it is killed.
const LONGEST: Duration = Duration::from_millis(120);
/// One in so many kills meets a process that fills the cache of kernels.
const KERNELS: u64 = 5;
/// Metadata: how often the model was saved.
const ROUND: &str = "round";

struct Job {
    model: Linear,
    optimizer: AdamW,
    scaling: Scaling,
}

impl Job {
    fn new() -> Result<Self> {
        let (device, mut rng) = (Device::cpu(), StdRng::seed_from_u64(1));
        let options = LinearOptions { in_features: SIZE, out_features: SIZE, ..Default::default() };
        let mut model = Linear::new("fc", options, &device, &mut rng)?;
        let mut optimizer = AdamW::new(AdamWOptions::default())?;
        optimizer.step(&mut model, 0.0)?;
        let scaling = Scaling::new(&model, &device)?;
        Ok(Self { model, optimizer, scaling })
    }

    /// Every parameter says in which round it was saved.
    fn save(&mut self, dir: &Path, round: u64) -> Result<()> {
        for parameter in parameters_mut(&mut self.model) {
            let (shape, device) = (*parameter.tensor().shape(), parameter.tensor().device().clone());
            parameter.set(Tensor::full(round as f32, shape, DType::F32, &device)?)?;
        }
        let metadata = BTreeMap::from([(ROUND.to_owned(), round.to_string())]);
        checkpoint::save(dir, &self.model, &self.optimizer, &self.scaling, &metadata)
    }

    /// The round in which all that is in `dir` was saved.
    fn load(&mut self, dir: &Path) -> TaskResult<u64> {
        checkpoint::load(dir, &mut self.model, &mut self.optimizer, &mut self.scaling)?;
        let round: u64 = checkpoint::metadata(dir)?.get(ROUND).ok_or("metadata without a round")?.parse()?;
        for parameter in parameters(&self.model) {
            if parameter.tensor().to_f32_vec()?.iter().any(|value| *value != round as f32) {
                return Err(format!("`{}` is not of round {round}", parameter.name()).into());
            }
        }
        Ok(round)
    }
}

/// The process that is killed: saves, or compiles kernels, until it is.
pub(super) fn child(options: &Attack) -> TaskResult<ExitCode> {
    let folder = options.folder.as_deref().ok_or("attack: a saving process needs --folder")?;
    if options.first % KERNELS == KERNELS - 1 {
        compile(options.device_name(), folder, options.stride)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut job = Job::new()?;
    let from = if checkpoint::path(folder).exists() { job.load(folder)? } else { 0 };
    println!("0");
    for round in from + 1.. {
        job.save(folder, round)?;
        println!("{round}");
    }
    Ok(ExitCode::SUCCESS)
}

/// Uses some kernels, so that they are compiled into the cache below `folder`.
fn compile(device: &str, folder: &Path, operations: u64) -> TaskResult {
    let ordinal = device.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok()).unwrap_or(0);
    let cache_dir = Some(folder.to_owned());
    println!("0");
    let device = Device::cuda_with_options(&CudaOptions { ordinal, cache_dir, ..CudaOptions::default() })?;
    let x = Tensor::full(2.0, [8, 8], DType::F32, &device)?;
    for operation in 0..operations {
        let sum = match operation {
            0 => ops::sum(&x)?.item()? / 128.0,
            1 => ops::cast(&x, DType::BF16)?.to_f32_vec()?[3] / 2.0,
            2 => ops::transpose(&x)?.to_f32_vec()?[3] / 2.0,
            3 => ops::softmax(&x, 1.0, false, None)?.to_f32_vec()?[3] * 8.0,
            _ => ops::add(&x, &x)?.to_f32_vec()?[3] / 4.0,
        };
        if sum != 1.0 {
            return Err(format!("operation {operation} with cached kernels is off by a factor {sum}").into());
        }
    }
    Ok(())
}

/// Kills one process after the other.
pub(super) fn run(range: &Range) -> TaskResult<Tally> {
    let mut tally = Tally::default();
    let (folder, has_kernels) = (tempfile::tempdir()?, range.device != "cpu");
    let mut number = range.first;
    while number < range.last && range.deadline.is_none_or(|end| Instant::now() < end) {
        let is_kernel = number % KERNELS == KERNELS - 1;
        if !is_kernel || has_kernels {
            let dir =
                folder.path().join(if is_kernel { format!("kernels{number}") } else { "saves".to_owned() });
            fs::create_dir_all(&dir)?;
            let outcome = kill(range, number, &dir).and_then(|seen| {
                if is_kernel { check_kernels(range, number, &dir) } else { check(&dir, seen) }
            });
            let family = if is_kernel { "kernel cache" } else { "checkpoint" };
            tally.add(family, usize::from(outcome.is_ok()), 0);
            if let Err(error) = outcome {
                tally.fail(Failure {
                    part: Part::Kills,
                    device: range.device.clone(),
                    seed: range.seed,
                    number,
                    family: family.to_owned(),
                    what: error.to_string(),
                    detail: String::new(),
                });
                // The next one starts from nothing.
                fs::remove_dir_all(&dir)?;
            }
        }
        number += range.stride;
    }
    Ok(tally)
}

/// Lets a process save for a random time, kills it, and tells the last round that it had finished.
fn kill(range: &Range, number: u64, dir: &Path) -> TaskResult<u64> {
    let mut draw = Draw::new(range.seed, Part::Kills as u64, number);
    let mut command =
        watch::command(&Range { libraries: range.libraries.clone(), stride: 4, ..copy(range) }, number)?;
    command.arg("--folder").arg(dir).stderr(Stdio::null());
    let mut child = command.spawn()?;
    let output = child.stdout.take().ok_or("the process has no output")?;
    let seen = Arc::new(AtomicU64::new(0));
    let last = seen.clone();
    let (send, ready) = std::sync::mpsc::channel();
    let reader = thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(std::result::Result::ok) {
            last.store(line.parse().unwrap_or(0), Ordering::Relaxed);
            let _ = send.send(()); // Only the first is waited for.
        }
    });
    let started = ready.recv_timeout(Duration::from_secs(60));
    thread::sleep(LONGEST.mul_f32(draw.unit()));
    child.kill()?;
    child.wait()?;
    let _ = reader.join();
    started.map_err(|_| "the process that saves did not start")?;
    Ok(seen.load(Ordering::Relaxed))
}

/// A range like this, for the command of one process.
fn copy(range: &Range) -> Range {
    Range {
        part: range.part,
        device: range.device.clone(),
        seed: range.seed,
        first: range.first,
        last: range.last,
        stride: range.stride,
        talks: false,
        deadline: None,
        limit: range.limit,
        libraries: None,
    }
}

/// The file is whole and of the last round that was finished, or the next; a later save leaves nothing but itself.
fn check(dir: &Path, finished: u64) -> TaskResult {
    let mut job = Job::new()?;
    let mut round = 0;
    if checkpoint::path(dir).exists() || finished > 0 {
        round = job.load(dir).map_err(|error| format!("after a kill: {error}"))?;
        // Rounds go on from process to process: 0 says only that this one has begun.
        if finished > 0 && !(finished..=finished + 1).contains(&round) {
            return Err(format!("round {finished} was saved, but round {round} was found").into());
        }
    }
    job.save(dir, round + 1).map_err(|error| format!("a save after a kill: {error}"))?;
    if job.load(dir)? != round + 1 {
        return Err("a save after a kill stored another round".into());
    }
    left(dir, &[checkpoint::path(dir)])
}

/// Another process finds the cache usable, and what it adds leaves no temporary files.
fn check_kernels(range: &Range, number: u64, dir: &Path) -> TaskResult {
    let mut command =
        watch::command(&Range { libraries: range.libraries.clone(), stride: 5, ..copy(range) }, number)?;
    let output = command.arg("--folder").arg(dir).stderr(Stdio::piped()).output()?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(format!("with the cache of a killed process: {}: {words}", output.status).into());
    }
    let cubins = dir.join("cubin");
    let whole: Vec<PathBuf> = fs::read_dir(&cubins)?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.file_name().is_some_and(|name| name.len() == 64))
        .collect();
    left(&cubins, &whole)
}

/// An error if there is anything but `expected`.
fn left(dir: &Path, expected: &[PathBuf]) -> TaskResult {
    let found: Vec<PathBuf> = fs::read_dir(dir)?.flatten().map(|entry| entry.path()).collect();
    let extra: Vec<String> = found
        .iter()
        .filter(|path| !expected.contains(path))
        .map(|path| path.file_name().unwrap_or_default().to_string_lossy().into_owned())
        .collect();
    if extra.is_empty() {
        Ok(())
    } else {
        Err(format!("files left after a later save\n{}", extra.join("\n")).into())
    }
}
