//! Finds NVIDIA's libraries before anything touches them, so that their absence is an error and not a panic.
//!
//! cudarc looks its libraries up by itself and panics where one, or one of its functions, is missing. So the driver is
//! opened here first, by path, and every function this backend calls is looked up once; cudarc's own search then finds
//! the library that is already loaded. Libraries stay loaded for the life of the process.

use super::cublaslt::CublasLt;
use super::cudnn::Cudnn;
use super::environment::Environment;
use crate::{Error, Result};
use libloading::Library;
use parking_lot::Mutex;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A library of NVIDIA's, and the folders that may contain it.
struct Wanted {
    name: &'static str,
    /// Folders inside a Python environment's `site-packages`.
    packages: &'static [&'static str],
    remedy: &'static str,
}

const DRIVER: Wanted = Wanted {
    name: if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" },
    packages: &[],
    remedy: "install NVIDIA's driver",
};
/// CUDA 12.8, as the driver numbers it: the first whose driver has all of [`DRIVER_FUNCTIONS`].
const OLDEST_DRIVER: i32 = 12_080;
/// By the major version of CUDA. A driver supports libraries of its own major version and of older ones.
const NVRTC: [(i32, Wanted); 2] = [
    (
        13,
        Wanted {
            name: "libnvrtc.so.13",
            packages: &["nvidia/cu13/lib"],
            remedy: "pip install nvidia-cuda-nvrtc",
        },
    ),
    (
        12,
        Wanted {
            name: "libnvrtc.so.12",
            packages: &["nvidia/cuda_nvrtc/lib"],
            remedy: "pip install nvidia-cuda-nvrtc-cu12",
        },
    ),
];

const NCCL: Wanted = Wanted {
    name: "libnccl.so.2",
    packages: &["nvidia/nccl/lib"],
    remedy: "pip install nvidia-nccl-cu13, or nvidia-nccl-cu12 beside CUDA 12",
};
const CUBLASLT: [(i32, Wanted); 2] = [
    (
        13,
        Wanted {
            name: "libcublasLt.so.13",
            packages: &["nvidia/cu13/lib"],
            remedy: "pip install nvidia-cublas",
        },
    ),
    (
        12,
        Wanted {
            name: "libcublasLt.so.12",
            packages: &["nvidia/cublas/lib"],
            remedy: "pip install nvidia-cublas-cu12",
        },
    ),
];
const CUDNN: Wanted = Wanted {
    name: "libcudnn.so.9",
    packages: &["nvidia/cudnn/lib"],
    remedy: "pip install nvidia-cudnn-cu13, or nvidia-cudnn-cu12 beside CUDA 12",
};
/// The prefixes of the system's Python, whose packages are in `lib/python3…`.
const SYSTEM_PYTHON: [&str; 2] = ["/usr/local", "/usr"];

/// Folders that the linker's own search may leave out.
const SYSTEM: [&str; 6] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib/wsl/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/cuda/lib64",
];

/// The driver's functions that this backend and cudarc call for it.
const DRIVER_FUNCTIONS: [&str; 52] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuEventQuery",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemAllocAsync",
    "cuMemFreeAsync",
    "cuMemGetInfo_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemsetD8Async",
    "cuMemsetD32Async",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuFuncGetAttribute",
    "cuFuncSetAttribute",
    "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags",
    "cuLaunchKernel",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDeviceTotalMem_v2",
    "cuEventElapsedTime_v2",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuStreamIsCapturing",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphExecDestroy",
    "cuGraphDestroy",
    "cuStreamQuery",
    "cuFuncGetParamInfo",
];

/// The libraries a process runs on: chosen by the first device that is opened, since cudarc keeps one driver.
#[derive(Debug)]
pub(crate) struct Libraries {
    /// The path at which the driver was found.
    pub(crate) driver: PathBuf,
    /// The compiler, or an error with the places searched.
    pub(crate) nvrtc: Result<Library>,
    /// A library to use instead of all of NVIDIA's, without a search.
    library: Option<PathBuf>,
    environment: Environment,
    /// The version of CUDA that the driver supports.
    version: i32,
    /// Opened by the first matrix product, since the library is large.
    cublaslt: OnceLock<CublasLt>,
    /// Opened by the first attention that it may serve, since the library is large. The error says why there is none.
    cudnn: OnceLock<Result<Cudnn>>,
}

impl Libraries {
    /// The functions of cuBLASLt.
    pub(crate) fn cublaslt(&'static self) -> Result<&'static CublasLt> {
        if let Some(found) = self.cublaslt.get() {
            return Ok(found);
        }
        let library = match &self.library {
            Some(path) => open_given("libcublasLt", path)?,
            None => find_any(&CUBLASLT, self.version, &self.environment)?,
        };
        // Leaked on purpose: function pointers into it are kept for the life of the process.
        let found = CublasLt::new(Box::leak(Box::new(library)))?;
        Ok(self.cublaslt.get_or_init(|| found))
    }

    /// The functions of cuDNN, or the reason why it is not used. The reason is logged once.
    pub(crate) fn cudnn(&'static self) -> &'static Result<Cudnn> {
        self.cudnn.get_or_init(|| {
            let found = self.open_cudnn();
            if let Err(reason) = &found {
                tracing::info!(%reason, "attention without cuDNN");
            }
            found
        })
    }

    fn open_cudnn(&self) -> Result<Cudnn> {
        let library = match &self.library {
            Some(path) => open_given(CUDNN.name, path)?,
            None => find(&CUDNN, &self.environment)?.0,
        };
        // Leaked on purpose, as above.
        Cudnn::new(Box::leak(Box::new(library)))
    }
}

static LOADED: Mutex<Option<&'static Libraries>> = Mutex::new(None);

/// Returns the process's libraries. If `library` is given, it is used as driver and compiler, without a search.
pub(crate) fn libraries(library: Option<&Path>, environment: &Environment) -> Result<&'static Libraries> {
    let mut loaded = LOADED.lock();
    if let Some(libraries) = *loaded {
        return match library {
            Some(path) if path != libraries.driver => Err(Error::Option {
                op: "device",
                option: "library",
                value: path.display().to_string(),
                remedy: format!(
                    "this process already uses {}; one process uses one driver",
                    libraries.driver.display()
                ),
            }),
            _ => Ok(libraries),
        };
    }
    let (driver, path) = open_driver(library, environment)?;
    let version = driver_version(&driver, &path)?;
    check_functions(&driver, &path)?;
    let nvrtc = match library {
        // The same file again: a handle of its own.
        Some(path) => open_given("libnvrtc", path),
        None => find_any(&NVRTC, version, environment),
    };
    std::mem::forget(driver);
    // Leaked on purpose: function pointers into it are kept for the life of the process.
    let libraries: &'static Libraries = Box::leak(Box::new(Libraries {
        driver: path,
        nvrtc,
        library: library.map(Path::to_owned),
        environment: environment.clone(),
        version,
        cublaslt: OnceLock::new(),
        cudnn: OnceLock::new(),
    }));
    *loaded = Some(libraries);
    Ok(libraries)
}

/// Opens NCCL as the process's other libraries were opened, and returns it with its path. It stays loaded.
pub(crate) fn nccl() -> Result<(&'static Library, PathBuf)> {
    let given = LOADED.lock().and_then(|libraries| libraries.library.as_deref());
    let (library, path) = match given {
        Some(given) => (open_given(NCCL.name, given)?, given.to_owned()),
        None => find(&NCCL, &Environment::read()?)?,
    };
    // Leaked on purpose, as above.
    Ok((Box::leak(Box::new(library)), path))
}

fn open_driver(library: Option<&Path>, environment: &Environment) -> Result<(Library, PathBuf)> {
    let Some(path) = library else {
        return find(&DRIVER, environment).map_err(|error| match error {
            Error::LibraryMissing { library, searched, .. } => Error::DriverMissing { library, searched },
            other => other,
        });
    };
    open_given(DRIVER.name, path).map(|library| (library, path.to_owned()))
}

/// Opens the library that the options name, as `library`.
fn open_given(library: &str, path: &Path) -> Result<Library> {
    let opened = open(path).map_err(|reason| Error::LibraryMissing {
        library: "the simulated driver",
        searched: vec![with_reason(path, &reason)],
        remedy: "give the path of a library with the CUDA driver's functions",
    })?;
    tracing::debug!(library, path = %path.display(), "library found");
    Ok(opened)
}

/// The first of several versions that opens, of those that a driver for CUDA `version` runs; else the error of the first,
/// with the places of all.
fn find_any(versions: &[(i32, Wanted)], version: i32, environment: &Environment) -> Result<Library> {
    let mut missing: Option<Error> = None;
    for (_, wanted) in versions.iter().filter(|(major, _)| *major <= version / 1000) {
        match find(wanted, environment) {
            Ok((library, _)) => return Ok(library),
            Err(Error::LibraryMissing { library, searched: more, remedy }) => match &mut missing {
                Some(Error::LibraryMissing { searched, .. }) => searched.extend(more),
                _ => missing = Some(Error::LibraryMissing { library, searched: more, remedy }),
            },
            Err(error) => return Err(error),
        }
    }
    Err(missing.unwrap_or(Error::LibraryMissing {
        library: "a version for this driver",
        searched: Vec::new(),
        remedy: "update NVIDIA's driver",
    }))
}

/// The first of the candidates that opens; else an error with all of them.
fn find(wanted: &Wanted, environment: &Environment) -> Result<(Library, PathBuf)> {
    let mut searched = Vec::new();
    for path in candidates(wanted, environment) {
        match open(&path) {
            Ok(library) => {
                tracing::debug!(library = wanted.name, path = %path.display(), "library found");
                return Ok((library, path));
            }
            // The file exists but cannot be loaded: the error says why.
            Err(reason) if path.exists() => searched.push(with_reason(&path, &reason)),
            Err(_) if path.parent() == Some(Path::new("")) => {
                searched.push(PathBuf::from(format!("the dynamic linker's search for {}", path.display())))
            }
            Err(_) => searched.push(path),
        }
    }
    Err(Error::LibraryMissing { library: wanted.name, searched, remedy: wanted.remedy })
}

/// `path (why it cannot be loaded)`: libloading keeps the linker's own words in the error's source.
fn with_reason(path: &Path, reason: &libloading::Error) -> PathBuf {
    let why = std::error::Error::source(reason).map_or_else(|| reason.to_string(), ToString::to_string);
    PathBuf::from(format!("{} ({why})", path.display()))
}

fn candidates(wanted: &Wanted, environment: &Environment) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = environment.library_dirs.iter().map(|dir| dir.join(wanted.name)).collect();
    all.push(PathBuf::from(wanted.name));
    if let Some(home) = &environment.cuda_home {
        all.extend(["lib64", "compat"].map(|sub| home.join(sub).join(wanted.name)));
    }
    let system = SYSTEM_PYTHON.map(PathBuf::from);
    for prefix in environment.python_prefixes.iter().chain(&system) {
        for packages in site_packages(prefix) {
            all.extend(wanted.packages.iter().map(|sub| packages.join(sub).join(wanted.name)));
        }
    }
    all.extend(SYSTEM.map(|dir| Path::new(dir).join(wanted.name)));
    all
}

/// `lib/python3.*/site-packages` of a Python environment, in order, and Debian's `dist-packages`.
fn site_packages(prefix: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(prefix.join("lib")).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"))
        .flat_map(|entry| ["site-packages", "dist-packages"].map(|name| entry.path().join(name)))
        .filter(|packages| packages.is_dir())
        .collect();
    found.sort();
    found
}

fn open(path: &Path) -> Result<Library, libloading::Error> {
    if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libnvrtc.so")) {
        builtins(path).for_each(std::mem::forget);
    }
    open_global(path)
}

/// NVRTC's companions in its own folder. It opens the one of its version by name, which finds it there only if it is loaded
/// already.
fn builtins(nvrtc: &Path) -> impl Iterator<Item = Library> {
    let folder = nvrtc.parent().filter(|folder| *folder != Path::new(""));
    let entries = folder.and_then(|folder| std::fs::read_dir(folder).ok()).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("libnvrtc-builtins.so."))
        .filter_map(|entry| open_global(&entry.path()).ok())
}

/// Opens a library so that later searches by name, such as cudarc's, find the same one.
#[cfg(unix)]
fn open_global(path: &Path) -> Result<Library, libloading::Error> {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
    // SAFETY: the libraries named here run no initializers with requirements on their caller; a path that a user gives is
    // one they ask to be loaded.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.map(Into::into)
}

#[cfg(not(unix))]
fn open_global(path: &Path) -> Result<Library, libloading::Error> {
    // SAFETY: as on other systems.
    unsafe { Library::new(path) }
}

/// The version of CUDA that the driver is for, which must be new enough.
fn driver_version(driver: &Library, path: &Path) -> Result<i32> {
    type Version = unsafe extern "C" fn(*mut i32) -> i32;
    let missing = || Error::SymbolMissing {
        library: path.display().to_string(),
        symbol: "cuDriverGetVersion".to_owned(),
        remedy: "NVIDIA's driver 570 or newer has it".to_owned(),
    };
    // SAFETY: the type is the one that the driver's documentation gives this function.
    let ask = unsafe { driver.get::<Version>(b"cuDriverGetVersion\0") }.map_err(|_| missing())?;
    let mut version = 0;
    // SAFETY: the number lives through the call, which may come before cuInit.
    let status = unsafe { ask(&mut version) };
    if status != 0 {
        let (call, op) = ("cuDriverGetVersion", "opening a device".to_owned());
        return Err(Error::Driver {
            call,
            op,
            code: status.cast_unsigned(),
            text: "has no version".to_owned(),
        });
    }
    if version < OLDEST_DRIVER {
        return Err(Error::Option {
            op: "device",
            option: "driver",
            value: format!("{}, for CUDA {}.{}", path.display(), version / 1000, version % 1000 / 10),
            remedy: "expected one for CUDA 12.8 or newer: update NVIDIA's driver to 570 or newer".to_owned(),
        });
    }
    Ok(version)
}

fn check_functions(driver: &Library, path: &Path) -> Result<()> {
    for symbol in DRIVER_FUNCTIONS {
        // SAFETY: the address is looked at, never called.
        let found = unsafe { driver.get::<unsafe extern "C" fn()>(symbol.as_bytes()) };
        if found.is_err() {
            return Err(Error::SymbolMissing {
                library: path.display().to_string(),
                symbol: symbol.to_owned(),
                remedy: "NVIDIA's driver 570 or newer has it".to_owned(),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOWHERE: Wanted =
        Wanted { name: "libfp8-nowhere.so.1", packages: &["nvidia/lib"], remedy: "look again" };

    #[test]
    fn absence_names_the_library_and_every_place() {
        let prefix = tempfile::tempdir().unwrap();
        let packages = prefix.path().join("lib/python3.12/site-packages");
        std::fs::create_dir_all(&packages).unwrap();
        let environment = Environment {
            library_dirs: vec!["/nowhere/a".into(), "/nowhere/b".into()],
            cuda_home: Some("/nowhere/cuda".into()),
            python_prefixes: vec![prefix.path().to_owned()],
            ..Environment::default()
        };
        let text = find(&NOWHERE, &environment).unwrap_err().to_string();
        let package = packages.join("nvidia/lib/libfp8-nowhere.so.1");
        for place in [
            "/nowhere/a/libfp8-nowhere.so.1",
            "/nowhere/b/libfp8-nowhere.so.1",
            "/nowhere/cuda/lib64/libfp8-nowhere.so.1",
            "the dynamic linker's search for libfp8-nowhere.so.1",
            &package.display().to_string(),
            "/usr/lib64/libfp8-nowhere.so.1",
            "look again",
        ] {
            assert!(text.contains(place), "{place} not in: {text}");
        }
    }

    #[test]
    fn versions_newer_than_the_driver_are_passed_over() {
        let newer = Wanted { name: "libfp8-nowhere.so.13", ..NOWHERE };
        let older = Wanted { name: "libfp8-nowhere.so.12", remedy: "look for the older", ..NOWHERE };
        let versions = [(13, newer), (12, older)];
        let text = |version| find_any(&versions, version, &Environment::default()).unwrap_err().to_string();
        assert!(text(13_000).contains(".so.13") && text(13_000).contains(".so.12"), "{}", text(13_000));
        let old = text(12_080);
        assert!(!old.contains(".so.13") && old.contains("look for the older"), "{old}");
        assert!(text(11_080).contains("update NVIDIA's driver"));
    }

    #[test]
    fn a_file_that_is_no_library_is_named_with_the_reason() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(NOWHERE.name), b"not a library").unwrap();
        let environment = Environment { library_dirs: vec![dir.path().to_owned()], ..Environment::default() };
        let text = find(&NOWHERE, &environment).unwrap_err().to_string();
        assert!(text.contains("libfp8-nowhere.so.1 (") && text.contains("file too short"), "{text}");
    }

    #[test]
    fn a_library_without_the_functions_is_too_old() {
        let libc = open(Path::new("libc.so.6")).unwrap();
        let text = check_functions(&libc, Path::new("/lib/libc.so.6")).unwrap_err().to_string();
        assert!(text.contains("/lib/libc.so.6") && text.contains("cuInit") && text.contains("570"), "{text}");
    }
}
