//! Collectives over RDMA, by [`ferroce`]: ranks of a group add up, gather, scatter and exchange elements.
//!
//! ```toml
//! [dependencies]
//! ferroce-collectives = "0.1"   # brings ferroce along: `ferroce_collectives::ferroce`; features af_xdp, opencl and cuda as there
//! ```
//!
//! [`Collectives`] is one rank's part: it owns a [`ferroce::Context`] and the memory that is registered for operations. A
//! [`Communicator`] is a group of ranks, which [`join`](Collectives::join) by a [`Bootstrap`] (rank, size, and where to meet) and
//! [`Options`]. An [`Operation`] is data: what, from where, to where, how many elements. Each rank is a process, or a thread. As
//! a process it is so short:
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
//!     collectives.finish()?; // the other ranks may still need an answer
//!     Ok(())
//! }
//! ```
//!
//! `examples/all_reduce.rs` runs in two terminals, or alone. Three ranks as threads, over ports inside the process:
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
//! [`Kind`] lists them. [`Options::algorithm`] says how they are carried out; by default the communicator chooses. Long
//! operations are cut into chunks ([`Options::chunk_bytes`]), and a chunk is sent on while the next one is under way. What is
//! only moved is written by RDMA to its place; what is reduced, and what is short ([`Options::eager_bytes`]), arrives in memory
//! of the communicator.
//!
//! # On a GPU
//!
//! [`Collectives::on_device`] has its buffers in memory of a GPU, and computes there ([`manual`](manual#on-a-gpu)). [`Collectives::piece`] names a buffer for kernels, and
//! [`ferroce::manual::device_memory`] says what holds beside them.
//!
//! # Bit-exactness
//!
//! All ranks get the same bits, and the same bits in every run of the same algorithm with as many ranks: each algorithm
//! reduces an element in an order of its own. Which algorithm is taken depends on what is measured when the ranks meet, and may be
//! another one in the next run: give [`Options::algorithm`] or [`Options::model`] where bits of floats have to be the same from
//! run to run. Ranks that share memory always take [`Algorithm::Mapped`]. The ring reduces segment `s` of as many as there are
//! ranks from left to right along the ring, from rank `s` on: `((x[s] + x[s+1]) + x[s+2]) + … + x[s-1]`, indices modulo n. As f32 rounds each addition,
//! another order gives other bits, unless all partial sums are exact (integers below 2²⁴, say). Integers wrap, in any order.
//!
//! # When a rank fails
//!
//! Nothing hangs. A rank that does not answer is given up after [`Options::retry_budget`], 4.3 s by default. A rank that only
//! waits for another one asks whether it is there ([`Options::probe_interval`]). Whoever gives up tells all others. The
//! rendezvous waits 60 s for all ranks, unless [`Bootstrap`] says otherwise.
//!
//! **A rank answers only while it polls**, which all calls that wait do, and [`Collectives::poll`]. One that computes, loads data
//! or writes a checkpoint for longer than that while others have called already looks dead to them. Where that can be, give the
//! retries longer on all ranks, 35 s for example: `Options::default().ack_timeout(Duration::from_secs(4))` (times 8:
//! `retry_count` is 7), at the price that a dead rank is noticed so much later. If all ranks answer and one calls something else or
//! nothing, the others end after [`Options::stall_timeout`] at the latest. [`Error::Failed`] names the ranks and the [`Cause`]; the
//! communicator is of no use after that, and others on the context go on.
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
