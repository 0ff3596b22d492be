//! Exchanges, messages and results in given memory, on devices.

use crate::rig::{Group, Rig, SEEDS, SHORT, integers, ranks, tensor, try_ranks};
use fp8_dist::{Failure, ReduceOp, Result};
use fp8_kernels::{DType, Device, Element, Shape, Tensor, bf16};
use std::thread;
use std::time::{Duration, Instant};

const IN_TIME: Duration = Duration::from_secs(6);

fn zeros(dims: &[usize], device: &Device) -> Tensor {
    Tensor::zeros(Shape::from_slice(dims).unwrap(), DType::F32, device).unwrap()
}

fn exchange<T: Element + PartialEq>(of: fn(f32) -> T, counts: &[Vec<usize>], columns: usize) {
    let n = counts.len();
    let data = |rank: usize| -> Vec<T> {
        let rows: usize = counts[rank].iter().sum();
        (0..rows * columns).map(|index| of((rank * 64 + index % 61) as f32)).collect()
    };
    ranks(n, |group, device| {
        let this = group.rank();
        let rows: usize = counts[this].iter().sum();
        let x = Tensor::from_vec(data(this), [rows, columns], device).unwrap();
        let (found, from) = group.all_to_all("tokens", &x, &counts[this]).unwrap();
        let mut expected = Vec::new();
        for (rank, counts) in counts.iter().enumerate() {
            let start = counts[..this].iter().sum::<usize>() * columns;
            expected.extend_from_slice(&data(rank)[start..start + counts[this] * columns]);
        }
        assert_eq!(from, counts.iter().map(|counts| counts[this]).collect::<Vec<_>>());
        assert_eq!(*found.shape(), [from.iter().sum(), columns].into());
        assert!(found.to_vec::<T>().unwrap() == expected, "{counts:?}");
        let sent = rows - counts[this][this];
        assert_eq!(group.traffic().moves.bytes, (sent * columns * size_of::<T>()) as u64);
    });
}

#[test]
fn rows_go_to_the_ranks_that_they_are_for() {
    let rig = Rig::new();
    let cases = [
        vec![vec![2, 3], vec![0, 1]],
        vec![vec![0, 0], vec![0, 0]],
        vec![vec![0, 7, 1], vec![4, 0, 0], vec![0, 0, 0]],
        vec![vec![5]],
        vec![vec![1000, 0, 3, 1], vec![0, 0, 0, 0], vec![1, 1, 1, 1], vec![0, 0, 700, 0]],
    ];
    for (seed, counts) in SEEDS.into_iter().cycle().zip(&cases) {
        rig.control.set("seed", &seed.to_string()).unwrap();
        exchange(|x| x, counts, 5);
        exchange(bf16::from_f32, counts, 3);
        exchange(|x| x as u8, counts, 1);
        exchange(|x| x as i32, counts, 0);
    }
    rig.finish();
}

#[test]
fn counts_that_do_not_fit_are_an_error_on_all_ranks_and_the_group_lives_on() {
    let rig = Rig::new();
    ranks(2, |group, device| {
        let counts = [[1, 1], [1, 2]][group.rank()];
        let error = group.all_to_all("x", &zeros(&[2, 3], device), &counts).unwrap_err().to_string();
        assert!(error.contains("rank 1 has 2 rows and counts [1, 2]"), "{error}");
        group.barrier().unwrap();
    });
    rig.finish();
}

/// Passes a tensor around, twice as large at each rank.
fn ring(group: &Group, x: &Tensor) -> Result<Tensor> {
    let (rank, n) = (group.rank(), group.world_size());
    let mut got = zeros(x.shape(), x.device());
    // One rank receives first, so that not all of them wait for the next to receive.
    if rank == 0 {
        group.recv("x", &mut got, n - 1)?;
        group.send("x", x, 1)?;
    } else {
        group.send("x", x, (rank + 1) % n)?;
        group.recv("x", &mut got, rank - 1)?;
    }
    Ok(got)
}

#[test]
fn messages_involve_hosts_once_and_can_be_recorded() {
    let rig = Rig::new();
    for (n, seed) in [2, 3].into_iter().flat_map(|n| SEEDS.map(|seed| (n, seed))) {
        rig.control.set("seed", &seed.to_string()).unwrap();
        ranks(n, |group, device| {
            let before = (group.rank() + n - 1) % n;
            let of = |rank: usize, round: usize| integers(700, (rank * 8 + round) as u64);
            let mut x = tensor(&of(group.rank(), 0), &[700], DType::F32, device);
            assert_eq!(ring(&group, &x).unwrap().to_vec::<f32>().unwrap(), of(before, 0));
            let (graph, got) = device.capture(|| ring(&group, &x)).unwrap();
            assert_eq!(got.to_vec::<f32>().unwrap(), of(before, 0));
            for round in 1..4 {
                x.write(&of(group.rank(), round), "x").unwrap();
                graph.replay().unwrap();
                assert_eq!(got.to_vec::<f32>().unwrap(), of(before, round));
            }
            let sent = group.traffic().moves;
            assert_eq!((sent.calls, sent.bytes), (5, 5 * 2800));
            drop(group); // the graph keeps what it needs
            graph.replay().unwrap();
            assert_eq!(got.to_vec::<f32>().unwrap(), of(before, 3));
        });
    }
    rig.finish();
}

#[test]
fn recording_a_first_message_is_refused_and_the_group_lives() {
    let rig = Rig::new();
    ranks(2, |group, device| {
        let x = zeros(&[3], device);
        let error = device.capture(|| ring(&group, &x)).unwrap_err().to_string();
        assert!(error.contains("send and receive once before recording"), "{error}");
        ring(&group, &x).unwrap();
        group.barrier().unwrap();
    });
    rig.finish();
}

#[test]
fn another_name_or_shape_ends_the_group_on_both_ranks() {
    let rig = Rig::new();
    for (name, len, expected) in [
        ("y", 3, "the call is send(to rank 1) `y` on rank 0 and receive(from rank 0) `x` on rank 1"),
        ("x", 4, "the shape is [4] on rank 0 and [3] on rank 1"),
    ] {
        let errors = try_ranks(2, SHORT * 10, |group, device| match group.rank() {
            0 => {
                // Queued before the other rank has found the difference, or not.
                let sent = group.send(name, &zeros(&[len], device), 1);
                sent.and_then(|()| group.barrier()).unwrap_err().to_string()
            }
            _ => group.recv("x", &mut zeros(&[3], device), 0).unwrap_err().to_string(),
        });
        for error in errors {
            let error = error.unwrap();
            assert!(error.contains(expected), "{error}");
        }
    }
    rig.control.set("reset", "").unwrap();
}

#[test]
fn known_messages_in_another_order_are_an_error() {
    let rig = Rig::new();
    let errors = ranks(2, |group, device| {
        let mut x = zeros(&[16], device);
        if group.rank() == 0 {
            let _ = ["a", "b"].map(|what| group.send(what, &x, 1).unwrap());
            // The other rank finds the difference and leaves, perhaps before these are queued.
            let _ = ["b", "a"].map(|what| group.send(what, &x, 1));
            return String::new();
        }
        let _ = ["a", "b", "a"].map(|what| group.recv(what, &mut x, 0).unwrap());
        x.to_vec::<f32>().unwrap_err().to_string()
    });
    let expected = "receive(from rank 0) `a`, as rank 0 beside the sender's as rank 1: rank 1 made another call than rank 0: all \
                    ranks make the same calls in the same order";
    assert_eq!(errors[1], expected);
    rig.control.set("reset", "").unwrap();
}

#[test]
fn two_devices_that_both_send_first_are_told_at_the_deadline() {
    let rig = Rig::new();
    let started = Instant::now();
    let errors = try_ranks(2, SHORT, |group, device| {
        let (other, mut x) = (1 - group.rank(), zeros(&[64], device));
        let both = group.send("x", &x, other).and_then(|()| group.recv("x", &mut x, other));
        both.and_then(|()| Ok(x.to_vec::<f32>()?)).unwrap_err().to_string()
    });
    assert!(started.elapsed() < IN_TIME);
    assert!(errors.iter().any(|error| error.as_ref().unwrap().contains("600ms")), "{errors:?}");
    rig.control.set("reset", "").unwrap();
}

/// A rank that takes no part may leave before two others are done with each other.
#[test]
fn a_rank_that_has_left_does_not_end_messages_of_others() {
    let rig = Rig::new();
    let results = ranks(3, |group, device| {
        let mut x = tensor(&[group.rank() as f32; 4], &[4], DType::F32, device);
        if group.rank() == 2 {
            return Vec::new();
        }
        if group.rank() == 0 {
            // Longer than a collective that needs the rank that left would last.
            thread::sleep(Duration::from_millis(1600));
            group.send("x", &x, 1).unwrap();
        } else {
            group.recv("x", &mut x, 0).unwrap();
        }
        device.synchronize().unwrap();
        x.to_vec::<f32>().unwrap()
    });
    assert_eq!(results[1], [0.0; 4]);
    rig.finish();
}

#[test]
fn no_rank_sends_to_itself_or_to_nobody() {
    let rig = Rig::new();
    ranks(2, |group, device| {
        let mut x = zeros(&[1], device);
        for peer in [group.rank(), 2] {
            let errors = [group.send("x", &x, peer).unwrap_err(), group.recv("x", &mut x, peer).unwrap_err()];
            assert!(
                errors.iter().all(|error| error.to_string().contains("expected another rank")),
                "{errors:?}"
            );
        }
        group.barrier().unwrap();
    });
    rig.finish();
}

#[test]
fn results_in_given_memory() {
    let rig = Rig::new();
    for (seed, rows) in SEEDS.into_iter().zip([[3, 3], [0, 5], [4, 1], [0, 0]]) {
        rig.control.set("seed", &seed.to_string()).unwrap();
        ranks(2, |group, device| {
            let rank = group.rank();
            let total: usize = rows.iter().sum();
            let x = tensor(&integers(rows[rank] * 7, rank as u64), &[rows[rank], 7], DType::F32, device);
            let mut out = zeros(&[total, 7], device);
            group.all_gather_into("x", &x, &mut out).unwrap();
            let expected = group.all_gather("x", &x).unwrap();
            assert_eq!(out.to_vec::<f32>().unwrap(), expected.to_vec::<f32>().unwrap());

            let x = tensor(&integers(2 * total, rank as u64), &[2 * total], DType::F32, device);
            let mut part = zeros(&[total], device);
            let mut reduce = || group.reduce_scatter_into("sum", &x, ReduceOp::Sum, &mut part);
            reduce().unwrap();
            let exchanges = group.traffic().exchanges;
            reduce().unwrap();
            assert_eq!(group.traffic().exchanges, exchanges, "a known call");
            let expected = group.reduce_scatter("sum", &x, ReduceOp::Sum).unwrap();
            assert_eq!(part.to_vec::<f32>().unwrap(), expected.to_vec::<f32>().unwrap());
            let of = |values: [i32; 2]| Tensor::from_vec(values.to_vec(), [2], device).unwrap();
            let mut tokens = Tensor::zeros([1], DType::I32, device).unwrap();
            group.reduce_scatter_into("tokens", &of([1, 2]), ReduceOp::Sum, &mut tokens).unwrap();
            assert_eq!(tokens.to_vec::<i32>().unwrap(), [[2], [4]][rank]);

            for root in 0..2 {
                let mut x = tensor(&integers(total, rank as u64), &[total], DType::F32, device);
                group.broadcast_in_place("root", &mut x, root).unwrap();
                assert_eq!(x.to_vec::<f32>().unwrap(), integers(total, root as u64));
            }
        });
    }
    rig.finish();
}

#[test]
fn memory_that_does_not_fit_is_an_error_on_all_ranks_and_the_group_lives_on() {
    let rig = Rig::new();
    ranks(2, |group, device| {
        let (x, mut out) = (zeros(&[2, 2], device), zeros(&[3, 2], device));
        let errors = [
            group.all_gather_into("x", &x, &mut out).unwrap_err().to_string(),
            group.reduce_scatter_into("x", &x, ReduceOp::Sum, &mut out).unwrap_err().to_string(),
        ];
        let expected = [
            "all_gather `x`: a result of [4, 2] of f32 does not fit into a tensor of [3, 2] of f32",
            "reduce_scatter(sum) `x`: a result of [1, 2] of f32 does not fit into a tensor of [3, 2] of f32",
        ];
        assert_eq!(errors, expected);
        group.barrier().unwrap();
    });
    let failures = try_ranks(2, SHORT, |group, device| {
        let mut out = zeros(&[2 + group.rank()], device);
        let gathered = group.all_gather_into("x", &zeros(&[1], device), &mut out);
        gathered.unwrap_err().failure().cloned()
    });
    for failure in failures {
        let failure = failure.unwrap();
        assert!(matches!(failure, Some(Failure::Disagree { property: "the shape", .. })), "{failure:?}");
    }
    rig.finish();
}
