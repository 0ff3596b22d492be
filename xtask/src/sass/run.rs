//! Runs one thread from its first instruction to its last.

use super::execute::{Next, step};
use super::thread::Thread;
use crate::workspace::Result;

/// Runs a thread to its end.
///
/// # Errors
/// An unknown instruction, an access outside of all buffers, a listing that ends early, more than `limit` instructions.
pub(super) fn run(thread: &mut Thread<'_>, limit: u64) -> Result {
    let listing = thread.listing;
    let kernel = &listing.kernel;
    let mut at = 0;
    for _ in 0..limit {
        let Some(instruction) = listing.instructions.get(at) else {
            return Err(format!("sass: {kernel}: the listing ends before the thread does").into());
        };
        at += 1;
        thread.count(instruction);
        if instruction.guard.is_some_and(|guard| !thread.is(guard)) {
            continue;
        }
        let next = step(thread, instruction).map_err(|problem| {
            format!("sass: {kernel}: {problem}: /*{:04x}*/ {}", instruction.address, instruction.text)
        })?;
        match next {
            Next::Following => {}
            Next::Jump(target) => at = target,
            Next::Exit => return Ok(()),
        }
    }
    let last = listing.instructions.get(at).map_or("", |instruction| instruction.text.as_str());
    Err(format!("sass: {kernel}: {limit} instructions and no end, near {last}").into())
}
