//! Rank 0's end of the connections: two threads for each other rank.

use super::connection::{GOODBYE, closed, prepare, spawn};
use crate::Failure;
use crate::meeting::{Meeting, News, Seat};
use crate::timed::{Timed, Until, is_late};
use crate::wire::{self, Frame};
use std::io::{self, BufReader, BufWriter};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::Duration;

/// Creates rank 0's seat and the threads that serve the other ranks.
pub(super) fn host(id: &str, guests: Vec<TcpStream>, deadline: Duration) -> io::Result<Seat> {
    seat_all(id, guests, deadline, employ)
}

/// Like [`host`], with `employ` to start the threads of a rank. If that fails, all ranks are told: those that have threads by
/// them, the others directly.
pub(super) fn seat_all(
    id: &str,
    guests: Vec<TcpStream>,
    deadline: Duration,
    employ: impl Fn(&Arc<Meeting>, usize, &TcpStream, Duration) -> io::Result<()>,
) -> io::Result<Seat> {
    let world_size = guests.len() + 1;
    let meeting = Meeting::new(id, world_size, deadline, |rank| rank > 0);
    for (rank, stream) in (1..).zip(&guests) {
        if let Err(error) = employ(&meeting, rank, stream, deadline) {
            let reason = format!("it cannot use its connection to rank {rank}: {error}");
            let failure = Failure::GaveUp { rank: 0, reason };
            meeting.fail(failure.clone());
            let until = Until::after(GOODBYE.min(deadline));
            for (rank, stream) in (1..).zip(guests).skip(rank - 1) {
                meeting.unlink(rank);
                let mut stream = Timed::new(stream, until);
                let _ = wire::send(&mut stream, &Frame::Fail(failure.clone()));
                let _ = stream.stream.shutdown(Shutdown::Write);
            }
            meeting.flush(deadline.min(Duration::from_secs(5)));
            return Err(error);
        }
    }
    Ok(Seat::new(id, 0, world_size, meeting))
}

pub(super) fn employ(
    meeting: &Arc<Meeting>,
    rank: usize,
    stream: &TcpStream,
    deadline: Duration,
) -> io::Result<()> {
    prepare(stream)?;
    let (incoming, outgoing) = (stream.try_clone()?, stream.try_clone()?);
    let (table, news) = (meeting.clone(), meeting.clone());
    spawn("fp8-dist from", rank, move || bring_in(&table, rank, incoming))?;
    spawn("fp8-dist to", rank, move || carry_out(&news, rank, outgoing, deadline))
}

/// Passes the messages of a rank to the meeting until the rank leaves.
fn bring_in(meeting: &Meeting, rank: usize, stream: TcpStream) {
    let mut stream = BufReader::new(stream);
    loop {
        let reason = match wire::receive(&mut stream) {
            Ok(Frame::Bring(message)) => match meeting.bring(rank, message) {
                // If the group has failed, the answer to this message is the failure.
                Ok(true) | Err(_) => continue,
                Ok(false) => "it sent two messages for one exchange".to_owned(),
            },
            Ok(Frame::Fail(failure)) => {
                meeting.fail(failure);
                continue;
            }
            Ok(Frame::Mail { peer, message }) => match message.is_mail() {
                true if matches!(meeting.post(rank, peer, message), Ok(true) | Err(_)) => continue,
                true => "it sent a message to a rank that is not there".to_owned(),
                false => "it sent a message that is none of a tensor".to_owned(),
            },
            Ok(Frame::Calls(numbers)) => {
                meeting.add_calls(rank, &numbers);
                continue;
            }
            Ok(Frame::Left(_)) => {
                meeting.leave(rank);
                break;
            }
            Ok(Frame::Complete(_) | Frame::Welcome) => "it sent what only rank 0 sends".to_owned(),
            Err(error) => closed(&error),
        };
        meeting.fail(Failure::Lost { rank, reason });
        break;
    }
    // Stop reading, so that what the rank may still send fills no buffer.
    let _ = stream.get_ref().shutdown(Shutdown::Read);
    meeting.unlink(rank);
}

/// Sends a rank its news until there is nothing more to send. Each piece of news has the deadline.
fn carry_out(meeting: &Meeting, rank: usize, stream: TcpStream, deadline: Duration) {
    let mut out = BufWriter::with_capacity(1 << 16, Timed::new(stream, Until::after(deadline)));
    loop {
        let news = meeting.news(rank);
        out.get_mut().until = Until::after(deadline);
        let sent = match news {
            News::Complete(all) => wire::send_all(&mut out, &all),
            News::Mail(peer, message) => wire::send(&mut out, &Frame::Mail { peer, message }),
            News::Failed(failure) => wire::send(&mut out, &Frame::Fail(failure)),
            News::Left(ranks) => wire::send(&mut out, &Frame::Left(ranks)),
            News::End => break,
        };
        meeting.delivered(rank);
        if let Err(error) = sent {
            if is_late(&error) {
                meeting.fail(Failure::Deadline { missing: vec![rank], waited: deadline });
                // The rank may never read what it was sent, and so never see the failure.
                let _ = out.get_ref().stream.shutdown(Shutdown::Both);
            }
            // The connection is closed. Whether the rank has left or is lost follows from what it sent last, which the other
            // thread reads.
            let _ = out.get_ref().stream.shutdown(Shutdown::Write);
            meeting.unlink(rank);
            break;
        }
    }
}
