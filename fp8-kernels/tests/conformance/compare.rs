//! Comparisons that say where, what, in bits, and how often.

use super::case::Outcome;
use fp8_kernels::{Device, bf16, f16};
use std::fmt::Debug;

/// An element with a bit pattern.
pub(crate) trait Bits: Copy + Debug {
    fn bits(self) -> u32;
}

impl Bits for f32 {
    fn bits(self) -> u32 {
        self.to_bits()
    }
}

impl Bits for bf16 {
    fn bits(self) -> u32 {
        self.to_bits().into()
    }
}

impl Bits for f16 {
    fn bits(self) -> u32 {
        self.to_bits().into()
    }
}

impl Bits for u8 {
    fn bits(self) -> u32 {
        self.into()
    }
}

impl Bits for i32 {
    fn bits(self) -> u32 {
        self as u32
    }
}

/// Both of one length, and equal bit for bit. `cols` turns positions into coordinates.
pub(crate) fn same<T: Bits>(what: &str, got: &[T], want: &[T], cols: usize) -> Outcome {
    same_length(what, got.len(), want.len())?;
    let differ = |i: &usize| got[*i].bits() != want[*i].bits();
    let Some(first) = (0..got.len()).find(differ) else { return Ok(()) };
    let count = (0..got.len()).filter(differ).count();
    let [row, col] = coordinate(first, cols);
    let (g, w) = (got[first], want[first]);
    Err(format!(
        "{what}: at [{row}, {col}]: got {g:?} ({:#x}), want {w:?} ({:#x}); {count} of {} differ",
        g.bits(),
        w.bits(),
        got.len()
    )
    .into())
}

/// As [`same`], apart from a NaN's sign and payload, which machines choose.
pub(crate) fn same_numbers(what: &str, got: &[f32], want: &[f32], cols: usize) -> Outcome {
    same(what, &quiet(got), &quiet(want), cols)
}

/// With one NaN for all.
pub(crate) fn quiet(values: &[f32]) -> Vec<f32> {
    values.iter().map(|&v| if v.is_nan() { f32::NAN } else { v }).collect()
}

/// `|got − want| ≤ atol + rtol · |want|`; infinities equal, NaN where NaN is wanted.
pub(crate) fn close(what: &str, got: &[f32], want: &[f64], cols: usize, [rtol, atol]: [f64; 2]) -> Outcome {
    same_length(what, got.len(), want.len())?;
    let differ = |i: &usize| {
        let (g, w) = (f64::from(got[*i]), want[*i]);
        let fits = g == w || (g.is_nan() && w.is_nan()) || (g - w).abs() <= atol + rtol * w.abs();
        !fits || (g.is_infinite() != w.is_infinite())
    };
    let Some(first) = (0..got.len()).find(differ) else { return Ok(()) };
    let count = (0..got.len()).filter(differ).count();
    let [row, col] = coordinate(first, cols);
    let (g, w) = (got[first], want[first]);
    Err(format!(
        "{what}: at [{row}, {col}]: got {g:?} ({:#010x}), want {w:?} ({:#010x}), difference {:e} beyond {rtol:e} · |want| + \
         {atol:e}; {count} of {} differ",
        g.to_bits(),
        (w as f32).to_bits(),
        (f64::from(g) - w).abs(),
        got.len()
    )
    .into())
}

/// ‖got − want‖ ≤ limit · ‖want‖.
pub(crate) fn close_norm(what: &str, got: &[f32], want: &[f64], limit: f64) -> Outcome {
    same_length(what, got.len(), want.len())?;
    let square = |v: f64| v * v;
    let difference: f64 = got.iter().zip(want).map(|(&g, &w)| square(f64::from(g) - w)).sum();
    let size: f64 = want.iter().map(|&w| square(w)).sum();
    let relative = (difference / size).sqrt();
    ensure(size == 0.0 && difference == 0.0 || relative <= limit, || {
        format!("{what}: relative RMS {relative:e}, at most {limit:e}")
    })
}

/// `holds`, or the failure that `text` describes.
pub(crate) fn ensure(holds: bool, text: impl FnOnce() -> String) -> Outcome {
    if holds { Ok(()) } else { Err(text().into()) }
}

/// One value equals another.
pub(crate) fn equal<T: PartialEq + Debug>(what: &str, got: T, want: T) -> Outcome {
    ensure(got == want, || format!("{what}: got {got:?}, want {want:?}"))
}

/// An error whose text contains `wording`.
pub(crate) fn refused<T>(result: fp8_kernels::Result<T>, wording: &str) -> Outcome {
    match result {
        Ok(_) => Err(format!("accepted; want the error `{wording}`").into()),
        Err(error) => {
            let text = error.to_string();
            ensure(text.contains(wording), || format!("got the error `{text}`, want `{wording}`"))
        }
    }
}

/// As [`refused`]; on a GPU the next call that waits tells what a kernel met.
pub(crate) fn refused_on<T>(device: &Device, result: fp8_kernels::Result<T>, wording: &str) -> Outcome {
    refused(result.and_then(|_| device.synchronize()), wording)
}

fn same_length(what: &str, got: usize, want: usize) -> Outcome {
    ensure(got == want, || format!("{what}: got {got} elements, want {want}"))
}

fn coordinate(index: usize, cols: usize) -> [usize; 2] {
    let cols = cols.max(1);
    [index / cols, index % cols]
}
