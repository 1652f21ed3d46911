//! What carries out the verbs.

pub(crate) mod software;
