//! Products of FP4 operands with alpha on the device, on the simulated GPU.

use super::cublaslt::Type;
use super::product::{FactorLayout, Places, Product};
use super::{CudaOptions, GemmTuning, Gpu};
use crate::DType;
use crate::backend::cuda::ops::fault;
use fp8_cuda_sim::{Control, library_path};
use std::process::Command;

/// Set in a child only.
const MARK: &str = "FP8_KERNELS_TEST_CHILD";
const NAME: &str = "backend::cuda::runtime::matmul_fp4::fp4_products_are_right";

const VALUES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
/// E4M3 codes, and what they are.
const FACTORS: [(u8, f32); 4] = [(0x30, 0.5), (0x38, 1.0), (0x3c, 1.5), (0x40, 2.0)];

fn code(side: usize, row: usize, col: usize) -> u8 {
    ((row * 7 + col * 3 + side * 11 + row * col) % 16) as u8
}

fn factor(side: usize, row: usize, block: usize) -> (u8, f32) {
    FACTORS[(row * 5 + block * 3 + side + row / 32) % 4]
}

/// The value of an operand's element, its factor included.
fn value(side: usize, row: usize, col: usize) -> f32 {
    let code = code(side, row, col);
    let sign = if code >= 8 { -1.0 } else { 1.0 };
    sign * VALUES[usize::from(code % 8)] * factor(side, row, col / 16).1
}

/// The codes of a `[rows, k]` operand, and its factors in tiles.
fn operand(side: usize, rows: usize, k: usize) -> [Vec<u8>; 2] {
    let pair = |at: usize| code(side, at / k, at % k) | code(side, at / k, at % k + 1) << 4;
    let codes = (0..rows * k).step_by(2).map(pair).collect();
    let mut factors = vec![0; FactorLayout::Vec16.size(rows, k).1];
    let tiles = (k / 16).div_ceil(4);
    for (row, block) in (0..rows).flat_map(|row| (0..k / 16).map(move |block| (row, block))) {
        let tile = row / 128 * tiles + block / 4;
        factors[tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4] = factor(side, row, block).0;
    }
    [codes, factors]
}

/// The simulated GPU is one a process, and other tests want another one, so this runs in a process of its own.
#[test]
fn fp4_products_are_right() {
    if std::env::var_os(MARK).is_none() {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let output = command.args(["--exact", NAME]).env(MARK, "1").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let path = library_path().unwrap();
    let control = Control::open(&path).unwrap();
    control.set("arch", "100").unwrap();
    control.set("cublas", "120800").unwrap();
    for candidates in [1, 3] {
        let gemm_tuning = Some(GemmTuning { candidates, file: None });
        let options = CudaOptions { library: Some(path.clone()), gemm_tuning, ..CudaOptions::default() };
        let gpu = Gpu::open(&options, fault::error).unwrap();
        for (out, dtype) in [(Type::F32, DType::F32), (Type::Bf16, DType::BF16)] {
            for addend in [false, true] {
                expect_right(&gpu, out, dtype, addend);
            }
        }
        drop(gpu);
        assert_eq!((control.live(), control.reports()), (String::new(), String::new()));
    }
}

/// Multiplies, into an output that is replaced and into one that is added to.
fn expect_right(gpu: &Gpu, out: Type, dtype: DType, addend: bool) {
    let [m, n, k] = [3, 136, 96];
    let [[a, a_factors], [b, b_factors]] = [operand(0, m, k), operand(1, n, k)];
    let inputs = [a, a_factors, b, b_factors].map(|bytes| gpu.upload(&bytes).unwrap());
    let [left, left_scale, right, right_scale] = inputs.each_ref().map(|buffer| buffer.ptr());
    let alpha = gpu.upload(&[0.125f32]).unwrap();
    let y = gpu.alloc(dtype, m * n).unwrap();
    let added = gpu.alloc(dtype, m * n).unwrap();
    let bytes = |value: f32| match dtype {
        DType::F32 => value.to_le_bytes().to_vec(),
        _ => half::bf16::from_f32(value).to_le_bytes().to_vec(),
    };
    let c = |at: usize| (at % 5) as f32 - 2.0;
    gpu.write(added.ptr(), &(0..m * n).flat_map(|at| bytes(c(at))).collect::<Vec<_>>()).unwrap();
    let product = Product {
        m,
        n,
        k,
        left_transposed: false,
        right_transposed: true,
        left: Type::E2m1,
        right: Type::E2m1,
        factors: [FactorLayout::Vec16; 2],
        out,
        bias: None,
        addend,
        fast: false,
        device_alpha: true,
    };
    let places = Places {
        left,
        right,
        left_scale,
        right_scale,
        out: y.ptr(),
        alpha: alpha.ptr(),
        ..Places::default()
    };
    let places = Places { addend: if addend { added.ptr() } else { 0 }, ..places };
    // SAFETY: operands, factors, an addend and an output of the product's extents and types, and one f32.
    unsafe { gpu.matmul("test", &product, &places) }.unwrap();
    let sum = |at: usize| (0..k).map(|l| value(0, at / n, l) * value(1, at % n, l)).sum::<f32>() * 0.125;
    let first: Vec<f32> = (0..m * n).map(|at| sum(at) + if addend { c(at) } else { 0.0 }).collect();
    let mut found = vec![0u8; y.bytes()];
    gpu.download(y.ptr(), &mut found).unwrap();
    assert!(first.iter().any(|value| *value != 0.0));
    assert_eq!(
        found,
        first.iter().flat_map(|value| bytes(*value)).collect::<Vec<_>>(),
        "{}",
        product.describe()
    );
    if addend {
        return;
    }
    // The plan is the same; alpha is read when the product runs.
    gpu.write(alpha.ptr(), bytemuck::bytes_of(&0.25f32)).unwrap();
    gpu.write(y.ptr(), &(0..m * n).flat_map(|at| bytes(c(at))).collect::<Vec<_>>()).unwrap();
    // SAFETY: as above.
    unsafe { gpu.matmul("test", &product, &Places { accumulate: true, ..places }) }.unwrap();
    gpu.download(y.ptr(), &mut found).unwrap();
    let second = (0..m * n).flat_map(|at| bytes(2.0 * sum(at) + c(at)));
    assert_eq!(found, second.collect::<Vec<_>>(), "{}, added", product.describe());
}
