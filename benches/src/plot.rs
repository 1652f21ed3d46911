//! Charts as SVG: one x position for each case; lines of percents, or bars of anything.

use std::fmt::Write;

/// A chart of percentages.
pub struct Chart<'a> {
    /// Above it.
    pub title: &'a str,
    /// Under the x axis.
    pub x_label: &'a str,
    /// The cases, from left to right.
    pub cases: &'a [&'a str],
}

/// One line of a chart.
pub struct Line {
    /// In the legend.
    pub name: String,
    /// 0 to 1, one for each case.
    pub shares: Vec<f64>,
    /// A bound, not a measurement.
    pub dashed: bool,
}

/// A chart of bars, in groups.
pub struct Bars<'a> {
    /// Above it.
    pub title: &'a str,
    /// Under the x axis.
    pub x_label: &'a str,
    /// The groups, from left to right.
    pub cases: &'a [String],
    /// What is in each group: a name, and a height for each case that has one.
    pub bars: &'a [(String, Vec<Option<f64>>)],
    /// Heights to compare with, from end to end.
    pub levels: &'a [(String, f64)],
}

/// Charts one below the other, in one document.
pub fn column(charts: &[String]) -> String {
    let height = HEIGHT * charts.len() as f64;
    let mut svg = format!("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\">\n");
    for (n, chart) in charts.iter().enumerate() {
        let place = format!("<svg y=\"{}\" width=\"{WIDTH}\" height=\"{HEIGHT}\"", HEIGHT * n as f64);
        svg += &chart.replacen("<svg", &place, 1);
    }
    svg + "</svg>\n"
}

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 420.0;
/// The plot inside the margins.
const LEFT: f64 = 50.0;
const RIGHT: f64 = WIDTH - 190.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = HEIGHT - 50.0;
/// Told apart by the colour-blind too.
const COLOURS: [&str; 7] = ["#777777", "#0072b2", "#d55e00", "#56b4e9", "#e69f00", "#009e73", "#cc79a7"];

impl Chart<'_> {
    /// The chart as an SVG document.
    pub fn svg(&self, lines: &[Line]) -> String {
        let mut svg = start();
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

impl Bars<'_> {
    /// The chart as an SVG document.
    pub fn svg(&self) -> String {
        let mut svg = start();
        let heights = self.bars.iter().flat_map(|(_, heights)| heights.iter().flatten());
        let most = heights.chain(self.levels.iter().map(|(_, height)| height)).copied().fold(0.0, f64::max);
        let step = round_up(most / 5.0);
        let top = 5.0 * step;
        text(&mut svg, (LEFT + RIGHT) / 2.0, TOP - 16.0, "middle", self.title);
        text(&mut svg, (LEFT + RIGHT) / 2.0, HEIGHT - 12.0, "middle", self.x_label);
        for n in 0..=5 {
            let (value, y) = (step * f64::from(n), y(f64::from(n) / 5.0));
            text(&mut svg, LEFT - 6.0, y + 4.0, "end", &format!("{value}"));
            let _ = writeln!(svg, "<path d=\"M{LEFT} {y:.1}H{RIGHT}\" stroke=\"#dddddd\"/>");
        }
        let group = (RIGHT - LEFT) / self.cases.len().max(1) as f64;
        let width = 0.8 * group / self.bars.len().max(1) as f64;
        for (n, case) in self.cases.iter().enumerate() {
            text(&mut svg, LEFT + group * (n as f64 + 0.5), BOTTOM + 18.0, "middle", case);
        }
        for (n, (name, heights)) in self.bars.iter().enumerate() {
            let (colour, key) = (COLOURS[(n + 1) % COLOURS.len()], legend_y(n));
            text(&mut svg, RIGHT + 34.0, key + 4.0, "start", name);
            let mut bar = |x: f64, y: f64, width: f64, height: f64| {
                let _ = writeln!(
                    svg,
                    "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{colour}\"/>"
                );
            };
            bar(RIGHT + 8.0, key - 5.0, 22.0, 10.0);
            for (case, height) in heights.iter().enumerate() {
                let Some(height) = height else { continue };
                let x = LEFT + group * (case as f64 + 0.1) + width * n as f64;
                bar(x, y(height / top), width, BOTTOM - y(height / top));
            }
        }
        for (n, (name, height)) in self.levels.iter().enumerate() {
            let key = legend_y(self.bars.len() + n);
            text(&mut svg, RIGHT + 34.0, key + 4.0, "start", name);
            let dash = format!("{} 3", 3 + 3 * n);
            let _ = writeln!(
                svg,
                "<path d=\"M{LEFT} {:.1}H{RIGHT}M{} {key}h22\" stroke=\"black\" stroke-dasharray=\"{dash}\"/>",
                y(height / top),
                RIGHT + 8.0
            );
        }
        svg + "</svg>\n"
    }
}

/// The next of 1, 2, 2.5, 5, 10, 20 ...
fn round_up(value: f64) -> f64 {
    let power = 10f64.powf(value.max(1e-9).log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().find(|step| step * power >= value);
    step.unwrap_or(10.0) * power
}

fn start() -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
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
