//! cuDNN on one device: which calls of attention it serves, and the plans made for them.
//!
//! A plan takes the library about a second, so it is made once for each kind of call and kept until the device is dropped:
//! work that is queued or recorded may still use it. A call that the library has no kernel for is remembered as well.

use super::attention::{Attention, Direction, Sums};
use super::describe::Target;
use super::graph::Place;
use super::library::{Cudnn, Failure, Handle, written};
use super::numbers::{
    COMPILATION_FAILED, DEVICE_ALLOCATION_FAILED, EXECUTION_FAILED, HOST_ALLOCATION_FAILED, Knob,
    NOT_SUPPORTED, is_lasting,
};
use super::plan::{Choice, Plan};
use crate::backend::cuda::runtime::queue::Queue;
use crate::{DType, Error, Result};
use std::collections::{HashMap, HashSet};

/// Plans kept at a time. Further kinds of calls are not served, which is told once.
const MOST_PLANS: usize = 256;
/// Refused kinds of calls that are remembered at a time.
const MOST_REFUSED: usize = 4096;

/// Addresses of a call's tensors. Memory that only the library uses is not among them.
pub(crate) trait Bound {
    /// The address of the tensor at `place`.
    fn address(&self, place: Place) -> u64;
}

impl<F: Fn(Place) -> u64> Bound for F {
    fn address(&self, place: Place) -> u64 {
        self(place)
    }
}

/// The library on one device, with the plans made so far.
pub(crate) struct Dnn {
    library: Cudnn,
    handle: Handle,
    capability: (i32, i32),
    plans: HashMap<Key, Plan>,
    /// Calls that the library has no kernel for.
    refused: HashSet<Key>,
    is_full: bool,
}

// SAFETY: handles belong to the process, not to a thread; they are used behind the device's lock.
unsafe impl Send for Dnn {}

/// A kind of call, and whether its result must not depend on the order in which parts of it finish.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    call: Attention,
    deterministic: bool,
}

impl Dnn {
    /// Opens the library on the device of `queue`, whose context is current. `None` if it does not run here, as one for a newer
    /// driver does not: the device goes without it until it is opened again.
    pub(in super::super) fn open(queue: &Queue, library: &Cudnn) -> Result<Option<Self>> {
        match Self::opened(queue, library) {
            Ok(opened) => Ok(Some(opened)),
            Err(failure) if is_lasting(failure.1) => Err(error(library, "attention", failure)),
            Err(failure) => {
                let reason = error(library, "attention", failure);
                tracing::warn!(%reason, "attention without cuDNN");
                Ok(None)
            }
        }
    }

    fn opened(queue: &Queue, library: &Cudnn) -> Result<Self, Failure> {
        let handle = library.create()?;
        let (capability, plans, refused) = (queue.capability(), HashMap::new(), HashSet::new());
        let opened = Self { library: *library, handle, capability, plans, refused, is_full: false };
        match library.set_stream(handle, queue.raw_stream().cast()) {
            Ok(()) => Ok(opened),
            Err(failure) => {
                library.destroy(handle);
                Err(failure)
            }
        }
    }

    /// Returns whether batch entries may have no queries or no keys: before 9.25 their results are NaN.
    pub(crate) fn takes_empty_sequences(&self) -> bool {
        self.library.version() >= 9_25_00
    }

    /// Returns the way in which the library adds up the queries' gradients of such a call, or `None` if it is not to serve it.
    pub(crate) fn sums(&self, deterministic: bool) -> Option<Sums> {
        way(self.capability, self.library.version(), deterministic).map(|(sums, _)| sums)
    }

    /// Returns whether the library serves a call. The first one of its kind is planned.
    pub(crate) fn serves(
        &mut self,
        queue: &Queue,
        op: &'static str,
        call: &Attention,
        deterministic: bool,
    ) -> Result<bool> {
        let key = Key { call: *call, deterministic };
        if self.plans.contains_key(&key) || self.refused.contains(&key) {
            return Ok(self.plans.contains_key(&key));
        }
        if self.plans.len() >= MOST_PLANS {
            if !std::mem::replace(&mut self.is_full, true) {
                let (call, plans) = (describe(call), MOST_PLANS);
                tracing::warn!(op, call, plans, "no more attention is planned by cuDNN");
            }
            return Ok(false);
        }
        queue.expect_eager(op, "attention is not planned yet: run the step a few times before")?;
        if let Some(plan) = self.plan(op, &key)? {
            self.plans.insert(key, plan);
            return Ok(true);
        }
        if self.refused.len() >= MOST_REFUSED {
            self.refused.clear();
        }
        self.refused.insert(key);
        Ok(false)
    }

    fn plan(&self, op: &'static str, key: &Key) -> Result<Option<Plan>> {
        let choice = match key.call.direction {
            Direction::Forward => Some(Choice::Heuristics),
            Direction::Backward(_) => {
                way(self.capability, self.library.version(), key.deterministic).map(|(_, choice)| choice)
            }
        };
        let Some(choice) = choice else { return Ok(None) };
        let call = describe(&key.call);
        match Plan::new(&self.library, &key.call.graph(), choice, Target::Handle(self.handle)) {
            Ok(plan) => {
                tracing::debug!(op, call, workspace = plan.workspace, "attention planned by cuDNN");
                Ok(Some(plan))
            }
            Err(failure) if is_lasting(failure.1) => Err(error(&self.library, op, failure)),
            Err((function, status)) => {
                let why = self.library.describe(status);
                if NOT_SUPPORTED.contains(&status) || status == COMPILATION_FAILED {
                    tracing::debug!(op, call, function, status, why, "cuDNN has no kernel");
                } else {
                    tracing::warn!(op, call, function, status, why, "cuDNN refused to plan attention");
                }
                Ok(None)
            }
        }
    }

    /// Enqueues a call that the library serves.
    ///
    /// # Safety
    /// `bound` returns addresses of memory on this device, used on its stream, as the call describes it.
    pub(crate) unsafe fn run(
        &self,
        queue: &Queue,
        op: &'static str,
        call: &Attention,
        deterministic: bool,
        scale: f32,
        bound: &impl Bound,
    ) -> Result<()> {
        let Some(plan) = self.plans.get(&Key { call: *call, deterministic }) else {
            return Err(error(&self.library, op, ("cudnnBackendExecute", NOT_SUPPORTED.start)));
        };
        // Freed when this returns: later work on the stream may use the memory again.
        let workspace = queue.alloc(DType::U8, plan.workspace)?;
        let rows = call.batch * call.heads * call.queries;
        let (row_sums, query_sums) = match call.direction {
            Direction::Forward => (0, 0),
            Direction::Backward(Sums::Direct) => (rows, 0),
            Direction::Backward(Sums::InMemory) => (rows, rows * call.head_dim),
        };
        let row_sums = queue.alloc(DType::F32, row_sums)?;
        let query_sums = queue.alloc(DType::F32, query_sums)?;
        if query_sums.len() > 0 {
            // Kernels that add with atomics may rely on zeros.
            queue.clear(&query_sums)?;
        }
        let address = |place| match place {
            Place::RowSums => row_sums.ptr(),
            Place::QuerySums => query_sums.ptr(),
            place => bound.address(place),
        };
        // SAFETY: memory of the library's own was made above with the extents of its tensors; the caller vouches for the rest.
        let enqueued = unsafe { plan.run(&self.library, self.handle, scale, workspace.ptr(), address) };
        enqueued.map_err(|failure| {
            let failed = error(&self.library, op, failure);
            if failure.1 >= EXECUTION_FAILED {
                queue.poison(failed.to_string());
            }
            failed
        })
    }

    /// Gives back all it holds; the device's context is current, and none of its work runs any more.
    pub(in super::super) fn release(&mut self) {
        self.plans.clear();
        self.library.destroy(self.handle);
    }
}

/// The kernels for backward on Hopper that add up a query's gradient in order, from cuDNN 9.25 on: `STAGES` 4.
const ORDERED_ON_HOPPER: Choice = Choice::Engine {
    number: 6,
    knobs: &[
        (Knob::TileRows, 2),
        (Knob::TileColumns, 1),
        (Knob::KernelConfig, 2),
        (Knob::StreamK, 0),
        (Knob::ClusterRows, 0),
        (Knob::Stages, 4),
    ],
};

/// The same on GPUs of compute capability 10.0 and 10.3, as cudnn-frontend asks for them: `STAGES` 2. Knobs were renamed in
/// cuDNN 9.23.
const ORDERED_ON_BLACKWELL: Choice = Choice::Engine {
    number: 5,
    knobs: &[
        (Knob::TileRows, 3),
        (Knob::TileColumns, 2),
        (Knob::KernelConfig, 2),
        (Knob::StreamK, 0),
        (Knob::ClusterRows, 0),
        (Knob::Stages, 2),
    ],
};
const ORDERED_ON_BLACKWELL_BEFORE_9_23: Choice =
    Choice::Engine { number: 5, knobs: &[(Knob::KernelConfig, 31), (Knob::Stages, 2)] };

/// The form of backward and the kernels for it. `None` if the library has none whose sums are ordered.
pub(super) const fn way(
    capability: (i32, i32),
    version: usize,
    deterministic: bool,
) -> Option<(Sums, Choice)> {
    match (deterministic, capability) {
        (false, _) => Some((Sums::InMemory, Choice::Heuristics)),
        (true, (9, 0)) if version >= 9_25_00 => Some((Sums::InMemory, ORDERED_ON_HOPPER)),
        (true, (10, 0 | 3)) if version >= 9_23_00 => Some((Sums::Direct, ORDERED_ON_BLACKWELL)),
        (true, (10, 0 | 3)) => Some((Sums::Direct, ORDERED_ON_BLACKWELL_BEFORE_9_23)),
        (true, _) => None,
    }
}

/// `forward bf16 [8, 2048, 32, 128] with [8, 2048, 8, 128], Mask { … }, All`.
fn describe(call: &Attention) -> String {
    let Attention { batch, heads, groups, queries, keys, head_dim, mask, lengths, .. } = call;
    let direction = match call.direction {
        Direction::Forward => "forward",
        Direction::Backward(_) => "backward",
    };
    let element = call.element.name();
    format!(
        "{direction} {element} [{batch}, {queries}, {heads}, {head_dim}] with [{batch}, {keys}, {groups}, {head_dim}], {mask:?}, {lengths:?}"
    )
}

/// The error of a call that runs though no cuDNN serves it.
pub(in super::super) fn not_open(op: &'static str) -> Error {
    Error::Cudnn {
        op,
        call: "cudnnBackendExecute",
        code: NOT_SUPPORTED.start,
        text: "cuDNN is not open".to_owned(),
        remedy: "FP8_CUDNN=0 computes attention without it".to_owned(),
    }
}

fn error(library: &Cudnn, op: &'static str, (call, status): Failure) -> Error {
    Error::Cudnn {
        op,
        call,
        code: status,
        text: library.describe(status),
        remedy: match status {
            HOST_ALLOCATION_FAILED | DEVICE_ALLOCATION_FAILED => {
                "the host or the device is out of memory: free tensors".to_owned()
            }
            EXECUTION_FAILED.. => "the device failed before: start the process again".to_owned(),
            _ => format!("cuDNN {}: FP8_CUDNN=0 computes attention without it", written(library.version())),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backward_is_ordered_where_the_library_can() {
        let sums = |capability, version| way(capability, version, true).map(|(sums, _)| sums);
        assert_eq!(sums((9, 0), 9_25_00), Some(Sums::InMemory));
        assert_eq!(sums((9, 0), 9_24_01), None);
        assert_eq!(sums((10, 0), 9_19_00), Some(Sums::Direct));
        assert_eq!(sums((10, 3), 9_28_01), Some(Sums::Direct));
        for capability in [(8, 9), (11, 0), (12, 0)] {
            assert_eq!(sums(capability, 9_28_01), None, "{capability:?}");
            assert!(way(capability, 9_19_00, false).is_some());
        }
    }
}
