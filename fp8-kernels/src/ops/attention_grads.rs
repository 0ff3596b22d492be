//! The gradients of attention's inputs: each in a tensor of its own, or side by side.

use super::Problem;
use crate::{Error, Result, Shape, Tensor};

/// The tensors that [`attention_backward_to`](crate::ops::attention_backward_to) writes gradients to.
///
/// ```
/// assert_eq!(fp8_kernels::ops::GradLayout::default(), fp8_kernels::ops::GradLayout::Separate);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GradLayout {
    /// Three tensors.
    #[default]
    Separate,
    /// One of the queries' gradients, and one with those of keys and values side by side.
    Kv,
    /// One with all gradients side by side. It needs as many queries as keys.
    Qkv,
}

/// The gradients of attention's inputs, in the [`GradLayout`] that was asked for.
///
/// ```
/// use fp8_kernels::ops::{self, AttentionGrads, GradLayout, ScoreOptions, Sequences};
/// use fp8_kernels::{DType, Device, Tensor};
///
/// let x = Tensor::full(1.0, [1, 2, 1, 1], DType::F32, &Device::cpu())?;
/// let (sequences, options) = (Sequences::Full, ScoreOptions::default());
/// let (o, saved) = ops::attention(&x, &x, &x, &sequences, options)?;
/// let grads = ops::attention_backward_to(&x, &x, &x, &x, &o, &saved, &sequences, options, GradLayout::Kv)?;
/// let AttentionGrads::Kv { dq, dkv } = grads else { unreachable!("as asked for") };
/// assert_eq!((dq.shape().to_string(), dkv.shape().to_string()), ("[1, 2, 1, 1]".into(), "[1, 2, 2]".into()));
/// assert_eq!(dkv.to_vec::<f32>()?, [0.0, 1.5, 0.0, 0.5]); // dk and dv of each token
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
#[derive(Debug, Clone)]
pub enum AttentionGrads {
    /// Those of [`GradLayout::Separate`].
    Separate {
        /// `[batch, queries, heads, head_dim]`.
        dq: Tensor,
        /// `[batch, keys, groups, head_dim]`.
        dk: Tensor,
        /// `[batch, keys, groups, head_dim]`.
        dv: Tensor,
    },
    /// Those of [`GradLayout::Kv`].
    Kv {
        /// `[batch, queries, heads, head_dim]`.
        dq: Tensor,
        /// `[batch, keys, 2 · groups · head_dim]`: those of all key heads, then those of all value heads.
        dkv: Tensor,
    },
    /// Those of [`GradLayout::Qkv`], `[batch, sequence, (heads + 2 · groups) · head_dim]`: of all query heads, then of all key
    /// heads, then of all value heads.
    Qkv(Tensor),
}

/// The place of one gradient.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GradPlace {
    /// The number of the layout's tensor that it is in.
    pub(crate) tensor: usize,
    /// The element of each token that it begins with.
    pub(crate) first: usize,
    /// The number of elements from one token to the next.
    pub(crate) pitch: usize,
}

impl GradLayout {
    /// Refuses gradients side by side of different numbers of tokens, or in a tensor that is too large.
    pub(super) fn check(self, op: &'static str, p: &Problem<'_>) -> Result<()> {
        if self != Self::Qkv || p.queries == p.keys {
            return self.shapes(p).iter().try_for_each(|shape| shape.check_size(op));
        }
        let value = format!("Qkv with {} queries and {} keys", p.queries, p.keys);
        let remedy = "gradients in one tensor need as many queries as keys: use Kv or Separate".to_owned();
        Err(Error::Option { op, option: "layout", value, remedy })
    }

    /// Returns the shapes of the tensors.
    pub(crate) fn shapes(self, p: &Problem<'_>) -> Vec<Shape> {
        let (q, k) = ([p.batch, p.queries, p.heads, p.head_dim], [p.batch, p.keys, p.groups, p.head_dim]);
        // Checked before they are used.
        let width = |[of_heads, of_groups]: [usize; 2]| {
            let heads = p.heads.saturating_mul(of_heads).saturating_add(p.groups.saturating_mul(of_groups));
            heads.saturating_mul(p.head_dim)
        };
        match self {
            Self::Separate => vec![q.into(), k.into(), k.into()],
            Self::Kv => vec![q.into(), [p.batch, p.keys, width([0, 2])].into()],
            Self::Qkv => vec![[p.batch, p.queries, width([1, 2])].into()],
        }
    }

    /// Returns the places of dq, dk and dv.
    pub(crate) fn places(self, p: &Problem<'_>) -> [GradPlace; 3] {
        let [q, k] = [p.heads, p.groups].map(|heads| heads * p.head_dim);
        let place = |tensor, first, pitch| GradPlace { tensor, first, pitch };
        match self {
            Self::Separate => [place(0, 0, q), place(1, 0, k), place(2, 0, k)],
            Self::Kv => [place(0, 0, q), place(1, 0, 2 * k), place(1, k, 2 * k)],
            Self::Qkv => [0, q, q + k].map(|first| place(0, first, q + 2 * k)),
        }
    }
}

impl AttentionGrads {
    /// Takes the tensors of a layout, in the order of [`GradLayout::shapes`].
    pub(crate) fn from_tensors(op: &'static str, tensors: Vec<Tensor>) -> Result<Self> {
        let mut tensors = tensors.into_iter();
        match (tensors.next(), tensors.next(), tensors.next()) {
            (Some(dq), Some(dk), Some(dv)) => Ok(Self::Separate { dq, dk, dv }),
            (Some(dq), Some(dkv), None) => Ok(Self::Kv { dq, dkv }),
            (Some(dqkv), None, None) => Ok(Self::Qkv(dqkv)),
            _ => Err(no_tensors(op)),
        }
    }

    /// Returns the same gradients, with each tensor replaced by what `f` makes of it.
    pub(crate) fn map(self, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(match self {
            Self::Separate { dq, dk, dv } => Self::Separate { dq: f(&dq)?, dk: f(&dk)?, dv: f(&dv)? },
            Self::Kv { dq, dkv } => Self::Kv { dq: f(&dq)?, dkv: f(&dkv)? },
            Self::Qkv(dqkv) => Self::Qkv(f(&dqkv)?),
        })
    }

    pub(super) fn separate(self, op: &'static str) -> Result<(Tensor, Tensor, Tensor)> {
        match self {
            Self::Separate { dq, dk, dv } => Ok((dq, dk, dv)),
            Self::Kv { .. } | Self::Qkv(_) => Err(no_tensors(op)),
        }
    }
}

fn no_tensors(op: &'static str) -> Error {
    let remedy = "expected the tensors of the layout that was asked for".to_owned();
    Error::Option { op, option: "layout", value: "others".to_owned(), remedy }
}
