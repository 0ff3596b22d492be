//! Exchanges, the basis of collectives: every rank brings a message and receives those of all.

use crate::message::{Call, Message};
use crate::{Failure, Result};
use std::fmt::Debug;
use std::sync::Arc;

/// A way to exchange messages with the other ranks.
pub(crate) trait Exchange: Debug + Send + Sync {
    fn id(&self) -> &str;

    fn rank(&self) -> usize;

    fn world_size(&self) -> usize;

    /// Sends `message` and returns the messages of all ranks, in rank order, once they have been compared.
    fn exchange(&self, message: Message) -> Result<Arc<Vec<Message>>>;

    /// Sends `message` to one other rank, which may receive it later.
    fn send_to(&self, to: usize, message: Message) -> Result<()>;

    /// Waits for the next message that rank `from` sends to this one. `call` is its name in errors.
    fn receive_from(&self, from: usize, call: &Call) -> Result<Message>;

    /// Ends the group for all ranks. The first failure is the one that counts.
    fn fail(&self, failure: Failure);

    /// Returns why the group has failed, as far as this rank knows.
    fn failure(&self) -> Option<Failure>;

    /// Returns the ranks that have left, as far as this rank knows. For collectives that do not exchange messages.
    #[cfg(feature = "cuda")]
    fn left(&self) -> Vec<usize>;

    /// Names a call that the ranks have compared. Rank 0 names calls in errors.
    #[cfg(feature = "cuda")]
    fn name_call(&self, number: u64, name: &str);

    /// Tells rank 0 which compared calls this rank has made, in order. Nobody waits for an answer. Returns false if it was not begun,
    /// because another message is being sent: try again later.
    #[cfg(feature = "cuda")]
    fn tell_calls(&self, numbers: &[u64]) -> bool;

    fn poison(&self, reason: &str) {
        self.fail(Failure::GaveUp { rank: self.rank(), reason: reason.to_owned() });
    }
}
