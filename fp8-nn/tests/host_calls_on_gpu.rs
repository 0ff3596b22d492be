//! The host's part of a Linear's forward pass on a GPU, counted: calls of NVIDIA's libraries and heap allocations. The test is
//! a program of its own, because the counts are those of the process.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(unsafe_code, reason = "an allocator that counts")]

mod simulated;

use fp8_nn::prelude::*;
use fp8_nn::rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: hands everything to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Layers of one shape, which share a plan of the product.
const LAYERS: usize = 3;
const ROUNDS: usize = 4;

/// The work of the host in one forward pass through all layers, once warm.
#[derive(Debug)]
struct Host {
    calls: BTreeMap<String, u64>,
    heap: u64,
}

impl Host {
    fn all(&self) -> u64 {
        self.calls.values().sum()
    }

    fn memory(&self) -> u64 {
        let is_memory = |name: &str| name.starts_with("cuMemAlloc") || name.starts_with("cuMemFree");
        self.calls.iter().filter(|(name, _)| is_memory(name)).map(|(_, count)| count).sum()
    }
}

fn host(enabled: bool) -> Host {
    let (device, control) = simulated::open(None);
    let options =
        LinearOptions { in_features: 64, out_features: 64, params_dtype: DType::BF16, ..Default::default() };
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let models: Vec<Linear> = (0..LAYERS)
        .map(|i| Linear::new(&format!("fc{i}"), options.clone(), &device, &mut rng).unwrap())
        .collect();
    let mut scalings: Vec<Scaling> =
        models.iter().map(|model| Scaling::new(model, &device).unwrap()).collect();
    let recipe = Recipe::from(DelayedScaling::default());
    let autocast = AutocastOptions { enabled, ..Default::default() };
    let x = Tensor::full(0.5, [64, 64], DType::BF16, &device).unwrap();
    // Kernels are compiled, the product is planned, slots have their scales.
    for _ in 0..3 {
        for (model, scaling) in models.iter().zip(&mut scalings) {
            let mut cx = scaling.scope(&recipe, &autocast).unwrap();
            model.forward(&mut cx, &x).unwrap();
            cx.commit().unwrap();
            device.synchronize().unwrap();
        }
    }
    let mut scopes: Vec<Forward<'_>> =
        scalings.iter_mut().map(|scaling| scaling.scope(&recipe, &autocast).unwrap()).collect();
    // What backward needs is kept as in a training step, and dropped in another order than it was made.
    let mut kept = Vec::with_capacity(LAYERS);
    let mut forward = || {
        for (model, cx) in models.iter().zip(&mut scopes) {
            kept.push(model.forward(cx, &x).unwrap());
        }
        kept.clear();
    };
    (0..ROUNDS).for_each(|_| forward());
    let (before, heap) = (control.calls(), ALLOCATIONS.load(Relaxed));
    (0..ROUNDS).for_each(|_| forward());
    let heap = ALLOCATIONS.load(Relaxed) - heap;
    let rounds = ROUNDS as u64;
    let since = |(name, count): (String, u64)| {
        let count = count - before.get(&name).copied().unwrap_or(0);
        assert_eq!(count % rounds, 0, "{name} is not called equally often in each round");
        (count > 0).then_some((name, count / rounds))
    };
    Host { calls: control.calls().into_iter().filter_map(since).collect(), heap }
}

#[test]
fn a_linear_in_fp8_makes_two_calls_more_than_in_bf16_and_allocates_nothing() {
    let (bf16, fp8) = (host(false), host(true));
    let layers = LAYERS as u64;
    assert_eq!(bf16.calls["cublasLtMatmul"], layers);
    assert_eq!(fp8.calls["cublasLtMatmul"], layers);
    // The input's cast is the launch. The weights stay quantized.
    assert_eq!((bf16.calls.get("cuLaunchKernel"), fp8.calls["cuLaunchKernel"]), (None, layers));
    assert!(fp8.all() <= bf16.all() + 2 * layers, "{:?}, in bf16 {:?}", fp8.calls, bf16.calls);
    assert!(bf16.all() <= 2 * layers, "{:?}", bf16.calls);
    for host in [bf16, fp8] {
        assert_eq!((host.memory(), host.heap), (0, 0), "{:?}", host.calls);
    }
}
