use super::case::{Outcome, cases};
use super::compare::{close, ensure, equal, refused, same};
use super::data::{exact, f64s, normal, tolerance};
use super::fp8_product::{Expected, is_hardware};
use crate::oracle;
use crate::oracle::gemm::gemm;
use fp8_kernels::fp8_format::Blocks;
use fp8_kernels::{
    Cell, DType, Device, Encoding, Fp8Tensor, Operand, REST, Result, Slot, Tensor, TransposePolicy, ops,
};
use ops::Layout;

cases![
    three_products_in_high_precision,
    three_products_in_fp8_under_all_policies,
    results_are_quantized_once,
    parts_of_fp8_tensors,
    refuses
];

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

/// Codes of the f32 products, whatever the dtype of the layer, and their amaxes; where the slot is off, the plain results.
fn results_are_quantized_once(device: &Device) -> Outcome {
    let (fast, split) = (ops::Accumulation::Fast, ops::Accumulation::Split);
    for dims @ [m, n, k] in [[16, 32, 48], [17, 31, 15], [0, 16, 32]] {
        let [x, w, dy] = inputs(dims, device)?;
        let bias = normal([n], DType::BF16, 4, device)?;
        let quantized = |x: &Tensor, encoding| {
            let (cell, rule) = (Cell::new(50.0, device)?, exact(encoding));
            ops::quantize(x, &Slot { columnwise: true, ..Slot::fixed(encoding, &cell, &rule) })
        };
        let fp8 =
            [quantized(&x, Encoding::E4M3)?, quantized(&w, Encoding::E4M3)?, quantized(&dy, Encoding::E5M2)?];
        let [x, w, dy] = [&x, &w, &dy].map(|x| ops::cast(x, DType::BF16).map(Operand::High));
        for [x, w, dy] in [fp8, [x?, w?, dy?]] {
            let in_fp8 = x.is_fp8();
            let y = ops::fprop(&x, &w, Some(&bias), DType::F32, fast)?;
            let dx = ops::dgrad(&dy, &w, DType::F32, split)?;
            for (encoding, what, wide, cols) in
                [(Encoding::E4M3, "y", &y, n), (Encoding::E5M2, "dx", &dx, k), (Encoding::E4M3, "dx", &dx, k)]
            {
                let run = |slot: &Slot<'_>| match what {
                    "y" => ops::fprop_quantize(&x, &w, Some(&bias), slot, DType::BF16, fast),
                    _ => ops::dgrad_quantize(&dy, &w, slot, DType::BF16, split),
                };
                let what = format!("{what} {dims:?} in {encoding}, operands in FP8: {in_fp8}");
                let (cell, amax, rule) =
                    (Cell::new(20.0, device)?, Cell::new(REST, device)?, exact(encoding));
                let slot = Slot { amax: Some(&amax), ..Slot::fixed(encoding, &cell, &rule) };
                let got = run(&slot)?;
                let got = got.as_fp8().ok_or("want FP8")?;
                equal("encoding", got.encoding(), encoding)?;
                let want = oracle::fp8::quantize(&wide.to_f32_vec()?, encoding, 20.0);
                if is_hardware(device) && in_fp8 {
                    let found = got.dequantize(DType::F32)?.to_f32_vec()?;
                    close(&what, &found, &f64s(wide)?, cols.max(1), [0.15, 0.1])?;
                } else {
                    same(&what, &got.codes()?, &want.codes, cols.max(1))?;
                    let expected = if m == 0 { REST } else { want.amax };
                    same(&format!("{what}: amax"), &[amax.read()?], &[expected], 1)?;
                }
                let off = run(&Slot::off(encoding))?;
                let off = off.as_high().ok_or("want values")?;
                equal("dtype", off.dtype(), DType::BF16)?;
                let plain = if what.starts_with('y') {
                    ops::fprop(&x, &w, Some(&bias), DType::BF16, fast)?
                } else {
                    ops::dgrad(&dy, &w, DType::BF16, split)?
                };
                same(&format!("{what}: off"), &off.to_f32_vec()?, &plain.to_f32_vec()?, cols.max(1))?;
            }
        }
    }
    Ok(())
}

fn parts_of_fp8_tensors(device: &Device) -> Outcome {
    let codes: Vec<u8> = (0..5 * 48).map(|i| (i % 0x78) as u8).collect();
    let at = |row: usize, column: usize| codes[row * 48 + column];
    let tensor = Tensor::from_vec(codes.clone(), [5, 48], device)?;
    let x = Fp8Tensor::from_codes(tensor, [5, 48], Encoding::E5M2, Tensor::scalar(0.25, device)?)?;
    // Also from the transpose alone.
    for x in [x.clone(), x.with_columnwise()?.for_backward()] {
        let parts = x.split(&[16, 3, 29])?;
        let mut begin = 0;
        for (part, width) in parts.iter().zip([16, 3, 29]) {
            let want: Vec<u8> = (0..5 * width).map(|i| at(i / width, begin + i % width)).collect();
            same("codes", &part.codes()?, &want, width)?;
            equal("shape", part.shape().matrix(), [5, width])?;
            equal("factor", (part.encoding(), part.scale_inv().item()?), (Encoding::E5M2, 0.25))?;
            begin += width;
        }
        let turned = x.reshape([3, 5, 16])?;
        same("codes", &turned.codes()?, &codes, 16)?;
        ensure(**turned.shape() == [3, 5, 16], || format!("{}", turned.shape()))?;
        // With the same last dimension the layouts stay.
        let folded = x.reshape([5, 1, 48])?;
        equal("layouts", folded.columnwise().is_some(), x.columnwise().is_some())?;
        same("codes", &folded.codes()?, &codes, 48)?;
    }
    let rows = Tensor::from_vec(codes.clone(), [5, 48], device)?;
    let factors = Tensor::full(1.0, [5, 1], DType::F32, device)?;
    let rows = Fp8Tensor::from_blocks(rows, [5, 48], Encoding::E4M3, Blocks::Row, factors)?;
    let folded = rows.reshape([5, 1, 48])?;
    same("codes", &folded.codes()?, &codes, 48)?;
    equal("shape and blocks", (folded.shape().len(), folded.blocks()), (3, Some(Blocks::Row)))?;
    let wording = "blocks = row: only tensors with one factor have parts and other shapes";
    refused(rows.split(&[48]), &format!("split: {wording}"))?;
    refused(rows.reshape([48, 5]), &format!("reshape: {wording}"))
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
