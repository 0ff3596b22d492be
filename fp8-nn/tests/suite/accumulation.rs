//! The recipe chooses how each GEMM of a layer accumulates: the plans of the GPU's products say what reaches cuBLASLt.

use crate::every_device::support::{linear, noise, off, step};
use fp8_nn::prelude::*;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Keeps what events say about products that were planned.
#[derive(Clone, Default)]
struct Plans(Arc<Mutex<Vec<String>>>);

impl Subscriber for Plans {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.fields().field("product").is_some()
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        event.record(&mut Product(self));
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

struct Product<'a>(&'a Plans);

impl Visit for Product<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "product" {
            self.0.0.lock().unwrap().push(format!("{value:?}"));
        }
    }
}

/// Whether fprop, dgrad and wgrad of a step were planned with fast accumulation. `size` is one that no other step here has.
fn is_fast(recipe: &Recipe, options: &AutocastOptions, size: usize) -> Vec<bool> {
    let mut model = linear("fc", size, 2 * size, 1);
    let (x, dy) = (noise([16, size], 2), noise([16, 2 * size], 3));
    let mut scaling = Scaling::new(&model, x.device()).unwrap();
    let plans = Plans::default();
    tracing::subscriber::with_default(plans.clone(), || {
        step(&mut scaling, recipe, options, &mut model, &x, &dy).unwrap();
    });
    let plans = plans.0.lock().unwrap();
    plans.iter().map(|product| product.split(' ').any(|word| word == "fast")).collect()
}

#[test]
fn the_recipe_chooses_how_gemms_accumulate() {
    let on = AutocastOptions::default();
    assert_eq!(is_fast(&DelayedScaling::default().into(), &on, 96), [true, false, false]);
    for (index, split) in
        [(false, true, true), (true, false, false), (false, false, true), (true, true, true)]
            .into_iter()
            .enumerate()
    {
        let recipe = CurrentScaling { use_split_accumulator: split, ..Default::default() };
        let (fprop, dgrad, wgrad) = split;
        assert_eq!(is_fast(&recipe.into(), &on, 112 + 16 * index), [!fprop, !dgrad, !wgrad]);
    }
    assert_eq!(is_fast(&CurrentScaling::default().into(), &off(), 80), [false; 3]); // products in high precision
}
