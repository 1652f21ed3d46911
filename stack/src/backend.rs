//! What carries out the verbs. This file alone tells backends apart (docs/decisions/07-backends.md).

mod software;

pub(crate) use software::Software;

/// What a context is over. Each backend has every verb that is called on it by [`dispatch`], under the same name; what it
/// can't do it refuses with [`Error::Unsupported`](crate::Error::Unsupported).
pub(crate) enum Backend {
    /// The protocol engine over a packet driver.
    Software(Software),
}

/// Carries out a verb on the backend that there is: `dispatch!(&mut self.backend, poll(now))`.
macro_rules! dispatch {
    ($backend:expr, $verb:ident($($argument:expr),*)) => {
        match $backend {
            $crate::backend::Backend::Software(software) => software.$verb($($argument),*),
        }
    };
}
pub(crate) use dispatch;
