//! The cost of captures, the parts that are left out, and the verdict's statement about them.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use crate::wild::{Frames, TUNNELS, reth, transport};
use crate::{Scratch, fixtures, replay, text};

/// A replay under resource limits of the kernel, which do not depend on the load of other programs.
pub(crate) fn limited(file: &Path, limits: &[&str], options: &[&str]) -> Output {
    let mut command = Command::new("prlimit");
    if std::env::var_os("ASAN_OPTIONS").is_some() {
        println!(
            "the address sanitizer takes terabytes of addresses and several times as long: no {limits:?}"
        );
    } else {
        command.args(limits);
    }
    command.arg(env!("CARGO_BIN_EXE_ferroce")).arg("replay").args(options).arg(file);
    command.output().expect("prlimit of util-linux runs")
}

fn headers() -> Frames {
    Frames::read(&fixtures().join("rc_write.pcap")).expect("a pcap file")
}

fn json(file: &Path) -> serde_json::Value {
    serde_json::from_slice(&replay(file, &["--json"]).stdout).expect("JSON")
}

/// WRITEs of 8 bytes to these addresses, each acknowledged.
fn writes(to: u32, first: u32, addresses: impl Iterator<Item = u64>) -> Vec<(bool, Vec<u8>)> {
    let each = addresses.zip(0..).flat_map(|(va, number): (u64, u32)| {
        let write = transport(0x0a, to, 1 << 31 | (first + number), &[reth(va, 7, 8), vec![5; 8]].concat());
        let msn = (0x1f00_0000 | (number + 1)).to_be_bytes();
        [(false, write), (true, transport(0x11, to + 0x100, first + number, &msn))]
    });
    each.collect()
}

/// Thousands of queue pairs, and READs of 2 GiB: the cost is that of their packets.
#[test]
fn many_queue_pairs_and_long_reads_take_no_longer_than_their_packets() {
    let directory = Scratch::new("many");
    let file = directory.0.join("many.pcap");
    let acks = headers().many(8000, |number| transport(0x11, 0x100 + number, 5, &[0x1f, 0, 0, 1]));
    let reads =
        headers().many(800, |number| transport(0x0c, 0x100 + number, 5, &reth(0x1000, 7, 0x8000_0000)));
    for (what, frames, status) in [("8000 ACKs", acks, 3), ("800 READs of 2 GiB", reads, 0)] {
        frames.write(&file);
        // 30 s and 3 s when each queue pair had its own engine.
        let output = limited(&file, &["--cpu=2"], &[]);
        assert_eq!(output.status.code(), Some(status), "{what}: {}", text(&output));
    }
}

/// A capture determines how much memory it wants, and gets what its packets cost.
#[test]
fn a_read_of_a_gib_is_left_out_and_named() {
    let directory = Scratch::new("gib");
    let file = directory.0.join("gib.pcap");
    let read = transport(0x0c, 0x22, 100, &reth(0x1000, 7, 1 << 30));
    let answer = transport(0x0d, 0x11, 100, &[&[0x1f, 0, 0, 1], &[7; 1024][..]].concat());
    headers().talk([(false, read), (true, answer)]).write(&file);
    let output = limited(&file, &["--as=400000000"], &[]);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.contains("not played; it would take 1073"), "{said}");
    assert!(said.trim_end().ends_with("2 ends not played"), "{said}");
}

/// WRITEs that are far from each other need a region each.
#[test]
fn writes_all_over_the_memory_are_played() {
    let directory = Scratch::new("far");
    let file = directory.0.join("far.pcap");
    headers().talk(writes(0x22, 100, (0..1500).map(|number| number << 20))).write(&file);
    let output = limited(&file, &["--as=400000000"], &[]);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.contains("1500 compared in memory"), "{said}");
}

/// The pairing of flows with many candidates is a guess; the cost is that of their packets.
#[test]
fn flows_of_the_same_psns_are_bounded() {
    let directory = Scratch::new("flows");
    let file = directory.0.join("flows.pcap");
    let writes = (0..15_000).map(|qp| {
        let write = [reth(0x1000, 7, 8), vec![5; 8]].concat();
        (false, transport(0x0a, 0x1_0000 + qp, 1 << 31 | 5, &write))
    });
    let acks = (0..15_000).map(|qp| (true, transport(0x11, 0x8_0000 + qp, 5, &[0x1f, 0, 0, 1])));
    headers().talk(writes.chain(acks)).write(&file);
    // 3 s when every possible pair was examined.
    let output = limited(&file, &["--cpu=2"], &[]);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(0), "{:?}", said.lines().last());
    assert!(said.contains("conversations not judged"), "{said}");
}

/// A verdict covers only judged packets.
#[test]
fn a_verdict_says_what_it_does_not_cover() {
    let directory = Scratch::new("part");
    let file = directory.0.join("part.pcap");
    let one_ack = headers().talk([(true, transport(0x11, 0x300, 9, &[0x1f, 0, 0, 1]))]);
    one_ack.write(&file);
    let output = replay(&file, &[]);
    assert_eq!(output.status.code(), Some(3), "{}", text(&output));
    let snapped = headers().talk(writes(0x22, 100, 0..4)).cut(62).and(one_ack);
    snapped.write(&file);
    let output = replay(&file, &[]);
    assert_eq!(output.status.code(), Some(3), "{}", text(&output));
    let mut options = headers();
    let whole = options.len();
    (1..=3).for_each(|number| options.give_options(number));
    options.and(headers()).write(&file);
    let output = replay(&file, &[]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    let said = text(&output);
    assert!(
        whole > 3
            && said
                .trim_end()
                .ends_with(&format!("; 3 of {} packets not judged (3 with IPv4 options)", 2 * whole)),
        "{said}"
    );
}

/// Flipped bits do not make a manufacturer opcode.
#[test]
fn a_damaged_opcode_is_no_manufacturer_opcode() {
    let directory = Scratch::new("opcode");
    let file = directory.0.join("opcode.pcap");
    let mut damaged = headers();
    damaged.corrupt(3, 0, 0x52);
    damaged.write(&file);
    let report = json(&file);
    assert_eq!((report["foreign"].as_u64(), report["damaged"].as_u64()), (Some(0), Some(1)), "{report:#}");
    assert!(!text(&replay(&file, &[])).contains("manufacturer"));
}

/// A manufacturer opcode ends the judging of its own connection, but not of a later one.
#[test]
fn a_manufacturers_opcode_ends_its_own_connection() {
    let directory = Scratch::new("foreign");
    let file = directory.0.join("foreign.pcap");
    let foreign = vec![(false, transport(0xd0, 0x22, 104, &[0; 16]))];
    headers().talk([writes(0x22, 100, 0..4), foreign, writes(0x22, 0x40_0000, 0..4)].concat()).write(&file);
    let said = text(&replay(&file, &[]));
    let titles: Vec<&str> = said.lines().filter(|line| line.contains(" <> ")).collect();
    assert_eq!(titles.len(), 2, "{said}");
    assert!(titles[0].contains("8 packets") && titles[0].contains("judged up to frame 9"), "{said}");
    assert!(titles[1].contains("8 packets") && !titles[1].contains("judged up to"), "{said}");
    let last = said.lines().last().unwrap_or_default();
    assert!(last.contains("; 1 of 2 conversations judged only up to a manufacturer's opcode"), "{said}");
}

/// ferroce's own selective acknowledge also has one: its connection is identified by it, and judged up to it.
#[test]
fn a_selective_acknowledge_ends_the_judging() {
    let directory = Scratch::new("selective");
    let file = directory.0.join("selective.pcap");
    let requests: Vec<_> = writes(0x22, 100, 0..4).into_iter().filter(|(is_answer, _)| !is_answer).collect();
    let sack = |psn| (true, transport(0xf1, 0x11, psn, &[&[0x1f, 0, 0, 1][..], &[0; 128]].concat()));
    let talk = [&requests[..], &[sack(102)], &requests[2..], &[sack(104)]].concat();
    headers().talk(talk).write(&file);
    let output = replay(&file, &[]);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.starts_with("8 frames, 8 RoCE packets, 2 with a manufacturer's opcode\n"), "{said}");
    let titles: Vec<&str> = said.lines().filter(|line| line.contains(" <> ")).collect();
    assert!(
        titles[0].starts_with("RC 10.77.0.11 qp 0x000011 <> 10.77.0.12 qp 0x000022: 4 packets"),
        "{said}"
    );
    assert!(
        titles.len() == 1 && titles[0].ends_with("up to frame 5: opcode 0xf1 is a manufacturer's"),
        "{said}"
    );
    let end = "; 1 of 1 conversations judged only up to a manufacturer's opcode; 4 of 8 packets not judged";
    assert!(said.trim_end().ends_with(end) && !said.contains("repeated"), "{said}");
}

/// A packet with a reserved opcode is left out, and the packets after it are judged.
#[test]
fn a_reserved_opcode_ends_nothing() {
    let directory = Scratch::new("reserved");
    let file = directory.0.join("reserved.pcap");
    let reserved = || vec![(false, transport(0x1f, 0x22, 104, &[0; 16]))];
    headers().talk([writes(0x22, 100, 0..4), reserved(), writes(0x22, 105, 0..4)].concat()).write(&file);
    let output = replay(&file, &[]);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(
        said.starts_with("17 frames, 17 RoCE packets, 1 with an opcode that RoCE does not have\n"),
        "{said}"
    );
    assert!(!said.contains("manufacturer") && said.contains("; 1 of 17 packets not judged"), "{said}");
    // An ACK after it is checked.
    let mut broken = [writes(0x22, 100, 0..4), reserved(), writes(0x22, 105, 0..4)].concat();
    let ack = broken.last_mut().expect("the last ACK");
    ack.1[9] ^= 0x10;
    headers().talk(broken).write(&file);
    assert_eq!(replay(&file, &[]).status.code(), Some(1));
}

/// A queue pair that is connected to one peer, and then to another one.
#[test]
fn the_connection_manager_pairs_anew() {
    let directory = Scratch::new("anew");
    let file = directory.0.join("anew.pcap");
    let first = Frames::read(&fixtures().join("ucmatose.pcap")).expect("a pcap file");
    let mut second = first.clone();
    for number in 1..=second.len() {
        second.edit(number, |bth| {
            let is_mad = bth[5..8] == [0, 0, 1];
            if is_mad {
                bth[34] ^= 0x40; // the transaction
            }
            let qpn = match (is_mad, bth.get(36..38)) {
                (true, Some([0, 0x10])) => 76..79, // of the REQ
                _ => 5..8,
            };
            if bth[qpn.clone()] == [0, 0, 0x36] {
                bth[qpn].copy_from_slice(&[0, 0, 0x37]);
            }
        });
    }
    first.and(second).write(&file);
    let output = replay(&file, &[]);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    for qpn in ["0x000036", "0x000037"] {
        let title = format!("RC 10.77.0.12 qp 0x000126 <> 10.77.0.11 qp {qpn}: 12 packets");
        assert!(said.contains(&title), "{title}: {said}");
    }
}

/// A connection has the P_Key of its beginning.
#[test]
fn a_connection_may_have_another_pkey() {
    let directory = Scratch::new("pkey");
    let file = directory.0.join("pkey.pcap");
    let mut frames = headers();
    (1..=frames.len()).for_each(|number| frames.edit(number, |bth| bth[2..4].copy_from_slice(&[0x80, 0x05])));
    frames.write(&file);
    let output = replay(&file, &[]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    let there = text(&replay(&fixtures().join("rc_write.pcap"), &[]));
    assert_eq!(text(&output), there, "the partition changes nothing else");
}

/// A frame whose addresses look like an IP header is still a frame.
#[test]
fn a_mac_address_is_not_an_ip_header() {
    let directory = Scratch::new("mac");
    let file = directory.0.join("mac.pcap");
    for (mac, tunnel) in
        [[0x46, 0, 0, 60, 0, 1], [0x60, 0, 0, 0, 0, 20]].into_iter().flat_map(|mac| TUNNELS.map(|t| (mac, t)))
    {
        let mut frames = headers();
        let count = frames.len();
        for number in 1..=count {
            frames.send_to(number, mac);
            frames.tunnel(number, tunnel);
        }
        frames.write(&file);
        let said = text(&replay(&file, &[]));
        assert!(
            said.contains(&format!("{count} frames, {count} RoCE packets\n")),
            "{mac:x?} {tunnel:?}: {said}"
        );
    }
    // A multicast listener report over IPv6, and a RoCE packet after a header of options.
    let ipv6 = |next: u8, rest: &[u8]| {
        let mut packet = vec![0x60, 0, 0, 0, 0, rest.len() as u8, 0, 1];
        packet.extend([0xfe; 32]);
        [&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x86, 0xdd][..], &packet, &[next, 0, 5, 2, 0, 0, 1, 0], rest]
            .concat()
    };
    let mld = ipv6(58, &[143, 0, 0, 0, 0, 0, 0, 0]);
    let udp = ipv6(17, &[0xc0, 0, 0x12, 0xb7, 0, 8, 0, 0]);
    Frames::raw(vec![mld, udp]).write(&file);
    let said = text(&replay(&file, &[]));
    assert!(said.contains("1 frames not opened: IPv6 extension headers"), "{said}");
    fs::remove_file(&file).expect("the file was there");
}

/// Frames at these times, in microseconds, and their transports.
fn at_times(frames: Frames, times: impl Fn(u64) -> u64) -> Frames {
    let mut frames = frames;
    frames.set_times(|number| times(number) * 1000);
    frames
}

/// A capture of some kilobytes makes an engine send gigabytes: what is kept costs little, and a queue pair that
/// continues to send is left out and named.
#[test]
fn retransmissions_of_an_engine_are_bounded() {
    let long = || (false, transport(0x0c, 0x22, 1 << 31, &reth(0, 7, 30 << 20)));
    let first = (true, transport(0x0d, 0x11, 0, &[&[0, 0, 0, 1], &[7; 1024][..]].concat()));
    let second = (true, transport(0x0e, 0x11, 1, &[7; 1024]));
    let reads = [long(), first, second].into_iter().chain((0..150).map(|_| long()));
    let nak =
        |kind: u8, psn: u32| (true, transport(0x11, 0x11, psn, &(u32::from(kind) << 24 | psn).to_be_bytes()));
    let write = |psn: u32| {
        (false, transport(0x0a, 0x22, 1 << 31 | psn, &[reth(u64::from(psn) * 64, 7, 8), vec![5; 8]].concat()))
    };
    let send = |psn: u32| (false, transport(0x04, 0x22, 1 << 31 | psn, &[5; 8]));
    let cases = [
        ("a READ of 30 MiB, 150 times more", at_times(headers().talk(reads), |number| number * 100_000)),
        ("half the NAKs again", headers().talk((0..8000).flat_map(|psn| [write(psn), nak(0x60, psn / 2)]))),
        ("a NAK for each", headers().talk((0..4000).map(write).chain((0..4000).map(|psn| nak(0x60, psn))))),
        ("RNR NAKs", headers().talk((0..4000).map(send).chain((0..4000).map(|psn| nak(0x21, psn / 4))))),
    ];
    let directory = Scratch::new("repeats");
    let file = directory.0.join("repeats.pcap");
    for (what, frames) in cases {
        frames.write(&file);
        // 1.8 to 5 GB, or out of memory, when every packet was kept.
        let output = limited(&file, &["--as=300000000"], &[]);
        let said = text(&output);
        assert!(matches!(output.status.code(), Some(0 | 1)), "{what}: {:?}, {said}", output.status);
        assert!(said.contains("not played; the engine sent more than"), "{what}: {said}");
        assert!(
            said.lines().last().is_some_and(|last| last.ends_with("; 1 ends not played")),
            "{what}: {said}"
        );
    }
}

/// Leaving out one queue pair does not affect the others of its engine.
#[test]
fn only_the_queue_pair_that_repeats_is_left_out() {
    let directory = Scratch::new("beside");
    let file = directory.0.join("beside.pcap");
    let long = || (false, transport(0x0c, 0x22, 1 << 31, &reth(0, 7, 1 << 20)));
    let answer = (true, transport(0x0d, 0x11, 0, &[&[0, 0, 0, 1], &[7; 1024][..]].concat()));
    let beside = writes(0x33, 100, 0..100);
    let talk = [long(), answer].into_iter().chain((0..20).map(|_| long())).chain(beside);
    at_times(headers().talk(talk), |number| number * 1000).write(&file);
    let said = text(&replay(&file, &[]));
    assert!(said.contains("100 compared in memory"), "{said}");
    assert!(said.lines().last().is_some_and(|last| last.ends_with("; 1 ends not played")), "{said}");
}

/// A capture of twice the length costs about twice as much.
#[test]
fn long_captures_cost_what_their_packets_cost() {
    let ack = |psn: u32| (true, transport(0x11, 0x11, psn, &(0x1f00_0000 | (psn + 1)).to_be_bytes()));
    let write = |psn: u32| {
        (false, transport(0x0a, 0x22, 1 << 31 | psn, &[reth(u64::from(psn) * 64, 7, 8), vec![5; 8]].concat()))
    };
    let atomic = |number: u32| {
        let rest =
            [&(u64::from(number % 5) * 8).to_be_bytes()[..], &[0, 0, 0, 7], &1u64.to_be_bytes(), &[0; 8]];
        let found =
            [&(0x1f00_0000 | (number + 1)).to_be_bytes()[..], &u64::from(number).to_be_bytes()].concat();
        let ask = (false, transport(0x14, 0x22, 1 << 31 | number, &rest.concat()));
        [ask, (true, transport(0x12, 0x11, number, &found))]
    };
    let read = |number: u32| (false, transport(0x0c, 0x22, 1 << 31 | (3 * number), &reth(0, 7, 600)));
    let response = |psn: u32| {
        let aeth = (0x1f00_0000 | (psn / 3 + 1)).to_be_bytes();
        let (opcode, aeth, len) = match psn % 3 {
            0 => (0x0d, &aeth[..], 256),
            1 => (0x0e, &[][..], 256),
            _ => (0x0f, &aeth[..], 88),
        };
        (true, transport(opcode, 0x11, psn, &[aeth, &vec![7; len]].concat()))
    };
    let cases = [
        ("answers behind all requests", headers().talk((0..160_000).map(write).chain((0..160_000).map(ack)))),
        ("atomics", headers().talk((0..80_000).flat_map(atomic))),
        ("READs", headers().talk((0..20_000).map(read).chain((0..60_000).map(response)))),
    ];
    let directory = Scratch::new("long");
    let file = directory.0.join("long.pcap");
    for (what, frames) in cases {
        frames.write(&file);
        // 16 s and more when events were searched in the whole list.
        let output = limited(&file, &["--cpu=8"], &[]);
        assert_eq!(output.status.code(), Some(0), "{what}: {:?}: {}", output.status, text(&output));
    }
}
