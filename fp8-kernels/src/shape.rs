//! The extents of a tensor, stored inline.
//!
//! A shape can have any extents, but the shape of a tensor has passed [`Shape::check_size`]. So no product of extents of a
//! tensor overflows, even if another extent is 0.

mod size;

use std::fmt;
use std::ops::Deref;

/// The extents of a tensor, outermost first: up to six dimensions, stored without an allocation. Derefs to a slice.
///
/// An array becomes a shape with `Shape::from`; functions that take `impl Into<Shape>` take the array itself. An array of more
/// than six extents does not compile.
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

    /// The largest number of elements of a tensor: as many f32 as an allocation can have, `isize::MAX / 4`.
    pub const MAX_NUMEL: usize = isize::MAX as usize / size_of::<f32>();

    /// Creates a shape from a slice; returns `None` for more than [`MAX_RANK`](Self::MAX_RANK) dimensions.
    pub fn from_slice(dims: &[usize]) -> Option<Self> {
        let mut shape = Self { dims: [0; Self::MAX_RANK], rank: dims.len() };
        shape.dims.get_mut(..dims.len())?.copy_from_slice(dims);
        Some(shape)
    }

    /// Returns the number of elements; 1 for a scalar. Saturates at `usize::MAX`.
    pub fn numel(&self) -> usize {
        self.iter().fold(1, |product: usize, &dim| product.saturating_mul(dim))
    }

    /// Returns the last dimension; 1 for a scalar.
    pub fn last_dim(&self) -> usize {
        self.last().copied().unwrap_or(1)
    }

    /// Returns `[product of the leading dimensions, last dimension]`. Saturates at `usize::MAX`.
    pub fn matrix(&self) -> [usize; 2] {
        let leading = &self[..self.rank.saturating_sub(1)];
        let rows = leading.iter().fold(1, |product: usize, &extent| product.saturating_mul(extent));
        [rows, self.last_dim()]
    }

    /// Returns the same leading dimensions with another last one.
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
