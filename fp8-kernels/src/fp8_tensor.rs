//! FP8 codes, or codes of 4 bits, with the factors that turn them back into numbers.

mod in_place;
mod joined;
mod layouts;
mod packed;
mod quantize_columnwise;

use crate::backend::dispatch;
use crate::{DType, Device, Encoding, Error, Result, Shape, Tensor, TransposePolicy, ops};
use fp8_format::Blocks;
use layouts::Layouts;
pub(crate) use layouts::{Layout, Sharing, packed_width};
use std::fmt;

/// A tensor in FP8: codes and dequantization factors, with `value = code · scale_inv`.
///
/// It has one factor, or one for each row or block ([`blocks`](Self::blocks)). It has up to two copies of its codes: `rowwise`,
/// those of the `[rows, cols]` matrix, and `columnwise`, those of its transpose. At least one exists. Each copy has its own
/// factors, because other elements share a block in the transpose: with factors for rows, 1 × 128 blocks or MX blocks, the
/// columnwise copy is quantized from the source and cannot be made from the rowwise codes. The factors belong to the tensor, so a
/// cached tensor stays valid when the scale of its slot changes.
///
/// In NVFP4 ([`from_nvfp4`](Self::from_nvfp4)) two codes of [`E2M1`](fp8_format::E2M1) share a byte, each block of 16 has a scale in E4M3,
/// and the tensor has one in f32: [`tensor_scale`](Self::tensor_scale). [`ops::quantize`](crate::ops::quantize()) returns one inside an [`Operand`](crate::Operand);
/// [`from_codes`](Self::from_codes) creates one from codes that you have.
///
/// ```
/// use fp8_kernels::{DType, Device, Encoding, Fp8Tensor, Tensor};
/// let cpu = Device::cpu();
/// let codes = Tensor::from_vec(vec![0x38u8, 0x40, 0x44, 0x48], [2, 2], &cpu)?; // 1, 2, 3 and 4 in E4M3
/// let x = Fp8Tensor::from_codes(codes, [2, 2], Encoding::E4M3, Tensor::scalar(0.5, &cpu)?)?;
/// assert_eq!(x.dequantize(DType::F32)?.to_vec::<f32>()?, [0.5, 1.0, 1.5, 2.0]);
/// let transposed = x.transposed()?;
/// assert_eq!(transposed.codes()?, [0x38, 0x44, 0x40, 0x48]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Clone)]
pub struct Fp8Tensor {
    shape: Shape,
    encoding: Encoding,
    layouts: Layouts,
}

impl Fp8Tensor {
    /// Creates a tensor from row-major `codes` for `shape` and the dequantization factor.
    ///
    /// # Errors
    /// Codes that are not u8 or whose number is not that of the shape's elements; a factor that is not one f32 or is on
    /// another device; a shape that a tensor cannot have ([`Shape::check_size`]).
    pub fn from_codes(
        codes: Tensor,
        shape: impl Into<Shape>,
        encoding: Encoding,
        scale_inv: Tensor,
    ) -> Result<Self> {
        codes.expect_dtype("from_codes", "codes", DType::U8)?;
        scale_inv.expect_dtype("from_codes", "scale_inv", DType::F32)?;
        codes.device().expect_same("from_codes", scale_inv.device())?;
        expect_bytes("from_codes", encoding)?;
        let scale_inv = scale_inv.reshape([])?;
        let shape = shape.into();
        shape.check_size("from_codes")?;
        Ok(Self::from_parts(shape, codes.reshape(shape)?, None, encoding, scale_inv))
    }

    /// Creates a tensor from row-major `codes` for `shape` and the factors of its rows or blocks.
    ///
    /// `scale_inv` has the extents that [`Blocks::grid`] gives for the matrix: f32, or u8 with the bits of
    /// [`E8M0`](fp8_format::E8M0) for [`Blocks::Mx32`].
    ///
    /// # Errors
    /// Codes that are not u8; factors of another dtype, number or device; a shape that a tensor cannot have.
    ///
    /// ```
    /// use fp8_kernels::fp8_format::Blocks;
    /// use fp8_kernels::{DType, Device, Encoding, Fp8Tensor, Tensor};
    /// let cpu = Device::cpu();
    /// let codes = Tensor::from_vec(vec![0x38u8, 0x40, 0x44, 0x48], [2, 2], &cpu)?; // 1, 2; 3, 4
    /// let factors = Tensor::from_vec(vec![0.5f32, 10.0], [2, 1], &cpu)?;
    /// let x = Fp8Tensor::from_blocks(codes, [2, 2], Encoding::E4M3, Blocks::Row, factors)?;
    /// assert_eq!(x.dequantize(DType::F32)?.to_vec::<f32>()?, [0.5, 1.0, 30.0, 40.0]);
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    pub fn from_blocks(
        codes: Tensor,
        shape: impl Into<Shape>,
        encoding: Encoding,
        blocks: Blocks,
        scale_inv: Tensor,
    ) -> Result<Self> {
        let op = "from_blocks";
        if blocks.is_fp4() {
            let remedy =
                "these blocks have codes of 4 bits and a factor for the tensor: use Fp8Tensor::from_nvfp4";
            let value = blocks.to_string();
            return Err(Error::Option { op, option: "blocks", value, remedy: remedy.to_owned() });
        }
        expect_bytes(op, encoding)?;
        codes.expect_dtype(op, "codes", DType::U8)?;
        scale_inv.expect_dtype(op, "scale_inv", factor_dtype(blocks))?;
        codes.device().expect_same(op, scale_inv.device())?;
        let shape = shape.into();
        shape.check_size(op)?;
        let [rows, cols] = shape.matrix();
        let sharing = Sharing::Blocks { blocks, powers_of_two: blocks == Blocks::Mx32 };
        let scale_inv = scale_inv.reshape(blocks.grid(rows, cols))?;
        let layout = Layout { codes: codes.reshape(shape)?, scale_inv, tensor_scale: None, sharing };
        Ok(Self::from_layouts(shape, encoding, layout, None))
    }

    /// Creates a tensor from the codes of a quantization on the CPU with one scale.
    pub(crate) fn on_cpu(
        rowwise: Tensor,
        columnwise: Option<Tensor>,
        encoding: Encoding,
        scale: f32,
    ) -> Self {
        let shape = *rowwise.shape();
        let scale_inv = Tensor::on_cpu(vec![scale.recip()], Shape::from([]), rowwise.device());
        Self::from_parts(shape, rowwise, columnwise, encoding, scale_inv)
    }

    /// Creates a tensor with one factor from its parts. `scale_inv` is one f32 on the codes' device.
    pub(crate) fn from_parts(
        shape: Shape,
        rowwise: Tensor,
        columnwise: Option<Tensor>,
        encoding: Encoding,
        scale_inv: Tensor,
    ) -> Self {
        let layout = |codes| Layout {
            codes,
            scale_inv: scale_inv.clone(),
            tensor_scale: None,
            sharing: Sharing::Tensor,
        };
        Self::from_layouts(shape, encoding, layout(rowwise), columnwise.map(layout))
    }

    /// Creates a tensor from the layouts of a quantization.
    pub(crate) fn from_layouts(
        shape: Shape,
        encoding: Encoding,
        rowwise: Layout,
        columnwise: Option<Layout>,
    ) -> Self {
        Self { shape, encoding, layouts: Layouts::new(rowwise, columnwise) }
    }

    /// Returns the tensor with columnwise codes, made from the rowwise ones if they do not exist yet.
    ///
    /// # Errors
    /// Factors for rows, 1 × 128 blocks or MX blocks without a columnwise copy; the device is out of memory or failed.
    pub fn with_columnwise(mut self) -> Result<Self> {
        if let Layouts::Rowwise(rowwise) = &self.layouts {
            let columnwise = self.turned("with_columnwise", rowwise, self.matrix())?;
            self.layouts = Layouts::new(rowwise.clone(), Some(columnwise));
        }
        Ok(self)
    }

    /// Transposes a layout of a `[rows, cols]` matrix.
    fn turned(&self, op: &'static str, layout: &Layout, [rows, cols]: [usize; 2]) -> Result<Layout> {
        let scale_inv = match layout.sharing.blocks() {
            None => layout.scale_inv.clone(),
            Some(blocks @ (Blocks::B128x128 | Blocks::B16x16)) => {
                ops::transpose(&layout.scale_inv.reshape(blocks.grid(rows, cols))?)?
            }
            Some(blocks) => {
                let remedy = "other elements share a scale in the transpose: quantize the source with a slot whose columnwise is true";
                let value = blocks.to_string();
                return Err(Error::Option { op, option: "blocks", value, remedy: remedy.to_owned() });
            }
        };
        let codes = match layout.sharing {
            Sharing::Nvfp4 { .. } => {
                dispatch!(layout.codes.device(), nvfp4::transpose(op, &layout.codes, [rows, cols]))?
            }
            Sharing::Tensor | Sharing::Blocks { .. } => ops::transpose(&layout.codes.reshape([rows, cols])?)?,
        };
        Ok(Layout { codes, scale_inv, ..layout.clone() })
    }

    /// Returns the shape of the tensor that was quantized.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Returns `[product of the leading dimensions, last dimension]`.
    pub fn matrix(&self) -> [usize; 2] {
        self.shape.matrix()
    }

    /// Returns the format of the codes.
    pub fn encoding(&self) -> Encoding {
        self.encoding
    }

    /// Returns which elements of the rowwise codes share a factor, or of the columnwise ones if they alone exist. `None` means
    /// that all do.
    pub fn blocks(&self) -> Option<Blocks> {
        self.layouts.first().sharing.blocks()
    }

    /// Returns how the elements share factors: those of the rowwise codes, or of the columnwise ones if they alone exist.
    pub(crate) fn first_sharing(&self) -> Sharing {
        self.layouts.first().sharing
    }

    /// Returns which elements of the columnwise codes share a factor, if those codes exist and not all elements do. It differs from
    /// [`blocks`](Self::blocks) only under [`BlockRule::RowsThenTensor`](crate::BlockRule::RowsThenTensor).
    pub fn columnwise_blocks(&self) -> Option<Blocks> {
        self.layouts.columnwise().and_then(|layout| layout.sharing.blocks())
    }

    /// Returns the dequantization factors of the rowwise codes, or those of the columnwise ones if they alone exist: one f32; or,
    /// with [`blocks`](Self::blocks), as many as [`Blocks::grid`] says, f32, or u8 with the bits of E8M0 for MX and of E4M3 for NVFP4.
    pub fn scale_inv(&self) -> &Tensor {
        &self.layouts.first().scale_inv
    }

    /// Returns the dequantization factors of the columnwise codes, if those exist. Their grid is that of the transpose.
    pub fn columnwise_scale_inv(&self) -> Option<&Tensor> {
        self.layouts.columnwise().map(|layout| &layout.scale_inv)
    }

    /// Returns the device that the tensor is on.
    pub fn device(&self) -> &Device {
        self.layouts.first().codes.device()
    }

    /// Returns the rowwise codes, or the columnwise ones if they alone exist. [`scale_inv`](Self::scale_inv) are their factors.
    pub fn stored_codes(&self) -> &Tensor {
        &self.layouts.first().codes
    }

    /// Returns the codes of the matrix, `[rows, cols]` or in the tensor's shape, if they exist. Packed ones have ⌈cols / 2⌉ bytes a row.
    pub fn rowwise(&self) -> Option<&Tensor> {
        self.layouts.rowwise().map(|layout| &layout.codes)
    }

    /// Returns the codes of the transpose, `[cols, rows]`, if they exist. Packed ones have ⌈rows / 2⌉ bytes a row, or half of the rows
    /// rounded up to a multiple of 16 if they are of a Hadamard transform.
    pub fn columnwise(&self) -> Option<&Tensor> {
        self.layouts.columnwise().map(|layout| &layout.codes)
    }

    /// Copies the codes of the matrix to the host, transposed back if only the columnwise ones exist. On a GPU this waits
    /// until all work queued so far is done.
    ///
    /// # Errors
    /// Factors for rows, 1 × 128, 1 × 16 or MX blocks without rowwise codes; the device is out of memory or failed.
    pub fn codes(&self) -> Result<Vec<u8>> {
        self.rowwise_layout("codes")?.codes.to_vec()
    }

    /// Returns the rowwise layout, made from the columnwise one if necessary and possible.
    pub(crate) fn rowwise_layout(&self, op: &'static str) -> Result<Layout> {
        match &self.layouts {
            Layouts::Rowwise(rowwise) | Layouts::Both { rowwise, .. } => Ok(rowwise.clone()),
            Layouts::Columnwise(columnwise) => {
                let [rows, cols] = self.matrix();
                self.turned(op, columnwise, [cols, rows])
            }
        }
    }

    /// Returns what a backward pass needs: the columnwise codes alone if they exist, else the rowwise ones. The codes are
    /// shared, not copied.
    #[must_use]
    pub fn for_backward(&self) -> Self {
        match self.layouts.columnwise() {
            Some(columnwise) => Self { layouts: Layouts::Columnwise(columnwise.clone()), ..*self },
            None => self.clone(),
        }
    }

    /// Returns the tensor without its columnwise codes if it has rowwise ones. The codes are shared, not copied.
    ///
    /// ```
    /// use fp8_kernels::{Device, Encoding, Fp8Tensor, Tensor};
    /// let cpu = Device::cpu();
    /// let codes = Tensor::from_vec(vec![0x38u8, 0x40], [1, 2], &cpu)?;
    /// let both = Fp8Tensor::from_codes(codes, [1, 2], Encoding::E4M3, Tensor::scalar(1.0, &cpu)?)?.with_columnwise()?;
    /// assert!(both.columnwise().is_some() && both.without_columnwise().columnwise().is_none());
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    #[must_use]
    pub fn without_columnwise(&self) -> Self {
        match self.layouts.rowwise() {
            Some(rowwise) => Self { layouts: Layouts::Rowwise(rowwise.clone()), ..*self },
            None => self.clone(),
        }
    }

    /// Returns the transposed matrix, whose rowwise codes are this tensor's columnwise ones and the other way round.
    ///
    /// The codes are shared. A transposed copy is made only if it does not exist yet, all elements share one factor and the
    /// device's policy is [`TransposePolicy::OnDemand`].
    ///
    /// # Errors
    /// The device is out of memory or failed.
    pub fn transposed(&self) -> Result<Self> {
        let [rows, cols] = self.matrix();
        let flat = |layout: &Layout, shape: [usize; 2]| layout.in_shape(shape.into());
        let layouts = match &self.layouts {
            Layouts::Rowwise(layout)
                if self.blocks().is_none()
                    && self.device().transpose_policy() == TransposePolicy::OnDemand =>
            {
                let made = self.turned("transposed", layout, [rows, cols])?;
                Layouts::Both { rowwise: made, columnwise: flat(layout, [rows, cols])? }
            }
            Layouts::Rowwise(layout) => Layouts::Columnwise(flat(layout, [rows, cols])?),
            Layouts::Columnwise(layout) => Layouts::Rowwise(flat(layout, [cols, rows])?),
            Layouts::Both { rowwise, columnwise } => Layouts::Both {
                rowwise: flat(columnwise, [cols, rows])?,
                columnwise: flat(rowwise, [rows, cols])?,
            },
        };
        Ok(Self { shape: [cols, rows].into(), encoding: self.encoding, layouts })
    }

    /// Returns the tensor in a shape with the same matrix.
    pub(crate) fn in_shape(&self, shape: Shape) -> Result<Self> {
        let rowwise = |layout: &Layout| layout.in_shape(shape);
        let layouts = match &self.layouts {
            Layouts::Rowwise(layout) => Layouts::Rowwise(rowwise(layout)?),
            Layouts::Columnwise(layout) => Layouts::Columnwise(layout.clone()),
            Layouts::Both { rowwise: layout, columnwise } => {
                Layouts::Both { rowwise: rowwise(layout)?, columnwise: columnwise.clone() }
            }
        };
        Ok(Self { shape, encoding: self.encoding, layouts })
    }

    /// Returns the values, `code · scale_inv` in f32, rounded to `dtype`; in NVFP4 `(code · scale) · decode`.
    ///
    /// # Errors
    /// A dtype that is not a float; factors for rows, 1 × 128, 1 × 16 or MX blocks without rowwise codes; codes of a Hadamard transform.
    pub fn dequantize(&self, dtype: DType) -> Result<Tensor> {
        ops::check_output("dequantize", dtype)?;
        if let Some(rowwise) = self.layouts.rowwise().filter(|rowwise| rowwise.sharing.has_hadamard()) {
            let remedy =
                "they are of a Hadamard transform, whose products with each other alone mean something";
            let value = rowwise.sharing.name().to_owned();
            return Err(Error::Option {
                op: "dequantize",
                option: "codes",
                value,
                remedy: remedy.to_owned(),
            });
        }
        dispatch!(self.device(), quantize::dequantize(self, dtype))
    }
}

/// Prints shape, encoding, device and the layouts that were made, and on the CPU the dequantization factor.
impl fmt::Debug for Fp8Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layouts = match &self.layouts {
            Layouts::Both { .. } => "rowwise and columnwise",
            Layouts::Rowwise(_) => "rowwise",
            Layouts::Columnwise(_) => "columnwise",
        };
        write!(f, "Fp8Tensor({}, {:?}, {}, {layouts}", self.shape, self.encoding, self.device())?;
        if let Some(blocks) = self.blocks() {
            return write!(f, ", a scale for each {blocks})");
        }
        match self.scale_inv().as_slice::<f32>() {
            Ok([scale_inv]) => write!(f, ", scale_inv {scale_inv:?})"),
            _ => f.write_str(")"),
        }
    }
}

/// Refuses a format whose codes are not a byte each.
fn expect_bytes(op: &'static str, encoding: Encoding) -> Result<()> {
    match encoding {
        Encoding::E4M3 | Encoding::E5M2 => Ok(()),
        Encoding::E2M1 => {
            let remedy = "its codes have 4 bits: use Fp8Tensor::from_nvfp4".to_owned();
            Err(Error::Option { op, option: "encoding", value: encoding.to_string(), remedy })
        }
    }
}

/// The dtype of the factors.
fn factor_dtype(blocks: Blocks) -> DType {
    if blocks == Blocks::Mx32 { DType::U8 } else { DType::F32 }
}
