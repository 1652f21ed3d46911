//! Transmission of frames from queues to links.

use super::*;

impl Simulation {
    pub(super) fn enqueue(&mut self, port: u32, class: u8, frame: u32) {
        let len = self.frames.at(frame).len.into();
        self.ports[port as usize].push(self.now, class, frame, len);
        self.kick(port);
    }

    /// A port may have a frame to send.
    pub(super) fn kick(&mut self, port: u32) {
        let state = &mut self.ports[port as usize];
        if state.is_awaited || !state.is_ready() {
            return;
        }
        if state.busy_until <= self.now {
            self.transmit(port);
        } else {
            state.is_awaited = true;
            self.events.plan(state.busy_until, Event::Free { port });
        }
    }

    /// The port is free.
    pub(super) fn transmit(&mut self, port: u32) {
        // A frame that leaves may queue a frame (PFC) at this same port.
        self.ports[port as usize].is_awaited = true;
        let frame = self.take_pfc(port).or_else(|| self.take_frame(port));
        let state = &mut self.ports[port as usize];
        state.is_awaited = false;
        let Some(frame) = frame else { return };
        let bytes = u64::from(self.frames.at(frame).len) + u64::from(self.config.overhead);
        state.counters.wire_bytes += bytes;
        state.busy_until = self.now.after((bytes * BYTE).div_ceil(state.link.rate));
        if state.is_ready() {
            state.is_awaited = true;
            self.events.plan(state.busy_until, Event::Free { port });
        }
        self.taps.show(port, self.now, true, &self.frames, frame);
        self.propagate(port, frame);
    }

    /// The next frame of the queues.
    pub(super) fn take_frame(&mut self, port: u32) -> Option<u32> {
        let (frames, now) = (&self.frames, self.now);
        let (class, frame) = self.ports[port as usize].pop(now, |frame| frames.at(frame).len.into())?;
        match self.ports[port as usize].of.owner {
            Owner::Host(host) => self.left(host),
            Owner::Switch(switch) => {
                if self.switches[switch as usize].config.marking == Marking::Dequeue {
                    self.mark(switch, port, class, frame);
                }
                self.release(switch, frame);
            }
        }
        Some(frame)
    }

    /// A frame of a host has left its queue.
    pub(super) fn left(&mut self, host: u32) {
        let state = &mut self.hosts[host as usize];
        state.waiting -= 1;
        if state.wants_room && state.waiting <= state.config.tx_frames / 2 {
            state.wants_room = false;
            self.wake(host);
        }
    }

    /// Releases a frame's memory in a switch, which may end a pause.
    pub(super) fn release(&mut self, switch: u32, frame: u32) {
        let frame = self.frames.at(frame);
        let Frame { class, ingress, ingress_number: number, .. } = *frame;
        let buffer = &mut self.switches[switch as usize].buffer;
        buffer.release(number, class, frame.len.into());
        if buffer.may_resume(number, class) {
            *buffer.renewal(number, class) = None;
            let port = &mut self.ports[ingress as usize];
            port.to_pause &= !(1 << class);
            port.to_resume |= 1 << class;
            self.kick(ingress);
        }
    }

    /// Puts the frame on the link.
    pub(super) fn propagate(&mut self, port: u32, frame: u32) {
        let state = &mut self.ports[port as usize];
        let departure = state.busy_until;
        if !state.link.impairs {
            let arrival = Event::Arrival { port: state.of.peer, frame };
            return self.events.plan(departure.after(state.link.delay), arrival);
        }
        let link = &self.links[state.of.link as usize].config;
        if state.chance.random.chance(link.loss) {
            return self.discard(frame, Loss::Link);
        }
        if !self.frames.at(frame).is_pfc && state.chance.random.chance(link.duplicate) {
            let copy = self.frames.copy(frame);
            self.counters.duplicated += 1;
            self.propagate_copy(port, copy, departure);
        }
        self.propagate_copy(port, frame, departure);
    }

    pub(super) fn propagate_copy(&mut self, port: u32, frame: u32, departure: Picos) {
        let Simulation { ports, links, frames, events, counters, .. } = self;
        let state = &mut ports[port as usize];
        let link = &links[state.of.link as usize].config;
        let Frame { len, is_pfc, .. } = *frames.at(frame);
        let treatment = link.treatment(&mut state.chance.random, len as usize, false);
        if let Some(bit) = treatment.flip {
            if is_pfc {
                // Its FCS is wrong.
                return self.discard(frame, Loss::Link);
            }
            counters.corrupted += 1;
            frames.flip(frame, bit);
        }
        let arrival = departure.after(picos(link.delay + treatment.jitter));
        let peer = state.of.peer;
        let reorder = (treatment.overtakers, picos(link.reorder_hold));
        let reordered = state.chance.impairment.pass(frame, arrival.0, reorder, |arrival, frame| {
            events.plan(Picos(arrival), Event::Arrival { port: peer, frame });
        });
        if reordered && let Some(deadline) = state.chance.impairment.next_deadline() {
            counters.reordered += 1;
            events.plan(Picos(deadline), Event::Release { port });
        }
    }

    pub(super) fn release_held(&mut self, port: u32) {
        let Simulation { ports, events, now, .. } = self;
        let state = &mut ports[port as usize];
        let peer = state.of.peer;
        state.chance.impairment.release_due(now.0, |arrival, frame| {
            events.plan(Picos(arrival).max(*now), Event::Arrival { port: peer, frame });
        });
        if let Some(deadline) = state.chance.impairment.next_deadline() {
            events.plan(Picos(deadline), Event::Release { port });
        }
    }
}
