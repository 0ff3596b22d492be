use super::case::{Outcome, cases};
use super::compare::{equal, same};
use super::data::{self, ENCODINGS, FLOATS, exact, normal, special_rows, specials, tensor};
use super::quantize::fp8;
use crate::oracle::fp8;
use fp8_kernels::{
    Cell, Counters, DType, Device, Encoding, Operand, REST, Result, Scale, Slot, Tensor, TransposePolicy,
    UNSET, ops,
};

cases![are_each, needles, special_values: Formats, share_an_unset_cell];

/// As many tensors as slots, in one call or one after the other.
fn are_each(device: &Device) -> Outcome {
    let shapes = [[3, 5], [0, 4], [130, 66], [1, 257], [64, 128], [2, 2], [129, 64]];
    let device = &device.clone().with_transpose_policy(TransposePolicy::WithCast);
    let run = |together: bool| -> Result<_, libtest_mimic::Failed> {
        let (mut cells, mut tensors) = (Vec::new(), Vec::new());
        for (i, shape) in shapes.into_iter().enumerate() {
            tensors.push(normal(shape, FLOATS[i % 3], i as u64, device)?);
            // The third is not set yet, and takes the tensor's own.
            let scale = if i == 2 { UNSET } else { 0.5 + i as f32 };
            cells.push((Cell::new(scale, device)?, Cell::new(REST, device)?, Counters::new(device)?));
        }
        let rules = ENCODINGS.map(exact);
        let slots = cells.iter().enumerate().map(|(i, (cell, amax, counters))| {
            let (encoding, first) = (ENCODINGS[i % 2], &rules[i % 2]);
            let scale = if i == 5 { Scale::Off } else { Scale::Cell { cell, first, keep: true } };
            let columnwise = i % 3 != 0;
            Slot { scale, amax: Some(amax), counters: Some(counters), columnwise, ..Slot::off(encoding) }
        });
        let pairs: Vec<_> = tensors.iter().zip(slots).collect();
        let outputs = if together {
            ops::quantize_many(&pairs)?
        } else {
            pairs.iter().map(|(x, slot)| ops::quantize(x, slot)).collect::<Result<_>>()?
        };
        let mut numbers = Vec::new();
        for (cell, amax, counters) in &cells {
            numbers.push((cell.read()?.to_bits(), amax.read()?.to_bits(), counters.read()?));
        }
        Ok((outputs, numbers))
    };
    let ((got, numbers), (want, numbers_wanted)) = (run(true)?, run(false)?);
    equal("cells, amaxes and counts", numbers, numbers_wanted)?;
    for (i, (got, want)) in got.into_iter().zip(want).enumerate() {
        let what = format!("tensor {i}");
        match (got, want) {
            (Operand::Fp8(got), Operand::Fp8(want)) => {
                let [rows, cols] = want.matrix();
                same(&what, &got.codes()?, &want.codes()?, cols)?;
                equal(&what, got.columnwise().is_some(), want.columnwise().is_some())?;
                same(&what, &got.transposed()?.codes()?, &want.transposed()?.codes()?, rows)?;
                equal(&what, got.scale_inv().item()?, want.scale_inv().item()?)?;
            }
            (Operand::High(got), Operand::High(want)) => {
                same(&what, &got.to_f32_vec()?, &want.to_f32_vec()?, want.shape().last_dim())?;
            }
            _ => return Err(format!("{what}: one FP8, one in high precision").into()),
        }
    }
    equal("nothing", ops::quantize_many(&[])?.len(), 0)
}

/// More tensors than blocks: a block goes from one to the next, in the middle of either; some have a transpose.
fn needles(device: &Device) -> Outcome {
    let device = &device.clone().with_transpose_policy(TransposePolicy::WithCast);
    let (cell, rule) = (Cell::new(2.0, device)?, exact(Encoding::E4M3));
    let shape = |i: usize| [1 + i * 37 % 131, 1 + i * 53 % 67];
    let (mut tensors, mut amaxes, counters) = (Vec::new(), Vec::new(), Counters::new(device)?);
    for i in 0..300 {
        let [rows, cols] = shape(i);
        let mut values = data::Random::new(i as u64).normals(rows * cols);
        values[i * 271 % (rows * cols)] = 1e3 + i as f32;
        tensors.push(tensor(values, shape(i), FLOATS[i % 3], device)?);
        amaxes.push(Cell::new(REST, device)?);
    }
    let has_transpose = |i: usize| (i / 5).is_multiple_of(2);
    let slot = |(i, (x, amax))| {
        let columnwise = has_transpose(i);
        let slot = Slot::fixed(Encoding::E4M3, &cell, &rule);
        (x, Slot { amax: Some(amax), counters: Some(&counters), columnwise, ..slot })
    };
    let pairs: Vec<_> = tensors.iter().zip(&amaxes).enumerate().map(slot).collect();
    for (i, (got, (x, amax))) in
        ops::quantize_many(&pairs)?.into_iter().zip(tensors.iter().zip(&amaxes)).enumerate()
    {
        let ([rows, cols], got, what) = (shape(i), fp8(got)?, format!("tensor {i}"));
        let want = fp8::quantize(&x.to_f32_vec()?, Encoding::E4M3, 2.0);
        same(&what, &got.codes()?, &want.codes, cols)?;
        equal(&what, got.columnwise().is_some(), has_transpose(i))?;
        if let Some(turned) = got.columnwise() {
            same(&what, &turned.to_vec::<u8>()?, &fp8::transpose(&want.codes, rows, cols), rows)?;
        }
        same(&what, &[amax.read()?, got.scale_inv().item()?], &[want.amax, 0.5], 1)?;
    }
    // Nothing is done twice.
    let elements: usize = tensors.iter().map(Tensor::numel).sum();
    equal("elements", counters.read()?.elements, elements as u64)
}

/// One in each row, and each amax its own, with and without a transpose.
fn special_values(device: &Device, encoding: Encoding) -> Outcome {
    let device = &device.clone().with_transpose_policy(TransposePolicy::WithCast);
    let (rule, specials) = (exact(encoding), specials());
    let finite: Vec<f32> = specials.iter().copied().filter(|v| v.is_finite()).collect();
    let (mut tensors, mut cells) = (Vec::new(), Vec::new());
    for (i, dtype) in FLOATS.into_iter().enumerate() {
        for (cols, specials) in [(15, &specials), (16, &specials), (72, &finite)] {
            let rows = special_rows(specials, cols, i as u64);
            tensors.push(tensor(rows, [specials.len(), cols], dtype, device)?);
            let scale = [1.0, 0.125, 448.0][tensors.len() % 3];
            cells.push((scale, Cell::new(scale, device)?, Cell::new(REST, device)?, Counters::new(device)?));
        }
    }
    let mut pairs = Vec::new();
    for (i, (x, (_, cell, amax, counters))) in tensors.iter().zip(&cells).enumerate() {
        let slot = Slot::fixed(encoding, cell, &rule);
        let (amax, counters) = (Some(amax), Some(counters));
        pairs.push((x, Slot { amax, counters, columnwise: i % 2 == 0, ..slot }));
    }
    let outputs = ops::quantize_many(&pairs)?;
    for ((got, x), (scale, _, amax, counters)) in outputs.into_iter().zip(&tensors).zip(&cells) {
        let (got, [rows, cols], what) =
            (fp8(got)?, x.shape().matrix(), format!("{} {}", x.dtype(), x.shape()));
        let want = fp8::quantize(&x.to_f32_vec()?, encoding, *scale);
        same(&what, &got.codes()?, &want.codes, cols)?;
        same(&what, &got.transposed()?.codes()?, &fp8::transpose(&want.codes, rows, cols), rows)?;
        same(&what, &[amax.read()?], &[want.amax], 1)?;
        let counts = counters.read()?;
        let wanted = [want.saturated, want.underflowed, x.numel() as u64, want.nan];
        equal(&what, [counts.saturated, counts.underflowed, counts.elements, counts.nan], wanted)?;
    }
    Ok(())
}

fn share_an_unset_cell(device: &Device) -> Outcome {
    let (rule, cell, amax) = (exact(Encoding::E4M3), Cell::new(UNSET, device)?, Cell::new(REST, device)?);
    let scale = Scale::Cell { cell: &cell, first: &rule, keep: true };
    let slot = || Slot { scale, amax: Some(&amax), ..Slot::off(Encoding::E4M3) };
    let (small, large) =
        (Tensor::full(3.5, [9], DType::F32, device)?, Tensor::full(7.0, [9], DType::F32, device)?);
    let outputs = ops::quantize_many(&[(&small, slot()), (&large, slot())])?;
    for output in outputs {
        equal("scale_inv", fp8(output)?.scale_inv().item()?, 1.0 / 128.0)?;
    }
    equal("the cell, provisional", cell.read()?, -128.0)?;
    equal("amax of both", amax.read()?, 7.0)
}
