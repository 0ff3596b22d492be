//! The exact messages of operations that refuse their arguments.

#![expect(clippy::unwrap_used, reason = "a call that is not refused is a failed test")]

use fp8_kernels::fp8_format::Blocks;
use fp8_kernels::fp8_format::slice::BlockScaling;
use fp8_kernels::ops::{self, Activation, AdamWFactors, AdamWStep, DropoutKey, Layout, Norm};
use fp8_kernels::{
    Arena, ArenaOptions, BlockRule, DType, Device, DropoutDraw, Encoding, Fp8Tensor, Operand, Result, Scale,
    ScalePolicy, ScaleRule, Shape, Slot, Tensor, UpdateClock,
};
use ops::{
    AttentionSaved, CrossEntropyOptions, CrossEntropySaved, GradLayout, Heads, NormOptions, NormStats,
    ScoreOptions, Sequences,
};

const OFF: Slot<'_> = Slot::off(Encoding::E4M3);

fn floats(shape: impl Into<Shape>) -> Tensor {
    Tensor::full(1.0, shape, DType::F32, &Device::cpu()).unwrap()
}

fn ints(shape: impl Into<Shape>) -> Tensor {
    Tensor::zeros(shape, DType::I32, &Device::cpu()).unwrap()
}

/// Each call fails with this text.
macro_rules! refused {
    ($($call:expr => $text:expr;)*) => {$(
        assert_eq!($call.map(drop).unwrap_err().to_string(), $text);
    )*};
}

#[test]
fn tensors() {
    let x = floats([2, 3]);
    refused! {
        Tensor::from_vec(vec![1.0_f32; 5], [2, 3], &Device::cpu()) =>
            "from_vec: 5 elements do not fill shape [2, 3], which has 6";
        x.reshape([4]) => "reshape: 6 elements do not fill shape [4], which has 4";
        x.item() => "item: shape [2, 3]: item reads a tensor of one element; use to_vec";
        floats([2, 3]).copy_from(&floats([3, 2]), "x") =>
            "copy_from: the tensor and its new elements: got [2, 3] and [3, 2]: both must have one shape";
        floats([2]).copy_from(&ints([2]), "x") => "copy_from: the new elements has dtype i32: expected f32";
        Device::from_name("gpu") => "device: name = gpu: expected cpu or cuda:N, for example cuda:0";
        Device::cpu().capture(|| Ok::<_, fp8_kernels::Error>(())) =>
            "capture: not supported on cpu: call the step itself: the CPU has no launches to save";
        "f64".parse::<DType>() => "dtype: name = f64: expected f32, bf16, f16, i32 or u8";
    }
}

#[test]
fn codes_of_the_transpose() {
    let codes = Tensor::from_vec(vec![0x38u8; 4], [2, 2], &Device::cpu()).unwrap();
    let factors = floats([2, 1]);
    let x = Fp8Tensor::from_blocks(codes, [2, 2], Encoding::E4M3, Blocks::Row, factors).unwrap();
    let with = |encoding, blocks| {
        let rule = BlockRule::F32(BlockScaling::new(blocks));
        Slot { scale: Scale::Blocks(rule), ..Slot::off(encoding) }
    };
    let rows = |encoding| with(encoding, Blocks::Row);
    refused! {
        x.clone().quantize_columnwise(&OFF) =>
            "quantize_columnwise: slot = E4M3 without blocks: expected E4M3 with Row, as the codes are";
        x.clone().quantize_columnwise(&rows(Encoding::E5M2)) =>
            "quantize_columnwise: slot = E5M2 with Row: expected E4M3 with Row, as the codes are";
        x.clone().quantize_columnwise(&with(Encoding::E4M3, Blocks::B1x128)) =>
            "quantize_columnwise: slot = E4M3 with B1x128: expected E4M3 with Row, as the codes are";
    }
    assert!(x.quantize_columnwise(&rows(Encoding::E4M3)).unwrap().columnwise().is_some());
}

/// In other words than the table of all operands' devices, which looks at the kind of error.
#[cfg(feature = "cuda")]
#[test]
fn operands_on_two_devices() {
    let options = fp8_kernels::CudaOptions {
        library: Some(fp8_cuda_sim::library_path().unwrap()),
        ..fp8_kernels::CudaOptions::default()
    };
    let [gpu, other] = [(); 2].map(|()| Device::cuda_with_options(&options).unwrap());
    let x = floats([2]);
    let [on_gpu, on_other] = [&gpu, &other].map(|device| x.to_device(device).unwrap());
    refused! {
        ops::add(&x, &on_gpu) => "add: arguments are on cpu and cuda:0: move them to one device first";
        ops::add(&on_gpu, &on_other) =>
            "add: arguments are on cuda:0 and another device opened on cuda:0: move them to one device first";
    }
}

#[test]
fn arenas() -> Result<()> {
    let device = Device::cpu();
    let clock = UpdateClock::new(2, &device)?;
    let mut arena = Arena::new(2, ArenaOptions::default(), &device)?;
    refused! {
        arena.set_window(2, &[1.0]) => "set_window: slot = 2: this arena has 2 slots, numbered from 0";
        arena.set_last_updates(&[1]) => "set_last_updates: 1 elements do not fill shape [2], which has 2";
        clock.set(&[1, 2, 3]) => "update clock: 3 elements do not fill shape [2], which has 2";
        UpdateClock::new(usize::MAX, &device) =>
            format!("update clock: slots = {}: expected at most what fits into memory", usize::MAX);
        Arena::new(2, ArenaOptions { history_len: 0, ..ArenaOptions::default() }, &device) =>
            "arena: amax_history_len = 0: expected at least 1, and at most what fits into memory for 2 slots";
    }
    Ok(())
}

#[test]
fn activations_and_dropout() {
    let (h, key) = (floats([2, 4]), ops::DropoutKey { seed: 1, offset: 0 });
    refused! {
        ops::activation_backward(&floats([2, 3]), &h, Activation::Gelu) =>
            "activation_backward: dy and the output: got [2, 3] and [2, 4]: dy must have the activation's output shape";
        ops::dropout(&h, 1.0, key) => "dropout: p = 1: a drop probability is at least 0 and less than 1";
        ops::dropout_backward(&h, -0.5, key) =>
            "dropout_backward: p = -0.5: a drop probability is at least 0 and less than 1";
    }
}

#[test]
fn products() {
    let (a, b) = (floats([2, 3]), floats([4, 3]));
    refused! {
        ops::gemm(&a, &b, Layout::Nn, None, DType::F32) =>
            "gemm: a and b: got [2, 3] and [4, 3]: a · b needs a's last dimension to equal b's first";
        ops::gemm(&a, &floats([4, 2]), Layout::Nt, None, DType::F32) =>
            "gemm: a and b: got [2, 3] and [4, 2]: a · bᵀ needs equal last dimensions";
        ops::gemm(&a, &b, Layout::Tn, None, DType::F32) =>
            "gemm: a and b: got [2, 3] and [4, 3]: aᵀ · b needs equal first dimensions";
        ops::gemm_accumulate(&a, &b, Layout::Nt, &mut floats([4, 2]), "dw") =>
            "gemm_accumulate: out and the product: got [4, 2] and [2, 4]: out must have the product's shape";
        ops::fprop(&Operand::High(a), &Operand::Fp8(ops_codes()), None, DType::F32, ops::Accumulation::Fast) =>
            "fprop: one operand is FP8 and the other f32: quantize both or neither";
    }
}

fn ops_codes() -> fp8_kernels::Fp8Tensor {
    let codes = Tensor::zeros([16, 16], DType::U8, &Device::cpu()).unwrap();
    fp8_kernels::Fp8Tensor::from_codes(codes, [16, 16], Encoding::E4M3, floats([1])).unwrap()
}

#[test]
fn attention() {
    let x = |shape: [usize; 4]| floats(shape);
    let (q, k) = (x([1, 4, 2, 4]), x([1, 4, 2, 4]));
    let options = ScoreOptions::default();
    let forward = |k: &Tensor, lengths: Option<&Tensor>, options| {
        let sequences = lengths.map_or(Sequences::Full, Sequences::padded);
        ops::attention(&q, k, k, &sequences, options)
    };
    let backward = |row_max: Tensor, row_sum: Tensor| {
        let saved = AttentionSaved { row_max, row_sum: Some(row_sum) };
        ops::attention_backward(&q, &q, &k, &k, &q, &saved, &Sequences::Full, options)
    };
    refused! {
        forward(&x([1, 4, 2, 8]), None, options) =>
            "attention: q and k: got [1, 4, 2, 4] and [1, 4, 2, 8]: both need the same batch and head_dim, \
             [batch, sequence, heads, head_dim]";
        forward(&x([1, 4, 3, 4]), None, options) =>
            "attention: q and k: got [1, 4, 2, 4] and [1, 4, 3, 4]: the number of groups (k's third dimension) must \
             divide the number of heads (q's)";
        forward(&k, Some(&ints([2])), options) =>
            "attention: key_lengths and the batch: got [2] and [1]: give one length per batch entry";
        forward(&k, None, ScoreOptions { softmax_scale: Some(f32::NAN), ..options }) =>
            "attention: softmax_scale = NaN: give a finite number, or None for 1/sqrt(head_dim)";
        backward(floats([1, 2, 4]), floats([1, 2, 3])) =>
            "attention_backward: the saved rows and [batch, heads, queries]: got [1, 2, 3] and [1, 2, 4]: pass what \
             attention returned with o";
    }
    // Heads of larger tensors.
    let (qkv, wider) = (floats([1, 4, 24]), floats([1, 4, 26]));
    let parts = |x: &Tensor, first| Heads::new(x, first, 2, 4).map(|heads| heads.shape().to_vec());
    let mixed = || {
        let [q, k, _] = Heads::qkv(&qkv, 2, 2, 4)?;
        ops::attention(q, k, Heads::new(&wider, 0, 2, 4)?, &Sequences::Full, options)
    };
    let together = || {
        let (short, saved) = (x([1, 3, 2, 4]), AttentionSaved::from_log_sum_exp(floats([1, 2, 3])));
        let (all, layout) = (Sequences::Full, GradLayout::Qkv);
        ops::attention_backward_to(&short, &short, &k, &k, &short, &saved, &all, options, layout)
    };
    refused! {
        parts(&qkv, 17) =>
            "heads: shape [1, 4, 24]: 2 heads of 4 features from feature 17 on do not fit: give a head_dim of at \
             least 1, and heads that end by feature 24";
        parts(&q, 0) =>
            "heads: shape [1, 4, 2, 4]: expected [batch, sequence, features] with 2 heads of 4 features from \
             feature 0 on";
        Heads::qkv(&qkv, 2, 1, 4) =>
            "heads: shape [1, 4, 24]: expected [batch, sequence, features] with 16 features: 4 heads of 4";
        Heads::kv(&qkv, 4, 4) =>
            "heads: shape [1, 4, 24]: expected [batch, sequence, features] with 32 features: 8 heads of 4";
        mixed() =>
            "attention: features = 24 of keys and 26 of values: expected keys and values in tensors with the same \
             number of features";
        together() =>
            "attention_backward: layout = Qkv with 3 queries and 4 keys: gradients in one tensor need as many queries \
             as keys: use Kv or Separate";
    }
}

#[test]
fn cross_entropy() {
    let (logits, targets, options) = (floats([4, 8]), ints([4]), CrossEntropyOptions::default());
    let zero = CrossEntropyOptions { normalizer: Some(0.0), ..options };
    let backward = |row_sum: Tensor, count: Tensor| {
        let saved = CrossEntropySaved { row_max: floats([4]), row_sum, count };
        ops::cross_entropy_backward(&logits, &targets, &saved, &options, 1.0)
    };
    let scalar: [usize; 0] = [];
    refused! {
        ops::cross_entropy(&floats(scalar), &targets, &options) =>
            "cross_entropy: shape []: logits are [.., vocabulary]; reshape a single row to [1, vocabulary]";
        ops::cross_entropy(&logits, &ints([3]), &options) =>
            "cross_entropy: logits and targets: got [4, 8] and [3]: give one target per row of logits";
        ops::cross_entropy(&logits, &targets, &zero) =>
            "cross_entropy: normalizer = 0: give a finite number greater than 0, or None for the number of targets";
        backward(floats([3]), ints(scalar)) =>
            "cross_entropy_backward: the saved rows and the logits' rows: got [3] and [4]: pass what cross_entropy returned";
        ops::cross_entropy_of_parts(&targets, &floats([4]), &floats([4]), 8, &options) =>
            "cross_entropy_of_parts: sums and [2, rows]: got [4] and [2, 4]: pass what cross_entropy_part returned, reduced over \
             the parts";
        backward(floats([4]), ints([2])) =>
            "cross_entropy_backward: shape [2]: count holds one value: pass what cross_entropy returned";
    }
}

#[test]
fn embeddings() {
    let (ids, mut table) = (ints([3]), floats([4, 2]));
    refused! {
        ops::embedding_backward(&floats([3, 3]), &ids, &mut table, "table") =>
            "embedding_backward: dy and the lookup's result: got [3, 3] and [3, 2]: dy has the shape of ids, then hidden";
        ops::embedding(&ids, &floats([4])) => "embedding: shape [4]: a table is [vocabulary, hidden]";
        ops::embedding(&ints([1; Shape::MAX_RANK]), &table) =>
            format!(
                "embedding: shape {:?}: ids have at most {} dimensions, the result one more",
                [1; Shape::MAX_RANK],
                Shape::MAX_RANK - 1
            );
        ops::embedding_part(&ids, &table, ops::Part { first: 5, total: 8 }) =>
            "embedding_part: part = 4 from 5 on, of 8: a part ends within the whole";
        DropoutDraw::from(DropoutKey { seed: 1, offset: 0 }).at(6) =>
            "dropout: element = 6: a part of a mask begins at a multiple of 4: cut the tensor at such an element";
    }
}

#[test]
fn norms() {
    let (x, gamma) = (floats([4, 8]), floats([8]));
    let [layer, rms] = [Norm::LayerNorm, Norm::RmsNorm]
        .map(|norm| NormOptions { normalization: norm, ..NormOptions::default() });
    let backward = |mean: Option<Tensor>, rsigma: Tensor, options: &NormOptions| {
        ops::norm_backward(&x, &x, &gamma, &NormStats { mean, rsigma }, options)
    };
    let stats = NormStats { mean: None, rsigma: floats([4]) };
    refused! {
        ops::norm(&x, &gamma, None, &NormOptions { eps: 0.0, ..layer }, &OFF) =>
            "norm: eps = 0: expected a finite value greater than 0, for example 1e-5";
        ops::norm(&x, &floats([4]), None, &layer, &OFF) =>
            "norm: gamma and the last dimension: got [4] and [8]: a norm has one parameter per column";
        ops::norm(&x, &gamma, Some(&gamma), &rms, &OFF) =>
            "norm: beta = [8]: RMSNorm has none: pass no beta, or use LayerNorm";
        backward(None, floats([4]), &layer) =>
            "norm_backward: stats.mean = absent: these statistics are not LayerNorm's: pass those that norm returned";
        backward(Some(floats([3])), floats([4]), &layer) =>
            "norm_backward: mean and the rows of x: got [3] and [4]: statistics are those that norm returned for this x";
        backward(None, floats([8]), &rms) =>
            "norm_backward: rsigma and the rows of x: got [8] and [4]: statistics are those that norm returned for this x";
        ops::norm_backward_add(&x, &x, &gamma, &stats, &rms, &floats([4, 4])) =>
            "norm_backward_add: residual and x: got [4, 4] and [4, 8]: both must have one shape";
    }
}

#[test]
fn rope_and_softmax() {
    let device = Device::cpu();
    let scores = floats([2, 4]);
    refused! {
        ops::RopeTable::new(4, 3, 1e4, &device) => "rope: head_dim = 3: pairs need an even head_dim of at least 2";
        ops::RopeTable::new(4, 4, 0.0, &device) => "rope: base = 0: give a finite base greater than 0, such as 10000";
        ops::softmax(&floats([4]), 1.0, false, None) =>
            "softmax: shape [4]: scores are [.., queries, keys]; reshape a single row to [1, keys]";
        ops::softmax(&scores, 1.0, false, Some(&Tensor::zeros([2, 3], DType::U8, &device).unwrap())) =>
            "softmax: x and mask: got [2, 4] and [2, 3]: a mask has as many dimensions as x, each equal to x's or 1";
    }
}

#[test]
fn optimizer_steps_and_scales() {
    let device = Device::cpu();
    let step = AdamWStep::default();
    let rule = ScaleRule::Delayed { fp8_max: 448.0, margin: 0, policy: ScalePolicy::Exact };
    let update =
        ops::ScaleUpdate { amax: ops::AmaxRule::Max, rule: &rule, interval: 1, record_non_finite: false };
    let adamw = |exp_avg: [usize; 1], exp_avg_sq: [usize; 1], main: [usize; 1]| {
        let (mut param, grad) = (floats([4]), floats([4]));
        let (mut exp_avg, mut exp_avg_sq, mut main) = (floats(exp_avg), floats(exp_avg_sq), floats(main));
        ops::adamw(&mut param, &grad, &mut exp_avg, &mut exp_avg_sq, Some(&mut main), &step, "w")
    };
    let norms = |norm: &Tensor| {
        let (mut param, grad, mut exp_avg, mut exp_avg_sq) =
            (floats([4]), floats([4]), floats([4]), floats([4]));
        let mut tensors = [ops::AdamWTensor {
            name: "w",
            param: &mut param,
            main_grad: &grad,
            exp_avg: &mut exp_avg,
            exp_avg_sq: &mut exp_avg_sq,
            main_param: None,
            slot: None,
        }];
        let (factors, skipped) = (AdamWFactors::new(&step, &device)?, ops::SkippedSteps::new(&device)?);
        ops::adamw_groups(&mut [(&mut tensors, &factors)], Some(ops::NormCheck { norm, skipped: &skipped }))
    };
    refused! {
        norms(&floats([2])) => "adamw_groups: shape [2]: expected one number, the norm";
        AdamWFactors::new(&AdamWStep { grad_scale: f32::INFINITY, ..step }, &device) =>
            "adamw: grad_scale = inf: give a finite number, or skip the step";
        AdamWFactors::new(&AdamWStep { step: 0, ..step }, &device) =>
            "adamw: step = 0: steps are numbered from 1: the bias corrections need it";
        adamw([3], [4], [4]) => "adamw: param and exp_avg: got [4] and [3]: both must have one shape";
        adamw([4], [3], [4]) => "adamw: param and exp_avg_sq: got [4] and [3]: both must have one shape";
        adamw([4], [4], [3]) => "adamw: param and main_param: got [4] and [3]: both must have one shape";
        update.scale_of(&[], 1.0) =>
            "scale_of: window = empty: expected at least the newest amax";
    }
}
