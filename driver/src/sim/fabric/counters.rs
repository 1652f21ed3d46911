//! What is counted: by queue, by port, and in the whole fabric.

use std::time::Duration;

/// Of the queue of one class at a port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueueCounters {
    /// Frames that began to leave.
    pub sent: u64,
    /// Bytes of those.
    pub sent_bytes: u64,
    /// Frames of those that were marked here.
    pub marked: u64,
    /// Frames that found no room.
    pub dropped: u64,
    /// The most bytes that have waited.
    pub max_bytes: u64,
    /// How often the other end has paused the class.
    pub pauses: u64,
    /// How many of the pauses were neither renewed nor ended in time.
    pub pauses_expired: u64,
    /// How often the class was paused for too long, and its frames dropped.
    pub storms: u64,
    pub(super) paused_picos: u64,
    pub(super) byte_picos: u128,
}

impl QueueCounters {
    /// For how long the class was paused.
    pub fn paused(&self) -> Duration {
        Duration::from_nanos(self.paused_picos / 1000)
    }

    /// The mean of the bytes that waited, over `time` from the beginning; with the counters of an earlier time, over the time
    /// since.
    pub fn mean_bytes(&self, earlier: &QueueCounters, time: Duration) -> f64 {
        let picos = time.as_nanos() as f64 * 1000.0;
        (self.byte_picos - earlier.byte_picos) as f64 / picos
    }
}

/// Of a port, of all its classes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PortCounters {
    /// PFC frames that were sent, renewals among them.
    pub pfc_sent: u64,
    /// Of those, frames that begin a pause.
    pub pauses_sent: u64,
    /// PFC frames that have come in.
    pub pfc_received: u64,
    /// Frames that have come in, without those.
    pub received: u64,
    /// Bytes that were sent, with what a frame occupies beside its own.
    pub wire_bytes: u64,
}

/// Of all frames but those of PFC. Each frame is counted once: what hosts have sent and the network has doubled was
/// delivered, or lost for one of the reasons, or is under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FabricCounters {
    /// Frames that were taken from hosts.
    pub sent: u64,
    /// Frames that a link has doubled.
    pub duplicated: u64,
    /// Frames that have arrived at their hosts.
    pub delivered: u64,
    /// Frames that are under way.
    pub under_way: u64,
    /// Frames that a link has lost.
    pub lost: u64,
    /// Frames that a link has changed.
    pub corrupted: u64,
    /// Frames that a link has held back.
    pub reordered: u64,
    /// Frames for which a switch had no room.
    pub buffer_dropped: u64,
    /// Frames for which there was no way, or none that was up.
    pub unroutable: u64,
    /// Frames that were dropped since their class was paused for too long.
    pub storm_dropped: u64,
    /// Frames for which their host had no room, or that came to a host which is not there.
    pub host_dropped: u64,
}

impl FabricCounters {
    /// Frames that were neither delivered nor are under way.
    pub fn dropped(&self) -> u64 {
        self.lost + self.buffer_dropped + self.unroutable + self.storm_dropped + self.host_dropped
    }
}
