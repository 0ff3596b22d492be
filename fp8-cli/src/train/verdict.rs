//! Whether FP8 trained as well as high precision, and how much of a difference chance alone makes.

use crate::page::signed;
use crate::train::options::RecipeName;
use crate::train::trainer::Run;
use crate::train::training::{End, Outcome};

/// Results of the training test, one line for each training; `data/README.md` says how they were measured.
const CONVERGENCE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/data/convergence.csv"));

/// The comparison of both trainings.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Verdict {
    /// Both are complete: how much higher FP8's held-out loss is, in percent.
    Compared { percent: f64 },
    /// A training ended without a result.
    Stopped { run: Run, end: End },
    /// There was no training in FP8.
    HighPrecisionOnly,
}

impl Verdict {
    pub(crate) fn new(outcomes: &[Outcome]) -> Self {
        if let Some(outcome) = outcomes.iter().find(|outcome| outcome.end != End::Complete) {
            return Self::Stopped { run: outcome.run, end: outcome.end };
        }
        let loss = |run| outcomes.iter().find(|outcome| outcome.run == run)?.held_out_loss;
        match (loss(Run::HighPrecision), loss(Run::Fp8)) {
            (Some(high_precision), Some(fp8)) => {
                Self::Compared { percent: 100.0 * (fp8 / high_precision - 1.0) }
            }
            _ => Self::HighPrecisionOnly,
        }
    }

    /// Returns by how many percent FP8's held-out loss is higher than high precision's, if both trainings are complete.
    pub(crate) fn percent(&self) -> Option<f64> {
        match self {
            Self::Compared { percent } => Some(*percent),
            Self::Stopped { .. } | Self::HighPrecisionOnly => None,
        }
    }

    /// The verdict in a few words.
    pub(crate) fn headline(&self) -> String {
        match self {
            Self::Compared { percent } => format!("{} % held-out loss in FP8", signed(*percent)),
            Self::Stopped { run, end: End::Diverged { step, .. } } => {
                format!("{} diverged at step {step}", capitalized(run.title()))
            }
            Self::Stopped { run, end: End::Interrupted { step } } => {
                format!("Interrupted after step {step} of the {} training", run.title())
            }
            Self::Stopped { .. } | Self::HighPrecisionOnly => "High precision only".to_owned(),
        }
    }

    /// Explains the headline in a sentence or two.
    pub(crate) fn explanation(&self, recipe: &RecipeName) -> String {
        match self {
            Self::Compared { .. } if spread(recipe).is_empty() => {
                "How much higher FP8's held-out loss is than high precision's. The training test has no trainings with \
                 this recipe to compare with."
                    .to_owned()
            }
            Self::Compared { percent } => {
                let spread = spread(recipe);
                let (low, high) = bounds(&spread);
                let place = match *percent {
                    percent if percent > high => "above that range",
                    percent if percent < low => "below that range",
                    _ => "within that range",
                };
                format!(
                    "How much higher FP8's held-out loss is than high precision's. The training test compares the \
                     two for small models and several seeds: its {} trainings with {recipe} scaling ended between \
                     {} % and {} %. This result is {place}.",
                    spread.len(),
                    signed(low),
                    signed(high),
                )
            }
            Self::Stopped { run, end: End::Diverged { loss, .. } } => format!(
                "The loss of that step was {loss}, so the {} training ended there and was not evaluated. A lower \
                 --lr may help. The plots show the steps until then.",
                run.title()
            ),
            Self::Stopped { .. } => {
                "There is no held-out loss to compare. The plots show the steps until then.".to_owned()
            }
            Self::HighPrecisionOnly => {
                "With --recipe none there is no training in FP8 to compare.".to_owned()
            }
        }
    }
}

fn capitalized(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

/// Returns how much higher FP8's held-out loss was in each training of the training test with this recipe, in percent.
pub(crate) fn spread(recipe: &RecipeName) -> Vec<f64> {
    let lines = CONVERGENCE.lines().map(|line| line.split(',').collect::<Vec<_>>());
    let percents = lines.filter_map(|fields| match fields[..] {
        [_, name, _, _, percent] if name == recipe.to_string() => percent.parse().ok(),
        _ => None,
    });
    percents.collect()
}

/// Smallest and largest value.
fn bounds(values: &[f64]) -> (f64, f64) {
    values
        .iter()
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), &value| (low.min(value), high.max(value)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::telemetry::Telemetry;

    fn outcome(run: Run, end: End, held_out_loss: Option<f64>) -> Outcome {
        Outcome {
            run,
            records: Vec::new(),
            telemetry: Telemetry::new(0),
            advice: Vec::new(),
            end,
            held_out_loss,
            memory: None,
            bytes_sent: 0,
        }
    }

    #[test]
    fn the_training_test_has_three_seeds_of_two_models_within_its_bound() {
        for recipe in [RecipeName::Delayed, RecipeName::Current] {
            let spread = spread(&recipe);
            assert_eq!(spread.len(), 6);
            assert!(spread.iter().all(|percent| percent.abs() < 1.0), "{spread:?}");
        }
        assert_eq!(bounds(&spread(&RecipeName::Delayed)), (-0.14, 0.18));
        assert_eq!(bounds(&spread(&RecipeName::Current)), (-0.33, 0.39));
        assert!(spread(&RecipeName::None).is_empty());
    }

    #[test]
    fn a_complete_comparison_is_a_percentage_beside_the_range() {
        let complete = |loss| {
            let high = outcome(Run::HighPrecision, End::Complete, Some(2.0));
            Verdict::new(&[high, outcome(Run::Fp8, End::Complete, Some(loss))])
        };
        for (loss, headline, place) in [
            (2.002, "+0.10 % held-out loss in FP8", "within"),
            (2.02, "+1.00 % held-out loss in FP8", "above"),
            (1.98, "−1.00 % held-out loss in FP8", "below"),
        ] {
            let verdict = complete(loss);
            assert_eq!(verdict.headline(), headline);
            let explanation = verdict.explanation(&RecipeName::Delayed);
            assert!(explanation.contains(&format!("{place} that range")), "{explanation}");
            assert!(explanation.contains("−0.14 % and +0.18 %"), "{explanation}");
            let explanation = verdict.explanation(&RecipeName::File("mine.toml".into()));
            assert!(
                explanation.ends_with("has no trainings with this recipe to compare with."),
                "{explanation}"
            );
        }
    }

    #[test]
    fn a_training_that_stops_has_no_percentage() {
        let high = || outcome(Run::HighPrecision, End::Complete, Some(2.0));
        let diverged = End::Diverged { step: 37, loss: f64::NAN };
        let verdict = Verdict::new(&[high(), outcome(Run::Fp8, diverged, None)]);
        assert_eq!((verdict.headline().as_str(), verdict.percent()), ("FP8 diverged at step 37", None));
        assert!(verdict.explanation(&RecipeName::Delayed).contains("was NaN"));
        let verdict = Verdict::new(&[outcome(Run::HighPrecision, End::Interrupted { step: 4 }, None)]);
        assert_eq!(verdict.headline(), "Interrupted after step 4 of the high precision training");
        let verdict = Verdict::new(&[high()]);
        assert_eq!(verdict.headline(), "High precision only");
    }
}
