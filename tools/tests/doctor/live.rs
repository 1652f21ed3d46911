//! The check next to a program that has UDP port 4791: the program is undisturbed, and is examined.

use std::net::UdpSocket;
use std::time::Duration;

use ferroce_driver_test_support::namespaces::inside;
use ferroce_driver_test_support::patience::until;
use ferroce_driver_test_support::signal::Signal;
use serde_json::Value;

use super::ends::{Ferroce, LIMIT, alone};
use super::strangers::Flood;
use super::way::{Found, PEER, Way, run};

/// The near end's address.
const OWN: &str = "10.1.1.2";

/// The only context of a process, as exported.
fn context(process: &Ferroce) -> Option<Value> {
    let shown = Ferroce::start(None, &format!("stat {} --json", process.pid())).end();
    (shown.code == Some(0)).then(|| shown.json()[0].clone())
}

fn counter(context: &Value, name: &str) -> u64 {
    context["counters"][name].as_u64().unwrap_or_else(|| panic!("no '{name}' in {context:#}"))
}

/// Waits until the process has received more than this many packets.
fn wait_for_packets(process: &Ferroce, most: u64) -> Value {
    let enough = || context(process).filter(|context| counter(context, "rcvd_pkts") > most);
    until(LIMIT, enough, || format!("{:#?}", context(process)))
}

fn is_passive(found: &Found, why: &str) {
    assert_eq!(found.report["mode"], "passive", "{:#?}", found.report);
    let said = found.report["why"].as_str().unwrap();
    assert!(said.contains(why), "no '{why}' in {said}");
}

/// With any driver of the application and of later programs.
#[test]
fn an_application_is_undisturbed_by_other_programs() {
    let _alone = alone();
    let Some(way) = Way::new() else { return };
    for driver in ["udp:veth0", "af_xdp:veth0"] {
        let _server = Ferroce::server(&way.b, &format!("perf write bw -D 600 -d {driver}"));
        let app = Ferroce::start(Some(&way.a), &format!("perf write bw -D 600 -d {driver} {}", PEER[0]));
        wait_for_packets(&app, 100);
        let holder = format!("'ferroce' (pid {}", app.pid());
        for device in ["veth0", "udp:veth0", "af_xdp:veth0"] {
            let found = way.check(&format!("-d {device} {}", PEER[0]));
            is_passive(&found, &holder);
            found.is_well();
            for ok in ["UDP 4791", "ICRC", "partition", "retries", "path MTU", "next hop", "peer"] {
                assert!(found.with("ok").contains(&ok), "{ok} of {device}: {:#?}", found.report);
            }
            let seen = found.text("context");
            assert!(seen.contains(&format!("pid {}: MTU 4200; GIDs ", app.pid())), "{seen}");
            assert!(seen.contains("1 rts") && seen.contains("peers: ::ffff:10.1.2.2 (1)"), "{seen}");
            assert!(found.with("not_checked").contains(&"each way by itself"), "{:#?}", found.report);
            let other = Ferroce::start(Some(&way.a), &format!("perf write bw -d {device} {}", PEER[0])).end();
            assert_eq!(other.code, Some(1), "{other:#?}");
            // UDP sockets share an address, and an interface's name selects UDP. In that case the server rejects the
            // second client.
            let (is_shared, says) = (device != "af_xdp:veth0", device != "udp:veth0");
            assert_eq!(other.stderr.contains(&holder), says, "{other:#?}");
            // It does not open the device.
            let shown = Ferroce::start(Some(&way.a), &format!("devinfo -d {device}")).end();
            assert_eq!(shown.code, Some(0), "{shown:#?}");
            let is_shown = shown.stdout.contains(&holder);
            let shares = shown.stdout.contains("slot 1 of the address (2 contexts when it was opened)");
            assert_eq!((is_shown, shares), (says, is_shared), "{shown:#?}");
            let named = shown.stdout.contains(&format!("slot 0 of 10.1.1.2  pid {}, ferroce", app.pid()));
            assert_eq!(named, is_shared, "{shown:#?}");
        }
        let before = wait_for_packets(&app, 0);
        let after = wait_for_packets(&app, counter(&before, "rcvd_pkts"));
        assert_eq!(after["gauges"]["qps"]["rts"], 1, "{after:#}");
        for errors in ["req_cqe_error", "req_transport_retries_exceeded", "rx_icrc_encapsulated"] {
            assert_eq!(counter(&after, errors), 0, "{errors}");
        }
        app.interrupt();
        let app = app.end();
        assert_eq!(app.code, Some(130), "{app:#?}");
        assert!(!app.stderr.contains("completed with"), "{app:#?}");
    }
}

/// A missing host is found although an application works with another one.
#[test]
fn a_peer_that_is_not_there() {
    let _alone = alone();
    let Some(way) = Way::new() else { return };
    let _server = Ferroce::server(&way.b, "perf write bw -D 600 -d udp:veth0");
    let app = Ferroce::start(Some(&way.a), &format!("perf write bw -D 600 -d udp:veth0 {}", PEER[0]));
    wait_for_packets(&app, 100);
    let on_the_link = way.check("10.1.1.77");
    is_passive(&on_the_link, "in use by 'ferroce'");
    on_the_link.fails(&["next hop", "far end"], &["10.1.1.77"]);
    way.check("10.1.2.77").fails(&["far end"], &["no answer from 10.1.2.77", "ip route get"]);
}

/// It retransmits and receives nothing.
#[test]
fn an_application_that_is_cut_off() {
    let _alone = alone();
    let Some(way) = Way::with_rules() else { return };
    let _server = Ferroce::server(&way.b, "perf write bw -D 600 -u 18 -d udp:veth0");
    let app = Ferroce::start(Some(&way.a), &format!("perf write bw -D 600 -u 18 -d udp:veth0 {}", PEER[0]));
    wait_for_packets(&app, 100);
    way.rule("forward oifname to-b udp dport 4791 drop");
    // The first timeout is after 1 s, so a check may begin before it.
    let failing = || Some(way.check(PEER[0])).filter(|found| found.with("failed").contains(&"UDP 4791"));
    let found = until(LIMIT, failing, || "a check that fails".to_owned());
    let text = found.text("UDP 4791");
    assert!(text.contains("and 0 of them in the last second") && text.contains("a firewall"), "{text}");
}

/// The kernel reports it to the sender.
#[test]
fn a_packet_filter_of_this_host() {
    let _alone = alone();
    let Some(way) = Way::with_rules() else { return };
    let _far = way.far_end("udp:veth0");
    let rule = |arguments: &str| run("ip", &format!("netns exec {} nft {arguments}", way.a));
    rule("add table inet own");
    rule("add chain inet own output { type filter hook output priority 0 ; }");
    rule("add rule inet own output udp dport 4791 drop");
    let found = way.check(&format!("-d udp:veth0 {}", PEER[0]));
    found.fails(&["UDP 4791 there"], &["Operation not permitted", "chain of output in `nft list ruleset`"]);
}

#[test]
fn a_sick_application_is_examined() {
    let _alone = alone();
    let Some(way) = Way::new() else { return };
    let app = Ferroce::start(Some(&way.a), "rping -d udp:veth0");
    until(LIMIT, || context(&app), || "a context of rping".to_owned());
    let check = || way.check(PEER[0]);
    {
        let _flood = Flood::start(&way);
        wait_for_icrc(&app);
        let found = check();
        is_passive(&found, "in use by 'ferroce'");
        found.fails(&["ICRC"], &["wrong ICRC: rx_icrc_encapsulated", "in the last second", "NAT"]);
    }
    let found = check();
    found.is_well();
    assert!(found.with("note").contains(&"ICRC"), "what has passed is noted: {:#?}", found.report);
    // Alone, without another end.
    let itself = Found::new(Ferroce::start(Some(&way.a), "doctor --json -d veth0").end());
    is_passive(&itself, "in use by 'ferroce'");
    itself.is_well();
    assert!(
        itself.report["peer"].is_null() && itself.with("ok").contains(&"context"),
        "{:#?}",
        itself.report
    );
    app.signal(Signal::STOP);
    check().fails(&["context"], &["does not report its counters", "stopped or hangs"]);
    app.signal(Signal::CONT);
    // Another address of the host is free.
    run("ip", &format!("-n {} addr add 10.1.1.3/24 dev veth0", way.a));
    let found = way.check(&format!("-d udp:10.1.1.3 {}", PEER[0]));
    assert_eq!(found.report["mode"], "active", "{:#?}", found.report);
    app.interrupt();
    // A server without a client.
    assert_eq!(app.end().code, Some(0));
}

/// Both ends share their addresses with applications that were started before.
#[test]
fn an_address_is_shared_with_applications() {
    let _alone = alone();
    let Some(way) = Way::new() else { return };
    let _servers = [&way.a, &way.b].map(|end| Ferroce::server(end, "rping -d udp:veth0"));
    let check = || way.check(&format!("-d udp:veth0 --active {}", PEER[0]));
    let is_active = |found: &Found| assert_eq!(found.report["mode"], "active", "{:#?}", found.report);
    {
        let _far = Ferroce::server(&way.b, "doctor -d udp:veth0 --active");
        let found = check();
        is_active(&found);
        found.is_well();
        for ok in ["UDP 4791 there", "UDP 4791 back"] {
            assert!(found.with("ok").contains(&ok), "{ok}: {:#?}", found.report);
        }
    }
    let found = check();
    is_active(&found);
    found.is_well();
    assert!(found.text("UDP 4791").contains("refuses, as it should"), "{:#?}", found.report);
}

fn wait_for_icrc(process: &Ferroce) {
    let counted = || context(process).filter(|context| counter(context, "rx_icrc_encapsulated") > 0);
    until(LIMIT, counted, || format!("{:#?}", context(process)));
}

/// A program other than ferroce, on all addresses.
#[test]
fn a_port_that_somebody_else_has() {
    let _alone = alone();
    let Some(way) = Way::new() else { return };
    let _far = Ferroce::start(Some(&way.b), "rping -d veth0");
    let passive = way.check(&format!("--passive {}", PEER[0]));
    is_passive(&passive, "--passive");
    passive.is_well();
    assert!(passive.text("each way by itself").contains("without --passive"), "{:#?}", passive.report);
    let socket = inside(&way.a, || UdpSocket::bind("0.0.0.0:4791").unwrap());
    socket.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
    let own = format!("(pid {})", std::process::id());
    for device in ["veth0", "udp:veth0"] {
        let found = way.check(&format!("-d {device} {}", PEER[0]));
        is_passive(&found, &own);
        // No context of ferroce was examined.
        found.fails(&["context"], &[&own, "exports no counters", "if it is another program"]);
        let active = format!("doctor -d {device} --active {}", PEER[0]);
        let refused = Ferroce::start(Some(&way.a), &active).end();
        assert_eq!(refused.code, Some(1), "{refused:#?}");
        assert!(refused.stderr.contains(&own) && refused.stderr.contains(OWN), "{refused:#?}");
    }
    drop(socket);
    let found = way.check(PEER[0]);
    assert_eq!(found.report["mode"], "active");
    assert!(found.report["why"].as_str().unwrap().contains("no other program"), "{:#?}", found.report);
}
