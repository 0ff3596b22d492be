//! Where tensors live and operations run.

use crate::backend::Backend;
use crate::backend::cuda::{self, Gpu};
use crate::{Error, Result};
use std::fmt;

/// A place that holds tensors and runs operations. Cheap to clone.
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

/// When the transposed copy of an FP8 tensor is made, which dgrad and wgrad read on hardware whose FP8 GEMM is TN only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TransposePolicy {
    /// With the cast, in the same pass over the tensor.
    WithCast,
    /// From the codes, when backward first needs it: less memory between the passes.
    OnDemand,
    /// Not at all: the GEMM reads either layout.
    Never,
}

impl Device {
    /// The CPU: a real backend and the reference for the others. Its GEMM reads either layout, so no copies are
    /// transposed.
    pub const fn cpu() -> Self {
        Self { backend: Backend::Cpu, transpose_policy: TransposePolicy::Never }
    }

    /// The GPU with this ordinal, on a stream of its own.
    ///
    /// # Errors
    /// Says which library was not found and where it was looked for; a driver that is too old, an ordinal beyond the last
    /// GPU, a GPU without FP8 (older than compute capability 8.9), a crate built without its `cuda` feature.
    pub fn cuda(ordinal: usize) -> Result<Self> {
        cuda::open(ordinal).map(Self::on_gpu)
    }

    pub(crate) fn on_gpu(gpu: Gpu) -> Self {
        let transpose_policy = gpu.transpose_policy();
        Self { backend: Backend::Cuda(gpu), transpose_policy }
    }

    /// Waits until all work queued on it is done, and reports what that work met: an id out of range, a failed launch.
    ///
    /// # Errors
    /// What queued work met; none on the CPU, where operations are done when they return.
    pub fn synchronize(&self) -> Result<()> {
        match &self.backend {
            Backend::Cpu => Ok(()),
            Backend::Cuda(gpu) => gpu.synchronize(),
        }
    }

    /// What it is, for reports: the GPU's name as its driver gives it.
    pub fn description(&self) -> String {
        match &self.backend {
            Backend::Cpu => "CPU".to_owned(),
            Backend::Cuda(gpu) => gpu.name().to_owned(),
        }
    }

    /// Returns whether the device imitates hardware: what it computes is right, but how long it takes means nothing. A GPU is
    /// simulated if its driver reports neither a core clock nor a memory clock.
    pub fn is_simulated(&self) -> bool {
        match &self.backend {
            Backend::Cpu => false,
            Backend::Cuda(gpu) => gpu.is_simulated(),
        }
    }

    /// By name: `cpu` or `cuda:N`.
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

    /// The same device with another transpose policy. Results have the same bits under all three.
    #[must_use]
    pub fn with_transpose_policy(mut self, policy: TransposePolicy) -> Self {
        self.transpose_policy = policy;
        self
    }

    /// When transposed copies are made.
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

    /// The GPU that this is.
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
