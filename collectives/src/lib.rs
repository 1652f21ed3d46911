//! Ring collectives over ferroce.
//!
//! A [`Communicator`] is one rank's part in a group: made from a [`ferroce::Context`], a
//! [`Bootstrap`] (rank, size, and where to meet) and [`Options`].
#![forbid(unsafe_code)]

mod bootstrap;
mod communicator;
mod error;
mod options;
mod reduce;
mod schedule;

pub use bootstrap::{Bootstrap, MAX_SIZE};
pub use communicator::{Buffer, Communicator};
pub use error::Error;
pub use ferroce;
pub use options::Options;
pub use reduce::{DataType, ReduceOp};
pub use schedule::{Chunk, Phase, Schedule};
