//! The kernels of matrix products that tuning chose, so that training continues with the same ones.

use super::layout::EVENTS;
use super::reader::Reader;
use super::writer::Writer;
use crate::{Layer, Result, parameters};
use fp8_kernels::{Device, TunedProducts};

/// The text of a [`TunedProducts`]. Files of runs without tuning do not have it.
const KEY: &str = "fp8.tuned_products";

fn device(model: &(impl Layer + ?Sized)) -> Option<Device> {
    parameters(model).first().map(|parameter| parameter.device().clone())
}

pub(super) fn write(model: &(impl Layer + ?Sized), writer: &mut Writer) {
    let tuned = device(model).map(|device| device.tuned_products()).unwrap_or_default();
    if !tuned.is_empty() {
        writer.metadata(KEY, &tuned.to_string());
    }
}

/// Uses the kernels of the file. What is for another GPU or library is ignored, and so is what cannot be read: a file that
/// another version of this library wrote is no less good for that.
pub(super) fn apply(reader: &Reader<'_>, model: &(impl Layer + ?Sized)) -> Result<()> {
    let Some((text, device)) = reader.all_metadata().get(KEY).zip(device(model)) else { return Ok(()) };
    match text.parse::<TunedProducts>() {
        Ok(tuned) => {
            device.use_tuned_products(&tuned)?;
        }
        Err(error) => {
            tracing::warn!(target: EVENTS, %error, "the tuned products of a checkpoint are not used")
        }
    }
    Ok(())
}
