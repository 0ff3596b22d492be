//! The twelve functions of cuDNN that this backend calls, through a table of its own: the file the loader chose, an error for
//! a missing function, integers for results.

use super::numbers::{Attribute, Kind, ValueType};
use crate::{Error, Result};
use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_void};

pub(super) type Status = c_int;
/// A library handle or a descriptor.
pub(super) type Handle = *mut c_void;
/// A call that failed: its name, and the status.
pub(super) type Failure = (&'static str, Status);

/// The oldest version whose graphs of attention are known to plan: `major · 10000 + minor · 100 + patch`.
const OLDEST: usize = 9_19_00;

type Set = unsafe extern "C" fn(Handle, c_int, c_int, i64, *const c_void) -> Status;
type Get = unsafe extern "C" fn(Handle, c_int, c_int, i64, *mut i64, *mut c_void) -> Status;

/// The library's functions, which may be called from any thread. Handles are used behind a lock.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct Cudnn {
    version: unsafe extern "C" fn() -> usize,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
    last_error_string: unsafe extern "C" fn(*mut c_char, usize),
    create: unsafe extern "C" fn(*mut Handle) -> Status,
    destroy: unsafe extern "C" fn(Handle) -> Status,
    set_stream: unsafe extern "C" fn(Handle, *mut c_void) -> Status,
    create_descriptor: unsafe extern "C" fn(c_int, *mut Handle) -> Status,
    destroy_descriptor: unsafe extern "C" fn(Handle) -> Status,
    set_attribute: Set,
    get_attribute: Get,
    finalize: unsafe extern "C" fn(Handle) -> Status,
    execute: unsafe extern "C" fn(Handle, Handle, Handle) -> Status,
}

macro_rules! symbol {
    ($library:expr, $name:literal) => {{
        // SAFETY: the type is the one that cuDNN's documentation gives this function; the library stays loaded.
        let found = unsafe { $library.get(concat!($name, "\0").as_bytes()) };
        *found.map_err(|_| Error::SymbolMissing {
            library: "libcudnn".to_owned(),
            symbol: $name.to_owned(),
            remedy: "install cuDNN 9.19 or newer".to_owned(),
        })?
    }};
}

impl Cudnn {
    /// The functions of `library`, which must stay loaded. A library older than this backend's graphs is an error.
    pub(in super::super) fn new(library: &'static Library) -> Result<Self> {
        let found = Self {
            version: symbol!(library, "cudnnGetVersion"),
            error_string: symbol!(library, "cudnnGetErrorString"),
            last_error_string: symbol!(library, "cudnnGetLastErrorString"),
            create: symbol!(library, "cudnnCreate"),
            destroy: symbol!(library, "cudnnDestroy"),
            set_stream: symbol!(library, "cudnnSetStream"),
            create_descriptor: symbol!(library, "cudnnBackendCreateDescriptor"),
            destroy_descriptor: symbol!(library, "cudnnBackendDestroyDescriptor"),
            set_attribute: symbol!(library, "cudnnBackendSetAttribute"),
            get_attribute: symbol!(library, "cudnnBackendGetAttribute"),
            finalize: symbol!(library, "cudnnBackendFinalize"),
            execute: symbol!(library, "cudnnBackendExecute"),
        };
        match found.version() {
            version if version < OLDEST => Err(Error::Option {
                op: "device",
                option: "cuDNN",
                value: written(version),
                remedy: "attention needs 9.19 or newer: pip install nvidia-cudnn-cu13, or nvidia-cudnn-cu12 beside CUDA 12"
                    .to_owned(),
            }),
            _ => Ok(found),
        }
    }

    /// `92801` for 9.28.1.
    pub(in super::super) fn version(&self) -> usize {
        // SAFETY: the function takes no arguments and returns a number.
        unsafe { (self.version)() }
    }

    /// The status in words, and what the library has to say about the newest failure.
    pub(super) fn describe(&self, status: Status) -> String {
        // SAFETY: takes any integer.
        let text = unsafe { (self.error_string)(status) };
        let name = if text.is_null() {
            format!("status {status}")
        } else {
            // SAFETY: the library returns a zero-terminated string that lives as long as itself.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        let mut more = [0u8; 1024];
        // SAFETY: the buffer has the room that is given with it.
        unsafe { (self.last_error_string)(more.as_mut_ptr().cast(), more.len()) };
        let length = more.iter().position(|&byte| byte == 0).unwrap_or(more.len());
        let more = String::from_utf8_lossy(&more[..length]);
        // The words come from outside: one line of them, without anything that controls a terminal.
        let more: String = more.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        if more.is_empty() { name } else { format!("{name} ({more})") }
    }

    /// A handle on the current context's device.
    pub(super) fn create(&self) -> Result<Handle, Failure> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` lives through the call.
        ok("cudnnCreate", unsafe { (self.create)(&mut handle) })?;
        Ok(handle)
    }

    pub(super) fn destroy(&self, handle: Handle) {
        // SAFETY: made by `create` and destroyed once, by its owner; nothing can be done about a failure.
        unsafe { (self.destroy)(handle) };
    }

    /// Makes later executions with the handle go to `stream`.
    pub(super) fn set_stream(&self, handle: Handle, stream: *mut c_void) -> Result<(), Failure> {
        // SAFETY: handle and stream are alive, and of one context.
        ok("cudnnSetStream", unsafe { (self.set_stream)(handle, stream) })
    }

    pub(super) fn create_descriptor(&self, kind: Kind) -> Result<Handle, Failure> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` lives through the call.
        let status = unsafe { (self.create_descriptor)(kind as c_int, &mut handle) };
        ok("cudnnBackendCreateDescriptor", status)?;
        Ok(handle)
    }

    pub(super) fn destroy_descriptor(&self, handle: Handle) {
        // SAFETY: made by `create_descriptor` and destroyed once, by its owner's Drop.
        unsafe { (self.destroy_descriptor)(handle) };
    }

    /// Sets an attribute to `count` values of a type.
    ///
    /// # Safety
    /// `values` names as many values of the type, which is the attribute's.
    pub(super) unsafe fn set(
        &self,
        descriptor: Handle,
        attribute: Attribute,
        kind: ValueType,
        count: usize,
        values: *const c_void,
    ) -> Result<(), Failure> {
        let (attribute, kind) = (attribute as c_int, kind as c_int);
        // SAFETY: the descriptor is alive; the caller vouches for the values.
        let status = unsafe { (self.set_attribute)(descriptor, attribute, kind, count as i64, values) };
        ok("cudnnBackendSetAttribute", status)
    }

    /// Reads up to `room` values of an attribute, and returns how many there are.
    ///
    /// # Safety
    /// `values` has room for as many values of the type, which is the attribute's. Values that are descriptors were created
    /// before, of the kind that the attribute has.
    pub(super) unsafe fn get(
        &self,
        descriptor: Handle,
        attribute: Attribute,
        kind: ValueType,
        room: usize,
        values: *mut c_void,
    ) -> Result<usize, Failure> {
        let (attribute, kind, mut count) = (attribute as c_int, kind as c_int, 0);
        // SAFETY: the descriptor is alive, `count` lives through the call; the caller vouches for the values.
        let status =
            unsafe { (self.get_attribute)(descriptor, attribute, kind, room as i64, &mut count, values) };
        ok("cudnnBackendGetAttribute", status)?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    pub(super) fn finalize(&self, descriptor: Handle) -> Result<(), Failure> {
        // SAFETY: the descriptor is alive.
        ok("cudnnBackendFinalize", unsafe { (self.finalize)(descriptor) })
    }

    /// Enqueues a plan on the handle's stream.
    ///
    /// # Safety
    /// The pack names memory as the plan's tensors say, and a workspace of its size, on the handle's device and stream.
    pub(super) unsafe fn execute(&self, handle: Handle, plan: Handle, pack: Handle) -> Result<(), Failure> {
        // SAFETY: all three are alive; the caller vouches for the memory.
        ok("cudnnBackendExecute", unsafe { (self.execute)(handle, plan, pack) })
    }
}

fn ok(call: &'static str, status: Status) -> Result<(), Failure> {
    if status == 0 { Ok(()) } else { Err((call, status)) }
}

/// `9.28.1` for 92801.
pub(super) fn written(version: usize) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}
