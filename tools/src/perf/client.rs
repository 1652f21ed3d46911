//! The client, which measures.

use std::time::Duration;

use ferroce::{Nanos, PathMtu};
use hdrhistogram::Histogram;

use super::account::{Account, Measured};
use super::message::{Offer, PerfMessage, Tally};
use super::plan::{Layout, MAX_MESSAGES, Operation, Plan, shares};
use super::session::{Beside, Session, unexpected};
use crate::failure::{Failure, legible};

/// When a measurement ends.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stop {
    Messages(u64),
    Bytes(u64),
    After(Duration),
}

impl Stop {
    /// The most messages of `size` bytes, and the deadline.
    pub(super) fn limits(self, size: u32, now: Nanos) -> (u64, Option<Nanos>) {
        match self {
            Stop::Messages(count) => (count, None),
            Stop::Bytes(bytes) => (bytes.div_ceil(size.into()), None),
            Stop::After(time) => (MAX_MESSAGES, Some(now + time)),
        }
    }
}

/// Measures messages of each of `sizes`. If it fails, the results so far remain.
pub(super) fn run(
    session: &mut Session,
    sizes: &[(u32, Stop)],
    gid_index: usize,
    path_mtu: Option<PathMtu>,
    measured: &mut Measured,
) -> Result<(), Failure> {
    let result = measure_all(session, sizes, gid_index, path_mtu, measured);
    if let Err(failure) = &result {
        session.tell(failure)?;
    }
    result
}

fn measure_all(
    session: &mut Session,
    sizes: &[(u32, Stop)],
    gid_index: usize,
    path_mtu: Option<PathMtu>,
    measured: &mut Measured,
) -> Result<(), Failure> {
    session.control.send(&PerfMessage::Plan(session.plan.clone()))?;
    session.expect(&PerfMessage::Ready)?;
    for (size, stop) in sizes {
        let offer = session.open(*size, gid_index, path_mtu)?;
        session.control.send(&PerfMessage::Connect(offer))?;
        let answer = match session.wait_message()? {
            PerfMessage::Connect(answer) => answer,
            other => return Err(unexpected(&other)),
        };
        measured.path_mtu = chosen(&answer)?;
        session.connect(&answer, gid_index, measured.path_mtu)?;
        let mut account = Account::new(&session.plan, *size)?;
        let result = measure(session, *size, *stop, &mut account);
        if result.is_err() {
            account.cut_lap(session.completed(), session.end.now());
        }
        if result.is_ok() || account.messages > 0 {
            measured.results.push(account.measurement(&session.plan, session.role, measured.path_mtu));
        }
        result?;
        session.control.send(&PerfMessage::Close)?;
        session.expect(&PerfMessage::Closed)?;
        session.close()?;
    }
    session.control.send(&PerfMessage::Finish)?;
    // A memif is deleted when its first end closes it; the other end must not poll it then. So the server closes first,
    // while this end does not poll.
    session.control.wait_closed(&session.end.interrupt)
}

fn chosen(answer: &Offer) -> Result<PathMtu, Failure> {
    let bytes = answer.path_mtu.unwrap_or_default();
    PathMtu::try_from(bytes).map_err(|error| Failure::run(format!("the server chose {error}")))
}

/// Runs laps until `stop`. Filling and comparing memory between laps is not measured.
fn measure(session: &mut Session, size: u32, stop: Stop, account: &mut Account) -> Result<(), Failure> {
    let plan = session.plan.clone();
    let (total, mut until) = (stop.limits(size, session.end.now()).0, None);
    let per_lap =
        if plan.check { Layout::new(&plan, size).slots.saturating_mul(plan.qps.into()) } else { u64::MAX };
    let (mut number, mut sent) = (0, 0);
    while sent < total && until.is_none_or(|until| session.end.now() < until) {
        let targets = shares((total - sent).min(per_lap), plan.qps);
        session.prepare(number, &targets)?;
        session.control.send(&PerfMessage::Lap { number, messages: targets.clone() })?;
        session.expect(&PerfMessage::Ready)?;
        account.begin_lap(session.end.now());
        if number == 0 {
            // Filling the memory is not part of the time.
            until = stop.limits(size, session.end.now()).1;
        }
        let took = lap(session, &targets, until, account.latencies.as_mut())?;
        let done = session.sent();
        let moved = done.iter().sum::<u64>();
        account.end_lap(moved, took);
        sent += moved;
        session.control.send(&PerfMessage::LapDone { messages: done.clone() })?;
        let tally = match session.wait_message()? {
            PerfMessage::Verified(tally) => tally,
            other => return Err(unexpected(&other)),
        };
        check_tally(&tally, &plan, size, &targets)?;
        account.verified += tally.verified;
        account.lost += tally.lost;
        if plan.bidirectional {
            account.lost += if plan.is_counted() { session.await_messages(&tally.sent, true)? } else { 0 };
            account.messages += tally.sent.iter().sum::<u64>();
        }
        account.is_told = true;
        // The time of the slower end counts.
        account.time += Duration::from_nanos(tally.nanoseconds).saturating_sub(took);
        let arrived =
            if plan.bidirectional && plan.operation != Operation::Read { &tally.sent } else { &done };
        account.verified += session.verify(number, arrived)?;
        number += 1;
    }
    Ok(())
}

/// Fails if the server's numbers exceed the plan.
fn check_tally(tally: &Tally, plan: &Plan, size: u32, targets: &[u64]) -> Result<(), Failure> {
    let Tally { verified, lost, ref sent, .. } = *tally;
    if sent.len() != targets.len() || sent.iter().zip(targets).any(|(sent, target)| sent > target) {
        let sent = legible(&format!("{sent:?}"));
        return Err(Failure::run(format!(
            "the server reports {sent} messages, instead of {targets:?} on each queue pair"
        )));
    }
    let messages: u64 = targets.iter().sum();
    if lost > messages {
        return Err(Failure::run(format!("the server reports {lost} lost messages of {messages}")));
    }
    // For atomics it compares the counter of each queue pair, even if no operation was sent.
    let slots: u64 = targets.iter().map(|target| (*target).max(1)).sum();
    let bytes = if plan.check { slots.saturating_mul(size.into()) } else { 0 };
    if verified > bytes {
        return Err(Failure::run(format!("the server has compared {verified} bytes of {bytes}")));
    }
    Ok(())
}

/// Sends `targets` messages on each queue pair, or as many as possible until `until`. Returns the elapsed time.
pub(super) fn lap<C: Beside>(
    session: &mut Session<C>,
    targets: &[u64],
    until: Option<Nanos>,
    latencies: Option<&mut Histogram<u64>>,
) -> Result<Duration, Failure> {
    let started = session.end.now();
    match latencies {
        None => move_many(session, targets, until)?,
        Some(latencies) => move_singly(session, targets[0], until, latencies)?,
    }
    Ok(session.end.now().since(started))
}

/// Keeps all lanes busy.
fn move_many<C: Beside>(
    session: &mut Session<C>,
    targets: &[u64],
    until: Option<Nanos>,
) -> Result<(), Failure> {
    loop {
        let open = until.is_none_or(|until| session.end.now() < until);
        if !session.keep_busy(targets, open)? {
            return Ok(());
        }
        session.turn()?;
    }
}

/// Sends one message after the other and times each.
fn move_singly<C: Beside>(
    session: &mut Session<C>,
    target: u64,
    until: Option<Nanos>,
    latencies: &mut Histogram<u64>,
) -> Result<(), Failure> {
    let Plan { operation, tx_depth, .. } = session.plan;
    let depth = u64::from(tx_depth);
    let mut started = session.end.now();
    for message in 0..target {
        if until.is_some_and(|until| started >= until) {
            break;
        }
        session.post(0)?;
        loop {
            session.turn()?;
            session.check_lost(message)?;
            let lane = session.lanes[0];
            let arrived = match operation {
                Operation::Read | Operation::Atomic => lane.completed > message,
                // The answer counts; the acknowledgement of the request may arrive later.
                Operation::Send => lane.received > message,
                Operation::Write => session.rung(message)?,
            };
            if arrived && lane.posted - lane.completed < depth {
                break;
            }
        }
        let now = session.end.now();
        latencies.saturating_record(u64::try_from(now.since(started).as_nanos()).unwrap_or(u64::MAX));
        started = now;
    }
    session.settle()
}
