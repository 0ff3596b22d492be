//! Counts the calls of each entry point, records the kernels that were launched, and makes planned calls fail.

use std::collections::BTreeMap;

use crate::code::Code;

/// All functions that can be counted and made to fail, sorted.
pub(crate) const ENTRY_POINTS: &[&str] = &[
    "cuCtxGetCurrent",
    "cuCtxGetDevice",
    "cuCtxGetStreamPriorityRange",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxSetCurrent",
    "cuCtxSetFlags",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetDefaultMemPool",
    "cuDeviceGetMemPool",
    "cuDeviceGetName",
    "cuDeviceGetUuid",
    "cuDeviceGetUuid_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime",
    "cuEventElapsedTime_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncGetAttribute",
    "cuFuncGetName",
    "cuFuncGetParamInfo",
    "cuFuncSetAttribute",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphUpload",
    "cuInit",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cuMemAllocAsync",
    "cuMemAllocFromPoolAsync",
    "cuMemAlloc_v2",
    "cuMemFreeAsync",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemPoolGetAttribute",
    "cuMemPoolSetAttribute",
    "cuMemPoolTrimTo",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoD_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyHtoD_v2",
    "cuMemsetD16Async",
    "cuMemsetD16_v2",
    "cuMemsetD32Async",
    "cuMemsetD32_v2",
    "cuMemsetD8Async",
    "cuMemsetD8_v2",
    "cuModuleGetFunction",
    "cuModuleGetGlobal_v2",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags",
    "cuProfilerStart",
    "cuProfilerStop",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamGetCtx",
    "cuStreamGetFlags",
    "cuStreamGetPriority",
    "cuStreamIsCapturing",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cublasLtCreate",
    "cublasLtDestroy",
    "cublasLtMatmul",
    "cublasLtMatmulAlgoCheck",
    "cublasLtMatmulAlgoGetHeuristic",
    "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescDestroy",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatmulPreferenceCreate",
    "cublasLtMatmulPreferenceDestroy",
    "cublasLtMatmulPreferenceSetAttribute",
    "cublasLtMatrixLayoutCreate",
    "cublasLtMatrixLayoutDestroy",
    "cublasLtMatrixLayoutSetAttribute",
    "cudnnBackendCreateDescriptor",
    "cudnnBackendDestroyDescriptor",
    "cudnnBackendExecute",
    "cudnnBackendFinalize",
    "cudnnBackendGetAttribute",
    "cudnnBackendSetAttribute",
    "cudnnCreate",
    "cudnnDestroy",
    "cudnnSetStream",
    "ncclAllGather",
    "ncclAllReduce",
    "ncclBroadcast",
    "ncclCommAbort",
    "ncclCommDestroy",
    "ncclCommFinalize",
    "ncclCommGetAsyncError",
    "ncclCommInitRankConfig",
    "ncclGetUniqueId",
    "ncclGetVersion",
    "ncclGroupEnd",
    "ncclGroupStart",
    "ncclRecv",
    "ncclReduceScatter",
    "ncclSend",
    "nvrtcCompileProgram",
    "nvrtcCreateProgram",
    "nvrtcDestroyProgram",
    "nvrtcGetCUBIN",
    "nvrtcGetCUBINSize",
    "nvrtcGetNumSupportedArchs",
    "nvrtcGetPTX",
    "nvrtcGetPTXSize",
    "nvrtcGetProgramLog",
    "nvrtcGetProgramLogSize",
    "nvrtcGetSupportedArchs",
    "nvrtcVersion",
];

/// Counters and planned faults of every entry point.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    counts: BTreeMap<&'static str, u64>,
    kernels: BTreeMap<String, u64>,
    faults: Vec<Fault>,
}

/// The `remaining`-th call of `name` returns `code` and does nothing.
#[derive(Debug)]
struct Fault {
    name: String,
    remaining: u64,
    code: Code,
}

impl Calls {
    pub(crate) fn count(&mut self, name: &'static str) {
        *self.counts.entry(name).or_default() += 1;
    }

    pub(crate) fn launched(&mut self, kernel: &str) {
        if let Some(count) = self.kernels.get_mut(kernel) {
            *count += 1;
        } else {
            self.kernels.insert(kernel.to_owned(), 1);
        }
    }

    /// A line for each kernel that was launched.
    pub(crate) fn kernels(&self) -> String {
        self.kernels.keys().map(|name| format!("{name}\n")).collect()
    }

    /// A line for each kernel that was launched, with the number of launches.
    pub(crate) fn launches(&self) -> String {
        self.kernels.iter().map(|(name, count)| format!("{name} {count}\n")).collect()
    }

    /// The planned failure of this call, if there is one. Of two for the same call the first planned wins.
    pub(crate) fn injected(&mut self, name: &str) -> Option<Code> {
        let mut found = None;
        self.faults.retain_mut(|fault| {
            if fault.name != name {
                return true;
            }
            fault.remaining -= 1;
            if fault.remaining == 0 {
                found.get_or_insert(fault.code);
            }
            fault.remaining > 0
        });
        found
    }

    /// Plans `name:count:code` faults, several separated by commas. Either all are taken or none.
    pub(crate) fn plan(&mut self, text: &str) -> Result<(), String> {
        let mut planned = Vec::new();
        for item in text.split(',').map(str::trim).filter(|item| !item.is_empty()) {
            let mut parts = item.split(':');
            let (Some(name), Some(count), Some(code), None) =
                (parts.next(), parts.next(), parts.next(), parts.next())
            else {
                return Err(format!(
                    "fail: {item}: expected function:count:code, for example cuMemAllocAsync:3:2"
                ));
            };
            if !ENTRY_POINTS.contains(&name) {
                return Err(format!("fail: {name}: no entry point of that name"));
            }
            let remaining = count.parse().ok().filter(|count| *count > 0);
            let (Some(remaining), Ok(code)) = (remaining, code.parse()) else {
                return Err(format!("fail: {item}: count starts at 1, code is an integer"));
            };
            planned.push(Fault { name: name.to_owned(), remaining, code: Code(code) });
        }
        self.faults.append(&mut planned);
        Ok(())
    }

    pub(crate) fn clear_faults(&mut self) {
        self.faults.clear();
    }

    pub(crate) fn reset_counts(&mut self) {
        self.kernels.clear();
        self.counts.clear();
    }

    /// One line `name count` for every entry point called so far, by name.
    pub(crate) fn text(&self) -> String {
        self.counts.iter().map(|(name, count)| format!("{name} {count}\n")).collect()
    }
}
