//! Recorded steps of a model whose weights are stored in FP8: each replay reads the codes that the last one wrote.

use crate::every_device::fp8_weights::Job;
use crate::every_device::own_block::wrap;
use crate::every_device::support::{bits, delayed, device, error, ids, parameter_bits};
use fp8_nn::prelude::*;

#[test]
fn replays_write_the_codes_in_place() {
    for recipe in [Recipe::from_name("block").unwrap(), delayed()] {
        let (mut eager, mut recorded) = (Job::fp8(3, &recipe), Job::fp8(3, &recipe));
        let (ids, targets) = (ids([2, 8], 20, 1), ids([2, 8], 20, 2));
        let bits = |loss: &Tensor| loss.item().unwrap().to_bits();
        for _ in 0..2 {
            let losses = [&mut eager, &mut recorded].map(|job| bits(&job.queue(&ids, &targets).unwrap()));
            assert_eq!(losses[0], losses[1], "{recipe}");
        }
        let (graph, loss) = device().capture(|| recorded.queue(&ids, &targets)).unwrap();
        assert_eq!(
            bits(&eager.queue(&ids, &targets).unwrap()),
            bits(&loss),
            "{recipe}: the recorded step itself"
        );
        for _ in 0..3 {
            graph.replay().unwrap();
            assert_eq!(bits(&eager.queue(&ids, &targets).unwrap()), bits(&loss), "{recipe}");
            assert!(eager.codes() == recorded.codes(), "{recipe}");
        }
        // Between replays a step may be queued as ever.
        let losses = [&mut eager, &mut recorded].map(|job| bits(&job.queue(&ids, &targets).unwrap()));
        assert_eq!(losses[0], losses[1], "{recipe}");
        graph.replay().unwrap();
        assert_eq!(bits(&eager.queue(&ids, &targets).unwrap()), bits(&loss), "{recipe}");
        if let Err(refused) =
            device().capture(|| recorded.optimizer.quantize_weights(&mut recorded.model, &recipe).map(drop))
        {
            panic!("nothing is left to store: {refused}");
        }
        let mut plain = crate::every_device::support::gpt(1);
        let refused = error(device().capture(|| quantize_weights(&mut plain, &recipe).map(drop)));
        assert!(refused.contains("store the codes of weights before a step is recorded"), "{refused}");
    }
}

#[test]
fn replays_update_each_group_with_its_own_rates() {
    let recipe = delayed();
    let job = || {
        let mut job = Job::plain(3, &recipe);
        let group = |pattern: &str, lr_factor, weight_decay| ParameterGroup {
            pattern: pattern.to_owned(),
            lr_factor,
            weight_decay,
        };
        let groups = vec![group("*.mlp.*", 0.25, Some(0.3)), group("embedding", 4.0, None)];
        job.optimizer = AdamW::new(AdamWOptions { groups, ..Default::default() }).unwrap();
        job.optimizer.quantize_weights(&mut job.model, &recipe).unwrap();
        job
    };
    let (mut eager, mut recorded) = (job(), job());
    let (ids, targets) = (ids([2, 8], 20, 1), ids([2, 8], 20, 2));
    let everything = |job: &Job| {
        let tables: Vec<_> = parameters(&job.model).into_iter().filter(|p| p.fp8().is_none()).collect();
        (job.codes(), tables.into_iter().map(|p| bits(p.tensor())).collect::<Vec<_>>())
    };
    for job in [&mut eager, &mut recorded] {
        job.queue(&ids, &targets).unwrap();
    }
    let (graph, _) = device().capture(|| recorded.queue(&ids, &targets)).unwrap();
    eager.queue(&ids, &targets).unwrap();
    assert!(everything(&eager) == everything(&recorded), "the recorded step itself");
    for lr in [0.02, 0.002] {
        recorded.optimizer.set_lr(lr).unwrap();
        graph.replay().unwrap();
        eager.lr = lr;
        eager.queue(&ids, &targets).unwrap();
        assert!(everything(&eager) == everything(&recorded), "a replay at {lr}");
    }
}

#[test]
fn recorded_steps_pass_through_frozen_codes() {
    for recipe in ["rowwise", "mxfp8"].map(|name| Recipe::from_name(name).unwrap()) {
        let job = || {
            let mut job = Job::plain(3, &recipe);
            assert_eq!(quantize_weights(&mut job.model, &recipe).unwrap(), 8);
            job
        };
        let (mut eager, mut recorded) = (job(), job());
        let (ids, targets) = (ids([2, 8], 20, 1), ids([2, 8], 20, 2));
        for job in [&mut eager, &mut recorded] {
            job.queue(&ids, &targets).unwrap();
        }
        let (graph, _) = device().capture(|| recorded.queue(&ids, &targets)).unwrap();
        graph.replay().unwrap();
        (0..2).for_each(|_| drop(eager.queue(&ids, &targets).unwrap()));
        let values = |job: &Job| -> Vec<_> {
            parameters(&job.model).into_iter().map(|p| bits(&p.values(DType::F32).unwrap())).collect()
        };
        assert!(values(&eager) == values(&recorded), "{recipe}");
    }
}

#[test]
fn blocks_of_the_users_own_are_recorded() {
    let recipe = delayed();
    let job = || {
        let mut job = Job::plain(3, &recipe);
        job.model = wrap(job.model);
        job.scaling = Scaling::new(&job.model, &device()).unwrap();
        job
    };
    let (mut eager, mut recorded) = (job(), job());
    let (ids, targets) = (ids([2, 8], 20, 1), ids([2, 8], 20, 2));
    for job in [&mut eager, &mut recorded] {
        job.queue(&ids, &targets).unwrap();
    }
    let (graph, _) = device().capture(|| recorded.queue(&ids, &targets)).unwrap();
    graph.replay().unwrap();
    (0..2).for_each(|_| drop(eager.queue(&ids, &targets).unwrap()));
    assert!(parameter_bits(&eager.model) == parameter_bits(&recorded.model));
}
