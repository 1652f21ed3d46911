//! What can be told of a peer that runs nothing of ours: its connection manager answers, and ICMP does.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ferroce::driver::echo::{Echo, Pinger};
use ferroce::driver::netlink::Netlink;
use ferroce::driver::{self, Capabilities, Error, FilteredSink, FrameSink, Layer, PacketDriver};
use ferroce::wire::{Identifications, Packet, ParseError, icrc};
use ferroce::{
    Access, CmEvent, Config, ConnectionParameters, Context, Gid, Nanos, PKey, PathMtu, Poller, QpConfig,
    Transition,
};

use super::local;
use super::path::ecn_name;
use super::probe::HOP_LIMIT;
use super::report::Check;
use crate::diagnosis::Diagnosis;
use crate::endpoint::{Interrupt, take_pkey};
use crate::failure::Failure;

/// "tcpmux", which no RDMA service uses.
const UNUSED_PORT: u16 = 1;
/// Answers that are looked at.
const MAX_SEEN: usize = 64;
const ECHO_PATIENCE: Duration = Duration::from_millis(800);

const NAMES: [&str; 4] = ["UDP 4791", "ICRC", "path MTU", "DSCP and ECN"];

/// Every check that needs no doctor at the other end.
pub(super) fn checks(
    driver: Box<dyn PacketDriver>,
    own: (IpAddr, PKey),
    peer: IpAddr,
    wanted: Option<PathMtu>,
    tcp_passes: bool,
    interrupt: &Interrupt,
) -> Result<Vec<Check>, Failure> {
    let capabilities = driver.capabilities().clone();
    let (source, pkey) = own;
    let (event, answers) = ask(driver, own, peer, interrupt)?;
    let [udp, icrc, path_mtu, marks] = NAMES;
    let (echo, icmp_passes) = echo_check(path_mtu, &capabilities, peer, wanted, interrupt)?;
    let mut checks = Vec::new();
    let wrong = answers.iter().find_map(|answer| answer.wrong.as_deref());
    let said = match event {
        CmEvent::Rejected { reason, .. } => Some(format!("refuses, as it should ({reason})")),
        CmEvent::Established { .. } => Some("accepts".to_owned()),
        _ => None,
    };
    match (&said, answers.is_empty()) {
        (Some(said), _) => {
            let ask =
                format!("its connection manager, asked for port {UNUSED_PORT}, {said}: both ways are open");
            checks.push(Check::ok(udp, ask));
            checks.push(Check::ok(icrc, "right both ways: it answers, and its answer is right"));
        }
        (None, false) => {
            checks.push(Check::ok(udp, format!("{} packets come from there", answers.len())));
            checks.push(Check::failed(
                icrc,
                format!("of its answer: {}", wrong.unwrap_or("right, but it is no answer to what was asked")),
                "leave UDP port 4791 out of NAT and of whatever rewrites IP headers on the way",
            ));
        }
        (None, true) => {
            let passing = match (tcp_passes, icmp_passes) {
                (true, true) => Some("TCP and ICMP pass"),
                (true, false) => Some("TCP passes"),
                (false, true) => Some("ICMP passes"),
                (false, false) => None,
            };
            let kernel = local::ask_kernel(source, peer);
            let details = [passing.map(|passing| format!("though {passing}")), kernel.clone()];
            let detail: String = details.into_iter().flatten().map(|said| format!("; {said}")).collect();
            checks.push(Check::failed(
                udp,
                format!("its connection manager does not answer{detail}"),
                silence_cure(peer, pkey, passing.is_some(), kernel.is_some()),
            ));
            checks.push(Check::not_checked(icrc, "nothing came back"));
        }
    }
    checks.push(echo);
    checks.push(match answers.first() {
        None => Check::not_checked(marks, "nothing came back"),
        Some(CmAnswer { traffic_class, hop_limit, .. }) => Check::not_checked(
            marks,
            format!(
                "its answer came with DSCP {}, {}, hop limit {hop_limit} ({HOP_LIMIT} leave from most hosts); \
                 what it was sent with, and how our packets arrive, only `ferroce doctor` there can tell",
                traffic_class >> 2,
                ecn_name(*traffic_class)
            ),
        ),
    });
    Ok(checks)
}

/// What to look at when nothing of RoCE comes back, the likeliest first.
fn silence_cure(peer: IpAddr, pkey: PKey, others_pass: bool, kernel_answers: bool) -> String {
    let nat = "a NAT between makes the ICRC wrong, which covers addresses and ports: leave UDP port 4791 out of it (`nft \
               insert rule ip nat postrouting udp dport 4791 accept`), or route without one";
    let firewall = "a firewall there or between: let UDP port 4791 through (`nft add rule inet filter input udp dport \
                    4791 accept`)";
    let device =
        format!("is there a RoCE device for {peer} (`rdma link`), is rdma_cm loaded (`modprobe rdma_cm`)?");
    let partition = format!(
        "another partition: what runs there must hear P_Key {pkey} (`rx_pkey_mismatch` in `ferroce stat` there counts what \
         it does not hear; `--pkey` names that of either end, to the doctor too)"
    );
    let host = format!("is {peer} up, and is there a way to it (`ip route get {peer}`)?");
    let causes = match (others_pass, kernel_answers) {
        // A plain packet got as far as the peer's kernel, which has nothing for it.
        (_, true) => [device.as_str(), nat, firewall].to_vec(),
        // What else passes shows that host and route are well.
        (true, false) => [partition.as_str(), nat, firewall, device.as_str()].to_vec(),
        (false, false) => [host.as_str(), firewall, device.as_str(), partition.as_str(), nat].to_vec(),
    };
    format!("{}; `ferroce doctor -d DEV` there tells one way from the other", causes.join("; then: "))
}

/// Asks the peer's connection manager for a service that nobody has.
fn ask(
    driver: Box<dyn PacketDriver>,
    (source, pkey): (IpAddr, PKey),
    peer: IpAddr,
    interrupt: &Interrupt,
) -> Result<(CmEvent, Vec<CmAnswer>), Failure> {
    let is_socket = matches!(driver.capabilities().layer, Layer::Ip(_));
    let seen = Arc::new(Mutex::new(Vec::new()));
    // With one address there is one GID to send from.
    let capabilities = driver.capabilities().clone().addresses(vec![source]);
    let tap = Tap { driver, capabilities, seen: seen.clone() };
    let mut context = Context::open(Box::new(tap), &Config::default())?;
    take_pkey(&mut context, pkey)?;
    let (pd, cq) = (context.alloc_pd()?, context.create_cq(1)?);
    let qp = context.create_qp(&QpConfig::rc(pd, cq))?;
    context.modify_qp(qp, Transition::Init { access: Access::NONE })?;
    // 1.07 s, four times.
    let parameters =
        ConnectionParameters::default().cm_timeout_at_least(Duration::from_secs(1)).cm_retries(3);
    context.connect(qp, SocketAddr::new(peer, UNUSED_PORT), &parameters)?;
    let mut poller = Poller::new();
    let event = loop {
        interrupt.check()?;
        poller.poll(&mut context)?;
        if let Some(event) = context.next_cm_event() {
            break event;
        }
    };
    if let CmEvent::Established { id, .. } = event {
        context.disconnect(id)?;
        poller.poll(&mut context)?;
    }
    let frames = std::mem::take(&mut *seen.lock().unwrap_or_else(PoisonError::into_inner));
    Ok((event, answers(&frames, is_socket, &context, peer)))
}

/// A packet that came while we asked.
struct CmAnswer {
    traffic_class: u8,
    hop_limit: u8,
    /// Why the ICRC is wrong, if it is.
    wrong: Option<String>,
}

fn answers(frames: &[Vec<u8>], is_socket: bool, context: &Context, peer: IpAddr) -> Vec<CmAnswer> {
    let mut diagnosis = Diagnosis::default();
    let mut identifications = Identifications::default();
    for own in &context.port().gids {
        diagnosis.learn_addresses(Gid::from(peer), own.gid);
    }
    let mut answers = Vec::new();
    for frame in frames {
        let decoded = if is_socket { Packet::decode_ip(frame) } else { Packet::decode(frame) };
        let Ok(packet) = decoded else { continue };
        let network = packet.network();
        let checked = match is_socket {
            true => packet.check_guessed(icrc::Portable, &mut identifications).map(drop),
            false => packet.check_icrc(),
        };
        let wrong = match checked {
            Err(ParseError::Icrc { .. }) => Some(diagnosis.explain(&packet).cause.to_string()),
            _ => None,
        };
        // Others may talk to this port too; a wrong one may be the peer's under another address.
        if network.source == Gid::from(peer) || wrong.is_some() {
            let ferroce::wire::Network { traffic_class, hop_limit, .. } = network;
            answers.push(CmAnswer { traffic_class, hop_limit, wrong });
        }
    }
    answers
}

/// Which path MTUs echo requests as long as their packets pass for; and whether any pass.
fn echo_check(
    name: &'static str,
    own: &Capabilities,
    peer: IpAddr,
    wanted: Option<PathMtu>,
    interrupt: &Interrupt,
) -> Result<(Check, bool), Failure> {
    let largest = largest_echo(own, peer, wanted, interrupt);
    interrupt.check()?;
    let passes = largest.is_ok();
    Ok((path_mtu_check(name, own, peer, wanted, largest), passes))
}

fn path_mtu_check(
    name: &'static str,
    own: &Capabilities,
    peer: IpAddr,
    wanted: Option<PathMtu>,
    largest: Result<Option<PathMtu>, String>,
) -> Check {
    let ipv6 = peer.is_ipv6();
    let Some(wanted) = wanted else {
        let needed = PathMtu::Mtu1024.required_l3_mtu(ipv6);
        return Check::failed(
            name,
            format!("'{}' has an MTU of {}, too small for any", own.interface, own.mtu),
            format!("`ip link set {} mtu 1500`; path MTU 1024 needs {needed}", own.interface),
        );
    };
    let needed = wanted.required_l3_mtu(ipv6);
    if own.mtu < needed {
        return Check::failed(
            name,
            format!("path MTU {} needs {needed} bytes, '{}' has {}", wanted.bytes(), own.interface, own.mtu),
            format!("`ip link set {} mtu {needed}` or more", own.interface),
        );
    }
    match largest {
        Err(why) => Check::not_checked(name, why),
        Ok(Some(largest)) if largest >= wanted => Check::ok(
            name,
            format!("{}: echo requests of {needed} bytes come back unfragmented", wanted.bytes()),
        ),
        Ok(largest) => {
            let passes = largest.map_or("none".to_owned(), |path_mtu| path_mtu.bytes().to_string());
            let smaller = largest.map_or(String::new(), |path_mtu| {
                format!("; or use path MTU {0} at both ends (`-m {0}`)", path_mtu.bytes())
            });
            Check::failed(
                name,
                format!(
                    "{passes} at most: echo requests of {needed} bytes, as for path MTU {}, do not come back",
                    wanted.bytes()
                ),
                format!(
                    "raise the MTU to {needed} or more (`ip link set DEV mtu {}`) at {peer} and at every router and \
                     switch between{smaller}",
                    own.mtu
                ),
            )
        }
    }
}

/// The largest path MTU up to `wanted` that passes; or why none could be asked for.
fn largest_echo(
    own: &Capabilities,
    peer: IpAddr,
    wanted: Option<PathMtu>,
    interrupt: &Interrupt,
) -> Result<Option<PathMtu>, String> {
    let found = Netlink::open().and_then(|netlink| netlink.interface(&own.interface));
    let scope = found.map_err(|error| format!("no echo request from here: {error}"))?.index;
    let socket = |error| format!("no echo request from here: {error}");
    let mut pinger = Pinger::new(peer, scope).map_err(socket)?;
    let mut ask = |length| -> Result<bool, String> {
        // Twice, for one may be lost.
        for _ in 0..2 {
            interrupt.check().map_err(|interrupted| interrupted.to_string())?;
            if pinger.ask(length, ECHO_PATIENCE).map_err(socket)? == Echo::Answered {
                return Ok(true);
            }
        }
        Ok(false)
    };
    if !ask(64)? {
        return Err(format!("{peer} answers no ICMP echo"));
    }
    for path_mtu in PathMtu::ALL.into_iter().rev().filter(|path_mtu| Some(*path_mtu) <= wanted) {
        if ask(path_mtu.required_l3_mtu(peer.is_ipv6()))? {
            return Ok(Some(path_mtu));
        }
    }
    Ok(None)
}

/// Keeps what comes in beside handing it on, wrong ICRCs included.
struct Tap {
    driver: Box<dyn PacketDriver>,
    capabilities: Capabilities,
    seen: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl driver::Wrapper for Tap {
    type Inner = dyn PacketDriver;

    fn inner(&self) -> &Self::Inner {
        &*self.driver
    }

    fn inner_mut(&mut self) -> &mut Self::Inner {
        &mut *self.driver
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn rx_burst(&mut self, now: Nanos, sink: &mut dyn FrameSink) -> Result<usize, Error> {
        let Tap { driver, seen, .. } = self;
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        let keep = |frame: &[u8]| {
            if seen.len() < MAX_SEEN {
                seen.push(frame.to_vec());
            }
            true
        };
        (**driver).rx_burst(now, &mut FilteredSink::new(sink, keep))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::groups::Groups;

    #[test]
    fn groups_are_joined_and_left_inside() {
        let (driver, calls) = Groups::new();
        let capabilities = driver.capabilities().clone();
        let mut port = Tap { driver: Box::new(driver), capabilities, seen: Arc::default() };
        let group = [239, 0, 0, 1].into();
        PacketDriver::join(&mut port, group).unwrap();
        PacketDriver::leave(&mut port, group).unwrap();
        assert_eq!(*calls.lock().unwrap(), [("join", group), ("leave", group)]);
    }
}
