//! Creates the first corpus of each target from the captures in pcap-fixtures.

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

use ferroce::QpType;
use ferroce::driver::pcap::Reader;
use ferroce::wire::{Packet, Qpn, Service};
use ferroce_collectives::Card;
use ferroce_fuzz::{joined, requester, responder, selective};
// It is built with the flags of the targets, and this crate provides the functions that they call.
use libfuzzer_sys as _;

fn main() -> Result<(), Box<dyn Error>> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let corpus = Corpus(here.join("corpus"));
    for entry in fs::read_dir(here.join("../../pcap-fixtures"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "pcap") {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            seed(&corpus, &path, &name)?;
        }
    }
    exchanges(&corpus)?;
    scenarios(&corpus, &fs::read_to_string(here.join("../../docs/fabric.md"))?)?;
    for (name, input) in selective::seeds() {
        corpus.add("selective", name, &input)?;
    }
    for (name, input) in rings() {
        corpus.add("shm", name, &input)?;
    }
    for target in fs::read_dir(&corpus.0)? {
        let target = target?.path();
        println!("{} seeds in {}", fs::read_dir(&target)?.count(), target.display());
    }
    Ok(())
}

struct Corpus(PathBuf);

impl Corpus {
    fn add(&self, target: &str, name: &str, input: &[u8]) -> Result<(), Box<dyn Error>> {
        let folder = self.0.join(target);
        fs::create_dir_all(&folder)?;
        Ok(fs::write(folder.join(name), input)?)
    }
}

/// The TOML files of the manual.
fn scenarios(corpus: &Corpus, manual: &str) -> Result<(), Box<dyn Error>> {
    let blocks = manual.split("```toml\n").skip(1).filter_map(|rest| Some(rest.split_once("```")?.0));
    for (number, block) in blocks.enumerate() {
        corpus.add("scenario", &format!("manual-{number}"), block.as_bytes())?;
    }
    Ok(())
}

/// Steps of twelve bytes for a ring: action, variant, and a number.
fn rings() -> [(&'static str, Vec<u8>); 2] {
    let step = |what: u8, kind: u8, number: u64| {
        let mut step = [what, kind, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        step[2..10].copy_from_slice(&number.to_le_bytes());
        step
    };
    // Frames in three pieces and in one, each received; then one bit of the next word is changed, and one of the
    // consumer's.
    let good = [step(0, 6, 4096), step(1, 0, 0), step(0, 3, 60), step(1, 0, 0), step(2, 0, 0)];
    let lies = [step(0, 6, 4096), step(3, 0x80, 40), step(1, 0, 0), step(3, 0x81, 1), step(0, 6, 8000)];
    [("frames", good.repeat(40).concat()), ("lies", lies.repeat(8).concat())]
}

/// The inputs from one capture.
fn seed(corpus: &Corpus, path: &Path, name: &str) -> Result<(), Box<dyn Error>> {
    let mut file = fs::read(path)?;
    // The beginning suffices: further records add nothing for the reader.
    file.truncate(4096);
    corpus.add("pcap_reader", name, &file)?;
    let mut frames = Vec::new();
    let mut reader = Reader::open(path)?;
    while let Some(record) = reader.next_record()? {
        frames.push(record.captured.to_vec());
    }
    let mut packets = Vec::new();
    for (number, frame) in frames.iter().enumerate() {
        let packet = Packet::parse(frame)?;
        for target in ["parse", "parse_emit_parse"] {
            corpus.add(target, &format!("{name}-{number}"), frame)?;
        }
        if packet.bth.dest_qpn() == Qpn::GSI {
            corpus.add("cm", &format!("{name}-{number}"), packet.payload)?;
        } else {
            packets.push(packet);
        }
    }
    for (number, window) in frames.windows(2).enumerate() {
        let pair: Vec<&[u8]> = window.iter().map(Vec::as_slice).collect();
        let seeds = [("one", &pair[..1]), ("two", &pair)];
        for (kind, packets) in seeds {
            if let Some(input) = joined::input_of(packets) {
                corpus.add("dissect", &format!("{name}-{number}-{kind}"), &input)?;
            }
        }
    }
    conversations(corpus, name, &packets)
}

/// The requests and responses of each end of each conversation.
fn conversations(corpus: &Corpus, name: &str, packets: &[Packet<'_>]) -> Result<(), Box<dyn Error>> {
    let longest = packets.iter().map(|packet| packet.payload.len()).max().unwrap_or(0);
    let scale = if longest > 1024 { 4 } else { 1 };
    let mut ends: Vec<_> =
        packets.iter().map(|packet| (packet.network().source, packet.bth.dest_qpn())).collect();
    ends.sort_by_key(|(source, qpn)| (source.0, qpn.value()));
    ends.dedup();
    for (number, (source, qpn)) in ends.into_iter().enumerate() {
        let is_request = |packet: &Packet<'_>| {
            packet.network().source == source && packet.bth.dest_qpn() == qpn && packet.opcode.is_request()
        };
        let requests: Vec<Packet<'_>> = packets.iter().filter(|packet| is_request(packet)).copied().collect();
        let Some(first) = requests.first() else { continue };
        let service = match first.opcode.service() {
            Service::Rc => QpType::Rc,
            Service::Uc => QpType::Uc,
            Service::Ud => QpType::Ud,
            Service::Cnp => continue,
        };
        let (name, ipv6) = (format!("{name}-{number}"), source.is_ipv6());
        // As many as an input may have.
        for (part, requests) in requests.chunks(32).enumerate() {
            let input = responder::input_of(service, ipv6, scale, requests);
            corpus.add("responder", &format!("{name}-{part}"), &input)?;
        }
        if service != QpType::Rc {
            continue;
        }
        let is_answer =
            |packet: &Packet<'_>| packet.network().destination == source && !packet.opcode.is_request();
        let both: Vec<Packet<'_>> =
            packets.iter().filter(|packet| is_request(packet) || is_answer(packet)).copied().collect();
        for (part, both) in both.chunks(64).enumerate() {
            corpus.add("requester", &format!("{name}-{part}"), &requester::input_of(ipv6, scale, both))?;
        }
    }
    Ok(())
}

/// One message of each kind; captures of RoCE do not contain them.
fn exchanges(corpus: &Corpus) -> Result<(), Box<dyn Error>> {
    let pingpong = b"\x000000:000011:abcdef:00000000000000000000ffff0a4d000b\0";
    corpus.add("exchange", "pingpong", pingpong)?;
    let control = [
        r#"{"Plan":{"operation":"write","mode":"bw","atomic":"FetchAndAdd","service":"rc","bidirectional":true,"qps":2,"tx_depth":128,"rx_depth":512,"outstanding":16,"timeout":14,"selective_repeat":true,"check":true}}"#,
        r#"{"Connect":{"size":65536,"gid":"::ffff:10.0.0.1","qps":[[17,4096]],"memory":[0,7,65536],"path_mtu":null,"largest_path_mtu":1024,"selective_repeat":true}}"#,
        r#"{"Lap":{"number":1,"messages":[5,5]}}"#,
        r#""Ready""#,
        r#"{"LapDone":{"messages":[5,5]}}"#,
        r#"{"Verified":{"verified":10,"lost":0,"sent":[5,5],"nanoseconds":1000}}"#,
        r#"{"Failed":{"reason":"no"}}"#,
        r#""Alive""#,
    ];
    let mut all = vec![1, 200];
    for (number, json) in control.iter().enumerate() {
        let mut message = vec![1, 40];
        for input in [&mut message, &mut all] {
            input.extend((json.len() as u32).to_be_bytes());
            input.extend(json.as_bytes());
        }
        corpus.add("exchange", &format!("control-{number}"), &message)?;
    }
    corpus.add("exchange", "control", &all)?;
    // Magic, version; then rank, size, nonce and card, or kind, length and contents.
    let frame = |kind: &[u8], words: [u32; 2], rest: &[u8]| {
        let words = [2, words[0], words[1]].map(u32::to_be_bytes).concat();
        [kind, b"frcc", &words, rest].concat()
    };
    let card = [7_u8; Card::LEN];
    corpus.add("exchange", "hello", &frame(&[2], [1, 4], &[&[0_u8; 8][..], &card].concat()))?;
    corpus.add("exchange", "table", &frame(&[3, 1], [1, 4 * Card::LEN as u32], &card.repeat(4)))?;
    corpus.add("exchange", "refusal", &frame(&[3, 1], [2, 4], b"full"))?;
    // Control messages of collectives: magic, version, kind, flags, length, 20 bytes of numbers, a body of 160 bytes.
    for (name, kind, body) in [
        ("hello-of-channel", 1, &[1; 24][..]),
        ("ping", 2, &[]),
        ("pong", 3, &[1; 32]),
        ("abort", 4, b"no more data"),
        ("aborted", 5, &[]),
    ] {
        let mut message =
            [b"\x06frcl\x01", &[kind, 1, body.len() as u8][..], &[0, 0, 0, 1].repeat(5), body].concat();
        message.resize(1 + 8 + 20 + 160, 0);
        corpus.add("exchange", name, &message)?;
    }
    // Call 1, nothing received, 5 elements, root 0: an all-reduce of f32 by a ring.
    let mut header = [0; 33];
    (header[0], header[4], header[16]) = (7, 1, 5);
    header[19..25].copy_from_slice(&[1, 0, 1, 3, 1, 0]);
    corpus.add("exchange", "header", &header)?;
    corpus.add("exchange", "immediate", &[8, 0x40, 0, 0, 1])?;
    corpus.add("exchange", "perftest-version", b"\x04\x006.06\0\0\0\0\0\0\0\0\0\0\0\0")?;
    corpus.add("exchange", "perftest-pages", b"\x04\x01\0\0\x10\0\0\0\0\x40")?;
    corpus.add("exchange", "perftest-mtu", b"\x04\x025\0")?;
    let destination = b"\x04\x030000:0010:000011:b2f5a0:000004d2:00007f6b3c0d1000:\
        00:00:00:00:00:00:00:00:00:00:ff:ff:0a:4d:00:0b:00000000:\0";
    corpus.add("exchange", "perftest-destination", destination)?;
    Ok(())
}
