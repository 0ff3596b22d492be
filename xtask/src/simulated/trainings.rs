//! Training and reference data on the simulated GPU.
//!
//! `golden` on `cuda:0`, and one tiny GPT trained three times: on the CPU, on the GPU, and on the GPU as a graph. The graph
//! has to give the GPU's losses to the last digit; these may be [`TOLERANCE`] away from the CPU's, in every step of both
//! trainings.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use serde::Deserialize;
use xshell::Shell;

use crate::checks::Checks;
use crate::workspace::Result;
use crate::{artifact, process, sim};

const MODEL: &str =
    "--steps 20 --layers 2 --hidden 32 --heads 2 --seq 16 --batch 2 --recipe delayed --sample 0 --quiet";
const STEPS: usize = 20;
const TOLERANCE: f64 = 1e-3;
const LIMIT: Duration = Duration::from_secs(600);
/// The name that the simulated GPU reports.
const NAME: &str = "PTX interpreter";

pub(super) fn run(sh: &Shell) -> Result<String> {
    let [fp8, library] = artifact::with_simulator(sh, "fp8")?;
    let folder = tempfile::tempdir()?;
    let libraries = folder.path().join("libraries");
    sim::fill(&libraries, &library)?;
    let command = |program: &Path, words: &str| {
        let mut command = Command::new(program);
        command.args(words.split_whitespace()).env("FP8_CUDA_LIB_DIR", &libraries);
        command
    };

    let checks = Checks::build(sh)?.program;
    let jobs = ["--device cpu", "--device cuda:0", "--device cuda:0 --graph"];
    // Errors as texts, which can go to another thread.
    let (golden, trainings) = thread::scope(|scope| {
        let golden = || finish(command(&checks, "golden --device cuda:0")).map_err(|error| error.to_string());
        let golden = scope.spawn(golden);
        let trainings = process::each(&jobs, process::cores().min(jobs.len()), |index, job| {
            let report = folder.path().join(index.to_string());
            let mut train = command(&fp8, &format!("train {MODEL} {job}"));
            train.arg("--report-dir").arg(&report);
            let trained = finish(train).and_then(|_| Training::read(&report));
            trained.map_err(|error| error.to_string())
        });
        (golden.join().unwrap_or_else(|_| Err("the thread of golden panicked".to_owned())), trainings)
    });
    let golden = golden?;
    let line = golden.lines().find(|line| line.starts_with("device: "));
    if !line.is_some_and(|line| line.starts_with("device: cuda:0 ") && line.contains(NAME)) {
        return Err(format!("golden ran on {line:?}, not on the simulated cuda:0").into());
    }
    let [cpu, eager, graph] = &trainings.into_iter().collect::<std::result::Result<Vec<_>, _>>()?[..] else {
        return Err("three trainings were started".into());
    };
    let distance = compare(cpu, eager, graph)?;
    Ok(format!("losses at most {distance:.0e} from the CPU's"))
}

/// Runs a program and returns its output, or an error if it fails or takes too long.
fn finish(command: Command) -> Result<String> {
    let what = format!("{command:?}");
    let finished = process::watch(command, LIMIT, |_| false)?;
    match finished.status {
        Some(status) if status.success() => Ok(finished.output),
        Some(status) => Err(format!("{what}: {status}\n{}", finished.output).into()),
        None => Err(format!("{what}: stopped after {LIMIT:?}\n{}", finished.output).into()),
    }
}

/// The part of a training's report that is compared.
#[derive(Debug, Clone)]
struct Training {
    device: String,
    /// `fp8,3` and the loss, as printed.
    losses: Vec<(String, String)>,
}

impl Training {
    fn read(report: &Path) -> Result<Self> {
        #[derive(Deserialize)]
        struct Summary {
            device: String,
        }
        let summary: Summary = serde_json::from_str(&fs::read_to_string(report.join("summary.json"))?)?;
        Ok(Self { device: summary.device, losses: losses(&fs::read_to_string(report.join("steps.csv"))?)? })
    }
}

/// Returns the losses of a table with the columns `run,step,loss,…`, whose first line names them.
fn losses(csv: &str) -> Result<Vec<(String, String)>> {
    let mut lines = csv.lines();
    if !lines.next().is_some_and(|names| names.starts_with("run,step,loss,")) {
        return Err("steps.csv does not begin with run,step,loss".into());
    }
    let split = |line: &str| {
        let mut fields = line.split(',');
        let (run, step, loss) = (fields.next()?, fields.next()?, fields.next()?);
        Some((format!("{run},{step}"), loss.to_owned()))
    };
    lines.map(|line| split(line).ok_or_else(|| format!("steps.csv: {line}").into())).collect()
}

/// The largest distance from the CPU's losses.
fn compare(cpu: &Training, eager: &Training, graph: &Training) -> Result<f64> {
    for (gpu, what) in [(eager, "eager"), (graph, "as a graph")] {
        if !gpu.device.contains(NAME) {
            return Err(format!("{what}: trained on {}, not on the {NAME}", gpu.device).into());
        }
        // Each step once in high precision, once in FP8.
        if gpu.losses.len() != 2 * STEPS || cpu.losses.len() != 2 * STEPS {
            let (gpu, cpu) = (gpu.losses.len(), cpu.losses.len());
            return Err(format!("{what}: {gpu} losses, {cpu} on the CPU: expected {}", 2 * STEPS).into());
        }
    }
    if let Some(((step, eager), (_, graph))) = eager.losses.iter().zip(&graph.losses).find(|(a, b)| a != b) {
        return Err(format!("{step}: loss {graph} as a graph, {eager} without").into());
    }
    let mut largest = 0.0_f64;
    for ((step, cpu), (same, gpu)) in cpu.losses.iter().zip(&eager.losses) {
        let distance = (cpu.parse::<f64>()? - gpu.parse::<f64>()?).abs();
        if step != same || distance.is_nan() || distance > TOLERANCE {
            return Err(format!("{step}: loss {cpu} on the CPU; {same}: {gpu} on the GPU").into());
        }
        largest = largest.max(distance);
    }
    Ok(largest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn training(device: &str, change: impl Fn(usize) -> f64) -> Training {
        let rows = (0..2 * STEPS).map(|index| {
            let run = if index < STEPS { "high_precision" } else { "fp8" };
            format!("{run},{},{},0.1,0.001,1.0\n", index % STEPS, 5.0 + change(index))
        });
        let csv = format!("run,step,loss,grad_norm,lr,ms\n{}", rows.collect::<String>());
        Training { device: device.to_owned(), losses: losses(&csv).unwrap() }
    }

    #[test]
    fn each_way_to_differ_is_found() {
        let gpu = "cuda:0 (PTX interpreter (sm_90))";
        let (cpu, same) = (training("cpu", |_| 0.0), training(gpu, |_| 0.0));
        let near = training(gpu, |_| 5e-4);
        assert!((compare(&cpu, &near, &near).unwrap() - 5e-4).abs() < 1e-9);

        let at = |index, by| training(gpu, move |i| if i == index { by } else { 0.0 });
        let error = |eager: &Training, graph: &Training| compare(&cpu, eager, graph).unwrap_err().to_string();
        assert_eq!(error(&same, &at(39, 1e-7)), "fp8,19: loss 5.0000001 as a graph, 5 without");
        for by in [2e-3, f64::NAN] {
            assert!(error(&at(7, by), &at(7, by)).starts_with("high_precision,7: loss 5 on the CPU"));
        }
        assert!(error(&cpu, &same).contains("trained on cpu"));
        let mut short = same.clone();
        short.losses.pop();
        assert!(error(&same, &short).contains("39 losses"));
        assert!(losses("step,loss\n").is_err() && losses("run,step,loss,ms\nfp8,3\n").is_err());
    }
}
