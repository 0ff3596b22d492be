//! A decoder's block and its cross attention in FP8, with padding, and what they refuse.

use super::support::{
    bits, delayed, device, error, grads, noise, off, relative_rms, rng, values, with_noise,
};
use fp8_nn::prelude::*;

pub(crate) const BATCH: usize = 2;
pub(crate) const QUERIES: usize = 3;
pub(crate) const KEYS: usize = 5;
pub(crate) const HIDDEN: usize = 24;
pub(crate) const ENCODER_HIDDEN: usize = 20;

pub(crate) fn inputs() -> (Tensor, Tensor) {
    (noise([BATCH, QUERIES, HIDDEN], 2), noise([BATCH, KEYS, ENCODER_HIDDEN], 4))
}

/// Output and both gradients of inputs.
pub(crate) type Results = (Tensor, Tensor, Tensor);

pub(crate) fn run_decoder(
    options: &AutocastOptions,
) -> impl Fn(&mut TransformerDecoderLayer, &mut Scaling, [&Tensor; 3]) -> Result<Results> {
    move |model, scaling, [x, e, dy]| {
        let mut cx = scaling.scope(&delayed(), options)?;
        let (y, saved) = model.forward(&mut cx, x, e, &SequenceInfo::default(), &Sequences::Full)?;
        cx.commit()?;
        let (dx, de) = scaling.in_backward(|cx| model.backward(cx, saved, dy))?;
        Ok((y, dx, de))
    }
}

pub(crate) fn cross_options() -> CrossAttentionOptions {
    CrossAttentionOptions {
        hidden_size: HIDDEN,
        encoder_hidden_size: Some(ENCODER_HIDDEN),
        attention: AttentionOptions { num_attention_heads: 4, causal: false, ..Default::default() },
        init: InitOptions { init_std: 0.4, output_layer_init_std: 0.4 },
        ..Default::default()
    }
}

pub(crate) fn decoder_options() -> TransformerDecoderLayerOptions {
    TransformerDecoderLayerOptions {
        hidden_size: HIDDEN,
        ffn_hidden_size: 32,
        encoder_hidden_size: Some(ENCODER_HIDDEN),
        attention: AttentionOptions {
            num_attention_heads: 4,
            num_gqa_groups: Some(2),
            rope: true,
            max_seq_length: 8,
            ..Default::default()
        },
        init: InitOptions { init_std: 0.3, output_layer_init_std: 0.3 },
        ..Default::default()
    }
}

pub(crate) fn decoder(options: TransformerDecoderLayerOptions) -> TransformerDecoderLayer {
    with_noise(TransformerDecoderLayer::new("a", options, &device(), &mut rng(1)).unwrap(), 1)
}

#[test]
fn a_decoder_block_in_fp8_stays_near_high_precision() {
    let (x, e) = inputs();
    let dy = noise(*x.shape(), 3);
    let run = |options: &AutocastOptions| {
        let init = InitOptions { init_std: 0.05, output_layer_init_std: 0.05 };
        let mut model = decoder(TransformerDecoderLayerOptions { init, ..decoder_options() });
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let (y, dx, de) = run_decoder(options)(&mut model, &mut scaling, [&x, &e, &dy]).unwrap();
        let mut all = grads(&model);
        all.extend([("dx".to_owned(), values(&dx)), ("de".to_owned(), values(&de))]);
        let slots: Vec<_> =
            scaling.slot_reports().unwrap().iter().map(|slot| slot.name.to_string()).collect();
        (values(&y), all, slots)
    };
    let (high, fp8) = (run(&off()), run(&AutocastOptions::default()));
    let error = relative_rms(&high.0, &fp8.0);
    assert!((1e-4..0.03).contains(&error), "y is off by {error}");
    for ((name, high), (_, fp8)) in high.1.iter().zip(&fp8.1) {
        // A bias that all keys share has no gradient but rounding.
        if !name.ends_with("kv.bias") && !name.ends_with("qkv.bias") {
            let error = relative_rms(high, fp8);
            assert!((0.0..0.25).contains(&error), "{name} is off by {error}");
        }
    }
    for slot in ["q.input", "kv.input", "kv.weight", "q.grad_output", "proj.grad_output"] {
        assert!(fp8.2.iter().any(|name| *name == format!("a.cross_attention.{slot}")), "{slot}: {:?}", fp8.2);
    }
}

#[test]
fn keys_of_padding_are_not_read() {
    let (x, e) = inputs();
    let lengths = Tensor::from_vec(vec![KEYS as i32, 2], [BATCH], &device()).unwrap();
    let run = |e: &Tensor| {
        let model = decoder(decoder_options());
        let mut scaling = Scaling::new(&model, &device()).unwrap();
        let mut cx = scaling.scope(&delayed(), &off()).unwrap();
        let cross = Sequences::padded(&lengths);
        let cross = match cross {
            Sequences::Padded { keys, .. } => Sequences::Padded { queries: None, keys },
            other => other,
        };
        let (y, _) = model.forward(&mut cx, &x, e, &SequenceInfo::default(), &cross).unwrap();
        cx.commit().unwrap();
        bits(&y)
    };
    let mut other = values(&e);
    other[(KEYS + 2) * ENCODER_HIDDEN..].fill(100.0);
    let other = Tensor::from_vec(other, *e.shape(), &device()).unwrap();
    assert!(run(&e) == run(&other));
    // The first entry's last key is real.
    let mut other = values(&e);
    other[(KEYS - 1) * ENCODER_HIDDEN] += 1.0;
    assert!(run(&e) != run(&Tensor::from_vec(other, *e.shape(), &device()).unwrap()));
}

#[test]
fn what_does_not_fit_is_refused() {
    let refused = |change: fn(&mut CrossAttentionOptions)| {
        let mut options = cross_options();
        change(&mut options);
        error(CrossAttention::new("a", options, &device(), &mut rng(1)))
    };
    assert_eq!(
        refused(|o| o.attention.rope = true),
        "a: rope = true: queries and keys of cross attention have no common positions: expected false"
    );
    let text = refused(|o| o.encoder_hidden_size = Some(0));
    assert!(text.starts_with("a: encoder_hidden_size = 0: "), "{text}");

    let model = CrossAttention::new("a", cross_options(), &device(), &mut rng(1)).unwrap();
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let mut forward = |x: [usize; 3], e: [usize; 3], sequences: &Sequences| {
        scaling.in_autocast(&delayed(), |cx| model.forward(cx, &noise(x, 1), &noise(e, 2), sequences))
    };
    let full = Sequences::Full;
    assert_eq!(
        error(forward([2, 3, 23], [2, 5, 20], &full)),
        "a: input of shape [2, 3, 23]: expected [batch, queries, 24]"
    );
    assert_eq!(
        error(forward([2, 3, 24], [1, 5, 20], &full)),
        "a: encoder_output of shape [1, 5, 20]: expected [2, keys, 20], the input's batch first"
    );
    let packing = ops::Packing::new(&[3], &device()).unwrap();
    assert_eq!(
        error(forward([1, 3, 24], [1, 5, 20], &Sequences::Packed(packing))),
        "a: packing = 3 queries and 3 keys: expected 3 queries and 5 keys, as the inputs have positions, in one batch entry"
    );
    // No queries at all.
    let (y, _) = forward([2, 0, 24], [2, 5, 20], &full).unwrap();
    assert_eq!(y.numel(), 0);
}
