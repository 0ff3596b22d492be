//! `fp8 launch`: starts a command once for each rank, all on this machine.

use crate::failure::Failure;
use crate::interrupt::{self, Phase};
use clap::Args;
use std::ffi::{OsStr, OsString};
use std::io::{self, BufRead as _, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

pub(crate) const EXAMPLE: &str = "\
Example:
  fp8 launch -n 4 -- ./train --epochs 3

Each process is told who it is by the variables that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and others), which
fp8_dist::Environment::detect reads. They have no input. Lines of output begin with the rank. If a process fails, the others are
stopped, and its exit code is that of fp8 launch. Ctrl-C is passed on; the third one kills. On several machines, use torchrun,
mpirun or srun instead.";

/// The time that processes have to end by themselves when another one has failed.
const PATIENCE: Duration = Duration::from_secs(10);
/// The interval at which processes are looked after.
const GLANCE: Duration = Duration::from_millis(20);
/// The time for the last output of processes that have ended: a process that they leave behind may keep it open.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Output without an end of line is passed on in pieces of this many bytes.
const LONGEST_LINE: u64 = 1 << 16;
/// The token's and the run id's length.
const SECRET: usize = 16;

#[derive(Debug, Args)]
pub(crate) struct Launch {
    /// The number of processes
    #[arg(short = 'n', value_name = "N", value_parser = processes)]
    processes: u16,
    /// The command and its arguments; `fp8` is this program
    #[arg(trailing_var_arg = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Parses `-n`.
fn processes(text: &str) -> Result<u16, String> {
    let number = text.parse().ok().filter(|number| (1..=1024).contains(number));
    number.ok_or_else(|| "expected a number from 1 to 1024".to_owned())
}

/// Starts the processes and waits for them.
pub(crate) fn run(options: &Launch) -> Result<(), Failure> {
    let (signals, received) = mpsc::channel();
    interrupt::during(Phase::Forward(signals), || {
        let mut ranks = Ranks::start(options)?;
        let ended = ranks.wait(&received);
        ranks.finish();
        ended
    })
}

/// The processes, in the order of their ranks.
#[derive(Debug, Default)]
struct Ranks {
    processes: Vec<Process>,
}

#[derive(Debug)]
struct Process {
    child: Child,
    /// Its status, once it has ended.
    status: Option<ExitStatus>,
    /// The threads that pass its output on.
    outputs: Vec<JoinHandle<()>>,
}

impl Ranks {
    fn start(options: &Launch) -> Result<Self, Failure> {
        let Some((program, arguments)) = options.command.split_first() else {
            return Err(Failure::input("expected a command after --"));
        };
        let path = path_of(program)?;
        let variables = variables(options.processes)?;
        let mut ranks = Self::default();
        for rank in 0..options.processes {
            let mut command = Command::new(&path);
            command.args(arguments).envs(variables.iter().map(|(name, value)| (*name, value)));
            command.env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string()).env_remove("FP8_PORT");
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
            apart(&mut command);
            match command.spawn() {
                Ok(child) => ranks.processes.push(Process::new(rank, child)),
                Err(error) => {
                    ranks.kill();
                    return Err(Failure::input(format!(
                        "cannot start {}: {error}",
                        program.to_string_lossy()
                    )));
                }
            }
        }
        Ok(ranks)
    }

    /// Waits until all have ended. If one fails, ends the others, unless a signal has asked all of them to end.
    fn wait(&mut self, signals: &Receiver<i32>) -> Result<(), Failure> {
        let mut failed: Option<(usize, ExitStatus)> = None;
        let (mut asked, mut until) = (0, None);
        loop {
            for signal in signals.try_iter() {
                asked += 1;
                match asked {
                    1 | 2 => self.send(signal),
                    // The first two are for the processes, which may save and then give up saving.
                    _ => self.kill(),
                }
            }
            let newest = self.look().inspect_err(|_| self.kill())?;
            if failed.is_none() && newest.is_some() {
                failed = newest;
                if asked == 0 {
                    self.send(TERMINATE);
                    until = Some(Instant::now() + PATIENCE);
                }
            }
            if self.processes.iter().all(|process| process.status.is_some()) {
                break;
            }
            if until.is_some_and(|until| until <= Instant::now()) {
                self.kill();
            }
            thread::sleep(GLANCE);
        }
        let Some((rank, status)) = failed else { return Ok(()) };
        // What they have started and not waited for.
        self.kill();
        let sentence = if until.is_some() { format!("rank {rank} failed: {status}") } else { String::new() };
        Err(Failure::Process { sentence, code: code_of(status) })
    }

    /// Notes which have ended. Returns the first that has failed just now.
    fn look(&mut self) -> Result<Option<(usize, ExitStatus)>, Failure> {
        let mut failed = None;
        for (rank, process) in self.processes.iter_mut().enumerate() {
            if process.status.is_some() {
                continue;
            }
            let status = process.child.try_wait();
            process.status =
                status.map_err(|error| Failure::work(format!("waiting for rank {rank}: {error}")))?;
            failed =
                failed.or(process.status.filter(|status| !status.success()).map(|status| (rank, status)));
        }
        Ok(failed)
    }

    fn send(&mut self, signal: i32) {
        for process in self.processes.iter_mut().filter(|process| process.status.is_none()) {
            send(&mut process.child, signal);
        }
    }

    /// Kills what is left of all, also of those that have ended.
    fn kill(&mut self) {
        for process in &mut self.processes {
            kill(&mut process.child);
        }
    }

    /// Waits for the last output.
    fn finish(self) {
        let until = Instant::now() + LAST_WORDS;
        let outputs = self.processes.into_iter().flat_map(|process| process.outputs);
        for output in outputs {
            while !output.is_finished() && Instant::now() < until {
                thread::sleep(GLANCE / 4);
            }
        }
    }
}

impl Process {
    fn new(rank: u16, mut child: Child) -> Self {
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let label = format!("[{rank}] ");
        let out = stdout.and_then(|stream| pass_on(label.clone(), stream, io::stdout()));
        let err = stderr.and_then(|stream| pass_on(label, stream, io::stderr()));
        Self { child, status: None, outputs: out.into_iter().chain(err).collect() }
    }
}

/// Passes lines on behind a label. Bytes stay as they are.
fn pass_on(
    label: String,
    from: impl Read + Send + 'static,
    mut to: impl Write + Send + 'static,
) -> Option<JoinHandle<()>> {
    let mut from = BufReader::new(from);
    let work = move || {
        loop {
            let mut line = label.clone().into_bytes();
            match (&mut from).take(LONGEST_LINE).read_until(b'\n', &mut line) {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
            if !line.ends_with(b"\n") {
                line.push(b'\n');
            }
            // One write for a line, so that lines of different ranks do not mix. If the output is closed, the process goes on.
            let _ = to.write_all(&line).and_then(|()| to.flush());
        }
    };
    thread::Builder::new().name("fp8 output".to_owned()).spawn(work).ok()
}

/// The path of a program. `fp8` is the one that runs, wherever it is installed.
fn path_of(program: &OsStr) -> Result<PathBuf, Failure> {
    if program != "fp8" {
        return Ok(program.into());
    }
    std::env::current_exe().map_err(|error| Failure::work(format!("finding the program fp8: {error}")))
}

/// The variables that all processes share.
fn variables(processes: u16) -> Result<Vec<(&'static str, String)>, Failure> {
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
    let port = port.map_err(|error| Failure::work(format!("looking for a free port: {error}")))?.port();
    let mut variables = vec![
        ("WORLD_SIZE", processes.to_string()),
        ("LOCAL_WORLD_SIZE", processes.to_string()),
        ("MASTER_ADDR", Ipv4Addr::LOCALHOST.to_string()),
        // Rank 0 listens on the first free of 16 ports from here on.
        ("MASTER_PORT", port.min(u16::MAX - 16).to_string()),
        ("TORCHELASTIC_RUN_ID", secret()),
    ];
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    if !is_set("FP8_DIST_TOKEN") {
        variables.push(("FP8_DIST_TOKEN", secret()));
    }
    if !is_set("RAYON_NUM_THREADS") {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        variables.push(("RAYON_NUM_THREADS", (cores / usize::from(processes)).max(1).to_string()));
    }
    Ok(variables)
}

/// Random text.
fn secret() -> String {
    let bytes: [u8; SECRET] = rand::random();
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The exit code of a process as shells report it: 128 and its number for a signal.
fn code_of(status: ExitStatus) -> u8 {
    #[cfg(unix)]
    let signal = std::os::unix::process::ExitStatusExt::signal(&status).map(|signal| 128 + signal);
    #[cfg(not(unix))]
    let signal = None;
    let code = status.code().or(signal).unwrap_or(1);
    u8::try_from(code).ok().filter(|&code| code > 0).unwrap_or(1)
}

#[cfg(unix)]
const TERMINATE: i32 = signal_hook::consts::SIGTERM;
#[cfg(not(unix))]
const TERMINATE: i32 = 15;

/// Keeps the terminal's Ctrl-C from a process, which would otherwise get it twice.
#[cfg(unix)]
fn apart(command: &mut Command) {
    std::os::unix::process::CommandExt::process_group(command, 0);
}

#[cfg(not(unix))]
fn apart(_: &mut Command) {}

/// Sends a signal to a process and those that it has started.
#[cfg(unix)]
#[expect(clippy::needless_pass_by_ref_mut, reason = "other systems need it")]
fn send(child: &mut Child, signal: i32) {
    use nix::sys::signal::{Signal, killpg};
    use nix::unistd::Pid;
    if let (Ok(id), Ok(signal)) = (i32::try_from(child.id()), Signal::try_from(signal)) {
        let _ = killpg(Pid::from_raw(id), signal);
    }
}

/// Kills a process and those that it has started.
#[cfg(unix)]
fn kill(child: &mut Child) {
    send(child, signal_hook::consts::SIGKILL);
}

/// Ends a process, unless it has got Ctrl-C itself: there are no other signals.
#[cfg(not(unix))]
fn send(child: &mut Child, signal: i32) {
    if signal == TERMINATE {
        kill(child);
    }
}

#[cfg(not(unix))]
fn kill(child: &mut Child) {
    let _ = child.kill();
}
