//! The parts of a safetensors file, for programs that read and write one in pieces: its [`Header`], and the [`Elements`] of each
//! tensor. A file of any size takes the memory of one tensor.

mod header;
mod strings;

use crate::Result;
use fp8_kernels::{DType, Element, Tensor, bf16, f16};
pub use header::{Header, HeaderError};
use safetensors::Dtype;
use std::borrow::Cow;
use std::io::Write;
pub use strings::distinct_strings;

/// Bytes that are converted at a time.
const CHUNK: usize = 1 << 20;

/// A tensor's elements in host memory: borrowed where they are there already.
///
/// ```
/// use fp8_nn::checkpoint::stream::Elements;
/// use fp8_nn::prelude::*;
///
/// let x = Tensor::full(1.0, [2], DType::F32, &Device::cpu())?;
/// let mut bytes = Vec::new();
/// Elements::of(&x)?.write(&mut bytes)?;
/// assert_eq!(bytes, [0, 0, 0x80, 0x3F, 0, 0, 0x80, 0x3F]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub enum Elements<'a> {
    /// f32.
    F32(Cow<'a, [f32]>),
    /// bf16.
    BF16(Cow<'a, [bf16]>),
    /// f16.
    F16(Cow<'a, [f16]>),
    /// i32.
    I32(Cow<'a, [i32]>),
    /// u8, codes of FP8 among them.
    U8(Cow<'a, [u8]>),
}

impl<'a> Elements<'a> {
    /// Copies the elements of a tensor to the host, unless they are there.
    ///
    /// # Errors
    /// The device failed, or is recording a step.
    pub fn of(tensor: &'a Tensor) -> Result<Self> {
        Ok(match tensor.dtype() {
            DType::F32 => Self::F32(on_host(tensor)?),
            DType::BF16 => Self::BF16(on_host(tensor)?),
            DType::F16 => Self::F16(on_host(tensor)?),
            DType::I32 => Self::I32(on_host(tensor)?),
            DType::U8 => Self::U8(on_host(tensor)?),
        })
    }

    /// Writes the elements in order, little-endian, as a safetensors file has them.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write(&self, out: &mut impl Write) -> std::io::Result<()> {
        match self {
            Self::F32(values) => write_values(values, f32::to_le_bytes, out),
            Self::BF16(values) => write_values(values, bf16::to_le_bytes, out),
            Self::F16(values) => write_values(values, f16::to_le_bytes, out),
            Self::I32(values) => write_values(values, i32::to_le_bytes, out),
            Self::U8(values) => out.write_all(values),
        }
    }
}

/// Returns the elements of a tensor in host memory: borrowed where they are there already.
pub(super) fn on_host<T: Element>(tensor: &Tensor) -> Result<Cow<'_, [T]>> {
    match tensor.as_slice() {
        Ok(values) => Ok(Cow::Borrowed(values)),
        Err(_) => Ok(Cow::Owned(tensor.to_vec()?)),
    }
}

fn write_values<T: Copy, const N: usize>(
    values: &[T],
    bytes: impl Fn(T) -> [u8; N],
    out: &mut impl Write,
) -> std::io::Result<()> {
    let mut chunk = Vec::with_capacity(CHUNK);
    for values in values.chunks(CHUNK / N) {
        chunk.clear();
        values.iter().for_each(|&value| chunk.extend_from_slice(&bytes(value)));
        out.write_all(&chunk)?;
    }
    Ok(())
}

/// Returns the dtype of a safetensors file that has the elements of a tensor of this dtype.
///
/// ```
/// use fp8_nn::{checkpoint::stream::file_dtype, prelude::DType};
///
/// assert_eq!(file_dtype(DType::BF16), safetensors::Dtype::BF16);
/// ```
#[must_use]
pub fn file_dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::BF16 => Dtype::BF16,
        DType::F16 => Dtype::F16,
        DType::I32 => Dtype::I32,
        DType::U8 => Dtype::U8,
    }
}
