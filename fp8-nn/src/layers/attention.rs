//! The attention between the projections of [`MultiheadAttention`](crate::MultiheadAttention), in high precision or in FP8.

use super::operands::Operands;
use crate::dropout::Rate;
use crate::fp8_output::{GradInput, in_high_precision, is_used};
use crate::{AttentionOptions, Layer, Parameter, Result, TensorParallel};
use fp8_kernels::ops::{
    self, AttentionGrads, AttentionSaved, Diagonal, Dropout, GradLayout, Part, Sequences,
};
use fp8_kernels::{DType, Fp8Tensor, Operand, Tensor};
use fp8_recipe::{Backward, Forward, Origin, SlotName, SlotRole, SlotUse, Slots};

/// Attention with its options, and the slots of what it reads in FP8, unless the options rule that out.
#[derive(Debug)]
pub(crate) struct Attention {
    options: ops::ScoreOptions<'static>,
    dropout: Rate,
    slots: AttentionSlots,
}

/// The place of an attention in a layer: the paths of the layer, of its slots and of the projections around it.
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

/// The slots of what an attention reads. Which of them are used depends on the recipe, unless the layer's options decide it: a
/// slot that is not used is off.
#[derive(Debug)]
struct AttentionSlots {
    /// With which the attention quantizes q, k and v: `<slots>.q.input`, `<slots>.k.input` and `<slots>.v.input`.
    inputs: Option<[SlotName; 3]>,
    /// With which the projections write q, k and v: `<path>.output`.
    outputs: Vec<SlotName>,
    /// With which the attention quantizes the gradient of its output: `<slots>.o.grad_output`.
    gradient: Option<SlotName>,
    /// With which the projection of the output writes it: `<proj>.grad_input`.
    grad_input: Option<SlotName>,
}

/// The use of the slots of `fp8_dpa` and `fp8_mha`, as far as a layer's options decide it; the recipe decides the rest.
/// `None` if there is no such slot.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Uses {
    /// The use of the slots of q, k and v if no projection writes them.
    inputs: Option<SlotUse>,
    /// The use of the slots that `fp8_mha` makes unnecessary.
    dpa_alone: Option<SlotUse>,
    /// The use of the slots that projections write with.
    mha: Option<SlotUse>,
}

impl Uses {
    const fn new(fp8_dpa: Option<bool>, fp8_mha: Option<bool>) -> Self {
        use SlotUse::{Always, Dpa, DpaOrMha, Mha};
        let (inputs, dpa_alone, mha) = match (fp8_dpa, fp8_mha) {
            (_, Some(true)) => (Some(Always), None, Some(Always)),
            (Some(false), _) => (None, None, None),
            (Some(true), Some(false)) => (Some(Always), Some(Always), None),
            (Some(true), None) => (Some(Always), Some(Always), Some(Mha)),
            (None, Some(false)) => (Some(DpaOrMha), Some(DpaOrMha), None),
            (None, None) => (Some(DpaOrMha), Some(Dpa), Some(Mha)),
        };
        Self { inputs, dpa_alone, mha }
    }
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
    High(Operands<Tensor>),
    Fp8(Operands<Fp8Tensor>),
}

impl Attention {
    /// The attention at `place`. Unless its options rule out FP8, it registers the slots of what it reads, also those that
    /// projections quantize with.
    pub(crate) fn new(place: &Place<'_>, options: &AttentionOptions) -> Result<Self> {
        let dropout = Rate::new(place.layer, "attention_dropout", options.attention_dropout)?;
        let uses = Uses::new(options.fp8_dpa, options.fp8_mha);
        let own =
            |part: &str, role, used| SlotName::of_attention(&format!("{}.{part}", place.slots), role, used);
        let inputs = if place.outputs.is_empty() { uses.inputs } else { uses.dpa_alone };
        let output = |path: &&str| Some(SlotName::of_attention(path, SlotRole::Output, uses.mha?));
        let slots = AttentionSlots {
            inputs: inputs.map(|used| ["q", "k", "v"].map(|part| own(part, SlotRole::Input, used))),
            outputs: place.outputs.iter().filter_map(output).collect(),
            gradient: uses.dpa_alone.map(|used| own("o", SlotRole::GradOutput, used)),
            grad_input: uses.mha.map(|used| SlotName::of_attention(place.proj, SlotRole::GradInput, used)),
        };
        Ok(Self { options: options.operation(), dropout, slots })
    }

    /// The attention of the `heads` heads that this rank has.
    pub(crate) fn of_rank(mut self, ranks: Option<&TensorParallel>, heads: usize) -> Self {
        if let Some(ranks) = ranks {
            self.options.dropout_heads =
                Some(Part { first: ranks.rank() * heads, total: ranks.size() * heads });
            self.dropout = self.dropout.of_ranks(ranks);
        }
        self
    }

    /// Whether no query sees a key to its right.
    pub(crate) const fn is_causal(&self) -> bool {
        self.options.causal || matches!(self.options.window.1, Some(0))
    }

    /// The slot with which the projection number `index` writes its output, if a recipe may have it write FP8.
    pub(crate) fn output(&self, index: usize) -> Option<&SlotName> {
        self.slots.outputs.get(index)
    }

    /// Returns the slot with which the projection of the output writes the gradient that [`backward`](Self::backward)
    /// takes, and whether it writes FP8. `None` if there is no such slot.
    pub(crate) fn grad_input(&self, passed: &AttentionPassed) -> Option<GradInput<'_>> {
        let slot = self.slots.grad_input.as_ref()?;
        Some(GradInput { slot, in_fp8: matches!(passed.inputs, Inputs::Fp8(_)) })
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
        let options = ops::ScoreOptions { dropout: dropout.as_ref(), diagonal, ..self.options };
        let inputs = match inputs {
            Inputs::High(inputs) => match self.slots.quantize(cx, &inputs)? {
                Some(codes) => Inputs::Fp8(Operands::Three(codes)),
                None => Inputs::High(inputs),
            },
            Inputs::Fp8(codes) => Inputs::Fp8(codes),
        };
        let (o, rows) = match &inputs {
            Inputs::Fp8(inputs) => {
                let [q, k, v] = inputs.heads()?;
                ops::attention_fp8(q, k, v, sequences, options, dtype)?
            }
            Inputs::High(inputs) => {
                let [q, k, v] = inputs.heads()?;
                ops::attention(q, k, v, sequences, options)?
            }
        };
        let origin = self.slots.gradient.as_ref().map(|slot| cx.origin(slot));
        Ok((o.clone(), AttentionPassed { inputs, o, rows, dropout, origin }))
    }

    /// Returns the gradients of the three inputs in this layout, given `dy`, that of the output, with the output's elements.
    pub(crate) fn backward(
        &self,
        cx: &mut Backward<'_>,
        passed: AttentionPassed,
        dy: Operand,
        sequences: &Sequences,
        layout: GradLayout,
    ) -> Result<AttentionGrads> {
        let AttentionPassed { inputs, o, rows, dropout, origin } = passed;
        let options = ops::ScoreOptions { dropout: dropout.as_ref(), ..self.options };
        let dy = match dy {
            Operand::Fp8(dy) => Operand::Fp8(dy.reshape(*o.shape())?),
            Operand::High(dy) => {
                let dy = dy.reshape(*o.shape())?;
                let codes = match &origin {
                    Some(origin) => self.slots.quantize_gradient(cx, origin, &dy)?,
                    None => None,
                };
                match (&inputs, codes) {
                    (Inputs::Fp8(_), Some(codes)) => Operand::Fp8(codes),
                    _ => Operand::High(dy),
                }
            }
        };
        let inputs = match (inputs, &dy) {
            (Inputs::Fp8(inputs), Operand::Fp8(dy)) => {
                let [q, k, v] = inputs.heads()?;
                let grads =
                    ops::attention_fp8_backward_to(dy, q, k, v, &o, &rows, sequences, options, layout)?;
                return Ok(grads);
            }
            (Inputs::Fp8(inputs), Operand::High(_)) => inputs.map(|x| Ok(x.dequantize(o.dtype())?))?,
            (Inputs::High(inputs), _) => inputs,
        };
        let (dy, [q, k, v]) = (in_high_precision(dy)?, inputs.heads()?);
        Ok(ops::attention_backward_to(&dy, q, k, v, &o, &rows, sequences, options, layout)?)
    }
}

impl AttentionSlots {
    /// Returns the codes of q, k and v, or `None` if the recipe does not quantize each of them with one scale. Amaxes that a calibration asks for are recorded either way.
    fn quantize(&self, cx: &mut Forward<'_>, inputs: &Operands<Tensor>) -> Result<Option<[Fp8Tensor; 3]>> {
        let Some(names) = &self.inputs else { return Ok(None) };
        // Each has a scale of its own, so each becomes a tensor of its own, once a slot asks for it.
        let mut separate = None;
        let [q, k, v] = [0, 1, 2].map(|i| -> Result<Option<Fp8Tensor>> {
            let name = &names[i];
            let slot = cx.slot(name)?.rowwise_only();
            if !is_used(&slot) {
                return Ok(None);
            }
            let tensors = match separate.take() {
                Some(tensors) => tensors,
                None => inputs.separate()?,
            };
            let x = &separate.insert(tensors)[i];
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
        let Some(name) = &self.gradient else { return Ok(None) };
        let slot = cx.slot(origin, name)?.rowwise_only();
        if !is_used(&slot) {
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
        let AttentionSlots { inputs, outputs, gradient, grad_input } = &self.slots;
        inputs.iter().flatten().chain(outputs).chain(gradient).chain(grad_input).for_each(f);
    }
}

/// It has no parameters.
impl Layer for Attention {
    fn visit<'a>(&'a self, _: &mut dyn FnMut(&'a Parameter)) {}

    fn visit_mut<'a>(&'a mut self, _: &mut dyn FnMut(&'a mut Parameter)) {}
}
