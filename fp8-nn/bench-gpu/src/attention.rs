//! Attention: this library's kernels, then what it does where cuDNN is, then FP8.

use crate::libraries;
use crate::result::Result;
use crate::timer::{Bench, Work};
use fp8_nn::fp8_kernels::fp8_format::Encoding;
use fp8_nn::fp8_kernels::ops::{self, ScoreOptions, Sequences};
use fp8_nn::fp8_kernels::{
    CudaOptions, DType, Device, Fp8Tensor, Operand, Scale, ScaleRule, Slot, Tensor, TransposePolicy,
};

/// Sets of tensors that launches take in turns.
const SETS: usize = 2;

/// The extents of a call whose scores are causal.
#[derive(Clone, Copy)]
struct Size {
    batch: usize,
    length: usize,
    heads: usize,
    groups: usize,
    dim: usize,
}

impl Size {
    const fn new(batch: usize, length: usize, [heads, groups]: [usize; 2], dim: usize) -> Self {
        Self { batch, length, heads, groups, dim }
    }

    fn name(self) -> String {
        let Self { batch, length, heads, groups, dim } = self;
        format!("b{batch} s{length} h{heads}/{groups} d{dim}")
    }

    /// Forward: half of the scores.
    fn flops(self) -> f64 {
        2.0 * (self.batch * self.heads * self.length * self.length * self.dim) as f64
    }

    fn forward(self) -> Work {
        Work::Flops(self.flops())
    }

    fn backward(self) -> Work {
        Work::Flops(2.5 * self.flops())
    }

    fn input(self, bench: &Bench, heads: usize, seed: usize) -> Result<Tensor> {
        let shape = [self.batch, self.length, heads, self.dim];
        bench.pool.tensor(shape, DType::BF16, seed, &bench.device)
    }

    /// q, k, v and dy of a set.
    fn inputs(self, bench: &Bench, set: usize) -> Result<[Tensor; 4]> {
        let Self { heads, groups, .. } = self;
        Ok([
            self.input(bench, heads, set)?,
            self.input(bench, groups, 10 + set)?,
            self.input(bench, groups, 20 + set)?,
            self.input(bench, heads, 30 + set)?,
        ])
    }
}

/// The GPU, opened once more: with cuDNN for attention, or without.
pub(crate) fn device(cudnn: bool) -> Result<Device> {
    let device = Device::cuda_with_options(&CudaOptions { cudnn: Some(cudnn), ..CudaOptions::default() })?;
    Ok(device.with_transpose_policy(TransposePolicy::WithCast))
}

pub(crate) fn attention(bench: &mut Bench) -> Result {
    let sizes = if bench.dry {
        vec![Size::new(1, 24, [2, 2], 128), Size::new(1, 24, [4, 2], 16)]
    } else {
        vec![
            Size::new(8, 2048, [32, 32], 128),
            Size::new(2, 8192, [32, 32], 128),
            Size::new(8, 2048, [32, 8], 128),
        ]
    };
    let own = device(false)?;
    let library = match libraries::cudnn() {
        Ok(version) => {
            println!("with {version}");
            Some(device(true)?)
        }
        Err(reason) => {
            println!("without cuDNN: {reason}");
            None
        }
    };
    for size in sizes {
        bench.on(&own, "", &mut |bench| sixteen_bits(bench, size, &[("", true)]))?;
        // Where the library has no kernels for backward in order, the row has this crate's.
        if let Some(library) = &library {
            let orders = [("", true), (", in any order", false)];
            bench.on(library, " with cuDNN", &mut |bench| sixteen_bits(bench, size, &orders))?;
        }
        bench.on(&own, "", &mut |bench| fp8(bench, size))?;
    }
    Ok(())
}

/// Forward, and backward in each of these orders: what the case's name ends with, and whether the order is fixed.
fn sixteen_bits(bench: &mut Bench, size: Size, orders: &[(&str, bool)]) -> Result {
    let all = (0..SETS)
        .map(|set| {
            let [q, k, v, dy] = size.inputs(bench, set)?;
            let (o, saved) = ops::attention(&q, &k, &v, &Sequences::Full, ScoreOptions::default())?;
            Ok((q, k, v, dy, o, saved))
        })
        .collect::<Result<Vec<_>>>()?;
    let case = size.name();
    bench.time("attention", &format!("{case} forward"), size.forward(), SETS, &mut |set| {
        let (q, k, v, ..) = &all[set];
        Ok(Box::new(ops::attention(q, k, v, &Sequences::Full, ScoreOptions::default())?))
    })?;
    for &(order, deterministic) in orders {
        let options = ScoreOptions { deterministic, ..ScoreOptions::default() };
        let case = format!("{case} backward{order}");
        bench.time("attention", &case, size.backward(), SETS, &mut |set| {
            let (q, k, v, dy, o, saved) = &all[set];
            Ok(Box::new(ops::attention_backward(dy, q, k, v, o, saved, &Sequences::Full, options)?))
        })?;
    }
    Ok(())
}

/// The codes of a tensor, with the scale that its largest number asks for.
fn codes(x: &Tensor, encoding: Encoding) -> Result<Fp8Tensor> {
    let rule = ScaleRule::Current { fp8_max: encoding.max(), epsilon: 0.0, power_2_scales: false };
    let slot = Slot { scale: Scale::FromTensor(&rule), ..Slot::off(encoding) };
    match ops::quantize(x, &slot)? {
        Operand::Fp8(codes) => Ok(codes),
        Operand::High(_) => Err("quantize gave high precision".into()),
    }
}

fn fp8(bench: &mut Bench, size: Size) -> Result {
    let options = ScoreOptions::default();
    let all = (0..SETS)
        .map(|set| {
            let [q, k, v, dy] = size.inputs(bench, set)?;
            let [q, k, v] = [q, k, v].map(|x| codes(&x, Encoding::E4M3));
            let (q, k, v, dy) = (q?, k?, v?, codes(&dy, Encoding::E5M2)?);
            let (o, saved) = ops::attention_fp8(&q, &k, &v, &Sequences::Full, options, DType::BF16)?;
            Ok((q, k, v, dy, o, saved))
        })
        .collect::<Result<Vec<_>>>()?;
    let case = size.name();
    bench.time("attention", &format!("{case} FP8 forward"), size.forward(), SETS, &mut |set| {
        let (q, k, v, ..) = &all[set];
        Ok(Box::new(ops::attention_fp8(q, k, v, &Sequences::Full, options, DType::BF16)?))
    })?;
    bench.time("attention", &format!("{case} FP8 backward"), size.backward(), SETS, &mut |set| {
        let (q, k, v, dy, o, saved) = &all[set];
        Ok(Box::new(ops::attention_fp8_backward(dy, q, k, v, o, saved, &Sequences::Full, options)?))
    })
}
