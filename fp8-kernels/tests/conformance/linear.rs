use super::case::{Outcome, cases};
use super::compare::{close, equal, refused, same};
use super::data::{exact, f64s, normal, tolerance};
use super::fp8_product::Expected;
use crate::oracle::gemm::gemm;
use fp8_kernels::{Cell, DType, Device, Encoding, Operand, Result, Slot, Tensor, TransposePolicy, ops};
use ops::Layout;

cases![three_products_in_high_precision, three_products_in_fp8_under_all_policies, refuses];

const DIMS: [[usize; 3]; 4] = [[16, 32, 48], [17, 31, 15], [1, 1, 1], [0, 16, 32]];

/// `[x, w, dy]` of `x[m, k] · w[n, k]ᵀ`.
fn inputs([m, n, k]: [usize; 3], device: &Device) -> Result<[Tensor; 3]> {
    let tensor = |shape: [usize; 2], seed| ops::scale(&normal(shape, DType::F32, seed, device)?, 0.5);
    Ok([tensor([m, k], 1)?, tensor([n, k], 2)?, tensor([m, n], 3)?])
}

fn check(
    what: &str,
    [x, w, dy]: &[Operand; 3],
    [m, n, k]: [usize; 3],
) -> Result<Vec<Vec<f32>>, libtest_mimic::Failed> {
    let device = x.device();
    let y = ops::fprop(x, w, None, DType::F32, ops::Accumulation::Fast)?;
    let dx = ops::dgrad(&dy.for_backward(), &w.for_backward(), DType::F32, ops::Accumulation::Split)?;
    let mut dw = Tensor::full(1.0, [n, k], DType::F32, device)?;
    ops::wgrad(&dy.for_backward(), &x.for_backward(), &mut dw, "dw", ops::Accumulation::Split)?;
    equal("shapes", [y.shape().matrix(), dx.shape().matrix()], [[m, n], [m, k]])?;
    let is_fp8 = x.is_fp8();
    let value = |operand: &Operand| f64s(&operand.dequantize(DType::F32)?);
    let (x, w, dy) = (value(x)?, value(w)?, value(dy)?);
    if is_fp8 {
        let ones = vec![1.0; n * k];
        for (name, got, a, b, layout, dims, added) in [
            ("y", &y, &x, &w, Layout::Nt, [m, n, k], None),
            ("dx", &dx, &dy, &w, Layout::Nn, [m, k, n], None),
            ("dw", &dw, &dy, &x, Layout::Tn, [n, k, m], Some(&*ones)),
        ] {
            let want = Expected::new(a, b, layout, dims, added);
            want.check(&format!("{what}: {name}"), &got.to_f32_vec()?, dims[1], DType::F32, device)?;
        }
        return Ok(vec![y.to_f32_vec()?, dx.to_f32_vec()?, dw.to_f32_vec()?]);
    }
    let near = tolerance(DType::F32);
    close(&format!("{what}: y"), &y.to_f32_vec()?, &gemm(&x, &w, Layout::Nt, [m, n, k], None), n, near)?;
    close(&format!("{what}: dx"), &dx.to_f32_vec()?, &gemm(&dy, &w, Layout::Nn, [m, k, n], None), k, near)?;
    let want: Vec<f64> = gemm(&dy, &x, Layout::Tn, [n, k, m], None).iter().map(|v| v + 1.0).collect();
    close(&format!("{what}: dw"), &dw.to_f32_vec()?, &want, k, near)?;
    Ok(vec![y.to_f32_vec()?, dx.to_f32_vec()?, dw.to_f32_vec()?])
}

fn three_products_in_high_precision(device: &Device) -> Outcome {
    for dims in DIMS {
        check(&format!("{dims:?}"), &inputs(dims, device)?.map(Operand::High), dims)?;
    }
    Ok(())
}

fn three_products_in_fp8_under_all_policies(device: &Device) -> Outcome {
    use TransposePolicy::{Never, OnDemand, WithCast};
    for dims in DIMS {
        let mut first = None;
        for policy in [Never, OnDemand, WithCast] {
            let device = device.clone().with_transpose_policy(policy);
            let [x, w, dy] = inputs(dims, &device)?;
            let quantized = |x: &Tensor, encoding| {
                let (cell, rule) = (Cell::new(50.0, &device)?, exact(encoding));
                ops::quantize(x, &Slot { columnwise: true, ..Slot::fixed(encoding, &cell, &rule) })
            };
            let operands = [
                quantized(&x, Encoding::E4M3)?,
                quantized(&w, Encoding::E4M3)?,
                quantized(&dy, Encoding::E5M2)?,
            ];
            let got = check(&format!("{policy:?} {dims:?}"), &operands, dims)?;
            let want = first.get_or_insert_with(|| got.clone());
            for (got, want) in got.iter().zip(want) {
                same(&format!("{policy:?} against Never, {dims:?}"), got, want, dims[1])?;
            }
        }
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    let x = normal([16, 16], DType::BF16, 1, device)?;
    let (cell, rule) = (Cell::new(1.0, device)?, exact(Encoding::E4M3));
    let codes = ops::quantize(&x, &Slot::fixed(Encoding::E4M3, &cell, &rule))?;
    let high = Operand::High(x);
    let mut dw = Tensor::zeros([16, 16], DType::F32, device)?;
    let wording = "one operand is FP8 and the other bf16: quantize both or neither";
    refused(
        ops::fprop(&codes, &high, None, DType::F32, ops::Accumulation::Fast),
        &format!("fprop: {wording}"),
    )?;
    refused(ops::dgrad(&high, &codes, DType::F32, ops::Accumulation::Split), &format!("dgrad: {wording}"))?;
    refused(ops::wgrad(&codes, &high, &mut dw, "dw", ops::Accumulation::Split), &format!("wgrad: {wording}"))
}
