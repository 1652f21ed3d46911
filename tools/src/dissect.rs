//! `ferroce dissect`: the contents of a capture, packet by packet and as a summary.
//!
//! - `layers.rs`, `tunnel.rs`, `unopened.rs`: from the frame to the transport header; tunnels; frames without a known
//!   RoCE packet
//! - `segments.rs`: captures recorded before segmentation offload, for `replay` too
//! - `record.rs`, `json.rs`: a packet as a line of text; as JSON
//! - `cm.rs`: messages of the connection manager
//! - `psn.rs`, `queue_pairs.rs`: gaps in PSNs; the selection by `--qp`
//! - `summary.rs`: the summary of the capture, its flows and queue pairs

mod cm;
mod json;
pub(crate) mod layers;
mod psn;
mod queue_pairs;
mod record;
pub(crate) mod segments;
mod summary;
mod tunnel;
pub(crate) mod unopened;

use std::io::{self, Cursor, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferroce_driver::pcap::{LinkType, Reader};
use ferroce_wire::cm::CmMessage;
use ferroce_wire::{Bth, ICRC_LEN, Opcode, Packet, ParseError, PathMtu, PayloadRule, Qpn};
use serde::Serialize;
use zerocopy::FromBytes;

use crate::capture_input::{self, CaptureInput};
use crate::diagnosis::{Cause, Diagnosis};
use crate::endpoint::Interrupt;
use crate::failure::Failure;
use crate::output::{JsonArg, Output};
use cm::CmFields;
use layers::{Contents, Layers, Transport};
use queue_pairs::QueuePairs;
use record::{IcrcVerdict, Record};
use segments::Segments;
use summary::Summary;

/// Decodes the RoCE packets of a capture, checks their ICRCs, and summarizes each flow.
///
/// From standard input, packets are printed as they arrive. Ctrl-C ends reading and prints the summary.
///
/// The JSON is one object per line for each RoCE packet, then one with the summary; its timestamps are nanoseconds
/// since 1970.
///
/// Exit status: 0 if every ICRC that could be checked is right, 1 if one is not, 2 if the capture can't be read to its
/// end (the packets until there are shown), has no packet of --qp, or the output can't be written, 130 if it was
/// interrupted before its end.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  ferroce dissect trace.pcapng
  ferroce dissect --bad-only trace.pcap.gz
  tcpdump -U -i eth0 -w - udp port 4791 | ferroce dissect -
  zstd -dc trace.pcap.zst | ferroce dissect --json --qp 0x11,0x12 -")]
pub struct Args {
    /// The capture: a pcap or pcapng file of Ethernet, raw IP or Linux "cooked" packets, optionally compressed by gzip;
    /// - is standard input.
    file: PathBuf,
    #[command(flatten)]
    json: JsonArg,
    /// Print only packets with a wrong ICRC and malformed packets (those with a remark after the ICRC, or "error" in
    /// JSON). NAKs, packets that the capture truncated and manufacturer-specific opcodes are not printed. The summary
    /// covers all packets.
    #[arg(long)]
    bad_only: bool,
    /// Only packets of these queue pairs, also in the summary and the exit status. A packet names only its destination
    /// queue pair (a datagram also its source): the other direction of a connection is shown only if the capture also
    /// has the connection manager's REQ and REP. If it does not, give the queue pairs of both ends: 0x11,0x12.
    #[arg(long = "qp", value_name = "QPN", value_delimiter = ',', value_parser = parse_qpn)]
    qps: Vec<Qpn>,
    /// Print only the summary.
    #[arg(long, conflicts_with = "bad_only")]
    summary: bool,
}

/// Parses a queue pair number.
pub(crate) fn parse_qpn(text: &str) -> Result<Qpn, String> {
    let number = match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16),
        None => text.parse(),
    };
    let qpn = number.ok().filter(|number| *number < 1 << 24 && !text.contains('+')).map(Qpn::new);
    qpn.ok_or_else(|| "must be a queue pair number of 24 bits, as 17 or 0x000011".to_owned())
}

/// Prints the packets of a capture; see [`Args`] for the exit status.
///
/// # Errors
/// The capture can't be read to its end, or the output can't be written.
pub fn run(args: Args) -> Result<ExitCode, Failure> {
    let input = CaptureInput::open(&args.file)?;
    args.json.spare(input.about())?;
    let interrupt = Interrupt::install()?;
    // Status 1 is for a wrong ICRC.
    let opened = args.json.open().map_err(|failure| Failure::usage(failure.to_string()))?;
    let output = SharedOutput(Arc::new(Mutex::new(opened)));
    let pausing = output.clone();
    // If the reader is gone, the next packet shows it.
    let flush = move || drop(pausing.lock().to.flush());
    let mut summary = Summary::default();
    let result = match input.read(interrupt.clone(), flush) {
        Ok((reader, amount)) => {
            let result = dissect(&args, reader, amount.size().is_some(), &mut summary, &output);
            // After a signal, a damaged end is expected.
            if amount.is_cut() && !matches!(result, Err(Error::Output(_))) {
                return Err(Failure::Interrupted);
            }
            result
        }
        Err(_) if interrupt.is_set() => return Err(Failure::Interrupted),
        Err(failure) => return Err(failure),
    };
    match result {
        Ok(()) => {}
        // The reader of the live capture has closed its pipe.
        Err(Error::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => {}
        // Status 1 is for a wrong ICRC.
        Err(Error::Output(error)) => return Err(Failure::usage(format!("{}: {error}", output.lock().name))),
        Err(error) => return Err(Failure::usage(error.to_string())),
    }
    if !args.qps.is_empty() && summary.roce_packets == 0 {
        let named: Vec<_> = args.qps.iter().map(|qpn| format!("{:#08x}", qpn.value())).collect();
        return Err(Failure::usage(format!(
            "--qp {}: no packet of it; `ferroce dissect --summary` without --qp lists the queue pairs of the capture",
            named.join(",")
        )));
    }
    Ok(ExitCode::from(u8::from(summary.icrc_bad > 0)))
}

/// Formats a capture as text and as JSON, discards both, and returns the number of its RoCE packets; for a fuzz target.
///
/// # Errors
/// The capture can't be read to its end.
pub fn check(capture: &[u8]) -> Result<u64, String> {
    let show = |json| {
        let input = Cursor::new(capture.to_vec());
        let reader = Reader::new(Box::new(input), "input".to_owned()).map_err(|error| error.to_string())?;
        let args = Args { file: "-".into(), json, bad_only: false, qps: Vec::new(), summary: false };
        let output = SharedOutput(Arc::new(Mutex::new(Output::nobody())));
        let mut summary = Summary::default();
        dissect(&args, reader, true, &mut summary, &output).map_err(|error| error.to_string())?;
        Ok(summary.roce_packets)
    };
    show(JsonArg::default()).and_then(|_| show(JsonArg::to_stdout()))
}

/// The output of the report. It is flushed when the input pauses.
#[derive(Clone)]
struct SharedOutput(Arc<Mutex<Output>>);

impl SharedOutput {
    fn lock(&self) -> MutexGuard<'_, Output> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Capture(#[from] ferroce_driver::Error),
    #[error("{capture}: link type {number} is not supported; Ethernet, raw IP and Linux cooked are")]
    LinkType { capture: String, number: u16 },
    #[error("output: {0}")]
    Output(#[from] io::Error),
}

fn dissect(
    args: &Args,
    mut reader: Reader,
    is_file: bool,
    summary: &mut Summary,
    output: &SharedOutput,
) -> Result<(), Error> {
    let mut dissector = Dissector::default();
    let mut queue_pairs = QueuePairs::new(&args.qps);
    let (mut unsupported, mut has_reader) = (None, true);
    // A damaged file is still summed up to the damage.
    let end = loop {
        let captured = match reader.next_record() {
            Ok(Some(captured)) => captured,
            Ok(None) => break Ok(()),
            Err(error) => break Err(error),
        };
        summary.frames += 1;
        dissector.start.get_or_insert(captured.timestamp);
        if let LinkType::Other(number) = captured.link_type {
            unsupported = Some(number);
            continue;
        }
        let (layers, transport) = match Contents::of(captured.link_type, captured.captured) {
            Contents::Roce(layers, transport) => (layers, transport),
            Contents::Unopened(name) => {
                summary.count_unopened(name);
                continue;
            }
        };
        let segments = Segments::of(&layers, &transport);
        summary.joined_frames += u64::from(!segments.is_empty());
        for (layers, transport) in segments.packets((layers, transport)) {
            let record = dissector.packet(summary.frames, &captured, &layers, &transport);
            if !queue_pairs.select(&record) {
                continue;
            }
            summary.count(&record);
            let is_bad = record.icrc == IcrcVerdict::Bad || record.is_malformed();
            if args.summary || args.bad_only && !is_bad || !has_reader {
                continue;
            }
            match write_record(args, &mut output.lock().to, &record) {
                // The exit status covers the whole file all the same.
                Err(error) if is_file && error.kind() == io::ErrorKind::BrokenPipe => has_reader = false,
                written => written?,
            }
        }
    };
    if !has_reader {
        return Ok(end?);
    }
    let output = &mut output.lock().to;
    if args.json.is_asked() {
        serde_json::to_writer(&mut *output, &LastLine { summary }).map_err(io::Error::from)?;
        writeln!(output)?;
    } else {
        write!(output, "{summary}")?;
    }
    output.flush()?;
    end?;
    match unsupported {
        Some(number) => Err(Error::LinkType { capture: capture_input::name(&args.file), number }),
        None => Ok(()),
    }
}

fn write_record(args: &Args, output: &mut impl Write, record: &Record) -> io::Result<()> {
    if args.json.is_asked() {
        serde_json::to_writer(&mut *output, record)?;
        writeln!(output)
    } else {
        writeln!(output, "{record}")
    }
}

/// The last line of JSON.
#[derive(Serialize)]
struct LastLine<'a> {
    summary: &'a Summary,
}

/// The state that is kept between packets.
#[derive(Default)]
struct Dissector {
    diagnosis: Diagnosis,
    /// The packet from its network header on, with zeros for the truncated part.
    whole: Vec<u8>,
    /// The time of the first frame.
    start: Option<u64>,
}

impl Dissector {
    /// Decodes a packet of a frame.
    fn packet(
        &mut self,
        number: u64,
        captured: &ferroce_driver::pcap::Record<'_>,
        layers: &Layers<'_>,
        transport: &Transport,
    ) -> Record {
        let start = self.start.unwrap_or(captured.timestamp);
        let mut record = Record::new(number, start, captured, layers, transport);

        let present = layers.network.len();
        // The bytes that the recorder truncated.
        let cut = (captured.original_len as usize).saturating_sub(captured.captured.len());
        let original = present + cut;
        let whole_len = original.max(transport.length_before_cut(present).unwrap_or(0)).min(LONGEST);
        let mut whole = std::mem::take(&mut self.whole);
        whole.clear();
        whole.extend_from_slice(layers.network);
        if present < whole_len {
            whole.resize(whole_len, 0);
        }

        let bth_start = transport.bth_start;
        record.bth = layers
            .network
            .get(bth_start..)
            .and_then(|bytes| Bth::read_from_prefix(bytes).ok())
            .map(|(bth, _)| bth);
        let decoded = match layers.is_roce_v1() {
            true => Packet::decode_grh(&whole),
            false => Packet::decode_ip(&whole),
        };
        match decoded {
            // Without the complete BTH, the opcode is unknown.
            Ok(packet) if record.bth.is_some() => {
                self.decoded(&mut record, &packet, bth_start, present);
            }
            Ok(_) => record.icrc = IcrcVerdict::Truncated,
            Err(error) => {
                record.icrc = verdict_without_opcode(error, transport, &whole, present, &mut record);
                record.has_options = matches!(error, ParseError::IpOptions(_));
                if matches!(error, ParseError::Opcode(_)) && record.icrc == IcrcVerdict::Ok {
                    record.unknown_opcode = true;
                }
                if record.icrc != IcrcVerdict::Truncated || record.bth.is_some() {
                    record.error = Some(error.to_string());
                }
            }
        }
        self.whole = whole;
        record
    }

    /// `present` bytes of the packet were captured.
    fn decoded(&mut self, record: &mut Record, packet: &Packet<'_>, bth_start: usize, present: usize) {
        record.extensions = packet.extensions();
        let mut extensions_end = bth_start + Bth::LEN;
        for extension in packet.opcode.extensions() {
            extensions_end += extension.len();
            if extensions_end > present {
                record.extensions.remove(*extension);
            }
        }
        record.payload_len = Some(packet.payload.len());
        let is_cut = packet.covered().len() + ICRC_LEN > present;
        // If the recorder truncated a frame with several packets, the start of the second one is unknown.
        record.is_joined = is_cut && !fits_a_path_mtu(packet) && is_followed(packet);
        if record.is_joined
            && let PayloadRule::Exactly(len) = packet.opcode.payload()
        {
            record.payload_len = Some(len.into());
        }
        if !record.is_joined {
            record.error = wrong_payload(packet);
        }
        if extensions_end + packet.payload.len() <= present
            && packet.opcode == Opcode::UD_SEND_ONLY
            && packet.bth.dest_qpn() == Qpn::GSI
        {
            match CmMessage::parse(packet.payload) {
                Ok(message) => {
                    self.diagnosis.learn_from_cm(&message);
                    record.cm = Some(CmFields::new(&message));
                }
                Err(error) => record.error = Some(error.to_string()),
            }
        }
        if is_cut {
            record.icrc = IcrcVerdict::Truncated;
        } else {
            record.icrc_found = Some(packet.icrc);
            match packet.check_icrc() {
                Ok(()) => {
                    record.icrc = IcrcVerdict::Ok;
                    self.diagnosis.learn(packet);
                    if packet.bth.transport_version() != 0 {
                        record.error =
                            Some(ParseError::TransportVersion(packet.bth.transport_version()).to_string());
                    }
                }
                Err(ParseError::Icrc { expected, .. }) => {
                    record.icrc = IcrcVerdict::Bad;
                    record.icrc_expected = Some(expected);
                    let found = self.diagnosis.explain(packet);
                    record.previous_cause = found.also_explains_previous;
                    record.set_cause(&found.cause);
                }
                Err(error) => {
                    record.icrc = IcrcVerdict::Unchecked;
                    record.error = Some(error.to_string());
                }
            }
        }
    }
}

/// The greatest length of an IPv6 packet.
const LONGEST: usize = 40 + 65_535;

/// Whether a payload that is too long may be that of a packet and of further packets after it.
fn is_followed(packet: &Packet<'_>) -> bool {
    match packet.opcode.payload() {
        PayloadRule::Exactly(len) => {
            let next = packet.payload.get(usize::from(len) + ICRC_LEN..).map(Bth::read_from_prefix);
            matches!(next, Some(Ok((bth, _))) if bth.pkey() == packet.bth.pkey() && Opcode::from_byte(bth.opcode_byte()).is_some())
        }
        _ => packet.payload.len() >= PathMtu::Mtu256.bytes() as usize,
    }
}

fn fits_a_path_mtu(packet: &Packet<'_>) -> bool {
    let fits = |mtu: PathMtu| packet.opcode.payload().admits(packet.payload.len(), mtu.bytes() as usize);
    PathMtu::ALL.into_iter().any(fits)
}

/// A payload that no path MTU allows.
fn wrong_payload(packet: &Packet<'_>) -> Option<String> {
    let (len, pad) = (packet.payload.len(), packet.bth.pad());
    if !fits_a_path_mtu(packet) {
        return Some(format!("{} with {len} bytes of payload", packet.opcode));
    }
    let right = len.wrapping_neg() & 3;
    (pad != right).then(|| format!("pad {pad} behind {len} bytes of payload: must be {right}"))
}

/// The ICRC can be checked without knowing the opcode, if the lengths are consistent.
fn verdict_without_opcode(
    error: ParseError,
    transport: &Transport,
    bytes: &[u8],
    present: usize,
    record: &mut Record,
) -> IcrcVerdict {
    if !matches!(error, ParseError::Opcode(_) | ParseError::Short { .. }) {
        return IcrcVerdict::Unchecked;
    }
    let Some((found, expected)) = transport.icrc(bytes) else { return IcrcVerdict::Unchecked };
    if transport.end > present {
        return IcrcVerdict::Truncated;
    }
    record.icrc_found = Some(found);
    if found == expected {
        return IcrcVerdict::Ok;
    }
    record.icrc_expected = Some(expected);
    record.set_cause(&Cause::Corrupted);
    IcrcVerdict::Bad
}
