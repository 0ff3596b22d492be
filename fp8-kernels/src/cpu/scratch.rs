//! Buffers that outlive a call: decoding an operand into fresh memory would cost as much again for zeroing it.

use std::cell::RefCell;

/// Larger buffers go back to the system: beside such a product their allocation costs nothing.
const KEPT: usize = 16 << 20;

thread_local! {
    static POOL: RefCell<Vec<Vec<f32>>> = const { RefCell::new(Vec::new()) };
}

/// Lends `len` values that hold anything; `f` overwrites them. Calls may be nested.
pub(crate) fn with<R>(len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    // Taken out of the pool while it is used: a nested call, also of a task stolen meanwhile, gets another one.
    let mut buffer = POOL.with_borrow_mut(Vec::pop).unwrap_or_default();
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    let result = f(&mut buffer[..len]);
    if buffer.len() <= KEPT {
        POOL.with_borrow_mut(|pool| pool.push(buffer));
    }
    result
}

#[cfg(test)]
mod tests {
    #[test]
    fn nested_calls_have_buffers_of_their_own() {
        let sum = super::with(3, |outer| {
            outer.fill(1.0);
            super::with(5, |inner| inner.fill(2.0));
            outer.iter().sum::<f32>()
        });
        assert_eq!(sum, 3.0);
        assert_eq!(super::with(7, |buffer| buffer.len()), 7);
    }
}
