//! Every path of this machine against the scalar conversions: all lengths and alignments, with and without stores past the
//! caches, nothing written outside the destination.

use fp8_format::philox::{BlockRandom, Philox};
use fp8_format::slice::{Codec, Nvfp4Copy, Nvfp4Options, Nvfp4Output, Path};
use fp8_format::{Blocks, E4M3, E5M2, Fp8, Source, TensorScale};
use half::{bf16, f16};

/// Miri is slow: it takes fewer of everything.
const IS_SLOW: bool = cfg!(miri);

/// Each path, with plain stores and with those past the caches. Miri runs the scalar path alone, which has plain stores.
fn codecs() -> Vec<Codec> {
    let streaming: &[usize] = if IS_SLOW { &[usize::MAX] } else { &[usize::MAX, 0] };
    Path::available()
        .flat_map(|path| streaming.iter().map(move |bytes| Codec::new().on(path).streaming_beyond(*bytes)))
        .collect()
}

/// All sixteen bits of patterns, in an order that mixes large and small ones.
fn patterns() -> impl Iterator<Item = u16> {
    (0..=u16::MAX).step_by(if IS_SLOW { 257 } else { 1 }).map(|i| i.wrapping_mul(0x9E37) ^ 0x1234)
}

/// f32 of all kinds: ordinary ones, ties, edges of the formats, NaN in turns.
fn floats(len: usize) -> Vec<f32> {
    let edges =
        [0.0, -0.0, 448.0, 464.0, 464.1, 480.0, -61440.0, 61439.9, 9.765_625e-4, 7.6e-6, 1e-40, f32::MAX];
    (0..len)
        .map(|i| match i % 37 {
            36 => f32::from_bits([0x7F80_0000, 0xFFC0_0000, 0x7F80_0001, 0xFF80_0000][i / 37 % 4]),
            k @ 24..36 => edges[k - 24],
            _ => {
                f32::from_bits((i as u32).wrapping_mul(0x9E37_79B9) >> 4 | 0x3800_0000)
                    * if i % 3 == 0 { -1.0 } else { 1.0 }
            }
        })
        .collect()
}

fn bits<T: Fp8>(codes: &[T]) -> Vec<u8> {
    codes.iter().map(|code| code.to_bits()).collect()
}

/// Runs `convert` from every offset of a source to every offset of a destination with guards around it, and compares with
/// `want`, element by element.
fn at_all_places<S: Copy, D: Copy, B: PartialEq + core::fmt::Debug>(
    what: &str,
    src: &[S],
    guard: D,
    bits: impl Fn(D) -> B,
    convert: impl Fn(&[S], &mut [D]),
    want: impl Fn(S) -> D,
) {
    let lengths = (0..=257).filter(|len| len % 3 == 0 || len % 64 < 3 || len % 64 > 61);
    let few = [0, 1, 33, 64, 65];
    let mut dst = [guard; 257 + 128];
    for len in lengths.filter(|len| !IS_SLOW || few.contains(len)) {
        let offsets: &[usize] = if IS_SLOW { &[3] } else { &[0, 1, 3, 31, 32, 63] };
        for offset in offsets.iter().copied().chain([len % 64, (len * 7) % 64]) {
            let from = (len * 5 + offset) % 64;
            let src = &src[from..from + len];
            convert(src, &mut dst[offset..offset + len]);
            for (i, x) in src.iter().enumerate() {
                let got = bits(dst[offset + i]);
                assert_eq!(got, bits(want(*x)), "{what}: length {len}, offset {offset}, element {i}");
            }
            let outside = dst[..offset].iter().chain(&dst[offset + len..]);
            assert!(
                outside.clone().all(|d| bits(*d) == bits(guard)),
                "{what}: length {len}, offset {offset}"
            );
            dst.fill(guard);
        }
    }
}

#[test]
fn slices_of_all_lengths_at_all_places() {
    fn check<T: Fp8>(codec: Codec) {
        let guard = T::from_bits(0x55);
        let x = floats(400);
        let x16: Vec<f16> = x.iter().map(|x| f16::from_f32(*x)).collect();
        let xb16: Vec<bf16> = x.iter().map(|x| bf16::from_f32(*x)).collect();
        let name = |what| format!("{codec:?} {} {what}", T::ENCODING);
        let b = T::to_bits;
        at_all_places(&name("f32"), &x, guard, b, |s, d| codec.from_f32(s, d).unwrap(), T::from_f32);
        at_all_places(
            &name("f32 saturating"),
            &x,
            guard,
            b,
            |s, d| codec.from_f32_saturating(s, d).unwrap(),
            T::from_f32_saturating,
        );
        at_all_places(&name("f16"), &x16, guard, b, |s, d| codec.from_f16(s, d).unwrap(), T::from_f16);
        at_all_places(&name("bf16"), &xb16, guard, b, |s, d| codec.from_bf16(s, d).unwrap(), T::from_bf16);
        let quantize = |s: &[f32], d: &mut [T]| {
            let amax = codec.quantize(s, 0.37, d).unwrap();
            let want = s.iter().filter(|x| !x.is_nan()).fold(0.0, |max: f32, x| max.max(x.abs()));
            assert_eq!((amax, codec.amax(s)), (want, want));
        };
        at_all_places(&name("quantize"), &x, guard, b, quantize, |x| T::from_f32_saturating(x * 0.37));
        let quantize = |s: &[bf16], d: &mut [T]| {
            let amax = codec.quantize(s, -1.7, d).unwrap();
            let want = s.iter().filter(|x| !x.is_nan()).fold(0.0, |max: f32, x| max.max(x.to_f32().abs()));
            assert_eq!((amax, codec.amax(s)), (want, want));
        };
        at_all_places(&name("quantize bf16"), &xb16, guard, b, quantize, |x| {
            T::from_f32_saturating(x.to_f32() * -1.7)
        });
        let codes: Vec<T> = (0..400).map(|i| T::from_bits((i * 7) as u8)).collect();
        let f32_bits = |x: f32| x.to_bits();
        at_all_places(&name("to f32"), &codes, 0.3, f32_bits, |s, d| codec.to_f32(s, d).unwrap(), T::to_f32);
        let guard = f16::from_bits(0x5555);
        at_all_places(
            &name("to f16"),
            &codes,
            guard,
            f16::to_bits,
            |s, d| codec.to_f16(s, d).unwrap(),
            T::to_f16,
        );
        let guard = bf16::from_bits(0x5555);
        let to_bf16 = |s: &[T], d: &mut [bf16]| codec.to_bf16(s, d).unwrap();
        at_all_places(&name("to bf16"), &codes, guard, bf16::to_bits, to_bf16, T::to_bf16);
    }
    for codec in codecs() {
        check::<E4M3>(codec);
        check::<E5M2>(codec);
    }
}

/// Scales for which products are ordinary, ties between two bf16 or two f16, subnormal, infinite, NaN.
const SCALES: [f32; 24] = [
    1.0 + 1.0 / 256.0,
    1.0 + 3.0 / 256.0,
    1.0 + 1.0 / 2048.0,
    1.0 + 3.0 / 2048.0,
    1.0,
    0.37,
    448.0 / 3.1,
    3e5,
    1.999_999_9,
    1.000_000_1,
    0.0117,
    1.0 / 1024.0,
    4096.0,
    1e-30,
    -1.5,
    0.0,
    1e-40,
    3e38,
    1.1e30,
    1.2e30,
    7.8e-31,
    7.9e-31,
    f32::INFINITY,
    f32::NAN,
];

/// All patterns of 16 bits, in slices long enough for tables.
#[test]
fn quantized_halves() {
    fn check<T: Fp8, S: Source>(from_bits: fn(u16) -> S) {
        let all: Vec<S> = patterns().map(from_bits).collect();
        let magnitudes =
            |x: &[S]| x.iter().map(|x| x.to_f32().abs()).filter(|x| !x.is_nan()).fold(0.0, f32::max);
        let amax = magnitudes(&all);
        let short: Vec<S> = all.iter().copied().filter(|x| x.to_f32().abs() < 3.0).collect();
        let short_amax = magnitudes(&short);
        for scale in SCALES {
            let want: Vec<u8> =
                all.iter().map(|x| T::from_f32_saturating(x.to_f32() * scale).to_bits()).collect();
            for codec in codecs() {
                let mut codes = vec![T::default(); all.len()];
                assert_eq!(codec.quantize(&all, scale, &mut codes).unwrap(), amax, "{codec:?} {scale}");
                let wrong =
                    bits(&codes).into_iter().zip(&want).zip(patterns()).find(|((got, want), _)| got != *want);
                assert!(wrong.is_none(), "{codec:?} {scale}: {wrong:x?}");
                // Without a NaN, and a rest at the end.
                let mut codes = vec![T::default(); short.len()];
                assert_eq!(codec.quantize(&short, scale, &mut codes).unwrap(), short_amax);
                let want = short.iter().map(|x| T::from_f32_saturating(x.to_f32() * scale).to_bits());
                assert!(bits(&codes).into_iter().eq(want), "{codec:?} {scale}");
            }
        }
    }
    check::<E4M3, bf16>(bf16::from_bits);
    check::<E5M2, bf16>(bf16::from_bits);
    check::<E4M3, f16>(f16::from_bits);
    check::<E5M2, f16>(f16::from_bits);
}

/// A part of the patterns of f32, all of the halves, all codes.
#[test]
fn conversions_of_many_patterns() {
    fn check<T: Fp8>(codec: Codec) {
        let stride = if IS_SLOW { 33_554_393 } else { 4099 };
        let x: Vec<f32> = (0..=u32::MAX / stride).map(|i| f32::from_bits(i * stride)).collect();
        let mut codes = vec![T::default(); x.len()];
        let mut expect = |convert: &dyn Fn(&mut [T]), want: &dyn Fn(f32) -> T| {
            convert(&mut codes);
            let wrong = codes.iter().zip(&x).find(|(code, x)| code.to_bits() != want(**x).to_bits());
            assert!(wrong.is_none(), "{codec:?} {}: {wrong:?}", T::ENCODING);
        };
        expect(&|d| codec.from_f32(&x, d).unwrap(), &T::from_f32);
        expect(&|d| codec.from_f32_saturating(&x, d).unwrap(), &T::from_f32_saturating);
        for scale in SCALES {
            expect(&|d| assert!(codec.quantize(&x, scale, d).unwrap() > 0.0), &|x| {
                T::from_f32_saturating(x * scale)
            });
        }
        let x: Vec<f16> = patterns().map(f16::from_bits).collect();
        let mut codes = vec![T::default(); x.len()];
        codec.from_f16(&x, &mut codes).unwrap();
        assert!(
            codes.iter().zip(&x).all(|(code, x)| code.to_bits() == T::from_f16(*x).to_bits()),
            "{codec:?}"
        );
        codec.from_f16_saturating(&x, &mut codes).unwrap();
        assert!(codes.iter().zip(&x).all(|(code, x)| code.to_bits() == T::from_f16_saturating(*x).to_bits()));
        let x: Vec<bf16> = patterns().map(bf16::from_bits).collect();
        codec.from_bf16(&x, &mut codes).unwrap();
        assert!(
            codes.iter().zip(&x).all(|(code, x)| code.to_bits() == T::from_bf16(*x).to_bits()),
            "{codec:?}"
        );
        codec.from_bf16_saturating(&x, &mut codes).unwrap();
        assert!(
            codes.iter().zip(&x).all(|(code, x)| code.to_bits() == T::from_bf16_saturating(*x).to_bits())
        );
    }
    for codec in codecs() {
        check::<E4M3>(codec);
        check::<E5M2>(codec);
    }
}

/// Products of every code with a scale, rounded where the destination is narrower, NaN canonical.
#[test]
fn dequantized_codes() {
    fn check<T: Fp8, D: Source>(codec: Codec, bits: fn(D) -> u32, nan: u32) {
        let codes: Vec<T> =
            (0..if IS_SLOW { 256 } else { 1000 }).map(|i| T::from_bits((i * 11) as u8)).collect();
        for scale in SCALES {
            let mut back = vec![D::default(); codes.len()];
            codec.dequantize(&codes, scale, &mut back).unwrap();
            for (code, got) in codes.iter().zip(back) {
                let v = code.to_f32() * scale;
                let want = if v.is_nan() { nan } else { bits(D::from_f32(v)) };
                assert_eq!(bits(got), want, "{codec:?}: {code:?} times {scale}");
            }
        }
    }
    for codec in codecs() {
        check::<E4M3, f32>(codec, f32::to_bits, 0x7FFF_FFFF);
        check::<E5M2, f32>(codec, f32::to_bits, 0x7FFF_FFFF);
        check::<E4M3, f16>(codec, |x| x.to_bits().into(), 0x7FFF);
        check::<E5M2, f16>(codec, |x| x.to_bits().into(), 0x7FFF);
        check::<E4M3, bf16>(codec, |x| x.to_bits().into(), 0x7FFF);
        check::<E5M2, bf16>(codec, |x| x.to_bits().into(), 0x7FFF);
    }
}

#[test]
fn amax_of_needles() {
    fn check<S: Source>(codec: Codec, least_nan: S) {
        for len in [1, 63, 64, 65, 200].into_iter().filter(|len| !IS_SLOW || [1, 65].contains(len)) {
            for place in 0..len {
                let mut x = vec![S::from_f32(-0.5); len];
                x[place] = S::from_f32(-7.0);
                x[(place + 64) % len] = if len > 64 { S::from_f32(f32::NAN) } else { x[(place + 64) % len] };
                let want = x.iter().map(|x| x.to_f32().abs()).filter(|x| !x.is_nan()).fold(0.0, f32::max);
                assert_eq!(codec.amax(&x), want, "{codec:?}");
                let mut codes = vec![E4M3::ZERO; len];
                assert_eq!(codec.quantize(&x, 2.0, &mut codes).unwrap(), want, "{codec:?}");
            }
        }
        for nan in [S::from_f32(f32::NAN), least_nan] {
            let mut codes = [E4M3::ZERO; 100];
            assert_eq!(codec.amax(&[nan; 100]), 0.0, "{codec:?} {nan:?}");
            assert_eq!(codec.quantize(&[nan; 100], 2.0, &mut codes).unwrap(), 0.0, "{codec:?} {nan:?}");
        }
    }
    for codec in codecs() {
        check::<f32>(codec, f32::from_bits(0x7F80_0001));
        check::<f16>(codec, f16::from_bits(0x7C01));
        check::<bf16>(codec, bf16::from_bits(0x7F81));
    }
}

#[test]
fn matrices() {
    for codec in codecs() {
        for (rows, cols) in [
            (64, 64),
            (128, 640),
            (64, 1000),
            (129, 577),
            (3, 1030),
            (1030, 3),
            (256, 65),
            (192, 1088),
            (70, 2053),
            (130, 1024),
            (64, 2048),
            (1, 200),
            (200, 1),
            (7, 300),
            (300, 8),
            (9, 71),
            (70, 65),
            (0, 5),
        ]
        .into_iter()
        .filter(|(rows, cols)| !IS_SLOW || rows * cols < 1200)
        {
            let x = floats(rows * cols);
            let mut codes = [vec![E4M3::ZERO; rows * cols], vec![E4M3::ZERO; rows * cols]];
            let [dst, columns] = &mut codes;
            let amax = codec.quantize_transpose(&x, rows, cols, 0.7, dst, columns).unwrap();
            assert_eq!(amax, codec.amax(&x), "{codec:?} {rows} x {cols}");
            assert!(
                dst.iter()
                    .zip(&x)
                    .all(|(code, x)| code.to_bits() == E4M3::from_f32_saturating(x * 0.7).to_bits())
            );
            let mut alone = vec![E4M3::ZERO; rows * cols];
            codec.transpose(dst, rows, cols, &mut alone).unwrap();
            for (i, code) in dst.iter().enumerate() {
                let at = i % cols * rows + i / cols;
                assert_eq!(columns[at].to_bits(), code.to_bits(), "{codec:?} {rows} x {cols}: {i}");
                assert_eq!(alone[at].to_bits(), code.to_bits(), "{codec:?} {rows} x {cols}: {i}");
            }
        }
    }
}

/// Stores past the caches are for whole lines alone.
#[test]
fn matrices_at_all_places() {
    let x = floats(128 * 1024);
    let sizes: &[_] = match cfg!(miri) {
        true => &[(65, 64), (1, 70), (70, 1)],
        false => &[(128, 1024), (128, 64), (96, 64), (1, 500), (500, 1), (3, 70)],
    };
    let offsets: &[_] = if cfg!(miri) { &[0, 63] } else { &[0, 1, 16, 32, 63] };
    for codec in codecs() {
        for &(rows, cols) in sizes {
            let x = &x[..rows * cols];
            for &offset in offsets {
                let mut codes = [vec![E4M3::ZERO; rows * cols + 64], vec![E4M3::ZERO; rows * cols + 64]];
                let [dst, columns] = &mut codes;
                let here = offset..offset + rows * cols;
                let (dst, columns) = (&mut dst[here.clone()], &mut columns[here.clone()]);
                codec.quantize_transpose(x, rows, cols, 0.7, dst, columns).unwrap();
                let mut alone = vec![E4M3::ZERO; rows * cols + 64];
                codec.transpose(dst, rows, cols, &mut alone[here.clone()]).unwrap();
                for (i, x) in x.iter().enumerate() {
                    let (want, at) =
                        (E4M3::from_f32_saturating(x * 0.7).to_bits(), i % cols * rows + i / cols);
                    let got = [dst[i], columns[at], alone[offset + at]].map(E4M3::to_bits);
                    assert_eq!(got, [want; 3], "{codec:?} {rows} x {cols} from {offset} on: {i}");
                }
                let outside = alone[..offset].iter().chain(&alone[here.end..]);
                assert!(outside.into_iter().all(|code| code.to_bits() == 0), "{codec:?} {rows} x {cols}");
            }
        }
    }
}

#[test]
fn stochastic_slices_however_they_are_cut() {
    let x = floats(1000);
    let random = Philox::new(77, u64::MAX - 20);
    for codec in codecs() {
        for first in [0, 1, 2, 3, 4, 66, 131] {
            for len in [0, 1, 3, 64, 130, 600] {
                let part = &x[first..first + len];
                let mut codes = vec![E5M2::ZERO; len];
                codec.quantize_stochastic(part, 0.3, random.at(first as u64), &mut codes).unwrap();
                for (i, code) in codes.iter().enumerate() {
                    let want = E5M2::from_f32_stochastic(part[i] * 0.3, random.word((first + i) as u64));
                    assert_eq!(code.to_bits(), want.to_bits(), "{codec:?}: from {first}, {len}, element {i}");
                }
            }
        }
    }
}

/// Matrices whose columns, rows or neither are shared between threads.
#[cfg(feature = "rayon")]
#[test]
fn threads_transpose_matrices_of_all_shapes() {
    let len = 300 << 10;
    let src: Vec<E5M2> = (0..len).map(|i| E5M2::from_bits(((i * 2_654_435_761) >> 13) as u8)).collect();
    let codec = Codec::new().parallel();
    let check = |cols: usize| {
        let rows = len / cols;
        let src = &src[..rows * cols];
        let mut dst = vec![E5M2::ZERO; src.len()];
        codec.transpose(src, rows, cols, &mut dst).unwrap();
        for (i, code) in src.iter().enumerate() {
            assert_eq!(dst[i % cols * rows + i / cols].to_bits(), code.to_bits(), "{rows} x {cols}: {i}");
        }
    };
    for threads in [1, 5] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        for cols in [1, 2, 7, 8, 63, 64, 65, 129, 700, 4800, len / 65, len / 64, len / 7, len / 2, len] {
            pool.install(|| check(cols));
        }
    }
}

#[cfg(feature = "rayon")]
#[test]
fn threads_give_the_same_bits() {
    let (rows, cols) = (700, 1031);
    let x = floats(rows * cols);
    let halves: Vec<bf16> = x.iter().map(|x| bf16::from_f32(*x)).collect();
    let random = Philox::new(3, 9);
    for codec in codecs() {
        let all = |codec: Codec| {
            let codes = || vec![E4M3::ZERO; x.len()];
            let [mut a, mut b, mut c, mut d, mut e, mut f] = [(); 6].map(|()| codes());
            codec.from_f32(&x, &mut a).unwrap();
            let amaxes = [
                codec.quantize(&halves, 0.3, &mut b).unwrap(),
                codec.quantize_transpose(&x, rows, cols, 0.7, &mut c, &mut d).unwrap(),
                codec.quantize_stochastic(&x, 0.3, random.at(1), &mut e).unwrap(),
                codec.amax(&halves),
            ];
            codec.transpose(&a, rows, cols, &mut f).unwrap();
            let mut back = vec![0.0_f32; x.len()];
            codec.dequantize(&a, 0.1, &mut back).unwrap();
            let back: Vec<u32> = back.into_iter().map(f32::to_bits).collect();
            ([a, b, c, d, e, f].map(|codes| bits(&codes)), amaxes, back)
        };
        assert!(all(codec) == all(codec.parallel()), "{codec:?}");
    }
}

/// Codes and scales of blocks of E2M1, their amaxes and values, against those of the scalar path: rows of all lengths, with
/// guards behind each destination.
#[expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]
fn blocks_of_four_bits<S: Source>(of: impl Fn(f32) -> S) {
    let widths = (1..=70).filter(|cols| !IS_SLOW || cols % 23 == 1);
    for cols in widths {
        let rows = if cols % 5 == 0 { 35 } else { 3 };
        let x: Vec<S> = floats(rows * cols).into_iter().map(&of).collect();
        for (i, copy) in
            [Nvfp4Copy::Rowwise, Nvfp4Copy::Columnwise, Nvfp4Copy::Hadamard].into_iter().enumerate()
        {
            let blocks = [Blocks::B1x16, Blocks::B16x16][(cols + i) % 2];
            let random = ((cols + i) % 3 == 0).then(|| BlockRandom::new(7, cols as u64));
            let options = Nvfp4Options { copy, blocks, random };
            let [height, width] = copy.shape(rows, cols);
            let ([down, across], bytes) = (blocks.grid(height, width), height * width.div_ceil(2));
            let run = |codec: Codec| {
                let amax = codec.nvfp4_amax(&x, rows, cols, copy).unwrap();
                // Infinity alone would decide.
                let given = amax.min(1e6);
                let (mut codes, mut scales) = (vec![0xEE; bytes + 9], vec![E4M3::NAN; down * across + 9]);
                let (own, guard) = codes.split_at_mut(bytes);
                let (own_scales, guard_scales) = scales.split_at_mut(down * across);
                let out = Nvfp4Output::new(own, own_scales);
                let tensor = codec.quantize_nvfp4(&x, rows, cols, given, &options, out).unwrap();
                assert!(guard.iter().all(|byte| *byte == 0xEE), "{codec:?} {options:?}");
                assert!(guard_scales.iter().all(|scale| scale.is_nan()), "{codec:?} {options:?}");
                let mut values = vec![0.0_f32; height * width];
                codec.dequantize_nvfp4(own, height, width, blocks, own_scales, tensor, &mut values).unwrap();
                let values: Vec<u32> = values.iter().map(|x| x.to_bits()).collect();
                (amax.to_bits(), own.to_vec(), bits(own_scales), values)
            };
            let want = run(Codec::new().on(Path::SCALAR));
            for codec in codecs() {
                assert!(run(codec) == want, "{codec:?} {rows} x {cols} {options:?}");
            }
        }
    }
}

#[test]
fn blocks_of_four_bits_on_every_path() {
    blocks_of_four_bits(|x| x);
    blocks_of_four_bits(f16::from_f32);
    blocks_of_four_bits(bf16::from_f32);
}

/// Values of all codes with all scales, against those of the scalar path.
#[expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]
fn values_of_four_bits<D: Source>() {
    // The widest has more blocks than have their scales decoded at a time.
    let widths = [1_usize, 2, 15, 16, 17, 31, 33, 48, 63, 1024, 1039, 2080];
    for cols in widths.into_iter().filter(|cols| !IS_SLOW || *cols < 64) {
        let across = cols.div_ceil(16);
        let rows = 512_usize.div_ceil(across).min(if IS_SLOW { 3 } else { 256 });
        let codes: Vec<u8> = (0..rows * cols.div_ceil(2)).map(|i| (i * 7 + i / 256) as u8).collect();
        let scales: Vec<E4M3> = (0..rows * across).map(|i| E4M3::from_bits(i as u8)).collect();
        for encode in [1.0, 2688.0 / 3.7, 1e-38, 3e38, f32::MIN_POSITIVE] {
            let tensor = TensorScale::from_encode(encode);
            let run = |codec: Codec| {
                let mut values = vec![D::default(); rows * cols + 9];
                let (own, guard) = values.split_at_mut(rows * cols);
                codec.dequantize_nvfp4(&codes, rows, cols, Blocks::B1x16, &scales, tensor, own).unwrap();
                assert!(guard.iter().all(|x| x.to_f32() == 0.0), "{codec:?} {cols}");
                own.iter().map(|x| x.to_f32().to_bits()).collect::<Vec<_>>()
            };
            let want = run(Codec::new().on(Path::SCALAR));
            for codec in codecs() {
                assert!(run(codec) == want, "{codec:?} {rows} x {cols}, {encode}");
            }
        }
    }
}

#[test]
fn values_of_four_bits_on_every_path() {
    values_of_four_bits::<f32>();
    values_of_four_bits::<f16>();
    values_of_four_bits::<bf16>();
}
