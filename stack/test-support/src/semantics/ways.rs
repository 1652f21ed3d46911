//! Paths to a peer: addresses of both IP versions and in a VLAN, path MTUs, and the tables of the port.

use std::net::Ipv4Addr;

use ferroce::*;

use super::{Entry, Outcome, Pair, VLAN, datagrams, refused, same};

pub(super) const CASES: &[Entry] = &[
    ("IPv6: RC", |pair| pair.over_ipv6(|pair| connected_by_ipv6(pair, QpType::Rc))),
    ("IPv6: UC", |pair| pair.over_ipv6(|pair| connected_by_ipv6(pair, QpType::Uc))),
    ("IPv6: UD, its header, and one back", |pair| pair.over_ipv6(datagrams::datagram)),
    ("VLAN: its row of the GID table", |pair| pair.over_vlan(row_of_vlan)),
    ("VLAN: RC", |pair| pair.over_vlan(|pair| connected(pair, QpType::Rc))),
    ("VLAN: UC", |pair| pair.over_vlan(|pair| connected(pair, QpType::Uc))),
    ("VLAN: UD, its header, and one back", |pair| pair.over_vlan(datagrams::datagram)),
    ("every path MTU, and one that is too large", path_mtus),
    ("UD: the longest datagram", longest),
    ("UD: a datagram that is longer than the path MTU", too_long),
    ("the P_Key of a queue pair", pkey),
    ("rows that the application adds to the port's tables", own_rows),
];

const MTUS: [PathMtu; 5] =
    [PathMtu::Mtu256, PathMtu::Mtu512, PathMtu::Mtu1024, PathMtu::Mtu2048, PathMtu::Mtu4096];

fn connected_by_ipv6(pair: &mut Pair, qp_type: QpType) -> Outcome {
    same!(pair.ends[1].gid().is_ipv6(), true);
    connected(pair, qp_type)
}

fn connected(pair: &mut Pair, qp_type: QpType) -> Outcome {
    let qps = pair.connected(qp_type, |config| config)?;
    let way = pair.ends[0].context.query_qp(qps[0])?.address.map(|way| (way.gid, way.sgid_index));
    same!(way, Some((pair.ends[1].gid(), pair.ends[0].sgid_index())));
    exchange(pair, qps, 9000)
}

/// A GID table entry has the VLAN of the interface with the address; an endpoint has the address.
fn row_of_vlan(pair: &mut Pair) -> Outcome {
    for end in &mut pair.ends {
        let index = end.sgid_index();
        let rows = &end.context.port().gids;
        same!((rows[index].vlan, rows[index].roce_v1), (Some(VLAN), false));
        same!(rows.iter().any(|row| row.vlan.is_none()), true);
        let gid = end.gid();
        let qp = end.qp(QpType::Rc, |config| config)?;
        same!(end.context.endpoint(qp, index)?.gid, gid);
        // A path from an entry that does not exist.
        let beyond = end.context.port().gids.len();
        refused!(end.context.create_ah(end.pd, &AddressVector::new(gid, beyond)), Error::Invalid { .. });
    }
    Ok(())
}

/// A WRITE with immediate of this many bytes.
fn exchange(pair: &mut Pair, qps: [Qp; 2], len: u64) -> Outcome {
    let to = pair.ends[1].zeros(len as usize, &super::pair::ALL)?;
    let from = pair.ends[0].region(len as usize, &[])?;
    let remote = pair.ends[1].context.remote(to)?.at(0);
    pair.ends[1].receive(qps[1], 1, &[])?;
    pair.ends[0].send(qps[0], 2, SendOp::WriteWithImm(remote, 7), &[from.sge(0..len)])?;
    pair.completes(0, 2, WcStatus::Success)?;
    let told = pair.completes(1, 1, WcStatus::Success)?;
    same!((u64::from(told.byte_len), told.immediate), (len, Some(7)));
    same!(pair.ends[1].bytes(to, 0..len)? == pair.ends[0].bytes(from, 0..len)?, true);
    Ok(())
}

/// The largest that both ports support.
fn largest(pair: &Pair) -> Result<PathMtu, Box<dyn std::error::Error>> {
    let largest = |end: &super::End| end.context.port().path_mtu(end.gid().is_ipv6());
    Ok(largest(&pair.ends[0])
        .min(largest(&pair.ends[1]))
        .ok_or("a port has no room for the least path MTU")?)
}

fn path_mtus(pair: &mut Pair) -> Outcome {
    let most = largest(pair)?;
    for mtu in MTUS.into_iter().filter(|mtu| *mtu <= most) {
        let [a, b] = &mut pair.ends;
        let qps = [a.qp(QpType::Rc, |config| config)?, b.qp(QpType::Rc, |config| config)?];
        let here = a.context.endpoint(qps[0], a.sgid_index())?.path_mtu(mtu);
        let there = b.context.endpoint(qps[1], b.sgid_index())?;
        a.context.handshake(qps[0], &here, &there)?;
        b.context.handshake(qps[1], &there, &here)?;
        for (end, qp) in pair.ends.iter().zip(qps) {
            same!(end.context.query_qp(qp)?.path_mtu, Some(mtu));
        }
        // Less than a packet, one, and three with a byte of a fourth.
        let bytes = u64::from(mtu.bytes());
        for len in [bytes - 1, bytes, 3 * bytes + 1] {
            exchange(pair, qps, len)?;
        }
    }
    for number in 0..2 {
        let there = pair.ends[1 - number].gid();
        let end = &mut pair.ends[number];
        let own = end.context.port().path_mtu(there.is_ipv6());
        let Some(larger) = MTUS.into_iter().find(|mtu| Some(*mtu) > own) else { continue };
        let qp = end.qp(QpType::Rc, |config| config)?;
        end.context.modify_qp(qp, Transition::Init { access: Access::NONE })?;
        let receive =
            ReadyToReceive::new(AddressVector::new(there, end.sgid_index()), Qpn::new(0x123), Psn::new(1));
        let receive = Transition::ReadyToReceive(receive.path_mtu(larger));
        refused!(end.context.modify_qp(qp, receive), Error::PathMtu { .. });
    }
    Ok(())
}

fn longest(pair: &mut Pair) -> Outcome {
    let qps = datagrams::ready(pair)?;
    let to = datagrams::destination(pair, qps[1])?;
    let most = u64::from(largest(pair)?.bytes());
    let there = pair.ends[1].zeros(40 + most as usize, &[Access::LOCAL_WRITE])?;
    let from = pair.ends[0].region(most as usize, &[])?;
    pair.ends[1].receive(qps[1], 1, &[there.sge(0..40 + most)])?;
    pair.ends[0].send(qps[0], 2, SendOp::SendTo(to), &[from.sge(0..most)])?;
    pair.completes(0, 2, WcStatus::Success)?;
    same!(u64::from(pair.completes(1, 1, WcStatus::Success)?.byte_len), 40 + most);
    same!(pair.ends[1].bytes(there, 40..40 + most)? == pair.ends[0].bytes(from, 0..most)?, true);
    Ok(())
}

fn too_long(pair: &mut Pair) -> Outcome {
    let qps = datagrams::ready(pair)?;
    let to = datagrams::destination(pair, qps[1])?;
    let end = &mut pair.ends[0];
    let own = end.context.port().path_mtu(end.gid().is_ipv6()).ok_or("no path MTU")?;
    let len = u64::from(own.bytes()) + 1;
    let there = pair.ends[1].zeros(40 + len as usize, &[Access::LOCAL_WRITE])?;
    let from = pair.ends[0].region(len as usize, &[])?;
    pair.ends[1].receive(qps[1], 1, &[there.sge(0..40 + len)])?;
    // It is dropped, as in the network.
    pair.ends[0].send(qps[0], 2, SendOp::SendTo(to), &[from.sge(0..len)])?;
    pair.completes(0, 2, WcStatus::Success)?;
    pair.silence()
}

fn pkey(pair: &mut Pair) -> Outcome {
    for end in &mut pair.ends {
        same!(end.context.port().pkeys.iter().next().is_some(), true);
        let qp = end.qp(QpType::Rc, |config| config)?;
        end.context.modify_qp(qp, Transition::Init { access: Access::NONE })?;
        same!(end.context.query_qp(qp)?.pkey_index, 0);
        let update = |index| Transition::Update(QpUpdate::default().pkey_index(index));
        end.context.modify_qp(qp, update(0))?;
        same!(end.context.query_qp(qp)?.pkey_index, 0);
        refused!(end.context.modify_qp(qp, update(PkeyTable::MAX)), Error::Invalid { .. });
        same!(end.context.query_qp(qp)?.state, QpState::Init);
    }
    Ok(())
}

fn own_rows(pair: &mut Pair) -> Outcome {
    for end in &mut pair.ends {
        let gid = Gid::from_ipv4(Ipv4Addr::new(10, 200, 0, 1));
        let index = end.context.add_gid(GidEntry::new(gid).vlan(5))?;
        same!((end.context.port().gids[index].gid, end.context.port().gids[index].vlan), (gid, Some(5)));
        let index = end.context.add_pkey(PKey(0x8123))?;
        same!(end.context.port().pkeys.iter().any(|(_, pkey)| pkey == PKey(0x8123)), true);
        end.context.remove_pkey(index)?;
    }
    Ok(())
}
