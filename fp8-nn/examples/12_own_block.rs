//! Blocks of your own in a model: gated bottleneck adapters around frozen, pretrained blocks, of which only the adapters are
//! trained.
//!
//! `cargo run --release -p fp8-nn --example 12_own_block`
#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use fp8_nn::prelude::*;
use fp8_nn::rand::{SeedableRng, rngs::StdRng};
use fp8_nn::{LinearSaved, TransformerLayerSaved};

const TEXT: &[u8] = include_bytes!("../data/shakespeare.txt");
const SEQ: usize = 32;

/// `y = b + b ⊙ u` with `b = base(x)` and `u = up(relu(down(b)))`. With `up` = 0 it is the block itself.
#[derive(Debug)]
struct Adapted {
    base: TransformerLayer,
    down: Linear,
    up: Linear,
}
composite!(Adapted { base, down, up });

struct AdaptedSaved {
    base: TransformerLayerSaved,
    down: LinearSaved,
    up: LinearSaved,
    tensors: [Tensor; 3], // b, down(b), u
}

impl Adapted {
    /// Freezes `base`. Parameters of the adapter are below `<path>.adapter`; those of the block keep their names.
    fn new(path: &str, mut base: TransformerLayer, rng: &mut StdRng) -> Result<Self> {
        parameters_mut(&mut base).into_iter().try_for_each(|parameter| parameter.set_trainable(false))?;
        let hidden = base.mlp().fc2().weight().shape()[0];
        let device = base.mlp().fc2().weight().device().clone();
        let down = LinearOptions { in_features: hidden, out_features: hidden / 4, ..Default::default() };
        let up = LinearOptions {
            in_features: hidden / 4,
            out_features: hidden,
            init_std: 0.0,
            ..Default::default()
        };
        Ok(Self {
            base,
            down: Linear::new(&format!("{path}.adapter.down"), down, &device, rng)?,
            up: Linear::new(&format!("{path}.adapter.up"), up, &device, rng)?,
        })
    }

    /// Computes the adapter on the output of the block. ReLU is fused into the quantization for `up`.
    fn adapt(
        &self,
        cx: &mut Forward<'_>,
        b: Tensor,
    ) -> Result<(Tensor, LinearSaved, LinearSaved, [Tensor; 3])> {
        let (h, down) = self.down.forward(cx, &b)?;
        let relu = |slot: &Slot<'_>| Ok(ops::activation(&h, Activation::Relu, slot)?);
        let (u, up) = self.up.forward_fused(cx, h.dtype(), relu)?;
        Ok((ops::add(&b, &ops::mul(&b, &u)?)?, down, up, [b, h, u]))
    }
}

impl Module for Adapted {
    type Saved = AdaptedSaved;

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, AdaptedSaved)> {
        self.forward_with(cx, x, &SequenceInfo::default())
    }

    fn forward_with(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        info: &SequenceInfo,
    ) -> Result<(Tensor, AdaptedSaved)> {
        let (b, base) = self.base.forward_with(cx, x, info)?;
        let (y, down, up, tensors) = self.adapt(cx, b)?;
        Ok((y, AdaptedSaved { base, down, up, tensors }))
    }

    fn backward(&mut self, cx: &mut Backward<'_>, saved: AdaptedSaved, dy: &Tensor) -> Result<Tensor> {
        let [b, h, u] = saved.tensors;
        let da = self.up.backward(cx, saved.up, &ops::mul(dy, &b)?)?;
        let of_adapter = self.down.backward_fused(cx, saved.down, |slot| {
            let (dh, db) = ops::activation_backward_quantize_dbias(&da, &h, Activation::Relu, slot)?;
            Ok((dh, Some(db)))
        })?;
        let db = ops::add(&ops::add(dy, &ops::mul(dy, &u)?)?, &of_adapter)?;
        self.base.backward(cx, saved.base, &db)
    }
}

impl Block for Adapted {
    fn evaluate(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        info: &SequenceInfo,
        cache: Option<CachedLayer<'_>>,
    ) -> Result<Tensor> {
        let b = self.base.evaluate(cx, x, info, cache)?;
        Ok(self.adapt(cx, b)?.0)
    }

    fn kv_heads(&self) -> [usize; 2] {
        self.base.kv_heads()
    }
}

/// Trains on windows of the text, whose letters `f` changes, and returns the first and the last loss.
fn train(model: &mut Gpt, f: fn(u8) -> u8, steps: usize) -> Result<[f32; 2]> {
    let (device, recipe) = (Device::cpu(), Recipe::from(DelayedScaling::default()));
    let all = |shift: usize| {
        let windows = TEXT[shift..].chunks_exact(SEQ).take(512).flatten();
        Tensor::from_vec(windows.map(|&byte| i32::from(f(byte))).collect(), [512, SEQ], &device)
    };
    let (ids, targets) = (all(0)?, all(1)?);
    let (mut scaling, mut optimizer) = (Scaling::new(model, &device)?, AdamW::new(AdamWOptions::default())?);
    let mut losses = Vec::new();
    for start in (0..512).step_by(8).cycle().take(steps) {
        let (ids, targets) = (ops::rows(&ids, start..start + 8)?, ops::rows(&targets, start..start + 8)?);
        let (loss, saved) = scaling.autocast_with(&recipe, |cx| model.loss(cx, &ids, &targets))?;
        scaling.backward_with(|cx| model.loss_backward(cx, saved))?;
        optimizer.step(model, 3e-3)?;
        zero_grad(model)?;
        losses.push(loss.item()?);
    }
    Ok([losses[0], losses[steps - 1]])
}

fn main() -> Result<()> {
    let (device, mut rng) = (Device::cpu(), StdRng::seed_from_u64(0));
    let options = GptOptions {
        vocab_size: 256,
        num_layers: 2,
        hidden_size: 64,
        num_attention_heads: 4,
        max_seq_length: SEQ,
        ..Default::default()
    };
    let mut model = Gpt::new("gpt", &options, &device, &mut rng)?;
    println!("pretraining: loss {:.3?}", train(&mut model, |byte| byte, 64)?);

    let adapt = |index, base| {
        let block = Adapted::new(&format!("gpt.blocks.{index}"), base, &mut rng)?;
        Ok(Box::new(block) as Box<dyn DynBlock>)
    };
    let mut model = model.with_blocks(adapt)?;
    for parameter in parameters_mut(&mut model) {
        let is_adapter = parameter.name().contains(".adapter.");
        parameter.set_trainable(is_adapter)?;
    }
    let frozen =
        |model: &Gpt| model.block::<Adapted>(0).map(|block| block.base.mlp().fc2().weight().version());
    let (before, all) = (frozen(&model), parameters(&model));
    let trained: usize = all.iter().filter(|p| p.is_trainable()).map(|p| p.shape().numel()).sum();
    println!("adapters: {trained} of {} parameters are trained", num_parameters(&model));
    let [first, last] = train(&mut model, |byte| byte.to_ascii_uppercase(), 64)?;
    println!("the same text in capitals: loss {first:.3} before, {last:.3} after");
    assert!(last < first - 0.2, "the adapters learned nothing");
    assert_eq!(frozen(&model), before, "a frozen weight has changed");
    Ok(())
}
