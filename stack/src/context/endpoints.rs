//! From RESET to RTS in one call: for two queue pairs whose ends have exchanged endpoints, and for one for datagrams.

use std::net::IpAddr;

use ferroce_wire::PathMtu;

use super::Context;
use crate::verbs::{
    Access, AddressVector, Endpoint, Error, Qp, QpState, QpType, ReadyToReceive, ReadyToSend, Transition,
    UnreliablePath,
};

impl Context {
    /// The data that the peer needs to connect to a queue pair: the GID at `sgid_index` of the port's table, the QPN, a new
    /// random PSN, the largest path MTU of the port, and 16 READs and atomics.
    /// [`Port::gid_index_for`](crate::Port::gid_index_for) returns an index for the peer's address. The state of the queue pair
    /// is not checked.
    ///
    /// Call it once per connection. Every call draws a new PSN, and [`handshake`](Context::handshake) must get the endpoint that
    /// was sent to the peer. With another one the two ends expect different PSNs: requests are refused, or acknowledged as
    /// duplicates and not executed.
    ///
    /// An endpoint contains only the GID, so the row must be the first one of RoCE v2 with that GID; for another row (RoCE v1, a
    /// second VLAN) make the transitions with [`modify_qp`](Context::modify_qp).
    ///
    /// # Errors
    /// [`Error::InvalidHandle`]; [`Error::Invalid`] for an index outside the table, or of another row.
    pub fn endpoint(&mut self, qp: Qp, sgid_index: usize) -> Result<Endpoint, Error> {
        let qpn = self.query_qp(qp)?.qpn;
        let port = self.port();
        let Some(entry) = port.gids.get(sgid_index) else {
            return Err(Error::invalid("sgid_index", sgid_index, port.gid_indices()));
        };
        let first = port.gid_index(entry.gid);
        if first != Some(sgid_index) {
            let expected = match first {
                Some(first) => format!("{first}, the first row of RoCE v2 with the GID {}", entry.gid),
                None => format!("a row of RoCE v2, which {} has not", entry.gid),
            };
            return Err(Error::invalid("sgid_index", sgid_index, expected));
        }
        let (gid, path_mtu) = (entry.gid, port.path_mtu(entry.gid.is_ipv6()).unwrap_or(PathMtu::Mtu256));
        let psn = self.random_psn();
        Ok(Endpoint::new(gid, qpn, psn).path_mtu(path_mtu))
    }

    /// As [`endpoint`](Context::endpoint), with the GID for a peer with the address `peer`: the first one of RoCE v2 of the same
    /// kind (IPv4, link-local or other IPv6).
    ///
    /// # Errors
    /// Those of [`endpoint`](Context::endpoint); [`Error::Invalid`] for a `peer` that is not a unicast address, or if the port
    /// has no address of its IP version.
    pub fn endpoint_for(&mut self, qp: Qp, peer: IpAddr) -> Result<Endpoint, Error> {
        let sgid_index = self.port().source_for(peer)?;
        self.endpoint(qp, sgid_index)
    }

    /// Connects an RC or UC queue pair, from RESET or INIT to RTS. `local` is the result of [`endpoint`](Context::endpoint) that
    /// was sent to the peer, `remote` the peer's endpoint. Both ends may call it in any order; requests to a peer that is not
    /// ready yet are retransmitted.
    ///
    /// From RESET the queue pair gets all remote rights, so the rights of each region decide. To give it fewer, or to post
    /// receives before the peer can send, make the transition to INIT yourself:
    ///
    /// ```
    /// # use ferroce::*;
    /// # fn run(context: &mut Context, qp: Qp, mr: Mr, local: &Endpoint, remote: &Endpoint) -> Result<(), Error> {
    /// context.modify_qp(qp, Transition::Init { access: Access::REMOTE_WRITE })?;
    /// context.post_recv(qp, &ReceiveWorkRequest { wr_id: 1, sges: &[mr.sge(0..64)] })?;
    /// context.handshake(qp, local, remote)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Timeouts, retries, RNR timer, traffic class and selective repeat have their defaults
    /// ([`ReadyToReceive::new`], [`ReadyToSend::new`], [`AddressVector::new`]). For other values make the transitions with
    /// [`modify_qp`](Context::modify_qp).
    ///
    /// # Errors
    /// [`Error::State`] in any other state; [`Error::Invalid`] for a UD queue pair, and if `local` is not of this queue pair or
    /// port; errors of [`modify_qp`](Context::modify_qp). The queue pair is then still in RESET or INIT.
    pub fn handshake(&mut self, qp: Qp, local: &Endpoint, remote: &Endpoint) -> Result<(), Error> {
        let attributes = self.query_qp(qp)?;
        if attributes.qpn != local.qpn {
            let expected = format!("the endpoint of the queue pair {}", attributes.qpn);
            return Err(Error::invalid("local endpoint", local, expected));
        }
        let Some(sgid_index) = self.port().gid_index(local.gid) else {
            let expected = format!("an endpoint with a RoCE v2 GID of '{}'", self.port().interface);
            return Err(Error::invalid("local endpoint", local, expected));
        };
        let address = AddressVector::new(remote.gid, sgid_index);
        let path_mtu = local.path_mtu.min(remote.path_mtu);
        let [to_receive, to_send] = match attributes.qp_type {
            QpType::Rc => {
                let receive = ReadyToReceive::new(address, remote.qpn, remote.psn);
                let receive = receive.path_mtu(path_mtu).max_dest_rd_atomic(local.rd_atomic);
                let send = ReadyToSend::new(local.psn).max_rd_atomic(remote.rd_atomic);
                // There is no transition from RTR back to INIT.
                send.check()?;
                [Transition::ReadyToReceive(receive), Transition::ReadyToSend(send)]
            }
            QpType::Uc => {
                let receive = UnreliablePath::new(address, remote.qpn, remote.psn).path_mtu(path_mtu);
                let send = Transition::ReadyToSendUnreliable { sq_psn: local.psn };
                [Transition::ReadyToReceiveUnreliable(receive), send]
            }
            QpType::Ud => {
                let expected = "an RC or UC queue pair; datagrams go to address handles";
                return Err(Error::invalid("qp", "UD", expected));
            }
        };
        if attributes.state != QpState::Reset {
            self.modify_qp(qp, to_receive)?;
            return self.modify_qp(qp, to_send);
        }
        let access =
            Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC | Access::FLUSH_GLOBAL;
        let moves = [Transition::Init { access }, to_receive, to_send];
        let moved = moves.into_iter().try_for_each(|transition| self.modify_qp(qp, transition));
        if moved.is_err() {
            self.modify_qp(qp, Transition::Reset)?;
        }
        moved
    }

    /// Makes a UD queue pair ready to send and receive, from RESET or INIT to RTS. Datagrams to it must carry `qkey`. Its first
    /// PSN is random.
    ///
    /// ```
    /// # use ferroce::*;
    /// let mut context = Context::open(Device::open("loopback")?, &Config::default())?;
    /// let (pd, cq) = (context.alloc_pd()?, context.create_cq(16)?);
    /// let qp = context.create_qp(&QpConfig::ud(pd, cq))?;
    /// context.start_datagrams(qp, 0x1234)?;
    /// assert_eq!(context.query_qp(qp)?.state, QpState::Rts);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::State`] in any other state; [`Error::Invalid`] for an RC or UC queue pair, which
    /// [`handshake`](Context::handshake) connects.
    pub fn start_datagrams(&mut self, qp: Qp, qkey: u32) -> Result<(), Error> {
        let sq_psn = self.random_psn();
        self.modify_qp(qp, Transition::InitDatagram { qkey })?;
        self.modify_qp(qp, Transition::ReadyToReceiveDatagrams)?;
        self.modify_qp(qp, Transition::ReadyToSendUnreliable { sq_psn })
    }
}
