//! Dropout: `yᵢ = xᵢ / (1 − p)` where element i is kept, 0 where it is dropped.
//!
//! Element i is kept if `rᵢ ≥ ⌊p·2³²⌋`, with `rᵢ` lane `i mod 4` of Philox4x32-10 at counter `offset + ⌊i/4⌋` under the key
//! `seed`: the mask is a function of (key, i), so backward makes it again, on any device and any number of threads.
//! `x` is f32, bf16 or f16 of any shape; the factor `1 / (1 − p)` and the product are f32, rounded once to the type of `x`.

use crate::backend::dispatch;
use crate::{Error, Result, Tensor};

/// Where in the random stream a mask stands. A tensor of n elements uses the counters `offset .. offset + ⌈n/4⌉`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DropoutKey {
    /// The stream.
    pub seed: u64,
    /// The first counter.
    pub offset: u64,
}

/// Drops elements with probability `p`. At `p` = 0 the result shares the storage of `x`.
///
/// # Errors
/// `p` outside `[0, 1)`, a dtype that is not a float.
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

/// The gradient of [`dropout`]'s input: the same mask and factor on `dy`.
///
/// # Errors
/// As [`dropout`].
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
