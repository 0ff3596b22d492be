//! Reference of `grad_norm`.

use super::{lanes, parallel};
use crate::{Device, Result, Tensor};

pub(crate) fn grad_norm(grads: &[&Tensor], device: &Device) -> Result<Tensor> {
    let sum_of_squares = |grad: &&Tensor| -> Result<f64> {
        let data = grad.cpu_f32("grad_norm")?;
        let parts =
            parallel::map_rows(data.len(), 1, |first, last| lanes::sum_of_squares(&data[first..last]));
        Ok(parts.iter().sum())
    };
    let sums = parallel::map(grads.iter(), sum_of_squares).into_iter().collect::<Result<Vec<f64>>>()?;
    // In the order of the tensors.
    let sum = sums.into_iter().fold(0.0, |sum, part| sum + part);
    Tensor::scalar(sum.sqrt() as f32, device)
}
