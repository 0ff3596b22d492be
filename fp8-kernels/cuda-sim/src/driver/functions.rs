//! Attributes of functions, and occupancy.

use core::ffi::{c_char, c_int, c_uint};

use crate::code::{Code, Outcome};
use crate::entry::entries;
use crate::ffi::Out;
use crate::state::Driver;

const DYNAMIC_SHARED: c_int = 8;
const CARVEOUT: c_int = 9;

fn occupancy(
    driver: &mut Driver,
    count: Out<c_int>,
    function: u64,
    threads: c_int,
    dynamic: usize,
) -> Outcome {
    let count = count.checked()?;
    let arch = driver.settings.arch;
    let function = driver.context()?.modules.function(function)?;
    // CUDA Driver API, CUDA_ERROR_INVALID_VALUE: a block without threads.
    let threads = u32::try_from(threads).ok().filter(|threads| *threads > 0).ok_or(Code::INVALID_VALUE)?;
    let blocks = function.blocks_per_sm(arch, threads, dynamic as u64);
    count.set(c_int::try_from(blocks).unwrap_or(c_int::MAX))
}

entries! {
    Context fn cuFuncGetAttribute(value: Out<c_int>, attribute: c_int, function: u64) |driver| {
        let value = value.checked()?;
        let function = driver.context()?.modules.function(function)?;
        let found = match attribute {
            0 => function.thread_limit(),
            1 => function.static_shared,
            2 => 0, // constants
            3 => function.local,
            4 => function.registers(),
            5 => function.version,
            6 => function.target,
            7 => 0, // CU_FUNC_ATTRIBUTE_CACHE_MODE_CA
            DYNAMIC_SHARED => function.dynamic_limit,
            CARVEOUT => return value.set(-1),
            10..=15 => 0, // clusters
            // CUDA Driver API, cuFuncGetAttribute: returns CUDA_ERROR_INVALID_VALUE.
            _ => return Err(Code::INVALID_VALUE),
        };
        value.set(c_int::try_from(found).unwrap_or(c_int::MAX))
    }

    // CUDA Driver API, cuFuncSetAttribute, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: "The sum of this value and
    // the function attribute CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES cannot exceed the device attribute
    // CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"; of the others only the carve-out can be set here.
    Context fn cuFuncSetAttribute(function: u64, attribute: c_int, value: c_int) |driver| {
        let optin = driver.settings.arch.shared_optin();
        let function = driver.context()?.modules.function_mut(function)?;
        match (attribute, u32::try_from(value)) {
            (DYNAMIC_SHARED, Ok(bytes)) if bytes <= optin.saturating_sub(function.static_shared) => {
                function.dynamic_limit = bytes;
                Ok(())
            }
            (CARVEOUT, _) if (-1..=100).contains(&value) => Ok(()),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    Context fn cuFuncGetName(name: Out<*const c_char>, function: u64) |driver| {
        name.set(driver.context()?.modules.function(function)?.name.as_ptr())
    }

    // CUDA Driver API, cuFuncGetParamInfo: returns CUDA_ERROR_INVALID_VALUE for an index behind the last parameter.
    Context fn cuFuncGetParamInfo(function: u64, index: usize, offset: Out<usize>, size: Out<usize>) |driver| {
        let offset = offset.checked()?;
        let function = driver.context()?.modules.function(function)?;
        let (at, bytes) = function.params.get(index).copied().ok_or(Code::INVALID_VALUE)?;
        offset.set(at)?;
        // "paramSize - The size of the parameter in bytes. […] can be NULL".
        size.set_if_wanted(bytes);
        Ok(())
    }

    Context fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        count: Out<c_int>, function: u64, threads: c_int, dynamic: usize,
    ) |driver| {
        occupancy(driver, count, function, threads, dynamic)
    }

    // CUDA Driver API: the flags are CU_OCCUPANCY_DEFAULT and CU_OCCUPANCY_DISABLE_CACHING_OVERRIDE.
    Context fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        count: Out<c_int>, function: u64, threads: c_int, dynamic: usize, flags: c_uint,
    ) |driver| {
        if flags > 1 {
            return Err(Code::INVALID_VALUE);
        }
        occupancy(driver, count, function, threads, dynamic)
    }
}
