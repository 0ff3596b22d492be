//! Line charts as HTML: the lines are inline SVG that stretches with the page, the labels are text beside it. So lines
//! and letters have the same size on a wide screen and on a narrow one.

mod axis;
mod heat;

use std::fmt::Write as _;
use std::ops::Range;

use crate::page::escape;
use axis::{Axis, short};
pub(crate) use heat::{Map, Shades};

/// The SVG's own units; the page stretches them.
const SIZE: (f64, f64) = (1000.0, 300.0);

/// A longer line is thinned: more points than pixels only make the file larger.
const MAX_POINTS: usize = 1000;

/// Colours of the page's style sheet, which has a light and a dark variant of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Color {
    Blue,
    Orange,
    Green,
    Purple,
    Ochre,
    Grey,
}

impl Color {
    pub(crate) const ALL: [Self; 6] =
        [Self::Blue, Self::Orange, Self::Green, Self::Purple, Self::Ochre, Self::Grey];

    /// A CSS value.
    pub(crate) fn css(self) -> String {
        format!("var(--c{})", self as usize)
    }
}

/// One line of a chart.
#[derive(Debug, Clone)]
pub(crate) struct Series {
    pub(crate) name: String,
    pub(crate) color: Color,
    pub(crate) points: Vec<(f64, f64)>,
    pub(crate) style: Style,
}

/// The style of a line. Later variants are drawn in front of earlier ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Style {
    /// Thin and pale, without an entry in the legend.
    Faint,
    /// Dashed, for a constant.
    Reference,
    /// Wide enough to be seen below another line.
    Wide,
    Normal,
    /// Thin and dashed between dots that are large enough to be seen below others.
    WideDots,
    /// Thin and dashed between dots.
    Dots,
}

impl Style {
    /// The class of the style sheet.
    fn class(self) -> &'static str {
        match self {
            Self::Faint => "faint",
            Self::Reference => "reference",
            Self::Wide => "wide",
            Self::Normal => "normal",
            Self::WideDots => "wide-dots",
            Self::Dots => "dots",
        }
    }
}

/// The scale of the vertical axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scale {
    Linear,
    FromZero,
    Logarithmic,
}

/// Steps at which something happened that has no value, shown as ticks along the upper edge.
#[derive(Debug, Clone)]
pub(crate) struct Events {
    pub(crate) name: String,
    pub(crate) color: Color,
    pub(crate) steps: Vec<f64>,
}

/// A line chart over steps.
#[derive(Debug, Clone)]
pub(crate) struct Chart {
    /// The quantity on the vertical axis, with its unit.
    pub(crate) y: &'static str,
    pub(crate) scale: Scale,
    /// The vertical axis covers no more than this, however large or small a value is.
    pub(crate) limits: Range<f64>,
    pub(crate) series: Vec<Series>,
    pub(crate) events: Vec<Events>,
}

impl Chart {
    /// A chart without limits and events.
    pub(crate) fn new(y: &'static str, scale: Scale, series: Vec<Series>) -> Self {
        Self { y, scale, limits: f64::NEG_INFINITY..f64::INFINITY, series, events: Vec::new() }
    }

    /// Returns a figure, or a sentence if there is nothing to draw.
    pub(crate) fn html(mut self) -> String {
        let logarithmic = self.scale == Scale::Logarithmic;
        self.events.retain(|events| !events.steps.is_empty());
        let shown = |value: f64| value.is_finite() && (!logarithmic || value > 0.0);
        let all = || self.series.iter().flat_map(|series| &series.points).filter(move |point| shown(point.1));
        if all().count() == 0 {
            return "<p class=\"note\">No values were recorded.</p>\n".to_owned();
        }
        let within = |value: &f64| self.limits.start <= *value && *value <= self.limits.end;
        let (low, high) = bounds(all().map(|point| point.1.clamp(self.limits.start, self.limits.end)));
        let y = match self.scale {
            Scale::Linear => Axis::linear(low, high, 0.06),
            Scale::FromZero => Axis::from_zero(high),
            Scale::Logarithmic => Axis::logarithmic(low, high),
        };
        let beyond = all().filter(|point| !within(&point.1)).count();
        let events = self.events.iter().flat_map(|events| &events.steps).copied();
        let (first, last) = bounds(all().map(|point| point.0).chain(events));
        let x = Axis::whole(first, last);
        // Lines drawn last are on top.
        self.series.sort_by_key(|series| series.style);

        let mut html = String::from("<figure>\n");
        html += &self.legend();
        let _ = writeln!(html, "<div class=\"y-name\">{}</div>", self.y);
        let _ = writeln!(html, "<div class=\"plot\" role=\"img\" aria-label=\"{} over steps\">", self.y);
        html += &labels("ys", "top", &y.ticks(), |value| 1.0 - y.place(value));
        html += &self.svg(&x, &y);
        html += &labels("xs", "left", &x.ticks(), |value| x.place(value));
        html += "</div>\n<div class=\"x-name\">step</div>\n";
        if beyond > 0 {
            let what = if beyond == 1 { "value is" } else { "values are" };
            let _ = writeln!(html, "<p class=\"note\">{beyond} {what} beyond the axis.</p>");
        }
        html + "</figure>\n"
    }

    fn legend(&self) -> String {
        let mut html = String::from("<figcaption class=\"legend\">");
        let mut entry = |class: &str, color: Color, name: &str| {
            let (color, name) = (color.css(), escape(name));
            let _ = write!(html, "<span><i class=\"{class}\" style=\"--c:{color}\"></i>{name}</span>");
        };
        for series in self.series.iter().filter(|series| series.style != Style::Faint) {
            entry(series.style.class(), series.color, &series.name);
        }
        for events in &self.events {
            entry("event", events.color, &events.name);
        }
        html + "</figcaption>\n"
    }

    fn svg(&self, x: &Axis, y: &Axis) -> String {
        let (width, height) = SIZE;
        let place = |(step, value): (f64, f64)| (x.place(step) * width, (1.0 - y.place(value)) * height);
        let mut svg = format!(
            "<svg viewBox=\"0 0 {width} {height}\" preserveAspectRatio=\"none\">\n<path class=\"grid\" d=\""
        );
        for tick in y.ticks() {
            let _ = write!(svg, "M0 {:.1}H{width}", (1.0 - y.place(tick)) * height);
        }
        svg += "\"/>\n";
        for series in &self.series {
            let line = path(&thinned(&series.points), place);
            let (class, color) = (series.style.class(), series.color.css());
            let _ = writeln!(svg, "<path class=\"{class}\" stroke=\"{color}\" d=\"{line}\"/>");
            let dotted = matches!(series.style, Style::WideDots | Style::Dots);
            if dotted || finite(&series.points).count() == 1 {
                let dots: String = finite(&series.points).map(|&point| dot(place(point))).collect();
                let _ = writeln!(svg, "<path class=\"points {class}\" stroke=\"{color}\" d=\"{dots}\"/>");
            }
        }
        for events in &self.events {
            let ticks: String =
                events.steps.iter().map(|&step| format!("M{:.1} 0V18", x.place(step) * width)).collect();
            let _ = writeln!(svg, "<path class=\"event\" stroke=\"{}\" d=\"{ticks}\"/>", events.color.css());
        }
        svg + "</svg>\n"
    }
}

/// Values as dots on one horizontal axis, each group of them in a row of its own.
pub(crate) fn strip(unit: &str, rows: &[(&str, Color, Vec<f64>)]) -> String {
    let all = || rows.iter().flat_map(|(_, _, values)| values).copied();
    let (low, high) = bounds(all().chain([0.0]));
    let axis = Axis::linear(low, high, 0.12);
    let mut html = format!("<div class=\"strip\" role=\"img\" aria-label=\"{unit}\">\n");
    for (name, color, values) in rows {
        let dots: String = values.iter().map(|&value| dot((axis.place(value) * SIZE.0, 10.0))).collect();
        let zero = axis.place(0.0) * SIZE.0;
        let _ = writeln!(
            html,
            "<div class=\"name\">{name}</div><svg viewBox=\"0 0 {} 20\" preserveAspectRatio=\"none\">\
             <path class=\"grid\" d=\"M0 10H{}\"/><path class=\"axis\" d=\"M{zero:.1} 0V20\"/>\
             <path class=\"points\" stroke=\"{}\" d=\"{dots}\"/></svg>",
            SIZE.0,
            SIZE.0,
            color.css()
        );
    }
    html += &labels("xs", "left", &axis.ticks(), |value| axis.place(value));
    let _ = writeln!(html, "<div class=\"x-name\">{unit}</div>\n</div>");
    html
}

/// Labels along one edge of a plot.
fn labels(class: &str, edge: &str, ticks: &[f64], place: impl Fn(f64) -> f64) -> String {
    let mut html = format!("<div class=\"{class}\">");
    for &tick in ticks {
        let _ = write!(html, "<span style=\"{edge}:{:.2}%\">{}</span>", 100.0 * place(tick), short(tick));
    }
    html + "</div>\n"
}

/// The smallest and the largest value.
fn bounds(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)))
}

fn finite(points: &[(f64, f64)]) -> impl Iterator<Item = &(f64, f64)> {
    points.iter().filter(|point| point.1.is_finite())
}

/// A line through the points that is interrupted wherever a point has no place.
fn path(points: &[(f64, f64)], place: impl Fn((f64, f64)) -> (f64, f64)) -> String {
    let (mut text, mut pen_down) = (String::new(), false);
    for &point in points {
        let (x, y) = place(point);
        if !y.is_finite() {
            pen_down = false;
            continue;
        }
        // Far beyond the edge is as good as infinitely far.
        let _ = write!(text, "{}{x:.1} {:.1}", if pen_down { 'L' } else { 'M' }, y.clamp(-1e4, 1e4));
        pen_down = true;
    }
    text
}

/// A line of no length, which round caps make a dot.
fn dot((x, y): (f64, f64)) -> String {
    if y.is_finite() { format!("M{x:.1} {y:.1}h0") } else { String::new() }
}

/// A centred moving average over a twentieth of the points. It is narrower at the start, where losses fall fast. At the end it
/// averages the points before, so that the last point is not a single value. Points without a finite value are left out.
pub(crate) fn smoothed(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let points: Vec<(f64, f64)> = finite(points).copied().collect();
    let half = points.len() / 40;
    let sums: Vec<f64> = std::iter::once(0.0)
        .chain(points.iter().scan(0.0, |sum, point| {
            *sum += point.1;
            Some(*sum)
        }))
        .collect();
    let average = points.iter().enumerate().map(|(index, &(step, _))| {
        let (start, end) = (index.saturating_sub(half), (index + half.min(index) + 1).min(points.len()));
        (step, (sums[end] - sums[start]) / (end - start) as f64)
    });
    average.collect()
}

/// At most [`MAX_POINTS`] points: of each group of neighbours the smallest and the largest, so that every peak remains,
/// and those without a finite value, so that gaps remain.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    if points.len() <= MAX_POINTS {
        return points.to_vec();
    }
    let group = points.len().div_ceil(MAX_POINTS / 2);
    let mut kept = Vec::with_capacity(MAX_POINTS);
    for group in points.chunks(group) {
        let by_value = |index: &usize, other: &usize| group[*index].1.total_cmp(&group[*other].1);
        let ends = [(0..group.len()).min_by(by_value), (0..group.len()).max_by(by_value)];
        let mut ends: Vec<usize> = ends.into_iter().flatten().collect();
        ends.sort_unstable();
        ends.dedup();
        kept.extend(ends.into_iter().map(|index| group[index]));
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(points: Vec<(f64, f64)>, scale: Scale) -> Chart {
        let series = Series { name: "a < b".to_owned(), color: Color::Blue, points, style: Style::Normal };
        Chart::new("loss", scale, vec![series])
    }

    #[test]
    fn charts_of_any_size_are_drawn() {
        for count in [0, 1, 2, 5000] {
            for scale in [Scale::Linear, Scale::FromZero, Scale::Logarithmic] {
                let points = (0..count).map(|step| (f64::from(step), 1.0 + f64::from(step % 7))).collect();
                let html = chart(points, scale).html();
                assert_eq!(html.contains("<svg"), count > 0);
                assert!(!html.contains("http") && !html.contains("NaN"), "self-contained");
                assert!(html.len() < 60_000);
            }
        }
        assert!(chart(vec![(0.0, 1e-38), (1.0, 3e38)], Scale::Logarithmic).html().contains("a &lt; b"));
    }

    #[test]
    fn values_that_are_not_finite_leave_a_gap() {
        let points =
            vec![(1.0, 2.0), (2.0, 3.0), (3.0, f64::NAN), (4.0, f64::INFINITY), (5.0, 2.5), (6.0, 2.0)];
        let html = chart(points, Scale::Linear).html();
        assert!(!html.contains("NaN") && !html.contains("inf"), "{html}");
        let line = html.split("class=\"normal\" stroke").nth(1).unwrap();
        let line = &line[..line.find("/>").unwrap()];
        assert_eq!((line.matches('M').count(), line.matches('L').count()), (2, 2), "{line}");
        let none = chart(vec![(1.0, f64::NAN)], Scale::Linear).html();
        assert!(none.contains("No values were recorded"), "{none}");
    }

    #[test]
    fn limits_keep_an_exploding_curve_readable() {
        let points = vec![(1.0, 5.0), (2.0, 4.0), (3.0, 1e30)];
        let html = Chart { limits: 0.0..8.0, ..chart(points, Scale::Linear) }.html();
        assert!(html.contains(">8</span>") && html.contains("1 value is beyond the axis"), "{html}");
        assert!(!html.contains("e30"));
    }

    #[test]
    fn smoothing_keeps_constants_and_lengths() {
        let points: Vec<(f64, f64)> = (0..400).map(|step| (f64::from(step), 2.5)).collect();
        assert!(smoothed(&points).iter().zip(&points).all(|(a, b)| a.0 == b.0 && (a.1 - b.1).abs() < 1e-12));
        let slope: Vec<(f64, f64)> = (0..400).map(|step| (f64::from(step), f64::from(step))).collect();
        let inner = |points: &[(f64, f64)]| points[..390].to_vec();
        let lag = inner(&smoothed(&slope))
            .iter()
            .zip(inner(&slope))
            .map(|(a, b)| (a.1 - b.1).abs())
            .fold(0.0, f64::max);
        assert!(lag < 1e-9, "{lag}");
        let mut peak = points;
        peak[399].1 = 13.5;
        assert!((smoothed(&peak)[399].1 - 3.5).abs() < 1e-9, "the last point is one of eleven");
        let few = [(1.0, 3.0), (2.0, 4.0)];
        assert_eq!(smoothed(&few), few);
        assert_eq!(smoothed(&[]), []);
        assert_eq!(smoothed(&[(1.0, f64::NAN), (2.0, 1.0)]), [(2.0, 1.0)]);
    }

    #[test]
    fn thinning_keeps_peaks_and_gaps() {
        let mut points: Vec<(f64, f64)> = (0..100_000).map(|step| (f64::from(step), 1.0)).collect();
        points[54_321].1 = 9.0;
        points[77_777].1 = f64::NAN;
        let thin = thinned(&points);
        assert!(thin.len() <= MAX_POINTS);
        assert!(thin.contains(&(54_321.0, 9.0)) && thin.iter().any(|point| point.1.is_nan()));
        assert!(thin.windows(2).all(|pair| pair[0].0 < pair[1].0));
    }
}
