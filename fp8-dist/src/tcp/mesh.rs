//! Direct connections between all ranks, made when the first large tensor has to move.
//!
//! Each rank listens, and all learn the addresses from an exchange, as when a group is divided. Then each rank in turn accepts those
//! behind it, which prove token and job as in joining. The listeners close as soon as all have come.

use super::connection::{GOODBYE, closed};
use super::network::Network;
use super::streams::{Streams, Trouble};
use crate::direct::{Direct, Job};
use crate::division::{Request, requests_of};
use crate::exchange::Exchange;
use crate::meeting::grace;
use crate::message::{Message, Operation};
use crate::rendezvous::{self, Met};
use crate::timed::Until;
use crate::{Error, Failure, Result};
use parking_lot::Mutex;
use std::io::ErrorKind;
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

/// A rank's connections to all others.
#[derive(Debug)]
pub(super) struct Mesh {
    network: Network,
    /// None before the first job, and after one that failed.
    streams: Mutex<Option<Streams>>,
}

impl Mesh {
    pub(super) const fn new(network: Network) -> Self {
        Self { network, streams: Mutex::new(None) }
    }

    /// Connects this rank to all others. Every rank calls it after the same exchange.
    ///
    /// A rank whose predecessors have not all accepted it accepts nobody yet, so those who wait in vain all wait for the rank that is
    /// missing, directly.
    fn connect(&self, exchange: &dyn Exchange, call: &str, until: Until) -> Result<Streams> {
        let (id, rank) = (exchange.id(), exchange.rank());
        let gives_up = || exchange.failure().is_some();
        let (listener, request) = self.network.request(id, exchange, Some(0), 0)?;
        let message = Message::new(Operation::Connect, "").with(request.part()?);
        let all = exchange.exchange(message)?;
        let requests = requests_of(exchange, &all)?;
        let mut listener = Some(listener).filter(|_| rank + 1 < requests.len());
        let mut peers: Vec<Option<TcpStream>> = requests.iter().map(|_| None).collect();
        for (host, request) in requests.iter().enumerate().take(rank + 1) {
            let Request { address: Some(address), secret, .. } = request else { continue };
            let environment =
                self.network.environment_of(rank - host, requests.len() - host, *address, *secret);
            let listener = if host == rank { listener.take() } else { None };
            let deadline = until.left(self.network.deadline);
            let met = rendezvous::meet(id, &environment, listener, deadline, &gives_up);
            // The connections that stand must not close before the others know why.
            match met.map_err(|error| self.ended(exchange, call, in_group(error, host, deadline)))? {
                Met::Guest(stream) => peers[host] = Some(stream),
                Met::Host(streams) => {
                    for (peer, stream) in (rank + 1..).zip(streams) {
                        peers[peer] = Some(stream);
                    }
                }
            }
        }
        Streams::new(peers).map_err(|source| {
            let what = "connecting all ranks".to_owned();
            self.ended(exchange, call, Error::Network { id: id.to_owned(), what, source })
        })
    }

    /// Ends the group because ranks could not meet, and returns the error.
    fn ended(&self, exchange: &dyn Exchange, call: &str, error: Error) -> Error {
        let (failure, is_certain) = match error {
            Error::Rendezvous { failure, .. } => {
                let is_certain = matches!(failure, Failure::Deadline { .. });
                (failure, is_certain)
            }
            error => (Failure::GaveUp { rank: exchange.rank(), reason: error.to_string() }, true),
        };
        Error::Failed { call: call.to_owned(), failure: self.settled(exchange, failure, is_certain) }
    }

    /// Ends the group, if it has not failed yet, and returns its failure: the first one counts. If this rank is not certain, another
    /// may know better, and has a moment to say so.
    fn settled(&self, exchange: &dyn Exchange, failure: Failure, is_certain: bool) -> Failure {
        let deadline = self.network.deadline;
        let patience = match &failure {
            _ if is_certain => Duration::ZERO,
            // Before rank 0 speaks of those that are held up, which it does after half of the grace.
            Failure::Deadline { .. } => grace(deadline) / 4,
            _ => GOODBYE.min(deadline),
        };
        if let Some(known) = cause(exchange, patience) {
            return known;
        }
        // A rank 0 that runs would have said by now who is late: it waits in the same call. Others may wait for its word.
        let failure = match failure {
            Failure::Deadline { missing, waited } if !is_certain && missing.contains(&0) => {
                Failure::Deadline { missing: vec![0], waited }
            }
            failure => failure,
        };
        exchange.fail(failure.clone());
        let is_of_rank_0 = match &failure {
            Failure::Deadline { missing, .. } => missing.contains(&0),
            Failure::Lost { rank, .. } => *rank == 0,
            _ => false,
        };
        // Rank 0 would answer with the group's first failure, but for one that does not answer.
        if is_of_rank_0 { failure } else { exchange.failure().unwrap_or(failure) }
    }
}

impl Direct for Mesh {
    fn run(&self, exchange: &dyn Exchange, call: &str, job: &mut dyn Job) -> Result<()> {
        let deadline = self.network.deadline;
        let until = Until::after(deadline);
        let mut streams = self.streams.lock();
        let mut connected = match streams.take() {
            Some(connected) => connected,
            None => self.connect(exchange, call, until)?,
        };
        let trouble = match connected.run(job, until, &|| exchange.failure()) {
            Ok(()) => {
                *streams = Some(connected);
                return Ok(());
            }
            Err(trouble) => trouble,
        };
        let late = |missing| Failure::Deadline { missing, waited: deadline };
        let failure = match trouble {
            Trouble::Failed(failure) => failure,
            Trouble::Late { missing, is_certain } => self.settled(exchange, late(missing), is_certain),
            Trouble::Lost(rank, error) => {
                self.settled(exchange, Failure::Lost { rank, reason: closed(&error) }, false)
            }
            Trouble::System(error) => {
                let failure = Failure::GaveUp { rank: exchange.rank(), reason: error.to_string() };
                self.settled(exchange, failure, true)
            }
        };
        // Now, so that the others notice.
        drop(connected);
        Err(Error::Failed { call: call.to_owned(), failure })
    }
}

/// Returns an error of the ranks that met at `host`, with the numbers that they have in the group.
fn in_group(error: Error, host: usize, deadline: Duration) -> Error {
    let (id, failure) = match error {
        Error::Rendezvous { id, failure } => (id, failure),
        // No connection to it, or no answer.
        Error::Network { id, source, .. } if source.kind() == ErrorKind::TimedOut => {
            (id, Failure::Deadline { missing: vec![0], waited: deadline })
        }
        error => return error,
    };
    let failure = match failure {
        Failure::Deadline { missing, waited } => {
            Failure::Deadline { missing: missing.iter().map(|rank| rank + host).collect(), waited }
        }
        Failure::Lost { rank, reason } => Failure::Lost { rank: rank + host, reason },
        failure => Failure::GaveUp { rank: host, reason: failure.to_string() },
    };
    Error::Rendezvous { id, failure }
}

/// Waits for the failure that another rank has reported.
fn cause(exchange: &dyn Exchange, patience: Duration) -> Option<Failure> {
    let until = Instant::now() + patience;
    loop {
        let failure = exchange.failure();
        if failure.is_some() || Instant::now() >= until {
            return failure;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Environment;
    use crate::direct::Moves;
    use crate::division::requests_of;
    use crate::meeting::{All, Meeting, Seat};
    use crate::message::Call;
    use std::io::Write;
    use std::net::{IpAddr, Ipv4Addr, SocketAddr};

    const LONG: Duration = Duration::from_secs(20);
    const SHORT: Duration = Duration::from_millis(500);

    /// A rank whose addresses strangers call before another rank does.
    #[derive(Debug)]
    struct Exposed {
        seat: Seat,
        known: Mutex<Vec<SocketAddr>>,
    }

    impl Exchange for Exposed {
        fn id(&self) -> &str {
            self.seat.id()
        }

        fn rank(&self) -> usize {
            self.seat.rank()
        }

        fn world_size(&self) -> usize {
            self.seat.world_size()
        }

        fn exchange(&self, message: Message) -> Result<All> {
            let all = self.seat.exchange(message)?;
            let addresses = requests_of(&self.seat, &all)?.into_iter().filter_map(|request| request.address);
            let addresses: Vec<SocketAddr> = addresses.collect();
            *self.known.lock() = addresses.clone();
            thread::spawn(move || strangers(&addresses));
            thread::sleep(Duration::from_millis(50));
            Ok(all)
        }

        fn send_to(&self, to: usize, message: Message) -> Result<()> {
            self.seat.send_to(to, message)
        }

        fn receive_from(&self, from: usize, call: &Call) -> Result<Message> {
            self.seat.receive_from(from, call)
        }

        fn fail(&self, failure: Failure) {
            self.seat.fail(failure);
        }

        fn failure(&self) -> Option<Failure> {
            self.seat.failure()
        }

        #[cfg(feature = "cuda")]
        fn name_call(&self, number: u64, name: &str) {
            self.seat.name_call(number, name);
        }

        #[cfg(feature = "cuda")]
        fn tell_calls(&self, numbers: &[u64]) -> bool {
            self.seat.tell_calls(numbers)
        }

        #[cfg(feature = "cuda")]
        fn left(&self) -> Vec<usize> {
            self.seat.left()
        }
    }

    /// Connects to each address many times: silently, with garbage, and with half a greeting.
    fn strangers(addresses: &[SocketAddr]) {
        let words: [&[u8]; 3] = [b"", &[0xA5; 4096], b"fp8-dist\x07\0\0\0"];
        let mut held = Vec::new();
        for (word, address) in words.iter().cycle().zip(addresses.iter().cycle()).take(60 * addresses.len()) {
            if let Ok(mut stream) = TcpStream::connect(address) {
                let _ = stream.write_all(word);
                held.push(stream);
            }
        }
        thread::sleep(Duration::from_secs(3));
    }

    /// Runs `f` as each of the ranks, with the mesh of a group on this machine.
    fn ranks<R: Send>(ranks: usize, deadline: Duration, f: impl Fn(&Mesh, Seat) -> R + Sync) -> Vec<R> {
        let meeting = Meeting::new("dp", ranks, deadline, |_| false);
        let run = |rank| {
            let environment = Environment {
                rank,
                world_size: ranks,
                token: "secret".to_owned(),
                ..Environment::on_this_machine(1)
            };
            let network = Network { ip: IpAddr::V4(Ipv4Addr::LOCALHOST), environment, deadline };
            f(&Mesh::new(network), Seat::new("dp", rank, ranks, meeting.clone()))
        };
        thread::scope(|scope| {
            let run = &run;
            let threads: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || run(rank))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// Gathers a byte of each rank.
    fn gather(mesh: &Mesh, exchange: &dyn Exchange) -> Result<Vec<u8>> {
        let (rank, ranks) = (exchange.rank(), exchange.world_size());
        let mut out = vec![0; ranks];
        let own = [rank as u8 + 1];
        out[rank] = own[0];
        let places = (0..ranks).map(|rank| rank..rank + 1).collect();
        mesh.run(exchange, "all_gather `x`", &mut Moves::new(&own, &mut out, vec![0..1; ranks], places))?;
        Ok(out)
    }

    #[test]
    fn strangers_at_every_rank_are_ignored_and_the_listeners_close() {
        ranks(4, LONG, |mesh, seat| {
            let exposed = Exposed { seat, known: Mutex::default() };
            assert_eq!(gather(mesh, &exposed).unwrap(), [1, 2, 3, 4]);
            assert_eq!(gather(mesh, &exposed).unwrap(), [1, 2, 3, 4], "over the same connections");
            let known = exposed.known.lock();
            assert_eq!(known.len(), 4);
            // Each rank's own is closed when all behind it have come, and the last one's at once.
            let own = known[exposed.rank()];
            assert!(TcpStream::connect(own).is_err(), "{own} still listens");
        });
    }

    #[test]
    fn a_rank_that_does_not_connect_is_named_by_its_number_in_the_group() {
        for missing in 0..4 {
            let errors = ranks(4, SHORT, |mesh, seat| {
                if seat.rank() == missing {
                    // It has told its address, and does not go on.
                    let (_listener, request) = mesh.network.request("dp", &seat, Some(0), 0).unwrap();
                    seat.exchange(Message::new(Operation::Connect, "").with(request.part().unwrap()))
                        .unwrap();
                    thread::sleep(SHORT * 4);
                    return None;
                }
                let started = Instant::now();
                let error = gather(mesh, &seat).unwrap_err();
                assert!(started.elapsed() < SHORT * 4, "{:?}", started.elapsed());
                error.failure().cloned()
            });
            let late = |failure: &Failure| matches!(failure, Failure::Deadline { missing: late, .. } if *late == [missing]);
            assert!(errors.iter().flatten().all(late), "rank {missing}: {errors:?}");
            assert_eq!(errors.iter().flatten().count(), 3);
        }
    }

    #[test]
    fn of_ranks_that_have_sent_nothing_a_silent_rank_0_is_the_late_one() {
        let errors = ranks(3, SHORT, |mesh, seat| {
            gather(mesh, &seat).unwrap();
            if seat.rank() < 2 {
                thread::sleep(SHORT * 6);
                return None;
            }
            gather(mesh, &seat).unwrap_err().failure().cloned()
        });
        assert_eq!(errors[2], Some(Failure::Deadline { missing: vec![0], waited: SHORT }));
    }

    #[test]
    fn a_failure_while_connecting_is_noticed_before_the_deadline() {
        let errors = ranks(3, LONG, |mesh, seat| {
            if seat.rank() == 1 {
                let (_listener, request) = mesh.network.request("dp", &seat, Some(0), 0).unwrap();
                seat.exchange(Message::new(Operation::Connect, "").with(request.part().unwrap())).unwrap();
                seat.poison("out of memory");
                return None;
            }
            let started = Instant::now();
            let error = gather(mesh, &seat).unwrap_err();
            assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
            error.failure().cloned()
        });
        let gave_up = Failure::GaveUp { rank: 1, reason: "out of memory".to_owned() };
        assert_eq!(errors, [Some(gave_up.clone()), None, Some(gave_up)]);
    }
}
