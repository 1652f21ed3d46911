//! Running it on hosts: what they need, and how to see what goes on.
//!
//! # What a host needs
//!
//! | | |
//! |---|---|
//! | UDP port 4791 | a firewall must let it in (with a UDP socket; AF_XDP sees packets before the firewall). NAT on the way breaks the ICRC. Up to 64 processes of one user share the port of an address (`docs/devices.md`); those of another user, and of other programs, are refused and told who was first |
//! | rights | a UDP socket needs none. AF_XDP needs root, or CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF and enough locked memory (CAP_IPC_LOCK). An RNIC needs /dev/infiniband |
//! | MTU | 1088 for the path MTU 1024, 4160 (IPv4) or 4180 (IPv6) for 4096; INTEROP.md, "MTU" |
//! | receive buffer | `net.core.rmem_max` of 4 MiB, for UDP sockets |
//! | trust | RDMA has neither encryption nor authentication: whoever can send to the host from a peer's address and guesses QPN, PSN and key, which are random, can write where that peer may. Keep it on a network of hosts that you trust. [`Config::drop_access_errors`] keeps a wrong key from ending a connection |
//!
//! The `ferroce` command (crate `ferroce-tools`) tells what is missing: `ferroce devinfo` of this host, `ferroce topo` of the
//! places of its GPUs and cards, `ferroce doctor PEER` of the way to
//! another one, with the remedy.
//!
//! # Counters
//!
//! [`Context::counters`] is what the protocol counts: packets by kind, what was sent again, and each reason for which a packet is
//! dropped. Names are those of `mlx5_ib`'s and `rdma_rxe`'s `hw_counters` where those count the same. [`Context::metrics`] is
//! everything in numbers, and prints itself as Prometheus text. [`Context::export`] lets other processes of the same user read it:
//! `ferroce stat` (a table, `--json`, `--watch 1`, or `--listen` for Prometheus). Collectives are there too, and `ferroce flight` tells
//! which of their ranks hangs or comes late.
//!
//! | what grows | what it means |
//! |---|---|
//! | [`RetransmittedPkts`](Counter::RetransmittedPkts) with [`PacketSeqErr`](Counter::PacketSeqErr) | packets are lost on the way there, or at the peer |
//! | [`LocalAckTimeoutErr`](Counter::LocalAckTimeoutErr) | the end of what was sent is lost, or the peer does not poll for longer than the ACK timeout |
//! | [`OutOfSequence`](Counter::OutOfSequence), [`DuplicateRequest`](Counter::DuplicateRequest) | the same, seen by the receiver |
//! | [`RnrNakRetryErr`](Counter::RnrNakRetryErr), [`SendRnrErr`](Counter::SendRnrErr) | receives are missing at the peer; here |
//! | [`OutOfBuffer`](Counter::OutOfBuffer) | a UC or UD message found no receive |
//! | [`RxStagingFull`](Counter::RxStagingFull) | packets for memory of a GPU found no [staging](super::device_memory#what-it-costs); those of UC and UD are lost, others are asked for again |
//! | [`DeviceErrors`](Counter::DeviceErrors) | copies of a GPU have failed: the log names the queue pair and the reason |
//! | [`RxIcrcEncapsulated`](Counter::RxIcrcEncapsulated) | something on the way changes packets: NAT, a middlebox, a faulty link |
//! | [`RxPkeyMismatch`](Counter::RxPkeyMismatch), [`RxWrongService`](Counter::RxWrongService), [`RxWrongAddress`](Counter::RxWrongAddress) | the ends are set up differently: [`Context::mismatches`] tells what the first packet showed |
//! | [`NpEcnMarkedRocePackets`](Counter::NpEcnMarkedRocePackets), [`RpCnpHandled`](Counter::RpCnpHandled) | switches mark; senders slow down |
//!
//! ```
//! use std::time::Duration;
//! use ferroce::*;
//!
//! fn main() -> Result<(), Error> {
//!     # let mut context = Context::open(Device::open("loopback")?, &Config::default())?;
//!     # let (pd, cq) = (context.alloc_pd()?, context.create_cq(16)?);
//!     # let qp = context.create_qp(&QpConfig::rc(pd, cq))?;
//!     # let own = context.endpoint(qp, 0)?;
//!     # context.handshake(qp, &own, &own)?;
//!     # context.post_recv(qp, &ReceiveWorkRequest { wr_id: 1, sges: &[] })?;
//!     # let (op, data) = (SendOp::Send, Data::Inline(&[]));
//!     # context.post_send(qp, &SendWorkRequest { wr_id: 2, op, data, flags: SendFlags::default() })?;
//!     # context.wait_cq(cq, Duration::from_secs(5))?.expect("a completion").ok()?;
//!     // A context that has received one message.
//!     assert_eq!(context.counters().value(Counter::RdmaRecvs), 1);
//!     let dropped: u64 = context.counters().drops().map(|(_, count)| count).sum();
//!     assert_eq!(dropped, 0);
//!     let text = context.metrics().to_string(); // what a Prometheus server reads
//!     assert!(text.contains("ferroce_rdma_recvs"));
//!     if let Err(error) = context.export() {
//!         eprintln!("`ferroce stat` will not see this process: {error}");
//!     }
//!     Ok(())
//! }
//! ```
//!
//! # The log
//!
//! The library logs through [`tracing`]: at `info` what was opened, with which driver and why; at `warn` what
//! works and should not stay so; at `error` which queue pair a GPU's failed copy has ended, and why; nothing per packet. A program decides by its subscriber what becomes of it, for instance
//! `tracing_subscriber::fmt().with_env_filter(…).init()`. Without one nothing is printed. Errors are returned to the caller.
//!
//! # Captures
//!
//! [`driver::pcap::Recorder`] wraps any driver and writes what passes to a pcapng file (`--pcap FILE` of the command);
//! `tcpdump -s 0 -w run.pcap udp port 4791` sees UDP sockets and peers, and not what AF_XDP takes. `ferroce dissect` reads either packet by packet, and `ferroce replay` checks
//! both ends of it against the rules of the protocol.
//!
//! # Which peers
//!
//! The test suite runs against `rdma_rxe` of Linux 6.1 in a virtual machine, at both ends. No ConnectX was at hand: INTEROP.md has
//! the commands for one, and marks what nobody has tried.

#[cfg(doc)]
use crate::*;
