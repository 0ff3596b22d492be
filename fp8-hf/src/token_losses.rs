//! Measures how well a model predicts a text: the loss of each token, their mean, and the perplexity.

use crate::Monitor;
use crate::Result;
use fp8_kernels::Tensor;
use fp8_kernels::ops::{self, CrossEntropyOptions};
use fp8_nn::{Gpt, SequenceInfo};
use fp8_recipe::Forward;

/// The losses of the tokens of a text, in nats. [`token_losses`] has an example.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TokenLosses {
    /// For each window the losses of its tokens, from the second one on: the first has nothing before it to predict it by.
    pub windows: Vec<Vec<f32>>,
}

impl TokenLosses {
    /// Returns the number of tokens that were predicted.
    #[must_use]
    pub fn count(&self) -> usize {
        self.windows.iter().map(Vec::len).sum()
    }

    /// Returns the mean loss of all tokens, in nats; NaN if there is none.
    #[must_use]
    pub fn mean(&self) -> f64 {
        self.windows.iter().flatten().map(|&loss| f64::from(loss)).sum::<f64>() / self.count() as f64
    }

    /// Returns the perplexity, `exp(mean loss)`.
    #[must_use]
    pub fn perplexity(&self) -> f64 {
        self.mean().exp()
    }
}

/// Computes the loss of each token of `windows`, which the model reads one by one, each from its first token on.
///
/// The loss of a token t is `ln Σⱼ exp xⱼ − xₜ` of the logits x at the token before it. Windows of fewer than two tokens have no
/// losses. Use it in a scope of [`Scaling::eval`](fp8_recipe::Scaling::eval); as in [`Gpt::logits`], memory holds what one block
/// computes. `monitor` counts tokens; stopped, it makes the function return the windows that are done.
///
/// ```
/// use fp8_hf::Monitor;
/// use fp8_nn::prelude::*;
/// use fp8_hf::{TokenLosses, token_losses};
/// # let device = Device::cpu();
/// # let options = GptOptions {
/// #     vocab_size: 16,
/// #     num_layers: 2,
/// #     layer: TransformerLayerOptions {
/// #         hidden_size: 32,
/// #         ffn_hidden_size: 128,
/// #         attention: AttentionOptions {
/// #             num_attention_heads: 4,
/// #             max_seq_length: 8,
/// #             ..Default::default()
/// #         },
/// #         init: InitOptions { init_std: 0.0, output_layer_init_std: 0.0 },
/// #         ..Default::default()
/// #     },
/// #     ..Default::default()
/// # };
/// # let model = Gpt::new("gpt", &options, &device, &mut fp8_nn::rand::rng())?;
/// let text: Vec<i32> = vec![1, 2, 3, 4, 5, 6, 7];
/// let windows: Vec<&[i32]> = text.chunks(4).collect();
/// let mut scaling = Scaling::new(&model, &device)?;
/// let mut cx = scaling.eval(&Recipe::off())?;
/// let losses: TokenLosses = token_losses(&model, &mut cx, &windows, &Monitor::default())?;
/// assert_eq!((losses.windows[0].len(), losses.windows[1].len()), (3, 2));
/// assert!((losses.perplexity() - 16.0).abs() < 1e-4); // all 16 tokens are equally likely: the model's weights are 0
/// # Ok::<(), fp8_hf::Error>(())
/// ```
///
/// # Errors
/// As [`Gpt::logits`].
pub fn token_losses<W: AsRef<[i32]>>(
    model: &Gpt,
    cx: &mut Forward<'_>,
    windows: &[W],
    monitor: &Monitor,
) -> Result<TokenLosses> {
    monitor.start(windows.iter().map(|window| window.as_ref().len() as u64).sum());
    let mut losses = TokenLosses::default();
    for window in windows.iter().map(AsRef::as_ref) {
        if monitor.is_stopped() {
            break;
        }
        losses.windows.push(of_window(model, cx, window)?);
        monitor.add(window.len() as u64);
    }
    Ok(losses)
}

fn of_window(model: &Gpt, cx: &mut Forward<'_>, window: &[i32]) -> Result<Vec<f32>> {
    let Some((_, targets)) = window.split_first().filter(|(_, targets)| !targets.is_empty()) else {
        return Ok(Vec::new());
    };
    let device = model.embedding().weight().device();
    let rows = targets.len();
    let ids = Tensor::from_vec(window[..rows].to_vec(), [1, rows], device)?;
    let logits = model.logits(cx, &ids, &SequenceInfo::default())?;
    let on_device = Tensor::from_vec(targets.to_vec(), [1, rows], device)?;
    let (_, saved) = ops::cross_entropy(&logits, &on_device, &CrossEntropyOptions::default())?;
    let (max, sum) = (saved.row_max.to_vec::<f32>()?, saved.row_sum.to_vec::<f32>()?);
    let vocabulary = logits.shape().last_dim();
    let logits = ops::cast(&logits, fp8_kernels::DType::F32)?.to_vec::<f32>()?;
    let rows = logits.chunks(vocabulary).zip(targets).zip(max.iter().zip(&sum));
    // cross_entropy has checked that each target is in the vocabulary.
    let loss = |((logits, &target), (&max, &sum)): ((&[f32], &i32), (&f32, &f32))| {
        let logit = usize::try_from(target).ok().and_then(|target| logits.get(target));
        (f64::from(sum).ln() + f64::from(max) - f64::from(logit.copied().unwrap_or(f32::NAN))) as f32
    };
    Ok(rows.map(loss).collect())
}
