//! The cost of an idle queue pair: a documented amount of memory, and no work in the poll. `./do bench --bench queue_pairs`
//! measures the time.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use ferroce::*;

/// As in `benches/queue_pairs.rs`: sixteen work requests in each direction, with one piece.
fn modest(pd: Pd, cq: Cq) -> QpConfig {
    QpConfig::rc(pd, cq).max_send_wr(16).max_recv_wr(16).max_send_sge(1).max_recv_sge(1).max_inline_data(0)
}

/// The smallest that can send and receive.
fn minimal(pd: Pd, cq: Cq) -> QpConfig {
    modest(pd, cq).max_send_wr(1).max_recv_wr(1)
}

fn driver() -> Device {
    "loopback".parse::<DeviceSpec>().unwrap().open().unwrap()
}

struct Connected {
    context: Context,
    qps: Vec<Qp>,
    cq: Cq,
    mr: Mr,
}

/// A context full of queue pairs, each its own peer and ready to send.
fn connected(driver: Device, qps: u32, config: fn(Pd, Cq) -> QpConfig, max_rd_atomic: u8) -> Connected {
    let config_of_context = Config::default().max_qps(qps).max_mrs(1).max_cqs(1);
    let mut context = Context::open(driver, &config_of_context).unwrap();
    let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(64).unwrap());
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let mr = context.register(pd, Memory::zeroed(4096).unwrap(), access).unwrap();
    let gid = context.port().gids[0].gid;
    let config = config(pd, cq);
    let connect = |_| {
        let (qp, psn) = (context.create_qp(&config).unwrap(), Psn::new(0));
        let qpn = context.query_qp(qp).unwrap().qpn;
        let receive =
            ReadyToReceive::new(AddressVector::new(gid, 0), qpn, psn).max_dest_rd_atomic(max_rd_atomic);
        let send = ReadyToSend::new(psn).max_rd_atomic(max_rd_atomic);
        context.modify_qp(qp, Transition::Init { access }).unwrap();
        context.modify_qp(qp, Transition::ReadyToReceive(receive)).unwrap();
        context.modify_qp(qp, Transition::ReadyToSend(send)).unwrap();
        qp
    };
    let qps = (0..qps).map(connect).collect();
    Connected { context, qps, cq, mr }
}

/// All allocations of a context, without its driver, and of 16 384 connected queue pairs, divided by their number.
#[test]
fn a_queue_pair_has_the_documented_size() {
    let qps = 1 << 14;
    for (name, config, max_rd_atomic, stated) in [
        ("16 + 16 work requests, 16 READs", modest as fn(Pd, Cq) -> QpConfig, 16, 4096),
        ("1 + 1 work requests, no READs", minimal, 0, 1024),
    ] {
        let (driver, mut kept) = (driver(), None);
        let allocated =
            allocation_counter::measure(|| kept = Some(connected(driver, qps, config, max_rd_atomic)));
        let each = allocated.bytes_current / i64::from(qps);
        println!("{name}: {each} bytes a queue pair");
        assert!(each <= stated, "{name}: {each} bytes, {stated} are stated");
    }
}

/// A connected queue pair, and one whose work is done, wait for nothing: no timer runs, nothing is sent, and nothing is
/// allocated.
#[test]
fn idle_queue_pairs_cause_no_work() {
    let Connected { mut context, qps, cq, mr } = connected(driver(), 20_000, minimal, 0);
    let RemoteMemory { addr, rkey, .. } = context.remote(mr).unwrap();
    let mut now = Nanos(0);
    for n in 0..1000 {
        let op = SendOp::Write(RemoteAddress { addr, rkey });
        let data = Data::Sges(&[Sge { mr, offset: 0, length: 64 }]);
        let wr = SendWorkRequest { wr_id: n, op, data, flags: SendFlags::SIGNALED };
        context.post_send(qps[n as usize * 20], &wr).unwrap();
        while context.poll_cq(cq).unwrap().is_none() {
            now = Nanos(now.0 + 1000);
            context.poll(now).unwrap();
        }
    }
    // A timer that is not needed any more may still expire once.
    while let Some(due) = context.next_timeout() {
        now = due.max(now);
        assert_eq!(context.poll(now).unwrap(), 0);
    }
    let allocations = allocation_counter::measure(|| {
        for _ in 0..1000 {
            now = Nanos(now.0 + 1_000_000_000);
            assert_eq!(context.poll(now).unwrap(), 0);
        }
    });
    assert_eq!(allocations.count_total, 0);
    assert_eq!(context.next_timeout(), None);
    assert_eq!(context.counters().value(Counter::LocalAckTimeoutErr), 0);
}
