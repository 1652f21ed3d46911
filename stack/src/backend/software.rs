//! The verbs in software: the protocol engine over a packet driver; opening, a poll, the end.
//!
//! - `queue_pairs.rs`, `transitions.rs`, `queues.rs`, `memory.rs`, `datagrams.rs`, `connections.rs`, `events.rs`,
//!   `port.rs`, `waiting.rs`, `metrics.rs`: the verbs, which check handles and arguments and then call the engine
//! - `engine.rs`: demultiplexing, turns, timers: frames in, frames out
//! - `next_hops.rs`: next hops that are being resolved, and what waits for them

mod connections;
mod datagrams;
mod engine;
mod events;
mod memory;
mod metrics;
mod next_hops;
mod port;
mod queue_pairs;
mod queues;
mod transitions;
mod waiting;

use ferroce_driver::{Layer, Nanos, PacketDriver, Readiness};
use ferroce_wire::Psn;
use rand_chacha::rand_core::RngCore;

use crate::engine::cq::CompletionQueue;
use crate::engine::key_table::keys_needed;
use crate::engine::qp::QueuePair;
use crate::engine::shared::Shared;
use crate::engine::slab::Slab;
use crate::engine::srq::SharedReceiveQueue;
use crate::telemetry::exporter::Exporter;
use crate::telemetry::metrics::ProgramCounters;
use crate::verbs::{Config, CongestionControl, Cq, Error, Feature, Pd, Port, Qp, Srq};
use engine::Engine;

/// A packet driver, the engine on it, and what waits for both.
pub(crate) struct Software {
    driver: Box<dyn PacketDriver>,
    engine: Engine,
    pds: Slab<()>,
    exporter: Option<Exporter>,
    pub(crate) program_counters: ProgramCounters,
    readiness: Readiness,
    /// A thread waits, or has waited, for `readiness`.
    armed: bool,
    /// For queue pairs that set none.
    congestion: CongestionControl,
    window: u32,
    line_rate: Option<u64>,
}

impl Software {
    pub(crate) fn open(driver: Box<dyn PacketDriver>, config: &Config) -> Result<Software, Error> {
        let capabilities = driver.capabilities();
        config.check()?;
        let link_header = if capabilities.layer == Layer::Ethernet { ETHERNET_HEADER_MAX } else { 0 };
        if link_header == 0 && config.roce_v1 {
            return Err(Error::Unsupported(Feature::RoceV1));
        }
        let needed = capabilities.mtu as usize + link_header;
        if capabilities.max_frame < needed {
            let expected = format!("at least {needed} for an MTU of {}", capabilities.mtu);
            return Err(Error::invalid("max_frame of the driver", capabilities.max_frame, expected));
        }
        check_qpns(capabilities.qpns, config.max_qps)?;
        let port = Port::new(capabilities, config.roce_v1);
        let readiness = Readiness::new().map_err(|source| Error::waiting(&capabilities.interface, source))?;
        let engine = Engine::new(config, port);
        Ok(Software {
            pds: Slab::new(config.max_pds, engine.shared.generation),
            engine,
            driver,
            exporter: None,
            program_counters: ProgramCounters::default(),
            readiness,
            armed: false,
            congestion: config.congestion,
            window: config.window,
            line_rate: config.line_rate,
        })
    }

    pub(crate) fn random_psn(&mut self) -> Psn {
        Psn::new(self.engine.shared.rng.next_u32())
    }

    pub(crate) fn poll(&mut self, now: Nanos) -> Result<usize, Error> {
        if self.armed {
            self.end_wait()?;
        }
        super::check_time(now)?;
        let Software { driver, engine, .. } = self;
        let now = engine.begin(now);
        let received = driver.rx_burst(now, engine)?;
        engine.fire_timers();
        if engine.shared.staging.is_used() {
            engine.copy();
        }
        if engine.next_hops.is_due(now) {
            engine.look_for_next_hop(&mut **driver);
        }
        engine.hear_refusals(&mut **driver);
        let sent = driver.tx_burst(now, engine)?;
        if self.exporter.as_ref().is_some_and(|exporter| exporter.is_due(now))
            && let Some(mut exporter) = self.exporter.take()
        {
            exporter.serve(now, || self.metrics());
            self.exporter = Some(exporter);
        }
        Ok(received + sent)
    }

    /// Sends the ACK that `qp` owes, or all ACKs. The application has seen what they acknowledge, and may end now, but its
    /// peer still needs them.
    fn send_owed(&mut self, qp: Option<Qp>) {
        let Software { driver, engine, .. } = self;
        engine.shared.hurry = true;
        // Twice: the first time an ACK may wait for requests.
        for _ in 0..2 {
            if !engine.schedule_acks(qp) {
                break;
            }
            engine.begin(engine.shared.now);
            if let Err(error) = driver.tx_burst(engine.shared.now, engine) {
                // The next poll reports a port that is gone, too.
                tracing::debug!("due ACKs are not sent: {error}");
            }
        }
        engine.shared.hurry = false;
    }

    fn check_pd(&self, pd: Pd) -> Result<(), Error> {
        self.pds.get(pd.0).copied().ok_or_else(|| Error::invalid_handle("PD", pd.0))
    }

    fn cq(&mut self, cq: Cq) -> Result<&mut CompletionQueue, Error> {
        self.engine.shared.cqs.get_mut(cq.0).ok_or_else(|| Error::invalid_handle("CQ", cq.0))
    }

    fn srq(&mut self, srq: Srq) -> Result<&mut SharedReceiveQueue, Error> {
        self.engine.shared.srqs.get_mut(srq.0).ok_or_else(|| Error::invalid_handle("SRQ", srq.0))
    }

    #[inline(always)]
    fn qp(&mut self, qp: Qp) -> Result<(&mut QueuePair, &mut Shared), Error> {
        let Engine { qps, shared, .. } = &mut self.engine;
        let queue_pair = qps.get_mut(qp.0).ok_or_else(|| Error::invalid_handle("QP", qp.0))?;
        Ok((queue_pair, shared))
    }
}

impl Drop for Software {
    fn drop(&mut self) {
        // A peer that is notified of the end before it has its ACKs considers its messages lost.
        self.send_owed(None);
        while self.engine.cm_if_used().is_some_and(|(cm, mut verbs)| cm.disconnect_some(&mut verbs)) {
            let Software { driver, engine, .. } = self;
            if !matches!(driver.tx_burst(engine.shared.now, engine), Ok(1..)) {
                tracing::debug!("some connections end without a DREQ: the port accepts no more frames");
                break;
            }
        }
    }
}

/// Ethernet and one 802.1Q tag.
const ETHERNET_HEADER_MAX: usize = 18;

/// Queue pair numbers are drawn from those that the driver assigns.
fn check_qpns((rest, divisor): (u32, u32), max_qps: u32) -> Result<(), Error> {
    if rest >= divisor {
        let expected = "(rest, divisor), the rest below the divisor";
        return Err(Error::invalid("qpns of the driver", format_args!("({rest}, {divisor})"), expected));
    }
    let numbers = (1u64 << 24) / u64::from(divisor);
    if numbers < keys_needed(max_qps) {
        let expected = format!(
            "fewer queue pairs: this driver leaves the context every {divisor}th number, {numbers} in all"
        );
        return Err(Error::invalid("max_qps", max_qps, expected));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::check_qpns;

    /// Without this check there would be a division by zero, or an endless search for numbers.
    #[test]
    fn a_driver_leaves_enough_queue_pair_numbers() {
        let refused = |qpns, max_qps| check_qpns(qpns, max_qps).map_err(|error| error.to_string());
        assert_eq!(refused((0, 2), 1 << 20), Ok(()));
        assert_eq!(refused((511, 512), 256), Ok(()));
        for qpns in [(5, 0), (9, 4), (4, 4)] {
            let (rest, divisor) = qpns;
            let expected = "(rest, divisor), the rest below the divisor";
            let message = format!("qpns of the driver = ({rest}, {divisor}): {expected}");
            assert_eq!(refused(qpns, 1), Err(message));
        }
        let message = "max_qps = 20000: fewer queue pairs: this driver leaves the context every 512th number, 32768 in all";
        assert_eq!(refused((511, 512), 20_000), Err(message.to_owned()));
    }
}
