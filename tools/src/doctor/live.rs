//! A context of another process, examined by its counters, which are read twice: its port, its peers, and the problems
//! that the counters show.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use ferroce::{Counter, Exported, Gid, Metrics, PathMtu};

use super::occupants::gauge;
use super::report::Check;
use super::symptom::{SYMPTOMS, Symptom};
use crate::endpoint::Interrupt;
use crate::failure::Failure;
use crate::stat::title;

/// Time between the two reads.
const LOOK: Duration = Duration::from_secs(1);
/// The most contexts that are examined, and peers of one that are listed.
const MAX_CONTEXTS: usize = 16;
const MAX_NAMED: usize = 8;

/// A context's metrics at two times.
pub(super) struct LiveContext {
    before: Metrics,
    now: Metrics,
}

/// A counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Count {
    /// The value since the context was opened.
    pub(super) total: u64,
    /// The increase between the two reads.
    pub(super) lately: u64,
}

impl LiveContext {
    /// Reads contexts again, a second after `before`. Also returns notes about those that were left out.
    pub(super) fn watch(
        before: &[Metrics],
        interrupt: &Interrupt,
    ) -> Result<(Vec<LiveContext>, Vec<Check>), Failure> {
        if before.is_empty() {
            return Ok((Vec::new(), Vec::new()));
        }
        let until = Instant::now() + LOOK;
        while Instant::now() < until {
            interrupt.check()?;
            std::thread::sleep(Duration::from_millis(20));
        }
        let now: Vec<Metrics> =
            Exported::find().read().into_iter().filter_map(|(_, metrics)| metrics.ok()).collect();
        let (mut live, mut left_out) = (Vec::new(), Vec::new());
        for before in before.iter().take(MAX_CONTEXTS) {
            match now.iter().find(|now| now.labels() == before.labels()) {
                Some(now) => live.push(LiveContext { before: before.clone(), now: now.clone() }),
                None => left_out.push(Check::failed(
                    "context",
                    format!("{}: it ended while it was examined, so nothing is known about it", title(before)),
                    "see the log of the program, if it should not have ended; and check again: with UDP port 4791 \
                     free, doctor sends packets",
                )),
            }
        }
        if let Some(more) = before.len().checked_sub(MAX_CONTEXTS).filter(|more| *more > 0) {
            let why = format!("{more} more contexts, which `ferroce stat` shows");
            left_out.push(Check::not_checked("context", why));
        }
        Ok((live, left_out))
    }

    pub(super) fn count(&self, name: &str) -> Count {
        let value = |metrics: &Metrics| {
            let found = metrics.iter().find(|metric| metric.name == name);
            let samples = found.into_iter().flat_map(|metric| &metric.samples);
            // The metrics of another process may overflow.
            samples.fold(0, |sum: u64, sample| sum.saturating_add(sample.value))
        };
        let total = value(&self.now);
        Count { total, lately: total.saturating_sub(value(&self.before)) }
    }

    /// The largest path MTU of its queue pairs.
    pub(super) fn path_mtu(&self) -> Option<PathMtu> {
        let largest =
            gauge(&self.now, "path_mtu_qps").filter_map(|(bytes, _)| bytes.parse::<u32>().ok()).max()?;
        PathMtu::ALL.into_iter().find(|path_mtu| path_mtu.bytes() == largest)
    }

    /// The checks from its own metrics, and about its path to `peer`.
    pub(super) fn checks(&self, peer: Option<IpAddr>) -> Vec<Check> {
        let mut checks = vec![self.context()];
        checks.extend(peer.map(|peer| self.peer(peer)));
        checks.push(self.traffic());
        checks.extend(SYMPTOMS.iter().filter_map(|symptom: &Symptom| symptom.check(self)));
        checks
    }

    /// Prefixes a text with the context's name, since there may be several.
    pub(super) fn named(&self, said: &str) -> String {
        format!("{}: {said}", title(&self.now))
    }

    fn context(&self) -> Check {
        const NAME: &str = "context";
        let listed = |name| {
            let all: Vec<&str> = gauge(&self.now, name).map(|(label, _)| label).collect();
            if all.is_empty() { "not told".to_owned() } else { all.join(", ") }
        };
        let numbered = |name: &'static str| {
            gauge(&self.now, name).filter(|(_, qps)| *qps > 0).map(|(label, qps)| format!("{qps} {label}"))
        };
        let none_or = |mut rows: Vec<String>| {
            let more = rows.len().saturating_sub(MAX_NAMED);
            rows.truncate(MAX_NAMED);
            if more > 0 {
                rows.push(format!("{more} more"));
            }
            if rows.is_empty() { "none".to_owned() } else { rows.join(", ") }
        };
        let mtu =
            gauge(&self.now, "port_mtu").next().map_or("not told".to_owned(), |(_, mtu)| mtu.to_string());
        let peers = gauge(&self.now, "peer_qps").map(|(peer, qps)| format!("{peer} ({qps})")).collect();
        let seen = self.named(&format!(
            "MTU {mtu}; GIDs {}; P_Keys {}; queue pairs: {}; peers: {}; path MTUs: {}",
            listed("port_gid"),
            listed("port_pkey"),
            none_or(numbered("qps").collect()),
            none_or(peers),
            none_or(gauge(&self.now, "path_mtu_qps").map(|(mtu, qps)| format!("{mtu} ({qps})")).collect()),
        ));
        let failed: u64 = gauge(&self.now, "qps")
            .filter(|(state, _)| ["error", "sqe"].contains(state))
            .fold(0, |sum: u64, (_, qps)| sum.saturating_add(qps));
        if failed > 0 {
            return Check::note(
                NAME,
                format!("{seen}; {failed} queue pair(s) in an error state"),
                "the program got a completion or an event with the error; a queue pair works again only after it was \
                 reset and connected again",
            );
        }
        Check::ok(NAME, seen)
    }

    /// The number of queue pairs that are connected to `peer`.
    fn queue_pairs_to(&self, peer: IpAddr) -> Option<u64> {
        let gid = Gid::from(peer).to_string();
        gauge(&self.now, "peer_qps").find(|(label, _)| *label == gid).map(|(_, qps)| qps)
    }

    pub(super) fn has_peer(&self, peer: IpAddr) -> bool {
        self.queue_pairs_to(peer).is_some()
    }

    fn peer(&self, peer: IpAddr) -> Check {
        const NAME: &str = "peer";
        match self.queue_pairs_to(peer) {
            Some(qps) => Check::ok(NAME, self.named(&format!("{qps} queue pair(s) connected to {peer}"))),
            None => Check::not_checked(
                NAME,
                self.named(&format!(
                    "no queue pair is connected to {peer}, so its counters are about the paths to other peers"
                )),
            ),
        }
    }

    /// Whether packets are sent and received.
    fn traffic(&self) -> Check {
        const NAME: &str = "UDP 4791";
        let (sent, received) = (self.count(Counter::SentPkts.name()), self.count(Counter::RcvdPkts.name()));
        let seen = self.named(&format!(
            "{} packets sent and {} received, {} and {} of them in the last second",
            sent.total, received.total, sent.lately, received.lately
        ));
        if self.now.label("driver") == Some("ibverbs") {
            return Check::not_checked(NAME, self.named("the card counts its packets itself (`ethtool -S`)"));
        }
        // The metrics of another process may overflow.
        let lately = sent.lately.saturating_add(received.lately);
        let [tx, rx] = ["tx_by_memory", "rx_by_memory"].map(|name| self.count(name));
        let by_memory = tx.lately.saturating_add(rx.lately);
        let seen = match tx.total.saturating_add(rx.total) {
            0 => seen,
            total => format!("{seen}; {total} and {by_memory} of both by shared memory"),
        };
        if by_memory > 0 && by_memory >= lately {
            return Check::not_checked(NAME, seen);
        }
        // It retransmits and receives nothing.
        let is_deaf = sent.lately > 0
            && received.lately == 0
            && [Counter::RetransmittedPkts, Counter::LocalAckTimeoutErr]
                .into_iter()
                .any(|counter| self.count(counter.name()).lately > 0);
        match (sent.total > 0, received.total > 0) {
            (_, true) if is_deaf => Check::failed(
                NAME,
                seen,
                "no packets come back any more: a firewall drops UDP port 4791 at either end or on the path (`nft \
                 list ruleset`), the peer's program has ended or does not poll, or its address was removed; `ferroce \
                 doctor` at the other end finds out which",
            ),
            (_, true) if lately == 0 => Check::note(
                NAME,
                seen,
                "no packets in the last second: the program is idle, or its peers' packets no longer arrive; `ferroce \
                 doctor` at the other end finds out which",
            ),
            (true, false) => Check::failed(
                NAME,
                seen,
                "no packet has ever come back: a firewall drops UDP port 4791, a NAT rewrites addresses (the ICRC \
                 covers them and the ports), another partition, or no peer; `ferroce doctor` at the other end, or \
                 with this program stopped, finds out which",
            ),
            (_, true) => Check::ok(NAME, seen),
            (false, false) => Check::not_checked(NAME, seen),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::report::CheckVerdict;
    use super::*;

    /// A context with these counters, at both times.
    pub(in super::super) fn context(counters: &[(&str, u64, u64)], gauges: &str) -> LiveContext {
        let text = |value: fn(&(&str, u64, u64)) -> u64| {
            let labels = "device=\"eth0\",driver=\"udp\",pid=\"7\"";
            let counters = counters.iter().map(|row| {
                let name = format!("ferroce_{}_total", row.0);
                format!("# TYPE {name} counter\n{name}{{{labels}}} {}\n", value(row))
            });
            let gauges = gauges.lines().map(|line| {
                let (name, label, value) = match line.split_whitespace().collect::<Vec<_>>()[..] {
                    [name, label, value] => (name, format!(",{label}"), value),
                    [name, value] => (name, String::new(), value),
                    _ => panic!("{line}"),
                };
                format!("# TYPE ferroce_{name} gauge\nferroce_{name}{{{labels}{label}}} {value}\n")
            });
            counters.chain(gauges).collect::<String>()
        };
        let read = |value| Metrics::parse(&text(value)).expect("it is well-formed");
        LiveContext { before: read(|row| row.1), now: read(|row| row.2) }
    }

    #[test]
    fn packets_by_shared_memory_show_no_way() {
        let traffic = |counters: &[(&str, u64, u64)]| context(counters, "").traffic();
        let all = [("sent_pkts", 0, 9), ("rcvd_pkts", 0, 9), ("tx_by_memory", 0, 9), ("rx_by_memory", 0, 9)];
        let found = traffic(&all);
        assert_eq!(found.result, CheckVerdict::NotChecked);
        assert!(found.seen.ends_with("; 18 and 18 of both by shared memory"), "{}", found.seen);
        assert_eq!(traffic(&all[..3]).result, CheckVerdict::Ok);
        let most = ["sent_pkts", "rcvd_pkts", "tx_by_memory", "rx_by_memory"].map(|name| (name, 0, u64::MAX));
        assert_eq!(traffic(&most).result, CheckVerdict::NotChecked);
    }

    #[test]
    fn a_context_that_ends_meanwhile_is_no_good_news() {
        let gone = context(&[("sent_pkts", 1, 1)], "").before;
        let (live, left_out) = LiveContext::watch(&[gone], &Interrupt::default()).unwrap();
        assert_eq!((live.len(), left_out[0].result), (0, CheckVerdict::Failed), "{left_out:?}");
    }

    #[test]
    fn a_context_says_what_it_has() {
        let gauges = "port_mtu 4200\nport_gid gid=\"::ffff:10.0.0.1\" 1\nport_pkey pkey=\"0xffff\" 1\nqps state=\"rts\" 3\n\
                      qps state=\"error\" 0\npeer_qps peer=\"::ffff:10.0.0.2\" 3\npath_mtu_qps path_mtu=\"1024\" 3";
        let live = context(&[("sent_pkts", 10, 30), ("rcvd_pkts", 10, 25)], gauges);
        let [own, peer, traffic, ..] = &live.checks(Some([10, 0, 0, 2].into()))[..] else {
            panic!("too few")
        };
        let seen = "eth0 (udp), pid 7: MTU 4200; GIDs ::ffff:10.0.0.1; P_Keys 0xffff; queue pairs: 3 rts; peers: \
                    ::ffff:10.0.0.2 (3); path MTUs: 1024 (3)";
        assert_eq!((own.result, own.seen.as_str()), (CheckVerdict::Ok, seen));
        assert_eq!(peer.seen, "eth0 (udp), pid 7: 3 queue pair(s) connected to 10.0.0.2");
        let seen = "eth0 (udp), pid 7: 30 packets sent and 25 received, 20 and 15 of them in the last second";
        assert_eq!((traffic.result, traffic.seen.as_str()), (CheckVerdict::Ok, seen));
        assert_eq!(live.path_mtu(), Some(PathMtu::Mtu1024));
        assert_eq!(live.peer([10, 0, 0, 3].into()).result, CheckVerdict::NotChecked);
        let cut_off = [("sent_pkts", 10, 30), ("rcvd_pkts", 5, 5), ("retransmitted_pkts", 0, 20)];
        assert_eq!(context(&cut_off, "").traffic().result, CheckVerdict::Failed);
        let slow = [("sent_pkts", 10, 30), ("rcvd_pkts", 5, 5)];
        assert_eq!(context(&slow, "").traffic().result, CheckVerdict::Ok);
        let idle = context(&[("sent_pkts", 30, 30), ("rcvd_pkts", 5, 5)], "");
        assert_eq!(idle.traffic().result, CheckVerdict::Note);
        let deaf = context(&[("sent_pkts", 10, 30), ("rcvd_pkts", 0, 0)], "qps state=\"error\" 1");
        assert_eq!(
            (deaf.traffic().result, deaf.context().result),
            (CheckVerdict::Failed, CheckVerdict::Note)
        );
    }
}
