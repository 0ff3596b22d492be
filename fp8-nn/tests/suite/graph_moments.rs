//! Recorded steps with moments in FP8: each replay draws the random numbers of its own step.

use crate::every_device::fp8_weights::Job;
use crate::every_device::support::{current, device, ids, linear, noise, parameter_bits};
use fp8_nn::prelude::*;

fn options() -> AdamWOptions {
    let norms = ParameterGroup { pattern: "norm".to_owned(), lr_factor: 0.5, weight_decay: Some(0.1) };
    AdamWOptions { moments: MomentDtype::Fp8, groups: vec![norms], ..Default::default() }
}

#[test]
fn replays_have_the_bits_of_eager_steps() {
    for fp8_weights in [false, true] {
        let job = || {
            let mut job = Job::plain(3, &current());
            job.optimizer = AdamW::new(options()).unwrap();
            if fp8_weights {
                job.optimizer.quantize_weights(&mut job.model, &current()).unwrap();
            }
            job
        };
        let (mut eager, mut recorded) = (job(), job());
        let (ids, targets) = (ids([2, 8], 20, 1), ids([2, 8], 20, 2));
        let bits = |loss: &Tensor| loss.item().unwrap().to_bits();
        for _ in 0..2 {
            let losses = [&mut eager, &mut recorded].map(|job| bits(&job.queue(&ids, &targets).unwrap()));
            assert_eq!(losses[0], losses[1]);
        }
        let (graph, loss) = device().capture(|| recorded.queue(&ids, &targets)).unwrap();
        assert_eq!(bits(&eager.queue(&ids, &targets).unwrap()), bits(&loss), "the recorded step itself");
        for step in 0..4 {
            recorded.optimizer.set_lr(recorded.lr).unwrap();
            graph.replay().unwrap();
            assert_eq!(bits(&eager.queue(&ids, &targets).unwrap()), bits(&loss), "replay {step}");
        }
        assert!(eager.codes() == recorded.codes());
        assert_eq!((eager.optimizer.steps(), recorded.optimizer.steps()), (7, 7));
    }
}

/// The numbers of the bias correction are the device's, and those of the random numbers count skipped steps, too.
#[test]
fn replays_with_a_loss_scaler_have_the_bits_of_eager_steps() {
    let job = || {
        let scaler = LossScaler::new(LossScalerOptions::default(), &device()).unwrap();
        (
            linear("fc", 200, 16, 1),
            AdamW::new(AdamWOptions { groups: Vec::new(), ..options() }).unwrap(),
            scaler,
        )
    };
    let (mut eager, mut recorded) = (job(), job());
    let step = |(model, optimizer, scaler): &mut (Linear, AdamW, LossScaler)| {
        scaler.step(optimizer, model, 0.01)?;
        scaler.update()
    };
    let set = |model: &mut Linear, step: u64| {
        for parameter in parameters_mut(model) {
            let mut values = noise(*parameter.shape(), step).to_vec::<f32>().unwrap();
            values.iter_mut().for_each(|value| *value *= 1000.0);
            if step == 4 {
                values[3] = f32::INFINITY;
            }
            parameter.main_grad_mut().write(&values, "grad").unwrap();
        }
    };
    let mut graph = None;
    for number in 0..7 {
        set(&mut eager.0, number);
        step(&mut eager).unwrap();
        set(&mut recorded.0, number);
        match (&graph, number) {
            (_, 0..2) => step(&mut recorded).unwrap(),
            (None, _) => graph = Some(device().capture(|| step(&mut recorded)).unwrap().0),
            (Some(graph), _) => graph.replay().unwrap(),
        }
        assert!(parameter_bits(&eager.0) == parameter_bits(&recorded.0), "step {number}");
    }
    assert_eq!((recorded.1.steps(), recorded.1.updates().unwrap()), (7, 6));
}

#[test]
fn replays_of_other_optimizers_have_the_bits_of_eager_steps() {
    fn compare<O: Optimizer>(new: impl Fn() -> O) {
        let (mut eager, mut recorded) =
            ((linear("fc", 200, 16, 1), new()), (linear("fc", 200, 16, 1), new()));
        let set = |model: &mut Linear, step: u64| {
            for parameter in parameters_mut(model) {
                let values = noise(*parameter.shape(), step).to_vec::<f32>().unwrap();
                parameter.main_grad_mut().write(&values, "grad").unwrap();
            }
        };
        let lr = |step: u64| 0.1 / (1.0 + step as f32);
        let mut graph = None;
        for step in 0..5 {
            set(&mut eager.0, step);
            set(&mut recorded.0, step);
            eager.1.step(&mut eager.0, lr(step)).unwrap();
            let (model, optimizer) = &mut recorded;
            match (&graph, step) {
                (_, 0..2) => optimizer.step(model, lr(step)).unwrap(),
                (None, _) => graph = Some(device().capture(|| optimizer.step(model, lr(step))).unwrap().0),
                (Some(graph), _) => {
                    optimizer.set_lr(lr(step)).unwrap();
                    graph.replay().unwrap();
                }
            }
            assert!(parameter_bits(&eager.0) == parameter_bits(&recorded.0), "step {step}");
        }
    }
    compare(|| Lion::new(LionOptions { moments: MomentDtype::Fp8, ..Default::default() }).unwrap());
    compare(|| Sgd::new(SgdOptions { weight_decay: 0.1, ..Default::default() }).unwrap());
}
