//! Two real contexts in place of a script: for cases that are about many packets.

use std::time::Duration;

use ferroce::WcStatus::Success;
use ferroce::driver::loopback;
use ferroce::{
    AddressVector, Config, Context, Cq, Data, Memory, Mr, Nanos, PathMtu, Psn, Qp, QpConfig, ReadyToReceive,
    ReadyToSend, RemoteAddress, RnrTimer, SendFlags, SendOp, SendWorkRequest, Sge, Transition,
};

use crate::peer::all_access;

/// Queue pairs between the two.
pub(crate) const QPS: usize = 8;

/// A requester and a responder, joined by queue pairs.
pub(crate) struct Pairs {
    requester: Context,
    responder: Context,
    cq: Cq,
    qps: Vec<Qp>,
    /// What atomics return: 16 words for each queue pair.
    results: Mr,
    /// What they work on.
    words: Mr,
    now: Nanos,
}

impl Pairs {
    pub(crate) fn new() -> Pairs {
        let addresses = [[10, 0, 0, 1].into(), [10, 0, 0, 2].into()];
        let (a, b) = loopback::pair(&addresses[..1], &addresses[1..]);
        let mut contexts = [a, b].map(|port| {
            Context::open(Box::new(port), &Config { seed: Some([7; 32]), ..Config::default() }).unwrap()
        });
        let ends = contexts.each_mut().map(|context| {
            let pd = context.alloc_pd().unwrap();
            let cq = context.create_cq(1024).unwrap();
            let qps: Vec<Qp> = (0..QPS).map(|_| context.create_qp(&QpConfig::rc(pd, cq)).unwrap()).collect();
            let mr = context.register(pd, Memory::zeroed(QPS * 16 * 8).unwrap(), all_access()).unwrap();
            (cq, qps, mr)
        });
        for end in 0..2 {
            let gid = contexts[1 - end].port().gids[0].gid;
            for i in 0..QPS {
                let dest_qpn = contexts[1 - end].query_qp(ends[1 - end].1[i]).unwrap().qpn;
                let transitions = [
                    Transition::Init { access: all_access() },
                    Transition::ReadyToReceive(ReadyToReceive {
                        address: AddressVector::new(gid, 0),
                        path_mtu: PathMtu::Mtu1024,
                        dest_qpn,
                        rq_psn: Psn::new(0xff_ff00),
                        max_dest_rd_atomic: 16,
                        min_rnr_timer: RnrTimer::new(12).unwrap(),
                    }),
                    Transition::ReadyToSend(ReadyToSend {
                        sq_psn: Psn::new(0xff_ff00),
                        timeout: 14,
                        retry_count: 7,
                        rnr_retry: 7,
                        max_rd_atomic: 16,
                    }),
                ];
                for transition in transitions {
                    contexts[end].modify_qp(ends[end].1[i], transition).unwrap();
                }
            }
        }
        let [requester, responder] = contexts;
        let [(cq, qps, results), (_, _, words)] = ends;
        Pairs { requester, responder, cq, qps, results, words, now: Nanos(1_000_000) }
    }

    /// The word at this offset, as the requester names it.
    pub(crate) fn remote(&self, offset: u64) -> RemoteAddress {
        let remote = self.responder.remote(self.words).unwrap();
        RemoteAddress { addr: remote.addr + offset, rkey: remote.rkey }
    }

    /// Posts an atomic to queue pair `q`, with its result to this slot.
    pub(crate) fn post(&mut self, q: usize, wr_id: u64, op: SendOp, slot: u64) {
        let sges = [Sge { mr: self.results, offset: (q as u64 * 16 + slot) * 8, length: 8 }];
        let wr = SendWorkRequest { wr_id, op, data: Data::Sges(&sges), flags: SendFlags::SIGNALED };
        self.requester.post_send(self.qps[q], &wr).unwrap();
    }

    /// A turn of both. Returns which queue pair has completed which work request.
    pub(crate) fn poll(&mut self) -> Vec<(usize, u64)> {
        self.now = self.now + Duration::from_micros(1);
        self.requester.poll(self.now).unwrap();
        self.responder.poll(self.now).unwrap();
        std::iter::from_fn(|| self.requester.poll_cq(self.cq).unwrap())
            .map(|wc| {
                assert_eq!(wc.status, Success);
                (self.qps.iter().position(|qp| *qp == wc.qp).unwrap(), wc.wr_id)
            })
            .collect()
    }

    /// What an atomic of queue pair `q` has returned to this slot.
    pub(crate) fn result(&self, q: usize, slot: u64) -> u64 {
        word(self.requester.bytes(self.results).unwrap(), (q as u64 * 16 + slot) * 8)
    }

    /// The word at this offset.
    pub(crate) fn word(&self, offset: u64) -> u64 {
        word(self.responder.bytes(self.words).unwrap(), offset)
    }
}

fn word(bytes: &[u8], offset: u64) -> u64 {
    u64::from_ne_bytes(bytes[offset as usize..][..8].try_into().unwrap())
}
