//! The cases of `every_device` on a GPU, the simulated one unless told otherwise.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests")]

use fp8_cuda_sim::library_path;
use fp8_recipe::fp8_kernels::{CudaAllocator, CudaOptions, Device};

mod every_device;
mod recorded;

/// The simulated GPU that was built beside this program, or, where `FP8_TEST_DEVICE` is `cuda`, this machine's.
fn open() -> Device {
    match std::env::var("FP8_TEST_DEVICE").as_deref() {
        Err(_) | Ok("") => {}
        Ok("cuda") => return Device::cuda(0).unwrap(),
        Ok(other) => panic!("FP8_TEST_DEVICE={other}: expected cuda, or nothing for the simulated GPU"),
    }
    // Each tensor is an allocation of its own: every byte beyond its end is seen.
    let options = CudaOptions {
        library: Some(library_path().unwrap()),
        cache_dir: Some(std::env::temp_dir().join("fp8-recipe-tests")),
        allocator: Some(CudaAllocator::Exact),
        ..CudaOptions::default()
    };
    let device = Device::cuda_with_options(&options).unwrap();
    assert!(device.is_simulated());
    device
}
