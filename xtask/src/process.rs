//! Programs that are started, watched and stopped: their output, how they ended, and several at once.

use std::fs::{self, File};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::workspace::Result;

/// The interval between two looks at the output of a running program.
const GLANCE: Duration = Duration::from_millis(4);

/// The exit status and the output of a program.
pub(crate) struct Finished {
    /// `None` if it was stopped.
    pub(crate) status: Option<ExitStatus>,
    /// Standard output and error, as they came.
    pub(crate) output: String,
}

impl Finished {
    pub(crate) fn succeeded(&self) -> bool {
        self.status.is_some_and(|status| status.success())
    }
}

/// Runs a program to its end, or until `limit` has passed or `enough` is content with its output so far.
pub(crate) fn watch(command: Command, limit: Duration, enough: impl Fn(&str) -> bool) -> Result<Finished> {
    let start = Instant::now();
    let mut seen = 0;
    follow(command, |output| {
        let is_new = output.len() != seen;
        seen = output.len();
        start.elapsed() > limit || (is_new && enough(output))
    })
}

/// Runs a program to its end, or until `stop`, which is asked at every glance with the output so far.
pub(crate) fn follow(mut command: Command, mut stop: impl FnMut(&str) -> bool) -> Result<Finished> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("output");
    let file = File::create(&path)?;
    command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
    let mut child =
        command.spawn().map_err(|error| format!("{}: {error}", command.get_program().display()))?;
    let read = || fs::read(&path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let (mut size, mut output) = (0, String::new());
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        let now = fs::metadata(&path)?.len();
        if now != size {
            (size, output) = (now, read()?);
        }
        if stop(&output) {
            child.kill()?;
            child.wait()?;
            break None;
        }
        thread::sleep(GLANCE);
    };
    Ok(Finished { status, output: read()? })
}

/// Does all jobs, `at_once` at a time, and returns the results in the order of the jobs. `work` also gets a job's index.
pub(crate) fn each<J: Sync, R: Send>(
    jobs: &[J],
    at_once: usize,
    work: impl Fn(usize, &J) -> R + Sync,
) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::with_capacity(jobs.len()));
    thread::scope(|scope| {
        for _ in 0..at_once.clamp(1, jobs.len().max(1)) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(job) = jobs.get(index) else { break };
                    let result = work(index, job);
                    done.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push((index, result));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}

/// Processors of this machine.
pub(crate) fn cores() -> usize {
    thread::available_parallelism().map_or(1, |count| count.get())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_keep_the_order_of_their_jobs() {
        let jobs: Vec<u64> = (0..20).collect();
        let results = each(&jobs, 3, |index, job| {
            thread::sleep(Duration::from_millis((20 - job) / 4));
            (index, job * job)
        });
        assert!(results.iter().enumerate().all(|(index, result)| *result == (index, (index * index) as u64)));
        assert_eq!(each(&[0_u8; 0], 2, |index, _| index), [0; 0]);
    }

    #[cfg(unix)]
    #[test]
    fn a_program_is_stopped_at_its_limit_or_when_it_has_said_enough() {
        let sh = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            command
        };
        let long = Duration::from_secs(60);
        let ended = watch(sh("echo out; echo err >&2; exit 3"), long, |_| false).unwrap();
        assert_eq!((ended.status.and_then(|s| s.code()), &*ended.output), (Some(3), "out\nerr\n"));
        assert!(watch(sh("exec sleep 60"), Duration::from_millis(20), |_| false).unwrap().status.is_none());
        let stopped = watch(sh("echo enough; exec sleep 60"), long, |text| text.contains("enough")).unwrap();
        assert!(stopped.status.is_none() && !stopped.succeeded());
    }
}
