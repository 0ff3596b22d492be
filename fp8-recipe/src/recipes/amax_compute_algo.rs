//! The algorithms by which delayed scaling chooses an amax from the window.

use crate::Result;
use crate::recipes::policy::out_of_range;
use crate::recipes::recipe_key::KeyText;
use crate::recipes::recipe_options::{FromValue, Value};
use fp8_kernels::ops::AmaxRule;
use std::fmt;
use std::sync::Arc;

/// The algorithm that chooses the amax of the window from which a scale is computed.
///
/// ```
/// use fp8_recipe::fp8_kernels::{Device, Tensor};
/// use fp8_recipe::{AmaxComputeAlgo, CustomAmax, DelayedScaling, Direction, Quantizer};
/// use std::sync::Arc;
///
/// let second = CustomAmax {
///     name: "second largest".into(),
///     function: Arc::new(|window: &[f32]| {
///         let mut sorted = window.to_vec();
///         sorted.sort_by(f32::total_cmp);
///         sorted[sorted.len() - 2]
///     }),
/// };
/// let device = Device::cpu();
/// let scale = |amax_compute_algo| {
///     let recipe = DelayedScaling { amax_compute_algo, ..Default::default() };
///     let mut quantizer = Quantizer::new(recipe, Direction::Forward, &device)?;
///     for amax in [7.0f32, 2.0, 3.5] {
///         quantizer.quantize(&Tensor::from_vec(vec![amax], [1], &device)?)?;
///     }
///     quantizer.scale()
/// };
/// assert_eq!(scale(AmaxComputeAlgo::Max)?, 64.0); // 448 / 7
/// assert_eq!(scale(AmaxComputeAlgo::MostRecent)?, 128.0); // 448 / 3.5
/// assert_eq!(scale(AmaxComputeAlgo::MaxOfLast(2))?, 128.0); // 448 / 3.5
/// assert_eq!(scale(AmaxComputeAlgo::Average { decay: 0.5 })?, 448.0 / 4.0); // 7, then 4.5, then 4
/// assert_eq!(scale(AmaxComputeAlgo::Custom(second))?, 128.0);
/// # Ok::<(), fp8_recipe::Error>(())
/// ```
#[derive(Debug, Clone)]
pub enum AmaxComputeAlgo {
    /// The largest amax of the window, the new one and the one that drops out included.
    Max,
    /// The newest amax.
    MostRecent,
    /// The largest of the newest `n` amaxes, the new one included; 1 ≤ `n` ≤ `amax_history_len`. With `amax_history_len` it is
    /// [`Max`](Self::Max), with 1 [`MostRecent`](Self::MostRecent). A scale reacts sooner to falling amaxes than under `Max`,
    /// and the history stays long enough for other recipes that start from it. In recipe files: `"max_of_last(16)"`.
    MaxOfLast(usize),
    /// An exponential average of the window, or the new amax where that is larger, so that nothing saturates that would not
    /// saturate under `MostRecent`. In recipe files: `"average(0.9)"`.
    ///
    /// Only the window is stored. Its amaxes `a`, from the oldest to the new one, give the average `m`: first `m = a`, then
    /// `m = (decay · m) + ((1 − decay) · a)`, each operation rounded to f32. Amaxes of 0 and NaN are skipped. An infinity in the
    /// window, which only [`record_non_finite`](crate::DelayedScaling::record_non_finite) admits, keeps the scale as it is.
    Average {
        /// The weight of the past, greater than 0 and less than 1.
        decay: f32,
    },
    /// A function of yours. It runs on the host: each commit waits for the device, copies the whole history of its pass to the
    /// host and back, 4 · `amax_history_len` bytes for each slot, and cannot be recorded in a graph. At the default length of
    /// 1024, a pass of 1000 slots copies about 4 MB each way.
    Custom(CustomAmax),
}

/// The type of a user's amax function: window, oldest to newest → amax.
pub(crate) type AmaxFunction = dyn Fn(&[f32]) -> f32 + Send + Sync;

/// A function that chooses an amax, with a name: see the example of [`AmaxComputeAlgo`].
///
/// Arenas and checkpoints go by the name, so two functions need two names.
#[derive(Clone)]
pub struct CustomAmax {
    /// The function's identity.
    pub name: Arc<str>,
    /// Takes the window, oldest amax first, and returns the amax that determines the scale. If it is 0 or less,
    /// infinite or NaN, the scale stays as it is.
    pub function: Arc<AmaxFunction>,
}

impl AmaxComputeAlgo {
    /// Checks the options for a history of `history_len` rows.
    pub(crate) fn validate(&self, recipe: &'static str, history_len: usize) -> Result<()> {
        let refused = |remedy| Err(out_of_range(recipe, "amax_compute_algo", self, remedy));
        match *self {
            Self::MaxOfLast(n) if !(1..=history_len).contains(&n) => {
                refused("expected 1 to amax_history_len amaxes")
            }
            Self::Average { decay } if !(decay > 0.0 && decay < 1.0) => {
                refused("expected a decay between 0 and 1, exclusive")
            }
            _ => Ok(()),
        }
    }

    /// Returns the rule of the update.
    pub(crate) fn rule(&self) -> AmaxRule<'_> {
        match self {
            Self::Max => AmaxRule::Max,
            Self::MostRecent => AmaxRule::MostRecent,
            Self::MaxOfLast(n) => AmaxRule::MaxOfLast(*n),
            Self::Average { decay } => AmaxRule::Average { decay: *decay },
            Self::Custom(custom) => AmaxRule::Custom(&*custom.function),
        }
    }
}

/// Writes the name that recipe files and checkpoints have: `max`, `most_recent`, `max_of_last(16)`, `average(0.9)`,
/// `custom("name")`.
///
/// ```
/// use fp8_recipe::AmaxComputeAlgo;
/// assert_eq!(AmaxComputeAlgo::MaxOfLast(16).to_string(), "max_of_last(16)");
/// assert_eq!(AmaxComputeAlgo::Average { decay: 0.9 }.to_string(), "average(0.9)");
/// ```
impl fmt::Display for AmaxComputeAlgo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Max => f.write_str("max"),
            Self::MostRecent => f.write_str("most_recent"),
            Self::MaxOfLast(n) => write!(f, "max_of_last({n})"),
            Self::Average { decay } => write!(f, "average({decay})"),
            Self::Custom(custom) => write!(f, "custom({:?})", custom.name),
        }
    }
}

impl KeyText for AmaxComputeAlgo {
    fn key_text(&self) -> String {
        self.to_string()
    }
}

impl FromValue for AmaxComputeAlgo {
    const EXPECTED: &'static str = "\"max\", \"most_recent\", \"max_of_last(n)\" or \"average(decay)\"";

    fn from_value(value: &Value) -> Option<Self> {
        let Value::Text(name) = value else { return None };
        let argument = |kind: &str| name.strip_prefix(kind)?.strip_prefix('(')?.strip_suffix(')');
        match &**name {
            "max" => Some(Self::Max),
            "most_recent" => Some(Self::MostRecent),
            _ => match (argument("max_of_last"), argument("average")) {
                (Some(n), _) => n.parse().ok().map(Self::MaxOfLast),
                (_, Some(decay)) => decay.parse().ok().map(|decay| Self::Average { decay }),
                _ => None,
            },
        }
    }
}

impl fmt::Debug for CustomAmax {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CustomAmax({})", self.name)
    }
}
