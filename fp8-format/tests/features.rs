//! What the optional features add.

#[cfg(feature = "bytemuck")]
mod bytemuck {
    use bytemuck::TransparentWrapper;
    use fp8_format::{E4M3, E5M2, Fp8};

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
}

#[cfg(feature = "serde")]
mod serde {
    use fp8_format::{E4M3, E5M2, Encoding};

    #[test]
    fn codes_are_stored_as_their_bits() {
        for code in 0..=255_u8 {
            let text = serde_json::to_string(&E4M3::from_bits(code)).unwrap();
            assert_eq!(text, code.to_string());
            assert_eq!(serde_json::from_str::<E4M3>(&text).unwrap().to_bits(), code);
            assert_eq!(serde_json::from_str::<E5M2>(&text).unwrap().to_bits(), code);
        }
        assert!(serde_json::from_str::<E4M3>("256").is_err());
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
