//! The ring all-reduce: the schedule, carried out.

use std::ops::Range;
use std::time::{Duration, Instant};

use ferroce::driver::gpu::Ticket;
use ferroce::{Context, Nanos, Poller, RemoteAddress, Sge};

use crate::communicator::Place;
use crate::ring::{Call, Ring, Scratch, Side};
use crate::schedule_old::{Chunk, Phase, Schedule};
use crate::{Buffer, DataType, Error, ReduceOp, reduce};

/// One all-reduce under way.
pub(crate) struct AllReduce {
    call: Call,
    buffer: Buffer,
    data_type: DataType,
    op: ReduceOp,
    schedule: Schedule,
    sent: usize,
    /// Chunks whose reduction has begun, and those for which it has ended.
    taken: usize,
    received: usize,
    /// The left neighbour has been told.
    announced: bool,
    /// Where the right neighbour wants its all-gather chunks.
    target: Option<RemoteAddress>,
}

impl AllReduce {
    /// Of the first elements of `buffer`, by `schedule`; `number` counts the calls.
    pub(crate) fn new(
        context: &Context,
        number: u32,
        buffer: Buffer,
        count: usize,
        data_type: DataType,
        op: ReduceOp,
        schedule: Schedule,
    ) -> Result<AllReduce, Error> {
        let own = context.remote(buffer.mr)?;
        let target = RemoteAddress { addr: own.addr, rkey: own.rkey };
        let call = Call::new(number, count, data_type, op, target);
        Ok(AllReduce {
            call,
            buffer,
            data_type,
            op,
            schedule,
            sent: 0,
            taken: 0,
            received: 0,
            announced: false,
            target: None,
        })
    }

    /// Polls until this rank's part is done.
    pub(crate) fn run(
        mut self,
        context: &mut Context,
        poller: &mut Poller,
        ring: &mut Ring,
    ) -> Result<(), Error> {
        let mut sends = self.schedule.sends().peekable();
        let mut receives = self.schedule.receives().peekable();
        let (all_sends, all_receives) = (self.schedule.sent_chunks(), self.schedule.received_chunks());
        let mut patience = Patience::new(poller.now());
        loop {
            let mut moved = ring.take_completions(context)?;
            if !self.announced {
                self.announced = ring.send_call(context, &self.call)?;
            }
            if self.target.is_none()
                && let Some(theirs) = ring.next_call()
            {
                self.agree(ring, &theirs)?;
                self.target = Some(theirs.target);
            }
            // One chunk a turn: while it is reduced the neighbours' packets wait.
            if self.taken < all_receives
                && let Some(arrival) = ring.next_arrival()
                && let Some(chunk) = receives.peek()
            {
                self.check_arrival(ring, chunk, arrival.number, arrival.bytes)?;
                if let Some(ticket) = self.take(context, poller.now(), ring, chunk)? {
                    ring.take(ticket);
                    receives.next();
                    self.taken += 1;
                    moved = true;
                }
            }
            while ring.free_reduced(context, poller.now())? {
                self.received += 1;
                moved = true;
            }
            ring.return_credits(context)?;
            while ring.may_send()
                && let Some(chunk) = sends.next_if(|chunk| self.is_ready(chunk))
            {
                self.send(context, ring, &chunk)?;
                moved = true;
            }
            // The memory must stay as it is until the neighbour has it: packets that are sent again
            // are read from it again.
            let sent = self.sent == all_sends && ring.unacknowledged == 0;
            if sent && self.received == all_receives && self.announced && self.target.is_some() {
                context.poll(poller.now())?;
                return ring.acknowledge(context);
            }
            match patience.consider(poller.now(), moved, ring.options.probe_interval) {
                Wait::Longer => {}
                Wait::Probe => ring.probe(context)?,
            }
            if patience.waited >= ring.options.stall_timeout {
                return Err(self.stalled(ring, patience.waited, all_receives));
            }
            if ring.is_reducing() {
                // A device tells nobody when it is done: no sleep.
                context.poll(poller.now())?;
            } else {
                poller.poll(context)?;
            }
        }
    }

    /// Whether the elements are final (or, in the first segment, as the caller left them), and the
    /// place to which they go is known.
    fn is_ready(&self, chunk: &Chunk) -> bool {
        let there = self.sent < self.schedule.head_start() + self.received;
        there && (chunk.phase == Phase::ReduceScatter || self.target.is_some())
    }

    fn send(&mut self, context: &mut Context, ring: &mut Ring, chunk: &Chunk) -> Result<(), Error> {
        let (offset, length) = self.bytes(chunk);
        let target = match (chunk.phase, self.target) {
            (Phase::AllGather, Some(target)) => {
                Some(RemoteAddress { addr: target.addr.wrapping_add(offset as u64), ..target })
            }
            _ => None,
        };
        let sge = Sge { mr: self.buffer.mr, offset: offset as u64, length: length as u32 };
        ring.send_chunk(context, sge, self.number(self.sent), target)?;
        self.sent += 1;
        Ok(())
    }

    /// Reduces the chunk that has come, and returns what to wait for; nothing ([`Ticket::NONE`]) if it is done. `None` if the
    /// device takes it later. All-gather chunks are in place already.
    fn take(
        &self,
        context: &mut Context,
        now: Nanos,
        ring: &mut Ring,
        chunk: &Chunk,
    ) -> Result<Option<Ticket>, Error> {
        if chunk.phase == Phase::AllGather {
            return Ok(Some(Ticket::NONE));
        }
        let (offset, length) = self.bytes(chunk);
        let (staging, staged) = (ring.staging, ring.arrival_offset());
        match (self.buffer.place, &mut ring.reducer) {
            (Place::Here, _) => {
                // So has staging slices, which this context owns as well.
                let (elements, arrived) = context.bytes_pair_mut(self.buffer.mr, staging)?;
                let (elements, arrived) = (&mut elements[offset..][..length], &arrived[staged..][..length]);
                reduce(self.data_type, self.op, elements, arrived);
            }
            (Place::Device, Some(reducer)) => {
                let target = context.piece(self.buffer.mr, offset as u64, length)?;
                let source = context.piece(staging, staged as u64, length)?;
                return reducer.reduce(now, (self.data_type, self.op), target, source);
            }
            _ => self.take_by_copies(context, ring, offset..offset + length)?,
        }
        Ok(Some(Ticket::NONE))
    }

    /// As `take`, of memory that a card, a device or another thread may write meanwhile.
    #[inline(never)]
    fn take_by_copies(
        &self,
        context: &mut Context,
        ring: &mut Ring,
        bytes: Range<usize>,
    ) -> Result<(), Error> {
        let (staging, staged, length) = (ring.staging, ring.arrival_offset(), bytes.len());
        let Scratch { elements, arrived } = &mut ring.scratch;
        for done in (0..length).step_by(Scratch::BYTES) {
            let piece = (length - done).min(Scratch::BYTES);
            let (elements, arrived) = (&mut elements[..piece], &mut arrived[..piece]);
            let place = (bytes.start + done) as u64;
            context.read(staging, (staged + done) as u64, arrived)?;
            context.read(self.buffer.mr, place, elements)?;
            reduce(self.data_type, self.op, elements, arrived);
            context.write(self.buffer.mr, place, elements)?;
        }
        Ok(())
    }

    fn bytes(&self, chunk: &Chunk) -> (usize, usize) {
        let size = self.data_type.size();
        (chunk.elements.start * size, chunk.elements.len() * size)
    }

    /// The immediate of a chunk: 8 bits of the call, 24 of its place in it.
    fn number(&self, index: usize) -> u32 {
        self.call.number << 24 | index as u32 & 0x00ff_ffff
    }

    fn check_arrival(&self, ring: &Ring, chunk: &Chunk, number: u32, bytes: u32) -> Result<(), Error> {
        let expected = self.number(self.taken);
        let peer = ring.neighbour_rank(Side::Left);
        let rank = ring.rank;
        let place = |number: u32| format!("chunk {} of call {} mod 256", number & 0x00ff_ffff, number >> 24);
        if number != expected {
            let (ours, theirs) = (place(expected), place(number));
            return Err(Error::Mismatch { rank, peer, what: "the chunk that is next", ours, theirs });
        }
        let (_, length) = self.bytes(chunk);
        if bytes as usize != length {
            let (ours, theirs) = (length.to_string(), bytes.to_string());
            return Err(Error::Mismatch { rank, peer, what: "the length of a chunk in bytes", ours, theirs });
        }
        Ok(())
    }

    /// Whether the right neighbour calls the same.
    fn agree(&self, ring: &Ring, theirs: &Call) -> Result<(), Error> {
        let ours = &self.call;
        let differences = [
            ("the number of the call", u64::from(ours.number), u64::from(theirs.number)),
            ("the count", ours.count, theirs.count),
            ("the data type", ours.data_type.into(), theirs.data_type.into()),
            ("the operation", ours.op.into(), theirs.op.into()),
        ];
        match differences.into_iter().find(|(_, ours, theirs)| ours != theirs) {
            None => Ok(()),
            Some((what, ours, theirs)) => Err(Error::Mismatch {
                rank: ring.rank,
                peer: ring.neighbour_rank(Side::Right),
                what,
                ours: ours.to_string(),
                theirs: theirs.to_string(),
            }),
        }
    }

    fn stalled(&self, ring: &Ring, waited: Duration, expected: usize) -> Error {
        Error::Stalled {
            rank: ring.rank,
            waited,
            received: self.received as u64,
            expected: expected as u64,
            sent: self.sent as u64,
            call: self.call.number,
        }
    }
}

/// How long nothing has moved.
struct Patience {
    last_move: Nanos,
    last_probe: Nanos,
    waited: Duration,
}

enum Wait {
    Longer,
    Probe,
}

impl Patience {
    fn new(now: Nanos) -> Patience {
        Patience { last_move: now, last_probe: now, waited: Duration::ZERO }
    }

    fn consider(&mut self, now: Nanos, moved: bool, probe_interval: Duration) -> Wait {
        if moved {
            *self = Patience::new(now);
        }
        self.waited = now.since(self.last_move);
        if now.since(self.last_probe) < probe_interval {
            return Wait::Longer;
        }
        self.last_probe = now;
        Wait::Probe
    }
}

/// Tells the neighbours that a call has failed, for as long as that may take.
pub(crate) fn spread_failure(
    context: &mut Context,
    poller: &mut Poller,
    ring: &mut Ring,
    error: &Error,
    time: Duration,
) -> Result<(), Error> {
    let origin = match error {
        Error::Aborted { origin, .. } => *origin,
        Error::Neighbour { peer, .. } => *peer,
        _ => ring.rank,
    };
    ring.post_aborts(context, origin);
    let deadline = Instant::now() + time;
    let mut completed = 0;
    while completed < 2 && Instant::now() < deadline {
        poller.poll(context)?;
        completed += ring.completed_aborts(context)?;
    }
    Ok(())
}
