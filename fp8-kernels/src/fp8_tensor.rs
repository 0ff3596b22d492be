//! FP8 codes with the factor that turns them back into numbers.

use crate::backend::dispatch;
use crate::{DType, Device, Encoding, Result, Shape, Tensor, TransposePolicy, ops};
use std::fmt;

/// A tensor in FP8: codes and a dequantization factor, with `value = code · scale_inv`.
///
/// It has up to two copies of its codes: `rowwise`, those of the `[rows, cols]` matrix, and `columnwise`, those of its
/// transpose. At least one exists. The factor belongs to the tensor, so a cached tensor stays valid when the scale of its
/// slot changes. [`ops::quantize`](crate::ops::quantize()) returns one inside an [`Operand`](crate::Operand);
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
    rowwise: Option<Tensor>,
    columnwise: Option<Tensor>,
    scale_inv: Tensor,
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
        let scale_inv = scale_inv.reshape([])?;
        let shape = shape.into();
        shape.check_size("from_codes")?;
        Ok(Self { shape, encoding, rowwise: Some(codes.reshape(shape)?), columnwise: None, scale_inv })
    }

    /// Creates a tensor from the codes of a quantization on the CPU.
    pub(crate) fn on_cpu(
        rowwise: Tensor,
        columnwise: Option<Tensor>,
        encoding: Encoding,
        scale: f32,
    ) -> Self {
        let shape = *rowwise.shape();
        let scale_inv = Tensor::on_cpu(vec![scale.recip()], Shape::from([]), rowwise.device());
        Self::from_parts(shape, Some(rowwise), columnwise, encoding, scale_inv)
    }

    /// Creates a tensor from its parts. `scale_inv` is one f32 on the codes' device.
    pub(crate) fn from_parts(
        shape: Shape,
        rowwise: Option<Tensor>,
        columnwise: Option<Tensor>,
        encoding: Encoding,
        scale_inv: Tensor,
    ) -> Self {
        Self { shape, encoding, rowwise, columnwise, scale_inv }
    }

    /// Returns the tensor with columnwise codes, made from the rowwise ones if they do not exist yet.
    ///
    /// # Errors
    /// The device is out of memory or failed.
    pub fn with_columnwise(mut self) -> Result<Self> {
        if let (None, Some(codes)) = (&self.columnwise, &self.rowwise) {
            self.columnwise = Some(ops::transpose(&codes.reshape(self.matrix())?)?);
        }
        Ok(self)
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

    /// Returns the dequantization factor, one f32.
    pub fn scale_inv(&self) -> &Tensor {
        &self.scale_inv
    }

    /// Returns the device that the tensor is on.
    pub fn device(&self) -> &Device {
        self.scale_inv.device()
    }

    /// Returns the codes of the matrix, `[rows, cols]` or in the tensor's shape, if they exist.
    pub fn rowwise(&self) -> Option<&Tensor> {
        self.rowwise.as_ref()
    }

    /// Returns the codes of the transpose, `[cols, rows]`, if they exist.
    pub fn columnwise(&self) -> Option<&Tensor> {
        self.columnwise.as_ref()
    }

    /// Copies the codes of the matrix to the host, transposed back if only the columnwise ones exist. On a GPU this waits
    /// until all work queued so far is done.
    ///
    /// # Errors
    /// The device is out of memory or failed.
    pub fn codes(&self) -> Result<Vec<u8>> {
        match (&self.rowwise, &self.columnwise) {
            (Some(codes), _) => codes.to_vec(),
            (None, Some(codes)) => ops::transpose(codes)?.to_vec(),
            (None, None) => Ok(Vec::new()),
        }
    }

    /// Returns what a backward pass needs: the columnwise codes alone if they exist, else the rowwise ones. The codes are
    /// shared, not copied.
    #[must_use]
    pub fn for_backward(&self) -> Self {
        let mut kept = self.clone();
        if kept.columnwise.is_some() {
            kept.rowwise = None;
        }
        kept
    }

    /// Returns the transposed matrix, whose rowwise codes are this tensor's columnwise ones and the other way round.
    ///
    /// The codes are shared. A transposed copy is made only if it does not exist yet and the device's policy is
    /// [`TransposePolicy::OnDemand`].
    ///
    /// # Errors
    /// The device is out of memory or failed.
    pub fn transposed(&self) -> Result<Self> {
        let [rows, cols] = self.matrix();
        let flat = |codes: &Tensor, shape: [usize; 2]| codes.reshape(shape);
        let mut columnwise = self.columnwise.as_ref().map(|c| flat(c, [cols, rows])).transpose()?;
        let rowwise = self.rowwise.as_ref().map(|c| flat(c, [rows, cols])).transpose()?;
        if let (None, Some(codes), TransposePolicy::OnDemand) =
            (&columnwise, &rowwise, self.device().transpose_policy())
        {
            columnwise = Some(ops::transpose(codes)?);
        }
        Ok(Self {
            shape: [cols, rows].into(),
            encoding: self.encoding,
            rowwise: columnwise,
            columnwise: rowwise,
            scale_inv: self.scale_inv.clone(),
        })
    }

    /// Returns the values, `code · scale_inv` in f32, rounded to `dtype`.
    ///
    /// # Errors
    /// A dtype that is not a float.
    pub fn dequantize(&self, dtype: DType) -> Result<Tensor> {
        ops::check_output("dequantize", dtype)?;
        dispatch!(self.device(), quantize::dequantize(self, dtype))
    }
}

/// Prints shape, encoding, device and the layouts that were made, and on the CPU the dequantization factor.
impl fmt::Debug for Fp8Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layouts = match (&self.rowwise, &self.columnwise) {
            (Some(_), Some(_)) => "rowwise and columnwise",
            (Some(_), None) => "rowwise",
            (None, Some(_)) => "columnwise",
            (None, None) => "no codes",
        };
        write!(f, "Fp8Tensor({}, {:?}, {}, {layouts}", self.shape, self.encoding, self.device())?;
        match self.scale_inv.as_slice::<f32>() {
            Ok([scale_inv]) => write!(f, ", scale_inv {scale_inv:?})"),
            _ => f.write_str(")"),
        }
    }
}
