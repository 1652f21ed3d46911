//! Memory windows.

use ferroce_driver::rnic::{Bind, Completion, Remote, SendOperation, Window, access};

use crate::ends::{ERR, IOVA, Kind, RC, RTS, errno, good, pair};

/// The 64 bytes at offset 100.
macro_rules! bind {
    ($end:expr, $window:expr, $key:expr) => {
        SendOperation::Bind(Bind {
            window: &$window,
            rkey: $window.rkey() | $key,
            region: &$end.region,
            addr: IOVA + 100,
            length: 64,
            access: access::REMOTE_WRITE | access::REMOTE_READ,
        })
    };
}

#[test]
fn a_window_opens_and_is_closed() {
    let Some(stub) = good() else { return };
    let (mut a, b) = pair(&stub, Kind::of(RC));
    let window = Window::new(&b.domain).unwrap();
    let sent = b.carry_out(bind!(b, window, 7), &[]);
    assert_eq!((sent.status, sent.opcode), (0, 5));
    let key = window.rkey() | 7;
    a.region.write(0, b"seen").unwrap();
    assert_eq!(
        a.carry_out(SendOperation::Write(Remote { addr: IOVA + 160, rkey: key }), &[a.piece(0, 4)]).status,
        0
    );
    assert_eq!(b.bytes(160, 4), b"seen");
    // Invalidated by this side, bound again with another key, invalidated by the peer.
    let sent = b.carry_out(SendOperation::LocalInvalidate(key), &[]);
    assert_eq!((sent.status, sent.opcode), (0, 6));
    assert_eq!(b.carry_out(bind!(b, window, 8), &[]).status, 0);
    b.receive(3, &[]);
    assert_eq!(a.carry_out(SendOperation::SendWithInvalidate(key + 1), &[]).status, 0);
    let received = b.received()[0];
    assert_eq!((received.wc_flags, received.imm_or_key), (Completion::WITH_INV, key + 1));
    assert_eq!(
        a.carry_out(SendOperation::Read(Remote { addr: IOVA + 100, rkey: key + 1 }), &[a.piece(0, 4)]).status,
        10
    );
}

#[test]
fn a_window_is_limited_to_its_bytes_its_queue_pair_and_its_rights() {
    let Some(stub) = good() else { return };
    for place in 0..6 {
        let (a, b) = pair(&stub, Kind::of(RC));
        let (c, _d) = pair(&stub, Kind::of(RC));
        let window = Window::new(&b.domain).unwrap();
        let mut bind = bind!(b, window, 1);
        if let (5, SendOperation::Bind(bind)) = (place, &mut bind) {
            bind.access = access::REMOTE_READ;
        }
        assert_eq!(b.carry_out(bind, &[]).status, 0);
        let remote = Remote { addr: IOVA + 100, rkey: window.rkey() | 1 };
        let (end, operation) = match place {
            0 => (&a, SendOperation::Write(Remote { addr: remote.addr + 61, ..remote })),
            1 => (&a, SendOperation::Write(Remote { addr: remote.addr - 1, ..remote })),
            2 => (&a, SendOperation::Read(Remote { rkey: window.rkey(), ..remote })),
            3 => (&c, SendOperation::Read(remote)),
            5 => (&a, SendOperation::Write(remote)),
            _ => (&a, SendOperation::FetchAdd { remote: Remote { addr: remote.addr + 4, ..remote }, add: 1 }),
        };
        let len = if place == 4 { 8 } else { 4 };
        let piece = end.region.piece(0, len);
        assert_eq!(end.carry_out(operation, &[piece]).status, 10, "{operation:?}");
    }
}

#[test]
fn binds_and_invalidations_that_are_refused() {
    let Some(stub) = good() else { return };
    let good_access = access::REMOTE_READ;
    for place in 0..6 {
        let kind = Kind {
            access: if place == 0 { access::LOCAL_WRITE } else { Kind::of(RC).access },
            ..Kind::of(RC)
        };
        let (a, _b) = pair(&stub, kind);
        let window = Window::new(&a.domain).unwrap();
        let mut bind = Bind {
            window: &window,
            rkey: window.rkey(),
            region: &a.region,
            addr: IOVA,
            length: 8192,
            access: good_access,
        };
        match place {
            1 => bind.length += 1,
            2 => bind.length = 0,
            3 => bind.rkey ^= 0x100,
            4 => bind.access = access::MW_BIND,
            5 => assert_eq!(a.carry_out(SendOperation::Bind(bind), &[]).status, 0),
            _ => {}
        }
        // The last one is already bound.
        assert_eq!((a.carry_out(SendOperation::Bind(bind), &[]).status, a.state()), (6, ERR), "{place}");
    }
    let (a, b) = pair(&stub, Kind::of(RC));
    let window = Window::new(&a.domain).unwrap();
    assert_eq!(a.carry_out(SendOperation::LocalInvalidate(window.rkey()), &[]).status, 2);
    drop(b);
    // The key of a region is not valid for a window: the peer enters the error state, like rdma_rxe, and the sender is
    // not notified.
    let (a, b) = pair(&stub, Kind::of(RC));
    b.receive(1, &[]);
    assert_eq!(a.carry_out(SendOperation::SendWithInvalidate(b.region.rkey()), &[]).status, 0);
    assert_eq!((b.received()[0].status, a.state(), b.state()), (9, RTS, ERR));
}

#[test]
fn a_region_stays_while_a_window_is_bound_to_it() {
    let Some(stub) = good() else { return };
    let (a, b) = pair(&stub, Kind::of(RC));
    let window = Window::new(&b.domain).unwrap();
    assert_eq!(b.carry_out(bind!(b, window, 1), &[]).status, 0);
    let key = b.region.rkey();
    let (region, error) = b.region.deregister().unwrap_err();
    assert_eq!((errno(&error), region.rkey(), region.len()), (libc::EBUSY, key, 8192));
    drop(window);
    assert_eq!(region.deregister().unwrap().len(), 8192);
    drop((a, b.qp));
}
