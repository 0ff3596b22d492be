//! Looks for the CUDA driver before anything touches it, so that its absence is an error and not a panic.
//!
//! Order: `FP8_CUDA_LIB_DIR`, `LD_LIBRARY_PATH`, `CUDA_HOME`, then the usual system folders.

use crate::Error;
use std::env;
use std::path::{Path, PathBuf};

#[cfg(target_os = "windows")]
const DRIVERS: [&str; 1] = ["nvcuda.dll"];
#[cfg(not(target_os = "windows"))]
const DRIVERS: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

#[cfg(target_os = "windows")]
const SYSTEM: [&str; 1] = ["C:\\Windows\\System32"];
#[cfg(not(target_os = "windows"))]
const SYSTEM: [&str; 7] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/lib/wsl/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/cuda/compat",
];

/// Why `cuda:ordinal` cannot be opened.
pub(crate) fn open(ordinal: usize) -> Error {
    let searched = directories();
    match find(&searched) {
        Some(library) => Error::BackendMissing { ordinal, library },
        None => Error::LibraryMissing { library: DRIVERS[0], searched },
    }
}

fn directories() -> Vec<PathBuf> {
    let split = |name| env::var_os(name).map(|value| env::split_paths(&value).collect::<Vec<_>>());
    let mut all: Vec<PathBuf> = split("FP8_CUDA_LIB_DIR").unwrap_or_default();
    all.extend(split("LD_LIBRARY_PATH").unwrap_or_default());
    if let Some(home) = env::var_os("CUDA_HOME") {
        all.extend(["lib64", "lib64/stubs", "compat"].map(|sub| Path::new(&home).join(sub)));
    }
    all.extend(SYSTEM.map(PathBuf::from));
    all.retain(|path| !path.as_os_str().is_empty());
    all
}

fn find(directories: &[PathBuf]) -> Option<PathBuf> {
    directories.iter().flat_map(|dir| DRIVERS.map(|name| dir.join(name))).find(|path| path.exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absence_names_the_library_and_every_place() {
        let places = vec![PathBuf::from("/nowhere/a"), PathBuf::from("/nowhere/b")];
        assert_eq!(find(&places), None);
        let text = Error::LibraryMissing { library: DRIVERS[0], searched: places }.to_string();
        assert!(text.contains("libcuda.so.1") && text.contains("/nowhere/a, /nowhere/b"), "{text}");
    }

    #[test]
    fn a_driver_is_found_where_it_lies() {
        let dir = env::temp_dir().join(format!("fp8-loader-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join(DRIVERS[0]), b"").unwrap();
        assert_eq!(find(std::slice::from_ref(&dir)), Some(dir.join(DRIVERS[0])));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
