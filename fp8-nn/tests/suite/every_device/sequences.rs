//! Padding, packed sequences and positions: what layers are told of their input besides its values.

use super::support::{
    assert_close, bits, block, delayed, device, error, gpt, grads, ids, noise, off, rng, values,
};
use fp8_nn::fp8_kernels::ops::CrossEntropyOptions;
use fp8_nn::prelude::*;

const LENGTHS: [usize; 4] = [5, 2, 7, 1];
const LONGEST: usize = 7;
const TOKENS: usize = 15;

fn packing() -> Packing {
    Packing::new(&LENGTHS, &device()).unwrap()
}

fn lengths() -> Tensor {
    Tensor::from_vec(LENGTHS.map(|n| n as i32).to_vec(), [LENGTHS.len()], &device()).unwrap()
}

/// Rows of `width` values, one sequence behind the other, as `[batch, longest, width]` with `fill` behind each.
fn padded(packed: &[f32], width: usize, fill: f32) -> Vec<f32> {
    let (mut out, mut rest) = (Vec::new(), packed);
    for length in LENGTHS {
        let (own, behind) = rest.split_at(length * width);
        out.extend_from_slice(own);
        out.resize(out.len() + (LONGEST - length) * width, fill);
        rest = behind;
    }
    out
}

/// The way back.
fn packed(padded: &[f32], width: usize) -> Vec<f32> {
    let rows = padded.chunks(LONGEST * width).zip(LENGTHS);
    rows.flat_map(|(rows, length)| rows[..length * width].to_vec()).collect()
}

/// y, dx and the gradients.
fn run<M: Module>(
    mut model: M,
    info: &SequenceInfo,
    x: &Tensor,
    dy: &Tensor,
) -> (Tensor, Tensor, Vec<(String, Vec<f32>)>) {
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let mut cx = scaling.scope(&delayed(), &off()).unwrap();
    let (y, saved) = model.forward_with_info(&mut cx, x, info).unwrap();
    cx.commit().unwrap();
    let dx = scaling.in_backward(|cx| model.backward(cx, saved, dy)).unwrap();
    (y, dx, grads(&model))
}

fn tensor(values: Vec<f32>, shape: [usize; 3]) -> Tensor {
    Tensor::from_vec(values, shape, &device()).unwrap()
}

/// On the CPU bit by bit: each position is computed alike, whatever is beside it. Gradients of weights are sums in another order.
#[test]
fn packed_sequences_give_what_padded_ones_give() {
    let (x, dy) = (values(&noise([1, TOKENS, 32], 2)), values(&noise([1, TOKENS, 32], 3)));
    let of_packed = |values: &[f32]| tensor(values.to_vec(), [1, TOKENS, 32]);
    let of_padded = |values: &[f32], fill| tensor(padded(values, 32, fill), [LENGTHS.len(), LONGEST, 32]);
    let together = run(block("b", 1), &SequenceInfo::packed(packing()), &of_packed(&x), &of_packed(&dy));
    let apart =
        run(block("b", 1), &SequenceInfo::padded(&lengths()), &of_padded(&x, 0.5), &of_padded(&dy, 0.0));
    for (name, got, want) in [("y", &together.0, &apart.0), ("dx", &together.1, &apart.1)] {
        let (got, want) = (values(got), packed(&values(want), 32));
        if device().to_string() == "cpu" && name == "y" {
            assert!(got.iter().zip(&want).all(|(got, want)| got.to_bits() == want.to_bits()), "{name}");
        }
        assert_close(name, &want, &got, 1e-5);
    }
    for ((name, got), (_, want)) in together.2.iter().zip(&apart.2) {
        assert_close(name, want, got, 1e-5);
    }

    // The same in a stack, and where it is computed again.
    let stack = Stack(vec![Box::new(Recompute::new(block("b", 1)))]);
    let again = run(stack, &SequenceInfo::packed(packing()), &of_packed(&x), &of_packed(&dy));
    assert_eq!(
        (bits(&again.0), bits(&again.1), &again.2),
        (bits(&together.0), bits(&together.1), &together.2)
    );
}

/// Logits of a packed sequence are those that it has alone, and its loss is the mean over its tokens.
#[test]
fn a_model_takes_packed_sequences() {
    let model = gpt(1);
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let all = ids([1, TOKENS], 20, 2);
    let host = all.to_vec::<i32>().unwrap();
    let mut logits = |ids: &Tensor, info: &SequenceInfo| {
        let mut cx = scaling.scope(&delayed(), &off()).unwrap();
        let (logits, _) = model.forward_with_info(&mut cx, ids, info).unwrap();
        let options = CrossEntropyOptions::default();
        let (loss, _) = model.loss_with_info(&mut cx, ids, ids, options, info).unwrap();
        cx.commit().unwrap();
        (values(&logits), loss.item().unwrap())
    };
    // 15 ids are more than the model's max_seq_length of 8, but no sequence is.
    let (together, loss) = logits(&all, &SequenceInfo::packed(packing()));
    let (mut begin, mut sum) = (0, 0.0);
    for length in LENGTHS {
        let own = host[begin..begin + length].to_vec();
        let own = Tensor::from_vec::<i32>(own, [1, length], &device()).unwrap();
        let (alone, loss) = logits(&own, &SequenceInfo::default());
        assert_close("logits", &alone, &together[begin * 20..(begin + length) * 20], 1e-5);
        begin += length;
        sum += loss * length as f32;
    }
    assert!((loss - sum / TOKENS as f32).abs() < 1e-5, "{loss} and {sum}");

    let long = Packing::new(&[9, 6], &device()).unwrap();
    let mut cx = scaling.scope(&delayed(), &off()).unwrap();
    let refused = error(model.forward_with_info(&mut cx, &all, &SequenceInfo::packed(long)));
    assert_eq!(
        refused,
        "gpt: ids of shape [1, 15]: expected [batch, seq] with seq at most 8, the max_seq_length"
    );
}

#[test]
fn positions_are_those_that_are_given() {
    let x = noise([2, 4, 32], 2);
    let output = |positions: Option<Vec<i32>>, x: &Tensor| {
        let [batch, seq, _] = **x.shape() else { panic!("{}", x.shape()) };
        let positions = positions.map(|p| Tensor::from_vec(p, [batch, seq], &device()).unwrap());
        let info = SequenceInfo { positions, ..Default::default() };
        values(&run(block("b", 1), &info, x, x).0)
    };
    let plain = output(None, &x);
    assert_eq!(output(Some(vec![0, 1, 2, 3, 0, 1, 2, 3]), &x), plain);
    // Only differences count, and these are other differences.
    assert_close("moved", &plain, &output(Some(vec![5, 6, 7, 8, 9, 10, 11, 12]), &x), 1e-5);
    let far: Vec<f32> = output(Some(vec![0, 2, 4, 6, 0, 1, 2, 3]), &x);
    assert_eq!(far[4 * 32..], plain[4 * 32..]);
    assert_ne!(far[..4 * 32], plain[..4 * 32]);
}

/// A layer of a user that mixes positions and does not say how.
#[derive(Debug)]
struct Mixing(Linear);

composite!(Mixing { 0 });

impl Module for Mixing {
    type Saved = fp8_nn::LinearSaved;

    fn forward(&self, cx: &mut Forward<'_>, x: &Tensor) -> Result<(Tensor, Self::Saved)> {
        self.0.forward(cx, x)
    }

    fn backward(&mut self, cx: &mut Backward<'_>, saved: Self::Saved, dy: &Tensor) -> Result<Tensor> {
        self.0.backward(cx, saved, dy)
    }
}

#[test]
fn what_is_not_heeded_is_refused() {
    let options = LinearOptions { in_features: 32, out_features: 32, ..Default::default() };
    let linear = |path: &str| Linear::new(path, options.clone(), &device(), &mut rng(1)).unwrap();
    let x = noise([1, TOKENS, 32], 1);
    let mut stack = Stack(vec![Box::new(linear("a")), Box::new(block("b", 1))]);
    assert!(!stack.is_positionwise() && linear("d").is_positionwise());
    let mut scaling = Scaling::new(&stack, &device()).unwrap();
    let info = SequenceInfo::packed(packing());
    scaling.in_autocast(&delayed(), |cx| stack.forward_with_info(cx, &x, &info).map(drop)).unwrap();
    stack.0.push(Box::new(Mixing(linear("c"))));
    let mut scaling = Scaling::new(&stack, &device()).unwrap();
    let refused =
        error(scaling.in_autocast(&delayed(), |cx| stack.forward_with_info(cx, &x, &info).map(drop)));
    let expected = "Mixing: it takes no padding, packed sequences or positions: implement Module::forward_with_info, or \
                    Module::is_positionwise if its positions do not depend on each other";
    assert!(refused.ends_with(expected), "{refused}");
    scaling.in_autocast(&delayed(), |cx| stack.forward(cx, &x).map(drop)).unwrap();
}

#[test]
fn what_does_not_fit_the_input_is_refused() {
    let model = block("b", 1);
    let mut scaling = Scaling::new(&model, &device()).unwrap();
    let mut refused = |shape: [usize; 3], info: &SequenceInfo| {
        error(
            scaling
                .in_autocast(&delayed(), |cx| model.forward_with_info(cx, &noise(shape, 1), info).map(drop)),
        )
    };
    let packed = SequenceInfo::packed(packing());
    let expected = "b: packing = 15 queries and 15 keys: expected as many of both as the input, [1, 14, …], has positions";
    assert!(refused([1, 14, 32], &packed).starts_with(expected));
    assert!(refused([2, TOKENS, 32], &packed).contains("packing = 15 queries"));
    let cross = Packing::cross(&[4], &[5], &device()).unwrap();
    assert!(refused([1, 4, 32], &SequenceInfo::packed(cross)).contains("4 queries and 5 keys"));
    let positions = Tensor::from_vec(vec![0i32; 4], [4], &device()).unwrap();
    let info = SequenceInfo { positions: Some(positions), ..Default::default() };
    assert_eq!(refused([1, 4, 32], &info), "b: positions of shape [4]: expected [1, 4], one per token");
    let lengths = Tensor::from_vec(vec![1i32, 1], [2], &device()).unwrap();
    let info = Sequences::Padded { queries: Some(lengths), keys: None }.into();
    assert_eq!(refused([1, 4, 32], &info), "b: query_lengths of shape [2]: expected [1], one per sequence");
}
