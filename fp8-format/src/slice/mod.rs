//! Whole slices: the conversions of one value over many, quantization with a scale, transposition.
//!
//! Every function gives, element for element, the bits of the scalar conversion it is named after, on every [`Path`]; the
//! functions are those of [`Codec::new`]. Sources and destinations have equal lengths, or the call is an [`Error`] and nothing
//! is written. Time is linear in the elements. No memory is allocated on the calling thread; [`Codec::quantize_transpose`] of a
//! large matrix takes 64 KiB of its stack. With [`Codec`]'s `parallel` rayon allocates for its tasks, and `transpose` the list
//! of the pieces of columns that each has.
//!
//! ```
//! use fp8_format::{E4M3, slice};
//!
//! let x = [0.1_f32, -0.75, 2.0, 0.0];
//! let scale = 448.0 / 2.0; // the largest |x| lands on the largest code
//! let mut codes = [E4M3::ZERO; 4];
//! let amax = slice::quantize(&x, scale, &mut codes)?;
//! assert_eq!(amax, 2.0);
//! assert_eq!(codes.map(E4M3::to_f32), [22.0, -160.0, 448.0, 0.0]); // of 22.4, -168 (a tie), 448, 0
//!
//! let mut back = [0.0_f32; 4];
//! slice::dequantize(&codes, 1.0 / scale, &mut back)?;
//! assert_eq!(back, [0.098_214_29, -0.714_285_73, 2.0, 0.0]);
//! # Ok::<(), fp8_format::Error>(())
//! ```

mod codec;
mod convert;
mod quantize;
mod stochastic;
mod transpose;

pub use codec::Codec;
pub use convert::{
    from_bf16, from_bf16_saturating, from_f16, from_f16_saturating, from_f32, from_f32_saturating, from_f64,
    from_f64_saturating, to_bf16, to_f16, to_f32, to_f64,
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
