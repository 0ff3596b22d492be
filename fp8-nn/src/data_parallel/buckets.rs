//! Gradients in buckets: small ones are summed together, which takes fewer exchanges between the ranks.

use crate::parameter::Event;
use crate::{Parameter, Result};
use fp8_dist::{ProcessGroup, ReduceOp};
use fp8_kernels::{Device, Tensor};
use std::sync::Arc;

/// A bucket takes gradients up to this many bytes. A larger gradient is summed in place.
const BYTES: usize = 4 << 20;

/// Replaces gradients by their sums over the ranks. Sums are taken element by element, so buckets change no bit of them.
pub(super) fn sum(parameters: Vec<&mut Parameter>, group: &dyn ProcessGroup) -> Result<()> {
    let id: Arc<str> = group.id().into();
    let mut bucket = Bucket::default();
    for parameter in parameters {
        let bytes = parameter.main_grad().numel() * size_of::<f32>();
        // On GPUs, collectives are queued, and a copy would cost more than a call.
        let is_on_gpu = parameter.main_grad().as_slice::<f32>().is_err();
        if bytes > BYTES || is_on_gpu {
            bucket.sum(group, &id)?;
            sum_one(parameter, group, &id)?;
            continue;
        }
        if bucket.bytes + bytes > BYTES {
            bucket.sum(group, &id)?;
        }
        bucket.bytes += bytes;
        bucket.parameters.push(parameter);
    }
    bucket.sum(group, &id)
}

#[derive(Debug, Default)]
struct Bucket<'a> {
    parameters: Vec<&'a mut Parameter>,
    bytes: usize,
}

impl Bucket<'_> {
    /// Sums what the bucket has, and empties it.
    fn sum(&mut self, group: &dyn ProcessGroup, id: &Arc<str>) -> Result<()> {
        self.bytes = 0;
        let mut parameters = std::mem::take(&mut self.parameters);
        let (Some(first), Some(last)) = (parameters.first(), parameters.last()) else { return Ok(()) };
        if parameters.len() == 1 {
            return parameters.into_iter().try_for_each(|parameter| sum_one(parameter, group, id));
        }
        let what = format!("gradients of {} to {}", first.name(), last.name());
        let mut values = Vec::new();
        for parameter in &parameters {
            values.extend_from_slice(parameter.main_grad().as_slice::<f32>()?);
        }
        let len = values.len();
        let mut sums = Tensor::from_vec(values, [len], &Device::cpu())?;
        group.all_reduce_in_place(&what, &mut sums, ReduceOp::Sum)?;
        let mut rest = sums.as_slice::<f32>()?;
        for parameter in &mut parameters {
            let (sums, others) = rest.split_at(parameter.main_grad().numel().min(rest.len()));
            rest = others;
            let name = parameter.name().clone();
            parameter.gradient_mut().change(Event::Summed { group: id.clone() }, |grad| {
                if grad.holders() == 0 {
                    return Ok(grad.write(sums, &name)?);
                }
                *grad = Tensor::from_vec(sums.to_vec(), *grad.shape(), grad.device())?;
                Ok(())
            })?;
        }
        Ok(())
    }
}

/// Sums a gradient in place. One that shares its storage gets new storage.
fn sum_one(parameter: &mut Parameter, group: &dyn ProcessGroup, id: &Arc<str>) -> Result<()> {
    let what = format!("gradient of {}", parameter.name());
    parameter.gradient_mut().change(Event::Summed { group: id.clone() }, |grad| {
        if grad.holders() == 0 {
            group.all_reduce_in_place(&what, grad, ReduceOp::Sum)?;
        } else {
            *grad = group.all_reduce(&what, grad, ReduceOp::Sum)?;
        }
        Ok(())
    })
}
