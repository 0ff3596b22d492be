//! Codes that are overwritten where they are, which recorded steps need.

use super::Fp8Tensor;
use super::layouts::{Layout, Layouts};
use crate::{Error, Result, Tensor};

impl Fp8Tensor {
    /// Returns the number of other tensors that share storage with a copy of the codes or its factors. The factor that both
    /// copies of one tensor share is not counted.
    pub fn holders(&self) -> usize {
        let own = usize::from(self.layouts.share_a_factor());
        let shared = |layout: &Layout| {
            let tensor_scale = layout.tensor_scale.as_ref().map_or(0, Tensor::holders);
            layout.codes.holders().max(layout.scale_inv.holders().saturating_sub(own)).max(tensor_scale)
        };
        [self.layouts.rowwise(), self.layouts.columnwise()]
            .into_iter()
            .flatten()
            .map(shared)
            .max()
            .unwrap_or(0)
    }

    /// Overwrites codes and factors with those of `other` in place, so that recorded steps which read this tensor continue
    /// with the new ones. Errors refer to the tensor as `name`.
    ///
    /// # Errors
    /// Another shape, format, granularity or device, or copies that only one of the two has; storage that is shared. Nothing
    /// has changed then. The device failed.
    ///
    /// ```
    /// use fp8_kernels::{DType, Device, Encoding, Fp8Tensor, Tensor};
    /// let cpu = Device::cpu();
    /// let tensor = |codes: [u8; 2], factor: f32| {
    ///     let codes = Tensor::from_vec(codes.to_vec(), [1, 2], &cpu)?;
    ///     Fp8Tensor::from_codes(codes, [1, 2], Encoding::E4M3, Tensor::scalar(factor, &cpu)?)
    /// };
    /// let mut w = tensor([0x38, 0x40], 1.0)?; // 1 and 2
    /// w.copy_from(&tensor([0x40, 0x38], 0.5)?, "w")?;
    /// assert_eq!(w.dequantize(DType::F32)?.to_vec::<f32>()?, [1.0, 0.5]);
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    pub fn copy_from(&mut self, other: &Self, name: &str) -> Result<()> {
        let op = "copy_from";
        let (lhs, rhs) = (self.shape, other.shape);
        if lhs != rhs {
            let what = "the tensor and its new codes";
            return Err(Error::Shapes { op, what, lhs, rhs, remedy: "expected the same shape" });
        }
        if self.form() != other.form() {
            let (value, remedy) = (other.form(), format!("expected {}", self.form()));
            return Err(Error::Option { op, option: "the new codes", value, remedy });
        }
        self.device().expect_same(op, other.device())?;
        let holders = self.holders();
        if holders > 0 {
            return Err(Error::Shared { name: name.to_owned(), holders });
        }
        let share_a_factor = self.layouts.share_a_factor();
        match (&mut self.layouts, &other.layouts) {
            (Layouts::Both { rowwise, columnwise }, Layouts::Both { rowwise: codes, columnwise: turned })
                if share_a_factor =>
            {
                // The factor must have one holder to be written.
                columnwise.scale_inv = turned.scale_inv.clone();
                rowwise.copy_from(codes, name)?;
                columnwise.codes.copy_from(&turned.codes, name)?;
                columnwise.scale_inv = rowwise.scale_inv.clone();
                Ok(())
            }
            (Layouts::Both { rowwise, columnwise }, Layouts::Both { rowwise: codes, columnwise: turned }) => {
                rowwise.copy_from(codes, name)?;
                columnwise.copy_from(turned, name)
            }
            (Layouts::Rowwise(to), Layouts::Rowwise(from))
            | (Layouts::Columnwise(to), Layouts::Columnwise(from)) => to.copy_from(from, name),
            // Their forms differ.
            _ => Ok(()),
        }
    }

    /// Describes format, granularity and copies: `E4M3, rowwise codes with one factor`.
    fn form(&self) -> String {
        let layout = |kind: &str, layout: Option<&Layout>| {
            layout.map(|layout| match layout.sharing.blocks() {
                None => format!(", {kind} codes with one factor"),
                Some(blocks) => {
                    let mixed = if layout.sharing.has_hadamard() { " of a Hadamard transform" } else { "" };
                    format!(", {kind} codes{mixed} with a factor for each {blocks}")
                }
            })
        };
        let rowwise = layout("rowwise", self.layouts.rowwise()).unwrap_or_default();
        let columnwise = layout("columnwise", self.layouts.columnwise()).unwrap_or_default();
        format!("{}{rowwise}{columnwise}", self.encoding)
    }
}

impl Layout {
    fn copy_from(&mut self, other: &Self, name: &str) -> Result<()> {
        self.codes.copy_from(&other.codes, name)?;
        self.scale_inv.copy_from(&other.scale_inv, name)?;
        if let (Some(to), Some(from)) = (&mut self.tensor_scale, &other.tensor_scale) {
            to.copy_from(from, name)?;
        }
        self.sharing = other.sharing;
        Ok(())
    }
}
