//! Reference of `rope`.

use super::dispatch::{Kernel, vectorized};
use super::floats::{Floats, build};
use super::{parallel, scratch};
use crate::element::Float;
use crate::ops::{Positions, RopeTable};
use crate::{DType, Error, Result, Tensor};
use half::{bf16, f16};

/// Rotates by θ, or back by −θ.
pub(crate) fn rope(x: &Tensor, table: &RopeTable, positions: Positions<'_>, back: bool) -> Result<Tensor> {
    let op = if back { "rope_backward" } else { "rope" };
    let data = Floats::of(x, "rope", "x")?;
    let [sequence, heads] = [1, 2].map(|dim| x.shape().get(dim).copied().unwrap_or(1));
    let turns = Turns::new(op, table, positions, sequence, back)?;
    let token = (heads * 2 * turns.half).max(1);
    build("rope", *x.shape(), x.dtype(), x.device(), parallel::row_elements(token), |first, out| {
        let mut scratch = Vec::new();
        let data = data.read(first..first + out.len(), &mut scratch);
        for (i, (out, x)) in out.chunks_exact_mut(token).zip(data.chunks_exact(token)).enumerate() {
            turns.turn(first / token + i, x, out);
        }
    })
}

/// Rotates the first heads of each token, in place.
pub(crate) fn rope_in_place(
    x: &mut Tensor,
    heads: usize,
    table: &RopeTable,
    positions: Positions<'_>,
    back: bool,
    name: &str,
) -> Result<()> {
    let op = if back { "rope_backward" } else { "rope" };
    let sequence = x.shape().get(1).copied().unwrap_or(1);
    let features = x.shape().iter().skip(2).product();
    let turns = Turns::new(op, table, positions, sequence, back)?;
    let width = heads * 2 * turns.half;
    match x.dtype() {
        DType::F32 => turns.turn_in_place::<f32>(x.as_mut_slice(name)?, features, width),
        DType::BF16 => turns.turn_in_place::<bf16>(x.as_mut_slice(name)?, features, width),
        DType::F16 => turns.turn_in_place::<f16>(x.as_mut_slice(name)?, features, width),
        found => Err(Error::DType { op, what: "x", found, expected: "f32, bf16 or f16" }),
    }
}

/// The angles by which tokens are turned.
struct Turns<'a> {
    op: &'static str,
    cos: &'a [f32],
    sin: &'a [f32],
    half: usize,
    sequence: usize,
    start: usize,
    positions: Option<&'a [i32]>,
    direction: f32,
}

impl<'a> Turns<'a> {
    fn new(
        op: &'static str,
        table: &'a RopeTable,
        positions: Positions<'a>,
        sequence: usize,
        back: bool,
    ) -> Result<Self> {
        let (cos, sin) = (table.cos().as_slice::<f32>()?, table.sin().as_slice::<f32>()?);
        let [limit, half] = table.cos().shape().matrix();
        let (start, positions) = match positions {
            Positions::From(start) => (start, None),
            Positions::Of(positions) => (0, Some(positions.as_slice::<i32>()?)),
        };
        let is_valid = |position: i32| usize::try_from(position).is_ok_and(|position| position < limit);
        let wrong = positions.unwrap_or_default().iter().enumerate().find(|(_, p)| !is_valid(**p));
        if let Some((position, &value)) = wrong {
            return Err(Error::Index { op, what: "position", value: value.into(), position, limit });
        }
        let direction = if back { -1.0 } else { 1.0 };
        Ok(Self { op, cos, sin, half, sequence, start, positions, direction })
    }

    /// Turns all heads of a token.
    #[inline(always)]
    fn turn(&self, token: usize, x: &[f32], out: &mut [f32]) {
        // What is not a position was refused.
        let row = self.positions.map_or(self.start + token % self.sequence, |positions| {
            usize::try_from(positions[token]).unwrap_or(0)
        });
        let row = row * self.half..(row + 1) * self.half;
        let (cos, sin) = (&self.cos[row.clone()], &self.sin[row]);
        vectorized(Token { x, cos, sin, direction: self.direction, out });
    }

    /// Turns the first `width` of the features of each token.
    fn turn_in_place<T: Float>(&self, x: &mut [T], features: usize, width: usize) -> Result<()> {
        let step = parallel::row_elements(features);
        parallel::try_for_each(x.chunks_mut(step).enumerate(), |(piece, tokens)| {
            scratch::with(self.op, 2 * width, |values| {
                let (before, after) = values.split_at_mut(width);
                for (i, token) in tokens.chunks_exact_mut(features).enumerate() {
                    let heads = &mut token[..width];
                    T::widen(heads, before);
                    self.turn(piece * (step / features) + i, before, after);
                    T::round(after, heads);
                }
            })
        })
    }
}

/// All heads of one token.
struct Token<'a> {
    x: &'a [f32],
    /// The cosines of the token's position; half as long as a head.
    cos: &'a [f32],
    sin: &'a [f32],
    direction: f32,
    out: &'a mut [f32],
}

impl Kernel for Token<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { x, cos, sin, direction, out } = self;
        let half = cos.len();
        for (out, x) in out.chunks_exact_mut(2 * half).zip(x.chunks_exact(2 * half)) {
            let ((out_1, out_2), (x_1, x_2)) = (out.split_at_mut(half), x.split_at(half));
            let pairs = out_1.iter_mut().zip(out_2).zip(x_1.iter().zip(x_2));
            for (((o_1, o_2), (&x_1, &x_2)), (&cos, &sin)) in pairs.zip(cos.iter().zip(sin)) {
                let sin = sin * direction;
                *o_1 = x_1 * cos - x_2 * sin;
                *o_2 = x_2 * cos + x_1 * sin;
            }
        }
    }
}
