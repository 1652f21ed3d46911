//! The placement of the two processes, and the link between them.

use std::cell::Cell;
use std::fs::Permissions;
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use ferroce_benches::veth::{Veth, is_root};

use crate::end::Outcome;

/// What carries frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum Driver {
    /// AF_XDP on a veth between two network namespaces
    AfXdp,
    /// DPDK's net_memif between two processes
    Memif,
    /// Memory that the two processes share
    Shm,
    /// The same, without the ICRC
    ShmNoIcrc,
    /// UDP sockets on a veth, or between loopback addresses as an ordinary user
    Udp,
}

impl Driver {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Driver::AfXdp => "af_xdp",
            Driver::Memif => "memif",
            Driver::Shm => "shm",
            Driver::ShmNoIcrc => "shm without ICRC",
            Driver::Udp => "udp",
        }
    }

    pub(crate) fn is_shm(self) -> bool {
        matches!(self, Driver::Shm | Driver::ShmNoIcrc)
    }
}

/// A link between two ends; its namespaces and files are removed on drop.
#[derive(Debug)]
pub(crate) struct Link {
    driver: Driver,
    /// `None` on loopback.
    veth: Option<Veth>,
    /// The directory of sockets.
    directory: PathBuf,
    pub(crate) description: String,
    /// Distinguishes the sockets and files of jobs.
    job: Cell<u32>,
}

const PREFIX: &str = "ferroce-wire-";

impl Link {
    /// # Errors
    /// The link is not available on this machine or for this user.
    pub(crate) fn new(driver: Driver, mtu: u32) -> Outcome<Link> {
        let name = format!("{PREFIX}{}-{mtu}", std::process::id());
        let parent =
            if Path::new("/dev/shm").is_dir() { PathBuf::from("/dev/shm") } else { std::env::temp_dir() };
        let directory = parent.join(&name);
        std::fs::create_dir(&directory)?;
        // The two processes may run as another user.
        std::fs::set_permissions(&directory, Permissions::from_mode(0o1777))?;
        let mut link = Link { driver, veth: None, directory, description: String::new(), job: Cell::new(0) };
        match driver {
            Driver::Memif => link.description = "net_memif between two processes".to_owned(),
            Driver::Shm | Driver::ShmNoIcrc => link.description = "shared memory of two processes".to_owned(),
            Driver::Udp if !is_root() => {
                link.description = "127.0.0.1 and 127.0.0.2 of lo (no right to make a veth)".to_owned();
            }
            Driver::AfXdp if !is_root() => return Err("needs root, for network namespaces and AF_XDP".into()),
            Driver::AfXdp | Driver::Udp => {
                link.description = format!("veth between two namespaces, MTU {mtu}");
                link.veth = Some(Veth::new("wire", mtu)?);
            }
        }
        Ok(link)
    }

    fn switch(&self) -> String {
        format!("shm:{PREFIX}{}-{}", std::process::id(), self.job.get())
    }

    /// A command that runs this program at an end.
    pub(crate) fn command(&self, end: usize) -> Outcome<Command> {
        let program = std::env::current_exe()?;
        Ok(match &self.veth {
            Some(veth) => {
                let mut command = veth.command(end);
                command.arg(program);
                command
            }
            None => Command::new(program),
        })
    }

    pub(crate) fn address(&self, end: usize) -> IpAddr {
        if self.veth.is_some() || self.driver == Driver::Memif {
            return Veth::address(end).into();
        }
        Ipv4Addr::new(127, 0, 0, end as u8 + 1).into()
    }

    /// The `--device` argument of an end.
    pub(crate) fn device(&self, end: usize) -> String {
        let address = self.address(end);
        match self.driver {
            Driver::AfXdp => format!("af_xdp:{}", Veth::INTERFACE),
            Driver::Shm => self.switch(),
            Driver::ShmNoIcrc => format!("{},shm=noicrc", self.switch()),
            // Between loopback addresses, shared memory would be used otherwise.
            Driver::Udp => format!("udp:{address},shm=off"),
            Driver::Memif => {
                // The server sees the ring's memory as its own, which saves a copy.
                let role = ["server", "client,zero-copy=yes"][end];
                let socket = self.directory.join(format!("memif-{}", self.job.get()));
                format!(
                    "dpdk:net_memif0@{address}/24 --no-huge -m 512 --no-pci --single-file-segments \
                     --file-prefix=ferroce-{}-{end} --vdev=net_memif0,role={role},id=0,socket={},\
                     socket-abstract=no,bsize=4352,rsize=10",
                    std::process::id(),
                    socket.display()
                )
            }
        }
    }

    /// Starts another job.
    pub(crate) fn next_job(&self) {
        self.job.set(self.job.get() + 1);
    }

    /// The file for an end's other output.
    pub(crate) fn log(&self, end: usize) -> PathBuf {
        self.directory.join(format!("log-{end}"))
    }

    /// The prefix of names for sockets that pass shared memory.
    pub(crate) fn shared(&self) -> String {
        self.directory.join(format!("ring-{}", self.job.get())).display().to_string()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.directory) {
            eprintln!("wire: {} stays behind: {error}", self.directory.display());
        }
    }
}
