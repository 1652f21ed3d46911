//! A port without an engine: sends frames of known contents, and returns received frames as they are.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use ferroce::driver::{Layer, PacketDriver};
use ferroce::{Clock, MacAddr, PKey};

use super::far::MAX_ROUNDS;
use super::message::{Hello, Probe, QPNS};
use super::probe::{self, Lookout};
use crate::endpoint::Interrupt;
use crate::failure::Failure;

/// How long a neighbour has to answer ARP or neighbour discovery; the kernel gives it up after 3 s.
pub(super) const RESOLVE_TIME: Duration = Duration::from_secs(5);
/// Probes leave in pairs, which show whether the second overtakes the first, and with a pause behind each, so that no queue on
/// the way overflows.
const PAUSE: Duration = Duration::from_millis(2);
/// Bursts that are taken at a time.
const MAX_BURSTS: usize = 256;
/// How long probes may be under way.
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

    /// What is told to the other end.
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

    /// Sends probes from one of the port's addresses, each so many times, and takes what comes meanwhile.
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

    /// Hands over what has come, or some of it where others send without end.
    pub(super) fn receive(&mut self, sink: &mut dyn FnMut(&[u8])) -> Result<(), Failure> {
        let mut take = |frame: &[u8]| sink(frame);
        for _ in 0..MAX_BURSTS {
            // A socket looks for none once behind a burst.
            if self.driver.rx_burst(self.clock.now(), &mut take)? == 0 {
                break;
            }
        }
        Ok(())
    }

    /// The token of the challenge that comes, if one does.
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

    /// Takes what comes until it is all there, or can't come any more.
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

/// The last of those numbers of a port by which packets come to it.
fn probe_qpn((rest, divisor): (u32, u32)) -> u32 {
    let last = *QPNS.end();
    last - (last - rest) % divisor
}

/// As of a queue pair; a socket has its own.
const SOURCE_PORT: u16 = 0xd0c7;
