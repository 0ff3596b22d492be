//! Reference of `grad_norm`.

use super::{lanes, parallel};
use crate::{Device, Result, Tensor};

pub(crate) fn grad_norm(grads: &[&Tensor], device: &Device) -> Result<Tensor> {
    let mut sum = 0.0;
    for grad in grads {
        let data = grad.cpu_f32("grad_norm")?;
        let parts =
            parallel::map_rows(data.len(), 1, |first, last| lanes::sum_of_squares(&data[first..last]));
        sum += parts.iter().sum::<f64>();
    }
    Tensor::scalar(sum.sqrt() as f32, device)
}
