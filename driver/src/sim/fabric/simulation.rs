//! The event loop of a fabric.

mod building;
mod failures;
mod flow_control;
mod forwarding;
mod sending;

use std::collections::VecDeque;
use std::net::IpAddr;

use super::buffer::Buffer;
use super::config::{FabricConfig, HostConfig, Marking, SwitchConfig};
use super::counters::FabricCounters;
use super::event::{Event, Events, Picos, picos};
use super::frame::{FiveTuple, Frame, Frames, mix};
use super::pfc;
use super::port::{Line, Owner, Port, PortOf};
use super::routes::Routes;
use super::tap::Taps;
use crate::crc::Crc32;
use crate::loopback::{Destination, FRAME_OVERHEAD};
use crate::prefetch;
use crate::sim::LinkConfig;
use crate::sim::ecn;
use crate::sim::random::Random;
use crate::sim::trace::Trace;

pub(super) struct Simulation {
    seed: u64,
    pub(super) config: FabricConfig,
    pub(super) now: Picos,
    events: Events,
    pub(super) frames: Frames,
    pub(super) buffers: Buffers,
    pub(super) hosts: Vec<Host>,
    pub(super) switches: Vec<Switch>,
    /// The switches' seeds of the path hash.
    seeds: Vec<u64>,
    pub(super) links: Vec<Link>,
    pub(super) ports: Vec<Port>,
    /// `None` after a link or switch was added, or after a change that the switches know of, until recomputed.
    routes: Option<Routes>,
    changes: Vec<Change>,
    /// Hosts that have frames to receive, or room to send.
    woken: Vec<u32>,
    pub(super) counters: FabricCounters,
    trace: Trace,
    crc: Crc32,
    pub(super) taps: Taps,
    /// PFC frames in flight.
    pfc_under_way: u64,
}

pub(super) struct Host {
    pub(super) config: HostConfig,
    pub(super) addresses: Vec<IpAddr>,
    /// Its port, once it has a link.
    pub(super) port: Option<u32>,
    /// Whether its driver is open.
    pub(super) is_open: bool,
    pub(super) received: VecDeque<u32>,
    pub(super) rx_dropped: u64,
    /// Frames that have not started to leave.
    pub(super) waiting: u32,
    /// A frame was refused for lack of room.
    pub(super) wants_room: bool,
    is_woken: bool,
}

pub(super) struct Switch {
    pub(super) config: SwitchConfig,
    pub(super) ports: Vec<u32>,
    pub(super) buffer: Buffer,
    is_up: bool,
}

pub(super) struct Link {
    pub(super) config: LinkConfig,
    pub(super) ends: [u32; 2],
    is_up: bool,
}

/// A change of a part of the fabric.
#[derive(Clone, Copy, Debug)]
pub(super) enum Change {
    Link {
        link: u32,
        is_up: bool,
    },
    Switch {
        switch: u32,
        is_up: bool,
    },
    /// Switches learn of the changes before.
    Reroute,
}

/// The picoseconds of a byte on a link of 1 bit/s.
const BYTE: u64 = 8_000_000_000_000;

impl Simulation {
    pub(super) fn new(seed: u64, config: FabricConfig) -> Simulation {
        Simulation {
            seed,
            config,
            now: Picos::default(),
            events: Events::default(),
            frames: Frames::default(),
            buffers: Buffers::new(config.mtu as usize + FRAME_OVERHEAD),
            hosts: Vec::new(),
            switches: Vec::new(),
            seeds: Vec::new(),
            links: Vec::new(),
            ports: Vec::new(),
            routes: None,
            changes: Vec::new(),
            woken: Vec::new(),
            counters: FabricCounters::default(),
            trace: Trace::default(),
            crc: Crc32::detect(),
            taps: Taps::default(),
            pfc_under_way: 0,
        }
    }

    /// The time of the next event.
    pub(super) fn next_event(&mut self) -> Option<Picos> {
        self.events.next()
    }

    /// Executes all events until `limit`.
    pub(super) fn advance(&mut self, limit: Picos) {
        while self.step(limit) {}
        self.now = self.now.max(limit);
    }

    /// Executes the next event, if it is not after `limit`. Returns whether it did.
    #[inline]
    fn step(&mut self, limit: Picos) -> bool {
        let Some((time, event)) = self.events.pop(limit) else { return false };
        self.now = time;
        self.prefetch();
        self.happen(event);
        true
    }

    /// Prefetches the data of the coming events, step by step: with many hosts none of it is in the cache.
    #[inline]
    fn prefetch(&self) {
        match self.events.peek(20) {
            Some(Event::Arrival { port, frame }) => {
                prefetch(&self.ports[port as usize]);
                prefetch(self.frames.at(frame));
            }
            Some(Event::Free { port }) => prefetch(&self.ports[port as usize]),
            _ => {}
        }
        match self.events.peek(15) {
            Some(Event::Arrival { port, frame }) => {
                if let PortOf { owner: Owner::Switch(switch), number, .. } = self.ports[port as usize].of {
                    let Frame { target, dscp, .. } = *self.frames.at(frame);
                    if let Some(routes) = &self.routes {
                        routes.prefetch(switch, target);
                    }
                    let Switch { config, buffer, .. } = &self.switches[switch as usize];
                    buffer.prefetch(number, config.classes.class(dscp));
                }
            }
            Some(Event::Free { port }) => self.ports[port as usize].prefetch(None),
            _ => {}
        }
        match self.events.peek(10) {
            Some(Event::Arrival { port, frame }) => {
                if let Some((_, way)) = self.way_ahead(port, frame) {
                    prefetch(&self.ports[way as usize]);
                } else {
                    self.frames.prefetch(frame);
                }
            }
            Some(Event::Free { port }) => {
                if let Some(frame) = self.ports[port as usize].front() {
                    prefetch(self.frames.at(frame));
                }
            }
            _ => {}
        }
        match self.events.peek(5) {
            Some(Event::Arrival { port, frame }) => {
                if let Some((switch, way)) = self.way_ahead(port, frame) {
                    let class =
                        self.switches[switch as usize].config.classes.class(self.frames.at(frame).dscp);
                    self.ports[way as usize].prefetch(Some(class));
                }
            }
            Some(Event::Free { port }) => {
                if let Owner::Switch(switch) = self.ports[port as usize].of.owner
                    && let Some(frame) = self.ports[port as usize].front()
                {
                    let Frame { ingress_number, class, .. } = *self.frames.at(frame);
                    self.switches[switch as usize].buffer.prefetch(ingress_number, class);
                }
            }
            _ => {}
        }
    }

    /// For a frame that will arrive at a switch's port: that switch, and the egress port.
    fn way_ahead(&self, port: u32, frame: u32) -> Option<(u32, u32)> {
        let Owner::Switch(switch) = self.ports[port as usize].of.owner else { return None };
        Some((switch, self.choose(switch, frame)?))
    }

    /// Executes events until `limit`, or until the end of the first nanosecond in which a host is woken.
    pub(super) fn advance_until_woken(&mut self, limit: Picos) {
        let mut limit = limit;
        while self.step(limit) {
            if !self.woken.is_empty() {
                limit = limit.min(Picos::at(self.now.nanos()));
            }
        }
        self.now = self.now.max(limit);
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Arrival { port, frame } => self.arrive(port, frame),
            Event::Free { port } => {
                self.ports[port as usize].is_awaited = false;
                self.transmit(port);
            }
            Event::Pause { port, classes, quanta } => self.pause(port, classes, quanta),
            Event::PauseEnd { port, class } => {
                if self.ports[port as usize].expire(self.now, class) {
                    self.kick(port);
                }
            }
            Event::Renew { port, class } => self.renew(port, class),
            Event::Watchdog { port, class } => self.watch(port, class),
            Event::Release { port } => self.release_held(port),
            Event::Change { number } => self.change(self.changes[number as usize]),
        }
    }

    pub(super) fn plan_change(&mut self, time: Picos, change: Change) {
        let number = self.changes.len() as u32;
        self.changes.push(change);
        self.events.plan(time.max(self.now), Event::Change { number });
    }

    fn discard(&mut self, frame: u32, loss: Loss) {
        if self.frames.at(frame).is_pfc {
            return self.give_back_pfc(frame);
        }
        let counters = &mut self.counters;
        *match loss {
            Loss::Link => &mut counters.lost,
            Loss::Buffer => &mut counters.buffer_dropped,
            Loss::Unroutable => &mut counters.unroutable,
            Loss::Storm => &mut counters.storm_dropped,
            Loss::Host => &mut counters.host_dropped,
        } += 1;
        self.trace.words(&[self.now.0, loss as u64]);
        self.frames.give_back(frame);
    }

    fn give_back_pfc(&mut self, frame: u32) {
        self.pfc_under_way -= 1;
        self.frames.at_mut(frame).is_pfc = false;
        self.frames.give_back(frame);
    }

    pub(super) fn counters(&self) -> FabricCounters {
        let received: usize = self.hosts.iter().map(|host| host.received.len()).sum();
        let under_way = self.frames.under_way() as u64 - self.pfc_under_way - received as u64;
        FabricCounters { under_way, ..self.counters }
    }

    pub(super) fn trace_hash(&self) -> u64 {
        self.trace.value()
    }

    pub(super) fn events(&self) -> u64 {
        self.events.planned()
    }
}

/// Why a frame was lost.
#[derive(Clone, Copy)]
enum Loss {
    Link = 1,
    Buffer,
    Unroutable,
    Storm,
    Host,
}

/// Buffers in which hosts read and write frames: few, so that they stay in the cache.
pub(super) struct Buffers {
    spare: Vec<Box<[u8]>>,
    size: usize,
}

impl Buffers {
    fn new(size: usize) -> Buffers {
        Buffers { spare: Vec::new(), size }
    }

    /// A buffer for a frame of any length.
    pub(super) fn take(&mut self) -> Box<[u8]> {
        self.spare.pop().unwrap_or_else(|| vec![0; self.size].into())
    }

    pub(super) fn give_back(&mut self, buffer: Box<[u8]>) {
        self.spare.push(buffer);
    }
}
