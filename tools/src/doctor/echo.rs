//! The path MTUs that pass, by ICMP echo requests, which a peer answers without a doctor.

use std::net::IpAddr;
use std::time::Duration;

use ferroce::PathMtu;
use ferroce::driver::Capabilities;
use ferroce::driver::echo::{Echo, Pinger};
use ferroce::driver::netlink::Netlink;

use super::report::Check;
use crate::endpoint::Interrupt;
use crate::failure::Failure;

const PATIENCE: Duration = Duration::from_millis(800);

/// Checks the path MTUs with echo requests of the length of their packets; also returns whether any request was
/// answered.
pub(super) fn check(
    own: &Capabilities,
    peer: IpAddr,
    wanted: Option<PathMtu>,
    interrupt: &Interrupt,
) -> Result<(Check, bool), Failure> {
    let largest = largest_echo(own, peer, wanted, interrupt);
    interrupt.check()?;
    let passes = largest.is_ok();
    Ok((path_mtu_check(own, peer, wanted, largest), passes))
}

fn path_mtu_check(
    own: &Capabilities,
    peer: IpAddr,
    wanted: Option<PathMtu>,
    largest: Result<Option<PathMtu>, String>,
) -> Check {
    const NAME: &str = "path MTU";
    let ipv6 = peer.is_ipv6();
    let Some(wanted) = wanted else {
        let needed = PathMtu::Mtu1024.required_l3_mtu(ipv6);
        return Check::failed(
            NAME,
            format!("'{}' has an MTU of {}, too small for any", own.interface, own.mtu),
            format!("`ip link set {} mtu 1500`; path MTU 1024 needs {needed}", own.interface),
        );
    };
    let needed = wanted.required_l3_mtu(ipv6);
    if own.mtu < needed {
        return Check::failed(
            NAME,
            format!("path MTU {} needs {needed} bytes, '{}' has {}", wanted.bytes(), own.interface, own.mtu),
            format!("`ip link set {} mtu {needed}` or more", own.interface),
        );
    }
    match largest {
        Err(why) => Check::not_checked(NAME, why),
        Ok(Some(largest)) if largest >= wanted => Check::ok(
            NAME,
            format!("{}: echo requests of {needed} bytes come back unfragmented", wanted.bytes()),
        ),
        Ok(largest) => {
            let passes = largest.map_or("none".to_owned(), |path_mtu| path_mtu.bytes().to_string());
            let smaller = largest.map_or(String::new(), |path_mtu| {
                format!("; or use path MTU {0} at both ends (`-m {0}`)", path_mtu.bytes())
            });
            Check::failed(
                NAME,
                format!(
                    "{passes} at most: echo requests of {needed} bytes, as for path MTU {}, do not come back",
                    wanted.bytes()
                ),
                format!(
                    "raise the MTU to {needed} or more (`ip link set DEV mtu {}`) at {peer} and at every router and \
                     switch on the path{smaller}",
                    own.mtu
                ),
            )
        }
    }
}

/// The largest path MTU up to `wanted` that passes, or the reason that no request was possible.
fn largest_echo(
    own: &Capabilities,
    peer: IpAddr,
    wanted: Option<PathMtu>,
    interrupt: &Interrupt,
) -> Result<Option<PathMtu>, String> {
    let found = Netlink::open().and_then(|netlink| netlink.interface(&own.interface));
    let scope = found.map_err(|error| format!("sending an echo request failed: {error}"))?.index;
    let socket = |error| format!("sending an echo request failed: {error}");
    let mut pinger = Pinger::new(peer, scope).map_err(socket)?;
    let mut ask = |length| -> Result<bool, String> {
        // Twice, since one may be lost.
        for _ in 0..2 {
            interrupt.check().map_err(|interrupted| interrupted.to_string())?;
            if pinger.ask(length, PATIENCE).map_err(socket)? == Echo::Answered {
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
