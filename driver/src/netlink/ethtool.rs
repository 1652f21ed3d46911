//! The ethtool reports of an interface's driver (linux/ethtool.h).

use std::os::fd::AsRawFd;

use super::{Interface, Netlink};

impl Netlink {
    /// Adds the driver's ethtool reports: the numbers of queues in use, instead of those that exist, and the speed.
    pub(super) fn ask_driver(&self, interface: &mut Interface) {
        let mut channels = EthtoolChannels::default();
        if self.ethtool(interface, &mut channels) {
            interface.rx_queues = (channels.rx + channels.combined).max(1);
            interface.tx_queues = (channels.tx + channels.combined).max(1);
        }
        let mut settings = EthtoolSettings::default();
        if self.ethtool(interface, &mut settings) {
            let megabits = u32::from(settings.speed_high) << 16 | u32::from(settings.speed);
            let is_known = !matches!(megabits, 0 | ETHTOOL_SPEED_16_UNKNOWN | ETHTOOL_SPEED_UNKNOWN);
            interface.speed = is_known.then(|| u64::from(megabits) * 1_000_000);
        }
    }

    /// Whether packets received from the interface are aggregated (GRO), or this is unknown. The loopback interface
    /// reports that they are, but does not aggregate.
    pub(crate) fn puts_together(&self, interface: &Interface) -> bool {
        let mut gro = EthtoolValue::default();
        !interface.loopback && (!self.ethtool(interface, &mut gro) || gro.data != 0)
    }

    /// Makes the driver of an interface fill `command`. Returns whether it has.
    fn ethtool<C: EthtoolCommand>(&self, interface: &Interface, command: &mut C) -> bool {
        // SAFETY: an `ifreq` is plain old data, for which zeros are valid.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (to, from) in request.ifr_name.iter_mut().zip(interface.name.bytes()) {
            *to = from as libc::c_char;
        }
        *command.number() = C::NUMBER;
        request.ifr_ifru.ifru_data = (&raw mut *command).cast();
        // SAFETY: `request` names the interface (16 bytes with NUL, as returned by the kernel) and points to `command`,
        // which has the layout for the command `C::NUMBER`, its first word. Both outlive the call.
        unsafe { libc::ioctl(self.socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request) == 0 }
    }
}

/// An unknown speed in drivers with a field of 16 bits.
const ETHTOOL_SPEED_16_UNKNOWN: u32 = u16::MAX as u32;
const ETHTOOL_SPEED_UNKNOWN: u32 = u32::MAX;

/// A structure of linux/ethtool.h that begins with the number of its command.
trait EthtoolCommand {
    const NUMBER: u32;

    fn number(&mut self) -> &mut u32;
}

impl EthtoolCommand for EthtoolValue {
    /// `ETHTOOL_GGRO`.
    const NUMBER: u32 = 0x2b;

    fn number(&mut self) -> &mut u32 {
        &mut self.cmd
    }
}

impl EthtoolCommand for EthtoolChannels {
    /// `ETHTOOL_GCHANNELS`.
    const NUMBER: u32 = 0x3c;

    fn number(&mut self) -> &mut u32 {
        &mut self.cmd
    }
}

impl EthtoolCommand for EthtoolSettings {
    /// `ETHTOOL_GSET`.
    const NUMBER: u32 = 0x01;

    fn number(&mut self) -> &mut u32 {
        &mut self.cmd
    }
}

/// `struct ethtool_cmd`.
#[repr(C)]
#[derive(Default)]
struct EthtoolSettings {
    cmd: u32,
    link_modes: [u32; 2],
    /// The lower half of the speed in Mb/s.
    speed: u16,
    port: [u8; 6],
    packets: [u32; 2],
    speed_high: u16,
    crossover: [u8; 2],
    peer_link_modes: u32,
    reserved: [u32; 2],
}

/// `struct ethtool_value`.
#[repr(C)]
#[derive(Default)]
struct EthtoolValue {
    cmd: u32,
    data: u32,
}

/// `struct ethtool_channels`.
#[repr(C)]
#[derive(Default)]
struct EthtoolChannels {
    cmd: u32,
    max: [u32; 4],
    rx: u32,
    tx: u32,
    other: u32,
    combined: u32,
}
