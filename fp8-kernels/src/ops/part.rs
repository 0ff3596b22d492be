//! The place of a part in a dimension that is cut.

use crate::{Error, Result};

/// The place of a part in a dimension that is cut into parts, for example over the ranks of a group.
///
/// The part's own extent is that of its tensor: a table of 8 rows at `first` 16 holds rows 16 to 23 of the `total`.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let part = ops::Part { first: 2, total: 4 };
/// let table = Tensor::from_vec(vec![5.0f32, 6.0], [2, 1], &Device::cpu())?; // rows 2 and 3 of 4
/// let ids = Tensor::from_vec(vec![3, 0], [2], &Device::cpu())?;
/// assert_eq!(ops::embedding_part(&ids, &table, part)?.to_vec::<f32>()?, [6.0, 0.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// The index in the whole of the part's first element.
    pub first: usize,
    /// The extent of the whole.
    pub total: usize,
}

impl Part {
    /// Returns the part that is everything.
    pub(crate) const fn whole(total: usize) -> Self {
        Self { first: 0, total }
    }

    /// Returns an error unless a part of `len` elements fits in the whole.
    pub(crate) fn check(self, op: &'static str, option: &'static str, len: usize) -> Result<()> {
        let Self { first, total } = self;
        let end = first.checked_add(len);
        if end.is_some_and(|end| end <= total) {
            return Ok(());
        }
        let value = format!("{len} from {first} on, of {total}");
        let remedy = "a part ends within the whole".to_owned();
        Err(Error::Option { op, option, value, remedy })
    }
}
