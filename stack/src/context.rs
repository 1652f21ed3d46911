mod blocking;
mod connections;
mod datagrams;
mod endpoints;
mod memory;
mod queues;
mod transitions;
mod waiting;

pub use blocking::DatagramService;

use ferroce_driver::{Capabilities, Layer, Nanos, PacketDriver, Readiness, Stats};
use ferroce_wire::{PKey, Psn, Qpn};
use rand_chacha::rand_core::RngCore;

use crate::backend::software::engine::Engine;
use crate::engine::cq::CompletionQueue;
use crate::engine::key_table::keys_needed;
use crate::engine::mw::MwBind;
use crate::engine::qp::QueuePair;
use crate::engine::shared::Shared;
use crate::engine::slab::Slab;
use crate::engine::srq::SharedReceiveQueue;
use crate::telemetry::counters::Counters;
use crate::telemetry::exporter::Exporter;
use crate::telemetry::metrics::Metrics;
use crate::verbs::{
    Config, Cq, DeviceAttributes, Error, Event, EventSource, Feature, GidEntry, Handle, MAX_MESSAGE,
    Mismatch, Pd, Port, PostError, Qp, QpAttributes, QpConfig, QpState, ReceiveWorkRequest, SendOp,
    SendWorkRequest, Srq,
};

/// One port with its protection domains, memory regions and windows, completion queues and queue
/// pairs.
///
/// One thread owns it and calls [`poll`](Context::poll) again and again; nothing happens outside
/// of it. See the [crate's documentation](crate) for an example.
pub struct Context {
    driver: Box<dyn PacketDriver>,
    engine: Engine,
    pds: Slab<()>,
    exporter: Option<Exporter>,
    readiness: Readiness,
    /// Somebody waits, or has waited, for `readiness`.
    armed: bool,
}

impl Context {
    /// Opens a context on a driver.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a setting out of range, [`Error::Unsupported`] for RoCE v1 over a driver
    /// that starts above Ethernet, [`Error::Driver`] when this process may have no more file descriptors.
    pub fn open(driver: Box<dyn PacketDriver>, config: &Config) -> Result<Context, Error> {
        let capabilities = driver.capabilities();
        config.check()?;
        let link_header = if capabilities.layer == Layer::Ethernet { ETHERNET_HEADER_MAX } else { 0 };
        if link_header == 0 && config.roce_v1 {
            return Err(Error::Unsupported(Feature::RoceV1));
        }
        let needed = capabilities.mtu as usize + link_header;
        if capabilities.max_frame < needed {
            let expected = format!("at least {needed} for an MTU of {}", capabilities.mtu);
            return Err(Error::invalid("max_frame of the driver", capabilities.max_frame, expected));
        }
        if let Layer::Ip(terms) = capabilities.layer {
            check_qpns(terms.qpns, config.max_qps)?;
        }
        let port = Port::new(capabilities, config.roce_v1);
        let readiness = Readiness::new().map_err(|source| waiting::waiting_failed(capabilities, source))?;
        Ok(Context {
            engine: Engine::new(config, port),
            pds: Slab::new(config.max_pds),
            driver,
            exporter: None,
            readiness,
            armed: false,
        })
    }

    /// The port: addresses, GID table, MTU.
    pub fn port(&self) -> &Port {
        &self.engine.port
    }

    /// Adds a row to the GID table and returns its index: an address of a VLAN on this port, or one
    /// that the driver does not know of.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a VLAN that does not exist, for RoCE v1 while that is off, and for a
    /// row that is there; [`Error::Unsupported`] on a socket, which has one address.
    pub fn add_gid(&mut self, entry: GidEntry) -> Result<usize, Error> {
        if self.engine.port.socket.is_some() {
            return Err(Error::Unsupported(Feature::SecondAddress));
        }
        if let Some(vlan) = entry.vlan.filter(|vlan| !(1..=4094).contains(vlan)) {
            return Err(Error::invalid("vlan", vlan, "1 to 4094"));
        }
        if entry.gid.is_multicast() {
            return Err(Error::invalid("gid", entry.gid, "an address of this port, not a multicast group"));
        }
        self.engine.add_gid(entry)
    }

    /// Adds a P_Key to the port's table and returns its index, which queue pairs
    /// ([`QpUpdate::pkey_index`](crate::QpUpdate::pkey_index)) and connections
    /// ([`ConnectionParameters`](crate::ConnectionParameters)) name. Two limited members of a partition do not hear each other; a full member hears all.
    ///
    /// # Errors
    /// [`Error::Invalid`] for partition 0, and for a key that is there; [`Error::Exhausted`].
    pub fn add_pkey(&mut self, pkey: PKey) -> Result<usize, Error> {
        self.engine.port.pkeys.add(pkey)
    }

    /// Removes the P_Key at an index of the port's table; the default one too, if nobody uses it. Queue pairs
    /// get the key at index 0 with INIT: no more of them leave RESET until index 0 has a key again, which is
    /// the next one that [`add_pkey`](Context::add_pkey) adds.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an index without a key, [`Error::Busy`] while queue pairs that are not in
    /// RESET, connections or listeners use it.
    pub fn remove_pkey(&mut self, index: usize) -> Result<(), Error> {
        let pkey = self.engine.port.pkey(index)?;
        let (qps, connections) = self.engine.pkey_users(index);
        if qps + connections > 0 {
            let users = format!("{qps} queue pairs, {connections} connections and listeners");
            return Err(Error::Busy { kind: "P_Key", handle: format!("{pkey} at index {index}"), users });
        }
        self.engine.port.pkeys.remove(index);
        Ok(())
    }

    /// Limits and capabilities of this context.
    pub fn query_device(&self) -> &DeviceAttributes {
        &self.engine.shared.device
    }

    /// What the driver says of itself.
    pub fn capabilities(&self) -> &Capabilities {
        self.driver.capabilities()
    }

    /// Frames and bytes that the driver has moved.
    pub fn driver_stats(&self) -> Stats {
        self.driver.stats()
    }

    /// What has been counted since the context was opened.
    pub fn counters(&self) -> &Counters {
        &self.engine.shared.counters
    }

    /// Everything that can be told in numbers: [`counters`](Context::counters),
    /// [`driver_stats`](Context::driver_stats), what is in use, and how much there can be.
    pub fn metrics(&self) -> Metrics {
        let Engine { qps, shared, .. } = &self.engine;
        let capabilities = self.driver.capabilities();
        let mut metrics = Metrics::new(capabilities.driver, &capabilities.interface);
        metrics.push_counters(&shared.counters);
        metrics.push_driver(&self.driver.stats());
        let resources = [
            ("pd", self.pds.usage()),
            ("mr", shared.mrs.slab.usage()),
            ("mw", shared.mrs.windows.usage()),
            ("cq", shared.cqs.usage()),
            ("srq", shared.srqs.usage()),
            ("ah", shared.ahs.usage()),
            ("qp", qps.usage()),
            ("connection", self.engine.connections()),
        ];
        let in_use = resources.map(|(kind, (used, _))| (kind, used as u64));
        metrics.push_gauges("resource_in_use", "Objects that exist.", "resource", in_use);
        let limits = resources.map(|(kind, (_, capacity))| (kind, capacity as u64));
        metrics.push_gauges("resource_limit", "Objects that can exist.", "resource", limits);
        let mut by_state = [0; QpState::ALL_BUT_RESET.len() + 1];
        qps.iter().for_each(|qp| by_state[qp.state as usize] += 1);
        let states = [QpState::Reset].into_iter().chain(QpState::ALL_BUT_RESET);
        let states = states.map(|state| (state.name(), by_state[state as usize]));
        metrics.push_gauges("qps", "Queue pairs by state.", "state", states);
        metrics
    }

    /// Shows [`metrics`](Context::metrics) to other processes of this user from now on, as
    /// `ferroce stat` does ([`Exported`](crate::Exported)). They are answered by
    /// [`poll`](Context::poll), which looks every few milliseconds whether somebody asks.
    ///
    /// # Errors
    /// [`Error::Export`] if there is no place for the socket; all else goes on without.
    pub fn export(&mut self) -> Result<(), Error> {
        self.exporter = Some(Exporter::open(&self.driver.capabilities().interface)?);
        Ok(())
    }

    /// Takes the oldest asynchronous event, of any object: for a program that has the context to itself.
    pub fn next_event(&mut self) -> Option<Event> {
        self.engine.shared.events.next()
    }

    /// Takes the oldest asynchronous event of one queue pair, completion queue, shared receive queue or address handle, or of the port.
    /// Libraries that share a context take those of their own objects so, and neither sees the other's. While there is
    /// none it costs a look.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn next_event_of(&mut self, source: impl Into<EventSource>) -> Result<Option<Event>, Error> {
        let source = source.into();
        match source {
            EventSource::Qp(qp) => self.qp(qp).map(drop)?,
            EventSource::Cq(cq) => self.cq(cq).map(drop)?,
            EventSource::Srq(srq) => self.srq(srq).map(drop)?,
            EventSource::Ah(ah) => {
                self.engine.shared.ahs.get(ah.0).ok_or_else(|| invalid_handle("AH", ah.0))?;
            }
            EventSource::Port => {}
        }
        Ok(self.engine.shared.events.next_of(source))
    }

    /// A PSN to start from: one that nobody outside can guess, and that packets of an earlier
    /// connection do not fit (docs/protocol.md §9).
    pub fn random_psn(&mut self) -> Psn {
        Psn::new(self.engine.shared.rng.next_u32())
    }

    /// Creates a queue pair, in RESET.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::InvalidHandle`], [`Error::Exhausted`].
    pub fn create_qp(&mut self, config: &QpConfig) -> Result<Qp, Error> {
        config.check()?;
        self.check_pd(config.pd)?;
        self.cq(config.send_cq)?;
        self.cq(config.recv_cq)?;
        let receives = match config.srq {
            Some(srq) => Some(self.srq(srq).map(|srq| (srq.pd, srq.max_sge))?),
            None => None,
        };
        let full = Error::Exhausted { kind: "QP", limit: self.engine.qps.capacity(), setting: "max_qps" };
        let qp = self.engine.create_qp(config, receives).ok_or(full)?;
        self.cq(config.send_cq)?.users += 1;
        self.cq(config.recv_cq)?.users += 1;
        if let Some(srq) = config.srq {
            self.srq(srq)?.users += 1;
        }
        Ok(qp)
    }

    /// Destroys a queue pair; its outstanding work is discarded, and its completions with it.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`]; [`Error::Busy`] while it is attached to multicast groups.
    pub fn destroy_qp(&mut self, qp: Qp) -> Result<(), Error> {
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

    /// What a queue pair is like now.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn query_qp(&self, qp: Qp) -> Result<QpAttributes, Error> {
        let queue_pair = self.engine.qps.get(qp.0).ok_or_else(|| invalid_handle("QP", qp.0))?;
        Ok(queue_pair.attributes())
    }

    /// Which queue pairs have had a packet of a peer that is set up otherwise than they are, and what the
    /// first one showed: why a work request was refused, or packets are dropped.
    pub fn mismatches(&self) -> impl Iterator<Item = (Qpn, Mismatch)> {
        self.engine.qps.iter().filter_map(|qp| Some((qp.qpn, qp.mismatch?)))
    }

    /// Posts a send. It leaves with the next polls.
    ///
    /// # Errors
    /// [`Error::State`] before RTS, [`Error::QueueFull`], [`Error::Invalid`], [`Error::Access`],
    /// [`Error::Unsupported`] for FLUSH and ATOMIC WRITE where the device lacks them,
    /// [`Error::InvalidHandle`] for memory that is not registered. Memory that is registered but
    /// may not be used this way is told by the completion, as verbs do.
    #[inline]
    pub fn post_send(&mut self, qp: Qp, wr: &SendWorkRequest<'_>) -> Result<(), Error> {
        let (queue_pair, shared) = self.qp(qp)?;
        if queue_pair.state != QpState::Rts {
            let states = [QpState::Rts, QpState::Sqd, QpState::Sqe, QpState::Error];
            queue_pair.require("post_send", "RTS, SQD, SQE or ERR", &states)?;
        }
        let kind = wr.op.kind();
        if !kind.is_on(queue_pair.service) {
            let expected = format!("an operation of the {:?} service", queue_pair.service);
            return Err(Error::invalid("op", format_args!("{:?}", wr.op), expected));
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

    /// Posts several sends, in this order.
    ///
    /// # Errors
    /// At the first that [`post_send`](Context::post_send) refuses: those before it are posted, it and those behind it
    /// are not.
    pub fn post_sends(&mut self, qp: Qp, wrs: &[SendWorkRequest<'_>]) -> Result<(), PostError> {
        in_order(wrs, |wr| self.post_send(qp, wr))
    }

    /// Posts several receives, in this order.
    ///
    /// # Errors
    /// As [`post_sends`](Context::post_sends), of [`post_recv`](Context::post_recv).
    pub fn post_recvs(&mut self, qp: Qp, wrs: &[ReceiveWorkRequest<'_>]) -> Result<(), PostError> {
        in_order(wrs, |wr| self.post_recv(qp, wr))
    }

    /// Posts a receive.
    ///
    /// # Errors
    /// [`Error::State`] in RESET, [`Error::QueueFull`], [`Error::Invalid`] (also for a queue pair
    /// with an SRQ), [`Error::InvalidHandle`].
    pub fn post_recv(&mut self, qp: Qp, wr: &ReceiveWorkRequest<'_>) -> Result<(), Error> {
        let (queue_pair, shared) = self.qp(qp)?;
        queue_pair.require("post_recv", "any state but RESET", &QpState::ALL_BUT_RESET)?;
        if queue_pair.srq.is_some() {
            return Err(Error::invalid("qp", "with an SRQ", "one with a receive queue; use post_srq_recv"));
        }
        queue_pair.rq.post(wr, &mut shared.mrs)?;
        if queue_pair.state == QpState::Error {
            queue_pair.flush(shared);
        }
        Ok(())
    }

    /// One turn of the engine at the time `now`: takes a burst of frames, fires the timers that
    /// are due, sends what is owed and what is posted. Returns how many frames came and went.
    ///
    /// # Errors
    /// [`Error::Driver`] when the port is gone.
    pub fn poll(&mut self, now: Nanos) -> Result<usize, Error> {
        if self.armed {
            self.end_wait()?;
        }
        let Context { driver, engine, .. } = self;
        engine.begin(now);
        let received = driver.rx_burst(now, engine)?;
        engine.fire_timers();
        if engine.next_hops.is_due(now) {
            engine.look_for_next_hop(&mut **driver);
        }
        engine.hear_refusals(&mut **driver);
        let sent = driver.tx_burst(now, engine)?;
        if self.exporter.as_ref().is_some_and(|exporter| exporter.is_due(now))
            && let Some(mut exporter) = self.exporter.take()
        {
            exporter.serve(now, || self.metrics());
            self.exporter = Some(exporter);
        }
        Ok(received + sent)
    }

    /// Sends the ACK that `qp` owes, or all. What they acknowledge the application has seen, and it may
    /// well be done with it all; its peer is not.
    fn send_owed(&mut self, qp: Option<Qp>) {
        let Context { driver, engine, .. } = self;
        engine.shared.hurry = true;
        // Twice: in the first an ACK may wait for requests.
        for _ in 0..2 {
            if !engine.schedule_acks(qp) {
                break;
            }
            engine.begin(engine.shared.now);
            if let Err(error) = driver.tx_burst(engine.shared.now, engine) {
                // A port that is gone tells so in the next poll too.
                tracing::debug!("ACKs that were owed stay unsent: {error}");
            }
        }
        engine.shared.hurry = false;
    }

    fn check_pd(&self, pd: Pd) -> Result<(), Error> {
        self.pds.get(pd.0).copied().ok_or_else(|| invalid_handle("PD", pd.0))
    }

    fn cq(&mut self, cq: Cq) -> Result<&mut CompletionQueue, Error> {
        self.engine.shared.cqs.get_mut(cq.0).ok_or_else(|| invalid_handle("CQ", cq.0))
    }

    fn srq(&mut self, srq: Srq) -> Result<&mut SharedReceiveQueue, Error> {
        self.engine.shared.srqs.get_mut(srq.0).ok_or_else(|| invalid_handle("SRQ", srq.0))
    }

    #[inline(always)]
    fn qp(&mut self, qp: Qp) -> Result<(&mut QueuePair, &mut Shared), Error> {
        let Engine { qps, shared, .. } = &mut self.engine;
        let queue_pair = qps.get_mut(qp.0).ok_or_else(|| invalid_handle("QP", qp.0))?;
        Ok((queue_pair, shared))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // A peer that is told before it has its ACKs takes what was delivered for lost.
        self.send_owed(None);
        while self.engine.cm_if_used().is_some_and(|(cm, mut verbs)| cm.disconnect_some(&mut verbs)) {
            let Context { driver, engine, .. } = self;
            if !matches!(driver.tx_burst(engine.shared.now, engine), Ok(1..)) {
                tracing::debug!("some connections end without a word: the port takes no more");
                break;
            }
        }
    }
}

/// Ethernet and one 802.1Q tag.
const ETHERNET_HEADER_MAX: usize = 18;

#[inline]
fn in_order<T>(wrs: &[T], mut post: impl FnMut(&T) -> Result<(), Error>) -> Result<(), PostError> {
    for (posted, wr) in wrs.iter().enumerate() {
        post(wr).map_err(|source| PostError { posted, source })?;
    }
    Ok(())
}

/// Queue pair numbers are drawn from those that the driver leaves.
fn check_qpns((rest, divisor): (u32, u32), max_qps: u32) -> Result<(), Error> {
    if rest >= divisor {
        let expected = "(rest, divisor), the rest below the divisor";
        return Err(Error::invalid("qpns of the driver", format_args!("({rest}, {divisor})"), expected));
    }
    let numbers = (1u64 << 24) / u64::from(divisor);
    if numbers < keys_needed(max_qps) {
        let expected =
            format!("fewer queue pairs: this driver leaves every {divisor}th number, {numbers} in all");
        return Err(Error::invalid("max_qps", max_qps, expected));
    }
    Ok(())
}

fn invalid_handle(kind: &'static str, handle: Handle) -> Error {
    Error::InvalidHandle { kind, handle: format!("{handle:?}") }
}

#[cfg(test)]
mod tests {
    use super::check_qpns;

    /// Without this a division by zero, or numbers drawn for ever.
    #[test]
    fn a_driver_leaves_enough_queue_pair_numbers() {
        let refused = |qpns, max_qps| check_qpns(qpns, max_qps).map_err(|error| error.to_string());
        assert_eq!(refused((0, 2), 1 << 20), Ok(()));
        assert_eq!(refused((511, 512), 256), Ok(()));
        for qpns in [(5, 0), (9, 4), (4, 4)] {
            let (rest, divisor) = qpns;
            let expected = "(rest, divisor), the rest below the divisor";
            let message = format!("qpns of the driver = ({rest}, {divisor}): {expected}");
            assert_eq!(refused(qpns, 1), Err(message));
        }
        let message =
            "max_qps = 20000: fewer queue pairs: this driver leaves every 512th number, 32768 in all";
        assert_eq!(refused((511, 512), 20_000), Err(message.to_owned()));
    }
}
