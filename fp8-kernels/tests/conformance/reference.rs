//! The same bits as the CPU's.

use super::case::Outcome;
use super::compare::{ensure, equal, same};
use fp8_kernels::{DType, Device, Fp8Tensor, Result, Tensor};

/// The result of an operation.
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
            (Got::Fp8(got), Got::Fp8(want)) if want.blocks().is_some() => same_blocks(&what, &got, &want)?,
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

/// The codes and factors of both layouts, which are independent of each other.
pub(super) fn same_blocks(what: &str, got: &Fp8Tensor, want: &Fp8Tensor) -> Outcome {
    equal(what, (got.blocks(), got.columnwise_blocks()), (want.blocks(), want.columnwise_blocks()))?;
    equal(what, (got.encoding(), got.has_hadamard()), (want.encoding(), want.has_hadamard()))?;
    let factors = |x: &Fp8Tensor| -> Result<Vec<f32>> {
        let all = [x.tensor_scale(), x.columnwise_tensor_scale()].into_iter().flatten();
        Ok(all.map(Tensor::to_vec::<f32>).collect::<Result<Vec<_>>>()?.concat())
    };
    same(&format!("{what}: factors of the whole"), &factors(got)?, &factors(want)?, 2)?;
    let layouts = |x: &Fp8Tensor| {
        let rowwise = x.rowwise().cloned().zip(Some(x.scale_inv().clone()));
        [("rowwise", rowwise), ("columnwise", x.columnwise().cloned().zip(x.columnwise_scale_inv().cloned()))]
    };
    for ((name, got), (_, want)) in layouts(got).into_iter().zip(layouts(want)) {
        let (Some((codes, factors)), Some((want_codes, want_factors))) = (&got, &want) else {
            ensure(got.is_none() && want.is_none(), || format!("{what}: {name} exists on one device only"))?;
            continue;
        };
        let cols = want_codes.shape().last_dim();
        same(&format!("{what}: {name} codes"), &codes.to_vec::<u8>()?, &want_codes.to_vec::<u8>()?, cols)?;
        equal(&format!("{what}: {name} grid"), *factors.shape(), *want_factors.shape())?;
        let (what, cols) = (format!("{what}: {name} scale_inv"), want_factors.shape().last_dim());
        if want_factors.dtype() == DType::U8 {
            same(&what, &factors.to_vec::<u8>()?, &want_factors.to_vec::<u8>()?, cols)?;
        } else {
            same(&what, &factors.to_vec::<f32>()?, &want_factors.to_vec::<f32>()?, cols)?;
        }
    }
    Ok(())
}
