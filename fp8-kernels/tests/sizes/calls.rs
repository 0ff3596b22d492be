//! Every function that takes extents or tensors, to be called with any sizes. Tensors are only made where they are small
//! or empty: what is looked for are products, allocations and loops that go by extents, not by elements.

use fp8_kernels::ops::{
    self, Activation, CrossEntropyOptions, Dropout, DropoutKey, Layout, NormOptions, Part, ScoreOptions,
    Sequences,
};
use fp8_kernels::{
    Arena, ArenaOptions, Cell, DType, Device, DropoutState, Encoding, Error, Fp8Tensor, Operand, ScalePolicy,
    ScaleRule, Shape, Slot, Tensor,
};

/// The outcome of a call.
pub(crate) enum Outcome {
    Accepted,
    Refused,
    /// Its arguments could exist, but would take long to work through.
    TooLargeToRun,
}

/// Why a call did not come to its end.
enum Stop {
    Refused,
    TooLargeToRun,
}

impl From<Error> for Stop {
    fn from(_: Error) -> Self {
        Self::Refused
    }
}

type Result<T = ()> = std::result::Result<T, Stop>;

pub(crate) struct Call {
    pub(crate) name: &'static str,
    /// The number of sizes that it takes.
    pub(crate) places: usize,
    pub(crate) run: fn(&Device, &[usize]) -> Outcome,
}

/// `calls![name/places: |device, [a, b]| body]`: the body's `?` takes refusals.
macro_rules! calls {
    ($($name:ident / $places:literal: |$device:ident, [$($size:ident),*]| $body:expr;)*) => {
        pub(crate) const CALLS: &[Call] = &[$(Call {
            name: stringify!($name),
            places: $places,
            run: |$device, sizes| {
                fn run($device: &Device, sizes: &[usize]) -> Result {
                    let &[$($size),*] = sizes else { return Err(Stop::Refused) };
                    $body;
                    Ok(())
                }
                match run($device, sizes) {
                    Ok(()) => Outcome::Accepted,
                    Err(Stop::Refused) => Outcome::Refused,
                    Err(Stop::TooLargeToRun) => Outcome::TooLargeToRun,
                }
            },
        }),*];
    };
}

/// Zeros, if they are few.
fn zeros(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    let shape = shape.into();
    if (4097..1 << 34).contains(&shape.numel()) {
        return Err(Stop::TooLargeToRun);
    }
    Ok(Tensor::zeros(shape, dtype, device)?)
}

fn floats(shape: impl Into<Shape>, device: &Device) -> Result<Tensor> {
    zeros(shape, DType::F32, device)
}

fn fp8(shape: [usize; 2], device: &Device) -> Result<Fp8Tensor> {
    let codes = zeros([shape[0], shape[1]], DType::U8, device)?;
    Ok(Fp8Tensor::from_codes(codes, shape, Encoding::E4M3, Tensor::scalar(1.0, device)?)?)
}

const RULE: ScaleRule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
const OFF: Slot<'_> = Slot::off(Encoding::E4M3);

/// Runs `f` with slots that are off, set, and not set yet.
fn slots(device: &Device, f: impl Fn(&Slot<'_>) -> Result) -> Result {
    f(&OFF)?;
    for scale in [2.0, fp8_kernels::UNSET] {
        let cell = Cell::new(scale, device)?;
        f(&Slot { columnwise: true, ..Slot::fixed(Encoding::E4M3, &cell, &RULE) })?;
    }
    Ok(())
}

calls! {
    zeros/3: |device, [a, b, c]| Tensor::zeros([a, b, c], DType::BF16, device)?;
    full/2: |device, [a, b]| Tensor::full(0.0, [a, b], DType::F32, device)?;
    from_vec/3: |device, [a, b, c]| Tensor::from_vec(Vec::<f32>::new(), [a, b, c], device)?;
    reshape/3: |device, [a, b, c]| zeros([0], DType::I32, device)?.reshape([a, b, c])?;
    shape/4: |_device, [a, b, c, d]| {
        let shape = Shape::from([a, b, c, d]);
        let _ = (shape.numel(), shape.matrix(), shape.last_dim(), shape.with_last(a));
    };
    copies/2: |device, [a, b]| {
        let (mut x, y) = (floats([a, b], device)?, floats([a, b], device)?);
        x.copy_from(&y, "x")?;
        x.write(&y.to_device(&Device::cpu())?.to_vec::<f32>()?, "x")?;
        x.set_zero("x")?;
        x.to_f32_vec()?;
    };
    from_codes/3: |device, [a, b, c]| {
        let codes = zeros([0], DType::U8, device)?;
        let x = Fp8Tensor::from_codes(codes, [a, b, c], Encoding::E5M2, Tensor::scalar(1.0, device)?)?;
        x.codes()?;
        x.dequantize(DType::BF16)?;
        x.transposed()?.with_columnwise()?.for_backward().dequantize(DType::F32)?;
    };
    split/4: |device, [a, b, c, d]| ops::split(&floats([a, b], device)?, &[c, d])?;
    concat/3: |device, [a, b, c]| {
        let (x, y) = (floats([a, b], device)?, floats([a, c], device)?);
        ops::concat(&[&x, &y, &x, &y, &x, &y, &x, &y])?;
    };
    rows/4: |device, [a, b, c, d]| ops::rows(&floats([a, b], device)?, c..d)?;
    permute/3: |device, [a, b, c]| {
        for axes in [[0, 2, 1], [2, 0, 1], [1, 0, 2], [2, 1, 0]] {
            ops::permute(&floats([a, b, c], device)?, &axes)?;
        }
    };
    transpose/3: |device, [a, b, c]| {
        for dtype in [DType::F32, DType::BF16, DType::U8] {
            ops::transpose(&zeros([a, b, c], dtype, device)?)?;
        }
    };
    cast/2: |device, [a, b]| ops::cast(&zeros([a, b], DType::F16, device)?, DType::F32)?;
    elementwise/2: |device, [a, b]| {
        let (mut x, row) = (floats([a, b], device)?, floats([b], device)?);
        ops::add(&x, &x)?;
        ops::mul(&x, &x)?;
        ops::bias(&x, &row)?;
        ops::scale(&x, 2.0)?;
        ops::scale_in_place(&mut x, 2.0, "x")?;
        ops::clip_in_place(&mut x, &Tensor::scalar(3.0, device)?, 1.0, "x")?;
        let y = floats([a, b], device)?;
        ops::accumulate(&mut x, &y, "x")?;
    };
    sums/3: |device, [a, b, c]| {
        let x = floats([a, b, c], device)?;
        ops::sum(&x)?;
        ops::amax(&x)?;
        ops::grad_norm(&[&x, &x])?;
        let _ = (ops::mean(&x), ops::max(&x));
    };
    column_sums/3: |device, [a, b, c]| {
        let (x, mut out) = (floats([a, b, c], device)?, floats([c], device)?);
        ops::column_sums(&x)?;
        ops::column_sums_into(&x, &mut ops::GradientMut::new(&mut out, "out", ops::Update::Add))?;
    };
    dropout/2: |device, [a, b]| {
        let key = DropoutKey { seed: a as u64, offset: b as u64 };
        ops::dropout(&floats([5], device)?, 0.5, key)?;
        ops::dropout(&floats([a, b], device)?, 0.5, key)?;
        let (x, half) = (floats([a, b], device)?, Dropout { p: 0.5, draw: key.into() });
        ops::dropout_add(&x, &x, Some(&half), Some(&half))?;
        ops::dropout_add_backward(&x, None, Some(&half))?;
        let state = DropoutState::new(a as u64, device)?;
        state.set(b as u64, a as u64)?;
        ops::dropout(&x, 0.5, state.draw()?.mask(b as u64))?;
    };
    gemm/3: |device, [m, n, k]| {
        let shapes = [(Layout::Nn, [m, k], [k, n]), (Layout::Nt, [m, k], [n, k]), (Layout::Tn, [k, m], [k, n])];
        for (layout, a, b) in shapes {
            let (a, b) = (floats(a, device)?, floats(b, device)?);
            for dtype in [DType::F32, DType::BF16] {
                ops::gemm(&a, &b, layout, None, dtype)?;
            }
            let mut out = floats([m, n], device)?;
            ops::gemm_accumulate(&a, &b, layout, &mut out, "out")?;
        }
    };
    gemm_of_matrices_in_a_row/4: |device, [a, b, n, k]| {
        ops::gemm(&floats([a, b, k], device)?, &floats([n, k], device)?, Layout::Nt, None, DType::F32)?;
    };
    gemm_fp8/3: |device, [m, n, k]| {
        let (a, b) = (fp8([m, k], device)?, fp8([n, k], device)?);
        ops::gemm_fp8(&a, &b, None, DType::BF16, ops::Accumulation::Fast)?;
        let mut out = floats([m, n], device)?;
        ops::gemm_fp8_accumulate(&a, &b, &mut out, "out", ops::Accumulation::Split)?;
        let fast = ops::Accumulation::Fast;
        slots(device, |slot| Ok(ops::gemm_fp8_quantize(&a, &b, None, slot, DType::BF16, fast).map(drop)?))?;
        let (a, b) = (Operand::Fp8(a), Operand::Fp8(b));
        slots(device, |slot| Ok(ops::fprop_quantize(&a, &b, None, slot, DType::BF16, fast).map(drop)?))?;
        let (dy, w) = (Operand::Fp8(fp8([m, k], device)?), Operand::Fp8(fp8([k, n], device)?));
        slots(device, |slot| Ok(ops::dgrad_quantize(&dy, &w, slot, DType::BF16, fast).map(drop)?))?;
    };
    quantize/3: |device, [a, b, c]| {
        let x = floats([a, b, c], device)?;
        slots(device, |slot| {
            ops::quantize(&x, slot)?;
            ops::quantize_dbias(&x, slot)?;
            ops::quantize_many(&[(&x, *slot), (&x, OFF)])?;
            Ok(())
        })?;
    };
    activation/3: |device, [a, b, c]| {
        let h = floats([a, b, c], device)?;
        slots(device, |slot| {
            for activation in [Activation::Gelu, Activation::Swiglu] {
                let y = ops::activation(&h, activation, slot)?;
                let dy = floats(*y.shape(), device)?;
                ops::activation_backward(&dy, &h, activation)?;
                ops::activation_backward_quantize_dbias(&dy, &h, activation, slot)?;
            }
            Ok(())
        })?;
    };
    norm/3: |device, [a, b, c]| {
        let (x, gamma, options) = (floats([a, b, c], device)?, floats([c], device)?, NormOptions::default());
        slots(device, |slot| {
            let (_, stats) = ops::norm(&x, &gamma, Some(&gamma), &options, slot)?;
            ops::norm_backward_add(&x, &x, &gamma, &stats, &options, &x)?;
            let mut gradients = [floats([c], device)?, floats([c], device)?];
            let [mut dgamma, mut dbeta] = gradients.each_mut().map(|grad| ops::GradientMut::new(grad, "w", ops::Update::Add));
            let (dgamma, dbeta) = (Some(&mut dgamma), Some(&mut dbeta));
            ops::norm_backward_into(&x, &x, &gamma, &stats, &options, None, dgamma, dbeta)?;
            Ok(())
        })?;
    };
    softmax/3: |device, [a, b, c]| {
        let x = floats([a, b, c], device)?;
        let mask = zeros([a, 1, c], DType::U8, device)?;
        let y = ops::softmax(&x, 1.0, true, Some(&mask))?;
        ops::softmax_backward(&x, &y, 1.0)?;
    };
    cross_entropy/3: |device, [a, b, c]| {
        let (x, targets) = (floats([a, b, c], device)?, zeros([a, b], DType::I32, device)?);
        let options = CrossEntropyOptions::default();
        let (_, saved) = ops::cross_entropy(&x, &targets, &options)?;
        ops::cross_entropy_backward(&x, &targets, &saved, &options, 1.0)?;
        let part = ops::cross_entropy_part(&x, &targets, Part { first: 0, total: c }, &options)?;
        let sums = ops::cross_entropy_part_sums(&part, &part.row_max)?;
        ops::cross_entropy_of_parts(&targets, &part.row_max, &sums, c, &options)?;
        device.synchronize()?;
    };
    embedding/4: |device, [a, b, c, d]| {
        let (ids, mut table) = (zeros([a, b], DType::I32, device)?, floats([c, d], device)?);
        let y = ops::embedding(&ids, &table)?;
        let dy = y.reshape(*y.shape())?;
        ops::embedding_backward(&dy, &ids, &mut table, "table")?;
        ops::embedding_part(&ids, &table, Part { first: 0, total: c })?;
        ops::embedding_part_backward(&dy, &ids, &mut table, Part { first: 0, total: c }, "table")?;
        device.synchronize()?;
    };
    kv_cache/4: |device, [a, b, c, d]| {
        let (mut cache, new) = (floats([a, b, c, d], device)?, floats([a, 1, c, d], device)?);
        let starts = zeros([a], DType::I32, device)?;
        ops::kv_cache_append(&mut cache, &new, &starts, Some(&starts), "cache")?;
        ops::kv_cache_append(&mut cache, &new, &starts, None, "cache")?;
        device.synchronize()?;
    };
    sample/3: |device, [a, b, c]| {
        let (logits, key) = (floats([a, b], device)?, DropoutKey { seed: 1, offset: c as u64 });
        for (temperature, top_k, top_p) in [(0.0, None, 1.0), (1.0, Some(c), 0.5), (1.0, None, 1.0)] {
            ops::sample(&logits, &ops::SampleOptions { temperature, top_k, top_p }, key)?;
        }
    };
    attention/4: |device, [a, b, c, d]| {
        for (q, k) in [([a, b, c, d], [a, b, c, d]), ([a, b, c, 1], [a, d, 1, 1]), ([1, a, b, c], [1, d, 1, c])] {
            let (q, k) = (floats(q, device)?, floats(k, device)?);
            let (o, saved) = ops::attention(&q, &k, &k, &Sequences::Full, ScoreOptions::default())?;
            ops::attention_backward(&o, &q, &k, &k, &o, &saved, &Sequences::Full, ScoreOptions::default())?;
            let half = Dropout { p: 0.5, draw: DropoutKey { seed: 1, offset: 2 }.into() };
            let options = ScoreOptions { dropout: Some(&half), ..Default::default() };
            let (o, saved) = ops::attention(&q, &k, &k, &Sequences::Full, options)?;
            ops::attention_backward(&o, &q, &k, &k, &o, &saved, &Sequences::Full, options)?;
        }
    };
    attention_fp8/4: |device, [a, b, c, d]| {
        let codes = |shape: [usize; 4], encoding| -> Result<Fp8Tensor> {
            let codes = zeros(shape, DType::U8, device)?;
            Ok(Fp8Tensor::from_codes(codes, shape, encoding, Tensor::scalar(1.0, device)?)?)
        };
        for (q, k) in [([a, b, c, d], [a, b, c, d]), ([a, b, c, 16], [a, d, 1, 16]), ([1, a, b, c], [1, d, 1, c])] {
            let (q, k, dy) = (codes(q, Encoding::E4M3)?, codes(k, Encoding::E4M3)?, codes(q, Encoding::E5M2)?);
            let (sequences, options) = (Sequences::Full, ScoreOptions::default());
            let (o, saved) = ops::attention_fp8(&q, &k, &k, &sequences, options, DType::BF16)?;
            ops::attention_fp8_backward(&dy, &q, &k, &k, &o, &saved, &sequences, options)?;
            let half = Dropout { p: 0.5, draw: DropoutKey { seed: 1, offset: 2 }.into() };
            let options = ScoreOptions { dropout: Some(&half), ..options };
            let (o, saved) = ops::attention_fp8(&q, &k, &k, &sequences, options, DType::BF16)?;
            ops::attention_fp8_backward(&dy, &q, &k, &k, &o, &saved, &sequences, options)?;
        }
    };
    heads/4: |device, [a, b, c, d]| {
        let (x, all) = (floats([a, b, c], device)?, Sequences::Full);
        let options = ScoreOptions::default();
        let heads = [ops::Heads::new(&x, d, 1, c), ops::Heads::new(&x, 0, d, 1), ops::Heads::new(&x, 1, d, 2)];
        for q in heads.into_iter().chain([Ok((&x.reshape([a, b, c, 1])?).into())]).flatten() {
            let (o, saved) = ops::attention(q, q, q, &all, options)?;
            for layout in [ops::GradLayout::Separate, ops::GradLayout::Kv, ops::GradLayout::Qkv] {
                ops::attention_backward_to(&o, q, q, q, &o, &saved, &all, options, layout)?;
            }
            saved.log_sum_exp()?;
        }
        let packed = floats([a, b, d.saturating_add(2)], device)?;
        let [q, k, v] = ops::Heads::qkv(&packed, d, 1, 1)?;
        ops::attention(q, k, v, &all, options)?;
    };
    rope_in_place/4: |device, [a, b, c, d]| {
        let table = ops::RopeTable::new(4, 2, 1e4, device)?;
        ops::rope_in_place(&mut floats([a, b, c], device)?, d, &table, 0, "x")?;
        ops::rope_backward_in_place(&mut floats([a, b, c, 2], device)?, d, &table, 0, "x")?;
        device.synchronize()?;
    };
    rope_table/2: |device, [a, b]| ops::RopeTable::new(a, b.saturating_mul(2), 1e4, device)?;
    rope/4: |device, [a, b, c, d]| {
        let table = ops::RopeTable::new(4, 2, 1e4, device)?;
        ops::rope_backward(&floats([a, b, c, 2], device)?, &table, d)?;
    };
    adamw/2: |device, [a, b]| {
        let (mut param, grad) = (floats([a, b], device)?, floats([a, b], device)?);
        let (mut m, mut v) = (floats([a, b], device)?, floats([a, b], device)?);
        let step = ops::AdamWStep { step: a as u64, ..Default::default() };
        ops::adamw(&mut param, &grad, &mut m, &mut v, None, &step, "w")?;
    };
    optimizer/2: |device, [a, b]| {
        let (mut param, grad) = (floats([a, b], device)?, floats([a, b], device)?);
        let (mut m, mut v) = (Tensor::zeros([a, b], DType::U8, device)?, floats([a, b], device)?);
        let mut scales = Tensor::zeros(ops::moment_scales(param.shape()), DType::F32, device)?;
        let factors = ops::AdamWFactors::new(&ops::AdamWStep::default(), device)?;
        let tensor = ops::OptimizerTensor {
            name: "w",
            param: &mut param,
            main_grad: &grad,
            exp_avg: ops::Moment { values: &mut m, scale_inv: Some(&mut scales) },
            rule: ops::UpdateRule::AdamW { exp_avg_sq: ops::Moment { values: &mut v, scale_inv: None } },
            main_param: None,
            slot: None,
            is_rounded_stochastically: false,
            seed: a as u64,
        };
        ops::optimizer_step(&mut [(&mut [tensor], &factors)], ops::StepCheck::Never)?;
    };
    arena/2: |device, [a, b]| {
        if a == 1 && b == 1 << 32 {
            return Err(Stop::TooLargeToRun);
        }
        let mut arena = Arena::new(a, ArenaOptions { history_len: b, ..ArenaOptions::default() }, device)?;
        let rule = ops::ScaleUpdate { amax: ops::AmaxRule::Max, rule: &RULE, interval: 1, record_non_finite: false };
        ops::update_scales(&mut arena, &rule)?;
    };
    slots_of_an_arena/1: |device, [a]| {
        let mut arena = Arena::new(2, ArenaOptions { history_len: 3, ..ArenaOptions::default() }, device)?;
        let _ = (arena.staging(a), arena.scale(a), arena.counters(a));
        arena.set_updates(a as u64);
        let rule = ops::ScaleUpdate { amax: ops::AmaxRule::Max, rule: &RULE, interval: 2, record_non_finite: false };
        ops::update_scales(&mut arena, &rule)?;
        arena.set_window(a, &[1.0, 2.0, 3.0, 4.0])?;
        arena.window(a)?;
        arena.newest(a)?;
        arena.skipped_non_finite(a)?;
    };
}
