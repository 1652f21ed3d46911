//! Work requests as they are posted: checked, kept, and given to the card.

use arrayvec::ArrayVec;
use ferroce_driver::rnic::{
    Bind, Piece, PostRefused, ReceiveRequest, Remote, SendData, SendOperation, SendRequest, Target,
};
use ferroce_wire::RKey;

use super::memory::{HardwareRegion, HardwareWindow, WindowBinding, remote_rights};
use super::queue_pairs::HardwareQp;
use super::work::{CHUNK, PieceRoom, Regions, SGES, WindowWork, Work};
use super::{Hardware, HardwareAh, HardwareSrq};
use crate::engine::mr::invalid;
use crate::engine::mw::check_rights;
use crate::engine::rq::total_length;
use crate::engine::slab::Slab;
use crate::engine::sq::{check_inline, check_length};
use crate::verbs::{
    Data, Destination, DeviceAttributes, Error, Feature, MAX_MESSAGE, Mw, PostError, Qp, QpState,
    ReceiveWorkRequest, RemoteAddress, RemoteMemory, SendOp, SendWorkRequest, Sge, Srq, WcOpcode,
};

impl Hardware {
    #[inline]
    pub(crate) fn post_send(&mut self, qp: Qp, wr: &SendWorkRequest<'_>) -> Result<(), Error> {
        let (queue_pair, named, [room, ..]) = self.send_queue(qp)?;
        let mut request = SendRequest::EMPTY;
        named.keep(queue_pair, wr, room, &mut request)?;
        if let Err(error) = queue_pair.card.post_send(&mut request) {
            queue_pair.sq.pop_newest();
            return Err(error.into());
        }
        if let SendOp::BindMw { mw, .. } = wr.op {
            self.bound(mw);
        }
        Ok(())
    }

    pub(crate) fn post_sends(&mut self, qp: Qp, wrs: &[SendWorkRequest<'_>]) -> Result<(), PostError> {
        let mut posted = 0;
        while let Some(rest) = wrs.get(posted..).filter(|rest| !rest.is_empty()) {
            let is_bind = |wr: &SendWorkRequest<'_>| matches!(wr.op, SendOp::BindMw { .. });
            let count = rest.iter().take(CHUNK).take_while(|wr| !is_bind(wr)).count();
            let result = match count {
                // The key of a bind follows from that of the bind before it.
                0 | 1 => self.post_send(qp, &rest[0]).map_err(first),
                _ => self.post_chunk(qp, &rest[..count]),
            };
            result.map_err(|refused| PostError { posted: posted + refused.posted, ..refused })?;
            posted += count.max(1);
        }
        Ok(())
    }

    /// Posts up to [`CHUNK`] sends at once, none of which is a bind.
    fn post_chunk(&mut self, qp: Qp, wrs: &[SendWorkRequest<'_>]) -> Result<(), PostError> {
        let (queue_pair, named, pieces) = self.send_queue(qp).map_err(first)?;
        let mut requests = ArrayVec::<_, CHUNK>::new();
        let mut wrong = None;
        for (wr, room) in wrs.iter().zip(pieces.iter_mut()) {
            requests.push(SendRequest::EMPTY);
            let Some(request) = requests.last_mut() else { break };
            if let Err(error) = named.keep(queue_pair, wr, room, request) {
                requests.pop();
                wrong = Some(error);
                break;
            }
        }
        let refused = queue_pair.card.post_sends(&mut requests).err();
        let posted = refused.as_ref().map_or(requests.len(), |refused| refused.posted);
        (posted..requests.len()).for_each(|_| queue_pair.sq.pop_newest());
        match refused.map(|refused| refused.error.into()).or(wrong) {
            Some(source) => Err(PostError { posted, source }),
            None => Ok(()),
        }
    }

    /// A queue pair that takes sends, what they name, and room for their pieces.
    #[inline(always)]
    fn send_queue(&mut self, qp: Qp) -> Result<(&mut HardwareQp, SendTables<'_>, &mut PieceRoom), Error> {
        if self.is_gone {
            return Err(self.gone());
        }
        let Hardware { qps, mrs, mws, ahs, pieces, attributes, .. } = self;
        let queue_pair = qps.get_mut(qp.0).ok_or_else(|| Error::invalid_handle("QP", qp.0))?;
        if queue_pair.state != QpState::Rts {
            let states = [QpState::Rts, QpState::Sqd, QpState::Sqe, QpState::Error];
            queue_pair.require("post_send", "RTS, SQD, SQE or ERR", &states)?;
        }
        Ok((queue_pair, SendTables { mrs, mws, ahs, attributes }, pieces))
    }

    /// A bind is posted.
    #[cold]
    fn bound(&mut self, mw: Mw) {
        if let Some(window) = self.mws.get_mut(mw.0) {
            window.key = window.next_rkey() as u8;
        }
    }

    pub(crate) fn post_recv(&mut self, qp: Qp, wr: &ReceiveWorkRequest<'_>) -> Result<(), Error> {
        self.post_recvs(qp, std::slice::from_ref(wr)).map_err(Error::from)
    }

    pub(crate) fn post_recvs(&mut self, qp: Qp, wrs: &[ReceiveWorkRequest<'_>]) -> Result<(), PostError> {
        if self.is_gone {
            return Err(first(self.gone()));
        }
        let Hardware { qps, mrs, pieces, .. } = self;
        let queue_pair = qps.get_mut(qp.0).ok_or_else(|| first(Error::invalid_handle("QP", qp.0)))?;
        queue_pair.require("post_recv", "any state but RESET", &QpState::ALL_BUT_RESET).map_err(first)?;
        if queue_pair.srq.is_some() {
            let expected = "post receives to the SRQ with post_srq_recv";
            return Err(first(Error::invalid("qp", "attached to an SRQ", expected)));
        }
        post_receives(queue_pair, mrs, pieces, wrs)
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
            return Err(first(self.gone()));
        }
        let Hardware { srqs, mrs, pieces, .. } = self;
        let queue = srqs.get_mut(srq.0).ok_or_else(|| first(Error::invalid_handle("SRQ", srq.0)))?;
        post_receives(queue, mrs, pieces, wrs)
    }
}

/// Nothing of a list is posted.
fn first(source: Error) -> PostError {
    PostError { posted: 0, source }
}

/// What send work requests name.
struct SendTables<'a> {
    mrs: &'a Slab<HardwareRegion>,
    mws: &'a Slab<HardwareWindow>,
    ahs: &'a Slab<HardwareAh>,
    attributes: &'a DeviceAttributes,
}

impl<'a> SendTables<'a> {
    /// Checks a work request, keeps it in the send queue, and writes it as the card takes it.
    #[inline(always)]
    fn keep(
        &self,
        queue_pair: &mut HardwareQp,
        wr: &SendWorkRequest<'a>,
        room: &'a mut [Piece; SGES],
        request: &mut SendRequest<'a>,
    ) -> Result<(), Error> {
        let kind = wr.op.kind();
        if !kind.is_on(queue_pair.service) {
            return Err(wr.op.not_on(queue_pair.service));
        }
        if kind.is_read_or_atomic {
            if queue_pair.state != QpState::Error
                && queue_pair.told.send.is_some_and(|send| send.max_rd_atomic == 0)
            {
                return Err(Error::invalid("max_rd_atomic", 0, "at least 1 for READ, atomics and FLUSH"));
            }
            wr.op.check(self.attributes)?;
        }
        if queue_pair.sq.is_full() {
            return Err(Error::QueueFull { queue: "send", depth: queue_pair.sq.depth });
        }
        let mut regions = Regions::default();
        match wr.data {
            Data::Inline(bytes) => {
                check_inline(kind, bytes, queue_pair.max_inline)?;
                request.set_data(SendData::Inline(bytes));
            }
            Data::Sges(sges) => {
                let length;
                (regions, length) = translate(self.mrs, sges, room, || queue_pair.sq.next_regions())?;
                if kind.length.is_some() || length > queue_pair.max_message {
                    check_length(kind, length, queue_pair.max_message)?;
                }
                request.set_data(SendData::Pieces(&room[..regions.count.into()]));
            }
        }
        match wr.op {
            SendOp::Send => request.set_operation(SendOperation::Send),
            SendOp::SendWithImm(immediate) => request.set_operation(SendOperation::SendWithImm(immediate)),
            SendOp::SendWithInvalidate(key) => {
                request.set_operation(SendOperation::SendWithInvalidate(key.value()));
            }
            SendOp::SendTo(to) => request.set_operation(SendOperation::SendTo(self.target(to)?)),
            SendOp::SendToWithImm(to, immediate) => {
                request.set_operation(SendOperation::SendToWithImm(self.target(to)?, immediate));
            }
            SendOp::Write(to) => request.set_operation(SendOperation::Write(remote(to))),
            SendOp::WriteWithImm(to, immediate) => {
                request.set_operation(SendOperation::WriteWithImm(remote(to), immediate));
            }
            SendOp::Read(from) => request.set_operation(SendOperation::Read(remote(from))),
            SendOp::CompareSwap { remote: at, compare, swap } => {
                request.set_operation(SendOperation::CompareSwap { remote: remote(at), compare, swap });
            }
            SendOp::FetchAdd { remote: at, add } => {
                request.set_operation(SendOperation::FetchAdd { remote: remote(at), add });
            }
            SendOp::LocalInvalidate(key) => {
                queue_pair.sq.next_is_of(WindowWork::Invalidate { rkey: key.value() });
                request.set_operation(SendOperation::LocalInvalidate(key.value()));
            }
            SendOp::BindMw { mw, mr, offset, length, access } => {
                check_rights(access, length)?;
                let bound = self.mws.get(mw.0).ok_or_else(|| Error::invalid_handle("MW", mw.0))?;
                let named = self.mrs.get(mr.0).ok_or_else(|| invalid(mr))?;
                let Some(card) = &named.card else { return Err(invalid(mr)) };
                let (addr, rkey) = (named.iova.wrapping_add(offset), bound.next_rkey());
                let remote = RemoteMemory { addr, rkey: RKey::new(rkey), length };
                let binding = WindowBinding { region: mr, remote };
                queue_pair.sq.next_is_of(WindowWork::Bind { window: mw, binding });
                regions = Regions { first: mr.0.index, count: 1 };
                request.set_operation(SendOperation::Bind(Bind {
                    window: &bound.card,
                    rkey,
                    region: card,
                    addr,
                    length,
                    access: remote_rights(access),
                }));
            }
            // `check` has refused them, for the device has neither.
            SendOp::Flush { .. } => return Err(Error::Unsupported(Feature::Flush)),
            SendOp::AtomicWrite(_) => return Err(Error::Unsupported(Feature::AtomicWrite)),
        }
        let signaled = wr.flags.signaled || queue_pair.signal_all;
        let work = Work::new(wr.wr_id, kind.wc_opcode, signaled, regions);
        let (wr_id, tells) = queue_pair.sq.push_send(work);
        let flags = if tells { SendRequest::SIGNALED } else { 0 }
            | if wr.flags.fence { SendRequest::FENCE } else { 0 }
            | if wr.flags.solicited { SendRequest::SOLICITED } else { 0 };
        request.set_number(wr_id, flags);
        Ok(())
    }

    #[inline(always)]
    fn target(&self, to: Destination) -> Result<Target<'a>, Error> {
        let ah = self.ahs.get(to.ah.0).ok_or_else(|| Error::invalid_handle("AH", to.ah.0))?;
        Ok(Target { ah: &ah.card, qpn: to.qpn.value(), qkey: to.qkey })
    }
}

/// Where receives are posted: to a queue pair, or to a shared receive queue.
trait TakesReceives {
    /// `None` if there is room for one more, otherwise how many it has room for.
    fn full(&self) -> Option<u32>;
    /// The places for the regions of the next one, if there is room for it.
    fn next_regions(&mut self) -> &mut [u32];
    /// Keeps one, for which there is room and whose regions are in their places, and returns the card's number of it.
    fn keep(&mut self, wr_id: u64, regions: Regions) -> u64;
    /// Forgets the last one that was kept, by that number.
    fn give_back(&mut self, number: u64);
    fn post(&self, requests: &mut [ReceiveRequest<'_>]) -> Result<(), PostRefused>;
}

impl TakesReceives for HardwareQp {
    #[inline(always)]
    fn full(&self) -> Option<u32> {
        self.rq.is_full().then_some(self.rq.depth)
    }

    fn next_regions(&mut self) -> &mut [u32] {
        self.rq.next_regions()
    }

    #[inline(always)]
    fn keep(&mut self, wr_id: u64, regions: Regions) -> u64 {
        self.rq.push(Work::new(wr_id, WcOpcode::Recv, true, regions))
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
    fn full(&self) -> Option<u32> {
        self.slots.is_full().then(|| self.slots.depth())
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
    for (chunk, wrs) in wrs.chunks(CHUNK).enumerate() {
        let mut requests = ArrayVec::<_, CHUNK>::new();
        let mut wrong = None;
        for (wr, room) in wrs.iter().zip(pieces.iter_mut()) {
            let checked = match queue.full() {
                None => translate(mrs, wr.sges, room, || queue.next_regions()),
                Some(depth) => Err(Error::QueueFull { queue: "receive", depth }),
            };
            match checked {
                Ok((regions, _)) => {
                    let pieces = &room[..regions.count.into()];
                    requests.push(ReceiveRequest::new(queue.keep(wr.wr_id, regions), pieces));
                }
                Err(error) => {
                    wrong = Some(error);
                    break;
                }
            }
        }
        let refused = queue.post(&mut requests).err();
        let posted = refused.as_ref().map_or(requests.len(), |refused| refused.posted);
        requests[posted..].iter().rev().for_each(|request| queue.give_back(request.wr_id()));
        if let Some(source) = refused.map(|refused| refused.error.into()).or(wrong) {
            return Err(PostError { posted: chunk * CHUNK + posted, source });
        }
    }
    Ok(())
}

/// Writes the pieces of a work request as the card takes them. Returns the regions, whose places but the first's are
/// `places`, and the length.
#[inline(always)]
fn translate<'a>(
    mrs: &Slab<HardwareRegion>,
    sges: &[Sge],
    room: &mut [Piece; SGES],
    places: impl FnOnce() -> &'a mut [u32],
) -> Result<(Regions, u32), Error> {
    let piece = |sge: &Sge| -> Result<Piece, Error> {
        let region = mrs.get(sge.mr.0).ok_or_else(|| invalid(sge.mr))?;
        Ok(Piece { addr: region.iova.wrapping_add(sge.offset), length: sge.length, lkey: region.lkey })
    };
    // Every queue takes one piece.
    if let [sge] = sges
        && sge.length <= MAX_MESSAGE
    {
        room[0] = piece(sge)?;
        return Ok((Regions { first: sge.mr.0.index, count: 1 }, sge.length));
    }
    let places = places();
    let length = total_length(sges, places.len())?;
    for ((sge, room), place) in sges.iter().zip(room).zip(places) {
        *room = piece(sge)?;
        *place = sge.mr.0.index;
    }
    let first = sges.first().map_or(0, |sge| sge.mr.0.index);
    Ok((Regions { first, count: sges.len() as u8 }, length))
}

fn remote(to: RemoteAddress) -> Remote {
    Remote { addr: to.addr, rkey: to.rkey.value() }
}
