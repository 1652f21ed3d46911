//! `ferroce perf` and the exchange of perftest's programs. The programs themselves are in the guest of
//! tests/rxe; here both ends are ours, or the peer is a script that only speaks over TCP, in versions and
//! with faults that the guest's perftest does not have.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod ends;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use ends::{Ferroce, Outcome, alone, refused};
use serde_json::Value;

#[test]
fn every_operation_over_loopback() {
    let _alone = alone();
    for operation in ["write", "read", "send", "atomic"] {
        let report = loopback(&format!("{operation} bw -n 300 -q 2"));
        // Of each queue pair 300, as perftest counts.
        assert_eq!(report["results"][0]["messages"], 600, "{report}");
        let report = loopback(&format!("{operation} lat -n 200"));
        let latency = &report["results"][0]["latency"];
        let at = |name: &str| latency[name].as_f64().unwrap();
        assert!(0.0 < at("min") && at("min") <= at("p50") && at("p50") <= at("p99"), "{report}");
        assert_eq!(report["results"][0]["messages"], 200, "{report}");
    }
}

#[test]
fn all_sizes_follow_one_another() {
    let _alone = alone();
    for test in ["write bw", "send bw", "write lat", "send lat"] {
        let report = loopback(&format!("{test} --all -n 5"));
        let sizes: Vec<_> =
            report["results"].as_array().unwrap().iter().map(|r| r["size"].as_u64().unwrap()).collect();
        assert_eq!(sizes, (1..=23).map(|power| 1 << power).collect::<Vec<u64>>(), "{test}");
    }
}

#[test]
fn counts_are_perftests_where_none_are_given() {
    let _alone = alone();
    for (test, count) in [("write bw", 5000), ("read bw", 1000), ("send lat", 1000)] {
        assert_eq!(loopback(&format!("{test} -s 64"))["results"][0]["messages"], count, "{test}");
    }
    assert!(loopback("read bw -s 64 -D 0.2")["results"][0]["messages"].as_u64().unwrap() > 0);
    assert_eq!(loopback("send bw -s 1000 --bytes 100000 -m 512")["results"][0]["messages"], 100);
}

#[test]
fn passive_servers_follow_every_version() {
    let _alone = alone();
    for version in ["5.5", "5.60", "5.70", "5.99", "6.06", "6.29"] {
        for test in ["write bw", "read bw", "atomic bw", "read lat", "atomic lat"] {
            let (server, mut client) = Client::of(test);
            client.agree(version);
            let first = if test.ends_with("lat") { 2 } else { 1 };
            let again = if version < "5.70" { 0 } else { 1 };
            let answers: Vec<_> = (0..first + again + 1).map(|_| client.swap(DESTINATION)).collect();
            assert!(answers.iter().all(|answer| *answer == answers[0]), "{version}, {test}");
            if test.ends_with("bw") {
                client.swap(DESTINATION);
                for number in [4096, 100, 0, 0, 0] {
                    client.swap(&u64::to_be_bytes(number));
                }
            }
            client.swap(DESTINATION);
            client.stream.write_all(b"done\0").unwrap();
            drop(client);
            let outcome = server.end();
            assert_eq!(outcome.code, Some(0), "{version}, {test}: {outcome:#?}");
            assert!(outcome.stdout.contains("path MTU 1024"), "{outcome:#?}");
        }
    }
}

#[test]
fn what_is_no_perftest_is_named() {
    let _alone = alone();
    for (greeting, named) in [
        (&b"5.33\0\0\0\0\0\0\0\0\0\0\0\0"[..], &["perftest 5.33", "5.50"][..]),
        (b"7.00\0\0\0\0\0\0\0\0\0\0\0\0", &["perftest 7.00", "6.99"]),
        (b"6.06\0\0\0\0\0\0\0\0\0\0\0x", &["6.06\\x00", "version"]),
        (b"6.0.1 (perftest)", &["6.0.1 (perftest)", "version"]),
        (b"GET / HTTP/1.1\r\n", &["GET / HT", "ferroce perf"]),
    ] {
        let (server, mut client) = Client::of("write bw");
        client.stream.write_all(greeting).unwrap();
        fails(server.end(), named);
    }
}

#[test]
fn wrong_words_are_named() {
    let _alone = alone();
    let number = |value: u32| value.to_be_bytes().to_vec();
    for (page, line, mtu, named) in [
        (number(0), number(64), *b"3\0", "page of 0 bytes"),
        (number(1 << 21), number(64), *b"3\0", "page of 2097152 bytes"),
        (number(4096), number(1 << 20), *b"3\0", "cache line of 1048576 bytes"),
        (number(4096), number(64), *b"9\0", "path MTU"),
    ] {
        let (server, mut client) = Client::of("write bw");
        client.swap(&version("6.06"));
        client.swap(&page);
        client.swap(&line);
        // Where that was refused already, nobody may be there any more.
        let _ = client.stream.write_all(&mtu);
        fails(server.end(), &[named]);
    }

    let garbage = [b"x".repeat(58), b":".repeat(50)].concat();
    let short = b"0001:0001:000048:1a2b3c:00000123:0000000000401000:00000000\0".to_vec();
    let long = b"0000:0010:000011:b2f5a0:000004d2:00007f6b3c0d1000:00007f6b3c0d2000:00:".to_vec();
    for (message, named) in [(garbage, "LID:"), (short, "-x INDEX"), (long, "--data_validation")] {
        let (server, mut client) = Client::of("write bw");
        client.agree("6.06");
        client.stream.write_all(&message).unwrap();
        fails(server.end(), &[named]);
    }

    let (server, mut client) = Client::of("write bw");
    client.agree("6.06");
    client.stream.write_all(&DESTINATION[..77]).unwrap();
    drop(client);
    fails(server.end(), &["in the middle of a word, after 77 bytes"]);

    // A client with two queue pairs.
    let (server, mut client) = Client::of("write bw");
    client.agree("6.06");
    client.swap(DESTINATION);
    let mut second = *DESTINATION;
    second[15] = b'7';
    client.stream.write_all(&second).unwrap();
    fails(server.end(), &["queue pair 0", "-q 1"]);

    let (server, mut client) = Client::of("write bw");
    client.agree("6.06");
    (0..3).for_each(|_| drop(client.swap(DESTINATION)));
    drop(client);
    fails(server.end(), &["control connection is closed", "-s, -n, -q"]);

    // More than anybody says unasked.
    let (server, mut client) = Client::of("write bw");
    client.agree("6.06");
    (0..3).for_each(|_| drop(client.swap(DESTINATION)));
    let _ = client.stream.write_all(&[b'0'; 5000]);
    fails(server.end(), &["unasked"]);
}

#[test]
fn what_perftest_can_not_do_is_refused() {
    let _alone = alone();
    refused(&[
        ("perf write bw -d loopback --perftest --check", &["--perftest", "--check"]),
        ("perf write bw -d loopback --perftest --selective-repeat", &["--perftest", "--selective-repeat"]),
        ("perf send bw -d loopback --perftest -D 1", &["-D", "-n"]),
        ("perf write lat -d loopback --perftest -D 1", &["-D", "-n"]),
        ("perf write lat -d loopback --perftest -n 1", &["-n 1", "2"]),
        ("perf write bw -d udp:127.0.0.1 --perftest", &["--perftest", "HOST"]),
    ]);
    for option in ["--check", "--selective-repeat"] {
        let (server, mut client) = Client::of(&format!("write bw {option}"));
        client.stream.write_all(&version("6.06")).unwrap();
        let outcome = server.end();
        assert_eq!(outcome.code, Some(2), "{outcome:#?}");
        assert!(outcome.stderr.contains(option) && outcome.stderr.contains("perftest"), "{outcome:#?}");
    }
}

/// A script in place of a client of perftest's.
struct Client {
    stream: TcpStream,
}

/// Its queue pair.
const DESTINATION: &[u8; 108] = b"0000:0001:000011:b2f5a0:000004d2:00007f6b3c0d1000:\
    00:00:00:00:00:00:00:00:00:00:ff:ff:7f:00:00:01:00000000:\0";

impl Client {
    /// Of a server of `test` that waits for it.
    fn of(test: &str) -> (Ferroce, Client) {
        // Nobody else's address.
        let [.., a, b] = std::process::id().to_be_bytes();
        let arguments = format!("perf {test} -n 10 -d udp:127.78.{a}.{b} -p 0");
        let mut server = Ferroce::spawn(Command::new(env!("CARGO_BIN_EXE_ferroce")), &arguments);
        let ready = server.ready();
        let port: u16 = ready.rsplit(' ').next().unwrap().parse().unwrap();
        let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        (server, Client { stream })
    }

    /// Says `bytes`, and hears as many.
    fn swap(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.stream.write_all(bytes).unwrap();
        let mut answer = vec![0; bytes.len()];
        self.stream.read_exact(&mut answer).unwrap();
        answer
    }

    /// All that comes before the queue pairs.
    fn agree(&mut self, own: &str) {
        // Before 6.28, so that the other end leaves out what that brought.
        assert_eq!(self.swap(&version(own)), version("6.27"));
        assert_eq!(self.swap(&65536u32.to_be_bytes()), 4096u32.to_be_bytes());
        assert_eq!(self.swap(&64u32.to_be_bytes()), 64u32.to_be_bytes());
        // The interface is larger, and the smaller one counts.
        assert_eq!(self.swap(b"3\0"), b"5\0");
    }
}

fn version(text: &str) -> [u8; 16] {
    let mut message = [0; 16];
    message[..text.len()].copy_from_slice(text.as_bytes());
    message
}

fn fails(outcome: Outcome, named: &[&str]) {
    assert_eq!(outcome.code, Some(1), "{outcome:#?}");
    for word in named {
        assert!(outcome.stderr.contains(word), "no '{word}' in {}", outcome.stderr);
    }
}

fn loopback(arguments: &str) -> Value {
    Ferroce::start(None, &format!("perf {arguments} -d loopback --perftest -u 17 --json")).end().json()
}
