//! Where the two processes stand, and what is between them.

use std::cell::Cell;
use std::fs::Permissions;
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

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

/// A link between two ends; its namespaces and files go when it does.
#[derive(Debug)]
pub(crate) struct Link {
    driver: Driver,
    mtu: u32,
    /// Of each end, none on loopback.
    namespaces: Vec<String>,
    /// The directory of sockets.
    directory: PathBuf,
    pub(crate) description: String,
    /// So that no two jobs meet in one socket or file.
    job: Cell<u32>,
}

const INTERFACE: &str = "veth0";
const PREFIX: &str = "ferroce-wire-";

impl Link {
    /// # Errors
    /// Why this machine or user can't have it.
    pub(crate) fn new(driver: Driver, mtu: u32) -> Outcome<Link> {
        remove_abandoned();
        let name = format!("{PREFIX}{}-{mtu}", std::process::id());
        let parent =
            if Path::new("/dev/shm").is_dir() { PathBuf::from("/dev/shm") } else { std::env::temp_dir() };
        let directory = parent.join(&name);
        std::fs::create_dir(&directory)?;
        // The two processes may be of another user.
        std::fs::set_permissions(&directory, Permissions::from_mode(0o1777))?;
        let mut link = Link {
            driver,
            mtu,
            namespaces: Vec::new(),
            directory,
            description: String::new(),
            job: Cell::new(0),
        };
        match driver {
            Driver::Memif => link.description = "net_memif between two processes".to_owned(),
            Driver::Shm | Driver::ShmNoIcrc => link.description = "shared memory of two processes".to_owned(),
            Driver::Udp if !is_root() => {
                link.description = "127.0.0.1 and 127.0.0.2 of lo (no right to make a veth)".to_owned();
            }
            Driver::AfXdp if !is_root() => return Err("needs root, for network namespaces and AF_XDP".into()),
            Driver::AfXdp | Driver::Udp => link.make_veth(&name)?,
        }
        Ok(link)
    }

    fn make_veth(&mut self, name: &str) -> Outcome<()> {
        let mtu = self.mtu;
        for end in 0..2 {
            let namespace = format!("{name}-{end}");
            ip(&format!("netns add {namespace}"))?;
            self.namespaces.push(namespace);
        }
        let [a, b] = [&self.namespaces[0], &self.namespaces[1]];
        ip(&format!(
            "-n {a} link add {INTERFACE} mtu {mtu} type veth peer name {INTERFACE} netns {b} mtu {mtu}"
        ))?;
        for (end, namespace) in self.namespaces.iter().enumerate() {
            if Path::new("/proc/sys/net/ipv6").exists() {
                ip(&format!("-n {namespace} link set {INTERFACE} addrgenmode none"))?;
            }
            ip(&format!("-n {namespace} addr add {}/24 dev {INTERFACE}", self.address(end)))?;
            ip(&format!("-n {namespace} link set lo up"))?;
            ip(&format!("-n {namespace} link set {INTERFACE} up"))?;
        }
        self.description = format!("veth between two namespaces, MTU {mtu}");
        Ok(())
    }

    fn switch(&self) -> String {
        format!("shm:{PREFIX}{}-{}", std::process::id(), self.job.get())
    }

    /// A command that runs this program at an end.
    pub(crate) fn command(&self, end: usize) -> Outcome<Command> {
        let program = std::env::current_exe()?;
        Ok(match self.namespaces.get(end) {
            Some(namespace) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", namespace]).arg(program);
                command
            }
            None => Command::new(program),
        })
    }

    pub(crate) fn address(&self, end: usize) -> IpAddr {
        let last = end as u8 + 1;
        let first_three = if self.namespaces.is_empty() && self.driver != Driver::Memif {
            [127, 0, 0]
        } else {
            [10, 77, 1]
        };
        let [a, b, c] = first_three;
        Ipv4Addr::new(a, b, c, last).into()
    }

    /// What `--device` says for an end.
    pub(crate) fn device(&self, end: usize) -> String {
        let address = self.address(end);
        match self.driver {
            Driver::AfXdp => format!("af_xdp:{INTERFACE}"),
            Driver::Shm => self.switch(),
            Driver::ShmNoIcrc => format!("{},shm=noicrc", self.switch()),
            // Between loopback addresses it would be shared memory otherwise.
            Driver::Udp => format!("udp:{address},shm=off"),
            Driver::Memif => {
                // The one that is written to sees the ring's memory as its own: one copy less for it.
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

    /// What comes now is another job.
    pub(crate) fn next_job(&self) {
        self.job.set(self.job.get() + 1);
    }

    /// Where an end says what is not for us.
    pub(crate) fn log(&self, end: usize) -> PathBuf {
        self.directory.join(format!("log-{end}"))
    }

    /// The beginning of names for sockets where shared memory is handed over.
    pub(crate) fn shared(&self) -> String {
        self.directory.join(format!("ring-{}", self.job.get())).display().to_string()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        for namespace in &self.namespaces {
            if let Err(error) = ip(&format!("netns del {namespace}")) {
                eprintln!("wire: a network namespace stays behind: {error}");
            }
        }
        if let Err(error) = std::fs::remove_dir_all(&self.directory) {
            eprintln!("wire: {} stays behind: {error}", self.directory.display());
        }
    }
}

pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Removes namespaces whose maker was killed.
fn remove_abandoned() {
    for entry in std::fs::read_dir("/run/netns").into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let pid = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next());
        let is_gone =
            pid.is_some_and(|pid| pid.parse::<u32>().is_ok() && !Path::new("/proc").join(pid).exists());
        if is_gone && let Err(error) = ip(&format!("netns del {name}")) {
            eprintln!("wire: a killed process left a network namespace behind: {error}");
        }
    }
}

fn ip(arguments: &str) -> Outcome<()> {
    let output = Command::new("ip").args(arguments.split_whitespace()).output();
    let output = output.map_err(|error| format!("the command `ip` (package iproute2): {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("`ip {arguments}`: {}", String::from_utf8_lossy(&output.stderr).trim()).into())
}
