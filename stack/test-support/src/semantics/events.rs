//! Asynchronous events, and the waits that each ends.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};
use std::{mem, thread};

use ferroce::*;

use super::{Entry, Outcome, Pair, refused, same};

pub(super) const CASES: &[Entry] = &[
    ("COMM_EST: the first packet in RTR", established),
    ("a completion queue that overflows", overflow),
    ("a queue pair whose completion queue has overflowed", failed_by_overflow),
    ("a completion channel's descriptor", channel_descriptor),
    ("a context that a Poller drives", poller),
    ("a context that a Runner drives", runner),
    ("a wait that another thread ends", woken),
];

/// More completions than a queue for 4 has room for on any card, after rounding up.
const MANY: u64 = 1200;

fn established(pair: &mut Pair) -> Outcome {
    let [a, b] = &mut pair.ends;
    let qps = [a.qp(QpType::Rc, |config| config)?, b.qp(QpType::Rc, |config| config)?];
    let here = a.context.endpoint(qps[0], a.sgid_index())?;
    let there = b.context.endpoint(qps[1], b.sgid_index())?;
    a.context.handshake(qps[0], &here, &there)?;
    b.context.modify_qp(qps[1], Transition::Init { access: Access::NONE })?;
    let address = AddressVector::new(here.gid, b.sgid_index());
    let receive =
        ReadyToReceive::new(address, here.qpn, here.psn).path_mtu(here.path_mtu.min(there.path_mtu));
    b.context.modify_qp_blocking(qps[1], Transition::ReadyToReceive(receive), Duration::from_secs(20))?;
    (1..=2).try_for_each(|n| b.receive(qps[1], n, &[]))?;
    for n in 1..=2 {
        pair.ends[0].send(qps[0], n, SendOp::Send, &[])?;
        pair.completes(0, n, WcStatus::Success)?;
        pair.completes(1, n, WcStatus::Success)?;
    }
    same!(pair.event(1, qps[1])?, Event::CommEst(qps[1]));
    let [a, b] = &mut pair.ends;
    same!(b.context.query_qp(qps[1])?.state, QpState::Rtr);
    b.context.modify_qp(qps[1], Transition::ReadyToSend(ReadyToSend::new(there.psn)))?;
    a.receive(qps[0], 3, &[])?;
    b.send(qps[1], 3, SendOp::Send, &[])?;
    pair.completes(1, 3, WcStatus::Success)?;
    pair.completes(0, 3, WcStatus::Success)?;
    // One event, for the first packet only.
    same!(pair.ends[1].context.next_event_of(qps[1])?, None);
    Ok(())
}

/// A responder whose receives complete in a queue for 4, which is not polled until it overflows.
fn overflown(pair: &mut Pair) -> Result<(Qp, Cq), Box<dyn std::error::Error>> {
    let cq = pair.ends[1].cq(4)?;
    let a = pair.ends[0].qp(QpType::Rc, |config| config)?;
    let b = pair.ends[1].qp(QpType::Rc, |config| config.recv_cq(cq).max_recv_wr(MANY as u32))?;
    pair.connect([a, b])?;
    (0..MANY).try_for_each(|n| pair.ends[1].receive(b, n, &[]))?;
    for n in 0..MANY {
        pair.ends[0].send(a, n, SendOp::Send, &[])?;
        let event = pair.until("completion, nor an event", |pair| {
            let event = pair.ends[1].context.next_event_of(cq)?;
            let own = pair.ends[0].cq;
            let is_done = event.is_some() || pair.ends[0].context.poll_cq(own)?.is_some();
            Ok(is_done.then_some(event))
        })?;
        if let Some(event) = event {
            same!(event, Event::CqErr(cq));
            return Ok((b, cq));
        }
    }
    // A card's events are not checked in each poll.
    same!(pair.event(1, cq)?, Event::CqErr(cq));
    Ok((b, cq))
}

fn overflow(pair: &mut Pair) -> Outcome {
    let (_, cq) = overflown(pair)?;
    // Those that fit are the oldest.
    for n in 0..4 {
        let told = pair.until("completion", |pair| pair.ends[1].context.poll_cq(cq))?;
        same!((told.wr_id, told.status), (n, WcStatus::Success));
    }
    Ok(())
}

fn failed_by_overflow(pair: &mut Pair) -> Outcome {
    let (qp, _) = overflown(pair)?;
    same!(pair.ends[1].context.query_qp(qp)?.state, QpState::Error);
    Ok(())
}

pub(super) fn is_readable(descriptor: &impl AsFd) -> Result<bool, Error> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let soon = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
    let mut fds = [PollFd::new(descriptor, PollFlags::IN)];
    Ok(poll(&mut fds, Some(&soon)).map_err(|error| Error::Wait(error.into()))? > 0)
}

fn channel_descriptor(pair: &mut Pair) -> Outcome {
    let channel = pair.ends[1].context.create_comp_channel()?;
    let cq = pair.ends[1].context.create_cq_on(4, &channel)?;
    pair.ends[1].keep_cq(cq);
    let a = pair.ends[0].qp(QpType::Rc, |config| config)?;
    let b = pair.ends[1].qp(QpType::Rc, |config| config.recv_cq(cq))?;
    pair.connect([a, b])?;
    for n in 1..=2 {
        pair.ends[1].receive(b, n, &[])?;
        pair.ends[1].context.req_notify_cq(cq, Notify::Next)?;
        pair.silence()?;
        same!(is_readable(&channel)?, false);
        pair.ends[0].send(a, n, SendOp::Send, &[])?;
        pair.until("event at the descriptor", |_| Ok(is_readable(&channel)?.then_some(())))?;
        same!(channel.get_cq_event()?, Some(cq));
        same!(is_readable(&channel)?, false);
        same!(pair.ends[1].context.poll_cq(cq)?.map(|told| told.wr_id), Some(n));
        pair.completes(0, n, WcStatus::Success)?;
    }
    Ok(())
}

fn poller(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    pair.ends[1].receive(qps[1], 1, &[])?;
    pair.silence()?;
    let (mut poller, start, mut turns) = (Poller::blocking(), Instant::now(), 0);
    while start.elapsed() < Duration::from_millis(100) {
        poller.poll(&mut pair.ends[1].context)?;
        turns += 1;
    }
    // A poller with nothing to do blocks, for at most 2 ms.
    same!(turns < 500, true);
    pair.ends[0].send(qps[0], 2, SendOp::Send, &[])?;
    let cq = pair.ends[1].cq;
    let start = Instant::now();
    let told = loop {
        pair.ends[0].poll()?;
        poller.poll(&mut pair.ends[1].context)?;
        if let Some(told) = pair.ends[1].context.poll_cq(cq)? {
            break told;
        }
        if start.elapsed() > pair.patience {
            return Err("the Poller finds no completion".into());
        }
    };
    same!((told.wr_id, told.status), (1, WcStatus::Success));
    pair.completes(0, 2, WcStatus::Success)?;
    Ok(())
}

fn runner(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    let other = Context::open(DeviceSpec::Loopback.open()?, &Config::default())?;
    let context = mem::replace(&mut pair.ends[1].context, other);
    let runner = Runner::start(context, &RunnerConfig::default().idle(Idle::Block)).map_err(Error::from)?;
    let outcome = by_runner(pair, &runner, qps);
    let stopped = runner.stop();
    pair.ends[1].context = stopped.context;
    stopped.error.map_or(outcome, |error| Err(error.into()))
}

/// The responder's context is driven by the runner.
fn by_runner(pair: &mut Pair, runner: &Runner, qps: [Qp; 2]) -> Outcome {
    let (pd, cq, qp) = (pair.ends[1].pd, pair.ends[1].cq, qps[1]);
    let mut handle = runner.handle(&HandleConfig::default())?;
    handle.deliver(cq)?;
    let memory = Memory::zeroed(64)?;
    let to = handle
        .call(move |context| context.register(pd, memory, Access::LOCAL_WRITE))?
        .map_err(|refused| refused.source)?;
    handle.post_recv(qp, &ReceiveWorkRequest { wr_id: 1, sges: &[to.sge(0..64)] })?;
    same!(handle.call(move |context| context.query_qp(qp))??.outstanding_receives, 1);
    // It sleeps by then.
    thread::sleep(Duration::from_millis(30));
    let from = pair.ends[0].region(8, &[])?;
    pair.ends[0].send(qps[0], 2, SendOp::Send, &[from.sge(0..8)])?;
    let start = Instant::now();
    let told = loop {
        pair.ends[0].poll()?;
        match handle.poll()? {
            Some(Delivery::Completed { completion, .. }) => break completion,
            Some(other) => return Err(format!("{other:?} where a completion was expected").into()),
            None if start.elapsed() > pair.patience => return Err("the Runner delivers nothing".into()),
            None => {}
        }
    };
    same!((told.wr_id, told.status, told.byte_len), (1, WcStatus::Success, 8));
    let bytes = handle.call(move |context| -> Result<_, Error> {
        let mut bytes = [0; 8];
        context.read(to, 0, &mut bytes)?;
        context.deregister(to)?;
        Ok(bytes)
    })??;
    same!(bytes, [1, 2, 3, 4, 5, 6, 7, 8]);
    let own = pair.ends[0].cq;
    let start = Instant::now();
    while pair.ends[0].context.poll_cq(own)?.is_none() {
        pair.ends[0].poll()?;
        if start.elapsed() > pair.patience {
            return Err("the send does not complete".into());
        }
    }
    // A work request that the context refuses is returned.
    let wrong = SendWorkRequest {
        wr_id: 3,
        op: SendOp::Send,
        data: Data::Sges(&[to.sge(0..8)]),
        flags: SendFlags::SIGNALED,
    };
    handle.post_send(qp, &wrong)?;
    let told = handle.wait(pair.patience)?;
    match told {
        Some(Delivery::Refused { wr_id: 3, error }) => {
            refused!(Err::<(), _>(*error), Error::InvalidHandle { .. })
        }
        other => return Err(format!("{other:?} where a refusal was expected").into()),
    }
    Ok(())
}

fn woken(pair: &mut Pair) -> Outcome {
    pair.silence()?;
    for end in &mut pair.ends {
        let waker = end.context.waker().ok_or("no waker")?;
        let start = Instant::now();
        let later = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            waker.wake();
        });
        let waited = end.context.wait(Duration::from_secs(30));
        let time = start.elapsed();
        later.join().map_err(|_| "the thread panicked")?;
        waited?;
        same!(time < Duration::from_secs(15), true);
    }
    Ok(())
}
