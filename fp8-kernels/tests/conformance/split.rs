use super::case::{Outcome, cases};
use super::compare::{equal, refused, same};
use fp8_kernels::{DType, Device, Tensor, bf16, ops};

cases![splits_every_size, every_width_of_an_access, concat_undoes_split, leading_dimensions_stay, refuses];

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

/// Columns of all types whose bytes are whole accesses of 1 to 16 bytes, and as many of these as a grid has threads.
fn every_width_of_an_access(device: &Device) -> Outcome {
    for (rows, sizes) in [
        (256, vec![1, 3]),
        (128, vec![1, 3]),
        (256, vec![16, 16]),
        (32, vec![8, 24]),
        (64, vec![2, 2, 4]),
        (16, vec![16, 48]),
        (9, vec![4, 4, 12]),
        (512, vec![6, 2]),
        (3000, vec![5, 3]),
    ] {
        macro_rules! check {
            ($type:ty, $from:expr) => {
                let cols: usize = sizes.iter().sum();
                let values: Vec<$type> = (0..(rows * cols) as u32).map($from).collect();
                let x = Tensor::from_vec(values.clone(), [rows, cols], device)?;
                let parts = ops::split(&x, &sizes)?;
                let mut start = 0;
                for (part, &size) in parts.iter().zip(&sizes) {
                    let want: Vec<$type> =
                        values.chunks(cols).flat_map(|row| &row[start..start + size]).copied().collect();
                    let what = format!("{} {rows} rows, {sizes:?}, from {start}", stringify!($type));
                    same(&what, &part.to_vec::<$type>()?, &want, size)?;
                    start += size;
                }
                let joined = ops::concat(&parts.iter().collect::<Vec<_>>())?;
                same(&format!("{} {sizes:?}", stringify!($type)), &joined.to_vec::<$type>()?, &values, cols)?;
            };
        }
        check!(f32, |i| i as f32);
        check!(bf16, |i| bf16::from_bits((i * 3) as u16));
        check!(u8, |i| (i * 7 + i / 251) as u8);
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
