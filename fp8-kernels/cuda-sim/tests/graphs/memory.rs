//! Memory that a graph uses at each launch, as it is then.

use super::{Executable, RELAXED, begin, end, zeros};
use crate::rig::{add_one, code, rig};
use cudarc::driver::result;

#[test]
fn memory_freed_before_a_launch_is_found() {
    let rig = rig();
    let (stream, memory, at) = zeros(&rig);
    let kernel = rig.load("add_one");
    assert_eq!(begin(&stream, RELAXED), 0);
    add_one(&stream, &kernel, at, 64).unwrap();
    let graph = Executable::new(end(&stream).unwrap());
    assert_eq!(graph.launch(&stream), 0);
    stream.synchronize().unwrap();
    drop(memory);
    assert_eq!(graph.launch(&stream), 0, "a launch is checked when it runs");
    assert_eq!(code(stream.synchronize()), 700);
    let reports = rig.control.reports();
    assert!(reports.contains("use after free") && reports.contains("add_one"), "{reports}");
    drop((graph, kernel, stream));
    rig.finish_dead();
}

#[test]
fn pinned_memory_is_read_at_each_launch() {
    let rig = rig();
    let (stream, memory, at) = zeros(&rig);
    // SAFETY: the memory is written before it is read.
    let mut pinned = unsafe { rig.context.alloc_pinned::<u32>(64) }.unwrap();
    pinned.as_mut_slice().unwrap().fill(1);
    assert_eq!(begin(&stream, RELAXED), 0);
    // SAFETY: changing the source between launches is what the test is about.
    unsafe { result::memcpy_htod_async(at, pinned.as_slice().unwrap(), stream.cu_stream()) }.unwrap();
    let graph = Executable::new(end(&stream).unwrap());
    for value in [2, 3] {
        pinned.as_mut_slice().unwrap().fill(value);
        assert_eq!(graph.launch(&stream), 0);
        assert_eq!(stream.clone_dtoh(&memory).unwrap(), [value; 64]);
    }
    drop(pinned);
    assert_eq!(graph.launch(&stream), 0);
    assert_eq!(code(stream.synchronize()), 700, "its source is gone");
    assert!(rig.control.reports().contains("use after free"), "{}", rig.control.reports());
    drop((graph, memory, stream));
    rig.finish_dead();
}

#[test]
fn a_download_into_memory_pinned_no_more_is_found() {
    let rig = rig();
    let (stream, memory, at) = zeros(&rig);
    // SAFETY: the memory is written before it is read.
    let mut pinned = unsafe { rig.context.alloc_pinned_with_flags::<u32>(64, 0) }.unwrap();
    let host = pinned.as_mut_slice().unwrap();
    host.fill(1);
    assert_eq!(begin(&stream, RELAXED), 0);
    // SAFETY: the launch after the block is gone is what the test is about; the simulator writes nothing then.
    unsafe { result::memcpy_dtoh_async(host, at, stream.cu_stream()) }.unwrap();
    let graph = Executable::new(end(&stream).unwrap());
    assert_eq!(graph.launch(&stream), 0);
    stream.synchronize().unwrap();
    assert_eq!(host, [0; 64]);
    drop(pinned);
    assert_eq!(graph.launch(&stream), 0, "a launch is checked when it runs");
    assert_eq!(code(stream.synchronize()), 700, "its target is gone");
    let reports = rig.control.reports();
    assert!(reports.contains("use after free: download of 256 bytes to 0x"), "{reports}");
    drop((graph, memory, stream));
    rig.finish_dead();
}
