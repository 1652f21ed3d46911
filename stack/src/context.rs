use std::time::Duration;

use ferroce_driver::{Layer, Memory, Nanos, PacketDriver, Stats};
use ferroce_wire::{Encapsulation, Gid, MacAddr, PathAddress, PathHeader, PathMtu, Psn, Qpn, Service};
use rand_chacha::rand_core::RngCore;

use crate::ah::AddressHandle;
use crate::config::Config;
use crate::cq::CompletionQueue;
use crate::engine::Engine;
use crate::exporter::Exporter;
use crate::mw::MwBind;
use crate::qp::{Connection, QpState, QueuePair};
use crate::rq::{MAX_MESSAGE, ReceiveQueue};
use crate::shared::Shared;
use crate::slab::{Handle, Slab};
use crate::srq::SharedReceiveQueue;
use crate::{
    Access, AddressVector, Ah, Counters, Cq, DeviceAttributes, Error, Event, GidEntry, Metrics, Mr, Mw,
    Notify, Pd, Port, Qp, QpAttributes, QpConfig, QpUpdate, ReceiveWorkRequest, RegisterError, RemoteMemory,
    SendOp, SendWorkRequest, Srq, SrqAttributes, SrqConfig, Transition, UnreliablePath, WorkCompletion,
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
}

impl Context {
    /// Opens a context on a driver.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a setting out of range, [`Error::Unsupported`] for a driver that
    /// starts above Ethernet.
    pub fn open(driver: Box<dyn PacketDriver>, config: &Config) -> Result<Context, Error> {
        let capabilities = driver.capabilities();
        if capabilities.layer != Layer::Ethernet {
            return Err(Error::Unsupported("drivers that start above Ethernet"));
        }
        config.check()?;
        let needed = capabilities.mtu as usize + ETHERNET_HEADER_MAX;
        if capabilities.max_frame < needed {
            let expected = format!("at least {needed} for an MTU of {}", capabilities.mtu);
            return Err(Error::invalid("max_frame of the driver", capabilities.max_frame, expected));
        }
        let port = Port::new(capabilities, config.roce_v1);
        Ok(Context {
            engine: Engine::new(config, port),
            pds: Slab::new(config.max_pds),
            driver,
            exporter: None,
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
    /// row that is there.
    pub fn add_gid(&mut self, entry: GidEntry) -> Result<usize, Error> {
        if let Some(vlan) = entry.vlan.filter(|vlan| !(1..=4094).contains(vlan)) {
            return Err(Error::invalid("vlan", vlan, "1 to 4094"));
        }
        if entry.gid.is_multicast() {
            return Err(Error::invalid("gid", entry.gid, "an address of this port, not a multicast group"));
        }
        self.engine.add_gid(entry)
    }

    /// Limits and capabilities of this context.
    pub fn query_device(&self) -> &DeviceAttributes {
        &self.engine.shared.device
    }

    /// What the driver says of itself.
    pub fn capabilities(&self) -> &ferroce_driver::Capabilities {
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
        ];
        let in_use = resources.map(|(kind, (used, _))| (kind, used as u64));
        metrics.push_gauges("resource_in_use", "Objects that exist.", "resource", in_use);
        let limits = resources.map(|(kind, (_, capacity))| (kind, capacity as u64));
        metrics.push_gauges("resource_limit", "Objects that can exist.", "resource", limits);
        let states = [QpState::Reset]
            .into_iter()
            .chain(QpState::ALL_BUT_RESET)
            .map(|state| (state.name(), qps.iter().filter(|qp| qp.state == state).count() as u64));
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

    /// Allocates a protection domain: queue pairs reach only memory of their own.
    ///
    /// # Errors
    /// [`Error::Exhausted`].
    pub fn alloc_pd(&mut self) -> Result<Pd, Error> {
        let limit = self.pds.capacity();
        let full = Error::Exhausted { kind: "PD", limit, setting: "max_pds" };
        self.pds.insert_with(|_| ()).map(Pd).ok_or(full)
    }

    /// Frees a protection domain.
    ///
    /// # Errors
    /// [`Error::Busy`] while anything belongs to it.
    pub fn dealloc_pd(&mut self, pd: Pd) -> Result<(), Error> {
        self.check_pd(pd)?;
        let shared = &self.engine.shared;
        let users = if shared.mrs.uses_pd(pd) {
            "memory regions or windows"
        } else if shared.srqs.iter().any(|srq| srq.pd == pd) {
            "shared receive queues"
        } else if shared.ahs.iter().any(|ah| ah.pd == pd) {
            "address handles"
        } else if self.engine.qps.iter().any(|qp| qp.pd == pd) {
            "queue pairs"
        } else {
            self.pds.remove(pd.0);
            return Ok(());
        };
        Err(Error::Busy { kind: "PD", handle: format!("{:?}", pd.0), users: users.to_owned() })
    }

    /// Registers memory: local work requests may name it, and peers as far as `access` goes. The
    /// peers' addresses start at 0.
    ///
    /// # Errors
    /// [`RegisterError`], with the memory.
    pub fn register(&mut self, pd: Pd, memory: Memory, access: Access) -> Result<Mr, RegisterError> {
        self.register_at(pd, memory, access, 0)
    }

    /// As [`register`](Context::register), with the address `iova` for its first byte.
    ///
    /// # Errors
    /// [`RegisterError`], with the memory.
    pub fn register_at(
        &mut self,
        pd: Pd,
        memory: Memory,
        access: Access,
        iova: u64,
    ) -> Result<Mr, RegisterError> {
        if let Err(source) = self.check_pd(pd) {
            return Err(RegisterError { memory, source });
        }
        let Shared { mrs, rng, .. } = &mut self.engine.shared;
        mrs.register(rng, pd, memory, access, iova)
    }

    /// Ends a registration and gives the memory back. Peers that go on using the key are refused
    /// from now on, in the middle of a READ too.
    ///
    /// # Errors
    /// [`Error::Busy`] while a posted work request names it, or a window is bound to it. (A posted
    /// bind does not count: it ends as [`MwBindErr`](crate::WcStatus::MwBindErr).)
    pub fn deregister(&mut self, mr: Mr) -> Result<Memory, Error> {
        self.engine.shared.mrs.deregister(mr)
    }

    /// What to tell a peer about a region.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn remote(&self, mr: Mr) -> Result<RemoteMemory, Error> {
        self.engine.shared.mrs.remote(mr)
    }

    /// Allocates a memory window of type 2B, unbound: [`SendOp::BindMw`](crate::SendOp::BindMw)
    /// gives it a range and a key.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`], [`Error::Exhausted`].
    pub fn alloc_mw(&mut self, pd: Pd) -> Result<Mw, Error> {
        self.check_pd(pd)?;
        self.engine.shared.mrs.alloc_mw(pd)
    }

    /// Frees a memory window, bound or not. Peers that go on using its key are refused from now on.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn dealloc_mw(&mut self, mw: Mw) -> Result<(), Error> {
        self.engine.shared.mrs.dealloc_mw(mw)
    }

    /// What to tell a peer about a window; `None` while it is not bound. A bind has drawn the key
    /// by the time it completes, and each draws another.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn remote_window(&self, mw: Mw) -> Result<Option<RemoteMemory>, Error> {
        self.engine.shared.mrs.remote_window(mw)
    }

    /// The bytes of a region. The borrow keeps the context from being polled meanwhile, so no peer
    /// can write under it.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn bytes(&self, mr: Mr) -> Result<&[u8], Error> {
        self.engine.shared.mrs.bytes(mr)
    }

    /// As [`bytes`](Context::bytes), to write.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn bytes_mut(&mut self, mr: Mr) -> Result<&mut [u8], Error> {
        self.engine.shared.mrs.bytes_mut(mr)
    }

    /// The bytes of two regions at once, to compute from one into the other.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`]; [`Error::Invalid`] if both are the same region.
    pub fn bytes_pair_mut(&mut self, a: Mr, b: Mr) -> Result<(&mut [u8], &mut [u8]), Error> {
        self.engine.shared.mrs.bytes_pair_mut(a, b)
    }

    /// Creates a completion queue for `capacity` completions, 1 to 2²².
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::Exhausted`].
    pub fn create_cq(&mut self, capacity: u32) -> Result<Cq, Error> {
        if capacity == 0 || capacity > MAX_CQE {
            return Err(Error::invalid("CQ capacity", capacity, format!("1 to {MAX_CQE}")));
        }
        let cqs = &mut self.engine.shared.cqs;
        let full = Error::Exhausted { kind: "CQ", limit: cqs.capacity(), setting: "max_cqs" };
        cqs.insert_with(|_| CompletionQueue::new(capacity)).map(Cq).ok_or(full)
    }

    /// Destroys a completion queue.
    ///
    /// # Errors
    /// [`Error::Busy`] while a queue pair completes there.
    pub fn destroy_cq(&mut self, cq: Cq) -> Result<(), Error> {
        let users = self.cq(cq)?.users;
        if users > 0 {
            let users = format!("{users} send and receive queues");
            return Err(Error::Busy { kind: "CQ", handle: format!("{:?}", cq.0), users });
        }
        self.engine.shared.cqs.remove(cq.0);
        let of_queue = |event: &Event| *event == Event::Completion(cq) || *event == Event::CqErr(cq);
        self.engine.shared.events.purge(of_queue);
        Ok(())
    }

    /// Takes the oldest completion.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn poll_cq(&mut self, cq: Cq) -> Result<Option<WorkCompletion>, Error> {
        Ok(self.cq(cq)?.pop())
    }

    /// Arms a completion queue: one [`Event::Completion`] with the next completion that fits. Poll
    /// the queue once more after arming it, for what came in between.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn req_notify_cq(&mut self, cq: Cq, notify: Notify) -> Result<(), Error> {
        self.cq(cq)?.arm(notify);
        Ok(())
    }

    /// Takes the oldest asynchronous event.
    pub fn next_event(&mut self) -> Option<Event> {
        self.engine.shared.next_event()
    }

    /// Creates a shared receive queue, for RC and UD queue pairs.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::InvalidHandle`], [`Error::Exhausted`].
    pub fn create_srq(&mut self, config: &SrqConfig) -> Result<Srq, Error> {
        self.check_pd(config.pd)?;
        config.check()?;
        let srqs = &mut self.engine.shared.srqs;
        let full = Error::Exhausted { kind: "SRQ", limit: srqs.capacity(), setting: "max_srqs" };
        let make = |handle| {
            // Fills unused slots; never looked at.
            let queue = ReceiveQueue::new(config.max_wr, config.max_sge, Mr(handle));
            SharedReceiveQueue::new(config, queue)
        };
        srqs.insert_with(make).map(Srq).ok_or(full)
    }

    /// Posts a receive for any of the queue pairs that share the queue.
    ///
    /// # Errors
    /// [`Error::QueueFull`], [`Error::Invalid`], [`Error::InvalidHandle`].
    pub fn post_srq_recv(&mut self, srq: Srq, wr: &ReceiveWorkRequest<'_>) -> Result<(), Error> {
        let Shared { srqs, mrs, .. } = &mut self.engine.shared;
        let queue = srqs.get_mut(srq.0).ok_or_else(|| invalid_handle("SRQ", srq.0))?;
        queue.queue.post(wr, mrs)
    }

    /// Raises [`Event::SrqLimitReached`] once when fewer than `limit` receives are left; 0 turns it
    /// off. If fewer are left already, the event comes at once.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`]; [`Error::Invalid`] for a limit above the queue's depth.
    pub fn arm_srq(&mut self, srq: Srq, limit: u32) -> Result<(), Error> {
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

    /// What a shared receive queue is like now.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn query_srq(&self, srq: Srq) -> Result<SrqAttributes, Error> {
        let queue = self.engine.shared.srqs.get(srq.0).ok_or_else(|| invalid_handle("SRQ", srq.0))?;
        Ok(queue.attributes())
    }

    /// Destroys a shared receive queue; its receives are discarded.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`]; [`Error::Busy`] while queue pairs take from it.
    pub fn destroy_srq(&mut self, srq: Srq) -> Result<(), Error> {
        let users = self.srq(srq)?.users;
        if users > 0 {
            let users = format!("{users} queue pairs");
            return Err(Error::Busy { kind: "SRQ", handle: format!("{:?}", srq.0), users });
        }
        let Shared { srqs, mrs, events, .. } = &mut self.engine.shared;
        if let Some(mut removed) = srqs.remove(srq.0) {
            while removed.queue.pop(mrs).is_some() {}
        }
        events.purge(|event| *event == Event::SrqLimitReached(srq));
        Ok(())
    }

    /// Creates an address handle: the way of datagrams to a port, or to a multicast group.
    ///
    /// Asks the driver for the hardware address if the address vector has none, which may block for
    /// as long as ARP or ND takes.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`], [`Error::Invalid`], [`Error::AddressFamily`],
    /// [`Error::Exhausted`], or the driver's word.
    pub fn create_ah(&mut self, pd: Pd, address: &AddressVector) -> Result<Ah, Error> {
        self.check_pd(pd)?;
        let path = self.path(address, Qpn::default(), Qpn::default())?;
        let is_v1 = matches!(path.encapsulation, Encapsulation::RoceV1);
        let max_payload = self.engine.port.path_mtu(is_v1 || address.gid.is_ipv6());
        let max_payload = max_payload.map_or(0, PathMtu::bytes);
        let ahs = &mut self.engine.shared.ahs;
        let full = Error::Exhausted { kind: "AH", limit: ahs.capacity(), setting: "max_ahs" };
        let header = PathHeader::new(&path);
        let ah = ahs.insert_with(|_| AddressHandle::new(pd, header, address.flow_label, max_payload));
        ah.map(Ah).ok_or(full)
    }

    /// The way back to the sender of a datagram, from the first 40 bytes of its receive.
    ///
    /// # Errors
    /// [`Error::Invalid`] if they are no network header, or were sent to no GID of this port.
    pub fn address_from_grh(&self, grh: &[u8; 40]) -> Result<AddressVector, Error> {
        crate::ah::reverse(&self.engine.port, grh)
    }

    /// Destroys an address handle. Datagrams that are posted with it and have not left end in
    /// error.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn destroy_ah(&mut self, ah: Ah) -> Result<(), Error> {
        let removed = self.engine.shared.ahs.remove(ah.0);
        removed.map(drop).ok_or_else(|| invalid_handle("AH", ah.0))
    }

    /// Lets a UD queue pair hear a multicast group. Once is enough; more change nothing.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`]; [`Error::Invalid`] for a queue pair that is not UD, or a GID that
    /// is no group; [`Error::Exhausted`], or the driver's word.
    pub fn attach_mcast(&mut self, qp: Qp, group: Gid) -> Result<(), Error> {
        let (queue_pair, _) = self.qp(qp)?;
        if queue_pair.service != Service::Ud {
            return Err(Error::invalid("qp", format_args!("{:?}", queue_pair.service), "a UD QP"));
        }
        if !group.is_multicast() {
            return Err(Error::invalid("group", group, "a multicast address"));
        }
        let groups = &mut self.engine.groups;
        if groups.is_attached(group, qp.0.index) {
            return Ok(());
        }
        if groups.is_full() {
            let (limit, setting) = (groups.limit(), "max_mcast_attachments");
            return Err(Error::Exhausted { kind: "multicast attachment", limit, setting });
        }
        if !groups.has_members(group) {
            self.driver.join(group.to_ip())?;
        }
        groups.attach(group, qp.0.index);
        Ok(())
    }

    /// Ends what [`attach_mcast`](Context::attach_mcast) began.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`]; [`Error::Invalid`] if the queue pair is not attached; the driver's
    /// word.
    pub fn detach_mcast(&mut self, qp: Qp, group: Gid) -> Result<(), Error> {
        self.qp(qp)?;
        let groups = &mut self.engine.groups;
        if !groups.is_attached(group, qp.0.index) {
            return Err(Error::invalid("group", group, "one that the QP is attached to"));
        }
        if groups.members(group).count() == 1 {
            self.driver.leave(group.to_ip())?;
        }
        groups.detach(group, qp.0.index);
        Ok(())
    }

    /// A PSN to start from: one that nobody outside can guess, and that packets of an earlier
    /// connection do not fit (protocol.md §9).
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
        self.engine.destroy_qp(qp);
        self.cq(send_cq)?.users -= 1;
        self.cq(recv_cq)?.users -= 1;
        if let Some(srq) = srq {
            self.srq(srq)?.users -= 1;
        }
        Ok(())
    }

    /// Moves a queue pair from state to state.
    ///
    /// A new way to a peer asks the driver for the hardware address if the address vector has none,
    /// which may block for as long as ARP or ND takes.
    ///
    /// # Errors
    /// [`Error::State`] if the move does not start from the QP's state, [`Error::Invalid`] for what
    /// its service or state does not admit, [`Error::PathMtu`], [`Error::AddressFamily`], or the
    /// driver's word. The queue pair is as it was then.
    pub fn modify_qp(&mut self, qp: Qp, transition: Transition) -> Result<(), Error> {
        let (queue_pair, shared) = self.qp(qp)?;
        transition.check_service(queue_pair.service)?;
        match transition {
            Transition::Init { access } => queue_pair.init(access),
            Transition::InitDatagram { qkey } => queue_pair.init_datagram(qkey),
            Transition::ReadyToReceive(attributes) => {
                queue_pair.require_init()?;
                attributes.check()?;
                let connection = self.connection(qp, &attributes.path())?;
                let (queue_pair, shared) = self.qp(qp)?;
                queue_pair.ready_to_receive(shared, &attributes, connection)
            }
            Transition::ReadyToReceiveUnreliable(path) => {
                queue_pair.require_init()?;
                let connection = self.connection(qp, &path)?;
                self.qp(qp)?.0.ready_to_receive_unreliable(&path, connection)
            }
            Transition::ReadyToReceiveDatagrams => queue_pair.ready_to_receive_datagrams(),
            Transition::ReadyToSend(attributes) => queue_pair.ready_to_send(attributes),
            Transition::ReadyToSendUnreliable { sq_psn } => queue_pair.ready_to_send_unreliable(sq_psn),
            Transition::Drain => queue_pair.drain(shared),
            Transition::Resume => queue_pair.resume(shared),
            Transition::Update(update) => self.update(qp, &update),
            Transition::Error => {
                queue_pair.require("Error", "any state but RESET", &QpState::ALL_BUT_RESET)?;
                queue_pair.fail(shared);
                Ok(())
            }
            Transition::Reset => {
                queue_pair.reset(shared);
                Ok(())
            }
        }
    }

    fn update(&mut self, qp: Qp, update: &QpUpdate) -> Result<(), Error> {
        let (queue_pair, _) = self.qp(qp)?;
        queue_pair.check_update(update)?;
        let moved = match (update.address, queue_pair.connection, queue_pair.responder.expected_psn()) {
            (Some(address), Some(Connection { path_mtu, dest_qpn, .. }), rq_psn) => {
                Some(self.connection(qp, &UnreliablePath { address, path_mtu, dest_qpn, rq_psn })?)
            }
            _ => None,
        };
        self.qp(qp)?.0.update(update, moved);
        Ok(())
    }

    /// The connection of a queue pair along a path, with everything checked.
    fn connection(&mut self, qp: Qp, attributes: &UnreliablePath) -> Result<Connection, Error> {
        let local = self.qp(qp)?.0.qpn;
        let UnreliablePath { address, path_mtu, dest_qpn, .. } = *attributes;
        if !dest_qpn.is_ordinary() {
            return Err(Error::invalid("dest_qpn", dest_qpn, "a QPN other than 0, 1 and 0xffffff"));
        }
        if address.gid.is_multicast() {
            return Err(Error::invalid("gid", address.gid, "the address of one peer, not a multicast group"));
        }
        let port = &self.engine.port;
        // RoCE v1 has a header as long as IPv6, whatever the addresses.
        let is_v1 = port.gids.get(address.sgid_index).is_some_and(|entry| entry.roce_v1);
        let needed = path_mtu.required_l3_mtu(address.gid.is_ipv6() || is_v1);
        if needed > port.mtu {
            let (interface, mtu) = (port.interface.clone(), port.mtu);
            return Err(Error::PathMtu { path_mtu, needed, interface, mtu });
        }
        let path = self.path(&address, local, dest_qpn)?;
        Ok(Connection {
            header: PathHeader::new(&path),
            local: path.source,
            remote: path.destination,
            vlan: path.vlan.map(|tag| tag.id),
            path_mtu,
            dest_qpn,
        })
    }

    /// The addresses of packets to `address`, next hop included. Everything that can be refused
    /// without asking the kernel comes first.
    fn path(&mut self, address: &AddressVector, local: Qpn, remote: Qpn) -> Result<PathAddress, Error> {
        let mut path = address.path(&self.engine.port, local, remote)?;
        if address.mac.is_none() && !address.gid.is_multicast() {
            path.destination_mac = MacAddr(self.driver.resolve(address.gid.to_ip())?);
        }
        Ok(path)
    }

    /// What a queue pair is like now.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn query_qp(&self, qp: Qp) -> Result<QpAttributes, Error> {
        let queue_pair = self.engine.qps.get(qp.0).ok_or_else(|| invalid_handle("QP", qp.0))?;
        Ok(queue_pair.attributes())
    }

    /// Posts a send. It leaves with the next polls.
    ///
    /// # Errors
    /// [`Error::State`] before RTS, [`Error::QueueFull`], [`Error::Invalid`], [`Error::Access`],
    /// [`Error::Unsupported`] for FLUSH and ATOMIC WRITE where the device lacks them,
    /// [`Error::InvalidHandle`] for memory that is not registered. Memory that is registered but
    /// may not be used this way is told by the completion, as verbs do.
    pub fn post_send(&mut self, qp: Qp, wr: &SendWorkRequest<'_>) -> Result<(), Error> {
        let (queue_pair, shared) = self.qp(qp)?;
        let states = [QpState::Rts, QpState::Sqd, QpState::Sqe, QpState::Error];
        queue_pair.require("post_send", "RTS, SQD, SQE or ERR", &states)?;
        if !wr.op.is_on(queue_pair.service) {
            let expected = format!("an operation of the {:?} service", queue_pair.service);
            return Err(Error::invalid("op", format_args!("{:?}", wr.op), expected));
        }
        if wr.op.is_read_or_atomic()
            && queue_pair.state != QpState::Error
            && queue_pair.requester.attributes().max_rd_atomic == 0
        {
            return Err(Error::invalid("max_rd_atomic", 0, "at least 1 for READ, atomics and FLUSH"));
        }
        wr.op.check(&shared.device)?;
        if let SendOp::BindMw { mw, mr, offset, length, access } = wr.op {
            shared.mrs.check_bind(&MwBind { mw, mr, offset, length, access })?;
        }
        let max_length = queue_pair.connection.map_or(MAX_MESSAGE, |c| c.max_message());
        queue_pair.sq.post(wr, max_length, &mut shared.mrs)?;
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
        let Context { driver, engine, .. } = self;
        engine.shared.now = now;
        let received = driver.rx_burst(now, &mut |frame| engine.receive(frame))?;
        engine.fire_timers();
        let sent = driver.tx_burst(now, &mut |buffer| engine.transmit(buffer))?;
        if self.exporter.as_ref().is_some_and(|exporter| exporter.is_due(now))
            && let Some(mut exporter) = self.exporter.take()
        {
            exporter.serve(now, || self.metrics());
            self.exporter = Some(exporter);
        }
        Ok(received + sent)
    }

    /// When the next timer is due: without frames, nothing happens before.
    pub fn next_timeout(&self) -> Option<Nanos> {
        self.engine.shared.timers.next_deadline()
    }

    /// Blocks until a frame may have come, or for `timeout`.
    ///
    /// # Errors
    /// [`Error::Driver`] when the port is gone.
    pub fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
        Ok(self.driver.wait(timeout)?)
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

    fn qp(&mut self, qp: Qp) -> Result<(&mut QueuePair, &mut Shared), Error> {
        let Engine { qps, shared, .. } = &mut self.engine;
        let queue_pair = qps.get_mut(qp.0).ok_or_else(|| invalid_handle("QP", qp.0))?;
        Ok((queue_pair, shared))
    }
}

/// Ethernet and one 802.1Q tag.
const ETHERNET_HEADER_MAX: usize = 18;
const MAX_CQE: u32 = 1 << 22;

fn invalid_handle(kind: &'static str, handle: Handle) -> Error {
    Error::InvalidHandle { kind, handle: format!("{handle:?}") }
}
