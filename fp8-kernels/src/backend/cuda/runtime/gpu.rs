//! One GPU: a queue with its memory, the kernels loaded on it, cuBLASLt and cuDNN.

use super::cache::Cache;
use super::capture::Recorded;
use super::context::{self, Context};
use super::cudnn::{Attention, Bound, Dnn, Sums, not_open};
use super::entry::Entry;
use super::environment::Environment;
use super::fault::Decode;
use super::launch::TypedKernel;
use super::loader::{self, Libraries};
use super::matmul::Blas;
use super::memory::Memory;
use super::module::Modules;
use super::nvrtc::Nvrtc;
use super::options::CudaOptions;
use super::parameters::Parameter;
use super::product::{Places, Product};
use super::queue::Queue;
use super::tuning::GemmTuning;
use crate::deferred::DeferredWork;
use crate::{Error, Result, TunedProducts};
use cudarc::driver::CudaStream;
use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// Cheap to clone. Dereferences to its [`Queue`], and so to its memory and its context.
#[derive(Clone)]
pub(crate) struct Gpu(Arc<Inner>);

struct Inner {
    queue: Queue,
    modules: Mutex<Modules>,
    libraries: &'static Libraries,
    gemm_tuning: GemmTuning,
    /// None before the first matrix product.
    blas: Mutex<Option<Blas>>,
    /// None before the first attention that cuDNN may serve.
    /// `Some(None)` if it does not run on this device.
    dnn: Mutex<Option<Option<Dnn>>>,
    uses_cudnn: bool,
    deferred: DeferredWork,
}

impl Deref for Gpu {
    type Target = Queue;

    fn deref(&self) -> &Queue {
        &self.0.queue
    }
}

impl Gpu {
    /// Opens a GPU on a stream of its own. `decode` makes errors of what its kernels report.
    pub(crate) fn open(options: &CudaOptions, decode: Decode) -> Result<Self> {
        let environment = Environment::read()?;
        let libraries = loader::libraries(options.library.as_deref(), &environment)?;
        let context = context::primary(options.ordinal)?;
        // cudarc would order work on two streams; everything here is on one.
        // SAFETY: no CudaSlice is made by this backend.
        unsafe { context.disable_event_tracking() };
        Self::new(context::stream_of(&context)?, libraries, options, &environment, decode)
    }

    /// Opens a GPU on a stream of the caller's.
    pub(crate) fn adopt(stream: Arc<CudaStream>, options: &CudaOptions, decode: Decode) -> Result<Self> {
        let environment = Environment::read()?;
        let libraries = loader::libraries(options.library.as_deref(), &environment)?;
        Self::new(stream, libraries, options, &environment, decode)
    }

    fn new(
        stream: Arc<CudaStream>,
        libraries: &'static Libraries,
        options: &CudaOptions,
        environment: &Environment,
        decode: Decode,
    ) -> Result<Self> {
        let gemm_tuning = options.gemm_tuning.clone().unwrap_or_else(|| environment.gemm_tuning.clone());
        gemm_tuning.check()?;
        let context = Context::new(stream)?;
        let nvrtc = match &libraries.nvrtc {
            Ok(library) => Ok(Nvrtc::new(library)?),
            Err(missing) => Err(missing.to_string()),
        };
        let cache = options.cache_dir.as_deref().or(environment.cache_dir.as_deref());
        let memory = Memory::new(context, options.allocator.unwrap_or(environment.allocator));
        Ok(Self(Arc::new(Inner {
            queue: Queue::new(memory, decode)?,
            modules: Mutex::new(Modules::new(Cache::new(cache), nvrtc)),
            libraries,
            gemm_tuning,
            blas: Mutex::default(),
            dnn: Mutex::default(),
            uses_cudnn: options.cudnn.unwrap_or(environment.cudnn),
            deferred: DeferredWork::default(),
        })))
    }

    /// Returns a kernel, compiled and loaded if this is its first use. The device's context is current afterwards.
    pub(crate) fn load<P: Parameter>(&self, entry: Entry<P>) -> Result<TypedKernel<P>> {
        self.ready()?;
        self.0.modules.lock().kernel(self, entry.file, entry.name).map(TypedKernel::new)
    }

    /// The version of cuBLAS, `130100` for 13.1.0, or 0 if it cannot be loaded.
    pub(crate) fn cublas_version(&self) -> usize {
        self.0.libraries.cublaslt().map_or(0, |library| library.version())
    }

    /// Enqueues a matrix product.
    ///
    /// # Safety
    /// `places` name memory of this device, used on its stream: matrices without gaps of the extents and types of
    /// `product`, a bias of n values, factors as its layouts say, one f32 each for an output's scale, the amax and an alpha on the device.
    pub(crate) unsafe fn matmul(&self, op: &'static str, product: &Product, places: &Places) -> Result<()> {
        self.ready()?;
        self.opened(&mut self.0.blas.lock())?.run(self, op, product, places)
    }

    fn opened<'a>(&self, blas: &'a mut Option<Blas>) -> Result<&'a mut Blas> {
        match blas {
            Some(blas) => Ok(blas),
            none => Ok(none.insert(Blas::open(self, self.0.libraries, &self.0.gemm_tuning)?)),
        }
    }

    /// Returns the kernels of tuned products, none before the first product.
    pub(crate) fn tuned_products(&self) -> TunedProducts {
        self.0.blas.lock().as_ref().map(Blas::tuned_products).unwrap_or_default()
    }

    /// Takes the choices that are for this GPU and library, and returns their number.
    pub(crate) fn use_tuned_products(&self, tuned: &TunedProducts) -> Result<usize> {
        self.ready()?;
        self.expect_eager("use_tuned_products", "call it before the step is recorded")?;
        if tuned.is_empty() {
            return Ok(0);
        }
        match self.opened(&mut self.0.blas.lock()) {
            Ok(blas) => Ok(blas.use_tuned_products(tuned)),
            Err(error) => {
                // The first product reports it.
                tracing::warn!(%error, "tuned products are not used");
                Ok(0)
            }
        }
    }

    /// Returns the work that is put off on this device.
    pub(crate) fn deferred(&self) -> &DeferredWork {
        &self.0.deferred
    }

    /// Returns cuDNN on this device, opened if this is its first use. `None` if it is switched off or cannot be loaded or opened.
    fn dnn(&self) -> Result<Option<MappedMutexGuard<'_, Dnn>>> {
        if !self.0.uses_cudnn {
            return Ok(None);
        }
        let Ok(library) = self.0.libraries.cudnn() else { return Ok(None) };
        self.ready()?;
        let mut dnn = self.0.dnn.lock();
        if dnn.is_none() {
            self.expect_eager("attention", "cuDNN is not open yet: run the step a few times before")?;
            *dnn = Some(Dnn::open(self, library)?);
        }
        Ok(MutexGuard::try_map(dnn, |dnn| dnn.as_mut()?.as_mut()).ok())
    }

    /// The way in which cuDNN adds up the queries' gradients. `None` if it does not compute them.
    pub(crate) fn dnn_sums(&self, deterministic: bool) -> Result<Option<Sums>> {
        Ok(self.dnn()?.and_then(|dnn| dnn.sums(deterministic)))
    }

    /// Returns whether cuDNN computes attention of batch entries without queries or keys.
    pub(crate) fn dnn_takes_empty_sequences(&self) -> Result<bool> {
        Ok(self.dnn()?.is_some_and(|dnn| dnn.takes_empty_sequences()))
    }

    /// Returns whether cuDNN serves a call of attention. The first of its kind is planned, which takes about a second.
    pub(crate) fn dnn_serves(&self, op: &'static str, call: &Attention, deterministic: bool) -> Result<bool> {
        match self.dnn()? {
            Some(mut dnn) => dnn.serves(self, op, call, deterministic),
            None => Ok(false),
        }
    }

    /// Enqueues a call of attention that cuDNN serves.
    ///
    /// # Safety
    /// `bound` returns addresses of memory on this device, used on its stream, as the call describes it.
    pub(crate) unsafe fn dnn_run(
        &self,
        op: &'static str,
        call: &Attention,
        deterministic: bool,
        scale: f32,
        bound: &impl Bound,
    ) -> Result<()> {
        match self.dnn()? {
            // SAFETY: the caller's.
            Some(dnn) => unsafe { dnn.run(self, op, call, deterministic, scale, bound) },
            None => Err(not_open(op)),
        }
    }

    /// Records what `step` queues and launches it once.
    pub(crate) fn capture<T, E: From<Error>>(
        &self,
        step: impl FnOnce() -> Result<T, E>,
    ) -> Result<(CudaGraph, T), E> {
        if self.capture_number().is_none() {
            self.deferred().settle()?;
        }
        let (recorded, output) = self.record(|| {
            let output = step()?;
            self.deferred().settle()?;
            Ok::<T, E>(output)
        })?;
        Ok((CudaGraph { recorded, _gpu: self.clone() }, output))
    }
}

/// A step on one device, to be launched again and again.
pub(crate) struct CudaGraph {
    recorded: Recorded,
    /// Keeps the kernels and plans that the step uses.
    _gpu: Gpu,
}

impl CudaGraph {
    /// Advances the host's counters and launches the step.
    pub(crate) fn replay(&self) -> Result<()> {
        self.recorded.replay()
    }
}

impl fmt::Debug for CudaGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "capture {:?}", self.recorded)
    }
}

impl PartialEq for Gpu {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Gpu {}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let context: &Context = self;
        fmt::Display::fmt(context, f)
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpu({self}, {})", self.name())
    }
}

impl Drop for Inner {
    // A destructor has no one to report a failure to.
    fn drop(&mut self) {
        let _ = self.queue.stream().context().bind_to_thread();
        let _ = self.queue.stream().synchronize();
        if let Some(mut blas) = self.blas.get_mut().take() {
            blas.release(|address| self.queue.driver_free(address));
        }
        if let Some(Some(mut dnn)) = self.dnn.get_mut().take() {
            dnn.release();
        }
        self.modules.get_mut().unload();
    }
}
