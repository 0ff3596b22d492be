//! Quantizers outside a model that share their amaxes over a group.

use crate::{Group, SHORT, f32s, ranks, try_ranks};
use fp8_kernels::Device;
use fp8_recipe::{DelayedScaling, Direction, Quantizer};

fn recipe() -> DelayedScaling {
    DelayedScaling { amax_history_len: 4, ..Default::default() }
}

fn quantizer(group: &Group, name: &str, recipe: DelayedScaling) -> Quantizer {
    let mut quantizer = Quantizer::new(recipe, Direction::Forward, &Device::cpu()).unwrap();
    quantizer.set_group(name, group.clone());
    quantizer
}

fn quantize(quantizer: &mut Quantizer, amax: f32) -> Result<(), String> {
    quantizer.quantize(&f32s(&[amax], &[1])).map(drop).map_err(|error| error.to_string())
}

#[test]
fn quantizers_of_a_group_have_equal_scales_and_histories() {
    let states = ranks(3, |group| {
        let mut quantizer = quantizer(&group, "x", recipe().with_jax_rules());
        for step in 0..4 {
            quantize(&mut quantizer, (1 + group.rank() * 4 + step) as f32).unwrap();
        }
        (quantizer.scale().unwrap(), quantizer.amax_history().unwrap())
    });
    for state in states {
        assert_eq!(state, (448.0 / 12.0, vec![0.0, 10.0, 11.0, 12.0]));
    }
}

#[test]
fn ranks_that_call_different_quantizers_get_an_error() {
    let other = DelayedScaling { margin: 1, ..recipe() };
    for (mine, theirs) in [(("x", recipe()), ("y", recipe())), (("x", recipe()), ("x", other))] {
        let errors = ranks(2, |group| {
            let (name, recipe) = if group.rank() == 0 { mine.clone() } else { theirs.clone() };
            let mut quantizer = quantizer(&group, name, recipe);
            let error = quantize(&mut quantizer, 3.5).unwrap_err();
            assert_eq!((quantizer.scale().unwrap(), quantizer.amax_history().unwrap()), (1.0, vec![0.0; 4]));
            error
        });
        for error in errors {
            assert!(error.contains("quantizer x") && error.contains(theirs.0), "{error}");
        }
    }
}

#[test]
fn quantizers_of_different_states_get_an_error() {
    let errors = ranks(2, |group| {
        let mut quantizer = Quantizer::new(recipe(), Direction::Forward, &Device::cpu()).unwrap();
        quantize(&mut quantizer, 3.5 * (1 + group.rank()) as f32).unwrap();
        quantizer.set_group("x", group.clone());
        quantize(&mut quantizer, 3.5).unwrap_err()
    });
    for error in errors {
        assert!(error.contains("the scale of `x`"), "{error}");
    }
}

#[test]
fn a_quantizer_of_a_rank_that_left_or_failed_is_an_error_on_the_others() {
    let errors = try_ranks(2, SHORT, |group| {
        let mut quantizer = quantizer(&group, "x", recipe());
        quantize(&mut quantizer, 3.5).unwrap();
        if group.rank() == 1 { Ok(()) } else { quantize(&mut quantizer, 7.0) }
    });
    assert!(errors.into_iter().next().unwrap().unwrap().is_err());

    let errors = ranks(2, |group| {
        let mut quantizer = quantizer(&group, "x", recipe());
        let codes = fp8_kernels::Tensor::from_vec(vec![1u8], [1], &Device::cpu()).unwrap();
        match group.rank() {
            0 => quantize(&mut quantizer, 3.5),
            _ => quantizer.quantize(&codes).map(drop).map_err(|error| error.to_string()),
        }
    });
    let [waiting, own] = &errors[..] else { panic!("{errors:?}") };
    assert!(own.as_ref().unwrap_err().starts_with("quantize: "), "{own:?}");
    assert!(waiting.as_ref().unwrap_err().contains("the quantizer `x` failed: quantize: "), "{waiting:?}");
}
