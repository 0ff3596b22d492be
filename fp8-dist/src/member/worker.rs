//! The thread of a rank that does pending work, in the order in which it was started.

use super::core::Core;
use crate::pending::PANICKED;
use parking_lot::{Condvar, Mutex};
use std::mem;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};

type Work = Box<dyn FnOnce() + Send>;

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

/// Counts work as done, also if it panics, which ends the group, or if it is never begun because other work has panicked.
struct Outstanding {
    queue: Arc<Queue>,
    core: Arc<Core>,
}

impl Outstanding {
    fn new(queue: &Arc<Queue>, core: &Arc<Core>) -> Self {
        *queue.outstanding.lock() += 1;
        Self { queue: queue.clone(), core: core.clone() }
    }
}

impl Drop for Outstanding {
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
            none => none.insert(spawn(core)?),
        };
        let outstanding = Outstanding::new(&self.queue, core);
        // If the thread has ended, the work is dropped, and what it owes with it.
        let _ = running.work.send(Box::new(move || {
            let outstanding = outstanding;
            work(&outstanding.core);
        }));
        Ok(())
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

fn spawn(core: &Core) -> std::io::Result<Running> {
    let (work, orders) = channel::<Work>();
    let name = format!("fp8-dist work of {}", core.exchange.rank());
    let thread =
        thread::Builder::new().name(name).spawn(move || orders.into_iter().for_each(|work| work()))?;
    Ok(Running { work, thread })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::end_of_one;

    #[test]
    fn work_behind_one_that_panics_is_no_wait() {
        let (worker, core) = (Worker::default(), Arc::new(Core::new(end_of_one())));
        worker.start(&core, |_| thread::sleep(std::time::Duration::from_millis(50))).unwrap();
        worker.start(&core, |_| panic!("on purpose")).unwrap();
        (0..3).for_each(|_| worker.start(&core, |_| {}).unwrap());
        worker.settle();
        assert!(core.exchange.failure().is_some(), "the others are told");
        worker.start(&core, |_| {}).unwrap();
        worker.settle();
    }
}
