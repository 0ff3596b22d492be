//! Operations that arithmetic limits: a multiplication with an addition is two.

use crate::result::Result;
use crate::timer::{Bench, Work};
use fp8_nn::fp8_kernels::fp8_format::Encoding::{self, E4M3, E5M2};
use fp8_nn::fp8_kernels::ops::{self, Accumulation, Layout, ScoreOptions, Sequences};
use fp8_nn::fp8_kernels::{DType, Fp8Tensor, Operand, Scale, ScaleRule, Slot, Tensor};

/// The products of a layer of width 4096: name, n, k.
const LINEARS: [(&str, usize, usize); 4] =
    [("qkv", 12288, 4096), ("proj", 4096, 4096), ("fc1", 16384, 4096), ("fc2", 4096, 16384)];
const TOKENS: usize = 16384;

/// One product `[m, k] · [n, k]ᵀ`.
#[derive(Clone, Copy)]
struct Product {
    m: usize,
    n: usize,
    k: usize,
    left: Encoding,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Fast,
    Split,
    /// Into f32, added to what is there: beta 1.
    Accumulate,
    /// Into f32 in place of what is there: beta 0, as the first gradient of a step.
    Overwrite,
}

pub(crate) fn gemms(bench: &mut Bench) -> Result {
    let (tokens, shrink) = if bench.dry { (32, 128) } else { (TOKENS, 1) };
    let sides = if bench.dry { vec![16] } else { vec![1024, 2048, 4096, 8192] };
    for side in sides {
        let cube = |kind| Product { m: side, n: side, k: side, left: E4M3, kind };
        product(bench, &format!("cube {side}"), cube(Kind::Fast))?;
        product(bench, &format!("cube {side} split"), cube(Kind::Split))?;
    }
    for (name, n, k) in LINEARS {
        let (m, n, k) = (tokens, n / shrink, k / shrink);
        let sizes = format!("{name} {m}x{n}x{k}");
        product(bench, &format!("fprop {sizes}"), Product { m, n, k, left: E4M3, kind: Kind::Fast })?;
        product(bench, &format!("dgrad {sizes}"), Product { m, n: k, k: n, left: E5M2, kind: Kind::Split })?;
        product(
            bench,
            &format!("wgrad {sizes}"),
            Product { m: n, n: k, k: m, left: E5M2, kind: Kind::Accumulate },
        )?;
        product(
            bench,
            &format!("wgrad {sizes} beta 0"),
            Product { m: n, n: k, k: m, left: E5M2, kind: Kind::Overwrite },
        )?;
    }
    Ok(())
}

/// In FP8, then in bf16.
fn product(bench: &mut Bench, case: &str, of: Product) -> Result {
    let Product { m, n, k, left, kind } = of;
    let device = bench.device.clone();
    let work = Work::Flops(2.0 * m as f64 * n as f64 * k as f64);
    let sets = bench.sets((m * k + n * k + 2 * m * n) as f64);
    let out = || match kind {
        Kind::Accumulate => Tensor::zeros([m, n], DType::F32, &device),
        _ => Tensor::zeros([1, 1], DType::F32, &device),
    };
    {
        let a = (0..sets).map(|i| bench.pool.fp8([m, k], left, i, &device)).collect::<Result<Vec<_>>>()?;
        let b =
            (0..sets).map(|i| bench.pool.fp8([n, k], E4M3, 50 + i, &device)).collect::<Result<Vec<_>>>()?;
        let mut dw = (0..sets).map(|_| out()).collect::<std::result::Result<Vec<_>, _>>()?;
        bench.time("gemm", &format!("{case} fp8"), work, sets, &mut |i| match kind {
            Kind::Fast => Ok(Box::new(ops::gemm_fp8(&a[i], &b[i], None, DType::BF16, Accumulation::Fast)?)),
            Kind::Split => Ok(Box::new(ops::gemm_fp8(&a[i], &b[i], None, DType::BF16, Accumulation::Split)?)),
            Kind::Overwrite => {
                Ok(Box::new(ops::gemm_fp8(&a[i], &b[i], None, DType::F32, Accumulation::Split)?))
            }
            Kind::Accumulate => {
                ops::gemm_fp8_accumulate(&a[i], &b[i], &mut dw[i], "dw", ops::Accumulation::Split)?;
                Ok(Box::new(()))
            }
        })?;
    }
    if kind == Kind::Overwrite || (kind == Kind::Split && left == E4M3) {
        return Ok(()); // bf16 knows one way to add up
    }
    let input = |shape, seed| bench.pool.tensor(shape, DType::BF16, seed, &device);
    let a = (0..sets).map(|i| input([m, k], i)).collect::<Result<Vec<_>>>()?;
    let b = (0..sets).map(|i| input([n, k], 50 + i)).collect::<Result<Vec<_>>>()?;
    let mut dw = (0..sets).map(|_| out()).collect::<std::result::Result<Vec<_>, _>>()?;
    bench.time("gemm", &format!("{case} bf16"), work, sets, &mut |i| {
        if kind == Kind::Accumulate {
            ops::gemm_accumulate(&a[i], &b[i], Layout::Nt, &mut dw[i], "dw")?;
            return Ok(Box::new(()));
        }
        Ok(Box::new(ops::gemm(&a[i], &b[i], Layout::Nt, None, DType::BF16)?))
    })
}

pub(crate) fn attention(bench: &mut Bench) -> Result {
    let shapes = if bench.dry {
        vec![(1, 24, 2, 2, 16), (1, 24, 4, 2, 16)]
    } else {
        vec![(8, 2048, 32, 32, 128), (2, 8192, 32, 32, 128), (8, 2048, 32, 8, 128)]
    };
    for (batch, length, heads, groups, dim) in shapes {
        let device = bench.device.clone();
        let input = |heads, seed| bench.pool.tensor([batch, length, heads, dim], DType::BF16, seed, &device);
        let sets = 2;
        let all = (0..sets)
            .map(|i| {
                let [q, k] = [input(heads, i)?, input(groups, 10 + i)?];
                let [v, dy] = [input(groups, 20 + i)?, input(heads, 30 + i)?];
                let (o, saved) = ops::attention(&q, &k, &v, &Sequences::Full, ScoreOptions::default())?;
                Ok((q, k, v, dy, o, saved))
            })
            .collect::<Result<Vec<_>>>()?;
        // Causal: half of the scores.
        let flops = 2.0 * (batch * heads * length * length * dim) as f64;
        let case = format!("b{batch} s{length} h{heads}/{groups} d{dim}");
        bench.time("attention", &format!("{case} forward"), Work::Flops(flops), sets, &mut |i| {
            let (q, k, v, ..) = &all[i];
            Ok(Box::new(ops::attention(q, k, v, &Sequences::Full, ScoreOptions::default())?))
        })?;
        bench.time("attention", &format!("{case} backward"), Work::Flops(2.5 * flops), sets, &mut |i| {
            let (q, k, v, dy, o, saved) = &all[i];
            let options = ScoreOptions::default();
            Ok(Box::new(ops::attention_backward(dy, q, k, v, o, saved, &Sequences::Full, options)?))
        })?;
        let codes = |x: &Tensor, encoding: Encoding| -> Result<Fp8Tensor> {
            let rule = ScaleRule::Current { fp8_max: encoding.max(), epsilon: 0.0, power_2_scales: false };
            let slot = Slot { scale: Scale::FromTensor(&rule), ..Slot::off(encoding) };
            match ops::quantize(x, &slot)? {
                Operand::Fp8(codes) => Ok(codes),
                Operand::High(_) => Err("quantize gave high precision".into()),
            }
        };
        let all = all
            .iter()
            .map(|(q, k, v, dy, ..)| {
                let [q, k, v] = [q, k, v].map(|x| codes(x, Encoding::E4M3));
                let (q, k, v, dy, options) =
                    (q?, k?, v?, codes(dy, Encoding::E5M2)?, ScoreOptions::default());
                let (o, saved) = ops::attention_fp8(&q, &k, &v, &Sequences::Full, options, DType::BF16)?;
                Ok((q, k, v, dy, o, saved))
            })
            .collect::<Result<Vec<_>>>()?;
        bench.time("attention", &format!("{case} FP8 forward"), Work::Flops(flops), sets, &mut |i| {
            let ((q, k, v, ..), options) = (&all[i], ScoreOptions::default());
            Ok(Box::new(ops::attention_fp8(q, k, v, &Sequences::Full, options, DType::BF16)?))
        })?;
        bench.time(
            "attention",
            &format!("{case} FP8 backward"),
            Work::Flops(2.5 * flops),
            sets,
            &mut |i| {
                let ((q, k, v, dy, o, saved), options) = (&all[i], ScoreOptions::default());
                Ok(Box::new(ops::attention_fp8_backward(dy, q, k, v, o, saved, &Sequences::Full, options)?))
            },
        )?;
    }
    Ok(())
}
