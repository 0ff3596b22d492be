//! Groups whose ranks are processes, connected to rank 0 by TCP.
//!
//! Rank 0 has the [`Meeting`] of all ranks; large tensors go over direct connections ([`mesh`]). Two threads per remote rank receive its messages and send it the outcomes. A group of
//! processes therefore computes and reports exactly what a group of threads does: sums in rank order, one failure for all ranks.
//! A connection that closes before its rank has left fails the group immediately.
//!
//! Each message has one deadline as a whole, so a peer that reads one byte at a time delays no other rank. Separate threads read
//! incoming data, and no call waits for them longer than the deadline plus a grace period.

mod connection;
mod guest;
mod host;
mod joining;
mod mesh;
mod network;
mod streams;

use crate::member::Member;
use crate::{Environment, ProcessGroup, Result};
pub(crate) use joining::connect;
use std::sync::Arc;
use std::time::Duration;

/// Joins a group of processes and returns this process's handle. Every process of the group calls it; it returns when all have.
///
/// `id` names the group within the job ("dp"). `environment` says which rank this process is and where rank 0 listens; with a
/// launcher such as `torchrun`, pass [`Environment::detect`]. `deadline` is how long a rank waits for the others: to join, to make
/// the same call, and for the elements of a large tensor.
///
/// Tensors stay on the CPU. Rank 0 compares the calls of all ranks and passes on small tensors. Tensors of more than 128 KiB go
/// directly from rank to rank, over connections that are made for the first of them; of a sum, each rank computes a part. Traffic is
/// not encrypted, and only the making of connections is authenticated (by [`Environment::token`]), so use a network that you
/// trust.
///
/// Two ranks, here in one process so that the example runs:
///
/// ```
/// use fp8_dist::{Environment, ReduceOp, Result, tcp};
/// use fp8_kernels::{Device, Tensor};
/// use std::{thread, time::Duration};
///
/// let run = |rank| -> Result<f32> {
///     let run_id = format!("docs {}", std::process::id());
///     let environment = Environment { rank, world_size: 2, run_id, ..Environment::on_this_machine(29_640) };
///     let group = tcp("dp", &environment, Duration::from_secs(30))?;
///     let x = Tensor::scalar(group.rank() as f32 + 1.0, &Device::cpu())?;
///     Ok(group.all_reduce("x", &x, ReduceOp::Sum)?.item()?)
/// };
/// thread::scope(|scope| {
///     let ranks = [0, 1].map(|rank| scope.spawn(move || run(rank)));
///     ranks.map(|rank| assert_eq!(rank.join().unwrap().unwrap(), 3.0));
/// });
/// ```
///
/// # Errors
/// A deadline of 0; an invalid environment; no free port. On every rank: a rank that does not join within the deadline, or joins
/// with another world size, id, version or token; another job with the same settings.
pub fn tcp(id: &str, environment: &Environment, deadline: Duration) -> Result<Arc<dyn ProcessGroup>> {
    Ok(Arc::new(Member::new(connect(id, environment, None, deadline, &|| false)?)))
}

#[cfg(test)]
mod tests {
    use super::connection::closed;
    use super::guest::Guest;
    use super::host::{employ, host, seat_all};
    use crate::exchange::Exchange;
    use crate::message::{Message, Operation, Part};
    use crate::wire::{self, Frame};
    use crate::{Environment, Failure, ReduceOp};
    use fp8_kernels::{DType, Device, Tensor};
    use socket2::SockRef;
    use std::io::{self, Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::thread;
    use std::time::{Duration, Instant};

    const SHORT: Duration = Duration::from_millis(600);

    #[test]
    fn a_machine_that_does_not_answer_is_told_from_a_process_that_ended() {
        let text = |kind: io::ErrorKind| closed(&kind.into());
        assert_eq!(text(io::ErrorKind::TimedOut), "its machine does not answer (timed out)");
        let ended = "its connection closed; its process has probably ended";
        assert_eq!(text(io::ErrorKind::UnexpectedEof), ended);
        assert_eq!(text(io::ErrorKind::InvalidData), "invalid data");
    }
    /// The time by which a rank may exceed its deadline, including the delays of a slow machine.
    const GRACE: Duration = Duration::from_secs(1);

    /// The two ends of a connection.
    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    /// A sum of more data than a connection holds.
    fn large() -> Message {
        let x = Tensor::zeros([8 << 20], DType::F32, &Device::cpu()).unwrap();
        Message::new(Operation::AllReduce(ReduceOp::Sum), "x").with(Part::copy(&x).unwrap())
    }

    fn guest(stream: TcpStream, deadline: Duration) -> Guest {
        let environment = Environment { rank: 1, world_size: 2, ..Environment::on_this_machine(1) };
        Guest::new("dp", &environment, deadline, stream).unwrap()
    }

    /// Reads a byte every few milliseconds, until the connection closes.
    fn sip(mut stream: &TcpStream) {
        while stream.read(&mut [0]).is_ok_and(|len| len > 0) {
            thread::sleep(Duration::from_millis(3));
        }
    }

    #[test]
    fn a_member_that_takes_a_byte_at_a_time_fails_the_group_at_the_deadline() {
        let (near, mut far) = pair();
        let seat = host("dp", vec![near], SHORT).unwrap();
        thread::spawn(move || {
            wire::send(&mut far, &Frame::Bring(large())).unwrap();
            sip(&far);
        });
        seat.exchange(large()).unwrap();
        let started = Instant::now();
        while seat.failure().is_none() && started.elapsed() < SHORT + GRACE {
            thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(seat.failure(), Some(Failure::Deadline { missing: vec![1], waited: SHORT }));
        let started = Instant::now();
        drop(seat);
        assert!(started.elapsed() < GRACE, "{:?}", started.elapsed());
    }

    #[test]
    fn an_exchange_ends_at_the_deadline_however_slowly_rank_0_reads() {
        let (near, far) = pair();
        thread::spawn(move || sip(&far));
        let guest = guest(near, SHORT);
        let started = Instant::now();
        let error = guest.exchange(large()).unwrap_err();
        assert_eq!(error.failure(), Some(&Failure::Deadline { missing: vec![0], waited: SHORT }), "{error}");
        assert!(started.elapsed() < SHORT + GRACE, "{:?}", started.elapsed());
        let started = Instant::now();
        drop(guest);
        assert!(started.elapsed() < GRACE, "{:?}", started.elapsed());
    }

    #[test]
    fn a_rank_that_gives_up_does_not_wait_for_a_rank_0_that_reads_slowly() {
        let (near, far) = pair();
        thread::spawn(move || sip(&far));
        let guest = guest(near, Duration::from_secs(30));
        thread::scope(|scope| {
            scope.spawn(|| guest.exchange(large()).unwrap_err());
            thread::sleep(Duration::from_millis(200));
            let started = Instant::now();
            guest.poison("enough");
            assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
        });
    }

    #[test]
    fn an_exchange_ends_at_the_deadline_however_slowly_rank_0_answers() {
        let (near, mut far) = pair();
        thread::spawn(move || {
            // A frame of 1000 bytes, one every 10 ms.
            let answer = [&[2, 0xE8, 3, 0, 0][..], &[0; 1000]].concat();
            for byte in answer {
                if far.write_all(&[byte]).is_err() {
                    return;
                }
                thread::sleep(Duration::from_millis(10));
            }
        });
        let guest = guest(near, SHORT);
        let started = Instant::now();
        let error = guest.exchange(Message::new(Operation::Barrier, "")).unwrap_err();
        assert_eq!(error.failure(), Some(&Failure::Deadline { missing: vec![0], waited: SHORT }), "{error}");
        assert!(started.elapsed() < SHORT + GRACE, "{:?}", started.elapsed());
    }

    #[test]
    fn both_ends_of_a_group_are_kept_alive() {
        let (near, far) = pair();
        let ends = [near.try_clone().unwrap(), far.try_clone().unwrap()];
        let seat = host("dp", vec![near], SHORT).unwrap();
        let guest = guest(far, SHORT);
        for end in ends {
            let socket = SockRef::from(&end);
            assert!(socket.keepalive().unwrap() && socket.tcp_nodelay().unwrap());
            #[cfg(target_os = "linux")]
            {
                assert_eq!(socket.tcp_keepalive_time().unwrap(), Duration::from_secs(3));
                assert_eq!(socket.tcp_keepalive_interval().unwrap(), Duration::from_secs(1));
                assert_eq!(socket.tcp_keepalive_retries().unwrap(), 5);
                assert_eq!(socket.tcp_user_timeout().unwrap(), Some(Duration::from_secs(8)));
            }
        }
        drop((guest, seat));
    }

    #[test]
    fn a_rank_0_that_cannot_start_its_couriers_tells_all() {
        let (guests, hosts): (Vec<_>, Vec<_>) = (0..3).map(|_| pair()).unzip();
        let start = Instant::now();
        let error = seat_all("dp", hosts, Duration::from_secs(60), |meeting, rank, stream, deadline| {
            if rank == 2 {
                return Err(io::Error::other("no more threads"));
            }
            employ(meeting, rank, stream, deadline)
        })
        .unwrap_err();
        assert_eq!(error.to_string(), "no more threads");
        for mut guest in guests {
            guest.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            let frame = wire::receive(&mut guest).unwrap();
            let reason = "it cannot use its connection to rank 2: no more threads".to_owned();
            assert!(
                matches!(&frame, Frame::Fail(f) if *f == Failure::GaveUp { rank: 0, reason }),
                "{frame:?}"
            );
        }
        assert!(start.elapsed() < Duration::from_secs(4), "nobody is waited for in vain");
    }
}
