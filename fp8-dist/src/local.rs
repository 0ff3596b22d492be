//! Ranks that are threads of one process.

use crate::meeting::{Meeting, Seat};
use crate::member::Member;
use crate::{Error, ProcessGroup, Result};
use std::sync::Arc;
use std::time::Duration;

/// A group of threads: one handle per rank, in rank order. Each thread owns its handle, so that the others learn of its
/// end when it panics or returns early. `id` is the group's part in the job ("dp"); `deadline` is how long a rank
/// waits in one collective for the others.
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
    let meeting = Meeting::new(world_size, deadline, |_| false);
    let seat = |rank| Seat::new(id, rank, world_size, meeting.clone());
    Ok((0..world_size).map(|rank| Arc::new(Member::new(seat(rank))) as Arc<dyn ProcessGroup>).collect())
}

/// What every backend asks of a group's options.
pub(crate) fn check_options(id: &str, world_size: usize, deadline: Duration) -> Result<()> {
    let zero =
        |option, value: String, remedy| Err(Error::Option { id: id.to_owned(), option, value, remedy });
    if world_size == 0 {
        return zero("world_size", world_size.to_string(), "a group has at least one rank");
    }
    if deadline.is_zero() {
        return zero(
            "deadline",
            format!("{deadline:?}"),
            "expected the longest time that ranks may be apart",
        );
    }
    Ok(())
}
