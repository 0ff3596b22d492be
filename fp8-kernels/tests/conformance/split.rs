use super::case::{Outcome, cases};
use super::compare::{equal, refused, same};
use fp8_kernels::{DType, Device, Tensor, bf16, ops};

cases![splits_every_size, concat_undoes_split, leading_dimensions_stay, refuses];

fn numbers(rows: usize, cols: usize, device: &Device) -> Result<Tensor, fp8_kernels::Error> {
    Tensor::from_vec((0..(rows * cols) as i32).collect(), [rows, cols], device)
}

fn splits_every_size(device: &Device) -> Outcome {
    for (rows, sizes) in [
        (3, vec![1, 2]),
        (5, vec![0, 7, 0]),
        (17, vec![16, 15, 17]),
        (0, vec![2, 3]),
        (4, vec![]),
        (1000, vec![31, 33]),
    ] {
        let cols: usize = sizes.iter().sum();
        let parts = ops::split(&numbers(rows, cols, device)?, &sizes)?;
        equal("parts", parts.len(), sizes.len())?;
        let mut start = 0;
        for (part, size) in parts.iter().zip(&sizes) {
            let value = |row: usize, col: usize| (row * cols + start + col) as i32;
            let want: Vec<i32> =
                (0..rows).flat_map(|row| (0..*size).map(move |col| value(row, col))).collect();
            equal("shape", part.shape().to_vec(), vec![rows, *size])?;
            same(&format!("{rows} rows, {sizes:?}, from {start}"), &part.to_vec::<i32>()?, &want, *size)?;
            start += size;
        }
    }
    Ok(())
}

fn concat_undoes_split(device: &Device) -> Outcome {
    for (rows, sizes) in [(3, vec![5]), (7, vec![16, 0, 1]), (700, vec![31, 33, 17]), (0, vec![1, 2])] {
        let x = numbers(rows, sizes.iter().sum(), device)?;
        let parts = ops::split(&x, &sizes)?;
        let joined = ops::concat(&parts.iter().collect::<Vec<_>>())?;
        equal("shape", joined.shape(), x.shape())?;
        same(&format!("{sizes:?}"), &joined.to_vec::<i32>()?, &x.to_vec::<i32>()?, x.shape().last_dim())?;
    }
    Ok(())
}

fn leading_dimensions_stay(device: &Device) -> Outcome {
    let x = Tensor::from_vec((0..24).map(|i| bf16::from_f32(i as f32)).collect(), [2, 3, 4], device)?;
    let parts = ops::split(&x, &[3, 1])?;
    equal("shapes", (parts[0].shape().to_vec(), parts[1].shape().to_vec()), (vec![2, 3, 3], vec![2, 3, 1]))?;
    equal("dtype", parts[1].dtype(), DType::BF16)?;
    equal("values", parts[1].to_f32_vec()?, vec![3.0, 7.0, 11.0, 15.0, 19.0, 23.0])
}

fn refuses(device: &Device) -> Outcome {
    let x = |shape: [usize; 2]| Tensor::zeros(shape, DType::F32, device);
    refused(
        ops::split(&x([2, 5])?, &[2, 2]),
        "split: shape [2, 5]: sizes [2, 2] add up to 4: expected 5, the last dimension",
    )?;
    refused(ops::concat(&[]), "concat: parts = []: expected at least one tensor")?;
    refused(
        ops::concat(&[&x([2, 5])?, &x([3, 5])?]),
        "concat: two parts: got [2, 5] and [3, 5]: parts may differ in their last dimension only",
    )?;
    let half = Tensor::zeros([2, 5], DType::F16, device)?;
    refused(ops::concat(&[&x([2, 5])?, &half]), "concat: a part has dtype f16: expected f32")
}
