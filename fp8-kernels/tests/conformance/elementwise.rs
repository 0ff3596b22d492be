use super::case::{Outcome, cases};
use super::compare::{equal, refused, same_numbers};
use super::data::{FLOATS, SHAPES, normal, specials, tensor};
use fp8_kernels::{DType, Device, Tensor, ops};

cases![
    add,
    mul,
    bias,
    scale,
    scale_in_place,
    whole_rows,
    special_values_of_all_lengths,
    rounds,
    refuses,
    nothing_is_never_shared
];

/// f32 arithmetic rounded once to `dtype`: bits apart from the payload of a NaN.
fn check(what: &str, got: &Tensor, dtype: DType, want: Vec<f32>) -> Outcome {
    equal(what, got.dtype(), dtype)?;
    let want = tensor(want, *got.shape(), dtype, got.device())?.to_f32_vec()?;
    same_numbers(what, &got.to_f32_vec()?, &want, got.shape().last_dim())
}

fn add(device: &Device) -> Outcome {
    for (seed, shape) in SHAPES.into_iter().enumerate() {
        for (left, right) in FLOATS.into_iter().flat_map(|l| FLOATS.map(|r| (l, r))) {
            let (a, b) = (normal(shape, left, seed as u64, device)?, normal(shape, right, 99, device)?);
            let want = a.to_f32_vec()?.iter().zip(b.to_f32_vec()?).map(|(a, b)| a + b).collect();
            check(&format!("{left} + {right} {shape:?}"), &ops::add(&a, &b)?, left, want)?;
        }
    }
    let x = tensor(specials(), [specials().len()], DType::F32, device)?;
    let want = specials().into_iter().map(|v| v + v).collect();
    check("special values", &ops::add(&x, &x)?, DType::F32, want)
}

fn mul(device: &Device) -> Outcome {
    for (seed, shape) in SHAPES.into_iter().enumerate() {
        for (left, right) in FLOATS.into_iter().flat_map(|l| FLOATS.map(|r| (l, r))) {
            let (a, b) = (normal(shape, left, seed as u64, device)?, normal(shape, right, 99, device)?);
            let want = a.to_f32_vec()?.iter().zip(b.to_f32_vec()?).map(|(a, b)| a * b).collect();
            check(&format!("{left} · {right} {shape:?}"), &ops::mul(&a, &b)?, left, want)?;
        }
    }
    let x = tensor(specials(), [specials().len()], DType::F32, device)?;
    let want = specials().into_iter().map(|v| v * v).collect();
    check("special values", &ops::mul(&x, &x)?, DType::F32, want)
}

fn bias(device: &Device) -> Outcome {
    for (seed, shape) in SHAPES.into_iter().enumerate() {
        for (left, right) in FLOATS.into_iter().flat_map(|l| FLOATS.map(|r| (l, r))) {
            let (x, b) = (normal(shape, left, seed as u64, device)?, normal([shape[1]], right, 99, device)?);
            let row = b.to_f32_vec()?;
            let want = x.to_f32_vec()?.iter().zip(row.iter().cycle()).map(|(x, b)| x + b).collect();
            check(&format!("{left} + {right} {shape:?}"), &ops::bias(&x, &b)?, left, want)?;
        }
    }
    Ok(())
}

fn scale(device: &Device) -> Outcome {
    for (dtype, factor) in FLOATS.into_iter().flat_map(|d| [0.3, -2.0, 0.0].map(|f| (d, f))) {
        for shape in SHAPES {
            let x = normal(shape, dtype, 4, device)?;
            let want = x.to_f32_vec()?.iter().map(|x| x * factor).collect();
            check(&format!("{dtype} · {factor}"), &ops::scale(&x, factor)?, dtype, want)?;
        }
    }
    Ok(())
}

fn scale_in_place(device: &Device) -> Outcome {
    for dtype in FLOATS {
        for shape in SHAPES {
            let mut x = normal(shape, dtype, 4, device)?;
            if x.holders() > 0 {
                return Err("a fresh tensor is shared".into());
            }
            let want = x.to_f32_vec()?.iter().map(|x| x * 0.3).collect();
            ops::scale_in_place(&mut x, 0.3, "x")?;
            check(&format!("{dtype} {shape:?}"), &x, dtype, want)?;
        }
    }
    let mut x = normal([4], DType::F32, 4, device)?;
    let _holder = x.clone();
    refused(
        ops::scale_in_place(&mut x, 2.0, "fc1.weight.main_grad"),
        "fc1.weight.main_grad: cannot be changed in place",
    )
}

/// Columns that are a multiple of eight, several rows in each thread's part.
fn whole_rows(device: &Device) -> Outcome {
    for shape in [[9, 8], [5, 64], [37, 24], [3, 2056]] {
        for (left, right) in FLOATS.into_iter().flat_map(|l| FLOATS.map(|r| (l, r))) {
            let (x, b) = (normal(shape, left, 1, device)?, normal([shape[1]], right, 99, device)?);
            let row = b.to_f32_vec()?;
            let want = x.to_f32_vec()?.iter().zip(row.iter().cycle()).map(|(x, b)| x + b).collect();
            check(&format!("{left} + {right} {shape:?}"), &ops::bias(&x, &b)?, left, want)?;
        }
    }
    Ok(())
}

/// Infinities, NaN and values that overflow a half, at each place of vectors and rests.
fn special_values_of_all_lengths(device: &Device) -> Outcome {
    let specials = specials();
    for (len, dtype) in (1..=33usize).flat_map(|len| FLOATS.map(|dtype| (len, dtype))) {
        let value = |i: usize| specials[(i * 29 + len * 7) % specials.len()];
        let x = tensor((0..len).map(value).collect(), [1, len], dtype, device)?;
        let values = x.to_f32_vec()?;
        let map = |f: fn(f32) -> f32| values.iter().map(|&v| f(v)).collect::<Vec<_>>();
        check(&format!("{len} of {dtype} added"), &ops::add(&x, &x)?, dtype, map(|v| v + v))?;
        check(&format!("{len} of {dtype} multiplied"), &ops::mul(&x, &x)?, dtype, map(|v| v * v))?;
        check(&format!("{len} of {dtype} scaled"), &ops::scale(&x, -3.0)?, dtype, map(|v| v * -3.0))?;
        let bias = Tensor::full(1.0, [len], dtype, device)?;
        check(&format!("{len} of {dtype} biased"), &ops::bias(&x, &bias)?, dtype, map(|v| v + 1.0))?;
        let mut x = x;
        ops::scale_in_place(&mut x, 5.0, "x")?;
        check(&format!("{len} of {dtype} scaled in place"), &x, dtype, map(|v| v * 5.0))?;
    }
    Ok(())
}

/// As many elements as a simulated device's grid takes at once, and more.
fn rounds(device: &Device) -> Outcome {
    for (len, dtype) in [1 << 17, (1 << 17) + 43].into_iter().flat_map(|len| FLOATS.map(|dtype| (len, dtype)))
    {
        let shape = if len % 16 == 0 { [len / 16, 16] } else { [1, len] };
        let x = normal(shape, dtype, 1, device)?;
        let b = normal([x.shape().last_dim()], dtype, 2, device)?;
        let (values, row) = (x.to_f32_vec()?, b.to_f32_vec()?);
        let map = |f: fn(f32) -> f32| values.iter().map(|&v| f(v)).collect::<Vec<_>>();
        let what = format!("{len} of {dtype}");
        check(&what, &ops::add(&x, &x)?, dtype, map(|v| v + v))?;
        check(&what, &ops::mul(&x, &x)?, dtype, map(|v| v * v))?;
        check(&what, &ops::scale(&x, -3.0)?, dtype, map(|v| v * -3.0))?;
        let sums = values.iter().zip(row.iter().cycle()).map(|(x, b)| x + b).collect();
        check(&what, &ops::bias(&x, &b)?, dtype, sums)?;
        let mut x = x;
        ops::scale_in_place(&mut x, 5.0, "x")?;
        check(&what, &x, dtype, map(|v| v * 5.0))?;
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    let x = |shape: [usize; 2]| Tensor::zeros(shape, DType::F32, device);
    refused(
        ops::add(&x([2, 3])?, &x([3, 2])?),
        "add: a and b: got [2, 3] and [3, 2]: both must have one shape",
    )?;
    let three = Tensor::zeros([3], DType::F32, device)?;
    refused(
        ops::bias(&x([2, 4])?, &three),
        "bias: bias and the output's last dimension: got [3] and [4]: a bias has one value per column",
    )?;
    let ids = Tensor::zeros([2, 3], DType::I32, device)?;
    refused(ops::add(&x([2, 3])?, &ids), "add: b has dtype i32")?;
    refused(
        ops::mul(&x([2, 3])?, &x([3, 2])?),
        "mul: a and b: got [2, 3] and [3, 2]: both must have one shape",
    )?;
    refused(ops::mul(&x([2, 3])?, &ids), "mul: b has dtype i32")?;
    refused(ops::mul(&ids, &x([2, 3])?), "mul: a has dtype i32")?;
    refused(ops::scale(&ids, 1.0), "scale: x has dtype i32")
}

/// On every backend: a tensor without elements has no storage that a clone could share.
fn nothing_is_never_shared(device: &Device) -> Outcome {
    let mut x = Tensor::zeros([3, 0], DType::F32, device)?;
    let y = x.clone();
    equal("holders", (x.holders(), y.holders()), (0, 0))?;
    ops::scale_in_place(&mut x, 2.0, "x")?;
    ops::accumulate(&mut x, &y, "x")?;
    x.write::<f32>(&[], "x")?;
    x.copy_from(&y, "x")?;
    x.set_zero("x")?;
    equal("elements", y.to_vec::<f32>()?.len(), 0)
}
