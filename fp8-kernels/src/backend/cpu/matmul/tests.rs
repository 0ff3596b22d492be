//! Every set of vectors against the plainest loop, bit by bit: the models of all of them, and those that this CPU has.

mod packed;

use super::available::Pairs;
use super::lanes::Portable;
use super::path::CpuPath;
use super::task::{Blocks, Parts};
use super::vectors::Vectors;
use super::{Elements, Epilogue, Factors, Matrix, Out, matmul, matmul_on, takes_pairs};
use crate::Encoding;
use crate::backend::cpu::Floats;
use half::{bf16, f16};
use proptest::prelude::*;

/// All models, and the lanes of every path of this CPU.
fn all_vectors() -> Vec<Vectors> {
    let models = [Vectors::Model8(Portable), Vectors::Model16(Portable), Vectors::Model16Pairs(Portable)];
    CpuPath::available().map(|path| path.vectors(Pairs::Always)).chain(models).collect()
}

#[derive(Debug, Clone)]
enum Values {
    F32(Vec<f32>),
    BF16(Vec<bf16>),
    F16(Vec<f16>),
    Codes(Vec<u8>, Encoding),
}

impl Values {
    fn get(&self, i: usize) -> f32 {
        match self {
            Self::F32(x) => x[i],
            Self::BF16(x) => x[i].to_f32(),
            Self::F16(x) => x[i].to_f32(),
            Self::Codes(x, encoding) => encoding.to_f32(x[i]),
        }
    }

    fn elements(&self) -> Elements<'_> {
        match self {
            Self::F32(x) => Elements::Floats(Floats::F32(x)),
            Self::BF16(x) => Elements::Floats(Floats::BF16(x)),
            Self::F16(x) => Elements::Floats(Floats::F16(x)),
            Self::Codes(x, encoding) => Elements::Codes(x, *encoding),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    E4M3,
    E5M2,
    F32,
    BF16,
    F16,
}

/// The factors of a product: two numbers, or random ones for each row, or for each row and so many values of k.
#[derive(Debug, Clone, Copy)]
enum Scales {
    Tensors([f32; 2]),
    Rows,
    Blocks(usize),
}

/// The parameters of a product, apart from the lanes, the blocks and the parts that compute it.
#[derive(Debug, Clone, Copy)]
struct Case {
    dims: [usize; 3],
    kinds: [Kind; 2],
    is_along_k: [bool; 2],
    factors: Option<Scales>,
    has_bias: bool,
    accumulate: bool,
    /// f32, bf16 or f16.
    out: Kind,
    /// One value in this many is a NaN, an infinity, a zero or subnormal; 0 for none.
    specials: u64,
    /// Elements between the lines of an operand.
    gap: usize,
    seed: u64,
}

impl Case {
    fn plain(dims: [usize; 3], kinds: [Kind; 2], seed: u64) -> Self {
        let is_along_k = [seed.is_multiple_of(2), (seed / 2).is_multiple_of(2)];
        let out = Kind::F32;
        Self {
            dims,
            kinds,
            is_along_k,
            factors: None,
            has_bias: false,
            accumulate: false,
            out,
            specials: 0,
            gap: 0,
            seed,
        }
    }

    /// Computes the case with a loop, then with each of `vectors`, and compares.
    fn check(&self, vectors: &[Vectors], parts: Parts, blocks: Option<Blocks>) {
        let [m, n, k] = self.dims;
        let mut random = Random(self.seed);
        let operands = [(m, 0), (n, 1)].map(|(outer, side)| {
            let stride = self.gap + if self.is_along_k[side] { k } else { outer };
            let lines = if self.is_along_k[side] { outer } else { k };
            (random.values(self.kinds[side], lines * stride, self.specials), stride)
        });
        let [(a, a_stride), (b, b_stride)] = &operands;
        let at = |side: usize, stride: usize, outer: usize, k: usize| {
            if self.is_along_k[side] { outer * stride + k } else { k * stride + outer }
        };
        let bias: Vec<f32> = (0..n).map(|_| random.float(self.specials)).collect();
        let old: Vec<f32> = (0..m * n).map(|_| random.float(self.specials)).collect();
        let length = if let Some(Scales::Blocks(length)) = self.factors { length } else { k.max(1) };
        let [fa, fb] = [m, n].map(|outer| -> Vec<f32> {
            (0..outer * k.div_ceil(length).max(1)).map(|_| random.float(self.specials)).collect()
        });

        // Without a block there is no sum that could have factors.
        let factors = self.factors.filter(|factors| k > 0 || !matches!(factors, Scales::Blocks(_)));
        let mut want = Vec::new();
        for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
            let old = old[i * n + j];
            let mut sum = if self.accumulate && factors.is_none() { old } else { 0.0 };
            let product = |k: usize| (a.get(at(0, *a_stride, i, k)), b.get(at(1, *b_stride, j, k)));
            let add = |sum: f32, k: usize| product(k).0.mul_add(product(k).1, sum);
            match factors {
                None => sum = (0..k).fold(sum, add),
                Some(Scales::Tensors([first, second])) => sum = (0..k).fold(sum, add) * first * second,
                Some(Scales::Rows) => sum = (0..k).fold(sum, add) * fa[i] * fb[j],
                Some(Scales::Blocks(length)) => {
                    for (block, first) in (0..k).step_by(length).enumerate() {
                        let part = (first..k.min(first + length)).fold(0.0, add);
                        sum += part * fa[block * m + i] * fb[block * n + j];
                    }
                }
            }
            if self.has_bias {
                sum += bias[j];
            }
            if self.accumulate && factors.is_some() {
                sum += old;
            }
            // Nothing is added, so nothing is written.
            let is_kept = k == 0 && self.accumulate && !self.has_bias;
            let sum = if is_kept { old } else { sum };
            let sum = if sum.is_nan() && !is_kept { f32::NAN } else { sum };
            want.push(match self.out {
                // Every NaN that is rounded to 16 bits.
                Kind::BF16 | Kind::F16 if sum.is_nan() => 0x7FFF,
                Kind::BF16 => u32::from(bf16::from_f32(sum).to_bits()),
                Kind::F16 => u32::from(f16::from_f32(sum).to_bits()),
                _ => sum.to_bits(),
            });
        }

        let [a, b] = [(a, *a_stride, 0), (b, *b_stride, 1)].map(|(values, stride, side)| {
            match self.is_along_k[side] {
                true => Matrix::along_k(values.elements(), stride),
                false => Matrix::across_k(values.elements(), stride),
            }
        });
        let bias = self.has_bias.then_some(&*bias);
        let factors = match factors {
            None => Factors::None,
            Some(Scales::Tensors(factors)) => Factors::Tensors(factors),
            Some(Scales::Rows) => Factors::Rows { a: &fa, b: &fb },
            Some(Scales::Blocks(length)) => Factors::Blocks { a: &fa, b: &fb, length },
        };
        let epilogue = Epilogue { factors, bias, accumulate: self.accumulate, ..Epilogue::default() };
        for &vectors in vectors {
            if vectors.has_pairs() && !takes_pairs(a, b, &epilogue) {
                continue;
            }
            let blocks = blocks.unwrap_or(Blocks::new(vectors));
            let compute = |out: Out<'_>| {
                matmul_on(vectors, "test", self.dims, a, b, &epilogue, out, parts, blocks).unwrap();
            };
            let got: Vec<u32> = match self.out {
                Kind::BF16 => {
                    let mut out = vec![bf16::MAX; m * n];
                    compute(Out::bf16(&mut out));
                    out.iter().map(|v| v.to_bits().into()).collect()
                }
                Kind::F16 => {
                    let mut out = vec![f16::MAX; m * n];
                    compute(Out::f16(&mut out));
                    out.iter().map(|v| v.to_bits().into()).collect()
                }
                _ => {
                    let mut out = if self.accumulate { old.clone() } else { vec![f32::MAX; m * n] };
                    compute(Out::f32(&mut out));
                    out.iter().map(|v| v.to_bits()).collect()
                }
            };
            let wrong = got.iter().zip(&want).filter(|(got, want)| got != want).count();
            if let Some(i) = (0..m * n).find(|&i| got[i] != want[i]) {
                panic!(
                    "{vectors:?} {parts:?} {blocks:?} {self:?}: [{}, {}] is {:08x}, not {:08x}; {wrong} of {} differ",
                    i / n,
                    i % n,
                    got[i],
                    want[i],
                    m * n
                );
            }
        }
    }
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A value of no round binary form.
    fn float(&mut self, specials: u64) -> f32 {
        const SPECIAL: [f32; 8] =
            [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, 1e-41, -3e-45];
        if specials > 0 && self.next().is_multiple_of(specials) {
            return SPECIAL[self.next() as usize % SPECIAL.len()];
        }
        (self.next() as f64 / u64::MAX as f64 * 4.0 - 2.0) as f32
            * [1.0, 1e-3, 40.0][self.next() as usize % 3]
    }

    fn values(&mut self, kind: Kind, len: usize, specials: u64) -> Values {
        let mut code = |is_special: fn(u8) -> bool| {
            let code = self.next() as u8;
            // Of E4M3's 256 codes 2 are NaN, of E5M2's 8 are NaN or infinite: enough to spoil most sums.
            let keep = !is_special(code) || specials > 0 && self.next().is_multiple_of(specials);
            if keep { code } else { code & 0x3F }
        };
        match kind {
            Kind::E4M3 => {
                Values::Codes((0..len).map(|_| code(|c| c & 0x7F == 0x7F)).collect(), Encoding::E4M3)
            }
            Kind::E5M2 => {
                Values::Codes((0..len).map(|_| code(|c| c & 0x7F > 0x7B)).collect(), Encoding::E5M2)
            }
            Kind::F32 => Values::F32((0..len).map(|_| self.float(specials)).collect()),
            Kind::BF16 => Values::BF16((0..len).map(|_| bf16::from_f32(self.float(specials))).collect()),
            Kind::F16 => Values::F16((0..len).map(|_| f16::from_f32(self.float(specials))).collect()),
        }
    }
}

const FP8: [[Kind; 2]; 3] = [[Kind::E4M3, Kind::E4M3], [Kind::E5M2, Kind::E4M3], [Kind::E4M3, Kind::E5M2]];
const OTHERS: [[Kind; 2]; 4] =
    [[Kind::F32, Kind::F32], [Kind::BF16, Kind::F32], [Kind::F16, Kind::BF16], [Kind::F32, Kind::E4M3]];

fn all_kinds() -> impl Iterator<Item = [Kind; 2]> + Clone {
    FP8.into_iter().chain(OTHERS)
}

#[test]
fn every_extent_up_to_70_is_the_loop() {
    let vectors = all_vectors();
    for (extent, kinds) in (1..=70).zip(all_kinds().cycle()) {
        for (seed, dims) in [[extent, 19, 33], [13, extent, 18], [14, 35, extent]].into_iter().enumerate() {
            for layouts in 0..4 {
                let seed = (extent * 12 + seed * 4) as u64 + layouts;
                Case::plain(dims, kinds, seed).check(&vectors, Parts::ONE, None);
            }
        }
    }
}

#[test]
fn long_sums_are_the_loop() {
    let vectors = all_vectors();
    for (seed, kinds) in (0..).zip(all_kinds()) {
        for dims in [[3, 34, 5000], [13, 1, 1023], [1, 17, 2049]] {
            Case::plain(dims, kinds, seed).check(&vectors, Parts::ONE, None);
        }
    }
}

#[test]
fn products_of_no_elements_are_the_epilogue_of_zero() {
    let vectors = all_vectors();
    for dims in [[0, 3, 4], [3, 0, 4], [3, 4, 0], [0, 0, 0]] {
        for (has_bias, accumulate) in [(false, false), (true, false), (false, true)] {
            let case = Case { has_bias, accumulate, ..Case::plain(dims, FP8[0], 1) };
            case.check(&vectors, Parts { rows: 2, cols: 2 }, None);
        }
    }
}

#[test]
fn subnormal_outputs_survive_an_accumulation() {
    // `vdpbf16ps` would flush them: FP8 products with factors are added last, others are computed without the instruction.
    for factors in [Some(Scales::Tensors([1e-30, 1e-12])), None] {
        let case = Case { factors, accumulate: true, specials: 3, ..Case::plain([9, 33, 7], FP8[1], 5) };
        case.check(&all_vectors(), Parts::ONE, None);
    }
    let zeros = [0u8; 3 * 2];
    let x = |rows: usize| Matrix::along_k(Elements::Codes(&zeros[..rows * 2], Encoding::E4M3), 2);
    let epilogue = Epilogue { accumulate: true, ..Epilogue::default() };
    let mut out = [1e-41f32, -3e-45, -0.0];
    matmul("test", [1, 3, 2], x(1), x(3), &epilogue, Out::f32(&mut out)).unwrap();
    assert_eq!(out.map(f32::to_bits), [1e-41f32, -3e-45, 0.0].map(f32::to_bits));
}

#[test]
fn sums_of_blocks_of_k_have_factors_of_their_own() {
    let vectors = all_vectors();
    for (seed, kinds) in (0..).zip(FP8) {
        for (length, dims) in
            [(32, [14, 40, 300]), (128, [13, 70, 300]), (128, [5, 6, 128]), (32, [25, 33, 31])]
        {
            for accumulate in [false, true] {
                let factors = Some(Scales::Blocks(length));
                Case { factors, accumulate, ..Case::plain(dims, kinds, seed) }.check(
                    &vectors,
                    Parts::ONE,
                    None,
                );
            }
        }
    }
}

#[test]
fn the_number_of_threads_is_not_seen() {
    let vectors = all_vectors();
    for threads in 1..=4 {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            for kinds in [FP8[0], OTHERS[0]] {
                let case = Case { has_bias: true, ..Case::plain([150, 140, 130], kinds, 3) };
                case.check(&vectors, Parts::new([150, 140, 1 << 20], threads), None);
            }
        });
    }
}

#[test]
fn parts_are_at_least_the_threads_and_cover_the_output_once() {
    for threads in 1..=9 {
        for [m, n] in [[1, 1], [1, 5000], [5000, 1], [768, 384], [100, 100]] {
            let parts = Parts::new([m, n, 1 << 20], threads);
            assert!(parts.rows * parts.cols >= threads || m * n < 4, "{m}×{n} {threads} {parts:?}");
            let seen = std::sync::Mutex::new(vec![0; m * n]);
            parts
                .for_each([m, n], |rows, cols| {
                    let mut seen = seen.lock().unwrap();
                    rows.for_each(|i| cols.clone().for_each(|j| seen[i * n + j] += 1));
                    Ok(())
                })
                .unwrap();
            assert!(seen.into_inner().unwrap().iter().all(|&count| count == 1), "{m}×{n} {threads}");
        }
    }
    assert_eq!(Parts::new([12, 12, 12], 64).rows, 1, "too small for a second thread");
}

#[test]
#[should_panic(expected = "m.checked_mul(n)")]
fn a_product_larger_than_its_output_is_not_computed() {
    let data = [1.0f32];
    let x = Matrix::along_k(Elements::Floats(Floats::F32(&data)), 0);
    let vectors = CpuPath::Scalar.vectors(Pairs::Never);
    let (epilogue, out) = (Epilogue::default(), Out::f32(&mut []));
    let dims = [1 << 32, 1 << 32, 1];
    let _ = matmul_on(vectors, "test", dims, x, x, &epilogue, out, Parts::ONE, Blocks::new(vectors));
}

fn case() -> impl Strategy<Value = Case> {
    let kinds = proptest::sample::select(all_kinds().collect::<Vec<_>>());
    let factors = proptest::option::of(proptest::sample::select(vec![
        Scales::Tensors([0.01f32, 7.0]),
        Scales::Tensors([1e-20, 1e-25]),
        Scales::Tensors([f32::INFINITY, 2.0]),
        Scales::Rows,
        Scales::Blocks(1),
        Scales::Blocks(7),
        Scales::Blocks(32),
        Scales::Blocks(64),
    ]));
    let outs = proptest::sample::select(vec![Kind::F32, Kind::F32, Kind::BF16, Kind::F16]);
    let shape = ([1usize..71, 1..71, 0..90], kinds, any::<[bool; 2]>());
    let specials = proptest::sample::select(vec![0, 0, 2, 40]);
    (shape, factors, any::<[bool; 2]>(), outs, specials, 0usize..3, any::<u64>()).prop_map(
        |((dims, kinds, is_along_k), factors, [has_bias, accumulate], out, specials, gap, seed)| {
            let accumulate = accumulate && out == Kind::F32;
            Case { dims, kinds, is_along_k, factors, has_bias, accumulate, out, specials, gap, seed }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Whatever blocks are packed at a time, however the output is divided, with NaN, infinities and subnormal values.
    #[test]
    fn blocks_and_parts_are_not_seen(
        case in case(),
        blocks in [1usize..100, 1..100, 1..100],
        parts in [1usize..4, 1..4],
    ) {
        let [rows, cols, ks] = blocks;
        let parts = Parts { rows: parts[0], cols: parts[1] };
        case.check(&all_vectors(), parts, Some(Blocks { rows, cols, ks }));
    }
}

/// The products that read `b` as it lies, and the first that do not: each height of a tile, rests of k and of n, all factors, bias,
/// accumulation and outputs.
#[test]
fn products_of_few_rows_have_the_bits_of_the_plain_loop() {
    use Kind::{BF16, E4M3, E5M2, F16, F32};
    let vectors = all_vectors();
    let sizes = [0, 1, 15, 16, 17, 33, 70, 128, 263].map(|k| [1, 16, 37].map(|n| (n, k)));
    let mut seed = 0u64;
    for m in [1, 2, 3, 6, 7, 8, 9, 12, 13] {
        for (n, k) in sizes.into_iter().flatten() {
            for kinds in [[F32, F32], [BF16, F32], [F32, BF16], [F16, F16], [E4M3, E4M3], [E4M3, E5M2]] {
                seed += 1;
                let scales =
                    [None, Some(Scales::Tensors([0.5, 3.0])), Some(Scales::Rows), Some(Scales::Blocks(32))];
                let accumulate = seed.is_multiple_of(3);
                let case = Case {
                    is_along_k: [seed.is_multiple_of(2), true],
                    factors: scales[seed as usize % 4],
                    has_bias: seed.is_multiple_of(5),
                    accumulate,
                    out: if accumulate { F32 } else { [F32, BF16, F16][seed as usize % 3] },
                    specials: [0, 9][seed as usize % 2],
                    gap: seed as usize % 4,
                    ..Case::plain([m, n, k], kinds, seed)
                };
                case.check(&vectors, Parts { rows: 1, cols: 1 + seed as usize % 3 }, None);
            }
        }
    }
}

/// Every code at every place of the words that are decoded at a time.
#[test]
fn every_code_is_decoded_where_it_is_stored() {
    const K: usize = 64;
    for encoding in [Encoding::E4M3, Encoding::E5M2] {
        for place in 0..K {
            let mut a = [0u8; K];
            a[place] = encoding.from_f32(1.0);
            let b: Vec<u8> =
                (0..=255).flat_map(|code| (0..K).map(move |k| if k == place { code } else { 0 })).collect();
            let [a, b] = [&a[..], &b].map(|codes| Matrix::along_k(Elements::Codes(codes, encoding), K));
            for vectors in all_vectors() {
                let mut out = [f32::MAX; 256];
                let dims = [1, 256, K];
                let (epilogue, blocks) = (Epilogue::default(), Blocks::new(vectors));
                matmul_on(vectors, "test", dims, a, b, &epilogue, Out::f32(&mut out), Parts::ONE, blocks)
                    .unwrap();
                for (code, got) in (0..=255).zip(out) {
                    let want = encoding.to_f32(code);
                    let is_equal = got == want || got.is_nan() && want.is_nan();
                    assert!(is_equal, "{vectors:?} {encoding} {code:#04x} at {place}: {got}, not {want}");
                }
            }
        }
    }
}
