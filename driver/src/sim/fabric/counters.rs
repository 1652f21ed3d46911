//! Counters: by queue, by port, and of the whole fabric.

use std::time::Duration;

/// The counters of one class's queue at a port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueueCounters {
    /// Frames that started to leave.
    pub sent: u64,
    /// Bytes of those.
    pub sent_bytes: u64,
    /// Frames of those that were marked here.
    pub marked: u64,
    /// Frames dropped because there was no room.
    pub dropped: u64,
    /// The most bytes queued at a time.
    pub max_bytes: u64,
    /// The number of pauses by the other end.
    pub pauses: u64,
    /// The number of pauses that expired because they were neither renewed nor ended in time.
    pub pauses_expired: u64,
    /// The number of times that the watchdog found the class paused for too long, and dropped its frames.
    pub storms: u64,
    pub(super) paused_picos: u64,
    pub(super) byte_picos: u128,
}

impl QueueCounters {
    /// The time that the class was paused.
    pub fn paused(&self) -> Duration {
        Duration::from_nanos(self.paused_picos / 1000)
    }

    /// The mean of the queued bytes, over `time` from the beginning; with the counters of an earlier time, over the time
    /// since.
    pub fn mean_bytes(&self, earlier: &QueueCounters, time: Duration) -> f64 {
        let picos = time.as_nanos() as f64 * 1000.0;
        (self.byte_picos - earlier.byte_picos) as f64 / picos
    }
}

/// The counters of a port, over all its classes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PortCounters {
    /// PFC frames sent, including renewals.
    pub pfc_sent: u64,
    /// The sent PFC frames that start a pause.
    pub pauses_sent: u64,
    /// PFC frames received.
    pub pfc_received: u64,
    /// Other frames received.
    pub received: u64,
    /// Bytes sent, including the overhead on the link.
    pub wire_bytes: u64,
}

/// The counters of all frames except PFC frames. Each frame is counted once: a frame that a host has sent or the network
/// has duplicated was delivered, was lost for one of the reasons, or is in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FabricCounters {
    /// Frames accepted from hosts.
    pub sent: u64,
    /// Frames duplicated by links.
    pub duplicated: u64,
    /// Frames delivered to their hosts.
    pub delivered: u64,
    /// Frames in flight.
    pub under_way: u64,
    /// Frames lost by links.
    pub lost: u64,
    /// Frames corrupted by links.
    pub corrupted: u64,
    /// Frames reordered by links.
    pub reordered: u64,
    /// Frames dropped because a switch had no room.
    pub buffer_dropped: u64,
    /// Frames without a path, or without one that was up.
    pub unroutable: u64,
    /// Frames dropped because their class was paused for too long.
    pub storm_dropped: u64,
    /// Frames dropped because the host had no room, or its driver was not open.
    pub host_dropped: u64,
}

impl FabricCounters {
    /// Frames that were neither delivered nor are in flight.
    pub fn dropped(&self) -> u64 {
        self.lost + self.buffer_dropped + self.unroutable + self.storm_dropped + self.host_dropped
    }
}
