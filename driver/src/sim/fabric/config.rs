//! The configuration of hosts and switches.

use std::fmt;
use std::time::Duration;

use crate::Error;
use crate::sim::{EcnConfig, WIRE_OVERHEAD, invalid};

/// Traffic classes (priorities of IEEE 802.1Q). Each has its own queues.
pub const CLASSES: usize = 8;

/// The configuration of the whole fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub struct FabricConfig {
    /// Largest IP packet in bytes, 68 to 65535.
    pub mtu: u32,
    /// The bytes that a frame occupies on a link in addition to its own.
    pub overhead: u32,
    /// The time after which switches choose new paths when a link or a switch has gone down or come up. Until then frames
    /// for a path that is down are lost.
    pub convergence: Duration,
}

impl Default for FabricConfig {
    /// An MTU of 4200, [`WIRE_OVERHEAD`], and 50 ms.
    fn default() -> FabricConfig {
        FabricConfig { mtu: 4200, overhead: WIRE_OVERHEAD as u32, convergence: Duration::from_millis(50) }
    }
}

impl FabricConfig {
    /// Largest IP packet in bytes, 68 to 65535; 4200 by default.
    pub fn mtu(self, mtu: u32) -> Self {
        FabricConfig { mtu, ..self }
    }

    /// The bytes that a frame occupies on a link in addition to its own, at most 256; [`WIRE_OVERHEAD`] by default.
    pub fn overhead(self, overhead: u32) -> Self {
        FabricConfig { overhead, ..self }
    }

    /// The time after which switches choose new paths; 50 ms by default.
    pub fn convergence(self, convergence: Duration) -> Self {
        FabricConfig { convergence, ..self }
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        crate::loopback::check_mtu(self.mtu)?;
        check(self.overhead <= 256, "overhead", self.overhead, "at most 256 bytes")
    }
}

/// The class of each DSCP.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ClassMap([u8; 64]);

impl Default for ClassMap {
    /// The upper three bits of the DSCP, as in switches that trust it: 26 has class 3, 48 has class 6.
    fn default() -> ClassMap {
        ClassMap(std::array::from_fn(|dscp| dscp as u8 >> 3))
    }
}

impl fmt::Debug for ClassMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0).finish()
    }
}

impl ClassMap {
    /// Assigns the DSCP `dscp`, 0 to 63, to `class`, 0 to 7. Of greater numbers only the lower bits count.
    #[must_use]
    pub fn with(mut self, dscp: u8, class: u8) -> ClassMap {
        self.0[usize::from(dscp & 63)] = class & 7;
        self
    }

    /// The class of a DSCP.
    #[inline]
    pub fn class(&self, dscp: u8) -> u8 {
        self.0[usize::from(dscp & 63)]
    }
}

/// When a class may send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Scheduling {
    /// Before every class with a lower number, and before all classes with a weight.
    Strict,
    /// When no strict class has anything to send; the others share in proportion to their weights, in bytes.
    Weighted(u16),
}

/// A limit of stored bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Threshold {
    /// This fraction of the free bytes of the pool (α of dynamic thresholds: Choudhury and Hahne, 1998).
    Dynamic(f64),
    /// A number of bytes.
    Static(u64),
}

impl Threshold {
    pub(super) fn bytes(self, pool: u64, used: u64) -> u64 {
        match self {
            Threshold::Dynamic(alpha) => (alpha * pool.saturating_sub(used) as f64) as u64,
            Threshold::Static(bytes) => bytes,
        }
    }

    fn check(self, parameter: &'static str) -> Result<(), Error> {
        let Threshold::Dynamic(alpha) = self else { return Ok(()) };
        check(alpha.is_finite() && alpha > 0.0, parameter, alpha, "a factor above 0")
    }
}

/// The memory that the ports of a switch share, in bytes of frames without the overhead on links.
///
/// A frame occupies memory from its arrival until it starts to leave. A frame of a class with PFC is accounted to its
/// ingress port; beyond the `threshold` of that port and class, it uses `headroom`, and is dropped if none is left. A frame
/// of another class is accounted to its egress port; beyond `lossy_threshold`, or beyond the pool, it is dropped.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
#[non_exhaustive]
pub struct BufferConfig {
    /// Bytes shared by all ports.
    pub pool: u64,
    /// For a class with PFC: the limit for an ingress port, beyond which it sends a pause.
    pub threshold: Threshold,
    /// Bytes for frames that still arrive after a pause, for each port and class with PFC, in addition to the pool. `None`:
    /// as much as the link needs.
    pub headroom: Option<u64>,
    /// A pause ends when the stored bytes are this far below the threshold, and no headroom is used ...
    pub resume_offset: u64,
    /// ... or when they are fewer than this.
    pub resume_floor: u64,
    /// For a class without PFC: the limit for an egress port.
    pub lossy_threshold: Threshold,
}

impl Default for BufferConfig {
    /// 32 MiB, thresholds of 1/8 and 1 of the free bytes, the headroom that the link needs, and an offset of 18 KiB.
    fn default() -> BufferConfig {
        BufferConfig {
            pool: 32 << 20,
            threshold: Threshold::Dynamic(0.125),
            headroom: None,
            resume_offset: 18 << 10,
            resume_floor: 0,
            lossy_threshold: Threshold::Dynamic(1.0),
        }
    }
}

impl BufferConfig {
    /// Bytes that are shared by all ports; 32 MiB by default.
    pub fn pool(self, pool: u64) -> Self {
        BufferConfig { pool, ..self }
    }

    /// The limit for an ingress port of a class with PFC; 1/8 of the free bytes by default.
    pub fn threshold(self, threshold: Threshold) -> Self {
        BufferConfig { threshold, ..self }
    }

    /// Bytes of headroom for each port and class with PFC; by default as much as the link needs.
    pub fn headroom(self, headroom: impl Into<Option<u64>>) -> Self {
        BufferConfig { headroom: headroom.into(), ..self }
    }

    /// Bytes below the threshold at which a pause ends; 18 KiB by default.
    pub fn resume_offset(self, resume_offset: u64) -> Self {
        BufferConfig { resume_offset, ..self }
    }

    /// Bytes below which a pause ends in any case; 0 by default.
    pub fn resume_floor(self, resume_floor: u64) -> Self {
        BufferConfig { resume_floor, ..self }
    }

    /// The limit for an egress port of a class without PFC; the free bytes by default.
    pub fn lossy_threshold(self, lossy_threshold: Threshold) -> Self {
        BufferConfig { lossy_threshold, ..self }
    }

    fn check(&self) -> Result<(), Error> {
        check(self.pool > 0, "pool", self.pool, "at least 1 byte")?;
        self.threshold.check("threshold")?;
        self.lossy_threshold.check("lossy_threshold")
    }
}

/// When a frame is marked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Marking {
    /// When it enters the queue, by the bytes queued before it.
    Enqueue,
    /// When it leaves the queue, by the bytes queued after it.
    #[default]
    Dequeue,
}

/// Priority flow control (IEEE 802.1Qbb).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub struct PfcConfig {
    /// The classes with PFC: class n is bit n.
    pub classes: u8,
    /// The duration of a pause, in quanta of 512 bit times, at least 2. A pause that must last longer is renewed after half
    /// of it.
    pub quanta: u16,
    /// If a class can't send for this long because it is paused, its queued frames are dropped, and so are further ones
    /// until the pause is over and the same time has passed again. `None`: never.
    pub watchdog: Option<Duration>,
}

impl Default for PfcConfig {
    /// Class 3, pauses of 65535 quanta, no watchdog.
    fn default() -> PfcConfig {
        PfcConfig { classes: 1 << 3, quanta: u16::MAX, watchdog: None }
    }
}

impl PfcConfig {
    /// The classes with PFC, class n is bit n; class 3 by default.
    pub fn classes(self, classes: u8) -> Self {
        PfcConfig { classes, ..self }
    }

    /// The duration of a pause, in quanta of 512 bit times, 2 to 65535; 65535 by default.
    pub fn quanta(self, quanta: u16) -> Self {
        PfcConfig { quanta, ..self }
    }

    /// The longest time that a class may be paused; unlimited by default.
    pub fn watchdog(self, watchdog: impl Into<Option<Duration>>) -> Self {
        PfcConfig { watchdog: watchdog.into(), ..self }
    }
}

/// A switch: it stores frames, and forwards them from the queues of the egress port.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
#[non_exhaustive]
pub struct SwitchConfig {
    /// Its memory.
    pub buffer: BufferConfig,
    /// Marking by the bytes of the class queued at the port; `None`: no marking.
    pub ecn: Option<EcnConfig>,
    /// When it marks.
    pub marking: Marking,
    /// Flow control by class; `None`: no class has it.
    pub pfc: Option<PfcConfig>,
    /// The delay until a received PFC frame takes effect.
    pub reaction: Duration,
    /// When each class may send.
    pub scheduling: [Scheduling; CLASSES],
    /// The class of each DSCP.
    pub classes: ClassMap,
}

impl Default for SwitchConfig {
    /// No marking, no PFC, and strict priority for the classes 6 and 7; the others have equal weights.
    fn default() -> SwitchConfig {
        SwitchConfig {
            buffer: BufferConfig::default(),
            ecn: None,
            marking: Marking::default(),
            pfc: None,
            reaction: Duration::ZERO,
            scheduling: CONTROL_FIRST,
            classes: ClassMap::default(),
        }
    }
}

const CONTROL_FIRST: [Scheduling; CLASSES] = {
    let mut scheduling = [Scheduling::Weighted(1); CLASSES];
    scheduling[6] = Scheduling::Strict;
    scheduling[7] = Scheduling::Strict;
    scheduling
};

impl SwitchConfig {
    /// Its memory; [`BufferConfig::default`] by default.
    pub fn buffer(self, buffer: BufferConfig) -> Self {
        SwitchConfig { buffer, ..self }
    }

    /// Marking by the bytes of the class queued at the port; none by default.
    pub fn ecn(self, ecn: impl Into<Option<EcnConfig>>) -> Self {
        SwitchConfig { ecn: ecn.into(), ..self }
    }

    /// When it marks; at dequeue by default.
    pub fn marking(self, marking: Marking) -> Self {
        SwitchConfig { marking, ..self }
    }

    /// Flow control by class; none by default.
    pub fn pfc(self, pfc: impl Into<Option<PfcConfig>>) -> Self {
        SwitchConfig { pfc: pfc.into(), ..self }
    }

    /// The delay until a received PFC frame takes effect; zero by default.
    pub fn reaction(self, reaction: Duration) -> Self {
        SwitchConfig { reaction, ..self }
    }

    /// When each class may send; by default 6 and 7 are strict, and the others have equal weights.
    pub fn scheduling(self, scheduling: [Scheduling; CLASSES]) -> Self {
        SwitchConfig { scheduling, ..self }
    }

    /// The class of each DSCP; its upper three bits by default.
    pub fn classes(self, classes: ClassMap) -> Self {
        SwitchConfig { classes, ..self }
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        self.buffer.check()?;
        check_scheduling(&self.scheduling)?;
        if let Some(ecn) = self.ecn {
            ecn.check()?;
        }
        let quanta = self.pfc.map_or(u16::MAX, |pfc| pfc.quanta);
        check(quanta >= 2, "quanta", quanta, "2 to 65535 quanta of 512 bit times")
    }
}

/// A host: one port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub struct HostConfig {
    /// Whether its port stops when it is paused. A pause is counted in any case.
    pub obeys_pfc: bool,
    /// The delay until a received PFC frame takes effect.
    pub reaction: Duration,
    /// The most frames accepted from the driver's user that have not started to leave: 1 to 65536. They are in one queue
    /// for each class.
    pub tx_frames: u32,
    /// The most frames that have arrived and were not yet received by the driver's user: 1 to 65536. Further ones are lost.
    pub rx_frames: u32,
    /// When each class may send.
    pub scheduling: [Scheduling; CLASSES],
    /// The class of each DSCP.
    pub classes: ClassMap,
}

impl Default for HostConfig {
    /// Obeys PFC at once, queues at most 4 frames to send and 4096 received ones, and schedules as switches do.
    fn default() -> HostConfig {
        HostConfig {
            obeys_pfc: true,
            reaction: Duration::ZERO,
            tx_frames: 4,
            rx_frames: 4096,
            scheduling: CONTROL_FIRST,
            classes: ClassMap::default(),
        }
    }
}

impl HostConfig {
    /// Whether its port stops when it is paused; it does by default.
    pub fn obeys_pfc(self, obeys_pfc: bool) -> Self {
        HostConfig { obeys_pfc, ..self }
    }

    /// The delay until a received PFC frame takes effect; zero by default.
    pub fn reaction(self, reaction: Duration) -> Self {
        HostConfig { reaction, ..self }
    }

    /// The most frames queued to send, 1 to 65536; 4 by default.
    pub fn tx_frames(self, tx_frames: u32) -> Self {
        HostConfig { tx_frames, ..self }
    }

    /// The most frames queued to be received, 1 to 65536; 4096 by default.
    pub fn rx_frames(self, rx_frames: u32) -> Self {
        HostConfig { rx_frames, ..self }
    }

    /// When each class may send; by default 6 and 7 are strict, and the others have equal weights.
    pub fn scheduling(self, scheduling: [Scheduling; CLASSES]) -> Self {
        HostConfig { scheduling, ..self }
    }

    /// The class of each DSCP; its upper three bits by default.
    pub fn classes(self, classes: ClassMap) -> Self {
        HostConfig { classes, ..self }
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        check_scheduling(&self.scheduling)?;
        for (name, frames) in [("tx_frames", self.tx_frames), ("rx_frames", self.rx_frames)] {
            check((1..=65536).contains(&frames), name, frames, "1 to 65536 frames")?;
        }
        Ok(())
    }
}

fn check_scheduling(scheduling: &[Scheduling; CLASSES]) -> Result<(), Error> {
    let idle = scheduling.contains(&Scheduling::Weighted(0));
    check(!idle, "scheduling", "Weighted(0)", "a weight of at least 1, or Strict")
}

fn check(
    right: bool,
    parameter: &'static str,
    value: impl fmt::Display,
    expected: &str,
) -> Result<(), Error> {
    if right { Ok(()) } else { Err(invalid(parameter, value, expected)) }
}
