//! Reference of `amax`.

use super::{Buffer, quantize};
use crate::{Result, Tensor};

pub(crate) fn amax(x: &Tensor) -> Result<Tensor> {
    let amax = match x.cpu_buffer("amax")? {
        Buffer::F32(data) => quantize::amax(data.as_slice()),
        Buffer::BF16(data) => quantize::amax(data.as_slice()),
        Buffer::F16(data) => quantize::amax(data.as_slice()),
        _ => return x.expect_float("amax", "x").map(|()| x.clone()),
    };
    Tensor::scalar(amax, x.device())
}
