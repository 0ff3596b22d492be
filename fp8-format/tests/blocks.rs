//! Quantization by rows and blocks on every path against the plain model of `oracle/blocks.rs`: random matrices, all lengths,
//! all places of the destination, nothing written outside it.

#![expect(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod oracle;

use fp8_format::slice::{BlockOutput, BlockScaling, Codec, MxOutput, MxRounding, Path};
use fp8_format::{Blocks, E4M3, E5M2, E8M0, Error, Fp8, Source};
use half::{bf16, f16};
use oracle::blocks::{Results, Rule};
use oracle::matrices::matrix;
use proptest::prelude::*;

/// Miri is slow: it takes fewer of everything.
const IS_SLOW: bool = cfg!(miri);

/// The number of cases of each of the four properties.
const CASES: u32 = if IS_SLOW { 4 } else { 2500 };

/// Each path, with plain stores and with those past the caches. Miri runs the scalar path alone, which has plain stores.
fn codecs() -> Vec<Codec> {
    let streaming: &[usize] = if IS_SLOW { &[usize::MAX] } else { &[usize::MAX, 0] };
    Path::available()
        .flat_map(|path| streaming.iter().map(move |bytes| Codec::new().on(path).streaming_beyond(*bytes)))
        .collect()
}

/// The settings of a call.
#[derive(Clone, Copy, Debug)]
enum Setup {
    F32(BlockScaling),
    Mx(MxRounding),
}

impl Setup {
    fn blocks(self) -> Blocks {
        match self {
            Self::F32(scaling) => scaling.blocks,
            Self::Mx(_) => Blocks::Mx32,
        }
    }

    fn rule<S: Source>(self) -> Rule {
        match self {
            Self::F32(BlockScaling { blocks, power_2_scales, epsilon, scale_max }) => {
                let largest = match S::from_f32(1.0 + 1.0 / 256.0).to_f32() {
                    _ if blocks == Blocks::Row => f32::MAX,
                    1.0 => 3.389_531_4e38, // bf16
                    _ if S::from_f32(1e30).to_f32().is_infinite() => 65504.0,
                    _ => f32::MAX,
                };
                Rule::F32 { power_2_scales, epsilon, scale_max: scale_max.unwrap_or(largest) }
            }
            Self::Mx(rounding) => Rule::Mx { is_ceil: rounding == MxRounding::Ceil },
        }
    }
}

fn spec<T: Fp8>() -> oracle::Spec {
    if T::MAX == 448.0 { oracle::E4M3 } else { oracle::E5M2 }
}

/// Destinations between guards.
struct Room<T> {
    codes: Vec<T>,
    scale_inv: Vec<f32>,
    scale: Vec<f32>,
    e8m0: Vec<E8M0>,
    amax: Vec<f32>,
    offset: usize,
    /// Codes and scales.
    len: [usize; 2],
    setup: Setup,
}

const GUARD: u8 = 0x55;
const FLOAT_GUARD: f32 = -7.25;

impl<T: Fp8> Room<T> {
    fn new(setup: Setup, rows: usize, cols: usize, offset: usize) -> Self {
        let [height, width] = setup.blocks().grid(rows, cols);
        let (codes, scales) = (rows * cols, height * width);
        let floats = || vec![FLOAT_GUARD; scales + 2 * offset];
        Self {
            codes: vec![T::from_bits(GUARD); codes + 2 * offset],
            scale_inv: floats(),
            scale: floats(),
            e8m0: vec![E8M0::from_bits(GUARD); scales + 2 * offset],
            amax: floats(),
            offset,
            len: [codes, scales],
            setup,
        }
    }

    fn f32(&mut self) -> BlockOutput<'_, T> {
        let (codes, scales) =
            (self.offset..self.offset + self.len[0], self.offset..self.offset + self.len[1]);
        BlockOutput {
            codes: &mut self.codes[codes],
            scale_inv: &mut self.scale_inv[scales.clone()],
            scale: Some(&mut self.scale[scales.clone()]),
            amax: Some(&mut self.amax[scales]),
        }
    }

    fn mx(&mut self) -> MxOutput<'_, T> {
        let (codes, scales) =
            (self.offset..self.offset + self.len[0], self.offset..self.offset + self.len[1]);
        MxOutput {
            codes: &mut self.codes[codes],
            scales: &mut self.e8m0[scales.clone()],
            amax: Some(&mut self.amax[scales]),
        }
    }

    /// The results, after a look at the guards and a way back by the same codec.
    fn results(&self, codec: Codec, [rows, cols]: [usize; 2]) -> Results {
        fn inside<X: Copy, B: PartialEq>(x: &[X], offset: usize, bits: impl Fn(X) -> B, guard: X) -> Vec<B> {
            let outside = x[..offset].iter().chain(&x[x.len() - offset..]);
            assert!(outside.into_iter().all(|x| bits(*x) == bits(guard)), "something is written outside");
            x[offset..x.len() - offset].iter().map(|x| bits(*x)).collect()
        }
        let here = self.offset;
        let codes = &self.codes[here..here + self.len[0]];
        let scales = here..here + self.len[1];
        let mut values = vec![0.0_f32; codes.len()];
        let is_mx = matches!(self.setup, Setup::Mx(_));
        if is_mx {
            codec.dequantize_mx(codes, rows, cols, &self.e8m0[scales], &mut values).unwrap();
        } else {
            let (blocks, scale_inv) = (self.setup.blocks(), &self.scale_inv[scales]);
            codec.dequantize_blocks(codes, rows, cols, blocks, scale_inv, &mut values).unwrap();
        }
        let floats = |x: &[f32]| inside(x, here, f32::to_bits, FLOAT_GUARD);
        Results {
            codes: inside(&self.codes, here, T::to_bits, T::from_bits(GUARD)),
            scale: if is_mx { vec![] } else { floats(&self.scale) },
            scale_inv: if is_mx { vec![] } else { floats(&self.scale_inv) },
            e8m0: if is_mx {
                inside(&self.e8m0, here, E8M0::to_bits, E8M0::from_bits(GUARD))
            } else {
                vec![]
            },
            amax: floats(&self.amax),
            values: values.into_iter().map(f32::to_bits).collect(),
        }
    }
}

/// The first difference, in words.
fn difference(got: &Results, want: &Results) -> Option<String> {
    fn first<B: PartialEq + core::fmt::LowerHex>(name: &str, got: &[B], want: &[B]) -> Option<String> {
        if got == want {
            return None;
        }
        if got.len() != want.len() {
            return Some(format!("{name}: {} elements, not {}", got.len(), want.len()));
        }
        let wrong: Vec<usize> = (0..got.len()).filter(|i| got[*i] != want[*i]).collect();
        let i = *wrong.first()?;
        Some(format!("{name}: {} differ, first {i}: {:#x}, not {:#x}", wrong.len(), got[i], want[i]))
    }
    first("amax", &got.amax, &want.amax)
        .or_else(|| first("scale", &got.scale, &want.scale))
        .or_else(|| first("scale_inv", &got.scale_inv, &want.scale_inv))
        .or_else(|| first("e8m0", &got.e8m0, &want.e8m0))
        .or_else(|| first("codes", &got.codes, &want.codes))
        .or_else(|| first("values", &got.values, &want.values))
}

/// Quantizes by all codecs, rowwise, columnwise and in both directions together, and compares with the model.
fn check<T: Fp8, S: Source>(codecs: &[Codec], x: &[S], shape: [usize; 2], setup: Setup, offset: usize) {
    let [rows, cols] = shape;
    let values: Vec<f32> = x.iter().map(|x| x.to_f32()).collect();
    let (spec, rule, blocks) = (spec::<T>(), setup.rule::<S>(), setup.blocks());
    let want = oracle::blocks::quantize(spec, rule, blocks, &values, rows, cols);
    let turned = oracle::blocks::transpose(&values, rows, cols);
    let want_columnwise = oracle::blocks::quantize(spec, rule, blocks, &turned, cols, rows);
    for codec in codecs {
        let room = || (Room::<T>::new(setup, rows, cols, offset), Room::<T>::new(setup, cols, rows, offset));
        let expect = |what: &str, got: Results, want: &Results| {
            if let Some(difference) = difference(&got, want) {
                panic!(
                    "{what} {rows} x {cols} at {offset}, {setup:?}, {} {codec:?}: {difference}",
                    spec.name
                );
            }
        };
        let ((mut alone, mut alone_columnwise), (mut both, mut both_columnwise)) = (room(), room());
        match setup {
            Setup::F32(scaling) => {
                codec.quantize_blocks(x, rows, cols, &scaling, alone.f32()).unwrap();
                let columnwise = alone_columnwise.f32();
                codec.quantize_blocks_transpose(x, rows, cols, &scaling, None, columnwise).unwrap();
                let (rowwise, columnwise) = (Some(both.f32()), both_columnwise.f32());
                codec.quantize_blocks_transpose(x, rows, cols, &scaling, rowwise, columnwise).unwrap();
            }
            Setup::Mx(rounding) => {
                codec.quantize_mx(x, rows, cols, rounding, alone.mx()).unwrap();
                let columnwise = alone_columnwise.mx();
                codec.quantize_mx_transpose(x, rows, cols, rounding, None, columnwise).unwrap();
                let (rowwise, columnwise) = (Some(both.mx()), both_columnwise.mx());
                codec.quantize_mx_transpose(x, rows, cols, rounding, rowwise, columnwise).unwrap();
            }
        }
        expect("rowwise", alone.results(*codec, [rows, cols]), &want);
        expect("rowwise of both", both.results(*codec, [rows, cols]), &want);
        expect("columnwise", alone_columnwise.results(*codec, [cols, rows]), &want_columnwise);
        expect("columnwise of both", both_columnwise.results(*codec, [cols, rows]), &want_columnwise);
    }
}

/// The same for one of six pairs of types.
fn check_types(codecs: &[Codec], types: u8, x: &[f32], shape: [usize; 2], setup: Setup, offset: usize) {
    let f16s = || x.iter().map(|x| f16::from_f32(*x)).collect::<Vec<_>>();
    let bf16s = || x.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>();
    match types % 6 {
        0 => check::<E4M3, f32>(codecs, x, shape, setup, offset),
        1 => check::<E4M3, bf16>(codecs, &bf16s(), shape, setup, offset),
        2 => check::<E4M3, f16>(codecs, &f16s(), shape, setup, offset),
        3 => check::<E5M2, f32>(codecs, x, shape, setup, offset),
        4 => check::<E5M2, bf16>(codecs, &bf16s(), shape, setup, offset),
        _ => check::<E5M2, f16>(codecs, &f16s(), shape, setup, offset),
    }
}

/// Sizes next to those of blocks and tiles, and any others.
fn size(most: usize) -> impl Strategy<Value = usize> {
    let edges =
        [0, 1, 2, 15, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 160, 256, 257, 384, 511, 512, 513, 640];
    let edges: Vec<usize> = edges.into_iter().filter(|size| *size <= most).collect();
    prop_oneof![0..=most, proptest::sample::select(edges)]
}

/// Shapes of few elements, with one or both sizes large enough for more than one block.
fn shape() -> impl Strategy<Value = [usize; 2]> {
    let most = if IS_SLOW { 70 } else { 700 };
    prop_oneof![
        (size(4), size(most)).prop_map(|(rows, cols)| [rows, cols]),
        (size(most), size(4)).prop_map(|(rows, cols)| [rows, cols]),
        (size(most / 10), size(most / 10)).prop_map(|(rows, cols)| [rows, cols]),
        (size(most / 4), size(most / 4)).prop_map(|(rows, cols)| [rows, cols]),
    ]
}

fn scaling(blocks: Blocks) -> impl Strategy<Value = Setup> {
    let epsilon = prop_oneof![3 => Just(0.0), 1 => Just(1e-4), 1 => Just(1e-12)];
    let scale_max = prop_oneof![3 => Just(None), 1 => Just(Some(f32::MAX)), 1 => Just(Some(1e30))];
    (any::<bool>(), epsilon, scale_max).prop_map(move |(power_2_scales, epsilon, scale_max)| {
        Setup::F32(BlockScaling { blocks, power_2_scales, epsilon, scale_max })
    })
}

fn rounding() -> impl Strategy<Value = Setup> {
    proptest::sample::select(vec![Setup::Mx(MxRounding::Ceil), Setup::Mx(MxRounding::Floor)])
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(CASES) })]

    #[test]
    fn any_rows(shape in shape(), setup in scaling(Blocks::Row), seed: u64, types: u8, offset in 0..65_usize) {
        check_types(&codecs(), types, &matrix(seed, shape[0] * shape[1]), shape, setup, offset);
    }

    #[test]
    fn any_blocks(shape in shape(), setup in scaling(Blocks::B1x128), seed: u64, types: u8, offset in 0..65_usize) {
        check_types(&codecs(), types, &matrix(seed, shape[0] * shape[1]), shape, setup, offset);
    }

    #[test]
    fn any_tiles(shape in shape(), setup in scaling(Blocks::B128x128), seed: u64, types: u8, offset in 0..65_usize) {
        check_types(&codecs(), types, &matrix(seed, shape[0] * shape[1]), shape, setup, offset);
    }

    #[test]
    fn any_mx_blocks(shape in shape(), setup in rounding(), seed: u64, types: u8, offset in 0..65_usize) {
        check_types(&codecs(), types, &matrix(seed, shape[0] * shape[1]), shape, setup, offset);
    }
}

fn setups() -> Vec<Setup> {
    let f32 = [Blocks::Row, Blocks::B1x128, Blocks::B128x128].map(BlockScaling::new);
    let other = f32.map(|scaling| BlockScaling { power_2_scales: !scaling.power_2_scales, ..scaling });
    let f32 = f32.into_iter().chain(other).map(Setup::F32);
    f32.chain([MxRounding::Ceil, MxRounding::Floor].map(Setup::Mx)).collect()
}

#[test]
fn all_lengths_at_many_places() {
    let x = matrix(7, 3 * 514);
    let codecs = codecs();
    let longest = if IS_SLOW { 134 } else { 514 };
    for len in (0..=longest).step_by(if IS_SLOW { 67 } else { 1 }) {
        for (i, setup) in setups().into_iter().enumerate() {
            let (types, offset) = ((len + i) as u8, (len * 7 + i) % 65);
            check_types(&codecs, types, &x[..len], [1, len], setup, offset);
            if len % 4 == i % 4 {
                check_types(&codecs, types.wrapping_add(3), &x[..3 * len], [3, len], setup, offset / 2);
            }
        }
    }
}

/// More elements than a group, a strip or a band has; aligned destinations and others.
#[test]
#[cfg_attr(miri, ignore = "Miri is slow, and the sizes matter for vectors alone")]
fn large_matrices() {
    let x = matrix(99, 300_000);
    let codecs = codecs();
    let shapes =
        [[1, 9000], [3, 4100], [70, 2048], [129, 1025], [260, 515], [2048, 33], [5, 2080], [256, 1024]];
    for (i, shape) in shapes.into_iter().enumerate() {
        for (k, setup) in setups().into_iter().enumerate() {
            check_types(
                &codecs,
                (i + k) as u8,
                &x[..shape[0] * shape[1]],
                shape,
                setup,
                [0, 16, 64, 3][k % 4],
            );
        }
    }
}

#[cfg(feature = "rayon")]
#[test]
fn threads_give_the_same_bits() {
    let x = matrix(5, 150_000);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    for shape in [[140, 1000], [1, 131_072], [131_072, 1], [1100, 130], [129, 1050], [5, 30_000]] {
        for (k, setup) in setups().into_iter().enumerate() {
            let (x, types) = (&x[..shape[0] * shape[1]], (k + shape[0]) as u8);
            pool.install(|| check_types(&[Codec::new().parallel()], types, x, shape, setup, 3 * k));
        }
    }
}

/// Values of f16 and bf16 from codes in blocks.
#[test]
fn narrow_values() {
    fn check<T: Fp8, D: Source>(bits: fn(D) -> u32, nan: u32) {
        for codec in codecs() {
            for (rows, cols) in [(1, 256), (3, 130), (2, 4096), (130, 33), (2, 20_000)] {
                let len = rows * cols;
                if IS_SLOW && len > 300 {
                    continue;
                }
                let codes: Vec<T> = (0..len).map(|i| T::from_bits((i * 11 + i / 256) as u8)).collect();
                let factors: Vec<f32> =
                    matrix(3, len).into_iter().map(|x| if x == 0.0 { 3e38 } else { x }).collect();
                for blocks in Blocks::ALL.into_iter().filter(|blocks| !blocks.is_fp4()) {
                    let ([height, width], [high, wide]) = (blocks.size(cols), blocks.grid(rows, cols));
                    let scales = &factors[..high * wide];
                    let e8m0: Vec<E8M0> = scales.iter().map(|x| E8M0::from_bits(x.to_bits() as u8)).collect();
                    let mut got = vec![D::default(); len];
                    if blocks == Blocks::Mx32 {
                        codec.dequantize_mx(&codes, rows, cols, &e8m0, &mut got).unwrap();
                    } else {
                        codec.dequantize_blocks(&codes, rows, cols, blocks, scales, &mut got).unwrap();
                    }
                    for (i, (code, got)) in codes.iter().zip(got).enumerate() {
                        let at = i / cols / height * wide + i % cols / width;
                        let factor = if blocks == Blocks::Mx32 { e8m0[at].to_f32() } else { scales[at] };
                        let v = code.to_f32() * factor;
                        let want = if v.is_nan() { nan } else { bits(D::from_f32(v)) };
                        assert_eq!(
                            bits(got),
                            want,
                            "{codec:?} {blocks} {rows} x {cols}: {i}: {code:?} · {factor}"
                        );
                    }
                }
            }
        }
    }
    check::<E4M3, f32>(f32::to_bits, 0x7FFF_FFFF);
    check::<E5M2, f16>(|x| x.to_bits().into(), 0x7FFF);
    check::<E4M3, bf16>(|x| x.to_bits().into(), 0x7FFF);
    check::<E5M2, bf16>(|x| x.to_bits().into(), 0x7FFF);
}

/// The rules for single amaxes are those of the slices.
#[test]
fn scales_of_single_amaxes() {
    for x in matrix(11, if IS_SLOW { 60 } else { 4000 }) {
        let amax = x.abs();
        for power_2_scales in [false, true] {
            let scaling = BlockScaling { power_2_scales, ..BlockScaling::new(Blocks::B1x128) };
            let (mut codes, mut scale_inv, mut scale) = ([E5M2::ZERO], [0.0], [0.0]);
            let out = BlockOutput { scale: Some(&mut scale), ..BlockOutput::new(&mut codes, &mut scale_inv) };
            fp8_format::slice::quantize_blocks(&[amax], 1, 1, &scaling, out).unwrap();
            assert_eq!(scaling.scale::<f32>(amax, E5M2::ENCODING), scale[0], "{amax:e}");
        }
        for rounding in [MxRounding::Ceil, MxRounding::Floor] {
            let (mut codes, mut scales) = ([E4M3::ZERO], [E8M0::ONE]);
            fp8_format::slice::quantize_mx(&[amax], 1, 1, rounding, MxOutput::new(&mut codes, &mut scales))
                .unwrap();
            assert_eq!(rounding.scale(amax, E4M3::ENCODING), scales[0], "{amax:e} {rounding:?}");
        }
    }
}

/// One bit more or less in an amax or a scale.
#[test]
fn edges_of_scales() {
    let codecs = codecs();
    // Where the power of two of an MX scale changes: around max · 2ᵏ, or 2ᵏ. A block has one such element.
    let around = |max: f32| {
        let binades =
            (-20..3).chain(-136..-124).map(move |k| max * 2_f32.powi(k / 2) * 2_f32.powi(k - k / 2));
        binades.flat_map(|x| (0..9).map(move |i| f32::from_bits((x.to_bits() + i).saturating_sub(4))))
    };
    let blocks =
        around(448.0).chain(around(57344.0)).chain(around(512.0)).step_by(if IS_SLOW { 199 } else { 1 });
    let x: Vec<f32> =
        blocks.flat_map(|amax| (0..32).map(move |i| if i == 5 { -amax } else { 0.0 })).collect();
    for (types, rounding) in [(0, MxRounding::Ceil), (3, MxRounding::Ceil), (0, MxRounding::Floor)] {
        check_types(&codecs, types, &x, [1, x.len()], Setup::Mx(rounding), 0);
    }
    // A scale of 1 + 2⁻²³ is no power of two: it rounds a tie up.
    let epsilon = 448_f32.next_down();
    let scaling = BlockScaling { power_2_scales: false, epsilon, ..BlockScaling::new(Blocks::B1x128) };
    for types in [0, 1, 2] {
        check_types(&codecs, types, &[1.0625; 300], [1, 300], Setup::F32(scaling), 0);
    }
}

#[test]
fn sizes_of_grids() {
    for blocks in Blocks::ALL {
        assert_eq!(blocks.to_string(), blocks.name());
        for (rows, cols) in [(1, 1), (128, 128), (129, 257), (32, 31), (300, 64)] {
            let ([height, width], [high, wide]) = (blocks.size(cols), blocks.grid(rows, cols));
            assert!(high * height >= rows && (high - 1) * height < rows, "{blocks} {rows} x {cols}");
            assert!(wide * width >= cols && (wide - 1) * width < cols, "{blocks} {rows} x {cols}");
        }
        assert_eq!(blocks.grid(0, 0), if blocks == Blocks::Row { [0, 1] } else { [0, 0] });
    }
}

#[test]
fn wrong_sizes_and_blocks() {
    let codec = Codec::new();
    let (mut codes, mut scale_inv, mut amax) = ([E4M3::ZERO; 260], [9.0; 4], [9.0; 3]);
    let scaling = BlockScaling::new(Blocks::B1x128);
    let out = BlockOutput { amax: Some(&mut amax), ..BlockOutput::new(&mut codes, &mut scale_inv) };
    let error = codec.quantize_blocks(&[1.0_f32; 260], 2, 130, &scaling, out).unwrap_err();
    assert_eq!(
        error.to_string(),
        "slice::quantize_blocks: out.amax has 3 elements, a 2 x 130 matrix has 4 blocks (1x128): pass one element for \
         each block"
    );
    assert!(codes == [E4M3::ZERO; 260] && scale_inv == [9.0; 4] && amax == [9.0; 3]);

    let out = BlockOutput::new(&mut codes, &mut scale_inv);
    let error = codec.quantize_blocks(&[1.0_f32; 261], 2, 130, &scaling, out).unwrap_err();
    let shape = Error::Shape { op: "slice::quantize_blocks", name: "src", len: 261, rows: 2, cols: 130 };
    assert_eq!(error, shape);
    let mx = BlockScaling::new(Blocks::Mx32);
    let out = BlockOutput::new(&mut codes, &mut scale_inv);
    let error = codec.quantize_blocks(&[1.0_f32; 260], 2, 130, &mx, out).unwrap_err();
    assert_eq!(
        error.to_string(),
        "slice::quantize_blocks: mx32 blocks do not have f32 scales: call slice::quantize_mx"
    );
    let columnwise = BlockOutput::new(&mut codes, &mut scale_inv);
    let error =
        codec.quantize_blocks_transpose(&[1.0_f32; 260], 2, 130, &scaling, None, columnwise).unwrap_err();
    let (op, name) = ("slice::quantize_blocks_transpose", "columnwise.scale_inv");
    assert_eq!(error, Error::Scales { op, name, len: 4, blocks: Blocks::B1x128, rows: 130, cols: 2 });
    let (scales, mut x) = ([E8M0::ONE; 9], [0.0_f32; 260]);
    let error = codec.dequantize_mx(&codes, 2, 130, &scales, &mut x).unwrap_err();
    let (op, name) = ("slice::dequantize_mx", "scales");
    assert_eq!(error, Error::Scales { op, name, len: 9, blocks: Blocks::Mx32, rows: 2, cols: 130 });
    let op = "slice::dequantize_blocks";
    let error = codec.dequantize_blocks(&codes, 2, 130, Blocks::Mx32, &[1.0; 10], &mut x).unwrap_err();
    assert_eq!(error, Error::NotF32 { op, blocks: Blocks::Mx32, instead: "dequantize_mx" });
    let error = codec.dequantize_blocks(&codes, 2, 130, Blocks::B16x16, &[1.0; 9], &mut x).unwrap_err();
    assert_eq!(error, Error::NotF32 { op, blocks: Blocks::B16x16, instead: "dequantize_nvfp4" });
    assert_eq!(x, [0.0; 260]);
}
