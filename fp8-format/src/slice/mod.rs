//! Conversion, quantization and transposition of slices.
//!
//! Every function applies the scalar conversion of the same name to each element, with the same bits on every [`Path`]. The free
//! functions are the methods of [`Codec::new`]. If source and destination differ in length, a function returns an [`Error`] and
//! writes nothing. Time is linear in the number of elements. Nothing is allocated on the calling thread;
//! [`Codec::quantize_transpose`] uses 64 KiB of stack for a large matrix, as do columnwise results of blocks and tiles. With `Codec::parallel`, rayon allocates its tasks, and
//! `transpose` allocates a list of the column pieces of each task.
//!
//! ```
//! use fp8_format::{E4M3, slice};
//!
//! let x = [0.1_f32, -0.75, 2.0, 0.0];
//! let scale = 448.0 / 2.0; // maps the largest |x| to the largest code
//! let mut codes = [E4M3::ZERO; 4];
//! let amax = slice::quantize(&x, scale, &mut codes)?;
//! assert_eq!(amax, 2.0);
//! assert_eq!(codes.map(E4M3::to_f32), [22.0, -160.0, 448.0, 0.0]); // from 22.4, -168 (a tie), 448, 0
//!
//! let mut back = [0.0_f32; 4];
//! slice::dequantize(&codes, 1.0 / scale, &mut back)?;
//! assert_eq!(back, [0.098_214_29, -0.714_285_73, 2.0, 0.0]);
//! # Ok::<(), fp8_format::Error>(())
//! ```

mod blocks;
mod codec;
mod convert;
mod nvfp4;
mod quantize;
mod stochastic;
mod transpose;

pub use blocks::{
    BlockOutput, BlockScaling, MxOutput, MxRounding, dequantize_blocks, dequantize_mx, quantize_blocks,
    quantize_blocks_transpose, quantize_mx, quantize_mx_transpose,
};
pub use codec::Codec;
pub use convert::{
    from_bf16, from_bf16_saturating, from_f16, from_f16_saturating, from_f32, from_f32_saturating, from_f64,
    from_f64_saturating, to_bf16, to_f16, to_f32, to_f64,
};
pub use nvfp4::{
    HADAMARD_SIGNS, Nvfp4Copy, Nvfp4Options, Nvfp4Output, dequantize_nvfp4, hadamard, nvfp4_amax,
    quantize_nvfp4,
};
pub use quantize::{amax, dequantize, quantize};
pub use stochastic::{from_f32_stochastic, quantize_stochastic};
pub use transpose::{quantize_transpose, transpose};

pub use crate::arch::Path;
pub use crate::traits::Source;

use crate::{Error, Result};

#[inline(always)]
fn equal_lengths(op: &'static str, src: usize, dst: usize) -> Result<()> {
    if src == dst { Ok(()) } else { Err(Error::Length { op, src, dst }) }
}

fn expect_matrix(op: &'static str, name: &'static str, rows: usize, cols: usize, len: usize) -> Result<()> {
    match rows.checked_mul(cols) {
        Some(product) if product == len => Ok(()),
        _ => Err(Error::Shape { op, name, len, rows, cols }),
    }
}
