//! The parts of a checkpoint that are read without its tensors.

use super::layout::{VERSION_KEY, open, path, user_metadata};
use super::reader::Reader;
use super::scaling_state;
use crate::Result;
use fp8_recipe::ScalingState;
use std::collections::BTreeMap;
use std::path::Path;

/// Returns the caller's metadata of the checkpoint in `dir`. It reads only the header
/// of the file. See [`save`](super::save) for an example.
///
/// # Errors
/// A file that cannot be read or is not a checkpoint.
pub fn metadata(dir: &Path) -> Result<BTreeMap<String, String>> {
    Ok(user_metadata(&open(&path(dir))?))
}

/// Reads the caller's metadata and the scaling state of a checkpoint's file ([`path`]), without its tensors. `None` if
/// [`save_parameters`](super::save_parameters) wrote the file, which then has neither.
///
/// ```
/// use fp8_nn::{checkpoint, prelude::*};
/// # let dir = std::env::temp_dir().join(format!("fp8-describe-{}", std::process::id()));
/// let options = LinearOptions { in_features: 16, out_features: 16, ..Default::default() };
/// let fc = Linear::new("fc", options, &Device::cpu(), &mut fp8_nn::rand::rng())?;
/// let (scaling, optimizer) = (Scaling::new(&fc, &Device::cpu())?, AdamW::new(AdamWOptions::default())?);
/// let metadata = [("data".to_owned(), "plays".to_owned())].into();
/// checkpoint::save(&dir, &fc, &optimizer, &scaling, &metadata)?;
///
/// let (read, state) = checkpoint::describe(&checkpoint::path(&dir))?.ok_or("parameters alone")?;
/// assert_eq!((read, state), (metadata, scaling.state()?));
/// # std::fs::remove_dir_all(dir)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// A file that cannot be read, or is no checkpoint of this version.
pub fn describe(path: &Path) -> Result<Option<(BTreeMap<String, String>, ScalingState)>> {
    if !Reader::open(path)?.all_metadata().contains_key(VERSION_KEY) {
        return Ok(None);
    }
    let reader = open(path)?;
    Ok(Some((user_metadata(&reader), scaling_state::read(&reader)?.0)))
}
