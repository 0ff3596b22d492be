//! Sizes that only a real device does in reasonable time: run where `FP8_CONFORMANCE_STRESS` is set.

use super::case::{Outcome, cases};
use super::compare::{equal, same};
use super::data::{FLOATS, Random, exact, normal};
use super::reference::{Got, same_as_cpu};
use fp8_kernels::{Cell, Counters, DType, Device, Encoding, REST, Slot, Tensor, TransposePolicy, ops};

cases![flat: DtypesAndFormats, tiles: DtypesAndFormats, random_shapes: DtypesAndFormats, many_blocks, memory_returns, threads];

fn quantized(
    device: &Device,
    shape: [usize; 2],
    dtype: DType,
    encoding: Encoding,
    columnwise: bool,
) -> Outcome {
    same_as_cpu(&format!("{dtype} {encoding} {shape:?}"), device, |device| {
        let device = &device.clone().with_transpose_policy(TransposePolicy::WithCast);
        let x = normal(shape, dtype, 1, device)?;
        let (cell, amax, counters, rule) =
            (Cell::new(100.0, device)?, Cell::new(REST, device)?, Counters::new(device)?, exact(encoding));
        let slot = Slot {
            amax: Some(&amax),
            counters: Some(&counters),
            columnwise,
            ..Slot::fixed(encoding, &cell, &rule)
        };
        let codes = ops::quantize(&x, &slot)?;
        let counts = counters.read()?;
        let counts =
            [counts.saturated, counts.underflowed, counts.elements, counts.nan].map(|count| count as f32);
        let mut results = vec![Got::Numbers(vec![amax.read()?]), Got::Numbers(counts.to_vec())];
        results.extend(codes.as_fp8().cloned().map(Got::from));
        Ok(results)
    })
}

fn flat(device: &Device, dtype: DType, encoding: Encoding) -> Outcome {
    quantized(device, [1, (1 << 25) + 3], dtype, encoding, false)
}

fn tiles(device: &Device, dtype: DType, encoding: Encoding) -> Outcome {
    quantized(device, [4099, 4104], dtype, encoding, true)?;
    quantized(device, [4096, 4099], dtype, encoding, true)
}

fn random_shapes(device: &Device, dtype: DType, encoding: Encoding) -> Outcome {
    let mut random = Random::new(7);
    for _ in 0..200 {
        let mut extent = |most: u64| 1 + (random.bits() % most) as usize;
        let shape = [extent(700), extent(700)];
        quantized(device, shape, dtype, encoding, shape[0] % 2 == 0)?;
    }
    Ok(())
}

/// More blocks than the device has room for at once, in every order it likes: a sum is the same each time.
fn many_blocks(device: &Device) -> Outcome {
    let x = normal([1 << 16, 520], DType::BF16, 2, device)?;
    let first = [ops::sum(&x)?, ops::column_sums(&x)?, ops::grad_norm(&[&x])?];
    for _ in 0..20 {
        let again = [ops::sum(&x)?, ops::column_sums(&x)?, ops::grad_norm(&[&x])?];
        for (again, first) in again.iter().zip(&first) {
            same("a sum", &again.to_f32_vec()?, &first.to_f32_vec()?, 520)?;
        }
    }
    Ok(())
}

/// Far more tensors than fit at once, of sizes that never repeat.
fn memory_returns(device: &Device) -> Outcome {
    for step in 0..2000usize {
        let x = Tensor::full(1.0, [1 << 20, 1 + step % 61], DType::F32, device)?;
        if step % 250 == 0 {
            equal("the last element", ops::max(&x)?.item()?, 1.0)?;
        }
    }
    Ok(())
}

fn threads(device: &Device) -> Outcome {
    let results = std::thread::scope(|scope| {
        let run = |seed: u64| {
            move || -> fp8_kernels::Result<Vec<f32>> {
                let x = normal([513, 129], FLOATS[seed as usize % 3], seed, device)?;
                let mut sums = Vec::new();
                for _ in 0..50 {
                    sums.push(ops::sum(&x)?.item()?);
                }
                Ok(sums)
            }
        };
        let threads: Vec<_> = (0..8).map(|seed| scope.spawn(run(seed))).collect();
        threads.into_iter().map(|thread| thread.join()).collect::<Vec<_>>()
    });
    for sums in results {
        let sums = sums.map_err(|_| "a thread panicked")??;
        equal("sums of one thread", sums.windows(2).all(|pair| pair[0] == pair[1]), true)?;
    }
    Ok(())
}
