//! States of queue pairs, their changeable attributes, and queries.

use std::time::Duration;

use ferroce::*;

use super::{End, Entry, Outcome, Pair, refused, same};

pub(super) const CASES: &[Entry] = &[
    ("verbs that a state does not allow", wrong_states),
    ("what query_qp tells, state by state", queried),
    ("SQD: drained, updated, resumed", drained),
    ("rights taken away from a peer in RTS", updated),
    ("RESET discards, and the queue pair connects again", reset),
    ("attributes out of range", out_of_range),
    ("selective repeat", selective),
    ("the next hop by its hardware address", chosen_next_hop),
];

fn wrong_states(pair: &mut Pair) -> Outcome {
    for end in &mut pair.ends {
        let qp = end.qp(QpType::Rc, |config| config)?;
        refused!(end.send(qp, 1, SendOp::Send, &[]), Error::State { state: QpState::Reset, .. });
        refused!(end.receive(qp, 1, &[]), Error::State { state: QpState::Reset, .. });
        let send = Transition::ReadyToSend(ReadyToSend::new(Psn::new(1)));
        refused!(end.context.modify_qp(qp, send), Error::State { .. });
        refused!(end.context.modify_qp(qp, Transition::Drain), Error::State { .. });
        refused!(end.context.modify_qp(qp, Transition::Error), Error::State { .. });
        let datagrams = Transition::InitDatagram { qkey: 1 };
        refused!(end.context.modify_qp(qp, datagrams), Error::Invalid { .. });
        end.context.modify_qp(qp, Transition::Init { access: Access::NONE })?;
        refused!(end.send(qp, 1, SendOp::Send, &[]), Error::State { state: QpState::Init, .. });
        end.receive(qp, 1, &[])?;
        // Again, with other rights.
        end.context.modify_qp(qp, Transition::Init { access: Access::REMOTE_READ })?;
        same!(end.context.query_qp(qp)?.access, Access::REMOTE_READ);
        refused!(end.context.modify_qp(qp, send), Error::State { .. });
    }
    Ok(())
}

fn queried(pair: &mut Pair) -> Outcome {
    let there = pair.ends[1].gid();
    let End { context, .. } = &mut pair.ends[0];
    context.query_device();
    let sgid_index = pair.ends[0].sgid_index();
    let end = &mut pair.ends[0];
    let qp = end.qp(QpType::Rc, |config| config)?;
    let told = end.context.query_qp(qp)?;
    same!((told.state, told.qp_type, told.dest_qpn, told.address), (QpState::Reset, QpType::Rc, None, None));
    same!((told.send, told.qkey, told.srq), (None, None, None));
    end.context.modify_qp(qp, Transition::Init { access: Access::REMOTE_WRITE | Access::REMOTE_ATOMIC })?;
    let told = end.context.query_qp(qp)?;
    same!((told.state, told.access), (QpState::Init, Access::REMOTE_WRITE | Access::REMOTE_ATOMIC));
    let address = AddressVector::new(there, sgid_index).traffic_class(0x28).hop_limit(9);
    let receive = ReadyToReceive::new(address, Qpn::new(0x123), Psn::new(77))
        .path_mtu(PathMtu::Mtu512)
        .max_dest_rd_atomic(3)
        .min_rnr_timer(RnrTimer::at_least(Duration::from_millis(20)));
    end.context.modify_qp_blocking(qp, Transition::ReadyToReceive(receive), Duration::from_secs(5))?;
    let told = end.context.query_qp(qp)?;
    same!((told.state, told.dest_qpn, told.rq_psn), (QpState::Rtr, Some(Qpn::new(0x123)), Psn::new(77)));
    same!((told.path_mtu, told.max_dest_rd_atomic), (Some(PathMtu::Mtu512), 3));
    same!(told.address.map(|way| (way.gid, way.traffic_class, way.hop_limit)), Some((there, 0x28, 9)));
    same!(told.min_rnr_timer, Some(RnrTimer::at_least(Duration::from_millis(20))));
    let send = ReadyToSend::new(Psn::new(99)).timeout(12).retry_count(3).rnr_retry(2).max_rd_atomic(4);
    end.context.modify_qp(qp, Transition::ReadyToSend(send))?;
    let told = end.context.query_qp(qp)?;
    same!((told.state, told.sq_psn, told.send), (QpState::Rts, Psn::new(99), Some(send)));
    end.context.modify_qp(qp, Transition::Error)?;
    same!(end.context.query_qp(qp)?.state, QpState::Error);
    Ok(())
}

fn drained(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    (1..=2).try_for_each(|n| pair.ends[1].receive(qps[1], n, &[]))?;
    pair.ends[0].send(qps[0], 1, SendOp::Send, &[])?;
    pair.completes(0, 1, WcStatus::Success)?;
    pair.completes(1, 1, WcStatus::Success)?;
    pair.ends[0].context.modify_qp(qps[0], Transition::Drain)?;
    same!(pair.event(0, qps[0])?, Event::SqDrained(qps[0]));
    // Work posted in SQD waits.
    pair.ends[0].send(qps[0], 2, SendOp::Send, &[])?;
    pair.silence()?;
    let update = QpUpdate::default().timeout(13).retry_count(2).rnr_retry(1).max_rd_atomic(2);
    pair.ends[0].context.modify_qp(qps[0], Transition::Update(update))?;
    let told = pair.ends[0].context.query_qp(qps[0])?;
    same!(told.state, QpState::Sqd);
    same!(told.send.map(|send| (send.timeout, send.retry_count, send.max_rd_atomic)), Some((13, 2, 2)));
    pair.ends[0].context.modify_qp(qps[0], Transition::Resume)?;
    pair.completes(0, 2, WcStatus::Success)?;
    pair.completes(1, 2, WcStatus::Success)?;
    Ok(())
}

fn updated(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    let to = pair.ends[1].zeros(8, &super::pair::ALL)?;
    let remote = pair.ends[1].context.remote(to)?.at(0);
    let from = pair.ends[0].region(8, &[])?;
    pair.ends[0].send(qps[0], 1, SendOp::Write(remote), &[from.sge(0..8)])?;
    pair.completes(0, 1, WcStatus::Success)?;
    let update = QpUpdate::default().access(Access::REMOTE_READ);
    pair.ends[1].context.modify_qp(qps[1], Transition::Update(update))?;
    same!(pair.ends[1].context.query_qp(qps[1])?.access, Access::REMOTE_READ);
    pair.ends[0].send(qps[0], 2, SendOp::Write(remote), &[from.sge(0..8)])?;
    let told = pair.completion(0)?;
    let is_refused = matches!(told.status, WcStatus::RemAccessErr | WcStatus::RemInvReqErr);
    same!((told.wr_id, is_refused), (2, true));
    // Only allowed in SQD.
    let late = Transition::Update(QpUpdate::default().timeout(9));
    let others = pair.connected(QpType::Rc, |config| config)?;
    refused!(pair.ends[0].context.modify_qp(others[0], late), Error::Invalid { .. });
    Ok(())
}

fn reset(pair: &mut Pair) -> Outcome {
    let qps = pair.connected(QpType::Rc, |config| config)?;
    pair.ends[0].receive(qps[0], 1, &[])?;
    pair.ends[0].send(qps[0], 2, SendOp::Send, &[])?;
    pair.ends[1].receive(qps[1], 3, &[])?;
    for (end, qp) in pair.ends.iter_mut().zip(qps) {
        end.context.modify_qp(qp, Transition::Reset)?;
        let told = end.context.query_qp(qp)?;
        same!((told.state, told.outstanding_sends, told.outstanding_receives), (QpState::Reset, 0, 0));
        same!((told.dest_qpn, told.access), (None, Access::NONE));
    }
    pair.silence()?;
    pair.connect(qps)?;
    pair.ends[1].receive(qps[1], 4, &[])?;
    pair.ends[0].send(qps[0], 5, SendOp::Send, &[])?;
    pair.completes(0, 5, WcStatus::Success)?;
    pair.completes(1, 4, WcStatus::Success)?;
    pair.silence()
}

fn out_of_range(pair: &mut Pair) -> Outcome {
    let there = pair.ends[1].gid();
    let end = &mut pair.ends[0];
    let sgid_index = end.sgid_index();
    let qp = end.qp(QpType::Rc, |config| config)?;
    end.context.modify_qp(qp, Transition::Init { access: Access::NONE })?;
    let address = AddressVector::new(there, sgid_index);
    let receive = ReadyToReceive::new(address, Qpn::new(0x123), Psn::new(77));
    let wrong = [
        ReadyToReceive::new(address, Qpn::new(1), Psn::new(0)),
        ReadyToReceive::new(AddressVector::new(there, 99), Qpn::new(0x123), Psn::new(0)),
        ReadyToReceive::new(address.hop_limit(0), Qpn::new(0x123), Psn::new(0)),
        ReadyToReceive::new(address.flow_label(1 << 20), Qpn::new(0x123), Psn::new(0)),
        receive.max_dest_rd_atomic(129),
    ];
    for receive in wrong {
        refused!(end.context.modify_qp(qp, Transition::ReadyToReceive(receive)), Error::Invalid { .. });
        same!(end.context.query_qp(qp)?.state, QpState::Init);
    }
    for config in [
        QpConfig::rc(end.pd, end.cq).max_send_wr(0),
        QpConfig::rc(end.pd, end.cq).max_recv_sge(33),
        QpConfig::rc(end.pd, end.cq).max_inline_data(4097),
    ] {
        refused!(end.context.create_qp(&config), Error::Invalid { .. });
    }
    Ok(())
}

fn selective(pair: &mut Pair) -> Outcome {
    let gids = [pair.ends[0].gid(), pair.ends[1].gid()];
    for (n, end) in pair.ends.iter_mut().enumerate() {
        let qp = end.qp(QpType::Rc, |config| config)?;
        end.context.modify_qp(qp, Transition::Init { access: Access::NONE })?;
        let address = AddressVector::new(gids[1 - n], end.sgid_index());
        let receive = ReadyToReceive::new(address, Qpn::new(0x123), Psn::new(0)).selective_repeat(true);
        end.context.modify_qp_blocking(qp, Transition::ReadyToReceive(receive), Duration::from_secs(5))?;
        same!(end.context.query_qp(qp)?.selective_repeat, true);
    }
    Ok(())
}

fn chosen_next_hop(pair: &mut Pair) -> Outcome {
    let gids = [pair.ends[0].gid(), pair.ends[1].gid()];
    for (n, end) in pair.ends.iter_mut().enumerate() {
        let qp = end.qp(QpType::Rc, |config| config)?;
        end.context.modify_qp(qp, Transition::Init { access: Access::NONE })?;
        let address = AddressVector::new(gids[1 - n], end.sgid_index()).mac(MacAddr([2, 0, 0, 0, 0, 9]));
        let receive = ReadyToReceive::new(address, Qpn::new(0x123), Psn::new(0));
        end.context.modify_qp(qp, Transition::ReadyToReceive(receive))?;
        same!(end.context.query_qp(qp)?.state, QpState::Rtr);
    }
    Ok(())
}
