//! The devices on which tensors are stored and operations run.

use crate::backend::Backend;
use crate::backend::cuda::{self, Gpu};
use crate::memory::{self, Ledger};
use crate::{Error, MemoryReport, Result, TransposePolicy, TunedProducts, host};
use std::fmt;

/// A device that stores tensors and runs operations: the CPU or a GPU. Cheap to clone.
///
/// ```
/// use fp8_kernels::Device;
/// assert_eq!(Device::cpu().to_string(), "cpu");
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Device {
    backend: Backend,
    transpose_policy: TransposePolicy,
}

impl Device {
    /// Returns the CPU, a complete backend and the reference for the others. Its GEMM reads either layout, so it makes no
    /// transposed copies.
    pub const fn cpu() -> Self {
        Self { backend: Backend::Cpu, transpose_policy: TransposePolicy::Never }
    }

    /// Opens the GPU with this ordinal, on a stream of its own.
    ///
    /// # Errors
    /// A library that was not found (the error lists the places searched), a driver that is too old, an ordinal beyond the
    /// last GPU, a GPU without FP8 (older than compute capability 8.9), a crate built without its `cuda` feature.
    pub fn cuda(ordinal: usize) -> Result<Self> {
        cuda::open(ordinal).map(Self::on_gpu)
    }

    pub(crate) fn on_gpu(gpu: Gpu) -> Self {
        let transpose_policy = gpu.transpose_policy();
        Self { backend: Backend::Cuda(gpu), transpose_policy }
    }

    /// Waits until all queued work is done, and returns its first error, such as an id out of range or a failed launch.
    ///
    /// # Errors
    /// An error of queued work; none on the CPU, where an operation is done when it returns.
    pub fn synchronize(&self) -> Result<()> {
        match &self.backend {
            Backend::Cpu => Ok(()),
            Backend::Cuda(gpu) => gpu.synchronize(),
        }
    }

    /// Returns the memory of freed tensors, which is kept for later ones, to the system or to the GPU's driver. All CPU
    /// devices share it, and they never keep more than tensors have recently used at once. On a GPU this waits for all queued
    /// work first; memory that a recorded step uses stays with its [`Graph`](crate::Graph).
    ///
    /// # Errors
    /// A step that is being recorded; an error of queued work; none on the CPU.
    ///
    /// ```
    /// use fp8_kernels::{DType, Device, Tensor};
    /// let device = Device::cpu();
    /// drop(Tensor::zeros([1024, 1024], DType::F32, &device)?); // its 4 MiB are kept
    /// device.release_memory()?;
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    pub fn release_memory(&self) -> Result<()> {
        match &self.backend {
            Backend::Cpu => host::release_all(),
            Backend::Cuda(gpu) => {
                gpu.synchronize()?;
                gpu.release_kept();
            }
        }
        Ok(())
    }

    /// Returns the bytes that tensors on the device take, now and at the peak, by what they are used for. All CPU devices of a
    /// process share one count. Each GPU that is opened has one of its own, which its clones share.
    ///
    /// ```
    /// use fp8_kernels::{DType, Device, Tensor};
    /// let device = Device::cpu();
    /// device.reset_peak_memory();
    /// let before = device.memory_report().now.total();
    /// drop(Tensor::zeros([1024, 1024], DType::F32, &device)?);
    /// let report = device.memory_report();
    /// assert!(report.now.total() == before && report.peak.total() - before >= 4 << 20);
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    pub fn memory_report(&self) -> MemoryReport {
        self.ledger().report()
    }

    /// Forgets the peak of [`memory_report`](Self::memory_report): the next peak begins with what is in use.
    pub fn reset_peak_memory(&self) {
        self.ledger().reset_peak();
    }

    /// Returns the kernels that tuning chose for matrix products on this device, with those that it took from a file or by
    /// [`use_tuned_products`](Self::use_tuned_products). The result is empty on the CPU, before the first product, and if nothing was
    /// tuned or loaded.
    ///
    /// ```
    /// assert!(fp8_kernels::Device::cpu().tuned_products().is_empty());
    /// ```
    pub fn tuned_products(&self) -> TunedProducts {
        match &self.backend {
            Backend::Cpu => TunedProducts::default(),
            Backend::Cuda(gpu) => gpu.tuned_products(),
        }
    }

    /// Uses these kernels for the products that they were chosen for, from the next product on, and returns how many choices
    /// are for this device. A choice for another GPU or another version of cuBLASLt is ignored, and so is a kernel that the
    /// library refuses. Recorded steps keep the kernels that they were recorded with. See [`TunedProducts`] for an example.
    ///
    /// # Errors
    /// A step that is being recorded; a device that failed. None on the CPU, which returns 0.
    pub fn use_tuned_products(&self, tuned: &TunedProducts) -> Result<usize> {
        match &self.backend {
            Backend::Cpu => Ok(0),
            Backend::Cuda(gpu) => gpu.use_tuned_products(tuned),
        }
    }

    fn ledger(&self) -> &Ledger {
        match &self.backend {
            Backend::Cpu => memory::cpu(),
            Backend::Cuda(gpu) => gpu.ledger(),
        }
    }

    /// Returns the device's name for reports: `CPU`, or the GPU's name as its driver reports it.
    pub fn description(&self) -> String {
        match &self.backend {
            Backend::Cpu => "CPU".to_owned(),
            Backend::Cuda(gpu) => gpu.name().to_owned(),
        }
    }

    /// Returns true for the simulated GPU. Its results are exact; its timings are meaningless. A GPU counts as simulated if
    /// its driver reports neither a core clock nor a memory clock.
    pub fn is_simulated(&self) -> bool {
        match &self.backend {
            Backend::Cpu => false,
            Backend::Cuda(gpu) => gpu.is_simulated(),
        }
    }

    /// Opens a device by its name: `cpu`, `cuda` for the first GPU, or `cuda:N`.
    ///
    /// # Errors
    /// An unknown name, and all errors of [`cuda`](Self::cuda).
    pub fn from_name(name: &str) -> Result<Self> {
        let unknown = || Error::Option {
            op: "device",
            option: "name",
            value: name.to_owned(),
            remedy: "expected cpu or cuda:N, for example cuda:0".to_owned(),
        };
        match name {
            "cpu" => Ok(Self::cpu()),
            "cuda" => Self::cuda(0),
            _ => Self::cuda(name.strip_prefix("cuda:").and_then(|n| n.parse().ok()).ok_or_else(unknown)?),
        }
    }

    /// Returns the same device with another transpose policy. Results have the same bits under all three.
    #[must_use]
    pub fn with_transpose_policy(mut self, policy: TransposePolicy) -> Self {
        self.transpose_policy = policy;
        self
    }

    /// Returns the transpose policy.
    pub const fn transpose_policy(&self) -> TransposePolicy {
        self.transpose_policy
    }

    /// Returns whether tensors on both devices can meet in one operation. Two CUDA devices are the same only if one is a
    /// clone of the other; transpose policies may differ.
    ///
    /// ```
    /// use fp8_kernels::{Device, TransposePolicy};
    /// let device = Device::cpu();
    /// assert!(device.is_same(&device.clone().with_transpose_policy(TransposePolicy::WithCast)));
    /// ```
    pub fn is_same(&self, other: &Self) -> bool {
        self.backend == other.backend
    }

    pub(crate) const fn backend(&self) -> &Backend {
        &self.backend
    }

    /// Returns the GPU, or an error for the CPU.
    pub(crate) fn gpu(&self, op: &'static str) -> Result<&Gpu> {
        match &self.backend {
            Backend::Cuda(gpu) => Ok(gpu),
            Backend::Cpu => Err(Error::Devices { op, lhs: self.to_string(), rhs: "a GPU".to_owned() }),
        }
    }

    pub(crate) fn expect_same(&self, op: &'static str, other: &Self) -> Result<()> {
        if self.is_same(other) {
            return Ok(());
        }
        let (lhs, mut rhs) = (self.to_string(), other.to_string());
        if lhs == rhs {
            rhs = format!("another device opened on {rhs}");
        }
        Err(Error::Devices { op, lhs, rhs })
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({self}, transposes {:?})", self.transpose_policy)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.backend {
            Backend::Cpu => f.pad("cpu"),
            Backend::Cuda(gpu) => fmt::Display::fmt(gpu, f),
        }
    }
}
