//! Text from a language model, token by token.

use crate::{Error, Gpt, KvCache, Result, init};
use fp8_kernels::Tensor;
use fp8_kernels::ops::{self, DropoutKey, SampleOptions};
use fp8_recipe::Forward;

/// Options of [`Gpt::generate`]: by default, the most likely token is taken each time.
///
/// See [`Gpt::generate`] for an example.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateOptions {
    /// The most tokens that are added to each prompt. Default: 128.
    pub max_new_tokens: usize,
    /// The temperature: logits are divided by it before a token is drawn. 0 takes the most likely token. Default: 0.
    pub temperature: f32,
    /// Draws only from the `top_k` most likely tokens. Default: `None`, all.
    pub top_k: Option<usize>,
    /// Draws only from the most likely tokens whose probabilities sum to at least `top_p`. Default: 1, all.
    pub top_p: f32,
    /// The seed of the random numbers. Each row of the batch draws its own. Default: 0.
    pub seed: u64,
    /// The tokens that end a text. Default: empty.
    pub stop_tokens: Vec<i32>,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self {
            max_new_tokens: 128,
            temperature: 0.0,
            top_k: None,
            top_p: 1.0,
            seed: 0,
            stop_tokens: Vec::new(),
        }
    }
}

impl GenerateOptions {
    fn sampling(&self) -> SampleOptions {
        let Self { temperature, top_k, top_p, .. } = *self;
        SampleOptions { temperature, top_k, top_p }
    }
}

/// A generation that is under way: [`next`](Self::next) adds a token to each text.
///
/// ```
/// use fp8_nn::prelude::*;
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
/// #         ..Default::default()
/// #     },
/// #     ..Default::default()
/// # };
/// # let model = Gpt::new("gpt", &options, &device, &mut fp8_nn::rand::rng())?;
/// let mut scaling = Scaling::new(&model, &device)?;
/// let mut cx = scaling.eval(&DelayedScaling::default().into())?;
/// let options = GenerateOptions { max_new_tokens: 3, ..Default::default() };
/// let mut generation = Generation::new(&model, &cx, &[vec![1, 2, 3]], &options)?;
/// let mut count = 0;
/// while let Some(tokens) = generation.next(&mut cx)? {
///     assert!(tokens[0].is_some()); // the only text has not ended
///     count += 1;
/// }
/// assert_eq!(count, 3);
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct Generation<'m> {
    model: &'m Gpt,
    options: GenerateOptions,
    cache: KvCache,
    /// The ids that the model reads next, i32 `[batch, seq]`.
    ids: Tensor,
    /// The number of real ids in each row: 0 in a row that has ended.
    counts: Vec<usize>,
    /// The number of tokens that were added.
    steps: usize,
}

impl<'m> Generation<'m> {
    /// Prepares texts that begin with `prompts`, which may have different lengths. The cache has the dtype that `cx` computes in.
    ///
    /// # Errors
    /// No prompt, or an empty one; a token outside the vocabulary; `max_new_tokens` of 0; an option of [`ops::sample`] out of range;
    /// a longest prompt that leaves less room than `max_new_tokens` below `max_seq_length`; the device is out of memory.
    pub fn new<P: AsRef<[i32]>>(
        model: &'m Gpt,
        cx: &Forward<'_>,
        prompts: &[P],
        options: &GenerateOptions,
    ) -> Result<Self> {
        let prompts: Vec<&[i32]> = prompts.iter().map(AsRef::as_ref).collect();
        let path = model.path();
        let refuse = |option, value: String, remedy: String| {
            Err(Error::Option { part: path.to_owned(), option, value, remedy })
        };
        let counts: Vec<usize> = prompts.iter().map(|prompt| prompt.len()).collect();
        let (batch, longest) = (counts.len(), counts.iter().copied().max().unwrap_or_default());
        init::check_positive(path, &[("prompts", batch), ("max_new_tokens", options.max_new_tokens)])?;
        if let Some(row) = counts.iter().position(|&count| count == 0) {
            let remedy = "expected at least one token, such as the one that begins a text".to_owned();
            return refuse("prompts", format!("an empty one at {row}"), remedy);
        }
        options.sampling().check()?;
        let table = model.embedding().weight();
        let vocabulary = table.shape().matrix()[0];
        let is_known = |&token: &i32| usize::try_from(token).is_ok_and(|token| token < vocabulary);
        if let Some(token) = prompts.iter().flat_map(|prompt| prompt.iter()).find(|token| !is_known(token)) {
            let remedy = format!("expected 0 to {}, the tokens of the vocabulary", vocabulary - 1);
            return refuse("prompt token", token.to_string(), remedy);
        }
        // The last token is not read.
        let capacity = longest.saturating_add(options.max_new_tokens - 1);
        if capacity > model.max_seq_length() {
            let most = model.max_seq_length();
            let remedy = match (most + 1).saturating_sub(longest) {
                0 => format!("the longest prompt has {longest} tokens, the model reads at most {most}"),
                room => format!(
                    "the longest prompt has {longest} tokens and the model reads at most {most}: give at most {room}"
                ),
            };
            return refuse("max_new_tokens", options.max_new_tokens.to_string(), remedy);
        }
        let dtype = cx.compute_dtype().unwrap_or(table.dtype());
        let padded = prompts
            .iter()
            .flat_map(|prompt| prompt.iter().copied().chain(std::iter::repeat(0)).take(longest));
        let ids = Tensor::from_vec::<i32>(padded.collect(), [batch, longest], table.device())?;
        let cache = model.kv_cache(batch, capacity, dtype)?;
        Ok(Self { model, options: options.clone(), cache, ids, counts, steps: 0 })
    }

    /// Adds a token to each text and returns the tokens: `None` for a text that ended before. Returns `None` once all texts have
    /// ended. A text ends with one of the `stop_tokens`, which is returned, or with `max_new_tokens`.
    ///
    /// # Errors
    /// The errors of [`Gpt::extend`] and [`ops::sample`]; logits of a text that are all NaN or −∞. The generation is as before then.
    pub fn next(&mut self, cx: &mut Forward<'_>) -> Result<Option<Vec<Option<i32>>>> {
        if self.steps == self.options.max_new_tokens || self.counts.iter().all(|&count| count == 0) {
            return Ok(None);
        }
        let before = self.cache.lengths().to_vec();
        let drawn = self.draw(cx);
        if drawn.is_err() {
            // The next call reads the same tokens again.
            before.into_iter().enumerate().for_each(|(row, length)| self.cache.truncate(row, length));
        }
        let (ids, values) = drawn?;
        self.steps += 1;
        let is_live: Vec<bool> = self.counts.iter().map(|&count| count > 0).collect();
        self.ids = if is_live.contains(&false) {
            // What was drawn from the logits of a text that has ended may be no token.
            let next = values.iter().zip(&is_live).map(|(&token, &is_live)| if is_live { token } else { 0 });
            Tensor::from_vec::<i32>(next.collect(), *ids.shape(), ids.device())?
        } else {
            ids
        };
        let mut added = Vec::with_capacity(values.len());
        for ((count, token), is_live) in self.counts.iter_mut().zip(values).zip(is_live) {
            added.push(is_live.then_some(token));
            *count = usize::from(is_live && !self.options.stop_tokens.contains(&token));
        }
        Ok(Some(added))
    }

    /// Reads the new tokens and draws the next ones: as the model reads them, `[batch, 1]`, and as numbers.
    fn draw(&mut self, cx: &mut Forward<'_>) -> Result<(Tensor, Vec<i32>)> {
        let logits = self.model.extend(cx, &self.ids, &self.counts, &mut self.cache)?;
        let key = DropoutKey { seed: self.options.seed, offset: (self.steps as u64) << 32 };
        let tokens = ops::sample(&logits, &self.options.sampling(), key)?;
        let values = tokens.to_vec::<i32>()?;
        let is_lost = |(&token, &count): (&i32, &usize)| token < 0 && count > 0;
        if let Some(row) = values.iter().zip(&self.counts).position(is_lost) {
            return Err(Error::Option {
                part: self.model.path().to_owned(),
                option: "logits",
                value: format!("NaN or -inf for every token of text {row}"),
                remedy: "a weight of the model is not finite, or a value overflowed: compute in bf16 or f32, and check the weights"
                    .to_owned(),
            });
        }
        Ok((tokens.reshape([values.len(), 1])?, values))
    }
}

impl Gpt {
    /// Continues `prompts`, which may have different lengths, and returns the new tokens of each.
    ///
    /// `each(row, token)` is called with every token as soon as it is known, row by row. A text ends with one of the
    /// `stop_tokens`, which is part of the result, or after `max_new_tokens`. A text that has ended no longer changes; others go on.
    /// Use it in a scope of [`Scaling::eval`](crate::fp8_recipe::Scaling::eval); [`Generation`] does the same step by step.
    ///
    /// ```
    /// use fp8_nn::prelude::*;
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
    /// #         ..Default::default()
    /// #     },
    /// #     ..Default::default()
    /// # };
    /// # let model = Gpt::new("gpt", &options, &device, &mut fp8_nn::rand::rng())?;
    /// let mut scaling = Scaling::new(&model, &device)?;
    /// let mut cx = scaling.eval(&DelayedScaling::default().into())?;
    /// let options = GenerateOptions { max_new_tokens: 4, temperature: 0.8, top_p: 0.9, seed: 1, ..Default::default() };
    /// let mut streamed = Vec::new();
    /// let texts = model.generate(&mut cx, &[vec![1, 2, 3], vec![4]], &options, |row, token| {
    ///     if row == 0 {
    ///         streamed.push(token);
    ///     }
    /// })?;
    /// assert_eq!((texts[0].len(), texts[1].len(), &texts[0]), (4, 4, &streamed));
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    ///
    /// # Errors
    /// The errors of [`Generation::new`] and [`Generation::next`].
    pub fn generate<P: AsRef<[i32]>>(
        &self,
        cx: &mut Forward<'_>,
        prompts: &[P],
        options: &GenerateOptions,
        mut each: impl FnMut(usize, i32),
    ) -> Result<Vec<Vec<i32>>> {
        let mut generation = Generation::new(self, cx, prompts, options)?;
        let mut texts = vec![Vec::new(); prompts.len()];
        while let Some(tokens) = generation.next(cx)? {
            for (row, (text, token)) in texts.iter_mut().zip(tokens).enumerate() {
                if let Some(token) = token {
                    text.push(token);
                    each(row, token);
                }
            }
        }
        Ok(texts)
    }
}
