//! `ferroce replay`: a capture against the rules, and against the engine in the place of either end.

mod compare;
mod conversation;
mod exchange;
mod judge;
mod lane;
mod memory;
mod message;
mod packet;
mod pairing;
mod play;
mod recorded;
mod renewal;
mod report;
mod rule;
mod translation;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;

use ferroce::wire::ParseError;
use ferroce::{Gid, Nanos, PathMtu, Qpn};
use ferroce_driver::pcap::{LinkType, Reader};

use crate::dissect::layers::Layers;
use crate::failure::Failure;
use crate::pingpong::path_mtu;
use conversation::{Conversation, Foreign, Given};
use exchange::Exchange;
use packet::Seen;
use report::{EndReport, Report};

/// Judges both ends of the conversations in a capture, and plays each against the engine.
///
/// The engine takes the place of a recorded end, under virtual time: what that end's application
/// posted is told from its packets, the other end's packets reach the engine at their recorded times,
/// and what the engine sends is compared with what was recorded. A capture may begin and end
/// anywhere; what it does not tell is not judged.
///
/// Exit status: 0 if everything conforms or differs lawfully, 1 if a rule is broken, 2 if the file
/// can't be read.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A pcap or pcapng file of Ethernet, raw IP or Linux "cooked" packets.
    file: PathBuf,
    /// Put the engine only in the place of this address; can be given several times.
    #[arg(short, long = "role", value_name = "ADDRESS")]
    roles: Vec<IpAddr>,
    /// Path MTU, where the packets do not tell: 256, 512, 1024, 2048 or 4096.
    #[arg(short, long, value_parser = path_mtu)]
    mtu: Option<PathMtu>,
    /// The engine's ACK timeout, 4.096 µs · 2^N, in place of the recorded end's; 0 is none.
    #[arg(short = 'u', long, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=31))]
    qp_timeout: Option<u8>,
    /// Two queue pair numbers that belong together, as 0x11:0x22, where the packets do not tell.
    #[arg(long = "pair", value_name = "QPN:QPN", value_parser = pair)]
    pairs: Vec<(Qpn, Qpn)>,
    /// The report as JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: Args) -> ExitCode {
    match replay(&args) {
        Ok(report) => {
            report.print(args.json);
            ExitCode::from(u8::from(report.violations() > 0))
        }
        Err(failure) => failure.report("replay"),
    }
}

fn replay(args: &Args) -> Result<Report, Failure> {
    let capture = Capture::read(&args.file)?;
    let given = Given { path_mtu: args.mtu, pairs: args.pairs.clone() };
    let conversations = Conversation::find(&capture.packets, &capture.foreign, &given);
    let addresses: Vec<Gid> = conversations.iter().flat_map(|c| c.ends.map(|end| end.gid)).collect();
    if let Some(role) = args.roles.iter().find(|role| !addresses.contains(&Gid::from(**role))) {
        let mut known: Vec<String> = addresses.iter().map(|gid| gid.to_ip().to_string()).collect();
        known.sort();
        known.dedup();
        return Err(Failure::usage(format!(
            "--role {role}: nobody has this address in {}; {}",
            args.file.display(),
            if known.is_empty() {
                "there is no conversation".to_owned()
            } else {
                format!("there are {}", known.join(", "))
            }
        )));
    }
    let mut report = Report::new(&capture, &conversations);
    for (index, conversation) in conversations.iter().enumerate().filter(|(_, c)| !c.is_guessed) {
        for end in [0, 1] {
            let (findings, measured) = judge::judge(conversation, &conversation.events, end, None);
            report.recorded(index, EndReport::recorded(conversation, end, findings, &measured));
        }
    }
    for exchange in Exchange::find(&capture.packets) {
        report.exchange(&exchange);
    }
    for (role, mut places) in plays(&conversations, &args.roles) {
        let mut budget = Budget::default();
        places.retain(|(index, end)| match budget.admit(&conversations[*index]) {
            Ok(()) => true,
            Err(reason) => {
                report.recorded(*index, EndReport::not_played(&conversations[*index], *end, reason));
                false
            }
        });
        let (played, counters) = play::play(&conversations, &places, args.qp_timeout)?;
        for played in played {
            let conversation = &conversations[played.conversation];
            let (mut findings, measured) =
                judge::judge(conversation, &played.events, played.end, Some(played.strict()));
            findings.extend(played.findings.iter().cloned());
            findings.extend(compare::compare(conversation, &played));
            let end = EndReport::played(conversation, &played, findings, &measured);
            report.recorded(played.conversation, end);
        }
        report.counters(role, counters);
    }
    Ok(report)
}

/// What one engine may take, so that no capture takes all of a machine.
#[derive(Default)]
struct Budget {
    queue_pairs: usize,
    bytes: u64,
}

impl Budget {
    const QUEUE_PAIRS: usize = 1024;
    const BYTES: u64 = 1 << 30;

    /// Adds an end of a conversation, or says why it is not played.
    fn admit(&mut self, conversation: &Conversation) -> Result<(), String> {
        if !conversation.knows_path_mtu() {
            return Err("the packets do not tell the path MTU; --mtu does".into());
        }
        let mtu = conversation.path_mtu.bytes() as usize;
        let messages = conversation.messages.iter().flat_map(|messages| &messages.list);
        let bytes = messages
            .map(|message| message.payload_bound(mtu) + message.remote().map_or(0, |(_, _, len)| len));
        let bytes = bytes.fold(self.bytes, u64::saturating_add);
        if bytes > Budget::BYTES || self.queue_pairs == Budget::QUEUE_PAIRS {
            return Err(format!(
                "it would take {bytes} bytes and {} queue pairs: {} and {} are for one engine; --role takes a part",
                self.queue_pairs + 1,
                Budget::BYTES,
                Budget::QUEUE_PAIRS
            ));
        }
        (self.bytes, self.queue_pairs) = (bytes, self.queue_pairs + 1);
        Ok(())
    }
}

/// Who takes which place: an address, with the conversations and ends that are its.
fn plays(conversations: &[Conversation], roles: &[IpAddr]) -> Vec<(IpAddr, Vec<(usize, usize)>)> {
    let mut plays: Vec<(IpAddr, Vec<(usize, usize)>)> = Vec::new();
    for (index, conversation) in conversations.iter().enumerate() {
        for end in [0, 1] {
            let address = conversation.ends[end].gid.to_ip();
            let is_wanted = roles.is_empty() || roles.contains(&address);
            // A group has no engine in its place, and none is asked to talk to one.
            if !is_wanted
                || conversation.is_guessed
                || conversation.ends.iter().any(|end| end.gid.is_multicast())
            {
                continue;
            }
            // A host that talks to itself is played twice, and so is a queue pair that was connected anew.
            let peer = |index: usize, end: usize| {
                let other = conversations[index].ends[1 - end];
                (other.gid, other.qpn)
            };
            let fits = |places: &[(usize, usize)]| {
                let taken =
                    |(other, at): &(usize, usize)| *other == index || peer(*other, *at) == peer(index, end);
                !places.iter().any(taken)
            };
            match plays.iter_mut().find(|(role, places)| *role == address && fits(places)) {
                Some((_, places)) => places.push((index, end)),
                None => plays.push((address, vec![(index, end)])),
            }
        }
    }
    plays
}

/// The RoCE packets of a file.
pub(crate) struct Capture {
    packets: Vec<Rc<Seen>>,
    frames: u64,
    /// Packets with an opcode that is a manufacturer's.
    foreign: Vec<Foreign>,
    /// RoCE packets that are cut short or contradict themselves.
    unreadable: u64,
}

impl Capture {
    fn read(path: &Path) -> Result<Capture, Failure> {
        let mut reader = Reader::open(path)?;
        let mut capture = Capture { packets: Vec::new(), frames: 0, foreign: Vec::new(), unreadable: 0 };
        let mut start = None;
        while let Some(record) = reader.next_record()? {
            capture.frames += 1;
            if let LinkType::Other(number) = record.link_type {
                return Err(Failure::usage(format!(
                    "{}: link type {number} is not supported; Ethernet, raw IP and Linux cooked are",
                    path.display()
                )));
            }
            let Some(layers) = Layers::split(record.link_type, record.captured) else { continue };
            let Some(transport) = layers.transport() else { continue };
            // Virtual time starts with an hour: captures of several queues are not in order.
            let start = *start.get_or_insert(record.timestamp);
            let at = Nanos(record.timestamp.saturating_add(HOUR).saturating_sub(start));
            match Seen::new(capture.frames, at, layers.network, layers.is_roce_v1()) {
                Ok(packet) => capture.packets.push(Rc::new(packet)),
                Err(ParseError::Opcode(opcode)) => {
                    let bth =
                        layers.network.get(transport.bth_start..).and_then(|rest| rest.first_chunk::<12>());
                    let to = bth.map_or(0, |bth| u32::from_be_bytes([0, bth[5], bth[6], bth[7]]));
                    let (source, destination) = (transport.source, transport.destination);
                    let foreign =
                        Foreign { frame: capture.frames, source, destination, to: Qpn::new(to), opcode };
                    capture.foreign.push(foreign);
                }
                Err(_) => capture.unreadable += 1,
            }
        }
        // Captures of several queues are not always in order.
        capture.packets.sort_by_key(|packet| packet.at);
        Ok(capture)
    }
}

const HOUR: u64 = 3_600_000_000_000;

fn pair(text: &str) -> Result<(Qpn, Qpn), String> {
    let number = |text: &str| {
        let parsed = match text.strip_prefix("0x") {
            Some(hex) => u32::from_str_radix(hex, 16),
            None => text.parse(),
        };
        parsed.ok().filter(|number| *number < 1 << 24).map(Qpn::new)
    };
    let numbers = text.split_once(':').and_then(|(a, b)| number(a).zip(number(b)));
    numbers.ok_or_else(|| format!("'{text}': two queue pair numbers, as 0x11:0x22"))
}
