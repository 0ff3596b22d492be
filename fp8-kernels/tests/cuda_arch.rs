//! Every architecture gives the same bits; what differs is when transposed copies are made.

#![cfg(feature = "cuda")]
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod cuda;

use cuda::step::{Codes, Step, numbers};
use cuda::{child, options};
use fp8_cuda_sim::Control;
use fp8_format::Blocks;
use fp8_format::slice::{BlockScaling, MxRounding};
use fp8_kernels::ops::Emulation;
use fp8_kernels::{
    BlockRule, Cell, DType, Device, Encoding, Nvfp4Rule, Scale, ScalePolicy, ScaleRule, Slot, Tensor,
    TransposePolicy, UNSET, ops,
};
use std::path::Path;

const SHAPES: [[usize; 2]; 5] = [[1, 1], [16, 16], [33, 31], [64, 128], [5, 129]];

/// Describes the device in the first line, and then, line by line, what it computes, which is the same for all devices.
fn lines(device: &Device) -> Vec<String> {
    let mut lines =
        vec![format!("{} {:?} {}", device.description(), device.transpose_policy(), ways(device))];
    for (shape, dtype) in
        SHAPES.into_iter().zip([DType::F32, DType::BF16, DType::F16, DType::BF16, DType::F32])
    {
        for encoding in [Encoding::E4M3, Encoding::E5M2] {
            lines.push(format!(
                "{shape:?} {dtype} {encoding:?} {}",
                quantized(device, shape, dtype, encoding)
            ));
        }
    }
    lines.push(products(device));
    lines.extend(block_rules().into_iter().map(|(x, w)| block_products(device, x, w)));
    lines.push(nvfp4_products(device));
    let mut step = Step::new(device, UNSET).unwrap();
    for _ in 0..2 {
        let outcome = step.run().unwrap();
        lines.push(format!("{:?} {:?}", outcome.parameters, outcome.scaling));
    }
    lines
}

/// A Linear's three products in FP8, from whichever layout of the codes there is; exact, since all values are small integers.
fn products(device: &Device) -> String {
    let quantized = |shape: [usize; 2], encoding, seed: u64| {
        let rule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
        let cell = Cell::new(1.0, device).unwrap();
        let count = (shape[0] * shape[1]) as u64;
        let values = (0..count).map(|i| ((i * 7 + seed * 5) % 9) as f32 - 4.0).collect();
        let x = Tensor::from_vec(values, shape, device).unwrap();
        let slot = Slot { columnwise: true, ..Slot::fixed(encoding, &cell, &rule) };
        ops::quantize(&x, &slot).unwrap()
    };
    let (m, n, k) = (20, 48, 33);
    let x = quantized([m, k], Encoding::E4M3, 1);
    let w = quantized([n, k], Encoding::E4M3, 2);
    let dy = quantized([m, n], Encoding::E5M2, 3);
    let y = ops::fprop(&x, &w, None, DType::F32, ops::Accumulation::Fast).unwrap();
    let dx =
        ops::dgrad(&dy.for_backward(), &w.for_backward(), DType::BF16, ops::Accumulation::Split).unwrap();
    let mut dw = Tensor::full(1.0, [n, k], DType::F32, device).unwrap();
    ops::wgrad(&dy.for_backward(), &x.for_backward(), &mut dw, "dw", ops::Accumulation::Split).unwrap();
    format!("{:?}", [&y, &dx, &dw].map(|t| t.to_f32_vec().unwrap()))
}

/// Rules of inputs and gradients, and of weights; scales are powers of two.
fn block_rules() -> [(BlockRule, BlockRule); 4] {
    let f32_rule =
        |blocks| BlockRule::F32(BlockScaling { power_2_scales: true, ..BlockScaling::new(blocks) });
    let [row, line, tile] = [Blocks::Row, Blocks::B1x128, Blocks::B128x128].map(f32_rule);
    let mx = BlockRule::Mx(MxRounding::Ceil);
    [(row, row), (line, tile), (line, line), (mx, mx)]
}

/// Describes how the device multiplies rows, blocks of 128 with powers of two and without, MX blocks, and NVFP4.
fn ways(device: &Device) -> String {
    let way = |blocks, powers_of_two| match ops::emulation(device, Some(blocks), Some(blocks), powers_of_two)
    {
        None => "native",
        Some(Emulation::FactorsAfter) => "after",
        Some(Emulation::Dequantized) => "exact",
        Some(Emulation::Rounded) => "rounded",
        Some(Emulation::ScaledCodes) => "scaled",
    };
    let (row, line, mx, four) = (Blocks::Row, Blocks::B1x128, Blocks::Mx32, Blocks::B1x16);
    [way(row, false), way(line, true), way(line, false), way(mx, true), way(four, false)].join(",")
}

/// A Linear's three products with scales for rows or blocks; exact, as values are small integers times powers of two.
fn block_products(device: &Device, rule: BlockRule, w_rule: BlockRule) -> String {
    let quantized = |shape: [usize; 2], rule, encoding, seed: usize| {
        let value = |i: usize| {
            let size = f32::powi(2.0, (i % shape[1] / 32 % 3) as i32 - (i / shape[1] % 2) as i32);
            (((i * 7 + seed * 5) % 9) as f32 - 4.0) * size
        };
        let x = Tensor::from_vec((0..shape[0] * shape[1]).map(value).collect(), shape, device).unwrap();
        ops::quantize(&x, &Slot { scale: Scale::Blocks(rule), columnwise: true, ..Slot::off(encoding) })
            .unwrap()
    };
    let (m, n, k) = (20, 48, 161);
    let x = quantized([m, k], rule, Encoding::E4M3, 1);
    let w = quantized([n, k], w_rule, Encoding::E4M3, 2);
    let dy = quantized([m, n], rule, Encoding::E5M2, 3);
    let bias = Tensor::full(0.5, [n], DType::BF16, device).unwrap();
    let y = ops::fprop(&x, &w, Some(&bias), DType::BF16, ops::Accumulation::Split).unwrap();
    let dx = ops::dgrad(&dy, &w.for_backward(), DType::F32, ops::Accumulation::Split).unwrap();
    let mut dw = Tensor::full(1.0, [n, k], DType::F32, device).unwrap();
    ops::wgrad(&dy.for_backward(), &x.for_backward(), &mut dw, "dw", ops::Accumulation::Split).unwrap();
    format!("{rule:?} {:?}", [&y, &dx, &dw].map(|t| t.to_f32_vec().unwrap()))
}

/// A Linear's three products in NVFP4; exact, as values are codes times scales of their tiles, and the largest is 2688.
fn nvfp4_products(device: &Device) -> String {
    let quantized = |shape @ [rows, cols]: [usize; 2], blocks, seed: usize, size: f32| {
        let value = |i: usize| {
            let (row, col) = (i / cols, i % cols);
            let scale = [448.0, 224.0, 112.0][(row / 16 + col / 16) % 3];
            // Each block has a 6, along rows and along columns.
            let code = if row % 16 == col % 16 { 7 } else { (i * 7 + seed * 5) % 8 };
            let sign = if (i + seed).is_multiple_of(3) { -1.0 } else { 1.0 };
            Encoding::E2M1.to_f32(code as u8) * scale * sign * size
        };
        let x = Tensor::from_vec((0..rows * cols).map(value).collect(), shape, device).unwrap();
        let scale = Scale::Nvfp4(Nvfp4Rule { blocks, ..Nvfp4Rule::default() });
        ops::quantize(&x, &Slot { scale, columnwise: true, ..Slot::off(Encoding::E2M1) }).unwrap()
    };
    let (m, n, k) = (32, 48, 80);
    let x = quantized([m, k], Blocks::B1x16, 1, 1.0);
    let w = quantized([n, k], Blocks::B16x16, 2, 1.0);
    let dy = quantized([m, n], Blocks::B1x16, 3, 1.0);
    let dx = ops::dgrad(&dy, &w.for_backward(), DType::F32, ops::Accumulation::Split).unwrap();
    let mut dw = Tensor::full(1.0, [n, k], DType::F32, device).unwrap();
    ops::wgrad(&dy, &x.for_backward(), &mut dw, "dw", ops::Accumulation::Split).unwrap();
    // Outputs in f16 are finite.
    let x = quantized([m, k], Blocks::B1x16, 1, 2_f32.powi(-8));
    let w = quantized([n, k], Blocks::B16x16, 2, 2_f32.powi(-8));
    let mut lines = vec![dx, dw];
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let bias = Tensor::from_vec((0..n).map(|i| i as f32 + 0.25).collect(), [n], device).unwrap();
        for bias in
            [None, Some(ops::cast(&bias, DType::BF16).unwrap()), Some(ops::cast(&bias, dtype).unwrap())]
        {
            lines.push(ops::fprop(&x, &w, bias.as_ref(), dtype, ops::Accumulation::Split).unwrap());
        }
    }
    format!("NVFP4 {:?}", lines.iter().map(|t| t.to_f32_vec().unwrap()).collect::<Vec<_>>())
}

/// Quantizes for forward and backward, and reads every view of the codes.
fn quantized(device: &Device, shape: [usize; 2], dtype: DType, encoding: Encoding) -> String {
    let rule = ScaleRule::Delayed { fp8_max: encoding.max(), margin: 0, policy: ScalePolicy::Exact };
    let cell = Cell::new(UNSET, device).unwrap();
    let slot = Slot { columnwise: true, ..Slot::fixed(encoding, &cell, &rule) };
    let x = Tensor::from_vec(numbers(7, shape[0] * shape[1]), shape, device).unwrap();
    let operand = ops::quantize(&ops::cast(&x, dtype).unwrap(), &slot).unwrap();
    let codes = operand.as_fp8().unwrap();

    // A copy is made with the cast, or not at all; backward keeps what it will read.
    let with_cast = device.transpose_policy() == TransposePolicy::WithCast;
    assert_eq!(codes.columnwise().is_some(), with_cast);
    let backward = codes.for_backward();
    assert_eq!((backward.rowwise().is_none(), backward.columnwise().is_some()), (with_cast, with_cast));

    let forward = codes.codes().unwrap();
    assert_eq!(backward.codes().unwrap(), forward);
    let transposed = codes.transposed().unwrap();
    assert_eq!(transposed.matrix(), [shape[1], shape[0]]);
    let turned = transposed.codes().unwrap();
    assert_eq!(backward.transposed().unwrap().codes().unwrap(), turned);
    for (i, code) in forward.iter().enumerate() {
        assert_eq!(turned[i % shape[1] * shape[0] + i / shape[1]], *code, "element {i}");
    }
    let values = backward.dequantize(DType::F32).unwrap().to_vec::<f32>().unwrap();
    assert_eq!(codes.dequantize(DType::F32).unwrap().to_vec::<f32>().unwrap(), values);
    let scale_inv = codes.scale_inv().item().unwrap().to_bits();
    format!("{forward:?} {turned:?} {scale_inv:#x}")
}

/// The lines of this process's device, when it is asked for them.
#[test]
fn child() {
    if !child::is_child() {
        return;
    }
    let cache = tempfile::tempdir().unwrap();
    match Device::cuda_with_options(&options(cache.path())) {
        Ok(device) => {
            lines(&device).into_iter().for_each(child::answer);
            let launched = Control::open(&cuda::library()).unwrap().get("kernels").unwrap();
            let is_emulated = launched.contains("nvfp4_scaled_codes");
            child::answer(if is_emulated { "scaled" } else { "native" });
        }
        Err(error) => child::answer(error.to_string()),
    }
}

#[test]
fn every_architecture_gives_the_bits_of_the_cpu() {
    let cpu = lines(&Device::cpu());
    let made = lines(&Device::cpu().with_transpose_policy(TransposePolicy::WithCast));
    assert_eq!(cpu[1..], made[1..]);
    // The last two have a cuBLAS from before the scale modes. One adds no bias to FP4 products: they stay native all the same.
    let devices = [
        ("89", "130100", "1", "after,exact,rounded,exact,scaled"),
        ("90", "120900", "1", "native,native,native,exact,scaled"),
        ("100", "130100", "1", "after,native,rounded,native,native"),
        ("100", "130100", "0", "after,native,rounded,native,native"),
        ("120", "120800", "1", "after,native,rounded,native,native"),
        ("90", "120805", "1", "after,exact,rounded,exact,scaled"),
        ("100", "120600", "1", "after,exact,rounded,exact,scaled"),
    ];
    let devices = devices.map(|(arch, version, bias, ways)| {
        let variables = [("FP8_SIM_ARCH", arch), ("FP8_SIM_CUBLAS", version), ("FP8_SIM_FP4_BIAS", bias)];
        (arch, ways, child::start("child", &variables.map(|(name, value)| (name, Path::new(value)))))
    });
    for (arch, ways, started) in devices {
        let mut found = child::finish(started);
        assert_eq!(found.pop().as_deref(), ways.rsplit(',').next(), "sm_{arch}");
        let policy = if arch == "100" { "Never" } else { "WithCast" };
        assert_eq!(found[0], format!("PTX interpreter (sm_{arch}) {policy} {ways}"));
        assert_eq!(found.len(), cpu.len());
        for (found, cpu) in found.iter().zip(&cpu).skip(1) {
            assert_eq!(found, cpu, "sm_{arch}");
        }
    }
}

#[test]
fn a_driver_of_cuda_12_8_is_enough_and_an_older_one_is_refused() {
    let open = |driver: &str| child::finish(child::start("child", &[("FP8_SIM_DRIVER", Path::new(driver))]));
    let found = open("12070");
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("CUDA 12.7") && found[0].contains("CUDA 12.8 or newer"), "{found:?}");
    let found = open("12080");
    assert_eq!(found[1..found.len() - 1], lines(&Device::cpu())[1..]);
}

#[test]
fn policies_differ_in_when_a_copy_is_made_only() {
    let rig = cuda::Rig::new();
    let device = rig.open();
    let slot = |device: &Device, cell: &Cell| {
        let rule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
        let x = Tensor::from_vec(numbers(3, 48 * 40), [48, 40], device).unwrap();
        let slot = Slot { columnwise: true, ..Slot::fixed(Encoding::E4M3, cell, &rule) };
        ops::quantize(&x, &slot).unwrap()
    };
    let mut turned = Vec::new();
    for policy in [TransposePolicy::WithCast, TransposePolicy::OnDemand, TransposePolicy::Never] {
        let device = device.clone().with_transpose_policy(policy);
        let cell = Cell::new(2.0, &device).unwrap();
        let operand = slot(&device, &cell);
        let codes = operand.as_fp8().unwrap();
        assert_eq!(codes.columnwise().is_some(), policy == TransposePolicy::WithCast);
        let transposed = codes.transposed().unwrap();
        assert_eq!(transposed.rowwise().is_some(), policy != TransposePolicy::Never);
        turned.push(transposed.codes().unwrap());
        let made = Codes::read(&codes.clone().with_columnwise().unwrap()).unwrap();
        assert!(format!("{made:?}").contains("columnwise: Some"));
    }
    assert!(turned.iter().all(|codes| *codes == turned[0]));
    drop(device);
    rig.finish();
}
