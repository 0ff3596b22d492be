use super::case::{Outcome, cases};
use super::compare::{equal, refused, same};
use super::data::{FLOATS, Random, SHAPES, normal, specials};
use fp8_kernels::{DType, Device, Tensor, bf16, f16, ops};

cases![rounds_once, widens_exactly, same_dtype_shares, between_halves, refuses];

/// Values of every exponent, ties among them.
fn values() -> Vec<f32> {
    let mut random = Random::new(5);
    let anything = (0..40_000).map(|_| f32::from_bits(random.bits() as u32)).filter(|v| !v.is_nan());
    let mut values: Vec<f32> = anything.collect();
    values.extend((0..2_000u32).map(|i| f32::from_bits(0x3F80_0000 + (i << 11))));
    values.extend((0..2_000u32).map(|i| f32::from_bits(0x3380_0000 + (i << 14))));
    values.extend(specials());
    values
}

fn rounds_once(device: &Device) -> Outcome {
    let values = values();
    let x = Tensor::from_vec(values.clone(), [values.len()], device)?;
    let want: Vec<bf16> = values.iter().map(|&v| bf16::from_f32(v)).collect();
    same("bf16", &ops::cast(&x, DType::BF16)?.to_vec::<bf16>()?, &want, 1)?;
    let want: Vec<f16> = values.iter().map(|&v| f16::from_f32(v)).collect();
    same("f16", &ops::cast(&x, DType::F16)?.to_vec::<f16>()?, &want, 1)
}

fn widens_exactly(device: &Device) -> Outcome {
    let all = || 0..=u16::MAX;
    let halves = all().map(bf16::from_bits).filter(|v| !v.is_nan()).collect::<Vec<_>>();
    let want: Vec<f32> = halves.iter().map(|v| v.to_f32()).collect();
    let x = Tensor::from_vec(halves, [want.len()], device)?;
    same("bf16", &ops::cast(&x, DType::F32)?.to_vec::<f32>()?, &want, 1)?;
    let halves = all().map(f16::from_bits).filter(|v| !v.is_nan()).collect::<Vec<_>>();
    let want: Vec<f32> = halves.iter().map(|v| v.to_f32()).collect();
    let x = Tensor::from_vec(halves, [want.len()], device)?;
    same("f16", &ops::cast(&x, DType::F32)?.to_vec::<f32>()?, &want, 1)
}

fn same_dtype_shares(device: &Device) -> Outcome {
    for dtype in FLOATS {
        let x = normal([3, 4], dtype, 1, device)?;
        let y = ops::cast(&x, dtype)?;
        equal("other holders", y.holders(), 1)?;
    }
    Ok(())
}

fn between_halves(device: &Device) -> Outcome {
    for shape in SHAPES {
        let x = normal(shape, DType::F16, 1, device)?;
        let y = ops::cast(&x, DType::BF16)?;
        let want: Vec<bf16> = x.to_f32_vec()?.into_iter().map(bf16::from_f32).collect();
        equal("shape", y.shape(), x.shape())?;
        same("f16 to bf16", &y.to_vec::<bf16>()?, &want, shape[1])?;
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    let x = Tensor::zeros([2], DType::F32, device)?;
    refused(ops::cast(&x, DType::U8), "cast: the output has dtype u8: expected f32, bf16 or f16")?;
    let ids = Tensor::zeros([2], DType::I32, device)?;
    refused(ops::cast(&ids, DType::F32), "cast: x has dtype i32: expected f32, bf16 or f16")
}
