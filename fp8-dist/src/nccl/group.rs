//! The collectives of groups of GPUs.

use super::api::{self, Api, Comm, Stream, UniqueId};
use super::communicator::{Answer, Communicator, Trouble};
use super::gather::Agreed;
use super::watch::{GRACE, Holder, Watched};
use crate::group::next_handle_number;
use crate::member::Exchange;
use crate::message::{Call, Message, Operation, Part};
use crate::tcp::{Connected, connect};
use crate::{Environment, Error, ProcessGroup, ReduceOp, Result, StateDigest, agreement};
use fp8_kernels::{Arena, DType, Device, Operand, Shape, Slot, Tensor, interop};
use fp8_recipe::AmaxGroup;
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Joins a group of GPUs, one per process, and returns this process's handle. Collectives run in NCCL.
///
/// The ranks first connect as in [`tcp`](crate::tcp()), whose `id` and `environment` these are. `deadline` is how long a rank waits
/// for the others: to join, and then for each collective to complete after it was queued.
///
/// Collectives are queued on the device's stream and return without waiting. Tensors stay on the GPU; work that is queued later
/// reads the results. NCCL chooses the order of sums: all ranks get the same bits from an `all_reduce`, but other backends may give
/// other bits. The maximum of NaN is not defined.
///
/// The hosts compare the following calls over their connections, which costs a round trip: names, state, every `all_gather` (whose
/// shards may differ in size), every `barrier`, the first call of each other collective with a new name, dtype or shape, and every
/// [`quantized_all_gather`](crate::quantized_all_gather()) until it finds a committed scale. All other calls are passed straight to
/// NCCL. In a training step the all-reduce of amaxes therefore involves no host, and can be captured in a graph. If ranks repeat known
/// calls in different orders, only NCCL or the deadline can detect it.
///
/// Each replay of a graph has the deadline, and fails if another rank has left. A graph keeps the group alive until the graph is
/// dropped, even after the handle is dropped.
///
/// When a group fails while collectives are queued, they are aborted and the device refuses all later calls with the reason, so
/// incomplete results are never read. Open a new device and create a new group to continue.
///
/// ```no_run
/// use fp8_dist::{Environment, ReduceOp, nccl};
/// use fp8_kernels::{Device, Tensor};
/// use std::time::Duration;
///
/// let environment = Environment::read()?; // under torchrun
/// let device = Device::cuda(environment.local_rank)?;
/// let group = nccl("dp", &environment, &device, Duration::from_secs(60))?;
/// let x = Tensor::scalar(1.0, &device)?;
/// assert_eq!(group.all_reduce("ranks", &x, ReduceOp::Sum)?.item()?, group.world_size() as f32);
/// # Ok::<(), fp8_dist::Error>(())
/// ```
///
/// # Errors
/// Those of [`tcp`](crate::tcp()); `device` is not a GPU; NCCL was not found (the error lists where it was looked for). On every rank:
/// an error that NCCL returns on any rank; a rank with another version of NCCL.
pub fn nccl(
    id: &str,
    environment: &Environment,
    device: &Device,
    deadline: Duration,
) -> Result<Arc<dyn ProcessGroup>> {
    let control: Box<dyn Exchange> = match connect(id, environment, deadline)? {
        Connected::Host(host) => Box::new(host),
        Connected::Guest(guest) => Box::new(guest),
    };
    match form(&*control, device, deadline) {
        Ok(communicator) => {
            let watched = Watched::new(control, communicator, device, deadline);
            let thread = watched.clone();
            let watch = thread::Builder::new().name("fp8-dist nccl".to_owned()).spawn(move || thread.watch());
            let watch = watch.map_err(|source| {
                watched.communicator.abort();
                Error::Network { id: id.to_owned(), what: "starting a thread".to_owned(), source }
            })?;
            let holder = Arc::new(Holder { watched, watch: Some(watch) });
            let (seen, agreed, turn) = Default::default();
            Ok(Arc::new(Group { holder, number: next_handle_number(), seen, agreed, turn }))
        }
        Err(error) => {
            tell(&*control, &error);
            Err(error)
        }
    }
}

/// Tells the other ranks why this rank cannot continue. If the group has failed, they know already.
fn tell(control: &dyn Exchange, error: &Error) {
    if error.failure().is_none() {
        control.poison(&error.to_string());
    }
}

/// Creates the communicator, together with all ranks.
fn form(control: &dyn Exchange, device: &Device, deadline: Duration) -> Result<Communicator> {
    interop::stream(device)?;
    let api = Api::new(&interop::Library::nccl()?)?;
    let error = |function, text| Error::Nccl { id: control.id().to_owned(), function, text };
    let version = api.version().map_err(|status| error("ncclGetVersion", api.describe(status)))?;
    let root = Operation::Broadcast { root: 0 };
    // The name contains the version, so ranks with different versions get an error that shows both.
    let message = Message::new(root, &format!("the id of a communicator of NCCL {version}"));
    let part = if control.rank() == 0 {
        let UniqueId(id) =
            api.unique_id().map_err(|status| error("ncclGetUniqueId", api.describe(status)))?;
        let data = Tensor::from_vec(id.to_vec(), [128], &Device::cpu())?;
        Part { dtype: DType::U8, shape: [128].into(), data: Some(data) }
    } else {
        Part { dtype: DType::U8, shape: [128].into(), data: None }
    };
    let all = control.exchange(message.with(part))?;
    let id = all.first().and_then(|first| first.part.as_ref()?.data.as_ref());
    let id = id.map(|id| id.to_vec::<u8>()).transpose()?.and_then(|id| id.try_into().ok());
    let id = id.ok_or_else(|| error("ncclGetUniqueId", "rank 0 sent no id".to_owned()))?;
    let word = || {
        let until = Instant::now() + GRACE.min(deadline);
        while control.failure().is_none() && Instant::now() < until {
            thread::sleep(GRACE / 50);
        }
        control.failure()
    };
    let trouble = |trouble| match (trouble, word()) {
        (_, Some(failure)) => Error::Rendezvous { id: control.id().to_owned(), failure },
        (Trouble::Nccl(function, text), None) => error(function, text),
        (Trouble::Late(function), None) => {
            error(function, format!("ranks are missing in the communicator after {deadline:?}"))
        }
        (Trouble::Aborted, None) => error("ncclCommInitRankConfig", "it was aborted".to_owned()),
    };
    let (rank, ranks) = (control.rank(), control.world_size());
    let communicator = Communicator::new(api, UniqueId(id), rank, ranks, deadline).map_err(trouble)?;
    let is_given_up = || control.failure().is_some();
    if let Err(found) = communicator.settle("ncclCommInitRankConfig", &is_given_up) {
        let error = trouble(found);
        // Tell the others why before NCCL reports that this rank is gone.
        tell(control, &error);
        communicator.abort();
        return Err(error);
    }
    Ok(communicator)
}

#[derive(Debug)]
pub(super) struct Group {
    holder: Arc<Holder>,
    number: u64,
    /// Calls that have been compared.
    seen: Mutex<HashSet<(Call, DType, Shape)>>,
    /// Quantized gathers that the hosts need not compare again.
    pub(super) agreed: Mutex<HashMap<String, Arc<Agreed>>>,
    /// Serializes threads that share a handle, so calls have one order.
    pub(super) turn: Mutex<()>,
}

impl Group {
    fn watched(&self) -> &Watched {
        &self.holder.watched
    }

    fn control(&self) -> &dyn Exchange {
        &*self.watched().control
    }

    pub(super) fn expect_alive(&self, call: &Call) -> Result<()> {
        match self.control().failure() {
            Some(failure) => Err(Error::Poisoned { call: call.to_string(), failure }),
            None => Ok(()),
        }
    }

    /// If an operation of this rank alone fails, tells the other ranks, which would wait for it otherwise.
    pub(super) fn own<V>(&self, result: Result<V>) -> Result<V> {
        result.inspect_err(|error| self.control().poison(&error.to_string()))
    }

    /// Compares a call with the other ranks'.
    pub(super) fn compare(&self, call: &Call, x: &Tensor) -> Result<Arc<Vec<Message>>> {
        let message = Message { call: call.clone(), names: Vec::new(), part: Some(Part::expected(x)) };
        self.control().exchange(message)
    }

    /// Compares a call with the other ranks', unless that has been done.
    fn compare_once(&self, call: &Call, dtype: DType, shape: Shape) -> Result<()> {
        let key = (call.clone(), dtype, shape);
        if !self.seen.lock().contains(&key) {
            let part = Part { dtype, shape, data: None };
            self.control().exchange(Message { call: call.clone(), names: Vec::new(), part: Some(part) })?;
            self.seen.lock().insert(key);
        }
        Ok(())
    }

    pub(super) fn expect_device(&self, call: &Call, device: &Device) -> Result<()> {
        interop::stream(&self.watched().device)?;
        if interop::is_same_gpu(device, &self.watched().device) {
            return Ok(());
        }
        let (found, mut expected) = (device.to_string(), self.watched().device.to_string());
        if found == expected {
            expected += ", the same that the group was made with";
        }
        Err(Error::Device { call: call.to_string(), found, expected })
    }

    /// Queues NCCL's part of a collective on the device's stream.
    pub(super) fn queue(&self, call: &Call, queue: impl FnOnce(&Api, Comm, Stream) -> Answer) -> Result<()> {
        let stream =
            self.own(interop::stream(&self.watched().device).map_err(Error::from))?.cu_stream().cast();
        let is_given_up = || self.control().failure().is_some();
        let queued = self.watched().communicator.call(&is_given_up, |api, comm| queue(api, comm, stream));
        let failed = |reason: String| {
            let failure = self.watched().fail(&reason);
            // A call that has begun must not be queued later, when its buffers have been freed.
            self.watched().end(&failure);
            Err(Error::Failed { call: call.to_string(), failure })
        };
        match queued {
            Ok(()) => self.own(self.holder.queued(&call.to_string()).map_err(Error::from)),
            Err(Trouble::Nccl(function, text)) => failed(format!("{call}: {function}: {text}")),
            Err(Trouble::Late(function)) => {
                failed(format!("{call}: {function} was not queued within {:?}", self.watched().deadline))
            }
            Err(Trouble::Aborted) => failed(format!("{call}: the communicator was aborted")),
        }
    }

    /// Room for a result on the device of `x`, of which it has the transpose policy.
    pub(super) fn empty_like(&self, x: &Tensor, shape: Shape, dtype: DType) -> Result<Tensor> {
        self.own(interop::unfilled(shape, dtype, x.device()).map_err(Error::from))
    }

    pub(super) fn reduce(&self, call: &Call, x: &Tensor, op: ReduceOp, [from, to]: [u64; 2]) -> Result<()> {
        if x.numel() == 0 {
            return Ok(());
        }
        self.queue(call, |api, comm, stream| {
            // SAFETY: `from` and `to` name numel f32 of this device, equal or apart, that live until the stream has passed
            // the collective: memory is reused in stream order. The communicator is alive while it is called.
            ("ncclAllReduce", unsafe {
                (api.all_reduce)(from, to, x.numel(), api::FLOAT32, number(op), comm, stream)
            })
        })
    }

    pub(super) fn shape_error(&self, call: &Call, shape: Shape, remedy: &'static str) -> Error {
        Error::Shape { call: call.to_string(), shape, world_size: self.world_size(), remedy }
    }
}

fn number(op: ReduceOp) -> i32 {
    match op {
        ReduceOp::Sum => api::SUM,
        ReduceOp::Max => api::MAX,
    }
}

pub(super) fn call(operation: Operation, what: &str) -> Call {
    Call { operation, what: what.to_owned() }
}

fn expect_f32(call: &Call, x: &Tensor) -> Result<()> {
    match x.dtype() {
        DType::F32 => Ok(()),
        found => Err(Error::DType { call: call.to_string(), found, expected: "f32" }),
    }
}

impl AmaxGroup for Group {
    fn id(&self) -> &str {
        self.control().id()
    }

    fn world_size(&self) -> usize {
        self.control().world_size()
    }

    fn agree_on_names(&self, key: &str, names: &[Arc<str>]) -> fp8_recipe::Result<()> {
        let _turn = self.turn.lock();
        let message = Message { names: names.to_vec(), ..Message::new(Operation::AgreeOnNames, key) };
        self.control().exchange(message)?;
        Ok(())
    }

    fn agree_on_state(&self, what: &str, state: &[StateDigest]) -> fp8_recipe::Result<()> {
        let _turn = self.turn.lock();
        let message = self.own(agreement::message(what, state))?;
        Ok(agreement::expect_agreement(&self.control().exchange(message)?)?)
    }

    fn all_reduce_max(&self, key: &str, arena: &Arena) -> fp8_recipe::Result<()> {
        let _turn = self.turn.lock();
        let call = call(Operation::AllReduceArena, key);
        self.expect_alive(&call)?;
        self.own(self.expect_device(&call, arena.device()))?;
        let row = self.own(interop::staged_address(arena).map_err(Error::from))?;
        let len = arena.staged_len();
        self.compare_once(&call, DType::F32, [len].into())?;
        if len > 0 {
            self.queue(&call, |api, comm, stream| {
                // SAFETY: `row` is the address of `len` f32, reduced in place; the arena's memory is freed in stream order.
                ("ncclAllReduce", unsafe {
                    (api.all_reduce)(row, row, len, api::FLOAT32, api::MAX, comm, stream)
                })
            })?;
        }
        Ok(())
    }

    fn poison(&self, reason: &str) {
        self.control().poison(reason);
    }
}

impl ProcessGroup for Group {
    fn rank(&self) -> usize {
        self.control().rank()
    }

    fn handle_number(&self) -> u64 {
        self.number
    }

    fn all_reduce(&self, what: &str, x: &Tensor, op: ReduceOp) -> Result<Tensor> {
        let _turn = self.turn.lock();
        let call = call(Operation::AllReduce(op), what);
        self.expect_alive(&call)?;
        self.own(self.expect_device(&call, x.device()))?;
        self.compare_once(&call, x.dtype(), *x.shape())?;
        expect_f32(&call, x)?;
        let out = self.empty_like(x, *x.shape(), DType::F32)?;
        let buffers = [self.own(address(x))?, self.own(address(&out))?];
        self.reduce(&call, x, op, buffers)?;
        Ok(out)
    }

    fn all_reduce_in_place(&self, what: &str, x: &mut Tensor, op: ReduceOp) -> Result<()> {
        let _turn = self.turn.lock();
        let call = call(Operation::AllReduce(op), what);
        self.expect_alive(&call)?;
        self.own(self.expect_device(&call, x.device()))?;
        // Checked before the exchange: if this rank fails, the others must not compute the sum.
        let place = self.own(interop::address_mut(x, what).map_err(Error::from))?;
        self.compare_once(&call, x.dtype(), *x.shape())?;
        expect_f32(&call, x)?;
        self.reduce(&call, x, op, [place, place])
    }

    fn all_gather(&self, what: &str, x: &Tensor) -> Result<Tensor> {
        self.gather(what, x)
    }

    fn quantized_all_gather(&self, what: &str, shard: &Tensor, slot: &Slot<'_>) -> Result<Operand> {
        self.gather_quantized(what, shard, slot)
    }

    fn reduce_scatter(&self, what: &str, x: &Tensor, op: ReduceOp) -> Result<Tensor> {
        let _turn = self.turn.lock();
        let call = call(Operation::ReduceScatter(op), what);
        self.expect_alive(&call)?;
        self.own(self.expect_device(&call, x.device()))?;
        self.compare_once(&call, x.dtype(), *x.shape())?;
        expect_f32(&call, x)?;
        let (mut dims, ranks) = (x.shape().to_vec(), self.world_size());
        let uneven =
            || self.shape_error(&call, *x.shape(), "dimension 0 must be a multiple of the world size");
        let rows = dims.first_mut().filter(|rows| rows.is_multiple_of(ranks)).ok_or_else(uneven)?;
        *rows /= ranks;
        let out = self.empty_like(x, Shape::from_slice(&dims).ok_or_else(uneven)?, DType::F32)?;
        if out.numel() > 0 {
            let [from, to] = [self.own(address(x))?, self.own(address(&out))?];
            self.queue(&call, |api, comm, stream| {
                let each = out.numel();
                // SAFETY: `to` names `each` f32 of this device, `from` as many for each rank; both live until the stream
                // has passed the collective.
                ("ncclReduceScatter", unsafe {
                    (api.reduce_scatter)(from, to, each, api::FLOAT32, number(op), comm, stream)
                })
            })?;
        }
        Ok(out)
    }

    fn broadcast(&self, what: &str, x: &Tensor, root: usize) -> Result<Tensor> {
        let _turn = self.turn.lock();
        let call = call(Operation::Broadcast { root }, what);
        self.expect_alive(&call)?;
        self.own(self.expect_device(&call, x.device()))?;
        self.compare_once(&call, x.dtype(), *x.shape())?;
        if root >= self.world_size() {
            return Err(Error::Root { call: call.to_string(), root, world_size: self.world_size() });
        }
        let out = self.empty_like(x, *x.shape(), x.dtype())?;
        if out.numel() > 0 {
            let (to, bytes) = (self.own(address(&out))?, out.numel() * out.dtype().size());
            let from = if self.rank() == root { self.own(address(x))? } else { to };
            self.queue(&call, |api, comm, stream| {
                // SAFETY: both name `bytes` bytes of this device, equal or apart, that live until the stream has passed
                // the collective.
                ("ncclBroadcast", unsafe {
                    (api.broadcast)(from, to, bytes, api::UINT8, root as i32, comm, stream)
                })
            })?;
        }
        Ok(out)
    }

    fn barrier(&self) -> Result<()> {
        let _turn = self.turn.lock();
        self.control().exchange(Message::new(Operation::Barrier, ""))?;
        Ok(())
    }
}

pub(super) fn address(x: &Tensor) -> Result<u64> {
    Ok(interop::address(x)?)
}

impl Drop for Group {
    fn drop(&mut self) {
        if thread::panicking() {
            self.poison("its thread panicked");
        }
    }
}
