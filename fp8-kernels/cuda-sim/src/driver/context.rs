//! The primary context and which context is current on a thread.

use core::ffi::{c_int, c_uint};

use crate::code::Code;
use crate::context::Context;
use crate::driver::devices::{DEVICE, expect_device};
use crate::entry::entries;
use crate::ffi::Out;
use crate::queue::Until;
use crate::state::{CONTEXT, with_current};

entries! {
    Init fn cuDevicePrimaryCtxRetain(context: Out<u64>, device: c_int) |driver| {
        let context = context.checked()?;
        expect_device(device)?;
        driver.expect_healthy()?;
        driver.retained += 1;
        driver.context.get_or_insert_with(Context::new);
        context.set(CONTEXT)
    }

    // CUDA Driver API, cuDevicePrimaryCtxRelease: "The context is automatically reset once the last reference to it is
    // released"; a release without a retain is CUDA_ERROR_INVALID_CONTEXT.
    Init fn cuDevicePrimaryCtxRelease_v2(device: c_int) |driver| {
        expect_device(device)?;
        driver.retained = driver.retained.checked_sub(1).ok_or(Code::INVALID_CONTEXT)?;
        if driver.retained == 0 {
            driver.release_context()?;
        }
        driver.expect_healthy()
    }

    // CUDA Driver API, cuCtxGetCurrent: "If no context is bound to the calling CPU thread then *pctx is set to NULL and
    // CUDA_SUCCESS is returned."
    Init fn cuCtxGetCurrent(context: Out<u64>) |_| {
        context.set(with_current(|stack| stack.last().copied().unwrap_or(0)))
    }

    // CUDA Driver API, cuCtxSetCurrent: "If ctx is NULL then the CUDA context previously bound to the calling CPU thread
    // is unbound". Another handle is CUDA_ERROR_INVALID_CONTEXT: "the context passed to the API call is not a valid
    // handle".
    Init fn cuCtxSetCurrent(context: u64) |_| {
        if context != 0 && context != CONTEXT {
            return Err(Code::INVALID_CONTEXT);
        }
        with_current(|stack| {
            stack.pop();
            if context != 0 {
                stack.push(context);
            }
        });
        Ok(())
    }

    Init fn cuCtxPushCurrent_v2(context: u64) |_| {
        // As cuCtxSetCurrent, for a handle that is none.
        if context != CONTEXT {
            return Err(Code::INVALID_CONTEXT);
        }
        with_current(|stack| stack.push(context));
        Ok(())
    }

    // CUDA Driver API, cuCtxPopCurrent: returns CUDA_ERROR_INVALID_CONTEXT, here where the thread has none.
    Init fn cuCtxPopCurrent_v2(context: Out<u64>) |_| {
        let popped = with_current(Vec::pop).ok_or(Code::INVALID_CONTEXT)?;
        context.set_if_wanted(popped);
        Ok(())
    }

    Context fn cuCtxGetDevice(device: Out<c_int>) |_| {
        device.set(DEVICE)
    }

    Context fn cuCtxSynchronize() |driver| {
        driver.context()?.captures.expect_none()?;
        driver.drive(Until::Everything)
    }

    // How a waiting host thread spends its time: nothing here waits.
    Context fn cuCtxSetFlags(_flags: c_uint) |_| { Ok(()) }

    Context fn cuCtxGetStreamPriorityRange(least: Out<c_int>, greatest: Out<c_int>) |_| {
        // CUDA Driver API, cuCtxGetStreamPriorityRange: "A NULL may be passed in for leastPriority or greatestPriority if
        // the value is not desired."
        least.set_if_wanted(0);
        greatest.set_if_wanted(-5);
        Ok(())
    }
}
