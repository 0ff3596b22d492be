//! Line charts and bars as inline SVG that follows the page's colours and width.

use std::fmt::Write as _;
use std::ops::Range;

use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;

use crate::telemetry::SlotState;

/// Colours that read on light and on dark ground.
pub(crate) const PALETTE: [&str; 6] = ["#3b82f6", "#f97316", "#10b981", "#d946ef", "#eab308", "#64748b"];

/// Stands for the text colour of the page until the SVG is finished.
const INK: RGBColor = RGBColor(1, 2, 3);
const INK_HEX: &str = "#010203";

const SIZE: (u32, u32) = (960, 340);

/// More points than pixels only make the file larger.
const MAX_POINTS: usize = 1000;

/// One line of a chart.
#[derive(Debug, Clone)]
pub(crate) struct Series {
    pub(crate) name: String,
    pub(crate) color: &'static str,
    pub(crate) points: Vec<(f64, f64)>,
    pub(crate) weight: Weight,
}

/// How a line is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Weight {
    /// Behind the others, without an entry in the legend.
    Faint,
    /// Wide enough to be seen under another line.
    Wide,
    Normal,
}

/// A line chart over steps.
#[derive(Debug, Clone)]
pub(crate) struct Chart {
    pub(crate) y: &'static str,
    pub(crate) logarithmic: bool,
    pub(crate) series: Vec<Series>,
}

impl Chart {
    /// A figure with legend and SVG; a sentence where there is nothing to draw.
    pub(crate) fn html(&self) -> Result<String, String> {
        let points = || self.series.iter().flat_map(|series| &series.points);
        if points().count() == 0 {
            return Ok("<p class=\"note\">No values were recorded.</p>\n".to_owned());
        }
        let bounds = |value: fn(&(f64, f64)) -> f64| {
            let (low, high) = (f64::INFINITY, f64::NEG_INFINITY);
            points().map(value).fold((low, high), |(low, high), value| (low.min(value), high.max(value)))
        };
        let ((first, last), (low, high)) = (bounds(|point| point.0), bounds(|point| point.1));
        let steps = first..last.max(first + 1.0);
        let svg = if self.logarithmic {
            self.svg(steps, (low / 1.5..high * 1.5).log_scale())
        } else {
            let margin = ((high - low) * 0.06).max(high.abs() * 1e-6).max(1e-9);
            self.svg(steps, low - margin..high + margin)
        };
        let mut html = "<figure>\n<figcaption class=\"legend\">".to_owned();
        for series in self.series.iter().filter(|series| series.weight != Weight::Faint) {
            let (color, name) = (series.color, escape(&series.name));
            let _ = write!(html, "<span><i style=\"background:{color}\"></i>{name}</span>");
        }
        Ok(html + "</figcaption>\n" + &svg? + "\n</figure>\n")
    }

    fn svg<Y>(&self, steps: Range<f64>, values: Y) -> Result<String, String>
    where
        Y: AsRangedCoord<Value = f64>,
        Y::CoordDescType: ValueFormatter<f64>,
    {
        let mut svg = String::new();
        let draw = |svg: &mut String| -> Result<(), Box<dyn std::error::Error>> {
            let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
            let mut chart = ChartBuilder::on(&area)
                .margin(8)
                .margin_right(20)
                .x_label_area_size(44)
                .y_label_area_size(76)
                .build_cartesian_2d(steps, values)?;
            chart
                .configure_mesh()
                .x_desc("step")
                .y_desc(self.y)
                .x_label_formatter(&|step| format!("{step:.0}"))
                .y_label_formatter(&|value| short(*value))
                .label_style(("sans-serif", 13, &INK))
                .axis_desc_style(("sans-serif", 14, &INK))
                .axis_style(INK.mix(0.5))
                .bold_line_style(INK.mix(0.12))
                .light_line_style(INK.mix(0.0))
                .max_light_lines(1)
                .draw()?;
            for series in &self.series {
                let (opacity, width) = match series.weight {
                    Weight::Faint => (0.28, 1),
                    Weight::Wide => (0.7, 5),
                    Weight::Normal => (1.0, 2),
                };
                let style = rgb(series.color).mix(opacity).stroke_width(width);
                chart.draw_series(LineSeries::new(thinned(&series.points), style))?;
                // A line of one point would not be seen.
                if let [point] = series.points[..] {
                    chart.draw_series([Circle::new(point, 3, style.filled())])?;
                }
            }
            area.present()?;
            Ok(())
        };
        draw(&mut svg).map_err(|error| format!("drawing a chart: {error}"))?;
        // Inline SVG needs no namespace; its size comes from the page.
        let svg = svg.replace(" xmlns=\"http://www.w3.org/2000/svg\"", "").replace(INK_HEX, "currentColor");
        let size = format!("width=\"{}\" height=\"{}\" ", SIZE.0, SIZE.1);
        Ok(svg.replacen(&size, &format!("role=\"img\" aria-label=\"{} over steps\" ", self.y), 1))
    }
}

/// A centred moving average over a twentieth of the points, narrower at the ends: what noise hides.
pub(crate) fn smoothed(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let half = points.len() / 40;
    let sums: Vec<f64> = std::iter::once(0.0)
        .chain(points.iter().scan(0.0, |sum, point| {
            *sum += point.1;
            Some(*sum)
        }))
        .collect();
    let average = points.iter().enumerate().map(|(index, &(step, _))| {
        let reach = half.min(index).min(points.len() - 1 - index);
        (step, (sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1) as f64)
    });
    average.collect()
}

/// Every `n`th point, and the last.
fn thinned(points: &[(f64, f64)]) -> impl Iterator<Item = (f64, f64)> {
    let every = points.len().div_ceil(MAX_POINTS).max(1);
    let kept =
        points.iter().enumerate().filter(move |(index, _)| index % every == 0 || index + 1 == points.len());
    kept.map(|(_, &point)| point)
}

fn rgb(hex: &str) -> RGBColor {
    let value = u32::from_str_radix(hex.trim_start_matches('#'), 16).unwrap_or(0x80_80_80);
    let [_, red, green, blue] = value.to_be_bytes();
    RGBColor(red, green, blue)
}

/// A number in few characters.
fn short(value: f64) -> String {
    let size = value.abs();
    if value == 0.0 {
        "0".to_owned()
    } else if (1e-2..1e5).contains(&size) {
        let text = format!("{value:.3}");
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        let text = format!("{value:.1e}");
        text.replace(".0e", "e")
    }
}

/// A share as a percentage.
pub(crate) fn percent(share: f64) -> String {
    match share * 100.0 {
        0.0 => "0".to_owned(),
        percent if percent < 1e-4 => "<0.0001".to_owned(),
        percent if percent < 0.1 => format!("{percent:.4}"),
        percent => format!("{percent:.2}"),
    }
}

/// Saturated and underflowed shares of every slot as pairs of bars, each kind on its own scale.
pub(crate) fn bars(slots: &[&SlotState]) -> String {
    const ROW: usize = 22;
    type Share = fn(&SlotState) -> f64;
    let most = |share: Share| slots.iter().map(|slot| share(slot)).fold(0.0, f64::max);
    let columns: [(&str, &str, Share, usize); 2] = [
        ("saturated, % of values", PALETTE[1], SlotState::saturated_share, 380),
        ("underflowed to zero, % of values", PALETTE[0], SlotState::underflowed_share, 680),
    ];
    let height = ROW * (slots.len() + 1) + 6;
    let mut svg = format!(
        "<svg viewBox=\"0 0 960 {height}\" role=\"img\" aria-label=\"saturation and underflow per slot\" \
         font-size=\"12.5\" fill=\"currentColor\">\n"
    );
    for (title, _, _, x) in columns {
        let _ = writeln!(svg, "<text x=\"{x}\" y=\"14\" font-weight=\"600\">{title}</text>");
    }
    for (index, slot) in slots.iter().enumerate() {
        let y = ROW * (index + 1) + 4;
        let _ = write!(svg, "<text x=\"0\" y=\"{}\">{}</text>", y + 12, escape(&slot.name));
        for (_, color, share, x) in columns {
            let value = share(slot);
            let width = 190.0 * value / most(share).max(f64::MIN_POSITIVE);
            let _ = write!(
                svg,
                "<rect x=\"{x}\" y=\"{y}\" width=\"190\" height=\"14\" rx=\"3\" opacity=\"0.08\"/>\
                 <rect x=\"{x}\" y=\"{y}\" width=\"{width:.1}\" height=\"14\" rx=\"3\" fill=\"{color}\"/>\
                 <text x=\"{}\" y=\"{}\">{}</text>",
                x + 198,
                y + 12,
                percent(value)
            );
        }
        svg.push('\n');
    }
    svg + "</svg>\n"
}

/// Text that HTML shows as it is.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(points: Vec<(f64, f64)>, logarithmic: bool) -> Chart {
        let series = Series { name: "a < b".to_owned(), color: PALETTE[0], points, weight: Weight::Normal };
        Chart { y: "loss", logarithmic, series: vec![series] }
    }

    #[test]
    fn charts_of_any_size_are_drawn() {
        for count in [0, 1, 2, 5000] {
            for logarithmic in [false, true] {
                let points = (0..count).map(|step| (f64::from(step), 1.0 + f64::from(step % 7))).collect();
                let html = chart(points, logarithmic).html().unwrap();
                assert_eq!(html.contains("<svg"), count > 0);
                assert!(!html.contains("http") && !html.contains(INK_HEX), "self-contained");
                assert!(html.len() < 60_000);
            }
        }
    }

    #[test]
    fn constant_curves_have_a_range() {
        for value in [0.0, -3.0, 1e9] {
            assert!(chart(vec![(0.0, value), (1.0, value)], false).html().unwrap().contains("<svg"));
        }
        assert!(chart(vec![(0.0, 1e-38), (1.0, 3e38)], true).html().unwrap().contains("a &lt; b"));
    }

    #[test]
    fn smoothing_keeps_constants_and_lengths() {
        let points: Vec<(f64, f64)> = (0..400).map(|step| (f64::from(step), 2.5)).collect();
        assert!(smoothed(&points).iter().zip(&points).all(|(a, b)| a.0 == b.0 && (a.1 - b.1).abs() < 1e-12));
        let slope: Vec<(f64, f64)> = (0..400).map(|step| (f64::from(step), f64::from(step))).collect();
        assert!(smoothed(&slope).iter().zip(&slope).all(|(a, b)| (a.1 - b.1).abs() < 1e-9), "no lag");
        let few = [(1.0, 3.0), (2.0, 4.0)];
        assert_eq!(smoothed(&few), few);
        assert_eq!(smoothed(&[]), []);
    }

    #[test]
    fn numbers_are_short() {
        let texts: Vec<String> = [0.0, 0.05, 2.5, 448.0, 12_000.0, 1e5, 3.2e-4, -0.5].map(short).into();
        assert_eq!(texts, ["0", "0.05", "2.5", "448", "12000", "1e5", "3.2e-4", "-0.5"]);
        let shares: Vec<String> = [0.0, 1e-7, 1e-5, 0.25].map(percent).into();
        assert_eq!(shares, ["0", "<0.0001", "0.0010", "25.00"]);
    }
}
