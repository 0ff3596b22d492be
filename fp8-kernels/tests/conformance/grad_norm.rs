use super::case::{Outcome, cases};
use super::compare::{close, ensure, equal, refused};
use super::data::{AROUND_2_16, FLOATS, Random, extremes, f64s, normal, specials, tensor, tolerance};
use super::edge::{four_squares, to_the_edge};
use super::threads::same_bits;
use fp8_kernels::{DType, Device, Tensor, ops};

cases![
    matches_the_oracle,
    needles: Dtypes,
    sizes_of_all_classes_meet,
    small_tensors_count_beside_a_large_one,
    no_bit_of_a_sum_is_lost,
    no_bit_is_lost_beside_what_follows: Dtypes,
    large_and_small_values_fit,
    around_2_16: Dtypes,
    special_values: Dtypes,
    infinity_and_nan_come_through,
    same_for_any_threads,
    refuses,
];

fn matches_the_oracle(device: &Device) -> Outcome {
    for dtype in FLOATS {
        let lens = [1, 2, 3, 4, 5, 6, 7, 8, 15, 16, 17, 0, 101, 50_021];
        let grads = lens.map(|len| normal([len], dtype, len as u64, device));
        let grads: Vec<Tensor> = grads.into_iter().collect::<Result<_, _>>()?;
        let mut sum = 0.0;
        for (i, grad) in grads.iter().enumerate() {
            sum += f64s(grad)?.iter().map(|v| v * v).sum::<f64>();
            let norm = ops::grad_norm(&grads[..=i].iter().collect::<Vec<_>>())?;
            let what = format!("{dtype}, {} tensors", i + 1);
            close(&what, &[norm.item()?], &[sum.sqrt()], 1, tolerance(DType::F32))?;
        }
    }
    Ok(())
}

/// Sizes whose squares overflow or vanish, and the ends of those whose squares do not, in a whole tile.
const EXTREMES: [(f32, usize); 5] = [
    (1e30, 16_384),
    (1e-30, 16_384),
    (1.0 / (1u64 << 45) as f32, 16_384),
    (1.0 / (1u64 << 45) as f32, 16_383),
    ((1u64 << 40) as f32, 16_384),
];

/// One value among zeros, in every place of a group of neighbours, every group of a tile, and many lanes and warps.
fn needles(device: &Device, dtype: DType) -> Outcome {
    for place in 0..64 {
        let (group, thread) = (place / 8, place * 37 % 255);
        let at = 8 * (group * 256 + thread) + place % 8;
        let extremes: &[(f32, usize)] = if dtype == DType::F16 { &[] } else { &EXTREMES };
        // A whole tile, and one that is cut.
        for &(size, len) in [(3.0, 16_384), (3.0, 16_383)].iter().chain(extremes) {
            let mut values = vec![0.0; len];
            values[at] = -size;
            let grad = tensor(values, [len], dtype, device)?;
            let want = f64s(&grad)?[at].abs();
            let what = format!("{dtype}, {size:e} at {at} of {len}");
            close(&what, &[ops::grad_norm(&[&grad])?.item()?], &[want], 1, [2e-7, 0.0])?;
        }
    }
    Ok(())
}

/// Values around the sizes where squares would overflow or vanish, alone, side by side and far apart.
fn sizes_of_all_classes_meet(device: &Device) -> Outcome {
    let power = |k: i32| 2f32.powi(k);
    let exponents = [-149, -100, -64, -46, -45, 0, 39, 40, 41, 64, 126];
    for (low, high) in exponents.iter().flat_map(|&low| exponents.iter().map(move |&high| (low, high))) {
        for apart in [1, 8, 5000] {
            let mut values = vec![0.0; 5001];
            values[0] = power(low);
            values[apart] = 1.5 * power(high);
            let grad = Tensor::from_vec(values, [5001], device)?;
            let want = f64s(&grad)?.iter().map(|v| v * v).sum::<f64>().sqrt();
            let what = format!("2^{low} and 1.5 · 2^{high}, {apart} apart");
            close(&what, &[ops::grad_norm(&[&grad])?.item()?], &[want], 1, [3e-7, 0.0])?;
        }
    }
    Ok(())
}

/// Tensors of one value: a sum in f32 would lose all but the large one, wherever that stands.
fn small_tensors_count_beside_a_large_one(device: &Device) -> Outcome {
    let places = [0, 34, 240, 259].map(|place| (0, place));
    for (exponent, place) in places.into_iter().chain([(60, 34), (-60, 240)]) {
        let unit = 2f32.powi(exponent);
        let value = |i: usize| if i == place { 4096.0 * unit } else { 0.5 * unit };
        let grads: Vec<Tensor> =
            (0..260).map(|i| Tensor::from_vec(vec![value(i)], [1], device)).collect::<Result<_, _>>()?;
        let want = (0..260).map(|i| f64::from(value(i)).powi(2)).sum::<f64>().sqrt();
        let got = ops::grad_norm(&grads.iter().collect::<Vec<_>>())?.item()?;
        close(&format!("2^{exponent}, tensor {place}"), &[got], &[want], 1, [2e-7, 0.0])?;
    }
    Ok(())
}

/// Squares of integers, whose sum is known exactly and almost halfway between two numbers of f32. One tensor, whose threads
/// have eight groups of eight each, and as many small ones as two rounds of the last sum take.
fn no_bit_of_a_sum_is_lost(device: &Device) -> Outcome {
    let edges = [0, 60, -60].into_iter().flat_map(|exponent| [(exponent, true), (exponent, false)]);
    let one = edges.clone().cycle().take(12).map(|edge| (edge, vec![16_384]));
    let many = edges.cycle().take(6).map(|edge| (edge, vec![24; 261]));
    for (seed, ((exponent, above), lens)) in (0..).zip(one.chain(many)) {
        let mut random = Random::new(seed);
        let mut values: Vec<i64> = (0..lens.iter().sum()).map(|_| (random.bits() % 1449) as i64).collect();
        // Four zeros make room for what is added.
        let room = values.len() - 8..values.len() - 4;
        values[room.clone()].fill(0);
        let sum: i64 = values.iter().map(|v| v * v).sum();
        let step = 1i64 << (63 - 23 - sum.leading_zeros());
        let (mut added, back) = (to_the_edge(sum, above), if above { -2 } else { 2 });
        let root = |sum: i64| (sum as f32).sqrt();
        // The square root must tell the neighbours apart, and be rounded as if from the exact sum.
        while root(sum + added) == root(sum + added + back)
            || root(sum + added) != ((sum + added) as f64).sqrt() as f32
        {
            added += step;
        }
        values[room].copy_from_slice(&four_squares(added));
        let unit = 2f32.powi(exponent);
        let mut rest = values.iter().map(|&v| v as f32 * unit);
        let grads: Vec<Tensor> = lens
            .iter()
            .map(|&len| Tensor::from_vec(rest.by_ref().take(len).collect(), [len], device))
            .collect::<Result<_, _>>()?;
        let got = ops::grad_norm(&grads.iter().collect::<Vec<_>>())?.item()?;
        let what = format!("{} tensors, 2^{exponent}, above {above}", lens.len());
        equal(&what, got, root(sum + added) * unit)?;
    }
    Ok(())
}

/// Integers of few digits and many sizes whose squares have this sum.
fn squares(mut sum: i64, digits: u32) -> Vec<i64> {
    let mut found = Vec::new();
    while sum > 0 {
        let root = sum.isqrt();
        let dropped = (root.ilog2() + 1).saturating_sub(digits);
        found.push(root >> dropped << dropped);
        sum -= found[found.len() - 1].pow(2);
    }
    found
}

/// Sums again that are known exactly, of squares that differ by powers of two: what was summed up before has digits that a
/// larger square rounds off. In each class of sizes, whole tiles and cut ones, and many tensors.
fn no_bit_is_lost_beside_what_follows(device: &Device, dtype: DType) -> Outcome {
    // How many digits have an exact square; how many of a sum's last ones may be lost.
    let digits = match dtype {
        DType::BF16 => 8,
        DType::F16 => 11,
        _ => 12,
    };
    const LOST: i64 = 1 << 8;
    let units: &[i32] = if dtype == DType::F16 { &[-12] } else { &[0, 60, -70] };
    let lens = [vec![16_384], vec![16_383], vec![24; 261]];
    let problems = units.iter().flat_map(|&unit| lens.iter().map(move |lens| (unit, lens)));
    let problems = problems.flat_map(|problem| (0..2).map(move |seed| (problem, seed)));
    for ((unit, lens), seed) in problems {
        let len: usize = lens.iter().sum();
        let mut random = Random::new(seed);
        let mut values = vec![0; len];
        // One of each eight neighbours; some groups are free for what is added.
        for group in (0..len / 8).filter(|group| group % 37 != 5) {
            let size = random.bits() % 9;
            values[8 * group + random.bits() as usize % 8] = ((random.bits() % (1 << digits)) << size) as i64;
        }
        let free: Vec<usize> = (0..len / 8).filter(|group| group % 37 == 5).map(|group| 8 * group).collect();
        let sum: i64 = values.iter().map(|v| v * v).sum();
        let step = 1i64 << (63 - 23 - sum.leading_zeros());
        let above = seed % 2 == 0;
        let (mut added, back) = (to_the_edge(sum, above), if above { -2 * LOST } else { 2 * LOST });
        added -= back / 2;
        let root = |sum: i64| (sum as f32).sqrt();
        while added < 0
            || root(sum + added) == root(sum + added + back)
            || root(sum + added) != ((sum + added) as f64).sqrt() as f32
            || squares(added, digits).len() > free.len()
        {
            added += step;
        }
        free.iter().zip(squares(added, digits)).for_each(|(&place, root)| values[place] = root);
        let size = 2f32.powi(unit);
        let mut rest = values.iter().map(|&v| v as f32 * size);
        let grads: Vec<Tensor> = lens
            .iter()
            .map(|&len| tensor(rest.by_ref().take(len).collect(), [len], dtype, device))
            .collect::<Result<_, _>>()?;
        let got = ops::grad_norm(&grads.iter().collect::<Vec<_>>())?.item()?;
        let what = format!("{} tensors of {} values, 2^{unit}, seed {seed}", lens.len(), lens[0]);
        equal(&what, got, root(sum + added) * size)?;
    }
    Ok(())
}

fn large_and_small_values_fit(device: &Device) -> Outcome {
    for (size, want) in [(1e30f32, 1e31f32), (1e-30, 1e-29)] {
        let grad = Tensor::full(size, [100], DType::F32, device)?;
        let got = ops::grad_norm(&[&grad])?.item()?;
        ensure((got / want - 1.0).abs() < 1e-6, || format!("got {got:e}, want {want:e}"))?;
    }
    let most = Tensor::full(f32::MAX, [4], DType::F32, device)?;
    equal("beyond f32", ops::grad_norm(&[&most])?.item()?, f32::INFINITY)?;
    equal("no elements", ops::grad_norm(&[&Tensor::zeros([0], DType::F32, device)?])?.item()?, 0.0)
}

fn around_2_16(device: &Device, dtype: DType) -> Outcome {
    for len in AROUND_2_16 {
        let grad = normal([len], dtype, 3, device)?;
        let want = f64s(&grad)?.iter().map(|v| v * v).sum::<f64>().sqrt();
        close(&format!("{len}"), &[ops::grad_norm(&[&grad])?.item()?], &[want], 1, [2e-7, 0.0])?;
    }
    Ok(())
}

/// Each alone or among ordinary values, in one tensor or in the second of two.
fn special_values(device: &Device, dtype: DType) -> Outcome {
    let few = specials().into_iter().zip([1, 9, 17].into_iter().cycle());
    let many = extremes().into_iter().map(|special| (special, 16_391));
    let others = normal([5], dtype, 1, device)?;
    for (i, (special, len)) in few.chain(many).enumerate() {
        let mut values = Random::new(2).normals(len);
        values[i * 7 % len] = special;
        let grad = tensor(values, [len], dtype, device)?;
        let grads = if i / 2 % 2 == 0 { vec![&grad] } else { vec![&others, &grad] };
        let mut sum = 0.0;
        for grad in &grads {
            sum += f64s(grad)?.iter().map(|v| v * v).sum::<f64>();
        }
        // Beyond f32 it is infinite.
        let want = f64::from(sum.sqrt() as f32);
        let what = format!("{special:e} among {len}, {} tensors", grads.len());
        close(&what, &[ops::grad_norm(&grads)?.item()?], &[want], 1, [3e-7, 0.0])?;
    }
    Ok(())
}

fn infinity_and_nan_come_through(device: &Device) -> Outcome {
    let infinite = tensor(vec![1.0, f32::NEG_INFINITY], [2], DType::F32, device)?;
    let nan = tensor(vec![f32::NAN, 1.0], [2], DType::BF16, device)?;
    equal("infinity", ops::grad_norm(&[&infinite])?.item()?, f32::INFINITY)?;
    ensure(ops::grad_norm(&[&infinite, &nan])?.item()?.is_nan(), || "NaN is lost".to_owned())
}

fn same_for_any_threads(device: &Device) -> Outcome {
    let grads = [normal([300_001], DType::F32, 1, device)?, normal([77_777], DType::F32, 2, device)?];
    same_bits("grad_norm", || Ok(vec![ops::grad_norm(&[&grads[0], &grads[1]])?]))
}

fn refuses(device: &Device) -> Outcome {
    refused(ops::grad_norm(&[]), "grad_norm: grads = []: give at least one tensor")?;
    refused(ops::grad_norm(&[&Tensor::zeros([2], DType::I32, device)?]), "a gradient has dtype i32")
}
