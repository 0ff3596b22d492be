//! Sizes that no memory has: every function that takes extents returns at once, with a value or an error.

#![cfg(feature = "cuda")]
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a failed step is a failed test")]

#[path = "sizes/calls.rs"]
mod calls;
mod cuda;

use calls::{CALLS, Call, Outcome};
use cuda::Rig;
use fp8_kernels::ops::{self, Accumulation, Layout};
use fp8_kernels::{
    Arena, ArenaOptions, CudaOptions, DType, Device, Encoding, Fp8Tensor, Shape, Tensor, interop,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// Each stands in each place of each call.
const SIZES: [usize; 6] = [0, 1, 1 << 32, 1 << 61, 1 << 63, usize::MAX];
/// The time that a call may take on the CPU and on the simulated GPU: far more than one takes on a loaded machine, far less
/// than a loop over an extent.
const LIMITS: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(30)];

/// Every combination of `SIZES` in `places` places.
fn combinations(places: usize) -> impl Iterator<Item = Vec<usize>> {
    let count = SIZES.len().pow(places.try_into().unwrap());
    (0..count).map(move |number| {
        (0..places)
            .map(|place| SIZES[number / SIZES.len().pow(place.try_into().unwrap()) % SIZES.len()])
            .collect()
    })
}

/// Runs each call with each combination of sizes; what panicked or took long.
fn failures(device: &Device) -> Vec<String> {
    let mut failures = Vec::new();
    for Call { name, places, run } in CALLS {
        let mut accepted = 0;
        for sizes in combinations(*places) {
            let start = Instant::now();
            let outcome = catch_unwind(AssertUnwindSafe(|| run(device, &sizes)));
            let (took, what) = (start.elapsed(), format!("{name}{sizes:?} on {device}"));
            match outcome {
                Err(_) => failures.push(format!("{what} panicked")),
                Ok(Outcome::Accepted) => accepted += 1,
                Ok(Outcome::TooLargeToRun | Outcome::Refused) => {}
            }
            if took > LIMITS[usize::from(device.is_simulated())] {
                failures.push(format!("{what} took {took:?}"));
            }
        }
        // A call that refuses everything would show nothing.
        if accepted == 0 {
            failures.push(format!("{name} on {device} accepts no sizes"));
        }
    }
    failures
}

#[test]
fn every_call_returns_at_once_on_the_cpu() {
    assert_eq!(failures(&Device::cpu()), Vec::<String>::new());
}

#[test]
fn every_call_returns_at_once_on_a_gpu() {
    let rig = Rig::new();
    let device = rig.open();
    assert_eq!(failures(&device), Vec::<String>::new());
    device.synchronize().expect("a device that is not lost");
    drop(device);
    rig.finish();
}

/// Returns the text of a refusal.
fn text<T: std::fmt::Debug>(result: Result<T, fp8_kernels::Error>) -> String {
    result.expect_err("a refusal").to_string()
}

#[test]
fn a_tensor_beyond_the_address_range_is_refused() {
    let rig = Rig::new();
    for device in [Device::cpu(), rig.open()] {
        let many = [1 << 40, 1 << 40, 0];
        let expected = |op: &str| {
            format!(
                "{op}: shape [1099511627776, 1099511627776, 0]: its extents other than 0 multiply to more than \
                 {} elements, the most that a tensor can have: use smaller extents",
                Shape::MAX_NUMEL
            )
        };
        for dtype in [DType::F32, DType::U8] {
            assert_eq!(text(Tensor::zeros(many, dtype, &device)), expected("zeros"));
        }
        assert_eq!(text(Tensor::full(1.0, many, DType::F32, &device)), expected("full"));
        assert_eq!(text(Tensor::from_vec(Vec::<f32>::new(), many, &device)), expected("from_vec"));
        let empty = Tensor::zeros([0], DType::U8, &device).unwrap();
        assert_eq!(text(empty.reshape(many)), expected("reshape"));
        let factor = Tensor::scalar(1.0, &device).unwrap();
        assert_eq!(text(Fp8Tensor::from_codes(empty, many, Encoding::E4M3, factor)), expected("from_codes"));
        if device != Device::cpu() {
            assert_eq!(text(interop::unfilled(many, DType::F32, &device)), expected("unfilled"));
        }
        assert!(Tensor::zeros([Shape::MAX_NUMEL, 0], DType::F32, &device).is_ok());
        assert!(Tensor::zeros([Shape::MAX_NUMEL + 1, 0], DType::F32, &device).is_err());
    }
    rig.finish();
}

#[test]
fn memory_that_cannot_be_allocated_is_an_error() {
    let cpu = Device::cpu();
    for shape in [[1usize << 60, 1], [1 << 20, 1 << 36]] {
        for dtype in [DType::F32, DType::BF16, DType::U8] {
            let text = text(Tensor::zeros(shape, dtype, &cpu));
            let remedy = "bytes of host memory cannot be allocated: use smaller extents or free tensors";
            assert!(text.starts_with("zeros: ") && text.ends_with(remedy), "{text}");
        }
        assert!(text(Tensor::full(1.0, shape, DType::BF16, &cpu)).starts_with("full: "));
    }
    let rig = Rig::new();
    let device = rig.open();
    let text = text(Tensor::zeros([1 << 50], DType::F32, &device));
    assert!(text.starts_with("cuda:0: 4503599627370496 bytes requested"), "{text}");
    drop(device);
    rig.finish();
}

/// Two operands whose product has 2⁶⁴ elements, which as a number of 64 bits is 0.
fn column(dtype: DType, device: &Device) -> Option<Tensor> {
    // Zeros are not backed by memory before they are read. A machine may still refuse so many.
    Tensor::zeros([1 << 32, 1], dtype, device).ok()
}

#[test]
fn a_product_whose_number_of_elements_overflows_is_refused() {
    let cpu = Device::cpu();
    if let Some(x) = column(DType::BF16, &cpu) {
        let text = text(ops::gemm(&x, &x, Layout::Nt, None, DType::F32));
        assert!(text.starts_with("gemm: shape [4294967296, 4294967296]: its extents"), "{text}");
        let mut out = Tensor::zeros([1, 1], DType::F32, &cpu).unwrap();
        assert!(ops::gemm_accumulate(&x, &x, Layout::Nt, &mut out, "out").is_err());
    }
    if let Some(codes) = column(DType::U8, &cpu) {
        let factor = Tensor::scalar(1.0, &cpu).unwrap();
        let x = Fp8Tensor::from_codes(codes, [1 << 32, 1], Encoding::E4M3, factor).unwrap();
        let text = text(ops::gemm_fp8(&x, &x, None, DType::F32, Accumulation::Fast));
        assert!(text.starts_with("gemm_fp8: shape [4294967296, 4294967296]: its extents"), "{text}");
    }
}

#[test]
fn a_huge_product_of_empty_operands_is_an_error() {
    let rig = Rig::new();
    for device in [Device::cpu(), rig.open()] {
        for (rows, what) in [(1 << 31, "an allocation"), (1 << 40, "a shape")] {
            let x = Tensor::zeros([rows, 0], DType::F32, &device).unwrap();
            for dtype in [DType::F32, DType::BF16] {
                assert!(ops::gemm(&x, &x, Layout::Nt, None, dtype).is_err(), "{what} on {device}");
            }
        }
    }
    rig.finish();
}

#[test]
fn more_targets_than_are_counted_are_refused() {
    let cpu = Device::cpu();
    let logits = Tensor::zeros([1 << 31, 1], DType::BF16, &cpu);
    let targets = Tensor::zeros([1 << 31], DType::I32, &cpu);
    // As above: a machine may refuse so many zeros.
    if let (Ok(logits), Ok(targets)) = (logits, targets) {
        let text = text(ops::cross_entropy(&logits, &targets, &Default::default()));
        let remedy = "2147483648 rows: give at most 2147483647, since targets are counted in an i32";
        assert_eq!(text, format!("cross_entropy: shape [2147483648, 1]: {remedy}"));
    }
}

#[test]
fn a_rope_table_of_impossible_length_is_refused() {
    let cpu = Device::cpu();
    let table = |positions, head_dim| text(ops::RopeTable::new(positions, head_dim, 1e4, &cpu));
    let remedy = "give at most 2147483647";
    assert_eq!(table(1 << 62, 64), format!("rope: max_sequence = {}: {remedy}", 1u64 << 62));
    assert_eq!(table(64, 1 << 62), format!("rope: head_dim = {}: {remedy}", 1u64 << 62));
    assert!(table(1 << 30, 1 << 30).starts_with("rope: "));
}

#[test]
fn an_arena_of_impossible_size_is_refused() {
    let rig = Rig::new();
    for device in [Device::cpu(), rig.open()] {
        for (slots, history_len) in
            [(1 << 32, 1), (1 << 59, 1), (1, 1 << 59), (1 << 61, 8), (1 << 20, 1 << 40)]
        {
            let options = ArenaOptions { history_len, ..ArenaOptions::default() };
            assert!(Arena::new(slots, options, &device).is_err(), "{slots} {history_len} on {device}");
        }
    }
    rig.finish();
}

#[test]
fn a_device_of_an_impossible_number_is_refused() {
    let rig = Rig::new();
    for ordinal in SIZES.into_iter().filter(|&ordinal| ordinal > 0) {
        let options = CudaOptions { ordinal, ..rig.options() };
        assert!(Device::cuda_with_options(&options).is_err(), "{ordinal}");
    }
    rig.finish();
}
