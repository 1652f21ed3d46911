//! Counters, and their export.

use ferroce_driver::Stats;
use ferroce_driver::rnic::PortCounters;

use super::Hardware;
use crate::telemetry::counters::{Counter, Counters};
use crate::telemetry::exporter::Exporter;
use crate::telemetry::metrics::Metrics;
use crate::verbs::{Error, QpState};

/// Passes the counters of a port that this crate has too to `tell`.
pub(super) fn read(card: &PortCounters, mut tell: impl FnMut(Counter, u64)) {
    card.read(|place, value| {
        if let Some(counter) = Counter::all().nth(place) {
            tell(counter, value);
        }
    });
}

impl Hardware {
    /// The card moves the frames, and does not report their number.
    pub(crate) fn driver_stats(&self) -> Stats {
        Stats::default()
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Reads the kernel's counters, which cover all users of the port.
    pub(super) fn count(&mut self) {
        let Hardware { card_counters, counted_before, counters, .. } = self;
        read(card_counters, |counter, value| {
            counters.set(counter, value.saturating_sub(counted_before.value(counter)));
        });
    }

    pub(crate) fn metrics(&self) -> Metrics {
        let mut metrics = Metrics::new(self.capabilities.driver, &self.capabilities.interface);
        metrics.push_counters(&self.counters);
        let mut by_state = [0; QpState::ALL_BUT_RESET.len() + 1];
        self.qps.iter().for_each(|qp| by_state[qp.state as usize] += 1);
        let states = [QpState::Reset].into_iter().chain(QpState::ALL_BUT_RESET);
        metrics.push_objects(
            &[
                ("pd", self.pds.usage()),
                ("mr", self.named.mrs.usage()),
                ("mw", self.named.mws.usage()),
                ("cq", self.cqs.usage()),
                ("srq", self.srqs.usage()),
                ("ah", self.named.ahs.usage()),
                ("qp", self.qps.usage()),
            ],
            states.map(|state| (state.name(), by_state[state as usize])),
        );
        let peers = self.qps.iter().filter_map(|qp| Some((qp.told.address?.gid, qp.told.path_mtu?)));
        metrics.push_port(&self.port, peers);
        metrics.push_program(&self.program_counters);
        metrics
    }

    pub(crate) fn export(&mut self) -> Result<(), Error> {
        self.exporter = Some(Exporter::open(&self.capabilities.interface)?);
        Ok(())
    }
}
