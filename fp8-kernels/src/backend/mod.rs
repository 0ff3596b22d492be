//! The backends, and how an operation reaches the one that its arguments are on.
//!
//! Without the `cuda` feature `absent` takes the place of `cuda`: the same names with no values, so that no other file asks
//! which features are on.

#[cfg(not(feature = "cuda"))]
pub(crate) mod absent;
pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

#[cfg(not(feature = "cuda"))]
pub(crate) use absent as cuda;

/// The backend of a device, with what its operations need: nothing on the CPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Backend {
    Cpu,
    Cuda(cuda::Gpu),
}

/// `dispatch!(device, file::function(arguments))` calls `function` of the file that every backend has for an operation,
/// with the same arguments and the same result on each. The one place that lists the backends for all operations.
macro_rules! dispatch {
    ($device:expr, $file:ident::$function:ident($($argument:expr),* $(,)?)) => {
        match $device.backend() {
            $crate::backend::Backend::Cpu => $crate::backend::cpu::$file::$function($($argument),*),
            #[cfg(feature = "cuda")]
            $crate::backend::Backend::Cuda(gpu) => {
                // A handle of its own: the arguments may lend mutably what `gpu` was borrowed from.
                let gpu = gpu.clone();
                $crate::backend::cuda::ops::$file::$function(&gpu, $($argument),*)
            }
            #[cfg(not(feature = "cuda"))]
            $crate::backend::Backend::Cuda(gpu) => match *gpu {},
        }
    };
}

pub(crate) use dispatch;
