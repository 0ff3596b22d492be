//! Two jobs with the settings of one: they must not exchange anything.

use crate::rendezvous::Joined;
use crate::{LONG, f32s, ports};
use fp8_dist::{Environment, Failure, ReduceOp, tcp};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// `rank` of a job of `ranks` ranks at `port` that no run id tells apart.
fn nameless(port: u16, rank: usize, ranks: usize) -> Environment {
    Environment { rank, world_size: ranks, local_rank: rank, ..Environment::on_this_machine(port) }
}

fn start(environment: Environment, after: Duration, deadline: Duration) -> JoinHandle<Joined> {
    thread::spawn(move || {
        thread::sleep(after);
        tcp("dp", &environment, deadline)
    })
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

#[test]
fn two_rank_0s_with_the_same_settings_are_an_error_on_both_jobs() {
    for exact_port in [false, true] {
        let port = ports::free();
        let rank = |rank| Environment { exact_port, ..nameless(port, rank, 2) };
        let deadline = Duration::from_secs(10);
        // Both jobs' rank 0, and a guest of each that comes before, between or after them.
        let all =
            [(0, 0), (0, 300), (1, 150), (1, 320)].map(|(r, after)| start(rank(r), ms(after), deadline));
        for (at, joined) in all.into_iter().enumerate() {
            let error = joined.join().unwrap().map(|_| ()).unwrap_err();
            let expected = Failure::SecondJob { port };
            let twice = Failure::Twice { rank: 1 };
            // The second guest may find that the seat is taken before both rank 0s have found each other.
            assert!(
                error.failure() == Some(&expected) || at > 1 && error.failure() == Some(&twice),
                "{at}, exact port {exact_port}: {error}"
            );
            if at == 0 {
                assert_eq!(
                    error.to_string(),
                    format!(
                        "group `dp`: cannot form the group: two jobs use MASTER_PORT {port} at the same time and \
                         cannot be told apart: give each its own MASTER_PORT or TORCHELASTIC_RUN_ID"
                    )
                );
            }
        }
    }
}

#[test]
fn a_rank_of_another_job_is_not_taken_for_the_own_one() {
    let port = ports::free();
    let deadline = Duration::from_secs(3);
    // Rank 1 of the second job comes to rank 0 of the first one; rank 0 of the second a moment later.
    let first = start(nameless(port, 0, 2), ms(0), deadline);
    let stray = start(nameless(port, 1, 2), ms(50), deadline);
    let second = start(nameless(port, 0, 2), ms(400), deadline);
    for joined in [first, stray, second] {
        let error = joined.join().unwrap().map(|_| ()).unwrap_err();
        assert_eq!(error.failure(), Some(&Failure::SecondJob { port }), "{error}");
    }
}

/// Rank 0 of the first job has waited for longer than a second when the stray rank comes.
#[test]
fn a_rank_of_another_job_is_not_taken_for_a_late_one() {
    let port = ports::free();
    let deadline = Duration::from_secs(5);
    let first = start(nameless(port, 0, 2), ms(0), deadline);
    let stray = start(nameless(port, 1, 2), ms(1500), deadline);
    let second = start(nameless(port, 0, 2), ms(2000), deadline);
    for joined in [first, stray, second] {
        let error = joined.join().unwrap().map(|_| ()).unwrap_err();
        assert_eq!(error.failure(), Some(&Failure::SecondJob { port }), "{error}");
    }
}

#[test]
fn a_nameless_job_whose_last_rank_comes_just_in_time_forms() {
    let port = ports::free();
    let deadline = Duration::from_secs(2);
    let ranks =
        [start(nameless(port, 0, 2), ms(0), deadline), start(nameless(port, 1, 2), ms(1600), deadline)];
    ranks.into_iter().for_each(|rank| drop(rank.join().unwrap().unwrap()));
}

#[test]
fn a_live_rank_is_not_replaced_by_another() {
    let port = ports::free();
    let run = |rank| Environment { run_id: "twins".to_owned(), ..nameless(port, rank, 3) };
    let deadline = Duration::from_secs(10);
    let all = [(0, 0), (1, 100), (1, 300)].map(|(r, after)| start(run(r), ms(after), deadline));
    for joined in all {
        let error = joined.join().unwrap().map(|_| ()).unwrap_err();
        assert_eq!(error.failure(), Some(&Failure::Twice { rank: 1 }), "{error}");
    }
}

#[test]
fn a_run_id_needs_no_wait_for_another_job() {
    // A busy machine may take its time; of a few tries one does not.
    let took = (0..5).map(|_| {
        let port = ports::free();
        let started = std::time::Instant::now();
        let run = |rank| Environment { run_id: "twins".to_owned(), ..nameless(port, rank, 2) };
        let all = [0, 1].map(|rank| start(run(rank), ms(0), LONG));
        let groups = all.map(|joined| joined.join().unwrap().unwrap());
        let took = started.elapsed();
        thread::scope(|scope| {
            for group in &groups {
                scope.spawn(|| {
                    let sum = group.all_reduce("x", &f32s(&[1.0], &[1]), ReduceOp::Sum).unwrap();
                    assert_eq!(sum.item().unwrap(), 2.0);
                });
            }
        });
        took
    });
    let took = took.min().unwrap();
    assert!(took < ms(700), "{took:?}");
}
