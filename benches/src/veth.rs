//! Two network namespaces with a veth between them, for benchmarks between hosts.

use std::error::Error;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;

/// A veth between two namespaces, which are removed on drop.
#[derive(Debug)]
pub struct Veth {
    namespaces: Vec<String>,
}

impl Veth {
    /// The name of the interface in either namespace.
    pub const INTERFACE: &'static str = "veth0";

    /// Creates one with this MTU, in namespaces with the benchmark's name. Namespaces of killed runs are removed first.
    ///
    /// # Errors
    /// `ip` fails.
    pub fn new(benchmark: &str, mtu: u32) -> Result<Veth, Box<dyn Error>> {
        remove_abandoned(benchmark);
        let mut veth = Veth { namespaces: Vec::new() };
        for end in 0..2 {
            let namespace = format!("{}{}-{mtu}-{end}", prefix(benchmark), std::process::id());
            ip(&format!("netns add {namespace}"))?;
            veth.namespaces.push(namespace);
        }
        for namespace in &veth.namespaces {
            ip(&format!("-n {namespace} link set lo up"))?;
        }
        veth.link(0, mtu)?;
        Ok(veth)
    }

    /// As [`new`](Veth::new), with `rails` links, `veth0` and following, each with `rate` in each direction, in `tc`'s
    /// format: `2gbit`.
    ///
    /// # Errors
    /// `ip` or `tc` fails.
    pub fn with_rails(benchmark: &str, mtu: u32, rails: u8, rate: &str) -> Result<Veth, Box<dyn Error>> {
        let veth = Veth::new(benchmark, mtu)?;
        for rail in 0..rails {
            if rail > 0 {
                veth.link(rail, mtu)?;
            }
            for namespace in &veth.namespaces {
                run(
                    "tc",
                    &format!(
                        "-n {namespace} qdisc add dev veth{rail} root tbf rate {rate} burst 512k limit 16m"
                    ),
                )?;
            }
        }
        Ok(veth)
    }

    fn link(&self, number: u8, mtu: u32) -> Result<(), Box<dyn Error>> {
        let [a, b] = [&self.namespaces[0], &self.namespaces[1]];
        let name = format!("veth{number}");
        ip(&format!("-n {a} link add {name} mtu {mtu} type veth peer name {name} netns {b} mtu {mtu}"))?;
        for (end, namespace) in self.namespaces.iter().enumerate() {
            if Path::new("/proc/sys/net/ipv6").exists() {
                ip(&format!("-n {namespace} link set {name} addrgenmode none"))?;
            }
            ip(&format!("-n {namespace} addr add {}/24 dev {name}", Veth::address_on(number, end)))?;
            ip(&format!("-n {namespace} link set {name} up"))?;
        }
        Ok(())
    }

    /// Sets a link down at an end, or up again.
    ///
    /// # Errors
    /// `ip` fails.
    pub fn set_link(&self, number: u8, end: usize, is_up: bool) -> Result<(), Box<dyn Error>> {
        let state = if is_up { "up" } else { "down" };
        ip(&format!("-n {} link set veth{number} {state}", self.namespaces[end]))
    }

    /// The address of an end.
    pub fn address(end: usize) -> Ipv4Addr {
        Veth::address_on(0, end)
    }

    /// The address of an end of a link.
    pub fn address_on(number: u8, end: usize) -> Ipv4Addr {
        Ipv4Addr::new(10, 77, 1 + number, end as u8 + 1)
    }

    /// `ip netns exec NAMESPACE` of an end, to be completed with a command.
    pub fn command(&self, end: usize) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.namespaces[end]]);
        command
    }

    /// The Ethernet address of an end, as text.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub fn mac(&self, end: usize) -> Result<String, Box<dyn Error>> {
        let path = format!("/sys/class/net/{}/address", Veth::INTERFACE);
        let output = self.command(end).args(["cat", &path]).output()?;
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned()),
            false => Err(format!("{path}: {}", String::from_utf8_lossy(&output.stderr).trim()).into()),
        }
    }

    /// The namespace of an end.
    pub fn namespace(&self, end: usize) -> &str {
        &self.namespaces[end]
    }
}

impl Drop for Veth {
    fn drop(&mut self) {
        for namespace in &self.namespaces {
            if let Err(error) = ip(&format!("netns del {namespace}")) {
                eprintln!("a network namespace stays behind: {error}");
            }
        }
    }
}

/// Whether this process can create one.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn prefix(benchmark: &str) -> String {
    format!("ferroce-{benchmark}-")
}

/// Removes namespaces whose creator was killed.
fn remove_abandoned(benchmark: &str) {
    let prefix = prefix(benchmark);
    for entry in std::fs::read_dir("/run/netns").into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let pid = name.strip_prefix(&prefix).and_then(|rest| rest.split('-').next());
        let is_gone =
            pid.is_some_and(|pid| pid.parse::<u32>().is_ok() && !Path::new("/proc").join(pid).exists());
        if is_gone && let Err(error) = ip(&format!("netns del {name}")) {
            eprintln!("a killed process left a network namespace behind: {error}");
        }
    }
}

fn ip(arguments: &str) -> Result<(), Box<dyn Error>> {
    run("ip", arguments)
}

fn run(command: &str, arguments: &str) -> Result<(), Box<dyn Error>> {
    let output = Command::new(command).args(arguments.split_whitespace()).output();
    let output = output.map_err(|error| format!("the command `{command}` (package iproute2): {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("`{command} {arguments}`: {}", String::from_utf8_lossy(&output.stderr).trim()).into())
}
