//! Appends keys or values to a cache, for generation.

use super::Heads;
use crate::backend::dispatch;
use crate::{DType, Error, Result, Shape, Tensor};

/// Writes the keys or values of new tokens behind those that a cache holds: `cache[b, starts[b] + i] = new[b, i]`.
///
/// `cache` is `[batch, capacity, heads, head_dim]` and is changed in place; `new` is `[batch, seq, heads, head_dim]` and has
/// the cache's dtype, f32, bf16 or f16. It may be [`Heads`] of a larger tensor, such as the output of one projection of queries, keys and
/// values, from where they are copied. `starts` is i32 `[batch]`: how many positions of each batch entry are taken. `lengths`
/// is i32 `[batch]`: how many of the `seq` new positions of each entry are real. The others are padding, which is not written.
/// Default: `None`, all are real. `name` identifies the cache in errors.
///
/// # Errors
/// Shapes that do not fit; another dtype; a cache that shares its storage. A position outside the cache, or a length greater
/// than `seq`: on the CPU nothing has changed then. A GPU reports it at the next call that waits, and has written the entries
/// that fit.
///
/// ```
/// use fp8_kernels::{DType, Device, Tensor, ops};
/// let device = Device::cpu();
/// let mut cache = Tensor::zeros([2, 4, 1, 1], DType::F32, &device)?;
/// let new = Tensor::from_vec(vec![1f32, 2.0, 3.0, 4.0], [2, 2, 1, 1], &device)?;
/// let starts = Tensor::from_vec(vec![0, 3], [2], &device)?;
/// let lengths = Tensor::from_vec(vec![2, 1], [2], &device)?; // the second entry has one new token
/// ops::kv_cache_append(&mut cache, &new, &starts, Some(&lengths), "keys")?;
/// assert_eq!(cache.to_vec::<f32>()?, [1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 3.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn kv_cache_append<'a>(
    cache: &mut Tensor,
    new: impl Into<Heads<'a>>,
    starts: &Tensor,
    lengths: Option<&Tensor>,
    name: &str,
) -> Result<()> {
    let (op, new) = ("kv_cache_append", new.into());
    cache.expect_float(op, "cache")?;
    new.tensor().expect_dtype(op, "new", cache.dtype())?;
    cache.device().expect_same(op, new.tensor().device())?;
    let (&[batch, _, heads, head_dim], &[new_batch, _, new_heads, new_dim]) =
        (&**cache.shape(), &**new.shape())
    else {
        let shape = if cache.shape().len() == 4 { *new.shape() } else { *cache.shape() };
        let remedy =
            "a cache is [batch, capacity, heads, head_dim], what is new [batch, seq, heads, head_dim]";
        return Err(Error::Shape { op, shape, remedy: remedy.to_owned() });
    };
    if (batch, heads, head_dim) != (new_batch, new_heads, new_dim) {
        let (lhs, rhs, what) = (*cache.shape(), *new.shape(), "the cache and what is new");
        return Err(Error::Shapes {
            op,
            what,
            lhs,
            rhs,
            remedy: "they differ in the second dimension alone",
        });
    }
    let numbers =
        [("starts", "starts and the batch", Some(starts)), ("lengths", "lengths and the batch", lengths)];
    for (name, what, numbers) in numbers {
        let Some(numbers) = numbers else { continue };
        numbers.expect_dtype(op, name, DType::I32)?;
        cache.device().expect_same(op, numbers.device())?;
        let (lhs, rhs) = (*numbers.shape(), Shape::from([batch]));
        if lhs != rhs {
            return Err(Error::Shapes { op, what, lhs, rhs, remedy: "give one number per batch entry" });
        }
    }
    if new.shape().numel() == 0 {
        return Ok(());
    }
    dispatch!(cache.device(), kv_cache::kv_cache_append(cache, new, starts, lengths, name))
}
