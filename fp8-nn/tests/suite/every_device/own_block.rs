//! Blocks of the user's own in a Gpt, and the parts of a model.

use super::support::{
    bits, current, delayed, device, error, gpt, ids, linear, noise, parameter_bits, values,
};
use fp8_nn::prelude::*;
use fp8_nn::{AnySaved, LinearSaved};

/// A block, and a Linear on its output, which is added.
#[derive(Debug)]
struct Wrapped {
    base: Box<dyn DynBlock>,
    adapter: Linear,
}
composite!(Wrapped { base, adapter });

impl Module for Wrapped {
    type Saved = (AnySaved, LinearSaved);

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, Self::Saved)> {
        self.forward_with_info(cx, x, &SequenceInfo::default())
    }

    fn forward_with_info(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        info: &SequenceInfo,
    ) -> Result<(Tensor, Self::Saved)> {
        let (b, base) = self.base.forward_with_info_dyn(cx, x, info)?;
        let (a, adapter) = self.adapter.forward(cx, &b)?;
        Ok((ops::add(&b, &a)?, (base, adapter)))
    }

    fn backward(
        &mut self,
        cx: &mut Backward<'_>,
        (base, adapter): Self::Saved,
        dy: &Tensor,
    ) -> Result<Tensor> {
        let db = ops::add(dy, &self.adapter.backward(cx, adapter, dy)?)?;
        self.base.backward_dyn(0, cx, base, &db)
    }
}

impl Block for Wrapped {
    fn evaluate(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        info: &SequenceInfo,
        cache: Option<CachedLayer<'_>>,
    ) -> Result<Tensor> {
        let b = self.base.evaluate_dyn(cx, x, info, cache)?;
        Ok(ops::add(&b, &self.adapter.forward(cx, &b)?.0)?)
    }

    fn kv_heads(&self) -> [usize; 2] {
        self.base.kv_heads_dyn()
    }
}

fn adapter(path: &str) -> Linear {
    linear(path, 32, 32, 7)
}

pub(crate) fn wrap(model: Gpt) -> Gpt {
    let make = |index: usize, base: TransformerLayer| {
        let adapter = adapter(&format!("gpt.blocks.{index}.adapter"));
        Ok(Box::new(Wrapped { base: Box::new(base), adapter }) as Box<dyn DynBlock>)
    };
    model.with_blocks(make).unwrap()
}

fn set(model: &mut Gpt, part: &str, value: impl Fn(&Shape) -> Tensor) {
    for parameter in parameters_mut(model).into_iter().filter(|p| p.name().contains(part)) {
        parameter.set(value(parameter.shape())).unwrap();
    }
}

fn train(model: &mut Gpt, recipe: &Recipe, steps: u64) -> Vec<u32> {
    let mut scaling = Scaling::new(model, &device()).unwrap();
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    let step = |i| {
        let (ids, targets) = (ids([2, 8], 20, i), ids([2, 8], 20, 100 + i));
        let (loss, saved) = scaling.in_autocast(recipe, |cx| model.loss(cx, &ids, &targets)).unwrap();
        scaling.in_backward(|cx| model.loss_backward(cx, saved)).unwrap();
        optimizer.step(model, 0.01).unwrap();
        zero_grad(model).unwrap();
        loss.item().unwrap().to_bits()
    };
    (0..steps).map(step).collect()
}

#[test]
fn an_adapter_of_zeros_leaves_the_model_as_it_is() {
    let zeros = |shape: &Shape| Tensor::zeros(*shape, DType::F32, &device()).unwrap();
    let (mut plain, mut wrapped) = (gpt(1), wrap(gpt(1)));
    set(&mut wrapped, ".adapter.", zeros);
    let logits = |model: &Gpt| {
        let mut scaling = Scaling::new(model, &device()).unwrap();
        let mut cx = scaling.eval(&current()).unwrap();
        bits(&model.logits(&mut cx, &ids([2, 8], 20, 1), &SequenceInfo::default()).unwrap())
    };
    assert_eq!(logits(&plain), logits(&wrapped));
    assert!(wrapped.fp8_gemms_per_step() == plain.fp8_gemms_per_step() + 3 * wrapped.blocks().len());
    // A frozen adapter of zeros changes no step of training either.
    for parameter in parameters_mut(&mut wrapped).into_iter().filter(|p| p.name().contains(".adapter.")) {
        parameter.set_trainable(false).unwrap();
    }
    assert_eq!(train(&mut plain, &current(), 3), train(&mut wrapped, &current(), 3));
}

#[test]
fn a_block_that_is_computed_again_has_the_same_bits() {
    let again = |_, base| Ok(Box::new(Recompute::new(base)) as Box<dyn DynBlock>);
    let (mut stored, mut recomputed) = (gpt(1), gpt(1).with_blocks(again).unwrap());
    assert_eq!(train(&mut stored, &delayed(), 3), train(&mut recomputed, &delayed(), 3));
    assert!(parameter_bits(&stored) == parameter_bits(&recomputed));
    let logits = |model: &Gpt| {
        let mut scaling = Scaling::new(model, &device()).unwrap();
        let mut cache = model.kv_cache(1, 8, DType::F32).unwrap();
        let mut cx = scaling.eval(&current()).unwrap();
        bits(&model.extend(&mut cx, &ids([1, 4], 20, 3), &[4], &mut cache).unwrap())
    };
    assert_eq!(logits(&stored), logits(&recomputed));
}

#[test]
fn only_the_adapters_are_trained_where_the_rest_is_frozen() {
    let mut model = wrap(gpt(1));
    for parameter in parameters_mut(&mut model).into_iter().filter(|p| !p.name().contains(".adapter.")) {
        parameter.set_trainable(false).unwrap();
    }
    let before = parameter_bits(&model);
    train(&mut model, &delayed(), 2);
    for (before, after) in before.iter().zip(parameter_bits(&model)) {
        assert_eq!(before.1 != after.1, before.0.contains(".adapter."), "{}", before.0);
    }
}

#[test]
fn generation_reads_the_cache_through_a_wrapped_block() {
    let model = wrap(gpt(1));
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let off = AutocastOptions { enabled: false, ..Default::default() };
    let ids = ids([2, 6], 20, 3);
    let mut cx = scaling.scope(&current(), &off).unwrap();
    let whole = model.logits(&mut cx, &ids, &SequenceInfo::default()).unwrap();
    let mut cache = model.kv_cache(2, 8, DType::F32).unwrap();
    let first = Tensor::from_vec(
        ids.to_vec::<i32>().unwrap().chunks(6).flat_map(|row| row[..4].to_vec()).collect(),
        [2, 4],
        &device(),
    )
    .unwrap();
    let rest = Tensor::from_vec(
        ids.to_vec::<i32>().unwrap().chunks(6).flat_map(|row| row[4..].to_vec()).collect(),
        [2, 2],
        &device(),
    )
    .unwrap();
    model.extend(&mut cx, &first, &[4, 4], &mut cache).unwrap();
    let last = model.extend(&mut cx, &rest, &[2, 2], &mut cache).unwrap();
    let expected: Vec<f32> =
        values(&whole).chunks(6 * 20).flat_map(|sequence| sequence[5 * 20..].to_vec()).collect();
    super::support::assert_close("logits", &expected, &values(&last), 1e-5);
    cx.discard().unwrap();
}

/// Without `evaluate`: it may not continue a cache.
#[derive(Debug)]
struct Plain(TransformerLayer);
composite!(Plain { 0 });

impl Module for Plain {
    type Saved = fp8_nn::TransformerLayerSaved;

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, Self::Saved)> {
        self.0.forward(cx, x)
    }

    fn backward(&mut self, cx: &mut Backward<'_>, saved: Self::Saved, dy: &Tensor) -> Result<Tensor> {
        self.0.backward(cx, saved, dy)
    }
}

impl Block for Plain {}

#[test]
fn blocks_that_do_not_fit_are_refused() {
    let refused = error(wrap(gpt(1)).with_blocks(|_, block| Ok(Box::new(block))));
    assert_eq!(
        refused,
        "gpt.blocks.0: with_blocks = a block of another type: it was replaced before: replace all blocks at once"
    );
    let twice = |_, base: TransformerLayer| {
        Ok(Box::new(Wrapped { base: Box::new(base), adapter: adapter("adapter") }) as Box<dyn DynBlock>)
    };
    let refused = error(gpt(1).with_blocks(twice));
    assert_eq!(refused, "parameter `adapter.weight` occurs twice: give the two layers different paths");

    let model = gpt(1).with_blocks(|_, block| Ok(Box::new(Plain(block)))).unwrap();
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let mut cx = scaling.eval(&current()).unwrap();
    let ids = ids([1, 4], 20, 3);
    model.logits(&mut cx, &ids, &SequenceInfo::default()).unwrap();
    let mut cache = model.kv_cache(1, 8, DType::F32).unwrap();
    let refused = error(model.extend(&mut cx, &ids, &[4], &mut cache));
    assert!(
        refused.ends_with("this block does not read one: implement Block::evaluate and Block::kv_heads"),
        "{refused}"
    );
}

#[test]
fn every_parameter_can_be_found_by_its_part() {
    let mut model = gpt(1);
    let layer = model.block::<TransformerLayer>(1).unwrap();
    let (attention, mlp) = (layer.attention(), layer.mlp());
    let found = [
        attention.qkv().weight(),
        attention.proj().weight(),
        mlp.fc1().norm_weight(),
        mlp.fc1().linear().weight(),
        mlp.fc2().weight(),
        model.norm_weight(),
        model.embedding().weight(),
        model.head().unwrap().weight(),
    ]
    .map(|parameter| parameter.name().to_string());
    let blocks = "gpt.blocks.1";
    assert_eq!(
        found,
        [
            format!("{blocks}.attention.qkv.weight"),
            format!("{blocks}.attention.proj.weight"),
            format!("{blocks}.mlp.norm.weight"),
            format!("{blocks}.mlp.fc1.weight"),
            format!("{blocks}.mlp.fc2.weight"),
            "gpt.norm.weight".into(),
            "gpt.embedding.weight".into(),
            "gpt.head.weight".into(),
        ]
    );
    assert!(model.block::<Linear>(0).is_none() && model.block::<TransformerLayer>(99).is_none());
    assert!(model.block_mut::<TransformerLayer>(0).is_some() && model.position().is_none());
    assert_eq!(model.norm_bias().is_some(), mlp_has_bias(&model));
}

fn mlp_has_bias(model: &Gpt) -> bool {
    model.block::<TransformerLayer>(0).unwrap().mlp().fc1().norm_bias().is_some()
}

#[test]
fn gradients_of_the_others_are_the_same_where_a_weight_is_frozen() {
    for recipe in super::support::recipes() {
        let run = |is_frozen: bool| {
            let mut model = super::support::mlp("mlp", Activation::Swiglu, Norm::LayerNorm, 1);
            for parameter in parameters_mut(&mut model).into_iter().filter(|p| p.shape().len() == 2) {
                parameter.set_trainable(!is_frozen).unwrap();
            }
            let mut scaling = Scaling::new(&model, &device()).unwrap();
            let (x, dy) = (noise([4, 24], 1), noise([4, 24], 2));
            let options = AutocastOptions::default();
            let (y, dx) = super::support::step(&mut scaling, &recipe, &options, &mut model, &x, &dy).unwrap();
            let vectors: Vec<_> = parameters(&model)
                .into_iter()
                .filter(|p| p.shape().len() == 1)
                .map(|p| bits(p.main_grad()))
                .collect();
            (bits(&y), bits(&dx), vectors)
        };
        assert!(run(true) == run(false), "{recipe}");
    }
}

#[test]
fn a_weight_that_was_frozen_in_the_forward_pass_has_no_gradient() {
    let mut model = linear("fc", 16, 16, 1);
    parameters_mut(&mut model)[0].set_trainable(false).unwrap();
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let (y, saved) = scaling.in_autocast(&delayed(), |cx| model.forward(cx, &noise([4, 16], 1))).unwrap();
    parameters_mut(&mut model)[0].set_trainable(true).unwrap();
    let refused = error(scaling.in_backward(|cx| model.backward(cx, saved, &y)));
    assert_eq!(
        refused,
        "fc: set_trainable = true: the weight was frozen in the forward pass, which kept nothing for its gradient: run that again"
    );
}

#[test]
fn a_tied_head_keeps_no_input_for_a_frozen_table() {
    let options = GptOptions { tie_word_embeddings: true, ..super::support::gpt_options() };
    let mut model = Gpt::new("gpt", &options, &device(), &mut super::support::rng(1)).unwrap();
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let (ids, targets) = (ids([2, 8], 20, 1), ids([2, 8], 20, 2));
    let mut run = |model: &mut Gpt, thaw: bool| {
        let (_, saved) = scaling.in_autocast(&delayed(), |cx| model.loss(cx, &ids, &targets))?;
        parameters_mut(model)[0].set_trainable(thaw)?;
        scaling.in_backward(|cx| model.loss_backward(cx, saved))?;
        Ok::<_, Error>(parameters(model)[1..].iter().map(|p| bits(p.main_grad())).collect::<Vec<_>>())
    };
    let trained = run(&mut model, true).unwrap();
    zero_grad(&mut model).unwrap();
    parameters_mut(&mut model)[0].set_trainable(false).unwrap();
    assert!(run(&mut model, false).unwrap() == trained);
    assert_eq!(
        error(run(&mut model, true)),
        "the tied head: set_trainable = true: the weight was frozen in the forward pass, which kept nothing for its gradient: run that again"
    );
}
