//! Requests to a server of an rdma_cm program: for a connection, or for its datagram service.
//!
//! A request is one packet, whose source address may be forged. Several requests are handled at a time, and any of them
//! may fail. Each gets its own queue pair; the first one that is connected is the client. A request that fails neither
//! ends the server nor delays its client.

use std::net::SocketAddr;

use ferroce::{
    CmEvent, CmId, ConnectionParameters, ConnectionRequest, Gid, ListenConfig, Listener, PortSpace, Qp,
    QpType,
};
use tracing::{info, warn};

use crate::endpoint::Endpoint;
use crate::failure::Failure;

/// A client with its queue pair, which is connected or about to be.
pub(crate) struct Caller {
    pub(crate) request: ConnectionRequest,
    pub(crate) qp: Qp,
}

/// The most callers that are accepted and not connected yet; a further one replaces the oldest. A flood of requests can
/// displace a client, which is then rejected and retries; it can't end the server.
pub(crate) const MOST: usize = 16;

impl Endpoint {
    /// Listens on a port of all addresses.
    pub(crate) fn listen(&mut self, space: PortSpace, port: u16) -> Result<Listener, Failure> {
        let any = SocketAddr::from(([0, 0, 0, 0], port));
        Ok(self.context.listen(space, any, &ListenConfig::default())?)
    }

    /// Waits for `wanted` RC connections, without a time limit, and then stops listening. Each caller gets a queue pair
    /// from `queue_pair`; the CQ must have room for [`MOST`] more than are wanted.
    pub(crate) fn await_callers(
        &mut self,
        port: u16,
        wanted: usize,
        parameters: &ConnectionParameters<'_>,
        mut queue_pair: impl FnMut(&mut Endpoint) -> Result<Qp, Failure>,
    ) -> Result<Vec<Caller>, Failure> {
        let listener = self.listen(PortSpace::Tcp, port)?;
        let (mut waiting, mut connected) = (Vec::<Caller>::new(), Vec::<Caller>::new());
        while connected.len() < wanted {
            self.unproven.clear();
            self.unproven.extend(waiting.iter().map(|caller| caller.qp));
            self.poll()?;
            if self.unproven.len() < waiting.len() {
                let fallen: Vec<Caller> =
                    waiting.extract_if(.., |caller| !self.unproven.contains(&caller.qp)).collect();
                fallen.iter().try_for_each(|caller| {
                    self.let_go(caller, "it asks for access that its connection does not allow")
                })?;
            }
            let Some(event) = self.context.next_cm_event() else { continue };
            match event {
                CmEvent::ConnectionRequest(request) if request.qp_type != QpType::Rc => {
                    self.turn_away(&request, &format!("it asks for {:?}, and this is Rc", request.qp_type));
                }
                CmEvent::ConnectionRequest(request) => {
                    info!(peer = %request.peer, path_mtu = %request.path_mtu, "connection request");
                    if waiting.len() == MOST {
                        self.let_go(&waiting.remove(0), "it has sent no message for too long")?;
                    }
                    let caller = Caller { request, qp: queue_pair(self)? };
                    match self.context.accept(request.id, caller.qp, parameters) {
                        Ok(()) => waiting.push(caller),
                        Err(error) => self.let_go(&caller, &error.to_string())?,
                    }
                }
                CmEvent::Established { id, .. } => {
                    let caller = take(&mut waiting, id);
                    self.peer =
                        caller.as_ref().map(|caller| Gid::from(caller.request.peer.ip())).or(self.peer);
                    connected.extend(caller);
                }
                CmEvent::Rejected { id, reason, .. } => {
                    self.miss(take(&mut waiting, id), &format!("it refuses the answer: {reason}"))?;
                }
                CmEvent::Unreachable { id, .. } => {
                    self.miss(take(&mut waiting, id), "it does not accept the answer")?;
                }
                CmEvent::Disconnected { id } => {
                    let gone = take(&mut waiting, id).or_else(|| take(&mut connected, id));
                    self.miss(gone, "it has ended the connection")?;
                }
                _ => {}
            }
        }
        self.unproven.clear();
        self.context.unlisten(listener)?;
        waiting
            .iter()
            .try_for_each(|caller| self.let_go(caller, "other clients were connected before it"))?;
        Ok(connected)
    }

    /// Answers clients that look up the datagram service of `qp`.
    pub(crate) fn answer_seekers(&mut self, qp: Qp) {
        while let Some(event) = self.context.next_cm_event() {
            let CmEvent::ConnectionRequest(request) = event else { continue };
            info!(peer = %request.peer, "it resolves the service");
            if let Err(error) = self.context.accept_datagrams(request.id, qp, &[]) {
                self.turn_away(&request, &error.to_string());
            }
        }
    }

    fn miss(&mut self, caller: Option<Caller>, why: &str) -> Result<(), Failure> {
        caller.map_or(Ok(()), |caller| self.let_go(&caller, why))
    }

    /// Ends a connection in any state.
    fn let_go(&mut self, caller: &Caller, why: &str) -> Result<(), Failure> {
        self.turn_away(&caller.request, why);
        Ok(self.context.destroy_qp(caller.qp)?)
    }

    fn turn_away(&mut self, request: &ConnectionRequest, why: &str) {
        warn!("{} is not a client: {why}", request.peer);
        // It may be accepted, or closed.
        let _ = self.context.reject(request.id, &[]);
    }
}

fn take(callers: &mut Vec<Caller>, id: CmId) -> Option<Caller> {
    let index = callers.iter().position(|caller| caller.request.id == id)?;
    Some(callers.remove(index))
}
