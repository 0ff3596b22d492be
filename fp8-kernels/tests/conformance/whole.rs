//! Inputs and checks for bf16 matrices that consist of whole tiles.

use super::case::Outcome;
use super::compare::same;
use super::data::{Random, exact};
use super::quantize::fp8;
use crate::oracle::fp8;
use fp8_kernels::{Cell, Device, Encoding, Operand, REST, Result, Slot, Tensor, TransposePolicy, bf16};

/// NaN of both signs and the ends of their ranges, and what is beside them.
pub(super) const EDGES: [u16; 9] = [0x7F81, 0x7FFF, 0xFF81, 0xFFFF, 0x7F80, 0xFF80, 0x7F7F, 0x8000, 0x0001];

pub(super) fn matrix(bits: Vec<u16>, [rows, cols]: [usize; 2], device: &Device) -> Result<Tensor> {
    Tensor::from_vec(bits.into_iter().map(bf16::from_bits).collect(), [rows, cols], device)
}

/// Normal values in which one in `every` is an edge.
pub(super) fn edged(shape: [usize; 2], every: u64, seed: u64, device: &Device) -> Result<Tensor> {
    let mut random = Random::new(seed);
    let mut value = || match random.bits() % every {
        0 => EDGES[(random.bits() % EDGES.len() as u64) as usize],
        _ => bf16::from_f32(random.normal()).to_bits(),
    };
    matrix((0..shape[0] * shape[1]).map(|_| value()).collect(), shape, device)
}

pub(super) fn with_cast(device: &Device) -> Device {
    device.clone().with_transpose_policy(TransposePolicy::WithCast)
}

/// A tile for each place of one thread's part that has the largest value, with NaN in another place of it or without: maxima with
/// and without NaN are found in different ways.
pub(super) fn needles_beside_nan(device: &Device) -> Result<Vec<Tensor>> {
    let place = |i: usize| (60 + i / 8) * 64 + 24 + i % 8;
    let tile = |i: usize| {
        let mut bits = vec![0x3F80; 128 * 64];
        bits[place(i % 32)] = bf16::from_f32(if i.is_multiple_of(2) { 1e4 } else { -1e4 }).to_bits();
        if i < 32 {
            bits[place((i + 11) % 32)] = 0xFF81;
        }
        matrix(bits, [128, 64], device)
    };
    (0..64).map(tile).collect()
}

/// Codes, the transpose, amax and factor of `run`, against the oracle.
pub(super) fn check(
    what: &str,
    x: &Tensor,
    encoding: Encoding,
    scale: f32,
    run: impl FnOnce(&Slot<'_>) -> Result<Operand>,
) -> Outcome {
    let device = x.device();
    let (cell, amax, rule) = (Cell::new(scale, device)?, Cell::new(REST, device)?, exact(encoding));
    let slot = Slot { amax: Some(&amax), columnwise: true, ..Slot::fixed(encoding, &cell, &rule) };
    let got = fp8(run(&slot)?)?;
    let want = fp8::quantize(&x.to_f32_vec()?, encoding, scale);
    let [rows, cols] = x.shape().matrix();
    same(what, &got.codes()?, &want.codes, cols)?;
    let turned = got.columnwise().ok_or("no transpose was made with the cast")?;
    same(
        &format!("{what}: transposed"),
        &turned.to_vec::<u8>()?,
        &fp8::transpose(&want.codes, rows, cols),
        rows,
    )?;
    same(&format!("{what}: amax"), &[amax.read()?], &[want.amax], 1)?;
    same(&format!("{what}: scale_inv"), &[got.scale_inv().item()?], &[1.0 / scale], 1)
}
