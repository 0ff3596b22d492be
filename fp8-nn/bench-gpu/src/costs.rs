//! Times that single calls of the driver and of cuBLASLt cost the host, and those of this library's parts beside them.
//!
//! A Linear's forward pass consists of such calls. The times are those of the clock on the wall over bursts of calls that are
//! short enough for the queue of the GPU; nothing is waited for within a burst.

use crate::libraries;
use crate::result::Result;
use crate::timer::{Bench, Work};
use cudarc::driver::{result, sys};
use fp8_nn::fp8_kernels::fp8_format::Encoding::E4M3;
use fp8_nn::fp8_kernels::ops::{self, Accumulation, Layout};
use fp8_nn::fp8_kernels::{Cell, DType, REST, Slot, interop};
use std::ffi::{CString, c_int, c_void};
use std::time::Instant;

/// Calls of one burst, and how many bursts there are.
const CALLS: usize = 400;
const BURSTS: usize = 9;

/// A kernel that does nothing.
const EMPTY: &str =
    ".version 8.0\n.target sm_89\n.address_size 64\n.visible .entry empty()\n{\n\tret;\n}\n\0";

/// Measures `call` as a row.
fn cost(bench: &mut Bench, case: &str, call: &mut dyn FnMut() -> Result) -> Result {
    let (calls, bursts) = if bench.dry { (3, 1) } else { (CALLS, BURSTS) };
    let mut times = Vec::with_capacity(bursts);
    for burst in 0..=bursts {
        bench.device.synchronize()?;
        let start = Instant::now();
        for _ in 0..calls {
            call()?;
        }
        let us = start.elapsed().as_secs_f64() * 1e6 / calls as f64;
        // The first one warms up.
        if burst > 0 {
            times.push(us);
        }
    }
    bench.device.synchronize()?;
    times.sort_by(f64::total_cmp);
    bench.record("host", case, [times[times.len() / 2], times[0]], Work::Calls, "wall clock")
}

pub(crate) fn single_calls(bench: &mut Bench) -> Result {
    let device = bench.device.clone();
    let stream = interop::stream(&device)?.clone();
    let raw = stream.cu_stream();
    cost(bench, "call cuCtxGetCurrent", &mut || Ok(result::ctx::get_current().map(drop)?))?;
    // SAFETY: the text ends with a zero byte.
    let module = unsafe { result::module::load_data(EMPTY.as_ptr().cast()) }?;
    // SAFETY: the module was just loaded.
    let empty = unsafe { result::module::get_function(module, CString::new("empty")?) }?;
    cost(bench, "call cuLaunchKernel, empty", &mut || {
        let none = std::ptr::null_mut();
        // SAFETY: the kernel takes no arguments and is loaded in the current context; the stream is alive.
        let status = unsafe { sys::cuLaunchKernel(empty, 1, 1, 1, 32, 1, 1, 0, raw, none, none) };
        Ok(status.result()?)
    })?;
    device.synchronize()?;
    // SAFETY: loaded above; its work is done.
    unsafe { result::module::unload(module) }?;
    cost(bench, "call cuMemAllocAsync + cuMemFreeAsync, 1 MiB", &mut || {
        // SAFETY: freed below, and used by nothing.
        let address = unsafe { result::malloc_async(raw, 1 << 20) }?;
        // SAFETY: allocated above.
        Ok(unsafe { result::free_async(address, raw) }?)
    })?;
    descriptors(bench)?;
    products(bench, raw.cast())?;
    parts(bench)
}

/// This library's own steps.
fn parts(bench: &mut Bench) -> Result {
    let device = bench.device.clone();
    let (x, w) = (
        bench.pool.tensor([256, 256], DType::BF16, 1, &device)?,
        bench.pool.tensor([256, 256], DType::BF16, 2, &device)?,
    );
    let [scale, amax] = [Cell::new(crate::data::SCALE, &device)?, Cell::new(REST, &device)?];
    let rule = &crate::data::RULE;
    let slot = Slot { amax: Some(&amax), columnwise: true, ..Slot::fixed(E4M3, &scale, rule) };
    cost(bench, "ours tensor from kept memory, and its drop", &mut || {
        Ok(interop::unfilled([256, 256], DType::BF16, &device).map(drop)?)
    })?;
    cost(bench, "ours quantize+T", &mut || Ok(ops::quantize(&x, &slot).map(drop)?))?;
    let [a, b] = [1, 2].map(|seed| bench.pool.fp8([256, 256], E4M3, seed, &device));
    let (a, b) = (a?, b?);
    cost(bench, "ours gemm fp8", &mut || {
        Ok(ops::gemm_fp8(&a, &b, None, DType::BF16, Accumulation::Fast).map(drop)?)
    })?;
    cost(bench, "ours gemm bf16", &mut || Ok(ops::gemm(&x, &w, Layout::Nt, None, DType::BF16).map(drop)?))
}

type Create = unsafe extern "C" fn(*mut *mut c_void) -> c_int;
type Destroy = unsafe extern "C" fn(*mut c_void) -> c_int;
type CreateOperation = unsafe extern "C" fn(*mut *mut c_void, c_int, c_int) -> c_int;
type SetOperation = unsafe extern "C" fn(*mut c_void, c_int, *const c_void, usize) -> c_int;
type CreateLayout = unsafe extern "C" fn(*mut *mut c_void, c_int, u64, u64, i64) -> c_int;
type Matmul = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    *const c_void,
    u64,
    *mut c_void,
    u64,
    *mut c_void,
    *const c_void,
    u64,
    *mut c_void,
    u64,
    *mut c_void,
    *const c_void,
    u64,
    usize,
    *mut c_void,
) -> c_int;

const SIDE: u64 = 256;
// Numbers of the header `cublasLt.h`.
const F32: c_int = 0;
const BF16: c_int = 14;
const COMPUTE_F32: c_int = 68;
const TRANSPOSE_A: c_int = 3;

macro_rules! function {
    ($library:expr, $name:literal, $type:ty) => {{
        // SAFETY: the type is the one that cuBLAS's documentation gives this function.
        *unsafe { $library.get::<$type>(concat!($name, "\0").as_bytes()) }?
    }};
}

fn ok(call: &str, status: c_int) -> Result {
    if status == 0 { Ok(()) } else { Err(format!("{call}: status {status}").into()) }
}

/// Descriptions of a product and of a matrix for cuBLASLt, made and given back.
fn descriptors(bench: &mut Bench) -> Result {
    let library = libraries::open(&libraries::CUBLASLT)?;
    let create_operation = function!(library, "cublasLtMatmulDescCreate", CreateOperation);
    let destroy_operation = function!(library, "cublasLtMatmulDescDestroy", Destroy);
    let create_layout = function!(library, "cublasLtMatrixLayoutCreate", CreateLayout);
    let destroy_layout = function!(library, "cublasLtMatrixLayoutDestroy", Destroy);
    cost(bench, "call cublasLtMatmulDescCreate + cublasLtMatmulDescDestroy", &mut || {
        let mut made = std::ptr::null_mut();
        // SAFETY: the pointer lives through the call.
        ok("cublasLtMatmulDescCreate", unsafe { create_operation(&mut made, COMPUTE_F32, F32) })?;
        // SAFETY: created above.
        ok("cublasLtMatmulDescDestroy", unsafe { destroy_operation(made) })
    })?;
    cost(bench, "call cublasLtMatrixLayoutCreate + cublasLtMatrixLayoutDestroy", &mut || {
        let mut made = std::ptr::null_mut();
        // SAFETY: the pointer lives through the call.
        ok("cublasLtMatrixLayoutCreate", unsafe {
            create_layout(&mut made, BF16, SIDE, SIDE, SIDE.cast_signed())
        })?;
        // SAFETY: created above.
        ok("cublasLtMatrixLayoutDestroy", unsafe { destroy_layout(made) })
    })
}

/// cuBLASLt's calls by themselves: an attribute of a descriptor, and a product whose kernel the library looks up in its own
/// cache.
fn products(bench: &mut Bench, stream: *mut c_void) -> Result {
    let device = bench.device.clone();
    let library = libraries::open(&libraries::CUBLASLT)?;
    let create = function!(library, "cublasLtCreate", Create);
    let destroy = function!(library, "cublasLtDestroy", Destroy);
    let create_operation = function!(library, "cublasLtMatmulDescCreate", CreateOperation);
    let set = function!(library, "cublasLtMatmulDescSetAttribute", SetOperation);
    let destroy_operation = function!(library, "cublasLtMatmulDescDestroy", Destroy);
    let create_layout = function!(library, "cublasLtMatrixLayoutCreate", CreateLayout);
    let destroy_layout = function!(library, "cublasLtMatrixLayoutDestroy", Destroy);
    let matmul = function!(library, "cublasLtMatmul", Matmul);
    let [mut handle, mut operation, mut layout] = [std::ptr::null_mut(); 3];
    // SAFETY: the pointer lives through the call.
    ok("cublasLtCreate", unsafe { create(&mut handle) })?;
    // SAFETY: as above.
    ok("cublasLtMatmulDescCreate", unsafe { create_operation(&mut operation, COMPUTE_F32, F32) })?;
    // SAFETY: as above.
    ok("cublasLtMatrixLayoutCreate", unsafe {
        create_layout(&mut layout, BF16, SIDE, SIDE, SIDE.cast_signed())
    })?;
    let transpose: c_int = 1;
    cost(bench, "call cublasLtMatmulDescSetAttribute", &mut || {
        let value = std::ptr::from_ref(&transpose).cast();
        // SAFETY: the descriptor is alive, and the value has the attribute's type.
        ok("cublasLtMatmulDescSetAttribute", unsafe { set(operation, TRANSPOSE_A, value, 4) })
    })?;
    let side = SIDE as usize;
    let tensors = [
        bench.pool.tensor([side, side], DType::BF16, 1, &device)?,
        bench.pool.tensor([side, side], DType::BF16, 2, &device)?,
        interop::unfilled([side, side], DType::BF16, &device)?,
    ];
    let addresses = tensors.iter().map(interop::address).collect::<std::result::Result<Vec<_>, _>>()?;
    let &[a, b, y] = &*addresses else { return Err("three tensors have three addresses".into()) };
    let factors: [f32; 2] = [1.0, 0.0];
    let bare = cost(bench, "call cublasLtMatmul 256, bf16", &mut || {
        let [alpha, beta] = factors.each_ref().map(|factor| std::ptr::from_ref(factor).cast());
        // SAFETY: the matrices have the extents and type of the layout, and are used on their device's stream alone. A null
        // algorithm makes the library choose one; there is no workspace.
        let status = unsafe {
            matmul(
                handle,
                operation,
                alpha,
                a,
                layout,
                b,
                layout,
                beta,
                y,
                layout,
                y,
                layout,
                std::ptr::null(),
                0,
                0,
                stream,
            )
        };
        ok("cublasLtMatmul", status)
    });
    // SAFETY: each was created above, and nothing uses it any more.
    let _ = [unsafe { destroy_layout(layout) }, unsafe { destroy_operation(operation) }, unsafe {
        destroy(handle)
    }];
    bare
}
