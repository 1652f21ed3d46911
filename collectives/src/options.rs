use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use ferroce::{Idle, PathMtu, Psn, ReadyToSend};

use crate::Error;
use crate::choice::Model;
use crate::schedule::Algorithm;

/// Whether ranks of one host use memory that all of them map, instead of packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SharedMemory {
    /// If all ranks are processes of one user on one host, and see each other's `/proc`. Otherwise the reason is logged.
    #[default]
    Auto,
    /// Never.
    Off,
    /// Always: joining fails if it is impossible.
    Required,
}

impl fmt::Display for SharedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SharedMemory::Auto => "auto",
            SharedMemory::Off => "off",
            SharedMemory::Required => "required",
        })
    }
}

impl FromStr for SharedMemory {
    type Err = Error;

    fn from_str(name: &str) -> Result<SharedMemory, Error> {
        let all = [SharedMemory::Auto, SharedMemory::Off, SharedMemory::Required];
        let found = all.into_iter().find(|how| how.to_string() == name);
        found.ok_or_else(|| Error::invalid("shared memory", name, "auto, off or required"))
    }
}

/// The options of a communicator. All ranks must have the same `chunk_bytes`, `eager_bytes`, `algorithm` and `shared_memory`, and
/// all a `model` or none, which is checked.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
#[non_exhaustive]
pub struct Options {
    /// The path MTU; `None` is the largest that every rank's port supports.
    pub path_mtu: Option<PathMtu>,
    /// Index into the port's GID table; `None` is the first IPv4 address, or else the first entry.
    pub gid_index: Option<usize>,
    /// DSCP and ECN of packets of this rank, the whole byte.
    pub traffic_class: u8,
    /// Bytes of a chunk, into which long operations are divided: a multiple of 8, 1 KiB to 16 MiB. A rank has memory for four to
    /// eight chunks for each other rank whose elements it reduces in long operations.
    pub chunk_bytes: u32,
    /// Messages of up to this many bytes of elements are copied and sent at once; for longer ones the receiver first sends the
    /// destination address. 64 B to 64 KiB. For each other rank that it communicates with, a rank has memory for eight such
    /// messages in each direction with up to 33 ranks, falling to four from 53 ranks on.
    pub eager_bytes: u32,
    /// The algorithm of operations that have it; `None` leaves the choice to the communicator.
    pub algorithm: Option<Algorithm>,
    /// The cost of messages; `None` measures it when the ranks meet through a [`Bootstrap`](crate::Bootstrap), which takes some
    /// milliseconds. All ranks have the same model.
    pub model: Option<Model>,
    /// The identifier of this host, the same only for its ranks; `None` is the kernel's boot ID. For ranks of a simulated fabric.
    pub host: Option<u128>,
    /// Whether ranks of one host use memory that all of them map.
    pub shared_memory: SharedMemory,
    /// ACK timeout, 8.192 µs to 8796 s, rounded up to 4.096 µs · 2ⁿ
    /// ([how](ferroce::manual::connecting#timeouts-and-retries)): the default of 0.5 s to 0.54 s.
    ///
    /// A peer answers while it polls, and if ranks outnumber cores its thread may be off the core for tens of milliseconds. The
    /// default, 0.5 s, is far above that: a shorter timeout retransmits what was not lost. A loss in the middle of a message is
    /// detected by the PSN gap, not by this timer.
    pub ack_timeout: Duration,
    /// Retries after timeouts, 0 to 7. With the defaults a peer is taken as lost after 8 · 0.54 s = 4.3 s without an answer
    /// ([`retry_budget`](Options::retry_budget)).
    pub retry_count: u8,
    /// What a rank does while it waits for its neighbours: [`Idle::Adaptive`] by default, which spins first. If ranks share
    /// cores, a spinning rank takes the core from the rank that it waits for: `Idle::Adaptive { spins: 0, yields: 20 }` yields at
    /// once.
    pub idle: Idle,
    /// After this time without progress the ranks that it waits for are probed (with a datagram), so that a dead rank is noticed
    /// by ranks that only wait for it, too.
    pub probe_interval: Duration,
    /// After this time without progress, although the ranks that it waits for are alive, the call fails. A device of this rank
    /// that completes nothing for seven eighths of this time counts as failed.
    pub stall_timeout: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            path_mtu: None,
            gid_index: None,
            traffic_class: 0,
            chunk_bytes: (256 << 10) - 64,
            eager_bytes: 64 << 10,
            algorithm: None,
            model: None,
            host: None,
            shared_memory: SharedMemory::default(),
            ack_timeout: Duration::from_millis(500),
            retry_count: 7,
            idle: Idle::default(),
            probe_interval: Duration::from_secs(1),
            stall_timeout: Duration::from_secs(60),
        }
    }
}

impl Options {
    /// The path MTU; by default the largest that every rank's port supports.
    pub fn path_mtu(self, path_mtu: impl Into<Option<PathMtu>>) -> Self {
        Options { path_mtu: path_mtu.into(), ..self }
    }

    /// Index into the port's GID table; by default the first IPv4 address, or else the first entry.
    pub fn gid_index(self, gid_index: impl Into<Option<usize>>) -> Self {
        Options { gid_index: gid_index.into(), ..self }
    }

    /// DSCP and ECN of packets of this rank, the whole byte; 0 by default.
    pub fn traffic_class(self, traffic_class: u8) -> Self {
        Options { traffic_class, ..self }
    }

    /// Bytes of a chunk: a multiple of 8, 1 KiB to 16 MiB; 64 bytes less than 256 KiB by default.
    pub fn chunk_bytes(self, chunk_bytes: u32) -> Self {
        Options { chunk_bytes, ..self }
    }

    /// The most bytes of elements that are copied and sent at once, 64 B to 64 KiB; 64 KiB by default.
    pub fn eager_bytes(self, eager_bytes: u32) -> Self {
        Options { eager_bytes, ..self }
    }

    /// The algorithm of operations that have it; by default the communicator chooses.
    pub fn algorithm(self, algorithm: impl Into<Option<Algorithm>>) -> Self {
        Options { algorithm: algorithm.into(), ..self }
    }

    /// The cost of messages; measured by default.
    pub fn model(self, model: impl Into<Option<Model>>) -> Self {
        Options { model: model.into(), ..self }
    }

    /// The identifier of this host, the same only for its ranks; by default the kernel's boot ID.
    pub fn host(self, host: impl Into<Option<u128>>) -> Self {
        Options { host: host.into(), ..self }
    }

    /// Whether ranks of one host use memory that all of them map; by default if possible.
    pub fn shared_memory(self, shared_memory: SharedMemory) -> Self {
        Options { shared_memory, ..self }
    }

    /// ACK timeout, 8.192 µs to 8796 s, rounded up to 4.096 µs · 2ⁿ; 0.5 s, so 0.54 s, by default.
    pub fn ack_timeout(self, ack_timeout: Duration) -> Self {
        Options { ack_timeout, ..self }
    }

    /// Retries after timeouts, 0 to 7; 7 by default.
    pub fn retry_count(self, retry_count: u8) -> Self {
        Options { retry_count, ..self }
    }

    /// What a rank does while it waits for its neighbours; [`Idle::Adaptive`] by default.
    pub fn idle(self, idle: Idle) -> Self {
        Options { idle, ..self }
    }

    /// After this time without progress neighbours are probed; 1 s by default.
    pub fn probe_interval(self, probe_interval: Duration) -> Self {
        Options { probe_interval, ..self }
    }

    /// After this time without progress a call fails; 60 s by default.
    pub fn stall_timeout(self, stall_timeout: Duration) -> Self {
        Options { stall_timeout, ..self }
    }

    /// The time without an answer after which another rank is taken as lost: `retry_count` + 1 ACK timeouts, each rounded up to
    /// 4.096 µs · 2ⁿ. 4.3 s by default.
    pub fn retry_budget(&self) -> Duration {
        self.timeout() * (u32::from(self.retry_count) + 1)
    }

    /// The ACK timeout as it is encoded.
    pub(crate) fn timeout(&self) -> Duration {
        self.ready_to_send(Psn::new(0)).ack_timeout().unwrap_or_default()
    }

    /// The send attributes of a queue pair to a neighbour.
    pub(crate) fn ready_to_send(&self, sq_psn: Psn) -> ReadyToSend {
        ReadyToSend::new(sq_psn).timeout_at_least(self.ack_timeout).retry_count(self.retry_count)
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        if !self.chunk_bytes.is_multiple_of(8) || !(1 << 10..=16 << 20).contains(&self.chunk_bytes) {
            return Err(Error::invalid("chunk_bytes", self.chunk_bytes, "a multiple of 8, 1024 to 2^24"));
        }
        if !(64..=64 << 10).contains(&self.eager_bytes) {
            return Err(Error::invalid("eager_bytes", self.eager_bytes, "64 to 65536"));
        }
        let shortest = Duration::from_nanos(4096 << 1);
        let longest = Duration::from_nanos(4096 << 31);
        if !(shortest..=longest).contains(&self.ack_timeout) {
            let expected = format!("{shortest:?} to {longest:?}");
            return Err(Error::invalid("ack_timeout", format!("{:?}", self.ack_timeout), expected));
        }
        if self.retry_count > 7 {
            return Err(Error::invalid("retry_count", self.retry_count, "0 to 7"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The error names the value and the valid ones.
    #[test]
    fn setters_set_their_fields_and_invalid_values_are_refused() {
        let (ms, s) = (Duration::from_millis, Duration::from_secs);
        let default = Options::default();
        assert_eq!(default.retry_budget().as_millis(), 8 * 536 + 6);
        let set = default
            .path_mtu(PathMtu::Mtu256)
            .gid_index(1)
            .chunk_bytes(1024)
            .eager_bytes(64)
            .algorithm(Algorithm::Tree)
            .host(7)
            .ack_timeout(ms(1))
            .retry_count(1)
            .idle(Idle::Block)
            .probe_interval(ms(2))
            .stall_timeout(ms(3));
        let Options { path_mtu, gid_index, chunk_bytes, eager_bytes, .. } = set;
        assert_eq!((path_mtu, gid_index), (Some(PathMtu::Mtu256), Some(1)));
        assert_eq!((chunk_bytes, eager_bytes, set.ack_timeout, set.retry_count), (1024, 64, ms(1), 1));
        assert_eq!((set.algorithm, set.host), (Some(Algorithm::Tree), Some(7)));
        assert_eq!((set.idle, set.probe_interval, set.stall_timeout), (Idle::Block, ms(2), ms(3)));
        assert_eq!(set.retry_budget().as_micros(), 2 * 1048 + 1);
        for (options, refusal) in [
            (default.chunk_bytes(1028), "chunk_bytes = 1028: a multiple of 8, 1024 to 2^24"),
            (default.eager_bytes(63), "eager_bytes = 63: 64 to 65536"),
            (default.retry_count(8), "retry_count = 8: 0 to 7"),
            (default.ack_timeout(ms(0)), "ack_timeout = 0ns: 8.192µs to 8796.093022208s"),
            (default.ack_timeout(s(8797)), "ack_timeout = 8797s: 8.192µs to 8796.093022208s"),
        ] {
            assert_eq!(options.check().unwrap_err().to_string(), refusal);
        }
    }
}
