//! Operations on elements, one by one or in another order.

use fp8_kernels::ops::{self, Activation, Dropout, DropoutKey};
use fp8_kernels::{DType, DropoutDraw, Tensor};

use super::super::case::Case;
use super::super::draw::Kind;
use super::super::outcome::Tolerance;
use super::slots::Parts;

pub(super) fn cast(case: &mut Case<'_>) -> Option<()> {
    let (rank, from, to, kind) = (case.draw.below(5), case.draw.dtype(), case.draw.dtype(), case.draw.kind());
    let shape = case.draw.extents(rank, 4096);
    let x = case.tensor(&shape, from, kind)?;
    let y = case.call("cast", || ops::cast(&x, to))?;
    case.exact("y", &y);
    Some(())
}

pub(super) fn elementwise(case: &mut Case<'_>) -> Option<()> {
    case.mixes();
    let (rank, dtype, kind) = (case.draw.below(4), case.draw.dtype(), case.draw.kind());
    let shape = case.draw.extents(rank, 4096);
    let mut x = case.tensor(&shape, dtype, kind)?.tensor;
    let factor = case.draw.option(0.75);
    match case.draw.below(5) {
        0 => {
            let of = case.draw.dtype();
            let b = case.tensor(&shape, of, kind)?;
            let y = case.call("add", || ops::add(&x, &b))?;
            case.exact("y", &y);
            let y = case.call("mul", || ops::mul(&x, &b))?;
            case.exact("y", &y);
        }
        1 => {
            let of = case.draw.dtype();
            let last = x.shape().last_dim();
            let b = if last > 1 << 20 { return None } else { case.tensor(&[last], of, kind)? };
            let y = case.call("bias", || ops::bias(&x, &b))?;
            case.exact("y", &y);
        }
        2 => {
            let y = case.call("scale", || ops::scale(&x, factor))?;
            case.exact("y", &y);
        }
        3 => {
            let shared = case.draw.once_in(6).then(|| x.clone());
            case.call("scale_in_place", || ops::scale_in_place(&mut x, factor, "x"))?;
            case.exact("x", &x);
            drop(shared);
        }
        _ => {
            let norm_shape: &[usize] = case.draw.pick(&[&[] as &[usize], &[1], &[1, 1], &[2]]);
            let of = case.draw.dtype_like(DType::F32);
            let norm = case.tensor(norm_shape, of, kind)?;
            case.call("clip_in_place", || ops::clip_in_place(&mut x, &norm, factor, "x"))?;
            case.exact("x", &x);
        }
    }
    Some(())
}

pub(super) fn accumulate(case: &mut Case<'_>) -> Option<()> {
    case.mixes();
    let (rank, kind) = (case.draw.below(4), case.draw.kind());
    let shape = case.draw.extents(rank, 4096);
    let (to, from) = (case.draw.dtype_like(DType::F32), case.draw.dtype());
    let mut out = case.tensor(&shape, to, kind)?.tensor;
    let x = case.tensor(&shape, from, kind)?;
    let shared = case.draw.once_in(8).then(|| out.clone());
    case.call("accumulate", || ops::accumulate(&mut out, &x, "out"))?;
    case.exact("out", &out);
    drop(shared);
    Some(())
}

pub(super) fn dropout(case: &mut Case<'_>) -> Option<()> {
    let (rank, dtype, kind) = (case.draw.below(4), case.draw.dtype(), case.draw.kind());
    let shape = case.draw.extents(rank, 4096);
    let x = case.tensor(&shape, dtype, kind)?;
    let p = case.draw.pick(&[0.0, 0.1, 0.5, 0.999_999_94, 1e-12, -0.0]);
    let p = case.draw.option(p);
    let seed = case.draw.bits();
    let offset = case.draw.pick(&[0, 1, 1 << 33, u64::MAX, u64::MAX - 3]);
    let key = DropoutKey { seed, offset };
    let y = case.call("dropout", || ops::dropout(&x, p, key))?;
    case.exact("y", &y);
    let dx = case.call("dropout_backward", || ops::dropout_backward(&y, p, key))?;
    case.exact("dx", &dx);
    let path = Dropout { p: case.draw.pick(&[0.0, 0.3]), draw: key.into() };
    let hidden = Dropout { p, draw: DropoutDraw::from(key).mask(case.draw.below(3) as u64) };
    let masks = [(Some(&hidden), None), (None, Some(&path)), (Some(&hidden), Some(&path))];
    let (hidden, path) = case.draw.pick(&masks);
    let sum = case.call("dropout_add", || ops::dropout_add(&x, &y, hidden, path))?;
    case.exact("sum", &sum);
    let dx = case.call("dropout_add_backward", || ops::dropout_add_backward(&y, hidden, path))?;
    case.exact("dx of the sum", &dx);
    Some(())
}

pub(super) fn activation(case: &mut Case<'_>) -> Option<()> {
    case.mixes();
    let (rank, dtype, kind) = (case.draw.below(4), case.draw.dtype(), case.draw.kind());
    let activation = case.draw.pick(&Activation::ALL);
    let mut shape = case.draw.extents(rank, 4096);
    if let Some(last) = shape.last_mut()
        && activation.is_gated()
        && !case.draw.once_in(10)
    {
        *last = last.saturating_mul(2);
    }
    let h = case.tensor(&shape, dtype, kind)?;
    let device = super::tensors::policy(case);
    let h_there = case.call("to_device", || h.to_device(&device))?;
    let parts = Parts::draw(case)?;
    let y = case.call("activation", || ops::activation(&h_there, activation, &parts.slot()))?;
    case.operand("y", &y);
    parts.record(case);
    let of = case.draw.dtype();
    let dy = case.tensor(y.shape(), of, kind)?;
    if case.draw.flip() {
        let dx = case.call("activation_backward", || ops::activation_backward(&dy, &h, activation))?;
        case.exact("dx", &dx);
        return Some(());
    }
    let parts = Parts::draw(case)?;
    let name = "activation_backward_quantize_dbias";
    let (dx, db) = case
        .call(name, || ops::activation_backward_quantize_dbias(&dy, &h_there, activation, &parts.slot()))?;
    case.operand("dx", &dx);
    let bound = if kind == Kind::Wild {
        f64::INFINITY
    } else {
        16.0 * h.numel() as f64 * (1.0 + h.size) * (1.0 + dy.size)
    };
    case.close("db", &db, Tolerance::of(DType::F32, bound * (h.size + 1.0) * 1e-6));
    parts.record(case);
    Some(())
}

pub(super) fn transpose(case: &mut Case<'_>) -> Option<()> {
    let (rank, dtype) =
        (case.draw.below(5), case.draw.pick(&[DType::F32, DType::BF16, DType::I32, DType::U8]));
    let shape = case.draw.extents(rank, 8192);
    let x = case.tensor(&shape, dtype, Kind::Special)?;
    let y = case.call("transpose", || ops::transpose(&x))?;
    case.exact("y", &y);
    let back = case.call("transpose", || ops::transpose(&y))?;
    case.exact("back", &back);
    let mut axes: Vec<usize> = (0..rank).collect();
    for place in 1..rank {
        axes.swap(place, case.draw.below(place + 1));
    }
    let y = case.call("permute", || ops::permute(&x, &axes))?;
    case.exact("permuted", &y);
    let amax = case.call("amax", || ops::amax(&x))?;
    case.exact("amax", &amax);
    Some(())
}

pub(super) fn split(case: &mut Case<'_>) -> Option<()> {
    case.mixes();
    let (rank, dtype) = (1 + case.draw.below(3), case.draw.dtype());
    let shape = case.draw.extents(rank, 4096);
    let x = case.tensor(&shape, dtype, Kind::Special)?;
    let [start, end] =
        [case.draw.below(shape[0].saturating_add(2)), case.draw.below(shape[0].saturating_add(2))];
    if end <= shape[0] && start <= end {
        let part = case.call("rows", || ops::rows(&x, start..end))?;
        case.exact("rows", &part);
    } else {
        let _ = case.call("rows", || ops::rows(&x, start..end));
    }
    let mut left = x.shape().last_dim();
    let mut sizes = Vec::new();
    for _ in 0..case.draw.below(5) {
        let size = case.draw.below(left.saturating_add(1));
        left -= size;
        sizes.push(size);
    }
    sizes.push(left);
    if case.draw.once_in(16) {
        let huge = case.draw.huge();
        sizes.push(huge);
    }
    let parts = case.call("split", || ops::split(&x, &sizes))?;
    for part in &parts {
        case.exact("part", part);
    }
    let mut parts: Vec<&Tensor> = parts.iter().collect();
    let other = case.tensor(&shape, dtype, Kind::Tame)?;
    if case.draw.flip() {
        parts.push(&other.tensor);
    }
    if case.draw.once_in(20) {
        parts.clear();
    }
    let takes_other = parts.iter().any(|part| std::ptr::eq(*part, &other.tensor));
    let join = || ops::concat(&parts);
    let joined = if takes_other { case.call("concat", join)? } else { case.aside("concat", join)? };
    case.exact("joined", &joined);
    Some(())
}

pub(super) fn rope(case: &mut Case<'_>) -> Option<()> {
    let mut positions = case.draw.extent();
    let half = 1 + case.draw.below(20);
    let mut head_dim = if case.draw.once_in(12) { case.draw.extent() } else { 2 * half };
    if case.draw.once_in(16) {
        positions = case.draw.huge();
    } else if case.draw.once_in(24) {
        head_dim = case.draw.huge();
    }
    let base =
        case.draw.pick(&[10_000.0, 500_000.0, 1.0, 1e-300, 0.0, -3.0, f64::NAN, f64::INFINITY, f64::MAX]);
    let base = if case.draw.once_in(4) { base } else { 10_000.0 };
    let device = case.device;
    case.say(|| format!("positions {positions}, head_dim {head_dim}, base {base}"));
    let table = case.call("RopeTable::new", || ops::RopeTable::new(positions, head_dim, base, device))?;
    case.exact("cos", table.cos());
    case.exact("sin", table.sin());
    let (kind, dtype) = (case.draw.kind(), case.draw.dtype());
    let mut shape = case.draw.extents(4, 2048);
    if !case.draw.once_in(16) {
        shape[3] = head_dim;
        shape[0] = shape[0].min(3);
        shape[2] = shape[2].min(4);
        let most = 4096 / head_dim.max(1);
        shape[1] = shape[1].min(positions).min(most.max(1));
    }
    let start = case.draw.below(positions.saturating_sub(shape[1]).saturating_add(2));
    let start = if case.draw.once_in(20) { usize::MAX } else { start };
    let x = case.tensor(&shape, dtype, kind)?;
    let y = case.call("rope", || ops::rope(&x, &table, start))?;
    case.exact("y", &y);
    let dx = case.call("rope_backward", || ops::rope_backward(&y, &table, start))?;
    case.exact("dx", &dx);
    Some(())
}
