//! Dropout in layers: checked probabilities, by which a forward pass draws masks.

use crate::{Error, Result, TensorParallel};
use fp8_kernels::Tensor;
use fp8_kernels::ops::Dropout;
use fp8_recipe::Forward;

/// The probability that something is dropped, at least 0 and less than 1.
#[derive(Debug, Clone)]
pub(crate) struct Rate {
    p: f32,
    /// The ranks that draw parts of one mask, or the same one.
    ranks: Option<TensorParallel>,
}

impl Rate {
    pub(crate) fn new(layer: &str, option: &'static str, p: f32) -> Result<Self> {
        if (0.0..1.0).contains(&p) {
            return Ok(Self { p, ranks: None });
        }
        let remedy = "expected a probability of at least 0 and less than 1".to_owned();
        Err(Error::Option { part: layer.to_owned(), option, value: p.to_string(), remedy })
    }

    /// The probability in a layer that ranks share.
    pub(crate) fn of_ranks(self, ranks: &TensorParallel) -> Self {
        Self { ranks: Some(ranks.clone()), ..self }
    }

    pub(crate) fn is_zero(&self) -> bool {
        self.p == 0.0
    }

    /// Draws a mask. `None` if nothing is dropped: with probability 0, and in an evaluation.
    pub(crate) fn draw(&self, cx: &mut Forward<'_>) -> Result<Option<Dropout>> {
        if self.p == 0.0 {
            return Ok(None);
        }
        let Some(draw) = cx.dropout_draw()? else { return Ok(None) };
        if let Some(ranks) = &self.ranks {
            ranks.expect_one_seed(cx.dropout_seed())?;
        }
        Ok(Some(Dropout { p: self.p, draw }))
    }

    /// Draws the part of a mask that belongs to `x`, this rank's tokens if ranks have tokens of their own.
    pub(crate) fn draw_for(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<Option<Dropout>> {
        let Some(Dropout { p, draw }) = self.draw(cx)? else { return Ok(None) };
        let ranks = self.ranks.as_ref().filter(|ranks| ranks.is_sequence_parallel());
        let first = ranks.map_or(0, |ranks| ranks.rank() * x.numel());
        Ok(Some(Dropout { p, draw: draw.at(first as u64)? }))
    }
}
