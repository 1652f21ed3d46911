//! Operation on hosts: what they need, and how to monitor.
//!
//! # What a host needs
//!
//! | | |
//! |---|---|
//! | UDP port 4791 | a firewall must let it in (with a UDP socket; AF_XDP gets packets before the firewall). NAT on the path breaks the ICRC. Up to 64 processes of one user share the port of an address (`docs/devices.md`); processes of another user, and other programs, get an error that names the owner |
//! | privileges | a UDP socket needs none. AF_XDP needs root, or CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF and enough locked memory (CAP_IPC_LOCK). An RNIC needs /dev/infiniband |
//! | MTU | 1088 for the path MTU 1024, 4160 (IPv4) or 4180 (IPv6) for 4096; INTEROP.md, "MTU" |
//! | receive buffer | `net.core.rmem_max` of 4 MiB, for UDP sockets |
//! | trust | RDMA has neither encryption nor authentication: an attacker that can send to the host from a peer's address and guesses QPN, PSN and key, which are random, can write where that peer may. Use it only on a network of trusted hosts. With [`Config::drop_access_errors`] a wrong key does not end a connection |
//!
//! The `ferroce` command (crate `ferroce-tools`) reports what is missing, with the remedy: `ferroce devinfo` shows this host,
//! `ferroce topo` the topology of its GPUs and cards, `ferroce doctor PEER` checks the path to another host.
//!
//! # Counters
//!
//! [`Context::counters`] returns the counters of the protocol: packets by kind, retransmissions, and drops by reason. The names
//! are those of `mlx5_ib`'s and `rdma_rxe`'s `hw_counters` if these count the same. [`Context::metrics`] returns all metrics, and
//! its `Display` is Prometheus text. [`Context::export`] lets other processes of the same user read it: `ferroce stat` (a table,
//! `--json`, `--watch 1`, or `--listen` for Prometheus). It shows collectives too; `ferroce flight` reports which of their ranks
//! hangs or is late.
//!
//! | counter that grows | meaning |
//! |---|---|
//! | [`RetransmittedPkts`](Counter::RetransmittedPkts) with [`PacketSeqErr`](Counter::PacketSeqErr) | packets are lost on the path to the peer, or at the peer |
//! | [`LocalAckTimeoutErr`](Counter::LocalAckTimeoutErr) | the last packets sent were lost, or the peer did not poll for longer than the ACK timeout |
//! | [`OutOfSequence`](Counter::OutOfSequence), [`DuplicateRequest`](Counter::DuplicateRequest) | the same, seen by the receiver |
//! | [`RnrNakRetryErr`](Counter::RnrNakRetryErr), [`SendRnrErr`](Counter::SendRnrErr) | no receive was posted: at the peer; here |
//! | [`OutOfBuffer`](Counter::OutOfBuffer) | no receive was posted for a UC or UD message |
//! | [`RxStagingFull`](Counter::RxStagingFull) | no [staging](super::device_memory#what-it-costs) chunk was free for packets to GPU memory; those of UC and UD are lost, others are requested again |
//! | [`DeviceErrors`](Counter::DeviceErrors) | copies by a GPU failed: the log names the queue pair and the reason |
//! | [`RxIcrcEncapsulated`](Counter::RxIcrcEncapsulated) | packets are modified on the path: NAT, a middlebox, a faulty link |
//! | [`RxPkeyMismatch`](Counter::RxPkeyMismatch), [`RxWrongService`](Counter::RxWrongService), [`RxWrongAddress`](Counter::RxWrongAddress) | the ends are configured differently: [`Context::mismatches`] returns what the first packet showed |
//! | [`NpEcnMarkedRocePackets`](Counter::NpEcnMarkedRocePackets), [`RpCnpHandled`](Counter::RpCnpHandled) | switches mark packets; senders reduce their rate |
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
//!         eprintln!("`ferroce stat` will not show this process: {error}");
//!     }
//!     Ok(())
//! }
//! ```
//!
//! # The log
//!
//! The library logs through [`tracing`]: at `info` which device was opened, with which driver and why; at `warn` conditions that
//! work but should be corrected; at `error` which queue pair a failed GPU copy has ended, and why; nothing per packet. The
//! program's subscriber decides what is printed, for example `tracing_subscriber::fmt().with_env_filter(…).init()`. Without a
//! subscriber nothing is printed. Errors are returned to the caller.
//!
//! # Captures
//!
//! [`driver::pcap::Recorder`] wraps any driver and writes all packets to a pcapng file (`--pcap FILE` of the command);
//! `tcpdump -s 0 -w run.pcap udp port 4791` captures packets of UDP sockets and of peers, but not those that AF_XDP receives.
//! `ferroce dissect` prints either file packet by packet, and `ferroce replay` checks both ends in it against the rules of the
//! protocol.
//!
//! # Which peers
//!
//! The test suite runs against `rdma_rxe` of Linux 6.1 in a virtual machine, at both ends. No ConnectX was available: INTEROP.md
//! has the commands for one, and marks what is untested.

#[cfg(doc)]
use crate::*;
