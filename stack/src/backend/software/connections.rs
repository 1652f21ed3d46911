//! Connections by the connection manager.

use std::net::{IpAddr, SocketAddr};

use ferroce_wire::{Gid, PKey, PathMtu, Qpn};

use super::Software;
use super::next_hops::{Seeker, Wanted};
use crate::cm::{
    CmChannel, CmEvent, CmId, ConnectionManager, ConnectionParameters, ListenConfig, Listener, PortSpace,
    REJ_PRIVATE, REP_PRIVATE, REQ_PRIVATE, SIDR_REP_PRIVATE, SIDR_REQ_PRIVATE, Verbs, being_set_up,
    check_private_data,
};
use crate::engine::ah::Hop;
use crate::verbs::{AddressVector, Error, Qp, QpState, QpType};

impl Software {
    pub(crate) fn listen(
        &mut self,
        space: PortSpace,
        address: SocketAddr,
        config: &ListenConfig,
    ) -> Result<Listener, Error> {
        let own = |ip: IpAddr| self.engine.port.gids.iter().any(|entry| entry.gid == Gid::from(ip));
        if !address.ip().is_unspecified() && !own(address.ip()) {
            let expected = format!("an address of '{}', or 0.0.0.0 for all", self.engine.port.interface);
            return Err(Error::invalid("address", address, expected));
        }
        if let Some(index) = config.pkey_index {
            self.engine.port.pkey(index)?;
        }
        let listener = self.engine.cm()?.0.listen(space, address, *config)?;
        if let Some(service) = self.engine.cm()?.0.service_of(listener)
            && let Err(error) = self.driver.listen(service)
        {
            self.with_cm(|cm, verbs| cm.unlisten(listener, verbs));
            return Err(error.into());
        }
        Ok(listener)
    }

    pub(crate) fn unlisten(&mut self, listener: Listener) -> Result<(), Error> {
        let service = self.with_cm(|cm, _| cm.service_of(listener)).flatten();
        let known = self.with_cm(|cm, verbs| cm.unlisten(listener, verbs));
        if let Some(service) = service
            && self.with_cm(|cm, _| cm.has_service(service)) == Some(false)
        {
            self.driver.unlisten(service);
        }
        if known == Some(true) { Ok(()) } else { Err(Error::invalid_handle("listener", listener.0)) }
    }

    pub(crate) fn connect(
        &mut self,
        qp: Qp,
        to: SocketAddr,
        parameters: &ConnectionParameters<'_>,
    ) -> Result<CmId, Error> {
        parameters.check(REQ_PRIVATE)?;
        let named = self.connectable(qp)?;
        let (address, hop) = self.way_to(to, parameters)?;
        let port = &self.engine.port;
        let largest = port.path_mtu(address.gid.is_ipv6());
        let path_mtu = match parameters.path_mtu {
            Some(path_mtu) if largest.is_none_or(|most| path_mtu > most) => {
                let needed = path_mtu.required_l3_mtu(address.gid.is_ipv6());
                let (interface, mtu) = (port.interface.clone(), port.mtu);
                return Err(Error::PathMtu { path_mtu, needed, interface, mtu });
            }
            chosen => chosen.or(largest).unwrap_or(PathMtu::Mtu256),
        };
        let (cm, mut verbs) = self.engine.cm()?;
        let id = cm.connect(named, to, (address, hop), path_mtu, parameters, &mut verbs)?;
        let wanted = Wanted::of(&address, &self.engine.port);
        self.engine.next_hops.tell(wanted, hop, Seeker::Connection(id));
        Ok(id)
    }

    pub(crate) fn accept(
        &mut self,
        id: CmId,
        qp: Qp,
        parameters: &ConnectionParameters<'_>,
    ) -> Result<(), Error> {
        parameters.check(REP_PRIVATE)?;
        let (asked, pkey_index, _) = self.asked_for(id)?;
        if let Some(other) = parameters.pkey_index.filter(|chosen| *chosen != pkey_index) {
            let expected = format!("{pkey_index}, as the request has it, or None");
            return Err(Error::invalid("pkey_index", other, expected));
        }
        let (qp, qpn, qp_type) = self.connectable(qp)?;
        if qp_type != asked {
            return Err(Error::invalid("qp", format_args!("{qp_type:?}"), format!("a {asked:?} QP")));
        }
        let (cm, mut verbs) = self.engine.cm()?;
        cm.accept(id, (qp, qpn), parameters, &mut verbs)
    }

    pub(crate) fn accept_datagrams(&mut self, id: CmId, qp: Qp, private_data: &[u8]) -> Result<(), Error> {
        check_private_data(private_data, SIDR_REP_PRIVATE)?;
        let (asked, _, seeker) = self.asked_for(id)?;
        let (queue_pair, _) = self.qp(qp)?;
        let (qpn, qkey, pkey) = (queue_pair.qpn, queue_pair.qkey, queue_pair.pkey);
        let qp_type = self.query_qp(qp)?.qp_type;
        if asked != QpType::Ud || qp_type != asked {
            return Err(Error::invalid("qp", format_args!("{qp_type:?}"), format!("a {asked:?} QP")));
        }
        if !pkey.admits(seeker) {
            let expected = format!("a QP whose P_Key admits {seeker}, that of the client");
            return Err(Error::invalid("pkey", pkey, expected));
        }
        self.with_cm(|cm, verbs| cm.serve(id, (qpn, qkey), private_data, verbs));
        Ok(())
    }

    pub(crate) fn reject(&mut self, id: CmId, private_data: &[u8]) -> Result<(), Error> {
        let (asked, ..) = self.asked_for(id)?;
        check_private_data(private_data, if asked == QpType::Ud { SIDR_REP_PRIVATE } else { REJ_PRIVATE })?;
        self.with_cm(|cm, verbs| cm.refuse(id, private_data, verbs));
        Ok(())
    }

    pub(crate) fn resolve(
        &mut self,
        to: SocketAddr,
        parameters: &ConnectionParameters<'_>,
    ) -> Result<CmId, Error> {
        parameters.check(SIDR_REQ_PRIVATE)?;
        let (address, hop) = self.way_to(to, parameters)?;
        let (cm, mut verbs) = self.engine.cm()?;
        let id = cm.resolve(to, (address, hop), parameters, &mut verbs)?;
        let wanted = Wanted::of(&address, &self.engine.port);
        self.engine.next_hops.tell(wanted, hop, Seeker::Connection(id));
        Ok(id)
    }

    pub(crate) fn disconnect(&mut self, id: CmId) -> Result<(), Error> {
        // Messages that the application has seen are acknowledged first.
        self.send_owed(None);
        let known = self.with_cm(|cm, verbs| cm.disconnect(id, verbs));
        if known == Some(true) { Ok(()) } else { Err(Error::invalid_handle("connection", id.0)) }
    }

    pub(crate) fn next_cm_event(&mut self) -> Option<CmEvent> {
        self.engine.cm_if_used()?.0.next_event(None).ok().flatten()
    }

    pub(crate) fn create_cm_channel(&mut self) -> Result<CmChannel, Error> {
        self.engine.cm()?.0.create_channel()
    }

    pub(crate) fn destroy_cm_channel(&mut self, channel: CmChannel) -> Result<(), Error> {
        self.engine.cm()?.0.destroy_channel(channel)
    }

    pub(crate) fn next_cm_event_of(&mut self, channel: CmChannel) -> Result<Option<CmEvent>, Error> {
        self.engine.cm()?.0.next_event(Some(channel))
    }

    /// Takes the oldest event of one exchange, before those of others.
    pub(crate) fn take_cm_event(&mut self, id: CmId) -> Option<CmEvent> {
        self.engine.cm_if_used()?.0.take_event(id)
    }

    fn with_cm<T>(&mut self, then: impl FnOnce(&mut ConnectionManager, &mut Verbs<'_>) -> T) -> Option<T> {
        let (cm, mut verbs) = self.engine.cm_if_used()?;
        Some(then(cm, &mut verbs))
    }

    /// The parameters of a request, the local index of its partition, and the P_Key of the peer.
    fn asked_for(&mut self, id: CmId) -> Result<(QpType, usize, PKey), Error> {
        let (cm, _) = self.engine.cm_if_used().ok_or_else(|| Error::invalid_handle("connection", id.0))?;
        cm.asked_for(id)
    }

    /// A queue pair that can be connected.
    fn connectable(&mut self, qp: Qp) -> Result<(Qp, Qpn, QpType), Error> {
        let (queue_pair, _) = self.qp(qp)?;
        let qpn = queue_pair.qpn;
        let qp_type = queue_pair.qp_type();
        if qp_type == QpType::Ud {
            return Err(Error::invalid(
                "qp",
                "UD",
                "an RC or UC QP; resolve and accept_datagrams are for UD",
            ));
        }
        queue_pair.require("connecting", "INIT", &[QpState::Init])?;
        if let Some((cm, _)) = self.engine.cm_if_used()
            && let Some(id) = cm.user_of(qp)
        {
            return Err(being_set_up(qp, id));
        }
        Ok((qp, qpn, qp_type))
    }

    /// The path to a peer, and the state of the next hop.
    fn way_to(
        &mut self,
        to: SocketAddr,
        parameters: &ConnectionParameters<'_>,
    ) -> Result<(AddressVector, Hop), Error> {
        let gid = Gid::from(to.ip().to_canonical());
        let index = self.engine.port.source_for(to.ip())?;
        let address = AddressVector::new(gid, index);
        let wanted = Wanted::of(&address, &self.engine.port);
        let hop = self.engine.next_hop(&mut *self.driver, wanted)?;
        let mac = if let Hop::Found(mac) = hop { Some(mac) } else { None };
        Ok((address.mac(mac).traffic_class(parameters.traffic_class.unwrap_or(0)), hop))
    }
}
