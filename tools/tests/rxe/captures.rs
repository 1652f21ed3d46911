//! Creates captures of exchanges between the engine and rdma_rxe, for `pcap-fixtures` (`tools/interop/capture` runs
//! this): as seen at the engine's port, in both roles.

use std::path::Path;
use std::time::Duration;

use ferroce::driver::pcap::Recorder;
use ferroce::{DeviceSpec, PathMtu, QpType};

use crate::ends::Ends;
use crate::errors;
use crate::guest::{GUEST, Guest, OURS};
use crate::impaired::{IMPAIRMENTS, PROGRAMS};
use crate::verbs;
use crate::work::{Side, Terms, Verb};

const DEVICE: &str = "af_xdp:fe0";
const PERFTEST_PORT: u16 = 18515;

/// Creates those that are `wanted`, by name, in `folder`; returns their number.
pub(crate) fn make(guest: &Guest, folder: &Path, wanted: &(dyn Fn(&str) -> bool + Sync)) -> u32 {
    std::fs::create_dir_all(folder).expect("a folder for captures");
    let exchanges = guest.inside(|| {
        let mut count = 0;
        for exchange in exchanges() {
            for asker in Side::BOTH {
                let role = if asker == Side::Ferroce { "asks" } else { "answers" };
                let name = format!("ferroce_{role}_{}", exchange.name);
                if !wanted(&name) {
                    continue;
                }
                record(guest, &folder.join(format!("{name}.pcapng")), &exchange, asker);
                println!("{name}");
                count += 1;
            }
        }
        count
    });
    let impaired = guest.inside(|| impaired(guest, folder, wanted));
    let connections =
        if wanted("ferroce_connection_manager") { connection_manager(guest, folder) } else { 0 };
    exchanges + impaired + impaired_programs(guest, folder, wanted) + connections
}

/// Several queue pairs at once, with each impairment.
fn impaired(guest: &Guest, folder: &Path, wanted: &dyn Fn(&str) -> bool) -> u32 {
    let mut count = 0;
    for (how, netem) in IMPAIRMENTS {
        for (what, program) in PROGRAMS {
            for asker in Side::BOTH {
                let role = if asker == Side::Ferroce { "asks" } else { "answers" };
                let name = format!("ferroce_{role}_{how}_{what}");
                if !wanted(&name) {
                    continue;
                }
                let driver = DEVICE
                    .parse::<DeviceSpec>()
                    .expect("a device")
                    .open()
                    .expect("fe0 is there")
                    .into_driver()
                    .expect("a packet driver");
                let file = folder.join(format!("{name}.pcapng"));
                let recorder = Recorder::create(driver, &file).expect("the capture can be written");
                let mut ends = Ends::over(guest, Box::new(recorder), false);
                guest.impair(netem);
                let outcome = program(&mut ends, guest, asker, how);
                guest.impair_nothing();
                ends.run_for(Duration::from_millis(100));
                outcome.unwrap_or_else(|reason| panic!("{name}: {reason}"));
                println!("{name}");
                count += 1;
            }
        }
    }
    count
}

/// perftest's programs with several queue pairs, events, inline data, an SRQ, and small path MTUs.
fn impaired_programs(guest: &Guest, folder: &Path, wanted: &dyn Fn(&str) -> bool) -> u32 {
    let programs = [
        ("loss", "write_bw_q8", "write bw", "ib_write_bw", "-q 8 -s 4096 -n 10", ""),
        ("reorder", "send_bw_events", "send bw", "ib_send_bw", "-s 3000 -n 20", "-e"),
        ("duplicate", "write_lat_inline", "write lat", "ib_write_lat", "-s 64 -n 50", "-I 64"),
        ("corrupt", "send_bw_srq", "send bw", "ib_send_bw", "-q 4 -s 3000 -n 10 -m 1024", "--use-srq"),
        ("delay", "read_bw_m256", "read bw", "ib_read_bw", "-s 3000 -n 20 -m 256", ""),
    ];
    let mut count = 0;
    for (how, what, own, theirs, both, more) in programs {
        let netem = IMPAIRMENTS.iter().find(|(name, _)| *name == how).expect("it is one of them").1;
        for role in ["asks", "answers"] {
            let name = format!("ferroce_{role}_{how}_{what}");
            if !wanted(&name) {
                continue;
            }
            let file = folder.join(format!("{name}.pcapng")).display().to_string();
            let own = format!("perf {own} -d {DEVICE} -u 14 {both} --pcap {file}");
            let theirs = format!("timeout 50 {theirs} -F -x 1 -u 14 {both} {more}");
            guest.impair(netem);
            if role == "asks" {
                let running = guest.start(&theirs);
                guest.wait_for_listener(PERFTEST_PORT);
                guest.start_ferroce(&format!("{own} --perftest {}", GUEST[0])).succeed();
                running.succeed();
            } else {
                let running = guest.start_server(&own);
                guest.start(&format!("{theirs} {}", OURS[0])).succeed();
                running.succeed();
            }
            guest.impair_nothing();
            println!("{name}");
            count += 1;
        }
    }
    count
}

/// The contents of a capture.
struct Exchange {
    name: &'static str,
    course: Course,
}

/// The course of an exchange.
enum Course {
    /// All relevant sizes, with the path MTU of standard Ethernet.
    Plain(QpType, Verb),
    /// With the largest path MTU.
    Largest(Verb),
    /// Enough packets to lose some.
    Lossy(Verb),
    Fault(fn(&mut Ends, Side) -> Result<(), String>),
    /// A refusal, by its name.
    Refused(&'static str),
}

/// Percentage of packets that the guest loses, in each direction.
const LOSS: u32 = 10;

fn exchanges() -> impl Iterator<Item = Exchange> {
    use Course::{Fault, Largest, Lossy, Plain, Refused};
    use QpType::{Rc, Uc, Ud};
    use Verb::{CompareSwap, FetchAdd, Read, Send, SendImm, SendInvalidate, Write, WriteImm};
    [
        ("rc_send", Plain(Rc, Send)),
        ("rc_send_imm", Plain(Rc, SendImm)),
        ("rc_send_inval", Plain(Rc, SendInvalidate)),
        ("rc_write", Plain(Rc, Write)),
        ("rc_write_imm", Plain(Rc, WriteImm)),
        ("rc_read", Plain(Rc, Read)),
        ("rc_fetch_add", Plain(Rc, FetchAdd)),
        ("rc_cmp_swap", Plain(Rc, CompareSwap)),
        ("rc_write_ipv6", Plain(Rc, Write)),
        ("rc_read_ipv6", Plain(Rc, Read)),
        ("uc_send", Plain(Uc, Send)),
        ("uc_write", Plain(Uc, Write)),
        ("uc_write_imm", Plain(Uc, WriteImm)),
        ("ud_send", Plain(Ud, Send)),
        ("ud_send_imm_ipv6", Plain(Ud, SendImm)),
        ("mtu4096_send", Largest(Send)),
        ("mtu4096_write", Largest(Write)),
        ("mtu4096_read", Largest(Read)),
        ("rc_send_loss", Lossy(Send)),
        ("rc_write_loss", Lossy(Write)),
        ("rc_read_loss", Lossy(Read)),
        ("rc_fetch_add_loss", Lossy(FetchAdd)),
        ("rc_rnr_nak", Fault(|ends, side| errors::late_receive(ends, side).map(drop))),
        ("rc_rnr_exceeded", Fault(|ends, side| errors::no_receive(ends, side).map(drop))),
        ("rc_timeout", Fault(|ends, side| errors::gone(ends, side).map(drop))),
        ("rc_nak_access", Refused("WRITE of three packets, wrong R_Key")),
        ("rc_nak_bounds", Refused("READ, one byte before the start")),
        ("rc_nak_no_permission", Refused("WRITE, the queue pair does not allow it")),
        ("rc_nak_too_long", Refused("SEND, longer than the receive")),
    ]
    .into_iter()
    .map(|(name, course)| Exchange { name, course })
}

impl Exchange {
    fn is_ipv6(&self) -> bool {
        self.name.ends_with("_ipv6")
    }

    fn is_lossy(&self) -> bool {
        matches!(self.course, Course::Lossy(_))
    }

    fn run(&self, ends: &mut Ends, asker: Side) -> Result<(), String> {
        match self.course {
            Course::Plain(service, verb) => plain(ends, asker, service, verb),
            Course::Largest(verb) => largest(ends, asker, verb),
            Course::Lossy(verb) => long(ends, asker, verb),
            Course::Fault(run) => run(ends, asker),
            Course::Refused(name) => refusal(ends, asker, name),
        }
    }
}

fn plain(ends: &mut Ends, asker: Side, service: QpType, verb: Verb) -> Result<(), String> {
    verbs::alone(ends, &Terms::new(service, PathMtu::Mtu1024), (asker, verb), None)
}

fn largest(ends: &mut Ends, asker: Side, verb: Verb) -> Result<(), String> {
    let terms = Terms::new(QpType::Rc, PathMtu::Mtu4096);
    verbs::alone(ends, &terms, (asker, verb), Some(&[0, 1, 4096, 4097, 10_000]))
}

fn long(ends: &mut Ends, asker: Side, verb: Verb) -> Result<(), String> {
    let terms = Terms { timeout: 15, ..Terms::new(QpType::Rc, PathMtu::Mtu1024) };
    verbs::alone(ends, &terms, (asker, verb), Some(&[6000; 4]))
}

fn refusal(ends: &mut Ends, asker: Side, name: &str) -> Result<(), String> {
    let refusal = errors::refusals().into_iter().find(|refusal| refusal.name == name).expect("it is there");
    errors::refused(ends, asker, &refusal).map(drop)
}

/// Records one exchange. One with loss is repeated until a relevant packet was lost.
fn record(guest: &Guest, file: &Path, exchange: &Exchange, asker: Side) {
    for _ in 0..10 {
        let driver = DEVICE
            .parse::<DeviceSpec>()
            .expect("a device")
            .open()
            .expect("fe0 is there")
            .into_driver()
            .expect("a packet driver");
        let recorder = Recorder::create(driver, file).expect("the capture can be written");
        let mut ends = Ends::over(guest, Box::new(recorder), exchange.is_ipv6());
        if exchange.is_lossy() {
            guest.lose_packets(LOSS);
        }
        let outcome = exchange.run(&mut ends, asker);
        if exchange.is_lossy() {
            guest.impair_nothing();
        }
        // Packets in flight belong to it.
        ends.run_for(Duration::from_millis(100));
        outcome.unwrap_or_else(|reason| panic!("{}: {reason}", file.display()));
        if !exchange.is_lossy() || ends.repairs() >= 2 {
            return;
        }
    }
    panic!("{}: nothing was lost", file.display());
}

/// rdma_cm's programs, which establish connections.
fn connection_manager(guest: &Guest, folder: &Path) -> u32 {
    let programs = [
        ("rping", "rping", 0, 7174, "-C 2 -S 64"),
        ("rping_ipv6", "rping", 1, 7174, "-C 2 -S 64"),
        ("ucmatose", "ucmatose", 0, 7471, "-C 3 -S 100"),
        ("udaddy", "udaddy", 0, 7174, "-C 3 -S 100"),
    ];
    for (name, program, version, port, options) in programs {
        let (theirs, ours) = (GUEST[version], OURS[version]);
        let is_rping = program == "rping";
        let file = |role: &str| folder.join(format!("ferroce_{role}_{name}.pcapng")).display().to_string();
        let server = if is_rping { format!("rping -s -a {theirs}") } else { program.to_owned() };
        let running = guest.start(&format!("{server} {options}"));
        guest.wait_for_cm_listener(port);
        let own = format!("{program} -d {DEVICE} {options}");
        guest.start_ferroce(&format!("{own} --pcap {} {theirs}", file("asks"))).succeed();
        running.succeed();
        let running = guest.start_server(&format!("{own} --pcap {}", file("answers")));
        let client = if is_rping { format!("rping -c -a {ours}") } else { format!("{program} -s {ours}") };
        guest.start(&format!("{client} {options}")).succeed();
        running.succeed();
        println!("ferroce_asks_{name}\nferroce_answers_{name}");
    }
    2 * programs.len() as u32
}
