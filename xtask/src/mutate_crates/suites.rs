//! The tests that judge the mutants of each crate, in the order in which they run.

use std::path::PathBuf;

/// Programs of one package that are built together and run one after the other.
#[derive(Debug)]
pub(super) struct Suite {
    pub(super) package: &'static str,
    /// [`LIB`], [`BIN`] or the name of a test. A test starts the program itself, so [`BIN`] has a suite of its own.
    pub(super) targets: &'static [&'static str],
    /// Given to each program.
    pub(super) arguments: &'static [&'static str],
}

/// The unit tests of the package's library.
pub(super) const LIB: &str = "lib";
/// The unit tests of the package's program.
pub(super) const BIN: &str = "bin";

/// The crates and their suites. A mutant that one suite does not kill is left to the next: first the one that kills
/// most on the CPU, then the simulated GPU, then tests of the crate above. Unit tests come later: they compile a crate
/// again. fp8-nn's tests of convergence and of failing calls are left out: they take minutes each.
pub(super) const CRATES: [(&str, &[Suite]); 5] = [
    (
        "fp8-recipe",
        &[
            Suite { package: "fp8-recipe", targets: &["suite"], arguments: &[] },
            Suite { package: "fp8-recipe", targets: &["suite_on_gpu", "launches_on_gpu"], arguments: &[] },
            Suite { package: "fp8-recipe", targets: &[LIB], arguments: &[] },
            Suite { package: "fp8-dist", targets: &["dist"], arguments: &[] },
        ],
    ),
    (
        "fp8-dist",
        &[
            Suite { package: "fp8-dist", targets: &["dist_over_tcp"], arguments: &[] },
            Suite { package: "fp8-dist", targets: &[LIB, "dist"], arguments: &[] },
            Suite { package: "fp8-dist", targets: &["nccl"], arguments: &[] },
            Suite { package: "fp8-nn", targets: &["suite"], arguments: &["data_parallel"] },
        ],
    ),
    (
        "fp8-nn",
        &[
            Suite { package: "fp8-nn", targets: &["suite"], arguments: &[] },
            Suite { package: "fp8-nn", targets: &[LIB, "killed_saves"], arguments: &[] },
            Suite { package: "fp8-nn", targets: &["suite_on_gpu"], arguments: &[] },
        ],
    ),
    (
        "fp8-hf",
        &[
            Suite { package: "fp8-hf", targets: &["suite"], arguments: &[] },
            Suite { package: "fp8-hf", targets: &[LIB], arguments: &[] },
            Suite { package: "fp8-cli", targets: &["program"], arguments: &[] },
        ],
    ),
    (
        "fp8-cli",
        &[
            Suite { package: "fp8-cli", targets: &[BIN], arguments: &[] },
            Suite { package: "fp8-cli", targets: &["program"], arguments: &[] },
        ],
    ),
];

/// The file or folder of the test that is called `test` in the target's program, relative to the workspace.
pub(super) fn source(package: &str, target: &str, test: &str) -> PathBuf {
    let folder = match target {
        LIB | BIN => return [package, "src"].iter().collect(),
        "suite_on_gpu" => "suite",
        "dist_over_tcp" => "dist",
        other => other,
    };
    let tests: PathBuf = [package, "tests"].iter().collect();
    let (folder, test) = match test.strip_prefix("every_device::") {
        Some(test) => (format!("{folder}/every_device"), test),
        None => (folder.to_owned(), test),
    };
    match test.split_once("::") {
        Some((module, _)) => tests.join(folder).join(format!("{module}.rs")),
        None => tests,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::{Workspace, root, shell};

    #[test]
    fn every_target_is_one_of_its_package() {
        let workspace = Workspace::read(&shell().unwrap()).unwrap();
        for suite in CRATES.iter().flat_map(|(_, suites)| *suites) {
            for target in suite.targets.iter().filter(|target| ![LIB, BIN].contains(target)) {
                let is_there = |(package, test): (&crate::workspace::Package, &crate::workspace::Target)| {
                    package.name == suite.package && test.name == **target
                };
                assert!(workspace.targets("test").any(is_there), "{suite:?} has no {target}");
            }
        }
    }

    #[test]
    fn a_test_is_in_the_file_of_its_module() {
        let file = source("fp8-recipe", "suite_on_gpu", "every_device::scopes::nested::a_test");
        assert!(root().join(&file).is_file(), "{}", file.display());
        assert!(root().join(source("fp8-dist", "dist_over_tcp", "failures::a_test")).is_file());
        assert_eq!(source("fp8-cli", BIN, "train::job::tests::a_test"), PathBuf::from("fp8-cli/src"));
        assert_eq!(source("fp8-recipe", "launches_on_gpu", "a_test"), PathBuf::from("fp8-recipe/tests"));
    }
}
