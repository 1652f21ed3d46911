//! The reference host: the NIC of the published simulators, with packets of a fixed size, no window, ACKs without an effect
//! on the rate. Its reaction point and its pacer are those of the engine.

use ferroce::driver::sim::LinkConfig;
use ferroce::driver::sim::fabric::{
    BufferConfig, Fabric, FabricConfig, HostConfig, HostPort, PfcConfig, PortId, SwitchConfig, Threshold,
};
use ferroce::driver::{NextHop, PacketDriver};
use ferroce::{Dcqcn, Nanos, Pacer, ReactionPoint};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

/// The differences between the simulators (pcap-fixtures/dcqcn/README.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    /// A CNP every 50 µs, on a grid from a flow's first packet, if anything was marked; progress counts arrived bytes.
    Zhu,
    /// An ACK for each packet, with its mark; progress counts sent bytes. Go-back-N.
    Mlx,
}

/// One of the four sets of parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Set {
    pub(crate) name: &'static str,
    pub(crate) style: Style,
    pub(crate) parameters: Dcqcn,
    /// Nominal, in bit/s.
    pub(crate) line_rate: u64,
    /// Bytes of a packet, and its time on a link in whole ns.
    pub(crate) packet: u32,
    pub(crate) serialisation: u64,
    /// Kmin, Kmax and Pmax.
    pub(crate) ecn: (u64, u64, f64),
    pub(crate) headroom: u64,
    pub(crate) pool: u64,
}

pub(crate) const ZHU25: Set = Set {
    name: "zhu25",
    style: Style::Zhu,
    parameters: Dcqcn::ZHU25,
    line_rate: 25_000_000_000,
    packet: 1020,
    serialisation: 326,
    ecn: (41_200, 1_030_000, 1.0),
    headroom: 0,
    pool: 1 << 30,
};

pub(crate) const ZHU25P: Set =
    Set { name: "zhu25p", parameters: Dcqcn::ZHU25P, ecn: (5150, 206_000, 0.01), ..ZHU25 };

pub(crate) const MLX25: Set = Set {
    name: "mlx25",
    style: Style::Mlx,
    parameters: Dcqcn::MLX25,
    line_rate: 25_000_000_000,
    packet: 1048,
    serialisation: 335,
    ecn: (41_000, 1_030_000, 1.0),
    headroom: 9375,
    pool: 16 << 20,
};

pub(crate) const HPCC100: Set = Set {
    name: "hpcc100",
    parameters: Dcqcn::HPCC100,
    line_rate: 100_000_000_000,
    serialisation: 83,
    ecn: (400_000, 1_600_000, 0.2),
    headroom: 37_500,
    pool: 32 << 20,
    ..MLX25
};

/// The times of a flow, in ns from the beginning.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    pub(crate) start: u64,
    pub(crate) stop: u64,
    pub(crate) packets: u32,
}

impl Job {
    pub(crate) const ENDLESS: Job = Job { start: 0, stop: u64::MAX, packets: u32::MAX };
}

/// Hosts around a switch: host 0 receives, each of the others has a flow to it.
pub(crate) struct Star {
    set: Set,
    fabric: Fabric,
    /// Of the switch: to the receiver, and from each host.
    pub(crate) bottleneck: PortId,
    ports: Vec<PortId>,
    hosts: Vec<HostPort>,
    macs: Vec<[u8; 6]>,
    flows: Vec<Flow>,
    agenda: BinaryHeap<Reverse<(u64, Item)>>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Item {
    /// A flow may send.
    Send(usize),
    /// The receiver checks whether any packet of a flow was marked.
    Notify(usize),
}

pub(crate) struct Flow {
    job: Job,
    point: ReactionPoint,
    pacer: Pacer,
    /// When the next packet may leave, and the rate until then.
    ready: u64,
    rate: u64,
    /// Packets: the next to send, and the first unacknowledged.
    next: u32,
    unacknowledged: u32,
    /// A packet waits because the port is paused.
    is_held: bool,
    /// At the receiver.
    expected: u32,
    nacked: Option<(u32, u64)>,
    is_marked: bool,
    has_begun: bool,
    /// When the last packet has arrived (zhu), or was acknowledged (mlx).
    pub(crate) finished: Option<u64>,
    pub(crate) cnps: u32,
}

/// Virtual time at the beginning.
const BEGIN: u64 = 1_000_000;
/// The interval of CNPs at the receiver.
const GRID: u64 = 50_000;
const NACK_INTERVAL: u64 = 500_000;

const DATA: u8 = 0;
const CNP: u8 = 1;
const ACK: u8 = 2;
const NACK: u8 = 3;
/// The position of a packet's own header, after Ethernet, IPv4 and UDP: kind, mark, flow, number.
const BODY: usize = 42;
const CONTROL_LEN: usize = 60;

impl Star {
    /// `adjust` changes the switch; `obeys_pfc` is for the hosts.
    pub(crate) fn new(
        set: Set,
        seed: u64,
        jobs: &[Job],
        obeys_pfc: bool,
        adjust: impl Fn(SwitchConfig) -> SwitchConfig,
    ) -> Star {
        // The packet's time is a whole number of ns, so the link is a little faster than nominal.
        let bits = u64::from(set.packet) * 8_000_000_000;
        let link =
            LinkConfig::default().rate(bits.div_ceil(set.serialisation)).delay(Duration::from_micros(1));
        let (kmin, kmax, pmax) = set.ecn;
        // That simulator does not count the first packet of a queue.
        let first = if set.style == Style::Zhu { 1030 } else { 0 };
        let ecn = ferroce::driver::sim::EcnConfig::new(kmin + first, kmax + first, pmax);
        let buffer = BufferConfig::default()
            .pool(set.pool)
            .threshold(Threshold::Dynamic(0.125))
            .headroom(set.headroom)
            .resume_offset(2496)
            .resume_floor(1248)
            .lossy_threshold(Threshold::Dynamic(1.0));
        let switch = SwitchConfig::default().buffer(buffer).ecn(ecn);
        let switch = if set.style == Style::Mlx { switch.pfc(PfcConfig::default()) } else { switch };
        let fabric = Fabric::new(seed, FabricConfig::default().mtu(1200).overhead(0)).unwrap();
        let switch = fabric.add_switch(adjust(switch)).unwrap();
        let host = HostConfig::default().tx_frames(1).obeys_pfc(obeys_pfc);
        let mut hosts = Vec::new();
        let (mut macs, mut ports) = (Vec::new(), Vec::new());
        for n in 0..=jobs.len() as u8 {
            let address = [10, 0, 0, n].into();
            let host = fabric.add_host(host, &[address]).unwrap();
            ports.push(fabric.ends(fabric.link(host, switch, &link).unwrap())[1]);
            hosts.push(fabric.open(host).unwrap());
            let Ok(NextHop::Found(mac)) = hosts[0].resolve(address) else { panic!("no host {n}") };
            macs.push(mac);
        }
        let mut agenda = BinaryHeap::new();
        let flow = |(number, job): (usize, &Job)| {
            let start = BEGIN + job.start;
            agenda.push(Reverse((start, Item::Send(number))));
            let mut pacer = Pacer::new(set.packet);
            // The NIC accumulates no burst.
            pacer.gain(Nanos(start - 1), set.line_rate);
            while pacer.admits() {
                pacer.charge(1);
            }
            Flow {
                job: *job,
                point: ReactionPoint::new(set.parameters, set.line_rate).unwrap(),
                pacer,
                ready: start,
                rate: set.line_rate,
                next: 0,
                unacknowledged: 0,
                is_held: false,
                expected: 0,
                nacked: None,
                is_marked: false,
                has_begun: false,
                finished: None,
                cnps: 0,
            }
        };
        let flows = jobs.iter().enumerate().map(flow).collect();
        Star { set, fabric, bottleneck: ports[0], ports, hosts, macs, flows, agenda }
    }

    /// Runs until `end` ns from the beginning.
    pub(crate) fn run_until(&mut self, end: u64) {
        let end = BEGIN + end;
        let mut woken = Vec::new();
        loop {
            let next = self.agenda.peek().map_or(u64::MAX, |Reverse((time, _))| *time);
            let now = self.fabric.advance_until_woken(Nanos(next.min(end)), &mut woken).0;
            for host in woken.drain(..) {
                self.receive(host.number(), now);
                if let Some(flow) = host.number().checked_sub(1) {
                    if self.flows[flow].is_held && self.waiting(flow) == 0 {
                        self.flows[flow].is_held = false;
                        self.departed(flow, now);
                    }
                    self.send(flow, now);
                }
            }
            while let Some(Reverse((time, item))) = self.agenda.peek().copied()
                && time <= now
            {
                self.agenda.pop();
                match item {
                    Item::Send(flow) => self.send(flow, now),
                    Item::Notify(flow) => self.notify(flow, now),
                }
            }
            if now >= end {
                return;
            }
        }
    }

    pub(crate) fn flows(&self) -> &[Flow] {
        &self.flows
    }

    /// The current rate of a flow, in bit/s; 0 when it does not send.
    pub(crate) fn rate(&mut self, flow: usize, now: u64) -> u64 {
        let flow = &mut self.flows[flow];
        flow.point.advance(Nanos(BEGIN + now));
        if now < flow.job.start || now >= flow.job.stop { 0 } else { flow.point.rate() }
    }

    /// The progress of a flow in bytes: those that arrived in order, or those that were sent.
    pub(crate) fn progress(&self, flow: usize) -> i64 {
        let flow = &self.flows[flow];
        let packets = if self.set.style == Style::Zhu { flow.expected } else { flow.next };
        i64::from(packets) * i64::from(self.set.packet)
    }

    /// Bytes queued for the receiver.
    pub(crate) fn queue(&self) -> u64 {
        self.fabric.queue_bytes(self.bottleneck, 3)
    }

    /// Frames dropped by the switch, and pauses that it started.
    pub(crate) fn drops_and_pauses(&self) -> (u64, u64) {
        let pauses = self.ports.iter().map(|port| self.fabric.port_counters(*port).pauses_sent);
        (self.fabric.counters().dropped(), pauses.sum())
    }

    /// Sends a packet of a flow if it is due.
    fn send(&mut self, number: usize, now: u64) {
        let Set { packet, style, .. } = self.set;
        let flow = &mut self.flows[number];
        let ends = flow.next >= flow.job.packets || now >= BEGIN.saturating_add(flow.job.stop);
        if ends || flow.is_held || now < flow.ready || (style == Style::Zhu && flow.finished.is_some()) {
            return;
        }
        // It was not due for longer, whatever delayed it.
        flow.pacer.gain(Nanos(flow.ready), flow.rate);
        flow.pacer.gain(Nanos(now), 0);
        assert!(flow.pacer.admits(), "the pacer lets a packet leave after each gap");
        let body = (DATA, false, number as u16, flow.next);
        let frame = frame(&self.macs[0], body, packet as usize, (26, 2));
        let host = &mut self.hosts[number + 1];
        assert_eq!(transmit(host, now, &frame), 1, "one packet at a time");
        flow.next += 1;
        flow.pacer.charge(packet);
        // If the port is paused, it leaves later. The port reports when it has room for another one.
        if self.waiting(number) > 0 {
            self.flows[number].is_held = true;
            transmit(&mut self.hosts[number + 1], now, &frame);
        } else {
            self.departed(number, now);
        }
    }

    /// Bytes queued at the port of a flow's sender.
    fn waiting(&self, number: usize) -> u64 {
        self.fabric.queue_bytes(self.fabric.peer(self.ports[number + 1]), 3)
    }

    /// A packet of a flow has left.
    fn departed(&mut self, number: usize, now: u64) {
        let packet = self.set.packet;
        let flow = &mut self.flows[number];
        flow.point.advance(Nanos(now));
        flow.point.on_sent(packet, Nanos(now));
        // The gap is a whole number of ns, and does not change with the rate.
        let bits = u64::from(packet) * 8_000_000_000;
        let gap = bits / flow.point.rate();
        flow.rate = bits.div_ceil(gap);
        flow.ready = now + gap;
        self.agenda.push(Reverse((flow.ready, Item::Send(number))));
    }

    /// Receives packets at a host.
    fn receive(&mut self, host: usize, now: u64) {
        let mut arrived = Vec::new();
        let mut sink = |frame: &[u8]| {
            let body: [u8; 8] = std::array::from_fn(|at| frame[BODY + at]);
            arrived.push((body, frame[15] & 3 == 3));
        };
        while self.hosts[host].rx_burst(Nanos(now), &mut sink).unwrap() > 0 {}
        for ([kind, mark, high, low, number @ ..], is_marked) in arrived {
            let flow = usize::from(u16::from_be_bytes([high, low]));
            let number = u32::from_be_bytes(number);
            match kind {
                DATA if self.set.style == Style::Zhu => self.arrive_zhu(flow, number, is_marked, now),
                DATA => self.arrive_mlx(flow, number, is_marked, now),
                CNP => {
                    self.flows[flow].cnps += 1;
                    self.flows[flow].point.on_cnp(Nanos(now));
                }
                _ => self.acknowledge(flow, (kind == NACK, mark != 0, number), now),
            }
        }
    }

    fn arrive_zhu(&mut self, number: usize, packet: u32, is_marked: bool, now: u64) {
        let flow = &mut self.flows[number];
        assert_eq!(packet, flow.expected, "nothing is lost");
        flow.expected += 1;
        flow.is_marked |= is_marked;
        let is_first = !std::mem::replace(&mut flow.has_begun, true);
        if flow.expected == flow.job.packets {
            flow.finished = Some(now - BEGIN);
        }
        // The grid starts with the first packet itself. In `nopfc` of zhu25 that is marked in one of 20 to 100 flows, which
        // then has one more cut and takes 2.5 ms: fct_burst10.csv has four such flows, of those whose first packet waits.
        if is_first {
            self.notify(number, now);
        }
    }

    fn notify(&mut self, number: usize, now: u64) {
        let flow = &mut self.flows[number];
        if std::mem::take(&mut flow.is_marked) {
            self.control(number, (CNP, false, 0), now);
        }
        if self.flows[number].finished.is_none() {
            self.agenda.push(Reverse((now + GRID, Item::Notify(number))));
        }
    }

    fn arrive_mlx(&mut self, number: usize, packet: u32, is_marked: bool, now: u64) {
        let flow = &mut self.flows[number];
        let kind = match packet.cmp(&flow.expected) {
            std::cmp::Ordering::Equal => {
                flow.expected += 1;
                ACK
            }
            std::cmp::Ordering::Greater => {
                let is_due =
                    flow.nacked.is_none_or(|(last, at)| last != flow.expected || now >= at + NACK_INTERVAL);
                if !is_due {
                    return;
                }
                flow.nacked = Some((flow.expected, now));
                NACK
            }
            std::cmp::Ordering::Less => return,
        };
        let expected = flow.expected;
        self.control(number, (kind, is_marked, expected), now);
    }

    /// An ACK or a NACK has arrived at the sender.
    fn acknowledge(&mut self, number: usize, (is_nack, is_marked, expected): (bool, bool, u32), now: u64) {
        let flow = &mut self.flows[number];
        flow.unacknowledged = flow.unacknowledged.max(expected);
        if flow.unacknowledged == flow.job.packets {
            flow.finished.get_or_insert(now - BEGIN);
        }
        if is_nack {
            flow.next = flow.unacknowledged;
        }
        if is_marked {
            flow.cnps += 1;
            flow.point.on_cnp(Nanos(now));
        }
    }

    /// The receiver sends a small packet to the sender of a flow.
    fn control(&mut self, number: usize, (kind, mark, packet): (u8, bool, u32), now: u64) {
        let frame = frame(&self.macs[number + 1], (kind, mark, number as u16, packet), CONTROL_LEN, (48, 0));
        // Its port sends nothing else, and no ACK is sent before the previous one has started to leave.
        assert_eq!(transmit(&mut self.hosts[0], now, &frame), 1, "room for an acknowledgement");
    }
}

fn frame(
    mac: &[u8; 6],
    (kind, mark, flow, number): (u8, bool, u16, u32),
    len: usize,
    (dscp, ecn): (u8, u8),
) -> Vec<u8> {
    let mut frame = vec![0; len];
    frame[..6].copy_from_slice(mac);
    frame[12..14].copy_from_slice(&[8, 0]);
    (frame[14], frame[15], frame[23]) = (0x45, dscp << 2 | ecn, 17);
    frame[BODY] = kind;
    frame[BODY + 1] = u8::from(mark);
    frame[BODY + 2..BODY + 4].copy_from_slice(&flow.to_be_bytes());
    frame[BODY + 4..BODY + 8].copy_from_slice(&number.to_be_bytes());
    frame
}

fn transmit(port: &mut HostPort, now: u64, frame: &[u8]) -> usize {
    let mut left = Some(());
    let mut source = |buffer: &mut [u8]| {
        left.take()?;
        buffer[..frame.len()].copy_from_slice(frame);
        Some(frame.len())
    };
    port.tx_burst(Nanos(now), &mut source).unwrap()
}
