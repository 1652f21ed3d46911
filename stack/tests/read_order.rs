//! The order in which READs see memory when a response is lost: the lookup of `examples/key_value.rs`.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use ferroce::driver::sim::{LinkConfig, Verdict};
use ferroce::wire::Opcode;
use ferroce::*;
use ferroce_test_support::pair::{Pair, Setup};

/// Number, value, number, of an entry whose owner writes 1, 7, 2 while the second response is lost.
fn looked_up(selective_repeat: bool, fence: bool) -> [u64; 3] {
    let mut pair = Pair::new(1, LinkConfig::default(), Setup { selective_repeat, ..Setup::default() });
    let responses = Arc::new(AtomicU32::new(0));
    let seen = Arc::clone(&responses);
    pair.network.set_filter(Box::new(move |frame| {
        // The opcode is after Ethernet, IPv4 and UDP.
        let is_response = frame.get(42) == Some(&Opcode::RC_READ_RESPONSE_ONLY.byte());
        match is_response && seen.fetch_add(1, Ordering::Relaxed) == 1 {
            true => Verdict::Drop,
            false => Verdict::Pass,
        }
    }));
    let [reader, owner] = &mut pair.ends;
    let (table, remote) = (owner.mr, owner.context.remote(owner.mr).unwrap());
    for (wr_id, at) in [(0, 0), (1, 8), (2, 0)] {
        let sges = [reader.mr.sge(wr_id * 8..wr_id * 8 + 8)];
        let flags = SendFlags::SIGNALED.fence(fence);
        let wr = SendWorkRequest { wr_id, op: SendOp::Read(remote.at(at)), data: Data::Sges(&sges), flags };
        reader.context.post_send(reader.qp, &wr).unwrap();
    }
    // Until all responses before the first retransmission have arrived.
    let first = if fence { 2 } else { 3 };
    while responses.load(Ordering::Relaxed) < first {
        for end in &mut pair.ends {
            end.context.poll(pair.now).unwrap();
        }
        pair.now = pair.now + Duration::from_nanos(100);
    }
    let owner = &mut pair.ends[1].context;
    for (at, value) in [(0, 1), (8, 7), (0, 2)] {
        owner.store_u64(table, at, value).unwrap();
    }
    for wr_id in 0..3 {
        let completion = loop {
            assert!(pair.step(), "READ {wr_id} did not complete");
            let reader = &mut pair.ends[0];
            if let Some(completion) = reader.context.poll_cq(reader.cq).unwrap() {
                break completion;
            }
        };
        assert_eq!((completion.wr_id, completion.status), (wr_id, WcStatus::Success));
    }
    let reader = &pair.ends[0];
    [0, 8, 16].map(|at| reader.context.load_u64(reader.mr, at).unwrap())
}

/// Go-back-N requests all READs after the lost one again.
#[test]
fn reads_see_memory_in_their_order() {
    assert_eq!(looked_up(false, false), [0, 7, 2]);
}

/// Selective repeat requests only the lost one, which then sees later contents than the one after it: a lookup takes 7 for
/// the value of number 0. A fence prevents that (docs/decisions/01-memory.md).
#[test]
fn with_selective_repeat_ordered_reads_need_a_fence() {
    assert_eq!(looked_up(true, false), [0, 7, 0]);
    assert_eq!(looked_up(true, true), [0, 7, 2]);
}
