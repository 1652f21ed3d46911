//! Processing of a frame at a host or a switch.

use super::*;

impl Simulation {
    /// Sends a frame of a host.
    pub(in super::super) fn send(&mut self, host: u32, bytes: &[u8]) {
        let state = &self.hosts[host as usize];
        let (classes, port) = (state.config.classes, state.port);
        let now = self.now;
        let is_pfc = pfc::read(bytes).is_some();
        *if is_pfc { &mut self.pfc_under_way } else { &mut self.counters.sent } += 1;
        let tuple = FiveTuple::of(bytes);
        let frame = self.frames.put(bytes);
        let content = self.frames.at_mut(frame);
        content.is_pfc = is_pfc;
        content.dscp = tuple.map_or(0, |tuple| tuple.dscp);
        content.flow = tuple.map_or(0, |tuple| tuple.hash());
        let class = classes.class(content.dscp);
        content.class = class;
        let crc = self.crc.update(!0, bytes);
        self.trace.words(&[now.0, host.into(), content.len.into(), crc.into()]);
        content.to = match Destination::of(bytes, self.hosts.len()) {
            Destination::Port(to) => to as u32,
            Destination::Flood if is_pfc => host,
            Destination::Flood => return self.discard(frame, Loss::Unroutable),
        };
        // The last port on its path, and the owner of that port.
        let Some(last) = self.hosts[content.to as usize].port else {
            return self.discard(frame, Loss::Unroutable);
        };
        content.last = self.ports[last as usize].of.peer;
        content.target = match self.ports[content.last as usize].of.owner {
            Owner::Switch(switch) => switch,
            Owner::Host(_) => u32::MAX,
        };
        let Some(port) = port.filter(|port| self.carries(*port)) else {
            return self.discard(frame, Loss::Unroutable);
        };
        self.hosts[host as usize].waiting += 1;
        self.enqueue(port, class, frame);
    }

    /// Opens or closes the host's driver. Frames not yet received are lost.
    pub(in super::super) fn set_open(&mut self, host: u32, is_open: bool) {
        self.hosts[host as usize].is_open = is_open;
        if !is_open {
            for frame in std::mem::take(&mut self.hosts[host as usize].received) {
                self.frames.give_back(frame);
            }
        }
    }

    /// The hosts that were woken so far.
    pub(in super::super) fn take_woken(&mut self, mut take: impl FnMut(u32)) {
        for host in self.woken.drain(..) {
            self.hosts[host as usize].is_woken = false;
            take(host);
        }
    }

    /// Marks the host as having work.
    pub(in super::super) fn wake(&mut self, host: u32) {
        let state = &mut self.hosts[host as usize];
        if !state.is_woken && state.is_open {
            state.is_woken = true;
            self.woken.push(host);
        }
    }

    pub(super) fn deliver(&mut self, host: u32, frame: u32) {
        let state = &mut self.hosts[host as usize];
        if !state.is_open || self.frames.at(frame).to != host {
            return self.discard(frame, Loss::Host);
        }
        if state.received.len() >= state.config.rx_frames as usize {
            state.rx_dropped += 1;
            return self.discard(frame, Loss::Host);
        }
        self.frames.prefetch(frame);
        state.received.push_back(frame);
        self.counters.delivered += 1;
        self.wake(host);
    }

    pub(super) fn arrive(&mut self, port: u32, frame: u32) {
        let PortOf { owner, identity, .. } = self.ports[port as usize].of;
        if !self.carries(port) {
            return self.discard(frame, Loss::Link);
        }
        let content = *self.frames.at(frame);
        self.taps.show(port, self.now, false, &self.frames, frame);
        self.trace.words(&[self.now.0, identity, content.flow]);
        if content.is_pfc {
            let quanta = pfc::read(self.frames.headers(frame));
            self.give_back_pfc(frame);
            return self.receive_pfc(port, quanta.unwrap_or_default());
        }
        self.ports[port as usize].counters.received += 1;
        match owner {
            Owner::Host(host) => self.deliver(host, frame),
            Owner::Switch(switch) => self.forward(switch, port, frame),
        }
    }

    pub(super) fn forward(&mut self, switch: u32, ingress: u32, frame: u32) {
        let Some(egress) = self.way(switch, frame) else { return self.discard(frame, Loss::Unroutable) };
        let number = self.ports[ingress as usize].of.number;
        let content = self.frames.at_mut(frame);
        let len = u64::from(content.len);
        let state = &mut self.switches[switch as usize];
        let class = state.config.classes.class(content.dscp);
        (content.class, content.ingress, content.ingress_number) = (class, ingress, number);
        let out = &mut self.ports[egress as usize];
        if out.stormy & 1 << class != 0 {
            out.count(class).dropped += 1;
            return self.discard(frame, Loss::Storm);
        }
        let waiting = out.bytes(class);
        if !state.buffer.admit(number, class, len, waiting) {
            self.ports[egress as usize].count(class).dropped += 1;
            self.discard(frame, Loss::Buffer);
        } else {
            if state.config.marking == Marking::Enqueue {
                self.mark(switch, egress, class, frame);
            }
            self.enqueue(egress, class, frame);
        }
        // A dropped frame exceeds the threshold too.
        if self.switches[switch as usize].buffer.must_pause(number, class) {
            self.ports[ingress as usize].counters.pauses_sent += 1;
            self.send_pause(ingress, class);
        }
    }

    /// The egress port of a frame at a switch.
    pub(super) fn way(&mut self, switch: u32, frame: u32) -> Option<u32> {
        if self.routes.is_none() {
            self.routes = Some(Routes::new(&self.neighbours()));
        }
        self.choose(switch, frame).filter(|way| self.carries(*way))
    }

    /// The same, whether the port is up or not, if the paths are known.
    pub(super) fn choose(&self, switch: u32, frame: u32) -> Option<u32> {
        let Frame { target, last, flow, .. } = *self.frames.at(frame);
        if target == switch {
            return Some(last);
        }
        let ways = self.routes.as_ref()?.ports(switch, target);
        let hash = mix(flow ^ self.seeds[switch as usize]);
        // Evenly distributed from 0 to the number of paths - 1.
        let way = (u128::from(hash) * ways.len() as u128) >> 64;
        ways.get(way as usize).copied()
    }

    /// For each switch, its neighbour switches, with its ports to them.
    pub(super) fn neighbours(&self) -> Vec<Vec<(u32, u32)>> {
        let neighbour = |port: &u32| match self.ports[self.ports[*port as usize].of.peer as usize].of.owner {
            Owner::Switch(switch) if self.carries(*port) => Some((switch, *port)),
            _ => None,
        };
        self.switches.iter().map(|switch| switch.ports.iter().filter_map(neighbour).collect()).collect()
    }

    pub(super) fn mark(&mut self, switch: u32, egress: u32, class: u8, frame: u32) {
        let Some(ecn) = self.switches[switch as usize].config.ecn else { return };
        let port = &mut self.ports[egress as usize];
        if port.chance.random.chance(ecn.probability(port.bytes(class))) {
            port.count(class).marked += u64::from(ecn::mark(self.frames.headers_mut(frame)));
        }
    }
}
