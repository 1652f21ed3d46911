//! The kernel's rdma_rxe in a virtual machine, as the peer.
//!
//! Runs where `FERROCE_RXE_CACHE` names the folder of a built guest (`./do test` sees to that as
//! root); elsewhere it says why not. One boot serves all cases.

mod guest;
mod programs;

use guest::Guest;

#[test]
fn the_kernels_rdma_rxe() {
    let Some(guest) = Guest::boot() else { return };
    let runs = programs::run(&guest);
    println!("{runs} runs with rdma_rxe");
}
