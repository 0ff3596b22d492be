//! The errors of groups: which ranks are concerned, what differs, and what would be right.

use fp8_kernels::{DType, Shape};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Every error of this crate. The field `call` is the collective and the name it was called with: ``all_reduce(sum) `grads` ``.
///
/// ```
/// use fp8_dist::{Environment, Error, tcp};
/// use std::time::Duration;
///
/// let error = tcp("dp", &Environment { rank: 4, world_size: 4, ..Environment::on_this_machine(29_500) }, Duration::from_secs(60));
/// let Err(error @ Error::Environment { name: "RANK", .. }) = error else { panic!("rank 4 of 4 is no rank") };
/// assert_eq!(error.to_string(), "RANK=4: WORLD_SIZE=4: expected 0 to 3");
/// ```
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The group failed during this call. Every rank gets the same [`Failure`].
    #[error("{call}: {failure}")]
    Failed {
        /// The collective.
        call: String,
        /// The reason.
        failure: Failure,
    },
    /// The group had failed before this call.
    #[error("{call}: this group failed before ({failure}); create a new group to continue")]
    Poisoned {
        /// The collective.
        call: String,
        /// The reason of the first failure.
        failure: Failure,
    },
    /// The ranks hold different scales for the shards of one tensor.
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
        /// The scale on that rank; `None` if unset.
        value: Option<f32>,
        /// The rank it was compared with.
        other: usize,
        /// The scale on rank `other`.
        other_value: Option<f32>,
    },
    /// The ranks have different training state ([`AmaxGroup::agree_on_state`](crate::AmaxGroup)). All ranks get this error, and the
    /// group remains usable.
    #[error(
        "{call}: {name} {}: replicas must have the same state; call `broadcast_state`, or load the same checkpoint on all ranks",
        show_difference([*.rank, *.other], [*.is_there, *.is_on_other])
    )]
    State {
        /// The collective.
        call: String,
        /// The first piece of state that differs, such as ``the value of `fc.weight` ``.
        name: Arc<str>,
        /// The first rank that differs from rank `other`.
        rank: usize,
        /// Whether rank `rank` has this piece.
        is_there: bool,
        /// The rank it was compared with.
        other: usize,
        /// Whether rank `other` has this piece.
        is_on_other: bool,
    },
    /// The collective does not support this shape. All ranks get this error, and the group remains usable, but for
    /// [`gather_codes`](crate::gather_codes()), which ends it.
    #[error("{call}: shape {shape} on {world_size} ranks: {remedy}")]
    Shape {
        /// The collective.
        call: String,
        /// The shape of the argument.
        shape: Shape,
        /// The number of ranks.
        world_size: usize,
        /// The requirement on the shape, or a way to meet it.
        remedy: &'static str,
    },
    /// The counts of rows of an `all_to_all` are not one for each rank, or do not add up to the rows of the tensor. All ranks get this
    /// error, and the group remains usable.
    #[error(
        "{call}: rank {rank} has {rows} rows and counts {counts:?}: expected one count for each of {world_size} ranks, which add up to \
         the rows"
    )]
    Counts {
        /// The collective.
        call: String,
        /// The first rank with such counts.
        rank: usize,
        /// Its counts.
        counts: Vec<usize>,
        /// The rows of its tensor.
        rows: usize,
        /// The number of ranks.
        world_size: usize,
    },
    /// The memory that was given for a result has another shape or dtype. All ranks get this error, and the group remains usable.
    #[error("{call}: a result of {expected} does not fit into a tensor of {found}")]
    Output {
        /// The collective.
        call: String,
        /// Shape and dtype of the result: "[4, 3] of f32".
        expected: String,
        /// Shape and dtype of the tensor that was given for it.
        found: String,
    },
    /// A tensor was to be sent to, or received from, a rank that is not another rank of the group. The group remains usable.
    #[error("{call}: expected another rank of this group than {rank}, of 0..{world_size}")]
    Peer {
        /// The call, with the rank that was passed.
        call: String,
        /// This rank.
        rank: usize,
        /// The number of ranks.
        world_size: usize,
    },
    /// The collective does not support this data type. All ranks get this error, and the group remains usable.
    #[error("{call}: dtype {found}: expected {expected}; cast first")]
    DType {
        /// The collective.
        call: String,
        /// The type of the argument.
        found: DType,
        /// The supported types.
        expected: &'static str,
    },
    /// A sum of i32 does not fit into i32. All ranks get this error, and the group remains usable.
    #[error("{call}: a sum does not fit into i32: add smaller numbers, or in f32")]
    Overflow {
        /// The collective.
        call: String,
    },
    /// The root is not a rank of the group. All ranks get this error, and the group remains usable.
    #[error("{call}: root {root} is not a rank of this group: expected 0..{world_size}")]
    Root {
        /// The collective.
        call: String,
        /// The root that was passed.
        root: usize,
        /// The number of ranks.
        world_size: usize,
    },
    /// An option of a new group is out of range.
    #[error("group `{id}`: {option} = {value}: {remedy}")]
    Option {
        /// The group's id.
        id: String,
        /// The option's name.
        option: &'static str,
        /// Its value.
        value: String,
        /// The valid values.
        remedy: &'static str,
    },
    /// An environment variable is missing, cannot be parsed or contradicts another one.
    #[error(
        "{name}{}: {remedy}",
        .value.as_ref().map_or_else(|| " is not set".to_owned(), |value| format!("={value}"))
    )]
    Environment {
        /// The variable.
        name: &'static str,
        /// Its value; `None` if it is not set.
        value: Option<String>,
        /// The valid values, or how to set the variable.
        remedy: String,
    },
    /// The processes could not form a group.
    #[error("group `{id}`: cannot form the group: {failure}")]
    Rendezvous {
        /// The group's id.
        id: String,
        /// The reason.
        failure: Failure,
    },
    /// A network system call failed while the group was formed.
    #[error("group `{id}`: {what}: {source}")]
    Network {
        /// The group's id.
        id: String,
        /// The purpose of the call, with the address if there is one.
        what: String,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// A tensor is not on the group's device.
    #[error("{call}: a tensor on {found}: expected one on {expected}")]
    Device {
        /// The collective.
        call: String,
        /// The device of the tensor.
        found: String,
        /// The device of the group.
        expected: String,
    },
    /// NCCL returned an error while the group was formed.
    #[error("group `{id}`: {function}: {text}")]
    Nccl {
        /// The group's id.
        id: String,
        /// The NCCL function.
        function: &'static str,
        /// NCCL's description of the error.
        text: String,
    },
    /// A tensor operation of this rank failed.
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
    /// Returns why the group failed, if this error ended it or it had failed before.
    pub const fn failure(&self) -> Option<&Failure> {
        match self {
            Self::Failed { failure, .. }
            | Self::Poisoned { failure, .. }
            | Self::Rendezvous { failure, .. } => Some(failure),
            _ => None,
        }
    }
}

/// Why a group failed. All ranks of the group get the same reason, from [`Error::failure`].
///
/// ```
/// use fp8_dist::{Failure, local};
/// use std::time::Duration;
///
/// let [first, second] = <[_; 2]>::try_from(local("dp", 2, Duration::from_secs(10))?).expect("two ranks");
/// drop(second); // rank 1 leaves
/// let error = first.barrier().unwrap_err();
/// assert_eq!(error.failure(), Some(&Failure::Left { ranks: vec![1] }));
/// # Ok::<(), fp8_dist::Error>(())
/// ```
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// A rank cannot continue and called [`AmaxGroup::poison`](crate::AmaxGroup::poison).
    #[error("rank {rank} gave up: {reason}")]
    GaveUp {
        /// The rank.
        rank: usize,
        /// The reason that it passed to `poison`.
        reason: String,
    },
    /// Ranks dropped their handles while other ranks waited for them.
    #[error("{} left the group: every rank must make the same number of calls", list(.ranks))]
    Left {
        /// The ranks.
        ranks: Vec<usize>,
    },
    /// Ranks did not arrive within the deadline.
    #[error(
        "{} did not arrive within {waited:?}: check whether they are still running, or use a longer deadline",
        list(.missing)
    )]
    Deadline {
        /// The ranks.
        missing: Vec<usize>,
        /// The group's deadline.
        waited: Duration,
    },
    /// The process or the connection of a rank ended before the rank had left the group.
    #[error("rank {rank} is lost: {reason}")]
    Lost {
        /// The rank.
        rank: usize,
        /// The event by which the loss was detected.
        reason: String,
    },
    /// Ranks were started with different settings.
    #[error(
        "{property} is {value} on rank {rank} and {other_value} on rank {other}: start all ranks of a group with the same settings"
    )]
    Settings {
        /// The first setting that differs.
        property: String,
        /// The rank that differs from rank `other`.
        rank: usize,
        /// The value on that rank.
        value: String,
        /// The rank it was compared with.
        other: usize,
        /// The value on rank `other`.
        other_value: String,
    },
    /// Two processes have the same rank.
    #[error("two processes joined as rank {rank}: set a different RANK for each")]
    Twice {
        /// The rank.
        rank: usize,
    },
    /// Two jobs have the same settings, so a rank could join the wrong one.
    #[error(
        "two jobs use MASTER_PORT {port} at the same time and cannot be told apart: give each its own MASTER_PORT or \
         TORCHELASTIC_RUN_ID"
    )]
    SecondJob {
        /// The port of both.
        port: u16,
    },
    /// Two ranks have different tokens, or only one of them has a token.
    #[error(
        "FP8_DIST_TOKEN differs between rank {rank} and rank 0: set the same token on all ranks of a job, or none"
    )]
    Token {
        /// The rank that differs from rank 0.
        rank: usize,
    },
    /// Ranks made different calls.
    #[error(
        "{property} is {value} on rank {rank} and {other_value} on rank {other}: \
         all ranks must make the same calls in the same order, with the same dtype and shape"
    )]
    Disagree {
        /// The first property that differs.
        property: &'static str,
        /// The first rank that differs from rank `other`.
        rank: usize,
        /// The value on that rank.
        value: String,
        /// The rank it was compared with.
        other: usize,
        /// The value on rank `other`.
        other_value: String,
    },
    /// A rank compares its state, because state was loaded or set there, while another rank makes another call.
    #[error(
        "rank {comparing} called {call} while rank {other} called {other_call}: parameters, optimizer or scaling state were \
         loaded or set on rank {comparing} and not on rank {other}; load or set them on all ranks, or call \
         `broadcast_state` on all"
    )]
    Lone {
        /// The rank that compares its state.
        comparing: usize,
        /// Its call, which compares states.
        call: String,
        /// A rank that makes another call.
        other: usize,
        /// The call of rank `other`.
        other_call: String,
    },
    /// The models of the ranks have different names.
    #[error(
        "name {index} is {} on rank {rank} and {} on rank {other}: build the same model on all ranks",
        show_name(.value), show_name(.other_value)
    )]
    Names {
        /// The index of the first difference.
        index: usize,
        /// The first rank that differs from rank `other`.
        rank: usize,
        /// The name on that rank; `None` past the end of its list.
        value: Option<Arc<str>>,
        /// The rank it was compared with.
        other: usize,
        /// The name on rank `other`.
        other_value: Option<Arc<str>>,
    },
}

/// Writes the same sentence as `Display`, so that `fn main() -> Result<()>` and `unwrap` print it.
impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl From<fp8_kernels::Error> for Error {
    fn from(error: fp8_kernels::Error) -> Self {
        Self::Kernels(Box::new(error))
    }
}

/// Lets `?` convert this crate's errors in functions that return fp8-recipe's, as [`AmaxGroup`](crate::AmaxGroup) does.
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
