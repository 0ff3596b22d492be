//! `fp8 train MODEL`: fine-tunes a Hugging Face model, whole or by an adapter.
//!
//! `line.rs` reads the options, `setup.rs` opens what they name, and `job.rs` trains.

mod check;
mod job;
pub(crate) mod line;
mod live;
mod options;
mod plan;
mod report;
mod seen;
mod setup;
mod values;

use crate::failure::Failure;
use crate::interrupt::{self, Phase};
use crate::model::with_threads;
pub(crate) use options::FineTune;
use setup::Setup;

/// Trains, or prints the plan.
pub(crate) fn run(options: FineTune) -> Result<(), Failure> {
    let setup = Setup::new(options)?;
    let threads = setup.options.threads;
    let stop = interrupt::requested();
    with_threads(threads, || {
        let ranks = setup.ranks.clone();
        let opened = setup.open().map_err(before_writing);
        let done = opened.and_then(|opened| match opened.options.dry_run {
            true => plan::dry_run(opened).map(|()| None),
            // The first signal ends the training after its step, with a checkpoint. The second does not wait.
            false => interrupt::during(Phase::Save, || job::run(opened, stop)),
        });
        match done {
            Ok(stopped) => ranks.finish(stopped),
            Err(failure) => Err(ranks.give_up(failure)),
        }
    })
}

/// A failure before anything was written is one of the input.
fn before_writing(failure: Failure) -> Failure {
    match failure {
        Failure::Work(sentence) => Failure::Input(sentence),
        other => other,
    }
}
