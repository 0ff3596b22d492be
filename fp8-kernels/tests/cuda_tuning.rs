//! Kernels of matrix products, timed at their first use and kept in a file.

#![cfg(feature = "cuda")]
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod cuda;

use cuda::Rig;
use cuda::step::numbers;
use fp8_kernels::{CudaOptions, DType, Device, GemmTuning, Tensor, TunedProducts, ops};
use ops::Layout;
use std::path::Path;

const HEURISTIC: &str = "cublasLtMatmulAlgoGetHeuristic";
const PRODUCTS: &str = "cublasLtMatmul";

fn open(rig: &Rig, candidates: usize, file: &Path) -> Device {
    let gemm_tuning = Some(GemmTuning { candidates, file: Some(file.to_owned()) });
    Device::cuda_with_options(&CudaOptions { gemm_tuning, ..rig.options() }).unwrap()
}

fn product(device: &Device, rows: usize) -> Vec<f32> {
    let x = Tensor::from_vec(numbers(1, rows * 64), [rows, 64], device).unwrap();
    let w = Tensor::from_vec(numbers(2, 64 * 64), [64, 64], device).unwrap();
    ops::gemm(&x, &w, Layout::Nt, None, DType::F32).unwrap().to_vec().unwrap()
}

#[test]
fn a_product_is_tuned_once_and_kept() {
    let rig = Rig::new();
    let file = rig.cache().join("gemm.json");
    let device = open(&rig, 3, &file);
    let want = product(&Device::cpu(), 64);
    let near = |got: &[f32]| got.iter().zip(&want).all(|(a, b)| (a - b).abs() <= 1e-4);
    assert!(near(&product(&device, 64)));
    let (searches, launches) = (rig.calls(HEURISTIC), rig.calls(PRODUCTS));
    assert_eq!(searches, 1);
    assert!(launches > 3 * 10, "three kernels, each timed over several launches: {launches}");
    assert!(near(&product(&device, 64)));
    assert_eq!((rig.calls(HEURISTIC), rig.calls(PRODUCTS)), (searches, launches + 1));
    drop(device);

    // Another device, or process, finds it in the file.
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(text.contains("64x64x64 nt f32 f32 f32") && text.contains("PTX interpreter"), "{text}");
    let kept: serde_json::Value = serde_json::from_str(&text).unwrap();
    // Of the simulated library's three the second is the fastest.
    assert!(kept["entries"][0]["algo"][0].as_str().unwrap().ends_with("00000001"), "{kept}");
    let device = open(&rig, 3, &file);
    assert!(near(&product(&device, 64)));
    assert_eq!((rig.calls(HEURISTIC), rig.calls(PRODUCTS)), (searches, launches + 2));
    product(&device, 32); // another product is another search
    assert_eq!(rig.calls(HEURISTIC), searches + 1);
    drop(device);

    // A kernel that the library does not take is searched for anew.
    std::fs::write(&file, text.replace('5', "6")).unwrap();
    let device = open(&rig, 1, &file);
    assert!(near(&product(&device, 64)));
    assert_eq!(rig.calls(HEURISTIC), searches + 2);
    drop(device);
    rig.finish();
}

#[test]
fn a_kernel_that_does_not_run_is_not_the_fastest() {
    let rig = Rig::new();
    let want = product(&Device::cpu(), 64);
    // Every kernel in turn, at its first launch and while it is recorded: one launch, and ten that are recorded. A failed
    // kernel is not recorded, and the one behind it is tried at once.
    for (first, kernel) in [(1, 0), (2, 0), (12, 1), (13, 1), (23, 2), (33, 2)] {
        let file = rig.cache().join(format!("{first}.json"));
        let device = open(&rig, 3, &file);
        rig.control.fail(PRODUCTS, first, 15).unwrap();
        let got = product(&device, 64);
        assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() <= 1e-4));
        let text = std::fs::read_to_string(&file).unwrap();
        let kept: serde_json::Value = serde_json::from_str(&text).unwrap();
        let is_fastest = kept["entries"][0]["algo"][0].as_str().unwrap().ends_with("00000001");
        assert_eq!(is_fastest, kernel != 1, "{kept}");
    }
    rig.finish();
}

/// Returns the digits of the kernels that ran while the first of `count` equal products was tuned, and the one that the
/// product then ran on.
fn tuned(rig: &Rig, times: &str, candidates: usize) -> (String, char) {
    let gemm_tuning = Some(GemmTuning { candidates, file: None });
    let device = Device::cuda_with_options(&CudaOptions { gemm_tuning, ..rig.options() }).unwrap();
    rig.control.set("product_times", times).unwrap();
    product(&device, 64);
    let mut ran = rig.control.get("products").unwrap();
    let last = ran.pop().unwrap();
    (ran, last)
}

#[test]
fn candidates_take_turns_in_either_order() {
    let rig = Rig::new();
    let (ran, _) = tuned(&rig, "5000,5000,5000;0", 3);
    let round = |order: &str| order.chars().map(|kernel| kernel.to_string().repeat(10)).collect::<String>();
    // Each runs once before it is recorded.
    let rounds = ["012", "210", "012", "210", "012", "210", "012"].map(round).concat();
    assert_eq!(ran, format!("012{rounds}"));
    assert_eq!(tuned(&rig, "5000,5000;0", 1), (String::new(), '0'));
    rig.finish();
}

#[test]
fn a_device_that_gets_warm_does_not_favour_the_first_candidate() {
    let rig = Rig::new();
    // Each product adds 40 ns to all later ones: after 70 of them, all are slower than any was in the beginning. One
    // candidate after the other, even one that is a tenth faster would seem slower than those before it.
    assert_eq!(tuned(&rig, "10000,9000,20000;40", 3).1, '1');
    assert_eq!(tuned(&rig, "10000,20000,9000;40", 3).1, '2');
    assert_eq!(tuned(&rig, "10000,10000,10000;40", 3).1, '0');
    rig.finish();
}

#[test]
fn the_librarys_first_choice_is_replaced_for_more_than_two_percent() {
    let rig = Rig::new();
    for (times, kernel) in [
        ("10000,9900,9810;0", '0'),
        ("10000,9900,9790;0", '2'),
        ("10000,9790,9780;0", '2'),
        ("10000,10100,9000;0", '2'),
        ("9000,9900,9790;0", '0'),
    ] {
        assert_eq!(tuned(&rig, times, 3).1, kernel, "{times}");
    }
    rig.finish();
}

#[test]
fn choices_are_taken_from_another_device() {
    let rig = Rig::new();
    let file = rig.cache().join("gemm.json");
    let device = open(&rig, 3, &file);
    assert!(device.tuned_products().is_empty());
    product(&device, 64);
    product(&device, 32);
    let choices = device.tuned_products();
    assert_eq!(choices.len(), 2);
    drop(device);
    let choices: TunedProducts = choices.to_string().parse().unwrap();

    // One that has not planned anything yet, and one that runs the library's first choice by now.
    for planned in [false, true] {
        let device = rig.open();
        rig.control.set("reset_calls", "").unwrap();
        rig.control.set("product_times", "5000,5000,5000;0").unwrap();
        if planned {
            product(&device, 64);
            assert_eq!(rig.control.get("products").unwrap(), "0");
        }
        assert_eq!(device.use_tuned_products(&choices).unwrap(), 2);
        assert_eq!(device.use_tuned_products(&choices).unwrap(), 2);
        let got = product(&device, 64);
        let want = product(&Device::cpu(), 64);
        assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() <= 1e-4));
        assert!(rig.control.get("products").unwrap().ends_with('1'));
        assert_eq!(rig.calls(HEURISTIC), u64::from(planned), "a stored kernel is not searched for");
        assert_eq!(device.tuned_products(), choices);
        let refused = device.capture(|| device.use_tuned_products(&choices)).unwrap_err().to_string();
        assert!(refused.starts_with("use_tuned_products: "), "{refused}");
        drop(device);
    }
    rig.finish();
}

#[test]
fn choices_that_do_not_apply_are_ignored() {
    let rig = Rig::new();
    let device = open(&rig, 3, &rig.cache().join("gemm.json"));
    product(&device, 64);
    let text = device.tuned_products().to_string();
    drop(device);
    let (gpu, rest) = text.split_once('\t').unwrap();
    let library = text.replace("\t130100\t", "\t130101\t");
    assert_ne!(library, text);
    let words: Vec<&str> = text.split('\t').collect();
    let kernel = text.replace(words[3], "1 2 3 4 5 6 7 8");
    for (foreign, taken) in [(format!("another {gpu}\t{rest}"), 0), (library, 0), (kernel, 1)] {
        let device = rig.open();
        rig.control.set("product_times", "5000,5000,5000;0").unwrap();
        assert_eq!(device.use_tuned_products(&foreign.parse().unwrap()).unwrap(), taken, "{foreign}");
        product(&device, 64);
        assert_eq!(rig.control.get("products").unwrap(), "0", "{foreign}");
    }
    rig.finish();
}

#[test]
fn an_id_out_of_range_outlives_a_product_that_is_tuned() {
    let rig = Rig::new();
    let device = open(&rig, 3, &rig.cache().join("gemm.json"));
    let table = Tensor::zeros([4, 8], DType::F32, &device).unwrap();
    let ids = Tensor::from_vec(vec![0i32, 9], [2], &device).unwrap();
    let rows = ops::embedding(&ids, &table).unwrap();
    let x = Tensor::zeros([64, 64], DType::F32, &device).unwrap();
    let launches = rig.calls(PRODUCTS);
    let y = ops::gemm(&x, &x, Layout::Nt, None, DType::F32).unwrap();
    assert!(rig.calls(PRODUCTS) > launches + 3 * 10, "nothing was tuned");
    let error = device.synchronize().unwrap_err().to_string();
    assert!(error.contains("embedding") && error.contains('9'), "{error}");
    // It is reported once; the tuned product is there.
    device.synchronize().unwrap();
    assert!(y.to_vec::<f32>().unwrap().iter().all(|v| *v == 0.0));
    drop((table, ids, rows, x, y, device));
    rig.finish();
}

#[test]
fn more_candidates_than_any_product_has_are_refused() {
    let rig = Rig::new();
    let open = |candidates| {
        let gemm_tuning = Some(GemmTuning { candidates, file: None });
        Device::cuda_with_options(&CudaOptions { gemm_tuning, ..rig.options() })
    };
    for candidates in [GemmTuning::MOST_CANDIDATES + 1, 1_000_000_000_000, usize::MAX] {
        let error = open(candidates).unwrap_err().to_string();
        let wanted = format!("gemm_tuning.candidates = {candidates}");
        assert!(error.contains(&wanted) && error.contains("at most 1024"), "{error}");
    }
    let device = open(GemmTuning::MOST_CANDIDATES).unwrap();
    assert_eq!(product(&device, 64).len(), 64 * 64);
    drop(device);
    rig.finish();
}

#[test]
fn a_file_that_cannot_be_used_is_an_error_each_time() {
    let rig = Rig::new();
    let no_tuning = rig.cache().join("gemm.json");
    std::fs::write(&no_tuning, "[]").unwrap();
    for file in [&no_tuning, Path::new("/proc/nowhere/gemm.json")] {
        let device = open(&rig, 3, file);
        let x = Tensor::zeros([4, 4], DType::F32, &device).unwrap();
        for _ in 0..2 {
            let error = ops::gemm(&x, &x, Layout::Nt, None, DType::F32).unwrap_err().to_string();
            assert!(error.contains("gemm.json") && error.contains("remove it"), "{error}");
        }
        drop((x, device));
    }
    rig.finish();
}
