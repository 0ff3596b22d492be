//! Operations along rows: sums, norms, softmax, attention, losses, lookups.

use fp8_kernels::ops::{
    self, CrossEntropyOptions, Diagonal, Dropout, DropoutKey, Norm, NormOptions, Part, ScoreOptions,
    Sequences,
};
use fp8_kernels::{DType, Tensor};

use super::super::case::Case;
use super::super::draw::Kind;
use super::super::outcome::Tolerance;
use super::slots::Parts;

/// `atol` for values of moderate size, no bound for wild ones.
fn unless_wild(kind: Kind, atol: f64) -> f64 {
    if kind == Kind::Wild { f64::INFINITY } else { atol }
}

pub(super) fn reduce(case: &mut Case<'_>) -> Option<()> {
    let (rank, dtype, kind) = (case.draw.below(5), case.draw.dtype(), case.draw.kind());
    let limit = if case.draw.once_in(100) { 70_000 } else { 4096 };
    let shape = case.draw.extents(rank, limit);
    let x = case.tensor(&shape, dtype, kind)?;
    let bound = unless_wild(kind, x.numel() as f64 * x.size * 1e-6);
    match case.draw.below(4) {
        0 => {
            let sum = case.call("sum", || ops::sum(&x))?;
            case.close("sum", &sum, Tolerance::of(DType::F32, bound));
        }
        1 => {
            let mean = case.call("mean", || ops::mean(&x))?;
            case.close("mean", &mean, Tolerance::of(DType::F32, bound / x.numel().max(1) as f64));
        }
        2 => {
            let max = case.call("max", || ops::max(&x))?;
            case.close("max", &max, Tolerance { rtol: 0.0, atol: 0.0 });
        }
        _ => {
            let sums = case.call("column_sums", || ops::column_sums(&x))?;
            case.close("sums", &sums, Tolerance::of(DType::F32, bound));
        }
    }
    Some(())
}

pub(super) fn grad_norm(case: &mut Case<'_>) -> Option<()> {
    case.mixes();
    let (mut grads, kind) = (Vec::new(), case.draw.kind());
    for _ in 0..case.draw.below(5) {
        let (rank, dtype) = (case.draw.below(4), case.draw.dtype());
        let shape = case.draw.extents(rank, 1024);
        grads.push(case.tensor(&shape, dtype, kind)?.tensor);
    }
    let grads: Vec<&Tensor> = grads.iter().collect();
    let norm = case.call("grad_norm", || ops::grad_norm(&grads))?;
    // Squares and sums are f64: nothing overflows.
    case.close("norm", &norm, Tolerance { rtol: 1e-5, atol: 1e-40 });
    Some(())
}

pub(super) fn norm(case: &mut Case<'_>) -> Option<()> {
    case.mixes();
    let (rank, dtype, kind) = (case.draw.below(4), case.draw.dtype(), case.draw.kind());
    let limit = if case.draw.once_in(60) { 20_000 } else { 2048 };
    let shape = case.draw.extents(rank, limit);
    let norm = case.draw.pick(&[Norm::LayerNorm, Norm::RmsNorm]);
    let eps = case.draw.pick(&[1e-5, 1e-3, 1e-5, 1e-30]);
    let options = NormOptions {
        normalization: norm,
        eps: case.draw.option(eps),
        zero_centered_gamma: case.draw.flip(),
    };
    let x = case.tensor(&shape, dtype, kind)?;
    let cols = x.shape().last_dim();
    if cols > 1 << 16 {
        return None;
    }
    let device = super::tensors::policy(case);
    let x_there = case.call("to_device", || x.to_device(&device))?;
    let (of, has_beta) = (case.draw.dtype(), norm == Norm::LayerNorm);
    let gamma = case.tensor(&[cols], of, kind.min(Kind::Special))?;
    let has_beta = if case.draw.once_in(16) { !has_beta } else { has_beta && case.draw.flip() };
    let beta = if has_beta { Some(case.tensor(&[cols], of, Kind::Tame)?) } else { None };
    let parts = Parts::draw(case)?;
    let (y, stats) =
        case.call("norm", || ops::norm(&x_there, &gamma, beta.as_deref(), &options, &parts.slot()))?;
    // A row of nearly equal values has a small deviation, which enlarges the rounding of its mean: with a tiny eps
    // nothing can be said of it.
    let usual = kind != Kind::Wild && options.eps >= 1e-5;
    let atol = if usual { 2e-3 * (1.0 + x.size) } else { f64::INFINITY };
    case.close(
        "rsigma",
        &stats.rsigma,
        Tolerance { rtol: 5e-4, atol: if usual { 1e-3 } else { f64::INFINITY } },
    );
    if let Some(mean) = &stats.mean {
        case.close("mean", mean, Tolerance { rtol: 5e-5, atol: unless_wild(kind, 1e-5 * (1.0 + x.size)) });
    }
    match y {
        fp8_kernels::Operand::High(y) => case.close("y", &y, Tolerance::of(dtype, atol)),
        fp8_kernels::Operand::Fp8(y) => case.text("y", y.shape()),
    }
    let of = case.draw.dtype();
    let dy = case.tensor(&shape, of, kind)?;
    let (dx, dgamma, dbeta) = if case.draw.flip() {
        case.call("norm_backward", || ops::norm_backward(&dy, &x, &gamma, &stats, &options))?
    } else {
        let residual = case.tensor(&shape, of, kind)?;
        case.call("norm_backward_add", || {
            ops::norm_backward_add(&dy, &x, &gamma, &stats, &options, &residual)
        })?
    };
    // Statistics within their tolerance, enlarged by 1 / deviation: tight only where rows are not nearly constant.
    let usual = usual && options.eps >= 1e-3;
    let rows = x.numel() as f64 / cols.max(1) as f64;
    let atol =
        if usual { 1e-2 * (1.0 + dy.size) * (1.0 + gamma.size) * (1.0 + x.size) } else { f64::INFINITY };
    case.close("dx", &dx, Tolerance::of(dtype, atol * 30.0));
    case.close("dgamma", &dgamma, Tolerance::of(DType::F32, atol * rows.max(1.0)));
    if let Some(dbeta) = &dbeta {
        case.close("dbeta", dbeta, Tolerance::of(DType::F32, unless_wild(kind, dy.size * rows * 1e-6)));
    }
    Some(())
}

pub(super) fn softmax(case: &mut Case<'_>) -> Option<()> {
    case.mixes();
    let (rank, dtype, kind) = (1 + case.draw.below(5), case.draw.dtype(), case.draw.kind());
    let rank = if case.draw.once_in(20) { case.draw.below(2) } else { rank.max(2) };
    let shape = case.draw.extents(rank, 4096);
    let x = case.tensor(&shape, dtype, kind)?;
    let scale = case.draw.pick(&[1.0, 0.125, -1.0, 0.0, 3.0]);
    let scale = case.draw.option(scale);
    let causal = case.draw.flip();
    let mask = if case.draw.flip() {
        let mut dims = x.shape().to_vec();
        for dim in &mut dims {
            if case.draw.once_in(3) {
                *dim = 1;
            }
        }
        let dims = case.draw.mostly(&dims);
        let len = dims.iter().fold(1usize, |len, dim| len.saturating_mul(*dim));
        if len > 1 << 16 {
            return None;
        }
        let mask = (0..len).map(|_| u8::from(case.draw.once_in(3))).collect();
        Some(case.bytes(mask, &dims)?)
    } else {
        None
    };
    let y = case.call("softmax", || ops::softmax(&x, scale, causal, mask.as_ref()))?;
    let usual = scale.abs() <= 8.0;
    let atol = if usual { unless_wild(kind, 1e-5) } else { f64::INFINITY };
    case.close("y", &y, Tolerance::of(dtype, atol));
    let of = case.draw.dtype();
    let dy = case.tensor(&shape, of, kind)?;
    let dx = case.call("softmax_backward", || ops::softmax_backward(&dy, &y, scale))?;
    let rounding = if dtype == DType::F32 { 1e-4 } else { 3e-2 };
    case.close("dx", &dx, Tolerance::of(dtype, atol * 1e5 * rounding * (1.0 + dy.size)));
    Some(())
}

pub(super) fn attention(case: &mut Case<'_>) -> Option<()> {
    case.mixes();
    let (dtype, kind) = (case.draw.dtype(), case.draw.kind());
    let (causal, padded) = (case.draw.flip(), case.draw.once_in(3));
    let diagonal = case.draw.pick(&[Diagonal::TopLeft, Diagonal::BottomRight]);
    let mut end = || case.draw.pick(&[None, None, None, Some(0), Some(1), Some(70), Some(usize::MAX)]);
    let window = (end(), end());
    let drops = case.draw.once_in(3);
    let masked = causal || padded || window != (None, None) || drops;
    // Where a mask or dropout hides a NaN or an infinity, whether it comes through is up to the backend: 0 · NaN is NaN.
    let kind = if masked { Kind::Tame } else { kind };
    let mut q_shape = case.draw.extents(4, 1500);
    let groups = case.draw.pick(&[1, 1, 2, 3]);
    let huge = q_shape.iter().any(|extent| *extent > 1 << 20);
    if !huge {
        q_shape[0] = q_shape[0].min(3);
        let repeats = 1 + case.draw.below(3);
        q_shape[2] = if case.draw.once_in(16) { case.draw.extent() } else { groups * repeats };
        q_shape[3] = q_shape[3].clamp(1, 80);
    }
    let mut k_shape = q_shape.clone();
    if !huge {
        k_shape[1] = if case.draw.flip() { q_shape[1] } else { case.draw.extent() };
        k_shape[2] = groups;
    }
    let len = |shape: &[usize]| shape.iter().fold(1usize, |len, dim| len.saturating_mul(*dim));
    if !huge && len(&q_shape).max(len(&k_shape)) > 20_000 {
        (q_shape[1], k_shape[1]) = (q_shape[1].min(9), k_shape[1].min(9));
    }
    let q = case.tensor(&q_shape, dtype, kind)?;
    let k = case.tensor(&k_shape, dtype, kind)?;
    let like = case.draw.dtype_like(dtype);
    let v = case.tensor(&k_shape, like, kind)?;
    // Without queries no GPU's kernel runs that would look at them.
    let lengths = if padded && q_shape[0] < 1000 && q.tensor.numel() > 0 {
        let most = k_shape[1].min(1000) as i32;
        let lengths: Vec<i32> = (0..q_shape[0])
            .map(|_| match case.draw.below(12) {
                0 => case.draw.pick(&[-1, most + 1, i32::MAX, i32::MIN]),
                _ => case.draw.below(most as usize + 1) as i32,
            })
            .collect();
        let batch = lengths.len();
        Sequences::padded(&case.integers(lengths, &[batch])?)
    } else {
        Sequences::Full
    };
    let scale = case.draw.pick(&[None, Some(1.0), Some(0.0), Some(-0.5)]);
    let scale = if case.draw.once_in(20) { Some(case.draw.option(f32::NAN)) } else { scale };
    let p = case.draw.pick(&[0.0, 0.1, 0.5]);
    let p = if case.draw.once_in(20) { case.draw.option(f32::NAN) } else { p };
    let key = DropoutKey { seed: case.draw.bits(), offset: case.draw.pick(&[0, 1 << 33, u64::MAX]) };
    let dropout = drops.then(|| Dropout { p, draw: key.into() });
    let dropout = dropout.as_ref();
    let options =
        ScoreOptions { causal, window, diagonal, softmax_scale: scale, dropout, ..Default::default() };
    let (o, saved) = case.call("attention", || ops::attention(&*q, &*k, &*v, &lengths, options))?;
    let usual = kind != Kind::Wild && scale.is_none_or(|scale| scale.abs() <= 1.0);
    let unless_unusual = |atol: f64| if usual { atol } else { f64::INFINITY };
    // Scores of bf16 values are f32 sums: rounding them to 1e-5 moves exponentials by as much.
    let scores = 1e-5 * (1.0 + q.size * k.size) * q_shape[3] as f64;
    case.close_if_finite("o", &o, Tolerance::of(dtype, unless_unusual(scores * (1.0 + 2.0 * v.size))));
    let rows = Tolerance { rtol: 1e-3, atol: unless_unusual(scores) };
    case.close("row_max", &saved.row_max, rows);
    saved.row_sum.iter().for_each(|sums| case.close("row_sum", sums, rows));
    let dy = case.tensor(&q_shape, dtype, kind)?;
    let (dq, dk, dv) = case.call("attention_backward", || {
        ops::attention_backward(&dy, &*q, &*k, &*v, &o, &saved, &lengths, options)
    })?;
    // The output was rounded to the type on the way: what is subtracted is off by that much, times as many rows.
    let rounding = if dtype == DType::F32 { 1e-4 } else { 4e-2 };
    let size = (1.0 + dy.size) * (1.0 + q.size) * (1.0 + k.size) * (1.0 + v.size);
    // At most a half is dropped: what is kept counts twice.
    let size = if dropout.is_some() { 4.0 * size } else { size };
    let many = (q_shape[1].max(k_shape[1]) * q_shape[3].max(4)) as f64;
    let near = Tolerance::of(dtype, unless_unusual(size * rounding * many));
    for (name, gradient) in [("dq", &dq), ("dk", &dk), ("dv", &dv)] {
        case.close_if_finite(name, gradient, near);
    }
    Some(())
}

pub(super) fn cross_entropy(case: &mut Case<'_>) -> Option<()> {
    case.mixes();
    let (rank, dtype, kind) = (case.draw.below(4), case.draw.dtype(), case.draw.kind());
    let shape = case.draw.extents(rank, 4096);
    let logits = case.tensor(&shape, dtype, kind)?;
    let cols = logits.shape().last_dim();
    let rows = logits.numel().checked_div(cols).unwrap_or_else(|| case.draw.below(5));
    let ignored = case.draw.pick(&[-1, -100, 0, i32::MAX]);
    let targets: Vec<i32> = (0..rows)
        .map(|_| match case.draw.below(24) {
            0 => case.draw.pick(&[-1, cols.min(1 << 20) as i32, i32::MAX, i32::MIN]),
            1 | 2 => ignored,
            _ => case.draw.below(cols.min(1 << 20)) as i32,
        })
        .collect();
    let len = if case.draw.once_in(24) { case.draw.below(9) } else { rows };
    let targets = targets.into_iter().chain(std::iter::repeat(0)).take(len).collect();
    let targets = case.integers(targets, &[len])?;
    let normalizer = case.draw.pick(&[1.0, 0.5, 64.0]);
    let normalizer = if case.draw.once_in(4) { Some(case.draw.option(normalizer)) } else { None };
    let ignore_index = if case.draw.once_in(6) { None } else { Some(ignored) };
    let options = CrossEntropyOptions { ignore_index, normalizer };
    let (loss, saved) = case.call("cross_entropy", || ops::cross_entropy(&logits, &targets, &options))?;
    let usual = normalizer.is_none_or(|n| (1e-3..1e3).contains(&n));
    let atol = if usual { unless_wild(kind, 1e-5 * (1.0 + logits.size)) } else { f64::INFINITY };
    case.close("loss", &loss, Tolerance { rtol: 1e-4, atol: atol * 1e2 });
    case.exact("count", &saved.count);
    case.close("row_sum", &saved.row_sum, Tolerance { rtol: 1e-4, atol });
    let loss_scale = case.draw.option(1.0);
    let dx = case.call("cross_entropy_backward", || {
        ops::cross_entropy_backward(&logits, &targets, &saved, &options, loss_scale)
    })?;
    let atol = if loss_scale.abs() <= 2.0 { atol * 1e3 } else { f64::INFINITY };
    case.close("dx", &dx, Tolerance::of(dtype, atol));

    let part = part(case, cols);
    let of_part =
        case.call("cross_entropy_part", || ops::cross_entropy_part(&logits, &targets, part, &options))?;
    case.close("row_max of a part", &of_part.row_max, Tolerance { rtol: 0.0, atol: 0.0 });
    let sums =
        case.call("cross_entropy_part_sums", || ops::cross_entropy_part_sums(&of_part, &of_part.row_max))?;
    let (_, saved) = case.call("cross_entropy_of_parts", || {
        ops::cross_entropy_of_parts(&targets, &of_part.row_max, &sums, part.total, &options)
    })?;
    let dx = case.call("cross_entropy_part_backward", || {
        ops::cross_entropy_part_backward(&logits, &targets, part, &saved, &options, loss_scale)
    })?;
    case.close("dx of a part", &dx, Tolerance::of(dtype, atol));
    Some(())
}

/// The place of a part of this length, sometimes one that is none.
fn part(case: &mut Case<'_>, len: usize) -> Part {
    let first = if case.draw.once_in(24) { case.draw.bits() as usize } else { case.draw.below(40) };
    let behind = case.draw.below(40);
    let total = first.saturating_add(len.min(1 << 20)).saturating_add(behind);
    Part { first, total: if case.draw.once_in(24) { case.draw.below(total) } else { total } }
}

pub(super) fn embedding(case: &mut Case<'_>) -> Option<()> {
    case.mixes();
    let (dtype, kind) = (case.draw.dtype(), case.draw.kind());
    let table_shape = case.draw.extents(2, 2048);
    let rank = case.draw.below(4);
    let ids_shape = case.draw.extents(rank, 48);
    let len: usize = ids_shape.iter().fold(1, |len: usize, dim| len.saturating_mul(*dim));
    let vocabulary = table_shape[0].min(1 << 30);
    let ids: Vec<i32> = (0..len)
        .map(|_| match case.draw.below(200) {
            0 => case.draw.pick(&[-1, vocabulary as i32, i32::MAX, i32::MIN]),
            _ => case.draw.below(vocabulary) as i32,
        })
        .collect();
    let table = case.tensor(&table_shape, dtype, kind)?;
    let ids = case.integers(ids, &ids_shape)?;
    let part = part(case, vocabulary);
    let of_part = case.call("embedding_part", || ops::embedding_part(&ids, &table, part));
    if let Some(of_part) = of_part {
        case.exact("rows of a part", &of_part);
    }
    let y = case.call("embedding", || ops::embedding(&ids, &table))?;
    case.exact("y", &y);
    let of = case.draw.dtype();
    let dy = case.tensor(y.shape(), of, kind)?;
    let to = case.draw.dtype_like(DType::F32);
    let mut dtable = case.tensor(&table_shape, to, Kind::Tame)?;
    case.call("embedding_backward", || ops::embedding_backward(&dy, &ids, &mut dtable.tensor, "dtable"))?;
    case.close(
        "dtable",
        &dtable.tensor,
        Tolerance::of(DType::F32, unless_wild(kind, len as f64 * dy.size * 1e-6)),
    );
    Some(())
}
