//! The errors of this crate.

use crate::{DType, Encoding, Shape, UNSET};
use std::fmt;
use std::path::PathBuf;

/// An error of this crate.
///
/// The text says which operation failed, what was wrong, with the numbers, and what would be right. `op` is the name of the
/// operation.
///
/// ```
/// use fp8_kernels::{Device, Error, Tensor, ops};
/// let x = Tensor::from_vec(vec![1.0f32; 6], [2, 3], &Device::cpu())?;
/// let error = ops::split(&x, &[1, 1]).unwrap_err();
/// assert_eq!(error.to_string(), "split: shape [2, 3]: sizes [1, 1] add up to 2: expected 3, the last dimension");
/// assert!(matches!(error, Error::Shape { op: "split", .. }));
/// # Ok::<(), Error>(())
/// ```
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Two shapes do not match.
    #[error("{op}: {what}: got {lhs} and {rhs}: {remedy}")]
    Shapes {
        /// The operation.
        op: &'static str,
        /// The arguments.
        what: &'static str,
        /// The first one's shape.
        lhs: Shape,
        /// The second one's shape.
        rhs: Shape,
        /// A remedy, such as the shapes that were expected.
        remedy: &'static str,
    },
    /// The operation does not take a shape.
    #[error("{op}: shape {shape}: {remedy}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// The shape.
        shape: Shape,
        /// A remedy, such as the shape that was expected.
        remedy: String,
    },
    /// The number of elements is not that of a shape.
    #[error("{op}: {len} elements do not fill shape {shape}, which has {}", .shape.numel())]
    Elements {
        /// The operation.
        op: &'static str,
        /// The number of elements given.
        len: usize,
        /// The shape.
        shape: Shape,
    },
    /// The operation does not take a dtype.
    #[error("{op}: {what} has dtype {found}: expected {expected}")]
    DType {
        /// The operation.
        op: &'static str,
        /// The argument.
        what: &'static str,
        /// The dtype it has.
        found: DType,
        /// The dtypes that are allowed.
        expected: &'static str,
    },
    /// The arguments of a call are on different devices.
    #[error("{op}: arguments are on {lhs} and {rhs}: move them to one device first")]
    Devices {
        /// The operation.
        op: &'static str,
        /// One device.
        lhs: String,
        /// The other one.
        rhs: String,
    },
    /// An option is outside its range.
    #[error("{op}: {option} = {value}: {remedy}")]
    Option {
        /// The operation.
        op: &'static str,
        /// The option's name.
        option: &'static str,
        /// Its value.
        value: String,
        /// A remedy, such as the values that the option takes.
        remedy: String,
    },
    /// An id is outside its table.
    #[error("{op}: {what} {value} at position {position} is out of range 0..{limit}")]
    Index {
        /// The operation.
        op: &'static str,
        /// The kind of id, such as a target.
        what: &'static str,
        /// The id.
        value: i64,
        /// The index of the id in its tensor.
        position: usize,
        /// The number of valid ids.
        limit: usize,
    },
    /// The ranks of a group quantized shards of one tensor with different scales, or with a scale that is not committed.
    #[error(
        "{what}: the scale is {}: shards of one tensor need one scale; commit the same scopes on all ranks, with \
         reduce_amax and this group as amax_reduction_group",
        display_scales(*.rank, *.value, *.other_value)
    )]
    RankScales {
        /// The call.
        what: String,
        /// The first rank with a wrong scale.
        rank: usize,
        /// The value of its scale cell.
        value: f32,
        /// The value of rank 0's scale cell.
        other_value: f32,
    },
    /// The ranks of a group made different calls.
    #[error(
        "{what}: rank {rank} made another call than rank 0: all ranks make the same calls in the same order"
    )]
    RankCalls {
        /// The call that this rank made.
        what: String,
        /// The first rank that differs from rank 0.
        rank: usize,
    },
    /// No FP8 GEMM takes the formats of the operands.
    #[error("{op}: {lhs} × {rhs}: FP8 GEMMs take E4M3×E4M3, E4M3×E5M2 and E5M2×E4M3; use E4M3 for one side")]
    Encodings {
        /// The operation.
        op: &'static str,
        /// The format of the left operand.
        lhs: Encoding,
        /// The format of the right operand.
        rhs: Encoding,
    },
    /// The scales of two FP8 operands cannot be multiplied.
    #[error(
        "{op}: scales of {lhs} × {rhs}: FP8 GEMMs take tensor or row with tensor or row, 1x128 with 1x128 or 128x128, mx32 \
         with mx32, 1x16 with 1x16 or 16x16, and what is Hadamard-transformed with itself"
    )]
    Blocks {
        /// The operation.
        op: &'static str,
        /// The elements that share a scale in `a`: `tensor`, `row`, `1x128`, `128x128`, `mx32`, `1x16`, `16x16` or `Hadamard-transformed 1x16`.
        lhs: &'static str,
        /// The elements that share a scale in `b`.
        rhs: &'static str,
    },
    /// One operand is in FP8 and the other is not.
    #[error("{op}: one operand is FP8 and the other {high}: quantize both or neither")]
    MixedOperands {
        /// The operation.
        op: &'static str,
        /// The dtype of the operand in high precision.
        high: DType,
    },
    /// An in-place operation got a tensor whose storage is shared.
    #[error(
        "{name}: cannot be changed in place, because {holders} other {} its storage: drop every clone of it, and every \
         Saved that contains one, first",
        if *.holders == 1 { "tensor shares" } else { "tensors share" }
    )]
    Shared {
        /// The tensor.
        name: String,
        /// The number of other tensors that share the storage.
        holders: usize,
    },
    /// A custom scale policy returned a scale that cannot be used.
    #[error(
        "scale policy `{policy}` returned {scale} for amax {amax}: expected a finite scale of at least 2^-126, \
         so that its inverse is finite, too"
    )]
    CustomScale {
        /// The policy's name.
        policy: String,
        /// The amax it got.
        amax: f32,
        /// The scale it returned.
        scale: f32,
    },
    /// A library was not found.
    #[error("{library} not found (looked in {}): {remedy}", display_paths(.searched))]
    LibraryMissing {
        /// Its file name.
        library: &'static str,
        /// The places that were searched.
        searched: Vec<PathBuf>,
        /// A remedy, such as the package to install.
        remedy: &'static str,
    },
    /// The CUDA driver was not found.
    #[error(
        "{library} not found (looked in {}): install NVIDIA's driver, version 570 or newer (580 without NVRTC), or use \
         Device::cpu()",
        display_paths(.searched)
    )]
    DriverMissing {
        /// Its file name.
        library: &'static str,
        /// The places that were searched.
        searched: Vec<PathBuf>,
    },
    /// A GPU was asked for in a build without the feature `cuda`.
    #[error("{device}: this build has no `cuda` feature: enable it, or use Device::cpu()")]
    NoCudaFeature {
        /// The device.
        device: String,
    },
    /// A slice was requested of a tensor that is not in host memory.
    #[error(
        "{op}: the tensor is on {device}, whose memory the host cannot access; copy it with to_vec or move it with to_device"
    )]
    HostMemory {
        /// The operation.
        op: &'static str,
        /// The device that the tensor is on.
        device: String,
    },
    /// The device is out of memory.
    #[error(
        "{device}: {requested} bytes requested, {free} of {total} free: use a smaller batch, recompute activations, or free tensors"
    )]
    OutOfMemory {
        /// The device.
        device: String,
        /// The number of bytes requested.
        requested: usize,
        /// The number of bytes free on the device.
        free: usize,
        /// The number of bytes that the device has.
        total: usize,
    },
    /// The host is out of memory.
    #[error("{op}: {bytes} bytes of host memory cannot be allocated: use smaller extents or free tensors")]
    HostAllocation {
        /// The operation.
        op: &'static str,
        /// The number of bytes requested.
        bytes: usize,
    },
    /// The device cannot be used any more, since an earlier operation failed.
    #[error(
        "{device}: unusable since an earlier failure: {reason}: open a new device; if that fails, restart the process"
    )]
    Poisoned {
        /// The device.
        device: String,
        /// The earlier failure.
        reason: String,
    },
    /// The device does not support an operation.
    #[error("{op}: not supported on {device}: {remedy}")]
    Unsupported {
        /// The operation.
        op: &'static str,
        /// The device.
        device: String,
        /// An alternative to the operation.
        remedy: &'static str,
    },
    /// The GPU is too old.
    #[error(
        "{device}: {name} has compute capability {}.{}: expected {}.{} or newer; use another GPU or Device::cpu()",
        .found.0, .found.1, .needed.0, .needed.1
    )]
    Capability {
        /// The device.
        device: String,
        /// The name that the driver gives it.
        name: String,
        /// The compute capability that it has.
        found: (i32, i32),
        /// The compute capability that the kernels need.
        needed: (i32, i32),
    },
    /// A library was found but lacks a function.
    #[error("{library} has no {symbol}: {remedy}")]
    SymbolMissing {
        /// Its path.
        library: String,
        /// The missing function.
        symbol: String,
        /// A remedy, such as the version to install.
        remedy: String,
    },
    /// A call of the driver or one of NVIDIA's libraries failed.
    #[error("{op}: {call} failed with {code}: {text}")]
    Driver {
        /// The function that was called.
        call: &'static str,
        /// The operation that called it.
        op: String,
        /// The error code.
        code: u32,
        /// The meaning of the code.
        text: String,
    },
    /// An operation cannot be recorded in a graph.
    #[error("{op}: cannot be recorded: {remedy}")]
    Capture {
        /// The operation.
        op: String,
        /// The reason or a remedy.
        remedy: &'static str,
    },
    /// A graph cannot be replayed in the current state. Nothing was launched.
    #[error("replay: {remedy}")]
    Replay {
        /// The reason and a remedy.
        remedy: &'static str,
    },
    /// cuBLASLt refused a matrix product.
    #[error("{op}: {product}: {call} failed with {code}, {text}: {remedy}")]
    Gemm {
        /// The operation.
        op: &'static str,
        /// Its extents and types.
        product: String,
        /// The function that was called.
        call: &'static str,
        /// The error code.
        code: i32,
        /// The meaning of the code.
        text: String,
        /// An explanation or a remedy.
        remedy: String,
    },
    /// cuDNN could not be opened, or could not run attention that it had planned.
    #[error("{op}: {call} failed with {code}, {text}: {remedy}")]
    Cudnn {
        /// The operation.
        op: &'static str,
        /// The function that was called.
        call: &'static str,
        /// The status of the call.
        code: i32,
        /// The meaning of the status.
        text: String,
        /// An explanation or a remedy.
        remedy: String,
    },
    /// The CUDA compiler refused a kernel.
    #[error("kernel {kernel} does not compile:\n{log}")]
    Compile {
        /// The kernel.
        kernel: String,
        /// The compiler's output.
        log: String,
    },
    /// An environment variable has a value that cannot be used.
    #[error("{name}={value}: {remedy}")]
    Environment {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// A remedy, such as the values that the variable takes.
        remedy: String,
    },
    /// An error of the FP8 codec.
    #[error(transparent)]
    Format(#[from] fp8_format::Error),
}

/// Writes the same sentence as `Display`, so that `fn main() -> Result<()>` and `unwrap` print it.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A result whose error is [`Error`](enum@Error).
pub type Result<T, E = Error> = std::result::Result<T, E>;

fn display_paths(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// Describes two scales, as in `2.5 on rank 2 and 2 on rank 0`.
fn display_scales(rank: usize, value: f32, other_value: f32) -> String {
    let show = |scale: f32| match scale {
        UNSET => "unset".to_owned(),
        scale if scale < 0.0 => format!("{} (provisional)", -scale),
        scale => scale.to_string(),
    };
    let other = match value.to_bits() == other_value.to_bits() {
        true => String::new(),
        false => format!(" and {} on rank 0", show(other_value)),
    };
    format!("{} on rank {rank}{other}", show(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_errors_say_what_is_wrong_and_what_would_be_right() {
        let device = || "cuda:1".to_owned();
        let cases = [
            (
                Error::HostMemory { op: "as_slice", device: device() },
                "as_slice: the tensor is on cuda:1, whose memory the host cannot access; copy it with to_vec or move it \
                 with to_device",
            ),
            (
                Error::LibraryMissing {
                    library: "libnvrtc.so.13",
                    searched: vec!["/a/lib".into(), "/b".into()],
                    remedy: "pip install nvidia-cuda-nvrtc",
                },
                "libnvrtc.so.13 not found (looked in /a/lib, /b): pip install nvidia-cuda-nvrtc",
            ),
            (
                Error::DriverMissing { library: "libcuda.so.1", searched: vec!["/a/lib".into()] },
                "libcuda.so.1 not found (looked in /a/lib): install NVIDIA's driver, version 570 or newer (580 without \
                 NVRTC), or use Device::cpu()",
            ),
            (
                Error::NoCudaFeature { device: device() },
                "cuda:1: this build has no `cuda` feature: enable it, or use Device::cpu()",
            ),
            (
                Error::OutOfMemory { device: device(), requested: 4096, free: 1024, total: 8192 },
                "cuda:1: 4096 bytes requested, 1024 of 8192 free: use a smaller batch, recompute activations, or free \
                 tensors",
            ),
            (
                Error::Poisoned { device: device(), reason: "gemm: an illegal address".to_owned() },
                "cuda:1: unusable since an earlier failure: gemm: an illegal address: open a new device; \
                 if that fails, restart the process",
            ),
            (
                Error::Unsupported { op: "update_scales", device: device(), remedy: "use a named rule" },
                "update_scales: not supported on cuda:1: use a named rule",
            ),
            (
                Error::Capability { device: device(), name: "T4".to_owned(), found: (7, 5), needed: (8, 9) },
                "cuda:1: T4 has compute capability 7.5: expected 8.9 or newer; use another GPU or Device::cpu()",
            ),
            (
                Error::SymbolMissing {
                    library: "/lib/libcuda.so.1".to_owned(),
                    symbol: "cuLaunchKernelEx".to_owned(),
                    remedy: "install driver 580 or newer".to_owned(),
                },
                "/lib/libcuda.so.1 has no cuLaunchKernelEx: install driver 580 or newer",
            ),
            (
                Error::Driver {
                    call: "cuMemAlloc",
                    op: "zeros".to_owned(),
                    code: 700,
                    text: "an illegal memory access".to_owned(),
                },
                "zeros: cuMemAlloc failed with 700: an illegal memory access",
            ),
            (
                Error::Compile { kernel: "cast".to_owned(), log: "line 1: error".to_owned() },
                "kernel cast does not compile:\nline 1: error",
            ),
            (
                Error::Environment {
                    name: "FP8_CUDA_CACHE_DIR",
                    value: "/nowhere".to_owned(),
                    remedy: "give a folder that can be written".to_owned(),
                },
                "FP8_CUDA_CACHE_DIR=/nowhere: give a folder that can be written",
            ),
        ];
        for (error, text) in cases {
            assert_eq!(error.to_string(), text);
            assert_eq!(format!("{error:?}"), text);
        }
    }
}
