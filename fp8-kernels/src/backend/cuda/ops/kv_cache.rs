//! `kv_cache` on a GPU. A position outside the cache is reported by the device's next synchronising call.

use super::split::unit;
use super::{Gpu, Grid, In, Out, kernels};
use crate::{Result, Tensor};

pub(crate) fn kv_cache_append(
    gpu: &Gpu,
    cache: &mut Tensor,
    new: &Tensor,
    starts: &Tensor,
    lengths: Option<&Tensor>,
    name: &str,
) -> Result<()> {
    let op = "kv_cache_append";
    let [batch, capacity, seq] =
        [(&*cache, 0), (&*cache, 1), (new, 1)].map(|(x, dim)| x.shape().get(dim).copied().unwrap_or(1));
    // All heads of a position.
    let bytes = new.numel() / (batch * seq).max(1) * new.dtype().size();
    let unit = unit(&[bytes]);
    let width = bytes / unit;
    let items = (batch * seq * width) as u64;
    let [batch, capacity, seq, width] = [batch, capacity, seq, width].map(|number| number as u64);
    let (values, starts) = (new.cuda(op)?, starts.cuda(op)?);
    let lengths = lengths.map(|lengths| lengths.cuda(op)).transpose()?;
    let cache = cache.cuda_mut(name)?;
    let kernel = gpu.load(kernels::KV_CACHE_APPEND)?;
    let args = kernels::KvCacheAppend {
        cache: Out::void(cache),
        values: In::void(values),
        starts: In::i32(starts),
        lengths: In::i32(lengths),
        batch,
        capacity,
        seq,
        width,
        unit: unit as i32,
        fault: Out::i64(gpu.fault()),
    };
    // SAFETY: `cache` has batch · capacity rows of `width` units and is held by nobody else, `values` batch · seq of
    // them, starts and lengths, if any, `batch` i32 (checked by `ops::kv_cache_append`); positions outside the cache
    // are not written.
    unsafe { kernel.launch(gpu, Grid::strided(gpu, items), &args) }
}
