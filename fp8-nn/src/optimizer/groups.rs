//! Parameters with a learning rate and a weight decay of their own.

use super::options::AdamWOptions;
use super::rule::Rule;
use crate::{Error, Layer, Result, parameters};
use fp8_kernels::Shape;
use fp8_recipe::matches_name;

/// The rates with which a launch updates parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Rates {
    pub(super) lr_factor: f32,
    pub(super) weight_decay: f32,
}

/// The different rates of an optimizer's parameters.
#[derive(Debug)]
pub(super) struct Groups {
    rates: Vec<Rates>,
    /// The places in `rates` of each group's matrices and of its other parameters, then of parameters without a group.
    places: Vec<[usize; 2]>,
}

impl Groups {
    pub(super) fn new(options: &AdamWOptions) -> Self {
        let mut rates = Vec::new();
        let mut place = |new: Rates| {
            let known = rates.iter().position(|&old| old == new);
            known.unwrap_or_else(|| {
                rates.push(new);
                rates.len() - 1
            })
        };
        let mut places_of = |lr_factor, weight_decay: Option<f32>| {
            [options.weight_decay, 0.0]
                .map(|default| place(Rates { lr_factor, weight_decay: weight_decay.unwrap_or(default) }))
        };
        let without = places_of(1.0, None);
        let mut places: Vec<_> =
            options.groups.iter().map(|group| places_of(group.lr_factor, group.weight_decay)).collect();
        places.push(without);
        Self { rates, places }
    }

    pub(super) fn rates(&self) -> impl Iterator<Item = &Rates> {
        self.rates.iter()
    }

    /// Returns the place in [`rates`](Self::rates) of a parameter's.
    pub(super) fn of(&self, options: &AdamWOptions, name: &str, shape: &Shape) -> usize {
        let group = options.groups.iter().position(|group| matches_name(&group.pattern, name));
        let [matrices, others] = self.places[group.unwrap_or(options.groups.len())];
        if shape.len() >= 2 { matrices } else { others }
    }

    /// Refuses a pattern that matches no parameter of a model.
    pub(super) fn expect_matches(
        &self,
        rule: Rule,
        options: &AdamWOptions,
        model: &(impl Layer + ?Sized),
    ) -> Result<()> {
        if options.groups.is_empty() {
            return Ok(());
        }
        let parameters = parameters(model);
        let is_idle =
            |pattern: &str| !parameters.iter().any(|parameter| matches_name(pattern, parameter.name()));
        match options.groups.iter().find(|group| is_idle(&group.pattern)) {
            None => Ok(()),
            Some(group) => Err(refused(
                rule,
                &format!("{:?}", group.pattern),
                "it matches no parameter of the model: expected a pattern such as \"*.bias\" or \"head\"",
            )),
        }
    }
}

pub(super) fn refused(rule: Rule, value: &str, remedy: &str) -> Error {
    Error::Option {
        part: rule.name().to_owned(),
        option: "groups",
        value: value.to_owned(),
        remedy: remedy.to_owned(),
    }
}
