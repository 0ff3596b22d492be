//! `cargo xtask gpu-bundle`: one folder with all that a machine with a GPU needs to test and measure, without cargo.
//!
//! | in the folder | what |
//! |---|---|
//! | `run.sh`, `README.txt` | runs the suites, says how |
//! | `bin.tar.xz` | programs, and the simulated device for `--simulate` |
//! | `tests/golden/` | reference data |
//! | `bench_peers.py` | the same measurements of other libraries |
//! | `bench_te_core.py`, `te_core*.py` | and of Transformer Engine's core library by itself |
//! | `MANIFEST` | every file's size and name |
//!
//! Libraries that the machine lacks can be put beside it in `carried/`; `cut_library.py` makes one small enough.
//!
//! All programs come from one build with one profile, which strips symbols, and have much in common: they travel in one
//! compressed archive, `run.sh` unpacks them beside its results. The folder has a limit.

pub(crate) mod peers;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use xshell::cmd;

use crate::artifact::{self, Built};
use crate::workspace::{self, Result, Workspace, root, shell};

/// The largest size of the folder, in bytes. Some machines take 64 MiB at a time, and half of that may be libraries.
const LIMIT: u64 = 32 << 20;
const PROFILE: &str = "bundle";
/// The name of the file that lists the contents of the folder.
const MANIFEST: &str = "MANIFEST";
const TEXTS: [(&str, &str); 7] = [
    ("run.sh", include_str!("run.sh")),
    ("README.txt", include_str!("README.txt")),
    ("bench_peers.py", include_str!("bench_peers.py")),
    ("bench_te_core.py", include_str!("bench_te_core.py")),
    ("te_core.py", include_str!("te_core.py")),
    ("te_core_cases.py", include_str!("te_core_cases.py")),
    ("te_core_check.py", include_str!("te_core_check.py")),
];

/// A target of the workspace that travels.
pub(crate) struct Program {
    /// The name of its package's folder.
    pub(crate) package: &'static str,
    pub(crate) kind: &'static str,
    pub(crate) target: &'static str,
    /// By which `run.sh` calls it.
    name: &'static str,
    /// The filter that selects the tests of a suite that hardware can run; `None` if it can run all of them.
    pub(crate) on_hardware: Option<&'static str>,
}

const fn program(
    package: &'static str,
    kind: &'static str,
    target: &'static str,
    name: &'static str,
) -> Program {
    Program { package, kind, target, name, on_hardware: None }
}

/// Tests that steer the simulated device stay at home: on hardware they have nothing to hold on to.
const PROGRAMS: &[Program] = &[
    program("fp8-kernels", "test", "conformance", "conformance"),
    program("fp8-recipe", "test", "suite_on_gpu", "recipe"),
    program("fp8-nn", "test", "suite_on_gpu", "layers"),
    // Its other tests steer the simulated device, wherever they run.
    Program { on_hardware: Some("hardware::"), ..program("fp8-dist", "test", "nccl", "nccl") },
    program("fp8-cli", "bin", "fp8", "fp8"),
    program("bench-gpu", "bin", "gpu_bench", "gpu_bench"),
    program("checks", "bin", "checks", "checks"),
    program("cuda-sim", "cdylib", "fp8_cuda_sim", "libfp8_cuda_sim.so"),
];

/// The suites that run on a GPU, one or more of each crate that uses it.
pub(crate) fn suites() -> impl Iterator<Item = &'static Program> {
    PROGRAMS.iter().filter(|program| program.kind == "test")
}

/// Reference data, as `cargo xtask golden --dir` and the suites expect it below `tests/golden`.
const GOLDEN: [(&str, &str); 5] = [
    ("fp8-format", "codec"),
    ("fp8-recipe", "recipe"),
    ("fp8-nn", "nn"),
    ("fp8-nn", "options"),
    ("fp8-nn", "data_parallel"),
];

#[derive(clap::Args)]
pub(crate) struct GpuBundle {
    /// Output folder; replaces an older bundle in it [default: gpu-bundle in cargo's target folder]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Tests the scripts for peers without a GPU, of Transformer Engine's library only the calls; builds no bundle
    #[arg(long, conflicts_with = "out")]
    check_peers: bool,
}

pub(crate) fn run(options: &GpuBundle) -> Result<ExitCode> {
    let sh = shell()?;
    if options.check_peers {
        println!("{}", peers::dry_run(&sh)?);
        return Ok(ExitCode::SUCCESS);
    }
    let out = match &options.out {
        Some(out) => std::path::absolute(out)?,
        None => Workspace::read(&sh)?.target_directory.join("gpu-bundle"),
    };
    clear(&out)?;
    let built = build(&sh)?;

    fs::create_dir_all(&out)?;
    pack(&built, &out.join("bin.tar.xz"))?;
    for (package, name) in GOLDEN {
        copy_all(
            &root().join(package).join("tests/golden").join(name),
            &out.join("tests/golden").join(name),
        )?;
    }
    for (name, text) in TEXTS {
        fs::write(out.join(name), text)?;
    }
    make_executable(&out.join("run.sh"))?;

    let files = sizes(&out)?;
    fs::write(out.join(MANIFEST), manifest(&files))?;
    for (name, size) in &files {
        println!("{:>10.2} MiB  {name}", mib(*size));
    }
    let total = total(&files, LIMIT)?;
    println!("{:>10.2} MiB  in {}", mib(total), out.display());
    Ok(ExitCode::SUCCESS)
}

/// Everything in one go, so that it shares one set of features.
fn build(sh: &xshell::Shell) -> Result<Vec<Built>> {
    let mut arguments = vec!["--workspace", "--all-features", "--lib", "--profile", PROFILE];
    for program in PROGRAMS {
        match program.kind {
            "cdylib" => {}
            "bin" => arguments.extend(["--bin", program.target]),
            _ => arguments.extend(["--test", program.target]),
        }
    }
    let format = "json-render-diagnostics";
    let messages = cmd!(sh, "cargo build {arguments...} --message-format {format}").quiet().read()?;
    Ok(messages.lines().filter_map(artifact::built).collect())
}

fn find<'a>(built: &'a [Built], program: &Program) -> Result<&'a Path> {
    let fits = |of: &&Built| of.is(program.package, program.kind, program.target);
    let Program { package, kind, target, .. } = program;
    let found = built.iter().find(fits).map(|built| &*built.file);
    found.ok_or_else(|| {
        format!("gpu-bundle: cargo reports no file for the {kind} {target} of {package}").into()
    })
}

/// One archive of all programs. What they have in common, such as the PTX of the kernels, is in it once: `xz` finds it where
/// its window is as large as all of them.
fn pack(built: &[Built], to: &Path) -> Result {
    let folder = tempfile::tempdir()?;
    let (programs, archive) = (folder.path().join("bin"), folder.path().join("bin.tar"));
    fs::create_dir(&programs)?;
    for program in PROGRAMS {
        fs::copy(find(built, program)?, programs.join(program.name))?;
    }
    let mut tar = Command::new("tar");
    // Equal programs give equal files.
    tar.args(["--sort=name", "--mtime=@0", "--owner=0", "--group=0", "--numeric-owner"]);
    succeed(tar.arg("-cf").arg(&archive).arg("-C").arg(&programs).arg("."))?;
    let mut xz = Command::new("xz");
    succeed(xz.args(["-c", "--lzma2=preset=6,dict=192MiB"]).arg(&archive).stdout(File::create(to)?))
}

fn succeed(command: &mut Command) -> Result {
    let name = command.get_program().display().to_string();
    let status = command.status().map_err(|error| format!("gpu-bundle: {name}: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("gpu-bundle: {name}: {status}").into()) }
}

/// Removes an older bundle; a folder with anything else in it is left alone.
fn clear(out: &Path) -> Result {
    let mut entries = match fs::read_dir(out) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(|error| format!("{}: {error}", out.display()))?,
    };
    if entries.next().is_none() {
        return Ok(());
    }
    if !out.join(MANIFEST).is_file() {
        let remedy = "name an empty folder, or one that is not there yet";
        return Err(format!("gpu-bundle: {} holds other files; {remedy}", out.display()).into());
    }
    Ok(fs::remove_dir_all(out)?)
}

fn copy_all(from: &Path, to: &Path) -> Result {
    for file in workspace::files(from).map_err(|error| format!("{}: {error}", from.display()))? {
        let target = to.join(file.strip_prefix(from)?);
        fs::create_dir_all(target.parent().unwrap_or(to))?;
        fs::copy(&file, target)?;
    }
    Ok(())
}

#[cfg_attr(not(unix), expect(unused_variables, reason = "there is no such bit"))]
fn make_executable(file: &Path) -> Result {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(file, fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}

/// All files of a folder, by their names in it.
fn sizes(folder: &Path) -> Result<BTreeMap<String, u64>> {
    let mut sizes = BTreeMap::new();
    for file in workspace::files(folder)? {
        let name = file.strip_prefix(folder)?.to_string_lossy().into_owned();
        sizes.insert(name, fs::metadata(&file)?.len());
    }
    Ok(sizes)
}

fn manifest(files: &BTreeMap<String, u64>) -> String {
    files.iter().map(|(name, size)| format!("{size}\t{name}\n")).collect()
}

/// The sum, or an error that names the largest files if it is over the limit.
fn total(files: &BTreeMap<String, u64>, limit: u64) -> Result<u64> {
    let total = files.values().sum();
    if total <= limit {
        return Ok(total);
    }
    let mut largest: Vec<_> = files.iter().collect();
    largest.sort_by_key(|&(name, size)| (std::cmp::Reverse(size), name));
    let largest: Vec<_> =
        largest.iter().take(3).map(|(name, size)| format!("{name} {:.1}", mib(**size))).collect();
    let [total, limit] = [total, limit].map(mib);
    Err(format!("gpu-bundle: {total:.1} MiB, more than {limit:.1}; the largest: {}", largest.join(", "))
        .into())
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / (1 << 20) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(sizes: &[(&str, u64)]) -> BTreeMap<String, u64> {
        sizes.iter().map(|&(name, size)| (name.to_owned(), size)).collect()
    }

    #[test]
    fn a_bundle_over_the_limit_names_its_largest_files() {
        let files = files(&[("bin/a", 3 << 20), ("bin/b", 9 << 20), ("README.txt", 100), ("bin/c", 4 << 20)]);
        let sum = (16 << 20) + 100;
        assert_eq!(total(&files, sum).unwrap(), sum);
        let error = total(&files, sum - 1).unwrap_err().to_string();
        assert!(error.ends_with("the largest: bin/b 9.0, bin/c 4.0, bin/a 3.0"), "{error}");
    }

    #[test]
    fn the_manifest_lists_every_file_with_its_size() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("bin")).unwrap();
        fs::write(folder.path().join("bin/x"), "12345").unwrap();
        fs::write(folder.path().join("run.sh"), "#!").unwrap();
        assert_eq!(manifest(&sizes(folder.path()).unwrap()), "5\tbin/x\n2\trun.sh\n");
    }

    #[test]
    fn only_an_older_bundle_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("out");
        clear(&out).unwrap();
        fs::create_dir(&out).unwrap();
        clear(&out).unwrap();
        fs::write(out.join("letter"), "to keep").unwrap();
        assert!(clear(&out).unwrap_err().to_string().contains("holds other files"));
        assert!(out.join("letter").is_file());
        fs::write(out.join(MANIFEST), "").unwrap();
        clear(&out).unwrap();
        assert!(!out.exists());
    }

    #[test]
    fn two_programs_of_one_name_are_told_apart_by_their_packages() {
        let message = |package: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/w/{package}/Cargo.toml","target":{{"name":"suite_on_gpu","kind":["test"]}},"executable":"/t/{package}","filenames":[]}}"#
            )
        };
        let built: Vec<_> = ["fp8-recipe", "fp8-nn"]
            .iter()
            .filter_map(|package| artifact::built(&message(package)))
            .collect();
        let by_name = |name| PROGRAMS.iter().find(|program| program.name == name).unwrap();
        assert_eq!(find(&built, by_name("layers")).unwrap(), Path::new("/t/fp8-nn"));
        assert_eq!(find(&built, by_name("recipe")).unwrap(), Path::new("/t/fp8-recipe"));
        let missing = find(&built, by_name("gpu_bench")).unwrap_err().to_string();
        assert!(missing.contains("bin gpu_bench of bench-gpu"), "{missing}");
    }

    #[test]
    fn recorded_samples_that_a_suite_reads_travel() {
        for package in suites().map(|suite| suite.package) {
            let tests = root().join(package).join("tests");
            for file in workspace::files(&tests).unwrap() {
                let text = fs::read_to_string(&file).unwrap_or_default();
                let folders = text.split("samples(\"").skip(1).filter_map(|rest| rest.split('"').next());
                for folder in folders {
                    let is_there = GOLDEN.contains(&(package, folder));
                    assert!(is_there, "{} reads tests/golden/{folder}", file.display());
                }
            }
        }
    }

    #[test]
    fn the_script_compares_reference_data_on_the_gpu_and_looks_where_that_was() {
        let (_, script) = TEXTS[0];
        let lines: Vec<_> = script.lines().map(str::trim).collect();
        let golden = lines.iter().position(|line| line.starts_with("step golden ")).unwrap();
        assert!(lines[golden].ends_with(" --device cuda:0"), "{}", lines[golden]);
        assert_eq!(lines[golden + 1], "demand golden \"device: cuda:0\"");
    }

    #[test]
    fn the_script_calls_every_program_by_the_name_that_it_has_in_the_bundle() {
        let (_, script) = TEXTS[0];
        for program in PROGRAMS {
            assert!(script.contains(&format!("bin/{}", program.name)), "{}", program.name);
        }
    }

    /// Both on a machine with a GPU, where they are in several folders, and on the simulated GPU.
    #[test]
    fn the_script_looks_for_every_library_of_the_simulated_gpu() {
        let (_, script) = TEXTS[0];
        for name in crate::sim::NAMES {
            let lists = script.lines().filter(|line| line.trim_start().starts_with("for name in lib"));
            assert_eq!(lists.filter(|line| line.contains(name)).count(), 2, "{name}");
        }
    }

    /// The words of a variable of the script.
    fn words(name: &str) -> Vec<&'static str> {
        let (_, script) = TEXTS[0];
        let start = format!("readonly {name}=\"");
        let line = script.lines().find_map(|line| line.strip_prefix(&*start)).unwrap();
        line.trim_end_matches('"').split(' ').collect()
    }

    #[test]
    fn the_script_profiles_kernels_that_there_are() {
        let texts: Vec<String> = workspace::files(&root().join("fp8-kernels/ptx"))
            .unwrap()
            .iter()
            .map(|file| fs::read_to_string(file).unwrap())
            .collect();
        assert_eq!(words("WORST").len(), 5);
        for kernel in words("WORST") {
            let entry = format!(".entry {kernel}(");
            assert!(texts.iter().any(|text| text.contains(&entry)), "{kernel} is no kernel");
        }
    }

    #[test]
    fn the_three_calls_consist_of_suites() {
        let (_, script) = TEXTS[0];
        let known: Vec<_> = words("ALL").into_iter().chain(words("PARTS")).collect();
        for suite in &known {
            assert!(script.contains(&format!("\nsuite_{suite}() {{")), "{suite}");
        }
        for suite in ["CALL_1", "CALL_2", "CALL_3"].into_iter().flat_map(words) {
            assert!(known.contains(&suite), "{suite}");
        }
        // Each part is in one of the calls.
        for part in words("PARTS") {
            let calls = ["CALL_1", "CALL_2", "CALL_3"].map(words);
            assert_eq!(calls.iter().flatten().filter(|suite| **suite == part).count(), 1, "{part}");
        }
    }

    #[test]
    fn every_python_file_is_started_by_the_script_or_imported_by_another() {
        let lines: Vec<_> = TEXTS.iter().flat_map(|(_, text)| text.lines()).map(str::trim).collect();
        for name in TEXTS.iter().filter_map(|(name, _)| name.strip_suffix(".py")) {
            let started = format!("$here/{name}.py");
            let imported = [format!("import {name}"), format!("from {name} import ")];
            let is_used =
                |line: &&str| line.contains(&started) || imported.iter().any(|i| line.starts_with(i));
            assert!(lines.iter().any(is_used), "{name}");
        }
    }
}
