//! Collectives over RDMA, with [`ferroce`]: ranks of a group reduce, gather, scatter and exchange elements.
//!
//! ```toml
//! [dependencies]
//! ferroce-collectives = "0.1"   # once it is published; until then by path
//! ```
//!
//! The crate re-exports `ferroce` ([`ferroce_collectives::ferroce`](ferroce)), and has its features `af_xdp`, `opencl` and `cuda`.
//! Terms of RDMA: [glossary](ferroce::manual::glossary).
//!
//! A [`Collectives`] is one rank: it owns a [`ferroce::Context`] and the memory registered for operations. A [`Communicator`] is a
//! group of ranks, which [`join`](Collectives::join) with a [`Bootstrap`] (rank, size, and the address of rank 0) and [`Options`].
//! An [`Operation`] is a value: kind, input, output, number of elements. Each rank is a process, or a thread. A rank as a process:
//!
//! ```no_run
//! use ferroce_collectives::ferroce::{Config, Context, Device};
//! use ferroce_collectives::{Bootstrap, Collectives, DataType, Error, Operation, Options, ReduceOp};
//!
//! fn main() -> Result<(), Error> {
//!     let context = Context::open(Device::open("eth0")?, &Config::default())?;
//!     let mut collectives = Collectives::new(context)?;
//!     // RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them.
//!     let all = collectives.join(Bootstrap::from_env()?, &Options::default())?;
//!     let buffer = collectives.allocate(4 * 1000)?;
//!     collectives.write(buffer, 0, &1.5_f32.to_ne_bytes())?;
//!     // In place: input and output are the same buffer.
//!     let sum = Operation::all_reduce(buffer, buffer, 1000, DataType::F32, ReduceOp::Sum);
//!     collectives.run(all, &sum)?;
//!     let mut first = [0; 4];
//!     collectives.read(buffer, 0, &mut first)?;
//!     println!("{}", f32::from_ne_bytes(first));
//!     collectives.finish()?; // answers the other ranks until all have finished
//!     Ok(())
//! }
//! ```
//!
//! `examples/all_reduce.rs` runs in two terminals, or in one (`cargo run -p ferroce-collectives --example all_reduce`). Three ranks
//! as threads, with ports inside the process:
//!
//! ```
//! use std::net::TcpListener;
//!
//! use ferroce_collectives::ferroce::driver::loopback::{Switch, SwitchConfig};
//! use ferroce_collectives::ferroce::{Config, Context};
//! use ferroce_collectives::{Bootstrap, Collectives, DataType, Operation, Options, ReduceOp};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let switch = Switch::new(SwitchConfig::default())?;
//! let listener = TcpListener::bind("127.0.0.1:0")?;
//! let master = listener.local_addr()?;
//! let mut listener = Some(listener);
//! let ranks = (0..3).map(|rank| {
//!     let port = switch.port(&[[10, 0, 0, rank + 1].into()]);
//!     let mut bootstrap = Bootstrap::new(rank.into(), 3, master)?;
//!     if let Some(listener) = listener.take() {
//!         bootstrap = bootstrap.listener(listener);
//!     }
//!     Ok(std::thread::spawn(move || {
//!         let context = Context::open(Box::new(port), &Config::default())?;
//!         let mut collectives = Collectives::new(context)?;
//!         let all = collectives.join(bootstrap, &Options::default())?;
//!         let buffer = collectives.allocate(8)?;
//!         collectives.write(buffer, 0, &1.5_f32.to_ne_bytes())?;
//!         // `run` is `start` and `wait`; other operations may be under way meanwhile.
//!         let sum = Operation::all_reduce(buffer, buffer, 2, DataType::F32, ReduceOp::Sum);
//!         let request = collectives.start(all, &sum)?;
//!         collectives.wait(request)?;
//!         let mut first = [0; 4];
//!         collectives.read(buffer, 0, &mut first)?;
//!         collectives.finish()?;
//!         Ok::<_, ferroce_collectives::Error>(first)
//!     }))
//! });
//! for rank in ranks.collect::<Result<Vec<_>, ferroce_collectives::Error>>()? {
//!     let first = rank.join().expect("no panic")?;
//!     assert_eq!(first, 4.5_f32.to_ne_bytes());
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Operations
//!
//! [`Kind`] lists them. [`Options::algorithm`] sets the algorithm; by default the communicator chooses. Long operations are
//! divided into chunks ([`Options::chunk_bytes`]), which are pipelined. Data that is only moved is written to its destination
//! with RDMA WRITE. Data to reduce, and short messages ([`Options::eager_bytes`]), are received in memory of the communicator, and
//! reduced or copied from there.
//!
//! # On a GPU
//!
//! A [`Collectives`] created by [`on_device`](Collectives::on_device) allocates buffers in GPU memory, and reduces there
//! ([`manual`](manual#on-a-gpu)). [`Collectives::piece`] returns a buffer for kernels, and [`ferroce::manual::device_memory`] has
//! the rules for concurrent kernels.
//!
//! # Bit-exactness
//!
//! All ranks get the same bits, in every run with the same algorithm, number of ranks and chunk length: each algorithm has a fixed
//! order of reduction. The choice of the algorithm depends on measurements when the ranks meet, and may differ in the next run: set
//! [`Options::algorithm`] or [`Options::model`] if the bits of floats must be the same in every run. Ranks that share memory use
//! [`Algorithm::Mapped`], unless `Options::algorithm` forces another one ([`manual`](manual#which-algorithm)). The
//! [order of each algorithm](manual#the-order-of-reductions) is documented: the ring, for example, divides the elements into n
//! segments for n ranks, and reduces segment `s` from rank `s` on: `((x[s] + x[s+1]) + x[s+2]) + … + x[s-1]`, where `x[r]` is the
//! element of rank r, indices modulo n. As f32 rounds each addition, another order may have other bits, unless all partial sums are
//! exact (integers below 2²⁴, for example). Integers wrap, in any order.
//!
//! # When a rank fails
//!
//! No call waits for ever. A rank that does not answer is taken as lost after [`Options::retry_budget`], 4.3 s by default. A rank
//! that only waits for another one probes it ([`Options::probe_interval`]). A rank whose operation fails notifies all others. The
//! rendezvous waits 60 s for all ranks by default ([`Bootstrap`]).
//!
//! **A rank answers only while it polls**, in all blocking calls and in [`Collectives::poll`]. A rank that computes, loads data or
//! writes a checkpoint for longer than the retry budget, while others have already called the operation, is taken as lost. If this
//! can happen, set a longer retry budget on all ranks. `Options::default().ack_timeout(Duration::from_secs(4))` makes it 34 s: 4 s
//! are [rounded up](ferroce::manual::connecting#timeouts-and-retries) to 4.3 s, times 8, as `retry_count` is 7. A dead rank is then
//! noticed that much later. If all ranks answer, but one calls a different operation or none, the operations of the others fail
//! after [`Options::stall_timeout`] at the latest. [`Error::Failed`] names the ranks and the [`Cause`]; the communicator can't be
//! used any more, and other communicators of the context continue.
#![forbid(unsafe_code)]

mod bootstrap;
mod card;
mod channel;
mod choice;
mod collectives;
mod compute;
mod control;
mod error;
mod execution;
mod fallback;
pub mod flight;
#[cfg(fuzzing)]
pub mod fuzzing;
mod group;
pub mod manual;
mod mapped;
mod memory;
mod operation;
mod options;
mod ports;
mod rendezvous;
mod runner;
mod schedule;
mod shrink;
mod slab;
pub mod topology;

pub use bootstrap::{Bootstrap, Launcher, MAX_SIZE, UniqueId};
pub use card::Card;
pub use choice::{Explanation, Model, Pace};
pub use collectives::{Buffer, Collectives, Communicator, Measurement, Request};
pub use error::{Cause, Error};
pub use ferroce;
pub use ferroce::driver::reduction::{DataType, ReduceOp};
pub use operation::{At, Kind, Operation, Reduction};
pub use options::{Options, SharedMemory};
pub use ports::MAX_RAILS;
pub use runner::{Pending, Runner, RunnerHandle};
pub use schedule::Algorithm;
