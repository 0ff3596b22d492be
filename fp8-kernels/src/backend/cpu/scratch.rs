//! Memory for the time of one call.

use crate::Result;
use crate::host::Array;

/// Calls `f` with `len` elements that have any values; `f` overwrites them. Calls may be nested.
///
/// # Errors
/// Memory that cannot be allocated, for `op`.
pub(crate) fn with<R>(op: &'static str, len: usize, f: impl FnOnce(&mut [f32]) -> R) -> Result<R> {
    Ok(f(&mut Array::for_overwrite(op, len)?))
}

#[cfg(test)]
mod tests {
    #[test]
    fn nested_calls_have_memory_of_their_own() {
        let sum = super::with("test", 3, |outer| {
            outer.fill(1.0);
            super::with("test", 5, |inner| inner.fill(2.0)).unwrap();
            outer.iter().sum::<f32>()
        });
        assert_eq!(sum.unwrap(), 3.0);
        assert_eq!(super::with("test", 7, |values| values.len()).unwrap(), 7);
        assert!(super::with("test", usize::MAX, |_| ()).is_err());
    }
}
