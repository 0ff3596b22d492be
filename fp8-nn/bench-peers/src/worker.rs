//! A contender in a process of its own, which answers each line with a line.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Seek as _, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::result::Result;

/// A process that waits for work. Dropping it ends the process.
#[derive(Debug)]
pub(crate) struct Worker {
    name: String,
    child: Child,
    /// `None` once the worker was told to end.
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    /// The stderr of the process, for the error message if it ends too early.
    log: File,
    /// The library and its version, as the process names them.
    pub(crate) library: String,
}

impl Worker {
    /// Starts a process and waits until it is ready.
    pub(crate) fn start(name: &str, mut command: Command) -> Result<Self> {
        let log = tempfile::tempfile()?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log.try_clone()?);
        let program = command.get_program().to_string_lossy().into_owned();
        let mut child = command.spawn().map_err(|error| format!("{name}: cannot run {program}: {error}"))?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(format!("{name}: {program} has no pipes").into());
        };
        let (input, output) = (Some(input), BufReader::new(output));
        let mut worker = Self { name: name.to_owned(), child, input, output, log, library: String::new() };
        let line = worker.read()?;
        let library = line.strip_prefix("ready ");
        worker.library =
            library.ok_or_else(|| format!("{name}: said `{line}` instead of `ready`"))?.to_owned();
        Ok(worker)
    }

    /// Sends a line and returns the numbers of the answer, after all threads of the process have gone to sleep.
    pub(crate) fn ask(&mut self, line: &str) -> Result<Vec<f64>> {
        if let Some(input) = &mut self.input {
            // If the process has ended, reading says why.
            let _ = writeln!(input, "{line}").and_then(|()| input.flush());
        }
        let answer = self.read()?;
        let numbers: std::result::Result<_, _> = answer.split_whitespace().map(str::parse).collect();
        let numbers = numbers.map_err(|_| format!("{}: answered `{line}` with `{answer}`", self.name))?;
        self.settle();
        Ok(numbers)
    }

    /// Returns the id of the process.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    fn read(&mut self) -> Result<String> {
        let mut line = String::new();
        if self.output.read_line(&mut line)? == 0 {
            let status = self.child.wait()?;
            let mut log = String::new();
            self.log.rewind()?;
            self.log.read_to_string(&mut log)?;
            let lines: Vec<&str> = log.lines().collect();
            let last = lines[lines.len().saturating_sub(20)..].join("\n");
            return Err(format!("{}: ended early, {status}:\n{last}", self.name).into());
        }
        Ok(line.trim_end().to_owned())
    }

    /// Waits until no thread of the process runs. The threads of a pool keep spinning for a while after their work.
    fn settle(&self) {
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(1) {
            sleep(Duration::from_millis(2));
            match running_threads(self.child.id()) {
                Some(0) => return,
                Some(_) => {}
                // Unknown on this system: long enough for the thread pools that are measured here.
                None => return sleep(Duration::from_millis(100)),
            }
        }
    }
}

/// The number of threads of a process that run or could run, where Linux's `/proc` says it.
fn running_threads(process: u32) -> Option<usize> {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).ok()?;
    let states = tasks.filter_map(|task| {
        let stat = std::fs::read_to_string(task.ok()?.path().join("stat")).ok()?;
        is_running(&stat)
    });
    Some(states.filter(|running| *running).count())
}

/// Whether the state after the parenthesized name, which may contain anything, is `R`.
fn is_running(stat: &str) -> Option<bool> {
    Some(stat.rsplit_once(") ")?.1.starts_with('R'))
}

impl Drop for Worker {
    fn drop(&mut self) {
        // The end of its input ends the process.
        self.input = None;
        for _ in 0..100 {
            match self.child.try_wait() {
                Ok(None) => sleep(Duration::from_millis(20)),
                _ => return,
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_read_after_any_name() {
        assert_eq!(is_running("17 (a) S (b) R 1 17"), Some(true));
        assert_eq!(is_running("17 (python) S 1 R 17"), Some(false));
        assert_eq!(is_running(""), None);
    }

    #[test]
    #[cfg(unix)]
    fn a_worker_answers_and_one_that_dies_says_why() {
        let shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            Worker::start("peer", command)
        };
        let mut worker =
            shell("echo ready sh 1; read line; echo 0.5 $line; read line; echo oh no >&2; exit 3").unwrap();
        assert_eq!(worker.library, "sh 1");
        assert_eq!(worker.ask("7").unwrap(), [0.5, 7.0]);
        let died = worker.ask("8").unwrap_err().to_string();
        assert_eq!(died, "peer: ended early, exit status: 3:\noh no");
        let early = shell("echo hello").unwrap_err().to_string();
        assert_eq!(early, "peer: said `hello` instead of `ready`");
        let missing = Worker::start("peer", Command::new("/nowhere/python")).unwrap_err().to_string();
        assert!(missing.starts_with("peer: cannot run /nowhere/python: "), "{missing}");
    }
}
