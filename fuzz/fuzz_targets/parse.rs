//! Any text: parsing never panics, and what it reads is written and read again as the same thing.
#![no_main]

use core::fmt::Display;
use core::str::FromStr;

use fp8_format::slice::Path;
use fp8_format::{E4M3, E5M2, Encoding, Fp8};
use libfuzzer_sys::fuzz_target;

fn number<T: Fp8 + FromStr + Display>(text: &str) {
    let Ok(x) = text.parse::<T>() else { return };
    let again: T = x.to_string().parse().unwrap_or_else(|_| panic!("{x} is not read again"));
    // All NaN are written alike.
    assert!(again.to_bits() == x.to_bits() || again.is_nan() && x.is_nan(), "{text:?}: {x}, then {again}");
    // What f64 reads is what counts.
    let value: f64 = text.parse().unwrap_or_else(|_| panic!("{text:?} is no f64"));
    assert_eq!(x.to_bits(), T::from_f64(value).to_bits(), "{text:?}");
}

fuzz_target!(|text: &str| {
    number::<E4M3>(text);
    number::<E5M2>(text);
    match text.parse::<Encoding>() {
        Ok(encoding) => assert!(encoding.to_string().eq_ignore_ascii_case(text)),
        Err(error) => assert!(error.to_string().contains(&text.len().to_string())),
    }
    match text.parse::<Path>() {
        Ok(path) => {
            assert!(Path::available().any(|known| known == path) && path.to_string().parse() == Ok(path))
        }
        Err(error) => assert!(error.to_string().contains(&Path::best().to_string())),
    }
});
