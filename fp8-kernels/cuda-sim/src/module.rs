//! Loaded modules and their functions.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::Arc;

use parking_lot::Mutex;
use ptx_interp::Module;

use crate::code::{Code, Outcome};
use crate::device::{self, Arch};
use crate::image::Image;
use crate::report;
use crate::snapshot;

/// Parsed modules, by their text. The devices that a process opens one after the other load the same few modules.
static PARSED: Mutex<BTreeMap<String, Arc<Module>>> = Mutex::new(BTreeMap::new());

/// The shared memory that a kernel declares with a size, at most 48 KiB on every GPU.
///
/// CUDA C++ Programming Guide, "Shared Memory" of compute capability 7.x and later: "Kernels relying on shared memory
/// allocations over 48 KB per block […] must use dynamic shared memory (rather than statically sized arrays)". The
/// compiler fails otherwise: "Entry function uses too much shared data".
fn check_shared(module: &Module) -> Outcome {
    for kernel in module.kernels() {
        let (found, most) = (kernel.static_shared(), device::SHARED_PER_BLOCK);
        if found > most as usize {
            let name = kernel.name();
            report::print(&format!(
                "cuModuleLoadData: entry function {name} uses too much shared data: {found} bytes, {most} at most"
            ));
            return Err(Code::INVALID_PTX);
        }
    }
    Ok(())
}

/// CUDA Driver API, CUDA_ERROR_INVALID_PTX: "a PTX JIT compilation failed".
fn parse(ptx: &str) -> Outcome<Arc<Module>> {
    let mut parsed = PARSED.lock();
    if let Some(module) = parsed.get(ptx) {
        return Ok(module.clone());
    }
    let refuse = |error| {
        report::print(&format!("cuModuleLoadData: {error}"));
        Code::INVALID_PTX
    };
    let mut module = Module::parse(ptx).map_err(refuse)?;
    if let Some(lines) = snapshot::lines(ptx) {
        module.set_lines(lines).map_err(refuse)?;
    }
    check_shared(&module)?;
    Ok(parsed.entry(ptx.to_owned()).or_insert(Arc::new(module)).clone())
}

#[derive(Debug, Default)]
pub(crate) struct Modules {
    modules: BTreeMap<u64, Loaded>,
    functions: BTreeMap<u64, Function>,
}

#[derive(Debug)]
struct Loaded {
    module: Arc<Module>,
    target: u32,
    version: u32,
}

/// A kernel of a loaded module.
#[derive(Debug)]
pub(crate) struct Function {
    owner: u64,
    pub(crate) module: Arc<Module>,
    /// As the caller named it; `cuFuncGetName` hands out its address.
    pub(crate) name: CString,
    /// `(offset, size)` of each parameter in the parameter buffer.
    pub(crate) params: Vec<(usize, usize)>,
    pub(crate) params_size: usize,
    pub(crate) static_shared: u32,
    pub(crate) local: u32,
    /// `.maxntid`.
    pub(crate) max_threads: Option<u32>,
    pub(crate) registers: u32,
    pub(crate) target: u32,
    pub(crate) version: u32,
    /// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
    pub(crate) dynamic_limit: u32,
}

impl Modules {
    pub(crate) fn load(&mut self, handle: u64, image: &Image) -> Outcome {
        let loaded =
            Loaded { module: parse(&image.ptx)?, target: image.target.number, version: image.version };
        self.modules.insert(handle, loaded);
        Ok(())
    }

    /// Launches that are queued keep the code alive.
    pub(crate) fn unload(&mut self, handle: u64) -> Outcome {
        self.modules.remove(&handle).ok_or(Code::INVALID_HANDLE)?;
        self.functions.retain(|_, function| function.owner != handle);
        Ok(())
    }

    pub(crate) fn is_loaded(&self, handle: u64) -> bool {
        self.modules.contains_key(&handle)
    }

    pub(crate) fn count(&self) -> usize {
        self.modules.len()
    }

    /// The handle of a kernel: the one it has already, or `fresh`.
    ///
    /// CUDA Driver API, cuModuleGetFunction: "If no function of that name exists, cuModuleGetFunction() returns
    /// CUDA_ERROR_NOT_FOUND."
    pub(crate) fn function_handle(&mut self, module: u64, name: &str, fresh: u64) -> Outcome<u64> {
        let loaded = self.modules.get(&module).ok_or(Code::INVALID_HANDLE)?;
        let kernel = loaded.module.kernel(name).ok_or(Code::NOT_FOUND)?;
        let c_name = CString::new(name).map_err(|_| Code::NOT_FOUND)?;
        let known = |(_, function): &(&u64, &Function)| function.owner == module && function.name == c_name;
        if let Some((handle, _)) = self.functions.iter().find(known) {
            return Ok(*handle);
        }
        let static_shared = u32::try_from(kernel.static_shared()).map_err(|_| Code::INVALID_IMAGE)?;
        let function = Function {
            owner: module,
            module: Arc::clone(&loaded.module),
            name: c_name,
            params: kernel.params().iter().map(|param| (param.offset, param.size)).collect(),
            params_size: kernel.params_size(),
            static_shared,
            local: u32::try_from(kernel.local_bytes()).unwrap_or(u32::MAX),
            max_threads: kernel.max_threads(),
            registers: kernel.registers(),
            target: loaded.target,
            version: loaded.version,
            dynamic_limit: device::SHARED_PER_BLOCK.saturating_sub(static_shared),
        };
        self.functions.insert(fresh, function);
        Ok(fresh)
    }

    pub(crate) fn function(&self, handle: u64) -> Outcome<&Function> {
        self.functions.get(&handle).ok_or(Code::INVALID_HANDLE)
    }

    pub(crate) fn function_mut(&mut self, handle: u64) -> Outcome<&mut Function> {
        self.functions.get_mut(&handle).ok_or(Code::INVALID_HANDLE)
    }
}

impl Function {
    pub(crate) fn thread_limit(&self) -> u32 {
        self.max_threads.unwrap_or(device::THREADS_PER_BLOCK).min(device::THREADS_PER_BLOCK)
    }

    /// Registers of a thread. PTX has virtual ones without number, so this is an upper estimate: what the PTX declares,
    /// cut to what lets a block of the declared size run.
    pub(crate) fn registers(&self) -> u32 {
        let fitting =
            (device::REGISTERS / self.thread_limit().next_multiple_of(device::WARP).max(1)).min(255);
        self.registers.clamp(16, fitting.max(16))
    }

    /// Blocks of this shape that fit on one multiprocessor: limited by threads, blocks, registers and shared memory.
    pub(crate) fn blocks_per_sm(&self, arch: Arch, threads: u32, dynamic: u64) -> u32 {
        if threads == 0 || threads > self.thread_limit() {
            return 0;
        }
        let threads = threads.next_multiple_of(device::WARP);
        let shared = u64::from(self.static_shared) + dynamic;
        if shared > u64::from(arch.shared_optin()) {
            return 0;
        }
        let shared = shared.next_multiple_of(128) + u64::from(device::SHARED_RESERVED);
        let by_shared = u32::try_from(u64::from(arch.shared_per_sm()) / shared).unwrap_or(u32::MAX);
        let by_registers = device::REGISTERS / (self.registers().next_multiple_of(8) * threads).max(1);
        (arch.threads_per_sm() / threads).min(arch.blocks_per_sm()).min(by_shared).min(by_registers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;

    /// The text of cells.cu, which is somewhere below the folder.
    fn cells(folder: &Path) -> Option<String> {
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).find_map(|path| {
            if path.is_dir() {
                cells(&path)
            } else {
                path.ends_with("cells.cu").then(|| fs::read_to_string(&path).unwrap())
            }
        })
    }

    #[test]
    fn a_fault_in_a_shipped_kernel_names_its_line_of_the_source() {
        let ptx = include_str!("../../ptx/cells.ptx");
        assert!(!ptx.contains(".loc"));
        let module = parse(ptx).unwrap();
        let kernel = module.kernel("cells_merge_max").unwrap();
        // Two null pointers and a count of one.
        let mut params = vec![0; kernel.params_size()];
        params[kernel.params()[2].offset] = 1;
        let launch = ptx_interp::Launch { params: &params, ..Default::default() };
        let report = ptx_interp::run(kernel, &launch, &ptx_interp::Memory::new()).unwrap_err();
        let line = report.line.clone().unwrap();
        let source = cells(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../src")).unwrap();
        let text = source.lines().nth(line.line as usize - 1).unwrap().trim();
        assert_eq!((line.file.as_str(), text), ("cells.cu", "int old = cells[i], value = values[i];"));
        let expected = format!("out of bounds in cells_merge_max (cells.cu:{}), PTX line ", line.line);
        assert!(report.to_string().starts_with(&expected), "{report}");
    }
}
