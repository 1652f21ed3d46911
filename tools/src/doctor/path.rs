//! The results of the probes of one direction.

use std::net::IpAddr;

use ferroce::PathMtu;

use super::local::{LET_THROUGH, OWN_FILTER};
use super::message::{Headers, Hello, Probe, Sighting};
use super::probe::{COPIES, HOP_LIMIT};
use super::report::Check;

/// Usual DSCPs of traffic classes: the eight class selectors, and AF31, AF41 and EF.
const DSCPS: [u8; 11] = [0, 8, 16, 24, 26, 32, 34, 40, 46, 48, 56];
const ECN: [&str; 4] = ["Not-ECT", "ECT(1)", "ECT(0)", "CE"];
/// The first number of each kind of probe; the path MTU, DSCP or ECN codepoint is added.
const SIZES: u16 = 0;
const CLASSES: u16 = 100;
const MARKS: u16 = 200;
/// Bytes of a probe whose size is irrelevant.
const SHORT: u32 = 100;

/// All probes of an end whose interface has this MTU.
pub(super) fn probes(mtu: u32, ipv6: bool) -> Vec<Probe> {
    let sizes = PathMtu::ALL.into_iter().map(|path_mtu| Probe {
        number: SIZES + u16::from(path_mtu.code()),
        traffic_class: 0,
        length: path_mtu.required_l3_mtu(ipv6),
    });
    let short = |number, traffic_class| Probe { number, traffic_class, length: SHORT };
    let classes = DSCPS.into_iter().map(|dscp| short(CLASSES + u16::from(dscp), dscp << 2 | 0b10));
    let marks = (0..4).map(|ecn| short(MARKS + u16::from(ecn), ecn));
    sizes.filter(|probe| probe.length <= mtu).chain(classes).chain(marks).collect()
}

/// The arrivals of one direction's probes, in several rounds.
#[derive(Default)]
pub(super) struct Arrivals {
    pub(super) rounds: u32,
    sightings: Vec<Sighting>,
}

impl Arrivals {
    /// Adds the arrivals of one more round.
    pub(super) fn add(&mut self, sightings: Vec<Sighting>) {
        self.rounds += 1;
        for new in sightings {
            match self.sightings.iter_mut().find(|old| old.number == new.number) {
                Some(old) => {
                    for (old, new) in [
                        (&mut old.copies, new.copies),
                        (&mut old.repeated, new.repeated),
                        (&mut old.late, new.late),
                    ] {
                        *old = old.saturating_add(new);
                    }
                    old.icrc = old.icrc.take().or(new.icrc);
                }
                None => self.sightings.push(new),
            }
        }
    }

    pub(super) fn is_nothing(&self) -> bool {
        self.sightings.is_empty()
    }

    /// The number of copies of each probe.
    fn copies(&self) -> usize {
        usize::from(COPIES) * self.rounds as usize
    }

    /// The fraction of lost copies, among probes with at least one arrival. Copies are alike, so this loss is random.
    pub(super) fn loss(&self) -> f64 {
        let came: usize = self.sightings.iter().map(|s| self.came(s)).sum();
        self.share(self.copies() * self.sightings.len() - came)
    }

    /// The number of copies that arrived, limited since the peer reports it.
    fn came(&self, sighting: &Sighting) -> usize {
        usize::from(sighting.copies).min(self.copies())
    }

    /// The fraction of all copies that were sent of the probes that have arrived.
    fn share(&self, packets: usize) -> f64 {
        packets as f64 / (self.copies() * self.sightings.len()).max(1) as f64
    }

    fn count(&self, of: impl Fn(&Sighting) -> u8) -> usize {
        self.sightings.iter().map(|s| usize::from(of(s))).sum()
    }

    /// Whether chance may explain that all copies of some probe were lost.
    fn is_chance(&self) -> bool {
        const CERTAIN: f64 = 0.01;
        let exponent = i32::try_from(self.copies()).unwrap_or(i32::MAX);
        self.loss().powi(exponent) * MOST_PROBES > CERTAIN
    }
}

/// The approximate number of probes in a direction.
const MOST_PROBES: f64 = 20.0;
/// The fraction of lost or late packets above which RoCE does not work well: go-back-N retransmits all packets after
/// each of them, so a loss of 2 % can cost nine of ten packets. A healthy path duplicates no packets.
const TOO_MANY: f64 = 0.01;

/// One direction: the probes that were sent, and their arrivals.
pub(super) struct Way<'a> {
    pub(super) from: &'a Hello,
    pub(super) to: &'a Hello,
    pub(super) probes: &'a [Probe],
    pub(super) seen: &'a Arrivals,
    /// The largest path MTU that the sender's interface allows, or the one that was requested.
    pub(super) wanted: Option<PathMtu>,
    /// From the client to the far end.
    pub(super) is_outward: bool,
    /// The reason that the sender's kernel drops the packets, if it reports one.
    pub(super) refused: Option<String>,
}

impl Way<'_> {
    /// All checks of this direction.
    pub(super) fn checks(&self) -> Vec<Check> {
        if self.seen.is_nothing() {
            let why = "no packet arrives";
            let [_, icrc, path_mtu, dscp, ecn] = self.names();
            let rest = [icrc, path_mtu, dscp, ecn].map(|name| Check::not_checked(name, why));
            return [self.reachability()].into_iter().chain(rest).collect();
        }
        vec![self.reachability(), self.icrc(), self.path_mtu(), self.dscp(), self.ecn()]
    }

    /// The host on which to run a command.
    fn place(&self, is_own: bool) -> &'static str {
        if is_own { "here" } else { "there" }
    }

    fn names(&self) -> [&'static str; 5] {
        match self.is_outward {
            true => ["UDP 4791 there", "ICRC there", "path MTU there", "DSCP there", "ECN there"],
            false => ["UDP 4791 back", "ICRC back", "path MTU back", "DSCP back", "ECN back"],
        }
    }

    fn reachability(&self) -> Check {
        let [name, ..] = self.names();
        let (from, to) = (self.from.address, self.to.address);
        let short = |number: u16| number >= CLASSES;
        let sent = self.probes.iter().filter(|probe| short(probe.number)).count() * self.seen.copies();
        let came =
            self.seen.sightings.iter().filter(|s| short(s.number)).map(|s| self.seen.came(s)).sum::<usize>();
        if let Some(why) = &self.refused {
            return Check::failed(name, format!("none of {sent} packets to {to} arrives: {why}"), OWN_FILTER);
        }
        if self.seen.is_nothing() {
            return Check::failed(
                name,
                format!("none of {sent} packets from {from} to {to} arrives"),
                format!(
                    "a firewall at {to} (chains of input), here (output) or on a router on the path (forward): \
                     {LET_THROUGH}; and see `ip route get {to}`"
                ),
            );
        }
        let hops: Vec<u8> =
            self.seen.sightings.iter().map(|s| HOP_LIMIT.saturating_sub(s.headers.hop_limit)).collect();
        let routers = match (hops.iter().min(), hops.iter().max()) {
            (Some(0), Some(0)) => "no router on the path".to_owned(),
            (Some(least), Some(most)) if least == most => format!("{least} router(s) on the path"),
            (Some(least), Some(most)) => format!("{least} to {most} routers on the path"),
            _ => String::new(),
        };
        let mut seen = format!("{came} of {sent} packets arrive, {routers}");
        let (loss, late, repeated) =
            (self.seen.loss(), self.seen.count(|s| s.late), self.seen.count(|s| s.repeated));
        let [late_share, repeated_share] = [late, repeated].map(|packets| self.seen.share(packets));
        let mut cures = Vec::new();
        if came < sent {
            seen += &match loss * 100.0 {
                0.0 => ": the others are of kinds that never arrive".to_owned(),
                percent => format!(": about {percent:.2} % are lost at random"),
            };
            cures.push(
                "see the drops of both interfaces (`ip -s link`, `ethtool -S`) and of the switches on the path; look \
                 for rules that limit or drop UDP port 4791, and for faulty links",
            );
        }
        if late > 0 {
            seen += &format!(
                "; {late} ({:.2} %) arrive out of order, after one that was sent later",
                late_share * 100.0
            );
            cures.push(
                "one flow must use one link: LAG and ECMP by a hash of the flow, not per packet; no router or host on \
                 the path may distribute it over several queues",
            );
        }
        if repeated > 0 {
            seen += &format!("; {repeated} ({:.2} %) arrive twice", repeated_share * 100.0);
            cures.push(
                "look for a device that copies packets: a loop of switches or bridges, a mirror port, a tap \
                that sends",
            );
        }
        if cures.is_empty() {
            return Check::ok(name, seen);
        }
        let is_too_many = [loss, late_share, repeated_share].into_iter().any(|share| share > TOO_MANY);
        let verdict = if is_too_many { Check::failed } else { Check::note };
        verdict(name, seen, cures.join("; "))
    }

    fn icrc(&self) -> Check {
        let [_, name, ..] = self.names();
        let mut wrong: Vec<&str> = self.seen.sightings.iter().filter_map(|s| s.icrc.as_deref()).collect();
        let count = wrong.len();
        wrong.sort_unstable();
        wrong.dedup();
        let Some(first) = wrong.first() else {
            let hidden = match (self.to.is_socket, self.to.address) {
                (true, IpAddr::V4(_)) => "; a socket can't detect a rewritten IPv4 identification",
                _ => "",
            };
            return Check::ok(
                name,
                format!("right in {} different packets{hidden}", self.seen.sightings.len()),
            );
        };
        let others = match wrong.len() {
            1 => String::new(),
            more => format!(", and {} other changes", more - 1),
        };
        let is_address = first.contains("address");
        let seen = format!(
            "wrong in {count} of {} packets: {first}{others}{}",
            self.seen.sightings.len(),
            if is_address { ", as a NAT does" } else { "" }
        );
        let cure = if is_address || first.contains("port") {
            "exclude UDP port 4791 from NAT, because the ICRC covers addresses and ports (`nft insert rule ip nat \
             postrouting udp dport 4791 accept`, `iptables -t nat -I POSTROUTING -p udp --dport 4791 -j ACCEPT`), \
             or route without one"
        } else if first.contains("identification") || first.contains("flags") {
            "stop the rewriting of IPv4 headers on the path: scrubbing in a firewall, a tunnel that clears DF"
        } else {
            "look for a device that changes packets on the path (a proxy, a tunnel, a faulty link): capture at both \
             ends, and compare with `ferroce dissect`"
        };
        Check::failed(name, seen, cure)
    }

    fn path_mtu(&self) -> Check {
        let [_, _, name, ..] = self.names();
        let ipv6 = self.to.address.is_ipv6();
        let Some(wanted) = self.wanted else {
            return Check::failed(
                name,
                format!("'{}' of {} has an MTU of {}", self.from.interface, self.from.address, self.from.mtu),
                format!("`ip link set {} mtu 1500`, or 4200 for a path MTU of 4096", self.from.interface),
            );
        };
        let arrives = |path_mtu: &PathMtu| {
            self.seen.sightings.iter().any(|s| s.number == SIZES + u16::from(path_mtu.code()))
        };
        let needed = wanted.required_l3_mtu(ipv6);
        // Probes that exceed the sender's MTU were not sent.
        if self.from.mtu < needed {
            return Check::failed(
                name,
                format!(
                    "path MTU {} needs packets of {needed} bytes, '{}' of {} has an MTU of {}",
                    wanted.bytes(),
                    self.from.interface,
                    self.from.address,
                    self.from.mtu
                ),
                format!(
                    "`ip link set {} mtu {needed}` {} or more, 4200 for all",
                    self.from.interface,
                    self.place(self.is_outward)
                ),
            );
        }
        let largest = PathMtu::ALL.into_iter().take_while(|path_mtu| arrives(path_mtu)).last();
        if largest >= Some(wanted) {
            return Check::ok(name, format!("{}: packets of {needed} bytes arrive", wanted.bytes()));
        }
        let passes = largest.map_or("none".to_owned(), |path_mtu| path_mtu.bytes().to_string());
        let stuck = PathMtu::ALL.into_iter().find(|path_mtu| !arrives(path_mtu)).unwrap_or(wanted);
        let seen = format!(
            "{passes} at most: packets of {} bytes, for path MTU {}, do not arrive, though '{}' of {} sends them",
            stuck.required_l3_mtu(ipv6),
            stuck.bytes(),
            self.from.interface,
            self.from.address
        );
        if self.seen.is_chance() {
            return self.untold(name);
        }
        let smaller = match largest {
            Some(path_mtu) => format!(
                "; or use path MTU {0} (`-m {0}`), which ferroce chooses itself after `ip link set {1} mtu {2}`",
                path_mtu.bytes(),
                self.from.interface,
                path_mtu.required_l3_mtu(ipv6).max(if path_mtu == PathMtu::Mtu1024 { 1500 } else { 0 })
            ),
            None => String::new(),
        };
        let cure = if self.to.mtu < needed {
            format!(
                "'{}' of {} has an MTU of {}: `ip link set {} mtu {}` {}{smaller}",
                self.to.interface,
                self.to.address,
                self.to.mtu,
                self.to.interface,
                needed.max(self.from.mtu),
                self.place(!self.is_outward)
            )
        } else {
            format!(
                "both interfaces have a large enough MTU, so a link on the path has a smaller one: raise the MTU of \
                 every \
                 router and switch to {needed} or more (`ip link set DEV mtu {}`){smaller}",
                self.from.mtu
            )
        };
        Check::failed(name, seen, cure)
    }

    fn dscp(&self) -> Check {
        let [_, _, _, name, _] = self.names();
        let mut changes = Vec::new();
        let mut missing = Vec::new();
        for dscp in DSCPS {
            match self.sighting(CLASSES + u16::from(dscp)) {
                Some(headers) if headers.traffic_class >> 2 != dscp => {
                    changes.push((dscp, headers.traffic_class >> 2));
                }
                Some(_) => {}
                None => missing.push(dscp.to_string()),
            }
        }
        let trust = "let every switch and router on the path trust DSCP (`mlnx_qos -i DEV --trust dscp` on the \
                     cards, 'trust dscp' on switch ports), and remove rules that set it";
        if let Some((_, first)) = changes.first() {
            let list: Vec<_> = changes.iter().map(|(was, is)| format!("{was} -> {is}")).collect();
            let kind = match (first, changes.iter().all(|(_, is)| is == first)) {
                (0, true) => "bleached",
                _ => "re-marked",
            };
            return Check::failed(name, format!("{kind}: {}", list.join(", ")), trust);
        }
        if !missing.is_empty() && self.seen.is_chance() {
            return self.untold(name);
        }
        if !missing.is_empty() {
            return Check::failed(
                name,
                format!("packets with DSCP {} do not arrive, others do", missing.join(", ")),
                "look for a policer or a rule that drops these classes on the path",
            );
        }
        Check::ok(name, format!("{} arrive as they were sent", DSCPS.map(|dscp| dscp.to_string()).join(", ")))
    }

    fn ecn(&self) -> Check {
        let [.., name] = self.names();
        let mut changes = Vec::new();
        let mut marked = 0;
        for (mark, was) in (0u8..).zip(ECN) {
            let Some(headers) = self.sighting(MARKS + u16::from(mark)) else {
                if self.seen.is_chance() {
                    return self.untold(name);
                }
                return Check::failed(
                    name,
                    format!("packets with {was} do not arrive, others do"),
                    "look for a rule on the path that drops by ECN",
                );
            };
            let is = headers.traffic_class & 3;
            match (mark, is) {
                _ if mark == is => {}
                // The mark of a congested switch.
                (1 | 2, 3) => marked += 1,
                _ => changes.push(format!("{was} -> {}", ECN[usize::from(is)])),
            }
        }
        if !changes.is_empty() {
            return Check::failed(
                name,
                format!("rewritten: {}", changes.join(", ")),
                "remove rules that set ECN or all of TOS, and let tunnels copy ECN (RFC 6040): without ECN switches \
                 drop packets instead of marking them, and no congestion control is notified",
            );
        }
        match marked {
            0 => Check::ok(name, "Not-ECT, ECT(0), ECT(1) and CE arrive as they were sent"),
            _ => Check::note(
                name,
                format!("kept, but {marked} of 2 packets are marked CE on the path"),
                "the path is congested now, or its switches mark too early: see their ECN thresholds",
            ),
        }
    }

    fn untold(&self, name: &'static str) -> Check {
        let percent = self.seen.loss() * 100.0;
        Check::not_checked(name, format!("some packets do not arrive, and {percent:.0} % are lost at random"))
    }

    fn sighting(&self, number: u16) -> Option<&Headers> {
        self.seen.sightings.iter().find(|s| s.number == number).map(|s| &s.headers)
    }
}

/// A codepoint's name.
pub(super) fn ecn_name(traffic_class: u8) -> &'static str {
    ECN[usize::from(traffic_class & 3)]
}

#[cfg(test)]
mod tests {
    use super::super::probe::tests::hello;
    use super::super::report::CheckVerdict;
    use super::*;

    /// The check if all probes arrive, and of the first one `late` copies are late and `repeated` are duplicated.
    fn said(late: u8, repeated: u8) -> Check {
        let (from, to) = (hello("10.0.0.1", false), hello("10.0.0.2", false));
        let probes = probes(1500, false);
        let mut seen = Arrivals::default();
        let sighting = |probe: &Probe| {
            let headers = Headers::sent(&from, to.address, probe);
            Sighting { number: probe.number, headers, icrc: None, copies: COPIES, repeated: 0, late: 0 }
        };
        let mut sightings: Vec<_> = probes.iter().map(sighting).collect();
        (sightings[0].late, sightings[0].repeated) = (late, repeated);
        seen.add(sightings);
        let way = Way {
            from: &from,
            to: &to,
            probes: &probes,
            seen: &seen,
            wanted: None,
            is_outward: true,
            refused: None,
        };
        way.reachability()
    }

    #[test]
    fn many_late_packets_and_copies_fail() {
        use CheckVerdict::{Failed, Note, Ok};
        assert_eq!(said(0, 0).result, Ok);
        // Of 18 probes, 31 copies each.
        for (late, repeated, words) in [(5, 0, "out of order"), (0, 5, "twice")] {
            assert_eq!(
                [said(late, repeated), said(late * 2, repeated * 2)].map(|check| check.result),
                [Note, Failed]
            );
            assert!(said(late, repeated).seen.contains(&format!("5 (0.90 %) arrive {words}")));
        }
    }
}
