//! Compiled kernels on disk: compiled once for all processes, and nothing that happens to the files changes a result.

#![cfg(feature = "cuda")]
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod cuda;

use cuda::step::{Outcome, Step};
use cuda::{Rig, child, library, options};
use fp8_cuda_sim::Control;
use fp8_kernels::{CudaOptions, Device};
use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;

/// A step on a device of its own.
fn step(options: &CudaOptions) -> Outcome {
    let device = Device::cuda_with_options(options).unwrap();
    Step::new(&device, 2.0).unwrap().run().unwrap()
}

/// Runs a step and also returns the number of calls of the compiler.
fn compiled(rig: &Rig, options: &CudaOptions) -> (Outcome, u64) {
    let before = rig.calls("nvrtcCompileProgram");
    let outcome = step(options);
    (outcome, rig.calls("nvrtcCompileProgram") - before)
}

/// The folder's files, and of each what its bytes hash to; they are kept kernels, all of them.
fn kept(cache: &Path) -> BTreeMap<String, u64> {
    let file = |entry: std::io::Result<fs::DirEntry>| {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        assert!(name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit()), "{name}");
        let mut hash = DefaultHasher::new();
        fs::read(entry.path()).unwrap().hash(&mut hash);
        (name, hash.finish())
    };
    fs::read_dir(cache.join("cubin")).unwrap().map(file).collect()
}

#[test]
fn a_kernel_is_compiled_once() {
    let rig = Rig::new();
    let (outcome, count) = compiled(&rig, &rig.options());
    let files = kept(rig.cache());
    assert!(count >= 3, "{count}");
    assert_eq!(files.len() as u64, count);
    assert_eq!(compiled(&rig, &rig.options()), (outcome, 0));
    assert_eq!(kept(rig.cache()), files);
    rig.finish();
}

#[test]
fn each_architecture_has_kernels_of_its_own() {
    let rig = Rig::new();
    let (outcome, count) = compiled(&rig, &rig.options());
    rig.control.set("arch", "89").unwrap();
    assert_eq!(compiled(&rig, &rig.options()), (outcome.clone(), count));
    assert_eq!(kept(rig.cache()).len() as u64, 2 * count);
    assert_eq!(compiled(&rig, &rig.options()), (outcome, 0));
    rig.finish();
}

type Damage<'a> = &'a dyn Fn(&mut Vec<u8>);

#[test]
fn a_damaged_file_is_compiled_anew_and_replaced() {
    let rig = Rig::new();
    let (outcome, count) = compiled(&rig, &rig.options());
    let files = kept(rig.cache());
    let flip = |at: usize| move |bytes: &mut Vec<u8>| bytes[at] ^= 0x10;
    let damages: [(&str, Damage<'_>); 11] = [
        ("cut in the header", &|bytes| bytes.truncate(47)),
        ("cut in the payload", &|bytes| bytes.truncate(bytes.len() / 2)),
        ("without its last byte", &|bytes| bytes.truncate(bytes.len() - 1)),
        ("empty", &Vec::clear),
        ("garbage", &|bytes| bytes.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i * 37) as u8)),
        ("a byte longer", &|bytes| bytes.push(0)),
        ("another magic", &flip(0)),
        ("another length", &flip(8)),
        ("another hash", &flip(16)),
        ("a byte in the middle", &|bytes| *bytes.get_mut(9000).unwrap() ^= 1),
        ("the last byte", &|bytes| *bytes.last_mut().unwrap() ^= 0x80),
    ];
    for (damage, apply) in damages {
        for name in files.keys() {
            let path = rig.cache().join("cubin").join(name);
            let mut bytes = fs::read(&path).unwrap();
            apply(&mut bytes);
            fs::write(path, bytes).unwrap();
        }
        assert_eq!(compiled(&rig, &rig.options()), (outcome.clone(), count), "{damage}");
        assert_eq!(kept(rig.cache()), files, "{damage}");
    }
    rig.finish();
}

#[test]
fn a_kernel_that_the_driver_refuses_is_compiled_anew() {
    let rig = Rig::new();
    let (outcome, _) = compiled(&rig, &rig.options());
    let files = kept(rig.cache());
    // Whole as a file; as an image the driver does not take it.
    rig.control.fail("cuModuleLoadData", 2, 209).unwrap();
    assert_eq!(compiled(&rig, &rig.options()), (outcome.clone(), 1));
    assert_eq!(kept(rig.cache()), files);
    assert_eq!(compiled(&rig, &rig.options()), (outcome, 0));
    rig.finish();
}

#[test]
fn a_folder_that_cannot_be_used_is_no_error() {
    let rig = Rig::new();
    let (outcome, count) = compiled(&rig, &rig.options());
    let file = rig.cache().join("file");
    fs::write(&file, b"in the way").unwrap();
    let blocked = rig.cache().join("blocked");
    fs::create_dir(&blocked).unwrap();
    fs::write(blocked.join("cubin"), b"in the way").unwrap();
    // Every kernel's name is taken by a folder.
    let taken = rig.cache().join("taken");
    for name in kept(rig.cache()).into_keys() {
        fs::create_dir_all(taken.join("cubin").join(name)).unwrap();
    }
    for folder in [&file, &blocked, &taken, Path::new("/proc/nowhere"), Path::new("/dev/null")] {
        assert_eq!(compiled(&rig, &options(folder)), (outcome.clone(), count), "{}", folder.display());
    }
    assert_eq!(fs::read(&file).unwrap(), b"in the way");
    let left = fs::read_dir(taken.join("cubin")).unwrap().count();
    assert_eq!(left as u64, count, "temporary files");
    rig.finish();
}

/// Runs a step with what the environment says, when it is asked to.
#[test]
fn child() {
    if !child::is_child() {
        return;
    }
    let outcome = step(&CudaOptions { library: Some(library()), ..CudaOptions::default() });
    child::answer(format_args!("{outcome:?}"));
    let calls = Control::open(&library()).unwrap().calls();
    child::answer(calls.get("nvrtcCompileProgram").copied().unwrap_or(0));
}

#[test]
fn processes_at_once_share_a_folder() {
    let rig = Rig::new();
    let (outcome, count) = compiled(&rig, &rig.options());
    let folder = rig.cache().join("shared");
    let variables = [("FP8_CACHE_DIR", folder.as_path())];
    let children = [(); 4].map(|()| child::start("child", &variables));
    for started in children {
        assert_eq!(child::finish(started)[0], format!("{outcome:?}"));
    }
    assert_eq!(kept(&folder), kept(rig.cache()));
    assert_eq!(child::run("child", &variables), [format!("{outcome:?}"), "0".to_owned()]);
    assert!(count > 0);
    rig.finish();
}

#[test]
fn the_environment_says_where_kernels_are_kept() {
    let rig = Rig::new();
    let home = rig.cache();
    let [own, none] = [home.join("own"), Path::new("").to_owned()];
    let compiles = |variables: &[(&str, &Path)]| child::run("child", variables)[1].parse::<u64>().unwrap();
    let count = compiles(&[("HOME", home), ("FP8_CACHE_DIR", &own)]);
    assert_eq!(kept(&own).len() as u64, count);
    assert_eq!(compiles(&[("HOME", home), ("FP8_CACHE_DIR", &none)]), count);
    assert_eq!(compiles(&[]), count, "no home, no cache");
    assert!(!home.join(".cache").exists());
    assert_eq!(compiles(&[("HOME", home)]), count);
    assert_eq!(compiles(&[("HOME", home)]), 0);
    assert_eq!(kept(&home.join(".cache/fp8")), kept(&own));
    assert_eq!(compiles(&[("HOME", home), ("XDG_CACHE_HOME", &home.join("xdg"))]), count);
    assert_eq!(kept(&home.join("xdg/fp8")), kept(&own));
    rig.finish();
}
