//! The manual of the collectives: operations, the order of reductions, errors, threads, the flight recorder, and what to tune. This
//! module exports nothing. [`glossary`](ferroce::manual::glossary) explains the terms of RDMA.
//!
//! # Ranks, communicators, operations
//!
//! A *communicator* is a group of n *ranks*, processes or threads, numbered 0 to n − 1. A rank has one [`Collectives`], which owns
//! one [`Context`](ferroce::Context), or one for each of its [ports](#several-ports). A rank joins communicators with a
//! [`Bootstrap`], by which the ranks connect over TCP, or with the [`Card`]s of all ranks, exchanged by any other means.
//! [`split`](Collectives::split), [`subset`](Collectives::subset) and [`shrink`](Collectives::shrink) derive communicators from
//! one.
//!
//! An [`Operation`] is a value: kind, buffers, count, data type. All ranks of a communicator start the same operations in the same
//! order. [`send`](Operation::send) and [`receive`](Operation::receive) are an exception, as they involve two ranks: the nth send
//! of rank a to rank b matches the nth receive of b from a. Each [`start`](Collectives::start) returns a [`Request`]. Several
//! requests may be outstanding: operations begin in order, and complete in any order. If two ranks send to each other, each must
//! start its send and its receive before it waits for one, or use [`start_all`](Collectives::start_all). The same applies
//! whenever operations of two ranks wait for each other.
//!
//! Until an operation completes, do not write its input, and neither read nor write its output. Counts are in elements.
//!
//! # Which algorithm
//!
//! Steps and bytes are those of an all-reduce of B bytes by n ranks:
//!
//! | algorithm | steps | each rank sends | for |
//! |---|---|---|---|
//! | [`Direct`](Algorithm::Direct) | 1 | (n − 1) B | short operations; all-to-all, gather, scatter |
//! | [`TwoStep`](Algorithm::TwoStep) | 2 | 2 (n − 1) / n · B | all-reduce of few ranks |
//! | [`Ring`](Algorithm::Ring) | 2 (n − 1) | 2 (n − 1) / n · B | long operations; each rank communicates with two others |
//! | [`Halving`](Algorithm::Halving) | 2 ⌈log₂ n⌉ | 2 (n − 1) / n · B | operations of medium length, many ranks; any number of ranks |
//! | [`Tree`](Algorithm::Tree) | about 2 log₂ n | about 2 B | broadcast and reduce of many ranks |
//! | [`Hierarchical`](Algorithm::Hierarchical) | 2 h, with h hosts | between hosts only 2 (h − 1) / h · B / (ranks of a host) | several hosts, each with the same number of ranks, at least two |
//! | [`Mapped`](Algorithm::Mapped) | 1 to 3 | nothing | ranks that are all on one host |
//!
//! All of them execute all-reduce. Reduce-scatter is also by `Direct`, `Ring` and `Halving`; all-gather by these and
//! `Hierarchical`; broadcast by `Direct`, `Ring`, `Tree` and `Hierarchical`; reduce by `Direct`, `Ring` and `Tree`; the others by
//! `Direct`. `Mapped` executes all operations except send and receive ([`Algorithm::applies_to`]).
//!
//! [`Mapped`](Algorithm::Mapped) is used wherever possible. It can't execute send and receive, all-to-all with different counts,
//! and reductions of more than 64 ranks: these use packets. `Mapped` needs processes of one user that see each other in `/proc`
//! (one PID namespace); network namespaces do not matter ([`SharedMemory::Auto`]). Ranks of a host access memory from
//! [`allocate`](Collectives::allocate) directly; other memory costs one more copy. If `Mapped` is not possible, a [`Model`] of
//! latencies and bandwidths determines the cheapest algorithm. Ranks that join with a [`Bootstrap`] measure and exchange these
//! values; with [`Card`]s the default is the model of a port of 25 Gb/s. All ranks use the same model. [`Collectives::explain`]
//! returns the choice, the reason, and the predicted cost of each algorithm. [`Options::algorithm`] forces an algorithm, also
//! instead of `Mapped`, for all operations that it can execute ([`Algorithm::applies_to`]).
//!
//! Two fallbacks to a slower path are logged with the reason: the ranks of one host use packets instead of shared memory; the CPU,
//! instead of the GPU, copies, scales or reduces data in GPU memory. They are counted, by reason, in the
//! [metrics](ferroce::Context::metrics) of the context (`ferroce_collective_fallbacks_total`), which `ferroce stat` shows if the
//! program [exports](ferroce::Context::export) the context. With [`SharedMemory::Required`] joining fails instead of using packets.
//!
//! # The order of reductions
//!
//! All ranks get the same bits, in every run with the same algorithm, number of ranks and chunk length. The next run may choose
//! another algorithm, as the choice depends on measurements: [`Options::algorithm`] or [`Options::model`] fix it. Sign and payload
//! of a NaN may differ between kinds of processors.
//!
//! `x[r]` is the element of rank r:
//!
//! | algorithm | a result is |
//! |---|---|
//! | Direct, TwoStep, Mapped | `((x[0] ⊕ x[1]) ⊕ x[2]) ⊕ …`, by rank |
//! | Ring, all-reduce | as above, beginning with rank `s` for segment `s` of n, indices modulo n |
//! | Ring, reduce-scatter | as above, beginning with rank `b + 1` for block `b` |
//! | Ring, reduce | as above, beginning with the rank after the root |
//! | Halving | ranks at distance n / 2 first, then n / 4 and so on, the lower rank on the left. For n = 4: `(x[0] ⊕ x[2]) ⊕ (x[1] ⊕ x[3])`. If n is not a power of two, the order depends on the block |
//! | Tree | at each rank `(left child ⊕ own) ⊕ right child`, at the root `own ⊕ child`. There are two trees. For n = 4, with ranks numbered from the root: `x[0] ⊕ ((x[1] ⊕ x[2]) ⊕ x[3])` for the 1st, 3rd, … chunk, `x[0] ⊕ ((x[3] ⊕ x[1]) ⊕ x[2])` for the others |
//! | Hierarchical | by rank inside the host, then along the ring of hosts |
//!
//! Integers wrap. f16, bf16 and the 8-bit floats are computed in f32, and rounded when a result is stored or sent. Direct, TwoStep
//! and Mapped round once; the other algorithms also round each partial result. So for 8-bit floats the communicator chooses one of
//! these three, if it can. An average is the sum, divided once. [`driver::reduction`](ferroce::driver::reduction) has the details
//! of types.
//!
//! # Errors
//!
//! [`Error::Invalid`] refuses an operation before anything has happened. [`Error::Failed`] ends a communicator: all outstanding
//! operations of all ranks fail, the contents of their outputs are undefined, and later operations are refused. Peers and devices
//! may still write to those outputs until [`leave`](Collectives::leave), [`shrink`](Collectives::shrink) or
//! [`finish`](Collectives::finish) returns, [`shrunk`](Collectives::shrunk) returns the new communicator, or the buffer is
//! deregistered. If a GPU completes nothing for 10 s, these calls return an [`Error::Gpu`] that names the GPU; it may still write
//! then. The [`Cause`] is the reason:
//!
//! | cause | what to do |
//! |---|---|
//! | [`Mismatch`](Cause::Mismatch) | a bug: two ranks called different things; both are named |
//! | [`Lost`](Cause::Lost) | a rank has ended, is stopped, is unreachable, or has not polled for [`Options::retry_budget`]: [`shrink`](Collectives::shrink) and continue without it; or set a longer [`ack_timeout`](Options::ack_timeout): the budget is `retry_count` + 1 of them |
//! | [`Aborted`](Cause::Aborted) | another rank failed first; its reason is included |
//! | [`Stalled`](Cause::Stalled) | all ranks answer, but nothing has moved for [`Options::stall_timeout`]: usually the program of one rank has not called the operation, because it computes or hangs. Look with `ferroce flight`. A GPU that hangs is reported as `Device` |
//! | [`Protocol`](Cause::Protocol) | a rank violated the protocol: another version, overwritten memory, an attack |
//! | [`Device`](Cause::Device) | a GPU of the named rank failed to copy or to compute, or completes nothing; the log of that rank has the reason |
//! | [`Local`](Cause::Local) | this rank's port or memory |
//!
//! `collectives/examples/job.rs` is a program that continues without a rank that has died.
//!
//! A rank that was taken as lost and continues later can't write to the memory of the others any more.
//! [`leave`](Collectives::leave) and [`finish`](Collectives::finish) return the failure of the communicator if no call before has
//! returned it. If a communicator fails, those derived from it do not fail with it. A derived communicator that contains the dead
//! rank fails at its next operation, or at `leave`.
//!
//! # On a GPU
//!
//! With [`Collectives::on_device`], buffers, scratch memory and received chunks are in memory of the GPU, which copies, reduces,
//! divides and scales there. A poll starts that work and does not wait for it; polls process other messages meanwhile. Long
//! operations are pipelined in chunks: one is copied to the host, one is on the wire and one is reduced at the same time. Ranks may
//! have different GPUs, or none; the results are bit for bit those that the CPU computes.
//!
//! [`Collectives::on_device`] compiles the kernels, which may take seconds.
//!
//! The CPU does the work, and a poll blocks for it, in these cases:
//!
//! - operations on buffers in host memory at a rank with a GPU;
//! - elements that are not aligned to their size;
//! - reductions of more than 8 operands at once: with more than 8 ranks by Direct and TwoStep, with more than 8 ranks on a host by
//!   Hierarchical (all-reduce). This is rare: unless an algorithm is [forced](Options::algorithm), reductions of more than one
//!   chunk or of more than 8 ranks use the ring, which has two operands in each step. 8-bit floats are an exception: they use
//!   Direct or TwoStep with up to 64 ranks;
//! - f64 on a GPU without double precision, and averages of floats on a GPU that does not round quotients correctly.
//!
//! Each case is counted in `ferroce_collective_fallbacks_total`. The reason says only whether the CPU copied, scaled or reduced.
//!
//! An RNIC that can import GPU memory as a dma-buf reads and writes it directly ([`ferroce::manual::device_memory`]).
//!
//! # Several ports
//!
//! [`Collectives::add_rail`] gives a rank more ports: its *rails*. The first port of a rank is connected to the first ports of the
//! others, the second to the second ports, as in clusters where each card of a host has a switch of its own. If two ranks have
//! different numbers of rails, they use as many as the one with fewer has. Each chunk is sent on the rail that is expected to
//! complete it first, by the rail's recent throughput, so a slow rail gets fewer chunks. Short messages are sent on an idle rail.
//! Chunks are shorter: [`Options::chunk_bytes`] divided by the number of rails, but at least twice [`Options::eager_bytes`].
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
//! A rail may fail in the middle of an operation. Over another rail the two ranks then tell each other how many messages have
//! arrived over the failed one, and retransmit the missing messages over the remaining rails. A rail is taken as failed if its
//! queue pair fails, or if nothing is acknowledged on it for 2.25 ACK timeouts (1.2 s by default: 2.25 · 537 ms) while the peer
//! answers on another rail. If a rank does not poll, it answers on no rail, so none is taken as failed.
//!
//! While operations are outstanding, a failed rail is probed once per [`Options::probe_interval`], and used again when it answers.
//! If it fails again within 16 [retry budgets](Options::retry_budget) (69 s by default), there is a pause without probes: a quarter
//! of a retry budget (1.1 s) at first, and twice as long after each further failure, up to 16 retry budgets. A rail that fails, and
//! one that never came up, is logged as a warning, counted in the metrics of its port (`collective_rails_left`,
//! `collective_rails_back`), and reported by `ferroce flight`. A rank that no rail reaches is reported as [`Lost`](Cause::Lost)
//! within the retry budget, as with one rail; a little later if only one direction is dead.
//!
//! All rails access the same buffers. So with several rails a buffer must be from [`allocate`](Collectives::allocate),
//! [`Memory::shared`](ferroce::Memory::shared) or a device, and can't be borrowed as a slice.
//!
//! # Threads
//!
//! All progress is made in [`poll`](Collectives::poll), which takes the time as an argument. It does not block, except while the
//! CPU works on [GPU memory](#on-a-gpu). [`test`](Collectives::test) calls it; [`wait`](Collectives::wait) calls it until the
//! request completes. **A rank that does not poll does not answer**: if it computes for longer than [`Options::retry_budget`] (4.3
//! s by default) while others wait for it, they take it as lost, and their operations fail. A [`Runner`] polls on a thread of its
//! own, which sleeps while there is nothing to do, and gives other threads a handle whose operations are futures.
//!
//! # The flight recorder: who is late, who hangs
//!
//! Each [`Collectives`] has a flight recorder: the last 256 operations of each communicator with their times and the ranks that
//! they wait for, and the traffic with each other rank. It is in memory that other processes of the same user can read, so a rank
//! that hangs can be examined too. `ferroce flight` shows the ranks of this host, or recordings of several hosts together, with a
//! time line; `ferroce stat` has the counters, also as Prometheus text. Besides failed ranks and deadlocks,
//! both report these findings ([`flight::Diagnosis`]):
//!
//! | finding | source | reported from |
//! |---|---|---|
//! | which rank the others wait for, in which operation, and what it does | what each rank waits for, how many operations it has called, when it last polled | 1 s without progress |
//! | which rank starts operations later than the others, how often, by how much | each message says how long its sender has been in the operation; no clocks are compared | in total more than twice as late as the second latest rank, and at least 1 % of the time since the first operation |
//! | which rank was off its core while it waited | iterations of [`wait`](Collectives::wait) that took at least 10 ms too long | in total more than twice as long as the second longest, and at least 5 % of the time since the rank's first operation |
//! | which link, or all links of which port, is slow, in one direction or both | the bandwidth of a link: its fastest transfer of 128 KiB or more, if the link has carried 16 MiB | a link below 0.7 of the median; a port whose fastest link is below 0.7 of the slowest other link |
//! | which rail has failed | the rails that a rank has stopped using | at once |
//! | whose GPU hangs | computations that do not complete | 1 s |
//!
//! [`flight::FlightRecorder::dump`] writes a recording to a file. If the environment variable `FERROCE_FLIGHT_DIR`
//! ([`flight::FOLDER`]) names a directory, each rank writes one there when a communicator fails. To dump at a signal, use a thread:
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
//! | [`Options::ack_timeout`], [`Options::retry_count`] | 500 ms, 7: a [retry budget](Options::retry_budget) of 4.3 s, as 500 ms are [rounded up](ferroce::manual::connecting#timeouts-and-retries) to 537 ms | longer if ranks compute between polls; shorter to notice a dead rank sooner |
//! | [`Options::stall_timeout`] | 60 s | longer if ranks may be alive without progress for longer |
//! | [`Options::probe_interval`] | 1 s | shorter to notice a dead rank sooner at the ranks that only wait for it |
//! | [`Options::idle`] | spins, then sleeps | `Idle::Adaptive { spins: 0, yields: 20 }` if ranks outnumber cores: a rank that spins takes the core from the one that it waits for |
//! | [`Options::chunk_bytes`] | 256 KiB − 64 bytes | shorter if many ranks form a ring |
//! | [`Options::eager_bytes`] | 64 KiB | messages up to this length are copied at both ends; longer ones are not, but wait a round trip for the receiver's address. Shorten it if a round trip takes less time than two copies of this length |
//! | [`Options::shared_memory`] | used if possible | to require it, or to use packets inside a host |
//! | [`Options::algorithm`], [`Options::model`] | measured | for the same bits in every run |
//!
//! At a rank with a [GPU](#on-a-gpu) the GPU copies messages of any length, and the CPU copies none.
//!
//! With these defaults, a rank allocates 1 MiB for each rank that it communicates with. In a communicator of 34 to 52 ranks it
//! allocates less, and 0.5 MiB from 53 ranks on. For each rank whose chunks it reduces it allocates 2 MiB more: less with 10 to 13
//! ranks, and 1 MiB from 14 ranks on.
//!
//! # What the network must let through
//!
//! The network must pass UDP port 4791 between all ranks, on each rail, and TCP to the bootstrap address and port of rank 0 while
//! the ranks meet. [`Bootstrap::from_env`] lists both by launcher; a [`UniqueId`] contains them. `ferroce doctor` checks UDP port
//! 4791.
//!
//! Sources: docs/decisions/14-collectives.md (design and measurements), docs/measurements.md (numbers); `collectives/src/choice.rs`
//! (choice of the algorithm), `collectives/src/schedule` (algorithms and orders), `collectives/src/flight/diagnosis.rs` (findings),
//! `collectives/src/card.rs` (memory); the tests `collectives/tests/{operations,deaths,rails,flight,devices}.rs`. Collectives are
//! not part of the IBA: on the wire they are messages of RC and UD queue pairs.

#[cfg(doc)]
use crate::*;
