//! What carries out the verbs.

pub(crate) mod next_hops;
pub(crate) mod software;
