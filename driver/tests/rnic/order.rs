//! Objects may be dropped in any order, with any work in progress.

use std::any::Any;

use ferroce_driver::Memory;
use ferroce_driver::rnic::{
    AddressHandle, CompletionChannel, CompletionQueue, QueuePair, Region, SendData, SendOperation,
    SharedReceiveQueue, Window,
};
use ferroce_driver_test_support::random::Random;
use ferroce_driver_test_support::rnic_stub::Stub;

use crate::ends::{End, IOVA, Kind, RC, REMOTE, UD, address, config, good, ipv4, warnings};

/// An end in parts, with incomplete work requests, and completions and events that were not taken.
fn busy(stub: &Stub, number: u8, peer: Option<&End>) -> (End, Vec<Box<dyn Any>>) {
    let end = End::new(stub, number, Kind { with_srq: number == 1, ..Kind::of(RC) });
    let channel = CompletionChannel::new(&end.device).unwrap();
    let queue = CompletionQueue::new(4, &channel, 1).unwrap();
    let srq = SharedReceiveQueue::new(&end.domain, 4, 1).unwrap();
    let datagrams =
        QueuePair::new(&end.domain, &config(Kind::of(UD), &queue, &end.sends, Some(&srq))).unwrap();
    let mut group = ipv4(1);
    group[12] = 239;
    datagrams.attach(&group).unwrap();
    let ah = AddressHandle::new(&end.domain, &address(end.gid)).unwrap();
    let window = Window::new(&end.domain).unwrap();
    let region = Region::new(&end.domain, Memory::zeroed(64).unwrap(), REMOTE, IOVA).unwrap();
    end.sends.request_event(false).unwrap();
    if let Some(peer) = peer {
        end.connect(RC, peer);
        peer.connect(RC, &end);
        end.post(SendOperation::Write(peer.remote(0)), &[]);
        // This one waits for a receive WR.
        end.post_flagged(SendOperation::Send, SendData::Pieces(&[]), 0);
    }
    stub.raise(1, end.qp.qpn() as i32);
    stub.raise(1, datagrams.qpn() as i32);
    for kind in [0, 14, 9] {
        stub.raise(kind, 0);
    }
    (
        end,
        vec![
            Box::new(channel),
            Box::new(queue),
            Box::new(srq),
            Box::new(datagrams),
            Box::new(ah),
            Box::new(window),
            Box::new(region),
        ],
    )
}

#[test]
fn objects_are_dropped_in_any_order() {
    let Some(stub) = good() else { return };
    let mut random = Random::from_env("FERROCE_RNIC_SEED");
    for round in 0..200 {
        let (a, mut parts) = busy(&stub, 0, None);
        let (b, others) = busy(&stub, 1, Some(&a));
        parts.extend(others);
        for End { qp, srq, region, sends, receives, channel, domain, device, .. } in [a, b] {
            parts.extend([Box::new(qp) as Box<dyn Any>, Box::new(srq), Box::new(region), Box::new(sends)]);
            parts.extend([
                Box::new(receives) as Box<dyn Any>,
                Box::new(channel),
                Box::new(domain),
                Box::new(device),
            ]);
        }
        assert!(stub.live_objects() >= parts.len() as i32 - 1);
        let warned = warnings(|| {
            while !parts.is_empty() {
                let place = random.below(parts.len() as u64) as usize;
                drop(parts.swap_remove(place));
            }
        });
        assert_eq!((stub.live_objects(), warned), (0, vec![]), "round {round}");
    }
}
