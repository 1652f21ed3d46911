//! Section F: the reaction of a sender to congestion notification packets. The notification point is in
//! `f_notification.rs`, and the reaction point alone in `stack/tests/dcqcn`.

use std::time::Duration;

use ferroce::driver::sim::LinkConfig;
use ferroce::wire::Opcode;
use ferroce::{
    Config, CongestionControl, Counter, Dcqcn, Nanos, PathMtu, Qp, QpConfig, QpType, Qpn, ReactionState,
    RemoteAddress, SendOp, WcStatus,
};

use crate::packet::{IP, Script, packet};
use crate::pair::{self, End, Pair};
use crate::peer::{Peer, REMOTE, RQ, SQ, Setup, pattern, sge};

const GIGABIT: u64 = 1_000_000_000;

/// A congestion notification packet for the queue pair under test.
fn cnp() -> Script {
    packet(Opcode::CNP, 0).payload(&[0; 16])
}

/// A peer of an engine at 10 Gb/s with the paper's parameters.
fn paper() -> Peer {
    let config =
        |config: Config| config.congestion(CongestionControl::Dcqcn(Dcqcn::PAPER)).line_rate(10 * GIGABIT);
    Peer::with(Setup { config, ..Setup::default() })
}

fn reaction(peer: &Peer, qp: Qp) -> ReactionState {
    peer.context.query_qp(qp).unwrap().reaction.unwrap()
}

#[test]
fn case_104_a_cnp_cuts_the_rate_of_its_queue_pair_alone() {
    let mut peer = paper();
    let other = peer.another_qp(&Setup::default());
    let untouched = reaction(&peer, other);
    assert_eq!((untouched.rate, untouched.target, untouched.alpha), (10 * GIGABIT, 10 * GIGABIT, 1.0));
    peer.inject(cnp());
    peer.expect_counted(Counter::RpCnpHandled, 1);
    let state = reaction(&peer, peer.qp);
    assert_eq!((state.rate, state.target, state.alpha), (5 * GIGABIT, 10 * GIGABIT, 1.0));
    for (stage, rate) in (1..).zip([7_500_000_000, 8_750_000_000, 9_375_000_000, 9_687_500_000]) {
        peer.advance(Duration::from_micros(55));
        let state = reaction(&peer, peer.qp);
        assert_eq!((state.rate, state.target, state.timer_stage), (rate, 10 * GIGABIT, stage));
        assert!((state.alpha - (255.0_f64 / 256.0).powi(stage as i32)).abs() < 1e-12);
    }
    // The next one cuts with the previous alpha, and then raises it. The timer starts again.
    peer.advance(Duration::from_micros(54));
    peer.inject(cnp());
    let alpha = (255.0_f64 / 256.0).powi(4);
    let state = reaction(&peer, peer.qp);
    assert_eq!(state.rate, (9_687_500_000.0 * (1.0 - alpha / 2.0)) as u64);
    assert_eq!((state.target, state.timer_stage), (9_687_500_000, 0));
    assert!((state.alpha - (255.0 * alpha + 1.0) / 256.0).abs() < 1e-12);
    peer.advance(Duration::from_nanos(54_999));
    assert_eq!(reaction(&peer, peer.qp).timer_stage, 0);
    peer.advance(Duration::from_nanos(1));
    assert_eq!(reaction(&peer, peer.qp).timer_stage, 1);
    assert_eq!(reaction(&peer, other), untouched);
}

#[test]
fn case_105_a_cnp_for_nobody_or_from_elsewhere_changes_nothing() {
    let mut peer = paper();
    let before = reaction(&peer, peer.qp);
    let frame = peer.frame(&cnp().dest_qpn(Qpn::new(0x31_3131)));
    peer.expect_dropped(frame, Counter::RxUnknownQp);
    // From another address, to another one of this host, and corrupted.
    let own = peer.address;
    peer.address.source.0[15] = 77;
    let frame = peer.frame(&cnp());
    peer.expect_dropped(frame, Counter::RxWrongAddress);
    peer.address = own;
    peer.address.destination.0[15] = 78;
    let frame = peer.frame(&cnp());
    peer.expect_dropped(frame, Counter::RxWrongAddress);
    peer.address = own;
    let mut frame = peer.frame(&cnp());
    *frame.last_mut().unwrap() ^= 1;
    peer.expect_dropped(frame, Counter::RxIcrcEncapsulated);
    assert_eq!(reaction(&peer, peer.qp), before);
    // The real one is obeyed.
    peer.inject(cnp());
    peer.expect_counted(Counter::RpCnpHandled, 1);
    assert_eq!(reaction(&peer, peer.qp).rate, 5 * GIGABIT);
}

/// Its P_Key is the default one, whatever the queue pair's partition is.
#[test]
fn cnps_are_accepted_in_every_partition() {
    let mut peer = paper();
    peer.inject(cnp().pkey(0x1234));
    peer.expect_counted(Counter::RpCnpHandled, 1);
    peer.expect_nothing();
}

#[test]
fn case_106_a_hundred_cnps_in_one_interval_cut_once() {
    let config =
        |config: Config| config.congestion(CongestionControl::Dcqcn(Dcqcn::MLX25)).line_rate(25 * GIGABIT);
    let mut peer = Peer::with(Setup { config, ..Setup::default() });
    for _ in 0..100 {
        peer.inject(cnp());
    }
    peer.expect_counted(Counter::RpCnpHandled, 100);
    assert_eq!(reaction(&peer, peer.qp).rate, 25 * GIGABIT);
    peer.advance(Duration::from_micros(51));
    assert_eq!(reaction(&peer, peer.qp).rate, 25 * GIGABIT / 2);
    // From then on the rate grows: the next period has no CNP, and no cut at its end.
    let mut before = 25 * GIGABIT / 2;
    for _ in 0..10 {
        peer.advance(Duration::from_micros(50));
        let rate = reaction(&peer, peer.qp).rate;
        assert!(rate >= before, "{rate} after {before}");
        before = rate;
    }
    // Any number of CNPs in each of three periods causes three cuts.
    let mut cuts = 0;
    before = reaction(&peer, peer.qp).rate;
    for micros in 0..250 {
        if micros < 150 {
            peer.inject_all([cnp(), cnp()]);
        }
        peer.advance(Duration::from_micros(1));
        let rate = reaction(&peer, peer.qp).rate;
        cuts += usize::from(rate < before);
        before = rate;
    }
    assert!((3..=4).contains(&cuts), "{cuts} cuts");
}

/// A sender that always has data to send, on a link that is no bottleneck.
struct Sender {
    pair: Pair,
    /// The end that sends the data: the requester, or the other for READs.
    sender: usize,
    op: fn(&End, RemoteAddress) -> SendOp,
    message: u32,
    posted: u64,
}

impl Sender {
    fn new(setup: pair::Setup, op: fn(&End, RemoteAddress) -> SendOp) -> Sender {
        let link = LinkConfig::default().delay(Duration::from_micros(2));
        let pair = Pair::new(3, link, setup);
        let is_read = matches!(op(&pair.ends[0], REMOTE), SendOp::Read(_));
        let message = if setup.qp_type == QpType::Ud { 1024 } else { 1 << 18 };
        Sender { pair, sender: usize::from(is_read), op, message, posted: 0 }
    }

    /// Runs one step. Returns the time, and the number of packets sent by the sender.
    fn step(&mut self) -> (Nanos, u64) {
        let remote = self.pair.ends[1].context.remote(self.pair.ends[1].mr).unwrap();
        let end = &mut self.pair.ends[0];
        while self.posted < 16 {
            let op = (self.op)(end, RemoteAddress { addr: remote.addr, rkey: remote.rkey });
            end.post_send(0, op, 0, self.message);
            self.posted += 1;
        }
        let now = self.pair.now;
        assert!(self.pair.step());
        let end = &mut self.pair.ends[0];
        while let Some(wc) = end.context.poll_cq(end.cq).unwrap() {
            assert_eq!(wc.status, WcStatus::Success);
            self.posted -= 1;
        }
        (now, self.pair.ends[self.sender].context.counters().value(Counter::SentPkts))
    }
}

fn write(_: &End, remote: RemoteAddress) -> SendOp {
    SendOp::Write(remote)
}

fn read(_: &End, remote: RemoteAddress) -> SendOp {
    SendOp::Read(remote)
}

fn datagram(end: &End, _: RemoteAddress) -> SendOp {
    end.send_op()
}

/// Checks the pacing: at most 2 % deviation over the longer of 1 ms and 200 packets. `headers` are the bytes of a frame
/// besides 1024 of payload.
fn assert_paced(setup: pair::Setup, op: fn(&End, RemoteAddress) -> SendOp, headers: u32) {
    let mut sender = Sender::new(setup, op);
    let end = &sender.pair.ends[0];
    let rate = end.context.query_qp(end.qp).unwrap().reaction.unwrap().rate;
    let per_packet = 8e9 * f64::from(headers + 1024) / rate as f64;
    let window = (200.0 * per_packet).max(1e6);
    let (start, first) = sender.step();
    let mut seen = vec![(start, first)];
    let mut from = 0;
    while (seen[seen.len() - 1].0.0 - start.0) as f64 <= 5.0 * window {
        let now = sender.step();
        seen.push(now);
        while (now.0.0 - seen[from].0.0) as f64 > window {
            from += 1;
        }
        if from > 0 {
            let (time, packets) = ((now.0.0 - seen[from].0.0) as f64, (now.1 - seen[from].1) as f64);
            // One packet more or less, because a window need not start with a packet.
            let off = (packets - time / per_packet).abs() - 1.0;
            assert!(off <= 0.02 * time / per_packet, "{off} packets of {packets} off at {rate} bit/s");
        }
    }
    assert!(seen[seen.len() - 1].1 >= 990, "it has sent");
}

#[test]
fn case_107_rates_recover_in_three_steps_and_are_kept() {
    /// Ethernet, IPv4, UDP, BTH, ICRC.
    const HEADERS: u32 = 14 + 20 + 8 + 12 + 4;
    recovers_in_three_steps();
    fn of(config: Config, megabits: u32) -> Config {
        let control = Dcqcn::PAPER.rpg_max_rate(megabits);
        config.congestion(CongestionControl::Dcqcn(control)).line_rate(400 * GIGABIT)
    }
    let rates: [fn(Config) -> Config; 4] = [
        |config| of(config, 100),
        |config| of(config, 1000),
        |config| of(config, 10_000),
        |config| of(config, 100_000),
    ];
    for config in rates {
        // The ACK timer is longer than a window at the lowest rate.
        let setup = pair::Setup { config, timeout: 14, path_mtu: PathMtu::Mtu1024, ..pair::Setup::default() };
        assert_paced(setup, write, HEADERS);
        assert_paced(setup, read, HEADERS);
        assert_paced(pair::Setup { qp_type: QpType::Uc, ..setup }, write, HEADERS);
        assert_paced(pair::Setup { qp_type: QpType::Ud, ..setup }, datagram, HEADERS + 8);
    }
}

/// Fast, additive and hyper increase up to the line rate and not above, never below the lowest rate.
fn recovers_in_three_steps() {
    let config = |config: Config| {
        let control = Dcqcn::PAPER.rpg_byte_reset(20_000);
        config.congestion(CongestionControl::Dcqcn(control)).line_rate(10 * GIGABIT)
    };
    let mut peer = Peer::with(Setup { config, ..Setup::default() });
    for _ in 0..20 {
        peer.inject(cnp());
    }
    let mr = peer.memory(&pattern(256));
    let cut = reaction(&peer, peer.qp);
    assert_eq!(cut.rate, GIGABIT / 10);
    let (mut steps, mut before, mut psn) = ([0; 3], cut, SQ);
    while before.rate < 10 * GIGABIT {
        // Bytes are sent as fast as the rate allows.
        let (op, data) = (SendOp::Write(RemoteAddress { addr: 0, rkey: REMOTE.rkey }), [sge(mr, 256)]);
        peer.post(1, op, &data);
        peer.advance(Duration::from_micros(5));
        for sent in peer.take_packets() {
            psn = sent.psn();
        }
        peer.inject(crate::packet::ack(psn, 0));
        while peer.context.poll_cq(peer.cq).unwrap().is_some() {}
        let state = reaction(&peer, peer.qp);
        assert!((GIGABIT / 10..=10 * GIGABIT).contains(&state.rate), "{state:?}");
        assert!(state.rate >= before.rate && state.target <= 10 * GIGABIT, "{state:?} after {before:?}");
        match state.timer_stage - before.timer_stage + state.byte_stage - before.byte_stage {
            0 => assert_eq!((state.rate, state.target), (before.rate, before.target)),
            1 => {
                let least = state.timer_stage.min(state.byte_stage);
                let (step, more) = match state.timer_stage.max(state.byte_stage) {
                    ..5 => (0, 0),
                    _ if least < 5 => (1, 40_000_000),
                    _ => (2, 200_000_000 * u64::from(least - 4)),
                };
                steps[step] += 1;
                assert_eq!(state.target, (before.target + more).min(10 * GIGABIT), "after {before:?}");
                // Each halving loses a bit, and with two missing the rate is the highest.
                let halfway = (before.rate + state.target) / 2;
                assert!(halfway.abs_diff(state.rate) <= 2, "{state:?} after {before:?}");
            }
            // Both of them in one turn.
            _ => assert!(state.target >= before.target),
        }
        before = state;
    }
    assert!(steps.iter().all(|count| *count > 0), "fast, additive and hyper increases: {steps:?}");
}

/// The ECN bits of an IPv4 frame.
fn ecn(frame: &[u8]) -> u8 {
    frame[IP + 1] & 3
}

#[test]
fn case_108_without_a_control_nothing_is_ecn_capable_and_cnps_are_ignored() {
    let mut peer = Peer::new();
    peer.post_write(1, &pattern(600));
    assert!(peer.take_packets().iter().all(|sent| ecn(&sent.frame) == 0));
    let frame = peer.frame(&cnp());
    peer.expect_dropped(frame, Counter::RpCnpIgnored);
    let attributes = peer.query();
    assert_eq!((attributes.congestion, attributes.reaction), (CongestionControl::Off, None));
    // Marked packets are counted, and answered normally.
    peer.address.traffic_class = 3;
    peer.inject_all((0..100).map(|number| packet(Opcode::RC_WRITE_ONLY, RQ + number)));
    peer.expect_nothing();
    peer.inject(packet(Opcode::RC_WRITE_ONLY, RQ + 100).ack_req());
    let answer = peer.take_packets();
    let answer: Vec<_> = answer.iter().map(|sent| (sent.opcode, ecn(&sent.frame))).collect();
    assert_eq!(answer, [(Opcode::RC_ACKNOWLEDGE, 0)]);
    peer.expect_counted(Counter::NpEcnMarkedRocePackets, 101);
    peer.expect_counted(Counter::NpCnpSent, 0);
}

/// ECT(0) on requests and responses, with a correct ICRC and header checksum; acknowledgements carry no data.
#[test]
fn data_is_ecn_capable_and_acknowledgements_are_not() {
    let mut peer = paper();
    peer.post_write(1, &pattern(600));
    let sent = peer.take_packets();
    assert_eq!(sent.iter().map(|sent| ecn(&sent.frame)).collect::<Vec<_>>(), [2, 2, 2]);
    peer.post_recv(2, 256);
    peer.inject(packet(Opcode::RC_SEND_ONLY, RQ).payload(&[1; 8]).ack_req());
    peer.poll();
    peer.expect_wc(2, WcStatus::Success);
    let sent = peer.take_packets();
    assert_eq!(
        sent.iter().map(|sent| (sent.opcode, ecn(&sent.frame))).collect::<Vec<_>>(),
        [(Opcode::RC_ACKNOWLEDGE, 0)]
    );
    for sent in sent {
        let header = &sent.frame[IP..IP + 20];
        let sum: u32 =
            header.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
        assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
    }
}

/// The driver's, unless it is configured.
#[test]
fn the_line_rate_is_the_drivers_or_configured() {
    let dcqcn = |config: Config| config.congestion(CongestionControl::Dcqcn(Dcqcn::PAPER));
    let told =
        |config: Config| config.congestion(CongestionControl::Dcqcn(Dcqcn::PAPER)).line_rate(10 * GIGABIT);
    for (config, rate) in [(dcqcn as fn(Config) -> Config, 25), (told, 10)] {
        let link = LinkConfig::default().rate(25 * GIGABIT);
        let pair = Pair::new(3, link, pair::Setup { config, ..pair::Setup::default() });
        let end = &pair.ends[0];
        assert_eq!(end.context.query_qp(end.qp).unwrap().reaction.unwrap().rate, rate * GIGABIT);
    }
    let open = |rate: u64| {
        let (port, _) = ferroce::driver::loopback::pair(&[], &[]);
        ferroce::Context::open(Box::new(port), &Config::default().line_rate(rate)).map(drop)
    };
    let expected = "line_rate = 999999: 1000000 to 4000000000000 bit/s";
    assert_eq!(open(999_999).unwrap_err().to_string(), expected);
    assert!(open(1_000_000).is_ok() && open(4_000_000_000_001).is_err());
}

/// If a packet takes longer than the ACK timer of several, each requests an acknowledgement.
#[test]
fn a_slow_sender_asks_often_enough_to_hear_in_time() {
    let config = |config: Config| {
        let control = Dcqcn::PAPER.rpg_min_rate(1).rpg_max_rate(2);
        config.congestion(CongestionControl::Dcqcn(control)).line_rate(10 * GIGABIT)
    };
    let setup = pair::Setup { config, timeout: 14, retry_count: 1, ..pair::Setup::default() };
    let mut sender = Sender::new(setup, write);
    let (start, _) = sender.step();
    let mut now = start;
    while now.0 < start.0 + 3 * GIGABIT {
        now = sender.step().0;
    }
    let counters = sender.pair.ends[0].context.counters();
    assert_eq!(counters.value(Counter::LocalAckTimeoutErr), 0);
    assert!(counters.value(Counter::SentPkts) > 600);
}

#[test]
fn congestion_control_is_set_by_queue_pair_or_context() {
    let mut peer = paper();
    let control = |peer: &mut Peer, config: QpConfig| {
        let qp = peer.context.create_qp(&config).unwrap();
        let control = peer.context.query_qp(qp).unwrap().congestion;
        peer.context.destroy_qp(qp).unwrap();
        control
    };
    let config = QpConfig::rc(peer.pd, peer.cq);
    assert_eq!(control(&mut peer, config), CongestionControl::Dcqcn(Dcqcn::PAPER));
    assert_eq!(control(&mut peer, config.congestion(CongestionControl::Off)), CongestionControl::Off);
    let own = CongestionControl::Dcqcn(Dcqcn::MLX5);
    assert_eq!(control(&mut peer, config.congestion(own)), own);
    let refused =
        |peer: &mut Peer, config: QpConfig| peer.context.create_qp(&config).unwrap_err().to_string();
    let wrong = CongestionControl::Dcqcn(Dcqcn::MLX5.rpg_threshold(0));
    assert_eq!(refused(&mut peer, config.congestion(wrong)), "rpg_threshold = 0: 1 to 31 events");
    assert_eq!(refused(&mut peer, config.window(513)), "window = 513: 1 to 512, the window of the Config");
    assert_eq!(refused(&mut peer, config.window(0)), "window = 0: 1 to 512, the window of the Config");
    let mut peer = Peer::new();
    let config = QpConfig::rc(peer.pd, peer.cq).congestion(own);
    assert_eq!(
        refused(&mut peer, config),
        "line_rate = unknown: bit/s, by Config::line_rate: the driver does not report it, and congestion control \
         starts at it"
    );
}
