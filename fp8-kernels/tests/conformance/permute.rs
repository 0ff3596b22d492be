use super::case::{Outcome, cases};
use super::compare::{equal, refused, same};
use fp8_kernels::{DType, Device, Shape, Tensor, bf16, ops};

cases![every_order_of_few_dimensions, six_dimensions, every_width_of_an_access, large, refuses];

/// All orders of `0..rank`.
fn orders(rank: usize) -> Vec<Vec<usize>> {
    if rank == 0 {
        return vec![vec![]];
    }
    let with_last = |order: Vec<usize>| {
        (0..rank).map(move |place| {
            let mut order = order.clone();
            order.insert(place, rank - 1);
            order
        })
    };
    orders(rank - 1).into_iter().flat_map(with_last).collect()
}

/// Each element's place in the source, found by its coordinates.
fn sources(dims: &[usize], axes: &[usize]) -> Vec<usize> {
    let mut places = vec![0];
    for &axis in axes {
        let stride: usize = dims[axis + 1..].iter().product();
        places = places.iter().flat_map(|at| (0..dims[axis]).map(move |i| at + i * stride)).collect();
    }
    places
}

fn check(dims: &[usize], axes: &[usize], device: &Device) -> Outcome {
    let shape = Shape::from_slice(dims).ok_or("too many dimensions")?;
    let x = Tensor::from_vec((0..shape.numel() as i32).collect(), shape, device)?;
    let y = ops::permute(&x, axes)?;
    equal("shape", y.shape().to_vec(), axes.iter().map(|&axis| dims[axis]).collect())?;
    let want: Vec<i32> = sources(dims, axes).into_iter().map(|place| place as i32).collect();
    same(&format!("{dims:?} {axes:?}"), &y.to_vec::<i32>()?, &want, y.shape().last_dim())
}

fn every_order_of_few_dimensions(device: &Device) -> Outcome {
    for dims in [&[][..], &[5], &[3, 4], &[2, 3, 4], &[3, 1, 5], &[2, 3, 2, 5], &[4, 2, 3, 8], &[2, 0, 3]] {
        for axes in orders(dims.len()) {
            check(dims, &axes, device)?;
        }
    }
    Ok(())
}

fn six_dimensions(device: &Device) -> Outcome {
    for axes in
        [[5, 4, 3, 2, 1, 0], [1, 0, 3, 2, 5, 4], [4, 2, 0, 5, 3, 1], [3, 1, 0, 4, 2, 5], [2, 5, 1, 4, 0, 3]]
    {
        check(&[2, 3, 2, 3, 2, 3], &axes, device)?;
        check(&[3, 2, 5, 2, 3, 4], &axes, device)?;
    }
    Ok(())
}

/// Rows of 1 to 48 bytes that stay together.
fn every_width_of_an_access(device: &Device) -> Outcome {
    for last in [1, 2, 3, 4, 6, 8, 12, 16, 32, 48] {
        let dims = [3, 2, 5, last];
        let axes = [2, 0, 1, 3];
        macro_rules! check {
            ($type:ty, $from:expr) => {
                let values: Vec<$type> = (0..(30 * last) as u32).map($from).collect();
                let y = ops::permute(&Tensor::from_vec(values.clone(), dims, device)?, &axes)?;
                let want: Vec<$type> = sources(&dims, &axes).into_iter().map(|place| values[place]).collect();
                same(&format!("{} × {last}", stringify!($type)), &y.to_vec::<$type>()?, &want, last)?;
            };
        }
        check!(f32, |i| i as f32);
        check!(bf16, |i| bf16::from_bits((i * 3) as u16));
        check!(u8, |i| (i * 7 + i / 251) as u8);
    }
    Ok(())
}

/// More elements than a simulated device's grid has threads, and than one piece of work on the CPU.
fn large(device: &Device) -> Outcome {
    check(&[7, 50, 11, 13], &[2, 0, 3, 1], device)?;
    check(&[50, 7, 11, 13], &[1, 2, 0, 3], device)?;
    // In units of 16 and of 8 bytes.
    check(&[60, 30, 13, 4], &[2, 1, 0, 3], device)?;
    check(&[60, 30, 13, 2], &[2, 1, 0, 3], device)
}

fn refuses(device: &Device) -> Outcome {
    let x = Tensor::zeros([3, 2], DType::F32, device)?;
    let text = |axes: &str| format!("permute: shape [3, 2]: axes {axes}: expected each of 0..2 once");
    refused(ops::permute(&x, &[0]), &text("[0]"))?;
    refused(ops::permute(&x, &[1, 1]), &text("[1, 1]"))?;
    refused(ops::permute(&x, &[0, 2]), &text("[0, 2]"))?;
    refused(ops::permute(&x, &[0, 1, 2]), &text("[0, 1, 2]"))?;
    // What no order moves is shared.
    equal("holders", ops::permute(&x, &[0, 1])?.holders(), 1)
}
