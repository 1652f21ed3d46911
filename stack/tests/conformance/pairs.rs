//! Two real contexts instead of a script: for cases about many packets.

use std::time::Duration;

use ferroce::WcStatus::Success;
use ferroce::driver::loopback::{self, Loopback};
use ferroce::{
    AddressVector, Config, Context, Cq, Data, Memory, Mr, Nanos, PacketDriver, Psn, Qp, QpConfig, RKey,
    ReadyToReceive, ReadyToSend, RemoteAddress, RnrTimer, SendFlags, SendOp, SendWorkRequest, Sge,
    Transition, WcStatus,
};

use crate::peer::all_access;

/// Queue pairs between the two.
pub(crate) const QPS: usize = 8;

/// A requester and a responder, connected by queue pairs.
pub(crate) struct Pairs {
    pub(crate) requester: Context,
    pub(crate) responder: Context,
    pub(crate) cq: Cq,
    pub(crate) qps: Vec<Qp>,
    pub(crate) responder_qps: Vec<Qp>,
    /// The results of atomics: 16 words for each queue pair.
    pub(crate) results: Mr,
    /// The words that they change.
    pub(crate) words: Mr,
    now: Nanos,
    /// The last turn moved no frame.
    idle: bool,
}

impl Pairs {
    pub(crate) fn new() -> Pairs {
        let (a, b) = ports();
        Pairs::over([Box::new(a), Box::new(b)])
    }

    /// On the caller's ports.
    pub(crate) fn over(ports: [Box<dyn PacketDriver>; 2]) -> Pairs {
        let mut contexts = ports.map(|port| Context::open(port, &Config::default().seed([7; 32])).unwrap());
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
                    Transition::ReadyToReceive(
                        ReadyToReceive::new(AddressVector::new(gid, 0), dest_qpn, Psn::new(0xff_ff00))
                            .min_rnr_timer(RnrTimer::new(12).unwrap()),
                    ),
                    Transition::ReadyToSend(ReadyToSend::new(Psn::new(0xff_ff00))),
                ];
                for transition in transitions {
                    contexts[end].modify_qp(ends[end].1[i], transition).unwrap();
                }
            }
        }
        let [requester, responder] = contexts;
        let [(cq, qps, results), (_, responder_qps, words)] = ends;
        let now = Nanos(1_000_000);
        Pairs { requester, responder, cq, qps, responder_qps, results, words, now, idle: false }
    }

    /// The word at this offset, as an address for the requester.
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

    /// Posts an empty WRITE to queue pair `q`.
    pub(crate) fn post_nothing(&mut self, q: usize, wr_id: u64, signaled: bool) {
        let op = SendOp::Write(RemoteAddress { addr: 0, rkey: RKey::new(0) });
        let flags = SendFlags::default().signaled(signaled);
        let wr = SendWorkRequest { wr_id, op, data: Data::Sges(&[]), flags };
        self.requester.post_send(self.qps[q], &wr).unwrap();
    }

    /// Polls both. Returns the queue pairs and numbers of the completed work requests.
    pub(crate) fn poll(&mut self) -> Vec<(usize, u64)> {
        let ended = self.poll_any().into_iter();
        let complete = ended.map(|(q, wr_id, status)| {
            assert_eq!(status, Success);
            (q, wr_id)
        });
        complete.collect()
    }

    /// As [`poll`](Pairs::poll), with the status of each.
    pub(crate) fn poll_any(&mut self) -> Vec<(usize, u64, WcStatus)> {
        self.now = self.now + Duration::from_micros(1);
        let frames = self.requester.poll(self.now).unwrap() + self.responder.poll(self.now).unwrap();
        self.idle = frames == 0;
        std::iter::from_fn(|| self.requester.poll_cq(self.cq).unwrap())
            .map(|wc| (self.qps.iter().position(|qp| *qp == wc.qp).unwrap(), wc.wr_id, wc.status))
            .collect()
    }

    /// If nothing moves, advances time to the next event. `false` when there is none.
    pub(crate) fn skip_idle_time(&mut self) -> bool {
        if !self.idle {
            return true;
        }
        let next = [&self.requester, &self.responder].into_iter().filter_map(Context::next_timeout).min();
        self.now = next.map_or(self.now, |next| next.max(self.now));
        next.is_some()
    }

    /// The result of an atomic of queue pair `q` in this slot.
    pub(crate) fn result(&self, q: usize, slot: u64) -> u64 {
        word(self.requester.bytes(self.results).unwrap(), (q as u64 * 16 + slot) * 8)
    }

    /// The word at this offset.
    pub(crate) fn word(&self, offset: u64) -> u64 {
        word(self.responder.bytes(self.words).unwrap(), offset)
    }
}

/// Two connected ports.
pub(crate) fn ports() -> (Loopback, Loopback) {
    loopback::pair(&[[10, 0, 0, 1].into()], &[[10, 0, 0, 2].into()])
}

fn word(bytes: &[u8], offset: u64) -> u64 {
    u64::from_ne_bytes(bytes[offset as usize..][..8].try_into().unwrap())
}
