//! What a scripted peer expects of the engine.

use std::time::Duration;

use ferroce::driver;
use ferroce::wire::{Opcode, Sack, Syndrome};
use ferroce::{Config, Context, Counter, Event, Psn, Qpn, WcStatus, WorkCompletion};

use super::{PEER_QPN, Peer};
use crate::cable::{ENGINE_V4, PEER_V4};
use crate::packet::Got;

impl Peer {
    /// Polls the engine at the current time, until there is nothing left to do.
    #[track_caller]
    pub fn poll(&mut self) {
        while self.context.poll(self.now).unwrap() > 0 {}
    }

    /// Advances time; every timer fires at its own time.
    #[track_caller]
    pub fn advance(&mut self, by: Duration) {
        let end = self.now + by;
        self.poll();
        while let Some(due) = self.context.next_timeout().filter(|due| *due <= end) {
            // A timer that is due already fires in the poll before; one nanosecond keeps an engine that returns a past time
            // from stopping the clock.
            self.now = due.max(self.now + Duration::from_nanos(1));
            self.poll();
        }
        self.now = end;
        self.poll();
    }

    // Packets of the engine.

    /// The next packet of the engine, which must be this one.
    #[track_caller]
    pub fn expect(&mut self, opcode: Opcode, psn: u32) -> Got {
        match self.next_packet() {
            Some(got) if (got.opcode, got.psn()) == (opcode, psn & 0xff_ffff) => got,
            Some(got) => panic!(
                "expected {} psn {psn:#x}\n   but got {got}\n{}",
                opcode.name(),
                self.situation("and then")
            ),
            None => {
                panic!("expected {} psn {psn:#x}\n   but got nothing\n{}", opcode.name(), self.situation(""))
            }
        }
    }

    /// The next packet is an ACK of everything up to `psn`.
    #[track_caller]
    pub fn expect_ack(&mut self, psn: u32, msn: u32) {
        self.expect_aeth(Syndrome::ACK.byte(), psn, msn);
    }

    /// The next packet is an Acknowledge with this syndrome byte.
    #[track_caller]
    pub fn expect_nak(&mut self, syndrome: u8, psn: u32, msn: u32) {
        self.expect_aeth(syndrome, psn, msn);
    }

    #[track_caller]
    pub(super) fn expect_aeth(&mut self, syndrome: u8, psn: u32, msn: u32) {
        let got = self.expect(Opcode::RC_ACKNOWLEDGE, psn);
        let aeth = got.extensions.aeth.map(|aeth| (aeth.syndrome_byte(), aeth.msn()));
        if aeth != Some((syndrome, msn)) {
            panic!(
                "expected syndrome {syndrome:#04x} msn {msn}\n   but got {got}\n{}",
                self.situation("and then")
            );
        }
    }

    /// The next packet is a selective acknowledge of everything before `psn` that reports exactly `held`.
    #[track_caller]
    pub fn expect_sack(&mut self, psn: u32, msn: u32, held: &[u32]) {
        let got = self.expect(Opcode::SELECTIVE_ACKNOWLEDGE, psn);
        let sack = got.sack().expect("a whole map");
        let named: Vec<u32> =
            (1..Sack::SPAN).map(|i| psn + i).filter(|psn| sack.holds(Psn::new(*psn))).collect();
        let aeth = got.extensions.aeth.map(|aeth| (aeth.syndrome_byte(), aeth.msn()));
        assert_eq!((aeth, &named[..]), (Some((Syndrome::ACK.byte(), msn)), held), "of {got}");
        assert!(!sack.holds(Psn::new(psn)), "the missing one is named in {got}");
    }

    /// From now on the port accepts this many packets of the engine; it is blocked after them.
    pub fn take_at_most(&mut self, packets: usize) {
        self.cable.set_room(packets);
    }

    /// From now on the port's buffers are filled with bytes that differ at each place between values of `poison`.
    pub fn poison(&mut self, poison: u8) {
        self.cable.set_poison(poison);
    }

    /// How often the port was queried for a next hop, which may block.
    pub fn resolved(&self) -> u64 {
        self.cable.resolved()
    }

    /// The engine has nothing to send.
    #[track_caller]
    pub fn expect_nothing(&mut self) {
        self.poll();
        if !self.cable.waiting().is_empty() {
            panic!("expected no packet\n{}", self.situation("but got"));
        }
    }

    /// Takes all packets that the engine has sent.
    #[track_caller]
    pub fn take_packets(&mut self) -> Vec<Got> {
        std::iter::from_fn(|| self.next_packet()).collect()
    }

    #[track_caller]
    pub(super) fn next_packet(&mut self) -> Option<Got> {
        self.poll();
        let (at, frame) = self.cable.next_frame()?;
        let got = Got::parse(at, frame);
        assert!(
            [PEER_QPN, Qpn::MULTICAST, Qpn::GSI].contains(&got.bth.dest_qpn()),
            "destination of {got}: {}",
            got.bth.dest_qpn()
        );
        Some(got)
    }

    /// Allocations until now are permitted, as part of a first use.
    pub fn forget_allocations(&mut self) {
        self.cable.forget_allocations();
    }

    /// Ends the context, and replaces it by an empty one. Returns the packets sent at its end.
    pub fn end(&mut self) -> Vec<Got> {
        let (port, _) = driver::loopback::pair(&[ENGINE_V4], &[PEER_V4]);
        let empty = Context::open(Box::new(port), &Config::default()).unwrap();
        drop(std::mem::replace(&mut self.context, empty));
        self.cq = self.context.create_cq(1).unwrap();
        self.take_packets()
    }

    // Completions and events of the engine.

    /// The next completion, which must be this one.
    #[track_caller]
    pub fn expect_wc(&mut self, wr_id: u64, status: WcStatus) -> WorkCompletion {
        self.poll();
        match self.context.poll_cq(self.cq).unwrap() {
            Some(wc) if (wc.wr_id, wc.status) == (wr_id, status) => wc,
            Some(wc) => {
                panic!(
                    "expected completion of {wr_id}: {status:?}\n   but got {wc:?}\n{}",
                    self.situation("")
                )
            }
            None => {
                panic!("expected completion of {wr_id}: {status:?}\n   but got none\n{}", self.situation(""))
            }
        }
    }

    /// There is no completion.
    #[track_caller]
    pub fn expect_no_wc(&mut self) {
        self.poll();
        if let Some(wc) = self.context.poll_cq(self.cq).unwrap() {
            panic!("expected no completion\n   but got {wc:?}\n{}", self.situation(""));
        }
    }

    /// The next event, which must be this one.
    #[track_caller]
    pub fn expect_event(&mut self, event: Event) {
        self.poll();
        assert_eq!(self.context.next_event(), Some(event), "the next event");
    }

    /// There is no event.
    #[track_caller]
    pub fn expect_no_event(&mut self) {
        self.poll();
        assert_eq!(self.context.next_event(), None, "the next event");
    }

    /// `counter` has counted `times` since the last query.
    #[track_caller]
    pub fn expect_counted(&mut self, counter: Counter, times: u64) {
        self.poll();
        let value = self.context.counters().value(counter);
        let before = self.asked.insert(counter, value).unwrap_or(0);
        if value - before != times {
            panic!(
                "expected {} to count {times}\n   but it did {}\n{}",
                counter.name(),
                value - before,
                self.situation("")
            );
        }
    }

    /// Pending packets, completions and events, for messages of failures.
    pub(super) fn situation(&self, waiting: &str) -> String {
        let mut text = String::new();
        for (at, frame) in self.cable.waiting() {
            text.push_str(&format!("   {waiting} {}\n", Got::parse(at, frame)));
        }
        text.push_str(&format!("it is {:?}; {:?}\n", Duration::from_nanos(self.now.0), self.query()));
        text.push_str(&self.context.counters().to_string());
        text
    }
}
