//! `ferroce doctor`: finds what prevents RoCE traffic between two hosts, and the remedy.
//!
//! The doctor has no engine on its port. A probe is a UD packet of known contents to an unused queue pair number; the
//! receiving end compares it with the probe that was announced to it.
//!
//! - `local.rs`, `port.rs`: checks without a packet: interface, GID, route; pause frames, PFC and traffic classes
//! - `probe_port.rs`, `probe.rs`: the port; the probes and how they arrive
//! - `control.rs`, `message.rs`: the control connection; its messages
//! - `far.rs`: the far end
//! - `path.rs`: the results of the probes of one direction
//! - `alone.rs`, `question.rs`, `echo.rs`: a peer without a doctor; the request to its connection manager; ICMP echo
//! - `occupants.rs`, `passive.rs`, `live.rs`, `symptom.rs`: the check while another program uses the port
//! - `report.rs`: the report
//!
//! Probes are sent in pairs, with a pause of 2 ms after each pair. Each is sent 31 times. Its payload has its position
//! in the sequence, which distinguishes copies and late packets from the others.
//!
//! One round may not distinguish random loss from loss that depends on size or class. If some copies of a probe are
//! lost and others are not, all are sent again, up to six times in each direction or for 5 s. A missing probe is
//! attributed to its class only if chance does not explain it.

mod alone;
mod control;
mod echo;
mod far;
mod live;
mod local;
pub mod message;
mod occupants;
mod passive;
mod path;
mod port;
mod probe;
mod probe_port;
mod question;
mod report;
mod symptom;

use std::convert::Infallible;
use std::net::IpAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use ferroce::driver::{Capabilities, PacketDriver};
use ferroce::{DeviceSpec, PKey, PathMtu};

use crate::endpoint::{Interrupt, is_taken, packet_driver, parse_pkey};
use crate::failure::Failure;
use crate::output::JsonArg;
use crate::pingpong::path_mtu;
use crate::tcp::Listener;
use crate::{host, selftest, tcp};
use control::{DoctorControl, Limits, unexpected};
use far::MAX_ROUNDS;
use message::{DoctorMessage, Hello, Probe, Sighting};
use occupants::{Occupants, Place};
use path::{Arrivals, Way};
use probe::{COPIES, Lookout};
use probe_port::{ProbePort, RESOLVE_TIME};
use report::{Check, CheckVerdict, DoctorReport, Mode};

/// Checks the path to a peer in both directions: MTU, GID, UDP port 4791, ICRC, DSCP and ECN; and pause frames, PFC and
/// traffic classes of this end's port. Names the remedy for each fault.
///
/// Without PEER it answers the checks of other ends until it is interrupted. A PEER without `ferroce doctor` is checked
/// as far as its connection manager and ICMP allow. With `-d loopback` and no PEER, both ends run in this process.
///
/// While another program has UDP port 4791 of the device, the check is passive: it does not open the port, and examines
/// that program by its counters (as `ferroce stat` shows them), and the path by ICMP, TCP and the kernel's tables.
/// Without PEER it then examines the program only. With --active it shares the port, if the program is ferroce of the
/// same user. The second line of the report names the mode and the reason.
///
/// Exit status: 0 if no check failed, 1 if one did.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// The other end, by name or IP address.
    peer: Option<String>,
    /// An interface (eth0), or a driver with its argument (af_xdp:eth0, udp:192.0.2.1); by default the interface of the
    /// kernel's route to PEER.
    #[arg(short, long)]
    device: Option<DeviceSpec>,
    /// TCP port of the control connection.
    #[arg(short = 'p', long = "port", value_name = "PORT", default_value_t = 18516)]
    tcp_port: u16,
    /// Index in the GID table (`ferroce devinfo` shows it); by default a row of the peer's IP version.
    #[arg(short = 'x', long, value_name = "INDEX")]
    gid_index: Option<usize>,
    /// The path MTU to check; by default the largest that the interface allows.
    #[arg(short, long, value_parser = path_mtu)]
    mtu: Option<PathMtu>,
    /// The P_Key of your programs on this host (--pkey of the other commands).
    #[arg(long, value_name = "KEY", value_parser = parse_pkey, default_value = "0xffff")]
    pkey: PKey,
    /// The DSCP of your programs on this host, 0 to 63; doctor reports its traffic class at the port.
    #[arg(long, value_name = "DSCP", value_parser = clap::value_parser!(u8).range(..64), default_value_t = 0)]
    dscp: u8,
    /// Do not open UDP port 4791, even if it is free.
    #[arg(long, conflicts_with = "active")]
    passive: bool,
    /// Open UDP port 4791, or share it with ferroce programs of the same user; fail if another program has it.
    #[arg(long)]
    active: bool,
    #[command(flatten)]
    json: JsonArg,
}

/// Checks the path to a peer and prints the report, or answers the checks of others; see [`Args`] for the exit status.
///
/// # Errors
/// The check can't start, the report can't be written, or the command is interrupted.
pub fn run(args: Args) -> Result<ExitCode, Failure> {
    match start(&args)? {
        Some(report) => report.print(&args.json),
        None => Ok(ExitCode::SUCCESS),
    }
}

/// The report; the far end has none.
fn start(args: &Args) -> Result<Option<DoctorReport>, Failure> {
    let interrupt = Interrupt::install()?;
    let (device, peer) = match (&args.device, &args.peer) {
        (Some(device), peer) => (device.clone(), peer.as_deref()),
        (None, Some(peer)) => (local::device_towards(address(peer, None, &interrupt)?)?, Some(peer.as_str())),
        (None, None) => {
            return Err(Failure::usage(
                "name a PEER to check, or with -d the device on which to answer checks",
            ));
        }
    };
    let device = device.without_shared_memory();
    let place = Place::of(&device)?;
    if args.passive && place.is_none() {
        return Err(Failure::usage(format!("--passive: '{device}' is not on an interface of the kernel")));
    }
    if let Some([far, near]) = selftest::ports(&device, peer)? {
        let listener = Listener::local()?;
        let tcp_port = listener.port()?;
        let [far, near] = [packet_driver(far, "doctor")?, packet_driver(near, "doctor")?];
        let to = far.capabilities().addresses[0];
        let serve = || far::serve(ProbePort::new(far, args.pkey), &listener, &interrupt, true);
        let why = "both ends are in this process".to_owned();
        let ask = || args.check(near, why.clone(), (&to.to_string(), to), tcp_port, &interrupt);
        return selftest::run(&interrupt, serve, ask).map(Some);
    }
    let occupants = place.as_ref().map(Occupants::find).transpose()?.unwrap_or_default();
    let opened = match (&place, args.reason_to_be_passive(&occupants)) {
        (Some(_), Some(why)) => Err(why),
        (place, _) => match device.open() {
            // Another program has just taken the port, or the kernel has it.
            Err(error) if place.is_some() && !args.active && is_taken(&error) => Err(error.to_string()),
            opened => Ok(opened?),
        },
    };
    let device = match (opened, &place) {
        (Ok(device), _) => device,
        (Err(why), Some(place)) => {
            let to = peer.map(|peer| address(peer, Some(&place.addresses), &interrupt)).transpose()?;
            return passive::check(args, place, peer.zip(to), occupants, why, &interrupt).map(Some);
        }
        (Err(why), None) => return Err(Failure::run(why)),
    };
    let driver = packet_driver(device, "doctor")?;
    let Some(peer) = peer else {
        let port = ProbePort::new(driver, args.pkey);
        return far::serve(port, &Listener::any(args.tcp_port)?, &interrupt, false).map(|()| None);
    };
    let addresses = &driver.capabilities().addresses;
    let to = address(peer, Some(addresses), &interrupt)?;
    if addresses.contains(&to) {
        return Err(Failure::usage(format!("{to} is the address of this end; give that of another end")));
    }
    let why = match (args.active, occupants.describe()) {
        (true, Some(others)) => format!("--active, though {others}"),
        _ => "no other program has UDP port 4791 here".to_owned(),
    };
    args.check(driver, why, (peer, to), args.tcp_port, &interrupt).map(Some)
}

impl Args {
    /// The reason to leave UDP port 4791 alone, if there is one.
    fn reason_to_be_passive(&self, occupants: &Occupants) -> Option<String> {
        match (self.active, self.passive) {
            (true, _) => None,
            (_, true) => Some(format!(
                "--passive{}",
                occupants.describe().map_or(String::new(), |who| format!("; {who}"))
            )),
            (false, false) => occupants.describe(),
        }
    }

    /// Checks the path with UDP port 4791 of this end; `why` is the reason for this mode.
    fn check(
        &self,
        driver: Box<dyn PacketDriver>,
        why: String,
        (peer, to): (&str, IpAddr),
        tcp_port: u16,
        interrupt: &Interrupt,
    ) -> Result<DoctorReport, Failure> {
        let mut port = ProbePort::new(driver, self.pkey);
        let capabilities = port.driver.capabilities().clone();
        let device = named(&capabilities);
        let report = |checks| DoctorReport::new(Some(peer), device, (Mode::Active, why), checks);
        let (source, gid) = local::gid(&capabilities, self.gid_index, to);
        let mut checks = vec![gid];
        let Some(source) = source else { return Ok(report(checks)) };
        checks.extend(local::checks(&capabilities, source, to));
        // Over loopback, packets and control connection use different addresses.
        let host = if capabilities.driver == "loopback" { "127.0.0.1" } else { peer };
        let connect = || tcp::try_connect(host, tcp_port, interrupt);
        // For a socket, the kernel resolves the next hop, which it does when TCP connects.
        let connected = port.is_socket().then(connect);
        let next_hop = match connected {
            Some(_) => local::next_hop(&capabilities.interface, to, interrupt)?,
            None => local::neighbour_check(port.driver.resolve_blocking(to, RESOLVE_TIME), to),
        };
        let is_reached = next_hop.result != CheckVerdict::Failed;
        checks.push(next_hop);
        checks.extend(port::checks(&capabilities, self.dscp));
        if !is_reached {
            return Ok(report(checks));
        }
        let wanted = self.mtu.or(PathMtu::largest_for(capabilities.mtu, to.is_ipv6()));
        let connected = connected.unwrap_or_else(connect);
        let tcp_passes = connected.as_ref().map_or_else(|refused| refused.by_peer, |_| true);
        let control = connected.map_err(Failure::from);
        match control.and_then(|stream| DoctorControl::new(stream, LIMITS, interrupt)) {
            Ok(mut control) => {
                // The results remain valid if the check ends early.
                match self.check_with(&mut port, &mut control, source, to, &mut checks, interrupt) {
                    Ok(()) => {}
                    Err(Failure::Interrupted) => return Err(Failure::Interrupted),
                    Err(failure) => checks.push(Check::failed(
                        FAR_END,
                        format!("the check with it ended early: {failure}"),
                        "check again, and see the log of the other end",
                    )),
                }
            }
            Err(Failure::Interrupted) => return Err(Failure::Interrupted),
            Err(failure) => {
                checks.push(Check::note(
                    FAR_END,
                    format!(
                        "no doctor answers ({failure}); the following checks are made from this end only"
                    ),
                    format!(
                        "`ferroce doctor -d DEV` there, with TCP port {tcp_port} open to it, checks each \
                        direction separately"
                    ),
                ));
                checks.extend(alone::checks(
                    port.driver,
                    (source, self.pkey),
                    to,
                    wanted,
                    tcp_passes,
                    interrupt,
                )?);
            }
        }
        Ok(report(checks))
    }

    /// The check with a doctor at both ends.
    fn check_with(
        &self,
        port: &mut ProbePort,
        control: &mut DoctorControl,
        source: IpAddr,
        to: IpAddr,
        checks: &mut Vec<Check>,
        interrupt: &Interrupt,
    ) -> Result<(), Failure> {
        let own = port.hello(source, to);
        let answer = control.ask(&DoctorMessage::Hello(own.clone()))?;
        let DoctorMessage::Hello(far) = answer else { return Err(unexpected(&answer)) };
        let row = format!("doctor on '{}' ({}), MTU {}", far.interface, far.driver, far.mtu);
        if !far.addresses.contains(&to) {
            let addresses: Vec<_> = far.addresses.iter().map(IpAddr::to_string).collect();
            checks.push(Check::failed(
                FAR_END,
                format!("{row}, whose addresses are {}, not {to}", addresses.join(", ")),
                format!("give one of these as PEER, or start it there with -d for the interface of {to}"),
            ));
            return Ok(());
        }
        checks.extend([Check::ok(FAR_END, row), partition_check(self.pkey, PKey(far.pkey))]);
        let most = far.rounds.min(MAX_ROUNDS) / 2;
        let there = path::probes(own.mtu, own.address.is_ipv6());
        let seen = repeat(most, || outward(port, control, &own, &far, &there).map(Ok::<_, Infallible>))?;
        let way = |is_outward, probes: &[Probe], seen: &Arrivals| {
            let (from, to) = if is_outward { (&own, &far) } else { (&far, &own) };
            let wanted = self.mtu.or(PathMtu::largest_for(from.mtu, own.address.is_ipv6()));
            // Only the kernel of the far end knows about the packet filter there.
            let is_lost = is_outward && seen.is_nothing();
            let refused = is_lost.then(|| local::refused_here(source, own.to)).flatten();
            Way { from, to, probes, seen, wanted, is_outward, refused }.checks()
        };
        checks.extend(seen.map(|seen| way(true, &there, &seen)).into_iter().flatten());
        let back = path::probes(far.mtu, to.is_ipv6());
        match repeat(most, || inward(port, control, &own, &far, &back, interrupt))? {
            Ok(seen) => checks.extend(way(false, &back, &seen)),
            Err(Unsent::Refused(refused)) => checks.push(Check::failed(
                "UDP 4791 back",
                format!("{to} can't send to {source}: {refused}"),
                format!("there: `ip route get {source}`, `ip neigh`"),
            )),
            Err(Unsent::Unheard(refused)) => checks.push(Check::failed(
                "UDP 4791 back",
                format!("{to} sends no more to {source}: {refused}"),
                format!(
                    "exclude UDP port 4791 from NAT on the path, allow it in firewalls, and see `ip route get \
                     {source}` there"
                ),
            )),
        }
        Ok(())
    }
}

/// A device, as named for `-d`.
fn named(capabilities: &Capabilities) -> String {
    match (capabilities.driver, &capabilities.addresses[..]) {
        // The device is named by one address of an interface.
        ("udp", [address]) => format!("udp:{address}"),
        (driver, _) => format!("{driver}:{}", capabilities.interface),
    }
}

const FAR_END: &str = "far end";
/// The far end answers after it has finished the previous check.
const LIMITS: Limits =
    Limits { answer: Duration::from_secs(far::TO_CHECK.whole.as_secs() + 5), whole: Duration::from_secs(60) };
/// After this time, no round of probes begins: the far end's time limit for a check includes both directions.
const REPEAT_FOR: Duration = Duration::from_secs(5);

/// The reason that the other end has sent no probes.
enum Unsent {
    Refused(String),
    /// Its control connection comes from another address, and its packets to this one do not arrive.
    Unheard(String),
}

/// Repeats the probes, so that random loss in one round does not hide a probe. Returns the arrivals in up to `most`
/// rounds, within the time limit.
fn repeat<E>(
    most: u32,
    mut round: impl FnMut() -> Result<Result<Vec<Sighting>, E>, Failure>,
) -> Result<Result<Arrivals, E>, Failure> {
    let (mut all, start) = (Arrivals::default(), Instant::now());
    loop {
        match round()? {
            Ok(seen) => all.add(seen),
            Err(unsent) => return Ok(Err(unsent)),
        }
        if all.rounds >= most || all.loss() == 0.0 || start.elapsed() >= REPEAT_FOR {
            return Ok(Ok(all));
        }
    }
}

/// Both ends must be in the same partition, and one of them must be a full member.
fn partition_check(own: PKey, far: PKey) -> Check {
    const NAME: &str = "partition";
    if own.admits(far) {
        return Check::ok(NAME, format!("P_Key {own} here, {far} there"));
    }
    Check::failed(
        NAME,
        format!("P_Key {own} here, {far} there: each end drops all packets of the other (rx_pkey_mismatch)"),
        "give both ends the same low 15 bits of --pkey, and at least one of them 0x8000",
    )
}

/// Sends probes. Returns the arrivals at the other end.
fn outward(
    port: &mut ProbePort,
    control: &mut DoctorControl,
    own: &Hello,
    far: &Hello,
    probes: &[Probe],
) -> Result<Vec<Sighting>, Failure> {
    match control.ask(&DoctorMessage::Expect(probes.to_vec()))? {
        DoctorMessage::Ready => {}
        other => return Err(unexpected(&other)),
    }
    port.send(own, far, probes, COPIES)?;
    match control.ask(&DoctorMessage::Collect)? {
        DoctorMessage::Seen(seen) => Ok(seen),
        other => Err(unexpected(&other)),
    }
}

/// Lets the other end send probes. Returns the arrivals, or the reason that nothing was sent.
fn inward(
    port: &mut ProbePort,
    control: &mut DoctorControl,
    own: &Hello,
    far: &Hello,
    probes: &[Probe],
    interrupt: &Interrupt,
) -> Result<Result<Vec<Sighting>, Unsent>, Failure> {
    let mut lookout = Lookout::new(far, own.address, port.is_socket(), probes.to_vec());
    let mut take = || port.receive(&mut |frame| lookout.frame(frame));
    let mut answer = control.ask_while(&DoctorMessage::Send(probes.to_vec()), &mut take)?;
    let mut unsent: fn(String) -> Unsent = Unsent::Refused;
    if answer == DoctorMessage::Challenge {
        let token = port.challenge(interrupt)?;
        if token.is_none() {
            unsent = Unsent::Unheard;
        }
        let take = || port.receive(&mut |frame| lookout.frame(frame));
        answer = control.ask_while(&DoctorMessage::Proof(token), take)?;
    }
    match answer {
        DoctorMessage::Sent(None) => {}
        DoctorMessage::Sent(Some(refused)) => return Ok(Err(unsent(refused))),
        other => return Err(unexpected(&other)),
    }
    port.collect(&mut lookout, interrupt)?;
    Ok(Ok(lookout.into_seen()))
}

/// The address of a peer, of an IP version of the device if there is a choice.
fn address(peer: &str, own: Option<&[IpAddr]>, interrupt: &Interrupt) -> Result<IpAddr, Failure> {
    let name = peer.to_owned();
    let found = host::in_background(interrupt, peer, move || host::find(&name, 0))??;
    let found: Vec<IpAddr> = found.iter().map(|address| address.ip().to_canonical()).collect();
    let suits =
        |address: &&IpAddr| own.is_none_or(|own| own.iter().any(|a| a.is_ipv4() == address.is_ipv4()));
    Ok(*found.iter().find(suits).unwrap_or(&found[0]))
}
