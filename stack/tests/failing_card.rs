//! A card whose functions fail one after the other, at each of their calls, or return invalid data: errors name the call,
//! nothing hangs, nothing is leaked, and a context continues when the card does.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::net::Ipv4Addr;

use ferroce::driver::rnic::Verbs;
use ferroce::*;
use ferroce_driver_test_support::rnic_stub::{FUNCTIONS, OPERATIONS, Stub};

/// The most calls of one function that the scene makes.
const MOST_CALLS: i32 = 200;

fn open(stub: &Stub) -> Result<Context, Error> {
    open_named(stub, "stub0")
}

fn open_named(stub: &Stub, name: &str) -> Result<Context, Error> {
    let verbs = Verbs::load_from(stub.path())?;
    Context::open(RnicPort::open_by(&verbs, name, None, None)?, &Config::default().seed([3; 32]))
}

/// Polls until there is a completion.
fn completion(context: &mut Context, cq: Cq, now: &mut u64) -> Result<WorkCompletion, Error> {
    for _ in 0..1000 {
        *now += 1;
        context.poll(Nanos(*now))?;
        if let Some(told) = context.poll_cq(cq)? {
            return Ok(told);
        }
    }
    panic!("no completion");
}

/// Calls all verbs, and destroys the created objects.
fn scene(context: &mut Context, now: &mut u64) -> Result<(), Error> {
    context.query_device();
    let pd = context.alloc_pd()?;
    let channel = context.create_comp_channel()?;
    let (cq, other) = (context.create_cq(64)?, context.create_cq_on(16, &channel)?);
    let srq = context.create_srq(&SrqConfig::new(pd))?;
    context.arm_srq(srq, 1)?;
    context.query_srq(srq)?;
    let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::MW_BIND;
    let mr = context
        .register(pd, Memory::zeroed(4096)?, rights | Access::REMOTE_ATOMIC)
        .map_err(|refused| refused.source)?;
    let mw = context.alloc_mw(pd)?;
    let remote = context.remote(mr)?.at(0);
    context.write(mr, 0, &[1; 8])?;
    let sges = [mr.sge(0..8)];

    let config = QpConfig::rc(pd, cq).max_inline_data(16);
    let qps = [context.create_qp(&config)?, context.create_qp(&config.recv_cq(other).srq(srq))?];
    let ends = [context.endpoint(qps[0], 0)?, context.endpoint(qps[1], 0)?];
    context.handshake(qps[0], &ends[0], &ends[1])?;
    context.handshake(qps[1], &ends[1], &ends[0])?;
    context.query_qp(qps[0])?;
    context.req_notify_cq(other, Notify::Next)?;
    context.post_srq_recv(srq, &ReceiveWorkRequest { wr_id: 1, sges: &sges })?;
    let receive = ReceiveWorkRequest { wr_id: 2, sges: &sges };
    context.post_srq_recvs(srq, &[receive, receive]).map_err(Error::from)?;
    context.post_recv(qps[0], &receive)?;
    let bind = SendOp::BindMw { mw, mr, offset: 0, length: 8, access: Access::REMOTE_WRITE };
    for op in [
        SendOp::Send,
        SendOp::SendWithImm(7),
        SendOp::Write(remote),
        SendOp::Read(remote),
        SendOp::FetchAdd { remote, add: 1 },
        SendOp::CompareSwap { remote, compare: 0, swap: 1 },
        bind,
    ] {
        let data = if matches!(op, SendOp::BindMw { .. }) { Data::Sges(&[]) } else { Data::Sges(&sges) };
        context.post_send(qps[0], &SendWorkRequest { wr_id: 3, op, data, flags: SendFlags::SIGNALED })?;
        assert_eq!(completion(context, cq, now)?.status, WcStatus::Success, "{op:?}");
    }
    let write = SendWorkRequest {
        wr_id: 4,
        op: SendOp::Write(remote),
        data: Data::Inline(b"inline"),
        flags: SendFlags::default(),
    };
    let list = [write, write, SendWorkRequest { wr_id: 5, flags: SendFlags::SIGNALED, ..write }];
    context.post_sends(qps[0], &list).map_err(Error::from)?;
    assert_eq!(completion(context, cq, now)?.wr_id, 5);
    for wr_id in [1, 2] {
        assert_eq!(completion(context, other, now)?.wr_id, wr_id);
    }
    context.req_notify_cq(cq, Notify::Solicited)?;
    if context.prepare_wait(Nanos(*now))? {
        context.wait(std::time::Duration::ZERO)?;
    }
    context.modify_qp(qps[0], Transition::Error)?;
    assert_eq!(completion(context, cq, now)?.status, WcStatus::WrFlushErr);
    context.modify_qp(qps[0], Transition::Reset)?;

    let datagrams = context.create_qp(&QpConfig::ud(pd, cq))?;
    context.modify_qp(datagrams, Transition::InitDatagram { qkey: 5 })?;
    context.modify_qp(datagrams, Transition::ReadyToReceiveDatagrams)?;
    let sq_psn = context.random_psn();
    context.modify_qp(datagrams, Transition::ReadyToSendUnreliable { sq_psn })?;
    let gid = context.port().gids[0].gid;
    let ah = context.create_ah(pd, &AddressVector::new(gid, 0))?;
    let to = Destination { ah, qpn: context.query_qp(datagrams)?.qpn, qkey: 5 };
    context
        .post_recvs(datagrams, &[ReceiveWorkRequest { wr_id: 6, sges: &[mr.sge(0..64)] }])
        .map_err(Error::from)?;
    let wr = SendWorkRequest {
        wr_id: 7,
        op: SendOp::SendTo(to),
        data: Data::Sges(&sges),
        flags: SendFlags::SIGNALED,
    };
    context.post_send(datagrams, &wr)?;
    for _ in 0..2 {
        assert_eq!(completion(context, cq, now)?.status, WcStatus::Success);
    }
    context.destroy_ah(ah)?;
    context.destroy_qp(datagrams)?;
    for qp in qps {
        context.destroy_qp(qp)?;
    }
    context.destroy_srq(srq)?;
    context.dealloc_mw(mw)?;
    context.deregister(mr)?;
    context.destroy_cq(cq)?;
    context.destroy_cq(other)?;
    context.dealloc_pd(pd)
}

#[test]
fn each_function_fails_at_each_of_its_calls() {
    let mut tried = 0;
    for function in FUNCTIONS.into_iter().chain(OPERATIONS) {
        // A separate one, because objects that can't be destroyed stay.
        let Some(stub) = Stub::build(&["NOTHING_WRONG"]) else { return };
        // Multicast needs an interface, and a context counts posted receives itself: the driver's tests cover these.
        let is_unused = function.contains("mcast") || function == "ibv_query_srq";
        // These can't fail, or are only logged: an object no longer exists for its owner, whatever the card returns.
        let is_silent =
            ["destroy", "dealloc", "close", "free", "ack"].iter().any(|word| function.contains(word));
        let name = function.trim_start_matches('_');
        let mut failed = 0;
        for nth in 1..=MOST_CALLS {
            stub.fail(function, nth);
            let mut now = 0;
            let outcome = open(&stub).map(|mut context| (scene(&mut context, &mut now), context));
            stub.fail(function, 0);
            let (error, context) = match outcome {
                Ok((Ok(()), _)) => {
                    // It has fewer calls than that.
                    assert!(is_unused || is_silent || failed > 0, "{function} is never called");
                    if is_silent && nth < 20 {
                        continue;
                    }
                    break;
                }
                Ok((Err(error), context)) => (error, Some(context)),
                Err(error) => (error, None),
            };
            failed += 1;
            tried += 1;
            let told = error.to_string();
            if is_silent {
                // Objects on it are busy from then on, which is reported.
                assert!(told.contains(" of stub0: "), "{function}, call {nth}: {told}");
                break;
            }
            match name {
                "ibv_get_device_list" => assert!(told.starts_with("ibv_get_device_list: "), "{told}"),
                "ibv_get_device_name" => assert!(told.starts_with("there is no RNIC 'stub0'"), "{told}"),
                _ => assert!(told.contains(&format!("{name} of stub0: ")), "{function}, call {nth}: {told}"),
            }
            if let Some(mut context) = context {
                if name == "ibv_get_async_event" {
                    // A device that can't be queried is gone.
                    assert_eq!(context.next_event(), Some(Event::DeviceFatal));
                    assert!(context.poll(Nanos(now + 1)).is_err());
                } else {
                    scene(&mut context, &mut now).unwrap_or_else(|error| panic!("behind {told}: {error}"));
                }
            }
            assert_eq!(stub.live_objects(), 0, "{function}, call {nth}: {told}");
        }
        assert!(failed < MOST_CALLS, "{function}");
    }
    println!("{tried} failures of {} functions", FUNCTIONS.len() + OPERATIONS.len());
    assert!(tried > 60, "{tried}");
}

#[test]
fn every_status_is_reported() {
    let Some(stub) = Stub::build(&["NOTHING_WRONG"]) else { return };
    let mut context = open(&stub).unwrap();
    let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(16).unwrap());
    let mut now = 0;
    for number in (0..=23).chain([1000, u32::MAX - 1]) {
        for kind in [QpType::Rc, QpType::Uc] {
            let config = if kind == QpType::Rc { QpConfig::rc(pd, cq) } else { QpConfig::uc(pd, cq) };
            let qps = [(); 2].map(|()| context.create_qp(&config).unwrap());
            let ends = qps.map(|qp| context.endpoint(qp, 0).unwrap());
            context.handshake(qps[0], &ends[0], &ends[1]).unwrap();
            context.handshake(qps[1], &ends[1], &ends[0]).unwrap();
            let mr = context.register(pd, Memory::zeroed(64).unwrap(), Access::LOCAL_WRITE).unwrap();
            stub.set_status(Some(number));
            let wr = SendWorkRequest {
                wr_id: 9,
                op: SendOp::Send,
                data: Data::Sges(&[mr.sge(0..8)]),
                flags: SendFlags::default(),
            };
            // Errors of unsignaled work requests are reported too.
            let flags = if number == 0 { SendFlags::SIGNALED } else { SendFlags::default() };
            context.post_recv(qps[1], &ReceiveWorkRequest { wr_id: 8, sges: &[mr.sge(8..16)] }).unwrap();
            context.post_send(qps[0], &SendWorkRequest { flags, ..wr }).unwrap();
            stub.set_status(None);
            let told = loop {
                let told = completion(&mut context, cq, &mut now).unwrap();
                if told.wr_id == 9 {
                    break told;
                }
            };
            let same_number = told.status as u32 == number;
            assert!(same_number || told.status == WcStatus::GeneralErr, "{number}: {told:?}");
            // The stub reports no length of a send; nor do all cards.
            let length = if number == 0 { 8 } else { 0 };
            assert_eq!((told.qp, told.byte_len), (qps[0], length), "{number}: {told:?}");
            if number != 0 {
                assert_ne!(told.status, WcStatus::Success, "{number}");
                // The stub leaves the queue pair in RTS, as the query shows.
                context.modify_qp(qps[0], Transition::Error).unwrap();
            } else {
                assert_eq!((told.status, told.opcode), (WcStatus::Success, WcOpcode::Send));
            }
            // No references to the memory are left when all work has completed.
            for qp in qps {
                context.destroy_qp(qp).unwrap();
            }
            context.deregister(mr).unwrap();
        }
    }
    drop(context);
    assert_eq!(stub.live_objects(), 0);
}

/// Invalid counts, completions, events, lengths, limits and descriptors: an error or no effect, and it ends in any case.
#[test]
fn invalid_data_is_an_error_or_ignored() {
    for setting in ["GARBAGE", "GARBAGE_POLL", "GARBAGE_EVENT", "GARBAGE_FD", "NULL_OPS"] {
        let Some(stub) = Stub::build(&[setting]) else { return };
        let (mut told, mut now) = (Vec::new(), 0);
        // The names of devices are invalid, too.
        let name = if setting == "GARBAGE" { "x".repeat(64) } else { "stub0".to_owned() };
        match open_named(&stub, &name) {
            Err(error) => told.push(error.to_string()),
            Ok(mut context) => {
                for _ in 0..3 {
                    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                        scene(&mut context, &mut now)
                    })) {
                        Ok(Ok(())) => {}
                        Ok(Err(error)) => told.push(error.to_string()),
                        // The scene itself waits for an event that does not arrive.
                        Err(panic) => {
                            let text = panic.downcast_ref::<&str>().map_or_else(
                                || panic.downcast_ref::<String>().cloned().unwrap_or_default(),
                                |text| (*text).to_owned(),
                            );
                            assert!(
                                text.contains("no completion") || text.contains("assertion"),
                                "{setting}: {text}"
                            );
                            told.push(text);
                        }
                    }
                }
                for _ in 0..5000 {
                    now += 1;
                    let _ = context.poll(Nanos(now));
                    while context.next_event().is_some() {}
                }
            }
        }
        println!("{setting}: {told:?}");
        assert!(!told.is_empty() || setting == "GARBAGE" || setting == "GARBAGE_EVENT", "{setting}");
        assert_eq!(stub.live_objects(), 0, "{setting}");
    }
}

/// An address that the stub has.
#[test]
fn errors_of_a_failing_card_name_existing_ports() {
    let Some(stub) = Stub::build(&["NOTHING_WRONG"]) else { return };
    let verbs = Verbs::load_from(stub.path()).unwrap();
    let refused = RnicPort::open_by(&verbs, "stub0", Some(9), None).unwrap_err().to_string();
    assert!(refused.contains("port = 9") && refused.contains("stub0"), "{refused}");
    let refused = RnicPort::open_by(&verbs, "stub0", None, Some(200)).unwrap_err().to_string();
    assert!(
        refused.contains("200") && refused.contains(&Ipv4Addr::new(10, 0, 0, 2).to_string()),
        "{refused}"
    );
}
