//! Time over size, as SVG.

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use plotters::backend::SVGBackend;
use plotters::chart::{ChartBuilder, SeriesLabelPosition};
use plotters::coord::combinators::IntoLogRange;
use plotters::drawing::IntoDrawingArea;
use plotters::element::PathElement;
use plotters::series::{DashedLineSeries, LineSeries};
use plotters::style::{BLACK, Color, ShapeStyle, WHITE};

use super::report::Case;
use super::section::over_the_fabric;
use super::sweep::{Cell, Simulated};
use crate::fabric::plot::COLORS;
use crate::failure::{Failure, OrFail};
use crate::quantity::Bytes;

const WIDTH: u32 = 1000;
const ROW: u32 = 380;

/// One picture for each setting: simulated times as solid lines, the cost model dashed.
pub(super) fn write(path: &Path, title: &str, cases: &[Case]) -> Result<(), Failure> {
    let text = draw(title, cases).map_err(|error| Failure::run(format!("drawing: {error}")))?;
    std::fs::write(path, text).or_fail(|| format!("--svg {}", path.display()))
}

fn draw(title: &str, cases: &[Case]) -> Result<String, Box<dyn Error>> {
    let mut text = String::new();
    {
        let extent = (WIDTH, 24 + ROW * cases.len().max(1) as u32);
        let root = SVGBackend::with_string(&mut text, extent).into_drawing_area();
        root.fill(&WHITE)?;
        let root = root.titled(title, ("sans-serif", 15))?;
        for (area, case) in root.split_evenly((cases.len().max(1), 1)).iter().zip(cases) {
            let sizes = &case.sweep.sizes;
            let times = || sizes.iter().flat_map(|size| &size.cells).filter_map(simulated);
            let least = times().fold(f64::INFINITY, f64::min);
            let most = times().fold(0.0, f64::max);
            let [Some(first), Some(last)] = [sizes.first(), sizes.last()] else { continue };
            if !least.is_finite() {
                continue;
            }
            let (first, last) = (first.bytes as f64, (last.bytes as f64).max(2.0 * first.bytes as f64));
            let mut chart = ChartBuilder::on(area)
                .caption(format!("{} µs", case.label).trim_start(), ("sans-serif", 13))
                .margin(4)
                .margin_right(24)
                .x_label_area_size(26)
                .y_label_area_size(60)
                .build_cartesian_2d(
                    (first..last).log_scale().base(4.0),
                    (least / 2.0..2.0 * most).log_scale(),
                )?;
            chart
                .configure_mesh()
                .light_line_style(WHITE)
                .x_labels(12)
                .x_label_formatter(&|size| Bytes(size.round() as u64).to_string())
                .label_style(("sans-serif", 11))
                .draw()?;
            for (column, algorithm) in over_the_fabric().enumerate() {
                let points = |of: fn(&Cell) -> Option<f64>| {
                    let point =
                        |size: &super::sweep::Size| Some((size.bytes as f64, of(&size.cells[column])?));
                    sizes.iter().filter_map(point).collect::<Vec<_>>()
                };
                let lines = points(simulated);
                if lines.is_empty() {
                    continue;
                }
                let style = ShapeStyle::from(COLORS[column % COLORS.len()]).stroke_width(2);
                chart
                    .draw_series(LineSeries::new(lines, style))?
                    .label(algorithm.to_string())
                    .legend(move |(x, y)| PathElement::new([(x, y), (x + 14, y)], style));
                let thin = style.stroke_width(1);
                chart.draw_series(DashedLineSeries::new(points(modelled), 4, 4, thin))?;
            }
            chart
                .configure_series_labels()
                .position(SeriesLabelPosition::UpperLeft)
                .background_style(WHITE.mix(0.8))
                .border_style(BLACK.mix(0.15))
                .label_font(("sans-serif", 11))
                .draw()?;
        }
        root.present()?;
    }
    Ok(text)
}

fn micros(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}

fn simulated(cell: &Cell) -> Option<f64> {
    match cell.simulated {
        Simulated::Time(time) => Some(micros(time)),
        _ => None,
    }
}

/// Only where there is a simulated time to compare it with.
fn modelled(cell: &Cell) -> Option<f64> {
    simulated(cell).and(cell.model.ok()).map(micros)
}
