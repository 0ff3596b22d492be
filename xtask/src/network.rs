//! `cargo xtask network`: two ranks over a real link, between network namespaces of this machine.
//!
//! The link is made so slow that sums of gradients alone take 0.8 of a backward pass. Sums beside backward must hide that, which a
//! loopback device cannot show. Then the link is cut.

pub(crate) mod namespaces;

use std::path::{Path, PathBuf};
use std::process::{Child, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use namespaces::{ADDRESSES, Namespaces};
use xshell::cmd;

use crate::artifact;
use crate::workspace::{Result, shell};

/// The time of a reduction of all gradients, as a part of that of a backward pass.
const SHARE: f64 = 0.8;
/// The longest step with sums beside backward, as a multiple of one without sums.
const BAR: f64 = 1.15;
/// The time within which both ranks notice that the link is cut.
const NOTICED: Duration = Duration::from_secs(10);
const PORT: &str = "29600";

#[derive(clap::Args)]
pub(crate) struct Network {
    /// Rounds in which each way of summing has its turn
    #[arg(long, default_value = "5", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Steps of a turn
    #[arg(long, default_value = "10", value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
}

/// The result of one rank's program: the medians of its times in milliseconds, and the bytes that it sends in a step.
#[derive(Debug, Clone, Copy)]
struct Times {
    step: f64,
    backward: f64,
    reduction: f64,
    bytes: f64,
}

pub(crate) fn run(options: &Network) -> Result<ExitCode> {
    let link = match Namespaces::new() {
        Ok(link) => link,
        Err(error) => {
            println!(
                "skipped: this machine has no network namespaces ({error}); it takes Linux, root, ip and tc"
            );
            return Ok(ExitCode::SUCCESS);
        }
    };
    let program = program()?;
    let turn = |mode: &str| measured(&link, &program, mode, options.steps as usize);
    let Times { backward, .. } = turn("none")?;
    let target = SHARE * backward;
    let Times { bytes, .. } = turn("reduction")?;
    let mut rate = bytes / target * 1e3;
    link.limit(rate)?;
    let first = turn("reduction")?.reduction;
    rate *= first / target; // what a message takes besides its bytes
    link.limit(rate)?;
    let alone = turn("reduction")?.reduction;
    println!(
        "{:.1} MB of gradients at {:.1} MB/s: {alone:.0} ms, {:.2} of a backward pass of {backward:.0} ms\n",
        bytes / 1e6,
        rate / 1e6,
        alone / backward
    );
    let overlap = compare(options, &turn)?;
    drop(link);
    let link = Namespaces::new()?;
    let is_noticed = cut(&link, &program)?;
    let passes = overlap <= BAR && is_noticed;
    println!(
        "\n{}: {overlap:.2} with sums beside backward, at most {BAR}",
        if passes { "ok" } else { "FAILED" }
    );
    Ok(if passes { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Builds the bench and returns its program.
fn program() -> Result<PathBuf> {
    let sh = shell()?;
    let format = "json-render-diagnostics";
    let bench = ["-p", "fp8-nn", "--all-features", "--bench", "data_parallel", "--no-run"];
    let messages = cmd!(sh, "cargo bench {bench...} --message-format {format}").quiet().read()?;
    let program = messages.lines().find_map(|line| artifact::file(line, "bench", "data_parallel"));
    program.ok_or_else(|| "cargo reports no program for the bench data_parallel".into())
}

/// Prints a table of all ways of summing, and returns the time of sums beside backward as a multiple of that without.
fn compare(options: &Network, turn: &impl Fn(&str) -> Result<Times>) -> Result<f64> {
    let modes = ["none", "blocking", "overlap"];
    let mut times = modes.map(|_| Vec::new());
    for _ in 0..options.rounds {
        for (mode, times) in modes.iter().zip(&mut times) {
            times.push(turn(mode)?.step);
        }
    }
    println!("medians of {} rounds of {} steps", options.rounds, options.steps);
    println!("{:<10} {:>9} {:>9}", "sums", "step, ms", "÷ none");
    let medians = times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
    });
    for (mode, median) in modes.iter().zip(medians) {
        println!("{mode:<10} {median:>9.1} {:>9.2}", median / medians[0]);
    }
    Ok(medians[2] / medians[0])
}

/// Starts both ranks.
fn start(link: &Namespaces, program: &Path, mode: &str, steps: usize) -> Result<Vec<Child>> {
    let rank = |rank: usize| {
        let mut command = link.command(rank, program);
        command.env("FP8_BENCH_MODE", mode).env("FP8_BENCH_STEPS", steps.to_string());
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2").env("RAYON_NUM_THREADS", "1");
        command.env("MASTER_ADDR", ADDRESSES[0]).env("MASTER_PORT", PORT).env("RUST_BACKTRACE", "0");
        command.env("TORCHELASTIC_RUN_ID", "network");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(command.spawn()?)
    };
    (0..2).map(rank).collect()
}

/// Runs both ranks, and returns what rank 0 has measured.
fn measured(link: &Namespaces, program: &Path, mode: &str, steps: usize) -> Result<Times> {
    let mut times = None;
    for rank in start(link, program, mode, steps)? {
        let output = rank.wait_with_output()?;
        if !output.status.success() {
            return Err(format!("{mode}: {}", String::from_utf8_lossy(&output.stderr)).into());
        }
        let text = String::from_utf8(output.stdout)?;
        times.get_or_insert(times_of(&text).ok_or_else(|| format!("{mode}: {text}"))?);
    }
    times.ok_or_else(|| "no rank ran".into())
}

fn times_of(text: &str) -> Option<Times> {
    let mut numbers = text.split_whitespace().map_while(|number| number.parse().ok());
    let [step, backward, reduction, bytes] = [0; 4].map(|_| numbers.next());
    Some(Times { step: step?, backward: backward?, reduction: reduction?, bytes: bytes? })
}

/// Cuts the link while both ranks train. Returns whether both have noticed in time, and named the other.
fn cut(link: &Namespaces, program: &Path) -> Result<bool> {
    println!("\nthe link is cut");
    let mut ranks = start(link, program, "overlap", 100_000)?;
    thread::sleep(Duration::from_secs(3));
    link.cut()?;
    let (cut, mut ends) = (Instant::now(), vec![None; ranks.len()]);
    while ends.contains(&None) && cut.elapsed() < 3 * NOTICED {
        for (rank, end) in ranks.iter_mut().zip(&mut ends) {
            if end.is_none() && rank.try_wait()?.is_some() {
                *end = Some(cut.elapsed());
            }
        }
        thread::sleep(Duration::from_millis(10));
    }
    let mut all = true;
    for (rank, (mut child, end)) in ranks.into_iter().zip(ends).enumerate() {
        let _ = child.kill(); // it has ended, if all is well
        let text = child.wait_with_output()?.stderr;
        let text = String::from_utf8_lossy(&text);
        let sentence = text.lines().find(|line| line.contains(&format!("rank {} is lost", 1 - rank)));
        all &= sentence.is_some() && end.is_some_and(|end| end <= NOTICED);
        let when = end.map_or("not".to_owned(), |end| format!("after {:.1} s", end.as_secs_f64()));
        println!("rank {rank} has ended {when}: {}", sentence.unwrap_or(&text));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_rank_prints_is_read() {
        let times = times_of("12.50 6.25 3.00 400 3f80abcd\n").unwrap();
        assert_eq!([times.step, times.backward, times.reduction, times.bytes], [12.5, 6.25, 3.0, 400.0]);
        assert!(times_of("12.5 x").is_none() && times_of("").is_none());
    }
}
