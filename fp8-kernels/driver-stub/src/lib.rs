//! A CUDA driver without a device: what cuDNN asks of `libcuda.so.1` and `libcublasLt.so` while it plans a graph for a GPU that
//! is only described. For `cargo xtask cudnn-check`.
//!
//! Modules and kernels can be loaded, and are never run. There is no device, as `cuInit` says.
#![expect(unsafe_code, reason = "functions under the names of C libraries")]

use core::ffi::{CStr, c_char, c_int, c_void};

/// `CUDA_ERROR_NO_DEVICE`.
const NO_DEVICE: c_int = 100;
/// `CUDA_ERROR_NOT_FOUND`.
const NOT_FOUND: c_int = 500;

/// Functions that succeed and do nothing.
macro_rules! idle {
    ($($name:ident),* $(,)?) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name() -> c_int {
            0
        }
    )*};
}

idle![
    cuCtxGetLimit,
    cuCtxPopCurrent,
    cuCtxPushCurrent,
    cuKernelSetAttribute,
    cuLaunchCooperativeKernel,
    cuLaunchKernel,
    cuLaunchKernelEx,
    cuLibraryUnload,
    cuLinkAddData,
    cuLinkComplete,
    cuLinkCreate,
    cuLinkDestroy,
    cuModuleUnload,
    cuStreamGetCtx,
    cuTensorMapEncodeIm2col,
    cuTensorMapEncodeTiled,
];

/// Functions whose first argument is the place of a handle, which becomes this number.
macro_rules! handles {
    ($($name:ident = $number:literal),* $(,)?) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(handle: *mut *mut c_void) -> c_int {
            // SAFETY: by the driver's documentation the first argument has room for a handle.
            unsafe { handle.write(core::ptr::without_provenance_mut($number)) };
            0
        }
    )*};
}

handles![
    cuCtxGetCurrent = 0x5000,
    cuKernelGetFunction = 0x1000,
    cuLibraryGetKernel = 0x4000,
    cuLibraryLoadData = 0x3000,
    cuLibraryLoadFromFile = 0x3000,
    cuModuleGetFunction = 0x1000,
    cuModuleLoadData = 0x2000,
];

/// Functions whose first argument is the place of a number, and the status.
macro_rules! numbers {
    ($($name:ident = $number:literal => $status:expr),* $(,)?) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(number: *mut c_int) -> c_int {
            // SAFETY: by the driver's documentation the first argument has room for a number.
            unsafe { number.write($number) };
            $status
        }
    )*};
}

numbers![
    cuDeviceGet = 0 => 0,
    cuDeviceGetCount = 0 => NO_DEVICE,
    cuDriverGetVersion = 13_000 => 0,
    cuKernelGetAttribute = 128 => 0,
    cuOccupancyMaxPotentialClusterSize = 8 => 0,
];

#[unsafe(no_mangle)]
extern "C" fn cuInit(_flags: u32) -> c_int {
    NO_DEVICE
}

/// Names and texts of errors, none of which matters.
macro_rules! texts {
    ($($name:ident),* $(,)?) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(_error: c_int, text: *mut *const c_char) -> c_int {
            const TEXT: &CStr = c"a driver without a device";
            // SAFETY: by the driver's documentation the second argument has room for an address.
            unsafe { text.write(TEXT.as_ptr()) };
            0
        }
    )*};
}

texts![cuGetErrorName, cuGetErrorString];

/// Functions that look for others by name and find none.
macro_rules! searches {
    ($($name:ident),* $(,)?) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(_symbol: *const c_char, function: *mut *mut c_void) -> c_int {
            // SAFETY: by the driver's documentation the second argument has room for an address.
            unsafe { function.write(core::ptr::null_mut()) };
            NOT_FOUND
        }
    )*};
}

searches![cuGetProcAddress, cuGetProcAddress_v2];

/// The version of cuBLASLt, of which cuDNN asks for nothing else.
#[unsafe(no_mangle)]
extern "C" fn cublasLtGetVersion() -> usize {
    13_01_00
}
