//! Heuristics and the product's call.

use core::ffi::c_int;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::blas::{find, invalid};
use super::check::{Shape, check};
use super::factors;
use super::product::{Product, Scalar};
use super::types::{Layout, Operation, Type};
use crate::code::{Code, Outcome};
use crate::entry::entries;
use crate::ffi::{Array, Host, Out};
use crate::state::Driver;
use crate::work::Work;

/// `cublasLtMatmulAlgo_t`: the number of a kernel, and the product that it was found for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
struct Algo {
    number: u64,
    product: u64,
    rest: [u64; 6],
}

/// `cublasLtMatmulHeuristicResult_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Found {
    algo: Algo,
    workspace: usize,
    status: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

/// The kernels, best first as heuristics think: bytes of workspace, and how slow each is. The best is the second, so that
/// a search finds something.
const KERNELS: [(usize, u64); 3] = [(0, 5), (64 << 10, 4), (1 << 20, 9)];
const TAG: u64 = 0x5eed_a190_0000_0000;

/// One call's product, looked up.
struct Asked {
    operation: Operation,
    layouts: [Layout; 4],
    shape: Shape,
    hash: u64,
}

/// cublasLtMatmul, heuristics and checks alike: CUBLAS_STATUS_NOT_INITIALIZED for a handle that is none.
fn asked(driver: &Driver, library: u64, operation: u64, layouts: [u64; 4]) -> Outcome<Asked> {
    if !driver.blas.libraries.contains_key(&library) {
        return Err(Code::BLAS_NOT_INITIALIZED);
    }
    let operation = *find(&driver.blas.operations, operation)?;
    let mut found = [Layout { kind: 0, rows: 0, cols: 0, ld: 0 }; 4];
    for (layout, handle) in found.iter_mut().zip(layouts) {
        *layout = *find(&driver.blas.layouts, handle)?;
    }
    let [a, b, c, d] = &found;
    let shape = check(&driver.settings, &operation, [a, b, c, d])?;
    // A kernel is chosen for types and sizes, and for which factors, amax and bias there are; where they are may change.
    let mut hasher = DefaultHasher::new();
    let present =
        [operation.scales[0], operation.scales[1], operation.scales[3], operation.amax_d, operation.bias];
    (
        operation.transposed,
        operation.epilogue,
        operation.fast,
        operation.modes,
        operation.device_factors,
        present.map(|at| at != 0),
        found,
    )
        .hash(&mut hasher);
    Ok(Asked { operation, layouts: found, shape, hash: hasher.finish() })
}

/// Refuses a query that lacks the address of an FP8 or FP4 operand's factors, of an FP8 output's scale or of the bias. The
/// documentation does not demand these addresses. The real library answers without them, and may answer with a kernel that
/// computes other numbers once they are set (openxla/xla pull request 40747, cuBLASLt 12.8.3). For FP4 it refuses itself: "The scaling
/// mode for A scale (VEC16_UE4M3) requires a custom pointer for A scale" (NVIDIA/CUDALibrarySamples issue 274).
fn expect_addresses(asked: &Asked) -> Outcome {
    let Asked { operation, shape, .. } = asked;
    let [a, b, _, d] = shape.types.map(Type::has_factors);
    let [scale_a, scale_b, _, scale_d] = operation.scales;
    let needed = [(a, scale_a), (b, scale_b), (d, scale_d), (shape.bias.is_some(), operation.bias)];
    let is_missing = |(is_needed, address): (bool, u64)| is_needed && address == 0;
    if needed.into_iter().any(is_missing) { Err(Code::BLAS_INVALID_VALUE) } else { Ok(()) }
}

/// cublasLtMatmulAlgoCheck: CUBLAS_STATUS_NOT_SUPPORTED for an algorithm that does not fit the product.
fn kernel(algo: &Algo, hash: u64) -> Outcome<usize> {
    let index = usize::try_from(algo.number ^ TAG).map_err(|_| Code::BLAS_INVALID_VALUE)?;
    KERNELS.get(index).ok_or(Code::BLAS_INVALID_VALUE)?;
    if algo.product == hash { Ok(index) } else { Err(Code::BLAS_NOT_SUPPORTED) }
}

fn result(index: usize, hash: u64) -> Found {
    let algo = Algo { number: TAG ^ index as u64, product: hash, rest: [0; 6] };
    Found { algo, workspace: KERNELS[index].0, status: 0, waves: 1.0, reserved: [0; 4] }
}

/// Pointers: 16 bytes aligned for FP8 and FP4 ("pointers … must support 16-byte alignment"), else to their elements; each matrix,
/// vector and factor in one allocation. A real library reads beyond and faults; here the call says so.
fn expect_memory(driver: &mut Driver, asked: &Asked, addresses: [u64; 4], scalars: [Scalar; 2]) -> Outcome {
    let Asked { operation, layouts, shape, .. } = asked;
    let is_narrow = shape.types[0].has_factors();
    for (index, (address, layout)) in addresses.into_iter().zip(layouts).enumerate() {
        let kind = shape.types[index];
        // C is not read where beta is known to be 0.
        if index == 2 && matches!(scalars[1], Scalar::Host(0.0)) {
            continue;
        }
        let columns = (layout.cols - 1).saturating_mul(layout.ld.unsigned_abs());
        let elements = usize::try_from(columns.saturating_add(layout.rows)).unwrap_or(usize::MAX);
        let bytes = kind.bytes(elements) as u64;
        let aligned = address.is_multiple_of(if is_narrow { 16 } else { kind.alignment() });
        if !aligned || !driver.context()?.blocks.holds(address, bytes) {
            return Err(Code::BLAS_INVALID_VALUE);
        }
    }
    let [scale_a, scale_b, scale_c, scale_d] = operation.scales;
    // Vectors of factors: 16 bytes aligned, as the kernels load them.
    let operands = [(scale_a, operation.modes[0], shape.m), (scale_b, operation.modes[1], shape.n)];
    for (address, mode, rows) in operands.into_iter().filter(|(address, ..)| *address != 0) {
        let (bytes, alignment) = factors::size(mode, [rows, shape.k]);
        if !address.is_multiple_of(alignment) || !driver.context()?.blocks.holds(address, bytes) {
            return Err(Code::BLAS_INVALID_VALUE);
        }
    }
    let factors = [scale_c, scale_d, operation.amax_d].into_iter().filter(|address| *address != 0);
    let scalars = scalars.into_iter().filter_map(Scalar::address);
    let bias = shape.bias.map(|kind| (operation.bias, shape.m as u64, kind.alignment()));
    for (address, count, size) in factors.chain(scalars).map(|address| (address, 1, 4)).chain(bias) {
        let holds = driver.context()?.blocks.holds(address, count.saturating_mul(size));
        if !holds || !address.is_multiple_of(size) {
            return Err(Code::BLAS_INVALID_VALUE);
        }
    }
    Ok(())
}

/// cublasLtPointerMode_t: the value on the host, or its address on the device.
fn scalar(at: Host, is_on_device: bool) -> Outcome<Scalar> {
    if is_on_device {
        return Ok(Scalar::Device(at.address() as u64));
    }
    Ok(Scalar::Host(invalid(Array::at(at).take(1))?[0]))
}

entries! {
    Nothing fn cublasLtMatmulAlgoGetHeuristic(
        library: u64, operation: u64, a: u64, b: u64, c: u64, d: u64, preference: u64, requested: c_int,
        results: Out<Found>, returned: Out<c_int>,
    ) |driver| {
        let returned = invalid(returned.checked())?;
        returned.set(0).map_err(|_| Code::BLAS_INVALID_VALUE)?;
        let requested = usize::try_from(requested).ok().filter(|count| *count > 0).ok_or(Code::BLAS_INVALID_VALUE)?;
        let preference = *find(&driver.blas.preferences, preference)?;
        let asked = asked(driver, library, operation, [a, b, c, d])?;
        expect_addresses(&asked)?;
        // "pointers … must support 16-byte alignment": what a caller promises decides.
        let promised = preference.alignment.iter().all(|bytes| bytes.is_none_or(|bytes| bytes >= 16));
        if asked.shape.types[0].has_factors() && !promised {
            return Err(Code::BLAS_NOT_SUPPORTED);
        }
        let fits = |index: &usize| KERNELS[*index].0 as u64 <= preference.workspace;
        let found: Vec<Found> =
            (0..KERNELS.len()).filter(fits).take(requested).map(|index| result(index, asked.hash)).collect();
        invalid(results.set_all(&found))?;
        invalid(returned.set(c_int::try_from(found.len()).unwrap_or(0)))
    }

    Nothing fn cublasLtMatmulAlgoCheck(
        library: u64, operation: u64, a: u64, b: u64, c: u64, d: u64, algo: Array<Algo>, out: Out<Found>,
    ) |driver| {
        let out = invalid(out.checked())?;
        let asked = asked(driver, library, operation, [a, b, c, d])?;
        expect_addresses(&asked)?;
        let algo = invalid(algo.take(1))?;
        kernel(&algo[0], asked.hash)?;
        invalid(out.set(result((algo[0].number ^ TAG) as usize, asked.hash)))
    }

    Nothing fn cublasLtMatmul(
        library: u64, operation: u64, alpha: Host, a: u64, a_layout: u64, b: u64, b_layout: u64,
        beta: Host, c: u64, c_layout: u64, d: u64, d_layout: u64, algo: Array<Algo>,
        workspace: u64, bytes: usize, stream: u64,
    ) |driver| {
        // CUBLAS_STATUS_EXECUTION_FAILED: "cuBLAS reported an execution error from the device".
        driver.expect_healthy().map_err(|_| Code::BLAS_EXECUTION_FAILED)?;
        let asked = asked(driver, library, operation, [a_layout, b_layout, c_layout, d_layout])?;
        if asked.shape.types[0] == Type::E2m1 {
            expect_addresses(&asked)?;
        }
        let scalar = |at: Host| scalar(at, asked.operation.device_factors);
        let (alpha, beta) = (scalar(alpha)?, scalar(beta)?);
        expect_memory(driver, &asked, [a, b, c, d], [alpha, beta])?;
        // "This function supports both in-place matrix multiplication (C == D and Cdesc == Ddesc) and out-of-place matrix
        // multiplication (C != D …)".
        if c == d && asked.layouts[2] != asked.layouts[3] {
            return Err(Code::BLAS_INVALID_VALUE);
        }
        // "algo: … When NULL, an implicit heuristics query with default search preferences will be performed".
        let kernel = match algo.is_null() {
            true => 0,
            false => kernel(&invalid(algo.take(1))?[0], asked.hash)?,
        };
        let (needed, slowness) = KERNELS[kernel];
        // "workspaceSizeInBytes: Size of the workspace"; a kernel that needs more is not run. "workspace … must be 16B
        // aligned", and 256 for the fastest kernels.
        let context = driver.context().map_err(|_| Code::BLAS_EXECUTION_FAILED)?;
        if bytes < needed || (needed > 0 && !(workspace.is_multiple_of(16) && context.blocks.holds(workspace, bytes as u64))) {
            return Err(Code::BLAS_INVALID_VALUE);
        }
        let id = context.queue.find(stream).map_err(|_| Code::BLAS_INVALID_VALUE)?;
        let fp8_sum_bits = driver.settings.fp8_sum_bits;
        let Asked { operation, layouts, shape, .. } = asked;
        let product = Product {
            shape,
            transposed: operation.transposed,
            addresses: [a, b, c, d],
            lds: layouts.map(|layout| layout.ld.unsigned_abs() as usize),
            alpha,
            beta,
            bias: operation.bias,
            scales: operation.scales,
            modes: operation.modes,
            amax_d: operation.amax_d,
            workspace: (workspace, needed),
            kernel,
            slowness,
            fp8_sum_bits,
        };
        driver.submit(id, Work::Product(Box::new(product))).map_err(|_| Code::BLAS_EXECUTION_FAILED)
    }
}
