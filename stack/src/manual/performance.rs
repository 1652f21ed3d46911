//! What to tune, the most effective measures first.
//!
//! Measure before and after: `ferroce perf` for a pair of hosts, and the counters of both ends (`ferroce stat`). If
//! [`RetransmittedPkts`](Counter::RetransmittedPkts) grows, packets are lost: correct that first.
//!
//! # The build
//!
//! All measurements are of release builds. The profile is set by the program, not by ferroce: one codegen unit for the packet
//! path saves 14 to 19 % of the instructions:
//!
//! ```toml
//! [profile.release.package]
//! ferroce = { codegen-units = 1 }
//! ferroce-driver = { codegen-units = 1 }
//! ferroce-wire = { codegen-units = 1 }
//! ```
//!
//! # Device and path
//!
//! - **Driver.** AF_XDP (`af_xdp:eth0`, feature `af_xdp`) rather than a UDP socket (`udp:ADDRESS`): no system call per packet,
//!   and no copy in the kernel if the card's driver supports zero-copy. On a veth and other interfaces in copy mode a UDP socket
//!   has the higher throughput, and AF_XDP the lower latency. `eth0` uses AF_XDP if the process has the privileges; the choice
//!   and its reason are logged.
//! - **One host.** Processes of one user on `udp:` addresses use shared memory automatically (counted as `tx_by_memory` in
//!   [`driver_stats`](crate::Context::driver_stats)), three to five times as fast as the kernel's UDP. `shm:NAME` needs no
//!   address.
//! - **Path MTU.** The cost is per packet. 4096 needs an MTU of 4200 on every hop (`ip link set eth0 mtu 4200`); with an MTU
//!   of 1500 it is 1024. A handshake and the connection manager use the largest that both ends support.
//! - **Loss.** After a lost packet all later ones are retransmitted (go-back-N). Between two ferroce ends
//!   [`selective_repeat`](ReadyToReceive::selective_repeat) retransmits only the lost ones. For congestion control see
//!   [`Config::congestion`] and [`Config::notification`] (docs/congestion.md). For UDP sockets a small `net.core.rmem_max` limits
//!   throughput: 4 MiB are enough.
//! - **Window.** [`Config::window`], 512 packets to one destination by default, is above the bandwidth-delay product of 100 Gb/s
//!   and 40 µs. A smaller one causes less loss in short queues; a path with more delay needs a larger one. [`QpConfig::window`]
//!   applies to one queue pair.
//!
//! # The program
//!
//! - **Keep several work requests outstanding.** With one at a time each takes a round trip. READs and atomics are also limited
//!   by `max_rd_atomic` (16).
//! - **Signal every nth send.** The completion of the last means that all before it are complete. Signal at least once per half
//!   send queue, so that you know when it has free entries.
//! - **Post and poll in batches**: [`post_sends`](Context::post_sends), [`post_recvs`](Context::post_recvs),
//!   [`poll_cq_into`](Context::poll_cq_into).
//! - **Use inline data for short messages.** [`Data::Inline`] saves the look-up of a region; up to
//!   [`max_inline_data`](QpConfig::max_inline_data), 64 bytes by default.
//! - **WRITE rather than SEND** if the target address is known: no receive is needed. A missing receive costs the RNR timer (0.64
//!   ms by default).
//! - **Register once**, at the start: with an RNIC each registration pins pages. [`exchange`](Context::exchange) replaces the
//!   memory of a region and keeps its key.
//! - **Poll often.** A peer's request waits for your next poll. If a thread computes for long between polls, use a [`Runner`].
//! - **Idle.** [`Idle::Spin`] with a dedicated core has the lowest latency; with fewer cores than threads it has the highest
//!   ([`threads`](super::threads)).
//! - **Do not shorten the ACK timeout** below the time for which a peer's thread may be off its core (tens of milliseconds on a
//!   shared one): a shorter one retransmits what was not lost.
//! - **More cores**: one context per queue of the interface.
//!
//! No memory is allocated after set-up, and idle queue pairs cost nothing in a poll.
//!
//! ```
//! use ferroce::*;
//!
//! const DEPTH: u64 = 128;
//! const BATCH: usize = 16;
//! const WRITES: u64 = 4096;
//!
//! fn main() -> Result<(), Error> {
//!     # let mut context = Context::open(Device::open("loopback")?, &Config::default())?;
//!     # let (pd, cq) = (context.alloc_pd()?, context.create_cq(16)?);
//!     # let qp = context.create_qp(&QpConfig::rc(pd, cq))?;
//!     # let own = context.endpoint(qp, 0)?;
//!     # context.handshake(qp, &own, &own)?;
//!     # let mr = context.register(pd, Memory::zeroed(4096)?, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
//!     # let memory = context.remote(mr)?;
//!     // A connected queue pair, with a send queue of 128. Sixteen WRITEs in each post, and a completion for the last of them.
//!     let (mut poller, mut room) = (Poller::new(), [WorkCompletion::EMPTY; 8]);
//!     let (mut posted, mut done) = (0, 0);
//!     while done < WRITES {
//!         while posted < WRITES && posted - done + BATCH as u64 <= DEPTH {
//!             let writes: [SendWorkRequest<'_>; BATCH] = std::array::from_fn(|n| SendWorkRequest {
//!                 wr_id: posted + n as u64 + 1,
//!                 op: SendOp::Write(memory.at(64 * n as u64)),
//!                 data: Data::Inline(&[7; 64]),
//!                 flags: SendFlags::default().signaled(n == BATCH - 1),
//!             });
//!             context.post_sends(qp, &writes)?;
//!             posted += BATCH as u64;
//!         }
//!         poller.poll(&mut context)?;
//!         let count = context.poll_cq_into(cq, &mut room)?;
//!         for completion in &room[..count] {
//!             done = completion.ok()?.wr_id;
//!         }
//!     }
//!     assert_eq!(context.counters().value(Counter::RetransmittedPkts), 0);
//!     Ok(())
//! }
//! ```
//!
//! # How to measure
//!
//! `ferroce perf write bw -d eth0` at one host, and the same command with that host's address at the other; `lat` instead of
//! `bw`; `read`, `send` and `atomic` instead of `write`; the options are perftest's. `--compare` measures two devices in turn. In
//! the repository `./do bench --bench wire` compares every message size with the driver without a protocol and with the kernel's
//! TCP and UDP. On a busy machine only ratios within one run are meaningful.
//!
//! Sources: docs/decisions of the repository states the effect of each design decision and its benchmark.

#[cfg(doc)]
use crate::*;
