//! Creation, attributes and destruction of descriptors.

use core::ffi::{c_char, c_int};

use super::blas::{find, invalid};
use super::types::{Layout, Operation, Preference, ScaleMode};
use super::version::version;
use crate::code::{self, Code, Outcome};
use crate::entry::entries;
use crate::ffi::{Host, Out};

const LIBRARY: u64 = 6;
const OPERATION: u64 = 7;
const LAYOUT: u64 = 8;
const PREFERENCE: u64 = 9;

/// `CUBLAS_COMPUTE_32F`, and `CUDA_R_32F` for the scale.
const COMPUTE_F32: c_int = 68;
const F32: c_int = 0;

/// An attribute's value. cuBLAS documentation, …SetAttribute: CUBLAS_STATUS_INVALID_VALUE "If buf is NULL or sizeInBytes
/// doesn't match the size of the internal storage for the selected attribute".
fn value<const N: usize>(from: Host, size: usize) -> Outcome<[u8; N]> {
    if size != N {
        return Err(Code::BLAS_INVALID_VALUE);
    }
    invalid(from.read(N))?.try_into().map_err(|_| Code::BLAS_INVALID_VALUE)
}

fn integer(from: Host, size: usize) -> Outcome<i32> {
    value(from, size).map(i32::from_ne_bytes)
}

fn address(from: Host, size: usize) -> Outcome<u64> {
    value(from, size).map(u64::from_ne_bytes)
}

/// cublasLtMatmulDescAttributes_t.
fn set_operation(operation: &mut Operation, attribute: c_int, from: Host, size: usize) -> Outcome {
    match attribute {
        // COMPUTE_TYPE and SCALE_TYPE: as at creation.
        0 if integer(from, size)? == COMPUTE_F32 => {}
        1 if integer(from, size)? == F32 => {}
        // POINTER_MODE: alpha and beta on the host, or one of each on the device.
        2 => match integer(from, size)? {
            mode @ (0 | 1) => operation.device_factors = mode == 1,
            _ => return Err(Code::BLAS_NOT_SUPPORTED),
        },
        3 | 4 => {
            let transposed = match integer(from, size)? {
                0 => false,
                1 => true,
                _ => return Err(Code::BLAS_NOT_SUPPORTED),
            };
            operation.transposed[usize::from(attribute == 4)] = transposed;
        }
        7 => operation.epilogue = integer(from, size)? as u32,
        8 => operation.bias = address(from, size)?,
        17..=20 => operation.scales[(attribute - 17) as usize] = address(from, size)?,
        21 => operation.amax_d = address(from, size)?,
        25 => operation.fast = value::<1>(from, size)? != [0],
        26 => operation.bias_type = Some(integer(from, size)?),
        // A_SCALE_MODE, B_SCALE_MODE; C_SCALE_MODE, D_SCALE_MODE: one f32 a tensor.
        31 | 32 => {
            let mode = ScaleMode::from_number(integer(from, size)?, version())?;
            operation.modes[(attribute - 31) as usize] = mode;
        }
        33 | 34 if integer(from, size)? == 0 => {}
        0..=34 => return Err(Code::BLAS_NOT_SUPPORTED),
        _ => return Err(Code::BLAS_INVALID_VALUE),
    }
    Ok(())
}

entries! {
    Nothing fn cublasLtCreate(handle: Out<u64>) |driver| {
        let handle = invalid(handle.checked())?;
        // cuBLAS documentation, cublasLtCreate: CUBLAS_STATUS_NOT_INITIALIZED, "The CUDA Runtime initialization failed".
        if driver.context.is_none() || driver.dead.is_some() {
            return Err(Code::BLAS_NOT_INITIALIZED);
        }
        let fresh = driver.handle(LIBRARY);
        driver.blas.libraries.insert(fresh, ());
        invalid(handle.set(fresh))
    }

    Nothing fn cublasLtDestroy(handle: u64) |driver| {
        driver.blas.libraries.remove(&handle).ok_or(Code::BLAS_NOT_INITIALIZED)
    }

    Nothing fn cublasLtMatmulDescCreate(operation: Out<u64>, compute: c_int, scale: c_int) |driver| {
        let operation = invalid(operation.checked())?;
        if (compute, scale) != (COMPUTE_F32, F32) {
            return Err(Code::BLAS_NOT_SUPPORTED);
        }
        let fresh = driver.handle(OPERATION);
        let empty = Operation {
            transposed: [false; 2],
            epilogue: 1,
            bias: 0,
            bias_type: None,
            scales: [0; 4],
            modes: [ScaleMode::Scalar; 2],
            amax_d: 0,
            fast: false,
            device_factors: false,
        };
        driver.blas.operations.insert(fresh, empty);
        invalid(operation.set(fresh))
    }

    Nothing fn cublasLtMatmulDescSetAttribute(operation: u64, attribute: c_int, from: Host, size: usize) |driver| {
        let operation = driver.blas.operations.get_mut(&operation).ok_or(Code::BLAS_INVALID_VALUE)?;
        set_operation(operation, attribute, from, size)
    }

    Nothing fn cublasLtMatmulDescDestroy(operation: u64) |driver| {
        driver.blas.operations.remove(&operation).map(drop).ok_or(Code::BLAS_INVALID_VALUE)
    }

    Nothing fn cublasLtMatrixLayoutCreate(layout: Out<u64>, kind: c_int, rows: u64, cols: u64, ld: i64) |driver| {
        let layout = invalid(layout.checked())?;
        let fresh = driver.handle(LAYOUT);
        driver.blas.layouts.insert(fresh, Layout { kind, rows, cols, ld });
        invalid(layout.set(fresh))
    }

    // Batches, planes and other orders are not simulated.
    Nothing fn cublasLtMatrixLayoutSetAttribute(layout: u64, attribute: c_int, from: Host, size: usize) |driver| {
        find(&driver.blas.layouts, layout)?;
        match attribute {
            1 | 5 if integer(from, size)? == 1 => Ok(()),
            0..=7 => Err(Code::BLAS_NOT_SUPPORTED),
            _ => Err(Code::BLAS_INVALID_VALUE),
        }
    }

    Nothing fn cublasLtMatrixLayoutDestroy(layout: u64) |driver| {
        driver.blas.layouts.remove(&layout).map(drop).ok_or(Code::BLAS_INVALID_VALUE)
    }

    Nothing fn cublasLtMatmulPreferenceCreate(preference: Out<u64>) |driver| {
        let preference = invalid(preference.checked())?;
        let fresh = driver.handle(PREFERENCE);
        driver.blas.preferences.insert(fresh, Preference::default());
        invalid(preference.set(fresh))
    }

    Nothing fn cublasLtMatmulPreferenceSetAttribute(
        preference: u64, attribute: c_int, from: Host, size: usize,
    ) |driver| {
        let preference = driver.blas.preferences.get_mut(&preference).ok_or(Code::BLAS_INVALID_VALUE)?;
        match attribute {
            // MAX_WORKSPACE_BYTES, REDUCTION_SCHEME_MASK, MIN_ALIGNMENT_A_BYTES … D.
            1 => preference.workspace = address(from, size)?,
            3 => drop(integer(from, size)?),
            5..=8 => preference.alignment[(attribute - 5) as usize] = Some(integer(from, size)? as u32),
            0..=12 => return Err(Code::BLAS_NOT_SUPPORTED),
            _ => return Err(Code::BLAS_INVALID_VALUE),
        }
        Ok(())
    }

    Nothing fn cublasLtMatmulPreferenceDestroy(preference: u64) |driver| {
        driver.blas.preferences.remove(&preference).map(drop).ok_or(Code::BLAS_INVALID_VALUE)
    }
}

/// Not framed as the others are: it answers with the version itself.
#[unsafe(no_mangle)]
extern "C" fn cublasLtGetVersion() -> usize {
    version()
}

/// Not framed as the others are: it answers with a pointer and touches no state.
#[unsafe(no_mangle)]
extern "C" fn cublasLtGetStatusString(status: c_int) -> *const c_char {
    code::blas_text(status).as_ptr()
}
