//! The paths: one file for each set of instructions, with the same functions in every file.
//!
//! | function | |
//! |---|---|
//! | `encode`, `decode` | conversion |
//! | `quantize`, `dequantize`, `stochastic` | conversion with a scale |
//! | `amax` | the largest magnitude |
//! | `amaxes`, `amax_columns` | the largest magnitudes of blocks in a row, and of columns |
//! | `scales`, `mx_scales` | the scales of blocks from these |
//! | `quantize_rows` | the largest magnitudes of blocks in a row, and their conversion |
//! | `quantize_row` | the largest magnitude of a row, and its conversion |
//! | `quantize_tiles` | the same for tiles, in one row of them |
//! | `quantize_blocks`, `quantize_columns`, `dequantize_blocks` | conversion with a scale for each block, or column |
//! | `fp4_peaks`, `fp4_scales`, `fp4_words`, `fp4_codes`, `fp4_values` | blocks of E2M1: largest magnitudes, scales, random bytes, conversion, and back |
//! | `transpose` | a tile of codes |
//! | `copy`, `fetch`, `fence` | codes as they are; elements to come; the end of streamed stores by `copy` and `transpose` |
//!
//! Slices of one call are equally long; `streams` asks for stores that go past the caches. All paths give the same bits.
#![allow(unsafe_code, reason = "vectors are loaded and stored through pointers; see each SAFETY line")]

#[cfg(all(target_arch = "x86_64", feature = "std"))]
pub(crate) mod avx2;
#[cfg(all(target_arch = "x86_64", feature = "std"))]
pub(crate) mod avx512;
pub(crate) mod blocks;
#[cfg(feature = "std")]
mod cache;
#[cfg(feature = "std")]
mod interleave;
#[cfg(all(target_arch = "aarch64", feature = "std"))]
pub(crate) mod neon;
mod path;
pub(crate) mod scalar;
mod scale;
mod target;
mod tile;

use crate::philox::{BlockRandom, Philox};
use crate::traits::{Fp8, Source};
use crate::{E4M3, E8M0, TensorScale};
use blocks::{F32Rule, MxRule, Rule};
#[cfg(feature = "std")]
pub(crate) use cache::last_level;
#[cfg(all(target_arch = "x86_64", feature = "std"))]
use cache::needs_prefetch;
pub(crate) use path::Kind;
pub use path::Path;
pub(crate) use scalar::{FP4_BLOCK, Peak};
pub(crate) use scale::Scale;
pub(crate) use target::{Overflowing, Saturating, Target};
pub(crate) use tile::TILE;

impl Scale {
    /// For `len` elements in all.
    pub(crate) fn new<S: Source, T: Target>(path: Path, value: f32, len: usize) -> Self {
        #[cfg(all(target_arch = "x86_64", feature = "std"))]
        if let Kind::Avx512 = path.0 {
            // SAFETY: the CPU has this path's instructions.
            let products = unsafe { avx512::product_tables::<S, T>(value, len) };
            return Self { value, products };
        }
        // What only that path asks for.
        let _ = (path, len, S::KIND, T::TOP);
        Self {
            value,
            #[cfg(all(target_arch = "x86_64", feature = "std"))]
            products: None,
        }
    }
}

/// Functions that call the path's function of the same name.
macro_rules! dispatch {
    ($(fn $name:ident<$($generic:ident: $bound:path),*>($($arg:ident: $type:ty),*) $(-> $out:ty)?;)*) => {$(
        #[inline]
        pub(crate) fn $name<$($generic: $bound),*>(path: Path, $($arg: $type),*) $(-> $out)? {
            match path.0 {
                Kind::Scalar => scalar::$name::<$($generic),*>($($arg),*),
                // SAFETY: a `Path` of this kind exists only where the CPU has its instructions.
                #[cfg(all(target_arch = "x86_64", feature = "std"))]
                Kind::Avx2 => unsafe { avx2::$name::<$($generic),*>($($arg),*) },
                // SAFETY: as above.
                #[cfg(all(target_arch = "x86_64", feature = "std"))]
                Kind::Avx512 => unsafe { avx512::$name::<$($generic),*>($($arg),*) },
                // SAFETY: as above.
                #[cfg(all(target_arch = "aarch64", feature = "std"))]
                Kind::Neon => unsafe { neon::$name::<$($generic),*>($($arg),*) },
            }
        }
    )*};
}

dispatch! {
    fn encode<S: Source, T: Target>(src: &[S], dst: &mut [u8], streams: bool);
    fn quantize<S: Source, T: Target>(src: &[S], scale: &Scale, dst: &mut [u8], streams: bool) -> f32;
    fn stochastic<S: Source, T: Target>(src: &[S], scale: f32, random: Philox, dst: &mut [u8]);
    fn amax<S: Source>(src: &[S]) -> f32;
    fn amaxes<S: Source>(src: &[S], block: usize, amaxes: &mut [f32]);
    fn amax_columns<S: Source>(src: &[S], amaxes: &mut [f32]);
    fn scales<>(rule: &F32Rule, amaxes: &[f32], scales: &mut [f32], scale_inv: &mut [f32]);
    fn mx_scales<>(rule: MxRule, amaxes: &[f32], factors: &mut [f32], scales: &mut [E8M0]);
    fn quantize_blocks<S: Source, T: Target>(src: &[S], block: usize, scales: &[f32], dst: &mut [u8], streams: bool);
    fn quantize_rows<S: Source, T: Target>(src: &[S], block: usize, rule: &Rule, amaxes: &mut [f32], dst: &mut [u8], streams: bool);
    fn quantize_row<S: Source, T: Target>(src: &[S], rule: &Rule, dst: &mut [u8], streams: bool) -> f32;
    fn quantize_tiles<S: Source, T: Target>(src: &[S], shape: [usize; 3], rule: &Rule, amaxes: &mut [f32], dst: &mut [u8], streams: bool);
    fn quantize_columns<S: Source, T: Target>(src: &[S], scales: &[f32], dst: &mut [u8]);
    fn dequantize_blocks<T: Target, D: Source>(src: &[u8], block: usize, scale_inv: &[f32], dst: &mut [D], streams: bool);
    fn fp4_peaks<S: Source>(src: &[S], peaks: &mut [Peak]);
    fn fp4_scales<>(tensor: TensorScale, peaks: &[Peak], factors: &mut [f32], scales: &mut [E4M3]);
    fn fp4_codes<S: Source>(src: &[S], factors: &[f32], words: Option<&[[u32; 4]]>, dst: &mut [u8]);
    fn fp4_words<>(random: BlockRandom, step: u64, words: &mut [[u32; 4]]);
    fn fp4_values<D: Source>(src: &[u8], scales: &[E4M3], decode: f32, dst: &mut [D]);
    fn decode<T: Target, D: Source>(src: &[u8], dst: &mut [D], streams: bool);
    fn dequantize<T: Target, D: Source>(src: &[u8], scale_inv: f32, dst: &mut [D], streams: bool);
    fn transpose<>(src: &[u8], src_stride: usize, dst: &mut [u8], stride: usize, streams: bool);
    fn copy<>(src: &[u8], dst: &mut [u8], streams: bool);
    fn fetch<S: Source>(src: &[S]);
    fn fence<>();
}

/// Codes as bytes.
pub(crate) fn bytes<T: Fp8>(codes: &[T]) -> &[u8] {
    // SAFETY: `Fp8` is sealed; its types are transparent wrappers of a u8, each value of which is valid.
    unsafe { core::slice::from_raw_parts(codes.as_ptr().cast(), codes.len()) }
}

pub(crate) fn bytes_mut<T: Fp8>(codes: &mut [T]) -> &mut [u8] {
    // SAFETY: as above; the slice is borrowed uniquely.
    unsafe { core::slice::from_raw_parts_mut(codes.as_mut_ptr().cast(), codes.len()) }
}
