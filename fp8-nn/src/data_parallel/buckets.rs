//! Gradients in buckets: several are summed by one call, which takes fewer exchanges between the ranks.

use crate::module::trainable;
use crate::{Layer, Result};
use fp8_dist::{Pending, ProcessGroup, ReduceOp};
use fp8_kernels::Tensor;
use std::sync::Arc;

/// The bounds of a bucket whose size is not given.
const LEAST: usize = 1 << 20;
const MOST: usize = 25 << 20;
/// The number of buckets that a model's gradients then fill, within the bounds.
const PARTS: usize = 16;

/// Gradients that are being collected, and buckets of them that are being summed.
#[derive(Debug)]
pub(super) struct Buckets {
    /// A bucket takes gradients up to so many bytes. A larger gradient has one of its own.
    limit: usize,
    bytes: usize,
    open: Vec<(Arc<str>, Tensor)>,
    sums: Vec<Bucket>,
}

/// The gradients of parameters with these names.
#[derive(Debug)]
struct Bucket {
    names: Vec<Arc<str>>,
    sums: Sums,
}

#[derive(Debug)]
enum Sums {
    Pending(Pending),
    Done(Result<Vec<Tensor>>),
}

/// The way in which buckets are summed.
#[derive(Debug, Clone, Copy)]
pub(super) enum Way {
    /// Beside what the caller computes.
    Beside,
    /// While the caller waits, in order with all other work.
    Blocking,
}

impl Buckets {
    /// Buckets of at most `limit` bytes; by default a sixteenth of all gradients of the model, from 1 MiB to 25 MiB.
    pub(super) fn new(model: &(impl Layer + ?Sized), limit: Option<usize>) -> Self {
        let sizes = trainable(model).into_iter().map(|parameter| parameter.shape().numel());
        let all: usize = sizes.sum::<usize>() * size_of::<f32>();
        let limit = limit.unwrap_or_else(|| (all / PARTS).clamp(LEAST, MOST));
        Self { limit, bytes: 0, open: Vec::new(), sums: Vec::new() }
    }

    /// Adds a gradient, and begins to sum a bucket that is full.
    pub(super) fn add(&mut self, name: &Arc<str>, gradient: Tensor, group: &dyn ProcessGroup, way: Way) {
        let bytes = gradient.numel() * size_of::<f32>();
        if self.bytes + bytes > self.limit {
            self.close(group, way);
        }
        self.bytes += bytes;
        self.open.push((name.clone(), gradient));
        if self.bytes >= self.limit {
            self.close(group, way);
        }
    }

    /// Begins to sum the gradients that wait for a bucket to be full.
    pub(super) fn close(&mut self, group: &dyn ProcessGroup, way: Way) {
        self.bytes = 0;
        let (names, mut gradients): (Vec<_>, Vec<_>) = self.open.drain(..).unzip();
        let what = match &*names {
            [] => return,
            [name] => format!("gradient of {name}"),
            [first, .., last] => format!("gradients of {first} to {last}"),
        };
        let sums = match way {
            Way::Beside => Sums::Pending(group.start_all_reduce(&what, gradients, ReduceOp::Sum)),
            Way::Blocking => {
                let summed = group.all_reduce_coalesced(&what, &mut gradients, ReduceOp::Sum);
                Sums::Done(summed.map(|()| gradients).map_err(Into::into))
            }
        };
        self.sums.push(Bucket { names, sums });
    }

    /// Waits for all sums, and returns those that there are and the first error.
    pub(super) fn wait(&mut self) -> (Vec<(Arc<str>, Tensor)>, Result<()>) {
        let (mut all, mut result) = (Vec::new(), Ok(()));
        for Bucket { names, sums } in self.sums.drain(..) {
            let sums = match sums {
                Sums::Pending(pending) => pending.wait().map_err(Into::into),
                Sums::Done(sums) => sums,
            };
            match sums {
                Ok(sums) => all.extend(names.into_iter().zip(sums)),
                Err(error) => result = result.and(Err(error)),
            }
        }
        (all, result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Linear, LinearOptions};
    use fp8_dist::local;
    use fp8_kernels::{DType, Device};
    use std::time::Duration;

    #[test]
    fn buckets_are_closed_at_their_limit_and_large_gradients_are_alone() {
        let group = local("dp", 1, Duration::from_secs(1)).unwrap().remove(0);
        let options = LinearOptions { in_features: 1024, out_features: 4096, ..Default::default() };
        let fc = Linear::new("fc", options, &Device::cpu(), &mut rand::rng()).unwrap();
        assert_eq!(Buckets::new(&fc, None).limit, (4096 * 1024 * 4 + 4096 * 4) / 16);
        let small = LinearOptions { in_features: 1, out_features: 1, ..Default::default() };
        let small = Linear::new("fc", small, &Device::cpu(), &mut rand::rng()).unwrap();
        assert_eq!(Buckets::new(&small, None).limit, LEAST);
        for way in [Way::Beside, Way::Blocking] {
            let mut buckets = Buckets::new(&fc, Some(40));
            for (index, len) in [3, 4, 4, 100, 0, 1, 10, 2].into_iter().enumerate() {
                let gradient = Tensor::zeros([len], DType::F32, &Device::cpu()).unwrap();
                buckets.add(&format!("{index}").into(), gradient, &*group, way);
            }
            buckets.close(&*group, way);
            let names: Vec<String> = buckets.sums.iter().map(|bucket| bucket.names.join(" ")).collect();
            assert_eq!(names, ["0 1", "2", "3", "4 5", "6", "7"]);
            let (sums, result) = buckets.wait();
            assert!(result.is_ok() && sums.len() == 8 && buckets.sums.is_empty());
        }
    }
}
