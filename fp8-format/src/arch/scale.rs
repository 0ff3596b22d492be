//! A scale as the paths take it.

#[cfg(all(target_arch = "x86_64", feature = "std"))]
use super::avx512::ProductTables;

/// A scale, with what a path prepares of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scale {
    pub(super) value: f32,
    #[cfg(all(target_arch = "x86_64", feature = "std"))]
    pub(super) products: Option<ProductTables>,
}
