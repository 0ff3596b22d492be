//! A table of the NCCL functions that this backend calls. Results are integers, and a missing function is an error. Types and
//! constants are those of `nccl.h`, 2.17 and newer.

use crate::Result;
use fp8_kernels::interop::Library;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;

/// `ncclComm_t`.
pub(super) type Comm = *mut c_void;
/// `ncclResult_t`.
pub(super) type Status = c_int;
/// `cudaStream_t`.
pub(super) type Stream = *mut c_void;

pub(super) const SUCCESS: Status = 0;
pub(super) const IN_PROGRESS: Status = 7;

/// `ncclUint8`: how whatever is only moved travels, FP8 codes among it. The others: what is reduced.
pub(super) const UINT8: c_int = 1;
pub(super) const FLOAT16: c_int = 6;
pub(super) const FLOAT32: c_int = 7;
pub(super) const BFLOAT16: c_int = 9;
pub(super) const SUM: c_int = 0;
pub(super) const MAX: c_int = 2;
pub(super) const AVG: c_int = 4;

/// `ncclUniqueId`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct UniqueId(pub(super) [u8; 128]);

/// `ncclConfig_t` as it was in 2.17: newer libraries give the fields behind it their defaults.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
}

/// `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: c_int = c_int::MIN;

type Move = unsafe extern "C" fn(u64, u64, usize, c_int, Comm, Stream) -> Status;
type Message = unsafe extern "C" fn(u64, usize, c_int, c_int, Comm, Stream) -> Status;
type Reduce = unsafe extern "C" fn(u64, u64, usize, c_int, c_int, Comm, Stream) -> Status;

/// The NCCL functions. They may be called from any thread, but only one at a time for each communicator.
#[derive(Debug, Clone, Copy)]
pub(super) struct Api {
    version: unsafe extern "C" fn(*mut c_int) -> Status,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
    last_error: unsafe extern "C" fn(Comm) -> *const c_char,
    unique_id: unsafe extern "C" fn(*mut UniqueId) -> Status,
    init: unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int, *const Config) -> Status,
    pub(super) async_error: unsafe extern "C" fn(Comm, *mut Status) -> Status,
    pub(super) finalize: unsafe extern "C" fn(Comm) -> Status,
    pub(super) destroy: unsafe extern "C" fn(Comm) -> Status,
    pub(super) abort: unsafe extern "C" fn(Comm) -> Status,
    pub(super) all_reduce: Reduce,
    pub(super) reduce_scatter: Reduce,
    pub(super) all_gather: Move,
    pub(super) send: Message,
    pub(super) recv: Message,
    /// With the root before the communicator.
    pub(super) broadcast: Reduce,
    group_start: unsafe extern "C" fn() -> Status,
    group_end: unsafe extern "C" fn() -> Status,
}

macro_rules! function {
    ($library:expr, $name:literal) => {{
        // SAFETY: the type is the one that NCCL's documentation gives this function; addresses are passed as integers.
        unsafe { $library.function($name, "install NCCL 2.17 or newer") }?
    }};
}

impl Api {
    pub(super) fn new(library: &Library) -> Result<Self> {
        Ok(Self {
            version: function!(library, "ncclGetVersion"),
            error_string: function!(library, "ncclGetErrorString"),
            last_error: function!(library, "ncclGetLastError"),
            unique_id: function!(library, "ncclGetUniqueId"),
            init: function!(library, "ncclCommInitRankConfig"),
            async_error: function!(library, "ncclCommGetAsyncError"),
            finalize: function!(library, "ncclCommFinalize"),
            destroy: function!(library, "ncclCommDestroy"),
            abort: function!(library, "ncclCommAbort"),
            all_reduce: function!(library, "ncclAllReduce"),
            reduce_scatter: function!(library, "ncclReduceScatter"),
            all_gather: function!(library, "ncclAllGather"),
            broadcast: function!(library, "ncclBroadcast"),
            send: function!(library, "ncclSend"),
            recv: function!(library, "ncclRecv"),
            group_start: function!(library, "ncclGroupStart"),
            group_end: function!(library, "ncclGroupEnd"),
        })
    }

    /// 22809 for 2.28.9.
    pub(super) fn version(&self) -> Result<i32, Status> {
        let mut version = 0;
        // SAFETY: the number lives through the call.
        match unsafe { (self.version)(&mut version) } {
            SUCCESS => Ok(version),
            status => Err(status),
        }
    }

    pub(super) fn unique_id(&self) -> Result<UniqueId, Status> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: the id lives through the call.
        match unsafe { (self.unique_id)(&mut id) } {
            SUCCESS => Ok(id),
            status => Err(status),
        }
    }

    /// Makes `calls`, each with its name and NCCL's answer, as one group. Returns the first that failed, else the group's answer.
    pub(super) fn grouped(
        &self,
        calls: impl Iterator<Item = (&'static str, Status)>,
    ) -> (&'static str, Status) {
        // SAFETY: a group may be begun at any time.
        let started = unsafe { (self.group_start)() };
        if started != SUCCESS {
            return ("ncclGroupStart", started);
        }
        let mut failed = None;
        for (name, status) in calls {
            if status != SUCCESS && status != IN_PROGRESS {
                failed.get_or_insert((name, status));
            }
        }
        // SAFETY: ends the group begun above, whatever became of its calls.
        let ended = unsafe { (self.group_end)() };
        failed.unwrap_or(("ncclGroupEnd", ended))
    }

    /// Begins a communicator that does not block, on the current device.
    pub(super) fn init(&self, id: UniqueId, rank: usize, ranks: usize) -> Result<Comm, Status> {
        let config = Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 21_700,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: ptr::null(),
        };
        let (mut comm, rank, ranks) = (ptr::null_mut(), rank as c_int, ranks as c_int);
        // SAFETY: handle and configuration live through the call, which copies the latter.
        match unsafe { (self.init)(&mut comm, ranks, id, rank, &config) } {
            SUCCESS | IN_PROGRESS if !comm.is_null() => Ok(comm),
            SUCCESS | IN_PROGRESS => Err(3), // no handle: an internal error
            status => {
                if !comm.is_null() {
                    // SAFETY: NCCL returned this handle, and nothing else uses it.
                    let _ = unsafe { (self.abort)(comm) };
                }
                Err(status)
            }
        }
    }

    /// `invalid usage (5): NCCL's own message`.
    pub(super) fn describe(&self, status: Status) -> String {
        // SAFETY: takes any integer.
        let name = text(unsafe { (self.error_string)(status) });
        // SAFETY: the handle is unused and may be null.
        let details = text(unsafe { (self.last_error)(ptr::null_mut()) });
        let colon = if details.is_empty() { "" } else { ": " };
        format!("{name} ({status}){colon}{details}")
    }
}

fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: NCCL returns a zero-terminated text that lives as long as the library.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_string_lossy().trim().to_owned()
}

/// A library whose operations stay in progress until they are aborted.
#[cfg(test)]
pub(super) mod unfinished {
    use super::*;

    unsafe extern "C" fn version(_: *mut c_int) -> Status {
        SUCCESS
    }
    unsafe extern "C" fn error_string(_: Status) -> *const c_char {
        ptr::null()
    }
    unsafe extern "C" fn last_error(_: Comm) -> *const c_char {
        ptr::null()
    }
    unsafe extern "C" fn unique_id(_: *mut UniqueId) -> Status {
        SUCCESS
    }
    unsafe extern "C" fn init(comm: *mut Comm, _: c_int, _: UniqueId, _: c_int, _: *const Config) -> Status {
        // SAFETY: `Api::init` passes the address of a handle.
        unsafe { *comm = ptr::dangling_mut() };
        IN_PROGRESS
    }
    unsafe extern "C" fn async_error(_: Comm, state: *mut Status) -> Status {
        // SAFETY: `Communicator::state` passes the address of a status.
        unsafe { *state = IN_PROGRESS };
        SUCCESS
    }
    unsafe extern "C" fn of_communicator(_: Comm) -> Status {
        IN_PROGRESS
    }
    unsafe extern "C" fn reduce(_: u64, _: u64, _: usize, _: c_int, _: c_int, _: Comm, _: Stream) -> Status {
        IN_PROGRESS
    }
    unsafe extern "C" fn gather(_: u64, _: u64, _: usize, _: c_int, _: Comm, _: Stream) -> Status {
        IN_PROGRESS
    }
    unsafe extern "C" fn message(_: u64, _: usize, _: c_int, _: c_int, _: Comm, _: Stream) -> Status {
        IN_PROGRESS
    }
    unsafe extern "C" fn group() -> Status {
        SUCCESS
    }

    pub(in super::super) const API: Api = Api {
        version,
        error_string,
        last_error,
        unique_id,
        init,
        async_error,
        finalize: of_communicator,
        destroy: of_communicator,
        abort: of_communicator,
        all_reduce: reduce,
        reduce_scatter: reduce,
        all_gather: gather,
        send: message,
        recv: message,
        broadcast: reduce,
        group_start: group,
        group_end: group,
    };
}
