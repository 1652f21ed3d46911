//! The verbs on an RNIC, or rdma_rxe, through libibverbs.
//!
//! The card has its own queues and memory; this module keeps what the API needs in addition: handles, the application's
//! numbers of work requests, how full queues are, which regions are in use.

mod completions;
mod connections;
mod datagrams;
mod events;
mod memory;
mod metrics;
mod port;
mod posts;
mod queue_pairs;
mod queues;
mod transitions;
mod waiting;
mod work;

use std::collections::HashMap;
use std::time::Duration;

use ferroce_driver::rnic::{
    AddressHandle, CmFunctions, CompletionChannel, CompletionQueue, Device, Piece, PortCounters,
    ProtectionDomain, SharedReceiveQueue, Waiting,
};
use ferroce_driver::{Capabilities, Membership, Nanos, Readiness};
use ferroce_wire::Psn;
use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::engine::cq::CompletionQueue as Completions;
use crate::engine::event::Events;
use crate::engine::slab::{Slab, first_generation};
use crate::telemetry::counters::{Counter, Counters};
use crate::telemetry::exporter::Exporter;
use crate::telemetry::metrics::ProgramCounters;
use crate::verbs::{
    Ah, Config, CongestionControl, Cq, DeviceAttributes, Error, Feature, Handle, Pd, Port, Qp,
};
use completions::Batch;
use connections::{ConnectionLimits, Connections};
use memory::{HardwareRegion, HardwareWindow};
use port::GidRows;
pub use port::RnicPort;
use queue_pairs::HardwareQp;
use queues::ReceiveSlots;
use work::WorkId;

/// A port of a card, and all objects created on it.
pub(crate) struct Hardware {
    qps: Slab<HardwareQp>,
    cqs: Slab<HardwareCq>,
    srqs: Slab<HardwareSrq>,
    named: NamedObjects,
    pds: Slab<ProtectionDomain>,
    /// Queue pairs by QPN.
    numbers: HashMap<u32, Handle>,
    /// The slots of the existing completion queues.
    live_cqs: Vec<u32>,
    events: Events,
    /// Completions or events were added since the last query.
    has_news: bool,
    channel: CompletionChannel,
    device: Device,
    /// Cached properties of the port, and its number.
    port: Port,
    port_number: u8,
    gid_rows: GidRows,
    /// For the port's interface: `ibv_attach_mcast` only configures the card.
    membership: Membership,
    /// It is rdma_rxe, which has some numbers of its own.
    is_rxe: bool,
    max_message: u32,
    attributes: DeviceAttributes,
    limits: ferroce_driver::rnic::RnicLimits,
    capabilities: Capabilities,
    counters: Counters,
    /// The kernel's counters of the port, and their values when the context was opened.
    card_counters: PortCounters,
    counted_before: Counters,
    next_count: Nanos,
    exporter: Option<Exporter>,
    pub(crate) program_counters: ProgramCounters,
    /// librdmacm, if it was loaded already.
    cm_functions: Option<CmFunctions>,
    connections: Option<Box<Connections>>,
    connection_limits: ConnectionLimits,
    rng: ChaCha20Rng,
    now: Nanos,
    /// When asynchronous events are checked next, as time and as number of polls: a check is a system call.
    next_look: Nanos,
    polls_to_look: u32,
    readiness: Readiness,
    waiting: Waiting,
    /// A thread waits, or has waited.
    armed: bool,
    /// The device has failed or was removed.
    is_gone: bool,
    /// Storage for the pieces of work requests.
    pieces: Box<work::PieceRoom>,
    /// Storage for completions; `None` while it is in use.
    batch: Option<Box<Batch>>,
}

/// The objects to which work requests refer.
struct NamedObjects {
    ahs: Slab<HardwareAh>,
    /// Dropped before the regions, which are busy while a window is bound to them.
    mws: Slab<HardwareWindow>,
    mrs: Slab<HardwareRegion>,
}

struct HardwareCq {
    card: CompletionQueue,
    queue: Completions,
    /// The most completions taken at once, so that a card that never stops does not keep a poll from ending.
    most: usize,
    /// The polls of the context that leave completions on the card, because the application takes them from there.
    polls_to_drain: u8,
    /// Armed for solicited completions only, which only the card distinguishes.
    solicited_only: bool,
}

struct HardwareSrq {
    card: SharedReceiveQueue,
    pd: Pd,
    slots: ReceiveSlots,
    limit: u32,
    users: u32,
}

struct HardwareAh {
    card: AddressHandle,
    pd: Pd,
}

impl Hardware {
    pub(crate) fn open(opened: RnicPort, config: &Config) -> Result<Hardware, Error> {
        config.check()?;
        if config.congestion != CongestionControl::Off || config.notification.is_some() {
            return Err(Error::Unsupported(Feature::CongestionControl));
        }
        if config.drop_access_errors {
            return Err(Error::Unsupported(Feature::DropAccessErrors));
        }
        // No context has more queue pairs.
        if config.max_srqs > WorkId::OBJECTS {
            let expected = format!("at most {} with an RNIC", WorkId::OBJECTS);
            return Err(Error::invalid("max_srqs", config.max_srqs, expected));
        }
        let RnicPort {
            device,
            number,
            limits,
            port,
            gid_rows,
            membership,
            is_rxe,
            max_message,
            capabilities,
            cm_functions,
        } = opened.for_config(config)?;
        device.set_nonblocking()?;
        let channel = CompletionChannel::new(&device)?;
        let waiting = Waiting::new(&device, &channel)?;
        let readiness = Readiness::new().map_err(|source| Error::waiting(&capabilities.interface, source))?;
        let rng = match config.seed {
            Some(seed) => ChaCha20Rng::from_seed(seed),
            None => {
                ChaCha20Rng::try_from_os_rng().map_err(|error| Error::Memory(std::io::Error::other(error)))?
            }
        };
        let generation = first_generation(&rng);
        let names = Counter::all().map(Counter::name);
        let card_counters = PortCounters::open(&capabilities.interface, number, names);
        let mut counted_before = Counters::default();
        metrics::read(&card_counters, |counter, value| counted_before.set(counter, value));
        Ok(Hardware {
            qps: Slab::new(config.max_qps, generation),
            cqs: Slab::new(config.max_cqs, generation),
            srqs: Slab::new(config.max_srqs, generation),
            named: NamedObjects {
                ahs: Slab::new(config.max_ahs, generation),
                mws: Slab::new(config.max_mws, generation),
                mrs: Slab::new(config.max_mrs, generation),
            },
            pds: Slab::new(config.max_pds, generation),
            numbers: HashMap::new(),
            live_cqs: Vec::with_capacity(config.max_cqs as usize),
            events: Events::new(config),
            has_news: false,
            channel,
            device,
            port,
            port_number: number,
            gid_rows,
            membership,
            is_rxe,
            max_message,
            attributes: port::attributes(config, &limits),
            limits,
            capabilities,
            counters: Counters::default(),
            card_counters,
            counted_before,
            next_count: Nanos(0),
            exporter: None,
            program_counters: ProgramCounters::default(),
            cm_functions,
            connections: None,
            connection_limits: ConnectionLimits::new(config, generation),
            rng,
            now: Nanos(0),
            next_look: Nanos(0),
            polls_to_look: 0,
            readiness,
            waiting,
            armed: false,
            is_gone: false,
            pieces: Box::new([[Piece::default(); work::SGES]; work::CHUNK]),
            batch: Some(Box::new(Batch::EMPTY)),
        })
    }

    pub(crate) fn random_psn(&mut self) -> Psn {
        Psn::new(self.rng.next_u32())
    }

    pub(crate) fn now(&self) -> Nanos {
        self.now
    }

    pub(crate) fn poll(&mut self, now: Nanos) -> Result<usize, Error> {
        if self.armed {
            self.end_wait()?;
        }
        super::check_time(now)?;
        self.now = self.now.max(now);
        self.polls_to_look = self.polls_to_look.saturating_sub(1);
        if self.is_gone {
            return Err(self.gone());
        }
        if self.polls_to_look == 0 || self.now >= self.next_look {
            self.look_for_events()?;
        }
        let mut taken = 0;
        for place in 0..self.live_cqs.len() {
            let index = self.live_cqs[place];
            let Some(cq) = self.cqs.at_mut(index) else { continue };
            if cq.polls_to_drain > 0 && !cq.queue.is_armed() {
                cq.polls_to_drain -= 1;
            } else {
                taken += self.drain(index)?;
            }
        }
        if self.exporter.as_ref().is_some_and(|exporter| exporter.is_due(self.now))
            && let Some(mut exporter) = self.exporter.take()
        {
            exporter.serve(self.now, || self.metrics());
            self.exporter = Some(exporter);
        }
        Ok(taken)
    }

    fn pd(&self, pd: Pd) -> Result<&ProtectionDomain, Error> {
        self.pds.get(pd.0).ok_or_else(|| Error::invalid_handle("PD", pd.0))
    }

    fn cq(&mut self, cq: Cq) -> Result<&mut HardwareCq, Error> {
        self.cqs.get_mut(cq.0).ok_or_else(|| Error::invalid_handle("CQ", cq.0))
    }

    #[inline(always)]
    fn qp(&mut self, qp: Qp) -> Result<&mut HardwareQp, Error> {
        self.qps.get_mut(qp.0).ok_or_else(|| Error::invalid_handle("QP", qp.0))
    }

    fn ah(&self, ah: Ah) -> Result<&HardwareAh, Error> {
        self.named.ahs.get(ah.0).ok_or_else(|| Error::invalid_handle("AH", ah.0))
    }
}

/// The interval at which the kernel's counters are read.
const COUNT_INTERVAL: Duration = Duration::from_millis(250);
/// The interval at which asynchronous events are checked, whichever is first.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);
const LOOK_POLLS: u32 = 1024;
