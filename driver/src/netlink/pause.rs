//! Pause frames of a port, as reported by its driver through ethtool netlink (linux/ethtool_netlink.h).

use std::io;

use super::codec::{Request, attributes, u16_at, u64_at};
use super::socket::NetlinkSocket;
use super::{Interface, ONE, os_error};
use crate::Error;

/// Flow control of a whole port (IEEE 802.3 annex 31B), which stops all its traffic; `ethtool -a` prints it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pause {
    /// Whether both ends of the link negotiate it; then `rx` and `tx` are what this end advertises.
    pub autoneg: bool,
    /// Whether the port obeys pause frames.
    pub rx: bool,
    /// Whether the port sends pause frames.
    pub tx: bool,
    /// Pause frames received; `None` if the driver does not report them, or if the kernel is older than 5.10.
    pub received: Option<u64>,
    /// Pause frames sent; `None` if the driver does not report them.
    pub sent: Option<u64>,
}

impl Pause {
    /// The report of an interface's driver, in the network namespace of the calling thread. `None` if the driver has no
    /// pause frames (veth, virtio) or the kernel is older than 5.10.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn of(interface: &Interface) -> Result<Option<Pause>, Error> {
        let socket = NetlinkSocket::open(libc::NETLINK_GENERIC)?;
        let family = Request::new(GENL_ID_CTRL, ONE, &[CTRL_CMD_GETFAMILY, 1, 0, 0])
            .attribute(CTRL_ATTR_FAMILY_NAME, b"ethtool\0");
        let mut found = None;
        let pause = socket.exchange(family, |payload| found = parse_family(payload)).and_then(|()| {
            let family = found.ok_or_else(empty)?;
            let mut pause = None;
            socket.exchange(request(family, interface.index), |payload| pause = parse(payload))?;
            pause.ok_or_else(empty)
        });
        match pause {
            Ok(pause) => Ok(Some(pause)),
            // A kernel without ethtool netlink has no such family.
            Err(e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOENT)) => Ok(None),
            Err(e) => Err(os_error("asking for the pause frames of a port", &interface.name, e)),
        }
    }
}

fn empty() -> io::Error {
    io::Error::other("an answer without its content")
}

/// Bytes of `struct genlmsghdr`.
const GENLMSGHDR: usize = 4;
const GENL_ID_CTRL: u16 = libc::GENL_ID_CTRL as u16;
const CTRL_CMD_GETFAMILY: u8 = libc::CTRL_CMD_GETFAMILY as u8;
const CTRL_ATTR_FAMILY_ID: u16 = libc::CTRL_ATTR_FAMILY_ID as u16;
const CTRL_ATTR_FAMILY_NAME: u16 = libc::CTRL_ATTR_FAMILY_NAME as u16;
const ETHTOOL_MSG_PAUSE_GET: u8 = 21;
const ETHTOOL_A_PAUSE_HEADER: u16 = 1;
const ETHTOOL_A_PAUSE_AUTONEG: u16 = 2;
const ETHTOOL_A_PAUSE_RX: u16 = 3;
const ETHTOOL_A_PAUSE_TX: u16 = 4;
const ETHTOOL_A_PAUSE_STATS: u16 = 5;
const ETHTOOL_A_PAUSE_STAT_TX_FRAMES: u16 = 2;
const ETHTOOL_A_PAUSE_STAT_RX_FRAMES: u16 = 3;
const ETHTOOL_A_HEADER_DEV_INDEX: u16 = 1;
const ETHTOOL_A_HEADER_FLAGS: u16 = 3;
const ETHTOOL_FLAG_STATS: u32 = 1 << 2;

fn request(family: u16, index: u32) -> Request {
    Request::new(family, ONE, &[ETHTOOL_MSG_PAUSE_GET, 1, 0, 0]).nested(
        ETHTOOL_A_PAUSE_HEADER,
        &[
            (ETHTOOL_A_HEADER_DEV_INDEX, &index.to_ne_bytes()),
            (ETHTOOL_A_HEADER_FLAGS, &ETHTOOL_FLAG_STATS.to_ne_bytes()),
        ],
    )
}

fn parse_family(payload: &[u8]) -> Option<u16> {
    let mut all = attributes(payload.get(GENLMSGHDR..)?);
    all.find(|(kind, _)| *kind == CTRL_ATTR_FAMILY_ID).and_then(|(_, value)| u16_at(value, 0))
}

/// Returns `None` if it is not an answer to `ETHTOOL_MSG_PAUSE_GET`.
fn parse(payload: &[u8]) -> Option<Pause> {
    let all = payload.get(GENLMSGHDR..)?;
    let is_on = |wanted| {
        let value = attributes(all).find(|(kind, _)| *kind == wanted).and_then(|(_, value)| value.first());
        value.map(|value| *value != 0)
    };
    let mut pause = Pause {
        autoneg: is_on(ETHTOOL_A_PAUSE_AUTONEG)?,
        rx: is_on(ETHTOOL_A_PAUSE_RX)?,
        tx: is_on(ETHTOOL_A_PAUSE_TX)?,
        ..Pause::default()
    };
    let stats = attributes(all).find(|(kind, _)| *kind == ETHTOOL_A_PAUSE_STATS);
    for (kind, value) in stats.into_iter().flat_map(|(_, stats)| attributes(stats)) {
        match kind {
            ETHTOOL_A_PAUSE_STAT_RX_FRAMES => pause.received = u64_at(value, 0),
            ETHTOOL_A_PAUSE_STAT_TX_FRAMES => pause.sent = u64_at(value, 0),
            _ => {}
        }
    }
    Some(pause)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The answer of a kernel for a port that obeys pause frames and has received 12.
    fn answer() -> Vec<u8> {
        let message = Request::new(20, 0, &[22, 1, 0, 0])
            .nested(
                ETHTOOL_A_PAUSE_HEADER,
                &[(ETHTOOL_A_HEADER_DEV_INDEX, &7u32.to_ne_bytes()), (2, b"eth0\0")],
            )
            .attribute(ETHTOOL_A_PAUSE_AUTONEG, &[0])
            .attribute(ETHTOOL_A_PAUSE_RX, &[1])
            .attribute(ETHTOOL_A_PAUSE_TX, &[0])
            .nested(
                ETHTOOL_A_PAUSE_STATS,
                &[(1, &[]), (ETHTOOL_A_PAUSE_STAT_RX_FRAMES, &12u64.to_ne_bytes())],
            );
        message.finish(7)[16..].to_vec()
    }

    #[test]
    fn an_answer_is_read_with_its_counters() {
        let expected = Pause { autoneg: false, rx: true, tx: false, received: Some(12), sent: None };
        assert_eq!(parse(&answer()), Some(expected));
        let family = Request::new(GENL_ID_CTRL, 0, &[1, 2, 0, 0])
            .attribute(CTRL_ATTR_FAMILY_NAME, b"ethtool\0")
            .attribute(CTRL_ATTR_FAMILY_ID, &20u16.to_ne_bytes());
        assert_eq!(parse_family(&family.finish(1)[16..]), Some(20));
    }

    #[test]
    fn no_answer_causes_a_panic() {
        let whole = answer();
        for cut in 0..whole.len() {
            let _ = (parse(&whole[..cut]), parse_family(&whole[..cut]));
        }
        for (at, wrong) in (0..whole.len()).flat_map(|at| [0, 1, 3, 5, 0x7f, 0xff].map(|wrong| (at, wrong))) {
            let mut bytes = whole.clone();
            bytes[at] = wrong;
            let _ = (parse(&bytes), parse_family(&bytes));
        }
    }
}
