//! Snapshots of the kernels' PTX: fresh, exact, complete.
//!
//! They are written by `cargo xtask ptx`, run by simulated devices and read here, so that neither needs a compiler.

#![expect(clippy::unwrap_used, reason = "a file that cannot be read is a failed test")]

#[path = "snapshots/headers.rs"]
mod headers;
#[path = "snapshots/rules.rs"]
mod rules;
#[path = "snapshots/signatures.rs"]
mod signatures;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{env, fs};

use sha2::{Digest, Sha256};

const KERNELS: &str = "src/backend/cuda/ops";
const SNAPSHOTS: &str = "ptx";
/// Snapshots of files with code for single architectures, made for one that has it.
const SPECIFIC: &str = "cuda-sim/ptx";
const MAX_BYTES: usize = 1 << 20;
/// The limit for all snapshots together, which every user downloads and every program carries.
const MAX_BYTES_OF_ALL: usize = 8_500_000;

fn folder(name: &str) -> PathBuf {
    let package = env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    Path::new(&package).join(name)
}

/// Stems and contents of the files with this ending.
fn read(folder: &Path, end: &str) -> BTreeMap<String, String> {
    let entries = fs::read_dir(folder).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths
        .filter(|path| path.extension().is_some_and(|found| found == end))
        .map(|path| {
            (path.file_stem().unwrap().to_str().unwrap().to_owned(), fs::read_to_string(&path).unwrap())
        })
        .collect()
}

/// Stems and texts of all kernel files.
fn kernels() -> BTreeMap<String, String> {
    let mut kernels = read(&folder(KERNELS), "cu");
    kernels.extend(read(&folder(KERNELS).join("attention"), "cu"));
    kernels
}

fn snapshots() -> BTreeMap<String, String> {
    read(&folder(SNAPSHOTS), "ptx")
}

/// Names of all kernels of a snapshot, each with what stands between its name and its body.
fn entries(ptx: &str) -> Vec<(&str, &str)> {
    let heads = ptx.split(".entry ").skip(1).map(|rest| rest.split('{').next().unwrap());
    heads.map(|head| head.split_once('(').unwrap()).collect()
}

fn expect_none(problems: &[String]) {
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
}

#[test]
fn every_kernel_file_has_a_fresh_snapshot_and_every_snapshot_its_file() {
    let prelude = headers::prelude(&folder(KERNELS)).unwrap();
    let snapshots = snapshots();
    let kernels = kernels();
    let mut problems = Vec::new();
    for (name, text) in &kernels {
        let read = |header: &str| headers::read(&folder(KERNELS), header);
        let program = headers::expand(&prelude, &format!("{name}.cu"), text, read).unwrap();
        let hash: String = Sha256::digest(program).iter().map(|byte| format!("{byte:02x}")).collect();
        match snapshots.get(name) {
            None => problems.push(format!("{name}.cu has no snapshot: run `cargo xtask ptx`")),
            Some(ptx) if !ptx.contains(&format!("// source sha256: {hash}\n")) => {
                problems.push(format!("{name}.ptx is stale: run `cargo xtask ptx`"));
            }
            Some(ptx) => {
                let head = format!("// fp8-kernels kernel snapshot: {name}.cu\n");
                if !ptx.starts_with(&head)
                    || !ptx.contains("\n// options: -std=c++17 -fmad=false -lineinfo\n")
                {
                    problems
                        .push(format!("{name}.ptx: the header is not the usual one: run `cargo xtask ptx`"));
                }
            }
        }
    }
    for name in snapshots.keys().filter(|name| !kernels.contains_key(*name)) {
        problems.push(format!("{name}.ptx has no {name}.cu: run `cargo xtask ptx`"));
    }
    expect_none(&problems);
}

#[test]
fn files_with_code_for_single_architectures_have_a_second_snapshot() {
    let (snapshots, mut problems) = (snapshots(), Vec::new());
    let mut specific = read(&folder(SPECIFIC), "ptx");
    let is_head = |line: &&str| line.starts_with("// ");
    for (name, text) in kernels() {
        let header = |header: &str| headers::read(&folder(KERNELS), header);
        let program = headers::expand("", &name, &text, header).unwrap();
        if !program.contains("__CUDA_ARCH_FAMILY_SPECIFIC__") {
            continue;
        }
        let Some(ptx) = specific.remove(&format!("{name}.sm_100a")) else {
            problems.push(format!("{name}.cu has no snapshot of sm_100a: run `cargo xtask ptx`"));
            continue;
        };
        if !ptx.lines().take_while(is_head).eq(snapshots[&name].lines().take_while(is_head)) {
            problems.push(format!("{name}.sm_100a.ptx is stale: run `cargo xtask ptx`"));
        }
        problems
            .extend(rules::breaches(&name, &ptx).iter().map(|breach| format!("{name}.sm_100a.ptx:{breach}")));
    }
    problems
        .extend(specific.keys().map(|name| format!("{name}.ptx has no kernel file: run `cargo xtask ptx`")));
    expect_none(&problems);
}

#[test]
fn kernels_use_only_operations_with_the_same_bits_everywhere() {
    let mut problems = Vec::new();
    let snapshots = snapshots();
    for (name, ptx) in &snapshots {
        problems.extend(rules::breaches(name, ptx).iter().map(|breach| format!("{name}.ptx:{breach}")));
    }
    for (name, rule, _) in rules::EXCEPTIONS {
        let needs = |ptx: &String| rules::breaches("", ptx).iter().any(|breach| breach.ends_with(rule));
        if !snapshots.get(name).is_some_and(needs) {
            problems.push(format!("{name}.ptx needs no exception any more: {rule}"));
        }
    }
    expect_none(&problems);
}

#[test]
fn every_kernel_declares_its_threads_and_no_name_occurs_twice() {
    let mut problems = Vec::new();
    let mut owners = BTreeMap::new();
    for (name, ptx) in &snapshots() {
        for (kernel, head) in entries(ptx) {
            if !head.contains(".maxntid") {
                problems.push(format!("{name}.ptx: {kernel}: no .maxntid: add __launch_bounds__"));
            }
            if let Some(other) = owners.insert(kernel.to_owned(), name.clone()) {
                problems.push(format!("{kernel} is in {other}.cu and in {name}.cu: rename one"));
            }
        }
    }
    expect_none(&problems);
}

#[test]
fn snapshots_are_small_and_their_kernels_stand_in_the_table() {
    let table = fs::read_to_string(folder(SNAPSHOTS).join("registers.txt")).unwrap();
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().take(2).collect()).collect();
    let bad = table.lines().filter(|line| !line.starts_with('#') && line.ends_with('!'));
    let mut problems: Vec<String> =
        bad.map(|line| format!("registers.txt: {line}: see `cargo xtask ptx`")).collect();
    for (name, ptx) in &snapshots() {
        if ptx.len() > MAX_BYTES {
            problems.push(format!("{name}.ptx: {} bytes: at most {MAX_BYTES}; split the file", ptx.len()));
        }
        for (kernel, _) in entries(ptx) {
            if !rows.contains(&vec![name.as_str(), kernel]) {
                problems.push(format!("registers.txt: no row for {name} {kernel}: run `cargo xtask ptx`"));
            }
        }
    }
    expect_none(&problems);
}

#[test]
fn shipped_snapshots_have_no_debug_information_and_are_small_together() {
    let snapshots = snapshots();
    let is_debug =
        |line: &str| [".loc", ".file", ".section"].iter().any(|name| line.trim_start().starts_with(name));
    let with_debug = snapshots.iter().filter(|(_, ptx)| ptx.lines().any(is_debug));
    expect_none(
        &with_debug.map(|(name, _)| format!("{name}.ptx: run `cargo xtask ptx`")).collect::<Vec<_>>(),
    );
    let bytes: usize = snapshots.values().map(String::len).sum();
    assert!(bytes < MAX_BYTES_OF_ALL, "{bytes} bytes of PTX: less than {MAX_BYTES_OF_ALL} are shipped");
    assert!(bytes > 1 << 20, "{bytes} bytes of PTX: were they all read?");
}

#[test]
fn signatures_in_rust_are_those_of_the_kernel_files() {
    let programs = kernels().into_iter().map(|(name, text)| {
        let header = |header: &str| headers::read(&folder(KERNELS), header);
        let program = headers::expand("", &name, &text, header).unwrap();
        (name, program)
    });
    let programs: Vec<(String, String)> = programs.collect();
    let programs = programs.iter().map(|(name, program)| (name.as_str(), program.as_str()));
    let written = fs::read_to_string(folder(KERNELS).join("kernels.rs")).unwrap();
    let expected = signatures::generate(programs).unwrap();
    assert!(written == expected, "kernels.rs is stale: run `cargo xtask ptx`");
}
