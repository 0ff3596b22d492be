//! Faults during `fp8 train` on several ranks, and the training that goes on afterwards.
//!
//! A fault is a rank that is killed, or stopped for a moment; Ctrl-C; a disk that is full; or a cut link between two halves of the ranks.
//! All ranks must end in time and without a panic, and what they leave behind must be a checkpoint from which the training goes on to the losses that it has
//! without a fault, digit by digit.

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use xshell::cmd;

use crate::artifact;
use crate::network::namespaces::{ADDRESSES, Namespaces};
use crate::workspace::{Result, shell};

/// Far longer than a training takes, whatever happens in it.
const HANG: Duration = Duration::from_secs(90);
/// The time after which a launcher stops the ranks that outlive another one.
const PATIENCE: Duration = Duration::from_secs(10);
const MODEL: &str =
    "--layers 1 --hidden 32 --heads 2 --batch 4 --seq 16 --sample 0 --quiet --steps 150 --eval-every 50";

/// A kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    Kill,
    Stop,
    Interrupt,
    FullDisk,
    Cut,
}

/// The share of each kind in twelve faults. A cut link takes the longest to notice.
const FAULTS: [(Fault, usize); 5] =
    [(Fault::Kill, 4), (Fault::Stop, 2), (Fault::Interrupt, 3), (Fault::FullDisk, 2), (Fault::Cut, 1)];

impl Fault {
    fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::Stop => "stop",
            Self::Interrupt => "interrupt",
            Self::FullDisk => "full disk",
            Self::Cut => "cut link",
        }
    }
}

/// Random numbers: xorshift.
struct Draw(u64);

impl Draw {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % limit.max(1)
    }

    fn fault(&mut self) -> Fault {
        let mut place = self.below(FAULTS.iter().map(|(_, share)| share).sum());
        for (fault, share) in FAULTS {
            match place.checked_sub(share) {
                Some(rest) => place = rest,
                None => return fault,
            }
        }
        Fault::Kill
    }
}

/// Losses by run and step, as text.
type Losses = BTreeMap<(String, String), String>;

/// Makes `faults` faults. Returns the lines of the table, and whether all went well.
pub(super) fn run(seed: u64, faults: usize, ranks: usize, layout: &'static str) -> Result<bool> {
    let training = &Training { program: program()?, ranks, layout };
    let expected = training.undisturbed()?;
    let whole = {
        let start = Instant::now();
        training.undisturbed()?;
        start.elapsed()
    };
    let mut draw = Draw::new(seed);
    let mut counts: BTreeMap<Fault, [usize; 3]> = BTreeMap::new();
    // Faults that this machine does not allow: their number, and why.
    let mut skipped: BTreeMap<Fault, (usize, String)> = BTreeMap::new();
    for number in 0..faults {
        let fault = draw.fault();
        let tried = attempt(training, fault, &mut draw, whole, &expected);
        let [tries, failures, resumed] = counts.entry(fault).or_default();
        match tried {
            Ok(Outcome::Resumed) => (*tries, *resumed) = (*tries + 1, *resumed + 1),
            Ok(Outcome::Completed) => *tries += 1,
            Ok(Outcome::Skipped(reason)) => skipped.entry(fault).or_insert((0, reason)).0 += 1,
            Err(error) => {
                (*tries, *failures) = (*tries + 1, *failures + 1);
                println!("fault {number}, {}: {error}", fault.name());
            }
        }
    }
    println!("{:<12} {:>5} {:>8}  went on from a checkpoint", "fault", "tries", "failures");
    for (fault, [tries, failures, resumed]) in &counts {
        println!("{:<12} {tries:>5} {failures:>8}  {resumed}", fault.name());
    }
    for (fault, (count, reason)) in skipped {
        println!("{}: {count} skipped: it takes Linux and root ({reason})", fault.name());
    }
    let tried: usize = counts.values().map(|[tries, ..]| tries).sum();
    if tried == 0 {
        println!("FAILED: no fault was tried");
    }
    Ok(tried > 0 && counts.values().all(|[_, failures, _]| *failures == 0))
}

fn program() -> Result<PathBuf> {
    let sh = shell()?;
    let format = "json-render-diagnostics";
    let messages = cmd!(sh, "cargo build -p fp8-cli --message-format {format}").quiet().read()?;
    let program = messages.lines().find_map(|line| artifact::file(line, "bin", "fp8"));
    program.ok_or_else(|| "cargo reports no program for fp8-cli".into())
}

/// The training that is attacked.
struct Training {
    program: PathBuf,
    ranks: usize,
    /// The options of the layout.
    layout: &'static str,
}

impl Training {
    fn undisturbed(&self) -> Result<Losses> {
        let place = tempfile::tempdir()?;
        let job = Job::start(self, place.path(), None, &format!("{MODEL} --save run"))?;
        job.succeed()?;
        losses(place.path())
    }
}

/// The result of a fault that was survived.
enum Outcome {
    /// The training went on from a checkpoint.
    Resumed,
    /// The training was complete, or began anew.
    Completed,
    Skipped(String),
}

fn attempt(
    training: &Training,
    fault: Fault,
    draw: &mut Draw,
    whole: Duration,
    expected: &Losses,
) -> Result<Outcome> {
    let place = tempfile::tempdir()?;
    let disk = match (fault == Fault::FullDisk).then(|| Disk::new(place.path(), 100 + draw.below(2400))) {
        Some(Err(error)) => return Ok(Outcome::Skipped(error.to_string())),
        disk => disk.transpose()?,
    };
    let link = match (fault == Fault::Cut).then(Namespaces::new) {
        Some(Err(error)) => return Ok(Outcome::Skipped(error.to_string())),
        link => link.transpose()?,
    };
    // Anywhere in the training, also while it begins and ends.
    let when = whole * draw.below(1000) as u32 / 1000;
    let victim = draw.below(training.ranks);
    let mut job = Job::start(training, place.path(), link.as_ref(), &format!("{MODEL} --save run"))?;
    thread::sleep(when);
    match fault {
        Fault::Kill => job.signal(victim, "-KILL"),
        Fault::Interrupt => job.signal(victim, ["-INT", "-TERM"][draw.below(2)]),
        Fault::Stop => {
            job.signal(victim, "-STOP");
            thread::sleep(Duration::from_millis(50 + draw.below(1000) as u64));
            job.signal(victim, "-CONT");
        }
        Fault::Cut => link.as_ref().map_or(Ok(()), Namespaces::cut)?,
        Fault::FullDisk => {}
    }
    // A rank that waits for another to join waits long, and is stopped by whoever has started it.
    let checkpoints = ["high_precision", "fp8"]
        .map(|run| place.path().join("run").join(run).join("checkpoint.safetensors"));
    let ends = job.ends(fault, &|| !checkpoints[0].exists())?;
    for (rank, (_, text)) in ends.iter().enumerate() {
        if text.contains("panicked") {
            return Err(format!("rank {rank}: {text}").into());
        }
    }
    let completed = ends.iter().all(|(status, _)| status.success());
    if fault == Fault::Stop && !completed {
        return Err(format!("a rank that was stopped for a moment ends the training: {}", ends[0].1).into());
    }
    // It goes on from what there is: a checkpoint of both trainings, or nothing.
    disk.as_ref().map_or(Ok(()), |disk| disk.resize(1 << 20))?;
    let resumes = !completed && checkpoints.iter().all(|checkpoint| checkpoint.exists());
    if !completed {
        let line = if resumes { "--resume run --sample 0 --quiet --eval-every 50" } else { MODEL };
        let goes_on = Job::start(training, place.path(), None, &format!("{line} --save run"))?.succeed();
        match goes_on {
            // The fault came behind the last save, perhaps before the report.
            Err(error) if error.to_string().contains("nothing is left to train") => {
                if !place.path().join("report").join("steps.csv").exists() {
                    return Ok(Outcome::Completed);
                }
            }
            other => other?,
        }
    }
    let found = losses(place.path())?;
    for (step, loss) in &found {
        if expected.get(step) != Some(loss) {
            return Err(
                format!("{} {}: a loss of {loss}, not {:?}", step.0, step.1, expected.get(step)).into()
            );
        }
    }
    let mut left: Vec<_> = fs::read_dir(place.path().join("run"))?
        .map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()))
        .collect::<std::io::Result<_>>()?;
    left.sort();
    if left != ["fp8", "high_precision"] {
        return Err(format!("left in the folder of checkpoints: {left:?}").into());
    }
    Ok(if resumes { Outcome::Resumed } else { Outcome::Completed })
}

/// The losses of all steps in steps.csv.
fn losses(place: &Path) -> Result<Losses> {
    let text = fs::read_to_string(place.join("report").join("steps.csv"))?;
    let line = |line: &str| {
        let mut cells = line.split(',').map(str::to_owned);
        Some(((cells.next()?, cells.next()?), cells.next()?))
    };
    Ok(text.lines().skip(1).filter_map(line).collect())
}

/// A disk in memory, of a given size, which is gone when this is dropped.
struct Disk(PathBuf);

impl Disk {
    /// Mounts a disk of so many KiB.
    fn new(place: &Path, kib: usize) -> Result<Self> {
        mount(&["-t", "tmpfs", "-o", &format!("size={kib}k"), "fp8"], place)?;
        Ok(Self(place.to_owned()))
    }

    fn resize(&self, kib: usize) -> Result {
        mount(&["-o", &format!("remount,size={kib}k")], &self.0)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

fn mount(options: &[&str], place: &Path) -> Result {
    let output = Command::new("mount").args(options).arg(place).output();
    let output = output.map_err(|error| format!("mount: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("mount: {}", String::from_utf8_lossy(&output.stderr).trim()).into()),
    }
}

/// All ranks of a training.
struct Job {
    ranks: Vec<Child>,
}

impl Job {
    /// Starts all ranks in `place`, each half at an end of `link` if there is one.
    fn start(training: &Training, place: &Path, link: Option<&Namespaces>, options: &str) -> Result<Self> {
        let Training { program, ranks, layout } = training;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let rank = |rank: usize| {
            let mut command = match link {
                Some(link) => link.command(rank * 2 / ranks, program),
                None => Command::new(program),
            };
            command
                .arg("train")
                .args(options.split(' '))
                .args(layout.split(' '))
                .args(["--report-dir", "report"]);
            let address = if link.is_some() { ADDRESSES[0] } else { "127.0.0.1" };
            command
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", ranks.to_string())
                .env("LOCAL_RANK", rank.to_string());
            command.env("MASTER_ADDR", address).env("MASTER_PORT", port.to_string());
            command.env("TORCHELASTIC_RUN_ID", format!("chaos {port}")).env("RAYON_NUM_THREADS", "1");
            command.current_dir(place).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
            command.spawn()
        };
        Ok(Self { ranks: (0..*ranks).map(rank).collect::<std::io::Result<_>>()? })
    }

    fn signal(&self, rank: usize, signal: &str) {
        // It may have ended.
        let id = self.ranks[rank].id().to_string();
        let _ = Command::new("kill").args([signal, &id]).stderr(Stdio::null()).status();
    }

    /// Waits for all ranks, and returns how they ended and what they said. While their group `is_forming`, those that outlive another
    /// are stopped, and so are all if the link between them is cut.
    fn ends(&mut self, fault: Fault, is_forming: &dyn Fn() -> bool) -> Result<Vec<(ExitStatus, String)>> {
        let (start, mut alone) = (Instant::now(), None);
        while start.elapsed() < HANG {
            let mut running = Vec::new();
            let count = self.ranks.len();
            for rank in &mut self.ranks {
                if rank.try_wait()?.is_none() {
                    running.push(rank);
                }
            }
            if running.is_empty() {
                break;
            }
            if running.len() < count {
                alone.get_or_insert_with(Instant::now);
            }
            let outlives = alone.is_some_and(|alone: Instant| alone.elapsed() > PATIENCE);
            let is_cut = fault == Fault::Cut && start.elapsed() > 2 * PATIENCE;
            if (outlives || is_cut) && is_forming() {
                for rank in running {
                    rank.kill()?;
                    rank.wait()?;
                }
            }
            thread::sleep(Duration::from_millis(5));
        }
        let mut ends = Vec::new();
        for (number, mut rank) in std::mem::take(&mut self.ranks).into_iter().enumerate() {
            if rank.try_wait()?.is_none() {
                rank.kill()?;
                let text = rank.wait_with_output()?.stderr;
                return Err(format!("rank {number} hangs: {}", String::from_utf8_lossy(&text)).into());
            }
            let output = rank.wait_with_output()?;
            ends.push((output.status, String::from_utf8_lossy(&output.stderr).into_owned()));
        }
        Ok(ends)
    }

    fn succeed(mut self) -> Result {
        for (rank, (status, text)) in self.ends(Fault::Kill, &|| false)?.into_iter().enumerate() {
            if !status.success() {
                return Err(format!("without a fault, rank {rank}: {status}: {text}").into());
            }
        }
        Ok(())
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            let _ = rank.kill();
            let _ = rank.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_kinds_of_faults_are_drawn() {
        let mut draw = Draw::new(1);
        let mut counts: BTreeMap<Fault, usize> = BTreeMap::new();
        (0..1200).for_each(|_| *counts.entry(draw.fault()).or_default() += 1);
        for (fault, share) in FAULTS {
            let count = counts.get(&fault).copied().unwrap_or_default();
            assert!(count.abs_diff(share * 100) < 100, "{}: {count}", fault.name());
        }
    }
}
