//! `cargo xtask mutate-codec`: plants small mistakes in the rounding code of fp8-format and sees whether its tests find them.
//!
//! Every number and every comparison of the scalar codec and of its AVX2 and AVX-512 paths, those for scales of blocks included, is
//! changed, one at a time, in a copy of the crate. A mutant is killed by not compiling, by a failing test and by running too long. Survivors stand in
//! `fp8-format/tests/mutants.txt` with their reasons; one that does not fails the task. Only what this machine's instructions
//! run is judged: without AVX-512 its files are left out. The NEON path is judged where `--file` names it, by an emulator,
//! which takes longer.

mod edits;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use crate::artifact;
use crate::mutants::{Outcome, Survivors, Tally, expect_pass, failed_test, planted, refresh, shuffle};
use crate::neon::Emulated;
use crate::process::watch;
use crate::workspace::{Result, Workspace, files, root, shell};
use edits::Edit;

/// Files, the instructions they are for, functions that round nothing, and the tests in the order of their chances.
const FILES: [(&str, &str, &[&str], [&str; 3]); 16] = [
    ("codec.rs", "scalar", &[], ["codec", "slice", "paths"]),
    (
        "arch/avx2.rs",
        "avx2",
        &["head", "fetch_ahead", "drive", "store", "floats", "transpose", "copy", "fetch"],
        ["paths", "slice", "codec"],
    ),
    ("arch/avx2/decode.rs", "avx2", &["fill", "load"], ["paths", "slice", "codec"]),
    (
        "arch/avx512.rs",
        "avx512",
        &["head", "fetch_ahead", "drive", "store", "words", "halves", "floats", "table"],
        ["paths", "slice", "codec"],
    ),
    ("arch/avx512/decode.rs", "avx512", &["fill", "codes"], ["paths", "slice", "codec"]),
    ("arch/avx512/rounding.rs", "avx512", &[], ["paths", "slice", "codec"]),
    ("arch/avx512/products.rs", "avx512", &[], ["paths", "slice", "codec"]),
    ("arch/blocks.rs", "scalar", &["in_groups"], BLOCKS),
    ("arch/scalar/blocks.rs", "scalar", &[], BLOCKS),
    ("arch/avx2/blocks.rs", "avx2", &[], BLOCKS),
    ("arch/avx512/blocks.rs", "avx512", &[], BLOCKS),
    ("arch/avx512/rows.rs", "avx512", &["emit"], BLOCKS),
    ("arch/avx512/row.rs", "avx512", &[], BLOCKS),
    ("arch/avx512/tiles.rs", "avx512", &[], BLOCKS),
    ("arch/avx512/exponents.rs", "avx512", &[], BLOCKS),
    (
        NEON,
        "neon",
        &["drive", "store", "floats", "fill", "transpose", "copy", "fetch"],
        ["paths", "slice", "golden"],
    ),
];

const NEON: &str = "arch/neon.rs";

/// The tests of scales for rows and blocks.
const BLOCKS: [&str; 3] = ["golden_blocks", "blocks", "slice"];

const LIST: &str = "fp8-format/tests/mutants.txt";
/// For one program of tests; they take seconds.
const PATIENCE: Duration = Duration::from_secs(120);

#[derive(clap::Args)]
pub(crate) struct MutateCodec {
    /// Runs a random sample of this many mutants that are not listed as survivors
    #[arg(long)]
    sample: Option<usize>,
    /// Seed of the sample
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Runs only mutants of this file: codec.rs, arch/avx512/rounding.rs, arch/neon.rs (emulated on x86-64), …
    #[arg(long)]
    file: Option<String>,
    /// Prints the mutants instead of running them
    #[arg(long)]
    list: bool,
}

pub(crate) fn run(options: &MutateCodec) -> Result<ExitCode> {
    let start = Instant::now();
    let survivors = Survivors::read(LIST)?;
    let is_emulated = options.file.as_deref() == Some(NEON) && !is_here("neon");
    let all = mutants(options.file.as_deref())?;
    if options.list {
        all.iter().for_each(|(edit, _)| println!("{edit}"));
        return Ok(ExitCode::SUCCESS);
    }
    let mut tally = Tally::default();
    if options.file.is_none() {
        let all: Vec<String> = all.iter().map(|(edit, _)| edit.to_string()).collect();
        survivors.expect_all_in(&all, &mut tally);
    }
    let can_run = |edit: &Edit| {
        FILES.iter().any(|(file, needs, ..)| *file == edit.file && (is_emulated || is_here(needs)))
    };
    let mut chosen: Vec<_> = all.iter().filter(|(edit, _)| can_run(edit)).collect();
    if let Some(count) = options.sample {
        chosen.retain(|(edit, _)| !survivors.contains(&edit.to_string()));
        shuffle(&mut chosen, |(edit, _)| format!("{} {} {edit}", options.seed, edit.line));
        chosen.truncate(count);
    }
    println!("{} mutants, {} to run", all.len(), chosen.len());

    // Code for instructions that this CPU does not have cannot be run, so each of its mutants would count as a survivor. A run
    // over all files therefore leaves such files out and says so; one that was asked for by name is an error.
    for (file, needs, ..) in FILES {
        match &options.file {
            Some(name) if name == file && !is_emulated && !is_here(needs) => {
                let remedy = "run it on a CPU that has them, or leave --file out";
                return Err(format!(
                    "mutate-codec: --file {file}: this CPU has no {needs} instructions: {remedy}"
                )
                .into());
            }
            None if !is_here(needs) => {
                let how = if file == NEON { ": --file arch/neon.rs runs it in emulation" } else { "" };
                println!("left out: {file}, since this CPU has no {needs} instructions{how}");
            }
            _ => {}
        }
    }
    let copy = Copied::new(is_emulated)?;
    if let Some((_, tests)) = chosen.first() {
        copy.expect_good(tests)?;
    }
    for (index, (edit, tests)) in chosen.iter().enumerate() {
        let place = format!("{}:{}", edit.file, edit.line + 1);
        tally.count(&edit.to_string(), &place, copy.try_out(edit, tests)?, &survivors);
        if (index + 1) % 20 == 0 {
            println!("{} of {} mutants run, {:.0} s", index + 1, chosen.len(), start.elapsed().as_secs_f64());
        }
    }
    println!("{}; {:.0} s", tally.line(), start.elapsed().as_secs_f64());
    Ok(if tally.problems == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Returns true if this CPU has the instructions of a path of fp8-format, which asks for the same features (`arch/path.rs`).
fn is_here(instructions: &str) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::is_x86_feature_detected as has;
        let avx2 = has!("avx2") && has!("f16c");
        let avx512 =
            has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl") && has!("avx512vbmi");
        matches!((instructions, avx2, avx512), ("scalar", ..) | ("avx2", true, _) | ("avx512", true, true))
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        instructions == "scalar" || (instructions == "neon" && cfg!(target_arch = "aarch64"))
    }
}

/// All mutants, each with its tests.
fn mutants(only: Option<&str>) -> Result<Vec<(Edit, [&'static str; 3])>> {
    if let Some(name) = only.filter(|name| !FILES.iter().any(|(file, ..)| file == name)) {
        let known = FILES.map(|(file, ..)| file).join(", ");
        return Err(format!("mutate-codec: no file {name}: expected one of {known}").into());
    }
    let mut all = Vec::new();
    for (file, _, without, tests) in FILES {
        if only.is_none_or(|name| name == file) {
            let source = fs::read_to_string(root().join("fp8-format/src").join(file))?;
            all.extend(edits::edits(file, &source, without).into_iter().map(|edit| (edit, tests)));
        }
    }
    Ok(all)
}

/// A workspace of a copy of fp8-format alone, kept in cargo's folder, so that dependencies are built once.
struct Copied {
    folder: PathBuf,
    /// The machine that runs the tests, if this one does not.
    emulated: Option<Emulated>,
}

impl Copied {
    fn new(is_emulated: bool) -> Result<Self> {
        let folder = Workspace::read(&shell()?)?.target_directory.join("mutate-codec");
        let manifest = fs::read_to_string(root().join("Cargo.toml"))?;
        let alone = |text: &str| {
            let (before, rest) = text.split_once("members = [")?;
            let (_, after) = rest.split_once(']')?;
            Some(format!("{before}members = [\"fp8-format\"]{after}"))
        };
        let manifest = alone(&manifest).ok_or("Cargo.toml contains no `members = [`")?;
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("Cargo.toml"), manifest)?;
        fs::copy(root().join("Cargo.lock"), folder.join("Cargo.lock"))?;
        for part in ["Cargo.toml", "README.md", "src", "tests", "benches"] {
            let part = root().join("fp8-format").join(part);
            let all = if part.is_dir() { files(&part)? } else { vec![part] };
            for file in all {
                refresh(&folder.join(file.strip_prefix(root())?), &fs::read(&file)?)?;
            }
        }
        let emulated =
            is_emulated.then(|| Emulated::new(&folder.join("fp8-format"), "mutants")).transpose()?;
        Ok(Self { folder, emulated })
    }

    /// The program of a test; `Err` with what the compiler said if there is none.
    fn build(&self, test: &str) -> Result<std::result::Result<PathBuf, String>> {
        let options = ["--no-run", "--message-format", "json-render-diagnostics", "--test", test];
        let (built, package) = if let Some(emulated) = &self.emulated {
            // Compiling takes longer than what it saves.
            let cargo = emulated.cargo_test().args(options).env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1");
            let cargo = cargo.env("CARGO_INCREMENTAL", "1").env("CARGO_PROFILE_RELEASE_DEBUG", "false");
            (cargo.ignore_status().output()?, "mutants")
        } else {
            let mut cargo = Command::new("cargo");
            cargo.args(["test", "-p", "fp8-format"]).args(options).current_dir(&self.folder);
            cargo.env("CARGO_TARGET_DIR", self.folder.join("target"));
            cargo.envs([("CARGO_INCREMENTAL", "1"), ("CARGO_PROFILE_DEV_DEBUG", "false")]);
            (cargo.output()?, "fp8-format")
        };
        let messages = String::from_utf8_lossy(&built.stdout);
        let program =
            messages.lines().filter_map(artifact::built).find(|built| built.is(package, "test", test));
        Ok(match program {
            Some(program) if built.status.success() => Ok(program.file),
            _ => Err(String::from_utf8_lossy(&built.stderr).into_owned()),
        })
    }

    /// Whether all is well without a mistake: else no mutant says anything.
    fn expect_good(&self, tests: &[&str]) -> Result<()> {
        for test in tests {
            let program = self.build(test)??;
            expect_pass("mutate-codec", test, self.command(&program), PATIENCE)?;
        }
        Ok(())
    }

    fn command(&self, program: &Path) -> Command {
        if let Some(emulated) = &self.emulated {
            return emulated.command(program);
        }
        let mut command = Command::new(program);
        command.current_dir(self.folder.join("fp8-format"));
        command
    }

    fn try_out(&self, edit: &Edit, tests: &[&str]) -> Result<Outcome> {
        let file = self.folder.join("fp8-format/src").join(edit.file);
        planted(&file, |source| Ok(edit.apply(source)), || self.tested(tests))
    }

    fn tested(&self, tests: &[&str]) -> Result<Outcome> {
        for test in tests {
            let Ok(program) = self.build(test)? else { return Ok(Outcome::Unviable) };
            // One failed test is enough.
            let finished = watch(self.command(&program), PATIENCE, |output| failed_test(output).is_some())?;
            if !finished.succeeded() {
                return Ok(Outcome::Killed);
            }
        }
        Ok(Outcome::Survived)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistyped_file_is_named_and_every_line_of_the_list_has_its_mutant() {
        let error = mutants(Some("codecs.rs")).unwrap_err().to_string();
        assert!(error.starts_with("mutate-codec: no file codecs.rs: expected one of codec.rs, "), "{error}");
        let all: Vec<String> = mutants(None).unwrap().iter().map(|(edit, _)| edit.to_string()).collect();
        assert!(all.iter().any(|edit| edit == "codec.rs: let drop = «23→24» - self.man;"));
    }
}
