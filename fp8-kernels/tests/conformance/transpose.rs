use super::case::{Outcome, cases};
use super::compare::{equal, same};
use super::data::SHAPES;
use crate::oracle::fp8::transpose;
use fp8_kernels::{Device, Tensor, bf16, f16, ops};

cases![all_types, whole_vectors, every_cut, leading_dimensions_are_rows];

fn all_types(device: &Device) -> Outcome {
    check_shapes(&SHAPES, device)
}

/// Rows or columns, or both, are multiples of what moves in one access; tiles are whole, and cut on each side.
fn whole_vectors(device: &Device) -> Outcome {
    let shapes =
        [[64, 64], [128, 128], [256, 64], [72, 200], [144, 80], [130, 136], [136, 130], [4, 132], [132, 4]];
    check_shapes(&shapes, device)
}

/// Tiles that end in each pass of a GPU's threads, on either side, between vectors and in them.
fn every_cut(device: &Device) -> Outcome {
    let extents = [12, 28, 44, 60, 24, 56, 13, 45];
    let shapes: Vec<[usize; 2]> =
        extents.into_iter().flat_map(|rows| extents.map(|cols| [rows, cols])).collect();
    check_shapes(&shapes, device)
}

fn check_shapes(shapes: &[[usize; 2]], device: &Device) -> Outcome {
    for &shape in shapes {
        let [rows, cols] = shape;
        let numbers = || 0..(rows * cols) as u32;
        macro_rules! check {
            ($type:ty, $from:expr) => {
                let values: Vec<$type> = numbers().map($from).collect();
                let got = ops::transpose(&Tensor::from_vec(values.clone(), shape, device)?)?;
                equal("shape", got.shape().to_vec(), vec![cols, rows])?;
                let want = transpose(&values, rows, cols);
                same(&format!("{} {shape:?}", stringify!($type)), &got.to_vec::<$type>()?, &want, rows)?;
            };
        }
        check!(f32, |i| i as f32);
        check!(bf16, |i| bf16::from_bits((i * 3) as u16));
        check!(f16, |i| f16::from_bits(i as u16));
        check!(i32, |i| i as i32);
        check!(u8, |i| (i * 7 + i / 251) as u8);
    }
    Ok(())
}

fn leading_dimensions_are_rows(device: &Device) -> Outcome {
    let values: Vec<i32> = (0..24).collect();
    let got = ops::transpose(&Tensor::from_vec(values.clone(), [2, 3, 4], device)?)?;
    equal("shape", got.shape().to_vec(), vec![4, 6])?;
    same("values", &got.to_vec::<i32>()?, &transpose(&values, 6, 4), 6)
}
