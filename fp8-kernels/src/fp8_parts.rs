//! FP8 tensors with one factor in another shape, and their parts.

use crate::{Error, Fp8Tensor, Result, Shape, Tensor, ops};

impl Fp8Tensor {
    /// Returns the same elements in another shape. Codes are shared, not copied. With the same last dimension, all layouts stay; with
    /// another one, the rowwise codes.
    ///
    /// # Errors
    /// A shape with another number of elements; another last dimension, with factors for rows or blocks.
    ///
    /// ```
    /// use fp8_kernels::{Device, Encoding, Fp8Tensor, Tensor};
    /// let cpu = Device::cpu();
    /// let codes = Tensor::from_vec(vec![0x38u8, 0x40], [1, 2], &cpu)?;
    /// let x = Fp8Tensor::from_codes(codes, [1, 2], Encoding::E4M3, Tensor::scalar(1.0, &cpu)?)?;
    /// assert_eq!(x.reshape([2, 1])?.shape().to_string(), "[2, 1]");
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    pub fn reshape(&self, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        if shape.matrix() == self.matrix() {
            return self.in_shape(shape);
        }
        self.with_codes(shape, self.whole("reshape")?.reshape(shape)?)
    }

    /// Splits the tensor along its last dimension, as [`ops::split`] does. The codes are copied; all parts have the tensor's factor.
    ///
    /// # Errors
    /// Sizes that do not add up to the last dimension; factors for rows or blocks.
    ///
    /// ```
    /// use fp8_kernels::{DType, Device, Encoding, Fp8Tensor, Tensor};
    /// let cpu = Device::cpu();
    /// let codes = Tensor::from_vec(vec![0x38u8, 0x40, 0x44, 0x48], [2, 2], &cpu)?; // 1, 2; 3, 4
    /// let x = Fp8Tensor::from_codes(codes, [2, 2], Encoding::E4M3, Tensor::scalar(0.5, &cpu)?)?;
    /// let parts = x.split(&[1, 1])?;
    /// assert_eq!(parts[1].dequantize(DType::F32)?.to_vec::<f32>()?, [1.0, 2.0]);
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    pub fn split(&self, sizes: &[usize]) -> Result<Vec<Self>> {
        let parts = ops::split(&self.whole("split")?, sizes)?;
        parts.into_iter().map(|codes| self.with_codes(*codes.shape(), codes)).collect()
    }

    /// The rowwise codes in the tensor's shape, or an error where its factors belong to their places.
    fn whole(&self, op: &'static str) -> Result<Tensor> {
        if let Some(blocks) = self.blocks() {
            let remedy = "only tensors with one factor have parts and other shapes".to_owned();
            return Err(Error::Option { op, option: "blocks", value: blocks.to_string(), remedy });
        }
        self.rowwise_layout(op)?.codes.reshape(*self.shape())
    }

    fn with_codes(&self, shape: Shape, codes: Tensor) -> Result<Self> {
        Self::from_codes(codes, shape, self.encoding(), self.scale_inv().clone())
    }
}
