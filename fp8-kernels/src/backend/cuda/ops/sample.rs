//! `sample` on a GPU: a block for each row.

use super::{Buffer, Gpu, Grid, In, Out, dropout, dtype_number, kernels};
use crate::ops::Sampling;
use crate::{DType, DropoutDraw, Result, Shape, Tensor};

pub(crate) fn sample(
    gpu: &Gpu,
    logits: &Tensor,
    shape: Shape,
    sampling: Option<(&Sampling, &DropoutDraw)>,
) -> Result<Tensor> {
    let op = "sample";
    let ([rows, vocabulary], values) = (logits.shape().matrix(), logits.cuda(op)?);
    let [rows, vocabulary] = [rows, vocabulary].map(|number| number as u64);
    let out = gpu.alloc(DType::I32, shape.numel())?;
    let dtype = dtype_number(logits.dtype());
    let threads = vocabulary.div_ceil(4).next_multiple_of(32).clamp(32, 512) as u32;
    let grid = Grid { blocks: gpu.blocks(rows, 1, 4), threads, shared: 0 };
    match sampling {
        None => {
            let kernel = gpu.load(kernels::SAMPLE_LARGEST)?;
            let args = kernels::SampleLargest {
                logits: In::void(values),
                dtype,
                rows,
                vocabulary,
                out: Out::i32(&out),
            };
            // SAFETY: rows · vocabulary elements of that type and one i32 a row.
            unsafe { kernel.launch(gpu, grid, &args) }?;
        }
        Some((sampling, draw)) => {
            let key: Buffer = dropout::key(gpu, op, draw)?;
            // Without a limit all of the vocabulary, and no share.
            let top_k = sampling.top_k.map_or(0, u64::from);
            let (has_top_p, top_p) = sampling.top_p.map_or((0, 0), |p| (1, p));
            let (factor, first) = (sampling.factor, draw.first);
            let kernel = gpu.load(kernels::SAMPLE)?;
            let args = kernels::Sample {
                logits: In::void(values),
                dtype,
                rows,
                vocabulary,
                factor,
                top_k,
                has_top_p,
                top_p,
                key: In::dropout_key(&key),
                first,
                out: Out::i32(&out),
            };
            // SAFETY: as above, with top_k less than the vocabulary (checked by `ops::sample`), and two u64 of the
            // key, freed behind the launch.
            unsafe { kernel.launch(gpu, grid, &args) }?;
        }
    }
    Ok(Tensor::from_cuda(out, shape, logits.device()))
}
