use super::case::{Outcome, cases};
use super::compare::{ensure, equal, refused, same};
use super::data::{FLOATS, Random, SHAPES, normal, specials};
use fp8_kernels::{DType, Device, Result, Tensor, bf16, f16, ops};

cases![
    rounds_once,
    widens_exactly,
    same_dtype_shares,
    between_halves,
    all_pairs_of_all_lengths,
    nan_keeps_its_bits,
    refuses,
];

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

/// Values of all kinds, NaN among them, in each type; the same numbers for each length.
fn anything(len: usize, dtype: DType, device: &Device) -> Result<Tensor> {
    let mut random = Random::new(len as u64);
    let specials = specials();
    let mut value = |i: usize| match i % 3 {
        0 => specials[(random.bits() % specials.len() as u64) as usize],
        1 => f32::from_bits(random.bits() as u32),
        _ => random.normal(),
    };
    let values: Vec<f32> = (0..len).map(&mut value).collect();
    match dtype {
        DType::BF16 => Tensor::from_vec(values.into_iter().map(bf16::from_f32).collect(), [len], device),
        DType::F16 => Tensor::from_vec(values.into_iter().map(f16::from_f32).collect(), [len], device),
        _ => Tensor::from_vec(values, [len], device),
    }
}

/// As `half` does it, which spells out what becomes of a NaN: bf16 is f32's upper half as it is.
fn converted(x: &Tensor, to: DType) -> Result<Vec<u32>> {
    if x.dtype() == to {
        return bits(x);
    }
    let wide: Vec<f32> = match x.dtype() {
        DType::BF16 => {
            x.to_vec::<bf16>()?.iter().map(|v| f32::from_bits(u32::from(v.to_bits()) << 16)).collect()
        }
        DType::F16 => x.to_vec::<f16>()?.iter().map(|v| v.to_f32()).collect(),
        _ => x.to_vec::<f32>()?,
    };
    let narrow = |v: f32| match to {
        DType::BF16 => bf16::from_f32(v).to_bits().into(),
        DType::F16 => f16::from_f32(v).to_bits().into(),
        _ => v.to_bits(),
    };
    Ok(wide.into_iter().map(narrow).collect())
}

fn bits(x: &Tensor) -> Result<Vec<u32>> {
    Ok(match x.dtype() {
        DType::BF16 => x.to_vec::<bf16>()?.iter().map(|v| v.to_bits().into()).collect(),
        DType::F16 => x.to_vec::<f16>()?.iter().map(|v| v.to_bits().into()).collect(),
        _ => x.to_vec::<f32>()?.iter().map(|v| v.to_bits()).collect(),
    })
}

fn check(x: &Tensor, to: DType) -> Outcome {
    let (got, want) = (bits(&ops::cast(x, to)?)?, converted(x, to)?);
    let first = got.iter().zip(&want).position(|(got, want)| got != want);
    ensure(first.is_none() && got.len() == want.len(), || {
        let at = first.unwrap_or_default();
        let (len, from) = (x.numel(), x.dtype());
        format!("{len} of {from} to {to}: at {at}: got {:#x}, want {:#x}", got[at], want[at])
    })
}

fn all_pairs_of_all_lengths(device: &Device) -> Outcome {
    for (from, to) in FLOATS.into_iter().flat_map(|from| FLOATS.map(|to| (from, to))) {
        // The last two: as many as a simulated device's grid takes at once, and more.
        for len in (0..=33).chain([2047, 70_001, 1 << 17, (1 << 17) + 43]) {
            check(&anything(len, from, device)?, to)?;
        }
    }
    Ok(())
}

fn nan_keeps_its_bits(device: &Device) -> Outcome {
    let halves = || (0..=u16::MAX).chain([0x7C01, 0xFC01, 0x7F81, 0x7FFF, 0xFFFF]);
    let len = halves().count();
    let b = Tensor::from_vec(halves().map(bf16::from_bits).collect(), [len], device)?;
    let h = Tensor::from_vec(halves().map(f16::from_bits).collect(), [len], device)?;
    // Every payload that a half can hold, alone and with lower bits.
    let nan = |i: u32| f32::from_bits(0x7F80_0001 | i << 31 | (i >> 1) << 13);
    let f = Tensor::from_vec((0..2051).map(nan).collect(), [2051], device)?;
    for (x, to) in [&b, &h, &f].into_iter().flat_map(|x| FLOATS.map(|to| (x, to))) {
        check(x, to)?;
    }
    // The smallest NaN, and the largest number beside it, at each place of a vector and of a rest.
    for (len, bits) in (1..=17).flat_map(|len| [0x7C01, 0x7C00, 0xFC01].map(|bits| (len, bits))) {
        let x = Tensor::from_vec(vec![f16::from_bits(bits); len], [len], device)?;
        check(&x, DType::F32)?;
        check(&x, DType::BF16)?;
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    let x = Tensor::zeros([2], DType::F32, device)?;
    refused(ops::cast(&x, DType::U8), "cast: the output has dtype u8: expected f32, bf16 or f16")?;
    let ids = Tensor::zeros([2], DType::I32, device)?;
    refused(ops::cast(&ids, DType::F32), "cast: x has dtype i32: expected f32, bf16 or f16")
}
