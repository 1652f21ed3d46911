//! Properties of a port's driver that DPDK does not report.
//!
//! A memif copies in bulk only if one buffer of the pool is large enough for one buffer of the ring (receiving), or the
//! other way round (sending). So the sizes of the pools' buffers are adapted to `bsize`. Its bulk path uses one buffer
//! of the ring for each segment, and the flags of a chain remain set in the buffers for the next frame. So frames are
//! never larger than `bsize`.
//!
//! A memif could gather payloads too. But copying them with the CRC and letting the memif copy one segment was 1.40
//! times as fast with 1 KiB of payload and 1.13 times with 4 KiB: three segments for each frame cost more than a copy
//! within the cache.

use crate::Error;

/// The properties of a port that [`PortInfo`](ferroce_dpdk_sys::PortInfo) does not contain.
#[derive(Debug)]
pub(super) struct Kind {
    /// There is no link with an MTU: any MTU that the two ends agree on is possible.
    pub(super) any_mtu: bool,
    /// The largest frame, including the Ethernet header, and the argument that limits it.
    pub(super) largest: Option<(usize, &'static str)>,
    /// Frames that its rings hold in each direction, regardless of the requested descriptors.
    pub(super) ring: u32,
    /// The least room for a frame in a receive buffer.
    pub(super) rx_room: usize,
    /// The reason for copying payloads although the port can gather; `None` if they are not copied.
    pub(super) copies: Option<&'static str>,
    /// Whether the kernel has an interface there that also receives every frame: it answers ARP and ND.
    pub(super) kernel_answers: bool,
    /// Whether the kernel's interface is the other end, not this one.
    pub(super) kernel_is_peer: bool,
    /// Whether starting it tries once to reach its other end, without which no frames are exchanged; `None` for other
    /// ports.
    pub(super) calls_peer: Option<Tries>,
}

/// How often a port can be started to reach its other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tries {
    /// After a failed start it is unusable.
    One,
    Many,
}

impl Kind {
    /// The properties of a port of this driver with these arguments.
    pub(super) fn of(driver: &str, arguments: &str, multi_segment: bool) -> Result<Kind, Error> {
        let mut kind = Kind {
            any_mtu: false,
            largest: None,
            ring: 0,
            rx_room: USUAL_ROOM,
            copies: None,
            kernel_answers: false,
            kernel_is_peer: false,
            calls_peer: None,
        };
        match driver {
            "net_memif" => {
                kind.any_mtu = true;
                let buffer = number(arguments, "bsize", MEMIF_BUFFER)?;
                kind.ring = 1 << number(arguments, "rsize", MEMIF_LOG2_RING)?.min(14);
                // One frame in each buffer: a chain sets flags in its buffers, which are not reset when they contain a
                // frame of their own.
                kind.largest = Some((buffer, "bsize"));
                // Frames are copied in bulk only if one buffer is always large enough for one of the ring.
                kind.rx_room = buffer.max(USUAL_ROOM);
                // Measured: see the module documentation.
                kind.copies = Some("a memif copies as well, and faster from one place");
                kind.calls_peer = match (value(arguments, "role"), value(arguments, "zero-copy")) {
                    (Some("server" | "master"), _) => None,
                    // It shares the pool's memory, and a refusal closes this permanently.
                    (_, Some("yes")) => Some(Tries::One),
                    _ => Some(Tries::Many),
                };
            }
            "net_ring" => {
                kind.any_mtu = true;
                kind.copies = Some("the other end of a ring gets the buffers themselves");
                kind.ring = RING;
            }
            "net_null" => {
                kind.any_mtu = true;
                kind.copies = Some("no process reads them");
            }
            "net_pcap" => {
                kind.any_mtu = true;
                kind.kernel_answers = true;
            }
            "net_af_packet" => {
                kind.kernel_answers = true;
                let frame = number(arguments, "framesz", AF_PACKET_FRAME)?;
                kind.largest = Some((frame.saturating_sub(AF_PACKET_HEADER), "framesz"));
                kind.rx_room = frame;
            }
            "net_tap" => kind.kernel_is_peer = true,
            "net_af_xdp" => {}
            _ => kind.copies = Some("only drivers that read frames with the processor gather here"),
        }
        if !multi_segment && kind.copies.is_none() {
            kind.copies = Some("the port sends no frames of several segments");
        }
        Ok(kind)
    }
}

/// Many drivers, such as net_af_xdp, refuse less.
const USUAL_ROOM: usize = 2048;

// Defaults of the drivers (rte_eth_memif.h, rte_eth_ring.c, rte_eth_af_packet.c).
const MEMIF_BUFFER: usize = 2048;
const MEMIF_LOG2_RING: usize = 10;
const RING: u32 = 1024;
const AF_PACKET_FRAME: usize = 2048;
/// The most that the kernel writes before a received frame (TPACKET_V2).
const AF_PACKET_HEADER: usize = 80;

fn value<'a>(arguments: &'a str, key: &str) -> Option<&'a str> {
    arguments.split(',').find_map(|pair| pair.split_once('=').filter(|(k, _)| *k == key)).map(|(_, v)| v)
}

fn number(arguments: &str, key: &'static str, default: usize) -> Result<usize, Error> {
    match value(arguments, key) {
        None => Ok(default),
        Some(text) => text.parse().map_err(|_| Error::Invalid {
            parameter: key,
            value: format!("'{text}'"),
            expected: "a number".to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_of_a_memif_determine_its_frames() {
        let of = |arguments| Kind::of("net_memif", arguments, true).unwrap();
        let plain = of("role=server,id=0,socket=/run/x.sock");
        assert_eq!((plain.largest, plain.ring), (Some((2048, "bsize")), 1024));
        assert_eq!((plain.calls_peer, of("").calls_peer), (None, Some(Tries::Many)));
        assert_eq!(of("role=client,zero-copy=yes").calls_peer, Some(Tries::One));
        let large = of("bsize=8192,rsize=8");
        assert_eq!((large.largest, large.ring, large.rx_room), (Some((8192, "bsize")), 256, 8192));
        assert!(large.any_mtu);
        assert!(Kind::of("net_memif", "bsize=big", true).is_err());
    }

    #[test]
    fn payloads_are_gathered_only_if_read_during_the_call() {
        let copies = |driver, arguments| Kind::of(driver, arguments, true).unwrap().copies.is_some();
        for driver in ["net_af_packet", "net_pcap", "net_tap"] {
            assert!(!copies(driver, ""), "{driver}");
            assert!(Kind::of(driver, "", false).unwrap().copies.is_some());
        }
        for driver in ["net_memif", "net_ring", "net_null", "net_ixgbe", "mlx5_pci"] {
            assert!(copies(driver, ""), "{driver}");
        }
    }
}
