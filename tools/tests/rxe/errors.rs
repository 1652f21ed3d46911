//! Requests that must fail, each with its status in the verbs API at both ends, and the state of the queue pairs after
//! it.

use std::time::Duration;

use ferroce::{Access, PathMtu, QpType, WcStatus};

use crate::ends::Ends;
use crate::guest::Guest;
use crate::verbs::Tally;
use crate::work::{Completion, Part, Queue, Request, Side, Terms, Verb, everything};

/// Runs all of them; returns their number.
pub(crate) fn run(guest: &Guest) -> u32 {
    guest.inside(|| {
        let mut tally = Tally::default();
        for (device, ipv6) in [("af_xdp:fe0", false), ("udp:fd77::1", true)] {
            let mut ends = Ends::open(guest, device, ipv6);
            for case in refusals() {
                for asker in Side::BOTH {
                    let outcome = refused(&mut ends, asker, &case);
                    tally.single(&format!("RC {}", case.name), device, asker, outcome);
                }
            }
            type Path = fn(&mut Ends, Side) -> Outcome;
            let others: [(&str, Path); 7] = [
                ("RC WRITE with a key that was invalidated", invalidated_key),
                ("RC SEND without a receive, which comes late", late_receive),
                ("RC SEND without a receive, rnr_retry 2", no_receive),
                ("RC WRITE to a queue pair that is gone", gone),
                ("RC READ into memory that may not be written", local_protection),
                ("UC SEND without a receive, then one with it", |ends, asker| {
                    dropped(ends, asker, QpType::Uc)
                }),
                ("UD SEND without a receive, then one with it", |ends, asker| {
                    dropped(ends, asker, QpType::Ud)
                }),
            ];
            for (name, path) in others {
                for asker in Side::BOTH {
                    let outcome = path(&mut ends, asker);
                    tally.single(name, device, asker, outcome);
                }
            }
        }
        tally.end()
    })
}

/// A description of the success, or of the failure.
type Outcome = Result<String, String>;

const SUCCESS: u64 = WcStatus::Success as u64;
const FLUSHED: u64 = WcStatus::WrFlushErr as u64;
const REM_ACCESS: u64 = WcStatus::RemAccessErr as u64;
const REM_INV_REQ: u64 = WcStatus::RemInvReqErr as u64;
const LOC_QP_OP: u64 = WcStatus::LocQpOpErr as u64;
const REM_OP: u64 = WcStatus::RemOpErr as u64;

/// Bytes of the memory at each end.
const LENGTH: u64 = 16 << 10;
/// The receive WRs: offset and length.
const RECEIVE: (u64, u32) = (8192, 256);
const PATIENCE: Duration = Duration::from_secs(20);

/// A request that the other end refuses, so that both queue pairs fail.
pub(crate) struct Refusal {
    pub(crate) name: &'static str,
    verb: Verb,
    request: Request,
    /// Whether the key is invalid.
    bad_key: bool,
    /// The access rights of the memory at the other end.
    memory: Access,
    /// The access rights of the queue pair there.
    queue_pair: Access,
    /// The statuses of the request and the two after it, with rxe and with ferroce as the responder.
    sends: [[u64; 3]; 2],
    /// The status of the first receive WR there.
    receive: [u64; 2],
    /// rxe refuses to post it.
    not_from_rxe: bool,
}

/// The request fails with this status, and the later ones are flushed.
const fn fails(status: u64) -> [u64; 3] {
    [status, FLUSHED, FLUSHED]
}

pub(crate) fn refusals() -> Vec<Refusal> {
    let all = everything() | Access::MW_BIND;
    let request =
        Request { offset: 64, length: 64, remote_offset: 128, compare: 1, swap: 2, ..Request::EMPTY };
    let base = Refusal {
        name: "",
        verb: Verb::Write,
        request,
        bad_key: false,
        memory: all,
        queue_pair: everything(),
        sends: [fails(REM_ACCESS); 2],
        receive: [FLUSHED; 2],
        not_from_rxe: false,
    };
    let word = Request { length: 8, ..request };
    let end = LENGTH as i64;
    vec![
        Refusal { name: "WRITE, wrong R_Key", bad_key: true, ..base },
        Refusal {
            name: "WRITE of three packets, wrong R_Key",
            request: Request { length: 2500, ..request },
            bad_key: true,
            ..base
        },
        Refusal {
            name: "WRITE with immediate, wrong R_Key",
            verb: Verb::WriteImm,
            bad_key: true,
            // rxe consumes the receive WR before it checks the key, the engine only if all checks succeed.
            receive: [REM_ACCESS, FLUSHED],
            ..base
        },
        Refusal { name: "READ, wrong R_Key", verb: Verb::Read, bad_key: true, ..base },
        Refusal {
            name: "FETCH_ADD, wrong R_Key",
            verb: Verb::FetchAdd,
            request: word,
            bad_key: true,
            ..base
        },
        Refusal {
            name: "CMP_SWAP, wrong R_Key",
            verb: Verb::CompareSwap,
            request: word,
            bad_key: true,
            ..base
        },
        Refusal {
            name: "WRITE, one byte beyond the end",
            request: Request { remote_offset: end - 63, ..request },
            ..base
        },
        Refusal {
            name: "READ, one byte before the start",
            verb: Verb::Read,
            request: Request { remote_offset: -1, ..request },
            ..base
        },
        Refusal {
            name: "FETCH_ADD beyond the end",
            verb: Verb::FetchAdd,
            request: Request { remote_offset: end, ..word },
            ..base
        },
        Refusal { name: "WRITE, the region does not allow it", memory: Access::LOCAL_WRITE, ..base },
        Refusal {
            name: "READ, the region does not allow it",
            verb: Verb::Read,
            memory: Access::LOCAL_WRITE,
            ..base
        },
        Refusal {
            name: "FETCH_ADD, the region does not allow it",
            verb: Verb::FetchAdd,
            request: word,
            memory: Access::LOCAL_WRITE,
            ..base
        },
        Refusal {
            name: "WRITE, the queue pair does not allow it",
            queue_pair: Access::LOCAL_WRITE,
            sends: [fails(REM_INV_REQ); 2],
            ..base
        },
        Refusal {
            name: "READ, the queue pair does not allow it",
            verb: Verb::Read,
            queue_pair: Access::LOCAL_WRITE,
            sends: [fails(REM_INV_REQ); 2],
            ..base
        },
        Refusal {
            name: "FETCH_ADD, the queue pair does not allow it",
            verb: Verb::FetchAdd,
            request: word,
            queue_pair: Access::LOCAL_WRITE,
            sends: [fails(REM_INV_REQ); 2],
            ..base
        },
        Refusal {
            name: "FETCH_ADD, not at a multiple of 8",
            verb: Verb::FetchAdd,
            request: Request { remote_offset: 132, ..word },
            sends: [fails(REM_INV_REQ); 2],
            not_from_rxe: true,
            ..base
        },
        Refusal {
            name: "SEND, longer than the receive",
            verb: Verb::Send,
            request: Request { length: RECEIVE.1 + 1, ..request },
            // rxe: NAK 0x63 and 'malformed WQE'; the engine: NAK 0x61, and its status in the verbs API.
            sends: [fails(REM_OP), fails(REM_INV_REQ)],
            receive: [LOC_QP_OP, WcStatus::LocLenErr as u64],
            ..base
        },
        Refusal {
            name: "SEND of three packets, longer than the receive",
            verb: Verb::Send,
            request: Request { length: 2500, ..request },
            sends: [fails(REM_OP), fails(REM_INV_REQ)],
            receive: [LOC_QP_OP, WcStatus::LocLenErr as u64],
            ..base
        },
        Refusal {
            name: "SEND, the receive's memory may not be written",
            verb: Verb::Send,
            memory: Access::NONE,
            sends: [fails(REM_OP); 2],
            // rxe has one status for all errors of the receive WR itself.
            receive: [LOC_QP_OP, WcStatus::LocProtErr as u64],
            ..base
        },
        Refusal {
            name: "SEND with invalidate, a region's own key",
            verb: Verb::SendInvalidate,
            // rxe acknowledges it and fails nevertheless, silently; the engine sends a NAK.
            sends: [[SUCCESS, WcStatus::RetryExcErr as u64, FLUSHED], fails(REM_ACCESS)],
            receive: [WcStatus::RemInvReqErr as u64; 2],
            ..base
        },
    ]
}

pub(crate) fn refused(ends: &mut Ends, asker: Side, case: &Refusal) -> Outcome {
    let other = asker.other();
    let who_refuses = usize::from(other == Side::Ferroce);
    let mut access = [everything(); 2];
    access[usize::from(other == Side::Rxe)] = case.memory;
    let memories = ends.memories(LENGTH, access);
    let source = [Part { offset: 64, length: 4096, seed: Some(7) }];
    ends.fill(asker, &memories, &source);
    ends.fill(other, &memories, &[]);
    let mut pair =
        ends.connect(&Terms { access: case.queue_pair, ..Terms::new(QpType::Rc, PathMtu::Mtu1024) });
    for side in Side::BOTH {
        if side == other || case.memory != Access::NONE {
            ends.receive(side, &mut pair, &memories, &[RECEIVE, RECEIVE]);
        }
    }
    let mut request = case.request;
    let key = ends.key(other, &memories);
    request.rkey = case.bad_key.then_some(key ^ 0x0055_0000);
    request.invalidate = key;
    let behind = Request { offset: 64, length: 100, remote_offset: 512, ..Request::EMPTY };
    let posted = ends.try_to_post(asker, &mut pair, &memories, case.verb, &[request]);
    if asker == Side::Rxe && case.not_from_rxe {
        ends.close(pair);
        ends.release_memories(&memories);
        return match posted {
            Err(reason) if reason.contains("Errno: 22") => Ok("rxe does not post it: EINVAL".to_owned()),
            other => Err(format!("{other:?} in place of EINVAL")),
        };
    }
    posted?;
    ends.post(asker, &mut pair, &memories, Verb::Send, &[behind, behind]);

    let sent = ends.poll_for(asker, &pair, Queue::Send, 3, PATIENCE);
    let received = ends.poll_for(other, &pair, Queue::Receive, 2, PATIENCE);
    let failed = [ends.has_failed(asker, &pair), ends.has_failed(other, &pair)];
    // The payload of a SEND may have arrived in its place.
    let (offset, length) = RECEIVE;
    let spoiled = [Part { offset, length, seed: None }];
    let intact =
        ends.check(other, &memories, if case.verb.is_send() { &spoiled } else { &[] }, Duration::ZERO);
    let untouched = ends.check(asker, &memories, &source, Duration::ZERO);
    ends.close(pair);
    ends.release_memories(&memories);

    statuses(&sent, &case.sends[who_refuses]).map_err(|found| format!("sends end with {found}"))?;
    statuses(&received, &[case.receive[who_refuses], FLUSHED])
        .map_err(|found| format!("receives at {} end with {found}", other.name()))?;
    if failed != [true; 2] {
        return Err(format!("queue pairs of asker and other in error: {failed:?}"));
    }
    intact?;
    untouched?;
    Ok(format!("{} there {}", name(sent[0].status), name(received[0].status)))
}

/// A memory window's key becomes invalid with a SEND with Invalidate.
fn invalidated_key(ends: &mut Ends, asker: Side) -> Outcome {
    let other = asker.other();
    let memories = ends.memories(LENGTH, [everything() | Access::MW_BIND; 2]);
    let mut pair = ends.connect(&Terms::new(QpType::Rc, PathMtu::Mtu1024));
    let source = [Part { offset: 64, length: 64, seed: Some(9) }];
    ends.fill(asker, &memories, &source);
    ends.fill(other, &memories, &[]);
    ends.receive(other, &mut pair, &memories, &[RECEIVE, RECEIVE]);
    let key = ends.window(other, &mut pair, &memories, (128, 64));
    let write = Request { offset: 64, length: 64, remote_offset: 128, rkey: Some(key), ..Request::EMPTY };
    ends.post(asker, &mut pair, &memories, Verb::Write, &[write]);
    let invalidate = Request { invalidate: key, ..Request::EMPTY };
    ends.post(asker, &mut pair, &memories, Verb::SendInvalidate, &[invalidate]);
    ends.post(asker, &mut pair, &memories, Verb::Write, &[write]);
    let sent = ends.poll_for(asker, &pair, Queue::Send, 3, PATIENCE);
    let received = ends.poll_for(other, &pair, Queue::Receive, 2, PATIENCE);
    let arrived = Part { offset: 128, ..source[0] };
    let intact = ends.check(other, &memories, &[arrived], Duration::ZERO);
    ends.close(pair);
    ends.release_memories(&memories);
    statuses(&sent, &[SUCCESS, SUCCESS, REM_ACCESS]).map_err(|found| format!("sends end with {found}"))?;
    statuses(&received, &[SUCCESS, FLUSHED]).map_err(|found| format!("receives end with {found}"))?;
    if received[0].invalidated != Some(key) {
        return Err(format!("{received:?} does not tell of the key {key:#x}"));
    }
    intact?;
    Ok("works before, RemAccessErr afterwards".to_owned())
}

/// The requester waits as the RNR NAK says, and retransmits.
pub(crate) fn late_receive(ends: &mut Ends, asker: Side) -> Outcome {
    let other = asker.other();
    let memories = ends.memories(LENGTH, [everything(); 2]);
    // 41 ms; without a limit.
    let terms = Terms { rnr_timer: 24, rnr_retry: 7, ..Terms::new(QpType::Rc, PathMtu::Mtu1024) };
    let mut pair = ends.connect(&terms);
    let source = [Part { offset: 64, length: 100, seed: Some(11) }];
    ends.fill(asker, &memories, &source);
    ends.fill(other, &memories, &[]);
    ends.post(
        asker,
        &mut pair,
        &memories,
        Verb::Send,
        &[Request { offset: 64, length: 100, ..Request::EMPTY }],
    );
    let naks = ends.rnr_naks();
    let early = ends.poll_for(asker, &pair, Queue::Send, 1, Duration::from_millis(300));
    let naks = ends.rnr_naks() - naks;
    ends.receive(other, &mut pair, &memories, &[RECEIVE]);
    let sent = ends.poll_for(asker, &pair, Queue::Send, 1, PATIENCE);
    let received = ends.poll_for(other, &pair, Queue::Receive, 1, PATIENCE);
    let failed = ends.has_failed(asker, &pair) || ends.has_failed(other, &pair);
    let arrived = Part { offset: RECEIVE.0, ..source[0] };
    let right = ends.check(other, &memories, &[arrived], Duration::ZERO);
    ends.close(pair);
    ends.release_memories(&memories);
    if naks == 0 {
        return Err("no RNR NAK was seen".to_owned());
    }
    statuses(&early, &[]).map_err(|found| format!("ends before there is a receive, with {found}"))?;
    statuses(&sent, &[SUCCESS]).map_err(|found| format!("the send ends with {found}"))?;
    statuses(&received, &[SUCCESS]).map_err(|found| format!("the receive ends with {found}"))?;
    if failed {
        return Err("a queue pair has failed".to_owned());
    }
    right?;
    Ok("Success there Success".to_owned())
}

/// The requester gives up; the responder has made no error.
pub(crate) fn no_receive(ends: &mut Ends, asker: Side) -> Outcome {
    gives_up(ends, asker, Verb::Send, WcStatus::RnrRetryExcErr)
}

pub(crate) fn gone(ends: &mut Ends, asker: Side) -> Outcome {
    gives_up(ends, asker, Verb::Write, WcStatus::RetryExcErr)
}

fn gives_up(ends: &mut Ends, asker: Side, verb: Verb, status: WcStatus) -> Outcome {
    let other = asker.other();
    let memories = ends.memories(LENGTH, [everything(); 2]);
    // Two retries, after 1.3 ms or 67 ms.
    let mut terms = Terms { rnr_timer: 14, ..Terms::new(QpType::Rc, PathMtu::Mtu1024) };
    let there = if status == WcStatus::RnrRetryExcErr {
        terms.rnr_retry = 2;
        true
    } else {
        (terms.timeout, terms.retry_count) = (14, 2);
        false
    };
    let mut pair = ends.connect(&terms);
    ends.fill(other, &memories, &[]);
    if !there {
        ends.close_side(other, &pair);
    }
    ends.receive(asker, &mut pair, &memories, &[RECEIVE]);
    let request = Request { offset: 64, length: 2500, ..Request::EMPTY };
    ends.post(asker, &mut pair, &memories, verb, &[request, request]);
    let sent = ends.poll_for(asker, &pair, Queue::Send, 2, PATIENCE);
    let received = ends.poll_for(asker, &pair, Queue::Receive, 1, PATIENCE);
    let failed = ends.has_failed(asker, &pair);
    let other_failed = there && ends.has_failed(other, &pair);
    let intact = ends.check(other, &memories, &[], Duration::ZERO);
    if there {
        ends.close_side(other, &pair);
    }
    ends.close_side(asker, &pair);
    ends.release_memories(&memories);
    statuses(&sent, &[status as u64, FLUSHED]).map_err(|found| format!("sends end with {found}"))?;
    statuses(&received, &[FLUSHED]).map_err(|found| format!("the asker's receive ends with {found}"))?;
    if !failed || other_failed {
        return Err(format!("queue pairs in error: the asker's {failed}, the other {other_failed}"));
    }
    intact?;
    Ok(format!("{} there {}", name(sent[0].status), if there { "nothing, in RTS" } else { "nobody" }))
}

/// The error is in the requester's own memory.
fn local_protection(ends: &mut Ends, asker: Side) -> Outcome {
    let mut access = [everything(); 2];
    access[usize::from(asker == Side::Rxe)] = Access::REMOTE_READ;
    let memories = ends.memories(LENGTH, access);
    let mut pair = ends.connect(&Terms::new(QpType::Rc, PathMtu::Mtu1024));
    ends.fill(asker, &memories, &[]);
    let request = Request { offset: 64, length: 64, ..Request::EMPTY };
    ends.post(asker, &mut pair, &memories, Verb::Read, &[request, request]);
    let sent = ends.poll_for(asker, &pair, Queue::Send, 2, PATIENCE);
    let failed = [ends.has_failed(asker, &pair), ends.has_failed(asker.other(), &pair)];
    let intact = ends.check(asker, &memories, &[], Duration::ZERO);
    ends.close(pair);
    ends.release_memories(&memories);
    statuses(&sent, &[WcStatus::LocProtErr as u64, FLUSHED])
        .map_err(|found| format!("sends end with {found}"))?;
    if failed != [true, false] {
        return Err(format!("queue pairs of asker and other in error: {failed:?}"));
    }
    intact?;
    Ok("LocProtErr there nothing, in RTS".to_owned())
}

/// An unreliable message without a receive WR is dropped, without other effects.
fn dropped(ends: &mut Ends, asker: Side, service: QpType) -> Outcome {
    let other = asker.other();
    let header = if service == QpType::Ud { 40 } else { 0 };
    let memories = ends.memories(LENGTH, [everything(); 2]);
    let mut pair = ends.connect(&Terms::new(service, PathMtu::Mtu1024));
    let parts = [9, 10].map(|seed| Part { offset: u64::from(seed) * 64, length: 50, seed: Some(seed) });
    ends.fill(asker, &memories, &parts);
    ends.fill(other, &memories, &[]);
    let mut sent = Vec::new();
    for (number, part) in parts.iter().enumerate() {
        if number == 1 {
            // Packets in flight must not arrive later.
            ends.run_for(Duration::from_millis(300));
            ends.receive(other, &mut pair, &memories, &[RECEIVE]);
        }
        let request = Request { offset: part.offset, length: part.length, ..Request::EMPTY };
        ends.post(asker, &mut pair, &memories, Verb::Send, &[request]);
        sent.extend(ends.poll_for(asker, &pair, Queue::Send, 1, PATIENCE));
    }
    let received = ends.poll_for(other, &pair, Queue::Receive, 1, PATIENCE);
    let failed = ends.has_failed(asker, &pair) || ends.has_failed(other, &pair);
    let network_header = Part { offset: RECEIVE.0, length: header, seed: None };
    let arrived = Part { offset: RECEIVE.0 + u64::from(header), ..parts[1] };
    let right = ends.check(other, &memories, &[network_header, arrived], Duration::ZERO);
    ends.close(pair);
    ends.release_memories(&memories);
    statuses(&sent, &[SUCCESS; 2]).map_err(|found| format!("sends end with {found}"))?;
    statuses(&received, &[SUCCESS]).map_err(|found| format!("the receive ends with {found}"))?;
    if failed {
        return Err("a queue pair has failed".to_owned());
    }
    right?;
    Ok("Success there only the second, Success".to_owned())
}

/// Fails with the statuses that were found, unless they are the expected ones.
fn statuses(found: &[Completion], expected: &[u64]) -> Result<(), String> {
    if found.iter().map(|wc| wc.status).eq(expected.iter().copied()) {
        return Ok(());
    }
    let names = |statuses: &mut dyn Iterator<Item = u64>| statuses.map(name).collect::<Vec<_>>().join(", ");
    Err(format!(
        "[{}] in place of [{}]",
        names(&mut found.iter().map(|wc| wc.status)),
        names(&mut expected.iter().copied())
    ))
}

/// The name of a status.
fn name(status: u64) -> String {
    let all = [
        WcStatus::Success,
        WcStatus::LocLenErr,
        WcStatus::LocQpOpErr,
        WcStatus::LocProtErr,
        WcStatus::WrFlushErr,
        WcStatus::MwBindErr,
        WcStatus::BadRespErr,
        WcStatus::LocAccessErr,
        WcStatus::RemInvReqErr,
        WcStatus::RemAccessErr,
        WcStatus::RemOpErr,
        WcStatus::RetryExcErr,
        WcStatus::RnrRetryExcErr,
    ];
    all.iter().find(|known| **known as u64 == status).map_or(status.to_string(), |known| format!("{known:?}"))
}
