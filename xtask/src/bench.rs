//! `cargo xtask bench`: criterion benches, found through cargo; `cargo xtask bench codec`: the codec against the memory's
//! ceiling and against other libraries, by the program `bench-codec`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use xshell::{Shell, cmd};

use crate::workspace::{Result, Workspace, shell};

#[derive(clap::Args)]
pub(crate) struct Bench {
    /// Benches, or packages whose benches to run [default: all]
    names: Vec<String>,
    /// Lists packages and benches without running them
    #[arg(long)]
    list: bool,
    /// With `codec`: also measures the float8 crate, torch and ml_dtypes; installs the latter two in cargo's target folder
    #[arg(long)]
    peers: bool,
    /// With `codec`: writes all rows to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Arguments for criterion, such as a filter, --quick, --save-baseline NAME, …
    #[arg(last = true)]
    criterion: Vec<String>,
}

pub(crate) fn run(options: &Bench) -> Result {
    let sh = shell()?;
    if options.names == [CODEC] && !options.list {
        return codec(&sh, options);
    }
    if options.peers || options.json.is_some() {
        return Err("bench: --peers and --json work only with codec: cargo xtask bench codec --peers".into());
    }
    let workspace = Workspace::read(&sh)?;
    let found: Vec<_> =
        workspace.targets("bench").map(|(package, bench)| (&*package.name, &*bench.name)).collect();
    if options.list {
        for (package, bench) in found {
            println!("{package:12} {bench}");
        }
        println!("{:12} {CODEC}", "bench-codec");
        return Ok(());
    }

    // All features of all packages, whatever was chosen: the next choice finds its build ready.
    let benches = select(&found, &options.names)?.into_iter().flat_map(|bench| ["--bench", bench]);
    let criterion = &options.criterion;
    cmd!(sh, "cargo bench --workspace --all-features {benches...} -- {criterion...}").run()?;
    Ok(())
}

/// The program that measures the codec.
const CODEC: &str = "codec";

fn codec(sh: &Shell, options: &Bench) -> Result {
    let mut arguments: Vec<OsString> = Vec::new();
    if options.peers {
        arguments.extend(["--peers".into(), python(sh)?.into()]);
    }
    if let Some(file) = &options.json {
        arguments.extend(["--json".into(), std::path::absolute(file)?.into()]);
    }
    arguments.extend(options.criterion.iter().map(OsString::from));
    cmd!(sh, "cargo run --quiet --release --package bench-codec -- {arguments...}").run()?;
    Ok(())
}

/// An interpreter with the other libraries, in an environment of its own.
fn python(sh: &Shell) -> Result<PathBuf> {
    let folder = Workspace::read(sh)?.target_directory.join("peers");
    let python = folder.join("bin/python");
    let has_all = |python: &Path| {
        cmd!(sh, "{python} -c").arg("import torch, ml_dtypes").quiet().ignore_stderr().run().is_ok()
    };
    if has_all(&python) {
        return Ok(python);
    }
    println!("bench: installing torch and ml_dtypes in {}", folder.display());
    cmd!(sh, "python3 -m venv {folder}").run()?;
    let pip = folder.join("bin/pip");
    // The build for CPUs alone is a tenth as large, where its index can be reached.
    let index = "https://download.pytorch.org/whl/cpu";
    let small = cmd!(sh, "{pip} install --quiet --retries 0 --timeout 10 torch --index-url {index}");
    if small.ignore_stderr().run().is_err() {
        cmd!(sh, "{pip} install --quiet --no-cache-dir torch").run()?;
    }
    cmd!(sh, "{pip} install --quiet ml_dtypes numpy setuptools").run()?;
    if has_all(&python) {
        Ok(python)
    } else {
        Err(format!(
            "bench: {} cannot import torch and ml_dtypes: remove the folder to install them anew",
            python.display()
        )
        .into())
    }
}

/// The benches that `names` mean, in the order of `found`.
fn select<'a>(found: &[(&'a str, &'a str)], names: &[String]) -> Result<Vec<&'a str>> {
    let known = |name: &String| found.iter().any(|(package, bench)| name == package || name == bench);
    if let Some(name) = names.iter().find(|name| !known(name)) {
        return Err(format!("bench: unknown name {name}: see cargo xtask bench --list").into());
    }
    let chosen = |package: &str, bench: &str| names.iter().any(|name| name == package || name == bench);
    let selected: Vec<&str> = found
        .iter()
        .filter(|(package, bench)| names.is_empty() || chosen(package, bench))
        .map(|&(_, bench)| bench)
        .collect();
    if selected.is_empty() {
        return Err("bench: the workspace has no benches".into());
    }
    Ok(selected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_select_benches_and_packages_and_none_selects_all() {
        let found = [("fp8-format", "codec"), ("fp8-format", "slice"), ("fp8-kernels", "gemm")];
        let select = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
            select(&found, &names).map_err(|error| error.to_string())
        };
        assert_eq!(select(&[]), Ok(vec!["codec", "slice", "gemm"]));
        assert_eq!(select(&["gemm", "codec"]), Ok(vec!["codec", "gemm"]));
        assert_eq!(select(&["fp8-format"]), Ok(vec!["codec", "slice"]));
        assert_eq!(select(&["gem"]), Err("bench: unknown name gem: see cargo xtask bench --list".to_owned()));
    }
}
