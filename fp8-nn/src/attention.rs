//! The attention between the projections of [`MultiheadAttention`](crate::MultiheadAttention), in high precision or in FP8.

use crate::dropout::Rate;
use crate::{AttentionOptions, Layer, Parameter, Result};
use fp8_kernels::ops::{self, AttentionSaved, Dropout, Sequences};
use fp8_kernels::{Fp8Tensor, Operand, Shape, Tensor};
use fp8_recipe::{Backward, Forward, Origin, SlotName, SlotRole, Slots};

/// Attention with its options, and the slots that it quantizes its inputs with, if it runs in FP8.
#[derive(Debug)]
pub(crate) struct Attention {
    options: ops::AttentionOptions<'static>,
    dropout: Rate,
    slots: Option<AttentionSlots>,
}

/// What is quantized: `<path>.q.input`, `<path>.k.input`, `<path>.v.input` and `<path>.o.grad_output`.
#[derive(Debug)]
struct AttentionSlots {
    inputs: [SlotName; 3],
    grad_output: SlotName,
}

/// The values that the backward pass of [`Attention`] needs.
#[derive(Debug)]
pub(crate) struct AttentionPassed {
    inputs: Inputs,
    o: Tensor,
    rows: AttentionSaved,
    dropout: Option<Dropout>,
    /// That of the slot of the output's gradient, if there is one.
    origin: Option<Origin>,
}

/// Queries, keys and values, as the products read them.
#[expect(clippy::large_enum_variant, reason = "one a layer and step, and a box would cost an allocation")]
#[derive(Debug)]
enum Inputs {
    High([Tensor; 3]),
    Fp8([Fp8Tensor; 3]),
}

impl Attention {
    /// The attention of the layer at `path`. In FP8, it registers slots below that path.
    pub(crate) fn new(path: &str, options: &AttentionOptions) -> Result<Self> {
        let dropout = Rate::new(path, "attention_dropout", options.attention_dropout)?;
        let slot = |part: &str, role| SlotName::new(&format!("{path}.{part}"), role);
        let slots = || AttentionSlots {
            inputs: ["q", "k", "v"].map(|part| slot(part, SlotRole::Input)),
            grad_output: slot("o", SlotRole::GradOutput),
        };
        Ok(Self { options: options.operation(), dropout, slots: options.fp8_dpa.then(slots) })
    }

    /// Returns the output, in the shape and dtype of `q`.
    pub(crate) fn forward(
        &self,
        cx: &mut Forward<'_>,
        inputs: [Tensor; 3],
        sequences: &Sequences,
    ) -> Result<(Tensor, AttentionPassed)> {
        let dropout = self.dropout.draw(cx)?;
        let options = ops::AttentionOptions { dropout: dropout.as_ref(), ..self.options };
        let codes = match &self.slots {
            Some(slots) => slots.quantize(cx, &inputs)?,
            None => None,
        };
        let (inputs, (o, rows)) = match codes {
            Some(codes) => {
                let ([q8, k8, v8], dtype) = (&codes, inputs[0].dtype());
                let result = ops::attention_fp8(q8, k8, v8, sequences, options, dtype)?;
                (Inputs::Fp8(codes), result)
            }
            None => {
                let [q, k, v] = &inputs;
                let result = ops::attention(q, k, v, sequences, options)?;
                (Inputs::High(inputs), result)
            }
        };
        let origin = self.slots.as_ref().map(|slots| cx.origin(&slots.grad_output));
        Ok((o.clone(), AttentionPassed { inputs, o, rows, dropout, origin }))
    }

    /// Returns the gradients of the three inputs, given `dy`, that of the output in its shape.
    pub(crate) fn backward(
        &self,
        cx: &mut Backward<'_>,
        passed: AttentionPassed,
        dy: &Tensor,
        sequences: &Sequences,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let AttentionPassed { inputs, o, rows, dropout, origin } = passed;
        let options = ops::AttentionOptions { dropout: dropout.as_ref(), ..self.options };
        let dy8 = match (&self.slots, &origin) {
            (Some(slots), Some(origin)) => slots.quantize_gradient(cx, origin, dy)?,
            _ => None,
        };
        let [q, k, v] = match (inputs, dy8) {
            (Inputs::Fp8([q8, k8, v8]), Some(dy8)) => {
                return Ok(ops::attention_fp8_backward(&dy8, &q8, &k8, &v8, &o, &rows, sequences, options)?);
            }
            (Inputs::Fp8([q8, k8, v8]), None) => {
                let high = |x: &Fp8Tensor| x.dequantize(o.dtype());
                [high(&q8)?, high(&k8)?, high(&v8)?]
            }
            (Inputs::High(inputs), _) => inputs,
        };
        Ok(ops::attention_backward(dy, &q, &k, &v, &o, &rows, sequences, options)?)
    }
}

impl AttentionPassed {
    /// The shape of the output.
    pub(crate) fn shape(&self) -> Shape {
        *self.o.shape()
    }
}

impl AttentionSlots {
    /// Returns the codes of q, k and v, or `None` if the recipe does not give each of them one scale. Amaxes that a calibration
    /// asks for are recorded either way.
    fn quantize(&self, cx: &mut Forward<'_>, inputs: &[Tensor; 3]) -> Result<Option<[Fp8Tensor; 3]>> {
        let [q, k, v] = [0, 1, 2].map(|i| -> Result<Option<Fp8Tensor>> {
            let (name, x) = (&self.inputs[i], &inputs[i]);
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
        let slot = cx.slot(origin, &self.grad_output)?.rowwise_only();
        if !(slot.is_off() || slot.has_one_scale()) {
            return Ok(None);
        }
        let operand = ops::quantize(dy, &slot)?;
        cx.measure_sqnr(origin, &self.grad_output, dy, &operand)?;
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
        if let Some(AttentionSlots { inputs, grad_output }) = &self.slots {
            inputs.iter().chain([grad_output]).for_each(f);
        }
    }
}

/// It has no parameters.
impl Layer for Attention {
    fn visit<'a>(&'a self, _: &mut dyn FnMut(&'a Parameter)) {}

    fn visit_mut<'a>(&'a mut self, _: &mut dyn FnMut(&'a mut Parameter)) {}
}
