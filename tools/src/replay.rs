//! `ferroce replay`: a capture against the rules, and against the engine in the place of either end.

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

/// Judges both ends of the conversations in a capture, and plays each against the engine.
///
/// The engine takes the place of a recorded end, under virtual time: what that end's application
/// posted is told from its packets, the other end's packets reach the engine at their recorded times,
/// and what the engine sends is compared with what was recorded. A capture may begin and end
/// anywhere; what it does not tell is not judged.
///
/// Exit status: 0 if everything conforms or differs lawfully, 1 if a rule is broken, 2 if the file can't be read to
/// its end (what is there is judged), an option does not fit it, or the report can't be written, 3 if there is
/// nothing in it to judge: no request whose ICRC is right, or only some whose pairing would be a guess.
#[derive(clap::Args)]
pub struct Args {
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
    // 1 is for a rule that is broken, and this is none.
    printed.map(|report| report.exit_code()).map_err(|failure| Failure::usage(failure.to_string()))
}

fn replay(args: &Args) -> Result<ReplayReport, Failure> {
    let capture = Capture::read(&args.file)?;
    let given = Given { path_mtu: args.mtu, pairs: args.pairs.clone() };
    let mut progress = Progress::start();
    let conversations = Conversation::find(&capture.packets, &capture.foreign, &given, &mut progress)?;
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
    let congestion = Congestion::of(&capture, &conversations, &args.pairs, &args.congestion)?;
    let mut report = ReplayReport::new(&capture, &conversations, congestion);
    for (index, conversation) in conversations.iter().enumerate().filter(|(_, c)| !c.is_guessed) {
        progress.tell(|| format!("{index} of {} conversations are judged", conversations.len()));
        for end in [0, 1] {
            let (findings, measured) = judge::judge(conversation, &conversation.events, end, None);
            let tells_nothing = report.coverage(index).tells_nothing_of(end);
            report
                .recorded(index, EndReport::recorded(conversation, end, findings, &measured, tells_nothing));
        }
    }
    for exchange in Exchange::find(&capture.packets) {
        report.exchange(&exchange);
    }
    let Cast { plays, left_out, unwanted } = plays(&conversations, &args.roles);
    report.left_out(&conversations, left_out);
    report.unwanted(unwanted);
    let mut taken: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for Play { role, places, areas, .. } in plays {
        let PlayOutcome { played, broken_off, counts } =
            play::play(&conversations, &places, &areas, args.qp_timeout, &mut progress)?;
        report.broken_off(&conversations, broken_off);
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
    Ok(report)
}

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
