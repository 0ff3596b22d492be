//! Values of options that several commands have.

use fp8_hf::Scheme;
use fp8_nn::prelude::DType;

/// Parses `--threads`.
pub(crate) fn threads(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(threads @ 1..=1024) => Ok(threads),
        _ => Err("expected a number from 1 to 1024".into()),
    }
}

/// Parses `--dtype`.
pub(crate) fn dtype(name: &str) -> Result<DType, String> {
    let known = [DType::F32, DType::BF16, DType::F16];
    let named = known.into_iter().find(|dtype| dtype.name() == name);
    named.ok_or_else(|| "unknown; the known ones are f32, bf16 and f16".to_owned())
}

/// Parses `--scheme`.
pub(crate) fn scheme(name: &str) -> Result<Scheme, String> {
    let names = Scheme::ALL.map(Scheme::name).join(", ");
    name.parse().map_err(|_| format!("unknown; the known ones are {names}"))
}

/// Parses a number of at least 1.
pub(crate) fn count(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(0) => Err("expected at least 1".into()),
        Ok(count) => Ok(count),
        Err(_) => Err("expected a whole number of at least 1".into()),
    }
}
