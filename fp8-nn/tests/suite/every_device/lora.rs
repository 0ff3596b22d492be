//! Low-rank adapters: against layers whose weights contain the product, and training beside frozen codes.

use super::fp8_weights::{Job, batch};
use super::support::{assert_close, device, error, linear, noise, recipes, relative_rms, rng, step, values};
use fp8_nn::LoraOptions;
use fp8_nn::prelude::*;
use std::ops::Range;

fn set(parameter: &mut Parameter, seed: u64) {
    let value = noise(*parameter.shape(), seed);
    parameter.set(ops::cast(&value, parameter.dtype()).unwrap()).unwrap();
}

/// `[rows, n] · [n, columns]`.
fn product(a: &[f32], b: &[f32], n: usize) -> Vec<f32> {
    let columns = b.len() / n;
    let one = |row: &[f32], column: usize| {
        row.iter().enumerate().map(|(i, a)| f64::from(*a) * f64::from(b[i * columns + column])).sum::<f64>()
            as f32
    };
    a.chunks(n).flat_map(|row| (0..columns).map(|column| one(row, column)).collect::<Vec<_>>()).collect()
}

fn turned(x: &[f32], columns: usize) -> Vec<f32> {
    (0..columns)
        .flat_map(|column| x.iter().skip(column).step_by(columns).copied().collect::<Vec<_>>())
        .collect()
}

const CASES: [(Range<usize>, usize, f32); 3] = [(5..11, 3, 0.5), (0..4, 2, -1.5), (11..12, 1, 2.0)];

#[test]
fn an_adapter_is_a_part_of_the_weight() {
    let (inputs, features) = (10, 12);
    let mut plain = linear("fc", inputs, features, 5);
    let mut adapted = linear("fc", inputs, features, 5);
    for (number, (rows, rank, scale)) in CASES.iter().enumerate() {
        let options = LoraOptions { rank: *rank, scale: *scale, ..Default::default() };
        adapted.loras_mut().add(&format!("part{number}"), rows.clone(), &options, &mut rng(1)).unwrap();
    }
    let names: Vec<String> = parameters(&adapted).iter().map(|p| p.name().to_string()).collect();
    assert_eq!(names[..4], ["fc.weight", "fc.bias", "fc.lora.part1.a", "fc.lora.part1.b"]);
    let x = noise([2, 3, inputs], 8);
    let mut scaling = Scaling::new(&adapted, &device()).unwrap();
    let (before, _) = scaling.in_autocast(&Recipe::off(), |cx| adapted.forward(cx, &x)).unwrap();
    let mut scaling = Scaling::new(&plain, &device()).unwrap();
    let (base, _) = scaling.in_autocast(&Recipe::off(), |cx| plain.forward(cx, &x)).unwrap();
    assert_eq!(values(&before), values(&base), "B is 0 at first");

    for (seed, parameter) in parameters_mut(&mut adapted).into_iter().skip(2).enumerate() {
        set(parameter, 20 + seed as u64);
    }
    let mut weight = values(plain.weight().tensor());
    for lora in adapted.loras().all() {
        let ba = product(&values(lora.b().tensor()), &values(lora.a().tensor()), lora.a().shape()[0]);
        let place = &mut weight[lora.rows().start * inputs..lora.rows().end * inputs];
        place.iter_mut().zip(ba).for_each(|(w, ba)| *w += lora.scale() * ba);
    }
    let weight = Tensor::from_vec(weight, [features, inputs], &device()).unwrap();
    parameters_mut(&mut plain)[0].set(weight).unwrap();

    let dy = noise([2, 3, features], 9);
    let run = |layer: &mut Linear| {
        let mut scaling = Scaling::new(layer, &device()).unwrap();
        let (y, dx) =
            step(&mut scaling, &Recipe::off(), &AutocastOptions::default(), layer, &x, &dy).unwrap();
        (values(&y), values(&dx))
    };
    let (expected, found) = (run(&mut plain), run(&mut adapted));
    assert_close("y", &expected.0, &found.0, 2e-6);
    assert_close("dx", &expected.1, &found.1, 2e-6);
    // dA = s · Bᵀ · dW and dB = s · dW · Aᵀ, of the adapter's rows of dW.
    let dw = values(plain.weight().main_grad());
    for lora in adapted.loras().all() {
        let (rank, rows) = (lora.a().shape()[0], lora.rows());
        let dw = &dw[rows.start * inputs..rows.end * inputs];
        let scaled = |x: Vec<f32>| x.into_iter().map(|x| lora.scale() * x).collect::<Vec<_>>();
        let da = scaled(product(&turned(&values(lora.b().tensor()), rank), dw, rows.len()));
        let db = scaled(product(dw, &turned(&values(lora.a().tensor()), inputs), inputs));
        assert_close("dA", &da, &values(lora.a().main_grad()), 3e-6);
        assert_close("dB", &db, &values(lora.b().main_grad()), 3e-6);
    }
    assert_close("dW", &dw, &values(adapted.weight().main_grad()), 1e-6);
}

/// Adds adapters to all Linears of a model, and freezes the rest.
fn adapt(model: &mut Gpt) {
    let options = LoraOptions { rank: 4, ..Default::default() };
    let mut seed = 0;
    model.visit_loras_mut(&mut |loras| {
        let [features, _] = loras.weight_shape();
        loras.add("first", 0..features / 3, &options, &mut rng(seed)).unwrap();
        loras.add("last", features / 2..features, &options, &mut rng(seed + 1)).unwrap();
        seed += 2;
    });
    for parameter in parameters_mut(model) {
        let is_adapter = parameter.name().contains(".lora.");
        parameter.set_trainable(is_adapter).unwrap();
    }
}

#[test]
fn adapters_train_beside_frozen_codes_under_every_recipe() {
    for recipe in recipes() {
        let mut job = Job::plain(3, &recipe);
        let mut base = Job::plain(3, &recipe);
        adapt(&mut job.model);
        for job in [&mut job, &mut base] {
            job.optimizer.quantize_weights(&mut job.model, &recipe).unwrap();
        }
        job.scaling = Scaling::new(&job.model, &device()).unwrap();
        let (ids, targets) = batch(0);
        let [first, expected] = [&mut job, &mut base].map(|job| {
            let loss = job.backward(&ids, &targets).unwrap().item().unwrap();
            zero_grad(&mut job.model).unwrap();
            loss
        });
        assert!((first - expected).abs() <= 1e-5 * expected, "{recipe}: {first} and {expected} of the base");
        let before = job.codes();
        let last = (0..8).map(|_| job.step(0)).last().unwrap();
        assert!(last < first, "{recipe}: {last} after {first}");
        assert!(before == job.codes(), "{recipe}: codes have changed");
        assert_eq!(job.codes().len(), 8, "{recipe}");
    }
}

#[test]
fn adapters_that_are_not_those_of_the_forward_pass_are_refused_and_no_gradient_changes() {
    let options = LoraOptions { rank: 2, ..Default::default() };
    let mut fc = linear("fc", 4, 6, 1);
    let (x, dy) = (noise([3, 4], 1), noise([3, 6], 2));
    let mut scaling = Scaling::new(&fc, &device()).unwrap();
    let mut forward = |fc: &Linear| scaling.in_autocast(&Recipe::off(), |cx| fc.forward(cx, &x)).unwrap().1;
    let without = forward(&fc);
    fc.loras_mut().add("k", 4..6, &options, &mut rng(1)).unwrap();
    let before = forward(&fc);
    fc.loras_mut().add("q", 0..4, &options, &mut rng(2)).unwrap();
    let (frozen_base, frozen_adapter) = {
        parameters_mut(&mut fc)[0].set_trainable(false).unwrap();
        let frozen_base = forward(&fc);
        parameters_mut(&mut fc)[0].set_trainable(true).unwrap();
        let freeze = |fc: &mut Linear, trainable| {
            for parameter in parameters_mut(fc).into_iter().filter(|p| p.is_adapter()) {
                parameter.set_trainable(trainable).unwrap();
            }
        };
        freeze(&mut fc, false);
        let frozen_adapter = forward(&fc);
        freeze(&mut fc, true);
        (frozen_base, frozen_adapter)
    };
    let gradients = |fc: &Linear| -> Vec<f32> {
        parameters(fc).into_iter().flat_map(|p| values(p.main_grad())).collect()
    };
    let none = gradients(&fc);
    for (saved, expected) in [
        (without, "a layer with other adapters"),
        (before, "a layer with other adapters"),
        (frozen_base, "the weight was frozen in the forward pass"),
        (frozen_adapter, "the weight was frozen in the forward pass"),
    ] {
        let error = error(scaling.in_backward(|cx| fc.backward(cx, saved, &dy)));
        assert!(error.contains(expected), "{error}");
        assert_eq!(gradients(&fc), none);
    }
}

#[test]
fn gradients_in_fp8_are_near_those_in_high_precision() {
    let gradients = |recipe: Option<&str>| {
        let named = Recipe::from_name(recipe.unwrap_or("current")).unwrap();
        let mut job = Job::plain(3, &named);
        adapt(&mut job.model);
        for (seed, parameter) in parameters_mut(&mut job.model).into_iter().enumerate() {
            if parameter.name().ends_with(".b") {
                let value = ops::scale(&noise(*parameter.shape(), seed as u64), 0.05).unwrap();
                parameter.set(value).unwrap();
            }
        }
        job.scaling = Scaling::new(&job.model, &device()).unwrap();
        let (ids, targets) = batch(0);
        if recipe.is_some() {
            job.backward(&ids, &targets).unwrap();
        } else {
            let (_, saved) =
                job.scaling.in_autocast(&Recipe::off(), |cx| job.model.loss(cx, &ids, &targets)).unwrap();
            job.scaling.in_backward(|cx| job.model.loss_backward(cx, saved)).unwrap();
        }
        parameters(&job.model).into_iter().flat_map(|p| values(p.main_grad())).collect::<Vec<_>>()
    };
    let found = relative_rms(&gradients(None), &gradients(Some("current")));
    assert!(found > 1e-4 && found < 0.2, "{found}");
}

#[test]
fn adapters_that_do_not_fit_are_refused() {
    let mut fc = linear("fc", 4, 6, 1);
    let mut add = |name: &str, rows: Range<usize>, options: LoraOptions| {
        error(fc.loras_mut().add(name, rows, &options, &mut rng(1)))
    };
    let options = || LoraOptions { rank: 2, ..Default::default() };
    let found = [
        add("a", 0..2, LoraOptions { rank: 0, ..options() }),
        add("a", 0..2, LoraOptions { scale: f32::NAN, ..options() }),
        add("a", 0..2, LoraOptions { params_dtype: DType::U8, ..options() }),
        add("a", 2..2, options()),
        add("a", 4..7, options()),
    ];
    let expected = [
        "fc.lora.a: rank = 0: expected at least 1",
        "fc.lora.a: scale = NaN: expected a finite number",
        "fc.lora.a: params_dtype = u8: expected f32, bf16 or f16",
        "fc.lora.a: rows = 2..2: expected a part of 0..6, the rows of the weight",
        "fc.lora.a: rows = 4..7: expected a part of 0..6, the rows of the weight",
    ];
    assert_eq!(found, expected);
    fc.loras_mut().add("a", 2..4, &options(), &mut rng(1)).unwrap();
    let found = [
        error(fc.loras_mut().add("b", 3..6, &options(), &mut rng(1))),
        error(fc.loras_mut().add("a", 4..6, &options(), &mut rng(1))),
    ];
    let expected = [
        "fc.lora.b: rows = 3..6: 2..4 has an adapter: expected other rows",
        "fc.lora.a: name = a: expected a name that no other adapter of the layer has",
    ];
    assert_eq!(found, expected);
}
