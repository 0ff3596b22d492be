//! The logits of a language model: a Linear of its own, or the table of the embedding.

use crate::{Embedding, Error, Linear, LinearSaved, Module, Result};
use fp8_kernels::ops::{self, Accumulation};
use fp8_kernels::{Operand, Tensor};
use fp8_recipe::{Backward, DelayedWgrad, Forward};

/// The values that the backward pass of the head needs.
#[expect(clippy::large_enum_variant, reason = "one a model and step, and a box would cost an allocation")]
#[derive(Debug)]
pub(super) enum HeadSaved {
    Linear(LinearSaved),
    /// The table in the dtype of the head's input, and that input unless the table is frozen.
    Tied {
        x: Option<Tensor>,
        table: Tensor,
    },
}

/// Computes logits in high precision, because they decide between many close values. Without a head of its own, the logits are
/// `x · tableᵀ`.
pub(super) fn forward(
    cx: &mut Forward<'_>,
    head: Option<&Linear>,
    embedding: &Embedding,
    x: &Tensor,
) -> Result<(Tensor, HeadSaved)> {
    let mut cx = cx.disabled();
    if let Some(head) = head {
        let (y, saved) = head.forward(&mut cx, x)?;
        return Ok((y, HeadSaved::Linear(saved)));
    }
    let table = embedding.weight().values(x.dtype())?;
    let [input, weight] = [x, &table].map(|tensor| Operand::High(tensor.clone()));
    let y = ops::fprop(&input, &weight, None, x.dtype(), Accumulation::Split)?;
    let x = embedding.weight().is_trainable().then(|| x.clone());
    Ok((y, HeadSaved::Tied { x, table }))
}

/// Adds the gradients of the head's weight and returns that of its input.
pub(super) fn backward(
    cx: &mut Backward<'_>,
    head: Option<&mut Linear>,
    embedding: &mut Embedding,
    saved: HeadSaved,
    dy: &Tensor,
) -> Result<Tensor> {
    match (head, saved) {
        (Some(head), HeadSaved::Linear(saved)) => head.backward(cx, saved, dy),
        (None, HeadSaved::Tied { x, table }) => {
            let (dtype, accumulation) = (table.dtype(), Accumulation::Split);
            let shape = dy.shape().with_last(table.shape()[1]);
            let dy = Operand::High(ops::cast(dy, dtype)?);
            let dx = ops::dgrad(&dy, &Operand::High(table), dtype, accumulation)?;
            let weight = embedding.weight_mut();
            let name = weight.name().clone();
            if weight.is_trainable() {
                let x = Operand::High(x.ok_or_else(|| weight.was_frozen("the tied head"))?);
                match cx.delayed_wgrads() {
                    Some(delayed) => delayed.push(DelayedWgrad { weight: name, dy, x, accumulation }),
                    None => ops::wgrad(&dy, &x, weight.main_grad_mut(), &name, accumulation)?,
                }
            }
            Ok(dx.reshape(shape)?)
        }
        (Some(head), HeadSaved::Tied { .. }) => {
            Err(of_another_model(head.path(), "a model whose head is tied to the embedding"))
        }
        (None, HeadSaved::Linear(_)) => {
            Err(of_another_model("the tied head", "a model with a head of its own"))
        }
    }
}

fn of_another_model(layer: &str, found: &str) -> Error {
    fp8_recipe::Error::Origin { layer: layer.to_owned(), found: found.to_owned() }.into()
}
