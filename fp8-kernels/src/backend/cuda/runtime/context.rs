//! The driver's context of one GPU: its stream, its properties, and whether it can still be used.
//!
//! Everything else on the device is built on this: memory, uploads, launches and captures.

use crate::{Error, Result, TransposePolicy};
use cudarc::driver::result::DriverError;
use cudarc::driver::{CudaContext, CudaStream, sys};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

/// The first compute capability with FP8 conversions.
const NEEDED: (i32, i32) = (8, 9);

/// A GPU's context and the one stream that all its work is on.
pub(crate) struct Context {
    stream: Arc<CudaStream>,
    name: String,
    capability: (i32, i32),
    sms: u32,
    is_simulated: bool,
    /// The number of the current capture, or 0.
    capture: AtomicU64,
    poison: OnceLock<String>,
}

impl Context {
    /// Reads the GPU's properties. A GPU without FP8 is an error.
    pub(super) fn new(stream: Arc<CudaStream>) -> Result<Self> {
        let context = stream.context();
        let error = |call| move |error| describe(call, OPENING, error);
        context.bind_to_thread().map_err(error("cuCtxSetCurrent"))?;
        let name = context.name().map_err(error("cuDeviceGetName"))?;
        let capability = context.compute_capability().map_err(error("cuDeviceGetAttribute"))?;
        if capability < NEEDED {
            let device = format!("cuda:{}", context.ordinal());
            return Err(Error::Capability { device, name, found: capability, needed: NEEDED });
        }
        let attribute = |attribute| context.attribute(attribute).map_err(error("cuDeviceGetAttribute"));
        let sms = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let core_clock = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)?;
        let memory_clock = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)?;
        Ok(Self {
            name,
            capability,
            sms: u32::try_from(sms).unwrap_or(1).max(1),
            is_simulated: core_clock == 0 && memory_clock == 0,
            capture: AtomicU64::new(0),
            poison: OnceLock::new(),
            stream,
        })
    }

    /// Returns the GPU's name as its driver reports it.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn ordinal(&self) -> usize {
        self.stream.context().ordinal()
    }

    /// Returns the compute capability, `(major, minor)`.
    pub(crate) fn capability(&self) -> (i32, i32) {
        self.capability
    }

    pub(crate) fn transpose_policy(&self) -> TransposePolicy {
        transpose_policy(self.capability)
    }

    /// Returns whether backward needs transposed copies, because FP8 GEMMs of the GPU read only one layout.
    pub(crate) fn needs_transposes(&self) -> bool {
        self.transpose_policy() != TransposePolicy::Never
    }

    /// Whether the driver reports neither a core clock nor a memory clock, as the simulated GPU's driver does.
    pub(crate) fn is_simulated(&self) -> bool {
        self.is_simulated
    }

    /// Returns the number of multiprocessors.
    pub(crate) fn sms(&self) -> u32 {
        self.sms
    }

    /// Blocks for `items` at `per_block`, at most `per_sm` a multiprocessor: what a grid-stride kernel is launched with.
    pub(crate) fn blocks(&self, items: u64, per_block: u64, per_sm: u32) -> u32 {
        let most = self.sms().saturating_mul(per_sm).min(i32::MAX as u32);
        u32::try_from(items.div_ceil(per_block.max(1))).map_or(most, |blocks| blocks.min(most))
    }

    /// Returns the stream of all work on this device.
    pub(crate) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    pub(super) fn raw_stream(&self) -> sys::CUstream {
        self.stream.cu_stream()
    }

    /// Makes every later call on this device fail with `reason`, because its memory may be wrong. The first reason is kept.
    pub(crate) fn poison(&self, reason: String) {
        drop(self.poison.set(reason));
    }

    /// Checks that the device is not poisoned. Calls nothing of the driver.
    pub(crate) fn expect_usable(&self) -> Result<()> {
        match self.poison.get() {
            Some(reason) => Err(Error::Poisoned { device: self.to_string(), reason: reason.clone() }),
            None => Ok(()),
        }
    }

    /// Checks that the device is not poisoned, and makes its context current on this thread.
    pub(super) fn ready(&self) -> Result<()> {
        self.expect_usable()?;
        self.stream
            .context()
            .bind_to_thread()
            .map_err(|error| self.driver_error("cuCtxSetCurrent", "any", error))
    }

    /// Waits for all queued work. The next `synchronize` reports a fault of that work.
    pub(super) fn wait(&self, op: &'static str) -> Result<()> {
        self.ready()?;
        self.stream.synchronize().map_err(|error| self.driver_error("cuStreamSynchronize", op, error))?;
        self.expect_usable() // another thread may have poisoned the device meanwhile
    }

    /// Returns whether a step is being recorded.
    pub(crate) fn is_capturing(&self) -> bool {
        self.capture.load(Relaxed) != 0
    }

    /// Returns the number of the current capture.
    pub(crate) fn capture_number(&self) -> Option<u64> {
        Some(self.capture.load(Relaxed)).filter(|&number| number != 0)
    }

    /// Notes that a capture began, or that it ended. Numbers start at 1.
    pub(super) fn set_capture(&self, number: Option<u64>) {
        self.capture.store(number.unwrap_or(0), Relaxed);
    }

    /// Returns an error if a step is being recorded, for an operation `op` that cannot be recorded.
    pub(crate) fn expect_eager(&self, op: &str, remedy: &'static str) -> Result<()> {
        if self.is_capturing() { Err(Error::Capture { op: op.to_owned(), remedy }) } else { Ok(()) }
    }

    pub(super) fn out_of_memory(&self, requested: usize) -> Error {
        let (free, total) = self.stream.context().mem_get_info().unwrap_or_default();
        Error::OutOfMemory { device: self.to_string(), requested, free, total }
    }

    /// Returns the error of a failed call. A failure after which the context is unusable poisons the device.
    pub(super) fn driver_error(&self, call: &'static str, op: &str, error: DriverError) -> Error {
        let described = describe(call, op, error);
        if is_sticky(error) {
            self.poison(described.to_string());
        }
        described
    }
}

impl fmt::Display for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("cuda:{}", self.ordinal()))
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({self}, {})", self.name)
    }
}

/// The name of the operation in errors about opening a device.
const OPENING: &str = "opening a device";

/// Returns the context of the GPU with this ordinal, made current on this thread.
pub(super) fn primary(ordinal: usize) -> Result<Arc<CudaContext>> {
    let error = |call| move |error| describe(call, OPENING, error);
    cudarc::driver::result::init().map_err(error("cuInit"))?;
    let count = CudaContext::device_count().map_err(error("cuDeviceGetCount"))?;
    if usize::try_from(count).is_ok_and(|count| ordinal >= count) {
        return Err(Error::Option {
            op: "device",
            option: "ordinal",
            value: ordinal.to_string(),
            remedy: format!("the driver lists {count} GPUs, numbered from 0"),
        });
    }
    CudaContext::new(ordinal).map_err(error("cuDevicePrimaryCtxRetain"))
}

/// Opens a stream of its own.
pub(super) fn stream_of(context: &Arc<CudaContext>) -> Result<Arc<CudaStream>> {
    context.new_stream().map_err(|error| describe("cuStreamCreate", OPENING, error))
}

/// Errors that a context returns from every call once it has failed with them.
fn is_sticky(error: DriverError) -> bool {
    matches!(
        error.0,
        sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | sys::CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
            | sys::CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | sys::CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | sys::CUresult::CUDA_ERROR_LAUNCH_FAILED
            | sys::CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            | sys::CUresult::CUDA_ERROR_ASSERT
            | sys::CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
            | sys::CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | sys::CUresult::CUDA_ERROR_CONTAINED
            | sys::CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK
            | sys::CUresult::CUDA_ERROR_EXTERNAL_DEVICE
            | sys::CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | sys::CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
            | sys::CUresult::CUDA_ERROR_INVALID_PC
    )
}

fn describe(call: &'static str, op: &str, error: DriverError) -> Error {
    let text = error.error_string().map(|text| text.to_string_lossy().into_owned()).unwrap_or_default();
    Error::Driver { call, op: op.to_owned(), code: error.0 as u32, text }
}

/// The default of GPUs of a compute capability. FP8 products of sm_89, sm_90 and sm_12x read the TN layout alone; those
/// of sm_100 to sm_119, and from sm_130 on, read every layout.
const fn transpose_policy((major, _): (i32, i32)) -> TransposePolicy {
    if major <= 9 || major == 12 { TransposePolicy::WithCast } else { TransposePolicy::Never }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transposed_copies_are_for_gpus_whose_fp8_products_are_tn_alone() {
        for capability in [(8, 9), (9, 0), (12, 0), (12, 1)] {
            assert_eq!(transpose_policy(capability), TransposePolicy::WithCast, "{capability:?}");
        }
        for capability in [(10, 0), (10, 3), (11, 0), (13, 0), (14, 5)] {
            assert_eq!(transpose_policy(capability), TransposePolicy::Never, "{capability:?}");
        }
    }
}
