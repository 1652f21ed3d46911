//! The passive check, while another program has UDP port 4791: the kernel's information, ICMP, TCP, and the counters of
//! that program's contexts.
//!
//! It can't find out what happens to DSCP, nor test large RoCE packets before there is a queue pair. So the path MTU is
//! that of ICMP echo requests (`driver/src/echo.rs`).

use std::net::IpAddr;

use ferroce::driver::Capabilities;
use ferroce::{Metrics, PathMtu};
use rustix::process::geteuid;

use super::live::LiveContext;
use super::occupants::{Mute, Occupants, Place};
use super::report::{Check, CheckVerdict, DoctorReport, Mode};
use super::{Args, FAR_END, echo, local, named, port};
use crate::endpoint::Interrupt;
use crate::failure::Failure;
use crate::tcp;

/// Examines the contexts at a place and, as far as possible without their port, the path to a peer. `why` is the reason
/// to leave the port alone.
pub(super) fn check(
    args: &Args,
    place: &Place,
    peer: Option<(&str, IpAddr)>,
    occupants: Occupants,
    why: String,
    interrupt: &Interrupt,
) -> Result<DoctorReport, Failure> {
    let capabilities = capabilities(place, &occupants);
    let device = named(&capabilities);
    let report = |checks| DoctorReport::new(peer.map(|(name, _)| name), device, (Mode::Passive, why), checks);
    let is_held = occupants.describe().is_some();
    let (live, left_out) = LiveContext::watch(&occupants.contexts, interrupt)?;
    let mut checks = Vec::new();
    match peer {
        None => checks.push(local::interface_check(&capabilities, &place.interface, false)),
        Some((name, to)) => {
            let (source, gid) = local::gid(&capabilities, args.gid_index, to);
            checks.push(gid);
            let Some(source) = source else { return Ok(report(checks)) };
            checks.extend(local::checks(&capabilities, source, to));
            let wanted = args.mtu.or(live.iter().filter_map(LiveContext::path_mtu).max());
            let wanted = wanted.or(PathMtu::largest_for(capabilities.mtu, to.is_ipv6()));
            // Both also make the kernel resolve the next hop.
            let (echo, echoes) = echo::check(&capabilities, to, wanted, interrupt)?;
            let far_end = far_end(name, args.tcp_port, interrupt)?;
            checks.push(local::next_hop(&place.interface.name, to, interrupt)?);
            checks.push(echo);
            let is_known = echoes || live.iter().any(|live| live.has_peer(to));
            checks.push(match far_end.result {
                CheckVerdict::NotChecked if !is_known => no_sign_of_life(to, args.tcp_port),
                _ => far_end,
            });
        }
    }
    checks.extend(port::checks(&capabilities, args.dscp));
    checks.extend(live.iter().flat_map(|live| live.checks(peer.map(|(_, to)| to))));
    checks.extend(left_out);
    checks.extend(occupants.mute.iter().map(mute));
    checks.extend(unseen(&occupants, peer.is_none()));
    checks.push(unchecked(is_held));
    Ok(report(checks))
}

/// The capabilities that the device would have.
fn capabilities(place: &Place, occupants: &Occupants) -> Capabilities {
    let is_af_xdp = |metrics: &Metrics| metrics.label("driver") == Some("af_xdp");
    let has_af_xdp = occupants.contexts.iter().any(is_af_xdp)
        || occupants.holders.iter().any(|holder| holder.interface.is_some());
    let driver = place.driver.unwrap_or(if has_af_xdp { "af_xdp" } else { "udp" });
    let interface = &place.interface;
    Capabilities::new(driver, &interface.name, interface.mac, interface.mtu)
        .addresses(place.addresses.clone())
}

/// If neither ICMP nor TCP answers, "not checked" would be too weak.
fn no_sign_of_life(peer: IpAddr, tcp_port: u16) -> Check {
    Check::failed(
        FAR_END,
        format!(
            "no answer from {peer}: it answers neither ICMP echo nor TCP port {tcp_port}, and no queue pair here is \
             connected to it"
        ),
        format!(
            "check that {peer} is up, that there is a route to it (`ip route get {peer}`), and that no firewall drops \
             all packets"
        ),
    )
}

/// Whether TCP works in both directions.
fn far_end(peer: &str, tcp_port: u16, interrupt: &Interrupt) -> Result<Check, Failure> {
    let refused = match tcp::try_connect(peer, tcp_port, interrupt) {
        Ok(_) => {
            return Ok(Check::ok(
                FAR_END,
                format!("TCP port {tcp_port} answers: TCP passes in both directions"),
            ));
        }
        Err(refused) => refused,
    };
    interrupt.check()?;
    Ok(match refused.by_peer {
        true => Check::ok(
            FAR_END,
            format!("TCP port {tcp_port} is closed there: TCP passes in both directions, no doctor listens"),
        ),
        false => Check::not_checked(
            FAR_END,
            format!("no answer from TCP port {tcp_port}: a firewall, or no such host"),
        ),
    })
}

/// A context that does not answer does not serve its peers, either.
fn mute(Mute { pid, why }: &Mute) -> Check {
    Check::failed(
        "context",
        format!("the context of pid {pid} does not report its counters: {why}"),
        format!(
            "a context works only while its program polls it: check whether the program is stopped or hangs (`ps -o \
             stat,wchan,cmd -p {pid}`); its peers receive no acknowledgements meanwhile"
        ),
    )
}

/// Programs that have the port and export no metrics. `is_all`: nothing else is examined.
fn unseen(occupants: &Occupants, is_all: bool) -> Vec<Check> {
    let is_shown = |pid: u32| {
        let pids = occupants.contexts.iter().filter_map(|metrics| metrics.label("pid"));
        pids.into_iter().any(|shown| shown == pid.to_string())
            || occupants.mute.iter().any(|mute| mute.pid == pid)
    };
    let own = geteuid();
    let mut seen: Vec<String> = Vec::new();
    let mut checks = Vec::new();
    for holder in &occupants.holders {
        let pid = holder.process.as_ref().map(|process| process.pid);
        let text = holder.to_string();
        if seen.contains(&text) || pid.is_some_and(is_shown) {
            continue;
        }
        seen.push(text.clone());
        let is_ferroce = pid.is_some_and(|pid| occupants.sharers.contains(&pid));
        let is_hidden = !own.is_root() && holder.user != own.as_raw();
        let why = match (is_ferroce, is_hidden) {
            (true, _) => format!("{text} is a ferroce program and exports no counters"),
            (_, true) => format!("{text} has UDP port 4791; only that user and root can read its counters"),
            _ => format!("{text} has UDP port 4791 and exports no counters"),
        };
        let is_nothing_seen = occupants.contexts.is_empty() && occupants.mute.is_empty();
        let may_be_well = (is_ferroce || is_hidden) && !is_all;
        checks.push(match (is_nothing_seen, may_be_well) {
            (true, false) => Check::failed("context", why, unseen_cure(is_ferroce)),
            _ => Check::not_checked("context", why),
        });
    }
    checks
}

fn unseen_cure(is_ferroce: bool) -> &'static str {
    match is_ferroce {
        true => {
            "Context::export in the program exports them to its user and to root; to answer checks of others \
             meanwhile, or to check a PEER: --active"
        }
        false => {
            "a ferroce program exports them by Context::export, to its user and to root; if it is another program, \
             ferroce can't use the address at the same time"
        }
    }
}

/// The checks that need packets of UDP port 4791.
fn unchecked(is_held: bool) -> Check {
    let why = "each size, DSCP and ECN codepoint, and the ICRC: only packets from UDP port 4791 show it";
    let cure = match is_held {
        true => {
            "`--active`, which shares the port with ferroce programs of the same user; otherwise check again while it \
             is free, or from another address of this host: `-d udp:ADDRESS`"
        }
        false => "the same without --passive",
    };
    Check { cure: Some(cure.to_owned()), ..Check::not_checked("each way by itself", why) }
}
