//! The entry points of the fuzzer (`tools/fuzz`): the parsers of messages from other ranks.

pub use crate::channel::message::fuzzing::{header, immediate};
pub use crate::control::parse as control;
pub use crate::rendezvous::fuzzing::{answer, hello};
