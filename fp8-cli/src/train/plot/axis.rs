//! Axes: where values are placed, where the labels are, and how numbers are written.

/// The largest number of labels on an axis.
const MAX_TICKS: usize = 7;

/// A range of values along one axis.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Axis {
    /// Ends of the axis; their decimal logarithms if it is logarithmic.
    low: f64,
    high: f64,
    logarithmic: bool,
    /// The least distance of two labels.
    least_step: f64,
}

impl Axis {
    /// An axis with room for the smallest and the largest value.
    pub(crate) fn linear(low: f64, high: f64, margin: f64) -> Self {
        let margin = ((high - low) * margin).max(high.abs().max(low.abs()) * 1e-6).max(1e-9);
        Self { low: low - margin, high: high + margin, logarithmic: false, least_step: 0.0 }
    }

    /// An axis that begins at zero.
    pub(crate) fn from_zero(high: f64) -> Self {
        let high = if high > 0.0 { high * 1.08 } else { 1.0 };
        Self { low: 0.0, high, logarithmic: false, least_step: 0.0 }
    }

    /// An axis of whole numbers that ends exactly at both values.
    pub(crate) fn whole(low: f64, high: f64) -> Self {
        let high = if high > low { high } else { low + 1.0 };
        Self { low, high, logarithmic: false, least_step: 1.0 }
    }

    /// A logarithmic axis for values above zero.
    pub(crate) fn logarithmic(low: f64, high: f64) -> Self {
        let (low, high) = (low.log10(), high.log10());
        let margin = ((high - low) * 0.06).max(0.1);
        Self { low: low - margin, high: high + margin, logarithmic: true, least_step: 0.0 }
    }

    /// The place of a value: 0 is the low end, 1 the high end. Values beyond the ends are placed beyond 0 and 1.
    pub(crate) fn place(&self, value: f64) -> f64 {
        let value = if self.logarithmic { value.log10() } else { value };
        (value - self.low) / (self.high - self.low)
    }

    /// Values that get a label, from low to high.
    pub(crate) fn ticks(&self) -> Vec<f64> {
        if !self.logarithmic {
            return self
                .even(nice_step((self.high - self.low) / (MAX_TICKS - 1) as f64).max(self.least_step));
        }
        let exponents = self.even(((self.high - self.low) / MAX_TICKS as f64).ceil().max(1.0));
        let decades: Vec<f64> = exponents.iter().map(|exponent| 10_f64.powf(*exponent)).collect();
        if decades.len() > 2 {
            return decades;
        }
        // One or two decades: label their halves and fifths, too.
        let mut ticks = Vec::new();
        for exponent in (self.low.floor() as i32)..=(self.high.ceil() as i32) {
            ticks.extend([1.0, 2.0, 5.0].map(|digit| digit * 10_f64.powi(exponent)));
        }
        ticks.retain(|&tick| (0.0..=1.0).contains(&self.place(tick)));
        match ticks.len() {
            0 | 1 => {
                let inner = |part: f64| 10_f64.powf(self.low + (self.high - self.low) * part);
                [0.2, 0.5, 0.8].map(inner).to_vec()
            }
            _ => ticks,
        }
    }

    /// Multiples of `step` within the axis.
    fn even(&self, step: f64) -> Vec<f64> {
        let (first, last) = ((self.low / step - 1e-9).ceil(), (self.high / step + 1e-9).floor());
        let count = (last - first).clamp(0.0, 4.0 * MAX_TICKS as f64) as usize;
        // Adding zero turns −0 into 0.
        (0..=count).map(|index| (first + index as f64) * step + 0.0).collect()
    }
}

/// The smallest of 1, 2 and 5 times a power of ten that is at least `least`.
fn nice_step(least: f64) -> f64 {
    let power = 10_f64.powf(least.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().find(|digit| digit * power >= least * (1.0 - 1e-9));
    step.unwrap_or(10.0) * power
}

/// Writes a number in few characters.
pub(crate) fn short(value: f64) -> String {
    let size = value.abs();
    let text = if value == 0.0 {
        "0".to_owned()
    } else if (1e-3..1e5).contains(&size) {
        let digits = if size < 0.1 { 5 } else { 3 };
        let text = format!("{value:.digits$}");
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        let text = format!("{value:.1e}");
        text.replace(".0e", "e")
    };
    text.replace('-', "−")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_numbers_within_the_axis() {
        assert_eq!(Axis::whole(1.0, 400.0).ticks(), [100.0, 200.0, 300.0, 400.0]);
        assert_eq!(Axis::whole(1.0, 1.0).ticks(), [1.0, 2.0]);
        assert_eq!(Axis::whole(1.0, 5.0).ticks(), [1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(
            Axis::from_zero(0.0).ticks(),
            [0.0, 0.2, 0.4, 0.6, 0.8, 1.0].map(|x: f64| (x * 5.0).round() * 0.2)
        );
        let decades: Vec<String> =
            Axis::logarithmic(1e-3, 2e2).ticks().iter().map(|&tick| short(tick)).collect();
        assert_eq!(decades, ["0.001", "0.01", "0.1", "1", "10", "100"]);
        let few: Vec<String> = Axis::logarithmic(0.4, 3.0).ticks().iter().map(|&tick| short(tick)).collect();
        assert_eq!(few, ["0.5", "1", "2"]);
    }

    #[test]
    fn any_range_has_a_few_ticks() {
        for (low, high) in
            [(0.0, 0.0), (-3.0, -3.0), (1e9, 1e9), (-1e-30, 1e30), (2.1, 2.100001), (0.0, 1e-9)]
        {
            let axis = Axis::linear(low, high, 0.06);
            let ticks = axis.ticks();
            assert!((2..=12).contains(&ticks.len()), "{low} to {high}: {ticks:?}");
            assert!(
                ticks.iter().all(|&tick| (-1e-6..1.000001).contains(&axis.place(tick))),
                "{low} to {high}: {ticks:?}"
            );
        }
        for (low, high) in [(1e-38, 3e38), (1.0, 1.0), (4.47, 4.48), (1e-45, 1e-44)] {
            let axis = Axis::logarithmic(low, high);
            let ticks = axis.ticks();
            assert!((2..=12).contains(&ticks.len()), "{low} to {high}: {ticks:?}");
            assert!(
                ticks.iter().all(|&tick| (0.0..=1.0).contains(&axis.place(tick))),
                "{low} to {high}: {ticks:?}"
            );
        }
    }

    #[test]
    fn numbers_are_short() {
        let texts: Vec<String> = [0.0, 0.05, 2.5, 448.0, 12_000.0, 1e5, 3.2e-4, -0.5].map(short).into();
        assert_eq!(texts, ["0", "0.05", "2.5", "448", "12000", "1e5", "3.2e−4", "−0.5"]);
    }
}
