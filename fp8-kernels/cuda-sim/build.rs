//! Gives the library the driver's unversioned soname, so that once loaded a later search for `libcuda.so` finds it, and
//! embeds the snapshots of the kernels, of which there may be none.

use std::fmt::Write;
use std::path::Path;
use std::{env, fs, io};

fn main() -> io::Result<()> {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");

    let variable = |name: &str| env::var(name).map_err(io::Error::other);
    let folder = Path::new(&variable("CARGO_MANIFEST_DIR")?).join("../ptx");
    // A path that does not exist would rebuild every time: then its parent is watched.
    let watched = if folder.is_dir() { folder.as_path() } else { folder.parent().unwrap_or(&folder) };
    println!("cargo:rerun-if-changed={}", watched.display());
    println!("cargo:rerun-if-changed=build.rs");

    let mut files: Vec<_> = match fs::read_dir(&folder) {
        Ok(entries) => entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<_, _>>()?,
        Err(_) => Vec::new(),
    };
    files.retain(|path| path.extension().is_some_and(|extension| extension == "ptx"));
    files.sort();
    let mut code =
        String::from("/// `(file name, text)` of every snapshot.\nconst EMBEDDED: &[(&str, &str)] = &[\n");
    for path in files {
        let path = fs::canonicalize(path)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        println!("cargo:rerun-if-changed={}", path.display());
        writeln!(code, "    ({name:?}, include_str!({:?})),", path.display().to_string())
            .map_err(io::Error::other)?;
    }
    code += "];\n";
    fs::write(Path::new(&variable("OUT_DIR")?).join("snapshots.rs"), code)
}
