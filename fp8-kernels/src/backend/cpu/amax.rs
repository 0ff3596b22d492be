//! Reference of `amax`.

use super::{Buffer, quantize};
use crate::{Result, Tensor};

pub(crate) fn amax(x: &Tensor) -> Result<Tensor> {
    let amax = match x.cpu_buffer("amax")? {
        Buffer::F32(data) => quantize::amax(&data[..]),
        Buffer::BF16(data) => quantize::amax(&data[..]),
        Buffer::F16(data) => quantize::amax(&data[..]),
        _ => return x.expect_float("amax", "x").map(|()| x.clone()),
    };
    Tensor::scalar(amax, x.device())
}
