//! Attaching the XDP program to an interface, and detaching it.
//!
//! The program is attached through a BPF link. The kernel detaches it when the last process that has the link open
//! ends, whether it returns, panics or is killed.
//!
//! Sockets on other queues of the interface, including those of other processes, join the link and its XSKMAP: they
//! share one program and its maps. A program of another owner is never replaced.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::time::Duration;

use tracing::info;

use super::bpf;
use super::filter::{DESTINATION, destination, roce_filter};
use super::{os_error, permission};
use crate::Error;
use crate::holder::{self, Holder};
use crate::netlink::{AttachedXdp, Interface, Netlink, XdpMode};

/// The filter on an interface. It stays attached as long as this value exists.
#[derive(Debug)]
pub(super) struct Attachment {
    _link: OwnedFd,
    /// The map of destinations. This field and the next one are in the order of the program's maps.
    destinations: OwnedFd,
    xskmap: OwnedFd,
    pub(super) mode: XdpMode,
    /// Why the mode is not native, if it is not.
    pub(super) why_generic: Option<String>,
}

impl Attachment {
    /// Attaches the filter, native if the driver supports it, otherwise generic; or joins the filter that other ferroce
    /// sockets have attached to the interface.
    pub(super) fn new(netlink: &Netlink, interface: &Interface, roce_v1: bool) -> Result<Attachment, Error> {
        for _ in 0..ATTEMPTS {
            let name = &interface.name;
            let attached = match netlink.interface(name)?.xdp {
                None => Self::attach(interface, roce_v1),
                Some(xdp) => Self::take_over(netlink, interface, xdp, roce_v1),
            }?;
            if let Some(attached) = attached {
                return Ok(attached);
            }
        }
        let busy = io::Error::from_raw_os_error(libc::EBUSY);
        Err(os_error("attaching the XDP program (others keep changing it)", &interface.name, busy))
    }

    /// Directs the frames of `queue` to an AF_XDP socket, until the socket closes.
    pub(super) fn direct(&self, queue: u32, socket: RawFd) -> io::Result<()> {
        bpf::direct(&self.xskmap, queue, socket)
    }

    /// Redirects packets to an address or a group from the queue: all of them ([`ALL`](super::filter::ALL)), or those
    /// of `which`.
    pub(super) fn admit(&self, to: IpAddr, queue: u32, which: u8) -> io::Result<()> {
        bpf::insert(&self.destinations, &destination(to, queue), which)
    }

    /// Leaves packets to the address or group to the kernel from now on.
    pub(super) fn dismiss(&self, to: IpAddr, queue: u32) -> io::Result<()> {
        bpf::remove(&self.destinations, &destination(to, queue))
    }

    /// Returns `None` if another program was attached first.
    fn attach(interface: &Interface, roce_v1: bool) -> Result<Option<Attachment>, Error> {
        let os = |what| move |source| refused(what, interface, source);
        let xskmap = bpf::create_xskmap("ferroce_xsks", interface.rx_queues.max(MAP_ENTRIES))
            .map_err(os("creating an XSKMAP"))?;
        let destinations = bpf::create_table::<DESTINATION>("ferroce_dest", DESTINATIONS_MAX)
            .map_err(os("creating a map of addresses"))?;
        let filter = roce_filter(destinations.as_raw_fd(), xskmap.as_raw_fd(), roce_v1);
        let program = bpf::load_xdp(program_name(roce_v1), &filter).map_err(os("loading the XDP program"))?;
        let native = match bpf::attach_xdp(&program, interface.index, XDP_FLAGS_DRV_MODE) {
            Ok(link) => {
                let mode = XdpMode::Native;
                return Ok(Some(Attachment { _link: link, destinations, xskmap, mode, why_generic: None }));
            }
            Err(e) if is(&e, &[libc::EBUSY, libc::EEXIST]) => return Ok(None),
            Err(e) if is(&e, &[libc::EPERM]) => {
                return Err(refused("attaching the XDP program", interface, e));
            }
            Err(e) => e,
        };
        match bpf::attach_xdp(&program, interface.index, XDP_FLAGS_SKB_MODE) {
            Ok(link) => Ok(Some(Attachment {
                _link: link,
                destinations,
                xskmap,
                mode: XdpMode::Generic,
                why_generic: Some(format!("native XDP refused: {native}")),
            })),
            Err(e) if is(&e, &[libc::EBUSY, libc::EEXIST]) => Ok(None),
            Err(e) => Err(refused("attaching the XDP program", interface, e)),
        }
    }

    /// Handles a program that is already attached: joins it if it is ferroce's and in use, removes it if it was left
    /// behind (and returns `None`), and refuses if it has another owner.
    fn take_over(
        netlink: &Netlink,
        interface: &Interface,
        xdp: AttachedXdp,
        roce_v1: bool,
    ) -> Result<Option<Attachment>, Error> {
        let os = |source: io::Error| match source.raw_os_error() {
            Some(libc::EPERM) => Error::Permission {
                what: "finding out which XDP program is attached",
                interface: interface.name.clone(),
                capability: "CAP_SYS_ADMIN",
                cure: match &holder::there(&Holder::of_af_xdp(interface))[..] {
                    "" => format!("run as root, or detach it: `ip link set {} xdp off`", interface.name),
                    others => format!("run as root, to use queues next to other sockets{others}"),
                },
            },
            _ => os_error("reading the attached XDP program", &interface.name, source),
        };
        let program = match bpf::program_by_id(xdp.program) {
            Err(e) if is(&e, &[libc::ENOENT]) => return Ok(None),
            other => other.map_err(os)?,
        };
        let info = bpf::program_info(&program).map_err(os)?;
        if ![program_name(false), program_name(true)].contains(&info.name.as_str()) {
            return Err(Error::ForeignProgram {
                interface: interface.name.clone(),
                program: if info.name.is_empty() { "(unnamed)".to_owned() } else { info.name },
                id: xdp.program,
            });
        }
        let link = match bpf::link_of(xdp.program, interface.index) {
            // A BPF link on this machine, maybe the one in question, is being created: look again.
            Err(e) if is(&e, &[libc::EAGAIN]) => {
                std::thread::sleep(Duration::from_millis(1));
                return Ok(None);
            }
            other => other.map_err(os)?,
        };
        let Some(link) = link else {
            info!(
                interface = interface.name,
                program = xdp.program,
                "replacing the XDP program {} that an earlier process left behind",
                info.name
            );
            return match netlink.replace_xdp(interface, xdp.mode, Some(program.as_fd()), None) {
                // Already replaced, or attached through a link after all: look again.
                Err(e) if is(&e, &[libc::EEXIST, libc::EBUSY]) => Ok(None),
                Err(e) => Err(refused("detaching the XDP program left behind", interface, e)),
                Ok(()) => Ok(None),
            };
        };
        if info.name != program_name(roce_v1) {
            return Err(Error::Invalid {
                parameter: "roce_v1",
                value: roce_v1.to_string(),
                expected: format!(
                    "{}, as the other ferroce sockets on '{}' have it; they share one XDP program",
                    !roce_v1, interface.name
                ),
            });
        }
        let [destinations, xskmap] = info.maps[..] else { return Ok(None) };
        let [destinations, xskmap] =
            [bpf::map_by_id(destinations).map_err(os)?, bpf::map_by_id(xskmap).map_err(os)?];
        let why_generic = (xdp.mode != XdpMode::Native)
            .then(|| "shares the generic XDP program of another ferroce socket".to_owned());
        Ok(Some(Attachment { _link: link, destinations, xskmap, mode: xdp.mode, why_generic }))
    }
}

/// How often another process may attach or detach between the check and the action.
const ATTEMPTS: u32 = 10;
/// The least number of entries, so that a queue count raised later still fits.
const MAP_ENTRIES: u32 = 64;
/// Addresses and groups of all queues.
const DESTINATIONS_MAX: u32 = 1 << 16;
const XDP_FLAGS_SKB_MODE: u32 = 1 << 1;
const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;

/// The name by which a ferroce filter is recognised (15 characters at most).
fn program_name(roce_v1: bool) -> &'static str {
    if roce_v1 { "ferroce_rx_v1" } else { "ferroce_rx" }
}

fn refused(what: &'static str, interface: &Interface, source: io::Error) -> Error {
    if is(&source, &[libc::EPERM, libc::EACCES]) {
        permission(what, &interface.name, "CAP_BPF and CAP_NET_ADMIN")
    } else {
        os_error(what, &interface.name, source)
    }
}

fn is(error: &io::Error, codes: &[i32]) -> bool {
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

#[cfg(test)]
mod tests {
    use ferroce_driver_test_support::namespaces::{Namespaces, VETH};
    use ferroce_driver_test_support::patience::until;

    use super::super::bpf::Instruction;
    use super::*;

    /// Checks that the interface has no program, after a second at the latest: a child process that another test starts
    /// holds a copy of each link until it executes its program.
    fn assert_bare(netlink: &Netlink) {
        let xdp = || netlink.interface(VETH).unwrap().xdp;
        until(Duration::from_secs(1), || xdp().is_none().then_some(()), || format!("the end of {:?}", xdp()));
    }

    /// A program that passes all packets, under the given name.
    fn program(name: &str) -> OwnedFd {
        let op = |code, immediate| Instruction { code, registers: 0, offset: 0, immediate };
        bpf::load_xdp(name, &[op(0xb7, 2), op(0x95, 0)]).unwrap()
    }

    fn veth() -> (Netlink, Interface) {
        let netlink = Netlink::open().unwrap();
        let interface = netlink.interface(VETH).unwrap();
        (netlink, interface)
    }

    #[test]
    fn a_program_left_behind_is_replaced() {
        let Some(pair) = Namespaces::new(1500) else { return };
        for (mode, name) in [(XdpMode::Native, "ferroce_rx"), (XdpMode::Generic, "ferroce_rx_v1")] {
            pair.in_a(|| {
                let (netlink, interface) = veth();
                netlink.replace_xdp(&interface, mode, None, Some(program(name).as_fd())).unwrap();
                let left = netlink.interface(VETH).unwrap().xdp.unwrap();
                assert_eq!(left.mode, mode);
                let attachment = Attachment::new(&netlink, &interface, false).unwrap();
                let now = netlink.interface(VETH).unwrap().xdp.unwrap();
                assert_ne!(now.program, left.program);
                assert_eq!((now.mode, attachment.mode), (XdpMode::Native, XdpMode::Native));
                drop(attachment);
                assert_bare(&netlink);
            });
        }
    }

    #[test]
    fn a_foreign_program_is_named_and_stays() {
        let Some(pair) = Namespaces::new(1500) else { return };
        pair.in_a(|| {
            let (netlink, interface) = veth();
            let refused = |id: u32| {
                let error = Attachment::new(&netlink, &interface, false).unwrap_err().to_string();
                assert_eq!(
                    error,
                    format!(
                        "'veth0' already has the XDP program 'firewall' (id {id}), which is not ferroce's; \
                         stop its owner, or detach it with `ip link set veth0 xdp off`"
                    )
                );
                assert_eq!(netlink.interface(VETH).unwrap().xdp.unwrap().program, id);
            };
            let other = program("firewall");
            let link = bpf::attach_xdp(&other, interface.index, XDP_FLAGS_DRV_MODE).unwrap();
            refused(netlink.interface(VETH).unwrap().xdp.unwrap().program);
            drop(link);
            assert_bare(&netlink);
            netlink.replace_xdp(&interface, XdpMode::Generic, None, Some(other.as_fd())).unwrap();
            refused(netlink.interface(VETH).unwrap().xdp.unwrap().program);
        });
    }
}
