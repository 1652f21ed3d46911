//! Problems that the counters of a context show, and their remedies.

use ferroce::Counter;

use super::live::{Count, LiveContext};
use super::report::Check;

/// Counters with one cause.
pub(super) struct Symptom {
    check: &'static str,
    counters: &'static [&'static str],
    /// A description.
    what: &'static str,
    cure: &'static str,
    severity: Severity,
}

/// The meaning of counters that increase during the check.
enum Severity {
    /// Work requests fail, or will fail.
    Fails,
    /// More than 1 % of the packets are retransmitted, out of sequence or duplicates.
    FailsAboveShare,
    /// It costs time, or another host causes it.
    Note,
}

/// The percentage of such packets above which go-back-N does not work well. A healthy path has none.
const SHARE: u64 = 1;

/// The most likely first, since one causes the others.
pub(super) const SYMPTOMS: [Symptom; 11] = [
    Symptom {
        check: "ICRC",
        counters: &["rx_icrc_encapsulated"],
        what: "packets arrive with a wrong ICRC",
        cure: "they were rewritten or damaged on the path: exclude UDP port 4791 from NAT and everything else that \
            rewrites IP headers; `--pcap` and `ferroce dissect` name the field",
        severity: Severity::Fails,
    },
    Symptom {
        check: "partition",
        counters: &["rx_pkey_mismatch"],
        what: "packets of other partitions arrive",
        cure: "give both ends the same low 15 bits of the P_Key (--pkey), and at least one of them 0x8000",
        severity: Severity::Fails,
    },
    Symptom {
        check: "retries",
        counters: &["req_transport_retries_exceeded", "req_rnr_retries_exceeded"],
        what: "work requests have exceeded their retries",
        cure: "the peer has ended or stopped, or packets of that length do not arrive there: see `path MTU` and `next \
            hop` here, and `ferroce stat` at the peer",
        severity: Severity::Fails,
    },
    Symptom {
        check: "retransmission",
        counters: &[
            "retransmitted_pkts",
            "local_ack_timeout_err",
            "packet_seq_err",
            "implied_nak_seq_err",
            "out_of_sequence",
            "duplicate_request",
        ],
        what: "packets are lost, late or out of order",
        cure: "over 1 % of a second's packets fail the check: see the drops of both interfaces (`ip -s link`, \
            `ethtool -S`) and of the switches on the path, packet filters (`nft list ruleset`), and links that \
            distribute one flow (LAG or ECMP per packet, not by a hash of the flow); docs/congestion.md describes PFC \
            and ECN; timeouts without other losses mean a peer that does not poll, or an ACK timeout that is too short",
        severity: Severity::FailsAboveShare,
    },
    Symptom {
        check: "receives",
        counters: &["rnr_nak_retry_err", "send_rnr_err", "out_of_buffer"],
        what: "messages arrive before a receive WR is posted for them",
        cure: "the receiver must post more receive WRs, or post them earlier",
        severity: Severity::Note,
    },
    Symptom {
        check: "drops",
        counters: &["rx_dropped", "tx_dropped", "bad_descriptors"],
        what: "the port loses packets",
        cure: "over 1 % of a second's packets fail the check: this end is too slow for the packets that arrive: use a \
            dedicated core (--core), fewer outstanding bytes at the peer, or PFC; for a socket whose receive buffer is \
            below 4 MiB (`ferroce devinfo -d`) `sysctl -w net.core.rmem_max=8388608`",
        severity: Severity::FailsAboveShare,
    },
    Symptom {
        check: "refusals",
        counters: &[
            "resp_remote_invalid_request",
            "resp_remote_access_errors",
            "resp_remote_operation_errors",
            "resp_local_length_error",
            "req_remote_invalid_request",
            "req_remote_access_errors",
            "req_remote_operation_errors",
            "rx_access_errors",
            "rx_invalid_request",
            "rx_qkey_mismatch",
        ],
        what: "requests are rejected: by this end (resp_*, rx_*) or by the peer (req_*)",
        cure: "key, address, access rights, length or path MTU differ between the programs; the network is not the \
            cause",
        severity: Severity::Note,
    },
    Symptom {
        check: "strangers",
        counters: &["rx_unknown_qp", "rx_wrong_address", "rx_wrong_state", "rx_wrong_service"],
        what: "packets arrive for queue pairs that do not exist, or are not connected to the sender",
        cure: "they belong to an earlier connection, or the peer uses another GID or queue pair; harmless if they stop",
        severity: Severity::Note,
    },
    Symptom {
        check: "malformed packets",
        counters: &[
            "rx_not_roce",
            "rx_length_errors",
            "rx_ip_errors",
            "rx_unknown_opcode",
            "rx_transport_version",
            "rx_roce_v1_off",
            "rx_mad_errors",
        ],
        what: "packets arrive that are truncated, fragmented or not RoCE v2",
        cure: "see the MTU of every link on the path, and which other programs send to UDP port 4791 (`tcpdump -ni \
            DEV udp port 4791`)",
        severity: Severity::Note,
    },
    Symptom {
        check: "congestion",
        counters: &["np_ecn_marked_roce_packets", "rp_cnp_ignored"],
        what: "switches mark packets, or this end ignores CNPs",
        cure: "`--congestion` at both ends, see docs/congestion.md",
        severity: Severity::Note,
    },
    Symptom {
        check: "next hops",
        counters: &["event_unreachable"],
        what: "peers had no next hop",
        cure: "see `ip route get` and `ip neigh` for the peers",
        severity: Severity::Note,
    },
];

impl Symptom {
    /// The check for a context. Of the symptoms that are absent, only the four of `ALWAYS_TOLD` are reported.
    pub(super) fn check(&self, live: &LiveContext) -> Option<Check> {
        const ALWAYS_TOLD: [&str; 4] = ["ICRC", "partition", "retries", "retransmission"];
        let counts = || self.counters.iter().map(|name| (*name, live.count(name)));
        let shown: Vec<String> = counts().filter(|(_, count)| count.total > 0).map(row).collect();
        if shown.is_empty() {
            if !ALWAYS_TOLD.contains(&self.check) {
                return None;
            }
            // Without received packets, no counter increases.
            let [sent, received] =
                [Counter::SentPkts, Counter::RcvdPkts].map(|all| live.count(all.name()).total);
            let has_none =
                self.check == "ICRC" && live.count("without_icrc").total >= sent.saturating_add(received);
            return Some(match if has_none { 0 } else { received } {
                0 => Check::not_checked(self.check, live.named("no packet has arrived that would show it")),
                _ => Check::ok(self.check, live.named(&format!("0 {}", self.counters.join(", 0 ")))),
            });
        }
        let grows = counts().any(|(_, count)| count.lately > 0);
        let fails = match self.severity {
            Severity::Fails => grows,
            Severity::FailsAboveShare => {
                let lately = |name: &str| live.count(name).lately;
                let [sent, received] = [Counter::SentPkts, Counter::RcvdPkts].map(|all| lately(all.name()));
                let is_above = |(part, whole): (&str, u64)| {
                    self.counters.contains(&part)
                        && lately(part).saturating_mul(100) > whole.saturating_mul(SHARE)
                };
                [
                    (Counter::RetransmittedPkts.name(), sent),
                    (Counter::OutOfSequence.name(), received),
                    (Counter::DuplicateRequest.name(), received),
                    ("rx_dropped", received),
                    ("tx_dropped", sent),
                ]
                .into_iter()
                .any(is_above)
            }
            Severity::Note => false,
        };
        let verdict = if fails { Check::failed } else { Check::note };
        let since = if grows { "" } else { ", none in the last second" };
        let seen = live.named(&format!("{}: {}{since}", self.what, shown.join(", ")));
        Some(verdict(self.check, seen, self.cure.to_owned()))
    }
}

fn row((name, Count { total, lately }): (&str, Count)) -> String {
    match lately {
        0 => format!("{name} {total}"),
        _ => format!("{name} {total} ({lately} in the last second)"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::live::tests::context;
    use super::super::report::CheckVerdict;
    use super::*;

    /// The checks that are not `Ok`, with their texts.
    fn found(counters: &[(&str, u64, u64)]) -> Vec<(&'static str, CheckVerdict, String)> {
        let live = context(counters, "");
        let checks = SYMPTOMS.iter().filter_map(|symptom| symptom.check(&live));
        let bad = checks.filter(|check| check.result != CheckVerdict::Ok);
        bad.map(|check| (check.check, check.result, check.seen)).collect()
    }

    #[test]
    fn what_grows_fails_and_what_has_passed_is_noted() {
        use CheckVerdict::{Failed, Note};
        assert!(found(&[("rcvd_pkts", 1, 1000), ("rx_icrc_encapsulated", 0, 0)]).is_empty());
        let idle = found(&[("sent_pkts", 1, 1000), ("rx_icrc_encapsulated", 0, 0)]);
        assert!(idle.len() == 4 && idle.iter().all(|row| row.1 == CheckVerdict::NotChecked), "{idle:?}");
        let [(check, result, seen)] = &found(&[("rcvd_pkts", 1, 1), ("rx_icrc_encapsulated", 3, 5)])[..]
        else {
            panic!("one")
        };
        assert_eq!((*check, *result), ("ICRC", Failed));
        assert!(seen.ends_with("wrong ICRC: rx_icrc_encapsulated 5 (2 in the last second)"), "{seen}");
        let [(check, result, seen)] = &found(&[("rcvd_pkts", 1, 1), ("rx_pkey_mismatch", 5, 5)])[..] else {
            panic!("one")
        };
        assert_eq!((*check, *result), ("partition", Note));
        assert!(seen.ends_with("rx_pkey_mismatch 5, none in the last second"), "{seen}");
    }

    #[test]
    fn a_few_packets_sent_again_are_no_fault() {
        use CheckVerdict::{Failed, Note};
        let traffic = [("rcvd_pkts", 0, 1000), ("sent_pkts", 0, 1000)];
        let again = |again| found(&[&traffic[..], &[("retransmitted_pkts", 0, again)]].concat())[0].1;
        assert_eq!([again(10), again(11)], [Note, Failed]);
    }

    #[test]
    fn what_finds_no_room_fails_above_a_share() {
        use CheckVerdict::{Failed, Note};
        let said = |dropped| found(&[("rcvd_pkts", 0, 1000), ("rx_dropped", 0, dropped)]).remove(0);
        assert_eq!(
            [10, 11].map(|dropped| (said(dropped).0, said(dropped).1)),
            [("drops", Note), ("drops", Failed)]
        );
    }

    #[test]
    fn packets_without_an_icrc_show_none() {
        let all = [("sent_pkts", 0, 500), ("rcvd_pkts", 0, 1000), ("without_icrc", 0, 1500)];
        let (check, result, seen) = found(&all).remove(0);
        assert_eq!((check, result), ("ICRC", CheckVerdict::NotChecked));
        assert!(seen.ends_with("no packet has arrived that would show it"), "{seen}");
    }

    #[test]
    fn a_receiver_sees_what_is_lost_or_comes_twice() {
        use CheckVerdict::{Failed, Note};
        let traffic = [("rcvd_pkts", 0, 42_136), ("sent_pkts", 0, 1000)];
        let said = |counter, count| found(&[&traffic[..], &[(counter, 0, count)]].concat()).remove(0);
        for counter in ["out_of_sequence", "duplicate_request"] {
            assert_eq!([421, 422, 38_752].map(|count| said(counter, count).1), [Note, Failed, Failed]);
        }
        // Old values do not count, only increases.
        let past = [("rcvd_pkts", 0, 1000), ("out_of_sequence", 900, 900)];
        assert_eq!(found(&past)[0].1, Note);
    }

    #[test]
    fn every_counter_exists_and_is_of_one_symptom() {
        let driver = ferroce::driver::Stats::default();
        let names: Vec<&str> =
            Counter::all().map(Counter::name).chain(driver.named().map(|(name, ..)| name)).collect();
        let all: Vec<&str> = SYMPTOMS.iter().flat_map(|symptom| symptom.counters).copied().collect();
        for (place, name) in all.iter().enumerate() {
            assert!(names.contains(name) && !all[..place].contains(name), "{name}");
        }
    }
}
