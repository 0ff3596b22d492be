//! The queue of a GPU as the host uses it: uploads, downloads, waiting, recording.
//!
//! All work goes to one stream in the order of the calls, so memory may be freed and reused without waiting. The host
//! waits in [`Queue::synchronize`] and in downloads only.

use super::capture::{Captures, Recorded};
use super::fault::{Decode, FAULT, Faults};
use super::memory::{Buffer, Memory};
use super::staging::Staging;
use crate::{DType, Error, Replayed, Result};
use cudarc::driver::result;
use parking_lot::Mutex;
use std::ops::Deref;
use std::sync::Arc;

/// A GPU's memory with its uploads and downloads. Dereferences to the [`Memory`].
pub(crate) struct Queue {
    memory: Arc<Memory>,
    captures: Captures,
    staging: Mutex<Staging>,
    faults: Faults,
}

impl Deref for Queue {
    type Target = Arc<Memory>;

    fn deref(&self) -> &Arc<Memory> {
        &self.memory
    }
}

impl Queue {
    /// Makes a queue. `decode` turns the reports of kernels into errors.
    pub(super) fn new(memory: Memory, decode: Decode) -> Result<Self> {
        let memory = Arc::new(memory);
        let faults = Faults::new(&memory, decode)?;
        let captures = Captures::new(Arc::clone(&memory));
        Ok(Self { memory, captures, staging: Mutex::default(), faults })
    }

    /// Waits for all queued work and returns its fault, if any. A fault is returned only once, so callers must pass the error
    /// on to the user; other waits use `wait`.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.ready()?;
        self.expect_eager("synchronize", "read results when the step has been recorded and has run")?;
        let mut fault = [0i64; 4];
        self.queue_download(self.fault(), &mut fault, "synchronize")?;
        self.wait("synchronize")?;
        let Some(error) = self.faults.error(fault) else { return Ok(()) };
        self.clear_bytes(self.fault(), FAULT)?;
        Err(error)
    }

    /// Copies to the host, after waiting for all work queued before.
    pub(crate) fn download<T: bytemuck::Pod>(&self, address: u64, out: &mut [T]) -> Result<()> {
        self.ready()?;
        self.expect_eager("download", "read results when the step has been recorded and has run")?;
        if !out.is_empty() {
            self.queue_download(address, out, "download")?;
        }
        self.synchronize()
    }

    /// Queues a copy from the host. The bytes are read before this returns.
    pub(crate) fn write(&self, address: u64, bytes: &[u8]) -> Result<()> {
        self.ready()?;
        if bytes.is_empty() || self.captures.record_upload(address, bytes)? {
            return Ok(());
        }
        if self.staging.lock().upload(self, bytes, address)? {
            return Ok(());
        }
        // SAFETY: `address` has room for `bytes`, as the caller says; from pageable memory the driver has copied them when
        // it returns.
        unsafe { result::memcpy_htod_async(address, bytes, self.raw_stream()) }
            .map_err(|error| self.driver_error("cuMemcpyHtoDAsync", "upload", error))
    }

    /// Allocates a buffer with these bytes.
    pub(crate) fn upload<T: bytemuck::Pod>(&self, values: &[T]) -> Result<Buffer> {
        let bytes = bytemuck::cast_slice(values);
        let buffer = self.alloc(DType::U8, bytes.len())?;
        self.write(buffer.ptr(), bytes)?;
        Ok(buffer)
    }

    /// Returns the address at which kernels report faults.
    pub(crate) fn fault(&self) -> u64 {
        self.faults.address
    }

    /// Returns the number by which kernels refer to `name` in reports.
    pub(crate) fn fault_name(&self, name: &str) -> u64 {
        self.faults.number(name)
    }

    /// Records the work that `step` queues.
    pub(super) fn record<T, E: From<Error>>(
        &self,
        step: impl FnOnce() -> Result<T, E>,
    ) -> Result<(Recorded, T), E> {
        // Afterwards the host knows the scales that are set, and freed memory can be reused.
        self.synchronize()?;
        self.captures.record(step)
    }

    /// Makes `replayed` a part of every launch of the graph that is being recorded. Does nothing if none is.
    pub(crate) fn on_replay(&self, replayed: Arc<dyn Replayed>) {
        self.captures.on_replay(replayed);
    }

    fn queue_download<T: bytemuck::Pod>(&self, address: u64, out: &mut [T], op: &'static str) -> Result<()> {
        // SAFETY: `address` names as many bytes as `out` has, as the caller says; `out` is borrowed until the caller has
        // waited for the stream.
        unsafe { result::memcpy_dtoh_async(out, address, self.raw_stream()) }
            .map_err(|error| self.driver_error("cuMemcpyDtoHAsync", op, error))
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let _ = self.stream().context().bind_to_thread();
        let _ = self.stream().synchronize();
        // SAFETY: allocated by `Faults::new`, freed once; no kernel runs any more.
        let _ = unsafe { result::free_sync(self.faults.address) };
        self.staging.get_mut().release();
    }
}
