//! Codes and scales of gathered inputs and gradients, against those of the whole tensor on one device.

use super::super::WgradInput;
use super::*;
use crate::fp8_output::Destination;
use crate::{Linear, LinearOptions, ParallelMode, TensorParallelOptions};
use fp8_dist::local;
use fp8_kernels::{DType, Device};
use fp8_recipe::{BlockScaling, CurrentScaling, DelayedScaling, Mxfp8, Nvfp4, Recipe, Scaling};
use std::thread;
use std::time::Duration;

const FEATURES: usize = 256;

const NEAREST: Nvfp4 = Nvfp4 {
    disable_rht: true,
    disable_stochastic_rounding: true,
    disable_2d_quantization: true,
    override_linear_precision: (false, false, false),
};

/// Codes and factors.
type Codes = (Vec<u8>, Vec<u8>);

/// The tensors that GEMMs read: codes, or values in high precision.
#[derive(Debug, PartialEq)]
struct Read {
    input: Result<Codes, Vec<f32>>,
    /// As wgrad reads it.
    again: Result<Codes, Vec<f32>>,
    /// As dgrad and wgrad read it.
    dy: [Result<Codes, Vec<f32>>; 2],
    /// Forward and backward scales after the commits.
    scales: Vec<f32>,
}

fn read(operand: &Operand) -> Result<Codes, Vec<f32>> {
    match operand {
        Operand::High(values) => Err(values.to_f32_vec().unwrap()),
        Operand::Fp8(codes) => {
            let bytes = |factors: &Tensor| match factors.dtype() {
                DType::U8 => factors.to_vec::<u8>().unwrap(),
                _ => factors.to_vec::<f32>().unwrap().iter().flat_map(|f| f.to_le_bytes()).collect(),
            };
            let mut factors = bytes(codes.scale_inv());
            if let Some(scale) = codes.tensor_scale() {
                factors.extend(bytes(scale));
            }
            Ok((codes.codes().unwrap(), factors))
        }
    }
}

fn waves(tokens: usize, factor: f32) -> Vec<f32> {
    (0..tokens * FEATURES).map(|i| (i as f32 * 0.37).sin() * factor * (1.0 + (i / 999) as f32)).collect()
}

/// `steps` steps with a column-parallel and a row-parallel layer; the tensors are those of the last one. `outlier` is put into the last
/// token in the last step.
fn reads(
    ranks: Option<&TensorParallel>,
    recipe: &Recipe,
    dtype: DType,
    tokens: usize,
    steps: usize,
    outlier: bool,
) -> Read {
    let device = Device::cpu();
    let layer = |parallel_mode| {
        let options = LinearOptions {
            in_features: FEATURES,
            out_features: FEATURES,
            params_dtype: dtype,
            tensor_parallel: ranks.cloned(),
            parallel_mode,
            ..Default::default()
        };
        Linear::new("fc", options, &device, &mut rand::rng()).unwrap()
    };
    let (column, row) = (layer(ParallelMode::Column), layer(ParallelMode::Row));
    let part = |values: Vec<f32>| {
        let whole = Tensor::from_vec(values, [tokens, FEATURES], &device).unwrap();
        let whole = ops::cast(&whole, dtype).unwrap();
        ranks.map_or(whole.clone(), |ranks| ranks.scatter_tokens("x", &whole).unwrap())
    };
    let mut scalings = [&column, &row].map(|layer| Scaling::new(layer, &device).unwrap());
    if let Some(ranks) = ranks {
        scalings.iter_mut().for_each(|scaling| scaling.set_group(ranks.group().clone()));
    }
    let mut last = None;
    for step in 0..steps {
        let mut values = waves(tokens, 1.0 + step as f32 * 0.3);
        if outlier && step + 1 == steps {
            values[tokens * FEATURES - 3] = 1e4;
        }
        let (x, dy) = (part(values.clone()), part(values));
        let [of_column, of_row] = &mut scalings;
        let mut cx = of_column.autocast(recipe).unwrap();
        let quantize = |slot: &Slot<'_>| Ok((ops::quantize(&x, slot)?, ()));
        let (input, ()) = column.input_of(&mut cx, dtype, quantize).unwrap();
        let in_fp8 = cx.fp8_gemms(&column.slots.input).wgrad;
        let kept = column.for_wgrad(&cx, Input { whole: input.whole, ..input });
        let in_fprop = cx.fp8_gemms(&column.slots.input).fprop;
        let whole = read(&column_input(&mut cx, &column, &x).whole.pick(in_fprop));
        cx.commit().unwrap();
        let mut cx = of_column.backward().unwrap();
        let again = match kept.unwrap() {
            WgradInput::Operand(x) => x,
            WgradInput::Shard(kept) => column.input_tokens().unwrap().gather_again(&mut cx, kept).unwrap(),
        };
        cx.commit().unwrap();
        assert!(in_fp8 == again.is_fp8() || recipe.is_off());

        let local = if ranks.is_some() { FEATURES / 2 } else { FEATURES };
        let input = Tensor::full(1.0, [tokens, local], dtype, &device).unwrap();
        let mut cx = of_row.autocast(recipe).unwrap();
        let (_, saved) = row.forward_to(&mut cx, &input, Destination::High).unwrap();
        cx.commit().unwrap();
        let mut cx = of_row.backward().unwrap();
        let quantize = |slot: &Slot<'_>| Ok((ops::quantize(&dy, slot)?, None));
        let gathered = row.gather_gradient(&mut cx, &saved.core, quantize).unwrap().0;
        let gemms = cx.fp8_gemms(&saved.core.origin);
        let dy = [read(&gathered.pick(gemms.dgrad)), read(&for_wgrad(gathered.pick(gemms.wgrad)))];
        cx.commit().unwrap();
        let arenas = scalings.iter().flat_map(|scaling| scaling.state().unwrap().arenas);
        // Weights of this rank have amaxes of their own, which are reduced, too: all scales are equal.
        let scales = arenas.flat_map(|arena| arena.scale).collect();
        let again = read(&by_columns(&again));
        last = Some(Read { input: whole, again, dy, scales });
    }
    last.unwrap()
}

/// The input once more, with the scale that the first run has left.
fn column_input(cx: &mut Forward<'_>, layer: &Linear, x: &Tensor) -> Input {
    layer.input_of(cx, x.dtype(), |slot| Ok((ops::quantize(x, slot)?, ()))).unwrap().0
}

/// The columns of NVFP4, which are quantized from the values, as rows.
fn for_wgrad(operand: Operand) -> Operand {
    if operand.as_fp8().is_some_and(|codes| codes.tensor_scale().is_some()) {
        by_columns(&operand)
    } else {
        operand
    }
}

/// Columnwise codes as rows, so that copies that were made in different ways can be compared.
fn by_columns(operand: &Operand) -> Operand {
    match operand {
        Operand::Fp8(codes) if codes.columnwise().is_some() => Operand::Fp8(codes.transposed().unwrap()),
        Operand::Fp8(codes) if codes.blocks().is_none() => {
            Operand::Fp8(codes.clone().with_columnwise().unwrap().for_backward().transposed().unwrap())
        }
        operand => operand.clone(),
    }
}

fn on_ranks(f: impl Fn(&TensorParallel) -> Read + Sync) -> Vec<Read> {
    let run = |group| {
        let options = TensorParallelOptions { sequence_parallel: true, ..Default::default() };
        f(&TensorParallel::new(group, &options).unwrap().unwrap())
    };
    let run = &run;
    thread::scope(|scope| {
        let groups = local("tp", 2, Duration::from_secs(60)).unwrap().into_iter();
        let ranks: Vec<_> = groups.map(|group| scope.spawn(move || run(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn compare(name: &str, recipe: &Recipe, dtype: DType, tokens: usize, steps: usize, outlier: bool) {
    let alone = reads(None, recipe, dtype, tokens, steps, outlier);
    for (rank, found) in
        on_ranks(|ranks| reads(Some(ranks), recipe, dtype, tokens, steps, outlier)).iter().enumerate()
    {
        let what = format!("{name}, {dtype}, {tokens} tokens, step {steps}, rank {rank}");
        assert!(found.input == alone.input, "{what}: the input");
        assert!(found.again == alone.again, "{what}: the input, again");
        assert!(found.dy == alone.dy, "{what}: dy");
    }
}

#[test]
fn gathered_codes_and_scales_are_those_of_the_whole() {
    let recipes: [(&str, Recipe); 9] = [
        ("delayed", DelayedScaling::default().into()),
        ("current", CurrentScaling::default().into()),
        ("rows", CurrentScaling::rowwise().into()),
        ("blocks", BlockScaling::default().into()),
        (
            "tiles",
            BlockScaling { x_block_scaling_dim: 2, w_block_scaling_dim: 1, ..Default::default() }.into(),
        ),
        ("mx", Mxfp8::default().into()),
        ("nvfp4", Nvfp4::default().into()),
        ("nvfp4 to nearest", NEAREST.into()),
        ("off", Recipe::off()),
    ];
    for (name, recipe) in &recipes {
        for dtype in [DType::F32, DType::BF16] {
            // 128 tokens a rank, which no block is cut by, and 20, by which blocks of tokens are.
            for tokens in [256, 40] {
                compare(name, recipe, dtype, tokens, 1, false);
                compare(name, recipe, dtype, tokens, 3, false);
            }
        }
    }
}

/// GEMMs that stay in high precision read values, which are gathered beside or in place of codes.
#[test]
fn gemms_in_high_precision_read_the_values_of_all_ranks() {
    for high in [(true, false, false), (false, true, false), (false, false, true), (false, true, true)] {
        let delayed = DelayedScaling { override_linear_precision: high, ..Default::default() };
        let mx = Mxfp8 { override_linear_precision: high, ..Default::default() };
        let nvfp4 = Nvfp4 { override_linear_precision: high, ..Default::default() };
        for recipe in [Recipe::from(delayed), mx.into(), nvfp4.into()] {
            compare(&format!("{high:?}"), &recipe, DType::F32, 64, 2, false);
            compare(&format!("{high:?}"), &recipe, DType::F32, 40, 2, false);
        }
    }
}

#[test]
fn an_outlier_on_the_last_rank_sets_the_scale_of_all() {
    for recipe in [Recipe::from(DelayedScaling::default()), CurrentScaling::default().into()] {
        for steps in [1, 3] {
            compare("outlier", &recipe, DType::F32, 40, steps, true);
        }
    }
    // The scale of delayed scaling follows in the step after: all ranks have it.
    let recipe = DelayedScaling { amax_history_len: 4, ..Default::default() }.into();
    let scales = on_ranks(|ranks| reads(Some(ranks), &recipe, DType::F32, 40, 2, true));
    assert_eq!(scales[0].scales, scales[1].scales);
    let alone = reads(None, &recipe, DType::F32, 40, 2, true);
    assert_eq!(scales[0].scales[..1], alone.scales[..1]); // the input's
    assert!(alone.scales[0] < 448.0 / 0.9e4);
}
