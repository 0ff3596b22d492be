//! Reference of `kv_cache`.

use super::Buffer;
use crate::element::Element;
use crate::{Error, Result, Tensor, host};
use std::ops::Range;

pub(crate) fn kv_cache_append(
    cache: &mut Tensor,
    new: &Tensor,
    starts: &Tensor,
    lengths: Option<&Tensor>,
    name: &str,
) -> Result<()> {
    let op = "kv_cache_append";
    let places = places(op, cache, new, starts, lengths)?;
    fn copy<T: Element>(cache: &mut [T], new: &[T], places: &[Range<usize>], [capacity, seq]: [usize; 2]) {
        let batch = places.len();
        // All heads of a position.
        let width = new.len() / (batch * seq);
        for (row, place) in places.iter().enumerate() {
            let (to, from) = ((row * capacity + place.start) * width, row * seq * width);
            let len = place.len() * width;
            cache[to..to + len].copy_from_slice(&new[from..from + len]);
        }
    }
    let sizes = [cache, new].map(|x| x.shape().get(1).copied().unwrap_or_default());
    match new.cpu_buffer(op)? {
        Buffer::F32(new) => copy(cache.as_mut_slice(name)?, new, &places, sizes),
        Buffer::BF16(new) => copy(cache.as_mut_slice(name)?, new, &places, sizes),
        Buffer::F16(new) => copy(cache.as_mut_slice(name)?, new, &places, sizes),
        _ => new.expect_float(op, "new")?,
    }
    Ok(())
}

/// The positions of each batch entry that are written.
fn places(
    op: &'static str,
    cache: &Tensor,
    new: &Tensor,
    starts: &Tensor,
    lengths: Option<&Tensor>,
) -> Result<Vec<Range<usize>>> {
    let [capacity, seq] = [cache, new].map(|x| x.shape().get(1).copied().unwrap_or_default());
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
