//! The matrix product in high precision: f32 sums, then addend and bias in f32, then one rounding to the output's type.

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
    product("gemm", a, b, layout, Terms { addend: None, bias }, dtype)
}

/// Returns the matrix product of `a` and `b` plus `addend`, and plus `bias` on each row: [`gemm`](gemm()) with a residual
/// connection.
///
/// `addend` is a matrix of the result's size, f32, bf16 or f16. The result is `(product + addend) + bias`: each addition is in f32,
/// and the result is rounded once. [`add`](super::add()) after [`gemm`](gemm()) reads and writes the result once more, and rounds a
/// 16-bit result twice.
///
/// On a GPU, cuBLASLt adds an addend of the result's dtype while it writes the product. Another one is added in a second pass.
///
/// # Errors
/// Those of [`gemm`](gemm()); an addend of another size, of a dtype that is not a float, or on another device.
///
/// ```
/// use fp8_kernels::{DType, Device, Tensor, ops};
/// let row = |values: [f32; 2]| Tensor::from_vec(values.to_vec(), [1, 2], &Device::cpu());
/// let (x, branch, w) = (row([10.0, 20.0])?, row([1.0, 2.0])?, row([3.0, 4.0])?.reshape([2, 1])?);
/// let w = ops::gemm(&w, &row([1.0, 1.0])?, ops::Layout::Nn, None, DType::F32)?; // [[3, 3], [4, 4]]
/// let y = ops::gemm_add(&branch, &w, ops::Layout::Nn, &x, None, DType::F32)?; // x + branch · w
/// assert_eq!(y.to_vec::<f32>()?, [21.0, 31.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn gemm_add(
    a: &Tensor,
    b: &Tensor,
    layout: Layout,
    addend: &Tensor,
    bias: Option<&Tensor>,
    dtype: DType,
) -> Result<Tensor> {
    product("gemm_add", a, b, layout, Terms { addend: Some(addend), bias }, dtype)
}

/// The terms that are added to the sums of a product, in this order.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Terms<'a> {
    /// A matrix of the product's size.
    pub(crate) addend: Option<&'a Tensor>,
    /// One value for each column.
    pub(crate) bias: Option<&'a Tensor>,
}

impl Terms<'_> {
    pub(crate) const fn are_none(&self) -> bool {
        self.addend.is_none() && self.bias.is_none()
    }
}

fn product(
    op: &'static str,
    a: &Tensor,
    b: &Tensor,
    layout: Layout,
    terms: Terms<'_>,
    dtype: DType,
) -> Result<Tensor> {
    let dims = check(op, a, b, layout)?;
    check_terms(op, &terms, dims, a)?;
    check_output(op, dtype)?;
    let bias = rounded_bias(terms.bias, dtype)?;
    let terms = Terms { bias: bias.as_ref(), ..terms };
    dispatch!(a.device(), gemm::gemm(op, a, b, layout, dims, terms, dtype))
}

/// Selects what an operation does with the tensor that it stores its result in, such as a gradient.
///
/// ```
/// use fp8_kernels::ops::{self, Update};
/// use fp8_kernels::{Device, Tensor};
/// let mut main_grad = Tensor::from_vec(vec![1.0f32], [1], &Device::cpu())?;
/// let dbias = Tensor::from_vec(vec![0.5f32], [1], &Device::cpu())?;
/// ops::store(&mut main_grad, &dbias, Update::Add, "fc1.bias.main_grad")?;
/// assert_eq!(main_grad.to_vec::<f32>()?, [1.5]);
/// ops::store(&mut main_grad, &dbias, Update::Write, "fc1.bias.main_grad")?;
/// assert_eq!(main_grad.to_vec::<f32>()?, [0.5]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Update {
    /// The result is added to what the tensor holds.
    Add,
    /// The result replaces what the tensor holds, which is never read: it may be NaN.
    Write,
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
    store("gemm_accumulate", a, b, layout, out, Update::Add, name)
}

/// Stores the matrix product of `a` and `b` in `out`: adds it, as [`gemm_accumulate`] does, or replaces what `out` holds.
///
/// The first gradient of a step is written in this way, so that nothing has to set the gradient to 0 before.
///
/// # Errors
/// Those of [`gemm_accumulate`].
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let cpu = Device::cpu();
/// let dy = Tensor::from_vec(vec![1.0f32, 2.0], [1, 2], &cpu)?;
/// let x = Tensor::from_vec(vec![3.0f32, 4.0], [1, 2], &cpu)?;
/// let mut dw = Tensor::from_vec(vec![f32::NAN; 4], [2, 2], &cpu)?; // from another step
/// ops::gemm_into(&dy, &x, ops::Layout::Tn, &mut dw, ops::Update::Write, "fc1.weight.main_grad")?;
/// assert_eq!(dw.to_vec::<f32>()?, [3.0, 4.0, 6.0, 8.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn gemm_into(
    a: &Tensor,
    b: &Tensor,
    layout: Layout,
    out: &mut Tensor,
    update: Update,
    name: &str,
) -> Result<()> {
    store("gemm_into", a, b, layout, out, update, name)
}

fn store(
    op: &'static str,
    a: &Tensor,
    b: &Tensor,
    layout: Layout,
    out: &mut Tensor,
    update: Update,
    name: &str,
) -> Result<()> {
    let [m, n, k] = check(op, a, b, layout)?;
    check_out(op, out, [m, n], a)?;
    dispatch!(a.device(), gemm::gemm_into(op, a, b, layout, [m, n, k], out, update, name))
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

pub(super) fn check_terms(
    op: &'static str,
    terms: &Terms<'_>,
    [m, n, _]: [usize; 3],
    like: &Tensor,
) -> Result<()> {
    check_bias(op, terms.bias, n, like)?;
    let Some(addend) = terms.addend else { return Ok(()) };
    addend.expect_float(op, "addend")?;
    like.device().expect_same(op, addend.device())?;
    if addend.shape().matrix() == [m, n] {
        return Ok(());
    }
    let (lhs, rhs) = (*addend.shape(), Shape::from([m, n]));
    Err(Error::Shapes {
        op,
        what: "addend and the product",
        lhs,
        rhs,
        remedy: "an addend has the product's rows and columns",
    })
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
