//! Optimizers that are chosen when a program runs.

use crate::any_optimizer::sealed;
use crate::{
    AdamW, AdamWOptions, Layer, Lion, LionOptions, Optimizer, ParameterGroup, Result, Sgd, SgdOptions,
};
use fp8_recipe::Recipe;

/// One of the optimizers, for programs that choose it when they run.
///
/// ```
/// use fp8_nn::prelude::*;
/// use fp8_nn::{AnyOptimizer, AnyOptimizerOptions};
///
/// let options = LinearOptions { in_features: 4, out_features: 4, ..Default::default() };
/// let mut fc = Linear::new("fc", options, &Device::cpu(), &mut fp8_nn::rand::rng())?;
/// for options in [AnyOptimizerOptions::Sgd(SgdOptions::default()), AnyOptimizerOptions::default()] {
///     let mut optimizer = AnyOptimizer::new(options)?;
///     optimizer.step(&mut fc, 1e-3)?;
///     assert_eq!(optimizer.steps(), 1);
/// }
/// # Ok::<(), fp8_nn::Error>(())
/// ```
#[derive(Debug)]
pub enum AnyOptimizer {
    /// [`AdamW`].
    AdamW(AdamW),
    /// [`Lion`].
    Lion(Lion),
    /// [`Sgd`].
    Sgd(Sgd),
}

/// Options of an [`AnyOptimizer`], where there is an example.
#[derive(Debug, Clone, PartialEq)]
pub enum AnyOptimizerOptions {
    /// Those of [`AdamW`].
    AdamW(AdamWOptions),
    /// Those of [`Lion`].
    Lion(LionOptions),
    /// Those of [`Sgd`].
    Sgd(SgdOptions),
}

impl Default for AnyOptimizerOptions {
    fn default() -> Self {
        Self::AdamW(AdamWOptions::default())
    }
}

impl AnyOptimizerOptions {
    /// Returns the groups of parameters.
    ///
    /// ```
    /// assert!(fp8_nn::AnyOptimizerOptions::default().groups().is_empty());
    /// ```
    pub fn groups(&self) -> &[ParameterGroup] {
        match self {
            Self::AdamW(options) => &options.groups,
            Self::Lion(options) => &options.groups,
            Self::Sgd(options) => &options.groups,
        }
    }

    /// Returns the same options with other groups.
    ///
    /// ```
    /// use fp8_nn::{AnyOptimizerOptions, ParameterGroup};
    /// let group = ParameterGroup { pattern: "*.bias".to_owned(), ..Default::default() };
    /// assert_eq!(AnyOptimizerOptions::default().with_groups(vec![group]).groups().len(), 1);
    /// ```
    #[must_use]
    pub fn with_groups(self, groups: Vec<ParameterGroup>) -> Self {
        match self {
            Self::AdamW(options) => Self::AdamW(AdamWOptions { groups, ..options }),
            Self::Lion(options) => Self::Lion(LionOptions { groups, ..options }),
            Self::Sgd(options) => Self::Sgd(SgdOptions { groups, ..options }),
        }
    }

    /// Returns the bytes of the optimizer's moments for each value of a parameter, without those of FP8's scales.
    ///
    /// ```
    /// use fp8_nn::{AnyOptimizerOptions, LionOptions};
    /// assert_eq!(AnyOptimizerOptions::default().moment_bytes(), 8);
    /// assert_eq!(AnyOptimizerOptions::Lion(LionOptions::default()).moment_bytes(), 4);
    /// ```
    pub fn moment_bytes(&self) -> usize {
        let (count, moments) = match self {
            Self::AdamW(options) => (2, options.moments),
            Self::Lion(options) => (1, options.moments),
            Self::Sgd(options) => (1, options.moments),
        };
        count * moments.tensor_dtype().size()
    }

    /// Returns whether the optimizer keeps f32 copies of parameters in 16 bits.
    ///
    /// ```
    /// assert!(fp8_nn::AnyOptimizerOptions::default().has_main_params());
    /// ```
    pub fn has_main_params(&self) -> bool {
        match self {
            Self::AdamW(options) => options.main_params,
            Self::Lion(options) => options.main_params,
            Self::Sgd(options) => options.main_params,
        }
    }
}

impl AnyOptimizer {
    /// Creates an optimizer that has taken no step.
    ///
    /// # Errors
    /// Those of [`AdamW::new`], [`Lion::new`] and [`Sgd::new`].
    pub fn new(options: AnyOptimizerOptions) -> Result<Self> {
        Ok(match options {
            AnyOptimizerOptions::AdamW(options) => Self::AdamW(AdamW::new(options)?),
            AnyOptimizerOptions::Lion(options) => Self::Lion(Lion::new(options)?),
            AnyOptimizerOptions::Sgd(options) => Self::Sgd(Sgd::new(options)?),
        })
    }

    /// Stores the weights of a model's FP8 GEMMs in FP8, for training: see [`AdamW::quantize_weights`].
    ///
    /// ```
    /// use fp8_nn::prelude::*;
    /// use fp8_nn::{AnyOptimizer, AnyOptimizerOptions};
    /// let options = LinearOptions { in_features: 64, out_features: 64, ..Default::default() };
    /// let mut fc = Linear::new("fc", options, &Device::cpu(), &mut fp8_nn::rand::rng())?;
    /// let mut optimizer = AnyOptimizer::new(AnyOptimizerOptions::default())?;
    /// assert_eq!(optimizer.quantize_weights(&mut fc, &CurrentScaling::default().into())?, 1);
    /// # Ok::<(), fp8_nn::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`AdamW::quantize_weights`].
    pub fn quantize_weights(&mut self, model: &mut (impl Layer + ?Sized), recipe: &Recipe) -> Result<usize> {
        sealed::HasState::state_mut(self).quantize_weights(model, recipe)
    }
}

impl sealed::HasState for AnyOptimizer {
    fn state(&self) -> &AdamW {
        match self {
            Self::AdamW(optimizer) => optimizer,
            Self::Lion(optimizer) => sealed::HasState::state(optimizer),
            Self::Sgd(optimizer) => sealed::HasState::state(optimizer),
        }
    }

    fn state_mut(&mut self) -> &mut AdamW {
        match self {
            Self::AdamW(optimizer) => optimizer,
            Self::Lion(optimizer) => sealed::HasState::state_mut(optimizer),
            Self::Sgd(optimizer) => sealed::HasState::state_mut(optimizer),
        }
    }
}

impl Optimizer for AnyOptimizer {}
