//! `ferroce replay`: checks a capture against the rules, and runs the engine in place of either end.
//!
//! Reading and interpreting a capture:
//!
//! - `capture.rs`, `packet.rs`: the file; a packet with its time
//! - `pairing.rs`, `given.rs`: the two directions of a connection; `--pair`
//! - `renewal.rs`: the boundary between two connections with the same queue pair numbers
//! - `conversation.rs`: a connection, its packets with PSNs that do not wrap
//! - `numbering.rs`: the hosts that number their IPv4 packets
//! - `message.rs`: work requests, reassembled from packets
//! - `answers.rs`: responses by PSN
//! - `coverage.rs`: the packets that are judged and played
//!
//! Judging:
//!
//! - `rule.rs`: the rules
//! - `judge.rs`, `judge/`: an end of a connection against the rules
//! - `exchange.rs`: the connection manager
//! - `congestion.rs`, `congestion/`: rates; `sample.rs`: the parts of a packet that a rate needs
//!
//! Playing:
//!
//! - `place.rs`: the assignment of engines to ends
//! - `play.rs`, `lane.rs`, `lane/`: the engine over a loopback port in virtual time; one of its queue pairs
//! - `recorded.rs`, `memory.rs`: the attributes and the memory of the recorded end
//! - `translation.rs`: the engine's queue pair numbers and keys in recorded packets
//! - `compare.rs`: the engine's packets compared with the recorded ones
//!
//! Output: `progress.rs`, `report.rs`.
//!
//! A packet that was lost after the recording point is recognized by the request to resend it (a sequence error NAK, a
//! resumed READ). The engine does not get it either.

mod answers;
mod capture;
mod compare;
mod congestion;
mod conversation;
mod coverage;
mod exchange;
mod given;
mod judge;
mod lane;
mod memory;
mod message;
mod numbering;
mod packet;
mod pairing;
mod place;
mod play;
mod progress;
mod recorded;
mod renewal;
mod report;
mod rule;
mod sample;
mod translation;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use ferroce::{Gid, PathMtu, Qpn};

use crate::capture_input::{self, CaptureInput};
use crate::dissect::parse_qpn;
use crate::endpoint::Interrupt;
use crate::failure::Failure;
use crate::output::JsonArg;
use crate::pingpong::path_mtu;
use capture::Capture;
use congestion::{Congestion, CongestionOptions};
use conversation::{Conversation, Given};
use exchange::Exchange;
use place::{Cast, Place, Play, plays};
use play::PlayOutcome;
use progress::Progress;
use report::{EndReport, ReplayReport};

/// Checks the packets of both ends of each conversation in a capture against the rules of RoCE, and runs ferroce's
/// engine in the place of each end to compare.
///
/// The engine runs in virtual time. The work requests of the recorded end are derived from its packets, the other end's
/// packets reach the engine at their recorded times, and the engine's packets are compared with the recorded ones. A
/// capture may begin and end anywhere; what it does not show is not judged.
///
/// The capture is held in memory, which needs two to six times its size. Ctrl-C ends reading, and the packets read are
/// judged; a second Ctrl-C ends the judging, and the results until then are printed.
///
/// Exit status: 0 if everything conforms or differs only as the standard allows, 1 if a rule is broken, 2 if the
/// capture can't be read to its end (the packets until there are judged), an option does not fit it, or the report
/// can't be written, 3 if there is nothing to judge: no request with a right ICRC, or none that can be assigned to a
/// connection for certain; 130 if it was interrupted and no rule is broken until there.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  ferroce replay trace.pcap.gz
  ferroce replay --role 10.0.0.2 --json trace.pcapng
  tcpdump -U -i eth0 -w - udp port 4791 | ferroce replay -")]
pub struct Args {
    /// The capture: a pcap or pcapng file of Ethernet, raw IP or Linux "cooked" packets, optionally compressed by gzip;
    /// - is standard input.
    file: PathBuf,
    /// Run the engine only in the place of this address; can be given several times.
    #[arg(short, long = "role", value_name = "ADDRESS")]
    roles: Vec<IpAddr>,
    /// Path MTU, if the packets do not show it: 256, 512, 1024, 2048 or 4096.
    #[arg(short, long, value_parser = path_mtu)]
    mtu: Option<PathMtu>,
    /// The engine's ACK timeout, 4.096 µs · 2^N, instead of the recorded end's; 0 is none.
    #[arg(short = 'u', long, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=31))]
    qp_timeout: Option<u8>,
    /// Two queue pairs that are connected to each other, as 0x11:0x22, if the packets do not show it; can be given
    /// several times.
    #[arg(long = "pair", value_name = "QPN:QPN", value_parser = pair)]
    pairs: Vec<(Qpn, Qpn)>,
    #[command(flatten)]
    congestion: CongestionOptions,
    #[command(flatten)]
    json: JsonArg,
}

/// Judges and plays a capture and prints the report; see [`Args`] for the exit status.
///
/// # Errors
/// The file can't be read, an option does not fit it, or the report can't be written.
pub fn run(args: Args) -> Result<ExitCode, Failure> {
    let printed = replay(&args).and_then(|mut report| report.print(&args.json).map(|()| report));
    // Status 1 is for a broken rule.
    printed.map(|report| report.exit_code()).map_err(|failure| match failure {
        Failure::Interrupted => Failure::Interrupted,
        other => Failure::usage(other.to_string()),
    })
}

fn replay(args: &Args) -> Result<ReplayReport, Failure> {
    let input = CaptureInput::open(&args.file)?;
    args.json.spare(input.about())?;
    let interrupt = Interrupt::install()?;
    let mut progress = Progress::start(interrupt.clone());
    let capture = Capture::read(input, &args.file, &interrupt, &mut progress)?;
    let given = Given { path_mtu: args.mtu, pairs: args.pairs.clone() };
    let conversations = Conversation::find(&capture.packets, &capture.foreign, &given, &mut progress)?;
    let addresses: Vec<Gid> = conversations.iter().flat_map(|c| c.ends.map(|end| end.gid)).collect();
    if let Some(role) = args.roles.iter().find(|role| !addresses.contains(&Gid::from(**role))) {
        let mut known: Vec<String> = addresses.iter().map(|gid| gid.to_ip().to_string()).collect();
        known.sort();
        known.dedup();
        return Err(Failure::usage(format!(
            "--role {role}: no conversation in {} has this address; {}",
            capture_input::name(&args.file),
            if known.is_empty() {
                "there is no conversation".to_owned()
            } else {
                format!("there are {}", known.join(", "))
            }
        )));
    }
    let congestion = Congestion::of(&capture, &conversations, &args.pairs, &args.congestion)?;
    let mut report = ReplayReport::new(&capture, &conversations, congestion);
    if capture.is_cut {
        report.interrupted(format!("read up to frame {}", capture.frames));
    }
    match judge_and_play(args, &capture, &conversations, &mut report, &mut progress) {
        // The results so far are printed.
        Err(Failure::Interrupted) => {}
        judged => judged?,
    }
    Ok(report)
}

fn judge_and_play(
    args: &Args,
    capture: &Capture,
    conversations: &[Conversation],
    report: &mut ReplayReport,
    progress: &mut Progress,
) -> Result<(), Failure> {
    let count = conversations.len();
    for (index, conversation) in conversations.iter().enumerate().filter(|(_, c)| !c.is_guessed) {
        for end in [0, 1] {
            progress.step(|| format!("{index} of {count} conversations are judged")).inspect_err(|_| {
                report.interrupted(format!("{index} of {count} conversations judged, and none played"));
            })?;
            let (findings, measured) = judge::judge(conversation, &conversation.events, end, None);
            let tells_nothing = report.coverage(index).tells_nothing_of(end);
            report
                .recorded(index, EndReport::recorded(conversation, end, findings, &measured, tells_nothing));
        }
    }
    for exchange in Exchange::find(&capture.packets) {
        report.exchange(&exchange);
    }
    let Cast { plays, left_out, unwanted } = plays(conversations, &args.roles);
    report.left_out(conversations, left_out);
    report.unwanted(unwanted);
    let mut taken: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    let count = plays.len();
    for (number, Play { role, places, areas, .. }) in plays.into_iter().enumerate() {
        let played = play::play(conversations, &places, &areas, args.qp_timeout, progress);
        let PlayOutcome { played, broken_off, counts } = played.inspect_err(|_| {
            report.interrupted(format!("ferroce in {number} of {count} places"));
        })?;
        report.broken_off(conversations, broken_off);
        for played in played {
            let Place { conversation: index, end } = played.place;
            let conversation = &conversations[index];
            let (mut findings, measured) =
                judge::judge(conversation, &played.events, end, Some(played.strict()));
            findings.extend(played.findings.iter().cloned());
            findings.extend(compare::compare(conversation, &played));
            report.recorded(index, EndReport::played(conversation, &played, findings, &measured));
            taken.entry(index).or_default().push(end);
        }
        report.counters(role, counts);
    }
    for (index, ends) in taken {
        report.packets_not_played(coverage::not_played(&conversations[index], &ends));
    }
    Ok(())
}

fn pair(text: &str) -> Result<(Qpn, Qpn), String> {
    let number = |text| parse_qpn(text).ok();
    let numbers = text.split_once(':').and_then(|(a, b)| number(a).zip(number(b)));
    numbers.ok_or_else(|| format!("'{text}': two queue pair numbers, as 0x11:0x22"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    /// The report contains the results before a signal, and names what was not judged.
    #[test]
    fn a_signal_ends_the_judging() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../pcap-fixtures/rc_write.pcap");
        let args = Cli::try_parse_from(["replay", file]).unwrap().args;
        let interrupt = Interrupt::default();
        let mut progress = Progress::start(interrupt.clone());
        let input = CaptureInput::open(&args.file).unwrap();
        let capture = Capture::read(input, &args.file, &interrupt, &mut progress).unwrap();
        let find = |progress: &mut Progress| {
            Conversation::find(&capture.packets, &capture.foreign, &Given::default(), progress)
        };
        let conversations = find(&mut progress).unwrap();
        let congestion = Congestion::of(&capture, &conversations, &[], &args.congestion).unwrap();
        let mut report = ReplayReport::new(&capture, &conversations, congestion);
        interrupt.set();
        assert!(matches!(find(&mut progress), Err(Failure::Interrupted)));
        let judged = judge_and_play(&args, &capture, &conversations, &mut report, &mut progress);
        assert!(matches!(judged, Err(Failure::Interrupted)));
        assert_eq!(format!("{:?}", report.exit_code()), format!("{:?}", ExitCode::from(130)));
        let report = serde_json::to_value(&report).unwrap();
        assert_eq!(report["interrupted"], "0 of 1 conversations judged, and none played");
        // The signal is consumed: the next one ends the next phase.
        assert!(interrupt.take() && !interrupt.is_set());
    }
}
