//! Training steps that are recorded as a graph and replayed, beside a CPU that runs each.

use fp8_nn::prelude::*;
use fp8_nn::rand::SeedableRng;
use fp8_nn::rand::rngs::StdRng;

use super::super::case::Case;
use super::super::draw::Kind;

struct Job {
    model: Linear,
    scaling: Scaling,
    optimizer: AdamW,
    recipe: Recipe,
}

impl Job {
    fn step(&mut self, x: &Tensor, dy: &Tensor) -> Result<Tensor> {
        let Self { model, scaling, optimizer, recipe } = self;
        zero_grad(model)?;
        let mut cx = scaling.autocast(recipe)?;
        let (y, saved) = model.forward(&mut cx, x)?;
        cx.commit()?;
        scaling.in_backward(|cx| model.backward(cx, saved, dy))?;
        clip_grad_norm(model, 1.0)?;
        optimizer.step(model, 0.01)?;
        Ok(y)
    }
}

pub(super) fn steps(case: &mut Case<'_>) -> Option<()> {
    let mut rng = StdRng::seed_from_u64(case.draw.bits());
    let (device, draw) = (case.device, &mut case.draw);
    let (rows, input, output) =
        (draw.pick(&[1, 3, 16, 17]), draw.pick(&[1, 5, 16, 32]), draw.pick(&[1, 7, 16, 33]));
    let recipe =
        Recipe::from(DelayedScaling { amax_history_len: draw.pick(&[1, 2, 4]), ..Default::default() });
    let bias = draw.flip();
    let options =
        LinearOptions { in_features: input, out_features: output, bias, init_std: 0.2, ..Default::default() };
    case.say(|| format!("{options:?}, {rows} rows"));
    let model = case.call("Linear::new", || Linear::new("fc", options, device, &mut rng))?;
    let scaling = case.call("Scaling::new", || Scaling::new(&model, device))?;
    let optimizer = case.call("AdamW::new", || AdamW::new(AdamWOptions::default()))?;
    let mut job = Job { model, scaling, optimizer, recipe };
    let mut x = case.tensor(&[rows, input], DType::F32, Kind::Noise)?.tensor;
    let dy = case.tensor(&[rows, output], DType::F32, Kind::Noise)?;
    for _ in 0..2 {
        let y = case.call("step", || job.step(&x, &dy))?;
        case.near("y", &y, 0.12);
    }
    let mut recorded = None;
    let y = case.call("step", || -> Result<Tensor> {
        if device.to_string() == "cpu" {
            return job.step(&x, &dy);
        }
        let (graph, y) = device.capture(|| job.step(&x, &dy))?;
        recorded = Some(graph);
        Ok(y)
    })?;
    case.near("y", &y, 0.12);
    let mut y = y;
    for _ in 0..case.draw.below(4) {
        let values = case.draw.floats(Kind::Noise, rows * input);
        case.call("write", || x.write(&values, "x"))?;
        case.call("step", || -> Result<()> {
            match &recorded {
                Some(graph) => graph.replay()?,
                None => y = job.step(&x, &dy)?,
            }
            Ok(())
        })?;
        case.near("y", &y, 0.12);
        case.text("updates", job.optimizer.steps());
    }
    Some(())
}
