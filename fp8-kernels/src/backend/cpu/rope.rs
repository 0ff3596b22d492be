//! Reference of `rope`.

use super::dispatch::{Kernel, vectorized};
use super::floats::{Floats, build};
use super::parallel;
use crate::ops::{Positions, RopeTable};
use crate::{Error, Result, Tensor};

/// Rotates by θ, or back by −θ.
pub(crate) fn rope(x: &Tensor, table: &RopeTable, positions: Positions<'_>, back: bool) -> Result<Tensor> {
    let op = if back { "rope_backward" } else { "rope" };
    let data = Floats::of(x, "rope", "x")?;
    let (cos, sin) = (table.cos().as_slice::<f32>()?, table.sin().as_slice::<f32>()?);
    let half = table.cos().shape().last_dim();
    let [sequence, heads] = [1, 2].map(|dim| x.shape().get(dim).copied().unwrap_or(1));
    let token = (heads * 2 * half).max(1);
    let direction = if back { -1.0 } else { 1.0 };
    let limit = table.cos().shape().matrix()[0];
    let (start, of) = match positions {
        Positions::From(start) => (start, None),
        Positions::Of(positions) => (0, Some(positions.as_slice::<i32>()?)),
    };
    let is_valid = |position: i32| usize::try_from(position).is_ok_and(|position| position < limit);
    if let Some((position, &value)) = of.unwrap_or_default().iter().enumerate().find(|(_, p)| !is_valid(**p))
    {
        return Err(Error::Index { op, what: "position", value: value.into(), position, limit });
    }
    // What is not a position was refused above.
    let row =
        |token: usize| of.map_or(start + token % sequence, |of| usize::try_from(of[token]).unwrap_or(0));
    build("rope", *x.shape(), x.dtype(), x.device(), parallel::row_elements(token), |first, out| {
        let mut scratch = Vec::new();
        let data = data.read(first..first + out.len(), &mut scratch);
        for (i, (out, x)) in out.chunks_exact_mut(token).zip(data.chunks_exact(token)).enumerate() {
            let row = row(first / token + i) * half;
            let (cos, sin) = (&cos[row..row + half], &sin[row..row + half]);
            vectorized(Token { x, cos, sin, direction, out });
        }
    })
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
