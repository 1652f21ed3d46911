//! ferroce's collectives compared with Open MPI's, and with gloo's if there is a torch: all-reduce and all-gather from
//! 4 B to 64 MiB, inside a host and between two namespaces, in turns.
//!
//! All are timed in the same way: back-to-back calls, the mean of the slowest rank. Every element is compared with the
//! expected one. A ratio is that of times in one round; the table has the median of the rounds. gloo runs in every
//! third round.

mod contender;
mod place;
mod raw;
mod results;

use std::error::Error;

use clap::Parser;
use contender::{Contender, Job, Programs};
use ferroce::driver::machine::{LineTime, Repetitions};
use ferroce_benches::report::SheetOptions;
use place::{Place, Stand};
use results::{Measured, Results};

pub(crate) type Outcome<T> = Result<T, Box<dyn Error>>;

/// Collectives beside Open MPI and gloo
#[derive(Parser)]
struct Args {
    /// Only these places
    #[arg(long, value_enum, value_delimiter = ',')]
    place: Vec<Place>,
    /// Only so many ranks: 2, which are what the aims are about, or 4
    #[arg(long, value_delimiter = ',', default_values_t = [2, 4], value_parser = parse_ranks)]
    ranks: Vec<usize>,
    /// Only these operations: all_reduce, all_gather
    #[arg(long, value_delimiter = ',', default_values_t = OPERATIONS.map(str::to_owned), value_parser = OPERATIONS)]
    operation: Vec<String>,
    #[command(flatten)]
    sheet: SheetOptions,
    /// Moves frames as one end of two, in place of everything else
    #[arg(long, hide = true, value_name = "DEVICE,END,MAC")]
    raw_end: Option<raw::End>,
}

fn parse_ranks(text: &str) -> Result<usize, String> {
    match text {
        "2" => Ok(2),
        "4" => Ok(4),
        _ => Err("must be 2 or 4".to_owned()),
    }
}

const OPERATIONS: [&str; 2] = ["all_reduce", "all_gather"];

/// Sizes, and how often each is timed: from 4 B on, each four times the previous one.
const SIZES: [(u64, u64, u32, u32); 4] = [
    (4, 16 << 10, 2000, 200),
    (64 << 10, 256 << 10, 200, 20),
    (1 << 20, 4 << 20, 40, 5),
    (16 << 20, 64 << 20, 5, 2),
];
/// For a functional test.
const FEW_SIZES: [(u64, u64, u32, u32); 1] = [(4, 16 << 10, 20, 2)];

fn main() -> Outcome<()> {
    let args = Args::parse();
    if let Some(end) = &args.raw_end {
        return raw::run(end);
    }
    let bench = args.sheet.bench;
    let sizes: &[_] = if bench { &SIZES } else { &FEW_SIZES };
    let programs = Programs::new(bench)?;
    let mut results = Results::new(if bench { args.sheet.rounds() } else { 1 });
    for contender in Contender::ALL {
        if let Some(reason) = programs.lacks(contender) {
            results.leave_out(contender.name().to_owned(), reason.to_owned());
        }
    }
    let cores = cores()?;
    results.print_start();
    for place in Place::ALL.into_iter().filter(|place| args.place.is_empty() || args.place.contains(place)) {
        for ranks in args.ranks.iter().copied() {
            let stand = match Stand::new(place, ranks, cores) {
                Ok(stand) => stand,
                Err(error) => {
                    results.leave_out(format!("{ranks} ranks {}", place.name()), error.to_string());
                    continue;
                }
            };
            for operation in OPERATIONS.into_iter().filter(|name| args.operation.iter().any(|of| of == name))
            {
                let mut measured = Measured::new(place, ranks, operation);
                measure(&programs, &stand, sizes, &mut results, &mut measured);
                // Printed now, since the whole run takes long.
                measured.print();
                results.measured.push(measured);
            }
        }
    }
    results.print_end();
    args.sheet.save(|| results.json(), || results.svg())?;
    results.verdict()
}

/// The first two cores that this process may use.
fn cores() -> Outcome<[usize; 2]> {
    let cores: Vec<usize> =
        core_affinity::get_core_ids().unwrap_or_default().iter().map(|core| core.id).collect();
    match cores[..] {
        [] => Err("the cores that this process may use are not known".into()),
        [one] => Ok([one, one]),
        [a, b, ..] => Ok([a, b]),
    }
}

/// Measures all rounds of one operation at one place.
fn measure(
    programs: &Programs,
    stand: &Stand,
    sizes: &[(u64, u64, u32, u32)],
    results: &mut Results,
    measured: &mut Measured,
) {
    for round in 0..results.rounds {
        eprintln!(
            "collectives: {} of {} ranks {}: round {} of {}",
            measured.operation,
            stand.ranks,
            stand.place.name(),
            round + 1,
            results.rounds
        );
        let mut turn = Contender::ALL;
        // In forward and reverse order, so that slow changes affect all alike.
        if round % 2 == 1 {
            turn.reverse();
        }
        for &(least, most, iterations, warmup) in sizes {
            // Each rank of an all-gather has a block.
            let least =
                if measured.operation == "all_gather" { least.max(4 * stand.ranks as u64) } else { least };
            let job = Job { operation: measured.operation, least, most, iterations, warmup };
            for contender in
                turn.into_iter().filter(|contender| programs.measures(*contender, stand, &job, round))
            {
                let mut repetitions = Repetitions::of(1);
                loop {
                    let before = LineTime::measure();
                    match programs.run(contender, stand, &job) {
                        Ok(times) => {
                            if results.state.counts([before, LineTime::measure()], &mut repetitions) {
                                measured.add(round, contender, &times);
                                break;
                            }
                        }
                        Err(error) => {
                            eprintln!("collectives: {}: {error}", contender.name());
                            measured.failures.push((contender, format!("{} to {most} B: {error}", least)));
                            break;
                        }
                    }
                }
            }
        }
    }
}
