//! NVIDIA's libraries: found, absent, or something else. A process keeps the first that it opens, so most tests here have
//! processes of their own.

#![cfg(feature = "cuda")]
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]
#![expect(clippy::print_stdout, reason = "why a test has nothing to do on this machine")]

mod cuda;

use cuda::step::Step;
use cuda::{Rig, child, library};
use fp8_cuda_sim::Control;
use fp8_kernels::{CudaOptions, Device, Error};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

const SYSTEM: [&str; 6] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib/wsl/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/cuda/lib64",
];

/// Whether the machine has a library of this name, which a search finds whatever the environment says.
fn is_installed(name: &str) -> bool {
    let listed = Command::new("ldconfig").arg("-p").output().map(|list| list.stdout).unwrap_or_default();
    let found = SYSTEM.iter().any(|folder| Path::new(folder).join(name).exists())
        || String::from_utf8_lossy(&listed).contains(name);
    if found {
        println!("{name} is installed on this machine: its absence cannot be tested");
    }
    found
}

/// A folder that has the simulated driver under these names.
fn folder(names: &[&str]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in names {
        std::os::unix::fs::symlink(library(), folder.path().join(name)).unwrap();
    }
    folder
}

fn open(library: impl Into<PathBuf>) -> Result<Device, Error> {
    Device::cuda_with_options(&CudaOptions { library: Some(library.into()), ..CudaOptions::default() })
}

/// Returns the outcome of a step on a device, as text.
fn outcome(device: &Device) -> String {
    format!("{:?}", Step::new(device, 2.0).unwrap().run().unwrap())
}

/// Returns the outcome on the simulated device, which compiles its kernels.
fn expected() -> String {
    let rig = Rig::new();
    let device = rig.open();
    let outcome = outcome(&device);
    assert!(rig.calls("nvrtcCompileProgram") > 0);
    drop(device);
    rig.finish();
    outcome
}

#[test]
fn a_machine_without_a_driver_is_told_every_place() {
    if is_installed("libcuda.so.1") {
        return;
    }
    let empty = tempfile::tempdir().unwrap();
    let variables = [
        ("FP8_CUDA_LIB_DIR", empty.path()),
        ("CUDA_HOME", Path::new("/nowhere/cuda")),
        ("VIRTUAL_ENV", Path::new("/nowhere/venv")),
    ];
    let answers = child::run("opens_by_search", &variables);
    let [text] = answers.as_slice() else { panic!("{answers:?}") };
    assert!(text.starts_with("error: libcuda.so.1 not found (looked in "), "{text}");
    let mut places = vec![
        format!("{}/libcuda.so.1", empty.path().display()),
        "the dynamic linker's search for libcuda.so.1".to_owned(),
        "/nowhere/cuda/lib64/libcuda.so.1".to_owned(),
        "/nowhere/cuda/compat/libcuda.so.1".to_owned(),
    ];
    places.extend(SYSTEM.map(|folder| format!("{folder}/libcuda.so.1")));
    let list = text.split_once("(looked in ").unwrap().1.split_once("): ").unwrap();
    assert_eq!(list.0.split(", ").collect::<Vec<_>>(), places);
    assert_eq!(
        list.1,
        "install NVIDIA's driver, version 570 or newer (580 without NVRTC), or use Device::cpu()"
    );
}

#[test]
fn a_driver_that_is_too_old_is_told_so_before_anything_else() {
    let folder = folder(&["libcuda.so.1"]);
    let opened = |version: &'static str| {
        let variables = [("FP8_CUDA_LIB_DIR", folder.path()), ("FP8_SIM_DRIVER", Path::new(version))];
        child::run("opens_by_search", &variables)
    };
    let [error] = &*opened("12040") else { panic!("CUDA 12.4 is too old") };
    assert!(
        error.starts_with("error: device: driver = ") && error.contains("libcuda.so.1, for CUDA 12.4"),
        "{error}"
    );
    let remedy = ": expected one for CUDA 12.8 or newer: update NVIDIA's driver to 570 or newer";
    assert!(error.ends_with(remedy), "{error}");
    assert!(opened("12080")[0].contains("PTX interpreter"));
}

#[test]
fn a_variable_that_cannot_be_used_is_named() {
    let folder = folder(&["libcuda.so.1"]);
    let variables = [("FP8_CUDA_LIB_DIR", folder.path()), ("FP8_CUDA_ALLOCATOR", Path::new("foo"))];
    let answers = child::run("opens_by_search", &variables);
    assert_eq!(answers, ["error: FP8_CUDA_ALLOCATOR=foo: expected caching or exact"]);
}

#[test]
fn driver_and_compiler_are_found_where_the_variable_points() {
    let folder = folder(&["libcuda.so.1", "libnvrtc.so.13"]);
    let answers = child::run("opens_by_search", &[("FP8_CUDA_LIB_DIR", folder.path())]);
    assert_eq!(answers[0], "PTX interpreter (sm_90)");
    assert_eq!(answers[1], expected());
    assert!(answers[2].contains("nvrtcCompileProgram"), "{}", answers[2]);
    assert_eq!(answers[3], "");
}

#[test]
fn without_the_compiler_kernels_are_those_that_came_along() {
    if is_installed("libnvrtc.so.13") || is_installed("libnvrtc.so.12") {
        return;
    }
    let folder = folder(&["libcuda.so.1"]);
    let answers = child::run("opens_by_search", &[("FP8_CUDA_LIB_DIR", folder.path())]);
    assert_eq!(answers[1], expected());
    assert!(answers[2].contains("cuModuleLoadData") && !answers[2].contains("nvrtc"), "{}", answers[2]);
    assert_eq!(answers[3], "");
}

/// Opens a device as the environment says and runs a step on it, when it is asked to.
#[test]
fn opens_by_search() {
    if !child::is_child() {
        return;
    }
    let device = match Device::cuda(0) {
        Ok(device) => device,
        Err(error) => return child::answer(format_args!("error: {error}")),
    };
    child::answer(device.description());
    child::answer(outcome(&device));
    drop(device);
    // The same file, so the same state.
    let control = Control::open(&library()).unwrap();
    child::answer(format_args!("{:?}", control.calls()));
    child::answer(control.live());
}

#[test]
fn an_architecture_that_the_compiler_does_not_know_runs_what_came_along() {
    let expected = expected();
    let rig = Rig::new();
    let faults: Vec<String> = (1..=16).map(|count| format!("nvrtcCompileProgram:{count}:5")).collect();
    rig.control.set("fail", &faults.join(",")).unwrap();
    let device = rig.open();
    assert_eq!(outcome(&device), expected);
    assert!((1..=16).contains(&rig.calls("nvrtcCompileProgram")));
    assert_eq!(rig.calls("nvrtcGetCUBIN"), 0);
    assert!(!rig.cache().join("cubin").exists());
    drop(device);
    rig.finish();
}

#[test]
fn another_library_is_refused_with_its_reason() {
    child::run("opens_wrong_libraries", &[]);
}

/// In a process that has no driver yet: nothing that fails here keeps the right one from being opened.
#[test]
fn opens_wrong_libraries() {
    if !child::is_child() {
        return;
    }
    let refused = |library: &Path| open(library).unwrap_err();

    let error = refused(Path::new("/nowhere/libcuda.so.1"));
    assert!(matches!(error, Error::LibraryMissing { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("/nowhere/libcuda.so.1 (") && text.contains("No such file"), "{text}");
    assert!(text.ends_with("): give the path of a library with the CUDA driver's functions"), "{text}");

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("libcuda.so.1");
    fs::write(&file, "not a library").unwrap();
    let error = refused(&file);
    assert!(matches!(error, Error::LibraryMissing { .. }), "{error:?}");
    assert!(error.to_string().contains("file too short"), "{error}");

    let error = refused(Path::new("libc.so.6"));
    let Error::SymbolMissing { library: named, symbol, .. } = &error else { panic!("{error:?}") };
    assert_eq!((named.as_str(), symbol.as_str()), ("libc.so.6", "cuDriverGetVersion"));
    assert_eq!(error.to_string(), "libc.so.6 has no cuDriverGetVersion: NVIDIA's driver 570 or newer has it");

    let device = open(library()).unwrap();
    let error = refused(Path::new("libc.so.6"));
    assert!(matches!(error, Error::Option { option: "library", .. }), "{error:?}");
    let used = library();
    assert_eq!(
        error.to_string(),
        format!(
            "device: library = libc.so.6: this process already uses {}; one process uses one driver",
            used.display()
        )
    );

    let second = CudaOptions { ordinal: 1, library: Some(library()), ..CudaOptions::default() };
    let error = Device::cuda_with_options(&second).unwrap_err().to_string();
    assert_eq!(error, "device: ordinal = 1: the driver lists 1 GPUs, numbered from 0");
    device.synchronize().unwrap();
}
