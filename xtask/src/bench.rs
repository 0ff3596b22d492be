//! `cargo xtask bench`: criterion benches, found through cargo, and three programs that compare with other libraries: `codec`,
//! by the package `bench-codec`, and `train` and `gemm`, by the package `bench-peers`.

mod peers;

use std::ffi::OsString;
use std::path::PathBuf;

use xshell::{Shell, cmd};

use crate::workspace::{Result, Workspace, shell};

#[derive(clap::Args)]
pub(crate) struct Bench {
    /// Benches, or packages whose benches to run [default: all]; or codec, train or gemm
    names: Vec<String>,
    /// Lists packages and benches without running them
    #[arg(long)]
    list: bool,
    /// With `codec`, `train` or `gemm`: also measures other libraries; installs them in cargo's target folder
    #[arg(long)]
    peers: bool,
    /// With `codec`, `train` or `gemm`: writes all results to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Arguments for criterion, such as a filter, --quick, --save-baseline NAME, …; or for codec, train or gemm: see -- --help
    #[arg(last = true)]
    rest: Vec<String>,
}

/// A program that is no criterion bench.
struct Program {
    name: &'static str,
    package: &'static str,
    /// The argument that selects it in its package.
    task: Option<&'static str>,
}

const PROGRAMS: [Program; 3] = [
    Program { name: "codec", package: "bench-codec", task: None },
    Program { name: "train", package: "bench-peers", task: Some("train") },
    Program { name: "gemm", package: "bench-peers", task: Some("gemm") },
];

pub(crate) fn run(options: &Bench) -> Result {
    let sh = shell()?;
    if let (Some(program), false) = (program(options)?, options.list) {
        return program.run(&sh, options);
    }
    let workspace = Workspace::read(&sh)?;
    let found: Vec<_> =
        workspace.targets("bench").map(|(package, bench)| (&*package.name, &*bench.name)).collect();
    if options.list {
        let programs = PROGRAMS.iter().map(|program| (program.package, program.name));
        for (package, bench) in found.into_iter().chain(programs) {
            println!("{package:12} {bench}");
        }
        return Ok(());
    }

    // All features of all packages, whatever was chosen: the next choice finds its build ready.
    let benches = select(&found, &options.names)?.into_iter().flat_map(|bench| ["--bench", bench]);
    let criterion = &options.rest;
    cmd!(sh, "cargo bench --workspace --all-features {benches...} -- {criterion...}").run()?;
    Ok(())
}

/// The program that the options name, if they name one.
fn program(options: &Bench) -> Result<Option<&'static Program>> {
    let named = PROGRAMS.iter().find(|program| options.names.iter().any(|name| name == program.name));
    match named {
        Some(_) if options.names.len() > 1 => {
            Err("bench: codec, train and gemm run alone: cargo xtask bench train".into())
        }
        None if options.peers || options.json.is_some() => {
            Err("bench: --peers and --json need codec, train or gemm: cargo xtask bench train --peers".into())
        }
        _ => Ok(named),
    }
}

impl Program {
    fn run(&self, sh: &Shell, options: &Bench) -> Result {
        let mut arguments: Vec<OsString> = self.task.map(OsString::from).into_iter().collect();
        if options.peers {
            let folder = Workspace::read(sh)?.target_directory.join("peers");
            arguments.extend(["--peers".into(), peers::python(sh, &folder)?.into()]);
            if self.name == "gemm" {
                arguments.extend(["--crates".into(), peers::crates(sh, &folder)?.into()]);
            }
        }
        if let Some(file) = &options.json {
            arguments.extend(["--json".into(), std::path::absolute(file)?.into()]);
        }
        arguments.extend(options.rest.iter().map(OsString::from));
        let package = self.package;
        cmd!(sh, "cargo run --quiet --release --package {package} -- {arguments...}").run()?;
        Ok(())
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
    fn programs_run_alone_and_only_they_have_peers() {
        let program = |names: &[&str], peers| {
            let names = names.iter().map(|&name| name.to_owned()).collect();
            let options = Bench { names, list: false, peers, json: None, rest: Vec::new() };
            let found = program(&options).map_err(|error| error.to_string());
            found.map(|program| program.map(|program| (program.package, program.task)))
        };
        assert_eq!(program(&["codec"], true), Ok(Some(("bench-codec", None))));
        assert_eq!(program(&["gemm"], false), Ok(Some(("bench-peers", Some("gemm")))));
        assert_eq!(program(&["slice"], false), Ok(None));
        let alone = program(&["train", "gemm"], false).unwrap_err();
        assert_eq!(alone, "bench: codec, train and gemm run alone: cargo xtask bench train");
        let needed = program(&[], true).unwrap_err();
        let expected = "bench: --peers and --json need codec, train or gemm: cargo xtask bench train --peers";
        assert_eq!(needed, expected);
    }

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
