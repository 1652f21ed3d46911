//! `ferroce doctor` on healthy paths, and on faulty ones.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that can't go on fails")]

#[path = "../ends/mod.rs"]
mod ends;
mod live;
mod strangers;
mod way;

use std::io::{Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::thread;
use std::time::Duration;

use ends::{Ferroce, alone, refused};
use ferroce_driver_test_support::signal::Signal;
use serde_json::{Value, json};
use way::{Found, PEER, Way, run};

/// All checks of both ends.
fn all() -> Vec<&'static str> {
    let here = ["GID", "interface", "route", "next hop"];
    let there = ["UDP 4791 there", "ICRC there", "path MTU there", "DSCP there", "ECN there"];
    let back = ["UDP 4791 back", "ICRC back", "path MTU back", "DSCP back", "ECN back"];
    [&here[..], &UNTOLD, &["far end", "partition"], &there, &back].concat()
}

/// Unknown for veth and for the switch.
const UNTOLD: [&str; 4] = ["pause frames", "PFC", "traffic classes", "switch"];

#[test]
fn both_ends_in_one_process() {
    let found = Found::new(Ferroce::start(None, "doctor -d loopback --json").end());
    found.is_well();
    // A single line if there is no port.
    assert_eq!(found.with("not_checked"), ["interface", "route", "port"]);
    assert_eq!(found.checks().len(), all().len() - UNTOLD.len() + 1);
    let table = Ferroce::start(None, "doctor -d loopback").end();
    assert!(table.stdout.contains("path MTU back  | ok"), "{}", table.stdout);
}

#[test]
fn what_can_not_be_checked_is_refused() {
    refused(&[
        ("doctor", &["name a PEER", "-d"]),
        ("doctor 127.0.0.1", &["is this host", "udp:127.0.0.2"]),
        ("doctor -d loopback 10.0.0.1", &["can't be reached over -d loopback"]),
        ("doctor no.such.host.invalid", &["no.such.host.invalid"]),
        ("doctor -d loopback -m 1000", &["1000", "1024"]),
        ("doctor -d loopback --dscp 64", &["64", "--dscp"]),
    ]);
}

#[test]
fn a_way_that_is_well() {
    let _alone = alone();
    let Some(way) = Way::new() else { return };
    for far in ["veth0", "udp:10.1.2.2"] {
        let _far = way.far_end(far);
        for near in ["", "-d udp:veth0 "] {
            let found = way.check(&format!("{near}{}", PEER[0]));
            found.is_well();
            assert_eq!(
                found.with("ok").len() + found.with("not_checked").len(),
                all().len(),
                "{:#?}",
                found.report
            );
            assert!(found.text("UDP 4791 there").starts_with("465 of 465 packets arrive, 1 router"));
            assert!(found.text("path MTU back").starts_with("4096:"), "{:#?}", found.report);
            // Only visible in complete frames.
            let hidden = "can't detect a rewritten IPv4 identification";
            assert_eq!(found.text("ICRC there").contains(hidden), far != "veth0", "{:#?}", found.report);
        }
    }
    let _far = way.far_end("veth0");
    let found = way.check(PEER[1]);
    found.is_well();
    let (ok, untold): (Vec<_>, Vec<_>) = all().iter().partition(|check| !UNTOLD.contains(check));
    assert_eq!((found.with("ok"), found.with("not_checked")), (ok, untold));
    assert!(found.text("PFC").starts_with("the kernel's driver of 'veth0' does not report them"));
    let data = way.check(&format!("--dscp 26 {}", PEER[0]));
    assert!(data.text("switch").contains("ECN for the class of DSCP 26, to start with Kmin"));
    assert!(data.text("traffic classes").contains("mlnx_qos -i veth0"), "{:#?}", data.report);
}

#[test]
fn a_link_that_is_too_small() {
    let _alone = alone();
    let Some(way) = Way::new() else { return };
    run("ip", &format!("-n {} link set to-b mtu 1500", way.router));
    let _far = way.far_end("veth0");
    for peer in PEER {
        let found = way.check(peer);
        let words =
            ["1024 at most", "path MTU 2048", "a link on the path has a smaller one", "-m 1024", "mtu 4200"];
        found.fails(&["path MTU there", "path MTU back"], &words);
    }
    // The path MTU is sufficient if no larger one is requested.
    way.check(&format!("-m 1024 {}", PEER[0])).is_well();
    way.check(&format!("-d udp:veth0 {}", PEER[0]))
        .fails(&["path MTU there", "path MTU back"], &["1024 at most"]);
    let found = way.check(&format!("-m 4096 {}", PEER[0]));
    found.fails(&["path MTU there", "path MTU back"], &["4160 or more"]);
}

#[test]
fn an_end_that_is_too_small() {
    let _alone = alone();
    let Some(way) = Way::new() else { return };
    run("ip", &format!("-n {} link set veth0 mtu 1500", way.b));
    let _far = way.far_end("veth0");
    let found = way.check(PEER[0]);
    found.fails(
        &["path MTU there"],
        &["1024 at most", "'veth0' of 10.1.2.2 has an MTU of 1500", "mtu 4200` there"],
    );
    let found = way.check(&format!("-m 4096 {}", PEER[0]));
    assert!(found.text("path MTU back").contains("`ip link set veth0 mtu 4160`"), "{:#?}", found.report);
}

#[test]
fn a_way_that_translates_addresses() {
    let _alone = alone();
    let cases = [
        // An address of the router, and one that the far end has no route to.
        ("to-b", "ip to 10.1.2.1", PEER[0], "ICRC there", "source address 10.1.1.2 -> 10.1.2.1, as"),
        ("to-b", "ip to 192.0.2.7", PEER[0], "ICRC there", "source address 10.1.1.2 -> 192.0.2.7, as"),
        ("to-b", "ip to 10.1.2.1:1024", PEER[0], "ICRC there", "source port 53447 -> 1024"),
        ("to-a", "ip6 to fd11::77", PEER[1], "ICRC back", "source address fd12::2 -> fd11::77, as"),
    ];
    for (port, to, peer, check, change) in cases {
        // The router tracks flows, so each case has its own.
        let Some(way) = Way::with_rules() else { return };
        let _far = way.far_end("veth0");
        way.rule(&format!("nat oifname {port} udp dport 4791 snat {to}"));
        way.check(peer).fails(&[check], &[change, "a NAT does", "in 20 of 20", "nft insert rule"]);
    }
}

#[test]
fn a_way_that_rewrites() {
    let _alone = alone();
    let Some(way) = Way::with_rules() else { return };
    let _far = way.far_end("veth0");
    way.rule("forward oifname to-b udp dport 4791 ip id set 0x1234");
    way.check(PEER[0])
        .fails(&["ICRC there"], &["IPv4 identification 0x0000 -> 0x1234", "the rewriting of IPv4 headers"]);
    way.rule("forward oifname to-a udp dport 4791 @th,512,16 set 0xbeef");
    way.check(PEER[0]).fails(&["ICRC back"], &["2 bytes of the payload", "ferroce dissect"]);
}

#[test]
fn a_way_that_bleaches() {
    let _alone = alone();
    let Some(way) = Way::with_rules() else { return };
    let _far = way.far_end("veth0");
    for (version, peer) in ["ip", "ip6"].into_iter().zip(PEER) {
        way.rule(&format!("forward oifname to-b {version} dscp set cs0"));
        way.check(peer).fails(&["DSCP there"], &["bleached: 8 -> 0, 16 -> 0", "56 -> 0", "trust dscp"]);
        way.rule(&format!("forward oifname to-a {version} dscp 26 {version} dscp set 27"));
        way.check(peer).fails(&["DSCP back"], &["re-marked: 26 -> 27 /"]);
        way.rule(&format!("forward oifname to-a {version} ecn set not-ect"));
        let words = ["ECT(1) -> Not-ECT, ECT(0) -> Not-ECT, CE -> Not-ECT", "RFC 6040"];
        way.check(peer).fails(&["ECN back"], &words);
    }
    // The marks of a congested switch are no fault.
    way.rule("forward oifname to-b ip ecn ect0 ip ecn set ce");
    let found = way.check(PEER[0]);
    found.is_well();
    assert_eq!(found.with("note"), ["ECN there"]);
    way.rule("forward oifname to-b ip dscp 46 udp dport 4791 drop");
    way.check(PEER[0]).fails(&["DSCP there"], &["DSCP 46 do not arrive"]);
}

#[test]
fn a_way_that_copies() {
    let _alone = alone();
    let Some(way) = Way::with_rules() else { return };
    let _far = way.far_end("veth0");
    way.nft("add table netdev copies");
    way.nft("add chain netdev copies out { type filter hook egress device to-b priority 0 ; }");
    way.nft("add rule netdev copies out udp dport 4791 numgen random mod 100 < 30 dup to to-b");
    let found = way.check(PEER[0]);
    found.fails(&["UDP 4791 there"], &["465 of 465 packets arrive", "arrive twice", "a mirror port"]);
}

#[test]
fn a_way_that_is_closed() {
    let _alone = alone();
    let Some(way) = Way::with_rules() else { return };
    {
        let _far = way.far_end("veth0");
        for (port, closed, open) in [("to-b", "there", "back"), ("to-a", "back", "there")] {
            way.rule(&format!("forward oifname {port} udp dport 4791 drop"));
            let found = way.check(PEER[0]);
            found.fails(
                &[&format!("UDP 4791 {closed}")],
                // A rule after the one that drops would never be reached, and one in another chain would not override
                // it.
                &["none of ", "insert `udp dport 4791 accept` above it in the same chain", "ip route get"],
            );
            let unknown = ["ICRC", "path MTU", "DSCP", "ECN"].map(|check| format!("{check} {closed}"));
            assert_eq!(found.with("not_checked")[UNTOLD.len()..], unknown);
            assert!(found.text(&format!("UDP 4791 {open}")).starts_with("465 of 465"), "{:#?}", found.report);
        }
        // A single loss is reported, and nothing else.
        way.rule("forward oifname to-b udp dport 4791 numgen inc mod 200 == 10 drop");
        let found = way.check(PEER[0]);
        found.is_well();
        assert_eq!(found.with("note"), ["UDP 4791 there"], "{:#?}", found.report);
        // 3 % are too many, and neither size nor class is the cause.
        way.rule("forward oifname to-b udp dport 4791 numgen inc mod 30 == 29 drop");
        way.check(PEER[0]).fails(&["UDP 4791 there"], &["% are lost at random"]);
        way.rule("forward oifname to-b udp dport 4791 limit rate over 30/second burst 50 packets drop");
        way.check(PEER[0]).fails(&["UDP 4791 there"], &["at random", "rules that limit"]);
        way.rule("forward oifname to-b udp dport 4791 numgen random mod 100 < 20 drop");
        way.check(PEER[0]).fails(&["UDP 4791 there"], &["at random", "ip -s link"]);
        way.rule("forward udp dport 4791 numgen random mod 100 < 50 drop");
        way.check(PEER[0]).fails(&["UDP 4791 there", "UDP 4791 back"], &["at random"]);
        // With this much loss the other checks may or may not have a result.
        way.rule("forward oifname to-b udp dport 4791 numgen random mod 100 < 85 drop");
        let found = way.check(PEER[0]);
        found.fails(&["UDP 4791 there"], &["at random"]);
    }
    // Without a doctor there, there is no answer at all.
    let found = way.check(PEER[0]);
    found.fails(&["UDP 4791"], &["does not answer", "`ferroce doctor -d DEV` there", "rdma_cm"]);
    assert!(found.text("far end").contains("no doctor answers"), "{:#?}", found.report);
}

#[test]
fn a_peer_in_another_partition() {
    let _alone = alone();
    let Some(way) = Way::new() else { return };
    {
        let _far = way.far_end("veth0 --pkey 0x8001");
        way.check(PEER[0])
            .fails(&["partition"], &["0xffff here, 0x8001 there", "rx_pkey_mismatch", "--pkey"]);
        way.check(&format!("--pkey 0x0001 {}", PEER[0])).is_well();
    }
    let _server = Ferroce::server(&way.b, "rping -d veth0 --pkey 0x8001");
    let found = way.check(PEER[0]);
    found.fails(&["UDP 4791"], &["another partition: the program there must accept P_Key 0xffff", "--pkey"]);
    way.check(&format!("--pkey 0x0001 {}", PEER[0])).is_well();
}

#[test]
fn a_peer_without_a_doctor() {
    let _alone = alone();
    let Some(way) = Way::new() else { return };
    let end = Ferroce::start(Some(&way.b), "rping -d veth0");
    wait_for_engine(&way);
    let after = ["far end", "UDP 4791", "ICRC", "path MTU", "DSCP and ECN"];
    let checks = [&["GID", "interface", "route", "next hop"][..], &UNTOLD, &after].concat();
    for arguments in [PEER[0], PEER[1]] {
        let found = way.check(arguments);
        found.is_well();
        assert_eq!(
            found.checks().iter().map(|row| row["check"].as_str().unwrap()).collect::<Vec<_>>(),
            checks
        );
        assert!(found.text("UDP 4791").contains("refuses, as it should (invalid service id)"));
        assert!(found.text("ICRC").contains("right in both directions"));
        assert!(found.text("path MTU").starts_with("4096: echo requests of 41"), "{:#?}", found.report);
        assert!(found.text("DSCP and ECN").contains("DSCP 0, Not-ECT, hop limit 63"), "{:#?}", found.report);
    }
    run("ip", &format!("-n {} link set to-a mtu 1500", way.router));
    way.check(PEER[0]).fails(&["path MTU"], &["1024 at most", "raise the MTU to 4160"]);
    end.interrupt();
    assert_eq!(end.end().code, Some(0));
}

/// Waits until the engine at the far end answers.
fn wait_for_engine(way: &Way) {
    for _ in 0..5 {
        if way.check(PEER[0]).outcome.code == Some(0) {
            return;
        }
    }
    panic!("rping does not answer");
}

/// An answer whose ICRC the path invalidates is recognized without a doctor there, too.
#[test]
fn a_peer_behind_a_nat() {
    let _alone = alone();
    let Some(way) = Way::with_rules() else { return };
    let end = Ferroce::start(Some(&way.b), "rping -d veth0");
    wait_for_engine(&way);
    // Of two addresses, the selected one is used for the request.
    run("ip", &format!("-n {} addr add 10.1.1.3/24 dev veth0", way.a));
    way.rule("forward ip saddr 10.1.1.2 udp dport 4791 drop");
    let other = way.check(&format!("-x 2 {}", PEER[0]));
    other.is_well();
    assert!(other.text("GID").contains("index 2, ::ffff:10.1.1.3"), "{:#?}", other.report);
    assert!(other.text("route").contains("leave from 10.1.1.2, these from 10.1.1.3"), "{:#?}", other.report);
    way.check(&format!("-x 1 {}", PEER[0])).fails(&["UDP 4791"], &["does not answer"]);
    way.rule("nat oifname to-a udp dport 4791 snat ip to 10.1.1.1");
    way.check(PEER[0]).fails(&["ICRC"], &["address rewritten, was 10.1.2.2 to 10.1.1.2", "NAT"]);
    end.interrupt();
    assert_eq!(end.end().code, Some(0));
}

/// Answers by TCP and ICMP show that host and route work; a request with a wrong ICRC is dropped silently.
#[test]
fn a_peer_that_a_nat_keeps_from_answering() {
    let _alone = alone();
    let Some(way) = Way::with_rules() else { return };
    let end = Ferroce::start(Some(&way.b), "rping -d veth0");
    wait_for_engine(&way);
    let before = |text: &str, first: &str, second: &str| {
        let [first, second] =
            [first, second].map(|word| text.find(word).unwrap_or_else(|| panic!("no '{word}' in {text}")));
        first < second
    };
    way.rule("nat oifname to-b udp dport 4791 snat ip to 10.1.2.1");
    let found = way.check(PEER[0]);
    found.fails(&["UDP 4791"], &["does not answer; though TCP and ICMP pass", "postrouting udp dport 4791"]);
    let text = found.text("UDP 4791");
    assert!(before(&text, "firewall", "rdma link") && before(&text, "rdma link", "P_Key"), "{text}");
    assert!(before(&text, "P_Key", "NAT"), "{text}");
    // If nothing passes, a NAT is the least likely cause.
    way.rule("forward oifname to-b drop");
    let found = way.check(PEER[0]);
    found.fails(&["UDP 4791"], &["does not answer", "`ip route get 10.1.2.2`"]);
    let text = found.text("UDP 4791");
    assert!(before(&text, "ip route get", "firewall") && before(&text, "rdma link", "NAT"), "{text}");
    end.interrupt();
    assert_eq!(end.end().code, Some(0));
}

/// A client of the far end that sends arbitrary messages.
struct Client(TcpStream);

impl Client {
    const FAR: &str = "127.0.0.1:18516";

    /// A client that claims this address.
    fn at(address: &str) -> Client {
        let mut stream = TcpStream::connect(Client::FAR).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(b"frcdoct\x02").unwrap();
        stream.read_exact(&mut [0; 8]).unwrap();
        let mut client = Client(stream);
        let hello = json!({
            "address": address, "to": "127.0.0.1", "addresses": [address], "interface": "lo", "mtu": 4200,
            "driver": "udp", "token": 1, "source_port": 4791, "is_socket": true
        });
        let answer = client.ask(&json!({ "Hello": hello }));
        assert_eq!(answer["Hello"]["address"], "127.0.0.1", "{answer}");
        client
    }

    fn ask(&mut self, message: &Value) -> Value {
        let body = message.to_string();
        let bytes = [&(body.len() as u32).to_be_bytes(), body.as_bytes()].concat();
        for piece in bytes.chunks(200) {
            self.0.write_all(piece).unwrap();
            self.0.read_exact(&mut [0]).unwrap();
        }
        let mut prefix = [0; 4];
        self.0.read_exact(&mut prefix).unwrap();
        let mut body = vec![0; u32::from_be_bytes(prefix) as usize];
        let mut had = prefix.len();
        for piece in [&prefix[..], &body].concat().chunks(200).map(<[u8]>::len).collect::<Vec<_>>() {
            let at = had - prefix.len();
            self.0.read_exact(&mut body[at..at + piece - if at == 0 { prefix.len() } else { 0 }]).unwrap();
            had += piece - if at == 0 { prefix.len() } else { 0 };
            self.0.write_all(b"+").unwrap();
        }
        serde_json::from_slice(&body).unwrap()
    }

    fn send_probes(&mut self, count: u16, length: u32) -> Value {
        let probe = |number| json!({ "number": number, "traffic_class": 0, "length": length });
        self.ask(&json!({ "Send": (0..count).map(probe).collect::<Vec<_>>() }))
    }
}

#[test]
fn nobody_gets_probes_that_has_not_asked() {
    let _alone = alone();
    let mut far = Ferroce::start(None, "doctor -d udp:127.0.0.1");
    far.ready();
    let victim = UdpSocket::bind("127.0.0.3:4791").unwrap();
    victim.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    let receive = || {
        let mut buffer = [0; 5000];
        std::iter::from_fn(|| victim.recv(&mut buffer).ok().map(|length| buffer[..length].to_vec()))
            .collect::<Vec<_>>()
    };
    let mut client = Client::at("127.0.0.3");
    let answer = client.send_probes(64, 4000);
    let packets = receive();
    let bytes: usize = packets.iter().map(Vec::len).sum();
    assert!((1..=300).contains(&bytes), "{bytes} bytes in {} packets; {answer}", packets.len());
    assert_eq!(answer, "Challenge");
    let answer = client.ask(&json!({ "Proof": 1 }));
    let refused = answer["Sent"].as_str().unwrap_or_default();
    assert!(refused.contains("comes from 127.0.0.1") && refused.contains("to 127.0.0.3"), "{answer}");
    assert_eq!(receive().len(), 0);

    // An address that has received the challenge gets probes, up to twelve rounds.
    assert_eq!(client.send_probes(1, 1000), "Challenge");
    let packet = receive().pop().unwrap();
    let token = u64::from_be_bytes(packet[20 + 8..][..8].try_into().unwrap());
    assert_eq!(client.ask(&json!({ "Proof": token })), json!({ "Sent": null }));
    assert_eq!(receive().iter().filter(|packet| packet.len() > 900).count(), 31);
    for _ in 0..10 {
        assert_eq!(client.send_probes(1, 1000), json!({ "Sent": null }));
    }
    let answer = client.send_probes(1, 1000);
    assert!(answer["Failed"].as_str().is_some_and(|why| why.contains("12 rounds")), "{answer}");
    let answer = Client::at("127.0.0.1").send_probes(1, 60_000);
    assert!(
        answer["Failed"].as_str().is_some_and(|why| why.contains("60000 bytes: must be 64 to 4200")),
        "{answer}"
    );
    far.interrupt();
    // Outside a check, a signal is the normal end.
    assert_eq!(far.end().code, Some(0));
}

#[test]
fn silent_connections_delay_no_check() {
    let _alone = alone();
    let mut far = Ferroce::start(None, "doctor -d udp:127.0.0.1");
    far.ready();
    let mut idle: Vec<_> = (0..100).map(|_| TcpStream::connect(Client::FAR).unwrap()).collect();
    idle[99].write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    // Its packets leave from another address than its control connection.
    let found = Found::new(Ferroce::start(None, "doctor --json -d udp:127.0.0.2 127.0.0.1").end());
    assert!(found.text("UDP 4791 back").starts_with("465 of 465"), "{:#?}", found.report);
    assert!(found.outcome.took < Duration::from_secs(15), "{:?}", found.outcome.took);
    // Signals are handled during a check, too.
    let _waiting = Client::at("127.0.0.1");
    thread::sleep(Duration::from_millis(200));
    far.signal(Signal::TERM);
    let far = far.end();
    assert_eq!(far.code, Some(130), "{far:#?}");
    assert!(far.took < Duration::from_secs(1), "{:?}", far.took);
}

#[test]
fn what_is_wrong_here() {
    let _alone = alone();
    let Some(way) = Way::new() else { return };
    let _far = way.far_end("veth0");
    way.check(&format!("-d veth0 -x 9 {}", PEER[0])).fails(&["GID"], &["no index 9", "`-x 1`"]);
    let local = way.check(&format!("-d veth0 -x 0 {}", PEER[1]));
    assert_eq!(local.with("failed")[0], "GID", "{:#?}", local.report);
    assert!(local.text("GID").contains("link-local: routers do not forward it"), "{:#?}", local.report);
    way.check(&format!("-d udp:10.1.1.2 {}", PEER[1]))
        .fails(&["GID"], &["none for an IPv6 peer", "ip addr add"]);
    // The far end's device does not have the address at which it was reached.
    run("ip", &format!("-n {} addr add 10.9.9.9/32 dev lo", way.b));
    run("ip", &format!("-n {} route add 10.9.9.9/32 via 10.1.2.2", way.router));
    way.check("10.9.9.9").fails(&["far end"], &["not 10.9.9.9", "10.1.2.2"]);
    // For a socket, the kernel resolves the next hop, and reports a failure.
    way.check("-d udp:veth0 10.1.1.77")
        .fails(&["next hop"], &["10.1.1.77 does not answer ARP", "ip neigh show 10.1.1.77"]);
    run("ip", &format!("-n {} route replace default via 10.1.1.99", way.a));
    for device in ["veth0", "udp:veth0"] {
        way.check(&format!("-d {device} {}", PEER[0]))
            .fails(&["next hop"], &["10.1.1.99 does not answer ARP", "arping 10.1.1.99"]);
    }
    run("ip", &format!("-n {} route del default", way.a));
    way.check(&format!("-d veth0 {}", PEER[0]))
        .fails(&["route", "next hop"], &["no route to 10.1.2.2", "ip route"]);
    run("ip", &format!("-n {} link set veth0 mtu 200", way.a));
    let found = way.check("-d veth0 10.1.1.77");
    found.fails(&["next hop"], &["does not answer ARP", "ip neigh show 10.1.1.77"]);
    assert!(found.text("interface").contains("path MTU none"), "{:#?}", found.report);
}
