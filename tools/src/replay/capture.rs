//! Reads the RoCE packets of a file, and counts the other frames.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::rc::Rc;

use ferroce::wire::ParseError;
use ferroce::{Nanos, Qpn};
use ferroce_driver::pcap::LinkType;
use tracing::info;

use super::conversation::Foreign;
use super::packet::{MANUFACTURERS, Seen};
use super::progress::Progress;
use super::sample::Sample;
use crate::capture_input::{self, CaptureInput};
use crate::dissect::layers::{Contents, Layers, Transport};
use crate::dissect::segments::Segments;
use crate::dissect::unopened::Unopened;
use crate::endpoint::Interrupt;
use crate::failure::Failure;

/// The contents of a file.
#[derive(Default)]
pub(super) struct Capture {
    pub(super) packets: Vec<Rc<Seen>>,
    /// Undamaged packets, complete or truncated.
    pub(super) samples: Vec<Sample>,
    pub(super) frames: u64,
    /// Frames that contain several packets.
    pub(super) joined_frames: u64,
    /// Packets with a manufacturer opcode that is not ferroce's.
    pub(super) foreign: Vec<Foreign>,
    /// Packets with a reserved opcode, which is not a manufacturer opcode.
    pub(super) reserved: u64,
    /// Packets with an unknown opcode and a wrong ICRC.
    pub(super) damaged: u64,
    /// RoCE packets that contradict themselves.
    pub(super) unreadable: u64,
    /// RoCE packets that can't be checked, by reason.
    pub(super) unchecked: BTreeMap<&'static str, u64>,
    /// The reason that the file could not be read to its end.
    pub(super) damage: Option<String>,
    /// Whether a signal ended the reading.
    pub(super) is_cut: bool,
    /// Frames without a known RoCE packet, by kind.
    pub(super) unopened: Unopened,
}

impl Capture {
    /// Reads a capture until a signal arrives or memory runs short.
    pub(super) fn read(
        input: CaptureInput,
        path: &Path,
        interrupt: &Interrupt,
        progress: &mut Progress,
    ) -> Result<Capture, Failure> {
        let (mut reader, amount) = input.read(interrupt.clone(), || ())?;
        let mut capture = Capture::default();
        let (mut start, mut unsupported) = (None, None);
        let available = available_memory();
        let mut needed = 0;
        loop {
            let record = match reader.next_record() {
                Ok(Some(record)) => record,
                Ok(None) => break,
                // After a signal, a damaged end is expected.
                Err(_) if amount.is_cut() => break,
                // The recorder may have been killed; the packets so far are judged.
                Err(error) if capture.frames > 0 => {
                    capture.damage = Some(error.to_string());
                    break;
                }
                Err(error) => return Err(error.into()),
            };
            if available.is_some_and(|available| needed > available) {
                capture.damage = Some(format!(
                    "a replay of more packets needs over {} MB of memory, and no more is available; `editcap -c \
                     1000000` splits a capture",
                    needed / 1_000_000
                ));
                break;
            }
            progress.tell(|| {
                let taken = amount.taken();
                let share = amount.size().map_or(String::new(), |size| {
                    format!(" of {} MB ({} %)", size / 1_000_000, taken * 100 / size.max(1))
                });
                let (read, packets) = (taken / 1_000_000, capture.packets.len());
                format!(
                    "read {read}{} with {packets} RoCE packets",
                    if share.is_empty() { " MB" } else { &share }
                )
            });
            capture.frames += 1;
            if let LinkType::Other(number) = record.link_type {
                unsupported = Some(number);
            }
            let (layers, transport) = match Contents::of(record.link_type, record.captured) {
                Contents::Roce(layers, transport) => (layers, transport),
                Contents::Unopened(name) => {
                    capture.unopened.count(name);
                    continue;
                }
            };
            // Virtual time starts at one hour: packets in captures of several queues are not sorted by time.
            let start = *start.get_or_insert(record.timestamp);
            let at = Nanos(record.timestamp.saturating_add(HOUR).saturating_sub(start));
            let is_cut = record.captured.len() < record.original_len as usize;
            let segments = Segments::of(&layers, &transport);
            capture.joined_frames += u64::from(!segments.is_empty());
            for (layers, transport) in segments.packets((layers, transport)) {
                needed += FOR_A_PACKET + FOR_A_BYTE * layers.network.len() as u64;
                capture.take(at, &layers, &transport, is_cut);
            }
        }
        if let Some(number) = unsupported.filter(|_| capture.packets.is_empty()) {
            return Err(Failure::usage(format!(
                "{}: link type {number} is not supported; Ethernet, raw IP and Linux cooked are",
                capture_input::name(path)
            )));
        }
        // From now on a signal ends the judging.
        if interrupt.take() {
            progress.clear();
            info!(
                "the capture is read up to frame {} and now judged; Ctrl-C again ends that",
                capture.frames
            );
            capture.is_cut = amount.is_cut();
        }
        // Packets in captures of several queues are not always sorted by time.
        capture.packets.sort_by_key(|packet| packet.at);
        capture.samples.sort_by_key(|sample| sample.at);
        capture.foreign.sort_by_key(|packet| packet.at);
        Ok(capture)
    }

    /// Takes a RoCE packet, which the recorder may have truncated.
    fn take(&mut self, at: Nanos, layers: &Layers<'_>, transport: &Transport, is_cut: bool) {
        let is_cut = is_cut || transport.length_before_cut(layers.network.len()).is_some();
        let sample = || Sample::of(at, layers, transport);
        match Seen::new(self.frames, at, layers.network, layers.is_roce_v1()) {
            Ok(packet) => {
                self.samples.extend(sample().filter(|_| packet.icrc_is_right));
                self.packets.push(Rc::new(packet));
            }
            Err(ParseError::Opcode(opcode)) if !is_cut => match transport.icrc(layers.network) {
                // Later packets are judged as if this one was not recorded.
                Some((found, expected)) if found == expected && opcode < MANUFACTURERS => self.reserved += 1,
                Some((found, expected)) if found == expected => {
                    let bth =
                        layers.network.get(transport.bth_start..).and_then(|rest| rest.first_chunk::<12>());
                    let to = bth.map_or(0, |bth| u32::from_be_bytes([0, bth[5], bth[6], bth[7]]));
                    let (source, destination) = (transport.network.source, transport.network.destination);
                    let (frame, to) = (self.frames, Qpn::new(to));
                    self.foreign.push(Foreign { frame, at, source, destination, to, opcode });
                }
                // The original opcode is unknown.
                Some(_) => self.damaged += 1,
                None => self.unreadable += 1,
            },
            Err(ParseError::IpOptions(_)) => *self.unchecked.entry("with IPv4 options").or_default() += 1,
            Err(ParseError::Fragment) => *self.unchecked.entry("in IPv4 fragments").or_default() += 1,
            Err(_) if is_cut => {
                self.samples.extend(sample());
                *self.unchecked.entry(CUT_SHORT).or_default() += 1;
            }
            Err(_) => self.unreadable += 1,
        }
    }

    /// Packets with a manufacturer opcode, including ferroce's own.
    pub(super) fn manufacturers_packets(&self) -> usize {
        self.foreign.len() + self.packets.iter().filter(|packet| packet.is_manufacturers()).count()
    }

    /// RoCE packets of any kind.
    pub(super) fn roce_packets(&self) -> u64 {
        let left_out = self.foreign.len() as u64 + self.reserved + self.damaged + self.unreadable;
        self.packets.len() as u64 + left_out + self.unchecked.values().sum::<u64>()
    }
}

/// The measured memory use of a replay: per packet, and per byte of it.
const FOR_A_PACKET: u64 = 1024;
const FOR_A_BYTE: u64 = 2;

/// The memory that is available without swapping, as the kernel estimates it.
fn available_memory() -> Option<u64> {
    let meminfo = fs::read_to_string("/proc/meminfo").ok()?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes << 10)
}

const HOUR: u64 = 3_600_000_000_000;
/// The reason that a truncated packet can't be checked.
pub(super) const CUT_SHORT: &str = "cut short by the recorder";
