//! The blocks that a recipe leaves in high precision.

use super::Gpt;
use fp8_recipe::Recipe;
use std::sync::Arc;

/// The share of the first and of the last blocks that the paper keeps in high precision: 2 and 8 of 62.
const SHARE: [f64; 2] = [0.03, 0.13];

impl Gpt {
    /// Returns patterns for [`Recipe::by_name`] that leave the `first` and the `last` blocks in high precision.
    ///
    /// Recipes of 4 bits leave out where a model begins and ends, as the paper on training in NVFP4 (arXiv 2509.25149) does. Defaults for
    /// `None` are its shares: the first 3 % and the last 13 % of the blocks, rounded up, at least one each.
    ///
    /// ```
    /// use fp8_nn::prelude::*;
    ///
    /// let attention = AttentionOptions { num_attention_heads: 2, ..Default::default() };
    /// let layer = TransformerLayerOptions { hidden_size: 32, ffn_hidden_size: 64, attention, ..Default::default() };
    /// let options = GptOptions { vocab_size: 16, num_layers: 4, layer, ..Default::default() };
    /// let model = Gpt::new("gpt", &options, &Device::cpu(), &mut fp8_nn::rand::rng())?;
    /// let high = model.high_precision_blocks(None, None);
    /// let patterns: Vec<&str> = high.iter().map(|(pattern, _)| &**pattern).collect();
    /// assert_eq!(patterns, ["gpt.blocks.0.*", "gpt.blocks.3.*"]);
    /// let recipe = Recipe::by_name(high, Nvfp4::default());
    /// assert!(Scaling::new(&model, &Device::cpu())?.autocast(&recipe).is_ok());
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    pub fn high_precision_blocks(
        &self,
        first: Option<usize>,
        last: Option<usize>,
    ) -> Vec<(Arc<str>, Recipe)> {
        let count = self.blocks.len();
        let share = |share: f64| ((share * count as f64).ceil() as usize).max(1);
        let (first, last) = (first.unwrap_or(share(SHARE[0])), last.unwrap_or(share(SHARE[1])));
        let is_high = |i: &usize| *i < first || *i >= count.saturating_sub(last);
        let pattern = |i: usize| (Arc::from(format!("{}.blocks.{i}.*", self.path)), Recipe::off());
        (0..count).filter(is_high).map(pattern).collect()
    }
}

#[cfg(test)]
mod tests {
    use crate::prelude::*;

    #[test]
    fn each_end_has_its_share_and_no_block_is_named_twice() {
        let named = |num_layers, first, last| {
            let layer = TransformerLayerOptions {
                hidden_size: 16,
                ffn_hidden_size: 16,
                attention: AttentionOptions { num_attention_heads: 1, ..Default::default() },
                ..Default::default()
            };
            let options = GptOptions { vocab_size: 16, num_layers, layer, ..Default::default() };
            let model = Gpt::new("m", &options, &Device::cpu(), &mut crate::rand::rng()).unwrap();
            let high = model.high_precision_blocks(first, last);
            high.into_iter().map(|(pattern, _)| pattern.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(named(1, None, None), ["m.blocks.0.*"]);
        assert_eq!(named(3, Some(0), Some(1)), ["m.blocks.2.*"]);
        assert_eq!(named(3, Some(5), Some(5)).len(), 3);
        assert!(named(3, Some(0), Some(0)).is_empty());
        // 62 blocks have the paper's 2 and, rounded up, one more than its 8.
        assert_eq!(named(62, None, None).len(), 2 + 9);
    }
}
