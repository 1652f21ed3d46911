//! PFC: sending, renewing, obeying and ending pauses, and detecting storms.

use super::*;

impl Simulation {
    /// Pauses a class at the other end of a port.
    pub(super) fn send_pause(&mut self, port: u32, class: u8) {
        let state = &mut self.ports[port as usize];
        state.to_resume &= !(1 << class);
        state.to_pause |= 1 << class;
        let Owner::Switch(switch) = state.of.owner else { return };
        let Switch { config, buffer, .. } = &mut self.switches[switch as usize];
        let quanta = config.pfc.map_or(u16::MAX, |pfc| pfc.quanta);
        let renewal = self.now.after(quanta_time(quanta / 2, state.link.rate));
        *buffer.renewal(state.of.number, class) = Some(renewal);
        self.events.plan(renewal, Event::Renew { port, class });
        self.kick(port);
    }

    pub(super) fn renew(&mut self, port: u32, class: u8) {
        let state = &self.ports[port as usize];
        let Owner::Switch(switch) = state.of.owner else { return };
        let buffer = &mut self.switches[switch as usize].buffer;
        if *buffer.renewal(state.of.number, class) == Some(self.now) {
            self.send_pause(port, class);
        }
    }

    /// The next PFC frame of a port.
    pub(super) fn take_pfc(&mut self, port: u32) -> Option<u32> {
        let state = &mut self.ports[port as usize];
        let (pause, resume) = (std::mem::take(&mut state.to_pause), std::mem::take(&mut state.to_resume));
        if pause | resume == 0 {
            return None;
        }
        let Owner::Switch(switch) = state.of.owner else { return None };
        let quanta = self.switches[switch as usize].config.pfc.map_or(0, |pfc| pfc.quanta);
        state.counters.pfc_sent += 1;
        self.pfc_under_way += 1;
        let frame = self.frames.put(&pfc::frame(port, pause, resume, quanta));
        self.frames.at_mut(frame).is_pfc = true;
        Some(frame)
    }

    pub(super) fn receive_pfc(&mut self, port: u32, quanta: [Option<u16>; 8]) {
        let state = &mut self.ports[port as usize];
        state.counters.pfc_received += 1;
        let (obeys, reaction) = match state.of.owner {
            Owner::Host(host) => {
                let config = self.hosts[host as usize].config;
                (config.obeys_pfc, config.reaction)
            }
            Owner::Switch(switch) => {
                let config = self.switches[switch as usize].config;
                (config.pfc.is_some(), config.reaction)
            }
        };
        if !obeys {
            return;
        }
        let mut left: u8 =
            (0..8).filter(|class| quanta[*class].is_some()).fold(0, |all, class| all | 1 << class);
        while left != 0 {
            let first = quanta[left.trailing_zeros() as usize];
            let same = (0..8).filter(|class| left & 1 << class != 0 && quanta[*class] == first);
            let classes = same.fold(0, |all, class| all | 1 << class);
            left &= !classes;
            let pause = Event::Pause { port, classes, quanta: first.unwrap_or(0) };
            self.events.plan(self.now.after(picos(reaction)), pause);
        }
    }

    pub(super) fn pause(&mut self, port: u32, classes: u8, quanta: u16) {
        let watchdog = match self.ports[port as usize].of.owner {
            Owner::Host(_) => None,
            Owner::Switch(switch) => self.switches[switch as usize].config.pfc.and_then(|pfc| pfc.watchdog),
        };
        let rate = self.ports[port as usize].link.rate;
        let until = self.now.after(quanta_time(quanta, rate));
        for class in (0..8).filter(|class| classes & 1 << class != 0) {
            let state = &mut self.ports[port as usize];
            if quanta == 0 {
                state.resume(self.now, class);
                continue;
            }
            let begins = state.pause(self.now, class, until);
            self.events.plan(until, Event::PauseEnd { port, class });
            if begins && let Some(watchdog) = watchdog {
                self.events.plan(self.now.after(picos(watchdog)), Event::Watchdog { port, class });
            }
        }
        self.kick(port);
    }

    /// The watchdog has expired: since a class was paused, or since it was found paused for too long.
    pub(super) fn watch(&mut self, port: u32, class: u8) {
        let state = &mut self.ports[port as usize];
        let Owner::Switch(switch) = state.of.owner else { return };
        let Some(watchdog) = self.switches[switch as usize].config.pfc.and_then(|pfc| pfc.watchdog) else {
            return;
        };
        let bit = 1 << class;
        let paused_for = state.paused_for(self.now, class);
        let is_stormy = state.stormy & bit != 0;
        if is_stormy && paused_for.is_none() {
            state.stormy &= !bit;
        }
        let goes_on = paused_for.is_some_and(|time| is_stormy || time >= picos(watchdog));
        if !goes_on {
            return;
        }
        if !is_stormy && state.has(class) {
            state.stormy |= bit;
            state.count(class).storms += 1;
            self.drop_queue(port, class, Loss::Storm);
        }
        self.events.plan(self.now.after(picos(watchdog)), Event::Watchdog { port, class });
    }
}

fn quanta_time(quanta: u16, rate: u64) -> u64 {
    u64::from(quanta) * (512 * (BYTE / 8)).div_ceil(rate)
}
