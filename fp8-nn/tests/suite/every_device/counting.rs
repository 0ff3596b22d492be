//! A group that passes its calls on and counts them.

use fp8_nn::fp8_dist::{self, StateDigest};
use fp8_nn::fp8_kernels::Arena;
use fp8_nn::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// One rank's handle. It counts how often state is compared, and gives up at a broadcast if told so.
#[derive(Debug)]
pub(crate) struct Counting {
    group: Arc<dyn ProcessGroup>,
    pub(crate) comparisons: AtomicUsize,
    /// The number of broadcasts that this rank takes part in before it gives up.
    pub(crate) broadcasts_left: AtomicUsize,
}

impl Counting {
    pub(crate) fn new(group: Arc<dyn ProcessGroup>) -> Arc<Self> {
        Arc::new(Self {
            group,
            comparisons: AtomicUsize::new(0),
            broadcasts_left: AtomicUsize::new(usize::MAX),
        })
    }
}

impl AmaxGroup for Counting {
    fn id(&self) -> &str {
        self.group.id()
    }

    fn world_size(&self) -> usize {
        self.group.world_size()
    }

    fn agree_on_names(&self, key: &str, names: &[Arc<str>]) -> fp8_nn::fp8_recipe::Result<()> {
        self.group.agree_on_names(key, names)
    }

    fn agree_on_state(&self, what: &str, state: &[StateDigest]) -> fp8_nn::fp8_recipe::Result<()> {
        self.comparisons.fetch_add(1, Relaxed);
        self.group.agree_on_state(what, state)
    }

    fn all_reduce_max(&self, key: &str, arena: &Arena) -> fp8_nn::fp8_recipe::Result<()> {
        self.group.all_reduce_max(key, arena)
    }

    fn poison(&self, reason: &str) {
        self.group.poison(reason);
    }
}

impl ProcessGroup for Counting {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn handle_number(&self) -> u64 {
        self.group.handle_number()
    }

    fn all_reduce(&self, what: &str, x: &Tensor, op: ReduceOp) -> fp8_dist::Result<Tensor> {
        self.group.all_reduce(what, x, op)
    }

    fn all_reduce_in_place(&self, what: &str, x: &mut Tensor, op: ReduceOp) -> fp8_dist::Result<()> {
        self.group.all_reduce_in_place(what, x, op)
    }

    fn all_gather(&self, what: &str, x: &Tensor) -> fp8_dist::Result<Tensor> {
        self.group.all_gather(what, x)
    }

    fn all_to_all(&self, what: &str, x: &Tensor, counts: &[usize]) -> fp8_dist::Result<(Tensor, Vec<usize>)> {
        self.group.all_to_all(what, x, counts)
    }

    fn send(&self, what: &str, x: &Tensor, to: usize) -> fp8_dist::Result<()> {
        self.group.send(what, x, to)
    }

    fn recv(&self, what: &str, x: &mut Tensor, from: usize) -> fp8_dist::Result<()> {
        self.group.recv(what, x, from)
    }

    fn reduce_scatter(&self, what: &str, x: &Tensor, op: ReduceOp) -> fp8_dist::Result<Tensor> {
        self.group.reduce_scatter(what, x, op)
    }

    fn broadcast(&self, what: &str, x: &Tensor, root: usize) -> fp8_dist::Result<Tensor> {
        if self.broadcasts_left.fetch_sub(1, Relaxed) == 0 {
            self.group.poison("on purpose");
        }
        self.group.broadcast(what, x, root)
    }

    fn split(
        &self,
        id: &str,
        color: Option<usize>,
        key: usize,
    ) -> fp8_dist::Result<Option<Arc<dyn ProcessGroup>>> {
        self.group.split(id, color, key)
    }

    fn subgroup(&self, id: &str, ranks: &[usize]) -> fp8_dist::Result<Option<Arc<dyn ProcessGroup>>> {
        self.group.subgroup(id, ranks)
    }

    fn barrier(&self) -> fp8_dist::Result<()> {
        self.group.barrier()
    }
}
