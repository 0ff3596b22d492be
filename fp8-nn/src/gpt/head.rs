//! The logits of a language model: a Linear of its own, the table of the embedding, or a head of the user's own.

use crate::{
    AnySaved, DynModule, Embedding, Layer, Linear, LinearSaved, Loras, Module, Parameter, Result,
    SequenceInfo, TensorParallel,
};
use fp8_kernels::ops::{self, Accumulation};
use fp8_kernels::{Operand, Tensor};
use fp8_recipe::{Backward, DelayedWgrad, Forward, SlotName, Slots};

/// The part of a model that computes the logits.
#[expect(clippy::large_enum_variant, reason = "one a model, in the model's own memory")]
#[derive(Debug)]
pub(super) enum Head {
    /// The table of the embedding.
    Tied,
    Linear(Linear),
    /// The user's own.
    Own(Box<dyn DynModule>),
}

/// The values that the backward pass of the head needs.
#[expect(clippy::large_enum_variant, reason = "one a model and step, and a box would cost an allocation")]
#[derive(Debug)]
pub(super) enum HeadSaved {
    /// The table in the dtype of the head's input, and that input unless the table is frozen.
    Tied {
        x: Option<Tensor>,
        table: Tensor,
    },
    Linear(LinearSaved),
    Own(AnySaved),
}

impl Head {
    /// Computes logits from the normalized output of the blocks. A head that the model was made with runs in high precision,
    /// because its logits decide between many close values.
    pub(super) fn forward(
        &self,
        cx: &mut Forward<'_>,
        embedding: &Embedding,
        x: &Tensor,
        ranks: Option<&TensorParallel>,
    ) -> Result<(Tensor, HeadSaved)> {
        match self {
            Self::Tied => tied(embedding, x, ranks),
            Self::Linear(head) => {
                let (y, saved) = head.forward(&mut cx.disabled(), x)?;
                Ok((y, HeadSaved::Linear(saved)))
            }
            Self::Own(head) => {
                let (y, saved) = head.forward_with_info_dyn(cx, x, &SequenceInfo::default())?;
                Ok((y, HeadSaved::Own(saved)))
            }
        }
    }

    /// Adds the gradients of the head's weight and returns that of its input.
    pub(super) fn backward(
        &mut self,
        cx: &mut Backward<'_>,
        embedding: &mut Embedding,
        saved: HeadSaved,
        dy: &Tensor,
        ranks: Option<&TensorParallel>,
    ) -> Result<Tensor> {
        match (self, saved) {
            (Self::Tied, HeadSaved::Tied { x, table }) => tied_backward(cx, embedding, x, &table, dy, ranks),
            (Self::Linear(head), HeadSaved::Linear(saved)) => head.backward(cx, saved, dy),
            (Self::Own(head), HeadSaved::Own(saved)) => head.backward_dyn(0, cx, saved, dy),
            (head, saved) => Err(fp8_recipe::Error::Origin {
                layer: head.kind().to_owned(),
                found: format!("a model with {}", saved.kind()),
            }
            .into()),
        }
    }

    pub(super) fn linear(&self) -> Option<&Linear> {
        match self {
            Self::Linear(head) => Some(head),
            Self::Tied | Self::Own(_) => None,
        }
    }

    const fn kind(&self) -> &'static str {
        match self {
            Self::Tied => TIED,
            Self::Linear(_) => LINEAR,
            Self::Own(_) => OWN,
        }
    }
}

const TIED: &str = "a head tied to the embedding";
const LINEAR: &str = "a Linear as its head";
const OWN: &str = "a head of the user's own";

impl HeadSaved {
    const fn kind(&self) -> &'static str {
        match self {
            Self::Tied { .. } => TIED,
            Self::Linear(_) => LINEAR,
            Self::Own(_) => OWN,
        }
    }
}

impl Slots for Head {
    fn slots(&self, f: &mut dyn FnMut(&SlotName)) {
        match self {
            Self::Tied => {}
            Self::Linear(head) => head.slots(f),
            Self::Own(head) => head.slots(f),
        }
    }
}

impl Layer for Head {
    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Parameter)) {
        match self {
            Self::Tied => {}
            Self::Linear(head) => head.visit(f),
            Self::Own(head) => head.visit(f),
        }
    }

    fn visit_mut<'a>(&'a mut self, f: &mut dyn FnMut(&'a mut Parameter)) {
        match self {
            Self::Tied => {}
            Self::Linear(head) => head.visit_mut(f),
            Self::Own(head) => head.visit_mut(f),
        }
    }

    fn visit_loras<'a>(&'a self, f: &mut dyn FnMut(&'a Loras)) {
        match self {
            Self::Tied => {}
            Self::Linear(head) => head.visit_loras(f),
            Self::Own(head) => head.visit_loras(f),
        }
    }

    fn visit_loras_mut<'a>(&'a mut self, f: &mut dyn FnMut(&'a mut Loras)) {
        match self {
            Self::Tied => {}
            Self::Linear(head) => head.visit_loras_mut(f),
            Self::Own(head) => head.visit_loras_mut(f),
        }
    }
}

/// Returns `x · tableᵀ`.
fn tied(embedding: &Embedding, x: &Tensor, ranks: Option<&TensorParallel>) -> Result<(Tensor, HeadSaved)> {
    let table = embedding.weight().values(x.dtype())?;
    let all = match ranks.filter(|ranks| ranks.is_sequence_parallel()) {
        Some(ranks) => ranks.gather("the tied head's input", x)?,
        None => x.clone(),
    };
    let [input, weight] = [&all, &table].map(|tensor| Operand::High(tensor.clone()));
    let y = ops::fprop(&input, &weight, None, x.dtype(), Accumulation::Split)?;
    let x = embedding.weight().is_trainable().then(|| x.clone());
    Ok((y, HeadSaved::Tied { x, table }))
}

fn tied_backward(
    cx: &mut Backward<'_>,
    embedding: &mut Embedding,
    x: Option<Tensor>,
    table: &Tensor,
    dy: &Tensor,
    ranks: Option<&TensorParallel>,
) -> Result<Tensor> {
    let (dtype, accumulation) = (table.dtype(), Accumulation::Split);
    let shape = dy.shape().with_last(table.shape()[1]);
    let dy = Operand::High(ops::cast(dy, dtype)?);
    let part_dtype = ranks.map_or(dtype, |ranks| ranks.partial_dtype(dtype));
    let dx = ops::dgrad(&dy, &Operand::High(table.clone()), part_dtype, accumulation)?.reshape(shape)?;
    let dx = match ranks {
        Some(ranks) => ranks.sum("the gradient of the tied head's input", dx, dtype)?,
        None => dx,
    };
    let weight = embedding.weight_mut();
    let name = weight.name().clone();
    if weight.is_trainable() {
        let x = x.ok_or_else(|| weight.was_frozen("the tied head"))?;
        let x = match ranks.filter(|ranks| ranks.is_sequence_parallel()) {
            Some(ranks) => ranks.gather("the tied head's input, again", &x)?,
            None => x,
        };
        let x = Operand::High(x);
        let lone_recipe = cx.lone_recipe();
        match cx.delayed_wgrads() {
            Some(delayed) => {
                delayed.push(DelayedWgrad { weight: name, dy, x, accumulation, lone_recipe });
            }
            None => {
                weight.store(lone_recipe, |grad, update, name| {
                    Ok(ops::wgrad_into(&dy, &x, grad, update, name, accumulation)?)
                })?;
            }
        }
    }
    Ok(dx)
}
