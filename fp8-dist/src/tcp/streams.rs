//! The connections between all ranks of a group, and the loop that moves bytes over all of them at once.

use crate::Failure;
use crate::direct::Job;
use crate::timed::{Until, keep_alive};
use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token};
use std::io::{self, ErrorKind, Read, Write};
use std::time::Duration;

/// The most bytes that are read or written at a time, so that no peer waits long for its turn.
const TURN: usize = 1 << 20;
/// The interval at which a rank to which nothing comes looks whether its group has failed.
const GLANCE: Duration = Duration::from_millis(50);
/// The number of glances after which a rank of a failed group gives up. Until then its peers may send the rest: a collective that
/// succeeds on one rank succeeds on all, if it can.
const GLANCES: usize = 4;

/// Connections to peers.
#[derive(Debug)]
pub(super) struct Streams {
    poll: Poll,
    events: Events,
    /// By rank; none to this one.
    streams: Vec<Option<TcpStream>>,
}

/// The reason why bytes did not arrive.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The connection to a peer has closed.
    Lost(usize, io::Error),
    /// These peers have not sent or taken everything in time. It is certain if one alone has not sent what does not depend on others:
    /// of several, some may still wait for another to connect.
    Late { missing: Vec<usize>, is_certain: bool },
    /// The group has failed.
    Failed(Failure),
    /// The system does not say which connections are ready.
    System(io::Error),
}

/// The bytes that have been sent to a peer, and that have come from it.
#[derive(Debug, Clone, Copy, Default)]
struct Progress {
    sent: usize,
    received: usize,
}

impl Streams {
    /// Takes the connections to the peers, by rank, with `None` at this rank.
    pub(super) fn new(peers: Vec<Option<std::net::TcpStream>>) -> io::Result<Self> {
        let (poll, events) = (Poll::new()?, Events::with_capacity(2 * peers.len()));
        let mut streams = Vec::with_capacity(peers.len());
        for (rank, peer) in peers.into_iter().enumerate() {
            let Some(peer) = peer else {
                streams.push(None);
                continue;
            };
            peer.set_nodelay(true)?;
            keep_alive(&peer)?;
            peer.set_nonblocking(true)?;
            let mut stream = TcpStream::from_std(peer);
            poll.registry().register(&mut stream, Token(rank), Interest::READABLE | Interest::WRITABLE)?;
            streams.push(Some(stream));
        }
        Ok(Self { poll, events, streams })
    }

    /// Moves the bytes of a job until `until`. `failure` says why the group has failed, if it has.
    pub(super) fn run(
        &mut self,
        job: &mut dyn Job,
        until: Until,
        failure: &dyn Fn() -> Option<Failure>,
    ) -> Result<(), Trouble> {
        let mut progress = vec![Progress::default(); self.streams.len()];
        let mut idle = 0;
        loop {
            let (mut has_moved, mut owing, mut missing) = (false, Vec::new(), Vec::new());
            for (peer, (stream, progress)) in self.streams.iter_mut().zip(&mut progress).enumerate() {
                let Some(stream) = stream else { continue };
                let lost = |error| Trouble::Lost(peer, error);
                has_moved |= receive(stream, job, peer, &mut progress.received).map_err(lost)?;
                has_moved |= send(stream, job, peer, &mut progress.sent).map_err(lost)?;
                if progress.sent < job.bytes_to(peer) || progress.received < job.bytes_from(peer) {
                    missing.push(peer);
                }
                if progress.received < job.bytes_owed(peer) {
                    owing.push(peer);
                }
            }
            if missing.is_empty() {
                return Ok(());
            }
            if until.is_past() {
                let is_certain = owing.len() == 1;
                let missing = if owing.is_empty() { missing } else { owing };
                return Err(Trouble::Late { missing, is_certain });
            }
            if has_moved {
                idle = 0;
                continue;
            }
            // Each connection that could do something has been tried since the system last named it, as it does only once.
            match self.poll.poll(&mut self.events, Some(until.left(GLANCE))) {
                Err(error) if error.kind() != ErrorKind::Interrupted => return Err(Trouble::System(error)),
                _ if self.events.is_empty() => idle += 1,
                _ => {}
            }
            if idle >= GLANCES {
                idle = 0;
                if let Some(failure) = failure() {
                    return Err(Trouble::Failed(failure));
                }
            }
        }
    }
}

/// Receives as much as has come, at most so much that others have their turn. Returns whether anything came.
fn receive(stream: &mut TcpStream, job: &mut dyn Job, peer: usize, received: &mut usize) -> io::Result<bool> {
    let before = *received;
    while *received < job.bytes_from(peer) && *received - before < TURN {
        let room = job.incoming(peer, *received);
        let room = match room.len() {
            0 => break,
            len => &mut room[..len.min(TURN)],
        };
        match stream.read(room) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                *received += count;
                job.arrived(peer, *received);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(*received > before)
}

/// Sends as much as the connection takes, at most so much that others have their turn. Returns whether it took anything.
fn send(stream: &mut TcpStream, job: &dyn Job, peer: usize, sent: &mut usize) -> io::Result<bool> {
    let before = *sent;
    while *sent < job.bytes_to(peer) && *sent - before < TURN {
        let bytes = job.outgoing(peer, *sent);
        let bytes = match bytes.len() {
            0 => break,
            len => &bytes[..len.min(TURN)],
        };
        match stream.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(count) => *sent += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(*sent > before)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ReduceOp;
    use crate::direct::{Moves, Reduce};
    use std::net::{self, TcpListener};
    use std::thread;
    use std::time::Instant;

    const SHORT: Duration = Duration::from_millis(400);
    const GRACE: Duration = Duration::from_secs(1);

    /// The connections of rank 0 of two, and rank 1's end.
    fn pair() -> (Streams, net::TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = listener.accept().unwrap().0;
        (Streams::new(vec![None, Some(near)]).unwrap(), far)
    }

    /// Rank 0's part in a sum with rank 1.
    fn sum(streams: &mut Streams, data: &mut [f32], failure: Option<Failure>) -> Result<(), Trouble> {
        let mut job = Reduce::to_all(0, 2, data, ReduceOp::Sum);
        streams.run(&mut job, Until::after(SHORT), &|| failure.clone())
    }

    #[test]
    fn a_peer_that_drips_or_is_silent_is_late_at_the_deadline() {
        for drips in [true, false] {
            let (mut streams, mut far) = pair();
            let dripping = thread::spawn(move || {
                while drips && far.write_all(&[0]).is_ok() {
                    thread::sleep(Duration::from_millis(10));
                }
                far
            });
            let started = Instant::now();
            let trouble = sum(&mut streams, &mut vec![0.0; 1 << 20], None).unwrap_err();
            assert!(
                matches!(&trouble, Trouble::Late { missing, is_certain: true } if *missing == [1]),
                "{trouble:?}"
            );
            assert!((SHORT..SHORT + GRACE).contains(&started.elapsed()), "{:?}", started.elapsed());
            drop(streams);
            drop(dripping.join().unwrap());
        }
    }

    #[test]
    fn a_peer_whose_connection_closes_is_lost_at_once() {
        let (mut streams, mut far) = pair();
        far.write_all(&[0; 1000]).unwrap();
        drop(far);
        let started = Instant::now();
        let trouble = sum(&mut streams, &mut [0.0; 1000], None).unwrap_err();
        assert!(matches!(trouble, Trouble::Lost(1, _)), "{trouble:?}");
        assert!(started.elapsed() < SHORT, "{:?}", started.elapsed());
    }

    #[test]
    fn a_failed_group_is_given_up_before_the_deadline() {
        let (mut streams, far) = pair();
        let failure = Failure::Left { ranks: vec![1] };
        let started = Instant::now();
        let trouble = sum(&mut streams, &mut [0.0; 1000], Some(failure)).unwrap_err();
        assert!(matches!(trouble, Trouble::Failed(_)), "{trouble:?}");
        assert!(started.elapsed() < SHORT, "{:?}", started.elapsed());
        drop(far);
    }

    #[test]
    fn what_a_failed_group_still_sends_is_received() {
        let (mut streams, mut far) = pair();
        let sending = thread::spawn(move || {
            for _ in 0..20 {
                thread::sleep(Duration::from_millis(10));
                far.write_all(&[7; 50]).unwrap();
            }
            far
        });
        let mut out = [0; 1000];
        let mut job = Moves::new(&[], &mut out, vec![0..0; 2], vec![0..0, 0..1000]);
        let failure = || Some(Failure::Left { ranks: vec![1] });
        streams.run(&mut job, Until::after(Duration::from_secs(20)), &failure).unwrap();
        assert_eq!(out, [7; 1000]);
        drop(sending.join().unwrap());
    }

    #[test]
    fn a_peer_that_waits_for_another_is_not_taken_for_the_late_one() {
        // Of three ranks, rank 1 has sent its values, and cannot add without those of rank 2.
        let (mut streams, mut far) = pair();
        let (other, silent) = pair();
        streams.streams.extend(other.streams.into_iter().skip(1));
        far.write_all(&[0; 400]).unwrap();
        let mut data = [0.0; 300];
        let mut job = Reduce::to_all(0, 3, &mut data, ReduceOp::Sum);
        let trouble = streams.run(&mut job, Until::after(SHORT), &|| None).unwrap_err();
        assert!(
            matches!(&trouble, Trouble::Late { missing, is_certain: true } if *missing == [2]),
            "{trouble:?}"
        );
        // Neither has sent anything.
        let (mut streams, far) = pair();
        let (other, second) = pair();
        streams.streams.extend(other.streams.into_iter().skip(1));
        let mut job = Reduce::to_all(0, 3, &mut data, ReduceOp::Sum);
        let trouble = streams.run(&mut job, Until::after(SHORT), &|| None).unwrap_err();
        assert!(
            matches!(&trouble, Trouble::Late { missing, is_certain: false } if *missing == [1, 2]),
            "{trouble:?}"
        );
        drop((far, second));
        // Both have sent their values, and neither its sums.
        let (mut streams, mut far) = pair();
        let (other, mut second) = pair();
        streams.streams.extend(other.streams.into_iter().skip(1));
        [&mut far, &mut second].iter_mut().for_each(|far| far.write_all(&[0; 400]).unwrap());
        let mut job = Reduce::to_all(0, 3, &mut data, ReduceOp::Sum);
        let trouble = streams.run(&mut job, Until::after(SHORT), &|| None).unwrap_err();
        assert!(
            matches!(&trouble, Trouble::Late { missing, is_certain: false } if *missing == [1, 2]),
            "{trouble:?}"
        );
        drop((far, silent, second));
    }

    #[test]
    fn nothing_to_move_is_no_wait() {
        let (mut streams, far) = pair();
        sum(&mut streams, &mut [], None).unwrap();
        drop(far);
    }
}
