//! Gives the library the driver's unversioned soname, so that once loaded a later search for `libcuda.so` finds it, and
//! embeds the snapshots of the kernels and their tables of source lines. There may be none.

use std::fmt::Write;
use std::path::Path;
use std::{env, fs, io};

fn main() -> io::Result<()> {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
    println!("cargo:rerun-if-changed=build.rs");

    let package = variable("CARGO_MANIFEST_DIR")?;
    let mut code = String::new();
    // The snapshots in `ptx` are for one architecture alone, and come first: `snapshot::find` takes the first that serves.
    let lists: [(&str, &str, &[&str], &str); 2] = [
        ("EMBEDDED", "snapshot", &["ptx", "../ptx"], "ptx"),
        ("LINES", "table of source lines", &["lines"], "txt"),
    ];
    for (name, what, folders, ending) in lists {
        let write =
            write!(code, "/// `(file name, text)` of every {what}.\nconst {name}: &[(&str, &str)] = &[\n");
        write.map_err(io::Error::other)?;
        for folder in folders {
            embed(&Path::new(&package).join(folder), ending, &mut code)?;
        }
        code += "];\n";
    }
    fs::write(Path::new(&variable("OUT_DIR")?).join("snapshots.rs"), code)
}

fn variable(name: &str) -> io::Result<String> {
    env::var(name).map_err(io::Error::other)
}

/// Writes an entry for each file of the folder with this ending.
fn embed(folder: &Path, ending: &str, code: &mut String) -> io::Result<()> {
    // A path that does not exist would rebuild every time: then its parent is watched.
    let watched = if folder.is_dir() { folder } else { folder.parent().unwrap_or(folder) };
    println!("cargo:rerun-if-changed={}", watched.display());

    let mut files: Vec<_> = match fs::read_dir(folder) {
        Ok(entries) => entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<_, _>>()?,
        Err(_) => Vec::new(),
    };
    files.retain(|path| path.extension().is_some_and(|extension| extension == ending));
    files.sort();
    for path in files {
        let path = fs::canonicalize(path)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        println!("cargo:rerun-if-changed={}", path.display());
        writeln!(code, "    ({name:?}, include_str!({:?})),", path.display().to_string())
            .map_err(io::Error::other)?;
    }
    Ok(())
}
