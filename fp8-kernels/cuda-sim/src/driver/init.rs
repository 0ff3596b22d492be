//! Initialization, version, error texts.

use core::ffi::{c_char, c_int, c_uint};

use crate::code::{self, Code};
use crate::entry::entries;
use crate::ffi::Out;
use crate::{control, report};

entries! {
    Nothing fn cuInit(flags: c_uint) |driver| {
        // CUDA Driver API, cuInit: "Currently, the Flags parameter must be 0."
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        if let Some(why) = &mut driver.broken {
            if !why.is_empty() {
                report::print(&format!("cuInit: {}", std::mem::take(why)));
            }
            return Err(Code::UNKNOWN);
        }
        if !driver.started {
            driver.started = true;
            control::watch_exit();
        }
        Ok(())
    }

    Nothing fn cuDriverGetVersion(version: Out<c_int>) |driver| {
        version.set(driver.settings.driver)
    }

    // CUDA Driver API, cuGetErrorName: "If the error code is not recognized, CUDA_ERROR_INVALID_VALUE will be returned
    // and *pStr will be set to the NULL address."
    Nothing fn cuGetErrorName(error: c_int, text: Out<*const c_char>) |_| {
        let known = code::driver_text(error);
        text.set(known.map_or(core::ptr::null(), |(name, _)| name.as_ptr()))?;
        known.map(|_| ()).ok_or(Code::INVALID_VALUE)
    }

    // As cuGetErrorName.
    Nothing fn cuGetErrorString(error: c_int, text: Out<*const c_char>) |_| {
        let known = code::driver_text(error);
        text.set(known.map_or(core::ptr::null(), |(_, text)| text.as_ptr()))?;
        known.map(|_| ()).ok_or(Code::INVALID_VALUE)
    }

    Context fn cuProfilerStart() |_| { Ok(()) }

    Context fn cuProfilerStop() |_| { Ok(()) }
}
