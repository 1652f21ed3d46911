//! Ring collectives over RDMA, by [`ferroce`]: each rank of a group has numbers, and all of them get the sums.
//!
//! ```toml
//! [dependencies]
//! ferroce-collectives = "0.1"   # brings ferroce along: `ferroce_collectives::ferroce`; features af_xdp, opencl and cuda as there
//! ```
//!
//! A [`Communicator`] is one rank's part in a group: made from a [`ferroce::Context`], a [`Bootstrap`] (rank, size, and where to
//! meet) and [`Options`]. Each rank is a process, or a thread. As a process it is so short:
//!
//! ```no_run
//! use ferroce_collectives::ferroce::{Config, Context, Device};
//! use ferroce_collectives::{Bootstrap, Communicator, DataType, Error, Options, ReduceOp};
//!
//! fn main() -> Result<(), Error> {
//!     let context = Context::open(Device::open("eth0")?, &Config::default())?;
//!     // RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them.
//!     let mut communicator = Communicator::new(context, Bootstrap::from_env()?, &Options::default())?;
//!     let buffer = communicator.allocate(4 * 1000)?;
//!     communicator.write(buffer, 0, &1.5_f32.to_ne_bytes())?;
//!     communicator.all_reduce(buffer, 1000, DataType::F32, ReduceOp::Sum)?;
//!     let mut sum = [0; 4];
//!     communicator.read(buffer, 0, &mut sum)?;
//!     println!("{}", f32::from_ne_bytes(sum));
//!     communicator.finish()?; // the neighbours may still need an answer
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
//! use ferroce_collectives::{Bootstrap, Communicator, DataType, Options, ReduceOp};
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
//!         let mut communicator = Communicator::new(context, bootstrap, &Options::default())?;
//!         let buffer = communicator.allocate(8)?;
//!         communicator.write(buffer, 0, &1.5_f32.to_ne_bytes())?;
//!         communicator.all_reduce(buffer, 2, DataType::F32, ReduceOp::Sum)?;
//!         let mut sum = [0; 4];
//!         communicator.read(buffer, 0, &mut sum)?;
//!         communicator.finish()?;
//!         Ok::<_, ferroce_collectives::Error>(sum)
//!     }))
//! });
//! for rank in ranks.collect::<Result<Vec<_>, ferroce_collectives::Error>>()? {
//!     let sum = rank.join().expect("no panic")?;
//!     assert_eq!(sum, 4.5_f32.to_ne_bytes());
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # On a GPU
//!
//! [`Communicator::on_device`] has its buffers in memory of a GPU, which makes the sums; [`Communicator::piece`] names a buffer for kernels,
//! and [`ferroce::manual::device_memory`] says what holds beside them.
//!
//! # The all-reduce
//!
//! Reduce-scatter, then all-gather, on a ring ([`Schedule`]): each rank sends to the next one
//! 2 (n − 1) / n of the buffer, which is the least that any all-reduce can do. Chunks are WRITEs
//! with immediate. In the reduce-scatter they go to staging slots of the next rank, which reduces
//! them from there into the buffer: in place, or by copies of a few KiB where a card or another thread may write the
//! memory. In the all-gather they go into its buffer. Nothing else is copied. A chunk is sent on as soon as it is reduced,
//! while the next one is under way.
//!
//! # Bit-exactness
//!
//! All ranks get the same bits, and the same bits in every run. Each element is added up from left
//! to right along the ring, starting at the rank that its [segment](Schedule::segment) is named
//! after: an element of segment `s` is `((x[s] + x[s+1]) + x[s+2]) + … + x[s-1]`, indices modulo
//! n. As f32 rounds each addition, another order gives other bits, unless all partial sums are
//! exact (integers below 2²⁴, say). i32 wraps, in any order.
//!
//! # When a rank fails
//!
//! Nothing hangs. A neighbour that does not answer is given up after [`Options::retry_budget`], 4.3 s by default. A rank that
//! only waits for a neighbour probes it ([`Options::probe_interval`]). A rank that fails tells both neighbours, and they tell
//! theirs. The rendezvous waits 60 s for all ranks, unless [`Bootstrap`] says otherwise.
//!
//! **A rank answers only during calls.** One that computes, loads data or writes a checkpoint for longer than that while others
//! have called already looks dead to them. Where that can be, give the retries longer on all ranks, 35 s for example:
//! `Options::default().ack_timeout(Duration::from_secs(4))` (times 8: `retry_count` is 7), at the price that a dead rank is
//! noticed so much later. If all ranks answer and one calls something else or is stopped inside a call, the others end after
//! [`Options::stall_timeout`]. The [`Error`] names the rank and the
//! reason, and the communicator is of no use after that: make another one.
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
mod group;
mod mapped;
mod memory;
mod operation;
mod options;
mod rendezvous;
mod runner;
mod schedule;
mod shrink;
mod slab;

pub use bootstrap::{Bootstrap, Launcher, MAX_SIZE, UniqueId};
pub use card::Card;
pub use choice::{Explanation, Model};
pub use collectives::{Buffer, Collectives, Communicator, Request};
pub use error::{Cause, Error};
pub use ferroce;
pub use ferroce::driver::reduction::{DataType, ReduceOp};
pub use operation::{At, Kind, Operation, Reduction};
pub use options::{Options, SharedMemory};
#[cfg(fuzzing)]
pub use rendezvous::fuzzing;
pub use runner::{Pending, Runner, RunnerHandle};
pub use schedule::Algorithm;
