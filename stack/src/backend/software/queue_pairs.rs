//! Queue pairs, and posting work requests to them.

use ferroce_wire::Qpn;

use super::Software;
use crate::backend::in_order;
use crate::engine::congestion::Reaction;
use crate::engine::mw::MwBind;
use crate::verbs::{
    CongestionControl, Error, MAX_MESSAGE, Mismatch, PostError, Qp, QpAttributes, QpConfig, QpState,
    ReceiveWorkRequest, SendOp, SendWorkRequest,
};

/// Bytes without a VLAN tag.
const ETHERNET_HEADER: u32 = 14;

impl Software {
    pub(crate) fn create_qp(&mut self, config: &QpConfig) -> Result<Qp, Error> {
        config.check()?;
        self.check_pd(config.pd)?;
        self.cq(config.send_cq)?;
        self.cq(config.recv_cq)?;
        let receives = match config.srq {
            Some(srq) => Some(self.srq(srq).map(|srq| (srq.pd, srq.max_sge))?),
            None => None,
        };
        if let Some(window) = config.window
            && !(1..=self.window).contains(&window)
        {
            let expected = format!("1 to {}, the window of the Config", self.window);
            return Err(Error::invalid("window", window, expected));
        }
        let reaction = self.reaction(config)?;
        let full = Error::Exhausted { kind: "QP", limit: self.engine.qps.capacity(), setting: "max_qps" };
        let qp = self.engine.create_qp(config, receives, reaction).ok_or(full)?;
        self.cq(config.send_cq)?.users += 1;
        self.cq(config.recv_cq)?.users += 1;
        if let Some(srq) = config.srq {
            self.srq(srq)?.users += 1;
        }
        Ok(qp)
    }

    /// The reaction point of a queue pair; `None` if congestion control is off.
    fn reaction(&self, config: &QpConfig) -> Result<Option<Reaction>, Error> {
        let control = config.congestion.unwrap_or(self.congestion);
        let CongestionControl::Dcqcn(parameters) = control else { return Ok(None) };
        let Some(line_rate) = self.line_rate.or_else(|| self.driver.line_rate()) else {
            let expected = "bit/s, by Config::line_rate: the driver does not report it, and congestion control starts \
                at it";
            return Err(Error::invalid("line_rate", "unknown", expected));
        };
        // Frames of a socket have an Ethernet header on the wire.
        let link_header = if self.engine.port.socket.is_some() { ETHERNET_HEADER } else { 0 };
        Reaction::new(config.qp_type.service(), parameters, line_rate, link_header).map(Some)
    }

    pub(crate) fn acknowledge(&mut self, qp: Qp) -> Result<(), Error> {
        self.qp(qp)?;
        self.send_owed(Some(qp));
        Ok(())
    }

    pub(crate) fn destroy_qp(&mut self, qp: Qp) -> Result<(), Error> {
        let (queue_pair, _) = self.qp(qp)?;
        let (send_cq, recv_cq, srq) = (queue_pair.send_cq, queue_pair.recv_cq, queue_pair.srq);
        let groups = self.engine.groups.groups_of(qp.0.index);
        if groups > 0 {
            let users = format!("{groups} multicast groups; detach it first");
            return Err(Error::Busy { kind: "QP", handle: format!("{:?}", qp.0), users });
        }
        self.send_owed(Some(qp));
        if let Some((cm, mut verbs)) = self.engine.cm_if_used() {
            cm.release(qp, &mut verbs);
        }
        self.engine.destroy_qp(qp);
        self.cq(send_cq)?.users -= 1;
        self.cq(recv_cq)?.users -= 1;
        if let Some(srq) = srq {
            self.srq(srq)?.users -= 1;
        }
        Ok(())
    }

    pub(crate) fn query_qp(&self, qp: Qp) -> Result<QpAttributes, Error> {
        let queue_pair = self.engine.qps.get(qp.0).ok_or_else(|| Error::invalid_handle("QP", qp.0))?;
        Ok(queue_pair.attributes(self.engine.shared.now))
    }

    pub(crate) fn mismatches(&self) -> Vec<(Qpn, Mismatch)> {
        self.engine.qps.iter().filter_map(|qp| Some((qp.qpn, qp.mismatch?))).collect()
    }

    #[inline]
    pub(crate) fn post_send(&mut self, qp: Qp, wr: &SendWorkRequest<'_>) -> Result<(), Error> {
        let (queue_pair, shared) = self.qp(qp)?;
        if queue_pair.state != QpState::Rts {
            let states = [QpState::Rts, QpState::Sqd, QpState::Sqe, QpState::Error];
            queue_pair.require("post_send", "RTS, SQD, SQE or ERR", &states)?;
        }
        let kind = wr.op.kind();
        if !kind.is_on(queue_pair.service) {
            return Err(wr.op.not_on(queue_pair.service));
        }
        if kind.is_read_or_atomic {
            if queue_pair.state != QpState::Error && queue_pair.requester.attributes().max_rd_atomic == 0 {
                return Err(Error::invalid("max_rd_atomic", 0, "at least 1 for READ, atomics and FLUSH"));
            }
            wr.op.check(&shared.device)?;
        }
        if let SendOp::BindMw { mw, mr, offset, length, access } = wr.op {
            shared.mrs.check_bind(&MwBind { mw, mr, offset, length, access })?;
        }
        let max_length = queue_pair.connection.as_ref().map_or(MAX_MESSAGE, |c| c.max_message());
        queue_pair.sq.post(wr, kind, max_length, &mut shared.mrs)?;
        match queue_pair.state {
            QpState::Error => queue_pair.flush(shared),
            QpState::Sqe => {
                queue_pair.flush_sends(shared);
                queue_pair.settle(shared);
            }
            _ => queue_pair.schedule(shared),
        }
        Ok(())
    }

    pub(crate) fn post_recv(&mut self, qp: Qp, wr: &ReceiveWorkRequest<'_>) -> Result<(), Error> {
        let (queue_pair, shared) = self.qp(qp)?;
        queue_pair.require("post_recv", "any state but RESET", &QpState::ALL_BUT_RESET)?;
        if queue_pair.srq.is_some() {
            return Err(Error::invalid(
                "qp",
                "attached to an SRQ",
                "post receives to the SRQ with post_srq_recv",
            ));
        }
        queue_pair.rq.post(wr, &mut shared.mrs)?;
        if queue_pair.state == QpState::Error {
            queue_pair.flush(shared);
        }
        Ok(())
    }

    pub(crate) fn post_sends(&mut self, qp: Qp, wrs: &[SendWorkRequest<'_>]) -> Result<(), PostError> {
        in_order(wrs, |wr| self.post_send(qp, wr))
    }

    pub(crate) fn post_recvs(&mut self, qp: Qp, wrs: &[ReceiveWorkRequest<'_>]) -> Result<(), PostError> {
        in_order(wrs, |wr| self.post_recv(qp, wr))
    }
}
