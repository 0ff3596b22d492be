//! Activations and their gradients with scales for rows, blocks and MX blocks, bit for bit as on the CPU.

use super::case::{Outcome, cases};
use super::compare::same;
use super::data::{FLOATS, tensor};
use super::quantize_blocks::{results, rules, uneven};
use super::reference::same_as_cpu;
use fp8_kernels::ops::Activation;
use fp8_kernels::{DType, Device, Encoding, Scale, Slot, Tensor, ops};

cases![activations: Dtypes, gradients_of_activations: Dtypes, needles];

fn activations(device: &Device, dtype: DType) -> Outcome {
    for (i, activation) in Activation::ALL.into_iter().enumerate() {
        let [rows, cols] = [[40, 72], [130, 33], [5, 136]][i % 3];
        let width = if activation.is_gated() { 2 * cols } else { cols };
        for rule in rules().into_iter().skip(i % 3).step_by(3) {
            same_as_cpu(&format!("{activation} {dtype} [{rows}, {cols}] {rule:?}"), device, |device| {
                let h = uneven([rows, width], dtype, i as u64, device)?;
                results(device, Encoding::E4M3, rule, i % 2 == 0, |slot| {
                    ops::activation(&h, activation, slot)
                })
            })?;
        }
    }
    Ok(())
}

/// With sums of columns, whose order is that of the device's own column sums.
fn gradients_of_activations(device: &Device, dtype: DType) -> Outcome {
    for (i, activation) in Activation::ALL.into_iter().enumerate() {
        let [rows, cols] = [[40, 72], [130, 33], [5, 136], [33, 13]][i % 4];
        let width = if activation.is_gated() { 2 * cols } else { cols };
        for rule in rules().into_iter().skip(i % 3).step_by(3) {
            let what = format!("{activation} {dtype} [{rows}, {cols}] {rule:?}");
            let gradient = |device: &Device, h: &Tensor, slot: &Slot<'_>| {
                let dy = uneven([rows, cols], FLOATS[i % 3], 20 + i as u64, device)?;
                ops::activation_backward_quantize_dbias(&dy, h, activation, slot)
            };
            same_as_cpu(&what, device, |device| {
                let h = uneven([rows, width], dtype, i as u64, device)?;
                results(device, Encoding::E5M2, rule, i % 2 == 0, |slot| {
                    gradient(device, &h, slot).map(|(codes, _)| codes)
                })
            })?;
            let h = uneven([rows, width], dtype, i as u64, device)?;
            let slot = Slot { scale: Scale::Blocks(rule), ..Slot::off(Encoding::E5M2) };
            let sums = gradient(device, &h, &slot)?.1.to_f32_vec()?;
            let high = gradient(device, &h, &Slot::off(Encoding::E5M2))?.1.to_f32_vec()?;
            same(&what, &sums, &high, width)?;
        }
    }
    Ok(())
}

/// The largest value in the rows of each warp, and in each lane's columns.
fn needles(device: &Device) -> Outcome {
    for (i, activation) in [Activation::Srelu, Activation::Sreglu].into_iter().enumerate() {
        let (rows, cols) = (128, 128);
        let width = if activation.is_gated() { 2 * cols } else { cols };
        for warp in 0..16 {
            let rule = rules()[(warp + i) % 9];
            same_as_cpu(&format!("{activation}, a needle in warp {warp}, {rule:?}"), device, |device| {
                let place = (8 * warp + warp % 8) * width + (8 * warp + i) % cols;
                let mut values = vec![0.5; rows * width];
                values[place] = 30.0;
                let h = tensor(values, [rows, width], DType::F32, device)?;
                let dy = Tensor::full(1.0, [rows, cols], DType::F32, device)?;
                let encoding = Encoding::E4M3;
                let mut all =
                    results(device, encoding, rule, false, |slot| ops::activation(&h, activation, slot))?;
                all.extend(results(device, encoding, rule, false, |slot| {
                    ops::activation_backward_quantize_dbias(&dy, &h, activation, slot).map(|(codes, _)| codes)
                })?);
                Ok(all)
            })?;
        }
    }
    Ok(())
}
