//! Heads of the user's own in a Gpt, and blocks around an attention.

use super::support::{
    assert_close, bits, current, delayed, device, error, gpt, gpt_options, ids, linear, off, parameter_bits,
    rng, unless_simulated, values,
};
use fp8_nn::LinearSaved;
use fp8_nn::fp8_kernels::ops::CrossEntropyOptions;
use fp8_nn::prelude::*;

/// A head and an adapter of low rank on it: `y = base(x) + up(down(x))`, the base in high precision.
#[derive(Debug)]
struct Adapted {
    base: Linear,
    down: Linear,
    up: Linear,
}
composite!(Adapted { base, down, up });

impl Module for Adapted {
    type Saved = [LinearSaved; 3];

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, Self::Saved)> {
        let (y, base) = self.base.forward(&mut cx.disabled(), x)?;
        let (h, down) = self.down.forward(cx, x)?;
        let (u, up) = self.up.forward(cx, &h)?;
        Ok((ops::add(&y, &u)?, [base, down, up]))
    }

    fn backward(&mut self, cx: &mut Backward<'_>, saved: Self::Saved, dy: &Tensor) -> Result<Tensor> {
        let [base, down, up] = saved;
        let dh = self.up.backward(cx, up, dy)?;
        let dx = self.down.backward(cx, down, &dh)?;
        Ok(ops::add(&self.base.backward(cx, base, dy)?, &dx)?)
    }
}

fn adapted(model: Gpt) -> Gpt {
    let make = |base: Option<Linear>| {
        let (down, up) = (linear("gpt.lora.down", 32, 16, 3), linear("gpt.lora.up", 16, 20, 4));
        Ok(Box::new(Adapted { base: base.unwrap(), down, up }) as Box<dyn DynModule>)
    };
    model.with_head(make).unwrap()
}

fn labels(model: Gpt) -> Gpt {
    model.with_head(|_| Ok(Box::new(linear("gpt.labels", 32, 3, 5)))).unwrap()
}

fn set(model: &mut Gpt, part: &str, value: f32) {
    for parameter in parameters_mut(model).into_iter().filter(|p| p.name().contains(part)) {
        let new = Tensor::full(value, *parameter.shape(), DType::F32, &device()).unwrap();
        parameter.set(new).unwrap();
    }
}

fn logits(model: &Gpt, recipe: &Recipe) -> Vec<u32> {
    let mut scaling = Scaling::new(model, &device()).unwrap();
    let mut cx = scaling.eval(recipe).unwrap();
    bits(&model.logits(&mut cx, &ids([2, 6], 20, 3), &SequenceInfo::default()).unwrap())
}

#[test]
fn an_adapter_of_zeros_on_the_head_leaves_the_model_as_it_is() {
    let (mut plain, mut model) = (gpt(1), adapted(gpt(1)));
    set(&mut model, "gpt.lora.up", 0.0);
    assert_eq!(logits(&plain, &current()), logits(&model, &current()));
    assert_eq!(model.fp8_gemms_per_step(), plain.fp8_gemms_per_step() + 6);
    assert!(model.head().is_none() && model.own_head().is_some() && plain.own_head().is_none());
    // Generation, too.
    let options = GenerateOptions { max_new_tokens: 4, ..Default::default() };
    let [one, other] = [&plain, &model].map(|model| {
        let mut scaling = Scaling::new(model, &device()).unwrap();
        let mut cx = scaling.eval(&current()).unwrap();
        model.generate(&mut cx, &[vec![1, 2, 3], vec![4]], &options, |_, _| {}).unwrap()
    });
    assert_eq!(one, other);
    // With everything frozen but the adapter, whose gradient goes through the head alone.
    for model in [&mut plain, &mut model] {
        for parameter in parameters_mut(model) {
            let is_adapter = parameter.name().contains(".lora.");
            parameter.set_trainable(is_adapter).unwrap();
        }
    }
    let before = parameter_bits(&model);
    train(&mut model, &delayed(), 20, 2);
    for (before, after) in before.iter().zip(parameter_bits(&model)) {
        // `down` has no gradient while `up` is zero.
        assert_eq!(before.1 != after.1, before.0.contains(".lora."), "{}", before.0);
    }
}

/// Returns the losses; targets are below `classes`.
fn train(model: &mut Gpt, recipe: &Recipe, classes: i32, steps: u64) -> Vec<f32> {
    let mut scaling = Scaling::new(model, &device()).unwrap();
    let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
    let (x, targets) = (ids([2, 8], 20, 1), ids([2, 8], classes, 2));
    let mut losses = Vec::new();
    for _ in 0..steps {
        let (loss, saved) = scaling.in_autocast(recipe, |cx| model.loss(cx, &x, &targets)).unwrap();
        scaling.in_backward(|cx| model.loss_backward(cx, saved)).unwrap();
        optimizer.step(model, 0.01).unwrap();
        zero_grad(model).unwrap();
        losses.push(loss.item().unwrap());
    }
    losses
}

#[test]
fn labels_are_learned_with_a_head_of_other_outputs() {
    let cases = vec![(false, delayed()), (true, current()), (false, Recipe::off())];
    for (tied, recipe) in unless_simulated(cases, vec![(true, delayed())]) {
        let options = GptOptions { tie_word_embeddings: tied, ..gpt_options() };
        let mut model = labels(Gpt::new("gpt", &options, &device(), &mut rng(1)).unwrap());
        assert!(!parameters(&model).iter().any(|p| p.name().starts_with("gpt.head")));
        let losses = train(&mut model, &recipe, 3, 30);
        assert!((losses[0] - 3f32.ln()).abs() < 0.5 && losses[29] < 0.5 * losses[0], "{recipe}: {losses:?}");

        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let mut cx = scaling.eval(&recipe).unwrap();
        let (x, targets) = (ids([2, 8], 20, 1), ids([2, 8], 3, 2));
        let info = SequenceInfo::default();
        let loss = model.evaluate(&mut cx, &x, &targets, CrossEntropyOptions::default(), &info).unwrap();
        assert!(loss.item().unwrap() < losses[0]);
    }
}

/// The loss moves with a weight in front of the head as its gradient says.
#[test]
fn gradients_pass_through_a_head_of_ones_own() {
    let mut model = adapted(gpt(1));
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let (x, targets) = (ids([2, 8], 20, 1), ids([2, 8], 20, 2));
    let mut loss = |model: &mut Gpt, has_backward: bool| {
        let mut cx = scaling.scope(&current(), &off()).unwrap();
        let (loss, saved) = model.loss(&mut cx, &x, &targets).unwrap();
        cx.commit().unwrap();
        if has_backward {
            scaling.in_backward(|cx| model.loss_backward(cx, saved)).unwrap();
        }
        f64::from(loss.item().unwrap())
    };
    loss(&mut model, true);
    for part in ["gpt.norm.weight", "gpt.lora.down.weight", "gpt.head.weight"] {
        let at = |model: &mut Gpt, step: f32| {
            let parameter = parameters_mut(model).into_iter().find(|p| &**p.name() == part).unwrap();
            let gradient = parameter.main_grad().clone();
            let moved = ops::add(parameter.tensor(), &ops::scale(&gradient, step).unwrap()).unwrap();
            parameter.set(moved).unwrap();
            values(&gradient).iter().map(|&g| f64::from(g).powi(2)).sum::<f64>()
        };
        let step = 1e-2;
        let square = at(&mut model, step);
        let above = loss(&mut model, false);
        at(&mut model, -2.0 * step);
        let below = loss(&mut model, false);
        at(&mut model, step);
        let slope = (above - below) / (2.0 * f64::from(step));
        assert!((slope - square).abs() <= 0.02 * square + 1e-5, "{part}: {slope}, expected {square}");
    }
}

#[test]
fn heads_that_do_not_fit_are_refused() {
    let again = labels(gpt(1)).with_head(|_| Ok(Box::new(linear("gpt.x", 32, 3, 5))));
    assert_eq!(
        error(again),
        "gpt: with_head = a head of the user's own: it was replaced before: replace it once"
    );
    let twice = gpt(1).with_head(|_| Ok(Box::new(linear("gpt.blocks.0.mlp.fc2", 32, 3, 5))));
    assert_eq!(
        error(twice),
        "parameter `gpt.blocks.0.mlp.fc2.weight` occurs twice: give the two layers different paths"
    );
    // A `Saved` of a model with another head.
    let (mut plain, mut model) = (gpt(1), adapted(gpt(1)));
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let (x, targets) = (ids([2, 8], 20, 1), ids([2, 8], 20, 2));
    let (_, saved) = scaling.in_autocast(&current(), |cx| model.loss(cx, &x, &targets)).unwrap();
    let refused = error(scaling.in_backward(|cx| plain.loss_backward(cx, saved)));
    assert!(
        refused.contains("a Linear as its head") && refused.contains("a head of the user's own"),
        "{refused}"
    );
    let mut scaling = Scaling::new(&plain, &device()).unwrap();
    let (_, saved) = scaling.in_autocast(&current(), |cx| plain.loss(cx, &x, &targets)).unwrap();
    let refused = error(scaling.in_backward(|cx| model.loss_backward(cx, saved)));
    assert!(
        refused.contains("a head of the user's own") && refused.contains("a Linear as its head"),
        "{refused}"
    );
    for model in [&plain, &model] {
        assert!(parameters(model).iter().all(|p| values(p.main_grad()).iter().all(|&g| g == 0.0)));
    }
    // Slots of one name, which the parameters do not show.
    let refused =
        error(gpt(1).with_head(|_| Ok(Box::new(Unvisited(linear("gpt.blocks.0.mlp.fc2", 32, 3, 5))))));
    assert_eq!(
        refused,
        "slot `gpt.blocks.0.mlp.fc2.input` occurs twice: give the two layers different paths"
    );
    // Generation needs the logits of one position.
    let model = gpt(1).with_head(|_| Ok(Box::new(Flat(linear("gpt.flat", 32, 20, 5))))).unwrap();
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let mut cx = scaling.eval(&current()).unwrap();
    let mut cache = model.kv_cache(2, 8, DType::F32).unwrap();
    let refused = error(model.extend(&mut cx, &ids([2, 3], 20, 1), &[3, 3], &mut cache));
    assert_eq!(
        refused,
        "gpt: head = an output of shape [2, 20]: expected [2, 1, vocab_size], for an input of one position in each row"
    );
    assert_eq!(cache.lengths(), [0, 0]);
}

/// A Linear whose slots are visited and whose parameters are not.
#[derive(Debug)]
struct Unvisited(Linear);

impl Slots for Unvisited {
    fn slots(&self, f: &mut dyn FnMut(&SlotName)) {
        self.0.slots(f);
    }
}

impl Layer for Unvisited {
    fn visit<'a>(&'a self, _: &mut dyn FnMut(&'a Parameter)) {}
    fn visit_mut<'a>(&'a mut self, _: &mut dyn FnMut(&'a mut Parameter)) {}
}

impl Module for Unvisited {
    type Saved = LinearSaved;

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, LinearSaved)> {
        self.0.forward(cx, x)
    }

    fn backward(&mut self, cx: &mut Backward<'_>, saved: LinearSaved, dy: &Tensor) -> Result<Tensor> {
        self.0.backward(cx, saved, dy)
    }
}

/// A head that returns a row for each token.
#[derive(Debug)]
struct Flat(Linear);
composite!(Flat { 0 });

impl Module for Flat {
    type Saved = LinearSaved;

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, LinearSaved)> {
        let [rows, size] = x.shape().matrix();
        self.0.forward(cx, &x.reshape([rows, size])?)
    }

    fn backward(&mut self, cx: &mut Backward<'_>, saved: LinearSaved, dy: &Tensor) -> Result<Tensor> {
        self.0.backward(cx, saved, dy)
    }
}

/// A block of attention and a Linear, with a residual connection each.
#[derive(Debug)]
struct Mixed {
    attention: MultiheadAttention,
    linear: Linear,
}
composite!(Mixed { attention, linear });

impl Module for Mixed {
    type Saved = (fp8_nn::MultiheadAttentionSaved, LinearSaved);

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, Self::Saved)> {
        let (a, attention) = self.attention.forward(cx, x)?;
        let r = ops::add(x, &a)?;
        let (y, linear) = self.linear.forward(cx, &r)?;
        Ok((ops::add(&r, &y)?, (attention, linear)))
    }

    fn backward(&mut self, cx: &mut Backward<'_>, saved: Self::Saved, dy: &Tensor) -> Result<Tensor> {
        let dr = ops::add(dy, &self.linear.backward(cx, saved.1, dy)?)?;
        Ok(ops::add(&dr, &self.attention.backward(cx, saved.0, &dr)?)?)
    }
}

impl Block for Mixed {
    fn evaluate(
        &self,
        cx: &mut Forward<'_>,
        x: &Tensor,
        info: &SequenceInfo,
        cache: Option<CachedLayer<'_>>,
    ) -> Result<Tensor> {
        let r = ops::add(x, &self.attention.evaluate(cx, x, info, cache)?)?;
        Ok(ops::add(&r, &self.linear.forward(cx, &r)?.0)?)
    }

    fn kv_heads(&self) -> [usize; 2] {
        self.attention.kv_heads()
    }
}

fn mixed(causal: bool, right: Option<usize>) -> Gpt {
    let make = |index: usize, _| {
        let attention = AttentionOptions {
            num_attention_heads: 4,
            causal,
            window: (None, right),
            rope: true,
            max_seq_length: 8,
            ..Default::default()
        };
        let options = MultiheadAttentionOptions {
            hidden_size: 32,
            attention,
            input_layernorm: Some(NormOptions::default()),
            ..Default::default()
        };
        let path = format!("gpt.blocks.{index}");
        let attention = MultiheadAttention::new(
            &format!("{path}.attention"),
            options,
            &device(),
            &mut rng(index as u64),
        )?;
        Ok(Box::new(Mixed { attention, linear: linear(&format!("{path}.linear"), 32, 32, 8) })
            as Box<dyn DynBlock>)
    };
    gpt(1).with_blocks(make).unwrap()
}

#[test]
fn a_block_around_an_attention_generates() {
    for model in [mixed(true, None), mixed(false, Some(0))] {
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let mut cx = scaling.eval(&Recipe::off()).unwrap();
        let x = ids([2, 6], 20, 3);
        let whole = values(&model.logits(&mut cx, &x, &SequenceInfo::default()).unwrap());
        let mut cache = model.kv_cache(2, 8, DType::F32).unwrap();
        let columns = x.to_vec::<i32>().unwrap();
        for at in 0..6 {
            let token = Tensor::from_vec(vec![columns[at], columns[6 + at]], [2, 1], &device()).unwrap();
            let logits = values(&model.extend(&mut cx, &token, &[1, 1], &mut cache).unwrap());
            let expected = [0, 6].map(|row| &whole[20 * (row + at)..][..20]).concat();
            assert_close("logits", &expected, &logits, 1e-5);
        }
    }
    let attention = &mixed(true, None);
    let attention = &attention.block::<Mixed>(1).unwrap().attention;
    assert_eq!(&**attention.norm_weight().unwrap().name(), "gpt.blocks.1.attention.norm.weight");
    assert!(attention.norm_bias().is_some() && attention.q_norm_weight().is_none());
}

#[test]
fn a_cache_needs_causal_attention() {
    for model in [mixed(false, None), mixed(false, Some(1))] {
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let mut cx = scaling.eval(&Recipe::off()).unwrap();
        let mut cache = model.kv_cache(1, 8, DType::F32).unwrap();
        let refused = error(model.extend(&mut cx, &ids([1, 2], 20, 1), &[2], &mut cache));
        assert_eq!(
            refused,
            "gpt.blocks.0.attention: kv_cache = a cache: its queries see keys to their right, which are not known yet: create the \
             layer with causal = true"
        );
        assert_eq!(cache.lengths(), [0]);
    }
}

#[test]
fn options_of_sampling_are_checked_before_a_prompt_is_read() {
    let model = gpt(1);
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let cx = scaling.eval(&current()).unwrap();
    for (options, text) in [
        (GenerateOptions { top_p: 2.0, ..Default::default() }, "top_p = 2"),
        (GenerateOptions { temperature: f32::NAN, ..Default::default() }, "temperature = NaN"),
        (GenerateOptions { top_k: Some(0), ..Default::default() }, "top_k = 0"),
    ] {
        let options = GenerateOptions { max_new_tokens: 2, ..options };
        let refused = error(Generation::new(&model, &cx, &[vec![1, 2]], &options));
        assert!(refused.contains(text), "{refused}");
    }
}
