//! The objects behind cuDNN's handles.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::answers::Choice;
use super::graph::{Graph, Operation, Part, Tensor};

/// The objects that were created and not destroyed, by handle.
#[derive(Debug, Default)]
pub(crate) struct Dnn {
    /// Library handles with their streams.
    pub(super) handles: BTreeMap<u64, u64>,
    pub(super) descriptors: BTreeMap<u64, Descriptor>,
    /// A text about the newest failure.
    pub(super) message: String,
}

impl Dnn {
    /// One line for each kind of handle with its count.
    pub(crate) fn live(&self) -> String {
        let counts = [("cudnn handles", self.handles.len()), ("cudnn descriptors", self.descriptors.len())];
        let live = counts.iter().filter(|(_, count)| *count > 0);
        live.map(|(kind, count)| format!("{kind} {count}\n")).collect()
    }
}

#[derive(Debug)]
pub(super) struct Descriptor {
    pub(super) kind: i32,
    pub(super) values: BTreeMap<i32, Values>,
    /// The object that it became when it was finalized.
    pub(super) made: Option<Made>,
}

/// An attribute's values.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Values {
    Ints(Vec<i64>),
    Doubles(Vec<f64>),
    Flags(Vec<bool>),
    /// Values of an enumeration.
    Numbers(Vec<i32>),
    /// Addresses, library handles and descriptors.
    Words(Vec<u64>),
}

/// A finalized descriptor.
#[derive(Clone, Debug)]
pub(super) enum Made {
    Tensor(Tensor),
    Part(Part),
    Operation(Box<Operation>),
    Graph(Arc<Graph>),
    Heuristics(Arc<Graph>),
    Engine { graph: Arc<Graph>, number: i64 },
    Knob { kind: i32, value: i64 },
    Configuration { graph: Arc<Graph>, choice: Choice },
    Plan { graph: Arc<Graph>, workspace: u64 },
    Pack { ids: Vec<i64>, pointers: Vec<u64>, workspace: u64 },
}
