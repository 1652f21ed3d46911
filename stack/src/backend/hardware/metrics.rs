//! What is counted, and showing it to others.

use ferroce_driver::Stats;

use super::Hardware;
use crate::telemetry::counters::Counters;
use crate::telemetry::exporter::Exporter;
use crate::telemetry::metrics::Metrics;
use crate::verbs::{Error, QpState};

impl Hardware {
    /// The card moves the frames, and tells nobody how many.
    pub(crate) fn driver_stats(&self) -> Stats {
        Stats::default()
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.counters
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
                ("mr", self.mrs.usage()),
                ("mw", self.mws.usage()),
                ("cq", self.cqs.usage()),
                ("srq", self.srqs.usage()),
                ("ah", self.ahs.usage()),
                ("qp", self.qps.usage()),
            ],
            states.map(|state| (state.name(), by_state[state as usize])),
        );
        metrics
    }

    pub(crate) fn export(&mut self) -> Result<(), Error> {
        self.exporter = Some(Exporter::open(&self.capabilities.interface)?);
        Ok(())
    }
}
