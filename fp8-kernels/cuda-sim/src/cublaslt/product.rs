//! The product, when its turn in the stream comes.

use fp8_format::{E2M1, E4M3, E5M2};
use half::{bf16, f16};
use ptx_interp::Memory;

use super::check::Shape;
use super::clock;
use super::factors::Factors;
use super::types::{ScaleMode, Type};
use crate::fault::Fault;

/// One queued product. Addresses are the device's; 0 stands for none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    pub(super) shape: Shape,
    /// A, B.
    pub(super) transposed: [bool; 2],
    /// A, B, C, D.
    pub(super) addresses: [u64; 4],
    pub(super) lds: [usize; 4],
    pub(super) alpha: Scalar,
    pub(super) beta: Scalar,
    pub(super) bias: u64,
    /// A, B, C, D.
    pub(super) scales: [u64; 4],
    /// A, B.
    pub(super) modes: [ScaleMode; 2],
    pub(super) amax_d: u64,
    /// Address and bytes.
    pub(super) workspace: (u64, usize),
    /// The index of the chosen kernel.
    pub(super) kernel: usize,
    /// The time of the chosen kernel, in quarters of the usual time.
    pub(super) slowness: u64,
    /// As the setting of this name.
    pub(super) fp8_sum_bits: Option<u32>,
}

/// Alpha or beta.
#[derive(Clone, Copy, Debug)]
pub(super) enum Scalar {
    Host(f32),
    /// The address of an f32, which is read when the product runs.
    Device(u64),
}

impl Scalar {
    /// The address on the device.
    pub(super) fn address(self) -> Option<u64> {
        match self {
            Self::Host(_) => None,
            Self::Device(address) => Some(address),
        }
    }

    fn value(self, memory: &Memory) -> Result<f32, Fault> {
        match self {
            Self::Host(value) => Ok(value),
            Self::Device(address) => number(memory, address),
        }
    }
}

/// The number of products that tensor cores add at a time.
const STEP: usize = 32;

impl Product {
    /// Computes D and answers with the simulated nanoseconds it took.
    pub(crate) fn perform(&self, memory: &Memory) -> Result<u64, Fault> {
        let Shape { m, n, k, types: [ta, tb, tc, td], bias } = self.shape;
        let (alpha, beta) = (self.alpha.value(memory)?, self.beta.value(memory)?);
        let [scale_c, scale_d] = [factor(memory, self.scales[2])?, factor(memory, self.scales[3])?];
        let factors_a = Factors::read(memory, self.scales[0], self.modes[0], [m, k])?;
        let factors_b = Factors::read(memory, self.scales[1], self.modes[1], [n, k])?;
        let depth = self.modes[0].depth();
        // Columns of A's rows: `a[i + kk·m]`; B by columns: `b[kk + j·k]`.
        let a = self.matrix(memory, 0, ta, if self.transposed[0] { [k, m] } else { [m, k] })?;
        let a = if self.transposed[0] { turned(&a, k, m) } else { a };
        let b = self.matrix(memory, 1, tb, if self.transposed[1] { [n, k] } else { [k, n] })?;
        let b = if self.transposed[1] { turned(&b, n, k) } else { b };
        let c = if beta == 0.0 { Vec::new() } else { self.matrix(memory, 2, tc, [m, n])? };
        let bias = match bias {
            Some(kind) => values(&read(memory, self.bias, kind.bytes(m))?, kind),
            None => Vec::new(),
        };
        // A kernel's partial sums: whoever else keeps anything there loses it.
        let (workspace, bytes) = self.workspace;
        if bytes > 0 {
            memory.fill(workspace, &[0x5a], bytes)?;
        }
        let (mut amax, mut sums, mut parts) = (0.0f32, vec![0.0f32; m], vec![0.0f32; m]);
        for j in 0..n {
            sums.fill(0.0);
            let column = &b[j * k..][..k];
            for (block, start) in (0..k).step_by(depth.unwrap_or(k)).enumerate() {
                let end = depth.map_or(k, |depth| k.min(start + depth));
                self.add_products(&a, &column[..end], start, &mut parts);
                for (i, (sum, part)) in sums.iter_mut().zip(&parts).enumerate() {
                    *sum = self.add_block(*sum, *part, factors_a.at(i, block), factors_b.at(j, block));
                }
            }
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum *= alpha;
                if beta != 0.0 {
                    *sum += beta * scale_c * c[i + j * m];
                }
                if let Some(bias) = bias.get(i) {
                    *sum += bias;
                }
                amax = amax.max(sum.abs());
                if td.is_fp8() {
                    *sum *= scale_d;
                }
            }
            let at = self.addresses[3] + td.bytes(j * self.lds[3]) as u64;
            memory.write(at, &bytes_of(&sums, td))?;
        }
        if self.amax_d != 0 {
            memory.write(self.amax_d, &amax.to_le_bytes())?;
        }
        Ok(clock::time(self.kernel, 2000 + (m * n * k) as u64 / 1000 * self.slowness / 4))
    }

    /// Sums of the products of A's rows with a column of B, from k = `start` to the column's end.
    fn add_products(&self, a: &[f32], column: &[f32], start: usize, sums: &mut [f32]) {
        let m = self.shape.m;
        match self.fp8_sum_bits.filter(|_| self.shape.types[0].is_fp8()) {
            Some(bits) => {
                for (i, sum) in sums.iter_mut().enumerate() {
                    let products = column.iter().enumerate().skip(start).map(|(kk, y)| a[i + kk * m] * y);
                    *sum = aligned_sum(products, bits);
                }
            }
            None => {
                sums.fill(0.0);
                for (kk, factor) in column.iter().enumerate().skip(start) {
                    for (sum, value) in sums.iter_mut().zip(&a[kk * m..][..m]) {
                        *sum += value * factor;
                    }
                }
            }
        }
    }

    /// Adds a block's sum with its factors. Hopper multiplies by the factor of a 1D operand, and adds the product with the other
    /// factor by one FMA; B first where both are 1D, as for one factor: for the caller's row-major product that is its left operand.
    fn add_block(&self, sum: f32, part: f32, factor_a: f32, factor_b: f32) -> f32 {
        match self.modes {
            [ScaleMode::Vec128, ScaleMode::Tile128] => (part * factor_a).mul_add(factor_b, sum),
            [ScaleMode::Vec128 | ScaleMode::Tile128, _] => (part * factor_b).mul_add(factor_a, sum),
            // For FP4 the sum of 16 products times two E4M3 factors has 20 bits, so only the blocks' sum is rounded.
            [ScaleMode::Vec16 | ScaleMode::Vec32, _] => sum + part * factor_b * factor_a,
            [ScaleMode::Scalar | ScaleMode::Outer, _] => part * factor_b * factor_a,
        }
    }

    /// The elements of a matrix as stored, column by column without gaps.
    fn matrix(
        &self,
        memory: &Memory,
        index: usize,
        kind: Type,
        [rows, cols]: [usize; 2],
    ) -> Result<Vec<f32>, Fault> {
        let mut all = Vec::with_capacity(rows * cols);
        for col in 0..cols {
            let at = self.addresses[index] + kind.bytes(col * self.lds[index]) as u64;
            all.extend(values(&read(memory, at, kind.bytes(rows))?, kind));
        }
        Ok(all)
    }
}

/// [`STEP`] products at a time and the sum so far are cut off `bits` below the largest of them, and then added.
fn aligned_sum(products: impl Iterator<Item = f32>, bits: u32) -> f32 {
    let products: Vec<f32> = products.collect();
    products.chunks(STEP).fold(0.0, |sum, step| {
        let terms = || step.iter().copied().chain([sum]);
        let largest = terms().fold(0.0f32, |largest, term| largest.max(term.abs()));
        if largest == 0.0 || !terms().all(f32::is_finite) {
            return terms().sum();
        }
        // Steps of the smallest bit that is kept, in doubles: nothing else is rounded.
        let unit = f64::from(largest).log2().floor().exp2() / f64::from(bits).exp2();
        let sum: f64 = terms().map(|term| (f64::from(term) / unit).trunc()).sum();
        (sum * unit) as f32
    })
}

/// 1 for a scale that was not given.
fn factor(memory: &Memory, address: u64) -> Result<f32, Fault> {
    if address == 0 { Ok(1.0) } else { number(memory, address) }
}

fn number(memory: &Memory, address: u64) -> Result<f32, Fault> {
    let mut bytes = [0; 4];
    memory.read(address, &mut bytes)?;
    Ok(f32::from_le_bytes(bytes))
}

fn read(memory: &Memory, address: u64, bytes: usize) -> Result<Vec<u8>, Fault> {
    let mut all = vec![0; bytes];
    memory.read(address, &mut all)?;
    Ok(all)
}

/// The transpose of a column-major matrix.
fn turned(x: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    (0..rows).flat_map(|row| (0..cols).map(move |col| x[row + col * rows])).collect()
}

fn values(bytes: &[u8], kind: Type) -> Vec<f32> {
    let halves = || bytes.as_chunks::<2>().0.iter().map(|pair| u16::from_le_bytes(*pair));
    match kind {
        Type::F32 => bytes.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect(),
        Type::F16 => halves().map(|bits| f16::from_bits(bits).to_f32()).collect(),
        Type::Bf16 => halves().map(|bits| bf16::from_bits(bits).to_f32()).collect(),
        Type::E4m3 => bytes.iter().map(|code| E4M3::from_bits(*code).to_f32()).collect(),
        Type::E5m2 => bytes.iter().map(|code| E5M2::from_bits(*code).to_f32()).collect(),
        Type::E2m1 => bytes.iter().flat_map(|pair| E2M1::unpack(*pair)).map(E2M1::to_f32).collect(),
    }
}

fn bytes_of(values: &[f32], kind: Type) -> Vec<u8> {
    match kind {
        Type::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        Type::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        Type::Bf16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        Type::E4m3 => values.iter().map(|v| E4M3::from_f32_saturating(*v).to_bits()).collect(),
        Type::E5m2 => values.iter().map(|v| E5M2::from_f32_saturating(*v).to_bits()).collect(),
        Type::E2m1 => {
            let code = |v: Option<&f32>| v.map_or(E2M1::ZERO, |v| E2M1::from_f32(*v));
            values.chunks(2).map(|pair| E2M1::pack(code(pair.first()), code(pair.get(1)))).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_terms_beside_a_large_one_lose_their_bits() {
        let sum = |terms: &[f32], bits| aligned_sum(terms.iter().copied(), bits);
        assert_eq!(sum(&[1024.0, 0.75, -0.75, 0.25], 13), 1024.25);
        assert_eq!(sum(&[1024.0, 0.75, 0.75], 10), 1024.0);
        assert_eq!(sum(&[1024.0, 1.75, -1.75], 10), 1024.0);
        assert_eq!(sum(&[0.0, -0.0], 13), 0.0);
        // The sum so far counts, too.
        let mut long = vec![32.0; 32];
        long.push(0.75);
        assert_eq!([10, 12].map(|bits| sum(&long, bits)), [1024.0, 1024.75]);
        assert!(sum(&[f32::INFINITY, 1.0], 13).is_infinite() && sum(&[f32::NAN], 13).is_nan());
    }
}
