//! Comparisons of values, bytes and texts.

use std::path::Path;

use fp8_hf::Folder;

pub(crate) type Check<T = ()> = Result<T, String>;

/// The result of a comparison that found no difference.
pub(crate) enum Outcome {
    Compared,
    /// The files have nothing to compare with.
    Nothing,
    /// The files have something that this library does not write; the reason, in the plural.
    LeftOut(&'static str),
}

pub(crate) fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Returns the bytes of a tensor.
pub(crate) fn bytes(folder: &Folder, name: &str) -> Check<Vec<u8>> {
    let mut bytes = vec![0; folder.weights.info(name).map_or(0, |info| info.bytes as usize)];
    folder.weights.read(name, 0, &mut bytes).map_err(text)?;
    Ok(bytes)
}

pub(crate) fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0f32, |largest, value| largest.max(value.abs()))
}

/// Compares within `tolerance` of the largest expected magnitude.
pub(crate) fn close(what: &str, expected: &[f32], found: &[f32], tolerance: f64) -> Check {
    close_to(what, expected, found, tolerance, largest(expected))
}

/// Compares within `tolerance` of `largest`.
pub(crate) fn close_to(what: &str, expected: &[f32], found: &[f32], tolerance: f64, largest: f32) -> Check {
    if expected.len() != found.len() {
        return Err(format!("{what}: {} values, expected {}", found.len(), expected.len()));
    }
    let differences = expected.iter().zip(found).map(|(&e, &f)| (f64::from(e) - f64::from(f)).abs());
    let worst = differences.enumerate().map(|(i, d)| if d.is_nan() { (i, f64::INFINITY) } else { (i, d) });
    let (at, worst) = worst.max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((0, 0.0));
    let relative = worst / f64::from(largest).max(f64::MIN_POSITIVE);
    if relative <= tolerance {
        return Ok(());
    }
    let (e, f) = (expected[at], found[at]);
    Err(format!("{what}[{at}] is {f}, expected {e}: {relative:.1e} of the largest, at most {tolerance:.0e}"))
}

pub(crate) fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}
