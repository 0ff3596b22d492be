//! Groups whose ranks are threads of one process.

use crate::meeting::{Meeting, Seat};
use crate::member::Member;
use crate::{Error, ProcessGroup, Result};
use std::sync::Arc;
use std::time::Duration;

/// Creates a group whose ranks are threads of this process, and returns one handle per rank, in rank order.
///
/// Move each handle into its thread: when a thread panics or returns early, dropping its handle tells the other ranks. `id` names
/// the group in errors and in scaling state ("dp"). `deadline` is how long a rank waits in one collective for the others.
///
/// ```
/// use fp8_dist::local;
/// use std::{thread, time::Duration};
///
/// let ranks = local("dp", 2, Duration::from_secs(10))?;
/// thread::scope(|scope| {
///     for group in ranks {
///         scope.spawn(move || group.barrier().unwrap());
///     }
/// });
/// # Ok::<(), fp8_dist::Error>(())
/// ```
///
/// # Errors
/// A world size or a deadline of 0.
pub fn local(id: &str, world_size: usize, deadline: Duration) -> Result<Vec<Arc<dyn ProcessGroup>>> {
    check_options(id, world_size, deadline)?;
    let meeting = Meeting::new(id, world_size, deadline, |_| false);
    tracing::info!(group = id, world_size, "group formed");
    let seat = |rank| Seat::new(id, rank, world_size, meeting.clone());
    Ok((0..world_size).map(|rank| Arc::new(Member::new(seat(rank))) as Arc<dyn ProcessGroup>).collect())
}

/// Checks the options that all backends share.
pub(crate) fn check_options(id: &str, world_size: usize, deadline: Duration) -> Result<()> {
    let zero =
        |option, value: String, remedy| Err(Error::Option { id: id.to_owned(), option, value, remedy });
    if world_size == 0 {
        return zero("world_size", world_size.to_string(), "expected at least 1");
    }
    if deadline.is_zero() {
        return zero(
            "deadline",
            format!("{deadline:?}"),
            "expected more than 0: how long ranks wait for each other",
        );
    }
    Ok(())
}
