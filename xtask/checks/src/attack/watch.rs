//! Starts attacking processes, watches them, and starts them again behind the case that ended one.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use super::caught::BROKEN;
use super::options::Part;
use super::tally::{Failure, Tally};
use crate::result::Result;

/// The memory that a process may allocate, in KiB. Valid requests beyond it are refused instead of exhausting the
/// machine.
const MEMORY: u64 = 3 << 20;
/// The number of bytes shown from the end of a process's standard error.
const LAST_WORDS: usize = 1500;

/// Cases of one part on one device, for one process at a time.
pub(super) struct Range {
    pub(super) part: Part,
    pub(super) device: String,
    pub(super) seed: u64,
    pub(super) first: u64,
    pub(super) last: u64,
    pub(super) stride: u64,
    /// Whether the process tells what it does.
    pub(super) talks: bool,
    pub(super) deadline: Option<Instant>,
    /// The time limit for a case.
    pub(super) limit: Duration,
    /// With NVIDIA's libraries, where the simulated device stands for a GPU.
    pub(super) libraries: Option<PathBuf>,
}

/// This program again, in the role of an attacker.
pub(super) fn command(range: &Range, number: u64) -> Result<Command> {
    let program = std::env::current_exe()?;
    let mut command = if cfg!(unix) {
        let mut command = Command::new("sh");
        let script = format!("ulimit -v {MEMORY} 2>/dev/null; exec \"$@\"");
        command.args(["-c", &script, "sh"]).arg(program);
        command
    } else {
        Command::new(program)
    };
    command.args(["attack", "--child", "--only", range.part.name(), "--device", &range.device]);
    for (option, value) in
        [("--seed", range.seed), ("--first", number), ("--last", range.last), ("--stride", range.stride)]
    {
        command.args([option, &value.to_string()]);
    }
    if range.talks {
        command.args(["--at", &number.to_string()]);
    }
    if let Some(libraries) = &range.libraries {
        // The simulated device has 2 GiB by default: more than a process may allocate beside it.
        command.env("FP8_CUDA_LIB_DIR", libraries).env("FP8_SIM_MEMORY", (512u64 << 20).to_string());
        command.env("FP8_SIM_LEAKS", "1");
    }
    // The place of a panic is told; of deaths the last words are shown, which have to be short.
    command.env("RUST_BACKTRACE", "0").stdin(Stdio::null()).stdout(Stdio::piped());
    Ok(command)
}

/// Runs the whole range, with as many processes as it takes.
pub(super) fn run(range: &Range) -> Result<Tally> {
    let mut tally = Tally::default();
    let (folder, mut next) = (tempfile::tempdir()?, range.first);
    while next < range.last {
        let words = folder.path().join("stderr");
        let mut command = command(range, next)?;
        if range.talks {
            command.stderr(Stdio::inherit());
        } else {
            command.stderr(File::create(&words)?);
        }
        let mut process = Process::start(command)?;
        let began = process.follow(range, &mut next, &mut tally)?;
        let (status, is_late) = (process.end()?, range.deadline.is_some_and(|end| Instant::now() > end));
        let words = last_words(&words);
        match (began, status) {
            (Begun::Hanging(number, family), _) => {
                let what = format!("hang: still running after {:?}", range.limit);
                tally.fail(Failure { family, ..range.failure(number, what, &words) });
                next = number + range.stride;
            }
            (Begun::Nothing, _) if is_late => break,
            (Begun::Nothing, status) if status.success() => {
                if words.contains("fp8-cuda-sim:") {
                    tally.fail(range.failure(next, "the simulated device reports".to_owned(), &words));
                }
                break;
            }
            (Begun::Nothing, status) if status.code() == Some(i32::from(BROKEN)) => {
                tally.explain(&words);
            }
            (Begun::Nothing, status) => return Err(format!("an attacking process: {status}\n{words}").into()),
            (Begun::Case(number, family), status) => {
                tally.fail(Failure { family, ..range.failure(number, format!("death: {status}"), &words) });
                next = number + range.stride;
            }
        }
    }
    Ok(tally)
}

impl Range {
    fn failure(&self, number: u64, what: String, words: &str) -> Failure {
        let (part, device, seed) = (self.part, self.device.clone(), self.seed);
        Failure { part, device, seed, number, family: String::new(), what, detail: words.to_owned() }
    }
}

/// The case that a process was running when it ended, if any.
enum Begun {
    Nothing,
    /// A case of a family.
    Case(u64, String),
    Hanging(u64, String),
}

struct Process {
    child: Child,
    lines: Receiver<String>,
}

impl Process {
    fn start(mut command: Command) -> Result<Self> {
        let mut child = command.spawn()?;
        let output = child.stdout.take().ok_or("the process has no output")?;
        let (send, lines) = mpsc::sync_channel(1 << 12);
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(std::result::Result::ok) {
                if send.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Self { child, lines })
    }

    /// Reads what the process says, until it ends, hangs, or its time is up.
    fn follow(&mut self, range: &Range, next: &mut u64, tally: &mut Tally) -> Result<Begun> {
        let mut begun = Begun::Nothing;
        loop {
            let line = match self.lines.recv_timeout(range.limit) {
                Ok(line) => line,
                Err(RecvTimeoutError::Disconnected) => return Ok(begun),
                Err(RecvTimeoutError::Timeout) => {
                    self.child.kill()?;
                    return match begun {
                        Begun::Case(number, family) => Ok(Begun::Hanging(number, family)),
                        _ => Err("the attacking process hangs before its first case".into()),
                    };
                }
            };
            let fields: Vec<&str> = line.split('\t').collect();
            match fields[..] {
                ["begin", number, family] => begun = Begun::Case(number.parse()?, family.to_owned()),
                ["fail", number, family, what] => {
                    let (family, what) = (family.to_owned(), what.replace("\\n", "\n"));
                    tally.fail(Failure { family, ..range.failure(number.parse()?, what, "") });
                }
                ["end", number, family, accepted, refused] => {
                    tally.add(family, accepted.parse()?, refused.parse()?);
                    begun = Begun::Nothing;
                    *next = number.parse::<u64>()? + range.stride;
                    if range.deadline.is_some_and(|end| Instant::now() > end) {
                        self.child.kill()?;
                        return Ok(begun);
                    }
                }
                _ => return Err(format!("unexpected output of the attacking process: {line:?}").into()),
            }
        }
    }

    fn end(mut self) -> Result<ExitStatus> {
        Ok(self.child.wait()?)
    }
}

fn last_words(path: &Path) -> String {
    let words = fs::read(path).unwrap_or_default();
    let from = words.len().saturating_sub(LAST_WORDS);
    String::from_utf8_lossy(&words[from..]).trim().to_owned()
}
