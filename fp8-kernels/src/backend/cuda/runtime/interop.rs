//! For crates that call NVIDIA's libraries on the tensors of this one: addresses, the stream, events, a library.
//!
//! All work of a device is on one stream. Who queues work of its own on that stream may use any address from here until
//! the tensor or arena it belongs to is dropped, and may drop it while the work is queued: memory is reused in stream
//! order. Work on another stream has to be ordered with this one, before and behind ([`SideQueue`]).

use super::known::History;
use super::loader;
use crate::{Arena, Cell, DType, Device, Error, Result, Shape, Tensor};
use cudarc::driver::{CudaStream, result, sys};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Returns the address of the elements of `x` on its GPU, for reading; 0 if there are none.
///
/// # Errors
/// A tensor that is on no GPU.
pub fn address(x: &Tensor) -> Result<u64> {
    Ok(x.cuda("address")?.ptr())
}

/// [`address`], to write. `name` is what an error calls the buffer.
///
/// # Errors
/// Shared storage; a tensor that is on no GPU.
pub fn address_mut(x: &mut Tensor, name: &str) -> Result<u64> {
    Ok(x.cuda_mut(name)?.ptr())
}

/// Returns the address of what ranks reduce of an arena on its GPU: `staged_len()` f32, which queued work may read and max-combine into.
///
/// # Errors
/// An arena that is on no GPU.
pub fn staged_address(arena: &Arena) -> Result<u64> {
    arena.cuda_staged("staged_address")
}

/// The address of a cell on its GPU: one f32, which queued work may read.
///
/// # Errors
/// A cell that is on no GPU.
pub fn cell_address(cell: &Cell) -> Result<u64> {
    cell.cuda("cell_address")
}

/// Records that the host has read a committed scale, finite and greater than 0, in a cell on a GPU. Kernels replace such a
/// scale by another one only, so it holds until the host writes something else into the cell. It holds for copies of the cell that
/// are made meanwhile, too ([`Arena::copy_scales`]).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed(History);

impl Committed {
    /// Creates the record for `cell`. The caller must have just read a scale in it, with no work queued on it since.
    ///
    /// # Errors
    /// A cell that is on no GPU.
    pub fn new(cell: &Cell) -> Result<Self> {
        cell.cuda("committed")?;
        let history = cell.known_to_host().map(|(known, index)| {
            known.confirm(index);
            known.history(index)
        });
        Ok(Self(history.unwrap_or_default()))
    }

    /// Returns true for the same cell, or a copy of it, as long as it has a committed scale for all work queued from now on. Asks nothing of the
    /// device.
    pub fn holds(&self, cell: &Cell) -> bool {
        cell.known_to_host().is_some_and(|(known, index)| known.history(index) == self.0)
    }
}

/// A tensor that work which is queued next fills: its elements are anything until then.
///
/// # Errors
/// A device that is no GPU, is out of memory or failed; a shape that no tensor can have.
pub fn unfilled(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    let shape = shape.into();
    shape.check_size("unfilled")?;
    let buffer = device.gpu("unfilled")?.alloc(dtype, shape.numel())?;
    Ok(Tensor::from_cuda(buffer, shape, device))
}

/// The stream that all work of the device is on, with its context current on this thread.
///
/// # Errors
/// A device that is no GPU, or failed.
pub fn stream(device: &Device) -> Result<&Arc<CudaStream>> {
    let gpu = device.gpu("stream")?;
    gpu.ready()?;
    Ok(gpu.stream())
}

/// Whether both are the same opened GPU. Asks nothing of the driver.
pub fn is_same_gpu(lhs: &Device, rhs: &Device) -> bool {
    matches!((lhs.gpu("is_same_gpu"), rhs.gpu("is_same_gpu")), (Ok(lhs), Ok(rhs)) if lhs == rhs)
}

/// Whether the device's stream is being captured into a graph.
///
/// # Errors
/// A device that is no GPU, or failed.
pub fn is_capturing(device: &Device) -> Result<bool> {
    let gpu = device.gpu("is_capturing")?;
    gpu.ready()?;
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the stream is alive, the status lives through the call.
    let found = unsafe { sys::cuStreamIsCapturing(gpu.raw_stream(), &mut status) };
    found.result().map_err(|error| gpu.driver_error("cuStreamIsCapturing", "is_capturing", error))?;
    Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// Makes every later call on the device fail with `reason`: what it holds is not to be trusted any more. For work that
/// was queued and given up. The first reason stays.
///
/// # Errors
/// A device that is no GPU.
pub fn poison(device: &Device, reason: String) -> Result<()> {
    device.gpu("poison")?.poison(reason);
    Ok(())
}

/// A point in a device's queue of work.
#[derive(Debug)]
pub struct Mark {
    device: Device,
    event: sys::CUevent,
}

// SAFETY: an event belongs to the process, not to a thread; it is only queried and destroyed.
unsafe impl Send for Mark {}

impl Mark {
    /// Behind all work queued so far. To be [asked](Self::is_passed) it must not be recorded into a graph.
    ///
    /// # Errors
    /// The device is no GPU, or failed.
    pub fn new(device: &Device) -> Result<Self> {
        Self::on(device, device.gpu("mark")?.raw_stream())
    }

    /// Behind all work of a second queue so far, as [`new`](Self::new).
    ///
    /// # Errors
    /// The device failed.
    pub fn of(queue: &SideQueue) -> Result<Self> {
        Self::on(&queue.device, queue.stream.cu_stream())
    }

    fn on(device: &Device, stream: sys::CUstream) -> Result<Self> {
        let gpu = device.gpu("mark")?;
        gpu.ready()?;
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
            .map_err(|error| gpu.driver_error("cuEventCreate", "mark", error))?;
        let mark = Self { device: device.clone(), event };
        // SAFETY: both are this device's and alive.
        unsafe { result::event::record(event, stream) }
            .map_err(|error| gpu.driver_error("cuEventRecord", "mark", error))?;
        Ok(mark)
    }

    /// Lets what is queued on `stream` from here on wait until the mark is passed.
    fn hold(&self, stream: sys::CUstream) -> Result<()> {
        let gpu = self.device.gpu("mark")?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both are this device's and alive; the event was recorded.
        unsafe { result::stream::wait_event(stream, self.event, flags) }
            .map_err(|error| gpu.driver_error("cuStreamWaitEvent", "mark", error))
    }

    /// Whether the work before it is done. Waits for nothing.
    ///
    /// # Errors
    /// The device failed.
    pub fn is_passed(&self) -> Result<bool> {
        let gpu = self.device.gpu("mark")?;
        gpu.ready()?;
        // SAFETY: the event is alive, and was recorded.
        match unsafe { result::event::query(self.event) } {
            Ok(()) => Ok(true),
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            Err(error) => Err(gpu.driver_error("cuEventQuery", "mark", error)),
        }
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        if let Ok(gpu) = self.device.gpu("mark") {
            let _ = gpu.stream().context().bind_to_thread();
            // SAFETY: made by `new` and destroyed once. What it was recorded behind need not be done.
            let _ = unsafe { result::event::destroy(self.event) };
        }
    }
}

/// A second queue of a device, for work that may run beside that of its stream. Nothing orders the two but
/// [`follow`](Self::follow) and [`join`](Self::join), which take part in a graph that is being recorded.
#[derive(Debug)]
pub struct SideQueue {
    device: Device,
    stream: Arc<CudaStream>,
}

impl SideQueue {
    /// Opens the queue. Not while the device's stream is being captured.
    ///
    /// # Errors
    /// The device is no GPU, or failed.
    pub fn new(device: &Device) -> Result<Self> {
        let gpu = device.gpu("side queue")?;
        gpu.ready()?;
        let stream = gpu.stream().context().new_stream();
        let stream = stream.map_err(|error| gpu.driver_error("cuStreamCreate", "side queue", error))?;
        Ok(Self { device: device.clone(), stream })
    }

    /// Returns the queue's stream.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Lets what is queued here from now on wait for all work that the device has queued so far.
    ///
    /// # Errors
    /// The device failed.
    pub fn follow(&self) -> Result<()> {
        Mark::new(&self.device)?.hold(self.stream.cu_stream())
    }

    /// Lets what the device queues from now on wait for all work of this queue so far.
    ///
    /// # Errors
    /// The device failed.
    pub fn join(&self) -> Result<()> {
        Mark::of(self)?.hold(self.device.gpu("side queue")?.raw_stream())
    }
}

/// A library of NVIDIA's, loaded for the life of the process.
#[derive(Debug)]
pub struct Library {
    library: &'static libloading::Library,
    path: PathBuf,
}

impl Library {
    /// NCCL, looked for where the process's other libraries are; where a device was opened with a
    /// [`library`](crate::CudaOptions::library) of its own, in that one.
    ///
    /// # Errors
    /// A library that was not found; the error lists the places searched.
    pub fn nccl() -> Result<Self> {
        let (library, path) = loader::nccl()?;
        Ok(Self { library, path })
    }

    /// Returns the path at which the library was found.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The function of this name.
    ///
    /// # Errors
    /// A library that has none; `remedy` says what would be right.
    ///
    /// # Safety
    /// `T` is a function pointer of the type that the library's documentation gives the function.
    pub unsafe fn function<T: Copy>(&self, name: &str, remedy: &str) -> Result<T> {
        // SAFETY: the caller names the type; the library stays loaded.
        let found = unsafe { self.library.get::<T>(name.as_bytes()) };
        found.map(|function| *function).map_err(|_| Error::SymbolMissing {
            library: self.path.display().to_string(),
            symbol: name.to_owned(),
            remedy: remedy.to_owned(),
        })
    }
}
