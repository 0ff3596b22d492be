//! Draws tokens from logits.

use crate::backend::dispatch;
use crate::{DropoutDraw, Error, Result, Shape, Tensor};

/// Options of [`sample`](sample()). The default draws from the softmax of all logits.
///
/// ```
/// use fp8_kernels::ops::SampleOptions;
/// let greedy = SampleOptions { temperature: 0.0, ..Default::default() };
/// assert_eq!((greedy.top_k, greedy.top_p), (None, 1.0));
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SampleOptions {
    /// The divisor of the logits. A value less than 1 prefers likely tokens. 0 takes the largest logit, and of equal ones the
    /// first. Default: 1.
    pub temperature: f32,
    /// Draws only from the `top_k` largest logits, and those that equal the last of them. At least 1. Default: `None`, all.
    pub top_k: Option<usize>,
    /// Draws only from the most likely tokens whose probabilities sum to at least `top_p`, and those that are as likely as the
    /// last of them. Greater than 0 and at most 1. Default: 1, all.
    pub top_p: f32,
}

impl Default for SampleOptions {
    fn default() -> Self {
        Self { temperature: 1.0, top_k: None, top_p: 1.0 }
    }
}

/// The numbers of [`SampleOptions`] as backends use them, unless the choice is greedy.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sampling {
    /// 1 / temperature.
    pub(crate) factor: f32,
    /// Fewer than the vocabulary.
    pub(crate) top_k: Option<u32>,
    /// In units of 2⁻⁶⁴, less than 1.
    pub(crate) top_p: Option<u64>,
}

/// Draws one token of each row of `logits` `[.., vocabulary]`, as `options` say. The result is i32 and has the shape of the
/// rows. It is −1 for a row whose logits are all NaN or −∞, from which no token can be drawn.
///
/// Every backend chooses the same tokens, since the weights are integers: with m the row's largest logit and f = 1 / T
/// rounded to f32, logit x has the weight `⌊exp((x − m)·f)·2³¹⌋`, by [`math::exp`](crate::math::exp); one that equals m has 2³¹.
/// NaN counts as −∞. `top_k` keeps the logits that are at least the k-th largest. Of those, with W the sum of their
/// weights, `top_p` keeps the fewest of the largest whose weights sum to at least `max(1, ⌊W·p⌋)`, and their equals. With W′
/// the sum of the weights that are kept, the token is the first whose weights up to it sum to more than `⌊r·W′ / 2⁶⁴⌋`.
/// r of row i is a random 64-bit number: lanes 0 (low) and 1 of Philox4x32-10 at counter `offset + i` under the key `seed`.
///
/// `draw` is a [`DropoutKey`](crate::ops::DropoutKey), or a [`DropoutDraw`] on the device, which a recorded step needs. With a
/// temperature of 0 it is not used.
///
/// # Errors
/// Logits that are not floats or have no vocabulary; an option out of range; a draw on another device; a key on the host in
/// a step that is being recorded.
///
/// ```
/// use fp8_kernels::ops::{self, DropoutKey, SampleOptions};
/// use fp8_kernels::{Device, Tensor};
/// let logits = Tensor::from_vec(vec![0.0f32, 5.0, 5.0, 1.0, 9.0, 0.0], [2, 3], &Device::cpu())?;
/// let key = DropoutKey { seed: 1, offset: 0 };
/// let greedy = SampleOptions { temperature: 0.0, ..Default::default() };
/// assert_eq!(ops::sample(&logits, &greedy, key)?.to_vec::<i32>()?, [1, 1]);
/// let two = SampleOptions { top_k: Some(2), ..Default::default() };
/// assert_ne!(ops::sample(&logits, &two, key)?.to_vec::<i32>()?[0], 0);
/// # Ok::<(), fp8_kernels::Error>(())
/// ```
pub fn sample(logits: &Tensor, options: &SampleOptions, draw: impl Into<DropoutDraw>) -> Result<Tensor> {
    let (op, draw) = ("sample", draw.into());
    logits.expect_float(op, "logits")?;
    let Some((&vocabulary, rows)) = logits.shape().split_last() else {
        let remedy = "logits are [.., vocabulary]; reshape a single row to [1, vocabulary]".to_owned();
        return Err(Error::Shape { op, shape: *logits.shape(), remedy });
    };
    if vocabulary == 0 || i32::try_from(vocabulary).is_err() {
        let remedy = format!("a vocabulary has 1 to {} tokens", i32::MAX);
        return Err(Error::Shape { op, shape: *logits.shape(), remedy });
    }
    let sampling = options.checked(vocabulary)?;
    if sampling.is_some() {
        draw.check(op, logits.device())?;
    }
    let shape = Shape::from_slice(rows).unwrap_or(*logits.shape());
    let sampling = sampling.as_ref().map(|sampling| (sampling, &draw));
    dispatch!(logits.device(), sample::sample(logits, shape, sampling))
}

impl SampleOptions {
    /// Checks the options, before work that would be lost otherwise.
    ///
    /// ```
    /// use fp8_kernels::ops::SampleOptions;
    /// let error = SampleOptions { top_p: 2.0, ..Default::default() }.check().unwrap_err();
    /// assert!(error.to_string().starts_with("sample: top_p = 2"));
    /// ```
    ///
    /// # Errors
    /// An option out of range.
    pub fn check(&self) -> Result<()> {
        let op = "sample";
        let Self { temperature, top_k, top_p } = *self;
        let refuse = |option, value: String, remedy: &str| {
            Err(Error::Option { op, option, value, remedy: remedy.to_owned() })
        };
        if !(temperature.is_finite() && temperature >= 0.0) {
            let remedy = "give a finite number: 0 for the most likely token, 1 for the model's distribution";
            return refuse("temperature", temperature.to_string(), remedy);
        }
        if top_k == Some(0) {
            return refuse("top_k", "0".to_owned(), "give at least 1, or None for all tokens");
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            let remedy = "give a probability greater than 0 and at most 1, which keeps all tokens";
            return refuse("top_p", top_p.to_string(), remedy);
        }
        Ok(())
    }

    /// `None` for a greedy choice.
    fn checked(&self, vocabulary: usize) -> Result<Option<Sampling>> {
        self.check()?;
        let Self { temperature, top_k, top_p } = *self;
        Ok((temperature > 0.0).then(|| Sampling {
            factor: 1.0 / temperature,
            top_k: top_k.filter(|&k| k < vocabulary).and_then(|k| u32::try_from(k).ok()),
            top_p: (top_p < 1.0).then(|| (f64::from(top_p) * 2f64.powi(64)) as u64),
        }))
    }
}
