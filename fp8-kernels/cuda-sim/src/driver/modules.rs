//! Modules.

use crate::code::Code;
use crate::entry::entries;
use crate::ffi::{Host, In, Out};
use crate::image;

/// Tags of module and function handles.
const MODULE: u64 = 3;
const FUNCTION: u64 = 4;

entries! {
    Context fn cuModuleLoadData(module: Out<u64>, image: Host) |driver| {
        let module = module.checked()?;
        let image = image::read(image, driver.settings.arch)?;
        let handle = driver.handle(MODULE);
        driver.context()?.modules.load(handle, &image)?;
        module.set(handle)
    }

    Release fn cuModuleUnload(module: u64) |driver| {
        driver.context()?.modules.unload(module)
    }

    Context fn cuModuleGetFunction(function: Out<u64>, module: u64, name: In) |driver| {
        let function = function.checked()?;
        let name = name.text()?;
        let fresh = driver.handle(FUNCTION);
        function.set(driver.context()?.modules.function_handle(module, &name, fresh)?)
    }

    // CUDA Driver API, cuModuleGetGlobal: "If no variable of that name exists, cuModuleGetGlobal() returns
    // CUDA_ERROR_NOT_FOUND." Variables of modules have no address on this device.
    Context fn cuModuleGetGlobal_v2(_address: Out<u64>, _bytes: Out<usize>, module: u64, name: In) |driver| {
        name.text()?;
        if !driver.context()?.modules.is_loaded(module) {
            return Err(Code::INVALID_HANDLE);
        }
        Err(Code::NOT_FOUND)
    }
}
