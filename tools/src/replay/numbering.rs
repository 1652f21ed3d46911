//! The hosts that give each packet an IPv4 identification of its own.

use std::collections::HashMap;
use std::rc::Rc;

use ferroce::Gid;

use super::packet::Seen;

/// The identifications of packets between hosts.
///
/// rdma_rxe counts them. Linux does not for UDP sockets: it sends 0 if fragments are not allowed, and begins at 0 in
/// each burst that is segmented (segmentation offload). IPv6 has none.
#[derive(Default)]
pub(super) struct Numbering(HashMap<(Gid, Gid), Identifications>);

#[derive(Default)]
struct Identifications {
    /// Packets that differ from the previous one with the same identification.
    packets: u64,
    /// Those with an identification that is not unique.
    shared: u64,
    /// The newest packet with each identification, and the number of packets before it.
    newest: HashMap<u16, (u64, Rc<Seen>)>,
}

/// A counter wraps after 65536 packets, or slightly earlier if it is shared; a burst has fewer packets than this.
const NEAR: u64 = 256;
/// A counter may pass 0, and skip: at most one of this many packets shares its identification.
const SELDOM: u64 = 16;

impl Numbering {
    pub(super) fn of(packets: &[Rc<Seen>]) -> Numbering {
        let mut numbering = Numbering::default();
        for packet in packets.iter().filter(|packet| packet.icrc_is_right) {
            let Some(number) = packet.identification() else { continue };
            let hosts = (packet.network.source, packet.network.destination);
            let Identifications { packets, shared, newest } = numbering.0.entry(hosts).or_default();
            let before = newest.insert(number, (*packets, Rc::clone(packet)));
            if before.as_ref().is_some_and(|(_, before)| before.is_same_as(packet)) {
                continue; // a copy or a retransmission is not evidence
            }
            let is_near = before.is_some_and(|(at, _)| *packets - at < NEAR);
            *packets += 1;
            *shared += u64::from(is_near || number == 0);
        }
        numbering
    }

    /// Whether packets with the same identification are copies of one packet.
    pub(super) fn counts(&self, source: Gid, destination: Gid) -> bool {
        let known = self.0.get(&(source, destination));
        known.is_some_and(|known| known.packets > 1 && known.shared * SELDOM < known.packets)
    }
}
