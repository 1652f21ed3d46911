//! Clients of perftest with -R or -z, which connect by the connection manager instead of TCP.
//!
//! ferroce does not support that, but recognizes it: it listens for such clients, rejects them, and logs each address
//! once, so that neither end waits without knowing why. The server continues to wait.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::time::{Duration, Instant};

use ferroce::wire::cm::RejectReason;
use ferroce::{
    Access, CmEvent, ConnectionParameters, Error, ListenConfig, Listener, PortSpace, QpConfig, Transition,
};

use tracing::{debug, warn};

use crate::endpoint::Endpoint;
use crate::failure::Failure;

const PORT_SPACES: [PortSpace; 2] = [PortSpace::Tcp, PortSpace::Udp];
/// Time for a REJ to leave, and for a server to answer.
const PATIENCE: Duration = Duration::from_secs(3);

/// The most clients that are logged; each is logged once. The source address of a request can be forged.
const MOST_NAMED: usize = 16;
/// The most requests that are rejected in one call.
const MOST_REFUSED: usize = 16;

/// A server's listeners for clients that use the connection manager.
pub(in crate::perf) struct Ear {
    listeners: Vec<Listener>,
    named: Vec<IpAddr>,
}

impl Ear {
    /// Listens on the port that a client would use.
    pub(in crate::perf) fn open(end: &mut Endpoint, port: u16) -> Result<Ear, Failure> {
        let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
        let mut listen = |space| end.context.listen(space, any, &ListenConfig::default());
        let listeners = match PORT_SPACES.into_iter().map(&mut listen).collect::<Result<_, _>>() {
            // On an RNIC, such clients are not recognized without librdmacm, or if the kernel has given the port to
            // another program. Then the kernel rejects them.
            Err(Error::Driver(error)) if !end.counts_packets() => {
                debug!("clients that connect by rdma_cm are not detected: {error}");
                Vec::new()
            }
            listening => listening?,
        };
        Ok(Ear { listeners, named: Vec::new() })
    }

    /// Rejects the clients that have connected, and logs them.
    pub(in crate::perf) fn check(&mut self, end: &mut Endpoint) -> Result<(), Failure> {
        for _ in 0..MOST_REFUSED {
            match end.context.next_cm_event() {
                Some(CmEvent::ConnectionRequest(request)) => {
                    end.context.reject(request.id, &[])?;
                    self.name(request.peer.ip());
                }
                Some(_) => {}
                None => break,
            }
        }
        Ok(())
    }

    fn name(&mut self, client: IpAddr) {
        if self.named.len() == MOST_NAMED || self.named.contains(&client) {
            return;
        }
        self.named.push(client);
        warn!(
            "the client at {client} connects by the connection manager (-R or -z in perftest), which is not supported \
             here: start it without; still waiting for a client"
        );
    }

    pub(in crate::perf) fn close(self, end: &mut Endpoint) -> Result<(), Failure> {
        self.listeners.into_iter().try_for_each(|listener| Ok(end.context.unlisten(listener)?))
    }
}

/// The reason that a server does not accept a TCP connection: `failure`, unless it listens with the connection manager.
pub(in crate::perf) fn explain(end: &mut Endpoint, host: &str, port: u16, failure: Failure) -> Failure {
    let addresses = (host, port).to_socket_addrs().into_iter().flatten();
    let reachable = |ip: IpAddr| end.context.port().gids.iter().any(|row| row.gid.is_ipv6() == ip.is_ipv6());
    let Some(to) = addresses.into_iter().find(|to| reachable(to.ip())) else { return failure };
    match listens(end, to) {
        Ok(true) => Failure::run(format!(
            "the server at {to} listens by the connection manager: it was started with -R or -z, which is not \
             supported here; start it without"
        )),
        Err(Failure::Interrupted) => Failure::Interrupted,
        Ok(false) | Err(_) => failure,
    }
}

fn listens(end: &mut Endpoint, to: SocketAddr) -> Result<bool, Failure> {
    let qp = end.context.create_qp(&QpConfig::rc(end.pd, end.cq))?;
    end.context.modify_qp(qp, Transition::Init { access: Access::NONE })?;
    let parameters =
        ConnectionParameters::default().cm_timeout_at_least(Duration::from_millis(500)).cm_retries(4);
    let id = end.context.connect(qp, to, &parameters)?;
    let deadline = Instant::now() + PATIENCE;
    let mut listens = false;
    while Instant::now() < deadline {
        end.poll()?;
        match end.context.next_cm_event() {
            Some(CmEvent::Established { .. }) => {
                listens = true;
                end.context.disconnect(id)?;
            }
            Some(CmEvent::Disconnected { .. }) => break,
            Some(CmEvent::Rejected { reason, .. }) => return Ok(reason != RejectReason::INVALID_SERVICE_ID),
            Some(CmEvent::Unreachable { .. }) => return Ok(false),
            _ => {}
        }
    }
    Ok(listens)
}
