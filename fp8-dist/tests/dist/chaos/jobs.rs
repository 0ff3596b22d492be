//! Two jobs with the settings of one, started within a moment of each other.

use super::{attack, exchange, joining};
use crate::{f32s, ports};
use fp8_dist::{Environment, Failure, ReduceOp, tcp};
use std::thread;
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_secs(3);

/// The outcome of a rank: the sum over its job, or the kind of its failure.
enum End {
    Sum(f32),
    Failed(String),
}

/// Joins and sums this job's number over its ranks, twice.
fn work(environment: &Environment, number: f32) -> Result<End, String> {
    let started = Instant::now();
    let joined = tcp("dp", environment, DEADLINE);
    if started.elapsed() > joining(DEADLINE) {
        return Err(format!("joining took {:?}", started.elapsed()));
    }
    let group = match joined {
        Ok(group) => group,
        Err(error) => {
            return Ok(End::Failed(match error.failure() {
                Some(Failure::SecondJob { .. }) => "second job".to_owned(),
                Some(Failure::Twice { .. }) => "twice".to_owned(),
                Some(Failure::Deadline { .. }) => "late".to_owned(),
                Some(other) => return Err(format!("another failure: {other}")),
                None => "no rank 0".to_owned(),
            }));
        }
    };
    let mut sum = 0.0;
    for _ in 0..2 {
        let started = Instant::now();
        let reduced = group.all_reduce("x", &f32s(&[number], &[1]), ReduceOp::Sum);
        sum = reduced.and_then(|sum| Ok(sum.item()?)).map_err(|error| error.to_string())?;
        if started.elapsed() > exchange(DEADLINE) {
            return Err(format!("a sum took {:?}", started.elapsed()));
        }
    }
    Ok(End::Sum(sum))
}

#[test]
fn two_jobs_of_one_port_never_mix() {
    attack("two jobs on one port", [30, 3], 3, |mut draw| {
        let (port, ranks) = (ports::free(), 2 + draw.below(2));
        let exact_port = draw.below(4) == 0;
        let all: Vec<(f32, usize, Duration)> = [1.0, 100.0]
            .into_iter()
            .flat_map(|job| (0..ranks).map(move |rank| (job, rank)))
            .map(|(job, rank)| (job, rank, draw.ms(300)))
            .collect();
        let ends: Vec<(f32, Result<End, String>)> = thread::scope(|scope| {
            let start = |&(job, rank, after): &(f32, usize, Duration)| {
                let alone = Environment::on_this_machine(port);
                let own = Environment { rank, world_size: ranks, local_rank: rank, exact_port, ..alone };
                scope.spawn(move || {
                    thread::sleep(after);
                    (job, work(&own, job))
                })
            };
            let threads: Vec<_> = all.iter().map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let mut seen = Vec::new();
        for (job, end) in ends {
            match end.map_err(|error| format!("{error}: {all:?}"))? {
                End::Sum(sum) if sum == job * ranks as f32 => seen.push("own sum".to_owned()),
                End::Sum(sum) => return Err(format!("MIXED: {sum} in the job of {job}: {all:?}")),
                End::Failed(why) => seen.push(why),
            }
        }
        // What rank 0 of both jobs got.
        Ok(format!("{} and {}", seen[0], seen[ranks]))
    });
}
