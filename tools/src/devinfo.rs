//! `ferroce devinfo`: the devices of this machine, and the missing requirements of faster modes.

mod card_congestion;
mod choice;
mod gpus;
mod rnics;
mod sharers;

use std::collections::BTreeSet;
use std::fs;
use std::net::IpAddr;
use std::process::ExitCode;

use ferroce::driver::netlink::{Dcb, Interface, Netlink, Pause, XdpMode};
use ferroce::driver::{Capabilities, Layer};
use ferroce::{DeviceSpec, Gid, MacAddr, PKEY_DEFAULT, PathMtu};
use serde::Serialize;

use crate::dscp::{DscpClass, cnp_dscp};
use crate::endpoint::is_taken;
use crate::failure::Failure;
use crate::output::{JsonArg, say};
use choice::Choice;
use gpus::Gpus;
use rnics::Rnics;
use sharers::Sharer;

/// Shows network interfaces (GIDs, path MTUs, missing requirements of the faster drivers), RDMA cards (RNICs), and GPUs
/// (PCI and NUMA distances to interfaces and cards, missing requirements of dma-bufs).
///
/// With -d the device is opened, and the report also has the driver that DEVICE selects (and why), the properties of the
/// opened device, and the RNICs on the same interface. For each RNIC the report has, if known, whether its keys are easy
/// to guess, which events it does not raise, and its congestion control. RNICs are found through libibverbs.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  ferroce devinfo
  ferroce devinfo -d eth0
  ferroce devinfo --json | jq '.interfaces[] | {name, gids}'")]
pub struct Args {
    /// Only this device: an interface (eth0), or a driver with its argument (af_xdp:eth0, ibverbs:mlx5_0, loopback).
    #[arg(short, long)]
    device: Option<DeviceSpec>,
    #[command(flatten)]
    json: JsonArg,
}

/// Prints the devices.
///
/// # Errors
/// The named device can't be opened, or the output can't be written.
pub fn run(args: Args) -> Result<ExitCode, Failure> {
    let (info, opened) = gather(args.device.as_ref())?;
    if !args.json.write(&info)? {
        info.print()?;
    }
    opened.map(|()| ExitCode::SUCCESS)
}

#[derive(Debug, Serialize)]
struct DevInfo {
    interfaces: Vec<InterfaceInfo>,
    /// Without -d, or if -d names an RNIC that does not exist, all. Otherwise the device itself if it is an RNIC, or
    /// those on its interface; null if there is neither.
    rnics: Option<Rnics>,
    /// Null with -d.
    gpus: Option<Gpus>,
    /// Whether it describes all interfaces: without -d.
    #[serde(skip)]
    is_of_all: bool,
    /// Null without -d, or if the device can't be opened.
    choice: Option<Choice>,
    /// The properties of the opened device; null without -d, or if it can't be opened.
    device: Option<DeviceInfo>,
    /// The user of the device, if it is in use and can't be opened.
    in_use: Option<String>,
    /// Drivers in this build, as named for -d.
    drivers: Vec<&'static str>,
    /// Missing requirements of AF_XDP that concern this process, for any device.
    missing: Vec<String>,
    /// Optional ones.
    optional: Vec<String>,
}

#[derive(Debug, Serialize)]
struct InterfaceInfo {
    name: String,
    mac: String,
    mtu: u32,
    up: bool,
    carrier: bool,
    kind: Option<String>,
    rx_queues: u32,
    /// In bit/s; null if the driver does not report it.
    line_rate: Option<u64>,
    #[serde(flatten)]
    port: PortInfo,
    /// In bytes; null if the MTU is too small for any.
    path_mtu_ipv4: Option<u32>,
    path_mtu_ipv6: Option<u32>,
    gids: Vec<GidInfo>,
    xdp_program: Option<String>,
    /// Missing requirements for this interface.
    missing: Vec<String>,
    /// Settings that would make it faster.
    optional: Vec<String>,
}

/// Null for what the driver does not report.
#[derive(Debug, Serialize)]
struct PortInfo {
    pause: Option<PauseInfo>,
    pfc: Option<PfcInfo>,
    /// For the DSCPs of the commands' data, of CNPs, and those with an entry in the port.
    dscp: Option<Vec<DscpClass>>,
}

#[derive(Debug, Serialize)]
struct PauseInfo {
    autoneg: bool,
    rx: bool,
    tx: bool,
    frames_received: Option<u64>,
    frames_sent: Option<u64>,
}

#[derive(Debug, Serialize)]
struct PfcInfo {
    /// The number of traffic classes that support it.
    capability: u8,
    /// The priorities for which it is on.
    priorities: Vec<PfcPriority>,
}

#[derive(Debug, Serialize)]
struct PfcPriority {
    priority: u8,
    frames_received: u64,
    frames_sent: u64,
}

#[derive(Debug, Serialize)]
struct GidInfo {
    index: usize,
    gid: String,
    #[serde(rename = "type")]
    kind: &'static str,
}

#[derive(Debug, Serialize)]
struct DeviceInfo {
    driver: &'static str,
    description: String,
    interface: String,
    /// The layer at which its frames start.
    layer: &'static str,
    mtu: u32,
    max_frame: usize,
    gids: Vec<GidInfo>,
    /// The P_Keys that a program finds; it may add more.
    pkeys: Vec<String>,
    /// Other processes of this user on its addresses.
    shared_with: Vec<Sharer>,
}

/// All information, and whether the device could be opened.
fn gather(device: Option<&DeviceSpec>) -> Result<(DevInfo, Result<(), Failure>), Failure> {
    let netlink = Netlink::open()?;
    let mut rnics = None;
    let interfaces = match device {
        None => {
            let all = netlink.interfaces()?;
            rnics = Some(Rnics::find(&all));
            all.into_iter().filter(|interface| !interface.loopback).collect()
        }
        Some(
            DeviceSpec::Interface { interface: name, .. }
            | DeviceSpec::AfXdp { interface: name, .. }
            | DeviceSpec::UdpInterface { interface: name, .. },
        ) => {
            let all = rnics.insert(Rnics::find(&netlink.interfaces()?));
            let interface = netlink.interface(name).map_err(|error| choice::explain(name, error, all))?;
            all.keep_on(name);
            vec![interface]
        }
        Some(DeviceSpec::Ibverbs { name, .. }) => {
            rnics.insert(Rnics::find(&netlink.interfaces()?)).keep(name);
            Vec::new()
        }
        Some(_) => Vec::new(),
    };
    let opened = device.map(|device| device.open()).transpose();
    let mut in_use = None;
    let (capabilities, opened) = match opened {
        Ok(opened) => (opened.map(|opened| opened.capabilities().clone()), Ok(())),
        // A device in use is no error for a command that only shows it.
        Err(error) if is_taken(&error) => {
            in_use = Some(error.to_string());
            (None, Ok(()))
        }
        Err(error) => (None, Err(Failure::from(error))),
    };
    let choice = device.zip(capabilities.as_ref());
    let choice = choice.map(|(device, opened)| Choice::new(device, opened, rnics.as_ref()));
    let is_of_all = device.is_none();
    let device = capabilities.as_ref().map(DeviceInfo::new);
    let process = Process::read();
    let names = || interfaces.iter().map(|interface| interface.name.as_str());
    let gpus = is_of_all.then(|| Gpus::find(names(), rnics.iter().flat_map(Rnics::names)));
    let info = DevInfo {
        gpus,
        rnics,
        is_of_all,
        choice,
        interfaces: interfaces.iter().map(InterfaceInfo::new).collect::<Result<_, _>>()?,
        device,
        in_use,
        drivers: drivers(),
        missing: missing(&process),
        optional: optional(&process),
    };
    Ok((info, opened))
}

fn drivers() -> Vec<&'static str> {
    let built = [
        ("af_xdp", cfg!(feature = "af_xdp")),
        ("dpdk", ferroce_driver::dpdk::load().is_ok()),
        ("udp", true),
        ("ibverbs", true),
        ("shm", true),
        ("loopback", true),
    ];
    built.into_iter().filter(|(_, built)| *built).map(|(driver, _)| driver).collect()
}

impl InterfaceInfo {
    fn new(interface: &Interface) -> Result<InterfaceInfo, Failure> {
        // Linux has no IPv6 on an interface below IPv6's minimum MTU.
        let carries = |ipv6: bool| !ipv6 || interface.mtu >= IPV6_LEAST_MTU;
        let path_mtu =
            |ipv6| PathMtu::largest_for(interface.mtu, ipv6).filter(|_| carries(ipv6)).map(PathMtu::bytes);
        let mode = |mode| match mode {
            XdpMode::Native => "native",
            XdpMode::Generic => "generic",
            XdpMode::Other => "offloaded or several",
        };
        Ok(InterfaceInfo {
            name: interface.name.clone(),
            mac: MacAddr(interface.mac).to_string(),
            mtu: interface.mtu,
            up: interface.up,
            carrier: interface.carrier,
            kind: interface.kind.clone(),
            rx_queues: interface.rx_queues,
            line_rate: interface.speed,
            port: PortInfo::new(Pause::of(interface)?, Dcb::of(interface)?.as_ref()),
            path_mtu_ipv4: path_mtu(false),
            path_mtu_ipv6: path_mtu(true),
            gids: gid_table(&interface.gid_order()),
            xdp_program: interface.xdp.map(|xdp| format!("id {} ({})", xdp.program, mode(xdp.mode))),
            missing: interface_missing(interface),
            optional: longer_packets(interface).into_iter().collect(),
        })
    }

    fn print(&self) -> Result<(), Failure> {
        let state = match (self.up, self.carrier) {
            (false, _) => "down",
            (true, false) => "up, no carrier",
            (true, true) => "up",
        };
        let kind = self.kind.as_deref().map(|kind| format!(" ({kind})")).unwrap_or_default();
        say!("{}{kind}: {state}, MAC {}, {} receive queue(s)", self.name, self.mac, self.rx_queues)?;
        match self.line_rate {
            Some(rate) => say!("  line rate {} Gb/s", rate as f64 / 1e9)?,
            None => say!("  line rate {UNKNOWN}; congestion control needs --line-rate")?,
        }
        self.port.lines().iter().try_for_each(|line| say!("  {line}"))?;
        let bytes = |mtu: Option<u32>| mtu.map_or("none".to_owned(), |bytes| bytes.to_string());
        let (v4, v6) = (bytes(self.path_mtu_ipv4), bytes(self.path_mtu_ipv6));
        say!("  MTU {}: path MTU {v4} over IPv4, {v6} over IPv6", self.mtu)?;
        print_gids(&self.gids)?;
        if let Some(program) = &self.xdp_program {
            say!("  XDP program {program}")?;
        }
        self.missing.iter().try_for_each(|missing| say!("  missing: {missing}"))?;
        self.optional.iter().try_for_each(|optional| say!("  optional: {optional}"))
    }
}

impl PortInfo {
    fn new(pause: Option<Pause>, dcb: Option<&Dcb>) -> PortInfo {
        let pause = pause.map(|pause| PauseInfo {
            autoneg: pause.autoneg,
            rx: pause.rx,
            tx: pause.tx,
            frames_received: pause.received,
            frames_sent: pause.sent,
        });
        let pfc = dcb.and_then(|dcb| dcb.pfc).map(|pfc| {
            let on = (0..).zip(pfc.enabled).filter(|(_, enabled)| *enabled);
            let counted = on.map(|(priority, _)| PfcPriority {
                priority,
                frames_received: pfc.received[usize::from(priority)],
                frames_sent: pfc.sent[usize::from(priority)],
            });
            PfcInfo { capability: pfc.capability, priorities: counted.collect() }
        });
        let dscp = dcb.map(|dcb| {
            let entries = dcb.dscp.iter().map(|(dscp, _)| *dscp);
            let all: BTreeSet<u8> = entries.chain([DATA_DSCP, cnp_dscp()]).collect();
            all.into_iter().map(|dscp| DscpClass::new(dcb, dscp)).collect()
        });
        PortInfo { pause, pfc, dscp }
    }

    fn lines(&self) -> Vec<String> {
        if self.pause.is_none() && self.pfc.is_none() && self.dscp.is_none() {
            return vec![format!("pause frames, PFC and classes of DSCPs {UNKNOWN}")];
        }
        let pause = self.pause.as_ref().map_or(UNKNOWN.to_owned(), |pause| {
            let on = |is_on| if is_on { "on" } else { "off" };
            let count =
                |frames: Option<u64>| frames.map_or("unknown".to_owned(), |frames| frames.to_string());
            format!(
                "rx {}, tx {}, autoneg {}; received {}, sent {}",
                on(pause.rx),
                on(pause.tx),
                on(pause.autoneg),
                count(pause.frames_received),
                count(pause.frames_sent)
            )
        });
        let pfc = self.pfc.as_ref().map_or(UNKNOWN.to_owned(), |pfc| {
            let on = pfc.priorities.iter().map(|row| {
                let PfcPriority { priority, frames_received, frames_sent } = row;
                format!("on for priority {priority} (received {frames_received}, sent {frames_sent})")
            });
            let on = if pfc.priorities.is_empty() { vec!["off".to_owned()] } else { on.collect() };
            format!("{}; at most {} classes", on.join(", "), pfc.capability)
        });
        let mut lines = vec![format!("pause frames {pause}"), format!("PFC {pfc}")];
        match &self.dscp {
            None => lines.push(format!("DSCP {DATA_DSCP} and {} (CNPs): class {UNKNOWN}", cnp_dscp())),
            Some(rows) => lines.extend(rows.iter().map(|row| {
                let cnps = if row.dscp == cnp_dscp() { " (CNPs)" } else { "" };
                format!("DSCP {}{cnps}: {row}", row.dscp)
            })),
        }
        lines
    }
}

impl DeviceInfo {
    fn new(capabilities: &Capabilities) -> DeviceInfo {
        DeviceInfo {
            driver: capabilities.driver,
            description: capabilities.description.clone(),
            interface: capabilities.interface.clone(),
            layer: match capabilities.layer {
                Layer::Ethernet => "Ethernet",
                Layer::Ip(_) => "IP",
            },
            mtu: capabilities.mtu,
            max_frame: capabilities.max_frame,
            gids: gid_table(&capabilities.addresses),
            pkeys: vec![PKEY_DEFAULT.to_string()],
            shared_with: Sharer::find(capabilities),
        }
    }
}

impl DevInfo {
    fn print(&self) -> Result<(), Failure> {
        self.interfaces.iter().try_for_each(InterfaceInfo::print)?;
        self.rnics.iter().try_for_each(Rnics::print)?;
        self.gpus.iter().try_for_each(Gpus::print)?;
        self.choice.iter().try_for_each(Choice::print)?;
        self.in_use.iter().try_for_each(|who| say!("not opened, because it is in use: {who}"))?;
        if let Some(device) = &self.device {
            say!("device {}: {} on {}", device.driver, device.description, device.interface)?;
            say!("  {} frames of at most {} bytes, MTU {}", device.layer, device.max_frame, device.mtu)?;
            print_gids(&device.gids)?;
            let mut pkeys = device.pkeys.iter().enumerate();
            pkeys.try_for_each(|(index, pkey)| say!("  P_Key {index}  {pkey}"))?;
            device.shared_with.iter().try_for_each(Sharer::print)?;
        }
        if self.interfaces.is_empty() && self.is_of_all {
            say!("no network interface except lo; `-d loopback` and `-d udp:127.0.0.1` need no other one")?;
        }
        say!("drivers in this build: {}", self.drivers.join(", "))?;
        match &self.missing[..] {
            [] => say!("AF_XDP: nothing is missing")?,
            missing => {
                missing.iter().try_for_each(|missing| say!("AF_XDP lacks {missing}"))?;
                say!(
                    "without AF_XDP, `-d INTERFACE` uses udp, which has a higher latency and needs no privilege"
                )?;
            }
        }
        self.optional.iter().try_for_each(|optional| say!("optional: {optional}"))
    }
}

fn gid_table(addresses: &[IpAddr]) -> Vec<GidInfo> {
    let row = |(index, address): (usize, &IpAddr)| GidInfo {
        index,
        gid: Gid::from(*address).to_string(),
        kind: "RoCE v2",
    };
    addresses.iter().enumerate().map(row).collect()
}

fn print_gids(gids: &[GidInfo]) -> Result<(), Failure> {
    gids.iter().try_for_each(|row| say!("  GID {:>2}  {:<40} {}", row.index, row.gid, row.kind))
}

fn interface_missing(interface: &Interface) -> Vec<String> {
    let name = &interface.name;
    let mut missing = Vec::new();
    if !interface.up {
        missing.push(format!("it is down: `ip link set {name} up`"));
    } else if !interface.carrier {
        missing.push("the link has no carrier".to_owned());
    }
    if interface.addresses.is_empty() {
        missing.push(format!("no IP address, so no GID: `ip addr add 10.0.0.1/24 dev {name}`"));
    }
    missing
}

/// The MTU that the largest path MTU needs.
fn longer_packets(interface: &Interface) -> Option<String> {
    let name = &interface.name;
    // Only for an interface in use.
    let is_used = interface.up && !interface.addresses.is_empty();
    let is_short = is_used && PathMtu::largest_for(interface.mtu, false) < Some(PathMtu::Mtu4096);
    let [v4, v6] = [false, true].map(|ipv6| PathMtu::Mtu4096.required_l3_mtu(ipv6));
    is_short.then(|| {
        format!(
            "path MTU 4096 needs an MTU of {v4} over IPv4 and {v6} over IPv6, at both ends and all switches between \
             them: `ip link set {name} mtu {v6}`"
        )
    })
}

/// Shown for unknown values.
const UNKNOWN: &str = "unknown (the kernel's driver does not report it)";

/// The rights of this process.
#[derive(Clone, Copy, Debug)]
struct Process {
    /// The effective capabilities, one bit each.
    capabilities: u64,
    /// The limit of locked memory in bytes; `None` if unlimited.
    locked_memory: Option<u64>,
    /// Whether this kernel supports it.
    af_xdp: bool,
    hugepages: u64,
    /// Whether its rights apply only in a user namespace, such as a rootless container's.
    is_in_user_namespace: bool,
}

/// The content of /proc/self/uid_map outside a user namespace: every user is mapped to itself.
const ALL_USERS: [&str; 3] = ["0", "0", "4294967295"];
/// The default DSCP of the commands.
const DATA_DSCP: u8 = 0;
/// RFC 8200.
const IPV6_LEAST_MTU: u32 = 1280;
/// The locked memory of an AF_XDP socket of the default size, with a margin.
const LOCKED_BYTES: u64 = 40 << 20;
// Bits of linux/capability.h.
const CAP_NET_ADMIN: u32 = 12;
const CAP_NET_RAW: u32 = 13;
const CAP_IPC_LOCK: u32 = 14;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_SYS_RESOURCE: u32 = 24;
const CAP_BPF: u32 = 39;

impl Process {
    fn read() -> Process {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        let status = read("/proc/self/status");
        let limits = read("/proc/self/limits");
        let line = |text: &str, prefix| text.lines().find_map(|l| l.strip_prefix(prefix).map(str::to_owned));
        let limit = line(&limits, "Max locked memory").unwrap_or_default();
        Process {
            capabilities: line(&status, "CapEff:")
                .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
                .unwrap_or_default(),
            locked_memory: limit.split_whitespace().next().and_then(|soft| soft.parse().ok()),
            af_xdp: read("/proc/net/protocols").lines().any(|l| l.starts_with("XDP")),
            hugepages: read("/proc/sys/vm/nr_hugepages").trim().parse().unwrap_or_default(),
            is_in_user_namespace: {
                let map = read("/proc/self/uid_map");
                !map.is_empty() && map.split_whitespace().ne(ALL_USERS)
            },
        }
    }

    fn may(&self, capability: u32) -> bool {
        self.capabilities & (1 << capability) != 0
    }
}

/// The missing requirements of AF_XDP.
fn missing(process: &Process) -> Vec<String> {
    if cfg!(not(feature = "af_xdp")) {
        return vec![
            "its driver, which this build does not include: `cargo install --locked --path tools --features af_xdp`, \
             with Debian's gcc, libc6-dev and libxdp-dev, or `./do ferroce` in a checkout"
                .into(),
        ];
    }
    let mut missing = Vec::new();
    if !process.af_xdp {
        missing.push("a kernel that supports it (CONFIG_XDP_SOCKETS)".to_owned());
    }
    if process.is_in_user_namespace {
        // Root of the namespace has all capabilities, but may not load a BPF program.
        missing.push(
            "capabilities outside this user namespace (a rootless container, `unshare -U`): run it as root of the host"
                .to_owned(),
        );
    } else {
        let needed = [(CAP_NET_RAW, "CAP_NET_RAW"), (CAP_NET_ADMIN, "CAP_NET_ADMIN"), (CAP_BPF, "CAP_BPF")];
        let is_missing = |(capability, _): &&(u32, &str)| {
            let implied = *capability == CAP_BPF && process.may(CAP_SYS_ADMIN);
            !process.may(*capability) && !implied
        };
        let names: Vec<&str> = needed.iter().filter(is_missing).map(|(_, name)| *name).collect();
        if !names.is_empty() {
            let program = std::env::current_exe().map_or("PROGRAM".into(), |path| path.display().to_string());
            // setcap replaces all capabilities of a file, so all are listed.
            missing.push(format!(
                "{}: run as root, or `setcap cap_net_raw,cap_net_admin,cap_bpf,cap_ipc_lock+ep {program}`",
                names.join(", ")
            ));
        }
        let unlimited = process.may(CAP_IPC_LOCK) || process.may(CAP_SYS_RESOURCE);
        if let Some(bytes) = process.locked_memory.filter(|bytes| *bytes < LOCKED_BYTES && !unlimited) {
            let kib = LOCKED_BYTES >> 10;
            missing.push(format!(
                "locked memory: a socket needs {kib} KiB, and {} are allowed: `ulimit -l {kib}`, or CAP_IPC_LOCK",
                bytes >> 10
            ));
        }
    }
    missing
}

fn optional(process: &Process) -> Vec<String> {
    let hugepages = "hugepages (vm.nr_hugepages is 0): AF_XDP then uses ordinary pages, and DPDK needs hugepages for \
        real cards: `sysctl vm.nr_hugepages=1024`";
    Vec::from_iter((process.hugepages == 0).then(|| hugepages.to_owned()))
}

#[cfg(test)]
mod tests {
    use ferroce::driver::netlink::{Ets, Pfc, Selection};

    use super::*;

    const ROOT: Process = Process {
        capabilities: u64::MAX,
        locked_memory: Some(8 << 20),
        af_xdp: true,
        hugepages: 8,
        is_in_user_namespace: false,
    };

    #[test]
    fn a_port_is_shown_with_its_classes() {
        let (mut pause, mut pfc, mut ets) = (Pause::default(), Pfc::default(), Ets::default());
        (pause.rx, pause.received) = (true, Some(12));
        (pfc.capability, pfc.enabled[3], pfc.received[3], pfc.sent[3]) = (8, true, 5, 7);
        (ets.class[3], ets.class[6]) = (3, 6);
        (ets.selection[3], ets.share[3]) = (Selection::Share, 60);
        let mut dcb = Dcb::default();
        (dcb.pfc, dcb.ets, dcb.dscp) = (Some(pfc), Some(ets), vec![(26, 3), (48, 6)]);
        let info = PortInfo::new(Some(pause), Some(&dcb));
        let lines = [
            "pause frames rx on, tx off, autoneg off; received 12, sent unknown",
            "PFC on for priority 3 (received 5, sent 7); at most 8 classes",
            "DSCP 0: priority 0, traffic class 0 (strict)",
            "DSCP 26: priority 3, traffic class 3 (share 60 %)",
            "DSCP 48 (CNPs): priority 6, traffic class 6 (strict)",
        ];
        assert_eq!(info.lines(), lines);
        let json = serde_json::to_value(&info).unwrap();
        assert_eq!(json["pause"]["frames_received"], 12);
        assert_eq!(json["pfc"]["priorities"][0]["priority"], 3);
        let row = r#"{"dscp":26,"priority":3,"traffic_class":3,"selection":"share","share":60}"#;
        assert_eq!(serde_json::to_string(&info.dscp.unwrap()[1]).unwrap(), row);
    }

    #[test]
    #[cfg(feature = "af_xdp")]
    fn what_af_xdp_lacks_is_named() {
        assert_eq!(missing(&ROOT), Vec::<String>::new());
        let nobody = Process { capabilities: 0, af_xdp: false, ..ROOT };
        let all = missing(&nobody);
        let [kernel, rights, memory] = &all[..] else { panic!("{all:?}") };
        assert!(kernel.contains("CONFIG_XDP_SOCKETS"), "{kernel}");
        // One command, since setcap removes those that it does not list.
        assert!(
            rights.starts_with("CAP_NET_RAW, CAP_NET_ADMIN, CAP_BPF: run as root, or `setcap "),
            "{rights}"
        );
        assert!(rights.contains("`setcap cap_net_raw,cap_net_admin,cap_bpf,cap_ipc_lock+ep /"), "{rights}");
        assert!(memory.contains("8192 are allowed: `ulimit -l 40960`"), "{memory}");
        // CAP_SYS_ADMIN includes CAP_BPF; without a limit, there is none to raise.
        let admin = Process { capabilities: 1 << CAP_SYS_ADMIN, locked_memory: None, af_xdp: true, ..nobody };
        let all = missing(&admin);
        assert_eq!(all.len(), 1, "{all:?}");
        assert!(all[0].starts_with("CAP_NET_RAW, CAP_NET_ADMIN: "), "{all:?}");
    }

    /// Root of a user namespace has all capabilities, but not the rights that AF_XDP needs.
    #[test]
    #[cfg(feature = "af_xdp")]
    fn root_of_a_user_namespace_is_not_root() {
        let all = missing(&Process { is_in_user_namespace: true, ..ROOT });
        assert_eq!(all.len(), 1, "{all:?}");
        assert!(all[0].contains("user namespace") && !all[0].contains("setcap"), "{all:?}");
    }

    #[test]
    fn hugepages_are_optional() {
        assert_eq!(optional(&ROOT), Vec::<String>::new());
        assert!(optional(&Process { hugepages: 0, ..ROOT })[0].contains("nr_hugepages"));
    }
}
