//! Training steps in turns.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use clap::Args;
use serde::Serialize;

use crate::common::{Common, positive};
use crate::contender::{self, Contender};
use crate::load::Load;
use crate::machine::Machine;
use crate::report::{Results, Table, ratio};
use crate::result::Result;
use crate::size::Size;
use crate::start;
use crate::statistics::{Ratio, largest_difference, median, order};
use crate::worker::Worker;

/// The contenders that are measured without `--contenders`. Those of other libraries need `--peers`.
const USUAL: [Contender; 7] = [
    Contender::F32,
    Contender::Fp8,
    Contender::Bf16,
    Contender::TorchEager,
    Contender::TorchCompile,
    Contender::TorchBf16,
    Contender::TorchCompileBf16,
];
/// Steps before the first round: they compile, allocate, and calibrate scales.
const WARM_UP: usize = 3;
/// A turn takes about so long.
const TURN: f64 = 0.4;
/// Losses that are compared, and the largest relative difference that rounding explains.
const LOSSES: usize = 20;
const TOLERANCE: f64 = 1e-6;

#[derive(Args, Debug)]
pub(crate) struct Options {
    #[command(flatten)]
    common: Common,

    /// Steps in a turn [default: as many as take 0.4 s]
    #[arg(long, value_name = "N", value_parser = positive)]
    steps: Option<usize>,

    /// Instead of measuring, compares 20 losses in f32 with those of PyTorch in f32 and f64; fails above 1e-6 (relative)
    #[arg(long, requires = "peers")]
    losses: bool,
}

/// The step times of one contender at one size, with one number of threads.
#[derive(Debug, Serialize)]
struct Row {
    size: Size,
    threads: usize,
    contender: Contender,
    /// The median of `rounds`.
    ms_per_step: f64,
    /// For each turn, the median of its steps.
    rounds: Vec<f64>,
}

/// Times of one contender divided by those of another.
#[derive(Debug, Serialize)]
struct Comparison {
    size: Size,
    threads: usize,
    contender: Contender,
    divided_by: Contender,
    ratio: Ratio,
}

/// The ratios that are reported: a contender, and others of which the fastest divides.
const COMPARISONS: [(Contender, &str, &[Contender]); 4] = [
    (Contender::F32, "f32 ÷ torch", &[Contender::TorchEager, Contender::TorchCompile]),
    (Contender::Fp8, "fp8 ÷ f32", &[Contender::F32]),
    (Contender::Fp8, "fp8 ÷ torch", &[Contender::TorchEager, Contender::TorchCompile]),
    (Contender::Fp8, "fp8 ÷ torch-bf16", &[Contender::TorchBf16, Contender::TorchCompileBf16]),
];

pub(crate) fn run(options: &Options) -> Result {
    let common = &options.common;
    if options.losses {
        return losses(options);
    }
    let chosen = Contender::choose(&common.contenders, &contender::TRAIN, &USUAL, common.peers.is_some())?;
    let results = Results::prepare(common.json.as_deref())?;
    let folder = tempfile::tempdir()?;
    let (mut machine, mut rows, mut comparisons) = (Machine::new(), Vec::new(), Vec::new());
    for size in &common.sizes {
        let file = folder.path().join("start.safetensors");
        if chosen.iter().any(|contender| contender.is_peer()) {
            start::export(size, &file)?;
        }
        for threads in common.threads()? {
            let mut workers = Vec::new();
            for contender in &chosen {
                eprintln!("{size}, {threads} threads: starting {contender}");
                let worker = worker(*contender, size, threads, common.peers.as_deref(), &file)?;
                machine.add(&worker.library);
                workers.push((*contender, worker));
            }
            let new: Vec<Row> = measure(&mut workers, options, &mut machine)?
                .into_iter()
                .zip(&chosen)
                .map(|(rounds, &contender)| Row {
                    size: *size,
                    threads,
                    contender,
                    ms_per_step: median(&rounds),
                    rounds,
                })
                .collect();
            comparisons.extend(compare(&new));
            rows.extend(new);
        }
    }
    println!("{}\n", machine.line());
    print!("{}", table(&chosen, &rows, &comparisons));
    if let Some(results) = results {
        results.write(&serde_json::json!({ "machine": machine, "rows": rows, "ratios": comparisons }))?;
    }
    Ok(())
}

/// Returns the milliseconds of a step of each contender in each round.
fn measure(
    workers: &mut [(Contender, Worker)],
    options: &Options,
    machine: &mut Machine,
) -> Result<Vec<Vec<f64>>> {
    let mut slowest = 0.0f64;
    for (contender, worker) in &mut *workers {
        let warm = worker.ask(&WARM_UP.to_string()).map_err(|error| explain(*contender, error.as_ref()))?;
        // Seconds and loss of the last step.
        let [.., seconds, _] = warm.as_slice() else { return Err(format!("{contender}: no step").into()) };
        slowest = slowest.max(*seconds);
    }
    let steps = options.steps.unwrap_or_else(|| ((TURN / slowest).ceil() as usize).clamp(1, 100));
    let mut rounds = vec![Vec::new(); workers.len()];
    let load = |workers: &[(Contender, Worker)]| Load::now(workers.iter().map(|(_, worker)| worker.id()));
    let before = load(workers);
    for round in 0..options.common.rounds {
        for at in order(round, workers.len()) {
            let answer = workers[at].1.ask(&steps.to_string())?;
            let seconds: Vec<f64> = answer.iter().step_by(2).copied().collect();
            rounds[at].push(median(&seconds) * 1e3);
        }
    }
    machine.add_load([before, load(workers)]);
    Ok(rounds)
}

/// Starts the process of a contender.
fn worker(
    contender: Contender,
    size: &Size,
    threads: usize,
    python: Option<&Path>,
    file: &Path,
) -> Result<Worker> {
    let mut command = match (contender.is_peer(), python) {
        (true, Some(python)) => {
            let mut command = Command::new(python);
            command.args(["-c", include_str!("train.py"), &contender.to_string(), &threads.to_string()]);
            command.args([size.heads.to_string().as_ref(), file.as_os_str()]);
            // What torch.compile makes is kept beside the libraries.
            let cache = python.parent().and_then(Path::parent).map(|folder| folder.join("inductor"));
            command.env("TORCHINDUCTOR_CACHE_DIR", cache.as_deref().map_or(OsStr::new(""), Path::as_os_str));
            command
        }
        _ => {
            let mut command = Command::new(std::env::current_exe()?);
            command.args(["train-worker", &contender.to_string(), &size.to_string()]);
            command
        }
    };
    command.env("RAYON_NUM_THREADS", threads.to_string());
    Worker::start(&contender.to_string(), command)
}

/// Adds to an error what PyTorch's message does not say.
fn explain(contender: Contender, error: &dyn std::error::Error) -> String {
    let compiles = matches!(contender, Contender::TorchCompile | Contender::TorchCompileBf16);
    let hint = "torch.compile needs a C++ compiler and Python's headers: install g++ and python3-dev, or leave it out by \
        --contenders f32,fp8,torch-eager";
    if compiles { format!("{error}\n{hint}") } else { error.to_string() }
}

/// The ratios of contenders that were measured together.
fn compare(rows: &[Row]) -> Vec<Comparison> {
    let find = |contender: &Contender| rows.iter().find(|row| row.contender == *contender);
    let ratio = |(contender, _, others): &(Contender, &str, &[Contender])| {
        let row = find(contender)?;
        let fastest =
            others.iter().filter_map(find).min_by(|a, b| a.ms_per_step.total_cmp(&b.ms_per_step))?;
        Some(Comparison {
            size: row.size,
            threads: row.threads,
            contender: row.contender,
            divided_by: fastest.contender,
            ratio: Ratio::of(&row.rounds, &fastest.rounds),
        })
    };
    COMPARISONS.iter().filter_map(ratio).collect()
}

fn table(chosen: &[Contender], rows: &[Row], comparisons: &[Comparison]) -> String {
    let shown: Vec<_> = COMPARISONS
        .iter()
        .filter(|(contender, _, others)| {
            comparisons.iter().any(|row| row.contender == *contender && others.contains(&row.divided_by))
        })
        .collect();
    let names = chosen.iter().map(|contender| format!("{contender}, ms"));
    let ratios = shown.iter().map(|(_, name, _)| (*name).to_owned());
    let first = ["layers/hidden/heads/seq/batch".to_owned(), "threads".to_owned()];
    let mut table = Table::new(first.into_iter().chain(names).chain(ratios));
    for first in rows.iter().filter(|row| Some(&row.contender) == chosen.first()) {
        let is_here = |size: &Size, threads: usize| *size == first.size && threads == first.threads;
        let times = rows.iter().filter(|row| is_here(&row.size, row.threads));
        let times = times.map(|row| format!("{:.2}", row.ms_per_step));
        let ratios = shown.iter().map(|(contender, _, others)| {
            let found = comparisons.iter().find(|row| {
                is_here(&row.size, row.threads)
                    && row.contender == *contender
                    && others.contains(&row.divided_by)
            });
            ratio(found.map(|row| row.ratio))
        });
        table.row([first.size.to_string(), first.threads.to_string()].into_iter().chain(times).chain(ratios));
    }
    table.markdown()
}

/// Compares losses with those of PyTorch in f32 and in f64.
fn losses(options: &Options) -> Result {
    let common = &options.common;
    let size = common.sizes.first().ok_or("--sizes: expected a size")?;
    let threads = common.threads()?.into_iter().max().unwrap_or(1);
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("start.safetensors");
    start::export(size, &file)?;
    let mut machine = Machine::new();
    let mut series = |contender| -> Result<Vec<f64>> {
        let mut worker = worker(contender, size, threads, common.peers.as_deref(), &file)?;
        machine.add(&worker.library);
        Ok(worker.ask(&LOSSES.to_string())?.into_iter().skip(1).step_by(2).collect())
    };
    let ours = series(Contender::F32)?;
    let [twin, exact] = [series(Contender::TorchEager)?, series(Contender::TorchF64)?];
    println!("{}\n", machine.line());
    let header = ["step", "f32", "torch-eager", "torch-f64"].map(str::to_owned);
    let mut table = Table::new(header);
    for (step, ((ours, twin), exact)) in ours.iter().zip(&twin).zip(&exact).enumerate() {
        table.row([
            (step + 1).to_string(),
            format!("{ours:.8}"),
            format!("{twin:.8}"),
            format!("{exact:.10}"),
        ]);
    }
    print!("{}", table.markdown());
    println!("\nLargest relative differences over {LOSSES} steps of {size}:");
    for (name, values, expected) in [
        ("f32 from torch-eager", &ours, &twin),
        ("f32 from torch-f64", &ours, &exact),
        ("torch-eager from torch-f64", &twin, &exact),
    ] {
        let (difference, index) = largest_difference(values, expected);
        println!("{name}: {difference:.1e} in step {}", index + 1);
    }
    let (difference, index) = largest_difference(&ours, &twin);
    if difference > TOLERANCE {
        let step = index + 1;
        return Err(format!(
            "loss of step {step}: {difference:.1e} from PyTorch's: expected at most {TOLERANCE:e}"
        )
        .into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(contender: Contender, rounds: &[f64]) -> Row {
        let size = "4/128/4/64/12".parse().unwrap();
        Row { size, threads: 2, contender, ms_per_step: median(rounds), rounds: rounds.to_vec() }
    }

    #[test]
    fn each_ratio_divides_by_the_fastest_of_the_others() {
        let rows = [
            row(Contender::F32, &[6.0, 6.0, 8.0]),
            row(Contender::Fp8, &[3.0, 3.0, 3.0]),
            row(Contender::TorchEager, &[9.0, 9.0, 9.0]),
            row(Contender::TorchCompile, &[8.0, 8.0, 16.0]),
        ];
        let comparisons = compare(&rows);
        let found: Vec<_> = comparisons.iter().map(|row| (row.divided_by, row.ratio.median)).collect();
        let expected =
            [(Contender::TorchCompile, 0.75), (Contender::F32, 0.5), (Contender::TorchCompile, 0.375)];
        assert_eq!(found, expected);
        let chosen = rows.each_ref().map(|row| row.contender);
        let table = table(&chosen, &rows, &comparisons);
        let lines: Vec<&str> = table.lines().collect();
        assert!(
            lines[0].ends_with("|        f32 ÷ torch |          fp8 ÷ f32 |        fp8 ÷ torch |"),
            "{table}"
        );
        assert!(
            lines[2]
                .contains("|    6.00 |    3.00 |            9.00 |              8.00 | 0.75 (0.50 … 0.75) |"),
            "{table}"
        );
        assert_eq!(lines.len(), 3);
    }

    #[test]
    fn nothing_is_compared_with_what_was_not_measured() {
        assert!(compare(&[row(Contender::F32, &[6.0])]).is_empty());
        let table = table(&[Contender::Bf16], &[row(Contender::Bf16, &[6.0])], &[]);
        assert_eq!(table.lines().next(), Some("| layers/hidden/heads/seq/batch | threads | bf16, ms |"));
    }
}
