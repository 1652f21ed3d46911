//! Two ends with a router between them, and the reports of `ferroce doctor` about the path.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::Value;

use super::ends::{Ferroce, Outcome, has, is_root};

/// The far end, over IPv4 and over IPv6.
pub(super) const PEER: [&str; 2] = ["10.1.2.2", "fd12::2"];
const MTU: u32 = 4200;

/// Two ends, `a` and `b`, with `veth0` each, and a router between them.
pub(super) struct Way {
    pub(super) a: String,
    pub(super) router: String,
    pub(super) b: String,
}

impl Way {
    /// `None`, with the reason printed, if namespaces are unavailable.
    pub(super) fn new() -> Option<Way> {
        if !is_root() {
            println!("skipped: needs root, for network namespaces and AF_XDP");
            return None;
        }
        if Command::new("ip").arg("-V").output().is_err() {
            println!("skipped: no `ip` command (package iproute2)");
            return None;
        }
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let id = format!("{}-{}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed));
        let way = Way {
            a: format!("ferroce-doctor-{id}-a"),
            router: format!("ferroce-doctor-{id}-r"),
            b: format!("ferroce-doctor-{id}-b"),
        };
        for namespace in [&way.a, &way.router, &way.b] {
            run("ip", &format!("netns add {namespace}"));
            run("ip", &format!("-n {namespace} link set lo up"));
        }
        let router = &way.router;
        for (end, port, net) in [(&way.a, "to-a", 1), (&way.b, "to-b", 2)] {
            run(
                "ip",
                &format!(
                    "-n {end} link add veth0 mtu {MTU} type veth peer name {port} netns {router} mtu {MTU}"
                ),
            );
            for (namespace, device, last) in [(end, "veth0", 2), (router, port, 1)] {
                run("ip", &format!("-n {namespace} addr add 10.1.{net}.{last}/24 dev {device}"));
                run("ip", &format!("-n {namespace} addr add fd1{net}::{last}/64 dev {device} nodad"));
                run("ip", &format!("-n {namespace} link set {device} up"));
            }
            run("ip", &format!("-n {end} route add default via 10.1.{net}.1"));
            run("ip", &format!("-n {end} -6 route add default via fd1{net}::1"));
        }
        run(
            "ip",
            &format!("netns exec {router} sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1"),
        );
        Some(way)
    }

    /// With nftables rules at the router.
    pub(super) fn with_rules() -> Option<Way> {
        if !has("nft") {
            println!("skipped: no `nft` command (package nftables), which changes packets on their way");
            return None;
        }
        let way = Way::new()?;
        way.nft("add table inet way");
        way.nft("add chain inet way forward { type filter hook forward priority 0 ; }");
        way.nft("add chain inet way nat { type nat hook postrouting priority 100 ; }");
        Some(way)
    }

    pub(super) fn nft(&self, arguments: &str) {
        run("ip", &format!("netns exec {} nft {arguments}", self.router));
    }

    /// Replaces the router's rules by one.
    pub(super) fn rule(&self, rule: &str) {
        self.nft("flush table inet way");
        self.nft(&format!("add rule inet way {rule}"));
    }

    pub(super) fn far_end(&self, device: &str) -> Ferroce {
        Ferroce::server(&self.b, &format!("doctor -d {device}"))
    }

    /// Runs the check at the near end.
    pub(super) fn check(&self, arguments: &str) -> Found {
        Found::new(Ferroce::start(Some(&self.a), &format!("doctor --json {arguments}")).end())
    }
}

impl Drop for Way {
    fn drop(&mut self) {
        for namespace in [&self.a, &self.router, &self.b] {
            let _ = Command::new("ip").args(["netns", "del", namespace]).status();
        }
    }
}

pub(super) fn run(program: &str, arguments: &str) {
    let output = Command::new(program).args(arguments.split_whitespace()).output().unwrap();
    assert!(output.status.success(), "{program} {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A report.
pub(super) struct Found {
    pub(super) outcome: Outcome,
    pub(super) report: Value,
}

impl Found {
    pub(super) fn new(outcome: Outcome) -> Found {
        let report = serde_json::from_str(&outcome.stdout).unwrap_or_else(|e| panic!("{e}: {outcome:#?}"));
        Found { outcome, report }
    }

    pub(super) fn checks(&self) -> &Vec<Value> {
        self.report["checks"].as_array().unwrap()
    }

    /// The names of the checks with this result.
    pub(super) fn with(&self, result: &str) -> Vec<&str> {
        let checks = self.checks().iter().filter(|check| check["result"] == result);
        checks.map(|check| check["check"].as_str().unwrap()).collect()
    }

    /// The observation and the remedy.
    pub(super) fn text(&self, check: &str) -> String {
        let found = self.checks().iter().find(|row| row["check"] == check);
        let row = found.unwrap_or_else(|| panic!("no check '{check}' in {:#?}", self.report));
        format!("{} / {}", row["seen"].as_str().unwrap(), row["cure"].as_str().unwrap_or("none"))
    }

    pub(super) fn is_well(&self) {
        assert_eq!((self.with("failed"), self.outcome.code), (vec![], Some(0)), "{:#?}", self.report);
        assert_eq!(self.report["well"], true);
    }

    /// Asserts that exactly these checks fail, and that each text contains these words.
    pub(super) fn fails(&self, checks: &[&str], words: &[&str]) {
        assert_eq!(
            (self.with("failed"), self.outcome.code),
            (checks.to_vec(), Some(1)),
            "{:#?}",
            self.report
        );
        assert_eq!(self.report["well"], false);
        for check in checks {
            let text = self.text(check);
            words.iter().for_each(|word| assert!(text.contains(word), "{check}: no '{word}' in {text}"));
        }
    }
}
