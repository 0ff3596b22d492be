//! Reductions of each dtype against a serial computation that rounds by integer arithmetic of its own.

use crate::{noise, ranks};
use fp8_dist::ReduceOp;
use fp8_kernels::{DType, Device, Tensor, bf16, f16};

const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];
const OPS: [ReduceOp; 3] = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max];

/// Rounds to a format with `mantissa` stored bits and exponents from `least`, ties to even. For values that do not overflow.
fn rounded(x: f32, mantissa: i32, least: i32) -> f32 {
    let exponent = ((x.to_bits() >> 23 & 0xff) as i32 - 127).max(least);
    let unit = 2f64.powi(exponent - mantissa);
    ((f64::from(x) / unit).round_ties_even() * unit) as f32
}

fn round(x: f32, dtype: DType) -> f32 {
    match dtype {
        DType::BF16 => rounded(x, 7, -126),
        DType::F16 => rounded(x, 10, -14),
        _ => x,
    }
}

fn serial(parts: &[Vec<f32>], op: ReduceOp, dtype: DType) -> Vec<u32> {
    let one = |index: usize| {
        let mut values = parts.iter().map(|part| part[index]);
        let first = values.next().unwrap();
        match op {
            ReduceOp::Sum => round(values.fold(first, |sum, x| sum + x), dtype),
            ReduceOp::Avg => round(values.fold(first, |sum, x| sum + x) / parts.len() as f32, dtype),
            // −0 is less than 0.
            ReduceOp::Max => values.fold(first, |a, b| if a.total_cmp(&b).is_lt() { b } else { a }),
        }
    };
    (0..parts[0].len()).map(|index| one(index).to_bits()).collect()
}

/// Values that `dtype` holds, from tiny to large.
fn values(len: usize, seed: u64, dtype: DType) -> Vec<f32> {
    let scales = [1e-6, 1e-3, 1.0, 300.0];
    noise(len, seed).iter().zip(scales.iter().cycle()).map(|(x, scale)| round(x * scale, dtype)).collect()
}

fn stored(data: &[f32], dtype: DType) -> Tensor {
    let (shape, device) = ([data.len()], Device::cpu());
    match dtype {
        DType::BF16 => Tensor::from_vec(data.iter().map(|&x| bf16::from_f32(x)).collect(), shape, &device),
        DType::F16 => Tensor::from_vec(data.iter().map(|&x| f16::from_f32(x)).collect(), shape, &device),
        _ => Tensor::from_vec(data.to_vec(), shape, &device),
    }
    .unwrap()
}

fn reductions(n: usize, len: usize) {
    for (dtype, op) in FLOATS.into_iter().flat_map(|dtype| OPS.map(|op| (dtype, op))) {
        let data: Vec<Vec<f32>> = (0..n).map(|rank| values(len, 3 + rank as u64, dtype)).collect();
        let expected = serial(&data, op, dtype);
        let expect = |found: &Tensor, expected: &[u32], what: &str| {
            let bits: Vec<u32> = found.to_f32_vec().unwrap().iter().map(|x| x.to_bits()).collect();
            let differs = bits.iter().zip(expected).position(|(found, expected)| found != expected);
            let first = differs.map(|i| [bits[i], expected[i]].map(f32::from_bits));
            let case = format!("{n} ranks, {len} of {dtype}, {op}, {what}");
            assert_eq!((found.dtype(), bits.len(), first), (dtype, expected.len(), None), "{case}");
        };
        ranks(n, |group| {
            let mut x = stored(&data[group.rank()], dtype);
            match group.reduce_scatter("part", &x, op) {
                Ok(part) => {
                    let start = group.rank() * part.numel();
                    expect(&part, &expected[start..start + part.numel()], "a part");
                }
                Err(error) => assert!(!len.is_multiple_of(n), "{error}"),
            }
            expect(&group.all_reduce("all", &x, op).unwrap(), &expected, "all");
            group.all_reduce_in_place("in place", &mut x, op).unwrap();
            expect(&x, &expected, "in place");
        });
    }
}

#[test]
fn floats_are_added_in_f32_and_rounded_once() {
    for n in [2, 3, 4] {
        for len in [0, 1, 35, 4 * 3 * 5000] {
            reductions(n, len);
        }
    }
}

#[test]
fn a_rounded_sum_differs_from_sums_that_are_rounded_on_the_way() {
    // 256 + 1 rounds to 256 in bf16: only a sum in f32 sees the ones.
    let parts = [256.0, 1.0, 1.0, 1.0];
    for (op, expected) in [(ReduceOp::Sum, 260.0), (ReduceOp::Avg, 65.0)] {
        let results = ranks(4, |group| {
            group
                .all_reduce("x", &stored(&[parts[group.rank()]], DType::BF16), op)
                .unwrap()
                .to_f32_vec()
                .unwrap()
        });
        // 259 lies between 258 and 260, 64.75 between 64.5 and 65: ties go to the even mantissa.
        assert!(results.iter().all(|result| *result == [expected]), "{op}: {results:?}");
    }
}

#[test]
fn integers_are_added_exactly_and_an_overflow_is_an_error_on_all_ranks() {
    let results = ranks(3, |group| {
        let of = |values: [i32; 3]| Tensor::from_vec(values.to_vec(), [3], &Device::cpu()).unwrap();
        let mine = [[i32::MAX, 7, -5], [1, -9, -5], [-1, 4, 6]][group.rank()];
        let sum = group.all_reduce("tokens", &of(mine), ReduceOp::Sum).unwrap().to_vec::<i32>().unwrap();
        let max = group.all_reduce("tokens", &of(mine), ReduceOp::Max).unwrap().to_vec::<i32>().unwrap();
        let part = group.reduce_scatter("tokens", &of(mine), ReduceOp::Sum).unwrap().to_vec::<i32>().unwrap();
        assert_eq!(part, [sum[group.rank()]]);
        let mut large = of([i32::MAX / 2, 0, 0]);
        let errors = [
            group.all_reduce("large", &large, ReduceOp::Sum).unwrap_err().to_string(),
            group.all_reduce_in_place("large", &mut large, ReduceOp::Sum).unwrap_err().to_string(),
            group.reduce_scatter("large", &large, ReduceOp::Sum).unwrap_err().to_string(),
            group.all_reduce("mean", &large, ReduceOp::Avg).unwrap_err().to_string(),
        ];
        assert_eq!(
            errors,
            [
                "all_reduce(sum) `large`: a sum does not fit into i32: add smaller numbers, or in f32",
                "all_reduce(sum) `large`: a sum does not fit into i32: add smaller numbers, or in f32",
                "reduce_scatter(sum) `large`: a sum does not fit into i32: add smaller numbers, or in f32",
                "all_reduce(avg) `mean`: dtype i32: expected f32, bf16 or f16; cast first",
            ]
        );
        assert_eq!(large.to_vec::<i32>().unwrap(), [i32::MAX / 2, 0, 0]);
        group.barrier().unwrap();
        (sum, max)
    });
    // The sum fits, though a partial one does not.
    assert_eq!(results, vec![(vec![i32::MAX, 2, -4], vec![i32::MAX, 7, 6]); 3]);
}

#[test]
fn an_average_keeps_infinity_and_nan() {
    let parts = [[f32::INFINITY, f32::NAN, -0.0], [1.0, 1.0, -0.0]];
    for dtype in FLOATS {
        let results = ranks(2, |group| {
            let x = stored(&parts[group.rank()], dtype);
            group.all_reduce("x", &x, ReduceOp::Avg).unwrap().to_f32_vec().unwrap()
        });
        for result in results {
            assert!(result[0] == f32::INFINITY && result[1].is_nan(), "{result:?}");
            assert_eq!(result[2].to_bits(), (-0.0f32).to_bits());
        }
    }
}
