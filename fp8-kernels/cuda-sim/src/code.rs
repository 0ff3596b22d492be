//! Status codes of the CUDA driver API (`CUresult`), of NVRTC (`nvrtcResult`), of cuBLAS (`cublasStatus_t`), of cuDNN
//! (`cudnnStatus_t`) and of NCCL (`ncclResult_t`), with their names and texts.
//!
//! Numbers and meanings: CUDA Driver API, "Data types used by CUDA driver", enum CUresult; NVRTC, enum nvrtcResult.

use core::ffi::CStr;

/// A status other than success, of whichever library the call belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) i32);

/// The result of an entry point's body.
pub(crate) type Outcome<T = ()> = Result<T, Code>;

impl Code {
    pub(crate) const INVALID_VALUE: Self = Self(1);
    pub(crate) const OUT_OF_MEMORY: Self = Self(2);
    pub(crate) const NOT_INITIALIZED: Self = Self(3);
    pub(crate) const INVALID_DEVICE: Self = Self(101);
    pub(crate) const INVALID_IMAGE: Self = Self(200);
    pub(crate) const INVALID_CONTEXT: Self = Self(201);
    pub(crate) const NO_BINARY_FOR_GPU: Self = Self(209);
    pub(crate) const INVALID_PTX: Self = Self(218);
    pub(crate) const UNSUPPORTED_PTX_VERSION: Self = Self(222);
    pub(crate) const INVALID_HANDLE: Self = Self(400);
    pub(crate) const ILLEGAL_STATE: Self = Self(401);
    pub(crate) const NOT_FOUND: Self = Self(500);
    pub(crate) const NOT_READY: Self = Self(600);
    pub(crate) const ILLEGAL_ADDRESS: Self = Self(700);
    pub(crate) const LAUNCH_OUT_OF_RESOURCES: Self = Self(701);
    pub(crate) const CONTEXT_IS_DESTROYED: Self = Self(709);
    pub(crate) const MISALIGNED_ADDRESS: Self = Self(716);
    pub(crate) const LAUNCH_FAILED: Self = Self(719);
    pub(crate) const NOT_SUPPORTED: Self = Self(801);
    pub(crate) const UNKNOWN: Self = Self(999);
    pub(crate) const STREAM_CAPTURE_UNSUPPORTED: Self = Self(900);
    pub(crate) const STREAM_CAPTURE_INVALIDATED: Self = Self(901);
    pub(crate) const STREAM_CAPTURE_UNMATCHED: Self = Self(903);
    pub(crate) const STREAM_CAPTURE_UNJOINED: Self = Self(904);
    pub(crate) const STREAM_CAPTURE_ISOLATION: Self = Self(905);
    pub(crate) const STREAM_CAPTURE_IMPLICIT: Self = Self(906);
    pub(crate) const CAPTURED_EVENT: Self = Self(907);
    pub(crate) const STREAM_CAPTURE_WRONG_THREAD: Self = Self(908);

    /// No status, never returned: the work waited for waits itself for another rank of a communicator.
    pub(crate) const STALLED: Self = Self(i32::MIN);

    pub(crate) const NCCL_UNHANDLED_CUDA_ERROR: Self = Self(1);
    pub(crate) const NCCL_SYSTEM_ERROR: Self = Self(2);
    pub(crate) const NCCL_INTERNAL_ERROR: Self = Self(3);
    pub(crate) const NCCL_INVALID_ARGUMENT: Self = Self(4);
    pub(crate) const NCCL_INVALID_USAGE: Self = Self(5);
    pub(crate) const NCCL_REMOTE_ERROR: Self = Self(6);
    pub(crate) const NCCL_IN_PROGRESS: Self = Self(7);

    pub(crate) const NVRTC_INVALID_INPUT: Self = Self(3);
    pub(crate) const NVRTC_INVALID_PROGRAM: Self = Self(4);
    pub(crate) const NVRTC_INVALID_OPTION: Self = Self(5);
    pub(crate) const NVRTC_COMPILATION: Self = Self(6);
    pub(crate) const NVRTC_INTERNAL_ERROR: Self = Self(11);

    pub(crate) const BLAS_NOT_INITIALIZED: Self = Self(1);
    pub(crate) const BLAS_INVALID_VALUE: Self = Self(7);
    pub(crate) const BLAS_EXECUTION_FAILED: Self = Self(13);
    pub(crate) const BLAS_INTERNAL_ERROR: Self = Self(14);
    pub(crate) const BLAS_NOT_SUPPORTED: Self = Self(15);

    pub(crate) const DNN_NOT_INITIALIZED: Self = Self(1001);
    pub(crate) const DNN_BAD_PARAM: Self = Self(2000);
    pub(crate) const DNN_NULL_POINTER: Self = Self(2002);
    pub(crate) const DNN_MISALIGNED: Self = Self(2003);
    pub(crate) const DNN_NOT_FINALIZED: Self = Self(2004);
    pub(crate) const DNN_SHAPE_MISMATCH: Self = Self(2008);
    pub(crate) const DNN_DUPLICATED: Self = Self(2009);
    pub(crate) const DNN_ATTRIBUTE_TYPE: Self = Self(2010);
    pub(crate) const DNN_DESCRIPTOR_TYPE: Self = Self(2012);
    pub(crate) const DNN_NOT_SUPPORTED: Self = Self(3000);
    pub(crate) const DNN_INTERNAL_ERROR: Self = Self(4000);
    pub(crate) const DNN_EXECUTION_FAILED: Self = Self(5001);
}

/// `(number, name, text)` of every `CUresult` this library answers with or is asked to inject.
const DRIVER: &[(i32, &CStr, &CStr)] = &[
    (0, c"CUDA_SUCCESS", c"no error"),
    (1, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
    (2, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
    (3, c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error"),
    (4, c"CUDA_ERROR_DEINITIALIZED", c"driver shutting down"),
    (34, c"CUDA_ERROR_STUB_LIBRARY", c"CUDA driver is a stub library"),
    (46, c"CUDA_ERROR_DEVICE_UNAVAILABLE", c"CUDA-capable device(s) is/are busy or unavailable"),
    (100, c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected"),
    (101, c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
    (200, c"CUDA_ERROR_INVALID_IMAGE", c"device kernel image is invalid"),
    (201, c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
    (209, c"CUDA_ERROR_NO_BINARY_FOR_GPU", c"no kernel image is available for execution on the device"),
    (214, c"CUDA_ERROR_ECC_UNCORRECTABLE", c"uncorrectable ECC error encountered"),
    (218, c"CUDA_ERROR_INVALID_PTX", c"a PTX JIT compilation failed"),
    (221, c"CUDA_ERROR_JIT_COMPILER_NOT_FOUND", c"PTX JIT compiler library not found"),
    (
        222,
        c"CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
        c"the provided PTX was compiled with an unsupported toolchain.",
    ),
    (304, c"CUDA_ERROR_OPERATING_SYSTEM", c"OS call failed or operation not supported on this OS"),
    (400, c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
    (401, c"CUDA_ERROR_ILLEGAL_STATE", c"the operation cannot be performed in the present state"),
    (500, c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
    (600, c"CUDA_ERROR_NOT_READY", c"device not ready"),
    (700, c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal memory access was encountered"),
    (701, c"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", c"too many resources requested for launch"),
    (702, c"CUDA_ERROR_LAUNCH_TIMEOUT", c"the launch timed out and was terminated"),
    (709, c"CUDA_ERROR_CONTEXT_IS_DESTROYED", c"context is destroyed"),
    (716, c"CUDA_ERROR_MISALIGNED_ADDRESS", c"misaligned address"),
    (719, c"CUDA_ERROR_LAUNCH_FAILED", c"unspecified launch failure"),
    (801, c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
    (900, c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", c"operation not permitted when stream is capturing"),
    (
        901,
        c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        c"operation failed due to a previous error during capture",
    ),
    (903, c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", c"capture was not ended in the same stream as it began"),
    (904, c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED", c"capturing stream has unjoined work"),
    (905, c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION", c"dependency created on uncaptured work in another stream"),
    (
        906,
        c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
        c"operation would make the legacy stream depend on a capturing blocking stream",
    ),
    (
        907,
        c"CUDA_ERROR_CAPTURED_EVENT",
        c"operation not permitted on an event last recorded in a capturing stream",
    ),
    (
        908,
        c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
        c"attempt to terminate a thread-local capture sequence from another thread",
    ),
    (999, c"CUDA_ERROR_UNKNOWN", c"unknown error"),
];

/// Texts of `nvrtcResult`, by number.
const NVRTC: &[&CStr] = &[
    c"NVRTC_SUCCESS",
    c"NVRTC_ERROR_OUT_OF_MEMORY",
    c"NVRTC_ERROR_PROGRAM_CREATION_FAILURE",
    c"NVRTC_ERROR_INVALID_INPUT",
    c"NVRTC_ERROR_INVALID_PROGRAM",
    c"NVRTC_ERROR_INVALID_OPTION",
    c"NVRTC_ERROR_COMPILATION",
    c"NVRTC_ERROR_BUILTIN_OPERATION_FAILURE",
    c"NVRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION",
    c"NVRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION",
    c"NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID",
    c"NVRTC_ERROR_INTERNAL_ERROR",
];

/// Texts of `ncclResult_t`, by number: NCCL 2.28, `nccl.h`.
const NCCL: &[&CStr] = &[
    c"no error",
    c"unhandled cuda error",
    c"unhandled system error",
    c"internal error",
    c"invalid argument",
    c"invalid usage",
    c"remote process exited or there was a network error",
    c"NCCL operation in progress",
];

/// Text of an `ncclResult_t`.
pub(crate) fn nccl_text(number: i32) -> &'static CStr {
    usize::try_from(number).ok().and_then(|index| NCCL.get(index).copied()).unwrap_or(c"unknown result code")
}

/// Texts of `cublasStatus_t`.
const BLAS: &[(i32, &CStr)] = &[
    (0, c"CUBLAS_STATUS_SUCCESS"),
    (1, c"CUBLAS_STATUS_NOT_INITIALIZED"),
    (3, c"CUBLAS_STATUS_ALLOC_FAILED"),
    (7, c"CUBLAS_STATUS_INVALID_VALUE"),
    (8, c"CUBLAS_STATUS_ARCH_MISMATCH"),
    (11, c"CUBLAS_STATUS_MAPPING_ERROR"),
    (13, c"CUBLAS_STATUS_EXECUTION_FAILED"),
    (14, c"CUBLAS_STATUS_INTERNAL_ERROR"),
    (15, c"CUBLAS_STATUS_NOT_SUPPORTED"),
];

/// Texts of `cudnnStatus_t`.
const DNN: &[(i32, &CStr)] = &[
    (0, c"CUDNN_STATUS_SUCCESS"),
    (1001, c"CUDNN_STATUS_NOT_INITIALIZED"),
    (2000, c"CUDNN_STATUS_BAD_PARAM"),
    (2002, c"CUDNN_STATUS_BAD_PARAM_NULL_POINTER"),
    (2003, c"CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER"),
    (2004, c"CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED"),
    (2008, c"CUDNN_STATUS_BAD_PARAM_SHAPE_MISMATCH"),
    (2009, c"CUDNN_STATUS_BAD_PARAM_DUPLICATED_ENTRIES"),
    (2010, c"CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE"),
    (2012, c"CUDNN_STATUS_BAD_PARAM_DESCRIPTOR_TYPE"),
    (3000, c"CUDNN_STATUS_NOT_SUPPORTED"),
    (3001, c"CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN"),
    (3002, c"CUDNN_STATUS_NOT_SUPPORTED_SHAPE"),
    (4000, c"CUDNN_STATUS_INTERNAL_ERROR"),
    (4001, c"CUDNN_STATUS_INTERNAL_ERROR_COMPILATION_FAILED"),
    (4003, c"CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    (4004, c"CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    (5000, c"CUDNN_STATUS_EXECUTION_FAILED"),
    (5001, c"CUDNN_STATUS_EXECUTION_FAILED_CUDA_DRIVER"),
];

/// Text of a `cudnnStatus_t`.
pub(crate) fn dnn_text(number: i32) -> &'static CStr {
    DNN.iter().find(|(code, _)| *code == number).map_or(c"CUDNN_UNKNOWN_STATUS", |(_, text)| text)
}

/// Name and text of a `CUresult`; `None` for a number not in the table.
pub(crate) fn driver_text(number: i32) -> Option<(&'static CStr, &'static CStr)> {
    DRIVER.iter().find(|(code, ..)| *code == number).map(|(_, name, text)| (*name, *text))
}

/// Text of a `cublasStatus_t`; unknown numbers answer as cuBLAS does.
pub(crate) fn blas_text(number: i32) -> &'static CStr {
    BLAS.iter().find(|(code, _)| *code == number).map_or(c"<unknown>", |(_, text)| text)
}

/// Text of an `nvrtcResult`; unknown numbers answer as NVRTC does.
pub(crate) fn nvrtc_text(number: i32) -> &'static CStr {
    usize::try_from(number).ok().and_then(|index| NVRTC.get(index).copied()).unwrap_or(c"NVRTC_ERROR unknown")
}
