//! Dropout in layers: checked probabilities, by which a forward pass draws masks.

use crate::{Error, Result};
use fp8_kernels::ops::Dropout;
use fp8_recipe::Forward;

/// The probability that something is dropped, at least 0 and less than 1.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rate(f32);

impl Rate {
    pub(crate) fn new(layer: &str, option: &'static str, p: f32) -> Result<Self> {
        if (0.0..1.0).contains(&p) {
            return Ok(Self(p));
        }
        let remedy = "expected a probability of at least 0 and less than 1".to_owned();
        Err(Error::Option { part: layer.to_owned(), option, value: p.to_string(), remedy })
    }

    /// Draws a mask. `None` if nothing is dropped: with probability 0, and in an evaluation.
    pub(crate) fn draw(self, cx: &mut Forward<'_>) -> Result<Option<Dropout>> {
        if self.0 == 0.0 {
            return Ok(None);
        }
        Ok(cx.dropout_draw()?.map(|draw| Dropout { p: self.0, draw }))
    }
}
