//! One GPU with one stream: what every tensor on it shares.
//!
//! All work goes to that stream in the order of the calls, so memory may be freed and reused without waiting. The host
//! waits in [`Gpu::synchronize`] and in downloads only.

use super::cache::Cache;
use super::capture::Session;
use super::fault::{FAULT, Faults};
use super::launch::Kernel;
use super::loader::{self, Libraries};
use super::matmul::Blas;
use super::memory::Pool;
use super::module::Modules;
use super::nvrtc::Nvrtc;
use super::source::Source;
use super::staging::Staging;
use super::{Buffer, CudaOptions, GemmTuning};
use crate::environment::{CudaAllocator, Environment};
use crate::{DType, Error, Result, TransposePolicy};
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::{CudaContext, CudaStream, sys};
use parking_lot::Mutex;
use std::fmt;
use std::sync::{Arc, OnceLock};

/// FP8 conversions came with this compute capability.
const NEEDED: (i32, i32) = (8, 9);

/// Cheap to clone.
#[derive(Clone)]
pub(crate) struct Gpu(Arc<Inner>);

struct Inner {
    stream: Arc<CudaStream>,
    name: String,
    capability: (i32, i32),
    sms: u32,
    allocator: CudaAllocator,
    gemm_tuning: GemmTuning,
    pool: Mutex<Pool>,
    modules: Mutex<Modules>,
    staging: Mutex<Staging>,
    libraries: &'static Libraries,
    /// None before the first matrix product.
    blas: Mutex<Option<Blas>>,
    /// Of the capture under way.
    session: Mutex<Option<Session>>,
    /// For memory while the device's own stream is in capture.
    side_stream: OnceLock<Arc<CudaStream>>,
    faults: Faults,
    poison: OnceLock<String>,
}

impl Gpu {
    /// Opens a GPU on a stream of its own.
    pub(crate) fn open(options: &CudaOptions) -> Result<Self> {
        let environment = Environment::read()?;
        let libraries = loader::libraries(options.library.as_deref(), &environment)?;
        let (ordinal, error) =
            (options.ordinal, |call| move |error| describe(call, "opening a device", error));
        result::init().map_err(error("cuInit"))?;
        let count = CudaContext::device_count().map_err(error("cuDeviceGetCount"))?;
        if usize::try_from(count).is_ok_and(|count| ordinal >= count) {
            return Err(Error::Option {
                op: "device",
                option: "ordinal",
                value: ordinal.to_string(),
                remedy: format!("the driver lists {count} GPUs, numbered from 0"),
            });
        }
        let context = CudaContext::new(ordinal).map_err(error("cuDevicePrimaryCtxRetain"))?;
        // No two-stream bookkeeping of cudarc's: everything here is on one stream.
        // SAFETY: no CudaSlice is made by this backend.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(error("cuStreamCreate"))?;
        Self::new(stream, libraries, options, &environment)
    }

    /// Works on a stream of the caller's.
    pub(crate) fn adopt(stream: Arc<CudaStream>, options: &CudaOptions) -> Result<Self> {
        let environment = Environment::read()?;
        let libraries = loader::libraries(options.library.as_deref(), &environment)?;
        Self::new(stream, libraries, options, &environment)
    }

    fn new(
        stream: Arc<CudaStream>,
        libraries: &'static Libraries,
        options: &CudaOptions,
        environment: &Environment,
    ) -> Result<Self> {
        let gemm_tuning = options.gemm_tuning.clone().unwrap_or_else(|| environment.gemm_tuning.clone());
        gemm_tuning.check()?;
        let context = stream.context();
        let error = |call| move |error| describe(call, "opening a device", error);
        context.bind_to_thread().map_err(error("cuCtxSetCurrent"))?;
        let name = context.name().map_err(error("cuDeviceGetName"))?;
        let found = context.compute_capability().map_err(error("cuDeviceGetAttribute"))?;
        if found < NEEDED {
            let device = format!("cuda:{}", context.ordinal());
            return Err(Error::Capability { device, name, found, needed: NEEDED });
        }
        let sms = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let sms = context.attribute(sms).map_err(error("cuDeviceGetAttribute"))?;
        let nvrtc = match &libraries.nvrtc {
            Ok(library) => Ok(Nvrtc::new(library)?),
            Err(missing) => Err(missing.to_string()),
        };
        let cache = options.cache_dir.as_deref().or(environment.cache_dir.as_deref());
        // SAFETY: any size may be asked for; freed by Inner's Drop alone.
        let fault = unsafe { result::malloc_sync(FAULT) }.map_err(|failed| match failed {
            DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY) => out_of_memory(context, FAULT),
            failed => error("cuMemAlloc")(failed),
        })?;
        let gpu = Self(Arc::new(Inner {
            name,
            capability: found,
            sms: u32::try_from(sms).unwrap_or(1).max(1),
            allocator: options.allocator.unwrap_or(environment.allocator),
            gemm_tuning,
            pool: Mutex::default(),
            modules: Mutex::new(Modules::new(Cache::new(cache), nvrtc)),
            staging: Mutex::default(),
            libraries,
            blas: Mutex::default(),
            session: Mutex::default(),
            side_stream: OnceLock::new(),
            faults: Faults::new(fault),
            poison: OnceLock::new(),
            stream,
        }));
        gpu.clear_bytes(fault, FAULT)?;
        Ok(gpu)
    }

    /// The driver's name of it.
    pub(crate) fn name(&self) -> &str {
        &self.0.name
    }

    pub(crate) fn ordinal(&self) -> usize {
        self.0.stream.context().ordinal()
    }

    /// `(major, minor)`.
    pub(crate) fn capability(&self) -> (i32, i32) {
        self.0.capability
    }

    pub(crate) fn transpose_policy(&self) -> TransposePolicy {
        transpose_policy(self.0.capability)
    }

    /// Whether it only imitates hardware.
    pub(crate) fn is_simulated(&self) -> bool {
        self.name().starts_with("PTX interpreter")
    }

    /// Whether its FP8 GEMMs read one layout only, so that backward needs transposed copies.
    pub(crate) fn needs_transposes(&self) -> bool {
        self.transpose_policy() != TransposePolicy::Never
    }

    /// The number of its multiprocessors.
    pub(crate) fn sms(&self) -> u32 {
        self.0.sms
    }

    /// Blocks for `items` at `per_block`, at most `per_sm` a multiprocessor: what a grid-stride kernel is launched with.
    pub(crate) fn blocks(&self, items: u64, per_block: u64, per_sm: u32) -> u32 {
        let most = self.sms().saturating_mul(per_sm).min(i32::MAX as u32);
        u32::try_from(items.div_ceil(per_block.max(1))).map_or(most, |blocks| blocks.min(most))
    }

    /// The stream that all its work is on.
    pub(crate) fn stream(&self) -> &Arc<CudaStream> {
        &self.0.stream
    }

    pub(super) fn raw_stream(&self) -> sys::CUstream {
        self.0.stream.cu_stream()
    }

    pub(super) fn allocator(&self) -> CudaAllocator {
        self.0.allocator
    }

    pub(super) fn gemm_tuning(&self) -> &GemmTuning {
        &self.0.gemm_tuning
    }

    pub(super) fn pool(&self) -> &Mutex<Pool> {
        &self.0.pool
    }

    pub(super) fn libraries(&self) -> &'static Libraries {
        self.0.libraries
    }

    pub(super) fn blas(&self) -> &Mutex<Option<Blas>> {
        &self.0.blas
    }

    pub(super) fn session(&self) -> &Mutex<Option<Session>> {
        &self.0.session
    }

    /// Before a capture, in which none can be made.
    pub(super) fn open_side_stream(&self) -> Result<()> {
        if self.0.side_stream.get().is_none() {
            let stream = self.0.stream.context().new_stream();
            let stream = stream.map_err(|error| self.driver_error("cuStreamCreate", "capture", error))?;
            self.0.side_stream.get_or_init(|| stream);
        }
        Ok(())
    }

    /// Where memory is asked for and given back: not in the stream while that is in capture, which waits for nobody; all
    /// work before has been done then.
    fn memory_stream(&self) -> &Arc<CudaStream> {
        match self.0.side_stream.get() {
            Some(side) if self.is_capturing() => side,
            _ => &self.0.stream,
        }
    }

    pub(super) fn faults(&self) -> &Faults {
        &self.0.faults
    }

    /// A kernel, compiled and loaded if this is its first use; its context is current afterwards.
    pub(crate) fn kernel(&self, source: Source, name: &'static str) -> Result<Kernel> {
        self.ready()?;
        self.0.modules.lock().kernel(self, source, name)
    }

    /// From now on every call on this device fails with `reason`: what it holds is not to be trusted.
    pub(crate) fn poison(&self, reason: String) {
        // The first reason stays.
        drop(self.0.poison.set(reason));
    }

    fn expect_trusted(&self) -> Result<()> {
        match self.0.poison.get() {
            Some(reason) => Err(Error::Poisoned { device: self.to_string(), reason: reason.clone() }),
            None => Ok(()),
        }
    }

    /// Not poisoned, and its context current on this thread.
    pub(super) fn ready(&self) -> Result<()> {
        self.expect_trusted()?;
        self.0
            .stream
            .context()
            .bind_to_thread()
            .map_err(|error| self.driver_error("cuCtxSetCurrent", "any", error))
    }

    /// Waits for all queued work, and reports what it met. A reported fault is forgotten, so this is for waits whose error
    /// reaches the caller; others use [`wait`](Self::wait).
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.ready()?;
        self.expect_eager("synchronize", "read results when the step has been recorded and has run")?;
        let mut fault = [0i64; 4];
        self.queue_download(self.fault(), &mut fault, "synchronize")?;
        self.wait("synchronize")?;
        self.check_fault(fault)
    }

    /// Waits for all queued work. A fault that it met stays for the next [`synchronize`](Self::synchronize) to report.
    pub(super) fn wait(&self, op: &'static str) -> Result<()> {
        self.ready()?;
        self.0.stream.synchronize().map_err(|error| self.driver_error("cuStreamSynchronize", op, error))?;
        self.expect_trusted() // work that was waited for may have been given up meanwhile
    }

    /// Copies to the host; waits for all work queued before.
    pub(crate) fn download<T: bytemuck::Pod>(&self, address: u64, out: &mut [T]) -> Result<()> {
        self.ready()?;
        self.expect_eager("download", "read results when the step has been recorded and has run")?;
        if !out.is_empty() {
            self.queue_download(address, out, "download")?;
        }
        self.synchronize()
    }

    /// Copies from the host; the bytes are read before this returns.
    pub(crate) fn write(&self, address: u64, bytes: &[u8]) -> Result<()> {
        self.ready()?;
        if bytes.is_empty() || self.record_upload(address, bytes)? {
            return Ok(());
        }
        if self.0.staging.lock().upload(self, bytes, address)? {
            return Ok(());
        }
        // SAFETY: `address` has room for `bytes`, as the caller says; from pageable memory the driver has copied them when
        // it returns.
        unsafe { result::memcpy_htod_async(address, bytes, self.raw_stream()) }
            .map_err(|error| self.driver_error("cuMemcpyHtoDAsync", "upload", error))
    }

    /// A buffer of bytes with these values.
    pub(crate) fn upload<T: bytemuck::Pod>(&self, values: &[T]) -> Result<Buffer> {
        let bytes = bytemuck::cast_slice(values);
        let buffer = self.alloc(DType::U8, bytes.len())?;
        self.write(buffer.ptr(), bytes)?;
        Ok(buffer)
    }

    /// Copies between two places on the device that do not overlap.
    pub(crate) fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        self.ready()?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: both name `bytes` bytes of this device's memory, as the caller says, used on its one stream.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.raw_stream()) }
            .map_err(|error| self.driver_error("cuMemcpyDtoDAsync", "copy", error))
    }

    /// All bytes 0.
    pub(crate) fn clear(&self, buffer: &Buffer) -> Result<()> {
        self.clear_bytes(buffer.ptr(), buffer.bytes())
    }

    pub(crate) fn clear_bytes(&self, address: u64, bytes: usize) -> Result<()> {
        self.ready()?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: `address` names that many bytes of this device's memory, used on its one stream.
        unsafe { result::memset_d8_async(address, 0, bytes, self.raw_stream()) }
            .map_err(|error| self.driver_error("cuMemsetD8Async", "zeros", error))
    }

    /// `count` times `value` from `address` on.
    pub(crate) fn fill_f32(&self, address: u64, value: f32, count: usize) -> Result<()> {
        self.ready()?;
        if count == 0 {
            return Ok(());
        }
        // SAFETY: `address` names that many f32 of this device's memory, used on its one stream.
        let status = unsafe { sys::cuMemsetD32Async(address, value.to_bits(), count, self.raw_stream()) };
        status.result().map_err(|error| self.driver_error("cuMemsetD32Async", "fill", error))
    }

    fn queue_download<T: bytemuck::Pod>(&self, address: u64, out: &mut [T], op: &'static str) -> Result<()> {
        // SAFETY: `address` names as many bytes as `out` has, as the caller says; `out` is borrowed until the caller has
        // waited for the stream.
        unsafe { result::memcpy_dtoh_async(out, address, self.raw_stream()) }
            .map_err(|error| self.driver_error("cuMemcpyDtoHAsync", op, error))
    }

    pub(super) fn driver_malloc(&self, bytes: usize) -> Result<u64> {
        let asynchronous = self.0.stream.context().has_async_alloc();
        let stream = self.memory_stream();
        let address = if asynchronous {
            // SAFETY: any size may be asked for; the address is freed once, by `driver_free` or `release_kept`.
            unsafe { result::malloc_async(stream.cu_stream(), bytes) }
        } else {
            // SAFETY: as above.
            unsafe { result::malloc_sync(bytes) }
        };
        let address = address.map_err(|error| match error {
            DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY) => self.out_of_memory(bytes),
            error => self.driver_error("cuMemAllocAsync", "allocate", error),
        })?;
        if asynchronous && !Arc::ptr_eq(stream, &self.0.stream) {
            // Nothing orders the device's own stream behind the other one.
            stream.synchronize().map_err(|error| {
                self.driver_free(address);
                self.driver_error("cuStreamSynchronize", "allocate", error)
            })?;
        }
        Ok(address)
    }

    /// Gives memory back, behind the work queued on it. In a destructor nothing can be done about a failure.
    pub(super) fn driver_free(&self, address: u64) {
        let _ = self.0.stream.context().bind_to_thread();
        if self.0.stream.context().has_async_alloc() {
            // SAFETY: allocated by `driver_malloc` and freed once.
            let _ = unsafe { result::free_async(address, self.memory_stream().cu_stream()) };
        } else {
            // SAFETY: as above; this waits for the device.
            let _ = unsafe { result::free_sync(address) };
        }
    }

    /// Gives all kept memory back to the driver, and waits until it is there.
    pub(crate) fn release_kept(&self) {
        let kept = self.pool().lock().drain();
        kept.into_iter().for_each(|address| self.driver_free(address));
        let _ = self.memory_stream().synchronize();
    }

    pub(super) fn out_of_memory(&self, requested: usize) -> Error {
        out_of_memory(self.0.stream.context(), requested)
    }

    /// A failed call as an error; one that leaves the context unusable poisons the device.
    pub(super) fn driver_error(&self, call: &'static str, op: &str, error: DriverError) -> Error {
        let described = describe(call, op, error);
        if is_sticky(error) {
            self.poison(described.to_string());
        }
        described
    }
}

fn out_of_memory(context: &CudaContext, requested: usize) -> Error {
    let (free, total) = context.mem_get_info().unwrap_or_default();
    Error::OutOfMemory { device: format!("cuda:{}", context.ordinal()), requested, free, total }
}

/// Errors after which a context answers every call with the same.
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

impl PartialEq for Gpu {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Gpu {}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("cuda:{}", self.ordinal()))
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpu({self}, {}, {:?})", self.0.name, self.0.stream.cu_stream())
    }
}

impl Drop for Inner {
    // What fails here has nobody to be told to.
    fn drop(&mut self) {
        let _ = self.stream.context().bind_to_thread();
        let _ = self.stream.synchronize();
        let asynchronous = self.stream.context().has_async_alloc();
        let free = |address| {
            if asynchronous {
                // SAFETY: allocated on this stream by `driver_malloc`, freed once.
                let _ = unsafe { result::free_async(address, self.stream.cu_stream()) };
            } else {
                // SAFETY: as above.
                let _ = unsafe { result::free_sync(address) };
            }
        };
        self.pool.get_mut().drain().into_iter().for_each(free);
        self.pool.get_mut().drain_held().into_iter().for_each(free);
        if let Some(mut blas) = self.blas.get_mut().take() {
            blas.release(free);
        }
        // SAFETY: allocated by `Gpu::new`, freed once; no kernel runs any more.
        let _ = unsafe { result::free_sync(self.faults.address) };
        self.staging.get_mut().release();
        self.modules.get_mut().unload();
        let _ = self.stream.synchronize();
    }
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
