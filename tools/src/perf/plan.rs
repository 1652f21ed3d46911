//! The parameters of a measurement. Both ends agree on them before the first packet.

use clap::ValueEnum;
use ferroce::PathMtu;
use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// What is done with the server's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Operation {
    /// RDMA WRITE into the server's memory.
    Write,
    /// RDMA READ from the server's memory.
    Read,
    /// SEND into receive WRs that the server posts.
    Send,
    /// The operation of -A on 8 bytes of the server's memory.
    Atomic,
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Bandwidth: as many operations outstanding as --tx-depth allows.
    Bw,
    /// Latency: one at a time.
    Lat,
}

/// Which atomic operation, as perftest has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the standard's names; clap would show what is said here in the help")]
pub enum AtomicType {
    #[value(name = "FETCH_AND_ADD")]
    FetchAndAdd,
    #[value(name = "CMP_AND_SWAP")]
    CmpAndSwap,
}

/// Transport service, as perftest has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Service {
    /// Reliable connection.
    #[value(alias = "RC")]
    Rc,
    /// Unreliable connection: WRITE and SEND.
    #[value(alias = "UC")]
    Uc,
    /// Unreliable datagrams: SENDs of one packet.
    #[value(alias = "UD")]
    Ud,
}

impl Service {
    /// `RC`, `UC` or `UD`.
    pub fn name(self) -> &'static str {
        match self {
            Service::Rc => "RC",
            Service::Uc => "UC",
            Service::Ud => "UD",
        }
    }
}

/// The client's parameters; the server adopts them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The operation.
    pub operation: Operation,
    /// Bandwidth or latency.
    pub mode: Mode,
    /// The atomic operation, if it is one.
    pub atomic: AtomicType,
    /// The transport service.
    pub service: Service,
    /// Whether both ends send at the same time.
    pub bidirectional: bool,
    /// Queue pairs, 1 to [`MAX_QPS`].
    pub qps: u32,
    /// Work requests of a send queue, 1 to [`MAX_DEPTH`].
    pub tx_depth: u32,
    /// Work requests of a receive queue, 1 to [`MAX_DEPTH`].
    pub rx_depth: u32,
    /// READs and atomics outstanding on a queue pair.
    pub outstanding: u8,
    /// ACK timeout, 4.096 µs · 2^timeout.
    pub timeout: u8,
    /// Selective repeat in place of go-back-N.
    pub selective_repeat: bool,
    /// Whether each byte that arrives is compared with the expected one.
    pub check: bool,
}

/// The most queue pairs. This and the following limits keep a client from making a server allocate without bound.
pub const MAX_QPS: u32 = 64;
/// The most work requests of a queue.
pub const MAX_DEPTH: u32 = 16384;
/// The most bytes of a message.
pub const MAX_SIZE: u32 = 1 << 30;
/// An echo up to this length is not considered an amplification of its request.
const SHORT_ECHO: u32 = 256;
/// The most messages on a queue pair in one lap: more than any run can send.
pub const MAX_MESSAGES: u64 = 1 << 48;
const MAX_REGION: u64 = 4 << 30;

impl Plan {
    /// Checks values that may come from another machine.
    ///
    /// # Errors
    /// A value is out of range, or values are inconsistent.
    pub fn check_limits(&self) -> Result<(), Failure> {
        let limits = [
            ("queue pairs (-q)", self.qps, 1, if self.mode == Mode::Lat { 1 } else { MAX_QPS }),
            ("tx depth (-t)", self.tx_depth, 1, MAX_DEPTH),
            ("rx depth (-r)", self.rx_depth, 1, MAX_DEPTH),
            ("outstanding READs and atomics (-o)", self.outstanding.into(), 1, 128),
            ("ACK timeout (-u)", self.timeout.into(), 1, 31),
        ];
        for (what, value, least, most) in limits {
            if value < least || value > most {
                return Err(Failure::usage(format!(
                    "{what} {value}: must be {least} to {most} for {}",
                    self.name()
                )));
            }
        }
        self.check_combination()
    }

    /// Checks the consistency of values.
    fn check_combination(&self) -> Result<(), Failure> {
        let Plan { operation, service, .. } = *self;
        let is_on = match service {
            Service::Rc => true,
            Service::Uc => matches!(operation, Operation::Write | Operation::Send),
            Service::Ud => operation == Operation::Send,
        };
        let (name, test) = (service.name(), self.name());
        let refused = [
            (
                !is_on,
                format!("-c {name}: does not support {test}; RC supports all, UC WRITE and SEND, UD SEND"),
            ),
            (
                self.check && !self.is_reliable(),
                format!("--check: needs -c RC, because {name} may lose messages"),
            ),
            (
                self.selective_repeat && !self.is_reliable(),
                format!("--selective-repeat: needs -c RC, because {name} does not retransmit"),
            ),
            (
                self.bidirectional && (self.mode == Mode::Lat || operation == Operation::Atomic),
                format!("-b: is for bandwidth of WRITE, READ and SEND, not for {test}"),
            ),
        ];
        match refused.into_iter().find(|(given, _)| *given) {
            Some((_, why)) => Err(Failure::Usage(why)),
            None => Ok(()),
        }
    }

    /// Checks the length of a message.
    pub fn check_size(&self, size: u32) -> Result<(), Failure> {
        let most = (MAX_REGION / u64::from(self.qps)).min(u64::from(MAX_SIZE));
        if size == 0 || u64::from(size) > most {
            let qps = self.qps;
            return Err(Failure::usage(format!(
                "size (-s) {size}: must be 1 to {most} bytes with {qps} queue pairs"
            )));
        }
        if self.operation == Operation::Atomic && size != 8 {
            return Err(Failure::usage(format!("size (-s) {size}: must be 8 bytes for atomics")));
        }
        Ok(())
    }

    /// Checks the length of a datagram, which must fit into one packet.
    pub fn check_datagram(&self, size: u32, path_mtu: PathMtu) -> Result<(), Failure> {
        if self.service != Service::Ud || size <= path_mtu.bytes() {
            return Ok(());
        }
        Err(Failure::usage(format!(
            "size (-s) {size}: must be at most {path_mtu} bytes with UD, the path MTU of both ends"
        )))
    }

    /// Checks the number of messages on each queue pair in the next lap. With `--check`, all messages of a lap must fit
    /// into memory.
    pub fn check_lap(&self, size: u32, messages: &[u64]) -> Result<(), Failure> {
        let most = if self.check { Layout::new(self, size).slots } else { MAX_MESSAGES };
        match messages.iter().find(|count| **count > most) {
            Some(count) => {
                let why = if self.check { "under --check" } else { "at a time" };
                Err(Failure::run(format!(
                    "the client announces {count} messages of {size} bytes on a queue pair: must be at most {most} \
                     {why}"
                )))
            }
            None => Ok(()),
        }
    }

    /// `write bw`, as on the command line.
    pub fn name(&self) -> String {
        format!("{:?} {:?}", self.operation, self.mode).to_lowercase()
    }

    /// Whether the server sends each message back: SEND and WRITE latency is half a round trip.
    pub fn echoes(&self) -> bool {
        self.mode == Mode::Lat && matches!(self.operation, Operation::Write | Operation::Send)
    }

    /// Whether the server sends messages, too.
    pub fn goes_both_ways(&self) -> bool {
        self.echoes() || self.bidirectional
    }

    /// Whether the server sends far more than it receives, with messages of `size` bytes: its own messages, READ
    /// responses, unacknowledged echoes, or long echoes of WRITEs that may be one byte long.
    pub fn pours(&self, size: u32) -> bool {
        let echo = if self.is_reliable() { self.doorbell() && size > SHORT_ECHO } else { self.echoes() };
        self.bidirectional || self.operation == Operation::Read || echo
    }

    /// Whether this end can and must count arriving messages: all SENDs, and WRITEs that may be lost.
    pub fn is_counted(&self) -> bool {
        self.operation == Operation::Send || !self.is_reliable()
    }

    /// Whether every message that is sent arrives.
    pub fn is_reliable(&self) -> bool {
        self.service == Service::Rc
    }

    /// Bytes before a received message: the network header of a datagram.
    pub fn header(&self) -> u32 {
        if self.service == Service::Ud { 40 } else { 0 }
    }

    /// Whether the last byte of a message signals its arrival: a WRITE has no other signal.
    pub fn doorbell(&self) -> bool {
        self.echoes() && self.operation == Operation::Write
    }
}

/// The positions of messages in a region: each queue pair has its own slots, used in turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Bytes of a message.
    pub size: u32,
    /// Slots of a queue pair; they are reused in turn.
    pub slots: u64,
    stride: u64,
    qps: u64,
}

/// The most bytes of a lap, so that memory does not grow with the run.
const LAP_BYTES: u64 = 64 << 20;
/// Without `--check`, messages stay in the cache.
const UNCHECKED_BYTES: u64 = 256 << 10;

impl Layout {
    /// The layout for messages of `size` bytes.
    pub fn new(plan: &Plan, size: u32) -> Layout {
        let stride = u64::from(size + plan.header()).next_multiple_of(8);
        let qps = u64::from(plan.qps);
        let budget = if plan.check { LAP_BYTES } else { UNCHECKED_BYTES };
        let most = if plan.check { u64::MAX } else { u64::from(plan.tx_depth) };
        Layout { size, slots: (budget / (stride * qps)).min(most).max(1), stride, qps }
    }

    /// One slot for each queue pair: the server's counters of atomics.
    pub fn single(plan: &Plan, size: u32) -> Layout {
        Layout { slots: 1, ..Layout::new(plan, size) }
    }

    /// One slot for each queue pair, at least `spacing` bytes apart.
    pub fn spaced(plan: &Plan, size: u32, spacing: u32) -> Layout {
        let stride = u64::from((size + plan.header()).max(spacing)).next_multiple_of(8);
        Layout { size, slots: 1, stride, qps: plan.qps.into() }
    }

    /// Bytes of the region.
    pub fn region_len(&self) -> u64 {
        self.slots * self.stride * self.qps
    }

    /// The offset of a message.
    pub fn offset(&self, qp: usize, message: u64) -> u64 {
        qp as u64 * self.slots * self.stride + self.slot_offset(message)
    }

    /// The offset of a message from the first one of its queue pair.
    pub fn slot_offset(&self, message: u64) -> u64 {
        message % self.slots * self.stride
    }

    /// The range of a message.
    pub fn range(&self, qp: usize, message: u64) -> std::ops::Range<usize> {
        let start = self.offset(qp, message) as usize;
        start..start + self.size as usize
    }
}

/// Distributes `messages` over `qps` queue pairs.
pub fn shares(messages: u64, qps: u32) -> Vec<u64> {
    let qps = u64::from(qps);
    (0..qps).map(|qp| messages / qps + u64::from(qp < messages % qps)).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn plan(qps: u32, check: bool) -> Plan {
        Plan {
            operation: Operation::Write,
            mode: Mode::Bw,
            atomic: AtomicType::FetchAndAdd,
            service: Service::Rc,
            bidirectional: false,
            qps,
            tx_depth: 128,
            rx_depth: 512,
            outstanding: 16,
            timeout: 14,
            selective_repeat: false,
            check,
        }
    }

    #[test]
    fn slots_do_not_overlap_and_fill_the_region() {
        for (qps, check, size) in [(1, false, 1), (3, true, 1000), (2, true, 65536), (4, false, 1 << 20)] {
            let layout = Layout::new(&plan(qps, check), size);
            let mut end = 0;
            for qp in 0..qps as usize {
                for slot in 0..layout.slots {
                    let range = layout.range(qp, slot);
                    assert!(range.start >= end && range.start.is_multiple_of(8));
                    assert_eq!(range, layout.range(qp, slot + layout.slots));
                    end = range.end;
                }
            }
            assert!((end as u64) <= layout.region_len() && layout.region_len() - (end as u64) < 8);
        }
    }

    #[test]
    fn shares_add_up() {
        assert_eq!(shares(10, 4), [3, 3, 2, 2]);
        assert_eq!(shares(2, 4), [1, 1, 0, 0]);
    }

    #[test]
    fn sizes_are_bounded() {
        assert!(plan(1, true).check_size(MAX_SIZE).is_ok());
        assert!(plan(1, true).check_size(0).is_err());
        assert!(plan(64, true).check_size(MAX_SIZE).is_err());
        let atomic = Plan { operation: Operation::Atomic, ..plan(1, true) };
        assert!(atomic.check_size(8).is_ok() && atomic.check_size(16).is_err());
    }

    #[test]
    fn laps_are_bounded() {
        let slots = Layout::new(&plan(1, true), 65536).slots;
        assert!(plan(1, true).check_lap(65536, &[slots]).is_ok());
        let refusal = plan(1, true).check_lap(65536, &[slots + 1]).expect_err("too many").to_string();
        assert!(refusal.contains(&slots.to_string()) && refusal.contains("--check"), "{refusal}");
        assert!(plan(1, false).check_lap(1, &[MAX_MESSAGES]).is_ok());
        assert!(plan(2, false).check_lap(1, &[0, u64::MAX]).is_err());
    }

    #[test]
    fn limits_name_the_option() {
        assert!(plan(64, false).check_limits().is_ok());
        let refusal = plan(65, false).check_limits().expect_err("too many").to_string();
        assert!(refusal.contains("-q") && refusal.contains("65") && refusal.contains("64"), "{refusal}");
        let latency = Plan { mode: Mode::Lat, ..plan(2, false) };
        assert!(latency.check_limits().is_err());
    }
}
