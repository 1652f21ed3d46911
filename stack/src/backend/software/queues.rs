//! Completion queues and shared receive queues.

use std::task::Waker;

use super::Software;
use crate::backend::in_order;
use crate::engine::cq::CompletionQueue;
use crate::engine::rq::ReceiveQueue;
use crate::engine::shared::Shared;
use crate::engine::srq::SharedReceiveQueue;
use crate::verbs::{
    Cq, Error, Event, MAX_CQE, Mr, Notify, PostError, ReceiveWorkRequest, Srq, SrqAttributes, SrqConfig,
    WorkCompletion,
};

impl Software {
    pub(crate) fn create_cq(&mut self, capacity: u32) -> Result<Cq, Error> {
        if capacity == 0 || capacity > MAX_CQE {
            return Err(Error::invalid("CQ capacity", capacity, format!("1 to {MAX_CQE}")));
        }
        let cqs = &mut self.engine.shared.cqs;
        let full = Error::Exhausted { kind: "CQ", limit: cqs.capacity(), setting: "max_cqs" };
        cqs.insert_with(|_| CompletionQueue::new(capacity)).map(Cq).ok_or(full)
    }

    pub(crate) fn destroy_cq(&mut self, cq: Cq) -> Result<(), Error> {
        let users = self.cq(cq)?.users;
        if users > 0 {
            let users = format!("{users} send and receive queues");
            return Err(Error::Busy { kind: "CQ", handle: format!("{:?}", cq.0), users });
        }
        self.engine.shared.cqs.remove(cq.0);
        self.engine.shared.events.forget(cq.into());
        Ok(())
    }

    pub(crate) fn attach(&mut self, cq: Cq, waker: Waker) -> Result<(), Error> {
        self.cq(cq)?.waker = Some(waker);
        Ok(())
    }

    /// The context is no longer polled: no thread should wait for completions.
    pub(crate) fn wake_channels(&mut self) {
        self.engine.shared.cqs.iter_mut().for_each(CompletionQueue::wake_waiting);
    }

    pub(crate) fn check_cq(&mut self, cq: Cq) -> Result<(), Error> {
        self.cq(cq).map(drop)
    }

    pub(crate) fn poll_cq(&mut self, cq: Cq) -> Result<Option<WorkCompletion>, Error> {
        Ok(self.cq(cq)?.pop())
    }

    #[inline]
    pub(crate) fn poll_cq_into(&mut self, cq: Cq, room: &mut [WorkCompletion]) -> Result<usize, Error> {
        Ok(self.cq(cq)?.pop_into(room))
    }

    pub(crate) fn post_srq_recvs(
        &mut self,
        srq: Srq,
        wrs: &[ReceiveWorkRequest<'_>],
    ) -> Result<(), PostError> {
        in_order(wrs, |wr| self.post_srq_recv(srq, wr))
    }

    pub(crate) fn req_notify_cq(&mut self, cq: Cq, notify: Notify) -> Result<(), Error> {
        self.cq(cq)?.arm(notify);
        Ok(())
    }

    pub(crate) fn create_srq(&mut self, config: &SrqConfig) -> Result<Srq, Error> {
        self.check_pd(config.pd)?;
        config.check()?;
        let srqs = &mut self.engine.shared.srqs;
        let full = Error::Exhausted { kind: "SRQ", limit: srqs.capacity(), setting: "max_srqs" };
        let make = |handle| {
            // Fills unused slots; never read.
            let queue = ReceiveQueue::new(config.max_wr, config.max_sge, Mr(handle));
            SharedReceiveQueue::new(config, queue)
        };
        srqs.insert_with(make).map(Srq).ok_or(full)
    }

    pub(crate) fn post_srq_recv(&mut self, srq: Srq, wr: &ReceiveWorkRequest<'_>) -> Result<(), Error> {
        let Shared { srqs, mrs, .. } = &mut self.engine.shared;
        let queue = srqs.get_mut(srq.0).ok_or_else(|| Error::invalid_handle("SRQ", srq.0))?;
        queue.queue.post(wr, mrs)
    }

    pub(crate) fn arm_srq(&mut self, srq: Srq, limit: u32) -> Result<(), Error> {
        let queue = self.srq(srq)?;
        let depth = queue.queue.depth();
        if limit > depth {
            return Err(Error::invalid("SRQ limit", limit, format!("0 to {depth}, the depth of the SRQ")));
        }
        queue.arm(limit);
        if queue.trip() {
            self.engine.shared.raise(Event::SrqLimitReached(srq));
        }
        Ok(())
    }

    pub(crate) fn query_srq(&self, srq: Srq) -> Result<SrqAttributes, Error> {
        let queue = self.engine.shared.srqs.get(srq.0).ok_or_else(|| Error::invalid_handle("SRQ", srq.0))?;
        Ok(queue.attributes())
    }

    pub(crate) fn destroy_srq(&mut self, srq: Srq) -> Result<(), Error> {
        let users = self.srq(srq)?.users;
        if users > 0 {
            let users = format!("{users} queue pairs");
            return Err(Error::Busy { kind: "SRQ", handle: format!("{:?}", srq.0), users });
        }
        let Shared { srqs, mrs, events, .. } = &mut self.engine.shared;
        if let Some(mut removed) = srqs.remove(srq.0) {
            while removed.queue.pop(mrs).is_some() {}
        }
        events.forget(srq.into());
        Ok(())
    }
}
