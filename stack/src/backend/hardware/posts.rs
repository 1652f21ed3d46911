//! Posting work requests: they are checked, recorded, and passed to the card.

use arrayvec::ArrayVec;
use ferroce_driver::rnic::{
    Bind, Piece, PostRefused, ReceiveRequest, Remote, SendData, SendOperation, SendRequest, Target,
};
use ferroce_wire::RKey;

use super::events::gone;
use super::memory::{HardwareRegion, WindowBinding, remote_rights};
use super::queue_pairs::HardwareQp;
use super::work::{CHUNK, PieceRoom, Regions, SGES, WindowWork, Work};
use super::{Hardware, HardwareSrq, NamedObjects};
use crate::engine::kind::{self, Kind};
use crate::engine::mr::invalid;
use crate::engine::mw::check_rights;
use crate::engine::rq::total_length;
use crate::engine::slab::Slab;
use crate::engine::sq::{check_inline, check_length};
use crate::verbs::{
    Data, Destination, DeviceAttributes, Error, Feature, MAX_MESSAGE, Mw, PostError, Qp, QpState,
    ReceiveWorkRequest, RemoteAddress, RemoteMemory, SendFlags, SendOp, SendWorkRequest, Sge, Srq, WcOpcode,
};

impl Hardware {
    #[inline]
    pub(crate) fn post_send(&mut self, qp: Qp, wr: &SendWorkRequest<'_>) -> Result<(), Error> {
        let (queue_pair, named, attributes, [room, ..]) = self.send_queue(qp)?;
        named.keep(queue_pair, attributes, wr, room, AtOnce)?;
        if let SendOp::BindMw { mw, .. } = wr.op {
            self.bound(mw);
        }
        Ok(())
    }

    pub(crate) fn post_sends(&mut self, qp: Qp, wrs: &[SendWorkRequest<'_>]) -> Result<(), PostError> {
        let mut posted = 0;
        while let Some(rest) = wrs.get(posted..).filter(|rest| !rest.is_empty()) {
            // The key of a bind depends on the previous bind.
            let result = match rest {
                [only] | [only @ SendWorkRequest { op: SendOp::BindMw { .. }, .. }, ..] => {
                    self.post_send(qp, only).map(|()| 1).map_err(not_one)
                }
                _ => self.post_chunk(qp, rest),
            };
            posted += result.map_err(|refused| PostError { posted: posted + refused.posted, ..refused })?;
        }
        Ok(())
    }

    /// Posts sends at once, up to [`CHUNK`] and up to the next bind. Returns their number.
    fn post_chunk(&mut self, qp: Qp, wrs: &[SendWorkRequest<'_>]) -> Result<usize, PostError> {
        let (queue_pair, named, attributes, pieces) = self.send_queue(qp).map_err(not_one)?;
        let mut requests = ArrayVec::<_, CHUNK>::new();
        let kept = named.keep_all(queue_pair, attributes, wrs, pieces, &mut requests);
        let refused = queue_pair.card.post_sends(&mut requests).err();
        let posted = refused.as_ref().map_or(requests.len(), |refused| refused.posted);
        (posted..requests.len()).for_each(|_| queue_pair.sq.pop_newest());
        match refused.map(|refused| refused.error.into()).or(kept.err()) {
            Some(source) => Err(PostError { posted, source }),
            None => Ok(posted),
        }
    }

    /// A queue pair that accepts sends, the objects and capabilities to check them, and storage for the pieces.
    #[inline(always)]
    fn send_queue(
        &mut self,
        qp: Qp,
    ) -> Result<(&mut HardwareQp, &NamedObjects, &DeviceAttributes, &mut PieceRoom), Error> {
        let Hardware { qps, named, pieces, attributes, is_gone, device, .. } = self;
        match qps.get_mut(qp.0) {
            Some(queue_pair) if queue_pair.state == QpState::Rts => {
                Ok((queue_pair, named, attributes, pieces))
            }
            // A device that is gone has no queue pair in RTS.
            _ if *is_gone => Err(gone(device)),
            Some(queue_pair) => {
                let states = [QpState::Sqd, QpState::Sqe, QpState::Error];
                queue_pair.require("post_send", "RTS, SQD, SQE or ERR", &states)?;
                Ok((queue_pair, named, attributes, pieces))
            }
            None => Err(Error::invalid_handle("QP", qp.0)),
        }
    }

    /// A bind is posted.
    #[cold]
    fn bound(&mut self, mw: Mw) {
        if let Some(window) = self.named.mws.get_mut(mw.0) {
            window.key = window.next_rkey() as u8;
        }
    }

    pub(crate) fn post_recv(&mut self, qp: Qp, wr: &ReceiveWorkRequest<'_>) -> Result<(), Error> {
        self.post_recvs(qp, std::slice::from_ref(wr)).map_err(Error::from)
    }

    pub(crate) fn post_recvs(&mut self, qp: Qp, wrs: &[ReceiveWorkRequest<'_>]) -> Result<(), PostError> {
        if self.is_gone {
            return Err(not_one(self.gone()));
        }
        let Hardware { qps, named, pieces, .. } = self;
        let queue_pair = qps.get_mut(qp.0).ok_or_else(|| not_one(Error::invalid_handle("QP", qp.0)))?;
        queue_pair.require("post_recv", "any state but RESET", &QpState::ALL_BUT_RESET).map_err(not_one)?;
        if queue_pair.srq.is_some() {
            let expected = "post receives to the SRQ with post_srq_recv";
            return Err(not_one(Error::invalid("qp", "attached to an SRQ", expected)));
        }
        post_receives(queue_pair, &named.mrs, pieces, wrs)
    }

    pub(crate) fn post_srq_recv(&mut self, srq: Srq, wr: &ReceiveWorkRequest<'_>) -> Result<(), Error> {
        self.post_srq_recvs(srq, std::slice::from_ref(wr)).map_err(Error::from)
    }

    pub(crate) fn post_srq_recvs(
        &mut self,
        srq: Srq,
        wrs: &[ReceiveWorkRequest<'_>],
    ) -> Result<(), PostError> {
        if self.is_gone {
            return Err(not_one(self.gone()));
        }
        let Hardware { srqs, named, pieces, .. } = self;
        let queue = srqs.get_mut(srq.0).ok_or_else(|| not_one(Error::invalid_handle("SRQ", srq.0)))?;
        post_receives(queue, &named.mrs, pieces, wrs)
    }
}

/// No work request of the list was posted.
fn not_one(source: Error) -> PostError {
    PostError { posted: 0, source }
}

/// The destination of a recorded request.
trait Give<'a> {
    fn give(self, queue_pair: &mut HardwareQp, request: SendRequest<'a>) -> Result<(), Error>;
}

/// The card, immediately.
struct AtOnce;

impl<'a> Give<'a> for AtOnce {
    #[inline(always)]
    fn give(self, queue_pair: &mut HardwareQp, mut request: SendRequest<'a>) -> Result<(), Error> {
        queue_pair.card.post_send(&mut request).map_err(|error| {
            queue_pair.sq.pop_newest();
            error.into()
        })
    }
}

/// A list, which is passed to the card as a whole.
impl<'a> Give<'a> for &mut ArrayVec<SendRequest<'a>, CHUNK> {
    #[inline(always)]
    fn give(self, _: &mut HardwareQp, request: SendRequest<'a>) -> Result<(), Error> {
        self.push(request);
        Ok(())
    }
}

impl NamedObjects {
    /// Adds work requests to a list, up to the first invalid one, or a bind.
    #[inline(always)]
    fn keep_all<'a>(
        &'a self,
        queue_pair: &mut HardwareQp,
        attributes: &DeviceAttributes,
        wrs: &[SendWorkRequest<'a>],
        pieces: &'a mut PieceRoom,
        requests: &mut ArrayVec<SendRequest<'a>, CHUNK>,
    ) -> Result<(), Error> {
        for (wr, room) in wrs.iter().zip(pieces) {
            if let SendOp::BindMw { .. } = wr.op {
                break;
            }
            self.keep(queue_pair, attributes, wr, room, &mut *requests)?;
        }
        Ok(())
    }

    /// Checks a work request, records it in the send queue, and passes it on in the card's form.
    #[inline(always)]
    fn keep<'a>(
        &'a self,
        queue_pair: &mut HardwareQp,
        attributes: &DeviceAttributes,
        wr: &SendWorkRequest<'a>,
        room: &'a mut [Piece; SGES],
        give: impl Give<'a>,
    ) -> Result<(), Error> {
        // The two most common kinds have separate code, in which the properties of the kind are constants.
        match wr.op {
            SendOp::Write(to) => self
                .keep_of(&kind::WRITE, queue_pair, wr, room, give, |_| Ok(SendOperation::Write(remote(to)))),
            SendOp::Send => {
                self.keep_of(&kind::SEND, queue_pair, wr, room, give, |_| Ok(SendOperation::Send))
            }
            _ => self.keep_other(queue_pair, attributes, wr, room, give),
        }
    }

    /// The same for any kind.
    #[inline(never)]
    fn keep_other<'a>(
        &'a self,
        queue_pair: &mut HardwareQp,
        attributes: &DeviceAttributes,
        wr: &SendWorkRequest<'a>,
        room: &'a mut [Piece; SGES],
        give: impl Give<'a>,
    ) -> Result<(), Error> {
        let kind = wr.op.kind();
        if kind.is_read_or_atomic && kind.is_on(queue_pair.service) {
            queue_pair.check_read_or_atomic()?;
            wr.op.check(attributes)?;
        }
        self.keep_of(kind, queue_pair, wr, room, give, |queue_pair| self.operation(queue_pair, wr.op))
    }

    /// The same for one kind, which may be a constant; `operation` returns the card's operation once it is recorded.
    #[inline(always)]
    fn keep_of<'a>(
        &'a self,
        kind: &Kind,
        queue_pair: &mut HardwareQp,
        wr: &SendWorkRequest<'a>,
        room: &'a mut [Piece; SGES],
        give: impl Give<'a>,
        operation: impl FnOnce(&mut HardwareQp) -> Result<SendOperation<'a>, Error>,
    ) -> Result<(), Error> {
        if !kind.is_on(queue_pair.service) {
            return Err(wr.op.not_on(queue_pair.service));
        }
        if queue_pair.sq.free() == 0 {
            return Err(queue_pair.sq.full("send"));
        }
        let signaled = wr.flags.signaled || queue_pair.signal_all;
        let add = |queue_pair: &mut HardwareQp, regions, length, data| {
            queue_pair.add(
                Work::new(wr.wr_id, kind.wc_opcode, signaled, regions, length),
                &wr.flags,
                data,
                operation,
                give,
            )
        };
        // Properties of the local memory that are known in each arm are known to the compiler in the rest too.
        match wr.data {
            // Every queue accepts one piece.
            Data::Sges([sge]) if kind.length.is_none() && sge.length <= queue_pair.max_message => {
                room[0] = piece(&self.mrs, sge)?;
                let regions = Regions { first: sge.mr.0.index, count: 1 };
                add(queue_pair, regions, sge.length, SendData::Pieces(&room[..1]))
            }
            Data::Sges(sges) => {
                let (regions, length) = translate(&self.mrs, sges, room, queue_pair.sq.next_regions())?;
                check_length(kind, length, queue_pair.max_message)?;
                add(queue_pair, regions, length, SendData::Pieces(&room[..regions.count.into()]))
            }
            Data::Inline(bytes) => {
                check_inline(kind, bytes, queue_pair.max_inline)?;
                add(queue_pair, Regions::default(), bytes.len() as u32, SendData::Inline(bytes))
            }
        }
    }

    /// The card's operation of the work request recorded last.
    #[inline(never)]
    fn operation(&self, queue_pair: &mut HardwareQp, op: SendOp) -> Result<SendOperation<'_>, Error> {
        Ok(match op {
            SendOp::Send => SendOperation::Send,
            SendOp::SendWithImm(immediate) => SendOperation::SendWithImm(immediate),
            SendOp::SendWithInvalidate(key) => SendOperation::SendWithInvalidate(key.value()),
            SendOp::SendTo(to) => SendOperation::SendTo(self.target(to)?),
            SendOp::SendToWithImm(to, immediate) => SendOperation::SendToWithImm(self.target(to)?, immediate),
            SendOp::Write(to) => SendOperation::Write(remote(to)),
            SendOp::WriteWithImm(to, immediate) => SendOperation::WriteWithImm(remote(to), immediate),
            SendOp::Read(from) => SendOperation::Read(remote(from)),
            SendOp::CompareSwap { remote: at, compare, swap } => {
                SendOperation::CompareSwap { remote: remote(at), compare, swap }
            }
            SendOp::FetchAdd { remote: at, add } => SendOperation::FetchAdd { remote: remote(at), add },
            SendOp::LocalInvalidate(key) => {
                queue_pair.sq.newest_is_of(WindowWork::Invalidate { rkey: key.value() });
                SendOperation::LocalInvalidate(key.value())
            }
            SendOp::BindMw { mw, mr, offset, length, access } => {
                check_rights(access, length)?;
                let bound = self.mws.get(mw.0).ok_or_else(|| Error::invalid_handle("MW", mw.0))?;
                let named = self.mrs.get(mr.0).ok_or_else(|| invalid(mr))?;
                let (addr, rkey) = (named.iova.wrapping_add(offset), bound.next_rkey());
                let remote = RemoteMemory { addr, rkey: RKey::new(rkey), length };
                let binding = WindowBinding { region: mr, remote };
                queue_pair.sq.newest_is_of(WindowWork::Bind { window: mw, binding });
                SendOperation::Bind(Bind {
                    window: &bound.card,
                    rkey,
                    region: &named.card,
                    addr,
                    length,
                    access: remote_rights(access),
                })
            }
            // `check` has refused them, because the device has neither.
            SendOp::Flush { .. } => return Err(Error::Unsupported(Feature::Flush)),
            SendOp::AtomicWrite(_) => return Err(Error::Unsupported(Feature::AtomicWrite)),
        })
    }

    #[inline(always)]
    fn target(&self, to: Destination) -> Result<Target<'_>, Error> {
        let ah = self.ahs.get(to.ah.0).ok_or_else(|| Error::invalid_handle("AH", to.ah.0))?;
        Ok(Target { ah: &ah.card, qpn: to.qpn.value(), qkey: to.qkey })
    }
}

impl HardwareQp {
    /// Adds a checked request to the send queue, and passes it on.
    #[inline(always)]
    fn add<'a>(
        &mut self,
        work: Work,
        flags: &SendFlags,
        data: SendData<'a>,
        operation: impl FnOnce(&mut HardwareQp) -> Result<SendOperation<'a>, Error>,
        give: impl Give<'a>,
    ) -> Result<(), Error> {
        let (wr_id, tells) = self.sq.push_send(work);
        let flags = if tells { SendRequest::SIGNALED } else { 0 }
            | if flags.fence { SendRequest::FENCE } else { 0 }
            | if flags.solicited { SendRequest::SOLICITED } else { 0 };
        match operation(self) {
            Ok(operation) => give.give(self, SendRequest::new(wr_id, operation, data, flags)),
            Err(error) => {
                self.sq.pop_newest();
                Err(error)
            }
        }
    }

    #[inline(never)]
    fn check_read_or_atomic(&self) -> Result<(), Error> {
        let has_none = self.told.send.is_some_and(|send| send.max_rd_atomic == 0);
        if has_none && self.state != QpState::Error {
            return Err(Error::invalid("max_rd_atomic", 0, "at least 1 for READ, atomics and FLUSH"));
        }
        Ok(())
    }
}

/// A queue for receives: of a queue pair, or a shared receive queue.
trait TakesReceives {
    /// The number of receives for which it has room.
    fn free(&self) -> u32;
    /// The error that it is full.
    fn full(&self) -> Error;
    /// The places for the regions of the next one, if there is room for it.
    fn next_regions(&mut self) -> &mut [u32];
    /// Records one, for which there is room and whose regions are in their places, and returns its number on the card.
    fn keep(&mut self, wr_id: u64, regions: Regions) -> u64;
    /// Removes the last one, by that number.
    fn give_back(&mut self, number: u64);
    fn post(&self, requests: &mut [ReceiveRequest<'_>]) -> Result<(), PostRefused>;
}

impl TakesReceives for HardwareQp {
    #[inline(always)]
    fn free(&self) -> u32 {
        self.rq.free()
    }

    fn full(&self) -> Error {
        self.rq.full("receive")
    }

    fn next_regions(&mut self) -> &mut [u32] {
        self.rq.next_regions()
    }

    #[inline(always)]
    fn keep(&mut self, wr_id: u64, regions: Regions) -> u64 {
        self.rq.push(Work::new(wr_id, WcOpcode::Recv, true, regions, 0))
    }

    fn give_back(&mut self, _: u64) {
        self.rq.pop_newest();
    }

    #[inline(always)]
    fn post(&self, requests: &mut [ReceiveRequest<'_>]) -> Result<(), PostRefused> {
        self.card.post_receives(requests)
    }
}

impl TakesReceives for HardwareSrq {
    #[inline(always)]
    fn free(&self) -> u32 {
        self.slots.free()
    }

    fn full(&self) -> Error {
        Error::QueueFull { queue: "receive", depth: self.slots.depth() }
    }

    fn next_regions(&mut self) -> &mut [u32] {
        self.slots.next_regions()
    }

    #[inline(always)]
    fn keep(&mut self, wr_id: u64, regions: Regions) -> u64 {
        self.slots.push(wr_id, regions)
    }

    fn give_back(&mut self, number: u64) {
        // The low half of the number is the slot.
        self.slots.complete(number as u32);
    }

    #[inline(always)]
    fn post(&self, requests: &mut [ReceiveRequest<'_>]) -> Result<(), PostRefused> {
        self.card.post_receives(requests)
    }
}

fn post_receives(
    queue: &mut impl TakesReceives,
    mrs: &Slab<HardwareRegion>,
    pieces: &mut PieceRoom,
    wrs: &[ReceiveWorkRequest<'_>],
) -> Result<(), PostError> {
    let mut before = 0;
    while let Some(rest) = wrs.get(before..).filter(|rest| !rest.is_empty()) {
        let count = rest.len().min(queue.free() as usize).min(CHUNK);
        if count == 0 {
            return Err(PostError { posted: before, source: queue.full() });
        }
        let mut requests = ArrayVec::<_, CHUNK>::new();
        let kept = keep_receives(queue, mrs, &rest[..count], &mut pieces[..count], &mut requests);
        let refused = queue.post(&mut requests).err();
        let posted = refused.as_ref().map_or(requests.len(), |refused| refused.posted);
        requests[posted..].iter().rev().for_each(|request| queue.give_back(request.wr_id()));
        if let Some(source) = refused.map(|refused| refused.error.into()).or(kept.err()) {
            return Err(PostError { posted: before + posted, source });
        }
        before += posted;
    }
    Ok(())
}

/// Adds receives to a list, up to the first invalid one.
#[inline(always)]
fn keep_receives<'a>(
    queue: &mut impl TakesReceives,
    mrs: &Slab<HardwareRegion>,
    wrs: &[ReceiveWorkRequest<'_>],
    pieces: &'a mut [[Piece; SGES]],
    requests: &mut ArrayVec<ReceiveRequest<'a>, CHUNK>,
) -> Result<(), Error> {
    wrs.iter().zip(pieces).try_for_each(|(wr, room)| keep_receive(queue, mrs, wr, room, requests))
}

/// Checks a receive, for which there is room, records it, and adds it to a list in the card's form.
#[inline(always)]
fn keep_receive<'a>(
    queue: &mut impl TakesReceives,
    mrs: &Slab<HardwareRegion>,
    wr: &ReceiveWorkRequest<'_>,
    room: &'a mut [Piece; SGES],
    requests: &mut ArrayVec<ReceiveRequest<'a>, CHUNK>,
) -> Result<(), Error> {
    // The longest one is handled below, where all lengths are checked.
    if let [sge] = wr.sges
        && sge.length < MAX_MESSAGE
    {
        room[0] = piece(mrs, sge)?;
        let number = queue.keep(wr.wr_id, Regions { first: sge.mr.0.index, count: 1 });
        requests.push(ReceiveRequest::new(number, &room[..1]));
        return Ok(());
    }
    let (regions, _) = translate(mrs, wr.sges, room, queue.next_regions())?;
    requests.push(ReceiveRequest::new(queue.keep(wr.wr_id, regions), &room[..regions.count.into()]));
    Ok(())
}

/// Writes the pieces of a work request in the card's form. Returns the regions, whose places except the first's are
/// `places`, and the length.
#[inline(never)]
fn translate(
    mrs: &Slab<HardwareRegion>,
    sges: &[Sge],
    room: &mut [Piece; SGES],
    places: &mut [u32],
) -> Result<(Regions, u32), Error> {
    let length = total_length(sges, places.len())?;
    for ((sge, room), place) in sges.iter().zip(room).zip(places) {
        *room = piece(mrs, sge)?;
        *place = sge.mr.0.index;
    }
    let first = sges.first().map_or(0, |sge| sge.mr.0.index);
    Ok((Regions { first, count: sges.len() as u8 }, length))
}

#[inline(always)]
fn piece(mrs: &Slab<HardwareRegion>, sge: &Sge) -> Result<Piece, Error> {
    let region = mrs.get(sge.mr.0).ok_or_else(|| invalid(sge.mr))?;
    Ok(region.card.piece(sge.offset, sge.length))
}

fn remote(to: RemoteAddress) -> Remote {
    Remote { addr: to.addr, rkey: to.rkey.value() }
}
