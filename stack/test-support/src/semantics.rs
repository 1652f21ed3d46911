//! The semantics of the verbs on any backend: cases for two contexts, in software or on an RNIC.
//!
//! Each case creates its queue pairs and regions, tries one verb with its results and errors, and destroys all again.
//! Deviations of a backend are in `DIFFERENCES`, with the reason; an unlisted deviation, and a listed one that does not
//! occur, are failures.

mod connections;
mod datagrams;
mod errors;
mod events;
mod memory;
mod operations;
mod pair;
mod queues;
mod states;
mod ways;

use std::error::Error;
use std::fmt::Write;
use std::time::Duration;

pub use pair::{End, Pair, VLAN};

/// The result of a case: success, or the deviation.
pub type Outcome = Result<(), Box<dyn Error>>;

/// A case: the verb and what is tested, and the code.
pub struct Case {
    /// Its name in the table.
    pub name: &'static str,
    /// The requester is the first end.
    pub run: fn(&mut Pair) -> Outcome,
}

/// A name and the function to run.
type Entry = (&'static str, fn(&mut Pair) -> Outcome);

/// The implementation of the verbs at an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The engine over a packet driver.
    Software,
    /// rdma_rxe, by libibverbs.
    Rxe,
    /// The libibverbs of the tests.
    Stub,
}

/// A deviation of a kind of end.
struct Difference {
    case: &'static str,
    /// Every card, if `None`.
    kind: Option<Kind>,
    at: At,
    reason: &'static str,
}

/// The end that deviates.
#[derive(Clone, Copy)]
enum At {
    Requester,
    Responder,
    Either,
}

impl Difference {
    fn shows(&self, case: &Case, kinds: [Kind; 2]) -> bool {
        let is_it = |kind| self.kind.map_or(kind != Kind::Software, |own| own == kind);
        let [requester, responder] = kinds.map(is_it);
        let is_there = match self.at {
            At::Requester => requester,
            At::Responder => responder,
            At::Either => requester || responder,
        };
        is_there && self.case == case.name
    }
}

const fn card(case: &'static str, at: At, reason: &'static str) -> Difference {
    Difference { case, kind: None, at, reason }
}

const fn of(kind: Kind, case: &'static str, at: At, reason: &'static str) -> Difference {
    Difference { case, kind: Some(kind), at, reason }
}

const DIFFERENCES: &[Difference] = &[
    card("FLUSH", At::Either, "libibverbs posts none by ibv_post_send: Unsupported at the call"),
    card("ATOMIC WRITE", At::Requester, "libibverbs posts none by ibv_post_send: Unsupported at the call"),
    card("slices of registered memory", At::Either, "the card may write registered memory at any time"),
    card("memory of a region exchanged", At::Either, "a card's region keeps its pages: Unsupported"),
    card("SEND with invalidate of a region", At::Responder, "libibverbs registers none: Unsupported"),
    card(
        "rows that the application adds to the port's tables",
        At::Either,
        "the kernel keeps the tables: Unsupported",
    ),
    card(
        "UD: a datagram that is longer than the path MTU",
        At::Requester,
        "cards treat it each in its own way: Invalid at the call",
    ),
    card("selective repeat", At::Either, "Unsupported"),
    card("CM: UC", At::Requester, "the kernel's connection manager connects RC alone: Unsupported"),
    card("CM: UC", At::Responder, "the kernel rejects a request for UC"),
    card(
        "CM: an attempt that is ended before its answer",
        At::Responder,
        "rdma_ucm tells nothing of a request that was not accepted: accepting it fails",
    ),
    card(
        "CM: an attempt that nobody answers in its time",
        At::Responder,
        "the same; and the kernel asks the other end to wait 69 s more (MRA)",
    ),
    card("the next hop by its hardware address", At::Either, "the kernel resolves it: Unsupported"),
    of(
        Kind::Stub,
        "no receive, and no more RNR retries",
        At::Either,
        "the stub has no timers: a message waits for its receive",
    ),
    of(
        Kind::Stub,
        "a queue pair whose completion queue has overflowed",
        At::Responder,
        "the stub loses the completion, and the queue pair goes on",
    ),
    of(Kind::Rxe, "COMM_EST: the first packet in RTR", At::Responder, "rdma_rxe raises none"),
    of(Kind::Stub, "UD: multicast", At::Either, "the stub has no interface on which the kernel could join"),
    of(Kind::Rxe, "ATOMIC WRITE", At::Responder, "rdma_rxe has it since Linux 6.2, and drops it before"),
    of(
        Kind::Rxe,
        "atomic at an address that is no multiple of 8",
        At::Requester,
        "librxe refuses it at the call; other cards leave it to the responder",
    ),
    of(
        Kind::Rxe,
        "a receive into a region that is not LOCAL_WRITE",
        At::Responder,
        "rdma_rxe calls a receive that it can't fill malformed: LOC_QP_OP_ERR",
    ),
    of(
        Kind::Rxe,
        "a message that is longer than its receive",
        At::Responder,
        "rdma_rxe calls a receive that it can't fill malformed: LOC_QP_OP_ERR",
    ),
    of(
        Kind::Rxe,
        "UD: a receive that is too short",
        At::Responder,
        "rdma_rxe ends the receive with LOC_QP_OP_ERR; the standard wants the datagram dropped",
    ),
    of(
        Kind::Rxe,
        "receives that are posted in ERR are flushed",
        At::Requester,
        "librxe does not call the kernel for a receive, so nothing flushes it",
    ),
    of(
        Kind::Rxe,
        "UC: a local error leads to SQE, and Resume out of it",
        At::Requester,
        "rdma_rxe goes to ERR",
    ),
    of(
        Kind::Rxe,
        "SQD: drained, updated, resumed",
        At::Requester,
        "rdma_rxe does not go on with what was posted in SQD",
    ),
    of(
        Kind::Rxe,
        "SRQ: the last receive of a queue pair that fails",
        At::Responder,
        "rdma_rxe raises LAST_WQE_REACHED for errors of packets, not for a move to ERR",
    ),
];

/// The time limit of any step: an emulated guest on a busy machine is slow.
const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_secs(2);

/// All cases.
pub fn cases() -> Vec<Case> {
    let rooms = [
        operations::CASES,
        errors::CASES,
        memory::CASES,
        queues::CASES,
        states::CASES,
        datagrams::CASES,
        connections::CASES,
        ways::CASES,
        events::CASES,
    ];
    rooms.into_iter().flatten().map(|(name, run)| Case { name, run: *run }).collect()
}

/// Runs all cases whose name contains `only`, over contexts of these kinds. Returns a table, and the number of failures.
pub fn run(pair: &mut Pair, kinds: [Kind; 2], only: Option<&str>) -> (String, usize) {
    let (mut table, mut wrong) = (String::new(), 0);
    for case in cases().iter().filter(|case| only.is_none_or(|only| case.name.contains(only))) {
        if kinds.contains(&Kind::Stub) && case.name.starts_with("CM: ") {
            let _ = writeln!(table, "{:<58} not run: the stub has no connection manager", case.name);
            continue;
        }
        let known = DIFFERENCES.iter().find(|difference| difference.shows(case, kinds));
        if !pair.has_ipv6() && case.name.starts_with("IPv6: ") {
            let _ = writeln!(table, "{:<58} not run: the two have no IPv6 addresses", case.name);
            continue;
        }
        if !pair.has_vlan() && case.name.starts_with("VLAN: ") {
            let _ = writeln!(table, "{:<58} not run: the two have no VLAN", case.name);
            continue;
        }
        // An expected failure is not waited for long.
        pair.patience = if known.is_some() { SHORT } else { LONG };
        let outcome = (case.run)(pair).and_then(|()| pair.clear());
        if outcome.is_err() {
            pair.abandon();
        }
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
