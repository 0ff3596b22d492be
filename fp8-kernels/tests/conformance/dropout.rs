use super::case::{Outcome, cases};
use super::compare::{ensure, equal, refused, same, same_numbers};
use super::data::{AROUND_2_16, FLOATS, normal, specials, tensor};
use super::threads::same_bits;
use crate::oracle::philox::philox;
use fp8_kernels::ops::{Dropout, DropoutKey};
use fp8_kernels::{DType, Device, DropoutDraw, DropoutState, Tensor, ops};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

cases![
    the_oracle_gives_published_numbers,
    matches_the_oracle,
    around_2_16: Dtypes,
    special_values: Dtypes,
    the_threshold_itself_is_kept: Dtypes,
    rounds_once,
    keeps_what_the_probability_says,
    offsets_continue_the_stream,
    zero_probability_changes_nothing,
    dropped_infinities_are_zero,
    same_for_any_threads,
    adds_to_a_residual: Dtypes,
    paths_straddle_vectors: Dtypes,
    states_are_split_mix,
    draws_on_the_device,
    parts_have_the_masks_of_the_whole: Dtypes,
    refuses,
];

const SIZES: [usize; 9] = [0, 1, 3, 4, 15, 16, 17, 101, 2 * 16_384 + 3];

/// Known-answer vectors of the Random123 distribution.
fn the_oracle_gives_published_numbers(_: &Device) -> Outcome {
    equal("zeros", philox(0, 0), [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8])
}

fn kept(i: usize, p: f32, key: DropoutKey) -> bool {
    let random = philox(key.offset.wrapping_add(i as u64 / 4), key.seed)[i % 4];
    f64::from(random) >= (f64::from(p) * 2f64.powi(32)).floor()
}

fn matches_the_oracle(device: &Device) -> Outcome {
    let keys = [(0, 0), (0x0123_4567_89AB_CDEF, 1 << 40), (u64::MAX, u64::MAX - 1)];
    for (len, (seed, offset)) in SIZES.into_iter().flat_map(|len| keys.map(|key| (len, key))) {
        let key = DropoutKey { seed, offset };
        for p in [1e-9, 0.1, 0.5, 0.9, 1.0 - f32::EPSILON] {
            let x = normal([len], DType::F32, 7, device)?;
            let values = x.to_vec::<f32>()?;
            let element = |(i, &v): (usize, &f32)| if kept(i, p, key) { v * (1.0 / (1.0 - p)) } else { 0.0 };
            let want: Vec<f32> = values.iter().enumerate().map(element).collect();
            let what = format!("{len} elements, p {p}, {key:?}");
            same(&what, &ops::dropout(&x, p, key)?.to_vec::<f32>()?, &want, len)?;
            same(&what, &ops::dropout_backward(&x, p, key)?.to_vec::<f32>()?, &want, len)?;
        }
    }
    Ok(())
}

/// The elements that the oracle keeps, times `1 / (1 − p)` and rounded; zeros for the others.
fn check(what: &str, x: &Tensor, p: f32, key: DropoutKey) -> Outcome {
    let element = |(i, v): (usize, f32)| if kept(i, p, key) { v * (1.0 / (1.0 - p)) } else { 0.0 };
    let want = x.to_f32_vec()?.into_iter().enumerate().map(element).collect();
    let want = tensor(want, *x.shape(), x.dtype(), &Device::cpu())?.to_f32_vec()?;
    for y in [ops::dropout(x, p, key)?, ops::dropout_backward(x, p, key)?] {
        same_numbers(what, &y.to_f32_vec()?, &want, want.len())?;
    }
    Ok(())
}

fn around_2_16(device: &Device, dtype: DType) -> Outcome {
    for len in AROUND_2_16 {
        let x = normal([len], dtype, 7, device)?;
        check(&format!("{len} elements"), &x, 0.3, DropoutKey { seed: 9, offset: 4 })?;
    }
    Ok(())
}

/// Kept or dropped, in whole vectors and rests.
fn special_values(device: &Device, dtype: DType) -> Outcome {
    let specials = specials();
    for (len, p) in (0..8).flat_map(|rest| [0.0, 0.4, 0.9].map(|p| (2 * specials.len() + rest, p))) {
        let values = (0..len).map(|i| specials[i % specials.len()]).collect();
        let x = tensor(values, [len], dtype, device)?;
        check(&format!("{len} elements, p {p}"), &x, p, DropoutKey { seed: len as u64, offset: 1 })?;
    }
    Ok(())
}

/// Random numbers of 24 bits are a probability's threshold exactly: their elements are kept, in each place of eight
/// neighbours and of the last few; and the entries of a path, whether an element or a thread's eight.
fn the_threshold_itself_is_kept(device: &Device, dtype: DType) -> Outcome {
    let key = DropoutKey { seed: 5, offset: 0 };
    let ones = |shape: [usize; 2]| Tensor::full(1.0, shape, dtype, device);
    let mut found = [[false; 2]; 8];
    for i in 0..20_000usize {
        let random = philox(i as u64 / 4, key.seed)[i % 4];
        let (place, p) = (i % 8, random as f32 / 2f32.powi(32));
        if random.trailing_zeros() < 8 || found[place] == [true; 2] {
            continue;
        }
        let mask = Dropout { p, draw: key.into() };
        // Whole neighbours, or the element as the last one.
        for (found, len) in found[place].iter_mut().zip([i - place + 8, i + 1]) {
            let kept = |name: &str, y: Tensor, at: usize| {
                ensure(y.to_f32_vec()?[at] != 0.0, || format!("{name}: element {at} of {len}, p {p}"))
            };
            kept("dropout", ops::dropout(&ones([len, 1])?, p, key)?, i)?;
            kept("hidden", ops::dropout_add_backward(&ones([len, 1])?, Some(&mask), None)?, i)?;
            kept("path", ops::dropout_add_backward(&ones([len, 1])?, None, Some(&mask))?, i)?;
            kept("wide path", ops::dropout_add_backward(&ones([len, 8])?, None, Some(&mask))?, 8 * i)?;
            *found = true;
        }
    }
    ensure(found == [[true; 2]; 8], || format!("places {found:?}"))
}

fn rounds_once(device: &Device) -> Outcome {
    let key = DropoutKey { seed: 3, offset: 5 };
    let lens = (1..=17).chain([7 * 143, 5000]);
    for (len, dtype) in lens.flat_map(|len| FLOATS.map(|dtype| (len, dtype))) {
        let x = normal([len], dtype, 2, device)?;
        let wide = ops::cast(&x, DType::F32)?;
        let y = ops::dropout(&x, 0.3, key)?;
        let want = ops::cast(&ops::dropout(&wide, 0.3, key)?, dtype)?;
        equal("dtype", y.dtype(), dtype)?;
        same(&format!("{len} of {dtype}"), &y.to_f32_vec()?, &want.to_f32_vec()?, len)?;
    }
    Ok(())
}

fn keeps_what_the_probability_says(device: &Device) -> Outcome {
    let len = 40_000;
    let x = Tensor::full(1.0, [len], DType::F32, device)?;
    let mut runner = TestRunner::new(Config { failure_persistence: None, cases: 32, ..Config::default() });
    runner.run(&(0.0..0.99f32, any::<u64>(), any::<u64>()), |(p, seed, offset)| {
        let key = DropoutKey { seed, offset };
        let y = ops::dropout(&x, p, key).and_then(|y| y.to_vec::<f32>())?;
        let kept = y.iter().filter(|&&v| v != 0.0).count() as f64;
        let want = f64::from(1.0 - p) * len as f64;
        let deviation = (want * f64::from(p)).sqrt();
        prop_assert!((kept - want).abs() <= 6.0 * deviation + 1.0, "kept {kept}, want {want}");
        let dx = ops::dropout_backward(&x, p, key).and_then(|dx| dx.to_vec::<f32>())?;
        prop_assert_eq!(y, dx);
        Ok(())
    })?;
    Ok(())
}

fn offsets_continue_the_stream(device: &Device) -> Outcome {
    let x = Tensor::full(1.0, [400], DType::F32, device)?;
    let tail = Tensor::full(1.0, [300], DType::F32, device)?;
    let at = |offset| DropoutKey { seed: 11, offset };
    let whole = ops::dropout(&x, 0.5, at(9))?.to_vec::<f32>()?;
    same("from element 100", &ops::dropout(&tail, 0.5, at(9 + 25))?.to_vec::<f32>()?, &whole[100..], 300)?;
    let other = ops::dropout(&x, 0.5, DropoutKey { seed: 12, offset: 9 })?.to_vec::<f32>()?;
    ensure(other != whole, || "two seeds give one mask".to_owned())
}

fn zero_probability_changes_nothing(device: &Device) -> Outcome {
    let x = normal([33], DType::BF16, 1, device)?;
    let y = ops::dropout(&x, 0.0, DropoutKey { seed: 0, offset: 0 })?;
    same("p = 0", &y.to_f32_vec()?, &x.to_f32_vec()?, 33)
}

fn dropped_infinities_are_zero(device: &Device) -> Outcome {
    let key = DropoutKey { seed: 0, offset: 0 };
    let x = tensor([f32::INFINITY, f32::NAN].repeat(50), [100], DType::F32, device)?;
    let y = ops::dropout(&x, 0.5, key)?.to_vec::<f32>()?;
    let wrong = (0..100).find(|&i| kept(i, 0.5, key) == (y[i] == 0.0));
    ensure(wrong.is_none(), || format!("element {wrong:?}"))
}

fn same_for_any_threads(device: &Device) -> Outcome {
    let x = normal([50_001], DType::F32, 1, device)?;
    same_bits("dropout", || Ok(vec![ops::dropout(&x, 0.2, DropoutKey { seed: 1, offset: 2 })?]))
}

/// The sum and its backward, with each mask or both, of `[entries, per]` elements.
fn check_add([entries, per]: [usize; 2], dtypes: [DType; 2], device: &Device) -> Outcome {
    let [residual, x] =
        [(dtypes[0], 1), (dtypes[1], 2)].map(|(dtype, seed)| normal([entries, per], dtype, seed, device));
    let (residual, x) = (residual?, x?);
    let keys = [DropoutKey { seed: 3, offset: 1 }, DropoutKey { seed: 4, offset: u64::MAX }];
    let dropouts = [Dropout { p: 0.3, draw: keys[0].into() }, Dropout { p: 0.5, draw: keys[1].into() }];
    for which in [[true, false], [false, true], [true, true]] {
        let given = [0, 1].map(|i| which[i].then_some(&dropouts[i]));
        let dropped = |i: usize, mut v: f32| {
            if which[0] {
                v = if kept(i, 0.3, keys[0]) { v * (1.0 / (1.0 - 0.3f32)) } else { 0.0 };
            }
            if which[1] {
                v = if kept(i / per, 0.5, keys[1]) { v * 2.0 } else { 0.0 };
            }
            v
        };
        let rounded =
            |values: Vec<f32>, dtype| tensor(values, [entries, per], dtype, &Device::cpu())?.to_f32_vec();
        let (values, added) = (x.to_f32_vec()?, residual.to_f32_vec()?);
        let alone: Vec<f32> = values.iter().enumerate().map(|(i, &v)| dropped(i, v)).collect();
        let sums = alone.iter().zip(&added).map(|(v, r)| r + v).collect();
        let what = format!("[{entries}, {per}], {which:?}");
        let y = ops::dropout_add(&residual, &x, given[0], given[1])?;
        equal("dtype", y.dtype(), dtypes[0])?;
        same_numbers(&what, &y.to_f32_vec()?, &rounded(sums, dtypes[0])?, per.max(1))?;
        let dx = ops::dropout_add_backward(&x, given[0], given[1])?;
        same_numbers(&what, &dx.to_f32_vec()?, &rounded(alone, dtypes[1])?, per.max(1))?;
    }
    Ok(())
}

fn adds_to_a_residual(device: &Device, dtype: DType) -> Outcome {
    for shape in [[3, 64], [1, 0], [0, 5], [5, 8], [2, 1000]] {
        check_add(shape, [dtype; 2], device)?;
    }
    check_add([4, 16], [dtype, DType::F32], device)?;
    let (x, none) = (
        normal([3, 4], dtype, 1, device)?,
        Dropout { p: 0.0, draw: DropoutKey { seed: 0, offset: 0 }.into() },
    );
    let y = ops::dropout_add(&x, &x, None, Some(&none))?.to_f32_vec()?;
    same_numbers("nothing dropped", &y, &ops::add(&x, &x)?.to_f32_vec()?, 4)?;
    same_numbers("dx", &ops::dropout_add_backward(&x, Some(&none), None)?.to_f32_vec()?, &x.to_f32_vec()?, 4)
}

/// Entries that begin inside a thread's eight elements, of fewer and of more than those: with every pair of types, since such
/// elements go one by one.
fn paths_straddle_vectors(device: &Device, dtype: DType) -> Outcome {
    for shape in [[40, 1], [33, 3], [20, 7], [9, 9], [7, 15], [5, 17], [3, 101]] {
        check_add(shape, [dtype; 2], device)?;
    }
    FLOATS.into_iter().try_for_each(|x| check_add([7, 15], [dtype, x], device))
}

/// Published numbers of SplitMix64, with seed 0, and what a state counts.
fn states_are_split_mix(device: &Device) -> Outcome {
    let state = DropoutState::new(0, device)?;
    for seed in [0xE220_A839_7B1D_CDAF, 0x6E78_9E6A_A1B9_65F4, 0x06C4_5D18_8009_454F] {
        equal("key", state.draw()?.read()?, DropoutKey { seed, offset: 0 })?;
    }
    equal("state", state.read()?, (0, 3))?;
    state.set(7, u64::MAX)?;
    let last = state.draw()?.read()?;
    equal("state", state.read()?, (7, 0))?;
    let other = DropoutState::new(7u64.wrapping_sub(0x9E37_79B9_7F4A_7C15), device)?;
    equal("key", other.draw()?.read()?, last)
}

fn draws_on_the_device(device: &Device) -> Outcome {
    let (x, state) = (Tensor::full(1.0, [1000], DType::F32, device)?, DropoutState::new(9, device)?);
    let draw = state.draw()?;
    for mask in [0, 1, (1 << 20) - 1] {
        let key = draw.mask(mask).read()?;
        equal("offset", key.offset, mask << 44)?;
        let y = ops::dropout(&x, 0.4, draw.mask(mask))?;
        same("y", &y.to_vec::<f32>()?, &ops::dropout(&x, 0.4, key)?.to_vec::<f32>()?, 1000)?;
        check("by the oracle", &x, 0.4, key)?;
        let hidden = Dropout { p: 0.4, draw: draw.mask(mask) };
        let dx = ops::dropout_add_backward(&x, Some(&hidden), None)?;
        same("dx", &dx.to_vec::<f32>()?, &y.to_vec::<f32>()?, 1000)?;
    }
    let next = ops::dropout(&x, 0.4, state.draw()?)?.to_vec::<f32>()?;
    ensure(next != ops::dropout(&x, 0.4, &draw)?.to_vec::<f32>()?, || "two steps have one mask".to_owned())?;
    ensure(draw == draw.mask(0) && draw != draw.mask(1), || "equal draws".to_owned())
}

/// Rows of a tensor, drawn by themselves: with a key on the host and on the device, and behind a first mask.
fn parts_have_the_masks_of_the_whole(device: &Device, dtype: DType) -> Outcome {
    let (rows, cols) = (40, 20);
    let (x, residual) = (normal([rows, cols], dtype, 1, device)?, normal([rows, cols], dtype, 2, device)?);
    let on_host = DropoutDraw::from(DropoutKey { seed: 7, offset: u64::MAX - 40 });
    for draw in [on_host, DropoutState::new(3, device)?.draw()?.mask(5)] {
        let hidden = |draw| Dropout { p: 0.3, draw };
        let whole = ops::dropout(&x, 0.3, &draw)?;
        let whole_sum = ops::dropout_add(&residual, &x, Some(&hidden(draw.clone())), None)?;
        // The last one as a part of a part.
        for (first, end, draw) in
            [(0, 13, draw.clone()), (13, 14, draw.at(13 * 20)?), (14, 40, draw.at(4 * 20)?.at(10 * 20)?)]
        {
            let [x, residual] = [&x, &residual].map(|tensor| ops::rows(tensor, first..end));
            let (x, residual) = (x?, residual?);
            let what = format!("rows {first}..{end}");
            let check = |y: &Tensor, whole: &Tensor| {
                same(&what, &y.to_f32_vec()?, &ops::rows(whole, first..end)?.to_f32_vec()?, cols)
            };
            check(&ops::dropout(&x, 0.3, &draw)?, &whole)?;
            check(&ops::dropout_backward(&x, 0.3, &draw)?, &whole)?;
            check(&ops::dropout_add(&residual, &x, Some(&hidden(draw)), None)?, &whole_sum)?;
        }
        // The same for whole entries: of a path, element b is that of entry b.
        let path = |draw| Dropout { p: 0.5, draw };
        let whole = ops::dropout_add_backward(&x, None, Some(&path(draw.clone())))?;
        let part = ops::dropout_add_backward(&ops::rows(&x, 8..40)?, None, Some(&path(draw.at(8)?)))?;
        same("path", &part.to_f32_vec()?, &ops::rows(&whole, 8..40)?.to_f32_vec()?, cols)?;
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    let (x, key) = (normal([4], DType::F32, 1, device)?, DropoutKey { seed: 0, offset: 0 });
    for (p, wording) in [(1.0, "dropout: p = 1: "), (-0.1, "p = -0.1"), (f32::NAN, "p = NaN")] {
        refused(ops::dropout(&x, p, key), wording)?;
    }
    refused(
        ops::dropout_backward(&x, 2.0, key),
        "dropout_backward: p = 2: a drop probability is at least 0",
    )?;
    for element in [1, 2, 3, 4 * 7 + 2, u64::MAX] {
        refused(
            DropoutDraw::from(key).at(element),
            &format!("dropout: element = {element}: a part of a mask begins"),
        )?;
    }
    let sure = Dropout { p: 1.0, draw: key.into() };
    refused(ops::dropout_add(&x, &x, Some(&sure), None), "dropout_add: hidden.p = 1: a drop probability")?;
    refused(ops::dropout_add(&x, &x, None, Some(&sure)), "dropout_add: path.p = 1: a drop probability")?;
    refused(ops::dropout_add_backward(&x, Some(&sure), None), "dropout_add_backward: hidden.p = 1")?;
    let other = normal([5], DType::F32, 1, device)?;
    refused(ops::dropout_add(&x, &other, None, None), "residual and x: got [4] and [5]")?;
    refused(ops::dropout(&Tensor::zeros([4], DType::I32, device)?, 0.5, key), "x has dtype i32")
}
