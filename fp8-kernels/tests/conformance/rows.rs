use super::case::{Outcome, cases};
use super::compare::{equal, refused, same};
use fp8_kernels::{DType, Device, Tensor, bf16, ops};

cases![every_range_of_few_rows, many_rows_of_all_widths, all_dtypes, refuses];

fn every_range_of_few_rows(device: &Device) -> Outcome {
    for (rows, cols) in [(4, 3), (5, 1), (3, 16), (0, 2), (2, 0)] {
        let x = Tensor::from_vec((0..(rows * cols) as i32).collect(), [rows, 1, cols], device)?;
        for (start, end) in (0..=rows).flat_map(|start| (start..=rows).map(move |end| (start, end))) {
            let y = ops::rows(&x, start..end)?;
            let want: Vec<i32> = ((start * cols) as i32..(end * cols) as i32).collect();
            equal("shape", y.shape().to_vec(), vec![end - start, 1, cols])?;
            same(&format!("{start}..{end} of {rows}"), &y.to_vec::<i32>()?, &want, cols)?;
        }
    }
    Ok(())
}

/// More elements than one piece of work on the CPU, at offsets of all alignments.
fn many_rows_of_all_widths(device: &Device) -> Outcome {
    for cols in [1, 3, 17, 64] {
        let (rows, start) = (40_000 / cols, 7);
        let values: Vec<f32> = (0..rows * cols).map(|i| i as f32).collect();
        let y = ops::rows(&Tensor::from_vec(values.clone(), [rows, cols], device)?, start..rows - 1)?;
        same(
            &format!("{cols} columns"),
            &y.to_vec::<f32>()?,
            &values[start * cols..(rows - 1) * cols],
            cols,
        )?;
    }
    Ok(())
}

fn all_dtypes(device: &Device) -> Outcome {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let x = ops::cast(&Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], [4], device)?, dtype)?;
        let y = ops::rows(&x, 1..3)?;
        equal("dtype", y.dtype(), dtype)?;
        equal("values", y.to_f32_vec()?, vec![2.0, 3.0])?;
    }
    let bytes = Tensor::from_vec(vec![1u8, 2, 3], [3], device)?;
    equal("bytes", ops::rows(&bytes, 2..3)?.to_vec::<u8>()?, vec![3])?;
    // The result is a copy: what it came from may change.
    let mut x = Tensor::from_vec(vec![bf16::ONE; 4], [2, 2], device)?;
    let y = ops::rows(&x, 0..2)?;
    x.set_zero("x")?;
    equal("copy", y.to_f32_vec()?, vec![1.0; 4])
}

fn refuses(device: &Device) -> Outcome {
    let x = Tensor::zeros([3, 2], DType::F32, device)?;
    refused(ops::rows(&x, 1..4), "rows: shape [3, 2]: rows 1..4: expected a range in 0..3")?;
    #[expect(clippy::reversed_empty_ranges, reason = "a range that is refused")]
    refused(ops::rows(&x, 2..1), "rows: shape [3, 2]: rows 2..1: expected a range in 0..3")?;
    refused(ops::rows(&x, 4..4), "rows: shape [3, 2]: rows 4..4: expected a range in 0..3")?;
    refused(ops::rows(&Tensor::scalar(1.0, device)?, 0..1), "rows: shape []: expected at least one dimension")
}
