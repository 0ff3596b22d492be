//! Blocks of your own in a model: gated bottleneck adapters around frozen blocks, of which only the adapters are trained.
//!
//! `cargo run --release -p fp8-nn --example 12_own_block`
#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use fp8_nn::prelude::*;
use fp8_nn::rand::{SeedableRng, rngs::StdRng};
use fp8_nn::{LinearSaved, TransformerLayerSaved};

const TEXT: &[u8] = include_bytes!("../../fp8-cli/data/shakespeare.txt");
const SEQ: usize = 32;

/// `y = b + b ⊙ u` with `b = base(x)` and `u = up(relu(down(b)))`. With `up` = 0 it is the block itself.
#[derive(Debug)]
struct Adapted {
    base: TransformerLayer,
    down: Linear,
    up: Linear,
}
composite!(Adapted { base, down, up });

/// The values that the adapter's backward needs: those of `down` and `up`, and the tensors b, down(b) and u.
type AdapterSaved = (LinearSaved, LinearSaved, [Tensor; 3]);

impl Adapted {
    /// The adapter's parameters are below `<path>.adapter`; the block's keep their names.
    fn new(path: &str, base: TransformerLayer, rng: &mut StdRng) -> Result<Self> {
        let weight = base.mlp().fc2().weight();
        let (hidden, device) = (weight.shape()[0], weight.device().clone());
        let mut linear = |name, in_features, out_features, init_std| {
            let options = LinearOptions { in_features, out_features, init_std, ..Default::default() };
            Linear::new(&format!("{path}.adapter.{name}"), options, &device, rng)
        };
        let (down, up) = (linear("down", hidden, hidden / 4, 0.02)?, linear("up", hidden / 4, hidden, 0.0)?);
        Ok(Self { base, down, up })
    }

    /// Computes y from b. ReLU is fused into the quantization for `up`.
    fn adapt(&self, cx: &mut Forward<'_>, b: Tensor) -> Result<(Tensor, AdapterSaved)> {
        let (h, down) = self.down.forward(cx, &b)?;
        let relu = |slot: &Slot<'_>| Ok(ops::activation(&h, Activation::Relu, slot)?);
        let (u, up) = self.up.forward_fused(cx, h.dtype(), relu)?;
        Ok((ops::add(&b, &ops::mul(&b, &u)?)?, (down, up, [b, h, u])))
    }
}

impl Module for Adapted {
    type Saved = (TransformerLayerSaved, AdapterSaved);

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, Self::Saved)> {
        self.forward_with_info(cx, x, &SequenceInfo::default())
    }

    fn forward_with_info(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        i: &SequenceInfo,
    ) -> Result<(Tensor, Self::Saved)> {
        let (b, base) = self.base.forward_with_info(cx, x, i)?;
        let (y, adapter) = self.adapt(cx, b)?;
        Ok((y, (base, adapter)))
    }

    fn backward(&mut self, cx: &mut Backward<'_>, saved: Self::Saved, dy: &Tensor) -> Result<Tensor> {
        let (base, (down, up, [b, h, u])) = saved;
        let da = self.up.backward(cx, up, &ops::mul(dy, &b)?)?;
        let of_adapter =
            self.down.backward(cx, down, &ops::activation_backward(&da, &h, Activation::Relu)?)?;
        let db = ops::add(&ops::add(dy, &ops::mul(dy, &u)?)?, &of_adapter)?;
        self.base.backward(cx, base, &db)
    }
}

/// For evaluation and generation.
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

/// Trains on the text, whose letters `f` changes, and returns the first and the last loss.
fn train(model: &mut Gpt, f: fn(u8) -> u8) -> Result<[f32; 2]> {
    let (device, recipe) = (Device::cpu(), Recipe::from(DelayedScaling::default()));
    let windows = |shift: usize| {
        let bytes = TEXT[shift..].iter().take(512 * SEQ);
        Tensor::from_vec(bytes.map(|&byte| i32::from(f(byte))).collect(), [512, SEQ], &device)
    };
    let (ids, targets) = (windows(0)?, windows(1)?);
    let (mut scaling, mut optimizer) = (Scaling::new(model, &device)?, AdamW::new(AdamWOptions::default())?);
    let mut losses = Vec::new();
    for i in (0..512).step_by(8) {
        let (ids, targets) = (ops::rows(&ids, i..i + 8)?, ops::rows(&targets, i..i + 8)?);
        let (loss, saved) = scaling.in_autocast(&recipe, |cx| model.loss(cx, &ids, &targets))?;
        scaling.in_backward(|cx| model.loss_backward(cx, saved))?;
        optimizer.step(model, 3e-3)?;
        zero_grad(model)?;
        losses.push(loss.item()?);
    }
    Ok([losses[0], losses[losses.len() - 1]])
}

fn main() -> Result<()> {
    let (device, mut rng) = (Device::cpu(), StdRng::seed_from_u64(0));
    let options = GptOptions {
        vocab_size: 256,
        num_layers: 2,
        layer: TransformerLayerOptions {
            hidden_size: 64,
            ffn_hidden_size: 256,
            attention: AttentionOptions { num_attention_heads: 4, max_seq_length: SEQ, ..Default::default() },
            ..Default::default()
        },
        ..Default::default()
    };
    let mut model = Gpt::new("gpt", &options, &device, &mut rng)?;
    println!("pretraining: loss {:.3?}", train(&mut model, |byte| byte)?);
    let mut model = model
        .with_blocks(|i, base| Ok(Box::new(Adapted::new(&format!("gpt.blocks.{i}"), base, &mut rng)?)))?;
    let (mut trained, before) = (0, model.embedding().weight().version());
    for parameter in parameters_mut(&mut model) {
        let is_adapter = parameter.name().contains(".adapter.");
        parameter.set_trainable(is_adapter)?;
        trained += parameter.main_grad().numel();
    }
    println!("adapters: {trained} of {} parameters are trained", num_parameters(&model));
    let [first, last] = train(&mut model, |byte| byte.to_ascii_uppercase())?;
    println!("the same text in capitals: loss {first:.3} before, {last:.3} after");
    assert!(last < first - 0.5, "the adapters learned nothing");
    assert_eq!(before, model.embedding().weight().version(), "a frozen weight has changed");
    Ok(())
}
