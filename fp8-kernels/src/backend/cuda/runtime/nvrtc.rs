//! The ten functions of NVRTC that this backend calls, through a table of its own: the file the loader chose, an error
//! for a missing function, integers for results.

use crate::{Error, Result};
use libloading::Library;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;

type Program = *mut c_void;
type Status = c_int;

const COMPILATION: Status = 6;
const INVALID_OPTION: Status = 5;
/// It did not find its companion, libnvrtc-builtins.
const BUILTINS: Status = 7;

type CreateProgram = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> Status;

/// The compiler's functions, which may be called from any thread.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Nvrtc {
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
    create_program: CreateProgram,
    destroy_program: unsafe extern "C" fn(*mut Program) -> Status,
    compile_program: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    log: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> Status,
}

/// The result of compiling one program.
#[derive(Debug)]
pub(crate) enum Compiled {
    /// Machine code.
    Cubin(Vec<u8>),
    /// Nothing, and not for the program's sake: this compiler does not know the architecture, or is not whole.
    Unable(String),
}

macro_rules! symbol {
    ($library:expr, $name:literal) => {{
        // SAFETY: the type is the one that NVRTC's documentation gives this function; the library stays loaded.
        let found = unsafe { $library.get(concat!($name, "\0").as_bytes()) };
        *found.map_err(|_| Error::SymbolMissing {
            library: "libnvrtc".to_owned(),
            symbol: $name.to_owned(),
            remedy: "install NVRTC 12 or 13".to_owned(),
        })?
    }};
}

impl Nvrtc {
    /// The functions of `library`, which must stay loaded.
    pub(crate) fn new(library: &'static Library) -> Result<Self> {
        Ok(Self {
            version: symbol!(library, "nvrtcVersion"),
            error_string: symbol!(library, "nvrtcGetErrorString"),
            create_program: symbol!(library, "nvrtcCreateProgram"),
            destroy_program: symbol!(library, "nvrtcDestroyProgram"),
            compile_program: symbol!(library, "nvrtcCompileProgram"),
            log_size: symbol!(library, "nvrtcGetProgramLogSize"),
            log: symbol!(library, "nvrtcGetProgramLog"),
            cubin_size: symbol!(library, "nvrtcGetCUBINSize"),
            cubin: symbol!(library, "nvrtcGetCUBIN"),
        })
    }

    /// `[major, minor]`, if it tells.
    pub(crate) fn version(&self) -> Option<[i32; 2]> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both point to integers that live through the call.
        let status = unsafe { (self.version)(&mut major, &mut minor) };
        (status == 0).then_some([major, minor])
    }

    /// Compiles `text`, which errors call `name`.
    pub(crate) fn compile(&self, name: &str, text: &str, options: &[String]) -> Result<Compiled> {
        let error = |what: &str, log: String| Error::Compile {
            kernel: name.to_owned(),
            log: format!("{what}: {log}"),
        };
        let c_string =
            |text: &str| CString::new(text).map_err(|_| error("the program", "holds a zero byte".to_owned()));
        let (label, text) = (c_string(name)?, c_string(text)?);
        let options = options.iter().map(|option| c_string(option)).collect::<Result<Vec<_>>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut handle = ptr::null_mut();
        // SAFETY: name and text are zero-terminated and live through the call; no headers are given, and their count is 0.
        let status = unsafe {
            (self.create_program)(&mut handle, text.as_ptr(), label.as_ptr(), 0, ptr::null(), ptr::null())
        };
        if status != 0 {
            return Err(error("nvrtcCreateProgram", self.describe(status)));
        }
        let program = Owned { nvrtc: self, handle };
        // SAFETY: the program is alive; `pointers` holds as many zero-terminated strings as its length says.
        let status =
            unsafe { (self.compile_program)(program.handle, pointers.len() as c_int, pointers.as_ptr()) };
        match status {
            0 => program
                .cubin()
                .map(Compiled::Cubin)
                .map_err(|(function, status)| error(function, self.describe(status))),
            INVALID_OPTION | BUILTINS => {
                Ok(Compiled::Unable(format!("NVRTC: {}: {}", self.describe(status), program.log().trim())))
            }
            COMPILATION => Err(Error::Compile { kernel: name.to_owned(), log: program.log() }),
            status => {
                Err(error("nvrtcCompileProgram", format!("{} {}", self.describe(status), program.log())))
            }
        }
    }

    fn describe(&self, status: Status) -> String {
        // SAFETY: takes any integer.
        let text = unsafe { (self.error_string)(status) };
        if text.is_null() {
            return format!("status {status}");
        }
        // SAFETY: NVRTC returns a zero-terminated string that lives as long as the library.
        let text = unsafe { CStr::from_ptr(text) };
        format!("{} ({status})", text.to_string_lossy())
    }
}

/// A program that is destroyed when dropped.
struct Owned<'a> {
    nvrtc: &'a Nvrtc,
    handle: Program,
}

impl Owned<'_> {
    /// The machine code, or the function that failed and its status.
    fn cubin(&self) -> Result<Vec<u8>, (&'static str, Status)> {
        let mut size = 0;
        // SAFETY: the program is alive, `size` lives through the call.
        let status = unsafe { (self.nvrtc.cubin_size)(self.handle, &mut size) };
        // The driver reads a CUBIN's length from the CUBIN itself: an empty one must never reach it.
        if status != 0 || size == 0 {
            return Err(("nvrtcGetCUBINSize", status));
        }
        let mut cubin = vec![0u8; size];
        // SAFETY: `cubin` has the size NVRTC asked for.
        match unsafe { (self.nvrtc.cubin)(self.handle, cubin.as_mut_ptr().cast()) } {
            0 => Ok(cubin),
            status => Err(("nvrtcGetCUBIN", status)),
        }
    }

    fn log(&self) -> String {
        let mut size = 0;
        // SAFETY: the program is alive, `size` lives through the call.
        let status = unsafe { (self.nvrtc.log_size)(self.handle, &mut size) };
        let mut log = vec![0u8; if status == 0 { size } else { 0 }];
        if !log.is_empty() {
            // SAFETY: `log` has the size NVRTC asked for.
            unsafe { (self.nvrtc.log)(self.handle, log.as_mut_ptr().cast()) };
        }
        String::from_utf8_lossy(&log).trim_end_matches(['\0', '\n']).to_owned()
    }
}

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle came from nvrtcCreateProgram and is destroyed once.
        unsafe { (self.nvrtc.destroy_program)(&mut self.handle) };
    }
}
