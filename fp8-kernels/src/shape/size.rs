//! The limit of a tensor's size.

use super::Shape;
use crate::{Error, Result};

impl Shape {
    /// Checks that a tensor can have this shape: the product of the extents other than 0 is at most
    /// [`MAX_NUMEL`](Self::MAX_NUMEL).
    ///
    /// Extents of 0 are left out so that the product of any of a tensor's extents fits, too. `op` names the operation in the
    /// error.
    ///
    /// # Errors
    /// A larger product.
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
}
