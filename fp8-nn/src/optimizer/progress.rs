//! The numbers of an optimizer's step, which recorded steps share with the optimizer.

use super::Counts;
use super::groups::{Groups, Rates};
use super::options::AdamWOptions;
use super::rule::Rule;
use crate::{Error, Layer, Result, parameters};
use fp8_kernels::ops::{AdamWFactors, AdamWStep, SkippedSteps, UpdateCount};
use fp8_kernels::{Device, Replayed};
use fp8_recipe::WeightVersion;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The values that change from step to step.
#[derive(Debug)]
pub(super) struct Progress {
    pub(super) options: AdamWOptions,
    pub(super) rule: Rule,
    pub(super) groups: Groups,
    step: AtomicU64,
    lr: Mutex<f32>,
    /// The skipped steps before those that the device has counted.
    skipped_before: AtomicU64,
    on_device: OnceLock<OnDevice>,
    /// The updates that the bias corrections count, if they are not all steps.
    updates: Updates,
}

/// The updates that the bias corrections count, since steps that a loss scaler skips do not count. They are counted on the
/// device from the first step with a scaler on.
#[derive(Debug, Default)]
struct Updates {
    counted: OnceLock<UpdateCount>,
    /// A count that was loaded before there was one on the device.
    loaded: Mutex<Option<u64>>,
}

/// The buffers that the device reads and writes.
#[derive(Debug)]
pub(super) struct OnDevice {
    /// The factors of a step, for each of the groups' rates.
    pub(super) factors: Vec<Arc<AdamWFactors>>,
    pub(super) skipped: SkippedSteps,
}

impl Progress {
    pub(super) fn new(rule: Rule, options: AdamWOptions) -> Self {
        Self {
            groups: Groups::new(&options),
            options,
            rule,
            step: AtomicU64::new(0),
            lr: Mutex::new(0.0),
            skipped_before: AtomicU64::new(0),
            on_device: OnceLock::new(),
            updates: Updates::default(),
        }
    }

    /// Returns the number of updates that the bias corrections count; `None` if they count steps.
    pub(super) fn updates(&self) -> Result<Option<u64>> {
        match self.updates.counted.get() {
            Some(counted) => Ok(Some(counted.read()?)),
            None => Ok(self.updates.loaded()),
        }
    }

    /// Returns the count on the device if the bias corrections need one; `is_scaled` says that the next step has a scaler.
    pub(super) fn update_count(&self, device: &Device, is_scaled: bool) -> Result<Option<&UpdateCount>> {
        let loaded = self.updates.loaded();
        if self.updates.counted.get().is_none() && (is_scaled || loaded.is_some()) {
            let counted = UpdateCount::new(loaded.unwrap_or_else(|| self.steps()), device)?;
            self.updates.counted.get_or_init(|| counted);
        }
        Ok(self.updates.counted.get())
    }

    pub(super) fn steps(&self) -> u64 {
        self.step.load(Relaxed)
    }

    pub(super) fn skipped_steps(&self) -> Result<u64> {
        let on_device = self.on_device.get();
        let counted = on_device.map_or(Ok(0), |on_device| on_device.skipped.read())?;
        Ok(self.skipped_before.load(Relaxed).saturating_add(counted))
    }

    /// Sets the counts with which the optimizer continues.
    pub(super) fn resume(&self, Counts { steps, skipped, updates }: Counts) -> Result<()> {
        self.on_device.get().map_or(Ok(()), |on_device| on_device.skipped.reset())?;
        match self.updates.counted.get() {
            Some(counted) => counted.set(updates.unwrap_or(steps))?,
            None => *self.updates.loaded.lock().unwrap_or_else(PoisonError::into_inner) = updates,
        }
        self.skipped_before.store(skipped, Relaxed);
        self.step.store(steps, Relaxed);
        Ok(())
    }

    /// Returns the buffers on the device. The first call allocates them.
    pub(super) fn on_device(&self, device: &Device) -> Result<&OnDevice> {
        if let Some(made) = self.on_device.get() {
            return Ok(made);
        }
        let factors = self.groups.rates().map(|rates| AdamWFactors::new(&self.numbers(rates), device));
        let factors = factors.collect::<fp8_kernels::Result<_>>()?;
        let made = OnDevice { factors, skipped: SkippedSteps::new(device)? };
        Ok(self.on_device.get_or_init(|| made))
    }

    pub(super) fn set_lr(&self, lr: f32) -> Result<()> {
        self.check_lr(lr)?;
        *self.lr.lock().unwrap_or_else(PoisonError::into_inner) = lr;
        Ok(())
    }

    /// Refuses a learning rate that is negative or not finite, for any of the groups.
    pub(super) fn check_lr(&self, lr: f32) -> Result<()> {
        let is_valid = |lr: f32| lr >= 0.0 && lr.is_finite();
        let refused = self.groups.rates().find(|rates| !is_valid(lr * rates.lr_factor));
        let factor = refused.map_or(1.0, |rates| rates.lr_factor);
        if is_valid(lr) && refused.is_none() {
            return Ok(());
        }
        let remedy = "expected finite and 0 or more".to_owned();
        Err(Error::Option {
            part: self.rule.name().to_owned(),
            option: "lr",
            value: lr.to_string(),
            remedy: match is_valid(lr) {
                true => format!("{remedy}; it is multiplied by lr_factor = {factor}"),
                false => remedy,
            },
        })
    }

    /// Returns the factors of the present step for parameters with these rates.
    fn numbers(&self, &Rates { lr_factor, weight_decay }: &Rates) -> AdamWStep {
        let AdamWOptions { beta1, beta2, eps, .. } = self.options;
        let lr = *self.lr.lock().unwrap_or_else(PoisonError::into_inner) * lr_factor;
        let step = self.step.load(Relaxed).max(1);
        AdamWStep { lr, beta1, beta2, eps, weight_decay, step, grad_scale: 1.0 }
    }
}

impl Updates {
    fn loaded(&self) -> Option<u64> {
        *self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Replayed for Progress {
    fn advance(&self) -> fp8_kernels::Result<()> {
        self.step.fetch_add(1, Relaxed);
        let Some(OnDevice { factors, .. }) = self.on_device.get() else { return Ok(()) };
        let mut all = self.groups.rates().zip(factors);
        let set = all.try_for_each(|(rates, factors)| factors.set(&self.numbers(rates)));
        set.inspect_err(|_| self.retreat())
    }

    fn retreat(&self) {
        self.step.fetch_sub(1, Relaxed);
    }
}

/// The versions of parameters that a recorded step changes.
#[derive(Debug)]
pub(super) struct Versions(pub(super) Vec<Arc<WeightVersion>>);

impl Replayed for Versions {
    fn advance(&self) -> fp8_kernels::Result<()> {
        self.0.iter().for_each(|version| version.advance());
        Ok(())
    }

    fn retreat(&self) {
        self.0.iter().for_each(|version| version.retreat());
    }
}

/// The parameters that have seen a step, changed or not.
#[derive(Debug)]
pub(super) struct Ended(pub(super) Vec<Arc<WeightVersion>>);

impl Ended {
    pub(super) fn of(model: &(impl Layer + ?Sized)) -> Arc<Self> {
        let versions = parameters(model).into_iter().map(|parameter| parameter.shared_version().clone());
        Arc::new(Self(versions.collect()))
    }
}

impl Replayed for Ended {
    fn advance(&self) -> fp8_kernels::Result<()> {
        self.0.iter().for_each(|version| version.end_step());
        Ok(())
    }

    fn retreat(&self) {
        self.0.iter().for_each(|version| version.resume_step());
    }
}
