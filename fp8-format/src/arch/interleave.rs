//! Sixteen vectors as a square of bytes, turned by interleaving.

/// `sixteen!(f)`: `[f(0), …, f(15)]`, written out so that the vectors stay in registers.
macro_rules! sixteen {
    ($f:expr) => {{
        let f = $f;
        [f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)]
    }};
}

/// Turns sixteen rows of sixteen bytes into their columns, in each lane of the vectors.
///
/// To interleave the first half of the rows with the second rotates a byte's place, the bits of its row and those of its
/// column, by one bit; after four times row and column have changed places. `$low` and `$high` interleave the lower and
/// the upper halves of lanes.
macro_rules! turn {
    ($low:expr, $high:expr, $rows:expr) => {{
        let once = |r: [_; 16]| {
            let half = |i: usize| {
                let (a, b) = (r[i / 2], r[i / 2 + 8]);
                if i % 2 == 0 { $low(a, b) } else { $high(a, b) }
            };
            $crate::arch::interleave::sixteen!(half)
        };
        once(once(once(once($rows))))
    }};
}

pub(crate) use {sixteen, turn};
