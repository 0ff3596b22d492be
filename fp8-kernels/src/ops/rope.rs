//! Rotary position embedding over all of head_dim, in rotate-half pairs.

mod scaling;

use super::attention::dims4;
use crate::backend::dispatch;
use crate::{DType, Error, Result, Shape, Tensor, host};
pub use scaling::RopeScaling;

/// The largest number of positions, and of elements of a head: as many as attention on a GPU takes.
const MOST: usize = i32::MAX as usize;

/// The cosines and sines that [`rope`](rope()) uses, f32 `[max_sequence, head_dim / 2]` each.
///
/// They are computed in f64 on the host, once, and rounded to f32.
#[derive(Debug, Clone)]
pub struct RopeTable {
    cos: Tensor,
    sin: Tensor,
}

impl RopeTable {
    /// Computes the table for positions 0 .. `max_sequence` and heads of `head_dim` elements. The usual `base` is 10000.
    ///
    /// # Errors
    /// A head_dim that is odd or 0; a base that is not finite and greater than 0; a head_dim or max_sequence greater than
    /// 2³¹ − 1; a table that does not fit into memory.
    pub fn new(max_sequence: usize, head_dim: usize, base: f64, device: &crate::Device) -> Result<Self> {
        Self::with_scaling(max_sequence, head_dim, base, RopeScaling::None, device)
    }

    /// As [`new`](Self::new), with frequencies that are scaled for longer sequences than a model was trained on first.
    ///
    /// # Errors
    /// Those of [`new`](Self::new); a scaling with a number out of range.
    pub fn with_scaling(
        max_sequence: usize,
        head_dim: usize,
        base: f64,
        scaling: RopeScaling,
        device: &crate::Device,
    ) -> Result<Self> {
        let op = "rope";
        let option =
            |option, value, remedy: &str| Error::Option { op, option, value, remedy: remedy.to_owned() };
        if head_dim == 0 || !head_dim.is_multiple_of(2) {
            return Err(option(
                "head_dim",
                head_dim.to_string(),
                "pairs need an even head_dim of at least 2",
            ));
        }
        if !(base.is_finite() && base > 0.0) {
            return Err(option("base", base.to_string(), "give a finite base greater than 0, such as 10000"));
        }
        for (name, value) in [("max_sequence", max_sequence), ("head_dim", head_dim)] {
            if value > MOST {
                return Err(option(name, value.to_string(), &format!("give at most {MOST}")));
            }
        }
        scaling.check(op, base)?;
        let shape = Shape::from([max_sequence, head_dim / 2]);
        shape.check_size(op)?;
        // Allocates first, so that a table that does not fit is refused before anything is computed.
        let mut tables = [host::room(op, shape.numel())?, host::room(op, shape.numel())?];
        let frequency = |j: usize| base.powf(-((2 * j) as f64) / head_dim as f64);
        let (scale, factor) = (scaling.of_frequencies(head_dim, base), scaling.attention_factor());
        let frequencies = host::collect(op, (0..head_dim / 2).map(|j| scale(j, frequency(j))))?;
        for (table, f) in tables.iter_mut().zip([f64::cos, f64::sin]) {
            for position in 0..max_sequence {
                let angles = frequencies.iter().map(|frequency| position as f64 * frequency);
                table.extend(angles.map(|angle| (factor * f(angle)) as f32));
            }
        }
        let [cos, sin] = tables.map(|table| Tensor::from_vec(table, shape, device));
        Ok(Self { cos: cos?, sin: sin? })
    }

    /// Returns the cosines, f32 `[max_sequence, head_dim / 2]`.
    pub fn cos(&self) -> &Tensor {
        &self.cos
    }

    /// Returns the sines, f32 `[max_sequence, head_dim / 2]`.
    pub fn sin(&self) -> &Tensor {
        &self.sin
    }
}

/// The positions of the tokens that [`rope`](rope()) rotates.
///
/// ```
/// use fp8_kernels::ops::Positions;
/// assert!(matches!(Positions::from(7), Positions::From(7)));
/// ```
#[derive(Debug, Clone, Copy)]
pub enum Positions<'a> {
    /// Every batch entry has rising positions, of which this is the first.
    From(usize),
    /// The position of each token, i32 `[batch, sequence]`.
    Of(&'a Tensor),
}

impl From<usize> for Positions<'_> {
    fn from(start: usize) -> Self {
        Self::From(start)
    }
}

impl<'a> From<&'a Tensor> for Positions<'a> {
    fn from(positions: &'a Tensor) -> Self {
        Self::Of(positions)
    }
}

/// Applies rotary position embeddings to queries or keys `x`, whose tokens have these positions: rising ones from a start on, or
/// one for each token.
///
/// `x` is `[batch, sequence, heads, head_dim]` in f32, bf16 or f16. With d = head_dim, j < d/2, position p and the angle
/// `θ = p · base^(−2j/d)`, elements j and j + d/2 are rotated as a pair (Transformer Engine's non-interleaved form):
///
/// - `yⱼ = xⱼ·cos θ − xⱼ₊d/₂·sin θ`
/// - `yⱼ₊d/₂ = xⱼ₊d/₂·cos θ + xⱼ·sin θ`
///
/// Computed in f32 and rounded once to the dtype of `x`.
///
/// # Errors
/// A number of dimensions that is not four; a head_dim that is not the table's; positions beyond the table, which a GPU reports
/// at the next call that waits for it if they are in a tensor; positions of another shape or dtype; a dtype that is not a float.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let table = ops::RopeTable::new(8, 2, 10000.0, &Device::cpu())?;
/// let x = Tensor::from_vec(vec![1.0f32, 0.0, 1.0, 0.0], [1, 2, 1, 2], &Device::cpu())?;
/// let y = ops::rope(&x, &table, 0)?.to_vec::<f32>()?;
/// assert_eq!(y, [1.0, 0.0, 1f64.cos() as f32, 1f64.sin() as f32]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn rope<'a>(x: &Tensor, table: &RopeTable, positions: impl Into<Positions<'a>>) -> Result<Tensor> {
    let positions = positions.into();
    check("rope", x, "x", table, positions)?;
    dispatch!(x.device(), rope::rope(x, table, positions, false))
}

/// Returns the gradient of [`rope`](rope())'s input: `dy`, rotated by −θ.
///
/// # Errors
/// Those of [`rope`](rope()).
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let table = ops::RopeTable::new(8, 2, 10000.0, &Device::cpu())?;
/// let dy = Tensor::from_vec(vec![1.0f32, 0.0], [1, 1, 1, 2], &Device::cpu())?;
/// let dx = ops::rope_backward(&dy, &table, 1)?.to_vec::<f32>()?; // position 1: an angle of 1
/// assert_eq!(dx, [1f64.cos() as f32, -(1f64.sin() as f32)]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn rope_backward<'a>(
    dy: &Tensor,
    table: &RopeTable,
    positions: impl Into<Positions<'a>>,
) -> Result<Tensor> {
    let positions = positions.into();
    check("rope_backward", dy, "dy", table, positions)?;
    dispatch!(dy.device(), rope::rope(dy, table, positions, true))
}

/// Applies rotary position embeddings to the first `heads` heads of each token of `x`, in place: as [`rope`](rope()) does. `name` identifies
/// `x` in errors.
///
/// `x` is `[batch, sequence, features]`, whose first features are the heads, or `[batch, sequence, heads, head_dim]`. In the output of a
/// joint projection, one call rotates all queries and keys and leaves the values unchanged.
///
/// # Errors
/// Those of [`rope`](rope()); fewer features than the heads have; an `x` that shares its storage. If it fails on the CPU, `x` is unchanged.
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let table = ops::RopeTable::new(8, 2, 10000.0, &Device::cpu())?;
/// // A query, a key and a value of two elements each, at position 1: an angle of 1.
/// let mut qkv = Tensor::from_vec(vec![1.0f32, 0.0, 0.0, 1.0, 1.0, 0.0], [1, 1, 6], &Device::cpu())?;
/// ops::rope_in_place(&mut qkv, 2, &table, 1, "qkv")?;
/// let (cos, sin) = (1f64.cos() as f32, 1f64.sin() as f32);
/// assert_eq!(qkv.to_vec::<f32>()?, [cos, sin, -sin, cos, 1.0, 0.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn rope_in_place<'a>(
    x: &mut Tensor,
    heads: usize,
    table: &RopeTable,
    positions: impl Into<Positions<'a>>,
    name: &str,
) -> Result<()> {
    let positions = positions.into();
    check_features("rope_in_place", x, "x", heads, table, positions)?;
    in_place(x, heads, table, positions, false, name)
}

/// Turns the gradient `dy` of [`rope_in_place`]'s result into that of its input, in place: the first `heads` heads of each token are rotated by
/// −θ.
///
/// # Errors
/// Those of [`rope_in_place`].
///
/// ```
/// use fp8_kernels::{Device, Tensor, ops};
/// let table = ops::RopeTable::new(8, 2, 10000.0, &Device::cpu())?;
/// let mut dqkv = Tensor::from_vec(vec![1.0f32, 0.0, 0.0, 1.0, 1.0, 0.0], [1, 1, 6], &Device::cpu())?;
/// ops::rope_backward_in_place(&mut dqkv, 2, &table, 1, "dqkv")?;
/// let (cos, sin) = (1f64.cos() as f32, 1f64.sin() as f32);
/// assert_eq!(dqkv.to_vec::<f32>()?, [cos, -sin, sin, cos, 1.0, 0.0]);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn rope_backward_in_place<'a>(
    dy: &mut Tensor,
    heads: usize,
    table: &RopeTable,
    positions: impl Into<Positions<'a>>,
    name: &str,
) -> Result<()> {
    let positions = positions.into();
    check_features("rope_backward_in_place", dy, "dy", heads, table, positions)?;
    in_place(dy, heads, table, positions, true, name)
}

fn in_place(
    x: &mut Tensor,
    heads: usize,
    table: &RopeTable,
    positions: Positions<'_>,
    back: bool,
    name: &str,
) -> Result<()> {
    if x.numel() == 0 || heads == 0 {
        return Ok(());
    }
    dispatch!(x.device(), rope::rope_in_place(x, heads, table, positions, back, name))
}

fn check(
    op: &'static str,
    x: &Tensor,
    what: &'static str,
    table: &RopeTable,
    tokens: Positions<'_>,
) -> Result<()> {
    x.expect_float(op, what)?;
    let half = table.cos.shape().last_dim();
    let shape: Shape = *x.shape();
    let error = |remedy| Err(Error::Shape { op, shape, remedy });
    let &[batch, sequence, _, head_dim] = &*shape else {
        return error("expected [batch, sequence, heads, head_dim]".to_owned());
    };
    if head_dim != 2 * half {
        return error(format!("the table is for head_dim {}; make one for {head_dim}", 2 * half));
    }
    check_tokens(op, x, [batch, sequence], table, tokens)
}

fn check_features(
    op: &'static str,
    x: &Tensor,
    what: &'static str,
    heads: usize,
    table: &RopeTable,
    tokens: Positions<'_>,
) -> Result<()> {
    let (batch, sequence, features) = match **x.shape() {
        [_, _, _, _] => {
            check(op, x, what, table, tokens)?;
            let [batch, sequence, all, head_dim] = dims4(op, x.shape())?;
            (batch, sequence, all * head_dim)
        }
        [batch, sequence, features] => (batch, sequence, features),
        _ => {
            let remedy =
                "expected [batch, sequence, features] or [batch, sequence, heads, head_dim]".to_owned();
            return Err(Error::Shape { op, shape: *x.shape(), remedy });
        }
    };
    x.expect_float(op, what)?;
    let head_dim = 2 * table.cos.shape().last_dim();
    if heads.checked_mul(head_dim).is_none_or(|width| width > features) {
        let remedy =
            format!("the token's {features} features are fewer than {heads} heads of {head_dim} have");
        return Err(Error::Shape { op, shape: *x.shape(), remedy });
    }
    check_tokens(op, x, [batch, sequence], table, tokens)
}

fn check_tokens(
    op: &'static str,
    x: &Tensor,
    [batch, sequence]: [usize; 2],
    table: &RopeTable,
    tokens: Positions<'_>,
) -> Result<()> {
    x.device().expect_same(op, table.cos.device())?;
    table.cos.expect_dtype(op, "cos", DType::F32)?;
    let positions = table.cos.shape().matrix()[0];
    let shape: Shape = *x.shape();
    let error = |remedy| Err(Error::Shape { op, shape, remedy });
    let start = match tokens {
        Positions::From(start) => start,
        Positions::Of(tokens) => {
            tokens.expect_dtype(op, "positions", DType::I32)?;
            x.device().expect_same(op, tokens.device())?;
            let (lhs, rhs) = (*tokens.shape(), Shape::from([batch, sequence]));
            if lhs != rhs {
                let (what, remedy) = ("positions and [batch, sequence]", "give one position per token");
                return Err(Error::Shapes { op, what, lhs, rhs, remedy });
            }
            return Ok(());
        }
    };
    if start.checked_add(sequence).is_none_or(|end| end > positions) {
        let last = start.saturating_add(sequence);
        return error(format!(
            "positions {start}..{last} go beyond the table's {positions}; make a longer table"
        ));
    }
    Ok(())
}
