//! The semantics of the verbs, whatever carries them out: cases for two contexts, in software or on a card.
//!
//! Each case makes its queue pairs and regions, tries one verb with its ends and errors, and destroys all again. What a
//! backend does otherwise is in [`DIFFERENCES`], with the reason; one that is not there, and one that is there and does not
//! show, fail.

mod datagrams;
mod errors;
mod memory;
mod operations;
mod pair;
mod queues;
mod states;

use std::error::Error;
use std::fmt::Write;

pub use pair::{End, Pair};

/// How a case ends: well, or with what was otherwise than it should be.
pub type Outcome = Result<(), Box<dyn Error>>;

/// A case: the verb and what is tried, and how.
pub struct Case {
    /// As in a table.
    pub name: &'static str,
    /// The requester is the first end.
    pub run: fn(&mut Pair) -> Outcome,
}

/// What carries out the verbs of an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The engine over a packet driver.
    Software,
    /// rdma_rxe, by libibverbs.
    Rxe,
    /// The libibverbs of the tests.
    Stub,
}

/// What an end of a kind does otherwise.
struct Difference {
    case: &'static str,
    kind: Kind,
    /// At which end: 0 requests, 1 responds; either if `None`.
    role: Option<usize>,
    reason: &'static str,
}

const DIFFERENCES: &[Difference] = &[];

/// Every case there is.
pub fn cases() -> Vec<Case> {
    [operations::CASES, errors::CASES, memory::CASES, queues::CASES, states::CASES, datagrams::CASES]
        .into_iter()
        .flatten()
        .map(|(name, run)| Case { name, run: *run })
        .collect()
}

/// Runs all cases, those whose name contains `only`, over contexts of these kinds. Returns a table, and how many were wrong.
pub fn run(pair: &mut Pair, kinds: [Kind; 2], only: Option<&str>) -> (String, usize) {
    let (mut table, mut wrong) = (String::new(), 0);
    for case in cases().iter().filter(|case| only.is_none_or(|only| case.name.contains(only))) {
        let outcome = (case.run)(pair).and_then(|()| pair.clear());
        if outcome.is_err() {
            pair.abandon();
        }
        let known = DIFFERENCES.iter().find(|difference| {
            let is_there = |role: usize| kinds[role] == difference.kind;
            difference.case == case.name && difference.role.map_or(is_there(0) || is_there(1), is_there)
        });
        let word = match (outcome, known) {
            (Ok(()), None) => "as it should be".to_owned(),
            (Err(error), Some(known)) => format!("differs: {} ({error})", known.reason),
            (Ok(()), Some(known)) => {
                wrong += 1;
                format!("WRONG: it does not differ, though {:?} should: {}", known.kind, known.reason)
            }
            (Err(error), None) => {
                wrong += 1;
                format!("WRONG: {error}")
            }
        };
        let _ = writeln!(table, "{:<58} {word}", case.name);
    }
    (table, wrong)
}

/// Ends a case with the two values unless they are equal.
macro_rules! same {
    ($found:expr, $expected:expr) => {{
        let (found, expected) = (&$found, &$expected);
        if found != expected {
            return Err(format!("{}: {found:?} where {expected:?} was expected", stringify!($found)).into());
        }
    }};
}

/// Ends a case unless the verb is refused by an error of this kind.
macro_rules! refused {
    ($verb:expr, $kind:pat) => {
        match $verb {
            Err($kind) => {}
            other => {
                let expected = stringify!($kind);
                return Err(format!("{}: {other:?} where {expected} was expected", stringify!($verb)).into());
            }
        }
    };
}

use {refused, same};
