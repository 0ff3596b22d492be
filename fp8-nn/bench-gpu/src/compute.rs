//! Matrix products: a multiplication with an addition is two operations.

use crate::result::Result;
use crate::timer::{Bench, Work};
use fp8_nn::fp8_kernels::fp8_format::Encoding::{self, E4M3, E5M2};
use fp8_nn::fp8_kernels::ops::{self, Accumulation, Layout, Update};
use fp8_nn::fp8_kernels::{DType, Tensor};

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
    /// With a residual in bf16 that is added: C beside the result, beta 1.
    Residual,
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
        // The two whose result is added to what the layer or its half began with.
        if matches!(name, "proj" | "fc2") {
            let case = format!("fprop {sizes} + residual");
            product(bench, &case, Product { m, n, k, left: E4M3, kind: Kind::Residual })?;
        }
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
        Kind::Accumulate | Kind::Overwrite => Tensor::zeros([m, n], DType::F32, &device),
        Kind::Residual => Tensor::full(1.0, [m, n], DType::BF16, &device),
        Kind::Fast | Kind::Split => Tensor::zeros([1, 1], DType::F32, &device),
    };
    {
        let a = (0..sets).map(|i| bench.pool.fp8([m, k], left, i, &device)).collect::<Result<Vec<_>>>()?;
        let b =
            (0..sets).map(|i| bench.pool.fp8([n, k], E4M3, 50 + i, &device)).collect::<Result<Vec<_>>>()?;
        let mut outs = (0..sets).map(|_| out()).collect::<std::result::Result<Vec<_>, _>>()?;
        bench.time("gemm", &format!("{case} fp8"), work, sets, &mut |i| {
            let (a, b, out) = (&a[i], &b[i], &mut outs[i]);
            let update = match kind {
                Kind::Fast => {
                    return Ok(Box::new(ops::gemm_fp8(a, b, None, DType::BF16, Accumulation::Fast)?));
                }
                Kind::Split => {
                    return Ok(Box::new(ops::gemm_fp8(a, b, None, DType::BF16, Accumulation::Split)?));
                }
                Kind::Residual => {
                    let y = ops::gemm_fp8_add(a, b, out, None, DType::BF16, Accumulation::Fast)?;
                    return Ok(Box::new(y));
                }
                Kind::Accumulate => Update::Add,
                Kind::Overwrite => Update::Write,
            };
            ops::gemm_fp8_into(a, b, out, update, "dw", Accumulation::Split)?;
            Ok(Box::new(()))
        })?;
    }
    if kind == Kind::Overwrite || (kind == Kind::Split && left == E4M3) {
        return Ok(()); // bf16 knows one way to add up
    }
    let input = |shape, seed| bench.pool.tensor(shape, DType::BF16, seed, &device);
    let a = (0..sets).map(|i| input([m, k], i)).collect::<Result<Vec<_>>>()?;
    let b = (0..sets).map(|i| input([n, k], 50 + i)).collect::<Result<Vec<_>>>()?;
    let mut outs = (0..sets).map(|_| out()).collect::<std::result::Result<Vec<_>, _>>()?;
    bench.time("gemm", &format!("{case} bf16"), work, sets, &mut |i| match kind {
        Kind::Accumulate => {
            ops::gemm_accumulate(&a[i], &b[i], Layout::Nt, &mut outs[i], "dw")?;
            Ok(Box::new(()))
        }
        Kind::Residual => Ok(Box::new(ops::gemm_add(&a[i], &b[i], Layout::Nt, &outs[i], None, DType::BF16)?)),
        _ => Ok(Box::new(ops::gemm(&a[i], &b[i], Layout::Nt, None, DType::BF16)?)),
    })
}
