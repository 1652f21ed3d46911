//! Events of completion channels, and asynchronous events.

use std::time::Duration;

use ferroce_driver::rnic::{SendData, SendOperation, SendRequest};
use ferroce_driver_test_support::readiness::is_readable;

use crate::ends::{ERR, Kind, RC, errno, good, pair};

#[test]
fn a_channel_reports_requested_events() {
    let Some(stub) = good() else { return };
    let (a, b) = pair(&stub, Kind::of(RC));
    let send = |flags| {
        b.receive(1, &[]);
        a.post_flagged(SendOperation::Send, SendData::Pieces(&[]), flags);
    };
    send(0);
    assert_eq!(b.channel.event().unwrap(), None, "nobody asked");
    b.receives.request_event(false).unwrap();
    assert!(!is_readable(b.channel.fd().unwrap(), Duration::ZERO));
    send(0);
    assert!(is_readable(b.channel.fd().unwrap(), Duration::ZERO));
    send(0);
    assert_eq!((b.channel.event().unwrap(), b.channel.event().unwrap()), (Some(201), None));
    // Only solicited completions or errors; a request for all completions gets all.
    b.receives.request_event(true).unwrap();
    send(0);
    assert_eq!(b.channel.event().unwrap(), None);
    send(SendRequest::SOLICITED);
    assert_eq!(b.channel.event().unwrap(), Some(201));
    b.receives.request_event(false).unwrap();
    b.receives.request_event(true).unwrap();
    send(0);
    assert_eq!(b.channel.event().unwrap(), Some(201));
    b.receives.request_event(true).unwrap();
    b.receive(1, &[]);
    b.move_to(ERR);
    assert_eq!(b.channel.event().unwrap(), Some(201));
    // Both queues of an end share its channel.
    a.sends.request_event(false).unwrap();
    a.receives.request_event(false).unwrap();
    a.receive(1, &[]);
    a.post(SendOperation::Send, &[]);
    let mut tags: Vec<_> = std::iter::from_fn(|| a.channel.event().unwrap()).collect();
    tags.sort_unstable();
    assert_eq!(tags, [100, 200]);
}

#[test]
fn a_shared_receive_queue_reports_its_limit() {
    let Some(stub) = good() else { return };
    let (a, b) = pair(&stub, Kind { with_srq: true, ..Kind::of(RC) });
    let srq = b.srq.clone().unwrap();
    for wr_id in 0..3 {
        b.receive(wr_id, &[]);
    }
    srq.set_limit(2).unwrap();
    assert_eq!(srq.limit().unwrap(), 2);
    a.post(SendOperation::Send, &[]);
    assert!(b.events().is_empty());
    a.post(SendOperation::Send, &[]);
    assert_eq!((b.events(), srq.limit().unwrap()), (vec![(15, srq.id())], 0));
    // Only once.
    a.post(SendOperation::Send, &[]);
    assert!(b.events().is_empty());
    assert_eq!(errno(&srq.set_limit(17).unwrap_err()), libc::EINVAL);
    b.move_to(ERR);
    assert_eq!(b.events(), [(16, b.qp.id())]);
}

#[test]
fn events_name_their_object() {
    let Some(stub) = good() else { return };
    let (a, b) = pair(&stub, Kind { with_srq: true, ..Kind::of(RC) });
    assert!(!is_readable(a.device.event_fd().unwrap(), Duration::ZERO));
    for kind in [1, 2, 3, 6, 7, 16] {
        assert_eq!(stub.raise(kind, a.qp.qpn() as i32), 1);
    }
    assert!(is_readable(a.device.event_fd().unwrap(), Duration::ZERO));
    assert_eq!(a.events(), [1, 2, 3, 6, 7, 16].map(|kind| (kind, a.qp.id())));
    assert!(b.events().is_empty());
    // The newest completion queue is that of the second end's receives.
    assert_eq!((stub.raise(0, 0), stub.raise(0, 3), stub.raise(0, 4)), (1, 1, 0));
    assert_eq!((a.events(), b.events()), (vec![(0, a.sends.id())], vec![(0, b.receives.id())]));
    assert_eq!(stub.raise(14, 0), 1);
    assert_eq!(b.events(), [(14, b.srq.as_ref().unwrap().id())]);
    // Events of ports, and unknown kinds.
    for kind in [9, 10, 11, 12, 13, 17, 18, 4711] {
        assert_eq!(stub.raise(kind, 1), 2);
        assert_eq!((a.events(), b.events()), (vec![(kind as u32, 1)], vec![(kind as u32, 1)]));
    }
}

/// Events that were not taken are discarded with their objects.
#[test]
fn events_are_discarded_with_their_object() {
    let Some(stub) = good() else { return };
    let (a, b) = pair(&stub, Kind::of(RC));
    a.sends.request_event(false).unwrap();
    a.post(SendOperation::Write(b.remote(0)), &[]);
    stub.raise(1, a.qp.qpn() as i32);
    stub.raise(0, 3);
    stub.raise(9, 1);
    let (device, channel) = (a.device.clone(), a.channel.clone());
    drop(a);
    assert!(!is_readable(channel.fd().unwrap(), Duration::ZERO));
    assert_eq!(channel.event().unwrap(), None);
    assert_eq!(device.event().unwrap().map(|event| event.kind), Some(9));
    assert_eq!(device.event().unwrap(), None);
}

#[test]
fn a_removed_device_is_an_error() {
    let Some(stub) = good() else { return };
    let (a, b) = pair(&stub, Kind::of(RC));
    b.receive(1, &[]);
    a.post(SendOperation::Send, &[]);
    stub.remove_device();
    assert!(is_readable(a.device.event_fd().unwrap(), Duration::ZERO));
    let event = a.device.event().unwrap().unwrap();
    assert_eq!((event.kind, event.element), (8, 0));
    assert!(a.sent().is_empty() && b.received().is_empty());
    assert_eq!(errno(&a.qp.query().unwrap_err()), libc::EIO);
    assert_eq!(errno(&a.device.details().unwrap_err()), libc::EIO);
    assert!(is_readable(a.channel.fd().unwrap(), Duration::ZERO));
    assert_eq!(errno(&a.channel.event().unwrap_err()), libc::EIO);
    // The memory is never released, because the card may still write it.
    let (region, error) = a.region.deregister().unwrap_err();
    assert_eq!((errno(&error), region.len()), (libc::EIO, 8192));
}
