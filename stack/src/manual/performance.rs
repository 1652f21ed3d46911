//! What to tune, the most effective measures first. Terms: [glossary](super::glossary).
//!
//! Measure before and after: `ferroce perf` for a pair of hosts, and the counters of both ends (`ferroce stat`). If
//! [`RetransmittedPkts`](Counter::RetransmittedPkts) grows, packets are lost: correct that first.
//!
//! # The build
//!
//! All measurements are of release builds. Cargo by default divides each crate into 16 codegen units, which the compiler optimizes
//! separately. With 4 units the packet path executes 14 to 19 % more instructions than with one (counted with callgrind; in the
//! repository `./do bench --bench instructions` counts instructions). Set one in the `Cargo.toml` of your program:
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
//!   [`driver_stats`](crate::Context::driver_stats)). It is faster than the kernel's UDP: WRITEs of 64 KiB and 1 MiB between two
//!   processes moved 63 and 61 Gb/s instead of 30 and 39 on one Xeon host (docs/measurements.md, host memory). To compare:
//!   `ferroce perf write bw -d udp:127.0.0.1` in one terminal, the same with `127.0.0.1` at the end in another; then both with
//!   `-d udp:127.0.0.1,shm=off`. `shm:NAME` needs no address.
//! - **Path MTU.** The cost is per packet. 4096 needs an MTU of 4200 on every hop (on hosts `ip link set eth0 mtu 4200`; for AF_XDP
//!   see INTEROP.md, "MTU"). With an MTU of 1500 the path MTU is 1024. A handshake uses the largest path MTU that both ends
//!   support. The connection manager uses the largest of the connecting end; the other end rejects one that is too large for it.
//! - **Loss.** After a lost packet all later ones are retransmitted (go-back-N). Between two ferroce ends
//!   [`selective_repeat`](ReadyToReceive::selective_repeat) retransmits only the lost ones. For congestion control see
//!   [`Config::congestion`] and [`Config::notification`] (docs/congestion.md). For UDP sockets a small `net.core.rmem_max` limits
//!   throughput: 4 MiB are enough.
//! - **Window.** [`Config::window`] is 512 packets to one destination by default: 524 KB with path MTU 1024, 2.1 MB with 4096. The
//!   bandwidth-delay product of 100 Gb/s and a round trip of 40 µs is 500 KB. A smaller window causes less loss in short queues; a
//!   path with more delay, or a path MTU of 256 or 512, needs a larger one. [`QpConfig::window`] applies to one queue pair.
//!
//! # The program
//!
//! - **Keep several work requests outstanding.** With one at a time each takes a round trip. Of READs and atomics together at most
//!   [`max_rd_atomic`](ReadyToSend::max_rd_atomic) are outstanding (16 by default).
//! - **Signal every nth send.** The completion of the last means that all before it are complete. Signal at least once per half
//!   send queue, so that you know when it has free entries.
//! - **Post and poll in batches**: [`post_sends`](Context::post_sends), [`post_recvs`](Context::post_recvs),
//!   [`poll_cq_into`](Context::poll_cq_into).
//! - **Use inline data for short messages.** [`Data::Inline`], for up to [`max_inline_data`](QpConfig::max_inline_data) bytes (64
//!   by default), saves the look-up of a region.
//! - **WRITE rather than SEND** if the target address is known: no receive is needed. If a SEND finds no
//!   receive, the sender waits for the RNR timer (receiver not ready; 0.64 ms by default) before it retransmits.
//! - **Register once**, at the start: with an RNIC each registration pins pages. [`exchange`](Context::exchange) replaces the
//!   memory of a region and keeps its key.
//! - **Poll often.** A peer's request waits for your next poll. If a thread computes for long between polls, use a [`Runner`].
//! - **Idle.** [`Idle::Spin`] with a dedicated core has the lowest latency; with fewer cores than polling threads it has the
//!   highest latency ([`threads`](super::threads)).
//! - **Do not shorten the ACK timeout** ([how it is rounded](super::connecting#timeouts-and-retries)) below the time for which a
//!   peer's thread may be off its core, tens of milliseconds on a shared core: packets that were not lost would be retransmitted.
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
//! Run `ferroce perf write bw -d eth0` at one host, then the same command with that host's address at the other. `lat` replaces
//! `bw`; `read`, `send` or `atomic` replaces `write`. The options are perftest's. `--compare` measures two devices in turn. In the
//! repository `./do bench --bench wire` measures each message size with ferroce, with the driver alone, and with the kernel's TCP
//! and UDP. On a busy machine only ratios within one run are meaningful.
//!
//! Sources: docs/measurements.md (numbers), benches/README.md (benchmarks), docs/decisions/12-neighbours.md (shared memory),
//! 13-trains.md (segmentation), 17-hot-path.md (instructions), 19-window.md (window).

#[cfg(doc)]
use crate::*;
