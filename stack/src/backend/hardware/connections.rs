//! Connections by the connection manager: QP1 of a card is the kernel's, so they need librdmacm.

use std::net::SocketAddr;

use super::Hardware;
use crate::cm::{CmChannel, CmEvent, CmId, ConnectionParameters, ListenConfig, Listener, PortSpace};
use crate::verbs::{Error, Feature, Qp};

const NO_CM: Error = Error::Unsupported(Feature::ConnectionManagerOfCard);

impl Hardware {
    pub(crate) fn listen(
        &mut self,
        _: PortSpace,
        _: SocketAddr,
        _: &ListenConfig,
    ) -> Result<Listener, Error> {
        Err(NO_CM)
    }

    pub(crate) fn unlisten(&mut self, listener: Listener) -> Result<(), Error> {
        Err(Error::invalid_handle("listener", listener.0))
    }

    pub(crate) fn connect(
        &mut self,
        _: Qp,
        _: SocketAddr,
        _: &ConnectionParameters<'_>,
    ) -> Result<CmId, Error> {
        Err(NO_CM)
    }

    pub(crate) fn accept(&mut self, id: CmId, _: Qp, _: &ConnectionParameters<'_>) -> Result<(), Error> {
        Err(unknown(id))
    }

    pub(crate) fn accept_datagrams(&mut self, id: CmId, _: Qp, _: &[u8]) -> Result<(), Error> {
        Err(unknown(id))
    }

    pub(crate) fn reject(&mut self, id: CmId, _: &[u8]) -> Result<(), Error> {
        Err(unknown(id))
    }

    pub(crate) fn resolve(&mut self, _: SocketAddr, _: &ConnectionParameters<'_>) -> Result<CmId, Error> {
        Err(NO_CM)
    }

    pub(crate) fn disconnect(&mut self, id: CmId) -> Result<(), Error> {
        Err(unknown(id))
    }

    pub(crate) fn next_cm_event(&mut self) -> Option<CmEvent> {
        None
    }

    pub(crate) fn create_cm_channel(&mut self) -> Result<CmChannel, Error> {
        Err(NO_CM)
    }

    pub(crate) fn destroy_cm_channel(&mut self, _: CmChannel) -> Result<(), Error> {
        Err(NO_CM)
    }

    pub(crate) fn next_cm_event_of(&mut self, _: CmChannel) -> Result<Option<CmEvent>, Error> {
        Err(NO_CM)
    }

    pub(crate) fn take_cm_event(&mut self, _: CmId) -> Option<CmEvent> {
        None
    }
}

fn unknown(id: CmId) -> Error {
    Error::invalid_handle("connection", id.0)
}
