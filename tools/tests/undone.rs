//! Exit status 0 means that the work was done: captures that can't be written, peers that are other programs or have
//! other settings.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod ends;

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::{Duration, Instant};

use ends::{Ferroce, Outcome, alone};
use ferroce::{
    Access, CmEvent, Config, ConnectionParameters, Context, Data, DeviceSpec, QpConfig, SendFlags, SendOp,
    SendWorkRequest, Transition,
};

/// An address of the loopback interface that no other process uses.
fn address(last: u8) -> String {
    let [.., a, b] = std::process::id().to_be_bytes();
    format!("127.{}.{a}.{b}", 90 + last)
}

#[test]
fn a_capture_on_a_full_disk_is_a_failure() {
    let _alone = alone();
    if !ends::is_root() {
        println!("skipped: only root can mount a file system of 64 KiB");
        return;
    }
    let folder = std::env::temp_dir().join(format!("ferroce-full-{}", std::process::id()));
    fs::create_dir(&folder).unwrap();
    let mount = format!("mount -t tmpfs -o size=64k full {0} && exec \"$@\" {0}/x.pcapng", folder.display());
    for arguments in [
        "perf write bw -d loopback -n 1000 --pcap",
        "pingpong -d loopback -n 1000 --pcap",
        "rping -d loopback -C 500 --pcap",
        // Less than a buffer: the error occurs at the very end.
        "pingpong -d loopback -n 30 --pcap",
    ] {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &mount, "sh", env!("CARGO_BIN_EXE_ferroce")]);
        let outcome = Ferroce::spawn(command, arguments).end();
        assert_eq!(outcome.code, Some(1), "{arguments}: {outcome:#?}");
        assert!(outcome.stderr.contains("x.pcapng': No space left on device"), "{arguments}: {outcome:#?}");
    }
    fs::remove_dir(&folder).unwrap();
}

/// A shell without packages and without network access, as root.
#[test]
fn ci_without_its_packages_is_a_failure() {
    let tools = std::env::temp_dir().join(format!("ferroce-ci-{}", std::process::id()));
    fs::create_dir(&tools).unwrap();
    for (name, does) in [
        ("id", "echo 0"),
        ("dpkg-query", "exit 1"),
        ("apt-get", "echo no network >&2; exit 100"),
        ("cargo", "exit 0"),
        // Tools that a machine may or may not have; the tested one comes after them.
        ("g++", "exit 0"),
    ] {
        let tool = tools.join(name);
        fs::write(&tool, format!("#!/bin/sh\n{does}\n")).unwrap();
        fs::set_permissions(&tool, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let path = format!("{}:{}", tools.display(), std::env::var("PATH").unwrap());
    let run = |arguments: &[&str], ci: &str| {
        let job = concat!(env!("CARGO_MANIFEST_DIR"), "/../do");
        Command::new(job).args(arguments).env("PATH", &path).env("CI", ci).output().unwrap()
    };
    let here = run(&["lint"], "");
    let ci = run(&["lint"], "true");
    let fuzz = run(&["fuzz", "1"], "");
    fs::remove_dir_all(&tools).unwrap();
    let said = String::from_utf8_lossy(&ci.stderr);
    assert_eq!(here.status.code(), Some(0), "{here:?}");
    assert_eq!(ci.status.code(), Some(1), "{ci:?}");
    assert!(said.contains("libxdp-dev") && said.contains("CI"), "{said}");
    // An empty list of targets does not pass, either.
    let said = String::from_utf8_lossy(&fuzz.stderr);
    assert_eq!(fuzz.status.code(), Some(1), "{fuzz:?}");
    assert!(said.contains("no fuzz targets in"), "{said}");
}

#[test]
fn path_mtus_that_differ_are_named() {
    let _alone = alone();
    for service in ["rc", "uc"] {
        for (server_mtu, client_mtu, packet) in
            [(4096, 1024, "SEND_FIRST of 1024"), (1024, 4096, "SEND_FIRST of 4096")]
        {
            let command = format!("pingpong -t {service} -s 10000 -n 5 -p 18531");
            let mut server =
                Ferroce::start(None, &format!("{command} -m {server_mtu} -d udp:{}", address(0)));
            server.ready();
            let client =
                Ferroce::start(None, &format!("{command} -m {client_mtu} -d udp:{} 127.0.0.1", address(1)));
            let (client, server) = (client.end(), server.end());
            assert_eq!((client.code, server.code), (Some(1), Some(1)), "{client:#?} {server:#?}");
            let here = [packet, &format!("path MTU of {server_mtu} bytes"), "-m"];
            here.iter().for_each(|word| assert!(server.stderr.contains(word), "no '{word}' in {server:#?}"));
            if service == "rc" {
                assert!(server.stderr.contains("refused here"), "{server:#?}");
                assert!(
                    client.stderr.contains("refused by the peer") && client.stderr.contains("(-m)"),
                    "{client:#?}"
                );
            }
        }
    }
}

#[test]
fn a_peer_that_does_not_answer_refers_to_the_doctor() {
    let _alone = alone();
    let command = "pingpong -n 100000000 -p 18532";
    let device = format!("udp:{}", address(1));
    let deserted = || {
        let mut server = Ferroce::start(None, &format!("{command} -d udp:{}", address(0)));
        server.ready();
        let client = Ferroce::start(None, &format!("{command} -d {device} 127.0.0.1"));
        std::thread::sleep(Duration::from_millis(500));
        server.kill();
        client.end()
    };
    // If a server ends between its acknowledgement and its answer, nothing is left to retransmit.
    let mut ends = std::iter::repeat_with(deserted).take(4);
    let client = ends.find(|client| !client.stderr.contains("the peer has sent nothing")).unwrap();
    assert_eq!(client.code, Some(1), "{client:#?}");
    let advice = format!("ferroce doctor -d {device} {}", address(0));
    assert!(client.stderr.contains("RetryExcErr") && client.stderr.contains(&advice), "{client:#?}");
}

/// The behavior of a connection manager client that is not rping.
#[derive(Clone, Copy, Debug)]
enum Stranger {
    Leaves,
    Sends,
    Writes,
}

#[test]
fn a_server_of_rping_that_serves_no_ping_fails() {
    let _alone = alone();
    for (stranger, said) in [
        (Stranger::Leaves, "without a ping"),
        (Stranger::Sends, "a SEND of 7 bytes"),
        (Stranger::Writes, "an RDMA WRITE with immediate of 0 bytes"),
    ] {
        let mut server = Ferroce::start(None, &format!("rping -d udp:{} -p 7181", address(0)));
        server.ready();
        visit_rping(stranger);
        let outcome: Outcome = server.end();
        assert_eq!(outcome.code, Some(1), "{stranger:?}: {outcome:#?}");
        assert!(outcome.stderr.contains(said), "{stranger:?}: {outcome:#?}");
    }
}

fn visit_rping(stranger: Stranger) {
    let device: DeviceSpec = format!("udp:{}", address(1)).parse().unwrap();
    let mut context = Context::open(device.open().unwrap(), &Config::default()).unwrap();
    let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(16).unwrap());
    let qp = context.create_qp(&QpConfig::rc(pd, cq)).unwrap();
    context.modify_qp(qp, Transition::Init { access: Access::NONE }).unwrap();
    let to = SocketAddr::new(address(0).parse::<IpAddr>().unwrap(), 7181);
    let id = context.connect(qp, to, &ConnectionParameters::default()).unwrap();
    let mut poller = ferroce::Poller::new();
    let deadline = Instant::now() + Duration::from_secs(20);
    let post = |context: &mut Context, op, data| {
        let wr = SendWorkRequest { wr_id: 1, op, data, flags: SendFlags::SIGNALED };
        context.post_send(qp, &wr).unwrap();
    };
    loop {
        assert!(Instant::now() < deadline, "no end of the connection");
        poller.poll(&mut context).unwrap();
        match context.next_cm_event() {
            Some(CmEvent::Established { .. }) => match stranger {
                Stranger::Leaves => context.disconnect(id).unwrap(),
                Stranger::Sends => post(&mut context, SendOp::Send, Data::Inline(b"another")),
                Stranger::Writes => {
                    let nowhere = ferroce::RemoteAddress { addr: 0, rkey: ferroce::RKey::new(0) };
                    post(&mut context, SendOp::WriteWithImm(nowhere, 1), Data::Inline(b""));
                }
            },
            Some(_) => return,
            None => {}
        }
        if context.poll_cq(cq).unwrap().is_some() {
            return;
        }
    }
}
