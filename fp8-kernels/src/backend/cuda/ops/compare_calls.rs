//! `compare_calls` on a GPU: one warp. A difference is told at the next call that waits for the device.

use super::{Gpu, Grid, In, Out, kernels};
use crate::{Result, Tensor};

pub(crate) fn compare_calls(gpu: &Gpu, what: &str, calls: &Tensor, scales: Option<&Tensor>) -> Result<()> {
    let op = "compare_calls";
    let (numbers, ranks) = (calls.cuda(op)?, calls.numel() as u64);
    let scales = scales.map(|scales| scales.cuda(op)).transpose()?;
    if ranks == 0 {
        return Ok(());
    }
    let kernel = gpu.load(kernels::COMPARE_CALLS)?;
    let args = kernels::CompareCalls {
        calls: In::u32(numbers),
        scales: In::u32(scales),
        ranks,
        name: gpu.fault_name(what),
        fault: Out::i64(gpu.fault()),
    };
    // SAFETY: `ranks` i32, as many f32 or null (checked by `ops::compare_calls`).
    unsafe { kernel.launch(gpu, Grid { blocks: 1, threads: 32, shared: 0 }, &args) }
}
