//! No operation takes tensors of two devices: it says so before it reads anything, whichever operand is elsewhere.

#![cfg(feature = "cuda")]

mod cuda;

use cuda::Rig;
use fp8_kernels::ops::{
    self, Accumulation, Activation, AdamWFactors, AdamWStep, AdamWTensor, Layout, Moment, Norm,
    OptimizerTensor, StepCheck, UpdateRule,
};
use fp8_kernels::{
    Arena, ArenaOptions, Cell, Counters, DType, Device, DropoutState, Encoding, Error, Fp8Tensor, Operand,
    Result, Scale, ScalePolicy, ScaleRule, Slot, Tensor,
};
use ops::{
    AttentionSaved, CrossEntropyOptions, CrossEntropyPart, CrossEntropySaved, GradientMut, LossScale,
    LossScaleState, NormOptions, NormStats, Part, ScoreOptions, Sequences,
};

const RULE: ScaleRule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
const PART: Part = Part { first: 0, total: 8 };
const OFF: Slot<'_> = Slot::off(Encoding::E4M3);

/// A call whose operands are on the devices given for each.
struct Call {
    name: &'static str,
    operands: usize,
    run: fn(&[&Device]) -> Result<()>,
}

/// `calls![name(operand, …): body]`: each operand is a device.
macro_rules! calls {
    ($($name:ident($($operand:ident),*): $body:expr;)*) => {
        const CALLS: &[Call] = &[$(Call {
            name: stringify!($name),
            operands: [$(stringify!($operand)),*].len(),
            run: |devices| {
                let &[$($operand),*] = devices else { unreachable!("as many devices as operands") };
                $body;
                Ok(())
            },
        }),*];
    };
}

fn floats<const N: usize>(shape: [usize; N], device: &Device) -> Result<Tensor> {
    Tensor::full(1.0, shape, DType::F32, device)
}

fn ints<const N: usize>(shape: [usize; N], device: &Device) -> Result<Tensor> {
    Tensor::zeros(shape, DType::I32, device)
}

fn codes(device: &Device) -> Result<Fp8Tensor> {
    let codes = Tensor::zeros([16, 16], DType::U8, device)?;
    Fp8Tensor::from_codes(codes, [16, 16], Encoding::E4M3, floats([1], device)?)
}

/// Codes of attention: `[batch, seq, heads, head_dim]` = `[1, 4, 1, 16]`.
fn heads(device: &Device) -> Result<Fp8Tensor> {
    let codes = Tensor::zeros([1, 4, 1, 16], DType::U8, device)?;
    Fp8Tensor::from_codes(codes, [1, 4, 1, 16], Encoding::E4M3, floats([1], device)?)
}

fn loss_scale(device: &Device) -> Result<LossScale> {
    LossScale::new(&LossScaleState::default(), device)
}

/// Runs `f` with a slot whose scale, amax and counters are on these devices.
fn slot<T>([scale, amax, counters]: [&Device; 3], f: impl FnOnce(&Slot<'_>) -> Result<T>) -> Result<T> {
    let (scale, amax, counters) = (Cell::new(2.0, scale)?, Cell::new(-1.0, amax)?, Counters::new(counters)?);
    f(&Slot {
        encoding: Encoding::E4M3,
        scale: Scale::Cell { cell: &scale, first: &RULE, keep: false },
        amax: Some(&amax),
        counters: Some(&counters),
        columnwise: true,
    })
}

calls! {
    from_codes(c, scale_inv): {
        let codes = Tensor::zeros([4, 4], DType::U8, c)?;
        Fp8Tensor::from_codes(codes, [4, 4], Encoding::E4M3, floats([1], scale_inv)?)?
    };
    copy_from(to, from): floats([3], to)?.copy_from(&floats([3], from)?, "to")?;
    accumulate(out, x): ops::accumulate(&mut floats([3], out)?, &floats([3], x)?, "out")?;
    add(a, b): ops::add(&floats([3], a)?, &floats([3], b)?)?;
    mul(a, b): ops::mul(&floats([3], a)?, &floats([3], b)?)?;
    apply_loss_scale(x, scale): ops::apply_loss_scale(&floats([3], x)?, &loss_scale(scale)?)?;
    undo_loss_scale(x, scale): ops::undo_loss_scale(&mut floats([3], x)?, &loss_scale(scale)?, "x")?;
    check_finite(norm, overflow): ops::check_finite(&floats([1], norm)?, &Cell::new(0.0, overflow)?)?;
    check_amaxes(arena, overflow): {
        ops::check_amaxes(&Arena::new(2, ArenaOptions::default(), arena)?, &Cell::new(0.0, overflow)?)?
    };
    dropout_add(residual, x): ops::dropout_add(&floats([3], residual)?, &floats([3], x)?, None, None)?;
    dropout(x, draw): ops::dropout(&floats([3], x)?, 0.5, DropoutState::new(1, draw)?.draw()?)?;
    sample(logits, draw): {
        ops::sample(&floats([2, 3], logits)?, &Default::default(), DropoutState::new(1, draw)?.draw()?)?
    };
    bias(x, b): ops::bias(&floats([2, 3], x)?, &floats([3], b)?)?;
    clip_in_place(x, norm): ops::clip_in_place(&mut floats([3], x)?, &floats([1], norm)?, 1.0, "x")?;
    grad_norm(a, b, c): ops::grad_norm(&[&floats([3], a)?, &floats([3], b)?, &floats([3], c)?])?;
    concat(a, b, c): ops::concat(&[&floats([2, 3], a)?, &floats([2, 3], b)?, &floats([2, 3], c)?])?;
    gemm(a, b, row): ops::gemm(&floats([2, 3], a)?, &floats([4, 3], b)?, Layout::Nt, Some(&floats([4], row)?), DType::F32)?;
    gemm_accumulate(a, b, out): {
        let mut out = floats([2, 4], out)?;
        ops::gemm_accumulate(&floats([2, 3], a)?, &floats([4, 3], b)?, Layout::Nt, &mut out, "out")?;
    };
    gemm_fp8(a, b, row): ops::gemm_fp8(&codes(a)?, &codes(b)?, Some(&floats([16], row)?), DType::F32, Accumulation::Fast)?;
    gemm_fp8_accumulate(a, b, out): ops::gemm_fp8_accumulate(&codes(a)?, &codes(b)?, &mut floats([16, 16], out)?, "out", ops::Accumulation::Split)?;
    gemm_fp8_quantize(a, b, row, scale, amax, counters): {
        let (a, b, row) = (codes(a)?, codes(b)?, floats([16], row)?);
        slot([scale, amax, counters], |slot| ops::gemm_fp8_quantize(&a, &b, Some(&row), slot, DType::BF16, Accumulation::Fast))?
    };
    fprop_quantize(x, w, scale, amax, counters): {
        let (x, w) = (Operand::Fp8(codes(x)?), Operand::Fp8(codes(w)?));
        slot([scale, amax, counters], |slot| ops::fprop_quantize(&x, &w, None, slot, DType::BF16, Accumulation::Fast))?
    };
    dgrad_quantize(dy, w, scale, amax, counters): {
        let (dy, w) = (Operand::Fp8(codes(dy)?), Operand::Fp8(codes(w)?));
        slot([scale, amax, counters], |slot| ops::dgrad_quantize(&dy, &w, slot, DType::BF16, Accumulation::Split))?
    };
    fprop(x, w): ops::fprop(&Operand::Fp8(codes(x)?), &Operand::Fp8(codes(w)?), None, DType::F32, ops::Accumulation::Fast)?;
    dgrad(dy, w): ops::dgrad(&Operand::Fp8(codes(dy)?), &Operand::Fp8(codes(w)?), DType::F32, ops::Accumulation::Split)?;
    wgrad(dy, x, dw): ops::wgrad(&Operand::Fp8(codes(dy)?), &Operand::Fp8(codes(x)?), &mut floats([16, 16], dw)?, "dw", ops::Accumulation::Split)?;
    quantize(x, scale, amax, counters): {
        slot([scale, amax, counters], |slot| ops::quantize(&floats([4, 4], x)?, slot))?
    };
    quantize_dbias(x, scale, amax, counters): {
        slot([scale, amax, counters], |slot| ops::quantize_dbias(&floats([4, 4], x)?, slot))?
    };
    quantize_many(x, y, scale, amax, counters): {
        let (x, y) = (floats([4, 4], x)?, floats([4, 4], y)?);
        slot([scale, amax, counters], |slot| ops::quantize_many(&[(&x, OFF), (&y, *slot)]))?
    };
    activation(h, scale, amax, counters): {
        let h = floats([4, 4], h)?;
        slot([scale, amax, counters], |slot| ops::activation(&h, Activation::Swiglu, slot))?
    };
    activation_backward(dy, h): ops::activation_backward(&floats([4, 4], dy)?, &floats([4, 4], h)?, Activation::Gelu)?;
    activation_backward_quantize_dbias(dy, h, scale, amax, counters): {
        let (dy, h, gelu) = (floats([4, 4], dy)?, floats([4, 4], h)?, Activation::Gelu);
        slot([scale, amax, counters], |slot| ops::activation_backward_quantize_dbias(&dy, &h, gelu, slot))?
    };
    norm(x, gamma, beta, scale, amax, counters): {
        let (x, gamma, beta) = (floats([4, 4], x)?, floats([4], gamma)?, floats([4], beta)?);
        slot([scale, amax, counters], |slot| ops::norm(&x, &gamma, Some(&beta), &NormOptions::default(), slot))?
    };
    norm_backward(dy, x, gamma, mean, rsigma): {
        let stats = NormStats { mean: Some(floats([4], mean)?), rsigma: floats([4], rsigma)? };
        let (dy, x, gamma) = (floats([4, 4], dy)?, floats([4, 4], x)?, floats([4], gamma)?);
        ops::norm_backward(&dy, &x, &gamma, &stats, &NormOptions::default())?
    };
    norm_backward_into(dy, x, gamma, rsigma, residual, dgamma, dbeta): {
        let stats = NormStats { mean: Some(floats([4], rsigma)?), rsigma: floats([4], rsigma)? };
        let (dy, x, gamma) = (floats([4, 4], dy)?, floats([4, 4], x)?, floats([4], gamma)?);
        let (mut dgamma, mut dbeta) = (floats([4], dgamma)?, floats([4], dbeta)?);
        let [mut dgamma, mut dbeta] = [&mut dgamma, &mut dbeta].map(|grad| GradientMut::new(grad, "w", ops::Update::Add));
        let (options, residual) = (NormOptions::default(), floats([4, 4], residual)?);
        ops::norm_backward_into(
            &dy, &x, &gamma, &stats, &options, Some(&residual), Some(&mut dgamma), Some(&mut dbeta),
        )?
    };
    column_sums_into(x, out): {
        ops::column_sums_into(&floats([4, 4], x)?, &mut GradientMut::new(&mut floats([4], out)?, "w", ops::Update::Add))?
    };
    quantize_dbias_into(x, out, scale, amax, counters): {
        let (x, mut out) = (floats([4, 4], x)?, floats([4], out)?);
        let mut out = GradientMut::new(&mut out, "w", ops::Update::Add);
        slot([scale, amax, counters], |slot| ops::quantize_dbias_into(&x, slot, &mut out))?
    };
    activation_backward_quantize_dbias_into(dy, h, out, scale, amax, counters): {
        let (dy, h, mut out) = (floats([4, 4], dy)?, floats([4, 4], h)?, floats([4], out)?);
        let (mut out, relu) = (GradientMut::new(&mut out, "w", ops::Update::Add), ops::Activation::Relu);
        slot([scale, amax, counters], |slot| {
            ops::activation_backward_quantize_dbias_into(&dy, &h, relu, slot, &mut out)
        })?
    };
    norm_backward_add(dy, x, gamma, rsigma, residual): {
        let stats = NormStats { mean: None, rsigma: floats([4], rsigma)? };
        let (dy, x, gamma) = (floats([4, 4], dy)?, floats([4, 4], x)?, floats([4], gamma)?);
        let options = NormOptions { normalization: Norm::RmsNorm, ..NormOptions::default() };
        ops::norm_backward_add(&dy, &x, &gamma, &stats, &options, &floats([4, 4], residual)?)?
    };
    softmax(x, mask): {
        let mask = Tensor::zeros([4, 4], DType::U8, mask)?;
        ops::softmax(&floats([4, 4], x)?, 1.0, false, Some(&mask))?
    };
    softmax_backward(dy, y): ops::softmax_backward(&floats([4, 4], dy)?, &floats([4, 4], y)?, 1.0)?;
    cross_entropy(logits, targets): {
        ops::cross_entropy(&floats([4, 4], logits)?, &ints([4], targets)?, &CrossEntropyOptions::default())?
    };
    cross_entropy_backward(logits, targets, row_max, row_sum, count): {
        let (row_max, row_sum) = (floats([4], row_max)?, floats([4], row_sum)?);
        let saved = CrossEntropySaved { row_max, row_sum, count: ints([], count)? };
        let (logits, targets) = (floats([4, 4], logits)?, ints([4], targets)?);
        ops::cross_entropy_backward(&logits, &targets, &saved, &CrossEntropyOptions::default(), 1.0)?
    };
    cross_entropy_backward_scaled(logits, targets, row_max, row_sum, count, scale): {
        let (row_max, row_sum) = (floats([4], row_max)?, floats([4], row_sum)?);
        let saved = CrossEntropySaved { row_max, row_sum, count: ints([], count)? };
        let (logits, targets) = (floats([4, 4], logits)?, ints([4], targets)?);
        let options = CrossEntropyOptions::default();
        ops::cross_entropy_backward_scaled(&logits, &targets, &saved, &options, &loss_scale(scale)?)?
    };
    cross_entropy_part(logits, targets): {
        let (logits, targets) = (floats([4, 4], logits)?, ints([4], targets)?);
        ops::cross_entropy_part(&logits, &targets, PART, &CrossEntropyOptions::default())?
    };
    cross_entropy_part_sums(own_max, own_sums, row_max): {
        let part = CrossEntropyPart { row_max: floats([4], own_max)?, sums: floats([2, 4], own_sums)? };
        ops::cross_entropy_part_sums(&part, &floats([4], row_max)?)?
    };
    cross_entropy_of_parts(targets, row_max, sums): {
        let (targets, row_max, sums) = (ints([4], targets)?, floats([4], row_max)?, floats([2, 4], sums)?);
        ops::cross_entropy_of_parts(&targets, &row_max, &sums, 8, &CrossEntropyOptions::default())?
    };
    cross_entropy_part_backward(logits, targets, row_max, row_sum, count): {
        let (row_max, row_sum) = (floats([4], row_max)?, floats([4], row_sum)?);
        let saved = CrossEntropySaved { row_max, row_sum, count: ints([], count)? };
        let (logits, targets) = (floats([4, 4], logits)?, ints([4], targets)?);
        ops::cross_entropy_part_backward(&logits, &targets, PART, &saved, &CrossEntropyOptions::default(), 1.0)?
    };
    cross_entropy_part_backward_scaled(logits, targets, row_max, row_sum, count, scale): {
        let (row_max, row_sum) = (floats([4], row_max)?, floats([4], row_sum)?);
        let saved = CrossEntropySaved { row_max, row_sum, count: ints([], count)? };
        let (logits, targets) = (floats([4, 4], logits)?, ints([4], targets)?);
        let (options, scale) = (CrossEntropyOptions::default(), loss_scale(scale)?);
        ops::cross_entropy_part_backward_scaled(&logits, &targets, PART, &saved, &options, &scale)?
    };
    embedding(ids, table): ops::embedding(&ints([3], ids)?, &floats([4, 2], table)?)?;
    embedding_backward(dy, ids, table): {
        ops::embedding_backward(&floats([3, 2], dy)?, &ints([3], ids)?, &mut floats([4, 2], table)?, "table")?
    };
    embedding_part(ids, table): {
        ops::embedding_part(&ints([3], ids)?, &floats([4, 2], table)?, PART)?
    };
    embedding_part_backward(dy, ids, table): {
        let (dy, ids) = (floats([3, 2], dy)?, ints([3], ids)?);
        ops::embedding_part_backward(&dy, &ids, &mut floats([4, 2], table)?, PART, "table")?
    };
    kv_cache_append(cache, new, starts, lengths): {
        let (mut cache, new) = (floats([2, 4, 1, 4], cache)?, floats([2, 1, 1, 4], new)?);
        ops::kv_cache_append(&mut cache, &new, &ints([2], starts)?, Some(&ints([2], lengths)?), "cache")?
    };
    attention(q, k, v, lengths): {
        let [q, k, v] = [floats([1, 4, 1, 4], q)?, floats([1, 4, 1, 4], k)?, floats([1, 4, 1, 4], v)?];
        ops::attention(&q, &k, &v, &Sequences::padded(&ints([1], lengths)?), ScoreOptions::default())?
    };
    attention_backward(dy, q, k, v, o, row_max, row_sum, lengths): {
        let make = |device| floats([1, 4, 1, 4], device);
        let saved = AttentionSaved {
            row_max: floats([1, 1, 4], row_max)?,
            row_sum: Some(floats([1, 1, 4], row_sum)?),
        };
        let (lengths, options) = (Sequences::padded(&ints([1], lengths)?), ScoreOptions::default());
        ops::attention_backward(&make(dy)?, &make(q)?, &make(k)?, &make(v)?, &make(o)?, &saved, &lengths, options)?
    };
    attention_fp8(q, k, v, lengths): {
        let (lengths, options) = (Sequences::padded(&ints([1], lengths)?), ScoreOptions::default());
        ops::attention_fp8(&heads(q)?, &heads(k)?, &heads(v)?, &lengths, options, DType::F32)?
    };
    attention_fp8_backward(dy, q, k, v, o, row_max, row_sum, lengths): {
        let saved = AttentionSaved {
            row_max: floats([1, 1, 4], row_max)?,
            row_sum: Some(floats([1, 1, 4], row_sum)?),
        };
        let (lengths, options) = (Sequences::padded(&ints([1], lengths)?), ScoreOptions::default());
        let ([dy, q, k, v], o) = ([heads(dy)?, heads(q)?, heads(k)?, heads(v)?], floats([1, 4, 1, 16], o)?);
        ops::attention_fp8_backward(&dy, &q, &k, &v, &o, &saved, &lengths, options)?
    };
    log_sum_exp(row_max, row_sum): {
        let row_sum = Some(floats([1, 1, 4], row_sum)?);
        AttentionSaved { row_max: floats([1, 1, 4], row_max)?, row_sum }.log_sum_exp()?
    };
    rope_in_place(x, table): {
        let table = ops::RopeTable::new(4, 4, 1e4, table)?;
        let mut x = floats([1, 4, 6], x)?;
        ops::rope_in_place(&mut x, 1, &table, 0, "x")?;
        ops::rope_backward_in_place(&mut x, 1, &table, 0, "x")?
    };
    rope(x, table): {
        let table = ops::RopeTable::new(4, 4, 1e4, table)?;
        let y = ops::rope(&floats([1, 4, 1, 4], x)?, &table, 0)?;
        ops::rope_backward(&y, &table, 0)?
    };
    adamw(param, grad, m, v, main): {
        let (mut param, grad) = (Tensor::zeros([4], DType::BF16, param)?, floats([4], grad)?);
        let (mut m, mut v, mut main) = (floats([4], m)?, floats([4], v)?, floats([4], main)?);
        ops::adamw(&mut param, &grad, &mut m, &mut v, Some(&mut main), &AdamWStep::default(), "w")?
    };
    adamw_many(a, b): {
        let make = |device| floats([4], device);
        let [(mut p, g, mut m, mut v), (mut p2, g2, mut m2, mut v2)] =
            [(make(a)?, make(a)?, make(a)?, make(a)?), (make(b)?, make(b)?, make(b)?, make(b)?)];
        let mut all = [("a", &mut p, &g, &mut m, &mut v), ("b", &mut p2, &g2, &mut m2, &mut v2)]
            .map(|(name, param, main_grad, exp_avg, exp_avg_sq)| AdamWTensor {
                name, param, main_grad, exp_avg, exp_avg_sq, main_param: None, slot: None,
            });
        ops::adamw_many(&mut all, &AdamWStep::default())?
    };
    adamw_groups(a, b, scale, amax, counters, factors): {
        let make = |device| floats([4, 4], device);
        let factors = AdamWFactors::new(&AdamWStep::default(), factors)?;
        let [(mut p, g, mut m, mut v), (mut p2, g2, mut m2, mut v2)] =
            [(make(a)?, make(a)?, make(a)?, make(a)?), (make(b)?, make(b)?, make(b)?, make(b)?)];
        slot([scale, amax, counters], |slot| {
            let [first, second] = [("a", &mut p, &g, &mut m, &mut v, None), ("b", &mut p2, &g2, &mut m2, &mut v2, Some(*slot))]
                .map(|(name, param, main_grad, exp_avg, exp_avg_sq, slot)| AdamWTensor {
                    name, param, main_grad, exp_avg, exp_avg_sq, main_param: None, slot,
                });
            ops::adamw_groups(&mut [(&mut [first, second], &factors)], None)
        })?
    };
    optimizer_step(param, grad, m, v, m_scale, v_scale, main, factors): {
        let codes = |device| Tensor::zeros([4], DType::U8, device);
        let (mut param, grad, mut main) = (floats([4], param)?, floats([4], grad)?, floats([4], main)?);
        let (mut m, mut v) = (codes(m)?, codes(v)?);
        let (mut m_scale, mut v_scale) = (floats([1, 1], m_scale)?, floats([1, 1], v_scale)?);
        let factors = AdamWFactors::new(&AdamWStep::default(), factors)?;
        let tensor = OptimizerTensor {
            name: "w",
            param: &mut param,
            main_grad: &grad,
            exp_avg: Moment { values: &mut m, scale_inv: Some(&mut m_scale) },
            rule: UpdateRule::AdamW { exp_avg_sq: Moment { values: &mut v, scale_inv: Some(&mut v_scale) } },
            main_param: Some(&mut main),
            slot: None,
            is_rounded_stochastically: false,
            seed: 1,
        };
        ops::optimizer_step(&mut [(&mut [tensor], &factors)], StepCheck::Never)?
    };
}

#[test]
fn an_operand_on_another_device_is_refused() {
    let rig = Rig::new();
    let (cpu, gpu, other) = (Device::cpu(), rig.open(), rig.open());
    let mut wrong = Vec::new();
    for (home, away) in [(&cpu, &gpu), (&gpu, &cpu), (&gpu, &other), (&other, &gpu)] {
        for Call { name, operands, run } in CALLS {
            if let Err(error) = run(&vec![home; *operands]) {
                wrong.push(format!("{name} on {home}: {error}"));
            }
            for operand in 0..*operands {
                let mut devices = vec![home; *operands];
                devices[operand] = away;
                match run(&devices) {
                    Err(Error::Devices { .. }) => {}
                    result => {
                        wrong.push(format!("{name}, operand {operand} on {away}, not {home}: {result:?}"))
                    }
                }
            }
        }
    }
    assert_eq!(wrong, Vec::<String>::new());
    for device in [&gpu, &other] {
        device.synchronize().unwrap();
    }
    drop((gpu, other));
    rig.finish();
}
