//! Errors of the device, failures on demand, limits and leaks.

mod rig;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, PushKernelArg, result};
use rig::{add_one, code, rig, shape, turn};

fn address(slice: &CudaSlice<u32>, stream: &CudaStream) -> u64 {
    slice.device_ptr(stream).0
}

#[test]
fn an_access_out_of_bounds_kills_the_context() {
    let rig = rig();
    let stream = rig.context.default_stream();
    let kernel = rig.load("add_one");
    let memory = stream.clone_htod(&[0u32; 64]).unwrap();
    add_one(&stream, &kernel, address(&memory, &stream), 65).unwrap();
    assert_eq!(code(stream.synchronize()), 700);
    // Everything answers with the same error from now on, releases included.
    assert_eq!(code(stream.clone_htod(&[0u8; 4])), 700);
    assert_eq!(code(rig.context.new_stream()), 700);
    assert_eq!(code(add_one(&stream, &kernel, address(&memory, &stream), 1)), 700);
    let report = rig.control.reports();
    assert!(report.contains("out of bounds in add_one"), "{report}");
    assert!(report.contains("allocation 1 (cuMemAllocAsync, 256 bytes)"), "{report}");
    drop((memory, kernel, stream));
    rig.finish_dead();
    // After the reset the device works again.
    let rig = rig::rig();
    let stream = rig.context.default_stream();
    assert_eq!(stream.clone_dtoh(&stream.clone_htod(&[5u8; 4]).unwrap()).unwrap(), [5; 4]);
    drop(stream);
    rig.finish();
}

#[test]
fn a_misaligned_access_has_its_own_error() {
    let rig = rig();
    let stream = rig.context.default_stream();
    let kernel = rig.load("add_one");
    let memory = stream.clone_htod(&[0u32; 65]).unwrap();
    add_one(&stream, &kernel, address(&memory, &stream) + 2, 64).unwrap();
    assert_eq!(code(stream.synchronize()), 716);
    drop((memory, kernel, stream));
    rig.finish_dead();
}

#[test]
fn what_hardware_would_not_notice_is_an_error_too() {
    // Read before any write, by a kernel's store and by a download.
    let rig = rig();
    let stream = rig.context.default_stream();
    let kernel = rig.load("add_one");
    // SAFETY: the memory is unwritten; that is what the test is about.
    let memory = unsafe { stream.alloc::<u32>(64) }.unwrap();
    add_one(&stream, &kernel, address(&memory, &stream), 64).unwrap();
    assert_eq!(code(stream.synchronize()), 719);
    assert!(rig.control.reports().contains("uninitialised"), "{}", rig.control.reports());
    drop((memory, kernel, stream));
    rig.finish_dead();

    let rig = rig::rig();
    let stream = rig.context.default_stream();
    // SAFETY: as above.
    let memory = unsafe { stream.alloc::<u32>(64) }.unwrap();
    assert_eq!(code(stream.clone_dtoh(&memory)), 719);
    assert!(rig.control.reports().contains("never written"), "{}", rig.control.reports());
    drop((memory, stream));
    rig.finish_dead();
}

#[test]
fn two_blocks_writing_one_word_are_a_race() {
    let rig = rig();
    let stream = rig.context.default_stream();
    let kernel = rig.load("reverse_block");
    let mut memory = stream.clone_htod(&[0u32; 64]).unwrap();
    // SAFETY: two blocks over the same 64 words; that is what the test is about.
    unsafe { stream.launch_builder(&kernel).arg(&mut memory).launch(shape(2, 64)) }.unwrap();
    assert_eq!(code(stream.synchronize()), 719);
    assert!(rig.control.reports().contains("race"), "{}", rig.control.reports());
    drop((memory, kernel, stream));
    rig.finish_dead();
}

#[test]
fn eager_mode_reports_at_the_launch() {
    let rig = rig();
    rig.control.set("eager", "1").unwrap();
    let stream = rig.context.default_stream();
    let kernel = rig.load("add_one");
    let memory = stream.clone_htod(&[0u32; 64]).unwrap();
    assert_eq!(code(add_one(&stream, &kernel, address(&memory, &stream), 65)), 700);
    drop((memory, kernel, stream));
    rig.finish_dead();
}

#[test]
fn the_named_call_fails_and_only_that() {
    let rig = rig();
    let stream = rig.context.default_stream();
    rig.control.fail("cuMemAllocAsync", 3, 2).unwrap();
    let outcomes = [(); 5].map(|()| code(stream.alloc_zeros::<u8>(16)));
    assert_eq!(outcomes, [0, 0, 2, 0, 0]);
    rig.control.set("fail", "cuStreamSynchronize:1:719, cuStreamSynchronize:2:600").unwrap();
    let outcomes = [(); 3].map(|()| code(stream.synchronize()));
    assert_eq!(outcomes, [719, 600, 0], "an injected error does not kill the context");
    rig.control.fail("cuStreamSynchronize", 1, 1).unwrap();
    rig.control.set("clear_fail", "").unwrap();
    stream.synchronize().unwrap();
    drop(stream);
    rig.finish();
}

#[test]
fn every_function_can_be_made_to_fail() {
    let (control, _turn) = turn();
    control.fail("cuDevicePrimaryCtxRetain", 1, 2).unwrap();
    assert_eq!(code(CudaContext::new(0)), 2);
    control.fail("cuInit", 1, 100).unwrap();
    assert_eq!(code(CudaContext::new(0)), 100);
    let why = control.fail("cuNothing", 1, 2).unwrap_err().to_string();
    assert!(why.contains("cuNothing"), "{why}");
    assert!(control.set("fail", "cuInit:0:2").is_err());
    assert!(control.set("fail", "cuInit:1").is_err());
    assert!(control.set("colour", "red").unwrap_err().to_string().contains("colour"));
    assert_eq!(control.get("colour"), None);
    assert_eq!(control.live(), "");
}

#[test]
fn calls_are_counted() {
    let rig = rig();
    rig.control.set("reset_calls", "").unwrap();
    let stream = rig.context.default_stream();
    let memory = stream.alloc_zeros::<u8>(16).unwrap();
    drop(memory);
    let calls = rig.control.calls();
    for name in ["cuMemAllocAsync", "cuMemsetD8Async", "cuMemFreeAsync"] {
        assert_eq!(calls.get(name), Some(&1), "{name}: {calls:?}");
    }
    assert_eq!(calls.get("cuLaunchKernel"), None);
    drop(stream);
    rig.finish();
}

#[test]
fn memory_ends_where_the_limit_says() {
    let rig = rig();
    rig.control.set("memory_limit", "4096").unwrap();
    let stream = rig.context.default_stream();
    let first = stream.alloc_zeros::<u8>(3000).unwrap();
    assert_eq!(rig.context.mem_get_info().unwrap(), (1096, 4096));
    assert_eq!(code(stream.alloc_zeros::<u8>(1097)), 2);
    let rest = stream.alloc_zeros::<u8>(1096).unwrap();
    drop(first);
    // The free waits in its stream; it runs before memory counts as used up.
    let again = stream.alloc_zeros::<u8>(3000).unwrap();
    assert_eq!(rig.context.mem_get_info().unwrap().0, 0);
    drop((rest, again, stream));
    rig.finish();
}

#[test]
fn what_lives_is_listed() {
    let rig = rig();
    let stream = rig.context.new_stream().unwrap();
    let memory = stream.alloc_zeros::<u8>(48).unwrap();
    // SAFETY: never read.
    let pinned = unsafe { rig.context.alloc_pinned::<u8>(100) }.unwrap();
    let kernel = rig.load("add_one");
    let live = rig.control.live();
    for line in ["48 bytes: allocation 1 (cuMemAllocAsync, 48 bytes)", "100 bytes", "streams 1", "modules 1"]
    {
        assert!(live.contains(line), "{line} not in:\n{live}");
    }
    let why = rig.control.reset().unwrap_err().to_string();
    assert!(why.contains("still live"), "{why}");
    drop((memory, pinned, kernel, stream));
    rig.finish();
}

#[test]
fn what_a_context_leaves_behind_is_still_listed() {
    let rig = rig();
    // SAFETY: never freed; that is what the test is about.
    let leaked = unsafe { result::malloc_sync(32) }.unwrap();
    assert_ne!(leaked, 0);
    let control = rig.control;
    drop(rig.context);
    let live = control.live();
    assert!(live.contains("32 bytes") && live.contains("its context was released"), "{live}");
    control.reset().unwrap();
    assert_eq!(control.live(), "");
}
