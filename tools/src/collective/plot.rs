//! Bandwidth over size, as SVG.

use std::error::Error;
use std::path::Path;

use plotters::backend::SVGBackend;
use plotters::chart::{ChartBuilder, SeriesLabelPosition};
use plotters::drawing::IntoDrawingArea;
use plotters::element::PathElement;
use plotters::series::LineSeries;
use plotters::style::{BLACK, Color, RGBColor, ShapeStyle, WHITE};

use super::report::{Row, Timing};
use crate::failure::{Failure, OrFail};
use crate::quantity::Bytes;

const EXTENT: (u32, u32) = (800, 420);
const COLORS: [RGBColor; 2] = [RGBColor(31, 119, 180), RGBColor(214, 39, 40)];

/// Draws one line for out-of-place and one for in-place results.
pub(super) fn write(path: &Path, title: &str, rows: &[Row]) -> Result<(), Failure> {
    let text = draw(title, rows).map_err(|error| Failure::run(format!("drawing: {error}")))?;
    std::fs::write(path, text).or_fail(|| format!("--svg {}", path.display()))
}

fn draw(title: &str, rows: &[Row]) -> Result<String, Box<dyn Error>> {
    type Pick = fn(&Row) -> Option<&Timing>;
    let lines: [(&str, Pick); 2] =
        [("out of place", |row| row.out_of_place.as_ref()), ("in place", |row| row.in_place.as_ref())];
    // Each size is a multiple of the previous one, so the axis is logarithmic.
    let place = |row: &Row| (row.bytes.max(1) as f64).log2();
    let [least, most] = [rows.first(), rows.last()].map(|row| row.map_or(0.0, place));
    let bandwidths = rows.iter().flat_map(Row::timings).map(|timing| timing.busbw_gb_s);
    let greatest = 1.15 * bandwidths.fold(0.0, f64::max).max(1e-6);
    let mut text = String::new();
    {
        let root = SVGBackend::with_string(&mut text, EXTENT).into_drawing_area();
        root.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&root)
            .caption(title, ("sans-serif", 16))
            .margin(8)
            .margin_right(24)
            .x_label_area_size(40)
            .y_label_area_size(64)
            .build_cartesian_2d(least..most.max(least + 1.0), 0.0..greatest)?;
        chart
            .configure_mesh()
            .light_line_style(WHITE)
            .bold_line_style(RGBColor(225, 225, 225))
            .x_labels(12)
            .x_desc("size")
            .y_desc("busbw, GB/s")
            .x_label_formatter(&|size| Bytes(size.exp2().round() as u64).to_string())
            .label_style(("sans-serif", 12))
            .draw()?;
        for ((name, pick), color) in lines.into_iter().zip(COLORS) {
            let points = rows.iter().filter_map(|row| Some((place(row), pick(row)?.busbw_gb_s)));
            let points: Vec<(f64, f64)> = points.collect();
            if points.is_empty() {
                continue;
            }
            let style = ShapeStyle::from(color).stroke_width(2);
            chart
                .draw_series(LineSeries::new(points, style))?
                .label(name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 14, y)], style));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.15))
            .label_font(("sans-serif", 12))
            .draw()?;
        root.present()?;
    }
    Ok(text)
}
