//! Makes captures of exchanges between the engine and rdma_rxe, for `pcap-fixtures`
//! (`tools/interop/capture` runs this): as the engine's port sees them, in both roles.

use std::path::Path;
use std::time::Duration;

use ferroce::driver::pcap::Recorder;
use ferroce::{DeviceSpec, PathMtu, QpType};

use crate::ends::Ends;
use crate::errors;
use crate::guest::{GUEST, Guest, OURS};
use crate::verbs;
use crate::work::{Side, Terms, Verb};

const DEVICE: &str = "af_xdp:fe0";

/// Makes all of them in `folder`; returns how many.
pub(crate) fn make(guest: &Guest, folder: &Path) -> u32 {
    std::fs::create_dir_all(folder).expect("a folder for captures");
    let exchanges = guest.inside(|| {
        let mut count = 0;
        for exchange in exchanges() {
            for asker in Side::BOTH {
                let role = if asker == Side::Ferroce { "asks" } else { "answers" };
                let name = format!("ferroce_{role}_{}", exchange.name);
                record(guest, &folder.join(format!("{name}.pcapng")), &exchange, asker);
                println!("{name}");
                count += 1;
            }
        }
        count
    });
    exchanges + connection_manager(guest, folder)
}

/// What a capture holds.
struct Exchange {
    name: &'static str,
    ipv6: bool,
    /// Percent of the packets that the guest loses, each way.
    loss: u32,
    run: fn(&mut Ends, Side) -> Result<(), String>,
}

fn exchanges() -> Vec<Exchange> {
    let base = Exchange { name: "", ipv6: false, loss: 0, run: |_, _| Ok(()) };
    vec![
        Exchange { name: "rc_send", run: |ends, side| plain(ends, side, QpType::Rc, Verb::Send), ..base },
        Exchange {
            name: "rc_send_imm",
            run: |ends, side| plain(ends, side, QpType::Rc, Verb::SendImm),
            ..base
        },
        Exchange {
            name: "rc_send_inval",
            run: |ends, side| plain(ends, side, QpType::Rc, Verb::SendInvalidate),
            ..base
        },
        Exchange { name: "rc_write", run: |ends, side| plain(ends, side, QpType::Rc, Verb::Write), ..base },
        Exchange {
            name: "rc_write_imm",
            run: |ends, side| plain(ends, side, QpType::Rc, Verb::WriteImm),
            ..base
        },
        Exchange { name: "rc_read", run: |ends, side| plain(ends, side, QpType::Rc, Verb::Read), ..base },
        Exchange {
            name: "rc_fetch_add",
            run: |ends, side| plain(ends, side, QpType::Rc, Verb::FetchAdd),
            ..base
        },
        Exchange {
            name: "rc_cmp_swap",
            run: |ends, side| plain(ends, side, QpType::Rc, Verb::CompareSwap),
            ..base
        },
        Exchange {
            name: "rc_write_ipv6",
            ipv6: true,
            run: |ends, side| plain(ends, side, QpType::Rc, Verb::Write),
            ..base
        },
        Exchange {
            name: "rc_read_ipv6",
            ipv6: true,
            run: |ends, side| plain(ends, side, QpType::Rc, Verb::Read),
            ..base
        },
        Exchange { name: "uc_send", run: |ends, side| plain(ends, side, QpType::Uc, Verb::Send), ..base },
        Exchange { name: "uc_write", run: |ends, side| plain(ends, side, QpType::Uc, Verb::Write), ..base },
        Exchange {
            name: "uc_write_imm",
            run: |ends, side| plain(ends, side, QpType::Uc, Verb::WriteImm),
            ..base
        },
        Exchange { name: "ud_send", run: |ends, side| plain(ends, side, QpType::Ud, Verb::Send), ..base },
        Exchange {
            name: "ud_send_imm_ipv6",
            ipv6: true,
            run: |ends, side| plain(ends, side, QpType::Ud, Verb::SendImm),
            ..base
        },
        Exchange { name: "mtu4096_send", run: |ends, side| largest(ends, side, Verb::Send), ..base },
        Exchange { name: "mtu4096_write", run: |ends, side| largest(ends, side, Verb::Write), ..base },
        Exchange { name: "mtu4096_read", run: |ends, side| largest(ends, side, Verb::Read), ..base },
        Exchange { name: "rc_send_loss", loss: 10, run: |ends, side| long(ends, side, Verb::Send), ..base },
        Exchange { name: "rc_write_loss", loss: 10, run: |ends, side| long(ends, side, Verb::Write), ..base },
        Exchange { name: "rc_read_loss", loss: 10, run: |ends, side| long(ends, side, Verb::Read), ..base },
        Exchange {
            name: "rc_fetch_add_loss",
            loss: 10,
            run: |ends, side| long(ends, side, Verb::FetchAdd),
            ..base
        },
        Exchange { name: "rc_rnr_nak", run: |ends, side| errors::late_receive(ends, side).map(drop), ..base },
        Exchange {
            name: "rc_rnr_exceeded",
            run: |ends, side| errors::no_receive(ends, side).map(drop),
            ..base
        },
        Exchange { name: "rc_timeout", run: |ends, side| errors::gone(ends, side).map(drop), ..base },
        Exchange {
            name: "rc_nak_access",
            run: |ends, side| refusal(ends, side, "WRITE of three packets, wrong R_Key"),
            ..base
        },
        Exchange {
            name: "rc_nak_bounds",
            run: |ends, side| refusal(ends, side, "READ, one byte before the start"),
            ..base
        },
        Exchange {
            name: "rc_nak_no_permission",
            run: |ends, side| refusal(ends, side, "WRITE, the queue pair does not allow it"),
            ..base
        },
        Exchange {
            name: "rc_nak_too_long",
            run: |ends, side| refusal(ends, side, "SEND, longer than the receive"),
            ..base
        },
    ]
}

/// All sizes that matter, with the path MTU of the usual Ethernet.
fn plain(ends: &mut Ends, asker: Side, service: QpType, verb: Verb) -> Result<(), String> {
    verbs::alone(ends, &Terms::new(service, PathMtu::Mtu1024), (asker, verb), None)
}

fn largest(ends: &mut Ends, asker: Side, verb: Verb) -> Result<(), String> {
    let terms = Terms::new(QpType::Rc, PathMtu::Mtu4096);
    verbs::alone(ends, &terms, (asker, verb), Some(&[0, 1, 4096, 4097, 10_000]))
}

/// Packets enough to lose some.
fn long(ends: &mut Ends, asker: Side, verb: Verb) -> Result<(), String> {
    let terms = Terms { timeout: 15, ..Terms::new(QpType::Rc, PathMtu::Mtu1024) };
    verbs::alone(ends, &terms, (asker, verb), Some(&[6000; 4]))
}

fn refusal(ends: &mut Ends, asker: Side, name: &str) -> Result<(), String> {
    let refusal = errors::refusals().into_iter().find(|refusal| refusal.name == name).expect("it is there");
    errors::refused(ends, asker, &refusal).map(drop)
}

/// Records one exchange. One with loss is repeated until something was lost that mattered.
fn record(guest: &Guest, file: &Path, exchange: &Exchange, asker: Side) {
    for _ in 0..10 {
        let driver = DEVICE.parse::<DeviceSpec>().expect("a device").open().expect("fe0 is there");
        let recorder = Recorder::create(driver, file).expect("the capture can be written");
        let mut ends = Ends::over(guest, Box::new(recorder), exchange.ipv6);
        if exchange.loss > 0 {
            guest.lose_packets(exchange.loss);
        }
        let outcome = (exchange.run)(&mut ends, asker);
        if exchange.loss > 0 {
            guest.lose_nothing();
        }
        // What is still on its way belongs to it.
        ends.run_for(Duration::from_millis(100));
        outcome.unwrap_or_else(|reason| panic!("{}: {reason}", file.display()));
        if exchange.loss == 0 || ends.repairs() >= 2 {
            return;
        }
    }
    panic!("{}: nothing was lost", file.display());
}

/// rdma_cm's programs, whose connections it sets up.
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
