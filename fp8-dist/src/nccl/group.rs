//! A rank of a group of GPUs: joining, comparing calls with the other ranks, and queueing work on the device.

use super::agreed::Agreed;
use super::api::{self, Api, Comm, Stream, UniqueId};
use super::communicator::{Answer, Communicator, Trouble};
use super::watch::{GRACE, Holder, Watched};
use crate::counter::{Counter, Entry};
use crate::division::{self, Divide, Division, End};
use crate::exchange::Exchange;
use crate::group::next_handle_number;
use crate::member::results::reduced;
use crate::message::{Call, Message, Operation, Part};
use crate::tcp::connect;
use crate::{Environment, Error, ProcessGroup, ReduceOp, Result, output};
use fp8_kernels::interop::SideQueue;
use fp8_kernels::{DType, Device, Replayed, Shape, Tensor, interop};
use parking_lot::Mutex;
use std::collections::HashMap;
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
/// shards may differ in size) and `all_to_all`, every `barrier`, the first call of each other collective with a new name, dtype or
/// shape, and every
/// [`quantized_all_gather`](crate::quantized_all_gather()) with a cell until it finds a committed scale. All other calls are passed
/// straight to NCCL. In a training step the all-reduce of amaxes therefore involves no host, and can be captured in a graph. Once a second, each
/// rank tells rank 0 which of these calls it has made. If their orders differ, the group fails and names both calls; results of the
/// two seconds until then may be mixed up.
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
    let end = connect(id, environment, None, deadline, &|| false)?;
    let members = (0..end.exchange.world_size()).collect();
    Ok(Arc::new(Group::new(end, members, device, deadline)?))
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
    divide: Box<dyn Divide>,
    pub(super) members: Vec<usize>,
    pub(super) number: u64,
    /// Calls that have been compared, and their numbers.
    seen: Mutex<HashMap<(Call, DType, Shape), u64>>,
    /// Quantized gathers that the hosts need not compare again, by name and by the shape of this rank's shard.
    pub(super) agreed: Mutex<HashMap<(String, Shape), Arc<Agreed>>>,
    /// The numbers of messages that the hosts need not compare again.
    pub(super) messages: Mutex<HashMap<(Call, DType, Shape), Arc<Tensor>>>,
    /// Serializes threads that share a handle, so calls have one order.
    pub(super) turn: Mutex<()>,
    /// The queue of reductions that go on beside the device's other work, opened by the first.
    side_queue: Mutex<Option<Arc<SideQueue>>>,
    pub(super) traffic: Arc<Counter>,
}

/// A call in a recorded step, which each replay repeats.
#[derive(Debug)]
struct Counted {
    traffic: Arc<Counter>,
    entry: Option<Entry>,
}

impl Replayed for Counted {
    fn advance(&self) -> fp8_kernels::Result<()> {
        Ok(())
    }

    fn launched(&self) {
        self.traffic.add(self.entry);
    }
}

impl Group {
    /// Joins the communicator of ranks that have connected.
    pub(super) fn new(
        End { exchange: control, divide, .. }: End,
        members: Vec<usize>,
        device: &Device,
        deadline: Duration,
    ) -> Result<Self> {
        let communicator = form(&*control, device, deadline).inspect_err(|error| tell(&*control, error))?;
        let id = control.id().to_owned();
        let watched = Watched::new(control, communicator, device, deadline);
        let thread = watched.clone();
        let watch = thread::Builder::new().name("fp8-dist nccl".to_owned()).spawn(move || thread.watch());
        let watch = watch.map_err(|source| {
            watched.communicator.abort();
            Error::Network { id, what: "starting a thread".to_owned(), source }
        })?;
        let holder = Arc::new(Holder { watched, watch: Some(watch) });
        let (seen, agreed, messages, turn, side_queue, traffic) = Default::default();
        let number = next_handle_number();
        Ok(Self { holder, divide, members, number, seen, agreed, messages, turn, side_queue, traffic })
    }

    /// Divides the group. A new one has a communicator of its own.
    pub(super) fn divided(&self, division: &Division<'_>) -> Result<Option<Arc<dyn ProcessGroup>>> {
        let watched = self.watched();
        let Some((end, ranks)) = self.divide.divide(self.control(), division)? else { return Ok(None) };
        let members = division::of(&self.members, &ranks);
        Ok(Some(Arc::new(Self::new(end, members, &watched.device, watched.deadline)?)))
    }

    fn watched(&self) -> &Watched {
        &self.holder.watched
    }

    pub(super) fn control(&self) -> &dyn Exchange {
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

    /// Exchanges messages with the other ranks' hosts.
    pub(super) fn exchange(&self, message: Message) -> Result<Arc<Vec<Message>>> {
        self.traffic.add_exchange();
        self.control().exchange(message)
    }

    /// Compares a call with the other ranks'.
    pub(super) fn compare(&self, call: &Call, x: &Tensor, out: Option<&Tensor>) -> Result<Arc<Vec<Message>>> {
        let names = out.into_iter().map(|out| output::of(*out.shape(), out.dtype()).into()).collect();
        self.exchange(Message { call: call.clone(), names, part: Some(Part::expected(x)) })
    }

    /// Compares a call with the other ranks', unless that has been done. Returns the call's number.
    pub(super) fn compare_once(&self, call: &Call, dtype: DType, shape: Shape) -> Result<u64> {
        let key = (call.clone(), dtype, shape);
        if let Some(number) = self.seen.lock().get(&key) {
            return Ok(*number);
        }
        let part = Part { dtype, shape, data: None };
        self.exchange(Message { call: call.clone(), names: Vec::new(), part: Some(part) })?;
        let number = self.number_of(&format!("{call}, {shape} of {dtype}"));
        self.seen.lock().insert(key, number);
        Ok(number)
    }

    /// Returns the number of a call that all ranks describe alike, and names it in errors.
    pub(super) fn number_of(&self, call: &str) -> u64 {
        let number = fnv(call.bytes());
        self.control().name_call(number, call);
        number
    }

    /// Compares a call that reduces several tensors with the other ranks', unless that has been done. Returns the call's number.
    pub(super) fn compare_all_once(&self, call: &Call, tensors: &[Tensor]) -> Result<u64> {
        if let [x] = tensors {
            return self.compare_once(call, x.dtype(), *x.shape());
        }
        let of = |x: &Tensor| Arc::from(format!("{} of {}", x.shape(), x.dtype()));
        let names: Vec<Arc<str>> = tensors.iter().map(of).collect();
        let shapes = names.join(", ");
        let whole = Call { what: format!("{}: {shapes}", call.what), ..call.clone() };
        let key = (whole, DType::U8, Shape::from([tensors.len()]));
        if let Some(number) = self.seen.lock().get(&key) {
            return Ok(*number);
        }
        self.exchange(Message { call: call.clone(), names, part: None })?;
        let number = self.number_of(&format!("{call}, {shapes}"));
        self.seen.lock().insert(key, number);
        Ok(number)
    }

    /// Counts a call with `x`, and each of its replays if it is being recorded.
    pub(super) fn count(&self, call: &Call, x: &Tensor) {
        self.add(Entry::of(call.operation, x, self.control().rank(), self.control().world_size()));
    }

    /// Counts a reduction of several tensors.
    pub(super) fn count_all(&self, op: ReduceOp, tensors: &[Tensor]) {
        self.add(Entry::of_all(op, tensors, self.control().rank(), self.control().world_size()));
    }

    pub(super) fn add(&self, entry: Option<Entry>) {
        let device = &self.watched().device;
        match device.capture_number() {
            None => self.traffic.add(entry),
            Some(_) => device.on_replay(Arc::new(Counted { traffic: self.traffic.clone(), entry })),
        }
    }

    /// Returns an error if the queue beside the device's stream would have to be opened while a step is recorded.
    pub(super) fn expect_side_queue(&self, call: &Call) -> Result<()> {
        if self.side_queue.lock().is_none() {
            let remedy = "start one reduction of this group before a step is recorded";
            self.watched().device.expect_eager(&call.to_string(), remedy)?;
        }
        Ok(())
    }

    /// Returns the queue beside the device's stream.
    pub(super) fn side_queue(&self) -> Result<Arc<SideQueue>> {
        let mut queue = self.side_queue.lock();
        if let Some(queue) = &*queue {
            return Ok(queue.clone());
        }
        Ok(queue.insert(Arc::new(SideQueue::new(&self.watched().device)?)).clone())
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

    /// Queues NCCL's part of a collective on the device's stream. `number` is that of a call which the hosts have compared before.
    pub(super) fn queue(
        &self,
        call: &Call,
        number: Option<u64>,
        queue: impl FnOnce(&Api, Comm, Stream) -> Answer,
    ) -> Result<()> {
        self.queue_on(call, number, None, None, queue)
    }

    /// Like [`queue`](Self::queue), for a call in which of the other ranks only `partners` take part.
    pub(super) fn queue_among(
        &self,
        call: &Call,
        partners: Vec<usize>,
        queue: impl FnOnce(&Api, Comm, Stream) -> Answer,
    ) -> Result<()> {
        self.queue_on(call, None, None, Some(partners), queue)
    }

    /// Queues NCCL's part of a collective on `side`, or on the device's stream.
    pub(super) fn queue_on(
        &self,
        call: &Call,
        number: Option<u64>,
        side: Option<&SideQueue>,
        partners: Option<Vec<usize>>,
        queue: impl FnOnce(&Api, Comm, Stream) -> Answer,
    ) -> Result<()> {
        let own = self.own(interop::stream(&self.watched().device).map_err(Error::from))?;
        let stream = side.map_or(own, SideQueue::stream).cu_stream().cast();
        let is_given_up = || self.control().failure().is_some();
        let queued = self.watched().communicator.call(&is_given_up, |api, comm| queue(api, comm, stream));
        let failed = |reason: String| {
            let failure = self.watched().fail(&reason);
            // A call that has begun must not be queued later, when its buffers have been freed.
            self.watched().end(&failure);
            Err(Error::Failed { call: call.to_string(), failure })
        };
        match queued {
            Ok(()) => {
                let queued = self.holder.queued(&call.to_string(), number, side, partners);
                self.own(queued.map_err(Error::from))?;
                // If the watch has ended what is queued before this call was marked, it did not see it.
                let Some(failure) = self.control().failure() else { return Ok(()) };
                self.watched().distrust(&failure);
                Err(Error::Failed { call: call.to_string(), failure })
            }
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

    pub(super) fn reduce(
        &self,
        call: &Call,
        number: Option<u64>,
        x: &Tensor,
        op: ReduceOp,
        [from, to]: [u64; 2],
    ) -> Result<()> {
        if x.numel() == 0 {
            return Ok(());
        }
        let dtype = float_number(x.dtype());
        self.count(call, x);
        self.queue(call, number, |api, comm, stream| {
            // SAFETY: `from` and `to` name numel elements of this device, equal or apart, that live until the stream has passed
            // the collective: memory is reused in stream order. The communicator is alive while it is called.
            ("ncclAllReduce", unsafe {
                (api.all_reduce)(from, to, x.numel(), dtype, op_number(op), comm, stream)
            })
        })
    }

    /// Lets the hosts reduce `x`, of a type for which NCCL has no operation that tells of overflow.
    pub(super) fn reduce_on_hosts(&self, call: &Call, x: &Tensor, op: ReduceOp) -> Result<Tensor> {
        let remedy = "reduce integers outside of the recorded step: the hosts add them";
        x.device().expect_eager(&call.to_string(), remedy)?;
        let part = self.own(Part::copy(x))?;
        let message = Message { call: call.clone(), names: Vec::new(), part: Some(part) };
        let all = self.exchange(message)?;
        reduced(&all, x.dtype(), op)
    }

    pub(super) fn shape_error(&self, call: &Call, shape: Shape, remedy: &'static str) -> Error {
        Error::Shape { call: call.to_string(), shape, world_size: self.control().world_size(), remedy }
    }
}

/// The hash FNV-1a of 64 bits.
fn fnv(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

pub(super) fn op_number(op: ReduceOp) -> i32 {
    match op {
        ReduceOp::Sum => api::SUM,
        ReduceOp::Avg => api::AVG,
        ReduceOp::Max => api::MAX,
    }
}

/// The number of a dtype that NCCL reduces.
pub(super) const fn float_number(dtype: DType) -> i32 {
    match dtype {
        DType::BF16 => api::BFLOAT16,
        DType::F16 => api::FLOAT16,
        DType::F32 | DType::I32 | DType::U8 => api::FLOAT32,
    }
}

pub(super) fn call(operation: Operation, what: &str) -> Call {
    Call { operation, what: what.to_owned() }
}

pub(super) fn address(x: &Tensor) -> Result<u64> {
    Ok(interop::address(x)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fp8_kernels::{CudaAllocator, CudaOptions};
    use std::net::TcpListener;

    /// The thread that watches may have ended what was queued before the call was marked.
    #[test]
    fn a_group_that_fails_while_a_call_is_queued_distrusts_what_was_queued() {
        let options = CudaOptions {
            library: Some(fp8_cuda_sim::library_path().unwrap()),
            allocator: Some(CudaAllocator::Exact),
            ..CudaOptions::default()
        };
        let device = Device::cuda_with_options(&options).unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let alone = Environment::on_this_machine(port);
        let here = Environment { exact_port: true, run_id: "test".to_owned(), ..alone };
        let deadline = Duration::from_secs(10);
        let end = connect("dp", &here, None, deadline, &|| false).unwrap();
        let group = Group::new(end, vec![0], &device, deadline).unwrap();
        let x = Tensor::from_vec(vec![1.0f32], [1], &device).unwrap();
        let out = group.empty_like(&x, [1].into(), DType::F32).unwrap();
        let [from, to] = [&x, &out].map(|x| address(x).unwrap());
        let call = call(Operation::AllReduce(ReduceOp::Sum), "x");
        let queued = group.queue(&call, None, |api, comm, stream| {
            // SAFETY: both name an f32 of this device, and live until the group is gone.
            let mut status = unsafe { (api.all_reduce)(from, to, 1, api::FLOAT32, api::SUM, comm, stream) };
            while status == api::IN_PROGRESS {
                // SAFETY: the communicator is alive while it is called; the status lives through the call.
                assert_eq!(unsafe { (api.async_error)(comm, &mut status) }, api::SUCCESS);
            }
            group.control().poison("another call failed");
            ("ncclAllReduce", status)
        });
        let told = queued.unwrap_err().to_string();
        assert!(told.contains("all_reduce(sum) `x`") && told.contains("another call failed"), "{told}");
        let read = out.item().unwrap_err().to_string();
        assert!(read.contains("failed while its work was queued"), "{read}");
    }
}
