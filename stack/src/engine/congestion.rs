//! Congestion control: who is told of a marked packet, what a sender does that is told, and how a rate is kept.

pub(crate) mod dcqcn;
