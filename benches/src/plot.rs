//! Charts as SVG: lines of percentages by case, and sheets of values on logarithmic axes.

mod sheet;

use std::fmt::Write;

pub use sheet::{Curve, Interval, Sheet};

/// A chart of percentages.
pub struct Chart<'a> {
    /// The text above it.
    pub title: &'a str,
    /// The text under the x axis.
    pub x_label: &'a str,
    /// The cases, from left to right.
    pub cases: &'a [&'a str],
}

/// One line of a chart.
pub struct Line {
    /// Its name in the legend.
    pub name: String,
    /// From 0 to 1, one for each case.
    pub shares: Vec<f64>,
    /// A bound, not a measurement.
    pub dashed: bool,
}

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 420.0;
/// The plot area inside the margins.
const LEFT: f64 = 50.0;
const RIGHT: f64 = WIDTH - 190.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = HEIGHT - 50.0;
/// Colours that colour-blind readers can distinguish.
pub(crate) const COLOURS: [&str; 7] =
    ["#777777", "#0072b2", "#d55e00", "#56b4e9", "#e69f00", "#009e73", "#cc79a7"];

impl Chart<'_> {
    /// The chart as an SVG document.
    pub fn svg(&self, lines: &[Line]) -> String {
        let mut svg = start(WIDTH, HEIGHT);
        let mut text = |x: f64, y: f64, anchor: &str, words: &str| text(&mut svg, x, y, anchor, words);
        text((LEFT + RIGHT) / 2.0, TOP - 16.0, "middle", self.title);
        text((LEFT + RIGHT) / 2.0, HEIGHT - 12.0, "middle", self.x_label);
        for (n, case) in self.cases.iter().enumerate() {
            text(self.x(n), BOTTOM + 18.0, "middle", case);
        }
        for tenth in (0..=10).step_by(2) {
            text(LEFT - 6.0, y(f64::from(tenth) / 10.0) + 4.0, "end", &format!("{} %", 10 * tenth));
        }
        for (n, line) in lines.iter().enumerate() {
            text(RIGHT + 34.0, legend_y(n) + 4.0, "start", &line.name);
        }
        for tenth in 0..=10 {
            let y = y(f64::from(tenth) / 10.0);
            let _ = writeln!(svg, "<path d=\"M{LEFT} {y:.1}H{RIGHT}\" stroke=\"#dddddd\"/>");
        }
        for (n, line) in lines.iter().enumerate() {
            let colour = COLOURS[n % COLOURS.len()];
            let dash = if line.dashed { " stroke-dasharray=\"5 4\"" } else { "" };
            let points = line.shares.iter().enumerate().map(|(n, share)| (self.x(n), y(*share)));
            let path: Vec<String> = points.map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let key = legend_y(n);
            let _ = writeln!(
                svg,
                "<g fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{dash}><polyline points=\"{}\"/>\
                 <path d=\"M{} {key}h22\"/></g>",
                path.join(" "),
                RIGHT + 8.0
            );
        }
        svg + "</svg>\n"
    }

    fn x(&self, case: usize) -> f64 {
        let step = (RIGHT - LEFT) / self.cases.len() as f64;
        LEFT + step * (case as f64 + 0.5)
    }
}

/// An empty white sheet, since the page behind it may be dark.
fn start(width: f64, height: f64) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    )
}

fn text(svg: &mut String, x: f64, y: f64, anchor: &str, words: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(svg, "<text x=\"{x:.0}\" y=\"{y:.0}\" text-anchor=\"{anchor}\">{words}</text>");
}

fn y(share: f64) -> f64 {
    BOTTOM - share * (BOTTOM - TOP)
}

fn legend_y(line: usize) -> f64 {
    TOP + 10.0 + 20.0 * line as f64
}
