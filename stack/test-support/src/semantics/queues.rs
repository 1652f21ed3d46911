//! Completion queues, their events, and shared receive queues.

use std::time::{Duration, Instant};

use ferroce::*;

use super::events::is_readable;
use super::{Entry, Outcome, Pair, refused, same};

pub(super) const CASES: &[Entry] = &[
    ("queues of their own for sends and receives", two_queues),
    ("a queue that is armed for the next completion", armed),
    ("a queue that is armed for a solicited one", armed_for_solicited),
    ("a completion channel", channel),
    ("a queue in use is busy", busy_queue),
    ("a send queue and a receive queue that are full", full),
    ("completions of a queue pair that was destroyed", destroyed),
    ("a context that is waited for by its descriptor", descriptor),
    ("SRQ: two queue pairs take from it", srq),
    ("SRQ: its limit", srq_limit),
    ("SRQ: the last receive of a queue pair that fails", srq_last),
];

fn two_queues(pair: &mut Pair) -> Outcome {
    let received = pair.ends[1].cq(4)?;
    let a = pair.ends[0].qp(QpType::Rc, |config| config)?;
    let b = pair.ends[1].qp(QpType::Rc, |config| config.recv_cq(received))?;
    pair.connect([a, b])?;
    pair.ends[1].receive(b, 1, &[])?;
    pair.ends[0].send(a, 2, SendOp::Send, &[])?;
    pair.completes(0, 2, WcStatus::Success)?;
    let told = pair.until("completion", |pair| pair.ends[1].context.poll_cq(received))?;
    same!((told.wr_id, told.status), (1, WcStatus::Success));
    pair.silence()
}

fn armed(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    let cq = pair.ends[1].cq;
    (1..=3).try_for_each(|n| pair.ends[1].receive(qps[1], n, &[]))?;
    pair.ends[1].context.req_notify_cq(cq, Notify::Next)?;
    same!(pair.ends[1].context.next_event_of(cq)?, None);
    for wr_id in [1, 2] {
        pair.ends[0].send(qps[0], wr_id, SendOp::Send, &[])?;
    }
    same!(pair.event(1, cq)?, Event::Completion(cq));
    (1..=2).try_for_each(|n| pair.completes(1, n, WcStatus::Success).map(drop))?;
    (1..=2).try_for_each(|n| pair.completes(0, n, WcStatus::Success).map(drop))?;
    // One event each time it was armed.
    same!(pair.ends[1].context.next_event_of(cq)?, None);
    Ok(())
}

fn armed_for_solicited(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    let cq = pair.ends[1].cq;
    (1..=2).try_for_each(|n| pair.ends[1].receive(qps[1], n, &[]))?;
    pair.ends[1].context.req_notify_cq(cq, Notify::Solicited)?;
    pair.ends[0].send(qps[0], 1, SendOp::Send, &[])?;
    pair.completes(0, 1, WcStatus::Success)?;
    pair.completes(1, 1, WcStatus::Success)?;
    pair.silence()?;
    same!(pair.ends[1].context.next_event_of(cq)?, None);
    let flags = SendFlags::SIGNALED.solicited(true);
    let wr = SendWorkRequest { wr_id: 2, op: SendOp::Send, data: Data::Sges(&[]), flags };
    pair.ends[0].context.post_send(qps[0], &wr)?;
    same!(pair.event(1, cq)?, Event::Completion(cq));
    pair.completes(0, 2, WcStatus::Success)?;
    pair.completes(1, 2, WcStatus::Success)?;
    Ok(())
}

fn channel(pair: &mut Pair) -> Outcome {
    let channel = pair.ends[1].context.create_comp_channel()?;
    let cq = pair.ends[1].context.create_cq_on(4, &channel)?;
    pair.ends[1].keep_cq(cq);
    let a = pair.ends[0].qp(QpType::Rc, |config| config)?;
    let b = pair.ends[1].qp(QpType::Rc, |config| config.recv_cq(cq))?;
    pair.connect([a, b])?;
    pair.ends[1].receive(b, 1, &[])?;
    pair.ends[1].context.req_notify_cq(cq, Notify::Next)?;
    pair.ends[0].send(a, 2, SendOp::Send, &[])?;
    let found = pair.until("event of the channel", |_| channel.get_cq_event())?;
    same!(found, cq);
    same!(pair.ends[1].context.poll_cq(cq)?.map(|told| told.wr_id), Some(1));
    pair.completes(0, 2, WcStatus::Success)?;
    Ok(())
}

fn busy_queue(pair: &mut Pair) -> Outcome {
    for end in &mut pair.ends {
        let cq = end.cq(4)?;
        let qp = end.qp(QpType::Rc, |config| config.send_cq(cq))?;
        refused!(end.context.destroy_cq(cq), Error::Busy { .. });
        end.release_qp(qp);
        end.context.destroy_qp(qp)?;
        refused!(end.context.create_cq(0), Error::Invalid { .. });
    }
    Ok(())
}

fn full(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config.max_send_wr(4).max_recv_wr(4))?;
    for wr_id in 0..4 {
        pair.ends[0].send(qps[0], wr_id, SendOp::Send, &[])?;
        pair.ends[0].receive(qps[0], wr_id, &[])?;
    }
    refused!(pair.ends[0].send(qps[0], 4, SendOp::Send, &[]), Error::QueueFull { queue: "send", depth: 4 });
    refused!(pair.ends[0].receive(qps[0], 4, &[]), Error::QueueFull { queue: "receive", depth: 4 });
    same!(pair.ends[0].context.query_qp(qps[0])?.outstanding_sends, 4);
    (0..4).try_for_each(|n| pair.ends[1].receive(qps[1], 10 + n, &[]))?;
    (0..4).try_for_each(|n| pair.completes(0, n, WcStatus::Success).map(drop))?;
    (0..4).try_for_each(|n| pair.completes(1, 10 + n, WcStatus::Success).map(drop))?;
    same!(pair.ends[0].context.query_qp(qps[0])?.outstanding_sends, 0);
    // An unsupported operation is reported even if the queue is full.
    let qps = pair.connected(QpType::Uc, |config| config.max_send_wr(4))?;
    (0..4).try_for_each(|n| pair.ends[0].send(qps[0], n, SendOp::Send, &[]))?;
    let there = pair.ends[1].zeros(8, &[Access::REMOTE_READ])?;
    let read = SendOp::Read(pair.ends[1].context.remote(there)?.at(0));
    refused!(pair.ends[0].send(qps[0], 4, read, &[]), Error::Invalid { attribute: "op", .. });
    let wr = SendWorkRequest { wr_id: 5, op: read, data: Data::Sges(&[]), flags: SendFlags::SIGNALED };
    refused!(
        pair.ends[0].context.post_sends(qps[0], &[wr, wr]),
        PostError { posted: 0, source: Error::Invalid { attribute: "op", .. }, .. }
    );
    (0..4).try_for_each(|n| pair.completes(0, n, WcStatus::Success).map(drop))
}

fn destroyed(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    let others = pair.connected(QpType::Rc, |config| config)?;
    for (qps, wr_id) in [(qps, 1), (others, 2)] {
        pair.ends[1].receive(qps[1], wr_id, &[])?;
        pair.ends[0].send(qps[0], wr_id, SendOp::Send, &[])?;
    }
    // Everything is done by then.
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(200) {
        pair.turn()?;
    }
    for (end, qp) in pair.ends.iter_mut().zip(qps) {
        end.release_qp(qp);
        end.context.destroy_qp(qp)?;
        refused!(end.context.query_qp(qp), Error::InvalidHandle { .. });
    }
    pair.completes(0, 2, WcStatus::Success)?;
    pair.completes(1, 2, WcStatus::Success)?;
    pair.silence()
}

fn descriptor(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    pair.ends[1].receive(qps[1], 1, &[])?;
    // All work is done.
    pair.silence()?;
    let mut clock = Clock::start();
    clock.catch_up_with(pair.ends[1].context.now());
    let start = Instant::now();
    while !pair.ends[1].context.prepare_wait(clock.now())? {
        if start.elapsed() > Duration::from_secs(5) {
            return Err("the context is never ready to be waited for".into());
        }
        pair.turn()?;
    }
    pair.ends[0].send(qps[0], 2, SendOp::Send, &[])?;
    let start = Instant::now();
    loop {
        // Only the sender is polled: packets to the other end make its descriptor readable.
        let now = clock.now();
        pair.ends[0].context.poll(now)?;
        if is_readable(&pair.ends[1].context)? {
            break;
        }
        if start.elapsed() > Duration::from_secs(20) {
            return Err("the descriptor does not become readable".into());
        }
    }
    pair.completes(1, 1, WcStatus::Success)?;
    pair.completes(0, 2, WcStatus::Success)?;
    Ok(())
}

fn srq(pair: &mut Pair) -> Outcome {
    let srq = pair.ends[1].srq()?;
    let change = |config: QpConfig| config;
    let a = [pair.ends[0].qp(QpType::Rc, change)?, pair.ends[0].qp(QpType::Rc, change)?];
    let b = [
        pair.ends[1].qp(QpType::Rc, |config| config.srq(srq))?,
        pair.ends[1].qp(QpType::Rc, |config| config.srq(srq))?,
    ];
    for (a, b) in a.into_iter().zip(b) {
        pair.connect([a, b])?;
    }
    refused!(pair.ends[1].receive(b[0], 0, &[]), Error::Invalid { .. });
    let to = pair.ends[1].zeros(64, &[Access::LOCAL_WRITE])?;
    for n in 0..4 {
        let sges = [to.sge(8 * n..8 * n + 8)];
        pair.ends[1].context.post_srq_recv(srq, &ReceiveWorkRequest { wr_id: n, sges: &sges })?;
    }
    same!(pair.ends[1].context.query_srq(srq)?.posted, 4);
    let from = pair.ends[0].region(8, &[])?;
    for n in 0..4 {
        pair.ends[0].send(a[n as usize % 2], n, SendOp::Send, &[from.sge(0..n + 1)])?;
        pair.completes(0, n, WcStatus::Success)?;
        let told = pair.completes(1, n, WcStatus::Success)?;
        same!((told.byte_len, told.qp), (n as u32 + 1, b[n as usize % 2]));
    }
    same!(pair.ends[1].context.query_srq(srq)?.posted, 0);
    refused!(pair.ends[1].context.destroy_srq(srq), Error::Busy { .. });
    Ok(())
}

fn srq_limit(pair: &mut Pair) -> Outcome {
    let srq = pair.ends[1].srq()?;
    let a = pair.ends[0].qp(QpType::Rc, |config| config)?;
    let b = pair.ends[1].qp(QpType::Rc, |config| config.srq(srq))?;
    pair.connect([a, b])?;
    for wr_id in 0..4 {
        pair.ends[1].context.post_srq_recv(srq, &ReceiveWorkRequest { wr_id, sges: &[] })?;
    }
    refused!(pair.ends[1].context.arm_srq(srq, 100), Error::Invalid { .. });
    pair.ends[1].context.arm_srq(srq, 3)?;
    for n in 0..2 {
        same!(pair.ends[1].context.next_event_of(srq)?, None);
        pair.ends[0].send(a, n, SendOp::Send, &[])?;
        pair.completes(0, n, WcStatus::Success)?;
        pair.completes(1, n, WcStatus::Success)?;
    }
    same!(pair.event(1, srq)?, Event::SrqLimitReached(srq));
    same!(pair.ends[1].context.query_srq(srq)?.limit, 0);
    Ok(())
}

fn srq_last(pair: &mut Pair) -> Outcome {
    let srq = pair.ends[1].srq()?;
    let a = pair.ends[0].qp(QpType::Rc, |config| config)?;
    let b = pair.ends[1].qp(QpType::Rc, |config| config.srq(srq))?;
    pair.connect([a, b])?;
    pair.ends[1].context.modify_qp(b, Transition::Error)?;
    same!(pair.event(1, b)?, Event::QpLastWqeReached(b));
    Ok(())
}
