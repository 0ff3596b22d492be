//! Operations that memory limits: bytes are those that have to be read and written.

use crate::data::{RULE, SCALE};
use crate::result::Result;
use crate::timer::{Bench, Mode, Work};
use fp8_nn::fp8_kernels::fp8_format::Encoding;
use fp8_nn::fp8_kernels::ops::{
    self, Activation, AdamWFactors, AdamWStep, AdamWTensor, AmaxRule, Norm, NormOptions, ScaleUpdate,
};
use fp8_nn::fp8_kernels::{Arena, ArenaOptions, Cell, DType, REST, Slot, Tensor};

pub(crate) fn kernels(bench: &mut Bench) -> Result {
    let shapes = if bench.dry { vec![[128, 64]] } else { vec![[8192, 8192], [16384, 4096], [2048, 2048]] };
    for shape in shapes {
        quantizing(bench, shape)?;
        activations(bench, shape)?;
        norms(bench, shape)?;
        codes(bench, shape)?;
    }
    older(bench)
}

/// The kernels that take everything, beside those for whole tiles and common options, in about the same size: a shape that
/// has no whole tiles, and a γ around one.
fn older(bench: &mut Bench) -> Result {
    let (ragged, shape) = if bench.dry { ([61, 40], [128, 64]) } else { ([16376, 4088], [16384, 4096]) };
    quantizing(bench, ragged)?;
    activations(bench, ragged)?;
    norms_with(bench, shape, NormOptions { zero_centered_gamma: true, ..NormOptions::default() })
}

/// `sets` tensors of a shape.
fn inputs(bench: &Bench, sets: usize, shape: [usize; 2], dtype: DType, seed: usize) -> Result<Vec<Tensor>> {
    (0..sets).map(|set| bench.pool.tensor(shape, dtype, seed + set, &bench.device)).collect()
}

/// Cells of a slot: scale and amax.
fn cells(bench: &Bench) -> Result<[Cell; 2]> {
    Ok([Cell::new(SCALE, &bench.device)?, Cell::new(REST, &bench.device)?])
}

/// E4M3 with amax, without and with the transpose.
fn slots([scale, amax]: &[Cell; 2]) -> [Slot<'_>; 2] {
    let one = Slot { amax: Some(amax), ..Slot::fixed(Encoding::E4M3, scale, &RULE) };
    [one, Slot { columnwise: true, ..one }]
}

fn name(what: &str, [rows, cols]: [usize; 2]) -> String {
    format!("{what} {rows}x{cols}")
}

fn quantizing(bench: &mut Bench, shape: [usize; 2]) -> Result {
    let n = (shape[0] * shape[1]) as f64;
    let cells = cells(bench)?;
    let [one, both] = slots(&cells);
    let sets = bench.sets(3.0 * n);
    let x = inputs(bench, sets, shape, DType::BF16, 1)?;
    let mut case = |what, bytes: f64, run: &dyn Fn(&Tensor) -> Result<crate::timer::Kept>| {
        bench.time("memory", &name(what, shape), Work::Bytes(bytes * n), sets, &mut |set| run(&x[set]))
    };
    case("cast", 3.0, &|x| Ok(Box::new(ops::quantize(x, &one)?)))?;
    case("cast+T", 4.0, &|x| Ok(Box::new(ops::quantize(x, &both)?)))?;
    case("cast+T+dbias", 4.0, &|x| Ok(Box::new(ops::quantize_dbias(x, &both)?)))?;
    drop(x);
    let x = inputs(bench, sets, shape, DType::F32, 1)?;
    bench.time("memory", &name("cast f32", shape), Work::Bytes(5.0 * n), sets, &mut |set| {
        Ok(Box::new(ops::quantize(&x[set], &one)?))
    })
}

fn activations(bench: &mut Bench, shape: [usize; 2]) -> Result {
    let n = (shape[0] * shape[1]) as f64;
    let cells = cells(bench)?;
    let [one, both] = slots(&cells);
    let sets = bench.sets(3.0 * n);
    let (h, dy) = (inputs(bench, sets, shape, DType::BF16, 1)?, inputs(bench, sets, shape, DType::BF16, 50)?);
    let wide = inputs(bench, sets, [shape[0], 2 * shape[1]], DType::BF16, 100)?;
    let mut case = |what, bytes: f64, run: &dyn Fn(usize) -> Result<crate::timer::Kept>| {
        bench.time("memory", &name(what, shape), Work::Bytes(bytes * n), sets, &mut |set| run(set))
    };
    let (gelu, swiglu) = (Activation::Gelu, Activation::Swiglu);
    let backward = ops::activation_backward_quantize_dbias;
    case("gelu+cast", 3.0, &|i| Ok(Box::new(ops::activation(&h[i], gelu, &one)?)))?;
    case("gelu+cast+T", 4.0, &|i| Ok(Box::new(ops::activation(&h[i], gelu, &both)?)))?;
    case("dgelu+cast+T+dbias", 6.0, &|i| Ok(Box::new(backward(&dy[i], &h[i], gelu, &both)?)))?;
    case("swiglu+cast", 5.0, &|i| Ok(Box::new(ops::activation(&wide[i], swiglu, &one)?)))?;
    case("swiglu+cast+T", 6.0, &|i| Ok(Box::new(ops::activation(&wide[i], swiglu, &both)?)))?;
    case("dswiglu+cast+T+dbias", 10.0, &|i| Ok(Box::new(backward(&dy[i], &wide[i], swiglu, &both)?)))
}

fn norms(bench: &mut Bench, shape: [usize; 2]) -> Result {
    norms_with(bench, shape, NormOptions::default())
}

fn norms_with(bench: &mut Bench, shape: [usize; 2], layer: NormOptions) -> Result {
    let n = (shape[0] * shape[1]) as f64;
    let cells = cells(bench)?;
    let [one, both] = slots(&cells);
    let sets = bench.sets(3.0 * n);
    let x = inputs(bench, sets, shape, DType::BF16, 1)?;
    let dy = inputs(bench, sets, shape, DType::BF16, 50)?;
    let gamma = bench.pool.tensor([shape[1]], DType::F32, 9, &bench.device)?;
    let beta = bench.pool.tensor([shape[1]], DType::F32, 10, &bench.device)?;
    let rms = NormOptions { normalization: Norm::RmsNorm, ..layer };
    let stats = x
        .iter()
        .map(|x| Ok(ops::norm(x, &gamma, Some(&beta), &layer, &one)?.1))
        .collect::<Result<Vec<_>>>()?;
    let around = if layer.zero_centered_gamma { ", γ around one" } else { "" };
    let mut case = |what, bytes: f64, run: &dyn Fn(usize) -> Result<crate::timer::Kept>| {
        let name = format!("{}{around}", name(what, shape));
        bench.time("memory", &name, Work::Bytes(bytes * n), sets, &mut |set| run(set))
    };
    case("layernorm+cast", 3.0, &|i| Ok(Box::new(ops::norm(&x[i], &gamma, Some(&beta), &layer, &one)?)))?;
    case("layernorm+cast+T", 4.0, &|i| Ok(Box::new(ops::norm(&x[i], &gamma, Some(&beta), &layer, &both)?)))?;
    case("rmsnorm+cast", 3.0, &|i| Ok(Box::new(ops::norm(&x[i], &gamma, None, &rms, &one)?)))?;
    case("rmsnorm+cast+T", 4.0, &|i| Ok(Box::new(ops::norm(&x[i], &gamma, None, &rms, &both)?)))?;
    case("layernorm backward", 6.0, &|i| {
        Ok(Box::new(ops::norm_backward(&dy[i], &x[i], &gamma, &stats[i], &layer)?))
    })?;
    case("layernorm backward+add", 8.0, &|i| {
        Ok(Box::new(ops::norm_backward_add(&dy[i], &x[i], &gamma, &stats[i], &layer, &dy[i])?))
    })
}

fn codes(bench: &mut Bench, shape: [usize; 2]) -> Result {
    let n = (shape[0] * shape[1]) as f64;
    let sets = bench.sets(2.0 * n);
    let x = (0..sets)
        .map(|set| bench.pool.fp8(shape, Encoding::E4M3, set, &bench.device))
        .collect::<Result<Vec<_>>>()?;
    bench.time("memory", &name("dequantize", shape), Work::Bytes(3.0 * n), sets, &mut |set| {
        Ok(Box::new(x[set].dequantize(DType::BF16)?))
    })?;
    bench.time("memory", &name("transpose", shape), Work::Bytes(2.0 * n), sets, &mut |set| {
        let codes = x[set].rowwise().ok_or("codes without rows")?;
        Ok(Box::new(ops::transpose(codes)?))
    })
}

/// Every arena is updated once a graph, and has new amaxes before the next.
pub(crate) fn scales(bench: &mut Bench) -> Result {
    const ARENAS: usize = 20;
    let sizes = if bench.dry { vec![64] } else { vec![64, 640, 5000] };
    let update = ScaleUpdate { amax: AmaxRule::Max, rule: &RULE, interval: 1, record_non_finite: false };
    for (slots, history_len) in sizes.into_iter().flat_map(|slots| [(slots, 16), (slots, 1024)]) {
        let options = ArenaOptions { history_len, first_scale: 1.0, ..ArenaOptions::default() };
        let mut arenas = (0..ARENAS)
            .map(|_| Arena::new(slots, options, &bench.device))
            .collect::<std::result::Result<Vec<_>, _>>()?;
        let amaxes: Vec<f32> = (0..slots).map(|slot| 1.0 + slot as f32 / slots as f32).collect();
        let arenas = std::cell::RefCell::new(&mut arenas);
        bench.time_as(
            Mode::Graph,
            "scales",
            &format!("{slots} slots x {history_len}"),
            Work::Calls,
            ARENAS,
            &mut |set| {
                ops::update_scales(&mut arenas.borrow_mut()[set], &update)?;
                Ok(Box::new(()))
            },
            &mut || arenas.borrow().iter().try_for_each(|arena| Ok(arena.merge_staged(&amaxes)?)),
        )?;
    }
    Ok(())
}

struct Parameter {
    name: String,
    param: Tensor,
    main: Tensor,
    grad: Tensor,
    moments: [Tensor; 2],
}

/// f32 main parameters, moments and gradients; bf16 parameters; codes and their transposes.
pub(crate) fn adamw(bench: &mut Bench) -> Result {
    const BYTES: f64 = 4.0 * 4.0 + 3.0 * 4.0 + 2.0 + 2.0;
    let (count, side) = if bench.dry { (3, 48) } else { (64, 2048) };
    let device = bench.device.clone();
    let mut parameters = (0..count)
        .map(|seed| {
            let random = |seed, dtype| bench.pool.tensor([side, side], dtype, seed, &device);
            let zeros = || Tensor::zeros([side, side], DType::F32, &device);
            Ok(Parameter {
                name: format!("w{seed}"),
                param: random(seed, DType::BF16)?,
                main: random(seed, DType::F32)?,
                grad: random(seed + 1000, DType::F32)?,
                moments: [zeros()?, zeros()?],
            })
        })
        .collect::<Result<Vec<_>>>()?;
    let cells = (0..count).map(|_| cells(bench)).collect::<Result<Vec<_>>>()?;
    let factors = AdamWFactors::new(&AdamWStep::default(), &device)?;
    let n = (count * side * side) as f64;
    let case = format!("{count} tensors of {side}x{side}, FP8+T");
    bench.time("adamw", &case, Work::Bytes(BYTES * n), 1, &mut |_| {
        let mut tensors: Vec<_> = parameters
            .iter_mut()
            .zip(&cells)
            .map(|(parameter, cells)| {
                let [exp_avg, exp_avg_sq] = &mut parameter.moments;
                AdamWTensor {
                    name: &parameter.name,
                    param: &mut parameter.param,
                    main_grad: &parameter.grad,
                    exp_avg,
                    exp_avg_sq,
                    main_param: Some(&mut parameter.main),
                    slot: Some(slots(cells)[1]),
                }
            })
            .collect();
        Ok(Box::new(ops::adamw_groups(&mut [(&mut tensors, &factors)], None)?))
    })
}
