use crate::verbs::congestion::check_line_rate;
use crate::verbs::{CongestionControl, CongestionNotification, Error};

/// The default window, in packets to one destination: with a path MTU of 1024 or more above the bandwidth-delay product of
/// 100 Gb/s and 40 µs (500 KB), and below the receive rings of every driver.
pub const DEFAULT_WINDOW: u32 = 512;

/// The most packets that may be unacknowledged: half the PSNs, less one.
pub(crate) const MAX_WINDOW: u32 = (1 << 23) - 1;

/// A sixteenth of the QPNs: as many again stay unused for a while after they are freed, and a free number must be found quickly.
pub(crate) const MAX_QPS: u32 = 1 << 20;

/// As many as there can be queue pairs.
const MAX_CONNECTIONS: u32 = MAX_QPS;

/// The limit of all other objects in a [`Config`].
const MAX_OBJECTS: u32 = 1 << 24;

/// The configuration of a context. All sizes are set here, and nothing is allocated in the poll loop. Begin with the defaults;
/// [`manual::performance`](crate::manual::performance) says what to tune.
///
/// Numbers of objects are at most 2²⁴, unless stated otherwise.
///
/// ```
/// use ferroce::Config;
///
/// let config = Config::default().max_qps(1024).window(256);
/// assert_eq!((config.max_qps, config.window), (1024, 256));
/// ```
///
/// More fields will be added, so it can't be written as a literal:
///
/// ```compile_fail,E0639
/// let config = ferroce::Config { max_qps: 1024, ..ferroce::Config::default() };
/// ```
#[derive(Clone, Debug)]
#[must_use]
#[non_exhaustive]
pub struct Config {
    /// The seed of every random choice (QPNs, keys). `None` takes it from the operating system; a fixed seed makes a run
    /// repeatable and its keys guessable.
    pub seed: Option<[u8; 32]>,
    /// Protection domains.
    pub max_pds: u32,
    /// Memory regions.
    pub max_mrs: u32,
    /// Memory windows.
    pub max_mws: u32,
    /// Completion queues.
    pub max_cqs: u32,
    /// Queue pairs, at most 2²⁰.
    pub max_qps: u32,
    /// Shared receive queues.
    pub max_srqs: u32,
    /// Address handles.
    pub max_ahs: u32,
    /// Attachments of UD queue pairs to multicast groups.
    pub max_mcast_attachments: u32,
    /// Connections and searches of the connection manager, including those that are ending. Their memory, about 3 KiB each, is
    /// allocated by the first `listen`, `connect` or `resolve`.
    pub max_connections: u32,
    /// Listeners of the connection manager.
    pub max_listeners: u32,
    /// Additional queues of connection events. Each allocates about 2 KiB for each of `max_connections` when it is created.
    pub max_cm_channels: u32,
    /// Unacknowledged packets to one destination, 1 to 2²³ − 1: of each queue pair, and of all go-back-N queue pairs to that
    /// destination together. Outstanding responses of READs, atomics, FLUSH and ATOMIC WRITE are counted separately, with the
    /// same limit.
    ///
    /// When more than half of it is in flight, a queue pair waits once it has its share (the window divided by the queue pairs
    /// that have packets in flight). Beyond the window each queue pair may have 4 packets or one READ, and those whose ACK timer
    /// expired share a quarter of the window until an acknowledgement arrives. Packets that a queue pair without an ACK timer
    /// (timeout 0) sent to a dead peer are counted until the queue pair fails, is reset or destroyed.
    pub window: u32,
    /// Packets received out of order that are held, for all queue pairs with selective repeat together; about 4 KiB each. Packets
    /// beyond this are dropped and retransmitted.
    pub reorder_packets: u16,
    /// Whether RoCE v1 frames are accepted, and GIDs of that type offered.
    pub roce_v1: bool,
    /// Requests with an access violation are dropped and counted, although the standard requires a NAK and the end of the
    /// connection: an attacker that forges a peer's address can't end a connection by a wrong key. A peer that sends such a
    /// request by mistake reaches its retry limit.
    pub drop_access_errors: bool,
    /// Whether FLUSH (IBA 1.5) is supported, as requester and responder. Like `atomic_write` it is on by default: it does not
    /// appear on the wire until an application posts one. `rdma_rxe` has both since Linux 6.2, ConnectX has neither and refuses
    /// them with an invalid request NAK.
    pub flush: bool,
    /// Whether ATOMIC WRITE (IBA 1.5) is supported, as requester and responder.
    pub atomic_write: bool,
    /// The congestion control of queue pairs as senders, unless their own configuration sets another.
    pub congestion: CongestionControl,
    /// How senders are notified of packets that a switch marked; `None` for no notification.
    pub notification: Option<CongestionNotification>,
    /// Bytes of a staging chunk, the host memory through which device memory is copied: a power of two from 64 KiB to 16 MiB. One
    /// copy of the device is at most a chunk long.
    pub staging_chunk: u32,
    /// The number of chunks, 4 to 65,535 and 4 GiB in total. They are allocated when device memory is first registered. Half are
    /// for received data, where a packet may need one for each device and one for the host at the same time, and half for this
    /// end's own requests: memory of one more device is refused if there are fewer chunks than twice the number of devices plus
    /// two.
    pub staging_chunks: u16,
    /// The line rate of the port, in bit/s, 10⁶ to 4·10¹²: the initial and the highest rate of congestion control. `None` asks
    /// the driver.
    pub line_rate: Option<u64>,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            seed: None,
            max_pds: 16,
            max_mrs: 1024,
            max_mws: 1024,
            max_cqs: 256,
            max_qps: 256,
            max_srqs: 64,
            max_ahs: 256,
            max_mcast_attachments: 256,
            max_connections: 256,
            max_listeners: 64,
            max_cm_channels: 16,
            window: DEFAULT_WINDOW,
            reorder_packets: 1024,
            roce_v1: false,
            drop_access_errors: false,
            flush: true,
            atomic_write: true,
            congestion: CongestionControl::Off,
            notification: None,
            staging_chunk: 1 << 16,
            staging_chunks: 128,
            line_rate: None,
        }
    }
}

impl Config {
    /// The seed of every random choice (QPNs, keys); from the operating system by default.
    pub fn seed(self, seed: impl Into<Option<[u8; 32]>>) -> Self {
        Config { seed: seed.into(), ..self }
    }

    /// Protection domains, at most 2²⁴; 16 by default.
    pub fn max_pds(self, max_pds: u32) -> Self {
        Config { max_pds, ..self }
    }

    /// Memory regions, at most 2²⁴; 1024 by default.
    pub fn max_mrs(self, max_mrs: u32) -> Self {
        Config { max_mrs, ..self }
    }

    /// Memory windows, at most 2²⁴; 1024 by default.
    pub fn max_mws(self, max_mws: u32) -> Self {
        Config { max_mws, ..self }
    }

    /// Completion queues, at most 2²⁴; 256 by default.
    pub fn max_cqs(self, max_cqs: u32) -> Self {
        Config { max_cqs, ..self }
    }

    /// Queue pairs, at most 2²⁰; 256 by default.
    pub fn max_qps(self, max_qps: u32) -> Self {
        Config { max_qps, ..self }
    }

    /// Shared receive queues, at most 2²⁴; 64 by default.
    pub fn max_srqs(self, max_srqs: u32) -> Self {
        Config { max_srqs, ..self }
    }

    /// Address handles, at most 2²⁴; 256 by default.
    pub fn max_ahs(self, max_ahs: u32) -> Self {
        Config { max_ahs, ..self }
    }

    /// Attachments to multicast groups, at most 2²⁴; 256 by default.
    pub fn max_mcast_attachments(self, max_mcast_attachments: u32) -> Self {
        Config { max_mcast_attachments, ..self }
    }

    /// Connections and searches of the connection manager, at most 2²⁰; 256 by default.
    pub fn max_connections(self, max_connections: u32) -> Self {
        Config { max_connections, ..self }
    }

    /// Listeners of the connection manager, at most 2²⁰; 64 by default.
    pub fn max_listeners(self, max_listeners: u32) -> Self {
        Config { max_listeners, ..self }
    }

    /// Additional queues of connection events, at most 2²⁴; 16 by default.
    pub fn max_cm_channels(self, max_cm_channels: u32) -> Self {
        Config { max_cm_channels, ..self }
    }

    /// Unacknowledged packets to one destination, 1 to 2²³ − 1; [`DEFAULT_WINDOW`] by default.
    pub fn window(self, window: u32) -> Self {
        Config { window, ..self }
    }

    /// Packets that selective repeat holds, about 4 KiB each; 1024 by default.
    pub fn reorder_packets(self, reorder_packets: u16) -> Self {
        Config { reorder_packets, ..self }
    }

    /// RoCE v1 in addition to v2; off by default.
    pub fn roce_v1(self, roce_v1: bool) -> Self {
        Config { roce_v1, ..self }
    }

    /// Drops requests with an access violation; off (a NAK) by default.
    pub fn drop_access_errors(self, drop_access_errors: bool) -> Self {
        Config { drop_access_errors, ..self }
    }

    /// FLUSH, as requester and responder; on by default.
    pub fn flush(self, flush: bool) -> Self {
        Config { flush, ..self }
    }

    /// ATOMIC WRITE, as requester and responder; on by default.
    pub fn atomic_write(self, atomic_write: bool) -> Self {
        Config { atomic_write, ..self }
    }

    /// The congestion control of queue pairs as senders; off by default.
    ///
    /// ```
    /// use ferroce::{Config, CongestionControl, Dcqcn};
    ///
    /// let config = Config::default().congestion(CongestionControl::Dcqcn(Dcqcn::MLX5)).line_rate(25_000_000_000);
    /// ```
    pub fn congestion(self, congestion: CongestionControl) -> Self {
        Config { congestion, ..self }
    }

    /// How senders are notified of packets that a switch marked; not at all by default. Independent of
    /// [`congestion`](Config::congestion), which is for this end's own senders.
    pub fn notification(self, notification: impl Into<Option<CongestionNotification>>) -> Self {
        Config { notification: notification.into(), ..self }
    }

    /// Bytes of a staging chunk; 64 KiB by default.
    pub fn staging_chunk(self, staging_chunk: u32) -> Self {
        Config { staging_chunk, ..self }
    }

    /// The number of staging chunks; 128 by default.
    pub fn staging_chunks(self, staging_chunks: u16) -> Self {
        Config { staging_chunks, ..self }
    }

    /// The line rate of the port, in bit/s; reported by the driver by default.
    pub fn line_rate(self, line_rate: impl Into<Option<u64>>) -> Self {
        Config { line_rate: line_rate.into(), ..self }
    }

    /// Fails on the first setting that is out of its range.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let settings = [
            ("max_pds", self.max_pds, 0, MAX_OBJECTS),
            ("max_mrs", self.max_mrs, 0, MAX_OBJECTS),
            ("max_mws", self.max_mws, 0, MAX_OBJECTS),
            ("max_cqs", self.max_cqs, 0, MAX_OBJECTS),
            ("max_qps", self.max_qps, 0, MAX_QPS),
            ("max_srqs", self.max_srqs, 0, MAX_OBJECTS),
            ("max_ahs", self.max_ahs, 0, MAX_OBJECTS),
            ("max_mcast_attachments", self.max_mcast_attachments, 0, MAX_OBJECTS),
            ("max_connections", self.max_connections, 0, MAX_CONNECTIONS),
            ("max_listeners", self.max_listeners, 0, MAX_CONNECTIONS),
            ("max_cm_channels", self.max_cm_channels, 0, MAX_OBJECTS),
            ("window", self.window, 1, MAX_WINDOW),
        ];
        for (setting, value, least, most) in settings {
            if value < least || value > most {
                return Err(Error::invalid(setting, value, format!("{least} to {most}")));
            }
        }
        self.check_staging()?;
        self.line_rate.map_or(Ok(()), check_line_rate)?;
        self.notification.map_or(Ok(()), |notification| notification.check())
    }

    /// A chunk holds at least 16 packets: one of 16 requests an acknowledgement, so a queue pair with a single chunk makes
    /// progress.
    fn check_staging(&self) -> Result<(), Error> {
        let (chunk, chunks) = (self.staging_chunk, self.staging_chunks);
        if !chunk.is_power_of_two() || !(1 << 16..=1 << 24).contains(&chunk) {
            return Err(Error::invalid("staging_chunk", chunk, "a power of two from 65536 to 16777216"));
        }
        let most = ((1_u64 << 32) / u64::from(chunk)).min(u16::MAX.into());
        if !(4..=most).contains(&chunks.into()) {
            let expected = format!("4 to {most} for chunks of {chunk} bytes");
            return Err(Error::invalid("staging_chunks", chunks, expected));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn staging_is_bounded() {
        let refusal = |chunk, chunks| {
            let config = Config::default().staging_chunk(chunk).staging_chunks(chunks);
            config.check().map_err(|error| error.to_string())
        };
        for (chunk, chunks) in [(1 << 16, 4), (1 << 16, u16::MAX), (1 << 24, 256)] {
            assert_eq!(refusal(chunk, chunks), Ok(()));
        }
        for chunk in [0, 1 << 15, 70_000, 1 << 25] {
            let expected = "a power of two from 65536 to 16777216";
            assert_eq!(refusal(chunk, 128), Err(format!("staging_chunk = {chunk}: {expected}")));
        }
        for (chunk, chunks, most) in [(1 << 16, 3, 65_535), (1 << 24, 257, 256)] {
            let expected = format!("4 to {most} for chunks of {chunk} bytes");
            assert_eq!(refusal(chunk, chunks), Err(format!("staging_chunks = {chunks}: {expected}")));
        }
    }

    /// Of each setting the largest value is accepted, and the next is refused with name, value and range.
    #[test]
    fn every_number_has_a_limit() {
        type Set = fn(&mut Config) -> &mut u32;
        let settings: [(&str, Set, u32); 12] = [
            ("max_pds", |c| &mut c.max_pds, MAX_OBJECTS),
            ("max_mrs", |c| &mut c.max_mrs, MAX_OBJECTS),
            ("max_mws", |c| &mut c.max_mws, MAX_OBJECTS),
            ("max_cqs", |c| &mut c.max_cqs, MAX_OBJECTS),
            ("max_qps", |c| &mut c.max_qps, MAX_QPS),
            ("max_srqs", |c| &mut c.max_srqs, MAX_OBJECTS),
            ("max_ahs", |c| &mut c.max_ahs, MAX_OBJECTS),
            ("max_mcast_attachments", |c| &mut c.max_mcast_attachments, MAX_OBJECTS),
            ("max_connections", |c| &mut c.max_connections, MAX_CONNECTIONS),
            ("max_listeners", |c| &mut c.max_listeners, MAX_CONNECTIONS),
            ("max_cm_channels", |c| &mut c.max_cm_channels, MAX_OBJECTS),
            ("window", |c| &mut c.window, MAX_WINDOW),
        ];
        let refusal = |set: Set, value| {
            let mut config = Config::default();
            *set(&mut config) = value;
            config.check().map_err(|error| error.to_string())
        };
        for (name, set, most) in settings {
            let least = u32::from(name == "window");
            assert_eq!(refusal(set, most), Ok(()));
            assert_eq!(refusal(set, least), Ok(()));
            for value in [most + 1, u32::MAX] {
                assert_eq!(refusal(set, value), Err(format!("{name} = {value}: {least} to {most}")));
            }
        }
        assert_eq!(refusal(|c| &mut c.window, 0), Err(format!("window = 0: 1 to {MAX_WINDOW}")));
    }
}
