//! One rank's way to the hub of its communicator: in this process, or over a connection to another.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, Shutdown, TcpStream};
use std::sync::Arc;
use std::thread;

use parking_lot::Mutex;

use super::hub::{self, Hello, Hub, Told};
use super::shape::{Number, Shape};
use crate::code::Code;

#[derive(Clone, Debug)]
pub(crate) enum Link {
    Here(Arc<Hub>, usize),
    There(Arc<Remote>),
}

#[derive(Debug)]
pub(crate) struct Remote {
    out: Mutex<TcpStream>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// `None` while ranks are missing.
    outcome: Option<Result<(), Code>>,
    results: BTreeMap<Number, Vec<u8>>,
    /// Rounds that this rank has come to and that are not complete.
    waiting: usize,
    /// The process of the hub is gone.
    is_lost: bool,
}

impl State {
    /// NCCL finds a remote process gone when it needs it.
    fn outcome(&self) -> Option<Result<(), Code>> {
        match self.outcome {
            Some(Ok(())) | None if self.is_lost && (self.waiting > 0 || self.outcome.is_none()) => {
                Some(Err(Code::NCCL_REMOTE_ERROR))
            }
            outcome => outcome,
        }
    }
}

impl Link {
    pub(crate) fn here(hub: Arc<Hub>, hello: &Hello) -> Self {
        hub.join(hello, None);
        Self::Here(hub, hello.rank)
    }

    pub(crate) fn there(port: u16, nonce: u64, hello: &Hello) -> io::Result<Self> {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        stream.set_nodelay(true)?;
        hub::send_hello(&mut stream, nonce, hello)?;
        let mut incoming = stream.try_clone()?;
        let remote = Arc::new(Remote { out: Mutex::new(stream), state: Mutex::default() });
        let inbox = remote.clone();
        thread::Builder::new().name("fp8-cuda-sim link".into()).spawn(move || inbox.fill(&mut incoming))?;
        Ok(Self::There(remote))
    }

    pub(crate) fn state(&self) -> Option<Result<(), Code>> {
        match self {
            Self::Here(hub, _) => hub.state(),
            Self::There(remote) => remote.state.lock().outcome(),
        }
    }

    pub(crate) fn arrive(&self, number: Number, shape: Shape, bytes: Vec<u8>) {
        match self {
            Self::Here(hub, rank) => hub.arrive(*rank, number, shape, bytes),
            Self::There(remote) => {
                remote.state.lock().waiting += 1;
                if hub::send_part(&mut remote.out.lock(), number, shape, &bytes).is_err() {
                    remote.state.lock().is_lost = true;
                }
            }
        }
    }

    pub(crate) fn has_result(&self, number: Number) -> bool {
        match self {
            Self::Here(hub, rank) => hub.has_result(*rank, number),
            Self::There(remote) => remote.state.lock().results.contains_key(&number),
        }
    }

    pub(crate) fn take(&self, number: Number) -> Option<Vec<u8>> {
        match self {
            Self::Here(hub, rank) => hub.take(*rank, number),
            Self::There(remote) => remote.state.lock().results.remove(&number),
        }
    }

    pub(crate) fn leave(&self, abort: bool) {
        match self {
            Self::Here(hub, rank) => hub.leave(*rank, abort),
            Self::There(remote) => {
                let mut out = remote.out.lock();
                if !abort {
                    let _ = hub::send_leave(&mut out);
                }
                let _ = out.shutdown(Shutdown::Both);
            }
        }
    }
}

impl Remote {
    fn fill(&self, stream: &mut TcpStream) {
        loop {
            match hub::receive(stream) {
                Ok(Told::State(0)) => drop(self.state.lock().outcome.get_or_insert(Ok(()))),
                Ok(Told::State(code)) => self.state.lock().outcome = Some(Err(Code(code))),
                Ok(Told::Result(number, bytes)) => {
                    let mut state = self.state.lock();
                    state.waiting = state.waiting.saturating_sub(1);
                    state.results.insert(number, bytes);
                }
                Err(_) => return self.state.lock().is_lost = true,
            }
        }
    }
}
