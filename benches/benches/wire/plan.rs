//! The measurements on each link, and the requirements.

use crate::case::{Case, Contender, Figures, Op};
use crate::link::Driver;
use crate::raw::OVERHEAD;

/// A driver with a frame size: its contenders take turns in each round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) driver: Driver,
    /// Of the link.
    pub(crate) mtu: u32,
    pub(crate) path_mtu: u32,
}

pub(crate) const GROUPS: [Group; 9] = [
    Group { driver: Driver::AfXdp, mtu: 1500, path_mtu: 1024 },
    Group { driver: Driver::AfXdp, mtu: 9000, path_mtu: 4096 },
    Group { driver: Driver::Memif, mtu: 1500, path_mtu: 1024 },
    Group { driver: Driver::Memif, mtu: 9000, path_mtu: 4096 },
    Group { driver: Driver::Shm, mtu: 1500, path_mtu: 1024 },
    Group { driver: Driver::Shm, mtu: 9000, path_mtu: 4096 },
    Group { driver: Driver::ShmNoIcrc, mtu: 9000, path_mtu: 4096 },
    Group { driver: Driver::Udp, mtu: 1500, path_mtu: 1024 },
    Group { driver: Driver::Udp, mtu: 9000, path_mtu: 4096 },
];

/// One required result.
pub(crate) struct Line {
    /// The requirement's number, and a letter for each of its figures.
    pub(crate) id: &'static str,
    pub(crate) text: &'static str,
    pub(crate) group: Group,
    pub(crate) figure: Figure,
    pub(crate) bound: Bound,
}

/// How it is computed from the measurements, in each round.
#[derive(Clone, Copy)]
pub(crate) enum Figure {
    Ratio(Measure, Measure),
    /// Difference in nanoseconds.
    Above(Measure, Measure),
    Alone(Measure),
}

#[derive(Clone, Copy)]
pub(crate) struct Measure(pub(crate) Case, pub(crate) Quantity);

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Quantity {
    /// Messages per second.
    Rate,
    /// Payload per second.
    Payload,
    /// Round-trip time in nanoseconds.
    P50,
    P99,
    /// Share of a core.
    Idle,
}

#[derive(Clone, Copy)]
pub(crate) enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

impl Bound {
    pub(crate) fn is_met_by(self, value: f64) -> bool {
        match self {
            Bound::AtLeast(bound) => value >= bound,
            Bound::AtMost(bound) => value <= bound,
        }
    }
}

impl Measure {
    pub(crate) fn of(self, figures: &Figures) -> Option<f64> {
        match self.1 {
            Quantity::Rate => figures.rate,
            Quantity::Payload => figures.gbps,
            Quantity::P50 => figures.round_trip.map(|times| times.p50 as f64),
            Quantity::P99 => figures.round_trip.map(|times| times.p99 as f64),
            Quantity::Idle => figures.idle,
        }
    }
}

impl Figure {
    /// The required cases.
    pub(crate) fn cases(self) -> Vec<Case> {
        match self {
            Figure::Ratio(a, b) | Figure::Above(a, b) => vec![a.0, b.0],
            Figure::Alone(a) => vec![a.0],
        }
    }

    /// The value from the results of each case in one round.
    pub(crate) fn value(self, round: impl Fn(Case) -> Option<Figures>) -> Option<f64> {
        let get = |measure: Measure| measure.of(&round(measure.0)?);
        match self {
            Figure::Ratio(a, b) => Some(get(a)? / get(b)?),
            Figure::Above(a, b) => Some(get(a)? - get(b)?),
            Figure::Alone(a) => get(a),
        }
    }
}

const KIB_64: u32 = 64 << 10;
const MIB: u32 = 1 << 20;
/// A WRITE of 8 bytes, including RETH and ICRC.
pub(crate) const SMALL_FRAME: usize = OVERHEAD + 16 + 8;

const fn write(size: u32, qps: u32) -> Case {
    Case::Rate { op: Op::Write, size, qps }
}

/// All requirements, in order.
pub(crate) fn lines() -> Vec<Line> {
    use Bound::{AtLeast, AtMost};
    use Quantity::{Idle, P50, P99, Payload, Rate};
    let ratio = |a, b, quantity| Figure::Ratio(Measure(a, quantity), Measure(b, quantity));
    let [xdp_1024, xdp_4096, memif_1024, memif_4096, shm_1024, shm_4096, bare_4096, udp_1500, udp_9000] =
        GROUPS;
    let checked = |group: Group| Case::RawChecked { payload: group.path_mtu as usize };
    let ring = |group: Group| Case::Ring { slot: group.path_mtu as usize, crc: true };
    let bare_ring = Case::Ring { slot: bare_4096.path_mtu as usize, crc: false };
    let raw_ping = Case::RawRoundTrip { frame: SMALL_FRAME };
    let ping = Case::RoundTrip { size: 8 };
    let tcp = Case::TcpRate { write: KIB_64 as usize };
    let line = |id, group, text, figure, bound| Line { id, text, group, figure, bound };
    vec![
        line(
            "1a",
            xdp_1024,
            "path MTU 1024, WRITE of 64 KiB : raw with copy and CRC",
            ratio(write(KIB_64, 1), checked(xdp_1024), Payload),
            AtLeast(0.9),
        ),
        line(
            "1b",
            xdp_1024,
            "path MTU 1024, WRITE of 1 MiB : raw with copy and CRC",
            ratio(write(MIB, 1), checked(xdp_1024), Payload),
            AtLeast(0.9),
        ),
        line(
            "1c",
            xdp_4096,
            "path MTU 4096, WRITE of 64 KiB : raw with copy and CRC",
            ratio(write(KIB_64, 1), checked(xdp_4096), Payload),
            AtLeast(0.9),
        ),
        line(
            "1d",
            xdp_4096,
            "path MTU 4096, WRITE of 1 MiB : raw with copy and CRC",
            ratio(write(MIB, 1), checked(xdp_4096), Payload),
            AtLeast(0.9),
        ),
        line(
            "2a",
            xdp_1024,
            "8-byte WRITE : raw frames of 64 B, rate",
            ratio(write(8, 1), Case::RawRate { frame: 64 }, Rate),
            AtLeast(0.9),
        ),
        line("2b", xdp_1024, "8-byte WRITE : raw, round trip p50", ratio(ping, raw_ping, P50), AtMost(1.25)),
        line("2c", xdp_1024, "8-byte WRITE : raw, round trip p99", ratio(ping, raw_ping, P99), AtMost(1.5)),
        line(
            "2d",
            xdp_1024,
            "kernel TCP : 8-byte WRITE, round trip p50",
            ratio(Case::TcpRoundTrip, ping, P50),
            AtLeast(1.8),
        ),
        line(
            "2e",
            xdp_1024,
            "kernel UDP : 8-byte WRITE, round trip p50",
            ratio(Case::UdpRoundTrip, ping, P50),
            AtLeast(1.8),
        ),
        line(
            "3a",
            memif_4096,
            "path MTU 4096, WRITE of 64 KiB : ring of 4 KiB with CRC (aim 0.60)",
            ratio(write(KIB_64, 1), ring(memif_4096), Payload),
            AtLeast(0.5),
        ),
        line(
            "3b",
            memif_4096,
            "path MTU 4096, WRITE of 1 MiB : ring of 4 KiB with CRC (aim 0.60)",
            ratio(write(MIB, 1), ring(memif_4096), Payload),
            AtLeast(0.5),
        ),
        line(
            "3c",
            memif_1024,
            "path MTU 1024, WRITE of 64 KiB : ring of 1 KiB with CRC",
            ratio(write(KIB_64, 1), ring(memif_1024), Payload),
            AtLeast(0.5),
        ),
        line(
            "4a",
            memif_1024,
            "8-byte WRITE, 1 QP, messages a second",
            Figure::Alone(Measure(write(8, 1), Rate)),
            AtLeast(12e6),
        ),
        line(
            "4b",
            memif_1024,
            "8-byte WRITE, 16 QPs, messages a second",
            Figure::Alone(Measure(write(8, 16), Rate)),
            AtLeast(12e6),
        ),
        line(
            "4c",
            memif_1024,
            "8-byte WRITE above raw, round trip p50, ns",
            Figure::Above(Measure(ping, P50), Measure(raw_ping, P50)),
            AtMost(600.0),
        ),
        line(
            "5a",
            xdp_1024,
            "8-byte WRITE, 1024 QPs : 1 QP, rate",
            ratio(write(8, 1024), write(8, 1), Rate),
            AtLeast(0.85),
        ),
        line(
            "5b",
            memif_1024,
            "8-byte WRITE, 1024 QPs : 1 QP, rate",
            ratio(write(8, 1024), write(8, 1), Rate),
            AtLeast(0.85),
        ),
        line(
            "5c",
            udp_1500,
            "8-byte WRITE, 1024 QPs : 1 QP, rate",
            ratio(write(8, 1024), write(8, 1), Rate),
            AtLeast(0.85),
        ),
        line(
            "6a",
            udp_1500,
            "MTU 1500, WRITE of 64 KiB : kernel TCP",
            ratio(write(KIB_64, 1), tcp, Payload),
            AtLeast(1.5),
        ),
        line(
            "6b",
            udp_1500,
            "MTU 1500, WRITE of 1 MiB : kernel TCP",
            ratio(write(MIB, 1), tcp, Payload),
            AtLeast(1.5),
        ),
        line(
            "6c",
            udp_9000,
            "MTU 9000, WRITE of 64 KiB : kernel TCP",
            ratio(write(KIB_64, 1), tcp, Payload),
            AtLeast(1.5),
        ),
        line(
            "6d",
            udp_9000,
            "MTU 9000, WRITE of 1 MiB : kernel TCP",
            ratio(write(MIB, 1), tcp, Payload),
            AtLeast(1.5),
        ),
        line(
            "6e",
            udp_1500,
            "8-byte WRITE : kernel UDP, round trip p50",
            ratio(ping, Case::UdpRoundTrip, P50),
            AtMost(1.1),
        ),
        line(
            "7a",
            xdp_1024,
            "a runner with nothing to do, blocking: share of a core",
            Figure::Alone(Measure(Case::Idle, Idle)),
            AtMost(0.02),
        ),
        line(
            "7b",
            xdp_1024,
            "first WRITE to a runner that blocks, until its completion, p50",
            Figure::Alone(Measure(Case::Idle, P50)),
            AtMost(100e3),
        ),
        line(
            "8a",
            shm_4096,
            "path MTU 4096, WRITE of 64 KiB, Gb/s of payload",
            Figure::Alone(Measure(write(KIB_64, 1), Payload)),
            AtLeast(130.0),
        ),
        line(
            "8b",
            shm_4096,
            "path MTU 4096, WRITE of 64 KiB : ring of 4 KiB with CRC",
            ratio(write(KIB_64, 1), ring(shm_4096), Payload),
            AtLeast(0.5),
        ),
        line(
            "8c",
            shm_1024,
            "path MTU 1024, WRITE of 64 KiB : ring of 1 KiB with CRC",
            ratio(write(KIB_64, 1), ring(shm_1024), Payload),
            AtLeast(0.5),
        ),
        line(
            "8d",
            shm_1024,
            "8-byte WRITE, 1 QP, messages a second",
            Figure::Alone(Measure(write(8, 1), Rate)),
            AtLeast(7e6),
        ),
        line(
            "8e",
            shm_1024,
            "8-byte WRITE, 16 QPs : 1 QP, rate",
            ratio(write(8, 16), write(8, 1), Rate),
            AtLeast(0.9),
        ),
        line(
            "8f",
            shm_1024,
            "8-byte WRITE, 1024 QPs : 1 QP, rate",
            ratio(write(8, 1024), write(8, 1), Rate),
            AtLeast(0.9),
        ),
        line(
            "8g",
            shm_1024,
            "8-byte WRITE, round trip p50, ns",
            Figure::Alone(Measure(ping, P50)),
            AtMost(1000.0),
        ),
        line(
            "8h",
            bare_4096,
            "path MTU 4096, without ICRC, WRITE of 64 KiB, Gb/s of payload",
            Figure::Alone(Measure(write(KIB_64, 1), Payload)),
            AtLeast(160.0),
        ),
        line(
            "8i",
            bare_4096,
            "path MTU 4096, without ICRC, WRITE of 64 KiB : ring of 4 KiB",
            ratio(write(KIB_64, 1), bare_ring, Payload),
            AtLeast(0.5),
        ),
        line(
            "9a",
            udp_1500,
            "MTU 1500, WRITE of 64 KiB, Gb/s of payload",
            Figure::Alone(Measure(write(KIB_64, 1), Payload)),
            AtLeast(28.0),
        ),
        line(
            "9b",
            udp_1500,
            "MTU 1500, WRITE of 1 MiB, Gb/s of payload",
            Figure::Alone(Measure(write(MIB, 1), Payload)),
            AtLeast(31.0),
        ),
        line(
            "9c",
            udp_1500,
            "MTU 1500, WRITE of 64 KiB : raw, segmentation, copy and CRC",
            ratio(write(KIB_64, 1), checked(udp_1500), Payload),
            AtLeast(0.8),
        ),
        line(
            "9d",
            udp_1500,
            "MTU 1500, WRITE of 1 MiB : raw, segmentation, copy and CRC",
            ratio(write(MIB, 1), checked(udp_1500), Payload),
            AtLeast(0.9),
        ),
    ]
}

impl Group {
    /// Further measurements, for the tables: messages of each size, with both operations, and the other stacks on the
    /// same link.
    pub(crate) fn details(self) -> Vec<Case> {
        let payload = self.path_mtu as usize;
        let mut cases = Vec::new();
        // Raw frames are not possible in shared memory; the ring is the reference there.
        if !self.driver.is_shm() {
            cases.extend([
                Case::RawRate { frame: 64 },
                Case::RawRate { frame: payload + OVERHEAD },
                Case::RawChecked { payload },
                Case::RawRoundTrip { frame: SMALL_FRAME },
            ]);
        }
        for size in SIZES {
            for qps in [1, 16] {
                cases.extend([Op::Write, Op::Read, Op::Send].map(|op| Case::Rate { op, size, qps }));
            }
        }
        cases.extend([Op::Write, Op::Read, Op::Send].map(|op| Case::Rate { op, size: 8, qps: 1024 }));
        cases.extend([8, 4096].map(|size| Case::RoundTrip { size }));
        if !(self.driver == Driver::Memif || self.driver.is_shm()) {
            let datagram = self.mtu as usize - 28;
            cases.extend([Case::TcpRate { write: KIB_64 as usize }, Case::TcpRoundTrip]);
            cases.extend([Case::UdpRate { datagram }, Case::UdpRoundTrip]);
            cases.extend(SIZES.map(|size| Case::UcxRate { size }));
            cases.push(Case::UcxRoundTrip { size: 8 });
        }
        if self.driver == Driver::Memif || self.driver.is_shm() {
            cases.extend([Case::Ring { slot: 64, crc: false }, Case::RingRoundTrip]);
            cases.extend([false, true].map(|crc| Case::Ring { slot: payload, crc }));
        }
        cases
    }
}

/// Message sizes, from the smallest to the largest.
pub(crate) const SIZES: [u32; 6] = [8, 512, 4096, 32 << 10, 256 << 10, MIB];

/// In the order of their turns.
pub(crate) const CONTENDERS: [Contender; 6] =
    [Contender::Raw, Contender::Ferroce, Contender::Tcp, Contender::Udp, Contender::Ucx, Contender::Ring];
