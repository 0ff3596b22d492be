//! Tensors in NVFP4: packed codes, scales of blocks and a factor of the whole.

use super::Fp8Tensor;
use super::layouts::{Layout, Layouts, Sharing};
use crate::{DType, Encoding, Error, Result, Shape, Tensor};
use fp8_format::{Blocks, TensorScale};

impl Fp8Tensor {
    /// Creates a tensor in NVFP4 from packed `codes` for `shape`, the scales of its blocks and the factors of the whole:
    /// `value = (code · scale) · decode`.
    ///
    /// `codes` are u8 with ⌈last dimension / 2⌉ bytes a row, the first of two codes in the low half. `blocks` is [`Blocks::B1x16`] or
    /// [`Blocks::B16x16`]; `scales` are u8 with the bits of [`E4M3`](fp8_format::E4M3), as many as [`Blocks::grid`] gives for the matrix.
    ///
    /// # Errors
    /// Blocks of FP8; codes or scales that are not u8 or of another number; scales on another device; a shape that a tensor cannot
    /// have.
    ///
    /// ```
    /// use fp8_kernels::fp8_format::{Blocks, TensorScale};
    /// use fp8_kernels::{DType, Device, Fp8Tensor, Tensor};
    /// let cpu = Device::cpu();
    /// let codes = Tensor::from_vec(vec![0x42u8, 0x07], [1, 2], &cpu)?; // 1, 2; 6
    /// let scales = Tensor::from_vec(vec![0x38u8], [1, 1], &cpu)?; // 1
    /// let x = Fp8Tensor::from_nvfp4(codes, [1, 3], Blocks::B1x16, scales, TensorScale::from_encode(2.0))?;
    /// assert_eq!(x.dequantize(DType::F32)?.to_vec::<f32>()?, [0.5, 1.0, 3.0]);
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    pub fn from_nvfp4(
        codes: Tensor,
        shape: impl Into<Shape>,
        blocks: Blocks,
        scales: Tensor,
        scale: TensorScale,
    ) -> Result<Self> {
        let op = "from_nvfp4";
        if !blocks.is_fp4() {
            let remedy = "expected Blocks::B1x16 or Blocks::B16x16".to_owned();
            return Err(Error::Option { op, option: "blocks", value: blocks.to_string(), remedy });
        }
        codes.expect_dtype(op, "codes", DType::U8)?;
        scales.expect_dtype(op, "scales", DType::U8)?;
        codes.device().expect_same(op, scales.device())?;
        let shape = shape.into();
        shape.check_size(op)?;
        let [rows, cols] = shape.matrix();
        let sharing = Sharing::Nvfp4 { blocks, hadamard: false };
        let tensor_scale = Tensor::from_vec(vec![scale.encode(), scale.decode()], [2], codes.device())?;
        let layout = Layout {
            codes: codes.reshape(sharing.codes_shape(shape))?,
            scale_inv: scales.reshape(blocks.grid(rows, cols))?,
            tensor_scale: Some(tensor_scale),
            sharing,
        };
        Ok(Self::from_layouts(shape, Encoding::E2M1, layout, None))
    }

    /// Returns the factors of the whole tensor in NVFP4, f32 `[2]`: the one that values were multiplied by before the scales of
    /// blocks were found (encode), and its inverse (decode). They are those of the rowwise codes, or of the columnwise ones if they
    /// alone exist: a Hadamard-transformed copy has its own. `None` for FP8.
    pub fn tensor_scale(&self) -> Option<&Tensor> {
        self.layouts.first().tensor_scale.as_ref()
    }

    /// Returns the factors of the columnwise codes in NVFP4, f32 `[2]`, if those exist: see [`tensor_scale`](Self::tensor_scale).
    pub fn columnwise_tensor_scale(&self) -> Option<&Tensor> {
        self.layouts.columnwise().and_then(|layout| layout.tensor_scale.as_ref())
    }

    /// Returns the tensor with other factors of the whole: f32 `[2]` as in [`tensor_scale`](Self::tensor_scale), and those of the
    /// columnwise codes if both copies exist. Codes and scales of blocks stay as they are.
    ///
    /// # Errors
    /// A tensor of FP8, which has no such factors; factors that are not f32 `[2]`, on another device, or of a copy that the tensor
    /// does not have.
    ///
    /// ```
    /// use fp8_kernels::fp8_format::{Blocks, TensorScale};
    /// use fp8_kernels::{DType, Device, Fp8Tensor, Tensor};
    /// let cpu = Device::cpu();
    /// let codes = Tensor::from_vec(vec![0x42u8], [1, 1], &cpu)?; // 1, 2
    /// let scales = Tensor::from_vec(vec![0x38u8], [1, 1], &cpu)?; // 1
    /// let x = Fp8Tensor::from_nvfp4(codes, [1, 2], Blocks::B1x16, scales, TensorScale::from_encode(2.0))?;
    /// let x = x.with_tensor_scale(Tensor::from_vec(vec![0.25f32, 4.0], [2], &cpu)?, None)?;
    /// assert_eq!(x.dequantize(DType::F32)?.to_vec::<f32>()?, [4.0, 8.0]);
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    pub fn with_tensor_scale(mut self, scale: Tensor, columnwise: Option<Tensor>) -> Result<Self> {
        let op = "with_tensor_scale";
        let refused = |value: &str, remedy: &str| {
            Err(Error::Option { op, option: "scale", value: value.to_owned(), remedy: remedy.to_owned() })
        };
        let (first, second) = match &mut self.layouts {
            Layouts::Rowwise(layout) | Layouts::Columnwise(layout) => (layout, None),
            Layouts::Both { rowwise, columnwise } => (rowwise, Some(columnwise)),
        };
        for (layout, scale) in [(Some(first), Some(scale)), (second, columnwise)] {
            let (layout, scale) = match (layout, scale) {
                (Some(layout), Some(scale)) => (layout, scale),
                (None, None) => continue,
                (Some(_), None) => return refused("of one copy", "expected one for each copy of the codes"),
                (None, Some(_)) => return refused("of two copies", "the tensor has one copy of its codes"),
            };
            let Some(own) = &mut layout.tensor_scale else {
                return refused("of a whole tensor", "expected a tensor in NVFP4");
            };
            scale.expect_dtype(op, "scale", DType::F32)?;
            layout.codes.device().expect_same(op, scale.device())?;
            *own = scale.reshape([2])?;
        }
        Ok(self)
    }

    /// Returns whether the columnwise codes are of a Hadamard transform of the transpose.
    pub fn has_hadamard(&self) -> bool {
        self.layouts.columnwise().is_some_and(|layout| layout.sharing.has_hadamard())
    }
}
