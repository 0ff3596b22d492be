//! The simulated GPU, for programs that count what a process does on it.

use fp8_cuda_sim::{Control, library_path};
use fp8_nn::fp8_kernels::CudaOptions;
use fp8_nn::prelude::*;

/// The device and its controls. `cudnn`: the version of the simulated cuDNN that computes attention; `None`: no cuDNN does.
pub(crate) fn open(cudnn: Option<&str>) -> (Device, Control) {
    let library = library_path().unwrap();
    let control = Control::open(&library).unwrap();
    // The tests of the kernels look for them.
    control.set("races", "0").unwrap();
    if let Some(version) = cudnn {
        control.set("cudnn", version).unwrap();
    }
    let options = CudaOptions {
        library: Some(library),
        cache_dir: Some(std::env::temp_dir().join("fp8-nn-tests")),
        cudnn: Some(cudnn.is_some()),
        ..CudaOptions::default()
    };
    (Device::cuda_with_options(&options).unwrap(), control)
}
