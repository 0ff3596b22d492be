//! Tests of forming a group, and of conditions that prevent it.

use crate::{LONG, SHORT, environments, f32s, ports, speak};
use fp8_dist::{Environment, Error, Failure, ProcessGroup, ReduceOp, Result, tcp};
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

pub(crate) type Joined = Result<Arc<dyn ProcessGroup>>;

/// Each joins a group as told, in a thread of its own.
pub(crate) fn join(ranks: Vec<(&'static str, Environment)>, deadline: Duration) -> Vec<Joined> {
    let threads: Vec<_> = ranks
        .into_iter()
        .map(|(id, environment)| thread::spawn(move || tcp(id, &environment, deadline)))
        .collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

pub(crate) fn dp(environments: Vec<Environment>) -> Vec<(&'static str, Environment)> {
    environments.into_iter().map(|environment| ("dp", environment)).collect()
}

#[track_caller]
pub(crate) fn works(group: Vec<Joined>) {
    let group: Vec<_> = group.into_iter().map(|joined| joined.unwrap()).collect();
    thread::scope(|scope| {
        for rank in &group {
            scope.spawn(|| {
                let sum = rank.all_reduce("x", &f32s(&[1.0], &[1]), ReduceOp::Sum).unwrap();
                assert_eq!(sum.item().unwrap(), group.len() as f32);
            });
        }
    });
}

#[track_caller]
fn expect_all(joined: Vec<Joined>, message: &str) {
    for (rank, joined) in joined.into_iter().enumerate() {
        assert_eq!(joined.unwrap_err().to_string(), message, "rank {rank}");
    }
}

#[test]
fn a_rank_that_starts_late() {
    for late in [0, 1] {
        let threads: Vec<_> = environments(3)
            .into_iter()
            .map(|environment| {
                thread::spawn(move || {
                    if environment.rank == late {
                        thread::sleep(Duration::from_millis(150));
                    }
                    tcp("dp", &environment, LONG)
                })
            })
            .collect();
        works(threads.into_iter().map(|thread| thread.join().unwrap()).collect());
    }
}

#[test]
fn one_rank_needs_no_port() {
    let held = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut environment = Environment::on_this_machine(held.local_addr().unwrap().port());
    environment.exact_port = true;
    works(join(vec![("dp", environment)], LONG));
}

#[test]
fn the_id_of_a_group_has_at_most_4096_bytes() {
    let alone = |len| tcp(&"g".repeat(len), &Environment::on_this_machine(1), LONG);
    works(vec![alone(4096)]);
    let error = alone(4097).unwrap_err().to_string();
    assert!(error.ends_with(": expected at most 4096 bytes"), "{error}");
}

#[test]
fn a_run_id_has_at_most_4096_bytes() {
    let alone = |len| {
        let mut environment = Environment::on_this_machine(1);
        environment.run_id = "r".repeat(len);
        join(vec![("dp", environment)], LONG)
    };
    works(alone(4096));
    let error = alone(4097).remove(0).unwrap_err().to_string();
    assert!(error.ends_with(": expected at most 4096 bytes"), "{error}");
}

#[test]
fn another_world_size() {
    let mut environments = environments(3);
    environments[2].world_size = 4;
    let message = "group `dp`: cannot form the group: the world size is 4 on rank 2 and 3 on rank 0: start all ranks of \
                   a group with the same settings";
    expect_all(join(dp(environments), SHORT), message);
}

#[test]
fn two_of_one_rank() {
    let mut environments = environments(3);
    environments[2].rank = 1;
    environments[2].local_rank = 1;
    let joined = join(dp(environments), Duration::from_secs(3));
    let twice = |joined: &Joined| {
        joined.as_ref().is_err_and(|error| error.failure() == Some(&Failure::Twice { rank: 1 }))
    };
    assert!(joined.iter().all(twice), "{joined:?}");
    let text =
        "group `dp`: cannot form the group: two processes joined as rank 1: set a different RANK for each";
    assert_eq!(joined.into_iter().next().unwrap().unwrap_err().to_string(), text);
}

#[test]
fn another_group() {
    let mut ranks = dp(environments(2));
    ranks[1].0 = "tp";
    let message = |id: &str| {
        format!(
            "group `{id}`: cannot form the group: the group's id is tp on rank 1 and dp on rank 0: start all \
             ranks of a group with the same settings"
        )
    };
    let errors: Vec<String> =
        join(ranks, SHORT).into_iter().map(|joined| joined.unwrap_err().to_string()).collect();
    assert_eq!(errors, [message("dp"), message("tp")]);
}

#[test]
fn groups_that_form_at_once_on_the_same_ports() {
    let first = Environment { world_size: 3, ..Environment::on_this_machine(ports::free()) };
    let rank = |rank| Environment { rank, local_rank: rank, ..first.clone() };
    let ranks = ["dp", "tp", "cp"].into_iter().flat_map(|id| (0..3).map(move |r| (id, r)));
    let mut joined = join(ranks.map(|(id, r)| (id, rank(r))).collect(), LONG);
    while !joined.is_empty() {
        works(joined.drain(..3).collect());
    }
}

/// Ranks 0 and 1 of `first` and of `second` come so that each would take the other's for its own.
fn jobs_apart(first: &Environment, second: &Environment) {
    let sum = |environment: Environment, value: f32| {
        let group = tcp("dp", &environment, LONG).unwrap();
        group.all_reduce("x", &f32s(&[value], &[1]), ReduceOp::Sum).unwrap().item().unwrap()
    };
    let rank = |job: &Environment, rank| Environment { rank, local_rank: rank, ..job.clone() };
    thread::scope(|scope| {
        let come = |environment, value| {
            let rank = scope.spawn(move || sum(environment, value));
            thread::sleep(Duration::from_millis(200));
            rank
        };
        let mut all = vec![(come(rank(first, 0), 1.0), 1.0 * first.world_size as f32)];
        for other in (0..second.world_size).rev() {
            all.push((come(rank(second, other), 100.0), 100.0 * second.world_size as f32));
        }
        for other in 1..first.world_size {
            all.push((come(rank(first, other), 1.0), 1.0 * first.world_size as f32));
        }
        for (rank, expected) in all {
            assert_eq!(rank.join().unwrap(), expected);
        }
    });
}

#[test]
fn jobs_with_neighbouring_ports() {
    let held = TcpListener::bind(("127.0.0.1", ports::free())).unwrap(); // by the first one's launcher
    let port = held.local_addr().unwrap().port();
    let first = Environment { world_size: 2, ..Environment::on_this_machine(port) };
    jobs_apart(&first, &Environment { master_port: port + 1, ..first.clone() });
}

#[test]
fn jobs_with_different_names() {
    let first = Environment { world_size: 2, ..Environment::on_this_machine(ports::free()) };
    jobs_apart(&first, &Environment { run_id: "night 7".to_owned(), ..first.clone() });
}

#[test]
fn jobs_of_different_sizes() {
    let first = Environment { world_size: 2, ..Environment::on_this_machine(ports::free()) };
    jobs_apart(&first, &Environment { world_size: 3, ..first.clone() });
}

#[test]
fn what_keeps_a_job_from_meeting_is_named() {
    let mut environments = environments(2);
    environments[0].run_id = String::new();
    environments[1].run_id = "night 7".to_owned();
    let message = "group `dp`: cannot form the group: TORCHELASTIC_RUN_ID is \"night 7\" on rank 1 and \"\" on rank 0: \
                   start all ranks of a group with the same settings";
    expect_all(join(dp(environments), SHORT), message);
    let alone = Environment { run_id: "7".repeat(5000), ..Environment::on_this_machine(29_500) };
    let error = tcp("dp", &alone, SHORT).unwrap_err().to_string();
    assert!(error.ends_with(": expected at most 4096 bytes"), "{error}");
}

#[test]
fn a_rank_that_never_comes() {
    let mut environments = environments(4);
    environments.remove(2);
    expect_all(
        join(dp(environments), SHORT),
        "group `dp`: cannot form the group: rank 2 did not arrive within 500ms: check whether they are still \
         running, or use a longer deadline",
    );
    let alone = crate::environments(2).remove(1);
    let started = Instant::now();
    let error = tcp("dp", &alone, SHORT).unwrap_err();
    assert!(matches!(error, Error::Network { .. }), "{error}");
    assert!(error.to_string().starts_with("group `dp`: looking for rank 0 at 127.0.0.1"), "{error}");
    assert!(started.elapsed() < SHORT + Duration::from_secs(2));
}

#[test]
fn the_launcher_may_hold_the_first_port() {
    let held = loop {
        if let Ok(held) = TcpListener::bind(("127.0.0.1", ports::free())) {
            break held; // accepts, and never says a word, as torchrun's store
        }
    };
    let port = held.local_addr().unwrap().port();
    let first = Environment { world_size: 2, ..Environment::on_this_machine(port) };
    let rank = |rank| Environment { rank, local_rank: rank, ..first.clone() };
    works(join(dp(vec![rank(0), rank(1)]), LONG));
    let exact = Environment { exact_port: true, ..rank(0) };
    let error = tcp("dp", &exact, SHORT).unwrap_err().to_string();
    assert!(
        error.starts_with(&format!("group `dp`: listening at 127.0.0.1, ports {port} to {port}: ")),
        "{error}"
    );
}

#[test]
fn strangers_are_ignored() {
    let environments = environments(2);
    let port = environments[0].master_port;
    let host = environments[0].clone();
    let host = thread::spawn(move || tcp("dp", &host, LONG));
    let connect = || loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => break stream,
            Err(_) => thread::sleep(Duration::from_millis(1)),
        }
    };
    let mut strangers = Vec::new();
    for words in [b"".as_slice(), b"GET / HTTP/1.1\r\n\r\n", b"fp8-dist", &[0xFF; 4096]] {
        let mut stranger = connect();
        stranger.write_all(words).unwrap();
        strangers.push(stranger);
    }
    drop(connect());
    // The right magic and an id of 4 GiB.
    let mut liar = connect();
    liar.write_all(b"fp8-dist\x01\0\0\0\xFF\xFF\xFF\xFF").unwrap();
    let guest = tcp("dp", &environments[1], LONG);
    works(vec![host.join().unwrap(), guest]);
}

#[test]
fn a_member_that_sends_garbage_is_lost() {
    let environments = environments(2);
    let host = environments[0].clone();
    let host = thread::spawn(move || tcp("dp", &host, LONG));
    let mut guest = speak::join("dp", &environments[1]);
    let group = host.join().unwrap().unwrap();
    guest.write_all(&[0xAB; 64]).unwrap();
    let error = group.barrier().unwrap_err();
    assert!(
        matches!(error.failure(), Some(Failure::Lost { rank: 1, reason }) if reason.contains("not part of the protocol")),
        "{error}"
    );
}

#[test]
fn an_environment_that_contradicts_itself() {
    let wrong = Environment { rank: 2, world_size: 2, ..Environment::on_this_machine(29_500) };
    let error = tcp("dp", &wrong, SHORT).unwrap_err().to_string();
    assert_eq!(error, "RANK=2: WORLD_SIZE=2: expected 0 to 1");
    let unknown = Environment {
        rank: 1,
        world_size: 2,
        master_addr: "no-such-machine.invalid".into(),
        ..Environment::on_this_machine(29_500)
    };
    let error = tcp("dp", &unknown, SHORT).unwrap_err().to_string();
    assert!(error.starts_with("group `dp`: looking up MASTER_ADDR=no-such-machine.invalid: "), "{error}");
}

#[test]
fn a_rank_0_without_the_address_of_rank_0_says_so_at_once() {
    // An address that documents use and no machine has.
    let environment = Environment { master_addr: "192.0.2.7".into(), ..environments(2)[0].clone() };
    let started = Instant::now();
    let error = tcp("dp", &environment, LONG).unwrap_err().to_string();
    assert_eq!(
        error,
        "MASTER_ADDR=192.0.2.7: rank 0 is this process, and its machine does not have this address: set MASTER_ADDR to one \
         that it has, or start rank 0 there; if others reach it by an address that it does not know, set 0.0.0.0 for rank 0"
    );
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
}
