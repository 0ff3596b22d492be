//! Slices against the scalar conversions, at the lengths and values that break loops.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod oracle;

use fp8_format::philox::{Philox, philox4x32_10};
use fp8_format::{E4M3, E5M2, Error, Fp8, Source, slice};
use half::{bf16, f16};

const LENGTHS: [usize; 17] = [0, 1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 257];

/// All kinds of values, in an order that puts NaN, infinity and zeros at shifting places.
fn values(len: usize) -> Vec<f32> {
    let special = [0.0, -0.0, 0.3, -1.7, 448.0, 470.0, -6e4, 1e-3, 3e-6, -0.0117, 61439.0, f32::MAX, 1e-40];
    (0..len)
        .map(|i| match i % 29 {
            7 => f32::NAN,
            11 => -f32::NAN,
            13 => f32::from_bits(0xFF80_0001), // a signalling NaN
            17 => f32::NEG_INFINITY,
            k => special[k % special.len()] * (1.0 + (i as f32) / 64.0),
        })
        .collect()
}

fn bits<T: Fp8>(codes: &[T]) -> Vec<u8> {
    codes.iter().map(|c| c.to_bits()).collect()
}

fn convert<S: Copy, T: Fp8>(
    slice: fn(&[S], &mut [T]) -> fp8_format::Result<()>,
    scalar: fn(S) -> T,
    source: fn(f32) -> S,
) {
    for len in LENGTHS {
        let src: Vec<S> = values(len).into_iter().map(source).collect();
        let mut dst = vec![T::from_bits(0x55); len + 2];
        slice(&src, &mut dst[1..=len]).unwrap();
        let want: Vec<T> = src.iter().map(|x| scalar(*x)).collect();
        assert_eq!(bits(&dst[1..=len]), bits(&want), "length {len}");
        assert_eq!(
            (dst[0].to_bits(), dst[len + 1].to_bits()),
            (0x55, 0x55),
            "written outside dst, length {len}"
        );

        let before = bits(&dst);
        let e = slice(&src, &mut dst).unwrap_err();
        assert!(matches!(e, Error::Length { src, dst, .. } if src == len && dst == len + 2));
        assert_eq!(bits(&dst), before, "written in spite of the error");
    }
}

#[test]
fn conversions_equal_the_scalar_ones() {
    fn check<T: Fp8>() {
        convert(slice::from_f32, T::from_f32, |x| x);
        convert(slice::from_f32_saturating, T::from_f32_saturating, |x| x);
        convert(slice::from_f64, T::from_f64, f64::from);
        convert(slice::from_f64_saturating, T::from_f64_saturating, f64::from);
        convert(slice::from_f16, T::from_f16, f16::from_f32);
        convert(slice::from_f16_saturating, T::from_f16_saturating, f16::from_f32);
        convert(slice::from_bf16, T::from_bf16, bf16::from_f32);
        convert(slice::from_bf16_saturating, T::from_bf16_saturating, bf16::from_f32);

        let codes: Vec<T> = (0..=255).map(T::from_bits).collect();
        let (mut f32s, mut f16s, mut bf16s) = ([0.0_f32; 256], [f16::ZERO; 256], [bf16::ZERO; 256]);
        let mut f64s = [0.0_f64; 256];
        slice::to_f64(&codes, &mut f64s).unwrap();
        assert!(slice::to_f64(&codes[1..], &mut f64s).is_err());
        slice::to_f32(&codes, &mut f32s).unwrap();
        slice::to_f16(&codes, &mut f16s).unwrap();
        slice::to_bf16(&codes, &mut bf16s).unwrap();
        for (i, code) in codes.iter().enumerate() {
            assert_eq!(f32s[i].to_bits(), code.to_f32().to_bits(), "{i:#x}");
            assert_eq!(f64s[i].to_bits(), code.to_f64().to_bits(), "{i:#x}");
            assert_eq!(f16s[i].to_bits(), code.to_f16().to_bits(), "{i:#x}");
            assert_eq!(bf16s[i].to_bits(), code.to_bf16().to_bits(), "{i:#x}");
        }
        assert!(slice::to_f32(&codes, &mut f32s[1..]).is_err());
        assert!(slice::to_f16(&codes, &mut f16s[1..]).is_err());
        assert!(slice::to_bf16(&codes[2..], &mut bf16s).is_err());
    }
    check::<E4M3>();
    check::<E5M2>();
}

/// Two passes with the oracle: first the maximum, then the codes.
fn naive_quantize(spec: oracle::Spec, v: &[f32], scale: f32) -> (f32, Vec<u8>) {
    let amax = v.iter().filter(|v| !v.is_nan()).map(|v| v.abs()).fold(0.0, f32::max);
    let codes =
        v.iter().map(|v| oracle::encode(spec, oracle::parts_f32((v * scale).to_bits()), true)).collect();
    (amax, codes)
}

#[test]
fn quantize_equals_two_naive_passes() {
    fn check<T: Fp8, S: Source>(spec: oracle::Spec) {
        for len in LENGTHS {
            for scale in [1.0, 0.37, 3e5, -2.0, 0.0, f32::INFINITY, f32::NAN] {
                let mut src: Vec<S> = values(len).into_iter().map(S::from_f32).collect();
                for finite in [false, true] {
                    if finite {
                        src.iter_mut()
                            .filter(|x| x.to_f32().is_infinite())
                            .for_each(|x| *x = S::from_f32(2.5));
                    }
                    let v: Vec<f32> = src.iter().map(|x| x.to_f32()).collect();
                    let (amax, codes) = naive_quantize(spec, &v, scale);
                    let mut dst = vec![T::default(); len];
                    assert_eq!(slice::quantize(&src, scale, &mut dst).unwrap(), amax, "length {len}");
                    assert_eq!(bits(&dst), codes, "length {len}, scale {scale}");
                    assert_eq!(slice::amax(&src), amax);

                    let mut back = vec![S::default(); len];
                    slice::dequantize(&dst, scale, &mut back).unwrap();
                    for (x, code) in back.iter().zip(&dst) {
                        let want = S::from_f32(code.to_f32() * scale);
                        assert!(*x == want || x.to_f32().is_nan() && want.to_f32().is_nan());
                    }
                }
            }
        }
    }
    check::<E4M3, f32>(oracle::E4M3);
    check::<E5M2, f32>(oracle::E5M2);
    check::<E4M3, bf16>(oracle::E4M3);
    check::<E5M2, f16>(oracle::E5M2);
}

#[test]
fn amax_passes_nan_over_and_keeps_infinity() {
    let mut codes = [E4M3::ZERO; 130];
    for place in 0..130 {
        let mut x = [-0.5_f32; 130];
        x[place] = f32::NAN;
        assert_eq!(slice::quantize(&x, 1.0, &mut codes).unwrap(), 0.5);
        assert_eq!(codes[place].to_bits(), 0x7F);
        x[place] = f32::NEG_INFINITY;
        assert_eq!(slice::quantize(&x, 1.0, &mut codes).unwrap(), f32::INFINITY);
        assert_eq!(codes[place], E4M3::MIN);
        x[place] = -7.0;
        assert_eq!(slice::amax(&x), 7.0);
    }
    // A NaN must not make its lane forget what came before, however many lanes there are.
    for place in 64..130 {
        for lanes in [1, 2, 4, 8, 16, 32, 64] {
            let mut x = [-0.5_f32; 130];
            (x[place - lanes], x[place]) = (9.0, f32::NAN);
            assert_eq!(slice::amax(&x), 9.0, "NaN at {place}, the maximum {lanes} before");
            assert_eq!(slice::quantize(&x, 1.0, &mut codes).unwrap(), 9.0);
        }
    }
    assert_eq!(slice::amax(&[f32::NAN; 100]), 0.0);
    assert_eq!(slice::amax::<f32>(&[]), 0.0);
    assert_eq!(slice::quantize::<E5M2, f32>(&[], 2.0, &mut []).unwrap(), 0.0);
}

#[test]
fn transposes() {
    for rows in [0, 1, 2, 3, 16, 63, 64, 65, 130] {
        for cols in [0, 1, 2, 5, 17, 63, 64, 65, 129] {
            // Miri is slow, and two tiles one way and the other are enough for it.
            if cfg!(miri) && rows * cols > 1200 && (rows, cols) != (65, 65) {
                continue;
            }
            let src: Vec<E4M3> = (0..rows * cols).map(|i| E4M3::from_bits(((i * 37) >> 3) as u8)).collect();
            let mut dst = vec![E4M3::from_bits(0x55); rows * cols];
            slice::transpose(&src, rows, cols, &mut dst).unwrap();
            for r in 0..rows {
                for c in 0..cols {
                    let [got, want] = [dst[c * rows + r], src[r * cols + c]].map(E4M3::to_bits);
                    assert_eq!(got, want, "{rows} x {cols} at ({r}, {c})");
                }
            }
            let x = values(rows * cols);
            let mut codes = [vec![E5M2::ZERO; rows * cols], vec![E5M2::ZERO; rows * cols]];
            let mut both = codes.clone();
            let amax = slice::quantize(&x, 0.75, &mut codes[0]).unwrap();
            let (head, tail) = codes.split_at_mut(1);
            slice::transpose(&head[0], rows, cols, &mut tail[0]).unwrap();
            let (head, tail) = both.split_at_mut(1);
            let got = slice::quantize_transpose(&x, rows, cols, 0.75, &mut head[0], &mut tail[0]).unwrap();
            assert_eq!(got, amax);
            assert_eq!(
                (bits(&both[0]), bits(&both[1])),
                (bits(&codes[0]), bits(&codes[1])),
                "{rows} x {cols}"
            );
        }
    }
}

#[test]
fn stochastic_slices_take_philox_lane_by_lane() {
    for len in LENGTHS {
        let x = values(len);
        let (seed, offset) = (0x1234_5678_9ABC_DEF0, u64::MAX - 1); // the counter wraps
        let random = Philox::new(seed, offset);
        let (mut direct, mut scaled) = (vec![E4M3::ZERO; len], vec![E4M3::ZERO; len]);
        slice::from_f32_stochastic(&x, random, &mut direct).unwrap();
        let amax = slice::quantize_stochastic(&x, 0.5, random, &mut scaled).unwrap();
        assert_eq!(amax, slice::amax(&x));
        for i in 0..len {
            let r = philox4x32_10(offset.wrapping_add(i as u64 / 4), seed)[i % 4];
            assert_eq!(direct[i].to_bits(), E4M3::from_f32_stochastic(x[i], r).to_bits());
            assert_eq!(scaled[i].to_bits(), E4M3::from_f32_stochastic(x[i] * 0.5, r).to_bits());
        }
        assert!(slice::from_f32_stochastic(&x, random, &mut vec![E4M3::ZERO; len + 1]).is_err());
        assert!(slice::quantize_stochastic(&x, 1.0, random, &mut vec![E4M3::ZERO; len + 1]).is_err());
    }
}

#[test]
fn errors_say_what_would_be_right() {
    let unknown = "avx3".parse::<slice::Path>().unwrap_err().to_string();
    let expected = "parse Path: this machine has no path of this name (4 bytes): expected one of scalar";
    assert!(unknown.starts_with(expected), "{unknown}");
    let mut codes = [E4M3::ZERO; 5];
    assert_eq!(
        slice::quantize(&[1.0_f32; 7], 1.0, &mut codes).unwrap_err().to_string(),
        "slice::quantize: src has 7 elements, dst has 5: pass a dst of exactly 7 elements"
    );
    assert_eq!(
        slice::from_f32(&[1.0; 7], &mut codes).unwrap_err(),
        Error::Length { op: "slice::from_f32", src: 7, dst: 5 }
    );
    assert!(slice::dequantize(&codes, 1.0, &mut [0.0_f32; 4]).is_err());
    assert_eq!(
        slice::transpose(&[E4M3::ZERO; 6], 2, 4, &mut [E4M3::ZERO; 6]).unwrap_err().to_string(),
        "slice::transpose: src has 6 elements, a 2 x 4 matrix has 8: pass rows and cols whose product is the length \
         of every slice"
    );
    let huge =
        slice::transpose(&[E4M3::ZERO; 6], usize::MAX, 4, &mut [E4M3::ZERO; 6]).unwrap_err().to_string();
    assert!(huge.contains("has more than usize::MAX"), "{huge}");
    let mut transposed = [E4M3::ZERO; 4];
    let e = slice::quantize_transpose(&[1.0_f32; 5], 1, 5, 1.0, &mut codes, &mut transposed).unwrap_err();
    assert_eq!(e, Error::Shape { op: "slice::quantize_transpose", name: "dst_t", len: 4, rows: 1, cols: 5 });
}
