//! Tokens that are cut over ranks: sequence parallelism.

use super::TensorParallel;
use crate::{Error, Layer, Result, parameters_mut};
use fp8_kernels::{Tensor, ops};

impl TensorParallel {
    /// Returns this rank's tokens of `x`, `[.., hidden]` with the same values on all ranks: `[tokens / ranks, hidden]`, rank r those from
    /// `r · tokens / ranks` on, where the tokens of all sequences follow each other.
    ///
    /// This is for models of your own with sequence parallelism; [`Gpt`](crate::Gpt) cuts and joins itself. `what` names the tensor in
    /// errors. Backward is [`scatter_tokens_backward`](Self::scatter_tokens_backward). Of layers that such a model applies to this rank's
    /// tokens, each rank has a part of the gradients: [`place_by_tokens`](Self::place_by_tokens).
    ///
    /// ```
    /// use fp8_nn::prelude::*;
    /// use fp8_nn::{TensorParallel, TensorParallelOptions};
    /// use std::{thread, time::Duration};
    ///
    /// let run = |group| -> Result<()> {
    ///     let options = TensorParallelOptions { sequence_parallel: true, ..Default::default() };
    ///     let Some(ranks) = TensorParallel::new(group, &options)? else { return Ok(()) };
    ///     let x = Tensor::from_vec((0..16).map(|i| i as f32).collect(), [1, 4, 4], &Device::cpu())?;
    ///     let mine = ranks.scatter_tokens("x", &x)?; // two of the four tokens
    ///     assert_eq!(mine.to_f32_vec()?[0], 8.0 * ranks.group().rank() as f32);
    ///     let whole = ranks.gather_tokens("y", &mine)?;
    ///     assert_eq!((&**whole.shape(), whole.to_f32_vec()?), (&[4, 4][..], x.to_f32_vec()?));
    ///     // Each rank's gradient of the whole is 1, and there are two of them.
    ///     let dx = ranks.gather_tokens_backward("dy", &Tensor::full(1.0, [4, 4], DType::F32, &Device::cpu())?)?;
    ///     assert_eq!(dx.to_f32_vec()?, [2.0; 8]);
    ///     assert_eq!(ranks.scatter_tokens_backward("dx", &dx)?.to_f32_vec()?, [2.0; 16]);
    ///     Ok(())
    /// };
    /// thread::scope(|scope| {
    ///     let groups = local("tp", 2, Duration::from_secs(10))?.into_iter();
    ///     let ranks: Vec<_> = groups.map(|group| scope.spawn(move || run(group))).collect();
    ///     ranks.into_iter().try_for_each(|rank| rank.join().unwrap())
    /// })?;
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    ///
    /// # Errors
    /// Tokens that the ranks cannot share evenly; a part whose elements are no multiple of 4, in which masks of dropout are drawn.
    pub fn scatter_tokens(&self, what: &str, x: &Tensor) -> Result<Tensor> {
        let [tokens, hidden] = x.shape().matrix();
        let share = self.tokens_of_rank(what, tokens, hidden)?;
        let first = self.rank() * share;
        Ok(ops::rows(&x.reshape([tokens, hidden])?, first..first + share)?)
    }

    /// Returns the gradient of [`scatter_tokens`](Self::scatter_tokens)' `x`, `[tokens, hidden]` on all ranks, from that of this rank's
    /// tokens. It is gathered in high precision.
    ///
    /// # Errors
    /// A failure of the group.
    pub fn scatter_tokens_backward(&self, what: &str, dy: &Tensor) -> Result<Tensor> {
        self.gather(what, dy)
    }

    /// Returns the tokens of all ranks, `[tokens, hidden]`, from this rank's, `[tokens / ranks, hidden]`, in high precision. See
    /// [`scatter_tokens`](Self::scatter_tokens) for an example.
    ///
    /// # Errors
    /// A failure of the group.
    pub fn gather_tokens(&self, what: &str, x: &Tensor) -> Result<Tensor> {
        self.gather(what, x)
    }

    /// Returns the gradient of [`gather_tokens`](Self::gather_tokens)' `x`: this rank's tokens of the sum of all ranks' `dy`, each the
    /// gradient of what that rank has computed from the whole. Where all ranks compute the same from it, so that each `dy` is the whole
    /// gradient, take [`scatter_tokens`](Self::scatter_tokens) of it instead.
    ///
    /// # Errors
    /// As [`scatter_tokens`](Self::scatter_tokens); a failure of the group.
    pub fn gather_tokens_backward(&self, what: &str, dy: &Tensor) -> Result<Tensor> {
        let [tokens, hidden] = dy.shape().matrix();
        self.tokens_of_rank(what, tokens, hidden)?;
        self.reduce_scatter(what, dy)
    }

    /// Says that each rank applies `layer`, which has no tensor parallelism of its own, to the tokens that the rank has. With sequence
    /// parallelism, each rank then has a part of the gradients, which [`all_reduce_gradients`](crate::all_reduce_gradients) completes.
    /// Parameters of layers with tensor parallelism stay as they are.
    ///
    /// [`Gpt::with_blocks`](crate::Gpt::with_blocks) needs it for layers in blocks of your own.
    ///
    /// ```
    /// use fp8_nn::prelude::*;
    /// use fp8_nn::{Placement, TensorParallel, TensorParallelOptions};
    /// use std::{thread, time::Duration};
    ///
    /// let run = |group| -> Result<()> {
    ///     let options = TensorParallelOptions { sequence_parallel: true, ..Default::default() };
    ///     let Some(ranks) = TensorParallel::new(group, &options)? else { return Ok(()) };
    ///     let options = LinearOptions { in_features: 4, out_features: 4, ..Default::default() };
    ///     let mut fc = Linear::new("fc", options, &Device::cpu(), &mut fp8_nn::rand::rng())?;
    ///     ranks.place_by_tokens(&mut fc);
    ///     assert_eq!(fc.weight().placement(), &Placement::Partial);
    ///     Ok(())
    /// };
    /// thread::scope(|scope| {
    ///     let groups = local("tp", 2, Duration::from_secs(10))?.into_iter();
    ///     let ranks: Vec<_> = groups.map(|group| scope.spawn(move || run(group))).collect();
    ///     ranks.into_iter().try_for_each(|rank| rank.join().unwrap())
    /// })?;
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    pub fn place_by_tokens(&self, layer: &mut (impl Layer + ?Sized)) {
        for parameter in parameters_mut(layer) {
            parameter.place_if_unplaced(self.placement_by_tokens(), self);
        }
    }

    /// Returns the number of tokens that each rank has of `tokens` of `hidden` features.
    pub(crate) fn tokens_of_rank(&self, what: &str, tokens: usize, hidden: usize) -> Result<usize> {
        let ranks = self.size();
        let share = tokens / ranks;
        let refuse = |remedy: String| {
            let value = format!("{tokens} of {hidden} features");
            Err(Error::Option { part: what.to_owned(), option: "tokens", value, remedy })
        };
        if !tokens.is_multiple_of(ranks) || tokens == 0 {
            let next = (share + 1) * ranks;
            return refuse(format!(
                "{ranks} ranks share the tokens of all sequences (sequence parallelism): expected a multiple of {ranks}, such as {next}"
            ));
        }
        if !(share * hidden).is_multiple_of(4) {
            return refuse(format!(
                "a rank's {share} tokens have {} elements: expected a multiple of 4, in which masks of dropout are drawn",
                share * hidden
            ));
        }
        Ok(share)
    }
}
