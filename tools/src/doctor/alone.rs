//! The check of a peer that does not run `ferroce doctor`, by the answers of its connection manager and by ICMP.

use std::net::IpAddr;

use ferroce::driver::PacketDriver;
use ferroce::{CmEvent, Gid, PKey, PathMtu};

use super::local::{LET_THROUGH, OWN_FILTER};
use super::path::ecn_name;
use super::probe::HOP_LIMIT;
use super::question::{CmAnswer, UNUSED_PORT, ask};
use super::report::Check;
use super::{echo, local};
use crate::endpoint::Interrupt;
use crate::failure::Failure;

/// All checks that need no doctor at the other end.
pub(super) fn checks(
    driver: Box<dyn PacketDriver>,
    own: (IpAddr, PKey),
    peer: IpAddr,
    wanted: Option<PathMtu>,
    tcp_passes: bool,
    interrupt: &Interrupt,
) -> Result<Vec<Check>, Failure> {
    let capabilities = driver.capabilities().clone();
    let (event, answers) = ask(driver, own, peer, interrupt)?;
    let (echo, icmp_passes) = echo::check(&capabilities, peer, wanted, interrupt)?;
    let said = match event {
        CmEvent::Rejected { reason, .. } => Some(format!("refuses, as it should ({reason})")),
        CmEvent::Established { .. } => Some("accepts".to_owned()),
        _ => None,
    };
    let [udp, icrc] = match (said, answers.first()) {
        (Some(said), _) => [
            Check::ok(
                UDP,
                format!(
                    "its connection manager, asked for port {UNUSED_PORT}, {said}: both directions are open"
                ),
            ),
            Check::ok(ICRC, "right in both directions: it answers, and its answer is right"),
        ],
        (None, Some(answer)) => not_taken(answer, own, peer),
        (None, None) => silence(own, peer, tcp_passes, icmp_passes),
    };
    Ok(vec![udp, icrc, echo, marks(answers.first())])
}

const UDP: &str = "UDP 4791";
const ICRC: &str = "ICRC";

/// For an answer that the engine drops.
fn not_taken(answer: &CmAnswer, (_, pkey): (IpAddr, PKey), peer: IpAddr) -> [Check; 2] {
    if let Some(wrong) = &answer.wrong {
        return [
            Check::ok(UDP, "its connection manager answers"),
            Check::failed(
                ICRC,
                format!("of its answer: {wrong}"),
                "exclude UDP port 4791 from NAT and everything else that rewrites IP headers on the path",
            ),
        ];
    }
    let source = answer.source.to_ip();
    let failed = match answer.source == Gid::from(peer) {
        true => Check::failed(
            UDP,
            format!("its connection manager answers with P_Key {}, which {pkey} does not match", answer.pkey),
            "give both ends the same low 15 bits of --pkey, and at least one of them 0x8000",
        ),
        false => Check::failed(
            UDP,
            format!("its connection manager answers from {source}"),
            format!("check {source} instead, or see `ip rule` and `ip route get` there"),
        ),
    };
    [failed, Check::ok(ICRC, "right in its answer")]
}

/// For a missing answer.
fn silence((source, pkey): (IpAddr, PKey), peer: IpAddr, tcp_passes: bool, icmp_passes: bool) -> [Check; 2] {
    let passing = match (tcp_passes, icmp_passes) {
        (true, true) => Some("TCP and ICMP pass"),
        (true, false) => Some("TCP passes"),
        (false, true) => Some("ICMP passes"),
        (false, false) => None,
    };
    if let Some(why) = local::refused_here(source, peer) {
        let seen = format!("its connection manager does not answer; {why}");
        return [Check::failed(UDP, seen, OWN_FILTER), Check::not_checked(ICRC, "no packet came back")];
    }
    let kernel = local::ask_kernel(source, peer);
    let details = [passing.map(|passing| format!("though {passing}")), kernel.clone()];
    let detail: String = details.into_iter().flatten().map(|said| format!("; {said}")).collect();
    [
        Check::failed(
            UDP,
            format!("its connection manager does not answer{detail}"),
            silence_cure(peer, pkey, passing.is_some(), kernel.is_some()),
        ),
        Check::not_checked(ICRC, "no packet came back"),
    ]
}

/// DSCP, ECN and hop limit of the answer.
fn marks(answer: Option<&CmAnswer>) -> Check {
    const NAME: &str = "DSCP and ECN";
    let Some(CmAnswer { traffic_class, hop_limit, .. }) = answer else {
        return Check::not_checked(NAME, "no packet came back");
    };
    Check::not_checked(
        NAME,
        format!(
            "its answer arrived with DSCP {}, {}, hop limit {hop_limit} ({HOP_LIMIT} leave from most hosts); only \
             `ferroce doctor` there can report how it was sent, and how the packets of this end arrive",
            traffic_class >> 2,
            ecn_name(*traffic_class)
        ),
    )
}

/// The possible causes if no RoCE packet comes back, the most likely one first.
fn silence_cure(peer: IpAddr, pkey: PKey, others_pass: bool, kernel_answers: bool) -> String {
    let nat = "a NAT on the path makes the ICRC wrong, which covers addresses and ports: exclude UDP port 4791 from it \
        (`nft insert rule ip nat postrouting udp dport 4791 accept`), or route without one";
    let firewall = format!("a firewall there or on the path: {LET_THROUGH}");
    let device = format!(
        "does a program with a connection manager run there, or is there a RoCE device for {peer} (`rdma link`) and \
                 rdma_cm loaded (`modprobe rdma_cm`)?"
    );
    let partition = format!(
        "another partition: the program there must accept P_Key {pkey} (`rx_pkey_mismatch` in `ferroce stat` there \
         counts the packets that it drops; `--pkey` sets the P_Key of each end, also for doctor)"
    );
    let host = format!("is {peer} up, and is there a route to it (`ip route get {peer}`)?");
    let causes = match (others_pass, kernel_answers) {
        // The kernel there has no socket on the port; AF_XDP and RNICs need none.
        (_, true) => [device.as_str(), firewall.as_str(), partition.as_str(), nat].to_vec(),
        // Other traffic passes, so host and route work.
        (true, false) => [firewall.as_str(), device.as_str(), partition.as_str(), nat].to_vec(),
        (false, false) => {
            [host.as_str(), firewall.as_str(), device.as_str(), partition.as_str(), nat].to_vec()
        }
    };
    format!("{}; `ferroce doctor -d DEV` there checks each direction separately", causes.join("; then: "))
}
