//! The frame around every entry point: lock, call count, fault injection, state checks, no unwinding.

use core::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::code::{Code, Outcome};
use crate::state::{self, Driver};

/// The conditions that must hold before the body of an entry point runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Needs {
    /// Nothing: `cuInit`, versions, error texts and all of NVRTC.
    Nothing,
    /// `cuInit` was called. CUDA Driver API, CUDA_ERROR_NOT_INITIALIZED: "the CUDA driver has not been
    /// initialized with cuInit or that initialization has failed".
    Init,
    /// A live context is current on this thread and no error has killed it.
    Context,
    /// As `Context`, for calls that release something: in a dead context they release it and report the error.
    Release,
}

/// Declares a file's entry points: each `Needs fn name(arguments) |driver| { body }` becomes an exported C
/// function, and all names together the file's `NAMES`.
macro_rules! entries {
    ($($needs:ident fn $name:ident($($argument:ident: $type:ty),* $(,)?) |$driver:pat_param| $body:block)*) => {
        /// Names of the entry points in this file.
        #[cfg(test)]
        pub(crate) const NAMES: &[&str] = &[$(stringify!($name)),*];
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($argument: $type),*) -> core::ffi::c_int {
                $crate::entry::call(stringify!($name), $crate::entry::Needs::$needs, |$driver| $body)
            }
        )*
    };
}
pub(crate) use entries;

/// The time for which the lock is free before a stalled call tries again.
const STALL: std::time::Duration = std::time::Duration::from_micros(200);

fn attempt(needs: Needs, body: &mut impl FnMut(&mut Driver) -> Outcome) -> Outcome {
    let mut driver = state::driver();
    match needs {
        Needs::Nothing => body(&mut driver),
        Needs::Init => {
            driver.expect_started()?;
            body(&mut driver)
        }
        Needs::Context => {
            driver.expect_current()?;
            driver.expect_healthy()?;
            body(&mut driver)
        }
        Needs::Release => {
            driver.expect_current()?;
            let outcome = body(&mut driver);
            if outcome != Err(Code::STALLED) {
                driver.expect_healthy()?;
            }
            outcome
        }
    }
}

/// Runs one entry point's body under the lock and turns its outcome into the C status.
///
/// A body that waits for another rank of a communicator ([`Code::STALLED`]) runs again, once the lock was free for a
/// while: so bodies drive the device before they change anything.
pub(crate) fn call(name: &'static str, needs: Needs, mut body: impl FnMut(&mut Driver) -> Outcome) -> c_int {
    // A panic must not cross the C interface. The lock is released by unwinding and cannot be poisoned.
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        {
            let mut driver = state::driver();
            driver.calls.count(name);
            if let Some(code) = driver.calls.injected(name) {
                return Err(code);
            }
        }
        loop {
            match attempt(needs, &mut body) {
                Err(Code::STALLED) => std::thread::sleep(STALL),
                outcome => return outcome,
            }
        }
    }));
    if let Ok(Err(code)) = outcome {
        crate::nccl::heed(name, code);
    }
    match outcome {
        Ok(Ok(())) => 0,
        Ok(Err(Code(number))) => number,
        Err(_) => {
            crate::report::print(&format!(
                "{name}: the simulated driver panicked; this is a defect of the simulator"
            ));
            match name {
                name if name.starts_with("nvrtc") => Code::NVRTC_INTERNAL_ERROR.0,
                name if name.starts_with("cublas") => Code::BLAS_INTERNAL_ERROR.0,
                name if name.starts_with("cudnn") => Code::DNN_INTERNAL_ERROR.0,
                name if name.starts_with("nccl") => Code::NCCL_INTERNAL_ERROR.0,
                _ => Code::UNKNOWN.0,
            }
        }
    }
}
