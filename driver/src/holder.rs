//! The holders of UDP port 4791 of an address.
//!
//! The RoCE packets to an address are received by UDP sockets bound to it, or by an AF_XDP port before any socket. So every
//! driver that receives from a kernel interface binds the port, even if it receives nothing through the socket: a second one that
//! does not share it (`slots`) gets an error that names the first.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::fs;
use std::net::IpAddr;

use crate::netlink::Interface;
use crate::netlink::sockets::{self, BoundSocket};
use crate::printable::is_unprintable;
use crate::rnic::remedy::has_rxe;
use crate::{Error, ROCE_PORT};

/// The holder of a socket on UDP port 4791.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// Its address; unspecified for all of its IP version.
    pub address: IpAddr,
    /// The index of its interface, if it is bound to one, as an AF_XDP port is; also `None` on a kernel without
    /// `CONFIG_INET_UDP_DIAG`, which does not report it.
    pub interface: Option<u32>,
    /// The user of the socket.
    pub user: u32,
    /// The process, if visible to this one: root sees all of its PID namespace, others see their own.
    pub process: Option<Process>,
    /// Whether it is the kernel's: rdma_rxe has all addresses as soon as it has one device.
    pub is_kernel: bool,
}

/// A process of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Process {
    /// Its PID.
    pub pid: u32,
    /// Its command, as `ps -o comm` shows it.
    pub name: String,
}

impl Process {
    /// The process with this PID; `None` if it has ended, or is not visible to this process.
    pub fn of(pid: u32) -> Option<Process> {
        let name = fs::read(format!("/proc/{pid}/comm")).ok()?;
        // A process chooses its name itself.
        let name = String::from_utf8_lossy(name.trim_ascii_end()).replace(is_unprintable, "\u{fffd}");
        Some(Process { pid, name })
    }
}

impl Holder {
    /// All holders bound to port 4791 of `address`, one of the interface's.
    ///
    /// # Errors
    /// [`Error::Os`] if the kernel does not list sockets.
    pub fn all(address: IpAddr, interface: &Interface) -> Result<Vec<Holder>, Error> {
        let sockets = sockets_on(address, interface)?;
        let processes = processes_with(sockets.iter().map(|socket| socket.inode));
        let mut all: Vec<Holder> = Vec::new();
        for socket in &sockets {
            let holder = Holder::new(socket, processes.get(&socket.inode));
            if !all.contains(&holder) {
                all.push(holder);
                if all.len() == MAX_HOLDERS {
                    break;
                }
            }
        }
        Ok(all)
    }

    /// The other processes that have AF_XDP ports on the interface.
    #[cfg(feature = "af_xdp")]
    pub(crate) fn of_af_xdp(interface: &Interface) -> Vec<Holder> {
        let own = std::process::id();
        let is_other = |holder: &Holder| holder.process.as_ref().is_none_or(|process| process.pid != own);
        let mut others: Vec<Holder> = Vec::new();
        for address in interface.gid_order() {
            for holder in Holder::all(address, interface).unwrap_or_default() {
                let is_named =
                    |other: &Holder| (other.user, &other.process) == (holder.user, &holder.process);
                if holder.interface.is_some() && is_other(&holder) && !others.iter().any(is_named) {
                    others.push(holder);
                }
            }
        }
        others
    }

    /// The error for a socket that could not be bound to the address.
    pub(crate) fn in_the_way(address: IpAddr, interface: &Interface) -> Error {
        let first = sockets_on(address, interface).ok().and_then(|all| all.into_iter().next());
        Error::PortInUse { address, port: ROCE_PORT, holder: first.as_ref().map(Holder::of) }
    }

    pub(crate) fn of(socket: &BoundSocket) -> Holder {
        Holder::new(socket, processes_with([socket.inode]).get(&socket.inode))
    }

    fn new(socket: &BoundSocket, process: Option<&Process>) -> Holder {
        let is_kernel = process.is_none() && may_be_kernels(socket);
        Holder {
            address: socket.address,
            interface: socket.interface.filter(|index| *index != 0),
            user: socket.user,
            process: process.cloned(),
            is_kernel,
        }
    }

    /// Why a driver could not also bind the port, for users; ends with "; ".
    pub(crate) fn why_not_shared(&self, address: IpAddr) -> String {
        let own = rustix::process::geteuid().as_raw();
        match self.user {
            _ if self.is_kernel => String::new(),
            user if user != own => {
                format!(
                    "it belongs to user {user}, this process to user {own}, and only processes of one user share an \
                     address; "
                )
            }
            _ => format!(
                "it does not share the address, or not with this driver (udp:{address} is shared by processes of ferroce, also \
                 with an AF_XDP port that came first); "
            ),
        }
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let port = if self.interface.is_some() { ", an AF_XDP port" } else { "" };
        match &self.process {
            Some(Process { pid, name }) => write!(f, "'{name}' (pid {pid}{port})"),
            None if self.is_kernel => f.write_str("the kernel (rdma_rxe, see `rdma link`)"),
            None => write!(f, "a process of user {}{port}", self.user),
        }
    }
}

/// The text of an error about the AF_XDP ports on an interface.
pub(crate) fn there(holders: &[Holder]) -> String {
    let named: Vec<_> = holders.iter().map(ToString::to_string).collect();
    if named.is_empty() { String::new() } else { format!("; on the interface: {}", named.join(", ")) }
}

/// The sockets on port 4791 to which packets to `address`, one of the interface's, may go.
pub(crate) fn sockets_on(address: IpAddr, interface: &Interface) -> Result<Vec<BoundSocket>, Error> {
    let mut bound = sockets::bound_to(ROCE_PORT)?;
    bound.retain(|socket| socket.covers(address, interface.index));
    Ok(bound)
}

/// The most holders reported for an address. Any user may have many.
const MAX_HOLDERS: usize = 64;

/// Whether a socket is rdma_rxe's. The kernel does not mark it: it is root's, on all addresses, and no process has it open.
#[cfg(feature = "af_xdp")]
pub(crate) fn is_kernels(socket: &BoundSocket) -> bool {
    may_be_kernels(socket) && processes_with([socket.inode]).is_empty()
}

/// Whether the socket may be the kernel's, if no process has it open.
fn may_be_kernels(socket: &BoundSocket) -> bool {
    socket.inode == 0 || (socket.user == 0 && socket.address.is_unspecified() && has_rxe())
}

/// The processes that have these sockets open, by the sockets' inodes. A child may have the same socket; the oldest counts.
/// `/proc` is read once for all sockets.
pub(crate) fn processes_with(inodes: impl IntoIterator<Item = u32>) -> HashMap<u32, Process> {
    let mut wanted: HashSet<u32> = inodes.into_iter().filter(|inode| *inode != 0).collect();
    let mut found = HashMap::new();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut pids: Vec<u32> = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    for pid in pids {
        if wanted.is_empty() {
            break;
        }
        let Ok(open) = fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
        let links = open.flatten().filter_map(|fd| fs::read_link(fd.path()).ok());
        let sockets = links.filter_map(|link| {
            link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse::<u32>().ok()
        });
        let own: Vec<u32> = sockets.filter(|inode| wanted.remove(inode)).collect();
        // A process may have ended since.
        if let Some(process) = Some(pid).filter(|_| !own.is_empty()).and_then(Process::of) {
            found.extend(own.into_iter().map(|inode| (inode, process.clone())));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsRawFd;

    use super::*;

    /// Sockets of one process are found together, and its name has no control characters.
    #[test]
    fn processes_of_several_sockets_have_plain_names() {
        let sockets = [(); 3].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        let inodes = sockets.each_ref().map(|socket| {
            let link = fs::read_link(format!("/proc/self/fd/{}", socket.as_raw_fd())).unwrap();
            let inode = link.to_str().unwrap().strip_prefix("socket:[").unwrap().strip_suffix(']').unwrap();
            inode.parse::<u32>().unwrap()
        });
        // The name of the process is that of its first thread, and only that process may set it.
        let comm = "/proc/self/comm";
        let before = fs::read(comm).unwrap();
        fs::write(comm, "\u{1b}[2J\u{7}x").unwrap();
        let found = processes_with(inodes);
        fs::write(comm, before).unwrap();
        assert_eq!(found.len(), inodes.len(), "{found:?}");
        for inode in inodes {
            let process = Process { pid: std::process::id(), name: "\u{fffd}[2J\u{fffd}x".to_owned() };
            assert_eq!(found[&inode], process);
        }
    }
}
