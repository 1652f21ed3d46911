//! Collectives: operations, the order of reductions, errors, threads, the flight recorder, and what to tune. There is no code in it.
//!
//! # Ranks, communicators, operations
//!
//! A process has one [`Collectives`] on one [`Context`](ferroce::Context), or on one for each of its [ports](#several-ports). It joins
//! communicators with a [`Bootstrap`], by which the ranks meet over TCP, or with the [`Card`]s of all ranks, exchanged by any other means.
//! [`split`](Collectives::split), [`subset`](Collectives::subset) and [`shrink`](Collectives::shrink) derive communicators from one.
//!
//! An [`Operation`] is data. All ranks of a communicator start the same operations in the same order; [`send`](Operation::send) and
//! [`receive`](Operation::receive) concern two ranks, and match in their order. Each [`start`](Collectives::start) returns a
//! [`Request`]. Several requests may be outstanding: operations begin in order, and complete in any order. If an operation depends on
//! another one of the same rank, such as the send and the receive of two ranks to each other, start both before waiting, or use
//! [`start_all`](Collectives::start_all).
//!
//! Until an operation completes, do not write its input, and neither read nor write its output. Counts are in elements.
//!
//! # Which algorithm
//!
//! | algorithm | steps | each rank sends | for |
//! |---|---|---|---|
//! | [`Direct`](Algorithm::Direct) | 1 | n − 1 times all | short operations; all-to-all, gather, scatter |
//! | [`TwoStep`](Algorithm::TwoStep) | 2 | 2 (n − 1) / n of all | all-reduce of few ranks |
//! | [`Ring`](Algorithm::Ring) | 2 (n − 1) | 2 (n − 1) / n of all | long operations; each rank talks to two others |
//! | [`Halving`](Algorithm::Halving) | 2 log₂ n | 2 (n − 1) / n of all | operations between, and many ranks |
//! | [`Tree`](Algorithm::Tree) | 2 log₂ n | twice all | broadcast and reduce of many ranks |
//! | [`Hierarchical`](Algorithm::Hierarchical) | | less between hosts | hosts with as many ranks each |
//! | [`Mapped`](Algorithm::Mapped) | 1 to 3 | nothing | ranks that are all on one host |
//!
//! [`Mapped`](Algorithm::Mapped) is used wherever possible, except for send and receive and for all-to-all with different counts,
//! which use packets. Namespaces and containers of one kernel are one host if they see each other's processes. Ranks of a host access
//! memory from [`allocate`](Collectives::allocate) directly; other memory costs one more copy. Otherwise the cheapest algorithm is
//! chosen by a [`Model`], whose latencies and bandwidths are measured when the ranks meet; all ranks have the same model.
//! [`Collectives::explain`] returns the choice, the reason, and the predicted cost of each algorithm. [`Options::algorithm`] forces one
//! for the operations that have it.
//!
//! A fallback to a slower path is logged with its reason: a communicator of one host that uses packets, or memory of a device that the CPU
//! reduces. It is counted in the [metrics](ferroce::Context::metrics) of the context (`ferroce_collective_fallbacks_total`), which
//! `ferroce stat` shows if the program [exports](ferroce::Context::export) the context. With [`SharedMemory::Required`] the first is an
//! error.
//!
//! # The order of reductions
//!
//! All ranks get the same bits, and so does every run with the same algorithm, number of ranks and chunk length. The next run may choose
//! another algorithm, as the choice depends on measurements: [`Options::algorithm`] or [`Options::model`] fix it. Sign and payload of a
//! NaN may differ between kinds of processors.
//!
//! | algorithm | an element is |
//! |---|---|
//! | Direct, TwoStep, Mapped | `((x[0] ⊕ x[1]) ⊕ x[2]) ⊕ …`, by rank |
//! | Ring, all-reduce | as above, beginning with rank `s` for segment `s` of n, indices modulo n |
//! | Ring, reduce-scatter | as above, beginning with rank `b + 1` for block `b` |
//! | Ring, reduce | as above, beginning with the rank behind the root |
//! | Halving | halves of halves: each rank's own partial result between those from ranks before it and behind it |
//! | Tree | by rank counted from the root: what comes from the child before, the own element, what comes from the child behind; the root's own comes first |
//! | Hierarchical | by rank inside the host, then along the ring of hosts |
//!
//! Integers wrap. f16, bf16 and the 8-bit floats are computed in f32, and rounded when a result is stored or sent: once with Direct,
//! TwoStep and Mapped. 8-bit floats use one of these by default. An average is the sum, divided once.
//! [`driver::reduction`](ferroce::driver::reduction) has the details of types.
//!
//! # Errors
//!
//! [`Error::Invalid`] refuses an operation before anything has happened. [`Error::Failed`] ends a communicator: all outstanding operations
//! of all ranks fail, the contents of their outputs are undefined, and later operations are refused. Peers and devices may still write to
//! those outputs until [`leave`](Collectives::leave), [`shrink`](Collectives::shrink) or [`finish`](Collectives::finish) returns,
//! [`shrunk`](Collectives::shrunk) returns the new communicator, or the buffer is deregistered. If a device completes nothing for 10 s, these
//! return an [`Error::Gpu`] that names it, and it may still write. The [`Cause`] is the reason:
//!
//! | cause | what to do |
//! |---|---|
//! | [`Mismatch`](Cause::Mismatch) | a bug: two ranks called different things; both are named |
//! | [`Lost`](Cause::Lost) | a rank has ended, is stopped, is unreachable, or has not polled for [`Options::retry_budget`]: [`shrink`](Collectives::shrink) and go on without it, or set a longer ACK timeout |
//! | [`Aborted`](Cause::Aborted) | another rank failed first; its reason is included |
//! | [`Stalled`](Cause::Stalled) | all ranks answer and one has not called the operation: it computes, or hangs. A device that hangs is `Device` |
//! | [`Protocol`](Cause::Protocol) | a rank violated the protocol: another version, overwritten memory, an attack |
//! | [`Device`](Cause::Device) | a GPU of the named rank failed to copy or to compute, or completes nothing; the log of that rank has the reason |
//! | [`Local`](Cause::Local) | this rank's port or memory |
//!
//! `collectives/examples/job.rs` is a program that goes on without a rank that has died.
//!
//! A rank that the others have given up, and that continues later, writes to its own memory only.
//! [`leave`](Collectives::leave) and [`finish`](Collectives::finish) return a failure that no other call has returned. Communicators
//! derived from one that fails are independent: those with the dead rank fail when they are next used, or left.
//!
//! # On a GPU
//!
//! With [`Collectives::on_device`], buffers, scratch memory and received chunks are in memory of the GPU, which copies, reduces, divides and
//! scales there. A poll starts that work, and continues with other messages until it completes. Long operations are pipelined in chunks: one
//! is copied to the host, one is on the wire and one is reduced at the same time. Ranks may have different devices, or none; the results have
//! the bits of the processor's.
//!
//! [`Collectives::on_device`] compiles the kernels, which may take seconds.
//!
//! The CPU does the work, and a poll blocks for it, in these cases:
//!
//! - operations on buffers in host memory at a rank with a GPU;
//! - elements that are not aligned to their size;
//! - reductions of more than 8 operands at once: Direct and TwoStep in all-reduce, reduce and reduce-scatter with more than 8 ranks,
//!   Hierarchical in all-reduce with more than 8 ranks on a host. Unless an algorithm is [forced](Options::algorithm), long operations and
//!   those of more than 8 ranks use a ring, with two operands each; but 8-bit floats use Direct or TwoStep with up to 64 ranks;
//! - f64 on a GPU without double precision, and averages of floats on a GPU that does not round quotients correctly.
//!
//! Each case is counted, with its reason.
//!
//! An RNIC reads and writes GPU memory itself, if it can import it as a dma-buf ([`ferroce::manual::device_memory`]).
//!
//! # Several ports
//!
//! [`Collectives::add_rail`] gives a rank more ports: its *rails*. The first port of a rank leads to the first ports of the others, the
//! second to the second ports, as in clusters where each card of a host has a switch of its own. If two ranks have different numbers of
//! rails, the smaller number connects them. Each chunk takes the rail that is expected to complete it first, by its recent throughput, so a
//! slow rail gets fewer chunks; short messages take an idle rail. Chunks are shorter: [`Options::chunk_bytes`] divided by the number of
//! rails, but at least twice [`Options::eager_bytes`].
//!
//! ```
//! # use ferroce_collectives::ferroce::{Config, Context, Device};
//! # use ferroce_collectives::*;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let devices = ["loopback", "loopback"];
//! let open = |device: &str| Context::open(Device::open(device)?, &Config::default());
//! let mut collectives = Collectives::new(open(devices[0])?)?; // such as udp:10.0.0.1
//! collectives.add_rail(open(devices[1])?)?; // and udp:10.0.1.1
//! # Ok(())
//! # }
//! ```
//!
//! A rail may fail in the middle of an operation. Both ranks then tell each other, by another rail, how many messages have arrived by it,
//! and the others are retransmitted by the remaining rails. A rail has failed if its queue pair has, or if nothing was acknowledged for a
//! little more than two ACK timeouts (1.2 s by default) while the peer answers by another rail. A rank that does not poll for a while loses
//! no rail by that. While operations are outstanding, a failed rail is probed once per [`Options::probe_interval`], and used again when
//! it answers. If it fails again soon, it is probed later each time, at most 16 [`Options::retry_budget`]s later. A rail that fails, and one
//! that never came up, is logged as a warning, counted in the metrics of its port (`collective_rails_left`, `collective_rails_back`), and
//! reported by `ferroce flight`. A rank that no rail reaches is lost within [`Options::retry_budget`], as with one rail; a little
//! later if only one direction is dead.
//!
//! All contexts of the rails access the same memory: [`allocate`](Collectives::allocate), [`Memory::shared`](ferroce::Memory::shared) or
//! that of a device. It can't be borrowed as a slice.
//!
//! # Threads
//!
//! All progress is made in [`poll`](Collectives::poll), which takes the time as an argument and does not block, but for the CPU's work on
//! [GPU memory](#on-a-gpu). [`test`](Collectives::test) calls it; [`wait`](Collectives::wait) calls it until the request completes. **A rank
//! that does not poll does not answer**: if it computes for longer than [`Options::retry_budget`] (4.3 s by default) while others wait
//! for it, they give it up. A [`Runner`] polls on a thread of its own, which sleeps while there is nothing to do, and gives other threads
//! a handle whose operations are futures.
//!
//! # The flight recorder: who is late, who hangs
//!
//! Each [`Collectives`] has a flight recorder: the last 256 operations of each communicator with their times and the ranks that they wait
//! for, and the traffic with each other rank. It is in memory that other processes of the same user can read, so it also tells of a rank
//! that hangs. `ferroce flight` shows the ranks of this host, or recordings of several hosts together, with a time line; `ferroce
//! stat` has the counters, also as Prometheus text. Both report the findings of a [`flight::Diagnosis`]:
//!
//! | finding | source | reported from |
//! |---|---|---|
//! | which rank the others wait for, in which operation, and what it does | what each rank waits for, how many operations it has called, when it last polled | 1 s without progress |
//! | which rank starts operations later than the others, how often, by how much | each message says how long its sender has been in the operation; no clocks are compared | twice as late as the next rank, and 1 % of the time |
//! | which rank was off its core while it waited | iterations of [`wait`](Collectives::wait) that took at least 10 ms too long | twice as long as the next rank, and 5 % of the time |
//! | which port or link is slower than the others, both ways or one way | the fastest transfer of 128 KiB or more, of links that have moved 16 MiB | 0.7 of the others |
//! | which rail has failed | what each rank has noticed | at once |
//! | whose device hangs | computations that do not complete | 1 s |
//!
//! [`flight::FlightRecorder::dump`] writes a recording to a file. If the environment variable [`flight::FOLDER`] names a directory, each
//! rank writes one there when a communicator fails. To dump at a signal, use a thread:
//!
//! ```no_run
//! # use ferroce_collectives::Collectives;
//! # fn example(collectives: &Collectives, next_signal: impl Fn() + Send + 'static) -> Option<()> {
//! let recorder = collectives.flight_recorder()?;
//! std::thread::spawn(move || {
//!     loop {
//!         next_signal(); // `signal_hook::iterator::Signals`, as an example
//!         match recorder.dump_into("/var/tmp".as_ref()) {
//!             Ok(path) => eprintln!("{path:?}"),
//!             Err(error) => eprintln!("no recording: {error}"),
//!         }
//!     }
//! });
//! # Some(())
//! # }
//! ```
//!
//! # What to tune
//!
//! | option | default | when to change it |
//! |---|---|---|
//! | [`Options::ack_timeout`], [`Options::retry_count`] | 500 ms, 7: a budget of 4.3 s | longer if ranks compute between polls; shorter to notice a dead rank sooner |
//! | [`Options::stall_timeout`] | 60 s | how long all ranks may be alive without progress |
//! | [`Options::probe_interval`] | 1 s | how soon a rank that is waited for is asked whether it is alive |
//! | [`Options::idle`] | spins, then sleeps | `Idle::Adaptive { spins: 0, yields: 20 }` if ranks outnumber cores: a rank that spins takes the core from the one that it waits for |
//! | [`Options::chunk_bytes`] | 256 KiB − 64 bytes | shorter if many ranks form a ring; longer for ports that need long messages |
//! | [`Options::eager_bytes`] | 64 KiB | shorter messages are copied; longer ones first wait for the receiver's address, a round trip that takes longer than two copies of 64 KiB |
//! | [`Options::shared_memory`] | used if possible | to require it, or to use packets inside a host |
//! | [`Options::algorithm`], [`Options::model`] | measured | for the same bits in every run |
//!
//! At a rank with a [GPU](#on-a-gpu) the device copies messages of any length, and the processor copies none.
//!
//! For each rank that it communicates with, a rank has 1 MiB of memory (half of it with more than 64 ranks), and up to 2 MiB more where
//! it reduces chunks.
//!
//! # What the network must let through
//!
//! UDP port 4791 between the ports of all ranks, on each rail; and TCP to the bootstrap address of rank 0 (`MASTER_ADDR` and `MASTER_PORT`,
//! or the address in a [`UniqueId`]) while the ranks meet. `ferroce doctor` checks the first.

#[cfg(doc)]
use crate::*;
