//! A rank's place on the ring: two queue pairs, staging memory, and what travels on them.
//!
//! | from | to | verb | what |
//! |---|---|---|---|
//! | rank r | r + 1 | WRITE with immediate | a chunk, into staging (reduce-scatter) or into place (all-gather); the immediate numbers it |
//! | rank r | r − 1 | SEND | the [`Call`]: what is called, and where its all-gather chunks go |
//! | rank r | r − 1 | empty WRITE with immediate | credit: how many chunks have been taken, ever |
//! | rank r | both | SEND | abort: a rank has failed |
//! | rank r | both | empty WRITE | probe: does the neighbour live? |
//!
//! A chunk takes one credit, of which there are as many as staging slots; a rank posts more receives
//! than its neighbours can have messages under way, so there is never an RNR NAK.

use std::collections::VecDeque;
use std::time::Duration;

use ferroce::driver::Piece;
use ferroce::driver::gpu::{Device, GpuError, Reducer, Ticket};
use ferroce::{
    Access, AddressVector, Context, Cq, Data, Event, Gid, Memory, Mr, Nanos, PathMtu, Pd, Poller, Psn, Qp,
    QpConfig, Qpn, RKey, ReadyToReceive, ReceiveWorkRequest, RemoteAddress, RnrTimer, SendFlags, SendOp,
    SendWorkRequest, Sge, Transition, WcOpcode, WcStatus, WorkCompletion,
};
use tracing::info;
use zerocopy::byteorder::big_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::rendezvous::Endpoint;
use crate::{DataType, Error, Options, ReduceOp};

pub(crate) struct Ring {
    pub(crate) rank: u32,
    pub(crate) options: Options,
    gid_index: usize,
    cq: Cq,
    left: Neighbour,
    right: Neighbour,
    /// Where the left neighbour writes chunks to be reduced: memory of the host, or of the device that reduces.
    pub(crate) staging: Mr,
    /// What reduces there, if that is a device's.
    pub(crate) reducer: Option<DeviceReducer>,
    remote_staging: RemoteAddress,
    /// Where SENDs arrive.
    mailbox: Mr,
    /// Chunks sent to the right, and those of them that it has taken, ever, modulo 2³².
    sent: u32,
    credited: u32,
    /// Chunks from the left that are reduced, and those of them that it was told of.
    taken: u32,
    reported: u32,
    /// Chunks sent to the right that are not acknowledged.
    pub(crate) unacknowledged: u32,
    /// Chunks from the left that are not taken; those of the next call, too.
    arrivals: VecDeque<Arrival>,
    /// Chunks that are being reduced, and when they are.
    reducing: VecDeque<(Ticket, Arrival)>,
    /// Calls of the right neighbour that are not taken up.
    calls: VecDeque<Call>,
    pub(crate) scratch: Scratch,
}

/// A device that reduces chunks where they arrive.
pub(crate) struct DeviceReducer {
    reducer: Box<dyn Reducer>,
    /// Everything up to it has ended.
    done: Ticket,
}

/// Ends a registration, behind the copies of a device that are under way.
pub(crate) fn deregister(context: &mut Context, poller: &mut Poller, mr: Mr) -> Result<Memory, Error> {
    /// Longer than copies take.
    const AT_MOST: Duration = Duration::from_secs(10);
    let start = poller.now();
    loop {
        match context.deregister(mr) {
            Err(ferroce::Error::Busy { .. }) if poller.now().since(start) < AT_MOST => {
                context.poll(poller.now())?;
            }
            result => return Ok(result?),
        }
    }
}

impl DeviceReducer {
    fn new(device: &dyn Device) -> Result<DeviceReducer, Error> {
        Ok(DeviceReducer { reducer: device.reducer()?, done: Ticket::NONE })
    }

    /// Begins `target[i] = target[i] ⊕ source[i]`. `None` while as many are under way as it takes.
    pub(crate) fn reduce(
        &mut self,
        now: Nanos,
        what: (DataType, ReduceOp),
        target: Piece<'_>,
        source: Piece<'_>,
    ) -> Result<Option<Ticket>, Error> {
        match self.reducer.reduce(now, what, target, source) {
            Ok(ticket) => Ok(Some(ticket)),
            Err(GpuError::Full { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether a reduction has ended.
    pub(crate) fn has_ended(&mut self, now: Nanos, ticket: Ticket) -> Result<bool, Error> {
        if self.done < ticket {
            self.done = self.reducer.done(now).map_err(|failed| Error::Gpu(failed.source))?;
        }
        Ok(ticket <= self.done)
    }
}

/// Room to reduce in, of a size that stays in the first cache.
pub(crate) struct Scratch {
    pub(crate) elements: Box<[u8; Scratch::BYTES]>,
    pub(crate) arrived: Box<[u8; Scratch::BYTES]>,
}

impl Scratch {
    /// Of each operand: whole elements.
    pub(crate) const BYTES: usize = 4096;
}

struct Neighbour {
    rank: u32,
    qp: Qp,
    /// The PSN of our first request.
    psn: Psn,
    /// Sends that have not completed.
    outstanding: u32,
}

impl Neighbour {
    fn new(rank: u32, qp: Qp, context: &mut Context) -> Neighbour {
        Neighbour { rank, qp, psn: context.random_psn(), outstanding: 0 }
    }
}

/// The two directions of the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Left,
    Right,
}

/// A chunk that has come.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    pub(crate) number: u32,
    pub(crate) bytes: u32,
    receive: u64,
}

/// What a rank calls, as its left neighbour is told. Integers are big-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) number: u32,
    pub(crate) count: u64,
    pub(crate) data_type: u8,
    pub(crate) op: u8,
    /// Where the first element lies.
    pub(crate) target: RemoteAddress,
}

impl Call {
    pub(crate) fn new(
        number: u32,
        count: usize,
        data_type: DataType,
        op: ReduceOp,
        target: RemoteAddress,
    ) -> Call {
        Call { number, count: count as u64, data_type: data_type as u8, op: op as u8, target }
    }
}

impl Ring {
    /// Creates the queue pairs and memory of rank `rank` of `size`, ready for messages to come.
    pub(crate) fn new(
        context: &mut Context,
        pd: Pd,
        rank: u32,
        size: u32,
        options: &Options,
        device: Option<&dyn Device>,
    ) -> Result<Ring, Error> {
        let gids = &context.port().gids;
        if gids.is_empty() {
            return Err(Error::invalid("GID table", "empty", "give the interface an IP address"));
        }
        let gid_index = match options.gid_index {
            Some(index) if index >= gids.len() => {
                let expected = format!("below {}, the size of the GID table", gids.len());
                return Err(Error::invalid("gid_index", index, expected));
            }
            Some(index) => index,
            None => gids.iter().position(|e| !e.gid.is_ipv6() && !e.roce_v1).unwrap_or(0),
        };
        let depth = queue_depth(options);
        let cq = context.create_cq(4 * depth)?;
        let config = QpConfig::rc(pd, cq)
            .max_send_wr(depth)
            .max_recv_wr(depth)
            .max_send_sge(1)
            .max_recv_sge(1)
            .max_inline_data(size_of::<Message>() as u32)
            .signal_all(true);
        let left = context.create_qp(&config)?;
        let right = context.create_qp(&config)?;
        let staging_bytes = options.chunk_bytes as usize * options.chunks_in_flight as usize;
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let staging = register(context, pd, allocate(device, staging_bytes)?, access)?;
        let reducer = device.map(DeviceReducer::new).transpose()?;
        let letters = allocate(None, 2 * depth as usize * size_of::<Message>())?;
        let mailbox = register(context, pd, letters, Access::LOCAL_WRITE)?;
        let ring = Ring {
            rank,
            options: *options,
            gid_index,
            cq,
            left: Neighbour::new((rank + size - 1) % size, left, context),
            right: Neighbour::new((rank + 1) % size, right, context),
            staging,
            reducer,
            remote_staging: RemoteAddress { addr: 0, rkey: RKey::new(0) },
            mailbox,
            sent: 0,
            credited: 0,
            taken: 0,
            reported: 0,
            unacknowledged: 0,
            arrivals: VecDeque::with_capacity(options.chunks_in_flight as usize),
            reducing: VecDeque::with_capacity(options.chunks_in_flight as usize),
            calls: VecDeque::with_capacity(MAX_CALLS),
            scratch: Scratch { elements: Box::new([0; _]), arrived: Box::new([0; _]) },
        };
        for (side, qp) in [(Side::Left, left), (Side::Right, right)] {
            context.modify_qp(qp, Transition::Init { access: Access::REMOTE_WRITE })?;
            for slot in 0..depth {
                ring.post_receive(context, receive_id(side, slot))?;
            }
        }
        Ok(ring)
    }

    /// What the other ranks must know.
    pub(crate) fn endpoint(&self, context: &Context) -> Result<Endpoint, Error> {
        let port = context.port();
        let gid = port.gids[self.gid_index].gid;
        let largest = port.path_mtu(gid.is_ipv6()).ok_or_else(|| {
            let expected = "room for a path MTU of 256 and the headers";
            Error::invalid("interface MTU", port.mtu, expected)
        })?;
        let path_mtu = self.options.path_mtu.map_or(largest, |wanted| wanted.min(largest));
        let staging = context.remote(self.staging)?;
        Ok(Endpoint {
            gid: gid.0,
            left_qpn: U32::new(context.query_qp(self.left.qp)?.qpn.value()),
            right_qpn: U32::new(context.query_qp(self.right.qp)?.qpn.value()),
            left_psn: U32::new(self.left.psn.value()),
            right_psn: U32::new(self.right.psn.value()),
            staging_addr: U64::new(staging.addr),
            staging_rkey: U32::new(staging.rkey.value()),
            chunk_bytes: U32::new(self.options.chunk_bytes),
            chunks_in_flight: U32::new(self.options.chunks_in_flight),
            path_mtu: U32::new(path_mtu.bytes()),
            byte_order: Endpoint::BYTE_ORDER,
        })
    }

    /// Connects the queue pairs to the neighbours', at the largest path MTU that all ranks have.
    pub(crate) fn connect(&mut self, context: &mut Context, endpoints: &[Endpoint]) -> Result<(), Error> {
        let least = endpoints.iter().map(|e| e.path_mtu.get()).min().unwrap_or(0);
        let path_mtu = PathMtu::try_from(least)
            .map_err(|e| Error::invalid("path MTU of a rank", least, e.to_string()))?;
        info!(rank = self.rank, ranks = endpoints.len(), %path_mtu, "ring");
        let (left, right) = (endpoints[self.left.rank as usize], endpoints[self.right.rank as usize]);
        self.remote_staging =
            RemoteAddress { addr: right.staging_addr.get(), rkey: RKey::new(right.staging_rkey.get()) };
        let ends = [
            (&self.left, left.gid, left.right_qpn, left.right_psn),
            (&self.right, right.gid, right.left_qpn, right.left_psn),
        ];
        for (Neighbour { qp, psn, .. }, gid, peer_qpn, peer_psn) in ends {
            let qp = *qp;
            let address =
                AddressVector::new(Gid(gid), self.gid_index).traffic_class(self.options.traffic_class);
            let (peer_qpn, peer_psn) = (Qpn::new(peer_qpn.get()), Psn::new(peer_psn.get()));
            let receive = ReadyToReceive::new(address, peer_qpn, peer_psn)
                .path_mtu(path_mtu)
                .max_dest_rd_atomic(0)
                .min_rnr_timer(RNR_TIMER);
            context.modify_qp(qp, Transition::ReadyToReceive(receive))?;
            // No RNR NAK is due; should one come, it is no reason to give up at once.
            let send = self.options.ready_to_send(*psn).rnr_retry(6).max_rd_atomic(0);
            context.modify_qp(qp, Transition::ReadyToSend(send))?;
        }
        Ok(())
    }

    /// After a failure nobody asks for the reductions that are under way, which keep buffers: they end here.
    pub(crate) fn end_reductions(&mut self) {
        self.reducer = None;
    }

    /// Frees everything that `new` has made.
    pub(crate) fn destroy(mut self, context: &mut Context, poller: &mut Poller) -> Result<(), Error> {
        self.end_reductions();
        context.destroy_qp(self.left.qp)?;
        context.destroy_qp(self.right.qp)?;
        context.destroy_cq(self.cq)?;
        for mr in [self.staging, self.mailbox] {
            deregister(context, poller, mr)?;
        }
        Ok(())
    }

    /// Takes what has completed. Whether any of it was more than a sign of life.
    pub(crate) fn take_completions(&mut self, context: &mut Context) -> Result<bool, Error> {
        let mut moved = false;
        while let Some(wc) = context.poll_cq(self.cq)? {
            moved |= self.complete(context, &wc)?;
        }
        while let Some(event) = context.next_event() {
            match event {
                Event::QpFatal(qp) | Event::QpReqErr(qp) | Event::QpAccessErr(qp) => {
                    let peer = self.neighbour(self.side(qp)).rank;
                    return Err(self.protocol(peer, format!("asynchronous event {event:?}")));
                }
                Event::QpUnreachable { qp, reason } => {
                    let peer = self.neighbour(self.side(qp)).rank;
                    return Err(self.protocol(peer, reason.to_string()));
                }
                _ => {}
            }
        }
        Ok(moved)
    }

    /// The oldest chunk from the left that is not taken.
    pub(crate) fn next_arrival(&self) -> Option<Arrival> {
        self.arrivals.front().copied()
    }

    /// The bytes of its staging slot.
    pub(crate) fn arrival_offset(&self) -> usize {
        self.slot(self.taken.wrapping_add(self.reducing.len() as u32))
    }

    /// The oldest chunk is being reduced under this ticket.
    pub(crate) fn take(&mut self, ticket: Ticket) {
        let arrival = self.arrivals.pop_front();
        self.reducing.extend(arrival.map(|arrival| (ticket, arrival)));
    }

    /// Whether the device has chunks.
    pub(crate) fn is_reducing(&self) -> bool {
        !self.reducing.is_empty()
    }

    /// Frees the slot of the oldest chunk that is being reduced, if that has ended. They end in their order, for the neighbour is
    /// told how many have.
    pub(crate) fn free_reduced(&mut self, context: &mut Context, now: Nanos) -> Result<bool, Error> {
        let Some((ticket, arrival)) = self.reducing.front().copied() else { return Ok(false) };
        let ended = match &mut self.reducer {
            Some(reducer) => reducer.has_ended(now, ticket)?,
            None => true,
        };
        if ended {
            self.reducing.pop_front();
            self.taken = self.taken.wrapping_add(1);
            self.post_receive(context, arrival.receive)?;
        }
        Ok(ended)
    }

    /// Tells the left neighbour of slots that are free again, a quarter of them at a time.
    pub(crate) fn return_credits(&mut self, context: &mut Context) -> Result<(), Error> {
        let due = self.taken.wrapping_sub(self.reported);
        if due < (self.options.chunks_in_flight / 4).max(1) || !self.has_room(Side::Left) {
            return Ok(());
        }
        self.reported = self.taken;
        self.post(context, Side::Left, CREDIT, SendOp::WriteWithImm(NOWHERE, self.taken), Data::Inline(&[]))
    }

    /// The oldest call of the right neighbour.
    pub(crate) fn next_call(&mut self) -> Option<Call> {
        self.calls.pop_front()
    }

    /// Whether a chunk may be sent to the right.
    pub(crate) fn may_send(&self) -> bool {
        self.sent.wrapping_sub(self.credited) < self.options.chunks_in_flight && self.has_room(Side::Right)
    }

    /// Sends a chunk to the right: to `target` if it has a place there, to a staging slot otherwise.
    pub(crate) fn send_chunk(
        &mut self,
        context: &mut Context,
        sge: Sge,
        number: u32,
        target: Option<RemoteAddress>,
    ) -> Result<(), Error> {
        let staging = self.remote_staging;
        let slot = staging.addr.wrapping_add(self.slot(self.sent) as u64);
        let target = target.unwrap_or(RemoteAddress { addr: slot, ..staging });
        self.sent = self.sent.wrapping_add(1);
        self.unacknowledged += 1;
        self.post(context, Side::Right, CHUNK, SendOp::WriteWithImm(target, number), Data::Sges(&[sge]))
    }

    /// Tells the left neighbour what is called. `false` if there is no room for it yet.
    pub(crate) fn send_call(&mut self, context: &mut Context, call: &Call) -> Result<bool, Error> {
        if !self.has_room(Side::Left) {
            return Ok(false);
        }
        let message = Message {
            kind: U32::new(CALL_MESSAGE),
            number: U32::new(call.number),
            count: U64::new(call.count),
            addr: U64::new(call.target.addr),
            rkey: U32::new(call.target.rkey.value()),
            data_type: call.data_type,
            op: call.op,
            reserved: [0; 2],
        };
        self.post(context, Side::Left, CALL, SendOp::Send, Data::Inline(message.as_bytes()))?;
        Ok(true)
    }

    /// Sends the neighbours the ACKs that they are owed: what they have sent is complete for them then, whatever this rank
    /// does next.
    pub(crate) fn acknowledge(&mut self, context: &mut Context) -> Result<(), Error> {
        for side in [Side::Left, Side::Right] {
            let qp = self.neighbour(side).qp;
            context.acknowledge(qp)?;
        }
        Ok(())
    }

    /// Asks the neighbours that nothing is under way to for a sign of life.
    pub(crate) fn probe(&mut self, context: &mut Context) -> Result<(), Error> {
        for side in [Side::Left, Side::Right] {
            if self.neighbour(side).outstanding == 0 {
                self.post(context, side, PROBE, SendOp::Write(NOWHERE), Data::Inline(&[]))?;
            }
        }
        Ok(())
    }

    /// Tells both neighbours that rank `origin` has failed. What the posts say is of no interest:
    /// one of the connections is most likely the reason.
    pub(crate) fn post_aborts(&mut self, context: &mut Context, origin: u32) {
        let message = Message {
            kind: U32::new(ABORT_MESSAGE),
            number: U32::new(origin),
            count: U64::new(0),
            addr: U64::new(0),
            rkey: U32::new(0),
            data_type: 0,
            op: 0,
            reserved: [0; 2],
        };
        for side in [Side::Left, Side::Right] {
            if let Err(error) =
                self.post(context, side, ABORT, SendOp::Send, Data::Inline(message.as_bytes()))
            {
                tracing::debug!(rank = self.rank, %error, "abort not posted");
            }
        }
    }

    /// Counts the aborts that have completed, one way or the other.
    pub(crate) fn completed_aborts(&mut self, context: &mut Context) -> Result<u32, Error> {
        let mut completed = 0;
        while let Some(wc) = context.poll_cq(self.cq)? {
            completed += u32::from(wc.wr_id == ABORT);
        }
        Ok(completed)
    }

    fn complete(&mut self, context: &mut Context, wc: &WorkCompletion) -> Result<bool, Error> {
        let side = self.side(wc.qp);
        let peer = self.neighbour(side).rank;
        if wc.status != WcStatus::Success {
            let (rank, budget) = (self.rank, self.options.retry_budget());
            return Err(Error::Neighbour { rank, peer, status: wc.status, budget });
        }
        if wc.wr_id & RECEIVE == 0 {
            self.neighbour_mut(side).outstanding -= 1;
            self.unacknowledged -= u32::from(wc.wr_id == CHUNK);
            return Ok(wc.wr_id != PROBE);
        }
        match (wc.opcode, wc.immediate, side) {
            (WcOpcode::RecvRdmaWithImm, Some(taken), Side::Right) => {
                self.take_credits(taken)?;
                self.post_receive(context, wc.wr_id)?;
            }
            (WcOpcode::RecvRdmaWithImm, Some(number), Side::Left) => {
                // Its receive is posted again when it is taken: that bounds the queue.
                self.arrivals.push_back(Arrival { number, bytes: wc.byte_len, receive: wc.wr_id });
            }
            (WcOpcode::Recv, None, _) => {
                let message = self.read_message(context, wc)?;
                self.post_receive(context, wc.wr_id)?;
                self.take_message(side, &message)?;
            }
            _ => {
                return Err(self.protocol(peer, format!("{:?} with immediate {:?}", wc.opcode, wc.immediate)));
            }
        }
        Ok(true)
    }

    fn take_credits(&mut self, taken: u32) -> Result<(), Error> {
        let outstanding = self.sent.wrapping_sub(taken);
        if outstanding > self.sent.wrapping_sub(self.credited) {
            let problem =
                format!("it has taken {taken} chunks; {} were sent, {} were taken", self.sent, self.credited);
            return Err(self.protocol(self.right.rank, problem));
        }
        self.credited = taken;
        Ok(())
    }

    fn read_message(&self, context: &Context, wc: &WorkCompletion) -> Result<Message, Error> {
        if wc.byte_len as usize != size_of::<Message>() {
            let peer = self.neighbour(self.side(wc.qp)).rank;
            return Err(self.protocol(peer, format!("a message of {} bytes", wc.byte_len)));
        }
        let mut message = Message::new_zeroed();
        let start = mailbox_offset(wc.wr_id, queue_depth(&self.options));
        context.read(self.mailbox, start as u64, message.as_mut_bytes())?;
        Ok(message)
    }

    fn take_message(&mut self, side: Side, message: &Message) -> Result<(), Error> {
        let (rank, peer) = (self.rank, self.neighbour(side).rank);
        match (message.kind.get(), side) {
            (ABORT_MESSAGE, _) => Err(Error::Aborted { rank, origin: message.number.get(), peer }),
            // A neighbour ends a call only after this rank's part in it, so it is one ahead at most.
            (CALL_MESSAGE, Side::Right) if self.calls.len() < MAX_CALLS => {
                self.calls.push_back(Call {
                    number: message.number.get(),
                    count: message.count.get(),
                    data_type: message.data_type,
                    op: message.op,
                    target: RemoteAddress { addr: message.addr.get(), rkey: RKey::new(message.rkey.get()) },
                });
                Ok(())
            }
            (kind, side) => Err(self.protocol(peer, format!("message of kind {kind} on the {side:?} side"))),
        }
    }

    fn post(
        &mut self,
        context: &mut Context,
        side: Side,
        wr_id: u64,
        op: SendOp,
        data: Data<'_>,
    ) -> Result<(), Error> {
        let neighbour = self.neighbour_mut(side);
        context.post_send(neighbour.qp, &SendWorkRequest { wr_id, op, data, flags: SendFlags::SIGNALED })?;
        neighbour.outstanding += 1;
        Ok(())
    }

    fn post_receive(&self, context: &mut Context, wr_id: u64) -> Result<(), Error> {
        let side = if wr_id & RIGHT == 0 { Side::Left } else { Side::Right };
        let offset = mailbox_offset(wr_id, queue_depth(&self.options)) as u64;
        let sge = Sge { mr: self.mailbox, offset, length: size_of::<Message>() as u32 };
        Ok(context.post_recv(self.neighbour(side).qp, &ReceiveWorkRequest { wr_id, sges: &[sge] })?)
    }

    /// Room for a send, with some left over for probes and aborts.
    fn has_room(&self, side: Side) -> bool {
        self.neighbour(side).outstanding < queue_depth(&self.options) - SPARE / 2
    }

    /// Offset in staging memory of chunk `number`, counted over all calls.
    fn slot(&self, number: u32) -> usize {
        // The number of slots divides 2³², so the wrap does no harm.
        (number % self.options.chunks_in_flight) as usize * self.options.chunk_bytes as usize
    }

    fn side(&self, qp: Qp) -> Side {
        if qp == self.left.qp { Side::Left } else { Side::Right }
    }

    pub(crate) fn neighbour_rank(&self, side: Side) -> u32 {
        self.neighbour(side).rank
    }

    fn neighbour(&self, side: Side) -> &Neighbour {
        match side {
            Side::Left => &self.left,
            Side::Right => &self.right,
        }
    }

    fn neighbour_mut(&mut self, side: Side) -> &mut Neighbour {
        match side {
            Side::Left => &mut self.left,
            Side::Right => &mut self.right,
        }
    }

    fn protocol(&self, peer: u32, problem: String) -> Error {
        Error::Protocol { rank: self.rank, peer, problem }
    }
}

/// What a SEND carries; it fits into inline data and into the smallest path MTU.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Message {
    kind: U32,
    /// Of the call; in an abort, the rank that failed.
    number: U32,
    count: U64,
    addr: U64,
    rkey: U32,
    data_type: u8,
    op: u8,
    reserved: [u8; 2],
}

const CALL_MESSAGE: u32 = 1;
const ABORT_MESSAGE: u32 = 2;
/// The call under way and the next.
const MAX_CALLS: usize = 2;

/// Work request ids of sends.
const CHUNK: u64 = 1;
const CREDIT: u64 = 2;
const CALL: u64 = 3;
const PROBE: u64 = 4;
const ABORT: u64 = 5;
/// Bits of those of receives; the others are the slot in the mailbox.
const RECEIVE: u64 = 1 << 63;
const RIGHT: u64 = 1 << 62;

/// Work requests that a queue has room for beyond one for each chunk in flight: credits (at most
/// four under way), calls, probes, aborts.
const SPARE: u32 = 16;

/// 0.64 ms: about a poll of a rank that was off its core.
const RNR_TIMER: RnrTimer = RnrTimer::new(12).unwrap();

/// An empty WRITE goes nowhere; neither address nor key is looked at (IBA C9-88).
const NOWHERE: RemoteAddress = RemoteAddress { addr: 0, rkey: RKey::new(0) };

fn queue_depth(options: &Options) -> u32 {
    options.chunks_in_flight + SPARE
}

fn receive_id(side: Side, slot: u32) -> u64 {
    let side = match side {
        Side::Left => 0,
        Side::Right => RIGHT,
    };
    RECEIVE | side | u64::from(slot)
}

fn mailbox_offset(wr_id: u64, depth: u32) -> usize {
    let first = if wr_id & RIGHT == 0 { 0 } else { depth as usize };
    (first + (wr_id & u64::from(u32::MAX)) as usize) * size_of::<Message>()
}

/// Zeros, of the device if there is one.
pub(crate) fn allocate(device: Option<&dyn Device>, bytes: usize) -> Result<Memory, Error> {
    match device {
        Some(device) => Ok(device.allocate(bytes)?),
        None => Memory::zeroed(bytes).map_err(|source| Error::Memory { bytes, source }),
    }
}

pub(crate) fn register(context: &mut Context, pd: Pd, memory: Memory, access: Access) -> Result<Mr, Error> {
    Ok(context.register(pd, memory, access).map_err(ferroce::Error::from)?)
}

/// The time that an abort has to reach the neighbours.
pub(crate) const ABORT_TIME: Duration = Duration::from_millis(500);
