//! Heads that attention reads in larger tensors, and gradients that it writes side by side: the bits are those of tensors with
//! nothing else.

use super::attention::{dropout, inputs, options, sequences};
use super::attention_fp8::{problem, quantized};
use super::case::{Outcome, cases};
use super::compare::{close, close_norm, equal, refused, same};
use super::data::{Random, f64s, tensor, tolerance};
use crate::oracle::attention::Attention;
use fp8_kernels::ops::{AttentionGrads, GradLayout, Heads, Packing, ScoreOptions, Sequences};
use fp8_kernels::{DType, Device, Encoding, Fp8Tensor, Result, Shape, Tensor, ops};

cases![
    in_one_tensor: Dtypes,
    with_others_between: Dtypes,
    packed_sequences: Dtypes,
    codes_in_one_tensor: Formats,
    codes_that_are_not_aligned,
    features_that_are_not_aligned,
    refuses,
];

/// Every mask, groups, padding and dropout; head sizes of the plain kernels and, for types that have them, of both paddings of
/// tensor cores, and ones whose keys begin at no multiple of 16 bytes.
fn problems(dtype: DType) -> Vec<Attention> {
    let with =
        |[batch, length, heads, groups, dim]: [usize; 5], causal, window, lengths: Option<&[usize]>| {
            let p = problem([batch, length, length, heads, groups, dim], lengths);
            Attention { causal, window, ..p }
        };
    let (none, some) = ([None, None], [Some(9), Some(3)]);
    let mut problems = vec![
        with([2, 17, 3, 1, 5], true, none, None),
        with([1, 70, 2, 2, 3], false, some, Some(&[66])),
        with([2, 65, 4, 2, 8], true, none, Some(&[65, 0])),
        with([1, 5, 2, 1, 136], true, none, None),
        Attention {
            query_lengths: Some(vec![70, 3]),
            bottom_right: true,
            ..with([2, 70, 2, 1, 16], true, none, Some(&[69, 30]))
        },
        Attention { dropout: Some((0.4, 3, 5)), ..with([2, 33, 4, 2, 6], true, none, None) },
    ];
    if dtype != DType::F32 {
        problems.extend([
            with([2, 70, 2, 1, 64], true, none, None),
            with([1, 66, 2, 1, 40], false, some, Some(&[60])),
            with([1, 67, 3, 3, 72], false, none, None),
            with([2, 65, 2, 1, 128], true, [Some(20), None], None),
            Attention { dropout: Some((0.4, 4, 6)), ..with([1, 70, 2, 1, 64], false, some, None) },
            Attention { dropout: Some((0.4, 5, 7)), ..with([1, 66, 2, 2, 80], true, none, Some(&[50])) },
        ]);
    }
    problems
}

const LAYOUTS: [GradLayout; 3] = [GradLayout::Separate, GradLayout::Kv, GradLayout::Qkv];

/// `[batch, seq, heads, head_dim]` as `[batch, seq, features]`.
fn flat(x: &Tensor) -> Result<Tensor> {
    let shape = x.shape();
    x.reshape([shape[0], shape[1], shape[2..].iter().product()])
}

/// These side by side.
fn together(parts: &[&Tensor]) -> Result<Tensor> {
    let parts = parts.iter().map(|part| flat(part)).collect::<Result<Vec<_>>>()?;
    ops::concat(&parts.iter().collect::<Vec<_>>())
}

fn same_tensor(what: &str, got: &Tensor, want: &Tensor) -> Outcome {
    equal(what, got.shape().to_vec(), want.shape().to_vec())?;
    same(what, &got.to_f32_vec()?, &want.to_f32_vec()?, want.shape().last_dim())
}

/// Compares gradients in these layouts with those in three tensors.
fn same_grads(
    what: &str,
    layouts: &[GradLayout],
    [dq, dk, dv]: [&Tensor; 3],
    in_layout: impl Fn(GradLayout) -> Result<AttentionGrads>,
) -> Outcome {
    for &layout in layouts {
        let what = format!("{what}, {layout:?}");
        let parts = match (layout, in_layout(layout)?) {
            (GradLayout::Separate, AttentionGrads::Separate { dq: q, dk: k, dv: v }) => {
                vec![("dq", q, dq.clone()), ("dk", k, dk.clone()), ("dv", v, dv.clone())]
            }
            (GradLayout::Kv, AttentionGrads::Kv { dq: q, dkv }) => {
                vec![("dq", q, dq.clone()), ("dkv", dkv, together(&[dk, dv])?)]
            }
            (GradLayout::Qkv, AttentionGrads::Qkv(dqkv)) => {
                vec![("dqkv", dqkv, together(&[dq, dk, dv])?)]
            }
            _ => return Err(format!("{what}: another layout").into()),
        };
        for (name, got, want) in &parts {
            same_tensor(&format!("{what}: {name}"), got, want)?;
        }
    }
    Ok(())
}

/// Attention of tensors with nothing else: q, k, v and dy; what heads are compared with.
struct Whole<'a> {
    tensors: &'a [Tensor; 4],
    sequences: &'a Sequences,
    options: ScoreOptions<'a>,
    o: Tensor,
    row_max: Tensor,
    grads: [Tensor; 3],
}

impl<'a> Whole<'a> {
    fn new(tensors: &'a [Tensor; 4], sequences: &'a Sequences, options: ScoreOptions<'a>) -> Result<Self> {
        let [q, k, v, dy] = tensors;
        let (o, saved) = ops::attention(q, k, v, sequences, options)?;
        let (dq, dk, dv) = ops::attention_backward(dy, q, k, v, &o, &saved, sequences, options)?;
        Ok(Self { tensors, sequences, options, o, row_max: saved.row_max, grads: [dq, dk, dv] })
    }

    /// Compares attention of heads, whose gradients are written in these layouts.
    fn is_that_of(&self, what: &str, [q, k, v]: [Heads<'_>; 3], layouts: &[GradLayout]) -> Outcome {
        let (dy, sequences, options) = (&self.tensors[3], self.sequences, self.options);
        let (o, rows) = ops::attention(q, k, v, sequences, options)?;
        same_tensor(&format!("{what}: o"), &o, &self.o)?;
        same_tensor(&format!("{what}: row_max"), &rows.row_max, &self.row_max)?;
        same_grads(what, layouts, self.grads.each_ref(), |layout| {
            ops::attention_backward_to(dy, q, k, v, &o, &rows, sequences, options, layout)
        })
    }
}

fn in_one_tensor(device: &Device, dtype: DType) -> Outcome {
    for p in problems(dtype) {
        let tensors = inputs(&p, dtype, device)?;
        let [q, k, v, _] = &tensors;
        let dropout = dropout(&p);
        let options = ScoreOptions { dropout: dropout.as_ref(), ..options(&p) };
        let sequences = sequences(&p, device)?;
        let whole = Whole::new(&tensors, &sequences, options)?;
        let (qkv, kv) = (together(&[q, k, v])?, together(&[k, v])?);
        let heads = Heads::qkv(&qkv, p.heads, p.groups, p.dim)?;
        whole.is_that_of(&format!("qkv of {p:?}"), heads, &[GradLayout::Qkv])?;
        let [in_k, in_v] = Heads::kv(&kv, p.groups, p.dim)?;
        whole.is_that_of(&format!("kv of {p:?}"), [q.into(), in_k, in_v], &[GradLayout::Kv])?;
    }
    Ok(())
}

/// Features before, between and behind the heads, all NaN: none of them is read.
fn with_others_between(device: &Device, dtype: DType) -> Outcome {
    for p in problems(dtype) {
        let tensors = inputs(&p, dtype, device)?;
        let [q, k, v, _] = &tensors;
        let dropout = dropout(&p);
        let options = ScoreOptions { dropout: dropout.as_ref(), ..options(&p) };
        let sequences = sequences(&p, device)?;
        let nan = |features: usize| {
            let shape = [p.batch, p.queries, features];
            tensor(vec![f32::NAN; shape.iter().product()], shape, dtype, device)
        };
        // Of multiples of 16 bytes in every type.
        let [before, between, behind] = [nan(8)?, nan(16)?, nan(24)?];
        let all = together(&[&before, k, &between, q, v, &behind])?;
        let widths = [p.heads * p.dim, p.groups * p.dim];
        let at_q = 8 + widths[1] + 16;
        let heads = [
            Heads::new(&all, at_q, p.heads, p.dim)?,
            Heads::new(&all, 8, p.groups, p.dim)?,
            Heads::new(&all, at_q + widths[0], p.groups, p.dim)?,
        ];
        // In each layout once: what is written does not depend on what is read.
        let layouts = if p.dim < 8 { &LAYOUTS[..] } else { &LAYOUTS[..1] };
        Whole::new(&tensors, &sequences, options)?.is_that_of(&format!("{p:?}"), heads, layouts)?;
    }
    Ok(())
}

fn packed_sequences(device: &Device, dtype: DType) -> Outcome {
    for dim in if dtype == DType::F32 { &[5, 12][..] } else { &[5, 40, 80] }.iter().copied() {
        let p = problem([1, 140, 140, 4, 2, dim], None);
        let tensors = inputs(&p, dtype, device)?;
        let [q, k, v, _] = &tensors;
        let qkv = together(&[q, k, v])?;
        let heads = Heads::qkv(&qkv, p.heads, p.groups, dim)?;
        // The last ten are padding.
        let capacity = ops::PackingCapacity { sequences: 4, queries: 140, keys: 140 };
        let packing = Packing::with_capacity(&[1, 70, 59], &[1, 70, 59], capacity, device)?;
        let sequences = Sequences::Packed(packing);
        let whole = Whole::new(&tensors, &sequences, ScoreOptions::default())?;
        whole.is_that_of(&format!("{dim}"), heads, &[GradLayout::Qkv])?;
    }
    Ok(())
}

/// q, k, v and dy as codes with one factor, and q, k and v side by side.
fn codes(p: &Attention, format: Encoding, device: &Device) -> Result<([Fp8Tensor; 4], Fp8Tensor)> {
    let [q, k, v, dy] = inputs(p, DType::F32, device)?;
    let all = quantized(&together(&[&q, &k, &v])?, Encoding::E4M3)?;
    let [of_q, of_k] = [p.heads, p.groups].map(|heads| heads * p.dim);
    let parts = all.split(&[of_q, of_k, of_k])?;
    let part = |i: usize, like: &Tensor| parts[i].reshape(*like.shape());
    Ok(([part(0, &q)?, part(1, &k)?, part(2, &v)?, quantized(&dy, format)?], all))
}

fn codes_in_one_tensor(device: &Device, format: Encoding) -> Outcome {
    // Head sizes of both paddings, and some that tensor cores do not take.
    for p in problems(DType::BF16).into_iter().filter(|p| ![8, 72, 136].contains(&p.dim)) {
        let ([q, k, v, dy], all) = codes(&p, format, device)?;
        let heads = Heads::qkv(&all, p.heads, p.groups, p.dim)?;
        same_codes(&p, [&q, &k, &v], &dy, heads, device)?;
    }
    Ok(())
}

fn same_codes(
    p: &Attention,
    [q, k, v]: [&Fp8Tensor; 3],
    dy: &Fp8Tensor,
    [in_q, in_k, in_v]: [Heads<'_, Fp8Tensor>; 3],
    device: &Device,
) -> Outcome {
    let dropout = dropout(p);
    let options = ScoreOptions { dropout: dropout.as_ref(), ..options(p) };
    let sequences = sequences(p, device)?;
    for dtype in [DType::F32, DType::BF16] {
        let what = format!("{dtype}, {p:?}");
        let (want, saved) = ops::attention_fp8(q, k, v, &sequences, options, dtype)?;
        let (o, rows) = ops::attention_fp8(in_q, in_k, in_v, &sequences, options, dtype)?;
        same_tensor(&format!("{what}: o"), &o, &want)?;
        let (dq, dk, dv) = ops::attention_fp8_backward(dy, q, k, v, &want, &saved, &sequences, options)?;
        let layouts = if dtype == DType::F32 { &LAYOUTS[..] } else { &LAYOUTS[2..] };
        same_grads(&what, layouts, [&dq, &dk, &dv], |layout| {
            ops::attention_fp8_backward_to(dy, in_q, in_k, in_v, &o, &rows, &sequences, options, layout)
        })?;
    }
    Ok(())
}

/// Tensors of features in which heads begin four elements late: a GPU's tensor cores cannot read them.
fn late(parts: [&Tensor; 3]) -> Result<[Tensor; 3]> {
    let late = |x: &Tensor| {
        let shape = [x.shape()[0], x.shape()[1], 4];
        let four = tensor(vec![f32::NAN; shape.iter().product()], shape, x.dtype(), x.device())?;
        together(&[&four, x])
    };
    let [q, k, v] = parts.map(late);
    Ok([q?, k?, v?])
}

fn features_that_are_not_aligned(device: &Device) -> Outcome {
    for (dtype, dim) in [(DType::BF16, 64), (DType::F16, 72), (DType::F32, 6)] {
        let p = problem([2, 70, 70, 2, 1, dim], None);
        let [q, k, v, dy] = inputs(&p, dtype, device)?;
        let tensors = late([&q, &k, &v])?;
        let head = |i: usize, heads| Heads::new(&tensors[i], 4, heads, dim);
        let [in_q, in_k, in_v] = [head(0, 2)?, head(1, 1)?, head(2, 1)?];
        let (sequences, options) = (Sequences::Full, options(&p));
        let (o, saved) = ops::attention(in_q, in_k, in_v, &sequences, options)?;
        let [of_q, of_k, of_v, of_dy] = [f64s(&q)?, f64s(&k)?, f64s(&v)?, f64s(&dy)?];
        close("o", &o.to_f32_vec()?, &p.forward(&of_q, &of_k, &of_v), dim, tolerance(dtype))?;
        let (dq, dk, dv) = ops::attention_backward(&dy, in_q, in_k, in_v, &o, &saved, &sequences, options)?;
        let want = p.backward(&of_dy, &of_q, &of_k, &of_v);
        let limit = if dtype == DType::F32 { 1e-5 } else { 5e-3 };
        for ((name, got), want) in [("dq", dq), ("dk", dk), ("dv", dv)].into_iter().zip(&want) {
            close_norm(&format!("{name} of {dtype}"), &got.to_f32_vec()?, want, limit)?;
        }
    }
    Ok(())
}

fn codes_that_are_not_aligned(device: &Device) -> Outcome {
    let p = problem([2, 70, 70, 2, 1, 32], None);
    let ([q, k, v, dy], _) = codes(&p, Encoding::E5M2, device)?;
    let shifted = |x: &Fp8Tensor| {
        let codes = x.rowwise().ok_or("no codes")?.reshape(*x.shape()).map_err(|error| error.to_string())?;
        let late = move || -> Result<Fp8Tensor> {
            let shape = [codes.shape()[0], codes.shape()[1], 4];
            let four = Tensor::from_vec(vec![0x7fu8; shape.iter().product()], shape, codes.device())?;
            let all = together(&[&four, &codes])?;
            let shape: Shape = *all.shape();
            Fp8Tensor::from_codes(all, shape, x.encoding(), x.scale_inv().clone())
        };
        late().map_err(|error| error.to_string())
    };
    let tensors = [shifted(&q)?, shifted(&k)?, shifted(&v)?];
    let head = |i: usize, heads| Heads::new(&tensors[i], 4, heads, 32);
    let [in_q, in_k, in_v] = [head(0, 2)?, head(1, 1)?, head(2, 1)?];
    let (sequences, options) = (Sequences::Full, options(&p));
    let (want, saved) = ops::attention_fp8(&q, &k, &v, &sequences, options, DType::F32)?;
    let (o, rows) = ops::attention_fp8(in_q, in_k, in_v, &sequences, options, DType::F32)?;
    // On a GPU these are computed without rounding probabilities.
    close_norm("o", &o.to_f32_vec()?, &f64s(&want)?, 0.03)?;
    let (dq, ..) = ops::attention_fp8_backward(&dy, &q, &k, &v, &want, &saved, &sequences, options)?;
    let (got, ..) = ops::attention_fp8_backward(&dy, in_q, in_k, in_v, &o, &rows, &sequences, options)?;
    close_norm("dq", &got.to_f32_vec()?, &f64s(&dq)?, 0.1)
}

fn refuses(device: &Device) -> Outcome {
    let values = Random::new(1).normals(2 * 3 * 24);
    let qkv = tensor(values, [2, 3, 24], DType::F32, device)?;
    refused(
        Heads::qkv(&qkv, 2, 2, 8),
        "expected [batch, sequence, features] with 48 features: 6 heads of 8",
    )?;
    refused(Heads::qkv(&qkv, 2, 2, 0), "with 0 features: 6 heads of 0")?;
    refused(Heads::kv(&qkv, usize::MAX, 4), "heads of 4")?;
    refused(Heads::new(&qkv, 17, 1, 8), "heads that end by feature 24")?;
    refused(Heads::new(&qkv, 1, usize::MAX, 8), "heads that end by feature 24")?;
    refused(Heads::new(&qkv, usize::MAX, 1, 8), "heads that end by feature 24")?;
    refused(Heads::new(&qkv, 0, 1, 0), "give a head_dim of at least 1")?;
    let [q, k, _] = Heads::qkv(&qkv, 1, 1, 8)?;
    let (all, options) = (Sequences::Full, ScoreOptions::default());
    let other = tensor(vec![0.0; 2 * 3 * 8], [2, 3, 1, 8], DType::F32, device)?;
    refused(ops::attention(q, k, &other, &all, options), "features = 24 of keys and 8 of values")?;
    let (o, saved) = ops::attention(q, &other, &other, &all, options)?;
    let longer = tensor(vec![0.0; 2 * 4 * 8], [2, 4, 1, 8], DType::F32, device)?;
    let (layout, wording) = (GradLayout::Qkv, "layout = Qkv with 3 queries and 4 keys");
    refused(
        ops::attention_backward_to(&o, q, &longer, &longer, &o, &saved, &all, options, layout),
        &format!("attention_backward: {wording}"),
    )
}
