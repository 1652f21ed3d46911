//! A sheet with a row for each comparison: values by size on the left, round-trip times on the right, all axes
//! logarithmic.

use std::fmt::Write;

use super::{COLOURS, start, text};
use crate::report::{Spread, bytes};

/// Values by size. A curve with a single point is drawn over the whole width.
pub struct Curve {
    /// Its name in the legend; curves with the same name have the same colour on all rows.
    pub name: String,
    /// Size in bytes, and the value.
    pub points: Vec<(f64, Spread)>,
}

/// A time: its median and its 99th percentile.
pub struct Interval {
    /// The label on its left.
    pub name: String,
    /// The median.
    pub p50: Spread,
    /// The 99th percentile.
    pub p99: Spread,
}

/// One row.
struct Row {
    title: String,
    curves: Vec<Curve>,
    intervals: Vec<Interval>,
}

/// The sheet.
pub struct Sheet {
    /// The title above all.
    pub title: String,
    /// The notes below it: the source of the values.
    pub notes: Vec<String>,
    /// The label of values by size.
    y_label: &'static str,
    rows: Vec<Row>,
}

const WIDTH: f64 = 960.0;
const ROW: f64 = 260.0;
/// The positions of the plots in a row, from left to right and from its top; a single one uses the whole row.
const BY_SIZE: (f64, f64) = (60.0, 500.0);
const BY_SIZE_ALONE: (f64, f64) = (60.0, 936.0);
const TIMES: (f64, f64) = (680.0, 936.0);
const TOP: f64 = 34.0;
const BOTTOM: f64 = ROW - 46.0;
const LINE: f64 = 17.0;
/// Entries per line of the legend.
const LEGEND: usize = 4;

/// A logarithmic axis between two powers of ten, on a range of the sheet.
#[derive(Clone, Copy)]
struct Axis {
    least: f64,
    most: f64,
    from: f64,
    to: f64,
}

impl Axis {
    /// An axis that covers all values.
    fn of(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Axis {
        let (least, most) = values
            .filter(|value| *value > 0.0)
            .fold((f64::MAX, f64::MIN_POSITIVE), |(least, most), value| (value.min(least), value.max(most)));
        let least = STEPS.map(|step| step * power(least.min(most))).into_iter().rfind(|step| *step <= least);
        let least = least.unwrap_or(1.0);
        let above = STEPS.map(|step| step * power(most)).into_iter().find(|step| *step >= most);
        Axis { least, most: above.unwrap_or(10.0 * power(most)).max(10.0 * least), from, to }
    }

    fn at(self, value: f64) -> f64 {
        let share = (value.max(self.least) / self.least).log10() / (self.most / self.least).log10();
        self.from + share.min(1.0) * (self.to - self.from)
    }

    /// 1, 2 and 5 of each power of ten, and their labels.
    fn ticks(self) -> impl Iterator<Item = (f64, Tick)> {
        let decades = (self.most / self.least).log10().ceil() as i32;
        let ticks = (0..=decades).flat_map(move |decade| {
            STEPS.map(|step| {
                let value = power(self.least) * 10f64.powi(decade) * step;
                (value, Tick { is_power: step == 1.0, label: step == 1.0 || decades <= 3 })
            })
        });
        ticks.filter(move |(value, _)| (self.least * 0.999..self.most * 1.001).contains(value))
    }
}

/// A line across an axis.
#[derive(Clone, Copy)]
struct Tick {
    is_power: bool,
    label: bool,
}

impl Tick {
    fn colour(self) -> &'static str {
        if self.is_power { "#bbbbbb" } else { "#e6e6e6" }
    }
}

const STEPS: [f64; 3] = [1.0, 2.0, 5.0];

/// The greatest power of ten up to a value.
fn power(value: f64) -> f64 {
    10f64.powf((value.log10() + 1e-9).floor())
}

/// A tick's value, without rounding noise.
fn number(value: f64) -> String {
    format!("{}", (value * 1e6).round() / 1e6)
}

/// From the lowest to the highest place on paper.
fn values(spread: &Spread) -> [f64; 3] {
    [spread.least, spread.median, spread.most]
}

impl Sheet {
    /// An empty sheet, for throughput by size.
    pub fn new(title: String, notes: Vec<String>) -> Sheet {
        Sheet { title, notes, y_label: "payload, Gb/s", rows: Vec::new() }
    }

    /// For other values by size.
    pub fn with_y(mut self, label: &'static str) -> Sheet {
        self.y_label = label;
        self
    }

    /// Adds a row below the others.
    pub fn row(&mut self, title: String, curves: Vec<Curve>, intervals: Vec<Interval>) {
        self.rows.push(Row { title, curves, intervals });
    }

    /// The sheet as an SVG document.
    pub fn svg(&self) -> String {
        let names = self.names();
        let legend_at = 52.0 + LINE * self.notes.len() as f64;
        let rows_at = legend_at + LINE * names.len().div_ceil(LEGEND) as f64 + 8.0;
        let height = rows_at + ROW * self.rows.len() as f64;
        let mut svg = start(WIDTH, height);
        let _ = writeln!(
            svg,
            "<g font-size=\"17\" font-weight=\"bold\"><text x=\"20\" y=\"30\">{}</text></g>",
            escaped(&self.title)
        );
        for (n, note) in self.notes.iter().enumerate() {
            text(&mut svg, 20.0, 50.0 + LINE * n as f64, "start", note);
        }
        for (n, name) in names.iter().enumerate() {
            let x = 20.0 + (n % LEGEND) as f64 * (WIDTH - 40.0) / LEGEND as f64;
            let y = legend_at + LINE * (n / LEGEND) as f64;
            let Style { colour, dash } = style(n);
            let _ =
                writeln!(svg, "<path d=\"M{x:.0} {y:.0}h26\" stroke=\"{colour}\" stroke-width=\"3\"{dash}/>");
            text(&mut svg, x + 32.0, y + 4.0, "start", name);
        }
        for (n, row) in self.rows.iter().enumerate() {
            let _ = writeln!(svg, "<g transform=\"translate(0 {})\">", rows_at + ROW * n as f64);
            row.draw(&mut svg, &names, self.y_label);
            svg += "</g>\n";
        }
        svg + "</svg>\n"
    }

    /// The names of the curves, without duplicates.
    fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for curve in self.rows.iter().flat_map(|row| &row.curves) {
            if !names.contains(&curve.name.as_str()) {
                names.push(&curve.name);
            }
        }
        names
    }
}

impl Row {
    fn draw(&self, svg: &mut String, names: &[&str], y_label: &str) {
        let _ = writeln!(
            svg,
            "<path d=\"M20 0H{}\" stroke=\"#bbbbbb\"/><text x=\"20\" y=\"20\" font-weight=\"bold\">{}</text>",
            WIDTH - 20.0,
            escaped(&self.title)
        );
        self.draw_by_size(svg, names, y_label);
        self.draw_times(svg);
    }

    fn draw_by_size(&self, svg: &mut String, names: &[&str], y_label: &str) {
        let (left, right) = if self.intervals.is_empty() { BY_SIZE_ALONE } else { BY_SIZE };
        let sizes = || self.curves.iter().filter(|curve| curve.points.len() > 1).flat_map(|c| &c.points);
        let bands = || self.curves.iter().flat_map(|curve| &curve.points).map(|(_, band)| band);
        if bands().next().is_none() {
            return text(svg, left, (TOP + BOTTOM) / 2.0, "start", "nothing measured");
        }
        let y = Axis::of(bands().flat_map(values), BOTTOM, TOP);
        grid_y(svg, y, left, right);
        let mut ticks: Vec<f64> = sizes().map(|(size, _)| *size).collect();
        ticks.sort_by(f64::total_cmp);
        ticks.dedup();
        let [least, most] = [ticks.first(), ticks.last()].map(|size| size.copied().unwrap_or(1.0));
        let x = Axis { least: least / 1.5, most: most * 1.5, from: left, to: right };
        for size in ticks {
            let at = x.at(size);
            let _ = writeln!(svg, "<path d=\"M{at:.1} {TOP}V{BOTTOM}\" stroke=\"#eeeeee\"/>");
            text(svg, at, BOTTOM + 16.0, "middle", &bytes(size as u64));
        }
        text(svg, (left + right) / 2.0, BOTTOM + 34.0, "middle", "message size");
        let middle = (TOP + BOTTOM) / 2.0;
        let _ = writeln!(
            svg,
            "<text x=\"20\" y=\"{middle}\" text-anchor=\"middle\" transform=\"rotate(-90 20 {middle})\">\
             {y_label}</text>"
        );
        for curve in &self.curves {
            let n = names.iter().position(|name| *name == curve.name).unwrap_or(0);
            let Style { colour, dash } = style(n);
            let at = |(size, band): &(f64, Spread)| (x.at(*size), values(band).map(|value| y.at(value)));
            let places: Vec<(f64, [f64; 3])> = match &curve.points[..] {
                [point] => [left, right].map(|x| (x, at(point).1)).into(),
                points => points.iter().map(at).collect(),
            };
            let path = |place: usize| places.iter().map(move |(x, ys)| format!("{x:.1},{:.1}", ys[place]));
            let around: Vec<String> = path(0).chain(path(2).rev()).collect();
            let _ = writeln!(
                svg,
                "<polygon points=\"{}\" fill=\"{colour}\" fill-opacity=\"0.2\"/>\
                 <polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{dash}/>",
                around.join(" "),
                path(1).collect::<Vec<_>>().join(" ")
            );
        }
    }

    fn draw_times(&self, svg: &mut String) {
        let (left, right) = TIMES;
        if self.intervals.is_empty() {
            return;
        }
        let bands = self.intervals.iter().flat_map(|interval| [interval.p50, interval.p99]);
        let x = Axis::of(bands.flat_map(|band| values(&band)), left, right);
        for (value, tick) in x.ticks() {
            let (at, colour) = (x.at(value), tick.colour());
            let _ = writeln!(svg, "<path d=\"M{at:.1} {TOP}V{BOTTOM}\" stroke=\"{colour}\"/>");
            if tick.label {
                text(svg, at, BOTTOM + 16.0, "middle", &number(value));
            }
        }
        let label = "round trip, µs: p50 (filled) and p99 (hollow)";
        text(svg, (left + right) / 2.0 - 30.0, BOTTOM + 34.0, "middle", label);
        let step = (BOTTOM - TOP) / self.intervals.len() as f64;
        for (n, Interval { name, p50, p99 }) in self.intervals.iter().enumerate() {
            let at = TOP + step * (n as f64 + 0.5);
            let colour = if name.starts_with("ferroce") { COLOURS[1] } else { COLOURS[2] };
            text(svg, left - 8.0, at + 4.0, "end", name);
            for (band, fill) in [(p99, "white"), (p50, colour)] {
                let [least, median, most] = values(band).map(|value| x.at(value));
                let _ = writeln!(
                    svg,
                    "<path d=\"M{least:.1} {at:.1}H{most:.1}M{least:.1} {:.1}v8M{most:.1} {:.1}v8\" \
                     stroke=\"{colour}\" stroke-width=\"1.5\"/>\
                     <circle cx=\"{median:.1}\" cy=\"{at:.1}\" r=\"5\" fill=\"{fill}\" stroke=\"{colour}\" \
                     stroke-width=\"2\"/>",
                    at - 4.0,
                    at - 4.0
                );
            }
        }
    }
}

struct Style {
    colour: &'static str,
    dash: &'static str,
}

/// The style of a curve: after all colours, the same ones with another stroke.
fn style(n: usize) -> Style {
    let dash = ["", " stroke-dasharray=\"6 4\""][n / COLOURS.len() % 2];
    Style { colour: COLOURS[(n + 1) % COLOURS.len()], dash }
}

fn grid_y(svg: &mut String, y: Axis, left: f64, right: f64) {
    for (value, tick) in y.ticks() {
        let (at, colour) = (y.at(value), tick.colour());
        let _ = writeln!(svg, "<path d=\"M{left} {at:.1}H{right}\" stroke=\"{colour}\"/>");
        if tick.label {
            text(svg, left - 6.0, at + 4.0, "end", &number(value));
        }
    }
}

fn escaped(words: &str) -> String {
    words.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_axis_has_room_for_all_values_and_each_power_of_ten_is_equally_long() {
        let axis = Axis::of([0.3, 42.0].into_iter(), 0.0, 300.0);
        let labels: Vec<String> = axis.ticks().map(|(value, _)| number(value)).collect();
        assert_eq!(labels, ["0.2", "0.5", "1", "2", "5", "10", "20", "50"]);
        let decade = axis.at(10.0) - axis.at(1.0);
        assert!((axis.at(5.0) - axis.at(0.5) - decade).abs() < 1e-6 && decade > 100.0, "{decade}");
        assert_eq!((axis.at(0.2).round(), axis.at(50.0).round()), (0.0, 300.0));
        // Zero has no position on such an axis, and is drawn at its end.
        assert_eq!(axis.at(0.0), 0.0);
        // A single value gives one decade.
        let axis = Axis::of([10.0].into_iter(), 0.0, 1.0);
        assert_eq!((axis.least.round(), axis.most.round()), (10.0, 100.0));
    }

    #[test]
    fn a_curve_of_one_point_goes_from_end_to_end_and_names_are_in_the_legend_once() {
        let band = |median| Spread { least: median / 2.0, median, most: median * 2.0 };
        let mut sheet = Sheet::new("a < b".to_owned(), vec!["somewhere".to_owned()]);
        for _ in 0..2 {
            let curve = |name: &str, points| Curve { name: name.to_owned(), points };
            let curves = vec![
                curve("TCP", vec![(64.0, band(2.0))]),
                curve("WRITE", vec![(8.0, band(0.5)), (4096.0, band(9.0))]),
            ];
            let interval = Interval { name: "ferroce".to_owned(), p50: band(5.0), p99: band(50.0) };
            sheet.row("af_xdp".to_owned(), curves, vec![interval]);
        }
        let svg = sheet.svg();
        assert!(svg.contains("a &lt; b") && svg.contains("4 KiB"), "{svg}");
        assert_eq!(svg.matches(">TCP<").count(), 1);
        assert_eq!(svg.matches("<polyline points=\"60.0,").count(), 2, "{svg}");
        assert_eq!(svg.matches("<circle").count(), 4);
    }
}
