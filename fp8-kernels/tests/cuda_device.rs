//! A device as its user meets it: on a stream of the user's, after a failure it does not recover from, in two threads.

#![cfg(feature = "cuda")]
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod cuda;

use cuda::step::{Step, numbers};
use cuda::{Rig, child, expect_poisoned, library};
use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use fp8_cuda_sim::Control;
use fp8_kernels::{
    Cell, CudaAllocator, CudaOptions, DType, Device, Encoding, Error, ScalePolicy, ScaleRule, Slot, Tensor,
    UNSET, ops,
};
use std::sync::Arc;

/// Writes one word to an address.
const STORE: &str = "
.version 8.0
.target sm_89
.address_size 64
.visible .entry store(.param .u64 address)
{
    .reg .b64 %rd<2>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [address];
    mov.u32 %r1, 7;
    st.global.u32 [%rd1], %r1;
    ret;
}
";

fn store(context: &Arc<CudaContext>) -> CudaFunction {
    context.load_module(Ptx::from_src(STORE)).unwrap().load_function("store").unwrap()
}

/// Queues a store to an address that may be no memory.
fn queue_store(stream: &Arc<CudaStream>, kernel: &CudaFunction, address: u64) {
    let one = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: the simulated device checks every access: a wrong address is an error of the device.
    unsafe { stream.launch_builder(kernel).arg(&address).launch(one) }.unwrap();
}

/// Takes the device's library for the process, so that a device on a stream needs no search.
fn keep_library(rig: &Rig) {
    drop(rig.open());
    rig.control.set("reset_calls", "").unwrap();
}

/// Returns the outcome of a step on a device of its own.
fn expected(rig: &Rig) -> cuda::step::Outcome {
    Step::new(&rig.open(), 2.0).unwrap().run().unwrap()
}

#[test]
fn work_is_ordered_with_the_callers_on_the_callers_stream() {
    let rig = Rig::new();
    let expected = expected(&rig);
    for seed in ["0", "1", "2", "3"] {
        keep_library(&rig);
        rig.control.set("seed", seed).unwrap();
        let context = CudaContext::new(0).unwrap();
        let [stream, other] = [(); 2].map(|()| context.new_stream().unwrap());
        let [before, between, after] =
            [(); 3].map(|()| context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).unwrap());
        let kernel = store(&context);
        let memory = other.alloc_zeros::<u32>(32).unwrap();
        let created = rig.calls("cuStreamCreate");

        // The device's stream waits for work of another one.
        let address = { cudarc::driver::DevicePtr::device_ptr(&memory, &other).0 };
        queue_store(&other, &kernel, address);
        before.record(&other).unwrap();
        stream.wait(&before).unwrap();
        between.record(&stream).unwrap();
        let device = Device::from_stream(stream.clone()).unwrap();
        assert_eq!(rig.calls("cuStreamCreate"), created);
        let mut step = Step::new(&device, 2.0).unwrap();
        let (x, weight) = step.queue().unwrap();
        after.record(&stream).unwrap();
        device.synchronize().unwrap();

        assert!(before.is_complete() && after.is_complete(), "seed {seed}");
        assert!(before.elapsed_ms(&between).unwrap() >= 0.0, "seed {seed}");
        assert!(between.elapsed_ms(&after).unwrap() > 0.0, "seed {seed}: the step ran on this stream");
        assert_eq!(step.read(&x, &weight).unwrap(), expected, "seed {seed}");
        drop((step, x, weight, device, memory, kernel, before, between, after, stream, other, context));
    }
    rig.finish();
}

#[test]
fn the_callers_stream_outlives_the_device() {
    let rig = Rig::new();
    keep_library(&rig);
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let device = Device::from_stream(stream.clone()).unwrap();
    let x = Tensor::from_vec(numbers(1, 64), [64], &device).unwrap();
    assert_eq!(x.to_vec::<f32>().unwrap(), numbers(1, 64));
    drop(device);
    // The tensor holds the device; with it the last of the device's memory goes.
    assert!(rig.control.live().contains("device"));
    drop(x);
    assert_eq!(rig.control.live(), "streams 1\n");
    assert_eq!(rig.calls("cuStreamDestroy_v2"), 0);
    let copy = stream.clone_htod(&[5u8; 100]).unwrap();
    assert_eq!(stream.clone_dtoh(&copy).unwrap(), [5; 100]);
    drop((copy, stream, context));
    rig.finish();
}

#[test]
fn the_default_stream_serves_too() {
    let rig = Rig::new();
    let expected = expected(&rig);
    let context = CudaContext::new(0).unwrap();
    let device = Device::from_stream(context.default_stream()).unwrap();
    assert_eq!(Step::new(&device, 2.0).unwrap().run().unwrap(), expected);
    drop((device, context));
    rig.finish();
}

#[test]
fn tensors_of_two_devices_do_not_mix() {
    let rig = Rig::new();
    let [one, other] = [(); 2].map(|()| rig.open());
    let [x, y] = [&one, &other].map(|device| Tensor::full(3.0, [5], DType::F32, device).unwrap());
    let error = ops::add(&x, &y).unwrap_err();
    assert!(matches!(error, Error::Devices { op: "add", .. }), "{error:?}");
    let sum = ops::add(&x, &y.to_device(&one).unwrap()).unwrap();
    assert_eq!(sum.to_vec::<f32>().unwrap(), [6.0; 5]);
    drop((x, y, sum, one, other));
    rig.finish();
}

#[test]
fn a_stream_is_taken_over_in_a_process_that_has_no_device_yet() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["libcuda.so.1", "libnvrtc.so.13"] {
        std::os::unix::fs::symlink(library(), folder.path().join(name)).unwrap();
    }
    child::run("adopts_first", &[("FP8_CUDA_LIB_DIR", folder.path())]);
}

#[test]
fn adopts_first() {
    if !child::is_child() {
        return;
    }
    let control = Control::open(&library()).unwrap();
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    let device = Device::from_stream(stream).unwrap();
    assert!(device.is_simulated());
    assert_eq!(Tensor::full(3.0, [5], DType::F32, &device).unwrap().to_vec::<f32>().unwrap(), [3.0; 5]);
    drop(device);
    assert_eq!(control.live(), "");
}

#[test]
fn an_error_that_the_context_does_not_survive_is_told_once_and_then_the_reason() {
    let rig = Rig::new();
    for code in [214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 911] {
        let device = rig.open();
        let clone = device.clone();
        let x = Tensor::scalar(1.0, &device).unwrap();
        rig.control.fail("cuStreamSynchronize", 1, code).unwrap();
        match device.synchronize() {
            Err(Error::Driver { call: "cuStreamSynchronize", op, code: found, .. }) => {
                assert_eq!((op.as_str(), found), ("synchronize", code as u32));
            }
            other => panic!("{code}: {other:?}"),
        }
        let reason = format!("synchronize: cuStreamSynchronize failed with {code}");
        expect_poisoned(device.synchronize(), &reason);
        expect_poisoned(clone.synchronize(), &reason);
        expect_poisoned(x.to_vec::<f32>(), &reason);
        expect_poisoned(Tensor::scalar(1.0, &clone), &reason);
        expect_poisoned(ops::cast(&x, DType::BF16), &reason);
        expect_poisoned(Cell::new(1.0, &device), &reason);
        // A device of its own is another matter.
        let other = rig.open();
        assert_eq!(Tensor::scalar(2.0, &other).unwrap().item().unwrap(), 2.0);
        drop((device, clone, x, other));
        assert_eq!(rig.control.live(), "", "{code}");
    }
    rig.finish();
}

#[test]
fn an_error_that_the_context_survives_is_told_and_the_device_goes_on() {
    let rig = Rig::new();
    let device = rig.open();
    let x = Tensor::scalar(1.0, &device).unwrap();
    for code in [1, 2, 201, 304, 400, 600, 801, 999] {
        rig.control.fail("cuStreamSynchronize", 1, code).unwrap();
        let error = device.synchronize().unwrap_err();
        // 2 is the host's want of memory here: nothing was asked of the device's.
        assert!(matches!(error, Error::Driver { code: found, .. } if found == code as u32), "{error:?}");
        assert_eq!(x.item().unwrap(), 1.0);
    }
    drop((device, x));
    rig.finish();
}

#[test]
fn a_kernel_that_kills_the_context_poisons_the_device_on_its_stream() {
    let rig = Rig::new();
    keep_library(&rig);
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let kernel = store(&context);
    let device = Device::from_stream(stream.clone()).unwrap();
    let mut step = Step::new(&device, UNSET).unwrap();
    let results = step.queue().unwrap();
    // The caller's own work on the stream is at fault; the device, which comes behind it, says what it met.
    queue_store(&stream, &kernel, 64);
    let error = step.scaling().unwrap_err();
    assert!(matches!(error, Error::Driver { code: 700, .. }), "{error:?}");
    expect_poisoned(step.queue(), "failed with 700");
    expect_poisoned(device.synchronize(), "an illegal memory access");
    drop((results, step, device, kernel, stream, context));
    assert!(rig.control.reports().contains("store"), "{}", rig.control.reports());
    assert_eq!(rig.control.live(), "");
    rig.control.reset().unwrap();
    let outcome = expected(&rig);
    assert_eq!(outcome, expected(&rig));
    rig.finish();
}

/// Does a thread's work on its own tensors and returns the results, which are the same on every device.
fn work(device: &Device, seed: u32) -> Vec<String> {
    let rule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
    let mut results = Vec::new();
    for round in 0..6 {
        let shape = [17 + 8 * round, 40];
        let cell = Cell::new(UNSET, device).unwrap();
        let slot = Slot { columnwise: true, ..Slot::fixed(Encoding::E4M3, &cell, &rule) };
        let x = Tensor::from_vec(numbers(seed + round as u32, shape[0] * 40), shape, device).unwrap();
        let operand = ops::quantize(&ops::cast(&x, DType::BF16).unwrap(), &slot).unwrap();
        let codes = operand.as_fp8().unwrap();
        let turned = codes.transposed().unwrap().codes().unwrap();
        let sums = ops::column_sums(&codes.dequantize(DType::F32).unwrap()).unwrap();
        results.push(format!("{:?} {turned:?} {:?}", codes.codes().unwrap(), sums.to_vec::<f32>().unwrap()));
    }
    let mut step = Step::new(device, UNSET).unwrap();
    for _ in 0..3 {
        let outcome = step.run().unwrap();
        results.push(format!("{:?} {:?}", outcome.parameters, outcome.scaling));
    }
    results
}

#[test]
fn threads_may_share_a_device() {
    let rig = Rig::new();
    let alone = rig.open();
    let expected = [1, 100, 200].map(|seed| (seed, work(&alone, seed)));
    drop(alone);
    for allocator in [CudaAllocator::Caching, CudaAllocator::Exact] {
        let options = CudaOptions { allocator: Some(allocator), ..rig.options() };
        let device = Device::cuda_with_options(&options).unwrap();
        std::thread::scope(|scope| {
            for (seed, expected) in &expected {
                let device = device.clone();
                scope.spawn(move || assert_eq!(work(&device, *seed), *expected, "thread {seed}"));
            }
        });
        // The last holder may be in a thread that never used the device.
        std::thread::spawn(move || drop(device)).join().unwrap();
        assert_eq!(rig.control.live(), "");
    }
    rig.finish();
}

#[test]
fn a_gpu_without_fp8_is_refused_by_name() {
    let rig = Rig::new();
    rig.control.set("arch", "80").unwrap();
    let error = Device::cuda_with_options(&rig.options()).unwrap_err();
    assert!(matches!(error, Error::Capability { found: (8, 0), needed: (8, 9), .. }), "{error:?}");
    let text = error.to_string();
    assert!(
        text.contains("PTX interpreter (sm_80)") && text.contains("8.0") && text.contains("8.9"),
        "{text}"
    );
    rig.finish();
}

#[test]
fn a_scale_whose_upload_failed_is_not_taken_for_set() {
    let rig = Rig::new();
    let device = Device::cuda_with_options(&rig.options()).unwrap();
    let scale = Cell::new(UNSET, &device).unwrap();
    rig.control.fail("cuMemcpyHtoDAsync_v2", 1, 999).unwrap();
    let failed = scale.write(2.0);
    rig.control.set("clear_fail", "").unwrap();
    assert!(failed.is_err());
    // Still unset, so the tensor brings its own: 448 / 3.5.
    let rule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
    let x = Tensor::from_vec(vec![1.0f32, -3.5], [2], &device).unwrap();
    let codes = ops::quantize(&x, &Slot::fixed(Encoding::E4M3, &scale, &rule)).unwrap();
    assert_eq!(codes.as_fp8().unwrap().scale_inv().item().unwrap(), 1.0 / 128.0);
    drop((codes, x, scale, device));
    rig.finish();
}
