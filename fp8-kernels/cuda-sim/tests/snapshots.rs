//! `FP8_SIM_SNAPSHOTS`: a folder of PTX in place of built-in snapshots. The device is started in a process of its own.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]
#![expect(clippy::print_stdout, reason = "what the child process answers with")]
#![expect(
    clippy::multiple_unsafe_ops_per_block,
    reason = "calls of the C interface, one after another under one contract"
)]

#[path = "../../tests/snapshots/headers.rs"]
mod headers;
mod rig;

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, ptr};

use cudarc::driver::CudaContext;
use libloading::os::unix::Library;
use rig::control;

/// An empty folder of a test.
fn folder(test: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("snapshots").join(test);
    if folder.exists() {
        fs::remove_dir_all(&folder).unwrap();
    }
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// The built-in snapshot that is replaced, as files beside the kernels hold it.
fn original() -> String {
    let package = env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    fs::read_to_string(Path::new(&package).join("../ptx/cells.ptx")).unwrap()
}

/// The text that NVRTC gets for that file.
fn source() -> String {
    let package = env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let kernels = Path::new(&package).join("../src/backend/cuda/ops");
    let read = |header: &str| headers::read(&kernels, header);
    headers::expand(&headers::prelude(&kernels).unwrap(), "cells.cu", &read("cells.cu").unwrap(), read)
        .unwrap()
}

/// Compiles the kernel file and says what came out; a test of its own only where it is asked to be one.
#[test]
fn child() {
    if env::var_os("FP8_SIM_TEST_CHILD").is_none() {
        return;
    }
    control();
    if let Err(error) = CudaContext::new(0) {
        println!("refused with {}", error.0 as u32);
        return;
    }
    match compile(&source()) {
        Ok(ptx) => println!("compiled to {ptx:?}"),
        Err(status) => println!("not compiled: {status}"),
    }
}

/// The PTX of a program, or why there is none.
fn compile(source: &str) -> Result<String, c_int> {
    type Program = *mut c_void;
    type Texts = *const *const c_char;
    type Create =
        unsafe extern "C" fn(*mut Program, *const c_char, *const c_char, c_int, Texts, Texts) -> c_int;
    type Compile = unsafe extern "C" fn(Program, c_int, Texts) -> c_int;
    type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
    type Text = unsafe extern "C" fn(Program, *mut c_char) -> c_int;

    let source = CString::new(source).unwrap();
    let options = [c"-arch=sm_90", c"-std=c++17", c"-fmad=false", c"-lineinfo"].map(|option| option.as_ptr());
    let (mut program, mut size, none) = (ptr::null_mut(), 0, ptr::null());
    // SAFETY: the library is loaded already and has no initializers; the types are NVRTC's; every pointer lives through
    // its call, and the text has the size that the library asks for.
    unsafe {
        let library = Library::new(fp8_cuda_sim::library_path().unwrap()).unwrap();
        let create = library.get::<Create>(b"nvrtcCreateProgram").unwrap();
        assert_eq!(create(&mut program, source.as_ptr(), c"cells.cu".as_ptr(), 0, none, none), 0);
        let status = library.get::<Compile>(b"nvrtcCompileProgram").unwrap()(program, 4, options.as_ptr());
        if status != 0 {
            return Err(status);
        }
        assert_eq!(library.get::<Size>(b"nvrtcGetPTXSize").unwrap()(program, &mut size), 0);
        let mut text = vec![0_u8; size];
        assert_eq!(library.get::<Text>(b"nvrtcGetPTX").unwrap()(program, text.as_mut_ptr().cast()), 0);
        text.truncate(size - 1);
        Ok(String::from_utf8(text).unwrap())
    }
}

/// Runs a process with this value of the variable and returns what it prints to stdout and to stderr.
fn start(value: &Path) -> (String, String) {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "child", "--nocapture"]).env("FP8_SIM_TEST_CHILD", "1");
    let output = command.env("FP8_SIM_SNAPSHOTS", value).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

#[test]
fn a_file_of_the_folder_is_what_its_source_compiles_to() {
    let folder = folder("replaced");
    fs::write(folder.join("notes.txt"), "other files are passed over").unwrap();
    let (plain, _) = start(&folder);
    assert!(plain.contains("compiled to ") && plain.contains("cells_merge_max"), "{plain}");

    fs::write(folder.join("cells.ptx"), original().replace("cells_merge_max", "something_else")).unwrap();
    let (replaced, _) = start(&folder);
    assert!(replaced.contains("something_else") && !replaced.contains("cells_merge_max"), "{replaced}");

    let head = "// source sha256: ";
    let at = original().find(head).unwrap() + head.len();
    let mut other = original();
    other.replace_range(at..at + 64, &"0".repeat(64));
    fs::write(folder.join("cells.ptx"), other).unwrap();
    let (refused, _) = start(&folder);
    assert!(refused.contains("not compiled"), "the snapshot of another text: {refused}");
}

#[test]
fn a_folder_that_cannot_be_used_fails_the_start_and_is_named() {
    let folder = folder("refused");
    let expect_refusal = |value: &Path, why: &str| {
        let (out, err) = start(value);
        assert!(out.contains("refused with 999"), "{out}");
        assert_eq!(err.matches("FP8_SIM_SNAPSHOTS").count(), 1, "once: {err}");
        assert!(err.contains(why), "{err}");
    };
    expect_refusal(&folder.join("absent"), "absent");
    fs::write(folder.join("cells.ptx"), "no head").unwrap();
    expect_refusal(&folder, "cells.ptx: no line");
    fs::write(folder.join("cells.ptx"), original()).unwrap();
    fs::write(folder.join("sells.ptx"), original()).unwrap();
    expect_refusal(&folder, "sells.ptx: no snapshot of this name is built in");
}
