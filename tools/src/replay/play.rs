//! Runs the engine in place of one recorded end, over a loopback port in virtual time: it gets the work requests of the
//! end's application and the packets of the other end, at the recorded times. The packets that the engine sends are
//! kept.
//! The recorded packets of the other end answer the recorded end, not the engine. So the ACK timer of the engine is
//! longer than the recorded one, and exhausted retries of the engine are not counted against it.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;

use ferroce::driver::loopback::{Loopback, Switch, SwitchConfig};
use ferroce::{Config, Context, Cq, Gid, MacAddr, Nanos, PacketDriver, Qp, Qpn};

use super::conversation::{Conversation, Event};
use super::judge::Strict;
use super::lane::Lane;
use super::memory::{Area, Exposed, Found};
use super::packet::Seen;
use super::place::Place;
use super::progress::Progress;
use super::recorded::receive_times;
use super::rule::{Finding, Rule};
use super::translation::translated;
use crate::failure::Failure;

/// The engine's packets in place of an end.
#[derive(Debug)]
pub(super) struct Played {
    /// The end that the engine replaced.
    pub(super) place: Place,
    /// The packets that reached the engine, and those that it sent, in order.
    pub(super) events: Vec<Event>,
    pub(super) findings: Vec<Finding>,
    /// Compared messages and bytes.
    pub(super) compared: (u64, u64),
    /// The number of messages that the application posted.
    pub(super) posted: u64,
    /// The first PSN of a message that the engine gave up or could not send.
    pub(super) given_up: Option<i64>,
    /// The index in `events` from which on its queue pair was in the error state, due to one of its own work requests.
    pub(super) dead_from: Option<usize>,
    /// The first PSN of each end.
    pub(super) starts: [i64; 2],
}

impl Played {
    /// The facts for the judge.
    pub(super) fn strict(&self) -> Strict {
        Strict { starts: self.starts, dead_from: self.dead_from }
    }
}

/// The counters of an engine, by name.
pub(super) type Counts = Vec<(&'static str, u64)>;

/// Runs one engine in all `places`.
pub(super) fn play(
    conversations: &[Conversation],
    places: &[Place],
    areas: &[Area],
    timeout: Option<u8>,
    progress: &mut Progress,
) -> Result<PlayOutcome, Failure> {
    if places.is_empty() {
        return Ok(PlayOutcome::default());
    }
    let mut stage = Stage::new(conversations, places, areas, timeout)?;
    let mut steps = stage.steps();
    steps.sort_by_key(|step| (step.at, step.what.rank(), step.order));
    let count = steps.len();
    for (number, step) in steps.into_iter().enumerate() {
        progress.step(|| format!("the engine has taken {number} of {count} steps"))?;
        stage.run_until(step.at)?;
        if stage.lanes[step.lane].is_over() {
            continue;
        }
        stage.carry_out(&step)?;
        stage.stirred.insert(step.lane);
        stage.settle(step.frame)?;
    }
    stage.finish()?;
    let counts = stage.context.counters().iter().filter(|(_, value)| *value > 0).collect();
    let (over, whole): (Vec<Lane<'_>>, Vec<Lane<'_>>) = stage.lanes.into_iter().partition(Lane::is_over);
    let broken_off = over.into_iter().map(|lane| (lane.played.place, lane.why_over(), lane.played.findings));
    let broken_off = broken_off.collect();
    Ok(PlayOutcome { played: whole.into_iter().map(Lane::end).collect(), broken_off, counts })
}

/// The results of a play.
#[derive(Default)]
pub(super) struct PlayOutcome {
    pub(super) played: Vec<Played>,
    /// Ends that were not played to the end, the reason, and the findings before.
    pub(super) broken_off: Vec<(Place, String, Vec<Finding>)>,
    pub(super) counts: Counts,
}

/// Largest IP packet between the engine and the recorded side. The cable's queue holds thousands of these.
const MTU: u32 = 9216;
/// An upper bound of a packet's headers.
const HEADERS: u32 = 256;
/// The most work requests of a queue; further ones wait.
pub(super) const DEPTH: u32 = 4096;
/// The seed of the engine's random numbers: each replay is the same.
const SEED: [u8; 32] = [0x5e; 32];

struct Stage<'a> {
    context: Context,
    /// The recorded side's end of the cable.
    far: Loopback,
    near_mac: [u8; 6],
    far_mac: [u8; 6],
    cq: Cq,
    lanes: Vec<Lane<'a>>,
    /// The lane of each queue pair of the engine, and the lanes that send to each queue pair of the recorded side.
    by_qp: HashMap<Qp, usize>,
    by_peer: HashMap<(Gid, Qpn), Vec<usize>>,
    /// The lanes that may have something to post or to compare. A capture of thousands of queue pairs has as many
    /// lanes, but a packet affects one or two.
    stirred: BTreeSet<usize>,
    exposed: Exposed,
    now: Nanos,
    /// The newest frame that reached the engine.
    frame: u64,
}

struct Step {
    at: Nanos,
    lane: usize,
    what: What,
    order: usize,
    frame: u64,
}

#[derive(Clone, Copy)]
enum What {
    /// Posts the receive WR for the other end's message of that number.
    Receive(usize),
    /// Posts the own message of that number.
    Send(usize),
    /// Sends the other end's packet to the engine.
    Packet(usize),
}

impl What {
    /// The order of steps at the same time.
    fn rank(self) -> u8 {
        match self {
            What::Receive(_) => 0,
            What::Send(_) => 1,
            What::Packet(_) => 2,
        }
    }
}

impl<'a> Stage<'a> {
    fn new(
        conversations: &'a [Conversation],
        places: &[Place],
        areas: &[Area],
        timeout: Option<u8>,
    ) -> Result<Stage<'a>, Failure> {
        let ends = |other: bool| {
            let mut addresses: Vec<IpAddr> = Vec::new();
            for Place { conversation, end } in places {
                let ends = &conversations[*conversation].ends;
                let address = ends[if other { 1 - end } else { *end }].gid.to_ip();
                if !addresses.contains(&address) {
                    addresses.push(address);
                }
            }
            addresses
        };
        let mtu = places.iter().map(|place| longest(&conversations[place.conversation])).max();
        let switch = Switch::new(SwitchConfig::default().mtu(mtu.unwrap_or(MTU).min(MTU)).depth(4096))?;
        let (near, far) = (switch.port(&ends(false)), switch.port(&ends(true)));
        let (near_mac, far_mac) = (near.capabilities().mac, far.capabilities().mac);
        // Each end has one region of its own.
        let regions = places.len() + areas.len() + 1;
        let is_v1 = |place: &Place| conversations[place.conversation].is_roce_v1(place.end);
        let config = Config::default()
            .seed(SEED)
            .roce_v1(places.iter().any(is_v1))
            .max_qps(places.len() as u32 + 1)
            .max_ahs(places.len() as u32 + 1)
            .max_mrs(u32::try_from(regions).unwrap_or(u32::MAX).clamp(16, 1 << 16))
            .window(1 << 20);
        let mut context = Context::open(Box::new(near), &config)?;
        let pd = context.alloc_pd()?;
        let cq = context.create_cq(2 * DEPTH * (places.len() as u32).clamp(1, 512))?;
        let exposed = Exposed::new(&mut context, pd, areas)?;
        let mut stage = Stage {
            context,
            far,
            near_mac,
            far_mac,
            cq,
            lanes: Vec::new(),
            by_qp: HashMap::new(),
            by_peer: HashMap::new(),
            stirred: BTreeSet::new(),
            exposed,
            now: Nanos::ZERO,
            frame: 0,
        };
        for place in places {
            let of = &conversations[place.conversation];
            let number = (stage.lanes.len() as u32, MacAddr(far_mac));
            let lane = Lane::new(&mut stage.context, (pd, cq), of, *place, number, timeout)?;
            stage.by_qp.insert(lane.qp, stage.lanes.len());
            stage.by_peer.entry(lane.sends_to()).or_default().push(stage.lanes.len());
            stage.lanes.push(lane);
        }
        Ok(stage)
    }

    /// All steps from outside the engine.
    fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        for (lane, of) in self.lanes.iter().enumerate() {
            let mut step = |at, what, order, frame| steps.push(Step { at, lane, what, order, frame });
            for (number, message) in of.own.list.iter().enumerate() {
                step(message.at, What::Send(number), number, message.frame);
            }
            for (number, at) in receive_times(of.of, of.end, &of.theirs) {
                step(at, What::Receive(number), number, of.theirs.list[number].frame);
            }
            for (index, event) in of.of.events.iter().enumerate() {
                if event.from != of.end && of.is_understood(event) {
                    step(event.packet.at, What::Packet(index), index, event.packet.frame);
                }
            }
        }
        steps
    }

    /// Advances virtual time.
    fn run_until(&mut self, at: Nanos) -> Result<(), Failure> {
        while let Some(timer) = self.context.next_timeout().filter(|timer| *timer <= at) {
            self.now = self.now.max(timer);
            self.settle(self.frame)?;
        }
        self.now = self.now.max(at);
        Ok(())
    }

    /// Lets pending timers run after the last step.
    fn finish(&mut self) -> Result<(), Failure> {
        for _ in 0..LAST_TIMERS {
            let waits = self.lanes.iter().any(Lane::has_unsent);
            let Some(timer) = self.context.next_timeout().filter(|_| waits) else { break };
            self.run_until(timer)?;
        }
        Ok(())
    }

    fn carry_out(&mut self, step: &Step) -> Result<(), Failure> {
        let lane = &mut self.lanes[step.lane];
        match step.what {
            What::Receive(number) => lane.receive(&mut self.context, number)?,
            What::Send(number) => lane.send(&mut self.context, number)?,
            What::Packet(index) => {
                let event = &lane.of.events[index];
                self.exposed.prepare(&mut self.context, lane, index)?;
                let macs = [self.near_mac, self.far_mac];
                let is_v1 = lane.of.is_roce_v1(lane.end);
                let frame = translated(&event.packet, lane.qpn, &self.exposed, macs, is_v1);
                let mut frame = Some(frame);
                self.far.tx_burst(self.now, &mut |room: &mut [u8]| {
                    let frame = frame.take()?;
                    room.get_mut(..frame.len())?.copy_from_slice(&frame);
                    Some(frame.len())
                })?;
                lane.note_arrival(event);
                self.frame = self.frame.max(event.packet.frame);
            }
        }
        Ok(())
    }

    /// Polls until the engine has no work left at this time.
    fn settle(&mut self, frame: u64) -> Result<(), Failure> {
        loop {
            let mut moved = self.context.poll(self.now)?;
            let Stage { lanes, by_peer, stirred, now, .. } = self;
            let now = *now;
            let mut take = |bytes: &[u8]| {
                let is_v1 = bytes.get(12..14) == Some(&[0x89, 0x15]);
                let packet = bytes.get(ETHERNET_LEN..).map(|packet| Seen::sent(frame, now, packet, is_v1));
                if let Some(Ok(packet)) = packet
                    && let Some(peers) = by_peer.get(&(packet.network.destination, packet.bth.dest_qpn()))
                    && let Some(index) = peers.iter().rev().copied().find(|index| lanes[*index].sent(&packet))
                    && !lanes[index].is_over()
                {
                    lanes[index].keep(packet);
                    stirred.insert(index);
                }
            };
            // Everything is received: packets beyond the cable's queue would be lost.
            loop {
                match self.far.rx_burst(now, &mut take)? {
                    0 => break,
                    received => moved += received,
                }
            }
            while let Some(wc) = self.context.poll_cq(self.cq)? {
                if let Some(index) = self.by_qp.get(&wc.qp) {
                    self.lanes[*index].completed(&mut self.context, &wc)?;
                    self.stirred.insert(*index);
                }
            }
            for index in &self.stirred {
                let lane = &mut self.lanes[*index];
                if lane.is_over() {
                    // Its further packets are not needed.
                    if self.by_qp.remove(&lane.qp).is_some() {
                        self.context.destroy_qp(lane.qp)?;
                    }
                    continue;
                }
                lane.post(&mut self.context)?;
                for finding in self.exposed.check(&self.context, lane.newly_answered())? {
                    match finding {
                        Found::Right(bytes) => {
                            lane.played.compared.0 += 1;
                            lane.played.compared.1 += bytes;
                        }
                        Found::Wrong(frame, text) => lane.fault(Rule::Data, frame, text),
                    }
                }
            }
            while self.context.next_event().is_some() {}
            if moved == 0 && self.context.next_timeout().is_none_or(|timer| timer > self.now) {
                self.stirred.clear();
                return Ok(());
            }
        }
    }
}

/// The longest packet of a conversation, recorded or sent by the engine.
fn longest(of: &Conversation) -> u32 {
    let recorded = of.events.iter().map(|event| event.packet.payload_len()).max().unwrap_or(0);
    of.path_mtu.bytes().max(recorded as u32) + HEADERS
}

const ETHERNET_LEN: usize = 14;
/// The most timers that run after the end of a capture.
const LAST_TIMERS: usize = 64;
