//! Panics of the crate tokenizers.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs a function of the crate tokenizers, which panics for some files that contradict themselves.
pub(super) fn caught<T>(run: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given");
            Err(format!("it contradicts itself: the tokenizer stopped ({text})"))
        }
    }
}
