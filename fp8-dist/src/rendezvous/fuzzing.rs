//! Entry points of the fuzz target of joining.

use super::call::{Answer, Call};
use super::hello::Hello;
use super::visit::{Visit, Visitor};
use crate::Environment;
use crate::timed::Until;
use socket2::SockRef;
use std::io::Write;
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::time::Duration;

fn own() -> Hello {
    Hello::new("dp", &Environment { world_size: 3, ..Environment::on_this_machine(29_500) }, [7; 16])
}

/// Reads a hello, and compares it with one's own.
pub fn hello(bytes: &[u8]) {
    let Some(hello) = Hello::parse(bytes) else { return };
    assert_eq!(hello.bytes(), bytes, "a hello changes when it is written");
    let own = own();
    assert_eq!(own.difference(&hello).is_none(), hello.difference(&own).is_none());
    assert!(!own.is_twin(&hello) || hello.rank == 0);
}

/// Speaks to a rank 0 as a stranger, in two pieces. It does not know the proof, so it stays a stranger.
pub fn visit(bytes: &[u8]) {
    let Some((near, far)) = pair() else { return };
    let Ok(mut visit) = Visit::new(near) else { return };
    let mut far = Some(far);
    let mut pieces = halves(bytes).into_iter();
    loop {
        speak(&mut far, pieces.next());
        match visit.advance("secret") {
            Ok(Visitor::Known(..)) => panic!("a stranger is believed"),
            Ok(_) => {}
            Err(_) => return,
        }
    }
}

/// Answers a rank that looks for its rank 0, in two pieces.
pub fn call(bytes: &[u8]) {
    let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)) else { return };
    let Ok(address) = listener.local_addr() else { return };
    let Ok(mut call) = Call::new(address, Until::after(Duration::from_secs(5))) else { return };
    let Ok((far, _)) = listener.accept() else { return };
    let mut far = Some(far);
    let mut pieces = halves(bytes).into_iter();
    loop {
        speak(&mut far, pieces.next());
        match call.advance(&own(), "secret") {
            Ok(Answer::Rank0(..)) => panic!("a stranger is believed"),
            Ok(Answer::None) => {}
            Ok(_) | Err(_) => return,
        }
    }
}

/// Sends a piece, or closes the connection behind the last.
fn speak(far: &mut Option<TcpStream>, piece: Option<&[u8]>) {
    let Some(stream) = far else { return };
    match piece {
        // The other side may have closed it.
        Some(piece) => drop(stream.write_all(piece)),
        None => {
            let _ = stream.shutdown(Shutdown::Write);
            *far = None;
        }
    }
}

fn halves(bytes: &[u8]) -> [&[u8]; 2] {
    let (first, second) = bytes.split_at(bytes.len() / 2);
    [first, second]
}

/// The two ends of a connection, which leaves nothing behind when it closes.
fn pair() -> Option<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).ok()?;
    let far = TcpStream::connect(listener.local_addr().ok()?).ok()?;
    SockRef::from(&far).set_linger(Some(Duration::ZERO)).ok()?;
    Some((listener.accept().ok()?.0, far))
}
