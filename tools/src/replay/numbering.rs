//! Which hosts give each of their packets an IPv4 identification of its own.

use std::collections::HashMap;
use std::rc::Rc;

use ferroce::Gid;

use super::packet::Seen;

/// The identifications of what each host sent to each other one.
///
/// rdma_rxe counts them. Linux does not for UDP sockets: it sends 0 where fragments are not allowed, and begins at 0 in
/// each burst that is cut apart (segmentation offload). IPv6 has none.
#[derive(Default)]
pub(super) struct Numbering(HashMap<(Gid, Gid), Identifications>);

#[derive(Default)]
struct Identifications {
    /// Packets that differ from the one before of the same identification.
    packets: u64,
    /// Those among them whose identification says nothing.
    shared: u64,
    /// The newest packet of each identification, and how many were before it.
    newest: HashMap<u16, (u64, Rc<Seen>)>,
}

/// A counter comes round after 65536 packets, or a little earlier where others use it too; a burst has fewer than this.
const NEAR: u64 = 256;
/// A counter may pass 0, and leap: one packet of so many shares its identification at most.
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
                continue; // a copy or a repeat: it tells nothing
            }
            let is_near = before.is_some_and(|(at, _)| *packets - at < NEAR);
            *packets += 1;
            *shared += u64::from(is_near || number == 0);
        }
        numbering
    }

    /// Whether packets of one identification are one packet.
    pub(super) fn counts(&self, source: Gid, destination: Gid) -> bool {
        let known = self.0.get(&(source, destination));
        known.is_some_and(|known| known.packets > 1 && known.shared * SELDOM < known.packets)
    }
}
