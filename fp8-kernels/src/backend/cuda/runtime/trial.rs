//! Times the kernels that the library has for a product, and picks one.
//!
//! - Each candidate's launches are recorded as a graph, so the host's time does not count.
//! - Operands are random numbers (zeros flatter: they cost less power), in enough copies that together they exceed the L2 cache.
//! - Every round times each candidate once, and every other round in reverse order. So the candidates share what changes over
//!   time, such as clocks that fall as the GPU gets warm. A candidate's time is its median over the rounds.
//! - The library's first choice stays unless another is faster by more than [`MARGIN`]: smaller differences do not repeat,
//!   and an unchanged kernel keeps the bits of earlier runs.
//!
//! All this happens on a stream of its own and with a workspace of its own, so work that other threads queue on the device
//! meanwhile is neither recorded nor disturbed.

use super::cublaslt::{Found, Type};
use super::memory::Buffer;
use super::product::{Places, Product};
use super::queue::Queue;
use crate::{DType, Error, Result};
use cudarc::driver::{CudaStream, result, sys};
use std::sync::Arc;

/// The operation in errors.
const OP: &str = "gemm tuning";
/// The number of launches in a graph.
const LAUNCHES: usize = 10;
/// The number of rounds that count: even, so that each candidate is timed as often in either order. One round before them
/// warms up.
const ROUNDS: usize = 6;
/// The largest number of copies of the operands.
const COPIES: usize = 8;
/// The part of its time that a candidate must save to replace the library's first choice.
const MARGIN: f32 = 0.02;

/// The stream that a product is enqueued on, and the workspace that it may use there.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lane {
    pub(super) stream: sys::CUstream,
    pub(super) workspace: (u64, usize),
}

/// The candidate that was picked.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pick {
    pub(super) found: Found,
    pub(super) microseconds: f32,
}

/// Picks one of `found`, of which the first is the library's first choice. Returns `None` if there is no memory for operands
/// or no candidate runs. Waits for the device. `run` enqueues a product on the lane that it is given.
pub(super) fn pick(
    queue: &Queue,
    product: &Product,
    found: &[Found],
    mut run: impl FnMut(&Found, &Places, Lane) -> Result<()>,
) -> Result<Option<Pick>> {
    let Some(bench) = Bench::new(queue, product, found)? else { return Ok(None) };
    let mut candidates = Vec::with_capacity(found.len());
    for found in found {
        match bench.record(|places, lane| run(found, places, lane)) {
            Ok(graph) => candidates.push(Candidate { found: *found, graph: Some(graph), times: Vec::new() }),
            Err(_) => {
                // A kernel that cannot run is skipped, unless the device itself has failed.
                queue.ready()?;
                candidates.push(Candidate { found: *found, graph: None, times: Vec::new() });
            }
        }
    }
    let (start, end) = (Event::new(queue)?, Event::new(queue)?);
    for round in 0..=ROUNDS {
        let mut time = |candidate: &mut Candidate<'_>| -> Result<()> {
            let Some(graph) = &candidate.graph else { return Ok(()) };
            match bench.time(graph, &start, &end) {
                // The first round warms up.
                Ok(_) if round == 0 => {}
                Ok(time) => candidate.times.push(time / LAUNCHES as f32),
                Err(_) => {
                    queue.ready()?;
                    candidate.graph = None;
                }
            }
            Ok(())
        };
        match round % 2 {
            0 => candidates.iter_mut().try_for_each(&mut time)?,
            _ => candidates.iter_mut().rev().try_for_each(&mut time)?,
        }
    }
    let medians: Vec<_> = candidates.iter_mut().map(Candidate::median).collect();
    let picked = better(&medians).and_then(|index| Some((candidates.get(index)?, medians.get(index)?)));
    Ok(picked.map(|(candidate, time)| Pick { found: candidate.found, microseconds: time.unwrap_or(0.0) }))
}

/// Returns the index of the smallest time, or of the first one unless the smallest is less by more than [`MARGIN`]. `None` are
/// candidates that do not run.
fn better(times: &[Option<f32>]) -> Option<usize> {
    let all = times.iter().enumerate().filter_map(|(index, time)| Some((index, (*time)?)));
    let (best, shortest) = all.min_by(|(_, lhs), (_, rhs)| lhs.total_cmp(rhs))?;
    match times.first() {
        Some(Some(first)) if shortest >= first * (1.0 - MARGIN) => Some(0),
        _ => Some(best),
    }
}

/// A kernel that is timed.
struct Candidate<'a> {
    found: Found,
    /// `None` if it does not run.
    graph: Option<Graph<'a>>,
    /// Microseconds of a launch, one for each round.
    times: Vec<f32>,
}

impl Candidate<'_> {
    fn median(&mut self) -> Option<f32> {
        self.graph.as_ref()?;
        self.times.sort_by(f32::total_cmp);
        let middle = self.times.len() / 2;
        Some((self.times.get(middle)? + self.times.get(middle.checked_sub(1)?)?) / 2.0)
    }
}

/// A stream with operands and a workspace that nothing else uses.
struct Bench<'a> {
    queue: &'a Queue,
    stream: Arc<CudaStream>,
    inputs: Inputs,
    workspace: Buffer,
}

impl Drop for Bench<'_> {
    /// Its memory is free for the device's own stream afterwards.
    fn drop(&mut self) {
        let _ = self.stream.synchronize();
    }
}

impl<'a> Bench<'a> {
    /// Returns `None` if there is no memory for it.
    fn new(queue: &'a Queue, product: &Product, found: &[Found]) -> Result<Option<Self>> {
        let workspace = found.iter().map(|found| found.workspace).max().unwrap_or(0);
        let workspace = match queue.alloc(DType::U8, workspace) {
            Ok(workspace) => workspace,
            Err(Error::OutOfMemory { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        let Some(inputs) = Inputs::new(queue, product)? else { return Ok(None) };
        let stream = queue.stream().context().new_stream();
        let stream = stream.map_err(|error| queue.driver_error("cuStreamCreate", OP, error))?;
        // The memory may be in use by work that is queued, and the operands are written by work that is.
        queue.wait(OP)?;
        Ok(Some(Self { queue, stream, inputs, workspace }))
    }

    /// Runs a candidate once and records several launches of it.
    fn record(&self, mut run: impl FnMut(&Places, Lane) -> Result<()>) -> Result<Graph<'a>> {
        let stream = self.stream.cu_stream();
        let lane = Lane { stream, workspace: (self.workspace.ptr(), self.workspace.bytes()) };
        let copies = self.inputs.places.iter().cycle();
        // A kernel's first launch may load it, which cannot be recorded.
        copies.clone().take(1).try_for_each(|places| run(places, lane))?;
        self.wait()?;
        let fail = |call| move |error| self.queue.driver_error(call, OP, error);
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is this value's own and not in capture.
        let status = unsafe { sys::cuStreamBeginCapture_v2(stream, mode) };
        status.result().map_err(fail("cuStreamBeginCapture"))?;
        let recorded = copies.take(LAUNCHES).try_for_each(|places| run(places, lane));
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream is in capture, `graph` lives through the call.
        let ended = unsafe { sys::cuStreamEndCapture(stream, &mut graph) };
        let result = recorded.and_then(|()| {
            ended.result().map_err(fail("cuStreamEndCapture"))?;
            let mut executable = std::ptr::null_mut();
            // SAFETY: `graph` was just recorded, `executable` lives through the call.
            let status = unsafe { sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0) };
            status.result().map_err(fail("cuGraphInstantiate"))?;
            Ok(Graph { executable, queue: self.queue })
        });
        if !graph.is_null() {
            // SAFETY: made by cuStreamEndCapture, destroyed once.
            let _ = unsafe { sys::cuGraphDestroy(graph) };
        }
        result
    }

    /// Returns the microseconds of one launch of the graph.
    fn time(&self, graph: &Graph<'_>, start: &Event, end: &Event) -> Result<f32> {
        let stream = self.stream.cu_stream();
        start.record(self.queue, stream)?;
        // SAFETY: instantiated in this context and not destroyed; what it uses lives as long as this value.
        let status = unsafe { sys::cuGraphLaunch(graph.executable, stream) };
        status.result().map_err(|error| self.queue.driver_error("cuGraphLaunch", OP, error))?;
        end.record(self.queue, stream)?;
        self.wait()?;
        // SAFETY: both events are alive, were made with timing and recorded, and have happened.
        let elapsed = unsafe { result::event::elapsed(start.0, end.0) };
        elapsed
            .map(|milliseconds| milliseconds * 1e3)
            .map_err(|error| self.queue.driver_error("cuEventElapsedTime", OP, error))
    }

    fn wait(&self) -> Result<()> {
        let waited = self.stream.synchronize();
        waited.map_err(|error| self.queue.driver_error("cuStreamSynchronize", OP, error))
    }
}

/// Recorded launches of one candidate.
struct Graph<'a> {
    executable: sys::CUgraphExec,
    queue: &'a Queue,
}

impl Drop for Graph<'_> {
    fn drop(&mut self) {
        let _ = self.queue.stream().context().bind_to_thread();
        // SAFETY: instantiated once, destroyed once; a launch in flight ends first.
        let _ = unsafe { sys::cuGraphExecDestroy(self.executable) };
    }
}

/// Operands of random numbers, in enough copies that no launch finds its operands in the cache.
struct Inputs {
    places: Vec<Places>,
    _buffers: Vec<Buffer>,
}

impl Inputs {
    /// Returns `None` if there is no memory for a single copy.
    fn new(queue: &Queue, product: &Product) -> Result<Option<Self>> {
        let mut all = Self { places: Vec::new(), _buffers: Vec::new() };
        match all.fill(queue, product) {
            Ok(()) | Err(Error::OutOfMemory { .. }) => Ok((!all.places.is_empty()).then_some(all)),
            Err(error) => Err(error),
        }
    }

    fn fill(&mut self, queue: &Queue, product: &Product) -> Result<()> {
        let Product { m, n, k, .. } = *product;
        let sizes = [product.left.bytes(m * k), product.right.bytes(n * k), product.out.bytes(m * n)];
        let l2 = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE;
        let l2 = queue.stream().context().attribute(l2).unwrap_or(0);
        let wanted = 2 * usize::try_from(l2).unwrap_or(0) / sizes.iter().sum::<usize>().max(1);
        let scale = queue.filled_f32(1.0, 1)?;
        let amax = queue.filled_f32(0.0, 1)?;
        let bias = queue.zeros(DType::U8, product.bias.map_or(0, |kind| kind.bytes(n)))?;
        let [left_factors, right_factors] = [(0, m), (1, n)].map(|(side, rows)| {
            let factors = product.factors[side];
            let (_, count) = factors.size(rows, k);
            match factors.one() {
                Some(byte) => queue.upload(&vec![byte; count]),
                None => queue.filled_f32(1.0, count),
            }
        });
        let (left_factors, right_factors) = (left_factors?, right_factors?);
        let (left_scale, right_scale) = (left_factors.ptr(), right_factors.ptr());
        self._buffers.extend([&scale, &amax, &bias, &left_factors, &right_factors].map(Clone::clone));
        for copy in 0..(wanted + 1).min(COPIES) {
            let [left, right, out] =
                [(0, product.left), (1, product.right), (2, product.out)].map(|(i, kind)| {
                    let buffer = queue.alloc(DType::U8, sizes[i])?;
                    fill(queue, &buffer, kind, (copy * 3 + i) as u64)?;
                    Ok::<_, Error>(buffer)
                });
            let buffers = [left?, right?, out?];
            let [left, right, out] = buffers.each_ref().map(Buffer::ptr);
            let addend = product.addend.then(|| queue.alloc(DType::U8, sizes[2])).transpose()?;
            if let Some(addend) = &addend {
                fill(queue, addend, product.out, (COPIES * 3 + copy) as u64)?;
            }
            self.places.push(Places {
                left,
                right,
                out,
                addend: addend.as_ref().map_or(0, Buffer::ptr),
                bias: bias.ptr(),
                left_scale,
                right_scale,
                out_scale: scale.ptr(),
                out_amax: amax.ptr(),
                alpha: scale.ptr(),
                accumulate: false,
            });
            self._buffers.extend(buffers.into_iter().chain(addend));
        }
        Ok(())
    }
}

/// Fills the buffer by repeating a block of finite values of either sign that span a few powers of two.
fn fill(queue: &Queue, buffer: &Buffer, kind: Type, seed: u64) -> Result<()> {
    const BLOCK: usize = 1 << 16;
    let mut state = seed;
    let mut next = || {
        // splitmix64
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    };
    // The bits that vary and the bits that are always set, for magnitudes from 1/8 to 2.
    let (mask, base, words): (u64, u64, usize) = match kind {
        Type::F32 => (0x81ff_ffff, 0x3e00_0000, 4),
        Type::Bf16 => (0x81ff, 0x3e00, 2),
        Type::F16 => (0x8fff, 0x3000, 2),
        Type::E4m3 => (0x9f, 0x20, 1),
        Type::E5m2 => (0x8f, 0x30, 1),
        // Two codes with an odd magnitude each: 1/2 to 6.
        Type::E2m1 => (0xee, 0x11, 1),
    };
    let len = buffer.bytes().min(BLOCK);
    let block: Vec<u8> = (0..len.div_ceil(words))
        .flat_map(|_| (next() & mask | base).to_le_bytes().into_iter().take(words))
        .collect();
    queue.write(buffer.ptr(), &block[..len])?;
    let mut done = len;
    while done < buffer.bytes() {
        let more = done.min(buffer.bytes() - done);
        queue.copy(buffer.ptr() + done as u64, buffer.ptr(), more)?;
        done += more;
    }
    Ok(())
}

/// A driver event with timing.
struct Event(sys::CUevent);

impl Event {
    fn new(queue: &Queue) -> Result<Self> {
        result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)
            .map(Self)
            .map_err(|error| queue.driver_error("cuEventCreate", OP, error))
    }

    fn record(&self, queue: &Queue, stream: sys::CUstream) -> Result<()> {
        // SAFETY: both are this device's and alive.
        unsafe { result::event::record(self.0, stream) }
            .map_err(|error| queue.driver_error("cuEventRecord", OP, error))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `new` and destroyed once.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_choice_stays_unless_another_is_faster_by_more_than_the_margin() {
        let pick = |times: &[f32]| better(&times.iter().map(|time| Some(*time)).collect::<Vec<_>>());
        assert_eq!(pick(&[]), None);
        assert_eq!(pick(&[10.0, 9.9, 9.801]), Some(0));
        assert_eq!(pick(&[10.0, 9.9, 9.799]), Some(2));
        assert_eq!(pick(&[10.0, 9.0, 8.0, 9.0]), Some(2));
        assert_eq!(pick(&[8.0, 9.0]), Some(0));
        // One that does not run is not compared with.
        assert_eq!(better(&[None, Some(5.0), Some(4.99)]), Some(2));
        assert_eq!(better(&[Some(5.0), None]), Some(0));
        assert_eq!(better(&[None, None]), None);
    }
}
