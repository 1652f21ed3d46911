//! The Unreliable Datagram service.

use std::net::Ipv4Addr;

use ferroce::*;

use super::{Entry, Outcome, Pair, refused, same};

pub(super) const CASES: &[Entry] = &[
    ("UD: a datagram, its header, and one back", datagram),
    ("UD: immediate", immediate),
    ("UD: a wrong Q_Key", wrong_qkey),
    ("UD: a receive that is too short", too_short),
    ("UD: operations that it does not have", wrong_operations),
    ("UD: SRQ", srq),
    ("UD: multicast", multicast),
    ("address handles in use, destroyed, wrong", handles),
];

const QKEY: u32 = 0x1111_1111;

pub(super) fn ready(pair: &mut Pair) -> Result<[Qp; 2], Box<dyn std::error::Error>> {
    let [a, b] = &mut pair.ends;
    let qps = [a.qp(QpType::Ud, |config| config)?, b.qp(QpType::Ud, |config| config)?];
    for (end, qp) in pair.ends.iter_mut().zip(qps) {
        make_ready(&mut end.context, qp)?;
    }
    Ok(qps)
}

fn make_ready(context: &mut Context, qp: Qp) -> Result<(), Error> {
    context.modify_qp(qp, Transition::InitDatagram { qkey: QKEY })?;
    context.modify_qp(qp, Transition::ReadyToReceiveDatagrams)?;
    context.modify_qp(qp, Transition::ReadyToSendUnreliable { sq_psn: Psn::new(5) })
}

/// The destination for the queue pair at the second end, from the first.
pub(super) fn destination(pair: &mut Pair, qp: Qp) -> Result<Destination, Box<dyn std::error::Error>> {
    let there = pair.ends[1].gid();
    let end = &mut pair.ends[0];
    let address = AddressVector::new(there, end.sgid_index());
    let ah = end.ah(&address)?;
    Ok(Destination { ah, qpn: pair.ends[1].context.query_qp(qp)?.qpn, qkey: QKEY })
}

pub(super) fn datagram(pair: &mut Pair) -> Outcome {
    let qps = ready(pair)?;
    let to = destination(pair, qps[1])?;
    let from = pair.ends[0].region(100, &[])?;
    let there = pair.ends[1].zeros(200, &[Access::LOCAL_WRITE])?;
    pair.ends[1].receive(qps[1], 1, &[there.sge(0..200)])?;
    pair.ends[0].send(qps[0], 2, SendOp::SendTo(to), &[from.sge(0..100)])?;
    pair.completes(0, 2, WcStatus::Success)?;
    let told = pair.completes(1, 1, WcStatus::Success)?;
    let sender = pair.ends[0].context.query_qp(qps[0])?.qpn;
    same!((told.byte_len, told.grh, told.src_qpn, told.immediate), (140, true, sender, None));
    same!(pair.ends[1].bytes(there, 40..140)?, pair.ends[0].bytes(from, 0..100)?);
    // The header contains the path back.
    let mut header = [0; 40];
    pair.ends[1].context.read(there, 0, &mut header)?;
    let back = pair.ends[1].context.address_from_wc(&told, &header)?;
    same!((back.gid, back.sgid_index), (pair.ends[0].gid(), pair.ends[1].sgid_index()));
    let ah = pair.ends[1].ah(&back)?;
    let here = pair.ends[0].zeros(64, &[Access::LOCAL_WRITE])?;
    pair.ends[0].receive(qps[0], 3, &[here.sge(0..64)])?;
    let to = Destination { ah, qpn: told.src_qpn, qkey: QKEY };
    pair.ends[1].send(qps[1], 4, SendOp::SendTo(to), &[there.sge(40..48)])?;
    pair.completes(1, 4, WcStatus::Success)?;
    same!(pair.completes(0, 3, WcStatus::Success)?.byte_len, 48);
    same!(pair.ends[0].bytes(here, 40..48)?, vec![1, 2, 3, 4, 5, 6, 7, 8]);
    Ok(())
}

fn immediate(pair: &mut Pair) -> Outcome {
    let qps = ready(pair)?;
    let to = destination(pair, qps[1])?;
    let there = pair.ends[1].zeros(40, &[Access::LOCAL_WRITE])?;
    pair.ends[1].receive(qps[1], 1, &[there.sge(0..40)])?;
    pair.ends[0].send(qps[0], 2, SendOp::SendToWithImm(to, 77), &[])?;
    pair.completes(0, 2, WcStatus::Success)?;
    same!(pair.completes(1, 1, WcStatus::Success)?.immediate, Some(77));
    Ok(())
}

fn wrong_qkey(pair: &mut Pair) -> Outcome {
    let qps = ready(pair)?;
    let to = destination(pair, qps[1])?;
    let there = pair.ends[1].zeros(40, &[Access::LOCAL_WRITE])?;
    pair.ends[1].receive(qps[1], 1, &[there.sge(0..40)])?;
    pair.ends[0].send(qps[0], 2, SendOp::SendTo(Destination { qkey: 0x2222, ..to }), &[])?;
    pair.completes(0, 2, WcStatus::Success)?;
    pair.silence()?;
    pair.ends[0].send(qps[0], 3, SendOp::SendTo(to), &[])?;
    pair.completes(0, 3, WcStatus::Success)?;
    pair.completes(1, 1, WcStatus::Success)?;
    Ok(())
}

fn too_short(pair: &mut Pair) -> Outcome {
    let qps = ready(pair)?;
    let to = destination(pair, qps[1])?;
    let from = pair.ends[0].region(9, &[])?;
    let there = pair.ends[1].zeros(64, &[Access::LOCAL_WRITE])?;
    pair.ends[1].receive(qps[1], 1, &[there.sge(0..48)])?;
    pair.ends[0].send(qps[0], 2, SendOp::SendTo(to), &[from.sge(0..9)])?;
    pair.completes(0, 2, WcStatus::Success)?;
    pair.silence()?;
    // The receive is still available for one that fits.
    pair.ends[0].send(qps[0], 3, SendOp::SendTo(to), &[from.sge(0..8)])?;
    pair.completes(0, 3, WcStatus::Success)?;
    same!(pair.completes(1, 1, WcStatus::Success)?.byte_len, 48);
    Ok(())
}

fn wrong_operations(pair: &mut Pair) -> Outcome {
    let qps = ready(pair)?;
    let remote = RemoteAddress { addr: 0, rkey: RKey::new(1) };
    for op in [SendOp::Send, SendOp::Write(remote), SendOp::Read(remote)] {
        refused!(pair.ends[0].send(qps[0], 1, op, &[]), Error::Invalid { .. });
    }
    let connected = pair.connected(QpType::Uc, |config| config)?;
    for op in [SendOp::Read(remote), SendOp::FetchAdd { remote, add: 1 }] {
        refused!(pair.ends[0].send(connected[0], 1, op, &[]), Error::Invalid { .. });
    }
    Ok(())
}

fn srq(pair: &mut Pair) -> Outcome {
    let srq = pair.ends[1].srq()?;
    let qps = [
        pair.ends[0].qp(QpType::Ud, |config| config)?,
        pair.ends[1].qp(QpType::Ud, |config| config.srq(srq))?,
    ];
    for (end, qp) in pair.ends.iter_mut().zip(qps) {
        make_ready(&mut end.context, qp)?;
    }
    let to = destination(pair, qps[1])?;
    let there = pair.ends[1].zeros(64, &[Access::LOCAL_WRITE])?;
    let sges = [there.sge(0..64)];
    pair.ends[1].context.post_srq_recv(srq, &ReceiveWorkRequest { wr_id: 1, sges: &sges })?;
    pair.ends[0].send(qps[0], 2, SendOp::SendTo(to), &[])?;
    pair.completes(0, 2, WcStatus::Success)?;
    let told = pair.completes(1, 1, WcStatus::Success)?;
    same!((told.byte_len, told.qp), (40, qps[1]));
    Ok(())
}

fn multicast(pair: &mut Pair) -> Outcome {
    let qps = ready(pair)?;
    let group = Gid::from_ipv4(Ipv4Addr::new(239, 77, 1, 2));
    pair.ends[1].context.attach_mcast(qps[1], group)?;
    let end = &mut pair.ends[0];
    let address = AddressVector::new(group, end.sgid_index());
    let ah = end.ah(&address)?;
    let there = pair.ends[1].zeros(64, &[Access::LOCAL_WRITE])?;
    pair.ends[1].receive(qps[1], 1, &[there.sge(0..64)])?;
    let to = Destination { ah, qpn: Qpn::MULTICAST, qkey: QKEY };
    pair.ends[0].send(qps[0], 2, SendOp::SendTo(to), &[])?;
    pair.completes(0, 2, WcStatus::Success)?;
    pair.completes(1, 1, WcStatus::Success)?;
    refused!(pair.ends[1].context.destroy_qp(qps[1]), Error::Busy { .. });
    pair.ends[1].context.detach_mcast(qps[1], group)?;
    refused!(pair.ends[1].context.detach_mcast(qps[1], group), Error::Invalid { .. });
    Ok(())
}

fn handles(pair: &mut Pair) -> Outcome {
    let there = pair.ends[1].gid();
    let end = &mut pair.ends[0];
    let address = AddressVector::new(there, end.sgid_index());
    let pd = end.context.alloc_pd()?;
    let ah = end.context.create_ah(pd, &address)?;
    refused!(end.context.dealloc_pd(pd), Error::Busy { .. });
    end.context.destroy_ah(ah)?;
    refused!(end.context.destroy_ah(ah), Error::InvalidHandle { .. });
    end.context.dealloc_pd(pd)?;
    let wrong = AddressVector::new(there, 200);
    refused!(end.context.create_ah(end.pd, &wrong), Error::Invalid { .. });
    Ok(())
}
