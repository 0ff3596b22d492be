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
    nan_is_one_in_16_bits_and_keeps_its_bits_in_f32,
    rounds_as_a_table_says,
    refuses,
];

/// Values of every exponent, ties among them.
fn values() -> Vec<f32> {
    let mut random = Random::new(5);
    let anything = (0..40_000).map(|_| f32::from_bits(random.bits() as u32)).filter(|v| !v.is_nan());
    let mut values: Vec<f32> = anything.collect();
    values.extend((0..2_000u32).map(|i| f32::from_bits(0x3F80_0000 + (i << 11))));
    values.extend((0..2_000u32).map(|i| f32::from_bits(0x3380_0000 + (i << 14))));
    values.extend(specials().into_iter().filter(|v| !v.is_nan()));
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

/// As `half` does it, but for NaN: in 16 bits it is 0x7FFF, and in f32 it keeps its sign and payload.
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
        DType::BF16 | DType::F16 if v.is_nan() => 0x7FFF,
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

fn nan_is_one_in_16_bits_and_keeps_its_bits_in_f32(device: &Device) -> Outcome {
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

/// Bits of f32, and of bf16 and f16 as the formats' definitions give them.
const ROUNDED: [(u32, u16, u16); 28] = [
    // NaN: quiet, signalling, all ones, both signs.
    (0x7FC0_0000, 0x7FFF, 0x7FFF),
    (0xFFC0_0000, 0x7FFF, 0x7FFF),
    (0x7F80_0001, 0x7FFF, 0x7FFF),
    (0xFF80_0001, 0x7FFF, 0x7FFF),
    (0x7FFF_FFFF, 0x7FFF, 0x7FFF),
    (0xFFFF_FFFF, 0x7FFF, 0x7FFF),
    (0x7FC1_2345, 0x7FFF, 0x7FFF),
    // Infinities; the largest f32, which overflows both.
    (0x7F80_0000, 0x7F80, 0x7C00),
    (0xFF80_0000, 0xFF80, 0xFC00),
    (0x7F7F_FFFF, 0x7F80, 0x7C00),
    (0xFF7F_FFFF, 0xFF80, 0xFC00),
    // The largest bf16, the tie above it, and the number below the tie.
    (0x7F7F_0000, 0x7F7F, 0x7C00),
    (0x7F7F_8000, 0x7F80, 0x7C00),
    (0x7F7F_7FFF, 0x7F7F, 0x7C00),
    // 65504, the largest f16; 65520, the tie above it; the number below the tie.
    (0x477F_E000, 0x4780, 0x7BFF),
    (0x477F_F000, 0x4780, 0x7C00),
    (0x477F_EFFF, 0x4780, 0x7BFF),
    // 1 + 2⁻⁸ and 1 + 3 · 2⁻⁸, ties of bf16; 1 + 2⁻¹¹ and 1 + 3 · 2⁻¹¹, ties of f16; and one more than a tie.
    (0x3F80_8000, 0x3F80, 0x3C04),
    (0x3F81_8000, 0x3F82, 0x3C0C),
    (0x3F80_1000, 0x3F80, 0x3C00),
    (0x3F80_3000, 0x3F80, 0x3C02),
    (0x3F80_8001, 0x3F81, 0x3C04),
    (0xBF80_1001, 0xBF80, 0xBC01),
    // Subnormals: of f16, of both, the smallest, and zeros.
    (0x3380_0000, 0x3380, 0x0001),
    (0xB300_0000, 0xB300, 0x8000),
    (0x0000_8000, 0x0000, 0x0000),
    (0x8001_8000, 0x8002, 0x8000),
    (0x8000_0000, 0x8000, 0x8000),
];

/// A value of the table at each place of vectors and of rests, also by operations that are no casts.
fn rounds_as_a_table_says(device: &Device) -> Outcome {
    for start in 0..9 {
        let rows: Vec<_> = ROUNDED.into_iter().cycle().skip(start).take(ROUNDED.len() + start).collect();
        let len = rows.len();
        let x = Tensor::from_vec(rows.iter().map(|row| f32::from_bits(row.0)).collect(), [len], device)?;
        let b: Vec<bf16> = rows.iter().map(|row| bf16::from_bits(row.1)).collect();
        let h: Vec<f16> = rows.iter().map(|row| f16::from_bits(row.2)).collect();
        same("bf16", &ops::cast(&x, DType::BF16)?.to_vec::<bf16>()?, &b, 1)?;
        same("f16", &ops::cast(&x, DType::F16)?.to_vec::<f16>()?, &h, 1)?;
        // Sums with -0 change no number.
        let zeros = Tensor::full(-0.0, [len], DType::BF16, device)?;
        same("bf16 sums", &ops::add(&zeros, &x)?.to_vec::<bf16>()?, &b, 1)?;
        let zeros = Tensor::full(-0.0, [len], DType::F16, device)?;
        same("f16 sums", &ops::add(&zeros, &x)?.to_vec::<f16>()?, &h, 1)?;
        // Multiplied in place: NaN of each payload becomes one.
        for dtype in [DType::BF16, DType::F16] {
            let nan = |i: usize| 0x7F81 | (i as u16 & 0x7E) | (i as u16 & 1) << 15;
            let mut x = match dtype {
                DType::BF16 => {
                    Tensor::from_vec((0..len).map(|i| bf16::from_bits(nan(i))).collect(), [len], device)?
                }
                _ => Tensor::from_vec((0..len).map(|i| f16::from_bits(nan(i))).collect(), [len], device)?,
            };
            ops::scale_in_place(&mut x, 0.5, "x")?;
            let first = bits(&x)?.into_iter().find(|&bits| bits != 0x7FFF);
            equal(&format!("{dtype} in place"), first, None)?;
        }
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    let x = Tensor::zeros([2], DType::F32, device)?;
    refused(ops::cast(&x, DType::U8), "cast: the output has dtype u8: expected f32, bf16 or f16")?;
    let ids = Tensor::zeros([2], DType::I32, device)?;
    refused(ops::cast(&ids, DType::F32), "cast: x has dtype i32: expected f32, bf16 or f16")
}
