//! The configuration of a port.

use std::time::Duration;

use crate::SharedMemory;

/// The port to open.
#[derive(Clone, Debug)]
#[must_use]
#[non_exhaustive]
pub struct AfXdpConfig {
    /// The interface's name.
    pub interface: String,
    /// The receive and transmit queue of the interface; all of them if `None`.
    pub queue: Option<u32>,
    /// Buffers for received frames, and entries of the rings that hold them: a power of two, 64 to 65536.
    /// With few of them frames are lost while the receiver is off its core. Several queues divide them, but up to eight queues
    /// have at least 2048 each (or all, if there are fewer), and more queues share 16384.
    pub rx_frames: u32,
    /// The most outstanding frames to send, 1 to 1024.
    pub tx_frames: u32,
    /// Whether RoCE v1 (EtherType 0x8915) is received as well.
    pub roce_v1: bool,
    /// Polls the device from `rx_burst` for up to this time instead of waiting for its interrupts. Helps if the device's
    /// interrupts are on the poll loop's core; has no effect on veth.
    pub busy_poll: Option<Duration>,
    /// Whether other processes of this user may share the interface's addresses by UDP sockets. If so, this port has
    /// only the even queue pair numbers. Only a port on all queues shares its addresses.
    pub sharing: bool,
    /// Whether shared memory is used between processes of this user on addresses of this host. Without it, packets are
    /// sent as mail, which is slow. It needs `sharing`.
    pub shared_memory: SharedMemory,
}

impl AfXdpConfig {
    /// All queues of the interface, with sizes that cause no loss between two busy cores.
    pub fn new(interface: impl Into<String>) -> AfXdpConfig {
        AfXdpConfig {
            interface: interface.into(),
            queue: None,
            rx_frames: 8192,
            tx_frames: 1024,
            roce_v1: false,
            busy_poll: None,
            sharing: true,
            shared_memory: SharedMemory::On,
        }
    }

    /// One queue of the interface; all of them by default.
    pub fn queue(self, queue: impl Into<Option<u32>>) -> Self {
        AfXdpConfig { queue: queue.into(), ..self }
    }

    /// Buffers for received frames: a power of two, 64 to 65536; 8192 by default.
    pub fn rx_frames(self, rx_frames: u32) -> Self {
        AfXdpConfig { rx_frames, ..self }
    }

    /// The most outstanding frames to send, 1 to 1024; 1024 by default.
    pub fn tx_frames(self, tx_frames: u32) -> Self {
        AfXdpConfig { tx_frames, ..self }
    }

    /// RoCE v1 is received as well; off by default.
    pub fn roce_v1(self, roce_v1: bool) -> Self {
        AfXdpConfig { roce_v1, ..self }
    }

    /// Polls the device for up to this time; off by default.
    pub fn busy_poll(self, busy_poll: impl Into<Option<Duration>>) -> Self {
        AfXdpConfig { busy_poll: busy_poll.into(), ..self }
    }

    /// Other processes may share the interface's addresses; on by default.
    pub fn sharing(self, sharing: bool) -> Self {
        AfXdpConfig { sharing, ..self }
    }

    /// Shared memory is used between processes of this host; on by default.
    pub fn shared_memory(self, shared_memory: SharedMemory) -> Self {
        AfXdpConfig { shared_memory, ..self }
    }
}
