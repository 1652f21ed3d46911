//! The whole system compared with its upper bound and with other stacks: the driver alone, ferroce, the kernel's TCP
//! and UDP and UCX over TCP on the same link, and a ring in shared memory, in turns within each round, between two
//! processes on their own cores.
//!
//! Every result of a line comes from one round; the table has the median of the rounds and their spread. ICRCs are
//! generated and checked at both ends, and the data is compared at the end of each case.

mod case;
mod end;
mod link;
mod memory;
mod pair;
mod plan;
mod raw;
mod results;
mod ring;
mod sockets;
mod ucx;
mod verbs;

use std::collections::{BTreeMap, BTreeSet};

use case::{Case, Contender};
use clap::Parser;
use end::{Job, Outcome};
use ferroce::driver::machine::{Repetitions, Rounds};
use ferroce_benches::report::SheetOptions;
use link::{Driver, Link};
use plan::{CONTENDERS, GROUPS, Group, Line};
use results::{Measured, Results};

/// The datapath beside its ceiling and its rivals
#[derive(Parser)]
struct Args {
    /// Only these drivers
    #[arg(long, value_enum, value_delimiter = ',')]
    driver: Vec<Driver>,
    /// Only the lines whose number begins so (1, 2b), and not the tables of all message sizes
    #[arg(long, value_delimiter = ',', value_name = "LINE")]
    only: Vec<String>,
    #[command(flatten)]
    sheet: SheetOptions,
    /// One of the two processes
    #[arg(long, hide = true, value_name = "JOB")]
    end: Option<String>,
}

/// Milliseconds of a case in one round.
const MILLIS: u64 = 150;
const MILLIS_QUICK: u64 = 40;
/// Rounds of the cases that are used only for the tables.
const DETAIL_ROUNDS: usize = 3;

fn main() -> Outcome<()> {
    let args = Args::parse();
    if let Some(job) = &args.end {
        return end::main(job);
    }
    let rounds = args.sheet.rounds();
    let millis = if args.sheet.is_quick() { MILLIS_QUICK } else { MILLIS };
    let lines = plan::lines();
    let lines: Vec<&Line> = lines.iter().filter(|line| args.wants(line)).collect();
    if lines.is_empty() && !args.only.is_empty() {
        return Err("--only names no line of these drivers; lines are 1a, 1b, ...".into());
    }
    let cores = cores();
    let mut results = Results::new(rounds, millis, cores);
    let mut state = Rounds::new();
    for group in GROUPS {
        let mut wanted: BTreeSet<Case> = BTreeSet::new();
        for line in lines.iter().filter(|line| line.group == group) {
            wanted.extend(line.figure.cases());
        }
        if wanted.iter().any(|case| case.contender() == Contender::Ring) {
            // The results depend on where the two cores are.
            wanted.insert(Case::RingRoundTrip);
        }
        let mut details: BTreeSet<Case> = BTreeSet::new();
        if args.only.is_empty() && args.takes(group.driver) {
            details.extend(group.details());
        }
        if wanted.is_empty() && details.is_empty() {
            continue;
        }
        match Link::new(group.driver, group.mtu) {
            Ok(link) => {
                let (repetitions, state) = (BTreeMap::new(), &mut state);
                let link = &link;
                let mut turns =
                    Turns { group, link, wanted, details, rounds, millis, cores, repetitions, state };
                results.groups.push(turns.run());
            }
            Err(error) => results.leave_out(group, error.to_string()),
        }
    }
    results.state = state;
    results.print(&lines);
    args.sheet.save(|| results.json(&lines), || results.svg())?;
    if results.groups.iter().all(|group| group.cases.is_empty()) {
        return Err("nothing could be measured".into());
    }
    Ok(())
}

impl Args {
    fn takes(&self, driver: Driver) -> bool {
        self.driver.is_empty() || self.driver.contains(&driver)
    }

    fn wants(&self, line: &Line) -> bool {
        let named = |number: &String| line.id.starts_with(number.as_str());
        self.takes(line.group.driver) && (self.only.is_empty() || self.only.iter().any(named))
    }
}

/// One for each end: the first two that this process may use, or the only one for both.
fn cores() -> [Option<usize>; 2] {
    let cores: Vec<_> =
        core_affinity::get_core_ids().unwrap_or_default().iter().map(|core| core.id).collect();
    let first = cores.first().copied();
    [first, cores.get(1).copied().or(first)]
}

/// The rounds of one group.
struct Turns<'a> {
    group: Group,
    link: &'a Link,
    /// In every round, and in the first ones.
    wanted: BTreeSet<Case>,
    details: BTreeSet<Case>,
    rounds: usize,
    millis: u64,
    cores: [Option<usize>; 2],
    /// The repetitions that are left for each case.
    repetitions: BTreeMap<Case, Repetitions>,
    state: &'a mut Rounds,
}

impl Turns<'_> {
    fn run(&mut self) -> Measured {
        let mut measured = Measured::new(self.group, self.link.description.clone());
        let mut failed: Vec<Contender> = Vec::new();
        for round in 0..self.rounds {
            eprintln!(
                "wire: {}, path MTU {}: round {}",
                self.group.driver.name(),
                self.group.path_mtu,
                round + 1
            );
            let mut turn = CONTENDERS;
            // In forward and reverse order, so that slow changes affect all alike.
            if round % 2 == 1 {
                turn.reverse();
            }
            for contender in turn {
                if failed.contains(&contender) {
                    continue;
                }
                if let Err(error) = self.take_turn(contender, round, &mut measured) {
                    eprintln!("wire: {}: {error}", results::name(contender));
                    // A single failure may be accidental.
                    if measured.failures.insert(contender, error.to_string()).is_some() {
                        failed.push(contender);
                    }
                }
            }
        }
        measured
    }

    /// Runs a contender's cases of a round, and repeats those in which the machine was in its slow state.
    fn take_turn(&mut self, contender: Contender, round: usize, measured: &mut Measured) -> Outcome<()> {
        let mut cases = self.wanted.clone();
        if round < DETAIL_ROUNDS {
            cases.extend(&self.details);
        }
        let mut cases: Vec<Case> = cases.into_iter().filter(|case| case.contender() == contender).collect();
        while !cases.is_empty() {
            cases = self.carry_out(contender, cases, round, measured)?;
        }
        Ok(())
    }

    /// Returns the cases that are to be repeated.
    fn carry_out(
        &mut self,
        contender: Contender,
        cases: Vec<Case>,
        round: usize,
        measured: &mut Measured,
    ) -> Outcome<Vec<Case>> {
        let job = Job {
            role: 0,
            core: None,
            cores: self.two_cores(),
            device: String::new(),
            path_mtu: self.group.path_mtu,
            addresses: [self.link.address(0), self.link.address(1)],
            cases: cases.clone(),
            millis: self.millis,
            as_nobody: self.group.driver == Driver::Udp,
            shared: String::new(),
            contender,
        };
        let answer = pair::run(self.link, self.cores, &job)?;
        measured.descriptions.insert(contender, answer.description);
        measured.no_cycles = measured.no_cycles.take().or(answer.no_cycles);
        let mut slow = Vec::new();
        for ((case, figures), ends) in cases.into_iter().zip(answer.figures).zip(answer.states) {
            let rounds =
                if self.wanted.contains(&case) { self.rounds } else { DETAIL_ROUNDS.min(self.rounds) };
            let repetitions = self.repetitions.entry(case).or_insert_with(|| Repetitions::of(rounds));
            if !self.state.counts(ends, repetitions) {
                slow.push(case);
                continue;
            }
            measured.cases.entry(case).or_default().resize(self.rounds, None);
            if let Some(rounds) = measured.cases.get_mut(&case) {
                rounds[round] = Some(figures);
            }
        }
        Ok(slow)
    }

    fn two_cores(&self) -> Option<[usize; 2]> {
        let [a, b] = self.cores;
        a.zip(b).filter(|(a, b)| a != b).map(Into::into)
    }
}
