//! One simulated device per test: tests of a binary take turns, and each ends with nothing live.

#![allow(dead_code, reason = "every test binary uses a part")]
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a failed step is a failed test")]

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use cudarc::driver::{CudaContext, CudaFunction, CudaStream, DriverError, LaunchConfig, PushKernelArg, sys};
use cudarc::nvrtc::Ptx;
use fp8_cuda_sim::Control;

pub(crate) const PTX: &str = include_str!("kernels.ptx");

static TURN: Mutex<()> = Mutex::new(());

/// The right to use the device, with its control and a context.
pub(crate) struct Rig {
    pub(crate) control: Control,
    pub(crate) context: Arc<CudaContext>,
    _turn: MutexGuard<'static, ()>,
}

/// Loads the library before cudarc looks for one.
pub(crate) fn control() -> Control {
    static CONTROL: OnceLock<Control> = OnceLock::new();
    *CONTROL.get_or_init(|| {
        let path = fp8_cuda_sim::library_path().expect("the library lies beside the test");
        Control::open(&path).unwrap()
    })
}

/// Takes the turn without a context, in the default settings.
pub(crate) fn turn() -> (Control, MutexGuard<'static, ()>) {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let control = control();
    for (key, value) in [
        ("clear_fail", ""),
        ("reset_calls", ""),
        ("seed", "0"),
        ("eager", "0"),
        ("memory_limit", "2147483648"),
        ("sm_count", "4"),
        ("reset", ""),
        ("arch", "90"),
        ("cublas", "130100"),
    ] {
        control.set(key, value).unwrap();
    }
    (control, turn)
}

pub(crate) fn rig() -> Rig {
    let (control, turn) = turn();
    rig_on(control, turn)
}

/// With a context on the device as it was set since the turn was taken.
pub(crate) fn rig_on(control: Control, turn: MutexGuard<'static, ()>) -> Rig {
    let context = CudaContext::new(0).unwrap();
    // SAFETY: the tests order their streams themselves; that is what they are about.
    unsafe { context.disable_event_tracking() };
    Rig { control, context, _turn: turn }
}

impl Rig {
    pub(crate) fn load(&self, name: &str) -> CudaFunction {
        let module = self.context.load_module(Ptx::from_src(PTX)).unwrap();
        module.load_function(name).unwrap()
    }

    /// Everything a test made is dropped: nothing may live.
    pub(crate) fn finish(self) {
        let Self { control, context, _turn } = self;
        context.synchronize().unwrap();
        drop(context);
        assert_eq!(control.live(), "");
        assert_eq!(control.reports(), "");
    }

    /// As `finish`, for a device that an error killed.
    pub(crate) fn finish_dead(self) {
        let Self { control, context, _turn } = self;
        drop(context);
        assert_eq!(control.live(), "");
        control.reset().unwrap();
    }
}

pub(crate) fn code<T>(result: Result<T, DriverError>) -> u32 {
    result.err().map_or(0, |error| error.0 as u32)
}

pub(crate) fn shape(blocks: u32, threads: u32) -> LaunchConfig {
    LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (threads, 1, 1), shared_mem_bytes: 0 }
}

/// Enqueues `add_one` over `count` words at `address`.
pub(crate) fn add_one(
    stream: &CudaStream,
    kernel: &CudaFunction,
    address: u64,
    count: u32,
) -> Result<(), DriverError> {
    // SAFETY: the simulator checks every access; a wrong address is a report.
    unsafe { stream.launch_builder(kernel).arg(&address).arg(&count).launch(shape(count.div_ceil(64), 64)) }
        .map(|_| ())
}

/// A function of the library that cudarc's safe layer does not reach.
pub(crate) fn status(status: sys::CUresult) -> u32 {
    status as u32
}
