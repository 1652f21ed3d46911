//! The counters of a context, and their export.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use ferroce::driver::sim::{EcnConfig, LinkConfig};
use ferroce::*;
use ferroce_test_support::pair::{Pair, Setup};

fn value(metrics: &Metrics, name: &str, label: Option<&str>) -> u64 {
    let metric = metrics.iter().find(|metric| metric.name == name).unwrap();
    let labelled = |sample: &&Sample| sample.label.as_ref().map(|label| &*label.value) == label;
    metric.samples.iter().find(labelled).unwrap().value
}

/// Posts on the first end, with a receive at the other, and runs until it has completed.
fn happen(pair: &mut Pair, ops: &[SendOp]) {
    for op in ops {
        let [end, peer] = &mut pair.ends;
        peer.context.post_recv(peer.qp, &ReceiveWorkRequest { wr_id: 0, sges: &[] }).unwrap();
        let length = match op {
            SendOp::Send => 0,
            // Three packets.
            SendOp::Write(_) | SendOp::WriteWithImm(..) | SendOp::Read(_) => 3000,
            _ => 8,
        };
        let sges = [Sge { mr: end.mr, offset: 0, length }];
        let data = Data::Sges(if length == 0 { &[] } else { &sges });
        end.context
            .post_send(end.qp, &SendWorkRequest { wr_id: 0, op: *op, data, flags: SendFlags::SIGNALED })
            .unwrap();
    }
    while pair.step() {}
}

#[test]
fn requests_are_counted_by_kind_at_both_ends() {
    let mut pair = Pair::new(1, LinkConfig::default(), Setup::default());
    let there = pair.ends[1].context.remote(pair.ends[1].mr).unwrap();
    let remote = RemoteAddress { addr: there.addr, rkey: there.rkey };
    let add = SendOp::FetchAdd { remote, add: 1 };
    // It uses a receive, but is not a SEND.
    let immediate = SendOp::WriteWithImm(remote, 1);
    happen(&mut pair, &[SendOp::Send, SendOp::Write(remote), immediate, SendOp::Read(remote), add, add, add]);
    let [near, far] = [0, 1].map(|end: usize| pair.ends[end].context.counters());
    assert_eq!((near.value(Counter::RdmaSends), far.value(Counter::RdmaRecvs)), (1, 1));
    assert_eq!(far.value(Counter::RxWriteRequests), 2);
    assert_eq!(far.value(Counter::RxReadRequests), 1);
    assert_eq!(far.value(Counter::RxAtomicRequests), 3);
    assert_eq!(near.value(Counter::SentPkts), far.value(Counter::RcvdPkts));
    assert_eq!(near.drops().chain(far.drops()).map(|(_, count)| count).sum::<u64>(), 0);

    let metrics = pair.ends[1].context.metrics();
    assert_eq!(value(&metrics, "rx_read_requests", None), 1);
    assert_eq!(value(&metrics, "rx_packets", None), far.value(Counter::RcvdPkts));
    assert_eq!(value(&metrics, "bad_descriptors", None), 0);
    assert_eq!(value(&metrics, "qps", Some("rts")), 1);
    assert_eq!(value(&metrics, "resource_in_use", Some("mr")), 1);
    assert_eq!(value(&metrics, "resource_limit", Some("qp")), u64::from(Config::default().max_qps));
    let by_state = metrics.iter().find(|metric| metric.name == "qps").unwrap();
    let qps: u64 = by_state.samples.iter().map(|sample| sample.value).sum();
    assert_eq!(qps, value(&metrics, "resource_in_use", Some("qp")));
    let [near, far] = [0, 1].map(|end: usize| pair.ends[end].context.port().clone());
    assert_eq!(value(&metrics, "port_mtu", None), u64::from(far.mtu));
    assert_eq!(value(&metrics, "port_gid", Some(&far.gids[0].gid.to_string())), 1);
    assert_eq!(value(&metrics, "port_pkey", Some("0xffff")), 1);
    assert_eq!(value(&metrics, "peer_qps", Some(&near.gids[0].gid.to_string())), 1);
    let path_mtus = metrics.iter().find(|metric| metric.name == "path_mtu_qps").unwrap();
    assert_eq!(path_mtus.samples.iter().map(|sample| sample.value).sum::<u64>(), 1);
}

/// The rates of queue pairs slowed down by CNPs, the slowest first, at most 16.
#[test]
fn rates_under_congestion_control_are_shown() {
    let config = |config: Config| {
        let control = CongestionControl::Dcqcn(Dcqcn::PAPER);
        config.congestion(control).notification(CongestionNotification::default()).line_rate(10_000_000_000)
    };
    let link = LinkConfig::default().rate(1_000_000_000).ecn(EcnConfig::new(0, 1, 1.0));
    let mut pair = Pair::new(1, link, Setup { config, qps: 20, ..Setup::default() });
    let metrics = pair.ends[0].context.metrics();
    let count = |metrics: &Metrics, rate| value(metrics, "rp_qps", Some(rate));
    assert_eq!((count(&metrics, "line"), count(&metrics, "slowed")), (20, 0));
    assert!(metrics.iter().all(|metric| metric.name != "rp_rate"));
    let there = pair.ends[1].context.remote(pair.ends[1].mr).unwrap();
    let remote = RemoteAddress { addr: there.addr, rkey: there.rkey };
    let end = &mut pair.ends[0];
    for qp in &end.qps[..18] {
        let data = [Sge { mr: end.mr, offset: 0, length: 1 << 16 }];
        let (data, flags) = (Data::Sges(&data), SendFlags::SIGNALED);
        let wr = SendWorkRequest { wr_id: 0, op: SendOp::Write(remote), data, flags };
        end.context.post_send(*qp, &wr).unwrap();
    }
    let mut done = 0;
    while done < 18 {
        assert!(pair.step());
        done += std::iter::from_fn(|| pair.ends[0].context.poll_cq(pair.ends[0].cq).unwrap()).count();
    }
    let end = &pair.ends[0];
    let metrics = end.context.metrics();
    assert_eq!((count(&metrics, "line"), count(&metrics, "slowed")), (2, 18));
    let rates = metrics.iter().find(|metric| metric.name == "rp_rate").unwrap();
    assert_eq!(rates.samples.len(), 16);
    assert!(rates.samples.is_sorted_by_key(|sample| sample.value));
    for sample in &rates.samples {
        let qpn = &*sample.label.as_ref().unwrap().value;
        let qp =
            end.qps.iter().find(|qp| end.context.query_qp(**qp).unwrap().qpn.to_string() == qpn).unwrap();
        let state = end.context.query_qp(*qp).unwrap().reaction.unwrap();
        assert_eq!((sample.value, state.highest), (state.rate, 10_000_000_000));
        assert_eq!(value(&metrics, "rp_target_rate", Some(qpn)), state.target);
        assert_eq!(value(&metrics, "rp_alpha", Some(qpn)), (state.alpha * 1024.0) as u64);
        assert_eq!(value(&metrics, "rp_timer_stage", Some(qpn)), state.timer_stage.into());
        assert_eq!(value(&metrics, "rp_byte_stage", Some(qpn)), state.byte_stage.into());
    }
    let read = Metrics::parse(&metrics.to_string()).unwrap();
    assert_eq!(value(&read, "rp_qps", Some("slowed")), 18);
}

#[test]
fn a_refused_request_is_counted_at_both_ends() {
    let mut pair = Pair::new(1, LinkConfig::default(), Setup::default());
    let there = pair.ends[1].context.remote(pair.ends[1].mr).unwrap();
    let beyond = RemoteAddress { addr: there.addr + there.length, rkey: there.rkey };
    happen(&mut pair, &[SendOp::Write(beyond), SendOp::Send]);
    let [near, far] = [0, 1].map(|end: usize| pair.ends[end].context.counters());
    assert_eq!(far.value(Counter::RespRemoteAccessErrors), 1);
    assert_eq!(far.value(Counter::EventQpAccessErr), 1);
    assert_eq!((far.value(Counter::RespCqeError), far.value(Counter::RespCqeFlushError)), (2, 2));
    assert_eq!(near.value(Counter::ReqRemoteAccessErrors), 1);
    assert_eq!((near.value(Counter::ReqCqeError), near.value(Counter::ReqCqeFlushError)), (2, 1));
    assert_eq!(far.value(Counter::RxWriteRequests), 0);
}

#[test]
fn a_message_that_is_too_long_is_counted() {
    let mut pair = Pair::new(1, LinkConfig::default(), Setup::default());
    let [end, peer] = &mut pair.ends;
    peer.context.post_recv(peer.qp, &ReceiveWorkRequest { wr_id: 0, sges: &[] }).unwrap();
    let data = Data::Inline(b"too long");
    let wr = SendWorkRequest { wr_id: 0, op: SendOp::Send, data, flags: SendFlags::SIGNALED };
    end.context.post_send(end.qp, &wr).unwrap();
    while pair.step() {}
    let [near, far] = [0, 1].map(|end: usize| pair.ends[end].context.counters());
    assert_eq!(far.value(Counter::RespLocalLengthError), 1);
    assert_eq!((far.value(Counter::RespCqeError), far.value(Counter::RespCqeFlushError)), (1, 0));
    assert_eq!(near.value(Counter::ReqRemoteInvalidRequest), 1);
}

/// A packet that finds others queued is marked.
#[test]
fn congestion_marks_are_counted_at_the_receiver() {
    let ecn = Some(EcnConfig::new(0, 0, 1.0));
    let link = LinkConfig::default().rate(1_000_000_000).ecn(ecn);
    const ECT_0: u8 = 2;
    for (traffic_class, is_capable) in [(ECT_0, true), (0, false)] {
        let way: fn(AddressVector) -> AddressVector = match traffic_class {
            0 => |way| way,
            _ => |way| way.traffic_class(ECT_0),
        };
        let mut pair = Pair::new(1, link.clone(), Setup { way, ..Setup::default() });
        let there = pair.ends[1].context.remote(pair.ends[1].mr).unwrap();
        let write = SendOp::Write(RemoteAddress { addr: there.addr, rkey: there.rkey });
        happen(&mut pair, &[write; 8]);
        let marked = pair.network.counters().marked;
        assert_eq!(marked > 0, is_capable);
        let counted =
            pair.ends.iter().map(|end| end.context.counters().value(Counter::NpEcnMarkedRocePackets));
        assert_eq!(counted.sum::<u64>(), marked);
    }
}

/// The sockets of this process and their contexts, the oldest first.
fn own_sockets() -> Vec<PathBuf> {
    let pid = format!("{}.", std::process::id());
    let mut sockets: Vec<PathBuf> = Exported::find().sockets().collect();
    sockets.retain(|path| path.file_name().unwrap().to_str().unwrap().starts_with(&pid));
    sockets
}

fn read(stream: &mut UnixStream) -> Metrics {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    Metrics::parse(&text).unwrap()
}

/// A single test, because it checks all sockets of the process.
#[test]
fn an_exported_context_serves_one_many_and_slow_readers() {
    let mut pair = Pair::new(1, LinkConfig::default(), Setup::default());
    for end in &mut pair.ends {
        end.context.export().unwrap();
    }
    let sockets = own_sockets();
    assert_eq!(sockets.len(), 2, "{sockets:?}");
    let mut now = pair.now;
    let mut poll = |pair: &mut Pair| {
        now = now + Duration::from_millis(5);
        for end in &mut pair.ends {
            end.context.poll(now).unwrap();
        }
    };

    // The text matches the context's values.
    for (end, socket) in sockets.iter().enumerate() {
        let mut reader = UnixStream::connect(socket).unwrap();
        poll(&mut pair);
        let metrics = read(&mut reader);
        assert_eq!(metrics.label("pid"), Some(&*std::process::id().to_string()));
        assert!(metrics.label("context").is_some());
        let own = pair.ends[end].context.metrics();
        assert_eq!(metrics.label("device"), own.label("device"));
        assert!(metrics.iter().eq(own.iter()));
    }

    // More readers than are served at once, one that writes, and one that disconnects.
    let mut readers: Vec<UnixStream> = (0..20).map(|_| UnixStream::connect(&sockets[0]).unwrap()).collect();
    readers[0].write_all(b"nobody reads this").unwrap();
    drop(readers.remove(1));
    (0..10).for_each(|_| poll(&mut pair));
    let texts: Vec<String> = readers
        .iter_mut()
        .map(|reader| {
            let mut bytes = Vec::new();
            if let Err(error) = reader.read_to_end(&mut bytes) {
                assert_eq!(error.kind(), ErrorKind::ConnectionReset, "what it wrote was not read");
            }
            String::from_utf8(bytes).unwrap()
        })
        .collect();
    assert!(texts.iter().all(|text| Metrics::parse(text).is_ok() && text == &texts[0]));

    // It leaves no socket.
    drop(pair);
    assert_eq!(own_sockets(), Vec::<PathBuf>::new());
}
