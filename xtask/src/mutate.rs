//! `cargo xtask mutate`: plants small mistakes in the kernels' PTX and sees whether the conformance suite finds them.
//!
//! Each mutant is run by the simulated device on the cases of the operations that use the kernel. It is killed by a
//! wrong result, by a fault that the device finds, by PTX that does not load, and by running too long. The survivors
//! stand in `fp8-kernels/tests/mutants.txt` with their reasons; one that does not fails the task.

mod edits;
mod survivors;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use std::{fs, sync::atomic};

use sha2::{Digest, Sha256};

use crate::conformance::{Backend, Job, Outcome};
use crate::workspace::{Result, shell};
use crate::{artifact, process, ptx};
use edits::Mutant;

/// Cases that use a kernel file, where they are not those of the operation with the file's name.
const USERS: [(&str, &[&str]); 2] =
    [("accumulate", &["linear::", "split::", "embedding::"]), ("cells", &["update_scales::", "quantize::"])];
/// A mutant still running then loops for ever, or nearly so.
const LIMIT: Duration = Duration::from_secs(60);

#[derive(clap::Args)]
pub(crate) struct Mutate {
    /// Runs only this many mutants, drawn by the seed
    #[arg(long)]
    sample: Option<usize>,
    /// Only mutants of this kernel file: quantize, norm, …
    #[arg(long)]
    kernel: Vec<String>,
    /// Of the draw
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

pub(crate) fn run(options: &Mutate) -> Result<ExitCode> {
    let program = artifact::conformance(&shell()?)?;
    let tally = check(&program, options.sample, &options.kernel, options.seed)?;
    println!("{}", tally.line());
    Ok(if tally.problems == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What came of the mutants that were run.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Tally {
    killed: usize,
    /// Survivors on the list.
    known: usize,
    /// Survivors that are not, lines without a mutant, kernel files whose cases do not pass.
    pub(crate) problems: usize,
    new: usize,
}

impl Tally {
    pub(crate) fn line(&self) -> String {
        let Self { killed, known, new, problems } = self;
        let run = killed + known + new;
        let percent = 100.0 * *killed as f64 / run.max(1) as f64;
        format!(
            "{killed} of {run} mutants killed ({percent:.1} %), {known} known survivors, {new} new, {problems} problems"
        )
    }
}

/// Runs the mutants of these kernel files, or of all; all of them, or as many as `sample` says.
pub(crate) fn check(program: &Path, sample: Option<usize>, files: &[String], seed: u64) -> Result<Tally> {
    let known = survivors::read()?;
    let snapshots = snapshots(files)?;
    let all: Vec<Mutant> = snapshots.iter().flat_map(|(file, ptx)| edits::mutants(file, ptx)).collect();
    let mut tally = Tally::default();
    let keys: Vec<String> = all.iter().map(Mutant::key).collect();
    for key in known.keys().filter(|key| !keys.contains(*key)) {
        let file = key.split(' ').next().unwrap_or_default();
        if files.is_empty() || snapshots.contains_key(file) {
            tally.problems += 1;
            println!("no such mutant any more, remove its line: {key}");
        }
    }
    let chosen = match sample {
        Some(count) => {
            draw(all.iter().filter(|mutant| !known.contains_key(&mutant.key())).collect(), count, seed)
        }
        None => all.iter().collect(),
    };

    let trial = Trial { program: program.to_path_buf(), folder: tempfile::tempdir()?.keep() };
    let mut sound = BTreeMap::new();
    for file in snapshots.keys().filter(|file| chosen.iter().any(|mutant| mutant.file == **file)) {
        let verdict = trial.expect_sound(file, &snapshots[file]);
        if let Err(error) = &verdict {
            tally.problems += 1;
            println!("{file}: mutants are not run: {error}");
        }
        sound.insert(file.as_str(), verdict.is_ok());
    }
    let jobs: Vec<&Mutant> = chosen.into_iter().filter(|mutant| sound[mutant.file.as_str()]).collect();
    let (start, done) = (Instant::now(), atomic::AtomicUsize::new(0));
    let killed = process::each(&jobs, process::cores(), |_, mutant| {
        let killed =
            trial.kills(&mutant.file, &mutant.apply(&snapshots[&mutant.file])).map_err(|e| e.to_string());
        let count = done.fetch_add(1, atomic::Ordering::Relaxed) + 1;
        if count % 100 == 0 {
            println!("{count} of {} mutants run, {:.0} s", jobs.len(), start.elapsed().as_secs_f64());
        }
        killed
    });
    for (mutant, killed) in jobs.iter().zip(killed) {
        match (killed?, known.get(&mutant.key())) {
            (true, None) => tally.killed += 1,
            (true, Some(_)) => {
                tally.killed += 1;
                println!("killed now, its line may go: {}", mutant.key());
            }
            (false, Some(_)) => tally.known += 1,
            (false, None) => {
                tally.new += 1;
                tally.problems += 1;
                println!("SURVIVED, now `{}`; kill it, or list it with its reason:", mutant.replacement());
                println!("{} REASON", mutant.key());
            }
        }
    }
    drop(fs::remove_dir_all(&trial.folder));
    Ok(tally)
}

/// Texts by stem.
fn snapshots(files: &[String]) -> Result<BTreeMap<String, String>> {
    let mut found = BTreeMap::new();
    for path in crate::workspace::files(&ptx::folder())? {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let is_asked = files.is_empty() || files.iter().any(|file| file.trim_end_matches(".cu") == stem);
        if is_asked && path.extension().is_some_and(|end| end == "ptx") {
            found.insert(stem, fs::read_to_string(&path)?);
        }
    }
    if found.is_empty() {
        return Err(format!("mutate: no snapshot of {files:?} in {}", ptx::folder().display()).into());
    }
    Ok(found)
}

/// `count` of the mutants: the same for the same seed, and hardly others where a few mutants come or go.
fn draw(mut mutants: Vec<&Mutant>, count: usize, seed: u64) -> Vec<&Mutant> {
    mutants.sort_by_cached_key(|mutant| Sha256::digest(format!("{seed} {}", mutant.key())));
    mutants.truncate(count);
    mutants
}

/// Runs cases on PTX that takes the place of a snapshot.
struct Trial {
    program: PathBuf,
    /// Of the PTX files, a folder for each run.
    folder: PathBuf,
}

impl Trial {
    /// The cases of a kernel file pass with its snapshot, and fail with an empty one: else a kill would mean nothing.
    fn expect_sound(&self, file: &str, ptx: &str) -> Result {
        let mut passed = 0;
        for filter in filters(file) {
            let outcome = self.cases(file, ptx, &filter)?;
            passed += outcome.passed.len();
            if !outcome.is_good() {
                return Err(format!(
                    "its cases fail without a mutation: {} {}",
                    outcome.line(),
                    outcome.failed.join(" ")
                )
                .into());
            }
        }
        if passed == 0 {
            return Err(format!("no case of {} ran", filters(file).join(" ")).into());
        }
        let header: String = ptx
            .lines()
            .take_while(|line| line.starts_with("//"))
            .fold(String::new(), |text, line| text + line + "\n");
        if !self.kills(file, &header)? {
            return Err("its cases pass even with an empty file: none uses it".into());
        }
        Ok(())
    }

    /// Whether some case of the file fails with this PTX.
    fn kills(&self, file: &str, ptx: &str) -> Result<bool> {
        for filter in filters(file) {
            if !self.cases(file, ptx, &filter)?.is_good() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn cases(&self, file: &str, ptx: &str, filter: &str) -> Result<Outcome> {
        let folder = tempfile::tempdir_in(&self.folder)?;
        fs::write(folder.path().join(format!("{file}.ptx")), ptx)?;
        let mut command = Job { backend: Backend::CudaSim, seed: Some(0) }.command(&self.program);
        command.env("FP8_SIM_SNAPSHOTS", folder.path()).env("FP8_CACHE_DIR", "").env("RUST_BACKTRACE", "0");
        command.args(["--test-threads=1", filter]);
        let finished = process::watch(command, LIMIT, |output| output.contains(" ... FAILED\n"))?;
        Ok(Outcome::read(&finished.output, finished.succeeded()))
    }
}

/// What the suite's names of a kernel file's cases contain.
fn filters(file: &str) -> Vec<String> {
    let users = USERS.iter().find(|(name, _)| *name == file);
    match users {
        Some((_, prefixes)) => prefixes.iter().map(|prefix| format!("cuda-sim::{prefix}")).collect(),
        None => vec![format!("cuda-sim::{file}::")],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draw_is_the_seeds_and_differs_between_seeds() {
        let body: String = (0..50).map(|k| format!("\tadd.s32 %r1, %r2, {k};\n")).collect();
        let all = edits::mutants("f", &format!(".visible .entry k(\n)\n{{\n{body}}}\n"));
        let draw = |seed| draw(all.iter().collect(), 5, seed);
        assert_eq!((all.len(), draw(1).len()), (50, 5));
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    #[test]
    fn the_tally_says_what_was_killed() {
        let tally = Tally { killed: 18, known: 1, new: 1, problems: 1 };
        assert_eq!(tally.line(), "18 of 20 mutants killed (90.0 %), 1 known survivors, 1 new, 1 problems");
    }
}
