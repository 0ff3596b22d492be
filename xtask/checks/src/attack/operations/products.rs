//! Matrix products, in high precision and in FP8.

use fp8_kernels::ops::{self, Accumulation, Diagonal, Layout, ScoreOptions, Sequences, Update};
use fp8_kernels::{Cell, DType, Device, Encoding, Fp8Tensor, Operand, ScalePolicy, ScaleRule, Slot};

use super::super::case::{Case, Input};
use super::super::draw::Kind;
use super::super::outcome::Tolerance;
use super::slots::Parts;

/// Returns the tolerance for sums of `k` products, which is infinite where they might overflow.
fn tolerance(dtype: DType, k: usize, [a, b]: [&Input; 2], more: f64) -> Tolerance {
    if a.kind == Kind::Wild || b.kind == Kind::Wild {
        return Tolerance::of(dtype, f64::INFINITY);
    }
    let bound = k as f64 * a.size * b.size + more;
    Tolerance::of(dtype, bound * 1e-6)
}

/// m, n, k; now and then huge ones beside a zero.
fn extents(case: &mut Case<'_>) -> [usize; 3] {
    let all = case.draw.extents(3, 1 << 15);
    [all[0], all[1], all[2]]
}

pub(super) fn gemm(case: &mut Case<'_>) -> Option<()> {
    case.mixes();
    let [m, n, k] = extents(case);
    let layout = case.draw.pick(&[Layout::Nn, Layout::Nt, Layout::Tn]);
    let (a_shape, b_shape) = match layout {
        Layout::Nn => ([m, k], [k, n]),
        Layout::Nt => ([m, k], [n, k]),
        Layout::Tn => ([k, m], [k, n]),
    };
    let (a_type, b_type, kind) = (case.draw.dtype(), case.draw.dtype(), case.draw.kind());
    let a = case.tensor(&a_shape, a_type, kind)?;
    let b = case.tensor(&b_shape, b_type, kind)?;
    if case.draw.once_in(3) {
        let to = case.draw.dtype_like(DType::F32);
        let out_shape =
            if m.checked_mul(n).is_none_or(|len| len > 1 << 16) { vec![0, n] } else { vec![m, n] };
        let mut out = case.tensor(&out_shape, to, kind)?;
        if case.draw.flip() {
            let update = case.draw.pick(&[Update::Add, Update::Write]);
            case.call("gemm_into", || ops::gemm_into(&a, &b, layout, &mut out.tensor, update, "out"))?;
        } else {
            case.call("gemm_accumulate", || ops::gemm_accumulate(&a, &b, layout, &mut out.tensor, "out"))?;
        }
        let near = tolerance(DType::F32, k, [&a, &b], out.size);
        case.close("out", &out.tensor, near);
        return Some(());
    }
    let bias_type = case.draw.dtype();
    let has_bias = case.draw.flip() && n < 1 << 16;
    let bias = if has_bias { Some(case.tensor(&[n], bias_type, kind)?) } else { None };
    let to = case.draw.dtype();
    let addend_type = case.draw.dtype();
    let has_addend = case.draw.flip() && m.checked_mul(n).is_some_and(|len| len < 1 << 16);
    let addend = if has_addend { Some(case.tensor(&[m, n], addend_type, kind)?) } else { None };
    let y = match addend.as_deref() {
        Some(addend) => {
            case.call("gemm_add", || ops::gemm_add(&a, &b, layout, addend, bias.as_deref(), to))?
        }
        None => case.call("gemm", || ops::gemm(&a, &b, layout, bias.as_deref(), to))?,
    };
    let size = |term: Option<Input>| term.map_or(0.0, |term| term.size);
    let near = tolerance(to, k, [&a, &b], size(bias) + size(addend));
    case.close("y", &y, near);
    Some(())
}

/// Quantized values with a scale that leaves most in range.
fn fp8(case: &mut Case<'_>, x: &Input, encoding: Encoding, device: &Device) -> Option<Fp8Tensor> {
    let scale = case.draw.pick(&[1.0, 2.0, 16.0, 0.25]);
    let columnwise = case.draw.flip();
    let rule = ScaleRule::Delayed { fp8_max: encoding.max(), margin: 0, policy: ScalePolicy::Exact };
    let on = case.call("to_device", || x.to_device(device))?;
    let cell = case.call("Cell::new", || Cell::new(scale, on.device()))?;
    let slot = Slot { columnwise, ..Slot::fixed(encoding, &cell, &rule) };
    match case.call("quantize", || ops::quantize(&on, &slot))? {
        Operand::Fp8(x) => Some(x),
        Operand::High(_) => {
            case.fail("quantize: a slot with a scale gave high precision".to_owned());
            None
        }
    }
}

fn finite(x: Input) -> Input {
    // Saturated infinities are numbers: the largest of the format.
    let size = if x.kind == Kind::Tame { x.size } else { 57344.0 * 4.0 };
    Input { size, ..x }
}

pub(super) fn gemm_fp8(case: &mut Case<'_>) -> Option<()> {
    let [m, n, k] = extents(case);
    let (kind, dtype) = (case.draw.kind(), case.draw.dtype());
    let device = super::tensors::policy(case);
    let a = case.tensor(&[m, k], dtype, kind)?;
    let b = case.tensor(&[n, k], dtype, kind)?;
    let (ea, eb) = (case.draw.encoding(), case.draw.encoding());
    let a8 = fp8(case, &a, ea, &device)?;
    let b8 = fp8(case, &b, eb, &device)?;
    let (a, b) = (finite(a), finite(b));
    let accumulation = case.draw.pick(&[Accumulation::Fast, Accumulation::Split]);
    let bias_type = case.draw.dtype();
    let has_bias = case.draw.flip() && n < 1 << 16;
    let to = case.draw.dtype();
    match case.draw.below(3) {
        0 => {
            let of = case.draw.dtype_like(DType::F32);
            let shape = if m.checked_mul(n).is_none_or(|len| len > 1 << 16) { [0, n] } else { [m, n] };
            let mut out = case.tensor(&shape, of, Kind::Tame)?;
            let (update, split) = (case.draw.pick(&[Update::Add, Update::Write]), Accumulation::Split);
            if case.draw.flip() {
                case.call("gemm_fp8_into", || {
                    ops::gemm_fp8_into(&a8, &b8, &mut out.tensor, update, "out", split)
                })?;
            } else {
                case.call("gemm_fp8_accumulate", || {
                    ops::gemm_fp8_accumulate(&a8, &b8, &mut out.tensor, "out", split)
                })?;
            }
            case.close("out", &out.tensor, tolerance(DType::F32, k, [&a, &b], out.size));
        }
        1 => {
            let bias = if has_bias { Some(case.tensor(&[n], bias_type, Kind::Tame)?) } else { None };
            let bias_size = bias.as_ref().map_or(0.0, |bias| bias.size);
            let addend_type = case.draw.dtype();
            if case.draw.flip() && m.checked_mul(n).is_some_and(|len| len < 1 << 16) {
                let addend = case.tensor(&[m, n], addend_type, Kind::Tame)?;
                let y = case.call("gemm_fp8_add", || {
                    ops::gemm_fp8_add(&a8, &b8, &addend, bias.as_deref(), to, accumulation)
                })?;
                case.close("y", &y, tolerance(to, k, [&a, &b], bias_size + addend.size));
                return Some(());
            }
            let y = case.call("gemm_fp8", || ops::gemm_fp8(&a8, &b8, bias.as_deref(), to, accumulation))?;
            case.close("y", &y, tolerance(to, k, [&a, &b], bias_size));
        }
        _ => {
            let parts = Parts::draw(case)?;
            let y = case.call("gemm_fp8_quantize", || {
                ops::gemm_fp8_quantize(&a8, &b8, None, &parts.slot(), to, ops::Accumulation::Fast)
            })?;
            // Codes follow sums, which may be a bit apart; a scale from the tensor follows its amax.
            case.text("y", y.shape());
        }
    }
    Some(())
}

/// An operand in FP8 or in high precision.
fn operand(case: &mut Case<'_>, x: &Input, encoding: Encoding, is_fp8: bool) -> Option<Operand> {
    if is_fp8 {
        let device = case.device.clone();
        return Some(Operand::Fp8(fp8(case, x, encoding, &device)?));
    }
    Some(Operand::High(x.tensor.clone()))
}

pub(super) fn linear(case: &mut Case<'_>) -> Option<()> {
    let [m, n, k] = extents(case);
    let (kind, dtype, to) =
        (case.draw.pick(&[Kind::Tame, Kind::Special]), case.draw.dtype(), case.draw.dtype());
    let is_fp8 = case.draw.flip();
    let other_is = if case.draw.once_in(16) { !is_fp8 } else { is_fp8 };
    let x = case.tensor(&[m, k], dtype, kind)?;
    let w = case.tensor(&[n, k], dtype, kind)?;
    let dy = case.tensor(&[m, n], dtype, kind)?;
    let gradients = case.draw.encoding();
    let x8 = operand(case, &x, Encoding::E4M3, is_fp8)?;
    let w8 = operand(case, &w, Encoding::E4M3, other_is)?;
    let dy8 = operand(case, &dy, gradients, is_fp8)?;
    let [x, w, dy] = if is_fp8 { [x, w, dy].map(finite) } else { [x, w, dy] };
    if let Some(y) = case.call("fprop", || ops::fprop(&x8, &w8, None, to, ops::Accumulation::Fast)) {
        case.close("y", &y, tolerance(to, k, [&x, &w], 0.0));
    }
    let (x8, w8) = (x8.for_backward(), w8.for_backward());
    if let Some(dx) = case.call("dgrad", || ops::dgrad(&dy8, &w8, to, ops::Accumulation::Split)) {
        case.close("dx", &dx, tolerance(to, n, [&dy, &w], 0.0));
    }
    if n.checked_mul(k).is_none_or(|len| len > 1 << 16) {
        return None;
    }
    let mut dw = case.tensor(&[n, k], DType::F32, Kind::Tame)?;
    case.call("wgrad", || ops::wgrad(&dy8, &x8, &mut dw.tensor, "dw", ops::Accumulation::Split))?;
    case.close("dw", &dw.tensor, tolerance(DType::F32, m, [&dy, &x], dw.size));
    Some(())
}

/// The largest relative distance between the outputs of two backends. They round probabilities relative to different
/// maxima.
const FORWARD: f64 = 0.08;
const BACKWARD: f64 = 0.3;

pub(super) fn attention_fp8(case: &mut Case<'_>) -> Option<()> {
    let (dtype, to) = (case.draw.dtype(), case.draw.dtype());
    let device = case.device.clone();
    let options = ScoreOptions {
        causal: case.draw.flip(),
        window: (case.draw.pick(&[None, None, Some(0), Some(70)]), case.draw.pick(&[None, None, Some(1)])),
        diagonal: case.draw.pick(&[Diagonal::TopLeft, Diagonal::BottomRight]),
        softmax_scale: case.draw.pick(&[None, None, Some(0.0), Some(-0.1), Some(f32::NAN)]),
        ..Default::default()
    };
    let (groups, repeats) = (1 + case.draw.below(2), 1 + case.draw.below(3));
    let head_dim = case.draw.pick(&[1, 8, 16, 24, 32, 64, 80, 128, 130]);
    let q_shape = [case.draw.below(3), case.draw.pick(&[0, 1, 5, 16, 65]), groups * repeats, head_dim];
    let k_shape = [q_shape[0], case.draw.pick(&[0, 1, 7, 33, 70]), groups, head_dim];
    let values = [&q_shape, &k_shape, &k_shape, &q_shape].map(|shape| case.tensor(shape, dtype, Kind::Noise));
    let [q, k, v, dy] = values;
    let (q, k, v, dy) = (q?, k?, v?, dy?);
    let forward = if case.draw.once_in(16) { Encoding::E5M2 } else { Encoding::E4M3 };
    let backward = case.draw.encoding();
    let (q8, k8) = (fp8(case, &q, forward, &device)?, fp8(case, &k, Encoding::E4M3, &device)?);
    let (v8, dy8) = (fp8(case, &v, Encoding::E4M3, &device)?, fp8(case, &dy, backward, &device)?);
    let sequences = Sequences::Full;
    let (o, saved) =
        case.call("attention_fp8", || ops::attention_fp8(&q8, &k8, &v8, &sequences, options, to))?;
    case.near("o", &o, FORWARD);
    let (dq, dk, dv) = case.call("attention_fp8_backward", || {
        ops::attention_fp8_backward(&dy8, &q8, &k8, &v8, &o, &saved, &sequences, options)
    })?;
    // With one key, or a scale of 0, these are the rounding of o.
    if k_shape[1] > 1
        && options.softmax_scale != Some(0.0)
        && options.window == (None, None)
        && !options.causal
    {
        case.near("dq", &dq, BACKWARD);
        case.near("dk", &dk, BACKWARD);
    }
    case.near("dv", &dv, BACKWARD);
    Some(())
}
