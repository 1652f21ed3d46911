//! A request to a peer's connection manager, and its answer.
//!
//! It is a connection request for port 1, which the peer rejects with a REJ. If this end accepts the REJ, the REJ
//! arrived on UDP port 4791 with a valid ICRC, and so did the request at the peer.
//!
//! A busy peer sends many other packets. The answer is the packet for QP1 with the transaction id of the request,
//! whatever happened to its addresses and its ICRC.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ferroce::driver::{
    self, Capabilities, Error, FilteredSink, FilteredSource, FrameSink, FrameSource, Layer, PacketDriver,
    Sent,
};
use ferroce::wire::cm::{CmBody, CmMessage};
use ferroce::wire::{Identifications, Network, Packet, ParseError, Qpn, icrc};
use ferroce::{
    Access, CmEvent, Config, ConnectionParameters, Context, Gid, Nanos, PKey, Poller, QpConfig, Transition,
};

use crate::diagnosis::Diagnosis;
use crate::endpoint::{Interrupt, take_pkey};
use crate::failure::Failure;

/// "tcpmux", which no RDMA service uses.
pub(super) const UNUSED_PORT: u16 = 1;
/// The most answers that are examined.
const MAX_ANSWERS: usize = 16;

/// A packet that answers the request.
pub(super) struct CmAnswer {
    pub(super) source: Gid,
    pub(super) traffic_class: u8,
    pub(super) hop_limit: u8,
    pub(super) pkey: PKey,
    /// The cause of a wrong ICRC, if it is wrong.
    pub(super) wrong: Option<String>,
}

/// Requests an unused service from the peer's connection manager.
pub(super) fn ask(
    driver: Box<dyn PacketDriver>,
    (source, pkey): (IpAddr, PKey),
    peer: IpAddr,
    interrupt: &Interrupt,
) -> Result<(CmEvent, Vec<CmAnswer>), Failure> {
    // With one address there is one source GID.
    let capabilities = driver.capabilities().clone().addresses(vec![source]);
    let exchange: Arc<Mutex<Exchange>> = Arc::default();
    let tap = Tap { driver, capabilities, exchange: exchange.clone(), scratch: Vec::new() };
    let is_socket = tap.is_socket();
    let mut context = Context::open(Box::new(tap), &Config::default())?;
    take_pkey(&mut context, pkey)?;
    let (pd, cq) = (context.alloc_pd()?, context.create_cq(1)?);
    let qp = context.create_qp(&QpConfig::rc(pd, cq))?;
    context.modify_qp(qp, Transition::Init { access: Access::NONE })?;
    // 1.07 s, four times.
    let parameters =
        ConnectionParameters::default().cm_timeout_at_least(Duration::from_secs(1)).cm_retries(3);
    context.connect(qp, SocketAddr::new(peer, UNUSED_PORT), &parameters)?;
    let mut poller = Poller::new();
    let mut next_event = |context: &mut Context| {
        loop {
            interrupt.check()?;
            poller.poll(context)?;
            if let Some(event) = context.next_cm_event() {
                return Ok::<_, Failure>(event);
            }
        }
    };
    let event = next_event(&mut context)?;
    if let CmEvent::Established { id, .. } = event {
        context.disconnect(id)?;
        // Leaving earlier would leave a connection at the other end.
        next_event(&mut context)?;
    }
    let exchange = std::mem::take(&mut *exchange.lock().unwrap_or_else(PoisonError::into_inner));
    let mut diagnosis = Diagnosis::default();
    diagnosis.learn_addresses(Gid::from(peer), Gid::from(source));
    Ok((event, exchange.examine(is_socket, &mut diagnosis)))
}

/// A packet of a port; for a socket, the frame starts with the IP header.
fn decode(frame: &[u8], is_socket: bool) -> Option<Packet<'_>> {
    let decoded = if is_socket { Packet::decode_ip(frame) } else { Packet::decode(frame) };
    decoded.ok()
}

/// The packets in both directions.
#[derive(Default)]
struct Exchange {
    /// The transaction id of the request, once it was sent.
    asked: Option<u64>,
    answers: Vec<Vec<u8>>,
}

impl Exchange {
    fn sent(&mut self, frame: &[u8], is_socket: bool) {
        if self.asked.is_none()
            && let Some(packet) = decode(frame, is_socket)
            && let Some(CmMessage { transaction_id, body: CmBody::Req(_) }) = message(&packet)
        {
            self.asked = Some(transaction_id);
        }
    }

    fn came(&mut self, frame: &[u8], is_socket: bool) {
        if let Some(asked) = self.asked
            && self.answers.len() < MAX_ANSWERS
            && let Some(packet) = decode(frame, is_socket)
            && let Some(CmMessage { transaction_id, body }) = message(&packet)
            && transaction_id == asked
            && matches!(body, CmBody::Rej(_) | CmBody::Rep(_) | CmBody::Mra(_))
        {
            self.answers.push(frame.to_vec());
        }
    }

    fn examine(&self, is_socket: bool, diagnosis: &mut Diagnosis) -> Vec<CmAnswer> {
        let mut identifications = Identifications::default();
        let packets = self.answers.iter().filter_map(|frame| decode(frame, is_socket));
        let answer = |packet: Packet<'_>| {
            let checked = match is_socket {
                true => packet.check_guessed(icrc::Portable, &mut identifications).map(drop),
                false => packet.check_icrc(),
            };
            let wrong = match checked {
                Err(ParseError::Icrc { .. }) => Some(diagnosis.explain(&packet).cause.to_string()),
                _ => None,
            };
            let Network { source, traffic_class, hop_limit, .. } = packet.network();
            CmAnswer { source, traffic_class, hop_limit, pkey: packet.bth.pkey(), wrong }
        };
        packets.map(answer).collect()
    }
}

/// The connection manager message in a packet for QP1.
fn message<'a>(packet: &Packet<'a>) -> Option<CmMessage<'a>> {
    if packet.bth.dest_qpn() != Qpn::GSI {
        return None;
    }
    CmMessage::parse(packet.payload).ok()
}

/// Inspects the packets that it forwards in both directions, including those with a wrong ICRC.
struct Tap {
    driver: Box<dyn PacketDriver>,
    capabilities: Capabilities,
    exchange: Arc<Mutex<Exchange>>,
    /// For a frame that is sent from several buffers.
    scratch: Vec<u8>,
}

impl Tap {
    fn is_socket(&self) -> bool {
        matches!(self.capabilities.layer, Layer::Ip(_))
    }
}

impl driver::Wrapper for Tap {
    type Inner = dyn PacketDriver;

    fn inner(&self) -> &Self::Inner {
        &*self.driver
    }

    fn inner_mut(&mut self) -> &mut Self::Inner {
        &mut *self.driver
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn rx_burst(&mut self, now: Nanos, sink: &mut dyn FrameSink) -> Result<usize, Error> {
        let is_socket = self.is_socket();
        let mut exchange = self.exchange.lock().unwrap_or_else(PoisonError::into_inner);
        let look = |frame: &[u8]| {
            exchange.came(frame, is_socket);
            true
        };
        (*self.driver).rx_burst(now, &mut FilteredSink::new(sink, look))
    }

    fn tx_burst(&mut self, now: Nanos, source: &mut dyn FrameSource) -> Result<usize, Error> {
        let is_socket = self.is_socket();
        let Tap { driver, exchange, scratch, .. } = self;
        let mut exchange = exchange.lock().unwrap_or_else(PoisonError::into_inner);
        let look = |frame: Sent<'_>| {
            exchange.sent(frame.bytes(scratch), is_socket);
            true
        };
        (**driver).tx_burst(now, &mut FilteredSource::new(source, look))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::groups::Groups;

    #[test]
    fn groups_are_joined_and_left_inside() {
        let (driver, calls) = Groups::new();
        let capabilities = driver.capabilities().clone();
        let mut port =
            Tap { driver: Box::new(driver), capabilities, exchange: Arc::default(), scratch: Vec::new() };
        let group = [239, 0, 0, 1].into();
        PacketDriver::join(&mut port, group).unwrap();
        PacketDriver::leave(&mut port, group).unwrap();
        assert_eq!(*calls.lock().unwrap(), [("join", group), ("leave", group)]);
    }
}
