//! Training by this library: whole steps, as `fp8 train` does them.

use std::io::{Write as _, stdin, stdout};
use std::time::Instant;

use fp8_nn::prelude::*;

use crate::contender::Contender;
use crate::result::Result;
use crate::size::Size;
use crate::start::{self, Batch};

const MAX_GRAD_NORM: f32 = 1.0;

/// A model in training.
pub(crate) struct Session {
    shape: [usize; 2],
    model: Gpt,
    optimizer: AdamW,
    scaling: Scaling,
    recipe: Recipe,
    autocast: AutocastOptions,
    batches: Vec<Batch>,
    rates: Vec<f32>,
    steps: usize,
}

impl Session {
    pub(crate) fn new(contender: Contender, size: &Size) -> Result<Self> {
        let (enabled, compute_dtype) = match contender {
            Contender::F32 => (false, None),
            Contender::Bf16 => (false, Some(DType::BF16)),
            Contender::Fp8 => (true, None),
            Contender::Fp8Bf16 => (true, Some(DType::BF16)),
            other => return Err(format!("{other} is not of this library").into()),
        };
        let model = start::model(size)?;
        Ok(Self {
            shape: [size.batch, size.seq],
            optimizer: AdamW::new(AdamWOptions::default())?,
            scaling: Scaling::new(&model, &Device::cpu())?,
            recipe: DelayedScaling::default().into(),
            autocast: AutocastOptions { enabled, compute_dtype, ..Default::default() },
            batches: start::batches(size)?,
            rates: start::rates()?,
            steps: 0,
            model,
        })
    }

    /// Does one step and returns the loss before it.
    pub(crate) fn step(&mut self) -> fp8_nn::Result<f32> {
        let batch = &self.batches[self.steps % self.batches.len()];
        let lr = self.rates[self.steps.min(self.rates.len() - 1)];
        self.steps += 1;
        let ids = Tensor::from_vec(batch.ids.clone(), self.shape, &Device::cpu())?;
        let targets = Tensor::from_vec(batch.targets.clone(), self.shape, &Device::cpu())?;
        let mut cx = self.scaling.scope(&self.recipe, &self.autocast)?;
        let (loss, saved) = self.model.loss(&mut cx, &ids, &targets)?;
        cx.commit()?;
        let mut cx = self.scaling.backward()?;
        self.model.loss_backward(&mut cx, saved)?;
        cx.commit()?;
        let norm = clip_grad_norm(&mut self.model, MAX_GRAD_NORM)?;
        self.optimizer.step_with_norm(&mut self.model, lr, &norm)?;
        zero_grad(&mut self.model)?;
        Ok(loss.item()?)
    }
}

/// Answers each line, a number of steps, with the seconds and the loss of each step.
pub(crate) fn serve(contender: Contender, size: &Size) -> Result {
    let mut session = Session::new(contender, size)?;
    println!("ready fp8-nn {}", env!("CARGO_PKG_VERSION"));
    for line in stdin().lines() {
        let mut answer = String::new();
        for _ in 0..line?.trim().parse::<usize>()? {
            let start = Instant::now();
            let loss = session.step()?;
            answer += &format!("{:e} {:e} ", start.elapsed().as_secs_f64(), f64::from(loss));
        }
        println!("{answer}");
        stdout().flush()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_precision_of_this_library_trains() {
        let size = "1/32/2/8/2".parse().unwrap();
        let mut first = Vec::new();
        for contender in [Contender::F32, Contender::Bf16, Contender::Fp8, Contender::Fp8Bf16] {
            let mut session = Session::new(contender, &size).unwrap();
            let losses: Vec<f32> = (0..40).map(|_| session.step().unwrap()).collect();
            assert!(losses.iter().all(|loss| (3.0..6.0).contains(loss)), "{contender}: {losses:?}");
            assert!(losses[39] < losses[0] - 0.02, "{contender}: {losses:?}");
            first.push(losses[0]);
        }
        first.sort_by(f32::total_cmp);
        first.dedup();
        assert_eq!(first.len(), 4, "precisions differ: {first:?}");
        assert!(Session::new(Contender::Numpy, &size).is_err());
    }
}
