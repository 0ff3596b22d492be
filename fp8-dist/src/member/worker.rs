//! The thread of a rank that does pending work, in the order in which it was started.

use super::core::Core;
use crate::pending::PANICKED;
use parking_lot::{Condvar, Mutex};
use std::mem;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};

type Work = Box<dyn FnOnce(&Core) + Send>;

/// The thread, which starts with the first work.
#[derive(Debug, Default)]
pub(super) struct Worker {
    thread: Mutex<Option<Running>>,
    queue: Arc<Queue>,
}

#[derive(Debug)]
struct Running {
    work: Sender<Work>,
    thread: JoinHandle<()>,
}

/// The work that is not done.
#[derive(Debug, Default)]
struct Queue {
    outstanding: Mutex<usize>,
    done: Condvar,
}

/// Counts work as done, also if it panics, which ends the group.
struct Outstanding<'a> {
    queue: &'a Queue,
    core: &'a Core,
}

impl Drop for Outstanding<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.core.exchange.poison(PANICKED);
        }
        *self.queue.outstanding.lock() -= 1;
        self.queue.done.notify_all();
    }
}

impl Worker {
    /// Starts `work`, behind what was started before.
    pub(super) fn start(
        &self,
        core: &Arc<Core>,
        work: impl FnOnce(&Core) + Send + 'static,
    ) -> std::io::Result<()> {
        let mut running = self.thread.lock();
        let running = match &mut *running {
            Some(running) => running,
            none => none.insert(self.spawn(core)?),
        };
        *self.queue.outstanding.lock() += 1;
        if running.work.send(Box::new(work)).is_err() {
            drop(Outstanding { queue: &self.queue, core }); // the thread has ended, and drops the work
        }
        Ok(())
    }

    fn spawn(&self, core: &Arc<Core>) -> std::io::Result<Running> {
        let (work, orders) = channel::<Work>();
        let (core, queue) = (core.clone(), self.queue.clone());
        let name = format!("fp8-dist work of {}", core.exchange.rank());
        let thread = thread::Builder::new().name(name).spawn(move || {
            for work in orders {
                let _outstanding = Outstanding { queue: &queue, core: &core };
                work(&core);
            }
        })?;
        Ok(Running { work, thread })
    }

    /// Waits until everything that was started is done: no longer than the group's deadline for each.
    pub(super) fn settle(&self) {
        let mut outstanding = self.queue.outstanding.lock();
        while *outstanding > 0 {
            self.queue.done.wait(&mut outstanding);
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let Some(Running { work, thread }) = mem::take(&mut *self.thread.lock()) else { return };
        drop(work); // it ends when it has done the rest
        let _ = thread.join();
    }
}
