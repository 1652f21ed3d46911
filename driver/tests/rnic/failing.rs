//! Functions that fail, that are missing, or that return invalid values.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ferroce_driver::rnic::{
    AddressHandle, Completion, CompletionChannel, CompletionQueue, Device, ProtectionDomain, QueuePair,
    QueuePairChange, ReceiveRequest, Region, SendData, SendOperation, SendRequest, SharedReceiveQueue, Verbs,
    Window,
};
use ferroce_driver::{Error, Memory};
use ferroce_driver_test_support::rnic_stub::{FUNCTIONS, OPERATIONS, Stub, setting};

use crate::ends::{
    End, INIT, IOVA, Kind, RC, REMOTE, RTR, RTS, UD, address, config, errno, good, ipv4, pair, warnings,
};

/// Creates each object and calls each function, until one fails.
fn everything(stub: &Stub) -> Result<(), Error> {
    let device = Verbs::load_from(stub.path())?.open("stub0")?;
    device.set_nonblocking()?;
    device.details()?;
    let domain = ProtectionDomain::new(&device)?;
    let memory = Memory::zeroed(4096).unwrap();
    let region = Region::new(&domain, memory, REMOTE, IOVA).map_err(|(_, error)| error)?;
    let _window = Window::new(&domain)?;
    let ah = AddressHandle::new(&domain, &address(ipv4(2)))?;
    let channel = CompletionChannel::new(&device)?;
    let queue = CompletionQueue::new(8, &channel, 1)?;
    let srq = SharedReceiveQueue::new(&domain, 8, 1)?;
    srq.set_limit(1)?;
    srq.limit()?;
    srq.post_receives(&mut [ReceiveRequest::new(1, &[])]).map_err(|refused| refused.error)?;
    queue.request_event(false)?;
    let qp = QueuePair::new(&domain, &config(Kind::of(UD), &queue, &queue, None))?;
    let change = QueuePairChange::default();
    let (pkey_index, port, qkey) = (Some(0), Some(1), Some(1));
    qp.modify(&QueuePairChange { state: Some(INIT), pkey_index, port, qkey, ..change })?;
    qp.modify(&QueuePairChange { state: Some(RTR), ..change })?;
    qp.modify(&QueuePairChange { state: Some(RTS), sq_psn: Some(1), ..change })?;
    qp.query()?;
    let mut group = ipv4(1);
    group[12] = 239;
    qp.attach(&group)?;
    qp.detach(&group)?;
    qp.post_receives(&mut [ReceiveRequest::new(1, &[])]).map_err(|refused| refused.error)?;
    let target = ferroce_driver::rnic::Target { ah: &ah, qpn: qp.qpn(), qkey: 1 };
    let data = SendData::Inline(b"1");
    let flags = SendRequest::SIGNALED;
    let mut request = SendRequest::new(1, SendOperation::SendTo(target), data, flags);
    qp.post_send(&mut request)?;
    qp.post_sends(&mut [request]).map_err(|refused| refused.error)?;
    while queue.poll(&mut [Completion::EMPTY; 4])? > 0 {}
    assert_eq!(channel.event()?, Some(1));
    stub.raise(9, 1);
    assert_eq!(device.event()?.unwrap().kind, 9);
    region.deregister().map(drop).map_err(|(_, error)| error)
}

#[test]
fn everything_works_when_nothing_fails() {
    let Some(stub) = good() else { return };
    assert_eq!(warnings(|| everything(&stub).unwrap()), [""; 0]);
    assert_eq!(stub.live_objects(), 0);
}

/// Each failure is reported with the names of the call and of the device, by an error or, without a caller, by a
/// warning.
#[test]
fn each_function_may_fail() {
    for function in FUNCTIONS.into_iter().chain(OPERATIONS) {
        let Some(stub) = Stub::build(&[&setting("FAIL", function)]) else { return };
        let mut done = Ok(());
        let warned = warnings(|| done = everything(&stub));
        let name = function.trim_start_matches('_');
        match name {
            // These can't report errors.
            "ibv_free_device_list" | "ibv_ack_async_event" | "ibv_ack_cq_events" => done.unwrap(),
            "ibv_get_device_name" => {
                let error = done.unwrap_err();
                assert!(matches!(&error, Error::NoRnic { name, .. } if name == "stub0"), "{error}");
            }
            "ibv_get_device_list" => {
                let error = done.unwrap_err().to_string();
                assert!(error.starts_with("ibv_get_device_list: Operation not permitted"), "{error}");
            }
            _ if name.contains("destroy") || name.contains("dealloc") || name == "ibv_close_device" => {
                done.unwrap();
                // The order of destruction stays correct: the object that it was created on is busy, as expected.
                let told = warned.iter().filter(|text| text.contains(&format!("{name}: "))).count();
                assert!(told == 1 && warned[0].contains("stub0") && warned[0].contains(name), "{warned:?}");
                assert!(stub.live_objects() > 0);
                continue;
            }
            _ => {
                let error = done.unwrap_err();
                let told =
                    matches!(&error, Error::Verbs { call, device, .. } if *call == name && device == "stub0");
                assert!(
                    told && error.to_string().starts_with(&format!("{name} of stub0: ")),
                    "{name}: {error}"
                );
                assert_ne!(errno(&error), 0, "{error}");
            }
        }
        if matches!(name, "ibv_dereg_mr" | "ibv_detach_mcast") {
            // Tried again when the object is dropped.
            assert!(warned[0].contains(name), "{warned:?}");
        } else {
            assert_eq!((stub.live_objects(), warned), (0, vec![]), "{name}");
        }
    }
}

/// A failure of any function at any call leaves no objects.
#[test]
fn a_failure_at_any_call_leaves_nothing_behind() {
    let Some(stub) = good() else { return };
    for function in FUNCTIONS.into_iter().chain(OPERATIONS) {
        if ["destroy", "dealloc", "dereg", "close", "free", "ack"].iter().any(|last| function.contains(last))
        {
            continue;
        }
        let mut nth = 0;
        loop {
            nth += 1;
            stub.fail(function, nth);
            let warned = warnings(|| drop(everything(&stub)));
            assert_eq!((stub.live_objects(), warned), (0, vec![]), "{function}, call {nth}");
            stub.fail(function, 0);
            if nth > 3 {
                break;
            }
        }
    }
}

#[test]
fn a_provider_without_functions() {
    let Some(stub) = Stub::build(&["NULL_OPS"]) else { return };
    let device = Verbs::load_from(stub.path()).unwrap().open("stub0").unwrap();
    let domain = ProtectionDomain::new(&device).unwrap();
    let a = End::new(&stub, 0, Kind { with_srq: true, ..Kind::of(RC) });
    let b = End::new(&stub, 1, Kind::of(RC));
    let receive = &mut [ReceiveRequest::new(1, &[])];
    let mut send = SendRequest::new(1, SendOperation::Send, SendData::Pieces(&[]), 0);
    for (call, error) in [
        ("ibv_alloc_mw", Window::new(&domain).unwrap_err()),
        ("ibv_poll_cq", a.sends.poll(&mut [Completion::EMPTY]).unwrap_err()),
        ("ibv_req_notify_cq", a.sends.request_event(false).unwrap_err()),
        ("ibv_post_srq_recv", a.srq.as_ref().unwrap().post_receives(receive).unwrap_err().error),
        ("ibv_post_recv", b.qp.post_receives(receive).unwrap_err().error),
        ("ibv_post_send", b.qp.post_send(&mut send).unwrap_err()),
        ("ibv_post_send", b.qp.post_sends(&mut [send]).unwrap_err().error),
    ] {
        assert!(error.to_string().starts_with(&format!("{call} of stub")), "{error}");
        assert_eq!(errno(&error), libc::EOPNOTSUPP);
    }
}

/// Reports when memory is released.
struct Owner(Arc<AtomicBool>, Box<[u64; 512]>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn owned() -> (Memory, Arc<AtomicBool>) {
    let given_back = Arc::new(AtomicBool::new(false));
    let mut owner = Owner(given_back.clone(), Box::new([0; 512]));
    let base = NonNull::new(owner.1.as_mut_ptr().cast::<u8>()).unwrap();
    // SAFETY: the bytes are the owner's, which exists as long as the memory, and there are no other references to them.
    (unsafe { Memory::from_raw(base, 4096, owner) }, given_back)
}

/// An address for peers with the same offset in a page as the memory.
fn beside(memory: &Memory) -> u64 {
    IOVA + memory.address().as_ptr().addr() as u64 % 4096
}

#[test]
fn memory_that_the_card_may_still_write_is_never_released() {
    let Some(stub) = good() else { return };
    let device = Verbs::load_from(stub.path()).unwrap().open("stub0").unwrap();
    let domain = ProtectionDomain::new(&device).unwrap();

    let (memory, given_back) = owned();
    let iova = beside(&memory);
    let region = Region::new(&domain, memory, REMOTE, iova).unwrap();
    let (lkey, rkey) = (region.lkey(), region.rkey());
    stub.fail("ibv_dereg_mr", 1);
    let (mut region, error) = region.deregister().unwrap_err();
    assert_eq!(error.to_string(), "ibv_dereg_mr of stub0: Device or resource busy (os error 16)");
    // It is unchanged.
    region.write(5, b"here").unwrap();
    assert_eq!((region.lkey(), region.rkey(), region.len()), (lkey, rkey, 4096));
    let memory = region.deregister().unwrap();
    let mut bytes = [0; 4];
    memory.read(5, &mut bytes).unwrap();
    assert_eq!((&bytes, given_back.load(Ordering::Relaxed)), (b"here", false));
    drop(memory);
    assert!(given_back.load(Ordering::Relaxed));

    // The registration for peers, or the one for this side.
    for nth in [1, 2] {
        let (memory, given_back) = owned();
        let iova = beside(&memory);
        let region = Region::new(&domain, memory, REMOTE, iova).unwrap();
        stub.fail("ibv_dereg_mr", nth);
        let warned = warnings(|| drop(region));
        assert!(
            warned.len() == 1 && warned[0].contains("ibv_dereg_mr of stub0: Device or resource busy"),
            "{warned:?}"
        );
        assert!(!given_back.load(Ordering::Relaxed));
    }

    // Memory that can't be registered is returned.
    for nth in [1, 2] {
        let (memory, given_back) = owned();
        let live = stub.live_objects();
        stub.fail("ibv_reg_mr_iova2", nth);
        let iova = beside(&memory);
        let (memory, error) = Region::new(&domain, memory, REMOTE, iova).unwrap_err();
        assert!(error.to_string().starts_with("ibv_reg_mr_iova2 of stub0: Bad address"), "{error}");
        assert_eq!(stub.live_objects(), live);
        drop(memory);
        assert!(given_back.load(Ordering::Relaxed));
    }
}

#[test]
fn invalid_descriptors() {
    let Some(stub) = Stub::build(&["GARBAGE_FD"]) else { return };
    let device = Verbs::load_from(stub.path()).unwrap().open("stub0").unwrap();
    for error in [
        device.event_fd().unwrap_err(),
        device.set_nonblocking().unwrap_err(),
        CompletionChannel::new(&device).unwrap_err(),
    ] {
        assert!(error.to_string().ends_with("fd = -1"), "{error}");
    }
    drop(device);
    assert_eq!(stub.live_objects(), 0);
}

#[test]
fn invalid_completions() {
    let Some(stub) = Stub::build(&["GARBAGE_POLL"]) else { return };
    let (a, _b) = pair(&stub, Kind::of(RC));
    let mut room = [Completion::EMPTY; 2];
    let (mut errors, mut completions) = (Vec::new(), Vec::new());
    for _ in 0..16 {
        match a.sends.poll(&mut room) {
            Ok(count) => completions.extend_from_slice(&room[..count]),
            Err(error) => errors.push(error.to_string()),
        }
    }
    assert_eq!(errors.len(), 6);
    assert_eq!(errors[0], "ibv_poll_cq of stub0: it reports 3 completions: must be at most 2");
    assert_eq!(errors[1], "ibv_poll_cq of stub0: Input/output error (os error 5)");
    assert_eq!(errors[..3], errors[3..]);
    // If their number is valid, they are returned unchanged.
    assert!(completions.iter().all(|completion| completion.wr_id == 0xdead_beef_dead_beef));
    assert_eq!((completions.len(), completions[1].status, completions[2].opcode), (8, u32::MAX, u32::MAX));
    assert_eq!(
        a.sends.poll(&mut []).unwrap_err().to_string(),
        "ibv_poll_cq of stub0: it reports 1 completions: must be at most 0"
    );
}

#[test]
fn invalid_events() {
    let Some(stub) = Stub::build(&["GARBAGE_EVENT"]) else { return };
    let (a, _b) = pair(&stub, Kind::of(RC));
    for _ in 0..48 {
        let event = a.device.event().unwrap().unwrap();
        // A port number has four bytes.
        let of_port = matches!(event.kind, 8..=13 | 17 | 18);
        assert_eq!(event.element, if of_port { 0xdead_beef } else { 0xdead_beef_dead_beef }, "{event:?}");
    }
    assert_eq!(a.channel.event().unwrap(), Some(0xfeed_face_feed_face));
}

/// The name is not terminated, and all other values are as large as possible.
#[test]
fn invalid_limits() {
    let Some(stub) = Stub::build(&["GARBAGE"]) else { return };
    let name = "x".repeat(64);
    let device = Verbs::load_from(stub.path()).unwrap().open(&name).unwrap();
    assert_eq!(device.name(), name);
    assert!(device.details().is_err());
    drop(device);
    let unknown = Verbs::load_from(stub.path()).unwrap().open("stub0").unwrap_err();
    assert_eq!(unknown.to_string(), format!("there is no RNIC 'stub0'; there are {name}, {name}"));
    assert_eq!(stub.live_objects(), 0);
}

#[test]
fn a_device_is_shared_by_its_objects() {
    let Some(stub) = good() else { return };
    let device: Device = Verbs::load_from(stub.path()).unwrap().open("stub0").unwrap();
    let domain = ProtectionDomain::new(&device).unwrap();
    drop(device);
    assert_eq!(stub.live_objects(), 2);
    drop(domain);
    assert_eq!(stub.live_objects(), 0);
}
