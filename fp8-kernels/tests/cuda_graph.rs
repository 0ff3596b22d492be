//! Recorded work: what a graph holds, what it gives back, and what a recording that fails leaves behind.

#![cfg(feature = "cuda")]
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod cuda;

use cuda::Rig;
use cuda::step::Step;
use fp8_kernels::ops::{Packing, PackingCapacity, RopeTable, ScoreOptions, Sequences};
use fp8_kernels::{CudaAllocator, CudaOptions, DType, Device, Error, Result, Tensor, ops};
use std::panic::{AssertUnwindSafe, catch_unwind};

const BOTH: [CudaAllocator; 2] = [CudaAllocator::Caching, CudaAllocator::Exact];
const LEN: usize = 300;

fn open(rig: &Rig, allocator: CudaAllocator) -> Device {
    Device::cuda_with_options(&CudaOptions { allocator: Some(allocator), ..rig.options() }).unwrap()
}

fn filled(value: f32, device: &Device) -> Result<Tensor> {
    Tensor::from_vec(vec![value; LEN], [LEN], device)
}

/// The value that all elements have.
#[track_caller]
fn value(tensor: &Tensor) -> f32 {
    let values = tensor.to_vec::<f32>().unwrap();
    assert!(values.iter().all(|value| *value == values[0]), "{values:?}");
    values[0]
}

/// `2 (x + 1)`, and both steps' kernels compiled.
fn step(x: &Tensor, one: &Tensor) -> Result<Tensor> {
    ops::scale(&ops::add(x, one)?, 2.0)
}

/// Lists what is alive once the queue is empty, without addresses and numbers of allocations.
fn live(rig: &Rig, device: &Device) -> Vec<String> {
    device.synchronize().unwrap();
    let text = rig.control.live();
    let kind = |line: &str| match line.split_whitespace().collect::<Vec<_>>()[..] {
        [kind @ ("device" | "pinned"), _, bytes, ..] => format!("{kind} {bytes}"),
        _ => line.to_owned(),
    };
    let mut lines: Vec<String> = text.lines().map(kind).collect();
    lines.sort();
    lines
}

#[test]
fn a_packing_is_refilled_between_replays() {
    let rig = Rig::new();
    for allocator in BOTH {
        let device = open(&rig, allocator);
        let room = PackingCapacity { sequences: 3, queries: 80, keys: 80 };
        let packing = |lengths: &[usize]| Packing::with_capacity(lengths, lengths, room, &device).unwrap();
        let values = (0..640u16).map(|i| f32::from(i * 37 % 101) / 50.0 - 1.0).collect();
        let x = Tensor::from_vec(values, [1, 80, 1, 8], &device).unwrap();
        let table = RopeTable::new(80, 8, 100.0, &device).unwrap();
        let step = |packing: &Packing| -> Result<[Tensor; 4]> {
            let q = ops::rope(&x, &table, packing.positions())?;
            let (sequences, options) = (Sequences::Packed(packing.clone()), ScoreOptions::default());
            let (o, saved) = ops::attention(&q, &q, &x, &sequences, options)?;
            let (dq, dk, dv) = ops::attention_backward(&x, &q, &q, &x, &o, &saved, &sequences, options)?;
            Ok([o, dq, dk, dv])
        };
        let mut refilled = packing(&[50, 30]);
        step(&refilled).unwrap();
        let (graph, recorded) = device.capture(|| step(&refilled)).unwrap();
        for lengths in [&[80][..], &[1, 64, 9], &[], &[50, 30]] {
            refilled.set(lengths, lengths).unwrap();
            graph.replay().unwrap();
            let eager = step(&packing(lengths)).unwrap();
            for (recorded, eager) in recorded.iter().zip(&eager) {
                assert_eq!(recorded.to_vec::<f32>().unwrap(), eager.to_vec::<f32>().unwrap(), "{lengths:?}");
            }
        }
    }
    rig.finish();
}

#[test]
fn steady_replays_ask_the_driver_for_nothing_else() {
    let rig = Rig::new();
    for allocator in BOTH {
        let device = open(&rig, allocator);
        let mut recorded = Step::new(&device, 2.0).unwrap();
        let mut eager = Step::new(&device, 2.0).unwrap();
        let queue = |step: &mut Step| -> Result<()> {
            let x = step.quantize()?;
            step.update()?;
            drop(x);
            Ok(())
        };
        for _ in 0..2 {
            queue(&mut recorded).unwrap();
            device.synchronize().unwrap();
        }
        let (graph, ()) = device.capture(|| queue(&mut recorded)).unwrap();
        graph.replay().unwrap();
        let before = rig.control.calls();
        for _ in 0..3 {
            graph.replay().unwrap();
        }
        let calls = rig.calls_since(&before);
        assert_eq!(calls["cuGraphLaunch"], 3);
        let others = ["cuCtxGetCurrent", "cuCtxSetCurrent", "cuGraphLaunch"];
        assert!(calls.keys().all(|call| others.contains(&call.as_str())), "{calls:?}");
        for _ in 0..7 {
            queue(&mut eager).unwrap();
        }
        assert_eq!(recorded.scaling().unwrap(), eager.scaling().unwrap(), "seven steps each");
        drop((graph, recorded, eager, device));
    }
    rig.finish();
}

#[test]
fn what_a_graph_holds_is_given_back_with_it() {
    let rig = Rig::new();
    for seed in ["0", "1", "2", "3"] {
        rig.control.set("seed", seed).unwrap();
        let device = open(&rig, CudaAllocator::Exact);
        // Once before: the second stream and the ring of pinned memory stay with the device.
        for warm in [true, false] {
            let before = live(&rig, &device);
            let (x, one) = (filled(1.0, &device).unwrap(), filled(1.0, &device).unwrap());
            step(&x, &one).unwrap();
            let (graph, result) = device.capture(|| step(&x, &one)).unwrap();
            let noise = |value| filled(value, &device).unwrap();
            drop((x, one));
            let noise: Vec<Tensor> = (0..4u8).map(|i| noise(f32::from(i))).collect();
            // Its inputs are still there, its output is its own.
            graph.replay().unwrap();
            assert_eq!((value(&result), value(&noise[3])), (4.0, 3.0));
            drop((result, noise));
            graph.replay().unwrap();
            device.synchronize().unwrap();
            let held = live(&rig, &device).len();
            assert!(held > before.len() + 3, "{held} of {}", before.len());
            drop(graph);
            if !warm {
                assert_eq!(live(&rig, &device), before, "seed {seed}");
            }
        }
        drop(device);
        assert_eq!(rig.control.live(), "");
    }
    rig.finish();
}

#[test]
fn kept_memory_is_bounded_over_many_recordings() {
    let rig = Rig::new();
    let device = open(&rig, CudaAllocator::Caching);
    let (x, one) = (filled(1.0, &device).unwrap(), filled(1.0, &device).unwrap());
    drop(step(&x, &one).unwrap());
    let mut lives = Vec::new();
    for _ in 0..5 {
        let (graph, result) = device.capture(|| step(&x, &one)).unwrap();
        graph.replay().unwrap();
        assert_eq!(value(&result), 4.0);
        drop((graph, result));
        lives.push(live(&rig, &device));
    }
    assert_eq!(lives[1], lives[4]);
    drop((x, one, device));
    rig.finish();
}

#[test]
fn a_live_graph_holds_nothing_of_what_came_after_it() {
    let rig = Rig::new();
    for allocator in BOTH {
        let device = open(&rig, allocator);
        let (x, one) = (filled(1.0, &device).unwrap(), filled(1.0, &device).unwrap());
        drop(step(&x, &one).unwrap());
        let (graph, result) = device.capture(|| step(&x, &one)).unwrap();
        let mut lives = Vec::new();
        for _ in 0..5 {
            let other = step(&x, &one).unwrap();
            graph.replay().unwrap();
            assert_eq!((value(&other), value(&result)), (4.0, 4.0));
            drop(other);
            lives.push(live(&rig, &device));
        }
        assert_eq!(lives[0], lives[4]);
        drop((graph, result, x, one, device));
    }
    rig.finish();
}

#[test]
fn an_upload_inside_is_a_constant() {
    let rig = Rig::new();
    for (seed, allocator) in [("0", BOTH[0]), ("1", BOTH[1]), ("2", BOTH[0]), ("3", BOTH[1])] {
        rig.control.set("seed", seed).unwrap();
        let device = open(&rig, allocator);
        let mut x = filled(1.0, &device).unwrap();
        drop(step(&x, &x).unwrap());
        // More than one piece of pinned memory.
        let large = vec![1.5f32; 100_000];
        let (graph, (sum, copy)) = device
            .capture(|| {
                let three = filled(3.0, &device)?;
                let copy = Tensor::from_vec(large.clone(), [100_000], &device)?;
                Ok::<_, Error>((ops::add(&x, &three)?, copy))
            })
            .unwrap();
        assert_eq!(value(&sum), 4.0);
        for input in [5.0, 6.0] {
            // Other uploads, which a ring of pinned memory reuses.
            let others: Vec<Tensor> = (0..40u8).map(|i| filled(f32::from(i), &device).unwrap()).collect();
            x.write(&[input; LEN], "x").unwrap();
            graph.replay().unwrap();
            assert_eq!((value(&sum), value(&copy)), (input + 3.0, 1.5));
            assert_eq!(value(&others[39]), 39.0);
        }
        drop((graph, sum, copy, x, device));
        assert_eq!(rig.control.live(), "");
    }
    rig.finish();
}

/// After a recording that gave no graph: nothing ran, and the device works as ever.
fn expect_usable(device: &Device, x: &Tensor, one: &Tensor, untouched: &Tensor) {
    assert_eq!(device.capture_number(), None);
    assert_eq!(value(untouched), 7.0, "what was recorded has not run");
    assert_eq!(value(&step(x, one).unwrap()), 4.0);
    let (graph, result) = device.capture(|| step(x, one)).unwrap();
    graph.replay().unwrap();
    assert_eq!(value(&result), 4.0);
}

#[test]
fn a_recording_that_fails_leaves_nothing_behind() {
    let rig = Rig::new();
    for allocator in BOTH {
        let device = open(&rig, allocator);
        let (x, one) = (filled(1.0, &device).unwrap(), filled(1.0, &device).unwrap());
        let mut zeroed = filled(7.0, &device).unwrap();
        expect_usable(&device, &x, &one, &zeroed);
        let mut record = |end: &mut dyn FnMut() -> Result<()>| {
            device.capture(|| {
                zeroed.set_zero("zeroed")?;
                let result = step(&x, &filled(2.0, &device)?)?;
                end()?;
                Ok::<_, Error>(result)
            })
        };
        let refused = record(&mut || x.to_vec::<f32>().map(drop)).unwrap_err();
        assert!(matches!(refused, Error::Capture { .. }), "{refused:?}");
        // What it took is kept for the next.
        let before = live(&rig, &device);
        let refused = record(&mut || Tensor::zeros([usize::MAX], DType::F32, &device).map(drop)).unwrap_err();
        assert!(matches!(refused, Error::Shape { .. }), "{refused:?}");
        // One that the driver itself refuses, and one whose end it refuses.
        rig.control.fail("cuLaunchKernel", 1, 701).unwrap();
        let refused = record(&mut || Ok(())).unwrap_err();
        assert!(matches!(refused, Error::Driver { code: 701, .. }), "{refused:?}");
        rig.control.fail("cuStreamEndCapture", 1, 999).unwrap();
        let refused = record(&mut || Ok(())).unwrap_err();
        assert!(matches!(refused, Error::Driver { code: 999, .. }), "{refused:?}");
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        let panicked = catch_unwind(AssertUnwindSafe(|| record(&mut || panic!("in the closure"))));
        std::panic::set_hook(hook);
        assert!(panicked.is_err());
        expect_usable(&device, &x, &one, &zeroed);
        assert_eq!(live(&rig, &device), before);
        drop((x, one, zeroed, device));
        assert_eq!(rig.control.live(), "");
    }
    rig.finish();
}

#[test]
fn two_graphs_live_side_by_side() {
    let rig = Rig::new();
    for (seed, allocator) in [("0", BOTH[0]), ("1", BOTH[1]), ("2", BOTH[0]), ("3", BOTH[1])] {
        rig.control.set("seed", seed).unwrap();
        let device = open(&rig, allocator);
        let (mut x, one) = (filled(1.0, &device).unwrap(), filled(1.0, &device).unwrap());
        drop(step(&x, &one).unwrap());
        let (first, sum) = device.capture(|| ops::add(&x, &one)).unwrap();
        let (second, twice) = device.capture(|| ops::scale(&sum, 2.0)).unwrap();
        assert_eq!((value(&sum), value(&twice)), (2.0, 4.0));
        x.write(&[4.0; LEN], "x").unwrap();
        second.replay().unwrap();
        assert_eq!(value(&twice), 4.0, "the sum is of before");
        first.replay().unwrap();
        second.replay().unwrap();
        assert_eq!((value(&sum), value(&twice)), (5.0, 10.0));
        // The second names the first one's result, whoever else has let it go.
        drop((first, sum));
        let others: Vec<Tensor> = (0..6u8).map(|i| filled(f32::from(i), &device).unwrap()).collect();
        second.replay().unwrap();
        assert_eq!((value(&twice), value(&others[5])), (10.0, 5.0));
        drop((second, twice, others, x, one, device));
        assert_eq!(rig.control.live(), "");
    }
    rig.finish();
}

#[test]
fn a_graph_dropped_while_another_is_recorded_frees_nothing_that_this_one_reads() {
    let rig = Rig::new();
    for allocator in BOTH {
        let device = open(&rig, allocator);
        let (x, one) = (filled(3.0, &device).unwrap(), filled(1.0, &device).unwrap());
        drop(step(&x, &one).unwrap());
        let (first, sum) = device.capture(|| ops::add(&one, &one)).unwrap();
        let mut parts = Some((x, first));
        // Nobody but the recorded work uses `x` afterwards.
        let recorded = device.capture(|| {
            let (x, first) = parts.take().unwrap();
            let y = step(&x, &one)?;
            drop(x);
            drop(first);
            Ok::<_, Error>(y)
        });
        let (second, y) = recorded.unwrap();
        assert_eq!((value(&y), value(&sum)), (8.0, 2.0));
        let others: Vec<Tensor> = (0..6u8).map(|i| filled(f32::from(i), &device).unwrap()).collect();
        second.replay().unwrap();
        assert_eq!(value(&y), 8.0);
        assert_eq!(others.iter().map(value).collect::<Vec<_>>(), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        drop((second, y, sum, others, one, device));
        assert_eq!(rig.control.live(), "");
    }
    rig.finish();
}

#[test]
fn graph_and_results_may_go_in_any_order() {
    let rig = Rig::new();
    for (graph_first, allocator) in [true, false].into_iter().flat_map(|first| BOTH.map(|all| (first, all))) {
        let device = open(&rig, allocator);
        let (x, one) = (filled(1.0, &device).unwrap(), filled(1.0, &device).unwrap());
        drop(step(&x, &one).unwrap());
        let (graph, result) = device.capture(|| step(&x, &one)).unwrap();
        graph.replay().unwrap();
        if graph_first {
            // Its last launch is still queued.
            drop(graph);
            let other = filled(9.0, &device).unwrap();
            assert_eq!((value(&result), value(&other)), (4.0, 9.0));
            drop(result);
        } else {
            drop(result);
            let others: Vec<Tensor> = (0..6u8).map(|i| filled(f32::from(i), &device).unwrap()).collect();
            graph.replay().unwrap();
            (0..6u8).for_each(|i| assert_eq!(value(&others[usize::from(i)]), f32::from(i)));
            drop(graph);
        }
        assert_eq!(value(&step(&x, &one).unwrap()), 4.0);
        drop((x, one, device));
        assert_eq!(rig.control.live(), "");
    }
    rig.finish();
}

#[test]
fn a_graph_keeps_its_device() {
    let rig = Rig::new();
    let device = rig.open();
    let (x, one) = (filled(1.0, &device).unwrap(), filled(1.0, &device).unwrap());
    drop(step(&x, &one).unwrap());
    let (graph, result) = device.capture(|| step(&x, &one)).unwrap();
    drop((device, x, one, result));
    graph.replay().unwrap();
    let elsewhere = std::thread::spawn(move || {
        graph.replay().unwrap();
        drop(graph);
    });
    elsewhere.join().unwrap();
    rig.finish();
}

#[test]
fn debug_of_what_is_on_a_gpu_is_a_line_without_values() {
    let rig = Rig::new();
    let device = rig.open();
    let x = Tensor::full(1.0, [2, 3], DType::F32, &device).unwrap();
    ops::scale(&x, 2.0).unwrap(); // loads the kernel
    assert_eq!(format!("{x:?}"), "Tensor([2, 3], f32, cuda:0)");
    assert_eq!(format!("{:?}", fp8_kernels::Cell::new(2.0, &device).unwrap()), "Cell(cuda:0)");
    assert_eq!(format!("{device:?}"), "Device(cuda:0, transposes WithCast)");
    let (graph, y) = device.capture(|| ops::scale(&x, 2.0)).unwrap();
    assert_eq!(format!("{graph:?}"), "Graph(capture 1 of cuda:0)");
    assert_eq!(y.to_vec::<f32>().unwrap(), [2.0; 6]);
    drop((x, y, graph, device));
    rig.finish();
}
