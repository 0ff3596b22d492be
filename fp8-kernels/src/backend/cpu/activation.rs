//! Reference of `activation` and its gradients. The expressions are those of `ops::activation`, operation by operation.

use super::dispatch::{Kernel, vectorized};
use super::quantize::{Rows, quantize_rows};
use super::{Floats, accumulate, reduce};
use crate::math::sigmoid;
use crate::ops::{Activation, GradientMut};
use crate::{Encoding, Operand, Result, Shape, Slot, Tensor};
use std::marker::PhantomData;

/// A function of one variable and its derivative, without branches, so that loops over it become vectors.
trait Curve: Sync {
    fn value(x: f32) -> f32;

    fn slope(x: f32) -> f32;
}

/// 2·√(2/π).
const GELU_LINEAR: f32 = 1.595_769;
/// 2·√(2/π)·0.044715.
const GELU_CUBIC: f32 = 0.071_354_814;
/// Three times as much: the derivative's.
const GELU_SQUARE: f32 = 0.214_064_44;
const QGELU: f32 = 1.702;
/// Every σ that occurs is 0 or 1 here, and no product below overflows.
const TAIL: f32 = 128.0;

struct Gelu;
struct Silu;
struct Qgelu;
struct Relu;
struct Srelu;
struct Sigmoid;

#[inline(always)]
fn clamp(x: f32) -> f32 {
    let x = if x < -TAIL { -TAIL } else { x };
    if x > TAIL { TAIL } else { x }
}

impl Gelu {
    #[inline(always)]
    fn argument(x: f32) -> f32 {
        x * (x * x).mul_add(GELU_CUBIC, GELU_LINEAR)
    }
}

impl Curve for Gelu {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        x * sigmoid(Self::argument(x))
    }

    #[inline(always)]
    fn slope(x: f32) -> f32 {
        let c = clamp(x);
        let s = sigmoid(Self::argument(c));
        s * (c * (1.0 - s)).mul_add((c * c).mul_add(GELU_SQUARE, GELU_LINEAR), 1.0)
    }
}

impl Curve for Silu {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        x * sigmoid(x)
    }

    #[inline(always)]
    fn slope(x: f32) -> f32 {
        let c = clamp(x);
        let s = sigmoid(c);
        s * c.mul_add(1.0 - s, 1.0)
    }
}

impl Curve for Qgelu {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        x * sigmoid(QGELU * x)
    }

    #[inline(always)]
    fn slope(x: f32) -> f32 {
        let z = QGELU * clamp(x);
        let s = sigmoid(z);
        s * z.mul_add(1.0 - s, 1.0)
    }
}

impl Curve for Relu {
    // A NaN fails the comparison and stays.
    #[inline(always)]
    fn value(x: f32) -> f32 {
        if x <= 0.0 { 0.0 } else { x }
    }

    #[inline(always)]
    fn slope(x: f32) -> f32 {
        if x <= 0.0 { 0.0 } else { 1.0 }
    }
}

impl Curve for Srelu {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        let r = Relu::value(x);
        r * r
    }

    #[inline(always)]
    fn slope(x: f32) -> f32 {
        2.0 * Relu::value(x)
    }
}

impl Curve for Sigmoid {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        sigmoid(x)
    }

    #[inline(always)]
    fn slope(x: f32) -> f32 {
        let s = sigmoid(clamp(x));
        s * (1.0 - s)
    }
}

/// Runs `$body` with `$curve` bound to the type of an activation's function.
macro_rules! with_curve {
    ($activation:expr, $curve:ident => $body:expr) => {
        match $activation {
            Activation::Gelu | Activation::Geglu => {
                type $curve = Gelu;
                $body
            }
            Activation::Silu | Activation::Swiglu => {
                type $curve = Silu;
                $body
            }
            Activation::Qgelu | Activation::Qgeglu => {
                type $curve = Qgelu;
                $body
            }
            Activation::Relu | Activation::Reglu => {
                type $curve = Relu;
                $body
            }
            Activation::Srelu | Activation::Sreglu => {
                type $curve = Srelu;
                $body
            }
            Activation::Glu => {
                type $curve = Sigmoid;
                $body
            }
        }
    };
}

pub(crate) fn activation(
    h: &Tensor,
    activation: Activation,
    shape: Shape,
    slot: &Slot<'_>,
) -> Result<Operand> {
    with_curve!(activation, C => forward::<C>(h, activation.is_gated(), shape, slot))
}

pub(crate) fn activation_backward(dy: &Tensor, h: &Tensor, activation: Activation) -> Result<Tensor> {
    // A slot that is off rounds to h's dtype.
    let slot = Slot::off(Encoding::E5M2);
    let (dh, _) = with_curve!(activation, C => backward::<C>(dy, h, activation.is_gated(), &slot, false))?;
    dh.dequantize(h.dtype())
}

pub(crate) fn activation_backward_quantize_dbias(
    dy: &Tensor,
    h: &Tensor,
    activation: Activation,
    slot: &Slot<'_>,
) -> Result<(Operand, Tensor)> {
    let (dh, dbias) = with_curve!(activation, C => backward::<C>(dy, h, activation.is_gated(), slot, true))?;
    // Asked for, so always there.
    let dbias = dbias.map_or_else(|| reduce::column_sums(h), Ok)?;
    Ok((dh, dbias))
}

pub(crate) fn activation_backward_quantize_dbias_into(
    dy: &Tensor,
    h: &Tensor,
    activation: Activation,
    slot: &Slot<'_>,
    dbias: &mut GradientMut<'_>,
) -> Result<Operand> {
    let (dh, sums) = activation_backward_quantize_dbias(dy, h, activation, slot)?;
    accumulate::fill(dbias, &sums)?;
    Ok(dh)
}

fn forward<C: Curve>(h: &Tensor, gated: bool, shape: Shape, slot: &Slot<'_>) -> Result<Operand> {
    let values = Floats::of(h, "activation", "h")?;
    let cols = shape.last_dim();
    let produce = |first: usize, out: &mut [f32]| {
        let mut scratch = Vec::new();
        let width = if gated { 2 } else { 1 };
        let start = width * first * cols;
        let h = values.read(start..start + width * out.len(), &mut scratch);
        let curve = PhantomData::<C>;
        if gated {
            vectorized(ForwardGated { curve, h, out, cols })
        } else {
            vectorized(Forward { curve, h, out })
        }
    };
    let rows = Rows { op: "activation", shape, device: h.device(), dtype: h.dtype(), produce };
    quantize_rows(&rows, slot, false).map(|(y, _)| y)
}

fn backward<C: Curve>(
    dy: &Tensor,
    h: &Tensor,
    gated: bool,
    slot: &Slot<'_>,
    dbias: bool,
) -> Result<(Operand, Option<Tensor>)> {
    let op = "activation_backward";
    let (values, gradients) = (Floats::of(h, op, "h")?, Floats::of(dy, op, "dy")?);
    let cols = h.shape().last_dim();
    let produce = |first: usize, out: &mut [f32]| {
        let (mut h, mut dy) = (Vec::new(), Vec::new());
        let (start, end) = (first * cols, first * cols + out.len());
        let h = values.read(start..end, &mut h);
        let curve = PhantomData::<C>;
        if gated {
            let dy = gradients.read(start / 2..end / 2, &mut dy);
            vectorized(BackwardGated { curve, dy, h, out, cols: cols / 2 });
        } else {
            let dy = gradients.read(start..end, &mut dy);
            vectorized(Backward { curve, dy, h, out });
        }
    };
    let rows = Rows { op, shape: *h.shape(), device: h.device(), dtype: h.dtype(), produce };
    quantize_rows(&rows, slot, dbias)
}

struct Forward<'a, C> {
    curve: PhantomData<C>,
    h: &'a [f32],
    out: &'a mut [f32],
}

impl<C: Curve> Kernel for Forward<'_, C> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        self.out.iter_mut().zip(self.h).for_each(|(o, &x)| *o = C::value(x));
    }
}

struct ForwardGated<'a, C> {
    curve: PhantomData<C>,
    h: &'a [f32],
    out: &'a mut [f32],
    /// Columns of the output.
    cols: usize,
}

impl<C: Curve> Kernel for ForwardGated<'_, C> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (out, h) in self.out.chunks_exact_mut(self.cols).zip(self.h.chunks_exact(2 * self.cols)) {
            let (a, b) = h.split_at(self.cols);
            out.iter_mut().zip(a.iter().zip(b)).for_each(|(o, (&a, b))| *o = C::value(a) * b);
        }
    }
}

struct Backward<'a, C> {
    curve: PhantomData<C>,
    dy: &'a [f32],
    h: &'a [f32],
    out: &'a mut [f32],
}

impl<C: Curve> Kernel for Backward<'_, C> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let inputs = self.h.iter().zip(self.dy);
        self.out.iter_mut().zip(inputs).for_each(|(o, (&x, dy))| *o = C::slope(x) * dy);
    }
}

struct BackwardGated<'a, C> {
    curve: PhantomData<C>,
    dy: &'a [f32],
    h: &'a [f32],
    out: &'a mut [f32],
    /// Columns of `dy`.
    cols: usize,
}

impl<C: Curve> Kernel for BackwardGated<'_, C> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let cols = self.cols;
        let inputs = self.h.chunks_exact(2 * cols).zip(self.dy.chunks_exact(cols));
        for (out, (h, dy)) in self.out.chunks_exact_mut(2 * cols).zip(inputs) {
            let ((da, db), (a, b)) = (out.split_at_mut(cols), h.split_at(cols));
            for ((da, &a), (&b, &dy)) in da.iter_mut().zip(a).zip(b.iter().zip(dy)) {
                *da = C::slope(a) * dy * b;
            }
            db.iter_mut().zip(a.iter().zip(dy)).for_each(|(db, (&a, dy))| *db = C::value(a) * dy);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::dispatch::on_each_path;
    use super::super::dispatch::tests::{bits, values};
    use super::*;

    struct All<'a, C>(PhantomData<C>, &'a [f32], &'a [f32]);

    impl<C: Curve> Kernel for All<'_, C> {
        type Output = Vec<f32>;

        #[inline(always)]
        fn run(self) -> Vec<f32> {
            let Self(curve, h, dy) = self;
            let mut out = vec![0.0; 2 * h.len()];
            let (forward, backward) = out.split_at_mut(h.len());
            Forward { curve, h, out: forward }.run();
            Backward { curve, dy, h, out: backward }.run();
            out
        }
    }

    fn check<C: Curve>() {
        for len in 1..=70 {
            let (h, dy) = (values(len, 1), values(len, 2));
            let want = bits(All(PhantomData::<C>, &h, &dy).run());
            for (path, got) in on_each_path(|| All(PhantomData::<C>, &h, &dy)) {
                assert_eq!(bits(got), want, "{path}: {len} values");
            }
        }
    }

    #[test]
    fn each_path_has_the_same_bits() {
        check::<Gelu>();
        check::<Silu>();
        check::<Qgelu>();
        check::<Relu>();
        check::<Srelu>();
        check::<Sigmoid>();
    }
}
