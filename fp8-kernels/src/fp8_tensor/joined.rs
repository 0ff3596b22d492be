//! The whole of a tensor whose parts were quantized on their own.

use super::Fp8Tensor;
use super::layouts::{Layout, Layouts, Sharing};
use crate::{DType, Error, Result, Shape, Tensor};

impl Fp8Tensor {
    /// Creates a tensor that is quantized as this one is, and of which this one may be a part. Ranks that gather the parts of a
    /// tensor join them in this way.
    ///
    /// The shape is that of `codes`; in NVFP4, whose codes are packed, its last dimension is that of this tensor. Which elements share a
    /// factor is as in this tensor, which has rowwise codes, and so is the factor of the whole in NVFP4. `columnwise` are the codes of
    /// the transpose, `[cols, rows]`, and their factors; this tensor must have columnwise codes then.
    ///
    /// # Errors
    /// Codes that are not u8; factors of another dtype or number than the codes need; columnwise codes of another number; layouts
    /// that this tensor does not have; another device; a shape that a tensor cannot have.
    ///
    /// ```
    /// use fp8_kernels::fp8_format::Blocks;
    /// use fp8_kernels::{DType, Device, Encoding, Fp8Tensor, Tensor};
    /// let cpu = Device::cpu();
    /// let row = |codes: [u8; 2], factor: f32| {
    ///     let codes = Tensor::from_vec(codes.to_vec(), [1, 2], &cpu)?;
    ///     let factor = Tensor::from_vec(vec![factor], [1, 1], &cpu)?;
    ///     Fp8Tensor::from_blocks(codes, [1, 2], Encoding::E4M3, Blocks::Row, factor)
    /// };
    /// let first = row([0x38, 0x40], 0.5)?; // the codes of 1 and 2
    /// let codes = Tensor::from_vec(vec![0x38u8, 0x40, 0x44, 0x48], [2, 2], &cpu)?;
    /// let factors = Tensor::from_vec(vec![0.5f32, 10.0], [2, 1], &cpu)?;
    /// let whole = first.joined(codes, factors, None)?;
    /// assert_eq!(whole.dequantize(DType::F32)?.to_vec::<f32>()?, [0.5, 1.0, 30.0, 40.0]);
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    pub fn joined(
        &self,
        codes: Tensor,
        scale_inv: Tensor,
        columnwise: Option<(Tensor, Tensor)>,
    ) -> Result<Self> {
        let is_packed = matches!(self.layouts.first().sharing, Sharing::Nvfp4 { .. });
        let shape = if is_packed { codes.shape().with_last(self.shape.last_dim()) } else { *codes.shape() };
        let [rows, cols] = shape.matrix();
        let rowwise = joined(self.layouts.rowwise(), codes, scale_inv, shape)?;
        let columnwise = columnwise
            .map(|(codes, factors)| joined(self.layouts.columnwise(), codes, factors, [cols, rows].into()))
            .transpose()?;
        Ok(Self::from_layouts(shape, self.encoding, rowwise, columnwise))
    }

    /// Creates a tensor of this `shape` that has columnwise codes alone, quantized as this one's are: see [`joined`](Self::joined).
    ///
    /// `codes` are those of the transpose, `[cols, rows]`, packed as this tensor's are, and `scale_inv` their factors.
    ///
    /// # Errors
    /// Those of [`joined`](Self::joined); a tensor without columnwise codes.
    ///
    /// ```
    /// use fp8_kernels::{DType, Device, Encoding, Fp8Tensor, Tensor};
    /// let cpu = Device::cpu();
    /// let tensor = |codes: &[u8]| Tensor::from_vec(codes.to_vec(), [1, codes.len()], &cpu);
    /// let first = Fp8Tensor::from_codes(tensor(&[0x38])?, [1, 1], Encoding::E4M3, Tensor::scalar(0.5, &cpu)?)?;
    /// let whole = first.with_columnwise()?.joined_columns([2, 1], tensor(&[0x38, 0x40])?, Tensor::scalar(0.5, &cpu)?)?;
    /// assert_eq!(whole.dequantize(DType::F32)?.to_vec::<f32>()?, [0.5, 1.0]);
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    pub fn joined_columns(&self, shape: impl Into<Shape>, codes: Tensor, scale_inv: Tensor) -> Result<Self> {
        let shape = shape.into();
        shape.check_size("joined")?;
        let [rows, cols] = shape.matrix();
        let columnwise = joined(self.layouts.columnwise(), codes, scale_inv, [cols, rows].into())?;
        Ok(Self { shape, encoding: self.encoding, layouts: Layouts::Columnwise(columnwise) })
    }
}

/// Returns the codes and factors of a whole of this shape, which share factors as a part's do.
fn joined(part: Option<&Layout>, codes: Tensor, scale_inv: Tensor, shape: Shape) -> Result<Layout> {
    let op = "joined";
    let absent = || Error::Option {
        op,
        option: "codes",
        value: format!("{shape}"),
        remedy: "expected codes for the layouts that this tensor has".to_owned(),
    };
    let part = part.ok_or_else(absent)?;
    codes.expect_dtype(op, "codes", DType::U8)?;
    scale_inv.expect_dtype(op, "scale_inv", part.scale_inv.dtype())?;
    part.codes.device().expect_same(op, codes.device())?;
    part.codes.device().expect_same(op, scale_inv.device())?;
    let [height, width] = shape.matrix();
    let grid = part.sharing.blocks().map_or(Shape::from([]), |blocks| blocks.grid(height, width).into());
    let codes = codes.reshape(part.sharing.codes_shape(shape))?;
    let scale_inv = scale_inv.reshape(grid)?;
    Ok(Layout { codes, scale_inv, ..part.clone() })
}
