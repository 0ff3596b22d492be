//! Kernel launches. Arguments are copied at the call, by the parameter list that the PTX declares.

use core::ffi::c_uint;

use ptx_interp::splitmix64;

use crate::code::{Code, Outcome};
use crate::device::{BLOCK_LIMITS, GRID_LIMITS, THREADS_PER_BLOCK};
use crate::entry::entries;
use crate::ffi::{Array, Host};
use crate::module::Function;
use crate::state::Driver;
use crate::work::{Launch, Work};

/// Size and place of a launch.
#[derive(Clone, Copy, Debug)]
struct Shape {
    grid: [u32; 3],
    block: [u32; 3],
    dynamic: u32,
    stream: u64,
}

/// `CUlaunchConfig`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Config {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    dynamic: c_uint,
    stream: u64,
    attributes: usize,
    attribute_count: c_uint,
}

fn check(function: &Function, shape: &Shape, optin: u32) -> Outcome {
    // CUDA Driver API, CUDA_ERROR_INVALID_VALUE: "one or more of the parameters […] is not within an acceptable range".
    // The ranges are the device attributes CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X and its kin; an empty grid or block is in
    // none of them.
    let within = |size: [u32; 3], limit: [u32; 3]| {
        size.iter().zip(limit).all(|(size, limit)| (1..=limit).contains(size))
    };
    if !within(shape.grid, GRID_LIMITS) || !within(shape.block, BLOCK_LIMITS) {
        return Err(Code::INVALID_VALUE);
    }
    let threads: u32 = shape.block.iter().product();
    if threads > THREADS_PER_BLOCK {
        return Err(Code::INVALID_VALUE);
    }
    // CUDA Driver API, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: "the kernel launch specifies too many threads for the kernel's
    // register count"; CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: the number of threads "beyond which a launch of the
    // function would fail".
    if threads > function.thread_limit() {
        return Err(Code::LAUNCH_OUT_OF_RESOURCES);
    }
    // CUDA Driver API, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: "If the user-specified dynamic shared memory size
    // is larger than this value, the launch will fail."
    if shape.dynamic > function.dynamic_limit || shape.dynamic.saturating_add(function.static_shared) > optin
    {
        return Err(Code::INVALID_VALUE);
    }
    Ok(())
}

/// CUDA Driver API, cuLaunchKernel: "If f has N parameters, then kernelParams needs to be an array of N pointers";
/// packed arguments (`extra`) are the other way, and both at once are CUDA_ERROR_INVALID_VALUE. Packed ones are not
/// simulated: CUDA_ERROR_NOT_SUPPORTED.
fn arguments(function: &Function, params: Array<usize>, extra: usize) -> Outcome<Vec<u8>> {
    if extra != 0 {
        return Err(if params.is_null() { Code::NOT_SUPPORTED } else { Code::INVALID_VALUE });
    }
    let mut bytes = vec![0; function.params_size];
    for (pointer, (offset, size)) in params.take(function.params.len())?.into_iter().zip(&function.params) {
        let argument = Host::at(pointer).read(*size)?;
        bytes.get_mut(*offset..*offset + *size).ok_or(Code::INVALID_IMAGE)?.copy_from_slice(&argument);
    }
    Ok(bytes)
}

fn launch(driver: &mut Driver, function: u64, shape: Shape, params: Array<usize>, extra: usize) -> Outcome {
    let (seed, optin) = (driver.settings.seed, driver.settings.arch.shared_optin());
    let races = driver.settings.races;
    let serial = driver.next_launch();
    let context = driver.context()?;
    let function = context.modules.function(function)?;
    let stream = context.queue.find(shape.stream)?;
    check(function, &shape, optin)?;
    let work = Work::Launch(Launch {
        module: std::sync::Arc::clone(&function.module),
        kernel: function.name.to_string_lossy().into_owned(),
        grid: shape.grid,
        block: shape.block,
        dynamic_shared: shape.dynamic as usize,
        params: arguments(function, params, extra)?,
        // Seed 0 is "in order" for every launch; others give every launch an order of its own.
        seed: if seed == 0 { 0 } else { splitmix64(&mut seed.wrapping_add(serial)) | 1 },
        races,
    });
    if let Work::Launch(launch) = &work {
        driver.calls.launched(&launch.kernel);
    }
    driver.submit(stream, work)
}

entries! {
    Context fn cuLaunchKernel(
        function: u64,
        grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        dynamic: c_uint, stream: u64, params: Array<usize>, extra: usize,
    ) |driver| {
        let shape = Shape { grid: [grid_x, grid_y, grid_z], block: [block_x, block_y, block_z], dynamic, stream };
        launch(driver, function, shape, params, extra)
    }

    Context fn cuLaunchKernelEx(config: Array<Config>, function: u64, params: Array<usize>, extra: usize) |driver| {
        let config = config.take(1)?.pop().ok_or(Code::INVALID_VALUE)?;
        // CUDA Driver API, CUDA_ERROR_NOT_SUPPORTED: launch attributes (clusters and the like) are not simulated.
        if config.attribute_count != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        let Config { grid, block, dynamic, stream, .. } = config;
        launch(driver, function, Shape { grid, block, dynamic, stream }, params, extra)
    }
}
