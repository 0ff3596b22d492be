//! Deferred streams: what nothing orders comes in an order that shows it, what is ordered never does.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]
#![expect(
    clippy::multiple_unsafe_ops_per_block,
    reason = "calls of the C interface, one after another under one contract"
)]

mod rig;

use std::collections::BTreeSet;

use cudarc::driver::{CudaFunction, CudaStream, PushKernelArg, result, sys};
use rig::{Rig, add_one, code, rig, shape, status};

const SEEDS: u64 = 24;

/// Enqueues `copy_words` of 64 words.
fn copy_words(stream: &CudaStream, kernel: &CudaFunction, to: u64, from: u64) {
    let count = 64u32;
    // SAFETY: the simulator checks every access; a wrong address is a report.
    unsafe { stream.launch_builder(kernel).arg(&to).arg(&from).arg(&count).launch(shape(1, 64)) }.unwrap();
}

/// One stream counts up, another copies the result, and joins the first only if `joined`. Answers with what came out.
fn produce_and_copy(rig: &Rig, joined: bool) -> Vec<u32> {
    let (producer, consumer) = (rig.context.new_stream().unwrap(), rig.context.new_stream().unwrap());
    let (count, copy) = (rig.load("add_one"), rig.load("copy_words"));
    let source = producer.alloc_zeros::<u32>(64).unwrap();
    let target = consumer.alloc_zeros::<u32>(64).unwrap();
    producer.synchronize().unwrap();
    let (from, to) = (address(&source, &producer), address(&target, &consumer));
    for _ in 0..3 {
        add_one(&producer, &count, from, 64).unwrap();
    }
    if joined {
        consumer.join(&producer).unwrap();
    }
    copy_words(&consumer, &copy, to, from);
    let back = consumer.clone_dtoh(&target).unwrap();
    producer.synchronize().unwrap();
    back
}

fn address(slice: &cudarc::driver::CudaSlice<u32>, stream: &CudaStream) -> u64 {
    use cudarc::driver::DevicePtr;
    slice.device_ptr(stream).0
}

#[test]
fn a_missing_wait_shows_and_the_right_program_is_always_right() {
    let rig = rig();
    let mut wrong = 0;
    for seed in 0..SEEDS {
        rig.control.set("seed", &seed.to_string()).unwrap();
        assert_eq!(produce_and_copy(&rig, true), [3; 64], "seed {seed}");
        let hasty = produce_and_copy(&rig, false);
        wrong += u64::from(hasty != [3; 64]);
        if seed == 0 {
            assert_eq!(hasty, [0; 64], "seed 0 runs nothing that is not waited for");
        }
    }
    assert!(wrong >= SEEDS / 4, "{wrong} of {SEEDS} seeds show the missing wait");
    rig.control.set("eager", "1").unwrap();
    assert_eq!(produce_and_copy(&rig, false), [3; 64], "eager mode hides it");
    rig.finish();
}

#[test]
fn a_seed_repeats_its_order() {
    let rig = rig();
    let mut outcomes = BTreeSet::new();
    for seed in 1..SEEDS {
        let [first, second] = [(); 2].map(|()| {
            rig.control.set("seed", &seed.to_string()).unwrap();
            produce_and_copy(&rig, false)
        });
        assert_eq!(first, second, "seed {seed}");
        outcomes.insert(first);
    }
    assert!(outcomes.len() > 1, "different seeds find different orders");
    rig.finish();
}

#[test]
fn pageable_sources_are_read_at_the_call_and_pinned_ones_late() {
    let rig = rig();
    let stream = rig.context.new_stream().unwrap();
    let device = stream.alloc_zeros::<u32>(64).unwrap();
    let address = address(&device, &stream);
    let mut pageable = vec![1u32; 64];
    // SAFETY: changing the source of a pending copy is what the test is about; it lives until the copy is done.
    unsafe { result::memcpy_htod_async(address, &pageable, stream.cu_stream()) }.unwrap();
    pageable.fill(2);
    assert_eq!(stream.clone_dtoh(&device).unwrap(), [1; 64]);

    // SAFETY: the memory is written before it is read.
    let mut pinned = unsafe { rig.context.alloc_pinned::<u32>(64) }.unwrap();
    pinned.as_mut_slice().unwrap().fill(3);
    // SAFETY: as above, for pinned memory.
    unsafe { result::memcpy_htod_async(address, pinned.as_slice().unwrap(), stream.cu_stream()) }.unwrap();
    pinned.as_mut_slice().unwrap().fill(4);
    assert_eq!(stream.clone_dtoh(&device).unwrap(), [4; 64], "the copy had not run when its source changed");
    drop((device, pinned, stream));
    rig.finish();
}

#[test]
fn a_download_to_pinned_memory_arrives_with_the_synchronization() {
    let rig = rig();
    let stream = rig.context.new_stream().unwrap();
    let device = stream.clone_htod(&[7u32; 64]).unwrap();
    // SAFETY: the memory is written before it is read.
    let mut pinned = unsafe { rig.context.alloc_pinned_with_flags::<u32>(64, 0) }.unwrap();
    let host = pinned.as_mut_slice().unwrap();
    host.fill(0);
    // SAFETY: the pinned block outlives the synchronization below.
    unsafe { result::memcpy_dtoh_async(host, address(&device, &stream), stream.cu_stream()) }.unwrap();
    assert_eq!(host, [0; 64]);
    stream.synchronize().unwrap();
    assert_eq!(host, [7; 64]);
    drop((device, pinned, stream));
    rig.finish();
}

#[test]
fn memory_freed_behind_the_back_of_another_stream_is_found() {
    for (seed, joined) in (0..SEEDS).flat_map(|seed| [(seed, true), (seed, false)]) {
        let rig = rig();
        rig.control.set("seed", &seed.to_string()).unwrap();
        let (owner, other) = (rig.context.new_stream().unwrap(), rig.context.new_stream().unwrap());
        let kernel = rig.load("add_one");
        let memory = owner.alloc_zeros::<u32>(64).unwrap();
        owner.synchronize().unwrap();
        add_one(&other, &kernel, address(&memory, &owner), 64).unwrap();
        if joined {
            owner.join(&other).unwrap();
        }
        drop(memory);
        // The owner first: its free comes before the other stream's kernel unless that is waited for.
        let outcome = owner.synchronize().and_then(|()| other.synchronize());
        drop((kernel, owner, other));
        if joined {
            outcome.unwrap();
            rig.finish();
        } else if outcome.is_err() {
            assert_eq!(code(outcome), 700, "seed {seed}");
            assert!(rig.control.reports().contains("use after free"), "{}", rig.control.reports());
            rig.finish_dead();
        } else {
            assert_ne!(seed, 0, "seed 0 frees first");
            rig.finish();
        }
    }
}

#[test]
fn memory_that_its_own_stream_has_not_allocated_yet_is_found() {
    type Use = fn(u64, &CudaStream, &CudaFunction) -> u32;
    // SAFETY: the early use is what the test is about; the simulator finds it.
    let fill: Use = |at, other, _| code(unsafe { result::memset_d8_async(at, 0, 256, other.cu_stream()) });
    let launch: Use = |at, other, kernel| code(add_one(other, kernel, at, 64));
    // SAFETY: as above.
    let free: Use = |at, other, _| code(unsafe { result::free_async(at, other.cu_stream()) });
    for (name, use_it) in [("fill", fill), ("add_one", launch), ("free", free)] {
        for (seed, joined) in (0..SEEDS).flat_map(|seed| [(seed, true), (seed, false)]) {
            let rig = rig();
            rig.control.set("seed", &seed.to_string()).unwrap();
            let (owner, other) = (rig.context.new_stream().unwrap(), rig.context.new_stream().unwrap());
            let kernel = rig.load("add_one");
            // SAFETY: freed below, or with its context.
            let at = unsafe { result::malloc_async(owner.cu_stream(), 256) }.unwrap();
            if joined && name == "add_one" {
                // SAFETY: the memory is live and as long.
                unsafe { result::memset_d8_async(at, 0, 256, owner.cu_stream()) }.unwrap();
            }
            if joined {
                other.join(&owner).unwrap();
            }
            assert_eq!(use_it(at, &other, &kernel), 0, "{name}: found when it runs");
            let outcome = code(other.synchronize());
            let dead = code(owner.synchronize()) != 0;
            if name != "free" {
                // SAFETY: the memory is live; a dead device gives it back and its error.
                assert_eq!(code(unsafe { result::free_sync(at) }) != 0, dead);
            }
            drop((kernel, owner, other));
            if joined {
                assert_eq!(outcome, 0, "{name}, seed {seed}");
                rig.finish();
            } else if dead {
                let reports = rig.control.reports();
                assert!(
                    reports.contains("not allocated yet") || (name == "add_one" && seed > 0),
                    "{reports}"
                );
                assert!(reports.contains(name), "{reports}");
                rig.finish_dead();
            } else {
                assert_ne!(seed, 0, "{name}: seed 0 runs the other stream first");
                rig.finish();
            }
        }
    }
}

#[test]
fn pool_memory_freed_without_the_stream_is_not_waited_for() {
    let rig = rig();
    let stream = rig.context.new_stream().unwrap();
    let kernel = rig.load("add_one");
    // SAFETY: the early free is what the test is about; the simulator finds the late use.
    let outcome = unsafe {
        let address = result::malloc_async(stream.cu_stream(), 256).unwrap();
        result::memset_d8_async(address, 0, 256, stream.cu_stream()).unwrap();
        stream.synchronize().unwrap();
        add_one(&stream, &kernel, address, 64).unwrap();
        result::free_sync(address).unwrap();
        stream.synchronize()
    };
    assert_eq!(code(outcome), 700);
    drop((stream, kernel));
    rig.finish_dead();
}

#[test]
fn the_legacy_stream_and_blocking_streams_order_each_other() {
    for seed in 0..SEEDS {
        let rig = rig();
        rig.control.set("seed", &seed.to_string()).unwrap();
        let legacy = rig.context.default_stream();
        let kernel = rig.load("add_one");
        let memory = legacy.alloc_zeros::<u32>(64).unwrap();
        let at = address(&memory, &legacy);
        let mut blocking = std::ptr::null_mut();
        // SAFETY: the handle lives through the call; 0 is CU_STREAM_DEFAULT.
        assert_eq!(status(unsafe { sys::cuStreamCreate(&mut blocking, 0) }), 0);
        // SAFETY: the kernel is handed raw arguments of its types; 64 words are allocated.
        unsafe {
            let function = raw(&rig, "add_one");
            let (mut address, mut count) = (at, 64u32);
            let mut args = [std::ptr::from_mut(&mut address).cast(), std::ptr::from_mut(&mut count).cast()];
            result::launch_kernel(function.1, (1, 1, 1), (64, 1, 1), 0, blocking, &mut args).unwrap();
            assert_eq!(legacy.clone_dtoh(&memory).unwrap(), [1; 64], "seed {seed}");
            assert_eq!(status(sys::cuStreamDestroy_v2(blocking)), 0);
            assert_eq!(status(sys::cuStreamSynchronize(blocking)), 400);
            assert_eq!(status(sys::cuModuleUnload(function.0)), 0);
        }
        drop((legacy, kernel, memory));
        rig.finish();
    }
}

/// A module and its function without cudarc's owners.
///
/// # Safety
/// The caller unloads the module.
unsafe fn raw(rig: &Rig, name: &str) -> (sys::CUmodule, sys::CUfunction) {
    rig.context.bind_to_thread().unwrap();
    let text = std::ffi::CString::new(rig::PTX).unwrap();
    // SAFETY: the text ends with NUL and lives through the call.
    let module = unsafe { result::module::load_data(text.as_ptr().cast()) }.unwrap();
    // SAFETY: the module was just loaded.
    let function =
        unsafe { result::module::get_function(module, std::ffi::CString::new(name).unwrap()) }.unwrap();
    (module, function)
}

#[test]
fn a_long_queue_does_not_grow_without_end() {
    let rig = rig();
    let stream = rig.context.new_stream().unwrap();
    let kernel = rig.load("add_one");
    let memory = stream.alloc_zeros::<u32>(1).unwrap();
    for _ in 0..3000 {
        add_one(&stream, &kernel, address(&memory, &stream), 1).unwrap();
    }
    assert_eq!(stream.clone_dtoh(&memory).unwrap(), [3000]);
    drop((stream, kernel, memory));
    rig.finish();
}

#[test]
fn threads_share_the_device() {
    let rig = rig();
    let workers: Vec<_> = (0..4u32)
        .map(|worker| {
            let context = rig.context.clone();
            std::thread::spawn(move || {
                context.bind_to_thread().unwrap();
                let stream = context.new_stream().unwrap();
                for round in 0..20 {
                    let device = stream.clone_htod(&vec![worker * 100 + round; 50]).unwrap();
                    assert_eq!(stream.clone_dtoh(&device).unwrap(), vec![worker * 100 + round; 50]);
                }
            })
        })
        .collect();
    for worker in workers {
        worker.join().unwrap();
    }
    rig.finish();
}
