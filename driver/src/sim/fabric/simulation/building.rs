//! Construction: hosts, switches, and links between them.

use super::*;

impl Simulation {
    pub(in super::super) fn add_host(&mut self, config: HostConfig, addresses: Vec<IpAddr>) -> u32 {
        self.hosts.push(Host {
            config,
            addresses,
            port: None,
            is_open: false,
            received: VecDeque::new(),
            rx_dropped: 0,
            waiting: 0,
            wants_room: false,
            is_woken: false,
        });
        self.hosts.len() as u32 - 1
    }

    pub(in super::super) fn add_switch(&mut self, config: SwitchConfig) -> u32 {
        let number = self.switches.len() as u32;
        let buffer = Buffer::new(config.buffer, config.pfc);
        self.seeds.push(mix(self.seed ^ mix(number.into())));
        self.switches.push(Switch { config, ports: Vec::new(), buffer, is_up: true });
        number
    }

    /// Both ends have room for a port.
    pub(in super::super) fn add_link(&mut self, config: LinkConfig, rate: u64, ends: [Owner; 2]) -> u32 {
        let (link, first) = (self.links.len() as u32, self.ports.len() as u32);
        // The number of existing links between the two. A host has at most one.
        let parallel = match ends[0] {
            Owner::Host(_) => 0,
            Owner::Switch(switch) => {
                let owner = |port: u32| self.ports[port as usize].of.owner;
                let peers = self.switches[switch as usize].ports.iter();
                let peers = peers.map(|port| owner(self.ports[*port as usize].of.peer));
                peers.filter(|peer| *peer == ends[1]).count() as u64
            }
        };
        for (end, owner) in (0..).zip(ends) {
            let (port, peer) = (first + end, first + 1 - end);
            let needed = self.headroom(&config, rate, ends[1 - end as usize]);
            let (number, scheduling) = match owner {
                Owner::Host(host) => {
                    let host = &mut self.hosts[host as usize];
                    host.port = Some(port);
                    (0, host.config.scheduling)
                }
                Owner::Switch(switch) => {
                    let switch = &mut self.switches[switch as usize];
                    let number = switch.ports.len() as u32;
                    switch.ports.push(port);
                    switch.buffer.add_port(needed);
                    (number, switch.config.scheduling)
                }
            };
            // From the ends of the link only, so that the rest of the fabric does not affect it.
            let identity = mix(mix(owner.key()) ^ ends[1 - end as usize].key() ^ parallel << 48);
            let random = Random::new(mix(self.seed ^ identity));
            let max_frame = self.config.mtu as usize + FRAME_OVERHEAD;
            let of = PortOf { owner, number, link, peer, identity };
            let line = Line { rate, delay: picos(config.delay), impairs: config.impairs(), carries: true };
            self.ports.push(Port::new(of, line, &scheduling, max_frame, random));
        }
        self.links.push(Link { config, ends: [first, first + 1], is_up: true });
        for port in [first, first + 1] {
            self.ports[port as usize].link.carries = self.is_up(port);
        }
        self.routes = None;
        link
    }

    /// The bytes that still arrive over a link after a switch has decided to pause its other end: while a PFC frame waits
    /// for a frame in transmission, propagates and takes effect, a frame that has just started then, and the bytes in
    /// flight.
    pub(super) fn headroom(&self, link: &LinkConfig, rate: u64, other: Owner) -> u64 {
        let reaction = match other {
            Owner::Host(host) => self.hosts[host as usize].config.reaction,
            Owner::Switch(switch) => self.switches[switch as usize].config.reaction,
        };
        let time = 2 * (link.delay + link.jitter) + reaction;
        let on_the_way = (time.as_nanos() * u128::from(rate)).div_ceil(8_000_000_000) as u64;
        let frame = u64::from(self.config.mtu) + FRAME_OVERHEAD as u64 + u64::from(self.config.overhead);
        on_the_way + 3 * frame + pfc::LENGTH as u64 + u64::from(self.config.overhead)
    }
}
