//! Failure and recovery of links and switches.

use super::*;

impl Simulation {
    /// Whether the link of a port transfers frames.
    #[inline]
    pub(super) fn carries(&self, port: u32) -> bool {
        self.ports[port as usize].link.carries
    }

    /// Whether the link of a port and both of its nodes are up.
    pub(super) fn is_up(&self, port: u32) -> bool {
        let PortOf { link, peer, owner, .. } = self.ports[port as usize].of;
        let is_up = |owner: Owner| match owner {
            Owner::Host(_) => true,
            Owner::Switch(switch) => self.switches[switch as usize].is_up,
        };
        self.links[link as usize].is_up && is_up(owner) && is_up(self.ports[peer as usize].of.owner)
    }

    pub(super) fn change(&mut self, change: Change) {
        let links: Vec<u32> = match change {
            Change::Link { link, is_up } => {
                self.links[link as usize].is_up = is_up;
                vec![link]
            }
            Change::Switch { switch, is_up } => {
                let state = &mut self.switches[switch as usize];
                state.is_up = is_up;
                state.ports.iter().map(|port| self.ports[*port as usize].of.link).collect()
            }
            Change::Reroute => {
                self.routes = None;
                return;
            }
        };
        // Until the reroute the old paths apply.
        if self.routes.is_none() {
            self.routes = Some(Routes::new(&self.neighbours()));
        }
        let convergence = self.config.convergence;
        self.plan_change(self.now.after(picos(convergence)), Change::Reroute);
        for link in links {
            for port in self.links[link as usize].ends {
                self.reset(port);
            }
        }
    }

    /// The link of a port has gone down or come up: clears its queues and pauses.
    pub(super) fn reset(&mut self, port: u32) {
        self.ports[port as usize].link.carries = self.is_up(port);
        for class in 0..8 {
            self.drop_queue(port, class, Loss::Unroutable);
            let state = &mut self.ports[port as usize];
            state.resume(self.now, class);
            (state.to_pause, state.to_resume, state.stormy) = (0, 0, 0);
            if let Owner::Switch(switch) = state.of.owner {
                *self.switches[switch as usize].buffer.renewal(state.of.number, class) = None;
            }
        }
    }

    pub(super) fn drop_queue(&mut self, port: u32, class: u8, loss: Loss) {
        loop {
            let (frames, now) = (&self.frames, self.now);
            let length = |frame: u32| u64::from(frames.at(frame).len);
            let Some(frame) = self.ports[port as usize].remove(now, class, length) else { return };
            match self.ports[port as usize].of.owner {
                Owner::Host(host) => self.left(host),
                Owner::Switch(switch) => self.release(switch, frame),
            }
            self.discard(frame, loss);
        }
    }
}
