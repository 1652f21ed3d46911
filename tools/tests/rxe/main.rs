//! The kernel's rdma_rxe in a virtual machine, as the peer.
//!
//! Runs where `FERROCE_RXE_CACHE` names the folder of a built guest (`./do test` sees to that as
//! root); elsewhere it says why not. One boot serves all cases. Where `FERROCE_CAPTURES` names a folder it
//! fills that with captures instead.

mod captures;
mod doctor;
mod ends;
mod errors;
mod guest;
mod peer;
mod perftest;
mod programs;
mod verbs;
mod work;

use std::path::Path;

use guest::Guest;
use peer::Peer;

#[test]
fn the_kernels_rdma_rxe() {
    let Some(guest) = Guest::boot() else { return };
    Peer::start(&guest);
    if let Some(folder) = std::env::var_os("FERROCE_CAPTURES") {
        println!("{} captures", captures::make(&guest, Path::new(&folder)));
        return;
    }
    let exchanges = verbs::run(&guest) + errors::run(&guest);
    let programs = programs::run(&guest) + perftest::run(&guest) + doctor::run(&guest);
    guest.lose_packets(1);
    let (lossy, lossy_programs) = (verbs::with_loss(&guest), programs::with_loss(&guest));
    guest.check_losses();
    println!(
        "{} exchanges of verbs, {lossy} of them with loss, and {} runs of programs with rdma_rxe: all right",
        exchanges + lossy,
        programs + lossy_programs
    );
}
