//! Measures the host's part of a Linear's forward on a GPU: microseconds, launches and heap allocations a call.
//!
//! `cargo bench -p fp8-nn --bench host`. On the simulated GPU, whose kernels are switched off: what is left is this
//! library's own time and that of the simulated driver's calls, which take a lock and copy arguments. Not a bench of
//! criterion's, since allocations are counted too; times are medians of several thousand calls. A heap allocation makes it
//! fail, as does an allocation of device memory, or more than [`MORE_CALLS`] calls beyond bf16's; a time over [`BUDGET`] is only
//! remarked, for machines differ.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a bench fails by panicking, and prints")]
#![expect(unsafe_code, reason = "an allocator that counts")]

use fp8_cuda_sim::{Control, library_path};
use fp8_nn::fp8_kernels::CudaOptions;
use fp8_nn::prelude::*;
use fp8_nn::rand::{SeedableRng, rngs::StdRng};
use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

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

/// Microseconds that a call may take.
const BUDGET: f64 = 10.0;
/// The number of library calls that a forward pass in FP8 may make beyond one in bf16: a launch, and the context made current
/// before it.
const MORE_CALLS: f64 = 2.0;
/// Rounds, and calls in each.
const ROUNDS: usize = 15;
const CALLS: u32 = 1000;
/// The functions of the driver and cuBLASLt that queue work on the device.
const LAUNCHES: [&str; 4] = ["cuLaunchKernel", "cublasLtMatmul", "cuMemsetD8Async", "cuMemsetD32Async"];

fn main() -> ExitCode {
    // `cargo test --benches` runs every bench once, with this argument.
    let rounds = if std::env::args().any(|arg| arg == "--test") { 1 } else { ROUNDS };
    let library = library_path().unwrap();
    let control = Control::open(&library).unwrap();
    let options = CudaOptions { library: Some(library), ..CudaOptions::default() };
    let device = Device::cuda_with_options(&options).unwrap();
    println!("{}, its kernels switched off", device.description());
    let (mut total, mut failed) = (0, false);
    let mut counts: Vec<(&str, BTreeMap<String, f64>)> = Vec::new();
    println!(
        "| Linear forward | us a call | launches | calls of libraries | of which for memory | heap allocations |"
    );
    println!("|---|---|---|---|---|---|");
    for (name, enabled) in [("bf16", false), ("FP8, delayed", true)] {
        let params_dtype = DType::BF16;
        let sizes = LinearOptions { in_features: 64, out_features: 64, params_dtype, ..Default::default() };
        let model = Linear::new("fc", sizes, &device, &mut StdRng::seed_from_u64(1)).unwrap();
        let mut scaling = Scaling::new(&model, &device).unwrap();
        let recipe = Recipe::from(DelayedScaling::default());
        let autocast = AutocastOptions { enabled, ..Default::default() };
        let x = Tensor::full(0.5, [64, 64], params_dtype, &device).unwrap();
        // Kernels are compiled, the product is planned, slots have their scales.
        for _ in 0..3 {
            let mut cx = scaling.scope(&recipe, &autocast).unwrap();
            model.forward(&mut cx, &x).unwrap();
            cx.commit().unwrap();
            device.synchronize().unwrap();
        }
        control.set("stub", "1").unwrap();
        let mut cx = scaling.scope(&recipe, &autocast).unwrap();
        let mut forwards = || (0..CALLS).for_each(|_| drop(model.forward(&mut cx, &x).unwrap()));
        forwards();
        let mut microseconds = Vec::with_capacity(rounds);
        let (called, allocated) = (control.calls(), ALLOCATIONS.load(Relaxed));
        for _ in 0..rounds {
            let start = Instant::now();
            forwards();
            microseconds.push(start.elapsed().as_secs_f64() * 1e6 / f64::from(CALLS));
        }
        let a_call = |count: u64| count as f64 / (rounds as f64 * f64::from(CALLS));
        let allocated = ALLOCATIONS.load(Relaxed) - allocated;
        let now = control.calls();
        let since = |name: &str| now.get(name).copied().unwrap_or(0) - called.get(name).copied().unwrap_or(0);
        let launches = a_call(LAUNCHES.iter().map(|name| since(name)).sum());
        let by_function: BTreeMap<String, f64> = now
            .keys()
            .filter(|name| since(name) > 0)
            .map(|name| (name.clone(), a_call(since(name))))
            .collect();
        let calls: f64 = by_function.values().sum();
        let is_memory = |name: &&String| name.starts_with("cuMemAlloc") || name.starts_with("cuMemFree");
        let memory: f64 = by_function.keys().filter(is_memory).map(|name| by_function[name]).sum();
        microseconds.sort_by(f64::total_cmp);
        let median = microseconds[microseconds.len() / 2];
        let allocations = a_call(allocated);
        println!("| {name} | {median:.2} | {launches:.1} | {calls:.1} | {memory:.1} | {allocations:.4} |");
        if median > BUDGET {
            println!("{name}: {median:.2} us, over the {BUDGET} us that it may take");
        }
        total += allocated;
        if memory > 0.0 {
            println!("{name}: {memory} calls for device memory: expected none");
            failed = true;
        }
        counts.push((name, by_function));
        drop(cx);
        control.set("stub", "0").unwrap();
    }
    for (name, by_function) in &counts {
        let each: Vec<_> =
            by_function.iter().map(|(function, count)| format!("{function} {count:.1}")).collect();
        println!("{name}: {}", each.join(", "));
    }
    if let [(_, bf16), (_, fp8)] = &*counts {
        let more = fp8.values().sum::<f64>() - bf16.values().sum::<f64>();
        println!("calls of libraries in FP8 beyond bf16's: {more:.1}, at most {MORE_CALLS:.1}");
        failed |= more > MORE_CALLS + 0.01;
    }
    if total > 0 {
        println!("{total} heap allocations in all: expected none");
    }
    if total > 0 || failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
