use ferroce_driver::Nanos;
use ferroce_wire::PathMtu;
use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::SeedableRng;

use crate::engine::ah::AddressHandle;
use crate::engine::congestion::cnp::NotificationPoint;
use crate::engine::cq::{CompletionQueue, Pushed};
use crate::engine::crc::Crc;
use crate::engine::destination::Destinations;
use crate::engine::event::Events;
use crate::engine::mr::MemoryRegions;
use crate::engine::reorder::ReorderPool;
use crate::engine::rq::ReceiveQueue;
use crate::engine::scheduler::Scheduler;
use crate::engine::slab::{Slab, first_generation};
use crate::engine::srq::SharedReceiveQueue;
use crate::engine::staging::StagingPool;
use crate::telemetry::counters::{Counter, Counters};
use crate::verbs::{Config, Cq, DeviceAttributes, Event, Port, Srq, WorkCompletion};

/// State that queue pairs share, and access while they process a packet.
pub(crate) struct Shared {
    /// The time of the current poll.
    pub(crate) now: Nanos,
    /// The number of the current poll.
    pub(crate) poll: u64,
    /// A completion or an event was added since the last query.
    pub(crate) has_news: bool,
    pub(crate) mrs: MemoryRegions,
    pub(crate) cqs: Slab<CompletionQueue>,
    pub(crate) srqs: Slab<SharedReceiveQueue>,
    pub(crate) ahs: Slab<AddressHandle>,
    pub(crate) events: Events,
    pub(crate) counters: Counters,
    pub(crate) scheduler: Scheduler,
    /// A first packet has arrived at a queue pair in RTR.
    pub(crate) comm_est: bool,
    /// No ACK is delayed, because there may be no more polls.
    pub(crate) hurry: bool,
    /// The window of packets in flight to one destination.
    pub(crate) window: u32,
    pub(crate) destinations: Destinations,
    pub(crate) reorder: ReorderPool,
    pub(crate) staging: StagingPool,
    /// For marked packets; boxed, because most contexts have none.
    pub(crate) notification: Option<Box<NotificationPoint>>,
    /// Requests for memory that they may not access are dropped.
    pub(crate) drop_access_errors: bool,
    pub(crate) crc: Crc,
    /// Draws queue pair numbers and keys.
    pub(crate) rng: ChaCha20Rng,
    /// The first generation of each slab of this context.
    pub(crate) generation: u32,
    pub(crate) device: DeviceAttributes,
}

impl Shared {
    pub(crate) fn new(config: &Config, port: &Port) -> Shared {
        let window = config.window.min(admitted(port));
        let rng = config.seed.map_or_else(ChaCha20Rng::from_os_rng, ChaCha20Rng::from_seed);
        let generation = first_generation(&rng);
        Shared {
            now: Nanos::ZERO,
            poll: 0,
            has_news: false,
            mrs: MemoryRegions::new(config, generation),
            cqs: Slab::new(config.max_cqs, generation),
            srqs: Slab::new(config.max_srqs, generation),
            ahs: Slab::new(config.max_ahs, generation),
            events: Events::new(config),
            counters: Counters::default(),
            scheduler: Scheduler::new(config.max_qps),
            comm_est: false,
            hurry: false,
            window,
            destinations: Destinations::new(config.max_qps, window),
            reorder: ReorderPool::new(config.reorder_packets),
            staging: StagingPool::new(config),
            notification: config
                .notification
                .map(|settings| Box::new(NotificationPoint::new(settings, config.max_qps))),
            drop_access_errors: config.drop_access_errors,
            crc: Crc::detect(),
            rng,
            generation,
            device: DeviceAttributes::of(config),
        }
    }

    pub(crate) fn count(&mut self, counter: Counter) {
        self.counters.count(counter);
    }

    pub(crate) fn raise(&mut self, event: Event) {
        self.count(Counter::of_event(&event));
        self.has_news = true;
        self.events.raise(event);
    }

    /// Moves the oldest receive of `srq` to `rq`. Returns whether there was one.
    pub(crate) fn take_shared_receive(&mut self, srq: Srq, rq: &mut ReceiveQueue) -> bool {
        let Some(shared) = self.srqs.get_mut(srq.0) else { return false };
        let taken = rq.take(&mut shared.queue);
        if taken && shared.trip() {
            self.raise(Event::SrqLimitReached(srq));
        }
        taken
    }

    /// Adds a completion to `cq`. Returns whether there was room; a full queue reports it once and accepts no more
    /// completions.
    #[must_use]
    #[inline(always)]
    pub(crate) fn complete(&mut self, cq: Cq, wc: WorkCompletion, solicited: bool) -> bool {
        let Some(queue) = self.cqs.get_mut(cq.0) else { return false };
        self.has_news = true;
        match queue.push(wc, solicited) {
            Pushed::Quietly => return true,
            Pushed::Notify => {
                queue.notify(cq, &mut self.events, &mut self.counters);
                return true;
            }
            Pushed::Overflow => self.raise(Event::CqErr(cq)),
            Pushed::Lost => {}
        }
        self.count(Counter::CqOverflow);
        false
    }
}

/// The number of packets that fit in a socket's buffer. The relevant one is the peer's, whose size is unknown; it is
/// assumed to equal the local one.
fn admitted(port: &Port) -> u32 {
    /// The kernel's overhead per packet in addition to twice its bytes.
    const OVERHEAD: usize = 768;
    let Some(terms) = port.socket else { return u32::MAX };
    let payload = port.path_mtu(false).map_or(0, PathMtu::bytes) as usize;
    u32::try_from(terms.receive_buffer / (2 * payload + OVERHEAD)).map_or(u32::MAX, |packets| packets.max(1))
}

#[cfg(test)]
mod tests {
    use ferroce_driver::SocketTerms;
    use ferroce_wire::MacAddr;

    use super::*;

    #[test]
    fn a_small_buffer_admits_few_packets() {
        let admits = |mtu, receive_buffer| {
            let socket = Some(SocketTerms::new(4791, receive_buffer));
            admitted(&Port {
                mac: MacAddr::default(),
                interface: String::new(),
                mtu,
                gids: Vec::new(),
                pkeys: crate::PkeyTable::new(),
                socket,
                qpns: (0, 1),
                comm_ids: (0, 1),
            })
        };
        // Twice net.core.rmem_default, and twice 4 MiB.
        assert_eq!((admits(1500, 425_984), admits(9000, 425_984)), (151, 47));
        assert!(admits(9000, 8 << 20) > crate::DEFAULT_WINDOW);
        assert_eq!(admits(9000, 100), 1);
    }
}
