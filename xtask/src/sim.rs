//! `cargo xtask sim -- COMMAND…`: runs a command on a machine that seems to have a GPU.
//!
//! The command finds the simulated device under the names of NVIDIA's libraries in a folder of its own, which
//! `FP8_CUDA_LIB_DIR` names. The folder holds no `libcuda.so`: that name would also serve programs that did not ask.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::{fs, io};

use crate::artifact;
use crate::workspace::{Result, Workspace, shell};

pub(crate) const NAMES: [&str; 5] =
    ["libcuda.so.1", "libnvrtc.so.13", "libcublasLt.so.13", "libcudnn.so.9", "libnccl.so.2"];

#[derive(clap::Args)]
pub(crate) struct Sim {
    /// The program and its arguments
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

pub(crate) fn run(options: &Sim) -> Result<ExitCode> {
    let folder = folder()?;
    let (program, arguments) = options.command.split_first().ok_or("sim: no command")?;
    let status = Command::new(program)
        .args(arguments)
        .env("FP8_CUDA_LIB_DIR", &folder)
        .status()
        .map_err(|error| format!("sim: {program}: {error}"))?;
    Ok(match status.code().map(u8::try_from) {
        Some(Ok(code)) => ExitCode::from(code),
        _ => {
            eprintln!("sim: {program}: {status}");
            ExitCode::FAILURE
        }
    })
}

/// Builds the library and the folder with its names.
fn folder() -> Result<PathBuf> {
    let sh = shell()?;
    let library = artifact::simulator(&sh)?;
    let folder = Workspace::read(&sh)?.target_directory.join("sim");
    fill(&folder, &library)?;
    Ok(folder)
}

/// Makes a folder in which `library` has all the names.
pub(crate) fn fill(folder: &Path, library: &Path) -> Result {
    fs::create_dir_all(folder)?;
    for name in NAMES {
        link(library, &folder.join(name))?;
    }
    Ok(())
}

/// A fresh link from `link` to `file`, put in place whole, for another process may be reading it.
fn link(file: &Path, link: &Path) -> io::Result<()> {
    let temporary = link.with_extension(format!("{}.tmp", std::process::id()));
    match fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    #[cfg(unix)]
    std::os::unix::fs::symlink(file, &temporary)?;
    #[cfg(not(unix))]
    fs::copy(file, &temporary)?;
    fs::rename(temporary, link)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_replaces_the_one_before() {
        let folder = tempfile::tempdir().unwrap();
        let name = folder.path().join("libcuda.so.1");
        for text in ["first", "second"] {
            let file = folder.path().join(text);
            fs::write(&file, text).unwrap();
            link(&file, &name).unwrap();
            assert_eq!(fs::read_to_string(&name).unwrap(), text);
        }
    }
}
