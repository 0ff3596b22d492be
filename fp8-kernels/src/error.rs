//! What can go wrong, with the numbers, and what would be right.

use crate::{DType, Encoding, Shape};
use std::path::PathBuf;

/// Every error of this crate. `op` is the operation's name.
#[derive(Debug, thiserror::Error)]
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
    #[error("scale policy `{policy}` returned {scale} for amax {amax}: a scale is finite and greater than 0")]
    CustomScale {
        /// The policy's name.
        policy: String,
        /// What it got.
        amax: f32,
        /// What it returned.
        scale: f32,
    },
    /// A library that was not found.
    #[error("{library} not found (looked in {}); install the NVIDIA driver or use Device::cpu()", display_paths(.searched))]
    LibraryMissing {
        /// Its file name.
        library: &'static str,
        /// Every place looked at.
        searched: Vec<PathBuf>,
    },
    /// A CUDA driver is there, the backend that would use it is not.
    #[error("cuda:{ordinal}: found {}, but this version has no CUDA backend; use Device::cpu()", .library.display())]
    BackendMissing {
        /// The device asked for.
        ordinal: usize,
        /// The driver that was found.
        library: PathBuf,
    },
    /// From the codec.
    #[error(transparent)]
    Format(#[from] fp8_format::Error),
}

/// This crate's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

fn display_paths(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}
