//! What makes a program fast, and what to tune, in the order of what it usually brings.
//!
//! Measure before and after: `ferroce perf` for a pair of hosts, and the counters of both ends (`ferroce stat`). Where
//! [`RetransmittedPkts`](Counter::RetransmittedPkts) grows, packets are lost, and nothing else on this page helps before that
//! is mended.
//!
//! # The build
//!
//! Only release builds are measured here. A program that depends on ferroce sets its own profile: one codegen unit for the packet
//! path is worth 14 to 19 % of the instructions,
//!
//! ```toml
//! [profile.release.package]
//! ferroce = { codegen-units = 1 }
//! ferroce-driver = { codegen-units = 1 }
//! ferroce-wire = { codegen-units = 1 }
//! ```
//!
//! # The way
//!
//! - **Driver.** AF_XDP (`af_xdp:eth0`, feature `af_xdp`) before a UDP socket (`udp:ADDRESS`): no system call per packet, and no copy in the kernel where
//!   the card's driver has zero-copy. On a veth and
//!   other interfaces in copy mode a UDP socket moves more bytes a second, and AF_XDP has the lower latency. `eth0` takes AF_XDP
//!   if the process may have it, and the log says which and why.
//! - **One host.** Processes of one user reach each other by shared memory on `udp:` addresses by themselves (`tx_by_memory` in
//!   [`driver_stats`](crate::Context::driver_stats) counts), three to five times as fast as by the kernel's UDP. `shm:NAME` needs no address.
//! - **Path MTU.** The cost is by the packet. 4096 needs an MTU of 4200 on every hop (`ip link set eth0 mtu 4200`); an MTU of 1500 gives
//!   1024. A handshake and the connection manager take the largest that both ends have.
//! - **Loss.** A lost packet costs all behind it (go-back-N). Between two ferroce ends
//!   [`selective_repeat`](ReadyToReceive::selective_repeat) sends only what was lost. Against congestion: [`Config::congestion`] and
//!   [`Config::notification`] (docs/congestion.md). For UDP sockets a small `net.core.rmem_max` throttles: 4 MiB are enough.
//! - **Window.** [`Config::window`], 512 packets to one destination by default, is above the bandwidth-delay product of 100 Gb/s and 40 µs.
//!   A smaller one loses less in short queues; a longer way needs more. [`QpConfig::window`] is for one queue pair.
//!
//! # The program
//!
//! - **Keep several work requests outstanding.** One at a time waits a round trip for each. READs and atomics are limited by
//!   `max_rd_atomic` (16) besides.
//! - **Signal every nth send.** A completion of the last says that all before are done. Signal at least once in half a send queue,
//!   so that you know when there is room.
//! - **Post and take in batches**: [`post_sends`](Context::post_sends), [`post_recvs`](Context::post_recvs),
//!   [`poll_cq_into`](Context::poll_cq_into).
//! - **Inline what is short.** [`Data::Inline`] saves the look-up of a region; up to [`max_inline_data`](QpConfig::max_inline_data), 64 bytes by default.
//! - **WRITE rather than SEND** where the target is known: no receive has to be posted, and none can be missing. A receive that is missing
//!   costs the RNR timer (0.64 ms by default).
//! - **Register once**, at the start: with an RNIC each registration pins pages. [`exchange`](Context::exchange) puts other memory behind
//!   a region without a new key.
//! - **Poll often.** A peer's request waits for your next poll. A thread that computes for long between two polls wants a [`Runner`].
//! - **Idle.** [`Idle::Spin`] with a core of its own has the least latency; with fewer cores than threads it has the most
//!   ([`threads`](super::threads)).
//! - **Do not shorten the ACK timeout** below the time for which a peer's thread may be off its core (tens of milliseconds on a shared one): a
//!   shorter one sends again what was not lost.
//! - **More cores**: a context for each queue of the interface.
//!
//! Nothing is allocated after set-up, and idle queue pairs cost nothing in the poll.
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
//! `ferroce perf write bw -d eth0` at one host and the same with the host's address at the other; `lat` in place of `bw`, `read`, `send` and
//! `atomic` in place of `write`, options as perftest's. `--compare` measures two devices in turn. In the repository `./do bench --bench wire` sets
//! every message size beside the driver without a protocol and beside the kernel's TCP and UDP. On a busy machine only ratios
//! of one run mean anything.
//!
//! Sources: docs/decisions of the repository says what each design decision has brought, with the benchmark that shows it.

#[cfg(doc)]
use crate::*;
