//! `scale_from_amax` on a GPU, by the kernel that makes a first scale (`quantize.cu`).

use super::rule::RuleArgs;
use super::slot::launch_scale;
use super::{Gpu, Known};
use crate::backend::cpu::scale_from_amax::scale_from_amax as on_host;
use crate::{Cell, DType, Result, ScaleRule, Tensor};

pub(crate) fn scale_from_amax(gpu: &Gpu, amax: &Tensor, rule: &ScaleRule) -> Result<Cell> {
    let op = "scale_from_amax";
    let Some(rule) = RuleArgs::new(rule) else {
        gpu.expect_eager(op, "a user's scale policy runs on the host: use a named rule")?;
        return on_host(amax, rule);
    };
    let scale = gpu.alloc(DType::F32, 1)?;
    launch_scale(gpu, [0, amax.cuda(op)?.ptr()], false, rule, scale.ptr())?;
    Ok(Cell::from_cuda(scale, Known::new(gpu, 1, 1.0)?, amax.device()))
}
