//! `cargo xtask bench codec`: each path of the codec against a loop that does nothing but move the bytes, measured in turns
//! in one process, and with `--peers` against other libraries.
//!
//! A ratio compares medians of the same run: ceiling and works take turns, so that a machine that slows down slows both.
#![cfg_attr(not(test), warn(clippy::too_many_lines))]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal")]

mod blocks;
mod buffer;
mod ceiling;
mod peers;
mod plan;
mod row;
mod work;

use clap::Parser;
use row::Row;
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use work::{Buffers, Group};

/// Elements of a measurement: in the nearest caches, in the last one, in memory.
const ELEMENTS: [usize; 3] = [16 << 10, 1 << 20, 64 << 20];
/// One measurement takes so long at least.
const LEAST: Duration = Duration::from_micros(500);

#[derive(Parser)]
#[command(name = "cargo xtask bench codec")]
struct Options {
    /// Other libraries, too: the float8 crate, and with this interpreter torch and ml_dtypes
    #[arg(long, value_name = "PYTHON")]
    peers: Option<PathBuf>,
    /// Writes the rows to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measures only rows that contain this text, such as "f32  e4m3" or "64 Mi  1  avx512"; `--peers` measures all rows of
    /// other libraries
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// Takes the median of so many rounds
    #[arg(long, value_name = "N", default_value = "9", value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// Uses pages of 4 KiB instead of 2 MiB
    #[arg(long)]
    small_pages: bool,
}

fn run() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    // A file that cannot be written is found before the minutes that it would have held.
    let part = options.json.as_ref().map(|file| file.with_extension("json.part"));
    if let Some(part) = &part {
        let why = |error| {
            format!("--json: cannot write {}: {error}; name a file in a folder that is there", part.display())
        };
        std::fs::write(part, "").map_err(why)?;
    }
    let threads = numbers_of_threads(std::thread::available_parallelism()?.get());
    println!("{}", machine());
    println!(
        "{:<18} {:<4} {:<4} {:<12} {:>8} {:>2}  {:<16} {:>6}",
        "work", "from", "to", "scale, shape", "elements", "th", "path or peer", "ratio"
    );
    let mut rows = Vec::new();
    for elements in ELEMENTS {
        let mut groups = plan::groups(if elements == ELEMENTS[2] { &threads } else { &[] });
        if options.peers.is_some() {
            groups.extend(work::float8());
        }
        for group in &mut groups {
            for task in &mut group.tasks {
                task.row.elements = elements;
                task.row.shape = task.shape.map(|shape| shape.of(elements));
            }
            // In the caches square matrices say what tall ones would.
            let is_tall = |task: &work::Task| task.shape == Some(work::Shape::Tall);
            group.tasks.retain(|task| elements == ELEMENTS[2] || !is_tall(task));
            group.tasks.retain(|task| task.row.line().contains(&options.only));
        }
        groups.retain(|group| !group.tasks.is_empty());
        if groups.is_empty() {
            continue;
        }
        let mut buffers = Buffers::new(elements, !options.small_pages)?;
        for group in groups {
            let measured = match group.threads {
                1 => measure(&group, &mut buffers, options.rounds),
                threads => {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
                    pool.install(|| measure(&group, &mut buffers, options.rounds))
                }
            };
            for row in measured {
                println!("{}", row.line());
                rows.push(row);
            }
        }
    }
    if rows.is_empty() {
        part.as_ref().map_or(Ok(()), std::fs::remove_file)?;
        let only = &options.only;
        return Err(format!(
            "--only {only:?}: no line has this text; a line reads `quantize           f32  e4m3 any`, …"
        )
        .into());
    }
    if let Some(python) = &options.peers {
        for row in peers::measure(python, &threads, &rows)? {
            println!("{}", row.line());
            rows.push(row);
        }
        for line in peers::comparison(&rows) {
            println!("{line}");
        }
    }
    if let (Some(file), Some(part)) = (&options.json, &part) {
        // Whole or not at all.
        let all = serde_json::json!({ "machine": machine(), "rows": rows });
        std::fs::write(part, serde_json::to_vec_pretty(&all)?)?;
        std::fs::rename(part, file)?;
    }
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// One, two and all, as far as they are there.
fn numbers_of_threads(all: usize) -> Vec<usize> {
    let mut numbers = vec![1, all.min(2), all];
    numbers.dedup();
    numbers
}

/// The CPU's name and what is known of its paths.
fn machine() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split(": ").nth(1));
    let paths: Vec<_> = fp8_format::slice::Path::available().map(|path| path.name()).collect();
    format!("{}; paths: {}", name.unwrap_or(std::env::consts::ARCH), paths.join(", "))
}

/// Returns the seconds of one of `calls` calls. An untimed call comes first: it replaces the lines that the previous work left
/// in the caches, which otherwise are written to memory at the expense of this one.
fn seconds(mut call: impl FnMut(), calls: usize) -> f64 {
    call();
    let start = Instant::now();
    (0..calls).for_each(|_| call());
    start.elapsed().as_secs_f64() / calls as f64
}

/// Returns the number of calls that together take as long as a measurement must, at least 1.
fn calls(mut call: impl FnMut()) -> usize {
    let once = seconds(&mut call, 1).max(1e-9);
    ((LEAST.as_secs_f64() / once) as usize).max(1)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Ceiling and tasks in turns.
fn measure(group: &Group, buffers: &mut Buffers, rounds: u16) -> Vec<Row> {
    let elements = buffers.elements;
    let copy = |variant, buffers: &mut Buffers| {
        let (read, written) = buffers.of_ceiling(group.lines);
        copy(read, written, group.lines, variant, group.threads);
    };
    let counts: Vec<usize> =
        ceiling::VARIANTS.iter().map(|variant| calls(|| copy(*variant, buffers))).collect();
    let task_counts: Vec<usize> = group.tasks.iter().map(|task| calls(|| (task.run)(buffers))).collect();
    let mut ceilings = vec![Vec::new(); counts.len()];
    let mut times = vec![Vec::new(); group.tasks.len()];
    for _ in 0..rounds {
        for ((times, variant), count) in ceilings.iter_mut().zip(ceiling::VARIANTS).zip(&counts) {
            times.push(seconds(|| copy(variant, buffers), *count));
        }
        for ((times, task), count) in times.iter_mut().zip(&group.tasks).zip(&task_counts) {
            times.push(seconds(|| (task.run)(buffers), *count));
        }
    }
    let ceiling = ceilings.into_iter().map(median).fold(f64::INFINITY, f64::min);
    let row = |(task, times): (&work::Task, Vec<f64>)| {
        let time = median(times);
        let gb_per_s = task.row.bytes() * elements as f64 / time / 1e9;
        // The bytes are the same, so that times compare as throughputs do.
        Row { elements, gb_per_s, ceiling_ratio: Some(ceiling / time), ..task.row.clone() }
    };
    group.tasks.iter().zip(times).map(row).collect()
}

/// The ceiling's loop, by so many threads.
fn copy(read: &[u8], written: &mut [u8], lines: [usize; 2], variant: ceiling::Variant, threads: usize) {
    if threads == 1 {
        return ceiling::run(read, written, lines, variant);
    }
    use rayon::prelude::*;
    let steps = (read.len() / 64 / lines[0]).div_ceil(threads);
    read.par_chunks(steps * lines[0] * 64)
        .zip(written.par_chunks_mut((steps * lines[1] * 64).max(1)))
        .for_each(|(read, written)| ceiling::run(read, written, lines, variant));
}

#[cfg(test)]
mod tests {
    use super::numbers_of_threads;

    #[test]
    fn two_threads_are_measured_wherever_there_are_two() {
        assert_eq!(numbers_of_threads(1), [1]);
        assert_eq!(numbers_of_threads(2), [1, 2]);
        assert_eq!(numbers_of_threads(16), [1, 2, 16]);
    }
}
