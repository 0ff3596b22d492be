//! Stream capture and graphs: what is captured runs at each launch and not before, and every misuse has its code.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]
#![expect(
    clippy::multiple_unsafe_ops_per_block,
    reason = "calls of the C interface, one after another under one contract"
)]

mod memory;
mod misuse;
#[path = "../rig/mod.rs"]
mod rig;

use std::ptr::null_mut;

use cudarc::driver::sys::{self, CUstreamCaptureMode as Mode};
use cudarc::driver::{CudaFunction, CudaSlice, CudaStream, DevicePtr, PushKernelArg, result};
use rig::{Rig, add_one, code, rig, shape, status};

const SEEDS: u64 = 12;
const GLOBAL: Mode = Mode::CU_STREAM_CAPTURE_MODE_GLOBAL;
const THREAD_LOCAL: Mode = Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
const RELAXED: Mode = Mode::CU_STREAM_CAPTURE_MODE_RELAXED;

fn begin(stream: &CudaStream, mode: Mode) -> u32 {
    // SAFETY: the stream is alive.
    status(unsafe { sys::cuStreamBeginCapture_v2(stream.cu_stream(), mode) })
}

fn end(stream: &CudaStream) -> Result<sys::CUgraph, u32> {
    let mut graph = null_mut();
    // SAFETY: the stream is alive, the handle lives through the call.
    match status(unsafe { sys::cuStreamEndCapture(stream.cu_stream(), &mut graph) }) {
        0 => Ok(graph),
        code => Err(code),
    }
}

/// `CUstreamCaptureStatus`.
fn capturing(stream: &CudaStream) -> u32 {
    stream.capture_status().unwrap() as u32
}

/// An executable graph, destroyed at the end.
struct Executable(sys::CUgraphExec);

impl Executable {
    /// Takes the graph.
    fn new(graph: sys::CUgraph) -> Self {
        let mut executable = null_mut();
        // SAFETY: the graph was just captured and is destroyed once; the handle lives through the call.
        unsafe {
            assert_eq!(status(sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0)), 0);
            assert_eq!(status(sys::cuGraphDestroy(graph)), 0);
        }
        Self(executable)
    }

    fn launch(&self, stream: &CudaStream) -> u32 {
        // SAFETY: both are alive.
        status(unsafe { sys::cuGraphLaunch(self.0, stream.cu_stream()) })
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        // SAFETY: destroyed once.
        unsafe { sys::cuGraphExecDestroy(self.0) };
    }
}

fn address(slice: &CudaSlice<u32>, stream: &CudaStream) -> u64 {
    slice.device_ptr(stream).0
}

/// Enqueues `copy_words` of 64 words.
fn copy_words(stream: &CudaStream, kernel: &CudaFunction, to: u64, from: u64) {
    let count = 64u32;
    // SAFETY: the simulator checks every access; a wrong address is a report.
    unsafe { stream.launch_builder(kernel).arg(&to).arg(&from).arg(&count).launch(shape(1, 64)) }.unwrap();
}

/// 64 zeros, and a stream that has nothing to do any more.
fn zeros(rig: &Rig) -> (std::sync::Arc<CudaStream>, CudaSlice<u32>, u64) {
    let stream = rig.context.new_stream().unwrap();
    let memory = stream.alloc_zeros::<u32>(64).unwrap();
    stream.synchronize().unwrap();
    let at = address(&memory, &stream);
    (stream, memory, at)
}

#[test]
fn what_is_captured_runs_at_each_launch_and_not_before() {
    let rig = rig();
    for seed in 0..SEEDS {
        rig.control.set("seed", &seed.to_string()).unwrap();
        let (stream, mut memory, at) = zeros(&rig);
        let kernel = rig.load("add_one");
        assert_eq!((begin(&stream, RELAXED), capturing(&stream)), (0, 1));
        add_one(&stream, &kernel, at, 64).unwrap();
        add_one(&stream, &kernel, at, 32).unwrap();
        let graph = Executable::new(end(&stream).unwrap());
        assert_eq!((capturing(&stream), stream.clone_dtoh(&memory).unwrap()), (0, vec![0; 64]));

        let expected = |start: u32| -> Vec<u32> { (0..64).map(|i| start + 1 + u32::from(i < 32)).collect() };
        assert_eq!(graph.launch(&stream), 0);
        assert_eq!(stream.clone_dtoh(&memory).unwrap(), expected(0));
        stream.memcpy_htod(&[10; 64], &mut memory).unwrap();
        assert_eq!(graph.launch(&stream), 0);
        assert_eq!(stream.clone_dtoh(&memory).unwrap(), expected(10));
        // Several in flight, between other work.
        add_one(&stream, &kernel, at, 64).unwrap();
        assert_eq!((graph.launch(&stream), graph.launch(&stream)), (0, 0));
        let [first, last] = [0, 63].map(|i| expected(10)[i]);
        let found = stream.clone_dtoh(&memory).unwrap();
        assert_eq!((found[0], found[63]), (first + 1 + 4, last + 1 + 2));
    }
    rig.finish();
}

#[test]
fn a_launch_has_its_streams_order_and_no_other() {
    let rig = rig();
    let mut wrong = 0;
    for (seed, joined) in (0..24).flat_map(|seed| [(seed, true), (seed, false)]) {
        rig.control.set("seed", &seed.to_string()).unwrap();
        let (stream, memory, at) = zeros(&rig);
        let (count, copy) = (rig.load("add_one"), rig.load("copy_words"));
        let consumer = rig.context.new_stream().unwrap();
        let target = consumer.alloc_zeros::<u32>(64).unwrap();
        assert_eq!(begin(&stream, GLOBAL), 0);
        add_one(&stream, &count, at, 64).unwrap();
        add_one(&stream, &count, at, 64).unwrap();
        let graph = Executable::new(end(&stream).unwrap());
        assert_eq!(graph.launch(&stream), 0);
        if joined {
            consumer.join(&stream).unwrap();
        }
        copy_words(&consumer, &copy, address(&target, &consumer), at);
        let found = consumer.clone_dtoh(&target).unwrap();
        stream.synchronize().unwrap();
        assert!(!joined || found == [2; 64], "seed {seed}: {found:?}");
        wrong += u64::from(found != [2; 64]);
        drop(memory);
    }
    assert!(wrong >= 6, "{wrong} of 24 seeds show the missing wait");
    rig.finish();
}

#[test]
fn a_stream_in_capture_is_neither_waited_for_nor_asked() {
    type Ask = fn(&Rig, &CudaStream, u64) -> u32;
    let asks: [(&str, Ask); 4] = [
        ("synchronize", |_, stream, _| code(stream.synchronize())),
        // SAFETY: the stream is alive.
        ("query", |_, stream, _| status(unsafe { sys::cuStreamQuery(stream.cu_stream()) })),
        ("the context", |rig, _, _| code(rig.context.synchronize())),
        ("a download to pageable memory", |_, stream, at| {
            let mut host = [0u32; 64];
            // SAFETY: refused, so that nothing is written.
            code(unsafe { result::memcpy_dtoh_async(&mut host, at, stream.cu_stream()) })
        }),
    ];
    let rig = rig();
    let kernel = rig.load("add_one");
    for (what, ask) in asks {
        let (stream, memory, at) = zeros(&rig);
        assert_eq!(begin(&stream, RELAXED), 0);
        add_one(&stream, &kernel, at, 64).unwrap();
        assert_eq!(ask(&rig, &stream, at), 900, "{what}");
        assert_eq!(capturing(&stream), 2, "{what}");
        assert_eq!(code(add_one(&stream, &kernel, at, 64)), 901, "{what}");
        assert_eq!(end(&stream), Err(901), "{what}");
        assert_eq!(capturing(&stream), 0, "{what}");
        add_one(&stream, &kernel, at, 64).unwrap();
        assert_eq!(stream.clone_dtoh(&memory).unwrap(), [1; 64], "{what}: the stream works on");
    }
    drop(kernel);
    rig.finish();
}

#[test]
fn a_captured_event_is_neither_waited_for_nor_asked() {
    let rig = rig();
    let kernel = rig.load("add_one");
    for waits in [true, false] {
        let (stream, memory, at) = zeros(&rig);
        let event = rig.context.new_event(None).unwrap();
        assert_eq!(begin(&stream, RELAXED), 0);
        event.record(&stream).unwrap();
        // SAFETY: the event is alive.
        let found = unsafe {
            match waits {
                true => sys::cuEventSynchronize(event.cu_event()),
                false => sys::cuEventQuery(event.cu_event()),
            }
        };
        assert_eq!((status(found), end(&stream)), (907, Err(901)));
        // Outside the capture it is an event as any other.
        add_one(&stream, &kernel, at, 64).unwrap();
        event.record(&stream).unwrap();
        event.synchronize().unwrap();
        assert_eq!(stream.clone_dtoh(&memory).unwrap(), [1; 64]);
    }
    drop(kernel);
    rig.finish();
}

#[test]
fn a_fork_must_be_joined() {
    let rig = rig();
    for (seed, joined) in (0..SEEDS).flat_map(|seed| [(seed, true), (seed, false)]) {
        rig.control.set("seed", &seed.to_string()).unwrap();
        let (count, copy) = (rig.load("add_one"), rig.load("copy_words"));
        let (origin, memory, at) = zeros(&rig);
        let (other, twin, to) = zeros(&rig);
        assert_eq!(begin(&origin, GLOBAL), 0);
        add_one(&origin, &count, at, 64).unwrap();
        other.join(&origin).unwrap();
        assert_eq!(capturing(&other), 1);
        copy_words(&other, &copy, to, at);
        assert_eq!(end(&other), Err(903), "the capture began elsewhere");
        if joined {
            origin.join(&other).unwrap();
            add_one(&origin, &count, to, 64).unwrap();
            let graph = Executable::new(end(&origin).unwrap());
            for launch in 1..3 {
                assert_eq!(graph.launch(&origin), 0);
                assert_eq!(origin.clone_dtoh(&twin).unwrap(), [launch + 1; 64], "seed {seed}");
            }
        } else {
            assert_eq!(end(&origin), Err(904));
        }
        assert_eq!((capturing(&origin), capturing(&other)), (0, 0));
        add_one(&other, &count, to, 64).unwrap();
        let expected = if joined { 4 } else { 1 };
        assert_eq!(other.clone_dtoh(&twin).unwrap(), [expected; 64]);
        drop((memory, twin));
    }
    rig.finish();
}

#[test]
fn what_a_join_misses_is_not_joined() {
    let rig = rig();
    let kernel = rig.load("add_one");
    let (origin, memory, at) = zeros(&rig);
    let other = rig.context.new_stream().unwrap();
    assert_eq!(begin(&origin, GLOBAL), 0);
    other.join(&origin).unwrap();
    add_one(&other, &kernel, at, 64).unwrap();
    origin.join(&other).unwrap();
    // Behind the event that the origin waits for.
    add_one(&other, &kernel, at, 64).unwrap();
    assert_eq!(end(&origin), Err(904));
    drop((memory, kernel, origin, other));
    rig.finish();
}

#[test]
fn work_outside_a_capture_is_not_waited_for_inside() {
    let rig = rig();
    let (stream, memory, _) = zeros(&rig);
    let other = rig.context.new_stream().unwrap();
    let event = other.record_event(None).unwrap();
    assert_eq!(begin(&stream, RELAXED), 0);
    assert_eq!(code(stream.wait(&event)), 905);
    assert_eq!(end(&stream), Err(901));
    stream.wait(&event).unwrap();
    stream.synchronize().unwrap();
    drop((memory, event, other, stream));
    rig.finish();
}

#[test]
fn two_captures_are_not_mixed() {
    let rig = rig();
    let (first, second) = (rig.context.new_stream().unwrap(), rig.context.new_stream().unwrap());
    assert_eq!((begin(&first, RELAXED), begin(&second, RELAXED)), (0, 0));
    let event = first.record_event(None).unwrap();
    assert_eq!(code(second.wait(&event)), 905);
    for stream in [&first, &second] {
        if let Ok(graph) = end(stream) {
            drop(Executable::new(graph));
        }
    }
    drop((event, first, second));
    rig.finish();
}

#[test]
fn the_legacy_stream_waits_for_no_capture() {
    type Use = fn(&CudaStream, &CudaFunction, u64) -> u32;
    let uses: [(&str, Use); 4] = [
        ("a launch", |legacy, kernel, at| code(add_one(legacy, kernel, at, 64))),
        ("synchronize", |legacy, _, _| code(legacy.synchronize())),
        // SAFETY: the legacy stream is null.
        ("query", |_, _, _| status(unsafe { sys::cuStreamQuery(null_mut()) })),
        ("an event", |legacy, _, _| code(legacy.record_event(None))),
    ];
    let rig = rig();
    let (legacy, kernel) = (rig.context.default_stream(), rig.load("add_one"));
    let memory = legacy.alloc_zeros::<u32>(64).unwrap();
    legacy.synchronize().unwrap();
    let at = address(&memory, &legacy);
    for (flags, expected) in [(0, 906), (1, 0)] {
        for (what, attempt) in uses {
            let (mut stream, mut graph) = (null_mut(), null_mut());
            // SAFETY: handles live through the calls and are destroyed once.
            unsafe {
                assert_eq!(status(sys::cuStreamCreate(&mut stream, flags)), 0);
                assert_eq!(status(sys::cuStreamBeginCapture_v2(stream, RELAXED)), 0);
                assert_eq!(attempt(&legacy, &kernel, at), expected, "{what}, flags {flags}");
                let ended = status(sys::cuStreamEndCapture(stream, &mut graph));
                assert_eq!(ended, if expected == 0 { 0 } else { 901 }, "{what}, flags {flags}");
                assert_eq!(graph.is_null(), expected != 0);
                if !graph.is_null() {
                    assert_eq!(status(sys::cuGraphDestroy(graph)), 0);
                }
                assert_eq!(status(sys::cuStreamDestroy_v2(stream)), 0);
            }
        }
    }
    drop((memory, kernel, legacy));
    rig.finish();
}

#[test]
fn another_thread_ends_a_relaxed_capture_only() {
    let rig = rig();
    let stream = rig.context.new_stream().unwrap();
    let elsewhere = || {
        let (context, stream) = (rig.context.clone(), stream.clone());
        let thread = std::thread::spawn(move || {
            context.bind_to_thread().unwrap();
            end(&stream).map(|graph| drop(Executable::new(graph)))
        });
        thread.join().unwrap()
    };
    for mode in [GLOBAL, THREAD_LOCAL] {
        assert_eq!(begin(&stream, mode), 0);
        assert_eq!(elsewhere(), Err(908));
        assert_eq!(capturing(&stream), 1, "it can still be ended where it began");
        drop(Executable::new(end(&stream).unwrap()));
    }
    assert_eq!(begin(&stream, RELAXED), 0);
    assert_eq!(elsewhere(), Ok(()));
    drop(stream);
    rig.finish();
}

/// Asks for memory in a way that may wait for the device.
fn allocate() -> u32 {
    // SAFETY: freed at once if it came.
    unsafe {
        match result::malloc_sync(64) {
            Ok(address) => code(result::free_sync(address)),
            Err(error) => error.0 as u32,
        }
    }
}

#[test]
fn the_mode_says_who_may_wait_for_the_device() {
    let rig = rig();
    let stream = rig.context.new_stream().unwrap();
    let elsewhere = || {
        let context = rig.context.clone();
        let thread = std::thread::spawn(move || {
            context.bind_to_thread().unwrap();
            allocate()
        });
        thread.join().unwrap()
    };
    for (mode, [here, there]) in [(GLOBAL, [900, 900]), (THREAD_LOCAL, [900, 0]), (RELAXED, [0, 0])] {
        for (expected, found) in [(here, &allocate as &dyn Fn() -> u32), (there, &elsewhere)] {
            assert_eq!(begin(&stream, mode), 0);
            assert_eq!(found(), expected, "{mode:?}");
            let ended = end(&stream).map(|graph| drop(Executable::new(graph)));
            assert_eq!(ended, if expected == 0 { Ok(()) } else { Err(901) }, "{mode:?}");
        }
    }
    drop(stream);
    rig.finish();
}
