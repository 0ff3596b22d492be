//! Connections that pass on a byte at a time from some moment on.

#![cfg(target_os = "linux")]

use super::{attack, exchange, joining};
use crate::{environments, f32s, slow};
use fp8_dist::{Environment, ReduceOp, Result, tcp};
use std::thread;
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_secs(2);

/// Joins and sums until something fails; what took too long is an error.
fn work(environment: &Environment) -> std::result::Result<bool, String> {
    let started = Instant::now();
    let joined = tcp("dp", environment, DEADLINE);
    if started.elapsed() > joining(DEADLINE) {
        return Err(format!("rank {}: joining took {:?}", environment.rank, started.elapsed()));
    }
    let Ok(group) = joined else { return Ok(false) };
    for _ in 0..1000 {
        let started = Instant::now();
        let sum: Result<f32> = group
            .all_reduce("x", &f32s(&[1.0; 20_000], &[20_000]), ReduceOp::Sum)
            .and_then(|sum| Ok(sum.as_slice::<f32>()?[0]));
        if started.elapsed() > exchange(DEADLINE) {
            return Err(format!("rank {}: a sum took {:?}", environment.rank, started.elapsed()));
        }
        match sum {
            Ok(3.0) => thread::sleep(Duration::from_millis(3)),
            Ok(sum) => return Err(format!("rank {}: a sum of {sum}", environment.rank)),
            Err(_) => break,
        }
    }
    let started = Instant::now();
    drop(group);
    match started.elapsed() > exchange(DEADLINE) {
        true => Err(format!("rank {}: leaving took {:?}", environment.rank, started.elapsed())),
        false => Ok(true),
    }
}

#[test]
fn bytes_that_drip_delay_no_rank_beyond_its_deadline() {
    attack("dripping bytes", [24, 3], 3, |mut draw| {
        let mut environments = environments(3);
        environments[1].master_addr = slow::NEAR.to_owned();
        let (begun, after, pace) =
            (Instant::now(), draw.ms(800) * draw.below(2) as u32, Duration::from_millis(20) + draw.ms(400));
        let paced = move |is_slow: bool| move || (is_slow && begun.elapsed() > after).then_some(pace);
        let [to_rank_0, to_the_rank] = draw.pick(&[[true, true], [true, false], [false, true]]);
        slow::proxy(environments[0].master_port, paced(to_rank_0), paced(to_the_rank));
        let joined: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = environments.iter().map(|one| scope.spawn(|| work(one))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let joined = joined.into_iter().collect::<std::result::Result<Vec<bool>, String>>();
        let joined = joined.map_err(|error| {
            format!("{error}; a byte each {pace:?} after {after:?}, both ways {to_rank_0} {to_the_rank}")
        })?;
        Ok(if joined.contains(&true) { "joined" } else { "did not join" }.to_owned())
    });
}
