//! What the fuzzer (`tools/fuzz`) calls: the parsers of what other ranks say.

pub use crate::channel::message::fuzzing::{header, immediate};
pub use crate::control::parse as control;
pub use crate::rendezvous::fuzzing::{answer, hello};
