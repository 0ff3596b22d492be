//! What can go wrong, with the numbers, and what would be right.

use crate::{DType, Encoding, Shape, UNSET};
use std::fmt;
use std::path::PathBuf;

/// Every error of this crate. `op` is the operation's name.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Shapes that do not fit each other.
    #[error("{op}: {what}: got {lhs} and {rhs}: {remedy}")]
    Shapes {
        /// The operation.
        op: &'static str,
        /// Which arguments.
        what: &'static str,
        /// The first one's shape.
        lhs: Shape,
        /// The second one's shape.
        rhs: Shape,
        /// What would be right.
        remedy: &'static str,
    },
    /// One shape that the operation cannot take.
    #[error("{op}: shape {shape}: {remedy}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// The shape it got.
        shape: Shape,
        /// What would be right.
        remedy: String,
    },
    /// A number of elements that does not fill a shape.
    #[error("{op}: {len} elements do not fill shape {shape}, which has {}", .shape.numel())]
    Elements {
        /// The operation.
        op: &'static str,
        /// Elements given.
        len: usize,
        /// Shape asked for.
        shape: Shape,
    },
    /// A data type that the operation does not take.
    #[error("{op}: {what} has dtype {found}: expected {expected}")]
    DType {
        /// The operation.
        op: &'static str,
        /// Which argument.
        what: &'static str,
        /// The type it has.
        found: DType,
        /// The types that are allowed.
        expected: &'static str,
    },
    /// Tensors of two devices in one call.
    #[error("{op}: arguments lie on {lhs} and {rhs}: move them to one device first")]
    Devices {
        /// The operation.
        op: &'static str,
        /// One device.
        lhs: String,
        /// The other one.
        rhs: String,
    },
    /// An option outside its range.
    #[error("{op}: {option} = {value}: {remedy}")]
    Option {
        /// The operation.
        op: &'static str,
        /// The option's name.
        option: &'static str,
        /// Its value.
        value: String,
        /// What would be right.
        remedy: String,
    },
    /// An id outside its table.
    #[error("{op}: {what} {value} at position {position} is out of range 0..{limit}")]
    Index {
        /// The operation.
        op: &'static str,
        /// What the id names.
        what: &'static str,
        /// The id.
        value: i64,
        /// Where it stands.
        position: usize,
        /// The number of valid ids.
        limit: usize,
    },
    /// Shards of one tensor that the ranks of a group quantized with different scales, or with one that is not committed.
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
        /// What its scale cell holds.
        value: f32,
        /// What the cell of rank 0 holds.
        other_value: f32,
    },
    /// Ranks of a group that made different calls.
    #[error(
        "{what}: rank {rank} made another call than rank 0: all ranks make the same calls in the same order"
    )]
    RankCalls {
        /// The call that this rank made.
        what: String,
        /// The first rank that differs from rank 0.
        rank: usize,
    },
    /// A product of two formats that no FP8 GEMM takes.
    #[error("{op}: {lhs} × {rhs}: FP8 GEMMs take E4M3×E4M3, E4M3×E5M2 and E5M2×E4M3; use E4M3 for one side")]
    Encodings {
        /// The operation.
        op: &'static str,
        /// Left operand.
        lhs: Encoding,
        /// Right operand.
        rhs: Encoding,
    },
    /// One operand in FP8, the other not.
    #[error("{op}: one operand is FP8 and the other {high}: quantize both or neither")]
    MixedOperands {
        /// The operation.
        op: &'static str,
        /// The high-precision operand's type.
        high: DType,
    },
    /// An in-place operation on storage that others hold too.
    #[error(
        "{name}: in-place update, but {holders} more hold its storage: use up or drop the Saved or clone that does"
    )]
    Shared {
        /// The buffer.
        name: String,
        /// How many others hold it.
        holders: usize,
    },
    /// A scale that a user's function returned and no tensor can be quantized with.
    #[error(
        "scale policy `{policy}` returned {scale} for amax {amax}: expected a finite scale of at least 2^-126, \
         so that its inverse is finite, too"
    )]
    CustomScale {
        /// The policy's name.
        policy: String,
        /// What it got.
        amax: f32,
        /// What it returned.
        scale: f32,
    },
    /// A library that was not found.
    #[error("{library} not found (looked in {}): {remedy}", display_paths(.searched))]
    LibraryMissing {
        /// Its file name.
        library: &'static str,
        /// Every place looked at.
        searched: Vec<PathBuf>,
        /// What would help.
        remedy: &'static str,
    },
    /// Elements asked for as a slice, of a tensor that does not lie in host memory.
    #[error(
        "{op}: the tensor lies on {device}, whose memory the host cannot reach; copy it with to_vec or move it with to_device"
    )]
    HostMemory {
        /// The operation.
        op: &'static str,
        /// Where the tensor lies.
        device: String,
    },
    /// An allocation that the device has no room for.
    #[error(
        "{device}: {requested} bytes asked for, {free} of {total} free: use a smaller batch, recompute activations, or free tensors"
    )]
    OutOfMemory {
        /// The device.
        device: String,
        /// Bytes asked for.
        requested: usize,
        /// Bytes free on the device.
        free: usize,
        /// Bytes that the device has.
        total: usize,
    },
    /// An allocation that the host has no room for.
    #[error("{op}: {bytes} bytes of host memory cannot be allocated: use smaller extents or free tensors")]
    HostAllocation {
        /// The operation.
        op: &'static str,
        /// Bytes asked for.
        bytes: usize,
    },
    /// A device on which an earlier operation failed in a way that it does not recover from.
    #[error(
        "{device}: unusable since an earlier failure: {reason}: open a new device; if that fails, start the process again"
    )]
    Poisoned {
        /// The device.
        device: String,
        /// The earlier failure.
        reason: String,
    },
    /// An operation that a device does not have.
    #[error("{op}: not on {device}: {remedy}")]
    Unsupported {
        /// The operation.
        op: &'static str,
        /// The device.
        device: String,
        /// What to do instead.
        remedy: &'static str,
    },
    /// A GPU that is too old.
    #[error(
        "{device}: {name} has compute capability {}.{}: expected {}.{} or newer; use another GPU or Device::cpu()",
        .found.0, .found.1, .needed.0, .needed.1
    )]
    Capability {
        /// The device.
        device: String,
        /// What its driver calls it.
        name: String,
        /// Major and minor number that it has.
        found: (i32, i32),
        /// Major and minor number that the kernels need.
        needed: (i32, i32),
    },
    /// A library that was found, but is not the one expected.
    #[error("{library} has no {symbol}: {remedy}")]
    SymbolMissing {
        /// Its path.
        library: String,
        /// The function that it does not have.
        symbol: String,
        /// What would be right.
        remedy: String,
    },
    /// A call into the driver, or one of its libraries, that failed.
    #[error("{op}: {call} failed with {code}: {text}")]
    Driver {
        /// The function that was called.
        call: &'static str,
        /// What it was called for.
        op: String,
        /// The code that it returned.
        code: u32,
        /// What the code means.
        text: String,
    },
    /// An operation that a step being recorded cannot have.
    #[error("{op}: cannot be recorded: {remedy}")]
    Capture {
        /// The operation.
        op: String,
        /// What would be right.
        remedy: &'static str,
    },
    /// A recorded step that cannot go on from here. Nothing was launched.
    #[error("replay: {remedy}")]
    Replay {
        /// What would be right.
        remedy: &'static str,
    },
    /// A matrix product that cuBLASLt did not take.
    #[error("{op}: {product}: {call} failed with {code}, {text}: {remedy}")]
    Gemm {
        /// The operation.
        op: &'static str,
        /// Its extents and types.
        product: String,
        /// The function that was called.
        call: &'static str,
        /// The code that it returned.
        code: i32,
        /// What the code means.
        text: String,
        /// What would help.
        remedy: String,
    },
    /// A kernel that the GPU's compiler refused.
    #[error("kernel {kernel} does not compile:\n{log}")]
    Compile {
        /// The kernel.
        kernel: String,
        /// What the compiler said.
        log: String,
    },
    /// An environment variable whose value cannot be used.
    #[error("{name}={value}: {remedy}")]
    Environment {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// What would be right.
        remedy: String,
    },
    /// From the codec.
    #[error(transparent)]
    Format(#[from] fp8_format::Error),
}

/// Writes the same sentence as `Display`, so that `fn main() -> Result<()>` and `unwrap` print it.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// This crate's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

fn display_paths(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// `2.5 on rank 2 and 2 on rank 0`.
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
    fn a_device_says_what_is_wrong_and_what_would_be_right() {
        let device = || "cuda:1".to_owned();
        let cases = [
            (
                Error::HostMemory { op: "as_slice", device: device() },
                "as_slice: the tensor lies on cuda:1, whose memory the host cannot reach; copy it with to_vec or move it \
                 with to_device",
            ),
            (
                Error::OutOfMemory { device: device(), requested: 4096, free: 1024, total: 8192 },
                "cuda:1: 4096 bytes asked for, 1024 of 8192 free: use a smaller batch, recompute activations, or free \
                 tensors",
            ),
            (
                Error::Poisoned { device: device(), reason: "gemm: an illegal address".to_owned() },
                "cuda:1: unusable since an earlier failure: gemm: an illegal address: open a new device; \
                 if that fails, start the process again",
            ),
            (
                Error::Unsupported { op: "update_scales", device: device(), remedy: "use a named rule" },
                "update_scales: not on cuda:1: use a named rule",
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
