//! Errors of the device.

use ptx_interp::{Kind, MemoryError, Report};

use crate::code::Code;

/// An error of the device: it kills the context.
#[derive(Debug)]
pub(crate) struct Fault {
    pub(crate) code: Code,
    pub(crate) text: String,
}

impl Fault {
    /// Work that nothing can release. No sequence of calls leads here.
    pub(crate) fn stuck() -> Self {
        Self {
            code: Code::LAUNCH_FAILED,
            text: "queued work waits for nothing that runs: a defect of the simulator".into(),
        }
    }

    /// No error: all that could run waits for other ranks of a communicator.
    pub(crate) fn stalled() -> Self {
        Self { code: Code::STALLED, text: String::new() }
    }
}

impl From<Box<Report>> for Fault {
    /// CUDA Driver API: CUDA_ERROR_ILLEGAL_ADDRESS, "the device encountered a load or store instruction on an invalid
    /// memory address"; CUDA_ERROR_MISALIGNED_ADDRESS, "the device encountered a load or store instruction on a memory
    /// address which is not aligned"; CUDA_ERROR_LAUNCH_FAILED, "an exception occurred on the device while executing a
    /// kernel". What hardware does not notice at all (races, uninitialised reads) is reported as the last.
    fn from(report: Box<Report>) -> Self {
        let code = match report.kind {
            Kind::OutOfBounds | Kind::UseAfterFree => Code::ILLEGAL_ADDRESS,
            Kind::Misaligned => Code::MISALIGNED_ADDRESS,
            _ => Code::LAUNCH_FAILED,
        };
        Self { code, text: report.to_string() }
    }
}

impl From<MemoryError> for Fault {
    fn from(error: MemoryError) -> Self {
        let code = match error {
            MemoryError::Uninitialised { .. } => Code::LAUNCH_FAILED,
            _ => Code::ILLEGAL_ADDRESS,
        };
        Self { code, text: error.to_string() }
    }
}
