//! FP8 codes with the factor that turns them back into numbers.

use crate::backend::dispatch;
use crate::{DType, Device, Encoding, Result, Shape, Tensor, TransposePolicy, ops};
use std::fmt;

/// A tensor in FP8: `value = code · scale_inv`.
///
/// `rowwise` are the codes of the `[rows, cols]` matrix as stored, `columnwise` those of its transpose; at least one is
/// there. The dequantization factor belongs to the tensor, so a cached one stays right when its slot's scale moves on.
#[derive(Clone)]
pub struct Fp8Tensor {
    shape: Shape,
    encoding: Encoding,
    rowwise: Option<Tensor>,
    columnwise: Option<Tensor>,
    scale_inv: Tensor,
}

impl Fp8Tensor {
    /// From codes, in the layout of `shape`, and the factor.
    ///
    /// # Errors
    /// Codes that are not u8 or do not fill the shape; a factor that is not one f32, or on another device than the codes; a
    /// shape that no tensor can have ([`Shape::check_size`]).
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

    /// What a quantization on the host made.
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

    /// `scale_inv` is one f32 on the codes' device.
    pub(crate) fn from_parts(
        shape: Shape,
        rowwise: Option<Tensor>,
        columnwise: Option<Tensor>,
        encoding: Encoding,
        scale_inv: Tensor,
    ) -> Self {
        Self { shape, encoding, rowwise, columnwise, scale_inv }
    }

    /// The same tensor with the codes of its transpose, made from those as stored where they are missing.
    ///
    /// # Errors
    /// None on the CPU.
    pub fn with_columnwise(mut self) -> Result<Self> {
        if let (None, Some(codes)) = (&self.columnwise, &self.rowwise) {
            self.columnwise = Some(ops::transpose(&codes.reshape(self.matrix())?)?);
        }
        Ok(self)
    }

    /// The extents of the tensor that was quantized.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// `[product of the leading dimensions, last dimension]`.
    pub fn matrix(&self) -> [usize; 2] {
        self.shape.matrix()
    }

    /// The format of the codes.
    pub fn encoding(&self) -> Encoding {
        self.encoding
    }

    /// The dequantization factor, one f32.
    pub fn scale_inv(&self) -> &Tensor {
        &self.scale_inv
    }

    /// Where it lies.
    pub fn device(&self) -> &Device {
        self.scale_inv.device()
    }

    /// The codes as stored, if they were kept.
    pub fn rowwise(&self) -> Option<&Tensor> {
        self.rowwise.as_ref()
    }

    /// The codes of the transpose, `[cols, rows]`, if they were made.
    pub fn columnwise(&self) -> Option<&Tensor> {
        self.columnwise.as_ref()
    }

    /// The codes as stored, copied to the host, from whichever layout is there.
    ///
    /// # Errors
    /// None on the CPU.
    pub fn codes(&self) -> Result<Vec<u8>> {
        match (&self.rowwise, &self.columnwise) {
            (Some(codes), _) => codes.to_vec(),
            (None, Some(codes)) => ops::transpose(codes)?.to_vec(),
            (None, None) => Ok(Vec::new()),
        }
    }

    /// What backward needs of an operand: the transpose alone where it was made, else the codes as stored.
    #[must_use]
    pub fn for_backward(&self) -> Self {
        let mut kept = self.clone();
        if kept.columnwise.is_some() {
            kept.rowwise = None;
        }
        kept
    }

    /// The transposed matrix. The bytes are shared; they are copied only where the device's policy is
    /// [`TransposePolicy::OnDemand`] and no copy exists yet.
    ///
    /// # Errors
    /// None on the CPU.
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

    /// `code · scale_inv` in f32, rounded to `dtype`.
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
