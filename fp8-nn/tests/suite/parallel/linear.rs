//! Column- and row-parallel layers against slices of the layer on one device, bit for bit where no sum is over ranks, and the bytes of
//! gathers.

use super::rig::*;
use crate::every_device::support::{bits, device, is_nvfp4, noise, relative_rms, rng};
use fp8_nn::fp8_recipe::ScalingState;
use fp8_nn::prelude::*;
use fp8_nn::{ParallelMode, ReduceDtype};

const TOKENS: usize = 256;
const IN: usize = 256;
const OUT: usize = 512;

/// The tensors of one step.
struct Step {
    y: Tensor,
    dx: Tensor,
    dw: Tensor,
    db: Tensor,
    state: ScalingState,
}

/// Two steps of a layer with given scales, or the first and the second if there are none. The tensors are those of the last.
fn step(
    rank: &Rank,
    mode: ParallelMode,
    recipe: &Recipe,
    dtype: DType,
    loaded: Option<&ScalingState>,
) -> Step {
    let options = LinearOptions {
        in_features: IN,
        out_features: OUT,
        params_dtype: dtype,
        tensor_parallel: rank.tensor_parallel.clone(),
        parallel_mode: mode,
        ..Default::default()
    };
    let mut layer = Linear::new("fc", options, &device(), &mut rng(1)).unwrap();
    let whole = |shape: &Shape, seed| {
        let values = ops::scale(&noise(*shape, seed), 0.1).unwrap();
        ops::cast(&if is_nvfp4(recipe) { with_equal_amaxes(&values) } else { values }, dtype).unwrap()
    };
    for (seed, parameter) in (1..).zip(parameters_mut(&mut layer)) {
        let value = whole(parameter.global_shape(), seed);
        parameter.set_part_of(&value).unwrap();
    }
    let mut scaling = Scaling::new(&layer, &device()).unwrap();
    scaling.set_group(rank.mesh.amax_group());
    loaded.map(|state| scaling.load_state(state).unwrap());
    let (x, dy) = (whole(&[TOKENS, IN].into(), 3), whole(&[TOKENS, OUT].into(), 4));
    let (x, dy) = match mode {
        ParallelMode::Column => (tokens(rank, &x), features(rank, &dy)),
        ParallelMode::Row => (features(rank, &x), tokens(rank, &dy)),
    };
    let mut last = None;
    for _ in 0..2 {
        zero_grad(&mut layer).unwrap();
        let (y, saved) = scaling.in_autocast(recipe, |cx| layer.forward(cx, &x)).unwrap();
        let dx = scaling.in_backward(|cx| layer.backward(cx, saved, &dy)).unwrap();
        all_reduce_gradients(&mut layer, &**rank.mesh.dp()).unwrap();
        last = Some((y, dx));
    }
    let (y, dx) = last.unwrap();
    let gradient = |parameter: &Parameter| parameter.gather_main_grad().unwrap();
    let (dw, db) = (gradient(layer.weight()), gradient(layer.bias().unwrap()));
    Step { y, dx, dw, db, state: scaling.state().unwrap() }
}

/// Puts the same large values into every 64th row or column, so that parts of a tensor, and of its Hadamard transform, have its amaxes.
fn with_equal_amaxes(x: &Tensor) -> Tensor {
    let [_, cols] = x.shape().matrix();
    let mut values = x.to_f32_vec().unwrap();
    for (index, value) in values.iter_mut().enumerate() {
        let (row, col) = (index / cols, index % cols);
        if row % 64 == 0 && col % 64 == 0 {
            *value = 2.0;
        } else if col % 64 == 0 {
            *value = (row as f32).sin() * 0.5;
        }
    }
    Tensor::from_vec(values, *x.shape(), x.device()).unwrap()
}

/// This rank's tokens, with sequence parallelism.
fn tokens(rank: &Rank, x: &Tensor) -> Tensor {
    match &rank.tensor_parallel {
        Some(ranks) if ranks.options().sequence_parallel => ranks.scatter_tokens("x", x).unwrap(),
        _ => x.clone(),
    }
}

/// This rank's features.
fn features(rank: &Rank, x: &Tensor) -> Tensor {
    let tp = rank.mesh.tp();
    let share = x.shape().last_dim() / tp.world_size();
    ops::split(x, &vec![share; tp.world_size()]).unwrap().swap_remove(tp.rank())
}

fn check(mode: ParallelMode, recipe: &Recipe, dtype: DType, layout: Layout, loaded: Option<&ScalingState>) {
    let alone = ranks(ONE, |rank| step(rank, mode, recipe, dtype, loaded)).remove(0);
    let summed = if dtype == DType::F32 { 1e-6 } else { 8e-3 };
    for found in ranks(layout, |rank| {
        let found = step(rank, mode, recipe, dtype, loaded);
        let what = format!("{recipe}, {mode:?}, {layout:?}, {dtype}, rank {}", rank.mesh.tp().rank());
        // What no rank adds to.
        let (same, expected, sum, of_all) = match mode {
            ParallelMode::Column => (&found.y, features(rank, &alone.y), &found.dx, tokens(rank, &alone.dx)),
            ParallelMode::Row => (&found.dx, features(rank, &alone.dx), &found.y, tokens(rank, &alone.y)),
        };
        assert!(
            bits(same) == bits(&expected),
            "{what}: {}",
            if mode == ParallelMode::Row { "dx" } else { "y" }
        );
        assert!(bits(&found.dw) == bits(&alone.dw), "{what}: dw");
        for (name, alone, found, bound) in
            [("db", &alone.db, &found.db, 1e-6), ("the sum", &of_all, sum, summed)]
        {
            let error = relative_rms(&alone.to_f32_vec().unwrap(), &found.to_f32_vec().unwrap());
            assert!(error <= bound, "{what}, {name}: {error:.1e}");
        }
        found.state
    }) {
        let scales = |state: &ScalingState| -> Vec<u32> {
            state.arenas.iter().flat_map(|arena| &arena.scale).map(|scale| scale.to_bits()).collect()
        };
        assert_eq!(scales(&found), scales(&alone.state), "{recipe}: scales");
    }
}

const LAYOUTS: [Layout; 3] = [TP2, TP2_SP, TP4];

fn all(recipe: &Recipe, layouts: &[Layout], loads: bool) {
    for mode in [ParallelMode::Column, ParallelMode::Row] {
        let state = ranks(ONE, |rank| step(rank, mode, recipe, DType::F32, None)).remove(0).state;
        for &layout in layouts {
            for dtype in [DType::F32, DType::BF16] {
                check(mode, recipe, dtype, layout, loads.then_some(&state));
            }
        }
    }
}

#[test]
fn in_high_precision_parts_have_the_bits_of_slices() {
    all(&Recipe::off(), &LAYOUTS, false);
}

#[test]
fn with_given_scales_parts_have_the_bits_of_slices() {
    all(&DelayedScaling::default().into(), &LAYOUTS, true);
}

#[test]
fn with_blocks_that_no_cut_splits_parts_have_the_bits_of_slices() {
    for recipe in [Recipe::from(BlockScaling::default()), Mxfp8::default().into()] {
        all(&recipe, &[TP2, TP2_SP], false);
    }
}

/// Parts have the amaxes of the whole here. Stochastically rounded gradients draw the numbers that they have in the whole.
#[test]
fn in_nvfp4_parts_have_the_bits_of_slices() {
    let nearest = Nvfp4 { disable_rht: true, disable_stochastic_rounding: true, ..Default::default() };
    all(&Nvfp4::default().into(), &LAYOUTS, false);
    all(&nearest.into(), &[TP2_SP], false);
}

/// f32 sums that are rounded once are those of one device; sums of 16-bit parts are not.
#[test]
fn reducing_in_f32_gives_the_rounding_of_one_device() {
    let recipe = Recipe::off();
    let alone = ranks(ONE, |rank| step(rank, ParallelMode::Row, &recipe, DType::BF16, None)).remove(0);
    let differing = |reduce| {
        let all =
            ranks(Layout { reduce, ..TP4 }, |rank| step(rank, ParallelMode::Row, &recipe, DType::BF16, None));
        let (expected, found) = (bits(&alone.y), bits(&all[0].y));
        expected.iter().zip(&found).filter(|(a, b)| a != b).count()
    };
    let (f32, output) = (differing(ReduceDtype::F32), differing(ReduceDtype::Output));
    assert!(
        f32 * 1000 < TOKENS * OUT && output * 10 > TOKENS * OUT,
        "{f32} and {output} of {}",
        TOKENS * OUT
    );
}

/// Bytes of gathers of a sequence-parallel MLP's step, forward and backward, in FP8 and in bf16.
#[test]
fn gathers_in_fp8_take_half_the_bytes_of_bf16() {
    let gathered = |recipe: &Recipe| {
        ranks(TP2_SP, |rank| {
            let options = LayerNormMlpOptions {
                hidden_size: 256,
                ffn_hidden_size: 512,
                params_dtype: DType::BF16,
                tensor_parallel: rank.tensor_parallel.clone(),
                ..Default::default()
            };
            let mut layer = LayerNormMlp::new("mlp", options, &device(), &mut rng(1)).unwrap();
            let mut scaling = Scaling::new(&layer, &device()).unwrap();
            scaling.set_group(rank.mesh.amax_group());
            let x = ops::cast(&noise([512, 256], 1), DType::BF16).unwrap();
            let x = tokens(rank, &x);
            let mut bytes = 0;
            for _ in 0..2 {
                let before = rank.mesh.tp().traffic().moves.bytes;
                let (y, saved) = scaling.in_autocast(recipe, |cx| layer.forward(cx, &x)).unwrap();
                scaling.in_backward(|cx| layer.backward(cx, saved, &y)).unwrap();
                bytes = rank.mesh.tp().traffic().moves.bytes - before;
            }
            bytes
        })[0]
    };
    let bf16 = gathered(&Recipe::off());
    // x by rows, its columns again for wgrad, and dy by both: 4.5 bits a value, 4 bytes of a factor for each, and rows and whether they fit.
    let nvfp4 = gathered(&Nvfp4::default().into());
    assert!(nvfp4 as f64 <= 4.0 * 256.0 * 256.0 * 4.5 / 8.0 + 100.0, "{nvfp4} of {bf16} bytes");
    assert_eq!(bf16, 3 * 256 * 256 * 2); // x, x again for wgrad, and dy: this rank's 256 tokens to the other
    for recipe in [Recipe::from(DelayedScaling::default()), CurrentScaling::default().into()] {
        let fp8 = gathered(&recipe);
        assert!(fp8 as f64 <= 0.51 * bf16 as f64, "{recipe}: {fp8} of {bf16} bytes");
    }
}
