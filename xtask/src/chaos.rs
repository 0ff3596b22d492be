//! `cargo xtask chaos`: attacks groups of processes at random, over TCP.
//!
//! The attacks are tests of fp8-dist, `tests/dist/chaos`, of which every test run makes a few. With a seed in the environment
//! each makes all its tries: processes that are killed or stopped, garbage, slow bytes, two jobs on one port. A failure is
//! a rank that ends with the wrong error or too late, an exchange between two jobs, or a panic.
//!
//! With `--layout dp2`, `tp2`, `tp2-sp` or `dp2tp2` it attacks `fp8 train` on two or four ranks instead.

mod training;

use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use xshell::cmd;

use crate::workspace::{Result, shell};
use crate::{artifact, process};

/// Far longer than all tries take.
const LIMIT: Duration = Duration::from_secs(3600);
/// The start of a line that the tests print for the table. Tabs separate its fields: name, tries, failures, panics, and
/// what was seen.
const MARK: &str = "chaos\t";

#[derive(clap::Args)]
pub(crate) struct Chaos {
    /// Seed of the random attacks
    #[arg(long, value_name = "S", default_value_t = 1)]
    seed: u64,
    /// The target: groups of processes that sum, or a training on two ranks, or on four for dp2tp2
    #[arg(long, value_enum, default_value = "groups")]
    layout: Layout,
    /// Number of faults in a training
    #[arg(long, value_name = "N", default_value = "75", value_parser = clap::value_parser!(u32).range(1..))]
    faults: u32,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Layout {
    Groups,
    Dp2,
    Tp2,
    Tp2Sp,
    Dp2tp2,
}

impl Layout {
    /// Returns the ranks of a training and its options; `None` for groups.
    const fn training(self) -> Option<(usize, &'static str)> {
        match self {
            Self::Groups => None,
            Self::Dp2 => Some((2, "--dp 2")),
            Self::Tp2 => Some((2, "--tp 2")),
            Self::Tp2Sp => Some((2, "--tp 2 --sequence-parallel")),
            Self::Dp2tp2 => Some((4, "--dp 2 --tp 2 --sequence-parallel")),
        }
    }
}

pub(crate) fn run(options: &Chaos) -> Result<ExitCode> {
    let Some((ranks, layout)) = options.layout.training() else { return groups(options) };
    let start = Instant::now();
    let passes = training::run(options.seed, options.faults as usize, ranks, layout)?;
    println!("{layout}, seed {}, {:.0} s", options.seed, start.elapsed().as_secs_f64());
    Ok(if passes { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn groups(options: &Chaos) -> Result<ExitCode> {
    let sh = shell()?;
    let format = "json-render-diagnostics";
    let test = ["-p", "fp8-dist", "--all-features", "--test", "dist_over_tcp", "--no-run"];
    let messages = cmd!(sh, "cargo test {test...} --message-format {format}").quiet().read()?;
    let program = messages.lines().find_map(|line| artifact::file(line, "test", "dist_over_tcp"));
    let program = program.ok_or("cargo reports no program for the test dist_over_tcp")?;

    let mut command = Command::new(program);
    command.args(["chaos::", "--nocapture", "--test-threads=1"]);
    command.env("FP8_CHAOS_SEED", options.seed.to_string()).env("RUST_BACKTRACE", "0");
    let start = Instant::now();
    let finished = process::watch(command, LIMIT, |_| false)?;
    let (table, count) = table(&finished.output);
    print!("{table}");
    println!("seed {}, {:.0} s", options.seed, start.elapsed().as_secs_f64());
    if finished.succeeded() && count > 0 {
        return Ok(ExitCode::SUCCESS);
    }
    print!("{}", finished.output);
    match finished.status {
        Some(_) => println!("FAILED; to repeat these attacks: cargo xtask chaos --seed {}", options.seed),
        None => println!("FAILED: still running after {LIMIT:?}"),
    }
    Ok(ExitCode::FAILURE)
}

/// Returns a table of what the tests report, and its number of rows.
fn table(output: &str) -> (String, usize) {
    // The first line of a test is behind its name.
    let rows: Vec<Vec<&str>> = output
        .lines()
        .filter_map(|line| Some(line.split_once(MARK)?.1.splitn(5, '\t').collect()))
        .filter(|row: &Vec<&str>| row.len() == 5)
        .collect();
    let mut table = format!("{:<22} {:>5} {:>8} {:>6}  seen\n", "attack", "tries", "failures", "panics");
    for row in &rows {
        if let [name, tries, failures, panics, seen] = row.as_slice() {
            table += &format!("{name:<22} {tries:>5} {failures:>8} {panics:>6}  {seen}\n");
        }
    }
    (table, rows.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_the_tests_are_gathered_into_a_table() {
        let output = "running 2 tests\ntest chaos::a ... chaos\tdripping bytes\t3\t0\t0\tjoined 3\nok\n\
                      chaos\tbroken\nnoise\nchaos\tkills and stops\t4\t1\t0\tkilled 2, stopped 1\n";
        let (table, count) = table(output);
        assert_eq!(count, 2);
        assert!(table.contains("dripping bytes             3        0      0  joined 3\n"), "{table}");
        assert!(
            table.contains("kills and stops            4        1      0  killed 2, stopped 1\n"),
            "{table}"
        );
    }
}
