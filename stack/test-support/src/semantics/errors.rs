//! Work requests that fail, and those after them.

use std::time::Duration;

use ferroce::*;

use super::pair::ALL;
use super::{Entry, Outcome, Pair, same};

pub(super) const CASES: &[Entry] = &[
    ("a key that is nobody's", wrong_key),
    ("a range that passes the end of the region", wrong_range),
    ("WRITE to a region that peers may only read", no_right),
    ("WRITE through a queue pair that grants none", no_right_of_queue_pair),
    ("atomic at an address that is no multiple of 8", misaligned),
    ("a local range that passes the end of the region", wrong_local_range),
    ("a receive into a region that is not LOCAL_WRITE", wrong_receive),
    ("a message that is longer than its receive", too_long),
    ("no receive, and no more RNR retries", no_receive),
    ("a receive that comes late", late_receive),
    ("a peer that is gone", peer_is_gone),
    ("work behind an error is flushed", flushed),
    ("sends that are posted in ERR are flushed", sent_in_error),
    ("receives that are posted in ERR are flushed", received_in_error),
    ("UC: a local error leads to SQE, and Resume out of it", uc_local_error),
];

/// A WRITE of 8 bytes that fails with this status, and fails the queue pairs.
fn write_fails(pair: &mut Pair, qps: [Qp; 2], to: RemoteAddress, status: WcStatus) -> Outcome {
    let from = pair.ends[0].region(8, &[])?;
    pair.ends[0].send(qps[0], 1, SendOp::Write(to), &[from.sge(0..8)])?;
    pair.completes(0, 1, status)?;
    ends_in_error(pair, 0, qps[0])
}

fn ends_in_error(pair: &mut Pair, end: usize, qp: Qp) -> Outcome {
    pair.until("state ERR", |pair| {
        Ok((pair.ends[end].context.query_qp(qp)?.state == QpState::Error).then_some(()))
    })
}

fn wrong_key(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    let to = pair.ends[1].zeros(8, &ALL)?;
    let remote = pair.ends[1].context.remote(to)?;
    let rkey = RKey::new(remote.rkey.value() ^ 0x0155_5500);
    write_fails(pair, qps, RemoteAddress { rkey, ..remote.at(0) }, WcStatus::RemAccessErr)?;
    same!(pair.ends[1].bytes(to, 0..8)?, vec![0; 8]);
    Ok(())
}

fn wrong_range(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    let to = pair.ends[1].zeros(16, &ALL)?;
    let remote = pair.ends[1].context.remote(to)?;
    write_fails(pair, qps, remote.at(9), WcStatus::RemAccessErr)?;
    same!(pair.ends[1].bytes(to, 0..16)?, vec![0; 16]);
    Ok(())
}

fn no_right(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    let to = pair.ends[1].zeros(8, &[Access::REMOTE_READ])?;
    let remote = pair.ends[1].context.remote(to)?;
    write_fails(pair, qps, remote.at(0), WcStatus::RemAccessErr)
}

fn no_right_of_queue_pair(pair: &mut Pair) -> Outcome {
    let qps = [pair.ends[0].qp(QpType::Rc, |config| config)?, pair.ends[1].qp(QpType::Rc, |config| config)?];
    pair.ends[1].context.modify_qp(qps[1], Transition::Init { access: Access::REMOTE_READ })?;
    pair.connect(qps)?;
    let to = pair.ends[1].zeros(8, &ALL)?;
    let remote = pair.ends[1].context.remote(to)?;
    let from = pair.ends[0].region(8, &[])?;
    pair.ends[0].send(qps[0], 1, SendOp::Write(remote.at(0)), &[from.sge(0..8)])?;
    let told = pair.completion(0)?;
    let is_refused = matches!(told.status, WcStatus::RemAccessErr | WcStatus::RemInvReqErr);
    same!((told.wr_id, is_refused), (1, true));
    ends_in_error(pair, 0, qps[0])
}

fn misaligned(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    let old = pair.ends[0].zeros(8, &[Access::LOCAL_WRITE])?;
    let word = pair.ends[1].zeros(32, &ALL)?;
    let remote = pair.ends[1].context.remote(word)?.at(4);
    pair.ends[0].send(qps[0], 1, SendOp::FetchAdd { remote, add: 5 }, &[old.sge(0..8)])?;
    pair.completes(0, 1, WcStatus::RemInvReqErr)?;
    same!(pair.ends[1].bytes(word, 0..32)?, vec![0; 32]);
    Ok(())
}

fn wrong_local_range(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    let from = pair.ends[0].region(8, &[])?;
    pair.ends[1].receive(qps[1], 1, &[])?;
    pair.ends[0].send(qps[0], 2, SendOp::Send, &[from.sge(1..9)])?;
    pair.completes(0, 2, WcStatus::LocProtErr)?;
    ends_in_error(pair, 0, qps[0])
}

fn wrong_receive(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    let from = pair.ends[0].region(8, &[])?;
    let to = pair.ends[1].zeros(8, &[])?;
    pair.ends[1].receive(qps[1], 1, &[to.sge(0..8)])?;
    pair.ends[0].send(qps[0], 2, SendOp::Send, &[from.sge(0..8)])?;
    pair.completes(1, 1, WcStatus::LocProtErr)?;
    pair.completes(0, 2, WcStatus::RemOpErr)?;
    same!(pair.ends[1].bytes(to, 0..8)?, vec![0; 8]);
    Ok(())
}

fn too_long(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    let from = pair.ends[0].region(9, &[])?;
    let to = pair.ends[1].zeros(16, &[Access::LOCAL_WRITE])?;
    pair.ends[1].receive(qps[1], 1, &[to.sge(0..8)])?;
    pair.ends[0].send(qps[0], 2, SendOp::Send, &[from.sge(0..9)])?;
    pair.completes(1, 1, WcStatus::LocLenErr)?;
    pair.completes(0, 2, WcStatus::RemInvReqErr)?;
    same!(pair.ends[1].bytes(to, 8..16)?, vec![0; 8]);
    ends_in_error(pair, 0, qps[0])?;
    ends_in_error(pair, 1, qps[1])
}

/// Connected by transitions, with few retries.
fn impatient(
    pair: &mut Pair,
    change: impl Fn(ReadyToSend) -> ReadyToSend,
) -> Result<[Qp; 2], Box<dyn std::error::Error>> {
    let [a, b] = &mut pair.ends;
    let qps = [a.qp(QpType::Rc, |config| config)?, b.qp(QpType::Rc, |config| config)?];
    let ends = [a.context.endpoint(qps[0], a.sgid_index())?, b.context.endpoint(qps[1], b.sgid_index())?];
    for (n, end) in [a, b].into_iter().enumerate() {
        let (own, other) = (&ends[n], &ends[1 - n]);
        let address = AddressVector::new(other.gid, end.sgid_index());
        let access = Access::REMOTE_WRITE | Access::REMOTE_READ;
        let receive = ReadyToReceive::new(address, other.qpn, other.psn)
            .min_rnr_timer(RnrTimer::at_least(Duration::from_millis(1)));
        let send = change(ReadyToSend::new(own.psn));
        let moves =
            [Transition::Init { access }, Transition::ReadyToReceive(receive), Transition::ReadyToSend(send)];
        for transition in moves {
            end.context.modify_qp_blocking(qps[n], transition, Duration::from_secs(5))?;
        }
    }
    Ok(qps)
}

fn no_receive(pair: &mut Pair) -> Outcome {
    let qps = impatient(pair, |send| send.rnr_retry(1))?;
    pair.ends[0].send(qps[0], 1, SendOp::Send, &[])?;
    pair.completes(0, 1, WcStatus::RnrRetryExcErr)?;
    ends_in_error(pair, 0, qps[0])
}

fn late_receive(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    pair.ends[0].send(qps[0], 1, SendOp::Send, &[])?;
    pair.silence()?;
    pair.ends[1].receive(qps[1], 2, &[])?;
    pair.completes(0, 1, WcStatus::Success)?;
    pair.completes(1, 2, WcStatus::Success)?;
    Ok(())
}

fn peer_is_gone(pair: &mut Pair) -> Outcome {
    let qps = impatient(pair, |send| send.timeout(12).retry_count(1))?;
    pair.ends[1].release_qp(qps[1]);
    pair.ends[1].context.destroy_qp(qps[1])?;
    pair.ends[0].send(qps[0], 1, SendOp::Send, &[])?;
    pair.completes(0, 1, WcStatus::RetryExcErr)?;
    ends_in_error(pair, 0, qps[0])
}

fn flushed(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    let from = pair.ends[0].region(8, &[])?;
    let to = pair.ends[1].zeros(8, &[Access::REMOTE_READ])?;
    let remote = pair.ends[1].context.remote(to)?.at(0);
    pair.ends[0].receive(qps[0], 10, &[])?;
    pair.ends[1].receive(qps[1], 11, &[])?;
    let sges = [from.sge(0..8)];
    let write =
        |wr_id, flags| SendWorkRequest { wr_id, op: SendOp::Write(remote), data: Data::Sges(&sges), flags };
    let (loud, quiet) = (SendFlags::SIGNALED, SendFlags::default());
    let list = [write(1, quiet), write(2, quiet), write(3, loud)];
    pair.ends[0].context.post_sends(qps[0], &list)?;
    // Errors of unsignaled work requests are reported too.
    pair.completes(0, 1, WcStatus::RemAccessErr)?;
    let mut rest = Vec::new();
    for _ in 0..3 {
        let told = pair.completion(0)?;
        same!(told.status, WcStatus::WrFlushErr);
        rest.push(told.wr_id);
    }
    rest.sort_unstable();
    same!(rest, vec![2, 3, 10]);
    Ok(())
}

fn sent_in_error(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    pair.ends[0].context.modify_qp(qps[0], Transition::Error)?;
    pair.ends[0].send(qps[0], 1, SendOp::Send, &[])?;
    pair.completes(0, 1, WcStatus::WrFlushErr)?;
    Ok(())
}

fn received_in_error(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    pair.ends[0].receive(qps[0], 1, &[])?;
    pair.ends[0].context.modify_qp(qps[0], Transition::Error)?;
    pair.completes(0, 1, WcStatus::WrFlushErr)?;
    pair.ends[0].receive(qps[0], 2, &[])?;
    pair.completes(0, 2, WcStatus::WrFlushErr)?;
    Ok(())
}

fn uc_local_error(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Uc, |config| config)?;
    let from = pair.ends[0].region(8, &[])?;
    pair.ends[0].send(qps[0], 1, SendOp::Send, &[from.sge(1..9)])?;
    pair.completes(0, 1, WcStatus::LocProtErr)?;
    same!(pair.ends[0].context.query_qp(qps[0])?.state, QpState::Sqe);
    pair.ends[0].send(qps[0], 2, SendOp::Send, &[])?;
    pair.completes(0, 2, WcStatus::WrFlushErr)?;
    pair.ends[0].context.modify_qp(qps[0], Transition::Resume)?;
    pair.ends[1].receive(qps[1], 3, &[])?;
    pair.ends[0].send(qps[0], 4, SendOp::Send, &[])?;
    pair.completes(0, 4, WcStatus::Success)?;
    pair.completes(1, 3, WcStatus::Success)?;
    Ok(())
}
