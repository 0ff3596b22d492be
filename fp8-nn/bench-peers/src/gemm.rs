//! Matrix products in turns.

use std::path::PathBuf;
use std::process::Command;

use clap::Args;
use serde::Serialize;

use crate::common::Common;
use crate::contender::{self, Contender};
use crate::load::Load;
use crate::machine::Machine;
use crate::report::{Results, Table, ratio};
use crate::result::Result;
use crate::size::{Product, SIZES, Size};
use crate::statistics::{Ratio, geometric_mean, median, order};
use crate::worker::Worker;

/// The ratios of speeds that are reported.
const COMPARISONS: [(Contender, Contender); 5] = [
    (Contender::F32, Contender::Gemm),
    (Contender::F32, Contender::Numpy),
    (Contender::F32, Contender::TorchF32),
    (Contender::Fp8, Contender::Gemm),
    (Contender::Fp8, Contender::TorchBf16),
];

#[derive(Args, Debug)]
pub(crate) struct Options {
    #[command(flatten)]
    common: Common,

    /// The program that multiplies with faer and gemm [default: they do not take part]
    #[arg(long, value_name = "PROGRAM")]
    crates: Option<PathBuf>,

    /// Seconds of a turn, for each product
    #[arg(long, value_name = "S", default_value = "0.02", value_parser = seconds)]
    turn: f64,

    /// Only products whose name contains this text, such as `fc1` or `wgrad`
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
}

fn seconds(text: &str) -> std::result::Result<f64, String> {
    let seconds = text.parse().ok().filter(|seconds: &f64| seconds.is_finite() && *seconds > 0.0);
    seconds.ok_or_else(|| "expected seconds greater than 0".to_owned())
}

/// The speed of one contender at one product.
#[derive(Debug, Clone, Serialize)]
struct Row {
    size: Size,
    threads: usize,
    name: String,
    #[serde(flatten)]
    product: Product,
    contender: Contender,
    /// The median of `rounds`.
    gflop_per_s: f64,
    rounds: Vec<f64>,
}

/// The products of one size: the speeds of one contender divided by those of another, as geometric means over the products.
#[derive(Debug, Serialize)]
struct Comparison {
    size: Size,
    threads: usize,
    contender: Contender,
    divided_by: Contender,
    ratio: Ratio,
}

pub(crate) fn run(options: &Options) -> Result {
    let common = &options.common;
    let is_there =
        |contender: &Contender| options.crates.is_some() || Program::of(*contender) != Program::Crates;
    if let Some(absent) = common.contenders.iter().find(|contender| !is_there(contender)) {
        let how = "which cargo xtask bench gemm --peers gives";
        return Err(format!("--contenders: {absent} needs --crates, {how}").into());
    }
    let chosen =
        Contender::choose(&common.contenders, &contender::GEMM, &contender::GEMM, common.peers.is_some())?;
    let chosen: Vec<Contender> = chosen.into_iter().filter(is_there).collect();
    let results = Results::prepare(common.json.as_deref())?;
    let (mut machine, mut rows) = (Machine::new(), Vec::<Row>::new());
    for threads in common.threads()? {
        let mut workers = Workers::new(options, threads);
        for size in &common.sizes {
            eprintln!("{size}, {threads} threads");
            let products = size.products().into_iter();
            for (name, product) in products.filter(|(name, _)| name.contains(&options.only)) {
                // Another size may have the same product.
                let known = rows.iter().filter(|row| row.product == product && row.threads == threads);
                let known: Vec<Row> = known
                    .take(chosen.len())
                    .map(|row| Row { size: *size, name: name.clone(), ..row.clone() })
                    .collect();
                if !known.is_empty() {
                    rows.extend(known);
                    continue;
                }
                let before = workers.load();
                let rounds = workers.measure(&chosen, &product)?;
                machine.add_load([before, workers.load()]);
                rows.extend(chosen.iter().zip(rounds).map(|(&contender, rounds)| {
                    let (name, gflop_per_s) = (name.clone(), median(&rounds));
                    Row { size: *size, threads, name, product, contender, gflop_per_s, rounds }
                }));
            }
        }
        workers.libraries().for_each(|library| machine.add(library));
    }
    if rows.is_empty() {
        return Err(format!(
            "--only {:?}: no product has this in its name: they are {}",
            options.only,
            names()
        )
        .into());
    }
    let comparisons = compare(&rows);
    println!("{}\n\nGFLOP/s\n", machine.line());
    print!("{}\n{}", table(&chosen, &rows), summary(&chosen, &rows, &comparisons));
    if let Some(results) = results {
        results.write(&serde_json::json!({ "machine": machine, "rows": rows, "ratios": comparisons }))?;
    }
    Ok(())
}

/// The names of the products of a usual size.
fn names() -> String {
    let products = SIZES[0].parse().map(|size: Size| size.products()).unwrap_or_default();
    products.into_iter().map(|(name, _)| name).collect::<Vec<_>>().join(", ")
}

/// Programs that multiply.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Program {
    This,
    Crates,
    Python,
}

impl Program {
    fn of(contender: Contender) -> Self {
        match contender {
            Contender::Faer | Contender::Gemm => Self::Crates,
            contender if contender.is_peer() => Self::Python,
            _ => Self::This,
        }
    }
}

/// The processes of all programs that were needed so far, with one number of threads.
struct Workers<'a> {
    options: &'a Options,
    threads: usize,
    started: Vec<(Program, Worker)>,
}

impl<'a> Workers<'a> {
    fn new(options: &'a Options, threads: usize) -> Self {
        Self { options, threads, started: Vec::new() }
    }

    fn libraries(&self) -> impl Iterator<Item = &str> {
        self.started.iter().map(|(_, worker)| &*worker.library)
    }

    /// Returns the CPU times of now, or `None` before the processes have started.
    fn load(&self) -> Option<Load> {
        if self.started.is_empty() {
            None
        } else {
            Load::now(self.started.iter().map(|(_, worker)| worker.id()))
        }
    }

    /// Returns GFLOP/s of each contender in each round.
    fn measure(&mut self, contenders: &[Contender], product: &Product) -> Result<Vec<Vec<f64>>> {
        let mut rounds = vec![Vec::new(); contenders.len()];
        for round in 0..self.options.common.rounds {
            for at in order(round, contenders.len()) {
                let Product { pass, m, n, k } = *product;
                let (contender, layout, turn) = (contenders[at], pass.layout(), self.options.turn);
                let worker = self.worker(Program::of(contender))?;
                let answer = worker.ask(&format!("{contender} {layout} {m} {n} {k} {turn}"))?;
                let seconds = answer.first().ok_or_else(|| format!("{contender}: no answer"))?;
                rounds[at].push(product.flops() / seconds / 1e9);
            }
        }
        Ok(rounds)
    }

    fn worker(&mut self, program: Program) -> Result<&mut Worker> {
        let at = match self.started.iter().position(|(started, _)| *started == program) {
            Some(at) => at,
            None => {
                self.started.push((program, self.start(program)?));
                self.started.len() - 1
            }
        };
        Ok(&mut self.started[at].1)
    }

    fn start(&self, program: Program) -> Result<Worker> {
        let Options { common, crates, .. } = self.options;
        let (name, mut command) = match (program, &common.peers, crates) {
            (Program::Python, Some(python), _) => {
                let mut command = Command::new(python);
                command.args(["-c", include_str!("gemm.py"), &self.threads.to_string()]);
                ("numpy and torch", command)
            }
            (Program::Crates, _, Some(crates)) => ("faer and gemm", Command::new(crates)),
            _ => {
                let mut command = Command::new(std::env::current_exe()?);
                command.arg("gemm-worker");
                ("fp8-nn", command)
            }
        };
        command.env("RAYON_NUM_THREADS", self.threads.to_string());
        Worker::start(name, command)
    }
}

/// The places in `rows` of each size with each number of threads, in order.
fn groups(rows: &[Row]) -> Vec<(Size, usize)> {
    let mut groups = Vec::new();
    for row in rows {
        if !groups.contains(&(row.size, row.threads)) {
            groups.push((row.size, row.threads));
        }
    }
    groups
}

/// For each round, the geometric mean over the products of a size.
fn means(rows: &[Row], (size, threads): (Size, usize), contender: Contender) -> Option<Vec<f64>> {
    let is_meant = |row: &&Row| (row.size, row.threads, row.contender) == (size, threads, contender);
    let speeds: Vec<&[f64]> = rows.iter().filter(is_meant).map(|row| &*row.rounds).collect();
    let rounds = speeds.first()?.len();
    let mean = |round: usize| {
        geometric_mean(&speeds.iter().filter_map(|speeds| speeds.get(round).copied()).collect::<Vec<_>>())
    };
    Some((0..rounds).map(mean).collect())
}

fn compare(rows: &[Row]) -> Vec<Comparison> {
    let mut comparisons = Vec::new();
    for (size, threads) in groups(rows) {
        for (contender, divided_by) in COMPARISONS {
            let both = [contender, divided_by].map(|contender| means(rows, (size, threads), contender));
            if let [Some(speeds), Some(others)] = both {
                let ratio = Ratio::of(&speeds, &others);
                comparisons.push(Comparison { size, threads, contender, divided_by, ratio });
            }
        }
    }
    comparisons
}

/// All products.
fn table(chosen: &[Contender], rows: &[Row]) -> String {
    let first = ["size", "threads", "product", "m", "n", "k"].map(str::to_owned);
    let mut table = Table::new(first.into_iter().chain(chosen.iter().map(Contender::to_string)));
    for product in rows.chunks(chosen.len().max(1)) {
        let [first, ..] = product else { continue };
        let Product { m, n, k, .. } = first.product;
        let sizes = [m, n, k].map(|size| size.to_string());
        let speeds = product.iter().map(|row| format!("{:.0}", row.gflop_per_s));
        let keys = [first.size.to_string(), first.threads.to_string(), first.name.clone()];
        table.row(keys.into_iter().chain(sizes).chain(speeds));
    }
    table.markdown()
}

/// Geometric means and their ratios.
fn summary(chosen: &[Contender], rows: &[Row], comparisons: &[Comparison]) -> String {
    let is_shown = |pair: &&(Contender, Contender)| chosen.contains(&pair.0) && chosen.contains(&pair.1);
    let shown: Vec<_> = COMPARISONS.iter().filter(is_shown).collect();
    let first = ["geometric mean".to_owned(), "threads".to_owned()];
    let names = chosen.iter().map(Contender::to_string);
    let ratios = shown.iter().map(|(contender, other)| format!("{contender} ÷ {other}"));
    let mut table = Table::new(first.into_iter().chain(names).chain(ratios));
    for (size, threads) in groups(rows) {
        let speeds = chosen.iter().map(|contender| {
            let means = means(rows, (size, threads), *contender);
            means.map_or("-".to_owned(), |means| format!("{:.0}", median(&means)))
        });
        let ratios = shown.iter().map(|pair| {
            let found = comparisons.iter().find(|row| {
                (row.size, row.threads, (row.contender, row.divided_by)) == (size, threads, **pair)
            });
            ratio(found.map(|row| row.ratio))
        });
        table.row([size.to_string(), threads.to_string()].into_iter().chain(speeds).chain(ratios));
    }
    table.markdown()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::size::Pass;

    fn row(name: &str, contender: Contender, rounds: &[f64]) -> Row {
        let product = Product { pass: Pass::Fprop, m: 768, n: 384, k: 128 };
        let (size, name) = (SIZES[0].parse().unwrap(), name.to_owned());
        Row {
            size,
            threads: 1,
            name,
            product,
            contender,
            gflop_per_s: median(rounds),
            rounds: rounds.to_vec(),
        }
    }

    #[test]
    fn a_size_is_summarized_by_geometric_means() {
        let rows = [
            row("qkv fprop", Contender::F32, &[10.0, 20.0, 10.0]),
            row("qkv fprop", Contender::Gemm, &[5.0, 10.0, 5.0]),
            row("fc1 fprop", Contender::F32, &[40.0, 80.0, 40.0]),
            row("fc1 fprop", Contender::Gemm, &[5.0, 10.0, 5.0]),
        ];
        let comparisons = compare(&rows);
        let [only] = comparisons.as_slice() else { panic!("{comparisons:?}") };
        assert_eq!((only.contender, only.divided_by), (Contender::F32, Contender::Gemm));
        assert!((only.ratio.median - 4.0).abs() < 1e-12 && (only.ratio.highest - 4.0).abs() < 1e-12);
        let chosen = [Contender::F32, Contender::Gemm];
        let text = table(&chosen, &rows);
        assert!(
            text.contains("| 4/128/4/64/12 |       1 | fc1 fprop | 768 | 384 | 128 |  40 |    5 |"),
            "{text}"
        );
        assert_eq!(text.lines().count(), 4);
        let text = summary(&chosen, &rows, &comparisons);
        assert!(text.contains("| 4/128/4/64/12  |       1 |  20 |    5 | 4.00 (4.00 … 4.00) |"), "{text}");
    }

    #[test]
    fn contenders_have_programs() {
        assert_eq!(Program::of(Contender::Gemm), Program::Crates);
        assert_eq!(Program::of(Contender::Faer), Program::Crates);
        assert_eq!(Program::of(Contender::TorchBf16), Program::Python);
    }

    #[test]
    fn turns_take_time() {
        assert_eq!(seconds("0.5"), Ok(0.5));
        for wrong in ["0", "-1", "nan", "inf", "x", ""] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }
}
