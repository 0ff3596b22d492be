//! The published crate contains everything that it needs to compile and run kernels.

#![cfg(feature = "cuda")]

use std::path::{Component, Path, PathBuf};
use std::process::Command;

#[test]
fn kernels_and_snapshots_are_packaged() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let arguments = ["package", "--list", "--allow-dirty", "--offline", "--package", "fp8-kernels"];
    let output = Command::new(env!("CARGO")).args(arguments).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let listed = String::from_utf8(output.stdout).unwrap();
    let listed: Vec<&str> = listed.lines().collect();
    let mut expected = Vec::new();
    for (sub, ending, least) in [
        ("src/backend/cuda/ops", ".cu", 16),
        ("src/backend/cuda/ops", ".cuh", 3),
        ("src/backend/cuda/ops/attention", ".cu", 8),
        ("src/backend/cuda/ops/attention", ".cuh", 7),
        ("src/backend/cuda/ops/prelude", ".cuh", 14),
        ("ptx", ".ptx", 16),
    ] {
        let files = std::fs::read_dir(folder.join(sub)).unwrap();
        let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
        let names: Vec<String> = names.filter(|name| name.ends_with(ending)).collect();
        assert!(names.len() >= least, "{sub}: {names:?}");
        expected.extend(names.into_iter().map(|name| format!("{sub}/{name}")));
    }
    // Whatever the packaged sources take in when they are compiled.
    let mut included = 0;
    for source in listed.iter().filter(|file| file.starts_with("src/") && file.ends_with(".rs")) {
        let text = std::fs::read_to_string(folder.join(source)).unwrap();
        let beside = Path::new(source).parent().unwrap();
        let literals = ["include_str!(\"", "include_bytes!(\"", "include!(\""];
        for name in literals.iter().flat_map(|start| text.split(start).skip(1)) {
            let (name, _) = name.split_once('"').unwrap();
            let mut place = PathBuf::new();
            for part in beside.join(name).components() {
                match part {
                    Component::ParentDir => drop(place.pop()),
                    part => place.push(part),
                }
            }
            expected.push(place.to_str().unwrap().to_owned());
            included += 1;
        }
    }
    assert!(included > 3, "{included}");
    for file in expected {
        assert!(listed.contains(&file.as_str()), "{file} is not packaged");
    }
}
