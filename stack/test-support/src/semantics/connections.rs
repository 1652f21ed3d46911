//! The connection manager: ferroce's own, or the kernel's.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use ferroce::wire::cm::RejectReason;
use ferroce::*;

use super::{Entry, Outcome, Pair, refused, same};

pub(super) const CASES: &[Entry] = &[
    ("CM: connected, with private data both ways, and ended", connected),
    ("CM: ended by the end that accepted", ended_by_acceptor),
    ("CM: READs and atomics that both ends agree on", resources),
    ("CM: a request that is rejected", rejected),
    ("CM: a port where nobody listens", nobody_listens),
    ("CM: an address that nobody has", nobody_there),
    ("CM: an attempt that is ended before its answer", given_up),
    ("CM: an attempt that nobody answers in its time", unanswered),
    ("CM: a queue pair that is destroyed while it is connected", destroyed),
    ("CM: queue pairs that can't be connected", unconnectable),
    ("CM: parameters that can't be", parameters),
    ("CM: listeners", listeners),
    ("CM: a listener without room", no_room),
    ("CM: a listener that ends while a request waits", unlistened),
    ("CM: channels of events", channels),
    ("CM: a datagram service", service),
    ("CM: a search for a datagram service that is rejected", service_rejected),
    ("CM: UC", unreliable),
];

/// Unique among all cases, so that no case is affected by another.
fn port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(21_000);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

fn address(pair: &Pair, port: u16) -> SocketAddr {
    SocketAddr::new(pair.ends[1].gid().to_ip().to_canonical(), port)
}

fn listen(pair: &mut Pair, space: PortSpace) -> Result<(Listener, SocketAddr), Box<dyn std::error::Error>> {
    let to = address(pair, port());
    Ok((pair.ends[1].context.listen(space, to, &ListenConfig::default())?, to))
}

fn event(pair: &mut Pair, end: usize) -> Result<CmEvent, Box<dyn std::error::Error>> {
    let what = format!("event of the connection manager at end {end}");
    // The end of an earlier case's timewait.
    pair.until(&what, |pair| {
        let event = pair.ends[end].context.next_cm_event();
        Ok(event.filter(|event| !matches!(event, CmEvent::TimewaitExit { .. })))
    })
}

fn request(pair: &mut Pair) -> Result<ConnectionRequest, Box<dyn std::error::Error>> {
    match event(pair, 1)? {
        CmEvent::ConnectionRequest(request) => Ok(request),
        other => Err(format!("{other:?} where a request was expected").into()),
    }
}

/// A queue pair in INIT.
fn initialized(pair: &mut Pair, end: usize, qp_type: QpType) -> Result<Qp, Box<dyn std::error::Error>> {
    let qp = pair.ends[end].qp(qp_type, |config| config)?;
    let transition = match qp_type {
        QpType::Ud => Transition::InitDatagram { qkey: QKEY },
        _ => Transition::Init { access: Access::REMOTE_WRITE },
    };
    pair.ends[end].context.modify_qp(qp, transition)?;
    Ok(qp)
}

/// The Q_Key of rdma_cm's datagram services.
const QKEY: u32 = 0x0123_4567;

/// Both ends of a connection: queue pairs and ids.
fn connection(pair: &mut Pair) -> Result<([Qp; 2], [CmId; 2]), Box<dyn std::error::Error>> {
    let (listener, to) = listen(pair, PortSpace::Tcp)?;
    let qps = [initialized(pair, 0, QpType::Rc)?, initialized(pair, 1, QpType::Rc)?];
    let asked = ConnectionParameters::default().private_data(b"question");
    let id = pair.ends[0].context.connect(qps[0], to, &asked)?;
    let request = request(pair)?;
    same!((request.listener, request.qp_type, request.local), (listener, QpType::Rc, to));
    same!(request.peer.ip(), pair.ends[0].gid().to_ip().to_canonical());
    same!((&request.private_data[..8], request.private_data.len()), (&b"question"[..], 56));
    same!(request.path_mtu, pair.ends[1].context.port().path_mtu(false).ok_or("a path MTU")?);
    let answer = ConnectionParameters::default().private_data(b"answer");
    pair.ends[1].context.accept(request.id, qps[1], &answer)?;
    match event(pair, 0)? {
        CmEvent::Established { id: own, private_data } => {
            same!((own, &private_data[..6], private_data.len()), (id, &b"answer"[..], 196));
        }
        other => return Err(format!("{other:?} where the connection was expected").into()),
    }
    match event(pair, 1)? {
        CmEvent::Established { id, private_data } => same!((id, private_data.len()), (request.id, 0)),
        other => return Err(format!("{other:?} where the connection was expected").into()),
    }
    for (end, qp) in pair.ends.iter().zip(qps) {
        same!(end.context.query_qp(qp)?.state, QpState::Rts);
    }
    let attributes = pair.ends[0].context.query_qp(qps[0])?;
    same!(attributes.dest_qpn, Some(pair.ends[1].context.query_qp(qps[1])?.qpn));
    same!(attributes.address.map(|address| address.gid), Some(pair.ends[1].gid()));
    pair.ends[1].context.unlisten(listener)?;
    Ok((qps, [id, request.id]))
}

/// Both ends are notified of the end, and their queue pairs are in ERR.
fn ends(pair: &mut Pair, qps: [Qp; 2], ids: [CmId; 2]) -> Outcome {
    for (end, id) in ids.into_iter().enumerate() {
        same!(event(pair, end)?, CmEvent::Disconnected { id });
        same!(pair.ends[end].context.query_qp(qps[end])?.state, QpState::Error);
    }
    Ok(())
}

/// Ends a connection, and waits until both ends were notified.
fn end(pair: &mut Pair, ids: [CmId; 2]) -> Outcome {
    pair.ends[0].context.disconnect(ids[0])?;
    for (end, id) in ids.into_iter().enumerate() {
        same!(event(pair, end)?, CmEvent::Disconnected { id });
    }
    Ok(())
}

/// A rejection of that exchange with this reason.
fn is_rejected(pair: &mut Pair, end: usize, id: CmId, expected: RejectReason) -> Outcome {
    match event(pair, end)? {
        CmEvent::Rejected { id: own, reason, .. } => same!((own, reason), (id, expected)),
        other => return Err(format!("{other:?} where a rejection was expected").into()),
    }
    Ok(())
}

fn connected(pair: &mut Pair) -> Outcome {
    let (qps, ids) = connection(pair)?;
    for (from, to) in [(0, 1), (1, 0)] {
        let sges = [pair.ends[to].zeros(8, &[Access::LOCAL_WRITE])?.sge(0..8)];
        pair.ends[to].receive(qps[to], 1, &sges)?;
        let sges = [pair.ends[from].region(8, &[])?.sge(0..8)];
        pair.ends[from].send(qps[from], 2, SendOp::Send, &sges)?;
        pair.completes(from, 2, WcStatus::Success)?;
        pair.completes(to, 1, WcStatus::Success)?;
    }
    pair.ends[0].receive(qps[0], 3, &[])?;
    pair.ends[0].context.disconnect(ids[0])?;
    ends(pair, qps, ids)?;
    pair.completes(0, 3, WcStatus::WrFlushErr)?;
    // Ending an ending connection is no error; ending a nonexistent one is.
    pair.ends[0].context.disconnect(ids[0])?;
    Ok(())
}

fn ended_by_acceptor(pair: &mut Pair) -> Outcome {
    let (qps, ids) = connection(pair)?;
    pair.ends[1].context.disconnect(ids[1])?;
    ends(pair, qps, ids)
}

fn resources(pair: &mut Pair) -> Outcome {
    let (listener, to) = listen(pair, PortSpace::Tcp)?;
    let qps = [initialized(pair, 0, QpType::Rc)?, initialized(pair, 1, QpType::Rc)?];
    let asked = ConnectionParameters::default().responder_resources(5).initiator_depth(3).retry_count(4);
    let id = pair.ends[0].context.connect(qps[0], to, &asked)?;
    let request = request(pair)?;
    same!((request.responder_resources, request.initiator_depth), (5, 3));
    let offered = ConnectionParameters::default().responder_resources(2).initiator_depth(7);
    pair.ends[1].context.accept(request.id, qps[1], &offered)?;
    (0..2).try_for_each(|end| event(pair, end).map(drop))?;
    let agreed = |pair: &Pair, end: usize| {
        let attributes = pair.ends[end].context.query_qp(qps[end])?;
        let sends = attributes.send.map(|send| (send.max_rd_atomic, send.retry_count));
        Ok::<_, Error>((attributes.max_dest_rd_atomic, sends))
    };
    same!(agreed(pair, 0)?, (5, Some((2, 4))));
    same!(agreed(pair, 1)?, (2, Some((5, 4))));
    end(pair, [id, request.id])?;
    Ok(pair.ends[1].context.unlisten(listener)?)
}

fn rejected(pair: &mut Pair) -> Outcome {
    let (listener, to) = listen(pair, PortSpace::Tcp)?;
    let qp = initialized(pair, 0, QpType::Rc)?;
    for _ in 0..2 {
        let id = pair.ends[0].context.connect(qp, to, &ConnectionParameters::default())?;
        let request = request(pair)?;
        refused!(pair.ends[1].context.reject(request.id, &[0; 149]), Error::Invalid { .. });
        pair.ends[1].context.reject(request.id, b"no")?;
        refused!(pair.ends[1].context.reject(request.id, b"no"), Error::InvalidHandle { .. });
        match event(pair, 0)? {
            CmEvent::Rejected { id: own, reason, private_data } => {
                same!((own, reason, &private_data[..2]), (id, RejectReason::CONSUMER, &b"no"[..]));
            }
            other => return Err(format!("{other:?} where a rejection was expected").into()),
        }
        // The queue pair is unchanged.
        same!(pair.ends[0].context.query_qp(qp)?.state, QpState::Init);
        refused!(pair.ends[0].context.disconnect(id), Error::InvalidHandle { .. });
    }
    Ok(pair.ends[1].context.unlisten(listener)?)
}

fn nobody_listens(pair: &mut Pair) -> Outcome {
    let to = address(pair, port());
    let qp = initialized(pair, 0, QpType::Rc)?;
    let id = pair.ends[0].context.connect(qp, to, &ConnectionParameters::default())?;
    is_rejected(pair, 0, id, RejectReason::INVALID_SERVICE_ID)?;
    same!(pair.ends[0].context.query_qp(qp)?.state, QpState::Init);
    Ok(())
}

fn nobody_there(pair: &mut Pair) -> Outcome {
    let SocketAddr::V4(to) = address(pair, 1) else { return Ok(()) };
    let [a, b, c, _] = to.ip().octets();
    let nobody = SocketAddr::new([a, b, c, 251].into(), 1);
    let qp = initialized(pair, 0, QpType::Rc)?;
    let brief = ConnectionParameters::default().cm_timeout_at_least(Duration::from_millis(500)).cm_retries(7);
    match pair.ends[0].context.connect(qp, nobody, &brief) {
        Ok(id) => match event(pair, 0)? {
            CmEvent::Unreachable { id: own, reason } => same!((own, reason.peer()), (id, nobody.ip())),
            other => return Err(format!("{other:?} where nobody was expected").into()),
        },
        // On backends that know it immediately.
        Err(Error::Driver(_)) => {}
        Err(error) => return Err(error.into()),
    }
    same!(pair.ends[0].context.query_qp(qp)?.state, QpState::Init);
    Ok(())
}

fn given_up(pair: &mut Pair) -> Outcome {
    let (listener, to) = listen(pair, PortSpace::Tcp)?;
    let qp = initialized(pair, 0, QpType::Rc)?;
    let id = pair.ends[0].context.connect(qp, to, &ConnectionParameters::default())?;
    let first = request(pair)?;
    pair.ends[0].context.disconnect(id)?;
    refused!(pair.ends[0].context.disconnect(id), Error::InvalidHandle { .. });
    is_rejected(pair, 1, first.id, RejectReason::TIMEOUT)?;
    same!(pair.ends[0].context.next_cm_event(), None);
    same!(pair.ends[0].context.query_qp(qp)?.state, QpState::Init);
    // It can be connected again.
    let id = pair.ends[0].context.connect(qp, to, &ConnectionParameters::default())?;
    let second = request(pair)?;
    pair.ends[1].context.reject(second.id, &[])?;
    is_rejected(pair, 0, id, RejectReason::CONSUMER)?;
    Ok(pair.ends[1].context.unlisten(listener)?)
}

fn unanswered(pair: &mut Pair) -> Outcome {
    let (listener, to) = listen(pair, PortSpace::Tcp)?;
    let qp = initialized(pair, 0, QpType::Rc)?;
    let brief = ConnectionParameters::default().cm_timeout_at_least(Duration::from_millis(200)).cm_retries(1);
    let id = pair.ends[0].context.connect(qp, to, &brief)?;
    let unanswered = request(pair)?;
    match event(pair, 0)? {
        CmEvent::Unreachable { id: own, reason: Unreachable::Silent { peer } } => {
            same!((own, peer), (id, to.ip()));
        }
        other => return Err(format!("{other:?} where no answer was expected").into()),
    }
    is_rejected(pair, 1, unanswered.id, RejectReason::TIMEOUT)?;
    Ok(pair.ends[1].context.unlisten(listener)?)
}

fn destroyed(pair: &mut Pair) -> Outcome {
    let (qps, ids) = connection(pair)?;
    pair.ends[0].release_qp(qps[0]);
    pair.ends[0].context.destroy_qp(qps[0])?;
    same!(event(pair, 1)?, CmEvent::Disconnected { id: ids[1] });
    same!(pair.ends[1].context.query_qp(qps[1])?.state, QpState::Error);
    same!(event(pair, 0)?, CmEvent::Disconnected { id: ids[0] });
    Ok(())
}

fn unconnectable(pair: &mut Pair) -> Outcome {
    let (listener, to) = listen(pair, PortSpace::Tcp)?;
    let parameters = ConnectionParameters::default();
    let reset = pair.ends[0].qp(QpType::Rc, |config| config)?;
    refused!(pair.ends[0].context.connect(reset, to, &parameters), Error::State { .. });
    let datagrams = initialized(pair, 0, QpType::Ud)?;
    refused!(pair.ends[0].context.connect(datagrams, to, &parameters), Error::Invalid { .. });
    let qp = initialized(pair, 0, QpType::Rc)?;
    let id = pair.ends[0].context.connect(qp, to, &parameters)?;
    refused!(pair.ends[0].context.connect(qp, to, &parameters), Error::Busy { .. });
    let request = request(pair)?;
    let reset = pair.ends[1].qp(QpType::Rc, |config| config)?;
    refused!(pair.ends[1].context.accept(request.id, reset, &parameters), Error::State { .. });
    refused!(pair.ends[1].context.accept_datagrams(request.id, reset, &[]), Error::Invalid { .. });
    // It can still be accepted.
    let there = initialized(pair, 1, QpType::Rc)?;
    pair.ends[1].context.accept(request.id, there, &parameters)?;
    refused!(pair.ends[1].context.accept(request.id, there, &parameters), Error::Invalid { .. });
    (0..2).try_for_each(|end| event(pair, end).map(drop))?;
    end(pair, [id, request.id])?;
    Ok(pair.ends[1].context.unlisten(listener)?)
}

fn parameters(pair: &mut Pair) -> Outcome {
    let to = address(pair, port());
    let qp = initialized(pair, 0, QpType::Rc)?;
    let good = ConnectionParameters::default();
    for bad in [good.private_data(&[0; 57]), good.retry_count(8), good.timeout(0), good.cm_retries(16)] {
        refused!(pair.ends[0].context.connect(qp, to, &bad), Error::Invalid { .. });
    }
    refused!(pair.ends[0].context.resolve(to, &good.private_data(&[0; 181])), Error::Invalid { .. });
    for nobody in ["0.0.0.0:1", "239.0.0.1:1"] {
        refused!(pair.ends[0].context.connect(qp, nobody.parse()?, &good), Error::Invalid { .. });
    }
    same!(pair.ends[0].context.query_qp(qp)?.state, QpState::Init);
    Ok(())
}

fn listeners(pair: &mut Pair) -> Outcome {
    let (listener, to) = listen(pair, PortSpace::Tcp)?;
    let config = ListenConfig::default();
    let context = &mut pair.ends[1].context;
    refused!(context.listen(PortSpace::Tcp, to, &config), Error::Invalid { .. });
    refused!(context.listen(PortSpace::Tcp, "203.0.113.1:7".parse()?, &config), Error::Invalid { .. });
    refused!(context.listen(PortSpace::Tcp, to, &config.pkey_index(77)), Error::Invalid { .. });
    // Another port space has its own ports.
    let other = context.listen(PortSpace::Udp, to, &config)?;
    context.unlisten(other)?;
    context.unlisten(listener)?;
    refused!(context.unlisten(listener), Error::InvalidHandle { .. });
    // On all addresses.
    let all = context.listen(PortSpace::Tcp, SocketAddr::new([0, 0, 0, 0].into(), to.port()), &config)?;
    let qp = initialized(pair, 0, QpType::Rc)?;
    pair.ends[0].context.connect(qp, to, &ConnectionParameters::default())?;
    let request = request(pair)?;
    same!((request.listener, request.local), (all, to));
    pair.ends[1].context.reject(request.id, &[])?;
    event(pair, 0)?;
    Ok(pair.ends[1].context.unlisten(all)?)
}

fn no_room(pair: &mut Pair) -> Outcome {
    let to = address(pair, port());
    let config = ListenConfig::default().backlog(1);
    let listener = pair.ends[1].context.listen(PortSpace::Tcp, to, &config)?;
    let qps = [initialized(pair, 0, QpType::Rc)?, initialized(pair, 0, QpType::Rc)?];
    pair.ends[0].context.connect(qps[0], to, &ConnectionParameters::default())?;
    request(pair)?;
    let second = pair.ends[0].context.connect(qps[1], to, &ConnectionParameters::default())?;
    match event(pair, 0)? {
        CmEvent::Rejected { id, .. } => same!(id, second),
        other => return Err(format!("{other:?} where a rejection was expected").into()),
    }
    same!(pair.ends[1].context.next_cm_event(), None);
    pair.ends[1].context.unlisten(listener)?;
    event(pair, 0).map(drop)
}

fn unlistened(pair: &mut Pair) -> Outcome {
    let (listener, to) = listen(pair, PortSpace::Tcp)?;
    let qp = initialized(pair, 0, QpType::Rc)?;
    let id = pair.ends[0].context.connect(qp, to, &ConnectionParameters::default())?;
    let request = request(pair)?;
    pair.ends[1].context.unlisten(listener)?;
    match event(pair, 0)? {
        CmEvent::Rejected { id: own, .. } => same!(own, id),
        other => return Err(format!("{other:?} where a rejection was expected").into()),
    }
    refused!(pair.ends[1].context.reject(request.id, &[]), Error::InvalidHandle { .. });
    Ok(())
}

fn channels(pair: &mut Pair) -> Outcome {
    let to = address(pair, port());
    let channel = pair.ends[1].context.create_cm_channel()?;
    let config = ListenConfig::default().channel(channel);
    let listener = pair.ends[1].context.listen(PortSpace::Tcp, to, &config)?;
    let own = pair.ends[0].context.create_cm_channel()?;
    let qp = initialized(pair, 0, QpType::Rc)?;
    let parameters = ConnectionParameters::default().channel(own);
    let id = pair.ends[0].context.connect(qp, to, &parameters)?;
    let event = pair.until("event of the channel", |pair| pair.ends[1].context.next_cm_event_of(channel))?;
    let CmEvent::ConnectionRequest(request) = event else {
        return Err(format!("{event:?} where a request was expected").into());
    };
    refused!(pair.ends[1].context.destroy_cm_channel(channel), Error::Busy { .. });
    pair.ends[1].context.reject(request.id, &[])?;
    let event = pair.until("event of the channel", |pair| pair.ends[0].context.next_cm_event_of(own))?;
    same!(event.id(), id);
    for end in &mut pair.ends {
        same!(end.context.next_cm_event(), None);
    }
    pair.ends[1].context.unlisten(listener)?;
    pair.ends[1].context.destroy_cm_channel(channel)?;
    pair.ends[0].context.destroy_cm_channel(own)?;
    refused!(pair.ends[0].context.next_cm_event_of(own), Error::InvalidHandle { .. });
    Ok(())
}

fn service(pair: &mut Pair) -> Outcome {
    let (listener, to) = listen(pair, PortSpace::Udp)?;
    let asked = ConnectionParameters::default().private_data(b"where");
    let id = pair.ends[0].context.resolve(to, &asked)?;
    let request = request(pair)?;
    same!((request.listener, request.qp_type), (listener, QpType::Ud));
    same!((&request.private_data[..5], request.private_data.len()), (&b"where"[..], 180));
    let qp = initialized(pair, 1, QpType::Ud)?;
    pair.ends[1].context.accept_datagrams(request.id, qp, b"here")?;
    let expected = pair.ends[1].context.query_qp(qp)?.qpn;
    match event(pair, 0)? {
        CmEvent::Resolved { id: own, address, qpn, qkey, private_data } => {
            same!((own, qpn, qkey), (id, expected, QKEY));
            same!((&private_data[..4], private_data.len()), (&b"here"[..], 136));
            same!(address.gid, pair.ends[1].gid());
            pair.ends[0].ah(&address)?;
        }
        other => return Err(format!("{other:?} where a service was expected").into()),
    }
    refused!(pair.ends[1].context.accept_datagrams(request.id, qp, &[]), Error::InvalidHandle { .. });
    Ok(pair.ends[1].context.unlisten(listener)?)
}

fn service_rejected(pair: &mut Pair) -> Outcome {
    let (listener, to) = listen(pair, PortSpace::Udp)?;
    let id = pair.ends[0].context.resolve(to, &ConnectionParameters::default())?;
    let request = request(pair)?;
    pair.ends[1].context.reject(request.id, b"closed")?;
    match event(pair, 0)? {
        CmEvent::Rejected { id: own, .. } => same!(own, id),
        other => return Err(format!("{other:?} where a rejection was expected").into()),
    }
    Ok(pair.ends[1].context.unlisten(listener)?)
}

fn unreliable(pair: &mut Pair) -> Outcome {
    let (listener, to) = listen(pair, PortSpace::Tcp)?;
    let qps = [initialized(pair, 0, QpType::Uc)?, initialized(pair, 1, QpType::Uc)?];
    let id = pair.ends[0].context.connect(qps[0], to, &ConnectionParameters::default())?;
    let request = request(pair)?;
    same!(request.qp_type, QpType::Uc);
    pair.ends[1].context.accept(request.id, qps[1], &ConnectionParameters::default())?;
    (0..2).try_for_each(|end| event(pair, end).map(drop))?;
    end(pair, [id, request.id])?;
    Ok(pair.ends[1].context.unlisten(listener)?)
}
