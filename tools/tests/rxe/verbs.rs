//! All verbs between the engine and rdma_rxe: each service, path MTU, IP version and role, messages with all pads. The
//! changed and the unchanged memory is compared at both ends.

use std::time::Duration;

use ferroce::{Access, PathMtu, QpType};

use crate::ends::{Ends, Memories, Pair};
use crate::guest::{Guest, report_outcome};
use crate::work::{Completion, Part, Queue, Request, Side, Terms, Verb, everything};

/// Runs all of them; returns the number of exchanges.
pub(crate) fn run(guest: &Guest) -> u32 {
    guest.inside(|| {
        let mut tally = Tally::default();
        for tried in &DEVICES {
            let mut ends = Ends::open(guest, tried.device, tried.ipv6);
            let memories = ends.memories(SMALL, [everything() | Access::MW_BIND; 2]);
            for (service, verb) in SERVICES {
                for asker in Side::BOTH {
                    let mut outcomes = Vec::new();
                    for &path_mtu in tried.path_mtus {
                        let terms = Terms::new(service, path_mtu);
                        let sizes = sizes(service, path_mtu);
                        let outcome = exchange(&mut ends, &memories, &terms, (asker, verb), &sizes);
                        outcomes.push((path_mtu.bytes().to_string(), outcome));
                    }
                    tally.row(&case(service, verb, tried.ipv6), tried.device, asker, &outcomes);
                }
            }
            if !tried.device.starts_with("udp") {
                long(&mut ends, &mut tally, tried);
            }
        }
        tally.end()
    })
}

/// The reliable ones again, while the guest loses packets of both directions.
pub(crate) fn with_loss(guest: &Guest) -> u32 {
    guest.inside(|| {
        let mut tally = Tally::default();
        for tried in &DEVICES[..2] {
            let mut ends = Ends::open(guest, tried.device, tried.ipv6);
            let memories = ends.memories(LOSSY, [everything() | Access::MW_BIND; 2]);
            for (service, verb) in SERVICES.into_iter().filter(|(service, _)| *service == QpType::Rc) {
                for asker in Side::BOTH {
                    let terms = Terms { timeout: 16, ..Terms::new(service, PathMtu::Mtu1024) };
                    let sizes = [30_000, 30_001, 30_002, 30_003, 1, 0, 5, 6, 7, 8];
                    // Atomics have one packet each.
                    let times = if verb == Verb::FetchAdd || verb == Verb::CompareSwap { 6 } else { 3 };
                    let outcomes: Vec<_> = (1..=times)
                        .map(|time| {
                            let outcome = exchange(&mut ends, &memories, &terms, (asker, verb), &sizes);
                            (format!("run {time}"), outcome)
                        })
                        .collect();
                    let case = format!("{}, 1 % loss", case(service, verb, tried.ipv6));
                    tally.row(&case, tried.device, asker, &outcomes);
                }
            }
        }
        tally.end()
    })
}

/// A device, with the path MTUs that are tried on it.
struct TriedDevice {
    device: &'static str,
    ipv6: bool,
    path_mtus: &'static [PathMtu],
}

const DEVICES: [TriedDevice; 4] = [
    TriedDevice { device: "af_xdp:fe0", ipv6: false, path_mtus: &PathMtu::ALL },
    TriedDevice { device: "af_xdp:fe0", ipv6: true, path_mtus: &PathMtu::ALL },
    TriedDevice { device: "udp:10.77.0.1", ipv6: false, path_mtus: &[PathMtu::Mtu1024, PathMtu::Mtu4096] },
    TriedDevice { device: "udp:fd77::1", ipv6: true, path_mtus: &[PathMtu::Mtu256, PathMtu::Mtu2048] },
];

const SERVICES: [(QpType, Verb); 14] = [
    (QpType::Rc, Verb::Send),
    (QpType::Rc, Verb::SendImm),
    (QpType::Rc, Verb::SendInvalidate),
    (QpType::Rc, Verb::Write),
    (QpType::Rc, Verb::WriteImm),
    (QpType::Rc, Verb::Read),
    (QpType::Rc, Verb::FetchAdd),
    (QpType::Rc, Verb::CompareSwap),
    (QpType::Uc, Verb::Send),
    (QpType::Uc, Verb::SendImm),
    (QpType::Uc, Verb::Write),
    (QpType::Uc, Verb::WriteImm),
    (QpType::Ud, Verb::Send),
    (QpType::Ud, Verb::SendImm),
];

/// The space for the messages of one exchange.
const SMALL: u64 = 64 << 10;
const LOSSY: u64 = 128 << 10;
/// The longest message.
const LONG: u32 = 8 << 20;
/// The offset between the places of messages at the requester and at the other end: neither address nor alignment is
/// the same.
const SHIFT: u64 = 11;
/// Before the data in a datagram's receive buffer.
const NETWORK_HEADER: u32 = 40;
/// The time within which UC WRITEs arrive, which have no notification.
const ARRIVAL: Duration = Duration::from_secs(10);
const IMMEDIATE: u32 = 0x0102_0304;

/// No payload, all pads of one packet, of full packets and of several; datagrams are one packet.
fn sizes(service: QpType, path_mtu: PathMtu) -> Vec<u32> {
    let full = path_mtu.bytes();
    if service == QpType::Ud {
        return vec![0, 1, 2, 3, 4, full - 3, full - 2, full - 1, full];
    }
    vec![0, 1, 2, 3, 4, full - 1, full, full + 1, full + 2, full + 3, 3 * full + 1]
}

fn case(service: QpType, verb: Verb, ipv6: bool) -> String {
    let service = match service {
        QpType::Rc => "RC",
        QpType::Uc => "UC",
        QpType::Ud => "UD",
    };
    format!("{service} {}, IPv{}", verb.name(), if ipv6 { 6 } else { 4 })
}

/// One message of 8 MiB, and one of 1 MiB with a pad, in one exchange.
fn long(ends: &mut Ends, tally: &mut Tally, tried: &TriedDevice) {
    let sizes = [LONG, (1 << 20) + 3];
    let memories = ends.memories(u64::from(LONG) + (2 << 20), [everything(); 2]);
    for verb in [Verb::Send, Verb::Write, Verb::Read] {
        for asker in Side::BOTH {
            let mut outcomes = Vec::new();
            for path_mtu in [PathMtu::Mtu1024, PathMtu::Mtu4096] {
                let terms = Terms::new(QpType::Rc, path_mtu);
                let outcome = exchange(ends, &memories, &terms, (asker, verb), &sizes);
                outcomes.push((path_mtu.bytes().to_string(), outcome));
            }
            let case = format!("{}, 8 MiB", case(QpType::Rc, verb, tried.ipv6));
            tally.row(&case, tried.device, asker, &outcomes);
        }
    }
    ends.release_memories(&memories);
}

/// One exchange by itself, of these sizes or of all relevant ones.
pub(crate) fn alone(
    ends: &mut Ends,
    terms: &Terms,
    (asker, verb): (Side, Verb),
    given: Option<&[u32]>,
) -> Result<(), String> {
    let memories = ends.memories(SMALL, [everything() | Access::MW_BIND; 2]);
    let sizes = given.map_or_else(|| sizes(terms.service, terms.path_mtu), <[u32]>::to_vec);
    exchange(ends, &memories, terms, (asker, verb), &sizes)
}

/// One exchange over its own queue pairs.
fn exchange(
    ends: &mut Ends,
    memories: &Memories,
    terms: &Terms,
    (asker, verb): (Side, Verb),
    sizes: &[u32],
) -> Result<(), String> {
    let mut pair = ends.connect(terms);
    let outcome = match verb {
        Verb::FetchAdd | Verb::CompareSwap => atomics(ends, &mut pair, asker, verb),
        _ => messages(ends, &mut pair, memories, (asker, verb), (terms.service, sizes)),
    };
    ends.close(pair);
    outcome
}

fn messages(
    ends: &mut Ends,
    pair: &mut Pair,
    memories: &Memories,
    (asker, verb): (Side, Verb),
    (service, sizes): (QpType, &[u32]),
) -> Result<(), String> {
    let other = asker.other();
    let header = if service == QpType::Ud { NETWORK_HEADER } else { 0 };
    let there = layout(sizes, header);
    let here: Vec<Part> = there.iter().map(|part| Part { offset: part.offset + SHIFT, ..*part }).collect();
    // The header before datagrams is checked separately.
    let headers = there.iter().filter(|_| header > 0).map(|part| Part {
        offset: part.offset - u64::from(header),
        length: header,
        seed: None,
    });
    let arrived: Vec<Part> = there.iter().copied().chain(headers).collect();

    let reads = verb == Verb::Read;
    ends.fill(asker, memories, if reads { &[] } else { &here });
    ends.fill(other, memories, if reads { &there } else { &[] });
    if verb.takes_receive() {
        let receives: Vec<(u64, u32)> = if verb.is_send() {
            there.iter().map(|part| (part.offset - u64::from(header), part.length + header)).collect()
        } else {
            vec![(0, 0); there.len()]
        };
        ends.receive(other, pair, memories, &receives);
    }
    let mut requests: Vec<Request> = Vec::new();
    for (number, (part, remote)) in here.iter().zip(&there).enumerate() {
        requests.push(Request {
            offset: part.offset,
            length: part.length,
            remote_offset: remote.offset as i64,
            imm: IMMEDIATE + number as u32,
            ..Request::EMPTY
        });
    }
    if verb == Verb::SendInvalidate {
        for request in &mut requests {
            // It is not used: the error tests check that an invalid key is refused.
            request.invalidate = ends.window(other, pair, memories, (0, 64));
        }
    }
    let bound = if verb == Verb::SendInvalidate && asker == other { requests.len() } else { 0 };
    ends.post(asker, pair, memories, verb, &requests);

    let done = ends.poll(asker, pair, Queue::Send, sizes.len());
    let expected: Vec<_> = (bound..bound + sizes.len()).map(|n| (n as u64, 0, verb.opcode())).collect();
    let found: Vec<_> = done.iter().map(|wc| (wc.wr_id, wc.status, wc.opcode)).collect();
    if found != expected {
        return Err(format!("{} completes with {}", asker.name(), first_wrong(&done, sizes.len())));
    }
    if verb.takes_receive() {
        let received = ends.poll(other, pair, Queue::Receive, sizes.len());
        for (number, request) in requests.iter().enumerate() {
            let imm = verb.has_immediate().then_some(request.imm);
            let invalidated = (verb == Verb::SendInvalidate).then_some(request.invalidate);
            let right = received.get(number).is_some_and(|wc| {
                (wc.wr_id, wc.status, wc.length) == (number as u64, 0, u64::from(request.length + header))
                    && wc.opcode == if verb.is_send() { 128 } else { 129 }
                    && (wc.imm, wc.invalidated) == (imm, invalidated)
            });
            if !right {
                let found = received.get(number);
                return Err(format!("{} receives message {number}, {request:?}, as {found:?}", other.name()));
            }
        }
    }
    if header > 0 {
        let bytes = ends.peek(other, memories);
        for part in &there {
            let end = part.offset as usize;
            if !ends.has_network_header(other, &bytes[end - header as usize..end]) {
                return Err(format!("{}'s datagram has another network header in front", other.name()));
            }
        }
    }
    // The sources, too: they must not change.
    let (at_asker, at_other) = if reads { (&here, &there) } else { (&here, &arrived) };
    ends.check(other, memories, at_other, ARRIVAL)?;
    ends.check(asker, memories, at_asker, Duration::ZERO)?;
    if ends.has_failed(Side::Ferroce, pair) || ends.has_failed(Side::Rxe, pair) {
        return Err("a queue pair has failed".to_owned());
    }
    Ok(())
}

/// A description of completions that are not all successful.
fn first_wrong(found: &[Completion], expected: usize) -> String {
    let first = found.iter().find(|wc| wc.status != 0);
    format!("{} of {expected}, the first in error {first:?}", found.len())
}

/// Messages one after the other, with gaps.
fn layout(sizes: &[u32], header: u32) -> Vec<Part> {
    let mut offset = 64;
    let mut parts = Vec::new();
    for (number, &length) in sizes.iter().enumerate() {
        offset += u64::from(header);
        parts.push(Part { offset, length, seed: Some(number as u8 * 23 + 1) });
        offset += u64::from(length) + 29 + number as u64 % 4;
    }
    parts
}

/// Sixteen at once on one word: each original value is returned, in order, and nothing else changes.
fn atomics(ends: &mut Ends, pair: &mut Pair, asker: Side, verb: Verb) -> Result<(), String> {
    const COUNT: u64 = 16;
    const WORD: u64 = 24;
    const START: u64 = 0xfedc_ba98_7654_3210;
    let other = asker.other();
    let memories = ends.memories(512, [everything(); 2]);
    for side in Side::BOTH {
        ends.fill(side, &memories, &[]);
    }
    ends.poke(other, &memories, WORD, &START.to_ne_bytes());
    let (mut word, mut here) = (START, ends.peek(asker, &memories));
    let mut requests = Vec::new();
    for number in 0..COUNT {
        let offset = 8 + 24 * number;
        here[offset as usize..offset as usize + 8].copy_from_slice(&word.to_ne_bytes());
        // Every third one fails the comparison.
        let (compare, swap) = match (verb, number % 3) {
            (Verb::FetchAdd, _) => ([1, u64::MAX, 1 << 63][number as usize % 3], 0),
            (_, 2) => (word ^ 1 << number, 1),
            (_, _) => (word, word.rotate_left(9) + number),
        };
        if verb == Verb::FetchAdd {
            word = word.wrapping_add(compare);
        } else if compare == word {
            word = swap;
        }
        let length = 8;
        requests.push(Request {
            offset,
            length,
            remote_offset: WORD as i64,
            compare,
            swap,
            ..Request::EMPTY
        });
    }
    let mut there = ends.peek(other, &memories);
    there[WORD as usize..WORD as usize + 8].copy_from_slice(&word.to_ne_bytes());

    ends.post(asker, pair, &memories, verb, &requests);
    let done = ends.poll(asker, pair, Queue::Send, requests.len());
    let expected: Vec<_> = (0..COUNT).map(|number| (number, 0, verb.opcode())).collect();
    let found: Vec<_> = done.iter().map(|wc| (wc.wr_id, wc.status, wc.opcode)).collect();
    if found != expected {
        return Err(format!("{} completes with {}", asker.name(), first_wrong(&done, requests.len())));
    }
    let (found_here, found_there) = (ends.peek(asker, &memories), ends.peek(other, &memories));
    ends.release_memories(&memories);
    if found_here != here {
        return Err(format!("old values at {}: {found_here:?} in place of {here:?}", asker.name()));
    }
    if found_there != there {
        return Err(format!("the word at {}: {found_there:?} in place of {there:?}", other.name()));
    }
    Ok(())
}

/// The results of the exchanges.
#[derive(Default)]
pub(crate) struct Tally {
    right: u32,
    wrong: u32,
}

impl Tally {
    /// Prints a line of the matrix, with a result for each path MTU.
    fn row(&mut self, case: &str, device: &str, asker: Side, outcomes: &[(String, Result<(), String>)]) {
        let mut cells = Vec::new();
        for (name, outcome) in outcomes {
            cells.push(match outcome {
                Ok(()) => format!("{name} right"),
                Err(reason) => format!("{name} WRONG: {reason}"),
            });
            *if outcome.is_ok() { &mut self.right } else { &mut self.wrong } += 1;
        }
        report_outcome(case, device, asker.name(), &cells.join(", "));
    }

    /// Prints a line with one result, as text.
    pub(crate) fn single(&mut self, case: &str, device: &str, asker: Side, outcome: Result<String, String>) {
        *if outcome.is_ok() { &mut self.right } else { &mut self.wrong } += 1;
        let text = match outcome {
            Ok(text) => format!("right: {text}"),
            Err(reason) => format!("WRONG: {reason}"),
        };
        report_outcome(case, device, asker.name(), &text);
    }

    /// Fails if any exchange failed; otherwise prints the number of successes.
    pub(crate) fn end(self) -> u32 {
        assert!(self.wrong == 0, "{} of {} exchanges went wrong", self.wrong, self.right + self.wrong);
        self.right
    }
}
