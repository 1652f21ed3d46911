//! The attributes of the recorded end's application and queue pair, as the packets show them.

use std::collections::BTreeMap;
use std::time::Duration;

use ferroce::wire::{Operation, Syndrome};
use ferroce::{Access, Nanos, RnrTimer};

use super::conversation::Conversation;
use super::message::{Message, Messages};

/// The access rights of the other end: all except those for which its requests were refused.
pub(super) fn permissions(of: &Conversation, end: usize, theirs: &Messages) -> Access {
    let mut refused = Vec::new();
    for event in of.events.iter().filter(|event| event.from == end) {
        if event.packet.is_whole_response()
            && event.packet.extensions.aeth.is_some_and(|aeth| aeth.syndrome_byte() == 0x61)
            && let Some(message) = theirs.at(event.psn)
        {
            refused.extend(message.operation());
        }
    }
    let kinds = [
        (Access::REMOTE_WRITE, [Operation::Write, Operation::AtomicWrite]),
        (Access::REMOTE_READ, [Operation::ReadRequest; 2]),
        (Access::REMOTE_ATOMIC, [Operation::CompareSwap, Operation::FetchAdd]),
        (Access::FLUSH_GLOBAL, [Operation::Flush; 2]),
    ];
    let allowed = kinds.iter().filter(|(_, operations)| !operations.iter().any(|o| refused.contains(o)));
    allowed.fold(Access::NONE, |access, (kind, _)| access | *kind)
}

/// The timer in the recorded end's RNR NAKs.
pub(super) fn rnr_timer(of: &Conversation, end: usize) -> RnrTimer {
    let mut told = of.events.iter().filter(|event| event.from == end && event.packet.is_whole_response());
    let code = told.find_map(|event| match event.packet.extensions.aeth?.syndrome()? {
        Syndrome::RnrNak(timer) => Some(timer),
        _ => None,
    });
    code.unwrap_or(RnrTimer::DEFAULT)
}

/// The engine's timeout is the recorded one times two to this power: the other end's recorded packets answer the
/// recorded retransmissions, so the engine must not be earlier.
const PATIENCE: u8 = 2;

/// A retransmission after a shorter time may be due to packets that the capture does not have.
const CROSSING: Duration = Duration::from_millis(2);

/// The ACK timeout of the recorded end: from the connection manager, or from retransmissions after a silence; 0 (none)
/// if there are no such.
pub(super) fn ack_timeout(of: &Conversation, end: usize) -> u8 {
    if let Some(agreed) = of.agreed {
        return if agreed.timeout == 0 { 0 } else { (agreed.timeout + PATIENCE).min(31) };
    }
    let mut next = i64::MIN;
    let mut longest: Option<Duration> = None;
    let mut last = Nanos::ZERO;
    for event in of.events.iter().filter(|event| event.packet.icrc_is_right) {
        let packet = &event.packet;
        let silence = packet.at.since(std::mem::replace(&mut last, packet.at));
        if event.from == end && packet.is_request() {
            if event.psn < next {
                longest = longest.max(Some(silence)).filter(|longest| *longest > CROSSING);
            }
            next = next.max(event.psn + of.span(packet));
        }
    }
    // The longest one, since a long timeout does no harm here.
    let Some(longest) = longest else { return 0 };
    // 10 % more, for the coarse timers of both ends.
    let units = (longest.as_nanos() * 11 / 10 / 4096).max(1);
    (units.ilog2() as u8 + PATIENCE).min(31)
}

/// The length of a receive WR for which a message was too long.
pub(super) fn refused_as_too_long(of: &Conversation, end: usize, message: &Message) -> Option<usize> {
    let refused = of.answers[end].refused(message.first, message.last)?;
    (message.operation() == Some(Operation::Send)).then_some(())?;
    let mtu = of.path_mtu.bytes() as usize;
    let before = (refused - message.first) as usize * mtu;
    Some(message.payload(mtu).0.len().saturating_sub(1).min(before))
}

/// The times at which receive WRs were posted, as far as the packets show: before the message arrived, or after the
/// last RNR NAK for it.
pub(super) fn receive_times(of: &Conversation, end: usize, theirs: &Messages) -> Vec<(usize, Nanos)> {
    let takers: Vec<usize> = (0..theirs.list.len()).filter(|n| theirs.list[*n].takes_receive()).collect();
    // By PSN: the newest request, the newest RNR NAK, and the newest response to this or a later PSN.
    let mut asked: BTreeMap<i64, Nanos> = BTreeMap::new();
    let mut in_vain: BTreeMap<i64, Nanos> = BTreeMap::new();
    let mut taken: BTreeMap<i64, Nanos> = BTreeMap::new();
    for event in of.events.iter().filter(|event| event.packet.icrc_is_right) {
        let times = match event.from == end {
            true if event.packet.is_rnr_nak() => &mut in_vain,
            true if event.packet.is_response() => &mut taken,
            false if event.packet.is_request() => &mut asked,
            _ => continue,
        };
        let newest = times.entry(event.psn).or_insert(event.packet.at);
        *newest = event.packet.at.max(*newest);
    }
    let mut newest = Nanos::ZERO;
    for time in taken.values_mut().rev() {
        newest = newest.max(*time);
        *time = newest;
    }
    let mut times: Vec<(usize, Option<Nanos>)> = Vec::new();
    for number in takers {
        let message = &theirs.list[number];
        let last_told = in_vain.range(message.first..=message.last).map(|(_, at)| *at).max();
        let time = match last_told {
            None => Some(message.at),
            Some(told) => {
                let comes_again = asked.range(message.first..=message.last).any(|(_, at)| *at > told);
                // The last retransmission may have got another RNR NAK, which was not recorded.
                let is_taken = taken.range(message.last..).next().is_some_and(|(_, at)| *at > told);
                (comes_again && is_taken).then_some(told)
            }
        };
        times.push((number, time));
    }
    // They are consumed in order.
    let mut latest = Nanos::ZERO;
    let mut ordered = Vec::new();
    for (number, time) in times {
        let Some(time) = time else { break };
        latest = latest.max(time);
        ordered.push((number, latest));
    }
    ordered
}
