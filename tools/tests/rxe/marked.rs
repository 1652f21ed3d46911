//! rxe's packets are marked on the path as by a congested switch. rxe gets congestion notification packets, which it
//! ignores: its traffic is undisturbed. `ferroce dissect` and tshark read captures of it.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use ferroce::driver::pcap::Recorder;
use ferroce::{Config, CongestionNotification, Counter, DeviceSpec, PathMtu, QpType};
use serde_json::{Value, json};

use crate::ends::Ends;
use crate::guest::Guest;
use crate::verbs::{self, Tally};
use crate::work::{Side, Terms, Verb};

/// Service and verb, and whether rxe's end sends data, with the engine as the requester and with rxe. Acknowledgements
/// of SENDs and WRITEs are no data; those of atomics have some.
const EXCHANGES: [(QpType, Verb, [bool; 2]); 8] = [
    (QpType::Rc, Verb::Send, [false, true]),
    (QpType::Rc, Verb::Write, [false, true]),
    (QpType::Rc, Verb::WriteImm, [false, true]),
    (QpType::Rc, Verb::Read, [true, true]),
    (QpType::Rc, Verb::FetchAdd, [true, true]),
    (QpType::Uc, Verb::Send, [false, true]),
    (QpType::Uc, Verb::Write, [false, true]),
    (QpType::Ud, Verb::Send, [false, true]),
];

/// Counters of rxe that do not change if its traffic is undisturbed.
const TROUBLES: [&str; 7] = [
    "completer_retry_err",
    "duplicate_request",
    "out_of_seq_request",
    "rcvd_seq_err",
    "retry_exceeded_err",
    "retry_rnr_exceeded_err",
    "send_err",
];

/// The most attempts of an exchange with retransmissions. On a busy machine a guest may pause for a second, which
/// causes them with or without CNPs; CNPs that disturb would cause them every time.
const ATTEMPTS: u32 = 3;

/// Runs all of them, with a CNP for each marked packet; returns the number of exchanges.
pub(crate) fn run(guest: &Guest) -> u32 {
    guest.mark();
    let before = troubles(guest);
    let mut repeated = 0;
    let exchanges = guest.inside(|| {
        let mut tally = Tally::default();
        for (device, ipv6) in [("af_xdp:fe0", false), ("af_xdp:fe0", true), ("udp:10.77.0.1", false)] {
            let mut driver = device
                .parse::<DeviceSpec>()
                .expect("a device")
                .open()
                .expect("fe0 is there")
                .into_driver()
                .expect("a packet driver");
            // Frames of a socket can't be recorded.
            let file = device.starts_with("af_xdp").then(|| {
                let name = format!("marked-{}-{ipv6}.pcapng", std::process::id());
                Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
            });
            if let Some(file) = &file {
                driver = Box::new(Recorder::create(driver, file).expect("the capture can be written"));
            }
            let each = CongestionNotification::default().min_time_between_cnps(Duration::ZERO);
            let config = Config::default().notification(each);
            let mut ends = Ends::with(guest, driver, ipv6, &config);
            for (service, verb, sends_data) in EXCHANGES {
                for asker in Side::BOTH {
                    let terms = Terms::new(service, PathMtu::Mtu1024);
                    let is_told = sends_data[usize::from(asker == Side::Rxe)];
                    let mut outcome = exchange(&mut ends, &terms, (asker, verb), is_told);
                    for _ in 1..ATTEMPTS {
                        let Ok(Outcome::Repaired(what)) = &outcome else { break };
                        println!("{service:?} {}, {device}, {asker:?} asks: {what}; once more", verb.name());
                        repeated += 1;
                        outcome = exchange(&mut ends, &terms, (asker, verb), is_told);
                    }
                    let outcome = outcome.and_then(Outcome::undisturbed);
                    let case = format!("{service:?} {}, rxe's packets marked", verb.name());
                    tally.single(&case, device, asker, outcome);
                }
            }
            let sent = ends.count(Counter::NpCnpSent);
            drop(ends);
            if let Some(file) = file {
                assert_eq!(cnps(&file), sent, "{device}");
                std::fs::remove_file(&file).expect("the capture is there");
            }
        }
        tally.end()
    });
    guest.mark_nothing();
    let after = troubles(guest);
    assert!(repeated > 0 || after == before, "counters of rxe before and after: {before:?}, {after:?}");
    exchanges
}

/// The result of a successful exchange.
enum Outcome {
    Undisturbed(String),
    /// With a retransmission.
    Repaired(String),
}

impl Outcome {
    fn undisturbed(self) -> Result<String, String> {
        match self {
            Outcome::Undisturbed(said) => Ok(said),
            Outcome::Repaired(said) => Err(said),
        }
    }
}

/// One exchange in which rxe gets CNPs or not. Returns their number.
fn exchange(
    ends: &mut Ends,
    terms: &Terms,
    (asker, verb): (Side, Verb),
    is_told: bool,
) -> Result<Outcome, String> {
    let seen = |ends: &Ends| {
        let counters = [Counter::NpEcnMarkedRocePackets, Counter::NpCnpSent];
        counters.map(|counter| ends.count(counter))
    };
    let (before, repairs) = (seen(ends), ends.repairs());
    verbs::alone(ends, terms, (asker, verb), None)?;
    let after = seen(ends);
    let (marked, cnps) = (after[0] - before[0], after[1] - before[1]);
    match () {
        () if ends.repairs() > repairs => {
            Ok(Outcome::Repaired(format!("something was sent twice ({} repairs)", ends.repairs() - repairs)))
        }
        () if terms.service == QpType::Rc && marked == 0 => Err("nothing of rxe's was marked".to_owned()),
        () if cnps > marked || is_told != (cnps > 0) => {
            Err(format!("{cnps} CNPs for {marked} marked packets"))
        }
        () => Ok(Outcome::Undisturbed(format!("{cnps} CNPs for {marked} marked packets"))),
    }
}

/// rxe's error counters so far.
fn troubles(guest: &Guest) -> BTreeMap<String, u64> {
    let said = guest.start("cd /sys/class/infiniband/rxe0/ports/1/hw_counters && grep . *").succeed();
    let counters = said.lines().filter_map(|line| {
        let (name, value) = line.trim().split_once(':')?;
        TROUBLES.contains(&name).then(|| (name.to_owned(), value.parse().expect("a counter")))
    });
    let counters: BTreeMap<String, u64> = counters.collect();
    assert_eq!(counters.len(), TROUBLES.len(), "{said}");
    counters
}

/// The number of CNPs in a capture, each with a complete CNP format, by `ferroce dissect`. tshark must find as many.
fn cnps(file: &Path) -> u64 {
    let dissect = Command::new(env!("CARGO_BIN_EXE_ferroce")).args(["dissect", "--json"]).arg(file).output();
    let dissect = dissect.expect("ferroce runs");
    assert!(dissect.status.success(), "{}", String::from_utf8_lossy(&dissect.stderr));
    let said = String::from_utf8_lossy(&dissect.stdout);
    let mut packets: Vec<Value> =
        said.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect();
    let summary = packets.pop().expect("a summary");
    assert_eq!(summary["summary"]["icrc_ok"], packets.len(), "{summary}");
    let is_cnp = |packet: &&Value| packet["opcode"] == "CNP";
    let whole =
        json!({ "dscp": 48, "becn": true, "psn": 0, "pkey": 0xffff, "payload_len": 16, "ack_req": false });
    for cnp in packets.iter().filter(is_cnp) {
        let differs = whole.as_object().into_iter().flatten().find(|(name, value)| cnp[*name] != **value);
        assert_eq!(differs, None, "{cnp}");
    }
    let found = packets.iter().filter(is_cnp).count() as u64;
    assert_eq!(found, cnps_by_tshark(file), "{}", file.display());
    found
}

/// By number: Wireshark 4.0 uses the name CNP for opcode 128, and calls 129 unknown.
fn cnps_by_tshark(file: &Path) -> u64 {
    let filter = "infiniband.bth.opcode == 129 and infiniband.bth.psn == 0 and infiniband.bth.p_key == 0xffff and \
                  (ip.dsfield.dscp == 48 or ipv6.tclass.dscp == 48)";
    let tshark = Command::new("tshark").arg("-r").arg(file).args(["-Y", filter]).output();
    let tshark = tshark.expect("tshark runs; ./do test installs it");
    assert!(tshark.status.success(), "{}", String::from_utf8_lossy(&tshark.stderr));
    tshark.stdout.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).count() as u64
}
