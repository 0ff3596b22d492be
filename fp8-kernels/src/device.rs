//! Where tensors live and operations run.

use crate::{Error, Result, cuda};
use std::fmt;

/// A place that holds tensors and runs operations. Cheap to clone.
///
/// ```
/// use fp8_kernels::Device;
/// assert_eq!(Device::cpu().to_string(), "cpu");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    backend: Backend,
    transpose_policy: TransposePolicy,
}

/// One variant per backend: every operation matches on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Backend {
    Cpu,
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

    /// The GPU with this ordinal.
    ///
    /// # Errors
    /// Says which library was not found and where it was looked for, or that this version has no CUDA backend.
    pub fn cuda(ordinal: usize) -> Result<Self> {
        Err(cuda::loader::open(ordinal))
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

    pub(crate) const fn backend(&self) -> Backend {
        self.backend
    }

    pub(crate) fn expect_same(&self, op: &'static str, other: &Self) -> Result<()> {
        if self.backend == other.backend {
            return Ok(());
        }
        Err(Error::Devices { op, lhs: self.to_string(), rhs: other.to_string() })
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.backend {
            Backend::Cpu => f.pad("cpu"),
        }
    }
}
