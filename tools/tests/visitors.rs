//! Connections to the TCP port of a server from others than the expected client, and a client of `ferroce perf` with
//! impossible counts.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod ends;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::thread;
use std::time::Duration;

use ends::{Ferroce, Outcome, alone};
use ferroce_driver_test_support::signal::Signal;
use serde_json::{Value, json};

/// An address of the loopback interface that no other process uses.
fn address(last: u8) -> String {
    let [.., a, b] = std::process::id().to_be_bytes();
    format!("127.{}.{a}.{b}", 80 + last)
}

/// A server of `command`, and its port.
fn server(command: &str) -> (Ferroce, u16) {
    let arguments = format!("{command} -d udp:{} -p 0", address(0));
    let mut server = Ferroce::spawn(Command::new(env!("CARGO_BIN_EXE_ferroce")), &arguments);
    let port = server.ready().rsplit(' ').next().unwrap().parse().unwrap();
    (server, port)
}

fn visit(port: u16) -> TcpStream {
    TcpStream::connect(("127.0.0.1", port)).unwrap()
}

#[test]
fn visitors_neither_end_a_server_nor_hold_it_up() {
    let _alone = alone();
    for command in ["perf write bw -n 20", "pingpong -n 20"] {
        let (server, port) = server(command);
        drop(visit(port));
        for junk in [
            &b"GET / HTTP/1.1\r\n\r\n"[..],
            b"frcperf\x01",
            b"frcperf\x03\xff\xff\xff\xff",
            b"frcperf\x03\0\0\0\x07\"Alive\"",
            b"6.0.1 (perftest)",
            b"4.33\0\0\0\0\0\0\0\0\0\0\0\0",
        ] {
            let mut visitor = visit(port);
            visitor.write_all(&junk.repeat(if command.starts_with("perf") { 1 } else { 8 })).unwrap();
        }
        // These send nothing more, for longer than the test takes.
        let mut silent: Vec<TcpStream> = (0..40).map(|_| visit(port)).collect();
        silent[5].write_all(b"frcperf\x03").unwrap();
        silent[6].write_all(b"6.06\0").unwrap();

        let client =
            Ferroce::start(None, &format!("{command} -d udp:{} -p {port} 127.0.0.1", address(1))).end();
        let server = server.end();
        assert_eq!((client.code, server.code), (Some(0), Some(0)), "{command}: {client:#?} {server:#?}");
        assert!(client.took < Duration::from_secs(5), "{command}: {client:#?}");
        let lines = server.stderr.lines().filter(|line| line.contains("is not a client")).count();
        // A line for each that has closed or sent something else, and for those beyond the limit.
        assert!((6..=24).contains(&lines), "{command}: {lines} lines in {}", server.stderr);
    }
}

#[test]
fn a_server_that_waits_among_visitors_is_interrupted() {
    let _alone = alone();
    let (server, port) = server("perf write bw");
    let _silent: Vec<TcpStream> = (0..4).map(|_| visit(port)).collect();
    thread::sleep(Duration::from_millis(100));
    server.signal(Signal::TERM);
    let outcome = server.end();
    assert_eq!(outcome.code, Some(0), "{outcome:#?}");
    assert!(outcome.took < Duration::from_secs(2), "{outcome:#?}");
}

#[test]
fn impossible_counts_are_refused() {
    let _alone = alone();
    for (test, check, count, named) in [
        // With one byte nothing is left to compare, so no comparison ends it.
        ("write lat", true, u64::MAX, &["18446744073709551615", "at most 8388608", "--check"][..]),
        ("write bw", false, u64::MAX, &["18446744073709551615", "at most 281474976710656"]),
    ] {
        let (server, port) = server(&format!("perf {test}"));
        let mut client = Client::of(port, test, check);
        client.say(&json!({"Lap": {"number": 0, "messages": [count]}}));
        client.say(&json!({"LapDone": {"messages": [count]}}));
        thread::sleep(Duration::from_millis(300));
        drop(client);
        let outcome = ends_by_itself(server);
        assert_eq!(outcome.code, Some(1), "{test}: {outcome:#?}");
        named.iter().for_each(|word| assert!(outcome.stderr.contains(word), "{test}: {outcome:#?}"));
    }
}

#[test]
fn a_client_that_goes_with_words_unread_is_noticed() {
    let _alone = alone();
    // With an ACK timeout of 31 the outstanding work would take days.
    for (service, bidirectional, timeout, count) in
        [("rc", false, 14, 5_u64), ("uc", true, 31, 1 << 40), ("rc", true, 31, 100)]
    {
        let (server, port) = server("perf send bw");
        let changes = json!({"service": service, "bidirectional": bidirectional, "timeout": timeout});
        let mut client = Client::with(port, "send bw", &changes);
        client.say(&json!({"Lap": {"number": 0, "messages": [count]}}));
        // It has sent nothing, so the server does not reach the final message.
        client.say(&json!({"LapDone": {"messages": [count]}}));
        client.say(&json!("Finish"));
        thread::sleep(Duration::from_millis(300));
        drop(client);
        let outcome = server.end();
        assert!(outcome.took < Duration::from_secs(20), "{service}: {outcome:#?}");
        assert_eq!(outcome.code, Some(1), "{service}: {outcome:#?}");
        assert!(outcome.stderr.contains("control connection is closed"), "{service}: {outcome:#?}");
    }
}

#[test]
fn a_server_whose_client_never_stops_talking_is_interrupted() {
    let _alone = alone();
    let (server, port) = server("perf write bw");
    let mut client = Client::of(port, "write bw", false);
    let alive = b"\0\0\0\x07\"Alive\"".repeat(10_000);
    let flood = thread::spawn(move || while client.0.write_all(&alive).is_ok() {});
    thread::sleep(Duration::from_millis(500));
    server.signal(Signal::TERM);
    let outcome = server.end();
    flood.join().unwrap();
    assert_eq!(outcome.code, Some(130), "{outcome:#?}");
    assert!(outcome.took < Duration::from_secs(5), "{outcome:#?}");
}

#[test]
fn numbers_of_a_server_that_can_not_be_are_refused() {
    let _alone = alone();
    for (verified, lost, sent, named) in [
        (0, u64::MAX, 0, "reports 18446744073709551615 lost"),
        (u64::MAX, 0, 0, "compared 18446744073709551615 bytes of 0"),
        (0, 0, 11, "reports [11]"),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let command = format!("perf write bw -c UC -n 10 -s 64 -d udp:{} -p {port} 127.0.0.1", address(1));
        let client = Ferroce::start(None, &command);
        let mut server = Client(listener.accept().unwrap().0);
        server.greet();
        assert!(server.hear().get("Plan").is_some());
        server.say(&json!("Ready"));
        assert!(server.hear().get("Connect").is_some());
        server.say(&offer(64, address(0), Some(1024)));
        assert!(server.hear().get("Lap").is_some());
        server.say(&json!("Ready"));
        assert!(server.hear().get("LapDone").is_some());
        let tally = json!({"verified": verified, "lost": lost, "sent": [sent], "nanoseconds": 1});
        server.say(&json!({ "Verified": tally }));
        // Only reached if the tally is accepted.
        server.say(&json!("Closed"));
        drop(server);
        let outcome = ends_by_itself(client);
        assert_eq!(outcome.code, Some(1), "{named}: {outcome:#?}");
        assert!(outcome.stderr.contains(named), "{named}: {outcome:#?}");
    }
}

#[test]
fn what_a_peer_says_is_cut_where_it_is_long() {
    let _alone = alone();
    let long = "A".repeat(60_000);
    for message in [json!({ long.clone(): 1 }), json!({"Failed": {"reason": format!("\u{1b}[2J{long}")}})] {
        let (server, port) = server("perf write bw");
        let mut client = Client::of(port, "write bw", false);
        client.say(&message);
        let outcome = ends_by_itself(server);
        assert_eq!(outcome.code, Some(1), "{outcome:#?}");
        assert!(outcome.stderr.len() < 6000, "{} bytes", outcome.stderr.len());
        assert!(outcome.stderr.contains("AAAA") && !outcome.stderr.contains('\u{1b}'), "{outcome:#?}");
    }
}

#[test]
fn ibv_srq_pingpong_is_named() {
    let _alone = alone();
    let (server, port) = server("pingpong");
    let mut client = visit(port);
    for qpn in 0..16 {
        let own = format!("0000:0001{qpn:02x}:abcdef:00000000000000000000ffff7f000001\0");
        // It may be gone already.
        let _ = client.write_all(own.as_bytes());
    }
    let outcome = server.end();
    assert_eq!(outcome.code, Some(1), "{outcome:#?}");
    assert!(outcome.stderr.contains("ibv_srq_pingpong"), "{outcome:#?}");
}

/// It must end by itself, since it ignored signals in a loop.
fn ends_by_itself(server: Ferroce) -> Outcome {
    let outcome = server.end();
    assert!(outcome.took < Duration::from_secs(10), "{outcome:#?}");
    outcome
}

/// A script in place of an end of `ferroce perf`.
struct Client(TcpStream);

impl Client {
    /// Agrees on a plan and connects a queue pair.
    fn of(port: u16, test: &str, check: bool) -> Client {
        Client::with(port, test, &json!({ "check": check }))
    }

    /// The same, with a plan that differs in some respects.
    fn with(port: u16, test: &str, changes: &Value) -> Client {
        let (operation, mode) = test.split_once(' ').unwrap();
        let mut plan = json!({
            "operation": operation, "mode": mode, "atomic": "FetchAndAdd", "service": "rc", "bidirectional": false,
            "qps": 1, "tx_depth": 128, "rx_depth": 512, "outstanding": 16, "timeout": 14,
            "selective_repeat": false, "check": false,
        });
        for (name, value) in changes.as_object().unwrap() {
            plan[name] = value.clone();
        }
        let mut client = Client(visit(port));
        client.0.write_all(GREETING).unwrap();
        client.say(&json!({ "Plan": plan }));
        client.0.read_exact(&mut [0; 8]).unwrap();
        assert_eq!(client.hear(), json!("Ready"));
        client.say(&offer(if test.ends_with("lat") { 1 } else { 65536 }, address(1), None));
        assert!(client.hear().get("Connect").is_some());
        client
    }

    /// As a server.
    fn greet(&mut self) {
        self.0.read_exact(&mut [0; 8]).unwrap();
        self.0.write_all(GREETING).unwrap();
    }

    fn say(&mut self, message: &Value) {
        let body = message.to_string();
        // The other end may be gone.
        let _ = self.0.write_all(&(body.len() as u32).to_be_bytes());
        let _ = self.0.write_all(body.as_bytes());
    }

    /// The next message that is not a heartbeat.
    fn hear(&mut self) -> Value {
        loop {
            let mut length = [0; 4];
            self.0.read_exact(&mut length).unwrap();
            let mut body = vec![0; u32::from_be_bytes(length) as usize];
            self.0.read_exact(&mut body).unwrap();
            let message = serde_json::from_slice(&body).unwrap();
            if message != json!("Alive") {
                return message;
            }
        }
    }
}

const GREETING: &[u8; 8] = b"frcperf\x03";

/// A queue pair at an address.
fn offer(size: u32, address: String, path_mtu: Option<u32>) -> Value {
    json!({"Connect": {
        "size": size, "gid": format!("::ffff:{address}"), "qps": [[17, 0]], "memory": [0, 1, 65536],
        "path_mtu": path_mtu, "largest_path_mtu": 1024, "selective_repeat": false,
    }})
}
