//! `ferroce pingpong`, as a user runs it.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod ends;

use std::io::Write;
use std::net::TcpStream;

use ends::{Ferroce, Namespaces, SERVER, VETH, alone, both, refused};

const LINES: [&str; 4] = [
    "  local address:  LID 0x0000, QPN 0x",
    "  remote address: LID 0x0000, QPN 0x",
    " bytes in ",
    " iters in ",
];

#[test]
fn over_loopback() {
    let _alone = alone();
    for arguments in ["-c -n 500", "-e -c -m 4096 -s 100000 -n 50", "-s 0 -r 1 -n 20"] {
        let outcome = Ferroce::start(None, &format!("pingpong -d loopback {arguments}")).end();
        assert_eq!(outcome.code, Some(0), "{outcome:#?}");
        for line in LINES {
            assert!(outcome.stdout.contains(line), "no '{line}' in {}", outcome.stdout);
        }
    }
}

#[test]
fn over_af_xdp_at_all_sizes() {
    let _alone = alone();
    let Some(pair) = ends::pair(4200) else { return };
    for (mtu, size, gid) in
        [(1024, 1, 1), (1024, 4096, 2), (4096, 65537, 0), (256, 3000, 1), (4096, 1 << 20, 1)]
    {
        let command = format!("pingpong -c -n 100 -m {mtu} -s {size} -g {gid}");
        for end in both(&pair, &command) {
            assert_eq!(end.code, Some(0), "{command}: {end:#?}");
            assert!(end.stdout.contains(&format!("{} bytes in ", 200 * size)), "{}", end.stdout);
            assert!(end.stderr.contains("af_xdp"), "{}", end.stderr);
        }
    }
}

#[test]
fn whoever_just_knocks_ends_no_server() {
    let _alone = alone();
    let mut server = Ferroce::start(None, "pingpong -d udp:127.0.0.1 -p 18533 -n 20");
    server.ready();
    drop(TcpStream::connect("127.0.0.1:18533").unwrap());
    TcpStream::connect("127.0.0.1:18533").unwrap().write_all(&[b'\x1b'; 100]).unwrap();
    let client = Ferroce::start(None, "pingpong -d udp:127.0.0.2 -p 18533 -n 20 127.0.0.1").end();
    assert_eq!(client.code, Some(0), "{client:#?}");
    let server = server.end();
    assert_eq!(server.code, Some(0), "{server:#?}");
    assert!(
        server.stderr.contains("closed the connection") && !server.stderr.contains('\x1b'),
        "{server:#?}"
    );
}

#[test]
fn wrong_data_is_found() {
    let _alone = alone();
    let Some(pair) = Namespaces::new(1500) else { return };
    // Without -c, the client sends another pattern than the server expects.
    let server = Ferroce::server(&pair.a, &format!("pingpong -c -d {VETH}"));
    let client = Ferroce::start(Some(&pair.b), &format!("pingpong -d {VETH} {SERVER}"));
    let server = server.end();
    assert_eq!(server.code, Some(1), "{server:#?}");
    assert!(
        server.stderr.contains("invalid data: byte 0 of message 0 is 0x7b instead of 0x00"),
        "{}",
        server.stderr
    );
    drop(client);
}

#[test]
fn a_peer_that_is_killed_is_noticed() {
    let _alone = alone();
    let Some(pair) = Namespaces::new(1500) else { return };
    let command = format!("pingpong -n 100000000 -d {VETH}");
    for server_dies in [true, false] {
        let mut server = Ferroce::server(&pair.a, &command);
        let mut client = Ferroce::start(Some(&pair.b), &format!("{command} {SERVER}"));
        std::thread::sleep(std::time::Duration::from_millis(700));
        let survivor = if server_dies {
            server.kill();
            client.end()
        } else {
            client.kill();
            server.end()
        };
        assert_eq!(survivor.code, Some(1), "{survivor:#?}");
        let noticed = survivor.stderr.contains("RetryExcErr") || survivor.stderr.contains("has sent nothing");
        assert!(noticed && survivor.took.as_secs() < 15, "{survivor:#?}");
    }
    // Both ends can start again at once.
    for end in both(&pair, "pingpong -c") {
        assert_eq!(end.code, Some(0), "{end:#?}");
    }
}

#[test]
fn services_that_differ_are_named() {
    let _alone = alone();
    let mut server = Ferroce::start(None, "pingpong -d udp:127.0.0.1 -p 18534 -t rc");
    server.ready();
    let client = Ferroce::start(None, "pingpong -d udp:127.0.0.2 -p 18534 -t uc 127.0.0.1").end();
    let server = server.end();
    for end in [client, server] {
        assert_eq!(end.code, Some(1), "{end:#?}");
        assert!(end.stderr.contains("-t"), "{end:#?}");
    }
}

/// Rejected without a packet, and without the other end.
#[test]
fn a_path_mtu_that_the_interface_has_no_room_for_is_refused() {
    let _alone = alone();
    let Some(pair) = Namespaces::new(1500) else { return };
    for host in ["", SERVER] {
        let end = Ferroce::start(Some(&pair.b), &format!("pingpong -d {VETH} -m 4096 {host}")).end();
        assert_eq!(end.code, Some(2), "{end:#?}");
        for word in ["path MTU 4096 needs", "4160", VETH, "1500"] {
            assert!(end.stderr.contains(word), "no '{word}' in {end:#?}");
        }
    }
}

#[test]
fn bad_input_is_named() {
    refused(&[
        ("pingpong -d loopback -n 0", &["--iters", "0"]),
        ("pingpong", &["--device"]),
        ("pingpong -d ibverbs:mlx5_0:0", &["'ibverbs:mlx5_0:0'", "a port from 1 to 255"]),
        ("pingpong -d loopback -m 1000", &["1000", "1024"]),
        ("pingpong -d loopback -r 0", &["0", "65536"]),
        ("pingpong -d loopback -g 7", &["GID index 7", "::ffff:127.0.0."]),
        ("pingpong -d loopback somehost", &["somehost", "loopback"]),
        ("pingpong -d no-such-if0", &["'no-such-if0'", "lo"]),
    ]);
}
