//! Operations over time, as SVG: a row for each rank.

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use plotters::backend::SVGBackend;
use plotters::chart::ChartBuilder;
use plotters::drawing::{DrawingArea, IntoDrawingArea};
use plotters::element::Rectangle;
use plotters::style::{Color, RGBColor, WHITE};

use super::merged::Merged;
use crate::failure::{Failure, OrFail};

const WIDTH: u32 = 1000;
/// Height of a rank's row, and the margins, in pixels.
const ROW: u32 = 22;
const AROUND: u32 = 90;
/// The most rows.
const ROWS_MAX: u32 = 256;
/// Colors of an operation that waits for other ranks to start, that is in progress, and that has not ended.
const COLORS: [RGBColor; 3] = [RGBColor(174, 199, 232), RGBColor(31, 119, 180), RGBColor(214, 39, 40)];

/// Draws the charts below each other.
pub(super) fn write(path: &Path, merged: &[Merged<'_>]) -> Result<(), Failure> {
    let text = draw(merged).map_err(|error| Failure::run(format!("drawing: {error}")))?;
    std::fs::write(path, text).or_fail(|| format!("--svg {}", path.display()))
}

fn height(merged: &Merged<'_>) -> u32 {
    merged.diagnosis.size.min(ROWS_MAX) * ROW + AROUND
}

fn draw(all: &[Merged<'_>]) -> Result<String, Box<dyn Error>> {
    let mut text = String::new();
    {
        let root =
            SVGBackend::with_string(&mut text, (WIDTH, all.iter().map(height).sum())).into_drawing_area();
        root.fill(&WHITE)?;
        let mut rest = root.clone();
        for merged in all {
            let (this, below) = rest.split_vertically(height(merged));
            chart(&this, merged)?;
            rest = below;
        }
        root.present()?;
    }
    Ok(text)
}

fn chart(
    area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
    merged: &Merged<'_>,
) -> Result<(), Box<dyn Error>> {
    let parts = || merged.operations.iter().flat_map(|of| of.parts.iter());
    let first = parts().filter_map(|(_, part)| part.began).min().unwrap_or_default();
    let taken = merged.taken();
    let end = |ended: Option<Duration>| ended.unwrap_or(taken).saturating_sub(first).as_secs_f64() * 1e3;
    let last = parts().map(|(_, part)| end(part.ended)).fold(1e-3, f64::max);
    let rows = f64::from(merged.diagnosis.size.min(ROWS_MAX));
    let title = format!(
        "communicator {:016x}: the last operations (light: until the first progress; red: not ended)",
        merged.diagnosis.communicator
    );
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 14))
        .margin(8)
        .margin_right(24)
        .x_label_area_size(36)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..last * 1.01, rows..0.0)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .light_line_style(WHITE)
        .bold_line_style(RGBColor(225, 225, 225))
        .x_desc("ms")
        .y_desc("rank")
        .y_labels(rows as usize)
        .y_label_formatter(&|rank| format!("{rank:.0}"))
        .label_style(("sans-serif", 11))
        .draw()?;
    for (rank, part) in parts().filter(|(rank, _)| *rank < ROWS_MAX) {
        let Some(began) = part.began else { continue };
        let at = |time: Duration| time.saturating_sub(first).as_secs_f64() * 1e3;
        let (top, bottom) = (f64::from(*rank) + 0.15, f64::from(*rank) + 0.85);
        let moved = part.first.unwrap_or(if part.ended.is_some() { began } else { taken });
        let color = if part.ended.is_some() { COLORS[1] } else { COLORS[2] };
        for (from, to, color) in [(at(began), at(moved), COLORS[0]), (at(moved), end(part.ended), color)] {
            chart.draw_series([Rectangle::new([(from, top), (to.max(from), bottom)], color.filled())])?;
        }
    }
    Ok(())
}
