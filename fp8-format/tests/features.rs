//! Tests of the optional features.

#[cfg(feature = "bytemuck")]
mod bytemuck {
    use bytemuck::TransparentWrapper;
    use fp8_format::{E2M1, E4M3, E5M2, Fp8};

    fn zero_bytes<T: Fp8>(codes: &mut [T]) {
        ::bytemuck::cast_slice_mut::<T, u8>(codes).fill(0);
    }

    #[test]
    fn slices_are_bytes() {
        let mut bytes = [0x38_u8, 0x7E, 0xFF];
        let codes: &mut [E4M3] = ::bytemuck::cast_slice_mut(&mut bytes);
        assert_eq!((codes[0], codes[1]), (E4M3::ONE, E4M3::MAX));
        zero_bytes(codes);
        assert_eq!(bytes, [0; 3]);
        assert_eq!(E5M2::wrap(0x3C), E5M2::ONE);
        assert_eq!(E5M2::peel_slice(&[E5M2::MAX, E5M2::ONE]), [0x7B, 0x3C]);
        assert_eq!(<E4M3 as ::bytemuck::Zeroable>::zeroed().to_bits(), 0);
    }

    #[test]
    fn codes_of_four_bits_are_read_as_bytes() {
        assert_eq!(::bytemuck::cast_slice::<E2M1, u8>(&[E2M1::MAX, E2M1::NEG_ONE]), [0x07, 0x0A]);
        assert_eq!(<E2M1 as ::bytemuck::Zeroable>::zeroed(), E2M1::ZERO);
    }
}

#[cfg(feature = "serde")]
mod serde {
    use fp8_format::{E2M1, E4M3, E5M2, Encoding};

    #[test]
    fn codes_are_stored_as_their_bits() {
        for code in 0..=255_u8 {
            let text = serde_json::to_string(&E4M3::from_bits(code)).unwrap();
            assert_eq!(text, code.to_string());
            assert_eq!(serde_json::from_str::<E4M3>(&text).unwrap().to_bits(), code);
            assert_eq!(serde_json::from_str::<E5M2>(&text).unwrap().to_bits(), code);
        }
        assert!(serde_json::from_str::<E4M3>("256").is_err());
        assert_eq!(serde_json::to_string(&E2M1::NEG_ONE).unwrap(), "10");
        assert_eq!(serde_json::from_str::<E2M1>("15").unwrap(), E2M1::MIN);
        let error = serde_json::from_str::<E2M1>("16").unwrap_err().to_string();
        assert!(error.starts_with("E2M1: 16 is no code: expected 0 to 15"), "{error}");
        assert_eq!(serde_json::to_string(&Encoding::E5M2).unwrap(), "\"E5M2\"");
        assert_eq!(serde_json::from_str::<Encoding>("\"E4M3\"").unwrap(), Encoding::E4M3);
    }
}

#[cfg(feature = "num-traits")]
mod num_traits {
    use fp8_format::{E4M3, E5M2};
    use num_traits::{
        AsPrimitive, Bounded, FloatConst, FromPrimitive, Num, NumCast, One, Signed, ToPrimitive, Zero,
    };

    fn mean<T: Num + NumCast + Copy>(values: &[T]) -> Option<T> {
        Some(values.iter().fold(T::zero(), |sum, x| sum + *x) / T::from(values.len())?)
    }

    #[test]
    fn generic_code_works() {
        let half = E4M3::from_f32(0.5);
        assert_eq!(mean(&[E4M3::ONE, E4M3::ONE, half, half]), Some(E4M3::from_f32(0.75)));
        assert_eq!((<E4M3 as Zero>::zero(), <E4M3 as One>::one()), (E4M3::ZERO, E4M3::ONE));
        assert!(Zero::is_zero(&E5M2::NEG_ZERO));
        assert_eq!((<E5M2 as Bounded>::min_value(), <E5M2 as Bounded>::max_value()), (E5M2::MIN, E5M2::MAX));
        assert_eq!(E4M3::from_str_radix("1.8", 16).unwrap(), E4M3::from_f32(1.5));
        assert_eq!(<E4M3 as FloatConst>::PI(), E4M3::PI);
    }

    #[test]
    fn numbers_out_of_range() {
        assert_eq!(<E4M3 as FromPrimitive>::from_i64(460).map(E4M3::to_f32), Some(448.0));
        assert!(<E4M3 as FromPrimitive>::from_i64(465).is_none());
        assert!(<E4M3 as FromPrimitive>::from_f32(f32::INFINITY).is_none());
        assert!(<E4M3 as FromPrimitive>::from_f64(f64::NAN).is_some_and(E4M3::is_nan));
        assert_eq!(<E5M2 as FromPrimitive>::from_u64(u64::MAX), Some(E5M2::INFINITY));
        assert_eq!(<E5M2 as NumCast>::from(7_u8), Some(E5M2::from_f32(7.0)));
        assert_eq!(E5M2::MAX.to_i64(), Some(57344));
        assert_eq!(E5M2::MAX.to_u8(), None);
        assert_eq!(E4M3::NAN.to_i64(), None);
        assert_eq!(ToPrimitive::to_f64(&E4M3::MIN), Some(-448.0));
    }

    #[test]
    fn casts() {
        let x: u8 = E5M2::MAX.as_();
        let y: E4M3 = 3.3_f64.as_();
        let z: E4M3 = E5M2::MAX.as_();
        let h: half::f16 = y.as_();
        let w: E5M2 = h.as_();
        let n: E5M2 = (-5_i32).as_();
        assert_eq!((x, y.to_f32(), z.is_nan(), h.to_f32()), (255, 3.25, true, 3.25));
        assert_eq!((w.to_f32(), n.to_f32()), (3.0, -5.0));
    }

    #[test]
    fn signed() {
        assert_eq!(Signed::abs(&E4M3::MIN), E4M3::MAX);
        assert_eq!(Signed::signum(&E4M3::MIN), E4M3::NEG_ONE);
        assert_eq!(E4M3::MAX.abs_sub(&E4M3::ONE), E4M3::MAX); // 447
        assert_eq!(E4M3::ONE.abs_sub(&E4M3::MAX), E4M3::ZERO);
        assert!(Signed::is_negative(&E5M2::NEG_ONE) && Signed::is_positive(&E5M2::ONE));
    }
}

#[cfg(feature = "zerocopy")]
mod zerocopy {
    use fp8_format::{E4M3, E5M2};
    use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

    /// A record as a file has it: a scale, then codes; the bytes at any address.
    #[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
    #[repr(C)]
    struct Row {
        scale: [u8; 4],
        codes: [E4M3; 5],
    }

    #[test]
    fn bytes_at_any_address_are_records_of_codes() {
        let bytes = [0xEE_u8, 0, 0, 0x80, 0x3F, 0x38, 0x7E, 0x80, 0xFF, 0x01];
        let row = Row::ref_from_bytes(&bytes[1..]).unwrap();
        assert_eq!(f32::from_le_bytes(row.scale), 1.0);
        assert_eq!(row.codes.map(E4M3::to_bits), [0x38, 0x7E, 0x80, 0xFF, 0x01]);
        assert_eq!(row.as_bytes(), &bytes[1..]);
        assert!(Row::ref_from_bytes(&bytes).is_err());

        let mut bytes = [0x3C_u8; 3];
        let codes = <[E5M2]>::mut_from_bytes(&mut bytes).unwrap();
        assert!(codes.iter().all(|x| *x == E5M2::ONE));
        codes[1] = E5M2::NEG_INFINITY;
        assert_eq!(bytes, [0x3C, 0xFC, 0x3C]);
    }
}

#[cfg(feature = "rand")]
mod rand {
    use fp8_format::{E4M3, E5M2, Fp8};
    use rand::distr::uniform::{Error, SampleUniform};
    use rand::distr::{Distribution, OpenClosed01, StandardUniform, Uniform};
    use rand::{Rng, RngCore, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    /// Gives one word for ever.
    struct Always(u32);

    impl RngCore for Always {
        fn next_u32(&mut self) -> u32 {
            self.0
        }
        fn next_u64(&mut self) -> u64 {
            u64::from(self.0) << 32 | u64::from(self.0)
        }
        fn fill_bytes(&mut self, dst: &mut [u8]) {
            dst.fill(self.0.to_le_bytes()[0]);
        }
    }

    /// Each value from 0 to 1 has as many words as its gap is wide, which is told by the words at which values change.
    #[test]
    fn unit_intervals_are_cut_at_their_values() {
        fn check<T: Fp8>()
        where
            StandardUniform: Distribution<T>,
            OpenClosed01: Distribution<T>,
        {
            let one = T::from_f32(1.0).to_bits();
            for code in 0..one {
                let [low, high] =
                    [code, code + 1].map(|code| (T::from_bits(code).to_f64() * 2_f64.powi(32)) as u64);
                let [first, last] = [low, high - 1].map(|word| Always(word as u32));
                for mut words in [first, last] {
                    let (down, up): (T, T) =
                        (StandardUniform.sample(&mut words), OpenClosed01.sample(&mut words));
                    assert_eq!(
                        (down.to_bits(), up.to_bits()),
                        (code, code + 1),
                        "{} {:#x}",
                        T::ENCODING,
                        words.0
                    );
                }
            }
            let top: T = StandardUniform.sample(&mut Always(u32::MAX));
            assert!(top.to_f32() < 1.0);
        }
        check::<E4M3>();
        check::<E5M2>();
    }

    #[test]
    fn the_mean_is_below_the_middle_by_half_a_gap() {
        const COUNT: usize = if cfg!(miri) { 1000 } else { 200_000 };
        let mut random = ChaCha8Rng::seed_from_u64(5);
        let mean =
            |draw: &mut dyn FnMut() -> f32| (0..COUNT).map(|_| f64::from(draw())).sum::<f64>() / COUNT as f64;
        let e4m3 = mean(&mut || random.random::<E4M3>().to_f32());
        let e5m2 = mean(&mut || random.random::<E5M2>().to_f32());
        // Four standard deviations of the mean.
        let tolerance = 4.0 * (1.0 / 12.0_f64).sqrt() / (COUNT as f64).sqrt();
        assert!((e4m3 - 23.0 / 48.0).abs() < tolerance, "{e4m3}");
        assert!((e5m2 - 11.0 / 24.0).abs() < tolerance, "{e5m2}");
    }

    #[test]
    fn ranges_keep_their_bounds() {
        fn check<T: Fp8 + SampleUniform>(bounds: &[(f32, f32)]) {
            let mut random = ChaCha8Rng::seed_from_u64(11);
            for (low, high) in bounds {
                let [low, high] = [*low, *high].map(|x| T::from_f32(x));
                let (half_open, closed) =
                    (Uniform::new(low, high).unwrap(), Uniform::new_inclusive(low, high).unwrap());
                // Values of the range, by their place; −0 is 0.
                let place = |x: T| {
                    let magnitude = i32::from(x.to_bits() & 0x7F);
                    if x.to_bits() & 0x80 == 0 { magnitude } else { -magnitude }
                };
                let count = (place(high) - place(low)) as usize;
                let (mut seen, mut seen_closed) = (vec![0_u32; count + 1], vec![0_u32; count + 1]);
                let draws = if cfg!(miri) { 500 } else { 400_000 };
                for _ in 0..draws {
                    let [x, y] = [half_open.sample(&mut random), closed.sample(&mut random)];
                    assert!(low <= x && x < high, "{x:?} is not in {low:?}..{high:?}");
                    assert!(low <= y && y <= high, "{y:?} is not in {low:?}..={high:?}");
                    seen[(place(x) - place(low)) as usize] += 1;
                    seen_closed[(place(y) - place(low)) as usize] += 1;
                }
                let width = high.to_f64() - low.to_f64();
                let value = |at: usize| {
                    let place = place(low) + at as i32;
                    let magnitude = T::from_bits(place.unsigned_abs() as u8).to_f64();
                    if place < 0 { -magnitude } else { magnitude }
                };
                for at in 0..=count {
                    let after = if at == count { 0.0 } else { value(at + 1) - value(at) };
                    let before = if at == 0 { 0.0 } else { value(at) - value(at - 1) };
                    for (seen, gap) in [(seen[at], after), (seen_closed[at], (before + after) / 2.0)] {
                        let want = f64::from(draws) * gap / width;
                        let tolerance = 5.0 * want.sqrt() + 5.0;
                        assert!(
                            (f64::from(seen) - want).abs() <= tolerance,
                            "{}: {seen}, not {want}",
                            value(at)
                        );
                    }
                }
            }
        }
        let bounds =
            [(0.0, 1.0), (-1.0, 1.0), (1.0, 1.25), (-448.0, 448.0), (-0.125, -0.0625), (0.0, 0.015_625)];
        check::<E4M3>(&bounds);
        check::<E5M2>(&bounds);
        check::<E5M2>(&[(-57344.0, 57344.0)]);
    }

    #[test]
    fn ranges_that_are_none() {
        assert_eq!(Uniform::new(E4M3::ONE, E4M3::ONE).err(), Some(Error::EmptyRange));
        assert_eq!(Uniform::new(E4M3::ONE, E4M3::ZERO).err(), Some(Error::EmptyRange));
        assert_eq!(Uniform::new_inclusive(E4M3::ONE, E4M3::ZERO).err(), Some(Error::EmptyRange));
        assert_eq!(Uniform::new(E4M3::ZERO, E4M3::NAN).err(), Some(Error::NonFinite));
        assert_eq!(Uniform::new(E5M2::ZERO, E5M2::INFINITY).err(), Some(Error::NonFinite));
        assert_eq!(Uniform::new_inclusive(E5M2::NEG_INFINITY, E5M2::ZERO).err(), Some(Error::NonFinite));
        let only = Uniform::new_inclusive(E5M2::ONE, E5M2::ONE).unwrap();
        assert_eq!(only.sample(&mut ChaCha8Rng::seed_from_u64(0)), E5M2::ONE);
    }
}
