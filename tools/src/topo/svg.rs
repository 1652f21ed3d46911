//! The host as a picture: a row for each NUMA node with the PCI tree of its GPUs and NICs, then the ring, the trees and
//! the placement problems.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::error::Error;
use std::f64::consts::TAU;
use std::path::Path;

use ferroce::driver::topology::{Distance, PciAddress, Topology};
use ferroce_collectives::topology::Placement;
use plotters::backend::SVGBackend;
use plotters::coord::Shift;
use plotters::drawing::{DrawingArea, IntoDrawingArea};
use plotters::element::{Circle, PathElement, Rectangle, Text};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{BLACK, Color, IntoFont, RGBColor, ShapeStyle, TextStyle, WHITE};

use super::report::{Report, Tree};
use super::text::{gigabits, places};
use super::tree::{Branch, grow};
use crate::failure::{Failure, OrFail};

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Point = (i32, i32);

/// The most devices of a row, and ranks in a ring or tree.
const MOST_LEAVES: usize = 48;
const MOST_RANKS: usize = 64;
const LEAF: (i32, i32) = (98, 44);
const GAP: i32 = 10;
const LEVEL: i32 = 46;
/// The x coordinate of the devices, to the right of the node's name.
const LEFT: i32 = 190;
const LEAST_WIDTH: i32 = 900;
const SHAPES: i32 = 280;
const LINE: i32 = 17;
/// The width of a letter at the text size, rounded up.
const LETTER: usize = 7;

const GPU: RGBColor = RGBColor(214, 235, 205);
const NIC: RGBColor = RGBColor(208, 224, 242);
const NODE: RGBColor = RGBColor(246, 246, 246);
const GREY: RGBColor = RGBColor(150, 150, 150);
const NEAR: RGBColor = RGBColor(44, 140, 44);
const THROUGH_CPU: RGBColor = RGBColor(230, 126, 0);
const ACROSS: RGBColor = RGBColor(205, 30, 30);

/// The parts of a node that are drawn.
struct Row {
    title: Vec<String>,
    branches: Vec<Branch>,
    leaves: usize,
    left_out: usize,
    levels: i32,
}

pub(super) fn write(
    path: &Path,
    report: &Report,
    host: &Topology,
    placement: &Placement,
) -> Result<(), Failure> {
    let text = draw(report, host, placement).map_err(|error| Failure::run(format!("drawing: {error}")))?;
    std::fs::write(path, text).or_fail(|| format!("--svg {}", path.display()))
}

fn draw(report: &Report, host: &Topology, placement: &Placement) -> Result<String, Box<dyn Error>> {
    let rows = rows(report, host);
    let widest = rows.iter().map(|row| row.leaves as i32).max().unwrap_or(0);
    let width = (LEFT + widest * (LEAF.0 + GAP) + 2 * GAP).max(LEAST_WIDTH);
    let process = report.process.iter().flat_map(|process| &process.warnings);
    let warnings: Vec<String> = report
        .warnings
        .iter()
        .chain(process)
        .map(|warning| format!("{}: {}. Cost: {}.", warning.subject, warning.what, warning.cost))
        .collect();
    let lines: Vec<String> = warnings.iter().flat_map(|text| wrap(text, width as usize / LETTER)).collect();
    let top = 40;
    let below = top + rows.iter().map(Row::height).sum::<i32>();
    let has_shapes = (2..=MOST_RANKS).contains(&report.ranks.len());
    let shapes = if has_shapes { SHAPES } else { 0 };
    let height = below + shapes + LINE * (lines.len() as i32 + 4);
    let mut text = String::new();
    {
        let root = SVGBackend::with_string(&mut text, (width as u32, height as u32)).into_drawing_area();
        root.fill(&WHITE)?;
        write_at(&root, (GAP, 20), &format!("topology of {}", report.host), 16, HPos::Left)?;
        let mut boxes = BTreeMap::new();
        let mut y = top;
        for row in &rows {
            row.draw(&root, report, width, y, &mut boxes)?;
            y += row.height();
        }
        for rank in &placement.ranks {
            let nic = rank.nic.and_then(|nic| host.nics.get(nic)?.pci);
            let ends = rank.gpu.and_then(|gpu| boxes.get(&gpu)).zip(nic.and_then(|nic| boxes.get(&nic)));
            if let Some((gpu, nic)) = ends {
                draw_use(&root, *gpu, *nic, color(rank.distance.name()))?;
            }
        }
        if has_shapes {
            draw_ring(&root, report, (150, y + SHAPES / 2))?;
            let half = (width - 320) / 2;
            for (number, tree) in report.trees.iter().enumerate() {
                draw_tree(
                    &root,
                    tree,
                    &format!("tree {number}"),
                    (310 + half * number as i32, y + 30, half - 20),
                )?;
            }
        }
        let mut y = y + shapes + LINE;
        let title = match warnings.len() {
            0 => "placement: no problem found".to_owned(),
            count => format!("placement that costs performance: {count}"),
        };
        for line in std::iter::once(&title).chain(&lines) {
            write_at(&root, (GAP, y), line, 12, HPos::Left)?;
            y += LINE;
        }
        legend(&root, y + LINE / 2)?;
        root.present()?;
    }
    Ok(text)
}

fn legend(root: &Area<'_>, y: i32) -> Result<(), Box<dyn Error>> {
    let mut x = GAP;
    for (color, text) in [
        (NEAR, "PIX, PXB: by PCI switches"),
        (THROUGH_CPU, "PHB, NODE: through the CPU"),
        (ACROSS, "SYS: between sockets"),
        (GREY, "not told"),
    ] {
        root.draw(&PathElement::new([(x, y), (x + 24, y)], ShapeStyle::from(color).stroke_width(3)))?;
        write_at(root, (x + 30, y), text, 12, HPos::Left)?;
        x += 210;
    }
    Ok(())
}

fn rows(report: &Report, host: &Topology) -> Vec<Row> {
    let known = report.nodes.iter().map(|node| {
        let socket = node.socket.map_or(String::new(), |socket| format!(", socket {socket}"));
        let memory = node.memory.map_or(String::new(), |bytes| format!("{} GiB", bytes >> 30));
        let title = vec![format!("NUMA node {}{socket}", node.number), format!("CPUs {}", node.cpus), memory];
        (title, places(report, Some(node.number)))
    });
    let untold = (vec!["NUMA node not reported".to_owned()], places(report, None));
    known
        .chain([untold])
        .filter(|(_, devices)| !devices.is_empty())
        .map(|(title, mut devices)| {
            let left_out = devices.len().saturating_sub(MOST_LEAVES);
            devices.truncate(MOST_LEAVES);
            let branches = grow(host, &devices);
            let levels = branches.iter().map(levels).max().unwrap_or(0).min(8);
            Row { title, leaves: devices.len(), left_out, levels, branches }
        })
        .collect()
}

fn levels(branch: &Branch) -> i32 {
    1 + branch.below.iter().map(levels).max().unwrap_or(-1)
}

impl Row {
    fn height(&self) -> i32 {
        self.levels * LEVEL + LEAF.1 + 64
    }

    fn draw(
        &self,
        root: &Area<'_>,
        report: &Report,
        width: i32,
        top: i32,
        boxes: &mut BTreeMap<PciAddress, Point>,
    ) -> Result<(), Box<dyn Error>> {
        let frame = [(GAP, top), (width - GAP, top + self.height() - GAP)];
        root.draw(&Rectangle::new(frame, NODE.filled()))?;
        root.draw(&Rectangle::new(frame, GREY))?;
        for (nth, line) in self.title.iter().enumerate() {
            write_at(root, (2 * GAP, top + 18 + LINE * nth as i32), &cut(line, 28), 12, HPos::Left)?;
        }
        if self.left_out > 0 {
            let line = format!("and {} more devices", self.left_out);
            write_at(root, (2 * GAP, top + 18 + LINE * self.title.len() as i32), &line, 12, HPos::Left)?;
        }
        let bottom = top + 20 + self.levels * LEVEL;
        let mut x = LEFT;
        for branch in &self.branches {
            draw_branch(root, report, branch, (top + 20, bottom), &mut x, boxes)?;
        }
        Ok(())
    }
}

/// Draws a branch: the bridges at the top of the row, the devices at the bottom. Returns its position.
fn draw_branch(
    root: &Area<'_>,
    report: &Report,
    branch: &Branch,
    (top, bottom): (i32, i32),
    x: &mut i32,
    boxes: &mut BTreeMap<PciAddress, Point>,
) -> Result<Point, Box<dyn Error>> {
    if let Some(address) = branch.device {
        let at = (*x + LEAF.0 / 2, bottom);
        *x += LEAF.0 + GAP;
        draw_device(root, report, address, at)?;
        boxes.insert(address, at);
        return Ok(at);
    }
    let mut below = Vec::new();
    for branch in &branch.below {
        below.push(draw_branch(root, report, branch, ((top + LEVEL).min(bottom), bottom), x, boxes)?);
    }
    let at = match (below.first(), below.last()) {
        (Some(first), Some(last)) => ((first.0 + last.0) / 2, top),
        _ => (*x, top),
    };
    let bend = top + LEVEL / 2;
    for (end_x, end_y) in below {
        let line = [(at.0, top), (at.0, bend), (end_x, bend), (end_x, end_y)];
        root.draw(&PathElement::new(line, GREY))?;
    }
    root.draw(&Circle::new(at, 4, GREY.filled()))?;
    let name = match &branch.names[..] {
        [first, .., last] if first.starts_with("pci") => format!("{first} {last}"),
        [.., last] => last.clone(),
        [] => String::new(),
    };
    write_at(root, (at.0 + 7, top - 4), &cut(&name, 26), 10, HPos::Left)?;
    Ok(at)
}

fn draw_device(
    root: &Area<'_>,
    report: &Report,
    address: PciAddress,
    (x, y): Point,
) -> Result<(), Box<dyn Error>> {
    let gpu = report.gpus.iter().find(|gpu| gpu.function.address == address);
    let nic = report
        .nics
        .iter()
        .find(|nic| nic.function.as_ref().is_some_and(|function| function.address == address));
    let (name, second, fill) = match (gpu, nic) {
        (Some(gpu), _) => {
            let name = format!("GPU {}", gpu.number);
            let rank = report.ranks.iter().position(|rank| rank.name == name);
            (name, rank.map_or(String::new(), |rank| format!("rank {rank}")), GPU)
        }
        (_, Some(nic)) => {
            let rate = nic.rate.map_or("rate not reported".to_owned(), gigabits);
            let rate = if nic.state == "down" { "down".to_owned() } else { rate };
            (nic.name.clone(), rate, NIC)
        }
        _ => ("network".to_owned(), "no interface".to_owned(), WHITE),
    };
    // Subjects are names; for a NIC, followed by its RNICs in parentheses.
    let is_subject = |subject: &str| {
        subject == name || subject.strip_prefix(&name).is_some_and(|rest| rest.starts_with(" ("))
    };
    let is_marked = report.warnings.iter().any(|warning| is_subject(&warning.subject));
    let frame = [(x - LEAF.0 / 2, y), (x + LEAF.0 / 2, y + LEAF.1)];
    root.draw(&Rectangle::new(frame, fill.filled()))?;
    let edge = if is_marked { ShapeStyle::from(ACROSS).stroke_width(2) } else { ShapeStyle::from(GREY) };
    root.draw(&Rectangle::new(frame, edge))?;
    let [address, name] = [address.to_string(), cut(&name, 15)];
    for (nth, (line, size)) in [(name, 12), (second, 11), (address, 9)].into_iter().enumerate() {
        write_at(root, (x, y + 10 + 13 * nth as i32), &line, size, HPos::Center)?;
    }
    Ok(())
}

/// Draws a line from a GPU to the NIC that it uses, outside their boxes.
fn draw_use(root: &Area<'_>, gpu: Point, nic: Point, color: RGBColor) -> Result<(), Box<dyn Error>> {
    let style = ShapeStyle::from(color).stroke_width(3);
    let below = |at: Point| (at.0, at.1 + LEAF.1);
    let line = match gpu.1.cmp(&nic.1) {
        Ordering::Equal => {
            let [from, to] = [gpu, nic].map(below);
            vec![from, (from.0, from.1 + 10), (to.0, to.1 + 10), to]
        }
        Ordering::Less => vec![below(gpu), nic],
        Ordering::Greater => vec![gpu, below(nic)],
    };
    root.draw(&PathElement::new(line, style))?;
    Ok(())
}

fn draw_ring(root: &Area<'_>, report: &Report, (x, y): Point) -> Result<(), Box<dyn Error>> {
    let count = report.ring.hops.len();
    let at = |rank: usize| {
        let angle = TAU * (rank % count) as f64 / count as f64 - TAU / 4.0;
        (x + (100.0 * angle.cos()) as i32, y + (100.0 * angle.sin()) as i32)
    };
    for (rank, hop) in report.ring.hops.iter().enumerate() {
        let style = ShapeStyle::from(color(hop)).stroke_width(3);
        root.draw(&PathElement::new([at(rank), at(rank + 1)], style))?;
    }
    for rank in 0..count {
        draw_rank(root, rank, at(rank))?;
    }
    write_at(root, (x, y), "ring", 13, HPos::Center)
}

/// Draws the ranks in order from left to right, which is the in-order traversal of the binary tree.
fn draw_tree(
    root: &Area<'_>,
    tree: &Tree,
    name: &str,
    (x, y, width): (i32, i32, i32),
) -> Result<(), Box<dyn Error>> {
    let count = tree.parents.len();
    let depth = |rank: usize| {
        let up = std::iter::successors(Some(rank), |rank| tree.parents.get(*rank).copied().flatten());
        up.take(count).count() - 1
    };
    let step = 200 / (tree.depth.max(1) as i32);
    let at =
        |rank: usize| (x + (2 * rank as i32 + 1) * width / (2 * count as i32), y + step * depth(rank) as i32);
    for (rank, parent) in tree.parents.iter().enumerate() {
        if let Some(parent) = parent {
            root.draw(&PathElement::new([at(rank), at(*parent)], ShapeStyle::from(GREY).stroke_width(2)))?;
        }
    }
    for rank in 0..count {
        draw_rank(root, rank, at(rank))?;
    }
    write_at(root, (x + width / 2, y + 225), name, 13, HPos::Center)
}

fn draw_rank(root: &Area<'_>, rank: usize, at: Point) -> Result<(), Box<dyn Error>> {
    root.draw(&Circle::new(at, 11, WHITE.filled()))?;
    root.draw(&Circle::new(at, 11, BLACK))?;
    write_at(root, at, &rank.to_string(), 11, HPos::Center)
}

fn color(distance: &str) -> RGBColor {
    let is = |kinds: &[Distance]| kinds.iter().any(|kind| kind.name() == distance);
    match distance {
        _ if is(&[Distance::Pix, Distance::Pxb]) => NEAR,
        _ if is(&[Distance::Phb, Distance::Node]) => THROUGH_CPU,
        _ if is(&[Distance::Sys]) => ACROSS,
        _ => GREY,
    }
}

fn write_at(root: &Area<'_>, at: Point, text: &str, size: i32, side: HPos) -> Result<(), Box<dyn Error>> {
    let style = TextStyle::from(("sans-serif", size).into_font()).pos(Pos::new(side, VPos::Center));
    root.draw(&Text::new(text.to_owned(), at, style))?;
    Ok(())
}

fn cut(text: &str, most: usize) -> String {
    match text.chars().nth(most) {
        None => text.to_owned(),
        Some(_) => text.chars().take(most - 1).chain(['…']).collect(),
    }
}

/// Wraps text into lines of at most `most` characters, unless a word is longer; all lines after the first are indented.
fn wrap(text: &str, most: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= most => {
                line.push(' ');
                line.push_str(word);
            }
            // XML collapses plain spaces there.
            Some(_) => lines.push(format!("\u{a0}\u{a0}\u{a0}{word}")),
            None => lines.push(word.to_owned()),
        }
    }
    lines
}
