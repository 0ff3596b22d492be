//! Every input there is: the codec over all 2³² f32 patterns, all f16 and bf16 patterns and all codes, judged by the
//! integer oracle of fp8-format's tests; with `--math`, our `exp` and `tanh` over all of f32, judged by f64.

mod codec;
mod draw;
mod math;
#[path = "../../../fp8-format/tests/oracle/mod.rs"]
mod oracle;
mod places;

use std::error::Error;
use std::fmt::LowerHex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Tries every input of the codec, or of the activation functions.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Exhaustive {
    /// Tests `exp` and `tanh` over all f32 instead of the codec; fails above 2 ulp
    #[arg(long)]
    pub(crate) math: bool,
    /// Tests only every N-th f32 pattern
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) stride: u32,
}

/// Runs the sweep, one line per path; an error if anything was wrong.
pub(crate) fn run(args: &Exhaustive) -> Result<(), Box<dyn Error>> {
    if args.math {
        return math::sweep_all(args.stride);
    }
    let start = Instant::now();
    let (conversions, mismatches) = codec::sweep_all(args.stride);
    println!("{:.0} s", start.elapsed().as_secs_f64());
    println!("{conversions} conversions, {mismatches} mismatches");
    if mismatches > 0 {
        return Err(
            format!("exhaustive: {mismatches} of {conversions} conversions differ from the oracle").into()
        );
    }
    Ok(())
}

/// Patterns taken at a time: with their codes they stay in a core's own cache.
const CHUNK: usize = 1 << 16;

/// Every `stride`-th 32-bit pattern, in chunks, each chunk visited by one thread of rayon's pool.
fn for_each_chunk(stride: u32, visit: impl Fn(&[u32]) + Sync) {
    use rayon::prelude::*;
    let count = (u64::from(u32::MAX)) / u64::from(stride) + 1;
    let chunks = count.div_ceil(CHUNK as u64);
    (0..chunks).into_par_iter().for_each_init(Vec::new, |patterns, chunk| {
        let first = chunk * CHUNK as u64;
        let last = count.min(first + CHUNK as u64);
        patterns.clear();
        // In range: the largest index times the stride is at most u32::MAX.
        patterns.extend((first..last).map(|i| i as u32 * stride));
        visit(patterns);
    });
}

/// The counts of one path, added up over all threads.
#[derive(Debug)]
struct Path {
    name: String,
    count: AtomicU64,
    mismatches: AtomicU64,
    nanoseconds: AtomicU64,
}

impl Path {
    fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            count: AtomicU64::new(0),
            mismatches: AtomicU64::new(0),
            nanoseconds: AtomicU64::new(0),
        }
    }

    /// Compares element by element; prints the first difference that this path ever sees.
    fn compare<B: Copy + PartialEq + LowerHex>(
        &self,
        input: impl Fn(usize) -> u64,
        got: &[B],
        expected: &[B],
        took: Duration,
    ) {
        // Equality of slices is much faster than counting.
        let wrong = if got == expected {
            0
        } else {
            got.iter().zip(expected).filter(|(g, e)| g != e).count() + got.len().abs_diff(expected.len())
        };
        if wrong > 0
            && self.mismatches.fetch_add(wrong as u64, Ordering::Relaxed) == 0
            && let Some(i) = got.iter().zip(expected).position(|(g, e)| g != e)
        {
            let (g, e) = (got[i], expected[i]);
            println!("{}: input {:#010x} gives {g:#04x}, expected {e:#04x}", self.name, input(i));
        }
        self.count.fetch_add(expected.len() as u64, Ordering::Relaxed);
        self.nanoseconds.fetch_add(took.as_nanos() as u64, Ordering::Relaxed);
    }

    /// One line: path, count, seconds that its threads spent in it. Returns (count, mismatches).
    fn report(&self) -> (u64, u64) {
        let count = self.count.load(Ordering::Relaxed);
        let mismatches = self.mismatches.load(Ordering::Relaxed);
        let seconds = self.nanoseconds.load(Ordering::Relaxed) as f64 * 1e-9;
        println!("{:<44} {count:>11} {seconds:>7.2} s  {mismatches} mismatches", self.name);
        (count, mismatches)
    }
}

/// The result of `f` and the time it took.
fn timed<R>(f: impl FnOnce() -> R) -> (R, Duration) {
    let start = Instant::now();
    let result = f();
    (result, start.elapsed())
}
