//! Copies of matrices, by fp8-kernels on a device.

use fp8_kernels::ops::DropoutKey;
use fp8_kernels::{Device, DropoutDraw, Encoding, Nvfp4Rule, Scale, Slot, StochasticRounding, Tensor, ops};

use super::quantize::{Case, blocks, number};
use crate::golden::blocks::file::{Check, File};
use crate::golden::blocks::quantize::equal;

/// The counters from a draw's rowwise copy to its columnwise one.
const NEXT_MASK: u64 = 1 << 44;

impl Case {
    /// Compares codes, scales and factors of the copy that a device makes.
    pub(super) fn compare_on(&self, file: &File<'_>, device: &Device) -> Check {
        let error = |error: fp8_kernels::Error| error.to_string();
        let x = file.matrix(&self.x)?.tensor(device)?;
        let draw = match &self.random {
            None => None,
            Some(random) => {
                let (seed, mut offset) = (number(&random.seed)?, number(&random.offset)?);
                if self.columnwise {
                    offset = offset.wrapping_sub(NEXT_MASK);
                }
                Some(DropoutDraw::from(DropoutKey { seed, offset }))
            }
        };
        let amax = f32::from_bits(self.amax_bits);
        let given = Tensor::from_vec(vec![amax; 2], [2], device).map_err(error)?;
        let rule = Nvfp4Rule {
            blocks: blocks(&self.block)?,
            hadamard: self.hadamard,
            amax: self.amax_given.then_some(&given),
            random: draw.as_ref().map(StochasticRounding::new),
        };
        let slot =
            Slot { scale: Scale::Nvfp4(rule), columnwise: self.columnwise, ..Slot::off(Encoding::E2M1) };
        let quantized = ops::quantize(&x, &slot).map_err(error)?;
        let tensor = quantized.as_fp8().ok_or("the tensor stayed in high precision")?;
        let parts = if self.columnwise {
            [tensor.columnwise(), tensor.columnwise_scale_inv(), tensor.columnwise_tensor_scale()]
        } else {
            [tensor.rowwise(), Some(tensor.scale_inv()), tensor.tensor_scale()]
        };
        let [Some(codes), Some(scales), Some(factors)] = parts else {
            return Err("the tensor lacks the copy".to_owned());
        };
        let factors = factors.to_vec::<f32>().map_err(error)?;
        let factors: Vec<u32> = factors.into_iter().map(f32::to_bits).collect();
        equal("factor", &factors, &[self.encode_bits, self.decode_bits])?;
        equal("scale", &scales.to_vec::<u8>().map_err(error)?, &file.bytes(&self.scales)?)?;
        equal("byte of codes", &codes.to_vec::<u8>().map_err(error)?, &file.bytes(&self.codes)?)
    }
}
