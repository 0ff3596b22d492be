//! What can go wrong between ranks, with their numbers, and what would be right.

use fp8_kernels::{DType, Shape};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Every error of this crate. `call` is the collective and what it was for: ``all_reduce(sum) `grads` ``.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// This call brought the group to its end, or it was waiting when that happened.
    #[error("{call}: {failure}")]
    Failed {
        /// The collective.
        call: String,
        /// Why.
        failure: Failure,
    },
    /// The group had come to its end before this call.
    #[error("{call}: this group failed before ({failure}); build a new group to go on")]
    Poisoned {
        /// The collective.
        call: String,
        /// Why it failed then.
        failure: Failure,
    },
    /// Shards of one tensor that were to be quantized with different scales.
    #[error(
        "{call}: the scale is {} on rank {rank} and {} on rank {other}: shards of one tensor need one scale; \
         commit the same scopes on all ranks, with reduce_amax and this group as amax_reduction_group",
        show_scale(.value), show_scale(.other_value)
    )]
    Scales {
        /// The collective.
        call: String,
        /// The first rank that differs from rank `other`.
        rank: usize,
        /// Its scale; `None` before its first.
        value: Option<f32>,
        /// The rank it was compared with.
        other: usize,
        /// That one's scale.
        other_value: Option<f32>,
    },
    /// Replicas with different training state, the same on all ranks: [`AmaxGroup::agree_on_state`](crate::AmaxGroup). The
    /// group remains usable.
    #[error(
        "{call}: {name} {}: ranks that go on from different states drift apart; give all ranks one state: \
         `broadcast_state`, or load the same checkpoint on all",
        show_difference([*.rank, *.other], [*.is_there, *.is_on_other])
    )]
    State {
        /// The collective.
        call: String,
        /// The first piece of state that differs, such as ``the value of `fc.weight` ``.
        name: Arc<str>,
        /// The first rank that differs from rank `other`.
        rank: usize,
        /// Whether it has this piece at all.
        is_there: bool,
        /// The rank it was compared with.
        other: usize,
        /// Whether that one has this piece.
        is_on_other: bool,
    },
    /// A shard with other extents than its name had in an earlier gather, where the ranks do not ask each other again.
    #[error(
        "{call}: a shard of shape {found}, where this name had {expected} before: on GPUs a name keeps its extents; use \
         another name for other extents"
    )]
    Extents {
        /// The collective.
        call: String,
        /// The shape it got.
        found: Shape,
        /// The shape it had.
        expected: Shape,
    },
    /// A shape that the collective cannot take, the same on all ranks.
    #[error("{call}: shape {shape} on {world_size} ranks: {remedy}")]
    Shape {
        /// The collective.
        call: String,
        /// The shape it got.
        shape: Shape,
        /// How many ranks.
        world_size: usize,
        /// What would be right.
        remedy: &'static str,
    },
    /// A data type that the collective does not take, the same on all ranks.
    #[error("{call}: dtype {found}: expected {expected}; cast first")]
    DType {
        /// The collective.
        call: String,
        /// The type it got.
        found: DType,
        /// The types that are allowed.
        expected: &'static str,
    },
    /// A root that is no rank of the group, the same on all ranks.
    #[error("{call}: root {root} is not a rank of this group: expected 0..{world_size}")]
    Root {
        /// The collective.
        call: String,
        /// The root it got.
        root: usize,
        /// How many ranks.
        world_size: usize,
    },
    /// An option of a new group outside its range.
    #[error("group `{id}`: {option} = {value}: {remedy}")]
    Option {
        /// The group's id.
        id: String,
        /// The option's name.
        option: &'static str,
        /// Its value.
        value: String,
        /// What would be right.
        remedy: &'static str,
    },
    /// A variable of the environment that is missing, cannot be read or contradicts another.
    #[error(
        "{name}{}: {remedy}",
        .value.as_ref().map_or_else(|| " is not set".to_owned(), |value| format!("={value}"))
    )]
    Environment {
        /// The variable.
        name: &'static str,
        /// Its value, if it has one.
        value: Option<String>,
        /// What would be right.
        remedy: String,
    },
    /// Ranks in processes that did not come together to form a group.
    #[error("group `{id}`: the ranks did not meet: {failure}")]
    Rendezvous {
        /// The group's id.
        id: String,
        /// Why.
        failure: Failure,
    },
    /// A system call of the network that failed while a group was formed.
    #[error("group `{id}`: {what}: {source}")]
    Network {
        /// The group's id.
        id: String,
        /// What was tried, with the address.
        what: String,
        /// The system's words.
        source: std::io::Error,
    },
    /// A tensor on another device than the group's.
    #[error("{call}: a tensor on {found}: expected one on {expected}")]
    Device {
        /// The collective.
        call: String,
        /// Where it is.
        found: String,
        /// Where it should be.
        expected: String,
    },
    /// What NCCL said while a group was formed.
    #[error("group `{id}`: {function}: {text}")]
    Nccl {
        /// The group's id.
        id: String,
        /// The function of NCCL.
        function: &'static str,
        /// Its words.
        text: String,
    },
    /// From the operations on one rank.
    #[error(transparent)]
    Kernels(Box<fp8_kernels::Error>),
}

/// Writes the same sentence as `Display`, so that `fn main() -> Result<()>` and `unwrap` print it.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    /// Why the group came to its end, if this error says so.
    pub const fn failure(&self) -> Option<&Failure> {
        match self {
            Self::Failed { failure, .. }
            | Self::Poisoned { failure, .. }
            | Self::Rendezvous { failure, .. } => Some(failure),
            _ => None,
        }
    }
}

/// Why a group came to its end. All its ranks get the same one.
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// A rank said that it does not go on: [`AmaxGroup::poison`](crate::AmaxGroup::poison).
    #[error("rank {rank} gave up: {reason}")]
    GaveUp {
        /// The rank.
        rank: usize,
        /// Its words.
        reason: String,
    },
    /// Ranks that dropped their handles while others waited for them.
    #[error("{} left the group: every rank makes the same number of calls", list(.ranks))]
    Left {
        /// The ranks.
        ranks: Vec<usize>,
    },
    /// Ranks that did not come in time.
    #[error(
        "{} did not come within {waited:?}: see where they are, or give the group a longer deadline",
        list(.missing)
    )]
    Deadline {
        /// The ranks.
        missing: Vec<usize>,
        /// The group's deadline.
        waited: Duration,
    },
    /// A rank whose process ended, or whose connection broke, before it had left the group.
    #[error("rank {rank} is lost: {reason}")]
    Lost {
        /// The rank.
        rank: usize,
        /// How that was noticed.
        reason: String,
    },
    /// Ranks that were started with different settings.
    #[error(
        "{property} is {value} on rank {rank} and {other_value} on rank {other}: start all ranks of a group alike"
    )]
    Settings {
        /// The first thing that differs.
        property: String,
        /// The rank that differs from rank `other`.
        rank: usize,
        /// Its value there.
        value: String,
        /// The rank it was compared with.
        other: usize,
        /// That one's value.
        other_value: String,
    },
    /// Two processes that say they are the same rank.
    #[error("two processes came as rank {rank}: give each its own RANK")]
    Twice {
        /// The rank.
        rank: usize,
    },
    /// Two jobs with the same settings, whose ranks could join either.
    #[error(
        "two jobs use MASTER_PORT {port} at the same time and nothing tells them apart: give each its own MASTER_PORT or \
         TORCHELASTIC_RUN_ID"
    )]
    SecondJob {
        /// The port of both.
        port: u16,
    },
    /// Ranks that have different tokens, or of which only one has a token.
    #[error(
        "FP8_DIST_TOKEN is not the same on rank {rank} and on rank 0: give all ranks of a job one token, or none at all"
    )]
    Token {
        /// The rank that differs from rank 0.
        rank: usize,
    },
    /// Ranks that came with different calls.
    #[error(
        "{property} is {value} on rank {rank} and {other_value} on rank {other}: \
         all ranks make the same calls in the same order, with one dtype and shape"
    )]
    Disagree {
        /// The first thing that differs.
        property: &'static str,
        /// The first rank that differs from rank `other`.
        rank: usize,
        /// What it came with.
        value: String,
        /// The rank it was compared with.
        other: usize,
        /// What that one came with.
        other_value: String,
    },
    /// A rank that compares its state, because it was loaded or set there, while another rank goes on.
    #[error(
        "rank {comparing} came with {call} and rank {other} with {other_call}: parameters, optimizer or scaling state were \
         loaded or set on rank {comparing} and not on rank {other}; load or set them on all ranks, or call \
         `broadcast_state` on all"
    )]
    Lone {
        /// The rank that compares its state.
        comparing: usize,
        /// Its call.
        call: String,
        /// A rank that does not.
        other: usize,
        /// That one's call.
        other_call: String,
    },
    /// Ranks whose models have different names.
    #[error(
        "name {index} is {} on rank {rank} and {} on rank {other}: build the same model on all ranks",
        show_name(.value), show_name(.other_value)
    )]
    Names {
        /// Position of the first difference.
        index: usize,
        /// The first rank that differs from rank `other`.
        rank: usize,
        /// Its name there; `None` past the end of its list.
        value: Option<Arc<str>>,
        /// The rank it was compared with.
        other: usize,
        /// That one's name there.
        other_value: Option<Arc<str>>,
    },
}

/// Writes the same sentence as `Display`, so that `fn main() -> Result<()>` and `unwrap` print it.
impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// This crate's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl From<fp8_kernels::Error> for Error {
    fn from(error: fp8_kernels::Error) -> Self {
        Self::Kernels(Box::new(error))
    }
}

/// Lets `?` carry this crate's errors through [`AmaxGroup`](crate::AmaxGroup), whose crate does not know them.
impl From<Error> for fp8_recipe::Error {
    fn from(error: Error) -> Self {
        Self::Group(Box::new(error))
    }
}

fn show_name(name: &Option<Arc<str>>) -> String {
    name.as_ref().map_or_else(|| "missing".to_owned(), |name| format!("`{name}`"))
}

fn show_difference([rank, other]: [usize; 2], [is_there, is_on_other]: [bool; 2]) -> String {
    match (is_there, is_on_other) {
        (true, false) => format!("is missing on rank {other}, and rank {rank} has it"),
        (false, true) => format!("is missing on rank {rank}, and rank {other} has it"),
        _ => format!("differs between rank {rank} and rank {other}"),
    }
}

fn show_scale(scale: &Option<f32>) -> String {
    scale.map_or_else(|| "unset".to_owned(), |scale| scale.to_string())
}

/// `rank 2`, `ranks 0, 2 and 3`.
fn list(ranks: &[usize]) -> String {
    let commas = |ranks: &[usize]| ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    match ranks {
        [rank] => format!("rank {rank}"),
        [first @ .., last] => format!("ranks {} and {last}", commas(first)),
        [] => "no rank".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_prints_the_sentence() {
        let failure = Failure::GaveUp { rank: 1, reason: "out of memory".to_owned() };
        assert_eq!(format!("{failure:?}"), "rank 1 gave up: out of memory");
        let error = Error::Failed { call: "barrier".to_owned(), failure };
        assert_eq!(format!("{error:?}"), "barrier: rank 1 gave up: out of memory");
        assert_eq!(format!("{error:?}"), error.to_string());
    }
}
