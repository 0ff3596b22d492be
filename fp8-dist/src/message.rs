//! The message that a rank brings to an exchange, and the comparison of messages.

use crate::{Failure, ReduceOp, Result, host};
use fp8_kernels::{DType, Shape, Tensor};
use std::fmt;
use std::sync::Arc;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Operation {
    AgreeOnNames,
    AgreeOnState,
    AllReduceArena,
    AllReduce(ReduceOp),
    AllGather,
    ReduceScatter(ReduceOp),
    Broadcast { root: usize },
    Barrier,
    Split,
    Connect,
    AllToAll,
    Send { to: usize },
    Receive { from: usize },
}

/// A collective and the name it was called with.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Call {
    pub(crate) operation: Operation,
    pub(crate) what: String,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.operation {
            Operation::AgreeOnNames => write!(f, "agree_on_names"),
            Operation::AgreeOnState => write!(f, "agree_on_state"),
            Operation::AllReduceArena => write!(f, "all_reduce_max"),
            Operation::AllReduce(op) => write!(f, "all_reduce({op})"),
            Operation::AllGather => write!(f, "all_gather"),
            Operation::ReduceScatter(op) => write!(f, "reduce_scatter({op})"),
            Operation::Broadcast { root } => write!(f, "broadcast(from rank {root})"),
            Operation::Barrier => return write!(f, "barrier"),
            Operation::Split => write!(f, "split into"),
            Operation::Connect => return write!(f, "connections between all ranks"),
            Operation::AllToAll => write!(f, "all_to_all"),
            Operation::Send { to } => write!(f, "send(to rank {to})"),
            Operation::Receive { from } => write!(f, "receive(from rank {from})"),
        }?;
        write!(f, " `{}`", self.what)
    }
}

#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) call: Call,
    pub(crate) names: Vec<Arc<str>>,
    pub(crate) part: Option<Part>,
}

/// The tensor of a rank. In a broadcast only the root sends data.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    pub(crate) dtype: DType,
    pub(crate) shape: Shape,
    pub(crate) data: Option<Tensor>,
}

impl Part {
    /// Copies the tensor, because others may read the message after this rank has changed it.
    pub(crate) fn copy(x: &Tensor) -> Result<Self> {
        Ok(Self { data: Some(host::copy(x)?), ..Self::expected(x) })
    }

    /// Describes the dtype and shape that a rank expects from the root.
    pub(crate) fn expected(x: &Tensor) -> Self {
        Self { dtype: x.dtype(), shape: *x.shape(), data: None }
    }
}

impl Message {
    pub(crate) fn new(operation: Operation, what: &str) -> Self {
        Self { call: Call { operation, what: what.to_owned() }, names: Vec::new(), part: None }
    }

    pub(crate) fn with(self, part: Part) -> Self {
        Self { part: Some(part), ..self }
    }

    /// Returns whether the elements that `rank` has announced with this message go directly from rank to rank.
    pub(crate) fn is_announced(&self, rank: usize) -> bool {
        let is_sender = match self.call.operation {
            Operation::AllReduce(_) | Operation::AllGather | Operation::ReduceScatter(_) => true,
            Operation::Broadcast { root } => root == rank,
            // Elements may follow counts.
            Operation::AllToAll => return true,
            _ => false,
        };
        is_sender && self.part.as_ref().is_some_and(|part| part.data.is_none())
    }

    /// Returns the first difference between rank 0 and another rank, in rank order.
    pub(crate) fn first_difference(all: &[Self]) -> Option<Failure> {
        let (first, others) = all.split_first()?;
        others.iter().zip(1..).find_map(|(message, rank)| message.difference(rank, first))
    }

    fn difference(&self, rank: usize, first: &Self) -> Option<Failure> {
        let disagree = |property, values: [String; 2]| {
            let [value, other_value] = values;
            Some(Failure::Disagree { property, rank, value, other: 0, other_value })
        };
        if self.call != first.call {
            let is_comparison = |message: &Self| message.call.operation == Operation::AgreeOnState;
            let lone = |comparing: usize, call: &Call, other: usize, other_call: &Call| {
                let [call, other_call] = [call, other_call].map(Call::to_string);
                Some(Failure::Lone { comparing, call, other, other_call })
            };
            match [self, first].map(is_comparison) {
                [true, false] => return lone(rank, &self.call, 0, &first.call),
                [false, true] => return lone(0, &first.call, rank, &self.call),
                _ => {}
            }
            return disagree("the call", [self, first].map(|message| message.call.to_string()));
        }
        if self.call.operation == Operation::AgreeOnState {
            return None; // what differs is the result
        }
        if self.names != first.names && self.call.operation != Operation::AgreeOnNames {
            let shapes = |message: &Self| message.names.join(", "); // those of several tensors in one call, of rows, of a result
            return disagree("the shape", [self, first].map(shapes));
        }
        if self.names != first.names {
            let pairs = self.names.iter().zip(&first.names);
            let index = pairs.take_while(|(theirs, ours)| theirs == ours).count();
            let [value, other_value] = [self, first].map(|message| message.names.get(index).cloned());
            return Some(Failure::Names { index, rank, value, other: 0, other_value });
        }
        let parts = [self.part.as_ref()?, first.part.as_ref()?];
        let [theirs, ours] = parts;
        if theirs.dtype != ours.dtype {
            return disagree("the dtype", parts.map(|part| part.dtype.to_string()));
        }
        let shapes = || parts.map(|part| part.shape.to_string());
        match self.call.operation {
            Operation::Split | Operation::Connect | Operation::AllToAll => None,
            Operation::AllGather if theirs.shape.get(1..) == ours.shape.get(1..) => None,
            Operation::AllGather => disagree("the shape, dimension 0 aside,", shapes()),
            _ if theirs.shape == ours.shape => None,
            _ => disagree("the shape", shapes()),
        }
    }
}

impl Message {
    /// Returns whether one rank may send it to another.
    pub(crate) fn is_mail(&self) -> bool {
        matches!(self.call.operation, Operation::Send { .. }) && self.names.is_empty() && self.part.is_some()
    }

    /// Returns how a message that rank `from` has sent to rank `to` differs from the one that rank `to` expects.
    pub(crate) fn difference_in_mail(&self, from: usize, expected: &Self, to: usize) -> Option<Failure> {
        let [sent, awaited] = [self, expected];
        let disagree = |property, [value, other_value]: [String; 2]| {
            Some(Failure::Disagree { property, rank: from, value, other: to, other_value })
        };
        if sent.call.what != awaited.call.what {
            return disagree("the call", [sent, awaited].map(|message| message.call.to_string()));
        }
        let (Some(given), Some(wanted)) = (&sent.part, &awaited.part) else {
            return Some(Failure::Lost {
                rank: from,
                reason: "it sent a message without a tensor".to_owned(),
            });
        };
        if given.dtype != wanted.dtype {
            return disagree("the dtype", [given, wanted].map(|part| part.dtype.to_string()));
        }
        if given.shape != wanted.shape {
            return disagree("the shape", [given, wanted].map(|part| part.shape.to_string()));
        }
        None
    }
}

/// Returns the call, which is equal on all ranks.
pub(crate) fn call_of(all: &[Message]) -> String {
    all.first().map(|message| message.call.to_string()).unwrap_or_default()
}
