use super::case::{Outcome, cases};
use super::compare::{refused, same};
use super::data::{FLOATS, PIECE, Random, SHAPES, normal, specials, tensor};
use crate::oracle::fp8;
use fp8_kernels::{DType, Device, Encoding, Tensor, ops};

cases![sizes, needles, needles_everywhere, infinity_counts_and_nan_does_not, refuses];

fn check(x: &Tensor) -> Outcome {
    let want = fp8::quantize(&x.to_f32_vec()?, Encoding::E4M3, 1.0).amax;
    same(&format!("{} {}", x.dtype(), x.shape()), &[ops::amax(x)?.item()?], &[want], 1)
}

fn sizes(device: &Device) -> Outcome {
    for (seed, shape) in SHAPES.into_iter().enumerate() {
        for dtype in FLOATS {
            check(&normal(shape, dtype, seed as u64, device)?)?;
        }
    }
    Ok(())
}

fn needles(device: &Device) -> Outcome {
    for len in [1, 15, 16, 17, 33, 127, PIECE, PIECE + 1, 3 * PIECE + 5] {
        for place in [0, 7, 15, 16, len / 2, PIECE - 1, PIECE, len - 1].into_iter().filter(|&p| p < len) {
            for (needle, dtype) in [1e4, -1e4].into_iter().flat_map(|n| FLOATS.map(|d| (n, d))) {
                let mut values = Random::new(place as u64).normals(len);
                values[place] = needle;
                check(&tensor(values, [len], dtype, device)?)?;
            }
        }
    }
    Ok(())
}

/// In every place of a vector, and in many threads, rounds and blocks.
fn needles_everywhere(device: &Device) -> Outcome {
    let len = 40_003;
    for (i, dtype) in (0..72).flat_map(|i| FLOATS.map(|dtype| (i, dtype))) {
        let place = if i < 64 { i * 624 + i % 8 } else { len - 1 - (i - 64) };
        let mut values = vec![-0.5; len];
        values[place] = if i % 2 == 0 { 3.0 } else { -3.0 };
        check(&tensor(values, [len], dtype, device)?)?;
    }
    Ok(())
}

fn infinity_counts_and_nan_does_not(device: &Device) -> Outcome {
    for dtype in FLOATS {
        check(&tensor(specials(), [specials().len()], dtype, device)?)?;
        let finite = specials().into_iter().filter(|v| !v.is_infinite()).collect::<Vec<_>>();
        let len = finite.len();
        check(&tensor(finite, [len], dtype, device)?)?;
        check(&tensor(vec![f32::NAN; 5], [5], dtype, device)?)?;
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    let codes = Tensor::zeros([4], DType::U8, device)?;
    refused(ops::amax(&codes), "amax: x has dtype u8: expected f32, bf16 or f16")
}
