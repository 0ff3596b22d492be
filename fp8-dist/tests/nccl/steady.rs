//! The quantized all-gather once ranks have agreed on a name: nothing is exchanged between hosts, nothing is read from
//! the device, and the call can be recorded.

use crate::rig::{Rig, SEEDS, SHORT, join, ranks, tensor, try_ranks};
use fp8_dist::quantized_all_gather;
use fp8_kernels::{
    Cell, DType, Device, Encoding, Operand, Scale, ScalePolicy, ScaleRule, Slot, Tensor, TransposePolicy,
    UNSET, ops,
};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

/// Long enough for ranks that wait for each other in the test itself.
const PATIENT: Duration = Duration::from_secs(10);
const DELAYED: ScaleRule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
const CURRENT: ScaleRule = ScaleRule::Current { fp8_max: 448.0, epsilon: 0.0, power_2_scales: false };

/// Codes, codes of the transpose, and the factor's bits; of a tensor in high precision its values' bits.
pub(crate) type Bytes = (Vec<u8>, Option<Vec<u8>>, Option<u32>);

pub(crate) fn bytes(operand: &Operand) -> Bytes {
    match operand {
        Operand::High(x) => {
            (x.to_f32_vec().unwrap().iter().flat_map(|x| x.to_le_bytes()).collect(), None, None)
        }
        Operand::Fp8(x) => {
            let columns = x.columnwise().map(|codes| codes.to_vec::<u8>().unwrap());
            (x.codes().unwrap(), columns, Some(x.scale_inv().item().unwrap().to_bits()))
        }
    }
}

pub(crate) fn values(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|i| ((i + 31 * seed) as f32 * 0.37).sin() * (seed + 1) as f32).collect()
}

fn cell(cell: &Cell) -> Slot<'_> {
    let scale = Scale::Cell { cell, first: &DELAYED, keep: true };
    Slot { scale, columnwise: true, ..Slot::off(Encoding::E4M3) }
}

fn current() -> Slot<'static> {
    Slot { scale: Scale::FromTensor(&CURRENT), columnwise: true, ..Slot::off(Encoding::E4M3) }
}

/// The joined tensor's quantization on one device, with this scale or its own.
fn expected(x: &[f32], cols: usize, dtype: DType, scale: Option<f32>) -> Bytes {
    let cpu = Device::cpu().with_transpose_policy(TransposePolicy::WithCast);
    let x = tensor(x, &[x.len() / cols, cols], dtype, &cpu);
    let held = Cell::new(scale.unwrap_or(UNSET), &cpu).unwrap();
    let slot = if scale.is_some() { cell(&held) } else { current() };
    bytes(&ops::quantize(&x, &slot).unwrap())
}

/// By which rank 0 tells rank 1 to begin. Not by the group: that would be a word between the hosts.
fn one_after_the_other() -> (Mutex<mpsc::Sender<()>>, Mutex<mpsc::Receiver<()>>) {
    let (said, heard) = mpsc::channel();
    (Mutex::new(said), Mutex::new(heard))
}

/// This rank's rows of the whole.
pub(crate) fn shard(
    x: &[f32],
    rows: &[usize],
    rank: usize,
    cols: usize,
    dtype: DType,
    device: &Device,
) -> Tensor {
    let start = rows[..rank].iter().sum::<usize>() * cols;
    tensor(&x[start..start + rows[rank] * cols], &[rows[rank], cols], dtype, device)
}

#[test]
fn steady_gathers_read_nothing_and_wait_for_no_rank() {
    let rig = Rig::new();
    let (said, heard) = one_after_the_other();
    let reads = ["cuMemcpyDtoHAsync_v2", "cuMemcpyDtoH_v2", "cuStreamSynchronize", "cuCtxSynchronize"];
    let count = || reads.map(|function| rig.calls(function));
    let results = join(2, PATIENT, |rank, group, device| {
        let group = group.unwrap();
        let device = &device.clone().with_transpose_policy(TransposePolicy::WithCast);
        let scale = Cell::new(3.0, device).unwrap();
        let slots = [
            ("held", cell(&scale)),
            ("own", current()),
            ("reduced", Slot { scale: Scale::FromAmax { amax: 7.0, rule: &CURRENT }, ..current() }),
            ("off", Slot::off(Encoding::E4M3)),
        ];
        let x = shard(&values(4 * 16, 0), &[2, 2], rank, 16, DType::F32, device);
        let gather = || -> Vec<Operand> {
            slots.iter().map(|(what, slot)| quantized_all_gather(&*group, what, &x, slot).unwrap()).collect()
        };
        gather();
        device.synchronize().unwrap();
        group.barrier().unwrap();
        let mut whole = Vec::new();
        if rank == 0 {
            // The other rank does nothing meanwhile.
            let before = count();
            for round in 1..=3 {
                scale.write([5.0, 0.25, 4.0][round - 1]).unwrap();
                whole = gather();
            }
            assert_eq!(count(), before, "{reads:?}");
        }
        if rank == 0 {
            said.lock().unwrap().send(()).unwrap();
        } else {
            heard.lock().unwrap().recv_timeout(PATIENT).unwrap();
            for round in 1..=3 {
                scale.write([5.0, 0.25, 4.0][round - 1]).unwrap();
                whole = gather();
            }
        }
        let whole: Vec<Bytes> = whole.iter().map(bytes).collect();
        group.barrier().unwrap();
        whole
    });
    let x = values(4 * 16, 0);
    let f32s = x.iter().flat_map(|x| x.to_le_bytes()).collect();
    let wanted = [
        expected(&x, 16, DType::F32, Some(4.0)),
        expected(&x, 16, DType::F32, None),
        expected(&x, 16, DType::F32, Some(64.0)),
        (f32s, None, None),
    ];
    for result in results {
        assert_eq!(result.unwrap(), wanted);
    }
    rig.finish();
}

#[test]
fn steady_bytes_are_those_of_one_device() {
    let rig = Rig::new();
    let cols = 16;
    let all = [[6, 6].as_slice(), &[0, 5, 0, 7], &[3, 3, 3, 3], &[0, 0]];
    for (seed, rows) in SEEDS.into_iter().zip(all) {
        rig.control.set("seed", &seed.to_string()).unwrap();
        for dtype in [DType::F32, DType::BF16] {
            let total: usize = rows.iter().sum();
            let whole = |round: usize| {
                let mut x = values(total * cols, round);
                // An outlier that moves from rank to rank.
                if let Some(x) = x.get_mut(round * 37 % (total * cols).max(1)) {
                    *x = 1e4;
                }
                x
            };
            let scales = [3.0, 0.5, 448.0 / 1e4, 64.0];
            let results = ranks(rows.len(), |group, device| {
                let device = device.clone().with_transpose_policy(TransposePolicy::WithCast);
                let scale = Cell::new(UNSET, &device).unwrap();
                let rounds = (0..4).map(|round| {
                    scale.write(scales[round]).unwrap();
                    let x = shard(&whole(round), rows, group.rank(), cols, dtype, &device);
                    let held = quantized_all_gather(&*group, "held", &x, &cell(&scale)).unwrap();
                    let own = quantized_all_gather(&*group, "own", &x, &current()).unwrap();
                    assert_eq!((held.shape(), own.shape()), (&[total, cols].into(), &[total, cols].into()));
                    (bytes(&held), bytes(&own))
                });
                rounds.collect::<Vec<_>>()
            });
            let wanted: Vec<_> = (0..4)
                .map(|round| {
                    let of = |scale| expected(&whole(round), cols, dtype, scale);
                    (of(Some(scales[round])), of(None))
                })
                .collect();
            assert!(results.iter().all(|result| *result == wanted), "{rows:?} {dtype}, seed {seed}");
        }
    }
    rig.finish();
}

#[test]
fn a_scale_that_differs_is_told_at_the_next_wait_of_every_rank() {
    let rig = Rig::new();
    let whole = values(3 * 16, 1);
    let errors = ranks(3, |group, device| {
        let device = &device.clone().with_transpose_policy(TransposePolicy::WithCast);
        let rank = group.rank();
        let scale = Cell::new(2.0, device).unwrap();
        let x = shard(&whole, &[1, 1, 1], rank, 16, DType::F32, device);
        let gather = || quantized_all_gather(&*group, "weight", &x, &cell(&scale)).unwrap();
        gather();
        scale.write(if rank == 2 { 2.5 } else { 2.0 }).unwrap();
        let error = gather().as_fp8().unwrap().codes().unwrap_err().to_string();
        // It is told once; the group and the device go on.
        scale.write(4.0).unwrap();
        assert_eq!(bytes(&gather()), expected(&whole, 16, DType::F32, Some(4.0)));
        error
    });
    for error in errors {
        assert_eq!(
            error,
            "quantized_all_gather `weight`: the scale is 2.5 on rank 2 and 2 on rank 0: shards of one tensor need one \
             scale; commit the same scopes on all ranks, with reduce_amax and this group as amax_reduction_group"
        );
    }
    rig.finish();
}

#[test]
fn a_rank_that_lost_its_scale_ends_the_group_within_the_deadline() {
    let rig = Rig::new();
    let started = Instant::now();
    let results = try_ranks(2, SHORT, |group, device| {
        let scale = Cell::new(2.0, device).unwrap();
        let x = tensor(&[1.0; 16], &[1, 16], DType::F32, device);
        quantized_all_gather(&*group, "weight", &x, &cell(&scale)).unwrap();
        device.synchronize().unwrap();
        if group.rank() == 1 {
            scale.write(UNSET).unwrap();
        }
        match quantized_all_gather(&*group, "weight", &x, &cell(&scale)) {
            Ok(whole) => whole.as_fp8().unwrap().codes().unwrap_err().to_string(),
            Err(error) => error.to_string(),
        }
    });
    assert!(started.elapsed() < Duration::from_secs(5));
    for result in results {
        let error = result.unwrap();
        assert!(error.contains("600ms"), "{error}");
    }
    rig.finish();
}

#[test]
fn gathers_in_another_order_are_an_error_though_shapes_and_scales_agree() {
    let rig = Rig::new();
    let errors = ranks(2, |group, device| {
        let scale = Cell::new(2.0, device).unwrap();
        let x = tensor(&[1.0; 16], &[1, 16], DType::F32, device);
        let gather = |what: &str| quantized_all_gather(&*group, what, &x, &cell(&scale)).unwrap();
        let _ = ["a", "b"].map(gather);
        let order = if group.rank() == 0 { ["a", "b"] } else { ["b", "a"] };
        let whole = order.map(gather);
        whole[0].as_fp8().unwrap().codes().unwrap_err().to_string()
    });
    for (error, own) in errors.iter().zip(["a", "b"]) {
        assert_eq!(
            *error,
            format!(
                "quantized_all_gather `{own}`: rank 1 made another call than rank 0: all ranks make the same calls in the \
                 same order"
            )
        );
    }
    rig.finish();
}

#[test]
fn one_name_for_slots_in_turn_is_compared_each_time() {
    let rig = Rig::new();
    let results = ranks(2, |group, device| {
        let cells = [2.0, 8.0].map(|scale| Cell::new(scale, device).unwrap());
        let x = tensor(&values(16, group.rank()), &[1, 16], DType::BF16, device);
        let gather = |which: usize| {
            let whole = quantized_all_gather(&*group, "weight", &x, &cell(&cells[which])).unwrap();
            bytes(&whole)
        };
        [0, 1, 0, 1, 1].map(gather)
    });
    let joined = [0, 1].map(|rank| values(16, rank)).concat();
    let [first, second] = [2.0, 8.0].map(|scale| {
        let (codes, _, factor) = expected(&joined, 16, DType::BF16, Some(scale));
        (codes, factor)
    });
    for result in results {
        let [a, b, c, d, e] = result.map(|(codes, _, factor)| (codes, factor));
        assert_eq!([&a, &c], [&first; 2]);
        assert_eq!([&b, &d, &e], [&second; 3]);
    }
    rig.finish();
}

#[test]
fn two_names_alternate_without_a_word_between_the_hosts() {
    let rig = Rig::new();
    let (said, heard) = one_after_the_other();
    let results = join(2, PATIENT, |rank, group, device| {
        let group = group.unwrap();
        let cells = [2.0, 8.0].map(|scale| Cell::new(scale, device).unwrap());
        let x = tensor(&values(16, rank), &[1, 16], DType::F32, device);
        let gather = |which: usize| {
            quantized_all_gather(&*group, ["a", "b"][which], &x, &cell(&cells[which])).unwrap()
        };
        let _ = [0, 1].map(gather);
        let later = || [1, 0, 1, 0].map(gather);
        let whole = if rank == 0 {
            let whole = later();
            said.lock().unwrap().send(()).unwrap();
            whole
        } else {
            heard.lock().unwrap().recv_timeout(PATIENT).unwrap();
            later()
        };
        let whole = whole.map(|whole| bytes(&whole).0);
        group.barrier().unwrap();
        whole
    });
    let x = [values(16, 0), values(16, 1)].concat();
    let [a, b] = [2.0, 8.0].map(|scale| expected(&x, 16, DType::F32, Some(scale)).0);
    for result in results {
        assert_eq!(result.unwrap(), [b.clone(), a.clone(), b.clone(), a.clone()]);
    }
    rig.finish();
}

#[test]
fn a_recorded_gather_compares_scales_at_each_replay() {
    let rig = Rig::new();
    for (seed, rows) in SEEDS.into_iter().zip([[2, 2].as_slice(), &[0, 3], &[1, 0, 4], &[1, 1]]) {
        rig.control.set("seed", &seed.to_string()).unwrap();
        let whole = |round: usize| values(rows.iter().sum::<usize>() * 16, round);
        let results = ranks(rows.len(), |group, device| {
            let device = device.clone().with_transpose_policy(TransposePolicy::WithCast);
            let rank = group.rank();
            let scale = Cell::new(2.0, &device).unwrap();
            let mut x = shard(&whole(0), rows, rank, 16, DType::F32, &device);
            let gather = |x: &Tensor| -> fp8_dist::Result<[Operand; 2]> {
                Ok([
                    quantized_all_gather(&*group, "held", x, &cell(&scale))?,
                    quantized_all_gather(&*group, "own", x, &current())?,
                ])
            };
            gather(&x).unwrap();
            let (graph, outputs) = device.capture(|| gather(&x)).unwrap();
            let mut replays = vec![outputs.each_ref().map(bytes)];
            let mut eager = Vec::new();
            for (round, value) in [(1, 64.0), (2, 0.125), (3, 5.0)] {
                scale.write(value).unwrap();
                let next = shard(&whole(round), rows, rank, 16, DType::F32, &device).to_vec::<f32>().unwrap();
                x.write(&next, "x").unwrap();
                graph.replay().unwrap();
                replays.push(outputs.each_ref().map(bytes));
                eager.push(gather(&x).unwrap().each_ref().map(bytes));
            }
            assert_eq!(replays[1..], eager);
            // Other scales are told by the wait behind the replay.
            let mut errors = Vec::new();
            for value in [3.0, UNSET, -5.0] {
                scale.write(if rank == 1 { value } else { 5.0 }).unwrap();
                graph.replay().unwrap();
                errors.push(device.synchronize().unwrap_err().to_string());
            }
            // On all ranks alike, too.
            scale.write(-5.0).unwrap();
            graph.replay().unwrap();
            errors.push(device.synchronize().unwrap_err().to_string());
            scale.write(5.0).unwrap();
            graph.replay().unwrap();
            device.synchronize().unwrap();
            (replays, errors)
        });
        let wanted: Vec<_> = [2.0, 64.0, 0.125, 5.0]
            .into_iter()
            .enumerate()
            .map(|(round, scale)| {
                [Some(scale), None].map(|scale| expected(&whole(round), 16, DType::F32, scale))
            })
            .collect();
        let found = [
            "the scale is 3 on rank 1 and 5 on rank 0",
            "the scale is unset on rank 1 and 5 on rank 0",
            "the scale is 5 (provisional) on rank 1 and 5 on rank 0",
            "the scale is 5 (provisional) on rank 0",
        ];
        for (replays, errors) in results {
            assert_eq!(replays, wanted, "{rows:?}, seed {seed}");
            for (error, found) in errors.iter().zip(found) {
                assert!(error.starts_with(&format!("quantized_all_gather `held`: {found}: ")), "{error}");
            }
        }
    }
    rig.finish();
}

#[test]
fn recording_a_first_call_is_refused_and_the_group_lives() {
    let rig = Rig::new();
    let results = ranks(2, |group, device| {
        let scale = Cell::new(2.0, device).unwrap();
        let x = tensor(&values(16, group.rank()), &[1, 16], DType::F32, device);
        let gather = || quantized_all_gather(&*group, "weight", &x, &cell(&scale));
        let error = device.capture(gather).unwrap_err().to_string();
        assert_eq!(
            error,
            "quantized_all_gather `weight`: cannot be recorded: call it once before recording, with this name, slot and \
             shape and with scales that are committed"
        );
        gather().unwrap();
        let (_graph, whole) = device.capture(gather).unwrap();
        bytes(&whole).0
    });
    let x = [values(16, 0), values(16, 1)].concat();
    assert_eq!(results, vec![expected(&x, 16, DType::F32, Some(2.0)).0; 2]);
    rig.finish();
}

/// A graph keeps what it was recorded with, and a new cell may get the address of one that is gone.
#[test]
fn a_name_that_goes_on_with_another_slot() {
    let rig = Rig::new();
    let whole = values(2 * 16, 4);
    let results = ranks(2, |group, device| {
        let x = shard(&whole, &[1, 1], group.rank(), 16, DType::F32, device);
        let gather = |scale: &Cell| quantized_all_gather(&*group, "weight", &x, &cell(scale));
        let scale = Cell::new(2.0, device).unwrap();
        gather(&scale).unwrap();
        let (graph, recorded) = device.capture(|| gather(&scale)).unwrap();
        let others = [8.0, UNSET, 0.5].map(|value| {
            let scale = Cell::new(value, device).unwrap();
            let all = [(); 2].map(|()| bytes(&gather(&scale).unwrap()));
            assert_eq!(all[0], all[1]);
            all[0].clone()
        });
        scale.write(4.0).unwrap();
        graph.replay().unwrap();
        (bytes(&recorded), others)
    });
    let quantized = |scale| expected(&whole, 16, DType::F32, Some(scale));
    let amax = whole.iter().fold(0.0f32, |amax, x| amax.max(x.abs()));
    let wanted = (quantized(4.0), [8.0, 448.0 / amax, 0.5].map(quantized));
    let plain = |(codes, _, factor): &Bytes| (codes.clone(), *factor);
    for (recorded, others) in results {
        assert_eq!(plain(&recorded), plain(&wanted.0));
        assert_eq!(others.each_ref().map(plain), wanted.1.each_ref().map(plain));
    }
    rig.finish();
}
