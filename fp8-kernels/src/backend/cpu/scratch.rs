//! Buffers that outlive a call: decoding an operand into fresh memory would cost as much again for zeroing it.

use crate::{Result, host};
use std::cell::RefCell;

/// Larger buffers go back to the system: beside such a product their allocation costs nothing.
const KEPT: usize = 16 << 20;

thread_local! {
    static POOL: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// Lends `len` values that hold anything; `f` overwrites them. Calls may be nested.
///
/// # Errors
/// Memory that cannot be allocated, for `op`.
pub(crate) fn with<R>(op: &'static str, len: usize, f: impl FnOnce(&mut [f32]) -> R) -> Result<R> {
    // Taken out of the pool while it is used: a nested call, also of a task stolen meanwhile, gets another one.
    let mut buffer = POOL.with_borrow_mut(Vec::pop).unwrap_or_default();
    if buffer.len() < len {
        buffer = host::zeroed(op, len)?;
    }
    let result = f(&mut buffer[..len]);
    if buffer.len() <= KEPT {
        POOL.with_borrow_mut(|pool| pool.push(buffer));
    }
    Ok(result)
}

#[cfg(test)]
mod tests {
    #[test]
    fn nested_calls_have_buffers_of_their_own() {
        let sum = super::with("test", 3, |outer| {
            outer.fill(1.0);
            super::with("test", 5, |inner| inner.fill(2.0)).unwrap();
            outer.iter().sum::<f32>()
        });
        assert_eq!(sum.unwrap(), 3.0);
        assert_eq!(super::with("test", 7, |buffer| buffer.len()).unwrap(), 7);
        assert!(super::with("test", usize::MAX, |_| ()).is_err());
    }
}
