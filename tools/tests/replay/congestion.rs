//! The rates of senders compared with those that DCQCN allows: a report, and never a violation.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ferroce::driver::sim::{EcnConfig, LinkConfig};
use ferroce::wire::source_port;
use ferroce::{Config, CongestionControl, CongestionNotification, Counter, PathMtu, Qpn, ReactionState};
use ferroce_driver_test_support::random::Random;
use serde_json::Value;

use crate::limits::limited;
use crate::wild::{Frames, reth, transport};
use crate::world::{Setup, Work, World};
use crate::{Scratch, fixtures, replay, text};

const PRESET: &str = "zhu25p";
const LINE_RATE: u64 = 800_000_000;

/// The simulation: two queue pairs send messages of 8 KiB over a link that marks.
struct Incast {
    name: &'static str,
    /// The congestion control of the sender, if any.
    preset: Option<&'static str>,
    /// Messages of each queue pair.
    messages: usize,
    /// The end whose port is recorded: the sender, or the receiver.
    recorded: usize,
}

/// Those in pcap-fixtures.
const RECORDED: [Incast; 3] = [
    Incast { name: "sim_paced_sender", preset: Some(PRESET), messages: 8, recorded: 0 },
    Incast { name: "sim_paced_receiver", preset: Some(PRESET), messages: 8, recorded: 1 },
    Incast { name: "sim_unheeded_sender", preset: None, messages: 8, recorded: 0 },
];

impl Incast {
    /// Returns the states of the sender's reaction points when its last frame passed.
    fn run(&self, file: &Path) -> Vec<Option<ReactionState>> {
        let link = LinkConfig::default()
            .delay(Duration::from_micros(5))
            .rate(LINE_RATE)
            .queue_limit(1 << 20)
            .ecn(EcnConfig::new(2_000, 20_000, 0.2));
        let control = self.preset.map(|preset| preset.parse().expect("a preset")).unwrap_or_default();
        let sender = Config::default().congestion(control).line_rate(LINE_RATE);
        let receiver = Config::default().notification(CongestionNotification::default());
        let setup = Setup {
            link,
            qps: 2,
            timeout: 14,
            path_mtu: PathMtu::Mtu256,
            configs: [sender, receiver],
            // ECT(0): packets of a sender that ignores CNPs are marked as well.
            traffic_class: 2,
            recorded: self.recorded,
            ..Setup::default()
        };
        let mut world = World::new(&setup, file);
        let mut left = [self.messages; 2];
        while left.iter().any(|left| *left > 0) {
            for (qp, left) in left.iter_mut().enumerate() {
                while *left > 0 && world.outstanding(qp) < 2 {
                    assert!(world.post(0, qp, Work::Write, 8192));
                    *left -= 1;
                }
            }
            world.run(1);
        }
        world.run(usize::MAX);
        let [handled, ignored, retransmitted] =
            world.counters([Counter::RpCnpHandled, Counter::RpCnpIgnored, Counter::RetransmittedPkts]);
        println!("{}: {handled} CNPs handled, {ignored} ignored, {retransmitted} retransmitted", self.name);
        world.reactions
    }
}

/// A report, which must not depend on the comparison except for the part about congestion control.
#[track_caller]
fn report(file: &Path, options: &[&str]) -> Value {
    let compared = replay(file, &[&["--json"], options].concat());
    let plain = replay(file, &["--json"]);
    assert_eq!(compared.status.code(), plain.status.code(), "{}", text(&compared));
    let parse = |output: &std::process::Output| -> Value {
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", text(output)))
    };
    let (compared, mut plain) = (parse(&compared), parse(&plain));
    assert!(plain["congestion"]["comparison"].is_null(), "{plain:#}");
    plain["congestion"] = compared["congestion"].clone();
    assert_eq!(plain, compared);
    compared["congestion"].clone()
}

const COMPARED: [&str; 4] = ["--congestion", PRESET, "--line-rate", "0.8"];

fn senders(congestion: &Value) -> &Vec<Value> {
    congestion["comparison"]["senders"].as_array().expect("senders")
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value:#} is no number"))
}

/// The fixture with this name; `FERROCE_WRITE_CAPTURES=1` with `-- --test-threads=1` generates it again.
fn recorded(incast: &Incast) -> PathBuf {
    let file = fixtures().join("congestion").join(format!("{}.pcapng", incast.name));
    if std::env::var_os("FERROCE_WRITE_CAPTURES").is_some() {
        incast.run(&file);
    }
    file
}

/// A new capture with this many messages of each queue pair.
fn simulated(directory: &Scratch, like: &Incast, messages: usize) -> (PathBuf, Vec<Option<ReactionState>>) {
    let file = directory.0.join(format!("{}.pcapng", like.name));
    let states = Incast { messages, ..*like }.run(&file);
    (file, states)
}

#[test]
fn our_own_sender_is_where_it_is_expected() {
    let directory = Scratch::new("paced");
    let (live, _) = simulated(&directory, &RECORDED[0], 80);
    for (file, most) in [(live, 0.03), (recorded(&RECORDED[0]), 0.03)] {
        let congestion = report(&file, &COMPARED);
        let senders = senders(&congestion);
        assert_eq!(senders.len(), 2, "{congestion:#}");
        for sender in senders {
            let excess = number(&sender["worst"]["excess"]);
            assert!(number(&sender["cnps"]) > 10.0 && excess < most, "{sender:#}");
            let (expected, seen) = (number(&sender["expected"]["mean"]), number(&sender["seen"]["mean"]));
            // It waits for acknowledgements from time to time.
            assert!(seen < expected * (1.0 + most) && seen > expected * 0.85, "{sender:#}");
            assert!(number(&sender["least_us_between_cnps"]) >= 50.0, "{sender:#}");
            let series = sender["series"].as_array().expect("a series");
            assert!(series.len() > 40 && series.len() <= 50, "{}", series.len());
            let sum = |name: &str| series.iter().map(|interval| number(&interval[name])).sum::<f64>();
            assert_eq!(sum("cnps"), number(&sender["cnps"]), "{sender:#}");
            let line_rate = LINE_RATE as f64 * (1.0 + 1e-9);
            assert!(series.iter().all(|interval| number(&interval["expected"]) <= line_rate), "{sender:#}");
        }
        println!("{}: {congestion:#}", file.display());
    }
}

/// A capture at the engine's own port has all inputs of its reaction points, with their times.
#[test]
fn the_expected_rate_ends_at_that_of_the_engine() {
    let directory = Scratch::new("ends");
    for preset in ["paper", "zhu25p,rpg_byte_reset=20000", "mlx25", "hpcc100,rpg_byte_reset=9000", "mlx5"] {
        let incast = Incast { preset: Some(preset), ..RECORDED[0] };
        let (file, states) = simulated(&directory, &incast, 40);
        let congestion = report(&file, &["--congestion", preset, "--line-rate", "0.8"]);
        let of = |sender: &Value| {
            let expected = &sender["expected"];
            (number(&expected["last"]), number(&expected["target"]), number(&expected["alpha"]))
        };
        let mut expected: Vec<_> = senders(&congestion).iter().map(of).collect();
        let states = states.into_iter().map(|state| state.expect("a reaction point"));
        let mut found: Vec<_> =
            states.map(|state| (state.rate as f64, state.target as f64, state.alpha)).collect();
        expected.sort_by(|a, b| a.0.total_cmp(&b.0));
        found.sort_by(|a, b| a.0.total_cmp(&b.0));
        for (expected, found) in expected.into_iter().zip(found) {
            assert_eq!((expected.0, expected.1), (found.0, found.1), "{preset}");
            // It decays in other steps.
            assert!((expected.2 - found.2).abs() < 1e-12, "{preset}: {} and {}", expected.2, found.2);
        }
        assert!(number(&congestion["cnps"]) > 20.0, "{preset}");
        println!(
            "{preset}: {} CNPs, worst excess {}",
            congestion["cnps"],
            senders(&congestion)[0]["worst"]["excess"]
        );
    }
}

#[test]
fn a_sender_that_ignores_cnps_is_far_beyond_what_is_expected() {
    let directory = Scratch::new("unheeded");
    let (live, _) = simulated(&directory, &RECORDED[2], 80);
    for (file, least) in [(live, 2.5), (recorded(&RECORDED[2]), 0.25)] {
        let congestion = report(&file, &COMPARED);
        assert_eq!(senders(&congestion).len(), 2, "{congestion:#}");
        for sender in senders(&congestion) {
            assert!(number(&sender["worst"]["excess"]) > least, "{sender:#}");
            assert!(
                number(&sender["seen"]["mean"]) > 1.5 * number(&sender["expected"]["mean"]),
                "{sender:#}"
            );
        }
        // It breaks no rule.
        let output = replay(&file, &COMPARED);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output));
        assert!(text(&output).trim_end().ends_with("\ndiffers lawfully"), "{}", text(&output));
    }
}

/// The capture of the receiver's port has the marks, and its CNPs.
#[test]
fn the_cnps_of_a_receiver_are_reported() {
    let file = recorded(&RECORDED[1]);
    let congestion = report(&file, &COMPARED);
    let receivers = congestion["comparison"]["receivers"].as_array().expect("receivers");
    assert_eq!(receivers.len(), 1, "{congestion:#}");
    let receiver = &receivers[0];
    assert_eq!((&receiver["address"], &receiver["queue_pairs_told"]), (&"10.9.0.2".into(), &2.into()));
    assert!(number(&receiver["marked"]) > number(&receiver["cnps"]), "{receiver:#}");
    assert_eq!(receiver["cnps"], congestion["cnps"]);
    assert!(number(&receiver["least_us_to_queue_pair"]) >= 50.0, "{receiver:#}");
    assert!(number(&receiver["least_us_to_host"]) < 50.0, "{receiver:#}");
    let marked: f64 = senders(&congestion).iter().map(|sender| number(&sender["marked"])).sum();
    assert_eq!(marked, number(&receiver["marked"]), "{congestion:#}");
}

/// TV3 of docs/protocol.md §3: one frame, a CNP for a sender without data.
#[test]
fn the_cnp_of_a_connectx_lowers_the_expected_rate() {
    let file = fixtures().join("congestion/connectx_cnp.pcap");
    let plain = text(&replay(&file, &[]));
    assert!(plain.contains("\n1 CNPs to 1 queue pairs; --congestion PRESET compares"), "{plain}");
    for preset in ["paper", "zhu25", "zhu25p", "mlx25", "hpcc100", "mlx5"] {
        let congestion = report(&file, &["--congestion", preset, "--line-rate", "25"]);
        let [sender] = &senders(&congestion)[..] else { panic!("{congestion:#}") };
        assert_eq!((&sender["address"], &sender["queue_pair"]), (&"10.0.18.1".into(), &0x118.into()));
        assert_eq!((&sender["cnps"], &sender["packets"]), (&1.into(), &0.into()));
        // The rules of mlx cut some time later.
        let last = number(&sender["expected"]["last"]) / 25e9;
        assert!((0.5..0.9).contains(&last), "{preset}: {last}");
        let said = text(&replay(&file, &["--congestion", preset, "--line-rate", "25"]));
        let parameters = preset.parse::<CongestionControl>().expect("a preset").to_string();
        assert!(said.contains(&format!("congestion control {preset}: {parameters}\n")), "{said}");
        assert!(said.contains("line rate 25.000 Gb/s, given\n"), "{said}");
    }
    let assumed = text(&replay(&file, &["--congestion", "paper"]));
    assert!(assumed.contains("line rate 100.000 Gb/s, assumed"), "{assumed}");
}

/// A recorder may truncate packets: the lengths are those of the headers.
#[test]
fn packets_that_were_cut_count_in_full() {
    let directory = Scratch::new("cut");
    let file = directory.0.join("cut.pcap");
    let whole = Frames::read(&recorded(&RECORDED[0])).expect("Ethernet frames");
    whole.write(&file);
    let expected = report(&file, &COMPARED);
    whole.cut(64).write(&file);
    let cut = report(&file, &COMPARED);
    assert_eq!(cut, expected);
}

#[test]
fn a_line_rate_is_estimated_and_said_to_be() {
    let estimated = report(&recorded(&RECORDED[0]), &["--congestion", "mlx5"]);
    let line_rate = &estimated["comparison"]["line_rate"];
    assert_eq!(
        (&line_rate["rate"], &line_rate["origin"]["known"]),
        (&1_000_000_000_u64.into(), &"estimated".into())
    );
    let seen = number(&line_rate["origin"]["seen"]);
    assert!(seen > 0.4e9 && seen < 1e9, "{line_rate:#}");
    let said = text(&replay(&recorded(&RECORDED[0]), &["--congestion", "mlx5"]));
    assert!(said.contains("line rate 1.000 Gb/s, estimated: the next Ethernet rate above 0."), "{said}");
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let file = recorded(&RECORDED[0]);
    for (options, reason) in [
        (&["--congestion", "off"][..], "a preset of DCQCN to compare with"),
        (&["--congestion", "mlx6"], "mlx5"),
        (&["--congestion", "mlx5,rpg_gd=99"], "rpg_gd"),
        (&["--congestion", "mlx5", "--line-rate", "0"], "0.001 to 4000"),
        (&["--congestion", "zhu25", "--line-rate", "0.01"], "rpg_min_rate"),
        (&["--line-rate", "25"], "--congestion"),
        (&["--series"], "--congestion"),
    ] {
        let output = replay(&file, options);
        assert_eq!(output.status.code(), Some(2), "{options:?}: {}", text(&output));
        assert!(text(&output).contains(reason), "{options:?}: {}", text(&output));
    }
}

fn cnp(to: u32) -> Vec<u8> {
    transport(0x81, to, 0, &[0; 16])
}

/// An RDMA WRITE Only of 8 bytes over UC.
fn write(to: u32, psn: u32) -> Vec<u8> {
    transport(0x2a, to, psn, &[reth(0x1000, 7, 8), vec![5; 8]].concat())
}

fn headers() -> Frames {
    Frames::read(&fixtures().join("rc_write.pcap")).expect("a pcap file")
}

/// A UC sender receives only CNPs, so only these name its queue pair.
#[test]
fn cnps_find_the_flow_that_they_are_for() {
    let directory = Scratch::new("one-way");
    let file = directory.0.join("one-way.pcap");
    let options = ["--congestion", "paper", "--line-rate", "10"];
    let found = |frames: Frames, options: &[&str]| -> Vec<(Option<u64>, u64, u64)> {
        frames.write(&file);
        let congestion = report(&file, options);
        let of = |sender: &Value| {
            let packets = sender["packets"].as_u64().expect("packets");
            (sender["queue_pair"].as_u64(), packets, sender["cnps"].as_u64().expect("CNPs"))
        };
        let mut found: Vec<_> = senders(&congestion).iter().map(of).collect();
        found.sort_unstable();
        found
    };
    let alone = headers().talk([(false, write(0x22, 1)), (true, cnp(0x11)), (false, write(0x22, 2))]);
    assert_eq!(found(alone, &options), [(Some(0x11), 2, 1)]);
    let two = headers().talk([
        (false, write(0x22, 1)),
        (false, write(0x23, 1)),
        (false, write(0x23, 2)),
        (true, cnp(0x11)),
        (true, cnp(0x12)),
    ]);
    // The flows of the CNPs are unknown.
    let unknown = [(None, 1, 0), (None, 2, 0), (Some(0x11), 0, 1), (Some(0x12), 0, 1)];
    assert_eq!(found(two.clone(), &options), unknown);
    assert!(
        text(&replay(&file, &options))
            .contains("qp ?: the queue pair of the sender and its CNPs are unknown")
    );
    let told = [&options[..], &["--pair", "0x11:0x23"]].concat();
    assert_eq!(found(two.clone(), &told), [(Some(0x11), 2, 1), (Some(0x12), 1, 1)]);
    // The UDP port that verbs compute from both numbers.
    let mut ports = two;
    for (number, from, to) in [(1, 0x12, 0x22), (2, 0x11, 0x23), (3, 0x11, 0x23)] {
        let port = source_port(0, Qpn::new(from), Qpn::new(to));
        ports.set_port(number, port);
    }
    assert_eq!(found(ports, &options), [(Some(0x11), 2, 1), (Some(0x12), 1, 1)]);
}

/// A datagram names its queue pair, and acknowledgements are no data.
#[test]
fn datagrams_are_data_and_acknowledgements_are_not() {
    let directory = Scratch::new("datagrams");
    let file = directory.0.join("datagrams.pcap");
    let deth = [0x11, 0x11, 0x11, 0x11, 0, 0, 0, 0x33];
    let datagram = transport(0x64, 0x44, 1, &[&deth[..], &[9; 64]].concat());
    let ack = transport(0x11, 0x55, 1, &[0x1f, 0, 0, 1]);
    let mut frames = headers().talk([(false, datagram), (true, ack), (true, cnp(0x33))]);
    frames.write(&file);
    let congestion = report(&file, &["--congestion", "paper", "--line-rate", "10"]);
    let [sender] = &senders(&congestion)[..] else { panic!("{congestion:#}") };
    assert_eq!(
        (&sender["queue_pair"], &sender["packets"], &sender["cnps"]),
        (&0x33.into(), &1.into(), &1.into())
    );
    // Ethernet, IPv4, UDP, BTH, DETH, payload, ICRC.
    assert_eq!(sender["bytes"], 14 + 20 + 8 + 12 + 8 + 64 + 4);
    frames.wrap(1, &[0x81, 0, 0x60, 100]);
    frames.write(&file);
    let tagged = report(&file, &["--congestion", "paper", "--line-rate", "10"]);
    assert_eq!(senders(&tagged)[0]["bytes"], 14 + 4 + 20 + 8 + 12 + 8 + 64 + 4);
}

#[test]
fn thousands_of_senders_are_bounded_and_no_time_is_too_odd() {
    let directory = Scratch::new("hostile");
    let file = directory.0.join("hostile.pcap");
    let options = ["--congestion", "mlx5"];
    // Each step of a sender's time has a cost.
    let mut spread = headers().many(8000, |number| cnp(0x100 + number % 4000));
    spread.set_times(|number| number * 10_000_000_000);
    spread.write(&file);
    let output = limited(&file, &["--cpu=20"], &options);
    assert_eq!(output.status.code(), Some(3), "{}", text(&output));
    headers().many(5000, |number| cnp(0x100 + number)).write(&file);
    let said = text(&replay(&file, &options));
    assert!(
        said.contains("904 packets left out: of more than 4096 senders the first are compared"),
        "{said}"
    );
    assert!(said.contains("and 4064 more, which --json has"), "{said}");
    assert_eq!(senders(&report(&file, &options)).len(), 4096);
    // In reverse order, all at once, and years apart.
    let traffic = |number: u32| if number.is_multiple_of(3) { cnp(0x11) } else { write(0x22, number) };
    let mut frames = headers().talk((0..600).map(|number: u32| (number.is_multiple_of(3), traffic(number))));
    for times in [
        |number: u64| (600 - number) * 1000,
        |_| 0,
        |number| number * 100_000_000_000,
        |number: u64| if number.is_multiple_of(2) { 0 } else { u64::from(u32::MAX) * 500_000_000 },
    ] {
        frames.set_times(times);
        frames.write(&file);
        for preset in ["paper", "zhu25", "mlx5", "hpcc100,rpg_byte_reset=1"] {
            let congestion = report(&file, &["--congestion", preset, "--line-rate", "400"]);
            let [sender] = &senders(&congestion)[..] else { panic!("{congestion:#}") };
            assert_eq!((&sender["cnps"], &sender["packets"]), (&200.into(), &400.into()));
            let rate = number(&sender["expected"]["last"]);
            assert!(rate > 0.0 && rate <= 400e9, "{sender:#}");
        }
    }
}

/// The lengths, numbers and opcodes of a truncated packet can't be checked by its ICRC.
#[test]
fn nothing_in_a_cut_packet_is_trusted() {
    let directory = Scratch::new("random");
    let file = directory.0.join("random.pcap");
    let mut random = Random::from_env("FERROCE_CONGESTION_SEED");
    let whole = Frames::read(&recorded(&RECORDED[0])).expect("Ethernet frames").part(0, 120);
    for turn in 0..60 {
        let mut frames = whole.cut([64, 80][turn % 2]);
        for _ in 0..300 {
            let (number, at) = (1 + random.below(120) as usize, random.below(62) as usize);
            frames.set_byte(number, at, random.below(256) as u8);
        }
        frames.write(&file);
        let output = replay(&file, &["--congestion", "zhu25,rpg_byte_reset=1000"]);
        assert!(
            matches!(output.status.code(), Some(0 | 3)),
            "FERROCE_CONGESTION_SEED={} cargo test -p ferroce-tools --test replay:\n{}",
            random.seed(),
            text(&output)
        );
    }
}

/// The manual shows the command's output.
#[test]
fn the_manual_shows_a_report() {
    let manual = std::fs::read_to_string(fixtures().join("../docs/congestion.md")).expect("the manual");
    let said = text(&replay(&recorded(&RECORDED[2]), &["--congestion", "zhu25p", "--line-rate", "0.8"]));
    let lines: Vec<&str> = said
        .lines()
        .skip_while(|line| !line.starts_with("congestion control"))
        .take_while(|line| !line.is_empty())
        .collect();
    assert!(lines.len() > 7, "{said}");
    assert!(manual.contains(&lines.join("\n")), "docs/congestion.md must have:\n{}", lines.join("\n"));
}
