//! Operation on hosts: what they need, and how to monitor. Terms: [glossary](super::glossary).
//!
//! # What a host needs
//!
//! | | |
//! |---|---|
//! | UDP port 4791 | a firewall must accept it for a UDP socket (AF_XDP gets packets before the firewall). NAT on the path breaks the ICRC. Up to 64 processes of one user share the port of an address (`docs/devices.md`); processes of another user, and other programs, get an error that names the owner |
//! | privileges | a UDP socket needs none. AF_XDP needs root, or CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF and enough locked memory (CAP_IPC_LOCK). An RNIC needs /dev/infiniband |
//! | MTU | for the path MTU 1024: 1088 with IPv4, 1280 with IPv6 (IPv6 allows no less). For 4096: 4160 and 4180. 4200 is enough for all peers (INTEROP.md, "MTU") |
//! | receive buffer | for UDP sockets 4 MiB: `sysctl -w net.core.rmem_max=4194304` |
//! | trust | RDMA has neither encryption nor authentication: an attacker that can send to the host from a peer's address and guesses QPN, PSN and key, which are random, can write where that peer may. Use it only on a network of trusted hosts. With [`Config::drop_access_errors`] a wrong key does not end a connection |
//!
//! The `ferroce` command (crate `ferroce-tools`) reports what is missing, with the remedy: `ferroce devinfo` shows this host,
//! `ferroce topo` the topology of its GPUs and cards, `ferroce doctor PEER` checks the path to another host.
//!
//! # Counters
//!
//! [`Context::counters`] returns the counters of the protocol: packets by kind, retransmissions, and drops by reason. If the
//! kernel driver `mlx5_ib` or `rdma_rxe` counts the same events in its sysfs directory `hw_counters`, the name is the same.
//! [`Context::metrics`] returns all metrics, and its `Display` is Prometheus text. [`Context::export`] lets other processes of the
//! same user, and root, read them: `ferroce stat` prints them (a table, `--json`, `--watch 1`, or `--listen` for Prometheus), also
//! those of collectives. `ferroce flight` reports which rank of a collective hangs or is late.
//!
//! | counter that grows | meaning |
//! |---|---|
//! | [`RetransmittedPkts`](Counter::RetransmittedPkts) with [`PacketSeqErr`](Counter::PacketSeqErr) | packets are lost on the path to the peer, or at the peer |
//! | [`LocalAckTimeoutErr`](Counter::LocalAckTimeoutErr) | the last packets sent were lost, or the peer did not poll for longer than the ACK timeout |
//! | [`OutOfSequence`](Counter::OutOfSequence), [`DuplicateRequest`](Counter::DuplicateRequest) | in this order: requests of the peer were lost or reordered on the path to this end; this end's acknowledgements were lost, or later than the peer's ACK timeout |
//! | [`RnrNakRetryErr`](Counter::RnrNakRetryErr) | the peer had no receive posted: RNR NAKs received |
//! | [`SendRnrErr`](Counter::SendRnrErr) | this end had no receive posted, or no staging chunk for a retransmitted packet: RNR NAKs sent |
//! | [`OutOfBuffer`](Counter::OutOfBuffer) | this end had no receive posted for a message: an RC sender gets an RNR NAK, a UC or UD message is lost |
//! | [`RxStagingFull`](Counter::RxStagingFull) | no [staging](super::device_memory#what-it-costs) chunk was free for packets to GPU memory; those of UC and UD are lost, the others are retransmitted |
//! | [`DeviceErrors`](Counter::DeviceErrors) | copies by a GPU failed: the log names the queue pair and the reason |
//! | [`RxIcrcEncapsulated`](Counter::RxIcrcEncapsulated) | packets are modified on the path: NAT, a middlebox, a faulty link |
//! | [`RxWrongService`](Counter::RxWrongService) | the two queue pairs are of different services (RC, UC, UD): [`Context::mismatches`] has the first such packet, and also shows a different path MTU or a right that a queue pair does not give |
//! | [`RxPkeyMismatch`](Counter::RxPkeyMismatch) | the ends use different P_Keys |
//! | [`RxWrongAddress`](Counter::RxWrongAddress) | packets that are not from the peer's GID or not to this end's: the ends are connected with other GIDs, or packets of an earlier connection arrive (harmless if they stop) |
//! | [`NpEcnMarkedRocePackets`](Counter::NpEcnMarkedRocePackets), [`RpCnpHandled`](Counter::RpCnpHandled) | in this order: switches mark packets to this end; this end reduces its rate, because packets that it sent were marked |
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
//! The library logs through [`tracing`]: at `info` which device was opened, with which driver and why; at `warn` what should be
//! corrected although ferroce works; at `error` each failed GPU copy, with its queue pair and the reason; nothing per packet. The
//! program's subscriber decides what is printed, for example `tracing_subscriber::fmt().with_env_filter(…).init()`. Without a
//! subscriber nothing is printed. Errors are returned to the caller.
//!
//! # Captures
//!
//! [`driver::pcap::Recorder`] wraps any driver and writes all packets to a pcapng file (`--pcap FILE` of the command);
//! `tcpdump -s 0 -w run.pcap udp port 4791`, here or at the peer, captures packets of UDP sockets, but not those that AF_XDP
//! receives. `ferroce dissect` prints such files packet by packet, and `ferroce replay` checks both ends against the rules of the
//! protocol.
//!
//! # Which peers
//!
//! The test suite runs against `rdma_rxe` of Linux 6.1 in a virtual machine, as the peer and as the local RNIC. No ConnectX was
//! available: INTEROP.md has the commands for one, and marks what is untested.
//!
//! Sources: docs/decisions/20-telemetry.md (counters), docs/protocol.md §8 (peers) and §9 (security); docs/commands.md (the
//! commands), docs/devices.md (addresses and ports), docs/captures.md, INTEROP.md.

#[cfg(doc)]
use crate::*;
