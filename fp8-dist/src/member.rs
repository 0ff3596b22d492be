//! The collectives of all backends in which each rank receives the messages of all ranks: one exchange per collective.
//!
//! Arguments such as the root or the dtype are checked after the exchange. They are known to be equal on all ranks then, so all
//! ranks return the same error.

mod core;
mod moves;
pub(crate) mod results;
mod worker;

use self::core::Core;
use crate::division::{self, Division, End};
use crate::group::next_handle_number;
use crate::message::{Call, Message, Operation, Part, call_of};
use crate::output::{self, expect_own};
use crate::pending::PANICKED;
use crate::{Error, Pending, ProcessGroup, ReduceOp, Result, StateDigest, Traffic, agreement, host};
use fp8_kernels::{Arena, Device, Tensor};
use fp8_recipe::AmaxGroup;
use results::{data, reduced};
use std::sync::{Arc, mpsc};
use std::thread;
use worker::Worker;

/// A rank, over some way to exchange messages.
#[derive(Debug)]
pub(crate) struct Member {
    core: Arc<Core>,
    worker: Worker,
    members: Vec<usize>,
    number: u64,
}

impl Member {
    /// A rank of a job's first group.
    pub(crate) fn new(end: End) -> Self {
        let members = (0..end.exchange.world_size()).collect();
        Self::of(end, members)
    }

    /// A rank of a group with these members of the job.
    fn of(end: End, members: Vec<usize>) -> Self {
        let core = Arc::new(Core::new(end));
        Self { core, worker: Worker::default(), members, number: next_handle_number() }
    }

    /// Returns the group's end when all work that was started before is done, so that calls keep their order.
    fn core(&self) -> &Core {
        self.worker.settle();
        &self.core
    }

    fn divided(&self, division: &Division<'_>) -> Result<Option<Arc<dyn ProcessGroup>>> {
        let divided = {
            let core = self.core();
            core.divide.divide(&*core.exchange, division)
        }?;
        Ok(divided.map(|(end, ranks)| {
            let members = division::of(&self.members, &ranks);
            Arc::new(Self::of(end, members)) as Arc<dyn ProcessGroup>
        }))
    }
}

impl AmaxGroup for Member {
    fn id(&self) -> &str {
        self.core.exchange.id()
    }

    fn world_size(&self) -> usize {
        self.core.exchange.world_size()
    }

    fn members(&self) -> Vec<usize> {
        self.members.clone()
    }

    fn agree_on_names(&self, key: &str, names: &[Arc<str>]) -> fp8_recipe::Result<()> {
        let message = Message { names: names.to_vec(), ..Message::new(Operation::AgreeOnNames, key) };
        self.core().compare(message)?;
        Ok(())
    }

    fn agree_on_state(&self, what: &str, state: &[StateDigest]) -> fp8_recipe::Result<()> {
        let core = self.core();
        let message = core.own(agreement::message(what, state))?;
        Ok(agreement::expect_agreement(&core.compare(message)?)?)
    }

    fn all_reduce_max(&self, key: &str, arena: &Arena) -> fp8_recipe::Result<()> {
        let core = self.core();
        let row = arena.staged().and_then(|row| Tensor::from_vec(row, [arena.staged_len()], &Device::cpu()));
        let row = core.own(row.map_err(Error::from))?;
        let all = core.call(Operation::AllReduceArena, key, &row)?;
        for row in data(&all) {
            arena.merge_staged(row.as_slice()?)?;
        }
        Ok(())
    }

    fn poison(&self, reason: &str) {
        self.core.exchange.poison(reason);
    }
}

impl ProcessGroup for Member {
    fn rank(&self) -> usize {
        self.core.exchange.rank()
    }

    fn handle_number(&self) -> u64 {
        self.number
    }

    fn all_reduce(&self, what: &str, x: &Tensor, op: ReduceOp) -> Result<Tensor> {
        let core = self.core();
        let _turn = core.turn.lock();
        let operation = Operation::AllReduce(op);
        if let Some(direct) = core.direct_reduction(x) {
            let all = core.announce(operation, what, x)?;
            let mut result = core.own(host::copy(x))?;
            core.reduce_directly(direct, &all, &mut result, op, true)?;
            return host::placed(result, x.device());
        }
        let all = core.call(operation, what, x)?;
        let result = reduced(&all, x.dtype(), op)?;
        host::cut(&result, 0..x.numel(), *x.shape(), x.device())
    }

    fn all_reduce_in_place(&self, what: &str, x: &mut Tensor, op: ReduceOp) -> Result<()> {
        let core = self.core();
        let _turn = core.turn.lock();
        core.all_reduce_in_place(what, x, op)
    }

    fn all_reduce_coalesced(&self, what: &str, tensors: &mut [Tensor], op: ReduceOp) -> Result<()> {
        let core = self.core();
        let _turn = core.turn.lock();
        core.all_reduce_coalesced(what, tensors, op)
    }

    fn start_all_reduce(&self, what: &str, mut tensors: Vec<Tensor>, op: ReduceOp) -> Pending {
        let call = Call { operation: Operation::AllReduce(op), what: what.to_owned() }.to_string();
        let (answer, result) = mpsc::channel();
        let what = what.to_owned();
        let started = self.worker.start(&self.core, move |core| {
            let _turn = core.turn.lock();
            let reduced = core.all_reduce_coalesced(&what, &mut tensors, op).map(|()| tensors);
            let _ = answer.send(reduced); // nobody may wait for it
        });
        if let Err(source) = started {
            let what = "starting a thread".to_owned();
            let error = Error::Network { id: self.id().to_owned(), what, source };
            return Pending::done(self.core.own(Err(error)));
        }
        Pending::on_thread(self.rank(), call, result)
    }

    fn traffic(&self) -> Traffic {
        self.core.traffic.traffic()
    }

    fn all_gather(&self, what: &str, x: &Tensor) -> Result<Tensor> {
        let core = self.core();
        let _turn = core.turn.lock();
        let (all, shape) = core.compare_shards(what, x, None)?;
        core.gathered(&all, x, shape, None)
    }

    fn all_gather_into(&self, what: &str, x: &Tensor, out: &mut Tensor) -> Result<()> {
        let core = self.core();
        let _turn = core.turn.lock();
        core.own(expect_own(out, what))?;
        let (all, shape) = core.compare_shards(what, x, Some(out))?;
        output::expect(out, shape, x.dtype(), || call_of(&all))?;
        core.gather_in_place(&all, what, x, out)
    }

    fn all_to_all(&self, what: &str, x: &Tensor, counts: &[usize]) -> Result<(Tensor, Vec<usize>)> {
        let core = self.core();
        let _turn = core.turn.lock();
        core.all_to_all(what, x, counts)
    }

    fn send(&self, what: &str, x: &Tensor, to: usize) -> Result<()> {
        let core = self.core();
        let _turn = core.turn.lock();
        core.send(what, x, to)
    }

    fn recv(&self, what: &str, x: &mut Tensor, from: usize) -> Result<()> {
        let core = self.core();
        let _turn = core.turn.lock();
        core.recv(what, x, from)
    }

    fn reduce_scatter(&self, what: &str, x: &Tensor, op: ReduceOp) -> Result<Tensor> {
        let core = self.core();
        let _turn = core.turn.lock();
        core.reduce_scatter(what, x, op, None)
    }

    fn reduce_scatter_into(&self, what: &str, x: &Tensor, op: ReduceOp, out: &mut Tensor) -> Result<()> {
        let core = self.core();
        let _turn = core.turn.lock();
        core.own(expect_own(out, what))?;
        let part = core.reduce_scatter(what, x, op, Some(out))?;
        core.own(host::store(&part, out, what))
    }

    fn broadcast(&self, what: &str, x: &Tensor, root: usize) -> Result<Tensor> {
        let core = self.core();
        let _turn = core.turn.lock();
        let message = Message::new(Operation::Broadcast { root }, what);
        let is_brought = core.exchange.rank() == root && core.direct(x).is_none();
        let part = if is_brought { core.own(Part::copy(x))? } else { Part::expected(x) };
        core.count(Operation::Broadcast { root }, x);
        let all = core.compare(message.with(part))?;
        if root >= core.exchange.world_size() {
            return Err(Error::Root { call: call_of(&all), root, world_size: core.exchange.world_size() });
        }
        core.gathered(&all, x, *x.shape(), Some(root))
    }

    fn broadcast_in_place(&self, what: &str, x: &mut Tensor, root: usize) -> Result<()> {
        let core = self.core();
        let _turn = core.turn.lock();
        core.broadcast_in_place(what, x, root)
    }

    fn split(&self, id: &str, color: Option<usize>, key: usize) -> Result<Option<Arc<dyn ProcessGroup>>> {
        self.divided(&Division::of_color(id, color, key))
    }

    fn subgroup(&self, id: &str, ranks: &[usize]) -> Result<Option<Arc<dyn ProcessGroup>>> {
        self.divided(&Division::of_ranks(id, ranks, self.rank(), self.world_size()))
    }

    fn barrier(&self) -> Result<()> {
        self.core().compare(Message::new(Operation::Barrier, ""))?;
        Ok(())
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if thread::panicking() {
            // Pending work ends with it.
            self.core.exchange.poison(PANICKED);
        }
    }
}
