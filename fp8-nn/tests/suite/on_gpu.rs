//! The cases of `every_device` on a GPU, the simulated one unless told otherwise, and those of recorded steps.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use fp8_cuda_sim::{Control, library_path};
use fp8_nn::fp8_kernels::CudaOptions;
use fp8_nn::prelude::Device;

mod accumulation;
mod every_device;
mod graph;
mod graph_fp8_weights;
mod graph_loss_scale;
mod graph_moments;
mod training;

/// The simulated GPU that was built beside this program, or, where `FP8_TEST_DEVICE` is `cuda`, this machine's.
fn open() -> Device {
    match std::env::var("FP8_TEST_DEVICE").as_deref() {
        Err(_) | Ok("") => {}
        Ok("cuda") => return Device::cuda(0).unwrap(),
        Ok(other) => panic!("FP8_TEST_DEVICE={other}: expected cuda, or nothing for the simulated GPU"),
    }
    let library = library_path().unwrap();
    // The tests of the kernels look for them.
    Control::open(&library).unwrap().set("races", "0").unwrap();
    let options = CudaOptions {
        library: Some(library),
        cache_dir: Some(std::env::temp_dir().join("fp8-nn-tests")),
        ..CudaOptions::default()
    };
    let device = Device::cuda_with_options(&options).unwrap();
    assert!(device.is_simulated());
    device
}
