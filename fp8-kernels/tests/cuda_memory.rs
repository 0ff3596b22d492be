//! Device memory: what happens where it ends, and that a steady training step asks the driver for none and never waits.

#![cfg(feature = "cuda")]
#![expect(clippy::unwrap_used, clippy::panic, reason = "a failed step is a failed test")]

mod cuda;

use cuda::Rig;
use cuda::step::Step;
use fp8_kernels::{CudaAllocator, CudaOptions, DType, Device, Error, Shape, Tensor};

fn open(rig: &Rig, allocator: CudaAllocator) -> Device {
    Device::cuda_with_options(&CudaOptions { allocator: Some(allocator), ..rig.options() }).unwrap()
}

/// `(requested, free, total)` of an out-of-memory error.
#[track_caller]
fn out_of_memory<T: std::fmt::Debug>(result: Result<T, Error>) -> [usize; 3] {
    match result {
        Err(Error::OutOfMemory { device, requested, free, total }) => {
            assert_eq!(device, "cuda:0");
            [requested, free, total]
        }
        other => panic!("expected an out-of-memory error, found {other:?}"),
    }
}

fn bytes(len: usize, device: &Device) -> Result<Tensor, Error> {
    Tensor::zeros([len], DType::U8, device)
}

#[test]
fn where_memory_ends_the_error_has_the_numbers_and_the_device_goes_on() {
    let rig = Rig::new();
    rig.control.set("memory_limit", "65536").unwrap();
    // The device itself keeps 32 bytes.
    let device = open(&rig, CudaAllocator::Exact);
    let first = bytes(40_000, &device).unwrap();
    assert_eq!(out_of_memory(bytes(30_000, &device)), [30_000, 65_536 - 40_032, 65_536]);
    let error = bytes(30_000, &device).unwrap_err().to_string();
    assert_eq!(
        error,
        "cuda:0: 30000 bytes requested, 25504 of 65536 free: use a smaller batch, recompute activations, or free tensors"
    );
    let rest = Tensor::from_vec(vec![7u8; 25_504], [25_504], &device).unwrap();
    assert_eq!(out_of_memory(Tensor::scalar(1.0, &device)), [4, 0, 65_536]);
    drop(first);
    let again = Tensor::from_vec(vec![9u8; 30_000], [30_000], &device).unwrap();
    assert_eq!(rest.to_vec::<u8>().unwrap(), vec![7; 25_504]);
    assert_eq!(again.to_vec::<u8>().unwrap(), vec![9; 30_000]);
    drop((rest, again, device));
    rig.finish();
}

#[test]
fn kept_memory_is_given_back_before_there_is_none() {
    let rig = Rig::new();
    rig.control.set("memory_limit", "65536").unwrap();
    let device = open(&rig, CudaAllocator::Caching);
    // Kept blocks of other sizes, which the request does not fit.
    for len in [4096, 8192, 16_384] {
        drop(bytes(len, &device).unwrap());
    }
    let large = bytes(57_344, &device).unwrap();
    assert_eq!(rig.calls("cuMemFreeAsync"), 3);
    assert_eq!(out_of_memory(bytes(16_384, &device)), [16_384, 65_536 - 57_344 - 32, 65_536]);
    drop(large);
    assert_eq!(bytes(16_384, &device).unwrap().to_vec::<u8>().unwrap(), vec![0; 16_384]);
    drop(device);
    rig.finish();
}

#[test]
fn kept_memory_can_be_released() {
    let rig = Rig::new();
    let device = open(&rig, CudaAllocator::Caching);
    let x = Tensor::from_vec(vec![7u8; 5000], [5000], &device).unwrap();
    drop(bytes(4096, &device).unwrap());
    assert_eq!(rig.calls("cuMemFreeAsync"), 0);
    let refused = device.capture(|| device.release_memory()).unwrap_err().to_string();
    assert!(refused.starts_with("synchronize: "), "{refused}");
    assert_eq!(rig.calls("cuMemFreeAsync"), 0);
    device.release_memory().unwrap();
    assert_eq!(rig.calls("cuMemFreeAsync"), 1);
    assert_eq!(x.to_vec::<u8>().unwrap(), vec![7; 5000]);
    drop((x, device));
    rig.finish();
}

#[test]
fn a_size_beyond_every_address_is_an_error() {
    let rig = Rig::new();
    let device = rig.open();
    let most = Shape::MAX_NUMEL;
    let floats = |device: &Device| Tensor::zeros([most], DType::F32, device);
    assert_eq!(out_of_memory(floats(&device))[0], 4 * most);
    assert_eq!(out_of_memory(bytes(most, &device))[0], most);
    drop(device);
    let device = open(&rig, CudaAllocator::Caching);
    assert!(out_of_memory(floats(&device))[0] >= 4 * most);
    assert!(out_of_memory(bytes(most, &device))[0] >= most);
    drop(device);
    rig.finish();
}

#[test]
fn without_room_for_itself_a_device_is_not_opened() {
    let rig = Rig::new();
    rig.control.set("memory_limit", "31").unwrap();
    assert_eq!(out_of_memory(Device::cuda_with_options(&rig.options())), [32, 31, 31]);
    rig.finish();
}

/// Calls after which the host has waited for the device, or would wait on some.
const WAITS: [&str; 18] = [
    "cuCtxSynchronize",
    "cuEventSynchronize",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemcpyDtoD_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoD_v2",
    "cuMemsetD16_v2",
    "cuMemsetD32_v2",
    "cuMemsetD8_v2",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "nvrtcCompileProgram",
];

#[test]
fn a_steady_step_neither_allocates_nor_waits() {
    let rig = Rig::new();
    let device = open(&rig, CudaAllocator::Caching);
    let mut step = Step::new(&device, fp8_kernels::UNSET).unwrap();
    for _ in 0..3 {
        drop(step.queue().unwrap());
        // What the host learns of a step, it learns when that is done.
        device.synchronize().unwrap();
    }
    let before = rig.control.calls();
    for _ in 0..3 {
        drop(step.queue().unwrap());
    }
    let calls = rig.calls_since(&before);
    assert!(calls["cuLaunchKernel"] >= 9, "{calls:?}");
    for name in ["cuMemAllocAsync", "cuMemFreeAsync"].iter().chain(&WAITS) {
        assert_eq!(calls.get(*name), None, "{name}: {calls:?}");
    }

    // The same six steps as on a device that allocates every time.
    let exact = open(&rig, CudaAllocator::Exact);
    let mut other = Step::new(&exact, fp8_kernels::UNSET).unwrap();
    for _ in 0..6 {
        drop(other.queue().unwrap());
    }
    assert_eq!(step.run().unwrap(), other.run().unwrap());
    drop((step, device, other, exact));
    rig.finish();
}

/// Uploads more, in pieces, than may be in flight; reads them only then.
fn upload(device: &Device) {
    let sizes = [200_000, 1, 262_144, 150_001, 262_145, 16];
    let data = |i: usize| -> Vec<u8> { (0..sizes[i % 6]).map(|at| (at * (i + 1) / 7) as u8).collect() };
    let tensor = |i| Tensor::from_vec(data(i), [sizes[i % 6]], device).unwrap();
    for (i, tensor) in (0..18).map(tensor).collect::<Vec<_>>().iter().enumerate() {
        assert!(tensor.to_vec::<u8>().unwrap() == data(i), "upload {i}");
    }
}

#[test]
fn an_upload_waits_before_it_overwrites_one_in_flight() {
    let rig = Rig::new();
    for seed in ["0", "1", "2"] {
        rig.control.set("seed", seed).unwrap();
        let device = rig.open();
        rig.control.set("reset_calls", "").unwrap();
        upload(&device);
        assert_eq!(rig.calls("cuMemHostAlloc"), 4);
        assert!(rig.calls("cuEventSynchronize") > 0);
        drop(device);
    }
    rig.finish();
}

#[test]
fn uploads_do_without_pinned_memory() {
    let rig = Rig::new();
    for pinned in 0..4 {
        let device = rig.open();
        // Some is had at first, then no more.
        let faults: Vec<String> = (pinned + 1..40).map(|count| format!("cuMemHostAlloc:{count}:2")).collect();
        rig.control.set("fail", &faults.join(",")).unwrap();
        upload(&device);
        rig.control.set("clear_fail", "").unwrap();
        drop(device);
    }
    rig.finish();
}
