//! The same bits as the CPU's.

use super::case::Outcome;
use super::compare::{ensure, same};
use fp8_kernels::{Device, Fp8Tensor, Result, Tensor};

/// What an operation gave.
pub(crate) enum Got {
    Tensor(Tensor),
    Fp8(Box<Fp8Tensor>),
    /// Amaxes, scales, counts.
    Numbers(Vec<f32>),
}

impl From<Fp8Tensor> for Got {
    fn from(codes: Fp8Tensor) -> Self {
        Self::Fp8(Box::new(codes))
    }
}

/// `run` gives the same bits on `device` as on the CPU.
pub(crate) fn same_as_cpu(what: &str, device: &Device, run: impl Fn(&Device) -> Result<Vec<Got>>) -> Outcome {
    let cpu = Device::cpu().with_transpose_policy(device.transpose_policy());
    same_results(what, run(device)?, run(&cpu)?)
}

/// The same kinds of results with the same bits.
pub(crate) fn same_results(what: &str, got: Vec<Got>, want: Vec<Got>) -> Outcome {
    ensure(got.len() == want.len(), || format!("{what}: {} results, want {}", got.len(), want.len()))?;
    for (i, pair) in got.into_iter().zip(want).enumerate() {
        let what = format!("{what}, result {i}");
        match pair {
            (Got::Tensor(got), Got::Tensor(want)) => {
                same(&what, &got.to_f32_vec()?, &want.to_f32_vec()?, want.shape().last_dim())?;
            }
            (Got::Fp8(got), Got::Fp8(want)) => {
                let [rows, cols] = want.matrix();
                same(&format!("{what}: codes"), &got.codes()?, &want.codes()?, cols)?;
                let (turned, wanted) = (got.transposed()?.codes()?, want.transposed()?.codes()?);
                same(&format!("{what}: transposed"), &turned, &wanted, rows)?;
                let factors = [got.scale_inv().item()?, want.scale_inv().item()?];
                same(&format!("{what}: scale_inv"), &factors[..1], &factors[1..], 1)?;
            }
            (Got::Numbers(got), Got::Numbers(want)) => same(&what, &got, &want, want.len())?,
            _ => return Err(format!("{what}: of another kind").into()),
        }
    }
    Ok(())
}
