//! One case: a few calls of public operations with drawn arguments, and all that came of them.
//!
//! A case runs on the device under attack and once more on the CPU, with the same draws. What both accept must agree:
//! codes, amaxes, scales and whatever else NUMERICS fixes bit for bit, the rest within a tolerance that the case gives.

use std::fmt::Debug;

use fp8_kernels::{DType, Device, Fp8Tensor, Operand, Tensor, bf16, f16};

use super::draw::{Draw, Kind};
use super::outcome::{Event, Output, Tolerance, quiet};

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
    /// The failures that were found without comparing with the other run.
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

    /// Returns the device of the next input. All runs draw the same numbers, even those that have no devices to mix.
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
        if tensor.tensor_scale().is_some() {
            return self.nvfp4(what, tensor);
        }
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

    /// Everything that a tensor in NVFP4 holds: codes, scales and factors of both copies.
    pub(super) fn nvfp4(&mut self, what: &'static str, x: &Fp8Tensor) {
        let read = || -> fp8_kernels::Result<Vec<f32>> {
            let mut all: Vec<f32> = Vec::new();
            let parts = [x.rowwise(), Some(x.scale_inv()), x.columnwise(), x.columnwise_scale_inv()];
            for part in parts.into_iter().flatten() {
                all.extend(part.to_vec::<u8>()?.into_iter().map(f32::from));
            }
            for factors in [x.tensor_scale(), x.columnwise_tensor_scale()].into_iter().flatten() {
                all.extend(factors.to_vec::<f32>()?);
            }
            Ok(all)
        };
        match read() {
            Ok(all) => self.numbers(what, all),
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
            Ok(_) if tolerance.atol.is_nan() || tolerance.atol >= 1e30 => {
                self.output(Output::Text { what, text: shape })
            }
            Ok(values) => self.output(Output::Close { what, shape, values, tolerance, largest }),
            Err(error) => self.fail(format!("reading {what}: {error}")),
        }
    }

    /// As [`close`](Self::close), with infinities taken for NaN: a GPU's attention splits probabilities into two parts, and
    /// an infinity times both may be NaN.
    pub(super) fn close_if_finite(&mut self, what: &'static str, tensor: &Tensor, tolerance: Tolerance) {
        self.close(what, tensor, tolerance);
        if let Some(Output::Close { values, .. }) = self.events.last_mut().and_then(|e| e.outputs.last_mut())
        {
            values.iter_mut().filter(|value| value.is_infinite()).for_each(|value| *value = f32::NAN);
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
