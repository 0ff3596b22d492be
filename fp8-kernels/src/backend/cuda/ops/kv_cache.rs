//! `kv_cache` on a GPU. A position outside the cache is reported by the device's next synchronising call.

use super::split::unit;
use super::{Gpu, Grid, In, Out, kernels};
use crate::ops::Heads;
use crate::{Result, Tensor};

pub(crate) fn kv_cache_append(
    gpu: &Gpu,
    cache: &mut Tensor,
    new: Heads<'_>,
    starts: &Tensor,
    lengths: Option<&Tensor>,
    name: &str,
) -> Result<()> {
    let op = "kv_cache_append";
    let [batch, capacity, seq] = [(cache.shape(), 0), (cache.shape(), 1), (new.shape(), 1)]
        .map(|(shape, dim)| shape.get(dim).copied().unwrap_or(1));
    // All heads of a position, the distance to the next position, and where they begin in one.
    let elements = [new.shape().iter().skip(2).product(), new.pitch(), new.first()];
    let bytes = elements.map(|elements| elements * new.tensor().dtype().size());
    let unit = unit(&bytes);
    let [width, pitch, _] = bytes.map(|bytes| bytes / unit);
    let items = (batch * seq * width) as u64;
    let [batch, capacity, seq, width, pitch] =
        [batch, capacity, seq, width, pitch].map(|number| number as u64);
    let (values, starts) = (new.tensor().cuda(op)?.ptr() + bytes[2] as u64, starts.cuda(op)?);
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
        pitch,
        unit: unit as i32,
        fault: Out::i64(gpu.fault()),
    };
    // SAFETY: `cache` has batch · capacity rows of `width` units and is held by nobody else, `values` batch · seq of
    // them, `pitch` units apart, starts and lengths, if any, `batch` i32 (checked by `ops::kv_cache_append` and
    // `ops::Heads`); positions outside the cache are not written.
    unsafe { kernel.launch(gpu, Grid::strided(gpu, items), &args) }
}
