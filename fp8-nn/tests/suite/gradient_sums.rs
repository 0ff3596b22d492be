//! Checks which gradients `all_reduce_gradients` sums: none twice over a group, and none that ranks computed with different
//! scales.

use crate::every_device::support::{
    by_name, current, custom, delayed, device, error, gpt_options, ids, linear, noise, off, rng, short, step,
};
use fp8_nn::fp8_dist::local;
use fp8_nn::prelude::*;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

type Group = Arc<dyn ProcessGroup>;

/// `f` on each of two ranks, with their handles of groups with these ids.
fn ranks(ids: &[&'static str], f: impl Fn(&[Group]) + Sync) {
    let mut of_rank = [Vec::new(), Vec::new()];
    for id in ids {
        let handles = local(id, 2, Duration::from_secs(60)).unwrap();
        of_rank.iter_mut().zip(handles).for_each(|(all, handle)| all.push(handle as Group));
    }
    thread::scope(|scope| {
        let f = &f;
        let ranks = of_rank.map(|groups| scope.spawn(move || f(&groups)));
        ranks.into_iter().for_each(|rank| rank.join().unwrap());
    });
}

/// A group of one rank.
fn alone() -> Group {
    local("alone", 1, Duration::from_secs(60)).unwrap().remove(0)
}

/// A Linear with gradients of a scope.
fn with_gradients(recipe: &Recipe, options: &AutocastOptions, group: Option<&Group>) -> Linear {
    let mut fc = linear("fc", 16, 16, 1);
    let mut scaling = Scaling::new(&fc, &device()).unwrap();
    group.into_iter().for_each(|group| scaling.set_group(group.clone()));
    step(&mut scaling, recipe, options, &mut fc, &noise([4, 16], 2), &noise([4, 16], 3)).unwrap();
    fc
}

#[test]
fn gradients_of_scopes_that_reduce_amaxes_without_a_group_are_refused() {
    let on = AutocastOptions::default;
    let alone_reduces: Recipe = DelayedScaling { reduce_amax: false, ..short() }.into();
    ranks(&["dp"], |groups| {
        let dp = &groups[0];
        let amax_reduction_group = Some(dp.clone() as Arc<dyn AmaxGroup>);
        let of_one = AutocastOptions {
            amax_reduction_group: Some(alone() as Arc<dyn AmaxGroup>),
            ..Default::default()
        };
        for (recipe, options, group) in [
            (delayed(), on(), None),
            (custom(), on(), None),
            (by_name(), on(), None),
            (delayed(), on(), Some(&alone())),
            (delayed(), of_one, Some(dp)),
        ] {
            let mut fc = with_gradients(&recipe, &options, group);
            let before = crate::every_device::support::grads(&fc);
            let text = error(all_reduce_gradients(&mut fc, &**dp));
            let start = "all_reduce_gradients: the gradient of `fc.weight` was computed under recipe ";
            assert!(text.starts_with(start), "{text}");
            assert!(text.contains("Scaling::set_group") && text.contains("allow_scales_per_rank"), "{text}");
            assert_eq!(crate::every_device::support::grads(&fc), before);
        }
        let text = error(all_reduce_gradients(&mut with_gradients(&delayed(), &on(), None), &**dp));
        assert_eq!(
            text,
            "all_reduce_gradients: the gradient of `fc.weight` was computed under recipe delayed (amax_history_len=4), which reduces \
             amaxes, in a scope without a group of more than one rank, so each rank has scales of its own: call \
             Scaling::set_group before the first scope, or set AutocastOptions::allow_scales_per_rank if that is intended"
        );
        for (recipe, options, group) in [
            (delayed(), on(), Some(dp)),
            (delayed(), AutocastOptions { amax_reduction_group, ..Default::default() }, None),
            (delayed(), AutocastOptions { allow_scales_per_rank: true, ..Default::default() }, None),
            (delayed(), off(), None),
            (delayed(), AutocastOptions { calibrating: true, ..off() }, None),
            (alone_reduces.clone(), on(), None),
            (current(), on(), None),
            (CurrentScaling::rowwise().into(), on(), None),
            (BlockScaling::default().into(), on(), None),
            (Mxfp8::default().into(), on(), None),
        ] {
            let mut fc = with_gradients(&recipe, &options, group);
            all_reduce_gradients(&mut fc, &**dp).unwrap_or_else(|error| panic!("{recipe}: {error}"));
        }
    });
}

#[test]
fn a_nested_recipe_that_reduces_amaxes_without_a_group_is_noted() {
    ranks(&["dp"], |groups| {
        for (allow_scales_per_rank, refused) in [(false, true), (true, false)] {
            let mut fc = linear("fc", 16, 16, 1);
            let mut scaling = Scaling::new(&fc, &device()).unwrap();
            let options = AutocastOptions { allow_scales_per_rank, ..Default::default() };
            let mut cx = scaling.scope(&current(), &options).unwrap();
            let (_, saved) = fc.forward(&mut cx.nested(&delayed()).unwrap(), &noise([4, 16], 2)).unwrap();
            cx.commit().unwrap();
            scaling.in_backward(|cx| fc.backward(cx, saved, &noise([4, 16], 3))).unwrap();
            assert_eq!(all_reduce_gradients(&mut fc, &*groups[0]).is_err(), refused);
        }
    });
}

#[test]
fn what_was_noted_of_a_gradient_is_gone_when_it_is_cleared_or_replaced() {
    ranks(&["dp"], |groups| {
        let refused = |fc: &mut Linear| all_reduce_gradients(fc, &*groups[0]).is_err();
        let new = || with_gradients(&delayed(), &AutocastOptions::default(), None);
        let (mut cleared, mut replaced, mut scaled) = (new(), new(), new());
        zero_grad(&mut cleared).unwrap();
        for parameter in parameters_mut(&mut replaced) {
            *parameter.main_grad_mut() = noise(*parameter.shape(), 4);
        }
        for parameter in parameters_mut(&mut scaled) {
            let grad = parameter.main_grad().clone();
            let half = ops::scale(&grad, 0.5).unwrap();
            drop(grad);
            parameter.main_grad_mut().copy_from(&half, "grad").unwrap(); // the same gradient in place
        }
        let refusals = [&mut cleared, &mut replaced, &mut scaled].map(refused);
        assert_eq!(refusals, [false, false, true]);
    });
}

/// The names of the gradients that are refused, one after the other.
fn refused_one_by_one(model: &mut Gpt, group: &Group) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    while let Err(refused) = all_reduce_gradients(model, &**group) {
        let text = refused.to_string();
        let name = text.split('`').nth(1).unwrap().to_owned();
        let mut all = parameters_mut(model).into_iter();
        all.find(|parameter| **parameter.name() == *name).unwrap().zero_grad().unwrap();
        assert!(names.insert(name), "{text}");
    }
    names
}

#[test]
fn every_gradient_that_a_scope_fills_is_noted() {
    let of = |options: GptOptions| Gpt::new("gpt", &options, &device(), &mut rng(1)).unwrap();
    let models = || {
        let small = GptOptions { num_layers: 1, ..gpt_options() };
        [
            of(GptOptions {
                learned_positions: true,
                layer: TransformerLayerOptions {
                    attention: AttentionOptions {
                        qk_norm: Some(NormOptions { normalization: Norm::RmsNorm, ..Default::default() }),
                        ..small.layer.attention
                    },
                    ..small.layer.clone()
                },
                ..small.clone()
            }),
            of(GptOptions {
                tie_word_embeddings: true,
                layer: TransformerLayerOptions { recompute: RecomputeLevel::Block, ..small.layer.clone() },
                ..small.clone()
            }),
            of(GptOptions {
                layer: TransformerLayerOptions {
                    attention: AttentionOptions { fp8_mha: Some(true), ..small.layer.attention },
                    recompute: RecomputeLevel::Norm,
                    ..small.layer.clone()
                },
                ..small
            }),
        ]
    };
    ranks(&["dp"], |groups| {
        for (index, mut model) in models().into_iter().enumerate() {
            for delays_wgrad in [false, true] {
                let mut scaling = Scaling::new(&model, &device()).unwrap();
                let [x, targets] = [2, 3].map(|seed| ids([1, 8], 20, seed));
                let forward = |cx: &mut Forward<'_>| model.loss(cx, &x, &targets);
                let (_, saved) = scaling.in_autocast(&delayed(), forward).unwrap();
                let mut cx = scaling.backward().unwrap();
                if delays_wgrad {
                    cx.delay_wgrad();
                }
                model.loss_backward(&mut cx, saved).unwrap();
                let wgrads = cx.take_wgrads();
                cx.commit().unwrap();
                backward_dw(&mut model, wgrads).unwrap();
                let all: BTreeSet<_> =
                    parameters(&model).iter().map(|parameter| parameter.name().to_string()).collect();
                assert_eq!(refused_one_by_one(&mut model, &groups[0]), all, "model {index}");
                zero_grad(&mut model).unwrap();
            }
        }
    });
}

#[test]
fn a_layer_of_the_users_own_notes_the_scope() {
    ranks(&["dp"], |groups| {
        let mut fc = linear("fc", 16, 16, 1);
        let mut scaling = Scaling::new(&fc, &device()).unwrap();
        scaling.autocast(&delayed()).unwrap().commit().unwrap();
        let ones = Tensor::full(1.0, [16], DType::F32, &device()).unwrap();
        let fill = |cx: &mut Backward<'_>| parameters_mut(&mut fc)[1].accumulate_in(cx, &ones);
        scaling.in_backward(fill).unwrap();
        let text = error(all_reduce_gradients(&mut fc, &*groups[0]));
        assert!(text.contains("the gradient of `fc.bias`"), "{text}");
    });
}

#[test]
fn gradients_are_summed_over_a_group_once_until_they_are_cleared() {
    ranks(&["dp", "cp"], |groups| {
        let [dp, cp] = groups else { panic!("{} groups", groups.len()) };
        let mut fc = with_gradients(&current(), &off(), None);
        let set = |fc: &mut Linear, value: f32| {
            for parameter in parameters_mut(fc) {
                let shape = *parameter.shape();
                *parameter.main_grad_mut() = Tensor::full(value, shape, DType::F32, &device()).unwrap();
            }
        };
        let add = |fc: &mut Linear| {
            for parameter in parameters_mut(fc) {
                let shape = *parameter.shape();
                let one = Tensor::full(1.0, shape, DType::F32, &device()).unwrap();
                parameter.accumulate(&one).unwrap();
            }
        };
        let sum = |fc: &mut Linear, group: &Group| all_reduce_gradients(fc, &**group);
        let holds = |fc: &Linear, value: f32| {
            assert!(fc.weight().main_grad().to_f32_vec().unwrap().iter().all(|&x| x == value));
        };
        set(&mut fc, 1.0);
        sum(&mut fc, dp).unwrap();
        let text = error(sum(&mut fc, dp));
        assert_eq!(
            text,
            "all_reduce_gradients: the gradient of `fc.weight` is already a sum over group `dp`, which a second one would multiply: \
             reduce once, after the last microbatch's backward, and call zero_grad before the next one"
        );
        add(&mut fc); // the next microbatch
        assert_eq!(error(sum(&mut fc, dp)), text);
        holds(&fc, 3.0); // 1 + 1, and 1
        sum(&mut fc, cp).unwrap(); // a mesh
        holds(&fc, 6.0);
        assert!(error(sum(&mut fc, cp)).contains("group `cp`"));
        // A step, clipping and a handle on the gradient clear nothing.
        let mut optimizer = AdamW::new(AdamWOptions::default()).unwrap();
        clip_grad_norm(&mut fc, 1e9).unwrap();
        optimizer.step(&mut fc, 0.1).unwrap();
        parameters_mut(&mut fc)[0].main_grad_mut().set_zero("grad").unwrap();
        assert_eq!(error(sum(&mut fc, dp)), text);
        zero_grad(&mut fc).unwrap();
        add(&mut fc);
        sum(&mut fc, dp).unwrap();
        holds(&fc, 2.0);
        set(&mut fc, 5.0); // replaced by the caller
        sum(&mut fc, dp).unwrap();
        holds(&fc, 10.0);
        // Shared storage is replaced by the sum, which is a sum all the same.
        zero_grad(&mut fc).unwrap();
        let shared = fc.weight().main_grad().clone();
        sum(&mut fc, dp).unwrap();
        drop(shared);
        assert_eq!(error(sum(&mut fc, dp)), text);
    });
}

/// Several small gradients, one of more bytes than a bucket has, an empty bucket behind it, and a last small one.
#[test]
fn sums_in_buckets_have_the_bits_of_sums_one_by_one() {
    let sizes = [(3, 5), (7, 1), (1100, 1000), (2, 2)];
    let model = |rank: u64| {
        let layers = sizes.iter().enumerate().map(|(i, &(inputs, outputs))| {
            let mut fc = linear(&format!("fc{i}"), inputs, outputs, 1);
            for (j, parameter) in parameters_mut(&mut fc).into_iter().enumerate() {
                let shape = *parameter.shape();
                let values = noise([1, shape.numel()], 100 * rank + 10 * i as u64 + j as u64);
                *parameter.main_grad_mut() = values.reshape(shape).unwrap();
            }
            Box::new(fc) as Box<dyn DynModule>
        });
        Stack(layers.collect())
    };
    let bits = |x: &Tensor| x.to_vec::<f32>().unwrap().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let expected: Vec<Vec<u32>> = parameters(&model(0))
        .iter()
        .zip(parameters(&model(1)))
        .map(|(first, second)| {
            let [first, second] =
                [first.main_grad(), second.main_grad()].map(|grad| grad.to_vec::<f32>().unwrap());
            first.iter().zip(&second).map(|(a, b)| (a + b).to_bits()).collect()
        })
        .collect();
    ranks(&["dp"], |groups| {
        let mut model = model(groups[0].rank() as u64);
        // A gradient that somebody else holds is replaced.
        let held = parameters(&model)[1].main_grad().clone();
        let before = bits(&held);
        all_reduce_gradients(&mut model, &*groups[0]).unwrap();
        let found: Vec<Vec<u32>> =
            parameters(&model).iter().map(|parameter| bits(parameter.main_grad())).collect();
        assert!(found == expected, "sums differ");
        assert_eq!(bits(&held), before);
        let again = all_reduce_gradients(&mut model, &*groups[0]).unwrap_err();
        assert!(matches!(again, fp8_nn::Error::SummedTwice { .. }), "{again}");
    });
}
