//! Delayed scaling of a tensor alone: Transformer Engine's quantizers for JAX, and groups.

use super::support::{codes, device, message, scale_of, short};
use fp8_recipe::fp8_kernels::fp8_format::{E4M3, E5M2};
use fp8_recipe::fp8_kernels::{Arena, DType, Tensor, ops};
use fp8_recipe::{
    AmaxComputeAlgo, AmaxGroup, DelayedScaling, Direction, Error, Quantizer, Result, StateDigest,
};
use std::sync::{Arc, Mutex};

fn tensor(values: &[f32]) -> Tensor {
    Tensor::from_vec(values.to_vec(), [values.len()], &device()).unwrap()
}

/// `DelayedScaleQuantizer` of `transformer_engine/jax/quantize/quantizer.py`: `update`, `_compute_scale` and
/// `compute_scale_from_amax`, in their order of operations.
struct Jax {
    scale: f32,
    amax_history: Vec<f32>,
    fp8_max: f32,
    margin: i32,
    is_max: bool,
}

impl Jax {
    fn update(&mut self, new_amax: f32) {
        self.amax_history[0] = new_amax;
        let amax = if self.is_max {
            self.amax_history
                .iter()
                .fold(f32::NEG_INFINITY, |most, &amax| if amax > most { amax } else { most })
        } else {
            self.amax_history[0]
        };
        let quotient = (self.fp8_max / amax) / f32::powi(2.0, self.margin);
        let is_usable = amax > 0.0 && amax != f32::INFINITY;
        self.scale = if is_usable { quotient } else { self.scale };
        self.amax_history.rotate_left(1);
        self.amax_history[0] = 0.0;
    }
}

#[test]
fn under_jax_rules_a_quantizer_repeats_the_trace_of_jax() {
    let amaxes = [
        0.0,
        3.5,
        0.7,
        0.0,
        1e-3,
        7.25,
        f32::INFINITY,
        0.1,
        0.2,
        0.3,
        0.4,
        0.5,
        0.0,
        0.0,
        0.0,
        0.0,
        0.0,
        9.0,
        1e-30,
        1e30,
        2.0,
        3.0,
    ];
    for (direction, fp8_max) in [(Direction::Forward, 448.0), (Direction::Backward, 57344.0)] {
        for (amax_history_len, margin, is_max) in [
            (1, 0, true),
            (2, 0, true),
            (5, 0, true),
            (5, 3, true),
            (16, -2, true),
            (5, 0, false),
            (1024, 1, true),
        ] {
            let amax_compute_algo = if is_max { AmaxComputeAlgo::Max } else { AmaxComputeAlgo::MostRecent };
            let recipe = DelayedScaling { amax_history_len, margin, amax_compute_algo, ..Default::default() };
            let mut quantizer = Quantizer::new(recipe.with_jax_rules(), direction, &device()).unwrap();
            let amax_history = vec![0.0; amax_history_len];
            let mut jax = Jax { scale: 1.0, amax_history, fp8_max, margin, is_max };
            assert_eq!(quantizer.amax_history().unwrap(), jax.amax_history);
            for (step, &amax) in amaxes.iter().enumerate() {
                let what = format!("{direction}, {amax_history_len} rows, margin {margin}, step {step}");
                let x = [amax, -0.5 * amax, 0.25 * amax];
                let x8 = quantizer.quantize(&tensor(&x)).unwrap();
                // Codes with the scale of the steps before.
                let expected = x.map(|x| match direction {
                    Direction::Forward => E4M3::from_f32_saturating(x * jax.scale).to_bits(),
                    Direction::Backward => E5M2::from_f32_saturating(x * jax.scale).to_bits(),
                });
                assert_eq!(codes(&x8), expected, "{what}");
                jax.update(amax);
                assert_eq!(quantizer.scale().unwrap().to_bits(), jax.scale.to_bits(), "{what}");
                assert_eq!(quantizer.amax_history().unwrap(), jax.amax_history, "{what}");
            }
        }
    }
}

#[test]
fn the_history_has_amax_history_len_rows_under_all_rules() {
    for recipe in [short(), short().with_te_rules(), short().with_jax_rules()] {
        let mut quantizer = Quantizer::new(recipe.clone(), Direction::Forward, &device()).unwrap();
        assert_eq!(quantizer.amax_history().unwrap(), [0.0; 4]);
        for amax in [3.5, 0.0, 2.0] {
            quantizer.quantize(&tensor(&[amax])).unwrap();
        }
        // Only Transformer Engine's PyTorch takes a tensor of zeros for one that did not run.
        let expected = if recipe.zero_is_skipped { [0.0, 0.0, 3.5, 2.0] } else { [0.0, 3.5, 0.0, 2.0] };
        assert_eq!(quantizer.amax_history().unwrap(), expected);
    }
    let one = DelayedScaling { amax_history_len: 1, ..short() };
    let mut quantizer = Quantizer::new(one, Direction::Forward, &device()).unwrap();
    quantizer.quantize(&tensor(&[3.5])).unwrap();
    assert_eq!((quantizer.amax_history().unwrap(), quantizer.scale().unwrap()), (vec![0.0], 128.0));
}

/// A second rank that has always seen an amax of 7, or that fails at one call.
#[derive(Debug, Default)]
struct Seven {
    calls: Mutex<Vec<String>>,
    fails: Option<&'static str>,
}

impl Seven {
    fn call(&self, name: &str, key: &str) -> Result<()> {
        self.calls.lock().unwrap().push(format!("{name} {}", key.split(" (").next().unwrap()));
        if self.fails == Some(name) { Err(Error::Group("rank 1 has left".into())) } else { Ok(()) }
    }

    fn calls(&self) -> Vec<String> {
        std::mem::take(&mut *self.calls.lock().unwrap())
    }
}

impl AmaxGroup for Seven {
    fn id(&self) -> &str {
        "tp"
    }

    fn world_size(&self) -> usize {
        2
    }

    fn agree_on_names(&self, key: &str, names: &[Arc<str>]) -> Result<()> {
        assert_eq!(names, ["fc.input".into()]);
        self.call("names", key)
    }

    fn agree_on_state(&self, key: &str, state: &[StateDigest]) -> Result<()> {
        assert_eq!(&*state[0].name, "the scale of `fc.input`");
        self.call("state", key)
    }

    fn all_reduce_max(&self, key: &str, arena: &Arena) -> Result<()> {
        self.call("reduce", key)?;
        Ok(arena.merge_staged(&[7.0])?)
    }

    fn poison(&self, reason: &str) {
        self.calls.lock().unwrap().push(format!("poison {reason}"));
    }
}

fn in_group(recipe: DelayedScaling, group: &Arc<Seven>) -> Quantizer {
    let mut quantizer = Quantizer::new(recipe, Direction::Forward, &device()).unwrap();
    quantizer.set_group("fc.input", group.clone());
    quantizer
}

#[test]
fn a_quantizer_reduces_its_amax_over_its_group() {
    let group = Arc::new(Seven::default());
    let mut quantizer = in_group(short(), &group);
    let x8 = quantizer.quantize(&tensor(&[3.5])).unwrap();
    assert_eq!(scale_of(&x8), 128.0); // the first scale is this rank's own
    assert_eq!(
        (quantizer.scale().unwrap(), quantizer.amax_history().unwrap()),
        (64.0, vec![0.0, 0.0, 0.0, 7.0])
    );
    let key = "quantizer fc.input, forward delayed";
    assert_eq!(group.calls(), ["names", "state", "reduce"].map(|call| format!("{call} {key}")));
    // A rank without elements takes part, and its history rolls as those of the others do.
    quantizer.quantize(&tensor(&[])).unwrap();
    assert_eq!(quantizer.amax_history().unwrap(), [0.0, 0.0, 7.0, 7.0]);
    assert_eq!(group.calls(), [format!("reduce {key}")]); // names and state are compared once

    let mut quantizer = in_group(DelayedScaling { reduce_amax: false, ..short() }, &group);
    quantizer.quantize(&tensor(&[3.5])).unwrap();
    assert_eq!(quantizer.scale().unwrap(), 128.0);
    assert!(group.calls().is_empty());
}

#[test]
fn a_quantizer_whose_group_fails_is_as_before_and_tells_the_other_ranks() {
    for fails in ["names", "state", "reduce"] {
        let group = Arc::new(Seven { fails: Some(fails), ..Seven::default() });
        let mut quantizer = in_group(short(), &group);
        assert_eq!(message(quantizer.quantize(&tensor(&[3.5]))), "rank 1 has left");
        assert_eq!((quantizer.scale().unwrap(), quantizer.amax_history().unwrap()), (1.0, vec![0.0; 4]));
        let last = group.calls().pop().unwrap();
        assert_eq!(last, "poison the quantizer `fc.input` failed: rank 1 has left");
    }
    // An error of this rank's own: the others must not wait for it.
    let group = Arc::new(Seven::default());
    let mut quantizer = in_group(short(), &group);
    let codes =
        ops::cast(&tensor(&[1.0]), DType::F32).and_then(|_| Tensor::from_vec(vec![1u8], [1], &device()));
    assert!(quantizer.quantize(&codes.unwrap()).is_err());
    let calls = group.calls();
    assert_eq!(calls.len(), 1);
    assert!(calls[0].starts_with("poison the quantizer `fc.input` failed: quantize: "), "{calls:?}");
}
