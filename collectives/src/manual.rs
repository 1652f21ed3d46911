//! Collectives: operations, the order of reductions, errors, threads, who is late, and what to tune. There is no code in it.
//!
//! # Ranks, communicators, operations
//!
//! A process has one [`Collectives`] on one [`Context`](ferroce::Context). It joins communicators: with a
//! [`Bootstrap`], by which the ranks meet over TCP, or with the [`Card`]s of all ranks, brought together by any other means.
//! [`split`](Collectives::split), [`subset`](Collectives::subset) and [`shrink`](Collectives::shrink) make communicators of one.
//!
//! An [`Operation`] is data. All ranks of a communicator begin the same ones in the same order; [`send`](Operation::send) and
//! [`receive`](Operation::receive) concern two ranks, and match in their order. Each [`start`](Collectives::start) gives a
//! [`Request`]. Several may be under way at once: they begin in their order, and end in any. An operation that waits for another
//! one of the same rank, such as a send and a receive of two ranks to each other, is begun beside it, by two calls of `start` or by
//! [`start_all`](Collectives::start_all).
//!
//! While an operation is under way its input is not written and its output is neither read nor written. Counts are of elements.
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
//! [`Mapped`](Algorithm::Mapped) is taken wherever it can be, but for send and receive, and all-to-all with counts of each rank's own,
//! which go by packets. Namespaces and containers of one kernel are one host if they see each other's processes. Memory that
//! [`allocate`](Collectives::allocate) gives is read and written by the ranks of the host themselves, other memory costs a copy
//! more. Else the cheapest one is taken, by a [`Model`] with a latency and a bandwidth that are measured when the ranks meet; all
//! ranks have the same model. [`Collectives::explain`] says what is taken, why, and what each would cost. [`Options::algorithm`] forces one for operations that have it.
//!
//! What goes a slower way than it might, a communicator of one host by packets or a device's memory by way of the CPU, is in the log with
//! its reason, and counted among the [metrics](ferroce::Context::metrics) of the context (`ferroce_collective_fallbacks_total`, which
//! `ferroce stat` shows of a context that [exports](ferroce::Context::export) them). [`SharedMemory::Required`] makes the first an
//! error.
//!
//! # The order of reductions
//!
//! All ranks get the same bits, in every run of the same algorithm with as many ranks and as long chunks. The algorithm may be another
//! one in the next run, for it is chosen by what was measured: [`Options::algorithm`] or [`Options::model`] keep it. Where a NaN
//! comes out, its sign and payload may differ between processors of different kinds.
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
//! Integers wrap. f16, bf16 and the 8-bit floats are computed with as f32, and rounded when a result is stored or sent: with Direct,
//! TwoStep and Mapped once. 8-bit floats take one of these by themselves. An average is the sum, divided once.
//! [`driver::reduction`](ferroce::driver::reduction) has the details of types.
//!
//! # Errors
//!
//! [`Error::Invalid`] refuses an operation before anything has happened. [`Error::Failed`] ends a communicator: every operation
//! under way on every rank ends with it, outputs hold anything, and later operations are refused. Other ranks and devices may still write
//! to those outputs, until [`leave`](Collectives::leave), [`shrink`](Collectives::shrink) or [`finish`](Collectives::finish) has
//! returned, or [`shrunk`](Collectives::shrunk) has the communicator of those that are left, or the buffer is no longer registered. A
//! device that ends nothing for 10 s makes that an [`Error::Gpu`] that names it, and may write still. The [`Cause`] says why it has failed:
//!
//! | cause | what to do |
//! |---|---|
//! | [`Mismatch`](Cause::Mismatch) | a bug: two ranks called different things; both are named |
//! | [`Lost`](Cause::Lost) | a rank has ended, is stopped, is cut off, or has not polled for [`Options::retry_budget`]: [`shrink`](Collectives::shrink) and go on without it, or give it more time |
//! | [`Aborted`](Cause::Aborted) | another rank was first; its words are in it |
//! | [`Stalled`](Cause::Stalled) | all ranks answer and one has not called: it computes, or hangs; a device that hangs is a `Device` |
//! | [`Protocol`](Cause::Protocol) | a rank sent what it may not: another version, memory that was overwritten, an attack |
//! | [`Device`](Cause::Device) | a GPU, here or of the rank that is named, has not copied or not computed: its log says why |
//! | [`Local`](Cause::Local) | this rank's port or memory |
//!
//! `collectives/examples/job.rs` is a program that goes on without a rank that has died.
//!
//! A rank that the others hold for gone, and that goes on later, writes to memory of its own alone. A failure that no call has
//! returned is what [`leave`](Collectives::leave) and [`finish`](Collectives::finish) return. Communicators that were made of one that
//! fails are others: those with the dead rank fail when they are next used, or left.
//!
//! # On a GPU
//!
//! [`Collectives::on_device`] has buffers, scratch memory and what arrives in memory of the GPU, which copies, reduces, divides and scales there:
//! a poll begins that and goes on with other messages until it has ended. Long operations come in chunks, of which one is copied to the host, one
//! is on the wire and one is reduced at the same time. Ranks may have different devices, or none; the bits are those of the processor.
//!
//! What is built for that, and may take seconds, [`Collectives::on_device`] builds.
//!
//! By way of the host, and with a poll that blocks, go:
//!
//! - operations on buffers of the host's memory at a rank with a GPU;
//! - elements that do not begin at a multiple of their size;
//! - reductions of more than 8 operands at once: Direct and TwoStep in all-reduce, reduce and reduce-scatter with more than 8 ranks,
//!   Hierarchical in all-reduce with more than 8 ranks on a host. Where no algorithm is [forced](Options::algorithm), long ones and those of
//!   more than 8 ranks go along a ring, of two operands each; but 8-bit floats take Direct or TwoStep, with up to 64 ranks;
//! - f64 on a GPU without double precision, and averages of floats on one that does not round quotients.
//!
//! Each is counted, with its reason.
//!
//! With an RNIC nothing passes the host, if the card takes the memory as dma-buf ([`ferroce::manual::device_memory`]).
//!
//! # Several ports
//!
//! [`Collectives::add_rail`] gives a rank more ports: its *rails*. The first port of a rank leads to the first ports of the others, the
//! second to the second ones, as in clusters where each card of a host has a switch of its own. If two ranks have different numbers of
//! rails, the smaller number connects them. Chunks go by the rail that is likely to be done first, by what each has moved lately, so a slow rail
//! has fewer; short messages go by an idle one. Chunks are shorter: [`Options::chunk_bytes`] divided by the number of
//! rails, and twice [`Options::eager_bytes`] at least.
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
//! A rail that fails is left, in the middle of an operation too: both ranks tell each other, by another rail, how many messages have come
//! by it, and those that have not are sent again by the others. It counts as failed when its queue pair does, or when nothing has come
//! through for a little more than two ACK timeouts (1.2 s by default) though the peer answers by another rail. A rank that does not poll for
//! a while loses no rail by that. A rail that is left is greeted once in [`Options::probe_interval`] while operations are under way, and
//! taken up when it answers; one that fails again soon is greeted later each time, after up to 16 times
//! [`Options::retry_budget`]. Leaving one, and one that never came up, is a warning in the log, counts as `collective_rails_left` among
//! the metrics of its port, and is a finding of `ferroce flight`. A rank that no rail reaches is lost within
//! [`Options::retry_budget`], as with one; a little later if only one direction is dead.
//!
//! The rails' contexts reach the same memory, which must be such: [`allocate`](Collectives::allocate),
//! [`Memory::shared`](ferroce::Memory::shared) or a device's. It has no slices.
//!
//! # Threads
//!
//! Everything happens in [`poll`](Collectives::poll), which never blocks and takes the time from outside.
//! [`test`](Collectives::test) calls it, [`wait`](Collectives::wait) calls it until the request has ended. A rank that does not poll
//! does not answer: one that computes for long between operations, while others wait for it, is given up after
//! [`Options::retry_budget`], 4.3 s by default. A [`Runner`] polls on a thread of its own, which sleeps while there is nothing to
//! do, and gives other threads a handle whose operations are futures.
//!
//! # Who is late, and who hangs
//!
//! Each [`Collectives`] has a flight recorder: the last 256 operations of each communicator, with their times, what they wait for, and
//! what was exchanged with each other rank. It is memory that other processes of the same user can read, so it tells of a rank that
//! hangs, too. `ferroce flight` shows the ranks of this host, or recordings of several hosts as one, with a time line;
//! `ferroce stat` has the counters, also as Prometheus' text. [`flight::Diagnosis`] is what both say:
//!
//! | it says | from |
//! |---|---|
//! | which rank the others wait for, in which operation, and what it is about | what each rank waits for, how many operations it has called, when it has polled |
//! | which rank begins later than the others, how often and by how much | messages, which say for how long their sender has been in the operation: no clocks are compared |
//! | which port or link is slower than the others, both ways or one | the quickest 512 KiB and more that were under way together, of links that have moved 16 MiB: less than 0.7 of the others |
//! | which rank was off its core in the middle of operations | turns of [`wait`](Collectives::wait) that took 10 ms longer than they should |
//! | which rail is left | what each rank has noticed |
//! | whose device hangs | what the device has not ended |
//!
//! A rank hangs if nothing has moved for a second; late is one that is twice as late as the next one, and by 1 % of the time in all; off its
//! core one that is so for twice as long as the next one, and for 5 % of the time.
//!
//! A recording becomes a file by [`flight::FlightRecorder::dump`], and where [`flight::FOLDER`] names a directory whenever a
//! communicator fails. A program that wants one at a signal has a thread for it:
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
//! - Ranks that outnumber cores: [`Options::idle`] with `Idle::Adaptive { spins: 0, yields: 20 }`. A rank that spins keeps the core from
//!   the one that it waits for.
//! - [`Options::chunk_bytes`], 256 KiB less 64 bytes: shorter where many ranks pass chunks on along a ring, longer on a port that
//!   moves long messages best.
//! - [`Options::eager_bytes`], 64 KiB: messages up to that length are copied. Longer ones wait for an answer that says where they go:
//!   a round trip, which takes longer than two copies of 64 KiB.
//!   Where a rank has a [GPU](#on-a-gpu) messages of any length are copied by the devices, and none by the processor.
//! - [`Options::ack_timeout`] and [`Options::retry_count`]: how long a rank may be silent, against how soon its death is noticed.
//! - A rank has memory for each other rank that it talks to: 1 MiB (half of it with more than 64 ranks), and up to 2 MiB more where it
//!   reduces what comes in chunks.

#[cfg(doc)]
use crate::*;
