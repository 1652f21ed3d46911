use std::time::Duration;

use ferroce_driver::{Layer, Memory, Nanos, PacketDriver, Stats};
use ferroce_wire::{MacAddr, PathHeader};
use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::SeedableRng;

use crate::config::{Config, MAX_WINDOW};
use crate::cq::CompletionQueue;
use crate::engine::Engine;
use crate::qp::{Connection, QpState, QueuePair};
use crate::rq::MAX_MESSAGE;
use crate::slab::{Handle, Slab};
use crate::{
    Access, Counters, Cq, Error, Event, Mr, Notify, Pd, Port, Qp, QpAttributes, QpConfig, ReadyToReceive,
    ReceiveWorkRequest, RegisterError, RemoteMemory, SendWorkRequest, Transition, WorkCompletion,
};

/// One port with its protection domains, memory regions, completion queues and queue pairs.
///
/// One thread owns it and calls [`poll`](Context::poll) again and again; nothing happens outside
/// of it. See the [crate's documentation](crate) for an example.
pub struct Context {
    driver: Box<dyn PacketDriver>,
    engine: Engine,
    pds: Slab<()>,
    port: Port,
    rng: ChaCha20Rng,
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
        if config.window == 0 || config.window > MAX_WINDOW {
            return Err(Error::invalid("window", config.window, format!("1 to {MAX_WINDOW} packets")));
        }
        let needed = capabilities.mtu as usize + ETHERNET_HEADER_MAX;
        if capabilities.max_frame < needed {
            let expected = format!("at least {needed} for an MTU of {}", capabilities.mtu);
            return Err(Error::invalid("max_frame of the driver", capabilities.max_frame, expected));
        }
        let rng = match config.seed {
            Some(seed) => ChaCha20Rng::from_seed(seed),
            None => ChaCha20Rng::from_os_rng(),
        };
        let port = Port::new(capabilities, config.roce_v1);
        Ok(Context { engine: Engine::new(config), pds: Slab::new(config.max_pds), port, rng, driver })
    }

    /// The port: addresses, GID table, MTU.
    pub fn port(&self) -> &Port {
        &self.port
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
    /// [`Error::Busy`] while a memory region or queue pair belongs to it.
    pub fn dealloc_pd(&mut self, pd: Pd) -> Result<(), Error> {
        self.check_pd(pd)?;
        let users = if self.engine.shared.mrs.uses_pd(pd) {
            "memory regions"
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
        self.engine.shared.mrs.register(&mut self.rng, pd, memory, access, iova)
    }

    /// Ends a registration and gives the memory back. Peers that go on using the key are refused
    /// from now on, in the middle of a READ too.
    ///
    /// # Errors
    /// [`Error::Busy`] while a posted work request names it.
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
        self.engine.shared.events.purge(cq);
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

    /// Creates a queue pair, in RESET.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::InvalidHandle`], [`Error::Exhausted`], [`Error::Unsupported`].
    pub fn create_qp(&mut self, config: &QpConfig) -> Result<Qp, Error> {
        config.check()?;
        self.check_pd(config.pd)?;
        self.cq(config.send_cq)?;
        self.cq(config.recv_cq)?;
        let full = Error::Exhausted { kind: "QP", limit: self.engine.qps.capacity(), setting: "max_qps" };
        let qp = self.engine.create_qp(&mut self.rng, config).ok_or(full)?;
        self.cq(config.send_cq)?.users += 1;
        self.cq(config.recv_cq)?.users += 1;
        Ok(qp)
    }

    /// Destroys a queue pair; its outstanding work is discarded, and its completions with it.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn destroy_qp(&mut self, qp: Qp) -> Result<(), Error> {
        let (queue_pair, _) = self.qp(qp)?;
        let (send_cq, recv_cq) = (queue_pair.send_cq, queue_pair.recv_cq);
        self.engine.destroy_qp(qp);
        self.cq(send_cq)?.users -= 1;
        self.cq(recv_cq)?.users -= 1;
        Ok(())
    }

    /// Moves a queue pair from state to state.
    ///
    /// `ReadyToReceive` asks the driver for the peer's hardware address if the address vector has
    /// none, which may block for as long as ARP or ND takes.
    ///
    /// # Errors
    /// [`Error::State`] if the move does not start from the QP's state, [`Error::Invalid`],
    /// [`Error::PathMtu`], [`Error::AddressFamily`], or the driver's word.
    pub fn modify_qp(&mut self, qp: Qp, transition: Transition) -> Result<(), Error> {
        if let Transition::ReadyToReceive(attributes) = &transition {
            return self.ready_to_receive(qp, attributes);
        }
        let (queue_pair, shared) = self.qp(qp)?;
        match transition {
            Transition::Init { access } => queue_pair.init(access),
            Transition::ReadyToSend(attributes) => queue_pair.ready_to_send(attributes),
            Transition::Drain => queue_pair.drain(shared),
            Transition::Resume => queue_pair.resume(shared),
            Transition::Error => {
                let all = [QpState::Init, QpState::Rtr, QpState::Rts, QpState::Sqd, QpState::Error];
                queue_pair.require("Error", "any state but RESET", &all)?;
                queue_pair.fail(shared);
                Ok(())
            }
            Transition::Reset => {
                queue_pair.reset(shared);
                Ok(())
            }
            Transition::ReadyToReceive(_) => Ok(()),
        }
    }

    fn ready_to_receive(&mut self, qp: Qp, attributes: &ReadyToReceive) -> Result<(), Error> {
        let (queue_pair, _) = self.qp(qp)?;
        queue_pair.require("ReadyToReceive", "INIT", &[QpState::Init])?;
        let local = queue_pair.qpn;
        attributes.check()?;
        let ReadyToReceive { address, path_mtu, dest_qpn, .. } = *attributes;
        if !dest_qpn.is_ordinary() {
            return Err(Error::invalid("dest_qpn", dest_qpn, "a QPN other than 0, 1 and 0xffffff"));
        }
        // RoCE v1 has a header as long as IPv6, whatever the addresses.
        let is_v1 = self.port.gids.get(address.sgid_index).is_some_and(|entry| entry.roce_v1);
        let needed = path_mtu.required_l3_mtu(address.gid.is_ipv6() || is_v1);
        if needed > self.port.mtu {
            let (interface, mtu) = (self.port.interface.clone(), self.port.mtu);
            return Err(Error::PathMtu { path_mtu, needed, interface, mtu });
        }
        // Everything that can be refused without asking the kernel, first.
        let mut path = address.path(&self.port, local, dest_qpn)?;
        if address.mac.is_none() {
            path.destination_mac = MacAddr(self.driver.resolve(address.gid.to_ip())?);
        }
        let connection = Connection {
            header: PathHeader::new(&path),
            local: path.source,
            remote: path.destination,
            path_mtu,
            dest_qpn,
        };
        let (queue_pair, _) = self.qp(qp)?;
        queue_pair.ready_to_receive(attributes, connection)
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
    /// [`Error::State`] before RTS, [`Error::QueueFull`], [`Error::Invalid`],
    /// [`Error::InvalidHandle`] for memory that is not registered. Memory that is registered but
    /// may not be used this way is told by the completion, as verbs do.
    pub fn post_send(&mut self, qp: Qp, wr: &SendWorkRequest<'_>) -> Result<(), Error> {
        let (queue_pair, shared) = self.qp(qp)?;
        queue_pair.require("post_send", "RTS, SQD or ERR", &[QpState::Rts, QpState::Sqd, QpState::Error])?;
        if wr.op.is_read_or_atomic()
            && queue_pair.state != QpState::Error
            && queue_pair.requester.max_rd_atomic() == 0
        {
            return Err(Error::invalid("max_rd_atomic", 0, "at least 1 for READ and atomics"));
        }
        let max_length = queue_pair.connection.map_or(MAX_MESSAGE, |c| c.max_message());
        queue_pair.sq.post(wr, max_length, &mut shared.mrs)?;
        match queue_pair.state {
            QpState::Error => queue_pair.flush(shared),
            _ => queue_pair.schedule(shared),
        }
        Ok(())
    }

    /// Posts a receive.
    ///
    /// # Errors
    /// [`Error::State`] in RESET, [`Error::QueueFull`], [`Error::Invalid`],
    /// [`Error::InvalidHandle`].
    pub fn post_recv(&mut self, qp: Qp, wr: &ReceiveWorkRequest<'_>) -> Result<(), Error> {
        let (queue_pair, shared) = self.qp(qp)?;
        let all = [QpState::Init, QpState::Rtr, QpState::Rts, QpState::Sqd, QpState::Error];
        queue_pair.require("post_recv", "any state but RESET", &all)?;
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

    fn qp(&mut self, qp: Qp) -> Result<(&mut QueuePair, &mut crate::shared::Shared), Error> {
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
