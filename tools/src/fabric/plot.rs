//! Rates and queues over time, as SVG.

use std::error::Error;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use plotters::backend::SVGBackend;
use plotters::chart::{ChartBuilder, SeriesLabelPosition};
use plotters::drawing::{DrawingArea, IntoDrawingArea};
use plotters::element::{PathElement, Rectangle};
use plotters::series::LineSeries;
use plotters::style::{BLACK, Color, RGBColor, ShapeStyle, WHITE};

use super::description::{Description, FailureEntry};
use super::outcome::Outcome;
use super::report::{Case, Run};
use super::traffic::Group;
use crate::failure::Failure;
use crate::quantity::Time;

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

/// The most points of a line, and of a flow's line: as many as its width can show.
const POINTS: usize = 160;
const FLOW_POINTS: usize = 50;
/// The most flows with a line each.
const FLOWS: usize = 8;
/// The most queues that are drawn.
const QUEUES: usize = 3;
const ROW: u32 = 190;
const WIDTH: u32 = 1000;

pub(super) const COLORS: [RGBColor; 6] = [
    RGBColor(31, 119, 180),
    RGBColor(214, 39, 40),
    RGBColor(44, 160, 44),
    RGBColor(255, 127, 14),
    RGBColor(148, 103, 189),
    RGBColor(140, 86, 75),
];
const FAILED: RGBColor = RGBColor(255, 226, 226);
const GREY: RGBColor = RGBColor(150, 150, 150);

/// Draws two pictures side by side for the first run of each case: rates on the left, the longest queues on the right.
/// Cases are below each other.
pub(crate) fn write(path: &Path, title: &str, of: &Description, cases: &[Case]) -> Result<(), Failure> {
    let text = draw(title, of, cases).map_err(|error| Failure::run(format!("drawing: {error}")))?;
    std::fs::write(path, text).map_err(|error| Failure::run(format!("{}: {error}", path.display())))
}

fn draw(title: &str, of: &Description, cases: &[Case]) -> Result<String, Box<dyn Error>> {
    let mut text = String::new();
    let runs: Vec<(&str, &Run)> =
        cases.iter().filter_map(|case| Some((case.label.as_str(), case.runs.first()?))).collect();
    {
        let root = SVGBackend::with_string(&mut text, (WIDTH, 24 + ROW * runs.len().max(1) as u32))
            .into_drawing_area();
        root.fill(&WHITE)?;
        let root = root.titled(title, ("sans-serif", 15))?;
        // All pictures have the same axes, for comparison.
        let most_time = runs.iter().map(|(_, run)| end(&run.outcome)).fold(0.0, f64::max);
        let lines: Vec<[Vec<Line>; 2]> =
            runs.iter().map(|(_, run)| lines(&run.outcome, &run.groups)).collect();
        let most = |side: usize| {
            let values = lines.iter().flat_map(|sides| &sides[side]).flat_map(|line| &line.points);
            // With room for the legend.
            1.35 * values.map(|(_, value)| *value).fold(0.0, f64::max).max(1e-3)
        };
        let ranges = [0.0..most(0), 0.0..most(1)];
        let failures: Vec<Range<f64>> = of.failure.iter().map(|failure| failed(failure, most_time)).collect();
        for ((row, (label, run)), sides) in
            root.split_evenly((runs.len().max(1), 1)).iter().zip(&runs).zip(&lines)
        {
            for (side, area) in row.split_evenly((1, 2)).iter().enumerate() {
                let unit = ["Gb/s", "queue, KB"][side];
                picture(
                    area,
                    format!("{label} {unit} (seed {})", run.seed).trim_start(),
                    &sides[side],
                    &failures,
                    0.0..most_time,
                    ranges[side].clone(),
                )?;
            }
        }
        root.present()?;
    }
    Ok(text)
}

/// A line of a picture: time in ms.
struct Line {
    /// Its name in the legend.
    name: Option<String>,
    color: RGBColor,
    points: Vec<(f64, f64)>,
}

/// The lines of rates, and of queues.
fn lines(outcome: &Outcome, groups: &[Group]) -> [Vec<Line>; 2] {
    let mut rates = Vec::new();
    let flows = outcome.flows.len();
    let drawn =
        (0..flows).step_by(flows.div_ceil(FLOWS).max(1)).filter(|_| flows > 1 && groups.len() < flows);
    let drawn: Vec<usize> = drawn.collect();
    let count = drawn.len();
    for (at, flow) in drawn.into_iter().enumerate() {
        let is_allowed = !outcome.flows[flow].rates.is_empty();
        let series = if is_allowed { &outcome.flows[flow].rates } else { &outcome.flows[flow].goodputs };
        let gigabits: Vec<f64> = series.iter().map(|rate| rate / 1e9).collect();
        let what = if is_allowed { "rate allowed to a flow" } else { "goodput of a flow" };
        let what = format!("{what}, {count} of {flows} flows");
        rates.push(Line {
            name: (at == 0).then_some(what),
            color: GREY,
            points: thin(&outcome.times, &gigabits, FLOW_POINTS, mean),
        });
    }
    for (at, group) in groups.iter().enumerate() {
        let sum = |sample: usize| {
            let of = |flow: &super::outcome::FlowOutcome| flow.goodputs.get(sample).copied().unwrap_or(0.0);
            outcome.flows[group.flows.clone()].iter().map(of).sum::<f64>() / 1e9
        };
        let sums: Vec<f64> = (0..outcome.times.len()).map(sum).collect();
        rates.push(Line {
            name: Some(format!("goodput of {}", group.name)),
            color: COLORS[at % COLORS.len()],
            points: thin(&outcome.times, &sums, POINTS, mean),
        });
    }
    let longest = outcome.longest_queues();
    let queues = longest.into_iter().take(QUEUES).enumerate().map(|(at, queue)| {
        let lengths: Vec<f64> = queue.lengths.iter().map(|length| *length as f64 / 1e3).collect();
        Line {
            name: Some(queue.name.clone()),
            color: COLORS[at],
            points: thin(&outcome.times, &lengths, POINTS, most),
        }
    });
    [rates, queues.collect()]
}

fn picture(
    area: &Area<'_>,
    caption: &str,
    lines: &[Line],
    failures: &[Range<f64>],
    times: Range<f64>,
    values: Range<f64>,
) -> Result<(), Box<dyn Error>> {
    let top = values.end;
    let mut chart = ChartBuilder::on(area)
        .caption(caption, ("sans-serif", 13))
        .margin(4)
        .margin_right(14)
        .x_label_area_size(26)
        .y_label_area_size(52)
        .build_cartesian_2d(times, values)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .bold_line_style(RGBColor(225, 225, 225))
        .x_labels(8)
        .y_labels(5)
        .x_label_formatter(&|time| format!("{time} ms"))
        .y_label_formatter(&|value| format!("{value}"))
        .label_style(("sans-serif", 11))
        .draw()?;
    for (at, failure) in failures.iter().enumerate() {
        let corners = [(failure.start, 0.0), (failure.end, top)];
        let drawn = chart.draw_series([Rectangle::new(corners, FAILED.filled())])?;
        if at == 0 {
            drawn
                .label("failure")
                .legend(|(x, y)| Rectangle::new([(x, y - 4), (x + 14, y + 4)], FAILED.filled()));
        }
    }
    for line in lines {
        let style = ShapeStyle::from(line.color).stroke_width(1);
        let series = chart.draw_series(LineSeries::new(line.points.iter().copied(), style))?;
        if let Some(name) = &line.name {
            series
                .label(name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 14, y)], style.stroke_width(2)));
        }
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.15))
        .label_font(("sans-serif", 10))
        .draw()?;
    Ok(())
}

/// The time of an outage, in ms.
fn failed(failure: &FailureEntry, end: f64) -> Range<f64> {
    let ms = |time: Time| (time.0.as_secs_f64() * 1e3).min(end);
    ms(failure.at)..failure.until.map_or(end, ms)
}

fn end(outcome: &Outcome) -> f64 {
    outcome.times.last().map_or(0.0, |time| time.as_secs_f64() * 1e3)
}

/// At most `points` points of a series; each covers the samples since the previous one.
fn thin(times: &[Duration], values: &[f64], points: usize, of: fn(&[(f64, f64)]) -> f64) -> Vec<(f64, f64)> {
    // Samples have equal distances, except the last one.
    let before = [Duration::ZERO].into_iter().chain(times.iter().copied());
    let weighted = times.iter().zip(before).zip(values);
    let weighted: Vec<(f64, f64)> =
        weighted.map(|((time, before), value)| ((*time - before).as_secs_f64(), *value)).collect();
    let each = values.len().div_ceil(points).max(1);
    let chunks = times.chunks(each).zip(weighted.chunks(each));
    chunks.filter_map(|(times, values)| Some((times.last()?.as_secs_f64() * 1e3, of(values)))).collect()
}

fn mean(values: &[(f64, f64)]) -> f64 {
    let (time, area) =
        values.iter().fold((0.0, 0.0), |(time, area), (t, value)| (time + t, area + t * value));
    if time > 0.0 { area / time } else { 0.0 }
}

fn most(values: &[(f64, f64)]) -> f64 {
    values.iter().map(|(_, value)| *value).fold(0.0, f64::max)
}
