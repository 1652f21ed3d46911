//! Servers of several clients, clients that name their server, and measurements that end early.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod ends;

use std::fs;
use std::net::TcpListener;
use std::time::Duration;

use ends::{Ferroce, Namespaces, Outcome, SERVER, alone};
use ferroce_driver_test_support::signal::Signal;

/// An address of the loopback interface that no other process uses.
fn address(last: u8) -> String {
    let [.., a, b] = std::process::id().to_be_bytes();
    format!("127.{}.{a}.{b}", 110 + last)
}

/// A command of each protocol: the options of both ends, the port of the server, and how a client names its server.
fn protocols() -> [(String, u16, String); 5] {
    let home = "127.0.0.1".to_owned();
    [
        ("perf write bw -n 20".into(), 18541, home.clone()),
        ("pingpong -n 20".into(), 18542, home),
        ("rping -C 3".into(), 7441, address(0)),
        ("ucmatose -C 3".into(), 7442, address(0)),
        ("udaddy -C 3".into(), 7443, address(0)),
    ]
}

fn client(command: &str, port: u16, host: &str) -> Outcome {
    Ferroce::start(None, &format!("{command} -p {port} -d udp:{} {host}", address(1))).end()
}

#[test]
fn a_persistent_server_serves_one_after_another_until_a_signal() {
    let _alone = alone();
    for (command, port, host) in protocols() {
        let mut server =
            Ferroce::start(None, &format!("{command} -p {port} --persistent -d udp:{}", address(0)));
        for _ in 0..3 {
            server.ready();
            let outcome = client(&command, port, &host);
            assert_eq!(outcome.code, Some(0), "{command}: {outcome:#?}");
        }
        server.ready();
        server.signal(Signal::TERM);
        let outcome = server.end();
        assert_eq!(outcome.code, Some(0), "{command}: {outcome:#?}");
        assert!(outcome.stderr.contains("after 3 clients"), "{command}: {outcome:#?}");
    }
}

#[test]
fn a_persistent_server_outlives_a_client_that_fails() {
    let _alone = alone();
    let port = 18543;
    let mut server = Ferroce::start(None, &format!("perf write bw -n 20 -p {port} -P -d udp:{}", address(0)));
    server.ready();
    let outcome = client("perf read bw -n 20", port, "127.0.0.1");
    assert_eq!(outcome.code, Some(1), "{outcome:#?}");
    assert!(outcome.stderr.contains("give both the same"), "{outcome:#?}");
    server.says("serving a client failed", || {});
    server.ready();
    assert_eq!(client("perf write bw -n 20", port, "127.0.0.1").code, Some(0));
    server.ready();
    server.interrupt();
    assert_eq!(server.end().code, Some(0));
}

/// If another process takes the TCP port while a client is served, the server does not end, and gets the port again
/// afterwards.
#[test]
fn a_persistent_server_waits_for_its_port() {
    let _alone = alone();
    for (command, port, client_is_there) in
        [("perf write bw -D 1", 18549, "connected"), ("pingpong -n 30000", 18550, "GID chosen")]
    {
        let mut server = Ferroce::start(None, &format!("{command} -p {port} -P -d udp:{}", address(0)));
        server.ready();
        let first = Ferroce::start(None, &format!("{command} -p {port} -d udp:{} 127.0.0.1", address(1)));
        server.says(client_is_there, || {});
        let stranger = loop {
            // Until the server has released it.
            match TcpListener::bind(("::", port)) {
                Ok(stranger) => break stranger,
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        assert_eq!(first.end().code, Some(0), "{command}");
        server.says("no client can be served until this is resolved", || {});
        drop(stranger);
        server.ready();
        assert_eq!(client(command, port, "127.0.0.1").code, Some(0), "{command}");
        server.ready();
        server.signal(Signal::TERM);
        assert_eq!(server.end().code, Some(0), "{command}");
    }
}

#[test]
fn a_second_client_is_refused_at_once() {
    let _alone = alone();
    let endless = "perf write bw -s 1K -D 600";
    let mut server = Ferroce::start(None, &format!("{endless} -p 18544 -d udp:{}", address(0)));
    server.ready();
    let first = Ferroce::start(None, &format!("{endless} -p 18544 -d udp:{} 127.0.0.1", address(1)));
    server.says("connected", || {});
    let second = format!("{endless} -p 18544 -d udp:{} 127.0.0.1", address(2));
    let second = Ferroce::start(None, &second).end();
    assert_eq!(second.code, Some(1), "{second:#?}");
    assert!(second.stderr.contains("serves another client"), "{second:#?}");
    assert!(second.took < Duration::from_secs(5), "{second:#?}");
    first.interrupt();
    assert_eq!(first.end().code, Some(130));
    assert_eq!(server.end().code, Some(1));
}

#[test]
fn a_signal_while_no_client_is_there_is_the_end_of_a_server() {
    let _alone = alone();
    for (command, port, _) in protocols() {
        for signal in [Signal::INT, Signal::TERM] {
            let mut server = Ferroce::start(None, &format!("{command} -p {port} -d udp:{}", address(0)));
            server.ready();
            server.signal(signal);
            let outcome = server.end();
            assert_eq!(outcome.code, Some(0), "{command}: {outcome:#?}");
            assert!(outcome.stderr.contains("after 0 clients"), "{command}: {outcome:#?}");
        }
    }
}

#[test]
fn a_measurement_that_ends_early_prints_what_it_has_at_both_ends() {
    let _alone = alone();
    for (test, port) in [("write bw -s 4K", 18545), ("send lat", 18546), ("read bw -s 4K --json", 18547)] {
        for interrupt_client in [true, false] {
            let command = format!("perf {test} -p {port} -D 600");
            let mut server = Ferroce::start(None, &format!("{command} -d udp:{}", address(0)));
            server.ready();
            let mut client = Ferroce::start(None, &format!("{command} -d udp:{} 127.0.0.1", address(1)));
            // One line per second.
            client.says(" Gb/s ", || {});
            client.says(" Gb/s ", || {});
            let (interrupted, other) = if interrupt_client { (client, server) } else { (server, client) };
            interrupted.interrupt();
            let ends = [
                (interrupted.end(), 130, "interrupted"),
                (other.end(), 1, "the other end failed: interrupted"),
            ];
            for (end, status, why) in ends {
                assert_eq!(end.code, Some(status), "{command}: {end:#?}");
                assert!(end.stdout.contains(why), "{command}: no '{why}' in {end:#?}");
                if command.contains("--json") {
                    let report: serde_json::Value = serde_json::from_str(&end.stdout).unwrap();
                    assert!(report["results"][0]["messages"].as_u64().unwrap() > 0, "{command}: {end:#?}");
                } else {
                    assert!(end.stdout.contains("messages"), "{command}: {end:#?}");
                }
            }
        }
    }
}

#[test]
fn a_pingpong_that_is_interrupted_prints_what_came() {
    let _alone = alone();
    let command = "pingpong -n 100000000 -p 18548";
    let mut server = Ferroce::start(None, &format!("{command} -d udp:{}", address(0)));
    server.ready();
    let mut client = Ferroce::start(None, &format!("{command} -d udp:{} 127.0.0.1", address(1)));
    client.says(" messages", || {});
    client.interrupt();
    let client = client.end();
    assert_eq!(client.code, Some(130), "{client:#?}");
    assert!(client.stdout.contains(" usec/iter"), "{client:#?}");
}

#[test]
fn a_host_is_found_by_its_name() {
    let _alone = alone();
    let Some(pair) = Namespaces::new(1500) else { return };
    // The resolver uses this file in place of /etc/hosts in a namespace.
    let folder = format!("/etc/netns/{}", pair.b);
    fs::create_dir_all(&folder).unwrap();
    fs::write(format!("{folder}/hosts"), format!("fd99::1 peer.test six.test\n{SERVER} peer.test\n"))
        .unwrap();
    let result = std::panic::catch_unwind(|| {
        for command in ["perf write bw -n 20", "pingpong -n 20", "rping -C 3", "ucmatose -C 3", "udaddy -C 3"]
        {
            let server = Ferroce::server(&pair.a, &format!("{command} -d udp:{SERVER}"));
            let client = Ferroce::start(Some(&pair.b), &format!("{command} -d udp:10.9.0.2 peer.test")).end();
            assert_eq!(client.code, Some(0), "{command}: {client:#?}");
            assert!(client.stderr.contains(&format!("host 'peer.test' is {SERVER}, fd99::1")), "{client:#?}");
            assert_eq!(server.end().code, Some(0), "{command}");
        }
        for (host, words) in [
            ("six.test", &["host 'six.test' is fd99::1", "no address of that IP version, only 10.9.0.2"][..]),
            ("no.such.test", &["host 'no.such.test'", "a name or an IP address"]),
        ] {
            let outcome = Ferroce::start(Some(&pair.b), &format!("rping -d udp:10.9.0.2 {host}")).end();
            assert_eq!(outcome.code, Some(2), "{outcome:#?}");
            words
                .iter()
                .for_each(|word| assert!(outcome.stderr.contains(word), "no '{word}' in {outcome:#?}"));
        }
    });
    fs::remove_dir_all(&folder).unwrap();
    result.unwrap();
}
