//! Gradients, which checkpoints do not contain.

use super::reader::Reader;
use super::writer::Writer;
use crate::{Parameter, Result};

/// A JSON list of the parameters whose gradients no step had used. Files without such parameters do not have it.
const KEY: &str = "fp8.without_gradients";

/// Returns the names of the parameters whose gradients no optimizer step has used.
pub(super) fn unused<'a>(parameters: &[&'a Parameter]) -> Vec<&'a str> {
    let unused = parameters.iter().filter(|parameter| parameter.gradient().awaits_step());
    unused.map(|parameter| &**parameter.name()).collect()
}

/// Says why a model with these unused gradients is not saved; `None` if there are none.
pub(super) fn refusal(unused: &[&str]) -> Option<String> {
    let (first, more) = unused.split_first()?;
    let more = if more.is_empty() { String::new() } else { format!(" and of {} more", more.len()) };
    Some(format!(
        "the gradient of `{first}`{more} was added to since the last optimizer step, and gradients are not saved: take the step or \
         call zero_grad first, or save with SaveOptions::without_gradients"
    ))
}

pub(super) fn write(unused: Vec<&str>, writer: &mut Writer) {
    if !unused.is_empty() {
        writer.metadata(KEY, &serde_json::Value::from(unused).to_string());
    }
}

/// Returns the parameters whose gradients no step had used.
pub(super) fn read(reader: &Reader<'_>) -> Result<Vec<String>> {
    let Some(text) = reader.all_metadata().get(KEY) else { return Ok(Vec::new()) };
    let problem = |_| reader.problem(format!("metadata `{KEY}` is {text}: expected a JSON list of names"));
    serde_json::from_str(text).map_err(problem)
}
