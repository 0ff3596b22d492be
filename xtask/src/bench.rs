//! `cargo xtask bench`: criterion benches, found through cargo.

use xshell::cmd;

use crate::workspace::{Result, Workspace, shell};

#[derive(clap::Args)]
pub(crate) struct Bench {
    /// Benches to run, or packages whose benches to run; all of them if none is named
    names: Vec<String>,
    /// Lists packages and benches and runs nothing
    #[arg(long)]
    list: bool,
    /// Arguments for criterion: a filter, --quick, --save-baseline NAME, …
    #[arg(last = true)]
    criterion: Vec<String>,
}

pub(crate) fn run(options: &Bench) -> Result {
    let sh = shell()?;
    let workspace = Workspace::read(&sh)?;
    let found: Vec<_> =
        workspace.targets("bench").map(|(package, bench)| (&*package.name, &*bench.name)).collect();
    if options.list {
        for (package, bench) in found {
            println!("{package:12} {bench}");
        }
        return Ok(());
    }

    // All features of all packages, whatever was chosen: the next choice finds its build ready.
    let benches = select(&found, &options.names)?.into_iter().flat_map(|bench| ["--bench", bench]);
    let criterion = &options.criterion;
    cmd!(sh, "cargo bench --workspace --all-features {benches...} -- {criterion...}").run()?;
    Ok(())
}

/// The benches that `names` mean, in the order of `found`.
fn select<'a>(found: &[(&'a str, &'a str)], names: &[String]) -> Result<Vec<&'a str>> {
    let known = |name: &String| found.iter().any(|(package, bench)| name == package || name == bench);
    if let Some(name) = names.iter().find(|name| !known(name)) {
        return Err(format!("bench: nothing is called {name}: see cargo xtask bench --list").into());
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
        assert_eq!(
            select(&["gem"]),
            Err("bench: nothing is called gem: see cargo xtask bench --list".to_owned())
        );
    }
}
