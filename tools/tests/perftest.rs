//! `ferroce perf` with the protocol of perftest's programs. The programs themselves run in the guest of tests/rxe; here
//! both ends are ferroce, or the peer is a script that only uses TCP, with versions and faults that the guest's
//! perftest does not have.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod ends;

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use ends::{Ferroce, Outcome, alone, refused};
use ferroce::{
    Access, AddressVector, CmEvent, Config, ConnectionParameters, Context, Cq, Data, Destination, DeviceSpec,
    Gid, ListenConfig, Memory, Mr, PathMtu, Pd, Poller, PortSpace, Psn, Qp, QpConfig, QpType, Qpn, RKey,
    ReadyToReceive, ReadyToSend, RemoteAddress, SendFlags, SendOp, SendWorkRequest, Sge, Transition,
    UnreliablePath, WcStatus,
};
use serde_json::Value;

#[test]
fn every_operation_over_loopback() {
    let _alone = alone();
    for operation in ["write", "read", "send", "atomic"] {
        let report = loopback(&format!("{operation} bw -n 300 -q 2"));
        // 300 on each queue pair, as perftest counts.
        assert_eq!(report["results"][0]["messages"], 600, "{report}");
        let report = loopback(&format!("{operation} lat -n 200"));
        let latency = &report["results"][0]["latency"];
        let at = |name: &str| latency[name].as_f64().unwrap();
        assert!(0.0 < at("min") && at("min") <= at("p50") && at("p50") <= at("p99"), "{report}");
        assert_eq!(report["results"][0]["messages"], 200, "{report}");
    }
}

#[test]
fn both_ways_and_over_each_service() {
    let _alone = alone();
    for (test, messages) in [
        ("write bw -b -n 300 -q 2", 1200),
        ("read bw -b -n 300", 600),
        ("send bw -b -n 300", 600),
        ("write bw -c UC -n 300", 300),
        ("send bw -c UC -n 300 -s 3000", 300),
        ("send bw -c UD -n 300", 300),
        ("write bw -c UC -b -n 300", 600),
        ("send bw -c UD -b -n 300 -q 2", 1200),
        ("send lat -c UD -n 100", 100),
        ("send lat -c UC -n 100 -s 5000", 100),
        ("write lat -c UC -n 100", 100),
    ] {
        let report = loopback(test);
        assert_eq!(report["results"][0]["messages"], messages, "{test}: {report}");
    }
}

#[test]
fn all_sizes_follow_one_another() {
    let _alone = alone();
    for test in ["write bw", "send bw", "write lat", "send lat", "write bw -b", "read bw -b", "send bw -b"] {
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
            let mut requester = Requester::new(QpType::Rc);
            client.agree(version);
            requester.connect(client.tell(test, version, &requester.destination()));
            requester.request(test, 10);
            client.part(test, &requester.destination(), 10);
            let outcome = server.end();
            assert_eq!(outcome.code, Some(0), "{version}, {test}: {outcome:#?}");
            assert!(outcome.stdout.contains("path MTU 1024"), "{outcome:#?}");
        }
    }
}

#[test]
fn a_client_that_sends_otherwise_than_it_says_is_named() {
    let _alone = alone();
    for (test, qp_type, sends, named) in [
        // The client completes its WRITEs itself, and reports all of them.
        ("write bw", QpType::Uc, "write", &["the peer sends UC packets", "service", "-c"][..]),
        ("send bw", QpType::Uc, "send", &["the peer sends UC packets", "-c"]),
        ("send bw", QpType::Ud, "send", &["the peer sends UD packets", "-c"]),
        ("send bw -c UD", QpType::Rc, "send", &["the peer sends RC packets", "UD", "-c"]),
        ("read bw", QpType::Rc, "write", &["refused here", "RDMA_WRITE_ONLY", "same operation"]),
        ("write bw", QpType::Rc, "send", &["sent a SEND", "perf write bw"]),
        ("send bw", QpType::Rc, "long send", &["a message of 77 bytes", "65536", "-s"]),
        // Some arrive, but fewer than it reports.
        ("write bw", QpType::Rc, "write", &["of 100 requests", "10 have arrived", "-b"]),
        ("atomic bw", QpType::Rc, "nothing", &["has not sent a packet", "-b was given at one end"]),
    ] {
        let (server, mut client) = Client::of(test);
        let mut requester = Requester::new(qp_type);
        client.agree("6.06");
        requester.connect(client.tell(test, "6.06", &requester.destination()));
        if test.starts_with("send") {
            client.swap(&requester.destination());
        }
        requester.request(sends, 10);
        client.leave(test, &requester.destination(), 100);
        let outcome = server.end();
        assert_eq!(outcome.code, Some(1), "{test}, {qp_type:?} {sends}: {outcome:#?}");
        for word in named {
            assert!(
                outcome.stderr.contains(word),
                "{test}, {qp_type:?} {sends}: no '{word}' in {outcome:#?}"
            );
        }
        assert!(outcome.took < Duration::from_secs(15), "{outcome:#?}");
    }
}

#[test]
fn clients_and_servers_of_the_connection_manager_are_named() {
    let _alone = alone();
    let (server, client) = Client::of("write bw");
    let port = client.stream.peer_addr().unwrap().port();
    let mut requester = Requester::new(QpType::Rc);
    let to = SocketAddr::new(server_address().parse().unwrap(), port);
    (0..5).for_each(|_| requester.call(to));
    drop(requester);
    // Anyone can send such requests; the server still waits for another client.
    server.interrupt();
    let outcome = server.end();
    assert_eq!(outcome.code, Some(0), "{outcome:#?}");
    let naming = |line: &&str| line.contains("-R") && line.contains(&requester_address());
    assert_eq!(outcome.stderr.lines().filter(naming).count(), 1, "{outcome:#?}");

    let mut listener = Requester::new(QpType::Rc);
    let any = SocketAddr::from(([0, 0, 0, 0], 18539));
    listener.context.listen(PortSpace::Tcp, any, &ListenConfig::default()).unwrap();
    let arguments =
        format!("perf write bw -d udp:{} -p 18539 --perftest {}", server_address(), requester_address());
    let client = Ferroce::start(None, &arguments);
    listener.answer();
    fails(client.end(), &["-R", "18539"]);
    // There is no server.
    let arguments = arguments.replace("18539", "18540");
    fails(Ferroce::start(None, &arguments).end(), &["Connection refused", "is the server running?"]);
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
        // It waits for another client.
        std::thread::sleep(Duration::from_millis(300));
        server.interrupt();
        let outcome = server.end();
        assert_eq!(outcome.code, Some(0), "{outcome:#?}");
        named.iter().for_each(|word| assert!(outcome.stderr.contains(word), "no '{word}' in {outcome:#?}"));
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
        // If the version was rejected, the server may be gone.
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
    fails(server.end(), &["in the middle of a message, after 77 bytes"]);

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

    // More than any client sends without an answer.
    let (server, mut client) = Client::of("write bw");
    client.agree("6.06");
    (0..3).for_each(|_| drop(client.swap(DESTINATION)));
    let _ = client.stream.write_all(&[b'0'; 5000]);
    fails(server.end(), &["not expected"]);
}

#[test]
fn a_word_that_is_begun_must_end() {
    let _alone = alone();
    let (server, mut client) = Client::of("write bw");
    client.agree("6.06");
    (0..3).for_each(|_| drop(client.swap(DESTINATION)));
    client.stream.write_all(&DESTINATION[..1]).unwrap();
    let outcome = server.end();
    drop(client);
    assert!(outcome.took < Duration::from_secs(20), "{outcome:#?}");
    fails(outcome, &["1 bytes of its next message within 10 s"]);
}

#[test]
fn a_client_with_a_smaller_count_is_named() {
    let _alone = alone();
    for service in ["UD", "UC"] {
        let command = format!("perf send lat -c {service} -p 18541");
        let mut server = Ferroce::start(None, &format!("{command} -n 100 -d udp:{}", server_address()));
        server.ready();
        let arguments = format!("{command} -n 50 -d udp:{} --perftest 127.0.0.1", requester_address());
        let client = Ferroce::start(None, &arguments);
        let outcome = server.end();
        assert!(outcome.took < Duration::from_secs(10), "{service}: {outcome:#?}");
        fails(outcome, &["perftest has ended", "-n"]);
        fails(client.end(), &["-n"]);
    }
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

/// A script in place of a perftest client.
struct Client {
    stream: TcpStream,
}

/// Its queue pair.
const DESTINATION: &[u8; 108] = b"0000:0001:000011:b2f5a0:000004d2:00007f6b3c0d1000:\
    00:00:00:00:00:00:00:00:00:00:ff:ff:7f:00:00:01:00000000:\0";

impl Client {
    /// A client of a server of `test`, which waits for it.
    fn of(test: &str) -> (Ferroce, Client) {
        let arguments = format!("perf {test} -n 10 -d udp:{} -p 0", server_address());
        let mut server = Ferroce::spawn(Command::new(env!("CARGO_BIN_EXE_ferroce")), &arguments);
        let ready = server.ready();
        let port: u16 = ready.rsplit(' ').next().unwrap().parse().unwrap();
        let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        (server, Client { stream })
    }

    /// Sends `bytes`, and receives as many.
    fn swap(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.stream.write_all(bytes).unwrap();
        let mut answer = vec![0; bytes.len()];
        self.stream.read_exact(&mut answer).unwrap();
        answer
    }

    /// Sends a queue pair until both are connected, and returns the server's.
    fn tell(&mut self, test: &str, own: &str, destination: &[u8]) -> Vec<u8> {
        let first = if test.contains("lat") && !test.starts_with("send") { 2 } else { 1 };
        let again = if own < "5.70" { 0 } else { 1 };
        let answers: Vec<_> = (0..first + again + 1).map(|_| self.swap(destination)).collect();
        assert!(answers.iter().all(|answer| *answer == answers[0]), "{own}, {test}");
        answers.into_iter().next().unwrap()
    }

    /// The exchange after the requests; `messages` is this client's count.
    fn part(mut self, test: &str, destination: &[u8], messages: u64) {
        if test.ends_with("bw") {
            self.swap(destination);
            for number in [4096, messages, 0, 0, 0] {
                self.swap(&u64::to_be_bytes(number));
            }
        }
        self.swap(destination);
        self.stream.write_all(b"done\0").unwrap();
    }

    /// The same, but the server may close before its end.
    fn leave(mut self, test: &str, destination: &[u8], messages: u64) {
        let mut words = vec![destination.to_vec()];
        if test.ends_with("bw") && !test.starts_with("send") {
            words.extend([4096, messages, 0, 0, 0].map(|number| u64::to_be_bytes(number).to_vec()));
            words.push(destination.to_vec());
        }
        for word in words {
            let mut answer = vec![0; word.len()];
            let gone = self.stream.write_all(&word).is_err() || self.stream.read_exact(&mut answer).is_err();
            if gone {
                return;
            }
        }
    }

    /// The exchange before the queue pairs.
    fn agree(&mut self, own: &str) {
        // Before 6.28, so that the other end omits the messages that 6.28 introduced.
        assert_eq!(self.swap(&version(own)), version("6.27"));
        assert_eq!(self.swap(&65536u32.to_be_bytes()), 4096u32.to_be_bytes());
        assert_eq!(self.swap(&64u32.to_be_bytes()), 64u32.to_be_bytes());
        // The interface allows more, and the smaller one is used.
        assert_eq!(self.swap(b"3\0"), b"5\0");
    }
}

/// An address that no other process uses.
fn server_address() -> String {
    let [.., a, b] = std::process::id().to_be_bytes();
    format!("127.78.{a}.{b}")
}

fn requester_address() -> String {
    server_address().replace("127.78", "127.79")
}

/// The queue pair of a script.
struct Requester {
    context: Context,
    poller: Poller,
    pd: Pd,
    cq: Cq,
    qp: Qp,
    mr: Mr,
    remote: RemoteAddress,
    to: Option<Destination>,
}

impl Requester {
    fn new(qp_type: QpType) -> Requester {
        let device: DeviceSpec = format!("udp:{}", requester_address()).parse().unwrap();
        let mut context = Context::open(device.open().unwrap(), &Config::default()).unwrap();
        let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(64).unwrap());
        let mr = context.register(pd, Memory::zeroed(4096).unwrap(), Access::LOCAL_WRITE).unwrap();
        let qp = context.create_qp(&QpConfig::new(qp_type, pd, cq)).unwrap();
        let init = match qp_type {
            QpType::Ud => Transition::InitDatagram { qkey: 0x1111_1111 },
            _ => Transition::Init { access: Access::NONE },
        };
        context.modify_qp(qp, init).unwrap();
        let remote = RemoteAddress { addr: 0, rkey: RKey::new(0) };
        Requester { context, poller: Poller::new(), pd, cq, qp, mr, remote, to: None }
    }

    fn destination(&self) -> Vec<u8> {
        let (qpn, gid) = (self.context.query_qp(self.qp).unwrap().qpn, self.context.port().gids[0].gid);
        let gid: String = gid.0.iter().map(|byte| format!("{byte:02x}:")).collect();
        let text = format!("0000:0010:{:06x}:000000:00000000:0000000000000000:{gid}00000000:\0", qpn.value());
        text.into_bytes()
    }

    /// Connects to the server's queue pair.
    fn connect(&mut self, told: Vec<u8>) {
        let text = String::from_utf8(told).unwrap();
        let field = |at: usize| u64::from_str_radix(text.split(':').nth(at).unwrap(), 16).unwrap();
        self.remote = RemoteAddress { addr: field(5), rkey: RKey::new(field(4) as u32) };
        let (dest_qpn, rq_psn) = (Qpn::new(field(2) as u32), Psn::new(field(3) as u32));
        let gid = Gid::from(server_address().parse::<IpAddr>().unwrap());
        let (address, psn) = (AddressVector::new(gid, 0), Psn::new(0));
        let (context, path_mtu) = (&mut self.context, PathMtu::Mtu1024);
        match context.query_qp(self.qp).unwrap().qp_type {
            QpType::Rc => {
                let peer = ReadyToReceive::new(address, dest_qpn, rq_psn).path_mtu(path_mtu);
                context.modify_qp(self.qp, Transition::ReadyToReceive(peer)).unwrap();
                return context.modify_qp(self.qp, Transition::ReadyToSend(ReadyToSend::new(psn))).unwrap();
            }
            QpType::Uc => {
                let path = UnreliablePath::new(address, dest_qpn, rq_psn).path_mtu(path_mtu);
                context.modify_qp(self.qp, Transition::ReadyToReceiveUnreliable(path)).unwrap();
            }
            QpType::Ud => {
                context.modify_qp(self.qp, Transition::ReadyToReceiveDatagrams).unwrap();
                let ah = context.create_ah(self.pd, &address).unwrap();
                self.to = Some(Destination { ah, qpn: dest_qpn, qkey: 0x1111_1111 });
            }
        }
        context.modify_qp(self.qp, Transition::ReadyToSendUnreliable { sq_psn: psn }).unwrap();
    }

    /// Makes `count` requests of a kind, each of which may fail.
    fn request(&mut self, kind: &str, count: u64) {
        let (remote, mr) = (self.remote, self.mr);
        let kind = kind.trim_end_matches(" bw").trim_end_matches(" lat");
        let (op, length) = match kind {
            "write" => (SendOp::Write(remote), 8),
            "read" => (SendOp::Read(remote), 8),
            "atomic" => (SendOp::FetchAdd { remote, add: 1 }, 8),
            "send" | "long send" => (self.to.map_or(SendOp::Send, SendOp::SendTo), 77),
            _ => return,
        };
        for _ in 0..count {
            let data = Data::Sges(&[Sge { mr, offset: 0, length }]);
            let wr = SendWorkRequest { wr_id: 0, op, data, flags: SendFlags::SIGNALED };
            if self.context.post_send(self.qp, &wr).is_err() || !self.complete() {
                return;
            }
        }
    }

    fn complete(&mut self) -> bool {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            self.poller.poll(&mut self.context).unwrap();
            if let Some(wc) = self.context.poll_cq(self.cq).unwrap() {
                return wc.status == WcStatus::Success;
            }
            assert!(Instant::now() < deadline, "no completion");
        }
    }

    /// Requests a connection, as perftest does with -R; it is rejected.
    fn call(&mut self, to: SocketAddr) {
        self.context.connect(self.qp, to, &ConnectionParameters::default()).unwrap();
        assert!(matches!(self.event(), CmEvent::Rejected { .. }));
    }

    /// Accepts a connection, as perftest does with -R.
    fn answer(&mut self) {
        let CmEvent::ConnectionRequest(request) = self.event() else { panic!("no request") };
        self.context.accept(request.id, self.qp, &ConnectionParameters::default()).unwrap();
        while !matches!(self.event(), CmEvent::Disconnected { .. }) {}
    }

    fn event(&mut self) -> CmEvent {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            self.poller.poll(&mut self.context).unwrap();
            if let Some(event) = self.context.next_cm_event() {
                return event;
            }
            assert!(Instant::now() < deadline, "no event");
        }
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
