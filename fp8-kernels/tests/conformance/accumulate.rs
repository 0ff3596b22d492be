use super::case::{Outcome, cases};
use super::compare::{refused, same, same_numbers};
use super::data::{AROUND_2_16, FLOATS, normal, specials, tensor};
use fp8_kernels::{DType, Device, Tensor, ops};
use ops::Update;

cases![adds_in_f32, writes_over_what_was_there, special_values: Dtypes, refuses];

fn adds_in_f32(device: &Device) -> Outcome {
    // 2^17 and more: as many as a simulated device's grid takes at once, and more.
    let lens = (0..=17).chain([127, 2049, 70_003, 1 << 17, (1 << 17) + 43]).chain(AROUND_2_16);
    for (len, dtype) in lens.flat_map(|len| FLOATS.map(|dtype| (len, dtype))) {
        let mut out = normal([len], DType::F32, 1, device)?;
        let x = normal([len], dtype, 2, device)?;
        let want: Vec<f32> =
            out.to_vec::<f32>()?.iter().zip(x.to_f32_vec()?).map(|(out, x)| out + x).collect();
        ops::accumulate(&mut out, &x, "out")?;
        same(&format!("{len} of {dtype}"), &out.to_vec::<f32>()?, &want, len)?;
    }
    Ok(())
}

fn writes_over_what_was_there(device: &Device) -> Outcome {
    for (len, dtype) in (0..=17).chain([2049, 70_003]).flat_map(|len| FLOATS.map(|dtype| (len, dtype))) {
        let mut out = Tensor::full(f32::NAN, [len], DType::F32, device)?;
        let x = normal([len], dtype, 2, device)?;
        let values = x.to_f32_vec()?;
        ops::store(&mut out, &x, Update::Write, "out")?;
        same(&format!("{len} of {dtype}"), &out.to_vec::<f32>()?, &values, len)?;
        ops::store(&mut out, &x, Update::Add, "out")?;
        let twice: Vec<f32> = values.iter().map(|value| value + value).collect();
        same(&format!("{len} of {dtype}, added"), &out.to_vec::<f32>()?, &twice, len)?;
    }
    Ok(())
}

/// Each beside each, in all places of a vector.
fn special_values(device: &Device, dtype: DType) -> Outcome {
    let specials = specials();
    let pairs = specials.iter().flat_map(|&a| specials.iter().map(move |&b| (a, b)));
    let (a, b): (Vec<f32>, Vec<f32>) = pairs.unzip();
    let len = a.len();
    let (mut out, x) = (Tensor::from_vec(a.clone(), [len], device)?, tensor(b, [len], dtype, device)?);
    let want: Vec<f32> = a.iter().zip(x.to_f32_vec()?).map(|(a, b)| a + b).collect();
    ops::accumulate(&mut out, &x, "out")?;
    same_numbers(dtype.name(), &out.to_vec::<f32>()?, &want, specials.len())
}

fn refuses(device: &Device) -> Outcome {
    let x = |len: usize, dtype| Tensor::zeros([len], dtype, device);
    let mut out = x(4, DType::F32)?;
    let wording = "accumulate: out and x: got [4] and [5]";
    refused(ops::accumulate(&mut out, &x(5, DType::F32)?, "w.grad"), wording)?;
    refused(ops::accumulate(&mut out, &x(4, DType::I32)?, "w.grad"), "accumulate: x has dtype i32")?;
    let mut narrow = x(4, DType::BF16)?;
    refused(
        ops::accumulate(&mut narrow, &x(4, DType::F32)?, "w.grad"),
        "accumulate: out has dtype bf16: expected f32",
    )?;
    refused(
        ops::store(&mut out, &x(5, DType::F32)?, Update::Write, "w.grad"),
        "store: out and x: got [4] and [5]",
    )?;
    let _holder = out.clone();
    let shared = "w.grad: cannot be changed in place, because 1 other tensor shares its storage";
    refused(ops::accumulate(&mut out, &x(4, DType::F32)?, "w.grad"), shared)
}
