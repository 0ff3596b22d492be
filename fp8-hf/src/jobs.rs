//! Jobs on all cores: taken in order, stopped by the first error.

use crate::{Error, Result};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// The interval at which a job that waits for others checks whether they were stopped.
const WAIT: Duration = Duration::from_millis(20);

/// Shows other threads how far a long operation is, and lets them stop it. The example of [`quantize`](crate::quantize)
/// uses one.
#[derive(Debug, Default)]
pub struct Monitor {
    done: AtomicU64,
    total: AtomicU64,
    stopped: AtomicBool,
}

impl Monitor {
    /// Returns how much is done, and how much there is to do: bytes of the source, of which those that are read twice count twice,
    /// or tokens.
    #[must_use]
    pub fn progress(&self) -> (u64, u64) {
        (self.done.load(Relaxed), self.total.load(Relaxed))
    }

    /// Makes the operation stop soon and return an error.
    pub fn stop(&self) {
        self.stopped.store(true, Relaxed);
    }

    pub(crate) fn start(&self, total: u64) {
        self.done.store(0, Relaxed);
        self.total.store(total, Relaxed);
    }

    pub(crate) fn add(&self, done: u64) {
        self.done.fetch_add(done, Relaxed);
    }

    /// Notes that bytes are done, and returns an error if the operation is to stop.
    pub(crate) fn advance(&self, done: u64) -> Result<()> {
        self.add(done);
        if self.is_stopped() { Err(stopped()) } else { Ok(()) }
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Relaxed)
    }
}

/// Returns the number of threads for an operation: what was asked for, or as many as the caller's rayon pool has, which
/// computes on all cores unless the program limits it.
pub(super) fn threads(asked: Option<usize>) -> usize {
    asked.unwrap_or_else(rayon::current_num_threads).max(1)
}

/// The state that the threads of [`run`] share.
pub(super) struct Run<'a> {
    monitor: &'a Monitor,
    next: AtomicUsize,
    failed: AtomicBool,
    error: Mutex<Option<Error>>,
}

impl Run<'_> {
    fn is_over(&self) -> bool {
        self.failed.load(Relaxed) || self.monitor.is_stopped()
    }

    fn fail(&self, error: Error) {
        self.error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        self.failed.store(true, Relaxed);
    }

    /// Waits until `count` is zero; returns false if the other jobs were stopped before that. What is waited for must be the
    /// work of earlier jobs.
    pub(super) fn wait(&self, count: &Countdown) -> bool {
        let mut left = count.left.lock().unwrap_or_else(PoisonError::into_inner);
        while *left > 0 {
            if self.is_over() {
                return false;
            }
            let waited = count.changed.wait_timeout(left, WAIT);
            left = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

/// A number of jobs that others wait for.
#[derive(Debug, Default)]
pub(super) struct Countdown {
    left: Mutex<usize>,
    changed: std::sync::Condvar,
}

impl Countdown {
    pub(super) fn new(jobs: usize) -> Self {
        Self { left: Mutex::new(jobs), changed: std::sync::Condvar::new() }
    }

    /// Notes that a job is done; returns true for the last one.
    pub(super) fn finish_one(&self) -> bool {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        *left = left.saturating_sub(1);
        self.changed.notify_all();
        *left == 0
    }
}

/// Sets a flag when it is dropped by a panic.
struct OnPanic<'a>(&'a AtomicBool);

impl Drop for OnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Relaxed);
        }
    }
}

/// Runs `work` for each job, in their order, on this thread and `threads` − 1 others. Each thread has a state of its own.
/// Returns the first error; jobs that have not begun by then are not run. A panic of a job also stops the others, and is the
/// caller's.
pub(super) fn run<J: Sync, S>(
    jobs: &[J],
    threads: usize,
    monitor: &Monitor,
    state: impl Fn() -> S + Sync,
    work: impl Fn(&Run<'_>, &mut S, &J) -> Result<()> + Sync,
) -> Result<()> {
    let run =
        Run { monitor, next: AtomicUsize::new(0), failed: AtomicBool::new(false), error: Mutex::new(None) };
    let worker = || {
        // A job that waits for one that panicked would wait forever.
        let _stops = OnPanic(&run.failed);
        let mut state = state();
        while let Some(job) = jobs.get(run.next.fetch_add(1, Relaxed)) {
            if run.is_over() {
                return;
            }
            if let Err(error) = work(&run, &mut state, job) {
                run.fail(error);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.min(jobs.len()) {
            // With fewer threads than asked for, the work takes longer.
            let _ = std::thread::Builder::new().spawn_scoped(scope, worker);
        }
        worker();
    });
    match run.error.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None if monitor.is_stopped() => Err(stopped()),
        None => Ok(()),
    }
}

fn stopped() -> Error {
    Error::Option {
        part: "Monitor".into(),
        option: "stop",
        value: "true".into(),
        remedy: "the operation was stopped before its end, and nothing was written".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_job_runs_once_and_the_first_error_stops_the_rest() {
        let jobs: Vec<usize> = (0..500).collect();
        let sum = AtomicUsize::new(0);
        let add = |_: &Run<'_>, (): &mut (), job: &usize| {
            sum.fetch_add(*job, Relaxed);
            Ok(())
        };
        run(&jobs, 4, &Monitor::default(), || (), add).unwrap();
        assert_eq!(sum.into_inner(), 500 * 499 / 2);
        let ran = AtomicUsize::new(0);
        let fail = |_: &Run<'_>, (): &mut (), job: &usize| {
            ran.fetch_add(1, Relaxed);
            if *job == 7 { Err(Error::NotFound { path: "seven".into() }) } else { Ok(()) }
        };
        let error = run(&jobs, 1, &Monitor::default(), || (), fail).unwrap_err();
        assert!(error.to_string().contains("seven") && ran.into_inner() == 8, "{error}");
    }

    #[test]
    fn a_stopped_operation_ends_with_a_sentence() {
        let monitor = Monitor::default();
        let error = run(
            &[0, 1],
            2,
            &monitor,
            || (),
            |_, (), _| {
                monitor.stop();
                Ok(())
            },
        );
        let text = "Monitor: stop = true: the operation was stopped before its end, and nothing was written";
        assert_eq!(error.unwrap_err().to_string(), text);
    }

    #[test]
    fn a_threads_number_is_that_of_the_callers_pool() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        assert_eq!(pool.install(|| threads(None)), 3);
        assert_eq!((threads(Some(2)), threads(Some(0))), (2, 1));
    }

    #[test]
    fn a_job_that_waits_ends_when_others_panic() {
        let never = Countdown::new(1);
        let work = |run: &Run<'_>, (): &mut (), &job: &usize| match job {
            0 => panic!("a job of a test panics"),
            _ => {
                assert!(!run.wait(&never));
                Ok(())
            }
        };
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            run(&[0, 1], 2, &Monitor::default(), || (), work)
        }));
        assert!(caught.is_err());
    }

    #[test]
    fn a_job_that_waits_ends_when_others_fail() {
        let never = Countdown::new(1);
        let error = run(
            &[0, 1],
            2,
            &Monitor::default(),
            || (),
            |run, (), &job| match job {
                0 => Err(Error::NotFound { path: "zero".into() }),
                _ => {
                    assert!(!run.wait(&never));
                    Ok(())
                }
            },
        );
        assert!(error.is_err());
    }
}
