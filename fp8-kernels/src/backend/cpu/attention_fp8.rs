//! Reference of `attention_fp8`: [`attention`](super::attention) of the dequantized tensors, whose blocks of probabilities and of
//! the scores' gradients are rounded to what FP8 codes hold before they are multiplied.

use super::attention;
use crate::ops::{self, AttentionSaved, Problem, Sequences};
use crate::{DType, Encoding, Fp8Tensor, Result, Tensor};

pub(crate) fn attention_fp8(
    tensors: [&Fp8Tensor; 3],
    dtype: DType,
    sequences: &Sequences,
    p: &Problem<'_>,
) -> Result<(Tensor, AttentionSaved)> {
    let [q, k, v] = tensors.map(|x| x.dequantize(DType::F32));
    let p = Problem { rounding: Some(Encoding::E4M3), ..*p };
    let (o, saved) = attention::attention(&q?, &k?, &v?, sequences, &p)?;
    Ok((ops::cast(&o, dtype)?, saved))
}

pub(crate) fn attention_fp8_backward(
    tensors: [&Fp8Tensor; 4],
    o: &Tensor,
    saved: &AttentionSaved,
    sequences: &Sequences,
    p: &Problem<'_>,
) -> Result<(Tensor, Tensor, Tensor)> {
    let p = Problem { rounding: Some(tensors[0].encoding()), ..*p };
    let [dy, q, k, v] = tensors.map(|x| x.dequantize(DType::F32));
    let tensors = [&dy?, &q?, &k?, &v?, o];
    let (dq, dk, dv) = attention::attention_backward(tensors, saved, sequences, &p)?;
    let cast = |x: &Tensor| ops::cast(x, o.dtype());
    Ok((cast(&dq)?, cast(&dk)?, cast(&dv)?))
}
