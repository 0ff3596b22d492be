//! The dtypes that a layer computes in, takes and returns.

use super::support::{delayed, device, error, first_step, in_dtype, noise, off, relative_rms, rng, values};
use fp8_nn::prelude::*;

fn fc(params_dtype: DType) -> Linear {
    let options = LinearOptions { in_features: 16, out_features: 16, params_dtype, ..Default::default() };
    Linear::new("fc", options, &device(), &mut rng(1)).unwrap()
}

fn block(params_dtype: DType) -> TransformerLayer {
    let options = TransformerLayerOptions { params_dtype, ..super::support::block_options() };
    TransformerLayer::new("block", options, &device(), &mut rng(1)).unwrap()
}

fn cast(t: &Tensor, dtype: DType) -> Tensor {
    ops::cast(t, dtype).unwrap()
}

#[test]
fn the_scope_says_what_to_compute_in() {
    let (x, dy) = (noise([2, 8, 32], 2), noise([2, 8, 32], 3));
    let high = first_step(&delayed(), &off(), &mut block(DType::F32), &x, &dy).unwrap();
    for enabled in [true, false] {
        for (params, input, compute) in [
            (DType::F32, DType::F32, DType::BF16),
            (DType::F32, DType::BF16, DType::BF16),
            (DType::BF16, DType::F32, DType::BF16),
            (DType::BF16, DType::BF16, DType::F32),
            (DType::F32, DType::F16, DType::BF16),
            (DType::F32, DType::F32, DType::F16),
        ] {
            let mut model = block(params);
            let options = AutocastOptions { enabled, ..in_dtype(compute) };
            let (y, dx) = first_step(&delayed(), &options, &mut model, &cast(&x, input), &dy).unwrap();
            assert_eq!((y.dtype(), dx.dtype()), (compute, input), "{params} {input} {compute}");
            let errors = [(&high.0, &y), (&high.1, &dx)].map(|(h, t)| relative_rms(&values(h), &values(t)));
            let most = if enabled { 0.20 } else { 0.03 };
            assert!(errors.iter().all(|&e| e > 1e-6 && e < most), "{params} {input} {compute}: {errors:?}");
            for p in parameters(&model) {
                assert_eq!((p.dtype(), p.main_grad().dtype()), (params, DType::F32));
            }
        }
    }
}

#[test]
fn without_it_the_input_does() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let (x, dy) = (cast(&noise([2, 8, 32], 2), dtype), cast(&noise([2, 8, 32], 3), dtype));
        let mut model = block(dtype);
        let (y, dx) = first_step(&delayed(), &AutocastOptions::default(), &mut model, &x, &dy).unwrap();
        assert_eq!((y.dtype(), dx.dtype()), (dtype, dtype));
    }
}

#[test]
fn parameters_of_another_dtype_than_the_input_are_refused() {
    let (x, text) = (noise([4, 16], 2), "give both one dtype, or set AutocastOptions::compute_dtype");
    let forward = |params: DType, input: DType| {
        let fc = fc(params);
        let mut scaling = Scaling::new(&fc, &device()).unwrap();
        let mut cx = scaling.autocast(&delayed()).unwrap();
        error(fc.forward(&mut cx, &cast(&x, input)))
    };
    assert_eq!(
        forward(DType::F32, DType::BF16),
        format!("fc: the input is bf16 and `fc.weight` is f32: {text}")
    );
    assert_eq!(
        forward(DType::BF16, DType::F32),
        format!("fc: the input is f32 and `fc.weight` is bf16: {text}")
    );
    let model = block(DType::BF16);
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let mut cx = scaling.autocast(&delayed()).unwrap();
    let error = error(model.forward(&mut cx, &noise([1, 8, 32], 1)));
    assert_eq!(
        error,
        format!("block.attention: the input is f32 and `block.attention.norm.weight` is bf16: {text}")
    );
}

#[test]
fn parameters_that_are_no_floats_are_refused() {
    for params_dtype in [DType::I32, DType::U8] {
        let remedy = "expected f32, bf16 or f16";
        let options = LinearOptions { in_features: 1, out_features: 1, params_dtype, ..Default::default() };
        let refused = Linear::new("fc", options, &device(), &mut rng(1));
        assert_eq!(error(refused), format!("fc: params_dtype = {params_dtype}: {remedy}"));
        let options = TransformerLayerOptions { params_dtype, ..super::support::block_options() };
        assert!(TransformerLayer::new("block", options, &device(), &mut rng(1)).is_err());
        let options =
            EmbeddingOptions { num_embeddings: 2, hidden_size: 2, params_dtype, ..Default::default() };
        assert!(Embedding::new("table", &options, &device(), &mut rng(1)).is_err());
        let options = NormLayerOptions { hidden_size: 2, params_dtype, ..Default::default() };
        assert!(LayerNorm::new("norm", &options, &device()).is_err());
    }
}

#[test]
fn what_does_not_fit_is_refused_with_the_shape() {
    let mut fc = fc(DType::F32);
    let mut scaling = Scaling::new(&fc, &device()).unwrap();
    let mut cx = scaling.autocast(&delayed()).unwrap();
    let refused = error(fc.forward(&mut cx, &noise([4, 15], 1)));
    assert_eq!(refused, "fc: input of shape [4, 15]: expected […, 16], in_features last");
    assert!(fc.forward(&mut cx, &Tensor::scalar(1.0, &device()).unwrap()).is_err());
    let integers = Tensor::from_vec(vec![1i32; 16], [1, 16], &device()).unwrap();
    assert!(fc.forward(&mut cx, &integers).is_err());
    let (_, saved) = fc.forward(&mut cx, &noise([4, 16], 1)).unwrap();
    cx.commit().unwrap();
    for shape in [[4, 15], [3, 16], [5, 16]] {
        let (_, saved) = scaling.in_autocast(&delayed(), |cx| fc.forward(cx, &noise([4, 16], 1))).unwrap();
        let refused = scaling.in_backward(|cx| fc.backward(cx, saved, &noise(shape, 2)));
        assert!(refused.is_err(), "dy {shape:?}");
    }
    scaling.in_backward(|cx| fc.backward(cx, saved, &noise([4, 16], 2))).unwrap();

    let model = block(DType::F32);
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let mut cx = scaling.autocast(&delayed()).unwrap();
    let refused = error(model.forward(&mut cx, &noise([4, 32], 1)));
    assert_eq!(
        refused,
        "block: input of shape [4, 32]: expected [batch, seq, 32] with seq at most 16, RoPE's max_seq_length"
    );
    assert!(model.forward(&mut cx, &noise([1, 17, 32], 1)).is_err()); // longer than max_seq_length
    let lengths = Tensor::from_vec(vec![1i32, 2], [2], &device()).unwrap();
    assert!(
        model.forward_with_info(&mut cx, &noise([1, 8, 32], 1), &SequenceInfo::padded(&lengths)).is_err()
    );
}

#[test]
fn options_out_of_range_are_refused() {
    let attention = |change: fn(&mut MultiheadAttentionOptions)| {
        let mut options = MultiheadAttentionOptions {
            hidden_size: 32,
            attention: AttentionOptions { num_attention_heads: 4, ..Default::default() },
            ..Default::default()
        };
        change(&mut options);
        error(MultiheadAttention::new("a", options, &device(), &mut rng(1)))
    };
    assert_eq!(
        attention(|o| o.attention.num_attention_heads = 5),
        "a: num_attention_heads = 5: expected a divisor of hidden_size 32, or kv_channels given"
    );
    assert_eq!(
        attention(|o| o.attention.num_gqa_groups = Some(3)),
        "a: num_gqa_groups = 3: expected a divisor of the 4 heads"
    );
    assert_eq!(
        attention(|o| o.attention.num_gqa_groups = Some(0)),
        "a: num_gqa_groups = 0: expected at least 1"
    );
    assert_eq!(
        attention(|o| o.attention.num_attention_heads = 0),
        "a: num_attention_heads = 0: expected at least 1"
    );
    assert_eq!(attention(|o| o.hidden_size = 0), "a: hidden_size = 0: expected at least 1");
    let odd = attention(|o| (o.attention.rope, o.attention.kv_channels) = (true, Some(3)));
    assert!(odd.contains("head_dim = 3"), "{odd}");
    let huge = attention(|o| o.attention.kv_channels = Some(usize::MAX / 2));
    assert!(huge.contains("4 heads of this size do not fit into memory"), "{huge}");
    let linear = |options| error(Linear::new("fc", options, &device(), &mut rng(1)));
    assert_eq!(linear(LinearOptions::default()), "fc: in_features = 0: expected at least 1");
    for eps in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let options = NormLayerOptions { hidden_size: 4, eps, ..Default::default() };
        let refused = error(RmsNorm::new("norm", &options, &device()));
        assert_eq!(refused, format!("norm: eps = {eps}: expected finite and greater than 0"));
    }
}
