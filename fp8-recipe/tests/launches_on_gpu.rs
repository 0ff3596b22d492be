//! Tests of the number of kernels that a recipe launches on a GPU, counted by the simulated GPU. They are a separate
//! program, because the counts are those of the whole process.
#![expect(clippy::unwrap_used, reason = "tests")]

use fp8_cuda_sim::{Control, library_path};
use fp8_recipe::fp8_kernels::{CudaOptions, Device, Tensor, ops};
use fp8_recipe::{
    CurrentScaling, DelayedScaling, Direction, GemmSlots, Recipe, Scaling, SlotName, SlotRole, Slots,
};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Layers of one GEMM each.
struct Model(Vec<GemmSlots>);

impl Slots for Model {
    fn slots(&self, f: &mut dyn FnMut(&SlotName)) {
        self.0.iter().for_each(|layer| layer.slots(f));
    }
}

/// One test at a time: two would count each other's kernels.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn open() -> (Device, Control) {
    let library = library_path().unwrap();
    let options = CudaOptions {
        library: Some(library.clone()),
        cache_dir: Some(std::env::temp_dir().join("fp8-recipe-tests")),
        ..CudaOptions::default()
    };
    let device = Device::cuda_with_options(&options).unwrap();
    (device, Control::open(&library).unwrap())
}

/// Runs `f` and returns the number of kernels that it launches, and their names.
fn launches<T>(device: &Device, control: &Control, f: impl FnOnce() -> T) -> (u64, Vec<String>) {
    device.synchronize().unwrap();
    control.set("reset_calls", "").unwrap();
    f();
    device.synchronize().unwrap();
    (control.calls().get("cuLaunchKernel").copied().unwrap_or(0), control.kernels())
}

/// A step of all layers in one direction; returns what its commit launches.
fn commit(
    scaling: &mut Scaling,
    recipe: &Recipe,
    layers: usize,
    device: &Device,
    control: &Control,
) -> [(u64, Vec<String>); 2] {
    let x = Tensor::full(0.5, [4, 16], fp8_recipe::fp8_kernels::DType::F32, device).unwrap();
    let mut origins = Vec::new();
    let mut cx = scaling.autocast(recipe).unwrap();
    for layer in 0..layers {
        for role in [SlotRole::Input, SlotRole::Weight] {
            let name = SlotName::new(&format!("{layer}"), role);
            ops::quantize(&x, &cx.slot(&name).unwrap()).unwrap();
            origins.push((layer, cx.origin(&name)));
        }
    }
    let forward = launches(device, control, || cx.commit().unwrap());
    let mut cx = scaling.backward().unwrap();
    for (layer, origin) in &origins {
        let name = SlotName::new(&format!("{layer}"), SlotRole::GradOutput);
        ops::quantize(&x, &cx.slot(origin, &name).unwrap()).unwrap();
    }
    [forward, launches(device, control, || cx.commit().unwrap())]
}

#[test]
fn one_kernel_updates_all_slots_of_a_direction() {
    let _alone = alone();
    let (device, control) = open();
    for layers in [1, 7, 400] {
        let model = Model((0..layers).map(|i| GemmSlots::new(&format!("{i}"))).collect());
        let mut scaling = Scaling::new(&model, &device).unwrap();
        assert_eq!(scaling.slot_names(Direction::Forward).len(), 2 * layers, "input, weight");
        assert_eq!(scaling.slot_names(Direction::Backward).len(), layers, "grad_output");
        let recipe = Recipe::from(DelayedScaling { amax_history_len: 4, ..Default::default() });
        let used = layers.min(7);
        // First scales are made in the first step; then the state is settled.
        commit(&mut scaling, &recipe, used, &device, &control);
        for (count, kernels) in commit(&mut scaling, &recipe, used, &device, &control) {
            assert_eq!((count, kernels), (1, vec!["update_scales".to_owned()]), "{layers} layers");
        }
    }
}

#[test]
fn delayed_scaling_reads_a_tensor_once_and_current_scaling_twice() {
    let _alone = alone();
    let (device, control) = open();
    let x = Tensor::full(0.5, [4, 16], fp8_recipe::fp8_kernels::DType::F32, &device).unwrap();
    let name = SlotName::new("fc", SlotRole::Input);
    let kernels = |recipe: Recipe| {
        let mut scaling = Scaling::new(&Model(vec![GemmSlots::new("fc")]), &device).unwrap();
        let mut quantize = || {
            let mut cx = scaling.autocast(&recipe).unwrap();
            let launched =
                launches(&device, &control, || ops::quantize(&x, &cx.slot(&name).unwrap()).unwrap());
            cx.commit().unwrap();
            // Kernels that read x.
            let reads = |kernel: &String| {
                kernel == "amax" || kernel.starts_with("quantize_") && kernel != "quantize_scale"
            };
            launched.1.into_iter().filter(reads).count()
        };
        // The first step is a calibration.
        quantize();
        quantize()
    };
    assert_eq!(kernels(DelayedScaling::default().into()), 1);
    assert_eq!(kernels(CurrentScaling::default().into()), 2);
}
