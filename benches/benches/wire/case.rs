//! The measurements between the two processes, and their results.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// One measurement, for a fixed time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Case {
    /// The driver alone, in one direction: frames of this length, with only the headers written.
    RawRate { frame: usize },
    /// The driver alone, in one direction: frames with this much payload, copied from and to memory of the applications
    /// and checked by a CRC at both ends.
    RawChecked { payload: usize },
    /// The driver alone: a frame in one direction and one back.
    RawRoundTrip { frame: usize },
    /// Messages in one direction, round robin over queue pairs.
    Rate { op: Op, size: u32, qps: u32 },
    /// A WRITE in one direction and, once it is visible in memory, one back.
    RoundTrip { size: u32 },
    /// A runner at the other end is idle and blocks; WRITEs arrive from time to time.
    Idle,
    /// A byte stream in one direction.
    TcpRate { write: usize },
    /// 64 bytes in one direction and back, with both ends spinning on their sockets.
    TcpRoundTrip,
    /// Datagrams in one direction.
    UdpRate { datagram: usize },
    /// As with TCP.
    UdpRoundTrip,
    /// Puts of UCX in one direction, over TCP.
    UcxRate { size: u32 },
    /// A put of UCX in one direction and one back.
    UcxRoundTrip { size: u32 },
    /// Slots of shared memory, copied in and out; with or without a CRC that is checked at both ends.
    Ring { slot: usize, crc: bool },
    /// A slot of one cache line in one direction and back: the distance of the two cores.
    RingRoundTrip,
}

/// The operation of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Op {
    Write,
    Read,
    Send,
}

/// The implementation that is measured. The cases of one contender share a process and a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Contender {
    Raw,
    Ferroce,
    Tcp,
    Udp,
    Ucx,
    Ring,
}

impl Case {
    pub(crate) fn contender(self) -> Contender {
        match self {
            Case::RawRate { .. } | Case::RawChecked { .. } | Case::RawRoundTrip { .. } => Contender::Raw,
            Case::Rate { .. } | Case::RoundTrip { .. } | Case::Idle => Contender::Ferroce,
            Case::TcpRate { .. } | Case::TcpRoundTrip => Contender::Tcp,
            Case::UdpRate { .. } | Case::UdpRoundTrip => Contender::Udp,
            Case::UcxRate { .. } | Case::UcxRoundTrip { .. } => Contender::Ucx,
            Case::Ring { .. } | Case::RingRoundTrip => Contender::Ring,
        }
    }

    /// Bytes of payload of a message, frame or slot.
    pub(crate) fn payload(self) -> usize {
        match self {
            Case::RawRate { frame } | Case::RawRoundTrip { frame } => frame,
            Case::RawChecked { payload } => payload,
            Case::Rate { size, .. }
            | Case::RoundTrip { size }
            | Case::UcxRate { size }
            | Case::UcxRoundTrip { size } => size as usize,
            Case::TcpRate { write } => write,
            Case::UdpRate { datagram } => datagram,
            Case::Idle => 8,
            Case::TcpRoundTrip | Case::UdpRoundTrip | Case::RingRoundTrip => 64,
            Case::Ring { slot, .. } => slot,
        }
    }

    /// Whether the threads of both ends use their cores all the time. UCX has its own processes.
    pub(crate) fn spins(self) -> bool {
        let sleeps = matches!(self, Case::Idle | Case::TcpRate { .. } | Case::UdpRate { .. });
        !sleeps && self.contender() != Contender::Ucx
    }

    pub(crate) fn is_round_trip(self) -> bool {
        matches!(
            self,
            Case::RawRoundTrip { .. }
                | Case::RoundTrip { .. }
                | Case::Idle
                | Case::TcpRoundTrip
                | Case::UdpRoundTrip
                | Case::UcxRoundTrip { .. }
                | Case::RingRoundTrip
        )
    }
}

impl std::fmt::Display for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            Case::RawRate { frame } => write!(f, "raw, frames of {frame} B"),
            Case::RawChecked { payload } => write!(f, "raw, {payload} B of payload, copy and CRC"),
            Case::RawRoundTrip { frame } => write!(f, "raw, {frame} B there and back"),
            Case::Rate { op, size, qps } => {
                let op = match op {
                    Op::Write => "WRITE",
                    Op::Read => "READ",
                    Op::Send => "SEND",
                };
                write!(f, "ferroce, {op} of {}, {qps} QP{}", bytes(size as usize), plural(qps))
            }
            Case::RoundTrip { size } => {
                write!(f, "ferroce, WRITE of {} there and back", bytes(size as usize))
            }
            Case::Idle => write!(f, "ferroce, first WRITE of 8 B to a blocked runner"),
            Case::TcpRate { write } => write!(f, "TCP, writes of {}", bytes(write)),
            Case::TcpRoundTrip => write!(f, "TCP, 64 B there and back"),
            Case::UdpRate { datagram } => write!(f, "UDP, datagrams of {datagram} B"),
            Case::RingRoundTrip => write!(f, "ring, a cache line there and back"),
            Case::UdpRoundTrip => write!(f, "UDP, 64 B there and back"),
            Case::UcxRate { size } => write!(f, "UCX, put of {}", bytes(size as usize)),
            Case::UcxRoundTrip { size } => write!(f, "UCX, {size} B there and back"),
            Case::Ring { slot, crc } => {
                write!(f, "ring, slots of {}, copy{}", bytes(slot), if crc { " and CRC" } else { "" })
            }
        }
    }
}

/// A size as text.
pub(crate) fn bytes(n: usize) -> String {
    ferroce_benches::report::bytes(n as u64)
}

fn plural(n: u32) -> &'static str {
    if n == 1 { "" } else { "s" }
}

/// The results of a case at one end; values that it did not measure are 0 or `None`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Seen {
    /// Messages in `nanos`, at the end that counts.
    pub(crate) messages: u64,
    pub(crate) nanos: u64,
    /// CPU time of the thread in the whole case, the elapsed time, cycles if the machine counts them, and the messages
    /// that these apply to.
    pub(crate) cpu_nanos: u64,
    pub(crate) wall_nanos: u64,
    pub(crate) cycles: Option<u64>,
    pub(crate) handled: u64,
    /// Sent and not received.
    pub(crate) lost: u64,
    /// Round-trip times in nanoseconds.
    pub(crate) round_trip: Option<RoundTrip>,
    /// The share of a core that the process used while idle.
    pub(crate) idle: Option<f64>,
    /// Nanoseconds of a cache line between the cores, before and after, at the starting end.
    pub(crate) line_nanos: [Option<u32>; 2],
}

/// Round-trip times in nanoseconds.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct RoundTrip {
    pub(crate) count: u64,
    pub(crate) p50: u64,
    pub(crate) p99: u64,
    pub(crate) p999: u64,
}

impl RoundTrip {
    /// The least number of round trips for a result, however long the first one has taken.
    pub(crate) const LEAST: u64 = 1000;

    pub(crate) fn of(times: &Histogram<u64>) -> RoundTrip {
        let at = |quantile| times.value_at_quantile(quantile);
        RoundTrip { count: times.len(), p50: at(0.5), p99: at(0.99), p999: at(0.999) }
    }
}

/// The results of both ends for a case in one round.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figures {
    /// Messages per second.
    pub(crate) rate: Option<f64>,
    /// Gigabits of payload per second.
    pub(crate) gbps: Option<f64>,
    pub(crate) round_trip: Option<RoundTrip>,
    pub(crate) idle: Option<f64>,
    /// CPU time and cycles per message, at the starting end and at the other one.
    pub(crate) cpu_nanos: [Option<f64>; 2],
    pub(crate) cycles: [Option<f64>; 2],
    /// The share of time that spinning ends had their cores: the lower one of both.
    pub(crate) on_core: Option<f64>,
    /// As a share of the sent ones.
    pub(crate) lost: f64,
}

impl Figures {
    pub(crate) fn of(case: Case, ends: &[Seen; 2]) -> Figures {
        let counted = ends.iter().find(|seen| seen.nanos > 0);
        let rate = counted.map(|seen| seen.messages as f64 * 1e9 / seen.nanos as f64);
        let [a, b] = ends;
        // The end whose memory is written or read gets no notification.
        let handled = |seen: &Seen| if seen.handled > 0 { seen.handled } else { a.handled.max(b.handled) };
        let each = |total: u64, seen: &Seen| (handled(seen) > 0).then(|| total as f64 / handled(seen) as f64);
        let lost: u64 = a.lost + b.lost;
        Figures {
            rate,
            gbps: rate.map(|rate| rate * case.payload() as f64 * 8.0 / 1e9),
            round_trip: ends.iter().find_map(|seen| seen.round_trip),
            idle: ends.iter().find_map(|seen| seen.idle),
            cpu_nanos: [each(a.cpu_nanos, a), each(b.cpu_nanos, b)],
            cycles: [a, b].map(|seen| seen.cycles.and_then(|cycles| each(cycles, seen))),
            on_core: case.spins().then(|| {
                let share = |seen: &Seen| seen.cpu_nanos as f64 / seen.wall_nanos.max(1) as f64;
                share(a).min(share(b))
            }),
            lost: lost as f64 / (lost + a.handled.max(b.handled)).max(1) as f64,
        }
    }
}
