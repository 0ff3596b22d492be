//! The device's memory pool.

use core::ffi::c_int;

use crate::code::{Code, Outcome};
use crate::driver::devices::POOL;
use crate::entry::entries;
use crate::ffi::Out;

/// CUDA Driver API, CUDA_ERROR_INVALID_VALUE: cuMemPool… of a handle that is no pool.
pub(crate) fn expect_pool(pool: u64) -> Outcome {
    if pool == POOL { Ok(()) } else { Err(Code::INVALID_VALUE) }
}

entries! {
    Context fn cuMemPoolSetAttribute(pool: u64, attribute: c_int, value: Out<u64>) |driver| {
        expect_pool(pool)?;
        let context = driver.context()?;
        match attribute {
            1..=3 => {
                if let Some(switch) = context.pool_reuse.get_mut(attribute as usize - 1) {
                    *switch = value.cast::<c_int>().value()?;
                }
            }
            4 => context.pool_threshold = value.value()?,
            // CUDA Driver API, cuMemPoolSetAttribute: for the high watermarks, "this value must be zero".
            6 | 8 if value.value()? == 0 => context.blocks.reset_high(),
            _ => return Err(Code::INVALID_VALUE),
        }
        Ok(())
    }

    Context fn cuMemPoolGetAttribute(pool: u64, attribute: c_int, value: Out<u64>) |driver| {
        expect_pool(pool)?;
        let context = driver.context()?;
        match attribute {
            1..=3 => {
                let switch = context.pool_reuse.get(attribute as usize - 1).copied().unwrap_or(1);
                value.cast::<c_int>().set(switch)
            }
            4 => value.set(context.pool_threshold),
            5 | 7 => value.set(context.blocks.used()),
            6 | 8 => value.set(context.blocks.high()),
            // As cuMemPoolSetAttribute.
            _ => Err(Code::INVALID_VALUE),
        }
    }

    // The pool keeps no memory that is not in use.
    Context fn cuMemPoolTrimTo(pool: u64, _keep: usize) |_| {
        expect_pool(pool)
    }
}
