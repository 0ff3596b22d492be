//! Heat maps: a row for each of several series, a column for each step, and a shade for each value.

use std::fmt::Write as _;

use super::axis::short;
use crate::page::escape;

/// The number of shades in the style sheet, from the lowest values to the highest. They differ in lightness, so that they can
/// be told apart without seeing colours.
const SHADES: usize = 6;

/// At most this many pixels for a row, and for all rows of a map together.
const ROW: f64 = 15.0;
const ROWS: f64 = 420.0;

/// Pixels between the labels of rows.
const LABEL: f64 = 14.0;

/// The shades of a heat map, and the range of values for each.
#[derive(Debug, Clone)]
pub(crate) struct Shades {
    /// The lowest value of each shade but the first.
    bounds: Vec<f64>,
    labels: Vec<String>,
    /// The legend's label for 0, if 0 has a colour of its own.
    zero: Option<&'static str>,
}

impl Shades {
    /// Shades for shares of 0 to 1, of which 0 has a colour of its own.
    pub(crate) fn shares(bounds: &[f64; SHADES - 1]) -> Self {
        let percent = |share: f64| format!("{} %", short(100.0 * share));
        let mut labels = vec![format!("below {}", percent(bounds[0]))];
        labels.extend(bounds.iter().map(|&bound| format!("from {}", percent(bound))));
        Self { bounds: bounds.to_vec(), labels, zero: Some("none") }
    }

    /// Shades of equal ratios between the smallest and the largest value above 0. `None` if there is no such value.
    pub(crate) fn logarithmic(values: impl Iterator<Item = f64>) -> Option<Self> {
        let logarithms = values.filter(|value| *value > 0.0).map(f64::log10);
        Self::between(logarithms, |logarithm| 10_f64.powf(logarithm), "")
    }

    /// Shades of equal width between the smallest and the largest value, with a unit. `None` if there is no finite value.
    /// Together they are at least `least` wide, so that small differences do not look large.
    pub(crate) fn linear(values: impl Iterator<Item = f64>, least: f64, unit: &str) -> Option<Self> {
        let values: Vec<f64> = values.filter(|value| value.is_finite()).collect();
        let (_, high) = super::bounds(values.iter().copied());
        let low = high - least;
        let extended = values.into_iter().chain(Some(low).filter(|low| low.is_finite()));
        Self::between(extended, |value| value, unit)
    }

    fn between(places: impl Iterator<Item = f64>, value: impl Fn(f64) -> f64, unit: &str) -> Option<Self> {
        let (low, high) = super::bounds(places.filter(|place| place.is_finite()));
        if low > high {
            return None;
        }
        let bound = |shade: usize| value(low + (high - low) * shade as f64 / SHADES as f64);
        let label = |value: f64| {
            let digits = 2 - (value.abs().log10().floor() as i32).clamp(-9, 2);
            let scale = 10_f64.powi(digits);
            format!("from {}{unit}", short((value * scale).round() / scale))
        };
        // The first shade has no lower bound, so that rounding in `value` leaves no value without a shade.
        let labels = (0..SHADES).map(|shade| label(bound(shade))).collect();
        Some(Self { bounds: (1..SHADES).map(bound).collect(), labels, zero: None })
    }

    /// Returns the class of a value in the style sheet. `None` if it has no colour.
    fn class(&self, value: f64) -> Option<String> {
        match self.zero {
            _ if value.is_nan() => None,
            Some(_) if value == 0.0 => Some("zero".to_owned()),
            _ => Some(format!("s{}", self.bounds.iter().filter(|bound| value >= **bound).count())),
        }
    }

    /// Returns a legend of all shades.
    pub(crate) fn legend(&self) -> String {
        let mut html = String::from("<div class=\"legend shades\">");
        if let Some(zero) = self.zero {
            let _ = write!(html, "<span><i class=\"zero\"></i>{zero}</span>");
        }
        for (shade, label) in self.labels.iter().enumerate() {
            let _ = write!(html, "<span><i class=\"s{shade}\"></i>{label}</span>");
        }
        html + "</div>\n"
    }
}

/// One map.
#[derive(Debug, Clone)]
pub(crate) struct Map<'a> {
    /// The name of each row, and its value in each column.
    pub(crate) rows: Vec<(String, Vec<Option<f64>>)>,
    /// The step of each column.
    pub(crate) steps: &'a [usize],
}

impl Map<'_> {
    /// Returns the map without its legend.
    pub(crate) fn html(&self, shades: &Shades) -> String {
        let (rows, columns) = (self.rows.len().max(1), self.steps.len().max(1));
        let row = ROW.min(ROWS / rows as f64);
        let height = row * rows as f64;
        let mut html = format!(
            "<div class=\"map\" role=\"img\" aria-label=\"{rows} layers over steps\">\n<div class=\"rows\" \
             style=\"height:{height:.0}px\">"
        );
        let labelled = (LABEL / row).ceil() as usize;
        for (index, (name, _)) in self.rows.iter().enumerate().step_by(labelled.max(1)) {
            let top = 100.0 * (index as f64 + 0.5) / rows as f64;
            let _ = write!(html, "<span style=\"top:{top:.2}%\">{}</span>", escape(name));
        }
        let _ = writeln!(
            html,
            "</div>\n<svg viewBox=\"0 0 {columns} {rows}\" preserveAspectRatio=\"none\" style=\"height:{height:.0}px\">"
        );
        for (class, path) in self.paths(shades) {
            let _ = writeln!(html, "<path class=\"heat {class}\" d=\"{path}\"/>");
        }
        html += "</svg>\n<div class=\"xs\">";
        for column in (0..4).map(|tick| tick * (columns - 1) / 3) {
            let Some(step) = self.steps.get(column) else { continue };
            let left = 100.0 * (column as f64 + 0.5) / columns as f64;
            let _ = write!(html, "<span style=\"left:{left:.2}%\">{step}</span>");
            if columns < 4 {
                break;
            }
        }
        html + "</div>\n</div>\n<div class=\"x-name\">step</div>\n"
    }

    /// Returns the cells of each class as one path, in which neighbours of a row are one line.
    fn paths(&self, shades: &Shades) -> Vec<(String, String)> {
        let mut paths: Vec<(String, String)> = Vec::new();
        for (index, (_, values)) in self.rows.iter().enumerate() {
            let classes: Vec<_> = values.iter().map(|value| value.and_then(|v| shades.class(v))).collect();
            let mut column = 0;
            for run in classes.chunk_by(|a, b| a == b) {
                if let Some(Some(class)) = run.first() {
                    let line = format!("M{column} {index}.5h{}", run.len());
                    match paths.iter_mut().find(|(known, _)| known == class) {
                        Some((_, path)) => path.push_str(&line),
                        None => paths.push((class.clone(), line)),
                    }
                }
                column += run.len();
            }
        }
        paths
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_have_shades_by_powers_of_ten_and_zero_has_its_own() {
        let shades = Shades::shares(&[1e-5, 1e-4, 1e-3, 1e-2, 1e-1]);
        let class = |value| shades.class(value).unwrap_or_default();
        assert_eq!([0.0, 1e-9, 1e-5, 0.05, 0.1, 1.0].map(class), ["zero", "s0", "s1", "s4", "s5", "s5"]);
        let legend = shades.legend();
        assert!(legend.contains("none<") && legend.contains("below 0.001 %") && legend.contains("from 10 %"));
    }

    #[test]
    fn other_values_have_shades_between_the_smallest_and_the_largest() {
        let shades = Shades::logarithmic([0.0, 1e-3, 1e3].into_iter()).unwrap();
        let class = |value| shades.class(value).unwrap_or_default();
        assert_eq!([1e-3, 0.02, 0.5, 5.0, 500.0, 1e3].map(class), ["s0", "s1", "s2", "s3", "s5", "s5"]);
        assert!(shades.legend().contains("from 0.001<") && shades.legend().contains("from 100<"));
        let shades = Shades::linear([30.0, 24.0, f64::INFINITY].into_iter(), 1.0, " dB").unwrap();
        assert_eq!(shades.class(f64::INFINITY).as_deref(), Some("s5"));
        assert!(shades.legend().contains("from 25 dB"), "{}", shades.legend());
        assert_eq!(shades.class(f64::NAN), None);
        assert!(Shades::logarithmic([0.0, f64::NAN].into_iter()).is_none());
        // One value is enough.
        let shades = Shades::linear([37.0].into_iter(), 6.0, " dB").unwrap();
        assert_eq!(shades.class(37.0).as_deref(), Some("s5"));
        assert!(shades.legend().contains("from 31 dB") && shades.legend().contains("from 36 dB"));
        assert!(Shades::linear([f64::NAN].into_iter(), 6.0, "").is_none());
    }

    #[test]
    fn neighbours_of_one_shade_are_one_line_and_missing_values_leave_a_gap() {
        let shades = Shades::shares(&[1e-5, 1e-4, 1e-3, 1e-2, 1e-1]);
        let rows = vec![
            ("a".to_owned(), vec![Some(0.0), Some(0.0), Some(0.5), None, Some(0.0)]),
            ("b".to_owned(), vec![Some(0.5); 5]),
        ];
        let map = Map { rows, steps: &[4, 8, 12, 16, 20] };
        assert_eq!(
            map.paths(&shades),
            [
                ("zero".to_owned(), "M0 0.5h2M4 0.5h1".to_owned()),
                ("s5".to_owned(), "M2 0.5h1M0 1.5h5".to_owned())
            ]
        );
        let html = map.html(&shades);
        assert!(html.contains(">4</span>") && html.contains(">20</span>"), "{html}");
    }

    #[test]
    fn many_rows_fit_and_some_are_labelled() {
        let steps: Vec<usize> = (1..=100).collect();
        let rows = (0..300).map(|row| (format!("row {row}"), vec![Some(row as f64); 100])).collect();
        let html =
            Map { rows, steps: &steps }.html(&Shades::linear([0.0, 299.0].into_iter(), 1.0, "").unwrap());
        assert!(html.contains("height:420px"));
        assert_eq!(html.matches(">row ").count(), 30);
        assert!(html.len() < 10_000, "{}", html.len());
        assert!(!Map { rows: vec![], steps: &[] }.html(&Shades::shares(&[0.1; 5])).contains("NaN"));
    }
}
