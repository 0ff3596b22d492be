//! Cross-entropy of logits whose vocabulary is cut, against that of the whole: the reductions between the parts are those of the
//! test.

use super::case::{Outcome, cases};
use super::compare::{close, equal, refused, refused_on, same, same_numbers};
use super::data::{extremes, f64s, normal, special_rows, specials, tensor, tolerance};
use super::threads::same_bits;
use crate::oracle::cross_entropy as oracle;
use fp8_kernels::ops::{self, CrossEntropyOptions, CrossEntropyPart, CrossEntropySaved, LossScale, Part};
use fp8_kernels::{DType, Device, Result, Shape, Tensor};

cases![
    parts_match_the_whole: Dtypes,
    one_part_is_the_whole: Dtypes,
    gradients_of_parts_have_the_bits_of_the_whole: Dtypes,
    parts_without_a_finite_logit,
    special_logits: Dtypes,
    ignored_rows_stay_out,
    same_for_any_threads,
    refuses,
];

const IGNORE: i32 = -100;
const OPTIONS: CrossEntropyOptions = CrossEntropyOptions { ignore_index: Some(IGNORE), normalizer: None };

/// Rows, and the columns of each part.
const CUTS: [(usize, &[usize]); 9] = [
    (1, &[1, 1]),
    (9, &[8, 8]),
    (17, &[3, 4, 9]),
    (5, &[0, 7, 1, 0]),
    (33, &[40, 61]),
    (3, &[500, 500, 501]),
    (1100, &[2, 1]),
    (2, &[17_000, 3001]),
    (0, &[4, 4]),
];

fn total(cuts: &[usize]) -> usize {
    cuts.iter().sum()
}

/// Targets in all parts; about one in five is ignored.
fn targets(rows: usize, total: usize, device: &Device) -> Result<Tensor> {
    let target = |row: usize| if row % 5 == 3 { IGNORE } else { (row * 7919 % total) as i32 };
    Tensor::from_vec((0..rows).map(target).collect(), [rows], device)
}

/// The columns of each part, and the part.
fn cut(logits: &Tensor, cuts: &[usize]) -> Result<Vec<(Tensor, Part)>> {
    let mut first = 0;
    let part = |(logits, &len): (Tensor, &usize)| {
        first += len;
        (logits, Part { first: first - len, total: total(cuts) })
    };
    Ok(ops::split(logits, cuts)?.into_iter().zip(cuts).map(part).collect())
}

/// Element by element, as ranks reduce tensors.
fn reduced(tensors: &[Tensor], f: fn(f32, f32) -> f32) -> Result<Tensor> {
    let mut out = tensors[0].to_vec::<f32>()?;
    for tensor in &tensors[1..] {
        out.iter_mut().zip(tensor.to_vec::<f32>()?).for_each(|(out, v)| *out = f(*out, v));
    }
    Tensor::from_vec(out, *tensors[0].shape(), tensors[0].device())
}

/// Computes what each rank returns once both reductions were done.
fn loss(
    parts: &[(Tensor, Part)],
    targets: &Tensor,
    options: &CrossEntropyOptions,
) -> Result<(Tensor, CrossEntropySaved)> {
    let own = |(logits, part): &(Tensor, Part)| ops::cross_entropy_part(logits, targets, *part, options);
    let own: Vec<CrossEntropyPart> = parts.iter().map(own).collect::<Result<_>>()?;
    let maxima: Vec<Tensor> = own.iter().map(|part| part.row_max.clone()).collect();
    let row_max = reduced(&maxima, f32::max)?;
    let sums = own.iter().map(|part| ops::cross_entropy_part_sums(part, &row_max));
    let sums = reduced(&sums.collect::<Result<Vec<_>>>()?, |a, b| a + b)?;
    ops::cross_entropy_of_parts(targets, &row_max, &sums, parts[0].1.total, options)
}

fn gradients(
    parts: &[(Tensor, Part)],
    targets: &Tensor,
    saved: &CrossEntropySaved,
    options: &CrossEntropyOptions,
    scale: f32,
) -> Result<Tensor> {
    let of = |(logits, part): &(Tensor, Part)| {
        ops::cross_entropy_part_backward(logits, targets, *part, saved, options, scale)
    };
    ops::concat(&parts.iter().map(of).collect::<Result<Vec<_>>>()?.iter().collect::<Vec<_>>())
}

fn wide(values: Vec<f32>) -> Vec<f64> {
    values.into_iter().map(f64::from).collect()
}

fn parts_match_the_whole(device: &Device, dtype: DType) -> Outcome {
    for ((rows, cuts), normalizer) in CUTS.into_iter().flat_map(|cut| [None, Some(40.0)].map(|n| (cut, n))) {
        let (total, what) = (total(cuts), format!("{rows} rows, {cuts:?}, {normalizer:?}"));
        let options = CrossEntropyOptions { normalizer, ..OPTIONS };
        let logits = ops::scale(&normal([rows, total], dtype, 1, device)?, 3.0)?;
        let (target, parts) = (targets(rows, total, device)?, cut(&logits, cuts)?);
        let (whole, whole_saved) = ops::cross_entropy(&logits, &target, &options)?;
        let (loss, saved) = loss(&parts, &target, &options)?;
        let near = [1e-6, 1e-6];
        close(&what, &[loss.item()?], &[whole.item()?.into()], 1, near)?;
        same(&what, &saved.row_max.to_vec::<f32>()?, &whole_saved.row_max.to_vec::<f32>()?, 1)?;
        close(&what, &saved.row_sum.to_vec::<f32>()?, &wide(whole_saved.row_sum.to_vec()?), 1, near)?;
        equal(&what, saved.count.to_vec::<i32>()?, whole_saved.count.to_vec::<i32>()?)?;
        equal("shapes", (loss.shape(), saved.row_sum.shape()), (whole.shape(), whole_saved.row_sum.shape()))?;
        // Against the oracle, too.
        let counted: Vec<Option<usize>> =
            target.to_vec::<i32>()?.into_iter().map(|target| usize::try_from(target).ok()).collect();
        let divisor = normalizer.map_or(counted.iter().flatten().count() as f64, f64::from);
        if rows > 0 {
            let want = oracle::loss(&f64s(&logits)?, total, &counted, divisor);
            close(&what, &[loss.item()?], &[want], 1, tolerance(DType::F32))?;
        }
        let dx = gradients(&parts, &target, &saved, &options, 8.0)?;
        let want = ops::cross_entropy_backward(&logits, &target, &whole_saved, &options, 8.0)?;
        equal("dtype", dx.dtype(), dtype)?;
        let near = if dtype == DType::F32 { near } else { tolerance(dtype) };
        close(&what, &dx.to_f32_vec()?, &f64s(&want)?, total, near)?;
    }
    Ok(())
}

fn one_part_is_the_whole(device: &Device, dtype: DType) -> Outcome {
    for [rows, vocabulary] in [[1, 1], [15, 17], [3, 2000]] {
        let logits = ops::scale(&normal([rows, vocabulary], dtype, 1, device)?, 3.0)?;
        let target = targets(rows, vocabulary, device)?;
        let (whole, whole_saved) = ops::cross_entropy(&logits, &target, &OPTIONS)?;
        let (loss, saved) = loss(&cut(&logits, &[vocabulary])?, &target, &OPTIONS)?;
        equal("loss", loss.item()?.to_bits(), whole.item()?.to_bits())?;
        for (got, want) in [(&saved.row_max, &whole_saved.row_max), (&saved.row_sum, &whole_saved.row_sum)] {
            same("saved", &got.to_vec::<f32>()?, &want.to_vec::<f32>()?, 1)?;
        }
    }
    Ok(())
}

/// With a factor on the host and on the device, given what is saved of the whole.
fn gradients_of_parts_have_the_bits_of_the_whole(device: &Device, dtype: DType) -> Outcome {
    let state = ops::LossScaleState { scale: 16.0, ..Default::default() };
    let scale = LossScale::new(&state, device)?;
    for (rows, cuts) in CUTS {
        let (total, what) = (total(cuts), format!("{rows} rows, {cuts:?}"));
        let logits = ops::scale(&normal([rows, total], dtype, 1, device)?, 3.0)?;
        let (target, parts) = (targets(rows, total, device)?, cut(&logits, cuts)?);
        let (_, saved) = ops::cross_entropy(&logits, &target, &OPTIONS)?;
        let want = ops::cross_entropy_backward(&logits, &target, &saved, &OPTIONS, 16.0)?.to_f32_vec()?;
        same(&what, &gradients(&parts, &target, &saved, &OPTIONS, 16.0)?.to_f32_vec()?, &want, total)?;
        let of = |(logits, part): &(Tensor, Part)| {
            ops::cross_entropy_part_backward_scaled(logits, &target, *part, &saved, &OPTIONS, &scale)
        };
        let scaled = parts.iter().map(of).collect::<Result<Vec<_>>>()?;
        let scaled = ops::concat(&scaled.iter().collect::<Vec<_>>())?;
        same(&what, &scaled.to_f32_vec()?, &want, total)?;
    }
    Ok(())
}

/// Rows of −∞ in one part, with the target in each, and logits so far apart that one part counts for nothing.
fn parts_without_a_finite_logit(device: &Device) -> Outcome {
    let none = f32::NEG_INFINITY;
    for (low, target, want) in [
        (none, 2, 1f64.exp().ln_1p()),
        (none, 0, f64::INFINITY),
        (-1e30, 3, 1f64.exp().ln_1p() - 1.0),
        (-200.0, 2, 1f64.exp().ln_1p()),
    ] {
        for swapped in [false, true] {
            let values = if swapped { vec![0.0, 1.0, low, low] } else { vec![low, low, 0.0, 1.0] };
            let target = if swapped { (target + 2) % 4 } else { target };
            let logits = Tensor::from_vec(values, [1, 4], device)?;
            let target = Tensor::from_vec(vec![target], [1], device)?;
            let (parts, what) = (cut(&logits, &[2, 2])?, format!("{low}, {target:?}"));
            let (loss, saved) = loss(&parts, &target, &OPTIONS)?;
            close(&what, &[loss.item()?], &[want], 1, [1e-6, 0.0])?;
            let (_, whole) = ops::cross_entropy(&logits, &target, &OPTIONS)?;
            same(&what, &saved.row_sum.to_vec::<f32>()?, &whole.row_sum.to_vec::<f32>()?, 1)?;
            let dx = gradients(&parts, &target, &saved, &OPTIONS, 1.0)?.to_vec::<f32>()?;
            let want = ops::cross_entropy_backward(&logits, &target, &whole, &OPTIONS, 1.0)?;
            same(&what, &dx, &want.to_vec::<f32>()?, 4)?;
        }
    }
    Ok(())
}

/// One in each row, which is the target or another: what is not a number, and what is infinite, is so in the whole.
fn special_logits(device: &Device, dtype: DType) -> Outcome {
    let options = CrossEntropyOptions { ignore_index: None, normalizer: Some(1.0) };
    for (cuts, specials) in [([3, 4], specials()), ([16, 17], specials()), ([2000, 3003], extremes())] {
        let (rows, vocabulary) = (specials.len(), total(&cuts));
        let logits = tensor(special_rows(&specials, vocabulary, 3), [rows, vocabulary], dtype, device)?;
        let parts = cut(&logits, &cuts)?;
        for is_target in [true, false] {
            let column = |row: usize| ((row * 13 + usize::from(!is_target)) % vocabulary) as i32;
            let target = Tensor::from_vec((0..rows).map(column).collect(), [rows], device)?;
            let (_, saved) = loss(&parts, &target, &options)?;
            let (_, whole) = ops::cross_entropy(&logits, &target, &options)?;
            let what = format!("{cuts:?}, the target: {is_target}");
            same(&what, &saved.row_max.to_vec::<f32>()?, &whole.row_max.to_vec::<f32>()?, 1)?;
            close(&what, &saved.row_sum.to_vec::<f32>()?, &wide(whole.row_sum.to_vec()?), 1, [1e-6, 0.0])?;
            let dx = gradients(&parts, &target, &saved, &options, 8.0)?;
            let want = ops::cross_entropy_backward(&logits, &target, &whole, &options, 8.0)?;
            close(&what, &dx.to_f32_vec()?, &f64s(&want)?, vocabulary, tolerance(dtype))?;
            // Losses row by row.
            for row in (0..rows).filter(|_| dtype == DType::F32) {
                let logits = ops::rows(&logits, row..row + 1)?;
                let target = ops::rows(&target, row..row + 1)?;
                let (got, _) = loss(&cut(&logits, &cuts)?, &target, &options)?;
                let (want, _) = ops::cross_entropy(&logits, &target, &options)?;
                let what = format!("{what}: {:e}", specials[row]);
                close(&what, &[got.item()?], &[want.item()?.into()], 1, [1e-6, 1e-6])?;
            }
        }
    }
    Ok(())
}

/// Whatever their logits are.
fn ignored_rows_stay_out(device: &Device) -> Outcome {
    let nan = f32::NAN;
    let values = vec![nan, nan, nan, nan, 0.0, 0.0, 0.0, 0.0, 1e38, f32::INFINITY, nan, f32::NEG_INFINITY];
    let logits = Tensor::from_vec(values, [3, 4], device)?;
    let (target, parts) = (Tensor::from_vec(vec![IGNORE, 1, IGNORE], [3], device)?, cut(&logits, &[1, 3])?);
    let (loss_of_one, saved) = loss(&parts, &target, &OPTIONS)?;
    close("loss", &[loss_of_one.item()?], &[4f64.ln()], 1, [1e-6, 0.0])?;
    same("row_max", &saved.row_max.to_vec::<f32>()?, &[0.0; 3], 1)?;
    same("row_sum", &saved.row_sum.to_vec::<f32>()?, &[1.0, 4.0, 1.0], 1)?;
    let dx = gradients(&parts, &target, &saved, &OPTIONS, 1.0)?.to_vec::<f32>()?;
    same_numbers("dx", &dx, &[0.0, 0.0, 0.0, 0.0, 0.25, -0.75, 0.25, 0.25, 0.0, 0.0, 0.0, 0.0], 4)?;
    let target = Tensor::from_vec(vec![IGNORE; 3], [3], device)?;
    let (loss, saved) = loss(&parts, &target, &OPTIONS)?;
    equal("nothing counts", (loss.item()?, saved.count.to_vec::<i32>()?), (0.0, vec![0]))
}

fn same_for_any_threads(device: &Device) -> Outcome {
    let logits = normal([501, 257], DType::BF16, 1, device)?;
    let (target, parts) = (targets(501, 257, device)?, cut(&logits, &[100, 157])?);
    same_bits("cross_entropy_part", || {
        let (loss, saved) = loss(&parts, &target, &OPTIONS)?;
        let dx = gradients(&parts, &target, &saved, &OPTIONS, 1.0)?;
        Ok(vec![loss, saved.row_sum, dx])
    })
}

fn refuses(device: &Device) -> Outcome {
    let (logits, options) = (normal([2, 3], DType::F32, 1, device)?, CrossEntropyOptions::default());
    let ids = |ids: Vec<i32>| {
        let len = ids.len();
        Tensor::from_vec(ids, [len], device)
    };
    let target = ids(vec![0, 8])?;
    for (first, total) in [(7, 9), (usize::MAX, 9)] {
        let part = Part { first, total };
        let wording = format!("part = 3 from {first} on, of {total}: a part ends within the whole");
        let call = ops::cross_entropy_part(&logits, &target, part, &options);
        refused(call, &format!("cross_entropy_part: {wording}"))?;
    }
    let part = Part { first: 3, total: 9 };
    for wrong in [9, -1, i32::MIN] {
        let call = ops::cross_entropy_part(&logits, &ids(vec![0, wrong])?, part, &options);
        let wording = format!("cross_entropy: target {wrong} at position 1 is out of range 0..9");
        refused_on(device, call.map(|part| part.sums), &wording)?;
    }
    let own = ops::cross_entropy_part(&logits, &target, part, &options)?;
    let remedy = "pass what cross_entropy_part returned, reduced over the parts";
    let other = Tensor::zeros([3], DType::F32, device)?;
    refused(
        ops::cross_entropy_part_sums(&own, &other),
        &format!("cross_entropy_part_sums: the part's row_max and the rows: got [2] and [3]: {remedy}"),
    )?;
    let sums = ops::cross_entropy_part_sums(&own, &own.row_max)?;
    equal("shape", *sums.shape(), Shape::from([2, 2]))?;
    for (row_max, sums, wording) in [
        (&other, &sums, "row_max and the rows: got [3] and [2]"),
        (&own.row_max, &other, "sums and [2, rows]: got [3] and [2, 2]"),
        (&own.row_max, &target, "sums has dtype i32: expected f32"),
    ] {
        let call = ops::cross_entropy_of_parts(&target, row_max, sums, 9, &options);
        refused(call, &format!("cross_entropy_of_parts: {wording}"))?;
    }
    let zero = CrossEntropyOptions { normalizer: Some(0.0), ..options };
    let call = ops::cross_entropy_of_parts(&target, &own.row_max, &sums, 9, &zero);
    refused(call, "cross_entropy_of_parts: normalizer = 0: give a finite number greater than 0")?;
    let (_, saved) = ops::cross_entropy_of_parts(&target, &own.row_max, &sums, 9, &options)?;
    let beyond = Part { first: 7, total: 9 };
    let call = ops::cross_entropy_part_backward(&logits, &target, beyond, &saved, &options, 1.0);
    refused(call, "cross_entropy_part_backward: part = 3 from 7 on, of 9")?;
    for wrong in [9, -1] {
        let target = ids(vec![0, wrong])?;
        let call = ops::cross_entropy_part_backward(&logits, &target, part, &saved, &options, 1.0);
        refused_on(device, call, &format!("target {wrong} at position 1 is out of range 0..9"))?;
    }
    Ok(())
}
