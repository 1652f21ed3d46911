//! Traffic classes of a port, as reported by its driver through DCB netlink (linux/dcbnl.h).

use std::io;

use super::codec::{Request, attributes, u16_at, u64_at};
use super::socket::NetlinkSocket;
use super::{Interface, ONE, os_error};
use crate::Error;

/// Data center bridging of a port (IEEE 802.1Q): its priorities, their traffic classes, and the priorities protected by
/// PFC.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Dcb {
    /// Priority flow control; `None` if the driver does not report it.
    pub pfc: Option<Pfc>,
    /// Enhanced transmission selection; `None` if the driver does not report it.
    pub ets: Option<Ets>,
    /// DSCPs and their priorities (0 to 7), by DSCP. Empty if the port does not classify by DSCP.
    pub dscp: Vec<(u8, u8)>,
    /// The priority of all other packets without a VLAN tag, 0 to 7.
    pub default_priority: u8,
}

/// Priority flow control (IEEE 802.1Q clause 36).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pfc {
    /// The number of traffic classes that can have it at the same time.
    pub capability: u8,
    /// Whether it is on, by priority.
    pub enabled: [bool; PRIORITIES],
    /// Pause frames sent, by priority. Zero if the driver does not count them.
    pub sent: [u64; PRIORITIES],
    /// Pause frames received, by priority. Zero if the driver does not count them.
    pub received: [u64; PRIORITIES],
}

/// Enhanced transmission selection (IEEE 802.1Q clause 37).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ets {
    /// The number of traffic classes of the port.
    pub classes: u8,
    /// The traffic class of each priority.
    pub class: [u8; PRIORITIES],
    /// The transmission selection of each traffic class.
    pub selection: [Selection; PRIORITIES],
    /// The share of each traffic class of [`Selection::Share`], in percent.
    pub share: [u8; PRIORITIES],
}

/// The transmission selection of a traffic class (IEEE 802.1Q, table 8-6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Selection {
    /// Before all lower classes.
    #[default]
    Strict,
    /// By a credit-based shaper.
    Shaper,
    /// By its share of the bandwidth that the strict classes leave.
    Share,
    /// By another algorithm, usually the vendor's.
    Other(u8),
}

/// The number of priorities in IEEE 802.1Q, and the largest number of traffic classes.
const PRIORITIES: usize = 8;

impl Dcb {
    /// The report of an interface's driver, in the network namespace of the calling thread. `None` if the driver or the
    /// kernel has no DCB (veth, virtio).
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn of(interface: &Interface) -> Result<Option<Dcb>, Error> {
        let socket = NetlinkSocket::open(libc::NETLINK_ROUTE)?;
        let request = Request::new(libc::RTM_GETDCB, ONE, &[libc::AF_UNSPEC as u8, DCB_CMD_IEEE_GET, 0, 0])
            .attribute(DCB_ATTR_IFNAME, format!("{}\0", interface.name).as_bytes());
        let mut dcb = None;
        match socket.exchange(request, |payload| dcb = parse(payload)) {
            Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(None),
            Err(e) => Err(os_error(WHAT, &interface.name, e)),
            Ok(()) if dcb.is_some() => Ok(dcb),
            Ok(()) => Err(os_error(WHAT, &interface.name, io::Error::other("an answer without its content"))),
        }
    }

    /// The priority of packets with this DSCP that have no VLAN tag.
    pub fn priority(&self, dscp: u8) -> u8 {
        // The higher one of two, like drivers.
        let priorities = self.dscp.iter().filter(|(of, _)| *of == dscp).map(|(_, priority)| *priority);
        priorities.max().unwrap_or(self.default_priority)
    }
}

const WHAT: &str = "asking for the traffic classes of a port";

const DCB_CMD_IEEE_GET: u8 = 21;
/// Bytes of `struct dcbmsg`.
const DCBMSG: usize = 4;
const DCB_ATTR_IFNAME: u16 = 1;
const DCB_ATTR_IEEE: u16 = 13;
const DCB_ATTR_IEEE_ETS: u16 = 1;
const DCB_ATTR_IEEE_PFC: u16 = 2;
const DCB_ATTR_IEEE_APP_TABLE: u16 = 3;
const DCB_ATTR_IEEE_APP: u16 = 1;
/// An entry whose protocol is an EtherType. EtherType 0 is for the default priority.
const IEEE_8021QAZ_APP_SEL_ETHERTYPE: u8 = 1;
const IEEE_8021QAZ_APP_SEL_DSCP: u8 = 5;

/// Returns `None` if it is not an answer to `DCB_CMD_IEEE_GET`.
fn parse(payload: &[u8]) -> Option<Dcb> {
    let (_, ieee) = attributes(payload.get(DCBMSG..)?).find(|(kind, _)| *kind == DCB_ATTR_IEEE)?;
    let mut dcb = Dcb::default();
    for (kind, value) in attributes(ieee) {
        match kind {
            DCB_ATTR_IEEE_ETS => dcb.ets = parse_ets(value),
            DCB_ATTR_IEEE_PFC => dcb.pfc = parse_pfc(value),
            DCB_ATTR_IEEE_APP_TABLE => {
                let entries = attributes(value).filter(|(kind, _)| *kind == DCB_ATTR_IEEE_APP);
                entries.for_each(|(_, entry)| dcb.add(entry));
            }
            _ => {}
        }
    }
    dcb.dscp.sort_unstable();
    Some(dcb)
}

impl Dcb {
    /// Adds an entry of the application table (`struct dcb_app`: selector, priority, protocol).
    fn add(&mut self, entry: &[u8]) {
        let &[selector, priority @ 0..8, ..] = entry else { return };
        match (selector, u16_at(entry, 2)) {
            (IEEE_8021QAZ_APP_SEL_DSCP, Some(dscp @ 0..64)) => self.dscp.push((dscp as u8, priority)),
            (IEEE_8021QAZ_APP_SEL_ETHERTYPE, Some(0)) => self.default_priority = priority,
            _ => {}
        }
    }
}

/// `struct ieee_pfc`.
fn parse_pfc(value: &[u8]) -> Option<Pfc> {
    let &[capability, enabled, ..] = value else { return None };
    let counters = |at: usize| {
        let mut counters = [0; PRIORITIES];
        for (priority, counter) in counters.iter_mut().enumerate() {
            *counter = u64_at(value, at + 8 * priority)?;
        }
        Some(counters)
    };
    Some(Pfc {
        capability,
        enabled: std::array::from_fn(|priority| enabled >> priority & 1 != 0),
        sent: counters(8)?,
        received: counters(72)?,
    })
}

/// `struct ieee_ets`.
fn parse_ets(value: &[u8]) -> Option<Ets> {
    let table = |at: usize| <[u8; PRIORITIES]>::try_from(value.get(at..at + PRIORITIES)?).ok();
    let class = table(27)?;
    // Refuses classes that do not exist.
    if class.iter().any(|class| usize::from(*class) >= PRIORITIES) {
        return None;
    }
    let selection = table(19)?.map(|selection| match selection {
        0 => Selection::Strict,
        1 => Selection::Shaper,
        2 => Selection::Share,
        other => Selection::Other(other),
    });
    Some(Ets { classes: *value.get(1)?, class, selection, share: table(3)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The answer of a kernel for a port with PFC on priority 3, which has DSCP 26, and with DSCP 48 in priority 6.
    fn answer() -> Vec<u8> {
        let mut pfc = vec![8, 1 << 3, 0, 0, 0, 0, 0, 0];
        for counter in (100..108u64).chain(200..208) {
            pfc.extend(counter.to_ne_bytes());
        }
        assert_eq!(pfc.len(), 136, "struct ieee_pfc");
        let mut ets = vec![0, 8, 0];
        ets.extend([50, 0, 0, 50, 0, 0, 0, 0]);
        ets.extend([0; 8]);
        ets.extend([2, 0, 0, 2, 1, 255, 0, 0]);
        ets.extend([0, 1, 2, 3, 4, 5, 6, 6]);
        ets.extend([0; 24]);
        assert_eq!(ets.len(), 59, "struct ieee_ets");
        let entry = |selector, priority, protocol: u16| {
            let [low, high] = protocol.to_ne_bytes();
            [selector, priority, low, high]
        };
        let entries = [
            entry(5, 6, 48),
            entry(5, 3, 26),
            entry(5, 2, 26),
            // FCoE, the default priority, an invalid DSCP and an invalid priority.
            entry(1, 5, 0x8906),
            entry(1, 1, 0),
            entry(5, 1, 64),
            entry(5, 8, 10),
        ];
        let table = Request::new(0, 0, &[]);
        let table = entries.iter().fold(table, |table, entry| table.attribute(DCB_ATTR_IEEE_APP, entry));
        let table = &table.finish(0)[16..];
        let ieee: [(u16, &[u8]); 3] =
            [(DCB_ATTR_IEEE_ETS, &ets), (DCB_ATTR_IEEE_PFC, &pfc), (DCB_ATTR_IEEE_APP_TABLE, table)];
        let message = Request::new(libc::RTM_GETDCB, 0, &[0, DCB_CMD_IEEE_GET, 0, 0])
            .attribute(DCB_ATTR_IFNAME, b"eth0\0")
            .nested(DCB_ATTR_IEEE, &ieee)
            // DCB_ATTR_DCBX.
            .attribute(14, &[5]);
        message.finish(7)[16..].to_vec()
    }

    #[test]
    fn every_part_of_an_answer_is_read() {
        let dcb = parse(&answer()).unwrap();
        let pfc = dcb.pfc.unwrap();
        assert_eq!((pfc.capability, pfc.enabled), (8, [0, 1, 2, 3, 4, 5, 6, 7].map(|p| p == 3)));
        assert_eq!((pfc.sent[0], pfc.sent[7], pfc.received[0], pfc.received[7]), (100, 107, 200, 207));
        let ets = dcb.ets.unwrap();
        assert_eq!((ets.classes, ets.class), (8, [0, 1, 2, 3, 4, 5, 6, 6]));
        assert_eq!((ets.selection[3], ets.share[3]), (Selection::Share, 50));
        let others = [Selection::Shaper, Selection::Other(255), Selection::Strict];
        assert_eq!(ets.selection[4..7], others);
        assert_eq!(dcb.dscp, [(26, 2), (26, 3), (48, 6)]);
        assert_eq!([26, 48, 0].map(|dscp| dcb.priority(dscp)), [3, 6, 1]);
    }

    #[test]
    fn unreported_attributes_are_omitted() {
        let message = Request::new(libc::RTM_GETDCB, 0, &[0; 4]).nested(DCB_ATTR_IEEE, &[]).finish(7);
        assert_eq!(parse(&message[16..]), Some(Dcb::default()));
        assert_eq!(parse(&[0; 4]), None);
        assert_eq!(parse_ets(&[9; 59]), None);
    }

    #[test]
    fn no_answer_causes_a_panic() {
        let whole = answer();
        for cut in 0..whole.len() {
            let _ = parse(&whole[..cut]);
        }
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        for _ in 0..20_000 {
            let mut bytes = whole.clone();
            for _ in 0..4 {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                let at = state as usize % bytes.len();
                bytes[at] = (state >> 32) as u8;
            }
            if let Some(dcb) = parse(&bytes) {
                assert!(dcb.dscp.iter().all(|(dscp, priority)| *dscp < 64 && *priority < 8));
                assert!(dcb.default_priority < 8);
                assert!(dcb.ets.is_none_or(|ets| ets.class.iter().all(|class| *class < 8)));
            }
        }
    }
}
