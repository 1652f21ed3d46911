//! The entries of a handle's rings.
//!
//! A handle has two single-producer rings of rtrb: commands to the runner, and deliveries back. Each thread has rings of its own,
//! so no two producers share one. A command holds a work request with up to 4 SGEs or 96 bytes of inline data, or a boxed closure
//! that is called with the context (`call`). All commands use one ring, so they are executed in the order of posting. The error
//! of a command is returned as a delivery (`Delivery::Refused`), like a completion.

use ferroce_driver::Memory;

use crate::Context;
use crate::verbs::{
    Cq, Data, Error, Mr, Qp, ReceiveWorkRequest, SendFlags, SendOp, SendWorkRequest, Sge, Srq, WorkCompletion,
};

/// The most SGEs of a work request in a ring.
pub(super) const MAX_SGES: usize = 4;
/// The most bytes of inline data of one.
pub(super) const MAX_INLINE: usize = 96;

/// An entry that a [`RunnerHandle`](crate::RunnerHandle) takes from its ring.
#[derive(Debug)]
#[non_exhaustive]
pub enum Delivery {
    /// A work request has completed, successfully or not.
    Completed {
        /// Its completion queue.
        cq: Cq,
        /// The completion.
        completion: WorkCompletion,
    },
    /// A work request was refused when the runner posted it, or the runner ended before ([`Error::RunnerEnded`]); it will have no
    /// completion.
    Refused {
        /// The `wr_id` of the work request.
        wr_id: u64,
        /// The error of [`Context::post_send`] or a similar verb.
        error: Box<Error>,
    },
    /// An exchange has ended.
    Exchanged {
        /// The region.
        mr: Mr,
        /// Its previous memory; after an error, the memory that was to replace it.
        memory: Memory,
        /// The result of [`Context::exchange`], or [`Error::RunnerEnded`] if it was not executed.
        outcome: Result<(), Box<Error>>,
    },
}

/// Each slot of each ring holds one.
const _: () = assert!(size_of::<Delivery>() <= 64);

/// Runs on the runner's thread; the queues are those whose completions go to the handle's ring.
pub(super) type Job = Box<dyn FnOnce(&mut Context, &mut Vec<Cq>) + Send>;

pub(super) enum Command {
    Send { qp: Qp, wr_id: u64, op: SendOp, flags: SendFlags, payload: Payload },
    Receive { queue: ReceivesOf, wr_id: u64, payload: Payload },
    Exchange { mr: Mr, memory: Memory },
    Run(Job),
}

/// The queue of a receive.
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
    /// Executes it. Returns the immediate delivery to the handle, if any.
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

    /// The delivery for a command that is not executed. A thread that waits for a closure is notified by its drop.
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
