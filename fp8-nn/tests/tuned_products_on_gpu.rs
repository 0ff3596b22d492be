//! The kernels that tuning chose for products, saved with checkpoints and taken from one rank by all, on the simulated GPU.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use fp8_cuda_sim::library_path;
use fp8_nn::fp8_dist::{local, share_tuned_products};
use fp8_nn::fp8_kernels::{CudaOptions, GemmTuning, TunedProducts};
use fp8_nn::prelude::*;
use fp8_nn::rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

fn open(candidates: usize) -> Device {
    let options = CudaOptions {
        library: library_path(),
        cache_dir: Some(std::env::temp_dir().join("fp8-nn-tests")),
        gemm_tuning: Some(GemmTuning { candidates, file: None }),
        ..CudaOptions::default()
    };
    Device::cuda_with_options(&options).unwrap()
}

/// A layer with its state on a device.
struct Training {
    device: Device,
    model: Linear,
    optimizer: AdamW,
    scaling: Scaling,
}

impl Training {
    fn new(candidates: usize) -> Self {
        let device = open(candidates);
        let options = LinearOptions { in_features: 64, out_features: 64, ..Default::default() };
        let model = Linear::new("fc", options, &device, &mut ChaCha8Rng::seed_from_u64(1)).unwrap();
        let scaling = Scaling::new(&model, &device).unwrap();
        Self { device, model, optimizer: AdamW::new(AdamWOptions::default()).unwrap(), scaling }
    }

    fn forward(&mut self) {
        let recipe = Recipe::from(DelayedScaling::default());
        let x = Tensor::full(0.5, [64, 64], DType::F32, &self.device).unwrap();
        self.scaling.in_autocast(&recipe, |cx| self.model.forward(cx, &x).map(drop)).unwrap();
    }

    fn load(&mut self, dir: &Path) {
        checkpoint::load(dir, &mut self.model, &mut self.optimizer, &mut self.scaling).unwrap();
    }
}

#[test]
fn a_checkpoint_brings_the_kernels_of_products() {
    let dir = tempfile::tempdir().unwrap();
    let mut first = Training::new(3);
    first.forward();
    let tuned = first.device.tuned_products();
    assert!(!tuned.is_empty());
    checkpoint::save(dir.path(), &first.model, &first.optimizer, &first.scaling, &Default::default())
        .unwrap();

    let mut second = Training::new(0);
    assert!(second.device.tuned_products().is_empty());
    second.load(dir.path());
    assert_eq!(second.device.tuned_products(), tuned);
    second.forward();
    // On the CPU, and in a file that says something else, they make no difference.
    let path = checkpoint::path(dir.path());
    let bytes = std::fs::read(&path).unwrap();
    let at = bytes.windows(22).position(|window| window == b"\"fp8.tuned_products\":\"").unwrap() + 22;
    for byte in [b'?', b'\\'] {
        let mut other = bytes.clone();
        // The first letter of the GPU's name; or a tab instead of its first two.
        match byte {
            b'?' => other[at] = byte,
            _ => other[at..at + 2].copy_from_slice(b"\\t"),
        }
        std::fs::write(&path, other).unwrap();
        let mut third = Training::new(0);
        third.load(dir.path());
        assert_eq!(third.device.tuned_products(), TunedProducts::default());
        third.forward();
    }
}

#[test]
fn all_ranks_take_the_kernels_of_one() {
    let run = |group: Arc<dyn ProcessGroup>, with_state: bool| {
        let mut training = Training::new(if group.rank() == 1 { 3 } else { 0 });
        training.forward();
        assert_eq!(training.device.tuned_products().is_empty(), group.rank() != 1);
        if with_state {
            let Training { model, optimizer, scaling, .. } = &mut training;
            broadcast_state(model, optimizer, scaling, &*group, 1).unwrap();
        } else {
            let taken = share_tuned_products(&*group, &training.device, 1).unwrap();
            assert_eq!(taken, training.device.tuned_products().len());
        }
        training.forward();
        training.device.tuned_products()
    };
    for with_state in [false, true] {
        let groups = local("dp", 2, Duration::from_secs(60)).unwrap();
        let tuned: Vec<TunedProducts> = thread::scope(|scope| {
            let ranks: Vec<_> =
                groups.into_iter().map(|group| scope.spawn(move || run(group, with_state))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert!(!tuned[1].is_empty());
        assert_eq!(tuned[0], tuned[1]);
    }
}
