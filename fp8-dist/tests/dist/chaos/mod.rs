//! Groups that are attacked at random: killed and stopped processes, garbage, slow bytes, two jobs on one port.
//!
//! A try is a function of the seed and its number. Tests make a few; `cargo xtask chaos --seed S` sets [`SEED`] and makes
//! them all.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "how a test fails, and reports")]

mod drips;
mod garbage;
mod jobs;
#[cfg(unix)]
mod kills;

use std::panic;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, Once};
use std::thread;
use std::time::Duration;

/// The variable that holds the seed of a whole run.
const SEED: &str = "FP8_CHAOS_SEED";
/// The time that a slow machine may add to any wait.
const SLACK: Duration = Duration::from_secs(2);

/// Returns the longest time that a rank may take to join with this deadline: README, "Processes".
fn joining(deadline: Duration) -> Duration {
    deadline + Duration::from_secs(2) + SLACK
}

/// Returns the longest time that a collective may take with this deadline.
fn exchange(deadline: Duration) -> Duration {
    deadline + (deadline / 4).clamp(Duration::from_millis(100), Duration::from_secs(2)) + SLACK
}

/// Random numbers: splitmix64.
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    /// From 0 to `end - 1`.
    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    fn ms(&mut self, end: usize) -> Duration {
        Duration::from_millis(self.below(end) as u64)
    }
}

/// Makes `full` tries where a seed is set and `short` otherwise, `at_once` at a time. Each returns what it saw, one word or
/// two, or what went wrong.
fn attack(
    name: &str,
    [full, short]: [usize; 2],
    at_once: usize,
    attempt: impl Fn(Draw) -> Result<String, String> + Sync,
) {
    let seed = std::env::var(SEED).ok();
    let tries = if seed.is_some() { full } else { short };
    let seed: u64 = seed.map_or(1, |seed| seed.parse().unwrap());
    let salt = name.bytes().fold(0u64, |salt, byte| salt.wrapping_mul(31).wrapping_add(byte.into()));
    count_panics();
    let panics = PANICS.load(Ordering::Relaxed);
    let (next, seen) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= tries {
                        return;
                    }
                    let draw = Draw(Draw(seed ^ salt << 20 ^ (number as u64) << 40).next());
                    let outcome = attempt(draw).map_err(|error| format!("try {number}: {error}"));
                    seen.lock().unwrap().push(outcome);
                }
            });
        }
    });
    let seen = seen.into_inner().unwrap();
    let failures: Vec<&String> = seen.iter().filter_map(|outcome| outcome.as_ref().err()).collect();
    let mut kinds: Vec<(&String, usize)> = Vec::new();
    for kind in seen.iter().filter_map(|outcome| outcome.as_ref().ok()) {
        match kinds.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, count)) => *count += 1,
            None => kinds.push((kind, 1)),
        }
    }
    kinds.sort();
    let kinds: Vec<String> = kinds.iter().map(|(kind, count)| format!("{kind} {count}")).collect();
    let panics = PANICS.load(Ordering::Relaxed) - panics;
    println!("chaos\t{name}\t{tries}\t{}\t{panics}\t{}", failures.len(), kinds.join(", "));
    assert!(failures.is_empty() && panics == 0, "seed {seed}, {panics} panics: {failures:#?}");
}

/// Panics of this library's own threads, which no caller sees.
static PANICS: AtomicUsize = AtomicUsize::new(0);

fn count_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if thread::current().name().is_some_and(|name| name.starts_with("fp8-dist")) {
                PANICS.fetch_add(1, Ordering::Relaxed);
            }
            usual(info);
        }));
    });
}
