//! Parameters with a learning rate and a weight decay of their own.

use super::AdamWOptions;
use crate::{Error, Layer, Result, parameters};
use fp8_kernels::Shape;
use fp8_recipe::matches_name;

/// Parameters of [`AdamWOptions::groups`]: those whose names match a pattern, with a learning rate and a weight decay of their own.
///
/// ```
/// use fp8_nn::prelude::*;
///
/// let group = |pattern: &str| ParameterGroup { pattern: pattern.to_owned(), ..Default::default() };
/// let groups = vec![
///     ParameterGroup { lr_factor: 0.1, ..group("*.embedding.weight") }, // a tenth of the learning rate
///     ParameterGroup { weight_decay: Some(0.0), ..group("head") },      // no decay for the head, whatever its shape
/// ];
/// let mut optimizer = AdamW::new(AdamWOptions { groups, ..Default::default() })?;
///
/// let options = LinearOptions { in_features: 4, out_features: 4, ..Default::default() };
/// let mut other = Linear::new("fc", options, &Device::cpu(), &mut fp8_nn::rand::rng())?;
/// let refused = optimizer.step(&mut other, 1e-3).unwrap_err();
/// assert_eq!(
///     refused.to_string(),
///     "AdamW: groups = \"*.embedding.weight\": it matches no parameter of the model: expected a pattern such as \"*.bias\" or \"head\""
/// );
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterGroup {
    /// The pattern of the names. `*` stands for any text, as in `*.bias` or `gpt.blocks.0.*`; a pattern without `*` matches a name
    /// that has it as a part between dots, as `norm` matches `gpt.norm.weight`. Required. A step refuses a pattern that matches no
    /// parameter of its model, frozen ones included.
    pub pattern: String,
    /// The factor of the learning rate, 0 or more. Default: 1.
    pub lr_factor: f32,
    /// The weight decay of all parameters of the group, whatever their dimensions. Default: `None`, which is that of
    /// [`AdamWOptions::weight_decay`] for parameters with two dimensions or more.
    pub weight_decay: Option<f32>,
}

impl Default for ParameterGroup {
    fn default() -> Self {
        Self { pattern: String::new(), lr_factor: 1.0, weight_decay: None }
    }
}

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
    pub(super) fn expect_matches(&self, options: &AdamWOptions, model: &(impl Layer + ?Sized)) -> Result<()> {
        if options.groups.is_empty() {
            return Ok(());
        }
        let parameters = parameters(model);
        let is_idle =
            |pattern: &str| !parameters.iter().any(|parameter| matches_name(pattern, parameter.name()));
        match options.groups.iter().find(|group| is_idle(&group.pattern)) {
            None => Ok(()),
            Some(group) => Err(refused(
                &format!("{:?}", group.pattern),
                "it matches no parameter of the model: expected a pattern such as \"*.bias\" or \"head\"",
            )),
        }
    }
}

pub(super) fn refused(value: &str, remedy: &str) -> Error {
    Error::Option {
        part: "AdamW".to_owned(),
        option: "groups",
        value: value.to_owned(),
        remedy: remedy.to_owned(),
    }
}
