use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use pcap_file::pcapng::blocks::enhanced_packet::EnhancedPacketOption;
use pcap_file::pcapng::blocks::interface_description::InterfaceDescriptionOption;
use pcap_file::pcapng::{Block, PcapNgReader};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use super::*;
use crate::loopback::{self, Loopback};

/// The file of one test, which is deleted on drop.
struct TempFile(PathBuf);

impl TempFile {
    fn new() -> TempFile {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let name = format!("ferroce-pcap-{}-{}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed));
        TempFile(std::env::temp_dir().join(name))
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn port_pair() -> (Loopback, Loopback) {
    loopback::pair(&["10.0.0.1".parse().unwrap()], &["10.0.0.2".parse().unwrap()])
}

fn frame(len: usize) -> Vec<u8> {
    // A group address, so that every loopback port receives it.
    (0..len).map(|i| if i < 6 { 0xff } else { (i * 31 + len) as u8 }).collect()
}

fn send(port: &mut dyn PacketDriver, now: Nanos, lengths: &[usize]) {
    let mut lengths = lengths.iter();
    port.tx_burst(now, &mut |buffer: &mut [u8]| {
        let len = *lengths.next()?;
        buffer[..len].copy_from_slice(&frame(len));
        Some(len)
    })
    .unwrap();
}

/// The records of a file, and the error that ended it.
type All = (Vec<(u64, LinkType, Vec<u8>, u32)>, Option<String>);

fn read_all(reader: &mut Reader) -> All {
    let mut records = Vec::new();
    loop {
        match reader.next_record() {
            Ok(Some(r)) => records.push((r.timestamp, r.link_type, r.captured.to_vec(), r.original_len)),
            Ok(None) => return (records, None),
            Err(error) => {
                assert_eq!(reader.next_record().unwrap(), None, "an error ends the file");
                return (records, Some(error.to_string()));
            }
        }
    }
}

fn read_bytes(bytes: Vec<u8>) -> All {
    match Reader::new(Box::new(io::Cursor::new(bytes)), "x".into()) {
        Ok(mut reader) => read_all(&mut reader),
        Err(error) => (Vec::new(), Some(error.to_string())),
    }
}

/// Records frames sent at 5 s and received at 5.000000123 s.
fn recorded(file: &TempFile) -> Vec<usize> {
    let (a, mut b) = port_pair();
    let boxed: Box<dyn PacketDriver> = Box::new(a);
    let mut a = Recorder::create(boxed, &file.0).unwrap();
    let (sent, received) = ([14, 60, 61, 62, 63, 4218], [1500, 64]);
    send(&mut a, Nanos(5_000_000_000), &sent);
    send(&mut b, Nanos::ZERO, &received);
    assert_eq!(a.rx_burst(Nanos(5_000_000_123), &mut |_: &[u8]| ()).unwrap(), 2);
    assert_eq!((a.stats().tx_frames, a.stats().rx_frames, a.unrecorded()), (6, 2, 0));
    let mut lengths = sent.to_vec();
    lengths.extend(received);
    lengths
}

#[test]
fn what_is_recorded_reads_back() {
    let file = TempFile::new();
    let before = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let lengths = recorded(&file);
    let after = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let (records, error) = read_all(&mut Reader::open(&file.0).unwrap());
    assert_eq!(error, None);
    assert_eq!(records.len(), lengths.len());
    let start = records[0].0;
    assert!((before..=after).contains(&start));
    for (n, (record, len)) in records.iter().zip(&lengths).enumerate() {
        let stamp = if n < 6 { start } else { start + 123 };
        assert_eq!(*record, (stamp, LinkType::Ethernet, frame(*len), *len as u32));
    }
}

#[test]
fn another_reader_finds_the_interface_and_the_directions() {
    let file = TempFile::new();
    let lengths = recorded(&file);
    let mut reader = PcapNgReader::new(File::open(&file.0).unwrap()).unwrap();
    let mut packets = 0;
    while let Some(block) = reader.next_block() {
        match block.unwrap() {
            Block::InterfaceDescription(interface) => {
                assert_eq!(u32::from(interface.linktype), 1);
                let options = interface.options;
                assert!(options.contains(&InterfaceDescriptionOption::IfName("loopback0".into())));
                assert!(options.contains(&InterfaceDescriptionOption::IfTsResol(9)));
            }
            Block::EnhancedPacket(packet) => {
                let direction = if packets < 6 { 2 } else { 1 };
                assert_eq!(packet.options, [EnhancedPacketOption::Flags(direction)]);
                assert_eq!(packet.data[..], frame(lengths[packets])[..]);
                packets += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(packets, lengths.len());
}

#[test]
fn the_file_is_flushed_each_second() {
    let file = TempFile::new();
    let (a, _b) = port_pair();
    let mut a = Recorder::create(a, &file.0).unwrap();
    let size = || fs::metadata(&file.0).unwrap().len();
    send(&mut a, Nanos(1_000_000_000), &[100]);
    let header = size();
    send(&mut a, Nanos(1_999_999_999), &[100]);
    assert_eq!(size(), header);
    a.rx_burst(Nanos(2_000_000_000), &mut |_: &[u8]| ()).unwrap();
    let packet = 32 + 100 + 12;
    assert_eq!(size(), header + 2 * packet);
    send(&mut a, Nanos(2_000_000_001), &[100]);
    drop(a);
    assert_eq!(size(), header + 3 * packet);
}

/// Accepts a limited number of bytes, then fails like a full disk.
struct FullDisk(Arc<Mutex<usize>>);

impl Write for FullDisk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut room = self.0.lock().unwrap();
        let taken = bytes.len().min(*room);
        *room -= taken;
        if taken == 0 { Err(io::Error::other("no space left on device")) } else { Ok(taken) }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_write_error_stops_the_capture_and_not_the_traffic() {
    let (a, mut b) = port_pair();
    let room = Arc::new(Mutex::new(1 << 19));
    let disk = Box::new(FullDisk(room.clone()));
    let capture = Capture::start(disk, "disk".into(), &Interface::of(a.capabilities())).unwrap();
    let mut a = Recorder { driver: a, capture, scratch: Vec::new() };
    for n in 0..500 {
        send(&mut a, Nanos(n), &[4000]);
        assert_eq!(b.rx_burst(Nanos(n), &mut |bytes: &[u8]| assert_eq!(bytes, frame(4000))).unwrap(), 1);
    }
    assert_eq!(a.stats().tx_frames, 500);
    // 2 MB were sent; half a MB fits the disk, and up to a quarter of a MB more fits the buffer.
    assert!((300..400).contains(&a.unrecorded()), "{}", a.unrecorded());
    let recording = a.recording();
    assert_eq!(recording.failure(), Some("capture 'disk': no space left on device"));
    let left = *room.lock().unwrap();
    assert_eq!(left, 0);
    // A gap would make the rest unreadable, so nothing more is written even if there is room again.
    *room.lock().unwrap() = 1 << 20;
    for n in 0..100 {
        send(&mut a, Nanos(1_000_000_000 * n), &[4000]);
    }
    let left = *room.lock().unwrap();
    assert_eq!(left, 1 << 20);
}

#[test]
fn a_file_that_cannot_be_created_is_an_error_at_once() {
    let (a, _b) = port_pair();
    let error = Recorder::create(a, "/nonexistent-folder/x.pcapng").err().unwrap().to_string();
    assert!(error.starts_with("capture '/nonexistent-folder/x.pcapng': No such file"), "{error}");
    let (a, _b) = port_pair();
    let error = Recorder::create(a, "/dev/full").err().unwrap().to_string();
    assert!(error.starts_with("capture '/dev/full': No space left"), "{error}");
}

/// Builds files in either byte order.
#[derive(Clone, Copy, PartialEq)]
enum End {
    Little,
    Big,
}

impl End {
    fn u16(self, value: u16) -> [u8; 2] {
        if self == End::Little { value.to_le_bytes() } else { value.to_be_bytes() }
    }

    fn u32(self, value: u32) -> [u8; 4] {
        if self == End::Little { value.to_le_bytes() } else { value.to_be_bytes() }
    }

    fn words(self, values: &[u32]) -> Vec<u8> {
        values.iter().flat_map(|value| self.u32(*value)).collect()
    }

    fn pcap(self, magic: u32, link_type: u32) -> Vec<u8> {
        let mut file = self.u32(magic).to_vec();
        file.extend([self.u16(2), self.u16(4)].concat());
        file.extend(self.words(&[0, 0, 65535, link_type]));
        file
    }

    fn block(self, kind: u32, body: &[u8]) -> Vec<u8> {
        let length = (12 + body.len() + padding(body.len())) as u32;
        let padded = [body, &[0; 3][..padding(body.len())]].concat();
        [&self.words(&[kind, length])[..], &padded, &self.u32(length)].concat()
    }

    fn section(self) -> Vec<u8> {
        let version = [self.u16(1), self.u16(0)].concat();
        self.block(SECTION_HEADER, &[self.u32(BYTE_ORDER_MAGIC).to_vec(), version, vec![0xff; 8]].concat())
    }

    fn interface(self, link_type: u16, snaplen: u32, options: &[(u16, &[u8])]) -> Vec<u8> {
        let mut body = [self.u16(link_type), [0; 2]].concat();
        body.extend(self.u32(snaplen));
        for (code, value) in options {
            body.extend([self.u16(*code), self.u16(value.len() as u16)].concat());
            body.extend(*value);
            body.extend(&[0; 3][..padding(value.len())]);
        }
        self.block(INTERFACE_DESCRIPTION, &body)
    }

    fn packet(self, interface: u32, stamp: u64, original_len: u32, data: &[u8]) -> Vec<u8> {
        let words = [interface, (stamp >> 32) as u32, stamp as u32, data.len() as u32, original_len];
        self.block(ENHANCED_PACKET, &[&self.words(&words), data].concat())
    }
}

#[test]
fn pcap_is_read_in_both_byte_orders_and_resolutions() {
    let kinds = [
        (1, LinkType::Ethernet),
        (101, LinkType::RawIp),
        (228, LinkType::RawIp),
        (113, LinkType::LinuxCooked),
        (276, LinkType::LinuxCooked2),
        (105, LinkType::Other(105)),
    ];
    for end in [End::Little, End::Big] {
        for (magic, unit) in [(0xa1b2_c3d4, 1000), (0xa1b2_3c4d, 1)] {
            for (number, link_type) in kinds {
                let mut file = end.pcap(magic, number);
                file.extend(end.words(&[1_700_000_000, 123_456, 3, 90]));
                file.extend([1, 2, 3]);
                file.extend(end.words(&[1_700_000_001, 0, 0, 0]));
                let (records, error) = read_bytes(file);
                assert_eq!(error, None);
                let expected = [
                    (1_700_000_000_000_000_000 + 123_456 * unit, link_type, vec![1, 2, 3], 90),
                    (1_700_000_001_000_000_000, link_type, vec![], 0),
                ];
                assert_eq!(records, expected);
            }
        }
    }
}

/// A pcapng file with all features that the reader supports, and the expected result.
fn rich_pcapng(end: End, other: End) -> (Vec<u8>, Vec<u64>) {
    let offset = if end == End::Little { 10i64.to_le_bytes() } else { 10i64.to_be_bytes() };
    let file = [
        end.section(),
        end.interface(1, 0, &[(IF_NAME, b"eth0"), (IF_TSRESOL, &[9]), (OPT_ENDOFOPT, &[])]),
        end.interface(101, 4, &[]),
        end.interface(1, 0, &[(IF_TSRESOL, &[0x80 | 20]), (IF_TSOFFSET, &offset)]),
        end.interface(1, 0, &[(IF_TSRESOL, &[12])]),
        end.packet(0, 1_700_000_000_000_000_001, 5, &[1, 2, 3, 4, 5]),
        end.block(0x0bad, &[9; 17]),
        end.packet(1, 7, 1000, &[6; 4]),
        end.packet(2, 3 << 19, 1, &[7]),
        end.packet(3, 12_345, 1, &[8]),
        end.block(PACKET, &[&end.u16(1)[..], &end.u16(0), &end.words(&[0, 9, 2, 2]), &[5, 5]].concat()),
        other.section(),
        other.interface(113, 4, &[]),
        other.block(SIMPLE_PACKET, &[&other.u32(6)[..], &[4; 4]].concat()),
    ];
    let mut ends = Vec::new();
    let mut bytes = Vec::new();
    for block in file {
        bytes.extend(block);
        ends.push(bytes.len() as u64);
    }
    (bytes, ends)
}

#[test]
fn pcapng_is_read_with_its_interfaces_times_and_sections() {
    for (end, other) in [(End::Little, End::Big), (End::Big, End::Little)] {
        let (records, error) = read_bytes(rich_pcapng(end, other).0);
        assert_eq!(error, None);
        let expected = [
            (1_700_000_000_000_000_001, LinkType::Ethernet, vec![1, 2, 3, 4, 5], 5),
            (7_000, LinkType::RawIp, vec![6; 4], 1000),
            (11_500_000_000, LinkType::Ethernet, vec![7], 1),
            (12, LinkType::Ethernet, vec![8], 1),
            (9_000, LinkType::RawIp, vec![5, 5], 2),
            (0, LinkType::LinuxCooked, vec![4; 4], 6),
        ];
        assert_eq!(records, expected);
    }
}

#[test]
fn a_truncated_file_yields_its_records_and_an_error() {
    let mut pcap = End::Little.pcap(0xa1b2_c3d4, 1);
    let mut pcap_ends = vec![24];
    for n in 0..3 {
        pcap.extend(End::Little.words(&[n, 0, 10, 10]));
        pcap.extend([n as u8; 10]);
        pcap_ends.push(pcap.len() as u64);
    }
    for (bytes, ends) in [rich_pcapng(End::Little, End::Big), (pcap, pcap_ends)] {
        let (all, _) = read_bytes(bytes.clone());
        for cut in 0..bytes.len() {
            let (records, error) = read_bytes(bytes[..cut].to_vec());
            assert_eq!(records[..], all[..records.len()]);
            if ends.contains(&(cut as u64)) {
                assert_eq!(error, None, "cut at {cut}");
            } else if cut < 4 {
                assert_eq!(error.unwrap(), format!("capture 'x': {cut} bytes are not a capture"));
            } else {
                let error = error.unwrap();
                let start = ends.iter().rev().find(|end| **end < cut as u64).copied().unwrap_or(0);
                let got = cut as u64 - start;
                assert!(error.starts_with("capture 'x': truncated: the "), "{error}");
                assert!(error.contains(&format!(" at byte {start} should have ")), "{error}");
                assert!(error.ends_with(&format!("the file ends after {got}")), "{error} at {cut}");
            }
        }
    }
}

#[test]
fn errors_name_the_offset_of_damage() {
    let little = End::Little;
    let section = [little.section(), little.interface(1, 0, &[])].concat();
    let after = |block: Vec<u8>| [section.clone(), block].concat();
    let mut bad_end = little.packet(0, 0, 4, &[0; 4]);
    let last = bad_end.len() - 4;
    bad_end[last] = 99;
    for (bytes, message) in [
        (
            b"#!/bin/sh".to_vec(),
            "starts with 23 21 2f 62; pcap (a1 b2 c3 d4 or a1 b2 3c 4d, in either byte order)",
        ),
        (b"\x28\xb5\x2f\xfd".to_vec(), "starts with 28 b5 2f fd: zstd; pcap"),
        (
            [little.section(), little.interface(1, 0, &[]).repeat((1 << 16) + 1)].concat(),
            "the section has more than 65536 interfaces at byte 1310748",
        ),
        (
            [little.pcap(0xa1b2_c3d4, 1), little.words(&[0, 0, 300_000, 0])].concat(),
            "the record at byte 24 claims 300000 bytes, over 262144",
        ),
        ([&little.u32(0xa1b2_c3d4)[..], &[9; 20]].concat(), "pcap version 2313; version 2 can be read"),
        (after(little.packet(1, 0, 0, &[])), "the packet at byte 48 names interface 1, of 1"),
        (after(little.block(ENHANCED_PACKET, &[0; 8])), "the packet at byte 48 has 8 bytes, too few"),
        (after(bad_end), "the block at byte 48 has length 36 and ends with length 99"),
        (
            after(little.block(ENHANCED_PACKET, &little.words(&[0, 0, 0, 5, 5, 0]))),
            "the packet at byte 48 claims 5 bytes, and its block has 4",
        ),
        (
            after(little.words(&[5, 13])),
            "the block at byte 48 has length 13: must be 12 to 16777216, a multiple of 4",
        ),
        (after(little.words(&[5, 8])), "the block at byte 48 has length 8: must be"),
        (after(little.words(&[5, u32::MAX - 3])), "the block at byte 48 has length 4294967292: must be"),
        (
            after(little.words(&[SECTION_HEADER, 28, 7])),
            "the section at byte 48 has byte-order magic 0x00000007",
        ),
    ] {
        let error = read_bytes(bytes).1.unwrap();
        assert!(error.starts_with(&format!("capture 'x': {message}")), "{error}");
    }
    let error = Reader::open("/nonexistent.pcap").err().unwrap().to_string();
    assert!(error.starts_with("capture '/nonexistent.pcap': No such file"), "{error}");
}

#[test]
fn mutated_files_never_panic() {
    let seed = match std::env::var("FERROCE_SEED") {
        Ok(seed) => seed.parse().expect("FERROCE_SEED is a number"),
        Err(_) => ChaCha8Rng::from_os_rng().next_u64(),
    };
    println!("replay: FERROCE_SEED={seed} cargo test -p ferroce-driver mutated_files_never_panic");
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut below = |limit: usize| (rng.next_u64() % limit as u64) as usize;
    let mut pcap = End::Big.pcap(0xa1b2_3c4d, 1);
    for n in 0..4 {
        pcap.extend(End::Big.words(&[n, 0, 20, 20]));
        pcap.extend([n as u8; 20]);
    }
    let originals = [pcap, rich_pcapng(End::Little, End::Big).0, rich_pcapng(End::Big, End::Little).0];
    let mut damaged = 0;
    for _ in 0..20_000 {
        let mut bytes = originals[below(3)].clone();
        for _ in 0..1 + below(6) {
            let at = below(bytes.len());
            match below(5) {
                0 => bytes[at] ^= 1 << below(8),
                1 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][below(5)],
                2 => drop(bytes.drain(at..(at + 1 + below(8)).min(bytes.len()))),
                3 => bytes.insert(at, below(256) as u8),
                _ => bytes.truncate(at + 1),
            }
            if bytes.is_empty() {
                bytes.push(0);
            }
        }
        let size = bytes.len();
        let (records, error) = read_bytes(bytes);
        assert!(records.iter().map(|record| record.2.len()).sum::<usize>() <= size);
        damaged += usize::from(error.is_some());
    }
    assert!(damaged > 5_000, "{damaged} of 20000 were noticed");
}
