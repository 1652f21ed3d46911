//! Random packets to one live queue pair: most are nearly valid, so that they are processed far.

use std::time::Duration;

use ferroce::wire::{Extension, Feth, FlushType, Opcode, PayloadRule, Selectivity, Service};
use ferroce::{
    Access, Counters, Data, Memory, Mr, QpState, QpType, Qpn, RKey, ReceiveWorkRequest, SendFlags, SendOp,
    SendWorkRequest, Transition,
};
use ferroce_driver_test_support::random::Random;

use crate::packet::{BTH, NAK_INVALID, NAK_RNR, NAK_SEQUENCE, Script, packet, reseal};
use crate::peer::{PEER_QPN, Peer, QKEY, REMOTE, Setup, all_access, pattern, sge};

/// The queue pair, and its application.
pub(crate) struct Fuzz {
    peer: Peer,
    setup: Setup,
    random: Random,
    /// The memory that the packets may access, until one of them revokes the key.
    target: Mr,
    /// The memory of receives and results.
    own: Mr,
    /// Memory that no packet may change.
    guard: Mr,
}

impl Fuzz {
    pub(crate) fn new(qp_type: QpType, seed: u64) -> Fuzz {
        let setup = Setup { qp_type, timeout: 4, max_dest_rd_atomic: 4, ..Setup::default() };
        let mut peer = Peer::with(setup);
        let [target, own] = [0; 2].map(|_| peer.memory(&pattern(1024)));
        let guard = peer.memory_with(&pattern(1024), Access::LOCAL_WRITE);
        Fuzz { peer, setup, random: Random::new(seed), target, own, guard }
    }

    /// Sends this many packets. A packet that makes the engine panic, allocate, send an invalid frame or write outside its
    /// memory fails the test.
    pub(crate) fn run(mut self, packets: u32) -> Counters {
        for n in 0..packets {
            let alive = self.peer.query().state == QpState::Rts;
            if n % 8 == 0 || !alive && self.random.one_in(2) {
                self.tend();
            }
            let frame = self.frame();
            self.peer.inject_frame(frame);
        }
        self.tend();
        assert_eq!(self.peer.bytes(self.guard), pattern(1024), "memory that nobody was let into");
        self.peer.modify(Transition::Reset);
        self.peer.take_packets();
        while self.peer.context.next_event().is_some() {}
        self.peer.context.counters().clone()
    }

    /// Occasional actions of the application.
    fn tend(&mut self) {
        let Fuzz { peer, setup, random, target, own, .. } = self;
        peer.take_packets();
        while peer.context.next_event().is_some() {}
        while peer.context.poll_cq(peer.cq).unwrap().is_some() {}
        if random.one_in(4) {
            peer.advance(Duration::from_micros(random.below(200)));
            peer.take_packets();
        }
        if peer.query().state != QpState::Rts {
            peer.modify(Transition::Reset);
            while peer.context.poll_cq(peer.cq).unwrap().is_some() {}
            peer.take_to(setup);
        }
        if random.one_in(16) {
            let memory: Memory = peer.context.deregister(*target).unwrap();
            *target = peer.context.register(peer.pd, memory, all_access()).unwrap();
        }
        for _ in 0..random.below(3) {
            let sges = [sge(*own, random.below(600) as usize)];
            if peer.query().outstanding_receives < 4 {
                peer.context.post_recv(peer.qp, &ReceiveWorkRequest { wr_id: 0, sges: &sges }).unwrap();
            }
        }
        if setup.qp_type == QpType::Rc && peer.query().outstanding_sends < 8 {
            let (op, length) = match random.below(4) {
                0 => (SendOp::Send, 600),
                1 => (SendOp::Write(REMOTE), 300),
                2 => (SendOp::Read(REMOTE), 600),
                _ => (SendOp::FetchAdd { remote: REMOTE, add: 1 }, 8),
            };
            let sges = [sge(*own, length)];
            let (data, flags) = (Data::Sges(&sges), SendFlags::SIGNALED);
            peer.context.post_send(peer.qp, &SendWorkRequest { wr_id: 0, op, data, flags }).unwrap();
        }
    }

    fn frame(&mut self) -> Vec<u8> {
        let script = self.script();
        let mut frame = self.peer.frame(&script);
        let random = &mut self.random;
        if random.one_in(8) {
            // Any byte after the network headers, with a matching ICRC or not.
            for _ in 0..=random.below(2) {
                let at = BTH as u64 + random.below((frame.len() - BTH) as u64);
                frame[at as usize] ^= 1 << random.below(8);
            }
            if random.one_in(2) {
                reseal(&mut frame);
            }
        }
        if random.one_in(64) {
            frame.truncate(random.below(frame.len() as u64) as usize);
        }
        frame
    }

    fn script(&mut self) -> Script {
        let key = self.peer.remote(self.target).rkey;
        let query = self.peer.query();
        let random = &mut self.random;
        let opcode = loop {
            let byte = random.any() as u8;
            let service = match self.setup.qp_type {
                QpType::Rc => Service::Rc,
                QpType::Uc => Service::Uc,
                QpType::Ud => Service::Ud,
            };
            let Some(opcode) = Opcode::from_byte(byte) else { continue };
            if opcode.service() == service || random.one_in(64) {
                break opcode;
            }
        };
        let psn = match (opcode.is_request(), random.below(8)) {
            (_, 0) => random.any() as u32,
            (true, 1) => query.rq_psn.value().wrapping_add(random.below(8) as u32).wrapping_sub(4),
            (true, _) => query.rq_psn.value(),
            (false, _) => query.sq_psn.value().wrapping_sub(random.below(10) as u32),
        };
        let most = match opcode.payload() {
            PayloadRule::Full => 256,
            PayloadRule::Exactly(n) => n.into(),
            PayloadRule::Some | PayloadRule::Any => random.below(257),
        };
        let length = if random.one_in(32) { random.below(1200) } else { most };
        let mut script = packet(opcode, psn & 0xff_ffff).payload(&vec![0xee; length as usize]);
        for extension in opcode.extensions() {
            let va = match random.below(8) {
                0 => random.any(),
                1 => 0u64.wrapping_sub(random.below(1024)),
                2 => 1024 - random.below(64),
                _ => random.below(64) * 8,
            };
            let any = RKey::new(random.any() as u32);
            let named = if random.one_in(32) { any } else { key };
            let stated =
                if random.one_in(8) { random.any() as u32 >> random.below(32) } else { length as u32 };
            script = match extension {
                Extension::Deth => {
                    script.deth(if random.one_in(8) { random.any() as u32 } else { QKEY }, PEER_QPN)
                }
                Extension::Reth => script.reth(va, named, stated),
                Extension::AtomicEth => script.atomic_eth(va, named, random.any(), random.below(2)),
                Extension::Aeth => {
                    let fatal = NAK_INVALID + random.below(3) as u8;
                    let any = random.any() as u8;
                    let syndromes = [0x1f, 0x1f, NAK_RNR | 1, NAK_SEQUENCE, NAK_SEQUENCE, fatal, any];
                    script.aeth(syndromes[random.below(7) as usize], random.any() as u32 & 0xff_ffff)
                }
                Extension::AtomicAckEth => script.original(random.any()),
                Extension::ImmDt => script.imm(random.any() as u32),
                Extension::Ieth => script.ieth(if random.one_in(4) { any } else { key }),
                Extension::Feth => {
                    let kind =
                        FlushType { global_visibility: !random.one_in(8), persistence: random.one_in(16) };
                    let whole = random.one_in(2);
                    script.feth(Feth::new(
                        if whole { Selectivity::MemoryRegion } else { Selectivity::Range },
                        kind,
                    ))
                }
            };
        }
        if random.one_in(64) {
            script = script.dest_qpn(Qpn::new(random.any() as u32));
        }
        if random.one_in(2) { script.ack_req() } else { script }
    }
}
