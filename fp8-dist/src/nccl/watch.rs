//! Watches queued collectives: without it, a collective would wait forever for a rank that does not arrive.
//!
//! A thread per group checks whether the ranks' connections or NCCL report a failure, and whether queued collectives are done within
//! the deadline. If the group has failed, it aborts the communicator. This lets the device's stream continue and wakes up threads
//! that wait for it. The results of aborted
//! collectives are undefined, so the device refuses all later calls with the reason.

use super::communicator::Communicator;
use crate::Failure;
use crate::exchange::Exchange;
use fp8_kernels::interop::SideQueue;
use fp8_kernels::{Device, Replayed, interop};
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The time that a rank waits, after an error from NCCL, for the other ranks to report the cause.
pub(super) const GRACE: Duration = Duration::from_millis(100);
/// The time limit for a collective after a rank has left. If that rank took part in it, all ranks had arrived.
const LEAVE: Duration = Duration::from_secs(1);
/// The polling interval, which is how long a failure may go unnoticed.
const PACE: Duration = Duration::from_millis(2);
/// The interval at which rank 0 is told which calls were made.
const BEAT: Duration = Duration::from_secs(1);
/// The most calls in a message.
const MOST: usize = 4096;

/// The numbers of calls in a recorded step.
type SharedCalls = Arc<Mutex<Vec<u64>>>;

#[derive(Debug)]
pub(super) struct Watched {
    pub(super) control: Box<dyn Exchange>,
    pub(super) communicator: Communicator,
    pub(super) device: Device,
    pub(super) deadline: Duration,
    queued: Mutex<VecDeque<Queued>>,
    /// Whether a graph has recorded collectives. Then the device is poisoned when the communicator is aborted.
    is_captured: AtomicBool,
    /// The newest capture whose launches are watched, and the calls in it.
    watched_capture: Mutex<Option<(u64, SharedCalls)>>,
    /// The calls that rank 0 has not been told, of those that the hosts have compared before.
    made: Mutex<Vec<u64>>,
    is_closing: AtomicBool,
}

/// Shared by the group's handle and the graphs that captured its collectives, which may outlive the handle. The last owner destroys
/// the communicator, because NCCL requires the graphs to be destroyed first.
#[derive(Debug)]
pub(super) struct Holder {
    pub(super) watched: Arc<Watched>,
    pub(super) watch: Option<JoinHandle<()>>,
}

impl Holder {
    /// Starts the deadline of a collective that has been queued, on `side` or the device's stream. The deadline of a recorded one starts
    /// with each launch of its graph. `partners` are the other ranks that take part, if not all do.
    pub(super) fn queued(
        self: &Arc<Self>,
        call: &str,
        number: Option<u64>,
        side: Option<&SideQueue>,
        partners: Option<Vec<usize>>,
    ) -> fp8_kernels::Result<()> {
        let watched = &self.watched;
        let watch = || {
            if !interop::is_capturing(&watched.device)? {
                watched.made.lock().extend(number);
                return watched.mark(call.to_owned(), side, partners);
            }
            watched.is_captured.store(true, Ordering::Relaxed);
            let Some(capture) = watched.device.capture_number() else { return Ok(()) };
            let mut watched_capture = watched.watched_capture.lock();
            let calls = match &*watched_capture {
                Some((known, calls)) if *known == capture => calls.clone(),
                _ => {
                    let (calls, call) = (Arc::default(), format!("a recorded step with {call}"));
                    *watched_capture = Some((capture, Arc::clone(&calls)));
                    let recorded = Recorded { holder: self.clone(), call, calls: calls.clone() };
                    watched.device.on_replay(Arc::new(recorded));
                    calls
                }
            };
            calls.lock().extend(number);
            Ok(())
        };
        watch().inspect_err(|error: &fp8_kernels::Error| watched.lose(call, error))
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.watched.drain();
        let is_given_up = || self.watched.control.failure().is_some();
        if !is_given_up() {
            let _ = interop::stream(&self.watched.device);
            self.watched.communicator.close(&is_given_up);
            self.watched.close();
        }
        // It ends because it was told to, or after it has aborted the communicator.
        if let Some(watch) = self.watch.take() {
            let _ = watch.join();
        }
    }
}

/// The launches of a graph with collectives.
#[derive(Debug)]
struct Recorded {
    holder: Arc<Holder>,
    /// The first collective.
    call: String,
    /// The calls whose order is compared.
    calls: SharedCalls,
}

impl Replayed for Recorded {
    fn advance(&self) -> fp8_kernels::Result<()> {
        let watched = &self.holder.watched;
        if let Some(failure) = watched.control.failure() {
            // The communicator has been aborted or will be.
            watched.distrust(&failure);
            return interop::stream(&watched.device).map(drop);
        }
        Ok(())
    }

    fn launched(&self) {
        let watched = &self.holder.watched;
        watched.made.lock().extend_from_slice(&self.calls.lock());
        if let Err(error) = watched.mark(self.call.clone(), None, None) {
            watched.lose(&self.call, &error);
            watched.control.poison(&error.to_string());
        }
    }
}

/// A collective that may not be done.
#[derive(Debug)]
struct Queued {
    mark: interop::Mark,
    since: Instant,
    call: String,
    /// The other ranks that take part; all, if `None`.
    partners: Option<Vec<usize>>,
}

impl Queued {
    /// Returns the ranks that take part and have left, by when that was heard, longer ago than what they did may take.
    fn abandoned(&self, heard: &HashMap<usize, Instant>) -> Vec<usize> {
        let needs = |rank: &usize| self.partners.as_ref().is_none_or(|partners| partners.contains(rank));
        let is_over = |&heard: &Instant| heard.max(self.since).elapsed() >= LEAVE;
        let mut ranks: Vec<usize> = heard
            .iter()
            .filter(|(rank, heard)| needs(rank) && is_over(heard))
            .map(|(rank, _)| *rank)
            .collect();
        ranks.sort_unstable();
        ranks
    }
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
            watched_capture: Mutex::default(),
            made: Mutex::default(),
            is_closing: AtomicBool::new(false),
        })
    }

    /// Starts the deadline of everything that is queued on `side`, or on the device's stream.
    fn mark(
        &self,
        call: String,
        side: Option<&SideQueue>,
        partners: Option<Vec<usize>>,
    ) -> fp8_kernels::Result<()> {
        let mark = match side {
            Some(side) => interop::Mark::of(side)?,
            None => interop::Mark::new(&self.device)?,
        };
        self.queued.lock().push_back(Queued { mark, since: Instant::now(), call, partners });
        Ok(())
    }

    /// Poisons the device: what is queued is not watched, so an abort of it would go unnoticed.
    fn lose(&self, call: &str, error: &fp8_kernels::Error) {
        let id = self.control.id();
        let reason = format!("group `{id}` has queued {call} and could not mark its end: {error}");
        let _ = interop::poison(&self.device, reason);
    }

    /// Poisons the device, because the results of aborted work are undefined.
    pub(super) fn distrust(&self, failure: &Failure) {
        let reason = format!("group `{}` failed while its work was queued: {failure}", self.control.id());
        // Its device is a GPU.
        let _ = interop::poison(&self.device, reason);
    }

    /// Waits until nothing is queued, or the group has failed.
    pub(super) fn drain(&self) {
        while !self.queued.lock().is_empty() && self.control.failure().is_none() {
            thread::sleep(PACE / 4);
        }
    }

    /// Tells the thread to end.
    pub(super) fn close(&self) {
        self.is_closing.store(true, Ordering::Relaxed);
    }

    /// The main loop of the thread.
    pub(super) fn watch(&self) {
        // Makes the device's context current on this thread. A failed device is detected by its marks.
        let _ = interop::stream(&self.device);
        let (mut heard, mut told) = (HashMap::new(), Instant::now());
        while !self.is_closing.load(Ordering::Relaxed) {
            self.look(&mut heard);
            if told.elapsed() >= BEAT {
                told = Instant::now();
                self.tell();
            }
            if let Some(failure) = self.control.failure() {
                return self.end(&failure);
            }
            thread::sleep(PACE);
        }
    }

    /// Tells rank 0 which calls were made, if there are any.
    fn tell(&self) {
        let made = std::mem::take(&mut *self.made.lock());
        for (index, some) in made.chunks(MOST).enumerate() {
            if !self.control.tell_calls(some) {
                // Before those that were made meanwhile.
                self.made.lock().splice(..0, made[index * MOST..].iter().copied());
                return;
            }
        }
    }

    /// Ends what is queued, after the group has failed.
    pub(super) fn end(&self, failure: &Failure) {
        let mut queued = self.queued.lock();
        if !queued.is_empty() || self.is_captured.load(Ordering::Relaxed) {
            // Before the abort lets the stream continue.
            self.distrust(failure);
        }
        queued.clear();
        drop(queued);
        self.communicator.abort();
    }

    /// Fails the group because of an error of NCCL or the device on this rank. Returns the group's first failure, since the cause may be
    /// on another rank, whose message is on its way.
    pub(super) fn fail(&self, reason: &str) -> Failure {
        self.listen();
        let ranks = self.control.left();
        let own = match ranks.is_empty() {
            true => Failure::GaveUp { rank: self.control.rank(), reason: reason.to_owned() },
            false => Failure::Left { ranks },
        };
        self.control.fail(own.clone());
        self.control.failure().unwrap_or(own)
    }

    /// Gives the other ranks time to report the cause.
    fn listen(&self) {
        let until = Instant::now() + GRACE.min(self.deadline);
        while self.control.failure().is_none() && self.control.left().is_empty() && Instant::now() < until {
            thread::sleep(PACE);
        }
    }

    /// Fails the group if something is wrong. `heard` is when this rank heard of each other one that it has left.
    fn look(&self, heard: &mut HashMap<usize, Instant>) {
        let left = self.control.left();
        for rank in &left {
            heard.entry(*rank).or_insert_with(Instant::now);
        }
        // If a rank has left, its part of the queued work is done, but NCCL may still report that its process is gone.
        if left.is_empty()
            && let Some(error) = self.communicator.asynchronous_error()
        {
            self.listen();
            if self.control.failure().is_none() && self.control.left().is_empty() {
                self.control.poison(&format!("NCCL: {error}"));
            }
            return;
        }
        let mut queued = self.queued.lock();
        while let Some(first) = queued.front() {
            match first.mark.is_passed() {
                Ok(true) => drop(queued.pop_front()),
                Ok(false) if !first.abandoned(heard).is_empty() => {
                    let ranks = first.abandoned(heard);
                    drop(queued);
                    return self.control.fail(Failure::Left { ranks });
                }
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
                    return drop(self.fail(&error.to_string()));
                }
            }
        }
    }
}
