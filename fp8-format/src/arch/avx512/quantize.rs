//! Quantization with one scale, by its tables or by multiplication.

use super::{products, quantize_products};
use crate::arch::{Scale, Target};
use crate::traits::Source;

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub(crate) fn quantize<S: Source, T: Target>(src: &[S], scale: &Scale, dst: &mut [u8], streams: bool) -> f32 {
    match &scale.products {
        Some(products) => products::quantize::<S, T>(src, products, dst, streams),
        None => quantize_products::<S, T>(src, scale.value, dst, streams),
    }
}
