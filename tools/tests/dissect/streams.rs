//! Evidence from PSNs: datagrams, whose PSNs count the packets to all peers of a queue pair, captures that begin late,
//! and frames with unknown contents.

use ferroce::wire::{Deth, Opcode, OwnedPacket, Reth};
use ferroce::{Psn, Qpn, RKey};
use serde_json::Value;

use super::{ETHERNET, TempFile, ferroce, json, path};

fn packet(opcode: Opcode, to: u32, psn: u32, change: impl FnOnce(&mut OwnedPacket)) -> Vec<u8> {
    let mut packet =
        OwnedPacket::new(&path(["10.0.0.1", "10.0.0.2"], 0), opcode, Qpn::new(to), Psn::new(psn));
    change(&mut packet);
    packet.emit()
}

fn datagram(to: u32, psn: u32, byte: u8) -> Vec<u8> {
    packet(Opcode::UD_SEND_ONLY, to, psn, |packet| {
        packet.extensions.deth = Some(Deth::new(0x1111_1111, Qpn::new(0x77)));
        packet.set_payload(vec![byte; 64]);
    })
}

/// The text of the summary, and the flows.
fn told(frames: &[Vec<u8>]) -> (String, Vec<Value>) {
    let file = TempFile::pcap(ETHERNET, frames);
    let (_, mut summary, _) = json(&file.0);
    let Value::Array(flows) = summary["flows"].take() else { panic!("{summary}") };
    (String::from_utf8(ferroce(&["--summary"], &file.0).stdout).unwrap(), flows)
}

#[test]
fn datagrams_that_are_missing_late_or_twice_are_counted() {
    let of =
        |psns: &[u32]| told(&psns.iter().map(|psn| datagram(0x12, *psn, *psn as u8)).collect::<Vec<_>>());
    let (said, flows) = of(&[5, 6, 8, 7, 9, 12, 12]);
    assert!(said.contains("psn 0x000005 to 0x00000c, 2 gaps (2 missing, 1 late), 1 duplicates; "), "{said}");
    assert!(said.contains("; datagrams to others may have the PSNs that are missing\n"), "{said}");
    assert_eq!((&flows[0]["requests"]["missing"], &flows[0]["untold"]), (&2.into(), &Value::Null));
    let (said, _) = of(&[5, 6, 7]);
    assert!(said.ends_with("psn 0x000005 to 0x000007, 0 gaps (0 missing, 0 late), 0 duplicates\n"), "{said}");
}

/// The PSNs of a queue pair count datagrams to all peers, and a sender need not count at all.
#[test]
fn meaningless_datagram_psns_are_not_reported() {
    let (said, flows) = told(&[datagram(0x12, 1, 1), datagram(0x13, 2, 2), datagram(0x12, 3, 3)]);
    let shared =
        "tell nothing of gaps and duplicates: its queue pair numbers datagrams to others with these\n";
    assert_eq!(said.matches(shared).count(), 2, "{said}");
    assert!(flows.iter().all(|flow| flow["untold"].is_string()), "{flows:?}");
    let (said, _) = told(&[datagram(0x12, 0, 1), datagram(0x12, 0, 2), datagram(0x12, 0, 3)]);
    assert!(
        said.contains("tell nothing of gaps and duplicates: different datagrams have the same PSN\n"),
        "{said}"
    );
}

/// Three READ requests in one frame, of which the recorder kept the second one's headers.
#[test]
fn requests_in_a_frame_that_was_cut_are_not_malformed() {
    let read = |psn| {
        packet(Opcode::RC_READ_REQUEST, 0x12, psn, |packet| {
            packet.extensions.reth = Some(Reth::new(0x1000, RKey::new(7), 1024));
        })
    };
    let mut joined = read(1);
    (2..5).for_each(|psn| joined.extend(&read(psn)[42..]));
    let length = (joined.len() - 14) as u16;
    joined[16..18].copy_from_slice(&length.to_be_bytes());
    joined[38..40].copy_from_slice(&(length - 20).to_be_bytes());
    let file = TempFile::cut(ETHERNET, &[joined, read(5)], 120);
    let (packets, summary, status) = json(&file.0);
    assert_eq!(
        (status, &summary["malformed"], &summary["joined_frames_cut"]),
        (0, &0.into(), &1.into()),
        "{summary}"
    );
    assert_eq!((&packets[0]["first_of_several"], &packets[0]["payload_len"]), (&true.into(), &0.into()));
    let flow = &summary["flows"][0];
    assert_eq!((&flow["payload_bytes"], &flow["requests"]["missing"]), (&0.into(), &0.into()), "{summary}");
}

/// A truncated frame may contain several packets if others of its flow do; an acknowledge between them is no evidence.
#[test]
fn no_gap_is_reported_after_a_truncated_frame() {
    let of =
        |opcode, psn, length: usize| packet(opcode, 0x12, psn, |packet| packet.set_payload(vec![1; length]));
    let middle = Opcode::RC_WRITE_MIDDLE;
    let last = Opcode::RC_WRITE_LAST;
    let frames = [
        of(middle, 1, 2064),
        of(Opcode::RC_ACKNOWLEDGE, 900, 0),
        of(middle, 3, 5184),
        of(last, 8, 3108),
        of(middle, 11, 1024),
        // These two are single packets, and 13 is missing.
        of(middle, 12, 8),
        of(middle, 14, 8),
    ];
    let file = TempFile::cut(ETHERNET, &frames, 120);
    let (_, summary, _) = json(&file.0);
    let requests = &summary["flows"][0]["requests"];
    assert_eq!((&requests["gaps"], &requests["missing"]), (&1.into(), &1.into()), "{summary}");
}

/// Other data sent to RoCE's port looks like packets to many queue pairs.
#[test]
fn other_data_makes_no_flows() {
    let noise = (1..=18u8).map(|number| {
        let mut frame = datagram(0x12, 1, 1);
        frame[42..]
            .iter_mut()
            .zip(0u8..)
            .for_each(|(byte, at)| *byte = at.wrapping_mul(number).wrapping_add(3 * number));
        frame[42] = 0x0a;
        frame
    });
    let (said, _) = told(&noise.chain([datagram(0x12, 1, 1)]).collect::<Vec<_>>());
    assert!(
        said.contains(
            "18 packets with a wrong ICRC, each the only one to its queue pair: damaged, or not RoCE\n"
        ),
        "{said}"
    );
    assert_eq!(said.matches(" > 10.0.0.2 qp").count(), 1, "{said}");
}
