//! Work requests as they are posted: checked, kept, and given to the card.

use ferroce_driver::rnic::{
    Bind, Piece, PostRefused, ReceiveRequest, Remote, SendData, SendOperation, SendRequest, Target,
};
use ferroce_wire::RKey;

use super::memory::{HardwareRegion, HardwareWindow, WindowBinding, remote_rights};
use super::queue_pairs::HardwareQp;
use super::work::{CHUNK, SGES, WindowWork, Work};
use super::{Hardware, HardwareAh, HardwareSrq};
use crate::engine::kind::Kind;
use crate::engine::mr::invalid;
use crate::engine::rq::total_length;
use crate::engine::slab::Slab;
use crate::engine::sq::{check_inline, check_length};
use crate::verbs::{
    Data, Destination, DeviceAttributes, Error, Feature, Mr, Mw, PostError, Qp, QpState, ReceiveWorkRequest,
    RemoteAddress, RemoteMemory, SendOp, SendWorkRequest, Sge, Srq, WcOpcode,
};

impl Hardware {
    #[inline]
    pub(crate) fn post_send(&mut self, qp: Qp, wr: &SendWorkRequest<'_>) -> Result<(), Error> {
        let (queue_pair, tables, pieces) = self.send_queue(qp)?;
        let (request, bound) = tables.keep(queue_pair, wr, pieces)?;
        if let Err(error) = queue_pair.card.post_send(&request) {
            queue_pair.sq.pop_newest();
            return Err(error.into());
        }
        if let Some(bound) = bound
            && let Some(window) = self.mws.get_mut(bound.mw.0)
        {
            window.key = bound.remote.rkey.value() as u8;
            window.posted = Some(WindowBinding { region: bound.mr, remote: bound.remote });
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
        let (queue_pair, tables, mut pieces) = self.send_queue(qp).map_err(first)?;
        let mut requests = [SendRequest::EMPTY; CHUNK];
        let mut wrong = None;
        let mut count = 0;
        for (wr, request) in wrs.iter().zip(&mut requests) {
            let Some((room, rest)) = pieces.split_at_mut_checked(SGES) else { break };
            pieces = rest;
            match tables.keep(queue_pair, wr, room) {
                Ok((kept, _)) => *request = kept,
                Err(error) => {
                    wrong = Some(error);
                    break;
                }
            }
            count += 1;
        }
        let refused = queue_pair.card.post_sends(&requests[..count]).err();
        let posted = refused.as_ref().map_or(count, |refused| refused.posted);
        (posted..count).for_each(|_| queue_pair.sq.pop_newest());
        match refused.map(|refused| refused.error.into()).or(wrong) {
            Some(source) => Err(PostError { posted, source }),
            None => Ok(()),
        }
    }

    /// A queue pair that takes sends, what they name, and room for their pieces.
    #[inline(always)]
    fn send_queue(&mut self, qp: Qp) -> Result<(&mut HardwareQp, Named<'_>, &mut [Piece]), Error> {
        if self.is_gone {
            return Err(self.gone());
        }
        let Hardware { qps, mrs, mws, ahs, pieces, attributes, .. } = self;
        let queue_pair = qps.get_mut(qp.0).ok_or_else(|| Error::invalid_handle("QP", qp.0))?;
        if queue_pair.state != QpState::Rts {
            let states = [QpState::Rts, QpState::Sqd, QpState::Sqe, QpState::Error];
            queue_pair.require("post_send", "RTS, SQD, SQE or ERR", &states)?;
        }
        Ok((queue_pair, Named { mrs, mws, ahs, attributes }, pieces))
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
struct Named<'a> {
    mrs: &'a Slab<HardwareRegion>,
    mws: &'a Slab<HardwareWindow>,
    ahs: &'a Slab<HardwareAh>,
    attributes: &'a DeviceAttributes,
}

/// A bind that is posted: the window, the region, and what it opens.
struct Bound {
    mw: Mw,
    mr: Mr,
    remote: RemoteMemory,
}

impl<'a> Named<'a> {
    /// Checks a work request, keeps it in the send queue, and gives it in the card's words.
    #[inline(always)]
    fn keep(
        &self,
        queue_pair: &mut HardwareQp,
        wr: &SendWorkRequest<'a>,
        room: &'a mut [Piece],
    ) -> Result<(SendRequest<'a>, Option<Bound>), Error> {
        let kind = wr.op.kind();
        if !kind.is_on(queue_pair.qp_type.service()) {
            return Err(wr.op.not_on(queue_pair.qp_type.service()));
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
        let (data, sges) = match wr.data {
            Data::Inline(bytes) => {
                check_inline(kind, bytes, queue_pair.max_inline)?;
                (SendData::Inline(bytes), &[][..])
            }
            Data::Sges(sges) => {
                check_sges(kind, sges, queue_pair)?;
                (SendData::Pieces(translate(self.mrs, sges, room)?), sges)
            }
        };
        let signaled = wr.flags.signaled || queue_pair.signal_all;
        let mut work = Work::new(wr.wr_id, kind.wc_opcode, signaled);
        let mut bound = None;
        let operation = match wr.op {
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
                work.window = WindowWork::Invalidate { rkey: key.value() };
                SendOperation::LocalInvalidate(key.value())
            }
            SendOp::BindMw { mw, mr, offset, length, access } => {
                crate::engine::mw::check_rights(access, length)?;
                let window = self.mws.get(mw.0).ok_or_else(|| Error::invalid_handle("MW", mw.0))?;
                let region = self.mrs.get(mr.0).ok_or_else(|| invalid(mr))?;
                let Some(card) = &region.card else { return Err(invalid(mr)) };
                let rkey = window.card.rkey() & !0xff | u32::from(window.key.wrapping_add(1));
                let addr = region.iova.wrapping_add(offset);
                work.window = WindowWork::Bind { index: mw.0.index };
                bound = Some(Bound { mw, mr, remote: RemoteMemory { addr, rkey: RKey::new(rkey), length } });
                let access = remote_rights(access);
                SendOperation::Bind(Bind { window: &window.card, rkey, region: card, addr, length, access })
            }
            // `check` has refused them, for the device has neither.
            SendOp::Flush { .. } => return Err(Error::Unsupported(Feature::Flush)),
            SendOp::AtomicWrite(_) => return Err(Error::Unsupported(Feature::AtomicWrite)),
        };
        let sq = &mut queue_pair.sq;
        let (wr_id, tells) = match &bound {
            None => sq.push_send(work, sges),
            Some(bound) => sq.push_send(work, &[bound.mr.sge(0..0)]),
        };
        let flags = if tells { SendRequest::SIGNALED } else { 0 }
            | if wr.flags.fence { SendRequest::FENCE } else { 0 }
            | if wr.flags.solicited { SendRequest::SOLICITED } else { 0 };
        Ok((SendRequest { wr_id, operation, data, flags }, bound))
    }

    fn target(&self, to: Destination) -> Result<Target<'a>, Error> {
        let ah = self.ahs.get(to.ah.0).ok_or_else(|| Error::invalid_handle("AH", to.ah.0))?;
        Ok(Target { ah: &ah.card, qpn: to.qpn.value(), qkey: to.qkey })
    }
}

/// Where receives are posted: to a queue pair, or to a shared receive queue.
trait ReceiveQueue {
    /// Fails if there is no room for it.
    fn check(&self, sges: &[Sge]) -> Result<(), Error>;
    /// Keeps one that was checked, and returns the card's number of it.
    fn keep(&mut self, wr: &ReceiveWorkRequest<'_>) -> u64;
    /// Forgets the last one that was kept, by that number.
    fn give_back(&mut self, number: u64);
    fn post(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostRefused>;
}

impl ReceiveQueue for HardwareQp {
    fn check(&self, sges: &[Sge]) -> Result<(), Error> {
        if self.rq.is_full() {
            return Err(Error::QueueFull { queue: "receive", depth: self.rq.depth });
        }
        total_length(sges, self.rq.max_sge as usize).map(drop)
    }

    fn keep(&mut self, wr: &ReceiveWorkRequest<'_>) -> u64 {
        self.rq.push(Work::new(wr.wr_id, WcOpcode::Recv, true), wr.sges)
    }

    fn give_back(&mut self, _: u64) {
        self.rq.pop_newest();
    }

    fn post(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostRefused> {
        self.card.post_receives(requests)
    }
}

impl ReceiveQueue for HardwareSrq {
    fn check(&self, sges: &[Sge]) -> Result<(), Error> {
        self.slots.check(sges)
    }

    fn keep(&mut self, wr: &ReceiveWorkRequest<'_>) -> u64 {
        self.slots.push(wr)
    }

    fn give_back(&mut self, number: u64) {
        // The low half of the number is the slot.
        self.slots.complete(number as u32);
    }

    fn post(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostRefused> {
        self.card.post_receives(requests)
    }
}

#[inline]
fn post_receives(
    queue: &mut impl ReceiveQueue,
    mrs: &Slab<HardwareRegion>,
    pieces: &mut [Piece],
    wrs: &[ReceiveWorkRequest<'_>],
) -> Result<(), PostError> {
    for (chunk, wrs) in wrs.chunks(CHUNK).enumerate() {
        let mut requests = [ReceiveRequest { wr_id: 0, pieces: &[] }; CHUNK];
        let mut wrong = None;
        let mut count = 0;
        for ((wr, request), room) in wrs.iter().zip(&mut requests).zip(pieces.chunks_mut(SGES)) {
            match queue.check(wr.sges).and_then(|()| translate(mrs, wr.sges, room)) {
                Ok(pieces) => *request = ReceiveRequest { wr_id: queue.keep(wr), pieces },
                Err(error) => {
                    wrong = Some(error);
                    break;
                }
            }
            count += 1;
        }
        let refused = queue.post(&requests[..count]).err();
        let posted = refused.as_ref().map_or(count, |refused| refused.posted);
        requests[posted..count].iter().rev().for_each(|request| queue.give_back(request.wr_id));
        if let Some(source) = refused.map(|refused| refused.error.into()).or(wrong) {
            return Err(PostError { posted: chunk * CHUNK + posted, source });
        }
    }
    Ok(())
}

fn check_sges(kind: &Kind, sges: &[Sge], queue_pair: &HardwareQp) -> Result<(), Error> {
    let length = total_length(sges, queue_pair.sq.max_sge as usize)?;
    check_length(kind, length, queue_pair.max_message)
}

/// The pieces of a work request as the card takes them.
#[inline]
fn translate<'a>(
    mrs: &Slab<HardwareRegion>,
    sges: &[Sge],
    room: &'a mut [Piece],
) -> Result<&'a [Piece], Error> {
    for (piece, sge) in room.iter_mut().zip(sges) {
        let region = mrs.get(sge.mr.0).ok_or_else(|| invalid(sge.mr))?;
        let Some(card) = &region.card else { return Err(invalid(sge.mr)) };
        let addr = region.iova.wrapping_add(sge.offset);
        *piece = Piece { addr, length: sge.length, lkey: card.lkey() };
    }
    Ok(&room[..sges.len()])
}

fn remote(to: RemoteAddress) -> Remote {
    Remote { addr: to.addr, rkey: to.rkey.value() }
}
