//! What can be measured between the two processes, and what comes of it.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// One thing to measure, for a fixed time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Case {
    /// The driver alone, one way: frames of this length, of which only the headers are written.
    RawRate { frame: usize },
    /// The driver alone, one way: frames with this much payload, copied from and to memory of the
    /// applications and checked by a CRC at both ends.
    RawChecked { payload: usize },
    /// The driver alone: a frame there and one back.
    RawRoundTrip { frame: usize },
    /// Messages one way, round robin over queue pairs.
    Rate { op: Op, size: u32, qps: u32 },
    /// A WRITE there and, once it is seen in memory, one back.
    RoundTrip { size: u32 },
    /// A runner at the other end has nothing to do and blocks; then a WRITE comes now and then.
    Idle,
    /// A byte stream one way.
    TcpRate { write: usize },
    /// 64 bytes there and back, both ends spinning on their sockets.
    TcpRoundTrip,
    /// Datagrams one way.
    UdpRate { datagram: usize },
    /// As with TCP.
    UdpRoundTrip,
    /// Puts of UCX one way, over TCP.
    UcxRate { size: u32 },
    /// A put of UCX there and one back.
    UcxRoundTrip { size: u32 },
    /// Slots of shared memory, copied in and out; checked by a CRC at both ends or not.
    Ring { slot: usize, crc: bool },
    /// A slot of one cache line there and one back: how far apart the two cores are.
    RingRoundTrip,
}

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Op {
    Write,
    Read,
    Send,
}

/// What carries out a case. Those of one contender share a process and a port.
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

    /// Whether the threads of both ends want their cores all the time. Those of UCX are other processes'.
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

/// As people write it.
pub(crate) fn bytes(n: usize) -> String {
    ferroce_benches::report::bytes(n as u64)
}

fn plural(n: u32) -> &'static str {
    if n == 1 { "" } else { "s" }
}

/// What one end saw of a case; what it did not look at is 0 or `None`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Seen {
    /// Messages in `nanos`, at the end that counts.
    pub(crate) messages: u64,
    pub(crate) nanos: u64,
    /// CPU time of the thread in the whole case, the time that it took, cycles if the machine counts them, and the messages
    /// that they are for.
    pub(crate) cpu_nanos: u64,
    pub(crate) wall_nanos: u64,
    pub(crate) cycles: Option<u64>,
    pub(crate) handled: u64,
    /// Sent and never seen by the receiver.
    pub(crate) lost: u64,
    /// Nanoseconds of round trips.
    pub(crate) round_trip: Option<RoundTrip>,
    /// The share of a core that the process took while it had nothing to do.
    pub(crate) idle: Option<f64>,
    /// Nanoseconds of a cache line between the cores, before and after, at the end that starts.
    pub(crate) line_nanos: [Option<u32>; 2],
}

/// Nanoseconds there and back.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct RoundTrip {
    pub(crate) count: u64,
    pub(crate) p50: u64,
    pub(crate) p99: u64,
    pub(crate) p999: u64,
}

impl RoundTrip {
    /// Fewer say nothing, however long the first has taken.
    pub(crate) const LEAST: u64 = 1000;

    pub(crate) fn of(times: &Histogram<u64>) -> RoundTrip {
        let at = |quantile| times.value_at_quantile(quantile);
        RoundTrip { count: times.len(), p50: at(0.5), p99: at(0.99), p999: at(0.999) }
    }
}

/// What both ends together saw of a case in one round.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figures {
    /// Messages a second.
    pub(crate) rate: Option<f64>,
    /// Gigabits of payload a second.
    pub(crate) gbps: Option<f64>,
    pub(crate) round_trip: Option<RoundTrip>,
    pub(crate) idle: Option<f64>,
    /// A message's CPU time and cycles at the end that starts and the other one.
    pub(crate) cpu_nanos: [Option<f64>; 2],
    pub(crate) cycles: [Option<f64>; 2],
    /// The share of the time that both ends had their cores, where they spin: the lower one.
    pub(crate) on_core: Option<f64>,
    /// A share of what was sent.
    pub(crate) lost: f64,
}

impl Figures {
    pub(crate) fn of(case: Case, ends: &[Seen; 2]) -> Figures {
        let counted = ends.iter().find(|seen| seen.nanos > 0);
        let rate = counted.map(|seen| seen.messages as f64 * 1e9 / seen.nanos as f64);
        let [a, b] = ends;
        // Who is written to or read from does not notice.
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
