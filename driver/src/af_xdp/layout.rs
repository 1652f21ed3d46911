//! The layout of the frame memory, and the configurations that are valid.
//!
//! The fill ring has two entries for each receive chunk. The kernel delivers frames before it publishes that it has
//! consumed their entries of the fill ring, so a ring with one entry for each chunk can appear full when a chunk is
//! given back. (Found as a panic in debug builds and as lost chunks in release builds.)

use std::ops::Range;

use xsk_rs::config::{FrameSize, QueueSize, UmemConfig};

use super::AfXdpConfig;
use crate::Error;
use crate::netlink::Interface;

/// Enough for an MTU of 9000.
pub(super) const MAX_CHUNKS_PER_SLOT: usize = 3;
const MAX_TX_FRAMES: u32 = 1024;
/// The least number of receive frames of a queue: RSS may direct most frames to one of many queues.
const MIN_RX_FRAMES: u32 = 2048;
/// The limit for the sum of these minimums. For each queue the kernel has an entry for every chunk of the UMEM, so if
/// the number of chunks grew with that of queues, memory would grow with the square of that number.
const SHARED_RX_FRAMES: u32 = 16384;
/// The most queues of a port. Each then has 64 chunks, as many as a burst.
const MAX_QUEUES: u32 = 256;
/// The kernel reserves this much of each chunk for XDP programs (XDP_PACKET_HEADROOM).
pub(super) const XDP_HEADROOM: usize = 256;
/// Ethernet header and one 802.1Q tag, which the MTU does not count.
pub(super) const FRAME_OVERHEAD: usize = 18;

/// The division of the frame memory into chunks.
#[derive(Debug)]
pub(super) struct Layout {
    pub(super) umem: UmemConfig,
    pub(super) chunks_per_slot: u32,
    pub(super) tx_chunks: u32,
    /// The numbers of the queues.
    pub(super) queues: Range<u32>,
    /// For each queue.
    pub(super) rx_chunks: u32,
    pub(super) tx_ring: u32,
    pub(super) max_frame: usize,
}

impl Layout {
    pub(super) fn new(config: &AfXdpConfig, interface: &Interface) -> Result<Layout, Error> {
        let wanted = interface.mtu as usize + FRAME_OVERHEAD;
        // A chunk is at most a page. Half a page is enough for an MTU of 1500.
        let chunk: u32 = if wanted <= 2048 - XDP_HEADROOM { 2048 } else { 4096 };
        let chunk_data = chunk as usize - XDP_HEADROOM;
        let max_frame = wanted.min(MAX_CHUNKS_PER_SLOT * chunk_data);
        let chunks_per_slot = max_frame.div_ceil(chunk_data) as u32;
        let tx_chunks = config.tx_frames * chunks_per_slot;
        let tx_ring = tx_chunks.next_power_of_two();
        let invalid = |e: &dyn std::fmt::Display| Error::Invalid {
            parameter: "ring size",
            value: format!("{} and {}", config.rx_frames, config.tx_frames),
            expected: e.to_string(),
        };
        let queues = match config.queue {
            Some(queue) => queue..queue + 1,
            None => 0..interface.rx_queues.max(1),
        };
        let shares = (queues.len() as u32).next_power_of_two();
        let least = MIN_RX_FRAMES.min(SHARED_RX_FRAMES / shares);
        let rx_chunks = (config.rx_frames / shares).max(config.rx_frames.min(least));
        // Two entries for each chunk: see the module documentation.
        let fill_ring = 2 * rx_chunks;
        let umem = UmemConfig::builder()
            .frame_size(FrameSize::new(chunk).map_err(|e| invalid(&e))?)
            .fill_queue_size(QueueSize::new(fill_ring).map_err(|e| invalid(&e))?)
            .comp_queue_size(QueueSize::new(tx_ring).map_err(|e| invalid(&e))?)
            .build()
            .map_err(|e| invalid(&e))?;
        Ok(Layout { umem, chunks_per_slot, tx_chunks, queues, rx_chunks, tx_ring, max_frame })
    }

    /// Whether frames may be larger than a chunk.
    pub(super) fn multi_buffer(&self) -> bool {
        self.chunks_per_slot > 1
    }

    pub(super) fn chunks(&self) -> u32 {
        self.tx_chunks + self.rx_chunks * self.queues.len() as u32
    }
}

/// Refuses configurations that the interface or the driver does not support.
pub(super) fn check(config: &AfXdpConfig, interface: &Interface) -> Result<(), Error> {
    let invalid = |parameter, value: u32, expected: String| {
        Err(Error::Invalid { parameter, value: value.to_string(), expected })
    };
    if !interface.up {
        return Err(Error::InterfaceDown { name: interface.name.clone() });
    }
    let queues = interface.rx_queues.min(interface.tx_queues);
    if let Some(queue) = config.queue.filter(|queue| *queue >= queues) {
        let expected = format!("'{}' has {queues} queue(s), counted from 0", interface.name);
        return invalid("queue", queue, expected);
    }
    if config.queue.is_none() && interface.rx_queues > MAX_QUEUES {
        let expected = format!(
            "at most {MAX_QUEUES} on one port: set fewer with `ethtool -L {0} combined N`, or open one alone, as in \
             af_xdp:{0}:0",
            interface.name
        );
        return invalid("queues", interface.rx_queues, expected);
    }
    if !config.rx_frames.is_power_of_two() || !(64..=65536).contains(&config.rx_frames) {
        return invalid("rx_frames", config.rx_frames, "a power of two from 64 to 65536".to_owned());
    }
    if !(1..=MAX_TX_FRAMES).contains(&config.tx_frames) {
        return invalid("tx_frames", config.tx_frames, format!("1 to {MAX_TX_FRAMES}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface(queues: u32) -> Interface {
        Interface {
            name: "eth0".to_owned(),
            index: 1,
            mac: [0; 6],
            mtu: 1500,
            up: true,
            carrier: true,
            loopback: false,
            kind: None,
            vlan: None,
            link: None,
            addresses: Vec::new(),
            rx_queues: queues,
            tx_queues: queues,
            speed: None,
            xdp: None,
        }
    }

    fn layout(queues: u32, rx_frames: u32) -> Layout {
        let interface = interface(queues);
        let config = AfXdpConfig::new("eth0").rx_frames(rx_frames);
        check(&config, &interface).unwrap();
        Layout::new(&config, &interface).unwrap()
    }

    /// The kernel has an entry for each chunk in each queue.
    #[test]
    fn chunks_do_not_grow_with_the_queues() {
        for (rx_frames, most) in [(64, 64 * 256), (1024, 16384), (8192, 16384), (65536, 65536)] {
            for queues in 1..=256 {
                let Layout { rx_chunks, tx_chunks, .. } = layout(queues, rx_frames);
                assert!(rx_chunks >= 64 && rx_chunks.is_power_of_two(), "{queues} queues: {rx_chunks}");
                assert!(rx_chunks * queues <= most, "{queues} queues: {rx_chunks} each");
                assert_eq!(tx_chunks, 1024);
            }
        }
        let each = |queues| layout(queues, 8192).rx_chunks;
        assert_eq!([1, 2, 4, 8, 16, 64, 256].map(each), [8192, 4096, 2048, 2048, 1024, 256, 64]);
    }

    #[test]
    fn too_many_queues_are_refused_with_the_remedy() {
        let interface = interface(257);
        let refused = check(&AfXdpConfig::new("eth0"), &interface).unwrap_err().to_string();
        assert!(refused.contains("257") && refused.contains("ethtool -L eth0"), "{refused}");
        check(&AfXdpConfig::new("eth0").queue(256), &interface).unwrap();
    }
}
