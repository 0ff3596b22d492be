//! One rank's communicator. It is non-blocking: operations are polled until they are done, with a deadline.

use super::api::{Api, Comm, IN_PROGRESS, SUCCESS, Status, UniqueId};
use parking_lot::Mutex;
use std::thread;
use std::time::{Duration, Instant};

/// The interval at which operations in progress are polled.
const PACE: Duration = Duration::from_micros(100);

/// An NCCL function and what it returned.
pub(super) type Answer = (&'static str, Status);

/// Why a call failed.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The function and NCCL's description of the error.
    Nccl(&'static str, String),
    /// The deadline passed.
    Late(&'static str),
    /// The communicator was aborted.
    Aborted,
}

#[derive(Debug)]
pub(super) struct Communicator {
    api: Api,
    /// `None` once it has been aborted or destroyed.
    handle: Mutex<Option<Handle>>,
    deadline: Duration,
}

#[derive(Debug, Clone, Copy)]
struct Handle(Comm);

// SAFETY: NCCL's handles belong to the process, not to a thread; this one is used behind a lock.
unsafe impl Send for Handle {}

impl Communicator {
    /// Starts creating the communicator; [`settle`](Self::settle) waits until all ranks have joined.
    pub(super) fn new(
        api: Api,
        id: UniqueId,
        rank: usize,
        ranks: usize,
        deadline: Duration,
    ) -> Result<Self, Trouble> {
        const INIT: &str = "ncclCommInitRankConfig";
        let handle = api.init(id, rank, ranks).map_err(|status| Trouble::Nccl(INIT, api.describe(status)))?;
        Ok(Self { api, handle: Mutex::new(Some(Handle(handle))), deadline })
    }

    /// Makes one call, or several as a group, and waits until it is done; a collective is done when it is queued on its stream.
    pub(super) fn call(
        &self,
        is_given_up: &dyn Fn() -> bool,
        call: impl FnOnce(&Api, Comm) -> Answer,
    ) -> Result<(), Trouble> {
        let (function, status) = match *self.handle.lock() {
            Some(Handle(comm)) => call(&self.api, comm),
            None => return Err(Trouble::Aborted),
        };
        match status {
            SUCCESS => Ok(()),
            IN_PROGRESS => self.settle(function, is_given_up),
            status => Err(Trouble::Nccl(function, self.api.describe(status))),
        }
    }

    /// Waits until nothing is in progress.
    pub(super) fn settle(
        &self,
        function: &'static str,
        is_given_up: &dyn Fn() -> bool,
    ) -> Result<(), Trouble> {
        let started = Instant::now();
        loop {
            match self.state() {
                Some(SUCCESS) => return Ok(()),
                Some(IN_PROGRESS) if is_given_up() => return Err(Trouble::Aborted),
                Some(IN_PROGRESS) if started.elapsed() >= self.deadline => {
                    return Err(Trouble::Late(function));
                }
                Some(IN_PROGRESS) => thread::sleep(PACE),
                Some(status) => return Err(Trouble::Nccl(function, self.api.describe(status))),
                None => return Err(Trouble::Aborted),
            }
        }
    }

    /// Calls `ncclCommGetAsyncError`: success, in progress, or an asynchronous error. `None` once the communicator is destroyed.
    fn state(&self) -> Option<Status> {
        let handle = self.handle.lock();
        let Handle(comm) = (*handle)?;
        let mut state = SUCCESS;
        // SAFETY: the communicator is alive as long as the lock is held; the state lives through the call.
        let status = unsafe { (self.api.async_error)(comm, &mut state) };
        Some(if status == SUCCESS { state } else { status })
    }

    /// Returns the description of an asynchronous error.
    pub(super) fn asynchronous_error(&self) -> Option<String> {
        self.state()
            .filter(|&state| state != SUCCESS && state != IN_PROGRESS)
            .map(|state| self.api.describe(state))
    }

    /// Aborts the communicator and everything that is queued.
    pub(super) fn abort(&self) {
        // Not under the lock, because it may wait until all graphs are dropped.
        let taken = self.handle.lock().take();
        if let Some(Handle(comm)) = taken {
            // SAFETY: the communicator is alive, and its handle was taken away. A failure leaves nothing to do.
            let _ = unsafe { (self.api.abort)(comm) };
        }
    }

    /// Destroys the communicator when everything that was queued is done, or aborts it.
    pub(super) fn close(&self, is_given_up: &dyn Fn() -> bool) {
        let finalized = self.call(is_given_up, |api, comm| {
            // SAFETY: `call` holds the lock, so the communicator is alive.
            ("ncclCommFinalize", unsafe { (api.finalize)(comm) })
        });
        if finalized.is_err() {
            return self.abort();
        }
        let taken = self.handle.lock().take();
        if let Some(Handle(comm)) = taken {
            // SAFETY: as in `abort`; all operations are done.
            let _ = unsafe { (self.api.destroy)(comm) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::api::unfinished::API;
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn an_operation_that_stays_in_progress_ends_with_the_deadline_or_when_it_is_given_up() {
        let (send, receive) = mpsc::channel();
        thread::spawn(move || {
            let deadline = Duration::from_millis(50);
            let communicator = Communicator::new(API, UniqueId([0; 128]), 0, 2, deadline).unwrap();
            let late = communicator.settle("ncclAllReduce", &|| false);
            let given_up = communicator.settle("ncclAllReduce", &|| true);
            let _ = send.send((late, given_up));
        });
        let (late, given_up) = receive.recv_timeout(Duration::from_secs(30)).expect("it waits for ever");
        assert!(matches!(late, Err(Trouble::Late("ncclAllReduce"))), "{late:?}");
        assert!(matches!(given_up, Err(Trouble::Aborted)), "{given_up:?}");
    }
}
