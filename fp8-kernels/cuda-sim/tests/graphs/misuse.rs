//! Refused calls (those that a simulated graph cannot hold, wrong handles, a dead device), and objects that are never freed.

use super::{Executable, RELAXED, begin, end, zeros};
use crate::rig::{add_one, code, rig, status};
use cudarc::driver::{result, sys};
use std::ptr::null_mut;

#[test]
fn what_a_graph_here_cannot_hold_is_refused() {
    let rig = rig();
    let (stream, memory, at) = zeros(&rig);
    let kernel = rig.load("add_one");
    let raw = stream.cu_stream();
    assert_eq!(begin(&stream, RELAXED), 0);
    // SAFETY: the source lives through the call.
    assert_eq!(code(unsafe { result::memcpy_htod_async(at, &[1u32; 64], raw) }), 801);
    assert_eq!(end(&stream), Err(901));
    assert_eq!(begin(&stream, RELAXED), 0);
    // SAFETY: refused, so that nothing is allocated or freed.
    unsafe {
        assert_eq!(code(result::malloc_async(raw, 64)), 801);
        assert_eq!(code(result::free_async(at, raw)), 801);
    }
    add_one(&stream, &kernel, at, 64).unwrap();
    let graph = Executable::new(end(&stream).unwrap());
    assert_eq!(begin(&stream, RELAXED), 0);
    assert_eq!(graph.launch(&stream), 801, "no graph inside a graph");
    drop(Executable::new(end(&stream).unwrap()));
    assert_eq!(graph.launch(&stream), 0);
    assert_eq!(stream.clone_dtoh(&memory).unwrap(), [1; 64]);
    drop((graph, kernel, memory, stream));
    rig.finish();
}

#[test]
fn handles_are_checked() {
    let rig = rig();
    let stream = rig.context.new_stream().unwrap();
    assert_eq!(begin(&rig.context.default_stream(), RELAXED), 900, "the legacy stream");
    assert_eq!(end(&stream), Err(401), "nothing has begun");
    assert_eq!((begin(&stream, RELAXED), begin(&stream, RELAXED)), (0, 401));
    let graph = end(&stream).unwrap();
    let mut executable = null_mut();
    // SAFETY: null, wild and destroyed handles are what the test is about; the simulator checks them before any use.
    unsafe {
        let wild = 0x1234_5678usize as *mut std::ffi::c_void;
        assert_eq!(status(sys::cuStreamEndCapture(stream.cu_stream(), null_mut())), 1);
        assert_eq!(status(sys::cuGraphInstantiateWithFlags(null_mut(), graph, 0)), 1);
        assert_eq!(status(sys::cuGraphInstantiateWithFlags(&mut executable, wild.cast(), 0)), 1);
        assert_eq!(status(sys::cuGraphInstantiateWithFlags(&mut executable, graph, 1)), 801);
        assert_eq!(status(sys::cuGraphLaunch(wild.cast(), stream.cu_stream())), 1);
        assert_eq!(
            status(sys::cuGraphLaunch(graph.cast(), stream.cu_stream())),
            1,
            "a graph is no executable"
        );
        assert_eq!(status(sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0)), 0);
        assert_eq!(status(sys::cuGraphLaunch(executable, wild.cast())), 400);
        assert_eq!(status(sys::cuGraphDestroy(graph)), 0);
        assert_eq!(status(sys::cuGraphDestroy(graph)), 1);
        assert_eq!(status(sys::cuGraphLaunch(executable, stream.cu_stream())), 0);
        assert_eq!(status(sys::cuGraphExecDestroy(executable)), 0);
        assert_eq!(status(sys::cuGraphExecDestroy(executable)), 1);
        assert_eq!(status(sys::cuGraphLaunch(executable, stream.cu_stream())), 1);
    }
    drop(stream);
    rig.finish();
}

#[test]
fn a_dead_device_captures_nothing_and_gives_all_back() {
    let rig = rig();
    let (stream, memory, at) = zeros(&rig);
    let kernel = rig.load("add_one");
    assert_eq!(begin(&stream, RELAXED), 0);
    add_one(&stream, &kernel, at, 65).unwrap();
    let graph = Executable::new(end(&stream).unwrap());
    assert_eq!(graph.launch(&stream), 0);
    assert_eq!(begin(&stream, RELAXED), 0);
    let other = rig.context.new_stream().unwrap();
    assert_eq!(code(other.synchronize()), 0, "the graph waits for its turn");
    drop(Executable::new(end(&stream).unwrap()));
    assert_eq!(code(stream.synchronize()), 700);
    assert_eq!((begin(&stream, RELAXED), end(&stream)), (700, Err(700)));
    assert_eq!(graph.launch(&stream), 700);
    drop((graph, memory, kernel, other, stream));
    rig.finish_dead();
}

#[test]
fn what_is_forgotten_is_listed() {
    let rig = rig();
    let stream = rig.context.new_stream().unwrap();
    let live = |what: &str| rig.control.live().lines().any(|line| line == what);
    assert_eq!(begin(&stream, RELAXED), 0);
    assert!(live("captures 1"), "{}", rig.control.live());
    let graph = end(&stream).unwrap();
    assert!(live("graphs 1") && !live("captures 1"), "{}", rig.control.live());
    let executable = Executable::new(graph);
    assert!(live("graph executables 1") && !live("graphs 1"), "{}", rig.control.live());
    drop((executable, stream));
    rig.finish();
}
