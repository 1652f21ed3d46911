//! What goes through the rings of a handle.
//!
//! A handle has two single-producer rings of rtrb: commands to the runner, and deliveries back. Each thread has rings
//! of its own, so no two producers share one. A command holds a work request with up to 4 SGEs or 96 bytes of inline
//! data, or a boxed closure that is called with the context (`call`). All commands go through one ring, so they are
//! carried out in the order of posting. The error of a command comes back as a delivery (`Delivery::Refused`), like a
//! completion.

use ferroce_driver::Memory;

use crate::Context;
use crate::verbs::{
    Cq, Data, Error, Mr, Qp, ReceiveWorkRequest, SendFlags, SendOp, SendWorkRequest, Sge, Srq, WorkCompletion,
};

/// Pieces of memory of a work request that goes through a ring.
pub(super) const MAX_SGES: usize = 4;
/// Bytes of inline data of one.
pub(super) const MAX_INLINE: usize = 96;

/// What a [`RunnerHandle`](crate::RunnerHandle) takes from its ring.
#[derive(Debug)]
#[non_exhaustive]
pub enum Delivery {
    /// A work request has ended, with success or not.
    Completed {
        /// The completion queue that it ended in.
        cq: Cq,
        /// How.
        completion: WorkCompletion,
    },
    /// A work request was refused when the runner came to post it, or the runner has ended before
    /// ([`Error::RunnerEnded`]); nothing else will come of it.
    Refused {
        /// What the work request was posted with.
        wr_id: u64,
        /// What [`Context::post_send`] or its like said.
        error: Box<Error>,
    },
    /// An exchange is over.
    Exchanged {
        /// The region.
        mr: Mr,
        /// What was behind it; after an error, what should have gone there.
        memory: Memory,
        /// What [`Context::exchange`] said, or [`Error::RunnerEnded`] if it was not carried out.
        outcome: Result<(), Box<Error>>,
    },
}

/// Each slot of each ring holds one.
const _: () = assert!(size_of::<Delivery>() <= 64);

/// Runs on the runner's thread; the queues are those that the handle's ring is fed from.
pub(super) type Job = Box<dyn FnOnce(&mut Context, &mut Vec<Cq>) + Send>;

pub(super) enum Command {
    Send { qp: Qp, wr_id: u64, op: SendOp, flags: SendFlags, payload: Payload },
    Receive { queue: ReceivesOf, wr_id: u64, payload: Payload },
    Exchange { mr: Mr, memory: Memory },
    Run(Job),
}

/// Where a receive is posted.
#[derive(Clone, Copy)]
pub(super) enum ReceivesOf {
    Qp(Qp),
    Srq(Srq),
}

/// The local side of a work request, without a lifetime.
pub(super) enum Payload {
    Empty,
    Sges { count: u8, sges: [Sge; MAX_SGES] },
    Inline { length: u8, bytes: [u8; MAX_INLINE] },
}

impl Payload {
    pub(super) fn new(data: Data<'_>) -> Result<Payload, Error> {
        match data {
            Data::Sges(sges) => {
                let Some(first) = sges.first() else { return Ok(Payload::Empty) };
                let mut held = [*first; MAX_SGES];
                let Some(part) = held.get_mut(..sges.len()) else {
                    let expected = format!("at most {MAX_SGES} through a runner");
                    return Err(Error::invalid("sges", sges.len(), expected));
                };
                part.copy_from_slice(sges);
                Ok(Payload::Sges { count: sges.len() as u8, sges: held })
            }
            Data::Inline(data) => {
                let mut bytes = [0; MAX_INLINE];
                let Some(part) = bytes.get_mut(..data.len()) else {
                    let expected = format!("at most {MAX_INLINE} bytes through a runner");
                    return Err(Error::invalid("inline data", data.len(), expected));
                };
                part.copy_from_slice(data);
                Ok(Payload::Inline { length: data.len() as u8, bytes })
            }
        }
    }

    fn data(&self) -> Data<'_> {
        match self {
            Payload::Empty => Data::Sges(&[]),
            Payload::Sges { .. } => Data::Sges(self.sges()),
            Payload::Inline { length, bytes } => Data::Inline(&bytes[..usize::from(*length)]),
        }
    }

    fn sges(&self) -> &[Sge] {
        match self {
            Payload::Sges { count, sges } => &sges[..usize::from(*count)],
            Payload::Empty | Payload::Inline { .. } => &[],
        }
    }
}

impl Command {
    /// Carries it out. What the handle has to be told at once is returned.
    pub(super) fn execute(self, context: &mut Context, cqs: &mut Vec<Cq>) -> Option<Delivery> {
        let (wr_id, outcome) = match self {
            Command::Send { qp, wr_id, op, flags, payload } => {
                let data = payload.data();
                (wr_id, context.post_send(qp, &SendWorkRequest { wr_id, op, data, flags }))
            }
            Command::Receive { queue, wr_id, payload } => {
                let wr = ReceiveWorkRequest { wr_id, sges: payload.sges() };
                let outcome = match queue {
                    ReceivesOf::Qp(qp) => context.post_recv(qp, &wr),
                    ReceivesOf::Srq(srq) => context.post_srq_recv(srq, &wr),
                };
                (wr_id, outcome)
            }
            Command::Exchange { mr, memory } => {
                return Some(match context.exchange(mr, memory) {
                    Ok(memory) => Delivery::Exchanged { mr, memory, outcome: Ok(()) },
                    Err(refused) => Delivery::Exchanged {
                        mr,
                        memory: refused.memory,
                        outcome: Err(Box::new(refused.source)),
                    },
                });
            }
            Command::Run(job) => {
                job(context, cqs);
                return None;
            }
        };
        outcome.err().map(|error| Delivery::Refused { wr_id, error: Box::new(error) })
    }

    /// What the handle is told of one that is not carried out. Who waits for a closure learns of that by its drop.
    pub(super) fn refuse(self, error: Error) -> Option<Delivery> {
        let error = Box::new(error);
        match self {
            Command::Send { wr_id, .. } | Command::Receive { wr_id, .. } => {
                Some(Delivery::Refused { wr_id, error })
            }
            Command::Exchange { mr, memory } => Some(Delivery::Exchanged { mr, memory, outcome: Err(error) }),
            Command::Run(_) => None,
        }
    }
}
