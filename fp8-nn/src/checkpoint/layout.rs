//! The file of a checkpoint, and the keys of its metadata.

use super::reader::Reader;
use crate::Result;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The target of events. Subscribers filter by it: it stays when files move.
pub(super) const EVENTS: &str = "fp8_nn::checkpoint";

const FILE: &str = "checkpoint.safetensors";
/// The metadata key of the layout's version.
pub(super) const VERSION_KEY: &str = "fp8.version";
pub(super) const VERSION: &str = "1";
pub(super) const STEP_KEY: &str = "fp8.optimizer.step";
/// The metadata key of the number of skipped steps. Files without it count as having none.
pub(super) const SKIPPED_KEY: &str = "fp8.optimizer.skipped";
/// The largest step count that is loaded: f64, in which the bias corrections are computed, has all integers up to it.
pub(super) const MAX_STEPS: u64 = 1 << f64::MANTISSA_DIGITS;
/// The caller's own keys are kept apart by this prefix.
pub(super) const USER: &str = "user.";

/// Returns the path of the checkpoint file in a folder, `DIR/checkpoint.safetensors`. See [`save`](super::save) for an example.
pub fn path(dir: &Path) -> PathBuf {
    dir.join(FILE)
}

pub(super) fn open(path: &Path) -> Result<Reader<'_>> {
    let reader = Reader::open(path)?;
    match reader.all_metadata().get(VERSION_KEY).map(String::as_str) {
        Some(VERSION) => Ok(reader),
        Some(other) => {
            Err(reader.problem(format!("layout version {other}; this library reads version {VERSION}")))
        }
        None => Err(reader.problem("a safetensors file, but not a training checkpoint".to_owned())),
    }
}

pub(super) fn user_metadata(reader: &Reader<'_>) -> BTreeMap<String, String> {
    let user = |(key, value): (&String, &String)| Some((key.strip_prefix(USER)?.to_owned(), value.clone()));
    reader.all_metadata().iter().filter_map(user).collect()
}
