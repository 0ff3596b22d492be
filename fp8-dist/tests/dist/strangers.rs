//! Tests of foreign processes on the ports of a group, and of ranks that connect twice, slowly or again.

use crate::rendezvous::{dp, join, works};
use crate::{LONG, SHORT, environments, ports, slow, speak};
use fp8_dist::{Environment, tcp};
use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The time by which ranks may exceed a deadline while they meet.
const GRACE: Duration = Duration::from_secs(3);

/// The first words of this protocol, then nothing that ends soon.
fn endless() -> Vec<u8> {
    [b"fp8-dist\x03\0\0\0".as_slice(), &[1; 4000]].concat()
}

/// The environment of `rank` among `ranks` ranks that may use all ports from `port` on.
fn anywhere(port: u16, rank: usize, ranks: usize) -> Environment {
    let run_id = "strangers".to_owned();
    Environment { rank, world_size: ranks, local_rank: rank, run_id, ..Environment::on_this_machine(port) }
}

#[test]
fn many_that_drip_do_not_keep_a_rank_out() {
    let environments = environments(2);
    let port = environments[0].master_port;
    let [host, guest] = [environments[0].clone(), environments[1].clone()];
    let host = thread::spawn(move || tcp("dp", &host, LONG));
    let drippers: Vec<TcpStream> = (0..64).map(|_| slow::connect(port)).collect();
    let dripping: Vec<_> = drippers
        .iter()
        .map(|stream| stream.try_clone().unwrap())
        .map(|stream| {
            thread::spawn(move || slow::drip(&stream, &endless()[..150], Duration::from_millis(100)))
        })
        .collect();
    thread::sleep(Duration::from_millis(300));
    let started = Instant::now();
    let guest = tcp("dp", &guest, Duration::from_secs(5));
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    works(vec![host.join().unwrap(), guest]);
    drop(drippers);
    dripping.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn one_that_drips_is_dropped_after_two_seconds() {
    let environments = environments(2);
    let port = environments[0].master_port;
    let host = environments[0].clone();
    let host = thread::spawn(move || tcp("dp", &host, Duration::from_secs(6)));
    let stream = slow::connect(port);
    let started = Instant::now();
    slow::drip(&stream, &endless(), Duration::from_millis(100));
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    host.join().unwrap().unwrap_err();
}

#[test]
fn a_listener_that_drips_does_not_hold_up_a_rank() {
    let port = ports::free();
    let dripping = TcpListener::bind(("127.0.0.1", port)).unwrap();
    thread::spawn(move || {
        for stream in dripping.incoming().map_while(Result::ok) {
            thread::spawn(move || slow::drip(&stream, &endless(), Duration::from_millis(100)));
        }
    });
    // Alone, a rank gives up when its deadline has passed.
    let started = Instant::now();
    tcp("dp", &anywhere(port, 1, 2), SHORT).unwrap_err();
    assert!(started.elapsed() < SHORT + GRACE, "{:?}", started.elapsed());
    let started = Instant::now();
    works(join(dp((0..2).map(|rank| anywhere(port, rank, 2)).collect()), LONG));
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
}

#[cfg(target_os = "linux")]
#[test]
fn a_rank_0_that_drips_its_welcome_does_not_hold_a_rank_for_ever() {
    let environments = environments(3);
    let port = environments[0].master_port;
    let begun = Instant::now();
    let after = Duration::from_secs(1);
    let paced =
        |is_slow: bool| move || (is_slow && begun.elapsed() > after).then_some(Duration::from_secs(3));
    slow::proxy(port, paced(false), paced(true));
    let deadline = Duration::from_secs(4);
    let [host, mut guest, last] = <[Environment; 3]>::try_from(environments).unwrap();
    guest.master_addr = slow::NEAR.to_owned();
    let others = [(host, Duration::ZERO), (last, after + SHORT)].map(|(environment, late)| {
        thread::spawn(move || {
            thread::sleep(late);
            tcp("dp", &environment, deadline)
        })
    });
    let started = Instant::now();
    let error = tcp("dp", &guest, deadline).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("rank 0 did not arrive within 4s"), "{error}");
    assert!(started.elapsed() < deadline + GRACE, "{:?}", started.elapsed());
    others.into_iter().for_each(|other| drop(other.join().unwrap()));
}

/// The first words of a process of version 99 that says it is rank 1.
fn another_version() -> Vec<u8> {
    [b"fp8-dist".as_slice(), &99u32.to_le_bytes(), &1u64.to_le_bytes(), &[0; 64]].concat()
}

#[test]
fn a_hello_of_another_version_does_not_end_a_job() {
    let environments = environments(2);
    let port = environments[0].master_port;
    let host = environments[0].clone();
    let host = thread::spawn(move || tcp("dp", &host, LONG));
    let strangers = [another_version(), [&another_version()[..12], b"\x02\0\0\0dp\x02", &[0; 40]].concat()]
        .map(|words| {
            let stranger = slow::connect(port);
            slow::drip(&stranger, &words, Duration::ZERO);
            stranger
        });
    thread::sleep(Duration::from_millis(200));
    let guest = tcp("dp", &environments[1], Duration::from_secs(5));
    works(vec![host.join().unwrap(), guest]);
    drop(strangers);
}

#[test]
fn a_hello_of_another_version_explains_why_a_rank_did_not_come() {
    let environments = environments(2);
    let port = environments[0].master_port;
    let host = environments[0].clone();
    let host = thread::spawn(move || tcp("dp", &host, Duration::from_secs(1)));
    let mut stranger = slow::connect(port);
    slow::drip(&stranger, &[another_version(), vec![0; 100]].concat(), Duration::ZERO);
    // It hears which version rank 0 speaks.
    let mut answer = [0; 44];
    stranger.read_exact(&mut answer).unwrap();
    assert_eq!(answer[..12], speak::words(0)[..12]);
    let error = host.join().unwrap().unwrap_err().to_string();
    let differ = |one: u32, other: u32| {
        format!(
            "group `dp`: cannot form the group: the version of the protocol is {one} on rank 1 and {other} on rank 0: start all \
             ranks of a group with the same settings"
        )
    };
    assert_eq!(error, differ(99, speak::VERSION));

    // The other way round: rank 0 is of another version.
    let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
    thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let _ = stream.read(&mut [0; 100]); // what is unread resets the connection
            slow::drip(&stream, &another_version(), Duration::ZERO);
        }
    });
    let error = tcp("dp", &environments[1], Duration::from_secs(1)).map(|_| ()).unwrap_err().to_string();
    assert_eq!(error, differ(speak::VERSION, 99));
}

#[test]
fn a_rank_that_is_restarted_replaces_its_dead_connection() {
    let environments = environments(3);
    let start = |rank: usize, deadline| {
        let environment = environments[rank].clone();
        thread::spawn(move || tcp("dp", &environment, deadline))
    };
    let host = start(0, Duration::from_secs(20));
    let mut first = crate::child::start("strangers::a_rank_that_waits", &environments[1], &[]);
    thread::sleep(Duration::from_millis(700));
    first.kill().unwrap();
    first.wait().unwrap();
    let again = start(1, Duration::from_secs(20));
    thread::sleep(Duration::from_millis(100));
    let last = start(2, Duration::from_secs(20));
    works([host, again, last].map(|rank| rank.join().unwrap()).into());
}

#[test]
fn a_rank_that_waits() {
    if crate::child::is_child() {
        let _ = tcp("dp", &Environment::read().unwrap(), LONG);
    }
}

/// Fifteen listeners that accept and stay silent, and rank 0 at the last port.
#[test]
fn ports_are_tried_side_by_side() {
    let port = ports::free();
    let silent: Vec<_> = (0..15).map(|offset| TcpListener::bind(("127.0.0.1", port + offset))).collect();
    assert!(silent.iter().all(Result::is_ok), "{silent:?}");
    let started = Instant::now();
    works(join(dp((0..3).map(|rank| anywhere(port, rank, 3)).collect()), LONG));
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
}

/// torchrun's store warns of each connection that it does not understand.
#[test]
fn a_listener_that_hangs_up_is_called_ever_more_rarely() {
    let port = ports::free();
    let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            counted.fetch_add(1, Ordering::Relaxed);
            drop(stream);
        }
    });
    tcp("dp", &anywhere(port, 1, 2), Duration::from_secs(3)).map(|_| ()).unwrap_err();
    let calls = calls.load(Ordering::Relaxed);
    assert!((2..=9).contains(&calls), "{calls} calls");
}

/// Fifteen ports where the system answers no connection, as behind a firewall that drops packets.
#[cfg(target_os = "linux")]
#[test]
fn ports_that_answer_nothing_do_not_hold_up_a_rank() {
    use socket2::{Domain, Socket, Type};
    use std::net::SocketAddr;
    let port = ports::free();
    let full: Vec<(Socket, Vec<Socket>)> = (0..15)
        .map(|offset| {
            let address = SocketAddr::from(([127, 0, 0, 1], port + offset)).into();
            let new = || Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
            let listener = new();
            listener.set_reuse_address(true).unwrap(); // connections of an earlier test may not have ended
            listener.bind(&address).unwrap();
            listener.listen(0).unwrap();
            let waiting = (0..3).map(|_| {
                let socket = new();
                socket.set_nonblocking(true).unwrap();
                let _ = socket.connect(&address);
                socket
            });
            let waiting = waiting.collect();
            (listener, waiting)
        })
        .collect();
    let started = Instant::now();
    works(join(dp((0..2).map(|rank| anywhere(port, rank, 2)).collect()), LONG));
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    drop(full);
}
