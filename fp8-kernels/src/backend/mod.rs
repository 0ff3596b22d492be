//! The backends, and how an operation reaches the one that its arguments lie on.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

/// One variant per backend. Holds what its operations need: nothing on the CPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Backend {
    Cpu,
    #[cfg(feature = "cuda")]
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
        }
    };
}

pub(crate) use dispatch;
