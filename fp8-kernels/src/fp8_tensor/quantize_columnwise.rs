//! Columnwise codes of a tensor that has none.

use super::Fp8Tensor;
use super::layouts::Layouts;
use crate::{DType, Error, Operand, Result, Scale, Slot, ops};
use fp8_format::Blocks;

impl Fp8Tensor {
    /// Returns the tensor with columnwise codes. With one factor, 128 × 128 or 16 × 16 blocks they are the rowwise ones, transposed, as
    /// [`with_columnwise`](Self::with_columnwise) makes them. With rows, 1 × 128, 1 × 16 or MX blocks, other elements share a factor in
    /// the transpose: its codes are then quantized with `slot` from the dequantized values, which rounds these a second time. Where
    /// you have the source, quantize it with a slot whose `columnwise` is true instead. The rowwise codes stay as they are, and
    /// `slot` records nothing.
    ///
    /// ```
    /// use fp8_kernels::fp8_format::Blocks;
    /// use fp8_kernels::fp8_format::slice::BlockScaling;
    /// use fp8_kernels::{BlockRule, Device, Encoding, Fp8Tensor, Scale, Slot, Tensor};
    /// let cpu = Device::cpu();
    /// let codes = Tensor::from_vec(vec![0x38u8, 0x40, 0x44, 0x48], [2, 2], &cpu)?; // 1, 2; 3, 4
    /// let factors = Tensor::from_vec(vec![0.5f32, 10.0], [2, 1], &cpu)?;
    /// let x = Fp8Tensor::from_blocks(codes, [2, 2], Encoding::E4M3, Blocks::Row, factors)?;
    /// let rule = BlockRule::F32(BlockScaling::new(Blocks::Row));
    /// let x = x.quantize_columnwise(&Slot { scale: Scale::Blocks(rule), ..Slot::off(Encoding::E4M3) })?;
    /// let columns = x.columnwise_scale_inv().map(Tensor::to_vec::<f32>).transpose()?;
    /// assert_eq!(columns, Some(vec![30.0 / 448.0, 40.0 / 448.0])); // the values are 0.5, 1; 30, 40
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    ///
    /// # Errors
    /// A slot that quantizes in another format or granularity than the codes have; the device is out of memory or failed.
    pub fn quantize_columnwise(mut self, slot: &Slot<'_>) -> Result<Self> {
        let Layouts::Rowwise(rowwise) = &self.layouts else { return Ok(self) };
        if matches!(rowwise.sharing.blocks(), None | Some(Blocks::B128x128 | Blocks::B16x16)) {
            return self.with_columnwise();
        }
        let slot = Slot { columnwise: true, amax: None, counters: None, ..*slot };
        let columnwise = match ops::quantize(&self.dequantize(DType::F32)?, &slot)? {
            Operand::Fp8(again) if (again.encoding, again.blocks()) == (self.encoding, self.blocks()) => {
                again.layouts.columnwise().cloned()
            }
            _ => None,
        };
        let unsuitable = || Error::Option {
            op: "quantize_columnwise",
            option: "slot",
            value: match slot.scale {
                Scale::Blocks(rule) => format!("{} with {:?}", slot.encoding, rule.blocks()),
                _ => format!("{} without blocks", slot.encoding),
            },
            remedy: match self.blocks() {
                Some(blocks) => format!("expected {} with {blocks:?}, as the codes are", self.encoding),
                None => format!("expected {}", self.encoding),
            },
        };
        self.layouts = Layouts::new(rowwise.clone(), Some(columnwise.ok_or_else(unsuitable)?));
        Ok(self)
    }
}
