//! A port without an engine: sends frames of known contents, and returns received frames unmodified.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use ferroce::driver::{Layer, PacketDriver};
use ferroce::{Clock, MacAddr, PKey};

use super::far::MAX_ROUNDS;
use super::message::{Hello, Probe, QPNS};
use super::probe::{self, Lookout};
use crate::endpoint::Interrupt;
use crate::failure::Failure;

/// Time for a neighbour to answer ARP or neighbour discovery; the kernel gives up after 3 s.
pub(super) const RESOLVE_TIME: Duration = Duration::from_secs(5);
/// Probes are sent in pairs, which shows whether the second overtakes the first, with a pause after each pair, so that
/// no queue on the path overflows.
const PAUSE: Duration = Duration::from_millis(2);
/// The most bursts that are received in one call.
const MAX_BURSTS: usize = 256;
/// The longest time that a probe may be in flight.
const PATIENCE: Duration = Duration::from_millis(500);

pub(super) struct ProbePort {
    pub(super) driver: Box<dyn PacketDriver>,
    clock: Clock,
    token: u64,
    pkey: PKey,
}

impl ProbePort {
    pub(super) fn new(driver: Box<dyn PacketDriver>, pkey: PKey) -> ProbePort {
        let since = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        let token = since.as_nanos() as u64 ^ u64::from(std::process::id()) << 48;
        ProbePort { driver, clock: Clock::start(), token, pkey }
    }

    pub(super) fn is_socket(&self) -> bool {
        matches!(self.driver.capabilities().layer, Layer::Ip(_))
    }

    /// The description for the other end.
    pub(super) fn hello(&self, address: IpAddr, to: IpAddr) -> Hello {
        let capabilities = self.driver.capabilities();
        Hello {
            address,
            to,
            addresses: capabilities.addresses.clone(),
            interface: capabilities.interface.clone(),
            mtu: capabilities.mtu,
            driver: capabilities.driver.to_owned(),
            token: self.token,
            source_port: match capabilities.layer {
                Layer::Ip(terms) => terms.source_port,
                Layer::Ethernet => SOURCE_PORT,
            },
            is_socket: self.is_socket(),
            pkey: self.pkey.0,
            rounds: MAX_ROUNDS,
            qpn: probe_qpn(capabilities.qpns),
        }
    }

    /// Sends probes from one of the port's addresses, `copies` times each, and receives packets meanwhile.
    pub(super) fn send(
        &mut self,
        from: &Hello,
        to: &Hello,
        probes: &[Probe],
        copies: u8,
    ) -> Result<(), Failure> {
        let capabilities = self.driver.capabilities();
        let (own, mtu) = (MacAddr(capabilities.mac), capabilities.mtu);
        let macs = [own, MacAddr(self.driver.resolve_blocking(to.address, RESOLVE_TIME)?)];
        let all = (0..copies).flat_map(|_| probes).filter(|probe| probe.length <= mtu);
        for (place, probe) in (0..).zip(all) {
            let mut next = Some(probe);
            let mut source =
                |buffer: &mut [u8]| next.take().and_then(|p| probe::write(buffer, from, to, macs, p, place));
            self.driver.tx_burst(self.clock.now(), &mut source)?;
            self.receive(&mut |_| {})?;
            if place % 2 == 1 {
                std::thread::sleep(PAUSE);
            }
        }
        Ok(())
    }

    /// Passes received frames to `sink`; a bounded number, in case others send without end.
    pub(super) fn receive(&mut self, sink: &mut dyn FnMut(&[u8])) -> Result<(), Failure> {
        let mut take = |frame: &[u8]| sink(frame);
        for _ in 0..MAX_BURSTS {
            // A socket returns 0 once after a burst.
            if self.driver.rx_burst(self.clock.now(), &mut take)? == 0 {
                break;
            }
        }
        Ok(())
    }

    /// Waits for a challenge and returns its token, if one arrives.
    pub(super) fn challenge(&mut self, interrupt: &Interrupt) -> Result<Option<u64>, Failure> {
        let (deadline, is_socket) = (Instant::now() + PATIENCE, self.is_socket());
        let mut token = None;
        loop {
            interrupt.check()?;
            self.receive(&mut |frame| token = token.or_else(|| probe::challenge(frame, is_socket)))?;
            if token.is_some() || Instant::now() > deadline {
                return Ok(token);
            }
            self.driver.wait(Duration::from_millis(2))?;
        }
    }

    /// Receives until all probes have arrived, or can't arrive any more.
    pub(super) fn collect(&mut self, lookout: &mut Lookout, interrupt: &Interrupt) -> Result<(), Failure> {
        let deadline = Instant::now() + PATIENCE;
        while !lookout.is_complete() && Instant::now() < deadline {
            interrupt.check()?;
            self.receive(&mut |frame| lookout.frame(frame))?;
            self.driver.wait(Duration::from_millis(2))?;
        }
        self.receive(&mut |frame| lookout.frame(frame))
    }
}

/// The last of those queue pair numbers whose packets are steered to this port.
fn probe_qpn((rest, divisor): (u32, u32)) -> u32 {
    let last = *QPNS.end();
    last - (last - rest) % divisor
}

/// As that of a queue pair; a socket has its own.
const SOURCE_PORT: u16 = 0xd0c7;
