//! Operations that the ranks of a group run on their devices: comparing calls, and computing a scale from an amax.

use fp8_kernels::{DType, Tensor, ops};

use super::super::case::Case;
use super::drawn;

/// Calls and scales of ranks, most of them equal.
pub(super) fn compare_calls(case: &mut Case<'_>) -> Option<()> {
    case.mixes();
    let rank = if case.draw.once_in(12) { case.draw.below(4) } else { 1 };
    let shape = case.draw.extents(rank, 4096);
    let len = shape.iter().fold(1usize, |len, extent| len.saturating_mul(*extent));
    let (call, scale) = (case.draw.pick(&[0, 7, -1, i32::MIN]), case.draw.option(2.0));
    let calls = (0..len).map(|_| if case.draw.once_in(300) { call ^ 1 } else { call }).collect();
    let calls = case.integers(calls, &shape)?;
    let scales = if case.draw.flip() { Some(scales(case, scale, &shape)?) } else { None };
    case.call("compare_calls", || ops::compare_calls("gather `w`", &calls, scales.as_ref()))
}

fn scales(case: &mut Case<'_>, scale: f32, shape: &[usize]) -> Option<Tensor> {
    let shape = fp8_kernels::Shape::from_slice(&case.draw.mostly(shape))?;
    let next = |case: &mut Case<'_>| if case.draw.once_in(300) { case.draw.option(2.5) } else { scale };
    let values = (0..shape.numel().min(1 << 20)).map(|_| next(case)).collect();
    let device = case.place();
    case.aside("from_vec", || Tensor::from_vec(values, shape, &device))
}

pub(super) fn scale_from_amax(case: &mut Case<'_>) -> Option<()> {
    let (dtype, encoding) = (case.draw.dtype_like(DType::F32), case.draw.encoding());
    let kind = case.draw.kind();
    let amax = case.tensor(&[1], dtype, kind)?;
    let rule = drawn::rule(&mut case.draw, encoding);
    case.say(|| format!("{rule:?}"));
    let scale = case.call("scale_from_amax", || ops::scale_from_amax(&amax, &rule))?;
    let scale = case.call("read", || scale.read())?;
    case.numbers("scale", vec![scale]);
    Some(())
}
