//! Reference of `attention_fp8`: [`attention`](super::attention) of the dequantized tensors, whose blocks of probabilities and of
//! the scores' gradients are rounded to what FP8 codes hold before they are multiplied.

use super::attention;
use crate::ops::{self, AttentionGrads, AttentionSaved, BackwardCall, Call, Problem};
use crate::{DType, Encoding, Fp8Tensor, Result, Tensor};

pub(crate) fn attention_fp8(call: &Call<'_, Fp8Tensor>, dtype: DType) -> Result<(Tensor, AttentionSaved)> {
    let problem = Problem { rounding: Some(Encoding::E4M3), ..call.problem };
    let values = call.values()?;
    let (o, saved) = attention::attention(&Call { problem, ..call.of(&values) })?;
    Ok((ops::cast(&o, dtype)?, saved))
}

pub(crate) fn attention_fp8_backward(call: &BackwardCall<'_, Fp8Tensor>) -> Result<AttentionGrads> {
    let BackwardCall { ref forward, dy, o, saved, layout } = *call;
    let problem = Problem { rounding: Some(dy.encoding()), ..forward.problem };
    let (values, dy) = (forward.values()?, dy.dequantize(DType::F32)?);
    let forward = Call { problem, ..forward.of(&values) };
    let grads = attention::attention_backward(&BackwardCall { forward, dy: &dy, o, saved, layout })?;
    grads.map(|x| ops::cast(x, o.dtype()))
}
