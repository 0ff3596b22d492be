//! The results of calls, and their comparison with the results of the same calls on the CPU.

use fp8_kernels::DType;

/// The tolerance within which results must agree: `|a − b| ≤ atol + rtol · max(|a|, |b|)`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tolerance {
    pub(super) rtol: f64,
    pub(super) atol: f64,
}

impl Tolerance {
    /// Returns the tolerance for sums that may be off by `atol` and are rounded once to `dtype`.
    pub(super) fn of(dtype: DType, atol: f64) -> Self {
        let (rtol, least) = match dtype {
            DType::BF16 => (1.6e-2, 1e-5),
            DType::F16 => (2e-3, 1e-5),
            _ => (1e-5, 1e-5),
        };
        Self { rtol, atol: atol + least }
    }
}

/// A result of a call. The variant says how it is compared.
#[derive(Debug)]
pub(super) enum Output {
    /// Equal bits; NaN is NaN.
    Exact {
        what: &'static str,
        shape: String,
        bits: Vec<u32>,
    },
    Close {
        what: &'static str,
        shape: String,
        values: Vec<f32>,
        tolerance: Tolerance,
        largest: f64,
    },
    /// ‖a − b‖ ≤ limit · ‖b‖.
    Norm {
        what: &'static str,
        values: Vec<f32>,
        limit: f64,
    },
    Text {
        what: &'static str,
        text: String,
    },
}

/// One call.
#[derive(Debug)]
pub(super) struct Event {
    pub(super) name: &'static str,
    /// `Err` if it was refused.
    pub(super) outcome: Result<(), String>,
    /// Its arguments are on devices that do not mix.
    pub(super) mixed: bool,
    pub(super) outputs: Vec<Output>,
}

/// Whether a refusal is about a limit that one device has and another has not: its memory, or what its kernels can count.
fn is_of_the_device(refusal: &str) -> bool {
    ["bytes", "memory", "a GPU's"].iter().any(|word| refusal.contains(word))
}

/// One NaN for all.
pub(super) fn quiet(value: f32) -> u32 {
    if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() }
}

/// The first thing in which a run differs from the CPU's; `exact`: all bits must be equal.
pub(super) fn difference(got: &[Event], cpu: &[Event], exact: bool) -> Option<String> {
    for (event, other) in got.iter().zip(cpu) {
        let name = event.name;
        if event.mixed {
            return event.outcome.is_ok().then(|| format!("{name}: accepted tensors of two devices"));
        }
        if name != other.name {
            return Some(format!("{name}: the CPU's next call is {}", other.name));
        }
        match (&event.outcome, &other.outcome) {
            (Ok(()), Ok(())) => {}
            (Err(_), Err(_)) => continue,
            (Ok(()), Err(refusal)) | (Err(refusal), Ok(())) if is_of_the_device(refusal) => return None,
            (Ok(()), Err(refusal)) => {
                return Some(format!("{name}: accepted, refused on the CPU: {refusal}"));
            }
            (Err(refusal), Ok(())) => {
                return Some(format!("{name}: refused, accepted on the CPU: {refusal}"));
            }
        }
        if event.outputs.len() != other.outputs.len() {
            let counts = (event.outputs.len(), other.outputs.len());
            return Some(format!("{name}: {counts:?} results"));
        }
        for pair in event.outputs.iter().zip(&other.outputs) {
            if let Some(what) = unequal(pair.0, pair.1, exact) {
                return Some(format!("{name}: {what}"));
            }
        }
    }
    let (got, cpu) = (got.len(), cpu.len());
    (got != cpu).then(|| format!("{got} calls, {cpu} on the CPU"))
}

fn unequal(got: &Output, cpu: &Output, exact: bool) -> Option<String> {
    match (got, cpu) {
        (Output::Exact { what, shape, bits }, Output::Exact { shape: other, bits: wanted, .. }) => {
            if shape != other {
                return Some(format!("{what}: {shape}, on the CPU {other}"));
            }
            let at = bits.iter().zip(wanted).position(|(a, b)| a != b)?;
            let (a, b) = (bits[at], wanted[at]);
            let (x, y) = (f32::from_bits(a), f32::from_bits(b));
            Some(format!("{what} {shape}: element {at} is {a:#x} ({x:e}), on the CPU {b:#x} ({y:e})"))
        }
        (
            Output::Close { what, shape, values, tolerance, largest },
            Output::Close { shape: other, values: wanted, .. },
        ) => {
            if shape != other || values.len() != wanted.len() {
                return Some(format!("{what}: {shape}, on the CPU {other}"));
            }
            let differ = |(a, b): (&f32, &f32)| {
                if exact { quiet(*a) != quiet(*b) } else { !is_close(*a, *b, *tolerance, *largest) }
            };
            let at = values.iter().zip(wanted).position(differ)?;
            let (a, b) = (values[at], wanted[at]);
            Some(format!("{what} {shape}: element {at} is {a:e}, on the CPU {b:e}, beyond {tolerance:?}"))
        }
        (Output::Norm { what, values, limit }, Output::Norm { values: wanted, .. }) => {
            if values.len() != wanted.len() {
                return Some(format!("{what}: {} values, on the CPU {}", values.len(), wanted.len()));
            }
            if exact {
                let at = values.iter().zip(wanted).position(|(a, b)| quiet(*a) != quiet(*b))?;
                let (a, b) = (values[at], wanted[at]);
                return Some(format!("{what}: element {at} is {a:e}, on the CPU {b:e}"));
            }
            let all = || values.iter().zip(wanted).map(|(a, b)| (f64::from(*a), f64::from(*b)));
            let (difference, size) =
                all().fold((0.0, 0.0), |(d, s), (a, b)| (d + (a - b) * (a - b), s + b * b));
            let relative = f64::sqrt(difference / size);
            (relative > *limit).then(|| format!("{what}: relative RMS {relative:.3}, at most {limit}"))
        }
        (Output::Text { what, text }, Output::Text { text: other, .. }) => {
            (text != other).then(|| format!("{what}: {text}, on the CPU {other}"))
        }
        _ => Some("results of two kinds".to_owned()),
    }
}

/// Values near the type's largest may be rounded to infinity on one device alone.
fn is_close(a: f32, b: f32, tolerance: Tolerance, largest: f64) -> bool {
    if a == b || (a.is_nan() && b.is_nan()) {
        return true;
    }
    let (a, b) = (f64::from(a), f64::from(b));
    if a.is_infinite() != b.is_infinite() {
        let finite = if a.is_infinite() { b } else { a };
        return finite.abs() > 0.97 * largest && a.signum() == b.signum();
    }
    // Of opposite signs: their distance, and what it may be, are both infinite.
    if a.is_infinite() {
        return false;
    }
    (a - b).abs() <= tolerance.atol + tolerance.rtol * a.abs().max(b.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(outcome: Result<(), &str>, outputs: Vec<Output>) -> Vec<Event> {
        let outcome = outcome.map_err(str::to_owned);
        vec![Event { name: "op", outcome, mixed: false, outputs }]
    }

    fn close(values: &[f32]) -> Vec<Event> {
        let tolerance = Tolerance { rtol: 1e-3, atol: 1e-3 };
        let (shape, largest) = (String::new(), 65504.0);
        event(Ok(()), vec![Output::Close { what: "y", shape, values: values.to_vec(), tolerance, largest }])
    }

    fn bits(bits: &[u32]) -> Vec<Event> {
        event(Ok(()), vec![Output::Exact { what: "y", shape: String::new(), bits: bits.to_vec() }])
    }

    #[test]
    fn one_wrong_bit_and_one_misplaced_nan_are_found() {
        assert_eq!(difference(&bits(&[1, 2]), &bits(&[1, 2]), false), None);
        assert!(difference(&bits(&[1, 2]), &bits(&[1, 3]), false).is_some());
        let values = [1.0, f32::NAN, f32::INFINITY, 65504.0];
        assert_eq!(
            difference(&close(&values), &close(&[1.001, f32::NAN, f32::INFINITY, 65504.0]), false),
            None
        );
        assert_eq!(
            difference(&close(&values), &close(&[1.0, f32::NAN, f32::INFINITY, f32::INFINITY]), false),
            None
        );
        for (at, wrong) in [(0, 1.01), (0, f32::NAN), (1, 0.0), (2, f32::NEG_INFINITY)] {
            let mut other = values;
            other[at] = wrong;
            assert!(difference(&close(&values), &close(&other), false).is_some(), "{at} {wrong}");
        }
        assert!(difference(&close(&[1.0]), &close(&[1.000_1]), true).is_some());
    }

    #[test]
    fn what_one_device_refuses_the_other_refuses_too() {
        let (accepted, refused) = (event(Ok(()), Vec::new()), event(Err("k = 3"), Vec::new()));
        assert_eq!(difference(&refused, &refused, false), None);
        assert!(difference(&accepted, &refused, false).is_some());
        assert!(difference(&refused, &accepted, false).is_some());
        let full = event(Err("cuda:0: 8 bytes requested, 4 of 4 free"), Vec::new());
        assert_eq!(difference(&full, &accepted, false), None);
    }

    #[test]
    fn tensors_of_two_devices_must_be_refused() {
        let mut events = event(Ok(()), Vec::new());
        events[0].mixed = true;
        assert!(
            difference(&events, &event(Ok(()), Vec::new()), false).is_some_and(|w| w.contains("two devices"))
        );
    }
}
