//! `ferroce fabric allreduce`: collectives in place of flows. Ranks of `ferroce_collectives` run in the fabric with all
//! algorithms, and the results are compared with the cost model.

mod plot;
mod ranks;
mod report;
mod section;
mod sweep;

use std::process::ExitCode;

pub(super) use section::{Algorithms, AllreduceSection, ByteList, MOST_RANKS};

use super::report::heading;
use super::{Args, Base, campaign, effect};
use crate::endpoint::Interrupt;
use crate::failure::Failure;
use crate::output::{self, note, say};
use report::Case;
use sweep::sweep;

/// Runs the all-reduces of each setting and prints the results.
///
/// # Errors
/// An option applies only to flows, a rank fails, an element is wrong, or the command is interrupted.
pub(super) fn run(
    args: &Args,
    bases: &[Base],
    section: &AllreduceSection,
    interrupt: &Interrupt,
) -> Result<ExitCode, Failure> {
    check(args)?;
    let carry = |number: usize, progress: &mut dyn FnMut(f64) -> bool| {
        let description = &bases[number].description;
        let compiled = description.compile().map_err(|wrong| args.of_option(&wrong))?;
        let mut sweep = || sweep(&compiled.plan, section, description.links.rate, progress);
        // Each rank logs, for each algorithm, how it met the others; here this is noise.
        match tracing::enabled!(target: "ferroce_collectives", tracing::Level::DEBUG) {
            true => sweep(),
            false => tracing::subscriber::with_default(tracing::subscriber::NoSubscriber::default(), sweep),
        }
    };
    let ranks = section.size(bases[0].description.topology.hosts());
    let at_a_time = section::MOST_CHANNELS / section.channel_bytes(ranks);
    let threads = args.threads().min(at_a_time as usize).min(bases.len());
    let megabytes = section.channel_bytes(ranks).div_ceil(1_000_000);
    let at_once =
        if threads > 1 { format!(", for each of {threads} settings at a time") } else { String::new() };
    note!("{ranks} ranks need {megabytes} MB for their messages{at_once}");
    let sweeps = campaign::carry_out(bases.len(), threads, interrupt, &carry)?;
    let cases: Vec<Case> = bases
        .iter()
        .zip(sweeps)
        .filter_map(|(base, sweep)| Some(Case { label: base.label.clone(), sweep: sweep? }))
        .collect();
    let notes = effect::notes(&bases.iter().map(Base::effect).collect::<Vec<_>>());
    let command = args.command_of_all(bases);
    let interrupted = interrupt.check().err().map(|_| "interrupted: the report covers a part of the run");
    let first = &bases[0];
    if args.json.is_asked() {
        let of = &first.description;
        args.json.write(&report::json(of, &command, interrupted, &notes, &cases)).map(drop)?;
    } else {
        let labels: Vec<&str> = cases.iter().map(|case| case.label.as_str()).collect();
        output::write(format_args!("{}\n", heading(&first.description, &first.memory, &labels)))?;
        for note in notes.iter().map(String::as_str).chain(interrupted) {
            output::write(format_args!("note      {note}\n"))?;
        }
        output::write(format_args!("{}", report::text(section, ranks, &cases)))?;
        say!("{}\n\nrepeat it by: {command}", super::report::memory())?;
    }
    if let Some(path) = &args.svg {
        plot::write(path, &command, &cases)?;
    }
    interrupt.check()?;
    Ok(ExitCode::SUCCESS)
}

/// Rejects options that apply only to flows and messages.
fn check(args: &Args) -> Result<(), Failure> {
    let is_given = [
        (args.seeds > 1, "--seeds", "one seed: a setting has one row for each size"),
        (args.series, "--series", "left out: an allreduce has no rates over time"),
        (
            !args.pcap.is_empty(),
            "--pcap",
            "left out: each algorithm of an allreduce is a simulation of its own",
        ),
        (args.settings.sample.is_some(), "--sample", "left out: an allreduce has no rates over time"),
    ];
    match is_given.into_iter().find(|(is_given, ..)| *is_given) {
        Some((_, option, right)) => Err(Failure::usage(format!("{option}: must be {right}"))),
        None => Ok(()),
    }
}
