//! NCCL's entry points: what they compute, refuse and report. Ranks are threads that share the device.

#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod rig;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, sys};
use libloading::os::unix::Library;
use rig::rig;

const SUCCESS: c_int = 0;
const INTERNAL_ERROR: c_int = 3;
const INVALID_ARGUMENT: c_int = 4;
const INVALID_USAGE: c_int = 5;
const REMOTE_ERROR: c_int = 6;
const IN_PROGRESS: c_int = 7;
const INT32: c_int = 2;
const FLOAT32: c_int = 7;
const SUM: c_int = 0;

type Comm = u64;

#[derive(Clone, Copy)]
#[repr(C)]
struct Id([u8; 128]);

/// `ncclConfig_t` of 2.17.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    numbers: [c_int; 4],
    net_name: *const c_char,
}

impl Config {
    fn new(blocking: c_int) -> Self {
        let numbers = [blocking, i32::MIN, i32::MIN, i32::MIN];
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: 21_700,
            numbers,
            net_name: std::ptr::null(),
        }
    }
}

type AllReduce = unsafe extern "C" fn(u64, u64, usize, c_int, c_int, Comm, *mut c_void) -> c_int;

/// The functions under test.
#[derive(Clone, Copy)]
struct Nccl {
    id: unsafe extern "C" fn(*mut Id) -> c_int,
    init: unsafe extern "C" fn(*mut Comm, c_int, Id, c_int, *const Config) -> c_int,
    state: unsafe extern "C" fn(Comm, *mut c_int) -> c_int,
    all_reduce: AllReduce,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
    destroy: unsafe extern "C" fn(Comm) -> c_int,
    abort: unsafe extern "C" fn(Comm) -> c_int,
    text: unsafe extern "C" fn(c_int) -> *const c_char,
}

fn nccl() -> Nccl {
    rig::control();
    // SAFETY: the library is loaded already, and has no initializers.
    let library = unsafe { Library::new(fp8_cuda_sim::library_path().unwrap()) }.unwrap();
    macro_rules! function {
        ($name:literal) => {
            // SAFETY: the types are those of `nccl.h`; the library is never unloaded.
            *unsafe { library.get($name) }.unwrap()
        };
    }
    let nccl = Nccl {
        id: function!(b"ncclGetUniqueId\0"),
        init: function!(b"ncclCommInitRankConfig\0"),
        state: function!(b"ncclCommGetAsyncError\0"),
        all_reduce: function!(b"ncclAllReduce\0"),
        group_start: function!(b"ncclGroupStart\0"),
        group_end: function!(b"ncclGroupEnd\0"),
        destroy: function!(b"ncclCommDestroy\0"),
        abort: function!(b"ncclCommAbort\0"),
        text: function!(b"ncclGetErrorString\0"),
    };
    std::mem::forget(library);
    nccl
}

impl Nccl {
    fn id(&self) -> Id {
        let mut id = Id([0; 128]);
        // SAFETY: the id lives through the call.
        assert_eq!(unsafe { (self.id)(&mut id) }, SUCCESS);
        id
    }

    fn init(&self, id: Id, rank: c_int, ranks: c_int, config: &Config) -> (c_int, Comm) {
        let mut comm = 0;
        // SAFETY: handle and configuration live through the call.
        let status = unsafe { (self.init)(&mut comm, ranks, id, rank, config) };
        (status, comm)
    }

    fn state(&self, comm: Comm) -> c_int {
        let mut state = -1;
        // SAFETY: the state lives through the call.
        match unsafe { (self.state)(comm, &mut state) } {
            SUCCESS => state,
            status => status,
        }
    }

    /// The state once nothing is in progress.
    fn settle(&self, comm: Comm) -> c_int {
        loop {
            match self.state(comm) {
                IN_PROGRESS => thread::sleep(Duration::from_micros(100)),
                state => return state,
            }
        }
    }

    fn sum(&self, place: u64, count: usize, dtype: c_int, comm: Comm, stream: &CudaStream) -> c_int {
        // SAFETY: the simulator checks every access.
        unsafe { (self.all_reduce)(place, place, count, dtype, SUM, comm, stream.cu_stream().cast()) }
    }

    fn destroy(&self, comm: Comm) -> c_int {
        // SAFETY: any handle may be given.
        unsafe { (self.destroy)(comm) }
    }

    /// Returns the sums and destroys this rank's communicator.
    fn leave_with(&self, x: &CudaSlice<f32>, comm: Comm, stream: &Arc<CudaStream>) -> Vec<f32> {
        let sums = stream.clone_dtoh(x).unwrap();
        assert_eq!(self.destroy(comm), SUCCESS);
        sums
    }

    fn abort(&self, comm: Comm) -> c_int {
        // SAFETY: any handle may be given.
        unsafe { (self.abort)(comm) }
    }
}

/// Runs `f` as each rank of a new communicator, with a stream of its own.
fn ranks<T: Send>(
    context: &Arc<CudaContext>,
    blocking: c_int,
    ranks: c_int,
    f: impl Fn(Nccl, c_int, (c_int, Comm), Arc<CudaStream>) -> T + Sync,
) -> Vec<T> {
    let nccl = nccl();
    let id = nccl.id();
    thread::scope(|scope| {
        let f = &f;
        let run = |rank| {
            scope.spawn(move || {
                context.bind_to_thread().unwrap();
                let stream = context.new_stream().unwrap();
                f(nccl, rank, nccl.init(id, rank, ranks, &Config::new(blocking)), stream)
            })
        };
        let threads: Vec<_> = (0..ranks).map(run).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn blocking_communicators_sum() {
    for seed in ["0", "1", "9"] {
        let rig = rig();
        rig.control.set("seed", seed).unwrap();
        rig.control.set("nccl_shared", "1").unwrap();
        let sums = ranks(&rig.context, 1, 3, |nccl, rank, (status, comm), stream| {
            assert_eq!(status, SUCCESS);
            let x = stream.clone_htod(&[rank as f32, 1.0]).unwrap();
            let place = cudarc::driver::DevicePtr::device_ptr(&x, &stream).0;
            assert_eq!(nccl.sum(place, 2, FLOAT32, comm, &stream), SUCCESS);
            nccl.leave_with(&x, comm, &stream)
        });
        assert_eq!(sums, vec![vec![3.0, 3.0]; 3]);
        rig.finish();
    }
}

#[test]
fn communicators_that_do_not_block_are_asked_for_their_state() {
    let rig = rig();
    rig.control.set("nccl_shared", "1").unwrap();
    let sums = ranks(&rig.context, 0, 2, |nccl, _, (status, comm), stream| {
        assert_eq!((status, nccl.settle(comm)), (IN_PROGRESS, SUCCESS));
        let x = stream.clone_htod(&[1.0f32]).unwrap();
        let place = cudarc::driver::DevicePtr::device_ptr(&x, &stream).0;
        assert_eq!(nccl.sum(place, 1, FLOAT32, comm, &stream), IN_PROGRESS);
        assert_eq!(nccl.sum(place, 1, FLOAT32, comm, &stream), INVALID_USAGE, "the first was not asked for");
        assert_eq!(nccl.settle(comm), SUCCESS);
        nccl.leave_with(&x, comm, &stream)
    });
    assert_eq!(sums, vec![vec![2.0]; 2]);
    rig.finish();
}

#[test]
fn two_ranks_on_one_device_are_refused() {
    let rig = rig();
    rig.control.set("nccl_shared", "0").unwrap();
    let statuses = ranks(&rig.context, 1, 2, |_, _, (status, comm), _| (status, comm));
    assert_eq!(statuses, [(INVALID_USAGE, 0); 2]);
    rig.finish();
}

#[test]
fn counts_that_differ_are_reported_and_do_not_hang() {
    let rig = rig();
    rig.control.set("nccl_shared", "1").unwrap();
    let started = Instant::now();
    ranks(&rig.context, 1, 2, |nccl, rank, (_, comm), stream| {
        let x = stream.clone_htod(&[1.0f32; 4]).unwrap();
        let place = cudarc::driver::DevicePtr::device_ptr(&x, &stream).0;
        assert_eq!(nccl.sum(place, 3 + rank as usize, FLOAT32, comm, &stream), SUCCESS);
        stream.synchronize().unwrap();
        assert_eq!(nccl.state(comm), INVALID_USAGE);
        assert_eq!(nccl.abort(comm), SUCCESS);
    });
    assert!(started.elapsed() < Duration::from_secs(5));
    rig.finish();
}

#[test]
fn an_abort_frees_a_stream_whose_other_rank_never_comes() {
    let rig = rig();
    rig.control.set("nccl_shared", "1").unwrap();
    ranks(&rig.context, 1, 2, |nccl, rank, (_, comm), stream| {
        if rank == 1 {
            thread::sleep(Duration::from_millis(50));
            assert_eq!(nccl.abort(comm), SUCCESS);
            return;
        }
        let x = stream.clone_htod(&[1.0f32; 4]).unwrap();
        let place = cudarc::driver::DevicePtr::device_ptr(&x, &stream).0;
        assert_eq!(nccl.sum(place, 4, FLOAT32, comm, &stream), SUCCESS);
        // SAFETY: the stream is alive.
        let query = || unsafe { sys::cuStreamQuery(stream.cu_stream()) };
        while nccl.state(comm) == SUCCESS {
            assert_eq!(query(), sys::CUresult::CUDA_ERROR_NOT_READY);
            thread::yield_now();
        }
        assert_eq!(nccl.state(comm), REMOTE_ERROR);
        assert_eq!(
            query(),
            sys::CUresult::CUDA_ERROR_NOT_READY,
            "as on hardware: it waits for its own abort"
        );
        assert_eq!(nccl.abort(comm), SUCCESS);
        stream.synchronize().unwrap();
    });
    rig.finish();
}

#[test]
fn arguments_are_checked() {
    let rig = rig();
    let (nccl, stream) = (nccl(), rig.context.new_stream().unwrap());
    let id = nccl.id();
    let refused = |id, rank, ranks, config: &Config| nccl.init(id, rank, ranks, config).0;
    assert_eq!(refused(id, 2, 2, &Config::new(0)), INVALID_ARGUMENT);
    assert_eq!(refused(id, -1, 2, &Config::new(0)), INVALID_ARGUMENT);
    assert_eq!(refused(id, 0, 1, &Config::new(2)), INVALID_ARGUMENT);
    assert_eq!(refused(id, 0, 1, &Config { magic: 0, ..Config::new(0) }), INVALID_ARGUMENT);
    assert_eq!(refused(Id([0; 128]), 0, 1, &Config::new(0)), INVALID_ARGUMENT);
    assert_eq!([nccl.state(77), nccl.destroy(77), nccl.abort(77)], [INVALID_ARGUMENT; 3]);
    // SAFETY: takes nothing.
    assert_eq!(unsafe { (nccl.group_end)() }, INVALID_USAGE);

    let (status, comm) = nccl.init(id, 0, 1, &Config::new(1));
    assert_eq!(status, SUCCESS);
    let x = stream.clone_htod(&[1.0f32]).unwrap();
    let place = cudarc::driver::DevicePtr::device_ptr(&x, &stream).0;
    assert_eq!(nccl.sum(place, 1, 99, comm, &stream), INVALID_ARGUMENT);
    assert_eq!(nccl.sum(place, 1, INT32, comm, &stream), INTERNAL_ERROR, "not simulated");
    assert!(rig.control.live().contains("communicators 1\n"), "{}", rig.control.live());
    assert_eq!(nccl.destroy(comm), SUCCESS);
    // SAFETY: takes any integer.
    let text = unsafe { (nccl.text)(INVALID_USAGE) };
    // SAFETY: a text of the library.
    let text = unsafe { CStr::from_ptr(text) };
    assert_eq!(text.to_str(), Ok("invalid usage"));
    drop((x, stream));
    rig.finish();
}

#[test]
fn calls_fail_as_planned() {
    let rig = rig();
    let nccl = nccl();
    rig.control.fail("ncclCommInitRankConfig", 2, REMOTE_ERROR).unwrap();
    let (status, comm) = nccl.init(nccl.id(), 0, 1, &Config::new(1));
    assert_eq!(status, SUCCESS);
    assert_eq!(nccl.init(nccl.id(), 0, 1, &Config::new(1)), (REMOTE_ERROR, 0));
    assert_eq!(nccl.destroy(comm), SUCCESS);
    assert_eq!(rig.control.calls()["ncclCommInitRankConfig"], 2);
    rig.finish();
}

#[test]
fn of_a_group_in_which_a_call_failed_nothing_is_launched() {
    let rig = rig();
    rig.control.set("nccl_shared", "1").unwrap();
    let together = Barrier::new(2);
    let sums = ranks(&rig.context, 0, 2, |nccl, rank, (_, comm), stream| {
        assert_eq!(nccl.settle(comm), SUCCESS);
        let x = stream.clone_htod(&[1.0f32]).unwrap();
        let place = cudarc::driver::DevicePtr::device_ptr(&x, &stream).0;
        if rank == 0 {
            rig.control.fail("ncclAllReduce", 2, INTERNAL_ERROR).unwrap();
            // SAFETY: takes nothing.
            assert_eq!(unsafe { (nccl.group_start)() }, SUCCESS);
            assert_eq!(nccl.sum(place, 1, FLOAT32, comm, &stream), SUCCESS);
            assert_eq!(nccl.state(comm), IN_PROGRESS);
            assert_eq!(nccl.sum(place, 1, FLOAT32, comm, &stream), INTERNAL_ERROR);
            // SAFETY: takes nothing.
            assert_eq!(unsafe { (nccl.group_end)() }, INTERNAL_ERROR);
            assert_eq!(nccl.settle(comm), SUCCESS);
            stream.synchronize().unwrap(); // the other rank has called nothing
        }
        together.wait();
        assert_eq!(nccl.sum(place, 1, FLOAT32, comm, &stream), IN_PROGRESS);
        assert_eq!(nccl.settle(comm), SUCCESS);
        nccl.leave_with(&x, comm, &stream)
    });
    assert_eq!(sums, vec![vec![2.0]; 2]);
    rig.finish();
}

#[test]
fn a_graph_holds_the_communicator() {
    let rig = rig();
    rig.control.set("nccl_shared", "1").unwrap();
    ranks(&rig.context, 1, 2, |nccl, _, (status, comm), stream| {
        assert_eq!(status, SUCCESS);
        let x = stream.clone_htod(&[1.0f32]).unwrap();
        let place = cudarc::driver::DevicePtr::device_ptr(&x, &stream).0;
        stream.synchronize().unwrap();
        stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
        assert_eq!(nccl.sum(place, 1, FLOAT32, comm, &stream), SUCCESS);
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream is alive and in capture, the handle lives through the call.
        let ended = unsafe { sys::cuStreamEndCapture(stream.cu_stream(), &mut graph) };
        ended.result().unwrap();
        thread::scope(|scope| {
            let destroyed = scope.spawn(|| nccl.destroy(comm));
            thread::sleep(Duration::from_millis(50));
            assert!(!destroyed.is_finished());
            // SAFETY: destroyed once.
            unsafe { sys::cuGraphDestroy(graph) }.result().unwrap();
            assert_eq!(destroyed.join().unwrap(), SUCCESS);
        });
    });
    rig.finish();
}
