//! Reference of `kv_cache`.

use super::Buffer;
use crate::element::Element;
use crate::ops::Heads;
use crate::{Error, Result, Tensor, host};
use std::ops::Range;

pub(crate) fn kv_cache_append(
    cache: &mut Tensor,
    new: Heads<'_>,
    starts: &Tensor,
    lengths: Option<&Tensor>,
    name: &str,
) -> Result<()> {
    let op = "kv_cache_append";
    let places = places(op, cache, new, starts, lengths)?;
    fn copy<T: Element>(
        cache: &mut [T],
        new: &[T],
        heads: Heads<'_>,
        places: &[Range<usize>],
        [capacity, seq]: [usize; 2],
    ) {
        // All heads of a position.
        let width: usize = heads.shape().iter().skip(2).product();
        for (row, place) in places.iter().enumerate() {
            let to = (row * capacity + place.start) * width;
            let positions = cache[to..to + place.len() * width].chunks_exact_mut(width);
            for (i, position) in positions.enumerate() {
                let from = (row * seq + i) * heads.pitch() + heads.first();
                position.copy_from_slice(&new[from..from + width]);
            }
        }
    }
    let sizes = [cache.shape(), new.shape()].map(|shape| shape.get(1).copied().unwrap_or_default());
    match new.tensor().cpu_buffer(op)? {
        Buffer::F32(data) => copy(cache.as_mut_slice(name)?, data, new, &places, sizes),
        Buffer::BF16(data) => copy(cache.as_mut_slice(name)?, data, new, &places, sizes),
        Buffer::F16(data) => copy(cache.as_mut_slice(name)?, data, new, &places, sizes),
        _ => new.tensor().expect_float(op, "new")?,
    }
    Ok(())
}

/// The positions of each batch entry that are written.
fn places(
    op: &'static str,
    cache: &Tensor,
    new: Heads<'_>,
    starts: &Tensor,
    lengths: Option<&Tensor>,
) -> Result<Vec<Range<usize>>> {
    let [capacity, seq] = [cache.shape(), new.shape()].map(|shape| shape.get(1).copied().unwrap_or_default());
    let lengths = lengths.map(Tensor::as_slice::<i32>).transpose()?;
    let place = |(position, &start): (usize, &i32)| {
        let length = match lengths.map(|lengths| lengths[position]) {
            None => seq,
            Some(length) => {
                let of = |length: i32| usize::try_from(length).ok().filter(|&length| length <= seq);
                let (what, value, limit) = ("length", length.into(), seq + 1);
                of(length).ok_or(Error::Index { op, what, value, position, limit })?
            }
        };
        if length == 0 {
            return Ok(0..0);
        }
        let last = i64::from(start) + length as i64 - 1;
        let what = "cache position";
        match usize::try_from(start) {
            Err(_) => Err(Error::Index { op, what, value: start.into(), position, limit: capacity }),
            Ok(start) if start + length <= capacity => Ok(start..start + length),
            Ok(_) => Err(Error::Index { op, what, value: last, position, limit: capacity }),
        }
    };
    host::try_collect(op, starts.as_slice::<i32>()?.iter().enumerate().map(place))
}
