use super::case::{Outcome, cases};
use super::compare::{close, ensure, quiet, refused, refused_on, same};
use super::data::{
    self, AROUND_2_16, FLOATS, f64s, normal, rounded, special_rows, specials, tensor, tolerance,
};
use super::reference::{Got, same_as_cpu};
use super::threads::same_bits;
use crate::oracle::differences;
use fp8_kernels::ops::{Positions, RopeScaling, RopeTable};
use fp8_kernels::{DType, Device, Result, Tensor, ops};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

cases![
    matches_the_oracle,
    around_2_16: Dtypes,
    special_values: Dtypes,
    halves_are_rounded_once,
    backward_is_the_transpose,
    norms_and_the_way_back,
    a_start_is_an_offset,
    positions_of_each_token,
    in_place: Dtypes,
    refuses_in_place,
    scaled_frequencies,
    refuses_scalings,
    same_for_any_threads,
    refuses,
];

/// A token with a position of its own is what it would be alone.
fn positions_of_each_token(device: &Device) -> Outcome {
    for (dtype, dim) in [(DType::F32, 6), (DType::BF16, 16)] {
        let [batch, sequence, heads] = [2, 5, 3];
        let table = RopeTable::new(40, dim, 100.0, device)?;
        let x = normal([batch, sequence, heads, dim], dtype, 1, device)?;
        let values = vec![0, 39, 7, 7, 1, 12, 0, 0, 38, 2];
        let positions = Tensor::from_vec(values.clone(), [batch, sequence], device)?;
        let (y, back) = (ops::rope(&x, &table, &positions)?, ops::rope_backward(&x, &table, &positions)?);
        let elements = x.to_f32_vec()?;
        for (token, position) in values.into_iter().enumerate() {
            let at = token * heads * dim..(token + 1) * heads * dim;
            let one = tensor(elements[at.clone()].to_vec(), [1, 1, heads, dim], dtype, device)?;
            let start = position as usize;
            for (all, one) in
                [(&y, ops::rope(&one, &table, start)?), (&back, ops::rope_backward(&one, &table, start)?)]
            {
                same(&format!("token {token}"), &all.to_f32_vec()?[at.clone()], &one.to_f32_vec()?, dim)?;
            }
        }
        for (token, wrong) in [(0, 40), (9, -1)] {
            let mut values = vec![0; 10];
            values[token] = wrong;
            let positions = Tensor::from_vec(values, [batch, sequence], device)?;
            let wording = format!("position {wrong} at position {token} is out of range 0..40");
            refused_on(device, ops::rope(&x, &table, &positions), &format!("rope: {wording}"))?;
            refused_on(
                device,
                ops::rope_backward(&x, &table, &positions),
                &format!("rope_backward: {wording}"),
            )?;
        }
        let flat = Tensor::from_vec(vec![0; 10], [10], device)?;
        refused(ops::rope(&x, &table, &flat), "got [10] and [2, 5]: give one position per token")?;
    }
    Ok(())
}

/// The first heads of each token, where they are: what `rope` makes of them, and the other features as they were.
fn in_place(device: &Device, dtype: DType) -> Outcome {
    // Heads in eights and one by one, whole tensors, no heads, and features behind them that are no head.
    for ([batch, sequence, heads, dim], behind) in
        [([2, 5, 3, 16], 32), ([1, 7, 2, 6], 5), ([2, 33, 4, 64], 0), ([1, 4, 0, 8], 8), ([3, 2, 1, 2], 1)]
    {
        let table = RopeTable::new(40, dim, 100.0, device)?;
        let x = normal([batch, sequence, heads, dim], dtype, 1, device)?;
        let rest = normal([batch, sequence, behind], dtype, 2, device)?;
        let given: Vec<i32> = (0..batch * sequence).map(|i| (i * 7 % 40) as i32).collect();
        let given = Tensor::from_vec(given, [batch, sequence], device)?;
        for positions in [Positions::from(3), Positions::from(&given)] {
            let with_rest = |x: &Tensor| ops::concat(&[&x.reshape([batch, sequence, heads * dim])?, &rest]);
            let [mut y, mut back] = [with_rest(&x)?, with_rest(&x)?];
            ops::rope_in_place(&mut y, heads, &table, positions, "y")?;
            ops::rope_backward_in_place(&mut back, heads, &table, positions, "back")?;
            let (want, want_back) =
                (ops::rope(&x, &table, positions)?, ops::rope_backward(&x, &table, positions)?);
            let what = format!("{batch} {sequence} {heads} {dim} {behind}");
            same(&what, &y.to_f32_vec()?, &with_rest(&want)?.to_f32_vec()?, heads * dim + behind)?;
            same(&what, &back.to_f32_vec()?, &with_rest(&want_back)?.to_f32_vec()?, heads * dim + behind)?;
            // Heads as a dimension of their own.
            let mut four = normal([batch, sequence, heads, dim], dtype, 1, device)?;
            ops::rope_in_place(&mut four, heads, &table, positions, "four")?;
            same(&what, &four.to_f32_vec()?, &want.to_f32_vec()?, dim)?;
        }
    }
    Ok(())
}

fn refuses_in_place(device: &Device) -> Outcome {
    let table = RopeTable::new(4, 8, 100.0, device)?;
    let mut x = normal([1, 4, 20], DType::F32, 1, device)?;
    let wording = "rope_in_place: shape [1, 4, 20]: the token's 20 features are fewer than 3 heads of 8 have";
    refused(ops::rope_in_place(&mut x, 3, &table, 0, "x"), wording)?;
    refused(ops::rope_in_place(&mut x, usize::MAX, &table, 0, "x"), "fewer than")?;
    refused(ops::rope_in_place(&mut x, 2, &table, 1, "x"), "positions 1..5 go beyond the table's 4")?;
    let shared = x.clone();
    refused(ops::rope_backward_in_place(&mut x, 2, &table, 0, "block.qkv"), "block.qkv")?;
    drop(shared);
    ops::rope_backward_in_place(&mut x, 2, &table, 0, "block.qkv")?;
    let before = x.to_f32_vec()?;
    for (token, wrong) in [(0, 4), (3, -1)] {
        let mut positions = vec![0; 4];
        positions[token] = wrong;
        let positions = Tensor::from_vec(positions, [1, 4], device)?;
        let wording = format!("rope: position {wrong} at position {token} is out of range 0..4");
        refused_on(device, ops::rope_in_place(&mut x, 2, &table, &positions, "x"), &wording)?;
    }
    if device.is_same(&Device::cpu()) {
        same("nothing has changed", &x.to_f32_vec()?, &before, 20)?;
    }
    let mut flat = normal([4, 8], DType::F32, 1, device)?;
    refused(ops::rope_in_place(&mut flat, 1, &table, 0, "x"), "expected [batch, sequence, features] or")?;
    let mut other = normal([1, 4, 2, 6], DType::F32, 1, device)?;
    refused(ops::rope_in_place(&mut other, 1, &table, 0, "x"), "the table is for head_dim 8; make one for 6")
}

/// Each pair as one complex number, turned.
fn rotate(x: &[f64], [sequence, heads, dim]: [usize; 3], start: usize, base: f64) -> Vec<f64> {
    let mut y = vec![0.0; x.len()];
    for at in 0..x.len() {
        let (token, c) = (at / dim / heads, at % dim);
        let j = c % (dim / 2);
        let angle = (start + token % sequence) as f64 * base.powf(-2.0 * j as f64 / dim as f64);
        let (re, im) = (x[at - c + j], x[at - c + j + dim / 2]);
        let turned = [re * angle.cos() - im * angle.sin(), re * angle.sin() + im * angle.cos()];
        y[at] = turned[usize::from(c >= dim / 2)];
    }
    y
}

fn matches_the_oracle(device: &Device) -> Outcome {
    let shapes = [
        [1, 1, 1, 2],
        [0, 3, 2, 4],
        [2, 15, 3, 6],
        [1, 16, 4, 32],
        [2, 17, 1, 10],
        [1, 131, 5, 62],
        [3, 2, 1, 20_000],
    ];
    for (base, shape) in shapes.into_iter().flat_map(|shape| [(10_000.0, shape), (500.0, shape)]) {
        let [_, sequence, heads, dim] = shape;
        for (dtype, start) in FLOATS.into_iter().flat_map(|dtype| [(dtype, 0), (dtype, 37)]) {
            let table = RopeTable::new(start + sequence, dim, base, device)?;
            let x = normal(shape, dtype, 1, device)?;
            let want = rotate(&f64s(&x)?, [sequence, heads, dim], start, base);
            let y = ops::rope(&x, &table, start)?;
            close(&format!("{dtype} {shape:?} {start}"), &y.to_f32_vec()?, &want, dim, tolerance(dtype))?;
        }
    }
    Ok(())
}

/// So many tokens, heads or sequences of one pair.
fn around_2_16(device: &Device, dtype: DType) -> Outcome {
    let [below, even, above] = AROUND_2_16;
    for shape in [[1, below, 1, 2], [1, 1, even, 2], [above, 1, 1, 2]] {
        let [_, sequence, heads, dim] = shape;
        let table = RopeTable::new(sequence + 1, dim, 10_000.0, device)?;
        let x = normal(shape, dtype, 1, device)?;
        let want = rotate(&f64s(&x)?, [sequence, heads, dim], 1, 10_000.0);
        let y = ops::rope(&x, &table, 1)?;
        close(&format!("{shape:?}"), &y.to_f32_vec()?, &want, dim, tolerance(dtype))?;
    }
    Ok(())
}

/// One in each head: its pair alone feels it. From position 0, whose sine is 0, and from a later one.
fn special_values(device: &Device, dtype: DType) -> Outcome {
    let specials = specials();
    for (dim, start) in [(6, 0), (16, 3), (48, 0)] {
        let (sequence, heads) = (specials.len() / 2, 2);
        let values = special_rows(&specials, dim, 5);
        let shape = [1, sequence, heads, dim];
        let what = format!("{dtype} {shape:?} from {start}");
        let turned = |device: &Device| -> Result<[Tensor; 2]> {
            let table = RopeTable::new(start + sequence, dim, 10_000.0, device)?;
            let x = tensor(values.clone(), shape, dtype, device)?;
            Ok([ops::rope(&x, &table, start)?, ops::rope_backward(&x, &table, start)?])
        };
        same_as_cpu(&what, device, |device| {
            turned(device)?.iter().map(|y| Ok(Got::Numbers(quiet(&y.to_f32_vec()?)))).collect()
        })?;
        let x = f64s(&tensor(values.clone(), shape, dtype, device)?)?;
        let want = rounded(rotate(&x, [sequence, heads, dim], start, 10_000.0), dtype)?;
        close(&what, &turned(device)?[0].to_f32_vec()?, &want, dim, tolerance(dtype))?;
    }
    Ok(())
}

/// A half's result is f32's, rounded: to the bit, in vectors and one by one.
fn halves_are_rounded_once(device: &Device) -> Outcome {
    for (dim, dtype) in [2, 6, 16, 48].into_iter().flat_map(|dim| FLOATS.map(|dtype| (dim, dtype))) {
        let table = RopeTable::new(40, dim, 10_000.0, device)?;
        let x = normal([1, 37, 3, dim], dtype, 4, device)?;
        let wide = ops::cast(&x, DType::F32)?;
        for (y, exact) in [
            (ops::rope(&x, &table, 3)?, ops::rope(&wide, &table, 3)?),
            (ops::rope_backward(&x, &table, 3)?, ops::rope_backward(&wide, &table, 3)?),
        ] {
            let want = ops::cast(&exact, dtype)?.to_f32_vec()?;
            same(&format!("{dtype} {dim}"), &y.to_f32_vec()?, &want, dim)?;
        }
    }
    Ok(())
}

fn backward_is_the_transpose(device: &Device) -> Outcome {
    let shape = [2, 3, 2, 6];
    let table = RopeTable::new(8, 6, 10_000.0, device)?;
    let (x, dy) = (normal(shape, DType::F32, 1, device)?, normal(shape, DType::F32, 2, device)?);
    let dy_values = f64s(&dy)?;
    let loss = |x: &[f64]| differences::inner(&dy_values, &rotate(x, [3, 2, 6], 5, 10_000.0));
    let want = differences::gradient(loss, &f64s(&x)?);
    let dx = ops::rope_backward(&dy, &table, 5)?;
    close("dx", &dx.to_vec::<f32>()?, &want, 6, tolerance(DType::F32))
}

fn norms_and_the_way_back(device: &Device) -> Outcome {
    let shapes = (1..40usize, 1..4usize, 1..40usize, 0..5000usize, any::<u64>());
    let mut runner = TestRunner::new(Config { failure_persistence: None, cases: 48, ..Config::default() });
    runner.run(&shapes, |(sequence, heads, half, start, seed)| {
        let turn = || {
            let table = RopeTable::new(start + sequence, 2 * half, 10_000.0, device)?;
            let x = normal([1, sequence, heads, 2 * half], DType::F32, seed, device)?;
            let y = ops::rope(&x, &table, start)?;
            Ok::<_, fp8_kernels::Error>([
                f64s(&x)?,
                f64s(&y)?,
                f64s(&ops::rope_backward(&y, &table, start)?)?,
            ])
        };
        let [x, y, back] = turn()?;
        prop_assert!(differences::distance(&x, &back) < 2e-6);
        for (x, y) in x.chunks(2 * half).zip(y.chunks(2 * half)) {
            let (x, y) = (differences::inner(x, x), differences::inner(y, y));
            prop_assert!((x - y).abs() <= 1e-6 * x);
        }
        Ok(())
    })?;
    Ok(())
}

fn a_start_is_an_offset(device: &Device) -> Outcome {
    let table = RopeTable::new(10, 8, 10_000.0, device)?;
    let x = normal([1, 10, 2, 8], DType::F32, 1, device)?;
    let whole = ops::rope(&x, &table, 0)?.to_vec::<f32>()?;
    let tail = Tensor::from_vec(x.to_vec::<f32>()?[4 * 16..].to_vec(), [1, 6, 2, 8], device)?;
    same("tokens 4..10", &ops::rope(&tail, &table, 4)?.to_vec::<f32>()?, &whole[4 * 16..], 16)?;
    same("position 0 stays", &whole[..16], &x.to_vec::<f32>()?[..16], 16)
}

/// Frequencies in terms of wavelengths and of indices, as transformers writes them.
fn scaled_frequencies(device: &Device) -> Outcome {
    let (dim, base, length) = (32usize, 10_000f64, 64usize);
    let plain = |j: usize| 1.0 / base.powf((2 * j) as f64 / dim as f64);
    let wavelength = |j: usize| std::f64::consts::TAU / plain(j);
    let llama3 = |j: usize| {
        let (factor, low, high, old) = (8.0, 1.0, 4.0, length as f64);
        let smooth = (old / wavelength(j) - low) / (high - low);
        match wavelength(j) {
            w if w > old / low => plain(j) / factor,
            w if w < old / high => plain(j),
            _ => (1.0 - smooth) * plain(j) / factor + smooth * plain(j),
        }
    };
    let yarn = |j: usize, truncate: bool| {
        let index = |turns: f64| {
            let ratio = length as f64 / (turns * 2.0 * std::f64::consts::PI);
            dim as f64 * ratio.ln() / (2.0 * base.ln())
        };
        let (mut low, mut high) = (index(32.0), index(1.0));
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let ramp = ((j as f64 - low.max(0.0)) / (high.min(31.0) - low.max(0.0))).clamp(0.0, 1.0);
        plain(j) / 4.0 * ramp + plain(j) * (1.0 - ramp)
    };
    let yarn_of = |truncate, attention_factor| RopeScaling::Yarn {
        factor: 4.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_max_position: length,
        attention_factor,
        truncate,
    };
    let of_llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position: length,
    };
    type Frequency<'a> = &'a dyn Fn(usize) -> f64;
    let all: [(&str, RopeScaling, Frequency<'_>, f64); 5] = [
        ("none", RopeScaling::None, &plain, 1.0),
        ("linear", RopeScaling::Linear { factor: 4.0 }, &|j| plain(j) / 4.0, 1.0),
        ("llama3", of_llama3, &llama3, 1.0),
        ("yarn", yarn_of(true, 1.25), &|j| yarn(j, true), 1.25),
        ("yarn, not truncated", yarn_of(false, 1.0), &|j| yarn(j, false), 1.0),
    ];
    for (what, scaling, frequency, factor) in all {
        let table = RopeTable::with_scaling(100, dim, base, scaling, device)?;
        for (values, f) in [(table.cos(), f64::cos as fn(f64) -> f64), (table.sin(), f64::sin)] {
            let angles = (0..100).flat_map(|position| (0..dim / 2).map(move |j| (position, j)));
            let want: Vec<f64> = angles.map(|(p, j)| factor * f(f64::from(p) * frequency(j))).collect();
            close(what, &values.to_vec::<f32>()?, &want, dim / 2, [0.0, 2e-7])?;
        }
    }
    Ok(())
}

fn refuses_scalings(device: &Device) -> Outcome {
    let table = |base, scaling| RopeTable::with_scaling(4, 8, base, scaling, device);
    let linear = |factor| table(10_000.0, RopeScaling::Linear { factor });
    refused(linear(0.0), "rope: factor = 0: expected a finite number greater than 0")?;
    refused(linear(f64::NAN), "factor = NaN")?;
    let llama3 = |low_freq_factor, high_freq_factor, original_max_position| RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor,
        high_freq_factor,
        original_max_position,
    };
    refused(table(1e4, llama3(4.0, 4.0, 8)), "high_freq_factor = 4: expected greater than low_freq_factor")?;
    refused(table(1e4, llama3(1.0, 4.0, 0)), "original_max_position = 0")?;
    let yarn = |beta_fast, beta_slow, attention_factor| RopeScaling::Yarn {
        factor: 4.0,
        beta_fast,
        beta_slow,
        original_max_position: 8,
        attention_factor,
        truncate: true,
    };
    refused(table(1e4, yarn(1.0, 2.0, 1.0)), "beta_fast = 1: expected greater than beta_slow, which is 2")?;
    refused(table(1e4, yarn(32.0, 1.0, f64::INFINITY)), "attention_factor = inf")?;
    refused(table(1.0, yarn(32.0, 1.0, 1.0)), "base = 1: expected greater than")
}

fn same_for_any_threads(device: &Device) -> Outcome {
    let table = RopeTable::new(300, 32, 10_000.0, device)?;
    let x = normal([2, 300, 5, 32], DType::BF16, 1, device)?;
    same_bits("rope", || Ok(vec![ops::rope(&x, &table, 0)?, ops::rope_backward(&x, &table, 0)?]))
}

fn refuses(device: &Device) -> Outcome {
    refused(RopeTable::new(4, 7, 10_000.0, device), "rope: head_dim = 7: pairs need an even head_dim")?;
    refused(RopeTable::new(4, 0, 10_000.0, device), "head_dim = 0")?;
    refused(RopeTable::new(4, 8, 0.0, device), "base = 0: give a finite base greater than 0")?;
    refused(RopeTable::new(4, 8, f64::NAN, device), "base = NaN")?;
    let table = RopeTable::new(4, 8, 10_000.0, device)?;
    let make = |shape: [usize; 4]| data::normal(shape, DType::F32, 1, device);
    refused(ops::rope(&make([1, 4, 1, 6])?, &table, 0), "the table is for head_dim 8; make one for 6")?;
    refused(ops::rope(&make([1, 4, 1, 8])?, &table, 1), "positions 1..5 go beyond the table's 4")?;
    refused(ops::rope(&make([1, 4, 1, 8])?, &table, usize::MAX), "go beyond the table's 4")?;
    refused(
        ops::rope_backward(&normal([4, 8], DType::F32, 1, device)?, &table, 0),
        "rope_backward: shape [4, 8]",
    )?;
    let bytes = Tensor::zeros([1, 4, 1, 8], DType::U8, device)?;
    ensure(ops::rope(&bytes, &table, 0).is_err(), || "accepted u8".to_owned())
}
