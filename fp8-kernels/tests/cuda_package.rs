//! What a published crate needs to compile and run kernels is in it.

#![cfg(feature = "cuda")]

use std::path::Path;
use std::process::Command;

#[test]
fn kernels_and_snapshots_are_packaged() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let arguments = ["package", "--list", "--allow-dirty", "--offline", "--package", "fp8-kernels"];
    let output = Command::new(env!("CARGO")).args(arguments).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let listed = String::from_utf8(output.stdout).unwrap();
    let listed: Vec<&str> = listed.lines().collect();
    let mut expected = vec!["src/cuda/kernels/prelude.cuh".to_owned()];
    for (sub, ending) in [("kernels", ".cu"), ("snapshots", ".ptx")] {
        let files = std::fs::read_dir(folder.join("src/cuda").join(sub)).unwrap();
        let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
        let before = expected.len();
        expected
            .extend(names.filter(|name| name.ends_with(ending)).map(|name| format!("src/cuda/{sub}/{name}")));
        assert!(expected.len() > before + 15, "{sub}: {expected:?}");
    }
    for file in expected {
        assert!(listed.contains(&file.as_str()), "{file} is not packaged");
    }
}
