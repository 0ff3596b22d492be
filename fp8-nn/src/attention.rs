//! The attention between the projections of [`MultiheadAttention`](crate::MultiheadAttention), in high precision or in FP8.

use crate::dropout::Rate;
use crate::fp8_output::{GradInput, in_high_precision};
use crate::{AttentionOptions, Layer, Parameter, Result};
use fp8_kernels::ops::{self, AttentionSaved, Diagonal, Dropout, Sequences};
use fp8_kernels::{DType, Fp8Tensor, Operand, Tensor};
use fp8_recipe::{Backward, Forward, Origin, SlotName, SlotRole, Slots};

/// Attention with its options, and the slots of what it reads in FP8, if it runs in FP8.
#[derive(Debug)]
pub(crate) struct Attention {
    options: ops::AttentionOptions<'static>,
    dropout: Rate,
    slots: Option<AttentionSlots>,
}

/// Where an attention stands in a layer.
#[derive(Debug)]
pub(crate) struct Place<'a> {
    /// The path of the layer.
    pub(crate) layer: &'a str,
    /// The path that its own slots are below.
    pub(crate) slots: &'a str,
    /// The paths of the projections whose outputs it reads as they are: with RoPE none.
    pub(crate) outputs: &'a [&'a str],
    /// The path of the projection of its output.
    pub(crate) proj: &'a str,
}

#[derive(Debug)]
struct AttentionSlots {
    inputs: InputSlots,
    gradient: GradientSlot,
}

/// Who quantizes q, k and v.
#[derive(Debug)]
enum InputSlots {
    /// The attention: `<slots>.q.input`, `<slots>.k.input` and `<slots>.v.input`.
    Own([SlotName; 3]),
    /// The projections, `<path>.output`.
    OfProjections(Vec<SlotName>),
}

/// Who quantizes the gradient of the output.
#[derive(Debug)]
enum GradientSlot {
    /// The attention: `<slots>.o.grad_output`.
    Own(SlotName),
    /// The projection of the output: `<proj>.grad_input`.
    OfProjection(SlotName),
}

/// The values that the backward pass of [`Attention`] needs.
#[derive(Debug)]
pub(crate) struct AttentionPassed {
    inputs: Inputs,
    o: Tensor,
    rows: AttentionSaved,
    dropout: Option<Dropout>,
    /// That of its own slot of the output's gradient, if there is one.
    origin: Option<Origin>,
}

/// Queries, keys and values.
#[expect(clippy::large_enum_variant, reason = "one a layer and step, and a box would cost an allocation")]
#[derive(Debug)]
pub(crate) enum Inputs {
    High([Tensor; 3]),
    Fp8([Fp8Tensor; 3]),
}

impl Attention {
    /// The attention at `place`. In FP8, it registers the slots of what it reads, also those that projections quantize with.
    pub(crate) fn new(place: &Place<'_>, options: &AttentionOptions) -> Result<Self> {
        let dropout = Rate::new(place.layer, "attention_dropout", options.attention_dropout)?;
        let own = |part: &str, role| SlotName::new(&format!("{}.{part}", place.slots), role);
        let of_projections =
            || place.outputs.iter().map(|path| SlotName::new(path, SlotRole::Output)).collect();
        let slots = || AttentionSlots {
            inputs: if options.fp8_mha && !place.outputs.is_empty() {
                InputSlots::OfProjections(of_projections())
            } else {
                InputSlots::Own(["q", "k", "v"].map(|part| own(part, SlotRole::Input)))
            },
            gradient: if options.fp8_mha {
                GradientSlot::OfProjection(SlotName::new(place.proj, SlotRole::GradInput))
            } else {
                GradientSlot::Own(own("o", SlotRole::GradOutput))
            },
        };
        let in_fp8 = options.fp8_dpa || options.fp8_mha;
        Ok(Self { options: options.operation(), dropout, slots: in_fp8.then(slots) })
    }

    /// Whether no query sees a key to its right.
    pub(crate) const fn is_causal(&self) -> bool {
        self.options.causal || matches!(self.options.window.1, Some(0))
    }

    /// The slot of the output of the projection number `index`, if that is to write FP8.
    pub(crate) fn output(&self, index: usize) -> Option<&SlotName> {
        match &self.slots.as_ref()?.inputs {
            InputSlots::OfProjections(outputs) => outputs.get(index),
            InputSlots::Own(_) => None,
        }
    }

    /// How the projection of the output writes the gradient that [`backward`](Self::backward) takes.
    pub(crate) fn grad_input(&self, passed: &AttentionPassed) -> Option<GradInput<'_>> {
        match &self.slots.as_ref()?.gradient {
            GradientSlot::OfProjection(slot) => {
                Some(GradInput { slot, in_fp8: matches!(passed.inputs, Inputs::Fp8(_)) })
            }
            GradientSlot::Own(_) => None,
        }
    }

    /// Returns the output in `dtype`, in the shape of the queries.
    pub(crate) fn forward(
        &self,
        cx: &mut Forward<'_>,
        inputs: Inputs,
        sequences: &Sequences,
        dtype: DType,
    ) -> Result<(Tensor, AttentionPassed)> {
        self.forward_at(cx, inputs, sequences, dtype, None)
    }

    /// As [`forward`](Self::forward), with another diagonal than the options' if there is one.
    pub(crate) fn forward_at(
        &self,
        cx: &mut Forward<'_>,
        inputs: Inputs,
        sequences: &Sequences,
        dtype: DType,
        diagonal: Option<Diagonal>,
    ) -> Result<(Tensor, AttentionPassed)> {
        let dropout = self.dropout.draw(cx)?;
        let diagonal = diagonal.unwrap_or(self.options.diagonal);
        let options = ops::AttentionOptions { dropout: dropout.as_ref(), diagonal, ..self.options };
        let inputs = match (inputs, &self.slots) {
            (Inputs::High(inputs), Some(slots)) => match slots.quantize(cx, &inputs)? {
                Some(codes) => Inputs::Fp8(codes),
                None => Inputs::High(inputs),
            },
            (inputs, _) => inputs,
        };
        let (o, rows) = match &inputs {
            Inputs::Fp8([q, k, v]) => ops::attention_fp8(q, k, v, sequences, options, dtype)?,
            Inputs::High([q, k, v]) => ops::attention(q, k, v, sequences, options)?,
        };
        let origin = match self.slots.as_ref().map(|slots| &slots.gradient) {
            Some(GradientSlot::Own(slot)) => Some(cx.origin(slot)),
            _ => None,
        };
        Ok((o.clone(), AttentionPassed { inputs, o, rows, dropout, origin }))
    }

    /// Returns the gradients of the three inputs, given `dy`, that of the output, with the output's elements.
    pub(crate) fn backward(
        &self,
        cx: &mut Backward<'_>,
        passed: AttentionPassed,
        dy: Operand,
        sequences: &Sequences,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let AttentionPassed { inputs, o, rows, dropout, origin } = passed;
        let options = ops::AttentionOptions { dropout: dropout.as_ref(), ..self.options };
        let dy = match dy {
            Operand::Fp8(dy) => Operand::Fp8(dy.reshape(*o.shape())?),
            Operand::High(dy) => {
                let dy = dy.reshape(*o.shape())?;
                let codes = match (&self.slots, &origin) {
                    (Some(slots), Some(origin)) => slots.quantize_gradient(cx, origin, &dy)?,
                    _ => None,
                };
                match (&inputs, codes) {
                    (Inputs::Fp8(_), Some(codes)) => Operand::Fp8(codes),
                    _ => Operand::High(dy),
                }
            }
        };
        let [q, k, v] = match (inputs, &dy) {
            (Inputs::Fp8([q, k, v]), Operand::Fp8(dy)) => {
                return Ok(ops::attention_fp8_backward(dy, &q, &k, &v, &o, &rows, sequences, options)?);
            }
            (Inputs::Fp8([q, k, v]), Operand::High(_)) => {
                let high = |x: &Fp8Tensor| x.dequantize(o.dtype());
                [high(&q)?, high(&k)?, high(&v)?]
            }
            (Inputs::High(inputs), _) => inputs,
        };
        let dy = in_high_precision(dy)?;
        Ok(ops::attention_backward(&dy, &q, &k, &v, &o, &rows, sequences, options)?)
    }
}

impl AttentionSlots {
    /// Returns the codes of q, k and v, or `None` if the recipe does not give each of them one scale, or projections had to quantize
    /// them. Amaxes that a calibration asks for are recorded either way.
    fn quantize(&self, cx: &mut Forward<'_>, inputs: &[Tensor; 3]) -> Result<Option<[Fp8Tensor; 3]>> {
        let InputSlots::Own(names) = &self.inputs else { return Ok(None) };
        let [q, k, v] = [0, 1, 2].map(|i| -> Result<Option<Fp8Tensor>> {
            let (name, x) = (&names[i], &inputs[i]);
            let slot = cx.slot(name)?.rowwise_only();
            if !(slot.is_off() || slot.has_one_scale()) {
                return Ok(None);
            }
            let operand = ops::quantize(x, &slot)?;
            cx.measure_sqnr(name, x, &operand)?;
            Ok(codes(operand))
        });
        Ok(match (q?, k?, v?) {
            (Some(q), Some(k), Some(v)) => Some([q, k, v]),
            _ => None,
        })
    }

    /// As [`quantize`](Self::quantize), of the output's gradient.
    fn quantize_gradient(
        &self,
        cx: &mut Backward<'_>,
        origin: &Origin,
        dy: &Tensor,
    ) -> Result<Option<Fp8Tensor>> {
        let GradientSlot::Own(name) = &self.gradient else { return Ok(None) };
        let slot = cx.slot(origin, name)?.rowwise_only();
        if !(slot.is_off() || slot.has_one_scale()) {
            return Ok(None);
        }
        let operand = ops::quantize(dy, &slot)?;
        cx.measure_sqnr(origin, name, dy, &operand)?;
        Ok(codes(operand))
    }
}

fn codes(operand: Operand) -> Option<Fp8Tensor> {
    match operand {
        Operand::Fp8(codes) => Some(codes),
        Operand::High(_) => None,
    }
}

impl Slots for Attention {
    fn slots(&self, f: &mut dyn FnMut(&SlotName)) {
        let Some(AttentionSlots { inputs, gradient }) = &self.slots else { return };
        let inputs = match inputs {
            InputSlots::Own(names) => &names[..],
            InputSlots::OfProjections(names) => names,
        };
        let (GradientSlot::Own(gradient) | GradientSlot::OfProjection(gradient)) = gradient;
        inputs.iter().chain([gradient]).for_each(f);
    }
}

/// It has no parameters.
impl Layer for Attention {
    fn visit<'a>(&'a self, _: &mut dyn FnMut(&'a Parameter)) {}

    fn visit_mut<'a>(&'a mut self, _: &mut dyn FnMut(&'a mut Parameter)) {}
}
