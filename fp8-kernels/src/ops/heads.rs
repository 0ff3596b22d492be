//! Heads in a tensor, which attention reads where they are.

use crate::{Error, Fp8Tensor, Result, Shape, Tensor};

/// The tensors that [`Heads`] are in: [`Tensor`], and [`Fp8Tensor`] with codes of heads.
///
/// ```
/// use fp8_kernels::ops::{Heads, HeadsTensor};
/// use fp8_kernels::{DType, Device, Tensor};
///
/// fn heads_of(x: &impl HeadsTensor) -> usize {
///     Heads::from(x).shape()[2]
/// }
/// assert_eq!(heads_of(&Tensor::zeros([1, 4, 3, 8], DType::F32, &Device::cpu())?), 3);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub trait HeadsTensor: sealed::Sealed {}

mod sealed {
    use crate::Shape;

    #[expect(unnameable_types, reason = "no other types implement the trait")]
    pub trait Sealed {
        fn dims(&self) -> &Shape;
    }
}

impl HeadsTensor for Tensor {}
impl HeadsTensor for Fp8Tensor {}

impl sealed::Sealed for Tensor {
    fn dims(&self) -> &Shape {
        self.shape()
    }
}

impl sealed::Sealed for Fp8Tensor {
    fn dims(&self) -> &Shape {
        self.shape()
    }
}

/// Some heads of each token of a tensor, as [`attention`](crate::ops::attention()) and
/// [`kv_cache_append`](crate::ops::kv_cache_append()) read them.
///
/// A tensor `[batch, sequence, heads, head_dim]` converts to all of its heads: `(&tensor).into()`. In a tensor
/// `[batch, sequence, features]`, such as the output of a projection of queries, keys and values, heads are features that follow each other. The
/// operations read them there: nothing is copied.
///
/// ```
/// use fp8_kernels::ops::{self, AttentionGrads, GradLayout, Heads, ScoreOptions, Sequences};
/// use fp8_kernels::{Device, Tensor};
///
/// // Two tokens, whose query, key and value have one element each.
/// let qkv = Tensor::from_vec(vec![0.0f32, 1.0, 5.0, 0.0, 2.0, 7.0], [1, 2, 3], &Device::cpu())?;
/// let [q, k, v] = Heads::qkv(&qkv, 1, 1, 1)?;
/// let (sequences, options) = (Sequences::Full, ScoreOptions::default());
/// let (o, saved) = ops::attention(q, k, v, &sequences, options)?;
/// assert_eq!(o.to_vec::<f32>()?, [5.0, 6.0]); // scores are 0: the second token sees both values, each with 1/2
///
/// // The gradients come side by side, too, as the projection's backward pass takes them.
/// let grads = ops::attention_backward_to(&o, q, k, v, &o, &saved, &sequences, options, GradLayout::Qkv)?;
/// let AttentionGrads::Qkv(dqkv) = grads else { unreachable!("as asked for") };
/// assert_eq!(dqkv.to_vec::<f32>()?, [0.0, 0.0, 8.0, 3.0, 0.0, 3.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Debug)]
pub struct Heads<'a, T = Tensor> {
    tensor: &'a T,
    shape: Shape,
    first: usize,
    pitch: usize,
}

// Derived, these would ask the same of `T`.
impl<T> Clone for Heads<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Heads<'_, T> {}

impl<'a, T: HeadsTensor> From<&'a T> for Heads<'a, T> {
    fn from(tensor: &'a T) -> Self {
        let shape = *tensor.dims();
        let pitch = shape.iter().skip(2).product();
        Self { tensor, shape, first: 0, pitch }
    }
}

impl<'a, T: HeadsTensor> Heads<'a, T> {
    /// Returns the heads of `tensor`, `[batch, sequence, features]`, that begin with feature `first`.
    ///
    /// # Errors
    /// Another number of dimensions; a head_dim of 0; heads that go beyond the features.
    ///
    /// ```
    /// use fp8_kernels::ops::Heads;
    /// use fp8_kernels::{DType, Device, Tensor};
    ///
    /// let x = Tensor::zeros([2, 5, 24], DType::F32, &Device::cpu())?;
    /// assert_eq!(Heads::new(&x, 8, 2, 8)?.shape().to_string(), "[2, 5, 2, 8]"); // features 8 to 23
    /// assert!(Heads::new(&x, 16, 2, 8).is_err());
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    pub fn new(tensor: &'a T, first: usize, heads: usize, head_dim: usize) -> Result<Self> {
        let [batch, sequence, features] =
            dims3(tensor.dims(), || format!("{heads} heads of {head_dim} features from feature {first} on"))?;
        let end = heads.checked_mul(head_dim).and_then(|width| width.checked_add(first));
        if head_dim == 0 || end.is_none_or(|end| end > features) {
            let remedy = format!(
                "{heads} heads of {head_dim} features from feature {first} on do not fit: give a head_dim of at least 1, and heads that end by feature {features}"
            );
            return Err(Error::Shape { op: OP, shape: *tensor.dims(), remedy });
        }
        let shape = Shape::from([batch, sequence, heads, head_dim]);
        Ok(Self { tensor, shape, first, pitch: features })
    }

    /// Returns queries, keys and values in the output of one projection, `[batch, sequence, (heads + 2 · groups) · head_dim]`: all
    /// query heads, then all key heads, then all value heads.
    ///
    /// # Errors
    /// Another shape; a head_dim of 0.
    ///
    /// ```
    /// use fp8_kernels::ops::Heads;
    /// use fp8_kernels::{DType, Device, Tensor};
    ///
    /// let qkv = Tensor::zeros([2, 5, (4 + 2 * 2) * 8], DType::F32, &Device::cpu())?;
    /// let [q, k, v] = Heads::qkv(&qkv, 4, 2, 8)?;
    /// assert_eq!((q.shape()[2], k.shape()[2], v.shape()[2]), (4, 2, 2));
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    pub fn qkv(tensor: &'a T, heads: usize, groups: usize, head_dim: usize) -> Result<[Self; 3]> {
        let all = expect_features(tensor.dims(), [heads, groups, groups], head_dim)?;
        let [of_q, of_k, _] = all;
        Ok([
            Self::new(tensor, 0, heads, head_dim)?,
            Self::new(tensor, of_q, groups, head_dim)?,
            Self::new(tensor, of_q + of_k, groups, head_dim)?,
        ])
    }

    /// Returns keys and values in the output of one projection, `[batch, sequence, 2 · groups · head_dim]`: all key heads, then all
    /// value heads.
    ///
    /// # Errors
    /// Another shape; a head_dim of 0.
    ///
    /// ```
    /// use fp8_kernels::ops::Heads;
    /// use fp8_kernels::{DType, Device, Tensor};
    ///
    /// let kv = Tensor::zeros([2, 5, 2 * 2 * 8], DType::F32, &Device::cpu())?;
    /// let [k, v] = Heads::kv(&kv, 2, 8)?;
    /// assert_eq!(k.shape(), v.shape());
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    pub fn kv(tensor: &'a T, groups: usize, head_dim: usize) -> Result<[Self; 2]> {
        let [of_k, ..] = expect_features(tensor.dims(), [groups, groups, 0], head_dim)?;
        Ok([Self::new(tensor, 0, groups, head_dim)?, Self::new(tensor, of_k, groups, head_dim)?])
    }
}

impl<'a, T> Heads<'a, T> {
    /// Returns the tensor that the heads are in.
    ///
    /// ```
    /// use fp8_kernels::ops::Heads;
    /// use fp8_kernels::{DType, Device, Tensor};
    ///
    /// let x = Tensor::zeros([2, 5, 24], DType::F32, &Device::cpu())?;
    /// assert_eq!(Heads::new(&x, 8, 2, 8)?.tensor().shape().to_string(), "[2, 5, 24]");
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    pub const fn tensor(&self) -> &'a T {
        self.tensor
    }

    /// Returns the heads' own shape, `[batch, sequence, heads, head_dim]`.
    ///
    /// ```
    /// use fp8_kernels::ops::Heads;
    /// use fp8_kernels::{DType, Device, Tensor};
    ///
    /// let x = Tensor::zeros([2, 5, 3, 8], DType::F32, &Device::cpu())?;
    /// assert_eq!(Heads::from(&x).shape(), x.shape());
    /// # Ok::<(), fp8_kernels::Error>(())
    /// ```
    pub const fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The same heads of another tensor with the same elements, or with those that they became.
    pub(crate) const fn of<U>(self, tensor: &U) -> Heads<'_, U> {
        let Self { shape, first, pitch, .. } = self;
        Heads { tensor, shape, first, pitch }
    }

    /// The element of each token that the heads begin with.
    pub(crate) const fn first(&self) -> usize {
        self.first
    }

    /// The number of elements from one token to the next.
    pub(crate) const fn pitch(&self) -> usize {
        self.pitch
    }

    /// Whether the tensor has nothing else.
    pub(crate) fn is_whole(&self) -> bool {
        self.shape.iter().skip(2).product::<usize>() == self.pitch
    }
}

const OP: &str = "heads";

fn dims3(shape: &Shape, what: impl Fn() -> String) -> Result<[usize; 3]> {
    <[usize; 3]>::try_from(&**shape).map_err(|_| Error::Shape {
        op: OP,
        shape: *shape,
        remedy: format!("expected [batch, sequence, features] with {}", what()),
    })
}

/// Returns how many features each of these has, if together they are all of the tensor's.
fn expect_features(shape: &Shape, heads: [usize; 3], head_dim: usize) -> Result<[usize; 3]> {
    let what = || {
        let sum = heads.iter().fold(0usize, |sum, &heads| sum.saturating_add(heads));
        format!("{} features: {sum} heads of {head_dim}", sum.saturating_mul(head_dim))
    };
    let [.., features] = dims3(shape, what)?;
    let total = heads.iter().try_fold(0usize, |sum, &heads| sum.checked_add(heads.checked_mul(head_dim)?));
    if head_dim == 0 || total != Some(features) {
        let remedy = format!("expected [batch, sequence, features] with {}", what());
        return Err(Error::Shape { op: OP, shape: *shape, remedy });
    }
    Ok(heads.map(|heads| heads * head_dim))
}
