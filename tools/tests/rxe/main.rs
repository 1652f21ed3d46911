//! The kernel's rdma_rxe in a virtual machine, as the peer.
//!
//! Runs if `FERROCE_RXE_CACHE` names the folder of a built guest (`./do test` sets it for root); otherwise prints why
//! not. One boot serves all cases. If `FERROCE_CAPTURES` names a folder, it creates captures there instead.
//! `FERROCE_RXE_ONLY` names the parts to run, separated by commas: verbs, errors, outrun, impaired, marked, switch,
//! semantics, hardware, ranks, topology, programs, perftest, doctor, loss; for captures their names.

mod captures;
mod doctor;
mod ends;
mod errors;
mod guest;
mod hardware;
mod impaired;
mod marked;
mod outrun;
mod peer;
mod perftest;
mod programs;
mod ranks;
mod semantics;
mod share;
mod switch;
mod topology;
mod verbs;
mod work;
#[allow(dead_code, reason = "the example has a main of its own")]
#[path = "../../../stack/examples/write.rs"]
mod write;

use std::path::Path;

use guest::Guest;
use peer::Peer;

#[test]
fn the_kernels_rdma_rxe() {
    if let Ok(ends) = std::env::var("FERROCE_ENDS") {
        return semantics::inside(&ends);
    }
    if let Ok(device) = std::env::var("FERROCE_REMOVED") {
        return hardware::inside(&device);
    }
    if let Ok(device) = std::env::var("FERROCE_DMA_BUF") {
        return hardware::gpu_inside(&device);
    }
    if let Ok(arguments) = std::env::var("FERROCE_EXAMPLE") {
        return hardware::example(&arguments);
    }
    let Some(guest) = Guest::boot() else { return };
    Peer::start(&guest);
    let only = std::env::var("FERROCE_RXE_ONLY").ok();
    let wanted = |part: &str| only.as_ref().is_none_or(|only| only.split(',').any(|name| name == part));
    if let Some(folder) = std::env::var_os("FERROCE_CAPTURES") {
        let count = captures::make(&guest, Path::new(&folder), &wanted);
        assert!(count > 0, "FERROCE_RXE_ONLY: no capture of that name");
        println!("{count} captures");
        return;
    }
    type Part = fn(&Guest) -> u32;
    let run = |parts: &[(&str, Part)]| -> u32 {
        parts.iter().filter(|(name, _)| wanted(name)).map(|(_, part)| part(&guest)).sum()
    };
    let exchanges = run(&[
        ("verbs", verbs::run),
        ("errors", errors::run),
        ("outrun", outrun::run),
        ("impaired", impaired::run),
        ("marked", marked::run),
        ("switch", switch::run),
        ("semantics", semantics::run),
        ("hardware", hardware::run),
        ("ranks", ranks::run),
        ("topology", topology::run),
    ]);
    let programs = run(&[("programs", programs::run), ("perftest", perftest::run), ("doctor", doctor::run)]);
    let (mut lossy, mut lossy_programs) = (0, 0);
    if wanted("loss") {
        guest.lose_packets(1);
        (lossy, lossy_programs) = (verbs::with_loss(&guest), programs::with_loss(&guest));
        guest.check_losses();
    }
    let all = exchanges + programs + lossy + lossy_programs;
    assert!(all > 0, "FERROCE_RXE_ONLY={}: no part of that name", only.unwrap_or_default());
    println!(
        "{} exchanges of verbs, {lossy} of them with loss, and {} runs of programs with rdma_rxe: all right",
        exchanges + lossy,
        programs + lossy_programs
    );
}
