//! Bytes that are no words of the protocol, or nearly: to rank 0 and to the others, before and after they have met.

use super::{Draw, attack, exchange, joining};
use crate::rendezvous::Joined;
use crate::{environments, f32s, speak};
use fp8_dist::{Environment, ReduceOp, tcp};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_millis(600);

fn number(number: u64) -> Vec<u8> {
    number.to_le_bytes().to_vec()
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_le_bytes(), text.as_bytes()].concat()
}

/// A kind, a head and what follows it.
fn frame(kind: u8, head: &[Vec<u8>], tail: &[u8]) -> Vec<u8> {
    let head = head.concat();
    [&[kind], &(head.len() as u32).to_le_bytes()[..], &head, tail].concat()
}

/// One of each kind that is right, for an all-reduce of four f32 on two ranks.
fn frames() -> [Vec<u8>; 8] {
    let part = || [vec![2, 0, 1], number(4)].concat();
    let bring = |operation: u8| [vec![operation], number(0), text("x"), number(0)].concat();
    [
        frame(1, &[bring(2), part()], &[0; 16]),
        frame(1, &[vec![6], number(0), text(""), number(0), vec![0]], &[]),
        frame(1, &[vec![0], number(0), text("forward"), number(2), text("a"), text("b"), vec![0]], &[]),
        frame(2, &[number(2), part(), part()], &[0; 32]),
        frame(2, &[number(2), part(), vec![1, 0, 1], number(4)], &[0; 16]),
        frame(3, &[vec![0], number(1), text("enough")], &[]),
        frame(4, &[number(1), number(1)], &[]),
        frame(5, &[], &[]),
    ]
}

/// Right bytes with something wrong, or random ones.
fn garbage(draw: &mut Draw, right: &[Vec<u8>]) -> Vec<u8> {
    let random = |draw: &mut Draw, most: usize| (0..draw.below(most)).map(|_| draw.next() as u8).collect();
    let mut bytes = right[draw.below(right.len())].clone();
    let at = draw.below(bytes.len());
    match draw.below(8) {
        0 => return random(draw, 300),
        1 => bytes.truncate(at),
        2 => drop(bytes.splice(at..at, random(draw, 20))),
        3 => drop(bytes.splice(at.., random(draw, 200))),
        4 => bytes = [&bytes[..], &right[draw.below(right.len())]].concat(),
        5 => {} // right, at the wrong moment
        _ => (0..1 + draw.below(3)).for_each(|_| {
            let at = draw.below(bytes.len());
            bytes[at] = draw.pick(&[0, 1, 2, 255, bytes[at] ^ 1, bytes[at] ^ 128]);
        }),
    }
    bytes
}

/// Says it, then closes the connection or holds it.
fn send(mut stream: TcpStream, bytes: &[u8], closes: bool) -> Option<TcpStream> {
    let _ = stream.write_all(bytes);
    (!closes).then_some(stream)
}

/// Sums until something fails, and that in time.
fn work(joined: Joined, started: Instant) -> Result<(), String> {
    if started.elapsed() > joining(DEADLINE) {
        return Err(format!("joining took {:?}", started.elapsed()));
    }
    let Ok(group) = joined else { return Ok(()) };
    for _ in 0..10 {
        let started = Instant::now();
        let sum = group.all_reduce("x", &f32s(&[0.0; 4], &[4]), ReduceOp::Sum);
        if started.elapsed() > exchange(DEADLINE) {
            return Err(format!("a sum took {:?}", started.elapsed()));
        }
        if sum.is_err() {
            return Ok(());
        }
    }
    Err("garbage was taken for ten sums".to_owned())
}

fn start(environment: &Environment) -> thread::JoinHandle<Result<(), String>> {
    let environment = environment.clone();
    thread::spawn(move || {
        let started = Instant::now();
        work(tcp("dp", &environment, DEADLINE), started)
    })
}

/// A stranger, while the group forms: it forms all the same.
fn before_to_rank_0(draw: &mut Draw, environments: &[Environment]) -> Result<(), String> {
    let [host, guest] = [0, 1].map(|rank| environments[rank].clone());
    let host = thread::spawn(move || tcp("dp", &host, Duration::from_secs(10)));
    let (stranger, nonce) = speak::greet(&environments[1]);
    let hello = speak::proven(&speak::hello("dp", &environments[1]), "", &nonce);
    // What is right would be rank 1.
    let wrong = loop {
        let wrong = garbage(draw, std::slice::from_ref(&hello));
        if !wrong.starts_with(&hello) {
            break wrong;
        }
    };
    let held = send(stranger, &wrong, draw.below(2) == 0);
    let words = garbage(draw, &[speak::words(1)]);
    let other = send(crate::slow::connect(guest.master_port), &words, draw.below(2) == 0);
    let guest = thread::spawn(move || tcp("dp", &guest, Duration::from_secs(10)));
    let groups = [host, guest].map(|rank| rank.join().unwrap());
    drop((held, other));
    thread::scope(|scope| {
        let ranks = groups.map(|group| {
            let group = group.map_err(|error| error.to_string());
            scope.spawn(move || group?.barrier().map_err(|error| error.to_string()))
        });
        ranks.into_iter().try_for_each(|rank| rank.join().unwrap())
    })
}

/// From a rank that has joined.
fn after_to_rank_0(draw: &mut Draw, environments: &[Environment]) -> Result<(), String> {
    let host = start(&environments[0]);
    let member = speak::join("dp", &environments[1]);
    // With or without a look at the welcome.
    if draw.below(2) == 0 {
        let _ = (&member).read(&mut [0; 5]);
    }
    let wrong = garbage(draw, &frames());
    let held = send(member, &wrong, draw.below(2) == 0);
    let end = host.join().unwrap();
    drop(held);
    end.map_err(|error| format!("{error}: {wrong:?}"))
}

/// From what is not yet known as rank 0, or from rank 0 itself.
fn to_the_others(draw: &mut Draw, environments: &[Environment], is_known: bool) -> Result<(), String> {
    let listener = TcpListener::bind(("127.0.0.1", environments[0].master_port)).unwrap();
    let guest = start(&environments[1]);
    let welcome = &frames()[7];
    let (wrong, closes, is_welcome) = (
        match is_known {
            true => garbage(draw, &frames()),
            false => garbage(
                draw,
                &[[&speak::words(0)[..12], &[7; 32]].concat(), vec![1, 8, 0, 0, 0], vec![2], vec![0]],
            ),
        },
        draw.below(2) == 0,
        draw.below(3) > 0,
    );
    listener.set_nonblocking(true).unwrap();
    let mut held = Vec::new();
    while !guest.is_finished() {
        let Ok((mut stream, _)) = listener.accept() else {
            thread::sleep(Duration::from_millis(2));
            continue;
        };
        stream.set_nonblocking(false).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        if is_known && speak::host(&stream, "dp", &environments[0]).is_none() {
            continue;
        }
        if is_known && is_welcome {
            let _ = stream.write_all(welcome);
        }
        held.extend(send(stream, &wrong, closes));
    }
    drop(held);
    guest.join().unwrap().map_err(|error| format!("{error}: {wrong:?}"))
}

#[test]
fn garbage_is_an_error_in_time_or_ignored() {
    attack("garbage frames", [300, 16], 4, |mut draw| {
        let environments = environments(2);
        let (what, outcome) = match draw.below(4) {
            0 => ("rank 0, before the hello:", before_to_rank_0(&mut draw, &environments)),
            1 => ("rank 0, after it:", after_to_rank_0(&mut draw, &environments)),
            2 => ("rank 1, before:", to_the_others(&mut draw, &environments, false)),
            _ => ("rank 1, after:", to_the_others(&mut draw, &environments, true)),
        };
        outcome.map(|()| what.to_owned()).map_err(|error| format!("{what}: {error}"))
    });
}
