//! Selection of the socket of an address that receives a packet.
//!
//! All sockets of an address are one SO_REUSEPORT group of the kernel. A classic BPF program selects the socket by the
//! destination QPN; it needs no privilege. Place 0 of the group is the socket of QP1, the following places are the
//! slots ([`slots`]). While only one context has the address, one socket receives everything, including QP1.
//!
//! The program sees only the first packet of those that a sender on the same host has sent at once (UDP GSO), and of
//! those that the kernel has aggregated (UDP GRO). All of them are delivered to the socket of the first one, so none of
//! them may be for another socket. A sender must be able to ensure this. So the QPNs of all slots except slot 0 are
//! odd, the QPNs of slot 0 and of a single context are even, and packets to different odd QPNs are never sent at once.
//! (`rdma_rxe` and cards use both odd and even QPNs; neither of them processes several packets at once.) Contexts that
//! share an address disable aggregation: the kernel may aggregate packets for several queue pairs.
//!
//! MADs are sent by a separate socket on the same address and port, the first one in the group. While several contexts
//! have the address, it is also the socket of QP1. It is bound without SO_REUSEPORT, so if several processes open an
//! address at the same time, only one gets it. Then SO_REUSEPORT is set, and admits further sockets of the same user.
//!
//! [`slots`]: crate::slots

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{debug, info, warn};

use super::receive::Receiver;
use super::{LocalAddress, UdpConfig, header, os_error, refusal, socket};
use crate::holder::{Holder, sockets_on};
use crate::netlink::Netlink;
use crate::slots::owner::{self, NUMBERS, SHARED};
use crate::slots::{Group, Parts, Resource};
use crate::{Error, Refusal, Stats};

/// The place of the socket of QP1 in the kernel's group.
const QP1_PLACE: u32 = 0;

/// Kind of mail: an ICMP report about a packet that this slot has sent.
pub(super) const REFUSED: u8 = b'R';

/// The sockets of an address.
pub(super) struct Sockets {
    config: UdpConfig,
    place: LocalAddress,
    /// For packets to QP1 while there are several processes.
    receiver: Receiver,
    /// The number of ferroce's sockets, to detect foreign ones.
    count: usize,
    was_shared: bool,
    /// Whether the kernel aggregates packets received from the interface.
    puts_together: bool,
    /// Whether the port of the slot receives its packets elsewhere, so that packets from this socket are mail.
    is_aside: bool,
    /// Packets that this socket has dropped so far, also for previous owners of the slot; `None` before the first
    /// check.
    aside_dropped: Option<u64>,
}

/// The only slot for a port that receives its packets elsewhere.
const ASIDE: usize = 0;
/// The most datagrams of QP1 received at a time.
const MADS_MAX: usize = 256;
/// The address of a process that has just ended may be in use a moment longer than its name.
const CLAIM_PATIENCE: Duration = Duration::from_millis(50);

impl Sockets {
    pub(super) fn new(config: UdpConfig, place: LocalAddress) -> io::Result<Sockets> {
        let receiver = Receiver::new()?;
        let puts_together = Netlink::open().is_ok_and(|netlink| netlink.puts_together(&place.interface));
        let (count, was_shared, is_aside, aside_dropped) = (0, false, false, None);
        Ok(Sockets { config, place, receiver, count, was_shared, puts_together, is_aside, aside_dropped })
    }

    /// For slot 0 only, of a port that does not poll its socket.
    #[cfg(feature = "af_xdp")]
    pub(super) fn aside(self) -> Sockets {
        Sockets { is_aside: true, ..self }
    }

    fn os(&self, what: &'static str) -> impl Fn(io::Error) -> Error {
        let place = self.place.clone();
        move |source| os_error(what, &place, source)
    }

    /// Refuses foreign sockets on the address: they would have a place in the kernel's group.
    fn check_places(&self) -> Result<(), Error> {
        let mut all = sockets_on(self.config.address, &self.place.interface)?;
        all.retain(|socket| socket.address == self.config.address);
        if all.len() <= self.count {
            return Ok(());
        }
        let reason = format!(
            "{} sockets are on its port 4791 and {} of them are ferroce's, so the kernel's order of sockets is not \
             known; stop the program that has the others (`ss -lunp sport = 4791`)",
            all.len(),
            self.count
        );
        Err(Error::Sharing { what: format!("{}", self.config.address), reason })
    }

    /// Packets that the socket of the port in slot 0 had no room for, since the last call.
    fn lost_aside(&mut self, group: &Group) -> u64 {
        let (true, Some(before)) = (self.is_aside, self.aside_dropped) else { return 0 };
        let socket = group.parts().descriptors.get(ASIDE).cloned();
        let total = socket.and_then(|socket| socket::dropped(socket.as_fd()).ok());
        let total = total.unwrap_or(before).max(before);
        self.aside_dropped = Some(total);
        total - before
    }
}

impl Resource for Sockets {
    fn takes(&self, slot: usize) -> Result<(), Error> {
        if self.is_aside && slot != ASIDE {
            return Err(Holder::in_the_way(self.config.address, &self.place.interface));
        }
        Ok(())
    }

    fn found(&mut self) -> Result<Vec<OwnedFd>, Error> {
        let deadline = Instant::now() + CLAIM_PATIENCE;
        let qp1 = loop {
            match socket::claim(&self.config, &self.place) {
                Err(Error::PortInUse { .. }) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                claimed => break claimed?,
            }
        };
        refusal::listen(&qp1, self.config.address).map_err(self.os("setting up the UDP socket"))?;
        Ok(vec![qp1])
    }

    fn add(&mut self, parts: &Parts) -> Result<OwnedFd, Error> {
        let added = socket::join(&self.config, &self.place)?;
        refusal::listen(&added, self.config.address).map_err(self.os("setting up the UDP socket"))?;
        self.count = parts.common.len() + parts.descriptors.len() + 1;
        self.check_places()?;
        Ok(added)
    }

    fn renew(&mut self, socket: BorrowedFd<'_>) -> Result<(), Error> {
        socket::discard(socket);
        socket::configure(socket, &self.config, &self.place)?;
        socket::hear(socket, true).map_err(self.os("taking over a UDP socket"))
    }

    /// Peers continue to send for a while to a process that has ended, and nothing receives these packets.
    fn retire(&mut self, socket: BorrowedFd<'_>) {
        if let Err(error) = socket::hear(socket, false) {
            warn!("packets to an ended process on {} accumulate: {error}", self.config.address);
        }
        socket::discard(socket);
    }

    fn changed(&mut self, parts: &Parts, alive: u64, own: u64) {
        let is_shared = alive.count_ones() > 1;
        let Some(first) = parts.descriptors.first() else { return };
        if self.is_aside && self.aside_dropped.is_none() {
            self.aside_dropped = socket::dropped(first.as_fd()).ok();
        }
        let alone = (!is_shared).then(|| alive.trailing_zeros() as usize);
        // The kernel looks up a flow's socket before it aggregates packets, and checks any socket of the group. If it
        // does not aggregate, the only packets delivered together are those that a sender on this host has sent at
        // once. They are for one socket, and its owner decides whether they are divided.
        let is_off = is_shared && self.puts_together;
        let aggregation = self.config.aggregation && !is_off;
        let slots = parts.descriptors.iter().enumerate();
        let meant = slots.filter(|(slot, _)| is_off || own >> slot & 1 == 1).map(|(_, socket)| socket);
        let mut all = parts.common.iter().chain(meant);
        let set = all.try_for_each(|socket| socket::set_aggregation(socket.as_fd(), aggregation));
        let steered = set.and_then(|()| steer(first.as_fd(), alone));
        if let Err(error) = steered {
            warn!("choosing sockets on {} by queue pair number: {error}", self.config.address);
        }
        if is_shared != self.was_shared {
            self.was_shared = is_shared;
            let address = self.config.address;
            match (is_shared, self.config.aggregation && self.puts_together) {
                (true, true) => info!("{address} is shared by several processes now: no aggregation"),
                (true, false) => debug!("{address} is shared by several processes now"),
                (false, true) => info!("{address} is used only by this process now: aggregation"),
                (false, false) => debug!("{address} is used only by this process now"),
            }
        }
    }

    /// Also while this process is alone, when no packets should arrive there: another process may have joined and ended
    /// meanwhile.
    fn served(&self, parts: &Parts, is_first: bool) -> Vec<Arc<OwnedFd>> {
        let qp1 = parts.common.first().filter(|_| is_first);
        let aside = parts.descriptors.get(ASIDE).filter(|_| self.is_aside);
        // ICMP reports cause a wake-up without being requested.
        qp1.into_iter().chain(aside).cloned().collect()
    }

    fn serve(&mut self, group: &Group, socket: BorrowedFd<'_>) {
        // A process that gives up its last slot no longer serves.
        let Some(own) = group.first_own() else { return };
        hand_on_refusals(socket, (group, own), |slot, refusal| {
            if slot.is_some() {
                group.post_or_count((own, own), REFUSED, &refusal.to_bytes());
            }
        });
        let address = self.config.address;
        let len = header::len(address);
        let (mut taken, mut stats) = (0, Stats::default());
        while taken < MADS_MAX {
            let mut deliver = |packet: &[u8]| {
                if let Some(datagram) = packet.get(len..) {
                    owner::post(group, own, datagram, packet);
                }
            };
            match self.receiver.receive(socket, address, &mut deliver, &mut stats) {
                Ok(count) => taken += count.max(1),
                Err(_) => break,
            }
        }
        // The socket of QP1 is shared by all processes: its dropped packets are counted once.
        let qp1 = group.parts().common.first().cloned();
        let full = qp1.and_then(|qp1| socket::dropped(qp1.as_fd()).ok());
        let full = full.map_or(0, |dropped| group.untold(dropped));
        group.lose(own, stats.rx_dropped + full + self.lost_aside(group));
    }
}

/// Takes the ICMP reports from a socket. Passes those for slot `own`, and those without a known owner, to `keep`, and
/// forwards the others to the sender of the packet. Returns whether there were ICMP messages.
pub(super) fn hand_on_refusals(
    socket: BorrowedFd<'_>,
    (group, own): (&Group, usize),
    mut keep: impl FnMut(Option<usize>, Refusal),
) -> bool {
    let mut any = false;
    for word in std::iter::from_fn(|| refusal::take(socket)).take(WORDS_MAX) {
        any |= word.came;
        let Some(refusal) = word.refusal else { continue };
        match owner::sender(&refusal.quoted) {
            Some(slot) if slot != own => group.post_or_count((own, slot), REFUSED, &refusal.to_bytes()),
            slot => keep(slot, refusal),
        }
    }
    any
}

/// The most reports taken from a socket at once: any host can send ICMP messages, and a poll must end.
const WORDS_MAX: usize = 256;

/// Makes the kernel select among the sockets that share an address with this one. The slot that is `alone` receives
/// everything.
fn steer(socket: BorrowedFd<'_>, alone: Option<usize>) -> io::Result<()> {
    /// Bytes 4 to 7 of the BTH: one reserved byte and three of the destination QPN.
    const DEST_QPN: u32 = 4;
    const A: u32 = 0x10;
    let step = |code: u32, k, jt, jf| libc::sock_filter { code: code as u16, jt, jf, k };
    let run = |code, k| step(code, k, 0, 0);
    let everything = [run(libc::BPF_RET | libc::BPF_K, alone.map_or(0, place_of))];
    // The program sees packets from the end of the UDP header on. A packet that is too short is delivered to place 0.
    let by_qpn = [
        run(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, DEST_QPN),
        run(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0x00ff_ffff),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, 0, 1),
        run(libc::BPF_RET | libc::BPF_K, QP1_PLACE),
        step(libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K, SHARED, 1, 0),
        run(libc::BPF_RET | libc::BPF_K, place_of(0)),
        run(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, NUMBERS - 1),
        run(libc::BPF_ALU | libc::BPF_RSH | libc::BPF_K, 1),
        run(libc::BPF_ALU | libc::BPF_ADD | libc::BPF_K, place_of(0)),
        run(libc::BPF_RET | A, 0),
    ];
    let program = if alone.is_some() { &everything[..] } else { &by_qpn[..] };
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_ptr().cast_mut() };
    socket::set_option(socket, libc::SOL_SOCKET, libc::SO_ATTACH_REUSEPORT_CBPF, program)
}

/// The place of a slot's socket.
fn place_of(slot: usize) -> u32 {
    QP1_PLACE + 1 + slot as u32
}
