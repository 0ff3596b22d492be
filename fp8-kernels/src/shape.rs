//! The extents of a tensor, outermost first, kept inline: making one allocates nothing.
//!
//! A shape can be made of any extents. A tensor has only shapes that pass [`Shape::check_size`], so no product of extents of
//! a tensor overflows, not even where another extent is 0.

use crate::{Error, Result};
use std::fmt;
use std::ops::Deref;

/// Up to six dimensions. Derefs to a slice.
///
/// ```
/// use fp8_kernels::Shape;
/// let shape = Shape::from([2, 3, 4]);
/// assert_eq!(shape.numel(), 24);
/// assert_eq!(shape.to_string(), "[2, 3, 4]");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; Self::MAX_RANK],
    rank: usize,
}

impl Shape {
    /// The largest number of dimensions.
    pub const MAX_RANK: usize = 6;

    /// The most elements that a tensor can have: as many f32 as fit into the address range, `isize::MAX / 4`.
    pub const MAX_NUMEL: usize = isize::MAX as usize / size_of::<f32>();

    /// From a slice; `None` for more than [`MAX_RANK`](Self::MAX_RANK) dimensions.
    pub fn from_slice(dims: &[usize]) -> Option<Self> {
        let mut shape = Self { dims: [0; Self::MAX_RANK], rank: dims.len() };
        shape.dims.get_mut(..dims.len())?.copy_from_slice(dims);
        Some(shape)
    }

    /// The number of elements (1 for a scalar; saturating).
    pub fn numel(&self) -> usize {
        self.iter().fold(1, |product: usize, &dim| product.saturating_mul(dim))
    }

    /// Checks that a tensor can have this shape: the extents other than 0 multiply to at most
    /// [`MAX_NUMEL`](Self::MAX_NUMEL). Extents of 0 are left out, so that the product of any of a tensor's extents is a
    /// number of elements that fits. `op` is what the error names.
    ///
    /// # Errors
    /// Extents that multiply to more.
    ///
    /// ```
    /// use fp8_kernels::Shape;
    /// assert!(Shape::from([1 << 20, 0]).check_size("example").is_ok());
    /// assert!(Shape::from([1 << 40, 1 << 40, 0]).check_size("example").is_err());
    /// ```
    pub fn check_size(&self, op: &'static str) -> Result<()> {
        let extents = self.iter().filter(|&&extent| extent > 0);
        let product = extents.fold(1, |product: usize, &extent| product.saturating_mul(extent));
        if product <= Self::MAX_NUMEL {
            return Ok(());
        }
        let most = Self::MAX_NUMEL;
        let remedy = format!(
            "its extents other than 0 multiply to more than {most} elements, the most that a tensor can have: use \
             smaller extents"
        );
        Err(Error::Shape { op, shape: *self, remedy })
    }

    /// The last dimension; 1 for a scalar.
    pub fn last_dim(&self) -> usize {
        self.last().copied().unwrap_or(1)
    }

    /// `[product of the leading dimensions, last dimension]` (saturating).
    pub fn matrix(&self) -> [usize; 2] {
        let leading = &self[..self.rank.saturating_sub(1)];
        let rows = leading.iter().fold(1, |product: usize, &extent| product.saturating_mul(extent));
        [rows, self.last_dim()]
    }

    /// The same leading dimensions with another last one.
    pub fn with_last(&self, last: usize) -> Self {
        let mut shape = *self;
        if self.rank == 0 {
            return Self::from([last]);
        }
        shape.dims[self.rank - 1] = last;
        shape
    }
}

impl Deref for Shape {
    type Target = [usize];

    fn deref(&self) -> &[usize] {
        &self.dims[..self.rank]
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Self {
        const { assert!(N <= Self::MAX_RANK) };
        let mut shape = Self { dims: [0; Self::MAX_RANK], rank: N };
        shape.dims[..N].copy_from_slice(&dims);
        shape
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &**self)
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
