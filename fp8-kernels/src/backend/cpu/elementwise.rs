//! Reference of `add`, `mul`, `bias` and `scale`.

use super::dispatch::{Kernel, vectorized};
use super::floats::{build, build_flat};
use super::{Floats, parallel};
use crate::element::Float;
use crate::{DType, Result, Tensor};
use half::{bf16, f16};

pub(crate) fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (left, right) = (Floats::of(a, "add", "a")?, Floats::of(b, "add", "b")?);
    build_flat("add", *a.shape(), a.dtype(), a.device(), |start, out| {
        let range = start..start + out.len();
        let (mut a, mut b) = (Vec::new(), Vec::new());
        let (a, b) = (left.read(range.clone(), &mut a), right.read(range, &mut b));
        vectorized(Add { a, b, out });
    })
}

struct Add<'a> {
    a: &'a [f32],
    b: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { a, b, out } = self;
        out.iter_mut().zip(a.iter().zip(b)).for_each(|(o, (a, b))| *o = a + b);
    }
}

pub(crate) fn mul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (left, right) = (Floats::of(a, "mul", "a")?, Floats::of(b, "mul", "b")?);
    build_flat("mul", *a.shape(), a.dtype(), a.device(), |start, out| {
        let range = start..start + out.len();
        let (mut a, mut b) = (Vec::new(), Vec::new());
        let (a, b) = (left.read(range.clone(), &mut a), right.read(range, &mut b));
        vectorized(Mul { a, b, out });
    })
}

struct Mul<'a> {
    a: &'a [f32],
    b: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for Mul<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { a, b, out } = self;
        out.iter_mut().zip(a.iter().zip(b)).for_each(|(o, (a, b))| *o = a * b);
    }
}

pub(crate) fn bias(x: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let cols = x.shape().last_dim().max(1);
    let (values, mut widened) = (Floats::of(x, "bias", "x")?, Vec::new());
    let bias = Floats::of(bias, "bias", "bias")?.read(0..bias.numel(), &mut widened);
    build("bias", *x.shape(), x.dtype(), x.device(), parallel::rows_per_chunk(cols) * cols, |start, out| {
        let mut scratch = Vec::new();
        let x = values.read(start..start + out.len(), &mut scratch);
        vectorized(Bias { x, bias, out });
    })
}

/// Rows of the output.
struct Bias<'a> {
    x: &'a [f32],
    bias: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for Bias<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { x, bias, out } = self;
        let cols = bias.len().max(1);
        for (out, x) in out.chunks_exact_mut(cols).zip(x.chunks_exact(cols)) {
            out.iter_mut().zip(x.iter().zip(bias)).for_each(|(o, (x, b))| *o = x + b);
        }
    }
}

pub(crate) fn scale(x: &Tensor, factor: f32) -> Result<Tensor> {
    let values = Floats::of(x, "scale", "x")?;
    build_flat("scale", *x.shape(), x.dtype(), x.device(), |start, out| {
        let mut scratch = Vec::new();
        let x = values.read(start..start + out.len(), &mut scratch);
        vectorized(Scale { x, factor, out });
    })
}

struct Scale<'a> {
    x: &'a [f32],
    factor: f32,
    out: &'a mut [f32],
}

impl Kernel for Scale<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { x, factor, out } = self;
        out.iter_mut().zip(x).for_each(|(o, x)| *o = x * factor);
    }
}

pub(crate) fn scale_in_place(x: &mut Tensor, factor: f32, name: &str) -> Result<()> {
    struct Multiply<'a, T>(&'a mut [T], f32);
    impl<T: Float> Kernel for Multiply<'_, T> {
        type Output = ();

        #[inline(always)]
        fn run(self) {
            self.0.iter_mut().for_each(|v| *v = T::nearest(v.to_f32() * self.1));
        }
    }
    fn multiply<T: Float>(x: &mut [T], factor: f32) {
        // Nothing to do. A NaN stays a NaN.
        if factor != 1.0 {
            parallel::for_each(x.chunks_mut(parallel::CHUNK), |x| vectorized(Multiply(x, factor)));
        }
    }
    match x.dtype() {
        DType::F32 => multiply::<f32>(x.as_mut_slice(name)?, factor),
        DType::BF16 => multiply::<bf16>(x.as_mut_slice(name)?, factor),
        DType::F16 => multiply::<f16>(x.as_mut_slice(name)?, factor),
        DType::I32 | DType::U8 => x.expect_float("scale_in_place", "x")?,
    }
    Ok(())
}

pub(crate) fn clip_in_place(x: &mut Tensor, norm: &Tensor, max_norm: f32, name: &str) -> Result<()> {
    let norm = norm.item()?;
    // Refused where shared, whether there is something to do or not: the same on every call.
    let factor = if norm.is_finite() && norm > max_norm { max_norm / norm } else { 1.0 };
    scale_in_place(x, factor, name)
}
