//! Streams: queues of work that runs at synchronisation points only, in an order the seed decides.
//!
//! A stream's own work runs in order. Between streams only three things order: an event wait, which holds until the
//! record it saw at its call has run; the legacy stream, whose work waits for all earlier work of blocking streams and
//! holds back all later work of theirs; and the caller's synchronisation. Whatever else a program relies on is a
//! missing wait, and some order found here shows it.
//!
//! Seed 0 runs the stream that is waited for and only what it depends on: everything else is as late as possible. Other
//! seeds draw a priority for each stream, and new ones at one pick in four.
//!
//! CUDA Driver API, "Stream synchronization behavior": the legacy stream "is an implicit stream which synchronizes with
//! all other streams in the same CUcontext except for non-blocking streams".

use std::collections::{BTreeMap, VecDeque};

use ptx_interp::splitmix64;

use crate::code::{Code, Outcome};
use crate::fault::Fault;
use crate::nccl::{Collective, Ran};
use crate::thread::thread;
use crate::work::Work;

/// The stream that a handle names. The order is by age: created streams are younger than the implicit ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum StreamId {
    Legacy,
    /// The per-thread default stream of one host thread.
    PerThread(u64),
    Created(u64),
}

/// The work that a caller waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Until {
    Stream(StreamId),
    /// One record of an event, by its ticket.
    Record(u64),
    Everything,
}

/// Depth at which a launch call blocks until the device has caught up.
const DEPTH: usize = 1024;

#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) blocking: bool,
    pub(crate) priority: i32,
    /// False once destroyed: gone when its work is done.
    open: bool,
    /// `(sequence number over all streams, task)`.
    tasks: VecDeque<(u64, Task)>,
    weight: u64,
}

#[derive(Debug)]
enum Task {
    Work(Work),
    Record { event: u64, ticket: u64 },
    Wait { ticket: u64 },
}

#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) timed: bool,
    /// The newest record, and the simulated time at which it ran.
    record: Option<u64>,
    time: Option<u64>,
}

/// All streams and events of a context.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    streams: BTreeMap<StreamId, Stream>,
    events: BTreeMap<u64, Event>,
    /// Records that have not run yet, and where they wait.
    records: BTreeMap<u64, StreamId>,
    sequence: u64,
    /// Simulated nanoseconds.
    clock: u64,
    random: u64,
}

impl Queue {
    pub(crate) fn open_stream(&mut self, handle: u64, blocking: bool, priority: i32) {
        self.streams.insert(StreamId::Created(handle), Stream::new(blocking, priority));
    }

    /// The stream a handle names: 0 and 1 are the legacy stream, 2 the calling thread's own.
    ///
    /// CUDA Driver API, CUDA_ERROR_INVALID_HANDLE: "a resource handle passed to the API call was not valid".
    pub(crate) fn find(&self, handle: u64) -> Outcome<StreamId> {
        match handle {
            0 | 1 => Ok(StreamId::Legacy),
            2 => Ok(StreamId::PerThread(thread())),
            _ => match self.streams.get(&StreamId::Created(handle)) {
                Some(stream) if stream.open => Ok(StreamId::Created(handle)),
                _ => Err(Code::INVALID_HANDLE),
            },
        }
    }

    pub(crate) fn stream(&self, id: StreamId) -> Option<&Stream> {
        self.streams.get(&id)
    }

    pub(crate) fn close_stream(&mut self, id: StreamId) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.open = false;
        }
        self.sweep();
    }

    pub(crate) fn open_streams(&self) -> usize {
        self.streams.iter().filter(|(id, stream)| matches!(id, StreamId::Created(_)) && stream.open).count()
    }

    pub(crate) fn open_event(&mut self, handle: u64, timed: bool) {
        self.events.insert(handle, Event { timed, record: None, time: None });
    }

    pub(crate) fn event(&self, handle: u64) -> Outcome<&Event> {
        self.events.get(&handle).ok_or(Code::INVALID_HANDLE)
    }

    pub(crate) fn close_event(&mut self, handle: u64) -> Outcome {
        self.events.remove(&handle).map(|_| ()).ok_or(Code::INVALID_HANDLE)
    }

    pub(crate) fn events(&self) -> usize {
        self.events.len()
    }

    pub(crate) fn submit(&mut self, id: StreamId, work: Work) {
        self.push(id, Task::Work(work));
    }

    pub(crate) fn record(&mut self, id: StreamId, event: u64) -> Outcome {
        let ticket = self.sequence;
        let known = self.events.get_mut(&event).ok_or(Code::INVALID_HANDLE)?;
        known.record = Some(ticket);
        known.time = None;
        self.records.insert(ticket, id);
        self.push(id, Task::Record { event, ticket });
        Ok(())
    }

    /// Holds back the stream's later work until the event's newest record has run; an event never recorded holds nothing.
    pub(crate) fn wait(&mut self, id: StreamId, event: u64) -> Outcome {
        if let Some(ticket) = self.event(event)?.record {
            self.push(id, Task::Wait { ticket });
        }
        Ok(())
    }

    /// The newest record of an event that has not run yet.
    pub(crate) fn outstanding(&self, event: u64) -> Outcome<Option<u64>> {
        Ok(self.event(event)?.record.filter(|ticket| self.records.contains_key(ticket)))
    }

    /// Simulated time of the event's newest record; `None` where it was never recorded or has not run.
    pub(crate) fn time(&self, event: u64) -> Outcome<Option<u64>> {
        Ok(self.event(event)?.time)
    }

    pub(crate) fn recorded(&self, event: u64) -> Outcome<bool> {
        Ok(self.event(event)?.record.is_some())
    }

    /// Whether a stream has more work than a launch queue holds.
    pub(crate) fn is_deep(&self, id: StreamId) -> bool {
        self.streams.get(&id).is_some_and(|stream| stream.tasks.len() > DEPTH)
    }

    pub(crate) fn is_done(&self, until: Until) -> bool {
        match until {
            Until::Stream(StreamId::Legacy) => {
                self.is_empty(StreamId::Legacy)
                    && self.streams.values().all(|stream| !stream.blocking || stream.tasks.is_empty())
            }
            Until::Stream(id) => self.is_empty(id),
            Until::Record(ticket) => !self.records.contains_key(&ticket),
            Until::Everything => self.streams.values().all(|stream| stream.tasks.is_empty()),
        }
    }

    /// Runs one task on the way to `until`; false if there was nothing left to run for it.
    pub(crate) fn step(
        &mut self,
        until: Until,
        seed: u64,
        perform: &mut dyn FnMut(Work) -> Result<Ran, Fault>,
    ) -> Result<bool, Fault> {
        if self.is_done(until) {
            return Ok(false);
        }
        let chosen = if seed == 0 { self.toward(until) } else { self.draw(seed) };
        let chosen = chosen.filter(|&id| !self.is_stalled(id));
        let Some((id, (sequence, task))) =
            chosen.and_then(|id| Some((id, self.streams.get_mut(&id)?.tasks.pop_front()?)))
        else {
            // Not whether one is stalled: its result may have come since.
            let stalled = self.streams.values().any(Stream::waits_for_ranks);
            return Err(if stalled { Fault::stalled() } else { Fault::stuck() });
        };
        match task {
            Task::Work(work) => match perform(work)? {
                Ran::For(nanoseconds) => self.clock += nanoseconds,
                Ran::Until(collective) => {
                    let again = Task::Work(Work::Collective(collective));
                    if let Some(stream) = self.streams.get_mut(&id) {
                        stream.tasks.push_front((sequence, again));
                    }
                }
            },
            Task::Wait { .. } => {}
            Task::Record { event, ticket } => {
                self.records.remove(&ticket);
                let clock = self.clock;
                if let Some(event) = self.events.get_mut(&event).filter(|event| event.record == Some(ticket))
                {
                    event.time = Some(clock);
                }
            }
        }
        if self.is_empty(id) {
            self.sweep();
        }
        Ok(true)
    }

    /// Whether a stream's next work is a collective that waits for other ranks.
    fn is_stalled(&self, id: StreamId) -> bool {
        let front = self.streams.get(&id).and_then(Stream::collective);
        front.is_some_and(|collective| !collective.is_ready())
    }

    /// Streams with a collective among their work.
    pub(crate) fn collective_streams(&self) -> Vec<StreamId> {
        let is_collective = |(_, task): &(u64, Task)| matches!(task, Task::Work(Work::Collective(_)));
        let with = |(_, stream): &(&StreamId, &Stream)| stream.tasks.iter().any(is_collective);
        self.streams.iter().filter(with).map(|(id, _)| *id).collect()
    }

    /// Forgets all work: after an error nothing of the context runs any more.
    pub(crate) fn abandon(&mut self) {
        for stream in self.streams.values_mut() {
            stream.tasks.clear();
        }
        self.records.clear();
        self.sweep();
    }

    fn push(&mut self, id: StreamId, task: Task) {
        let sequence = self.sequence;
        self.sequence += 1;
        let stream = self.streams.entry(id).or_insert_with(|| Stream::new(id != StreamId::Legacy, 0));
        stream.tasks.push_back((sequence, task));
    }

    fn is_empty(&self, id: StreamId) -> bool {
        self.streams.get(&id).is_none_or(|stream| stream.tasks.is_empty())
    }

    fn sweep(&mut self) {
        // Implicit streams come back with their next work.
        let created = |id: &StreamId| matches!(id, StreamId::Created(_));
        self.streams.retain(|id, stream| (created(id) && stream.open) || !stream.tasks.is_empty());
    }

    fn front(&self, id: StreamId) -> Option<u64> {
        Some(self.streams.get(&id)?.tasks.front()?.0)
    }

    /// A stream that has to move before `id` can; `None` where `id` can move now.
    fn blocker(&self, id: StreamId) -> Option<StreamId> {
        let stream = self.streams.get(&id)?;
        let (sequence, task) = stream.tasks.front()?;
        if let Task::Wait { ticket } = task
            && let Some(holder) = self.records.get(ticket)
        {
            return Some(*holder);
        }
        let earlier = |other: StreamId| self.front(other).is_some_and(|front| front < *sequence);
        if id == StreamId::Legacy {
            self.streams
                .iter()
                .find(|(other, stream)| stream.blocking && earlier(**other))
                .map(|(other, _)| *other)
        } else {
            (stream.blocking && earlier(StreamId::Legacy)).then_some(StreamId::Legacy)
        }
    }

    /// The stream to run for `until` when nothing else shall run. Every step goes to a stream whose front is older, so it ends.
    fn toward(&self, until: Until) -> Option<StreamId> {
        let busy = |(id, stream): (&StreamId, &Stream)| (!stream.tasks.is_empty()).then_some(*id);
        let mut at = match until {
            Until::Stream(StreamId::Legacy) if self.is_empty(StreamId::Legacy) => {
                self.streams.iter().rev().filter(|(_, stream)| stream.blocking).find_map(busy)?
            }
            Until::Stream(id) => id,
            Until::Record(ticket) => *self.records.get(&ticket)?,
            Until::Everything => self.streams.iter().rev().find_map(busy)?,
        };
        while let Some(other) = self.blocker(at) {
            at = other;
        }
        (!self.is_empty(at)).then_some(at)
    }

    fn draw(&mut self, seed: u64) -> Option<StreamId> {
        if self.random == 0 {
            self.random = seed;
        }
        if splitmix64(&mut self.random).is_multiple_of(4) {
            for stream in self.streams.values_mut() {
                stream.weight = splitmix64(&mut self.random);
            }
        }
        let ready =
            |id: &StreamId| !self.is_empty(*id) && self.blocker(*id).is_none() && !self.is_stalled(*id);
        self.streams
            .iter()
            .filter(|(id, _)| ready(id))
            .max_by_key(|(_, stream)| stream.weight)
            .map(|(id, _)| *id)
    }

    /// Starts the seed's sequence anew.
    pub(crate) fn reseed(&mut self) {
        self.random = 0;
        for stream in self.streams.values_mut() {
            stream.weight = 0;
        }
    }
}

impl Stream {
    /// The collective that is next.
    fn collective(&self) -> Option<&Collective> {
        match self.tasks.front() {
            Some((_, Task::Work(Work::Collective(collective)))) => Some(collective),
            _ => None,
        }
    }

    /// Whether the next work has begun and needs other ranks to go on.
    fn waits_for_ranks(&self) -> bool {
        self.collective().is_some_and(|collective| collective.has_arrived)
    }

    fn new(blocking: bool, priority: i32) -> Self {
        Self { blocking, priority, open: true, tasks: VecDeque::new(), weight: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: StreamId = StreamId::Created(10);
    const B: StreamId = StreamId::Created(11);

    fn free(address: u64) -> Work {
        Work::Free { address }
    }

    /// Runs to the condition and lists the work in the order it ran.
    fn run(queue: &mut Queue, until: Until, seed: u64) -> Vec<u64> {
        let mut order = Vec::new();
        let mut note = |work: Work| {
            if let Work::Free { address } = work {
                order.push(address);
            }
            Ok(Ran::For(1))
        };
        while queue.step(until, seed, &mut note).unwrap() {}
        order
    }

    fn two_streams(blocking: bool) -> Queue {
        let mut queue = Queue::default();
        queue.open_stream(10, blocking, 0);
        queue.open_stream(11, blocking, 0);
        queue
    }

    #[test]
    fn seed_zero_runs_only_what_is_waited_for() {
        let mut queue = two_streams(false);
        queue.submit(A, free(1));
        queue.submit(B, free(2));
        assert_eq!(run(&mut queue, Until::Stream(B), 0), [2]);
        assert_eq!(run(&mut queue, Until::Everything, 0), [1]);
    }

    #[test]
    fn a_wait_holds_until_the_record_it_saw() {
        for seed in 0..32 {
            let mut queue = two_streams(false);
            queue.open_event(5, true);
            queue.submit(A, free(1));
            queue.record(A, 5).unwrap();
            queue.wait(B, 5).unwrap();
            queue.submit(B, free(2));
            queue.submit(A, free(3));
            queue.record(A, 5).unwrap();
            let order = run(&mut queue, Until::Stream(B), seed);
            let place = |work| order.iter().position(|ran| *ran == work);
            assert!(place(1).unwrap() < place(2).unwrap(), "seed {seed}: {order:?}");
            run(&mut queue, Until::Everything, seed);
            assert_eq!(queue.outstanding(5), Ok(None));
        }
    }

    #[test]
    fn the_legacy_stream_orders_blocking_streams_only() {
        for seed in 0..32 {
            let mut queue = two_streams(true);
            queue.submit(A, free(1));
            queue.submit(StreamId::Legacy, free(2));
            queue.submit(B, free(3));
            assert_eq!(run(&mut queue, Until::Stream(B), seed), [1, 2, 3], "seed {seed}");
        }
        let mut queue = two_streams(false);
        queue.submit(A, free(1));
        queue.submit(StreamId::Legacy, free(2));
        queue.submit(B, free(3));
        assert_eq!(run(&mut queue, Until::Stream(B), 0), [3]);
        assert_eq!(run(&mut queue, Until::Stream(StreamId::Legacy), 0), [2]);
    }

    #[test]
    fn seeds_find_different_orders() {
        let orders: std::collections::BTreeSet<Vec<u64>> = (0..64)
            .map(|seed| {
                let mut queue = two_streams(false);
                for work in 0..3 {
                    queue.submit(A, free(work));
                    queue.submit(B, free(10 + work));
                }
                run(&mut queue, Until::Everything, seed)
            })
            .collect();
        assert!(orders.len() >= 6, "{orders:?}");
    }

    #[test]
    fn a_destroyed_stream_finishes_its_work() {
        let mut queue = two_streams(false);
        queue.submit(A, free(1));
        queue.close_stream(A);
        assert_eq!(queue.find(10), Err(Code::INVALID_HANDLE));
        assert_eq!(queue.open_streams(), 1);
        assert_eq!(run(&mut queue, Until::Everything, 0), [1]);
        assert!(queue.stream(A).is_none());
    }
}
