//! The safe side for test programs: finds the built library, loads it, and calls its control functions.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int};
use std::fmt;
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

type Set = unsafe extern "C" fn(*const c_char, *const c_char) -> c_int;
type Get = unsafe extern "C" fn(*const c_char, *mut c_char, usize) -> usize;

/// The simulated driver as built beside the running program: `libfp8_cuda_sim.so`, with or without cargo's hash, in the
/// program's folder, its parent or the parent's `deps`. Of several in a folder the newest.
#[must_use]
pub fn library_path() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    let folder = program.parent()?;
    let parent = folder.parent();
    let deps = parent.map(|parent| parent.join("deps"));
    [Some(folder), parent, deps.as_deref()].into_iter().flatten().find_map(newest)
}

fn newest(folder: &Path) -> Option<PathBuf> {
    let plain = folder.join("libfp8_cuda_sim.so");
    if plain.is_file() {
        return Some(plain);
    }
    let hashed = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.starts_with("libfp8_cuda_sim-") && name.ends_with(".so")
    };
    let paths = std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path()).filter(hashed);
    paths.max_by_key(|path| path.metadata().and_then(|metadata| metadata.modified()).ok())
}

/// Why the library could not be loaded or refused a control.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlError(String);

impl fmt::Display for ControlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ControlError {}

/// A loaded simulated driver. The library has one state per process, whoever opens it.
///
/// ```no_run
/// use fp8_cuda_sim::{Control, library_path};
/// let control = Control::open(&library_path().expect("built as a dependency"))?;
/// control.set("seed", "7")?;
/// control.fail("cuMemAllocAsync", 3, 2)?; // its third call from now on finds no memory
/// assert_eq!(control.live(), "");
/// # Ok::<(), fp8_cuda_sim::ControlError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Control {
    set: Set,
    get: Get,
}

impl Control {
    /// Loads the library for the life of the process, with its symbols visible to all, so that a later search for
    /// `libcuda.so` finds it.
    ///
    /// # Errors
    /// If the file cannot be loaded or is no simulated driver.
    pub fn open(path: &Path) -> Result<Self, ControlError> {
        let error = |why: libloading::Error| ControlError(format!("open: {}: {why}", path.display()));
        // SAFETY: this library has no initializers.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.map_err(error)?;
        // SAFETY: the type is that of `fp8_sim_set` in control.rs; the library is never unloaded.
        let set = *unsafe { library.get::<Set>(b"fp8_sim_set\0") }.map_err(error)?;
        // SAFETY: the type is that of `fp8_sim_get` in control.rs; the library is never unloaded.
        let get = *unsafe { library.get::<Get>(b"fp8_sim_get\0") }.map_err(error)?;
        std::mem::forget(library);
        Ok(Self { set, get })
    }

    /// Changes one setting; keys and values are in the table of the crate's page.
    ///
    /// # Errors
    /// If the library refuses, with its reason.
    pub fn set(&self, key: &str, value: &str) -> Result<(), ControlError> {
        let text = |text: &str| {
            CString::new(text).map_err(|_| ControlError(format!("{key}: the value holds a zero byte")))
        };
        let (name, value) = (text(key)?, text(value)?);
        // SAFETY: both texts end with NUL and live through the call.
        match unsafe { (self.set)(name.as_ptr(), value.as_ptr()) } {
            0 => Ok(()),
            _ => Err(ControlError(self.get("error").unwrap_or_default())),
        }
    }

    /// The text under a key; `None` for an unknown one.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<String> {
        let key = CString::new(key).ok()?;
        let mut buffer: Vec<u8> = Vec::new();
        loop {
            // SAFETY: the key ends with NUL; the buffer has the room that is given with it.
            let needed = unsafe { (self.get)(key.as_ptr(), buffer.as_mut_ptr().cast(), buffer.len()) };
            if needed == 0 {
                return None;
            }
            // The text may have grown between two calls.
            if needed <= buffer.len() {
                buffer.truncate(needed - 1);
                return Some(String::from_utf8_lossy(&buffer).into_owned());
            }
            buffer.resize(needed, 0);
        }
    }

    /// Lets the `count`-th call of `function` from now on return `code`.
    ///
    /// # Errors
    /// If there is no such function, or `count` is 0.
    pub fn fail(&self, function: &str, count: u64, code: i32) -> Result<(), ControlError> {
        self.set("fail", &format!("{function}:{count}:{code}"))
    }

    /// Returns the number of calls of each function since the calls were last reset.
    #[must_use]
    pub fn calls(&self) -> BTreeMap<String, u64> {
        self.counts("calls")
    }

    /// Returns the number of launches of each kernel since the calls were last reset.
    #[must_use]
    pub fn launches(&self) -> BTreeMap<String, u64> {
        self.counts("launches")
    }

    /// Returns the numbers of a text with a line `name count` for each.
    fn counts(&self, key: &str) -> BTreeMap<String, u64> {
        let text = self.get(key).unwrap_or_default();
        let line = |line: &str| {
            line.split_once(' ').and_then(|(name, count)| Some((name.to_owned(), count.parse().ok()?)))
        };
        text.lines().filter_map(line).collect()
    }

    /// The kernels that were launched since the calls were last reset.
    #[must_use]
    pub fn kernels(&self) -> Vec<String> {
        self.get("kernels").unwrap_or_default().lines().map(str::to_owned).collect()
    }

    /// Lists everything that is live: one line for each allocation, pinned block and kind of handle. Empty if nothing is live.
    #[must_use]
    pub fn live(&self) -> String {
        self.get("live").unwrap_or_default()
    }

    /// The errors of the device so far.
    #[must_use]
    pub fn reports(&self) -> String {
        self.get("reports").unwrap_or_default()
    }

    /// Brings the device back after an error.
    ///
    /// # Errors
    /// While anything is live, with the list.
    pub fn reset(&self) -> Result<(), ControlError> {
        self.set("reset", "")
    }
}
