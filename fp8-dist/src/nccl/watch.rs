//! What NCCL leaves to its caller: a collective whose other ranks do not come never ends by itself.
//!
//! A thread per group looks at three things: whether the ranks' connections say that the group has failed, whether NCCL
//! says so, and whether the collectives that were queued are done within the deadline. If the group has failed it aborts
//! the communicator, so that the device's stream goes on and whoever waits for it wakes up; and since what aborted
//! collectives should have written is anything, the device refuses all later calls with the reason.

use super::communicator::Communicator;
use crate::member::Exchange;
use fp8_kernels::{Device, interop};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How often it looks: what a failure may take to be noticed.
const PACE: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub(super) struct Watched {
    pub(super) control: Box<dyn Exchange>,
    pub(super) communicator: Communicator,
    pub(super) device: Device,
    pub(super) deadline: Duration,
    queued: Mutex<VecDeque<Queued>>,
    /// A captured graph holds collectives, which may be under way whenever it is replayed.
    is_captured: AtomicBool,
    is_closing: AtomicBool,
}

/// A collective that has not been found done.
#[derive(Debug)]
struct Queued {
    mark: interop::Mark,
    since: Instant,
    call: String,
}

impl Watched {
    pub(super) fn new(
        control: Box<dyn Exchange>,
        communicator: Communicator,
        device: &Device,
        deadline: Duration,
    ) -> Arc<Self> {
        Arc::new(Self {
            control,
            communicator,
            device: device.clone(),
            deadline,
            queued: Mutex::default(),
            is_captured: AtomicBool::new(false),
            is_closing: AtomicBool::new(false),
        })
    }

    /// A collective has been queued: from now on its deadline runs. In a captured graph there is none, since nobody but the
    /// device knows when it begins.
    pub(super) fn queued(&self, call: String) -> fp8_kernels::Result<()> {
        if interop::is_capturing(&self.device)? {
            self.is_captured.store(true, Ordering::Relaxed);
            return Ok(());
        }
        let mark = interop::Mark::new(&self.device)?;
        self.queued.lock().push_back(Queued { mark, since: Instant::now(), call });
        Ok(())
    }

    /// Waits until nothing is queued, or the group has failed.
    pub(super) fn drain(&self) {
        while !self.queued.lock().is_empty() && self.control.failure().is_none() {
            thread::sleep(PACE / 4);
        }
    }

    /// Lets the thread end.
    pub(super) fn close(&self) {
        self.is_closing.store(true, Ordering::Relaxed);
    }

    /// The thread's life.
    pub(super) fn watch(&self) {
        // Makes the device's context this thread's; a device that has failed is noticed by its marks.
        let _ = interop::stream(&self.device);
        while !self.is_closing.load(Ordering::Relaxed) {
            self.look();
            if let Some(failure) = self.control.failure() {
                let mut queued = self.queued.lock();
                if !queued.is_empty() || self.is_captured.load(Ordering::Relaxed) {
                    let reason = format!("group `{}` failed while its work was queued: {failure}", self.control.id());
                    // Before the stream goes on. Its device is a GPU.
                    let _ = interop::poison(&self.device, reason);
                }
                self.communicator.abort();
                queued.clear();
                return;
            }
            thread::sleep(PACE);
        }
    }

    /// Fails the group if something is wrong.
    fn look(&self) {
        if let Some(error) = self.communicator.asynchronous_error() {
            return self.control.poison(&format!("NCCL: {error}"));
        }
        let mut queued = self.queued.lock();
        while let Some(first) = queued.front() {
            match first.mark.is_passed() {
                Ok(true) => drop(queued.pop_front()),
                Ok(false) if first.since.elapsed() < self.deadline => return,
                Ok(false) => {
                    let late = format!(
                        "{} was not done {:?} after it was queued: another rank has not queued it, or this device is busy; \
                         give the group a longer deadline",
                        first.call, self.deadline
                    );
                    drop(queued);
                    return self.control.poison(&late);
                }
                Err(error) => {
                    drop(queued);
                    return self.control.poison(&error.to_string());
                }
            }
        }
    }
}
