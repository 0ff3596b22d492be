//! The counts of one case: its kernel's listing is run on one thread, twice where the case has a longer form.

use super::cases::Case;
use super::listing::Listing;
use super::run::run;
use super::signatures::Parameters;
use super::thread::{Tally, Thread};
use crate::workspace::Result;

/// No thread of any case executes more instructions.
const LIMIT: u64 = 4_000_000;

/// The counts of a case. All but `once` and `in_flight` are for one element, of one thread.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Counts {
    /// Instructions that one element more costs.
    pub(super) instructions: f64,
    /// Instructions besides, at the beginning and the end of a thread, divided by the elements of the case's thread.
    pub(super) once: f64,
    pub(super) hmma: f64,
    pub(super) ldmatrix: f64,
    /// Bytes of shared memory.
    pub(super) shared: f64,
    /// Bytes written to device memory.
    pub(super) written: f64,
    /// The most bytes of device memory that were on their way to one thread at once.
    pub(super) in_flight: u64,
}

/// # Errors
/// A launch that does not fit the kernel, or a listing that cannot be run.
pub(super) fn count(case: &Case, listing: &Listing, signature: &Parameters, threads: u32) -> Result<Counts> {
    let (short, elements) = tally(case, listing, signature, threads, false)?;
    let per = |value: u64| value as f64 / elements;
    if !case.is_longer() {
        return Ok(Counts {
            instructions: per(short.instructions),
            once: 0.0,
            hmma: per(short.hmma),
            ldmatrix: per(short.ldmatrix),
            shared: per(short.shared),
            written: per(short.written),
            in_flight: short.in_flight,
        });
    }
    let (long, more) = tally(case, listing, signature, threads, true)?;
    if more <= elements {
        let name = case.name();
        return Err(format!("sass: {name}: the longer run has {more} elements, the other {elements}").into());
    }
    let each = |of: fn(&Tally) -> u64| (of(&long) as f64 - of(&short) as f64) / (more - elements);
    let instructions = each(|tally| tally.instructions);
    Ok(Counts {
        instructions,
        once: (per(short.instructions) - instructions).max(0.0),
        hmma: each(|tally| tally.hmma),
        ldmatrix: each(|tally| tally.ldmatrix),
        shared: each(|tally| tally.shared),
        written: each(|tally| tally.written),
        in_flight: long.in_flight,
    })
}

/// The counts of a run, and the elements that it was for.
fn tally(
    case: &Case,
    listing: &Listing,
    signature: &Parameters,
    threads: u32,
    longer: bool,
) -> Result<(Tally, f64)> {
    let mut shared = Vec::new();
    let launch = case.launch(signature, threads, longer)?;
    for thread in 0..case.before {
        let mut memory = launch.memory.clone();
        let place = super::thread::Place { thread, ..launch.place };
        run(&mut Thread::new(listing, place, &launch.parameters, &mut memory, &mut shared)?, LIMIT)?;
    }
    let mut memory = launch.memory;
    let mut thread = Thread::new(listing, launch.place, &launch.parameters, &mut memory, &mut shared)?;
    run(&mut thread, LIMIT)?;
    let mut tally = thread.tally;
    tally.written = memory.written();
    let traffic = memory.traffic(launch.counted);
    let bytes = if case.unit.is_read { traffic.read } else { traffic.written };
    let (name, way) = (case.name(), if case.unit.is_read { "read" } else { "wrote" });
    if bytes == 0 {
        return Err(format!("sass: {name}: the thread {way} nothing of {}", case.unit.parameter).into());
    }
    Ok((tally, bytes as f64 / case.unit.bytes as f64))
}
