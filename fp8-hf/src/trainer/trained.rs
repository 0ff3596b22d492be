//! The parameters of a model that are trained, as a checkpoint of an adapter holds them.

use fp8_nn::{Gpt, Layer, Parameter};
use fp8_recipe::{SlotName, Slots};

/// A model of which only the parameters that are trained are seen.
#[derive(Debug)]
pub(super) struct Trained<'a>(pub(super) &'a mut Gpt);

impl Slots for Trained<'_> {
    fn slots(&self, f: &mut dyn FnMut(&SlotName)) {
        self.0.slots(f);
    }
}

impl Layer for Trained<'_> {
    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Parameter)) {
        self.0.visit(&mut |parameter| {
            if parameter.is_trainable() {
                f(parameter);
            }
        });
    }

    fn visit_mut<'a>(&'a mut self, f: &mut dyn FnMut(&'a mut Parameter)) {
        self.0.visit_mut(&mut |parameter| {
            if parameter.is_trainable() {
                f(parameter);
            }
        });
    }
}
