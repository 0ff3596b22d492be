//! Scales for rows, blocks and MX blocks on the CPU: products against recorded results, and the rest against the values that a
//! tensor holds.
//!
//! `golden/blocks` has f64 results of the three products of a Linear for each pair of granularities, with the sums of absolute
//! values that bound their errors.

#![expect(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

#[cfg(feature = "cuda")]
mod cuda;

use fp8_format::Blocks;
use fp8_format::slice::{BlockScaling, MxRounding};
use fp8_kernels::{
    BlockRule, CounterValues, Counters, DType, Device, Encoding, Fp8Tensor, Operand, Scale, ScaleRule, Slot,
    Tensor, bf16, ops,
};
use proptest::prelude::*;
use safetensors::{Dtype, SafeTensors};
use std::path::Path;

fn read(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/blocks").join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn words<const N: usize, T>(data: &[u8], from: fn([u8; N]) -> T) -> Vec<T> {
    let (words, rest) = data.as_chunks::<N>();
    assert!(rest.is_empty());
    words.iter().map(|&word| from(word)).collect()
}

fn input(file: &SafeTensors<'_>, name: &str, device: &Device) -> Tensor {
    let view = file.tensor(name).unwrap();
    let shape = [view.shape()[0], view.shape()[1]];
    match view.dtype() {
        Dtype::F32 => Tensor::from_vec(words(view.data(), f32::from_le_bytes), shape, device).unwrap(),
        Dtype::BF16 => Tensor::from_vec(words(view.data(), bf16::from_le_bytes), shape, device).unwrap(),
        other => panic!("{name}: {other:?}"),
    }
}

fn f32_rule(blocks: Blocks, power_2_scales: bool) -> BlockRule {
    BlockRule::F32(BlockScaling { power_2_scales, ..BlockScaling::new(blocks) })
}

fn quantized(x: &Tensor, encoding: Encoding, rule: BlockRule, columnwise: bool) -> Operand {
    let slot = Slot { scale: Scale::Blocks(rule), columnwise, ..Slot::off(encoding) };
    ops::quantize(x, &slot).unwrap()
}

/// Recipe, rule of inputs and gradients, rule of weights, whether gradients are E5M2.
fn recipes() -> [(&'static str, BlockRule, BlockRule, bool); 9] {
    let [row, row_p2] = [false, true].map(|p2| f32_rule(Blocks::Row, p2));
    let [line, line_p2] = [false, true].map(|p2| f32_rule(Blocks::B1x128, p2));
    let [tile, tile_p2] = [false, true].map(|p2| f32_rule(Blocks::B128x128, p2));
    let [ceil, floor] = [MxRounding::Ceil, MxRounding::Floor].map(BlockRule::Mx);
    [
        ("row", row, row, false),
        ("row_p2_hybrid", row_p2, row_p2, true),
        ("block", line, tile, false),
        ("block_p2", line_p2, tile_p2, false),
        ("block_p2_hybrid", line_p2, tile_p2, true),
        ("block_1d", line_p2, line_p2, false),
        ("mx32_rceil", ceil, ceil, false),
        ("mx32_rceil_hybrid", ceil, ceil, true),
        ("mx32_floor", floor, floor, false),
    ]
}

#[test]
fn products_of_recorded_tensors_are_within_their_bounds() {
    check_recorded_products(&Device::cpu());
}

/// By the library's scale modes, and by what takes their place with a cuBLAS that has none.
#[cfg(feature = "cuda")]
#[test]
fn products_of_recorded_tensors_are_within_their_bounds_on_a_simulated_gpu() {
    let rig = cuda::Rig::new();
    for version in ["130100", "120805"] {
        rig.control.set("cublas", version).unwrap();
        check_recorded_products(&rig.open());
    }
}

fn check_recorded_products(device: &Device) {
    for name in ["gemm_small", "gemm_large"] {
        let bytes = read(&format!("{name}.safetensors"));
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let [x, w, dy] = ["x", "w", "dy"].map(|name| input(&file, name, device));
        for (recipe, rule, w_rule, hybrid) in recipes() {
            let grad = if hybrid { Encoding::E5M2 } else { Encoding::E4M3 };
            let (blocks, w_blocks) = (Some(rule.blocks()), Some(w_rule.blocks()));
            // bf16 rounds both values of a product to 8 bits.
            let share = match ops::emulation(device, blocks, w_blocks, rule.has_powers_of_two()) {
                Some(ops::Emulation::Rounded) => 2f64.powi(-7),
                _ => 32.0 * 2f64.powi(-24),
            };
            let x = quantized(&x, Encoding::E4M3, rule, true);
            let w = quantized(&w, Encoding::E4M3, w_rule, true);
            let dy = quantized(&dy, grad, rule, true);
            let [n, k] = w.shape().matrix();
            let mut dw = Tensor::zeros([n, k], DType::F32, device).unwrap();
            // What a layer keeps for the backward pass is enough.
            ops::wgrad(&dy, &x.for_backward(), &mut dw, "dw", ops::Accumulation::Split).unwrap();
            let results = [
                ("y", ops::fprop(&x, &w, None, DType::F32, ops::Accumulation::Fast).unwrap()),
                ("dx", ops::dgrad(&dy, &w.for_backward(), DType::F32, ops::Accumulation::Split).unwrap()),
                ("dw", dw),
            ];
            for (product, got) in results {
                let key = format!("{recipe}.{product}");
                let want = words(file.tensor(&key).unwrap().data(), f64::from_le_bytes);
                let bound = words(file.tensor(&format!("{key}.bound")).unwrap().data(), f32::from_le_bytes);
                let cols = got.shape().last_dim();
                let got = got.to_vec::<f32>().unwrap();
                let places: Vec<usize> = match file
                    .tensor(&format!("{product}.at"))
                    .or_else(|_| file.tensor(&format!("{key}.at")))
                {
                    Ok(at) => {
                        let at = words(at.data(), u32::from_le_bytes);
                        at.as_chunks::<2>()
                            .0
                            .iter()
                            .map(|[row, col]| *row as usize * cols + *col as usize)
                            .collect()
                    }
                    Err(_) => (0..got.len()).collect(),
                };
                assert_eq!(places.len(), want.len(), "{name} {key}");
                for (i, (&place, (&want, &bound))) in places.iter().zip(want.iter().zip(&bound)).enumerate() {
                    let error = (f64::from(got[place]) - want).abs();
                    let allowed = share * f64::from(bound);
                    assert!(
                        error <= allowed,
                        "{name} {key}[{i}]: {} instead of {want}, off by {error:e} > {allowed:e}",
                        got[place]
                    );
                }
            }
        }
    }
}

fn matrix(rows: usize, cols: usize, seed: u64) -> Tensor {
    let value = |i: usize| {
        let z = (i as u64 + 1)
            .wrapping_mul(0x9E37_79B9_7F4A_7C15)
            .wrapping_add(seed.wrapping_mul(0xBF58_476D_1CE4_E5B9));
        let z = (z ^ (z >> 29)).wrapping_mul(0x94D0_49BB_1331_11EB);
        // Columns and rows of very different size, so that a neighbour's scale shows.
        let size = f32::powi(2.0, (i % cols / 16 % 5) as i32 * 2 - (i / cols % 3) as i32 * 3);
        ((z >> 40) as f32 / (1 << 23) as f32 - 1.0) * size
    };
    Tensor::from_vec((0..rows * cols).map(value).collect::<Vec<f32>>(), [rows, cols], &Device::cpu()).unwrap()
}

fn values(x: &Operand) -> Vec<f32> {
    x.dequantize(DType::F32).unwrap().to_vec().unwrap()
}

#[test]
fn both_copies_hold_the_tensor() {
    let (rows, cols) = (150, 161);
    let x = matrix(rows, cols, 1);
    let data = x.to_vec::<f32>().unwrap();
    for (recipe, rule, w_rule, _) in recipes() {
        for rule in [rule, w_rule] {
            let q = quantized(&x, Encoding::E4M3, rule, true);
            let fp8 = q.as_fp8().unwrap();
            assert_eq!(fp8.blocks(), Some(rule.blocks()), "{recipe}");
            let turned = Operand::Fp8(fp8.transposed().unwrap());
            let (rowwise, columnwise) = (values(&q), values(&turned));
            for i in 0..rows * cols {
                let (row, col) = (i / cols, i % cols);
                for (got, which) in [(rowwise[i], "rowwise"), (columnwise[col * rows + row], "columnwise")] {
                    let error = (got - data[i]).abs();
                    // Half an ulp of E4M3, or half its smallest number with the largest scale_inv, which is 1.
                    let allowed = if recipe == "mx32_floor" { 0.125 } else { 0.0626 } * data[i].abs() + 1e-3;
                    assert!(
                        error <= allowed,
                        "{recipe} {rule:?} {which} [{row}, {col}]: {got} for {}",
                        data[i]
                    );
                }
            }
        }
    }
}

#[test]
fn a_transposed_copy_cannot_be_made_from_codes_unless_blocks_are_square() {
    let x = matrix(130, 140, 2);
    for blocks in Blocks::ALL.into_iter().filter(|blocks| !blocks.is_fp4()) {
        let rule =
            if blocks == Blocks::Mx32 { BlockRule::Mx(MxRounding::Ceil) } else { f32_rule(blocks, true) };
        let alone = quantized(&x, Encoding::E4M3, rule, false).as_fp8().unwrap().clone();
        let both = quantized(&x, Encoding::E4M3, rule, true).as_fp8().unwrap().clone();
        if blocks == Blocks::B128x128 {
            let made = alone.clone().with_columnwise().unwrap();
            assert_eq!(
                made.columnwise().unwrap().to_vec::<u8>().unwrap(),
                both.columnwise().unwrap().to_vec::<u8>().unwrap()
            );
            let [made, both] =
                [&made, &both].map(|x| x.columnwise_scale_inv().unwrap().to_vec::<f32>().unwrap());
            assert_eq!(made, both);
            let again = alone.transposed().unwrap();
            assert_eq!(
                again.codes().unwrap(),
                alone.with_columnwise().unwrap().columnwise().unwrap().to_vec::<u8>().unwrap()
            );
            continue;
        }
        let expected = format!(
            "with_columnwise: blocks = {blocks}: other elements share a scale in the transpose: quantize the source with a slot \
             whose columnwise is true"
        );
        assert_eq!(alone.clone().with_columnwise().unwrap_err().to_string(), expected);
        let turned = alone.transposed().unwrap();
        let refused =
            ops::gemm_fp8(&turned, &turned, None, DType::F32, ops::Accumulation::Split).unwrap_err();
        assert!(refused.to_string().starts_with(&format!("gemm_fp8: blocks = {blocks}: ")), "{refused}");
        assert!(turned.codes().is_err() && turned.dequantize(DType::F32).is_err());
        assert!(both.for_backward().codes().is_err(), "rowwise codes were dropped");
    }
}

#[test]
fn rows_have_scales_and_the_transpose_has_one() {
    let (x, cpu) = (matrix(48, 80, 7), Device::cpu());
    let scaling = BlockScaling { power_2_scales: true, ..BlockScaling::new(Blocks::Row) };
    for encoding in [Encoding::E4M3, Encoding::E5M2] {
        let both =
            quantized(&x, encoding, BlockRule::RowsThenTensor(scaling), true).as_fp8().unwrap().clone();
        let rows = quantized(&x, encoding, BlockRule::F32(scaling), false).as_fp8().unwrap().clone();
        assert_eq!((both.blocks(), both.columnwise_blocks()), (Some(Blocks::Row), None));
        assert_eq!(both.codes().unwrap(), rows.codes().unwrap());
        let factors = |x: &Fp8Tensor| x.scale_inv().to_vec::<f32>().unwrap();
        assert_eq!(factors(&both), factors(&rows));
        let rule = ScaleRule::Current { fp8_max: encoding.max(), epsilon: 0.0, power_2_scales: true };
        let slot = Slot { scale: Scale::FromTensor(&rule), columnwise: true, ..Slot::off(encoding) };
        let one = ops::quantize(&x, &slot).unwrap().as_fp8().unwrap().transposed().unwrap();
        let turned = both.for_backward().transposed().unwrap();
        assert_eq!(
            (turned.blocks(), turned.scale_inv().item().unwrap()),
            (None, one.scale_inv().item().unwrap())
        );
        assert_eq!(turned.codes().unwrap(), one.codes().unwrap());
        // dgrad: rows of dy with the one factor of the transpose.
        let dy = Operand::Fp8(
            quantized(&matrix(32, 48, 8), Encoding::E4M3, BlockRule::F32(scaling), false)
                .as_fp8()
                .unwrap()
                .clone(),
        );
        let dx = ops::dgrad(&dy, &Operand::Fp8(both.for_backward()), DType::F32, ops::Accumulation::Split)
            .unwrap();
        let with_one =
            ops::dgrad(&dy, &Operand::Fp8(one.transposed().unwrap()), DType::F32, ops::Accumulation::Split)
                .unwrap();
        assert_eq!(dx.to_vec::<f32>().unwrap(), with_one.to_vec::<f32>().unwrap());
    }
    let wrong = BlockScaling::new(Blocks::B1x128);
    let slot = Slot { scale: Scale::Blocks(BlockRule::RowsThenTensor(wrong)), ..Slot::off(Encoding::E4M3) };
    let refused = ops::quantize(&Tensor::zeros([2, 2], DType::F32, &cpu).unwrap(), &slot).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "quantize: blocks = 1x128: BlockRule::RowsThenTensor has a scale for each row: use Blocks::Row"
    );
}

#[test]
fn blocks_of_four_bits_have_a_rule_and_a_constructor_of_their_own() {
    let x = Tensor::zeros([2, 32], DType::F32, &Device::cpu()).unwrap();
    for blocks in [Blocks::B1x16, Blocks::B16x16] {
        let slot = Slot { scale: Scale::Blocks(f32_rule(blocks, false)), ..Slot::off(Encoding::E4M3) };
        assert_eq!(
            ops::quantize(&x, &slot).unwrap_err().to_string(),
            format!(
                "quantize: blocks = {blocks}: NVFP4 blocks have E4M3 scales and 4-bit elements: use Scale::Nvfp4"
            )
        );
        let codes = Tensor::from_vec(vec![0u8; 64], [2, 32], &Device::cpu()).unwrap();
        let scales = Tensor::from_vec(vec![0u8; 4], [2, 2], &Device::cpu()).unwrap();
        assert_eq!(
            Fp8Tensor::from_blocks(codes, [2, 32], Encoding::E4M3, blocks, scales).unwrap_err().to_string(),
            format!(
                "from_blocks: blocks = {blocks}: these blocks have codes of 4 bits and a factor for the tensor: use \
                 Fp8Tensor::from_nvfp4"
            )
        );
    }
}

#[test]
fn pairs_that_no_gemm_multiplies_are_refused() {
    let x = matrix(32, 128, 3);
    let of_fp8 = Blocks::ALL.into_iter().filter(|blocks| !blocks.is_fp4());
    let kinds: Vec<Option<Blocks>> = [None].into_iter().chain(of_fp8.map(Some)).collect();
    let operand = |blocks: Option<Blocks>| match blocks {
        None => {
            let codes = Tensor::from_vec(vec![0x38u8; 32 * 128], [32, 128], &Device::cpu()).unwrap();
            let one = Tensor::scalar(1.0, &Device::cpu()).unwrap();
            Fp8Tensor::from_codes(codes, [32, 128], Encoding::E4M3, one).unwrap()
        }
        Some(Blocks::Mx32) => {
            quantized(&x, Encoding::E4M3, BlockRule::Mx(MxRounding::Ceil), false).as_fp8().unwrap().clone()
        }
        Some(blocks) => {
            quantized(&x, Encoding::E4M3, f32_rule(blocks, true), false).as_fp8().unwrap().clone()
        }
    };
    let mut allowed = 0;
    for &a in &kinds {
        for &b in &kinds {
            let y = ops::gemm_fp8(&operand(a), &operand(b), None, DType::F32, ops::Accumulation::Fast);
            assert_eq!(y.is_ok(), ops::can_multiply(a, b), "{a:?} {b:?}");
            allowed += usize::from(y.is_ok());
        }
    }
    assert_eq!(allowed, 8);
    let error = ops::gemm_fp8(
        &operand(Some(Blocks::Mx32)),
        &operand(None),
        None,
        DType::F32,
        ops::Accumulation::Fast,
    );
    assert_eq!(
        error.unwrap_err().to_string(),
        "gemm_fp8: scales of mx32 × tensor: FP8 GEMMs take tensor or row with tensor or row, 1x128 with 1x128 or 128x128, \
         mx32 with mx32, 1x16 with 1x16 or 16x16, and what is Hadamard-transformed with itself"
    );
}

#[test]
fn tensors_of_no_elements_have_products() {
    let cpu = Device::cpu();
    for (recipe, rule, w_rule, _) in recipes() {
        for [m, n, k] in [[0, 3, 40], [3, 0, 40], [3, 4, 0]] {
            let zeros = |rows, cols| Tensor::zeros([rows, cols], DType::F32, &cpu).unwrap();
            let x = quantized(&zeros(m, k), Encoding::E4M3, rule, true);
            let w = quantized(&zeros(n, k), Encoding::E4M3, w_rule, true);
            let bias = Tensor::from_vec(vec![2.0f32; n], [n], &cpu).unwrap();
            let y = ops::fprop(&x, &w, Some(&bias), DType::F32, ops::Accumulation::Fast).unwrap();
            assert_eq!(y.to_vec::<f32>().unwrap(), vec![2.0; m * n], "{recipe} {m} {n} {k}");
            let mut dw = Tensor::from_vec(vec![3.0f32; n * k], [n, k], &cpu).unwrap();
            let dy = quantized(&zeros(m, n), Encoding::E4M3, rule, true);
            ops::wgrad(&dy, &x, &mut dw, "dw", ops::Accumulation::Split).unwrap();
            assert_eq!(dw.to_vec::<f32>().unwrap(), vec![3.0; n * k], "{recipe} {m} {n} {k}");
        }
    }
}

#[test]
fn what_saturates_is_counted_after_rounding() {
    // 464 is the largest number that rounds to 448; the row's infinity makes its scale 1.
    let x = Tensor::from_vec(vec![f32::INFINITY, 464.0, 465.0, 1e-4, 0.0, f32::NAN], [1, 6], &Device::cpu())
        .unwrap();
    let counters = Counters::new(&Device::cpu()).unwrap();
    let slot = Slot {
        scale: Scale::Blocks(f32_rule(Blocks::Row, false)),
        counters: Some(&counters),
        ..Slot::off(Encoding::E4M3)
    };
    ops::quantize(&x, &slot).unwrap();
    let CounterValues { saturated, underflowed, .. } = counters.read().unwrap();
    assert_eq!((saturated, underflowed), (1, 1));
}

#[test]
fn fused_operations_quantize_the_unrounded_values() {
    let x = matrix(40, 300, 4);
    let gamma =
        Tensor::from_vec((0..300).map(|i| 0.5 + i as f32 / 100.0).collect::<Vec<_>>(), [300], &Device::cpu())
            .unwrap();
    for (recipe, rule, ..) in recipes() {
        let slot = Slot { scale: Scale::Blocks(rule), columnwise: true, ..Slot::off(Encoding::E4M3) };
        let off = Slot::off(Encoding::E4M3);
        let options = ops::NormOptions::default();
        let pairs = [
            (
                ops::norm(&x, &gamma, None, &options, &slot).unwrap().0,
                ops::norm(&x, &gamma, None, &options, &off).unwrap().0,
            ),
            (
                ops::activation(&x, ops::Activation::Gelu, &slot).unwrap(),
                ops::activation(&x, ops::Activation::Gelu, &off).unwrap(),
            ),
        ];
        for (got, high) in pairs {
            let want = ops::quantize(high.as_high().unwrap(), &slot).unwrap();
            let [got, want] = [&got, &want].map(|x| x.as_fp8().unwrap());
            assert_eq!(got.codes().unwrap(), want.codes().unwrap(), "{recipe}");
            let columns = |x: &Fp8Tensor| x.columnwise().unwrap().to_vec::<u8>().unwrap();
            assert_eq!(columns(got), columns(want), "{recipe}");
        }
        let (dy8, db) = ops::quantize_dbias(&x, &slot).unwrap();
        assert_eq!(
            dy8.as_fp8().unwrap().codes().unwrap(),
            quantized(&x, Encoding::E4M3, rule, true).as_fp8().unwrap().codes().unwrap()
        );
        assert_eq!(
            db.to_vec::<f32>().unwrap(),
            ops::column_sums(&x).unwrap().to_vec::<f32>().unwrap(),
            "of the unquantized values"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// The product against the plainest loop over the dequantization factors, block by block, bit by bit.
    #[test]
    fn products_are_the_loop(
        [m, n, k] in [1usize..40, 1..140, 1..300],
        recipe in 0usize..9,
        bias in any::<bool>(),
        dtype in proptest::sample::select(vec![DType::F32, DType::BF16]),
        seed in any::<u64>(),
    ) {
        let (name, rule, w_rule, hybrid) = recipes()[recipe];
        let x_encoding = if hybrid { Encoding::E5M2 } else { Encoding::E4M3 };
        let x = quantized(&matrix(m, k, seed), x_encoding, rule, false);
        let w = quantized(&matrix(n, k, seed ^ 77), Encoding::E4M3, w_rule, false);
        let b: Vec<f32> = (0..n).map(|j| j as f32 * 0.25 - 3.0).collect();
        let bias = bias.then(|| Tensor::from_vec(b.clone(), [n], &Device::cpu()).unwrap());
        let y = ops::fprop(&x, &w, bias.as_ref(), dtype, ops::Accumulation::Fast).unwrap();
        let got = ops::cast(&y, DType::F32).unwrap().to_vec::<f32>().unwrap();

        let (x, w) = (x.as_fp8().unwrap(), w.as_fp8().unwrap());
        let length = match rule.blocks() { Blocks::Row => k, Blocks::Mx32 => 32, _ => 128 };
        let factor = |x: &Fp8Tensor, row: usize, block: usize| {
            let [height, _] = x.blocks().unwrap().size(k);
            let at = row / height * k.div_ceil(length) + block;
            match x.blocks().unwrap() {
                Blocks::Mx32 => f32::powi(2.0, i32::from(x.scale_inv().to_vec::<u8>().unwrap()[at]) - 127),
                _ => x.scale_inv().to_vec::<f32>().unwrap()[at],
            }
        };
        let (x_codes, w_codes) = (x.codes().unwrap(), w.codes().unwrap());
        for (i, j) in [(0, 0), (m - 1, n - 1), (m / 2, n / 3), (m / 3, n / 2)] {
            let mut sum = 0.0f32;
            for (block, first) in (0..k).step_by(length).enumerate() {
                let part = (first..k.min(first + length)).fold(0.0f32, |sum, p| {
                    x.encoding().to_f32(x_codes[i * k + p]).mul_add(w.encoding().to_f32(w_codes[j * k + p]), sum)
                });
                sum += part * factor(x, i, block) * factor(w, j, block);
            }
            if bias.is_some() {
                // With a 16-bit output the bias is rounded first; these are exact.
                sum += b[j];
            }
            let want = if dtype == DType::BF16 { bf16::from_f32(sum).to_f32() } else { sum };
            prop_assert_eq!(got[i * n + j].to_bits(), want.to_bits(), "{} [{}, {}]: {} {}", name, i, j, got[i * n + j], want);
        }
    }
}
