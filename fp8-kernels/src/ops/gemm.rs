//! The matrix product in high precision: f32 sums, then the bias in f32, then one rounding to the output's type.

use crate::backend::dispatch;
use crate::{DType, Error, Result, Shape, Tensor};

/// Selects the operands of a [`gemm`](gemm()) that are transposed. All matrices are row-major.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Layout {
    /// `a[m, k] · b[k, n]`.
    Nn,
    /// `a[m, k] · b[n, k]ᵀ`.
    Nt,
    /// `a[k, m]ᵀ · b[k, n]`.
    Tn,
}

/// Returns the matrix product of `a` and `b`, transposed as `layout` says, plus `bias` on each row.
///
/// The operands are f32, bf16 or f16, also different ones, and are used as matrices `[product of the leading dimensions,
/// last dimension]`. The result is `[m, n]` in `dtype`; if the rows of `a` are those of the result (`Nn`, `Nt`), it keeps
/// `a`'s leading dimensions. Products are summed in f32, the `[n]` bias is added in f32, and the result is rounded once.
/// For a 16-bit `dtype`, an f32 bias is first rounded to `dtype`, as in Transformer Engine.
///
/// On a GPU this is a product of cuBLASLt, whose order of summation differs from the CPU's.
///
/// # Errors
/// Dimensions that do not match; a bias whose length is not n; dtypes that are not floats; a result with more elements than
/// a tensor can have or memory holds.
///
/// ```
/// use fp8_kernels::{DType, Device, Tensor, ops};
/// let a = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [2, 2], &Device::cpu())?;
/// let y = ops::gemm(&a, &a, ops::Layout::Nt, None, DType::F32)?; // a · aᵀ
/// assert_eq!(y.to_vec::<f32>()?, [5.0, 11.0, 11.0, 25.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn gemm(a: &Tensor, b: &Tensor, layout: Layout, bias: Option<&Tensor>, dtype: DType) -> Result<Tensor> {
    let dims = check("gemm", a, b, layout)?;
    check_bias("gemm", bias, dims[1], a)?;
    check_output("gemm", dtype)?;
    let bias = rounded_bias(bias, dtype)?;
    dispatch!(a.device(), gemm::gemm(a, b, layout, dims, bias.as_ref(), dtype))
}

/// Adds the matrix product of `a` and `b`, transposed as `layout` says, to `out` in place.
///
/// `out` is f32 `[m, n]`. Weight gradients are accumulated in this way. `name` identifies `out` in errors.
///
/// # Errors
/// Those of [`gemm`](gemm()); an `out` that has another shape, is not f32 or shares its storage.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let cpu = Device::cpu();
/// let dy = Tensor::from_vec(vec![1.0f32, 2.0], [1, 2], &cpu)?;
/// let x = Tensor::from_vec(vec![3.0f32, 4.0], [1, 2], &cpu)?;
/// let mut dw = Tensor::from_vec(vec![10.0f32; 4], [2, 2], &cpu)?;
/// ops::gemm_accumulate(&dy, &x, ops::Layout::Tn, &mut dw, "fc1.weight.main_grad")?; // dw += dyᵀ · x
/// assert_eq!(dw.to_vec::<f32>()?, [13.0, 14.0, 16.0, 18.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn gemm_accumulate(a: &Tensor, b: &Tensor, layout: Layout, out: &mut Tensor, name: &str) -> Result<()> {
    let op = "gemm_accumulate";
    let [m, n, k] = check(op, a, b, layout)?;
    check_out(op, out, [m, n], a)?;
    dispatch!(a.device(), gemm::gemm_accumulate(a, b, layout, [m, n, k], out, name))
}

/// Checks the operands and returns `[m, n, k]`.
fn check(op: &'static str, a: &Tensor, b: &Tensor, layout: Layout) -> Result<[usize; 3]> {
    a.expect_float(op, "a")?;
    b.expect_float(op, "b")?;
    a.device().expect_same(op, b.device())?;
    let ([a0, a1], [b0, b1]) = (a.shape().matrix(), b.shape().matrix());
    let ([m, k], [kb, n], remedy) = match layout {
        Layout::Nn => ([a0, a1], [b0, b1], "a · b needs a's last dimension to equal b's first"),
        Layout::Nt => ([a0, a1], [b1, b0], "a · bᵀ needs equal last dimensions"),
        Layout::Tn => ([a1, a0], [b0, b1], "aᵀ · b needs equal first dimensions"),
    };
    if k != kb {
        let (lhs, rhs) = (*a.shape(), *b.shape());
        return Err(Error::Shapes { op, what: "a and b", lhs, rhs, remedy });
    }
    output_shape(a, layout, [m, n]).check_size(op)?;
    Ok([m, n, k])
}

/// Returns the product's shape: `a`'s leading dimensions, then n, if they are its rows; else `[m, n]`.
pub(crate) fn output_shape(a: &Tensor, layout: Layout, [m, n]: [usize; 2]) -> Shape {
    if layout == Layout::Tn { Shape::from([m, n]) } else { a.shape().with_last(n) }
}

pub(super) fn check_bias(op: &'static str, bias: Option<&Tensor>, n: usize, like: &Tensor) -> Result<()> {
    let Some(bias) = bias else { return Ok(()) };
    bias.expect_float(op, "bias")?;
    like.device().expect_same(op, bias.device())?;
    if **bias.shape() == [n] {
        return Ok(());
    }
    let (lhs, rhs) = (*bias.shape(), Shape::from([n]));
    Err(Error::Shapes {
        op,
        what: "bias and the output's last dimension",
        lhs,
        rhs,
        remedy: "a bias has one value per column",
    })
}

/// Returns the bias that a product adds to an output of `dtype`: an f32 bias is rounded to a 16-bit output's type.
pub(super) fn rounded_bias(bias: Option<&Tensor>, dtype: DType) -> Result<Option<Tensor>> {
    let is_rounded = |bias: &Tensor| bias.dtype() == DType::F32 && dtype != DType::F32;
    bias.map(|bias| if is_rounded(bias) { super::cast(bias, dtype) } else { Ok(bias.clone()) }).transpose()
}

pub(crate) fn check_output(op: &'static str, dtype: DType) -> Result<()> {
    if dtype.is_float() {
        return Ok(());
    }
    Err(Error::DType { op, what: "the output", found: dtype, expected: "f32, bf16 or f16" })
}

pub(super) fn check_out(op: &'static str, out: &Tensor, dims: [usize; 2], like: &Tensor) -> Result<()> {
    out.expect_dtype(op, "out", DType::F32)?;
    like.device().expect_same(op, out.device())?;
    if out.shape().matrix() == dims {
        return Ok(());
    }
    let (lhs, rhs) = (*out.shape(), Shape::from(dims));
    Err(Error::Shapes {
        op,
        what: "out and the product",
        lhs,
        rhs,
        remedy: "out must have the product's shape",
    })
}
