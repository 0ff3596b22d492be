//! Errors that kernels report to the host. The next call that waits for the device and whose error reaches the caller
//! returns the report as its error, once. The operations define the meaning of its numbers.

use super::memory::Memory;
use crate::{Error, Result};
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use parking_lot::Mutex;
use std::sync::Arc;

/// Bytes in which kernels report: four i64, which are state, value, position and limit. A state of 0 is no report.
pub(super) const FAULT: usize = 32;

/// Makes the error of what a kernel reported: state, value, position and limit, and the names that it refers to.
pub(crate) type Decode = fn([i64; 4], &Faults) -> Error;

/// The memory in which kernels report, and the names that reports refer to by number.
pub(crate) struct Faults {
    /// [`FAULT`] bytes on the device.
    pub(super) address: u64,
    names: Mutex<Vec<Arc<str>>>,
    decode: Decode,
}

impl Faults {
    pub(super) fn new(memory: &Memory, decode: Decode) -> Result<Self> {
        // SAFETY: any size may be requested; freed by the queue's Drop alone.
        let address = unsafe { result::malloc_sync(FAULT) }.map_err(|failed| match failed {
            DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY) => memory.out_of_memory(FAULT),
            failed => memory.driver_error("cuMemAlloc", "opening a device", failed),
        })?;
        let faults = Self { address, names: Mutex::default(), decode };
        memory.clear_bytes(address, FAULT).inspect_err(|_| {
            // SAFETY: allocated above and used by nothing.
            let _ = unsafe { result::free_sync(address) };
        })?;
        Ok(faults)
    }

    /// The error of what a kernel reported, if one did.
    pub(super) fn error(&self, fault: [i64; 4]) -> Option<Error> {
        (fault[0] != 0).then(|| (self.decode)(fault, self))
    }

    /// The number of a name, the same each time.
    pub(super) fn number(&self, name: &str) -> u64 {
        let mut names = self.names.lock();
        let known = names.iter().position(|known| **known == *name);
        let number = known.unwrap_or_else(|| {
            names.push(name.into());
            names.len() - 1
        });
        number as u64
    }

    /// The name with this number; empty for none.
    pub(crate) fn name(&self, number: i64) -> String {
        let names = self.names.lock();
        usize::try_from(number)
            .ok()
            .and_then(|number| names.get(number))
            .map(ToString::to_string)
            .unwrap_or_default()
    }
}
