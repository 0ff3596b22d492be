//! Products of NVFP4 codes against a loop over the values of codes and scales.

use super::super::Packed;
use super::*;
use fp8_format::{E2M1, E4M3};

/// Codes and scales of `[rows, k]`, with a row's scales for `height` of them.
struct Operand {
    codes: Vec<u8>,
    scales: Vec<E4M3>,
    rows: usize,
    k: usize,
    width: usize,
    height: usize,
}

impl Operand {
    fn new(random: &mut Random, [rows, k]: [usize; 2], height: usize, specials: u64) -> Self {
        // Some rows begin with a word, some do not.
        let width = k.div_ceil(2).next_multiple_of([1, 2, 4][random.next() as usize % 3]);
        let mut scale = || match specials > 0 && random.next().is_multiple_of(specials) {
            true => [E4M3::NAN, E4M3::ZERO, E4M3::MAX][random.next() as usize % 3],
            false => E4M3::from_bits(random.next() as u8 % 0x7F),
        };
        let scales = (0..rows.div_ceil(height) * k.div_ceil(16)).map(|_| scale()).collect();
        let codes = (0..rows * width).map(|_| random.next() as u8).collect();
        Self { codes, scales, rows, k, width, height }
    }

    fn matrix(&self) -> Matrix<'_> {
        let Self { codes, scales, k, width, height, .. } = self;
        let packed = Packed { codes, scales, width: *width, across: k.div_ceil(16), height: *height };
        Matrix::along_k(Elements::Packed(packed), self.k)
    }

    fn value(&self, row: usize, k: usize) -> f32 {
        let code = E2M1::unpack(self.codes[row * self.width + k / 2])[k % 2];
        code.to_f32() * self.scales[row / self.height * self.k.div_ceil(16) + k / 16].to_f32()
    }
}

/// Computes the sum of each output: of each 16 products by themselves, added up.
fn sums(a: &Operand, b: &Operand, [first, second]: [f32; 2], old: Option<&[f32]>) -> Vec<u32> {
    let outputs = (0..a.rows).flat_map(|i| (0..b.rows).map(move |j| (i, j)));
    let sum = |(i, j): (usize, usize)| {
        let mut sum = 0.0f32;
        for first in (0..a.k).step_by(16) {
            let products =
                (first..a.k.min(first + 16)).map(|k| f64::from(a.value(i, k)) * f64::from(b.value(j, k)));
            let block: f64 = products.sum();
            assert!(block.is_nan() || f64::from(block as f32) == block, "a sum of a block is exact");
            sum += block as f32;
        }
        let sum = sum * first * second + old.map_or(0.0, |old| old[i * b.rows + j]);
        if sum.is_nan() { f32::NAN } else { sum }
    };
    // Zeros of either sign: the sum of nothing but −0 is 0 where sums begin with 0.
    outputs.map(sum).map(|sum| (sum + 0.0).to_bits()).collect()
}

#[test]
fn products_of_packed_codes_have_the_bits_of_the_plain_loop() {
    let mut random = Random(9);
    let mut seed = 0;
    for m in [1, 2, 3, 4, 6, 7, 8, 9, 25] {
        for n in [1, 16, 17, 37, 64] {
            for k in [1, 15, 16, 31, 64, 127, 128, 129, 256, 300, 512, 640, 1100] {
                seed += 1;
                let specials = [0, 40][seed % 2];
                let a = Operand::new(&mut random, [m, k], 1, specials);
                let b = Operand::new(&mut random, [n, k], [1, 16][seed / 2 % 2], specials);
                let factors = [[0.5, 3.0], [1e-3, 7e-4]][seed % 2];
                let old: Vec<f32> = (0..m * n).map(|_| random.float(0)).collect();
                let accumulate = seed % 3 == 0;
                let want = sums(&a, &b, factors, accumulate.then_some(&*old));
                let factors = Factors::Segments(factors);
                let epilogue = Epilogue { factors, accumulate, ..Epilogue::default() };
                for vectors in all_vectors() {
                    let mut out = old.clone();
                    let (x, w) = (a.matrix(), b.matrix());
                    let parts = Parts { rows: 1, cols: 1 + seed % 3 };
                    let blocks = Blocks::new(vectors);
                    assert!(!vectors.has_pairs() || takes_pairs(x, w, &epilogue));
                    matmul_on(vectors, "test", [m, n, k], x, w, &epilogue, Out::f32(&mut out), parts, blocks)
                        .unwrap();
                    let got: Vec<u32> = out.iter().map(|x| (x + 0.0).to_bits()).collect();
                    let wrong = got.iter().zip(&want).filter(|(got, want)| got != want).count();
                    assert!(wrong == 0, "{vectors:?} {m} {n} {k} {seed}: {wrong} of {} differ", m * n);
                }
            }
        }
    }
}

#[test]
fn the_largest_sums_of_blocks_fit_their_integers() {
    let mut random = Random(3);
    for code in [[0x77, 0x77], [0xFF, 0xFF], [0x77, 0xFF], [0xF7, 0x7F], [0x88, 0x77], [0x00, 0xFF]] {
        for scale in [E4M3::MAX, E4M3::MIN_POSITIVE_SUBNORMAL] {
            let (m, n, k) = (13, 35, 47);
            let [a, b] = [(m, code[0]), (n, code[1])].map(|(rows, code)| {
                let mut operand = Operand::new(&mut random, [rows, k], 1, 0);
                operand.codes.fill(code);
                operand.scales.fill(scale);
                operand
            });
            let want = sums(&a, &b, [1.0, 1.0], None);
            let epilogue = Epilogue { factors: Factors::Segments([1.0, 1.0]), ..Epilogue::default() };
            for vectors in all_vectors() {
                let mut out = vec![0.0; m * n];
                let (x, w) = (a.matrix(), b.matrix());
                let blocks = Blocks::new(vectors);
                let out_view = Out::f32(&mut out);
                matmul_on(vectors, "test", [m, n, k], x, w, &epilogue, out_view, Parts::ONE, blocks).unwrap();
                let got: Vec<u32> = out.iter().map(|x| (x + 0.0).to_bits()).collect();
                assert_eq!(got, want, "{vectors:?} {code:x?} {scale}");
            }
        }
    }
}
