//! Device memory: what happens where it ends, and that a steady training step asks the driver for none and never waits.

#![cfg(feature = "cuda")]
#![expect(clippy::unwrap_used, clippy::panic, reason = "a failed step is a failed test")]

mod cuda;

use cuda::Rig;
use cuda::step::Step;
use fp8_kernels::{CudaAllocator, CudaOptions, DType, Device, Error, Shape, Tensor, interop};

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

/// Runs `work` with several threads, each with its number.
fn in_threads(work: impl Fn(usize) + Sync) {
    std::thread::scope(|scope| {
        (0..4).for_each(|thread| {
            let work = &work;
            scope.spawn(move || work(thread));
        });
    });
}

#[test]
fn threads_allocate_and_drop_tensors_of_two_devices() {
    let rig = Rig::new();
    let devices = [(); 2].map(|()| open(&rig, CudaAllocator::Caching));
    in_threads(|thread| {
        let mut kept: Vec<(Tensor, Vec<u8>)> = Vec::new();
        for round in 0..60 {
            // Sizes of few classes, so that blocks change hands between the threads.
            let data = vec![(thread * 61 + round) as u8; [100, 300, 5000][(round + thread) % 3]];
            let device = &devices[(round / 2 + thread) % 2];
            kept.push((Tensor::from_vec(data.clone(), [data.len()], device).unwrap(), data));
            if round % 3 == 2 {
                // The other device's context may be current, and other threads use both.
                let (x, data) = kept.swap_remove(round % kept.len());
                assert!(x.to_vec::<u8>().unwrap() == data, "thread {thread}, round {round}");
            }
        }
        for (x, data) in kept {
            assert!(x.to_vec::<u8>().unwrap() == data, "thread {thread}");
        }
    });
    for device in &devices {
        assert_eq!(device.memory_report().now.total(), 0);
    }
    drop(devices);
    rig.finish();
}

#[test]
fn a_thread_drops_tensors_after_their_device_and_of_a_device_it_never_used() {
    let rig = Rig::new();
    let (device, other) = (open(&rig, CudaAllocator::Caching), open(&rig, CudaAllocator::Caching));
    let (x, y) = (bytes(5000, &device).unwrap(), bytes(5000, &other).unwrap());
    let twin = x.clone();
    drop(device);
    std::thread::scope(|scope| {
        scope.spawn(move || drop((x, y)));
    });
    assert_eq!(twin.to_vec::<u8>().unwrap(), vec![0; 5000]);
    std::thread::scope(|scope| {
        scope.spawn(move || drop(twin));
    });
    assert_eq!(bytes(5000, &other).unwrap().to_vec::<u8>().unwrap(), vec![0; 5000]);
    drop(other);
    rig.finish();
}

#[test]
fn an_allocation_from_kept_memory_calls_nothing_and_still_refuses_a_failed_device() {
    let rig = Rig::new();
    let device = open(&rig, CudaAllocator::Caching);
    let unfilled = |len: usize| interop::unfilled([len], DType::F32, &device);
    drop((unfilled(1000).unwrap(), unfilled(1000).unwrap()));
    let before = rig.control.calls();
    drop((unfilled(1000).unwrap(), unfilled(1001).unwrap()));
    assert_eq!(rig.calls_since(&before), Default::default());
    // A larger one asks the driver, with the device's context current on any thread.
    in_threads(|thread| drop(unfilled(10_000 * (thread + 1)).unwrap()));
    assert!(rig.calls("cuMemAllocAsync") > 2);
    interop::poison(&device, "the cable was pulled".to_owned()).unwrap();
    cuda::expect_poisoned(unfilled(1000), "the cable was pulled");
    cuda::expect_poisoned(unfilled(1 << 20), "the cable was pulled");
    drop(device);
    rig.finish();
}

#[test]
fn memory_in_pieces_of_the_wrong_sizes_is_given_back_for_a_large_tensor() {
    let rig = Rig::new();
    rig.control.set("memory_limit", "1048576").unwrap();
    let device = open(&rig, CudaAllocator::Caching);
    // Every class up to 64 KiB, of which every other block stays in use.
    let mut kept = Vec::new();
    for (index, len) in (1000..60_000).step_by(3001).enumerate() {
        let x = Tensor::from_vec(vec![index as u8; len], [len], &device).unwrap();
        if index % 2 == 0 {
            kept.push((index, x));
        }
    }
    let used: usize = kept.iter().map(|(_, x)| x.numel().div_ceil(256) * 288).sum();
    let large = bytes((1 << 20) - used - 65_536, &device).unwrap();
    assert!(large.to_vec::<u8>().unwrap().iter().all(|byte| *byte == 0));
    for (index, x) in &kept {
        assert!(x.to_vec::<u8>().unwrap().iter().all(|byte| *byte == *index as u8));
    }
    drop((large, kept, device));
    rig.finish();
}

#[test]
fn steps_use_the_same_addresses_in_whatever_order_tensors_are_dropped() {
    let rig = Rig::new();
    let device = open(&rig, CudaAllocator::Caching);
    let step = |order: [usize; 4]| {
        let mut all =
            [300, 300, 5000, 300].map(|len| Some(interop::unfilled([len], DType::U8, &device).unwrap()));
        let addresses = all.each_ref().map(|x| x.as_ref().map(|x| interop::address(x).unwrap()));
        order.into_iter().for_each(|index| all[index] = None);
        addresses
    };
    let first = step([0, 1, 2, 3]);
    for order in [[3, 2, 1, 0], [1, 3, 0, 2], [0, 3, 1, 2]] {
        assert_eq!(step(order), step([0, 1, 2, 3]));
    }
    let sorted = |mut all: [Option<u64>; 4]| {
        all.sort_unstable();
        all
    };
    assert_eq!(sorted(first), sorted(step([2, 0, 1, 3])));
    drop(device);
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
