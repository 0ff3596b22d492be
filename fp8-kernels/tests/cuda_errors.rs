//! The exact messages of a GPU for calls that fail or cannot be recorded.

#![cfg(feature = "cuda")]
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod cuda;

use cuda::Rig;
use fp8_kernels::ops::{self, AdamWFactors, AdamWStep, AmaxRule, DropoutKey, Layout, ScaleUpdate};
use fp8_kernels::{
    Arena, ArenaOptions, Cell, CustomPolicy, DType, Device, DropoutState, Encoding, Result, Scale,
    ScalePolicy, ScaleRule, Slot, Tensor, UNSET, UpdateClock,
};
use std::sync::Arc;

fn floats<const N: usize>(shape: [usize; N], device: &Device) -> Tensor {
    Tensor::full(1.0, shape, DType::F32, device).unwrap()
}

#[test]
fn a_product_that_cublaslt_refuses() {
    let rig = Rig::new();
    let cases = [
        (
            ("cublasLtCreate", 3),
            "gemm: opening cuBLASLt: cublasLtCreate failed with 3, CUBLAS_STATUS_ALLOC_FAILED: the host or the device is \
             out of memory: free tensors",
        ),
        (
            ("cublasLtCreate", 1),
            "gemm: opening cuBLASLt: cublasLtCreate failed with 1, CUBLAS_STATUS_NOT_INITIALIZED: CUBLASLT_LOG_LEVEL=5 \
             makes the library say more",
        ),
        (
            ("cublasLtMatmulAlgoGetHeuristic", 15),
            "gemm: [16, 16] · [16, 16], f32 × f32 → f32: cublasLtMatmulAlgoGetHeuristic failed with 15, \
             CUBLAS_STATUS_NOT_SUPPORTED: no kernel of cuBLAS 13.1.0 for these types and extents on this GPU; a newer \
             cuBLAS may have one",
        ),
        (
            ("cublasLtMatmul", 13),
            "gemm: [16, 16] · [16, 16], f32 × f32 → f32: cublasLtMatmul failed with 13, CUBLAS_STATUS_EXECUTION_FAILED: \
             the device failed before: start the process again",
        ),
    ];
    for ((function, code), text) in cases {
        let device = rig.open();
        let (a, b) = (floats([16, 16], &device), floats([16, 16], &device));
        rig.control.fail(function, 1, code).unwrap();
        let refused = ops::gemm(&a, &b, Layout::Nt, None, DType::F32).map(drop).unwrap_err().to_string();
        assert_eq!(refused, text);
        rig.control.set("clear_fail", "").unwrap();
        drop((a, b, device));
    }
    rig.finish();
}

#[test]
fn what_cannot_be_recorded() {
    let rig = Rig::new();
    let device = rig.open();
    let x = floats([4, 4], &device);
    let [mut param, mut exp_avg, mut exp_avg_sq] = [(); 3].map(|()| floats([4], &device));
    let (grad, step) = (floats([4], &device), AdamWStep::default());
    let refuse = |text: &str, call: &mut dyn FnMut() -> Result<()>| {
        assert_eq!(device.capture(call).map(drop).unwrap_err().to_string(), text);
    };

    let read = "cannot be recorded: read results when the step has been recorded and has run";
    refuse(&format!("download: {read}"), &mut || x.to_f32_vec().map(drop));
    refuse(&format!("synchronize: {read}"), &mut || device.synchronize());
    refuse("write: cannot be recorded: write inputs before the replay", &mut || {
        floats([1], &Device::cpu()).to_device(&device)?.write(&[2.0_f32], "y")
    });
    refuse(
        "dropout: cannot be recorded: its mask would be the same at each replay: draw it from a DropoutState",
        &mut || ops::dropout(&x, 0.5, DropoutKey { seed: 1, offset: 0 }).map(drop),
    );
    refuse("dropout state: cannot be recorded: run the step once before", &mut || {
        DropoutState::new(1, &device).map(drop)
    });

    refuse("update clock: cannot be recorded: open a scope of this recipe once before", &mut || {
        UpdateClock::new(2, &device).map(drop)
    });
    refuse(
        "adamw: cannot be recorded: the optimizer's first step makes its state: run it before",
        &mut || AdamWFactors::new(&step, &device).map(drop),
    );
    refuse(
        "adamw: cannot be recorded: its numbers would be the same at each replay: use adamw_groups",
        &mut || ops::adamw(&mut param, &grad, &mut exp_avg, &mut exp_avg_sq, None, &step, "w"),
    );
    refuse(
        "gemm: cannot be recorded: the product is not planned yet: run the step a few times before",
        &mut || ops::gemm(&x, &x, Layout::Nt, None, DType::F32).map(drop),
    );
    refuse(
        "elementwise_add: cannot be recorded: its kernel is not loaded yet: run the step a few times before",
        &mut || ops::add(&x, &x).map(drop),
    );
    drop((x, param, exp_avg, exp_avg_sq, grad, device));
    rig.finish();
}

#[test]
fn scales_that_the_host_decides_cannot_be_recorded() {
    let rig = Rig::new();
    let device = rig.open();
    let x = floats([4, 4], &device);
    let mut arena = Arena::new(2, ArenaOptions::default(), &device).unwrap();
    let policy = CustomPolicy { name: "mine".into(), function: Arc::new(|amax, _, fp8_max| fp8_max / amax) };
    let [exact, custom] = [ScalePolicy::Exact, ScalePolicy::Custom(policy)]
        .map(|policy| ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy });
    let update = ScaleUpdate { amax: AmaxRule::Max, rule: &exact, interval: 2, record_non_finite: false };
    let refused = device.capture(|| ops::update_scales(&mut arena, &update)).map(drop).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "update_scales: cannot be recorded: whether scales are recomputed is decided on the host: use interval 1"
    );
    let cell = Cell::new(UNSET, &device).unwrap();
    let slot =
        Slot { scale: Scale::Cell { cell: &cell, first: &exact, keep: true }, ..Slot::off(Encoding::E4M3) };
    let refused = device.capture(|| ops::quantize(&x, &slot)).map(drop).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "quantize: cannot be recorded: a slot has no scale yet: run and commit steps until every quantized tensor has had \
         a finite amax > 0"
    );
    drop(cell);
    let slot = Slot { scale: Scale::FromTensor(&custom), ..Slot::off(Encoding::E4M3) };
    let refused = device.capture(|| ops::quantize(&x, &slot)).map(drop).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "quantize: cannot be recorded: a user's scale policy runs on the host: use a named rule"
    );
    drop((x, arena, device));
    rig.finish();
}
