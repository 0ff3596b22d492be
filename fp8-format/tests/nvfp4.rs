//! NVFP4 matrices against a plain computation, element by element: all copies, blocks and paths, odd sizes, parts of a whole.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod oracle;

use fp8_format::philox::{BlockRandom, philox4x32_10};
use fp8_format::slice::{self, Codec, Nvfp4Copy, Nvfp4Options, Nvfp4Output, Path};
use fp8_format::{Blocks, E2M1, E4M3, Error, Source, TensorScale};
use half::{bf16, f16};
use oracle::matrices::matrix;
use proptest::prelude::*;

const COPIES: [Nvfp4Copy; 3] = [Nvfp4Copy::Rowwise, Nvfp4Copy::Columnwise, Nvfp4Copy::Hadamard];

/// The copy's elements, by the formula of the matrix: each sum in the order of the butterflies is found by halving.
fn copied<S: Source>(x: &[S], [rows, cols]: [usize; 2], copy: Nvfp4Copy) -> Vec<f32> {
    let at = |r: usize, c: usize| if r < rows { x[r * cols + c].to_f32() } else { 0.0 };
    match copy {
        Nvfp4Copy::Rowwise => x.iter().map(|x| x.to_f32()).collect(),
        Nvfp4Copy::Columnwise => (0..cols * rows).map(|i| at(i % rows, i / rows)).collect(),
        Nvfp4Copy::Hadamard => {
            let width = rows.div_ceil(16) * 16;
            let mixed = |i: usize| {
                let (c, first, j) = (i / width, i % width / 16 * 16, i % 16);
                let signed = |i: usize| {
                    let sign = if [3, 5, 6, 7, 8, 9, 10, 12, 14, 15].contains(&i) { -1.0 } else { 1.0 };
                    at(first + i, c) * (sign * 0.25)
                };
                // Those that are farthest apart are added last.
                fn sum(from: usize, apart: usize, j: usize, x: &dyn Fn(usize) -> f32) -> f32 {
                    if apart == 0 {
                        return x(from);
                    }
                    let (a, b) = (sum(from, apart / 2, j, x), sum(from + apart, apart / 2, j, x));
                    if j & apart == 0 { a + b } else { a - b }
                }
                let value = sum(0, 8, j, &signed);
                if size_of::<S>() == 2 && S::from_f32(65536.0).to_f32().is_finite() {
                    S::from_f32(value).to_f32()
                } else {
                    value
                }
            };
            (0..cols * width).map(mixed).collect()
        }
    }
}

/// Codes and scales of a matrix, one element at a time.
fn plain(
    x: &[f32],
    [rows, cols]: [usize; 2],
    blocks: Blocks,
    tensor: TensorScale,
    random: Option<(u64, u64)>,
) -> (Vec<u8>, Vec<u8>) {
    let [height, _] = blocks.size(cols);
    let [down, across] = blocks.grid(rows, cols);
    let scale_of = |down: usize, across: usize| {
        let (mut amax, mut has_nan) = (0.0_f32, false);
        for r in (down * height..rows).take(height) {
            for c in (across * 16..cols).take(16) {
                has_nan |= x[r * cols + c].is_nan();
                amax = amax.max(x[r * cols + c].abs());
            }
        }
        let number = (amax * (tensor.encode() * (1.0_f32 / 6.0))).min(f32::MAX);
        (E4M3::from_f32_saturating(number), has_nan)
    };
    let grid: Vec<_> = (0..down * across).map(|i| scale_of(i / across, i % across)).collect();
    let code = |r: usize, c: usize| {
        if c >= cols {
            return 0;
        }
        let scale = grid[r / height * across + c / 16].0;
        let factor = (1.0 / (scale.to_f32() * tensor.decode())).min(f32::MAX);
        let v = x[r * cols + c] * factor;
        match random {
            None => E2M1::from_f32(v).to_bits(),
            Some((seed, offset)) => {
                let n = (r * cols.div_ceil(16) + c / 16) as u64;
                let words = philox4x32_10(offset.wrapping_add(n), seed);
                let byte = words[c % 16 / 4] >> (8 * (c % 4));
                E2M1::from_f32_stochastic(v, (byte & 0xFF) as u8).to_bits()
            }
        }
    };
    let pairs = (0..rows).flat_map(|r| (0..cols.div_ceil(2)).map(move |p| (r, 2 * p)));
    let codes = pairs.map(|(r, c)| code(r, c) | code(r, c + 1) << 4).collect();
    let scales = grid.iter().map(|(scale, has_nan)| if *has_nan { 0x7F } else { scale.to_bits() }).collect();
    (codes, scales)
}

/// Codes and scales of a copy.
fn quantized<S: Source>(
    codec: Codec,
    x: &[S],
    [rows, cols]: [usize; 2],
    amax: f32,
    options: &Nvfp4Options,
) -> (Vec<u8>, Vec<u8>, TensorScale) {
    let [height, width] = options.copy.shape(rows, cols);
    let [down, across] = options.blocks.grid(height, width);
    let (mut codes, mut scales) = (vec![0x5A; height * width.div_ceil(2)], vec![E4M3::ONE; down * across]);
    let out = Nvfp4Output::new(&mut codes, &mut scales);
    let tensor = codec.quantize_nvfp4(x, rows, cols, amax, options, out).unwrap();
    (codes, scales.iter().map(|scale| scale.to_bits()).collect(), tensor)
}

fn check<S: Source>(x: &[S], shape: [usize; 2], random: Option<(u64, u64)>) {
    for copy in COPIES {
        let elements = copied(x, shape, copy);
        let amax = elements.iter().fold(0.0_f32, |amax, x| amax.max(x.abs()));
        for blocks in [Blocks::B1x16, Blocks::B16x16] {
            let options = Nvfp4Options {
                copy,
                blocks,
                random: random.map(|(seed, offset)| BlockRandom::new(seed, offset)),
            };
            let tensor = TensorScale::from_amax(amax);
            let (codes, scales) = plain(&elements, copy.shape(shape[0], shape[1]), blocks, tensor, random);
            for codec in Path::available().map(|path| Codec::new().on(path)) {
                let what = format!("{shape:?} {options:?} {codec:?}");
                let own = codec.nvfp4_amax(x, shape[0], shape[1], copy).unwrap();
                assert_eq!(own.to_bits(), amax.to_bits(), "{what}");
                let got = quantized(codec, x, shape, amax, &options);
                assert_eq!(got.1, scales, "{what}: scales");
                assert_eq!(got.0, codes, "{what}: codes");
                assert_eq!(got.2, tensor, "{what}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 1 } else { 24 }))]

    #[test]
    fn any_matrix_has_the_codes_of_the_formula(
        rows in 1_usize..70, cols in 1_usize..150, seed: u64, stochastic: bool, offset: u64,
    ) {
        let [rows, cols] = if cfg!(miri) { [rows % 20 + 1, cols % 20 + 1] } else { [rows, cols] };
        let x = matrix(seed, rows * cols);
        let random = stochastic.then_some((seed, offset));
        check(&x, [rows, cols], random);
        check(&x.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>(), [rows, cols], random);
        check(&x.iter().map(|x| f16::from_f32(*x)).collect::<Vec<_>>(), [rows, cols], random);
    }

    #[test]
    fn parts_have_the_bits_of_the_whole(
        down in 1_usize..4, across in 1_usize..4, seed: u64, offset: u64, top in 0_usize..4, left in 0_usize..4,
    ) {
        let (rows, cols) = (16 * down, 16 * across);
        let (top, left) = (16 * (top % down), 16 * (left % across));
        let x: Vec<f32> = matrix(seed, rows * cols).iter().map(|x| if x.is_nan() { 0.5 } else { *x }).collect();
        let part: Vec<f32> = (top..rows).flat_map(|r| x[r * cols + left..(r + 1) * cols].to_vec()).collect();
        let (part_rows, part_cols) = (rows - top, cols - left);
        let random = BlockRandom::new(seed, offset);
        for copy in COPIES {
            let codec = Codec::new();
            let amax = codec.nvfp4_amax(&x, rows, cols, copy).unwrap();
            let options = Nvfp4Options { copy, random: Some(random), ..Nvfp4Options::default() };
            let whole = quantized(codec, &x, [rows, cols], amax, &options);
            // In the copy rows and columns change places.
            let [first_row, first_col] = if copy == Nvfp4Copy::Rowwise { [top, left] } else { [left, top] };
            let [height, width] = copy.shape(rows, cols);
            let step = width / 16;
            let random = random.part((first_row * step + first_col / 16) as u64, step as u64);
            let options = Nvfp4Options { random: Some(random), ..options };
            let got = quantized(codec, &part, [part_rows, part_cols], amax, &options);
            let cut = |bytes: &[u8], a_block: usize| -> Vec<u8> {
                let row = |r: usize| bytes[(r * step + first_col / 16) * a_block..(r + 1) * step * a_block].to_vec();
                (first_row..height).flat_map(row).collect()
            };
            prop_assert_eq!(&got.0, &cut(&whole.0, 8), "{:?}", copy);
            prop_assert_eq!(&got.1, &cut(&whole.1, 1), "{:?}", copy);
        }
    }
}

#[test]
fn the_hadamard_transform_is_undone_by_itself_and_the_signs() {
    let signed = |x: &[f32; 16]| -> [f32; 16] {
        std::array::from_fn(|i| if slice::HADAMARD_SIGNS >> i & 1 == 1 { -x[i] } else { x[i] })
    };
    let x: [f32; 16] = std::array::from_fn(|i| (i * i % 23) as f32 - 7.0);
    let (mut y, mut back) = ([0.0; 16], [0.0; 16]);
    slice::hadamard(&x, 1, 16, &mut y).unwrap();
    slice::hadamard(&signed(&y), 1, 16, &mut back).unwrap();
    assert_eq!(back, signed(&x));
}

#[test]
fn special_values() {
    let x = [f32::NAN, -0.0, f32::INFINITY, -3.0, 1e-45, f32::MAX, 5e-3, -5e-3];
    for count in 1..=x.len() {
        check(&x[..count], [1, count], None);
        check(&x[..count], [count, 1], Some((7, u64::MAX)));
    }
    check(&[f32::NAN; 40], [2, 20], None);
    check(&[0.0_f32; 40], [20, 2], Some((1, 2)));
    let none = quantized(Codec::new(), &[0.0_f32; 0], [0, 5], 0.0, &Nvfp4Options::default());
    assert_eq!((none.0.len(), none.1.len(), none.2.encode()), (0, 0, 1.0));
    for copy in COPIES {
        let options = Nvfp4Options { copy, blocks: Blocks::B16x16, random: Some(BlockRandom::new(1, 2)) };
        for shape in [[0, 5], [5, 0], [0, 0]] {
            assert!(quantized(Codec::new(), &[0.0_f32; 0], shape, 3.0, &options).0.is_empty());
            assert_eq!(slice::nvfp4_amax::<f32>(&[], shape[0], shape[1], copy).unwrap(), 0.0);
        }
    }
}

#[test]
fn the_largest_magnitudes_meet_the_ends_of_f32() {
    for amax in [f32::from_bits(1), f32::MIN_POSITIVE, 7.9e-36, 7.8e-36, 2688.0, f32::MAX, f32::INFINITY, 0.0]
    {
        let tensor = TensorScale::from_amax(amax);
        assert!(tensor.encode() > 0.0 && tensor.encode() <= f32::MAX, "{amax:e}");
        assert_eq!(tensor.decode(), 1.0 / tensor.encode());
        assert_eq!(TensorScale::from_encode(tensor.encode()), tensor);
    }
    assert_eq!(TensorScale::from_amax(f32::MAX / 1e38).encode(), 2688.0 / (f32::MAX / 1e38));
    let inf = TensorScale::from_amax(f32::INFINITY);
    assert_eq!(
        (inf.encode(), inf.block_scale(0.005).to_bits(), inf.block_scale(f32::INFINITY)),
        (1.0, 0, E4M3::MAX)
    );
    assert_eq!(inf.block_factor(E4M3::ZERO), f32::MAX);
    assert_eq!(TensorScale::from_amax(f32::NAN), TensorScale::from_amax(0.0));
    assert_eq!(TensorScale::from_decode(0.25).encode(), 4.0);
    assert!(inf.value(E2M1::ONE, E4M3::NAN).is_nan());
}

/// Means and variances of stochastic rounding against theory: the mean is low by the part of a step that 8 bits cut off.
#[test]
#[cfg_attr(miri, ignore = "Miri is slow, and a few draws say nothing")]
fn stochastic_rounding_is_fair() {
    const COLS: usize = 1 << 12;
    let rows = 640;
    for x in [0.3_f32, 1.1, 2.3, 5.0] {
        // One element of each row sets the scales, so that the others are rounded as they are.
        let mut values = vec![x; rows * COLS];
        values.iter_mut().step_by(16).for_each(|x| *x = 6.0);
        let options = Nvfp4Options { random: Some(BlockRandom::new(3, 9)), ..Nvfp4Options::default() };
        let (codes, scales, tensor) = quantized(Codec::new(), &values, [rows, COLS], 6.0, &options);
        assert!(scales.iter().all(|scale| *scale == E4M3::MAX.to_bits()));
        assert_eq!(tensor.encode(), 448.0);
        let factor = tensor.block_factor(E4M3::MAX);
        assert_eq!(factor, 1.0);
        let low = (0..8).map(|code| E2M1::from_bits(code).to_f32()).filter(|v| *v <= x).fold(0.0, f32::max);
        let high = (0..8).map(|code| E2M1::from_bits(code).to_f32()).find(|v| *v > x).unwrap();
        let share = f64::from((x - low) / (high - low) * 256.0).floor() / 256.0;
        let all: Vec<f64> = codes.iter().flat_map(|byte| E2M1::unpack(*byte)).map(f64::from).collect();
        let drawn = || all.iter().enumerate().filter(|(i, _)| i % 16 != 0).map(|(_, v)| *v);
        let count = drawn().count() as f64;
        let step = f64::from(high - low);
        let mean = drawn().sum::<f64>() / count;
        let sigma = step * (share * (1.0 - share) / count).sqrt();
        let expected = f64::from(low) + step * share;
        assert!((mean - expected).abs() <= 4.0 * sigma, "{x}: {mean}, not {expected} ± {sigma}");
        let variance = drawn().map(|v| (v - mean).powi(2)).sum::<f64>() / count;
        let theory = step * step * share * (1.0 - share);
        assert!((variance - theory).abs() <= 0.02 * theory, "{x}: {variance}, not {theory}");
    }
}

#[cfg(feature = "rayon")]
#[test]
fn threads_have_the_bits_of_one() {
    let [rows, cols] = [328, 1000];
    let x = matrix(11, rows * cols);
    let x: Vec<bf16> = x.iter().map(|x| bf16::from_f32(*x)).collect();
    for copy in COPIES {
        for blocks in [Blocks::B1x16, Blocks::B16x16] {
            let options = Nvfp4Options { copy, blocks, random: Some(BlockRandom::new(5, 6)) };
            let [one, many] = [Codec::new(), Codec::new().parallel()].map(|codec| {
                let amax = codec.nvfp4_amax(&x, rows, cols, copy).unwrap();
                let (codes, scales, tensor) = quantized(codec, &x, [rows, cols], amax, &options);
                let [height, width] = copy.shape(rows, cols);
                let scales: Vec<E4M3> = scales.into_iter().map(E4M3::from_bits).collect();
                let mut values = vec![0.0_f32; height * width];
                codec.dequantize_nvfp4(&codes, height, width, blocks, &scales, tensor, &mut values).unwrap();
                let values: Vec<u32> = values.iter().map(|x| x.to_bits()).collect();
                (codes, scales.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), values, amax.to_bits())
            });
            assert!(one == many, "{options:?}");
        }
    }
}

#[test]
fn wrong_arguments_are_told_and_nothing_is_written() {
    let (codec, x) = (Codec::new(), [1.0_f32; 60]);
    let mut codes = [7; 30];
    let mut scales = [E4M3::ONE; 6];
    let mut quantize = |rows, amax, options: &Nvfp4Options, bytes: usize, count: usize| {
        let out = Nvfp4Output::new(&mut codes[..bytes], &mut scales[..count]);
        codec.quantize_nvfp4(&x, rows, 20, amax, options, out).unwrap_err()
    };
    let op = "slice::quantize_nvfp4";
    let options = Nvfp4Options::default();
    let hadamard = Nvfp4Options { copy: Nvfp4Copy::Hadamard, ..options };
    assert_eq!(
        quantize(4, 1.0, &options, 30, 6),
        Error::Shape { op, name: "src", len: 60, rows: 4, cols: 20 }
    );
    assert_eq!(
        quantize(3, 1.0, &options, 29, 6),
        Error::Packed { op, name: "codes", len: 29, rows: 3, cols: 20 }
    );
    assert_eq!(
        quantize(3, 1.0, &hadamard, 30, 6),
        Error::Packed { op, name: "codes", len: 30, rows: 20, cols: 16 }
    );
    let error = Error::Scales { op, name: "scales", len: 5, blocks: Blocks::B1x16, rows: 3, cols: 20 };
    assert_eq!(quantize(3, 1.0, &options, 30, 5), error);
    let fp8 = Nvfp4Options { blocks: Blocks::Mx32, ..options };
    assert_eq!(quantize(3, 1.0, &fp8, 30, 6), Error::NotFp4 { op, blocks: Blocks::Mx32 });
    for amax in [f32::NAN, -1.0] {
        assert_eq!(quantize(3, amax, &options, 30, 6), Error::Amax { op });
    }
    let sentence = quantize(3, 1.0, &options, 29, 6).to_string();
    assert_eq!(
        sentence,
        "slice::quantize_nvfp4: codes has 29 bytes, the codes of a 3 x 20 matrix have 30: two codes a byte, and whole \
         bytes for each row"
    );
    assert_eq!(
        quantize(3, 1.0, &fp8, 30, 6).to_string(),
        "slice::quantize_nvfp4: mx32 blocks hold FP8: expected 1x16 or 16x16"
    );
    assert_eq!(
        quantize(3, -1.0, &options, 30, 6).to_string(),
        "slice::quantize_nvfp4: amax is negative or NaN: expected the largest magnitude of the tensor, from \
         slice::nvfp4_amax"
    );
    assert!(codes == [7; 30] && scales == [E4M3::ONE; 6]);
    let (tensor, mut values) = (TensorScale::from_amax(1.0), [9.0_f32; 60]);
    let mut dequantize = |blocks, count: usize| {
        codec.dequantize_nvfp4(&codes, 3, 20, blocks, &scales[..count], tensor, &mut values).unwrap_err()
    };
    let op = "slice::dequantize_nvfp4";
    assert_eq!(dequantize(Blocks::Row, 3), Error::NotFp4 { op, blocks: Blocks::Row });
    let error = Error::Scales { op, name: "scales", len: 6, blocks: Blocks::B16x16, rows: 3, cols: 20 };
    assert_eq!(dequantize(Blocks::B16x16, 6), error);
    assert_eq!(values, [9.0; 60]);
    assert!(slice::hadamard(&x, 3, 20, &mut values).is_err(), "rows of 32");
    assert!(slice::nvfp4_amax(&x, 7, 9, Nvfp4Copy::Rowwise).is_err());
}
