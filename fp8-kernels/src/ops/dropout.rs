//! Dropout with masks that are a function of a key and the element's index.

use crate::backend::dispatch;
use crate::{Error, Result, Tensor};

/// Selects the random numbers of a [`dropout`](dropout()) mask.
///
/// A tensor of n elements uses the counters `offset .. offset + ⌈n/4⌉` of the stream `seed`. Advance `offset` past them, or
/// change the seed, to get an independent mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DropoutKey {
    /// The stream: the key of the generator.
    pub seed: u64,
    /// The first counter.
    pub offset: u64,
}

/// Drops elements with probability `p`: `yᵢ = xᵢ / (1 − p)` for the elements that are kept, and 0 for the others.
///
/// Element i is kept if `rᵢ ≥ ⌊p·2³²⌋`, where `rᵢ` is lane `i mod 4` of Philox4x32-10 at counter `offset + ⌊i/4⌋` under the
/// key `seed`. So the mask depends on the key and i alone: it is the same on every device, and [`dropout_backward`] computes
/// it again instead of storing it. `x` is f32, bf16 or f16 of any shape; the factor and the product are f32, rounded once to
/// the dtype of `x`. If `p` is 0, the result shares the storage of `x`.
///
/// # Errors
/// `p` outside `[0, 1)`; a dtype that is not a float; on a GPU, a step that is being recorded in a graph, since every replay
/// would use the same mask.
///
/// ```
/// use fp8_kernels::{DType, Device, Tensor, ops};
/// let x = Tensor::full(1.0, [4, 1000], DType::F32, &Device::cpu())?;
/// let y = ops::dropout(&x, 0.5, ops::DropoutKey { seed: 1, offset: 0 })?.to_vec::<f32>()?;
/// assert!(y.iter().all(|&v| v == 0.0 || v == 2.0));
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn dropout(x: &Tensor, p: f32, key: DropoutKey) -> Result<Tensor> {
    run("dropout", "x", x, p, key)
}

/// Returns the gradient of [`dropout`](dropout())'s input: `dy` with the same mask and factor.
///
/// # Errors
/// Those of [`dropout`](dropout()).
///
/// ```
/// use fp8_kernels::{DType, Device, Tensor, ops};
/// let key = ops::DropoutKey { seed: 1, offset: 0 };
/// let x = Tensor::full(1.0, [100], DType::F32, &Device::cpu())?;
/// let y = ops::dropout(&x, 0.5, key)?.to_vec::<f32>()?;
/// let dy = Tensor::full(3.0, [100], DType::F32, &Device::cpu())?;
/// let dx = ops::dropout_backward(&dy, 0.5, key)?.to_vec::<f32>()?;
/// assert!(y.iter().zip(&dx).all(|(y, dx)| *dx == 3.0 * y));
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn dropout_backward(dy: &Tensor, p: f32, key: DropoutKey) -> Result<Tensor> {
    run("dropout_backward", "dy", dy, p, key)
}

fn run(op: &'static str, what: &'static str, x: &Tensor, p: f32, key: DropoutKey) -> Result<Tensor> {
    x.expect_float(op, what)?;
    if !(0.0..1.0).contains(&p) {
        let remedy = "a drop probability is at least 0 and less than 1".to_owned();
        return Err(Error::Option { op, option: "p", value: p.to_string(), remedy });
    }
    if p == 0.0 {
        return Ok(x.clone());
    }
    dispatch!(x.device(), dropout::dropout(x, p, key))
}
