//! One case: a few calls of public operations with drawn arguments, and all that came of them.
//!
//! A case runs on the device under attack and once more on the CPU, with the same draws. What both accept must agree:
//! codes, amaxes, scales and whatever else NUMERICS fixes bit for bit, the rest within a tolerance that the case gives.

use std::fmt::Debug;

use fp8_kernels::{DType, Device, Fp8Tensor, Operand, Tensor, bf16, f16};

use super::draw::{Draw, Kind};

/// Errors that tell what kind they are.
pub(super) trait Refusal: std::fmt::Display {
    /// Whether the device broke down, which no argument may cause.
    fn is_fault(&self) -> bool;
}

impl Refusal for fp8_kernels::Error {
    fn is_fault(&self) -> bool {
        matches!(self, Self::Driver { .. } | Self::Poisoned { .. } | Self::Gemm { .. } | Self::Compile { .. })
    }
}

impl Refusal for fp8_recipe::Error {
    fn is_fault(&self) -> bool {
        matches!(self, Self::Kernels(error) if error.is_fault())
    }
}

impl Refusal for fp8_nn::Error {
    fn is_fault(&self) -> bool {
        match self {
            Self::Kernels(error) => error.is_fault(),
            Self::Recipe(error) => error.is_fault(),
            _ => false,
        }
    }
}

/// What an argument's refusal may say on one device and not on the other.
fn is_about_memory(refusal: &str) -> bool {
    ["bytes", "memory"].iter().any(|word| refusal.contains(word))
}

/// How close results have to be: `|a − b| ≤ atol + rtol · max(|a|, |b|)`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tolerance {
    pub(super) rtol: f64,
    pub(super) atol: f64,
}

impl Tolerance {
    /// Of one rounding to `dtype`, and sums that may be off by `atol`.
    pub(super) fn of(dtype: DType, atol: f64) -> Self {
        let (rtol, least) = match dtype {
            DType::BF16 => (1.6e-2, 1e-5),
            DType::F16 => (2e-3, 1e-5),
            _ => (1e-5, 1e-5),
        };
        Self { rtol, atol: atol + least }
    }
}

/// What a call left.
#[derive(Debug)]
enum Output {
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
    mixed: bool,
    outputs: Vec<Output>,
}

/// A tensor, and what is known of its values.
#[derive(Debug, Clone)]
pub(super) struct Input {
    pub(super) tensor: Tensor,
    /// The largest finite magnitude.
    pub(super) size: f64,
    pub(super) kind: Kind,
}

impl std::ops::Deref for Input {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.tensor
    }
}

/// Devices of a run.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub(super) device: Device,
    /// Devices whose tensors must not meet those of `device`.
    pub(super) foreign: Vec<Device>,
}

pub(super) struct Case<'a> {
    pub(super) draw: Draw,
    pub(super) device: &'a Device,
    foreign: &'a [Device],
    /// Prints what is drawn and called, for one case that is repeated.
    talks: bool,
    /// Whether later inputs may be on another device than the first.
    mixes: bool,
    inputs: usize,
    mixed: bool,
    pub(super) events: Vec<Event>,
    /// What was wrong whatever the other run says.
    pub(super) failures: Vec<String>,
    /// An error from which the device does not recover.
    pub(super) is_broken: bool,
}

impl<'a> Case<'a> {
    pub(super) fn new(draw: Draw, place: &'a Place, talks: bool) -> Self {
        Self {
            draw,
            device: &place.device,
            foreign: &place.foreign,
            talks,
            mixes: false,
            inputs: 0,
            mixed: false,
            events: Vec::new(),
            failures: Vec::new(),
            is_broken: false,
        }
    }

    pub(super) fn say(&self, text: impl FnOnce() -> String) {
        if self.talks {
            eprintln!("    {}", text());
        }
    }

    /// From here on inputs may be on devices that do not mix; every call takes all inputs.
    pub(super) fn mixes(&mut self) {
        self.mixes = true;
    }

    /// Counts a call and what came of it; `None` if it was refused.
    pub(super) fn call<T, E: Refusal>(
        &mut self,
        name: &'static str,
        call: impl FnOnce() -> Result<T, E>,
    ) -> Option<T> {
        let result = call();
        let mut outcome = result.as_ref().map(drop).map_err(E::to_string);
        let mut is_fault = result.as_ref().err().is_some_and(E::is_fault);
        // What a kernel met is told by the next call that waits.
        if let Err(error) = self.device.synchronize() {
            is_fault |= error.is_fault();
            outcome = outcome.and(Err(error.to_string()));
        }
        self.say(|| format!("{name}: {}", outcome.as_ref().map_or_else(String::clone, |()| "ok".to_owned())));
        if is_fault {
            self.is_broken = true;
            self.fail(format!("{name}: {}", outcome.as_ref().err().map_or("", String::as_str)));
        }
        let is_accepted = outcome.is_ok();
        self.events.push(Event { name, outcome, mixed: self.mixed, outputs: Vec::new() });
        result.ok().filter(|_| is_accepted)
    }

    pub(super) fn fail(&mut self, what: String) {
        self.failures.push(what);
    }

    /// As [`call`](Self::call), for what cannot fail.
    pub(super) fn run<T>(&mut self, name: &'static str, call: impl FnOnce() -> T) -> T {
        let result = call();
        self.events.push(Event { name, outcome: Ok(()), mixed: false, outputs: Vec::new() });
        result
    }

    /// A float tensor (or one of another type, filled with small integers).
    pub(super) fn tensor(&mut self, shape: &[usize], dtype: DType, kind: Kind) -> Option<Input> {
        let shape = self.draw.mostly(shape);
        let len = shape.iter().fold(1usize, |product, extent| product.saturating_mul(*extent));
        if len > 1 << 20 {
            return None; // Bent into something large: a case of its own tries those.
        }
        let values = self.draw.floats(kind, len);
        let largest =
            |sum: f64, value: &f32| if value.is_finite() { sum.max(value.abs().into()) } else { sum };
        let size = values.iter().fold(0.0, largest);
        let device = self.place();
        let integers = |values: Vec<f32>| values.into_iter().map(|v| (v * 4.0) as i32).collect::<Vec<_>>();
        let rank = fp8_kernels::Shape::from_slice(&shape)?;
        self.say(|| format!("{dtype} {rank} {kind:?}, up to {size:e}, on {device}"));
        let tensor = self.aside("from_vec", || match dtype {
            DType::F32 => Tensor::from_vec(values, rank, &device),
            DType::BF16 => Tensor::from_vec(values.into_iter().map(bf16::from_f32).collect(), rank, &device),
            DType::F16 => Tensor::from_vec(values.into_iter().map(f16::from_f32).collect(), rank, &device),
            DType::I32 => Tensor::from_vec(integers(values), rank, &device),
            DType::U8 => {
                Tensor::from_vec(integers(values).into_iter().map(|v| v as u8).collect(), rank, &device)
            }
        })?;
        Some(Input { tensor, size, kind })
    }

    /// Ids, targets, lengths.
    pub(super) fn integers(&mut self, values: Vec<i32>, shape: &[usize]) -> Option<Tensor> {
        let shape = fp8_kernels::Shape::from_slice(shape)?;
        let device = self.place();
        self.say(|| format!("i32 {shape} on {device}: {:?}", &values[..values.len().min(12)]));
        self.aside("from_vec", || Tensor::from_vec(values, shape, &device))
    }

    /// Bytes: codes, masks.
    pub(super) fn bytes(&mut self, values: Vec<u8>, shape: &[usize]) -> Option<Tensor> {
        let shape = fp8_kernels::Shape::from_slice(shape)?;
        let device = self.place();
        self.say(|| format!("u8 {shape} on {device}"));
        self.aside("from_vec", || Tensor::from_vec(values, shape, &device))
    }

    /// As [`call`](Self::call), for what takes none of the inputs.
    pub(super) fn aside<T, E: Refusal>(
        &mut self,
        name: &'static str,
        call: impl FnOnce() -> Result<T, E>,
    ) -> Option<T> {
        let mixed = std::mem::replace(&mut self.mixed, false);
        let result = self.call(name, call);
        self.mixed = mixed;
        result
    }

    /// Whether inputs are on devices that do not mix.
    pub(super) fn is_mixed(&self) -> bool {
        self.mixed
    }

    /// Where the next input is put. All runs draw the same, also those that have nothing to mix with.
    pub(super) fn place(&mut self) -> Device {
        self.inputs += 1;
        let (is_foreign, which) = (self.draw.once_in(40), self.draw.below(2));
        if self.inputs == 1 || !is_foreign || !self.mixes {
            return self.device.clone();
        }
        let Some(foreign) = self.foreign.get(which) else { return self.device.clone() };
        self.mixed = true;
        foreign.clone()
    }

    fn output(&mut self, output: Output) {
        if let Some(event) = self.events.last_mut() {
            event.outputs.push(output);
        }
    }

    /// Values that have equal bits everywhere.
    pub(super) fn exact(&mut self, what: &'static str, tensor: &Tensor) {
        let bits = match tensor.dtype() {
            DType::I32 => tensor.to_vec::<i32>().map(|v| v.into_iter().map(|v| v as u32).collect()),
            DType::U8 => tensor.to_vec::<u8>().map(|v| v.into_iter().map(u32::from).collect()),
            _ => tensor.to_f32_vec().map(|v| v.into_iter().map(quiet).collect()),
        };
        match bits {
            Ok(bits) => {
                let shape = format!("{} {}", tensor.dtype(), tensor.shape());
                self.output(Output::Exact { what, shape, bits });
            }
            Err(error) => self.fail(format!("reading {what}: {error}")),
        }
    }

    /// Codes in both layouts, and the factor.
    pub(super) fn codes(&mut self, what: &'static str, tensor: &Fp8Tensor) {
        let read = || -> fp8_kernels::Result<_> {
            let turned = tensor.columnwise().map(Tensor::to_vec::<u8>).transpose()?;
            Ok((tensor.codes()?, turned, tensor.scale_inv().item()?))
        };
        match read() {
            Ok((codes, turned, factor)) => {
                let shape = format!("{} {}", tensor.encoding(), tensor.shape());
                let mut bits: Vec<u32> = codes.into_iter().map(u32::from).collect();
                bits.push(quiet(factor));
                self.output(Output::Exact { what, shape, bits });
                if let Some(turned) = turned {
                    let expected = turned_codes(tensor);
                    if expected.as_ref() != Some(&turned) {
                        self.fail(format!(
                            "{what}: the columnwise codes are not the transpose of the rowwise ones"
                        ));
                    }
                }
            }
            Err(error) => self.fail(format!("reading {what}: {error}")),
        }
    }

    pub(super) fn operand(&mut self, what: &'static str, operand: &Operand) {
        match operand {
            Operand::High(x) => self.exact(what, x),
            Operand::Fp8(x) => self.codes(what, x),
        }
    }

    /// Numbers that have equal bits everywhere.
    pub(super) fn numbers(&mut self, what: &'static str, numbers: Vec<f32>) {
        let shape = numbers.len().to_string();
        self.output(Output::Exact { what, shape, bits: numbers.into_iter().map(quiet).collect() });
    }

    pub(super) fn text(&mut self, what: &'static str, text: impl Debug) {
        self.output(Output::Text { what, text: format!("{text:?}") });
    }

    /// Values that may differ a little. What is infinite or NaN must be so everywhere. With an `atol` that is not finite,
    /// or so large that sums may overflow in one order and not in another, only shapes are compared.
    pub(super) fn close(&mut self, what: &'static str, tensor: &Tensor, tolerance: Tolerance) {
        let shape = format!("{} {}", tensor.dtype(), tensor.shape());
        let largest = match tensor.dtype() {
            DType::F16 => 65504.0,
            _ => f64::from(f32::MAX),
        };
        match tensor.to_f32_vec() {
            Ok(_) if !(tolerance.atol < 1e30) => self.output(Output::Text { what, text: shape }),
            Ok(values) => self.output(Output::Close { what, shape, values, tolerance, largest }),
            Err(error) => self.fail(format!("reading {what}: {error}")),
        }
    }

    /// Values that differ by roundings to FP8: their relative RMS is bounded. Only where all are finite.
    pub(super) fn near(&mut self, what: &'static str, tensor: &Tensor, limit: f64) {
        match tensor.to_f32_vec() {
            Ok(values) => self.output(Output::Norm { what, values, limit }),
            Err(error) => self.fail(format!("reading {what}: {error}")),
        }
    }
}

/// The columnwise codes, as they follow from those as stored.
fn turned_codes(tensor: &Fp8Tensor) -> Option<Vec<u8>> {
    let Some(rowwise) = tensor.rowwise() else { return tensor.columnwise()?.to_vec::<u8>().ok() };
    let (codes, [rows, cols]) = (rowwise.to_vec::<u8>().ok()?, tensor.matrix());
    if codes.is_empty() {
        return Some(codes);
    }
    Some(
        (0..cols)
            .flat_map(|col| (0..rows).map(move |row| (row, col)))
            .map(|(r, c)| codes[r * cols + c])
            .collect(),
    )
}

/// One NaN for all.
fn quiet(value: f32) -> u32 {
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
            (Ok(()), Err(refusal)) | (Err(refusal), Ok(())) if is_about_memory(refusal) => return None,
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
        let full = event(Err("cuda:0: 8 bytes asked for, 4 of 4 free"), Vec::new());
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
